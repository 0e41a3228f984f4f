"""Gated attention as a verb: the policy of a gate, both models of a run, and the generated Verilog beside them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dtp.attention import golden
from dtp.config import Config
from dtp.errors import must
from dtp.gated import (
    GatedParams,
    GateResult,
    Geometry,
    GoldenGate,
    gated_golden,
    gated_heads,
    holonomy_scores,
    quantise_geometry,
    threshold_for,
)
from dtp.pruner import SCORE_BITS, WEIGHT_BITS, Band, Gate, PrunerSettings, Source, blend, legal_blocks
from dtp.quantise import Head, quantise
from dtp.registers import Response, gated_registers
from dtp.solve import TransportError
from dtp.units import Unit
from dtp.workload import Workload
from tools import verbs
from tools.units import run_unit
from tools.verbs import ConfigLike, CosimResult, Models, Progress, SimulateResult, WorkloadLike

__all__ = [
    "GateFigures", "GatePolicy", "GatedCosimResult", "GatedModels", "GatedSimulateResult", "cosim_gated",
    "gated_models", "simulate_gated",
]  # fmt: skip

START_CYCLE = 64
"""First cycle in which a beat is offered: the registers are written before it."""
_LARGEST = (1 << SCORE_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class GatePolicy:
    """What a person says of a gate; at most one of ``kept``, ``theta`` and ``budget``, none for open gates.

    Parameters
    ----------
    source: where scores come from
    weight: of holonomy beside a table, in 1/16; None for a half
    kept: fraction of the legal blocks that one threshold for all heads keeps, as nearly as it can
    theta: threshold, raw u2f14
    budget: blocks kept in a row
    band: smallest and largest mean score of a head that is not skipped, raw u2f14
    seed: of the probes, where the workload has none
    """

    source: Source = Source.HOLONOMY
    weight: int | None = None
    kept: float | None = None
    theta: int | None = None
    budget: int | None = None
    band: tuple[int, int] | None = None
    seed: int = 0

    def settings(self, config: Config, geometry: Geometry) -> PrunerSettings:
        """The pruner's settings for a run.

        Raises
        ------
        DtpError: more than one way to choose, or a value that the pruner refuses.
        """
        for name, value, low, high in (
            ("theta", self.theta, 0, _LARGEST), ("budget", self.budget, 1, GatedParams(config).max_blocks),
        ):  # fmt: skip
            if value is not None and not low <= value <= high:
                raise must("GatePolicy", name, f"in {low}…{high}", value)
        if self.kept is not None and not 0 < self.kept <= 1:
            raise must("GatePolicy", "kept", "more than 0 and at most 1", self.kept)
        chosen = [name for name in ("kept", "theta", "budget") if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise must("GatePolicy", chosen[0], f"absent where {chosen[1]} is given", getattr(self, chosen[0]))
        settings = PrunerSettings.open(self.source)
        if self.weight is not None:
            settings = settings.changed(weight=self.weight)
        if self.kept is not None:
            run = geometry.run
            legal = legal_blocks(run.blocks(config), run.blocks(config), causal=run.causal)
            theta = threshold_for(self._scores(config, geometry), legal, self.kept)
            settings = settings.changed(theta_low=theta, theta_high=theta)
        elif self.theta is not None:
            settings = settings.changed(theta_low=self.theta, theta_high=self.theta)
        elif self.budget is not None:
            settings = settings.changed(gate=Gate.BUDGET, theta_low=0, theta_high=0, budget=self.budget)
        if self.band is not None:
            settings = settings.changed(band=Band.MEAN, band_low=self.band[0], band_high=self.band[1])
        return settings

    def _scores(self, config: Config, geometry: Geometry) -> Any:
        """What the pruner gates by, (H, blocks, blocks)."""
        if self.source is Source.TABLE:
            return geometry.scores
        field, _, _ = holonomy_scores(config, geometry)
        if geometry.scores is None:
            return field
        weight = PrunerSettings.open(self.source).weight if self.weight is None else self.weight
        return blend(geometry.scores, field, weight, WEIGHT_BITS)


@dataclass(frozen=True, eq=False)
class GatedModels:
    """A run, its gate, and both models of the attention over what is kept.

    Parameters
    ----------
    geometry, settings, gate: the run, what the registers hold, what comes of it
    plain: jobs as they are sent
    models: those of the kept blocks, as of an attention with that block mask
    cycles_dense: of the same jobs without a gate
    output_error: ‖o − o_dense‖ ÷ ‖o_dense‖ of all outputs
    """

    geometry: Geometry
    settings: PrunerSettings
    gate: GateResult
    plain: tuple[Head, ...]
    models: Models
    cycles_dense: int
    output_error: float

    def figures(self) -> dict[str, Any]:
        """Fields of :class:`GateFigures`."""
        gate = self.gate
        return {
            "source": self.settings.source.name.lower(),
            "kept_blocks": gate.kept,
            "legal_blocks": gate.legal,
            "skipped_heads": int(gate.skipped.sum()),
            "kept_fraction": gate.kept_fraction,
            "cycles_dense": self.cycles_dense,
            "cycles_ratio": int(self.models.prediction.total_cycles) / self.cycles_dense,
            "output_error": self.output_error,
            "transport_errors": tuple(str(flag.name).lower() for flag in TransportError if flag & gate.transport_error),
            "transport_saturations": gate.saturations,
            "field_saturated": gate.field_saturated,
            "remarks": self._remarks(),
        }

    def _remarks(self) -> tuple[str, ...]:
        """What of the gate's scores a user would not expect."""
        gate, remarks = self.gate, []
        if TransportError.RANGE & gate.transport_error:
            remarks.append("words of a transport left their range: the scores are not exact; take weaker transports")
        if TransportError.PIVOT & gate.transport_error:
            remarks.append("a solve of a transport had no pivot: the scores of its tokens mean nothing")
        if gate.field_saturated:
            remarks.append("a score reached its limit")
        if gate.holonomy is not None and (gate.holonomy == gate.holonomy.flat[0]).all():
            remarks.append("all scores of holonomy are equal, so that they cannot tell blocks apart")
        return tuple(remarks)


