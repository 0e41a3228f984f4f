"""Cycles of the difference norm: words of a group, and its rows' records."""

from __future__ import annotations

from dtp.config import Config
from dtp.difference import DifferenceParams

__all__ = ["DifferenceCycles"]


class DifferenceCycles:
    """``DifferenceNorm`` without its numbers, cycle by cycle, with a sink that never stalls.

    P is :class:`dtp.difference.DifferenceParams`. A word is taken ``P.word_cycles`` after the one before. The first
    record comes ``P.first_record_cycles`` after a group's last word was taken, the others every ``P.record_cycles``;
    the next group can begin behind the last.

    Members
    -------
    ready: whether a word would be taken; record: whether a record leaves
    """

    def __init__(self, config: Config) -> None:
        self._params = DifferenceParams(config)
        self._rows = config.rows
        self._now = self._free = 0
        self._records = range(0)

    @property
    def ready(self) -> bool:
        return self._now >= self._free

    @property
    def record(self) -> bool:
        return self._now in self._records

    def step(self, word: bool, *, last: bool) -> None:
        """One cycle: whether a word is taken, and whether it is its group's last."""
        p = self._params
        if word:
            self._free = self._now + p.word_cycles
            if last:
                first = self._now + p.first_record_cycles
                self._records = range(first, first + self._rows * p.record_cycles, p.record_cycles)
                self._free = self._records[-1] + 1
        self._now += 1
