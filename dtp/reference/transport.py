"""Direct formulas of the maps that the rank-k transport engine runs, in PyTorch float64 [SPEC §2].

Every function takes batched factors and states (n, d) and forms the dense matrix that the engine never forms.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

__all__ = ["cayley", "edge", "generator", "inverse_metric", "linear", "metric_projection"]


def generator(
    a: Tensor, b: Tensor, torsion_l: Tensor | None = None, torsion_r: Tensor | None = None, gate: float = 0.0
) -> Tensor:
    """ABᵀ − BAᵀ + γ(LRᵀ − RLᵀ), (n, d, d) [RA §5.6, (22)]."""
    result = a @ b.mT - b @ a.mT
    if torsion_l is not None and torsion_r is not None:
        result = result + gate * (torsion_l @ torsion_r.mT - torsion_r @ torsion_l.mT)
    return result


def linear(omega: Tensor) -> Tensor:
    """I + Ω, (n, d, d): fiber transport, with torsion where the generator has it."""
    return torch.eye(omega.shape[-1], dtype=omega.dtype) + omega


def cayley(omega: Tensor) -> Tensor:
    """(I − ½Ω)⁻¹(I + ½Ω), (n, d, d), orthogonal because Ωᵀ = −Ω."""
    unit = torch.eye(omega.shape[-1], dtype=omega.dtype)
    return cast(Tensor, torch.linalg.solve(unit - omega / 2, unit + omega / 2))


def inverse_metric(u: Tensor) -> Tensor:
    """(I + UUᵀ)⁻¹, (n, d, d) [RA (14), (26)]."""
    return cast(Tensor, torch.linalg.inv(torch.eye(u.shape[-2], dtype=u.dtype) + u @ u.mT))


def metric_projection(u: Tensor, gamma: float) -> Tensor:
    """I + (γ/d) UUᵀ, (n, d, d) [RA (20)]."""
    width = u.shape[-2]
    return torch.eye(width, dtype=u.dtype) + gamma / width * (u @ u.mT)


def edge(w_o: Tensor, w_v: Tensor) -> Tensor:
    """W_O W_V, (n, d_model, d_model): a standard head's edge."""
    return w_o @ w_v
