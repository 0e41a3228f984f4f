"""Gated attention: from transports to scores of blocks, to masks, to the walk of the tile [GR §10, SPEC §4, §6].

A *run* is what the geometry port takes for the heads of one layer: a descriptor, then passes of transport factors,
probes and score tables. It makes a row of kept blocks for every block row of every head, in the order in which the tile
asks for them. The contract is ``docs/gated.md``; integers are those of :mod:`dtp.transport`, :mod:`dtp.holonomy` and
:mod:`dtp.pruner`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtp.attention import HeadResult, golden, kept_blocks
from dtp.config import Config
from dtp.connections import quantise_connections
from dtp.errors import must
from dtp.fixed import Int
from dtp.holonomy import SHIFT_LIMIT, TURNAROUND_CYCLES, FieldJob, FieldParams, block_scores, block_sums
from dtp.job import Field, Flag, pack_descriptor, unpack_descriptor
from dtp.pruner import GoldenPruner, HeadCommand, PrunerError, PrunerParams, PrunerSettings, Source
from dtp.quantise import Head
from dtp.solve import TILE_COLUMNS, MiddleMode, TransportError
from dtp.transport import (
    STATE_BITS,
    QuantisedFactors,
    TransportJob,
    TransportParams,
    factor_words,
    quantise_state,
    transport,
    word_beats,
)
from dtp.workload import TransportKind, Workload

Bool = NDArray[np.bool_]
Bytes = NDArray[np.uint8]

MAGIC: Final = 0x4754
"""First two bytes of a run: "TG"."""
VERSION: Final = 2
"""Order of the passes, :meth:`Run.passes`; 1 had one pass for the second head everywhere."""
DESCRIPTOR_BYTES: Final = 36
MAX_TOKENS: Final = 256
"""Longest gated head where the configuration allows longer ones: relative transports of a head stay on the chip."""
MAX_HEADS: Final = 16
"""Heads of a run, entries of the pruner's table."""
ROW_QUEUE: Final = 512
"""Mask rows that can wait for the tile; two runs of the most heads with the most blocks."""
COUNT_LIMIT: Final = 65535
"""Counters of heads and saturations stop here."""

FIELDS: Final = (
    Field("magic", 0, 2, False, f"{MAGIC:#06x}"),
    Field("version", 2, 1, False, f"{VERSION}"),
    Field("flags", 3, 1, False, "bits below; the others 0"),
    Field("tag", 4, 2, False, "not looked at"),
    Field("heads", 6, 2, False, f"H, 1 … {MAX_HEADS}"),
    Field("tokens", 8, 2, False, "n, 1 … the longest gated head: tokens of a head that are not padding"),
    Field("words", 10, 2, False, "state words of a head's width"),
    Field("project_shift", 12, 1, False, "of the transports, 0 … 31"),
    Field("gram_shift", 13, 1, False, "of the transports, 0 … 31"),
    Field("unit", 16, 4, True, "of the transports, not negative"),
    *(Field(f"reciprocal_{n}", 20 + 4 * n, 4, False, f"R_{n} of the field") for n in range(3)),
    *(Field(f"shift_{n}", 32 + n, 1, False, f"s_{n} of the field, 0 … {SHIFT_LIMIT}") for n in range(3)),
)
"""The descriptor of a run; bytes that no field names are 0 and not looked at."""

FLAGS: Final = (
    Flag("causal", 0, "blocks past the diagonal are not legal"),
    Flag("holonomy", 1, "passes have probes and factors, scores come from the field"),
    Flag("table", 2, "passes have tables of scores"),
    Flag("two_groups", 3, "factors have 5 to 8 columns, not 1 to 4"),
)


class GeometryError(enum.IntEnum):
    """Code of the first fault of a run; one below 16 refuses it."""

    NONE = 0
    MAGIC = 1
    VERSION = 2
    FLAGS = 3
    """An unknown flag, or neither source."""
    HEADS = 4
    TOKENS = 5
    WORDS = 6
    SHIFT = 7
    """A shift beyond its shifter, or a negative unit."""
    CUT = 8
    """``last`` came in the descriptor."""
    EARLY_LAST = 16
    """``last`` came before the run's last beat; its beat stood for those that were missing."""
    LATE_LAST = 32
    """``last`` did not come with the run's last beat; the beats up to ``last`` were dropped."""


