"""Holonomy: energies of loops of transports, by block sums for all pairs and by loop programs [GR §5.3, §9.1, SPEC §4].

Contract in ``docs/holonomy.md``. The *field* turns the relative transports u_t = P′_tᵀ P_t z of a head pair into a
score for every pair of blocks, through the identity

    Σ_{i in I, j in J} ‖u_i − u_j‖² = n_J Σ_I ‖u‖² + n_I Σ_J ‖u‖² − 2 S_I · S_J,

a sum of squares on the left, sums of blocks on the right. *Loop accounts* take start and end vector of loops and keep
energies, tables and a histogram. Integers only; floats belong to :mod:`dtp.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from dtp.array import MULTIPLIER_CYCLES
from dtp.config import REGISTER_BITS, Config
from dtp.errors import must
from dtp.fixed import Int, round_shift, signed_range
from dtp.solve import MiddleMode
from dtp.transport import STATE_BITS, QuantisedFactors, TransportParams, transport

SCORE_BITS: Final = 16
"""A block score is u2f14."""
SCORE_FRACTION_BITS: Final = 14
RECIPROCAL_BITS: Final = 17
"""Bits of R_c, unsigned; a multiplier takes 18 signed ones."""
SCALE_LIMIT_BITS: Final = 34
"""D_c · 2^s_c lies in (2^33, 2^34]; H has as many bits, two operands of 17."""
NUMERATOR_SHIFT: Final = 2
"""H = round_shift(N · 2^s_c, 2): 4.0, the end of the scores, becomes 2^34."""
TURNAROUND_CYCLES: Final = 4
"""From the read of a block sum to the first read that sees it written back: a token takes no fewer steps."""
SHIFT_LIMIT: Final = 15
"""Largest s_c."""
CASES: Final = 3
"""0, 1 or 2 blocks of a pair are the last of the head, which may be ragged."""
PROBE_ENERGY_BITS: Final = 2 * (STATE_BITS - 1)
"""Z is at most 2^30."""

RATIO_BITS: Final = 32
"""A loop's ratio is u8f24."""
RATIO_FRACTION_BITS: Final = 24
SUM_BITS: Final = 48
"""Sums of ratios in the tables."""
COUNT_BITS: Final = 16
ENTRY_CYCLES: Final = 4
"""Cycles in which an entry of a table is read, changed and written."""
BINS: Final = 32
"""Of the histogram; by the bit length of the ratio."""


class PairMode(StrEnum):
    """How the pairs of heads give the score table of one head."""

    NEXT = "next"
    """The pair (H, H + 1) alone."""
    MEAN = "mean"
    """The mean of (H − 1, H) and (H, H + 1), rounded half up."""


class ReportKind(IntEnum):
    """What a beat of the loop accounts' output reports."""

    LOOP = 0
    HEAD = 1
    BLOCK = 2
    BIN = 3


class LoopError(IntEnum):
    """Codes of the loop accounts' sticky error."""

    NONE = 0
    CREDIT = 1
    """A head or block that is not there; the loop is not credited to it."""
    LENGTH = 2
    """A vector longer than ``max_lanes``; the words past it are dropped."""
    SEQUENCE = 3
    """A step that begins a loop within another, or goes on with none; it counts as the next of the loop."""


class FieldError(IntEnum):
    """Codes of the field's sticky error."""

    NONE = 0
    EARLY = 1
    LATE = 2
    JOB = 3


