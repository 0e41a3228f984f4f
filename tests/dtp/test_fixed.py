"""Rounding and saturation against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest

from dtp.fixed import bits_for_magnitude, overflows, round_shift, saturate


@pytest.mark.parametrize("shift", range(20))
def test_round_shift_rounds_half_up_exhaustively(shift: int) -> None:
    values = np.arange(-(1 << 11), 1 << 11)
    expected = [floor(Fraction(int(v), 1 << shift) + Fraction(1, 2)) if shift else int(v) for v in values]
    assert round_shift(values, shift).tolist() == expected


def test_round_shift_broadcasts_amounts_and_ends_at_zero() -> None:
    assert round_shift([[5], [-5]], [0, 1, 2, 62, 90]).tolist() == [[5, 3, 1, 0, 0], [-5, -2, -1, 0, 0]]


def test_saturate_and_overflows_agree_exhaustively() -> None:
    values = np.arange(-1024, 1024)
    for bits in range(2, 12):
        clamped = saturate(values, bits)
        assert clamped.min() >= -(1 << (bits - 1))
        assert clamped.max() <= (1 << (bits - 1)) - 1
        assert ((clamped != values) == overflows(values, bits)).all()


@pytest.mark.parametrize("magnitude", [1, 2, 3, 4, 127, 128, 129, 1 << 40])
def test_bits_for_magnitude_is_tight(magnitude: int) -> None:
    bits = bits_for_magnitude(magnitude)
    assert -(1 << (bits - 1)) <= -magnitude
    assert magnitude <= (1 << (bits - 1)) - 1
    assert magnitude > (1 << (bits - 2)) - 1
