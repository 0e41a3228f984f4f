"""Difference norm in hardware: bit for bit against the contract, records in the cycles of its parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from amaranth.sim import Simulator

from dtp.config import Config
from dtp.difference import DifferenceParams, ratio
from rtl.difference import DifferenceNorm

_TINY = Config.load("tiny")
_WIDE = Config.load("wide")
CONFIGS = {
    "tiny": _TINY,
    "ecp5-85k": Config.load("ecp5-85k"),
    "one lane, two segments": _TINY.changed(lanes=16, output_bytes=16, normaliser_lanes=1),
    "four lanes of two rows": _TINY.changed(rows=2, lanes=16, output_bytes=8, normaliser_lanes=4),
    "wide": _WIDE.changed(max_model=64),
}


def groups_of(config: Config, random: np.random.Generator, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Differences and references, (words, rows, segments), with rows that saturate, vanish or have no reference."""
    made = []
    for n in range(count):
        words = int(random.integers(1, 9)) if n else config.max_model // config.segments
        shape = (words, config.rows, config.segments)
        difference = random.integers(-98304, 98304, shape) >> random.integers(0, 17, (1, config.rows, 1))
        reference = random.integers(-32768, 32768, shape) >> random.integers(0, 4, (1, config.rows, 1))
        if n == 0:
            difference[:, 0] = -98303
            reference[:, 0] = -32768
        if n == 1:
            reference[:, 0] = 0
            difference[:, 1] = reference[:, 1] = 0
        made.append((difference, reference))
    return made


def simulate(
    config: Config, groups: list[Any], random: np.random.Generator, source: float, sink: float
) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """Records (difference, reference, ratio, last), their cycles, and the cycles in which words were taken."""
    dut = DifferenceNorm(config)
    words = [(d, r, n == len(ds) - 1) for ds, rs in groups for n, (d, r) in enumerate(zip(ds, rs, strict=True))]
    total = len(groups) * config.rows
    p = DifferenceParams(config)
    limit = 1000 + 20 * (len(words) * p.word_cycles + total * p.record_cycles)
    records: list[tuple[int, ...]] = []
    cycles: list[int] = []
    taken: list[int] = []

    async def bench(ctx: Any) -> None:
        number = cycle = idle = 0
        offered = False
        held: tuple[int, ...] | None = None
        while idle < 60:
            assert cycle < limit, f"{len(records)} of {total} records after {cycle} cycles"
            if not offered and number < len(words) and random.random() < source:
                offered = True
                ctx.set(dut.i.payload.difference, words[number][0].tolist())
                ctx.set(dut.i.payload.reference, words[number][1].tolist())
                ctx.set(dut.i.payload.last, words[number][2])
            ctx.set(dut.i.valid, offered)
            ctx.set(dut.o.ready, random.random() < sink)
            if offered and ctx.get(dut.i.ready):
                taken.append(cycle)
                number, offered = number + 1, False
            payload = dut.o.payload
            record = tuple(ctx.get(field) for field in (
                payload.difference, payload.reference, payload.ratio, payload.last,
            ))  # fmt: skip
            valid = ctx.get(dut.o.valid)
            if held is not None:
                assert valid and record == held
            held = record if valid and not ctx.get(dut.o.ready) else None
            if valid and ctx.get(dut.o.ready):
                records.append(record)
                cycles.append(cycle)
            idle = idle + 1 if len(records) >= total else 0
            await ctx.tick()
            cycle += 1
        assert number == len(words)

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return records, cycles, taken


def expected(config: Config, groups: list[Any]) -> list[tuple[int, ...]]:
    records = []
    for difference, reference in groups:
        for row in range(config.rows):
            top, bottom = (int((x[:, row] ** 2).sum()) for x in (difference, reference))
            records.append((top, bottom, int(ratio([top], [bottom])[0]), int(row == config.rows - 1)))
    return records


@pytest.mark.parametrize("name", CONFIGS)
def test_never_stalling(name: str) -> None:
    config, random = CONFIGS[name], np.random.default_rng(1)
    groups = groups_of(config, random, 5)
    records, cycles, taken = simulate(config, groups, random, 1.0, 1.0)
    wanted = expected(config, groups)
    assert records == wanted
    assert {65535, 0} < {record[2] for record in wanted}
    p = DifferenceParams(config)
    word = row = 0
    for difference, _ in groups:
        group = taken[word : word + len(difference)]
        assert set(np.diff(group)) <= {p.word_cycles}
        first = group[-1] + p.first_record_cycles
        assert cycles[row : row + config.rows] == [first + n * p.record_cycles for n in range(config.rows)]
        word, row = word + len(difference), row + config.rows
        if word < len(taken):
            assert taken[word] == cycles[row - 1] + 1


@pytest.mark.parametrize(("source", "sink"), [(0.3, 1.0), (1.0, 0.2), (0.5, 0.5)])
@pytest.mark.parametrize("name", CONFIGS)
def test_pauses(name: str, source: float, sink: float) -> None:
    config, random = CONFIGS[name], np.random.default_rng(2)
    groups = groups_of(config.changed(max_model=config.block), random, 3)
    assert simulate(config, groups, random, source, sink)[0] == expected(config, groups)
