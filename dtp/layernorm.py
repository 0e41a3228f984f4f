"""LayerNorm in integers, without a division by the width: parameters, table and golden model (docs/commutator.md §4).

With Σ = Σx and V = D·Σx² − Σ², (x − mean)/deviation is (D·x − Σ)/√V exactly. The root is read from a table of the ten
leading bits of V at an even exponent; :data:`RSQRT_ERROR` bounds its relative error. Gain and offset are part of the
matrix that follows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from dtp.config import MANTISSA_BITS, REGISTER_BITS, TABLE_BITS, Config
from dtp.errors import must
from dtp.fixed import Int, overflows, round_shift, saturate
from dtp.matrix import STATE_BITS, clamp

INDEX_FRACTION_BITS: Final = TABLE_BITS - 2
"""A mantissa in [1, 4) with these fraction bits is a table index."""
ALIGN_BITS: Final = 13
"""Fraction bits of t / 2^e: ±16 in 18 bits."""
RSQRT: Final[tuple[int, ...]] = tuple(
    round(2.0**MANTISSA_BITS / ((max(i, 1 << INDEX_FRACTION_BITS) + 0.5) / (1 << INDEX_FRACTION_BITS)) ** 0.5)
    for i in range(1 << TABLE_BITS)
)
"""``round(2^17 / √((m + ½)/256))``; indices below 256 do not occur."""
RSQRT_ERROR: Final = 2.0**-10 + 2.0**-16
"""``|RSQRT[m]·√V / 2^(17 + e) − 1|`` never exceeds it: half an interval of the table, halved, and its rounding."""


def fraction_bits(config: Config) -> int:
    """f: fraction of a normalised activation."""
    return config.operand_bits - 4


def layernorm(config: Config, state: ArrayLike) -> tuple[Int, int]:
    """Normalised rows as states (n · 2^(16 − operand_bits)), and how many elements were saturated.

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
    width = x.shape[1]
    total = x.sum(axis=1)
    variance = width * (x * x).sum(axis=1) - total * total
    factor, exponent = inverse_root(variance)
    t = width * x - total[:, None]
    exact = round_shift(t << ALIGN_BITS, exponent[:, None])
    aligned = saturate(exact, REGISTER_BITS)
    shift = ALIGN_BITS + MANTISSA_BITS - fraction_bits(config)
    n, over = clamp(round_shift(aligned * factor[:, None], shift), config.operand_bits)
    live = variance[:, None] > 0
    count = int(np.count_nonzero((overflows(exact, REGISTER_BITS) | (over > 0)) & live))
    return np.where(live, n << (STATE_BITS - config.operand_bits), 0), count


def inverse_root(variance: ArrayLike) -> tuple[Int, Int]:
    """Table value and exponent e of each V >= 0: ``1/√V ≈ value / 2^(17 + e)``; any value for V = 0."""
    v = np.asarray(variance, dtype=np.int64)
    exponent = np.array([max(int(n).bit_length() - 1, 0) // 2 for n in v.ravel()], dtype=np.int64).reshape(v.shape)
    # V·2^8 / 4^e without a shift to the left of numbers that have no room for it.
    down = 2 * exponent - INDEX_FRACTION_BITS
    index = np.where(down > 0, v >> np.maximum(down, 0), v << np.maximum(-down, 0))
    return np.asarray(RSQRT, dtype=np.int64)[index], exponent
