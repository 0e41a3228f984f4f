"""The commutator of a layer as a verb: energies by the golden model, cycles, and the generated Verilog beside both."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtp.attention import golden as attention_golden
from dtp.commutator import CommutatorMode, CommutatorResult, Kernel, Layer, golden, quantise
from dtp.config import BIAS_BITS, Config
from dtp.difference import RATIO_FRACTION_BITS
from dtp.errors import must
from dtp.fixed import Int
from dtp.kernel import Executed, Step, StepKind, after_attention, before_attention, execute, with_waits
from dtp.matrix import bias_words, padded, weight_entries, words
from dtp.units import Unit
from tools import verbs
from tools.units import UnitComparison, compared, late, packer, run_unit, unequal, with_last
from tools.verbs import ConfigLike, Progress, Result, WorkloadLike, WorkloadSummary

__all__ = [
    "CommutatorCosimResult", "CommutatorModels", "CommutatorSimulateResult", "Part", "commutator_models",
    "cosim_commutator", "group_rows", "interleaved", "part_channels", "simulate_commutator", "step_values",
]  # fmt: skip


# ---- results -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CommutatorSimulateResult(Result):
    """Golden model and cycle model of the commutator of a layer (docs/commutator.md).

    Parameters
    ----------
    mode: frozen or full
    ratio: Σ‖Δ_i‖² ÷ Σ‖Attn(h + Res(h))_i‖² over the tokens before the padding, infinite where only Δ is not 0;
        head_ratios: the same of each head, without the output's bias
    token_ratios: of each of these tokens, in the hardware's u2f14
    saturations: elements saturated in matrices, sums and LayerNorms, those of the heads' energies included
    cycles_before, cycles_walk, cycles_after: of the program before attention, of the tile at h + Res(h), of the program
        after attention; array_cycles_layer, array_cycles_extra: array steps of the layer itself, and of what Δ adds
    ratio_reference, head_ratios_reference, delta_error: ``ratio``, ``head_ratios`` and ‖Δ − Δ_exact‖ ÷ ‖Δ_exact‖ by
        PyTorch float64, with the LayerNorms' ε; None without PyTorch
    note: why there is no reference, None when there is
    """

    config: str
    config_hash: str
    workload: WorkloadSummary
    mode: str
    ratio: float
    head_ratios: tuple[float, ...]
    token_ratios: tuple[float, ...]
    saturations: int
    cycles_before: int
    cycles_walk: int
    cycles_after: int
    array_cycles_layer: int
    array_cycles_extra: int
    ratio_reference: float | None
    head_ratios_reference: tuple[float, ...] | None
    delta_error: float | None
    note: str | None


@dataclass(frozen=True, kw_only=True)
class CommutatorCosimResult(CommutatorSimulateResult, UnitComparison):
    """The generated Verilog of commutator and tile beside both models.

    There are four runs: the program before attention, the tile at h + Res(h) and at h, the program after attention, and
    that of the heads. ``cycles_rtl`` is the sum of their cycles, ``cycles_runs`` the model's.
    """

    cycles_runs: int


# ---- models ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """A program of the kernel with its input, and what both models say.

    Parameters
    ----------
    loads: (rows, width) of each LOAD in order
    wanted: golden
    """

    kernel: Kernel
    program: list[Step]
    loads: list[Int]
    wanted: Executed

    @classmethod
    def of(cls, kernel: Kernel, program: Sequence[Step], loads: Sequence[Int]) -> Part:
        """With the golden model run."""
        return cls(kernel, list(program), list(loads), execute(kernel, program, loads))

    def timing(self, start: int = 0) -> Any:
        """:class:`sim.cycles.commutator.ProgramTiming`."""
        from sim.cycles.commutator import program_timing

        return program_timing(self.kernel.config, self.program, self.wanted.variances, start=start)


def group_rows(kernel: Kernel, state: Int) -> list[Int]:
    """A state (L, width) by row groups, the last one padded."""
    rows = kernel.config.rows
    whole = padded(state, kernel.config.groups(len(state)) * rows, state.shape[1])
    return [whole[n : n + rows] for n in range(0, len(whole), rows)]


def interleaved(program: Sequence[Step], loads: Sequence[Sequence[Int]]) -> list[Int]:
    """Loads of each group in the order of the program; ``loads`` are the tensors a group loads one after the other."""
    turn: dict[int, int] = {}
    result = []
    for step in program:
        if step.kind is StepKind.LOAD:
            result.append(loads[turn.get(step.group, 0)][step.group])
            turn[step.group] = turn.get(step.group, 0) + 1
    return result


@dataclass(frozen=True, eq=False)
class CommutatorModels:
    """A layer's kernel, what it gives, and the programs that give it.

    Members
    -------
    before, after: attention; heads: the energies of each head, one program for all, made when it is asked for
    """

    kernel: Kernel
    mode: CommutatorMode
    result: CommutatorResult
    before: Part
    after: Part

    @cached_property
    def heads(self) -> Part:
        config, layer = self.kernel.config, self.kernel.layer
        outputs = [group_rows(self.kernel, state) for state in self.result.outputs]
        programs, loads = [], []
        width = layer.inner // layer.heads
        for head in range(layer.heads):
            own = after_attention(self.kernel, config.groups(layer.tokens), head=head)
            lanes = slice(head * width, (head + 1) * width)
            programs += own
            loads += interleaved(own, [[rows[:, lanes] for rows in state] for state in outputs])
        return Part.of(self.kernel, with_waits(programs), loads)


def commutator_models(
    config: Config, layer: Layer, mode: CommutatorMode, *, progress: Progress = verbs.quiet
) -> CommutatorModels:
    """Golden model of a layer's commutator, as a whole and by its programs.

    Raises
    ------
    DtpError: a layer that does not fit the configuration.
    """
    progress("quantising", None)
    kernel = quantise(config, layer)
    progress("golden model", None)
    result = golden(kernel, mode, per_head=True)
    groups = config.groups(layer.tokens)
    outputs = [group_rows(kernel, state) for state in result.outputs]
    before, after = before_attention(kernel, mode, groups), after_attention(kernel, groups)
    return CommutatorModels(
        kernel,
        mode,
        result,
        before=Part.of(kernel, before, interleaved(before, [group_rows(kernel, kernel.hidden)])),
        after=Part.of(kernel, after, interleaved(after, outputs)),
    )


def simulate_commutator(
    config: ConfigLike,
    workload: WorkloadLike,
    mode: CommutatorMode | str = CommutatorMode.FULL,
    *,
    reference: bool = True,
    progress: Progress = verbs.quiet,
) -> CommutatorSimulateResult:
    """Golden model and cycle model of the commutator of a workload's layer.

    Raises
    ------
    DtpError: another mode, a workload without a layer, or one that does not fit the configuration.
    """
    start = time.monotonic()
    config, workload, mode = verbs.as_config(config), verbs.as_workload(workload), _as_mode(mode)
    layer = Layer.of(workload)
    models = commutator_models(config, layer, mode, progress=progress)
    figures = _figures(models, layer, WorkloadSummary.of(workload), reference, progress)
    return CommutatorSimulateResult(**figures, wall_s=time.monotonic() - start)


def _as_mode(mode: CommutatorMode | str) -> CommutatorMode:
    try:
        return CommutatorMode(mode)
    except ValueError:
        raise must("commutator", "mode", f"one of {', '.join(CommutatorMode)}", mode) from None


def _figures(
    models: CommutatorModels, layer: Layer, summary: WorkloadSummary, reference: bool, progress: Progress
) -> dict[str, Any]:
    from sim.cycles.attention import predict
    from sim.cycles.commutator import LayerShape, array_cycles, extra_passes, plain_passes

    config, result = models.kernel.config, models.result
    progress("cycle model", None)
    width = layer.inner // layer.heads
    shape = LayerShape(layer.tokens, layer.model, layer.heads, width, layer.mlp, lifted=layer.mode.is_metric)
    assert result.heads is not None
    valid = slice(layer.valid)
    figures: dict[str, Any] = {
        "config": config.name,
        "config_hash": config.hash,
        "workload": summary,
        "mode": models.mode.value,
        "ratio": _ratio(result.energies.difference[valid], result.energies.reference[valid]),
        "head_ratios": tuple(
            _ratio(difference[valid], reference[valid])
            for difference, reference in zip(result.heads.difference, result.heads.reference, strict=True)
        ),
        "token_ratios": tuple((result.energies.ratio[valid] * 2.0**-RATIO_FRACTION_BITS).tolist()),
        "saturations": result.saturations,
        "cycles_before": int(models.before.timing().outputs[-1]) + 1,
        "cycles_walk": int(predict(config, result.walks[0]).total_cycles),
        "cycles_after": int(models.after.timing().energies[-1]) + 1,
        "array_cycles_layer": array_cycles(plain_passes(config, shape)),
        "array_cycles_extra": array_cycles(extra_passes(config, shape, models.mode)),
        "ratio_reference": None,
        "head_ratios_reference": None,
        "delta_error": None,
        "note": None,
    }
    if reference and find_spec("torch") is None:
        figures["note"] = verbs.INSTALL_REFERENCE
    elif reference:
        from dtp.reference.commutator import commutator

        progress("reference", None)
        whole, *heads = [commutator(layer, models.mode, head) for head in (None, *range(layer.heads))]
        squares = [(part.delta.numpy()[valid] ** 2, part.attended.numpy()[valid] ** 2) for part in (whole, *heads)]
        ratios = [_ratio(*of_part) for of_part in squares]
        figures["ratio_reference"], figures["head_ratios_reference"] = ratios[0], tuple(ratios[1:])
        delta = whole.delta.numpy()[valid]
        error = result.delta[valid] * models.kernel.attention_scale - delta
        figures["delta_error"] = float(np.linalg.norm(error) / max(np.linalg.norm(delta), np.finfo(float).tiny))
    return figures


def _ratio(difference: NDArray[Any], reference: NDArray[Any]) -> float:
    """Of two sums of squares; 0 / 0 is 0."""
    top, bottom = float(difference.sum()), float(reference.sum())
    return top / bottom if bottom else math.inf if top else 0.0


# ---- the run in the simulator --------------------------------------------------------------------------------------


def step_values(config: Config, step: Step) -> dict[str, int]:
    """Fields of a step's payload, :class:`rtl.commutator.KernelStepLayout`."""
    own = ("kind", "wait", "target", "source", "residual", "store")
    numbers = ("feed_gain", "shift", "scale", "out_shift", "activation", "wide")
    job = step.job
    values = {name: int(getattr(step, name)) for name in own}
    values |= {
        "words": step.words(config), "width": step.width if job is None else job.width, "addend": step.addend or 0,
        "adds": int(step.addend is not None and step.kind is StepKind.MATRIX),
        "job.chunks": 0 if job is None else job.chunks(config), "job.blocks": 0 if job is None else job.blocks(config),
        "job.has_bias": int(job is not None and job.bias), "job.bias_base": step.bias_base,
    }  # fmt: skip
    return values | {f"job.{name}": 0 if job is None else int(getattr(job, name)) for name in numbers}


