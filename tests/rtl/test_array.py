"""The MAC array in hardware against its golden model: every output, in its cycle, and no other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from amaranth.sim import Simulator, TickTrigger

from dtp.array import ArrayParams, GoldenArray
from rtl.array import MacArray

PARAMS = {
    "tiny": ArrayParams(rows=4, segments=1, block=8, acc_depth=24),
    "ecp5": ArrayParams(rows=8, segments=1, block=16, acc_depth=80),
    "wide": ArrayParams(rows=16, segments=4, block=16, acc_depth=20),
    "least": ArrayParams(
        rows=1,
        segments=1,
        block=4,
        row_bits=2,
        moving_bits=2,
        acc_bits=6,
        acc_depth=5,
        init_bits=6,
        shift_max=1,
        tag_bits=1,
    ),
    "segments": ArrayParams(
        rows=3,
        segments=2,
        block=8,
        row_bits=9,
        moving_bits=8,
        acc_bits=40,
        acc_depth=9,
        init_bits=17,
        shift_max=15,
        product_registers=2,
    ),
}


@dataclass
class Step:
    """One step as presented; ``rescale`` is (rows,)."""

    moving: np.ndarray
    swap: bool
    addr: int
    first: bool
    init: np.ndarray
    shift: int
    rescale: np.ndarray
    emit: bool
    tag: int


@dataclass
class Stimulus:
    """What each cycle presents, and the outputs that the golden model expects in it."""

    params: ArrayParams
    feeds: list[np.ndarray | None] = field(default_factory=list)
    steps: list[Step | None] = field(default_factory=list)
    expected: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)

    def run_golden(self) -> None:
        golden = GoldenArray(self.params)
        for cycle, (feed, step) in enumerate(zip(self.feeds, self.steps, strict=True)):
            if step is not None:
                new = golden.step(
                    step.moving,
                    swap=step.swap,
                    addr=step.addr,
                    first=step.first,
                    init=step.init,
                    shift=step.shift,
                    rescale=step.rescale,
                )
                if step.emit:
                    self.expected[cycle + self.params.latency] = (step.tag, new)
            if feed is not None:
                golden.feed(feed)


def _numbers(random: np.random.Generator, bits: int, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers of a width; one time in three the extremes only, one time in six the lowest only."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    kind = random.integers(6)
    if kind == 0:
        return np.full(shape, low, dtype=np.int64)
    if kind == 1:
        return random.choice(np.array([low, high, -1, 0]), shape)
    return random.integers(low, high + 1, shape)


def random_stimulus(params: ArrayParams, cycles: int, seed: int, busy: float) -> Stimulus:
    """Feeds and steps at random, each in a share ``busy`` of the cycles; addresses keep the revisit distance."""
    random = np.random.default_rng(seed)
    stimulus = Stimulus(params)
    # The operand is defined from the first swap on: fill it before.
    for _ in range(params.feed_cycles):
        stimulus.feeds.append(_numbers(random, params.row_bits, (params.rows, params.segments)))
        stimulus.steps.append(None)
    last_use: dict[int, int] = {}
    swapped = False
    for cycle in range(params.feed_cycles, params.feed_cycles + cycles):
        feed = _numbers(random, params.row_bits, (params.rows, params.segments)) if random.random() < busy else None
        step = None
        free = [a for a in range(params.acc_depth) if cycle - last_use.get(a, -100) >= params.revisit_cycles]
        if random.random() < busy and free:
            # Often the address that has just become free: the shortest distance that is allowed.
            addr = max(free, key=lambda a: last_use.get(a, -1)) if random.random() < 0.5 else int(random.choice(free))
            last_use[addr] = cycle
            rescale = random.integers(0, 32, params.rows) * random.integers(0, 2, params.rows)
            step = Step(
                moving=_numbers(random, params.moving_bits, (params.segments, params.block)),
                swap=not swapped or bool(random.random() < 0.2),
                addr=addr,
                first=bool(random.random() < 0.2),
                init=_numbers(random, params.init_bits, (params.segments,)),
                shift=int(random.integers(1 << params.shift_bits)),
                rescale=rescale,
                emit=bool(random.random() < 0.7),
                tag=int(random.integers(1 << params.tag_bits)),
            )
            swapped = True
        stimulus.feeds.append(feed)
        stimulus.steps.append(step)
    stimulus.run_golden()
    return stimulus


def simulate(stimulus: Stimulus) -> None:
    """Present the stimulus; check valid, tag and data of every cycle until the pipeline is empty."""
    params = stimulus.params
    dut = MacArray(params)
    seen = 0

    async def bench(ctx: TickTrigger) -> None:
        nonlocal seen
        total = len(stimulus.steps) + params.latency + 3
        for cycle in range(total):
            feed = stimulus.feeds[cycle] if cycle < len(stimulus.feeds) else None
            step = stimulus.steps[cycle] if cycle < len(stimulus.steps) else None
            ctx.set(dut.feed_valid, feed is not None)
            if feed is not None:
                ctx.set(dut.feed_data, feed.tolist())
            ctx.set(dut.step_valid, step is not None)
            if step is not None:
                ctx.set(
                    dut.step,
                    {
                        "data": step.moving.tolist(),
                        "swap": step.swap,
                        "addr": step.addr,
                        "first": step.first,
                        "init": step.init.tolist(),
                        "shift": step.shift,
                        "emit": step.emit,
                        "tag": step.tag,
                    },
                )
                ctx.set(dut.rescale, step.rescale.tolist())
            expected = stimulus.expected.get(cycle)
            assert ctx.get(dut.o_valid) == (expected is not None), f"o_valid in cycle {cycle}"
            if expected is not None:
                tag, values = expected
                got = [[ctx.get(dut.o_data[r][s]) for s in range(params.segments)] for r in range(params.rows)]
                assert ctx.get(dut.o_tag) == tag, f"o_tag in cycle {cycle}"
                assert got == values.tolist(), f"o_data in cycle {cycle}"
                seen += 1
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    assert seen == len(stimulus.expected) > 0


@pytest.mark.parametrize(
    ("name", "cycles", "busy", "seed"),
    [
        ("tiny", 400, 1.0, 1),
        ("tiny", 400, 0.5, 2),
        ("ecp5", 150, 1.0, 3),
        ("ecp5", 150, 0.6, 4),
        ("wide", 40, 1.0, 5),
        ("least", 1500, 0.8, 6),
        ("segments", 600, 1.0, 7),
        ("segments", 600, 0.3, 8),
    ],
)
def test_random_steps_and_feeds_equal_golden(name: str, cycles: int, busy: float, seed: int) -> None:
    simulate(random_stimulus(PARAMS[name], cycles, seed, busy))


def test_stimulus_reaches_every_shift_rescale_and_distance() -> None:
    stimulus = random_stimulus(PARAMS["tiny"], 400, 1, 1.0)
    steps = [(cycle, step) for cycle, step in enumerate(stimulus.steps) if step is not None]
    assert {step.shift for _, step in steps} == set(range(8))
    assert {int(amount) for _, step in steps if not step.first for amount in step.rescale} == set(range(32))
    assert any(
        feed is not None and step is not None and step.swap
        for feed, step in zip(stimulus.feeds, stimulus.steps, strict=True)
    )
    last: dict[int, int] = {}
    distances = set()
    for cycle, step in steps:
        if step.addr in last and not step.first:
            distances.add(cycle - last[step.addr])
        last[step.addr] = cycle
    assert min(distances) == PARAMS["tiny"].revisit_cycles


@pytest.mark.parametrize("name", ["tiny", "segments"])
def test_every_shift_and_rescale_at_both_extremes(name: str) -> None:
    """Accumulators at their extremes through every rescale amount, largest sums through every shift."""
    params = PARAMS[name]
    low_x, low_y = -(1 << (params.row_bits - 1)), -(1 << (params.moving_bits - 1))
    low_init, high_init = -(1 << (params.init_bits - 1)), (1 << (params.init_bits - 1)) - 1
    stimulus = Stimulus(params)

    def step(**values: object) -> None:
        base = {
            "moving": np.zeros((params.segments, params.block), dtype=np.int64),
            "swap": False,
            "addr": 0,
            "first": False,
            "init": np.zeros(params.segments, dtype=np.int64),
            "shift": 0,
            "rescale": np.zeros(params.rows, dtype=np.int64),
            "emit": True,
            "tag": 0,
        }
        stimulus.feeds.append(None)
        stimulus.steps.append(Step(**(base | values)))

    def idle(cycles: int) -> None:
        stimulus.feeds.extend([None] * cycles)
        stimulus.steps.extend([None] * cycles)

    for _ in range(params.feed_cycles):
        stimulus.feeds.append(np.full((params.rows, params.segments), low_x))
        stimulus.steps.append(None)
    step(swap=True, first=True, emit=False)
    for shift in range(1 << params.shift_bits):
        for operand in (low_y, -low_y - 1, 1, -1):
            moving = np.full((params.segments, params.block), operand)
            step(moving=moving, first=True, addr=shift % params.acc_depth, shift=shift)
    for value in (low_init, low_init + 1, -1, 0, 1, high_init - 1, high_init):
        for amount in range(32):
            step(first=True, addr=amount % params.acc_depth, init=np.full(params.segments, value), emit=False)
            idle(params.revisit_cycles - 1)
            step(addr=amount % params.acc_depth, rescale=np.full(params.rows, amount))
    stimulus.run_golden()
    simulate(stimulus)
