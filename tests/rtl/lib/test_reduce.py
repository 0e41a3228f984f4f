"""Many values to one, against Python."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import pytest
from amaranth.hdl import Module, Signal, signed, unsigned
from amaranth.sim import Simulator

from rtl.lib.reduce import choose, count_ones, joined, registered_choice, sum_tree


def _outputs(m: Module, inputs: list[Signal], output: Signal, rows: list[list[int]]) -> list[int]:
    """``output`` in the cycle of each row of inputs."""
    seen: list[int] = []

    async def bench(ctx: Any) -> None:
        for row in rows:
            for signal, value in zip(inputs, row, strict=True):
                ctx.set(signal, value)
            seen.append(ctx.get(output))
            await ctx.tick()

    simulator = Simulator(m)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return seen


def _rows(count: int, words: int, bits: int) -> list[list[int]]:
    return np.random.default_rng(words).integers(0, 1 << bits, (count, words)).tolist()


def test_a_registered_choice_is_the_named_value_a_cycle_later() -> None:
    """0 where no condition holds; a narrow signed value is extended."""
    m, number = Module(), Signal(3)
    values = [Signal(signed(6), name=f"value_{n}") for n in range(5)]
    output = Signal(signed(9))
    m.d.comb += output.eq(registered_choice(m, "chosen", signed(9), [(number == n, v) for n, v in enumerate(values)]))
    rows = [[row[0] & 7, *(value - 32 for value in row[1:])] for row in _rows(200, 6, 6)]
    wanted = [row[1 + row[0]] if row[0] < 5 else 0 for row in rows]
    assert {0, 4, 5} <= {row[0] for row in rows}
    assert _outputs(m, [number, *values], output, rows)[1:] == wanted[:-1]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_joined_is_the_or_of_all(count: int) -> None:
    m, output = Module(), Signal(8)
    values = [Signal(8, name=f"value_{n}") for n in range(count)]
    m.d.comb += output.eq(joined(values))
    rows = [[value & (1 << n % 8 | 16) for n, value in enumerate(row)] for row in _rows(60, count, 8)]
    m.d.sync += Signal(name="clocked").eq(1)
    assert _outputs(m, values, output, rows) == [reduce(or_, row) for row in rows]


def test_a_sum_has_a_register_a_level() -> None:
    m, output = Module(), Signal(signed(8))
    values = [Signal(signed(6), name=f"value_{n}") for n in range(4)]
    m.d.comb += output.eq(sum_tree(m, "total", values))
    rows = [[value - 32 for value in row] for row in _rows(60, 4, 6)]
    assert _outputs(m, values, output, rows)[2:] == [sum(row) for row in rows[:-2]]


def test_choices_and_counts() -> None:
    m, index = Module(), Signal(2)
    values = [Signal(unsigned(5), name=f"value_{n}") for n in range(4)]
    output = Signal(8)
    m.d.comb += output.eq(choose(list(values), index) + (count_ones(values[0]) << 5))
    m.d.sync += Signal(name="clocked").eq(1)
    rows = [[row[0] & 3, *row[1:]] for row in _rows(80, 5, 5)]
    assert _outputs(m, [index, *values], output, rows) == [
        row[1 + row[0]] + (row[1].bit_count() << 5) for row in rows
    ]