@dataclass(frozen=True)
class PartChannels:
    """Payloads of a part by channel, of inputs and outputs; plain outputs at the end; first cycle of the steps."""

    inputs: dict[str, list[int]]
    outputs: dict[str, list[int]]
    plain: dict[str, int]
    start: int

    def sources(self, stall: float) -> dict[str, Any]:
        """:class:`~sim.bench.channels.Source` of every input; biases are there before the first step."""
        from sim.bench.channels import Source

        return {
            name: Source.of(
                payloads,
                stall=0.0 if name == "s_axis_bias_write" else stall,
                from_cycle=self.start if name == "s_axis_step" else 0,
            )
            for name, payloads in self.inputs.items()
        }


def part_channels(part: Part) -> PartChannels:
    """What goes into the unit for a part and comes out of it."""
    config, kernel, wanted = part.kernel.config, part.kernel, part.wanted
    pack = {
        name: packer(config, Unit.COMMUTATOR, f"{name}_tdata")
        for name in ("s_axis_step", "s_axis", "s_axis_w", "s_axis_bias_write", "m_axis", "m_axis_energy")
    }
    jobs = [step for step in part.program if step.job is not None]
    biases = [
        pack["s_axis_bias_write"]({"addr": first.bias_base + n, "data": joined(column, BIAS_BITS)})
        for first in {step.matrix: step for step in jobs}.values()
        if first.job is not None and (values := kernel.matrices[first.matrix].bias) is not None
        for n, column in enumerate(bias_words(config, first.job, values))
    ]
    entries = {
        step.matrix: [
            pack["s_axis_w"]({"": values.tolist()})
            for values in weight_entries(config, step.job, kernel.matrices[step.matrix].weights)
        ]
        for step in jobs
        if step.job is not None
    }
    stored, last = [], []
    for state in wanted.stored:
        whole = words(config, padded(state, config.rows, config.chunks(state.shape[1]) * config.block))
        stored += [pack["m_axis"]({"": values.tolist()}) for values in whole]
        last += [int(n == len(whole) - 1) for n in range(len(whole))]
    return PartChannels(
        inputs={
            "s_axis_step": [pack["s_axis_step"](step_values(config, step)) for step in part.program],
            "s_axis": [
                pack["s_axis"]({"": values.tolist()}) for load in part.loads for values in words(config, load)
            ],
            "s_axis_w": [entry for step in jobs for entry in entries[step.matrix]],
            "s_axis_bias_write": biases,
        },
        outputs={
            "m_axis": with_last(config, Unit.COMMUTATOR, "m_axis", stored, last),
            "m_axis_energy": [pack["m_axis_energy"](record) for record in _records(config, wanted)],
        },
        plain={"saturations": wanted.saturations, "sum_saturations": wanted.sum_saturations, "idle": 1},
        start=len(biases) + 1,
    )  # fmt: skip


