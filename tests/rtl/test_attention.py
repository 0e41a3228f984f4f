"""The whole tile in hardware: every bit, flag and record is the golden model's, whatever comes in and whenever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped
from amaranth.sim import Simulator

from dtp.attention import golden
from dtp.config import Config
from dtp.job import ErrorCode, StatusRecord, output_beats, pack_descriptor, status_beats, unpack_descriptor
from dtp.quantise import Head
from dtp.workload import Mode
from rtl.attention import AbortGate, AttentionTile, InputLayout, OutputLayout
from sim.bench import Backend, StreamFault, StreamJob, StreamResult, run_stream
from tests.tile import (
    CONFIGS,
    TINY,
    Shape,
    check_jobs,
    golden_status,
    head_of,
    heads_of,
    packets_of,
    random_shapes,
    run_job,
    run_jobs,
    stream_of,
)
from tools.verbs import compare_outputs

STALLS = ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.3, 0.3), (0.9, 0.1), (0.1, 0.9))
TOKENS = {"tiny": 40, "narrow": 40, "wide16": 32, "bytes": 20}


# ---- outputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CONFIGS)
def test_random_jobs_back_to_back(name: str, seed: int) -> None:
    config = CONFIGS[name]
    heads = heads_of(config, random_shapes(config, 8, seed, tokens=TOKENS[name]), seed)
    for number, (source, sink) in enumerate(STALLS if seed == 0 else STALLS[seed : seed + 2]):
        result = run_jobs(config, heads, source_stall=source, sink_stall=sink, seed=10 * seed + number)
        check_jobs(config, heads, result)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CONFIGS)
def test_any_operands_and_scales(name: str, seed: int) -> None:
    """Operands from all over their range, the most negative one included, under any descriptor."""
    config = CONFIGS[name]
    shapes = [replace(shape, wild=True) for shape in random_shapes(config, 8, 50 + seed, tokens=TOKENS[name])]
    heads = heads_of(config, shapes, 50 + seed)
    check_jobs(config, heads, run_jobs(config, heads))


@pytest.mark.parametrize("name", CONFIGS)
def test_saturations_are_counted(name: str) -> None:
    config = CONFIGS[name]
    heads = heads_of(config, [Shape(tokens=20, width=8, mode=Mode.RIEMANNIAN, wild=True)] * 6, 60)
    statuses = [golden_status(config, head) for head in heads]
    assert any(status.score_saturations for status in statuses)
    assert any(status.lift_saturations for status in statuses)
    check_jobs(config, heads, run_jobs(config, heads))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mode", Mode)
def test_largest_job(name: str, mode: Mode) -> None:
    """All tokens and all lanes; the next job loads beside it."""
    config = CONFIGS[name]
    whole = Shape(tokens=config.max_tokens, width=config.max_width, mode=mode)
    heads = heads_of(config, [whole, replace(whole, causal=True), Shape(tokens=1, width=1, mode=mode)], 70)
    check_jobs(config, heads, run_jobs(config, heads))


@pytest.mark.parametrize("name", CONFIGS)
def test_smallest_jobs_keep_both_slots_busy(name: str) -> None:
    config = CONFIGS[name]
    shapes = [Shape(tokens=1 + n % 3, width=1 + n % 2, mode=list(Mode)[n % 4], causal=n % 3 == 1) for n in range(24)]
    heads = heads_of(config, shapes, 80)
    for number, (source, sink) in enumerate(STALLS):
        check_jobs(config, heads, run_jobs(config, heads, source_stall=source, sink_stall=sink, seed=number))


@pytest.mark.parametrize("name", CONFIGS)
def test_groups_without_a_kept_block(name: str) -> None:
    """Empty groups at the start, in the middle and at the end, empty heads, and padding behind them."""
    config = CONFIGS[name]
    tokens = 3 * config.block
    heads = []
    for number, rows in enumerate(("011", "101", "110", "010", "100", "001", "000", "111")):
        mode = list(Mode)[number % 4]
        shape = Shape(tokens=tokens, width=5, mode=mode, valid_length=tokens - number % 3 * config.rows)
        head = head_of(config, shape, 90 + number, tag=number)
        mask = np.array([[row == "1"] * 3 for row in rows])
        heads.append(replace(head, job=replace(head.job, masked=True), block_mask=mask))
    assert golden(config, heads[6]).empty_rows.sum() == heads[6].job.valid_length
    for number, (source, sink) in enumerate(STALLS):
        check_jobs(config, heads, run_jobs(config, heads, source_stall=source, sink_stall=sink, seed=number))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mask_of_ones_changes_no_bit_of_an_output(name: str) -> None:
    config = CONFIGS[name]
    plain = head_of(config, Shape(tokens=2 * config.block + 1, width=5, mode=Mode.BLENDED, causal=True), 110)
    blocks = config.blocks(plain.job.tokens)
    masked = replace(plain, job=replace(plain.job, masked=True), block_mask=np.ones((blocks, blocks), dtype=np.bool_))
    heads = [plain, masked]
    result = run_jobs(config, heads)
    check_jobs(config, heads, result)
    (first, first_user), (second, second_user) = packets_of(result)
    assert (first == second).all()
    assert (first_user == second_user).all()


SMALL = {
    "lookahead7": {"lookahead": 7},
    "lift_ports4": {"lift_ports": 4, "max_frame_rank": 2, "metric_rank": 2},
    "rows_are_blocks": {"rows": 8, "output_slots": 8, "output_bytes": 16, "normaliser_lanes": 8},
    "operands16": {"operand_bits": 16, "lifted_bits": 12, "input_bytes": 4, "probability_bits": 10},
    "segments4": {"lanes": 64, "block": 16, "rows": 4, "input_bytes": 32, "max_tokens": 64, "max_width": 32},
}


@pytest.mark.parametrize("name", SMALL)
def test_other_configurations(name: str) -> None:
    config = TINY.changed(name=name, **SMALL[name])
    shapes = [
        Shape(tokens=config.block + 3, width=5, mode=Mode.RIEMANNIAN, causal=True, valid_length=config.block + 2),
        Shape(tokens=config.block, width=config.block + 1, mode=Mode.DOT, kept=0.5),
    ]
    heads = heads_of(config, shapes, 120)
    check_jobs(config, heads, run_jobs(config, heads, Backend.AMARANTH, source_stall=0.05, sink_stall=0.2, seed=1))


# ---- jobs that are wrong -----------------------------------------------------------------------------------


def bad(head: Head, config: Config, **numbers: int) -> np.ndarray:
    """The beats of a job with other numbers in its descriptor."""
    beats = head.beats(config).copy()
    flat = beats.reshape(-1)
    fields = unpack_descriptor(flat[:64].tobytes()) | numbers
    flat[:64] = np.frombuffer(pack_descriptor(fields), dtype=np.uint8)
    return beats


def check_packets(
    config: Config,
    result: StreamResult,
    wanted: Sequence[Head | StatusRecord | tuple[Head, StatusRecord]],
) -> None:
    """Each packet: a job's good answer, a record alone, or a job's outputs under another record."""
    packets = packets_of(result)
    assert len(packets) == len(wanted)
    for (data, user), want in zip(packets, wanted, strict=True):
        tail = status_beats(config)
        status = StatusRecord.parse(data[-tail:].tobytes())
        if isinstance(want, StatusRecord):
            assert len(data) == tail
            assert status == want
            assert not user.any()
            continue
        head, record = want if isinstance(want, tuple) else (want, golden_status(config, want))
        assert status == record
        renamed = replace(head, job=replace(head.job, tag=record.tag))
        part = replace_packet(result, data, user)
        differences = [line for line in _differences(config, renamed, part) if "error is" not in line]
        assert differences == []


def _differences(config: Config, head: Head, result: StreamResult) -> list[str]:
    differences, compared = compare_outputs(config, [head], [golden(config, head)], result)
    assert compared == head.job.tokens * head.job.width
    return differences


def replace_packet(result: StreamResult, data: np.ndarray, user: np.ndarray) -> StreamResult:
    """One packet of a result as a result."""
    last = np.zeros(len(data), dtype=np.bool_)
    last[-1] = True
    return replace(result, data=data, user=user, last=last)


def refused(head: Head, code: ErrorCode) -> StatusRecord:
    """The answer to a descriptor that is not taken."""
    return StatusRecord(error=int(code), tag=head.job.tag)


@pytest.mark.parametrize(("source", "sink"), STALLS[:4])
@pytest.mark.parametrize("name", CONFIGS)
def test_refused_descriptors_between_good_jobs(name: str, source: float, sink: float) -> None:
    config = CONFIGS[name]
    good = heads_of(config, [Shape(tokens=9, width=5, mode=mode) for mode in Mode], 130)
    faults = (
        ({"magic": 1}, ErrorCode.MAGIC),
        ({"version": 9}, ErrorCode.VERSION),
        ({"flags": 1 << 5}, ErrorCode.FLAGS),
        ({"tokens": config.max_tokens + 1}, ErrorCode.TOKENS),
        ({"valid_length": 10}, ErrorCode.VALID_LENGTH),
        ({"width": config.max_width + 1}, ErrorCode.WIDTH),
        ({"score_shift": 8}, ErrorCode.SHIFT),
    )
    beats: list[np.ndarray] = []
    wanted: list[Head | StatusRecord | tuple[Head, StatusRecord]] = []
    for number, (numbers, code) in enumerate(faults):
        head = good[number % len(good)]
        for _ in range(1 + number % 3):
            beats.append(bad(head, config, **numbers))
            wanted.append(refused(head, code))
        beats.append(head.beats(config))
        wanted.append(head)
    stalls = {"source_stall": source, "sink_stall": sink, "seed": 3}
    check_packets(config, run_job(config, stream_of(config, beats, good * 3, **stalls)), wanted)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CONFIGS)
def test_last_comes_early_or_late(name: str, seed: int) -> None:
    config = CONFIGS[name]
    rng = np.random.default_rng(seed)
    heads = heads_of(config, random_shapes(config, 6, 140 + seed, tokens=TOKENS[name] // 2), 140 + seed)
    beats: list[np.ndarray] = []
    wanted: list[Head | StatusRecord | tuple[Head, StatusRecord]] = []
    behind_descriptor = -(-64 // config.entry_bytes) * config.entry_beats
    for number, head in enumerate(heads):
        packet = head.beats(config)
        if number % 3 == 0:
            cut = int(rng.integers(behind_descriptor + 1, len(packet)))
            beats.append(packet[:cut])
            wanted.append(StatusRecord(error=int(ErrorCode.EARLY_LAST), tag=head.job.tag))  # outputs: looked at below
        elif number % 3 == 1:
            more = rng.integers(0, 256, (int(rng.integers(1, 40)), config.input_bytes)).astype(np.uint8)
            beats.append(np.concatenate([packet, more]))
            wanted.append((head, golden_status(config, head, ErrorCode.LATE_LAST)))
        else:
            cut = int(rng.integers(1, behind_descriptor + 1))
            beats.append(packet[:cut])
            reached = cut * config.input_bytes
            tag = int.from_bytes(packet.reshape(-1)[:reached][4:6].tobytes().ljust(2, b"\0"), "little")
            wanted.append(StatusRecord(error=int(ErrorCode.CUT), tag=tag))
        beats.append(head.beats(config))
        wanted.append(head)
    stalls = {"source_stall": 0.2, "sink_stall": 0.2, "seed": seed}
    result = run_job(config, stream_of(config, beats, heads * 2, **stalls))
    packets = packets_of(result)
    assert len(packets) == len(wanted)
    rest, rest_wanted = [], []
    for packet, want, sent in zip(packets, wanted, beats, strict=True):
        if isinstance(want, StatusRecord) and want.error == ErrorCode.EARLY_LAST:
            # What was missing is 0: the same job, whole, gives the same outputs.
            head = next(head for head in heads if head.job.tag == want.tag)
            whole = np.zeros_like(head.beats(config))
            whole[: len(sent)] = sent
            again = run_job(config, stream_of(config, [whole], [head]))
            assert len(packet[0]) == output_beats(config, head.job) == len(again.data)
            tail = status_beats(config)
            assert (packet[0][:-tail] == again.data[:-tail]).all()
            assert (packet[1] == again.user).all()
            status, other = (StatusRecord.parse(data[-tail:].tobytes()) for data in (packet[0], again.data))
            assert status == replace(other, error=int(ErrorCode.EARLY_LAST))
        else:
            rest.append(packet)
            rest_wanted.append(want)
    last = np.concatenate([np.arange(len(data)) == len(data) - 1 for data, _ in rest])
    part = replace(
        result, data=np.concatenate([d for d, _ in rest]), user=np.concatenate([u for _, u in rest]), last=last
    )
    check_packets(config, part, rest_wanted)


# ---- abort and reset ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Three jobs, their input beats, and the run that nothing disturbs."""

    config: Config
    heads: list[Head]
    job: StreamJob
    plain: StreamResult

    @property
    def starts(self) -> list[int]:
        """First input beat of each job, and the number of beats."""
        ends = np.flatnonzero(self.job.last_flags) + 1
        return [0, *ends.tolist()]


