"""Designs with several streams: one run of the generated Verilog under cocotb on Verilator.

    design = Channels.of(Path("top.v"))
    job = ChannelJob(
        inputs={"s_axis_job": Source([(number, 0)]), "s_axis": Source.of(words, stall=0.3)},
        outputs={"m_axis": Sink(words=16, stall=0.3)},
        timeout_cycles=100_000,
    )
    result = run_channels(Path("top.v"), job)
    result.outputs["m_axis"].payloads, result.outputs["m_axis"].cycles, result.inputs["s_axis"]

A channel is named as its ports begin: ``s_axis``, ``s_axis_job``, ``m_axis``, ``s_axil_aw``. Its payload is one
integer: tdata lowest, then tuser, then tlast, as far as they are there; of a channel of AXI4-Lite its fields in the
order of their ports. :meth:`Channel.pack` and :meth:`Channel.unpack` convert. All other ports but ``clk`` and ``rst``
are plain: an input has one value in a run, an output's value at the end is reported.

Python sleeps while the design works: records go in and come out through files, as in :mod:`sim.bench.verilated`, and
the parts in ``channels.sv`` are joined by a module that is written for the ports of the design.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtp.errors import DtpError, must

from .stream import SimulationError, StreamFault, stall_state, stall_threshold
from .verilated import (
    COCOTB,
    HERE,
    SHARED,
    Bench,
    build_bench,
    check_verdict,
    log_tail,
    module_ports,
    read_wall,
    simulate,
)

__all__ = [
    "Channel",
    "ChannelJob",
    "ChannelResult",
    "Channels",
    "Received",
    "Sink",
    "Source",
    "build_channels",
    "pack_fields",
    "run_channels",
    "unpack_fields",
]

_STREAM = re.compile(r"((?:s|m)_axis(?:_\w+)?)_tvalid|(s_axil_(?:aw|w|b|ar|r))valid")
_STREAM_FIELDS = ("tdata", "tuser", "tlast")


@dataclass(frozen=True)
class Channel:
    """One stream of a design.

    Parameters
    ----------
    name: how its ports begin
    is_input: payloads go into the design
    fields: name and bits of each part of the payload, lowest first
    separator: what stands in a port's name between the channel's and the field's
    """

    name: str
    is_input: bool
    fields: tuple[tuple[str, int], ...]
    separator: str

    @property
    def bits(self) -> int:
        """Bits of a payload."""
        return sum(bits for _, bits in self.fields)

    def port(self, part: str) -> str:
        """Name of the port of a field, of ``valid`` or of ``ready``."""
        prefix = "t" if self.separator and part in ("valid", "ready") else ""
        return f"{self.name}{self.separator}{prefix}{part}"

    def pack(self, **values: int) -> int:
        """One payload from its fields; raises DtpError for a missing or unknown one and for a value out of range."""
        names = [name for name, _ in self.fields]
        if sorted(values) != sorted(names):
            raise must("Channel", self.name, f"given {', '.join(names)}", ", ".join(values))
        payload = shift = 0
        for name, bits in self.fields:
            if not 0 <= values[name] < 1 << bits:
                raise must("Channel", f"{self.name}.{name}", f"unsigned of {bits} bits", values[name])
            payload |= int(values[name]) << shift
            shift += bits
        return payload

    def unpack(self, payload: int) -> dict[str, int]:
        """Fields of a payload."""
        values = {}
        for name, bits in self.fields:
            values[name] = payload & ((1 << bits) - 1)
            payload >>= bits
        return values


def pack_fields(fields: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> int:
    """A packed payload, such as tdata of a unit's channel, from the ``fields`` that the manifest gives of its port.

    ``values`` has an integer for each field, an array of the field's ``dimensions`` where it has them. Raises DtpError
    for a missing or unknown field and for a value out of range.
    """
    names = [field["name"] for field in fields]
    if sorted(values) != sorted(names):
        raise must("pack_fields", "values", f"of {', '.join(names)}", ", ".join(values))
    payload = 0
    for item in fields:
        bits, elements = item["bits"], np.asarray(values[item["name"]], dtype=object)
        if elements.shape != tuple(item.get("dimensions", ())):
            raise must("pack_fields", item["name"], f"of shape {item.get('dimensions', [])}", elements.shape)
        low, high = (-1 << (bits - 1), 1 << (bits - 1)) if item["signed"] else (0, 1 << bits)
        for number, value in enumerate(elements.ravel()):
            if not low <= value < high:
                raise must("pack_fields", item["name"], f"in {low}…{high - 1}", value)
            payload |= (int(value) & ((1 << bits) - 1)) << (item["offset"] + bits * number)
    return payload


def unpack_fields(fields: Sequence[Mapping[str, Any]], payload: int) -> dict[str, Any]:
    """Values of a packed payload: integers, and nested lists for fields with ``dimensions``."""
    values: dict[str, Any] = {}
    for item in fields:
        bits, dimensions = item["bits"], item.get("dimensions", [])
        found = [(payload >> (item["offset"] + bits * n)) & ((1 << bits) - 1) for n in range(math.prod(dimensions))]
        if item["signed"]:
            found = [value - (value >> (bits - 1) << bits) for value in found]
        values[item["name"]] = np.array(found, dtype=object).reshape(dimensions).tolist()
    return values


@dataclass(frozen=True)
class Channels:
    """Ports of a design: its channels, and names and bits of its plain inputs and outputs."""

    channels: Mapping[str, Channel]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]

    @classmethod
    def of(cls, verilog: Path) -> Channels:
        """Read from module ``top`` of a Verilog file.

        Raises
        ------
        DtpError
            The file or the module is missing, there is no ``clk`` or ``rst``, or a stream lacks a port.
        """
        ports = module_ports(verilog)
        for name in ("clk", "rst"):
            if ports.pop(name, None) != ("input", 1):
                raise DtpError(f"module top of {verilog} has no input {name}")
        channels = {}
        for name, (direction, _) in list(ports.items()):
            match = _STREAM.fullmatch(name)
            if match is None:
                continue
            is_stream = match[1] is not None
            channel = _channel(match[1] or match[2], direction == "input", "_" if is_stream else "", ports)
            channels[channel.name] = channel
            ready = ports.pop(channel.port("ready"), None)
            if ready != ("output" if channel.is_input else "input", 1) or not channel.fields:
                raise DtpError(f"stream {channel.name} of {verilog} lacks its ready or its payload")
            for part in ("valid", *(part for part, _ in channel.fields)):
                if ports.pop(channel.port(part), ("", 0))[0] != direction:
                    raise DtpError(f"{channel.port(part)} of {verilog} must be an {direction}")
        return cls(
            dict(sorted(channels.items())),
            {name: bits for name, (direction, bits) in ports.items() if direction == "input"},
            {name: bits for name, (direction, bits) in ports.items() if direction == "output"},
        )

    @cached_property
    def glue(self) -> str:
        """Module ``dtp_feeder`` for these ports, in SystemVerilog."""
        return "\n".join(_glue(self)) + "\n"


def _channel(name: str, is_input: bool, separator: str, ports: Mapping[str, tuple[str, int]]) -> Channel:
    if separator:
        found = [(part, ports[f"{name}_{part}"][1]) for part in _STREAM_FIELDS if f"{name}_{part}" in ports]
    else:
        found = [
            (port.removeprefix(name), bits)
            for port, (_, bits) in ports.items()
            if port.startswith(name) and port.removeprefix(name) not in ("valid", "ready")
        ]
    return Channel(name, is_input, tuple(found), separator)


def _glue(design: Channels) -> Iterable[str]:
    yield from (
        "module dtp_feeder #(",
        "    parameter bit BURST = 0",
        ") (",
        "    input logic tick,",
        "    output logic finished, output logic timed_out, output logic violated, output logic extra",
        ");",
        "    logic clk, rst, counting, following, ending, closing;",
        "    longint cycle;",
        "    dtp_clock #(.BURST(BURST)) clock (.tick(tick), .clk(clk));",
    )
    connections = {"clk": "clk", "rst": "rst"}
    done, violated, extra = ["1'b1"], ["1'b0"], ["1'b0"]
    for number, channel in enumerate(design.channels.values()):
        c = f"c{number}"
        kind = "source" if channel.is_input else "sink"
        yield f"    logic [{channel.bits - 1}:0] {c}_data;"
        yield f"    logic {c}_valid, {c}_ready, {c}_done;"
        named = ", ".join(f".{name}({name})" for name in ("clk", "counting", "following", "closing", "cycle"))
        named += f", .done({c}_done), .valid({c}_valid), .ready({c}_ready), .data({c}_data)"
        done.append(f"{c}_done")
        if not channel.is_input:
            yield f"    logic {c}_violated, {c}_extra;"
            named += f", .ending(ending), .violated({c}_violated), .extra({c}_extra)"
            violated.append(f"{c}_violated")
            extra.append(f"{c}_extra")
        yield f'    dtp_{kind} #(.NAME("{channel.name}"), .BITS({channel.bits})) {c} ({named});'
        shift = 0
        for part, bits in channel.fields:
            connections[channel.port(part)] = f"{c}_data[{shift + bits - 1}:{shift}]"
            shift += bits
        connections |= {channel.port(part): f"{c}_{part}" for part in ("valid", "ready")}
    for name, bits in (*design.inputs.items(), *design.outputs.items()):
        yield f"    logic [{bits - 1}:0] p_{name};"
        connections[name] = f"p_{name}"
    yield "    top dut (" + ", ".join(f".{port}({wire})" for port, wire in connections.items()) + ");"
    yield f"    wire complete = {' && '.join(done)};"
    yield f"    assign violated = {' || '.join(violated)};"
    yield f"    assign extra = {' || '.join(extra)};"
    named = ", ".join(
        f".{name}({name})"
        for name in (
            "clk", "complete", "rst", "counting", "following", "ending", "closing", "cycle", "finished", "timed_out",
        )
    )  # fmt: skip
    yield f"    dtp_control control ({named});"
    yield "    string folder;"
    yield "    int plain_file, got;"
    yield "    initial begin"
    yield '        got = $value$plusargs("folder=%s", folder);'
    for name in design.inputs:
        yield f"        if ($value$plusargs(\"plain_{name}=%h\", p_{name}) == 0) p_{name} = '0;"
    yield "    end"
    yield "    always @(posedge clk) if (closing) begin"
    yield '        plain_file = $fopen({folder, "/plain.txt"}, "w");'
    for name in design.outputs:
        yield f'        $fdisplay(plain_file, "{name} %0h", p_{name});'
    yield "        $fclose(plain_file);"
    yield "    end"
    yield "endmodule"


@dataclass(frozen=True)
class Source:
    """What an input channel is offered.

    Parameters
    ----------
    records: payload and the first cycle in which it may be offered, in order
    stall: probability, in a cycle, that a waiting payload is not offered yet; one once offered stays
    """

    records: Sequence[tuple[int, int]] = ()
    stall: float = 0.0

    @classmethod
    def of(cls, payloads: Iterable[int], *, from_cycle: int = 0, stall: float = 0.0) -> Source:
        """All payloads from one cycle on."""
        return cls([(payload, from_cycle) for payload in payloads], stall)


@dataclass(frozen=True)
class Sink:
    """What an output channel must give: ``words`` in all; ``stall`` is the chance of a cycle that takes none."""

    words: int = 0
    stall: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ChannelJob:
    """One run. Cycle 0 is the first cycle after reset.

    Parameters
    ----------
    inputs, outputs: by channel; an input that is not named offers nothing, an output that is not named must stay silent
    plain: value of each plain input through the run, 0 for one that is not named
    timeout_cycles: the run is given up after so many cycles
    drain_cycles: cycles watched for extra words when every input is taken and every expected word is there
    seed: of all stall patterns

    Raises
    ------
    DtpError
        A value out of range.
    """

    inputs: Mapping[str, Source] = field(default_factory=dict)
    outputs: Mapping[str, Sink] = field(default_factory=dict)
    plain: Mapping[str, int] = field(default_factory=dict)
    timeout_cycles: int
    drain_cycles: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("timeout_cycles", 1), ("drain_cycles", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise must("ChannelJob", name, f"{least} or more", getattr(self, name))
        for kind, ends in (("inputs", self.inputs), ("outputs", self.outputs)):
            for name, end in ends.items():
                if not 0 <= end.stall < 1:
                    raise must("ChannelJob", f"{kind}[{name!r}].stall", "at least 0 and less than 1", end.stall)
        for name, sink in self.outputs.items():
            if sink.words < 0:
                raise must("ChannelJob", f"outputs[{name!r}].words", "0 or more", sink.words)

    def check(self, design: Channels) -> None:
        """Whether the job fits a design; raises DtpError that names what does not."""
        channels = design.channels.values()
        for kind, given, known in (
            ("inputs", self.inputs, {c.name: c.bits for c in channels if c.is_input}),
            ("outputs", self.outputs, {c.name: c.bits for c in channels if not c.is_input}),
            ("plain", self.plain, design.inputs),
        ):
            for name in given:
                if name not in known:
                    raise must("ChannelJob", kind, f"of {', '.join(known) or 'none'}", name)
        for name, value in self.plain.items():
            if not 0 <= value < 1 << design.inputs[name]:
                raise must("ChannelJob", f"plain[{name!r}]", f"unsigned of {design.inputs[name]} bits", value)
        for name, source in self.inputs.items():
            bits = design.channels[name].bits
            for number, (payload, cycle) in enumerate(source.records):
                what = f"inputs[{name!r}].records[{number}]"
                if not 0 <= payload < 1 << bits:
                    raise must("ChannelJob", what, f"unsigned of {bits} bits", payload)
                if not 0 <= cycle < 1 << 63:
                    raise must("ChannelJob", what, "offered from cycle 0 or later", cycle)


@dataclass(frozen=True, eq=False)
class Received:
    """Every accepted word of an output channel and the cycle of its acceptance, extra words included."""

    payloads: list[int]
    cycles: NDArray[np.int64]
    extra_words: int
    violation_cycle: int | None


@dataclass(frozen=True, eq=False)
class ChannelResult:
    """What came out of a run of ``job``.

    ``outputs`` has the words of each output channel, ``inputs`` the cycle in which each payload of an input channel was
    accepted, ``plain`` the plain outputs after the last cycle. ``wall_s`` is the time that the clock ran, build and
    start excluded.
    """

    job: ChannelJob
    outputs: dict[str, Received]
    inputs: dict[str, NDArray[np.int64]]
    plain: dict[str, int]
    timed_out: bool
    sim_cycles: int
    wall_s: float

    @property
    def cycles_per_second(self) -> float:
        return self.sim_cycles / self.wall_s

    @property
    def faults(self) -> list[str]:
        """Every broken rule in words, empty for a good run."""
        found = []
        if self.timed_out:
            left = [
                f"{name} took {len(self.inputs[name])} of {len(source.records)}"
                for name, source in self.job.inputs.items()
            ] + [
                f"{name} gave {len(self.outputs[name].payloads)} of {sink.words}"
                for name, sink in self.job.outputs.items()
            ]
            found.append(f"timed out after {self.sim_cycles} cycles: {', '.join(left)}")
        for name, got in self.outputs.items():
            if got.violation_cycle is not None:
                found.append(f"a word of {name} changed before it was taken, in cycle {got.violation_cycle}")
            if got.extra_words:
                found.append(f"{got.extra_words} words of {name} after the last one expected")
        return found

    def check(self) -> ChannelResult:
        """The result itself; raises :class:`~sim.bench.stream.StreamFault` if a rule was broken."""
        if self.faults:
            raise StreamFault(self)
        return self


def _bench(design: Channels) -> Bench:
    return Bench((*SHARED, HERE / "channels.sv"), glue=design.glue)


def build_channels(verilog: Path, *, waves: bool = False, cache_dir: Path | None = None) -> Path:
    """Folder that holds the simulator of a Verilog file, built unless it is already there.

    Raises what :func:`sim.bench.verilated.build` raises.
    """
    return build_bench(verilog, _bench(Channels.of(verilog)), COCOTB, waves=waves, cache_dir=cache_dir)


def run_channels(
    verilog: Path,
    job: ChannelJob,
    *,
    waves: Path | None = None,
    cache_dir: Path | None = None,
    check: bool = True,
) -> ChannelResult:
    """Run one job on module ``top`` of a Verilog file with cocotb on Verilator.

    Parameters
    ----------
    waves: VCD file to write
    cache_dir: of built simulators, default ``~/.cache/dtp``

    Raises
    ------
    StreamFault
        The rules of a stream were broken, words are missing or too many, unless ``check`` is False.
    SimulationError
        There is no result.
    MissingToolError, DtpError
        What the caller can mend.
    """
    design = Channels.of(verilog)
    job.check(design)
    simulator = build_bench(verilog, _bench(design), COCOTB, waves=waves is not None, cache_dir=cache_dir)
    with tempfile.TemporaryDirectory(prefix="dtp-") as temporary:
        folder = Path(temporary)
        _write(folder, design, job)
        plusargs = [
            f"+folder={folder}",
            f"+timeout={job.timeout_cycles}",
            f"+drain={job.drain_cycles}",
            f"+wall={folder / 'wall.txt'}",
            *(f"+plain_{name}={value:x}" for name, value in job.plain.items()),
        ]
        simulate(simulator, folder, plusargs, waves=waves, seed=job.seed)
        try:
            result = _read(folder, design, job)
            # cocotb does not know how many words were expected; words that are missing time out.
            check_verdict(folder, bool(result.faults), result.faults)
        except (SimulationError, RuntimeError, OSError) as error:
            raise SimulationError(f"{error}:\n{log_tail(folder / 'run.log')}") from None
    return result.check() if check else result


def _write(folder: Path, design: Channels, job: ChannelJob) -> None:
    for number, channel in enumerate(design.channels.values()):
        state = stall_state(len(design.channels) * job.seed + number + 1)
        if channel.is_input:
            source = job.inputs.get(channel.name, Source())
            size = (channel.bits + 7) // 8
            records = b"".join(
                cycle.to_bytes(8, "big") + payload.to_bytes(size, "big") for payload, cycle in source.records
            )
            (folder / f"{channel.name}.in").write_bytes(records)
            count, stall = len(source.records), source.stall
        else:
            sink = job.outputs.get(channel.name, Sink())
            count, stall = sink.words, sink.stall
        (folder / f"{channel.name}.cfg").write_text(f"{count} {stall_threshold(stall)} {state}\n", encoding="ascii")


def _status(path: Path, base: int = 10) -> dict[str, int]:
    if not path.is_file():
        raise SimulationError("the simulator stopped before the run was finished")
    return {name: int(value, base) for name, value in map(str.split, path.read_text(encoding="ascii").splitlines())}


def _read(folder: Path, design: Channels, job: ChannelJob) -> ChannelResult:
    control = _status(folder / "control.txt")
    outputs, inputs = {}, {}
    for channel in design.channels.values():
        if channel.is_input:
            inputs[channel.name] = np.fromfile(folder / f"{channel.name}.taken", dtype="<i8").astype(np.int64)
            continue
        status = _status(folder / f"{channel.name}.txt")
        size = 4 * ((channel.bits + 31) // 32)
        words = np.fromfile(folder / f"{channel.name}.out", dtype=[("cycle", "<i8"), ("data", "u1", (size,))])
        if len(words) != status["words"]:
            raise SimulationError(f"{len(words)} of {status['words']} words of {channel.name} reached the file")
        outputs[channel.name] = Received(
            payloads=[int.from_bytes(word.tobytes(), "little") for word in words["data"]],
            cycles=words["cycle"].astype(np.int64),
            extra_words=status["extra"],
            violation_cycle=None if status["violation"] < 0 else status["violation"],
        )
    return ChannelResult(
        job=job,
        outputs=outputs,
        inputs=inputs,
        plain=_status(folder / "plain.txt", 16),
        timed_out=bool(control["timed_out"]),
        sim_cycles=control["cycles"],
        wall_s=read_wall(folder / "wall.txt"),
    )
