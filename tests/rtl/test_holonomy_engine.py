"""Field and loop programs behind the transport engine in hardware, against the golden models of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from amaranth.hdl import Module, Signal
from amaranth.sim import Simulator

from dtp.config import Config
from dtp.fixed import Int
from dtp.holonomy import (
    FieldJob,
    FieldParams,
    LoopAccounts,
    LoopError,
    LoopParams,
    ReportKind,
    block_scores,
    block_sums,
    relative_transports,
)
from dtp.loops import EdgeKind, Extent, LoopGraph, LoopType, Node, Program, Step, run_program, sample_loops, steps
from dtp.solve import MiddleMode, TransportError
from dtp.transport import (
    QuantisedFactors,
    TransportJob,
    TransportParams,
    connection_columns,
    factor_words,
    quantise_solve,
    quantise_state,
    transport,
)
from rtl.holonomy import HolonomyField
from rtl.loops import LoopUnit
from rtl.transport import TransportCore
from tools.loops import Sent, job_fields, send

_TINY = Config.load("tiny")
CONFIGS = {
    "tiny": _TINY,
    "pairs": _TINY.changed(transport_vectors=2, transport_lanes=32, solve_lanes=2),
}


def _factors(config: Config, random: np.random.Generator, count: int, width: int) -> QuantisedFactors:
    a, b = (random.standard_normal((count, width, 2)) / np.sqrt(width) for _ in range(2))
    return quantise_solve(config, MiddleMode.CAYLEY, connection_columns(a, b, cayley=True)[0])


def _feed(port: Any, payloads: Sequence[Any], random: np.random.Generator) -> Callable[..., Any]:
    """Offers payloads with gaps; arrays of numbers as the bits of a word."""

    async def process(ctx: Any) -> None:
        for payload in payloads:
            while random.random() < 0.1:
                await ctx.tick()
            if isinstance(payload, np.ndarray):
                number = int.from_bytes(np.ascontiguousarray(payload).tobytes(), "little")
                ctx.set(port.payload.as_value(), number)
            else:
                ctx.set(port.payload, payload)
            ctx.set(port.valid, 1)
            await ctx.tick().until(port.ready)
            ctx.set(port.valid, 0)

    return process


@pytest.mark.parametrize("name", CONFIGS)
def test_field_behind_the_engine(name: str) -> None:
    """P z of a head, then P′ᵀ of the next straight into the field."""
    config, random = CONFIGS[name], np.random.default_rng(1)
    params = FieldParams.of(config, multipliers=2)
    tokens, width = 19, 16
    heads = [_factors(config, random, tokens, width) for _ in range(2)]
    z, _ = quantise_state(random.standard_normal(width))
    u, _ = relative_transports(config, *heads, z)
    words = width // params.lanes
    job = FieldJob.of(params, tokens=tokens, words=words, probe_energy=int(z @ z), causal=False)
    wanted = block_scores(block_sums(u, params), job, params).ravel().tolist()
    assert len(set(wanted)) == 6 and min(wanted) > 0

    m = Module()
    m.submodules.engine = engine = TransportCore(config)
    m.submodules.field = field = HolonomyField(params)
    slot, last = config.transport_vectors - 1, Signal()
    m.d.comb += [
        field.i.valid.eq(engine.o.valid),
        field.i.payload.data.eq(engine.o.payload.data[slot]),
        field.i.payload.last.eq(last),
        engine.o.ready.eq(field.i.ready),
    ]
    there = transport(
        config, heads[0].job(config, MiddleMode.CAYLEY), heads[0].v, np.repeat(z[None, None], tokens, axis=0)
    )
    back = heads[1].job(config, MiddleMode.CAYLEY, transposed=True)
    states = np.zeros((tokens, words, config.transport_vectors, params.lanes), dtype="<i2")
    states[:, :, slot] = there.outputs[:, 0].reshape(tokens, words, params.lanes)
    got: list[int] = []

    async def mark_last(ctx: Any) -> None:
        for n in range(tokens * words):
            ctx.set(last, int(n == tokens * words - 1))
            await ctx.tick().until(field.i.valid & field.i.ready)

    async def sink(ctx: Any) -> None:
        ctx.set(field.o.ready, 1)
        for _ in range(6_000):
            *_, valid, score = await ctx.tick().sample(field.o.valid, field.o.payload.score)
            got.extend([score] * valid)
            if len(got) == len(wanted):
                break

    constants = {"shifts": list(job.shifts), "reciprocals": list(job.reciprocals)}
    simulator = Simulator(m)
    simulator.add_clock(1e-8)
    for port, payloads in (
        (engine.job, [job_fields(back)]),
        (engine.factors, [word for token in factor_words(config, back, heads[1].v) for word in token]),
        (engine.state, list(states.reshape(tokens * words, -1))),
        (field.job, [{"tokens": tokens, "words": words, "causal": 0, **constants}]),
    ):
        simulator.add_testbench(_feed(port, payloads, random), background=True)
    simulator.add_testbench(mark_last, background=True)
    simulator.add_testbench(sink)
    simulator.run()
    assert got == wanted


@dataclass(frozen=True, eq=False)
class Drawn:
    """Programs over one set of transports: start vectors, factors, and the place of each step's factors."""

    programs: tuple[Program, ...]
    probes: Int
    factors: QuantisedFactors
    where: dict[tuple[EdgeKind, Node, int], int]

    def chosen(self, config: Config, step: Step) -> tuple[TransportJob, Int]:
        """Job and factors of a step."""
        job = self.factors.job(config, MiddleMode.CAYLEY, transposed=step.inverse)
        return replace(job, tokens=1), self.factors.v[self.where[step.kind, step.node, step.head]][None]


