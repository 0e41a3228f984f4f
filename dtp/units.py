"""The parts of the processor that can be generated alone."""

from __future__ import annotations

from enum import Enum

__all__ = ["Unit"]


class Unit(Enum):
    """What ``dtp generate`` can write; ``rtl.units`` makes them."""

    ATTENTION = "attention"
    TRANSPORT = "transport"
    HOLONOMY = "holonomy"
    LOOPS = "loops"
    COMMUTATOR = "commutator"
    PRUNER = "pruner"
    GATED = "gated"
