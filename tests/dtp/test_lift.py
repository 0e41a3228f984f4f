"""Golden model of the lift against float64, its widths against every extreme, its programs against the pipeline."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from dtp.config import BIAS_BITS, PRESETS, REGISTER_BITS, Config
from dtp.errors import DtpError
from dtp.fixed import signed_range
from dtp.job import Job
from dtp.lift import (
    READ_CYCLE,
    Dump,
    Emit,
    Init,
    Instruction,
    LiftParams,
    Loop,
    Shift,
    lift_keys,
    lift_queries,
)

CONFIGS = {name: Config.load(name) for name in PRESETS}
CONFIGS["16 bits"] = CONFIGS["tiny"].changed(operand_bits=16, input_bytes=4)
CONFIGS["ranks"] = CONFIGS["wide"].changed(max_frame_rank=4, metric_rank=2, lift_ports=2)
CONFIGS["small block"] = CONFIGS["tiny"].changed(
    max_frame_rank=4, metric_rank=4, block=4, lanes=4, max_width=4, input_bytes=4
)


def lift_job(config: Config, tokens: int, width: int, **more: Any) -> Job:
    fields: dict[str, Any] = {
        "tokens": tokens, "valid_length": tokens, "width": width, "bias": True, "lift": True,
        "query_scale": 40_000, "metric_scale": 700, "lift_vector_scale": -9_000, "lift_metric_scale": -21_000,
        "lift_outer_scale": 30_000, "bias_scale": 300, "norm_scale": -11_000, "metric_norm_scale": -9_000,
        "key_vector_shift": 9, "key_outer_shift": 6, "key_metric_shift": 8, "bias_shift": 9,
    }  # fmt: skip
    return Job(**{**fields, **more})


def operands(config: Config, tokens: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    half = 1 << (config.operand_bits - 1)
    ranks = (tokens, config.max_frame_rank, config.metric_rank)
    return (
        rng.integers(-half, half, (tokens, width)),
        rng.integers(-half, half, ranks),
        rng.integers(-(1 << 15), 1 << 15, tokens),
    )


def triangle(matrix: np.ndarray) -> np.ndarray:
    rank = matrix.shape[-1]
    rows, columns = np.triu_indices(rank)
    return matrix[:, rows, columns]


# ---- against float64 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_queries_follow_the_formulas(name: str) -> None:
    """Row lanes are the real ones within the roundings that the contract allows, where nothing saturates."""
    config = CONFIGS[name]
    p, tokens, rank = LiftParams(config), 40, config.max_frame_rank
    width = config.max_width
    q, factors, _ = operands(config, tokens, width, 1)
    scale = 1.0 if config.operand_bits == 8 else 2.0**-8
    job = lift_job(config, tokens, width, query_scale=int(9000 * (1 if scale == 1 else 0.5)))
    got, _ = lift_queries(config, job, q, factors)
    assert got.shape == (tokens, job.passes(config) * config.block)

    metric_real = np.einsum("lir,ljr->lij", factors.astype(float), factors) / 2.0**p.metric_register_shift
    vector_real = np.einsum("lij,lj->li", metric_real, q[:, :rank]) / 2.0**p.vector_register_shift
    plain_real = q * float(job.query_scale)
    plain_real[:, :rank] += job.metric_scale * vector_real
    plain_real /= 2.0**p.query_shift
    a = q[:, :rank].astype(float)
    outer_real = np.einsum("li,lj->lij", a, a) / 2.0**p.outer_register_shift
    twice = triangle(2.0 - np.eye(rank)[None])
    lifted_real = (
        np.concatenate(
            [
                a * 2.0**p.vector_gain * job.lift_vector_scale,
                triangle(metric_real) * twice * job.lift_metric_scale,
                triangle(outer_real) * twice * job.lift_outer_scale,
            ],
            axis=1,
        )
        / 2.0**p.lifted_shift
    )
    # One rounding of the lane, and those of registers that it is made of, half a unit each.
    half_operand = float(1 << (config.operand_bits - 1))
    vector_slack = 0.5 + 0.5 * rank * half_operand / 2.0**p.vector_register_shift
    plain_slack = np.full(width, 0.5)
    plain_slack[:rank] += abs(job.metric_scale) * vector_slack / 2.0**p.query_shift
    lifted_slack = 0.5 + 32768 / 2.0**p.lifted_shift
    low, high = signed_range(config.row_bits)
    plain, lifted = got[:, :width], got[:, job.chunks(config) * config.block :]
    assert (np.abs(plain - np.clip(plain_real, low, high)) <= plain_slack + 1e-9).all()
    low, high = signed_range(config.lifted_row_bits)
    assert (np.abs(lifted[:, : lifted_real.shape[1]] - np.clip(lifted_real, low, high)) <= lifted_slack + 1e-9).all()
    assert not lifted[:, lifted_real.shape[1] :].any()
    assert (np.abs(plain) > 0).mean() > 0.9 and (np.abs(lifted[:, : lifted_real.shape[1]]) > 2).mean() > 0.5


@pytest.mark.parametrize("lift", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_keys_follow_the_formulas(name: str, lift: bool) -> None:
    """Key lanes and biases are the real ones within a unit of their registers and of their last place."""
    config = CONFIGS[name]
    p, tokens, rank = LiftParams(config), 40, config.max_frame_rank
    width = max(rank, config.max_width - 1)
    k, factors, bias = operands(config, tokens, width, 2)
    outer_shift = 6 if config.operand_bits == 8 else 22
    job = lift_job(config, tokens, width, lift=lift, key_outer_shift=outer_shift)
    lanes, beta, _ = lift_keys(config, job, k, factors if lift else None, bias)
    assert lanes.shape == (tokens, config.lifted_passes * config.block) and beta.shape == (tokens,)

    b = k[:, :rank].astype(float)
    metric = np.einsum("lir,ljr->lij", factors.astype(float), factors) / 2.0**p.metric_register_shift
    metric_b = np.einsum("lij,lj->li", metric, b) / 2.0**p.vector_register_shift
    n = (k.astype(float) ** 2).sum(1) / 2.0**p.norm_register_shift
    u = (b * metric_b).sum(1) / 2.0**p.metric_norm_register_shift
    half_operand = float(1 << (config.operand_bits - 1))
    vector_slack = 0.5 + 0.5 * rank * half_operand / 2.0**p.vector_register_shift
    beta_real = job.bias_scale * bias.astype(float) + job.norm_scale * n
    beta_slack = 0.5 * abs(job.norm_scale)
    if lift:
        beta_real += job.metric_norm_scale * u
        u_slack = 0.5 + rank * half_operand * vector_slack / 2.0**p.metric_norm_register_shift
        beta_slack += abs(job.metric_norm_scale) * u_slack
    low, high = signed_range(BIAS_BITS)
    assert (
        np.abs(beta - np.clip(beta_real / 2.0**job.bias_shift, low, high)) <= 0.5 + beta_slack / 2.0**job.bias_shift
    ).all()
    assert (np.abs(beta) > 1000).mean() > 0.9
    if not lift:
        assert not lanes.any()
        return
    real = np.concatenate(
        [
            metric_b / 2.0**job.key_vector_shift,
            triangle(np.einsum("li,lj->lij", b, b)) / 2.0**job.key_outer_shift,
            triangle(metric) / 2.0**job.key_metric_shift,
        ],
        axis=1,
    )
    slack = np.full(real.shape[1], 0.5)
    slack[:rank] += vector_slack / 2.0**job.key_vector_shift
    slack[-len(p.pairs) :] += 0.5 / 2.0**job.key_metric_shift
    low, high = signed_range(config.lifted_bits)
    assert (np.abs(lanes[:, : real.shape[1]] - np.clip(real, low, high)) <= slack + 1e-9).all()
    assert not lanes[:, real.shape[1] :].any()


def test_plain_queries() -> None:
    """Every 8-bit query under several scales: the scaling cannot overflow, saturates nothing, rounds half up."""
    config = CONFIGS["ecp5-85k"]
    p = LiftParams(config)
    queries = np.arange(-128, 128).reshape(-1, 1)
    for scale in (0, 1, 255, 32768, 40_000, 65535):
        job = Job(tokens=256, valid_length=256, width=1, query_scale=scale)
        got, saturations = lift_queries(config, job, queries, None)
        real = np.floor(queries * scale / 2.0**p.query_shift + 0.5)
        assert saturations == 0 and np.array_equal(got[:, :1], real.astype(int)) and not got[:, 1:].any()
        assert np.abs(got).max() <= 1 << (config.row_bits - 1)


def test_padding_cannot_saturate() -> None:
    """A token of zeros gives zeros: rows and keys past L count nothing."""
    config = CONFIGS["tiny"]
    job = lift_job(config, 3, 5)
    rows, row_saturations = lift_queries(config, job, np.zeros((3, 5), int), np.zeros((3, 3, 3), int))
    lanes, beta, key_saturations = lift_keys(config, job, np.zeros((3, 5), int), np.zeros((3, 3, 3), int), None)
    assert not rows.any() and not lanes.any() and not beta.any() and row_saturations == key_saturations == 0


def test_saturations_are_counted() -> None:
    """One token at the extremes, lane by lane."""
    config = CONFIGS["tiny"]
    x, factors = np.full((1, 3), -128), np.full((1, 3, 3), -128)
    job = lift_job(
        config, 1, 3, metric_scale=32767, key_vector_shift=0, key_outer_shift=0, key_metric_shift=0, bias_shift=0,
        norm_scale=0, metric_norm_scale=32767,
    )  # fmt: skip
    rows, count = lift_queries(config, job, x, factors)
    plain, lifted = rows[:, : config.block], rows[:, config.block :]
    edges = [(plain, signed_range(config.row_bits)), (lifted, signed_range(config.lifted_row_bits))]
    assert count == sum(int(((part == low) | (part == high)).sum()) for part, (low, high) in edges) > 3
    lanes, beta, count = lift_keys(config, job, x, factors, None)
    low, high = signed_range(config.lifted_bits)
    assert set(np.unique(lanes[0, :15])) <= {low, high} and count == 15 + 1
    assert beta[0] == signed_range(BIAS_BITS)[1]


def test_refused_shapes() -> None:
    config = CONFIGS["tiny"]
    job = lift_job(config, 3, 5)
    with pytest.raises(DtpError, match=r"^lift\.queries must be of shape \(3, 5\), not \(3, 4\)$"):
        lift_queries(config, job, np.zeros((3, 4), int), np.zeros((3, 3, 3), int))
    with pytest.raises(DtpError, match=r"^factors\.shape must be \(tokens 3, at most 3, at most 3\), not \(3, 3, 4\)$"):
        lift_keys(config, job, np.zeros((3, 5), int), np.zeros((3, 3, 4), int), None)


# ---- the machine ---------------------------------------------------------------------------------------------------


class Machine:
    """Executes a program one instruction after the other, with any stall before a take; checks widths and hazards."""

    def __init__(self, params: LiftParams, job: Job, words: list[np.ndarray], seed: int | None) -> None:
        self.params, self.job, self.words = params, job, list(words)
        self.stall = None if seed is None else np.random.default_rng(seed)
        lanes = params.config.lift_tokens
        self.registers = np.zeros((1 << params.register_bits, lanes), np.int64)
        self.accumulator = np.zeros(lanes, np.int64)
        self.cycle = 0
        self.emitted: list[tuple[Emit, np.ndarray]] = []
        self.held: dict[int, tuple[Dump, np.ndarray]] = {}
        self.bias: np.ndarray | None = None
        self.written = np.full(len(self.registers), -100)  # cycle in which a register was written
        self.read = np.full(len(self.registers), -100)
        self.port: set[int] = set()
        self.holds_busy_until = 0
        self.odd = 0

    def run(self, code: tuple[Instruction, ...], count: int) -> int:
        for instruction in code:
            if instruction.wait:
                self.cycle += instruction.cycles
            elif instruction.loop is Loop.WORDS:
                for _ in range(count):
                    self.step(instruction)
                self.cycle += count == 0
            else:
                self.step(instruction)
        return self.cycle

    def step(self, i: Instruction) -> None:
        p = self.params
        if i.take and self.stall is not None and self.stall.random() < 0.3:
            self.cycle += int(self.stall.integers(1, 9))
        if i.loop in (Loop.WORDS, Loop.FOREVER):
            i = replace(i, a=i.a ^ self.odd, dst=i.dst ^ self.odd, b=i.b ^ (0 if i.first else self.odd))
            self.odd ^= 1
        if i.take:
            self.write(i.dst, self.words.pop(0), self.cycle, np.ones(len(self.accumulator), bool))
        for source in (i.a, i.b):
            assert self.written[source] < self.cycle + READ_CYCLE, "read before it is written"
            self.read[source] = self.cycle + READ_CYCLE
        base = self.init(i.init) if i.first else self.accumulator
        self.accumulator = base + self.registers[i.a] * self.registers[i.b]
        low, high = signed_range(p.accumulator_bits)
        assert (self.accumulator >= low).all() and (self.accumulator <= high).all()
        at = self.cycle + p.result_cycles
        if i.write:
            segment = np.arange(len(self.accumulator)) // p.config.rows
            self.write(i.dst, self.accumulator >> p.register_shift(i.shift), at, (i.segments >> segment & 1) == 1)
        if i.emit:
            self.emitted.append((i.emit, self.accumulator >> (p.query_shift if i.emit == 1 else p.lifted_shift)))
        if i.hold:
            assert at >= self.holds_busy_until
            if i.dst % 4 == Dump.BIAS:
                self.bias = self.accumulator.copy()
            else:
                self.held[i.dst // 4] = (Dump(i.dst % 4), self.accumulator.copy())
        if i.dump:
            self.holds_busy_until = at + p.dump_steps
        self.cycle += 1

    def write(self, register: int, value: np.ndarray, cycle: int, lanes: np.ndarray) -> None:
        assert register != 0, "zero is never written"
        assert cycle not in self.port, "two writes in a cycle"
        self.port.add(cycle)
        low, high = signed_range(REGISTER_BITS)
        assert (value >= low).all() and (value <= high).all()
        assert self.read[register] != cycle, "written while it is read"
        self.written[register] = cycle
        self.registers[register, lanes] = value[lanes]

    def init(self, init: Init) -> int:
        if init.job_field is None:
            return self.params.init_value(init)
        return (int(getattr(self.job, init.job_field)) << init.twice) << self.params.metric_register_shift


EXTREMES = ("random", "low", "high", "mixed")


def extreme(kind: str, shape: tuple[int, ...], bits: int, rng: np.random.Generator) -> np.ndarray:
    low, high = signed_range(bits)
    if kind == "random":
        return rng.integers(low, high + 1, shape)
    return {"low": np.full(shape, low), "high": np.full(shape, high), "mixed": rng.choice([low, high], shape)}[kind]


@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("name", CONFIGS)
def test_programs(name: str, kind: str) -> None:
    """Programs give the golden lanes, at all extremes of operands and scales, with and without stalls of the input."""
    config = CONFIGS[name]
    p = LiftParams(config)
    rng = np.random.default_rng(11)
    scales = {
        "random": (700, -9000), "low": (-32768, -32768), "high": (32767, 32767), "mixed": (-32768, 32767)
    }[kind]  # fmt: skip
    for chunks, seed in product((1, config.max_chunks), (None, 1, 2)):
        width = chunks * config.block
        job = lift_job(
            config, config.rows, width, query_scale=65535, metric_scale=scales[0], lift_vector_scale=scales[1],
            lift_metric_scale=scales[0], lift_outer_scale=scales[1], bias_scale=scales[0], norm_scale=scales[1],
            metric_norm_scale=scales[0], bias_shift=11,
        )  # fmt: skip
        q = extreme(kind, (config.rows, width), config.operand_bits, rng)
        factors = extreme(kind, (config.rows, config.max_frame_rank, config.metric_rank), config.operand_bits, rng)
        everywhere = np.tile(np.arange(config.rows), config.segments)
        words = [q[everywhere, lane] for lane in range(config.max_frame_rank)]
        words += list(factors.reshape(config.rows, -1)[everywhere].T)
        for word in range(width // config.segments):
            lanes = word * config.segments + np.repeat(np.arange(config.segments), config.rows)
            words.append(q[everywhere, lanes])
        machine = Machine(p, job, words, seed)
        plain = p.programs["plain"].code
        machine.step(plain[0])
        machine.cycle += 1 + plain[1].cycles
        machine.run(p.programs["lift_constants"].code, 0)
        machine.run(p.programs["lift_queries"].code, width // config.segments - p.query_words)
        assert not machine.words
        want, _ = lift_queries(config, job, q, factors)
        assert len(machine.emitted) == want.shape[1] // config.segments
        for n, (emit, values) in enumerate(machine.emitted):
            assert emit == (Emit.PLAIN if n < width // config.segments else Emit.LIFTED)
            low, high = signed_range(config.row_bits if emit == Emit.PLAIN else config.lifted_row_bits)
            lanes = want[:, n * config.segments : (n + 1) * config.segments].T.reshape(-1)
            assert np.array_equal(np.clip(values, low, high), lanes)

        tokens = config.lift_tokens
        job = replace(job, tokens=tokens, valid_length=tokens)
        k = extreme(kind, (tokens, width), config.operand_bits, rng)
        factors = extreme(kind, (tokens, config.max_frame_rank, config.metric_rank), config.operand_bits, rng)
        bias = extreme(kind, (tokens,), 16, rng)
        for lift in (True, False):
            words = list(k.T) + (list(factors.reshape(tokens, -1).T) if lift else [])
            words += [bias] if config.operand_bits == 16 else [(bias & 255) - 128, bias >> 8]
            machine.words, machine.held = words, {}
            loop = width - (config.max_frame_rank if lift else 0)
            machine.cycle += 3
            end = machine.run(p.programs["lift_keys" if lift else "keys"].code, loop)
            assert not machine.words and end >= machine.holds_busy_until
            lanes, beta, _ = lift_keys(config, replace(job, lift=lift), k, factors if lift else None, bias)
            assert sorted(machine.held) == (list(range(config.lifted_lanes)) if lift else [])
            low, high = signed_range(config.lifted_bits)
            for lane, (dump, value) in machine.held.items():
                amount = getattr(job, f"key_{dump.name.lower()}_shift")
                assert np.array_equal(np.clip((value + (1 << amount >> 1)) >> amount, low, high), lanes[:, lane])
            assert machine.bias is not None
            rounded = (machine.bias + (1 << job.bias_shift >> 1)) >> job.bias_shift
            assert np.array_equal(np.clip(rounded, *signed_range(BIAS_BITS)), beta)


@pytest.mark.parametrize("name", CONFIGS)
def test_encoding(name: str) -> None:
    """Every field of every instruction fits, and instructions that differ have words that differ."""
    params = LiftParams(CONFIGS[name])
    widths = params.layout
    words = {params.encode(i) for i in params.code}
    kept = set()
    for i in params.code:
        fields = [int(getattr(i, n)) & ((1 << w) - 1) for n, w in widths.items()]
        kept.add((*fields, int(i.shift) if i.write else 0))
        assert all(0 <= int(getattr(i, n)) < 1 << w for n, w in widths.items() if n != "segments")
    assert len(words) == len(kept)
    starts = {p.name: p.start for p in params.programs.values()}
    for program in params.programs.values():
        assert tuple(params.code[program.start : program.start + len(program.code)]) == program.code
    assert starts["plain"] == 0


@pytest.mark.parametrize("name", PRESETS)
def test_program_fits_one_memory(name: str) -> None:
    assert len(LiftParams(CONFIGS[name]).code) <= 512


def test_program_word_fits_one_block_memory() -> None:
    """36 bits, the width of one block memory of the ECP5."""
    assert sum(LiftParams(CONFIGS["ecp5-85k"]).layout.values()) <= 36


@pytest.mark.parametrize("name", CONFIGS)
def test_shifts_are_the_smallest(name: str) -> None:
    """One place less would overflow a register."""
    config = CONFIGS[name]
    p = LiftParams(config)
    half, most = 1 << (config.operand_bits - 1), 1 << (REGISTER_BITS - 1)
    metric = config.metric_rank * half * half
    norm = config.max_width * half * half
    for shift, sums in ((Shift.METRIC, metric), (Shift.NORM, norm)):
        amount = p.register_shift(shift)
        assert (sums + (1 << amount >> 1)) >> amount < most
        assert amount == 0 or (sums + (1 << (amount - 1) >> 1)) >> (amount - 1) >= most
