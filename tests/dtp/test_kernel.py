"""Programs of the kernel: the same bits as the golden model, states apart, waits that cover every dependence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dtp.commutator import CommutatorMode, Kernel, Operators, golden, quantise
from dtp.config import Config
from dtp.difference import Energies
from dtp.errors import DtpError
from dtp.kernel import KernelParams, Step, StepKind, after_attention, before_attention, bias_bases, execute
from dtp.matrix import MatrixParams, padded
from tests.dtp.test_commutator import layer_of

ECP5 = Config.load("ecp5-85k")
TINY = Config.load("tiny")
NAMES = ("difference", "reference", "ratio")


def groups_of(kernel: Kernel, state: Any) -> list[np.ndarray]:
    rows = kernel.config.rows
    whole = padded(state, kernel.config.groups(len(state)) * rows, state.shape[1])
    return [whole[n : n + rows] for n in range(0, len(whole), rows)]


def in_order(program: list[Step], kind: StepKind) -> list[int]:
    """Groups of a kind of step, in the order of the program; of matrices only those that store."""
    return [step.group for step in program if step.kind is kind and (kind is not StepKind.MATRIX or step.store)]


def check_energies(program: list[Step], made: Sequence[Energies], wanted: Energies, tokens: int) -> None:
    """Energies of the groups of a program are those of all tokens."""
    for group, energies in zip(in_order(program, StepKind.ENERGY), made, strict=True):
        live = min(ECP5.rows, tokens - group * ECP5.rows)
        span = slice(group * ECP5.rows, group * ECP5.rows + live)
        for name in NAMES:
            assert np.array_equal(getattr(energies, name)[:live], getattr(wanted, name)[span])


@pytest.mark.parametrize("mode", CommutatorMode)
@pytest.mark.parametrize("tokens", [8, 40, 21])
def test_programs_are_the_golden_model(mode: CommutatorMode, tokens: int) -> None:
    layer = layer_of(2, tokens=tokens)
    kernel = quantise(ECP5, layer)
    groups = ECP5.groups(tokens)
    run = Operators(kernel)
    h = kernel.hidden
    x = run.add(h, run.residual(h, "in", "out"))
    names = ["v"] + (["q", "k"] if mode is CommutatorMode.FULL else [])
    before = before_attention(kernel, mode, groups)
    made = execute(kernel, before, [groups_of(kernel, h)[n] for n in in_order(before, StepKind.LOAD)])
    stored: dict[str, list[np.ndarray]] = {name: [np.zeros(0)] * groups for name in names}
    storing = [step for step in before if step.store]
    for step, y in zip(storing, made.stored, strict=True):
        stored[step.matrix][step.group] = y
    for name, wanted in zip(names, run.project(x, "".join(names)), strict=True):
        assert np.array_equal(np.concatenate(stored[name])[:tokens], wanted)

    q, k, v = run.project(h, "qkv")
    plain = run.attend(q, k, v)
    if mode is CommutatorMode.FULL:
        q, k = run.project(x, "qk")
    moved = run.attend(q, k, *run.project(x, "v"))
    after = after_attention(kernel, groups)
    turns = [groups_of(kernel, moved), groups_of(kernel, plain)]
    seen: dict[int, int] = {}
    loads = []
    for group in in_order(after, StepKind.LOAD):
        loads.append(turns[seen.get(group, 0)][group])
        seen[group] = 1
    done = execute(kernel, after, loads)
    exact = golden(kernel, mode, per_head=True)
    assert exact.heads is not None
    check_energies(after, done.energies, exact.energies, tokens)

    # The same of each head alone, on its columns.
    width = layer.inner // layer.heads
    for head in range(layer.heads):
        lanes = slice(head * width, (head + 1) * width)
        alone = after_attention(kernel, groups, head=head)
        assert [step.group for step in alone] == [step.group for step in after]
        done = execute(kernel, alone, [load[:, lanes] for load in loads])
        of_head = Energies(*(getattr(exact.heads, name)[head] for name in NAMES))
        check_energies(alone, done.energies, of_head, tokens)


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_waits_cover_every_dependence(groups: int) -> None:
    """Whatever a step reads or overwrites has been finished by then, if matrices end as late as they may."""
    kernel = quantise(TINY, layer_of(4, model=16, heads=2, width=8, mlp=32))
    for program in (before_attention(kernel, CommutatorMode.FULL, groups), after_attention(kernel, groups)):
        open_steps: list[Step] = []
        for step in program:
            open_steps = open_steps[len(open_steps) - step.wait :] if len(open_steps) > step.wait else open_steps
            reads = {step.source, step.addend, step.residual} if step.kind is StepKind.ENERGY else (
                {step.source} if step.kind in (StepKind.MATRIX, StepKind.NORMALISE) else set()
            )  # fmt: skip
            for other in open_steps:
                # An open step still writes its target and reads its addend.
                assert other.store or other.target not in reads | {step.addend}
                used = {other.addend} if other.store else {other.addend, other.target}
                assert step.kind not in (StepKind.LOAD, StepKind.NORMALISE) or step.target not in used
            if step.kind is StepKind.MATRIX:
                open_steps.append(step)
            assert len(open_steps) <= KernelParams(TINY).open_matrices
        waits = [step.wait for step in program if step.kind is StepKind.MATRIX]
        assert groups == 1 or (max(waits) == 3 and np.mean(waits) >= 1)


def test_states_lie_apart() -> None:
    kernel = quantise(TINY, layer_of(4, model=32, heads=2, width=8, mlp=64))
    spans: dict[int, int] = {}
    for program in (before_attention(kernel, CommutatorMode.FULL, 4), after_attention(kernel, 4)):
        for step in program:
            columns = step.width if step.job is None else step.job.columns
            if step.kind is not StepKind.ENERGY and not step.store:
                spans[step.target] = max(spans.get(step.target, 0), TINY.chunks(columns) * TINY.pass_steps)
    ends = [place + size for place, size in sorted(spans.items())]
    assert all(end <= place for end, place in zip(ends, sorted(spans)[1:], strict=False))
    assert ends[-1] <= KernelParams(TINY).state_words


def test_refusals() -> None:
    kernel = quantise(TINY, layer_of(4, model=32, heads=8, width=8, mlp=64))
    names = ["in", "out", "v", "q", "k"]
    limit = MatrixParams(TINY).bias_words
    with pytest.raises(DtpError, match=rf"bias_bases\.names must be matrices with at most {limit} bias words, not 288"):
        bias_bases(kernel, names)
    assert bias_bases(kernel, names[:2]) == {"in": 0, "out": 64}
    with pytest.raises(DtpError, match=r"^after_attention\.head must be in 0…7, not 8$"):
        after_attention(kernel, 1, head=8)
    program = after_attention(kernel, 1)
    with pytest.raises(DtpError, match=r"execute\.loads must be 2 states, one a LOAD step, not 0"):
        execute(kernel, program, [])
