"""Loop accounts in hardware: bit for bit against the contract, cycle for cycle against the cycle model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from amaranth.hdl import ClockDomain, Module, ResetInserter, Signal
from amaranth.sim import Simulator

from dtp.fixed import Int
from dtp.holonomy import BINS, LoopAccounts, LoopError, LoopHeader, LoopParams, ReportKind
from rtl.loops import HolonomyLoops, LoopSequencer
from sim.cycles.loops import loops_timing

PARAMS = {
    "tiny": LoopParams(lanes=2, multipliers=2, max_lanes=16, heads=3, blocks=4),
    "one multiplier": LoopParams(lanes=4, multipliers=1, max_lanes=16, heads=8, blocks=2),
    "wide": LoopParams(lanes=16, multipliers=8, max_lanes=64, heads=5, blocks=1),
}
FLOOR = 1000


@dataclass
class Loop:
    """A loop and the program that it ends or not."""

    header: LoopHeader
    start: Int
    end: Int
    saturated: list[bool]
    last: bool


@dataclass
class Run:
    """What happened, with cycles."""

    reports: list[tuple[int, ...]] = field(default_factory=list)
    cycles: list[int] = field(default_factory=list)
    header_offers: list[int] = field(default_factory=list)
    headers: list[int] = field(default_factory=list)
    word_offers: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    error: int = 0


def _loops(params: LoopParams, random: np.random.Generator, programs: int, count: int) -> list[Loop]:
    loops = []
    for _ in range(programs):
        for n in range(count):
            words = int(random.integers(1, params.max_words + 1))
            start = random.integers(-32768, 32768, words * params.lanes)
            size = random.choice([0, 1, 40, 3000, 65535])
            end = np.clip(start + random.integers(-size, size + 1, len(start)), -32768, 32767)
            if n % 7 == 1:  # a ratio of 299, just past the end
                start, end = np.full_like(start, 100), np.full_like(start, 1830)
            if n % 7 == 2:  # below the floor
                start = random.integers(-2, 3, len(start))
                end = start + random.integers(-9, 10, len(start))
            if n % 7 == 3:
                start = np.zeros_like(start)
            if n % 7 == 5:
                start, end = np.full_like(start, -32768), np.full_like(start, 32767)
            heads = tuple(int(h) for h in random.permutation(params.heads)[: random.integers(3)])
            block = tuple(int(b) for b in random.integers(0, params.blocks, 2))
            flags = [bool(random.random() < 0.15) for _ in range(words)]
            header = LoopHeader(int(random.integers(1 << 16)), heads, (block[0], block[1]))
            loops.append(Loop(header, start, end, flags, n == count - 1))
    return loops


def _expected(params: LoopParams, loops: list[Loop]) -> list[tuple[int, ...]]:
    reports: list[tuple[int, ...]] = []
    accounts = LoopAccounts(params, FLOOR)
    for loop in loops:
        record = accounts.add(loop.header, loop.start, loop.end, saturated=any(loop.saturated))
        reports.append(
            (ReportKind.LOOP, record.tag, record.start, record.end, record.difference, record.ratio,
             int(record.saturated), 0)
        )  # fmt: skip
        if not loop.last:
            continue
        for kind, table in ((ReportKind.HEAD, accounts.heads), (ReportKind.BLOCK, accounts.blocks)):
            for n, values in enumerate(zip(table.sums, table.maxima, table.counts, strict=True)):
                reports.append((kind, n, *(int(v) for v in values), 0, 0, 0))
        for n in range(BINS):
            reports.append((ReportKind.BIN, n, 0, 0, int(accounts.bins[n]), 0, 0, int(n == BINS - 1)))
        accounts = LoopAccounts(params, FLOOR)
    return reports


def _simulate(
    params: LoopParams,
    loops: list[Loop],
    random: np.random.Generator,
    *,
    sink: float = 1.0,
    gaps: float = 0.0,
    expected: int,
    reset_at: int | None = None,
    headers: list[dict[str, Any]] | None = None,
) -> Run:
    """Drives all ports by chance, bounded."""
    dut = HolonomyLoops(params)
    run = Run()
    reset = Signal()
    module = Module()
    module.domains.sync = ClockDomain()
    module.submodules.dut = ResetInserter(reset)(dut)
    sent = headers or [
        {"tag": loop.header.tag, "used": len(loop.header.heads), "heads": (*loop.header.heads, 0, 0)[:2],
         "block": loop.header.block[0] * params.blocks + loop.header.block[1], "last": int(loop.last)}
        for loop in loops
    ]  # fmt: skip
    words = []
    for loop in loops:
        pairs = zip(loop.start.reshape(-1, params.lanes), loop.end.reshape(-1, params.lanes), strict=True)
        for n, (start, end) in enumerate(pairs):
            words.append(
                {"start": [int(v) for v in start], "end": [int(v) for v in end],
                 "saturated": int(loop.saturated[n]), "last": int(n == len(loop.saturated) - 1)}
            )  # fmt: skip
    limit = 2000 + int(
        (len(words) * params.word_cycles + 80 * len(loops) + 2 * expected) / max(0.05, sink * (1 - gaps))
    )

    async def bench(ctx: Any) -> None:
        ctx.set(dut.floor, FLOOR)
        if reset_at is not None:
            for _ in range(reset_at):
                for port in (dut.header.valid, dut.i.valid, dut.o.ready, dut.i.payload.last, dut.header.payload.last):
                    ctx.set(port, int(random.integers(2)))
                await ctx.tick()
            ctx.set(dut.header.valid, 0)
            ctx.set(dut.i.valid, 0)
            ctx.set(reset, 1)
            await ctx.tick()
            ctx.set(reset, 0)
        header_offered = word_offered = False
        held: tuple[int, ...] | None = None
        idle = cycle = 0
        while idle < 80:
            assert cycle < limit, f"{len(run.reports)} of {expected} reports after {cycle} cycles"
            if not header_offered and len(run.headers) < len(sent) and random.random() >= gaps:
                header_offered = True
                run.header_offers.append(cycle)
                ctx.set(dut.header.payload, sent[len(run.headers)])
            ctx.set(dut.header.valid, header_offered)
            if not word_offered and len(run.words) < len(words) and random.random() >= gaps:
                word_offered = True
                run.word_offers.append(cycle)
                ctx.set(dut.i.payload, words[len(run.words)])
            ctx.set(dut.i.valid, word_offered)
            ctx.set(dut.o.ready, random.random() < sink)
            if header_offered and ctx.get(dut.header.ready):
                run.headers.append(cycle)
                header_offered = False
            if word_offered and ctx.get(dut.i.ready):
                run.words.append(cycle)
                word_offered = False
            if ctx.get(dut.o.valid):
                o = dut.o.payload
                report = (
                    int(ctx.get(o.kind)), ctx.get(o.index), *(ctx.get(o.numbers[n]) for n in range(3)),
                    ctx.get(o.ratio), ctx.get(o.saturated), ctx.get(o.last),
                )  # fmt: skip
                assert held is None or report == held, "payload changed while it waited"
                held = report
                if ctx.get(dut.o.ready):
                    run.reports.append(report)
                    run.cycles.append(cycle)
                    held = None
            else:
                assert held is None, "an offer was taken back"
            done = len(run.reports) >= expected and len(run.words) == len(words)
            idle = idle + 1 if done else 0
            cycle += 1
            await ctx.tick()
        run.error = ctx.get(dut.error)
        ctx.set(dut.error_clear, 1)
        await ctx.tick()
        assert ctx.get(dut.error) == 0

    simulator = Simulator(module)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return run


@pytest.mark.parametrize("gaps", [0.0, 0.3])
@pytest.mark.parametrize("name", PARAMS)
def test_never_stalling_sink(name: str, gaps: float) -> None:
    params, random = PARAMS[name], np.random.default_rng(round(10 * gaps))
    loops = _loops(params, random, programs=2, count=9)
    wanted = _expected(params, loops)
    assert {report[5] == (1 << 32) - 1 for report in wanted} == {True, False}
    run = _simulate(params, loops, random, gaps=gaps, expected=len(wanted))
    assert run.reports == wanted and run.error == LoopError.NONE
    timing = loops_timing(
        params,
        [len(loop.saturated) for loop in loops],
        [loop.last for loop in loops],
        header_cycles=run.header_offers,
        word_cycles=run.word_offers,
    )
    assert timing.headers.tolist() == run.headers
    assert timing.words.tolist() == run.words
    assert timing.reports.tolist() == run.cycles


@pytest.mark.parametrize("sink", [0.15, 0.6])
@pytest.mark.parametrize("name", PARAMS)
def test_stalling_sink(name: str, sink: float) -> None:
    params, random = PARAMS[name], np.random.default_rng(round(100 * sink))
    loops = _loops(params, random, programs=2, count=4)
    wanted = _expected(params, loops)
    assert _simulate(params, loops, random, sink=sink, gaps=0.2, expected=len(wanted)).reports == wanted


def test_a_full_entry_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of two bits, for 65,535 loops take too long."""
    monkeypatch.setattr("rtl.loops.COUNT_BITS", 2)
    monkeypatch.setattr("dtp.holonomy.COUNT_BITS", 2)
    params, random = PARAMS["tiny"], np.random.default_rng(7)
    loops = _loops(params, random, programs=1, count=14)
    wanted = _expected(params, loops)
    assert sum(report[0] == ReportKind.HEAD and report[4] == 3 for report in wanted) >= 2
    assert _simulate(params, loops, random, expected=len(wanted)).reports == wanted


