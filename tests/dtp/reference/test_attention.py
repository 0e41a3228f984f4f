"""The float64 reference against loops written out pair by pair; lifted scores against direct ones."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from dtp.errors import DtpError
from dtp.reference.attention import (
    alignment,
    attention,
    best_shared_frame,
    direct_scores,
    lifted_scores,
    masked_probabilities,
    scores,
    share_keys,
    sqnr_db,
)
from dtp.workload import Mode, Workload
from tools.workloads import random_workload


def job(mode: Mode, seed: int, kept: float = 1.0, valid_length: int = 20) -> Workload:
    return random_workload(
        tokens=23, width=8, heads=4, kv_heads=2, mode=mode, kept=kept, causal=True, seed=seed, block=4,
        frame_rank=3, metric_rank=2, valid_length=valid_length, blend=0.35,
    )  # fmt: skip


def score_by_hand(job: Workload, head: int, i: int, j: int) -> float:
    """One score from the formulas of the papers, metric matrices written out."""
    q = job.q[head, i].astype(float)
    k = job.k[head // job.groups, j].astype(float)
    dot = float(q @ k) / math.sqrt(job.width)
    if job.mode is Mode.DOT:
        return dot
    metric, omega = np.eye(job.width), 0.0
    if job.frame is not None and job.metric_factor is not None and job.curvature is not None:
        for token in (i, j):
            factor = job.frame[head].astype(float) @ job.metric_factor[head, token].astype(float)
            metric += 0.5 * factor @ factor.T
            omega += float(job.curvature[head, token])
    assert job.temperature is not None
    geodesic = -(float((q - k) @ metric @ (q - k)) + omega) / job.temperature
    if job.mode is Mode.BLENDED:
        assert job.blend is not None
        return (1 - job.blend) * dot + job.blend * geodesic
    return geodesic


@pytest.mark.parametrize("mode", Mode)
def test_direct_scores_are_the_papers_formulas(mode: Mode) -> None:
    workload = job(mode, seed=1)
    got = scores(workload)
    assert got.dtype == torch.float64
    for head, i, j in product(range(4), (0, 7, 22), range(23)):
        assert got[head, i, j].item() == pytest.approx(score_by_hand(workload, head, i, j), abs=1e-12)


@pytest.mark.parametrize(("mode", "seed"), list(product(Mode, range(3))))
def test_lifted_scores_differ_by_a_constant_of_the_row(mode: Mode, seed: int) -> None:
    workload = job(mode, seed)
    difference = scores(workload) - lifted_scores(workload)
    constant = difference.mean(-1, keepdim=True)
    assert (difference - constant).abs().max() < 1e-9
    if mode is not Mode.DOT:
        assert constant.std() > 1e-3  # else a thing would be compared with itself


def test_lifted_scores_feel_every_metric_tensor() -> None:
    """Without this the lift could drop a term that the stimulus keeps small."""
    workload = job(Mode.RIEMANNIAN, seed=5)
    whole = lifted_scores(workload)
    for name in ("metric_factor", "curvature"):
        changed = {field: getattr(workload, field) for field in Workload.__dataclass_fields__}
        changed[name] = (changed[name] * 1.5).astype(np.float32)
        other = lifted_scores(Workload(**changed))
        centred = (whole - other) - (whole - other).mean(-1, keepdim=True)
        assert centred.abs().max() > 1e-2, name


def test_alignment_moves_the_frame_to_the_first_axes() -> None:
    frame = torch.linalg.qr(torch.randn(3, 8, 3, dtype=torch.float64, generator=seeded(2))).Q
    rotation, correction = alignment(frame)
    assert torch.allclose(rotation.mT @ rotation, torch.eye(8, dtype=torch.float64).expand(3, 8, 8))
    assert torch.allclose(rotation[..., :3] @ correction, frame)
    assert (rotation.mT @ frame)[:, 3:].abs().max() < 1e-14


@pytest.mark.parametrize("mode", Mode)
def test_attention_is_a_loop_over_kept_keys(mode: Mode) -> None:
    workload = job(mode, seed=3, kept=0.6)
    got = attention(workload)
    assert workload.kept_fraction < 0.7
    for head, i in product(range(4), range(23)):
        weight, total = np.zeros(8), 0.0
        for j in range(min(i + 1, 20) if i < 20 else 0):
            assert workload.block_mask is not None
            if workload.block_mask[head, i // 4, j // 4]:
                p = math.exp(score_by_hand(workload, head, i, j))
                weight += p * workload.v[head // 2, j].astype(float)
                total += p
        expected = weight / total if total else weight
        assert np.allclose(got[head, i].numpy(), expected, atol=1e-12), (head, i)
    assert (got[:, 20:] == 0).all()


def test_a_row_without_a_key_is_zero() -> None:
    keep = torch.tensor([[True, False], [False, False]])
    probability = masked_probabilities(torch.tensor([[900.0, 1e4], [1.0, 2.0]], dtype=torch.float64), keep)
    assert probability.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_shared_keys_repeat_neighbours() -> None:
    keys = torch.arange(2.0).view(2, 1, 1)
    assert share_keys(keys, 6).flatten().tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("mode", "field"),
    [(Mode.EUCLIDEAN, "temperature"), (Mode.RIEMANNIAN, "frame"), (Mode.BLENDED, "blend")],
)
def test_direct_scores_name_what_is_missing(mode: Mode, field: str) -> None:
    workload = job(Mode.BLENDED, seed=1)
    given = {"temperature": 2.0, "blend": 0.5}
    tensors = {
        "frame": torch.from_numpy(workload.frame.copy()).double(),
        "metric_factor": torch.from_numpy(workload.metric_factor.copy()).double(),
    }
    options = {name: value for name, value in (given | tensors).items() if name != field}
    q = torch.from_numpy(workload.q.copy()).double()
    with pytest.raises(DtpError, match=rf"^direct_scores\.{field} must be given"):
        direct_scores(q, q, mode, **options)


# ---------------------------------------------------------------- best frame


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative_error(factor: torch.Tensor, frame: torch.Tensor) -> torch.Tensor:
    """Frobenius error of all U Uᵀ after projection on a frame, relative, a head: matrices written out."""
    whole = factor @ factor.mT
    projector = (frame @ frame.mT).unsqueeze(1)
    kept = projector @ whole @ projector
    return ((whole - kept) ** 2).sum((1, 2, 3)).sqrt() / (whole**2).sum((1, 2, 3)).sqrt()


def test_a_frame_of_the_factors_own_rank_loses_nothing() -> None:
    hidden = torch.linalg.qr(torch.randn(2, 16, 3, dtype=torch.float64, generator=seeded(4))).Q
    inside = torch.randn(2, 30, 3, 2, dtype=torch.float64, generator=seeded(5))
    factor = hidden.unsqueeze(1) @ inside
    frame, metric_factor, error = best_shared_frame(factor, 3)
    assert error.max() < 1e-7
    assert torch.allclose(frame.unsqueeze(1) @ metric_factor, factor)
    assert torch.allclose(frame.mT @ frame, torch.eye(3, dtype=torch.float64).expand(2, 3, 3))


@pytest.mark.parametrize("rank", [1, 3, 8, 16])
def test_the_truncation_error_is_the_matrices_own(rank: int) -> None:
    spread = torch.logspace(0, -1, 16, dtype=torch.float64).view(1, 1, 16, 1)
    factor = spread * torch.randn(2, 40, 16, 3, dtype=torch.float64, generator=seeded(6))
    frame, metric_factor, error = best_shared_frame(factor, rank)
    assert torch.allclose(error, relative_error(factor, frame), atol=1e-7)
    assert torch.allclose(metric_factor, frame.mT.unsqueeze(1) @ factor)
    if rank < 16:
        assert error.min() > 0.01
        other = torch.linalg.qr(torch.randn(2, 16, rank, dtype=torch.float64, generator=seeded(7))).Q
        energy, of_other = ((f.mT.unsqueeze(1) @ factor).square().sum((1, 2, 3)) for f in (frame, other))
        assert (energy > of_other).all()


def test_a_flat_metric_has_no_truncation_error() -> None:
    error = best_shared_frame(torch.zeros(2, 5, 8, 2, dtype=torch.float64), 3)[2]
    assert error.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("rank", [0, 9])
def test_a_frame_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(DtpError, match=rf"^best_shared_frame\.rank must be an integer in 1\.\.8, not {rank}"):
        best_shared_frame(torch.zeros(1, 5, 8, 2, dtype=torch.float64), rank)


# ---------------------------------------------------------------------- error


def test_sqnr_is_in_decibels_a_head() -> None:
    reference = np.ones((4, 3, 2))
    measured = reference.copy()
    measured[0] += 0.1
    measured[1] += 0.01
    reference[3], measured[3] = 0, 1
    got = sqnr_db(torch.from_numpy(reference), measured)
    assert got[:2] == pytest.approx([20, 40])
    assert got[2] == math.inf
    assert got[3] == -math.inf
    with pytest.raises(DtpError, match=r"^sqnr_db\.measured must be of shape \(4, 3, 2\) like reference"):
        sqnr_db(reference, measured[:3])
