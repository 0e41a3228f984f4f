"""Normaliser contract: table, arithmetic against exact fractions, refusals, schedule."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtp.config import MANTISSA_BITS, PRESETS, REGISTER_BITS, Config
from dtp.errors import DtpError
from dtp.fixed import overflows
from dtp.normaliser import (
    RECIPROCAL,
    RECIPROCAL_ERROR,
    NormaliserParams,
    normalise,
    output_bytes,
    reciprocal,
)

TINY = Config.load("tiny")
FORMATS = {
    f"{operand} to {output} bits, p of {p}": TINY.changed(
        operand_bits=operand, output_bits=output, output_bytes=4 * output // 8, probability_bits=p
    )
    for operand, output in ((8, 8), (8, 16), (16, 16))
    for p in (8, 9, 10, 11, 12, 13, 16)
}


def scalar(acc: int, l: int, config: Config) -> int:  # noqa: E741
    """docs/tile.md, 4.4, word for word, with Python's integers."""

    def round_shift(x: int, shift: int) -> int:
        return (x + (1 << shift >> 1)) >> shift

    if l == 0:
        return 0
    e = l.bit_length() - 1
    i = ((l << 10) >> e) & 1023
    rec = round(2**17 / (1 + (i + 0.5) / 1024))
    g = 17 - config.operand_bits
    lifted = max(0, g - (config.probability_bits - 1))
    a = round_shift(acc << lifted, e - g + lifted)
    out = round_shift(a * rec, 34 - config.output_bits)
    limit = 1 << (config.output_bits - 1)
    return max(-limit, min(limit - 1, out))


def test_reciprocal_error_of_every_l_of_18_bits() -> None:
    l = np.arange(1, 1 << 18)  # noqa: E741
    value, exponent = reciprocal(l)
    assert np.array_equal(exponent, [int(n).bit_length() - 1 for n in l])
    error = np.abs(value * l / 2.0 ** (MANTISSA_BITS + exponent) - 1)
    assert RECIPROCAL_ERROR / 2 < error.max() <= RECIPROCAL_ERROR


def test_table() -> None:
    assert len(RECIPROCAL) == 1024
    assert max(RECIPROCAL) < 1 << MANTISSA_BITS and min(RECIPROCAL) >= 1 << (MANTISSA_BITS - 1)
    assert list(RECIPROCAL) == sorted(RECIPROCAL, reverse=True)
    for i in (0, 511, 1023):
        exact = Fraction(1 << MANTISSA_BITS) / (1 + Fraction(2 * i + 1, 2048))
        assert abs(RECIPROCAL[i] - exact) <= Fraction(1, 2)


@pytest.mark.parametrize("name", FORMATS)
def test_every_l_against_the_words_of_the_contract(name: str) -> None:
    """All legal l of the narrow formats, a dense sample of the wide ones; sums at both ends and between."""
    config = FORMATS[name]
    low, high = 1 << (config.probability_bits - 1), ((1 << config.probability_bits) - 1) * config.max_tokens
    l = np.unique(np.linspace(low, high, min(high - low + 1, 6000)).astype(np.int64))  # noqa: E741
    l = np.concatenate([[0], l])  # noqa: E741
    operand = 1 << (config.operand_bits - 1)
    random = np.random.default_rng(1)
    acc = np.stack([-operand * l, (operand - 1) * l, random.integers(-operand * l, operand * l + 1)], axis=1)
    out, count = normalise(acc, l, config)
    wanted = [[scalar(int(a), int(n), config) for a in row] for row, n in zip(acc, l, strict=True)]
    assert out.tolist() == wanted
    assert not overflows(out, config.output_bits).any()
    # Largest operands: the mean is exact but for the reciprocal, the alignment and the last rounding.
    unit = 2.0**config.output_fraction_bits
    limit = operand * unit * (RECIPROCAL_ERROR + 2.0**-REGISTER_BITS * 2) + 0.5
    mean = np.clip(acc[1:] / l[1:, None] * unit, -operand * unit, operand * unit - 1)
    assert np.abs(out[1:] - mean).max() <= limit
    assert 0 <= count < acc.size