class RowError(enum.IntEnum):
    """How the mask rows of a head did not fit its job."""

    NONE = 0
    SHORT = 1
    """Fewer rows than the job has block rows: the others keep every legal block."""
    LONG = 2
    """More rows, which were dropped."""


@dataclass(frozen=True)
class GatedParams:
    """Sizes of the units around the tile of a configuration."""

    config: Config

    @property
    def max_tokens(self) -> int:
        """Longest gated head."""
        return min(self.config.max_tokens, MAX_TOKENS)

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest gated head."""
        return self.max_tokens // self.config.block

    @cached_property
    def engine(self) -> Config:
        """The configuration of the engine: vectors are no longer than a head is wide."""
        return self.config.changed(transport_width=1 << (self.config.max_width - 1).bit_length())

    @cached_property
    def transport(self) -> TransportParams:
        """The engine."""
        return TransportParams(self.engine)

    @cached_property
    def field(self) -> FieldParams:
        """The field: as many products as keep up with the engine."""
        engine = self.transport
        most = self.max_words * engine.tile_rows // TURNAROUND_CYCLES
        multipliers = max(2, min(engine.tile_rows * engine.vectors // 2, most))
        return replace(FieldParams.of(self.config, multipliers=multipliers), max_tokens=self.max_tokens)

    @cached_property
    def pruner(self) -> PrunerParams:
        """The pruner."""
        lanes = min(4, self.field.multipliers // 2, self.max_blocks)  # a row is decided while the next one is scored
        return replace(PrunerParams.of(self.config, heads=MAX_HEADS, lanes=lanes), max_blocks=self.max_blocks)

    @property
    def max_words(self) -> int:
        """State words of the widest head."""
        return -(-self.config.max_width // self.transport.tile_rows)

    @property
    def factor_beats(self) -> int:
        """Input beats of a factor word."""
        return word_beats(self.transport.factor_word_bits, self.config.input_bytes)

    @property
    def probe_word_bits(self) -> int:
        """Bits of a word of a probe: a state word of one vector."""
        return self.transport.tile_rows * STATE_BITS

    @property
    def probe_beats(self) -> int:
        """Input beats of a word of a probe."""
        return word_beats(self.probe_word_bits, self.config.input_bytes)

    @property
    def descriptor_beats(self) -> int:
        """Input beats of a descriptor."""
        return -(-DESCRIPTOR_BYTES // self.config.input_bytes)

    def check(self) -> None:
        """Raises DtpError for a configuration that has no gated top."""
        if self.config.input_bytes < 2:
            raise must("Config", "input_bytes", "at least 2 with the unit gated", self.config.input_bytes)
        if self.max_blocks < 2:
            raise must("Config", "max_tokens", f"at least 2 blocks of {self.config.block}", self.config.max_tokens)


@dataclass(frozen=True)
class Pass:
    """A part of a run: what goes through the engine while a head's factors come.

    Parameters
    ----------
    step: the head, H where the first one comes again
    plain: the head's transport of its probe is made, so that the pass has the probe
    transposed: the transpose is applied to what the pass before of another head made; the pass has that head's table
    """

    step: int
    plain: bool
    transposed: bool

    @property
    def slots(self) -> tuple[bool, bool]:
        """Those in use; passes of the same slots behind each other are one job of the engine."""
        return self.plain, self.transposed


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the descriptor of a run says.

    Parameters
    ----------
    heads, tokens: H, n
    words, groups: of the transports
    causal: blocks past the diagonal are not legal
    holonomy, table: what the passes hold
    project_shift, gram_shift, unit: of the transports
    shifts, reciprocals: of the field
    tag: not looked at
    """

    heads: int
    tokens: int
    words: int
    groups: int = 1
    causal: bool = False
    holonomy: bool = True
    table: bool = False
    project_shift: int = 0
    gram_shift: int = 0
    unit: int = 0
    shifts: tuple[int, int, int] = (0, 0, 0)
    reciprocals: tuple[int, int, int] = (0, 0, 0)
    tag: int = 0

    @property
    def source(self) -> Source:
        """Where the pruner's scores come from."""
        return Source(self.holonomy * Source.HOLONOMY | self.table * Source.TABLE)

    def blocks(self, config: Config) -> int:
        """Block rows of a head."""
        return config.blocks(self.tokens)

    def passes(self, config: Config) -> tuple[Pass, ...]:
        """What comes on the stream behind the descriptor, in order (docs/gated.md, 2).

        Where vectors do not work in pairs, the second head's transpose and its own transport have a pass each: nothing
        hides the first field, and the rows that follow from it hide the second pass.
        """
        found = [Pass(0, plain=True, transposed=False)] if self.holonomy else []
        alone = self.holonomy and TransportParams(config).vectors == 1
        for step in range(1, self.heads + 1):
            last = step == self.heads
            if alone and step == 1 and not last:
                found += [Pass(1, plain=False, transposed=True), Pass(1, plain=True, transposed=False)]
            else:
                found.append(Pass(step, plain=not last, transposed=True))
        return tuple(found)

    def transport_job(self) -> TransportJob:
        """A pass as a job of the engine: the transport of a head and the transpose of its transport."""
        return TransportJob(
            mode=MiddleMode.CAYLEY, tokens=self.tokens, words=self.words, groups=self.groups,
            plain=True, transposed=True, project_shift=self.project_shift, gram_shift=self.gram_shift, unit=self.unit,
        )  # fmt: skip

    def transport_jobs(self, config: Config) -> tuple[TransportJob, ...]:
        """What the engine works on, job after job: passes of the same slots, or all where vectors work in pairs."""
        a_pass, passes = self.transport_job(), self.passes(config)
        if TransportParams(config).vectors == 2:
            return (replace(a_pass, tokens=len(passes) * self.tokens),)
        kinds = groupby(passes, key=lambda one: one.slots)
        return tuple(
            replace(a_pass, plain=plain, transposed=transposed, tokens=len(tuple(same)) * self.tokens)
            for (plain, transposed), same in kinds
        )

    def field_job(self) -> FieldJob:
        """The job of every head pair."""
        return FieldJob(self.tokens, self.words, False, self.shifts, self.reciprocals)

    def command(self, config: Config, settings: PrunerSettings, head: int, run: int) -> HeadCommand:
        """What the pruner is told of a head."""
        blocks = self.blocks(config)
        return settings.command(
            GatedParams(config).pruner, head=head, blocks=blocks, valid_blocks=blocks, causal=self.causal, run=run
        )

    def descriptor(self) -> bytes:
        """The descriptor, :data:`DESCRIPTOR_BYTES` bytes."""
        numbers = {name: getattr(self, name) for name in ("tag", "heads", "tokens", "words")}
        numbers |= {name: getattr(self, name) for name in ("project_shift", "gram_shift", "unit")}
        numbers |= {"magic": MAGIC, "version": VERSION}
        flags = {"causal": self.causal, "holonomy": self.holonomy, "table": self.table, "two_groups": self.groups == 2}
        numbers["flags"] = sum(flags[flag.name] << flag.bit for flag in FLAGS)
        numbers |= {f"reciprocal_{n}": value for n, value in enumerate(self.reciprocals)}
        numbers |= {f"shift_{n}": value for n, value in enumerate(self.shifts)}
        return pack_descriptor(numbers, FIELDS, DESCRIPTOR_BYTES)


