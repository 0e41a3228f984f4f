"""Cycles of the holonomy field: every job and word taken, every score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dtp.errors import must
from dtp.fixed import Int
from dtp.holonomy import FieldJob, FieldParams

__all__ = ["FieldTiming", "field_timing"]


@dataclass(frozen=True)
class FieldTiming:
    """Cycles of a run with a sink that never stalls. P is :class:`dtp.holonomy.FieldParams`.

    A cycle issues one of: the last product of a score, else a step of a word, else a step of a Gram product. A word
    takes ``P.word_steps`` steps and leaves the input with its last one.

    - A job is taken when it is offered and the job before was handed over to the scores in an earlier cycle; its first
      word is issued a cycle later at the earliest.
    - It is handed over ``P.product_cycles + 2`` cycles after the issue of its last step, or, if that is later, in the
      cycle after the last product of the head before. Its first score starts in the next cycle.
    - A score that starts in cycle s issues Gram steps from s on. Its last product is issued 1 + shift cycles after the
      later of s + 2 + ``P.weight_steps`` and ``P.product_cycles + 1`` cycles after its last Gram step; the score is
      offered ``P.result_cycles`` later; the next score of the head starts a cycle after the product's issue.
    - A last product is not issued before the score before it has been taken in an earlier cycle.

    Parameters
    ----------
    jobs: (jobs,), cycle in which each job is taken
    words: (words,), the same of all words
    scores: (scores,), cycle in which each score is offered and taken
    """

    jobs: Int
    words: Int
    scores: Int


def field_timing(
    params: FieldParams, jobs: Sequence[FieldJob], *, job_cycles: ArrayLike, word_cycles: ArrayLike
) -> FieldTiming:
    """What the class docstring says, for given arrivals.

    Parameters
    ----------
    jobs: in order
    job_cycles: (jobs,), first cycle in which each job is offered, once the one before is taken
    word_cycles: (words,), first cycle in which each word is offered, once the one before is taken

    Raises
    ------
    DtpError: lengths that do not fit.
    """
    job_from, word_from = (np.asarray(x, dtype=np.int64).tolist() for x in (job_cycles, word_cycles))
    total = sum(job.tokens * job.words for job in jobs)
    for name, value, length in (("job_cycles", job_from, len(jobs)), ("word_cycles", word_from, total)):
        if len(value) != length:
            raise must("field_timing", name, f"of length {length}", len(value))
    run = _Run(params, jobs, job_from, word_from)
    while not run.done:
        run.cycle()
    return FieldTiming(*(np.array(x, dtype=np.int64) for x in (run.job_taken, run.word_taken, run.score_taken)))


class _Run:
    def __init__(
        self, params: FieldParams, jobs: Sequence[FieldJob], job_from: list[int], word_from: list[int]
    ) -> None:
        self._p, self._jobs, self._job_from, self._word_from = params, jobs, job_from, word_from
        self._scores = sum(_count(job, params) for job in jobs)
        self._now = 0
        self.job_taken: list[int] = []
        self.word_taken: list[int] = []
        self.score_taken: list[int] = []
        # Loading: steps left of the newest job, and the cycle from which its words are issued.
        self._steps_left, self._words_from = 0, 0
        # Handing over: the cycle in which the loaded head can go, and whether one waits.
        self._waiting, self._full_from = False, 0
        # Scoring: number of the head, first cycle in which the next can begin, scores left with their shifts.
        self._heads, self._free_from = 0, 0
        self._shifts: list[int] = []
        self._start = self._gram_left = self._gram_done = 0
        self._gram_known = False
        self._last_taken = -1

    @property
    def done(self) -> bool:
        return len(self.score_taken) == self._scores

    def cycle(self) -> None:
        p, now = self._p, self._now
        self._now += 1
        if self._waiting and now >= self._full_from and not self._shifts and now >= self._free_from:
            self._waiting = False
            self._shifts = _shifts(self._jobs[self._heads], p)[::-1]
            self._begin(now + 1)
            # A job can be taken from the next cycle on.
            self._job_free = now + 1
        elif self._next_job(now):
            job = self._jobs[len(self.job_taken)]
            self.job_taken.append(now)
            self._steps_left, self._words_from = job.tokens * job.words * p.word_steps, now + 1
        if self._final(now):
            self._shifts.pop()
            offered = now + p.result_cycles
            self.score_taken.append(offered)
            self._last_taken = offered
            if self._shifts:
                self._begin(now + 1)
            else:
                self._heads += 1
                self._free_from = now + 1
        elif self._steps_left and now >= self._words_from and now >= self._word_from[len(self.word_taken)]:
            self._steps_left -= 1
            if self._steps_left % p.word_steps == 0:
                self.word_taken.append(now)
            if not self._steps_left:
                self._waiting, self._full_from = True, now + p.product_cycles + 2
        elif self._gram_left and now >= self._start:
            self._gram_left -= 1
            if not self._gram_left:
                self._gram_known, self._gram_done = True, now + p.product_cycles + 1

    _job_free = 0

    def _next_job(self, now: int) -> bool:
        number = len(self.job_taken)
        return (
            number < len(self._jobs)
            and not self._steps_left
            and not self._waiting
            and now >= self._job_free
            and now >= self._job_from[number]
        )

    def _begin(self, start: int) -> None:
        self._start, self._gram_known = start, False
        self._gram_left = self._jobs[self._heads].words * self._p.word_steps

    def _final(self, now: int) -> bool:
        if not self._shifts or not self._gram_known:
            return False
        difference = max(self._start + 2 + self._p.weight_steps, self._gram_done)
        return now >= difference + 1 + self._shifts[-1] and now > self._last_taken


def _shifts(job: FieldJob, params: FieldParams) -> list[int]:
    """Shift of every score of a head, in order."""
    blocks = -(-job.tokens // params.block)
    last = blocks - 1
    return [
        job.shifts[(i == last) + (j == last)] for i in range(blocks) for j in range(i + 1 if job.causal else blocks)
    ]


def _count(job: FieldJob, params: FieldParams) -> int:
    return len(_shifts(job, params))
