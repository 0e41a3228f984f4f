"""Matrix mode in hardware: bit for bit against the contract, cycle for cycle against the cycle model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from amaranth.back import rtlil
from amaranth.hdl import ClockDomain, Module, ResetInserter, Signal
from amaranth.sim import Simulator

from dtp.config import Config
from dtp.fixed import Int
from dtp.matrix import Activation, MatrixJob, MatrixParams, bias_words, matrix, padded, weight_entries, words
from rtl.lib.multiplier import Target
from rtl.matrix import MatrixUnit, SaturationCounter
from sim.cycles.matrix import matrix_timing

_TINY = Config.load("tiny")
CONFIGS = {
    "tiny": _TINY,
    "two segments": _TINY.changed(lanes=16, output_bytes=16, input_bytes=16, normaliser_lanes=2, max_mlp=128),
    "one lane": _TINY.changed(normaliser_lanes=1, max_width=8),
    "16 bits": _TINY.changed(operand_bits=16, normaliser_lanes=2),
    "ecp5-85k": Config.load("ecp5-85k").changed(name="shallow", max_model=32, max_mlp=128),
    "wide": Config.load("wide").changed(
        name="shallow-wide", rows=4, normaliser_lanes=8, output_bytes=32, max_model=32, max_mlp=128
    ),
}
_IDLE_CYCLES = 30


@dataclass
class Pass:
    """One group's job and its operands."""

    job: MatrixJob
    state: Int
    weights: Int
    bias: Int | None
    bias_base: int


def passes(config: Config, random: np.random.Generator, count: int, *, most: int, shapes: Any = None) -> list[Pass]:
    """Jobs of drawn shapes and numbers, their biases side by side."""
    made, base = [], 0
    limit = 1 << (config.operand_bits - 1)
    more = (config.operand_bits - 8) // 2
    for n in range(count):
        width, columns = (int(v) for v in random.integers(1, most + 1, 2)) if shapes is None else shapes[n]
        biased = bool(random.random() < 0.6)
        job = MatrixJob(
            width=width, columns=columns, feed_gain=int(random.integers(0, 4)), shift=int(random.integers(0, 9)) + more,
            scale=int(random.integers(1, 1 << 17)), out_shift=int(random.integers(0, 12)),
            activation=Activation(int(random.integers(3))), wide=bool(random.random() < 0.4), bias=biased,
        )  # fmt: skip
        if random.random() < 0.2:
            job = replace(job, shift=31)
        x = (random.normal(size=(config.rows, width)) * random.choice([300, 3000, 20000])).astype(np.int64)
        w = random.integers(-limit, limit, (columns, width))
        b = random.integers(-(1 << 23), 1 << 23, columns) >> int(random.integers(12)) if biased else None
        size = job.blocks(config) * config.pass_steps
        if biased and base + size > MatrixParams(config).bias_words:
            break
        made.append(Pass(job, np.clip(x, -32768, 32767), w, b, base))
        base += size if biased else 0
    return made


@dataclass
class Run:
    jobs: list[int] = field(default_factory=list)
    activations: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    outputs: list[tuple[int, list[int], int]] = field(default_factory=list)
    saturations: int = 0


