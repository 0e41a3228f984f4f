"""The lift unit by itself: start and stop of programs, its counter, its cells. Its results are the loader's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from amaranth.back import rtlil
from amaranth.sim import Simulator

from dtp.config import Config
from dtp.job import Job
from dtp.lift import SATURATION_CYCLES, START_CYCLES, LiftParams, lift_queries
from rtl.lib.multiplier import Target
from rtl.lift import Lift, ScaleLayout

CONFIG = Config.load("tiny")


def simulate(dut: Lift, bench: Any) -> None:
    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()


def set_job(ctx: Any, dut: Lift, job: Job) -> None:
    for name in ScaleLayout().members:
        ctx.set(getattr(dut.scales, name), getattr(job, name))
    ctx.set(dut.shifts.vector, job.key_vector_shift)
    ctx.set(dut.shifts.outer, job.key_outer_shift)
    ctx.set(dut.shifts.metric, job.key_metric_shift)
    ctx.set(dut.shifts.bias, job.bias_shift)


def word_of(values: np.ndarray) -> int:
    return sum((int(v) & 255) << 8 * n for n, v in enumerate(values))


@pytest.mark.parametrize("pause", [0, 1, 5])
def test_plain_queries_stream(pause: int) -> None:
    """After a descriptor the scale is there for the first word; a word a cycle, each ``result_cycles`` on its way."""
    dut = Lift(CONFIG)
    rng = np.random.default_rng(pause)
    queries = rng.integers(-128, 128, (40, CONFIG.lift_tokens))
    job = Job(tokens=4, valid_length=4, width=1, query_scale=51_234)
    expected = [
        lift_queries(CONFIG, job, row[:, np.newaxis], None)[0][:, 0] for row in queries[:, : CONFIG.rows]
    ]
    taken: list[int] = []
    seen: list[tuple[int, list[int]]] = []

    async def bench(ctx: Any) -> None:
        set_job(ctx, dut, job)
        await ctx.tick()
        ctx.set(dut.descriptor, 1)
        await ctx.tick()
        ctx.set(dut.descriptor, 0)
        number, since = 0, 0
        for cycle in range(400):
            offer = number < len(queries) and since >= pause
            ctx.set(dut.word_valid, offer)
            ctx.set(dut.word, word_of(queries[number]) if offer else 0)
            since += 1
            if offer and ctx.get(dut.word_taken):
                taken.append(cycle)
                number, since = number + 1, 0
            if ctx.get(dut.emit_valid):
                seen.append((cycle, [ctx.get(dut.emit_data[row][0]) for row in range(CONFIG.rows)]))
            await ctx.tick()

    simulate(dut, bench)
    assert len(taken) == len(queries)
    assert [cycle for cycle, _ in seen] == [cycle + LiftParams(CONFIG).result_cycles for cycle in taken]
    assert [values for _, values in seen] == [row.tolist() for row in expected]
    if pause == 0:
        assert taken == list(range(taken[0], taken[0] + len(queries))) and taken[0] == LiftParams(CONFIG).result_cycles


@pytest.mark.parametrize("interrupt", range(12))
def test_start_ends_what_runs(interrupt: int) -> None:
    """A program started at any moment issues its first word START_CYCLES later and runs to its end."""
    dut = Lift(CONFIG)
    params = LiftParams(CONFIG)
    program = params.programs["keys"]
    cycles: dict[str, int] = {}

    async def bench(ctx: Any) -> None:
        ctx.set(dut.count, CONFIG.block)
        ctx.set(dut.word_valid, 1)
        for name in ("lift_queries", "keys"):
            ctx.set(dut.entry, params.programs[name].start)
            ctx.set(dut.start, 1)
            await ctx.tick()
            ctx.set(dut.start, 0)
            if name == "lift_queries":
                for _ in range(interrupt):
                    assert not ctx.get(dut.done)
                    await ctx.tick()
        for cycle in range(1, 200):
            if ctx.get(dut.word_taken):
                cycles.setdefault("first", cycle)
                cycles["last"] = cycle
            if ctx.get(dut.done):
                assert "done" not in cycles
                cycles["done"] = cycle
            await ctx.tick()

    simulate(dut, bench)
    # The first instruction of the program takes no word.
    assert cycles["first"] == START_CYCLES + 1
    assert cycles["last"] == cycles["first"] + CONFIG.block + 1
    total = sum(i.cycles for i in program.code) + CONFIG.block - 1
    assert cycles["done"] == START_CYCLES + total - 1


def test_counter_stops() -> None:
    """Saturations of the lanes of a cycle are counted together; the counter stays at its end, and is cleared."""
    dut = Lift(CONFIG)
    params = LiftParams(CONFIG)
    job = Job(tokens=4, valid_length=4, width=16, lift=True, bias=True, lift_metric_scale=32767)
    per_group = None

    async def bench(ctx: Any) -> None:
        nonlocal per_group
        set_job(ctx, dut, job)
        ctx.set(dut.word_valid, 1)
        ctx.set(dut.word, word_of(np.full(CONFIG.lift_tokens, 127)))
        ctx.set(dut.count, 2)
        for name in ("lift_constants", "lift_queries"):
            ctx.set(dut.entry, params.programs[name].start)
            ctx.set(dut.start, 1)
            await ctx.tick()
            ctx.set(dut.start, 0)
            while not ctx.get(dut.done):
                await ctx.tick()
            await ctx.tick()
        for _ in range(LiftParams(CONFIG).result_cycles + SATURATION_CYCLES):
            await ctx.tick()
        per_group = ctx.get(dut.saturations)
        # The last words of a group saturate no more: the counter stands still.
        await ctx.tick()
        assert ctx.get(dut.saturations) == per_group
        ctx.set(dut.clear, 1)
        await ctx.tick()
        ctx.set(dut.clear, 0)
        assert ctx.get(dut.saturations) == 0
        expected = 0
        while expected < 65535:
            ctx.set(dut.start, 1)
            await ctx.tick()
            ctx.set(dut.start, 0)
            while not ctx.get(dut.done):
                await ctx.tick()
            for _ in range(LiftParams(CONFIG).result_cycles + SATURATION_CYCLES):
                await ctx.tick()
            expected = min(65535, expected + per_group)
            assert ctx.get(dut.saturations) == expected
            if expected < 60_000:
                # Near the end by hand: a run of that length would take minutes.
                expected = 65_535 - 2 * per_group + 1
                ctx.set(dut.saturations, expected)

    simulate(dut, bench)
    x = np.full((4, 16), 127)
    want = lift_queries(CONFIG, job, x, np.full((4, 3, 3), 127))[1]
    assert per_group == want > 0


@pytest.mark.parametrize("name", ["tiny", "wide"])
def test_cells_of_the_fpga(name: str) -> None:
    """With explicit cells every lane has one multiplier block."""
    config = Config.load(name)
    text = rtlil.convert(Lift(config, target=Target.ECP5))
    assert text.count("cell \\MULT18X18D") == config.lift_tokens
