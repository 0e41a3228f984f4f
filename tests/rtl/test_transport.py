"""Transport engine in hardware: bit for bit against the golden model, every cycle against the cycle model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from amaranth.back import rtlil
from amaranth.sim import Simulator

from dtp.config import Config
from dtp.fixed import Int
from dtp.solve import MiddleMode, TransportError
from dtp.transport import (
    TransportJob,
    TransportParams,
    TransportResult,
    factor_words,
    output_words,
    state_words,
    transport,
)
from rtl.lib.multiplier import Target
from rtl.transport import TransportCore
from sim.cycles.transport import TransportCycles, core_cycles

_TINY = Config.load("tiny")
CONFIGS = {
    "tiny": _TINY,
    "16 bits": _TINY.changed(factor_bits=16),
    "ecp5-85k": Config.load("ecp5-85k"),
    "two lanes": _TINY.changed(solve_lanes=2),
    "pairs": _TINY.changed(transport_vectors=2, transport_lanes=64, solve_lanes=4, transport_width=128),
    "four columns": _TINY.changed(transport_columns=4),
}


@dataclass
class Case:
    """A job with random numbers, and what comes of it."""

    job: TransportJob
    v: Int
    x: Int
    w: Int | None
    base: Int | None
    result: TransportResult

    @classmethod
    def of(cls, config: Config, seed: int, **fields: Any) -> Case:
        p = TransportParams(config)
        random = np.random.default_rng(seed)
        job = TransportJob(**{
            "mode": MiddleMode.CAYLEY, "tokens": 6, "words": 5, "groups": 1, "plain": True, "transposed": True,
            "project_shift": 7 if config.factor_bits == 8 else 14, "unit": int(random.integers(8000, 30000)),
            "gram_shift": 6 if config.factor_bits == 8 else 16,
            "weights": tuple(int(w) for w in random.integers(-40000, 40000, 4)),
            **fields,
        })  # fmt: skip
        job.check(config)
        width = job.words * p.tile_rows - int(random.integers(0, p.tile_rows))
        columns = 4 * job.groups - int(random.integers(0, 4))
        limit = (1 << (config.factor_bits - 1)) - 1
        spread = random.choice([0.05, 0.2, 0.6], job.tokens)[:, None, None]
        v, w = np.clip(np.rint(random.normal(size=(2, job.tokens, width, columns)) * spread * limit), -limit, limit)
        x, base = random.integers(-9000, 9001, (2, job.tokens, len(job.slots), width))
        corner = random.random(x.shape) < 0.05
        x[corner] = random.choice([-32768, 32767], int(corner.sum()))
        v, w = v.astype(np.int64), (w.astype(np.int64) if job.separate else None)
        base = base if job.base else None
        return cls(job, v, x, w, base, transport(config, job, v, x, w=w, base=base))


def _number(words: np.ndarray) -> int:
    return int.from_bytes(np.ascontiguousarray(words).tobytes(), "little")


def _run(config: Config, cases: list[Case], seed: int, *, source: float = 1.0, sink: float = 1.0) -> None:
    """Jobs one behind the other; every port in every cycle as the cycle model has it."""
    dut = TransportCore(config)
    p = dut.params
    random = np.random.default_rng(seed)

    async def bench(ctx: Any) -> None:
        for case in cases:
            job, result = case.job, case.result
            factors = [_number(word) for token in factor_words(config, job, case.v, case.w) for word in token]
            states = [_number(word) for token in state_words(config, job, case.x, case.base) for word in token]
            wanted = [
                (_number(word), n == job.output_words(p) - 1)
                for token in output_words(config, job, result.outputs)
                for n, word in enumerate(token)
            ]
            ctx.set(dut.job.payload, {
                "mode": int(job.mode), "last_group": job.groups - 1, "last_word": job.words - 1,
                "last_token": job.tokens - 1, "plain": job.plain, "transposed": job.transposed,
                "separate": job.separate, "identity": job.identity, "base": job.base,
                "project_shift": job.project_shift, "gram_shift": job.gram_shift, "unit": job.unit,
                "weights": list(job.weights),
            })  # fmt: skip
            for _ in range(int(random.integers(0, 3))):
                await ctx.tick()
            ctx.set(dut.job.valid, 1)
            assert ctx.get(dut.job.ready) and ctx.get(dut.idle)
            model = TransportCycles(config, job)
            taken = [0, 0]
            offers = [False, False]
            got = 0
            held = None
            while True:
                assert model.cycle < 4000 + 600 * job.tokens * job.words, f"{got} of {len(wanted)} words"
                for n, (port, words) in enumerate(((dut.factors, factors), (dut.state, states))):
                    offers[n] |= taken[n] < len(words) and random.random() < source
                    ctx.set(port.valid, offers[n])
                    if offers[n]:
                        ctx.set(port.payload.as_value(), words[taken[n]])
                ready = bool(random.random() < sink)
                ctx.set(dut.o.ready, ready)
                cycle = model.cycle
                shown = model.step(offers[0], offers[1], ready)
                seen = (ctx.get(dut.factors.ready), ctx.get(dut.state.ready), ctx.get(dut.o.valid))
                assert seen == (shown.factor_ready, shown.state_ready, shown.o_valid), f"cycle {cycle}"
                for n, is_ready in enumerate(seen[:2]):
                    if offers[n] and is_ready:
                        taken[n] += 1
                        offers[n] = False
                if shown.o_valid:
                    word = (ctx.get(dut.o.payload.data.as_value()), bool(ctx.get(dut.o.payload.last)))
                    assert word == wanted[got], f"word {got} of {len(wanted)}"
                    assert held in (None, word) and shown.o_last == word[1]
                    held = None if ready else word
                    got += ready
                await ctx.tick()
                ctx.set(dut.job.valid, 0)
                if shown.ended:
                    break
            assert got == len(wanted) and taken == [len(factors), len(states)]
            assert ctx.get(dut.idle) and ctx.get(dut.error) == int(result.error)
            assert ctx.get(dut.saturations) == result.saturations
            # Nothing more comes.
            for port in (dut.factors, dut.state):
                ctx.set(port.valid, 1)
            for _ in range(5):
                assert not (ctx.get(dut.factors.ready) or ctx.get(dut.state.ready) or ctx.get(dut.o.valid))
                await ctx.tick()
            for port in (dut.factors, dut.state):
                ctx.set(port.valid, 0)

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()


@pytest.mark.parametrize("mode", list(MiddleMode))
@pytest.mark.parametrize("name", CONFIGS)
def test_without_stalls(name: str, mode: MiddleMode) -> None:
    config = CONFIGS[name]
    cases = [Case.of(config, 1, mode=mode)]
    if config.transport_columns == 8:
        cases.append(Case.of(config, 2, mode=mode, groups=2, tokens=3, words=3))
    _run(config, cases, 1)


@pytest.mark.parametrize(("source", "sink"), [(0.2, 1.0), (1.0, 0.15), (0.5, 0.5)])
@pytest.mark.parametrize("name", ["tiny", "pairs", "two lanes"])
def test_with_stalls(name: str, source: float, sink: float) -> None:
    config = CONFIGS[name]
    cases = [Case.of(config, 3, tokens=9, words=2), Case.of(config, 4, mode=MiddleMode.SCALE, groups=2, tokens=4)]
    _run(config, cases, 2, source=source, sink=sink)
