"""Ready-made workloads: a digit classifier, a small language model, and seeded random tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

import dtp
from dtp.config import Config
from dtp.errors import MissingToolError, must
from dtp.loops import Convention, Extent, LoopGraph, LoopType, sample_loops
from dtp.workload import NORM_EPSILON, Activation, Mode, TransportKind, Workload, parse_mode

if TYPE_CHECKING:
    from dtp.reference.digits import DigitModel
    from dtp.reference.fbt import LayerRun

MINILM_EXTRACT = Path(dtp.__file__).parent / "data" / "minilm_extract.safetensors"
EXTRACT_LAYERS = (1, 4)
EXTRACT_TOKENS = 64

PROSE = (
    "The ferry left the harbour a little before dawn, when the lamps along the quay still burned and "
    "the water was the colour of slate. Only seven passengers stood on deck: a schoolteacher with a box "
    "of maps, two brothers who repaired clocks, a woman carrying a sleeping child, an old pilot who no "
    "longer trusted his eyes, and a surveyor on her way to measure the northern lighthouse. Nobody "
    "spoke until the engine settled into its rhythm. Then the pilot pointed at the horizon and said "
    "that the wind would turn before noon, because the gulls were flying low and the clouds had begun "
    "to comb themselves into long grey lines. The surveyor wrote his words in her notebook beside the "
    "temperature and the hour, since she had learned that a prediction is worth keeping only when "
    "somebody writes it down before the weather has had time to answer.",
    "A river never carves its valley in a hurry. Each spring the melting snow loosens stones from the "
    "upper slopes, and the current rolls them downstream, grinding one against another until the sharp "
    "edges are gone. Farmers on the plain know nothing of that slow labour; they see only the fine dark "
    "soil that every flood leaves behind. When engineers built the first dam, the floods stopped, the "
    "harvests shrank, and the beaches at the mouth of the river began to disappear, for the sand that "
    "used to feed them now lay trapped behind a wall of concrete. It took the province forty years to "
    "understand the connection, and another ten to agree that a few gates should be opened every April, "
    "so that the water might carry its old freight to the sea.",
)
"""Two paragraphs, each above 128 tokens, written for this project."""


_MOST = 1 << 20
"""Largest count of anything; no configuration can state a larger one."""


def random_workload(
    *,
    tokens: int,
    width: int,
    heads: int,
    mode: Mode | str,
    kept: float,
    causal: bool,
    seed: int,
    block: int | None,
    frame_rank: int = 3,
    metric_rank: int = 3,
    valid_length: int | None = None,
    kv_heads: int | None = None,
    blend: float = 0.5,
    transport_rank: int = 0,
    transport: TransportKind | str = TransportKind.CAYLEY,
    torsion: bool = False,
    loops: int = 0,
    mlp_width: int = 0,
) -> Workload:
    """Seeded tensors of realistic size: q, k, v ~ N(0, 1), one key in eight resembling some query.

    The temperature is 2√d, so that a Euclidean score weighs q·k as a dot-product score does. In metric modes
    E‖U_t‖_F² = 0.25·R·r, tokens differ by up to a factor of four, and Ω_t = softplus(0)·‖U_t‖_F² [RA (21)].

    With a transport rank, runs of 8 to 40 tokens of a head share most of their factors, so that holonomy is small
    within a run and large between runs; each column has about the norm 1, L and R the gate 0.25. Loops of type A pair
    each head with the next one, as :func:`dtp.loops.sample_loops` draws them; without inverses, of linear transports,
    they have the convention ``destination``. With an MLP width,
    q, k and v are the projections of hidden states, d_model = H·d, which stand beside them with the layer's matrices.

    Parameters
    ----------
    kept : fraction of the legal blocks that each head keeps, at random, in (0, 1]; the count is rounded to
        the nearest block. No row of blocks is left empty; the diagonal is not forced.
    block : tokens along one side of a block; needed when ``kept`` is below 1.
    kv_heads : key heads, default ``heads``.
    blend : μ, read in blended mode alone.
    transport_rank : r_T, or 0 for no transports.
    transport, torsion : kind of the transports, and whether they have torsion; read with a transport rank.
    loops : how many, or 0; they need transports, two heads and two tokens.
    mlp_width : f, or 0 for no layer beside the attention.

    Raises
    ------
    DtpError
        A refused value, or a ``kept`` too small to leave a block in every row.
    """
    mode = parse_mode(mode)
    kv_heads = heads if kv_heads is None else kv_heads
    counts = {"tokens": tokens, "width": width, "heads": heads, "kv_heads": kv_heads}
    if mode.is_metric:
        counts |= {"frame_rank": frame_rank, "metric_rank": metric_rank}
    for name, value in counts.items():
        if not 1 <= value <= _MOST:
            raise must("random_workload", name, f"an integer from 1 to {_MOST}", value)
    for name, value in {"transport_rank": transport_rank, "loops": loops, "mlp_width": mlp_width}.items():
        if not 0 <= value <= _MOST:
            raise must("random_workload", name, f"an integer from 0 to {_MOST}", value)
    if torsion and not transport_rank:
        raise must("random_workload", "torsion", "off without a transport_rank", torsion)
    if loops and not (transport_rank and heads > 1 and tokens > 1):
        raise must("random_workload", "loops", "0 without a transport_rank, two heads and two tokens", loops)
    if transport_rank > width:
        raise must("random_workload", "transport_rank", f"at most the width {width}", transport_rank)
    if heads % kv_heads:
        raise must("random_workload", "heads", f"a multiple of kv_heads {kv_heads}", heads)
    if mode.is_metric and frame_rank > width:
        raise must("random_workload", "frame_rank", f"at most the width {width}", frame_rank)
    if not 0 < kept <= 1:
        raise must("random_workload", "kept", "a fraction in (0, 1]", kept)
    if kept < 1 and block is None:
        raise must("random_workload", "block", "given when kept is below 1", None)
    if block is not None and not 1 <= block <= _MOST:
        raise must("random_workload", "block", f"an integer from 1 to {_MOST}", block)

    rng = np.random.default_rng(seed)
    q = rng.standard_normal((heads, tokens, width))
    k = rng.standard_normal((kv_heads, tokens, width))
    v = rng.standard_normal((kv_heads, tokens, width))
    for head in range(kv_heads):
        chosen = rng.choice(tokens, size=max(1, tokens // 8), replace=False)
        model = rng.permutation(tokens)[: len(chosen)]
        k[head, chosen] = 0.6 * q[head * (heads // kv_heads), model] + 0.8 * k[head, chosen]
    fields: dict[str, object] = {"q": q, "k": k, "v": v}
    if mode.is_metric:
        fields["frame"] = np.linalg.qr(rng.standard_normal((heads, width, frame_rank)))[0]
        strength = 2.0 ** rng.uniform(-1, 1, (heads, tokens, 1, 1))
        strength /= math.sqrt(float(np.mean(strength**2)))
        factor = 0.5 * strength * rng.standard_normal((heads, tokens, frame_rank, metric_rank))
        fields["metric_factor"] = factor
        fields["curvature"] = math.log(2.0) * (factor**2).sum(axis=(2, 3))
    if mode is not Mode.DOT:
        fields["temperature"] = 2.0 * math.sqrt(width)
    if mode is Mode.BLENDED:
        fields["blend"] = blend
    fields |= {"causal": causal, "valid_length": valid_length, "block": block}
    fields["source"] = f"random: seed {seed}, kept {kept:g}"
    # What stands beside the attention has generators of its own: the attention of a seed does not depend on it.
    if transport_rank:
        sizes = (heads, tokens, width, transport_rank)
        fields |= _random_transports(np.random.default_rng([seed, 1]), sizes, transport, torsion)
    if loops:
        tile = block or Config.load("tiny").block
        extent = Extent(tokens=valid_length or tokens, layers=1, heads=heads, probes=heads, block=tile)
        cayley = TransportKind(transport) is TransportKind.CAYLEY
        convention = Convention.FRAME if cayley else Convention.DESTINATION
        drawn = sample_loops(LoopGraph(extent), LoopType.A, loops, seed, convention=convention)
        fields["loops"] = drawn.program.to_array()
    if mlp_width:
        layer = _random_layer(np.random.default_rng([seed, 2]), tokens, heads * width, kv_heads * width, mlp_width)
        fields |= layer
        fields |= _projections(layer, width)
    dense = Workload.from_tensors(mode=mode, **fields)
    if kept == 1:
        return dense
    fields["block_mask"] = _random_mask(dense.blocks_legal(), heads, kept, rng)
    return Workload.from_tensors(mode=mode, **fields)


def _random_transports(
    rng: np.random.Generator, sizes: tuple[int, int, int, int], kind: TransportKind | str, torsion: bool
) -> dict[str, object]:
    """Factors whose columns have about the norm 1: 0.95 of a run's own, 0.3 of the token's."""
    heads, tokens, width, rank = sizes
    names = ["connection_a", "connection_b"] + ["torsion_l", "torsion_r"] * torsion
    run = np.stack([np.repeat(np.arange(tokens), rng.integers(8, 41, tokens))[:tokens] for _ in range(heads)])
    found: dict[str, object] = {"transport": kind}
    for name in names:
        shared = rng.standard_normal((heads, tokens, width, rank))  # one a run; there are no more runs than tokens
        own = rng.standard_normal(sizes)
        mixed = 0.95 * np.take_along_axis(shared, run[:, :, None, None], axis=1) + 0.3 * own
        found[name] = mixed / math.sqrt(width)
    return found | ({"torsion_gate": 0.25} if torsion else {})


def _random_layer(
    rng: np.random.Generator, tokens: int, model_width: int, key_width: int, mlp_width: int
) -> dict[str, Any]:
    """Hidden states ~ N(0, 1), matrices that keep that size, biases and norms of a tenth about 0 and 1."""

    def matrix(outputs: int, inputs: int) -> np.ndarray:
        return rng.standard_normal((outputs, inputs)) / math.sqrt(inputs)

    found: dict[str, Any] = {"hidden": rng.standard_normal((tokens, model_width)), "activation": Activation.GELU}
    for name, outputs in (("w_q", model_width), ("w_k", key_width), ("w_v", key_width), ("w_o", model_width)):
        found[name] = matrix(outputs, model_width)
    found["mlp_in"], found["mlp_out"] = matrix(mlp_width, model_width), matrix(model_width, mlp_width)
    for name, count in (
        ("b_q", model_width),
        ("b_k", key_width),
        ("b_v", key_width),
        ("b_o", model_width),
        ("b_mlp_in", mlp_width),
        ("b_mlp_out", model_width),
    ):
        found[name] = 0.1 * rng.standard_normal(count)
    for name in ("ln_attn", "ln_mlp"):
        found[name] = np.array([[1.0], [0.0]]) + 0.1 * rng.standard_normal((2, model_width))
    return found


def _projections(layer: dict[str, Any], width: int) -> dict[str, np.ndarray]:
    """q, k, v (heads, L, d) of a layer's hidden states."""
    hidden, (gain, offset) = layer["hidden"], layer["ln_attn"]
    centred = hidden - hidden.mean(axis=1, keepdims=True)
    normed = gain * centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + NORM_EPSILON) + offset
    found = {}
    for part in "qkv":
        joined = normed @ layer[f"w_{part}"].T + layer[f"b_{part}"]
        found[part] = joined.reshape(len(hidden), -1, width).swapaxes(0, 1)
    return found


