"""Score tables of other origin than holonomy, for the pruner's external port: the controls of the quality study.

All are unsigned 16-bit integers, lower is kept first, as :mod:`dtp.pruner` has them:

- *magnitude*: how far, in the log2 domain, the largest attention score of a block lies below that of its row (u10f6);
- *oracle*: −log2 of the share of a block row's probability that lies in the block (u6f10);
- *random*: uniform, seeded.

A block of which no pair is live has the largest score.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtp.errors import must
from dtp.fixed import Int
from dtp.pruner import SCORE_BITS

MAGNITUDE_FRACTION_BITS: Final = 6
ORACLE_FRACTION_BITS: Final = 10
_TOP: Final = (1 << SCORE_BITS) - 1

Real = NDArray[np.float64]


def quantise_scores(values: ArrayLike, fraction_bits: int) -> Int:
    """Real scores of 0 or more as unsigned 16-bit ones with ``fraction_bits`` of fraction, saturated.

    Raises
    ------
    DtpError: a negative score, or one that is no number
    """
    real = np.asarray(values, dtype=np.float64)
    for value in real[~(real >= 0)][:1]:
        raise must("quantise_scores", "values", "0 or more", float(value))
    return np.minimum(np.floor(real * 2.0**fraction_bits + 0.5), _TOP).astype(np.int64)


def _blocks(name: str, values: ArrayLike, block: int) -> Real:
    """(L, L) as (rows, row in the block, columns, column in the block), dead pairs of the padding −infinity."""
    real = np.asarray(values, dtype=np.float64)
    if real.ndim != 2 or real.shape[0] != real.shape[1] or not real.size:
        raise must(name, "scores", "of shape (L, L)", real.shape)
    if np.isnan(real).any() or np.isposinf(real).any():
        raise must(name, "scores", "finite, or −infinity for a masked pair", real)
    if block < 1:
        raise must(name, "block", "1 or more", block)
    count = -(-len(real) // block)
    padded = np.full((count * block, count * block), -math.inf)
    padded[: len(real), : len(real)] = real
    return padded.reshape(count, block, count, block)


def magnitude(scores: ArrayLike, block: int) -> Int:
    """Score table of largest-score pruning.

    Parameters
    ----------
    scores: (L, L), arguments of the softmax, base e, −infinity where a pair is masked
    block: tokens of a block

    Returns
    -------
    (blocks, blocks)
    """
    peaks = _blocks("magnitude", scores, block).max(axis=(1, 3))
    tops = peaks.max(axis=1, keepdims=True)
    below = np.where(np.isneginf(peaks), math.inf, np.where(np.isneginf(tops), 0, tops) - peaks)
    return quantise_scores(below / math.log(2), MAGNITUDE_FRACTION_BITS)


def oracle(scores: ArrayLike, block: int) -> Int:
    """Score table of the probability that a block holds; parameters as :func:`magnitude`."""
    parts = _blocks("oracle", scores, block)
    tops = parts.max(axis=(2, 3), keepdims=True)
    weights = np.exp(parts - np.where(np.isneginf(tops), 0, tops))
    sums = weights.sum(axis=(2, 3), keepdims=True)
    probabilities = weights / np.where(sums == 0, 1, sums)
    mass = probabilities.sum(axis=(1, 3))
    total = mass.sum(axis=1, keepdims=True)
    share = np.minimum(1, mass / np.where(total == 0, 1, total))
    with np.errstate(divide="ignore"):
        return quantise_scores(np.maximum(0, -np.log2(share)), ORACLE_FRACTION_BITS)


def random(blocks: int, seed: int) -> Int:
    """Score table without information, (blocks, blocks); the same for the same seed.

    Raises
    ------
    DtpError: no block
    """
    if blocks < 1:
        raise must("random", "blocks", "1 or more", blocks)
    return np.random.default_rng(seed).integers(0, _TOP + 1, (blocks, blocks), dtype=np.int64)