def _power_of_two(owner: str, name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high or value & (value - 1):
        raise must(owner, name, f"a power of two in {low}…{high}", value)


@dataclass(frozen=True)
class FieldParams:
    """Sizes and derived widths of the field.

    Parameters
    ----------
    lanes: lanes of an input word, as the transport engine gives them
    multipliers: products a cycle, at most ``lanes``
    block: tokens of a block
    max_tokens: longest head
    max_lanes: lanes of the longest vector u_t, all probes together

    Raises
    ------
    DtpError: a value outside the rules.
    """

    lanes: int
    multipliers: int
    block: int
    max_tokens: int
    max_lanes: int

    def __post_init__(self) -> None:
        _power_of_two("FieldParams", "block", self.block, 4, 64)
        _power_of_two("FieldParams", "lanes", self.lanes, 2, 256)
        _power_of_two("FieldParams", "multipliers", self.multipliers, 2, self.lanes)
        _power_of_two("FieldParams", "max_tokens", self.max_tokens, self.block, 4096)
        _power_of_two("FieldParams", "max_lanes", self.max_lanes, self.lanes, 1024)
        if self.max_lanes < TURNAROUND_CYCLES * self.multipliers:
            least = TURNAROUND_CYCLES * self.multipliers
            raise must(
                "FieldParams", "max_lanes", f"at least {TURNAROUND_CYCLES} · multipliers = {least}", self.max_lanes
            )

    @classmethod
    def of(cls, config: Config, *, multipliers: int, probes: int = 1) -> FieldParams:
        """The field behind the transport engine of a configuration, for up to ``probes`` probes of the widest head."""
        lanes = TransportParams(config).tile_rows
        longest = 1 << (config.max_width * probes - 1).bit_length()
        return cls(lanes, multipliers, config.block, config.max_tokens, longest)

    @property
    def block_bits(self) -> int:
        """log2 of the block."""
        return self.block.bit_length() - 1

    @property
    def field_shift(self) -> int:
        """Bits of a lane below those that a sum of a block can keep in one multiplier operand."""
        return max(0, STATE_BITS + self.block_bits - REGISTER_BITS)

    @property
    def u_bits(self) -> int:
        """Bits of a lane of u'."""
        return STATE_BITS - self.field_shift

    @property
    def sum_bits(self) -> int:
        """Bits of a lane of S."""
        return self.u_bits + self.block_bits

    @property
    def energy_bits(self) -> int:
        """Unsigned bits of E: block · max_lanes squares of at most 2^(2·u_bits − 2)."""
        return (self.block * self.max_lanes << (2 * self.u_bits - 2)).bit_length()

    @property
    def gram_bits(self) -> int:
        """Signed bits of S_I · S_J."""
        return (self.max_lanes << (2 * self.sum_bits - 2)).bit_length() + 1

    @property
    def numerator_bits(self) -> int:
        """Unsigned bits of N and of both terms that it is the difference of: block² · lanes · (2^u_bits)²."""
        return (self.block * self.block * self.max_lanes << (2 * self.u_bits)).bit_length()

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest head."""
        return self.max_tokens // self.block

    @property
    def max_words(self) -> int:
        """Words of the longest vector."""
        return self.max_lanes // self.lanes

    @property
    def word_steps(self) -> int:
        """Cycles of the multipliers for a word."""
        return self.lanes // self.multipliers

    @property
    def min_words(self) -> int:
        """Words of the shortest vector: :data:`TURNAROUND_CYCLES` steps."""
        return -(-TURNAROUND_CYCLES // self.word_steps)

    @property
    def max_steps(self) -> int:
        """Cycles of the multipliers for a score of the longest vectors."""
        return self.max_lanes // self.multipliers

    @property
    def weight_steps(self) -> int:
        """Cycles that n_J E_I + n_I E_J takes: two for every bit of a block's size."""
        return 2 * (self.block_bits + 1)

    @property
    def tree_cycles(self) -> int:
        """From the products of a cycle to their sum: a register every two levels of adders."""
        return -(-(self.multipliers.bit_length() - 1) // 2)

    @property
    def product_cycles(self) -> int:
        """From the issue of a step to the products' sum: memory, its register, multiplier, tree."""
        return 2 + MULTIPLIER_CYCLES + self.tree_cycles

    @property
    def result_cycles(self) -> int:
        """From the issue of a score's last product to the score on the output: products, their sum, rounding."""
        return 2 + MULTIPLIER_CYCLES + 2


@dataclass(frozen=True)
class FieldJob:
    """One head pair: sizes and the constants of its normalisation.

    Parameters
    ----------
    tokens: n
    words: words of a token's vector
    causal: rows end at the diagonal
    shifts, reciprocals: s_c and R_c by the number c of last blocks in a pair; all equal where the last is whole
    """

    tokens: int
    words: int
    causal: bool
    shifts: tuple[int, int, int]
    reciprocals: tuple[int, int, int]

    @classmethod
    def of(cls, params: FieldParams, *, tokens: int, words: int, probe_energy: int, causal: bool) -> FieldJob:
        """The job of a probe with ``probe_energy`` Z.

        Raises
        ------
        DtpError: sizes that the unit has not, an energy beyond 2^30, or too small to normalise with.
        """
        if not 1 <= tokens <= params.max_tokens:
            raise must("FieldJob", "tokens", f"in 1…{params.max_tokens}", tokens)
        if not params.min_words <= words <= params.max_words:
            raise must("FieldJob", "words", f"in {params.min_words}…{params.max_words}", words)
        if not 1 <= probe_energy <= 1 << PROBE_ENERGY_BITS:
            raise must("FieldJob", "probe_energy", f"in 1…2^{PROBE_ENERGY_BITS}", probe_energy)
        tail = tokens % params.block
        shifts, reciprocals = [], []
        for case in range(CASES):
            # D_c = weight · 2^(−2·field_shift).
            weight = params.block ** (2 - case) * (tail or params.block) ** case * probe_energy
            shift = SCALE_LIMIT_BITS + 2 * params.field_shift - (weight - 1).bit_length()
            if shift > SHIFT_LIMIT:
                least = probe_energy << (shift - SHIFT_LIMIT)
                raise must("FieldJob", "probe_energy", f"at least about {least}: scale the probe up", probe_energy)
            numerator, denominator = 1 << (50 + 2 * params.field_shift), weight << shift
            reciprocal = (2 * numerator + denominator) // (2 * denominator)
            shifts.append(shift)
            reciprocals.append(min(reciprocal, (1 << RECIPROCAL_BITS) - 1))
        return cls(tokens, words, causal, tuple(shifts), tuple(reciprocals))


@dataclass(frozen=True)
class BlockSums:
    """What a head pair's field is reduced to.

    Parameters
    ----------
    sums: S, (blocks, lanes)
    energies: E, (blocks,)
    sizes: n, (blocks,)
    """

    sums: Int
    energies: Int
    sizes: Int


def relative_transports(
    config: Config, first: QuantisedFactors, second: QuantisedFactors, probe: ArrayLike
) -> tuple[Int, int]:
    """u_t = P′_tᵀ P_t z of every token, (tokens, d), by the engine's golden model, and how many lanes saturated.

    Parameters
    ----------
    first, second: Cayley factors of the tokens in the heads H and H′
    probe: z, (d,) of 16 bits

    Raises
    ------
    DtpError: what :func:`dtp.transport.transport` refuses.
    """
    tokens = len(first.v)
    states = np.repeat(np.asarray(probe, dtype=np.int64)[None, None], tokens, axis=0)
    there = transport(config, first.job(config, MiddleMode.CAYLEY), first.v, states)
    back = transport(config, second.job(config, MiddleMode.CAYLEY, transposed=True), second.v, there.outputs)
    return back.outputs[:, 0], there.saturations + back.saturations


def block_sums(u: ArrayLike, params: FieldParams) -> BlockSums:
    """S, E and n of the vectors u, (tokens, lanes of all probes) of 16 bits.

    Raises
    ------
    DtpError: a shape or a value that the unit cannot take.
    """
    vectors = np.asarray(u, dtype=np.int64)
    if vectors.ndim != 2 or not 1 <= len(vectors) <= params.max_tokens:
        raise must("block_sums", "u", f"of shape (1…{params.max_tokens}, lanes)", vectors.shape)
    if vectors.shape[1] % params.lanes or not 1 <= vectors.shape[1] <= params.max_lanes:
        rule = f"of a multiple of {params.lanes} and at most {params.max_lanes} lanes"
        raise must("block_sums", "u", rule, vectors.shape[1])
    low, high = signed_range(STATE_BITS)
    for value in vectors[(vectors < low) | (vectors > high)][:1]:
        raise must("block_sums", "u", f"in {low}…{high}", int(value))
    kept = vectors >> params.field_shift
    starts = np.arange(0, len(kept), params.block)
    sizes = np.diff(np.append(starts, len(kept)))
    energies = np.add.reduceat((kept * kept).sum(axis=1), starts)
    return BlockSums(np.add.reduceat(kept, starts, axis=0), energies, sizes)


def numerators(blocks: BlockSums) -> Int:
    """N of every pair of blocks, (blocks, blocks): exact, never negative."""
    gram = blocks.sums @ blocks.sums.T
    weighted = np.outer(blocks.energies, blocks.sizes)
    return np.asarray(weighted + weighted.T - 2 * gram, dtype=np.int64)


def block_scores(blocks: BlockSums, job: FieldJob, params: FieldParams) -> Int:
    """Score table of a head pair, (blocks, blocks) u2f14; with ``causal`` the blocks past the diagonal are 0.

    Raises
    ------
    DtpError: a job of another number of tokens.
    """
    if job.tokens != int(blocks.sizes.sum()):
        raise must("block_scores", "job.tokens", f"{int(blocks.sizes.sum())}, as many as the sums have", job.tokens)
    last = (np.arange(len(blocks.sizes)) == len(blocks.sizes) - 1).astype(np.int64)
    case = last[:, None] + last[None, :]
    shift = np.asarray(job.shifts, dtype=np.int64)[case]
    limit = (1 << SCALE_LIMIT_BITS) - 1
    exact = numerators(blocks)
    # N · 2^s has at most 58 bits.
    high = np.minimum(round_shift(exact << shift, NUMERATOR_SHIFT), limit)
    factor = np.asarray(job.reciprocals, dtype=np.int64)[case]
    scores = np.minimum(round_shift(high * factor, SCALE_LIMIT_BITS), (1 << SCORE_BITS) - 1)
    return np.tril(scores) if job.causal else scores


def combine_pairs(tables: ArrayLike, mode: PairMode) -> Int:
    """Score tables of the heads, (H, blocks, blocks), from those of the pairs (H, H + 1 cyclic).

    Raises
    ------
    DtpError: another shape.
    """
    pairs = np.asarray(tables, dtype=np.int64)
    if pairs.ndim != 3 or pairs.shape[1] != pairs.shape[2]:
        raise must("combine_pairs", "tables", "of shape (H, blocks, blocks)", pairs.shape)
    if mode is PairMode.NEXT:
        return pairs
    return round_shift(np.roll(pairs, 1, axis=0) + pairs, 1)


# ---- loop programs: accounts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoopParams:
    """Sizes of the loop accounts.

    Parameters
    ----------
    lanes: lanes of a word of start and end vector
    multipliers: squares a cycle, a divisor of ``lanes``
    max_lanes: lanes of the longest vector
    heads: entries of the table by head
    blocks: blocks along one side; the table by block has blocks² entries

    Raises
    ------
    DtpError: a value outside the rules.
    """

    lanes: int
    multipliers: int
    max_lanes: int
    heads: int
    blocks: int

    def __post_init__(self) -> None:
        _power_of_two("LoopParams", "lanes", self.lanes, 1, 256)
        _power_of_two("LoopParams", "multipliers", self.multipliers, 1, self.lanes)
        _power_of_two("LoopParams", "max_lanes", self.max_lanes, self.lanes, 1024)
        _power_of_two("LoopParams", "blocks", self.blocks, 1, 256)
        if not 1 <= self.heads <= 256:
            raise must("LoopParams", "heads", "in 1…256", self.heads)

    @classmethod
    def of(cls, config: Config, *, multipliers: int, heads: int) -> LoopParams:
        """Accounts behind the transport engine of a configuration."""
        lanes = TransportParams(config).tile_rows
        longest = max(lanes, 1 << (config.transport_width - 1).bit_length())
        return cls(lanes, multipliers, longest, heads, config.max_blocks)

    @property
    def energy_bits(self) -> int:
        """Unsigned bits of the three energies: the difference of two lanes has 17 bits."""
        return (self.max_lanes << (2 * STATE_BITS)).bit_length()

    @property
    def max_words(self) -> int:
        """Words of the longest vector."""
        return self.max_lanes // self.lanes

    @property
    def word_cycles(self) -> int:
        """Cycles of the multipliers for the three squares of each lane of a word."""
        return 3 * self.lanes // self.multipliers

    @property
    def entries(self) -> int:
        """Entries of all tables: heads, blocks, bins, in this order."""
        return self.heads + self.blocks**2 + BINS

    # Schedule, in cycles

    @property
    def tree_cycles(self) -> int:
        """From the products of a cycle to their sum: a register every two levels of adders."""
        return -(-(self.multipliers.bit_length() - 1) // 2)

    @property
    def energy_cycles(self) -> int:
        """From the last cycle of a loop's last word to the first in which its energies stand."""
        return 2 + MULTIPLIER_CYCLES + self.tree_cycles

    @property
    def ratio_cycles(self) -> int:
        """Divisor, then one cycle a bit of the ratio and of its overflow."""
        return 2 + RATIO_BITS + 1

    @property
    def update_cycles(self) -> int:
        """Two heads, block and bin, each read, changed and written."""
        return 4 * ENTRY_CYCLES


@dataclass(frozen=True)
class LoopHeader:
    """Where a loop is credited, and whether its state saturated on the way.

    Parameters
    ----------
    tag: number of the loop
    heads: none, one or two different heads
    block: (I, J)
    """

    tag: int
    heads: tuple[int, ...]
    block: tuple[int, int]


@dataclass(frozen=True)
class LoopRecord:
    """One loop's result; energies in squares of the state's last place, ``ratio`` u8f24."""

    tag: int
    start: int
    end: int
    difference: int
    ratio: int
    saturated: bool

    @property
    def bin(self) -> int:
        """Its bin of the histogram."""
        return min(BINS - 1, self.ratio.bit_length())


@dataclass
class Table:
    """Sum, maximum and count of ratios, one entry a head or a block."""

    sums: Int
    maxima: Int
    counts: Int

    @classmethod
    def empty(cls, entries: int) -> Table:
        """All zero."""
        return cls(*(np.zeros(entries, dtype=np.int64) for _ in range(3)))

    def add(self, entry: int, ratio: int) -> None:
        """One loop; no effect on a full entry."""
        if self.counts[entry] == (1 << COUNT_BITS) - 1:
            return
        self.sums[entry] += ratio
        self.maxima[entry] = max(int(self.maxima[entry]), ratio)
        self.counts[entry] += 1


@dataclass
class LoopAccounts:
    """Records, tables and histogram of a program.

    Parameters
    ----------
    params: sizes
    floor: least start energy that a difference is divided by, an integer of at least 1
    """

    params: LoopParams
    floor: int
    records: list[LoopRecord] = field(init=False, default_factory=list)
    heads: Table = field(init=False)
    blocks: Table = field(init=False)
    bins: Int = field(init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.floor < 1 << 32:
            raise must("LoopAccounts", "floor", "in 1…2^32 − 1", self.floor)
        self.heads = Table.empty(self.params.heads)
        self.blocks = Table.empty(self.params.blocks**2)
        self.bins = np.zeros(BINS, dtype=np.int64)

    def add(self, header: LoopHeader, start: ArrayLike, end: ArrayLike, *, saturated: bool) -> LoopRecord:
        """Account for a loop that began at ``start`` and came back as ``end``.

        Raises
        ------
        DtpError: vectors of different or too many lanes, values beyond 16 bits, a head or block that is not there.
        """
        p = self.params
        first, last = np.asarray(start, dtype=np.int64), np.asarray(end, dtype=np.int64)
        low, high = signed_range(STATE_BITS)
        for name, vector in (("start", first), ("end", last)):
            if vector.ndim != 1 or not 1 <= len(vector) <= p.max_lanes or len(vector) != len(first):
                raise must("LoopAccounts", name, f"of shape (lanes,), at most {p.max_lanes}", vector.shape)
            for value in vector[(vector < low) | (vector > high)][:1]:
                raise must("LoopAccounts", name, f"in {low}…{high}", int(value))
        for head in header.heads:
            if not 0 <= head < p.heads:
                raise must("LoopHeader", "heads", f"in 0…{p.heads - 1}", head)
        if len(set(header.heads)) != len(header.heads) or len(header.heads) > 2:
            raise must("LoopHeader", "heads", "at most two different ones", header.heads)
        for block in header.block:
            if not 0 <= block < p.blocks:
                raise must("LoopHeader", "block", f"in 0…{p.blocks - 1}", block)
        before, after, difference = (int((v * v).sum()) for v in (first, last, last - first))
        ratio = (difference << RATIO_FRACTION_BITS) // max(before, self.floor)
        ratio = min(ratio, (1 << RATIO_BITS) - 1)
        record = LoopRecord(header.tag, before, after, difference, ratio, saturated)
        self.records.append(record)
        for head in header.heads:
            self.heads.add(head, ratio)
        self.blocks.add(header.block[0] * p.blocks + header.block[1], ratio)
        if self.bins[record.bin] < (1 << COUNT_BITS) - 1:
            self.bins[record.bin] += 1
        return record
