"""The walker alone: passes in their static order, each when its operands are there and never before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from amaranth.sim import Simulator

from dtp.attention import kept_blocks
from dtp.config import Config
from dtp.job import Job
from dtp.normaliser import RecordKind
from rtl.attention import array_params
from rtl.walker import Walker
from tests.tile import CONFIGS, TINY

NAMES = ("tiny", "narrow", "wide16", "bytes")


@dataclass(frozen=True)
class Task:
    """A job as the loader shows it; ``error`` is that of its status record."""

    job: Job
    mask: np.ndarray | None
    error: int = 0


@dataclass(frozen=True)
class Item:
    """A kept block of a group, or a group without one."""

    task: int
    group: int
    block: int
    first: bool = True
    last: bool = True
    null: bool = False


def items_of(config: Config, number: int, task: Task) -> list[Item]:
    """Work items of a job in order (docs/tile.md §2)."""
    if task.error:
        return []
    found = []
    for group, row in enumerate(kept_blocks(config, task.job, task.mask)):
        blocks = np.flatnonzero(row).tolist()
        for block in blocks:
            found.append(Item(number, group, block, block == blocks[0], block == blocks[-1]))
        if not blocks:
            found.append(Item(number, group, 0, null=True))
    return found


def order_of(config: Config, items: list[Item]) -> list[tuple[str, Item]]:
    """Passes of one job: scores run ``lookahead`` items ahead of values."""
    order: list[tuple[str, Item]] = []
    scores = values = 0
    while values < len(items):
        if scores < len(items) and scores - values <= config.lookahead:
            order.append(("scores", items[scores]))
            scores += 1
        else:
            order.append(("values", items[values]))
            values += 1
    return order


@dataclass
class Bench:
    """Loader, softmax and normaliser as the walker sees them, with pauses of their own, and what it told them."""

    config: Config
    tasks: list[Task]
    seed: int
    hurry: float
    steps: list[tuple[int, ...]] = field(default_factory=list)
    feeds: list[tuple[int, ...]] = field(default_factory=list)
    records: list[tuple[int, ...]] = field(default_factory=list)
    items: list[tuple[int, ...]] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    query_releases: int = 0
    idle_steps: int = 0

    def run(self, limit: int = 20_000) -> None:
        c = self.config
        dut = Walker(c, array_params(c))
        simulator = Simulator(dut)
        simulator.add_clock(1e-8)
        wanted = len(self.tasks)

        async def bench(ctx: Any) -> None:
            rng = np.random.default_rng(self.seed)

            def lucky() -> bool:
                return self.hurry == 1.0 or bool(rng.random() < self.hurry)

            entries = [task.job.chunks(c) * c.pass_steps for task in self.tasks]
            # Progress of the loader: (task, keys, values), keys and values in entries, and groups of queries.
            loaded = [0] * wanted
            totals = [
                2 * c.blocks(task.job.tokens) * entries[n] if not task.error else 0 for n, task in enumerate(self.tasks)
            ]
            shown: list[int | None] = [None, None]
            next_task = released = groups_loaded = groups_freed = passes = 0
            plan: deque[tuple[int, int]] = deque()
            running: deque[int] = deque()  # countdowns of the softmax
            probabilities = 0
            began = False
            mask_address = (0, 0)
            for _cycle in range(limit):
                # What the loader shows now.
                slot = next_task % 2
                if next_task < wanted and shown[slot] is None and lucky():
                    shown[slot] = next_task
                    task = self.tasks[next_task]
                    for name in (
                        "tokens",
                        "valid_length",
                        "lift",
                        "bias",
                        "causal",
                        "score_shift",
                        "lift_shift",
                        "tag",
                    ):
                        ctx.set(dut.jobs[slot][name], int(getattr(task.job, name)))
                    ctx.set(dut.jobs[slot].chunks, task.job.chunks(c))
                    ctx.set(dut.jobs[slot].blocks, c.blocks(task.job.tokens))
                    ctx.set(dut.jobs[slot].groups, c.groups(task.job.tokens))
                    ctx.set(dut.jobs[slot].error, task.error)
                    ctx.set(dut.lift_saturations[slot], 77 + next_task)
                    if not task.error:
                        plan += [(next_task, group) for group in range(c.groups(task.job.tokens))]
                    next_task += 1
                for slot, number in enumerate(shown):
                    ctx.set(dut.job_valid[slot], number is not None)
                    if number is None:
                        ctx.set(dut.job_done[slot], 0)
                        continue
                    if loaded[number] < totals[number] and lucky():
                        loaded[number] += int(rng.integers(1, 3))
                        loaded[number] = min(loaded[number], totals[number])
                    # Keys of a block come before its values.
                    half = totals[number] // 2
                    keys = min(half, (loaded[number] + entries[number]) // 2)
                    values = min(loaded[number] - keys, half) if loaded[number] < totals[number] else half
                    values = max(values, 0)
                    ctx.set(dut.k_block[slot], keys // max(1, entries[number]))
                    ctx.set(dut.k_entry[slot], keys % max(1, entries[number]))
                    ctx.set(dut.v_block[slot], values // max(1, entries[number]))
                    ctx.set(dut.v_entry[slot], values % max(1, entries[number]))
                    ctx.set(
                        dut.job_done[slot], loaded[number] == totals[number] and not any(t == number for t, _ in plan)
                    )
                if plan and groups_loaded - groups_freed < c.query_groups and lucky():
                    passes += 1
                    if passes == self.tasks[plan[0][0]].job.passes(c) + 1:
                        plan.popleft()
                        passes, groups_loaded = 0, groups_loaded + 1
                # The last pass of a group that does not lift comes with the group.
                job = self.tasks[plan[0][0]].job if plan else None
                shown_passes = min(passes, job.chunks(c) - (not job.lift)) if job else 0
                ctx.set(dut.q_group, groups_loaded % (2 * c.query_groups))
                ctx.set(dut.q_pass, shown_passes)
                number = shown[mask_address[0]]
                row = (1 << c.max_blocks) - 1
                if number is not None and self.tasks[number].mask is not None:
                    mask = self.tasks[number].mask
                    assert mask is not None
                    row = 0
                    if mask_address[1] < len(mask):
                        row = sum(int(bit) << place for place, bit in enumerate(mask[mask_address[1]]))
                ctx.set(dut.mask_row, row)
                done = bool(running) and running[0] <= 0
                if done:
                    running.popleft()
                ctx.set(dut.done, done)
                running = deque(count - 1 for count in running)
                ready = lucky()
                ctx.set(dut.record.ready, ready)

                # What the walker says now.
                feed, step = dut.feed, dut.step
                if ctx.get(dut.item_valid):
                    self.items.append(
                        tuple(
                            ctx.get(dut.item[name])
                            for name in ("slot", "first", "last", "key_base", "query_base", "valid_length", "causal")
                        )
                    )
                    running.append(max(running, default=0) + int(rng.integers(1, 2 * c.block)))
                if ctx.get(feed.valid):
                    if ctx.get(feed.is_values):
                        assert probabilities > 0
                        self.feeds.append((1, ctx.get(feed.buffer), ctx.get(feed.number)))
                        probabilities -= ctx.get(feed.number) == c.pass_steps - 1
                    else:
                        self.feeds.append((0, ctx.get(feed.query_address), ctx.get(feed.number)))
                        self._check_query(ctx.get(feed.query_address), groups_loaded, groups_freed, shown_passes)
                probabilities += done
                if ctx.get(step.valid):
                    began = True
                    self._check_operands(ctx, dut, list(shown))
                    self.steps.append(
                        tuple(
                            ctx.get(step[name])
                            for name in (
                                "is_values",
                                "is_lifted",
                                "slot",
                                "block",
                                "pass_number",
                                "lifted_number",
                                "step_number",
                                "address",
                                "first",
                                "has_bias",
                                "shift",
                                "emit",
                                "swap",
                                "buffer",
                                "output_slot",
                                "key_number",
                            )
                        )
                    )
                elif began:
                    self.idle_steps += 1
                if ctx.get(dut.record.valid) and ready:
                    record = dut.record.payload
                    kind = ctx.get(record.kind)
                    self.records.append(
                        (
                            kind,
                            ctx.get(record.slot),
                            ctx.get(record.steps),
                            ctx.get(record.live_rows),
                            ctx.get(record.tag),
                            ctx.get(record.error),
                            ctx.get(record.lift_saturations),
                        )
                    )
                if ctx.get(dut.q_release):
                    self.query_releases += 1
                    groups_freed += 1
                    assert groups_freed <= groups_loaded
                if ctx.get(dut.release):
                    self.releases.append(len(self.records))
                    assert shown[released % 2] == released
                    shown[released % 2] = None
                    released += 1
                mask_address = (ctx.get(dut.mask_slot), ctx.get(dut.mask_row_index))
                await ctx.tick()
                if released == wanted:
                    break
            assert released == wanted, f"{released} of {wanted} jobs ended"

        simulator.add_testbench(bench)
        simulator.run()

    def _check_query(self, address: int, loaded: int, freed: int, passes: int) -> None:
        """The group lies in the ring and the pass of it has come."""
        c = self.config
        group = address // c.pass_steps % c.query_groups
        number = address // c.pass_steps // c.query_groups
        inside = [g for g in range(freed, loaded) if g % c.query_groups == group]
        assert inside or (group == loaded % c.query_groups and number < passes)

    def _check_operands(self, ctx: Any, dut: Walker, shown: list[int | None]) -> None:
        """Each step's operand has been loaded."""
        c, step = self.config, dut.step
        slot, block = ctx.get(step.slot), ctx.get(step.block)
        number = shown[slot]
        assert number is not None
        if ctx.get(step.is_lifted):
            return  # lifted keys come with the plain ones
        entries = self.tasks[number].job.chunks(c) * c.pass_steps
        if ctx.get(step.is_values):
            place = block * entries + ctx.get(step.step_number)
            there = ctx.get(dut.v_block[slot]) * entries + ctx.get(dut.v_entry[slot])
        else:
            place = block * entries + ctx.get(step.pass_number) * c.pass_steps + ctx.get(step.step_number)
            there = ctx.get(dut.k_block[slot]) * entries + ctx.get(dut.k_entry[slot])
        assert place < there


