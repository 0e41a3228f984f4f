"""The loader in hardware: what it writes, what it says is there, when, and how it answers bad input."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from dtp.config import Config
from dtp.job import (
    SHIFT_BITS,
    ErrorCode,
    Job,
    address_bias,
    address_keys,
    address_lifted,
    address_query,
    address_values,
    descriptor_entries,
    descriptor_error,
    job_entries,
    pack_descriptor,
    pack_job,
    unpack_descriptor,
)
from dtp.lift import lift_keys, lift_queries
from rtl.loader import Loader
from sim.cycles.loader import plan, run
from tests.shared import shared

MEMORIES = ("moving", "lifted", "bias", "query")


def packed(values: np.ndarray, bits: int) -> int:
    """Signed numbers side by side, the first one lowest."""
    word = 0
    for place, value in enumerate(np.asarray(values).reshape(-1).tolist()):
        word |= (value & ((1 << bits) - 1)) << (place * bits)
    return word


@dataclass
class Case:
    """A job with operands, its beats, and what the memories must hold for it."""

    config: Config
    job: Job
    seed: int
    beats: np.ndarray = field(init=False)
    mask: np.ndarray | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        c, job = self.config, self.job
        rng = np.random.default_rng(self.seed)
        high = 1 << (c.operand_bits - 1)
        shape = (job.tokens, job.width)
        self.queries, self.keys, self.values = (rng.integers(-high, high, shape) for _ in range(3))
        ranks = (job.tokens, c.max_frame_rank, c.metric_rank)
        self.query_factors, self.key_factors = (
            rng.integers(-high, high, ranks) if job.lift else None for _ in range(2)
        )
        self.bias = rng.integers(-(1 << 15), 1 << 15, job.tokens) if job.bias else None
        if job.masked:
            self.mask = rng.random((c.blocks(job.tokens),) * 2) < 0.5
        self.beats = pack_job(
            c, job, self.queries, self.keys, self.values, self.query_factors, self.key_factors, self.bias, self.mask
        )
        self.row_operands, self.saturations = lift_queries(c, job, self.queries, self.query_factors)
        if job.bias:
            self.lifted, self.beta, more = lift_keys(c, job, self.keys, self.key_factors, self.bias)
            self.saturations += more
        self.chunks = c.chunks(job.width)

    def grid(self, array: np.ndarray, tokens: int) -> np.ndarray:
        """Tokens and lanes padded with zeros."""
        width = -(-array.shape[1] // self.config.block) * self.config.block
        return np.pad(array, ((0, tokens - array.shape[0]), (0, width - array.shape[1])))

    def key_words(self, slot: int, block: int) -> list[tuple[int, int]]:
        """Addresses and words of a block's keys, in entry order."""
        c = self.config
        keys = self.grid(self.keys, c.blocks(self.job.tokens) * c.block)
        words = []
        for chunk in range(self.chunks):
            for key in range(block * c.block, (block + 1) * c.block, c.segments):
                lanes = keys[key : key + c.segments, chunk * c.block : (chunk + 1) * c.block]
                words.append((address_keys(c, slot, chunk, key), packed(lanes, c.operand_bits)))
        return words

    def value_words(self, slot: int, block: int) -> list[tuple[int, int]]:
        """Addresses and words of a block's values, in entry order."""
        c = self.config
        values = self.grid(self.values, c.blocks(self.job.tokens) * c.block)
        words = []
        for step in range(self.chunks * c.pass_steps):
            columns = values[block * c.block : (block + 1) * c.block, step * c.segments : (step + 1) * c.segments]
            words.append((address_values(c, slot, block, step), packed(columns.T, c.operand_bits)))
        return words

    def lifted_words(self, slot: int, block: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Addresses and words of a block's lifted keys and of its biases."""
        c = self.config
        lanes = self.grid(self.lifted, c.blocks(self.job.tokens) * c.block)
        beta = np.pad(self.beta, (0, len(lanes) - len(self.beta)))
        lifted, biases = [], []
        for key in range(block * c.block, (block + 1) * c.block, c.segments):
            biases.append((address_bias(c, slot, key), packed(beta[key : key + c.segments], 24)))
            for number in range(c.lifted_passes if self.job.lift else 0):
                part = lanes[key : key + c.segments, number * c.block : (number + 1) * c.block]
                lifted.append((address_lifted(c, slot, number, key), packed(part, c.lifted_bits)))
        return lifted, biases

    def query_words(self, ring_group: int, group: int, number: int) -> list[tuple[int, int]]:
        """Addresses and words of one pass of a group; ``number`` counts plain, then lifted passes."""
        c = self.config
        rows = self.grid(self.row_operands, c.groups(self.job.tokens) * c.rows)[group * c.rows : (group + 1) * c.rows]
        place = number if number < self.chunks else number - self.chunks + c.max_chunks
        words = []
        for feed in range(c.pass_steps):
            low = number * c.block + feed * c.segments
            lanes = rows[:, low : low + c.segments]
            words.append((address_query(c, place, ring_group, feed), packed(lanes, c.row_bits)))
        return words


@dataclass
class Packet:
    """Beats that end with ``last`` and what the loader has to make of them; ``case`` is None for no operands."""

    beats: np.ndarray
    case: Case | None
    error: ErrorCode = ErrorCode.NONE
    check_saturations: bool = True


@dataclass
class Trace:
    """Cycle in which something could be seen first: ``("k", job, block, entry)`` and the like."""

    seen: dict[tuple[Any, ...], int] = field(default_factory=dict)
    first_beat: list[int] = field(default_factory=list)
    writes: int = 0
    slot_releases: list[int] = field(default_factory=list)
    ring_releases: list[int] = field(default_factory=list)


class Bench:
    """Feeds packets, frees slots and ring, and compares memories with the golden model when news comes."""

    def __init__(
        self, config: Config, packets: list[Packet], *, stall: float = 0.0, hold: float = 0.0, seed: int = 0,
        limit: int = 200_000,
    ) -> None:  # fmt: skip
        self.config, self.packets, self.stall, self.hold = config, packets, stall, hold
        self.random = random.Random(seed)
        self.memory: dict[str, dict[int, int]] = {name: {} for name in MEMORIES}
        self.trace = Trace()
        self.limit = limit
        self.simulation = shared((Loader, config), lambda: Loader(config))
        self.dut = self.simulation.dut
        self.single = False  # one job at a time
        self.late_release = False  # a slot is given back when two wait, or none comes any more

    def run(self) -> Trace:
        self.simulation.run(self.drive)
        return self.trace

    def _check(self, name: str, words: list[tuple[int, int]]) -> None:
        memory = self.memory[name]
        for address, word in words:
            assert memory.get(address, 0) == word, f"{name}[{address}] of cycle {self.cycle}"

    async def drive(self, ctx: Any) -> None:
        dut, c = self.dut, self.config
        feed = [
            (int.from_bytes(row.tobytes(), "little"), place == len(packet.beats) - 1, place == 0)
            for packet in self.packets
            for place, row in enumerate(packet.beats)
        ]
        position = 0
        offered = False
        # What has been seen of each job, by slot.
        running: list[int | None] = [None, None]
        answered = started = 0
        seen_k, seen_v = [[0, 0], [0, 0]], [[0, 0], [0, 0]]
        groups: list[tuple[int, int]] = []  # (job, group) in ring order
        for number, packet in enumerate(self.packets):
            if packet.case is not None:
                groups += [(number, g) for g in range(c.groups(packet.case.job.tokens))]
        loaded = passes = released = 0
        finished = 0
        idle = 0
        entry_count = {n: p.case.chunks * c.pass_steps for n, p in enumerate(self.packets) if p.case is not None}
        self.cycle = 0
        while idle < 40:
            assert self.cycle < self.limit, "the loader does not get on"
            cycle = self.cycle
            # News, as the walker sees them in this cycle.
            valid, done = ctx.get(dut.job_valid), ctx.get(dut.job_done)
            for slot in range(2):
                if running[slot] is None and valid >> slot & 1:
                    assert slot == started % 2
                    running[slot] = started
                    self.trace.seen["valid", started] = cycle
                    self._check_job(ctx, slot, self.packets[started])
                    seen_k[slot], seen_v[slot] = [0, 0], [0, 0]
                    started += 1
                job = running[slot]
                if job is None or self.packets[job].case is None:
                    continue
                case = self.packets[job].case
                assert case is not None
                for name, block, entry, seen, words in (
                    ("k", dut.k_block, dut.k_entry, seen_k, case.key_words),
                    ("v", dut.v_block, dut.v_entry, seen_v, case.value_words),
                ):
                    now = [ctx.get(block[slot]), ctx.get(entry[slot])]
                    if now == seen[slot]:
                        continue
                    if now[0] >= c.max_blocks and seen[slot] == [c.blocks(case.job.tokens), 0]:
                        assert done >> slot & 1
                        continue
                    # Keys that were taken while a factor batch was lifted come all at once, other news one by one.
                    old = seen[slot]
                    steps = 0
                    while old != now:
                        self.trace.seen[name, job, *old] = cycle
                        self._check("moving", words(slot, old[0])[old[1] : old[1] + 1])
                        if name == "k" and case.job.bias and old[1] == 0:
                            lifted, biases = case.lifted_words(slot, old[0])
                            self._check("lifted", lifted)
                            self._check("bias", biases)
                        old = [old[0], old[1] + 1] if old[1] + 1 < entry_count[job] else [old[0] + 1, 0]
                        steps += 1
                        assert old[0] <= now[0], f"{name} goes from {seen[slot]} to {now}"
                    assert steps == 1 or (name == "k" and case.job.bias)
                    seen[slot] = now
            q_group, q_pass = ctx.get(dut.q_group), ctx.get(dut.q_pass)
            if (q_group - loaded) % (2 * c.query_groups) or q_pass != passes:
                job, group = groups[loaded]
                case = self.packets[job].case
                assert case is not None
                count = case.job.passes(c)
                if (q_group - loaded) % (2 * c.query_groups):
                    assert (q_group - loaded) % (2 * c.query_groups) == 1 and q_pass == 0
                    for number in range(passes, count):
                        self._check("query", case.query_words(loaded, group, number))
                    self.trace.seen["q", job, group] = cycle
                    loaded, passes = loaded + 1, 0
                else:
                    assert q_pass == passes + 1 <= case.chunks
                    self._check("query", case.query_words(loaded, group, passes))
                    self.trace.seen["qp", job, group, passes] = cycle
                    passes = q_pass
            assert loaded - released <= c.query_groups
            for slot in range(2):
                if running[slot] is not None and done >> slot & 1 and ("done", running[slot]) not in self.trace.seen:
                    self.trace.seen["done", running[slot]] = cycle
                    self._check_done(ctx, slot, running[slot], seen_k[slot], seen_v[slot])
                    finished += 1

            # Freeing.
            busy = self.random.random() < self.hold
            ctx.set(dut.q_release, int(loaded > released and not busy))
            if loaded > released and not busy:
                released += 1
                self.trace.ring_releases.append(cycle)
            oldest = answered % 2
            frees = bool(done >> oldest & 1) and running[oldest] == answered and self.random.random() >= self.hold
            if self.late_release:
                frees &= done == 3 or finished == len(self.packets)
            ctx.set(dut.release, int(frees))
            if frees:
                running[oldest] = None
                self.trace.slot_releases.append(cycle)
                answered += 1

            # Input.
            waits = self.single and position and feed[position - 1][1] and finished < started + (started == 0)
            if position < len(feed) and not waits and (offered or self.random.random() >= self.stall):
                word, last, first = feed[position]
                offered = True
                ctx.set(dut.i.valid, 1)
                ctx.set(dut.i.payload.data, word)
                ctx.set(dut.i.payload.last, int(last))
                if ctx.get(dut.i.ready):
                    if first:
                        self.trace.first_beat.append(cycle)
                    position, offered = position + 1, False
            else:
                ctx.set(dut.i.valid, 0)
                ctx.set(dut.i.payload.data, self.random.getrandbits(8 * c.input_bytes))
                ctx.set(dut.i.payload.last, self.random.getrandbits(1))

            # Writes of this cycle are in memory in the next.
            for name in MEMORIES:
                write = getattr(dut, f"{name}_write")
                enables = ctx.get(write.en)
                if enables:
                    self._write(name, ctx.get(write.addr), ctx.get(write.data), enables)
            idle = idle + 1 if answered == len(self.packets) else 0
            await ctx.tick()
            self.cycle += 1
        assert position == len(feed) and loaded == len(groups) and finished == len(self.packets)

    def _write(self, name: str, address: int, word: int, enables: int) -> None:
        self.trace.writes += 1
        c, memory = self.config, self.memory[name]
        if name == "lifted":
            mask = 0
            for segment in range(c.segments):
                for lane in range(c.block):
                    if enables >> lane & 1:
                        mask |= ((1 << c.lifted_bits) - 1) << (segment * c.block + lane) * c.lifted_bits
            word = (memory.get(address, 0) & ~mask) | (word & mask)
        memory[address] = word

    def _check_job(self, ctx: Any, slot: int, packet: Packet) -> None:
        c, view = self.config, self.dut.jobs[slot]
        shown = ctx.get(view.error)
        if packet.error.refuses:
            assert shown == packet.error
            return
        assert shown == 0
        case = packet.case
        assert case is not None
        job = case.job
        for name in ("tokens", "valid_length", "lift", "bias", "causal", "score_shift", "lift_shift", "tag"):
            assert ctx.get(getattr(view, name)) == getattr(job, name), name
        assert ctx.get(view.chunks) == case.chunks
        assert ctx.get(view.blocks) == c.blocks(job.tokens)
        assert ctx.get(view.groups) == c.groups(job.tokens)

    def _check_done(self, ctx: Any, slot: int, number: int, k: list[int], v: list[int]) -> None:
        packet = self.packets[number]
        assert ctx.get(self.dut.jobs[slot].error) == packet.error
        if packet.case is not None:
            blocks = self.config.blocks(packet.case.job.tokens)
            assert k == [blocks, 0] and v == [blocks, 0]
            if packet.check_saturations:
                assert ctx.get(self.dut.lift_saturations[slot]) == min(65535, packet.case.saturations)


@cache
def preset(name: str) -> Config:
    return Config.load(name)


def scaled_job(config: Config, kind: str, tokens: int, width: int, **more: Any) -> Job:
    """A job whose scales use the ranges of the lanes and saturate some of them."""
    fields: dict[str, Any] = {"tokens": tokens, "valid_length": max(1, tokens - 1), "width": width}
    fields |= {"tag": 0x1234, "query_scale": 40_000, "score_shift": 1, "causal": bool(tokens & 1)}
    if kind != "dot":
        fields |= {"bias": True, "bias_scale": 300, "norm_scale": -11_000, "bias_shift": 7}
    if kind == "lift":
        fields |= {
            "lift": True, "metric_scale": 700, "lift_vector_scale": -9_000, "lift_metric_scale": -21_000,
            "lift_outer_scale": 30_000, "metric_norm_scale": -9_000, "key_vector_shift": 7, "key_outer_shift": 5,
            "key_metric_shift": 6, "lift_shift": (1 << SHIFT_BITS["lift_shift"]) - 1,
        }  # fmt: skip
    return Job(**{**fields, **more})


def packet(config: Config, kind: str, tokens: int, width: int, seed: int = 0, **more: Any) -> Packet:
    case = Case(config, scaled_job(config, kind, tokens, width, **more), seed)
    return Packet(case.beats, case)


KINDS = ("dot", "bias", "lift")


def assert_timing(config: Config, packets: list[Packet], trace: Trace) -> None:
    """Every piece of news comes in the cycle that the model says."""
    plans = [plan(config, p.case.job) for p in packets if p.case is not None]
    loaded = run(plans, config, trace.slot_releases, trace.ring_releases)
    expected: dict[tuple[Any, ...], int] = {}
    for number, (at, one) in enumerate(zip(loaded, plans, strict=True)):
        expected["valid", number] = at.valid
        expected["done", number] = at.done
        for name, table in (("k", at.keys), ("v", at.values)):
            for (block, entry), cycle in np.ndenumerate(table):
                expected[name, number, block, entry] = int(cycle)
        for group in range(one.groups):
            expected["q", number, group] = int(at.groups[group])
            for place, cycle in enumerate(at.passes[group]):
                if cycle != at.groups[group]:
                    expected["qp", number, group, place] = int(cycle)
    wrong = {
        key: (expected.get(key), trace.seen.get(key))
        for key in sorted(expected.keys() | trace.seen.keys(), key=str)
        if expected.get(key) != trace.seen.get(key)
    }
    assert not wrong, str(sorted(wrong.items(), key=lambda item: item[1][1] or 0)[:6])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name, tokens, width",
    [
        ("tiny", 1, 1), ("tiny", 8, 16), ("tiny", 21, 9), ("tiny", 64, 16), ("tiny", 37, 11),
        ("ecp5-85k", 37, 23), ("wide", 35, 37),
    ],
)  # fmt: skip
def test_memories_and_timing(kind: str, name: str, tokens: int, width: int) -> None:
    config = preset(name)
    packets = [packet(config, kind, tokens, width, seed=7, masked=bool(tokens & 1))]
    assert_timing(config, packets, Bench(config, packets).run())


