"""Normaliser: an output row is its accumulated P·V sums over its accumulated probabilities [RA (15)].

A softmax row is Σ p·v / Σ p. The division is a multiplication by a reciprocal from a table: l = 2^e · (1 + m) is cut to
the 10 bits of m behind its leading one, 1 / (1 + m) is read at the middle of that interval, and e becomes a shift of
the sum. :data:`RECIPROCAL_ERROR` bounds the relative error of the reciprocal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from dtp.array import MULTIPLIER_CYCLES
from dtp.config import MANTISSA_BITS, REGISTER_BITS, TABLE_BITS, Config
from dtp.errors import must
from dtp.fixed import Int, overflows, round_shift, saturate
from dtp.job import status_beats
from dtp.softmax import SoftmaxParams

RECIPROCAL: Final[tuple[int, ...]] = tuple(
    round(2.0**MANTISSA_BITS / (1 + (i + 0.5) / (1 << TABLE_BITS))) for i in range(1 << TABLE_BITS)
)
"""``round(2^17 / (1 + (i + ½) / 1024))`` for the ten bits i behind the leading one of l: 17 bits unsigned."""

RECIPROCAL_ERROR: Final = 2.0**-11 + 2.0**-17
"""``|RECIPROCAL[i] · l / 2^(17 + e) − 1|`` never exceeds it: half an interval of the table, and its rounding."""

COUNT_BITS: Final = 16
"""Counters of the status record; those of saturations stop at 65535."""


class RecordKind(IntEnum):
    """What the walker asks the normaliser to send."""

    DATA = 0
    """A group of rows whose sums arrive from the array."""
    NULL = 1
    """A group of rows without a kept pair: zeros."""
    STATUS = 2
    """The status record of a job."""


@dataclass(frozen=True)
class NormaliserParams:
    """Sizes and schedule of the normaliser of a configuration.

    A *word* is what passes the multipliers in a cycle: ``normaliser_lanes`` values. A step of the array gives
    ``step_words`` of them, a beat of the output takes ``beat_words``.
    """

    config: Config

    # Sizes

    @property
    def lanes(self) -> int:
        """Values normalised in a cycle, one multiplier each."""
        return self.config.normaliser_lanes

    @property
    def step_words(self) -> int:
        """Words of one array step (rows × segments values)."""
        return self.config.rows * self.config.segments // self.lanes

    @property
    def word_bits(self) -> int:
        """Bits of a word at the output."""
        return self.lanes * self.config.output_bits

    @property
    def beat_words(self) -> int:
        """Words of an output beat; also the cycles a beat takes when nothing is waited for."""
        return 8 * self.config.output_bytes // self.word_bits

    @property
    def max_steps(self) -> int:
        """Array steps of the widest group: entries of a slot."""
        return self.config.max_width // self.config.segments

    @property
    def status_beats(self) -> int:
        """Output beats of a status record."""
        return status_beats(self.config)

    @property
    def status_words(self) -> int:
        """Words of a status record, padding included."""
        return self.status_beats * self.beat_words

    @property
    def count_bits(self) -> int:
        """Bits of the saturated scores of one group."""
        return SoftmaxParams(self.config).saturation_bits

    @property
    def row_banks(self) -> int:
        """Memories of reciprocals: one for each row of a word, or of those converted in a cycle if that is more."""
        return max(min(self.lanes, self.config.rows), self.reciprocal_rows)

    @property
    def reciprocal_groups(self) -> int:
        """Groups whose reciprocals can wait: those pushed and not drained, and those the scores are ahead."""
        return 1 << (self.config.output_slots + self.config.lookahead).bit_length()

    @property
    def record_depth(self) -> int:
        """Records that can wait."""
        return 16

    @property
    def word_depth(self) -> int:
        """Words between issue and output; more than :attr:`issue_cycles`, so that they never limit the rate."""
        return 16

    # Arithmetic

    @property
    def guard_bits(self) -> int:
        """G: a sum is aligned so that rows of the largest operands fill 18 bits."""
        return MANTISSA_BITS - self.config.operand_bits

    @property
    def lift_bits(self) -> int:
        """P: left shift of the sums that keeps the right shift from being negative; 0 for p of 10 bits or more."""
        return max(0, self.guard_bits - (self.config.probability_bits - 1))

    @property
    def base_shift(self) -> int:
        """Right shift of the sums of a row with the smallest legal l, 2^(probability_bits − 1)."""
        return self.config.probability_bits - 1 - self.guard_bits + self.lift_bits

    @property
    def amount_bits(self) -> int:
        """Bits of the right shift beyond :attr:`base_shift`."""
        return (self.config.denominator_bits - self.config.probability_bits).bit_length()

    @property
    def product_shift(self) -> int:
        """Right shift of the product of sum and reciprocal."""
        return 2 * MANTISSA_BITS - self.config.output_bits

    # Schedule, in cycles

    @property
    def reciprocal_rows(self) -> int:
        """Rows converted in a cycle: as many as the softmax finishes in a cycle."""
        return SoftmaxParams(self.config).denominator_lanes

    @property
    def conversion_cycles(self) -> int:
        """Cycles that the rows of a group take, at most ``block``."""
        return self.config.rows // self.reciprocal_rows

    @property
    def group_spacing(self) -> int:
        """``group_valid`` pulses are as far apart: the softmax takes as long for an item."""
        return self.config.block

    @property
    def reciprocal_cycles(self) -> int:
        """From ``group_valid`` to the first issue that can use its reciprocals."""
        return self.conversion_cycles + 3

    @property
    def value_cycles(self) -> int:
        """From a value to the first issue that can read it."""
        return 1

    @property
    def record_cycles(self) -> int:
        """From the push of a record to the first issue of its words."""
        return 1

    @property
    def product_cycles(self) -> int:
        """From the issue of a word to its product: memory, its register or two, coarse shift, multiplier."""
        return 3 + self.config.registered_memories + MULTIPLIER_CYCLES

    @property
    def issue_cycles(self) -> int:
        """From the issue of a beat's last word to the beat: product, rounding, queue."""
        return self.product_cycles + 2

    @property
    def latency(self) -> int:
        """From a value to the beat that ends with it, if nothing is waited for."""
        return self.value_cycles + self.issue_cycles

    @property
    def status_gap(self) -> int:
        """From the word issued before a status record to the record's first word: its saturations are counted."""
        return 2

    @property
    def status_release_cycles(self) -> int:
        """From a status record's last word to the cycle in which the next STATUS can be pushed."""
        return self.product_cycles

    @property
    def latencies(self) -> dict[str, int]:
        """The schedule by name, for the manifest."""
        names = (
            "conversion_cycles", "reciprocal_cycles", "value_cycles", "record_cycles", "product_cycles",
            "issue_cycles", "latency", "status_gap", "status_release_cycles",
        )  # fmt: skip
        return {name: int(getattr(self, name)) for name in names}


