"""Cycles of the commutator kernel: of whole programs, and array cycles against the multiplications of SPEC §5."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dtp.commutator import CommutatorMode
from dtp.config import Config
from dtp.errors import must
from dtp.fixed import Int
from dtp.kernel import KernelParams, Step, StepKind
from dtp.matrix import Activation, MatrixJob
from sim.cycles.difference import DifferenceCycles
from sim.cycles.layernorm import LayerNormCycles
from sim.cycles.matrix import MatrixCycles

__all__ = [
    "LayerShape",
    "Pass",
    "ProgramTiming",
    "array_cycles",
    "extra_multiplications",
    "extra_passes",
    "plain_passes",
    "program_timing",
]


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a residual layer.

    Parameters
    ----------
    tokens, model, heads, width, mlp: L, M, H, d, F
    lifted: scores with a metric bias
    """

    tokens: int
    model: int
    heads: int
    width: int
    mlp: int
    lifted: bool = False

    def check(self, config: Config) -> None:
        """Whether ``config`` can hold the layer; raises DtpError with the limit that it breaks."""
        for name, value, limit_name in (
            ("tokens", self.tokens, "max_tokens"), ("model", self.model, "max_model"),
            ("heads * width", self.heads * self.width, "max_mlp"), ("width", self.width, "max_width"),
            ("mlp", self.mlp, "max_mlp"),
        ):  # fmt: skip
            limit = getattr(config, limit_name)
            if not 1 <= value <= limit:
                raise must("LayerShape", name, f"in 1…{limit_name} {limit}", value)


@dataclass(frozen=True)
class Pass:
    """One pass of the kernel over all tokens: its name, its array steps, its multiplications."""

    name: str
    steps: int
    multiplications: int


def plain_passes(config: Config, shape: LayerShape) -> tuple[Pass, ...]:
    """The layer's own work: projections, attention and its output, Res once."""
    shape.check(config)
    inner = shape.heads * shape.width
    return (
        *(_matrix(config, shape, f"{name} of h", shape.model, inner) for name in ("queries", "keys", "values")),
        _scores(config, shape, "scores of h"),
        _values(config, shape, "P·V of h"),
        _matrix(config, shape, "output of h", inner, shape.model),
        *_residual(config, shape, "Res(h)"),
    )


def extra_passes(config: Config, shape: LayerShape, mode: CommutatorMode) -> tuple[Pass, ...]:
    """What Δ adds: one application of Attn (of its value path when the weights are kept) and two of Res."""
    shape.check(config)
    inner = shape.heads * shape.width
    passes = [*_residual(config, shape, "Res(h)")]
    if mode is CommutatorMode.FULL:
        passes += [_matrix(config, shape, f"{name} of h + Res(h)", shape.model, inner) for name in ("queries", "keys")]
        passes.append(_scores(config, shape, "scores of h + Res(h)"))
    return (
        *passes,
        _matrix(config, shape, "values of h + Res(h)", shape.model, inner),
        _values(config, shape, "P·V of h + Res(h)"),
        _matrix(config, shape, "output of h + Res(h)", inner, shape.model),
        *_residual(config, shape, "Res(Attn(h))"),
    )


def array_cycles(passes: tuple[Pass, ...]) -> int:
    """Array steps of passes."""
    return sum(item.steps for item in passes)


@dataclass(frozen=True)
class ProgramTiming:
    """Cycles of a program through :class:`rtl.commutator.CommutatorUnit`, counted from reset, where nothing stalls.

    Parameters
    ----------
    steps, words, weights: (n,), cycle in which each step, word of a LOAD and entry of weights is taken
    outputs, energies: (n,), cycle of each word that is stored and of each record
    """

    steps: Int
    words: Int
    weights: Int
    outputs: Int
    energies: Int