def test_reset_clears_the_tables() -> None:
    params, random = PARAMS["tiny"], np.random.default_rng(4)
    loops = _loops(params, random, programs=1, count=3)
    wanted = _expected(params, loops)
    for reset_at in (200, 331):
        assert _simulate(params, loops, random, reset_at=reset_at, expected=len(wanted)).reports == wanted


@pytest.mark.parametrize("part", ["heads", "second head", "block"])
def test_credit_to_what_is_not_there(part: str) -> None:
    params, random = PARAMS["tiny"], np.random.default_rng(5)
    loops = _loops(params, random, programs=1, count=2)
    loops[0].header = LoopHeader(1, () if part == "heads" else (2,), (1, 1))
    sent = [
        {"tag": 1, "used": 1 if part in ("heads", "block") else 2, "heads": [2, 3], "block": 5, "last": 0},
        {"tag": loops[1].header.tag, "used": len(loops[1].header.heads), "heads": (*loops[1].header.heads, 0, 0)[:2],
         "block": loops[1].header.block[0] * 4 + loops[1].header.block[1], "last": 1},
    ]  # fmt: skip
    if part == "heads":
        sent[0]["heads"] = [3, 0]
    if part == "block":
        sent[0]["block"] = 16
    wanted = _expected(params, loops)
    run = _simulate(params, loops, random, expected=len(wanted), headers=sent)
    assert run.error == LoopError.CREDIT
    if part == "block":
        place = 2 + params.heads + 5
        assert wanted[place][0] == ReportKind.BLOCK and wanted[place][1] == 5
        first = LoopAccounts(params, FLOOR).add(loops[0].header, loops[0].start, loops[0].end, saturated=False)
        wanted[place] = (*wanted[place][:2], wanted[place][2] - first.ratio, run.reports[place][3],
                         wanted[place][4] - 1, 0, 0, 0)  # fmt: skip
    assert run.reports == wanted


