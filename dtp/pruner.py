"""Sparse-transport pruner: scores of blocks to masks of kept blocks, head by head [GR §10.2, SPEC §6].

The contract is ``docs/pruner.md``. Scores are unsigned integers, lower is better; a head's table has a score for every
(query block, key block). :class:`PrunerSettings` is what a user chooses, :class:`HeadCommand` what the hardware is told
for one head, :class:`GoldenPruner` what it answers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtp.config import Config
from dtp.errors import must
from dtp.fixed import Int, round_shift

SCORE_BITS: Final = 16
"""A block score is u2f14."""
SCORE_FRACTION_BITS: Final = 14
WEIGHT_BITS: Final = 4
"""Fraction of the weight of a blend: finer differences belong into the scores of the table port."""
STEP_BITS: Final = 6
"""Fraction of the step of an average."""
COUNT_BITS: Final = 16
"""Bits of the count of skipped heads, which stops at its largest value."""
ADDERS_A_STAGE: Final = 3
"""Additions between two registers of a blend."""

Bool = NDArray[np.bool_]


class Source(IntEnum):
    """Where scores come from: a bit for each stream."""

    HOLONOMY = 1
    TABLE = 2
    BOTH = 3


class Aggregation(IntEnum):
    """How scores of several runs become one."""

    NONE = 0
    MAXIMUM = 1
    MEAN = 2
    MOVING_AVERAGE = 3


class Gate(IntEnum):
    """How blocks of a row are chosen."""

    THRESHOLD = 0
    BUDGET = 1


class Band(IntEnum):
    """Which score of a head must lie in the band."""

    NONE = 0
    MEAN = 1
    MAXIMUM = 2


class PrunerError(IntEnum):
    """Codes of a report; the first that applies counts."""

    NONE = 0
    BLOCKS = 1
    SOURCE = 2
    BUDGET = 3
    THRESHOLDS = 4
    BAND = 5
    SHORT = 6
    LONG = 7


@dataclass(frozen=True)
class PrunerParams:
    """Sizes and schedule of the pruner.

    Parameters
    ----------
    max_blocks: rows and columns of the largest head, a power of two
    heads: heads that the table has room for, a power of two
    lanes: scores of a row compared in a cycle, a power of two
    score_bits: bits of a score
    weight_bits: fraction bits of the weight of a blend
    step_bits: fraction bits of the step of an average

    Raises
    ------
    DtpError: a value outside the rules below
    """

    max_blocks: int
    heads: int
    lanes: int
    score_bits: int
    weight_bits: int
    step_bits: int

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for field in fields(self):
            if type(getattr(self, field.name)) is not int:
                raise must(owner, field.name, "an integer", getattr(self, field.name))
        for name, low, high in (
            ("max_blocks", 2, 256), ("heads", 1, 256), ("lanes", 1, 64), ("score_bits", 2, 16), ("weight_bits", 2, 12),
            ("step_bits", 2, 12),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise must(owner, name, f"from {low} to {high}", getattr(self, name))
        for name in ("max_blocks", "heads", "lanes"):
            if getattr(self, name) & (getattr(self, name) - 1):
                raise must(owner, name, "a power of two", getattr(self, name))
        if self.lanes > self.max_blocks:
            raise must(owner, "lanes", f"at most max_blocks {self.max_blocks}", self.lanes)

    @classmethod
    def of(cls, config: Config, *, heads: int, lanes: int) -> PrunerParams:
        """The pruner beside a tile."""
        return cls(
            max_blocks=config.max_blocks, heads=heads, lanes=lanes, score_bits=SCORE_BITS, weight_bits=WEIGHT_BITS,
            step_bits=STEP_BITS,
        )  # fmt: skip

    # Sizes

    @property
    def max_score(self) -> int:
        """The largest score: the threshold that every block passes."""
        return (1 << self.score_bits) - 1

    @property
    def index_bits(self) -> int:
        """Bits of a row or column."""
        return (self.max_blocks - 1).bit_length()

    @property
    def count_bits(self) -> int:
        """Bits of a number of blocks in a row."""
        return self.max_blocks.bit_length()

    @property
    def area_bits(self) -> int:
        """Bits of a number of blocks in a head."""
        return (self.max_blocks * self.max_blocks).bit_length()

    @property
    def head_bits(self) -> int:
        """Bits of ``head`` in a command."""
        return (self.heads - 1).bit_length()

    @property
    def words(self) -> int:
        """Reads of ``lanes`` scores that the longest row takes."""
        return self.max_blocks // self.lanes

    @property
    def sum_bits(self) -> int:
        """Signed bits of the sum of all differences between a bound and a score of a head."""
        return self.score_bits + self.area_bits + 1

    # Schedule, in cycles

    @staticmethod
    def blend_cycles(weight_bits: int) -> int:
        """From two scores to their blend: difference, then :data:`ADDERS_A_STAGE` additions a cycle."""
        return 1 - (-weight_bits // ADDERS_A_STAGE)

    @property
    def combine_cycles(self) -> int:
        """From the acceptance of a score to the combined one: port register, blend."""
        return 1 + self.blend_cycles(self.weight_bits)

    @property
    def aggregate_cycles(self) -> int:
        """From the acceptance of a score to the aggregated one."""
        return self.combine_cycles + self.blend_cycles(self.step_bits)

    @property
    def score_cycles(self) -> int:
        """From the acceptance of a row's last score to the cycle in which the row can be decided: gate, row memory."""
        return self.aggregate_cycles + 2

    def row_words(self, blocks: int) -> int:
        """Reads of a row of ``blocks`` scores in one pass."""
        return -(-blocks // self.lanes)

    def decide_cycles(self, blocks: int, *, budget: bool) -> int:
        """From the cycle that begins to decide a row to the one that can begin the next."""
        words = self.row_words(blocks)
        return 2 * words + 3 + (self.score_bits * (words + 1) if budget else 0)

    @property
    def row_out_cycles(self) -> int:
        """From one row on ``o`` to the next one at least, and from the write of a row: address, memory."""
        return 2


@dataclass(frozen=True)
class HeadCommand:
    """What the hardware is told for one head (docs/pruner.md, 5): not checked here, the unit does it."""

    head: int
    last_block: int
    last_valid: int
    causal: bool
    fresh: bool
    source: int
    weight: int
    maximum: bool
    step: int
    gate: int
    theta_low: int
    theta_high: int
    budget: int
    band: int
    band_low: int
    band_high: int

    @property
    def blocks(self) -> int:
        """Rows and columns of the head."""
        return self.last_block + 1

    @property
    def error(self) -> PrunerError:
        """The code with which the unit refuses the command, or NONE."""
        wrong = {
            PrunerError.BLOCKS: self.last_valid > self.last_block,
            PrunerError.SOURCE: self.source == 0,
            PrunerError.BUDGET: self.gate == Gate.BUDGET and self.budget == 0,
            PrunerError.THRESHOLDS: self.gate == Gate.THRESHOLD and self.theta_low > self.theta_high,
            PrunerError.BAND: self.band > Band.MAXIMUM or (self.band > 0 and self.band_low > self.band_high),
        }
        return next((code for code, is_wrong in wrong.items() if is_wrong), PrunerError.NONE)

    def sources(self) -> tuple[bool, bool]:
        """Whether scores come from the holonomy unit, and from the table port."""
        return bool(self.source & Source.HOLONOMY), bool(self.source & Source.TABLE)


@dataclass(frozen=True)
class PrunerSettings:
    """What a user chooses; every value is stated, illegal ones are refused by name.

    Parameters
    ----------
    source: where scores come from
    weight: of the holonomy score where both are used, in 1/16, 1 … 15; 0 otherwise
    aggregation: over the runs of a head
    average_shift: a moving average moves by 1 / 2^average_shift a run, 1 … 6; 0 otherwise
    gate: threshold or budget
    theta_low, theta_high: a block that the last run kept is kept up to theta_high, another up to theta_low
    budget: blocks kept in a row; 0 with thresholds
    band: which score of a head must lie in ``band_low`` … ``band_high``

    Raises
    ------
    DtpError: a value that the hardware would refuse, or that has no effect
    """

    source: Source
    weight: int
    aggregation: Aggregation
    average_shift: int
    gate: Gate
    theta_low: int
    theta_high: int
    budget: int
    band: Band
    band_low: int
    band_high: int

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name, kind in (("source", Source), ("aggregation", Aggregation), ("gate", Gate), ("band", Band)):
            if not isinstance(getattr(self, name), kind):
                names = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
                raise must(owner, name, f"one of {names}", getattr(self, name))
        top = (1 << SCORE_BITS) - 1
        blend, average = self.source is Source.BOTH, self.aggregation is Aggregation.MOVING_AVERAGE
        thresholds, band = self.gate is Gate.THRESHOLD, self.band is not Band.NONE
        for name, low, high, used, where in (
            ("weight", 1, (1 << WEIGHT_BITS) - 1, blend, "source BOTH"),
            ("average_shift", 1, STEP_BITS, average, "aggregation MOVING_AVERAGE"),
            ("theta_low", 0, top, thresholds, "gate THRESHOLD"),
            ("theta_high", 0, top, thresholds, "gate THRESHOLD"),
            ("budget", 1, 256, not thresholds, "gate BUDGET"),
            ("band_low", 0, top, band, "a band"),
            ("band_high", 0, top, band, "a band"),
        ):
            value = getattr(self, name)
            if type(value) is not int:
                raise must(owner, name, "an integer", value)
            if used and not low <= value <= high:
                raise must(owner, name, f"from {low} to {high} with {where}", value)
            if not used and value != 0:
                raise must(owner, name, f"0 without {where}", value)
        for low_name, high_name in (("theta_low", "theta_high"), ("band_low", "band_high")):
            low_value, high_value = getattr(self, low_name), getattr(self, high_name)
            if low_value > high_value:
                raise must(owner, low_name, f"at most {high_name} {high_value}", low_value)

    @classmethod
    def open(cls, source: Source = Source.TABLE) -> PrunerSettings:
        """All gates open: every legal block is kept."""
        top = (1 << SCORE_BITS) - 1
        return cls(
            source=source, weight=(1 << WEIGHT_BITS) // 2 if source is Source.BOTH else 0,
            aggregation=Aggregation.NONE, average_shift=0, gate=Gate.THRESHOLD, theta_low=top, theta_high=top,
            budget=0, band=Band.NONE, band_low=0, band_high=0,
        )  # fmt: skip

    def changed(self, **values: object) -> PrunerSettings:
        """A copy with other values, checked again."""
        return replace(self, **values)  # type: ignore[arg-type]

    def step(self, run: int) -> int:
        """How far the table moves towards the new score in this run, in 1/64; runs count from 0."""
        unit = 1 << STEP_BITS
        if self.aggregation is Aggregation.MOVING_AVERAGE and run:
            return unit >> self.average_shift
        if self.aggregation is Aggregation.MEAN:
            return max(1, int(round_shift(2 * unit // (run + 1), 1)))
        return unit

    def command(
        self, params: PrunerParams, *, head: int, blocks: int, valid_blocks: int, causal: bool, run: int
    ) -> HeadCommand:
        """The command for one head of one run (0 = the first, which forgets what the table holds).

        Raises
        ------
        DtpError: sizes that the unit would refuse
        """
        owner = type(self).__name__
        for name, value, low, high in (
            ("head", head, 0, params.heads - 1),
            ("blocks", blocks, 1, params.max_blocks),
            ("valid_blocks", valid_blocks, 1, blocks),
            ("run", run, 0, 1 << 62),
        ):
            if not low <= value <= high:
                raise must(f"{owner}.command", name, f"from {low} to {high}", value)
        if self.gate is Gate.BUDGET and self.budget > params.max_blocks:
            raise must(owner, "budget", f"at most max_blocks {params.max_blocks}", self.budget)
        return HeadCommand(
            head=head, last_block=blocks - 1, last_valid=valid_blocks - 1, causal=causal, fresh=run == 0,
            source=int(self.source), weight=self.weight, maximum=self.aggregation is Aggregation.MAXIMUM,
            step=self.step(run), gate=int(self.gate), theta_low=self.theta_low, theta_high=self.theta_high,
            budget=self.budget, band=int(self.band), band_low=self.band_low, band_high=self.band_high,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class HeadResult:
    """The answer to one head.

    Parameters
    ----------
    mask: (blocks, blocks), which blocks are kept; (0, 0) with error BLOCKS
    kept, legal: how many blocks
    skipped: the head score left its band
    error: code of the report
    """

    mask: Bool
    kept: int
    legal: int
    skipped: bool
    error: PrunerError

    @property
    def kept_fraction(self) -> float:
        """Kept ÷ legal blocks."""
        return self.kept / self.legal


def legal_blocks(blocks: int, valid_blocks: int, *, causal: bool) -> Bool:
    """(blocks, blocks), docs/pruner.md, 2."""
    row, column = np.indices((blocks, blocks))
    legal = (row < valid_blocks) & (column < valid_blocks)
    return np.asarray(legal & (column <= row) if causal else legal)


def blend(old: ArrayLike, new: ArrayLike, weight: int, weight_bits: int) -> Int:
    """``old + round_shift((new − old)·weight, weight_bits)``: never outside of the two."""
    base = np.asarray(old, dtype=np.int64)
    return base + round_shift((np.asarray(new, dtype=np.int64) - base) * weight, weight_bits)


def within_budget(scores: ArrayLike, legal: ArrayLike, budget: int) -> Bool:
    """The kept blocks of budget mode: (B, B) of scores and of legal blocks."""
    score, allowed = np.asarray(scores, dtype=np.int64), np.asarray(legal, dtype=np.bool_)
    # First the diagonal, then by score and number, illegal blocks last.
    key = np.where(allowed, score, np.iinfo(np.int64).max)
    np.fill_diagonal(key, -1)
    rank = np.argsort(np.argsort(key, axis=1, kind="stable"), axis=1, kind="stable")
    return np.asarray(allowed & (rank < budget))


class GoldenPruner:
    """The unit as a program, with the table that outlives a head."""

    def __init__(self, params: PrunerParams) -> None:
        self.params = params
        shape = (params.heads, params.max_blocks, params.max_blocks)
        self.scores: Int = np.zeros(shape, dtype=np.int64)
        self.gates: Bool = np.zeros(shape, dtype=np.bool_)

    def _received(self, sent: ArrayLike | None, blocks: int) -> tuple[Int, PrunerError]:
        """Scores of one source as a (blocks, blocks) table, and what was wrong with their number."""
        given = np.zeros(0, dtype=np.int64) if sent is None else np.asarray(sent, dtype=np.int64).ravel()
        for value in given[(given < 0) | (given > self.params.max_score)][:1]:
            raise must("GoldenPruner", "scores", f"from 0 to {self.params.max_score}", int(value))
        needed = blocks * blocks
        table = np.zeros(needed, dtype=np.int64)
        table[: min(needed, len(given))] = given[:needed]
        code = PrunerError.NONE
        if len(given) != needed:
            code = PrunerError.SHORT if len(given) < needed else PrunerError.LONG
        return table.reshape(blocks, blocks), code

    def head(
        self, command: HeadCommand, *, holonomy: ArrayLike | None = None, table: ArrayLike | None = None
    ) -> HeadResult:
        """One head.

        Parameters
        ----------
        holonomy, table: scores that the sources send, (blocks, blocks) or flat; another number is an error of the head

        Raises
        ------
        DtpError: scores that are no scores, or given where the command names no source
        """
        p = self.params
        for name, sent, named in zip(("holonomy", "table"), (holonomy, table), command.sources(), strict=True):
            if (sent is not None) != named:
                raise must("GoldenPruner", name, f"{'given' if named else 'None'} with source {command.source}", sent)
        error = command.error
        if error is PrunerError.BLOCKS:
            legal = legal_blocks(0, 0, causal=False)
            return HeadResult(legal, 0, 0, False, error)
        legal = legal_blocks(command.blocks, command.last_valid + 1, causal=command.causal)
        legal_count = int(np.count_nonzero(legal))
        if error is not PrunerError.NONE:
            return HeadResult(legal, legal_count, legal_count, False, error)
        (h, h_code), (t, t_code) = self._received(holonomy, command.blocks), self._received(table, command.blocks)
        codes = [
            code for code, named in zip((h_code, t_code), command.sources(), strict=True) if named and code
        ]
        error = min(codes, default=PrunerError.NONE)
        weight = {Source.HOLONOMY: 1 << p.weight_bits, Source.TABLE: 0}.get(Source(command.source), command.weight)
        s = blend(t, h, min(weight, 1 << p.weight_bits), p.weight_bits)

        place = (command.head, slice(command.blocks), slice(command.blocks))
        old, gate = self.scores[place], self.gates[place]
        if command.fresh:
            m = s
        elif command.maximum:
            m = np.maximum(old, s)
        else:
            m = blend(old, s, min(command.step, 1 << p.step_bits), p.step_bits)
        theta = np.where(gate & (not command.fresh), command.theta_high, command.theta_low)
        passed = np.asarray(m <= theta)
        budget = command.gate == Gate.BUDGET
        self.scores[place] = m
        self.gates[place] = passed & (not budget)

        mask = within_budget(m, legal, command.budget) if budget else passed & legal
        mask = mask | (legal & np.eye(command.blocks, dtype=np.bool_))
        counted = m[legal]
        skipped = False
        if command.band == Band.MEAN:
            total = int(counted.sum())
            skipped = not command.band_low * legal_count <= total <= command.band_high * legal_count
        elif command.band == Band.MAXIMUM:
            skipped = not command.band_low <= int(counted.max()) <= command.band_high
        if skipped:
            mask = np.zeros_like(mask)
        return HeadResult(mask, int(np.count_nonzero(mask)), legal_count, skipped, error)
