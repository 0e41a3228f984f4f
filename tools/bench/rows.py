"""The rows of the bench: what is measured, what it must reach, and why that number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dtp.config import Config
from dtp.units import Unit
from tools.bench import accuracy, commutator, gated, hardware, holonomy, install
from tools.bench.cases import Case
from tools.bench.measured import Bench, Measured
from tools.fpga import SPEED_GRADES, FpgaReport, load_committed, netlist_message, report_name, stale_message

LUT4_PER_MAC = 85
DSP_LIMIT = 138
LEAST_MHZ = 100.0


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Parameters
    ----------
    name: on the command line and in ``tools/cases.toml``
    what: is measured
    reach: what it must reach
    why: that number
    measure: does it, on the row's cases
    budget: what ``docs/budget.md`` says about it, None where it says nothing
    install: measured on a fresh clone, with ``--install`` alone
    """

    name: str
    what: str
    reach: str
    why: str
    measure: Callable[[Bench, Sequence[Case]], Measured]
    budget: str | None = None
    install: bool = False


def _report(bench: Bench, config: Config) -> tuple[FpgaReport | None, tuple[str, ...]]:
    """The place-and-route report that counts, and why it does not."""
    from tools.verbs import fpga

    found: FpgaReport | None
    if bench.run_fpga:
        found = fpga(config, save=True, progress=bench.progress)
        bench.run_fpga = False  # the other rows read what was just written
    else:
        found = load_committed(config.name)
    if found is None:
        return None, (f"no committed report: dtp fpga {config.name} --save",)
    stale = stale_message(found, config.hash) or netlist_message(found, bench.packed(config, Unit.ATTENTION))
    return found, () if stale is None else (stale,)


def _fpga(bench: Bench, cases: Sequence[Case], figure: str) -> Measured:
    (case,) = cases
    config = case.config
    report, notes = _report(bench, config)
    if report is None:
        return Measured("not measured", False, {}, notes)
    good = not notes and report.device.startswith("LFE5U-85F")
    packed = bench.packed(config, Unit.ATTENTION)
    if figure == "clock":
        met = report.routed and report.fmax_mhz is not None and report.fmax_mhz >= LEAST_MHZ
        clock = "packed, not routed" if report.fmax_mhz is None else f"{report.fmax_mhz:.1f} MHz routed"
        text = f"{clock}, {report.device}" + (f", seed {report.seed}" if report.routed else "")
        slow = load_committed(report_name(config.name, SPEED_GRADES[0]))
        if slow is not None and slow.fmax_mhz is not None and stale_message(slow, config.hash) is None:
            text += f"; {slow.fmax_mhz:.1f} MHz routed on speed grade {SPEED_GRADES[0]}"
    elif figure == "lut4":
        met = packed.lut4 <= LUT4_PER_MAC * config.macs
        text = f"{packed.lut4 / config.macs:.1f} ({packed.lut4:,} LUT4)"
    else:
        met = packed.dsp <= DSP_LIMIT
        text = f"{packed.dsp}"
    figures = {
        "lut4": packed.lut4,
        "ff": packed.ff,
        "dsp": packed.dsp,
        "bram": packed.bram,
        "fmax_mhz": report.fmax_mhz,
        "config_hash": report.config_hash,
        "seed": report.seed,
        "per_unit": {unit: dataclasses.asdict(used) for unit, used in packed.per_unit.items()},
    }
    return Measured(text, bool(met and good), figures, notes)


def fpga_clock(bench: Bench, cases: Sequence[Case]) -> Measured:
    """Routed clock of the committed report, of this very configuration and netlist."""
    return _fpga(bench, cases, "clock")


def fpga_lut4(bench: Bench, cases: Sequence[Case]) -> Measured:
    """LUT4 of the whole tile, packed now, ÷ MACs of the array."""
    return _fpga(bench, cases, "lut4")


