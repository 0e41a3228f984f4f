"""Ready-made workloads: a digit classifier, a small language model, and seeded random tensors."""

from __future__ import annotations

import math

import numpy as np

from dtp.errors import must
from dtp.workload import Mode, Workload, parse_mode


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
) -> Workload:
    """Seeded tensors of realistic size: q, k, v ~ N(0, 1), one key in eight resembling some query.

    The temperature is 2√d, so that a Euclidean score weighs q·k as a dot-product score does. In metric modes
    E‖U_t‖_F² = 0.25·R·r, tokens differ by up to a factor of four, and Ω_t = softplus(0)·‖U_t‖_F² [RA (21)].

    Parameters
    ----------
    kept : fraction of the legal blocks that each head keeps, at random, in (0, 1]; the count is rounded to
        the nearest block. No row of blocks is left empty; the diagonal is not forced.
    block : tokens along one side of a block; needed when ``kept`` is below 1.
    kv_heads : key heads, default ``heads``.
    blend : μ, read in blended mode alone.

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
        if value < 1:
            raise must("random_workload", name, "an integer of at least 1", value)
    if heads % kv_heads:
        raise must("random_workload", "heads", f"a multiple of kv_heads {kv_heads}", heads)
    if mode.is_metric and frame_rank > width:
        raise must("random_workload", "frame_rank", f"at most the width {width}", frame_rank)
    if not 0 < kept <= 1:
        raise must("random_workload", "kept", "a fraction in (0, 1]", kept)
    if kept < 1 and block is None:
        raise must("random_workload", "block", "given when kept is below 1", None)

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
    dense = Workload.from_tensors(mode=mode, **fields)
    if kept == 1:
        return dense
    fields["block_mask"] = _random_mask(dense.blocks_legal(), heads, kept, rng)
    return Workload.from_tensors(mode=mode, **fields)


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
