"""Rank-k transport y = c·x − W(M(Vᵀx)): parameters, job, integer golden model, quantisation [SPEC §2, RA §5.6].

One operation for all maps of low rank that the papers use: linear and Cayley transport with or without torsion, inverse
metric, metric-aware projection, an edge W_O W_V. docs/transport.md is the contract; M is in :mod:`dtp.solve`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtp.array import MULTIPLIER_CYCLES
from dtp.config import REGISTER_BITS, Config
from dtp.errors import must
from dtp.fixed import Int, bits_for_magnitude, overflows, round_shift, saturate, signed_range
from dtp.solve import (
    BOTH_SLOTS,
    CONSTANTS,
    GRAM_PAIRS,
    LEAST_UNIT,
    MAX_COLUMNS,
    PRODUCT_SHIFT,
    RESULT_SLOTS,
    THREADS,
    TILE_COLUMNS,
    UNIT_PAIRS,
    MiddleMode,
    TransportError,
    gram_words,
    program,
    scale,
    solve,
)

Real = NDArray[np.float64]
Bytes = NDArray[np.uint8]

STATE_BITS: Final = 16
"""A lane of a state vector."""
BUFFER_WORDS: Final = 512
"""Words that each input buffer holds: the depth of a memory block."""
JOB_MAGIC: Final = 0x5254
STATUS_MAGIC: Final = 0x5354
DESCRIPTOR_BYTES: Final = 32
STATUS_BYTES: Final = 8
MAX_TOKENS: Final = 1 << 16
_SHIFT_MAX: Final = 31
_MAX_HEADROOM: Final = 4
_PARALLEL: Final = 1e-7
"""Area of a pair of columns, over the sum of their squares, below which they count as parallel."""


@dataclass(frozen=True)
class TransportParams:
    """Sizes, widths and schedule of the transport engine of a configuration."""

    config: Config

    # Sizes

    @property
    def tile_rows(self) -> int:
        """Rows R of a tile; lanes of a state word of one vector."""
        return self.config.transport_lanes // TILE_COLUMNS

    @property
    def vectors(self) -> int:
        """Vectors that the engine works on at once."""
        return self.config.transport_vectors

    @property
    def max_groups(self) -> int:
        """Tiles side by side in a pass."""
        return self.config.transport_columns // TILE_COLUMNS

    @property
    def max_words(self) -> int:
        """Words of the longest vector."""
        return -(-self.config.transport_width // self.tile_rows)

    @property
    def factor_word_bits(self) -> int:
        """Bits of a tile."""
        return self.config.transport_lanes * self.config.factor_bits

    @property
    def state_word_bits(self) -> int:
        """Bits of a state word."""
        return self.vectors * self.tile_rows * STATE_BITS

    @property
    def contexts(self) -> int:
        """Tokens between the start of their projection and the end of their expansion."""
        return 2 * THREADS * self.config.solve_lanes

    # Arithmetic

    @property
    def expand_shift(self) -> int:
        """S: fraction bits of m."""
        return self.config.factor_bits + 1

    @property
    def gram_guard(self) -> int:
        """Left shift of a Gram entry before its right shift: products of 8-bit factors are short."""
        return 6 if self.config.factor_bits == 8 else 0

    @property
    def sum_bits(self) -> int:
        """Signed width of an exact projection."""
        magnitude = self.max_words * self.tile_rows << (self.config.factor_bits - 1 + STATE_BITS - 1)
        return bits_for_magnitude(magnitude)

    @property
    def gram_bits(self) -> int:
        """Signed width of an exact Gram entry."""
        magnitude = self.max_words * self.tile_rows << (2 * self.config.factor_bits - 2)
        return bits_for_magnitude(magnitude)

    @property
    def gram_sum_bits(self) -> int:
        """Signed width of a Gram sum: of products, or of the squares of sums where factors have 8 bits."""
        return self.gram_bits + (2 if self.config.factor_bits == 8 else 0)

    @property
    def expand_bits(self) -> int:
        """Signed width of an exact expansion with the state in front."""
        products = self.config.transport_columns << (self.config.factor_bits - 1 + REGISTER_BITS - 1)
        state = 1 << (STATE_BITS - 1 + self.expand_shift)
        return bits_for_magnitude(products + state + (1 << self.expand_shift))

    @property
    def shifted_bits(self) -> int:
        """Signed width of what a solve lane shifts: a sum of two products, a guarded Gram entry, a projection."""
        return max(2 * REGISTER_BITS, self.gram_bits + self.gram_guard, self.sum_bits) + 1

    # Schedule, in cycles

    @property
    def gram_rows(self) -> int:
        """Rows of a tile whose Gram products are summed in a cycle.

        Squares come from tables: half a tile, as fast as the engine with one slot. Products take multipliers: as fast
        as the engine with two.
        """
        return max(1, self.tile_rows * (2 if self.config.factor_bits == 8 else self.vectors) // 4)

    @property
    def gram_cycles(self) -> int:
        """Cycles of a Gram step, a tile or a pair of tiles; at least two, for two reads of the factors."""
        return self.tile_rows // self.gram_rows

    @property
    def row_levels(self) -> int:
        """Levels of the adder tree over the rows of a tile."""
        return (self.tile_rows - 1).bit_length()

    @property
    def column_levels(self) -> int:
        """Levels of the adder tree over the columns of a tile."""
        return (TILE_COLUMNS - 1).bit_length()

    @property
    def operand_cycle(self) -> int:
        """From the issue of a tile to the operands at the multipliers: address, memory, its register."""
        return 3

    @property
    def product_cycle(self) -> int:
        """From the issue of a tile to its products."""
        return self.operand_cycle + MULTIPLIER_CYCLES

    @property
    def project_cycles(self) -> int:
        """From the issue of a token's last tile to the first cycle in which the solve lane can start it."""
        return self.product_cycle + self.row_levels + 2

    @property
    def output_cycles(self) -> int:
        """From the issue of a word's last tile to the word at the output, if nothing is waited for."""
        return self.product_cycle + self.column_levels + 6

    @property
    def output_depth(self) -> int:
        """Output words that can wait, those on the way included; more than :attr:`output_cycles`."""
        return 64

    @property
    def gram_product_cycles(self) -> int:
        """From two factors to their product, or to the square of their sum: sum, table, its register."""
        return 3 if self.config.factor_bits == 8 else MULTIPLIER_CYCLES

    @property
    def gram_levels(self) -> int:
        """Levels of the adder tree over the rows of a Gram cycle."""
        return (self.gram_rows - 1).bit_length()

    @property
    def gram_latency(self) -> int:
        """From the last cycle of a token's Gram steps to the first in which the solve lane can start it."""
        return 6 + self.gram_product_cycles + self.gram_levels + len(GRAM_PAIRS) + 5

    @property
    def start_cycles(self) -> int:
        """From the cycle in which a job is taken to the first in which a solve lane can start a token."""
        return THREADS * CONSTANTS + 1

    @property
    def operation_cycles(self) -> int:
        """From the turn of an operation to the first cycle in which its result can be read."""
        return RESULT_SLOTS * THREADS

    def min_gram_phase(self, groups: int) -> int:
        """A Gram phase takes at least as long: the lane that got the one before still forms its entries."""
        return -(-(len(GRAM_PAIRS) + 4) // (self.config.solve_lanes if groups == 1 else 1))

    def gram_phases(self, groups: int) -> int:
        """Pairs of tiles side by side."""
        return 1 if groups == 1 else 4

    def solve_slots(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        """Slots whose m a solve lane makes for a job: both where a word has both."""
        return slots if self.vectors == 1 else BOTH_SLOTS

    def solve_cycles(self, job: TransportJob) -> int:
        """Turns of a token in a solve lane, in cycles of the lane: one token in so many, sustained."""
        return len(program(job.mode, job.groups, self.solve_slots(job.slots)))


@dataclass(frozen=True, kw_only=True)
class TransportJob:
    """What is the same for every token of a job; the shapes are those of docs/transport.md.

    Parameters
    ----------
    mode: what M is
    tokens: 1 … 65536
    words: state words of a vector
    groups: tiles side by side, 1 or 2
    plain, transposed: the slots in use
    separate: W is not V and follows it
    identity: the state is added to the output
    base: a base vector is added instead
    project_shift, gram_shift: right shifts of projections and of Gram entries, 0 … 31
    unit: of I or J in words of G
    weights: one a pair of columns
    tag: carried to the status record
    """

    mode: MiddleMode
    tokens: int
    words: int
    groups: int
    plain: bool = True
    transposed: bool = False
    separate: bool = False
    identity: bool = True
    base: bool = False
    project_shift: int = 0
    gram_shift: int = 0
    unit: int = 0
    weights: tuple[int, ...] = (0,) * UNIT_PAIRS
    tag: int = 0

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots in use, in their order."""
        return tuple(slot for slot, used in enumerate((self.plain, self.transposed)) if used)

    @property
    def factor_words(self) -> int:
        """Factor words of a token."""
        return self.words * self.groups * (2 if self.separate else 1)

    def state_words(self, params: TransportParams) -> int:
        """State words of a token, its base included."""
        return self.output_words(params) * (2 if self.base else 1)

    def output_words(self, params: TransportParams) -> int:
        """Output words of a token."""
        return self.words * (1 if params.vectors == 2 else len(self.slots))

    def check(self, config: Config) -> None:
        """Raises DtpError for what the hardware would refuse or misread."""
        params = TransportParams(config)
        owner = type(self).__name__
        for name, low, high in (
            ("tokens", 1, MAX_TOKENS),
            ("words", 1, params.max_words),
            ("groups", 1, params.max_groups),
            ("project_shift", 0, _SHIFT_MAX),
            ("gram_shift", 0, _SHIFT_MAX),
            ("tag", 0, 0xFFFF),
        ):
            if not low <= getattr(self, name) <= high:
                raise must(owner, name, f"in {low}…{high}", getattr(self, name))
        if not (self.plain or self.transposed):
            raise must(owner, "plain", "set where transposed is not", self.plain)
        if self.identity and self.base:
            raise must(owner, "base", "unset where identity is set", self.base)
        if len(self.weights) != UNIT_PAIRS:
            raise must(owner, "weights", f"of {UNIT_PAIRS} integers", self.weights)
        low, high = signed_range(REGISTER_BITS)
        if not 0 <= self.unit <= high:
            raise must(owner, "unit", f"in 0…{high}", self.unit)
        for weight in self.weights:
            if not low <= weight <= high:
                raise must(owner, "weights", f"in {low}…{high}", weight)
        if params.vectors == 2 and self.separate and self.plain and self.transposed:
            raise must(owner, "transposed", "unset where plain and separate are set and vectors work in pairs", True)
        for name, words in (("factor", self.factor_words), ("state", self.state_words(params))):
            if words > BUFFER_WORDS:
                raise must(owner, "words", f"few enough for {BUFFER_WORDS} {name} words a token", self.words)


@dataclass(frozen=True, eq=False)
class TransportResult:
    """Outputs (n, slots, width), m (n, slots, columns), saturated lanes (stops at 65535), sticky errors."""

    outputs: Int
    middle: Int
    saturations: int
    error: TransportError


def transport(
    config: Config,
    job: TransportJob,
    v: ArrayLike,
    states: ArrayLike,
    *,
    w: ArrayLike | None = None,
    base: ArrayLike | None = None,
) -> TransportResult:
    """Golden model of one job (docs/transport.md, 2 and 3).

    Parameters
    ----------
    v: (n, width, k) factors, k at most ``transport_columns``
    states: (n, slots, width), the slots in use
    w: like v with ``separate``
    base: like states with ``base``

    Raises
    ------
    DtpError: a job that the configuration cannot take, shapes that do not fit it, or numbers out of range.
    """
    job.check(config)
    params = TransportParams(config)
    factors = _padded(config, job, "v", v)
    seconds = factors if w is None else _padded(config, job, "w", w)
    if (w is not None) is not job.separate:
        raise must("transport", "w", "given with separate and only then", None if w is None else "given")
    if (base is not None) is not job.base:
        raise must("transport", "base", "given with the flag base and only then", None if base is None else "given")
    x = _vectors(params, job, "states", states)
    added = x if job.identity else np.zeros_like(x) if base is None else _vectors(params, job, "base", base)
    if x.shape[2] != factors.shape[1] or seconds.shape != factors.shape:
        raise must("transport", "states", f"of width {factors.shape[1]}, as the factors", x.shape)

    h = np.zeros((2, job.tokens, factors.shape[2]), dtype=np.int64)
    for place, slot in enumerate(job.slots):
        projected = np.einsum("tik,ti->tk", (factors, seconds)[slot], x[:, place])
        h[slot] = round_shift(projected, job.project_shift)
    out_of_range = overflows(h, REGISTER_BITS).any()
    h = saturate(h, REGISTER_BITS)
    if job.mode.solves:
        gram = np.einsum("tik,tij->tkj", factors, factors)
        matrix, clipped = gram_words(gram, job.mode, job.unit, job.gram_shift, params.gram_guard)
        result = solve(matrix, h[0], h[1])
        out_of_range |= clipped.any()
    else:
        result = scale(job.mode, job.weights, h[0], h[1])
    error = TransportError.RANGE if out_of_range or result.range.any() else TransportError.NONE
    if result.pivot.any():
        error |= TransportError.PIVOT

    middle = np.stack([(result.plain, result.transposed)[slot] for slot in job.slots], axis=1)
    outputs = np.zeros_like(x)
    saturations = 0
    for place, slot in enumerate(job.slots):
        expanded = np.einsum("tik,tk->ti", (seconds, factors)[slot], middle[:, place])
        exact = round_shift((added[:, place] << params.expand_shift) - expanded, params.expand_shift)
        saturations += int(np.count_nonzero(overflows(exact, STATE_BITS)))
        outputs[:, place] = saturate(exact, STATE_BITS)
    return TransportResult(outputs, middle, min(saturations, 0xFFFF), error)


def transport_passes(
    config: Config,
    job: TransportJob,
    v: ArrayLike,
    states: ArrayLike,
    weights: Sequence[int],
    *,
    w: ArrayLike | None = None,
) -> TransportResult:
    """Any k, ``transport_columns`` at a time: every pass projects the same states and adds to the output so far.

    Parameters
    ----------
    job: of the first pass; its groups, base and weights are those of each pass
    v, w: (n, width, k)
    weights: one a pair of columns, all passes together

    Raises
    ------
    DtpError: a mode that solves, which has one pass; or what :func:`transport` refuses.
    """
    if job.mode.solves:
        raise must("transport_passes", "job.mode", "scale or symplectic, for a solve has one pass", job.mode.name)
    factors = np.asarray(v, dtype=np.int64)
    seconds = None if w is None else np.asarray(w, dtype=np.int64)
    columns = factors.shape[2]
    if len(weights) != -(-columns // 2):
        raise must("transport_passes", "weights", f"one a pair of {columns} columns", len(weights))
    result: TransportResult | None = None
    saturations, error, middles = 0, TransportError.NONE, []
    for first in range(0, columns, config.transport_columns):
        last = min(columns, first + config.transport_columns)
        chosen = tuple(weights[first // 2 : -(-last // 2)])
        one = replace(
            job,
            groups=-(-(last - first) // TILE_COLUMNS),
            identity=job.identity and first == 0,
            base=job.base if first == 0 else True,
            weights=chosen + (0,) * (UNIT_PAIRS - len(chosen)),
        )
        result = transport(
            config,
            one,
            factors[:, :, first:last],
            states,
            w=None if seconds is None else seconds[:, :, first:last],
            base=None if result is None else result.outputs,
        )
        saturations += result.saturations
        error |= result.error
        middles.append(result.middle[:, :, : last - first])
    if result is None:
        raise must("transport_passes", "v", "of shape (n, width, k >= 1)", factors.shape)
    return TransportResult(result.outputs, np.concatenate(middles, axis=2), min(saturations, 0xFFFF), error)


def _padded(config: Config, job: TransportJob, name: str, factors: ArrayLike) -> Int:
    values = np.asarray(factors, dtype=np.int64)
    width, columns = job.words * TransportParams(config).tile_rows, job.groups * TILE_COLUMNS
    if job.mode.solves and values.ndim == 3 and values.shape[2] > MAX_COLUMNS:
        raise must("transport", name, f"of at most {MAX_COLUMNS} columns, for a solve has one pass", values.shape[2])
    if (
        values.ndim != 3
        or len(values) != job.tokens
        or not width - TransportParams(config).tile_rows < values.shape[1] <= width
        or not columns - TILE_COLUMNS < values.shape[2] <= columns
    ):
        rule = f"of shape ({job.tokens}, width, k) in {job.words} words and {job.groups} groups"
        raise must("transport", name, rule, values.shape)
    if overflows(values, config.factor_bits).any():
        raise must("transport", name, f"of {config.factor_bits} bits", int(np.abs(values).max()))
    # Columns up to whole tiles are 0: they add nothing, and G has unit·I or unit·J there.
    return np.pad(values, ((0, 0), (0, 0), (0, columns - values.shape[2])))


def _vectors(params: TransportParams, job: TransportJob, name: str, states: ArrayLike) -> Int:
    values = np.asarray(states, dtype=np.int64)
    if values.ndim != 3 or values.shape[:2] != (job.tokens, len(job.slots)):
        raise must("transport", name, f"of shape ({job.tokens}, {len(job.slots)}, width)", values.shape)
    if overflows(values, STATE_BITS).any():
        raise must("transport", name, f"of {STATE_BITS} bits", int(np.abs(values).max()))
    return values


# ---- columns of the connections ----------------------------------------------------------------------------------


def pair_columns(first: ArrayLike, second: ArrayLike) -> Real:
    """Columns (first_0, second_0, first_1, second_1, …): the pairs of the symplectic form."""
    pairs = np.stack([np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)], axis=-1)
    return np.asarray(pairs.reshape(*pairs.shape[:-2], -1))


def connection_columns(
    a: ArrayLike,
    b: ArrayLike,
    torsion_l: ArrayLike | None = None,
    torsion_r: ArrayLike | None = None,
    gate: float = 0.0,
    *,
    cayley: bool,
) -> tuple[Real, tuple[float, ...]]:
    """V (…, d, k) and the weight of each pair of a connection (…, d, r_T) with optional torsion [SPEC §2].

    Cayley: the gate γ enters the generator, V = [B, |γ|^½ R, A, sgn(γ)|γ|^½ L] by pairs (B, A), (R, L), all weights 1.
    Linear: V = [B, R, A, L], the weight of the torsion's pairs is γ.
    """
    v = pair_columns(b, a)
    weights = (1.0,) * (v.shape[-1] // 2)
    if torsion_l is None or torsion_r is None:
        return v, weights
    root = math.sqrt(abs(gate)) if cayley else 1.0
    sign = math.copysign(1.0, gate) if cayley else 1.0
    torsion = pair_columns(root * np.asarray(torsion_r), sign * root * np.asarray(torsion_l))
    more = (1.0 if cayley else gate,) * (torsion.shape[-1] // 2)
    return np.concatenate([v, torsion], axis=-1), weights + more


def balanced_pairs(v: ArrayLike) -> Real:
    """Columns (…, d, k) with the same V J Vᵀ, in which the two of a pair are orthogonal and of one length.

    Pair (b, a) with Gram matrix g becomes (b, a)·S, S = det(g)^¼ · g^−½, so det S = 1 and S J Sᵀ = J. No other S makes
    the pair shorter, so the numbers to be rounded and the Gram entries are the smallest for the transport. Pairs that
    are parallel to 1e-7 make no transport and become 0.
    """
    real = np.asarray(v, dtype=np.float64)
    pairs = real.reshape(*real.shape[:-1], real.shape[-1] // 2, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    p, r, q = (x.sum(axis=-2) for x in (first * first, second * second, first * second))
    trace, root = p + r, np.sqrt(np.maximum(p * r - q * q, 0.0))
    there = root > _PARALLEL * trace
    safe = np.where(there, root, 1.0)
    gain = np.where(there, 1 / np.sqrt(safe * (np.where(there, trace, 0.0) + 2 * safe)), 0.0)
    turned = [first * (r + root)[..., None, :] - second * q[..., None, :]]
    turned.append(second * (p + root)[..., None, :] - first * q[..., None, :])
    return np.asarray(np.stack([gain[..., None, :] * x for x in turned], axis=-1).reshape(real.shape))


# ---- quantisation ------------------------------------------------------------------------------------------------


def quantise_state(x: ArrayLike, *, headroom_bits: int = 0) -> tuple[Int, float]:
    """16-bit states whose norm (last axis) is at most 2^(15 − headroom) − 1, and the real value of one unit.

    No orthogonal map of such a state leaves 16 bits.
    """
    values = np.asarray(x, dtype=np.float64)
    largest = float(np.sqrt((values**2).sum(axis=-1)).max(initial=0.0))
    unit = (largest or 1.0) / ((1 << (STATE_BITS - 1 - headroom_bits)) - 1)
    # Half a unit a lane is left for the rounding.
    unit *= 1 + math.sqrt(values.shape[-1]) / 2.0 ** (STATE_BITS - headroom_bits)
    return np.rint(values / unit).astype(np.int64), unit


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantisedFactors:
    """Integers of the factors, the real value of one unit of each, and the numbers of the job.

    ``headroom_bits``: what states have to leave free, see :func:`quantise_state`.
    """

    v: Int
    w: Int | None = None
    v_scale: float
    w_scale: float
    project_shift: int
    gram_shift: int = 0
    unit: int = 0
    weights: tuple[int, ...] = ()
    headroom_bits: int = 0

    def job(
        self,
        config: Config,
        mode: MiddleMode,
        *,
        transposed: bool = False,
        both: bool = False,
        identity: bool = True,
        tag: int = 0,
    ) -> TransportJob:
        """The job of these factors, first pass."""
        tokens, width, columns = self.v.shape
        columns = min(columns, config.transport_columns)
        weights = self.weights[:UNIT_PAIRS]
        return TransportJob(
            mode=mode,
            tokens=tokens,
            words=-(-width // TransportParams(config).tile_rows),
            groups=-(-columns // TILE_COLUMNS),
            plain=both or not transposed,
            transposed=both or transposed,
            separate=self.w is not None,
            identity=identity,
            project_shift=self.project_shift,
            gram_shift=self.gram_shift,
            unit=self.unit,
            weights=weights + (0,) * (UNIT_PAIRS - len(weights)),
            tag=tag,
        )


def quantise_solve(config: Config, mode: MiddleMode, v: ArrayLike) -> QuantisedFactors:
    """Factors (n, width, k) of a Woodbury or Cayley transport, real, in integers with exact scales.

    Pairs of a Cayley transport are balanced first (:func:`balanced_pairs`). ``unit`` is as large as the largest entry
    of G, doubled for the elimination, and the largest projection of a state leave room for, and at most 2^16; the scale
    of V is a hair larger than its largest number asks for, so that the power of two between VᵀV and unit is exact.
    For columns much longer than 1 that can leave a ``unit`` too small for the inverse of a pivot; then states have
    headroom, or the scale is up to √2 larger, where that helps.

    Raises
    ------
    DtpError: a mode without a solve, more than 8 columns, or factors too large or small for the shifts.
    """
    if not mode.solves:
        raise must("quantise_solve", "mode", "woodbury or cayley", mode.name)
    real = np.asarray(v, dtype=np.float64)
    if real.ndim != 3 or real.shape[2] > min(MAX_COLUMNS, config.transport_columns):
        raise must("quantise_solve", "v", f"of shape (n, width, k <= {config.transport_columns})", real.shape)
    if mode is MiddleMode.CAYLEY:
        if real.shape[2] % 2:
            raise must("quantise_solve", "v", "of pairs of columns in mode cayley", real.shape)
        real = balanced_pairs(real)
    choices = ((wide, headroom) for wide in (False, True) for headroom in range(_MAX_HEADROOM + 1))
    made = (_solve_factors(config, mode, real, *choice) for choice in choices)
    first = next(made)
    return next((factors for factors in chain([first], made) if factors.unit >= LEAST_UNIT), first)


def _solve_factors(config: Config, mode: MiddleMode, real: Real, wide: bool, headroom_bits: int) -> QuantisedFactors:
    """``wide``: the scale of V is so much larger that ``unit`` is as large as G leaves room for."""
    params = TransportParams(config)
    half = 0.5 if mode is MiddleMode.CAYLEY else 1.0
    largest = float(np.abs(real).max(initial=0.0)) or 1.0
    diagonal = 1 + half * float((real**2).sum(axis=1).max(initial=0.0))
    limit = min(1 << 16, int((1 << (REGISTER_BITS - 2)) / diagonal))
    smallest = largest / ((1 << (config.factor_bits - 1)) - 1)
    if wide:
        smallest = math.sqrt(2.0 ** math.ceil(math.log2(half * smallest**2 * max(limit, 1))) / (half * max(limit, 1)))
        smallest *= 1 + 1e-9
    # half · s² · unit = 2^power; a projection is shifted by room − power.
    power = math.floor(math.log2(half * smallest**2 * max(limit, 1)))
    room = PRODUCT_SHIFT - params.expand_shift - (1 if mode is MiddleMode.CAYLEY else 0)
    norm = float(np.sqrt((real**2).sum(axis=1)).max(initial=0.0)) / smallest * 2.0 ** (STATE_BITS - 1 - headroom_bits)
    power = min(power, room - math.ceil(math.log2(max(1.0, norm) / ((1 << (REGISTER_BITS - 1)) - 1))))
    unit = math.floor(2.0**power / (half * smallest**2))
    v_scale = math.sqrt(2.0**power / (half * max(unit, 1)))
    gram_shift = params.gram_guard - power
    project_shift = room - power
    for name, value in (("gram_shift", gram_shift), ("project_shift", project_shift)):
        if not 0 <= value <= _SHIFT_MAX:
            raise must("quantise_solve", "v", f"of a size that gives a {name} in 0…{_SHIFT_MAX}", value)
    return QuantisedFactors(
        v=np.rint(real / v_scale).astype(np.int64),
        v_scale=v_scale,
        w_scale=v_scale,
        project_shift=project_shift,
        gram_shift=gram_shift,
        unit=unit,
        headroom_bits=headroom_bits,
    )


def quantise_linear(
    config: Config,
    mode: MiddleMode,
    v: ArrayLike,
    weights: Sequence[float],
    *,
    w: ArrayLike | None = None,
    state_norm: float = float(1 << (STATE_BITS - 1)),
) -> QuantisedFactors:
    """Factors (n, width, k) of y = x + W diag(weights) Vᵀ x (scale) or x + V diag(weights) J Vᵀ x (symplectic), real.

    Parameters
    ----------
    weights: one a pair of columns
    w: like v, None for the same
    state_norm: largest norm of an integer state

    Raises
    ------
    DtpError: a mode that solves, or weights that the states' size leaves no room for.
    """
    if mode.solves:
        raise must("quantise_linear", "mode", "scale or symplectic", mode.name)
    params = TransportParams(config)
    limit = (1 << (config.factor_bits - 1)) - 1
    real = [np.asarray(x, dtype=np.float64) for x in ((v,) if w is None else (v, w))]
    scales = [(float(np.abs(x).max(initial=0.0)) or 1.0) / limit for x in real]
    integers = [np.rint(x / unit).astype(np.int64) for x, unit in zip(real, scales, strict=True)]
    norm = max(float(np.sqrt((x.astype(np.float64) ** 2).sum(axis=1)).max(initial=0.0)) for x in integers)
    shift = max(0, math.ceil(math.log2(max(1.0, norm * state_norm) / ((1 << (REGISTER_BITS - 1)) - 1))))
    sign = 1.0 if mode is MiddleMode.SYMPLECTIC else -1.0
    factor = sign * scales[0] * scales[-1] * 2.0 ** (PRODUCT_SHIFT + params.expand_shift + shift)
    words = tuple(round(factor * weight) for weight in weights)
    low, high = signed_range(REGISTER_BITS)
    if words and not low <= min(words) <= max(words) <= high:
        rule = f"small enough for a weight in {low}…{high}: a smaller state_norm, or smaller factors"
        raise must("quantise_linear", "weights", rule, max(words, key=abs))
    return QuantisedFactors(
        v=integers[0],
        w=None if w is None else integers[1],
        v_scale=scales[0],
        w_scale=scales[-1],
        project_shift=shift,
        weights=words,
    )


# ---- the byte stream ---------------------------------------------------------------------------------------------


def word_beats(bits: int, beat_bytes: int) -> int:
    """Beats of a word of ``bits``."""
    return -(-bits // (8 * beat_bytes))


def pack_job(
    config: Config,
    job: TransportJob,
    v: ArrayLike,
    states: ArrayLike,
    *,
    w: ArrayLike | None = None,
    base: ArrayLike | None = None,
) -> Bytes:
    """Input beats of ``Transport``, uint8 (n, input_bytes)."""
    job.check(config)
    flags = sum(
        bit << n
        for n, bit in enumerate((job.plain, job.transposed, job.separate, job.identity, job.base, job.groups == 2))
    )
    descriptor = struct.pack(
        "<HBBHHBBHi4i", JOB_MAGIC, job.mode, flags, job.tokens - 1, job.words - 1, job.project_shift, job.gram_shift,
        job.tag, job.unit, *job.weights,
    )  # fmt: skip
    size = config.input_bytes
    parts = [_beats(descriptor, size)]
    factors = factor_words(config, job, v, w)
    words = state_words(config, job, states, base)
    for token in range(job.tokens):
        parts += [_beats(word.tobytes(), size) for word in factors[token]]
        parts += [_beats(word.tobytes(), size) for word in words[token]]
    return np.concatenate(parts)


def factor_words(
    config: Config, job: TransportJob, v: ArrayLike, w: ArrayLike | None = None
) -> NDArray[np.signedinteger]:
    """(n, factor words, lanes) in the order of the stream."""
    parts = [_padded(config, job, "v", v)] + ([] if w is None else [_padded(config, job, "w", w)])
    rows = TransportParams(config).tile_rows
    tiles = []
    for part in parts:
        full = np.pad(part, ((0, 0), (0, job.words * rows - part.shape[1]), (0, 0)))
        tile = full.reshape(job.tokens, job.words, rows, job.groups, TILE_COLUMNS).transpose(0, 1, 3, 2, 4)
        tiles.append(tile.reshape(job.tokens, job.words * job.groups, -1))
    return np.concatenate(tiles, axis=1).astype("<i1" if config.factor_bits == 8 else "<i2")


def state_words(
    config: Config, job: TransportJob, states: ArrayLike, base: ArrayLike | None = None
) -> NDArray[np.signedinteger]:
    """(n, state words, lanes) in the order of the stream; a slot out of use is 0 where a word has both."""
    params = TransportParams(config)
    rows = params.tile_rows
    parts = []
    for name, values in (("states", states), ("base", base)):
        if values is None:
            continue
        x = _vectors(params, job, name, values)
        full = np.pad(x, ((0, 0), (0, 0), (0, job.words * rows - x.shape[2])))
        if params.vectors == 2:
            both = np.zeros((job.tokens, 2, full.shape[2]), dtype=np.int64)
            both[:, list(job.slots)] = full
            full = both
        words = full.reshape(job.tokens, full.shape[1], job.words, rows).transpose(0, 2, 1, 3)
        parts.append(words.reshape(job.tokens, -1, params.vectors * rows))
    return np.concatenate(parts, axis=1).astype("<i2")


def output_words(config: Config, job: TransportJob, outputs: ArrayLike) -> NDArray[np.signedinteger]:
    """(n, output words, lanes) in the order in which they leave."""
    return state_words(config, replace(job, base=False), outputs)


def pack_outputs(config: Config, job: TransportJob, result: TransportResult) -> Bytes:
    """Output beats of ``Transport``, uint8 (n, output_bytes), the status record included."""
    size = config.output_bytes
    words = output_words(config, job, result.outputs)
    parts = [_beats(word.tobytes(), size) for token in words for word in token]
    return np.concatenate([*parts, status_beats(config, job.tag, result.error, result.saturations)])


def status_beats(config: Config, tag: int, error: TransportError, saturations: int) -> Bytes:
    """Beats of a status record."""
    return _beats(struct.pack("<HBBHH", STATUS_MAGIC, error, 0, saturations, tag), config.output_bytes)


def _beats(data: bytes, size: int) -> Bytes:
    return np.frombuffer(data + bytes(-len(data) % size), dtype=np.uint8).reshape(-1, size)
