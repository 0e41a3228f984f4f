"""Solve lane in hardware: bit for bit against the golden model, cycles of every token, errors, reuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from amaranth.back import rtlil
from amaranth.sim import Simulator

from dtp.config import REGISTER_BITS, Config
from dtp.fixed import Int, overflows, round_shift, saturate
from dtp.solve import GRAM_PAIRS, THREADS, MiddleMode, gram_words, program, scale, solve
from dtp.transport import TransportParams
from rtl.lib.multiplier import Target
from rtl.solve import SolveLane

_TINY = Config.load("tiny")
CONFIGS = {
    "tiny": _TINY,
    "16 bits": _TINY.changed(factor_bits=16),
    "wide": Config.load("wide").changed(solve_lanes=1),
    "four columns": _TINY.changed(transport_columns=4),
}
CONTEXTS = 2 * THREADS


def _gram_sums(config: Config, v: Int, phase: int) -> list[int]:
    """What the engine's Gram unit gives for the tiles of a phase: products, or squares of sums of 8-bit factors."""
    tiles = v.reshape(len(v), -1, 4)
    p, q = ((0, 0), (1, 1), (0, 1), (1, 0))[phase]
    if config.factor_bits == 16:
        return [int((tiles[:, p, i] * tiles[:, q, j]).sum()) for i, j in GRAM_PAIRS]
    return [int(((tiles[:, p, i] + tiles[:, q, j]) ** 2).sum()) for i, j in GRAM_PAIRS]


class _Tokens:
    """Random tokens of a job and what comes out of them."""

    def __init__(
        self, config: Config, mode: MiddleMode, groups: int, slots: tuple[int, ...], seed: int, count: int, *,
        kind: str = "",
    ) -> None:  # fmt: skip
        """``kind``: "far" for projections that take the last of the shifter's coarse places, "flat" for no pivot."""
        random = np.random.default_rng(seed)
        p = TransportParams(config)
        self.mode, self.groups, self.slots = mode, groups, slots
        size = 4 * groups
        spread = random.choice([0.0, 3.0, 12.0, 25.0], count)[:, None, None]
        v = random.normal(size=(count, 16, size)) * spread
        self.v = np.rint(v * (1 if config.factor_bits == 8 else 200)).astype(np.int64)
        self.gram_shift = 6 if config.factor_bits == 8 else 15
        self.project_shift = int(random.integers(5, 9)) + 19 * (kind == "far")
        self.unit = int(random.choice([30000, 9000, 90]))
        if kind == "flat":
            # Two columns that depend on each other, whose Gram entries are rounded to 1, 3, 3, 6: a determinant of −3,
            # and nothing else that is below the floor.
            self.v[:] = 0
            self.v[:, 0, :2] = 9, 20
            self.v[:, 1, 2] = self.v[:, 2, 3] = 100
            self.gram_shift, self.unit = 6 + p.gram_guard, 0
        self.weights = tuple(int(w) for w in random.integers(-131072, 131072, 4))
        limit = 1 << (p.sum_bits - 1 if kind == "far" else 23)
        self.h = random.integers(-limit, limit, (2, count, size)) >> random.integers(0, 9, (2, count, 1))
        self.h[0, 0, 0] = (1 << (p.sum_bits - 1)) - 1
        h = round_shift(self.h, self.project_shift)
        h[[slot for slot in (0, 1) if slot not in slots]] = 0
        self.range = overflows(h, REGISTER_BITS).any(axis=(0, 2))
        h = saturate(h, REGISTER_BITS)
        if mode.solves:
            gram = np.einsum("nij,nik->njk", self.v, self.v)
            matrix, clipped = gram_words(gram, mode, self.unit, self.gram_shift, p.gram_guard)
            result = solve(matrix, h[0], h[1])
            self.range |= clipped
        else:
            result = scale(mode, self.weights, h[0], h[1])
        self.range |= result.range
        self.pivot = result.pivot
        self.m = np.stack([result.plain, result.transposed])
        if kind == "":
            assert all(np.count_nonzero(self.m[slot].any(axis=1)) * 2 >= count for slot in slots)