def drawn_programs(config: Config, *, heads: int, seed: int = 2) -> Drawn:
    """Type B and C loops over two layers."""
    random = np.random.default_rng(seed)
    extent = Extent(tokens=20, layers=2, heads=heads, probes=2, block=config.block)
    width = 2 * TransportParams(config).tile_rows
    probes, _ = quantise_state(random.standard_normal((extent.probes, width)))
    where: dict[tuple[EdgeKind, Node, int], int] = {}
    drawn = [sample_loops(LoopGraph(extent), kind, 2, seed=5).program for kind in (LoopType.B, LoopType.C)]
    for program in drawn:
        for loop in program.loops:
            for edge in loop:
                for step in steps(edge):
                    where.setdefault((step.kind, step.node, step.head), len(where))
    return Drawn(tuple(drawn), probes, _factors(config, random, len(where), width), where)


def run(config: Config, params: LoopParams, program: Program, drawn: Drawn) -> Sent:
    """What goes into the unit, and what the golden models give."""

    def golden(step: Step, state: Int) -> tuple[Int, bool]:
        job, v = drawn.chosen(config, step)
        result = transport(config, job, v, state[None, None])
        return result.outputs[0, 0], bool(result.saturations)

    accounts = run_program(program, drawn.probes, golden, LoopAccounts(params, floor=1))
    return send(config, program, drawn.probes, lambda step: drawn.chosen(config, step), accounts)


