"""Cycle model of the attention tile: the cycle of every output beat, without looking at the hardware.

The model follows the passes of the array in their static order (``docs/tile.md`` §2) and keeps, for each, the cycles
of its first and last step; loader, softmax and normaliser have models of their own. Source and sink never stall. The
work is a few additions an operation, never a cycle; a row group that finds everything as one before it, with all of its
operands loaded, takes the same course and is not walked through again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from dtp.array import ArrayParams
from dtp.attention import kept_blocks
from dtp.config import Config
from dtp.errors import must
from dtp.fixed import Int
from dtp.job import Job
from dtp.normaliser import RecordKind
from dtp.quantise import Head
from dtp.softmax import SoftmaxParams
from sim.cycles.loader import LoaderModel
from sim.cycles.normaliser import NormaliserModel

__all__ = ["Prediction", "predict"]

ITEM_CYCLES = 2
"""The walk's way from one item to the next of a row: the lowest block that is left, the item."""
ROW_CYCLES = 5
"""Its way to a new row of the block mask: address, mask, its legal part, then as to any item."""
GATE_CYCLES = 4
"""From the cycle in which a row of the gate is taken to its first item."""
SOURCE_CYCLES = 1
"""From the news that queries or probabilities are there to the cycle in which the walk can act on it."""
OPERAND_CYCLES = 2
"""The same of keys and values."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """Cycles of a run from idle; the first input beat is taken in cycle 0.

    Members
    -------
    beat_cycles: (beats,) cycle in which each output beat is taken
    total_cycles: from the first input beat to the last output beat, both counted
    array_busy_cycles: steps of the array
    stalls: cycles without a step between the array's first and last one, by what the next pass waited for:
        ``queries``, ``operands`` (keys or values), ``probabilities``, ``output`` (a free slot of the normaliser),
        ``gate`` (a mask row) and ``issue`` (the walk itself)
    start_cycle: the cycle of the array's first step, 0 if it has none
    """

    beat_cycles: Int
    total_cycles: int
    array_busy_cycles: int
    stalls: dict[str, int] = field(default_factory=dict)
    start_cycle: int = 0


class Rows(Protocol):
    """The gate: mask rows of gated jobs, in order."""

    def take(self, earliest: int) -> int:
        """The cycle in which the next row is taken, ``earliest`` the first in which the walk would."""


def predict(config: Config, heads: Sequence[Head], rows: Rows | None = None) -> Prediction:
    """The run of all heads back to back; ``rows`` where jobs are gated.

    Raises
    ------
    DtpError: a gated job without rows.
    """
    for head in heads:
        if head.job.gated and rows is None:
            raise must("predict", "rows", "given for gated jobs", None)
    return _Walk(config, heads, rows).run()


@dataclass
class _Item:
    """A kept (group, block) or an empty group (``null``); ``done``: when its probabilities are complete."""

    group: int
    block: int
    first: bool
    last: bool
    null: bool = False
    done: int = 0


@dataclass
class _Course:
    """What a row group did, relative to the last step before it."""

    records: list[tuple[RecordKind, int, int, Int | None, int]] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    state: tuple[int, ...] = ()
    ready: int = 0
    done: list[int] = field(default_factory=list)
    busy: int = 0
    stalls: dict[str, int] = field(default_factory=dict)


_STATE = ("head_free", "event", "taken", "moved", "first_step", "last_step", "scores_moved", "key_free")
"""Members of a walk that are cycles and say how a group goes on."""


class _Walk:
    """The three stages of :class:`rtl.walker.Walker`, in cycles. Names of members are cycles unless they count."""

    def __init__(self, config: Config, heads: Sequence[Head], rows: Rows | None) -> None:
        self.config = config
        self.heads = heads
        self.rows = rows
        self.loader = LoaderModel(config, [head.job for head in heads])
        self.normaliser = NormaliserModel(config)
        self.softmax = SoftmaxParams(config)
        self.delay = config.operand_read_cycles + ArrayParams.of(config).latency
        self.generator = 0  # the generator looks for the next job from here on
        self.head_free = -1  # the item register was emptied last
        self.event = -1  # last push or pop of an item
        self.taken = -1  # the feed stage took the last pass of the latest operation
        self.moved = -1  # the latest pass went from the feed to the step stage
        self.first_step = -1
        self.last_step = -1
        self.scores_moved = -2  # the latest score pass left the feed stage
        self.key_free = -(1 << 30)  # softmax: the next item's first key may be read from here on
        self.starts: list[int] = []  # first steps of each run of pass_steps steps of the latest pass
        self.slot_free = -1  # the walker holds no finished job back from here on
        self.courses: dict[tuple[object, ...], _Course] = {}
        self.course: _Course | None = None  # of the group that is being walked through
        self.base = 0
        self.busy = self.start_cycle = 0
        self.stalls = dict.fromkeys(("queries", "operands", "probabilities", "output", "gate", "issue"), 0)
        self.late_row = 0  # cycles that the walk waited for the row of this group, less those that were counted

    def run(self) -> Prediction:
        for number, head in enumerate(self.heads):
            self._job(number, head)
        beats = self.normaliser.beats()
        total = int(beats[-1]) + 1 if len(beats) else 0
        return Prediction(beats, total, self.busy, self.stalls, self.start_cycle)

    def _job(self, number: int, head: Head) -> None:
        c, job = self.config, head.job
        chunks, passes = job.chunks(c), job.passes(c)
        kept = kept_blocks(c, job, head.block_mask)
        pending: deque[_Item] = deque()
        ready = max(self.generator, self.head_free + 1, self.loader.job_valid(number)) + ROW_CYCLES
        ready += 1 if job.causal else c.blocks(job.valid_length)  # legal blocks are shifted in one by one
        for group, row in enumerate(kept):
            blocks = np.flatnonzero(row).tolist()
            items = [
                _Item(group, block, place == 0, place == len(blocks) - 1) for place, block in enumerate(blocks)
            ] or [_Item(group, 0, True, True, null=True)]
            self.late_row = 0
            if job.gated and self.rows is not None and self._opens_row(job, group):
                asked, ready = ready, self.rows.take(ready - GATE_CYCLES) + GATE_CYCLES
                self.late_row = ready - asked
            key = self._key(number, group, ready, items, pending, chunks, passes) if group else None
            if key in self.courses:
                ready = self._repeat(self.courses[key], items, pending)
                continue
            busy, stalls = self.busy, dict(self.stalls)
            self.base, self.course = self.last_step, _Course()
            for item in items:
                written = max(ready, self.head_free + 1)
                ready = written + ITEM_CYCLES
                while len(pending) > c.lookahead:
                    self._values(number, pending.popleft(), chunks)
                self._scores(number, item, passes, chunks, written + 1)
                pending.append(item)
            ready += ROW_CYCLES - ITEM_CYCLES
            if key is not None:
                self.course.state = tuple(getattr(self, name) - self.base for name in _STATE)
                self.course.ready = ready - self.base
                self.course.done = [item.done - self.base for item in pending]
                self.course.busy = self.busy - busy
                self.course.stalls = {name: count - stalls[name] for name, count in self.stalls.items()}
                self.courses[key] = self.course
            self.course = None
        # The end marker of the job.
        written = max(ready - ROW_CYCLES, self.head_free) + 1
        self.generator = written + 1
        while len(pending) > c.lookahead:
            self._values(number, pending.popleft(), chunks)
        self.event = self.head_free = max(self.event + 1, written + 1)
        while pending:
            self._values(number, pending.popleft(), chunks)
        self._end(number)

    def _opens_row(self, job: Job, group: int) -> bool:
        """Whether a row group is the first of a block row with queries that are not padding."""
        query = group * self.config.rows
        return query % self.config.block == 0 and query < job.valid_length

    def _key(
        self,
        number: int,
        group: int,
        ready: int,
        items: list[_Item],
        pending: deque[_Item],
        chunks: int,
        passes: int,
    ) -> tuple[object, ...] | None:
        """All that the course of a group depends on, None while operands are still being loaded."""
        base = self.last_step
        if items[0].null or self.loader.settled(number, group) > base:
            return None
        return (
            len(items),
            chunks,
            passes,
            ready - base,
            self.late_row,
            tuple(getattr(self, name) - base for name in _STATE),
            tuple((item.first, item.last, item.null, item.done - base) for item in pending),
            self.normaliser.state(min(self.event, base)),
            min(self.event, base) - base,
        )

    def _repeat(self, course: _Course, items: list[_Item], pending: deque[_Item]) -> int:
        """A group that goes the same way as one before; when the next row of the mask is there."""
        base = self.last_step
        for kind, push, steps, values, group_valid in course.records:
            moved = None if values is None else values + base
            self.normaliser.add(kind, push + base, steps, moved, group_valid + base)
        for cycle in course.releases:
            self.loader.release_query(cycle + base)
        for name, cycle in zip(_STATE, course.state, strict=True):
            setattr(self, name, cycle + base)
        self.busy += course.busy
        for name, count in course.stalls.items():
            self.stalls[name] += count
        waiting = [*pending, *items][-len(course.done) :]
        pending.clear()
        for item, done in zip(waiting, course.done, strict=True):
            item.done = done + base
            pending.append(item)
        return course.ready + base

    def _record(self, kind: RecordKind, push: int, steps: int, values: Int | None = None, group_valid: int = 0) -> None:
        self.normaliser.add(kind, push, steps, values, group_valid)
        if self.course is not None:
            moved = None if values is None else values - self.base
            self.course.records.append((kind, push - self.base, steps, moved, group_valid - self.base))

    def _release_query(self, cycle: int) -> None:
        self.loader.release_query(cycle)
        if self.course is not None:
            self.course.releases.append(cycle - self.base)

    def _end(self, number: int) -> None:
        """The status record of a job, and its slot."""
        push = max(self.event + 1, self.loader.job_done(number), self.slot_free)
        push = self.normaliser.earliest(RecordKind.STATUS, push)
        self.normaliser.add(RecordKind.STATUS, push)
        self.event = push
        release = max(push + 1, self.last_step + 1)
        self.slot_free = release + 1
        self.loader.release(release)

    def _scores(self, number: int, item: _Item, passes: int, chunks: int, visible: int) -> None:
        c = self.config
        if item.null:
            loaded = self.loader.query_passes(number, item.group)[-1] + SOURCE_CYCLES
            start = max(self.event + 1, visible, loaded, self.scores_moved + 1)
            self.event = self.head_free = start
            self._release_query(start)
            return
        start = max(self.event + 1, visible, self.taken + 1)
        self.event = self.head_free = start
        now = start + 1
        sources = self.loader.query_passes(number, item.group)
        operands = self.loader.key_passes(number, item.block)
        fed = 0
        for index in range(passes):
            plain = index < chunks
            fed = self._pass(now, sources[min(index, chunks)], (operands[index] if plain else 0,), "queries")
            now = self.taken + 1
        self.scores_moved = self.moved
        if item.last:
            self._release_query(fed)
        # Softmax: the keys of an item are read one a cycle, after the item before it.
        key = max(self.last_step + self.delay + self.softmax.issue_cycle, self.key_free)
        self.key_free = key + c.block
        item.done = key + c.block - 1 + self.softmax.probability_stage

    def _values(self, number: int, item: _Item, chunks: int) -> None:
        c = self.config
        steps = chunks * c.pass_steps
        if item.null:
            self.event = self.normaliser.earliest(RecordKind.NULL, self.event + 1)
            self._record(RecordKind.NULL, self.event, steps)
            return
        wanted = start = max(self.event + 1, self.taken + 1)
        if item.last:
            start = self.normaliser.earliest(RecordKind.DATA, start)
        self.event = start
        operands = self.loader.value_passes(number, item.block)
        self._pass(start + 1, item.done + 1, operands, "probabilities", "output" if start > wanted else "issue")
        if item.last:
            results = np.concatenate([np.arange(s, s + c.pass_steps) for s in self.starts]) + self.delay
            group_valid = item.done + self.softmax.group_latency - self.softmax.latency
            self._record(RecordKind.DATA, start, steps, results, group_valid)

    def _pass(self, now: int, source: int, operands: Sequence[int], name: str, idle: str = "issue") -> int:
        """Feeds and steps of one pass whose descriptor is there in cycle ``now``; returns the cycle of its last feed.

        ``source`` is the first cycle in which its stationary operand can be read, ``operands`` the same for each run of
        ``pass_steps`` steps.
        """
        length = self.config.pass_steps
        self.taken = max(now, self.moved)
        unsourced = max(self.taken + 1, self.first_step)
        feed = max(unsourced, source + SOURCE_CYCLES)
        last_feed = feed + length - 1
        self.moved = max(last_feed, self.last_step)
        start = self.moved + 1
        gap = start - self.last_step - 1
        if gap and self.busy:
            late = min(gap, feed - unsourced)
            self.stalls[name] += late
            if idle == "issue":
                gated = min(gap - late, self.late_row)
                self.stalls["gate"] += gated
                self.late_row -= gated
                late += gated
            self.stalls[idle] += gap - late
        starts = []
        idle_before = not self.busy
        for news in operands:
            ready = news + OPERAND_CYCLES
            if ready > start:
                if self.busy:
                    self.stalls["operands"] += ready - start
                start = ready
            starts.append(start)
            self.busy += length
            start += length
        self.starts = starts
        self.first_step = starts[0]
        if idle_before:
            self.start_cycle = starts[0] + self.config.operand_read_cycles
        self.last_step = start - 1
        return last_feed