@cache
def undisturbed(name: str, source: float, sink: float) -> Run:
    config = CONFIGS[name]
    shapes = [
        Shape(tokens=9, width=5, mode=Mode.RIEMANNIAN),
        Shape(tokens=config.block + 2, width=config.block, kept=0.7, causal=True),
        Shape(tokens=6, width=3, mode=Mode.EUCLIDEAN),
    ]
    heads = heads_of(config, shapes, 150)
    job = stream_of(config, [h.beats(config) for h in heads], heads, source_stall=source, sink_stall=sink, seed=5)
    plain = run_job(config, job)
    check_jobs(config, heads, plain)
    return Run(config, heads, job, plain)


def inputs_before(run: Run, cycle: int) -> int:
    """Input beats taken before a cycle."""
    if cycle == 0:
        return 0
    return run_job(run.config, replace(run.job, timeout_cycles=cycle), check=False).inputs_taken


def check_abort(run: Run, cycle: int) -> None:
    """Outputs up to the abort, a beat that was offered, one record, then the jobs that began later, all right."""
    c, plain = run.config, run.plain
    taken = inputs_before(run, cycle)
    later = [n for n in range(len(run.heads)) if run.starts[n] >= taken]
    newest_taken = taken - run.starts[later[0] - 1] if later and later[0] else taken - run.starts[-2]
    newest = (later[0] if later else len(run.heads)) - 1
    # The tag is known once its bytes have come.
    known = newest >= 0 and newest_taken * c.input_bytes >= 6
    tags = {run.heads[newest].job.tag} if known else {0, *(h.job.tag for h in run.heads[: max(newest, 0)])}

    # Results leave up to the cycle after the pulse, in which the units are reset.
    left = int((plain.cycles <= cycle + 1).sum())
    tail = status_beats(c)
    whole_after = sum(output_beats(c, run.heads[n].job) for n in later)
    for held in (0, 1) if run.job.sink_stall else (0,):
        count = left + held
        job = replace(
            run.job,
            abort_at=cycle,
            packets=int(plain.last[:count].sum()) + 1 + len(later),
            output_beats=count + tail + whole_after,
        )
        result = run_job(c, job, check=False)
        if not result.faults:
            break
        assert held == 0 and run.job.sink_stall and result.protocol_ok, result.faults
    assert result.faults == []
    assert result.inputs_unread == 0
    assert (result.data[:count] == plain.data[:count]).all()
    assert (result.user[:count] == plain.user[:count]).all()
    assert (result.cycles[:left] == plain.cycles[:left]).all()
    record = StatusRecord.parse(result.data[count : count + tail].tobytes())
    assert record == StatusRecord(error=int(ErrorCode.ABORTED), tag=record.tag)
    assert record.tag in tags
    assert not result.user[count : count + tail].any()
    assert result.last[count : count + tail].tolist() == [False] * (tail - 1) + [True]
    rest = slice(count + tail, None)
    after = replace(result, data=result.data[rest], user=result.user[rest], last=result.last[rest])
    if later:
        check_jobs(c, [run.heads[n] for n in later], after)
    assert len(after.data) == whole_after


