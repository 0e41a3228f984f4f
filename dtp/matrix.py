"""Plain matrix mode of the array: parameters, job, tables and integer golden model (docs/commutator.md §3).

One job is Y = requantise(act(X Wᵀ + b)) for a group of ``rows`` tokens: chunks of X are the stationary operand, weights
the moving one, ``rows`` × ``lanes`` products a cycle. Residual and MLP matrices and projections run here, on the array
that attention uses [GR §10.1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from dtp.array import MULTIPLIER_CYCLES, ArrayParams
from dtp.config import BIAS_BITS, MANTISSA_BITS, REGISTER_BITS, SCORE_FRACTION_BITS, TABLE_BITS, Config
from dtp.errors import must
from dtp.fixed import Int, overflows, round_shift, saturate

STATE_BITS = 16
"""Hidden states and all that is added to them."""
ALIGN_LEFT = 4
"""Left shift in front of the aligning right shift, so that short sums keep their bits."""
ALIGN_SHIFT_BITS = 5
"""Width of ``shift``: 0 … 31."""
OUT_SHIFT_BITS = 4
"""Width of ``out_shift``: 0 … 15."""
FEED_GAIN_BITS = 2
"""Width of ``feed_gain``: 0 … 3; a wider choice costs a multiplexer for every bit of a word."""
OPEN_JOBS = 4
"""Jobs that are taken and not yet fully requantised."""
GELU_FRACTION_BITS = SCORE_FRACTION_BITS
"""A pre-activation of GELU is s18f12."""
GELU_RANGE = 4
"""GELU(x) is max(x, 0) for |x| >= 4, up to 1.3e-4."""
READ_CYCLES = 2
"""Cycles from the read of a feed or the arrival of a weight entry to the array."""


class Activation(IntEnum):
    """What follows the matrix."""

    NONE = 0
    RELU = 1
    GELU = 2


@cache
def gelu_table() -> Int:
    """D[i] = round(2^12·u·Φ(−u)), u = (i + ½)/256: what GELU lacks of ReLU; read only."""
    u = (np.arange(1 << TABLE_BITS) + 0.5) * GELU_RANGE / (1 << TABLE_BITS)
    tail = np.array([0.5 * math.erfc(x / math.sqrt(2)) for x in u])
    table: Int = np.rint(u * tail * (1 << GELU_FRACTION_BITS)).astype(np.int64)
    table.setflags(write=False)
    return table


@dataclass(frozen=True)
class MatrixParams:
    """Sizes and schedule of the matrix mode of a configuration.

    A *word* is ``rows`` × ``segments`` elements of 16 bits: one feed, or the outputs of one column step. Cycles are
    counted from the one in which an input is presented to the one in which an output can be seen.
    """

    config: Config

    def __post_init__(self) -> None:
        if self.sum_shift > ArrayParams.of(self.config).shift_max:
            rule = f"small enough that a sum shift of {self.sum_shift} fits the array"
            raise must(type(self).__name__, "max_mlp", rule, self.config.max_mlp)

    # Sizes

    @property
    def elements(self) -> int:
        """Elements of a word."""
        return self.config.rows * self.config.segments

    @property
    def word_bits(self) -> int:
        """Bits of a word."""
        return self.elements * STATE_BITS

    @property
    def tile_blocks(self) -> int:
        """Blocks of columns that the accumulators hold."""
        return self.config.accumulator_depth // self.config.pass_steps

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest row of X or Y."""
        return self.config.max_mlp // self.config.block

    @property
    def feed_words(self) -> int:
        """Words of one of the two feed slots."""
        return self.config.max_mlp // self.config.segments

    @property
    def bias_words(self) -> int:
        """Resident bias words of ``segments`` biases: an MLP and three projections."""
        words = (self.config.max_mlp + 4 * self.config.max_model) // self.config.segments
        return int(1 << (words - 1).bit_length())

    @property
    def sum_shift(self) -> int:
        """Right shift of each sum at the array, 0 with 8-bit operands: sums and biases fit their widths."""
        c = self.config
        worst = (c.max_mlp << (2 * c.operand_bits - 2)) + (1 << (BIAS_BITS - 1)) + self.max_blocks
        return max(c.sum_shift, worst.bit_length() + 1 - c.accumulator_bits)

    @property
    def lanes(self) -> int:
        """Elements requantised in a cycle, one multiplier each."""
        return self.config.normaliser_lanes

    @property
    def word_beats(self) -> int:
        """Cycles in which a word is requantised."""
        return self.elements // self.lanes

    @property
    def result_words(self) -> int:
        """Words of sums that can wait for the requantiser."""
        return 1 << (self.config.accumulator_depth - 1).bit_length()

    @property
    def output_words(self) -> int:
        """Requantised words that can wait, those in the pipeline included."""
        return 16

    # Schedule, in cycles

    @property
    def load_cycles(self) -> int:
        """From a job's last activation word to its first feed: gain, clamp, memory, first pass, its register."""
        return 5

    @property
    def sum_cycles(self) -> int:
        """From the issue of an emitting step to the first issue of its word at the requantiser."""
        return READ_CYCLES + ArrayParams.of(self.config).latency + 1

    @property
    def product_cycles(self) -> int:
        """From the issue of a beat to its product: memory, choice, coarse and fine shift, saturation, multiplier."""
        return 5 + MULTIPLIER_CYCLES

    @property
    def beat_cycles(self) -> int:
        """From the issue of a beat to its outputs: product, rounding, table, its register, difference, shift, clamp."""
        return self.product_cycles + 6

    @property
    def issue_cycles(self) -> int:
        """From the issue of a word's last beat to the word at the output: outputs, queue."""
        return self.beat_cycles + 1


