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
    pack_job,
    pack_outputs,
    state_words,
    status_beats,
    transport,
)
from rtl.lib.multiplier import Target
from rtl.transport import Transport, TransportCore
from sim.bench.amaranth_stream import run_amaranth
from sim.bench.stream import StreamJob
from sim.cycles.transport import TransportCycles, core_cycles, stream_cycles

_TINY = Config.load("tiny")
CONFIGS = {
    "tiny": _TINY,
    "16 bits": _TINY.changed(factor_bits=16),
    "ecp5-85k": Config.load("ecp5-85k"),
    "two lanes": _TINY.changed(solve_lanes=2),
    "pairs": _TINY.changed(transport_vectors=2, transport_lanes=32, solve_lanes=2, transport_width=64),
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
        cases.append(Case.of(config, 2, mode=mode, groups=2, tokens=3, words=3, identity=False))
    _run(config, cases, 1)


def saturating_case(config: Config, *, tokens: int, words: int, alone: bool) -> Case:
    """Every lane of every token is saturated, in both slots; or that of the token's number ``alone``."""
    lanes = words * TransportParams(config).tile_rows
    job = TransportJob(
        mode=MiddleMode.SCALE, tokens=tokens, words=words, groups=1, plain=True, transposed=True,
        project_shift=7 if alone else 7 + (lanes - 1).bit_length(), weights=(-32768, 0, 0, 0),
    )  # fmt: skip
    v = np.zeros((tokens, lanes, 4), dtype=np.int64)
    if alone:
        v[np.arange(tokens), np.arange(tokens) % lanes, 0] = 127
    else:
        v[..., 0] = 127
    x = np.full((tokens, 2, lanes), 32767, dtype=np.int64)
    result = transport(config, job, v, x)
    assert result.saturations == min(65535, 2 * tokens * (1 if alone else lanes))
    return Case(job, v, x, None, None, result)


@pytest.mark.parametrize("name", ["tiny", "pairs"])
def test_every_lane_that_is_saturated_counts(name: str) -> None:
    config = CONFIGS[name]
    lanes = 2 * TransportParams(config).tile_rows
    _run(config, [saturating_case(config, tokens=lanes, words=2, alone=True)], 4)


@pytest.mark.parametrize(("source", "sink"), [(0.2, 1.0), (1.0, 0.15), (0.5, 0.5)])
@pytest.mark.parametrize("name", ["tiny", "pairs", "two lanes"])
def test_with_stalls(name: str, source: float, sink: float) -> None:
    config = CONFIGS[name]
    cases = [Case.of(config, 3, tokens=9, words=2), Case.of(config, 4, mode=MiddleMode.SCALE, groups=2, tokens=4)]
    _run(config, cases, 2, source=source, sink=sink)


def _stream(config: Config, parts: list[tuple[np.ndarray, np.ndarray]], **stalls: Any) -> Int:
    """Input beats of jobs and what must come out, byte for byte."""
    beats = np.concatenate([part[0] for part in parts])
    last = np.concatenate([np.arange(len(part[0])) == len(part[0]) - 1 for part in parts])
    wanted = np.concatenate([part[1] for part in parts])
    job = StreamJob(beats=beats, last=last, packets=len(parts), timeout_cycles=200_000, drain_cycles=60, **stalls)
    result = run_amaranth(Transport(config), job)
    result.check()
    assert result.data.tolist() == wanted.tolist()
    ends = np.cumsum([len(part[1]) for part in parts]) - 1
    assert np.flatnonzero(result.last).tolist() == ends.tolist()
    return result.cycles - result.first_input_cycle


def _packed(config: Config, case: Case) -> tuple[np.ndarray, np.ndarray]:
    beats = pack_job(config, case.job, case.v, case.x, w=case.w, base=case.base)
    return beats, pack_outputs(config, case.job, case.result)


@pytest.mark.parametrize("stalls", [{}, {"source_stall": 0.5, "sink_stall": 0.5}], ids=["free", "stalls"])
@pytest.mark.parametrize("name", ["tiny", "16 bits", "ecp5-85k", "pairs"])
def test_stream(name: str, stalls: dict[str, float]) -> None:
    config = CONFIGS[name]
    separate = {"separate": True, "transposed": name != "pairs", "identity": False, "base": True}
    cases = [
        Case.of(config, 5, tokens=3, words=3, tag=77),
        Case.of(config, 6, mode=MiddleMode.SCALE, groups=2, tokens=2, words=2, tag=65535, **separate),
    ]
    cycles = _stream(config, [_packed(config, case) for case in cases], **stalls)
    if not stalls:
        assert cycles.tolist() == stream_cycles(config, [case.job for case in cases])


def test_bad_jobs_are_answered_and_the_next_one_runs() -> None:
    config = _TINY
    good = Case.of(config, 7, tokens=2, words=2, tag=5)
    beats, outputs = _packed(config, good)
    status = status_beats(config, 5, TransportError.JOB, 0)
    wrong_magic = beats.copy()
    wrong_magic[0, 0] ^= 1
    no_slot = beats.copy()
    no_slot[0, 3] &= ~3 & 0xFF
    too_long = beats.copy()
    too_long[0, 6] = 200
    # Cut after the first token: the rest counts as 0. The sums of the second token are then 0, so is its output.
    zeros = Case(good.job, good.v.copy(), good.x.copy(), None, None, good.result)
    zeros.v[1], zeros.x[1] = 0, 0
    result = transport(config, good.job, zeros.v, zeros.x)
    result = replace(result, error=result.error | TransportError.JOB)
    early = beats[: 4 + (len(beats) - 4) // 2]
    late = np.concatenate([beats, beats[:3]])
    error = replace(good.result, error=good.result.error | TransportError.JOB)
    _stream(config, [
        (wrong_magic, status), (no_slot, status), (beats, outputs), (too_long, status),
        (beats[:2], status_beats(config, 0, TransportError.JOB, 0)), (beats[:4], status),
        (early, pack_outputs(config, good.job, result)), (late, pack_outputs(config, good.job, error)),
        (beats, outputs),
    ])  # fmt: skip


def test_rates_of_the_presets() -> None:
    """Cycles a token with both slots at k = 4 and d = 64, sustained: the engine's own on ecp5-85k."""
    for name, most in (("ecp5-85k", 64), ("wide", 8)):
        config = Config.load(name)
        words = 64 // TransportParams(config).tile_rows
        job = TransportJob(
            mode=MiddleMode.CAYLEY, tokens=300, words=words, groups=1, plain=True, transposed=True, unit=1
        )
        half = core_cycles(config, replace(job, tokens=150))
        assert (core_cycles(config, job) - half) / 150 <= most


def test_ecp5_cells() -> None:
    config = CONFIGS["ecp5-85k"]
    generic, ecp5 = Transport(config), Transport(config, target=Target.ECP5)
    assert generic.signature == ecp5.signature
    texts = [rtlil.convert(component, emit_src=False) for component in (generic, ecp5)]
    assert [text.count("cell \\MULT18X18D ") for text in texts] == [0, 18]


def test_phases_of_one_cycle() -> None:
    """Nothing is begun twice where projection and expansion take a cycle each."""
    for source in (1.0, 0.4):
        cases = [Case.of(_TINY, 8, tokens=14, words=1, transposed=False, mode=mode) for mode in MiddleMode]
        _run(_TINY, cases[1:3], 3, source=source)


def test_full_buffers() -> None:
    """Tokens of half a buffer: inputs wait until one is expanded."""
    config = _TINY.changed(transport_width=256)
    case = Case.of(
        config, 9, tokens=5, words=64, groups=2, mode=MiddleMode.SCALE, separate=True, identity=False, base=True
    )
    assert case.job.factor_words == 256 and case.job.state_words(TransportParams(config)) == 256
    _run(config, [case], 4)