def program_timing(
    config: Config, program: Sequence[Step], variances: Sequence[Int], *, start: int = 0
) -> ProgramTiming:
    """Cycles of a program whose first step is offered in cycle ``start``, all words and weights from the first on.

    A step begins when no more than ``wait`` matrices before it are unfinished; one is finished four cycles after its
    last word left the matrix mode. A LOAD takes a word a cycle but where an output is written, three cycles after it
    was taken. A MATRIX is given to the mode as soon as that takes jobs; its words are read one a cycle but where an
    output is taken, and are there two cycles later; the next step begins behind the last. A NORMALISE gives its words
    one by one to the LayerNorm, twice, and the next step begins when the last one has been written; outputs go first
    there. An ENERGY reads three words for each that it gives to the difference norm.

    Parameters
    ----------
    variances: of each NORMALISE in order, V of the group's rows: the time of a root depends on it
    """
    kernel = _KernelCycles(config, program, variances, start)
    while not kernel.done:
        kernel.step()
    return ProgramTiming(*(
        np.array(cycles, dtype=np.int64)
        for cycles in (kernel.taken, kernel.words, kernel.weights, kernel.outputs, kernel.energies)
    ))  # fmt: skip


class _Cycle(NamedTuple):
    """What the step that is under way does in a cycle: reads a state, opens a matrix, gives a word to a norm."""

    reads: bool = False
    opens: Step | None = None
    gives: bool = False
    compares: bool = False


class _KernelCycles:
    """``Commutator`` without its numbers, cycle by cycle."""

    def __init__(self, config: Config, program: Sequence[Step], variances: Sequence[Int], start: int) -> None:
        self._config = config
        self._program = deque(program)
        self._variances = deque(variances)
        self._start = start
        self._mode = MatrixCycles(config)
        self._layernorm = LayerNormCycles(config)
        self._norm = DifferenceCycles(config)
        self._results: deque[Step] = deque()
        self._reads, self._writes, self._ends = (deque([False] * cycles) for cycles in (2, 3, 4))
        self._open = self._count = self._left = 0
        self._state = "begin"
        self._second_pass = False
        jobs = [step.job for step in program if step.job is not None]
        stored = [step.job for step in program if step.job is not None and step.store]
        self._entries = sum(job.steps(config) for job in jobs)
        self._outputs = sum(job.blocks(config) * config.pass_steps for job in stored)
        self._records = config.rows * sum(step.kind is StepKind.ENERGY for step in program)
        self._now = 0
        self.taken: list[int] = []
        self.words: list[int] = []
        self.weights: list[int] = []
        self.outputs: list[int] = []
        self.energies: list[int] = []

    @property
    def done(self) -> bool:
        """Whether everything has been taken and given."""
        given = len(self.outputs) == self._outputs and len(self.energies) == self._records
        return given and not self._program and not self._open

    def step(self) -> None:
        """One cycle."""
        mode, now = self._mode, self._now
        takes = bool(self._results) and mode.offers
        writes = takes and not self._results[0].store
        ends = takes and mode.offers_last
        if takes and not writes:
            self.outputs.append(now)
        if self._norm.record:
            self.energies.append(now)
        straight = self._state in ("straight", "straight end")
        read_there = self._reads.popleft()
        written = self._writes.popleft()
        last = bool(self._program) and self._count == self._program[0].words(self._config) - 1
        normed = (self._program[0].words(self._config), self._variances[0]) if self._state == "give" else None

        cycle = self._advance(last, writes=writes, written=written, read_there=read_there)
        self._reads.append(cycle.reads and not writes)
        self._writes.append(writes)
        self._layernorm.step(normed if cycle.gives else None, not written)
        self._norm.step(cycle.compares, last=last)
        job = None if cycle.opens is None else cycle.opens.job
        if mode.step(job, straight and read_there, len(self.weights) < self._entries, takes):
            self.weights.append(now)
        self._open += (job is not None) - self._ends.popleft()
        self._ends.append(ends)
        if ends:
            self._results.popleft()
        if cycle.opens is not None:
            self._results.append(cycle.opens)
        self._now += 1

    def _advance(self, last: bool, *, writes: bool, written: bool, read_there: bool) -> _Cycle:
        """The step that is under way goes on; ``last``: with its last word."""
        state = self._state
        if state == "begin":
            return self._begin()
        if state == "load":
            if not written:
                self.words.append(self._now)
                self._word(last)
            return _Cycle()
        if state == "straight":
            self._left = 2
            if not writes:
                self._count += 1
                self._state = "straight end" if last else state
            return _Cycle(reads=True)
        if state == "straight end":
            self._left -= 1
            if self._left == 0:
                self._end()
            return _Cycle()
        if state in _READS:
            self._state = state if writes else f"{state}, there"
            return _Cycle(reads=True)
        if state.removesuffix(", there") in _READS:
            self._state = _READS[state.removesuffix(", there")] if read_there else state
            return _Cycle()
        if state == "give":
            return self._give(last)
        if state == "subtract":
            ready = self._norm.ready
            if ready:
                self._state = "attended"
                self._word(last)
            return _Cycle(compares=ready)
        if self._layernorm.idle:  # all words are normalised
            self._variances.popleft()
            self._end()
        return _Cycle()

    def _begin(self) -> _Cycle:
        self._count, self._second_pass = 0, False
        step = self._program[0] if self._program and self._now >= self._start else None
        if step is None or self._open > step.wait:
            return _Cycle()
        if step.kind is not StepKind.MATRIX:
            self._state = _FIRST_STATES[step.kind]
            return _Cycle()
        if not self._mode.job_ready or len(self._results) == KernelParams(self._config).open_matrices:
            return _Cycle()
        self._state = "straight"
        return _Cycle(opens=step)

    def _give(self, last: bool) -> _Cycle:
        """A word for the LayerNorm; all of them twice."""
        if not self._layernorm.ready:
            return _Cycle()
        self._count = 0 if last else self._count + 1
        self._state = "normalised" if last and self._second_pass else "read"
        self._second_pass |= last
        return _Cycle(gives=True)

    def _word(self, last: bool) -> None:
        self._count += 1
        if last:
            self._end()

    def _end(self) -> None:
        self.taken.append(self._now)
        self._program.popleft()
        self._state = "begin"


