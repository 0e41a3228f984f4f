"""The digit classifier with attention gated by holonomy, in the processor's arithmetic.

    python -m tools.gated_accuracy                # all held-out images on ecp5-85k
    python -m tools.gated_accuracy --images 100   # the first hundred of them
    python -m tools.gated_accuracy --kept 0.5

The model is the one that was trained with the holonomy loss. Each layer has one threshold, that which keeps the wanted
fraction of the blocks of some training images, layer after layer, the layers before gated as well. Scores, masks and
attention are those of the golden models, which the Verilog equals bit for bit, for each image by itself. Everything
around them stays float64.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dtp.attention import golden
from dtp.config import Config
from dtp.errors import DtpError, must
from dtp.gated import (
    GateResult,
    Geometry,
    GoldenGate,
    gated_golden,
    gated_heads,
    holonomy_scores,
    quantise_geometry,
    threshold_for,
)
from dtp.pruner import PrunerSettings, Source, legal_blocks
from dtp.quantise import quantise
from dtp.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor

    from dtp.reference.fbt import AttentionCore, FbtClassifier, LayerRun

KEPT = 0.75
"""Fraction of the blocks that the thresholds keep of the training images."""
TRAINING_IMAGES = 32
"""Training images that the thresholds are made of."""


@dataclass(frozen=True)
class GatedAccuracy:
    """Held-out accuracy with and without the gate.

    Parameters
    ----------
    wanted, training_images: the fraction that the thresholds keep, and of how many training images
    thresholds: of each layer, raw u2f14
    images, held_out: images measured, and how many are held out in all
    kept_fraction: kept ÷ legal blocks over images and layers; kept_by_layer: the same of each layer
    float_accuracy: dense, in float
    dense_accuracy, gated_accuracy: with the processor's arithmetic, without and with the gate
    changed: images whose answer differs between the last two
    wall_s: seconds
    """

    config: str
    wanted: float
    training_images: int
    thresholds: tuple[int, ...]
    images: int
    held_out: int
    kept_fraction: float
    kept_by_layer: tuple[float, ...]
    float_accuracy: float
    dense_accuracy: float
    gated_accuracy: float
    changed: int
    wall_s: float


def threshold_settings(theta: int, source: Source = Source.HOLONOMY) -> PrunerSettings:
    """One threshold, without hysteresis."""
    return PrunerSettings.open(source).changed(theta_low=theta, theta_high=theta)


class _Classifier:
    """The classifier with integer attention; the gate's thresholds, one a layer, are found or given."""

    def __init__(self, config: Config, model: FbtClassifier) -> None:
        self._config, self._model = config, model
        self.thresholds: list[int] = []
        self.kept = np.zeros(model.config.layers, dtype=np.int64)
        self.legal = np.zeros(model.config.layers, dtype=np.int64)

    def find_thresholds(self, pixels: Tensor, kept: float) -> None:
        """Those that keep ``kept`` of these images' blocks in every layer."""

        def core_of(_layer: int, run: LayerRun) -> AttentionCore:
            workloads = self._workloads(run)
            geometries = [self._geometry(workload) for workload in workloads]
            scores = [holonomy_scores(self._config, geometry)[0] for geometry in geometries]
            blocks = scores[0].shape[1]
            theta = threshold_for(np.concatenate(scores), legal_blocks(blocks, blocks, causal=False), kept)
            self.thresholds.append(theta)
            # Scores that are there need not be made again.
            tables = [_table_of(geometry, table) for geometry, table in zip(geometries, scores, strict=True)]
            settings = threshold_settings(theta, Source.TABLE)
            return self._core(workloads, [GoldenGate(self._config).run(table, settings) for table in tables])

        self._model.run(pixels, core_of)

    def gated(self, pixels: Tensor) -> Tensor:
        """Answers over the blocks that the gate keeps, which are counted."""

        def core_of(layer: int, run: LayerRun) -> AttentionCore:
            workloads, settings = self._workloads(run), threshold_settings(self.thresholds[layer])
            gates = [GoldenGate(self._config).run(self._geometry(workload), settings) for workload in workloads]
            self.kept[layer] += sum(gate.kept for gate in gates)
            self.legal[layer] += sum(gate.legal for gate in gates)
            return self._core(workloads, gates)

        return self._model.run(pixels, core_of)[0].argmax(-1)

    def dense(self, pixels: Tensor) -> Tensor:
        """Answers without a gate."""

        def core_of(_layer: int, run: LayerRun) -> AttentionCore:
            workloads = self._workloads(run)
            return self._core(workloads, [None] * len(workloads))

        return self._model.run(pixels, core_of)[0].argmax(-1)

    def _workloads(self, run: LayerRun) -> list[Workload]:
        """That of each image."""
        from tools.workloads import layer_workload

        temperature = self._model.config.temperature
        return [layer_workload(run, temperature, slice(n, n + 1)) for n in range(len(run.hidden))]

    def _geometry(self, workload: Workload) -> Geometry:
        return quantise_geometry(self._config, workload, Source.HOLONOMY)

    def _core(self, workloads: Sequence[Workload], gates: Sequence[GateResult | None]) -> AttentionCore:
        import torch

        outputs = [self._attention(*pair) for pair in zip(workloads, gates, strict=True)]
        return lambda *_: torch.from_numpy(np.stack(outputs))

    def _attention(self, workload: Workload, gate: GateResult | None) -> np.ndarray:
        """Outputs of an image's heads."""
        config, heads = self._config, quantise(self._config, workload)
        if gate is None:
            return np.stack([golden(config, head).outputs_real for head in heads])
        pairs = zip(gated_heads(config, heads, gate), gate.skipped, strict=True)
        return np.stack([gated_golden(config, head, skipped=bool(skipped)).outputs_real for head, skipped in pairs])


