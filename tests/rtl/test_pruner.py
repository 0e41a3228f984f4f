"""Pruner in hardware: bit for bit against the contract, cycle for cycle against the cycle model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from amaranth.back import rtlil
from amaranth.hdl import ClockDomain, Module
from amaranth.sim import Simulator

from dtp.pruner import (
    Band,
    Gate,
    GoldenPruner,
    HeadCommand,
    HeadResult,
    PrunerError,
    PrunerParams,
    Source,
)
from rtl.lib.multiplier import Target
from rtl.pruner import Pruner
from sim.cycles.pruner import head_timing

PARAMS = {
    "2 blocks, 1 lane": PrunerParams(max_blocks=2, heads=1, lanes=1, score_bits=16, weight_bits=4, step_bits=6),
    "4 blocks, 4 lanes, 3 bits": PrunerParams(max_blocks=4, heads=2, lanes=4, score_bits=3, weight_bits=2, step_bits=3),
    "8 blocks, 2 lanes": PrunerParams(max_blocks=8, heads=4, lanes=2, score_bits=16, weight_bits=4, step_bits=6),
    "8 blocks, 8 lanes, 7 bits": PrunerParams(max_blocks=8, heads=2, lanes=8, score_bits=7, weight_bits=5, step_bits=8),
    "16 blocks, 4 lanes": PrunerParams(max_blocks=16, heads=2, lanes=4, score_bits=16, weight_bits=4, step_bits=6),
}
_IDLE_CYCLES = 30


@dataclass
class Head:
    """One command and the scores that its sources send."""

    command: HeadCommand
    holonomy: list[int] | None
    table: list[int] | None

    @property
    def sent(self) -> tuple[int, int]:
        return len(self.holonomy or ()), len(self.table or ())


@dataclass
class Run:
    """What happened: rows as (cycle, mask, skipped, last), reports as (cycle, kept, legal, skipped, error)."""

    starts: list[int] = field(default_factory=list)
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    reports: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    errors: list[int] = field(default_factory=list)
    skipped_heads: int = 0


def scores(params: PrunerParams, random: np.random.Generator, count: int) -> list[int]:
    """Few different ones, so that equal scores and both ends occur; now and then all different or all equal."""
    top = params.max_score
    choices = np.unique([0, 1, top // 2, top - 1, top, *random.integers(0, top + 1, 2)])
    kind = random.random()
    if kind < 0.2:
        return [int(x) for x in random.integers(0, top + 1, count)]
    if kind < 0.3:
        return [int(random.choice(choices))] * count
    return [int(x) for x in random.choice(choices, count)]


def command(params: PrunerParams, random: np.random.Generator, **fixed: Any) -> HeadCommand:
    """A legal command of any kind; ``fixed`` fields as given."""
    top = params.max_score

    def pair() -> tuple[int, int]:
        low, high = sorted(int(x) for x in random.integers(0, top + 1, 2))
        return (low, high) if random.random() < 0.7 else (top, top) if random.random() < 0.5 else (low, low)

    blocks = params.max_blocks if random.random() < 0.4 else int(random.integers(1, params.max_blocks + 1))
    valid = blocks if random.random() < 0.5 else int(random.integers(1, blocks + 1))
    theta, band = pair(), pair()
    if random.random() < 0.5:
        band = (0, band[1])
    values: dict[str, Any] = {
        "head": int(random.integers(params.heads)), "last_block": blocks - 1, "last_valid": valid - 1,
        "causal": bool(random.integers(2)), "fresh": bool(random.random() < 0.2), "source": int(random.integers(1, 4)),
        "weight": int(random.choice([0, 1, 1 << params.weight_bits, random.integers(2 << params.weight_bits)])),
        "maximum": bool(random.random() < 0.3),
        "step": int(random.choice([0, 1 << params.step_bits, random.integers(2 << params.step_bits)])),
        "gate": int(random.integers(2)), "theta_low": theta[0], "theta_high": theta[1],
        "budget": int(random.integers(1, 2 * params.max_blocks)), "band": int(random.choice([0, 0, 1, 2])),
        "band_low": band[0], "band_high": band[1],
    }  # fmt: skip
    return HeadCommand(**values | fixed)


def head(params: PrunerParams, random: np.random.Generator, told: HeadCommand, *, wrong: bool = False) -> Head:
    """A command with its scores; ``wrong``: too few or too many of them, but at least one."""
    def sent() -> list[int]:
        count = told.blocks * told.blocks
        if wrong or not count:
            count = max(1, count + int(random.integers(-count, 6)))
        return scores(params, random, count)

    holonomy, table = told.sources()
    return Head(told, sent() if holonomy else None, sent() if table else None)


def illegal(told: HeadCommand, params: PrunerParams, error: PrunerError, pick: bool) -> HeadCommand:
    """The command, changed so that it is refused with this code; ``pick``: in one of two ways."""
    changes: dict[PrunerError, dict[str, Any]] = {
        PrunerError.BLOCKS: {"last_valid": told.last_block + 1},
        PrunerError.SOURCE: {"source": 0},
        PrunerError.BUDGET: {"gate": int(Gate.BUDGET), "budget": 0},
        PrunerError.THRESHOLDS: {"gate": int(Gate.THRESHOLD), "theta_low": 1, "theta_high": 0},
        PrunerError.BAND: {"band": 3} if pick else {"band": 1, "band_low": params.max_score, "band_high": 1},
    }
    return replace(told, **changes[error])


def simulate(
    params: PrunerParams, heads: Sequence[Head], *, seed: int, source: float = 1.0, sink: float = 1.0,
    clear: bool = False,
) -> Run:  # fmt: skip
    """Runs the heads; ``source`` and ``sink`` are the chances of an offer and of ready; bounded, drained."""
    dut, run = Pruner(params), Run()
    random = np.random.default_rng(seed)
    rows = sum(h.command.blocks for h in heads if h.command.error is not PrunerError.BLOCKS)
    streams = {
        "i_holonomy": [(s, n == len(h.holonomy) - 1) for h in heads if h.holonomy for n, s in enumerate(h.holonomy)],
        "i_table": [(s, n == len(h.table) - 1) for h in heads if h.table for n, s in enumerate(h.table)],
    }
    work = sum(h.command.blocks ** 2 + h.command.blocks * (3 * params.words + 10) * params.score_bits for h in heads)
    limit = int((work + sum(map(len, streams.values())) + 200 * (len(heads) + 1)) * 3 / (source * sink))

    async def bench(ctx: Any) -> None:
        offered = dict.fromkeys(["command", *streams], False)
        position = dict.fromkeys(["command", *streams], 0)
        lengths = {"command": len(heads)} | {name: len(sent) for name, sent in streams.items()}
        held: dict[str, Any] = {"o": None, "report": None}
        idle = cycle = 0
        seen = -1
        while idle < _IDLE_CYCLES:
            assert cycle < limit, f"{len(run.rows)} of {rows} rows after {cycle} cycles"
            for name, start in offered.items():
                at = position[name]
                if not start and at < lengths[name] and random.random() < source:
                    offered[name] = True
                port = getattr(dut, name)
                ctx.set(port.valid, offered[name])
                if name == "command":
                    if offered[name]:
                        told = vars(heads[at].command)
                        ctx.set(port.payload, {key: int(value) for key, value in told.items()})
                    else:
                        for key in vars(heads[0].command):
                            signal = getattr(port.payload, key)
                            ctx.set(signal, int(random.integers(1 << len(signal))))
                    if offered[name] and seen < at:
                        run.starts.append(cycle)
                        seen = at
                else:
                    score, last = streams[name][at] if offered[name] else random.integers(0, (params.max_score, 2))
                    ctx.set(port.payload.score, int(score))
                    ctx.set(port.payload.last, int(last))
            for name in held:
                ctx.set(getattr(dut, name).ready, bool(random.random() < sink))
            clearing = clear and bool(random.random() < 0.01)
            ctx.set(dut.clear, clearing)

            run.errors.append(int(ctx.get(dut.error)))
            idle += 1
            for name in held:
                port = getattr(dut, name)
                beat = ctx.get(port.payload.as_value())
                valid, ready = ctx.get(port.valid), ctx.get(port.ready)
                if held[name] is not None:
                    assert valid and beat == held[name], f"{name} changed while it waited, cycle {cycle}"
                held[name] = beat if valid and not ready else None
                if valid and ready:
                    idle = 0
                    got = port.payload
                    if name == "o":
                        run.rows.append((cycle, *(int(ctx.get(x)) for x in (got.mask, got.skipped, got.last))))
                    else:
                        values = (got.kept, got.legal, got.skipped, got.error)
                        run.reports.append((cycle, *(int(ctx.get(x)) for x in values)))
                elif valid or any(position[n] < lengths[n] for n in lengths):
                    idle = 0
            for name in offered:
                if offered[name] and ctx.get(getattr(dut, name).ready):
                    offered[name] = False
                    position[name] += 1
                    idle = 0
            await ctx.tick()
            cycle += 1
        run.skipped_heads = int(ctx.get(dut.skipped_heads))

    module = Module()
    module.domains.sync = ClockDomain()
    module.submodules.dut = dut
    simulator = Simulator(module)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return run


def golden(params: PrunerParams, heads: Sequence[Head]) -> list[HeadResult]:
    unit = GoldenPruner(params)
    return [unit.head(h.command, holonomy=h.holonomy, table=h.table) for h in heads]


def check(params: PrunerParams, heads: Sequence[Head], run: Run) -> list[HeadResult]:
    """Rows and reports as the contract has them, none more; returns the contract's answers."""
    wanted = golden(params, heads)
    rows = [
        (int(sum(1 << int(j) for j in np.flatnonzero(line))), int(result.skipped), int(n == len(result.mask) - 1))
        for result in wanted
        for n, line in enumerate(result.mask)
    ]
    assert [row[1:] for row in run.rows] == rows
    reports = [(r.kept, r.legal, int(r.skipped), int(r.error)) for r in wanted]
    assert [report[1:] for report in run.reports] == reports
    assert run.skipped_heads == sum(r.skipped for r in wanted)
    return wanted


