"""Cycle model of the loader: when operands become visible, for a source that never stalls.

A job is loaded in *segments*, each with a fixed time table of its own. A segment begins at the later of the cycle in
which the loader has come so far and the one after the release it waits for: the descriptor waits for a job slot, every
query group for a place in the ring. Segment 0 is the descriptor and the block mask, segment 1 + g is query group g with
the keys and values that follow it in the stream.

    starts[0] = max(end of the job before, release of the job two before + 1)
    starts[1 + g] = max(starts[g] + lengths[g], release of the ring's group + 1)

A group of plain queries (``quick``), but for the first, starts a cycle earlier when the loader could see two cycles
before that its place in the ring is free.

A release counts from its pulse. Every time is the first cycle in which the walker can act on the news.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dtp.config import Config
from dtp.fixed import Int
from dtp.job import Job, descriptor_entries, key_batches, long_group, mask_entries
from dtp.lift import START_CYCLES, Emit, Instruction, LiftParams, Loop

QUERY_CYCLES = 1
"""From the result of a word of queries until it can be read."""
OPERAND_CYCLES = 1
"""From the cycle in which an entry of keys or values is taken until it can be read."""
CHECK_CYCLES = 3
"""From the last entry of a descriptor to the first of what follows."""
CLAIM_CYCLES = 1
"""From the start of a group to its first word, when the program of plain queries runs already."""


@dataclass(frozen=True)
class LoadPlan:
    """Time table of one job.

    Parameters
    ----------
    lengths: (1 + groups,) cycles from the start of a segment to the earliest start of the next; the last one: to the
        earliest start of the next job's descriptor
    quick: whether query groups after the first may start early
    closes: (1 + groups,) offset in a segment of the last entry before the next
    valid: offset of ``job_valid`` in segment 0
    done: offset of ``job_done`` in the last segment
    passes: (groups, chunks) offset of each plain pass of a group in its segment; the last one without lift is the
        group's
    whole: (groups,) offset of a whole group in its segment
    key_segments, value_segments: (blocks,) segment in which a block is loaded
    keys, values: (blocks, entries) offset of each entry in that segment
    """

    lengths: Int
    quick: bool
    closes: Int
    valid: int
    done: int
    passes: Int
    whole: Int
    key_segments: Int
    keys: Int
    value_segments: Int
    values: Int

    @property
    def groups(self) -> int:
        """Query groups of the job."""
        return len(self.lengths) - 1


@dataclass(frozen=True)
class LoadTimes:
    """Cycles in which a job's operands become visible; shapes as in :class:`LoadPlan`, passes (groups, chunks)."""

    starts: Int
    valid: int
    done: int
    end: int
    passes: Int
    groups: Int
    keys: Int
    values: Int


def times(plan: LoadPlan, starts: Sequence[int] | Int) -> LoadTimes:
    """The time table at given starts of its segments."""
    at = np.asarray(starts, dtype=np.int64)
    return LoadTimes(
        starts=at,
        valid=int(at[0]) + plan.valid,
        done=int(at[-1]) + plan.done,
        end=int(at[-1] + plan.lengths[-1]),
        passes=at[1:, np.newaxis] + plan.passes,
        groups=at[1:] + plan.whole,
        keys=at[plan.key_segments][:, np.newaxis] + plan.keys,
        values=at[plan.value_segments][:, np.newaxis] + plan.values,
    )


def run(
    plans: Iterable[LoadPlan], config: Config, slot_releases: Sequence[int], ring_releases: Sequence[int]
) -> list[LoadTimes]:
    """Times of a sequence of jobs from reset on.

    Parameters
    ----------
    slot_releases: cycle of the release of each job, as far as a later one waits for it
    ring_releases: cycle of the release of each query group, over all jobs, as far as a later one waits for it
    """
    clock, ring = config.entry_beats, 0
    result: list[LoadTimes] = []
    for number, plan in enumerate(plans):
        if number >= 2:
            clock = max(clock, slot_releases[number - 2] + 1)
        starts = [clock]
        for group in range(plan.groups):
            release = ring_releases[ring - config.query_groups] if ring >= config.query_groups else None
            early = plan.quick and group > 0
            starts.append(_begin(starts[-1], int(plan.lengths[group]), int(plan.closes[group]), early, release))
            ring += 1
        loaded = times(plan, starts)
        clock = loaded.end
        result.append(loaded)
    return result


