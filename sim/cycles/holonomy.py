"""Cycles of the holonomy field: every job and word taken, every score."""

from __future__ import annotations

import math
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

    A cycle issues one of: the last product of a score, else a step of a word or one of a Gram product, in turn where
    both wait. A word takes ``P.word_steps`` steps and leaves the input with its last one.

    - A job is taken when it is offered, the job before had its last step issued and was handed over to the scores in an
      earlier cycle; its first word is issued a cycle later at the earliest.
    - A block is complete ``P.product_cycles + 2`` cycles after the issue of its last step.
    - A job is handed over when its first block is complete, or, if that is later, in the cycle after the last product
      or copy of the head before. Its first score starts in the next cycle.
    - A score of which a computed block is not complete when it starts counts from the cycle in which it is. One that
      starts in cycle s issues Gram steps from s on. Its last product is issued 1 + shift cycles after the later of
      s + 2 + ``P.weight_steps`` and ``P.product_cycles + 1`` cycles after its last Gram step; the score is offered
      ``P.result_cycles`` later; the next score of the head starts a cycle after the product's issue.
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
    wanted = sum(len(head_scores(job, params)) for job in jobs)
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
        # Loading: steps left of the newest job, the cycle from which its words are issued, when blocks are complete.
        self._newest: FieldJob | None = None
        self._steps_left, self._words_from, self._job_free = 0, 0, 0
        self._complete: list[int] = []
        self._handed = True
        # Scoring: the head, first cycle in which the next can begin, scores left, those of the next last.
        self._scored: FieldJob | None = None
        self._blocks: list[int] = []
        self._free_from = 0
        self._left: list[_Score] = []
        self._start = self._gram_left = self._gram_done = 0
        self._gram_known = False
        self._yields = False  # a Gram step waited in the cycle before
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
        if not self._handed and self._complete and now >= max(self._complete[0], self._free_from) and not self._left:
            assert self._newest is not None
            self._handed, self._scored, self._blocks = True, self._newest, self._complete
            self._left = head_scores(self._scored, p)[::-1]
            self._begin(now + 1)
            self._job_free = max(self._job_free, now + 1)
        elif job is not None and not self._steps_left and self._handed and now >= self._job_free:
            job_taken = True
            self._newest, self._handed, self._complete = job, False, []
            self._steps_left, self._words_from = job.tokens * job.words * p.word_steps, now + 1
        final, copy = self._final(now), self._copy(now)
        if final or copy:
            self._left.pop()
            self._offered_from = now + (1 if copy else p.result_cycles)
            if self._left:
                self._begin(now + 1)
            else:
                self._free_from = now + 1
        wanted = bool(self._gram_left) and now >= self._start and self._there <= now
        gram = False
        if not final and not self._yields and self._steps_left and now >= self._words_from and word_valid:
            assert self._newest is not None
            self._steps_left -= 1
            word_taken = self._steps_left % p.word_steps == 0
            tokens, rest = divmod(self._steps_left, self._newest.words * p.word_steps)
            if not rest and ((self._newest.tokens - tokens) % p.block == 0 or not tokens):
                self._complete.append(now + p.product_cycles + 2)
            if not self._steps_left:
                self._job_free = now + 1
        elif not final and wanted:
            gram = True
            self._gram_left -= 1
            if not self._gram_left:
                self._gram_known, self._gram_done = True, now + p.product_cycles + 1
        self._yields = wanted and not gram
        return FieldStep(job_taken, word_taken, score_taken)

    def _begin(self, start: int) -> None:
        assert self._scored is not None
        self._start, self._gram_known = start, False
        self._gram_left = 0 if self._left[-1].shift is None else self._scored.words * self._p.word_steps

    @property
    def _there(self) -> float:
        """First cycle in which the blocks of the next score are complete."""
        block = self._left[-1].block
        return self._blocks[block] if block < len(self._blocks) else math.inf

    def _untaken(self, now: int) -> bool:
        return self._offered_from is not None or now <= self._last_taken

    def _final(self, now: int) -> bool:
        if not self._left or not self._gram_known or self._untaken(now):
            return False
        shift = self._left[-1].shift
        assert shift is not None
        start = max(self._start, self._there)
        return now >= max(start + 2 + self._p.weight_steps, self._gram_done) + 1 + shift

    def _copy(self, now: int) -> bool:
        return bool(self._left) and self._left[-1].shift is None and now > self._start and not self._untaken(now)


@dataclass(frozen=True)
class _Score:
    """``block``: the later of its two; ``shift``: None of one that is copied."""

    block: int
    shift: int | None


def head_scores(job: FieldJob, params: FieldParams) -> list[_Score]:
    """Every score of a head, in order."""
    blocks = -(-job.tokens // params.block)
    last = blocks - 1
    return [
        _Score(max(i, j), job.shifts[(i == last) + (j == last)] if job.causal or i <= j else None)
        for i in range(blocks)
        for j in range(i + 1 if job.causal else blocks)
    ]
