"""Commutator kernel in hardware: programs bit for bit against the contract, array steps as predicted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from amaranth.hdl import Module
from amaranth.sim import Simulator

from dtp.commutator import CommutatorMode, Kernel, Layer, quantise
from dtp.config import Config
from dtp.kernel import MAX_WAIT, Executed, Step, StepKind, after_attention, before_attention, execute
from dtp.matrix import Activation, MatrixParams, bias_words, padded, weight_entries, words
from rtl.commutator import CommutatorUnit
from sim.cycles.commutator import LayerShape, array_cycles, extra_passes, plain_passes, program_timing
from tests.dtp.test_commutator import layer_of
from tools.commutator import group_rows, interleaved, step_values

_TINY = Config.load("tiny")
CONFIGS = {
    "tiny": _TINY,
    "two segments": _TINY.changed(lanes=16, output_bytes=16, input_bytes=16, normaliser_lanes=2),
    # The difference norm is slower than the reads of its words.
    "one lane": _TINY.changed(normaliser_lanes=1, rows=8),
}


def small_layer(**changes: Any) -> Layer:
    shape: dict[str, Any] = {"tokens": 9, "model": 16, "heads": 2, "width": 8, "mlp": 32}
    return layer_of(3, **{**shape, **changes})


@dataclass
class Run:
    """Stored words and energy records, saturation counts; from reset, the cycles of the first step's offer, of what was
    taken of steps, words and weights, and of what came out."""

    stored: list[list[int]] = field(default_factory=list)
    records: list[tuple[int, int, int]] = field(default_factory=list)
    start: int = 0
    taken: tuple[list[int], ...] = field(default_factory=lambda: ([], [], []))
    given: tuple[list[int], ...] = field(default_factory=lambda: ([], []))
    saturations: int = 0
    sum_saturations: int = 0


def simulate(
    kernel: Kernel, program: list[Step], loads: list[np.ndarray], random: np.random.Generator, *,
    source: float = 1.0, weight: float = 1.0, sink: float = 1.0,
) -> Run:  # fmt: skip
    config = kernel.config
    dut = CommutatorUnit(config)
    run = Run()
    elements = MatrixParams(config).elements
    feeds = [word for state in loads for word in words(config, state)]
    entries = [
        entry for step in program if step.job is not None
        for entry in weight_entries(config, step.job, kernel.matrices[step.matrix].weights)
    ]  # fmt: skip
    store_words = sum(
        step.job.blocks(config) * config.pass_steps for step in program if step.job is not None and step.store
    )
    energy_rows = sum(config.rows for step in program if step.kind is StepKind.ENERGY)
    limit = 3000 + 40 * len(program) * 200 + 20 * (len(feeds) + len(entries))

    def set_step(ctx: Any, step: Step) -> None:
        for name, value in step_values(config, step).items():
            field, payload = name.removeprefix("job."), dut.step.payload
            ctx.set(getattr(payload if field == name else payload.job, field), value)

    async def bench(ctx: Any) -> None:
        for step in {s.matrix: s for s in program if s.job is not None}.values():
            bias = kernel.matrices[step.matrix].bias
            if bias is None:
                continue
            assert step.job is not None
            for n, word in enumerate(bias_words(config, step.job, bias)):
                ctx.set(dut.bias_write.en, 1)
                ctx.set(dut.bias_write.addr, step.bias_base + n)
                ctx.set(dut.bias_write.data, sum((int(b) & 0xFFFFFF) << 24 * s for s, b in enumerate(word)))
                await ctx.tick()
        ctx.set(dut.bias_write.en, 0)
        ctx.set(dut.clear, 1)
        await ctx.tick()
        ctx.set(dut.clear, 0)
        run.start = 1 + sum(
            len(bias_words(config, step.job, bias))
            for step in {s.matrix: s for s in program if s.job is not None}.values()
            if step.job is not None and (bias := kernel.matrices[step.matrix].bias) is not None
        )
        ports, lists = [dut.step, dut.i, dut.w], [program, feeds, entries]
        chances = [source, source, weight]
        numbers, offered = [0, 0, 0], [False] * 3
        held: list[Any] = [None, None]
        idle = cycle = 0
        while idle < 60:
            assert cycle < limit, f"{numbers} taken, {len(run.stored)} stored, {len(run.records)} records"
            for n, port in enumerate(ports):
                if not offered[n] and numbers[n] < len(lists[n]) and random.random() < chances[n]:
                    offered[n] = True
                    item = lists[n][numbers[n]]
                    if isinstance(item, Step):
                        set_step(ctx, item)
                    else:
                        ctx.set(port.payload, item.tolist())
                ctx.set(port.valid, offered[n])
            ctx.set(dut.o.ready, random.random() < sink)
            ctx.set(dut.energy.ready, random.random() < sink)
            for n, port in enumerate(ports):
                if offered[n] and ctx.get(port.ready):
                    numbers[n], offered[n] = numbers[n] + 1, False
                    run.taken[n].append(run.start + cycle)
            for n, port in enumerate((dut.o, dut.energy)):
                valid, ready = ctx.get(port.valid), ctx.get(port.ready)
                now = ctx.get(port.payload.as_value())
                assert held[n] is None or (valid and now == held[n]), f"a waiting payload changed in cycle {cycle}"
                held[n] = now if valid and not ready else None
                if valid and ready:
                    run.given[n].append(run.start + cycle)
                if valid and ready and n == 0:
                    value = ctx.get(dut.o.payload.data.as_value())
                    parts = [(value >> 16 * k) & 0xFFFF for k in range(elements)]
                    run.stored.append([v - (v >> 15 << 16) for v in parts])
                elif valid and ready:
                    payload = dut.energy.payload
                    run.records.append(
                        (ctx.get(payload.difference), ctx.get(payload.reference), ctx.get(payload.ratio))
                    )
            done = len(run.stored) >= store_words and len(run.records) >= energy_rows
            idle = idle + 1 if done else 0
            await ctx.tick()
            cycle += 1
        assert numbers == [len(program), len(feeds), len(entries)]
        assert ctx.get(dut.idle)
        run.saturations, run.sum_saturations = ctx.get(dut.saturations), ctx.get(dut.sum_saturations)

    module = Module()
    module.submodules.dut = dut
    simulator = Simulator(module)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return run


def check(kernel: Kernel, wanted: Executed, run: Run) -> None:
    config = kernel.config
    stored = [
        word.ravel().tolist()
        for y in wanted.stored
        for word in words(config, padded(y, config.rows, config.chunks(y.shape[1]) * config.block))
    ]
    assert len(run.stored) == len(stored)
    for n, (word, expected) in enumerate(zip(run.stored, stored, strict=True)):
        assert word == expected, f"word {n} of {len(stored)}"
    records = [
        (int(e.difference[row]), int(e.reference[row]), int(e.ratio[row]))
        for e in wanted.energies
        for row in range(config.rows)
    ]
    assert run.records == records
    assert (run.saturations, run.sum_saturations) == (wanted.saturations, wanted.sum_saturations)


def check_cycles(kernel: Kernel, program: list[Step], wanted: Executed, run: Run) -> None:
    """Of a run without stalls, every cycle."""
    timing = program_timing(kernel.config, program, wanted.variances, start=run.start)
    assert run.taken[0] == timing.steps.tolist()
    assert run.taken[1] == timing.words.tolist()
    assert run.taken[2] == timing.weights.tolist()
    assert run.given[0] == timing.outputs.tolist()
    assert run.given[1] == timing.energies.tolist()


def halves(
    kernel: Kernel, mode: CommutatorMode, random: np.random.Generator
) -> list[tuple[list[Step], list[np.ndarray]]]:
    """Both programs; outputs of the heads are drawn, as attention is not a part of the kernel."""
    layer = kernel.layer
    groups = kernel.config.groups(layer.tokens)
    hidden = group_rows(kernel, kernel.hidden)
    heads = [
        group_rows(kernel, (random.normal(size=(layer.tokens, layer.inner)) * 4000).astype(np.int64)) for _ in range(2)
    ]
    before, after = before_attention(kernel, mode, groups), after_attention(kernel, groups)
    return [(before, interleaved(before, [hidden])), (after, interleaved(after, heads))]


CASES = [("tiny", CommutatorMode.FULL), ("two segments", CommutatorMode.FROZEN), ("one lane", CommutatorMode.FROZEN)]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_programs(name: str, mode: CommutatorMode) -> None:
    """Three groups: two in turn, then one alone. Array steps are those that the cycle model counts."""
    random = np.random.default_rng(1)
    config = CONFIGS[name]
    plain: dict[str, Any] = {"norm": False, "activation": Activation.RELU} if name == "two segments" else {}
    layer = small_layer(tokens=2 * config.rows + 1, **plain)
    kernel = quantise(config, layer)
    steps = 0
    for program, loads in halves(kernel, mode, random):
        run, wanted = simulate(kernel, program, loads, random), execute(kernel, program, loads)
        check(kernel, wanted, run)
        check_cycles(kernel, program, wanted, run)
        steps += len(run.taken[2])
    shape = LayerShape(layer.tokens, layer.model, layer.heads, layer.inner // layer.heads, layer.mlp)
    own = [item for item in plain_passes(config, shape) if item.name == "output of h"]
    extra = [item for item in extra_passes(config, shape, mode) if "P·V" not in item.name and "scores" not in item.name]
    assert steps == array_cycles((*own, *extra))


def test_one_head() -> None:
    """Energies of a head: the output projection restricted to its columns, from its outputs alone."""
    random = np.random.default_rng(7)
    layer = small_layer(tokens=5)
    kernel = quantise(_TINY, layer)
    width = layer.inner // layer.heads
    heads = [group_rows(kernel, (random.normal(size=(5, width)) * 4000).astype(np.int64)) for _ in range(2)]
    program = after_attention(kernel, _TINY.groups(5), head=layer.heads - 1)
    loads = interleaved(program, heads)
    run, wanted = simulate(kernel, program, loads, random), execute(kernel, program, loads)
    check(kernel, wanted, run)
    check_cycles(kernel, program, wanted, run)


def test_loads_beside_outputs_that_are_written() -> None:
    """A word is not loaded in the cycle in which an output goes into the state memory."""
    random = np.random.default_rng(11)
    kernel = quantise(_TINY, small_layer(tokens=4, norm=False))
    model, mlp = kernel.layer.model, kernel.layer.mlp
    into, out = kernel.matrices["in"], kernel.matrices["out"]
    free, count = 2 * (model + mlp), 6
    program = [
        Step(kind=StepKind.LOAD, group=0, target=0, width=model),
        Step(kind=StepKind.MATRIX, group=0, source=0, target=model, matrix="in", job=into.job),
        *(Step(kind=StepKind.LOAD, group=0, target=free, width=mlp, wait=MAX_WAIT) for _ in range(count)),
        Step(kind=StepKind.MATRIX, group=0, source=model, store=True, matrix="out", job=out.job, bias_base=mlp),
        Step(kind=StepKind.MATRIX, group=0, source=free, store=True, matrix="out", job=out.job, bias_base=mlp),
    ]
    loads = [group_rows(kernel, kernel.hidden)[0]]
    loads += [(random.normal(size=(_TINY.rows, mlp)) * 4000).astype(np.int64) for _ in range(count)]
    run, wanted = simulate(kernel, program, loads, random), execute(kernel, program, loads)
    check(kernel, wanted, run)
    check_cycles(kernel, program, wanted, run)
    # A load begins two cycles after the one before; every word that is written costs one more.
    waited = np.diff(run.taken[1][model:]) - 1
    assert waited.sum() >= count - 1 + mlp


@pytest.mark.parametrize(("source", "weight", "sink"), [(0.3, 0.6, 0.5), (1.0, 1.0, 0.1)])
def test_pauses(source: float, weight: float, sink: float) -> None:
    random = np.random.default_rng(5)
    kernel = quantise(_TINY, small_layer(tokens=5, mlp=24))
    for program, loads in halves(kernel, CommutatorMode.FULL, random):
        run = simulate(kernel, program, loads, random, source=source, weight=weight, sink=sink)
        check(kernel, execute(kernel, program, loads), run)