def _begin(start: int, length: int, close: int, early: bool, release: int | None) -> int:
    """Start of a query group's segment: ``start``, ``length`` and ``close`` belong to the segment before it."""
    seen = release is None or release + 2 <= start + close
    if early and seen:
        return start + length - 1
    return start + length if release is None else max(start + length, release + 1)


@dataclass
class _Source:
    """Entries of the input, one register deep: when the next one is there."""

    beats: int
    words: int
    ready: int = 0
    word: int = 0

    def take_entry(self, earliest: int) -> int:
        """Cycle in which an entry is taken."""
        cycle = max(earliest, self.ready)
        self.ready, self.word = cycle + self.beats, 0
        return cycle

    def take_word(self, earliest: int, *, last: bool = False) -> int:
        """Cycle in which the next word is taken, the last of its batch or not."""
        cycle = max(earliest, self.ready)
        self.word += 1
        if last or self.word == self.words:
            self.ready, self.word = cycle + self.beats, 0
        return cycle


def _execute(code: Sequence[Instruction], count: int, cycle: int, source: _Source) -> tuple[int, list[int], int]:
    """Runs a program from its first issue on: cycle after its end, cycles of the instructions that emit, of its last
    word."""
    emits: list[int] = []
    taken = cycle
    for instruction in code:
        if instruction.wait:
            cycle += instruction.cycles
            continue
        repeats = count if instruction.loop is Loop.WORDS else 1
        if repeats == 0:
            cycle += 1
        for _ in range(repeats):
            if instruction.take:
                cycle = taken = source.take_word(cycle, last=instruction.flush)
            if instruction.emit is not Emit.NONE:
                emits.append(cycle)
            cycle += 1
    return cycle, emits, taken


def _order(config: Config, tokens: int) -> list[tuple[str, int, int]]:
    """Sections after Q(0), up to the end, each with the candidates that were looked at to find it."""
    blocks, groups, delay = config.blocks(tokens), config.groups(tokens), config.lookahead
    found: list[tuple[str, int, int]] = []
    looked, index, group = 0, 0, 1
    while index < blocks + delay:
        for kind in "qkv" if index else "kv":
            looked += 1
            number = {"q": group, "k": index, "v": index - delay}[kind]
            if {"q": index % blocks == 0 and group < groups, "k": index < blocks, "v": index >= delay}[kind]:
                found.append((kind, number, looked))
                looked = 0
                group += kind == "q"
        index += 1
    for number in range(group, groups):
        found.append(("q", number, 1))
    return [*found, ("end", 0, looked + 2)]


def plan(config: Config, job: Job) -> LoadPlan:
    """Time table of a job that is not refused and whose ``last`` comes where it should.

    Raises
    ------
    DtpError
        when the configuration cannot hold the job.
    """
    job.check(config)
    return _plan(config, job.tokens, job.chunks(config), job.bias, job.lift, job.masked)


@lru_cache(maxsize=8)
def _params(config: Config) -> LiftParams:
    return LiftParams(config)


@lru_cache(maxsize=256)
def _group(config: Config, chunks: int, lift: bool, plain: bool) -> tuple[list[int], int, int]:
    """A query group from its start on: issue of each word, its last cycle, and when the next entry is there."""
    params, source = _params(config), _Source(config.entry_beats, config.entry_words)
    count = chunks * config.pass_steps
    if lift:
        code = params.programs["lift_queries"].code
        after, emits, taken = _execute(code, count - params.query_words, START_CYCLES, source)
        # The last word of a group is the last of its entry, even where that has room for more.
        return emits, after - 1, taken + config.entry_beats if source.word else source.ready
    now, emits = CLAIM_CYCLES if plain else START_CYCLES, []
    for word in range(count):
        now = source.take_word(now, last=word == count - 1)
        emits.append(now)
        now += 1
    return emits, emits[-1], source.ready


