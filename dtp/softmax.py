"""Base-2 online softmax of the attention tile: parameters, exponential table and integer golden model.

A row's scores arrive in blocks of keys. The running maximum m is an integer, so that a rise of it rescales
old sums by a shift (Softermax [Stevens et al., DAC 2021]); the denominator is the sum of the *quantised*
probabilities, so that a row still sums to 1. Scores are s22f12 in the log2 domain.

    m'      = max(m, ⌈max s⌉)                    over the kept keys of the block, an integer
    rescale = min(m' − m, 31)                    0 where the row had no kept key before
    p       = min(2^w − 1, round(2^w · 2^(s − m')))   0 for dropped keys; 2^−x by a table of 10 fraction bits
    l       = round_shift(l, rescale) + Σp

A row without any kept key ends with l = 0, and only such a row: the largest score of a block that raises m
has p >= 2^(w−1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtp.config import MANTISSA_BITS, RESCALE_BITS, SCORE_BITS, SCORE_FRACTION_BITS, TABLE_BITS, Config
from dtp.errors import must
from dtp.fixed import Int, overflows, round_shift, saturate

Real = NDArray[np.float64]
Bool = NDArray[np.bool_]

MAXIMUM_BITS = SCORE_BITS - SCORE_FRACTION_BITS + 1
"""Signed width of a running maximum: a ceiling takes a bit more than the integer part."""
MAX_RESCALE = (1 << RESCALE_BITS) - 1
_DROPPED_BITS = SCORE_FRACTION_BITS - TABLE_BITS
_MAX_SHIFT = 31


@cache
def _exponential_table() -> Int:
    exponent = np.arange(1 << TABLE_BITS) / (1 << TABLE_BITS)
    table: Int = np.rint(np.exp2(MANTISSA_BITS - exponent)).astype(np.int64)
    table.setflags(write=False)
    return table


def exponential_table() -> Int:
    """EXP[f] = round(2^17 · 2^(−f/1024)), f = 0 … 1023, read only; 65,581 … 131,072."""
    return _exponential_table()


@dataclass(frozen=True)
class SoftmaxParams:
    """Widths and schedule of the softmax unit, all derived from the configuration.

    Cycles are counted from the one in which an input is presented to the one in which an output can be seen.

    Parameters
    ----------
    config: the processor
    """

    config: Config

    def __post_init__(self) -> None:
        if not isinstance(self.config, Config):
            raise must(type(self).__name__, "config", "a dtp.config.Config", self.config)

    # Shapes and widths

    @property
    def slots(self) -> int:
        """Items whose scores or probabilities are held at a time."""
        return self.config.lookahead + 1

    @property
    def tree_levels(self) -> int:
        """Levels of comparators that take the keys of one step to one."""
        return (self.config.segments - 1).bit_length()

    @property
    def queued(self) -> bool:
        """Whether items may arrive faster than one key a cycle is worked off, and wait."""
        return self.config.pass_steps < self.config.block

    @property
    def token_bits(self) -> int:
        """Bits of a token's index or of a number of tokens."""
        return self.config.max_tokens.bit_length()

    @property
    def sum_bits(self) -> int:
        """Bits of Σp over one block."""
        return (((1 << self.config.probability_bits) - 1) * self.config.block).bit_length()

    @property
    def shift_bits(self) -> int:
        """Bits of the exponent's integer part that matter: from w + 2 on, every p is 0."""
        return (self.config.probability_bits + 1).bit_length()

    @property
    def saturation_bits(self) -> int:
        """Bits of the count of saturated scores of one group."""
        return (self.config.rows * self.config.max_tokens).bit_length()

    @property
    def denominator_lanes(self) -> int:
        """Rows whose denominator is rescaled and added to in one cycle."""
        return min(self.config.rows, self.config.segments)

    @property
    def denominator_cycles(self) -> int:
        """Cycles that this takes for all rows; at most ``block``."""
        return self.config.rows // self.denominator_lanes

    # Schedule

    @property
    def item_lead(self) -> int:
        """Least distance in cycles from an item's description to its first score."""
        return 2

    @property
    def issue_cycle(self) -> int:
        """An item's last score → its first key is read from the score buffer, if no other item is there."""
        return 1 + self.tree_levels

    @property
    def probability_stage(self) -> int:
        """A key is read from the score buffer → its probabilities are written to their buffer.

        Score memory, its output register, difference, table, its output register, shift, rounding: 1 each.
        """
        return 7

    @property
    def latency(self) -> int:
        """An item's last score → ``done``, when the items before it are done with."""
        return self.issue_cycle + self.config.block - 1 + self.probability_stage

    @property
    def group_latency(self) -> int:
        """A group's last score → ``group_valid``: sum, its copy, choice of a row, then row after row."""
        return self.latency + 3 + self.denominator_cycles

    @property
    def p_read_latency(self) -> int:
        """``p_slot``, ``p_feed`` → ``p_data``: memory and output register."""
        return 2

    @property
    def latencies(self) -> dict[str, int]:
        """Cycles by name, for the manifest and the docs."""
        names = ("item_lead", "latency", "group_latency", "p_read_latency")
        return {name: int(getattr(self, name)) for name in names}