@dataclass(frozen=True)
class MatrixJob:
    """Numbers of one matrix job; docs/commutator.md §3 says where they act.

    Parameters
    ----------
    width, columns: of X and Y
    feed_gain: 0 … 3, left shift of the state before it is rounded to X
    shift: 0 … 31, aligns the sum
    scale: 0 … 2^17 − 1
    out_shift: 0 … 15
    activation: of :class:`Activation`
    wide: outputs of 16 bits instead of ``operand_bits``
    bias: sums start from the biases, else from 0

    Raises
    ------
    DtpError
        for a number outside its range
    """

    width: int
    columns: int
    feed_gain: int
    shift: int
    scale: int
    out_shift: int
    activation: Activation
    wide: bool
    bias: bool

    def __post_init__(self) -> None:
        if not isinstance(self.activation, Activation):
            raise must("MatrixJob", "activation", "of dtp.matrix.Activation", self.activation)
        for name in ("wide", "bias"):
            if type(getattr(self, name)) is not bool:
                raise must("MatrixJob", name, "True or False", getattr(self, name))
        limits = {
            "width": (1, 1 << 16), "columns": (1, 1 << 16), "feed_gain": (0, (1 << FEED_GAIN_BITS) - 1),
            "shift": (0, (1 << ALIGN_SHIFT_BITS) - 1), "scale": (0, (1 << MANTISSA_BITS) - 1),
            "out_shift": (0, (1 << OUT_SHIFT_BITS) - 1),
        }  # fmt: skip
        for field in fields(self):
            if field.name in limits:
                value, (low, high) = getattr(self, field.name), limits[field.name]
                if type(value) is not int or not low <= value <= high:
                    raise must("MatrixJob", field.name, f"an integer in {low} … {high}", value)

    def check(self, config: Config) -> None:
        """Whether ``config`` can hold the job; raises DtpError with the limit that it breaks."""
        for name in ("width", "columns"):
            if getattr(self, name) > config.max_mlp:
                rule = f"at most max_mlp {config.max_mlp} of configuration {config.name!r}"
                raise must("MatrixJob", name, rule, getattr(self, name))

    def chunks(self, config: Config) -> int:
        """C: passes of a column tile."""
        return config.chunks(self.width)

    def blocks(self, config: Config) -> int:
        """N: blocks of columns."""
        return config.chunks(self.columns)

    def tiles(self, config: Config) -> tuple[int, ...]:
        """Blocks of each column tile."""
        most, left = MatrixParams(config).tile_blocks, self.blocks(config)
        return tuple(min(most, left - n) for n in range(0, left, most))

    def steps(self, config: Config) -> int:
        """Array steps of one group."""
        return self.chunks(config) * self.blocks(config) * config.pass_steps


