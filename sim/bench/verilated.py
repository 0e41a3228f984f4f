"""Generated Verilog as a function: build once, keep the simulator, run it on files.

Two drivers share sources and flags: cocotb (:func:`run_cocotb`) and a bare C++ loop (:func:`run_bare`),
which exists to say how fast the simulation could be. They differ in the main program, and in how the clock
is made: the bare loop toggles it, while under cocotb each time step holds a burst of clock cycles (``BURST``
in ``feeder.sv``).
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cocotb_tools.runner import get_results

from dtp.errors import DtpError

from .stream import Files, SimulationError, StreamJob, StreamPorts, StreamResult, checked_width
from .toolchain import Toolchain, default_cache_dir, find_toolchain

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FEEDER = "dtp_feeder"
SHARED = (HERE / "feeder.vlt", HERE / "common.sv")
SOURCES = (*SHARED, HERE / "feeder.sv")
HARNESS = HERE / "harness.cpp"
FLAGS = (
    "--no-public-flat-rw", # cocotb's runner makes everything public; feeder.vlt names what is needed
    "-O3",
    # Verilator 5.048 to 5.050 fold (a << b) << c to a << (b + c) and lose the carry (its issue 7955).
    "-fno-dfg-peephole-replace-shiftl-shiftl",
    "-fno-dfg-peephole-replace-shiftr-shiftr",
    "--x-assign", "fast",
    "--x-initial", "fast",
    "--output-split", "20000",
    "-Wno-lint", "-Wno-style", "-Wno-fatal",
)  # fmt: skip

COCOTB = "cocotb"
BARE = "bare"


@dataclass(frozen=True)
class Bench:
    """What is put around a design: sources, flags of its feeder, and what was written for this very design."""

    sources: tuple[Path, ...]
    flags: tuple[str, ...] = ()
    glue: str = ""


def module_ports(verilog: Path) -> dict[str, tuple[str, int]]:
    """Direction and bits of every port of module ``top`` in a Verilog file, in the file's order.

    Raises :class:`~dtp.errors.DtpError` if the file or the module is missing.
    """
    try:
        text = verilog.read_text(encoding="utf-8")
    except OSError as error:
        raise DtpError(f"Verilog file {verilog} cannot be read: {error.strerror}") from None
    match = re.search(r"^module \\?top\s*\((.*?)^endmodule", text, re.MULTILINE | re.DOTALL)
    if match is None:
        raise DtpError(f"{verilog} has no module top")
    return {name: (direction, int(msb or 0) + 1) for direction, msb, name in _PORT.findall(match[1])}


def ports_of(verilog: Path) -> StreamPorts:
    """Widths of module ``top`` in a Verilog file.

    Raises :class:`~dtp.errors.DtpError` if the file or the module is missing or a port is not there.
    """
    widths = module_ports(verilog)
    for name, direction in _PORTS.items():
        if widths.get(name, ("", 0))[0] != direction:
            raise DtpError(f"module top of {verilog} has no {direction} {name}")
    for name in ("s_axis_tdata", "m_axis_tdata"):
        if widths[name][1] % 8:
            raise DtpError(f"{name} of {verilog} must be a whole number of bytes, not {widths[name][1]} bits")
    return StreamPorts(
        in_bytes=widths["s_axis_tdata"][1] // 8,
        out_bytes=widths["m_axis_tdata"][1] // 8,
        user_bits=widths["m_axis_tuser"][1],
    )


def stream_bench(verilog: Path) -> Bench:
    """The feeder of a design with one stream in and one out."""
    ports = ports_of(verilog)
    widths = (f"-GIN_BYTES={ports.in_bytes}", f"-GOUT_BYTES={ports.out_bytes}", f"-GUSER_BITS={ports.user_bits}")
    return Bench(SOURCES, widths)


_PORT = re.compile(
    r"^\s*(input|output)\s+(?:wire\s+|reg\s+|logic\s+)?(?:\[(\d+):0\]\s*)?(\w+)\s*;", re.MULTILINE
)
_PORTS = {
    "clk": "input",
    "rst": "input",
    "abort": "input",
    "s_axis_tdata": "input",
    "s_axis_tvalid": "input",
    "s_axis_tready": "output",
    "s_axis_tlast": "input",
    "m_axis_tdata": "output",
    "m_axis_tvalid": "output",
    "m_axis_tready": "input",
    "m_axis_tlast": "output",
    "m_axis_tuser": "output",
}


def _python_path(env: dict[str, str]) -> dict[str, str]:
    paths = [str(ROOT), *(path for path in sys.path if path)]
    return {**env, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _run(command: list[str], *, folder: Path, env: dict[str, str], log: Path, what: str) -> None:
    with log.open("ab") as out:
        done = subprocess.run(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise SimulationError(f"{what} failed with exit status {done.returncode}:\n{log_tail(log)}")


def log_tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process, so a killed build leaves none behind."""
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _flags(bench: Bench, driver: str, waves: bool) -> list[str]:
    # Bursts have no time steps: nothing to see in a waveform, nothing to gain without Python around.
    return [*FLAGS, f"-GBURST={int(driver == COCOTB and not waves)}", *bench.flags]