def _random_mask(legal: np.ndarray, heads: int, kept: float, rng: np.random.Generator) -> np.ndarray:
    """One random legal block of every row, then random others up to the count; (heads, nb, nb) bool."""
    places = np.argwhere(legal)
    rows = np.unique(places[:, 0])
    count = round(kept * len(places))
    if count < len(rows):
        least = len(rows) / len(places)
        raise must("random_workload", "kept", f"at least {least:.4g} to leave a block in every row", kept)
    mask = np.zeros((heads, *legal.shape), dtype=bool)
    for head in range(heads):
        order = rng.permutation(len(places))
        _, first = np.unique(places[order, 0], return_index=True)
        others = np.setdiff1d(np.arange(len(places)), first)
        chosen = places[order[np.concatenate([first, others[: count - len(rows)]])]]
        mask[head, chosen[:, 0], chosen[:, 1]] = True
    return mask


def _need_torch() -> None:
    if find_spec("torch") is None:
        raise MissingToolError("PyTorch is not installed: pip install torch==2.13.0")


def digits_workload(
    images: Sequence[int],
    layer: int,
    *,
    model: DigitModel | str = "plain",
    commutator: bool = False,
) -> Workload:
    """What one layer of a committed digit classifier reads for some images, Riemannian.

    Parameters
    ----------
    images : numbers in 0..1796 of scikit-learn's digits; the heads of the images are stacked in this order
    layer : attention layer, from 0
    model : a :class:`~dtp.reference.digits.DigitModel` or its word: ``plain``, ``transport``, ``holonomy``. The last
        two bring transports; these pair neighbouring heads, so that a workload then holds one image
    commutator : also the layer's hidden state and matrices, of one image

    Returns
    -------
    Workload with len(images) × 2 heads, 64 tokens, width 32.

    Raises
    ------
    DtpError
        A number out of range, an unknown model, or several images where one is needed; ``MissingToolError`` without
        PyTorch.
    """
    _need_torch()
    from dtp.reference.digits import DigitModel, layer_run, layer_weights, load_classifier
    from dtp.reference.fbt import FbtBlock

    if model not in list(DigitModel):
        raise must("digits", "model", f"one of {', '.join(DigitModel)}", str(model))
    chosen = DigitModel(model)
    classifier = load_classifier(chosen.path)
    run = layer_run(classifier, np.array(list(images), dtype=np.int64), layer)
    if len(images) > 1 and (commutator or run.transport is not None):
        reason = "the commutator's hidden state" if commutator else "transports, which pair neighbouring heads"
        raise must("digits", "images", f"one image number with {reason}", list(images))
    fields: dict[str, Any] = {}
    if commutator:
        fields |= layer_weights(cast(FbtBlock, classifier.blocks[layer])) | {"hidden": run.hidden[0]}
        fields["activation"] = Activation.GELU
    named = "" if chosen is DigitModel.PLAIN else f", model {chosen}"
    source = f"digits: layer {layer}, images {', '.join(str(image) for image in images)}{named}"
    return layer_workload(run, classifier.config.temperature, source=source, **fields)


