"""Attention in PyTorch float64: scores in four modes, direct and lifted, and the measures of error.

Shapes: H heads, L tokens, width d, frame rank R, metric rank r. Keys and values may have fewer heads H_kv,
each shared by H / H_kv neighbouring query heads. Token t has the metric I + U_t U_tᵀ with U_t = F C_t.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtp.errors import must
from dtp.workload import Mode, Workload


def share_keys(tensor: Tensor, heads: int) -> Tensor:
    """Repeat each key head for its group of query heads: (H_kv, L, d) to (heads, L, d)."""
    return tensor.repeat_interleave(heads // tensor.shape[0], dim=0)


def dot_scores(q: Tensor, k: Tensor) -> Tensor:
    """q_i·k_j/√d, (..., L, L)."""
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def geodesic_scores(
    q: Tensor, k: Tensor, temperature: float, factor: Tensor | None = None, curvature: Tensor | None = None
) -> Tensor:
    """−(‖Δ‖² + ½‖U_iᵀΔ‖² + ½‖U_jᵀΔ‖² + Ω_i + Ω_j)/τ with Δ = q_i − k_j [RA (6), (15), (23)].

    Parameters
    ----------
    q, k : (..., L, d)
    temperature : τ > 0
    factor : U, (..., L, d, r), or None for the flat metric
    curvature : Ω, (..., L), or None for 0

    Returns
    -------
    Tensor (..., L, L), queries by keys. Forms L·L·d numbers: meant to be read, not to be fast.
    """
    delta = q.unsqueeze(-2) - k.unsqueeze(-3)
    total = (delta**2).sum(-1)
    if factor is not None:
        for_query = torch.einsum("...ijd,...idr->...ijr", delta, factor)
        for_key = torch.einsum("...ijd,...jdr->...ijr", delta, factor)
        total = total + 0.5 * (for_query**2).sum(-1) + 0.5 * (for_key**2).sum(-1)
    if curvature is not None:
        total = total + curvature.unsqueeze(-1) + curvature.unsqueeze(-2)
    return -total / temperature


def direct_scores(
    q: Tensor,
    k: Tensor,
    mode: Mode,
    *,
    frame: Tensor | None = None,
    metric_factor: Tensor | None = None,
    curvature: Tensor | None = None,
    temperature: float | None = None,
    blend: float | None = None,
) -> Tensor:
    """Scores of any mode as the papers write them, (H, L, L) queries by keys [RA (6), (15), (23), (27)].

    Parameters
    ----------
    q, k : (H, L, d); repeat the keys of a group first (``share_keys``)
    frame : F, (H, d, R), and metric_factor : C, (H, L, R, r); metric modes
    curvature : Ω, (H, L) or None
    temperature : τ, in every mode but dot
    blend : μ, in blended mode
    """
    if mode is Mode.DOT:
        return dot_scores(q, k)
    if temperature is None:
        raise must("direct_scores", "temperature", f"given in {mode} mode", None)
    if mode is Mode.EUCLIDEAN:
        return geodesic_scores(q, k, temperature)
    if frame is None or metric_factor is None:
        raise must("direct_scores", "frame", f"given with metric_factor in {mode} mode", None)
    factor = torch.einsum("hdR,htRr->htdr", frame, metric_factor)
    curved = geodesic_scores(q, k, temperature, factor, curvature)
    if mode is Mode.RIEMANNIAN:
        return curved
    if blend is None:
        raise must("direct_scores", "blend", "given in blended mode", None)
    return (1 - blend) * dot_scores(q, k) + blend * curved


def alignment(frame: Tensor) -> tuple[Tensor, Tensor]:
    """Orthogonal matrices whose transpose moves each frame into the first R coordinates.

    Parameters
    ----------
    frame : (H, d, R), orthonormal columns up to the rounding of their type

    Returns
    -------
    rotation (H, d, d) and correction (H, R, R) with frame = rotation[:, :, :R] @ correction. The map
    x → rotationᵀx of q, k and C → correction·C leaves every score as it was, exactly, whatever the frame's
    rounding.
    """
    rotation, upper = torch.linalg.qr(frame, mode="complete")
    return rotation, upper[..., : frame.shape[-1], :]


def symmetric_pack(matrix: Tensor, *, doubled: bool) -> Tensor:
    """Upper triangle of symmetric (..., R, R) as (..., R(R+1)/2).

    The off-diagonals are doubled on one side of a product, so that the inner product of two packs is ⟨A, B⟩.
    """
    rank = matrix.shape[-1]
    row, column = torch.triu_indices(rank, rank)
    packed = matrix[..., row, column]
    return torch.where(row == column, packed, 2 * packed) if doubled else packed


def lifted_operands(
    q: Tensor,
    k: Tensor,
    frame: Tensor,
    metric_factor: Tensor,
    curvature: Tensor | None,
    kappa: float,
    nu: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Operands whose inner product plus a bias of the key gives the score up to a constant of the query.

    With q, k aligned to the frame, a and b their first R coordinates, M = C Cᵀ, κ = (1−μ)/√d + 2μ/τ, ν = μ/τ:

        s = κ q′·k′ + (κa + νM_i a)·b + ν a·(M_j b) − ½ν⟨M_i, bbᵀ⟩ − ½ν⟨M_j, aaᵀ⟩ + β_j
        β_j = −ν(‖k_j‖² + ½ bᵀM_j b + Ω_j)

    Returns
    -------
    query lanes (H, L, d + R + R(R+1)), key lanes of the same shape, key bias (H, L).
    """
    rank = frame.shape[-1]
    rotation, correction = alignment(frame)
    q_aligned, k_aligned = q @ rotation, k @ rotation
    aligned_factor = correction.unsqueeze(-3) @ metric_factor
    metric = aligned_factor @ aligned_factor.transpose(-1, -2)
    a, q_plain = q_aligned[..., :rank], q_aligned[..., rank:]
    b, k_plain = k_aligned[..., :rank], k_aligned[..., rank:]
    metric_a = torch.einsum("htRS,htS->htR", metric, a)
    metric_b = torch.einsum("htRS,htS->htR", metric, b)
    outer_a, outer_b = a.unsqueeze(-1) * a.unsqueeze(-2), b.unsqueeze(-1) * b.unsqueeze(-2)
    query = [
        kappa * q_plain,
        kappa * a + nu * metric_a,
        nu * a,
        -0.5 * nu * symmetric_pack(metric, doubled=True),
        -0.5 * nu * symmetric_pack(outer_a, doubled=True),
    ]
    key = [
        k_plain,
        b,
        metric_b,
        symmetric_pack(outer_b, doubled=False),
        symmetric_pack(metric, doubled=False),
    ]
    bias = (k**2).sum(-1) + 0.5 * (b * metric_b).sum(-1)
    if curvature is not None:
        bias = bias + curvature
    return torch.cat(query, -1), torch.cat(key, -1), -nu * bias