@dataclass(frozen=True, kw_only=True)
class GateFigures:
    """What a gate did.

    Parameters
    ----------
    source: where scores came from
    kept_blocks, legal_blocks, skipped_heads: of all heads
    kept_fraction: kept ÷ legal
    cycles_dense: cycle model of the same jobs without a gate
    cycles_ratio: cycles of the model ÷ ``cycles_dense``
    output_error: ‖o − o_dense‖ ÷ ‖o_dense‖ of all outputs
    transport_errors, transport_saturations: of the transport engine: names of its flags, saturated lanes
    field_saturated: a score of holonomy reached its limit
    remarks: a line for each of these, and for scores that are all equal
    """

    source: str
    kept_blocks: int
    legal_blocks: int
    skipped_heads: int
    kept_fraction: float
    cycles_dense: int
    cycles_ratio: float
    output_error: float
    transport_errors: tuple[str, ...]
    transport_saturations: int
    field_saturated: bool
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GatedSimulateResult(SimulateResult, GateFigures):
    """Golden model and cycle model of gated attention; ``workload`` has the kept blocks as its mask."""


@dataclass(frozen=True, kw_only=True)
class GatedCosimResult(CosimResult, GateFigures):
    """The generated Verilog of the gated top beside both models."""


def gated_models(
    config: Config, workload: Workload, policy: GatePolicy, *, reference: bool = False, progress: Progress = verbs.quiet
) -> GatedModels:
    """Golden model and cycle model of gated attention: outputs, masks, scores and cycles.

    Raises
    ------
    DtpError: a workload or a policy that the unit refuses.
    """
    from sim.cycles.attention import predict
    from sim.cycles.gated import predict_gated

    progress("quantising", None)
    dense = quantise(config, workload)
    geometry = quantise_geometry(config, workload, policy.source, seed=policy.seed)
    progress("golden model of the gate", None)
    settings = policy.settings(config, geometry)
    gate = GoldenGate(config).run(geometry, settings)
    plain = tuple(replace(head, job=replace(head.job, gated=True)) for head in dense)
    heads = gated_heads(config, plain, gate)
    results, before = [], []
    for number, head in enumerate(heads):
        progress("golden model", number / len(heads))
        results.append(gated_golden(config, head, skipped=bool(gate.skipped[number])))
        before.append(golden(config, dense[number]))
    progress("cycle model", None)
    begin = time.monotonic()
    prediction = predict_gated(config, heads, [(geometry.run, settings)])
    wall_s = time.monotonic() - begin
    masks = np.stack([np.asarray(head.block_mask) for head in heads])
    masked = replace(workload, block_mask=masks, block=config.block, allow_empty_rows=True)
    models = verbs.models_of(config, masked, heads, results, prediction, wall_s, reference, progress)
    exact = np.stack([result.outputs_real for result in before])
    error = np.stack([result.outputs_real for result in results]) - exact
    return GatedModels(
        geometry=geometry,
        settings=settings,
        gate=gate,
        plain=plain,
        models=models,
        cycles_dense=int(predict(config, dense).total_cycles),
        output_error=float(np.linalg.norm(error) / max(np.linalg.norm(exact), np.finfo(float).tiny)),
    )