def descriptor_error(config: Config, data: bytes) -> GeometryError:
    """What the unit says to a descriptor."""
    n = unpack_descriptor(data, FIELDS, DESCRIPTOR_BYTES)
    p = GatedParams(config)
    bit = {flag.name: bool(n["flags"] >> flag.bit & 1) for flag in FLAGS}
    wide = n["project_shift"] | n["gram_shift"]
    for code, wrong in (
        (GeometryError.MAGIC, n["magic"] != MAGIC),
        (GeometryError.VERSION, n["version"] != VERSION),
        (GeometryError.FLAGS, n["flags"] >> len(FLAGS) or not (bit["holonomy"] or bit["table"])),
        (GeometryError.FLAGS, bit["two_groups"] and p.transport.max_groups == 1),
        (GeometryError.HEADS, not 1 <= n["heads"] <= MAX_HEADS),
        (GeometryError.TOKENS, not 1 <= n["tokens"] <= p.max_tokens),
        (GeometryError.WORDS, bit["holonomy"] and not p.field.min_words <= n["words"] <= p.max_words),
        (GeometryError.SHIFT, wide >> 5 or any(n[f"shift_{i}"] > SHIFT_LIMIT for i in range(3)) or n["unit"] < 0),
    ):
        if wrong:
            return code
    return GeometryError.NONE


