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

__all__ = ["NormaliserTiming", "normaliser_timing"]


@dataclass(frozen=True)
class NormaliserTiming:
    """Cycles of a run of the normaliser with a sink that never stalls.

    All is counted in *words* of ``normaliser_lanes`` values; P is :class:`dtp.normaliser.NormaliserParams`. A record
    has steps · ``P.step_words`` of them (DATA, NULL) or ``P.status_words`` (STATUS). Words are issued one a cycle,
    record after record in the order of the pushes. A word is issued in the earliest cycle that comes after the issue of the
    word before it and is not earlier than

    - ``P.record_cycles`` after the push of its record (the cycle with ``record.valid`` and ``record.ready``),
    - DATA: ``P.value_cycles`` after ``i_valid`` of its own step,
    - DATA: ``P.reciprocal_cycles`` after ``group_valid`` of its group,
    - first word of STATUS: ``P.status_gap`` after the issue of the word before it.

    Every ``P.beat_words`` words make a beat, which is on ``o`` (valid and taken) ``P.issue_cycles`` after the issue of its last
    word. Hence one beat every ``P.beat_words`` cycles sustained, without a bubble between steps or groups.

    ``record.ready`` for a DATA record is low from the cycle after the push that makes ``output_slots`` groups outstanding up to
    and including the cycle that issues the last word of the oldest one; for a STATUS record from the cycle after the push
    of a STATUS up to and including ``P.status_release_cycles − 1`` cycles after the issue of its last word; for any record
    from the cycle after the push that makes ``P.record_depth`` records wait up to and including the cycle of the next last word.

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
    p = NormaliserParams(config)
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
    before = -(1 << 40) if busy_until is None else busy_until
    beats, records = [], []
    first_issue, last_issue = np.zeros_like(push), np.zeros_like(push)
    freed = np.zeros_like(push)
    group = 0
    for n in range(len(kind)):
        words = p.status_words if kind[n] == RecordKind.STATUS else int(count[n]) * p.step_words
        earliest = np.full(words, push[n] + p.record_cycles, dtype=np.int64)
        earliest[0] = max(earliest[0], before + (p.status_gap if kind[n] == RecordKind.STATUS else 1))
        if kind[n] == RecordKind.DATA:
            arrivals = np.asarray(values[group], dtype=np.int64)
            if arrivals.shape != (int(count[n]),):
                raise must("normaliser_timing", f"values[{group}]", f"of shape ({int(count[n])},)", arrivals.shape)
            earliest = np.maximum(earliest, np.repeat(arrivals + p.value_cycles, p.step_words))
            earliest = np.maximum(earliest, group_valid[group] + p.reciprocal_cycles)
            group += 1
        order = np.arange(words)
        issue = np.maximum.accumulate(earliest - order) + order
        first_issue[n], last_issue[n] = issue[0], issue[-1]
        freed[n] = issue[-1] + (p.status_release_cycles if kind[n] == RecordKind.STATUS else 1)
        before = int(issue[-1])
        beat = issue[p.beat_words - 1 :: p.beat_words] + p.issue_cycles
        beats.append(beat)
        records.append(np.full(len(beat), n, dtype=np.int64))
    empty = np.zeros(0, dtype=np.int64)
    return NormaliserTiming(
        beats=np.concatenate([empty, *beats]),
        beat_records=np.concatenate([empty, *records]),
        first_issue=first_issue,
        last_issue=last_issue,
        freed=freed,
    )