def simulate_gated(
    config: ConfigLike,
    workload: WorkloadLike,
    policy: GatePolicy,
    *,
    reference: bool = True,
    progress: Progress = verbs.quiet,
) -> GatedSimulateResult:
    """Golden model and cycle model of gated attention, as :func:`tools.verbs.simulate`."""
    start = time.monotonic()
    config, workload = verbs.as_config(config), verbs.as_workload(workload)
    found = gated_models(config, workload, policy, reference=reference, progress=progress)
    return GatedSimulateResult(**found.models.fields, **found.figures(), wall_s=time.monotonic() - start)


def cosim_gated(
    config: ConfigLike,
    workload: WorkloadLike,
    policy: GatePolicy,
    *,
    waves: str | Path | None = None,
    stalls: float = 0.0,
    seed: int = 0,
    reference: bool = True,
    cache_dir: Path | None = None,
    progress: Progress = verbs.quiet,
) -> GatedCosimResult:
    """Both models and the generated Verilog of the gated top, run by cocotb on Verilator.

    Registers are written before the first beat and read after the last. Parameters and errors are those of
    :func:`tools.verbs.cosim`; ``stalls`` hold of every channel.
    """
    start = time.monotonic()
    config, workload = verbs.as_config(config), verbs.as_workload(workload)
    verbs.check_conditions(waves, stalls, seed)
    found = gated_models(config, workload, policy, reference=reference, progress=progress)
    models = found.models
    job = gated_job(config, found, stalls=stalls, seed=seed)
    total = int(models.prediction.total_cycles)
    result = run_unit(config, Unit.GATED, job, total, waves=waves, cache_dir=cache_dir, progress=progress)
    registers = compare_registers(config, found, result)
    fields = verbs.cosim_fields(
        models, result, stream_view(config, result), registers, waves=waves, stalls=stalls, seed=seed
    )
    return GatedCosimResult(**fields, **found.figures(), wall_s=time.monotonic() - start)


# ---- the run in the simulator --------------------------------------------------------------------------------------


def register_writes(config: Config, settings: PrunerSettings) -> list[tuple[int, int]]:
    """Address and word of every register that a run's settings need."""
    described = gated_registers(config)
    words = {
        "scores": {
            "weight": settings.weight, "fresh": 1, "maximum": 0, "step": settings.step(0),
        },
        "gate": {"gate": int(settings.gate), "band": int(settings.band)},
        "theta": {"low": settings.theta_low, "high": settings.theta_high},
        "budget": {"budget": settings.budget},
        "band": {"low": settings.band_low, "high": settings.band_high},
    }  # fmt: skip
    return [(described.register(name).address, described.encode(name, **values)) for name, values in words.items()]


READ_BACK = ("status", "error", "kept", "legal", "skipped", "heads", "saturations")
"""Registers that are read after a run."""


