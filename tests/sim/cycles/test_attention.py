"""The cycle model against the hardware: the cycle of every output beat, job after job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from amaranth.sim import Simulator

import rtl.attention
from dtp.job import output_beats
from dtp.workload import Mode
from rtl.attention import AttentionTile
from sim.cycles.attention import predict
from tests.tile import CONFIGS, TINY, Shape, check_jobs, heads_of, random_shapes, run_jobs

TOKENS = {"tiny": 64, "narrow": 48, "wide16": 32, "bytes": 24}


@pytest.mark.parametrize("seed", range(7))
@pytest.mark.parametrize("name", CONFIGS)
def test_every_output_beat_comes_when_predicted(name: str, seed: int) -> None:
    """Up to seven random jobs back to back, causal, padded and masked ones among them."""
    config = CONFIGS[name]
    heads = heads_of(config, random_shapes(config, 1 + seed, 200 + seed, tokens=TOKENS[name]), 20 + seed)
    result = run_jobs(config, heads)
    check_jobs(config, heads, result)
    assert result.first_input_cycle is not None
    prediction = predict(config, heads)
    measured = result.cycles - result.first_input_cycle
    assert (prediction.beat_cycles == measured).all()
    assert prediction.total_cycles == measured[-1] + 1


STALLED = {
    # What a run is made of, and the stall that it has to show.
    "issue": [Shape(tokens=9, width=5), Shape(tokens=24, width=9, causal=True, kept=0.4)],
    "operands": [Shape(tokens=20, width=16, mode=Mode.RIEMANNIAN)],
    "probabilities": [Shape(tokens=8, width=8)],
    "queries": [Shape(tokens=17, width=9, mode=Mode.RIEMANNIAN, kept=0.5), Shape(tokens=4, width=3)],
    "output": [Shape(tokens=32, width=16, kept=0.2)],
}


@pytest.mark.parametrize("cause", STALLED)
def test_cycles_of_the_array_are_steps_or_stalls(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TINY
    heads = heads_of(config, STALLED[cause], 230)
    prediction = predict(config, heads)
    arrays = []

    def watched(*arguments: Any, **options: Any) -> Any:
        arrays.append(array(*arguments, **options))
        return arrays[-1]

    array = rtl.attention.MacArray
    monkeypatch.setattr(rtl.attention, "MacArray", watched)
    tile = AttentionTile(config)
    simulator = Simulator(tile)
    steps: list[int] = []
    beats: list[tuple[int, bool]] = []
    for head in heads:
        rows = [int.from_bytes(row.tobytes(), "little") for row in head.beats(config)]
        beats += [(row, number == len(rows) - 1) for number, row in enumerate(rows)]
    wanted = sum(output_beats(config, head.job) for head in heads)

    async def bench(ctx: Any) -> None:
        given = taken = 0
        ctx.set(tile.o.ready, 1)
        for cycle in range(prediction.total_cycles + 10):
            ctx.set(tile.i.valid, given < len(beats))
            if given < len(beats):
                ctx.set(tile.i.payload.data, beats[given][0])
                ctx.set(tile.i.payload.last, beats[given][1])
            given += ctx.get(tile.i.valid) & ctx.get(tile.i.ready)
            taken += ctx.get(tile.o.valid)
            if ctx.get(arrays[0].step_valid):
                steps.append(cycle)
            await ctx.tick()
        assert (given, taken) == (len(beats), wanted)

    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    assert (len(steps), steps[0]) == (prediction.array_busy_cycles, prediction.start_cycle)
    assert prediction.array_busy_cycles + sum(prediction.stalls.values()) == steps[-1] - steps[0] + 1
    assert prediction.stalls[cause] > 0


class Rows:
    """Mask rows that are there from a given cycle on."""

    def __init__(self, *there: int) -> None:
        self.there = list(there)

    def take(self, earliest: int) -> int:
        return max(earliest, self.there.pop(0))


def test_late_mask_rows_are_stalls_of_the_gate() -> None:
    """Rows in time cost nothing; one that comes late costs as much as the array has nothing else to do."""
    shape = Shape(tokens=24, width=16)
    plain = heads_of(TINY, [shape], 240)
    heads = [replace(head, job=replace(head.job, gated=True)) for head in plain]
    dense = predict(TINY, plain)
    early = predict(TINY, heads, Rows(0, 0, 0))
    assert early.total_cycles == dense.total_cycles and early.stalls == dense.stalls and early.stalls["gate"] == 0
    # The first row comes before the array's first step and so does not count as a stall.
    first, late = (predict(TINY, heads, Rows(300, 0, cycle)) for cycle in (0, 2000))
    assert first.stalls["gate"] == 0 and late.stalls["gate"] > 1000 and late.total_cycles > 2000
    more = sum(late.stalls.values()) - sum(first.stalls.values())
    assert more == late.total_cycles - first.total_cycles
