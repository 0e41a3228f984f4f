"""Normaliser in hardware: bit for bit against the contract, cycle for cycle against the cycle model."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pytest
from amaranth.back import rtlil
from amaranth.hdl import ClockDomain, Module, ResetInserter, Signal
from amaranth.sim import Simulator

from dtp.config import Config
from dtp.fixed import Int
from dtp.job import StatusRecord
from dtp.normaliser import NormaliserParams, RecordKind, normalise, output_bytes
from rtl.lib.multiplier import Target
from rtl.normaliser import Normaliser
from rtl.softmax import Softmax
from sim.cycles.normaliser import normaliser_timing

_TINY = Config.load("tiny")
CONFIGS = {
    "tiny": _TINY,
    "ecp5-85k": Config.load("ecp5-85k").changed(name="shallow", max_tokens=64, max_width=32),
    "one lane": _TINY.changed(normaliser_lanes=1),
    "two lanes": _TINY.changed(normaliser_lanes=2, output_slots=4),
    "lanes over segments": _TINY.changed(lanes=16, output_bytes=16, normaliser_lanes=8, input_bytes=8),
    "half a row set": _TINY.changed(lanes=16, output_bytes=8, normaliser_lanes=2, rows=8),
    "8 to 8 bits": _TINY.changed(output_bits=8, output_bytes=4),
    "8 to 8 bits, p of 8": _TINY.changed(output_bits=8, output_bytes=4, probability_bits=8, normaliser_lanes=2),
    "16 to 16 bits": _TINY.changed(operand_bits=16, probability_bits=12),
    "16 to 16 bits, p of 16": _TINY.changed(operand_bits=16, probability_bits=16, normaliser_lanes=2),
    "one lane of four segments": _TINY.changed(rows=8, block=16, max_width=32, lanes=64, normaliser_lanes=2),
    "wide": Config.load("wide").changed(name="shallow-wide", max_tokens=64, max_width=32),
}
_IDLE_CYCLES = 40


@dataclass
class Record:
    """One record and what belongs to it."""

    kind: RecordKind
    steps: int = 0
    live: int = 0
    tag: int = 0
    error: int = 0
    lift: int = 0
    sums: Int = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    denominators: Int = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    scores: int = 0


def _group(config: Config, random: np.random.Generator, steps: int, live: int) -> Record:
    """A group of legal sums: every row a mean of its values, with extremes and empty rows."""
    p = config.probability_bits
    low, high = 1 << (p - 1), ((1 << p) - 1) * config.max_tokens
    l = np.exp(random.uniform(np.log(low), np.log(high), config.rows)).astype(np.int64)  # noqa: E741
    corner = random.random(config.rows) < 0.3
    l[corner] = random.choice([low, low + 1, 2 * low - 1, 2 * low, high], int(corner.sum()))
    l[(random.random(config.rows) < 0.25) | (np.arange(config.rows) >= live)] = 0
    operand = 1 << (config.operand_bits - 1)
    shape = (config.rows, steps * config.segments)
    means = random.integers(-operand, operand, shape)
    means = np.where(random.random(shape) < 0.2, random.choice([-operand, operand - 1, 0], shape), means)
    part = np.where(random.random(shape) < 0.5, 1.0, random.random(shape))
    sums = (means * l[:, None] * part).astype(np.int64)
    scores = int(random.integers(0, config.rows * config.max_tokens + 1)) if random.random() < 0.7 else 0
    return Record(RecordKind.DATA, steps, live, sums=sums, denominators=l, scores=scores)


def _records(
    config: Config, random: np.random.Generator, jobs: int, groups: int, *, data_only: bool = False
) -> list[Record]:
    """Jobs of up to ``groups`` groups, some of them empty; ``data_only``: exactly so many, none empty."""
    records: list[Record] = []
    for _ in range(jobs):
        steps = int(random.integers(1, config.max_chunks + 1)) * config.pass_steps
        for _ in range(int(random.integers(0, groups + 1)) if not data_only else groups):
            live = int(random.integers(1, config.rows + 1)) if random.random() < 0.3 else config.rows
            if random.random() < 0.3 and not data_only:
                live = 0 if random.random() < 0.2 else live
                records.append(Record(RecordKind.NULL, steps, live))
            else:
                records.append(_group(config, random, steps, live))
        tag, error = int(random.integers(1 << 16)), int(random.integers(256))
        records.append(
            Record(RecordKind.STATUS, tag=tag, error=error, lift=int(random.integers(1 << 16)))
        )
    return records


def _expected(config: Config, records: list[Record]) -> list[tuple[bytes, int, int]]:
    """Beats as (data, user, last), from the integer contract."""
    beats: list[tuple[bytes, int, int]] = []
    empty = scores = over = 0

    def emit(block: bytes, user: int) -> None:
        size = config.output_bytes
        assert len(block) % size == 0
        beats.extend((block[n : n + size], user, 0) for n in range(0, len(block), size))

    for record in records:
        columns = record.steps * config.segments
        live = (1 << record.live) - 1
        if record.kind is RecordKind.DATA:
            outputs, count = normalise(record.sums, record.denominators, config)
            user = live & sum(1 << row for row in range(config.rows) if record.denominators[row] == 0)
            over, scores = min(over + count, 65535), min(scores + record.scores, 65535)
            emit(output_bytes(outputs, config), user)
            empty += user.bit_count()
        elif record.kind is RecordKind.NULL:
            emit(output_bytes(np.zeros((config.rows, columns)), config), live)
            empty += record.live
        else:
            status = StatusRecord(record.error, record.tag, empty, scores, record.lift, over).pack()
            emit(status + bytes(-len(status) % config.output_bytes), 0)
            beats[-1] = (*beats[-1][:2], 1)
            empty = scores = over = 0
    return beats


@dataclass
class Run:
    """What happened: beats as (cycle, data, user, last), and the cycles of all that went in."""

    beats: list[tuple[int, bytes, int, int]] = field(default_factory=list)
    pushes: list[int] = field(default_factory=list)
    values: list[list[int]] = field(default_factory=list)
    group_valids: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    """record.ready, asked for the kind of the record that waits."""
    most_outstanding: int = 0


def _simulate(
    config: Config,
    records: list[Record],
    random: np.random.Generator,
    *,
    sink: float = 1.0,
    gaps: float = 0.3,
    late: float = 0.3,
    reset_at: int | None = None,
) -> Run:
    """Drives every port by chance, inside the promises of the component; bounded.

    ``sink``: how often the sink is ready. ``gaps``: how often a value, ``late``: how often a record or a group_valid
    waits a cycle. ``reset_at``: a cycle of synchronous reset, before which the ports are driven with noise.
    """
    p = NormaliserParams(config)
    dut = Normaliser(config)
    run = Run()
    data = [record for record in records if record.kind is RecordKind.DATA]
    run.values = [[] for _ in data]
    total = len(_expected(config, records))
    reset = Signal()
    module = Module()
    module.domains.sync = ClockDomain()
    module.submodules.dut = ResetInserter(reset)(dut)
    limit = 4000 + 60 * total * p.beat_words

    async def noise(ctx: Any, cycles: int) -> None:
        for _ in range(cycles):
            for port in (dut.i_valid, dut.group_valid, dut.record.valid, dut.o.ready):
                ctx.set(port, int(random.integers(2)))
            for port in (dut.i_slot, dut.i_step):
                ctx.set(port, int(random.integers(1 << len(port))))
            ctx.set(dut.record.payload.kind, int(random.integers(3)))
            ctx.set(dut.record.payload.steps, config.pass_steps)
            ctx.set(dut.saturations, 3)
            await ctx.tick()
        for port in (dut.i_valid, dut.group_valid, dut.record.valid):
            ctx.set(port, 0)
        ctx.set(reset, 1)
        await ctx.tick()
        ctx.set(reset, 0)

    async def bench(ctx: Any) -> None:
        if reset_at is not None:
            await noise(ctx, reset_at)
        next_record = pushed_groups = group = step = 0
        offered = False
        since_valid, rotating = 1 << 20, []
        held: tuple[int, int, int] | None = None
        idle = cycle = 0
        while idle < _IDLE_CYCLES:
            assert cycle < limit, f"{len(run.beats)} of {total} beats after {cycle} cycles"
            # Record.
            if not offered and next_record < len(records) and random.random() >= late:
                offered = True
            kind = records[next_record].kind if next_record < len(records) else RecordKind.NULL
            if next_record < len(records):
                record = records[next_record]
                ctx.set(dut.record.payload.kind, int(record.kind))
                ctx.set(dut.record.payload.steps, record.steps)
                ctx.set(dut.record.payload.live_rows, (1 << record.live) - 1)
                ctx.set(dut.record.payload.tag, record.tag)
                ctx.set(dut.record.payload.error, record.error)
                ctx.set(dut.record.payload.lift_saturations, record.lift)
            ctx.set(dut.record.valid, offered)
            # Values of groups that were pushed in an earlier cycle.
            send = group < pushed_groups and random.random() >= gaps
            ctx.set(dut.i_valid, send)
            ctx.set(dut.i_slot, group % config.output_slots if send else int(random.integers(config.output_slots)))
            ctx.set(dut.i_step, step if send else int(random.integers(p.max_steps)))
            if send:
                first = step * config.segments
                ctx.set(
                    dut.i_data,
                    [[int(v) for v in row[first : first + config.segments]] for row in data[group].sums],
                )
                run.values[group].append(cycle)
            # Denominators, ahead of the records by at most lookahead + 1 groups. Rows rotate into place, noise around.
            done = len(run.group_valids)
            if (
                not rotating
                and done < len(data)
                and done <= pushed_groups + config.lookahead
                and since_valid + p.conversion_cycles > p.group_spacing
                and random.random() >= late
            ):
                rotating = list(range(0, config.rows, p.reciprocal_rows))
            shown = random.integers(0, 1 << config.denominator_bits, config.rows)
            ctx.set(dut.saturations, int(random.integers(1 << p.count_bits)))
            ctx.set(dut.group_valid, 0)
            if rotating:
                row = rotating.pop(0)
                shown[config.rows - p.reciprocal_rows :] = data[done].denominators[row : row + p.reciprocal_rows]
                if not rotating:
                    ctx.set(dut.group_valid, 1)
                    ctx.set(dut.saturations, data[done].scores)
                    run.group_valids.append(cycle)
                    since_valid = 0
            ctx.set(dut.denominators, [int(v) for v in shown])
            since_valid += 1
            ctx.set(dut.o.ready, random.random() < sink)

            # What happened.
            ready = ctx.get(dut.record.ready)
            run.ready.append(ready)
            if offered and ready:
                run.pushes.append(cycle)
                pushed_groups += kind is RecordKind.DATA
                next_record += 1
                offered = False
            if send:
                step += 1
                if step == data[group].steps:
                    group, step = group + 1, 0
            beat = (ctx.get(dut.o.payload.data), ctx.get(dut.o.payload.user), ctx.get(dut.o.payload.last))
            valid = ctx.get(dut.o.valid)
            if held is not None:
                assert valid and beat == held, f"a waiting beat changed in cycle {cycle}"
            held = beat if valid and not ctx.get(dut.o.ready) else None
            if valid and ctx.get(dut.o.ready):
                run.beats.append((cycle, beat[0].to_bytes(config.output_bytes, "little"), *beat[1:]))
                idle = 0
            elif len(run.beats) >= total:
                idle += 1
            await ctx.tick()
            cycle += 1
        assert next_record == len(records) and group == len(data) and len(run.group_valids) == len(data)

    simulator = Simulator(module)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return run


def _check_beats(config: Config, records: list[Record], run: Run) -> None:
    expected = _expected(config, records)
    assert len(run.beats) == len(expected), f"{len(run.beats)} beats, {len(expected)} expected"
    for n, (beat, wanted) in enumerate(zip(run.beats, expected, strict=True)):
        assert beat[1:] == wanted, f"beat {n} of {len(expected)}"


def _timing(config: Config, records: list[Record], run: Run) -> Any:
    return normaliser_timing(
        config,
        kinds=[record.kind for record in records],
        pushes=run.pushes,
        steps=[record.steps for record in records],
        values=run.values,
        group_valids=run.group_valids,
    )


def _check_cycles(config: Config, records: list[Record], run: Run) -> None:
    """Beats in the predicted cycles, and record.ready in every cycle as the contract says."""
    p = NormaliserParams(config)
    timing = _timing(config, records, run)
    assert [beat[0] for beat in run.beats] == timing.beats.tolist()
    kinds = np.array([record.kind for record in records])
    pushes = np.array(run.pushes)
    for cycle, ready in enumerate(run.ready):
        number = int(np.count_nonzero(pushes < cycle))
        if number == len(records):
            break
        before = slice(0, number)
        held = timing.freed[before] > cycle
        data = int(np.count_nonzero(held & (kinds[before] == RecordKind.DATA)))
        status = bool(np.any(held & (kinds[before] == RecordKind.STATUS)))
        waiting = int(np.count_nonzero(timing.last_issue[before] + 1 > cycle))
        kind = kinds[number]
        allowed = waiting < p.record_depth
        allowed &= not (kind == RecordKind.DATA and data >= config.output_slots)
        allowed &= not (kind == RecordKind.STATUS and status)
        assert ready == allowed, f"record.ready in cycle {cycle}, record {number}"
        run.most_outstanding = max(run.most_outstanding, data)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_never_stalling_sink(name: str, seed: int) -> None:
    config, random = CONFIGS[name], np.random.default_rng(seed)
    records = _records(config, random, jobs=5, groups=6)
    gaps, late = ((0.3, 0.3), (0.0, 0.0))[seed % 2]
    run = _simulate(config, records, random, gaps=gaps, late=late)
    _check_beats(config, records, run)
    _check_cycles(config, records, run)


@pytest.mark.parametrize("sink", [0.15, 0.5, 0.9])
@pytest.mark.parametrize("name", CONFIGS)
def test_stalling_sink(name: str, sink: float) -> None:
    config, random = CONFIGS[name], np.random.default_rng(round(100 * sink))
    records = _records(config, random, jobs=3, groups=4)
    run = _simulate(config, records, random, sink=sink)
    _check_beats(config, records, run)
    # A stall never makes a beat earlier than the contract's cycle.
    assert np.all(np.array([beat[0] for beat in run.beats]) >= _timing(config, records, run).beats)


@pytest.mark.parametrize("name", ["tiny", "wide", "ecp5-85k"])
def test_rate(name: str) -> None:
    """While values are there, a beat leaves every ``beat_words`` cycles, across steps and groups."""
    config, random = CONFIGS[name], np.random.default_rng(7)
    p = NormaliserParams(config)
    records = _records(config, random, jobs=1, groups=6, data_only=True)
    run = _simulate(config, records, random, gaps=0.0, late=0.0)
    _check_beats(config, records, run)
    _check_cycles(config, records, run)
    cycles = np.array([beat[0] for beat in run.beats[: -p.status_beats]])
    assert run.most_outstanding == config.output_slots
    assert np.all(np.diff(cycles[len(cycles) // 3 :]) == p.beat_words)
    gap = p.status_gap + p.beat_words - 1
    assert run.beats[-1][0] - cycles[-1] == gap + (p.status_beats - 1) * p.beat_words


@pytest.mark.parametrize("name", ["tiny", "one lane", "wide", "ecp5-85k"])
def test_latency(name: str) -> None:
    """A value whose reciprocals are there is on the output ``latency`` cycles later, if its words fill the beat."""
    config, random = CONFIGS[name], np.random.default_rng(8)
    p = NormaliserParams(config)
    records = _records(config, random, jobs=1, groups=1, data_only=True)
    run = _simulate(config, records, random, gaps=0.95, late=0.0)
    _check_beats(config, records, run)
    _check_cycles(config, records, run)
    last_value = np.array(run.values[0])
    step_beats = p.step_words // p.beat_words
    last_beat = np.array([beat[0] for beat in run.beats])[step_beats - 1 :: step_beats]
    waited = last_beat[: len(last_value)] - last_value
    assert waited.min() == p.latency + p.step_words - 1


def test_null_groups_and_status_alone() -> None:
    config, random = _TINY, np.random.default_rng(3)
    status = [Record(RecordKind.STATUS, tag=n, error=n) for n in range(4)]
    nulls = [Record(RecordKind.NULL, config.pass_steps, config.rows) for _ in range(40)]
    records = [*status, *nulls, Record(RecordKind.STATUS, tag=9), Record(RecordKind.STATUS, tag=10)]
    for sink in (1.0, 0.3):
        run = _simulate(config, records, random, late=0.0, sink=sink)
        _check_beats(config, records, run)
    _check_cycles(config, records, _simulate(config, records, random, late=0.0))
    final = StatusRecord.parse(b"".join(beat[1] for beat in run.beats[-4:-2]))
    assert final == StatusRecord(0, 9, 40 * config.rows, 0, 0, 0)


def test_output_saturations_are_counted() -> None:
    """Rows of the most negative operand whose l lies above the middle of a table interval leave the range."""
    config = CONFIGS["8 to 8 bits"].changed(output_bits=16, output_bytes=8)
    random = np.random.default_rng(5)
    records = []
    for _ in range(3):
        record = _group(config, random, config.max_width, config.rows)
        record.denominators[:] = [(1 << 16) - 1, 1 << 16, 3 << 11, (1 << 15) + 31]
        record.sums[:] = -(1 << (config.operand_bits - 1)) * record.denominators[:, None]
        records.append(record)
    records.append(Record(RecordKind.STATUS, tag=77))
    count = sum(normalise(record.sums, record.denominators, config)[1] for record in records[:3])
    assert 0 < count < 3 * config.rows * config.max_width
    run = _simulate(config, records, random)
    _check_beats(config, records, run)
    assert StatusRecord.parse(b"".join(beat[1] for beat in run.beats[-2:])).output_saturations == count


def test_score_saturations_stop() -> None:
    config, random = CONFIGS["wide"].changed(max_tokens=4096, max_width=16), np.random.default_rng(6)
    records = []
    for scores in (40_000, 25_535, 1, 65_536, 0):
        record = _group(config, random, config.pass_steps, config.rows)
        record.scores = scores
        records.append(record)
    records += [Record(RecordKind.STATUS, tag=1), _group(config, random, config.pass_steps, config.rows)]
    records[-1].scores = 5
    records.append(Record(RecordKind.STATUS, tag=2))
    run = _simulate(config, records, random)
    _check_beats(config, records, run)
    counts = [StatusRecord.parse(beat[1]).score_saturations for beat in run.beats if beat[3]]
    assert counts == [65535, 5]


@pytest.mark.parametrize("seed", range(4))
def test_reset_forgets_everything(seed: int) -> None:
    config, random = CONFIGS["two lanes"], np.random.default_rng(seed)
    records = _records(config, random, jobs=2, groups=4)
    run = _simulate(config, records, random, reset_at=60 + 7 * seed)
    _check_beats(config, records, run)
    _check_cycles(config, records, run)


@pytest.mark.parametrize("name", ["tiny", "lanes over segments", "ecp5-85k", "wide"])
def test_denominators_of_the_softmax_rotate_into_place(name: str) -> None:
    """What the normaliser looks at, against what the softmax shows all at once; pulses as far apart as promised."""
    config, random = CONFIGS[name], np.random.default_rng(4)
    p = NormaliserParams(config)
    dut = Softmax(config)
    cycles = p.conversion_cycles
    shown: list[list[int]] = []
    pulses: list[int] = []
    items, period = 12, max(config.block, config.pass_steps + dut.params.item_lead)

    async def bench(ctx: Any) -> None:
        for cycle in range(items * period + dut.params.group_latency + 2 * period):
            item, place = divmod(cycle, period)
            ctx.set(dut.item_valid, item < items and place == 0)
            ctx.set(
                dut.item,
                {"slot": item % dut.params.slots, "first": item % 3 != 1, "last": item % 3 != 0,
                 "key_base": 0, "query_base": 0, "valid_length": config.rows - 1, "causal": 1},
            )  # fmt: skip
            step = place - dut.params.item_lead
            ctx.set(dut.i_valid, item < items and 0 <= step < config.pass_steps)
            ctx.set(dut.i_slot, item % dut.params.slots)
            ctx.set(dut.i_step, max(0, step) % config.pass_steps)
            scores = random.integers(-9999, 9999, (config.rows, config.segments))
            ctx.set(dut.i_data, [[int(v) for v in row] for row in scores])
            shown.append(list(ctx.get(dut.denominators)))
            if ctx.get(dut.group_valid):
                pulses.append(cycle)
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    assert len(pulses) == sum(item % 3 != 0 for item in range(items))
    assert min(np.diff(pulses)) >= p.group_spacing
    for pulse in pulses:
        seen = [row[config.rows - p.reciprocal_rows :] for row in shown[pulse - cycles + 1 : pulse + 1]]
        assert list(chain.from_iterable(seen)) == shown[pulse]
        assert any(shown[pulse]) and shown[pulse][-1] == 0


def test_ecp5_cells() -> None:
    """One multiplier cell a lane, and the same ports as the plain description."""
    generic, ecp5 = Normaliser(_TINY), Normaliser(_TINY, target=Target.ECP5)
    assert generic.signature == ecp5.signature
    texts = [rtlil.convert(component, emit_src=False) for component in (generic, ecp5)]
    assert [text.count("cell \\MULT18X18D ") for text in texts] == [0, _TINY.normaliser_lanes]