def lifted_scores(workload: Workload) -> Tensor:
    """Scores of a workload by one inner product, (H, L, L); ``scores`` up to a constant of each row."""
    q, k = _double(workload.q), share_keys(_double(workload.k), workload.heads)
    if workload.mode.is_metric:
        frame, factor = _given(workload.frame), _given(workload.metric_factor)
        curvature = None if workload.curvature is None else _double(workload.curvature)
        query, key, bias = lifted_operands(q, k, frame, factor, curvature, workload.kappa, workload.nu)
    else:
        query, key, bias = workload.kappa * q, k, -workload.nu * (k**2).sum(-1)
    return query @ key.transpose(-1, -2) + bias.unsqueeze(-2)


def scores(workload: Workload) -> Tensor:
    """Scores of a workload as the papers write them, float64 (H, L, L); no mask applied."""
    return direct_scores(
        _double(workload.q),
        share_keys(_double(workload.k), workload.heads),
        workload.mode,
        frame=None if workload.frame is None else _double(workload.frame),
        metric_factor=None if workload.metric_factor is None else _double(workload.metric_factor),
        curvature=None if workload.curvature is None else _double(workload.curvature),
        temperature=workload.temperature,
        blend=workload.blend,
    )


def keep_masks(workload: Workload) -> Tensor:
    """Pairs inside causality, padding and block mask, bool (H, L, L)."""
    return torch.from_numpy(np.stack([workload.keep_mask(head) for head in range(workload.heads)]))