@pytest.mark.parametrize("kind", KINDS)
def test_timing_of_groups_that_fill_half_an_entry(kind: str) -> None:
    """Fewer rows than segments: the last word of a group is not the last that its entry has room for."""
    config = preset("tiny").changed(
        name="half", rows=2, lanes=64, block=16, max_tokens=32, max_width=32, max_frame_rank=1, metric_rank=1,
        lift_ports=2, query_groups=16, normaliser_lanes=1, input_bytes=8,
    )  # fmt: skip
    assert config.rows < config.segments and config.entry_words > config.pass_steps
    packets = [packet(config, kind, tokens, width, seed=7) for tokens, width in ((10, 8), (3, 15), (20, 30))]
    assert_timing(config, packets, Bench(config, packets).run())


@pytest.mark.parametrize("seed", range(4))
def test_timing_of_many_jobs(seed: int) -> None:
    """Jobs back to back, with slots and ring freed late and at random."""
    config = preset("tiny").changed(query_groups=4)
    choice = random.Random(seed)
    packets = []
    for number in range(5):
        kind, tokens, width = choice.choice(KINDS), choice.randint(1, 40), choice.randint(1, 16)
        packets.append(packet(config, kind, tokens, width, number, masked=choice.random() < 0.5))
    trace = Bench(config, packets, hold=0.98, seed=seed).run()
    assert_timing(config, packets, trace)