def _simulate(config: Config, jobs: list[_Tokens]) -> None:
    dut = SolveLane(config)
    p = dut.params

    async def bench(ctx: Any) -> None:
        cycle = 0

        async def tick() -> None:
            nonlocal cycle
            errors["pivot"] += ctx.get(dut.pivot)
            errors["range"] += ctx.get(dut.range)
            await ctx.tick()
            cycle += 1

        for tokens in jobs:
            errors = {"pivot": 0, "range": 0}
            fields = {
                "mode": int(tokens.mode), "last_group": tokens.groups - 1, "plain": 0 in tokens.slots,
                "transposed": 1 in tokens.slots, "project_shift": tokens.project_shift,
                "gram_shift": tokens.gram_shift, "unit": tokens.unit, "weights": list(tokens.weights),
            }  # fmt: skip
            ctx.set(dut.job, fields)
            ctx.set(dut.start, 1)
            started = cycle
            await tick()
            ctx.set(dut.start, 0)
            count = tokens.v.shape[0]
            inputs: Iterator[tuple[int, int, int]] = iter(
                [(t, slot, g) for t in range(count) for slot in range(3 - p.vectors) for g in range(tokens.groups)]
            )
            phases = iter([(t, phase) for t in range(count) for phase in range(1 if tokens.groups == 1 else 4)])
            waiting = next(inputs, None)
            form = next(phases, None) if tokens.mode.solves else None
            ready: dict[int, int] = {}
            formed: dict[int, int] = {}
            loaded: dict[int, int] = {}
            last_form, read = -100, 0
            while read < count:
                assert cycle - started < 400 + 400 * count
                ctx.set(dut.project_valid, 0)
                ctx.set(dut.gram_valid, 0)
                ctx.set(dut.release, 0)
                if waiting is not None and waiting[0] < read + CONTEXTS:
                    t, slot, group = waiting
                    values = tokens.h[:, t, 4 * group : 4 * group + 4]
                    ctx.set(dut.project_valid, 1)
                    ctx.set(dut.project_context, t % CONTEXTS)
                    ctx.set(dut.project_slot, slot)
                    ctx.set(dut.project_group, group)
                    ctx.set(dut.project, [[int(x) for x in values[s]] for s in ((slot,), (0, 1))[p.vectors - 1]])
                    following = next(inputs, None)
                    ctx.set(dut.project_last, following is None or following[0] != t)
                    if following is None or following[0] != t:
                        loaded[t] = cycle + 1
                    waiting = following
                if form is not None and form[0] < read + CONTEXTS and cycle - last_form >= p.min_gram_phase(2):
                    t, phase = form
                    following = next(phases, None)
                    ctx.set(dut.gram_valid, 1)
                    ctx.set(dut.gram_context, t % CONTEXTS)
                    ctx.set(dut.gram_phase, phase)
                    ctx.set(dut.gram, _gram_sums(config, tokens.v[t], phase))
                    last = following is None or following[0] != t
                    ctx.set(dut.gram_last, last)
                    if last:
                        formed[t] = cycle + 1 + len(GRAM_PAIRS) + 3
                    last_form, form = cycle, following
                if ctx.get(dut.done) >> (read % CONTEXTS) & 1:
                    # The cycle is that of the contract.
                    first = max(loaded[read], formed.get(read, 0), started + p.start_cycles, ready.get(read - 4, 0))
                    turn = first + (started + 1 + read - first) % THREADS
                    length = len(program(tokens.mode, tokens.groups, p.solve_slots(tokens.slots)))
                    due = turn + THREADS * length + p.operation_cycles
                    ready[read] = turn + THREADS * length
                    assert cycle >= due
                    if read == 0:
                        assert cycle == due  # later tokens: tests/rtl/test_transport.py
                    # What was offered in this cycle is taken first.
                    await tick()
                    ctx.set(dut.project_valid, 0)
                    ctx.set(dut.gram_valid, 0)
                    for slot in tokens.slots if p.vectors == 1 else (0,):
                        for group in range(tokens.groups):
                            ctx.set(dut.m_context, read % CONTEXTS)
                            ctx.set(dut.m_slot, slot)
                            ctx.set(dut.m_group, group)
                            await tick()
                            got = [list(word) for word in ctx.get(dut.m)]
                            for place, s in enumerate(((slot,), (0, 1))[p.vectors - 1]):
                                wanted = tokens.m[s, read, 4 * group : 4 * group + 4].tolist()
                                assert got[place] == wanted, f"token {read}, slot {s}, group {group}"
                    ctx.set(dut.release, 1)
                    ctx.set(dut.release_context, read % CONTEXTS)
                    read += 1
                await tick()
            ctx.set(dut.release, 0)
            ctx.set(dut.project_valid, 0)
            ctx.set(dut.gram_valid, 0)
            for _ in range(20):
                await tick()
            assert ctx.get(dut.done) == 0
            assert (errors["pivot"] > 0) == tokens.pivot.any() and (errors["range"] > 0) == tokens.range.any()

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()


@pytest.mark.parametrize("mode", list(MiddleMode))
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens(name: str, mode: MiddleMode) -> None:
    config = CONFIGS[name]
    jobs = [
        _Tokens(config, mode, g, slots, seed, count, kind=kind)
        for seed, (g, slots, count, kind) in enumerate((
            (1, (0, 1), 11, ""), (1, (0,), 9, ""), (1, (1,), 9, ""), (1, (0, 1), 5, "far"), (1, (0, 1), 9, "flat"),
            (2, (0, 1), 5, ""), (2, (1,), 5, ""),
        ))
        if 4 * g <= config.transport_columns
    ]  # fmt: skip
    _simulate(config, jobs)


def test_ecp5_cells() -> None:
    generic, ecp5 = SolveLane(_TINY), SolveLane(_TINY, target=Target.ECP5)
    assert generic.signature == ecp5.signature
    texts = [rtlil.convert(component, emit_src=False) for component in (generic, ecp5)]
    assert [text.count("cell \\MULT18X18D ") for text in texts] == [0, 2]
