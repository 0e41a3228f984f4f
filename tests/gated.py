"""Gated attention as the tests run it: jobs and runs together, and everything that must come of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dtp.attention import HeadResult
from dtp.config import Config
from dtp.gated import GatedParams, GateResult, Geometry, GoldenGate, gated_golden, gated_heads, quantise_geometry
from dtp.job import output_beats
from dtp.pruner import PrunerSettings
from dtp.quantise import Head, quantise
from dtp.workload import Workload
from rtl.gated import GatedAttention
from rtl.geometry import SettingsLayout
from sim.bench.amaranth_stream import run_amaranth
from sim.bench.stream import StreamJob, StreamResult, xorshift32
from sim.cycles.attention import Prediction
from sim.cycles.gated import predict_gated
from tests.tile import packets_of
from tools.verbs import compare_outputs
from tools.workloads import random_workload


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
    """A run and its jobs: what goes in, what golden model and cycle model say."""

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
        heads = gated_heads(config, plain, gate)
        golden = tuple(gated_golden(config, h, skipped=bool(s)) for h, s in zip(heads, gate.skipped, strict=True))
        return cls(config, geometry, settings, gate, heads, plain, golden)

    def predict(self) -> Prediction:
        return predict_gated(self.config, self.heads, [(self.geometry.run, self.settings)])


@dataclass
class Bench:
    """The geometry side of a bench: settings, beats, and what the registers would show at the end."""

    dut: GatedAttention
    beats: np.ndarray
    last: np.ndarray
    settings: dict[str, int]
    stall: float = 0.0
    seed: int = 0
    clear_at: int | None = None
    status: dict[str, int] = field(default_factory=dict)
    taken: int = 0

    async def source(self, ctx: Any) -> None:
        for name, value in self.settings.items():
            ctx.set(getattr(self.dut.settings, name), value)
        state, port = (self.seed * 0x9E3779B1 + 1) & 0xFFFFFFFF or 1, self.dut.geometry
        for beat, last in zip(self.beats, self.last, strict=True):
            while (state := xorshift32(state)) & 0xFFFF < self.stall * 65536:
                ctx.set(port.valid, 0)
                await ctx.tick()
            ctx.set(port.payload.data, int.from_bytes(beat.tobytes(), "little"))
            ctx.set(port.payload.last, int(last))
            ctx.set(port.valid, 1)
            await ctx.tick().until(port.ready)
            self.taken += 1
        ctx.set(port.valid, 0)

    async def watch(self, ctx: Any) -> None:
        names = [name for name in self.dut.signature.members if name in STATUS]
        cycle = 0
        while True:
            values = await ctx.tick().sample(*(getattr(self.dut, name) for name in names))
            self.status = dict(zip(names, (int(value) for value in values[-len(names) :]), strict=True))
            cycle += 1
            ctx.set(self.dut.clear, cycle == self.clear_at)


STATUS = (
    "busy", "rows", "row_error", "error", "failed", "transport_error", "saturations", "field_error", "field_saturated",
    "pruner_error", "kept", "legal", "skipped", "heads",
)  # fmt: skip


def settings_of(gated: Gated, run: int = 0) -> dict[str, int]:
    """What the registers hold."""
    command = gated.geometry.run.command(gated.config, gated.settings, 0, run)
    return {name: int(getattr(command, name)) for name in SettingsLayout(GatedParams(gated.config).pruner).members}


def stream(packets: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Packets as one stream, and where each ends."""
    last = np.zeros(sum(len(packet) for packet in packets), dtype=np.bool_)
    last[np.cumsum([len(packet) for packet in packets]) - 1] = True
    return np.concatenate(packets), last


def run(
    gated: Gated,
    *,
    runs: Sequence[np.ndarray] | None = None,
    jobs: Sequence[Head] | None = None,
    stall: float = 0.0,
    seed: int = 0,
    clear_at: int | None = None,
    settings: dict[str, int] | None = None,
    check: bool = True,
    timeout: int | None = None,
    **conditions: Any,
) -> tuple[StreamResult, Bench]:
    """Jobs and runs through the hardware, on Amaranth's simulator."""
    config = gated.config
    dut = GatedAttention(config)
    jobs = gated.plain if jobs is None else jobs
    beats, last = stream([gated.geometry.beats(config)] if runs is None else runs)
    bench = Bench(
        dut, beats, last, settings_of(gated) if settings is None else settings, stall, seed + 100, clear_at
    )  # fmt: skip
    job_beats, job_last = stream([head.beats(config) for head in jobs])
    work = 3 * gated.predict().total_cycles + 4000 if timeout is None else timeout
    job = StreamJob(
        beats=job_beats, last=job_last, packets=len(jobs), timeout_cycles=int(work / (1 - stall) ** 2),
        output_beats=sum(output_beats(config, head.job) for head in jobs) if check else None,
        source_stall=stall, sink_stall=stall, seed=seed, **conditions,
    )  # fmt: skip
    result = run_amaranth(dut, job, beside=(bench.source, bench.watch))
    return result.check() if check else result, bench


def check(gated: Gated, result: StreamResult, bench: Bench) -> None:
    """Outputs, flags, status records and registers are the golden model's."""
    differences, compared = compare_outputs(gated.config, gated.heads, gated.golden, result)
    assert differences == []
    assert compared == sum(head.job.tokens * head.job.width for head in gated.heads)
    gate = gated.gate
    wanted = dict.fromkeys(STATUS, 0) | {
        "transport_error": int(gate.transport_error), "saturations": gate.saturations,
        "field_saturated": int(gate.field_saturated), "kept": gate.kept, "legal": gate.legal,
        "skipped": int(gate.skipped.sum()), "heads": len(gate.masks),
    }  # fmt: skip
    assert bench.status == wanted
    assert len(packets_of(result)) == len(gated.heads)


def check_cycles(gated: Gated, result: StreamResult) -> None:
    """Every output beat comes in the cycle that the model says."""
    assert result.first_input_cycle == 0
    assert result.cycles.tolist() == gated.predict().beat_cycles.tolist()