def expected(config: Config, tasks: list[Task]) -> dict[str, list[tuple[int, ...]]]:
    """Steps, feeds, items and records of a run, by the contract."""
    c = config
    steps: list[tuple[int, ...]] = []
    feeds: list[tuple[int, ...]] = []
    items: list[tuple[int, ...]] = []
    records: list[tuple[int, ...]] = []
    score_buffer = value_buffer = output = ring = 0
    for number, task in enumerate(tasks):
        job, slot = task.job, number % 2
        chunks = job.chunks(c)
        for kind, item in order_of(c, items_of(c, number, task)):
            live = sum(1 << row for row in range(c.rows) if item.group * c.rows + row < job.valid_length)
            if item.null:
                if kind == "values":
                    records.append((RecordKind.NULL, output, chunks * c.pass_steps, live, job.tag, 0, 77 + number))
                else:
                    ring += 1
                continue
            if kind == "values":
                for feed in range(c.pass_steps):
                    feeds.append((1, value_buffer, feed))
                for step in range(chunks * c.pass_steps):
                    place = (item.block, 0, 0, step, step + c.pass_steps)
                    marks = (int(item.first), 0, 0, int(item.last), int(step == 0))
                    steps.append((1, 0, slot, *place, *marks, value_buffer, output, -1))
                if item.last:
                    records.append((RecordKind.DATA, output, chunks * c.pass_steps, live, job.tag, 0, 77 + number))
                    output = (output + 1) % c.output_slots
                value_buffer = (value_buffer + 1) % (c.lookahead + 1)
                continue
            items.append(
                (
                    score_buffer,
                    int(item.first),
                    int(item.last),
                    item.block * c.block,
                    item.group * c.rows,
                    job.valid_length,
                    int(job.causal),
                )
            )
            for index in range(job.passes(c)):
                lifted = index >= chunks
                place = c.max_chunks + index - chunks if lifted else index
                for feed in range(c.pass_steps):
                    feeds.append((0, (place * c.query_groups + ring % c.query_groups) * c.pass_steps + feed, feed))
                numbers = (-1, index - chunks) if lifted else (index, -1)
                shift = job.lift_shift if lifted else job.score_shift
                first, last = index == 0, index == job.passes(c) - 1
                for step in range(c.pass_steps):
                    marks = (int(first), int(first and job.bias), shift, int(last), int(step == 0))
                    key = item.block * c.pass_steps + step
                    steps.append(
                        (0, int(lifted), slot, item.block, *numbers, step, step, *marks, score_buffer, -1, key)
                    )
            score_buffer = (score_buffer + 1) % (c.lookahead + 1)
            ring += item.last
        records.append((RecordKind.STATUS, -1, -1, -1, job.tag, task.error, 77 + number))
    return {"steps": steps, "feeds": feeds, "items": items, "records": records}


