"""What the demo's gated part is made of: the classifier behind the gate, the two ways to the scores, the picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtp.config import Config
from dtp.errors import DtpError
from dtp.gated import GateResult, GoldenGate, quantise_geometry
from dtp.pruner import Source
from dtp.workload import Workload
from tests.gated import workload
from tools import demo, docs, gated_accuracy
from tools.gated import GatedCosimResult, GatePolicy, simulate_gated
from tools.gated_accuracy import GatedAccuracy, measure, threshold_settings
from tools.gated_picture import gated_picture

TINY, ECP5 = Config.load("tiny"), Config.load("ecp5-85k")
OPEN = 65535


def gate_of(config: Config, made: Workload, theta: int) -> GateResult:
    return GoldenGate(config).run(quantise_geometry(config, made, Source.HOLONOMY), threshold_settings(theta))


# ---- accuracy


def test_open_gates_answer_as_dense_attention_does() -> None:
    pytest.importorskip("torch")
    found = measure(ECP5, 6, kept=1.0, training_images=1, batch=4)
    assert found.thresholds == (OPEN, OPEN)
    assert found.kept_fraction == 1 and found.kept_by_layer == (1.0, 1.0)
    assert found.changed == 0 and found.gated_accuracy == found.dense_accuracy
    assert (found.images, found.held_out) == (6, 899)


def test_thresholds_keep_the_fraction_of_the_images_they_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on the training images themselves, in batches of another size, both layers gated."""
    pytest.importorskip("torch")
    from dtp.reference import digits

    training, held_out = digits.split()
    monkeypatch.setattr(digits, "split", lambda: (training, np.concatenate([training[:5], held_out])))
    found = measure(ECP5, 5, kept=0.6, training_images=5, batch=3)
    # Two symmetric tables a layer: scores of the field come in pairs.
    assert [round(kept * 5 * 32) for kept in found.kept_by_layer] == pytest.approx([96, 96], abs=2)
    assert found.kept_fraction == pytest.approx(np.mean(found.kept_by_layer))
    assert all(0 < theta < OPEN for theta in found.thresholds)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"images": 900}, r"gated_accuracy\.images must be an integer in 1\.\.899, not 900"),
        ({"training_images": 0}, r"gated_accuracy\.training_images must be an integer in 1\.\.898, not 0"),
        ({"kept": 1.5, "training_images": 1}, r"threshold_for\.kept must be more than 0 and at most 1, not 1\.5"),
    ],
)
def test_what_accuracy_refuses(given: dict[str, Any], message: str) -> None:
    pytest.importorskip("torch")
    with pytest.raises(DtpError, match=message):
        measure(ECP5, **({"images": 1} | given))


def test_accuracy_as_a_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {}

    def measured(config: Config, images: int | None, **others: Any) -> GatedAccuracy:
        asked.update(others, config=config.name, images=images)
        return GatedAccuracy("tiny", 0.5, 32, (1, 2), 3, 899, 0.5, (0.4, 0.6), 0.9, 0.8, 0.7, 1, 2.0)

    monkeypatch.setattr(gated_accuracy, "measure", measured)
    assert gated_accuracy.main(["--config", "tiny", "--images", "3", "--kept", "0.5"]) == 0
    assert asked == {"config": "tiny", "images": 3, "kept": 0.5}
    assert "gated 0.7000 at 0.5000 of the blocks (0.4000, 0.6000)" in capsys.readouterr().out
    assert gated_accuracy.main(["--config", "none"]) == 2
    assert capsys.readouterr().err.startswith("gated_accuracy: ")


# ---- the demo's cases


def test_scores_made_and_scores_sent_keep_the_same_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden and cycle models in the place of the Verilog."""
    pytest.importorskip("torch")

    def cosim(config: Config, made: Workload, policy: GatePolicy, **_: Any) -> GatedCosimResult:
        model = simulate_gated(config, made, policy, reference=False)
        known = {field.name: getattr(model, field.name) for field in fields(model)}
        return GatedCosimResult(
            **known, bit_exact=True, outputs_compared=1, cycles_rtl=model.cycles_model, cycles_equal=True,
            differences=(), stall_probability=0.0, seed=0, sim_cycles=1, sim_cycles_per_s=1.0, waves=None,
        )  # fmt: skip

    accuracy = GatedAccuracy("ecp5-85k", 0.75, 32, (1950, 3500), 1, 899, 0.7, (0.7, 0.7), 1.0, 1.0, 1.0, 0, 1.0)
    monkeypatch.setattr(demo, "cosim_gated", cosim)
    monkeypatch.setattr(gated_accuracy, "measure", lambda *_, **__: accuracy)
    picture = tmp_path / "new" / "gate.svg"
    found = demo.gated_demo(ECP5, 1, picture, cache_dir=None, progress=lambda _what, _fraction: None)
    made, sent = (case.result for case in found.cases)
    assert (made.source, sent.source) == ("holonomy", "table")
    assert found.theta == 1950 and picture.is_file()
    assert made.kept_blocks == sent.kept_blocks and 0.5 <= made.kept_fraction <= 0.75
    assert made.output_error == sent.output_error > 0
    assert made.cycles_dense == sent.cycles_dense
    # Scores that are there cost nothing; two heads of 64 tokens do not hide those that are made.
    assert sent.cycles_model < sent.cycles_dense < made.cycles_model


# ---- picture


def texts(path: Path) -> list[str]:
    return [(element.text or "").strip() for element in ElementTree.parse(path).iter() if element.text]


def test_the_picture_shows_scores_and_counts_of_every_head(tmp_path: Path) -> None:
    gate = gate_of(TINY, workload(TINY, 4, tokens=32, heads=3), 4000)
    path = tmp_path / "a" / "b" / "gate.svg"
    gated_picture(gate, TINY.block, path)
    shown = texts(path)
    assert gate.holonomy is not None
    for head, mask in enumerate(gate.masks):
        assert f"head {head}: {int(mask.sum())} of 16 blocks kept" in shown
    wanted = sorted(f"{score / 16384:.2f}" for score in gate.holonomy.ravel())
    assert sorted(text for text in shown if text.count(".") == 1 and len(text) == 4) == wanted
    assert [entry.name for entry in path.parent.iterdir()] == ["gate.svg"]


def test_equal_gates_give_equal_pictures(tmp_path: Path) -> None:
    made = workload(TINY, 5, tokens=24, heads=2)
    first, again, other = (tmp_path / f"{name}.svg" for name in "abc")
    gated_picture(gate_of(TINY, made, 3000), TINY.block, first)
    gated_picture(gate_of(TINY, made, 3000), TINY.block, again)
    gated_picture(gate_of(TINY, made, OPEN), TINY.block, other)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_what_the_picture_refuses(tmp_path: Path) -> None:
    gate = gate_of(TINY, workload(TINY, 6, tokens=16, heads=1), 100)
    with pytest.raises(DtpError, match="with scores of holonomy"):
        gated_picture(replace(gate, holonomy=None), TINY.block, tmp_path / "x.svg")
    (tmp_path / "file").write_text("")
    with pytest.raises(DtpError, match="cannot be written"):
        gated_picture(gate, TINY.block, tmp_path / "file" / "x.svg")


def test_the_committed_picture_is_one_of_the_demo() -> None:
    shown = texts(docs.ROOT / "docs" / "images" / "gated.svg")
    for head in range(2):
        assert any(text.startswith(f"head {head}: ") and text.endswith(" of 16 blocks kept") for text in shown)