def _records(config: Config, wanted: Executed) -> Iterator[dict[str, int]]:
    for e in wanted.energies:
        for row in range(config.rows):
            yield {
                "difference": int(e.difference[row]), "reference": int(e.reference[row]), "ratio": int(e.ratio[row]),
                "last": int(row == config.rows - 1),
            }  # fmt: skip


def joined(values: Int, bits: int) -> int:
    """Signed numbers side by side, the first lowest."""
    return sum((int(value) & ((1 << bits) - 1)) << bits * n for n, value in enumerate(values))


def cosim_commutator(
    config: ConfigLike,
    workload: WorkloadLike,
    mode: CommutatorMode | str = CommutatorMode.FULL,
    *,
    stalls: float = 0.0,
    seed: int = 0,
    reference: bool = True,
    cache_dir: Path | None = None,
    progress: Progress = verbs.quiet,
) -> CommutatorCosimResult:
    """Both models and the generated Verilog: the unit before attention, the tile's walks, the unit after attention.

    The unit runs a third time for the energies of the heads. Each run is fed by the golden model and compared with it.
    Parameters and errors are those of :func:`tools.verbs.cosim`; ``stalls`` hold of every channel.
    """
    start = time.monotonic()
    config, workload, mode = verbs.as_config(config), verbs.as_workload(workload), _as_mode(mode)
    verbs.check_conditions(None, stalls, seed)
    layer = Layer.of(workload)
    models = commutator_models(config, layer, mode, progress=progress)
    figures = _figures(models, layer, WorkloadSummary.of(workload), reference, progress)
    runs = [
        _run_part(name, part, stalls, seed, cache_dir, progress)
        for name, part in (("before", models.before), ("after", models.after), ("heads", models.heads))
    ]
    runs.insert(1, _run_walks(config, models.result.walks, stalls, seed, cache_dir, progress))
    wrong = [line for run in runs for line in run["differences"]]
    cycles = [run["cycles_rtl"] for run in runs]
    wall = sum(run["sim_cycles"] / run["sim_cycles_per_s"] for run in runs)
    total = sum(run["sim_cycles"] for run in runs)
    together = runs[0] | {
        "bit_exact": all(run["bit_exact"] for run in runs),
        "words_compared": sum(run["words_compared"] for run in runs),
        "cycles_rtl": None if None in cycles else sum(cycles),
        "cycles_runs": sum(run["cycles_runs"] for run in runs),
        "cycles_equal": None if stalls else all(run["cycles_equal"] for run in runs),
        "differences": tuple(wrong),
        "sim_cycles": total,
        "sim_cycles_per_s": total / wall,
    }
    return CommutatorCosimResult(**figures, **together, wall_s=time.monotonic() - start)


