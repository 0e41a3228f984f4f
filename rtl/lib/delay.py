"""Registers one behind the other."""

from __future__ import annotations

from amaranth.hdl import Module, Shape, Signal, Value

__all__ = ["delayed"]


def delayed(m: Module, name: str, source: Value, cycles: int, *, reset_less: bool = True) -> list[Value]:
    """``source`` and its delays by 1 … ``cycles`` cycles."""
    taps: list[Value] = [source]
    for cycle in range(1, cycles + 1):
        tap = Signal(Shape.cast(source.shape()), name=f"{name}_{cycle}", reset_less=reset_less)
        m.d.sync += tap.eq(taps[-1])
        taps.append(tap)
    return taps
