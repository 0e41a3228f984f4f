"""LayerNorm in hardware: bit for bit against the contract, and its rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from amaranth.sim import Simulator

from dtp.config import Config
from dtp.layernorm import LayerNormParams, layernorm
from dtp.matrix import words
from rtl.layernorm import LayerNorm

_TINY = Config.load("tiny")
CONFIGS = {
    "tiny": _TINY,
    "ecp5-85k": Config.load("ecp5-85k"),
    "one lane, two segments": _TINY.changed(lanes=16, output_bytes=16, normaliser_lanes=1),
    "four lanes of two rows": _TINY.changed(rows=2, lanes=16, output_bytes=8, normaliser_lanes=4),
    "16 bits": _TINY.changed(operand_bits=16, normaliser_lanes=2),
    "wide": Config.load("wide"),
    # Long enough for an element 32 deviations away, which is saturated.
    "long rows": _TINY.changed(max_model=2048, max_mlp=2048),
}


def groups_of(config: Config, random: np.random.Generator, count: int) -> list[np.ndarray]:
    made = []
    for n in range(count):
        width = config.max_model if n == 0 else config.block * int(random.integers(1, 3))
        scale = random.choice([1, 40, 3000, 30000], (config.rows, 1))
        x = random.normal(size=(config.rows, width)) * scale + random.choice([0, 500], (config.rows, 1))
        x = np.clip(x, -32768, 32767).astype(np.int64)
        x[0] = 0
        x[0, 0] = 32767
        x[1] = np.where(np.arange(width) % 2, 32767, -32768) if n % 2 == 0 else -32768
        made.append(x)
    return made


def simulate(
    config: Config, groups: list[np.ndarray], random: np.random.Generator, source: float, sink: float
) -> tuple[list[list[int]], list[int], int]:
    """Normalised words, the cycles in which words were taken, and the saturation count."""
    dut = LayerNorm(config)
    p = LayerNormParams(config)
    out: list[list[int]] = []
    taken: list[int] = []
    count = 0
    total = sum(len(words(config, x)) for x in groups)
    limit = 2000 + 60 * total * p.word_cycles + len(groups) * config.rows * p.root_cycles
    elements = config.rows * config.segments

    async def bench(ctx: Any) -> None:
        nonlocal count
        stream = [(word, n) for n, x in enumerate(groups) for word in list(words(config, x)) * 2]
        number = cycle = idle = 0
        offered = False
        held: int | None = None
        while idle < 40:
            assert cycle < limit, f"{len(out)} of {total} words after {cycle} cycles"
            if not offered and number < len(stream) and random.random() < source:
                group = groups[stream[number][1]]
                # Width and words are those of the group until all of it has left.
                if len(out) >= sum(len(words(config, x)) for x in groups[: stream[number][1]]):
                    offered = True
                    ctx.set(dut.width, group.shape[1])
                    ctx.set(dut.words, len(words(config, group)))
                    ctx.set(dut.i.payload, stream[number][0].tolist())
            ctx.set(dut.i.valid, offered)
            ctx.set(dut.o.ready, random.random() < sink)
            if offered and ctx.get(dut.i.ready):
                taken.append(cycle)
                number, offered = number + 1, False
            count += ctx.get(dut.saturated).bit_count()
            word, valid = ctx.get(dut.o.payload.as_value()), ctx.get(dut.o.valid)
            if held is not None:
                assert valid and word == held
            held = word if valid and not ctx.get(dut.o.ready) else None
            if valid and ctx.get(dut.o.ready):
                values = [(word >> 16 * n) & 0xFFFF for n in range(elements)]
                out.append([v - (v >> 15 << 16) for v in values])
            idle = idle + 1 if len(out) >= total else 0
            await ctx.tick()
            cycle += 1
        assert ctx.get(dut.idle) and number == len(stream)

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return out, taken, count


def check(config: Config, groups: list[np.ndarray], out: list[list[int]], count: int) -> None:
    wanted, saturated = [], 0
    for x in groups:
        n, over = layernorm(x)
        wanted += [word.ravel().tolist() for word in words(config, n)]
        saturated += over
    assert len(out) == len(wanted)
    for number, (word, expected) in enumerate(zip(out, wanted, strict=True)):
        assert word == expected, f"word {number}"
    assert count == saturated


@pytest.mark.parametrize("name", CONFIGS)
def test_never_stalling(name: str) -> None:
    config, random = CONFIGS[name], np.random.default_rng(1)
    groups = groups_of(config, random, {"wide": 2, "long rows": 1}.get(name, 4))
    out, taken, count = simulate(config, groups, random, 1.0, 1.0)
    check(config, groups, out, count)
    assert (count > 0) is (name == "long rows")
    p = LayerNormParams(config)
    first = taken[: len(words(config, groups[0]))]
    assert set(np.diff(first)) <= {p.word_cycles}
    root = taken[len(first)] - first[-1]
    assert root <= p.word_cycles + p.square_cycles + config.rows * p.root_cycles + 4


@pytest.mark.parametrize(("source", "sink"), [(0.3, 1.0), (1.0, 0.1), (0.5, 0.5)])
@pytest.mark.parametrize("name", ["tiny", "one lane, two segments", "four lanes of two rows"])
def test_pauses(name: str, source: float, sink: float) -> None:
    config, random = CONFIGS[name], np.random.default_rng(2)
    groups = groups_of(config, random, 3)
    out, _, count = simulate(config, groups, random, source, sink)
    check(config, groups, out, count)
