"""How good each source of block scores is at choosing what attention may skip.

    python -m tools.pruning             # measure; write docs/pruning.json, docs/pruning.md, docs/images/pruning.svg
    python -m tools.pruning --report    # page and picture again from docs/pruning.json

Everything is float. Blocks are pruned with a budget: each row of blocks keeps its diagonal block and the lowest scores,
round(kept × blocks) in all. The output error is ‖o_pruned − o‖ / ‖o‖ of the heads' outputs in front of the output
projection, over all heads, layers and inputs, each layer pruned alone. Task accuracy is that of the model with all
layers pruned at once, the scores made as it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dtp.errors import DtpError, must
from dtp.workload import seeded_probes
from tools.workloads import PROSE

if TYPE_CHECKING:
    from torch import Tensor

    from dtp.reference.fbt import AttentionCore, FbtBlock, FbtClassifier, LayerRun

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "pruning.json"
PAGE = ROOT / "docs" / "pruning.md"
PICTURE = ROOT / "docs" / "images" / "pruning.svg"

FRACTIONS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
DIGIT_BLOCKS = (8, 16)
DIGIT_IMAGES = 200
MINILM_BLOCK = 16
MINILM_TOKENS = 128
SEED = 1


class Source(StrEnum):
    """Where block scores come from; low is kept."""

    HOLONOMY = "holonomy"
    """mean energy of the type A loops of the block, pairs credited to both heads (SPEC §4.2), one probe"""
    MAGNITUDE = "magnitude"
    """minus the mean over the block's queries of their largest attention score in the block"""
    RANDOM = "random"
    """uniform, seeded"""
    ORACLE = "oracle"
    """minus the probability mass of the block"""
    CURVATURE = "curvature"
    """mean Ω_j of the block's keys"""
    NATURALITY = "naturality"
    """energy of the head's commutator, one number a head: the heads of a layer share a row's budget"""


class Point(NamedTuple):
    """One measurement: what is kept of all blocks, and what comes out; ``accuracy`` is None where there is no task."""

    case: str
    source: str
    kept: float
    output_error: float
    accuracy: float | None


@dataclass(frozen=True)
class Study:
    """All points, and what they were measured on.

    Parameters
    ----------
    points: by case, source, falling fraction
    agreement: Spearman correlation of a source's scores with the oracle's over the blocks off the diagonal, mean over
        heads, layers and inputs; by case and source
    images: held-out digits of the accuracy
    """

    points: tuple[Point, ...]
    agreement: dict[str, dict[str, float]]
    images: int


# ---- scores and masks --------------------------------------------------------------------------------------


def block_means(values: Tensor, block: int) -> Tensor:
    """Means over blocks of pairs, (..., L, L) to (..., blocks, blocks); L is a multiple of the block."""
    count = values.shape[-1] // block
    return values.unflatten(-1, (count, block)).unflatten(-3, (count, block)).mean((-1, -3))


def row_budget(kept: float, blocks: int) -> int:
    """Blocks that a row keeps: round(kept × blocks), halves up, at least one."""
    return max(1, math.floor(kept * blocks + 0.5))


def budget_mask(scores: Tensor, kept: float, *, share_heads: bool = False) -> Tensor:
    """Blocks that a budget keeps, bool like ``scores`` (..., H, blocks, blocks).

    Every row keeps its diagonal block and the lowest scores, ``row_budget`` in all. Equal scores go by distance from
    the diagonal.

    Parameters
    ----------
    share_heads : the heads of a row share H times that budget, so that a head may lose all but its diagonal
    """
    import torch

    heads, blocks = scores.shape[-3:-1]
    each = row_budget(kept, blocks)
    place = torch.arange(blocks)
    distance = (place[:, None] - place).abs()
    forced = scores.masked_fill(distance == 0, -math.inf)
    rows = forced.transpose(-3, -2) if share_heads else forced  # (…, blocks, H, blocks) where heads share
    far = distance[:, None, :].expand(blocks, heads, blocks) if share_heads else distance
    flat = rows.flatten(-2) if share_heads else rows
    near = far.flatten(-2) if share_heads else far
    by_distance = near.argsort(dim=-1, stable=True).expand(flat.shape)
    order = by_distance.gather(-1, flat.gather(-1, by_distance).argsort(dim=-1, stable=True))
    chosen = order[..., : each * heads if share_heads else each]
    mask = torch.zeros(flat.shape, dtype=torch.bool).scatter(-1, chosen, True)
    return mask.unflatten(-1, (heads, blocks)).transpose(-3, -2) if share_heads else mask