def _run_part(
    name: str, part: Part, stalls: float, seed: int, cache_dir: Path | None, progress: Progress
) -> dict[str, Any]:
    """Fields of :class:`~tools.units.UnitComparison` of a part."""
    from sim.bench.channels import ChannelJob, Sink

    config, channels = part.kernel.config, part_channels(part)
    timing = part.timing(channels.start)
    ends = [int(cycles[-1]) for cycles in (timing.outputs, timing.energies) if len(cycles)]
    job = ChannelJob(
        inputs=channels.sources(stalls),
        outputs={channel: Sink(len(payloads), stalls) for channel, payloads in channels.outputs.items()},
        timeout_cycles=int((3 * max(ends) + 10_000) / (1 - stalls) ** 2),
        drain_cycles=200,
        seed=seed,
    )
    result = run_unit(config, Unit.COMMUTATOR, job, max(ends), cache_dir=cache_dir, progress=progress)
    got = {channel: result.outputs[channel] for channel in channels.outputs}
    wrong = [line for channel, wanted in channels.outputs.items()
                   for line in unequal(channel, got[channel].payloads, wanted)]  # fmt: skip
    wrong += [
        f"{port} is {result.plain[port]} in RTL, {value} in golden"
        for port, value in channels.plain.items()
        if result.plain[port] != min(value, verbs.COUNTER_LIMIT)
    ]
    later = [
        *late("s_axis_step", result.inputs["s_axis_step"], timing.steps),
        *late("s_axis", result.inputs["s_axis"], timing.words),
        *late("s_axis_w", result.inputs["s_axis_w"], timing.weights),
        *late("m_axis", got["m_axis"].cycles, timing.outputs),
        *late("m_axis_energy", got["m_axis_energy"].cycles, timing.energies),
    ]
    seen = [int(one.cycles[-1]) for one in got.values() if len(one.cycles)]
    fields = compared(
        result, wrong, later, words=sum(map(len, channels.outputs.values())),
        last_cycle=max(seen, default=None), waves=None, stalls=stalls, seed=seed,
    )  # fmt: skip
    differences = tuple(f"{name}: {line}" for line in fields["differences"])
    return fields | {"differences": differences, "cycles_runs": max(ends) + 1}


def _run_walks(
    config: Config, walks: Sequence[Sequence[Any]], stalls: float, seed: int, cache_dir: Path | None, progress: Progress
) -> dict[str, Any]:
    """The same of the tile: all heads at h + Res(h), then at h."""
    from sim.cycles.attention import predict

    heads = [head for walk in walks for head in walk]
    prediction = predict(config, heads)
    result = verbs.run_tile(config, heads, int(prediction.total_cycles), None, stalls, seed, cache_dir, progress)
    wanted = [attention_golden(config, head) for head in heads]
    wrong, words_compared = verbs.compare_outputs(config, heads, wanted, result)
    later = verbs.compare_cycles(prediction, result)
    last = int(result.cycles[-1] - result.first_input_cycle) if len(result.cycles) else None
    fields = compared(
        result, wrong, [] if later is None else [later], words=words_compared, last_cycle=last, waves=None,
        stalls=stalls, seed=seed,
    )  # fmt: skip
    differences = tuple(f"walks: {line}" for line in fields["differences"])
    return fields | {"differences": differences, "cycles_runs": int(prediction.total_cycles)}
