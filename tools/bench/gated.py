"""Rows about gated attention: what the gate costs, what it saves, and that the gated top computes what it should."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from dtp.attention import golden
from dtp.config import Config
from dtp.errors import DtpError, must
from dtp.gated import GoldenGate, gated_golden, gated_heads, quantise_geometry
from dtp.pruner import SCORE_BITS, Gate, Source
from dtp.quantise import Head, quantise
from dtp.units import Unit
from dtp.workload import Workload
from sim.cycles.attention import Prediction, predict
from sim.cycles.gated import GateCycles
from sim.cycles.transport import core_cycles
from tools.bench.cases import Case, masked_workload
from tools.bench.measured import Bench, Measured, Sheet
from tools.gated import GatePolicy, cosim_gated

OPEN_RATIO = 1.05
"""Most cycles with all gates open ÷ cycles without a gate."""
KEPT_MARGIN = 0.05
"""Most cycles at a kept fraction f: (f + this) × dense."""
LEAST_FRACTION = 0.5
"""From this kept fraction on; below, what limits is shown."""
LEAST_BREAK_EVEN = 0.8
LUT4_RATIO = 1.6
"""Most LUT4 of the gated top ÷ those of the plain tile."""
DSP_LIMIT, BRAM_LIMIT, LEAST_MHZ = 156, 208, 100.0
WAITING = 0.02
"""Part of the cycles without a mask row from which on a run counts as limited by the gate."""
_ALL = (1 << SCORE_BITS) - 1


@dataclass(frozen=True)
class GatedRun:
    """One prediction of gated heads.

    Parameters
    ----------
    kept: fraction of the legal blocks
    cycles: of all heads
    waits: cycles between first and last step of the array in which the walk had no mask row
    first: cycle in which the first mask row is there
    """

    kept: float
    cycles: int
    waits: int
    first: int

    @property
    def limit(self) -> str:
        """What the run takes its time for."""
        return "gate" if self.waits > WAITING * self.cycles else "array"


class GatedLayer:
    """The heads of a layer, dense and behind gates, in the cycle model.

    When mask rows are made depends on the kind of gate alone, so that the geometry is stepped once a kind.
    """

    def __init__(self, config: Config, workload: Workload) -> None:
        self.config = config
        self.heads = quantise(config, workload)
        self.geometry = quantise_geometry(config, workload, Source.HOLONOMY)
        self._made: dict[tuple[Gate, int], list[int]] = {}

    def dense(self, layers: int = 1) -> int:
        """Cycles without a gate, ``layers`` times the heads back to back."""
        return int(predict(self.config, self.heads * layers).total_cycles)

    def run(self, policy: GatePolicy, layers: int = 1) -> GatedRun:
        """Cycles behind a gate whose scores the field makes; a run of the geometry for each layer."""
        settings = policy.settings(self.config, self.geometry)
        gate = GoldenGate(self.config).run(self.geometry, settings)
        plain = [replace(head, job=replace(head.job, gated=True)) for head in self.heads]
        heads = gated_heads(self.config, plain, gate)
        kind = (settings.gate, layers)
        if kind not in self._made:
            self._made[kind] = list(GateCycles(self.config, [(self.geometry.run, settings)] * layers).finish())
        prediction = predict(self.config, heads * layers, rows_again(self.config, self._made[kind]))
        made = self._made[kind]
        return GatedRun(gate.kept_fraction, int(prediction.total_cycles), _waits(prediction), made[0])

    def budget(self, fraction: float) -> GatePolicy:
        """The same number of blocks in every row.

        Raises
        ------
        DtpError: a fraction that is no whole number of blocks.
        """
        blocks = self.geometry.run.blocks(self.config)
        budget = round(fraction * blocks)
        if budget / blocks != fraction:
            raise must("Case", "fractions", f"whole blocks of {blocks}", fraction)
        return GatePolicy(budget=budget)

    @cached_property
    def token_cycles(self) -> tuple[float, float]:
        """Cycles a token from one head's last row to the next head's, and those of the transport engine alone."""
        run = self.geometry.run
        made = next(iter(self._made.values()))
        ends = made[run.blocks(self.config) - 1 :: run.blocks(self.config)][: run.heads]
        job = run.transport_job()
        alone = [core_cycles(self.config, replace(job, tokens=count * run.tokens)) for count in (1, 2)]
        return float(np.median(np.diff(ends))) / run.tokens, (alone[1] - alone[0]) / run.tokens


def rows_again(config: Config, made: Sequence[int]) -> GateCycles:
    """Mask rows that were made in these cycles, none of them taken."""
    rows = GateCycles(config, ())
    rows.made = list(made)
    return rows


def _waits(prediction: Prediction) -> int:
    return int(prediction.stalls["gate"])


def _layer(case: Case, tokens: int, mode: str) -> Workload:
    return masked_workload(
        case.config, mode=mode, mask="none", tokens=tokens, width=case.width[0], heads=case.heads, seed=case.seed,
        kept=1.0, valid=1.0, transport_rank=case.transport_rank,
    )  # fmt: skip


def _layers(bench: Bench, cases: Sequence[Case], what: str) -> Iterator[tuple[str, Case, int, GatedLayer]]:
    """Every configuration and length of the cases, with its name."""
    for case in cases:
        for tokens in case.tokens:
            name = f"{case.preset}, L = {tokens}"
            bench.progress(f"{what}: {name}", None)
            yield name, case, tokens, GatedLayer(case.config, _layer(case, tokens, case.modes[0]))


# ---- cycles ------------------------------------------------------------------------------------------------


def gate_open(bench: Bench, cases: Sequence[Case]) -> Measured:
    """Cycles with all gates open, scores made by the field, ÷ cycles without a gate."""
    found: dict[str, Any] = {}
    for name, _, _, layer in _layers(bench, cases, "open gates"):
        run, dense = layer.run(GatePolicy(theta=_ALL)), layer.dense()
        found[name] = {"ratio": run.cycles / dense, "cycles": run.cycles, "dense": dense, "first_row": run.first}
    each = (f"{n} {f['ratio']:.4f} ({f['cycles']:,} against {f['dense']:,} cycles)" for n, f in found.items())
    first = (f"{name} {f['first_row']:,}, {f['first_row'] / f['dense']:.3f} of dense" for name, f in found.items())
    return Measured(
        ", ".join(each),
        all(f["ratio"] <= OPEN_RATIO for f in found.values()),
        found,
        (f"cycles before the first head's first mask row: {'; '.join(first)}",),
    )


def gate_cycles(bench: Bench, cases: Sequence[Case]) -> Measured:
    """Cycles at each kept fraction ÷ dense: a budget a row, and one threshold for all heads."""
    figures: dict[str, Any] = {}
    sheets, reached, asked, worst, rates = [], 0, 0, (-1.0, ""), []
    for name, case, tokens, layer in _layers(bench, cases, "kept fractions"):
        dense = layer.dense()
        policies = {f"{fraction:g}": layer.budget(fraction) for fraction in case.fractions}
        policies[f"{case.kept:g}, threshold"] = GatePolicy(kept=case.kept)
        runs = {shown: layer.run(policy) for shown, policy in policies.items()}
        rows = []
        for shown, run in runs.items():
            ratio, reach, met = run.cycles / dense, "", ""
            if run.kept >= LEAST_FRACTION:
                good = ratio <= run.kept + KEPT_MARGIN
                reach, met = f"≤ {run.kept + KEPT_MARGIN:.3f}", "yes" if good else "**no**"
                reached, asked = reached + good, asked + 1
                worst = max(worst, (ratio - run.kept, f"{name}, kept {shown}"))
            rows.append((shown, f"{run.cycles:,}", f"{ratio:.4f}", reach, met, f"{run.waits:,}", run.limit))
        rate, engine = layer.token_cycles
        first = next(iter(runs.values())).first
        rates.append(f"{name} {rate:.1f}, the engine alone {engine:.1f}")
        title = f"`{case.preset}`, L = {tokens}: dense {dense:,} cycles, first mask row after {first:,}"
        head = ("kept", "cycles", "÷ dense", "reach", "met", "array waits for later rows", "limit")
        sheets.append(Sheet(title, head, tuple(rows)))
        figures[name] = {
            "dense": dense, "first_row": first, "cycles_a_token": rate, "engine_cycles_a_token": engine,
            "runs": {shown: asdict(run) for shown, run in runs.items()},
        }  # fmt: skip
    return Measured(
        f"{reached} of {asked} points within f + {KEPT_MARGIN:g}; worst f + {worst[0]:.3f} ({worst[1]})",
        reached == asked,
        figures,
        (f"mask rows come every so many cycles a token of a head: {'; '.join(rates)}",),
        tuple(sheets),
    )


def crossing(fractions: Sequence[float], cycles: Sequence[int], base: int) -> float:
    """The largest kept fraction whose cycles are ``base``, between measured ones along a line; 0 if all take more."""
    points = sorted(zip(fractions, cycles, strict=True), reverse=True)
    if points[0][1] <= base:
        return points[0][0]
    for (high, more), (low, less) in pairwise(points):
        if less <= base:
            return low + (high - low) * (base - less) / (more - less)
    return 0.0


def break_even(bench: Bench, cases: Sequence[Case]) -> Measured:
    """The kept fraction at which gated Riemannian attention takes the cycles of dense dot-product attention.

    With the first field: all heads from idle. Without: the heads of a second layer behind a first one.
    """
    figures: dict[str, Any] = {}
    for name, case, tokens, layer in _layers(bench, cases, "break-even"):
        dot = quantise(case.config, _layer(case, tokens, "dot"))
        base = [int(predict(case.config, dot * layers).total_cycles) for layers in (1, 2)]
        runs = [[layer.run(layer.budget(f), layers).cycles for f in case.fractions] for layers in (1, 2)]
        second = [both - one for one, both in zip(*runs, strict=True)]
        figures[name] = {
            "with_first_field": crossing(case.fractions, runs[0], base[0]),
            "without_first_field": crossing(case.fractions, second, base[1] - base[0]),
            "dot_cycles": base[0],
        }
    each = (
        f"{n} {f['with_first_field']:.3f} with the first head's field, {f['without_first_field']:.3f} without"
        for n, f in figures.items()
    )
    return Measured(
        "; ".join(each),
        all(f["with_first_field"] >= LEAST_BREAK_EVEN for f in figures.values()),
        figures,
        ("with: all heads from idle; without: those of a second layer behind them, whose first field is hidden",),
    )


# ---- bits --------------------------------------------------------------------------------------------------


def gate_equal(bench: Bench, cases: Sequence[Case]) -> Measured:
    """Golden models: outputs, empty rows and counts behind open gates against those of dense attention."""
    outputs: dict[str, int] = {}
    jobs, wrong = 0, []
    for case in cases:
        config = case.config
        for number, workload in enumerate(case.workloads()):
            bench.progress(f"open gates = dense on {config.name}", number / (len(case.modes) * len(case.masks)))
            dense = quantise(config, workload)
            geometry = quantise_geometry(config, workload, Source.HOLONOMY, seed=case.seed)
            gate = GoldenGate(config).run(geometry, GatePolicy(theta=_ALL).settings(config, geometry))
            behind = gated_heads(config, [replace(head, job=replace(head.job, gated=True)) for head in dense], gate)
            for place, (head, other) in enumerate(zip(dense, behind, strict=True)):
                count, lines = compare_heads(config, head, other)
                outputs[config.name] = outputs.get(config.name, 0) + count
                wrong += [f"{config.name}, workload {number}, head {place}: {line}" for line in lines]
            jobs += len(dense)
    each = ", ".join(f"{name} {count:,}" for name, count in outputs.items())
    return Measured(
        f"{f'{len(wrong)} differences' if wrong else 'all equal'}: {sum(outputs.values()):,} outputs of {jobs} heads "
        f"({each})",
        not wrong and jobs > 0,
        {"outputs_compared": outputs, "heads": jobs, "differences": wrong[:20]},
        tuple(wrong[:5]),
    )


def compare_heads(config: Config, dense: Head, gated: Head) -> tuple[int, list[str]]:
    """Outputs of both golden models compared, and a line for each thing that differs."""
    one, two = golden(config, dense), gated_golden(config, gated, skipped=False)
    if one.outputs.shape != two.outputs.shape:
        return 0, [f"outputs {two.outputs.shape} instead of {one.outputs.shape}"]
    lines = []
    if differing := int((one.outputs != two.outputs).sum()):
        lines.append(f"{differing} of {one.outputs.size} outputs differ")
    if (one.empty_rows != two.empty_rows).any():
        lines.append("empty rows differ")
    for name in ("score_saturations", "lift_saturations", "output_saturations"):
        if getattr(one, name) != getattr(two, name):
            lines.append(f"{name} {getattr(two, name)} instead of {getattr(one, name)}")
    return one.outputs.size, lines


def drawn_gates(case: Case) -> Iterator[tuple[Workload, GatePolicy, float]]:
    """``count`` seeded workloads with their policy and their stalls, every second one with stalls.

    Modes, masks, sources and ways to gate are gone through in turn; sizes, thresholds and budgets are drawn.
    """
    config, rng = case.config, np.random.default_rng(case.seed)
    for number in range(case.count):
        tokens = int(rng.integers(2, max(case.tokens) + 1))
        made = masked_workload(
            config, mode=case.modes[number % len(case.modes)], mask=case.masks[number // 2 % len(case.masks)],
            tokens=tokens, width=int(rng.integers(min(case.width), max(case.width) + 1)),
            heads=int(rng.integers(1, case.heads + 1)), seed=case.seed + number, kept=case.kept, valid=case.valid,
            transport_rank=case.transport_rank, torsion=bool(rng.random() < 0.25),
        )  # fmt: skip
        blocks = config.blocks(tokens)
        table = rng.integers(0, _ALL + 1, (made.heads, blocks, blocks)).astype(np.uint16)
        source = (Source.HOLONOMY, Source.BOTH, Source.TABLE)[number % 3]
        ways: tuple[dict[str, Any], ...] = (
            {}, {"kept": float(rng.uniform(0.2, 0.9))}, {"theta": int(rng.integers(0, _ALL))},
            {"budget": int(rng.integers(1, blocks + 1))},
            {"band": (0, _ALL // 2)} if source is Source.TABLE else {"theta": int(rng.integers(0, _ALL // 8))},
        )  # fmt: skip
        policy = GatePolicy(source=source, seed=number, **ways[number // 3 % len(ways)])
        yield replace(made, scores=table, block=config.block), policy, case.stalls if number % 2 else 0.0


def gated_rtl(bench: Bench, cases: Sequence[Case]) -> Measured:
    """The gated top's Verilog: outputs, status records, registers; cycles of output beats where nothing stalls."""
    outputs = compared = still = skipped = 0
    kept: list[float] = []
    wrong: list[str] = []
    for case in cases:
        for number, (workload, policy, stalls) in enumerate(drawn_gates(case)):
            bench.progress(f"gated top on {case.preset}", number / case.count)
            found = cosim_gated(
                case.config, workload, policy, stalls=stalls, seed=case.seed + number, reference=False,
                cache_dir=bench.cache_dir,
            )  # fmt: skip
            lines = list(found.differences)
            if found.outputs_compared != workload.q.size:
                lines.append(f"{found.outputs_compared} outputs instead of {workload.q.size}")
            if not stalls and not found.cycles_equal and not lines:
                lines.append("other cycles than the model's")
            wrong += [f"{case.preset}, case {number}: {line}" for line in lines]
            outputs += found.outputs_compared
            compared += 1
            still += not stalls
            skipped += found.skipped_heads
            kept.append(found.kept_fraction)
    return Measured(
        f"{f'{len(wrong)} differences' if wrong else 'all equal'}: {outputs:,} outputs of {compared} cases; every "
        f"output beat of the {still} without stalls",
        not wrong and compared > 0,
        {"cases": compared, "outputs_compared": outputs, "cases_without_stalls": still, "skipped_heads": skipped,
         "kept_fraction": [min(kept, default=0.0), max(kept, default=0.0)], "differences": wrong[:20]},
        tuple(wrong[:5]),
    )  # fmt: skip


