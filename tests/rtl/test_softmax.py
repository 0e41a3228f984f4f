"""The softmax unit against its golden model, bit for bit and cycle for cycle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from amaranth.hdl import ResetInserter, Signal
from amaranth.sim import Simulator

from dtp.config import SCORE_BITS, SCORE_FRACTION_BITS, Config
from dtp.fixed import Int, signed_range
from dtp.softmax import SoftmaxParams, SoftmaxState, advance, clip_scores
from rtl.softmax import Softmax

TINY = Config.load("tiny")
CONFIGS = {
    "tiny": TINY,
    "ecp5-85k": Config.load("ecp5-85k"),
    "wide": Config.load("wide"),
    "p8": TINY.changed(probability_bits=8),
    "p14": TINY.changed(probability_bits=14, lookahead=1),
    "p15": TINY.changed(probability_bits=15),
    "p16": TINY.changed(probability_bits=16, lookahead=2),
    "rows-equal-block": TINY.changed(rows=8),
    "two-segments": TINY.changed(lanes=16, lookahead=2, probability_bits=16),
    "two-segments-rows-equal-block": TINY.changed(rows=8, lanes=16, lookahead=6),
    "smallest-block": TINY.changed(rows=2, lanes=4, block=4, input_bytes=4, output_bytes=4, normaliser_lanes=2),
}


@dataclass(frozen=True)
class Item:
    """One block of keys for one group, with the accumulators (rows, block) that the array delivers."""

    first: bool
    last: bool
    key_base: int
    query_base: int
    valid_length: int
    causal: bool
    accumulators: Int

    def kept(self) -> np.ndarray:
        rows, block = self.accumulators.shape
        query = self.query_base + np.arange(rows)[:, np.newaxis]
        key = self.key_base + np.arange(block)[np.newaxis, :]
        kept = (query < self.valid_length) & (key < self.valid_length)
        return kept & (key <= query) if self.causal else kept


@dataclass
class Result:
    """What came out: items in order of ``done``, groups in order of ``group_valid``, and when."""

    p: list[Int] = field(default_factory=list)
    rescale: list[list[int]] = field(default_factory=list)
    denominators: list[list[int]] = field(default_factory=list)
    saturations: list[int] = field(default_factory=list)
    last_cycles: list[int] = field(default_factory=list)
    done_cycles: list[int] = field(default_factory=list)
    group_cycles: list[int] = field(default_factory=list)


def golden(config: Config, items: list[Item]) -> Result:
    result = Result()
    state, saturations = SoftmaxState(config.rows, config.probability_bits), 0
    for item in items:
        if item.first:
            state, saturations = SoftmaxState(config.rows, config.probability_bits), 0
        scores, count = clip_scores(item.accumulators, item.kept())
        saturations += count
        p, rescale = advance(state, scores, item.kept())
        result.p.append(p)
        result.rescale.append(rescale.tolist())
        if item.last:
            result.denominators.append(state.denominator.tolist())
            result.saturations.append(saturations)
    return result


def run(
    config: Config,
    items: list[Item],
    rng: np.random.Generator,
    *,
    gap: Callable[[int, int], int] = lambda item, step: 0,
    reader_delay: Callable[[int], int] = lambda item: 0,
    reset_at: int | None = None,
) -> Result:
    """All items through the unit; ``gap`` idle cycles before a step, ``reader_delay`` before p is read.

    With ``reset_at`` the unit is reset in that cycle of a first, unchecked start, and everything begins again.
    """
    params = SoftmaxParams(config)
    steps, slots, s = config.pass_steps, params.slots, config.segments
    rows, w = config.rows, config.probability_bits
    reset = Signal()
    dut = Softmax(config)
    low, high = signed_range(config.accumulator_bits)
    bits = config.accumulator_bits
    width_mask = (1 << bits) - 1
    result = Result()
    limit = 200 + len(items) * (8 * config.block + 40)

    def packed(step_scores: Int) -> int:
        value = 0
        for n, x in enumerate(step_scores.reshape(-1).tolist()):
            value |= (x & width_mask) << (n * bits)
        return value

    async def attempt(ctx, out: Result, stop: int | None) -> None:
        n_item = step = described = read_item = 0
        wait = gap(0, 0)
        describe_cycle: dict[int, int] = {}
        ready_cycle: list[int] = []  # when reading of an item may begin
        reads: list[tuple[int, int, int]] = []  # cycle of the data, item, feed
        feed = 0
        freed = 0  # items whose p has been read
        idle = 0
        pulses = 0
        for cycle in range(limit):
            if stop is not None and cycle == stop:
                ctx.set(reset, 1)
                await ctx.tick()
                ctx.set(reset, 0)
                return
            # Descriptions: as late as allowed, or early.
            ctx.set(dut.item_valid, 0)
            ctx.set(dut.item, {"slot": int(rng.integers(slots)), "key_base": 0})
            can_describe = described < len(items) and described < freed + slots and described <= n_item + 1
            if can_describe and (described == n_item or rng.random() < 0.3):
                item = items[described]
                ctx.set(dut.item_valid, 1)
                ctx.set(
                    dut.item,
                    {
                        "slot": described % slots,
                        "first": item.first,
                        "last": item.last,
                        "key_base": item.key_base,
                        "query_base": item.query_base,
                        "valid_length": item.valid_length,
                        "causal": item.causal,
                    },
                )
                describe_cycle[described] = cycle
                described += 1
            # Scores
            ctx.set(dut.i_valid, 0)
            ctx.set(dut.i_step, int(rng.integers(steps)))
            ctx.set(dut.i_slot, int(rng.integers(slots)))
            ctx.set(dut.i_data.as_value(), packed(rng.integers(low, high + 1, (rows, s))))
            known = n_item in describe_cycle and cycle >= describe_cycle[n_item] + params.item_lead
            if known:
                if wait:
                    wait -= 1
                else:
                    ctx.set(dut.i_valid, 1)
                    ctx.set(dut.i_slot, n_item % slots)
                    ctx.set(dut.i_step, step)
                    ctx.set(dut.i_data.as_value(), packed(items[n_item].accumulators[:, step * s : (step + 1) * s]))
                    step += 1
                    if step == steps:
                        out.last_cycles.append(cycle)
                        step, n_item = 0, n_item + 1
                    wait = gap(n_item, step)
            # Probabilities
            ctx.set(dut.p_slot, int(rng.integers(slots)))
            ctx.set(dut.p_feed, int(rng.integers(steps)))
            if read_item < len(ready_cycle) and cycle >= ready_cycle[read_item]:
                ctx.set(dut.p_slot, read_item % slots)
                ctx.set(dut.p_feed, feed)
                reads.append((cycle + params.p_read_latency, read_item, feed))
                feed += 1
                if feed == steps:
                    # Rescales are still there.
                    ctx.set(dut.rescale_slot, read_item % slots)
                    assert list(ctx.get(dut.rescale)) == out.rescale[read_item]
                    feed, read_item = 0, read_item + 1
                    freed = read_item
            while reads and reads[0][0] == cycle:
                _, item_index, at = reads.pop(0)
                raw = ctx.get(dut.p_data.as_value())
                values = [(raw >> (n * w)) & ((1 << w) - 1) for n in range(rows * s)]
                out.p[item_index][:, at * s : (at + 1) * s] = np.array(values).reshape(rows, s)
            if ctx.get(dut.done):
                ctx.set(dut.rescale_slot, len(out.done_cycles) % slots)
                out.rescale.append(list(ctx.get(dut.rescale)))
                ready_cycle.append(cycle + 1 + reader_delay(len(out.done_cycles)))
                out.done_cycles.append(cycle)
                out.p.append(np.full((rows, config.block), -1, dtype=np.int64))
            if ctx.get(dut.group_valid):
                out.denominators.append(list(ctx.get(dut.denominators)))
                out.saturations.append(ctx.get(dut.saturations))
                out.group_cycles.append(cycle)
            pulses = len(out.done_cycles) + len(out.group_cycles)
            expected = len(items) + sum(item.last for item in items)
            if pulses >= expected and read_item == len(items) and not reads:
                idle += 1
                if idle > params.group_latency + 2 * config.block:  # an extra pulse would have shown up
                    return
            await ctx.tick()
        raise AssertionError(f"{len(out.done_cycles)} of {len(items)} items done in {limit} cycles")

    async def bench(ctx) -> None:
        if reset_at is not None:
            await attempt(ctx, Result(), reset_at)
        await attempt(ctx, result, None)

    simulator = Simulator(ResetInserter(reset)(dut))
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return result


def check(config: Config, items: list[Item], result: Result) -> None:
    params = SoftmaxParams(config)
    want = golden(config, items)
    assert len(result.done_cycles) == len(items)
    assert len(result.group_cycles) == sum(item.last for item in items) > 0
    for n, item in enumerate(items):
        np.testing.assert_array_equal(result.p[n], want.p[n], f"p of item {n} of {len(items)}: {item}")
        assert result.rescale[n] == want.rescale[n], f"rescale of item {n}"
    assert result.denominators == want.denominators
    assert result.saturations == want.saturations
    # Cycle by cycle: at once, or a block after the item before.
    done, group = [], []
    for n, item in enumerate(items):
        done.append(result.last_cycles[n] + params.latency)
        if n:
            done[n] = max(done[n], done[n - 1] + config.block)
        if item.last:
            group.append(done[n] + params.group_latency - params.latency)
    assert result.done_cycles == done
    assert result.group_cycles == group


def random_items(config: Config, rng: np.random.Generator, count: int) -> list[Item]:
    """Groups of one to four items of one to two heads, any legal base, scores of several kinds."""
    rows, block = config.rows, config.block
    low, high = signed_range(config.accumulator_bits)
    one = 1 << SCORE_FRACTION_BITS
    items: list[Item] = []
    while len(items) < count:
        length = int(rng.integers(1, config.max_tokens + 1))
        causal = bool(rng.integers(2))
        query_base = int(rng.integers(-(-config.max_tokens // rows))) * rows
        if rng.random() < 0.5:  # on or near the diagonal and the end of the head
            length = min(config.max_tokens, query_base + int(rng.integers(1, 2 * rows)))
        blocks = config.max_tokens // block
        near = query_base // block
        number = int(rng.integers(1, 5))
        bases = np.clip(near + rng.integers(-2, 2, number), 0, blocks - 1)
        if rng.random() < 0.3:
            bases = rng.integers(blocks, size=number)
        level = 0.0
        for n in range(number):
            kind = rng.integers(6)
            if kind == 0:
                level += float(rng.uniform(-40, 40))  # rescales, some beyond 31
            scale = float(rng.choice([0.0, 0.01, 2.0, 8.0]))
            scores = np.rint((level + rng.laplace(0, scale + 1e-9, (rows, block))) * one).astype(np.int64)
            if kind == 1:
                scores = scores // one * one + rng.integers(-3, 4, scores.shape)  # about integers
            elif kind == 2:
                scores = rng.integers(low, high + 1, scores.shape)
            elif kind == 3:
                edge = rng.choice(np.array([low, high, *signed_range(SCORE_BITS)]), scores.shape)
                scores = np.where(rng.random(scores.shape) < 0.2, edge + rng.integers(-2, 3, scores.shape), scores)
            items.append(
                Item(
                    first=n == 0,
                    last=n == number - 1,
                    key_base=int(bases[n]) * block,
                    query_base=query_base,
                    valid_length=length,
                    causal=causal,
                    accumulators=np.clip(scores, low, high),
                )
            )
    return items


def dense_items(config: Config, groups: list[list[Int]]) -> list[Item]:
    """Every pair kept."""
    return [
        Item(n == 0, n == len(group) - 1, n * config.block, 0, config.max_tokens, False, accumulators)
        for group in groups
        for n, accumulators in enumerate(group)
    ]


def count_of(config: Config) -> int:
    return 12 if config.rows * config.segments > 16 else 40


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pace", ["back-to-back", "gaps", "bursts"])
def test_matches_golden_seed_1(name: str, pace: str) -> None:
    config = CONFIGS[name]
    rng = np.random.default_rng([1, list(CONFIGS).index(name), len(pace)])
    items = random_items(config, rng, count_of(config))
    assert any(item.first and item.last for item in items)
    assert any(not item.kept().any() for item in items) or len(items) < 20
    gaps = {
        "back-to-back": lambda item, step: 0,
        "gaps": lambda item, step: int(rng.integers(3)),
        "bursts": lambda item, step: int(rng.integers(2 * config.block)) if item % 3 == 0 and step == 0 else 0,
    }
    delays = {
        "back-to-back": lambda item: 0,
        "gaps": lambda item: int(rng.integers(4)),
        "bursts": lambda item: int(rng.integers(2)) * config.block,
    }
    check(config, items, run(config, items, rng, gap=gaps[pace], reader_delay=delays[pace]))


@pytest.mark.parametrize("name", ["tiny", "p16", "rows-equal-block", "two-segments"])
def test_every_step_of_the_exponential_seed_2(name: str) -> None:
    """One row per gap: differences over the whole range in which p is not 0, all fractions of a table step."""
    config = CONFIGS[name]
    rng = np.random.default_rng(2)
    one = 1 << SCORE_FRACTION_BITS
    gap = rng.integers(0, (config.probability_bits + 3) * one, (24, config.rows, config.block))
    # Where a probability turns 0: half of the last place.
    edge = (config.probability_bits + 1) * one + rng.integers(-6, 7, gap.shape)
    gap = np.where(rng.random(gap.shape) < 0.3, edge, gap)
    top = rng.integers(-100, 100, (24, config.rows, 1)) * one
    scores = top - gap
    scores[:, :, 0] = top[:, :, 0] - rng.integers(0, 4, top.shape[:2])
    items = dense_items(config, [[block] for block in scores])
    check(config, items, run(config, items, rng))


def test_extremes_of_the_accumulator() -> None:
    config = CONFIGS["tiny"]
    low, high = signed_range(config.accumulator_bits)
    clip_low, clip_high = signed_range(SCORE_BITS)
    shape = (config.rows, config.block)
    corners = [low, low + 1, clip_low - 1, clip_low, -1, 0, 1, clip_high, clip_high + 1, high - 1, high]
    blocks = [np.full(shape, value, dtype=np.int64) for value in corners]
    # Up through all corners, down, and each alone.
    items = dense_items(config, [blocks[:8], blocks[3:], blocks[::-1][:8], *[[block] for block in blocks]])
    result = run(config, items, np.random.default_rng(3))
    check(config, items, result)
    per_block = config.rows * config.block
    assert result.saturations[:2] == [3 * per_block, 3 * per_block]
    assert result.rescale[4] == [31] * config.rows  # from −512 to 0


def test_rows_without_a_kept_key() -> None:
    config = CONFIGS["tiny"]
    rng = np.random.default_rng(4)
    rows, block = config.rows, config.block
    high = signed_range(config.accumulator_bits)[1]
    full = np.full((rows, block), high, dtype=np.int64)
    base = Item(True, True, 0, 0, config.max_tokens, False, full)
    items = [
        replace(base),
        replace(base, valid_length=rows - 1),  # last row is padding
        replace(base, query_base=rows, valid_length=rows),  # all rows are
        replace(base, key_base=2 * block, valid_length=block),  # all keys are
        replace(base, key_base=block, query_base=0, causal=True),  # all keys come later
        # Its first item gives a row nothing: the maximum of the group before must not matter.
        replace(base, last=False, key_base=2 * block, valid_length=block),
        replace(base, first=False, accumulators=-full),
    ]
    result = run(config, items, rng)
    check(config, items, result)
    empty = [[value == 0 for value in group] for group in result.denominators]
    none, all_rows = [False] * rows, [True] * rows
    assert empty == [none, none[:-1] + [True], all_rows, all_rows, all_rows, none]
    kept = [rows * block, (rows - 1) ** 2, 0, 0, 0, rows * block]
    assert result.saturations == kept


@pytest.mark.parametrize("name", ["ecp5-85k", "wide", "two-segments-rows-equal-block"])
def test_causal_diagonal(name: str) -> None:
    """The items of a causal head about the diagonal, in its order."""
    config = CONFIGS[name]
    rng = np.random.default_rng(5)
    rows, block = config.rows, config.block
    items = []
    for query_base in range(0, 2 * block, rows):
        last = query_base // block
        for j in range(last + 1):
            scores = rng.integers(-8 << SCORE_FRACTION_BITS, 8 << SCORE_FRACTION_BITS, (rows, block))
            items.append(Item(j == 0, j == last, j * block, query_base, 2 * block - 3, True, scores))
    kept = sum(int(item.kept().sum()) for item in items)
    length = 2 * block - 3
    assert kept == length * (length + 1) // 2
    check(config, items, run(config, items, rng))


@pytest.mark.parametrize("name", ["tiny", "two-segments"])
@pytest.mark.parametrize("reset_at", [9, 30, 47])
def test_reset_starts_afresh(name: str, reset_at: int) -> None:
    config = CONFIGS[name]
    rng = np.random.default_rng(6)
    items = random_items(config, rng, 8)
    check(config, items, run(config, items, rng, reset_at=reset_at))


def test_idle_unit_says_nothing() -> None:
    """Junk on all inputs without a valid: no pulse."""
    config = CONFIGS["tiny"]
    dut = Softmax(config)
    rng = np.random.default_rng(7)

    async def bench(ctx) -> None:
        for _ in range(100):
            ctx.set(dut.i_step, int(rng.integers(config.pass_steps)))
            ctx.set(dut.i_slot, int(rng.integers(config.lookahead + 1)))
            assert not ctx.get(dut.done)
            assert not ctx.get(dut.group_valid)
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