def layer_workload(run: LayerRun, temperature: float, places: slice = slice(None), **fields: Any) -> Workload:
    """What a layer of a digit classifier reads, Riemannian.

    Parameters
    ----------
    places : of the images that ``run`` holds; their heads are stacked
    fields : anything else that the workload gets
    """
    seen, transport = run.tensors, run.transport
    if transport is not None:
        factors = ("connection_a", "connection_b", "torsion_l", "torsion_r")
        fields |= {name: getattr(transport, name)[places].flatten(0, 1) for name in factors}
        fields |= {"transport": transport.kind, "torsion_gate": transport.gate}
    return Workload.from_tensors(
        mode=Mode.RIEMANNIAN,
        causal=False,
        q=seen.q[places].flatten(0, 1),
        k=seen.k[places].flatten(0, 1),
        v=seen.v[places].flatten(0, 1),
        frame=seen.frame.repeat(len(seen.q[places]), 1, 1),
        metric_factor=seen.metric_factor[places].flatten(0, 1),
        curvature=seen.curvature[places].flatten(0, 1),
        temperature=temperature,
        **fields,
    )


def minilm_workload(
    texts: str | Sequence[str] = PROSE[0],
    *,
    layers: Sequence[int] | None = None,
    tokens: int = 128,
    commutator: bool = False,
) -> Workload:
    """What the attention of all-MiniLM-L6-v2 reads for some texts, dot product, float32.

    Heads are stacked by text, then layer, then head: 72 for one text and all six layers. A text shorter than
    ``tokens`` is padded and ``valid_length`` says so; several texts must then have equal lengths.

    Parameters
    ----------
    texts : one text or several
    layers : numbers in 0..5, default all
    tokens : L, 2..512, both end marks included
    commutator : also hidden state and matrices, of one layer and one text

    Raises
    ------
    DtpError
        A value out of range, or texts of unequal length; ``MissingToolError`` without the model's packages.
    """
    _need_torch()
    import torch

    from dtp.reference.minilm import LAYERS, layer_weights, run
    from dtp.reference.minilm import NORM_EPSILON as MINILM_EPSILON

    texts = [texts] if isinstance(texts, str) else list(texts)
    chosen = range(LAYERS) if layers is None else layers
    for layer in chosen:
        if not 0 <= layer < LAYERS:
            raise must("minilm", "layers", f"integers in 0..{LAYERS - 1}", layer)
    if len(chosen) == 0:
        raise must("minilm", "layers", "at least one layer", list(chosen))
    if commutator and len(texts) * len(chosen) > 1:
        wanted = "one layer and one text with the commutator's hidden state"
        raise must("minilm", "layers", wanted, f"{len(chosen)} layers of {len(texts)} texts")
    result = run(texts, tokens)
    if len(set(result.lengths)) > 1:
        raise must("minilm", "texts", "equally long in tokens after cutting", result.lengths)
    parts: dict[str, Any] = {}
    for index, name in enumerate("qkv"):
        parts[name] = torch.stack([result.layers[layer][index] for layer in chosen], dim=1).flatten(0, 2)
    if commutator:
        parts |= layer_weights(chosen[0]) | {"hidden": result.hidden[chosen[0]][0]}
        parts |= {"activation": Activation.GELU, "norm_epsilon": MINILM_EPSILON}
    named = ", ".join(str(layer) for layer in chosen)
    source = f"all-MiniLM-L6-v2 (Apache-2.0): {len(texts)} text(s), layers {named}, 12 heads each"
    return Workload.from_tensors(mode=Mode.DOT, causal=False, valid_length=result.lengths[0], source=source, **parts)


def minilm_extract() -> Workload:
    """The committed extract of all-MiniLM-L6-v2: layers 1 and 4 of 64 tokens of prose, 24 heads of width 32.

    It needs neither PyTorch nor the model's packages.
    """
    return Workload.load(MINILM_EXTRACT)


def write_minilm_extract(path: Path = MINILM_EXTRACT) -> None:
    """Make the committed extract again from the model's packages."""
    minilm_workload(PROSE[0], layers=EXTRACT_LAYERS, tokens=EXTRACT_TOKENS).save(path)
