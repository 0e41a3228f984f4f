"""Holonomy field in hardware: bit for bit against the contract, cycle for cycle against the cycle model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from amaranth.back import rtlil
from amaranth.hdl import ClockDomain, Module, ResetInserter, Signal
from amaranth.sim import Simulator

from dtp.fixed import Int, round_shift
from dtp.holonomy import FieldError, FieldJob, FieldParams, block_scores, block_sums
from rtl.holonomy import HolonomyField
from rtl.lib.multiplier import Multiplier, Target
from sim.cycles.holonomy import field_timing

PARAMS = {
    "tiny": FieldParams(lanes=2, multipliers=2, block=8, max_tokens=64, max_lanes=16),
    "ecp5-85k, d = 16": FieldParams(lanes=4, multipliers=2, block=16, max_tokens=128, max_lanes=16),
    "wide": FieldParams(lanes=16, multipliers=16, block=16, max_tokens=64, max_lanes=64),
    "eight lanes, block 4": FieldParams(lanes=16, multipliers=8, block=4, max_tokens=32, max_lanes=32),
    "four lanes, block 32": FieldParams(lanes=4, multipliers=4, block=32, max_tokens=128, max_lanes=32),
}
_IDLE_CYCLES = 60


@dataclass
class Head:
    """A job with its vectors; ``last`` marks the word that says so, None for the right one."""

    job: FieldJob
    u: Int
    last: int | None = None


def _head(params: FieldParams, random: np.random.Generator, *, tokens: int | None = None, causal: bool = False) -> Head:
    words = int(random.integers(params.min_words, params.max_words + 1))
    count = int(random.integers(1, params.max_tokens + 1)) if tokens is None else tokens
    lanes = words * params.lanes
    kind = random.integers(4)
    energy = int(random.integers(1 << 27, (1 << 30) + 1))
    if kind == 0:
        u = random.integers(-32768, 32768, (count, lanes))
    elif kind == 1:
        u = random.choice([-32768, 32767, 0, -1], (count, lanes))
    else:
        base = random.standard_normal(lanes)
        base = base / np.linalg.norm(base) * np.sqrt(energy)
        noise = random.standard_normal((count, lanes)) * np.sqrt(energy / lanes) * random.choice([0.01, 0.1, 0.5])
        u = np.clip(np.rint(base + noise), -32768, 32767).astype(np.int64)
    return Head(FieldJob.of(params, tokens=count, words=words, probe_energy=energy, causal=causal), u)


def _heads(params: FieldParams, random: np.random.Generator, count: int) -> list[Head]:
    return [_head(params, random, causal=bool(random.integers(2))) for _ in range(count)]


def _expected(params: FieldParams, heads: list[Head]) -> list[tuple[int, int, int]]:
    beats = []
    for head in heads:
        table = block_scores(block_sums(head.u, params), head.job, params)
        blocks = len(table)
        for i in range(blocks):
            stop = i + 1 if head.job.causal else blocks
            for j in range(stop):
                end = int(i == blocks - 1 and j == stop - 1)
                beats.append((int(table[i, j]), int(j == stop - 1), end))
    return beats


@dataclass
class Run:
    """What happened, with cycles."""

    beats: list[tuple[int, int, int]] = field(default_factory=list)
    cycles: list[int] = field(default_factory=list)
    job_offers: list[int] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)
    word_offers: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    error: int = 0
    saturated: int = 0


def _words(params: FieldParams, heads: list[Head]) -> list[tuple[list[int], int]]:
    out = []
    for head in heads:
        rows = head.u.reshape(-1, params.lanes)
        last = len(rows) - 1 if head.last is None else head.last
        if head.last is not None and last >= len(rows):
            rows = np.vstack([rows, np.full((last + 1 - len(rows), params.lanes), 99)])
        out += [([int(v) for v in row], int(n == last)) for n, row in enumerate(rows[: last + 1])]
    return out


def _simulate(
    params: FieldParams,
    heads: list[Head],
    random: np.random.Generator,
    *,
    sink: float = 1.0,
    gaps: float = 0.0,
    late: float = 0.0,
    expected: int,
    raw_jobs: list[dict[str, Any]] | None = None,
    reset_at: int | None = None,
    lent: float | None = None,
) -> Run:
    """Drives all ports by chance, bounded; ``sink``, ``gaps``, ``late``, ``lent`` as probabilities."""
    dut = HolonomyField(params, borrowed=lent is not None)
    run = Run()
    reset = Signal()
    module = Module()
    module.domains.sync = ClockDomain()
    module.submodules.dut = ResetInserter(reset)(dut)
    if lent is not None:
        for n in range(params.multipliers):
            module.submodules[f"lender_{n}"] = lender = Multiplier(18, 18)
            module.d.comb += [
                lender.a.eq(dut.operands[n].a),
                lender.a_enable.eq(1),
                lender.b.eq(dut.operands[n].b),
                dut.products[n].eq(lender.o),
            ]
    words = _words(params, heads)
    jobs = raw_jobs or [
        {
            "tokens": h.job.tokens, "words": h.job.words, "causal": int(h.job.causal),
            "shifts": list(h.job.shifts), "reciprocals": list(h.job.reciprocals),
        }
        for h in heads
    ]  # fmt: skip
    steps = sum(len(h.u) * h.job.words * params.word_steps for h in heads)
    limit = 2000 + int((steps * 2 + expected * (60 + params.max_steps)) / max(0.05, sink * (1 - gaps) * (lent or 1)))

    async def bench(ctx: Any) -> None:
        if reset_at is not None:
            for _ in range(reset_at):
                for port in (dut.job.valid, dut.i.valid, dut.o.ready, dut.i.payload.last):
                    ctx.set(port, int(random.integers(2)))
                ctx.set(dut.job.payload.tokens, int(random.integers(params.block * 2)))
                ctx.set(dut.job.payload.words, params.min_words)
                await ctx.tick()
            ctx.set(dut.job.valid, 0)
            ctx.set(dut.i.valid, 0)
            ctx.set(reset, 1)
            await ctx.tick()
            ctx.set(reset, 0)
        job_offered = word_offered = False
        held: tuple[int, int, int] | None = None
        idle = cycle = 0
        loans = [0, 0]
        while idle < _IDLE_CYCLES:
            if lent is not None:
                loans.append(int(random.random() < lent))
                ctx.set(dut.lent, loans[-1])
                if cycle >= 2 and not loans[-3]:
                    assert not any(ctx.get(value) for pair in dut.operands for value in (pair.a, pair.b))
            assert cycle < limit, f"{len(run.beats)} of {expected} beats, {len(run.words)} words after {cycle} cycles"
            if not job_offered and len(run.jobs) < len(jobs) and random.random() >= late:
                job_offered = True
                run.job_offers.append(cycle)
                ctx.set(dut.job.payload, jobs[len(run.jobs)])
            ctx.set(dut.job.valid, job_offered)
            if not word_offered and len(run.words) < len(words) and random.random() >= gaps:
                word_offered = True
                run.word_offers.append(cycle)
                lanes, last = words[len(run.words)]
                ctx.set(dut.i.payload, {"data": lanes, "last": last})
            ctx.set(dut.i.valid, word_offered)
            ctx.set(dut.o.ready, random.random() < sink)
            if job_offered and ctx.get(dut.job.ready):
                run.jobs.append(cycle)
                job_offered = False
            if word_offered and ctx.get(dut.i.ready):
                run.words.append(cycle)
                word_offered = False
            beat = None
            if ctx.get(dut.o.valid):
                beat = (ctx.get(dut.o.payload.score), ctx.get(dut.o.payload.last), ctx.get(dut.o.payload.end))
                assert held is None or beat == held, "payload changed while it waited"
            else:
                assert held is None, "an offer was taken back"
            if beat is not None and ctx.get(dut.o.ready):
                run.beats.append(beat)
                run.cycles.append(cycle)
                held = None
            else:
                held = beat
            done = len(run.beats) >= expected and len(run.words) == len(words) and len(run.jobs) == len(jobs)
            idle = idle + 1 if done else 0
            cycle += 1
            await ctx.tick()
        run.error, run.saturated = ctx.get(dut.error), ctx.get(dut.saturated)
        ctx.set(dut.error_clear, 1)
        await ctx.tick()
        assert ctx.get(dut.error) == 0 and ctx.get(dut.saturated) == 0

    simulator = Simulator(module)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return run


def _check(params: FieldParams, heads: list[Head], run: Run) -> None:
    wanted = _expected(params, heads)
    assert run.beats == wanted
    assert run.saturated == any(score == 65535 for score, _, _ in wanted)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", PARAMS)
def test_never_stalling_sink(name: str, seed: int) -> None:
    params, random = PARAMS[name], np.random.default_rng(seed)
    heads = _heads(params, random, 4)
    expected = len(_expected(params, heads))
    gaps, late = ((0.3, 0.3), (0.0, 0.0))[seed % 2]
    run = _simulate(params, heads, random, gaps=gaps, late=late, expected=expected)
    _check(params, heads, run)
    assert run.error == FieldError.NONE
    timing = field_timing(params, [h.job for h in heads], job_cycles=run.job_offers, word_cycles=run.word_offers)
    assert timing.jobs.tolist() == run.jobs
    assert timing.words.tolist() == run.words
    assert timing.scores.tolist() == run.cycles


@pytest.mark.parametrize("sink", [0.08, 0.5])
@pytest.mark.parametrize("name", PARAMS)
def test_stalling_sink(name: str, sink: float) -> None:
    params, random = PARAMS[name], np.random.default_rng(round(100 * sink))
    heads = _heads(params, random, 3)
    run = _simulate(params, heads, random, sink=sink, gaps=0.2, late=0.5, expected=len(_expected(params, heads)))
    _check(params, heads, run)


@pytest.mark.parametrize("name", ["tiny", "ecp5-85k, d = 16"])
def test_borrowed_multipliers(name: str) -> None:
    """What is issued is issued in lent cycles; nothing but the cycles changes."""
    params, random = PARAMS[name], np.random.default_rng(8)
    heads = _heads(params, random, 3)
    run = _simulate(params, heads, random, gaps=0.1, lent=0.4, expected=len(_expected(params, heads)))
    _check(params, heads, run)


def test_every_length_of_the_last_block() -> None:
    params, random = PARAMS["tiny"], np.random.default_rng(3)
    heads = [_head(params, random, tokens=tokens) for tokens in range(1, 2 * params.block + 2)]
    run = _simulate(params, heads, random, expected=len(_expected(params, heads)))
    _check(params, heads, run)


def test_shifts_and_caps() -> None:
    """Probes of little energy: every shift; numerators far above the scale's end."""
    params, random = PARAMS["tiny"], np.random.default_rng(4)
    heads = []
    for bits in range(30, 18, -1):
        head = _head(params, random, tokens=12)
        size = np.sqrt((1 << bits) / head.u.shape[1])
        u = np.clip(np.rint(random.standard_normal(head.u.shape) * size * random.choice([0.3, 4, 300])), -32768, 32767)
        job = FieldJob.of(params, tokens=12, words=head.job.words, probe_energy=1 << bits, causal=False)
        heads.append(Head(job, u.astype(np.int64)))
    assert {shift for head in heads for shift in head.job.shifts} >= set(range(14))
    wanted = _expected(params, heads)
    assert 0 < sum(score == 65535 for score, _, _ in wanted) < len(wanted)
    _check(params, heads, _simulate(params, heads, random, expected=len(wanted)))


