"""Rows about the generated Verilog on Verilator: every bit, every cycle, and how busy the array is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dtp.attention import golden
from dtp.config import Config
from dtp.errors import DtpError
from dtp.job import job_entries, output_beats
from dtp.quantise import Head, quantise
from dtp.workload import Workload
from tools.bench.cases import RANDOM_PRESET, Case, masked_workload
from tools.bench.measured import Bench, Measured
from tools.verbs import compare_cycles, compare_outputs, stream_job

LEAST_CYCLE_CASES = 200


@dataclass(frozen=True)
class Run:
    """One run of the Verilog beside both models.

    Parameters
    ----------
    outputs: output values compared
    cycles: from the first input beat to the last output beat, both included; 0 when there was no output
    differences, late: one line for each thing that is not the golden model's; for the first beat in another cycle
    macs: useful multiplications of the workloads
    """

    outputs: int
    cycles: int
    differences: tuple[str, ...]
    late: str | None
    macs: int


def run_heads(
    bench: Bench, config: Config, heads: Sequence[Head], *, stalls: float = 0.0, seed: int = 0, cocotb: bool = True
) -> Run:
    """All heads back to back through the Verilog; cycles are compared where nothing stalls."""
    from sim.bench import Backend, run_stream

    job = stream_job(config, heads, cycles_allowed(config, heads), stalls, seed)
    backend = Backend.COCOTB if cocotb else Backend.BARE
    result = run_stream(bench.verilog(config), job, backend, cache_dir=bench.cache_dir, check=False)
    results = [golden(config, head) for head in heads]
    differences, outputs = compare_outputs(config, heads, results, result)
    cycles = 0
    if result.first_input_cycle is not None and len(result.cycles):
        cycles = int(result.cycles[-1]) - result.first_input_cycle + 1
    late = None
    if not stalls:
        from sim.cycles.attention import predict

        late = compare_cycles(predict(config, heads), result)
    return Run(
        outputs=outputs,
        cycles=cycles,
        differences=(*result.faults, *differences),
        late=late,
        macs=0,
    )


def cycles_allowed(config: Config, heads: Sequence[Head]) -> int:
    """More cycles than the heads need: input, output, every pass without a mask, and the lift one after the other."""
    total = 0
    for head in heads:
        job = head.job
        items = config.groups(job.tokens) * config.blocks(job.tokens)
        steps = items * config.pass_steps * (job.passes(config) + job.chunks(config))
        lift = 50 * (config.blocks(job.tokens) * config.block + config.groups(job.tokens) * config.rows)
        total += job_entries(config, job) * config.entry_beats + output_beats(config, job) + steps + lift
    return total


def run_workload(bench: Bench, config: Config, workload: Workload) -> Run:
    """One workload without stalls, its heads back to back."""
    run = run_heads(bench, config, quantise(config, workload))
    return Run(run.outputs, run.cycles, run.differences, run.late, workload.useful_macs())


# ---- RTL = golden ------------------------------------------------------------------------------------------


def rtl_golden(bench: Bench, cases: Sequence[Case]) -> Measured:
    """Every output, empty row and status record, with random stalls on both streams."""
    outputs: dict[str, int] = {}
    jobs = 0
    differences: list[str] = []
    for case in cases:
        config = case.config
        heads: list[Head] = []
        for workload in case.workloads():
            heads += quantise(config, workload)
        bench.progress(f"RTL = golden on {config.name}, {len(heads)} jobs, stalls {case.stalls:g}", None)
        run = run_heads(bench, config, heads, stalls=case.stalls, seed=case.seed)
        differences += [f"{config.name}: {line}" for line in run.differences]
        outputs[config.name] = outputs.get(config.name, 0) + run.outputs
        jobs += len(heads)
    each = ", ".join(f"{name} {count:,}" for name, count in outputs.items())
    found = f"{len(differences)} differences" if differences else "all equal"
    return Measured(
        f"{found}: {sum(outputs.values()):,} outputs of {jobs} jobs ({each})",
        not differences,
        {"outputs_compared": outputs, "jobs": jobs, "differences": differences[:20]},
        tuple(differences[:5]),
    )


# ---- cycle model = RTL -------------------------------------------------------------------------------------


def random_configuration(rng: np.random.Generator, number: int) -> Config:
    """A small configuration that the rules accept, all parameters of the tile drawn."""

    def draw(*values: int) -> int:
        return int(rng.choice(values))

    while True:
        block, segments = draw(4, 8, 16), draw(1, 1, 2, 4)
        rows = draw(*(n for n in (2, 4, 8) if n <= block))
        operand_bits = draw(8, 8, 16)
        lanes = block * segments
        rank = draw(1, 2, 3)
        fields = {
            "rows": rows,
            "lanes": lanes,
            "operand_bits": operand_bits,
            "probability_bits": int(rng.integers(8, 17)),
            "lifted_bits": int(rng.integers(6, 17)),
            "output_bits": max(operand_bits, draw(8, 16)),
            "max_tokens": draw(32, 64),
            "max_width": draw(16, 32),
            "max_frame_rank": rank,
            "metric_rank": int(rng.integers(1, rank + 1)),
            "block": block,
            "input_bytes": draw(1, 2, 4, 8, 16, 32),
            "output_bytes": draw(2, 4, 8, 16, 32),
            "lookahead": int(rng.integers(1, 5)),
            "normaliser_lanes": draw(1, 2, 4, 8),
            "lift_ports": draw(1, 2, 4),
            "output_slots": draw(2, 4),
            "query_groups": draw(8, 16),
            "registered_memories": bool(draw(0, 1)),
        }
        try:
            return Config.load("tiny").changed(name=f"drawn-{number}", **fields)
        except DtpError:
            continue


def drawn_workloads(case: Case, config: Config, rng: np.random.Generator, seed: int) -> Iterator[Workload]:
    """A workload for every mode and mask, shapes drawn, one in four as large as the configuration takes."""
    for number, (mode, mask) in enumerate((mode, mask) for mode in case.modes for mask in case.masks):
        whole = rng.random() < 0.25
        yield masked_workload(
            config,
            mode=mode,
            mask=mask,
            tokens=config.max_tokens if whole else int(rng.integers(1, config.max_tokens + 1)),
            width=config.max_width if whole else int(rng.integers(1, config.max_width + 1)),
            heads=case.heads,
            seed=seed + number,
            kept=case.kept,
            valid=case.valid,
        )


def cycle_model(bench: Bench, cases: Sequence[Case]) -> Measured:
    """The cycle of every output beat, for streams of one to five jobs; their bits as well."""
    compared = streams = configurations = 0
    wrong: list[str] = []
    for case in cases:
        rng = np.random.default_rng(case.seed)
        drawn = case.preset == RANDOM_PRESET
        configs = [random_configuration(rng, n) for n in range(case.count)] if drawn else [case.config]
        for number, config in enumerate(configs):
            configurations += 1
            bench.progress(f"cycle model = RTL on {config.name}", number / len(configs))
            made = drawn_workloads(case, config, rng, case.seed + 100 * number) if drawn else case.workloads()
            jobs = [list(quantise(config, workload)) for workload in made]
            order = rng.permutation(len(jobs)).tolist()
            while order:
                taken = [order.pop() for _ in range(min(len(order), int(rng.integers(1, 6))))]
                heads = [head for index in taken for head in jobs[index]]
                run = run_heads(bench, config, heads, cocotb=False)
                faults = [*run.differences, *([] if run.late is None else [run.late])]
                wrong += [f"{config.name}, jobs {taken}: {line}" for line in faults]
                streams += 1
                compared += 0 if faults else len(heads)
    found = f"{len(wrong)} differences" if wrong else "every output beat equal"
    return Measured(
        f"{found}: {compared} equal cases of {configurations} configurations in {streams} streams",
        not wrong and (compared >= LEAST_CYCLE_CASES or bench.quick),
        {"cases": compared, "configurations": configurations, "streams": streams, "differences": wrong[:20]},
        tuple(wrong[:5]),
    )


# ---- how busy the array is ---------------------------------------------------------------------------------


def _runs(bench: Bench, case: Case) -> list[Run]:
    config = case.config
    runs = []
    for mode in case.modes:
        for mask in case.masks:
            bench.progress(f"{config.name}: {case.heads} heads, {mode}, mask {mask}", None)
            workload = masked_workload(
                config,
                mode=mode,
                mask=mask,
                tokens=case.tokens[0],
                width=case.width[0],
                heads=case.heads,
                seed=case.seed,
                kept=case.kept,
                valid=case.valid,
            )
            runs.append(run_workload(bench, config, workload))
    return runs


def _faults(runs: Sequence[Run]) -> tuple[str, ...]:
    """What makes a figure worthless, and what does not."""
    return tuple(line for run in runs for line in run.differences) + tuple(
        run.late for run in runs if run.late is not None
    )


def utilisation(bench: Bench, cases: Sequence[Case], least: float) -> Measured:
    """Useful MACs ÷ (cycles of the RTL × MACs of the array)."""
    (case,) = cases
    (run,) = _runs(bench, case)
    found = run.macs / (run.cycles * case.config.macs) if run.cycles else 0.0
    return Measured(
        f"{100 * found:.2f} % ({run.cycles:,} cycles, {case.heads} head{'s' if case.heads > 1 else ''})",
        found >= least and not run.differences,
        {"array_utilisation": found, "cycles_rtl": run.cycles, "macs": run.macs, "bit_exact": not run.differences},
        _faults([run]),
    )


def cycle_ratio(bench: Bench, cases: Sequence[Case], most: float) -> Measured:
    """Cycles of the second mode or mask of a case ÷ those of the first."""
    (case,) = cases
    base, other = _runs(bench, case)
    found = other.cycles / base.cycles if base.cycles else float("inf")
    exact = not base.differences and not other.differences
    return Measured(
        f"{found:.4f} ({other.cycles:,} against {base.cycles:,} cycles)",
        found <= most and exact and other.cycles > 0,
        {"ratio": found, "cycles_rtl": [base.cycles, other.cycles], "bit_exact": exact},
        _faults([base, other]),
    )


utilisation_streaming = partial(utilisation, least=0.99)
utilisation_idle = partial(utilisation, least=0.965)
riemannian_ecp5 = partial(utilisation, least=0.97)
riemannian_wide = partial(cycle_ratio, most=1.15)
masked_ecp5 = partial(cycle_ratio, most=0.52)
masked_wide = partial(cycle_ratio, most=0.55)


# ---- speed of simulation -----------------------------------------------------------------------------------


def _speed_job(bench: Bench, case: Case) -> tuple[Config, tuple[Head, ...], Any, float]:
    from time import perf_counter

    from sim.cycles.attention import predict

    config = case.config
    heads = quantise(config, next(case.workloads()))
    begin = perf_counter()
    prediction = predict(config, heads)
    return config, heads, stream_job(config, heads, prediction.total_cycles, 0.0, case.seed), perf_counter() - begin


def model_speed(bench: Bench, cases: Sequence[Case]) -> Measured:
    """Time of the cycle model against the time of the Verilator model in its bare loop, build and start excluded."""
    from time import perf_counter

    from sim.bench import Backend, run_stream
    from sim.bench.verilated import BARE, build
    from sim.cycles.attention import predict

    (case,) = cases
    config, heads, job, _ = _speed_job(bench, case)
    verilog = bench.verilog(config)
    bench.progress("building the simulator", None)
    build(verilog, BARE, cache_dir=bench.cache_dir)
    model_s, rtl_s, cycles = [], [], 0
    for number in range(case.count):
        bench.progress(f"cycle model against Verilator, L = {case.tokens[0]}, {case.heads} heads", number / case.count)
        begin = perf_counter()
        prediction = predict(config, heads)
        model_s.append(perf_counter() - begin)
        result = run_stream(verilog, job, Backend.BARE, cache_dir=bench.cache_dir)
        rtl_s.append(result.wall_s)
        cycles = prediction.total_cycles
    ratio = float(np.median(rtl_s) / np.median(model_s))
    return Measured(
        f"{ratio:.0f} × faster: {np.median(model_s):.2f} s against {np.median(rtl_s):.1f} s for {cycles:,} cycles "
        f"(medians of {case.count})",
        ratio >= 100,
        {"ratio": ratio, "model_s": model_s, "verilator_s": rtl_s, "cycles": cycles},
    )


def cosim_speed(bench: Bench, cases: Sequence[Case]) -> Measured:
    """Rate of the co-simulation ÷ rate of the bare harness, the same wrapper, flags and input."""
    from sim.bench import Backend, run_stream
    from sim.bench.verilated import BARE, COCOTB, build

    (case,) = cases
    config, _, job, _ = _speed_job(bench, case)
    verilog = bench.verilog(config)
    bench.progress("building both simulators", None)
    for driver in (COCOTB, BARE):
        build(verilog, driver, cache_dir=bench.cache_dir)
    rates: dict[Backend, list[float]] = {Backend.COCOTB: [], Backend.BARE: []}
    for number in range(case.count):
        for backend, found in rates.items():
            bench.progress(f"rate of simulation, {backend.value}", number / case.count)
            found.append(run_stream(verilog, job, backend, cache_dir=bench.cache_dir).cycles_per_second)
    cosim, bare = (float(np.median(found)) for found in rates.values())
    return Measured(
        f"{cosim / bare:.2f} × ({cosim:,.0f} against {bare:,.0f} cycles a second, medians of {case.count})",
        cosim / bare >= 0.5,
        {"ratio": cosim / bare, "cosim_cycles_per_s": rates[Backend.COCOTB], "bare_cycles_per_s": rates[Backend.BARE]},
    )
