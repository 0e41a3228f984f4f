"""The loader in hardware: what it writes, what it says is there, when, and how it answers bad input."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from amaranth.sim import Simulator

from dtp.config import Config
from dtp.job import (
    ErrorCode,
    Job,
    address_bias,
    address_keys,
    address_lifted,
    address_query,
    address_values,
    job_entries,
    pack_descriptor,
    pack_job,
    unpack_descriptor,
)
from dtp.lift import lift_keys, lift_queries
from rtl.loader import Loader
from sim.cycles.loader import plan, run

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
        self.dut = Loader(config)

    def run(self) -> Trace:
        simulator = Simulator(self.dut)
        simulator.add_clock(1e-8)
        simulator.add_testbench(self._bench)
        simulator.run()
        return self.trace

    def _check(self, name: str, words: list[tuple[int, int]]) -> None:
        memory = self.memory[name]
        for address, word in words:
            assert memory.get(address, 0) == word, f"{name}[{address}] of cycle {self.cycle}"

    async def _bench(self, ctx: Any) -> None:
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
                    old = seen[slot]
                    follows = [old[0], old[1] + 1]
                    if follows[1] == entry_count[job]:
                        follows = [old[0] + 1, 0]
                    assert now == follows, f"{name} goes from {old} to {now}"
                    self.trace.seen[name, job, *old] = cycle
                    self._check("moving", words(slot, old[0])[old[1] : old[1] + 1])
                    if name == "k" and case.job.bias and old[1] == 0:
                        lifted, biases = case.lifted_words(slot, old[0])
                        self._check("lifted", lifted)
                        self._check("bias", biases)
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
            ctx.set(dut.release, int(frees))
            if frees:
                running[oldest] = None
                self.trace.slot_releases.append(cycle)
                answered += 1

            # Input.
            if position < len(feed) and (offered or self.random.random() >= self.stall):
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
    fields |= {"tag": 0x1234, "query_scale": 40_000, "score_shift": 3, "causal": bool(tokens & 1)}
    if kind != "dot":
        fields |= {"bias": True, "bias_scale": 300, "norm_scale": -11_000, "bias_shift": 7}
    if kind == "lift":
        fields |= {
            "lift": True, "metric_scale": 700, "lift_vector_scale": -9_000, "lift_metric_scale": -21_000,
            "lift_outer_scale": 30_000, "metric_norm_scale": -9_000, "key_vector_shift": 7, "key_outer_shift": 5,
            "key_metric_shift": 6, "lift_shift": 5,
        }  # fmt: skip
    return Job(**{**fields, **more})


def packet(config: Config, kind: str, tokens: int, width: int, seed: int = 0, **more: Any) -> Packet:
    case = Case(config, scaled_job(config, kind, tokens, width, **more), seed)
    return Packet(case.beats, case)


KINDS = ("dot", "bias", "lift")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens, width", [(1, 1), (8, 16), (21, 9), (64, 16)])
def test_memories_tiny(kind: str, tokens: int, width: int) -> None:
    config = preset("tiny")
    Bench(config, [packet(config, kind, tokens, width, seed=tokens)]).run()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name, tokens, width", [("ecp5-85k", 37, 23), ("wide", 83, 37)])
def test_memories_presets(kind: str, name: str, tokens: int, width: int) -> None:
    config = preset(name)
    Bench(config, [packet(config, kind, tokens, width, seed=7)]).run()


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
    "name, tokens, width", [("tiny", 37, 11), ("tiny", 8, 16), ("ecp5-85k", 37, 23), ("wide", 35, 37)]
)
def test_timing(kind: str, name: str, tokens: int, width: int) -> None:
    config = preset(name)
    packets = [packet(config, kind, tokens, width, seed=7, masked=bool(tokens & 1))]
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