@pytest.mark.parametrize(("source", "sink"), [(0.0, 0.0), (0.3, 0.6)])
@pytest.mark.parametrize("name", CONFIGS)
def test_abort_at_any_moment(name: str, source: float, sink: float) -> None:
    """Every few cycles from before the first beat to behind the last: descriptor, operands, outputs, records."""
    run = undisturbed(name, source, sink)
    end = int(run.plain.cycles[-1])
    moments = {0, 1, 2, 3, *range(5, end, max(1, end // 40)), *(int(c) for c in run.plain.cycles[run.plain.last] - 1)}
    for cycle in sorted(moments):
        check_abort(run, cycle)


@pytest.mark.parametrize("name", CONFIGS)
def test_reset_at_any_moment(name: str) -> None:
    """After ``rst`` the next beat is a descriptor, and nothing is left of the job that was cut."""
    run = undisturbed(name, 0.1, 0.3)
    c, end = run.config, int(run.plain.cycles[-1])
    total = sum(output_beats(c, head.job) for head in run.heads)
    for cycle in range(1, end, max(1, end // 12)):
        job = replace(run.job, reset_at=cycle, restart_beat=0, output_beats=total)
        result = run_job(c, job)
        after = result.cycles > cycle
        part = replace(result, data=result.data[after], user=result.user[after], last=result.last[after])
        check_jobs(c, run.heads, part)


class AbortPattern(wiring.Component):
    """A tile whose one-cycle ``abort`` becomes a pattern of cycles."""

    def __init__(self, config: Config, pattern: str) -> None:
        self.tile = AttentionTile(config)
        self.pattern = pattern
        super().__init__(
            {
                "i": In(stream.Signature(InputLayout(config))),
                "o": Out(stream.Signature(OutputLayout(config))),
                "abort": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.tile = tile = self.tile
        connect(m, flipped(self.i), tile.i)
        connect(m, tile.o, flipped(self.o))
        late = Signal(len(self.pattern))
        m.d.sync += late.eq(Cat(self.abort, late))
        now = Cat(self.abort, late)
        m.d.comb += tile.abort.eq(Cat(now[n] for n, mark in enumerate(self.pattern) if mark == "1").any())
        return m


@pytest.mark.parametrize("pattern", ["101", "1" * 9, "1" + "0" * 30 + "1"])
def test_aborts_close_together(pattern: str) -> None:
    """The first record answers every abort that comes before it has left; a later abort gets one of its own."""
    run = undisturbed("tiny", 0.0, 0.0)
    c, tail = run.config, status_beats(run.config)
    cycle = int(run.plain.cycles[len(run.plain.cycles) // 3])
    left = int((run.plain.cycles <= cycle + 1).sum())
    heads = run.heads * 2
    records = 1 + pattern.count("1" + "0" * 30 + "1")
    job = stream_of(c, [head.beats(c) for head in heads], heads, abort_at=cycle)
    result = run_stream(AbortPattern(c, pattern), replace(job, packets=len(heads)), check=False)
    assert result.protocol_ok
    assert result.inputs_unread == 0
    packets = packets_of(result)
    statuses = [StatusRecord.parse(data[-tail:].tobytes()) for data, _ in packets]
    aborted = [number for number, status in enumerate(statuses) if status.error == ErrorCode.ABORTED]
    assert len(aborted) == records
    assert (result.data[:left] == run.plain.data[:left]).all()
    # What begins after the pulses is answered in full, and nothing else is.
    later = packets[aborted[-1] + 1 :]
    assert len(later) in (3, 4)
    for (data, user), head in zip(later, heads[-len(later) :], strict=True):
        check_packets(c, replace_packet(result, data, user), [head])


def test_one_abort_one_record_even_when_idle() -> None:
    config = TINY
    head = head_of(config, Shape(tokens=3, width=3), 160, tag=7)
    job = stream_of(config, [head.beats(config)], [head])
    end = int(run_job(config, job).cycles[-1])
    result = run_job(config, replace(job, abort_at=end + 20, packets=2, drain_cycles=200))
    check_packets(config, result, [head, StatusRecord(error=int(ErrorCode.ABORTED), tag=7)])
    with pytest.raises(StreamFault, match="after the last packet"):
        run_job(config, replace(job, abort_at=end + 20, packets=1))


# ---- the gate alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_gate_keeps_both_streams_lawful(seed: int) -> None:
    """Random pulses of any length between random packets: no beat is lost, doubled, changed or taken back."""
    rng = np.random.default_rng(seed)
    config = TINY
    gate = AbortGate(config)
    counts = {"offers": 0, "aborts": 0, "held": 0, "dropped": 0}

    async def bench(ctx: Any) -> None:
        inside = dropping = reset = False
        waiting: tuple[int, int, int] | None = None
        source_waits = False
        lately = False
        chance = (0.01, 0.05, 0.3)[seed % 3]
        pulse = 0
        for _ in range(3000):
            ctx.set(gate.abort, pulse > 0)
            if not source_waits and rng.random() < 0.6:
                ctx.set(gate.i.payload.data, int(rng.integers(1 << 62)))
                ctx.set(gate.i.payload.last, int(rng.random() < 0.2))
                source_waits = True
            ctx.set(gate.i.valid, source_waits)
            ctx.set(gate.to_loader.ready, int(rng.random() < 0.6))
            if not reset and not ctx.get(gate.from_normaliser.valid):
                ctx.set(gate.from_normaliser.payload.data, int(rng.integers(1 << 62)))
                ctx.set(gate.from_normaliser.valid, int(rng.random() < 0.5))
            ready = bool(rng.random() < 0.5)
            ctx.set(gate.o.ready, ready)

            halt = lately  # the units between are being reset
            valid = bool(ctx.get(gate.o.valid))
            now = (ctx.get(gate.o.payload.data), ctx.get(gate.o.payload.user), ctx.get(gate.o.payload.last))
            if waiting is not None:
                assert valid and now == waiting
                counts["held"] += lately
            waiting = now if valid and not ready else None
            counts["offers"] += valid
            taken = source_waits and bool(ctx.get(gate.i.ready))
            passed = bool(ctx.get(gate.to_loader.valid)) and bool(ctx.get(gate.to_loader.ready))
            last = bool(ctx.get(gate.i.payload.last))
            assert passed == (taken and not dropping)
            if dropping:
                assert taken == source_waits
                counts["dropped"] += taken
            if pulse or lately:
                assert not passed
            if taken:
                source_waits = False
                inside = not last
                dropping = dropping and not last
            if pulse:
                dropping = inside
                counts["aborts"] += 1
            lately = pulse > 0
            pulse = max(pulse - 1, 0) or (int(rng.integers(1, 4)) if rng.random() < chance else 0)
            consumed = bool(ctx.get(gate.from_normaliser.valid)) and bool(ctx.get(gate.from_normaliser.ready))
            # The normaliser keeps what it offers, until its reset takes it back.
            reset = halt
            await ctx.tick()
            if consumed or reset:
                ctx.set(gate.from_normaliser.valid, 0)

    simulator = Simulator(gate)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    assert min(counts.values()) > 5, counts
