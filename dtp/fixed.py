"""Fixed-point rules of the processor, one function a rule.

A format ``s8f4`` is signed, 8 bits in all, 4 of them fraction. Raw integers are held in int64 arrays; every rule
works element by element and never leaves 63 bits for the widths that :mod:`dtp.config` admits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int = NDArray[np.int64]


def round_shift(x: ArrayLike, shift: ArrayLike) -> Int:
    """Arithmetic right shift that rounds half up: ``(x + 2^(shift-1)) >> shift``; a shift of 0 is exact.

    Shapes broadcast. A shift of 62 or more is taken as 62, where every value of at most 60 bits becomes 0.
    """
    value = np.asarray(x, dtype=np.int64)
    amount = np.minimum(np.asarray(shift, dtype=np.int64), 62)
    half = np.where(amount > 0, np.left_shift(np.int64(1), np.maximum(amount - 1, 0)), 0)
    return np.asarray(np.right_shift(value + half, amount), dtype=np.int64)


def signed_range(bits: int) -> tuple[int, int]:
    """Smallest and largest value of a two's complement number of ``bits`` bits."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def saturate(x: ArrayLike, bits: int) -> Int:
    """Clamp to the two's complement range of ``bits`` bits."""
    low, high = signed_range(bits)
    return np.asarray(np.clip(np.asarray(x, dtype=np.int64), low, high), dtype=np.int64)


def overflows(x: ArrayLike, bits: int) -> NDArray[np.bool_]:
    """Where :func:`saturate` would change the value."""
    low, high = signed_range(bits)
    value = np.asarray(x, dtype=np.int64)
    return np.asarray((value < low) | (value > high))


def bits_for_magnitude(magnitude: int) -> int:
    """Bits of the two's complement number that holds ``-magnitude`` … ``magnitude``."""
    return int(magnitude).bit_length() + 1