def reciprocal(denominators: ArrayLike) -> tuple[Int, Int]:
    """Table value and exponent of each l >= 0: ``1 / l ≈ value / 2^(17 + exponent)``; both 0 for l = 0."""
    l = np.asarray(denominators, dtype=np.int64)  # noqa: E741 (the symbol of the contract)
    exponent = np.frexp(np.maximum(l, 1).astype(np.float64))[1].astype(np.int64) - 1
    fraction = (l << TABLE_BITS) >> exponent
    value = np.asarray(RECIPROCAL, dtype=np.int64)[fraction & ((1 << TABLE_BITS) - 1)]
    return np.where(l > 0, value, 0), np.where(l > 0, exponent, 0)


def normalise(acc: ArrayLike, l: ArrayLike, config: Config) -> tuple[Int, int]:  # noqa: E741
    """Outputs of rows, and how many of them were saturated (docs/tile.md, 4.4).

    Parameters
    ----------
    acc: (L, d), accumulated p·v
    l: (L,), accumulated p; 0 for a row without a kept pair, else at least ``2^(probability_bits − 1)``

    Returns
    -------
    (L, d) of ``output_bits``, ``output_bits − operand_bits`` of them fraction in units of v's last place; the count

    Raises
    ------
    DtpError
        shapes that do not fit, an l that no softmax gives, or sums larger than l times the largest operand
    """
    params = NormaliserParams(config)
    sums, rows = np.asarray(acc, dtype=np.int64), np.asarray(l, dtype=np.int64)
    if rows.ndim != 1:
        raise must("normalise", "l", "of shape (L,)", rows.shape)
    if sums.ndim != 2 or len(sums) != len(rows):
        raise must("normalise", "acc", f"of shape ({len(rows)}, d)", sums.shape)
    least = 1 << (config.probability_bits - 1)
    for value in rows[(rows != 0) & ((rows < least) | (rows >> config.denominator_bits != 0))][:1]:
        raise must("normalise", "l", f"0 or of {least}…{(1 << config.denominator_bits) - 1}", int(value))
    value, exponent = reciprocal(rows)
    shift = np.where(rows > 0, exponent - params.guard_bits + params.lift_bits, 0)
    aligned = np.where((rows > 0)[:, None], round_shift(sums << params.lift_bits, shift[:, None]), 0)
    for row, column in np.argwhere(overflows(aligned, REGISTER_BITS))[:1]:
        raise must(
            "normalise", "acc", f"at most (l + 1)·2^{config.operand_bits - 1}, l = {rows[row]}", int(sums[row, column])
        )
    exact = round_shift(aligned * value[:, None], params.product_shift)
    return saturate(exact, config.output_bits), int(np.count_nonzero(overflows(exact, config.output_bits)))


def output_bytes(rows: ArrayLike, config: Config) -> bytes:
    """Outputs of one group, (rows, columns), in the order in which they leave: step, segment, row; little-endian.

    Raises
    ------
    DtpError: a shape that is not ``rows`` × whole array steps.
    """
    values = np.asarray(rows, dtype=np.int64)
    if values.ndim != 2 or values.shape[0] != config.rows or values.shape[1] % config.segments:
        rule = f"of shape ({config.rows}, a multiple of segments {config.segments})"
        raise must("output_bytes", "rows", rule, values.shape)
    return values.T.astype("<i2" if config.output_bits == 16 else "i1").tobytes()