def check_cycles(params: PrunerParams, heads: Sequence[Head], run: Run) -> None:
    rows, start = [], run.starts[0]
    for n, h in enumerate(heads):
        timing = head_timing(params, h.command, start, sent=h.sent)
        rows += timing.rows.tolist()
        assert run.reports[n][0] == timing.report, f"report of head {n}"
        start = timing.next_command
    assert [row[0] for row in run.rows] == rows


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", PARAMS)
def test_bits_and_cycles(name: str, seed: int) -> None:
    params, random = PARAMS[name], np.random.default_rng(seed)
    count = {2: 30, 4: 30, 8: 8, 16: 3}[params.max_blocks]
    heads = [head(params, random, command(params, random)) for _ in range(count)]
    run = simulate(params, heads, seed=seed)
    check(params, heads, run)
    check_cycles(params, heads, run)
    assert set(run.errors) == {0}


@pytest.mark.parametrize(("source", "sink"), [(0.3, 1.0), (1.0, 0.1), (0.6, 0.4)])
@pytest.mark.parametrize("name", ["2 blocks, 1 lane", "4 blocks, 4 lanes, 3 bits", "8 blocks, 2 lanes"])
def test_bits_under_stalls(name: str, source: float, sink: float) -> None:
    params, random = PARAMS[name], np.random.default_rng(round(100 * source + 10 * sink))
    heads = [head(params, random, command(params, random)) for _ in range(5)]
    check(params, heads, simulate(params, heads, seed=9, source=source, sink=sink))


