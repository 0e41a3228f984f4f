"""Cycles of the matrix mode: every step of the array and every output word."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dtp.array import ArrayParams
from dtp.config import Config
from dtp.errors import must
from dtp.fixed import Int
from dtp.matrix import OPEN_JOBS, READ_CYCLES, MatrixJob, MatrixParams

__all__ = ["MatrixCycles", "MatrixTiming", "matrix_timing"]


class _Pass(NamedTuple):
    """A chunk of the operand, a tile of columns: how many steps, whether they emit, whether the job ends with them."""

    steps: int
    emits: bool
    ends_job: bool


class MatrixCycles:
    """``MatrixMode`` without its numbers, cycle by cycle; P is :class:`dtp.matrix.MatrixParams`.

    A job is taken when no other one is loading, one of the two slots is free (the last feed of the job that held it is
    read) and fewer than ``OPEN_JOBS`` are open (two cycles after the last word's last beat is issued). Its activations
    are taken one a cycle from then on. Its first pass can be fed ``P.load_cycles`` after the last of them, later passes
    a cycle after they became the next one.

    Feeds of a pass start with the first step of the pass before, or when that is long gone; ``block / segments`` of
    them follow without a gap. Its steps start after its feeds and after the steps of the pass before; a step waits for
    its weights, and one that emits for room among the ``P.result_words`` sums.

    A word is issued to the requantiser ``P.sum_cycles`` after its step or when the word before is through, which takes
    ``P.word_beats`` cycles, and when fewer than ``P.output_words`` are on the way; it is at the output
    ``P.issue_cycles`` after its last beat.

    Members
    -------
    job_ready, loading: whether a job, or a word of activations, would be taken
    offers, offers_last: whether an output word is offered, and whether it is its job's last
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._params = MatrixParams(config)
        self._sum_cycles = READ_CYCLES + ArrayParams.of(config).latency
        self._now = 0
        # Jobs: loaded into slots, and open.
        self.loading = False
        self._slots: list[MatrixJob | None] = [None, None]
        self._load_slot = self._release_slot = self._open = self._loaded_words = 0
        self._loaded = [False, False]
        self._written: deque[tuple[int, int]] = deque()  # cycle in which a slot can be read, and the slot
        # Passes: of the oldest loaded job, fed, stepping.
        self._passes: deque[_Pass] | None = None
        self._slot = 0
        self._fed: _Pass | None = None
        self._feeds = 0
        self._current: _Pass | None = None
        self._steps = 0
        # Requantiser: sums on their way and there, each whether it ends a job; words at the output.
        self._free = self._params.result_words
        self._coming: deque[tuple[int, bool]] = deque()
        self._there: deque[bool] = deque()
        self._beat = self._waiting = 0
        self._job_done = False
        self._words: deque[tuple[int, bool]] = deque()

    @property
    def job_ready(self) -> bool:
        return not self.loading and self._slots[self._load_slot] is None and self._open != OPEN_JOBS

    @property
    def offers(self) -> bool:
        return bool(self._words) and self._words[0][0] <= self._now

    @property
    def offers_last(self) -> bool:
        return self.offers and self._words[0][1]

    def step(self, job: MatrixJob | None, word: bool, weights: bool, pop: bool) -> bool:
        """One cycle; whether the array steps in it, with which it takes its weights.

        Parameters
        ----------
        job, word: taken in this cycle, when they can be; weights: are offered; pop: the output word is taken
        """
        p, now, done = self._params, self._now, self._job_done
        issue, release = self._advance(weights)
        self._requantise(pop)
        # Jobs and activations.
        while self._written and self._written[0][0] <= now:
            self._loaded[self._written.popleft()[1]] = True
        self._open += (job is not None) - done
        if word:
            self._loaded_words -= 1
            if self._loaded_words == 0:
                self.loading = False
                self._written.append((now + p.load_cycles - 3, self._load_slot))
                self._load_slot ^= 1
        if job is not None:
            self.loading, self._slots[self._load_slot] = True, job
            self._loaded_words = job.chunks(self._config) * self._config.pass_steps
        if release:
            self._slots[self._release_slot], self._loaded[self._release_slot] = None, False
            self._release_slot ^= 1
        self._now += 1
        return issue

    def _advance(self, weights: bool) -> tuple[bool, bool]:
        """Passes move on; whether the array steps, and whether the oldest slot's last feed is read."""
        feeds = self._config.pass_steps
        current, fed = self._current, self._fed
        issue = current is not None and weights and (self._free > 0 or not current.emits)
        ends = issue and current is not None and self._steps == current.steps - 1
        feeding = fed is not None and self._feeds < feeds and (current is None or self._steps > 0 or issue)
        self._feeds += feeding
        ready = fed is not None and self._feeds == feeds
        release = feeding and ready and fed is not None and fed.ends_job
        move = ready and (current is None or ends)
        taken = self._passes is not None and (fed is None or move)
        if issue and current is not None:
            self._steps += 1
            if current.emits:
                self._free -= 1
                self._coming.append((self._now + self._sum_cycles, current.ends_job and ends))
            if ends:
                self._current = None
        if move:
            self._current, self._fed, self._steps, self._feeds = fed, None, 0, 0
        if self._passes is None:
            job = self._slots[self._slot]
            if self._loaded[self._slot] and job is not None:
                self._passes = deque(self._passes_of(job))
        elif taken:
            self._fed = self._passes.popleft()
            if not self._passes:
                self._passes, self._slot = None, self._slot ^ 1
        return issue, release

    def _passes_of(self, job: MatrixJob) -> list[_Pass]:
        tiles, chunks = job.tiles(self._config), job.chunks(self._config)
        return [
            _Pass(blocks * self._config.pass_steps, chunk == chunks - 1, chunk == chunks - 1 and n == len(tiles) - 1)
            for n, blocks in enumerate(tiles)
            for chunk in range(chunks)
        ]

    def _requantise(self, pop: bool) -> None:
        p = self._params
        self._waiting -= pop
        if pop:
            self._words.popleft()
        self._job_done = False
        if self._beat or (self._there and self._waiting + pop != p.output_words):
            self._waiting += self._beat == 0
            self._beat += 1
            if self._beat == p.word_beats:
                self._beat = 0
                self._free += 1
                self._job_done = self._there.popleft()
                self._words.append((self._now + p.issue_cycles, self._job_done))
        while self._coming and self._coming[0][0] <= self._now:
            self._there.append(self._coming.popleft()[1])


@dataclass(frozen=True)
class MatrixTiming:
    """Cycles of a run of the matrix mode with a sink that never stalls; :class:`MatrixCycles` has the rules.

    Parameters
    ----------
    jobs: (jobs,), cycle in which each is taken
    activations: for each job (words,), cycles in which its activations are taken
    steps: (steps,), issue of every step of all jobs; weights are taken in the same cycle
    outputs: (words,), cycle of each output word
    """

    jobs: Int
    activations: tuple[Int, ...]
    steps: Int
    outputs: Int

    @property
    def idle_steps(self) -> int:
        """Cycles without a step between the first and the last one."""
        return int(self.steps[-1] - self.steps[0]) + 1 - len(self.steps)


def matrix_timing(
    config: Config,
    jobs: Sequence[MatrixJob],
    *,
    offered_jobs: ArrayLike | None = None,
    offered_activations: Sequence[ArrayLike] | None = None,
    offered_weights: ArrayLike | None = None,
) -> MatrixTiming:
    """What the class docstring says, for given arrivals; from idle, the first job offered in cycle 0.

    Parameters
    ----------
    jobs: one for each group, in order
    offered_jobs: (jobs,), first cycle in which each may be offered; None: always
    offered_activations, offered_weights: the same for each job's words, and for every entry

    Raises
    ------
    DtpError
        for lengths that do not fit
    """
    job_offers = _offers("offered_jobs", offered_jobs, len(jobs))
    if offered_activations is not None and len(offered_activations) != len(jobs):
        raise must("matrix_timing", "offered_activations", f"of length {len(jobs)}", len(offered_activations))
    word_offers = [
        _offers(
            f"offered_activations[{number}]",
            None if offered_activations is None else offered_activations[number],
            job.chunks(config) * config.pass_steps,
        )
        for number, job in enumerate(jobs)
    ]
    weight_offers = _offers("offered_weights", offered_weights, sum(job.steps(config) for job in jobs))
    total = sum(job.blocks(config) * config.pass_steps for job in jobs)

    mode = MatrixCycles(config)
    taken: list[int] = []
    activations: list[list[int]] = [[] for _ in jobs]
    steps: list[int] = []
    outputs: list[int] = []
    now = 0
    while len(outputs) < total:
        offered = len(taken) < len(jobs) and now >= job_offers[len(taken)] and mode.job_ready
        words = activations[len(taken) - 1] if mode.loading else []
        word = mode.loading and now >= word_offers[len(taken) - 1][len(words)]
        if word:
            words.append(now)
        if mode.offers:
            outputs.append(now)
        weights = len(steps) < len(weight_offers) and now >= weight_offers[len(steps)]
        if mode.step(jobs[len(taken)] if offered else None, word, bool(weights), mode.offers):
            steps.append(now)
        if offered:
            taken.append(now)
        now += 1
    return MatrixTiming(
        jobs=np.array(taken, dtype=np.int64),
        activations=tuple(np.array(words, dtype=np.int64) for words in activations),
        steps=np.array(steps, dtype=np.int64),
        outputs=np.array(outputs, dtype=np.int64),
    )


def _offers(name: str, given: ArrayLike | None, length: int) -> Int:
    if given is None:
        return np.zeros(length, dtype=np.int64)
    offers = np.asarray(given, dtype=np.int64)
    if offers.shape != (length,):
        raise must("matrix_timing", name, f"of shape ({length},)", offers.shape)
    return offers
