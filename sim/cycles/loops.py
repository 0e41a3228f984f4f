"""Cycles of the loop accounts: every header and word taken, every report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dtp.config import Config
from dtp.errors import must
from dtp.fixed import Int
from dtp.holonomy import LoopParams
from dtp.transport import TransportJob
from sim.cycles.transport import TransportCycles

__all__ = ["LoopsTiming", "UnitTiming", "loops_timing", "unit_timing"]


@dataclass(frozen=True)
class LoopsTiming:
    """Cycles of a run of legal loops with a sink that never stalls, counted from reset.

    P is :class:`dtp.holonomy.LoopParams`. Clearing the tables takes the first ``P.entries`` cycles. A header is taken
    when it is offered and the loop before, or the tables after it, are through. A word is taken ``P.word_cycles − 1``
    cycles after the first one in which it is offered and the words before it are taken. A record is offered
    ``P.energy_cycles + P.ratio_cycles`` cycles after its loop's last word. ``P.update_cycles`` cycles after it the next
    header can be taken, or, after a program's last loop, in the second cycle from then the tables' first entry is
    offered; the others follow every second cycle.

    Parameters
    ----------
    headers: (loops,); words: (words,); reports: (reports,), cycle in which each is taken
    """

    headers: Int
    words: Int
    reports: Int


def loops_timing(
    params: LoopParams,
    lengths: Sequence[int],
    last: Sequence[bool],
    *,
    header_cycles: ArrayLike,
    word_cycles: ArrayLike,
) -> LoopsTiming:
    """What the class docstring says.

    Parameters
    ----------
    lengths: words of each loop; last: whether it is its program's last
    header_cycles, word_cycles: first cycle in which each is offered

    Raises
    ------
    DtpError: lengths that do not fit.
    """
    header_from, word_from = (np.asarray(x, dtype=np.int64).tolist() for x in (header_cycles, word_cycles))
    for name, value, length in (("header_cycles", header_from, len(lengths)), ("word_cycles", word_from, sum(lengths))):
        if len(value) != length:
            raise must("loops_timing", name, f"of length {length}", len(value))
    headers: list[int] = []
    words: list[int] = []
    reports: list[int] = []
    free = params.entries
    for length, is_last, offered in zip(lengths, last, header_from, strict=True):
        headers.append(max(free, offered))
        taken = headers[-1]
        for _ in range(length):
            taken = max(taken + 1, word_from[len(words)]) + params.word_cycles - 1
            words.append(taken)
        reports.append(taken + params.energy_cycles + params.ratio_cycles)
        free = reports[-1] + params.update_cycles + 1
        if is_last:
            reports += range(free + 1, free + 2 * params.entries, 2)
            free = reports[-1] + 1
    return LoopsTiming(*(np.array(x, dtype=np.int64) for x in (headers, words, reports)))


@dataclass(frozen=True)
class UnitTiming:
    """Cycles of programs through :class:`rtl.loops.LoopUnit`, counted from reset, where nothing outside stalls.

    Steps go one by one. The engine takes a step's job in the cycle in which it is offered. From the next one on a start
    vector is sent as the engine takes it; a state of the step before takes two cycles a word. Two cycles after the last
    word has come back the next step is offered, or, three cycles after it, the first pair of words to the accounts. A
    pair follows two cycles after the one before has been taken, the next loop's first step a cycle after the last.

    Parameters
    ----------
    steps: (steps,), cycle in which each is taken; headers: (loops,); reports: (reports,)
    """

    steps: Int
    headers: Int
    reports: Int


def unit_timing(
    config: Config, params: LoopParams, loops: Sequence[Sequence[TransportJob]], last: Sequence[bool]
) -> UnitTiming:
    """What the class docstring says, for the jobs of each loop's steps; ``last`` of each loop: of its program."""
    steps: list[int] = []
    headers: list[int] = []
    reports: list[int] = []
    free, now = params.entries, 0
    for jobs, is_last in zip(loops, last, strict=True):
        for number, job in enumerate(jobs):
            steps.append(now)
            now += _step_cycles(config, job, first=number == 0)
        headers.append(free)
        taken, offered = free, now + 1
        for _ in range(jobs[0].words):
            taken = max(taken + 1, offered) + params.word_cycles - 1
            offered = taken + 2
        reports.append(taken + params.energy_cycles + params.ratio_cycles)
        free, now = reports[-1] + params.update_cycles + 1, taken + 1
        if is_last:
            reports += range(free + 1, free + 2 * params.entries, 2)
            free = reports[-1] + 1
    return UnitTiming(*(np.array(x, dtype=np.int64) for x in (steps, headers, reports)))


def _step_cycles(config: Config, job: TransportJob, *, first: bool) -> int:
    """From the cycle in which a step's job is taken to the one in which the sequencer goes on."""
    engine = TransportCycles(config, job)
    engine.step(True, False, False)
    sent, reads = 0, not first
    while True:
        sends = sent < job.words
        shown = engine.step(True, sends and not reads, not sends)
        if shown.ended:
            return engine.cycle + 1
        if reads:
            reads = False
        elif sends and shown.state_ready:
            sent, reads = sent + 1, not first