ODD = {
    "beats": {"input_bytes": 2},
    "two": {"operand_bits": 16, "input_bytes": 16},
    "flat": {"rows": 2, "lanes": 16, "output_bytes": 4, "normaliser_lanes": 1},
    "steep": {"rows": 2, "lanes": 64, "block": 16, "max_width": 16, "output_bytes": 8, "lift_ports": 8},
    "ranks": {
        "max_frame_rank": 4, "metric_rank": 2, "block": 4, "lanes": 4, "max_width": 4, "rows": 4, "input_bytes": 4,
    },
    "short": {"max_tokens": 8, "rows": 8, "lanes": 16, "block": 8},
}  # fmt: skip
"""Shapes that no preset has: several beats an entry, 16 bits, fewer rows than segments, a width of R lanes, …"""


@cache
def odd(name: str) -> Config:
    return preset("tiny").changed(**ODD[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ODD)
def test_other_configurations(name: str, kind: str) -> None:
    """Memories and cycles, two jobs of odd shape in a row."""
    config = odd(name)
    shapes = ((min(19, config.max_tokens), config.max_width - 1), (1, 1))
    packets = [packet(config, kind, *shape, seed=3, masked=True) for shape in shapes]
    assert_timing(config, packets, Bench(config, packets).run())


@pytest.mark.parametrize("stall, hold, seed", [(0.5, 0.0, 0), (0.9, 0.5, 1), (0.1, 0.97, 2)])
def test_stalls(stall: float, hold: float, seed: int) -> None:
    """Nothing but time depends on pauses of the source and of the walker."""
    config = preset("tiny").changed(query_groups=4)
    choice = random.Random(seed)
    packets = []
    for number, kind in enumerate(("lift", "dot", "bias", "lift", "bias", "dot")):
        tokens, width = choice.randint(1, 30), choice.randint(1, 16)
        packets.append(packet(config, kind, tokens, width, number, masked=choice.random() < 0.5))
    Bench(config, packets, stall=stall, hold=hold, seed=seed).run()


def test_two_finished_jobs_wait() -> None:
    """What is there of a finished job stays there while the next one comes and ends, and a third one waits."""
    config = preset("tiny")
    shapes = (("bias", 20), ("dot", 5), ("lift", 30), ("dot", 9), ("dot", 1))
    packets = [packet(config, kind, tokens, 9, n) for n, (kind, tokens) in enumerate(shapes)]
    bench = Bench(config, packets, stall=0.1, seed=1)
    bench.late_release = True
    assert_timing_order(bench.run())


def assert_timing_order(trace: Trace) -> None:
    """A job is valid after the release of the one two before, which came after the job between was done."""
    for number, release in enumerate(trace.slot_releases[:-2]):
        assert trace.seen["done", number + 1] <= release < trace.seen["valid", number + 2]


def test_every_length_and_width() -> None:
    """All L of the first two blocks and all d, one short job after the other, with a mask every other time."""
    config = preset("tiny")
    packets = []
    for tokens in range(1, 2 * config.block + 1):
        width = 1 + tokens * 7 % config.max_width
        packets.append(packet(config, KINDS[tokens % 3], tokens, width, tokens, masked=bool(tokens & 1)))
    packets += [packet(config, "lift", 2, width, width) for width in range(1, config.max_width + 1)]
    Bench(config, packets, hold=0.3, seed=1).run()


def test_masks() -> None:
    """Rows of the block mask come back a cycle after their address; a job without one shows all ones."""
    config = preset("tiny")
    packets = [packet(config, "dot", 64, 3, 1, masked=True), packet(config, "dot", 40, 3, 2)]
    case = packets[0].case
    assert case is not None and case.mask is not None
    bench = Bench(config, packets)
    dut = bench.dut
    rows: dict[tuple[int, int], int] = {}

    async def watch(ctx: Any) -> None:
        for cycle in range(20_000):
            slot, row = cycle & 1, cycle // 2 % config.max_blocks
            ctx.set(dut.mask_slot, slot)
            ctx.set(dut.mask_row_index, row)
            valid = ctx.get(dut.job_valid) >> slot & 1
            await ctx.tick()
            if valid:
                rows[slot, row] = ctx.get(dut.mask_row)
            if len(rows) == 2 * config.max_blocks:
                return
        raise AssertionError("masks are not seen")

    bench.simulation.run(bench.drive, watch)
    for row in range(config.max_blocks):
        assert rows[0, row] == packed(case.mask[row].astype(int), 1)
        assert rows[1, row] == (1 << config.max_blocks) - 1


# ---- wrong input ---------------------------------------------------------------------------------------------------


def refused(config: Config, changes: dict[str, int], beats: int) -> Packet:
    """A packet of ``beats`` beats whose descriptor is wrong."""
    good = scaled_job(config, "lift", 5, 5).descriptor()
    data = pack_descriptor({**unpack_descriptor(good), **changes})
    error = descriptor_error(config, data)
    assert error.refuses
    whole = np.frombuffer(data, np.uint8)
    whole = np.pad(whole, (0, max(0, beats * config.input_bytes - len(whole))), constant_values=0xA5)
    return Packet(whole.reshape(-1, config.input_bytes), None, error)


FAULTS = {
    "magic": {"magic": 0x4455},
    "version": {"version": 2},
    "flag": {"flags": 0x13},
    "lift without bias": {"flags": 2},
    "no tokens": {"tokens": 0, "valid_length": 0},
    "tokens": {"tokens": 65, "valid_length": 1},
    "high tokens": {"tokens": 0x8001, "valid_length": 1},
    "no valid token": {"valid_length": 0},
    "valid length": {"valid_length": 6},
    "no width": {"width": 0},
    "width": {"width": 17},
    "score shift": {"score_shift": 16},
    "lift shift": {"lift_shift": 128},
    "bias shift": {"bias_shift": 32},
    "all": {"magic": 0, "version": 0, "tokens": 0, "width": 0, "score_shift": 255},
}


def test_refused_descriptors() -> None:
    """Each is answered, its beats are taken up to last, and the next job is as if nothing had been."""
    config = preset("tiny")
    packets = [packet(config, "bias", 9, 9, 1)]
    for number, changes in enumerate(FAULTS.values()):
        packets += [refused(config, changes, 8), refused(config, changes, 31)]
        packets.append(packet(config, KINDS[number % 3], 1 + number % 5, 1 + number % 9, number))
    packets.append(packet(config, "lift", 9, 9, 2))
    Bench(config, packets, stall=0.3, hold=0.5, seed=2).run()


@pytest.mark.parametrize("beats", [1, 3, 7, 8])
def test_cut_descriptor(beats: int) -> None:
    """A job that ends in its descriptor is answered alone."""
    config = preset("tiny")
    whole = packet(config, "lift", 9, 9, 1)
    assert descriptor_entries(config) == 8
    cut = Packet(whole.beats[:beats], None, ErrorCode.CUT)
    Bench(config, [whole, cut, packet(config, "dot", 9, 9, 2)], stall=0.2, seed=beats).run()


def zeroed(config: Config, case: Case, entries: int) -> Case:
    """The case as it is when all bytes from an entry on are 0."""
    beats = case.beats.copy()
    beats[entries * config.entry_beats :] = 0
    return operands_of(config, case.job, beats, case.seed)


def operands_of(config: Config, job: Job, beats: np.ndarray, seed: int) -> Case:
    """A case from the beats of a job without bias: operands are read back out of the stream."""
    case = Case(config, job, seed)
    probes = {}
    for name in ("queries", "keys", "values"):
        # Where does each number stand in the stream? Two bytes of its index find it.
        shape = (job.tokens, job.width)
        index = np.arange(np.prod(shape)).reshape(shape)
        places = []
        for digit in (index % 100, index // 100):
            operands = {key: np.zeros(shape, np.int64) for key in ("queries", "keys", "values")}
            operands[name] = digit + 1
            places.append(pack_job(config, job, **operands).reshape(-1).astype(int))
        where = (places[0] != 0) & (np.arange(len(places[0])) >= 64)
        number = (places[1][where] - 1) * 100 + places[0][where] - 1
        values = np.zeros(np.prod(shape), np.int64)
        values[number] = beats.reshape(-1).view(np.int8)[where]
        probes[name] = values.reshape(shape)
    for name, values in probes.items():
        setattr(case, name, values)
    case.row_operands, case.saturations = lift_queries(config, job, case.queries, None)
    return case


@pytest.mark.parametrize("cut", [0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("tokens, width", [(20, 9), (3, 16)])
def test_early_last(tokens: int, width: int, cut: float) -> None:
    """The rest of the operands is taken as 0, the fault is named, the next job is whole."""
    config = preset("tiny")
    whole = packet(config, "dot", tokens, width, 5)
    assert whole.case is not None
    taken = max(9, int(cut * len(whole.beats)))
    assert taken < len(whole.beats) == job_entries(config, whole.case.job)
    early = Packet(whole.beats[:taken], zeroed(config, whole.case, taken), ErrorCode.EARLY_LAST)
    Bench(config, [early, packet(config, "lift", 9, 9, 2), early, whole], stall=0.2, hold=0.2, seed=taken).run()


@pytest.mark.parametrize("kind", ["bias", "lift"])
@pytest.mark.parametrize("taken", [9, 10, 12, 30, 60])
def test_early_last_of_lift(kind: str, taken: int) -> None:
    """A job with factor batches that is cut gets to its end, and the next one is whole."""
    config = preset("tiny")
    whole = packet(config, kind, 9, 9, 5, masked=True)
    assert taken < len(whole.beats)
    bench = Bench(config, [Packet(whole.beats[:taken], whole.case, ErrorCode.EARLY_LAST, False), whole], seed=taken)
    check, first = bench._check, []

    def late_check(name: str, words: list[tuple[int, int]]) -> None:
        # What the cut job holds is not looked at.
        if ("done", 0) in bench.trace.seen:
            check(name, words)
            first.append(name)

    bench._check = late_check  # type: ignore[method-assign]
    bench.single = True
    bench.run()
    assert {"moving", "query", "bias"} <= set(first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extra", [1, 2, 40])
def test_late_last(kind: str, extra: int) -> None:
    """Operands are whole, beats up to last are dropped, the fault is named."""
    config = preset("tiny")
    good = packet(config, kind, 6, 9, 5)
    beats = np.concatenate([good.beats, np.full((extra, config.input_bytes), 0x5A, np.uint8)])
    late = Packet(beats, good.case, ErrorCode.LATE_LAST)
    Bench(config, [late, good, late, good], stall=0.3, hold=0.2, seed=extra).run()
