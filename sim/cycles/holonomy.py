"""Cycles of the holonomy field: every job and word taken, every score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dtp.errors import must
from dtp.fixed import Int
from dtp.holonomy import FieldJob, FieldParams

__all__ = ["FieldCycles", "FieldStep", "FieldTiming", "field_timing"]


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
    - A score below the diagonal, in a job that is not causal, is a copy: one that starts in cycle s is copied in s + 1
      and offered in the next cycle, in which the next score starts. Copies issue nothing.
    - No last product is issued and no copy made before the score before has been taken in an earlier cycle.

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
    field, now = FieldCycles(params), 0
    wanted = sum(len(score_kinds(job, params)) for job in jobs)
    job_taken: list[int] = []
    word_taken: list[int] = []
    scores: list[int] = []
    while len(scores) < wanted:
        more = len(job_taken) < len(jobs) and now >= job_from[len(job_taken)]
        word = len(word_taken) < total and now >= word_from[len(word_taken)]
        step = field.step(jobs[len(job_taken)] if more else None, word, True)
        job_taken += [now] * step.job_taken
        word_taken += [now] * step.word_taken
        scores += [now] * step.score_taken
        now += 1
    return FieldTiming(*(np.array(x, dtype=np.int64) for x in (job_taken, word_taken, scores)))


@dataclass(frozen=True)
class FieldStep:
    """One cycle at the ports of the field: what is taken."""

    job_taken: bool
    word_taken: bool
    score_taken: bool


class FieldCycles:
    """``HolonomyField`` without its numbers, cycle by cycle, as :class:`FieldTiming` says."""

    def __init__(self, params: FieldParams) -> None:
        self._p = params
        self._now = 0
        # Loading: steps left of the newest job, and the cycle from which its words are issued.
        self._newest: FieldJob | None = None
        self._steps_left, self._words_from = 0, 0
        self._job_free = 0
        # Handing over: the cycle in which the loaded head can go, and whether one waits.
        self._waiting, self._full_from = False, 0
        # Scoring: the head, first cycle in which the next can begin, scores left, those of the next last.
        self._scored: FieldJob | None = None
        self._free_from = 0
        self._left: list[int | None] = []
        self._start = self._gram_left = self._gram_done = 0
        self._gram_known = False
        self._offered_from: int | None = None
        self._last_taken = -1

    @property
    def offers(self) -> bool:
        """Whether a score is offered in the next cycle to be stepped."""
        return self._offered_from is not None and self._offered_from <= self._now

    def step(self, job: FieldJob | None, word_valid: bool, score_ready: bool) -> FieldStep:
        """One cycle in which ``job``, if any, and a word are offered, and a score would be taken."""
        p, now = self._p, self._now
        job_taken = word_taken = False
        score_taken = self.offers and score_ready
        if score_taken:
            self._offered_from, self._last_taken = None, now
        self._now += 1
        if self._waiting and now >= self._full_from and not self._left and now >= self._free_from:
            self._waiting = False
            self._scored = self._newest
            assert self._scored is not None
            self._left = score_kinds(self._scored, p)[::-1]
            self._begin(now + 1)
            # A job can be taken from the next cycle on.
            self._job_free = now + 1
        elif job is not None and not self._steps_left and not self._waiting and now >= self._job_free:
            job_taken = True
            self._newest = job
            self._steps_left, self._words_from = job.tokens * job.words * p.word_steps, now + 1
        final, copy = self._final(now), self._copy(now)
        if final or copy:
            self._left.pop()
            self._offered_from = now + (1 if copy else p.result_cycles)
            if self._left:
                self._begin(now + 1)
            else:
                self._free_from = now + 1
        if final:
            pass
        elif self._steps_left and now >= self._words_from and word_valid:
            self._steps_left -= 1
            word_taken = self._steps_left % p.word_steps == 0
            if not self._steps_left:
                self._waiting, self._full_from = True, now + p.product_cycles + 2
        elif self._gram_left and now >= self._start:
            self._gram_left -= 1
            if not self._gram_left:
                self._gram_known, self._gram_done = True, now + p.product_cycles + 1
        return FieldStep(job_taken, word_taken, score_taken)

    def _begin(self, start: int) -> None:
        assert self._scored is not None
        self._start, self._gram_known = start, False
        self._gram_left = 0 if self._left[-1] is None else self._scored.words * self._p.word_steps

    def _untaken(self, now: int) -> bool:
        return self._offered_from is not None or now <= self._last_taken

    def _final(self, now: int) -> bool:
        if not self._left or not self._gram_known or self._untaken(now):
            return False
        shift = self._left[-1]
        assert shift is not None
        return now >= max(self._start + 2 + self._p.weight_steps, self._gram_done) + 1 + shift

    def _copy(self, now: int) -> bool:
        return bool(self._left) and self._left[-1] is None and now > self._start and not self._untaken(now)


def score_kinds(job: FieldJob, params: FieldParams) -> list[int | None]:
    """Shift of every score of a head, in order; None of one that is copied."""
    blocks = -(-job.tokens // params.block)
    last = blocks - 1
    return [
        job.shifts[(i == last) + (j == last)] if job.causal or i <= j else None
        for i in range(blocks)
        for j in range(i + 1 if job.causal else blocks)
    ]
