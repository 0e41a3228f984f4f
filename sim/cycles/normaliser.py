"""Cycles of the normaliser: every output beat, and when record slots are free again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dtp.config import Config
from dtp.errors import must
from dtp.fixed import Int
from dtp.normaliser import NormaliserParams, RecordKind

__all__ = ["NormaliserModel", "NormaliserTiming", "normaliser_timing"]


@dataclass(frozen=True)
class NormaliserTiming:
    """Cycles of a run of the normaliser with a sink that never stalls.

    All is counted in *words* of ``normaliser_lanes`` values; P is :class:`dtp.normaliser.NormaliserParams`. A
    record has steps · ``P.step_words`` of them (DATA, NULL) or ``P.status_words`` (STATUS). Words are issued
    one a cycle, record after record in the order of the pushes. A word is issued in the earliest cycle that
    comes after the issue of the word before it and is not earlier than

    - ``P.record_cycles`` after the push of its record (the cycle with ``record.valid`` and ``record.ready``),
    - DATA: ``P.value_cycles`` after ``i_valid`` of its own step,
    - DATA: ``P.reciprocal_cycles`` after ``group_valid`` of its group,
    - first word of STATUS: ``P.status_gap`` after the issue of the word before it.

    Every ``P.beat_words`` words make a beat, which is on ``o`` (valid and taken) ``P.issue_cycles`` after the
    issue of its last word. Hence one beat every ``P.beat_words`` cycles sustained, without a bubble between
    steps or groups.

    ``record.ready`` for a DATA record is low from the cycle after the push that makes ``output_slots`` groups
    outstanding up to and including the one after the cycle that issues the last word of the oldest one; for a STATUS
    record from the cycle after the push of a STATUS up to and including ``P.status_release_cycles − 1`` cycles after
    the issue of its last word; for any record from the cycle after the push that makes ``P.record_depth``
    records wait up to and including the cycle of the next last word.

    Parameters
    ----------
    beats: (beats,), cycle of each output beat
    beat_records: (beats,), number of the record that it belongs to
    first_issue, last_issue: (records,), cycles in which the first and last word of each record are issued
    freed: (records,), first cycle in which ``record.ready`` no longer counts the record against its kind (DATA: its
        slot; STATUS: the one that may wait; NULL: its place in the queue)
    """

    beats: Int
    beat_records: Int
    first_issue: Int
    last_issue: Int
    freed: Int


def normaliser_timing(
    config: Config,
    *,
    kinds: ArrayLike,
    pushes: ArrayLike,
    steps: ArrayLike,
    values: Sequence[ArrayLike],
    group_valids: ArrayLike,
    busy_until: int | None = None,
) -> NormaliserTiming:
    """What the class docstring says, for given arrivals.

    Parameters
    ----------
    kinds: (records,), :class:`RecordKind`
    pushes: (records,), cycle of each push, ascending
    steps: (records,), array steps of the group; not looked at for STATUS
    values: for each DATA record (steps,), cycles of ``i_valid``
    group_valids: (DATA records,), cycles of ``group_valid``
    busy_until: cycle of the last issue before the first record, None when nothing was issued

    Raises
    ------
    DtpError: lengths that do not fit.
    """
    kind, push, count = (np.asarray(x, dtype=np.int64) for x in (kinds, pushes, steps))
    group_valid = np.asarray(group_valids, dtype=np.int64)
    groups = int(np.count_nonzero(kind == RecordKind.DATA))
    for name, value, length in (
        ("pushes", push, len(kind)),
        ("steps", count, len(kind)),
        ("group_valids", group_valid, groups),
        ("values", values, groups),
    ):
        if len(value) != length:
            raise must("normaliser_timing", name, f"of length {length}", len(value))
    model = NormaliserModel(config, busy_until)
    group = 0
    for n in range(len(kind)):
        if kind[n] == RecordKind.DATA:
            arrivals = np.asarray(values[group], dtype=np.int64)
            if arrivals.shape != (int(count[n]),):
                raise must("normaliser_timing", f"values[{group}]", f"of shape ({int(count[n])},)", arrivals.shape)
            model.add(RecordKind.DATA, int(push[n]), int(count[n]), arrivals, int(group_valid[group]))
            group += 1
        else:
            model.add(RecordKind(kind[n]), int(push[n]), int(count[n]))
    return model.timing()


class NormaliserModel:
    """The normaliser, record after record; cycles as :class:`NormaliserTiming` has them.

    Parameters
    ----------
    config: the processor
    busy_until: cycle of the last issue before the first record, None when nothing was issued
    """

    def __init__(self, config: Config, busy_until: int | None = None) -> None:
        self._params = NormaliserParams(config)
        self._before = -(1 << 40) if busy_until is None else busy_until
        self._slots = config.output_slots
        self._reciprocal_cycles = self._params.reciprocal_cycles
        self._beats: list[Int] = []
        self._first: list[int] = []
        self._last: list[int] = []
        self._freed: list[int] = []
        self._data: list[int] = []
        self._status: list[int] = []

    def earliest(self, kind: RecordKind, cycle: int) -> int:
        """First cycle from ``cycle`` on in which a record of this kind is taken."""
        depth = self._params.record_depth
        if len(self._last) >= depth:
            cycle = max(cycle, self._last[-depth] + 1)
        if kind == RecordKind.DATA and len(self._data) >= self._slots:
            cycle = max(cycle, self._data[-self._slots])
        if kind == RecordKind.STATUS and self._status:
            cycle = max(cycle, self._status[-1])
        return cycle

    def add(self, kind: RecordKind, push: int, steps: int = 0, values: Int | None = None, group_valid: int = 0) -> None:
        """The next record, pushed in cycle ``push``; DATA also says when its values and its denominators come."""
        p = self._params
        words = p.status_words if kind == RecordKind.STATUS else steps * p.step_words
        start = max(push + p.record_cycles, self._before + (p.status_gap if kind == RecordKind.STATUS else 1))
        order = np.arange(words)
        if kind == RecordKind.DATA:
            assert values is not None
            start = max(start, group_valid + self._reciprocal_cycles)
            earliest = np.maximum(np.repeat(values + p.value_cycles, p.step_words), start)
            issue = np.maximum.accumulate(earliest - order) + order
        else:
            issue = start + order
        self._before = int(issue[-1])
        self._first.append(int(issue[0]))
        self._last.append(self._before)
        freed = self._before + {RecordKind.STATUS: p.status_release_cycles, RecordKind.DATA: 2}.get(kind, 1)
        self._freed.append(freed)
        if kind == RecordKind.DATA:
            self._data.append(freed)
        if kind == RecordKind.STATUS:
            self._status.append(freed)
        self._beats.append(issue[p.beat_words - 1 :: p.beat_words] + p.issue_cycles)

    def state(self, base: int) -> tuple[tuple[int, ...], ...]:
        """All that the records to come depend on if none is pushed up to cycle ``base``, relative to it."""
        depth = self._params.record_depth
        parts = ([self._before], self._last[-depth:], self._data[-self._slots :], self._status[-1:])
        # Cycles before the base are as good as none; the others are the last of each list, which never falls.
        return tuple(tuple(cycle - base for cycle in part if cycle >= base) for part in parts)

    def beats(self) -> Int:
        """Cycle of every output beat so far."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self._beats])

    def timing(self) -> NormaliserTiming:
        """All that has been added."""
        return NormaliserTiming(
            beats=self.beats(),
            beat_records=np.repeat(np.arange(len(self._beats)), [len(beats) for beats in self._beats]),
            first_issue=np.array(self._first, dtype=np.int64),
            last_issue=np.array(self._last, dtype=np.int64),
            freed=np.array(self._freed, dtype=np.int64),
        )