_FIRST_STATES = {StepKind.LOAD: "load", StepKind.NORMALISE: "read", StepKind.ENERGY: "attended"}
_READS = {"read": "give", "attended": "plain", "plain": "residual", "residual": "subtract"}
"""States that read a word, and what follows when it is there."""


def extra_multiplications(shape: LayerShape, mode: CommutatorMode, frame_rank: int = 0) -> int:
    """The multiplications that SPEC §5 names, of the sizes as they are."""
    tokens, model, inner = shape.tokens, shape.model, shape.heads * shape.width
    total = 2 * 2 * tokens * model * shape.mlp + 2 * tokens * model * inner + tokens * tokens * inner
    if mode is CommutatorMode.FULL:
        lanes = frame_rank + frame_rank * (frame_rank + 1) if shape.lifted else 0
        total += 2 * tokens * model * inner + tokens * tokens * (inner + shape.heads * lanes)
    return total


def _matrix(config: Config, shape: LayerShape, name: str, width: int, columns: int) -> Pass:
    job = MatrixJob(
        width=width, columns=columns, feed_gain=0, shift=0, scale=1, out_shift=0, activation=Activation.NONE,
        wide=True, bias=False,
    )  # fmt: skip
    return Pass(name, config.groups(shape.tokens) * job.steps(config), shape.tokens * width * columns)


def _residual(config: Config, shape: LayerShape, name: str) -> tuple[Pass, Pass]:
    return (
        _matrix(config, shape, f"{name}, in", shape.model, shape.mlp),
        _matrix(config, shape, f"{name}, out", shape.mlp, shape.model),
    )


def _items(config: Config, shape: LayerShape) -> int:
    return shape.heads * config.groups(shape.tokens) * config.blocks(shape.tokens)


def _scores(config: Config, shape: LayerShape, name: str) -> Pass:
    chunks = config.chunks(shape.width) + (config.lifted_passes if shape.lifted else 0)
    pairs = shape.heads * shape.tokens * shape.tokens
    lanes = shape.width + (config.lifted_lanes if shape.lifted else 0)
    return Pass(name, _items(config, shape) * chunks * config.pass_steps, pairs * lanes)


def _values(config: Config, shape: LayerShape, name: str) -> Pass:
    steps = config.chunks(shape.width) * config.pass_steps
    return Pass(name, _items(config, shape) * steps, shape.heads * shape.tokens * shape.tokens * shape.width)