def simulate(
    config: Config,
    work: list[Pass],
    random: np.random.Generator,
    *,
    source: float = 1.0,
    weight: float = 1.0,
    sink: float = 1.0,
    reset_at: int | None = None,
) -> Run:
    """Jobs through the unit; each stream is offered, or taken, with its chance a cycle. Bounded."""
    dut = MatrixUnit(config)
    run = Run()
    reset = Signal()
    module = Module()
    module.domains.sync = ClockDomain()
    module.submodules.dut = ResetInserter(reset)(dut)
    feeds = [word for item in work for word in words(config, item.state)]
    entries = [entry for item in work for entry in weight_entries(config, item.job, item.weights)]
    total = sum(item.job.blocks(config) * config.pass_steps for item in work)
    limit = 3000 + 40 * (len(feeds) + len(entries) + total * MatrixParams(config).word_beats)

    def offer_job(ctx: Any, item: Pass) -> None:
        payload = dut.job.payload
        ctx.set(payload.chunks, item.job.chunks(config))
        ctx.set(payload.blocks, item.job.blocks(config))
        ctx.set(payload.bias_base, item.bias_base)
        ctx.set(payload.has_bias, item.job.bias)
        for name in ("feed_gain", "shift", "scale", "out_shift", "activation", "wide"):
            ctx.set(getattr(payload, name), getattr(item.job, name))

    async def bench(ctx: Any) -> None:
        if reset_at is not None:
            ctx.set(dut.job.payload.chunks, 2)
            ctx.set(dut.job.payload.blocks, 3)
            for _ in range(reset_at):
                for port in (dut.job.valid, dut.i.valid, dut.w.valid, dut.o.ready):
                    ctx.set(port, int(random.integers(2)))
                await ctx.tick()
            ctx.set(reset, 1)
            await ctx.tick()
            ctx.set(reset, 0)
            for port in (dut.job.valid, dut.i.valid, dut.w.valid):
                ctx.set(port, 0)
        for item in work:
            if item.bias is not None:
                for n, word in enumerate(bias_words(config, item.job, item.bias)):
                    value = sum((int(b) & 0xFFFFFF) << 24 * s for s, b in enumerate(word))
                    ctx.set(dut.bias_write.en, 1)
                    ctx.set(dut.bias_write.addr, item.bias_base + n)
                    ctx.set(dut.bias_write.data, value)
                    await ctx.tick()
        ctx.set(dut.bias_write.en, 0)
        ctx.set(dut.clear, 1)
        await ctx.tick()
        ctx.set(dut.clear, 0)
        numbers = [0, 0, 0]
        offered = [False, False, False]
        ports = [dut.job, dut.i, dut.w]
        lists: list[Any] = [work, feeds, entries]
        chances = [source, source, weight]
        taken = [run.jobs, run.activations, run.weights]
        held: Any = None
        idle = cycle = 0
        while idle < _IDLE_CYCLES:
            assert cycle < limit, f"{len(run.outputs)} of {total} words after {cycle} cycles"
            for n, port in enumerate(ports):
                if not offered[n] and numbers[n] < len(lists[n]) and random.random() < chances[n]:
                    offered[n] = True
                    item = lists[n][numbers[n]]
                    if n == 0:
                        offer_job(ctx, item)
                    else:
                        ctx.set(port.payload, item.tolist())
                ctx.set(port.valid, offered[n])
            ctx.set(dut.o.ready, random.random() < sink)
            for n, port in enumerate(ports):
                if offered[n] and ctx.get(port.ready):
                    taken[n].append(cycle)
                    numbers[n], offered[n] = numbers[n] + 1, False
            word = (ctx.get(dut.o.payload.data.as_value()), ctx.get(dut.o.payload.last))
            valid = ctx.get(dut.o.valid)
            if held is not None:
                assert valid and word == held, f"a waiting word changed in cycle {cycle}"
            held = word if valid and not ctx.get(dut.o.ready) else None
            if valid and ctx.get(dut.o.ready):
                values = [(word[0] >> 16 * n) & 0xFFFF for n in range(MatrixParams(config).elements)]
                run.outputs.append((cycle, [v - (v >> 15 << 16) for v in values], word[1]))
                idle = 0
                run.saturations = ctx.get(dut.saturations)
            elif len(run.outputs) >= total:
                idle += 1
            await ctx.tick()
            cycle += 1
        assert numbers == [len(work), len(feeds), len(entries)]

    simulator = Simulator(module)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return run


def check_outputs(config: Config, work: list[Pass], run: Run) -> None:
    expected, count = [], 0
    for item in work:
        # Columns that pad the last block are columns without weights and bias.
        columns = item.job.blocks(config) * config.block
        job = replace(item.job, columns=columns)
        bias = None if item.bias is None else padded(item.bias[None], 1, columns)[0]
        y, saturated = matrix(config, job, item.state, padded(item.weights, columns, job.width), bias)
        made = words(config, y)
        expected += [(word.ravel().tolist(), int(n == len(made) - 1)) for n, word in enumerate(made)]
        count += saturated
    assert len(run.outputs) == len(expected)
    for n, (output, wanted) in enumerate(zip(run.outputs, expected, strict=True)):
        assert output[1:] == wanted, f"word {n} of {len(expected)}"
    assert run.saturations == min(count, 65535)


def check_cycles(config: Config, work: list[Pass], run: Run, **offers: Any) -> None:
    timing = matrix_timing(config, [item.job for item in work], **offers)
    assert run.jobs == timing.jobs.tolist()
    assert run.activations == np.concatenate(timing.activations).tolist()
    assert run.weights == timing.steps.tolist()
    assert [output[0] for output in run.outputs] == timing.outputs.tolist()