# Golden model


@dataclass
class SoftmaxState:
    """What the online softmax remembers of each of ``rows`` rows.

    Parameters
    ----------
    rows: number of rows; all of a head may be held in one state
    probability_bits: w, 8 … 16

    Members
    -------
    maximum: (rows,) running maximum, an integer in the log2 domain; meaningless before ``seen``
    seen: (rows,) whether a kept key has come
    denominator: (rows,) sum of the quantised probabilities, rescaled
    """

    rows: int
    probability_bits: int
    maximum: Int = field(init=False)
    seen: Bool = field(init=False)
    denominator: Int = field(init=False)

    def __post_init__(self) -> None:
        if type(self.rows) is not int or self.rows < 1:
            raise must("SoftmaxState", "rows", "an integer of at least 1", self.rows)
        if type(self.probability_bits) is not int or not 8 <= self.probability_bits <= 16:
            raise must("SoftmaxState", "probability_bits", "in 8…16", self.probability_bits)
        self.maximum = np.zeros(self.rows, dtype=np.int64)
        self.seen = np.zeros(self.rows, dtype=np.bool_)
        self.denominator = np.zeros(self.rows, dtype=np.int64)


def clip_scores(accumulators: ArrayLike, kept: ArrayLike) -> tuple[Int, int]:
    """Scores s22f12 of accumulators of the same scale; number of saturated ones among the kept pairs."""
    count = int(np.count_nonzero(overflows(accumulators, SCORE_BITS) & np.asarray(kept, dtype=np.bool_)))
    return saturate(accumulators, SCORE_BITS), count


def advance(
    state: SoftmaxState, scores: ArrayLike, kept: ArrayLike, active: ArrayLike | None = None
) -> tuple[Int, Int]:
    """One block of keys for all rows of ``state``, which is updated in place.

    Parameters
    ----------
    scores: (rows, keys) s22f12; only kept ones matter
    kept: (rows, keys) bool
    active: (rows,) bool, rows to which this block is shown; the others keep their state and give p = 0 and
        rescale = 0. A block without a kept key and a block that is not shown are the same.

    Returns
    -------
    p: (rows, keys), 0 … 2^w − 1
    rescale: (rows,), 0 … 31, for sums of earlier blocks

    Raises
    ------
    DtpError
        for shapes that do not match the state and for kept scores beyond 22 bits
    """
    s = np.asarray(scores, dtype=np.int64)
    keep = np.asarray(kept, dtype=np.bool_)
    if s.ndim != 2 or s.shape[0] != state.rows:
        raise must("advance", "scores", f"of shape ({state.rows}, keys)", s.shape)
    if keep.shape != s.shape:
        raise must("advance", "kept", f"of the shape of scores {s.shape}", keep.shape)
    if active is not None:
        shown = np.asarray(active, dtype=np.bool_)
        if shown.shape != (state.rows,):
            raise must("advance", "active", f"of shape ({state.rows},)", shown.shape)
        keep = keep & shown[:, np.newaxis]
    if np.any(overflows(s, SCORE_BITS) & keep):
        raise must("advance", "scores", f"signed numbers of {SCORE_BITS} bits", int(np.abs(s[keep]).max()))

    some = keep.any(axis=1)
    lowest = -(1 << (SCORE_BITS - 1))
    largest = np.where(keep, s, lowest).max(axis=1, initial=lowest)
    top = -((-largest) >> SCORE_FRACTION_BITS)
    before = some & state.seen
    maximum = np.where(before, np.maximum(state.maximum, top), np.where(some, top, state.maximum))
    rescale: Int = np.where(before, np.minimum(maximum - state.maximum, MAX_RESCALE), 0)

    difference = np.where(keep, (maximum[:, np.newaxis] << SCORE_FRACTION_BITS) - s, 0)
    exponent = round_shift(difference, _DROPPED_BITS)
    whole = np.minimum(exponent >> TABLE_BITS, _MAX_SHIFT)
    entry = _exponential_table()[exponent & ((1 << TABLE_BITS) - 1)]
    w = state.probability_bits
    p = np.minimum(round_shift(entry, MANTISSA_BITS - w + whole), (1 << w) - 1)
    p = np.where(keep, p, 0)

    state.denominator = round_shift(state.denominator, rescale) + p.sum(axis=1)
    state.maximum = maximum
    state.seen = state.seen | some
    return p, rescale


