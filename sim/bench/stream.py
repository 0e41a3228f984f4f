"""One job on one stream processor: what goes in, what came out, and every way in which that can be wrong.

The job and the result are the same for all backends; so are the stall patterns, bit for bit, and therefore
the cycle numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtp.errors import DtpError, must

_MASK32 = 0xFFFF_FFFF


class SimulationError(RuntimeError):
    """The simulator did not build, did not start or left no result; carries the end of its log."""


class StreamFault(RuntimeError):
    """The processor broke the rules of the stream. ``result`` holds what was captured up to then.

    It is a :class:`StreamResult` or a :class:`~sim.bench.channels.ChannelResult`.
    """

    def __init__(self, result: Any):
        self.result = result
        super().__init__("; ".join(result.faults))


def xorshift32(state: int) -> int:
    """Next state of the 32-bit generator behind the stall patterns (Marsaglia's 13, 17, 5)."""
    state ^= (state << 13) & _MASK32
    state ^= state >> 17
    return state ^ ((state << 5) & _MASK32)


def stall_threshold(probability: float) -> int:
    """An end stalls in a cycle in which the low 16 bits of its generator lie below this."""
    return min(round(probability * 65536), 65535)


def stall_state(seed: int) -> int:
    """State of a generator in cycle 0; never 0."""
    return ((seed * 0x9E37_79B1 + 0x85EB_CA77) & _MASK32) or 1


@dataclass(frozen=True)
class StreamPorts:
    """Widths of a processor's stream: ``in_bytes`` and ``out_bytes`` of tdata, ``user_bits`` of tuser."""

    in_bytes: int
    out_bytes: int
    user_bits: int


@dataclass(frozen=True, eq=False)
class StreamJob:
    """Input beats and the conditions of one run. Cycle 0 is the first cycle after reset.

    Parameters
    ----------
    beats : uint8 (n, in_bytes)
        Input tdata, byte 0 in the least significant position.
    timeout_cycles : int
        The run is given up after so many cycles.
    last : bool (n,) or None
        Input tlast; None marks the last beat alone.
    packets : int
        Output packets (beats with tlast) that end the job. 0 is legal: then any output is an extra beat.
    output_beats : int or None
        Output beats of all packets together (after the reset, if there is one), None where not known.
    source_stall, sink_stall : float in [0, 1)
        Probability, in a cycle, that a waiting input beat is not offered yet, and that an output beat is not
        taken. A beat once offered stays.
    seed : int
        Seed of both stall patterns.
    drain_cycles : int
        Cycles watched for extra beats after the last packet.
    abort_at, reset_at : int or None
        Cycle in which ``abort`` or ``rst`` is high, for one cycle. After the reset the input goes on with
        ``restart_beat`` and the count of packets starts anew; beats captured before stay in the result.

    Raises :class:`~dtp.errors.DtpError` for a value out of range.
    """

    beats: NDArray[np.uint8]
    timeout_cycles: int
    last: NDArray[np.bool_] | None = None
    packets: int = 1
    output_beats: int | None = None
    source_stall: float = 0.0
    sink_stall: float = 0.0
    seed: int = 0
    drain_cycles: int = 64
    abort_at: int | None = None
    reset_at: int | None = None
    restart_beat: int = 0

    def __post_init__(self) -> None:
        if self.beats.dtype != np.uint8 or self.beats.ndim != 2 or self.beats.shape[1] < 1:
            shown = f"{self.beats.dtype} {self.beats.shape}"
            raise must("StreamJob", "beats", "a uint8 array of shape (beats, bytes)", shown)
        if self.last is not None and (self.last.dtype != np.bool_ or self.last.shape != self.beats.shape[:1]):
            shown = f"{self.last.dtype} {self.last.shape}"
            raise must("StreamJob", "last", f"a bool array of shape ({len(self.beats)},)", shown)
        for name in ("source_stall", "sink_stall"):
            if not 0 <= getattr(self, name) < 1:
                raise must("StreamJob", name, "at least 0 and less than 1", getattr(self, name))
        for name, least in (("timeout_cycles", 1), ("packets", 0), ("seed", 0), ("drain_cycles", 0)):
            if getattr(self, name) < least:
                raise must("StreamJob", name, f"{least} or more", getattr(self, name))
        for name in ("abort_at", "reset_at", "output_beats"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise must("StreamJob", name, "0 or more, or None", getattr(self, name))
        if not 0 <= self.restart_beat <= len(self.beats):
            raise must("StreamJob", "restart_beat", f"0 to {len(self.beats)}", self.restart_beat)

    @property
    def last_flags(self) -> NDArray[np.bool_]:
        """Input tlast, shape (n,), with the default filled in."""
        if self.last is not None:
            return self.last
        flags = np.zeros(len(self.beats), dtype=np.bool_)
        flags[-1:] = True
        return flags

    @property
    def stall_thresholds(self) -> tuple[int, int]:
        """Source and sink stall in a cycle in which the low 16 bits of their generator lie below these."""
        return stall_threshold(self.source_stall), stall_threshold(self.sink_stall)

    @property
    def stall_states(self) -> tuple[int, int]:
        """State of the source's and the sink's generator in cycle 0; never 0."""
        return stall_state(2 * self.seed + 1), stall_state(2 * self.seed + 2)


@dataclass(frozen=True, eq=False)
class StreamResult:
    """What came out of a run of ``job``.

    ``data`` uint8 (n, out_bytes), ``user`` uint64 (n,), ``last`` bool (n,) and ``cycles`` int64 (n,) hold
    every accepted output beat and the cycle of its acceptance, extra beats included. ``first_input_cycle``
    is the cycle in which the first input beat was accepted, None if none was. ``wall_s`` is the time that
    the clock ran, build and start excluded.
    """

    job: StreamJob
    data: NDArray[np.uint8]
    user: NDArray[np.uint64]
    last: NDArray[np.bool_]
    cycles: NDArray[np.int64]
    first_input_cycle: int | None
    inputs_taken: int
    inputs_unread: int
    packets: int
    extra_beats: int
    violation_cycle: int | None
    timed_out: bool
    sim_cycles: int
    wall_s: float

    @property
    def protocol_ok(self) -> bool:
        """No output beat changed or vanished while it waited for tready."""
        return self.violation_cycle is None

    @property
    def cycles_per_second(self) -> float:
        return self.sim_cycles / self.wall_s

    @property
    def faults(self) -> list[str]:
        """Every broken rule in words, empty for a good run."""
        found = []
        if self.timed_out:
            found.append(
                f"timed out after {self.sim_cycles} cycles with {self.packets} of {self.job.packets}"
                f" packets out and {self.inputs_unread} input beats not taken"
            )
        if self.violation_cycle is not None:
            found.append(f"output beat changed before it was taken, in cycle {self.violation_cycle}")
        if self.extra_beats:
            found.append(f"{self.extra_beats} output beats after the last packet")
        counted = np.count_nonzero(self.cycles > (-1 if self.job.reset_at is None else self.job.reset_at))
        if self.job.output_beats is not None and counted != self.job.output_beats:
            found.append(f"{counted} output beats, not {self.job.output_beats}")
        return found

    def check(self) -> StreamResult:
        """The result itself; raises :class:`StreamFault` if a rule was broken."""
        if self.faults:
            raise StreamFault(self)
        return self


@dataclass(frozen=True)
class Files:
    """The three files through which a Verilated feeder is run."""

    folder: Path
    input: Path = field(init=False)
    output: Path = field(init=False)
    status: Path = field(init=False)

    def __post_init__(self) -> None:
        for name, file_name in (("input", "input.bin"), ("output", "output.bin"), ("status", "status.txt")):
            object.__setattr__(self, name, self.folder / file_name)

    def write_input(self, job: StreamJob) -> None:
        """Records of ``feeder.sv``: tlast, then tdata from its most significant byte down."""
        records = np.empty((len(job.beats), job.beats.shape[1] + 1), dtype=np.uint8)
        records[:, 0] = job.last_flags
        records[:, 1:] = job.beats[:, ::-1]
        records.tofile(self.input)

    def plusargs(self, job: StreamJob) -> list[str]:
        source_stall, sink_stall = job.stall_thresholds
        source_seed, sink_seed = job.stall_states
        values = {
            "input": self.input,
            "output": self.output,
            "status": self.status,
            "beats": len(job.beats),
            "packets": job.packets,
            "timeout": job.timeout_cycles,
            "drain": job.drain_cycles,
            "source_stall": source_stall,
            "sink_stall": sink_stall,
            "source_seed": source_seed,
            "sink_seed": sink_seed,
            "abort_at": -1 if job.abort_at is None else job.abort_at,
            "reset_at": -1 if job.reset_at is None else job.reset_at,
            "restart": job.restart_beat,
        }
        return [f"+{name}={value}" for name, value in values.items()]

    def read_result(self, job: StreamJob, ports: StreamPorts, wall_s: float) -> StreamResult:
        """Raises :class:`SimulationError` when the simulator stopped before the feeder was finished."""
        if not self.status.is_file():
            raise SimulationError("the simulator stopped before the run was finished")
        status = {name: int(value) for name, value in map(str.split, self.status.read_text().splitlines())}
        tag_words = (ports.user_bits + 1 + 31) // 32
        data_words = (ports.out_bytes + 3) // 4
        record = np.dtype([("cycle", "<i8"), ("tag", "<u4", (tag_words,)), ("data", "u1", (4 * data_words,))])
        beats = np.fromfile(self.output, dtype=record)
        if len(beats) != status["beats"]:
            raise SimulationError(f"{len(beats)} of {status['beats']} output beats reached the file")
        tag = beats["tag"].astype(np.uint64)
        user = tag[:, 0] >> np.uint64(1)
        for word in range(1, tag_words):
            user |= tag[:, word] << np.uint64(32 * word - 1)
        return StreamResult(
            job=job,
            data=np.ascontiguousarray(beats["data"][:, : ports.out_bytes]),
            user=user,
            last=(tag[:, 0] & np.uint64(1)).astype(np.bool_),
            cycles=beats["cycle"].astype(np.int64),
            first_input_cycle=_none_if_negative(status["first_input"]),
            inputs_taken=status["taken"],
            inputs_unread=status["unread"],
            packets=status["packets"],
            extra_beats=status["extra"],
            violation_cycle=_none_if_negative(status["violation"]),
            timed_out=bool(status["timed_out"]),
            sim_cycles=status["cycles"],
            wall_s=wall_s,
        )


def _none_if_negative(value: int) -> int | None:
    return None if value < 0 else value


def checked_width(job: StreamJob, ports: StreamPorts) -> None:
    """Raises :class:`~dtp.errors.DtpError` when job and processor disagree on the width of a beat."""
    if job.beats.shape[1] != ports.in_bytes:
        raise DtpError(
            f"StreamJob.beats has {job.beats.shape[1]} bytes a beat, the processor takes {ports.in_bytes}:"
            " pack the beats for this configuration"
        )
    if ports.user_bits > 63:
        raise must("StreamPorts", "user_bits", "63 or less", ports.user_bits)
