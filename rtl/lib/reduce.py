"""Many values to one: a choice, a registered one, a registered sum, a count of ones; and the bits of an index."""

from __future__ import annotations

from collections.abc import Iterable

from amaranth.hdl import Const, Module, Mux, ShapeLike, Signal, Value

__all__ = ["choose", "cleared_registers", "count_ones", "index_bits", "joined", "registered_choice", "sum_tree"]


def choose(values: list[Value], index: Value) -> Value:
    """A value by a number; as many values as a power of two."""
    bit = 0
    while len(values) > 1:
        values = [Mux(index[bit], values[n + 1], values[n]) for n in range(0, len(values), 2)]
        bit += 1
    return values[0]


def cleared_registers(
    m: Module, name: str, shape: ShapeLike, choices: Iterable[tuple[Value, Value]]
) -> list[Value]:
    """A register for every value, cleared unless its condition holds.

    That is the reset input of a flip-flop and no logic. Where at most one condition holds at a time, what is left of
    a multiplexer is their OR: for four values a LUT4 a bit instead of three.

    Parameters
    ----------
    m: module that gets the registers
    name: of the registers
    shape: of each; values are extended to it
    choices: condition and value, side by side
    """
    registers: list[Value] = []
    for n, (condition, value) in enumerate(choices):
        register = Signal(shape, name=f"{name}_{n}", reset_less=True)
        m.d.sync += register.eq(Mux(condition, value, 0))
        registers.append(register)
    return registers


def joined(values: Iterable[Value]) -> Value:
    """OR of values, as a tree."""
    left = list(values)
    while len(left) > 1:
        left = [left[n] | left[n + 1] if n + 1 < len(left) else left[n] for n in range(0, len(left), 2)]
    return left[0]


def registered_choice(m: Module, name: str, shape: ShapeLike, choices: Iterable[tuple[Value, Value]]) -> Value:
    """The value whose condition holds, a cycle later; 0 when none does. At most one may: :func:`cleared_registers`."""
    return joined(cleared_registers(m, name, shape, choices))


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