def test_commands_are_of_every_kind() -> None:
    """The stimulus itself: all modes, heads that are skipped, kept parts between, equal scores at the limit."""
    params = PARAMS["8 blocks, 2 lanes"]
    random = np.random.default_rng(0)
    heads = [head(params, random, command(params, random)) for _ in range(200)]
    wanted = golden(params, heads)
    kinds = {(h.command.gate, h.command.source, h.command.causal, h.command.band, r.skipped)
             for h, r in zip(heads, wanted, strict=True)}  # fmt: skip
    assert len(kinds) >= 2 * 3 * 2 * 3
    assert 20 < sum(r.skipped for r in wanted) < 100
    assert sum(0.3 < r.kept_fraction < 0.9 for r in wanted) > 40
    assert {h.command.blocks for h in heads} == set(range(1, 9))


@pytest.mark.parametrize("sink", [1.0, 0.3])
@pytest.mark.parametrize("error", [e for e in PrunerError if e is not PrunerError.NONE])
def test_errors_are_sticky_and_the_unit_stays_usable(error: PrunerError, sink: float) -> None:
    params, random = PARAMS["4 blocks, 4 lanes, 3 bits"], np.random.default_rng(int(error))
    heads: list[Head] = []
    for n in range(12):
        told = command(params, random, head=0, last_block=2, last_valid=2)
        if n % 3 == 1 and error in (PrunerError.SHORT, PrunerError.LONG):
            extra = -1 - n // 3 if error is PrunerError.SHORT else 1 + n // 3
            sent = [scores(params, random, 9 + extra) if named else None for named in told.sources()]
            heads.append(Head(told, *sent))
        elif n % 3 == 1:
            heads.append(head(params, random, illegal(told, params, error, n % 2 == 0)))
        else:
            heads.append(head(params, random, told))
    run = simulate(params, heads, seed=3, sink=sink)
    wanted = check(params, heads, run)
    assert {int(r.error) for r in wanted} == {0, int(error)}
    first = next(report[0] for report in run.reports if report[4])
    assert set(run.errors[: first + 1]) == {0} and set(run.errors[first + 1 :]) == {int(error)}
    if sink == 1:
        check_cycles(params, heads, run)