def masked_probabilities(score: Tensor, keep: Tensor) -> Tensor:
    """Softmax over the kept keys, (..., L, L); a row without a kept key is all zeros."""
    score = score.masked_fill(~keep, -math.inf)
    peak = score.amax(-1, keepdim=True)
    weight = torch.exp(score - torch.where(torch.isinf(peak), torch.zeros_like(peak), peak))
    total = weight.sum(-1, keepdim=True)
    return weight / torch.where(total == 0, torch.ones_like(total), total)


def attention(workload: Workload) -> Tensor:
    """Outputs of a workload, float64 (H, L, d): Σ_j softmax(s)_ij v_j; keyless rows and padding are zero."""
    probability = masked_probabilities(scores(workload), keep_masks(workload))
    return probability @ share_keys(_double(workload.v), workload.heads)


def best_shared_frame(factor: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The frame of a given rank that keeps most of unconstrained metric factors.

    Parameters
    ----------
    factor : U, (H, L, d, r_u)
    rank : R in 1..d

    Returns
    -------
    frame (H, d, R): top R eigenvectors of Σ_t U_t U_tᵀ;
    metric_factor (H, L, R, r_u): FᵀU_t;
    truncation_error (H,): √(Σ_t‖U_tU_tᵀ − F M_t Fᵀ‖_F² / Σ_t‖U_tU_tᵀ‖_F²), 0 for zero metrics.

    Raises
    ------
    DtpError
        When ``rank`` is outside 1..d.
    """
    width = factor.shape[-2]
    if not 1 <= rank <= width:
        raise must("best_shared_frame", "rank", f"an integer in 1..{width}", rank)
    total = torch.einsum("htdr,hter->hde", factor, factor)
    frame = torch.linalg.eigh(total).eigenvectors[..., -rank:].flip(-1)
    inside = torch.einsum("hdR,htdr->htRr", frame, factor)
    # ‖UUᵀ‖_F² = ‖UᵀU‖_F²; the projection makes the kept and the lost part of UUᵀ orthogonal
    whole = _gram_energy(factor)
    lost = (whole - _gram_energy(inside)).clamp(min=0)
    error = torch.where(whole > 0, lost / torch.where(whole > 0, whole, torch.ones_like(whole)), whole).sqrt()
    return frame, inside, error


def _gram_energy(factor: Tensor) -> Tensor:
    gram = factor.transpose(-1, -2) @ factor
    return (gram**2).sum((-3, -2, -1))


def sqnr_db(reference: Any, measured: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Signal to error, 10·log10(Σ reference² / Σ (measured − reference)²), in dB a head.

    Parameters
    ----------
    reference, measured : (H, ...) arrays or tensors of one shape

    Returns
    -------
    float64 (H,); infinite where a head has no error, −infinite where only the reference is zero.
    """
    wanted, got = np.asarray(reference, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    if wanted.shape != got.shape:
        raise must("sqnr_db", "measured", f"of shape {wanted.shape} like reference", got.shape)
    axes = tuple(range(1, wanted.ndim))
    signal, error = (wanted**2).sum(axis=axes), ((got - wanted) ** 2).sum(axis=axes)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = 10.0 * (np.log10(signal) - np.log10(error))
    return np.where(error == 0, np.inf, ratio)


def _double(array: Any) -> Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.float64))


def _given(array: Any) -> Tensor:
    if array is None:
        raise must("Workload", "frame", "given with metric_factor", None)
    return _double(array)
