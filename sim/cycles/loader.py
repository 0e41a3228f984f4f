"""Cycle model of the loader: when operands become visible, for a source that never stalls.

A job is loaded in *segments*, each with a fixed time table of its own. A segment begins at the later of the cycle in
which the loader has come so far and the one after the release it waits for: the descriptor waits for a job slot, every
query group for a place in the ring. Segment 0 is the descriptor and the block mask, segment 1 + g is query group g with
the keys and values that follow it in the stream.

    starts[0] = max(end of the job before, release of the job two before + 1)
    starts[1 + g] = max(starts[g] + lengths[g], release of the ring's group + 1)

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
from dtp.job import Job, descriptor_entries, key_batches, mask_entries
from dtp.lift import DRAIN_CYCLES, RESULT_CYCLES, START_CYCLES, Emit, Instruction, LiftParams, Loop

QUERY_CYCLES = RESULT_CYCLES + 1
"""From the issue of a word of queries until it can be read."""
OPERAND_CYCLES = 1
"""From the cycle in which an entry of keys or values is taken until it can be read."""
CHECK_CYCLES = 2
"""From the last entry of a descriptor to the first of what follows."""
SCALE_CYCLES = RESULT_CYCLES + 1
"""From the last entry of a descriptor to the first word that can be scaled."""


@dataclass(frozen=True)
class LoadPlan:
    """Time table of one job.

    Parameters
    ----------
    lengths: (1 + groups,) cycles from the start of a segment to the earliest start of the next; the last one: to the
        earliest start of the next job's descriptor
    valid: offset of ``job_valid`` in segment 0
    done: offset of ``job_done`` in the last segment
    passes: (groups, chunks) offset of each plain pass of a group in its segment; the last one without lift is the
        group's
    whole: (groups,) offset of a whole group in its segment
    key_segments, value_segments: (blocks,) segment in which a block is loaded
    keys, values: (blocks, entries) offset of each entry in that segment
    """

    lengths: Int
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
            clock = starts[-1] + int(plan.lengths[group])
            if ring >= config.query_groups:
                clock = max(clock, ring_releases[ring - config.query_groups] + 1)
            starts.append(clock)
            ring += 1
        loaded = times(plan, starts)
        clock = loaded.end
        result.append(loaded)
    return result


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


def _execute(code: Sequence[Instruction], count: int, cycle: int, source: _Source) -> tuple[int, list[int]]:
    """Runs a program from its first issue on: cycle after its end, cycles of the instructions that emit."""
    emits: list[int] = []
    for instruction in code:
        if instruction.wait:
            cycle += instruction.cycles
            continue
        repeats = count if instruction.loop is Loop.WORDS else 1
        if repeats == 0:
            cycle += 1
        for _ in range(repeats):
            if instruction.take:
                cycle = source.take_word(cycle, last=instruction.flush)
            if instruction.emit is not Emit.NONE:
                emits.append(cycle)
            cycle += 1
    return cycle, emits


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


@lru_cache(maxsize=64)
def _plan(config: Config, tokens: int, chunks: int, bias: bool, lift: bool, masked: bool) -> LoadPlan:
    params = LiftParams(config)
    programs = params.programs
    beats = config.entry_beats
    source = _Source(beats, config.entry_words)
    entries = chunks * config.pass_steps

    # Segment 0: descriptor, check, mask, constants.
    cycle = 0
    for _ in range(descriptor_entries(config)):
        cycle = source.take_entry(cycle)
        cycle += 1
    taken = cycle - 1
    cycle = taken + CHECK_CYCLES
    if masked:
        rows, left = config.entry_bytes // config.mask_row_bytes, config.blocks(tokens)
        for _ in range(mask_entries(config, tokens)):
            start = max(cycle, source.ready)
            cycle = source.take_entry(start + min(rows, left) - 1) + 1
            left -= rows
    valid = cycle
    begin = max(cycle, source.ready)
    if bias:
        constants = programs["lift_constants" if lift else "bias_constants"].code
        issue = taken + CHECK_CYCLES - 1 + START_CYCLES
        begin = max(begin, _execute(constants, 0, issue, source)[0])
    else:
        begin = max(begin, taken + SCALE_CYCLES)
    begin = max(begin, taken + CHECK_CYCLES + 1)  # the second section is known
    lengths = [begin]

    order = _order(config, tokens)
    key_segments, value_segments = (np.zeros(config.blocks(tokens), dtype=np.int64) for _ in range(2))
    keys, values = (np.zeros((config.blocks(tokens), entries), dtype=np.int64) for _ in range(2))
    passes: list[list[int]] = []
    whole: list[int] = []
    plain = not bias

    # Every segment counts from its own start; a query group's claim is cycle 0.
    def queries() -> int:
        """Loads a group from cycle 0 on; the cycle in which its section ends."""
        nonlocal plain
        source.ready, source.word = 0, 0
        count = chunks * config.pass_steps
        if lift:
            end, emits = _execute(programs["lift_queries"].code, count - params.query_words, START_CYCLES, source)
            end -= 1
        else:
            now = 0 if plain else START_CYCLES
            emits = []
            for word in range(count):
                now = source.take_word(now, last=word == count - 1)
                emits.append(now)
                now += 1
            end = emits[-1]
        plain = not lift
        steps = config.pass_steps
        passes.append([emits[(n + 1) * steps - 1] + QUERY_CYCLES for n in range(chunks)])
        whole.append(emits[-1] + QUERY_CYCLES)
        return end

    end = queries()
    segment = 1
    for (kind, number, _), (_, _, looked) in itertools.pairwise(order):
        known = end + looked  # cycle in which the next section is known, which the last entry waits for
        if kind == "q":
            lengths.append(max(end + 1, source.ready, known))
            end = queries()
            segment += 1
            continue
        now = end + 1
        if kind == "k" and bias:
            name = "lift_keys" if lift else "keys"
            loop = chunks * config.block - (params.rank if lift else 0)
            for _batch in key_batches(config, number):
                now, _ = _execute(programs[name].code, loop, now + START_CYCLES, source)
                plain = False
        segments, table = (key_segments, keys) if kind == "k" else (value_segments, values)
        segments[number] = segment
        for entry in range(entries):
            if entry == entries - 1:
                now = max(now, known)
            now = source.take_entry(now)
            table[number, entry] = now + OPERAND_CYCLES
            now += 1
        end = now - 1
    finished = end + 1 + DRAIN_CYCLES
    lengths.append(max(finished, source.ready + 1))
    return LoadPlan(
        lengths=np.array(lengths, dtype=np.int64),
        valid=valid,
        done=finished,
        passes=np.array(passes, dtype=np.int64),
        whole=np.array(whole, dtype=np.int64),
        key_segments=key_segments,
        keys=keys,
        value_segments=value_segments,
        values=values,
    )
