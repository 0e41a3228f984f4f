"""LayerNorm contract: table, arithmetic word for word, error against float."""

from __future__ import annotations

from math import isqrt

import numpy as np
import pytest

from dtp.errors import DtpError
from dtp.layernorm import RSQRT, RSQRT_ERROR, inverse_root, layernorm


def scalar(row: list[int]) -> list[int]:
    """docs/commutator.md §4, word for word, with Python's integers."""
    width, total = len(row), sum(row)
    variance = width * sum(x * x for x in row) - total * total
    if variance == 0:
        return [0] * width
    e = (variance.bit_length() - 1) // 2
    m = (variance << 8) // 4**e
    assert 256 <= m < 1024
    out = []
    for x in row:
        t = (width * x - total) << 11
        a = (t + (1 << e >> 1)) >> e
        a = max(-(1 << 17), min((1 << 17) - 1, a))
        shift = 28 - 10
        n = (a * round(2**17 / ((m + 0.5) / 256) ** 0.5) + (1 << shift >> 1)) >> shift
        out.append(max(-32767, min(32767, n)))
    return out


def rows(random: np.random.Generator, width: int) -> np.ndarray:
    scale = np.array([[1], [30], [900], [9000], [32767]])
    x = np.clip(random.normal(size=(5, width)) * scale, -32768, 32767).astype(np.int64)
    flat = np.full((1, width), 77)
    spike = np.zeros((1, width), dtype=np.int64)
    spike[0, width // 2] = 32767
    return np.concatenate([x, flat, spike, x + np.clip(30000 - np.abs(x), 0, None)])


@pytest.mark.parametrize("width", [2, 7, 32, 384, 4096])
def test_against_the_words_of_the_contract(width: int) -> None:
    x = rows(np.random.default_rng(width), width)
    x = np.clip(x, -32768, 32767)
    n, _ = layernorm(x)
    assert n.tolist() == [scalar(row) for row in x.tolist()]
    assert not n[5].any()


def test_root_of_small_and_large_numbers() -> None:
    random = np.random.default_rng(1)
    v = np.concatenate([np.arange(1, 5000), 2 ** random.uniform(12, 56, 5000)]).astype(np.int64)
    value, exponent = inverse_root(v)
    assert all(4 ** int(e) <= n < 4 ** (int(e) + 1) for e, n in zip(exponent, v, strict=True))
    large = v >= 1 << 16
    error = np.abs(value / 2.0 ** (17 + exponent) * np.sqrt(v.astype(np.float64)) - 1)
    assert RSQRT_ERROR / 2 < error[large].max() <= RSQRT_ERROR
    assert max(RSQRT) < 1 << 17 and isqrt(int(v[-1])) > 0


@pytest.mark.parametrize("width", [64, 384])
def test_error_against_float(width: int) -> None:
    """The last place, and the table of the root."""
    x = np.clip(np.random.default_rng(3).normal(size=(40, width)) * 4000 + 800, -32768, 32767).astype(np.int64)
    exact = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    n, count = layernorm(x)
    assert count == 0
    assert np.abs(n / 1024 - exact).max() < 5e-3


def test_saturations_are_counted() -> None:
    """Only an element more than 32 deviations away can be: it takes more than 1024 of them."""
    for width, over in ((1024, 0), (4096, 1)):
        spike = np.zeros((1, width), dtype=np.int64)
        spike[0, 9] = 30000
        n, count = layernorm(spike)
        assert count == over and bool(n[0, 9] == 32767) is bool(over)
    assert layernorm(np.full((3, 8), -5))[1] == 0


def test_refusals() -> None:
    with pytest.raises(DtpError, match=r"^layernorm\.state must be of shape \(L, D\), not \(8,\)$"):
        layernorm(np.zeros(8))
    with pytest.raises(DtpError, match=r"^layernorm\.state must be signed numbers of 16 bits, not 40000$"):
        layernorm(np.full((1, 8), 40000))
