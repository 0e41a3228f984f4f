"""Small processors, jobs and runs that the tests of the whole tile share."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

import sim.bench
from dtp.attention import golden
from dtp.config import Config
from dtp.job import SHIFT_BITS, ErrorCode, Job, StatusRecord, output_beats
from dtp.quantise import Head, quantise
from dtp.units import Unit
from dtp.workload import Mode
from rtl.attention import AttentionTile
from rtl.emit import Emitted
from sim.bench import Backend, StreamJob, StreamResult, run_stream
from sim.bench.toolchain import default_cache_dir, find_toolchain
from tools.verbs import compare_outputs, emitted
from tools.workloads import random_workload

LINT = Path(sim.bench.__file__).parent / "lint.vlt"
TINY = Config.load("tiny")
CONFIGS = {
    "tiny": TINY,
    # Two segments, entries of two beats, the shortest look-ahead, narrow numbers.
    "narrow": TINY.changed(
        name="narrow", lanes=16, probability_bits=8, output_bits=8, lookahead=1, max_frame_rank=2, metric_rank=1,
        lift_ports=2, query_groups=8, output_slots=4, normaliser_lanes=2, lifted_bits=8, registered_memories=False,
    ),
    # Wide numbers, the largest frame, several lifted passes and key batches longer than a block's.
    "wide16": TINY.changed(
        name="wide16", rows=8, operand_bits=16, lifted_bits=16, probability_bits=16, lookahead=5, max_frame_rank=4,
        metric_rank=4, query_groups=8, input_bytes=16, output_bytes=4, normaliser_lanes=1, max_tokens=32,
    ),
    # One row group for two blocks of a mask row, odd look-ahead, beats of one byte.
    "bytes": TINY.changed(
        name="bytes", rows=2, block=4, lanes=4, max_width=8, lookahead=2, max_frame_rank=1, metric_rank=1,
        probability_bits=14, query_groups=4, input_bytes=1, output_bytes=2, normaliser_lanes=1, max_tokens=64,
    ),
}  # fmt: skip
"""Processors that are built with Verilator."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One job in words. ``kept`` is the chance of a block to be kept; None sends no mask."""

    tokens: int
    width: int
    mode: Mode = Mode.DOT
    causal: bool = False
    valid_length: int | None = None
    kept: float | None = None
    wild: bool = False

    def __str__(self) -> str:
        parts = [f"{self.tokens}x{self.width}", self.mode.value]
        parts += ["causal"] * self.causal + ["wild"] * self.wild
        parts += [f"valid{self.valid_length}"] if self.valid_length is not None else []
        parts += [f"kept{self.kept:g}"] if self.kept is not None else []
        return "-".join(parts)


def head_of(config: Config, shape: Shape, seed: int, tag: int = 0) -> Head:
    """A job of random operands: as the quantiser makes it, or ``wild``: any legal operand and scale at all."""
    rng = np.random.default_rng(seed)
    mask = None
    if shape.kept is not None:
        mask = rng.random((config.blocks(shape.tokens),) * 2) < shape.kept
    if shape.wild:
        head = _wild(config, shape, rng)
    else:
        rank = min(config.max_frame_rank, shape.width)
        head = quantise(
            config,
            random_workload(
                tokens=shape.tokens, width=shape.width, heads=1, mode=shape.mode, kept=1.0, causal=shape.causal,
                seed=seed, block=config.block, valid_length=shape.valid_length, frame_rank=rank,
                metric_rank=min(config.metric_rank, rank),
            ),
        )[0]  # fmt: skip
    return replace(head, job=replace(head.job, tag=tag, masked=mask is not None), block_mask=mask)


def _wild(config: Config, shape: Shape, rng: np.random.Generator) -> Head:
    high = 1 << (config.operand_bits - 1)
    lift, bias = shape.mode.is_metric, shape.mode is not Mode.DOT
    unsigned, signed = (0, 1 << 16), (-(1 << 15), 1 << 15)
    ranges = {
        "query_scale": unsigned, "metric_scale": signed, "lift_vector_scale": signed, "lift_metric_scale": signed,
        "lift_outer_scale": signed, "bias_scale": signed, "norm_scale": signed, "metric_norm_scale": signed,
        **{name: (0, 1 << bits) for name, bits in SHIFT_BITS.items()},
    }  # fmt: skip
    numbers = {name: int(rng.integers(*bounds)) for name, bounds in ranges.items()}
    job = Job(
        tokens=shape.tokens, valid_length=shape.valid_length or shape.tokens, width=shape.width, bias=bias, lift=lift,
        causal=shape.causal, **numbers,
    )  # fmt: skip
    queries, keys_, values = (rng.integers(-high, high, (shape.tokens, shape.width)) for _ in range(3))
    rank = config.max_frame_rank
    return Head(
        job=job,
        queries=queries,
        keys=keys_,
        values=values,
        factors=rng.integers(-high, high, (shape.tokens, rank, config.metric_rank)) if lift else None,
        bias=rng.integers(-(1 << 15), 1 << 15, shape.tokens) if bias else None,
        q_scale=1.0,
        k_scale=1.0,
        v_scale=1.0,
    )


