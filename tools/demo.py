"""``dtp demo``: real attention data through generated Verilog, and what it costs.

1. two layers of the committed digit classifier (Riemannian) and the committed extract of a sentence encoder (dot
   product) on ``ecp5-85k``: RTL against the golden model bit for bit, against the cycle model cycle for cycle, and
   against PyTorch;
2. the digit classifier with the processor's arithmetic, on some of the held-out images;
3. area and frequency of the committed place-and-route report, or of a fresh one;
4. attention gated by holonomy: a layer of the digit classifier with transports through the Verilog of the gated top,
   the classifier's accuracy with the gate's masks, and a picture of scores and masks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from dtp.config import Config
from dtp.gated import GoldenGate, quantise_geometry
from dtp.pruner import Source
from dtp.workload import Workload
from tools.fpga import load_committed, stale_message
from tools.gated import GatedCosimResult, GatePolicy, cosim_gated
from tools.gated_accuracy import GatedAccuracy
from tools.gated_picture import gated_picture
from tools.hardware_accuracy import HardwareAccuracy
from tools.verbs import DEFAULT_PRESET, INSTALL_REFERENCE, CosimResult, Progress, Result, cosim, fpga

ACCURACY_IMAGES = 100
"""Held-out images of the demo; ``python -m tools.hardware_accuracy`` takes all of them."""
GATED_LAYER = 0
"""Of the classifier with transports; the scores of its heads vary from block to block."""
PICTURE = Path("build") / "gated.svg"


@dataclass(frozen=True)
class DemoCase:
    """One workload of the demo and what became of it."""

    name: str
    result: CosimResult


@dataclass(frozen=True)
class GatedCase:
    """One way to the scores, and what became of the run."""

    name: str
    result: GatedCosimResult


@dataclass(frozen=True)
class GatedDemo:
    """Gated attention on the classifier that was trained with the holonomy loss.

    Parameters
    ----------
    image, layer: what the cases run
    theta: threshold in the registers, raw u2f14; that of ``layer`` in ``accuracy``
    cases: scores made in the run, and the same scores sent as a table
    accuracy: with the thresholds of all layers
    picture: scores and kept blocks of the cases
    """

    image: int
    layer: int
    theta: int
    cases: tuple[GatedCase, ...]
    accuracy: GatedAccuracy
    picture: Path


@dataclass(frozen=True, kw_only=True)
class DemoResult(Result):
    """Everything that the demo shows; figures without a case are sums, or the worst, over ``cases``.

    Parameters
    ----------
    passed, bit_exact: of all comparisons, the gated ones included
    gated: None without PyTorch
    lut4 … fmax_mhz: of the place-and-route report, None when there is none
    fpga_config_hash: configuration of the report; fpga_stale: one line when it is not this one, else None
    fpga_fresh: the report was made in this run
    notes: one line for each thing that could not be shown
    """

    passed: bool
    config: str
    config_hash: str
    cases: tuple[DemoCase, ...]
    bit_exact: bool
    outputs_compared: int
    cycles_rtl: int | None
    cycles_model: int
    macs: int
    array_utilisation: float
    sqnr_db: float | None
    sqnr_floor_db: float | None
    sim_cycles_per_s: float
    accuracy: HardwareAccuracy | None
    gated: GatedDemo | None
    lut4: int | None
    ff: int | None
    dsp: int | None
    bram: int | None
    fmax_mhz: float | None
    fpga_config_hash: str | None
    fpga_stale: str | None
    fpga_fresh: bool
    notes: tuple[str, ...]


def demo(
    *,
    run_fpga: bool = False,
    images: int = ACCURACY_IMAGES,
    picture: Path = PICTURE,
    cache_dir: Path | None = None,
    progress: Progress = lambda _what, _fraction: None,
) -> DemoResult:
    """Run the demo.

    Parameters
    ----------
    run_fpga : place and route again, which takes many minutes, instead of showing the committed report
    images : held-out digits for each accuracy
    picture : SVG to write, of the gate

    Raises
    ------
    MissingToolError
        A program of the co-simulation is not installed.
    """
    start = time.monotonic()
    config = Config.load(DEFAULT_PRESET)
    has_torch = find_spec("torch") is not None
    missing = "the digit classifier, the accuracy and gated attention are left out"
    notes = [] if has_torch else [f"{missing}; {INSTALL_REFERENCE}"]
    cases = []
    for name, workload in _workloads(has_torch):
        shown = partial(_named, progress, name)
        cases.append(DemoCase(name, cosim(config, workload, cache_dir=cache_dir, progress=shown)))
    accuracy = None
    if has_torch:
        from tools.hardware_accuracy import measure

        accuracy = measure(config, images, progress=progress)
    report: Any = fpga(config, progress=progress) if run_fpga else load_committed(config.name)
    if report is None:
        notes.append(f"no committed report of {config.name}; dtp fpga {config.name} --save makes it")
    gated = gated_demo(config, images, picture, cache_dir=cache_dir, progress=progress) if has_torch else None
    return _result(config, tuple(cases), accuracy, gated, report, run_fpga, notes, start)


def gated_demo(config: Config, images: int, picture: Path, *, cache_dir: Path | None, progress: Progress) -> GatedDemo:
    """The demo's gated part: accuracy and thresholds, then the first held-out image through the gated top.

    The same scores come in twice: made by the hardware in the run, and sent to it as a table, which shows what
    attention over the kept blocks takes when scores cost nothing.

    Raises
    ------
    MissingToolError
        A program of the co-simulation is not installed.
    """
    from dtp.reference.digits import DigitModel, split
    from tools.gated_accuracy import measure, threshold_settings
    from tools.workloads import digits_workload

    accuracy = measure(config, images, progress=progress)
    image, theta = int(split()[1][0]), accuracy.thresholds[GATED_LAYER]
    workload = digits_workload([image], GATED_LAYER, model=DigitModel.HOLONOMY)
    gate = GoldenGate(config).run(quantise_geometry(config, workload, Source.HOLONOMY), threshold_settings(theta))
    gated_picture(gate, config.block, picture)
    sent = replace(workload, scores=np.asarray(gate.holonomy, dtype=np.uint16), block=config.block)
    cases = []
    for name, given, source in (
        ("scores of the run", workload, Source.HOLONOMY),
        ("the same, sent", sent, Source.TABLE),
    ):
        shown = partial(_named, progress, f"gated attention, {name}")
        policy = GatePolicy(source=source, theta=theta)
        result = cosim_gated(config, given, policy, reference=False, cache_dir=cache_dir, progress=shown)
        cases.append(GatedCase(name, result))
    return GatedDemo(image, GATED_LAYER, theta, tuple(cases), accuracy, picture)


def _named(progress: Progress, name: str, what: str, fraction: float | None) -> None:
    progress(f"{name}: {what}", fraction)


def _workloads(has_torch: bool) -> list[tuple[str, Workload]]:
    from tools.workloads import digits_workload, minilm_extract

    found = []
    if has_torch:
        from dtp.reference.digits import split

        image = int(split()[1][0])
        found = [(f"digits, layer {layer}", digits_workload([image], layer)) for layer in (0, 1)]
    return [*found, ("MiniLM extract", minilm_extract())]


def _worst(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None


def _result(
    config: Config,
    cases: tuple[DemoCase, ...],
    accuracy: HardwareAccuracy | None,
    gated: GatedDemo | None,
    report: Any,
    fresh: bool,
    notes: list[str],
    start: float,
) -> DemoResult:
    results = [case.result for case in cases]
    cycles = [result.cycles_rtl for result in results]
    total = sum(count for count in cycles if count is not None)
    macs = sum(result.macs for result in results)
    compared = [*results, *(case.result for case in (gated.cases if gated else ()))]
    passed = all(result.passed for result in compared) and (accuracy is None or accuracy.passed)
    return DemoResult(
        passed=passed,
        config=config.name,
        config_hash=config.hash,
        cases=cases,
        bit_exact=all(result.bit_exact for result in compared),
        outputs_compared=sum(result.outputs_compared for result in results),
        cycles_rtl=None if None in cycles else total,
        cycles_model=sum(result.cycles_model for result in results),
        macs=macs,
        array_utilisation=0.0 if None in cycles else macs / (total * config.macs),
        sqnr_db=_worst([result.sqnr_db for result in results]),
        sqnr_floor_db=_worst([result.sqnr_floor_db for result in results]),
        sim_cycles_per_s=min(result.sim_cycles_per_s for result in results),
        accuracy=accuracy,
        gated=gated,
        lut4=None if report is None else report.lut4,
        ff=None if report is None else report.ff,
        dsp=None if report is None else report.dsp,
        bram=None if report is None else report.bram,
        fmax_mhz=None if report is None else report.fmax_mhz,
        fpga_config_hash=None if report is None else report.config_hash,
        fpga_stale=None if report is None else stale_message(report, config.hash),
        fpga_fresh=fresh,
        notes=tuple(notes),
        wall_s=time.monotonic() - start,
    )
