"""Steps of the commutator kernel and its programs: what the hardware does with states of one row group at a time.

A *program* is a list of :class:`Step`. States lie in a memory of words (``rows`` × ``segments`` elements of 16 bits),
width / segments of them for a tensor of a group. :func:`before_attention` and :func:`after_attention` are the two
halves of the kernel around the tile's walk; they interleave two groups, so that one group's matrix steps while the
outputs of the other are requantised (docs/commutator.md §7). :func:`execute` is the golden model of a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike

from dtp.commutator import CommutatorMode, Kernel
from dtp.config import Config
from dtp.difference import Energies, energies
from dtp.errors import must
from dtp.fixed import Int, overflows, saturate
from dtp.layernorm import layernorm, variances
from dtp.matrix import STATE_BITS, MatrixJob, MatrixParams, matrix, padded

MAX_WAIT = 3
"""Largest number of matrix steps that a step may leave unfinished."""


class StepKind(IntEnum):
    """What a step does."""

    LOAD = 0
    """Words of the input stream become a state."""
    MATRIX = 1
    """A matrix job on a state; its outputs become a state or leave."""
    ENERGY = 2
    """Energies of the difference of three states leave."""
    NORMALISE = 3
    """A state through the LayerNorm becomes another one."""


@dataclass(frozen=True)
class KernelParams:
    """Sizes of the kernel of a configuration."""

    config: Config

    @property
    def state_words(self) -> int:
        """Words of the state memory: two groups, each with a hidden MLP layer and six states of the model."""
        c = self.config
        words = 2 * (c.max_mlp + 6 * c.max_model) // c.segments
        return int(1 << (words - 1).bit_length())

    @property
    def open_matrices(self) -> int:
        """Matrix steps that may be under way."""
        return MAX_WAIT + 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step on one group.

    Parameters
    ----------
    kind: what it does
    target: state of a LOAD or NORMALISE, or of the outputs of a MATRIX that does not store
    source: state that a MATRIX or NORMALISE reads, or Attn(h + Res(h)) of an ENERGY
    addend: state added to the outputs of a MATRIX (None: nothing), or Attn(h) of an ENERGY
    residual: Res(Attn(h)) of an ENERGY
    width: elements of a row, of all but a MATRIX
    store: outputs of a MATRIX leave instead of becoming a state
    matrix: name in :attr:`dtp.commutator.Kernel.matrices`
    job: its numbers; bias_base: its first resident bias word
    wait: how many of the MATRIX steps before may be unfinished when it begins
    group: row group, for those who read along
    """

    kind: StepKind
    group: int
    wait: int = 0
    target: int = 0
    source: int = 0
    addend: int | None = None
    residual: int = 0
    width: int = 0
    store: bool = False
    matrix: str = ""
    job: MatrixJob | None = None
    bias_base: int = 0

    def words(self, config: Config) -> int:
        """Words that the step reads, once."""
        width = self.width if self.job is None else self.job.width
        return config.chunks(width) * config.pass_steps


def bias_bases(kernel: Kernel, names: Sequence[str]) -> dict[str, int]:
    """Resident bias word of each matrix of a program.

    Raises
    ------
    DtpError
        when the biases do not fit
    """
    base, bases = 0, {}
    for name in names:
        found = kernel.matrices[name]
        bases[name] = base
        base += found.job.blocks(kernel.config) * kernel.config.pass_steps if found.job.bias else 0
    limit = MatrixParams(kernel.config).bias_words
    if base > limit:
        raise must("bias_bases", "names", f"matrices with at most {limit} bias words", base)
    return bases


@dataclass
class _Places:
    """Word addresses of one of the two groups that are worked on."""

    config: Config
    number: int

    def __call__(self, name: str) -> int:
        c = self.config
        states = ("first", "second", "third", "fourth", "fifth", "sixth")
        half = KernelParams(c).state_words // 2 * self.number
        if name == "inner":
            return half
        return half + (c.max_mlp + states.index(name) * c.max_model) // c.segments


def before_attention(kernel: Kernel, mode: CommutatorMode, groups: int) -> list[Step]:
    """Program of h → values (and queries and keys) of h + Res(h). Input: h. Outputs: values, then queries, keys."""
    names = ["in", "out", "v"] + (["q", "k"] if mode is CommutatorMode.FULL else [])
    layer = kernel.layer

    def turns(group: _Group) -> Iterator[list[Step]]:
        yield [group.load("first", layer.model)]
        norm, there = group.normed("first", layer.ln_mlp is not None)
        yield [*norm, group.matrix("in", there, "inner")]
        yield [group.matrix("out", "inner", "second", addend="first")]
        norm, there = group.normed("second", layer.ln_attn is not None)
        yield [*norm, *(group.matrix(name, there) for name in names[2:])]

    return _interleaved(kernel, names, turns, groups)


def after_attention(kernel: Kernel, groups: int, *, head: int | None = None) -> list[Step]:
    """Program of the heads' outputs at h + Res(h) and at h → energies. Input: both, in this order.

    With ``head`` the energies are those of one head, and so are the inputs.

    Raises
    ------
    DtpError
        for a head that the layer has not, or biases that do not fit
    """
    layer = kernel.layer
    if head is not None and not 0 <= head < layer.heads:
        raise must("after_attention", "head", f"in 0…{layer.heads - 1}", head)
    output = "o" if head is None else f"o_{head}"
    width = layer.inner if head is None else layer.inner // layer.heads

    def turns(group: _Group) -> Iterator[list[Step]]:
        # The heads' outputs lie where the hidden layer comes later.
        for target in ("second", "first"):
            yield [group.load("inner", width), group.matrix(output, "inner", target)]
        norm, there = group.normed("first", layer.ln_mlp is not None)
        yield [*norm, group.matrix("in_a", there, "inner")]
        yield [group.matrix("out_a", "inner", "third")]
        yield [group.energy("second", "first", "third")]

    return _interleaved(kernel, [output, "in_a", "out_a"], turns, groups)


