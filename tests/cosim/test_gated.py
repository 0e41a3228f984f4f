"""The gated top's Verilog on Verilator: registers, runs and jobs in, golden models and cycle models beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtp.config import Config
from dtp.gated import gated_golden
from dtp.pruner import Source
from dtp.registers import gated_registers
from dtp.workload import Mode
from tests.gated import CONFIGS, workload
from tests.tile import lint
from tools.gated import GatePolicy, cosim_gated
from tools.verbs import generate

CASES: dict[str, tuple[dict[str, Any], GatePolicy]] = {
    "threshold": ({"mode": Mode.RIEMANNIAN}, GatePolicy(kept=0.5)),
    "open": ({"mode": Mode.BLENDED, "kept": 0.7}, GatePolicy()),
    "table": ({"causal": True, "transport_rank": 0}, GatePolicy(source=Source.TABLE, kept=0.4)),
    "both-budget": ({"mode": Mode.EUCLIDEAN, "causal": True}, GatePolicy(source=Source.BOTH, weight=5, budget=2)),
    "skipped": ({"mode": Mode.DOT}, GatePolicy(source=Source.TABLE, band=(0, 32000))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_bit_and_cycle(name: str, case: str) -> None:
    config = CONFIGS[name]
    changes, policy = CASES[case]
    tokens = 2 * config.block + 5
    heads = 5 if case == "threshold" else 3  # from the third head on a pass has both slots
    made = workload(config, list(CASES).index(case), tokens=tokens, heads=heads, valid_length=tokens - 4, **changes)
    still = cosim_gated(config, made, policy)
    assert still.differences == ()
    assert still.cycles_equal and still.cycles_rtl == still.cycles_model
    assert still.outputs_compared == made.q.size
    stalled = cosim_gated(config, made, policy, stalls=0.25, seed=1, reference=False)
    assert stalled.differences == ()
    assert stalled.cycles_rtl is not None and stalled.cycles_rtl > still.cycles_rtl
    if case == "open":
        assert still.kept_blocks == still.legal_blocks and still.output_error == 0
    if case == "skipped":
        assert 0 < still.skipped_heads < 3


def test_torsion_takes_two_groups_of_columns() -> None:
    config = Config.load("tiny")
    made = workload(config, 9, tokens=17, heads=2, torsion=True)
    result = cosim_gated(config, made, GatePolicy(kept=0.6))
    assert result.passed and result.cycles_equal


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong mask, register or cycle in the expectation fails the comparison."""
    import tools.gated as verb

    config = Config.load("tiny")
    made = workload(config, 11, tokens=20, heads=2)
    exact = verb.gated_models

    def wrong_register(*args: Any, **options: Any) -> Any:
        found = exact(*args, **options)
        return replace(found, gate=replace(found.gate, kept=found.gate.kept + 1))

    monkeypatch.setattr(verb, "gated_models", wrong_register)
    result = cosim_gated(config, made, GatePolicy(kept=0.5))
    kept = result.kept_blocks
    assert result.differences == (f"register kept: count is {kept - 1} in RTL, {kept} in golden",)

    def wrong_mask(*args: Any, **options: Any) -> Any:
        found = exact(*args, **options)
        head = found.models.heads[0]
        mask = np.array(head.block_mask)
        mask[0, 1] = not mask[0, 1]
        first = gated_golden(config, replace(head, block_mask=mask), skipped=False)
        return replace(found, models=replace(found.models, golden=(first, *found.models.golden[1:])))

    monkeypatch.setattr(verb, "gated_models", wrong_mask)
    result = cosim_gated(config, made, GatePolicy(kept=0.5))
    assert not result.bit_exact and "outputs differ" in result.differences[0]


def test_registers_come_with_the_verilog(tmp_path: Path) -> None:
    config = Config.load("tiny")
    result = generate(config, tmp_path / "gated", unit="gated")
    assert [file.name for file in result.files] == [
        "top.v", "manifest.json", "config.toml", "registers.h", "registers.json",
    ]  # fmt: skip
    described = gated_registers(config)
    assert (tmp_path / "gated" / "registers.h").read_text(encoding="utf-8") == described.to_c_header()
    assert (tmp_path / "gated" / "registers.json").read_text(encoding="utf-8") == described.to_json()
    assert lint(tmp_path / "gated" / "top.v") == ""