def clamp(x: ArrayLike, bits: int) -> tuple[Int, Int]:
    """Symmetric saturation, and where it acted (0 or 1)."""
    limit = (1 << (bits - 1)) - 1
    value = np.asarray(x, dtype=np.int64)
    return np.asarray(np.clip(value, -limit, limit), dtype=np.int64), (np.abs(value) > limit).astype(np.int64)


def padded(x: ArrayLike, rows: int, columns: int) -> Int:
    """A matrix with zeros behind its rows and columns."""
    value = np.asarray(x, dtype=np.int64)
    out = np.zeros((rows, columns), dtype=np.int64)
    out[: value.shape[0], : value.shape[1]] = value
    return out


def activate(v: ArrayLike, activation: Activation) -> Int:
    """Step 5 of the arithmetic, on numbers of 18 bits."""
    value = np.asarray(v, dtype=np.int64)
    if activation is Activation.NONE:
        return value
    positive = np.maximum(value, 0)
    if activation is Activation.RELU:
        return positive
    index = np.where(value < 0, ~value, value) // (GELU_RANGE << (GELU_FRACTION_BITS - TABLE_BITS))
    lack = gelu_table()[np.minimum(index, (1 << TABLE_BITS) - 1)]
    return np.asarray(positive - np.where(index < 1 << TABLE_BITS, lack, 0), dtype=np.int64)


def feeds(config: Config, job: MatrixJob, state: ArrayLike) -> tuple[Int, Int]:
    """Step 1 of the arithmetic: X, and where it was clamped."""
    gained = np.asarray(state, dtype=np.int64) << job.feed_gain
    return clamp(round_shift(gained, STATE_BITS - config.operand_bits), config.operand_bits)


def requantise(acc: ArrayLike, job: MatrixJob, config: Config) -> tuple[Int, int]:
    """Steps 3 to 6 of the arithmetic: outputs, and how many were saturated."""
    exact = round_shift(np.asarray(acc, dtype=np.int64) << ALIGN_LEFT, job.shift)
    aligned, early = saturate(exact, REGISTER_BITS), overflows(exact, REGISTER_BITS)
    v = round_shift(aligned * job.scale, MANTISSA_BITS)
    shifted = round_shift(activate(v, job.activation), job.out_shift)
    out, late = clamp(shifted, STATE_BITS if job.wide else config.operand_bits)
    return out, int(np.count_nonzero(early | (late > 0)))