def masked_outputs(logits: Tensor, values: Tensor, mask: Tensor, block: int) -> Tensor:
    """Attention outputs with the kept blocks alone, (..., L, d)."""
    import torch

    keep = mask.repeat_interleave(block, -1).repeat_interleave(block, -2)
    return torch.softmax(logits.masked_fill(~keep, -math.inf), -1) @ values


class Layer(NamedTuple):
    """What the sources need of one layer: logits (B, H, L, L), values (B, H, L, d), and each source's scores."""

    logits: Tensor
    values: Tensor
    scores: Callable[[Source, int], Tensor]


def _common_scores(source: Source, block: int, logits: Tensor) -> Tensor:
    """Scores of the sources that need the logits alone."""
    import torch

    if source is Source.MAGNITUDE:
        centred = logits - logits.mean(-1, keepdim=True)
        return -centred.unflatten(-1, (-1, block)).amax(-1).unflatten(-2, (-1, block)).mean(-2)
    if source is Source.ORACLE:
        return -block_means(torch.softmax(logits, -1), block)
    shape = (*logits.shape[:-2], logits.shape[-1] // block, logits.shape[-1] // block)
    return torch.rand(shape, generator=torch.Generator().manual_seed(SEED))


# ---- digits ------------------------------------------------------------------------------------------------


def digit_layer(module: FbtBlock, run: LayerRun) -> Layer:
    """A layer of a digit classifier with transports."""
    import torch

    from dtp.reference.fbt import geodesic_attention, geodesic_logits
    from dtp.reference.holonomy import block_scores
    from dtp.reference.naturality import head_energies

    seen, tau = run.tensors, module.attention.config.temperature
    logits = geodesic_logits(seen.q, seen.k, seen.frame, seen.metric_factor, seen.curvature, tau)
    count = seen.q.shape[2]

    def attend(state: Tensor) -> Tensor:
        now = module.attention.tensors(module.attention_norm(state))
        kept = now._replace(metric_factor=seen.metric_factor, curvature=seen.curvature)
        return geodesic_attention(*kept, tau)

    def residual(state: Tensor) -> Tensor:
        return cast("Tensor", module.feed(module.feed_norm(state)))

    def scores(source: Source, block: int) -> Tensor:
        shape = (*seen.q.shape[:2], count // block, count // block)
        if source is Source.HOLONOMY:
            if run.transport is None:
                raise must("pruning", "source", "other than holonomy without transports", source.value)
            probes = torch.from_numpy(seeded_probes(shape[1], 1, seen.q.shape[3], SEED)).to(seen.q.dtype)
            return block_scores(run.transport, probes, block)
        if source is Source.CURVATURE:
            return seen.curvature.unflatten(-1, (-1, block)).mean(-1).unsqueeze(-2).expand(shape)
        if source is Source.NATURALITY:
            energy = head_energies(run.hidden, attend, module.attention.output.weight, residual)
            return energy.mean(-1)[..., None, None].expand(shape)
        return _common_scores(source, block, logits)

    return Layer(logits, seen.v, scores)


def pruning_core(
    model: FbtClassifier, source: Source, block: int, kept: float, first: tuple[Layer, Tensor]
) -> Callable[[int, LayerRun], AttentionCore]:
    """What :meth:`~dtp.reference.fbt.FbtClassifier.run` takes to prune every layer by scores made as it runs.

    The first layer and its scores, which pruning does not change, are given.
    """

    def core_of(number: int, run: LayerRun) -> AttentionCore:
        if number == 0:
            layer, scores = first
        else:
            layer = digit_layer(cast("FbtBlock", model.blocks[number]), run)
            scores = layer.scores(source, block)
        mask = budget_mask(scores, kept, share_heads=source is Source.NATURALITY)
        return lambda *_: masked_outputs(layer.logits, layer.values, mask, block)

    return core_of


def digit_case(
    name: str, block: int, images: int, fractions: Sequence[float], sources: Iterable[Source] = tuple(Source)
) -> tuple[list[Point], dict[str, float]]:
    """Points and agreement of one digit model, ``transport`` or ``holonomy``, on its first held-out images."""
    import torch

    from dtp.reference.digits import DigitModel, digits, load_classifier, split

    model = load_classifier(DigitModel(name).path).float()
    chosen = torch.from_numpy(split()[1][:images])
    pixels, labels = (part[chosen] for part in digits())
    pixels = pixels.float()
    case = f"digits, {name} model, block {block}"
    points, agreement = [], {}
    with torch.no_grad():
        answers, runs = model.run(pixels)
        layers = [digit_layer(cast("FbtBlock", one), run) for one, run in zip(model.blocks, runs, strict=True)]
        dense = float((answers.argmax(-1) == labels).float().mean())
        for source in sources:
            scores = [layer.scores(source, block) for layer in layers]
            agreement[source.value] = _agreement(layers, scores, block)
            for fraction, kept in _distinct(fractions, scores[0].shape[-1]):
                right = dense
                if kept < 1:
                    core_of = pruning_core(model, source, block, fraction, (layers[0], scores[0]))
                    got = model.run(pixels, core_of, runs[0])[0]
                    right = float((got.argmax(-1) == labels).float().mean())
                error = _output_error(layers, scores, source, block, fraction)
                points.append(Point(case, source.value, kept, error, right))
    return points, agreement


# ---- MiniLM ------------------------------------------------------------------------------------------------

MINILM_SOURCES = (Source.MAGNITUDE, Source.RANDOM, Source.ORACLE, Source.NATURALITY)


def minilm_layers(texts: Sequence[str], tokens: int) -> list[Layer]:
    """The layers of all-MiniLM-L6-v2 on texts that fill ``tokens``."""
    from dtp.reference import minilm

    result = minilm.run(texts, tokens)
    if set(result.lengths) != {tokens}:
        raise must("pruning", "texts", f"of {tokens} tokens or more", result.lengths)
    return [_minilm_layer(number, result) for number in range(minilm.LAYERS)]


def _minilm_layer(number: int, result: Any) -> Layer:
    import torch
    from torch.nn.functional import gelu, layer_norm, linear

    from dtp.reference import minilm
    from dtp.reference.naturality import head_energies

    weights = {name: tensor.double() for name, tensor in minilm.layer_weights(number).items()}
    q, k, v = result.layers[number]
    logits = q @ k.mT / math.sqrt(q.shape[-1])

    def norm(state: Tensor, name: str) -> Tensor:
        gain, offset = weights[name]
        return layer_norm(state, state.shape[-1:], gain, offset, minilm.NORM_EPSILON)

    def attend(state: Tensor) -> Tensor:
        normed = norm(state, "ln_attn")
        now = (linear(normed, weights[f"w_{part}"], weights[f"b_{part}"]) for part in "qkv")
        q_now, k_now, v_now = (part.unflatten(-1, (minilm.HEADS, -1)).transpose(1, 2) for part in now)
        return torch.softmax(q_now @ k_now.mT / math.sqrt(q.shape[-1]), -1) @ v_now

    def residual(state: Tensor) -> Tensor:
        inner = gelu(linear(norm(state, "ln_mlp"), weights["mlp_in"], weights["b_mlp_in"]))
        return linear(inner, weights["mlp_out"], weights["b_mlp_out"])

    def scores(source: Source, block: int) -> Tensor:
        if source is Source.NATURALITY:
            energy = head_energies(result.hidden[number], attend, weights["w_o"], residual).mean(-1)
            return energy[..., None, None].expand(*energy.shape, *[q.shape[2] // block] * 2)
        return _common_scores(source, block, logits)

    return Layer(logits, v, scores)


def minilm_case(fractions: Sequence[float]) -> tuple[list[Point], dict[str, float]]:
    """Points and agreement of all heads of all-MiniLM-L6-v2 on two paragraphs."""
    import torch

    case = f"all-MiniLM-L6-v2, block {MINILM_BLOCK}"
    points, agreement = [], {}
    with torch.no_grad():
        layers = minilm_layers(PROSE, MINILM_TOKENS)
        for source in MINILM_SOURCES:
            scores = [layer.scores(source, MINILM_BLOCK) for layer in layers]
            agreement[source.value] = _agreement(layers, scores, MINILM_BLOCK)
            for fraction, kept in _distinct(fractions, scores[0].shape[-1]):
                error = _output_error(layers, scores, source, MINILM_BLOCK, fraction)
                points.append(Point(case, source.value, kept, error, None))
    return points, agreement


# ---- measures ----------------------------------------------------------------------------------------------


def _distinct(fractions: Sequence[float], blocks: int) -> list[tuple[float, float]]:
    """Fractions that give different budgets, and what is kept with each."""
    found: dict[int, float] = {}
    for fraction in fractions:
        found.setdefault(row_budget(fraction, blocks), fraction)
    return [(fraction, budget / blocks) for budget, fraction in found.items()]


def _output_error(
    layers: Sequence[Layer], scores: Sequence[Tensor], source: Source, block: int, fraction: float
) -> float:
    """Relative error of the heads' outputs, each layer pruned alone."""
    import torch

    lost = whole = 0.0
    for layer, score in zip(layers, scores, strict=True):
        mask = budget_mask(score, fraction, share_heads=source is Source.NATURALITY)
        dense = torch.softmax(layer.logits, -1) @ layer.values
        pruned = masked_outputs(layer.logits, layer.values, mask, block)
        lost += float(((pruned - dense) ** 2).sum())
        whole += float((dense**2).sum())
    return math.sqrt(lost / whole)


def _agreement(layers: Sequence[Layer], scores: Sequence[Tensor], block: int) -> float:
    """Mean Spearman correlation with the oracle over blocks off the diagonal; 0 where a source is constant."""
    import torch

    found = []
    for layer, score in zip(layers, scores, strict=True):
        off = ~torch.eye(score.shape[-1], dtype=torch.bool)
        one, other = score[..., off].double(), _common_scores(Source.ORACLE, block, layer.logits)[..., off].double()
        ranks = [_ranks(part) for part in (one, other)]
        centred = [rank - rank.mean(-1, keepdim=True) for rank in ranks]
        size = torch.sqrt((centred[0] ** 2).sum(-1) * (centred[1] ** 2).sum(-1))
        found.append(((centred[0] * centred[1]).sum(-1) / size.clamp(min=1e-9)).flatten())
    return float(torch.cat(found).mean())


def _ranks(values: Tensor) -> Tensor:
    """Ranks along the last dimension, equal values sharing the mean of theirs."""
    below = (values.unsqueeze(-1) > values.unsqueeze(-2)).double().sum(-1)
    level = (values.unsqueeze(-1) == values.unsqueeze(-2)).double().sum(-1)
    return below + (level - 1) / 2


def study(
    images: int = DIGIT_IMAGES,
    fractions: Sequence[float] = FRACTIONS,
    progress: Callable[[str, float | None], None] = lambda _what, _fraction: None,
) -> Study:
    """Every case, source and fraction.

    Raises
    ------
    DtpError
        For images or fractions out of range; ``MissingToolError`` without the model of sentences.
    """
    from dtp.reference.digits import DigitModel, split

    held_out = len(split()[1])
    if not 1 <= images <= held_out:
        raise must("pruning", "images", f"an integer in 1..{held_out}", images)
    for fraction in fractions:
        if not 0 < fraction <= 1:
            raise must("pruning", "fractions", "numbers in (0, 1]", fraction)
    points: list[Point] = []
    agreement: dict[str, dict[str, float]] = {}
    jobs: list[tuple[str, Callable[[], tuple[list[Point], dict[str, float]]]]] = [
        (model.value, partial(digit_case, model.value, block, images, fractions))
        for model in (DigitModel.TRANSPORT, DigitModel.HOLONOMY)
        for block in DIGIT_BLOCKS
    ]
    jobs.append(("all-MiniLM-L6-v2", partial(minilm_case, fractions)))
    for number, (name, job) in enumerate(jobs):
        progress(f"pruning, {name}", number / len(jobs))
        found, agreed = job()
        points += found
        agreement[found[0].case] = agreed
    return Study(tuple(points), agreement, images)


# ---- files -------------------------------------------------------------------------------------------------


def save(result: Study, path: Path = RESULTS) -> None:
    """Write the study as JSON, figures rounded to 5 places."""
    points = [{k: round(v, 5) if isinstance(v, float) else v for k, v in p._asdict().items()} for p in result.points]
    agreement = {case: {name: round(v, 5) for name, v in by.items()} for case, by in result.agreement.items()}
    data = asdict(result) | {"points": points, "agreement": agreement}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def load(path: Path = RESULTS) -> Study:
    """Read what ``save`` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return Study(tuple(Point(**point) for point in data["points"]), data["agreement"], data["images"])


def _cases(result: Study) -> list[str]:
    return list(dict.fromkeys(point.case for point in result.points))


def _series(result: Study, case: str) -> dict[str, list[Point]]:
    """Points of a case by source."""
    found: dict[str, list[Point]] = {}
    for point in result.points:
        if point.case == case:
            found.setdefault(point.source, []).append(point)
    return found


def markdown(result: Study) -> str:
    """The page."""
    lines = ["# Pruning quality", "", *(__doc__ or "").strip().splitlines()[5:], ""]
    lines += ["| source | score of a block; low is kept |", "|---|---|"]
    lines += [f"| {source} | {_meaning(source)} |" for source in Source]
    lines += ["", "## What comes out", "", *_summary(result)]
    lines += ["", "![Output error and accuracy against the kept fraction](images/pruning.svg)", ""]
    for case in _cases(result):
        series = _series(result, case)
        asked = [f"{point.kept:.3g}" for point in next(iter(series.values()))]
        for title, shown in (
            ("output error", lambda p: f"{p.output_error:.3f}"),
            ("accuracy, %", lambda p: f"{100 * p.accuracy:.1f}"),
        ):
            if title.startswith("accuracy") and next(iter(series.values()))[0].accuracy is None:
                continue
            extra = ["agreement with the oracle"] if title == "output error" else []
            suffix = f", {result.images} held-out images" if title.startswith("accuracy") else ""
            lines += [f"## {case}: {title}{suffix}", ""]
            lines += [f"| kept | {' | '.join([*asked, *extra])} |", "|" + "---|" * (1 + len(asked) + len(extra))]
            for source, points in series.items():
                cells = [shown(point) for point in points]
                cells += [f"{result.agreement[case][source]:+.2f}"] if extra else []
                lines.append(f"| {source} | {' | '.join(cells)} |")
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _summary(result: Study) -> list[str]:
    """For each source: how often it beats random and magnitude, and the mean ratio of its error to that of random.

    Points with everything kept, and those where every source keeps the diagonal alone, say nothing and are left out.
    """
    errors = {(point.case, point.source, point.kept): point.output_error for point in result.points}
    lines = [
        "Over all points of a source with something to choose: output error divided by that of random pruning, and how "
        "often the error is below that of random and of magnitude.",
        "",
        "| source | error ÷ random, mean | below random | below magnitude |",
        "|---|---|---|---|",
    ]
    for source in Source:
        ratios, beats, points = [], 0, 0
        for (case, name, kept), error in errors.items():
            others = {value for (c, _, k), value in errors.items() if (c, k) == (case, kept)}
            if name != source or kept == 1 or len(others) == 1 or (case, Source.RANDOM.value, kept) not in errors:
                continue
            points += 1
            ratios.append(error / errors[case, Source.RANDOM.value, kept])
            beats += error < errors.get((case, Source.MAGNITUDE.value, kept), 0.0)
        if points:
            better = sum(ratio < 1 for ratio in ratios)
            mean = f"{sum(ratios) / points:.2f}"
            lines.append(f"| {source} | {mean} | {better} of {points} | {beats} of {points} |")
    return lines


def _meaning(source: Source) -> str:
    return {
        Source.HOLONOMY: "mean energy of the block's type A loops, each pair of heads credited to both; one probe",
        Source.MAGNITUDE: "minus the mean over the block's queries of their largest score in the block, a "
        "query's scores counted from their mean; the best of five such measures",
        Source.RANDOM: "uniform",
        Source.ORACLE: "minus the probability mass of the block",
        Source.CURVATURE: "mean Ω_j of the block's keys",
        Source.NATURALITY: "energy of the head's commutator; the heads of a layer share a row's budget",
    }[source]


def picture(result: Study, path: Path = PICTURE) -> None:
    """Output error above, accuracy below, a column a case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = _cases(result)
    settings: Any = {"svg.hashsalt": "pruning", "svg.fonttype": "none", "font.size": 8}
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(2, len(cases), figsize=(3 * len(cases), 5), sharex=True, squeeze=False)
        for column, case in enumerate(cases):
            above, below = axes[0, column], axes[1, column]
            for number, source in enumerate(Source):
                points = _series(result, case).get(source.value, [])
                x = [point.kept for point in points]
                style: dict[str, Any] = {"color": f"C{number}", "label": source.value, "marker": ".", "linewidth": 1}
                above.plot(x, [point.output_error for point in points], **style)
                if points and points[0].accuracy is not None:
                    below.plot(x, [100 * cast(float, point.accuracy) for point in points], **style)
            above.set_title(case.replace(", block", ",\nblock"))
            below.set_xlabel("kept fraction of blocks")
            if not below.lines:
                below.set_axis_off()
        axes[0, 0].set_ylabel("output error, relative")
        axes[1, 0].set_ylabel("accuracy, %")
        axes[0, 0].legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write, or write again what was measured."""
    parser = argparse.ArgumentParser(prog="python -m tools.pruning", description="Quality of pruning by source.")
    parser.add_argument("--report", action="store_true", help="only page and picture, from the measured figures")
    parser.add_argument("--images", type=int, default=DIGIT_IMAGES, help="held-out digits")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch; more wait for each other on a busy machine")
    given = parser.parse_args(arguments)
    start = time.monotonic()
    try:
        if not given.report:
            import torch

            torch.set_num_threads(given.threads)
            save(study(given.images, progress=lambda what, _: print(what, flush=True)))
        result = load()
    except DtpError as error:
        print(f"pruning: {error}", file=sys.stderr)
        return 2
    PAGE.write_text(markdown(result), encoding="utf-8")
    picture(result)
    print(f"{len(result.points)} points, {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