@given(data=st.data(), name=st.sampled_from(sorted(FORMATS)))
def test_rescaled_sums_stay_legal(data: st.DataObject, name: str) -> None:
    """Online softmax with any rescales, every rounding against us: a sum still fits the multiplier."""
    config = FORMATS[name]
    top, operand = (1 << config.probability_bits) - 1, 1 << (config.operand_bits - 1)
    value = data.draw(st.sampled_from([-operand, operand - 1]))
    acc = l = 0  # noqa: E741
    for n in range(config.max_blocks):
        rescale = data.draw(st.integers(0, 6)) if n else 0
        keys = [data.draw(st.integers((top + 1) // 2, top))] + data.draw(
            st.lists(st.integers(0, top), max_size=config.block - 1)
        )
        half = 1 << rescale >> 1
        acc = ((acc + half) >> rescale) + value * sum(keys)
        l = ((l + half) >> rescale) + sum(keys)  # noqa: E741
    out, _ = normalise([[acc]], [l], config)
    assert out[0, 0] == scalar(acc, l, config)


def test_saturations_are_counted() -> None:
    l = np.array([(1 << 16) - 1, 1 << 16, 0])  # noqa: E741
    out, count = normalise(np.repeat(-128 * l[:, None], 5, axis=1), l, TINY)
    assert count == 5
    assert out[0].tolist() == [-32768] * 5
    assert -32768 < out[1, 0] < -32700 and not out[2].any()


@pytest.mark.parametrize(
    ("acc", "l", "message"),
    [
        ([[0]], [[2048]], r"normalise\.l must be of shape \(L,\), not \(1, 1\)"),
        ([[0], [0]], [2048], r"normalise\.acc must be of shape \(1, d\), not \(2, 1\)"),
        ([[0], [0]], [0, 2047], r"normalise\.l must be 0 or of 2048…262143, not 2047"),
        ([[0]], [-1], r"normalise\.l must be 0 or of 2048…262143, not -1"),
        ([[0]], [1 << 18], r"normalise\.l must be 0 or of 2048…262143, not 262144"),
        ([[0, 1 << 20]], [4096], r"normalise\.acc must be at most \(l \+ 1\)·2\^7, l = 4096, not 1048576"),
    ],
)
def test_refusals(acc: list[list[int]], l: list[int], message: str) -> None:  # noqa: E741
    with pytest.raises(DtpError, match=f"^{message}$"):
        normalise(acc, l, TINY)


def test_output_order() -> None:
    """Step, segment, row; columns are step · segments + segment."""
    config = TINY.changed(lanes=16, output_bytes=16)
    rows = np.arange(config.rows * 16).reshape(config.rows, 16)
    words = np.frombuffer(output_bytes(rows, config), dtype="<i2")
    wanted = [
        rows[r, t * config.segments + s]
        for t in range(16 // config.segments)
        for s in range(config.segments)
        for r in range(config.rows)
    ]
    assert config.segments == 2 and words.tolist() == wanted
    message = r"output_bytes\.rows must be of shape \(4, a multiple of segments 2\), not \(4, 3\)"
    with pytest.raises(DtpError, match=f"^{message}$"):
        output_bytes(np.zeros((4, 3)), config)


@pytest.mark.parametrize("name", PRESETS)
def test_sizes_fit_each_other(name: str) -> None:
    config = Config.load(name)
    p = NormaliserParams(config)
    assert p.lanes * p.step_words == config.rows * config.segments
    assert p.beat_words * p.word_bits == 8 * config.output_bytes
    assert p.step_words == p.beat_words * config.output_entry_beats
    assert p.max_steps == config.max_chunks * config.pass_steps
    assert p.reciprocal_groups >= config.output_slots + config.lookahead + 1
    assert p.word_depth > p.issue_cycles
    assert p.conversion_cycles <= config.block
    assert p.row_banks * p.reciprocal_rows % p.reciprocal_rows == 0
    assert set(p.latencies.values()) <= set(range(1, 64))
    assert p.latency <= 9
