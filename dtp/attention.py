"""Golden model of the attention tile: one head, integers in, integers out, every bit that the hardware gives.

The contract is ``docs/tile.md``. All rows of a head are worked on at once, one key block after the other; a row sees
the blocks that its group keeps, in ascending order, which is what defines the bits of the online softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dtp.config import Config
from dtp.fixed import Int, round_shift
from dtp.job import Job
from dtp.lift import lift_keys, lift_queries
from dtp.normaliser import normalise
from dtp.quantise import Head
from dtp.softmax import SoftmaxState, advance, clip_scores

COUNTER_LIMIT = 65535
"""Counters of the status record stop here."""


@dataclass(frozen=True, eq=False)
class HeadResult:
    """What a job gives.

    Members
    -------
    outputs: (L, d) integers of ``output_bits``, in units of v's last place / 2^(output_bits − operand_bits)
    outputs_real: (L, d) float64
    empty_rows: (L,) bool, rows below ``valid_length`` without a kept key
    score_saturations, lift_saturations, output_saturations: counts as in the status record, which stop at 65535
    """

    outputs: Int
    outputs_real: NDArray[np.float64]
    empty_rows: NDArray[np.bool_]
    score_saturations: int
    lift_saturations: int
    output_saturations: int


def kept_blocks(config: Config, job: Job, block_mask: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Blocks that each row group walks over, (groups, blocks): legal and not masked (docs/tile.md §2)."""
    groups, blocks = config.groups(job.tokens), config.blocks(job.tokens)
    query = np.arange(groups) * config.rows
    block = np.arange(blocks)
    kept = (query < job.valid_length)[:, None] & (block * config.block < job.valid_length)[None, :]
    if job.causal:
        kept = kept & (block[None, :] <= (query // config.block)[:, None])
    if block_mask is not None:
        kept = kept & block_mask[query // config.block]
    return np.asarray(kept, dtype=np.bool_)


def golden(config: Config, head: Head) -> HeadResult:
    """Outputs and flags of one head.

    Parameters
    ----------
    config: the processor
    head: integers and descriptor, from :func:`dtp.quantise.quantise`

    Raises
    ------
    DtpError
        when the job does not fit the configuration
    """
    job = head.job
    job.check(config)
    length, block = job.tokens, config.block
    chunks, passes = job.chunks(config), job.passes(config)

    rows, lift_saturations = lift_queries(config, job, head.queries, head.factors)
    plain = np.zeros((length, chunks * block), dtype=np.int64)
    plain[:, : job.width] = head.keys
    keys = plain
    bias = np.zeros(length, dtype=np.int64)
    if job.bias:
        lifted, bias, more = lift_keys(config, job, head.keys, head.factors, head.bias)
        lift_saturations += more
        keys = np.concatenate([plain, lifted], axis=1)
    values = np.zeros((length, job.width), dtype=np.int64)
    values[:] = head.values

    kept = np.repeat(kept_blocks(config, job, head.block_mask), config.rows, axis=0)[:length]
    position = np.arange(length)
    valid = position < job.valid_length
    state = SoftmaxState(length, config.probability_bits)
    sums = np.zeros((length, job.width), dtype=np.int64)
    score_saturations = 0
    for number in range(config.blocks(length)):
        active = np.flatnonzero(kept[:, number] & valid)
        span = slice(number * block, min((number + 1) * block, length))
        if not len(active):
            continue
        accumulators = np.broadcast_to(bias[span], (len(active), len(position[span]))).copy()
        for index in range(passes):
            lane = slice(index * block, (index + 1) * block)
            shift = config.sum_shift + job.score_shift if index < chunks else config.lifted_sum_shift + job.lift_shift
            accumulators += round_shift(_exact(rows[active, lane], keys[span, lane].T), shift)
        pairs = np.broadcast_to(valid[span], accumulators.shape)
        if job.causal:
            pairs = pairs & (position[span][None, :] <= active[:, None])
        scores, saturated = clip_scores(accumulators, pairs)
        score_saturations += saturated
        whole = np.zeros((length, scores.shape[1]), dtype=np.int64)
        shown = np.zeros((length, scores.shape[1]), dtype=np.bool_)
        whole[active], shown[active] = scores, pairs
        p, rescale = advance(state, whole, shown)
        sums = round_shift(sums, rescale[:, None])
        sums[active] += _exact(p[active], values[span])

    outputs, output_saturations = normalise(sums, state.denominator, config)
    return HeadResult(
        outputs=outputs,
        outputs_real=np.asarray(outputs * head.output_scale(config), dtype=np.float64),
        empty_rows=valid & (state.denominator == 0),
        score_saturations=min(score_saturations, COUNTER_LIMIT),
        lift_saturations=min(lift_saturations, COUNTER_LIMIT),
        output_saturations=min(output_saturations, COUNTER_LIMIT),
    )


def _exact(left: Int, right: Int) -> Int:
    """A product of integer matrices; float64 holds every partial sum of at most 64 lanes of 18 × 16 bits."""
    return np.asarray(left.astype(np.float64) @ right.astype(np.float64), dtype=np.int64)
