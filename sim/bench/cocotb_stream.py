"""Runs inside the simulator: starts the clock, sleeps until the feeder is finished, judges what it saw.

The clock is driven by the simulator interface itself, so that Python does nothing while the processor works.
``tick`` is the clock itself, or, in burst mode, each of its changes makes many clock cycles.
"""

from __future__ import annotations

import time
from pathlib import Path

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import RisingEdge, with_timeout

PERIOD_NS = 10


@cocotb.test()
async def stream(dut) -> None:
    """The feeder finishes in time, without an extra beat and without a beat that changed while it waited."""
    bound = int(cocotb.plusargs["timeout"]) + 16
    begin = time.perf_counter()
    Clock(dut.tick, PERIOD_NS, unit="ns", impl="gpi").start()
    await with_timeout(RisingEdge(dut.finished), bound * PERIOD_NS, "ns")
    wall_s = time.perf_counter() - begin
    Path(str(cocotb.plusargs["wall"])).write_text(f"wall_s {wall_s:.9f}\n", encoding="ascii")
    assert dut.finished.value == 1
    assert dut.timed_out.value == 0, "timed out"
    assert dut.violated.value == 0, "an output beat changed before it was taken"
    assert dut.extra.value == 0, "output beats after the last packet"