def equal(got: list[tuple[int, ...]], wanted: list[tuple[int, ...]], what: str) -> None:
    """Tuples in order; −1 stands for a number that means nothing there."""
    for place, (one, other) in enumerate(zip(got, wanted, strict=False)):
        shown = tuple(-1 if w == -1 else g for g, w in zip(one, other, strict=True))
        assert shown == other, f"{what} {place}"
    assert len(got) == len(wanted), what


def tasks_of(config: Config, seed: int, count: int) -> list[Task]:
    """Random jobs, refused ones and ones without a kept block among them."""
    rng = np.random.default_rng(seed)
    c = config
    tasks = []
    for number in range(count):
        tokens = int(rng.integers(1, min(c.max_tokens, 5 * c.block) + 1))
        lift = bool(rng.integers(2))
        job = Job(
            tokens=tokens,
            valid_length=tokens if rng.integers(2) else int(rng.integers(1, tokens + 1)),
            width=int(rng.integers(1, c.max_width + 1)),
            tag=1000 * seed % 60000 + number,
            bias=lift or bool(rng.integers(2)),
            lift=lift,
            causal=bool(rng.integers(2)),
            score_shift=int(rng.integers(4)),
            lift_shift=int(rng.integers(4)),
        )
        blocks = c.blocks(tokens)
        mask = rng.random((blocks, blocks)) < rng.choice([0.0, 0.3, 0.7]) if rng.integers(3) else None
        tasks.append(Task(job, mask, error=int(rng.integers(1, 8)) if rng.random() < 0.2 else 0))
    return tasks


