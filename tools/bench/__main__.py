"""Run rows of the bench and write what they give."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from dtp.errors import DtpError, MissingToolError
from tools.bench import cases as case_file
from tools.bench import install, report
from tools.bench.measured import Bench, Measured
from tools.bench.rows import ROWS, Row

OK, MISSED, BAD_INPUT, MISSING_TOOL = 0, 1, 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every row that was run is met, 1 when one is not, 2 for bad input, 3 for a missing tool."""
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description="Measure what the processor must reach.")
    parser.add_argument("--row", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="small cases alone; nothing is written")
    parser.add_argument("--install", action="store_true", help="also a fresh clone: demo and tests")
    parser.add_argument("--fpga", action="store_true", help="place and route again")
    given = parser.parse_args(arguments)
    try:
        return run(chosen_rows(given.row, given.install, given.quick), quick=given.quick, fpga=given.fpga)
    except MissingToolError as error:
        print(f"bench: {error}", file=sys.stderr)
        return MISSING_TOOL
    except DtpError as error:
        print(f"bench: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130


def chosen_rows(names: Sequence[str] | None, with_install: bool, quick: bool) -> list[Row]:
    """The rows of a call, in the order of the table.

    Raises:
        DtpError: a row without a case.
    """
    for row in ROWS:
        if not case_file.of_row(row.name):
            raise DtpError(f"row {row.name} must have a case in {case_file.CASES.name}, not none")
    if names:
        return [row for row in ROWS if row.name in names]
    rows = [row for row in ROWS if with_install or not row.install]
    return [row for row in rows if case_file.of_row(row.name, quick)]


def run(rows: Sequence[Row], *, quick: bool = False, fpga: bool = False) -> int:
    """Measure the rows one after the other; each is written as soon as it is there."""
    console = Console(highlight=False)
    results = report.load()
    missed = False
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    errors = Console(stderr=True)
    with Bars(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bars:
        task = bars.add_task("starting", total=None)

        def show(what: str, fraction: float | None) -> None:
            bars.update(
                task, description=escape(what), total=None if fraction is None else 1.0, completed=fraction or 0.0
            )

        bench = Bench(quick=quick, run_fpga=fpga, progress=show)
        try:
            for row in rows:
                show(row.name, None)
                begin = time.monotonic()
                measured = measure(bench, row)
                seconds = time.monotonic() - begin
                missed = missed or measured.met is False
                word = {True: "[green]met[/]", False: "[red]MISSED[/]", None: "–"}[measured.met]
                line = f"{row.name}: {escape(measured.text)} ({row.reach}) {word}, {seconds:.0f} s"
                bars.console.print(line, soft_wrap=True)
                for note in measured.notes:
                    bars.console.print(f"    {escape(note)}", soft_wrap=True)
                results[row.name] = report.result_of(row, measured, seconds)
                if not quick:
                    report.save(results)
        finally:
            bench.close()
            install.remove_clone()
    table = Table(title="Bench", title_justify="left")
    for name in ("row", "reach", "measured", "met"):
        table.add_column(name)
    for row in rows:
        found = results[row.name]
        met = {True: "[green]yes[/]", False: "[red]no[/]", None: "–"}[found.met]
        table.add_row(row.name, row.reach, escape(found.measured), met)
    console.print(table)
    if not quick:
        from tools import docs

        docs.refresh()
        console.print("written: docs/results.md, docs/results.json")
    return MISSED if missed else OK


def measure(bench: Bench, row: Row) -> Measured:
    """A row's outcome; one that breaks is missed, and says why, so that the others are still measured."""
    from sim.bench import SimulationError, StreamFault

    try:
        return row.measure(bench, case_file.of_row(row.name, bench.quick))
    except (SimulationError, StreamFault) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return Measured(f"failed: {lines[0]}", False, {}, tuple(lines[-1:]))


if __name__ == "__main__":
    sys.exit(main())