def _key(verilog: Path, bench: Bench, driver: str, waves: bool, tools: Toolchain, make_flags: str) -> str:
    digest = hashlib.sha256()
    parts = [driver, str(waves), *_flags(bench, driver, waves), tools.identity, make_flags]
    if driver == COCOTB:
        # The executable is linked to the library of this very environment.
        parts += [importlib.metadata.version("cocotb"), sys.prefix]
    for part in (*parts, bench.glue):
        digest.update(part.encode() + b"\0")
    for source in (*bench.sources, HARNESS, verilog):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:32]


def build(verilog: Path, driver: str = COCOTB, *, waves: bool = False, cache_dir: Path | None = None) -> Path:
    """Folder that holds the simulator ``dtp_feeder`` of a Verilog file, built unless it is already there.

    The folder appears in ``cache_dir`` (default ``~/.cache/dtp``) only when the build is complete; calls from
    several processes wait for each other. Raises :class:`~dtp.errors.MissingToolError`,
    :class:`~dtp.errors.DtpError` for a file that is not a stream processor, and
    :class:`~sim.bench.stream.SimulationError` when Verilator or the compiler fails.
    """
    find_toolchain()
    return build_bench(verilog, stream_bench(verilog), driver, waves=waves, cache_dir=cache_dir)


def build_bench(
    verilog: Path, bench: Bench, driver: str, *, waves: bool = False, cache_dir: Path | None = None
) -> Path:
    """:func:`build` for a given feeder."""
    tools = find_toolchain()
    cache = (cache_dir or default_cache_dir()).absolute()
    env = tools.environment(cache)
    verilog = verilog.absolute()
    for path in (cache, verilog, HERE, Path(sys.prefix)):
        if any(character.isspace() for character in str(path)):
            raise DtpError(f"make takes no path with a space in it, move {str(path)!r}")
    builds = cache / "cosim"
    try:
        builds.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DtpError(f"cache_dir {str(cache)!r} cannot be made: {error.strerror}") from None
    done = builds / _key(verilog, bench, driver, waves, tools, env["MAKEFLAGS"])
    if (done / FEEDER).is_file():
        return done
    with _locked(done.with_suffix(".lock")):
        if (done / FEEDER).is_file():
            return done
        # What a build left that was killed: nobody else builds this one now.
        prefix = f".building-{done.name}-"
        for left in builds.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=builds) as temporary:
            folder = Path(temporary) / "build"
            folder.mkdir()
            _compile(verilog, bench, driver, waves, folder, env)
            kept = Path(temporary) / "kept"
            kept.mkdir()
            os.replace(folder / FEEDER, kept / FEEDER)
            os.rename(kept, done)
    return done


def _compile(
    verilog: Path, bench: Bench, driver: str, waves: bool, folder: Path, env: dict[str, str]
) -> None:
    log = folder / "build.log"
    flags = _flags(bench, driver, waves)
    sources = [str(path) for path in (*bench.sources, verilog)]
    if bench.glue:
        glue = folder / "glue.sv"
        glue.write_text(bench.glue, encoding="utf-8")
        sources.append(str(glue))
    if driver == COCOTB:
        arguments = {
            "sources": sources,
            "hdl_toplevel": FEEDER,
            "build_args": flags,
            "build_dir": str(folder),
            "timescale": ["1ns", "1ps"],
            "waves": waves,
        }
        _call_runner("build", arguments, folder=folder, env=env, log=log, what="the build of the simulator")
        return
    # The same command as cocotb's runner gives, with another main program.
    command = ["verilator", "-cc", "--exe", "-Mdir", str(folder), "--top-module", FEEDER, "--vpi"]
    command += ["--public-flat-rw", "--prefix", "Vtop", "-o", FEEDER, *flags, "--timescale", "1ns/1ps"]
    command += [str(HARNESS), *sources]
    _run(command, folder=folder, env=env, log=log, what="Verilator")
    jobs = str(min(4, os.cpu_count() or 1))
    _run(
        ["make", "-j", jobs, "-C", str(folder), "-f", "Vtop.mk", "VM_TRACE=0"],
        folder=folder,
        env=env,
        log=log,
        what="the C++ compiler",
    )


