"""LayerNorm in integers, without a division by the width: parameters, table and golden model (docs/commutator.md §4).

With Σ = Σx and V = D·Σx² − Σ², (x − mean)/deviation is (D·x − Σ)/√V exactly. The root is read from a table of the ten
leading bits of V at an even exponent; :data:`RSQRT_ERROR` bounds its relative error. Gain and offset are part of the
matrix that follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from dtp.array import MULTIPLIER_CYCLES
from dtp.config import MANTISSA_BITS, REGISTER_BITS, TABLE_BITS, Config
from dtp.errors import must
from dtp.fixed import Int, overflows, round_shift, saturate
from dtp.matrix import STATE_BITS, MatrixParams, clamp

INDEX_FRACTION_BITS: Final = TABLE_BITS - 2
"""A mantissa in [1, 4) with these fraction bits is a table index."""
ALIGN_BITS: Final = 11
"""Fraction bits of t / 2^e: ±64 in 18 bits, so that a normalised activation up to 32 is not saturated here."""
NORMAL_FRACTION_BITS: Final = 10
"""Fraction of a normalised activation, a state: ±32 in 16 bits."""
RSQRT: Final[tuple[int, ...]] = tuple(
    round(2.0**MANTISSA_BITS / ((max(i, 1 << INDEX_FRACTION_BITS) + 0.5) / (1 << INDEX_FRACTION_BITS)) ** 0.5)
    for i in range(1 << TABLE_BITS)
)
"""``round(2^17 / √((m + ½)/256))``; indices below 256 do not occur."""
RSQRT_ERROR: Final = 2.0**-10 + 2.0**-16
"""``|RSQRT[m]·√V / 2^(17 + e) − 1|`` never exceeds it: half an interval of the table, halved, and its rounding."""


@dataclass(frozen=True)
class LayerNormParams:
    """Sizes and schedule of the LayerNorm of a configuration; a word is that of the matrix mode."""

    config: Config

    # Sizes

    @property
    def lanes(self) -> int:
        """Elements worked on at once, one multiplier each, which serves each of them twice."""
        return self.config.normaliser_lanes

    @property
    def beats(self) -> int:
        """Beats of ``lanes`` elements of a word."""
        return MatrixParams(self.config).elements // self.lanes

    @property
    def word_cycles(self) -> int:
        """Cycles between two words."""
        return 2 * self.beats

    @property
    def beat_rows(self) -> int:
        """Rows of a beat; ``lanes / beat_rows`` elements of each."""
        return min(self.lanes, self.config.rows)

    @property
    def queue_words(self) -> int:
        """Normalised words that can wait, those in the pipeline included."""
        return 8

    @property
    def _model_bits(self) -> int:
        return (self.config.max_model - 1).bit_length()

    @property
    def total_bits(self) -> int:
        """Signed width of Σ."""
        return self._model_bits + STATE_BITS

    @property
    def centred_bits(self) -> int:
        """Signed width of t."""
        return self._model_bits + STATE_BITS + 1

    @property
    def norm_bits(self) -> int:
        """Unsigned width of Σx²."""
        return self._model_bits + 2 * STATE_BITS - 1

    @property
    def variance_bits(self) -> int:
        """Unsigned width of V, an even number."""
        return 2 * (self._model_bits + STATE_BITS - 1)

    @property
    def exponent_bits(self) -> int:
        """Width of e."""
        return (self.variance_bits // 2 - 1).bit_length()

    # Schedule, in cycles from the first one of a beat

    @property
    def row_cycle(self) -> int:
        """Products D·x; the row's Σ, e and factor are read."""
        return 1 + MULTIPLIER_CYCLES

    @property
    def factor_cycle(self) -> int:
        """Aligned t, with its factor in front of the multiplier: centred, coarse, fine, saturated. An odd number."""
        return self.row_cycle + 4

    @property
    def element_cycles(self) -> int:
        """Outputs: multiplier, rounding, clamp."""
        return self.factor_cycle + 1 + MULTIPLIER_CYCLES + 2

    @property
    def square_cycles(self) -> int:
        """Sums of the first pass: operand, multiplier, its register, tree."""
        return 2 + MULTIPLIER_CYCLES + (self.lanes // self.beat_rows - 1).bit_length()

    @property
    def root_cycles(self) -> int:
        """Most cycles of a row's root: read, sign, V bit by bit, leading bits, table, its register, write."""
        return 2 + self.total_bits + self.variance_bits // 2 + 3


def layernorm(state: ArrayLike) -> tuple[Int, int]:
    """Normalised rows as states in units of 2^−10, and how many elements were saturated.

    Parameters
    ----------
    state: (L, D), 16 bits

    Raises
    ------
    DtpError
        for a shape or numbers that do not fit
    """
    x = np.asarray(state, dtype=np.int64)
    if x.ndim != 2:
        raise must("layernorm", "state", "of shape (L, D)", x.shape)
    if overflows(x, STATE_BITS).any():
        raise must("layernorm", "state", f"signed numbers of {STATE_BITS} bits", int(np.abs(x).max()))
    width, total = x.shape[1], x.sum(axis=1)
    factor, exponent = inverse_root(variances(x))
    t = width * x - total[:, None]
    exact = round_shift(t << ALIGN_BITS, exponent[:, None])
    aligned = saturate(exact, REGISTER_BITS)
    shift = ALIGN_BITS + MANTISSA_BITS - NORMAL_FRACTION_BITS
    n, over = clamp(round_shift(aligned * factor[:, None], shift), STATE_BITS)
    # A constant row has t = 0, so that its factor does not matter.
    count = int(np.count_nonzero(overflows(exact, REGISTER_BITS) | (over > 0)))
    return np.asarray(n, dtype=np.int64), count


def variances(state: ArrayLike) -> Int:
    """V = D·Σx² − Σ² of each row of a state (L, D)."""
    x = np.asarray(state, dtype=np.int64)
    total = x.sum(axis=1)
    return np.asarray(x.shape[1] * (x * x).sum(axis=1) - total * total, dtype=np.int64)


def inverse_root(variance: ArrayLike) -> tuple[Int, Int]:
    """Table value and exponent e of each V >= 0: ``1/√V ≈ value / 2^(17 + e)``; any value for V = 0."""
    v = np.asarray(variance, dtype=np.int64)
    exponent = np.array([max(int(n).bit_length() - 1, 0) // 2 for n in v.ravel()], dtype=np.int64).reshape(v.shape)
    # V·2^8 / 4^e without a shift to the left of numbers that have no room for it.
    down = 2 * exponent - INDEX_FRACTION_BITS
    index = np.where(down > 0, v >> np.maximum(down, 0), v << np.maximum(-down, 0))
    return np.asarray(RSQRT, dtype=np.int64)[index], exponent