@pytest.mark.parametrize(("name", "seed"), [*((name, 1) for name in CONFIGS), ("tiny", 2), ("16 bits", 3)])
def test_everything_offered_always(name: str, seed: int) -> None:
    config, random = CONFIGS[name], np.random.default_rng(seed)
    work = passes(config, random, 5, most=4 * config.block)
    run = simulate(config, work, random)
    check_outputs(config, work, run)
    check_cycles(config, work, run)


@pytest.mark.parametrize(("source", "weight", "sink"), [(0.4, 0.7, 0.5), (1.0, 0.3, 1.0), (1.0, 1.0, 0.1)])
@pytest.mark.parametrize("name", ["tiny", "two segments", "one lane"])
def test_pauses(name: str, source: float, weight: float, sink: float) -> None:
    config, random = CONFIGS[name], np.random.default_rng(7)
    work = passes(config, random, 4, most=3 * config.block)
    check_outputs(config, work, simulate(config, work, random, source=source, weight=weight, sink=sink))


@pytest.mark.parametrize("name", ["tiny", "two segments"])
def test_late_arrivals(name: str) -> None:
    """Streams that come late are stalls that the cycle model knows: an offer never comes before its cycle."""
    config, random = CONFIGS[name], np.random.default_rng(11)
    work = passes(config, random, 3, most=3 * config.block)
    run = simulate(config, work, random, source=0.5, weight=0.4)
    check_outputs(config, work, run)
    counts = np.cumsum([0] + [item.job.chunks(config) * config.pass_steps for item in work])
    words_of = [run.activations[low:high] for low, high in pairwise(counts)]
    # What was taken in a cycle was offered by then: the model with these arrivals gives the same cycles.
    check_cycles(
        config, work, run, offered_jobs=run.jobs, offered_activations=words_of, offered_weights=run.weights
    )


@pytest.mark.parametrize("name", ["tiny", "ecp5-85k", "two segments"])
def test_no_idle_step(name: str) -> None:
    """As many chunks as a word takes beats, activations loaded in time: no idle cycle from first to last step."""
    config, random = CONFIGS[name], np.random.default_rng(13)
    beats = MatrixParams(config).word_beats
    width = config.block * max(2, beats)
    shapes = [(width, 6 * config.block), (width, 2 * config.block), (width + 1, 3 * config.block), (width, 5)]
    work = passes(config, random, 4, most=0, shapes=shapes)
    timing = matrix_timing(config, [item.job for item in work])
    assert timing.idle_steps == 0
    assert len(timing.steps) == sum(item.job.steps(config) for item in work)
    run = simulate(config, work, random)
    check_cycles(config, work, run)


def test_many_short_jobs_wait_for_open_ones() -> None:
    """One block each: jobs end in the requantiser long after their steps."""
    config, random = CONFIGS["one lane"], np.random.default_rng(17)
    work = passes(config, random, 9, most=0, shapes=[(8, 8)] * 9)
    run = simulate(config, work, random)
    check_outputs(config, work, run)
    check_cycles(config, work, run)
    free = simulate(config, work[:1], random)
    assert run.jobs[-1] > 9 * (free.jobs[0] + 10)


def test_saturations_stop_at_their_limit() -> None:
    dut, random = SaturationCounter(48), np.random.default_rng(19)

    async def bench(ctx: Any) -> None:
        for _ in range(2):
            count = 0
            while count < 66000:
                flags = int(random.integers(1 << 48)) | (0xFFFFFFFF0000 if count < 65000 else 0)
                ctx.set(dut.flags, flags)
                await ctx.tick()
                count += flags.bit_count()
                assert ctx.get(dut.count) == min(count, 65535)
            ctx.set(dut.clear, 1)
            await ctx.tick()
            assert ctx.get(dut.count) == 0
            ctx.set(dut.clear, 0)

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()


@pytest.mark.parametrize("reset_at", [3, 40, 90])
def test_reset(reset_at: int) -> None:
    config, random = _TINY, np.random.default_rng(reset_at)
    work = passes(config, random, 2, most=20)
    run = simulate(config, work, random, reset_at=reset_at)
    check_outputs(config, work, run)
    check_cycles(config, work, run)


@pytest.mark.parametrize("name", ["tiny"])
def test_cells_of_the_target(name: str) -> None:
    """The netlist for an ECP5 holds one explicit multiplier for each MAC and each requantiser lane."""
    config = CONFIGS[name]
    text = rtlil.convert(MatrixUnit(config, target=Target.ECP5))
    assert text.count("cell \\MULT18X18D") == config.macs + MatrixParams(config).lanes