def _call_runner(
    verb: str, arguments: dict[str, object], *, folder: Path, env: dict[str, str], log: Path, what: str
) -> None:
    call = folder / f"{verb}.json"
    call.write_text(json.dumps({"verb": verb, "arguments": arguments}), encoding="utf-8")
    command = [sys.executable, "-m", "sim.bench.cocotb_runner", str(call)]
    _run(command, folder=folder, env=_python_path(env), log=log, what=what)


def _run_environment() -> dict[str, str]:
    """Free of settings that would choose other tests, other results or a debugger."""
    drop = ("COCOTB_", "GPI_", "PYTEST_", "WAVES", "GUI")
    return {name: value for name, value in os.environ.items() if not name.startswith(drop)}


def simulate(simulator: Path, folder: Path, plusargs: list[str], *, waves: Path | None, seed: int) -> None:
    """Run a built simulator under cocotb in ``folder``, which gets ``run.log`` and ``results.xml``."""
    arguments = {
        "test_module": "sim.bench.cocotb_stream",
        "hdl_toplevel": FEEDER,
        "hdl_toplevel_lang": "verilog",
        "build_dir": str(simulator),
        "test_dir": str(folder),
        "results_xml": str(folder / "results.xml"),
        "plusargs": plusargs,
        "waves": waves is not None,
        "seed": seed,
    }
    log = folder / "run.log"
    _call_runner("test", arguments, folder=folder, env=_run_environment(), log=log, what="the simulation")
    if waves is not None:
        shutil.move(folder / "dump.vcd", waves)


def check_verdict(folder: Path, broken: bool, faults: list[str]) -> None:
    """Raises :class:`SimulationError` when cocotb's own verdict is another one than the feeder's."""
    tests, failed = get_results(folder / "results.xml")
    if tests != 1 or bool(failed) != broken:
        found = "; ".join(faults) or "no fault"
        raise SimulationError(f"cocotb ran {tests} tests, {failed} failed, the feeder reports: {found}")


def run_cocotb(
    verilog: Path, job: StreamJob, *, waves: Path | None = None, cache_dir: Path | None = None
) -> StreamResult:
    """Run a job on module ``top`` of a Verilog file with cocotb on Verilator.

    ``waves`` names a VCD file to write. The result is not checked: ask
    :meth:`~sim.bench.stream.StreamResult.check`. Raises what :func:`build` raises, and
    :class:`~sim.bench.stream.SimulationError` when the simulator dies or its verdict contradicts the result.
    """
    ports = ports_of(verilog)
    checked_width(job, ports)
    simulator = build(verilog, COCOTB, waves=waves is not None, cache_dir=cache_dir)
    with tempfile.TemporaryDirectory(prefix="dtp-") as temporary:
        folder = Path(temporary)
        files, log = Files(folder), folder / "run.log"
        wall = folder / "wall.txt"
        files.write_input(job)
        simulate(simulator, folder, [*files.plusargs(job), f"+wall={wall}"], waves=waves, seed=job.seed)
        try:
            result = files.read_result(job, ports, read_wall(wall))
            check_verdict(folder, result.timed_out or not result.protocol_ok or result.extra_beats > 0, result.faults)
        except (SimulationError, RuntimeError, OSError) as error:
            raise SimulationError(f"{error}:\n{log_tail(log)}") from None
        return result


def run_bare(verilog: Path, job: StreamJob, *, cache_dir: Path | None = None) -> StreamResult:
    """Run a job as :func:`run_cocotb` does, clocked by a plain C++ loop; used to compare simulation rates."""
    ports = ports_of(verilog)
    checked_width(job, ports)
    simulator = build(verilog, BARE, cache_dir=cache_dir)
    with tempfile.TemporaryDirectory(prefix="dtp-") as temporary:
        folder = Path(temporary)
        files, log = Files(folder), folder / "run.log"
        files.write_input(job)
        command = [str(simulator / FEEDER), *files.plusargs(job)]
        _run(command, folder=folder, env=_run_environment(), log=log, what="the simulation")
        return files.read_result(job, ports, read_wall(log))


def read_wall(path: Path) -> float:
    match = re.search(r"^wall_s ([\d.]+)$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    if match is None:
        raise SimulationError("the simulator reported no run time")
    return float(match[1])