@pytest.mark.parametrize("hurry", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", NAMES)
def test_passes_come_in_their_order(name: str, seed: int, hurry: float) -> None:
    config = CONFIGS[name]
    tasks = tasks_of(config, seed, 6)
    bench = Bench(config, tasks, seed, hurry)
    bench.run()
    wanted = expected(config, tasks)
    equal(bench.records, wanted["records"], "record")
    equal(bench.items, wanted["items"], "item")
    equal(bench.feeds, wanted["feeds"], "feed")
    equal(bench.steps, wanted["steps"], "step")
    groups = sum(config.groups(task.job.tokens) for task in tasks if not task.error)
    assert bench.query_releases == groups
    # A slot is given back after its record, the jobs in order.
    ends = [place + 1 for place, record in enumerate(bench.records) if record[0] == RecordKind.STATUS]
    assert all(release >= end for release, end in zip(bench.releases, ends, strict=True))


def test_scores_run_ahead_by_the_lookahead() -> None:
    """S0 … SD, PV0, S(D+1), PV1, …: the contract's own example."""
    items = items_of(TINY, 0, Task(Job(tokens=16, valid_length=16, width=4), None))
    order = [f"{'S' if kind == 'scores' else 'PV'}{items.index(item)}" for kind, item in order_of(TINY, items)]
    assert order == "S0 S1 S2 S3 PV0 S4 PV1 S5 PV2 S6 PV3 S7 PV4 PV5 PV6 PV7".split()


@pytest.mark.parametrize("name", NAMES)
def test_no_idle_cycle_when_everything_is_there(name: str) -> None:
    """A dense head whose operands, probabilities and outputs never wait: gaps come at its end alone."""
    config = CONFIGS[name]
    job = Job(tokens=4 * config.block, valid_length=4 * config.block, width=config.max_width)
    bench = Bench(config, [Task(job, None)], 0, 1.0)
    bench.run()
    assert len(bench.steps) > 200
    assert bench.idle_steps < 12 * config.block
