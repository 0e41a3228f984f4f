"""Cycles of the pruner: every mask row and every report, without outside stalls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtp.fixed import Int
from dtp.pruner import Gate, HeadCommand, PrunerError, PrunerParams

__all__ = ["HeadTiming", "head_timing"]

_BUFFERS = 2


@dataclass(frozen=True, eq=False)
class HeadTiming:
    """Cycles of one head; commands, scores and sinks never wait. P is :class:`dtp.pruner.PrunerParams`.

    The command is looked at in cycle c, the scores follow from c + 1 on, one a cycle. The first score of a row
    waits until the row two before it is decided. A row begins to be decided ``P.score_cycles`` after its last
    score, when the row before is decided; that takes ``P.decide_cycles``, and its last cycle writes the row. It
    is on ``o`` ``P.row_out_cycles`` after that write, or after the row before it was taken, and with a band after the
    write of the head's last row. Behind the last score, a source that goes on is dropped, one score a cycle. The
    report follows the last row and the last score by two cycles, the next command can be looked at two cycles later.

    Parameters
    ----------
    accepted: (blocks,), cycle of the last score of each row
    rows: (blocks,), cycle of each mask row
    report: cycle of the report
    next_command: first cycle in which another command is looked at
    """

    accepted: Int
    rows: Int
    report: int
    next_command: int


def head_timing(params: PrunerParams, command: HeadCommand, start: int, *, sent: tuple[int, int]) -> HeadTiming:
    """What the class docstring says, for a command that is looked at in cycle ``start``.

    ``sent``: how many scores each source has for the head, holonomy first; 0 for one that is not named.
    """
    p = params
    error = command.error
    blocks = 0 if error is PrunerError.BLOCKS else command.blocks
    refused = error is not PrunerError.NONE
    banded = bool(command.band) and not refused
    decide = p.decide_cycles(blocks, budget=command.gate == Gate.BUDGET and not refused) if blocks else 0
    accepted: list[int] = []
    written: list[int] = []
    free = start + 1  # cycle in which the next score can be taken
    for row in range(blocks):
        first = free
        if row >= _BUFFERS:
            first = max(first, written[row - _BUFFERS] + 1)
        accepted.append(first + blocks - 1)
        free = accepted[-1] + 1
        begin = accepted[-1] + p.score_cycles
        if written:
            begin = max(begin, written[-1] + 1)
        written.append(begin + decide - 1)
    # Scores that were not taken with the rows are dropped, each source by itself.
    used = 0 if refused else blocks * blocks
    dropped = free + max(0, *(count - used for count in sent))
    rows: list[int] = []
    taken = start
    for row in range(blocks):
        ready = written[-1] if banded else written[row]
        rows.append(max(ready, taken) + p.row_out_cycles)
        taken = rows[-1]
    report = max(dropped, (rows[-1] if rows else start) + 1) + 1
    return HeadTiming(
        accepted=np.array(accepted, dtype=np.int64),
        rows=np.array(rows, dtype=np.int64),
        report=report,
        next_command=report + 2,
    )
