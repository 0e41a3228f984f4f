"""Train the digit classifiers and write their checkpoints.

    python -m tools.train_digits                     # metrics alone
    python -m tools.train_digits --model transport   # metrics and transports
    python -m tools.train_digits --model holonomy    # the same, with the holonomy loss

Half of scikit-learn's digits train, moved a little at random; the other half measures. The
regularisers of [RA §6.4] keep the metrics from collapsing; their weights fall to a tenth over the run, as the
paper asks. ‖V_t‖_F² of the transports is capped in the same way, so that no token needs a wider integer than the
others. The holonomy loss is the mean energy of all type A loops between heads H and H + 1, for random probes.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from dtp.errors import DtpError
from dtp.reference.digits import SPLIT_SEED, DigitModel, accuracy, digits, load_classifier, split
from dtp.reference.fbt import FbtClassifier, FbtConfig, metric_loss
from dtp.reference.holonomy import Transport, block_scores, field_loss, next_head, relative_field
from dtp.workload import seeded_probes, with_sorted_header


@dataclass(frozen=True)
class TrainConfig:
    """Everything that the run depends on besides ``FbtConfig``."""

    seed: int = 0
    epochs: int = 45
    batch: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 0.02
    label_smoothing: float = 0.05
    metric_floor: float = 1.0
    metric_ceiling: float = 6.0
    flatness_weight: float = 0.1
    diversity_weight: float = 0.001
    smoothness_weight: float = 0.0002
    cap_weight: float = 0.05
    factor_ceiling: float = 12.0
    factor_cap_weight: float = 0.01
    holonomy_weight: float = 0.0
    holonomy_probes: int = 1
    holonomy_images: int = 8


TRANSPORT_RANK = 2
"""r_T of the models with transport: 8 columns of a transport, with torsion."""

RECIPES: dict[DigitModel, tuple[FbtConfig, TrainConfig]] = {
    DigitModel.PLAIN: (FbtConfig(), TrainConfig()),
    DigitModel.TRANSPORT: (FbtConfig(transport_rank=TRANSPORT_RANK), TrainConfig(epochs=30)),
    DigitModel.HOLONOMY: (FbtConfig(transport_rank=TRANSPORT_RANK), TrainConfig(epochs=30, holonomy_weight=0.02)),
}
"""How each committed checkpoint was made."""


def moved(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Images (B, 64) turned, stretched, sheared and shifted a little at random; outside is 0.

    Each entry of the 2×2 map differs from the identity by up to 0.15, the shift is up to 0.75 of a pixel.
    """
    count = pixels.shape[0]
    change = 2 * torch.rand(count, 2, 3, generator=generator) - 1
    change[:, :, :2] *= 0.15
    change[:, :, 2] *= 0.75 / 4  # the grid spans 2 over 8 pixels
    grid = nn.functional.affine_grid(change + torch.eye(2, 3), [count, 1, 8, 8], align_corners=False)
    return nn.functional.grid_sample(pixels.view(count, 1, 8, 8), grid, align_corners=False).flatten(1)


def train(sizes: FbtConfig, options: TrainConfig) -> FbtClassifier:
    """The classifier trained on the training half; prints a line every ten epochs."""
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = FbtClassifier(sizes)
    pixels, labels = digits()
    chosen = torch.from_numpy(split()[0])
    pixels, labels = pixels[chosen].float(), labels[chosen]
    steps = math.ceil(len(labels) / options.batch)
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, options.learning_rate, total_steps=options.epochs * steps, pct_start=0.15
    )
    start = time.monotonic()
    for epoch in range(options.epochs):
        relax = 1.0 - 0.9 * epoch / options.epochs
        total = 0.0
        for picked in torch.randperm(len(labels), generator=generator).split(options.batch):
            scores, runs = model.run(moved(pixels[picked], generator))
            loss = nn.functional.cross_entropy(scores, labels[picked], label_smoothing=options.label_smoothing)
            total += loss.item() * len(picked)
            for run in runs:
                term = metric_loss(
                    run.tensors.metric_factor,
                    floor=options.metric_floor,
                    ceiling=options.metric_ceiling,
                    generator=generator,
                )
                loss = loss + relax * (
                    options.flatness_weight * term.flatness
                    + options.diversity_weight * term.diversity
                    + options.smoothness_weight * term.smoothness
                )
                loss = loss + options.cap_weight * term.cap
                if run.transport is not None:
                    loss = loss + transport_loss(run.transport, options, generator)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
        if epoch % 10 == 9:
            spent = time.monotonic() - start
            print(f"epoch {epoch + 1}: training loss {total / len(labels):.3f}, {spent:.0f} s", flush=True)
    return model