def gated_job(config: Config, found: GatedModels, *, stalls: float, seed: int) -> Any:
    """Everything that goes into the gated top, as a :class:`~sim.bench.channels.ChannelJob`."""
    from dtp.job import output_beats
    from sim.bench.channels import ChannelJob, Sink, Source

    described = gated_registers(config)
    writes = register_writes(config, found.settings)
    bound = int((3 * found.models.prediction.total_cycles + 4000) / (1 - stalls) ** 3)
    reads = [(described.register(name).address, bound) for name in READ_BACK]
    jobs = payloads([head.beats(config) for head in found.plain])
    runs = payloads([found.geometry.beats(config)])
    total = sum(output_beats(config, head.job) for head in found.plain)
    return ChannelJob(
        inputs={
            "s_axil_aw": Source.of([address for address, _ in writes]),
            "s_axil_w": Source.of([word | 0xF << 32 for _, word in writes]),
            "s_axil_ar": Source(reads),
            "s_axis": Source.of(jobs, from_cycle=START_CYCLE, stall=stalls),
            "s_axis_geometry": Source.of(runs, from_cycle=START_CYCLE, stall=stalls),
        },
        outputs={
            "s_axil_b": Sink(len(writes), stalls / 2),
            "s_axil_r": Sink(len(reads), stalls),
            "m_axis": Sink(total, stalls),
        },
        timeout_cycles=2 * bound + 1000,
        seed=seed,
    )


def payloads(packets: Sequence[Any]) -> list[int]:
    """Beats of packets as payloads of a channel, tlast above tdata."""
    return [
        int.from_bytes(beat.tobytes(), "little") | (number == len(packet) - 1) << 8 * packet.shape[1]
        for packet in packets
        for number, beat in enumerate(packet)
    ]


def stream_view(config: Config, result: Any) -> Any:
    """The output stream as a :class:`~sim.bench.StreamResult` shows it: data, user, last, cycles, first_input_cycle."""
    got = result.outputs["m_axis"]
    size = config.output_bytes
    mask = (1 << 8 * size) - 1
    data = b"".join((payload & mask).to_bytes(size, "little") for payload in got.payloads)
    tags = [payload >> 8 * size for payload in got.payloads]
    taken = result.inputs["s_axis"]
    return SimpleNamespace(
        data=np.frombuffer(data, dtype=np.uint8).reshape(-1, size),
        user=np.array([tag & ((1 << config.rows) - 1) for tag in tags], dtype=np.uint64),
        last=np.array([tag >> config.rows for tag in tags], dtype=np.bool_),
        cycles=got.cycles,
        first_input_cycle=int(taken[0]) if len(taken) else None,
    )


def compare_registers(config: Config, found: GatedModels, result: Any) -> list[str]:
    """One line for each register that does not hold what the golden model says."""
    gate = found.gate
    described = gated_registers(config)
    codes = [int(code) for code in gate.errors if code]
    wanted = {
        "status": {"busy": 0, "rows": 0},
        "error": {
            "geometry": 0, "transport": int(gate.transport_error), "field": 0, "pruner": codes[0] if codes else 0,
            "rows": 0, "saturated": int(gate.field_saturated),
        },
        "kept": {"count": gate.kept}, "legal": {"count": gate.legal}, "skipped": {"count": int(gate.skipped.sum())},
        "heads": {"count": len(gate.masks)}, "saturations": {"count": gate.saturations},
    }  # fmt: skip
    wanted["status"]["failed"] = int(any(wanted["error"].values()))
    lines = []
    for name, payload in zip(READ_BACK, result.outputs["s_axil_r"].payloads, strict=False):
        word, response = payload & 0xFFFFFFFF, payload >> 32
        if response != Response.OKAY:
            lines.append(f"register {name}: answer {response}")
        shown = described.decode(name, word)
        lines += [
            f"register {name}: {field} is {shown[field]} in RTL, {value} in golden"
            for field, value in wanted[name].items()
            if shown[field] != value
        ]
    answers = result.outputs["s_axil_b"].payloads
    return lines + [f"register write {n}: answer {code}" for n, code in enumerate(answers) if code]