@lru_cache(maxsize=256)
def _batch(config: Config, chunks: int, lift: bool, ready: int) -> tuple[int, int, int]:
    """A factor batch of keys whose first entry is there ``ready`` cycles after its program starts: the cycle after its
    last word, the one after its end, and when the next entry is there."""
    params, source = _params(config), _Source(config.entry_beats, config.entry_words, ready)
    count = chunks * config.block - (params.rank if lift else 0)
    code = params.programs["lift_keys" if lift else "keys"].code
    after, _, taken = _execute(code, count, START_CYCLES, source)
    return taken + 1, after, source.ready


@lru_cache(maxsize=64)
def _plan(config: Config, tokens: int, chunks: int, bias: bool, lift: bool, masked: bool) -> LoadPlan:
    beats, source = config.entry_beats, _Source(config.entry_beats, config.entry_words)
    entries, blocks = chunks * config.pass_steps, config.blocks(tokens)

    # Segment 0: descriptor, check, mask, constants.
    cycle = 0
    for _ in range(descriptor_entries(config)):
        cycle = source.take_entry(cycle) + 1
    taken = cycle - 1
    cycle = taken + CHECK_CYCLES
    if masked:
        rows, left = config.entry_bytes // config.mask_row_bytes, blocks
        for _ in range(mask_entries(config, tokens)):
            cycle = source.take_entry(max(cycle, source.ready) + min(rows, left) - 1) + 1
            left -= rows
    valid = cycle
    begin = max(cycle, source.ready, taken + CHECK_CYCLES + 1)  # the second section is known
    if bias:
        constants = _params(config).programs["lift_constants" if lift else "bias_constants"].code
        begin = max(begin, _execute(constants, 0, taken + CHECK_CYCLES - 1 + START_CYCLES, source)[0])
    else:
        begin = max(begin, taken + _params(config).result_cycles)  # the first word can be scaled

    # The others, each from cycle 0 on.
    order = _order(config, tokens)
    lengths = [begin]
    closes = [begin]
    long = long_group(config, chunks)
    segments = {kind: np.zeros(blocks, dtype=np.int64) for kind in "kv"}
    tables = {kind: np.zeros((blocks, entries), dtype=np.int64) for kind in "kv"}
    words: list[list[int]] = []
    emits, end, ready = _group(config, chunks, lift, not bias)
    words.append(emits)
    plain = not lift
    idle = 0  # the lift unit has nothing to do from here on
    for (kind, number, _), (_, _, looked) in itertools.pairwise(order):
        # The last entry waits until the section after this one is known.
        known = end + 1 + looked
        now = end + 1
        if kind == "q":
            lengths.append(max(now, ready, 0 if long else known, idle))
            closes.append(end)
            idle = 0
            emits, end, ready = _group(config, chunks, lift, plain)
            words.append(emits)
            plain = not lift
            continue
        if kind == "k" and bias:
            for _batch_number in key_batches(config, number):
                start = max(now, idle)
                taken, after, ready = _batch(config, chunks, lift, max(0, ready - start))
                now, idle, ready, plain = start + taken, start + after, start + ready, False
        taken_at = max(now, ready) + beats * np.arange(entries, dtype=np.int64)
        taken_at[-1] = max(taken_at[-1], known)
        segments[kind][number] = len(lengths)
        tables[kind][number] = taken_at + OPERAND_CYCLES
        if kind == "k":
            # What belongs to a running batch is shown when that has ended.
            tables[kind][number] = np.maximum(tables[kind][number], idle)
        end, ready = int(taken_at[-1]), int(taken_at[-1]) + beats
    finished = max(end + 1, idle) + _params(config).drain_cycles
    lengths.append(max(finished, ready + 1))
    closes.append(end)
    issued, scaled = np.array(words, dtype=np.int64), _params(config).result_cycles + QUERY_CYCLES
    return LoadPlan(
        lengths=np.array(lengths, dtype=np.int64),
        quick=long and not bias,
        closes=np.array(closes, dtype=np.int64),
        valid=valid,
        done=finished,
        passes=issued[:, config.pass_steps - 1 : entries : config.pass_steps] + scaled,
        whole=issued[:, -1] + scaled,
        key_segments=segments["k"],
        keys=tables["k"],
        value_segments=segments["v"],
        values=tables["v"],
    )