def fpga_dsp(bench: Bench, cases: Sequence[Case]) -> Measured:
    """18×18 multipliers of the whole tile, packed now."""
    return _fpga(bench, cases, "dsp")


ROWS = (
    Row(
        "demo-cold", "fresh clone → `make demo`", "green, ≤ 10 min with installs", "a newcomer's patience",
        install.demo_cold, install=True,
    ),
    Row("demo-warm", "`make demo` again", "green, ≤ 2 min", "a newcomer's patience", install.demo_warm, install=True),
    Row(
        "test", "fresh clone → `make test`", "green, ≤ 20 min on 2 cores", "15 min for the tile, 20 with all units",
        install.test, install=True,
    ),
    Row(
        "rtl-golden", "RTL = golden model, random stalls on every stream",
        "every output bit, all modes, all masks, three presets",
        "a published peer gives 24 wrong vectors of 2048 under Verilator", hardware.rtl_golden,
    ),
    Row(
        "cycle-model", "cycle model = RTL", "every output beat, ≥ 200 random (configuration, shape, mask) cases", "",
        hardware.cycle_model,
    ),
    Row(
        "utilisation-streaming", "array utilisation, `wide`, dot product, 8 heads back to back", "≥ 99 %",
        "ITA measured: 99.95 % streaming", hardware.utilisation_streaming, "8 × 2,048 cycles + about 60",
    ),
    Row(
        "utilisation-idle", "array utilisation, `wide`, dot product, one head from idle", "≥ 96.5 %",
        "ITA measured: 97.0 % from idle", hardware.utilisation_idle, "2,048 cycles + about 60",
    ),
    Row(
        "riemannian-ecp5", "R = 3 Riemannian, `ecp5-85k`, 8 heads back to back: array utilisation", "≥ 97 %",
        "(80 + 64) / 128 = 1.125 times the dot product's steps, and nothing else", hardware.riemannian_ecp5,
        "8 × 18,432 cycles",
    ),
    Row(
        "riemannian-wide", "R = 3 Riemannian, `wide`, 8 heads back to back: cycles ÷ dot-product cycles", "≤ 1.15",
        "1.125 with an adder tree that can be split", hardware.riemannian_wide, "18,780 cycles",
    ),
    Row(
        "masked-ecp5", "half of the blocks masked at random, `ecp5-85k`: cycles ÷ dense cycles", "≤ 0.52",
        "zero-bubble walk", hardware.masked_ecp5, "0.5, the walk adds nothing",
    ),
    Row(
        "masked-wide", "half of the blocks masked at random, `wide`: cycles ÷ dense cycles", "≤ 0.55",
        "P·V needs the split tree too", hardware.masked_wide, "0.5, the walk adds nothing",
    ),
    Row(
        "accuracy-dot", "accuracy, int8, dot product, worst head of MiniLM",
        "within 0.5 dB of the quantisation floor", "", accuracy.accuracy_dot,
    ),
    Row(
        "accuracy-riemannian", "accuracy, int8, Riemannian, worst head of digits",
        "within 1 dB of the quantisation floor", "", accuracy.accuracy_riemannian,
    ),
    Row(
        "softmax-workloads", "golden p/Σp against the float softmax of the same scores, committed workloads",
        "largest error < 0.01", "ITA's softmax: error 0.031, row sums down to 0.77", accuracy.softmax_workloads,
    ),
    Row(
        "softmax-laplace", "the same on 50 seeded rows of 512 Laplace(2) scores", "largest error < 0.01",
        "ITA's softmax: error 0.031, row sums down to 0.77", accuracy.softmax_laplace,
    ),
    Row(
        "softmax-worst", "the same, worst case: one key over 511 equal ones", "printed for p of 12, 14 and 16 bits", "",
        accuracy.softmax_worst,
    ),
    Row(
        "digits-accuracy", "FBT digits with the hardware's arithmetic in all attention layers, held out",
        "within 0.5 points of float", "", accuracy.digits_accuracy,
    ),
    Row(
        "gated-rtl", "the gated top: RTL = golden model = cycle model",
        "every output bit, every register, every output beat without stalls", "", gated.gated_rtl,
    ),
    Row(
        "gate-equal", "all gates open: golden outputs against dense attention", "every bit", "", gated.gate_equal,
    ),
    Row(
        "gate-open", "`ecp5-85k`, all gates open: cycles ÷ the same attention without gating", "≤ 1.05",
        "the gate works beside the array; the first head's field alone is waited for", gated.gate_open,
        "margin 7,500 cycles at L = 128, 29,500 at 256, and 2,900, 5,400 of a dense start; first field 12,300, 24,100",
    ),
    Row(
        "gate-cycles",
        "gated Riemannian attention, 8 heads, 4 columns, kept fraction f: cycles ÷ dense, first field included",
        "≤ f + 0.05 for f from 0.5 on", "below, the gate becomes the limit", gated.gate_cycles,
        "`ecp5-85k`: the engine keeps up down to f = 0.45, behind the first head 0.77",
    ),
    Row(
        "break-even", "kept fraction at which gated Riemannian attention costs the same as dense dot-product attention",
        "≥ 0.8, first field included", "claim 2 of the design: net cost neutral or lower", gated.break_even,
        "8 / 9 without the first field",
    ),
    Row(
        "gated-area", "the whole gated top on an LFE5U-85F",
        "≤ 1.6 × the tile's LUT4, ≤ 156 DSP, ≤ 208 BRAM, ≥ 100 MHz routed", "", gated.gated_area,
        "156 DSP, 17,300 LUT4",
    ),
    Row(
        "holonomy-score", "block scores against the exact mean over all pairs in float64, trained transports",
        "equal but for rounding; correlation ≥ 0.99 in every head", "", holonomy.holonomy_score,
    ),
    Row(
        "holonomy-loops", "loop energies Hol² ≥ 1e-3 against float64, trained transports",
        "int16: ≤ 1 %; int8: median ≤ 3 %, worst ≤ 10 %; never negative; agreeing heads ≤ 1e-4, 1e-3", "",
        holonomy.holonomy_loops,
    ),
    Row(
        "gauge", "the same frame turned in both heads, int16: change of a loop's energy",
        "`frame` ≤ 1 %, `destination` ≥ 10 % in the median", "", holonomy.gauge,
    ),
    Row(
        "commutator", "commutator kernel: extra array cycles ÷ (named multiplications ÷ MACs)", "≤ 1.05, both modes",
        "claim 1 of the design: a constant factor over the plain layer", commutator.commutator, "1",
    ),
    Row(
        "pruning", "quality of pruning by source, half of the blocks kept: output error, accuracy", "printed", "",
        gated.pruning,
    ),
    Row(
        "fpga-clock", "`ecp5-85k` through place and route: clock", "LFE5U-85F, ≥ 100 MHz routed",
        "a plain 4×4 Amaranth array routes at 91 MHz", fpga_clock,
    ),
    Row(
        "fpga-lut4", "`ecp5-85k` through place and route: LUT4 a MAC", "≤ 85",
        "ITA 69.6, spread over 8 times as many MACs", fpga_lut4, "10,600 LUT4 = 82.8",
    ),
    Row("fpga-dsp", "`ecp5-85k` through place and route: DSPs of the tile", "≤ 138", "ITA 1.12 a MAC", fpga_dsp, "138"),
    Row(
        "model-speed", "cycle model against Verilator, L = 512, 8 heads, build excluded", "≥ 100 × faster", "",
        hardware.model_speed,
    ),
    Row(
        "cosim-speed", "co-simulation against a bare C++ harness, `ecp5-85k`, 8 heads, build and start excluded",
        "≥ 0.5 × its rate", "", hardware.cosim_speed,
    ),
)  # fmt: skip
