"""``python -m sim.bench.cocotb_runner CALL.json``: one call of cocotb's runner in a process of its own.

The runner reads and changes the environment, prints, and calls ``sys.exit``; a process of its own keeps that
from the caller.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cocotb_tools.runner import get_runner


def main(argv: list[str]) -> None:
    call = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    try:
        getattr(get_runner("verilator"), call["verb"])(**call["arguments"])
    except RuntimeError as error:
        # A command of the runner failed and has said why.
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
