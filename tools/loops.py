"""Loop programs as a verb: energies by the golden model, every cycle, and the generated Verilog beside both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtp.config import Config
from dtp.connections import quantise_connections
from dtp.errors import must
from dtp.fixed import Int
from dtp.holonomy import BINS, RATIO_FRACTION_BITS, LoopAccounts, LoopError, ReportKind, Table
from dtp.loops import Extent, Inverse, Program, Step, check_program, run_program, steps
from dtp.solve import TransportError
from dtp.transport import TransportJob, TransportParams, factor_words, quantise_state, transport
from dtp.units import Unit
from dtp.workload import TransportKind, Workload
from tools import verbs
from tools.units import UnitComparison, compared, late, packer, run_unit, unequal, with_last
from tools.verbs import ConfigLike, Progress, Result, WorkloadLike, WorkloadSummary

__all__ = [
    "LoopCosimResult", "LoopModels", "LoopSimulateResult", "Sent", "cosim_loops", "exact_transports", "job_fields",
    "loop_models", "send", "simulate_loops", "walk_loops",
]  # fmt: skip

Real = NDArray[np.float64]
Chosen = Callable[[Step], tuple[TransportJob, Int]]
"""Job and factors (1, width, k) of a step."""

FLOOR = 1
"""Least start energy that a difference is divided by."""
LEAST_ENERGY = 1e-3
"""Errors of smaller energies are not counted."""


# ---- results -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Credited:
    """Energies of the loops that are credited to a head or a block; 0 where there are none."""

    loops: int
    mean: float
    maximum: float


@dataclass(frozen=True, kw_only=True)
class LoopSimulateResult(Result):
    """Golden model and cycle model of a loop program (docs/holonomy.md, 5 to 7).

    Parameters
    ----------
    loops, steps: of the program; an attention edge is two steps with ``frame``, else one
    energies: Hol² of each loop
    heads: of each head; blocks: of each block (I, J), row by row
    histogram: loops by the bit length of their energy in units of 2^−24, the last bin also for longer ones
    saturated_loops: with a lane that saturated on the way
    transport_errors: names of the engine's flags
    cycles_model: from reset to the last entry of the tables
    error_median, error_worst: relative, against PyTorch float64, of energies of at least 1e-3; None without PyTorch or
        without such energies
    note: that there is no PyTorch, where there is none
    """

    config: str
    config_hash: str
    workload: WorkloadSummary
    loops: int
    steps: int
    energies: tuple[float, ...]
    heads: tuple[Credited, ...]
    blocks: tuple[tuple[Credited, ...], ...]
    histogram: tuple[int, ...]
    saturated_loops: int
    transport_errors: tuple[str, ...]
    cycles_model: int
    error_median: float | None
    error_worst: float | None
    note: str | None


@dataclass(frozen=True, kw_only=True)
class LoopCosimResult(LoopSimulateResult, UnitComparison):
    """The generated Verilog of the loop unit beside both models."""


# ---- models ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sent:
    """A program on the ports of the loop unit: headers, start words, steps, factor words, jobs by loop; its reports."""

    headers: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    factors: list[Int]
    walks: list[list[TransportJob]]
    reports: list[dict[str, Any]]


def job_fields(job: TransportJob) -> dict[str, Any]:
    """Fields of :class:`rtl.solve.JobLayout`."""
    return {
        "mode": int(job.mode), "last_group": job.groups - 1, "last_word": job.words - 1,
        "last_token": job.tokens - 1, "plain": int(job.plain), "transposed": int(job.transposed),
        "separate": int(job.separate), "identity": int(job.identity), "base": int(job.base),
        "project_shift": job.project_shift, "gram_shift": job.gram_shift, "unit": job.unit,
        "weights": list(job.weights),
    }  # fmt: skip


def send(config: Config, program: Program, probes: Int, chosen: Chosen, accounts: LoopAccounts) -> Sent:
    """What goes into the unit for a program, and what ``accounts`` say of it.

    Parameters
    ----------
    probes: (probes, lanes), whole words
    """
    params = accounts.params
    sent = Sent([], [], [], [], [], [])
    for record, header, loop in zip(accounts.records, program.headers, program.loops, strict=True):
        sent.reports.append({
            "kind": int(ReportKind.LOOP), "index": record.tag, "numbers": (record.start, record.end, record.difference),
            "ratio": record.ratio, "saturated": int(record.saturated), "last": 0,
        })  # fmt: skip
        sent.headers.append({
            "tag": header.tag, "used": len(header.heads), "heads": (*header.heads, 0, 0)[:2],
            "block": header.block[0] * params.blocks + header.block[1],
            "last": int(header.tag == len(program.loops) - 1),
        })  # fmt: skip
        vector = probes[loop[0].probe].reshape(-1, params.lanes).tolist()
        sent.starts.extend({"data": word, "last": int(n == len(vector) - 1)} for n, word in enumerate(vector))
        walk = [step for edge in loop for step in steps(edge)]
        jobs = [chosen(step) for step in walk]
        sent.walks.append([job for job, _ in jobs])
        for n, (step, (job, v)) in enumerate(zip(walk, jobs, strict=True)):
            sent.steps.append(
                {f"job.{name}": value for name, value in job_fields(job).items()}
                | {"transposed": int(step.inverse), "first": int(n == 0), "last": int(n == len(walk) - 1)}
            )
            sent.factors.extend(factor_words(config, job, v)[0])
    rows = [
        (kind, n, tuple(int(v) for v in row))
        for kind, entries in ((ReportKind.HEAD, accounts.heads), (ReportKind.BLOCK, accounts.blocks))
        for n, row in enumerate(zip(entries.sums, entries.maxima, entries.counts, strict=True))
    ]
    rows += [(ReportKind.BIN, n, (0, 0, int(accounts.bins[n]))) for n in range(BINS)]
    sent.reports.extend(
        {"kind": int(kind), "index": n, "numbers": numbers, "ratio": 0, "saturated": 0, "last": int(end == len(rows))}
        for end, (kind, n, numbers) in enumerate(rows, 1)
    )
    return sent


@dataclass(frozen=True, eq=False)
class LoopModels:
    """A checked program with what it walks on, and both models of it.

    Members
    -------
    sent: what goes into the unit and comes out of it
    accounts: golden; errors: of the engine in all steps
    timing: :class:`sim.cycles.loops.UnitTiming`
    """

    config: Config
    program: Program
    accounts: LoopAccounts
    errors: TransportError
    sent: Sent
    timing: Any

    @property
    def energies(self) -> Real:
        """Hol² of every loop."""
        return np.array([record.ratio for record in self.accounts.records]) * 2.0**-RATIO_FRACTION_BITS


def loop_models(config: Config, workload: Workload, *, progress: Progress = verbs.quiet) -> LoopModels:
    """Golden model and cycle model of a workload's ``loops``; probes of seed 0 where it has none.

    Loops walk over the tokens before the padding, whether these attend to each other or not.

    Raises
    ------
    DtpError: no loops, a program that :func:`dtp.loops.check_program` refuses, or a size that the unit has not.
    """
    from rtl.units import loop_params
    from sim.cycles.loops import unit_timing

    params, engine = loop_params(config), TransportParams(config)
    if workload.loops is None:
        raise must("Workload", "loops", "there for the unit loops", None)
    for name, value, limit in (
        ("heads", workload.heads, params.heads),
        ("valid_length", workload.valid_length, config.max_tokens),
        ("width", workload.width, config.transport_width),
    ):
        if value > limit:
            raise must("Workload", name, f"at most {limit} with the unit loops", value)
    count = 1 if workload.probe is None else workload.probe.shape[1]
    extent = Extent(
        tokens=workload.valid_length, layers=1, heads=workload.heads, probes=workload.heads * count, block=config.block
    )
    inverse = Inverse.TRANSPOSE if workload.transport is TransportKind.CAYLEY else Inverse.NONE
    program = check_program(workload.loops, extent, inverse)
    progress("quantising", None)
    connections = quantise_connections(config, workload, workload.valid_length)
    factors = connections.factors
    real = workload.probes(count).reshape(-1, workload.width).astype(np.float64)
    real /= np.sqrt((real**2).sum(axis=1, keepdims=True))
    probes, _ = quantise_state(real, headroom_bits=factors.headroom_bits)
    lanes = -(-workload.width // engine.tile_rows) * engine.tile_rows
    probes = np.pad(probes, ((0, 0), (0, lanes - workload.width)))
    jobs = {
        transposed: replace(factors.job(config, connections.mode, transposed=transposed), tokens=1)
        for transposed in (False, True)
    }

    def chosen(step: Step) -> tuple[TransportJob, Int]:
        place = connections.place(step.head, step.node.token)
        return jobs[step.inverse], np.pad(factors.v[place], ((0, lanes - workload.width), (0, 0)))[None]

    errors, taken = [TransportError.NONE], 0
    total = sum(len(steps(edge)) for loop in program.loops for edge in loop)

    def golden(step: Step, state: Int) -> tuple[Int, bool]:
        nonlocal taken
        taken += 1
        progress("golden model", taken / total)
        job, v = chosen(step)
        result = transport(config, job, v, state[None, None])
        errors.append(result.error)
        return result.outputs[0, 0], bool(result.saturations)

    accounts = run_program(program, probes, golden, LoopAccounts(params, floor=FLOOR))
    sent = send(config, program, probes, chosen, accounts)
    progress("cycle model", None)
    last = [bool(header["last"]) for header in sent.headers]
    timing = unit_timing(config, params, sent.walks, last)
    return LoopModels(config, program, accounts, reduce(TransportError.__or__, errors), sent, timing)


def simulate_loops(
    config: ConfigLike, workload: WorkloadLike, *, reference: bool = True, progress: Progress = verbs.quiet
) -> LoopSimulateResult:
    """Golden model and cycle model of the loops of a workload.

    Raises
    ------
    DtpError: what :func:`loop_models` refuses.
    """
    start = time.monotonic()
    config, workload = verbs.as_config(config), verbs.as_workload(workload)
    models = loop_models(config, workload, progress=progress)
    return LoopSimulateResult(**_figures(models, workload, reference, progress), wall_s=time.monotonic() - start)


def _figures(models: LoopModels, workload: Workload, reference: bool, progress: Progress) -> dict[str, Any]:
    config, accounts, extent = models.config, models.accounts, models.program.extent
    blocks, side = _credited(accounts.blocks), accounts.params.blocks
    errors, note = _errors(models, workload, progress) if reference else (np.empty(0), None)
    return {
        "config": config.name,
        "config_hash": config.hash,
        "workload": WorkloadSummary.of(workload),
        "loops": len(models.program.loops),
        "steps": len(models.sent.steps),
        "energies": tuple(models.energies.tolist()),
        "heads": _credited(accounts.heads)[: extent.heads],
        "blocks": tuple(blocks[side * row :][: extent.blocks] for row in range(extent.blocks)),
        "histogram": tuple(accounts.bins.tolist()),
        "saturated_loops": sum(record.saturated for record in accounts.records),
        "transport_errors": tuple(str(flag.name).lower() for flag in TransportError if flag & models.errors),
        "cycles_model": int(models.timing.reports[-1]) + 1,
        "error_median": float(np.median(errors)) if len(errors) else None,
        "error_worst": float(errors.max()) if len(errors) else None,
        "note": note,
    }


def _credited(table: Table) -> tuple[Credited, ...]:
    unit = 2.0**-RATIO_FRACTION_BITS
    return tuple(
        Credited(int(count), int(total) / max(1, int(count)) * unit, int(most) * unit)
        for total, most, count in zip(table.sums, table.maxima, table.counts, strict=True)
    )


# ---- reference ---------------------------------------------------------------------------------------------


def exact_transports(workload: Workload, place: Any = ...) -> Real:
    """P (H, L, d, d) in float64 by the papers' formulas, the Cayley transform by a d × d solve; needs PyTorch.

    ``place`` is an index of heads and tokens.
    """
    import torch

    from dtp.reference.holonomy import Transport

    names = ("connection_a", "connection_b", "torsion_l", "torsion_r")
    a, b, left, right = (
        None if (factor := getattr(workload, name)) is None else torch.from_numpy(factor.astype(np.float64))
        for name in names
    )
    assert workload.transport is not None and a is not None and b is not None
    return np.asarray(Transport(workload.transport, a, b, left, right, workload.torsion_gate or 0.0)[place].matrices())


def walk_loops(program: Program, transports: Real | Mapping[tuple[int, int], Real], probes: Real) -> Real:
    """Energy of every loop by the literal walk in float64.

    Parameters
    ----------
    transports: (H, L, d, d), or those that the program needs by head and token; an inverse step takes the transpose
    """
    found = []
    for loop in program.loops:
        start = end = probes[loop[0].probe]
        for edge in loop:
            for step in steps(edge):
                matrix = transports[step.head, step.node.token]
                end = (matrix.T if step.inverse else matrix) @ end
        found.append(float(((end - start) ** 2).sum() / (start**2).sum()))
    return np.array(found)


def _errors(models: LoopModels, workload: Workload, progress: Progress) -> tuple[Real, str | None]:
    """Relative errors of the energies that count, and why there are none."""
    if find_spec("torch") is None:
        return np.empty(0), verbs.INSTALL_REFERENCE
    progress("reference", None)
    program = models.program
    real = workload.probes(program.extent.probes // workload.heads).reshape(-1, workload.width).astype(np.float64)
    walked = [step for loop in program.loops for edge in loop for step in steps(edge)]
    places = sorted({(step.head, step.node.token) for step in walked})
    matrices = exact_transports(workload, tuple(zip(*places, strict=True)))
    wanted = walk_loops(program, dict(zip(places, matrices, strict=True)), real)
    counted = wanted >= LEAST_ENERGY
    return np.abs(models.energies[counted] / wanted[counted] - 1), None


# ---- the run in the simulator --------------------------------------------------------------------------------------


def loop_channels(config: Config, sent: Sent) -> tuple[dict[str, list[int]], list[int]]:
    """Payloads of the inputs, by channel, and of the output."""
    pack = {
        name: packer(config, Unit.LOOPS, f"{name}_tdata")
        for name in ("s_axis_header", "s_axis_step", "s_axis_start", "s_axis_factors", "m_axis")
    }
    starts = [pack["s_axis_start"]({"": word["data"]}) for word in sent.starts]
    ends = [word["last"] for word in sent.starts]
    inputs = {
        "s_axis_header": [pack["s_axis_header"](values) for values in sent.headers],
        "s_axis_start": with_last(config, Unit.LOOPS, "s_axis_start", starts, ends),
        "s_axis_step": [pack["s_axis_step"](values) for values in sent.steps],
        "s_axis_factors": [pack["s_axis_factors"]({"": word.reshape(-1, 4)}) for word in sent.factors],
    }
    return inputs, [pack["m_axis"](values) for values in sent.reports]


def cosim_loops(
    config: ConfigLike,
    workload: WorkloadLike,
    *,
    waves: str | Path | None = None,
    stalls: float = 0.0,
    seed: int = 0,
    reference: bool = True,
    cache_dir: Path | None = None,
    progress: Progress = verbs.quiet,
) -> LoopCosimResult:
    """Both models and the generated Verilog of the loop unit, run by cocotb on Verilator.

    Parameters and errors are those of :func:`tools.verbs.cosim`; ``stalls`` hold of every channel.
    """
    from sim.bench.channels import ChannelJob, Sink, Source

    start = time.monotonic()
    config, workload = verbs.as_config(config), verbs.as_workload(workload)
    verbs.check_conditions(waves, stalls, seed)
    models = loop_models(config, workload, progress=progress)
    figures = _figures(models, workload, reference, progress)
    inputs, wanted = loop_channels(config, models.sent)
    total = figures["cycles_model"]
    job = ChannelJob(
        inputs={name: Source.of(payloads, stall=stalls) for name, payloads in inputs.items()},
        outputs={"m_axis": Sink(len(wanted), stalls)},
        plain={"floor": FLOOR},
        timeout_cycles=int((3 * total + 10_000) / (1 - stalls) ** 2),
        seed=seed,
    )
    result = run_unit(config, Unit.LOOPS, job, total, waves=waves, cache_dir=cache_dir, progress=progress)
    got = result.outputs["m_axis"]
    expected = {"error": int(LoopError.NONE), "transport_error": int(models.errors)}
    differences = [
        *unequal("m_axis", got.payloads, wanted),
        *(
            f"{name} is {result.plain[name]} in RTL, {value} in golden"
            for name, value in expected.items()
            if result.plain[name] != value
        ),
    ]
    later = [
        *late("s_axis_step", result.inputs["s_axis_step"], models.timing.steps),
        *late("s_axis_header", result.inputs["s_axis_header"], models.timing.headers),
        *late("m_axis", got.cycles, models.timing.reports),
    ]
    found = compared(
        result, differences, later, words=len(wanted), last_cycle=int(got.cycles[-1]) if len(got.cycles) else None,
        waves=waves, stalls=stalls, seed=seed,
    )  # fmt: skip
    return LoopCosimResult(**figures, **found, wall_s=time.monotonic() - start)
