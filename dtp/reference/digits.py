"""The committed Fiber Bundle Transformers that read scikit-learn's handwritten digits, and its data.

``tools/train_digits.py`` made the checkpoints; their metadata hold sizes, accuracy and command.
"""

from __future__ import annotations

import os
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

import dtp
from dtp.errors import DtpError, must
from dtp.reference.fbt import (
    AttentionCore,
    FbtBlock,
    FbtClassifier,
    FbtConfig,
    LayerRun,
    LayerTensors,
    geodesic_attention,
)


class DigitModel(StrEnum):
    """The committed checkpoints."""

    PLAIN = "plain"
    """metrics, no transport"""
    TRANSPORT = "transport"
    """metrics and transports"""
    HOLONOMY = "holonomy"
    """metrics and transports, trained with the holonomy loss"""

    @property
    def path(self) -> Path:
        """The weights, float32, and their metadata."""
        name = {"plain": "fbt", "transport": "transport", "holonomy": "holonomy"}[self.value]
        return Path(dtp.__file__).parent / "data" / f"digits_{name}.safetensors"


CHECKPOINT = DigitModel.PLAIN.path
"""The weights of the classifier without transport, float32, and their metadata."""

IMAGE_COUNT = 1797
SPLIT_SEED = 20


class Digits(NamedTuple):
    """Images as rows of 64 pixels in [0, 1], and their labels: pixels (N, 64) float64, labels (N,) int64."""

    pixels: Tensor
    labels: Tensor


def digits() -> Digits:
    """All 1797 images of scikit-learn's digits, 8×8, in its order."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return Digits(torch.from_numpy(data.data / 16.0), torch.from_numpy(data.target.astype(np.int64)))


def split(seed: int = SPLIT_SEED) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the images for training (898) and of those held out (899), by a seeded permutation."""
    order = np.random.default_rng(seed).permutation(IMAGE_COUNT)
    return order[: IMAGE_COUNT // 2], order[IMAGE_COUNT // 2 :]


def checkpoint_metadata(path: str | os.PathLike[str] = CHECKPOINT) -> dict[str, str]:
    """Sizes, split, accuracy and command of a checkpoint, as strings."""
    return _read(Path(path))[1]


def load_classifier(path: str | os.PathLike[str] = CHECKPOINT) -> FbtClassifier:
    """The trained classifier in float64, ready to evaluate.

    Raises
    ------
    DtpError
        When the file is missing, broken, or not a checkpoint of this classifier.
    """
    weights, metadata = _read(Path(path))
    try:
        known = {"transport_rank": "0"} | metadata  # the oldest checkpoint was written before there were transports
        sizes = {field.name: float(known[field.name]) for field in fields(FbtConfig)}
        whole = {name: value if name == "temperature" else int(value) for name, value in sizes.items()}
        model = FbtClassifier(FbtConfig(**whole))  # type: ignore[arg-type]
        model.load_state_dict(weights)
    except (KeyError, RuntimeError) as error:
        raise DtpError(f"{path}: not a digit classifier ({str(error).splitlines()[0]})") from None
    return model.double().eval()


def accuracy(
    model: FbtClassifier,
    indices: NDArray[np.int64],
    attention_core: AttentionCore = geodesic_attention,
    batch: int = 128,
) -> float:
    """Fraction of the images that the model names rightly with a given attention core.

    Parameters
    ----------
    indices : image numbers in 0..1796; ``split()[1]`` are the held-out ones
    attention_core : replaces the float attention of every layer
    batch : images a call of the core
    """
    pixels, labels = digits()
    right = 0
    with torch.no_grad():
        for first in range(0, len(indices), batch):
            chosen = torch.from_numpy(indices[first : first + batch])
            right += int((model(pixels[chosen], attention_core).argmax(-1) == labels[chosen]).sum())
    return right / len(indices)


def layer_run(model: FbtClassifier, indices: NDArray[np.int64], layer: int) -> LayerRun:
    """One layer at work on some images, in float64.

    Raises
    ------
    DtpError
        When a layer or an image is outside the range.
    """
    if not 0 <= layer < model.config.layers:
        raise must("digits", "layer", f"an integer in 0..{model.config.layers - 1}", layer)
    if len(indices) == 0:
        raise must("digits", "images", "at least one image number", list(indices))
    for index in indices:
        if not 0 <= index < IMAGE_COUNT:
            raise must("digits", "images", f"integers in 0..{IMAGE_COUNT - 1}", int(index))
    with torch.no_grad():
        return model.run(digits().pixels[torch.from_numpy(indices)])[1][layer]


def layer_tensors(model: FbtClassifier, indices: NDArray[np.int64], layer: int) -> LayerTensors:
    """What the attention of one layer reads for some images, see :func:`layer_run`."""
    return layer_run(model, indices, layer).tensors


def layer_weights(block: FbtBlock) -> dict[str, Tensor]:
    """Matrices, biases and norms of a layer, by the names of a workload."""
    attention, first, second = block.attention, cast(nn.Linear, block.feed[0]), cast(nn.Linear, block.feed[2])
    found: dict[str, Tensor] = {}
    for part, weight, bias in zip("qkv", attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True):
        found |= {f"w_{part}": weight, f"b_{part}": bias}
    found |= {"w_o": attention.output.weight, "b_o": attention.output.bias}
    found |= {"mlp_in": first.weight, "b_mlp_in": first.bias, "mlp_out": second.weight, "b_mlp_out": second.bias}
    for name, norm in (("ln_attn", block.attention_norm), ("ln_mlp", block.feed_norm)):
        found[name] = torch.stack([norm.weight, norm.bias])
    return {name: tensor.detach() for name, tensor in found.items()}


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise DtpError(f"{path}: no such checkpoint; python -m tools.train_digits makes it")
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}
            return weights, dict(file.metadata() or {})
    except SafetensorError as error:
        raise DtpError(f"{path}: not a whole safetensors file ({' '.join(str(error).split())})") from None
