"""Cycles of the pruner: every mask row and every report, without outside stalls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtp.fixed import Int
from dtp.pruner import Gate, HeadCommand, PrunerError, PrunerParams

__all__ = ["HeadTiming", "RowDecisions", "head_timing"]

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


class RowDecisions:
    """When the rows of a head are decided, as :class:`HeadTiming` says, for scores that come when they come."""

    def __init__(self, params: PrunerParams, command: HeadCommand) -> None:
        refused = command.error is not PrunerError.NONE
        self._params = params
        self._cycles = params.decide_cycles(command.blocks, budget=command.gate == Gate.BUDGET and not refused)
        self.written: list[int] = []

    @property
    def first_score(self) -> int:
        """First cycle in which the first score of the next row can be taken."""
        row = len(self.written)
        return self.written[row - _BUFFERS] + 1 if row >= _BUFFERS else 0

    def add(self, accepted: int) -> None:
        """The last score of the next row is taken in this cycle."""
        begin = accepted + self._params.score_cycles
        if self.written:
            begin = max(begin, self.written[-1] + 1)
        self.written.append(begin + self._cycles - 1)


def head_timing(
    params: PrunerParams,
    command: HeadCommand,
    start: int,
    *,
    sent: tuple[int, int],
    accepted: Sequence[int] | None = None,
) -> HeadTiming:
    """What the class docstring says, for a command that is looked at in cycle ``start``.

    ``sent``: how many scores each source has for the head, holonomy first; 0 for one that is not named. ``accepted``:
    cycle of each row's last score, where scores do not come one a cycle.
    """
    p = params
    error = command.error
    blocks = 0 if error is PrunerError.BLOCKS else command.blocks
    refused = error is not PrunerError.NONE
    banded = bool(command.band) and not refused
    decisions = RowDecisions(p, command)
    written = decisions.written
    taken_at: list[int] = []
    free = start + 1  # cycle in which the next score can be taken
    for row in range(blocks):
        last = max(free, decisions.first_score) + blocks - 1 if accepted is None else accepted[row]
        taken_at.append(last)
        free = last + 1
        decisions.add(last)
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
        accepted=np.array(taken_at, dtype=np.int64),
        rows=np.array(rows, dtype=np.int64),
        report=report,
        next_command=report + 2,
    )
