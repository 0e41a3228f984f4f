"""``make bench``: every figure that the processor must reach, measured, beside what was asked and what was budgeted.

    python -m tools.bench                        # every row but the fresh clone
    python -m tools.bench --row masked-wide      # one row, or several
    python -m tools.bench --quick                # small cases, a few minutes, nothing written
    python -m tools.bench --install              # also a fresh clone: demo, warm demo, tests
    python -m tools.bench --fpga                 # also place and route again (many minutes)

``tools/cases.toml`` says on what each row is measured, :mod:`tools.bench.rows` what it must reach. Results go to
``docs/results.json`` and ``docs/results.md``; a row that is not run keeps its last result.
"""
