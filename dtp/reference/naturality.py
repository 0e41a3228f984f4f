"""How far each head is from commuting with the residual update, in float: the commutator of SPEC §5, head by head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dtp.reference.holonomy import ENERGY_FLOOR


def head_energies(
    hidden: Tensor, attend: Callable[[Tensor], Tensor], output: Tensor, residual: Callable[[Tensor], Tensor]
) -> Tensor:
    """‖Δ_i‖² / ‖Attn(h + Res(h))_i‖² with Attn restricted to one head [GR §10.1]; (B, H, L).

        Δ = Attn(h + Res(h)) − ( Attn(h) + Res(Attn(h)) )

    The bias of the output projection belongs to no head and is left out.

    Parameters
    ----------
    hidden : h, (B, L, model)
    attend : outputs of all heads (B, H, L, d) at a state; what it keeps of h makes ``frozen`` or ``full``
    output : W_O, (model, H·d)
    residual : Res of states (..., model), its LayerNorm included
    """
    own, moved = attend(hidden), attend(hidden + residual(hidden))
    heads, width = own.shape[1], own.shape[3]
    by_head = output.view(-1, heads, width)
    first = torch.einsum("bhld,mhd->bhlm", moved, by_head)
    second = torch.einsum("bhld,mhd->bhlm", own, by_head)
    difference = first - second - residual(second)
    return (difference**2).sum(-1) / (first**2).sum(-1).clamp(min=ENERGY_FLOOR)