def matrix(
    config: Config, job: MatrixJob, state: ArrayLike, weights: ArrayLike, bias: ArrayLike | None = None
) -> tuple[Int, int]:
    """Y and the saturation count of all groups of a matrix job.

    Parameters
    ----------
    state: (L, width), 16 bits
    weights: (columns, width), ``operand_bits``
    bias: (columns,), 24 bits; exactly when ``job.bias``

    Returns
    -------
    (L, columns) of 16 or ``operand_bits`` bits; the count, padding rows included

    Raises
    ------
    DtpError
        for shapes or numbers that do not fit
    """
    job.check(config)
    x, w = np.asarray(state, dtype=np.int64), np.asarray(weights, dtype=np.int64)
    b = np.zeros(job.columns, dtype=np.int64) if bias is None else np.asarray(bias, dtype=np.int64)
    if x.ndim != 2 or x.shape[1] != job.width:
        raise must("matrix", "state", f"of shape (L, {job.width})", x.shape)
    if w.shape != (job.columns, job.width):
        raise must("matrix", "weights", f"of shape ({job.columns}, {job.width})", w.shape)
    if b.shape != (job.columns,):
        raise must("matrix", "bias", f"of shape ({job.columns},)", b.shape)
    if (bias is not None) != job.bias:
        raise must("matrix", "bias", "given exactly when job.bias", bias)
    for name, value, bits in (("state", x, STATE_BITS), ("weights", w, config.operand_bits), ("bias", b, BIAS_BITS)):
        if overflows(value, bits).any():
            raise must("matrix", name, f"signed numbers of {bits} bits", int(np.abs(value).max()))

    rows = config.groups(len(x)) * config.rows
    width, columns = job.chunks(config) * config.block, job.blocks(config) * config.block
    fed, clamped = feeds(config, job, x)
    fed, moving = padded(fed, rows, width), padded(w, columns, width)
    acc = np.broadcast_to(padded(b[None, :], 1, columns), (rows, columns)).copy()
    shift = MatrixParams(config).sum_shift
    for low in range(0, width, config.block):
        lane = slice(low, low + config.block)
        acc += round_shift(_exact(fed[:, lane], moving[:, lane].T), shift)
    out, saturated = requantise(acc, job, config)
    return out[: len(x), : job.columns], int(clamped.sum()) + saturated


def _exact(left: Int, right: Int) -> Int:
    """A product of integer matrices; float64 holds every sum of at most 64 products of 16 × 16 bits."""
    return np.asarray(left.astype(np.float64) @ right.astype(np.float64), dtype=np.int64)


# Order of the streams


def words(config: Config, values: ArrayLike) -> Int:
    """Words of one group, (words, rows, segments), from (rows, lanes): word t holds lanes t·S … t·S + S − 1.

    Feeds of X and output steps of Y have this one order; lanes are padded to whole blocks.
    """
    value = np.asarray(values, dtype=np.int64)
    if value.ndim != 2 or value.shape[0] > config.rows:
        raise must("words", "values", f"of at most {config.rows} rows and some lanes", value.shape)
    lanes = padded(value, config.rows, config.chunks(value.shape[1]) * config.block)
    return lanes.reshape(config.rows, -1, config.segments).transpose(1, 0, 2)


def weight_entries(config: Config, job: MatrixJob, weights: ArrayLike) -> Int:
    """Moving operands of one group in the order of use, (steps, segments, block)."""
    width, columns = job.chunks(config) * config.block, job.blocks(config) * config.block
    w = padded(weights, columns, width).reshape(-1, config.segments, job.chunks(config), config.block)
    entries, low = [], 0
    for blocks in job.tiles(config):
        high = low + blocks * config.pass_steps
        entries += [w[low:high, :, chunk] for chunk in range(job.chunks(config))]
        low = high
    return np.concatenate(entries)


def bias_words(config: Config, job: MatrixJob, bias: ArrayLike) -> Int:
    """Resident biases of a job, (blocks · block / segments, segments)."""
    return padded([np.asarray(bias)], 1, job.blocks(config) * config.block).reshape(-1, config.segments)


def scaling(factor: float, out_shift: int) -> tuple[int, int]:
    """``shift`` and ``scale`` whose product with an accumulator is ``factor`` · 2^out_shift.

    Raises
    ------
    DtpError
        for a factor that they cannot give
    """
    wanted = factor * 2.0 ** (out_shift + MANTISSA_BITS - ALIGN_LEFT)
    for shift in range(1 << ALIGN_SHIFT_BITS):
        scale = round(wanted * 2.0**shift)
        if 1 << (MANTISSA_BITS - 1) <= scale < 1 << MANTISSA_BITS:
            return shift, scale
    raise must("scaling", "factor", "a positive number that 5 bits of shift and 17 bits of scale can give", factor)