class LoaderModel:
    """The loader beside a walk that asks for operands in its own order and gives slots and ring places back.

    Every question is about the first cycle in which the walk can act; a question whose answer hangs on a release that
    has not been told yet cannot come up, because the walk would wait for itself.
    """

    def __init__(self, config: Config, jobs: Sequence[Job]) -> None:
        self._config = config
        self._tables = [_job_table(config, job) for job in jobs]
        self._starts: list[list[int]] = [[] for _ in jobs]
        self._clock = config.entry_beats
        self._ring = 0
        self._settled: dict[int, int] = {}
        self._slot_releases: list[int] = []
        self._ring_releases: list[int] = []

    def release(self, cycle: int) -> None:
        """The oldest job slot is given back."""
        self._slot_releases.append(cycle)

    def release_query(self, cycle: int) -> None:
        """The oldest query group of the ring is given back."""
        self._ring_releases.append(cycle)

    def job_valid(self, number: int) -> int:
        """A job's descriptor and mask."""
        return self._start(number, 0) + self._tables[number].valid

    def job_done(self, number: int) -> int:
        """All of a job."""
        table = self._tables[number]
        return self._start(number, len(table.lengths) - 1) + table.done

    def query_passes(self, number: int, group: int) -> list[int]:
        """Plain passes of a query group, then the whole group."""
        start = self._start(number, 1 + group)
        return [start + offset for offset in self._tables[number].passes[group]]

    def settled(self, number: int, group: int) -> int:
        """All keys and values of a job, and a query group: nothing waits for them from here on."""
        if number not in self._settled:
            table = self._tables[number]
            blocks = (*table.keys, *table.values)
            self._settled[number] = max(self._start(number, segment) + offsets[-1] for segment, offsets in blocks)
        return max(self._settled[number], self.query_passes(number, group)[-1])

    def key_passes(self, number: int, block: int) -> list[int]:
        """Plain passes of a key block."""
        segment, offsets = self._tables[number].keys[block]
        start = self._start(number, segment)
        return [start + offset for offset in offsets]

    def value_passes(self, number: int, block: int) -> list[int]:
        """Runs of ``pass_steps`` steps of a value block."""
        segment, offsets = self._tables[number].values[block]
        start = self._start(number, segment)
        return [start + offset for offset in offsets]

    def _start(self, number: int, segment: int) -> int:
        starts = self._starts[number]
        while len(starts) <= segment:
            place = len(starts)
            if place == 0:
                if number and len(self._starts[number - 1]) < len(self._tables[number - 1].lengths):
                    self._start(number - 1, len(self._tables[number - 1].lengths) - 1)
                clock = self._starts[number - 1][-1] + self._tables[number - 1].lengths[-1] if number else self._clock
                if number >= 2:
                    clock = max(clock, self._slot_releases[number - 2] + 1)
            else:
                table, size = self._tables[number], self._config.query_groups
                release = self._ring_releases[self._ring - size] if self._ring >= size else None
                early = table.quick and place > 1
                clock = _begin(starts[-1], table.lengths[place - 1], table.closes[place - 1], early, release)
                self._ring += 1
            starts.append(clock)
        return starts[segment]


@dataclass(frozen=True)
class _Table:
    """A :class:`LoadPlan` as plain lists, by pass."""

    lengths: list[int]
    quick: bool
    closes: list[int]
    valid: int
    done: int
    passes: list[list[int]]
    keys: list[tuple[int, list[int]]]
    values: list[tuple[int, list[int]]]


def _job_table(config: Config, job: Job) -> _Table:
    job.check(config)
    return _table(config, job.tokens, job.chunks(config), job.bias, job.lift, job.masked)


@lru_cache(maxsize=256)
def _table(config: Config, tokens: int, chunks: int, bias: bool, lift: bool, masked: bool) -> _Table:
    load = _plan(config, tokens, chunks, bias, lift, masked)
    last = slice(config.pass_steps - 1, None, config.pass_steps)
    return _Table(
        lengths=load.lengths.tolist(),
        quick=load.quick,
        closes=load.closes.tolist(),
        valid=load.valid,
        done=load.done,
        passes=np.concatenate([load.passes, load.whole[:, np.newaxis]], axis=1).tolist(),
        keys=list(zip(load.key_segments.tolist(), load.keys[:, last].tolist(), strict=True)),
        values=list(zip(load.value_segments.tolist(), load.values[:, last].tolist(), strict=True)),
    )
