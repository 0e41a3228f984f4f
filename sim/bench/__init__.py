"""The hardware as a function: one job in, one result out, on a choice of simulators.

    job = StreamJob(beats, timeout_cycles=100_000, sink_stall=0.3, seed=7)
    result = run_stream(Path("top.v"), job)                # cocotb on Verilator
    result = run_stream(component, job)                    # Amaranth's simulator
    result = run_stream(Path("top.v"), job, Backend.BARE)  # plain C++ loop, for its speed

:mod:`sim.bench.channels` does the same for designs with several streams.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

from dtp.errors import DtpError

from .stream import SimulationError, StreamFault, StreamJob, StreamPorts, StreamResult

__all__ = [
    "Backend",
    "SimulationError",
    "StreamFault",
    "StreamJob",
    "StreamPorts",
    "StreamResult",
    "run_stream",
]


class Backend(Enum):
    """What executes the hardware."""

    COCOTB = "cocotb"
    BARE = "bare"
    AMARANTH = "amaranth"


def run_stream(
    dut: Any,
    job: StreamJob,
    backend: Backend | None = None,
    *,
    waves: Path | None = None,
    cache_dir: Path | None = None,
    check: bool = True,
) -> StreamResult:
    """Run one job and return what came out.

    ``dut`` is the path of a Verilog file with module ``top`` (run by cocotb on Verilator, or by the bare
    harness) or an Amaranth component with streams ``i`` and ``o`` (run by Amaranth's simulator). ``waves``
    names a VCD file to write; ``cache_dir`` holds the built simulators (default ``~/.cache/dtp``).

    Raises :class:`StreamFault` when the stream's rules were broken, unless ``check`` is False;
    :class:`SimulationError` when there is no result; :class:`~dtp.errors.MissingToolError` and
    :class:`~dtp.errors.DtpError` for what the caller can mend.
    """
    is_file = isinstance(dut, (str, Path))
    backend = backend or (Backend.COCOTB if is_file else Backend.AMARANTH)
    if is_file is (backend is Backend.AMARANTH):
        wanted = "an Amaranth component" if backend is Backend.AMARANTH else "the path of a Verilog file"
        raise DtpError(f"run_stream.dut must be {wanted} for {backend.value}, not {type(dut).__name__}")
    if backend is Backend.AMARANTH:
        from .amaranth_stream import run_amaranth

        result = run_amaranth(dut, job, waves=waves)
    elif backend is Backend.COCOTB:
        from .verilated import run_cocotb

        result = run_cocotb(Path(dut), job, waves=waves, cache_dir=cache_dir)
    else:
        from .verilated import run_bare

        if waves is not None:
            raise DtpError("run_stream.waves must be None for backend bare: it only measures speed")
        result = run_bare(Path(dut), job, cache_dir=cache_dir)
    return result.check() if check else result