def _nested(steps_in: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps with the fields of their job in a dictionary of their own."""
    return [
        {"job": {key[4:]: value for key, value in step.items() if key.startswith("job.")}}
        | {key: step[key] for key in ("transposed", "first", "last")}
        for step in steps_in
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_programs_on_the_engine(name: str) -> None:
    """Loops of two programs edge by edge, to the last bin of the histogram."""
    config, random = CONFIGS[name], np.random.default_rng(2)
    params = LoopParams.of(config.changed(transport_width=16), multipliers=1, heads=2)
    dut = LoopUnit(config, params)
    drawn = drawn_programs(config, heads=2)
    sent = [run(config, params, program, drawn) for program in drawn.programs]
    wanted = [report for one in sent for report in one.reports]
    steps_in = [step for one in sent for step in _nested(one.steps)]
    got: list[dict[str, Any]] = []

    async def sink_reports(ctx: Any) -> None:
        ctx.set(dut.floor, 1)
        ctx.set(dut.o.ready, 1)
        for _ in range(12_000):
            *_, valid, o = await ctx.tick().sample(dut.o.valid, dut.o.payload)
            if valid:
                numbers = {name: int(getattr(o, name)) for name in ("kind", "index", "ratio", "saturated", "last")}
                got.append(numbers | {"numbers": tuple(o.numbers)})
            if len(got) == len(wanted):
                break
        for _ in range(50):
            assert not ctx.get(dut.o.valid)
            await ctx.tick()
        assert ctx.get(dut.error) == LoopError.NONE and ctx.get(dut.transport_error) == 0

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    for port, payloads in (
        (dut.step, steps_in), (dut.start, [word for one in sent for word in one.starts]),
        (dut.header, [header for one in sent for header in one.headers]),
        (dut.factors, [word for one in sent for word in one.factors]),
    ):  # fmt: skip
        simulator.add_testbench(_feed(port, payloads, random), background=True)
    simulator.add_testbench(sink_reports)
    simulator.run()
    assert got == wanted


def test_errors_of_a_program_stay_until_they_are_cleared() -> None:
    """A head that is not there, a loop that begins within another, factors and start at their limits; a large floor."""
    config, random = _TINY, np.random.default_rng(3)
    params = LoopParams.of(config.changed(transport_width=16), multipliers=1, heads=2)
    drawn = drawn_programs(config, heads=2)
    good = run(config, params, drawn.programs[0], drawn)
    head_missing = [header | {"heads": (params.heads, 0), "used": 1} for header in good.headers]
    begins_within = [step | {"first": 1} for step in good.steps]
    at_limit = [np.where(word < 0, -127, 127).astype(word.dtype) for word in good.factors]
    loud = [word | {"data": [32767] * params.lanes} for word in good.starts]
    cases = [
        (replace(good, headers=head_missing), LoopError.CREDIT, 0),
        (replace(good, steps=begins_within), LoopError.SEQUENCE, 0),
        (replace(good, factors=at_limit, starts=loud), LoopError.NONE, int(TransportError.RANGE)),
        (good, LoopError.NONE, 0),
    ]
    dut = LoopUnit(config, params)
    floor = 1 << 31
    ratios: list[int] = []

    async def bench(ctx: Any) -> None:
        ctx.set(dut.floor, floor)
        ctx.set(dut.o.ready, 1)
        for sent, error, flags in cases:
            ratios.clear()
            queues = {
                dut.step: _nested(sent.steps), dut.start: sent.starts, dut.header: sent.headers,
                dut.factors: sent.factors,
            }  # fmt: skip
            offered = {id(port): list(payloads) for port, payloads in queues.items()}
            ended = False
            while not ended:
                for port in queues:
                    waiting = offered[id(port)]
                    ctx.set(port.valid, bool(waiting))
                    if waiting and isinstance(waiting[0], np.ndarray):
                        number = int.from_bytes(np.ascontiguousarray(waiting[0]).tobytes(), "little")
                        ctx.set(port.payload.as_value(), number)
                    elif waiting:
                        ctx.set(port.payload, waiting[0])
                taken = [port for port in queues if offered[id(port)] and ctx.get(port.ready)]
                if ctx.get(dut.o.valid):
                    ended = bool(ctx.get(dut.o.payload.last))
                    if ctx.get(dut.o.payload.kind) == ReportKind.LOOP:
                        ratios.append(ctx.get(dut.o.payload.ratio))
                await ctx.tick()
                for port in taken:
                    offered[id(port)].pop(0)
            for _ in range(int(random.integers(0, 9))):
                await ctx.tick()
            assert (ctx.get(dut.error), ctx.get(dut.transport_error)) == (error, flags)
            ctx.set(dut.error_clear, 1)
            await ctx.tick()
            ctx.set(dut.error_clear, 0)
            assert ctx.get(dut.error) == LoopError.NONE and ctx.get(dut.transport_error) == 0

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    loops = [report["numbers"] for report in good.reports if report["kind"] == int(ReportKind.LOOP)]
    assert all(start < floor for start, _, _ in loops)
    assert ratios == [(difference << 24) // floor for _, _, difference in loops] and max(ratios) > 0