def softmax_item(scores: ArrayLike, kept: ArrayLike, state: SoftmaxState) -> tuple[Int, Int, SoftmaxState]:
    """One item, a block of keys of one group: p (rows, keys), rescale (rows,) and ``state``, updated."""
    p, rescale = advance(state, scores, kept)
    return p, rescale, state


def softmax_rows(
    scores: ArrayLike, kept: ArrayLike, *, block: int, probability_bits: int
) -> tuple[Int, Int, SoftmaxState]:
    """All keys of all rows, in blocks in ascending order.

    Parameters
    ----------
    scores, kept: (rows, keys); the last block may be short
    block: keys of a block
    probability_bits: w

    Returns
    -------
    p: (rows, keys), each in units of 2^(m' − w) of its own block
    rescale: (rows, blocks)
    state: after the last block
    """
    s = np.asarray(scores, dtype=np.int64)
    keep = np.asarray(kept, dtype=np.bool_)
    if s.ndim != 2 or 0 in s.shape:
        raise must("softmax_rows", "scores", "of shape (rows, keys)", s.shape)
    if keep.shape != s.shape:
        raise must("softmax_rows", "kept", f"of the shape of scores {s.shape}", keep.shape)
    if type(block) is not int or block < 1:
        raise must("softmax_rows", "block", "an integer of at least 1", block)
    state = SoftmaxState(s.shape[0], probability_bits)
    p = np.zeros_like(s)
    rescales: list[Int] = []
    for start in range(0, s.shape[1], block):
        keys = slice(start, start + block)
        p[:, keys], rescale = advance(state, s[:, keys], keep[:, keys])
        rescales.append(rescale)
    return p, np.stack(rescales, axis=1), state


def probabilities_real(
    scores: ArrayLike, kept: ArrayLike, *, block: int, probability_bits: int
) -> Real:
    """The attention (rows, keys) that :func:`softmax_rows` stands for: p · 2^(−later rescales) / l.

    Rows without a kept key are 0. Unlike in the accumulators of the array, a rescaled p is not rounded.
    """
    p, rescale, state = softmax_rows(scores, kept, block=block, probability_bits=probability_bits)
    later = np.cumsum(rescale[:, ::-1], axis=1)[:, ::-1] - rescale
    weight = p * np.exp2(-np.repeat(later, block, axis=1)[:, : p.shape[1]])
    return np.asarray(weight / np.maximum(state.denominator, 1)[:, np.newaxis], dtype=np.float64)


@dataclass(frozen=True)
class WorstCase:
    """The worst row of one strong key over equal weak ones.

    Parameters
    ----------
    probability_bits: w
    keys: of the row, the strong one included
    strong_real: score of the strong key in the log2 domain
    gap_real: how much lower the others are, a multiple of 2^−10
    error_real: the strong key's attention minus that of the exact softmax
    """

    probability_bits: int
    keys: int
    strong_real: float
    gap_real: float
    error_real: float

    def __str__(self) -> str:
        return (
            f"{self.probability_bits}-bit p, one key {self.gap_real:.4f} (log2) above {self.keys - 1} equal "
            f"ones: error of its attention {self.error_real:+.4f}"
        )


def worst_case(probability_bits: int, keys: int = 512) -> WorstCase:
    """One strong key over ``keys`` − 1 equal weak ones: the largest error over all gaps.

    All weak probabilities are rounded alike, so that their errors add up: the case for wide probabilities.
    The strong score is tried as an integer, where it has p = 2^w − 1, and one last place above it, where the
    maximum is the next integer and p = 2^(w−1): one bit less for all.
    """
    if type(keys) is not int or keys < 2:
        raise must("worst_case", "keys", "an integer of at least 2", keys)
    unit = 1 << TABLE_BITS
    cases: list[WorstCase] = []
    for strong in (0, 1):
        gaps = np.arange((probability_bits + 3) * unit)
        state = SoftmaxState(gaps.size, probability_bits)
        scores = np.stack([np.zeros_like(gaps), -gaps << _DROPPED_BITS], axis=1) + strong
        p, _ = advance(state, scores, np.ones(scores.shape, dtype=np.bool_))
        attention = p[:, 0] / (p[:, 0] + (keys - 1) * p[:, 1])
        error = attention - 1 / (1 + (keys - 1) * np.exp2(-gaps / unit))
        worst = int(np.abs(error).argmax())
        strong_real = strong / (1 << SCORE_FRACTION_BITS)
        cases.append(WorstCase(probability_bits, keys, strong_real, worst / unit, float(error[worst])))
    return max(cases, key=lambda case: abs(case.error_real))