@dataclass(frozen=True, eq=False)
class Geometry:
    """Everything that a run carries.

    Parameters
    ----------
    run: its descriptor
    factors: (H, n, width, k) Cayley factors, None without holonomy
    probes: (H, width) of 16 bits, None without holonomy
    scores: (H, blocks, blocks) u2f14, None without table
    """

    run: Run
    factors: Int | None = None
    probes: Int | None = None
    scores: Int | None = None

    def beats(self, config: Config) -> Bytes:
        """Input beats of the run, uint8 (beats, input_bytes); ``last`` belongs to the final one (docs/gated.md, 2)."""
        run, size = self.run, config.input_bytes
        params = GatedParams(config)
        parts = [_beats(np.frombuffer(run.descriptor(), dtype=np.uint8), size)]
        job = run.transport_job()
        width = run.words * params.transport.tile_rows
        for one in run.passes(config):
            if self.scores is not None and one.transposed:
                parts.append(_padded(self.scores[one.step - 1].astype("<u2").reshape(-1, 1).view(np.uint8), size))
            if self.factors is None or self.probes is None:
                continue
            if one.plain:
                probe = np.pad(self.probes[one.step], (0, width - self.probes.shape[1])).astype("<i2")
                parts += [_beats(word, size) for word in probe.reshape(run.words, -1).view(np.uint8)]
            words = factor_words(config, job, self.factors[one.step % run.heads])
            flat = np.ascontiguousarray(words.reshape(-1, words.shape[-1])).view(np.uint8)
            parts.append(_padded(flat, params.factor_beats * size).reshape(-1, size))
        return np.concatenate(parts)


def _beats(data: Bytes, size: int) -> Bytes:
    """Whole beats of ``size`` bytes."""
    return np.pad(data, (0, -len(data) % size)).reshape(-1, size)


def _padded(rows: Bytes, width: int) -> Bytes:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))