def _pair(params: FieldParams, distance: int) -> Int:
    """Two tokens that differ in one lane: N = 2 · distance²."""
    u = np.zeros((2, params.min_words * params.lanes), dtype=np.int64)
    low, high = -(distance // 2), distance - distance // 2
    u[:, 0] = np.array([low, high]) << params.field_shift
    return u


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_the_numerator_is_rounded_once(shift: int) -> None:
    """Reciprocals for which a last place of H more or less would change the score."""
    params, random = PARAMS["tiny"], np.random.default_rng(shift)
    factors = np.arange(1 << 16, 1 << 17)
    heads = []
    for distance in range(12001, 14001, 25):
        for size in (distance, distance - 1):
            high = round_shift((2 * size * size) << shift, 2)
            scores = [round_shift(factors * (high + off), 34) for off in (-1, 0, 1)]
            close = np.flatnonzero((scores[0] != scores[1]) | (scores[1] != scores[2]))
            for factor in factors[close][:1]:
                job = FieldJob(2, params.min_words, False, (15, 15, shift), (1 << 16, 1 << 16, int(factor)))
                heads.append(Head(job, _pair(params, size)))
    assert len(heads) >= 20
    _check(params, heads[:40], _simulate(params, heads[:40], random, expected=len(heads[:40])))


def test_a_numerator_that_leaves_its_register_is_capped() -> None:
    """Powers of two that the scale moves out at the top, so that nothing but zeros stays."""
    params, random = PARAMS["tiny"], np.random.default_rng(2)
    heads = []
    for exponent in range(8, 14):
        for shift in (13, 14, 15):
            job = FieldJob(2, params.min_words, False, (shift,) * 3, (1 << 16,) * 3)
            heads.append(Head(job, _pair(params, 1 << exponent)))
    out = [(2 << 2 * e) << s >= 1 << params.numerator_bits for e in range(8, 14) for s in (13, 14, 15)]
    assert 2 <= sum(out) < len(out)
    _check(params, heads, _simulate(params, heads, random, expected=len(heads)))


@pytest.mark.parametrize("name", ["tiny", "wide", "ecp5-85k, d = 16"])
def test_words_that_end_early_or_late(name: str) -> None:
    params, random = PARAMS[name], np.random.default_rng(5)
    for last, error in ((0, FieldError.EARLY), (-2, FieldError.EARLY), (5, FieldError.LATE)):
        heads = [_head(params, random, tokens=params.block + 3) for _ in range(3)]
        total = heads[1].job.tokens * heads[1].job.words
        given = last if last == 0 else total - 1 + last if last < 0 else total + last
        flat = heads[1].u.reshape(-1, params.lanes)
        flat[given + 1 :] = 0
        heads[1] = Head(heads[1].job, flat.reshape(heads[1].u.shape), given)
        run = _simulate(params, heads, random, gaps=0.1, expected=len(_expected(params, heads)))
        _check(params, heads, run)
        assert run.error == error


@pytest.mark.parametrize("field_name", ["tokens", "words"])
def test_a_refused_job_is_drained(field_name: str) -> None:
    params, random = PARAMS["tiny"], np.random.default_rng(6)
    bad = _head(params, random, tokens=5)
    good = _head(params, random, tokens=20)
    limits = {"tokens": (0, params.max_tokens + 1), "words": (params.min_words - 1, params.max_words + 1)}
    for value in limits[field_name]:
        jobs = []
        for head in (bad, good):
            job = {"tokens": head.job.tokens, "words": head.job.words, "causal": 0,
                   "shifts": list(head.job.shifts), "reciprocals": list(head.job.reciprocals)}  # fmt: skip
            jobs.append(job)
        jobs[0][field_name] = value
        run = _simulate(params, [bad, good], random, expected=len(_expected(params, [good])), raw_jobs=jobs)
        assert run.beats == _expected(params, [good])
        assert run.error == FieldError.JOB


@pytest.mark.parametrize("seed", range(3))
def test_reset_forgets_everything(seed: int) -> None:
    params, random = PARAMS["tiny"], np.random.default_rng(seed)
    heads = _heads(params, random, 2)
    run = _simulate(params, heads, random, reset_at=300 + 7 * seed, expected=len(_expected(params, heads)))
    _check(params, heads, run)
    assert run.error == FieldError.NONE


def test_a_head_streams_in_while_the_rows_before_it_leave() -> None:
    """Words and the products of scores take turns: words wait for a score's Gram steps and its last product, no more,
    and the rows of a head have left before the words of the next one end, though these come in every cycle.
    """
    params, random = PARAMS["ecp5-85k, d = 16"], np.random.default_rng(7)
    heads = [_head(params, random, tokens=128) for _ in range(3)]
    for head in heads:
        head.job = FieldJob.of(params, tokens=128, words=4, probe_energy=1 << 30, causal=False)
        head.u = random.integers(-9000, 9000, (128, 16))
    run = _simulate(params, heads, random, expected=192)
    _check(params, heads, run)
    steps, blocks = 128 * 4 * params.word_steps, 8
    second = run.words[512:1024]
    computed = blocks * (blocks + 1) // 2
    assert steps + computed < second[-1] - second[0] <= steps + computed * (4 * params.word_steps + 1)
    assert run.cycles[blocks**2 - 1] < second[-1]


def test_ecp5_cells() -> None:
    """One multiplier cell a lane, and the same ports as the plain description."""
    params = PARAMS["ecp5-85k, d = 16"]
    generic, ecp5 = HolonomyField(params), HolonomyField(params, target=Target.ECP5)
    assert generic.signature == ecp5.signature
    texts = [rtlil.convert(component, emit_src=False) for component in (generic, ecp5)]
    assert [text.count("cell \\MULT18X18D ") for text in texts] == [0, params.multipliers]
