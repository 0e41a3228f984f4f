"""Many values to one: a choice, with registers or without, a registered sum, a count of ones; and the bits of an index."""

from __future__ import annotations

from collections.abc import Iterable

from amaranth.hdl import Const, Module, Mux, ShapeLike, Signal, Value

from dtp.errors import must

__all__ = ["choose", "count_ones", "index_bits", "registered_choice", "sum_tree"]


def choose(values: list[Value], index: Value) -> Value:
    """A value by a number; as many values as a power of two."""
    bit = 0
    while len(values) > 1:
        values = [Mux(index[bit], values[n + 1], values[n]) for n in range(0, len(values), 2)]
        bit += 1
    return values[0]


def registered_choice(m: Module, name: str, shape: ShapeLike, choices: Iterable[tuple[Value, Value]]) -> Value:
    """The value whose condition holds, a cycle later; 0 when none does. At most one may.

    A register for every value is cleared unless its condition holds, which is the reset input of a flip-flop and no
    logic; what is left is an OR: for four values a LUT4 a bit, where a multiplexer takes three.

    Parameters
    ----------
    m: module that gets the registers
    name: of the registers
    shape: of the result; values are extended to it
    choices: condition and value, side by side
    """
    joined: Value | None = None
    for n, (condition, value) in enumerate(choices):
        register = Signal(shape, name=f"{name}_{n}", reset_less=True)
        m.d.sync += register.eq(Mux(condition, value, 0))
        joined = register if joined is None else joined | register
    if joined is None:
        raise must("registered_choice", "choices", "at least one", 0)
    return joined


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