def quantise_geometry(config: Config, workload: Workload, source: Source, *, seed: int = 0) -> Geometry:
    """The run of a workload's heads.

    Parameters
    ----------
    source: ``HOLONOMY`` needs Cayley connections, ``TABLE`` the workload's ``scores`` for the configuration's blocks
    seed: of the probes, where the workload has none

    All heads share the scale of the factors and, to a rounding, the norm of the probes.

    Raises
    ------
    DtpError: a tensor that is missing, or a size that the unit has not.
    """
    params = GatedParams(config)
    params.check()
    tokens = workload.valid_length
    for name, value, limit in (
        ("heads", workload.heads, MAX_HEADS),
        ("valid_length", tokens, params.max_tokens),
        ("width", workload.width, config.max_width),
    ):
        if value > limit:
            raise must("Workload", name, f"at most {limit} with the unit gated", value)
    blocks = config.blocks(tokens)
    run = Run(
        heads=workload.heads, tokens=tokens, words=-(-workload.width // params.transport.tile_rows),
        causal=bool(workload.causal), holonomy=bool(source & Source.HOLONOMY), table=bool(source & Source.TABLE),
    )  # fmt: skip
    scores = _table(workload, config, blocks) if run.table else None
    if not run.holonomy:
        return Geometry(replace(run, words=0), scores=scores)
    if workload.connection_a is None or workload.connection_b is None:
        raise must("Workload", "connection_a", "there for scores of holonomy (not for the source table)", None)
    if workload.transport is not TransportKind.CAYLEY:
        kind = None if workload.transport is None else workload.transport.value
        raise must("Workload", "transport", "cayley for scores of holonomy", kind)
    connections = quantise_connections(config, workload, tokens)
    flat = connections.factors
    _, width, k = flat.v.shape
    if workload.probe is not None and workload.probe.shape[1] != 1:
        raise must("Workload", "probe", "one a head with the unit gated", workload.probe.shape[1])
    given = workload.probes(1, seed)[:, 0].astype(np.float64)
    norms = np.sqrt((given**2).sum(axis=1, keepdims=True))
    if not (norms > 0).all():
        raise must("Workload", "probe", "other than 0 in every head", 0)
    probes, _ = quantise_state(given / norms, headroom_bits=flat.headroom_bits)
    energy = int(np.rint((probes**2).sum(axis=1).mean()))
    job = _field_job(params, flat, tokens, run.words, energy)
    run = replace(
        run, groups=-(-k // TILE_COLUMNS), project_shift=flat.project_shift, gram_shift=flat.gram_shift,
        unit=flat.unit, shifts=job.shifts, reciprocals=job.reciprocals,
    )  # fmt: skip
    return Geometry(run, flat.v.reshape(workload.heads, tokens, width, k), probes, scores)


def _field_job(params: GatedParams, factors: QuantisedFactors, tokens: int, words: int, energy: int) -> FieldJob:
    least = params.field.min_words
    if words < least:
        rule = f"at least {(least - 1) * params.transport.tile_rows + 1} for scores of holonomy"
        raise must("Workload", "width", rule, factors.v.shape[1])
    return FieldJob.of(params.field, tokens=tokens, words=words, probe_energy=energy, causal=False)


def _table(workload: Workload, config: Config, blocks: int) -> Int:
    if workload.scores is None:
        raise must("Workload", "scores", "there for scores of a table", None)
    if workload.block not in (None, config.block):
        raise must("Workload", "block", f"the block {config.block} of the configuration", workload.block)
    return np.asarray(workload.scores[:, :blocks, :blocks], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class GateResult:
    """What a run makes.

    Parameters
    ----------
    holonomy: (H, blocks, blocks) scores of the field, None without
    masks: (H, blocks, blocks), kept blocks; all 0 for a skipped head
    skipped: (H,)
    kept, legal: blocks over all heads
    errors: code of every head's report
    transport_error, saturations: of the engine over the run; ``field_saturated``: a score reached its limit
    """

    holonomy: Int | None
    masks: Bool
    skipped: Bool
    kept: int
    legal: int
    errors: tuple[PrunerError, ...]
    transport_error: TransportError
    saturations: int
    field_saturated: bool

    @property
    def kept_fraction(self) -> float:
        """Kept ÷ legal blocks."""
        return self.kept / self.legal if self.legal else 0.0


def holonomy_scores(config: Config, geometry: Geometry) -> tuple[Int, TransportError, int]:
    """Scores of every head pair (h, h + 1 cyclic), (H, blocks, blocks); errors and saturated lanes of the engine.

    Raises
    ------
    DtpError: a run without holonomy.
    """
    run, params = geometry.run, GatedParams(config)
    if geometry.factors is None or geometry.probes is None:
        raise must("holonomy_scores", "geometry", "with factors and probes", None)
    # Tokens do not know of each other and heads share their scales: all heads are one job of the engine.
    job = replace(run.transport_job(), tokens=run.heads * run.tokens, transposed=False)
    back = replace(job, plain=False, transposed=True)
    width = geometry.factors.shape[2]
    states = np.repeat(geometry.probes, run.tokens, axis=0)[:, None]
    there = transport(config, job, geometry.factors.reshape(job.tokens, width, -1), states)
    following = np.roll(geometry.factors, -1, axis=0).reshape(job.tokens, width, -1)
    again = transport(config, back, following, there.outputs)
    lanes = run.words * params.transport.tile_rows
    u = np.pad(again.outputs[:, 0], ((0, 0), (0, lanes - again.outputs.shape[2])))
    field = run.field_job()
    tables = [
        block_scores(block_sums(part, params.field), field, params.field)
        for part in u.reshape(run.heads, run.tokens, lanes)
    ]
    error, saturations = there.error | again.error, there.saturations + again.saturations
    return np.stack(tables), error, min(saturations, COUNT_LIMIT)


class GoldenGate:
    """The geometry side as a program, with the pruner's table that outlives a run."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._pruner = GoldenPruner(GatedParams(config).pruner)

    def run(self, geometry: Geometry, settings: PrunerSettings, *, number: int = 0) -> GateResult:
        """One run; ``number`` counts them from the first, which forgets what the table holds.

        Raises
        ------
        DtpError: settings for other sources than the run has.
        """
        run = geometry.run
        if settings.source is not run.source:
            raise must("PrunerSettings", "source", f"{run.source.name} as in the run", settings.source.name)
        holonomy, error, saturations = None, TransportError(0), 0
        if run.holonomy:
            holonomy, error, saturations = holonomy_scores(self.config, geometry)
        results = [
            self._pruner.head(
                run.command(self.config, settings, head, number),
                holonomy=None if holonomy is None else holonomy[head],
                table=None if geometry.scores is None else geometry.scores[head],
            )
            for head in range(run.heads)
        ]
        return GateResult(
            holonomy=holonomy,
            masks=np.stack([result.mask for result in results]),
            skipped=np.array([result.skipped for result in results]),
            kept=sum(result.kept for result in results),
            legal=sum(result.legal for result in results),
            errors=tuple(result.error for result in results),
            transport_error=error,
            saturations=saturations,
            field_saturated=holonomy is not None and int(holonomy.max()) == (1 << 16) - 1,
        )


def gated_heads(config: Config, heads: Sequence[Head], gate: GateResult) -> tuple[Head, ...]:
    """The same heads as jobs that wait for their mask rows, with the mask that the tile then walks over.

    ``block_mask`` is what a job without a gate would need to give the same outputs.
    """
    made = []
    for head, mask in zip(heads, gate.masks, strict=True):
        blocks = config.blocks(head.job.tokens)
        whole = np.zeros((blocks, blocks), dtype=np.bool_)
        whole[: len(mask), : len(mask)] = mask
        own = whole if head.block_mask is None else whole & head.block_mask
        made.append(replace(head, block_mask=own))
    return tuple(made)


def gated_golden(config: Config, head: Head, *, skipped: bool) -> HeadResult:
    """Outputs of a head of :func:`gated_heads`; a skipped one gives zeros and raises no row flag.

    Raises
    ------
    DtpError: a job that does not fit the configuration.
    """
    result = golden(config, head)
    return replace(result, empty_rows=np.zeros_like(result.empty_rows)) if skipped else result


def kept_items(config: Config, heads: Sequence[Head]) -> int:
    """Pairs of a row group and a kept block that the array works on."""
    return sum(int(kept_blocks(config, head.job, head.block_mask).sum()) for head in heads)


def threshold_for(scores: ArrayLike, legal: ArrayLike, kept: float) -> int:
    """The threshold that keeps as near to ``kept`` of the legal blocks as it can, the diagonal always among them.

    Parameters
    ----------
    scores: (H, blocks, blocks)
    legal: (blocks, blocks)

    Raises
    ------
    DtpError: a fraction outside 0 … 1.
    """
    if not 0 < kept <= 1:
        raise must("threshold_for", "kept", "more than 0 and at most 1", kept)
    table, allowed = np.asarray(scores, dtype=np.int64), np.asarray(legal, dtype=np.bool_)
    off = allowed & ~np.eye(len(allowed), dtype=np.bool_)
    ranked = np.sort(table[:, off].ravel())
    wanted = round(kept * len(table) * int(allowed.sum())) - len(table) * int((allowed & ~off).sum())
    if not len(ranked) or wanted <= 0:
        return 0
    if wanted >= len(ranked):
        return (1 << 16) - 1
    return int(ranked[wanted - 1])
