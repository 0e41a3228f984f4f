"""Many values to one: a choice, a registered sum, a count of ones; and the bits of an index."""

from __future__ import annotations

from amaranth.hdl import Const, Module, Mux, Signal, Value

__all__ = ["choose", "count_ones", "index_bits", "sum_tree"]


def choose(values: list[Value], index: Value) -> Value:
    """A value by a number; as many values as a power of two."""
    bit = 0
    while len(values) > 1:
        values = [Mux(index[bit], values[n + 1], values[n]) for n in range(0, len(values), 2)]
        bit += 1
    return values[0]


def sum_tree(m: Module, name: str, values: list[Value]) -> Value:
    """Sum of a power of two of values, one register a level."""
    level = 0
    while len(values) > 1:
        sums: list[Value] = []
        for n in range(0, len(values), 2):
            total = values[n] + values[n + 1]
            register = Signal(total.shape(), name=f"{name}_{level}_{n // 2}", reset_less=True)
            m.d.sync += register.eq(total)
            sums.append(register)
        values, level = sums, level + 1
    return values[0]


def count_ones(value: Value) -> Value:
    """How many bits are 1, as a tree; 0 of no bits."""
    counts: list[Value] = [value[n] for n in range(len(value))] or [Const(0, 1)]
    while len(counts) > 1:
        counts = [counts[n] + counts[n + 1] if n + 1 < len(counts) else counts[n] for n in range(0, len(counts), 2)]
    return counts[0]


def index_bits(count: int) -> int:
    """Bits of a number below ``count``, a power of two; 0 for 1."""
    return (count - 1).bit_length()
