"""Cycles of the loop accounts: every header and word taken, every report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

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
    accounts = _Accounts(params)
    for length, is_last, offered in zip(lengths, last, header_from, strict=True):
        words = iter(word_from[len(accounts.words) :])
        accounts.loop(length, is_last, header_from=offered, word_from=partial(_given, words))
    return LoopsTiming(*(np.array(x, dtype=np.int64) for x in (accounts.headers, accounts.words, accounts.reports)))


def _given(words: Iterator[int], _before: int | None) -> int:
    return next(words)


def _every_second(first: int, before: int | None) -> int:
    return first if before is None else before + 2


class _Accounts:
    """The accounts loop by loop: cycles in which headers, words and reports are taken."""

    def __init__(self, params: LoopParams) -> None:
        self._params = params
        self._free = params.entries
        self.headers: list[int] = []
        self.words: list[int] = []
        self.reports: list[int] = []

    def loop(self, words: int, last: bool, *, header_from: int, word_from: Callable[[int | None], int]) -> None:
        """``word_from``: first cycle in which a word is offered, told when the loop's word before was taken."""
        p = self._params
        self.headers.append(max(self._free, header_from))
        before, earliest = None, self.headers[-1] + 1
        for _ in range(words):
            before = max(earliest, word_from(before)) + p.word_cycles - 1
            earliest = before + 1
            self.words.append(before)
        self.reports.append(earliest - 1 + p.energy_cycles + p.ratio_cycles)
        self._free = self.reports[-1] + p.update_cycles + 1
        if last:
            self.reports += range(self._free + 1, self._free + 2 * p.entries, 2)
            self._free = self.reports[-1] + 1


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
    accounts = _Accounts(params)
    steps: list[int] = []
    now = 0
    for jobs, is_last in zip(loops, last, strict=True):
        for number, job in enumerate(jobs):
            steps.append(now)
            now += _step_cycles(config, job, first=number == 0)
        accounts.loop(
            jobs[0].words, is_last, header_from=0, word_from=partial(_every_second, now + 1),
        )  # fmt: skip
        now = accounts.words[-1] + 1
    return UnitTiming(*(np.array(x, dtype=np.int64) for x in (steps, accounts.headers, accounts.reports)))


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