def heads_of(config: Config, shapes: Sequence[Shape], seed: int) -> list[Head]:
    """Jobs with tags of their own."""
    return [
        head_of(config, shape, 100 * seed + n, tag=(0x101 * seed + n + 1) & 0xFFFF) for n, shape in enumerate(shapes)
    ]


def random_shapes(config: Config, count: int, seed: int, *, tokens: int) -> list[Shape]:
    """Shapes from all over a configuration's range, up to ``tokens``."""
    rng = np.random.default_rng(seed)
    modes = list(Mode)
    shapes = []
    for _ in range(count):
        length = int(rng.integers(1, min(tokens, config.max_tokens) + 1))
        shapes.append(
            Shape(
                tokens=length,
                width=int(rng.integers(1, config.max_width + 1)),
                mode=modes[int(rng.integers(len(modes)))],
                causal=bool(rng.integers(2)),
                valid_length=int(rng.integers(1, length + 1)) if rng.integers(2) else None,
                kept=float(rng.choice([0.2, 0.6, 1.0])) if rng.integers(2) else None,
            )
        )
    return shapes


@cache
def design_of(config: Config, unit: Unit = Unit.ATTENTION) -> Emitted:
    """The generated design of a configuration, made once a process."""
    made: Emitted = emitted(config, unit)  # the command's own, which keeps it too
    return made


@cache
def verilog_of(config: Config, unit: Unit = Unit.ATTENTION) -> Path:
    """Its Verilog in a file that lives as long as the process."""
    path = Path(_folder().name) / f"{config.hash}-{unit.value}" / "top.v"
    path.parent.mkdir()
    path.write_text(design_of(config, unit).verilog, encoding="utf-8")
    return path


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dtp-tests-")


def stream_of(config: Config, packets: Sequence[np.ndarray], heads: Sequence[Head], **conditions: object) -> StreamJob:
    """Input packets as one stream, ``last`` on the last beat of each; bounded by what the jobs could take at worst."""
    last = np.zeros(sum(len(packet) for packet in packets), dtype=np.bool_)
    last[np.cumsum([len(packet) for packet in packets]) - 1] = True
    steps = sum(
        config.groups(h.job.tokens) * config.blocks(h.job.tokens) * 8 * config.block * h.job.passes(config)
        + output_beats(config, h.job)
        for h in heads
    )
    work = 2000 + 4 * len(last) + 2 * steps
    slowest = max(float(conditions.get(name, 0.0)) for name in ("source_stall", "sink_stall"))  # type: ignore[arg-type]
    settings: dict[str, object] = {
        "packets": len(packets),
        "timeout_cycles": int(work * config.entry_beats / (1 - slowest) ** 2),
        **conditions,
    }
    return StreamJob(beats=np.concatenate(packets), last=last, **settings)  # type: ignore[arg-type]


def run_jobs(
    config: Config, heads: Sequence[Head], backend: Backend = Backend.BARE, **conditions: object
) -> StreamResult:
    """All jobs back to back; what the stream's rules and the number of outputs say is checked."""
    total = sum(output_beats(config, head.job) for head in heads)
    job = stream_of(config, [head.beats(config) for head in heads], heads, output_beats=total, **conditions)
    return run_job(config, job, backend)


def run_job(config: Config, job: StreamJob, backend: Backend = Backend.BARE, *, check: bool = True) -> StreamResult:
    """A stream through the hardware."""
    dut = AttentionTile(config) if backend is Backend.AMARANTH else verilog_of(config)
    return run_stream(dut, job, backend, check=check)


def check_jobs(config: Config, heads: Sequence[Head], result: StreamResult) -> None:
    """Every output, flag and status record is the golden model's, and none is missing."""
    differences, compared = compare_outputs(config, heads, [golden(config, head) for head in heads], result)
    assert differences == []
    assert compared == sum(head.job.tokens * head.job.width for head in heads)


def golden_status(config: Config, head: Head, error: ErrorCode = ErrorCode.NONE) -> StatusRecord:
    """The status record of a job."""
    result = golden(config, head)
    return StatusRecord(
        error=int(error),
        tag=head.job.tag,
        empty_rows=int(result.empty_rows.sum()),
        score_saturations=result.score_saturations,
        lift_saturations=result.lift_saturations,
        output_saturations=result.output_saturations,
    )


def packets_of(result: StreamResult) -> list[tuple[np.ndarray, np.ndarray]]:
    """Data and user of every packet."""
    ends = (np.flatnonzero(result.last) + 1).tolist()
    starts = [0, *ends[:-1]]
    return [(result.data[a:b], result.user[a:b]) for a, b in zip(starts, ends, strict=True)]


def lint(verilog: Path) -> str:
    """What Verilator finds in a Verilog file with every warning on; what ``lint.vlt`` explains is left out."""
    tools = find_toolchain()
    command = ["--lint-only", "-Wall", "--top-module", "top", str(LINT), str(verilog)]
    done = subprocess.run(
        [str(tools.verilator), *command],
        env=tools.environment(default_cache_dir()),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode != 0) == bool(done.stderr), done.returncode
    return done.stderr