def transport_loss(transport: Transport, options: TrainConfig, generator: torch.Generator) -> Tensor:
    """The cap on ‖V_t‖_F² and, with a weight, the holonomy loss of some of the images; a scalar."""
    strength = (transport.columns() ** 2).sum((-2, -1))
    loss = options.factor_cap_weight * (torch.relu(strength - options.factor_ceiling) ** 2).mean()
    if options.holonomy_weight:
        heads, width = transport.connection_a.shape[1], transport.connection_a.shape[3]
        probes = torch.randn(heads, options.holonomy_probes, width, generator=generator)
        loss = loss + options.holonomy_weight * field_loss(transport[: options.holonomy_images], probes)
    return loss


def holonomy_summary(model: FbtClassifier) -> dict[str, str]:
    """Range of the energies of all type A loops a layer, and of their means over blocks of 16, on 64 held-out images.

    Quantiles 0, 5 %, 50 %, 95 %, 100 %, for one seeded probe a head.
    """
    sizes = model.config
    pixels = digits().pixels[torch.from_numpy(split()[1][:64])]
    probe = torch.from_numpy(seeded_probes(sizes.heads, 1, sizes.head_width, 0)).double()
    with torch.no_grad():
        runs = model.double().run(pixels)[1]
        summary = {}
        for number, run in enumerate(runs):
            if run.transport is None:
                continue
            field = relative_field(run.transport, next_head(run.transport), probe[:, 0])
            pairs = torch.cdist(field, field) ** 2 / (probe**2).sum(-1, keepdim=True)
            row, column = torch.triu_indices(sizes.tokens, sizes.tokens, 1)
            blocks = block_scores(run.transport, probe, 16)
            for name, energies in (("loop", pairs[..., row, column]), ("block", blocks)):
                ordered = energies.flatten().sort().values
                places = [round(part * (len(ordered) - 1)) for part in (0, 0.05, 0.5, 0.95, 1)]
                shown = (f"{ordered[place]:.4g}" for place in places)
                summary[f"layer{number}_{name}_energies"] = " ".join(shown)
            summary[f"layer{number}_torsion_gate"] = f"{run.transport.gate:.4f}"
    return summary


def metric_summary(model: FbtClassifier) -> dict[str, str]:
    """Mean, spread over tokens and spread over images of ‖U_t‖_F² a layer, on the held-out images."""
    pixels = digits().pixels[torch.from_numpy(split()[1][:256])]
    summary = {}
    with torch.no_grad():
        _, layers = model.double().with_tensors(pixels)
    for number, layer in enumerate(layers):
        strength = (layer.metric_factor**2).sum((-2, -1))
        summary[f"layer{number}_metric_mean"] = f"{strength.mean():.4f}"
        summary[f"layer{number}_metric_spread"] = f"{strength.std():.4f}"
        summary[f"layer{number}_metric_least"] = f"{strength.min():.4f}"
    return summary


def write_checkpoint(model: FbtClassifier, path: Path, metadata: dict[str, str]) -> None:
    """Weights in float32 with their metadata, in one step."""
    weights = {name: value.float().contiguous() for name, value in model.state_dict().items()}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(with_sorted_header(safetensors_bytes(weights, metadata)))
        os.replace(partial, path)
    except OSError as error:
        raise DtpError(f"{path}: the checkpoint cannot be written ({error.strerror})") from None
    finally:
        partial.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> None:
    """Train, write, measure on the held-out half, and print what was measured."""
    parser = argparse.ArgumentParser(description="Train a digit classifier.")
    parser.add_argument("--model", type=DigitModel, choices=list(DigitModel), default=DigitModel.PLAIN)
    parser.add_argument("--out", type=Path, default=None, help="checkpoint to write, default the committed one")
    parser.add_argument("--epochs", type=int, default=None, help="default that of the committed checkpoint")
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    torch.use_deterministic_algorithms(True)
    sizes, recipe = RECIPES[given.model]
    options = replace(recipe, seed=given.seed, epochs=recipe.epochs if given.epochs is None else given.epochs)
    path = given.model.path if given.out is None else given.out
    start = time.monotonic()
    model = train(sizes, options)
    spent = time.monotonic() - start
    metadata = {name: repr(value) for name, value in (asdict(sizes) | asdict(options)).items()}
    metadata |= metric_summary(model) | holonomy_summary(model)
    metadata["split_seed"] = str(SPLIT_SEED)
    named = "" if given.model is DigitModel.PLAIN else f"--model {given.model} "
    metadata["command"] = f"python -m tools.train_digits {named}--epochs {options.epochs} --seed {options.seed}"
    # the weights as written decide the accuracy: write once, read back, write again with the figure
    write_checkpoint(model, path, metadata)
    metadata["held_out_accuracy"] = repr(accuracy(load_classifier(path), split()[1]))
    write_checkpoint(model, path, metadata)
    for name in sorted(name for name in metadata if name.startswith("layer")):
        print(f"{name}: {metadata[name]}")
    print(f"held-out accuracy {float(metadata['held_out_accuracy']):.4f}, {spent:.0f} s of training")


if __name__ == "__main__":
    main()
