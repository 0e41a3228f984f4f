"""Gated attention as a verb: the policy, the models' figures, and what the command says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtp.config import Config
from dtp.errors import DtpError
from dtp.gated import quantise_geometry
from dtp.pruner import Gate, Source
from dtp.workload import Workload
from tests.gated import workload
from tools.cli import main
from tools.gated import GatedSimulateResult, GatePolicy, gated_models, register_writes, simulate_gated
from tools.verbs import simulate, workload_random

TINY = Config.load("tiny")


def test_policies_become_settings() -> None:
    made = workload(TINY, 1, tokens=32, heads=2)
    both = quantise_geometry(TINY, made, Source.BOTH)
    for policy, wanted in (
        (GatePolicy(source=Source.BOTH), (Gate.THRESHOLD, 65535, 0, 8)),
        (GatePolicy(source=Source.BOTH, weight=3, theta=77), (Gate.THRESHOLD, 77, 0, 3)),
        (GatePolicy(source=Source.BOTH, budget=2), (Gate.BUDGET, 0, 2, 8)),
    ):
        settings = policy.settings(TINY, both)
        assert (settings.gate, settings.theta_high, settings.budget, settings.weight) == wanted
    banded = GatePolicy(source=Source.BOTH, band=(1, 2)).settings(TINY, both)
    assert (banded.band_low, banded.band_high) == (1, 2)
    addresses = [address for address, _ in register_writes(TINY, banded)]
    assert len(set(addresses)) == len(addresses) == 5


@pytest.mark.parametrize("source", Source)
@pytest.mark.parametrize("kept", [0.4, 0.7])
def test_one_threshold_keeps_the_fraction(source: Source, kept: float) -> None:
    made = workload(TINY, 2, tokens=64, heads=3)
    result = simulate_gated(TINY, made, GatePolicy(source=source, kept=kept), reference=False)
    # Symmetric scores of the field come in pairs, and the diagonal stays.
    assert abs(result.kept_fraction - kept) <= 2 / result.legal_blocks + (0.01 if source is Source.HOLONOMY else 0)


def test_what_is_wrong_with_the_scores_is_said() -> None:
    """Transports out of range, too strong for their factors, too weak for a score; a head that pairs with itself."""
    made = workload(TINY, 5, tokens=40, heads=2)
    assert made.connection_a is not None and made.connection_b is not None

    def scaled(factor: float) -> Workload:
        columns = {name: getattr(made, name) * np.float32(factor) for name in ("connection_a", "connection_b")}
        return replace(made, **columns)

    def simulated(given: Workload) -> GatedSimulateResult:
        return simulate_gated(TINY, given, GatePolicy(kept=0.5), reference=False)

    assert simulated(made).remarks == simulated(made).transport_errors == ()
    strong = simulated(scaled(30))
    assert strong.transport_errors == ("range",) and "left their range" in strong.remarks[0]
    for given in (scaled(0.001), workload(TINY, 5, tokens=40, heads=1)):
        assert "all scores of holonomy are equal" in simulated(given).remarks[0]
    with pytest.raises(DtpError, match=r"^Workload\.connection_a must be .* weak enough for factor_bits 8"):
        simulated(scaled(1000))


def test_figures() -> None:
    made = workload(TINY, 3, tokens=40, heads=2, mode="riemannian")
    dense = simulate(TINY, made, reference=False)
    whole = simulate_gated(TINY, made, GatePolicy(), reference=False)
    half = simulate_gated(TINY, made, GatePolicy(kept=0.5), reference=False)
    assert whole.output_error == 0 and whole.kept_fraction == 1 and whole.skipped_heads == 0
    assert whole.cycles_dense == half.cycles_dense == dense.cycles_model
    assert whole.cycles_ratio == whole.cycles_model / dense.cycles_model
    assert whole.array_busy_cycles == dense.array_busy_cycles
    assert whole.array_start_cycle > dense.array_start_cycle > 0
    assert half.array_busy_cycles < dense.array_busy_cycles and half.output_error > 0
    assert half.workload.kept_fraction == pytest.approx(half.kept_fraction)
    skipped = simulate_gated(TINY, made, GatePolicy(band=(0, 0)), reference=False)
    assert skipped.skipped_heads == 2 and skipped.kept_blocks == 0 and skipped.output_error == 1


def test_models_hold_the_masks_that_the_walk_sees() -> None:
    made = workload(TINY, 4, tokens=40, heads=2, kept=0.8)
    found = gated_models(
        TINY, made, GatePolicy(kept=0.6), reference=False, progress=lambda _what, _fraction: None
    )
    assert made.block_mask is not None
    for head, mask, own in zip(found.models.heads, found.gate.masks, made.block_mask, strict=True):
        assert (np.asarray(head.block_mask) == (mask & own)).all()
        assert head.job.gated


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (GatePolicy(kept=0.5, theta=3), r"^GatePolicy\.kept must be absent where theta is given, not 0\.5$"),
        (GatePolicy(weight=3), r"^PrunerSettings\.weight must be 0 without source BOTH, not 3$"),
        (GatePolicy(budget=9), r"^GatePolicy\.budget must be in 1…8, not 9$"),
        (GatePolicy(theta=-1), r"^GatePolicy\.theta must be in 0…65535, not -1$"),
        (GatePolicy(kept=0.0), r"^GatePolicy\.kept must be more than 0 and at most 1, not 0\.0$"),
    ],
)
def test_policies_that_are_refused(policy: GatePolicy, message: str) -> None:
    with pytest.raises(DtpError, match=message):
        simulate_gated(TINY, workload(TINY, 5, tokens=16, heads=1), policy, reference=False)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "w.safetensors", tmp_path / "r.json"
    workload_random(path, tokens=24, width=16, heads=2, transport_rank=2)
    arguments = ["simulate", "tiny", str(path), "--unit", "gated", "--budget", "2", "--json", str(out)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "kept, by holonomy" in shown and "12 of 18 blocks" in shown
    assert json.loads(out.read_text())["kept_blocks"] == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kept", "0.5"], "dtp.--kept must be absent without --unit gated, not 0.5"),
        (["--unit", "pruner"], "dtp.--unit must be one of attention, gated, loops, commutator, not 'pruner'"),
        (["--unit", "gated", "--source", "x"], "dtp.--source must be one of holonomy, table, both, not 'x'"),
        (["--unit", "gated", "--source", "table"], "Workload.scores must be there for scores of a table, not None"),
    ],
)
@pytest.mark.parametrize("verb", ["simulate", "cosim"])
def test_options_that_are_refused(
    verb: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.safetensors"
    workload_random(path, tokens=16, width=16, heads=1, transport_rank=2)
    assert main([verb, "tiny", str(path), *options]) == 2
    assert capsys.readouterr().err == f"dtp: {message}\n"