@dataclass
class _Group:
    """Makes the steps of a group; states have the names of :class:`_Places`."""

    kernel: Kernel
    bases: dict[str, int]
    number: int

    def __post_init__(self) -> None:
        self._place = _Places(self.kernel.config, self.number % 2)

    def load(self, target: str, width: int) -> Step:
        return Step(kind=StepKind.LOAD, group=self.number, target=self._place(target), width=width)

    def normed(self, source: str, with_norm: bool) -> tuple[list[Step], str]:
        """What normalises a state, and where it is then: in the third one, or where it was."""
        if not with_norm:
            return [], source
        width = self.kernel.layer.model
        return [Step(
            kind=StepKind.NORMALISE, group=self.number, source=self._place(source), target=self._place("third"),
            width=width,
        )], "third"  # fmt: skip

    def matrix(self, name: str, source: str, target: str = "", *, addend: str = "") -> Step:
        """Without a target its outputs leave."""
        return Step(
            kind=StepKind.MATRIX, group=self.number, source=self._place(source), matrix=name,
            job=self.kernel.matrices[name].job, bias_base=self.bases[name],
            target=self._place(target) if target else 0, addend=self._place(addend) if addend else None,
            store=not target,
        )  # fmt: skip

    def energy(self, attended: str, plain: str, residual: str) -> Step:
        return Step(
            kind=StepKind.ENERGY, group=self.number, width=self.kernel.layer.model, source=self._place(attended),
            addend=self._place(plain), residual=self._place(residual),
        )  # fmt: skip


def _interleaved(
    kernel: Kernel, names: Sequence[str], turns: Callable[[_Group], Iterator[list[Step]]], groups: int
) -> list[Step]:
    """Two groups take turns, a last one is alone; a group's matrices step while the other one is normalised."""
    bases = bias_bases(kernel, names)
    program: list[Step] = []
    for first in range(0, groups, 2):
        pair = [turns(_Group(kernel, bases, group)) for group in range(first, min(first + 2, groups))]
        for both in zip(*pair, strict=True):
            for turn in both:
                program += turn
    return with_waits(program)


def with_waits(program: Sequence[Step]) -> list[Step]:
    """The program with the largest ``wait`` of each step that keeps its operands: those of the newest matrix that
    writes what it reads, or that still uses what it overwrites, are finished."""
    matrices: list[Step] = []
    result = []
    for step in program:
        wait = next((n for n, other in enumerate(reversed(matrices)) if _depends(step, other)), MAX_WAIT)
        result.append(replace(step, wait=min(wait, MAX_WAIT)))
        if step.kind is StepKind.MATRIX:
            matrices.append(step)
    return result


def _depends(step: Step, matrix: Step) -> bool:
    """Whether ``step`` may not begin before the MATRIX step ``matrix`` is finished. Matrices write in their order."""
    written = None if matrix.store else matrix.target
    if step.kind is StepKind.LOAD:
        return step.target in (written, matrix.addend)
    if step.kind is StepKind.NORMALISE:
        return step.target in (written, matrix.addend) or (written is not None and written == step.source)
    if step.kind is StepKind.MATRIX:
        return written is not None and written in (step.source, step.addend)
    return written in (step.source, step.addend, step.residual)


# Golden model of a program


@dataclass(frozen=True, eq=False)
class Executed:
    """What a program gives.

    Members
    -------
    stored: for each storing step in order, (rows, columns)
    energies: for each ENERGY step in order, of the rows
    variances: for each NORMALISE step in order, V of the rows
    saturations: of matrices; sum_saturations: of sums and LayerNorms
    """

    stored: tuple[Int, ...]
    energies: tuple[Energies, ...]
    variances: tuple[Int, ...]
    saturations: int
    sum_saturations: int


def execute(kernel: Kernel, program: Sequence[Step], loads: Sequence[ArrayLike]) -> Executed:
    """A program on whole row groups; ``loads`` are the (rows, width) states of its LOAD steps in order.

    Raises
    ------
    DtpError
        when there are not as many loads as LOAD steps
    """
    config = kernel.config
    wanted = sum(step.kind is StepKind.LOAD for step in program)
    if len(loads) != wanted:
        raise must("execute", "loads", f"{wanted} states, one a LOAD step", len(loads))
    states: dict[int, Int] = {}
    stored, records, spreads = [], [], []
    given = iter(loads)
    saturations = sum_saturations = 0
    for step in program:
        if step.kind is StepKind.LOAD:
            states[step.target] = padded(next(given), config.rows, step.width)
        elif step.kind is StepKind.NORMALISE:
            spreads.append(variances(states[step.source]))
            states[step.target], count = layernorm(states[step.source])
            sum_saturations += count
        elif step.kind is StepKind.MATRIX:
            assert step.job is not None
            found = kernel.matrices[step.matrix]
            y, count = matrix(config, step.job, states[step.source], found.weights, found.bias)
            saturations += count
            if step.addend is not None:
                total = y + states[step.addend]
                sum_saturations += int(np.count_nonzero(overflows(total, STATE_BITS)))
                y = saturate(total, STATE_BITS)
            if step.store:
                stored.append(y)
            else:
                states[step.target] = y
        else:
            assert step.addend is not None
            records.append(energies(states[step.source], states[step.addend], states[step.residual]))
    return Executed(tuple(stored), tuple(records), tuple(spreads), saturations, sum_saturations)
