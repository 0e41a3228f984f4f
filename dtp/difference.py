"""Difference norm: squared norms of differences and of references, and their ratio (docs/commutator.md §5).

Shared by everything that measures how far two results of the same thing are apart: commutator energies [GR §10.1] and
loop energies [GR §9.1].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dtp.array import MULTIPLIER_CYCLES
from dtp.config import Config
from dtp.errors import must
from dtp.fixed import Int, overflows
from dtp.matrix import STATE_BITS, MatrixParams

RATIO_FRACTION_BITS = 14
"""A ratio is u2f14, as the scores of the pruner."""
RATIO_BITS = 16
DIFFERENCE_BITS = STATE_BITS + 2
"""An element of a difference of a state and two others."""


@dataclass(frozen=True)
class DifferenceParams:
    """Sizes and schedule of the difference norm of a configuration; a word is that of the matrix mode."""

    config: Config

    @property
    def lanes(self) -> int:
        """Elements squared in a cycle, one multiplier each: first those of the difference, then of the reference."""
        return self.config.normaliser_lanes

    @property
    def beats(self) -> int:
        """Beats of ``lanes`` elements of a word."""
        return MatrixParams(self.config).elements // self.lanes

    @property
    def word_cycles(self) -> int:
        """Cycles between two words: difference and reference of each beat."""
        return 2 * self.beats

    @property
    def beat_rows(self) -> int:
        """Rows of a beat; ``lanes / beat_rows`` elements of each."""
        return min(self.lanes, self.config.rows)

    @property
    def energy_bits(self) -> int:
        """Unsigned width of a sum of squares over ``max_model`` elements."""
        return ((9 << (2 * STATE_BITS - 2)) * self.config.max_model).bit_length()

    @property
    def quotient_bits(self) -> int:
        """Bits of a quotient before its rounding; one a cycle."""
        return RATIO_BITS + 1

    @property
    def square_cycles(self) -> int:
        """From the issue of a beat to the cycle in which its squares are added."""
        tree = (self.lanes // self.beat_rows - 1).bit_length()
        return 2 + MULTIPLIER_CYCLES + tree

    @property
    def first_record_cycles(self) -> int:
        """From a group's last word, taken, to the first row's record: squares, read, division, its rounding."""
        return self.word_cycles + self.square_cycles + self.record_cycles

    @property
    def record_cycles(self) -> int:
        """Cycles between records: two reads, division, rounding, output."""
        return self.quotient_bits + 4


@dataclass(frozen=True, eq=False)
class Energies:
    """Energies of tokens, (L,), or of heads and tokens, (H, L), in squared units of the attention scale.

    Members
    -------
    difference, reference: ‖Δ_i‖² and ‖Attn(h + Res(h))_i‖²
    ratio: u2f14
    """

    difference: Int
    reference: Int
    ratio: Int


def energies(attended: ArrayLike, plain: ArrayLike, residual: ArrayLike) -> Energies:
    """Energies of Δ = attended − plain − residual over the last axis (docs/commutator.md §5)."""
    a, p, r = (np.asarray(x, dtype=np.int64) for x in (attended, plain, residual))
    for name, value in (("attended", a), ("plain", p), ("residual", r)):
        if overflows(value, STATE_BITS).any():
            raise must("energies", name, f"signed numbers of {STATE_BITS} bits", int(np.abs(value).max()))
    delta = a - p - r
    difference, reference = (delta * delta).sum(axis=-1), (a * a).sum(axis=-1)
    return Energies(difference, reference, ratio(difference, reference))


def ratio(difference: ArrayLike, reference: ArrayLike) -> Int:
    """round(difference / reference) as u2f14, saturated; 0 / 0 is 0."""
    top, bottom = np.asarray(difference, dtype=np.int64), np.asarray(reference, dtype=np.int64)
    limit = (1 << RATIO_BITS) - 1
    out = [
        (0 if n == 0 else limit) if d == 0 else min(limit, ((int(n) << (RATIO_FRACTION_BITS + 1)) // int(d) + 1) >> 1)
        for n, d in zip(top.ravel(), bottom.ravel(), strict=True)
    ]
    return np.array(out, dtype=np.int64).reshape(top.shape)
