"""Commutator of attention and residual update in PyTorch float64 [GR §10.1], SPEC §5."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dtp.commutator import CommutatorMode, Layer, Real
from dtp.matrix import Activation
from dtp.reference.attention import direct_scores, masked_probabilities


@dataclass(frozen=True)
class Commutator:
    """Terms of Δ, each (L, M) or, for one head, the same of Attn restricted to it."""

    attended: Tensor
    plain: Tensor
    residual: Tensor

    @property
    def delta(self) -> Tensor:
        """Δ = attended − (plain + residual)."""
        return self.attended - (self.plain + self.residual)

    @property
    def ratio(self) -> Tensor:
        """‖Δ_i‖² / ‖Attn(h + Res(h))_i‖², (L,)."""
        return (self.delta**2).sum(-1) / (self.attended**2).sum(-1)


def residual(layer: Layer, x: Tensor) -> Tensor:
    """Res(x): the MLP behind its LayerNorm."""
    inner = _norm(layer, x, layer.ln_mlp) @ _double(layer.mlp_in).T + _bias(layer.b_in)
    inner = torch.nn.functional.gelu(inner) if layer.activation is Activation.GELU else torch.relu(inner)
    return inner @ _double(layer.mlp_out).T + _bias(layer.b_out)


def probabilities(layer: Layer, x: Tensor) -> Tensor:
    """Attention weights at x, (H, L, L); C_t and Ω are those of the layer wherever x lies."""
    normal = _norm(layer, x, layer.ln_attn)
    q = _heads(layer, normal @ _double(layer.w_q).T + _bias(layer.b_q))
    k = _heads(layer, normal @ _double(layer.w_k).T + _bias(layer.b_k))
    scores = direct_scores(
        q, k, layer.mode,
        frame=None if layer.frame is None else _double(layer.frame),
        metric_factor=None if layer.metric_factor is None else _double(layer.metric_factor),
        curvature=None if layer.curvature is None else _double(layer.curvature),
        temperature=layer.temperature, blend=layer.blend,
    )  # fmt: skip
    position = torch.arange(layer.tokens)
    valid = position < layer.valid
    keep = valid[:, None] & valid[None, :]
    if layer.causal:
        keep = keep & (position[None, :] <= position[:, None])
    return masked_probabilities(scores, keep.expand(layer.heads, -1, -1))


def attend(layer: Layer, weights: Tensor, x: Tensor, head: int | None = None) -> Tensor:
    """W_O of weights times the values of x; of one head alone without the output bias."""
    values = _heads(layer, _norm(layer, x, layer.ln_attn) @ _double(layer.w_v).T + _bias(layer.b_v))
    mixed = weights @ values
    if head is not None:
        lanes = mixed.shape[-1]
        return mixed[head] @ _double(layer.w_o)[:, head * lanes : (head + 1) * lanes].T
    return mixed.transpose(0, 1).reshape(layer.tokens, -1) @ _double(layer.w_o).T + _bias(layer.b_o)


def commutator(layer: Layer, mode: CommutatorMode, head: int | None = None) -> Commutator:
    """Δ(h) in float64, of all heads or of Attn restricted to one."""
    h = _double(layer.hidden)
    moved = h + residual(layer, h)
    weights = probabilities(layer, h)
    moved_weights = weights if mode is CommutatorMode.FROZEN else probabilities(layer, moved)
    plain = attend(layer, weights, h, head)
    return Commutator(attend(layer, moved_weights, moved, head), plain, residual(layer, plain))


def _norm(layer: Layer, x: Tensor, parameters: Real | None) -> Tensor:
    if parameters is None:
        return x
    deviation = (x.var(-1, unbiased=False, keepdim=True) + layer.norm_epsilon).sqrt()
    normal = (x - x.mean(-1, keepdim=True)) / torch.where(deviation > 0, deviation, 1.0)  # a constant row becomes 0
    return normal * _double(parameters[0]) + _double(parameters[1])


def _heads(layer: Layer, x: Tensor) -> Tensor:
    return x.reshape(layer.tokens, layer.heads, -1).transpose(0, 1)


def _bias(bias: Real | None) -> Tensor:
    return torch.zeros((), dtype=torch.float64) if bias is None else _double(bias)


def _double(array: object) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float64))


