# amaranth: UnusedElaboratable=no
"""Register slice and queues: nothing lost, doubled, reordered or changed while it waits; rate and latency."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from amaranth.lib import data
from amaranth.sim import Simulator

from dtp.errors import DtpError
from rtl.lib.streams import BlockQueue, PrefetchQueue, RegisterSlice, StreamQueue

SHAPE = data.StructLayout({"low": 5, "high": 9})
UNITS = {
    "slice": lambda: RegisterSlice(SHAPE),
    "queue of 2": lambda: StreamQueue(SHAPE, 2),
    "queue of 8": lambda: StreamQueue(SHAPE, 8),
    "block of 8": lambda: PrefetchQueue(SHAPE, 8),
    "slow block of 8": lambda: BlockQueue(SHAPE, 8),
}
CAPACITY = {"slice": 2, "queue of 2": 2, "queue of 8": 8, "block of 8": 8, "slow block of 8": 9}
LATENCY = {
    "slice": 1, "queue of 2": 1, "queue of 8": 1, "block of 8": PrefetchQueue.LATENCY,
    "slow block of 8": BlockQueue.LATENCY,
}  # fmt: skip


def _run(unit: Any, count: int, source: float, sink: float, seed: int, *, hold_until: int = 0) -> dict[str, list[int]]:
    """Sends ``count`` payloads; the sink is closed before cycle ``hold_until``."""
    random = np.random.default_rng(seed)
    sent = [int(x) for x in random.integers(1 << 14, size=count)]
    seen: dict[str, list[int]] = {"sent": sent, "got": [], "in": [], "out": []}

    async def bench(ctx: Any) -> None:
        offered, held, idle, cycle = False, None, 0, 0
        while idle < 20:
            assert cycle < 400 + 20 * count, f"{len(seen['got'])} of {count} after {cycle} cycles"
            number = len(seen["in"])
            offered = offered or (number < count and random.random() < source)
            ctx.set(unit.i.valid, offered)
            word = sent[number] if offered else int(random.integers(1 << 14))
            ctx.set(unit.i.payload, {"low": word & 31, "high": word >> 5})
            ready = cycle >= hold_until and random.random() < sink
            ctx.set(unit.o.ready, not ready)
            before = ctx.get(unit.i.ready)
            ctx.set(unit.o.ready, ready)
            assert ctx.get(unit.i.ready) == before, "i.ready depends on o.ready within a cycle"
            out = ctx.get(unit.o.payload.as_value())
            valid = ctx.get(unit.o.valid)
            inside = number - len(seen["got"])
            if isinstance(unit, BlockQueue):
                assert ctx.get(unit.empty) == (inside == 0)
                assert inside - ctx.get(unit.level) in ((1,) if valid else (0, 1))
            if held is not None:
                assert valid and out == held, f"a waiting payload changed in cycle {cycle}"
            held = out if valid and not ready else None
            if valid and ready:
                seen["got"].append(out)
                seen["out"].append(cycle)
                idle = 0
            elif len(seen["got"]) >= count:
                idle += 1
            if offered and ctx.get(unit.i.ready):
                seen["in"].append(cycle)
                offered = False
            await ctx.tick()
            cycle += 1

    simulator = Simulator(unit)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    assert seen["got"] == sent
    return seen


@pytest.mark.parametrize("sink", [0.2, 0.7, 1.0])
@pytest.mark.parametrize("source", [0.3, 1.0])
@pytest.mark.parametrize("name", UNITS)
def test_order(name: str, source: float, sink: float) -> None:
    _run(UNITS[name](), 200, source, sink, seed=1)


@pytest.mark.parametrize("name", UNITS)
def test_one_a_cycle_with_the_latency(name: str) -> None:
    count, period = (8, BlockQueue.PERIOD) if name.startswith("slow") else (50, 1)
    seen = _run(UNITS[name](), count, 1.0, 1.0, seed=2)
    assert seen["in"] == list(range(seen["in"][0], seen["in"][0] + count))
    assert seen["out"] == [seen["in"][0] + LATENCY[name] + period * n for n in range(count)]


@pytest.mark.parametrize("name", UNITS)
def test_capacity(name: str) -> None:
    seen = _run(UNITS[name](), 30, 1.0, 1.0, seed=3, hold_until=40)
    assert sum(cycle < 40 for cycle in seen["in"]) == CAPACITY[name]


@pytest.mark.parametrize("depth", [0, 1, 3, 8192])
def test_depth_is_checked(depth: int) -> None:
    for queue in (StreamQueue, PrefetchQueue, BlockQueue):
        rule = f"^{queue.__name__}.depth must be a power of two from 2 to 4096, not {depth}$"
        with pytest.raises(DtpError, match=rule):
            queue(SHAPE, depth)
