"""Cycles of the matrix mode: every step of the array and every output word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dtp.config import Config
from dtp.errors import must
from dtp.fixed import Int
from dtp.matrix import OPEN_JOBS, MatrixJob, MatrixParams

__all__ = ["MatrixTiming", "matrix_timing"]


@dataclass(frozen=True)
class MatrixTiming:
    """Cycles of a run of the matrix mode with a sink that never stalls; P is :class:`dtp.matrix.MatrixParams`.

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
    p, steps_of_feeds = MatrixParams(config), config.pass_steps
    job_offers = _offers("offered_jobs", offered_jobs, len(jobs))
    word_counts = [job.chunks(config) * steps_of_feeds for job in jobs]
    if offered_activations is not None and len(offered_activations) != len(jobs):
        raise must("matrix_timing", "offered_activations", f"of length {len(jobs)}", len(offered_activations))
    weight_offers = _offers("offered_weights", offered_weights, sum(job.steps(config) for job in jobs))

    taken: list[int] = []
    activations: list[Int] = []
    releases: list[int] = []
    job_ends: list[int] = []
    steps: list[int] = []
    issued: list[int] = []  # last beat of each word
    outputs: list[int] = []
    loaded = moved = first_step = last_step = next_pass = -(1 << 40)
    for number, job in enumerate(jobs):
        start = max(int(job_offers[number]), loaded + 1)
        if number >= 2:
            start = max(start, releases[number - 2] + 1)
        if number >= OPEN_JOBS:
            start = max(start, job_ends[number - OPEN_JOBS] + 1)
        taken.append(start)
        words = _offers(
            f"offered_activations[{number}]",
            None if offered_activations is None else offered_activations[number],
            word_counts[number],
        )
        order = np.arange(len(words))
        arrivals = np.maximum.accumulate(np.maximum(words, start + 1) - order) + order
        activations.append(arrivals)
        loaded = int(arrivals[-1])

        # Cycle in which the job's first pass is the next one.
        next_pass = max(next_pass + 1, loaded + p.load_cycles - 1)
        for blocks in job.tiles(config):
            for chunk in range(job.chunks(config)):
                emits = chunk == job.chunks(config) - 1
                into_feed = max(next_pass, moved)
                feed = max(into_feed + 1, first_step)
                next_pass = into_feed + 1
                last_feed = feed + steps_of_feeds - 1
                moved = max(last_feed, last_step)
                previous = moved
                for index in range(blocks * steps_of_feeds):
                    cycle = max(previous + 1, int(weight_offers[len(steps)]))
                    if emits and len(issued) >= p.result_words:
                        cycle = max(cycle, issued[-p.result_words] + 1)
                    if index == 0:
                        first_step = cycle
                    steps.append(cycle)
                    previous = cycle
                    if emits:
                        beat = max(cycle + p.sum_cycles, issued[-1] + 1 if issued else 0)
                        if len(outputs) >= p.output_words:
                            beat = max(beat, outputs[-p.output_words] + 1)
                        issued.append(beat + p.word_beats - 1)
                        outputs.append(issued[-1] + p.issue_cycles)
                last_step = previous
        releases.append(last_feed)
        job_ends.append(issued[-1] + 1)
    return MatrixTiming(
        jobs=np.array(taken, dtype=np.int64),
        activations=tuple(activations),
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
