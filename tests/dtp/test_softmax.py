"""Golden model of the softmax: parameters, table, one item by hand, blocks, and its distance from the exact softmax."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from dtp.config import PRESETS, SCORE_BITS, SCORE_FRACTION_BITS, Config
from dtp.errors import DtpError
from dtp.fixed import signed_range
from dtp.softmax import (
    MAXIMUM_BITS,
    SoftmaxParams,
    SoftmaxState,
    advance,
    clip_scores,
    exponential_table,
    probabilities_real,
    softmax_item,
    softmax_rows,
    worst_case,
)

ONE = 1 << SCORE_FRACTION_BITS
WIDTHS = (8, 10, 12, 14, 16)


def test_table_is_the_rounded_power_of_two() -> None:
    table = exponential_table()
    assert table.shape == (1024,)
    for f in (0, 1, 512, 1023):
        # round(x) = e means (2e − 1)/2 < x <= (2e + 1)/2; x^1024 = 2^(17·1024 − f) is an integer.
        exact = 1 << (17 * 1024 - f)
        entry = int(table[f])
        assert Fraction(2 * entry - 1, 2) ** 1024 < exact <= Fraction(2 * entry + 1, 2) ** 1024
    assert (np.diff(table) < 0).all()
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 0


def plain_item(maximum: int | None, scores: list[int], kept: list[bool], w: int, l: int) -> tuple[object, ...]:  # noqa: E741
    """The rules for one row, one number at a time."""

    def round_shift(x: int, shift: int) -> int:
        return (x + (1 << shift >> 1)) >> shift

    inside = [s for s, keep in zip(scores, kept, strict=True) if keep]
    rescale = 0
    if inside:
        top = -(-max(inside) // ONE)
        new = top if maximum is None else max(maximum, top)
        rescale = 0 if maximum is None else min(new - maximum, 31)
        maximum = new
    p = []
    for s, keep in zip(scores, kept, strict=True):
        if not keep or maximum is None:
            p.append(0)
            continue
        exponent = round_shift(maximum * ONE - s, 2)
        entry = int(exponential_table()[exponent % 1024])
        p.append(min(2**w - 1, round_shift(entry, 17 - w + min(exponent // 1024, 31))))
    return p, rescale, maximum, round_shift(l, rescale) + sum(p)


@pytest.mark.parametrize("w", WIDTHS)
def test_blocks_match_the_plain_rules_seed_11(w: int) -> None:
    rng = np.random.default_rng([11, w])
    rows, block = 6, 8
    state = SoftmaxState(rows, w)
    plain: list[tuple[int | None, int]] = [(None, 0)] * rows
    rescaled = 0
    for _ in range(12):
        level = rng.integers(-60, 60, (rows, 1))
        scores = np.rint((level + rng.laplace(0, 3, (rows, block))) * ONE).astype(np.int64)
        kept = (rng.random((rows, block)) < 0.7) & (rng.random((rows, 1)) < 0.8)
        p, rescale = advance(state, scores, kept)
        rescaled += int(np.count_nonzero(rescale == 31))
        for r in range(rows):
            maximum, denominator = plain[r]
            want = plain_item(maximum, scores[r].tolist(), kept[r].tolist(), w, denominator)
            plain[r] = (want[2], want[3])  # type: ignore[assignment]
            assert (p[r].tolist(), rescale[r]) == want[:2]
            assert state.denominator[r] == want[3]
            assert bool(state.seen[r]) == (want[2] is not None)
    assert rescaled > 0


def test_one_item_by_hand() -> None:
    state = SoftmaxState(1, 12)
    # Maximum ⌈0.5⌉ = 1: p = 2^(12 − 0.5), 2^(12 − 1), 2^(12 − 13) = ½, rounded up, and just below.
    scores = np.array([[ONE // 2, 0, -12 * ONE, -12 * ONE - 4]])
    p, rescale, state = softmax_item(scores, np.ones((1, 4), dtype=bool), state)
    assert p.tolist() == [[2896, 2048, 1, 0]]
    assert rescale.tolist() == [0]
    # An integer maximum is its own ceiling, 2^12 does not fit; two places up.
    p, rescale, state = softmax_item(np.array([[3 * ONE]]), np.ones((1, 1), dtype=bool), state)
    assert p.tolist() == [[4095]]
    assert rescale.tolist() == [2]
    assert state.denominator.tolist() == [(2896 + 2048 + 1 + 2) // 4 + 4095]
    # Nothing kept: nothing changes.
    p, rescale, state = softmax_item(np.array([[9 * ONE]]), np.zeros((1, 1), dtype=bool), state)
    assert (p.tolist(), rescale.tolist(), state.maximum.tolist()) == ([[0]], [0], [3])


def test_extreme_scores_and_rescale_limit() -> None:
    low, high = signed_range(SCORE_BITS)
    state = SoftmaxState(1, 12)
    kept = np.ones((1, 1), dtype=bool)
    p, _ = advance(state, [[low]], kept)
    assert (p.tolist(), state.maximum.tolist()) == ([[4095]], [-512])
    p, rescale = advance(state, [[high]], kept)
    assert (p.tolist(), rescale.tolist(), state.maximum.tolist()) == ([[4095]], [31], [512])
    assert signed_range(MAXIMUM_BITS)[1] >= 512
    assert state.denominator.tolist() == [4095]
    p, rescale = advance(state, [[low]], kept)
    assert (p.tolist(), rescale.tolist(), state.denominator.tolist()) == ([[0]], [0], [4095])


def test_clip_counts_kept_pairs_only() -> None:
    low, high = signed_range(SCORE_BITS)
    accumulators = np.array([[low - 1, low, high, high + 1]])
    scores, count = clip_scores(accumulators, np.array([[True, True, True, False]]))
    assert scores.tolist() == [[low, low, high, high]]
    assert count == 1


def test_inactive_rows_keep_their_state_seed_12() -> None:
    """All rows of a head in one state give the same as groups one after the other, each with its own blocks."""
    rng = np.random.default_rng(12)
    rows, block, groups, blocks = 4, 8, 3, 4
    scores = rng.integers(-20 * ONE, 20 * ONE, (groups * rows, blocks * block))
    kept = rng.random(scores.shape) < 0.6
    shown = rng.random((groups, blocks)) < 0.6
    assert not shown.all()
    whole = SoftmaxState(groups * rows, 12)
    whole_p = np.zeros_like(scores)
    whole_rescale = np.zeros((groups * rows, blocks), dtype=np.int64)
    for j in range(blocks):
        keys = slice(j * block, (j + 1) * block)
        active = np.repeat(shown[:, j], rows)
        whole_p[:, keys], whole_rescale[:, j] = advance(whole, scores[:, keys], kept[:, keys], active)
    for g in range(groups):
        queries = slice(g * rows, (g + 1) * rows)
        state = SoftmaxState(rows, 12)
        for j in range(blocks):
            keys = slice(j * block, (j + 1) * block)
            if not shown[g, j]:
                assert not whole_p[queries, keys].any()
                assert not whole_rescale[queries, j].any()
                continue
            p, rescale = advance(state, scores[queries, keys], kept[queries, keys])
            np.testing.assert_array_equal(whole_p[queries, keys], p)
            np.testing.assert_array_equal(whole_rescale[queries, j], rescale)
        np.testing.assert_array_equal(whole.denominator[queries], state.denominator)


def test_denominator_is_zero_only_without_a_kept_key_seed_13() -> None:
    rng = np.random.default_rng(13)
    scores = rng.integers(*signed_range(SCORE_BITS), (200, 64))
    kept = rng.random(scores.shape) < rng.choice([0.0, 0.02, 0.5], (200, 1))
    _, _, state = softmax_rows(scores, kept, block=16, probability_bits=8)
    np.testing.assert_array_equal(state.denominator == 0, ~kept.any(axis=1))
    assert 0 < np.count_nonzero(state.denominator == 0) < 200
    assert (state.denominator[kept.any(axis=1)] >= 128).all()
    attention = probabilities_real(scores, kept, block=16, probability_bits=8)
    assert not attention[~kept].any()


def laplace_rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """50 rows of 512 scores, Laplace with scale 2 in the log2 domain, and their exact softmax."""
    scores = np.rint(np.random.default_rng(seed).laplace(0, 2, (50, 512)) * ONE).astype(np.int64)
    assert 1.9 < np.abs(scores / ONE).mean() < 2.1
    exact = np.exp2(scores / ONE - scores.max(axis=1, keepdims=True) / ONE)
    return scores, exact / exact.sum(axis=1, keepdims=True)


def largest_error(seed: int, w: int, block: int = 16) -> float:
    scores, exact = laplace_rows(seed)
    kept = np.ones(scores.shape, dtype=bool)
    attention = probabilities_real(scores, kept, block=block, probability_bits=w)
    # What rescaling rounds off a denominator is next to nothing.
    assert np.abs(attention.sum(axis=1) - 1).max() < 2.0 ** (1 - w) * 512 / block / 2
    return float(np.abs(attention - exact).max())


def test_attention_is_close_to_the_exact_softmax_seed_0() -> None:
    errors = [largest_error(0, w) for w in WIDTHS]
    assert errors[WIDTHS.index(12)] < 0.01
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.001


def test_spread_of_the_largest_error_over_seeds_0_to_19() -> None:
    """Rare rows of one strong key over many weak ones exceed 0.01 with 12 bits; none does with 14."""
    errors = sorted(largest_error(seed, 12) for seed in range(20))
    assert errors[len(errors) // 2] < 0.01
    assert errors[-1] < 0.015
    assert max(largest_error(seed, 14) for seed in range(20)) < 0.006


@pytest.mark.parametrize("block", [4, 16, 512])
def test_block_size_hardly_changes_the_attention_seed_0(block: int) -> None:
    assert largest_error(0, 14, block) < 0.006


def test_worst_case_shrinks_with_the_width_of_p() -> None:
    cases = {w: worst_case(w) for w in (12, 14, 16)}
    for w, case in cases.items():
        # The weak keys fall just short of half the last place and vanish; p has one bit less above an integer.
        assert case.gap_real == w + 2**-10
        assert case.strong_real == 2**-12
        assert case.error_real == pytest.approx(511 * 2**-w / (1 + 511 * 2**-w), rel=0.01)
        assert f"{w}-bit p" in str(case)
        assert f"{case.error_real:+.4f}" in str(case)
    assert [round(case.error_real, 3) for case in cases.values()] == [0.111, 0.030, 0.008]


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_the_presets(name: str) -> None:
    config = Config.load(name)
    params = SoftmaxParams(config)
    assert params.slots == config.lookahead + 1
    assert 2**params.tree_levels == config.segments
    assert params.queued == (config.segments > 1)
    assert params.latency <= config.block + 8 + params.tree_levels
    assert params.denominator_cycles * params.denominator_lanes == config.rows
    assert params.denominator_cycles <= config.block
    assert 2**params.sum_bits > config.block * (2**config.probability_bits - 1)
    assert 2**params.saturation_bits > config.rows * config.max_tokens
    assert 2**params.token_bits > config.max_tokens


@pytest.mark.parametrize("w", range(8, 17))
def test_shift_bits_reach_the_last_probability(w: int) -> None:
    params = SoftmaxParams(Config.load("tiny").changed(probability_bits=w))
    state = SoftmaxState(1, w)
    gaps = np.arange(1 << params.shift_bits, 100)
    p, _ = advance(state, [[0, *(-gaps * ONE)]], np.ones((1, 1 + len(gaps)), dtype=bool))
    assert p[0, 0] == 2**w - 1
    assert not p[0, 1:].any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SoftmaxParams("tiny"), "SoftmaxParams.config must be a dtp.config.Config, not 'tiny'"),
        (lambda: SoftmaxState(0, 12), "SoftmaxState.rows must be an integer of at least 1, not 0"),
        (lambda: SoftmaxState(1, 7), "SoftmaxState.probability_bits must be in 8…16, not 7"),
        (lambda: SoftmaxState(1, 12.0), "SoftmaxState.probability_bits must be in 8…16, not 12.0"),
        (
            lambda: advance(SoftmaxState(2, 12), [[0]], [[True]]),
            "advance.scores must be of shape (2, keys), not (1, 1)",
        ),
        (
            lambda: advance(SoftmaxState(1, 12), [[0, 1]], [[True]]),
            "advance.kept must be of the shape of scores (1, 2), not (1, 1)",
        ),
        (
            lambda: advance(SoftmaxState(1, 12), [[0]], [[True]], [True, True]),
            "advance.active must be of shape (1,), not (2,)",
        ),
        (
            lambda: advance(SoftmaxState(1, 12), [[1 << 21]], [[True]]),
            "advance.scores must be signed numbers of 22 bits, not 2097152",
        ),
        (
            lambda: softmax_rows([[0]], [[True, False]], block=4, probability_bits=12),
            "softmax_rows.kept must be of the shape of scores (1, 1), not (1, 2)",
        ),
        (
            lambda: softmax_rows([0], [True], block=4, probability_bits=12),
            "softmax_rows.scores must be of shape (rows, keys), not (1,)",
        ),
        (
            lambda: softmax_rows([[0]], [[True]], block=0, probability_bits=12),
            "softmax_rows.block must be an integer of at least 1, not 0",
        ),
        (lambda: worst_case(12, 1), "worst_case.keys must be an integer of at least 2, not 1"),
    ],
)
def test_bad_input_is_refused_in_one_line(call: object, message: str) -> None:
    with pytest.raises(DtpError) as refused:
        call()  # type: ignore[operator]
    assert str(refused.value) == message
