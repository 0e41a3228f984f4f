"""Block memory: every bit of a word comes back, whatever the shape and however the word is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from amaranth.hdl import Module, signed, unsigned
from amaranth.lib import data
from amaranth.sim import Simulator

from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import Target


@pytest.mark.parametrize("granularity", [None, 18])
@pytest.mark.parametrize("shape", [unsigned(144), data.ArrayLayout(signed(18), 8)], ids=["plain", "layout"])
@pytest.mark.parametrize("target", list(Target))
def test_words(target: Target, shape: Any, granularity: int | None) -> None:
    m = Module()
    memory = BlockMemory(m, "words", shape, 512, granularity=granularity, target=target)
    random = np.random.default_rng(1)
    words = [int.from_bytes(random.bytes(18), "little") for _ in range(16)]

    async def bench(ctx: Any) -> None:
        ctx.set(memory.write.en, (1 << len(memory.write.en)) - 1)
        for address, word in enumerate(words):
            ctx.set(memory.write.addr, address)
            ctx.set(memory.write.data if isinstance(shape, type(unsigned(1))) else memory.write.data.as_value(), word)
            await ctx.tick()
        ctx.set(memory.write.en, 0)
        for address, word in enumerate(words):
            ctx.set(memory.address, address)
            await ctx.tick()
            read = memory.data if isinstance(shape, type(unsigned(1))) else memory.data.as_value()
            assert ctx.get(read) == word

    simulator = Simulator(m)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