def test_wrong_numbers_of_scores_in_any_order() -> None:
    params, random = PARAMS["4 blocks, 4 lanes, 3 bits"], np.random.default_rng(5)
    heads = [head(params, random, command(params, random), wrong=n % 2 == 1) for n in range(40)]
    run = simulate(params, heads, seed=1)
    wanted = check(params, heads, run)
    check_cycles(params, heads, run)
    assert {r.error for r in wanted} == {PrunerError.NONE, PrunerError.SHORT, PrunerError.LONG}
    check(params, heads, simulate(params, heads, seed=2, source=0.5, sink=0.5))


def test_clear_forgets_the_error() -> None:
    params, random = PARAMS["2 blocks, 1 lane"], np.random.default_rng(2)
    heads = []
    for n in range(40):
        told = command(params, random, last_block=0, last_valid=0)
        if n % 2:
            told = illegal(told, params, (PrunerError.BUDGET, PrunerError.BAND)[n // 2 % 2], n % 8 < 4)
        heads.append(head(params, random, told))
    run = simulate(params, heads, seed=4, clear=True, sink=0.5)
    check(params, heads, run)
    assert set(run.errors) == {0, int(PrunerError.BUDGET), int(PrunerError.BAND)}


def test_all_gates_open_is_dense() -> None:
    params, random = PARAMS["8 blocks, 2 lanes"], np.random.default_rng(1)
    top = params.max_score
    heads = [
        head(params, random, command(
            params, random, last_block=blocks - 1, last_valid=valid - 1, causal=causal, gate=int(Gate.THRESHOLD),
            theta_low=top, theta_high=top, band=int(Band.NONE),
        ))
        for blocks, valid, causal in ((1, 1, False), (8, 8, False), (8, 8, True), (8, 5, True), (7, 1, False))
    ]  # fmt: skip
    run = simulate(params, heads, seed=1)
    for result in check(params, heads, run):
        assert result.kept == result.legal


def test_a_row_of_the_largest_preset() -> None:
    """32 blocks: what the contract's table says of the time behind the last score."""
    for lanes, gate, cycles in ((4, Gate.THRESHOLD, 19), (4, Gate.BUDGET, 163), (16, Gate.BUDGET, 55)):
        params = PrunerParams(max_blocks=32, heads=2, lanes=lanes, score_bits=16, weight_bits=4, step_bits=6)
        assert params.decide_cycles(32, budget=gate is Gate.BUDGET) == cycles
    random = np.random.default_rng(8)
    heads = [
        head(params, random, command(
            params, random, last_block=31, last_valid=31, causal=causal, gate=int(Gate.BUDGET), budget=11,
            source=int(Source.BOTH), band=int(Band.NONE),
        ))
        for causal in (False, True)
    ]  # fmt: skip
    run = simulate(params, heads, seed=1)
    assert check(params, heads, run)[0].kept == 32 * 11
    check_cycles(params, heads, run)


def test_ecp5_cells_only_change_the_adders() -> None:
    params = PARAMS["8 blocks, 2 lanes"]
    generic, ecp5 = Pruner(params), Pruner(params, target=Target.ECP5)
    assert generic.signature == ecp5.signature
    texts = [rtlil.convert(component, emit_src=False) for component in (generic, ecp5)]
    adders = params.weight_bits + params.step_bits
    assert "CCU2C" not in texts[0]
    assert texts[1].count("cell \\CCU2C ") == adders * (-(-(params.score_bits + 3) // 2))