def test_words_past_the_longest_vector_are_dropped() -> None:
    params, random = PARAMS["tiny"], np.random.default_rng(6)
    loops = _loops(params, random, programs=1, count=3)
    long = random.integers(-32768, 32768, (2, params.max_lanes + 3 * params.lanes))
    loops[1] = Loop(loops[1].header, long[0], long[1], [False] * (params.max_words + 3), False)
    cut = list(loops)
    cut[1] = Loop(loops[1].header, *long[:, : params.max_lanes], [False] * params.max_words, False)
    wanted = _expected(params, cut)
    run = _simulate(params, loops, random, expected=len(wanted))
    assert run.reports == wanted and run.error == LoopError.LENGTH


# ---- sequencer -----------------------------------------------------------------------------------------------------


@dataclass
class Walk:
    """A loop of jobs of the engine stand-in: each maps x to saturate(x + job) and says how many lanes saturated."""

    start: Int
    jobs: list[int]
    firsts: list[int] | None = None


def _step(x: Int, job: int, transposed: bool) -> tuple[Int, int]:
    y = x + (-job if transposed else job)
    return np.clip(y, -32768, 32767), int(((y < -32768) | (y > 32767)).sum())


def _walk(
    params: LoopParams, walks: list[Walk], random: np.random.Generator, *, vectors: int, stall: float, pairs: int
) -> tuple[list[tuple[Any, ...]], int]:
    """Pairs that leave the sequencer beside an engine stand-in in the testbench, and the error."""
    dut = LoopSequencer(params, 16, vectors=vectors)
    out: list[tuple[Any, ...]] = []
    errors: list[int] = []
    steps = [
        {"job": job & 0xFFFF, "transposed": job & 1, "first": walk.firsts[n] if walk.firsts else int(n == 0),
         "last": int(n == len(walk.jobs) - 1)}
        for walk in walks for n, job in enumerate(walk.jobs)
    ]  # fmt: skip
    starts = [
        {"data": [int(v) for v in word], "last": int(n == len(walk.start) // params.lanes - 1)}
        for walk in walks for n, word in enumerate(walk.start.reshape(-1, params.lanes))
    ]  # fmt: skip

    def feed(port: Any, payloads: list[Any]) -> Any:
        async def process(ctx: Any) -> None:
            for payload in payloads:
                while random.random() < stall:
                    await ctx.tick()
                ctx.set(port.payload, payload)
                ctx.set(port.valid, 1)
                await ctx.tick().until(port.ready)
                ctx.set(port.valid, 0)

        return process

    async def take(ctx: Any, port: Any) -> Any:
        while random.random() < stall:
            await ctx.tick()
        ctx.set(port.ready, 1)
        payload = await ctx.tick().sample(port.payload).until(port.valid)
        ctx.set(port.ready, 0)
        return payload[0]

    async def engine(ctx: Any) -> None:
        sizes = [min(len(walk.start) // params.lanes, params.max_words) for walk in walks for _ in walk.jobs]
        for words in sizes:
            ctx.set(dut.engine_idle, 1)
            job = await take(ctx, dut.engine_job)
            ctx.set(dut.engine_idle, 0)
            ctx.set(dut.engine_saturations, 0)
            states = []
            for _ in range(words):
                word = await take(ctx, dut.engine_state)
                slots = [list(word[n]) for n in range(vectors)]
                assert all(slot == slots[0] for slot in slots)
                states += slots[0]
            transposed = bool(job & 1)
            y, over = _step(np.array(states), job - (1 << 16 if job >> 15 else 0), transposed)
            wrong = [[7] * params.lanes] * (vectors - 1)
            for n, word in enumerate(y.reshape(-1, params.lanes)):
                while random.random() < stall:
                    await ctx.tick()
                right = [[int(v) for v in word]]
                ctx.set(dut.engine_o.payload, {
                    "data": wrong + right if transposed else right + wrong, "last": int(n == words - 1),
                })  # fmt: skip
                ctx.set(dut.engine_o.valid, 1)
                await ctx.tick().until(dut.engine_o.ready)
                ctx.set(dut.engine_o.valid, 0)
            for _ in range(int(random.integers(3))):
                await ctx.tick()
            ctx.set(dut.engine_saturations, over)
        ctx.set(dut.engine_idle, 1)

    async def sink(ctx: Any) -> None:
        while len(out) < pairs:
            payload = await take(ctx, dut.o)
            out.append((list(payload.start), list(payload.end), payload.saturated, payload.last))
        for _ in range(20):
            await ctx.tick()
            assert not ctx.get(dut.o.valid)
        errors.append(int(ctx.get(dut.error)))

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(feed(dut.step, steps), background=True)
    simulator.add_testbench(feed(dut.start, starts), background=True)
    simulator.add_testbench(engine, background=True)
    simulator.add_testbench(sink)
    simulator.run_until(1e-8 * 400 * (pairs + len(steps) + 10))
    assert errors, f"{len(out)} of {pairs} pairs in time"
    return out, errors[0]


def _walked(params: LoopParams, walks: list[Walk]) -> list[tuple[Any, ...]]:
    pairs: list[tuple[Any, ...]] = []
    for walk in walks:
        state, over = walk.start, 0
        for job in walk.jobs:
            state, count = _step(state, job, bool(job & 1))
            over += count
        words = [v.reshape(-1, params.lanes).tolist() for v in (walk.start, state)]
        pairs += [
            (a, b, int(over > 0), int(n == len(words[0]) - 1)) for n, (a, b) in enumerate(zip(*words, strict=True))
        ]
    return pairs


@pytest.mark.parametrize("stall", [0.0, 0.4])
@pytest.mark.parametrize("vectors", [1, 2])
def test_sequencer(vectors: int, stall: float) -> None:
    """States go round the engine in order, saturation anywhere flags its loop alone."""
    params, random = PARAMS["tiny"], np.random.default_rng(vectors)
    walks = []
    for n in range(6):
        size = int(random.integers(1, params.max_words + 1)) * params.lanes
        start = random.integers(-2000, 2000, size)
        jobs = [int(j) for j in random.integers(-3000, 3000, random.integers(1, 5))]
        if n % 3 == 1:
            jobs[0] = 32766 + int(random.integers(2))
        walks.append(Walk(start, jobs))
    wanted = _walked(params, walks)
    assert {pair[2] for pair in wanted} == {0, 1}
    assert _walk(params, walks, random, vectors=vectors, stall=stall, pairs=len(wanted)) == (wanted, LoopError.NONE)


def test_sequencer_errors() -> None:
    params, random = PARAMS["tiny"], np.random.default_rng(1)
    start = random.integers(-99, 99, 4)
    for firsts in ([0, 0], [1, 1]):
        walks = [Walk(start, [5, 8], firsts), Walk(start, [4])]
        wanted = _walked(params, walks)
        assert _walk(params, walks, random, vectors=1, stall=0.1, pairs=len(wanted)) == (wanted, LoopError.SEQUENCE)
    long = random.integers(-99, 99, params.max_lanes + 3 * params.lanes)
    cut = [Walk(long[: params.max_lanes], [5, 8]), Walk(start, [4])]
    wanted = _walked(params, cut)
    walks = [Walk(long, [5, 8]), Walk(start, [4])]
    assert _walk(params, walks, random, vectors=1, stall=0.1, pairs=len(wanted)) == (wanted, LoopError.LENGTH)
