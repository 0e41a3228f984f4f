"""Gated attention as the tests drive it: runs, jobs and register accesses at chosen cycles, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dtp.attention import HeadResult
from dtp.config import Config
from dtp.gated import GateResult, Geometry, GoldenGate, gated_golden, gated_heads, quantise_geometry
from dtp.job import output_beats
from dtp.pruner import PrunerSettings
from dtp.quantise import Head, quantise
from dtp.registers import Response, gated_registers
from dtp.units import Unit
from dtp.workload import Workload
from sim.bench.channels import ChannelJob, ChannelResult, Sink, Source, run_channels
from tests.tile import verilog_of
from tools.gated import payloads, register_writes, stream_view
from tools.verbs import compare_outputs
from tools.workloads import random_workload

TINY = Config.load("tiny")
CONFIGS = {
    "tiny": TINY,
    "ecp5-85k": Config.load("ecp5-85k"),
    "pairs": TINY.changed(name="pairs", transport_vectors=2, transport_lanes=32, solve_lanes=2),
}
"""Engines that make the slots of a word one by one, and one that makes both at once."""
START = 64
"""First cycle in which a beat is offered: settings are written before it."""


def workload(config: Config, seed: int, *, tokens: int, heads: int, **more: Any) -> Workload:
    """Random heads with Cayley connections and a table of scores of their own."""
    options: dict[str, Any] = {"mode": "dot", "width": config.max_width, "kept": 1.0, "causal": False}
    options |= {"transport_rank": 2} | more
    made = random_workload(tokens=tokens, heads=heads, seed=seed, block=config.block, **options)
    blocks = config.blocks(tokens)
    table = np.random.default_rng(seed).integers(0, 1 << 16, (heads, blocks, blocks)).astype(np.uint16)
    return replace(made, scores=table, block=config.block)


@dataclass(frozen=True, eq=False)
class Gated:
    """A run and its jobs: what goes in, and what the golden models say."""

    config: Config
    geometry: Geometry
    settings: PrunerSettings
    gate: GateResult
    heads: tuple[Head, ...]
    plain: tuple[Head, ...]
    golden: tuple[HeadResult, ...]

    @classmethod
    def of(cls, config: Config, made: Workload, settings: PrunerSettings) -> Gated:
        geometry = quantise_geometry(config, made, settings.source)
        gate = GoldenGate(config).run(geometry, settings)
        plain = tuple(
            replace(head, job=replace(head.job, gated=True, tag=n + 1)) for n, head in enumerate(quantise(config, made))
        )
        return cls.over(config, geometry, settings, gate, plain)

    @classmethod
    def over(
        cls, config: Config, geometry: Geometry, settings: PrunerSettings, gate: GateResult, plain: tuple[Head, ...]
    ) -> Gated:
        """With the masks of ``gate``, whatever the geometry says."""
        heads = gated_heads(config, plain, gate)
        golden = tuple(gated_golden(config, h, skipped=bool(s)) for h, s in zip(heads, gate.skipped, strict=True))
        return cls(config, geometry, settings, gate, heads, plain, golden)


@dataclass(frozen=True)
class Access:
    """A register access: a write of ``word``, or a read without one, offered from ``cycle`` on."""

    address: int
    cycle: int
    word: int | None = None


def settings_of(config: Config, settings: PrunerSettings, cycle: int = 0) -> list[Access]:
    """Writes of a run's settings."""
    return [Access(address, cycle, word) for address, word in register_writes(config, settings)]


def drive(
    config: Config,
    *,
    runs: Sequence[tuple[np.ndarray, int]] = (),
    jobs: Sequence[tuple[Head, int]] = (),
    accesses: Sequence[Access] = (),
    beats: int | None = None,
    timeout: int = 60_000,
    aborted_jobs: Sequence[tuple[np.ndarray, int]] = (),
) -> ChannelResult:
    """Runs and jobs, each offered from a cycle on, through the Verilog; ``beats`` of output in all."""
    total = sum(output_beats(config, head.job) for head, _ in jobs) if beats is None else beats
    writes = [access for access in accesses if access.word is not None]
    reads = [access for access in accesses if access.word is None]
    packets = [*aborted_jobs, *((head.beats(config), cycle) for head, cycle in jobs)]

    def records(given: Sequence[tuple[np.ndarray, int]]) -> list[tuple[int, int]]:
        return [(payload, cycle) for packet, cycle in given for payload in payloads([packet])]

    job = ChannelJob(
        inputs={
            "s_axil_aw": Source([(access.address, access.cycle) for access in writes]),
            "s_axil_w": Source([(0xF << 32 | (access.word or 0), access.cycle) for access in writes]),
            "s_axil_ar": Source([(access.address, access.cycle) for access in reads]),
            "s_axis": Source(records(packets)),
            "s_axis_geometry": Source(records(runs)),
        },
        outputs={"s_axil_b": Sink(len(writes)), "s_axil_r": Sink(len(reads)), "m_axis": Sink(total)},
        timeout_cycles=timeout,
    )
    return run_channels(verilog_of(config, Unit.GATED), job)


def outputs_differ(
    config: Config, heads: Sequence[Head], golden: Sequence[HeadResult], result: ChannelResult
) -> list[str]:
    """One line for each difference between outputs and golden models."""
    return compare_outputs(config, heads, golden, stream_view(config, result))[0]


def registers_read(config: Config, accesses: Sequence[Access], result: ChannelResult) -> list[dict[str, int]]:
    """Fields of every register that was read, in order; every answer is OKAY."""
    described = gated_registers(config)
    shown = []
    reads = [access for access in accesses if access.word is None]
    for access, payload in zip(reads, result.outputs["s_axil_r"].payloads, strict=True):
        assert payload >> 32 == Response.OKAY
        register = described.at(access.address)
        assert register is not None
        shown.append(described.decode(register.name, payload & 0xFFFFFFFF))
    return shown


def register(config: Config, name: str) -> int:
    """Address of a register."""
    return gated_registers(config).register(name).address
