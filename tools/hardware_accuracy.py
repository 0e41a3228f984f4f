"""The digit classifier with the processor's arithmetic in every attention layer.

    python -m tools.hardware_accuracy                # all held-out images on ecp5-85k
    python -m tools.hardware_accuracy --images 100   # the first hundred of them

Each head of each image is quantised with scales of its own, as a workload file without given scales is, and goes
through the golden model, which the Verilog equals bit for bit. Everything around the attention stays float64.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dtp.config import Config
from dtp.errors import DtpError, must
from dtp.workload import Mode, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from dtp.reference.fbt import AttentionCore

ALLOWED_LOSS = 0.005
"""Accuracy that the arithmetic may cost: half a point."""


@dataclass(frozen=True)
class HardwareAccuracy:
    """Held-out accuracy in float and with the processor's arithmetic.

    Parameters
    ----------
    images, held_out: images measured, and how many are held out in all
    float_accuracy, hardware_accuracy: fractions of the measured images named rightly
    changed: images whose answer differs between the two
    passed: the arithmetic costs at most half a point, or one image where that is more
    wall_s: seconds
    """

    config: str
    images: int
    held_out: int
    float_accuracy: float
    hardware_accuracy: float
    changed: int
    passed: bool
    wall_s: float


def hardware_core(config: Config) -> AttentionCore:
    """An attention core for :class:`~dtp.reference.fbt.FbtClassifier` that quantises and runs the golden model."""
    import torch

    from dtp.attention import golden
    from dtp.quantise import quantise

    def core(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        frame: Tensor,
        metric_factor: Tensor,
        curvature: Tensor,
        tau: float,
    ) -> Tensor:
        workload = Workload.from_tensors(
            mode=Mode.RIEMANNIAN,
            causal=False,
            q=q.flatten(0, 1),
            k=k.flatten(0, 1),
            v=v.flatten(0, 1),
            frame=frame.repeat(len(q), 1, 1),
            metric_factor=metric_factor.flatten(0, 1),
            curvature=curvature.flatten(0, 1),
            temperature=tau,
        )
        outputs = [golden(config, head).outputs_real for head in quantise(config, workload)]
        return torch.from_numpy(np.stack(outputs)).view(q.shape)

    return core


def measure(
    config: Config,
    images: int | None = None,
    *,
    batch: int = 16,
    progress: Callable[[str, float | None], None] = lambda _what, _fraction: None,
) -> HardwareAccuracy:
    """Accuracy on the first ``images`` held-out digits, None for all, ``batch`` at a time.

    Raises
    ------
    DtpError
        A number of images out of range, or a configuration that does not hold the classifier's heads.
    """
    import torch

    from dtp.reference.digits import digits, load_classifier, split

    start = time.monotonic()
    held_out = split()[1]
    count = len(held_out) if images is None else images
    if not 1 <= count <= len(held_out):
        raise must("hardware_accuracy", "images", f"an integer in 1..{len(held_out)}", images)
    model, core = load_classifier(), hardware_core(config)
    pixels, labels = digits()
    right_float = right_hardware = changed = 0
    with torch.no_grad():
        for first in range(0, count, batch):
            progress(f"digits with the arithmetic of {config.name}", first / count)
            chosen = torch.from_numpy(held_out[first : min(first + batch, count)])
            in_float = model(pixels[chosen]).argmax(-1)
            in_hardware = model(pixels[chosen], core).argmax(-1)
            right_float += int((in_float == labels[chosen]).sum())
            right_hardware += int((in_hardware == labels[chosen]).sum())
            changed += int((in_float != in_hardware).sum())
    return HardwareAccuracy(
        config=config.name,
        images=count,
        held_out=len(held_out),
        float_accuracy=right_float / count,
        hardware_accuracy=right_hardware / count,
        changed=changed,
        passed=right_float - right_hardware <= max(1.0, ALLOWED_LOSS * count),
        wall_s=time.monotonic() - start,
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 0 when the loss is within bounds, 1 when not, 2 for bad input."""
    parser = argparse.ArgumentParser(description="Digits with the processor's arithmetic in the attention.")
    parser.add_argument("--config", default="ecp5-85k", help="preset or TOML file")
    parser.add_argument("--images", type=int, default=None, help="held-out images, default all")
    given = parser.parse_args(arguments)
    try:
        found = measure(Config.load(given.config), given.images)
    except DtpError as error:
        print(f"hardware_accuracy: {error}", file=sys.stderr)
        return 2
    print(
        f"{found.images} of {found.held_out} held-out images on {found.config}: "
        f"float {found.float_accuracy:.4f}, hardware {found.hardware_accuracy:.4f}, "
        f"{found.changed} answers changed, {found.wall_s:.0f} s"
    )
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