# ---- area --------------------------------------------------------------------------------------------------


def gated_area(bench: Bench, cases: Sequence[Case]) -> Measured:
    """LUT4, DSP and BRAM of the gated top beside the tile, both packed now; the clock of its committed report."""
    from tools.fpga import LFE5U_85F, load_committed, netlist_message, report_name, stale_message

    (case,) = cases
    config = case.config
    name = report_name(config.name, LFE5U_85F.speed, "gated")
    report = load_committed(name)
    if report is None:
        return Measured("not measured", False, {}, (f"no committed report {name}",))
    top, tile = (bench.packed(config, unit) for unit in (Unit.GATED, Unit.ATTENTION))
    stale = stale_message(report, config.hash) or netlist_message(report, top)
    ratio = top.lut4 / tile.lut4
    clock = "packed, not routed" if report.fmax_mhz is None else f"{report.fmax_mhz:.1f} MHz routed"
    clock += "" if stale is None else " (another netlist)"
    met = (
        report.routed and report.fmax_mhz is not None and report.fmax_mhz >= LEAST_MHZ and ratio <= LUT4_RATIO
        and top.dsp <= DSP_LIMIT and top.bram <= BRAM_LIMIT and stale is None
    )  # fmt: skip
    return Measured(
        f"{ratio:.3f} × the tile's LUT4 ({top.lut4:,} against {tile.lut4:,}), {top.dsp} DSP, {top.bram} BRAM, "
        f"{clock}, {report.device}",
        met,
        {"lut4": top.lut4, "lut4_tile": tile.lut4, "ratio": ratio, "dsp": top.dsp, "bram": top.bram,
         "fmax_mhz": report.fmax_mhz, "config_hash": report.config_hash},
        () if stale is None else (stale,),
    )  # fmt: skip


# ---- quality -----------------------------------------------------------------------------------------------


def pruning(bench: Bench, cases: Sequence[Case]) -> Measured:
    """Output error and accuracy at half of the blocks kept, from the study of the pruning quality."""
    from tools import pruning as study

    (case,) = cases
    if not study.RESULTS.exists():
        raise DtpError(f"pruning must have been measured: python -m tools.pruning writes {study.RESULTS.name}")
    points = [point for point in study.load().points if point.kept == case.kept]
    by_case: dict[str, list[str]] = {}
    for point in points:
        right = "" if point.accuracy is None else f" {100 * point.accuracy:.1f} %"
        by_case.setdefault(point.case, []).append(f"{point.source} {point.output_error:.2f}{right}")
    shown = next(iter(by_case), None)
    if shown is None:
        raise DtpError(f"pruning must have points with {case.kept:g} of the blocks kept, not none")
    return Measured(
        f"{100 * case.kept:g} % kept, {shown}: {', '.join(by_case[shown])}; all in `docs/pruning.md`",
        None,
        {f"{p.case}, {p.source}": {"output_error": p.output_error, "accuracy": p.accuracy} for p in points},
        tuple(f"{name}: {', '.join(line)}" for name, line in by_case.items()),
    )
