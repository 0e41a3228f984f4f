"""The golden model of a head: what it is defined to give, row by row and bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dtp.attention import COUNTER_LIMIT, golden, kept_blocks
from dtp.config import Config
from dtp.errors import DtpError
from dtp.fixed import round_shift
from dtp.job import Job
from dtp.lift import lift_keys, lift_queries
from dtp.normaliser import normalise
from dtp.quantise import Head, quantise
from dtp.softmax import SoftmaxState, advance, clip_scores
from dtp.workload import Mode, Workload
from tests.tile import CONFIGS, TINY, Shape, head_of, random_shapes
from tools.workloads import random_workload

MASKED = Shape(tokens=37, width=11, mode=Mode.BLENDED, kept=0.5, valid_length=33)


def with_mask(head: Head, mask: np.ndarray | None) -> Head:
    return replace(head, job=replace(head.job, masked=mask is not None), block_mask=mask)


def by_groups(config: Config, head: Head) -> tuple[np.ndarray, np.ndarray, int]:
    """The contract once more, group by group and step by step with Python's integers."""
    job, c = head.job, config
    rows, _ = lift_queries(c, job, head.queries, head.factors)
    width = job.chunks(c) * c.block
    keys = np.zeros((job.tokens, width), dtype=np.int64)
    keys[:, : job.width] = head.keys
    beta = np.zeros(job.tokens, dtype=np.int64)
    if job.bias:
        lifted, beta, _ = lift_keys(c, job, head.keys, head.factors, head.bias)
        keys = np.concatenate([keys, lifted], axis=1)
    outputs = np.zeros((job.tokens, job.width), dtype=np.int64)
    empty = np.zeros(job.tokens, dtype=np.bool_)
    saturated = 0
    for group in range(c.groups(job.tokens)):
        state = SoftmaxState(c.rows, c.probability_bits)
        sums = np.zeros((c.rows, job.width), dtype=np.int64)
        members = [t for t in range(group * c.rows, (group + 1) * c.rows) if t < job.tokens]
        for block in range(c.blocks(job.tokens)):
            low = block * c.block
            legal = low < job.valid_length and group * c.rows < job.valid_length
            legal = legal and (not job.causal or block <= group * c.rows // c.block)
            if head.block_mask is not None:
                legal = legal and bool(head.block_mask[group * c.rows // c.block, block])
            if not legal:
                continue
            span = range(low, min(low + c.block, job.tokens))
            scores = np.zeros((c.rows, len(span)), dtype=np.int64)
            pairs = np.zeros((c.rows, len(span)), dtype=np.bool_)
            for place, query in enumerate(members):
                for column, key in enumerate(span):
                    total = int(beta[key])
                    for number in range(job.passes(c)):
                        lanes = slice(number * c.block, (number + 1) * c.block)
                        products = int(rows[query, lanes] @ keys[key, lanes])
                        plain = number < job.chunks(c)
                        shift = job.score_shift + c.sum_shift if plain else job.lift_shift + c.lifted_sum_shift
                        total += int(round_shift(np.array(products), shift))
                    scores[place, column] = total
                    kept = key < job.valid_length and query < job.valid_length and (not job.causal or key <= query)
                    pairs[place, column] = kept
            scores, count = clip_scores(scores, pairs)
            saturated += count
            p, rescale = advance(state, scores, pairs)
            sums = round_shift(sums, rescale[:, None]) + p @ head.values[span.start : span.stop]
        normal, _ = normalise(sums, state.denominator, c)
        for place, query in enumerate(members):
            outputs[query] = normal[place]
            empty[query] = query < job.valid_length and state.denominator[place] == 0
    return outputs, empty, saturated


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CONFIGS)
def test_all_rows_at_once_are_group_by_group(name: str, seed: int) -> None:
    config = CONFIGS[name]
    for number, shape in enumerate(random_shapes(config, 3, 300 + seed, tokens=20)):
        head = head_of(config, replace(shape, wild=number == 2), 300 + 10 * seed + number)
        outputs, empty, saturated = by_groups(config, head)
        result = golden(config, head)
        assert (result.outputs == outputs).all()
        assert (result.empty_rows == empty).all()
        assert result.score_saturations == saturated


def test_rows_without_a_kept_key_are_zero_and_flagged() -> None:
    head = head_of(TINY, MASKED, 310)
    mask = np.ones((5, 5), dtype=np.bool_)
    mask[1] = False
    result = golden(TINY, with_mask(head, mask))
    wanted = np.zeros(37, dtype=np.bool_)
    wanted[8:16] = True
    assert (result.empty_rows == wanted).all()
    assert not result.outputs[wanted].any()
    assert (result.outputs[~wanted][:25].any(axis=1)).all()


def test_a_causal_row_with_later_keys_alone_is_empty() -> None:
    """The block on the diagonal is dropped: what is left lies after the query."""
    head = head_of(TINY, replace(MASKED, causal=True, kept=None), 311)
    mask = np.tril(np.ones((5, 5), dtype=np.bool_), -1) | np.triu(np.ones((5, 5), dtype=np.bool_), 1)
    result = golden(TINY, with_mask(head, mask))
    assert result.empty_rows.tolist() == [True] * 8 + [False] * 29


def test_padding_rows_are_zero_and_not_flagged() -> None:
    head = head_of(TINY, replace(MASKED, kept=None), 312)
    result = golden(TINY, head)
    assert not result.outputs[33:].any()
    assert not result.empty_rows.any()
    assert result.outputs[:33].any(axis=1).all()
    nothing = golden(TINY, with_mask(head, np.zeros((5, 5), dtype=np.bool_)))
    assert nothing.empty_rows.tolist() == [True] * 33 + [False] * 4


def test_a_mask_of_ones_is_no_mask() -> None:
    for causal in (False, True):
        head = head_of(TINY, replace(MASKED, kept=None, causal=causal), 313)
        plain, masked = golden(TINY, head), golden(TINY, with_mask(head, np.ones((5, 5), dtype=np.bool_)))
        assert (plain.outputs == masked.outputs).all()
        assert (plain.empty_rows == masked.empty_rows).all()


def test_a_dropped_block_is_a_block_of_keys_that_are_not_there() -> None:
    """Bits with a mask are those of a shorter head without the dropped keys, block order kept."""
    head = head_of(TINY, Shape(tokens=32, width=9, mode=Mode.EUCLIDEAN), 314)
    mask = np.ones((4, 4), dtype=np.bool_)
    mask[:, 1] = False
    masked = golden(TINY, with_mask(head, mask))
    kept = np.r_[0:8, 16:32]
    assert head.bias is not None
    short = replace(
        head,
        job=replace(head.job, tokens=24, valid_length=24),
        queries=head.queries[kept],
        keys=head.keys[kept],
        values=head.values[kept],
        bias=head.bias[kept],
    )
    assert (masked.outputs[kept] == golden(TINY, short).outputs).all()


def test_the_order_of_blocks_defines_the_bits() -> None:
    """Keys in another order of blocks give nearly the same numbers, and not the same bits."""
    head = head_of(TINY, Shape(tokens=64, width=16), 315)
    order = np.r_[56:64, 48:56, 40:48, 32:40, 24:32, 16:24, 8:16, 0:8]
    turned = replace(head, keys=head.keys[order], values=head.values[order])
    one, other = golden(TINY, head).outputs, golden(TINY, turned).outputs
    assert (one != other).any()
    assert np.abs(one - other).max() <= 0.02 * np.abs(one).max()
    within = np.concatenate([rng.permutation(8) + 8 * n for n, rng in enumerate([np.random.default_rng(1)] * 8)])
    inside = golden(TINY, replace(head, keys=head.keys[within], values=head.values[within]))
    assert (inside.outputs == one).all()  # inside a block the order is free


def test_heads_do_not_know_of_each_other() -> None:
    job = random_workload(
        tokens=30, width=12, heads=4, mode=Mode.RIEMANNIAN, kept=0.7, causal=True, seed=316, block=TINY.block
    )
    order = [2, 0, 3, 1]
    fields = {
        name: getattr(job, name)[order] for name in ("q", "k", "v", "frame", "metric_factor", "curvature", "block_mask")
    }
    turned: Workload = replace(job, **fields)
    plain = [golden(TINY, head) for head in quantise(TINY, job)]
    for place, head in enumerate(quantise(TINY, turned)):
        result, wanted = golden(TINY, head), plain[order[place]]
        assert (result.outputs == wanted.outputs).all()
        assert result.lift_saturations == wanted.lift_saturations


def test_score_saturations_count_kept_pairs_alone() -> None:
    """All scores are at the limit: each kept pair counts once, no other does."""
    ones = np.full((20, 16), 127)
    job = Job(tokens=20, valid_length=18, width=16, query_scale=65535, causal=True)
    head = Head(job=job, queries=ones, keys=ones, values=ones, q_scale=1.0, k_scale=1.0, v_scale=1.0)
    result = golden(TINY, head)
    assert result.score_saturations == 18 * 19 // 2
    assert (np.abs(result.outputs[:18] - 127 * 256) <= 0.001 * 127 * 256).all()
    dense = replace(head, job=replace(job, causal=False))
    assert golden(TINY, dense).score_saturations == 18 * 18
    mask = np.zeros((3, 3), dtype=np.bool_)
    mask[0, 1] = True
    assert golden(TINY, with_mask(dense, mask)).score_saturations == 8 * 8
    quiet = replace(head, job=replace(job, query_scale=10))
    assert golden(TINY, quiet).score_saturations == 0


def test_counters_stop() -> None:
    config = Config.load("ecp5-85k")
    ones = np.full((300, 64), 127)
    job = Job(tokens=300, valid_length=300, width=64, query_scale=65535)
    head = Head(job=job, queries=ones, keys=ones, values=ones, q_scale=1.0, k_scale=1.0, v_scale=1.0)
    assert 300 * 300 > COUNTER_LIMIT
    assert golden(config, head).score_saturations == COUNTER_LIMIT


def test_one_key_gives_its_values() -> None:
    """Softmax over one key is 1: the value comes back, within the reciprocal's rounding."""
    head = head_of(TINY, Shape(tokens=1, width=16, mode=Mode.RIEMANNIAN), 317)
    result = golden(TINY, head)
    wanted = head.values * (1 << TINY.output_fraction_bits)
    assert np.abs(result.outputs - wanted).max() <= 0.001 * 127 * (1 << TINY.output_fraction_bits)


def test_kept_blocks() -> None:
    job = Job(tokens=37, valid_length=20, width=4, causal=True)
    kept = kept_blocks(TINY, job, None)
    assert kept.shape == (10, 5)
    assert kept.sum(axis=1).tolist() == [1, 1, 2, 2, 3, 0, 0, 0, 0, 0]
    dense = kept_blocks(TINY, replace(job, causal=False), np.eye(5, dtype=np.bool_))
    assert dense.sum() == 5


def test_a_job_that_does_not_fit_is_refused() -> None:
    head = head_of(TINY, Shape(tokens=8, width=8), 318)
    with pytest.raises(DtpError, match=r"Job\.width must be at most max_width"):
        golden(TINY, replace(head, job=replace(head.job, width=17)))
