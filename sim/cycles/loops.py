"""Cycles of the loop accounts: every header and word taken, every report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dtp.errors import must
from dtp.fixed import Int
from dtp.holonomy import LoopParams

__all__ = ["LoopsTiming", "loops_timing"]


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