def _table_of(geometry: Geometry, scores: np.ndarray) -> Geometry:
    """The run that is sent its scores."""
    return Geometry(replace(geometry.run, words=0, holonomy=False, table=True), scores=scores)


def measure(
    config: Config,
    images: int | None = None,
    *,
    kept: float = KEPT,
    training_images: int = TRAINING_IMAGES,
    batch: int = 16,
    progress: Callable[[str, float | None], None] = lambda _what, _fraction: None,
) -> GatedAccuracy:
    """Accuracy on the first ``images`` held-out digits, None for all, ``batch`` at a time.

    Parameters
    ----------
    kept : fraction that the thresholds keep of the first ``training_images`` training images

    Raises
    ------
    DtpError
        A number of images or a fraction out of range, or a configuration that does not hold the classifier's heads.
    """
    import torch

    from dtp.reference.digits import DigitModel, digits, load_classifier, split

    start = time.monotonic()
    training, held_out = split()
    count = len(held_out) if images is None else images
    for name, value, limit in (
        ("images", count, len(held_out)), ("training_images", training_images, len(training)),
    ):  # fmt: skip
        if not 1 <= value <= limit:
            raise must("gated_accuracy", name, f"an integer in 1..{limit}", value)
    model = load_classifier(DigitModel.HOLONOMY.path)
    classifier = _Classifier(config, model)
    pixels, labels = digits()
    right_float = right_dense = right_gated = changed = 0
    with torch.no_grad():
        progress("thresholds of the gate", None)
        classifier.find_thresholds(pixels[torch.from_numpy(training[:training_images])], kept)
        for first in range(0, count, batch):
            progress(f"digits with gated attention of {config.name}", first / count)
            chosen = torch.from_numpy(held_out[first : min(first + batch, count)])
            in_float = model(pixels[chosen]).argmax(-1)
            dense, gated = classifier.dense(pixels[chosen]), classifier.gated(pixels[chosen])
            right_float += int((in_float == labels[chosen]).sum())
            right_dense += int((dense == labels[chosen]).sum())
            right_gated += int((gated == labels[chosen]).sum())
            changed += int((dense != gated).sum())
    return GatedAccuracy(
        config=config.name,
        wanted=kept,
        training_images=training_images,
        thresholds=tuple(classifier.thresholds),
        images=count,
        held_out=len(held_out),
        kept_fraction=float(classifier.kept.sum() / classifier.legal.sum()),
        kept_by_layer=tuple((classifier.kept / classifier.legal).tolist()),
        float_accuracy=right_float / count,
        dense_accuracy=right_dense / count,
        gated_accuracy=right_gated / count,
        changed=changed,
        wall_s=time.monotonic() - start,
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(description="Digits with attention gated by holonomy.")
    parser.add_argument("--config", default="ecp5-85k", help="preset or TOML file")
    parser.add_argument("--images", type=int, default=None, help="held-out images, default all")
    parser.add_argument("--kept", type=float, default=KEPT, help="fraction that the thresholds keep")
    given = parser.parse_args(arguments)
    try:
        found = measure(Config.load(given.config), given.images, kept=given.kept)
    except DtpError as error:
        print(f"gated_accuracy: {error}", file=sys.stderr)
        return 2
    by_layer = ", ".join(f"{kept:.4f}" for kept in found.kept_by_layer)
    print(
        f"{found.images} of {found.held_out} held-out images on {found.config}: float {found.float_accuracy:.4f}, "
        f"hardware dense {found.dense_accuracy:.4f}, gated {found.gated_accuracy:.4f} "
        f"at {found.kept_fraction:.4f} of the blocks ({by_layer}), {found.changed} answers changed, "
        f"{found.wall_s:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
