"""Fiber Bundle Transformer [RA §5] with one metric frame a head, in PyTorch.

A layer's MetricNet gives every token a factor C_t in the head's frame F, so that U_t = F C_t and the token's
metric is I + U_t U_tᵀ. Attention is the softmax of negative geodesic distances with the curvature proxy
[RA (15), (21), (23)]. With a transport rank, two more nets give every token connection and torsion factors in each
head, and the Cayley transport of the token is applied to what it attends to [RA §5.5-5.6]. Preconditioned residuals
are a unit of their own and take no part here.

Shapes: B images, H heads, L tokens, head width d, frame rank R, metric rank r, transport rank r_T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dtp.errors import must
from dtp.reference.attention import symmetric_pack
from dtp.reference.holonomy import Transport
from dtp.workload import TransportKind

AttentionCore = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""attention_core(q, k, v, frame, metric_factor, curvature, tau) -> o.

q, k, v and o are (B, H, L, d), frame is (H, d, R), metric_factor (B, H, L, R, r), curvature (B, H, L).
"""

TORSION_GATE_START = 0.25
"""γ before training; the paper recommends a small one."""


@dataclass(frozen=True)
class FbtConfig:
    """Sizes of the classifier; all counts at least 1, ``model_width`` = ``heads`` × ``head_width``.

    ``transport_rank`` alone may be 0: no transport and no torsion.
    """

    tokens: int = 64
    classes: int = 10
    layers: int = 2
    heads: int = 2
    head_width: int = 32
    frame_rank: int = 3
    metric_rank: int = 3
    hidden_width: int = 128
    temperature: float = 11.3125
    transport_rank: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "transport_rank" else 1
            if value < least and name != "temperature":
                raise must("FbtConfig", name, f"an integer of at least {least}", value)
        if not self.temperature > 0:
            raise must("FbtConfig", "temperature", "above 0", self.temperature)
        if self.frame_rank > self.head_width:
            raise must("FbtConfig", "frame_rank", f"at most head_width {self.head_width}", self.frame_rank)

    @property
    def model_width(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_width


class LayerTensors(NamedTuple):
    """What one layer's attention reads: q, k, v (B, H, L, d), F (H, d, R), C (B, H, L, R, r), Ω (B, H, L)."""

    q: Tensor
    k: Tensor
    v: Tensor
    frame: Tensor
    metric_factor: Tensor
    curvature: Tensor


class LayerRun(NamedTuple):
    """One layer at work: the state that it starts from (B, L, model), what its attention reads, its transports.

    The transports are (B, H, L), None without a transport rank.
    """

    hidden: Tensor
    tensors: LayerTensors
    transport: Transport | None


def geodesic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    frame: Tensor,
    metric_factor: Tensor,
    curvature: Tensor,
    tau: float,
) -> Tensor:
    """The float attention core: softmax of geodesic scores times values, (B, H, L, d) [RA (15), (23)].

    The metric terms are products in the frame's coordinates, see :func:`geodesic_logits`.
    """
    return torch.softmax(geodesic_logits(q, k, frame, metric_factor, curvature, tau), -1) @ v


def geodesic_logits(
    q: Tensor, k: Tensor, frame: Tensor, metric_factor: Tensor, curvature: Tensor, tau: float
) -> Tensor:
    """Geodesic scores up to a constant of the query, (B, H, L, L): what ``geodesic_attention`` takes the softmax of.

    With a = Fᵀq, b = Fᵀk: (a−b)ᵀM(a−b) = aᵀMa − 2(Ma)·b + ⟨M, bbᵀ⟩, so that no (L, L, d) array is formed. Terms of
    the query alone cancel in the softmax and are left out.
    """
    metric = metric_factor @ metric_factor.transpose(-1, -2)
    a, b = q @ frame, k @ frame
    metric_a = (metric @ a.unsqueeze(-1)).squeeze(-1)
    metric_b = (metric @ b.unsqueeze(-1)).squeeze(-1)
    outer_a, outer_b = a.unsqueeze(-1) * a.unsqueeze(-2), b.unsqueeze(-1) * b.unsqueeze(-2)
    query = [2 * q, metric_a, a]
    key = [k, b, metric_b]
    query += [-0.5 * symmetric_pack(metric, doubled=True), -0.5 * symmetric_pack(outer_a, doubled=True)]
    key += [symmetric_pack(outer_b, doubled=False), symmetric_pack(metric, doubled=False)]
    bias = (k**2).sum(-1) + 0.5 * (b * metric_b).sum(-1) + curvature
    score = torch.cat(query, -1) @ torch.cat(key, -1).transpose(-1, -2) - bias.unsqueeze(-2)
    return score / tau


class FbtAttention(nn.Module):
    """Projections, MetricNet [RA (19)], TorsionNet [RA (22)], connection and geodesic attention of one layer."""

    def __init__(self, config: FbtConfig) -> None:
        super().__init__()
        self.config = config
        width = config.model_width
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.metric_net = _token_net(width, config.heads * config.frame_rank * config.metric_rank)
        self.frame_seed = nn.Parameter(torch.randn(config.heads, config.head_width, config.frame_rank))
        self.curvature_beta = nn.Parameter(torch.zeros(config.heads))
        if config.transport_rank:
            factors = 2 * width * config.transport_rank
            self.connection_net, self.torsion_net = _token_net(width, factors), _token_net(width, factors)
            self.torsion_gate = nn.Parameter(torch.tensor(TORSION_GATE_START))

    def tensors(self, x: Tensor) -> LayerTensors:
        """Everything that the attention core reads, from normalised hidden states (B, L, model)."""
        config = self.config
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, config.heads, config.head_width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        shape = (batch, tokens, config.heads, config.frame_rank, config.metric_rank)
        factor = self.metric_net(x).view(shape).transpose(1, 2)
        frame = torch.linalg.qr(self.frame_seed).Q
        strength = nn.functional.softplus(self.curvature_beta)
        curvature = strength.view(1, -1, 1) * (factor**2).sum((-2, -1))
        return LayerTensors(q, k, v, frame, factor, curvature)

    def transport(self, x: Tensor) -> Transport | None:
        """Cayley transports (B, H, L) from normalised hidden states (B, L, model)."""
        if not self.config.transport_rank:
            return None
        config = self.config
        shape = (*x.shape[:2], 2, config.heads, config.head_width, config.transport_rank)
        a, b = self.connection_net(x).view(shape).transpose(1, 3).unbind(2)
        left, right = self.torsion_net(x).view(shape).transpose(1, 3).unbind(2)
        return Transport(TransportKind.CAYLEY, a, b, left, right, self.torsion_gate)

    def mix(self, tensors: LayerTensors, core: AttentionCore, transport: Transport | None = None) -> Tensor:
        """Attention of ``tensors`` by ``core``, transported, heads joined and projected, (B, L, model)."""
        mixed = core(*tensors, self.config.temperature)
        if transport is not None:
            mixed = transport.apply(mixed)
        return cast(Tensor, self.output(mixed.transpose(1, 2).flatten(2)))


def _token_net(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, outputs))


class FbtBlock(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: FbtConfig) -> None:
        super().__init__()
        width = config.model_width
        self.attention_norm = nn.LayerNorm(width)
        self.attention = FbtAttention(config)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, config.hidden_width), nn.GELU(), nn.Linear(config.hidden_width, width)
        )

    def observe(self, x: Tensor) -> LayerRun:
        """What the block's attention reads from hidden states (B, L, model)."""
        normed = self.attention_norm(x)
        return LayerRun(x, self.attention.tensors(normed), self.attention.transport(normed))

    def finish(self, run: LayerRun, core: AttentionCore) -> Tensor:
        """Hidden states (B, L, model) after the block that made ``run``."""
        x = run.hidden + self.attention.mix(run.tensors, core, run.transport)
        return cast(Tensor, x + self.feed(self.feed_norm(x)))


class FbtClassifier(nn.Module):
    """Images as token sequences, one token a pixel; the mean over tokens is classified.

    A token starts as its value times the value embedding of its place, plus the position embedding.
    """

    def __init__(self, config: FbtConfig) -> None:
        super().__init__()
        self.config = config
        width = config.model_width
        self.value = nn.Parameter(torch.randn(config.tokens, width))
        self.position = nn.Parameter(0.5 * torch.randn(config.tokens, width))
        self.blocks = nn.ModuleList(FbtBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, config.classes)

    def forward(self, pixels: Tensor, attention_core: AttentionCore = geodesic_attention) -> Tensor:
        """Class scores (B, classes) of pixels (B, L) in [0, 1]; ``attention_core`` serves every layer."""
        return self.with_tensors(pixels, attention_core)[0]

    def with_tensors(
        self, pixels: Tensor, attention_core: AttentionCore = geodesic_attention
    ) -> tuple[Tensor, list[LayerTensors]]:
        """Class scores as ``forward``, and what each layer's attention read."""
        scores, runs = self.run(pixels, lambda _layer, _run: attention_core)
        return scores, [run.tensors for run in runs]

    def run(
        self,
        pixels: Tensor,
        core_of: Callable[[int, LayerRun], AttentionCore] = lambda _layer, _run: geodesic_attention,
        first: LayerRun | None = None,
    ) -> tuple[Tensor, list[LayerRun]]:
        """Class scores, and every layer at work.

        Parameters
        ----------
        core_of : gives the attention core of a layer, from its number and what it is about to work on
        first : the first layer of an earlier run on the same pixels, which no core changes
        """
        x = pixels.unsqueeze(-1) * self.value + self.position
        runs = []
        for layer, module in enumerate(self.blocks):
            block = cast(FbtBlock, module)
            run = first if first is not None and layer == 0 else block.observe(x)
            x = block.finish(run, core_of(layer, run))
            runs.append(run)
        return self.classify(self.norm(x).mean(-2)), runs


class MetricLoss(NamedTuple):
    """The four terms against metric collapse, each a scalar, lower is better [RA (31)-(34)]."""

    flatness: Tensor
    diversity: Tensor
    smoothness: Tensor
    cap: Tensor


def metric_loss(
    metric_factor: Tensor, *, floor: float, ceiling: float, generator: torch.Generator, pairs: int = 64
) -> MetricLoss:
    """Regularisers of one layer's metrics, from C alone: with an orthonormal frame ‖U‖_F = ‖C‖_F.

    - flatness [RA (31)]: mean ReLU(floor − ‖U_t‖_F²)
    - diversity [RA (32)]: −mean ‖U_iU_iᵀ − U_jU_jᵀ‖_F² over sampled token pairs
    - smoothness [RA (33)]: mean ‖U_tU_tᵀ − U_{t+1}U_{t+1}ᵀ‖_F²
    - cap [RA (34)], squared so that it outgrows the diversity: mean ReLU(‖U_t‖_F² − ceiling)²

    Parameters
    ----------
    metric_factor : (B, H, L, R, r), L at least 2
    floor, ceiling : κ_min and κ_max of ‖U_t‖_F²
    pairs : token pairs sampled for the diversity
    """
    strength = (metric_factor**2).sum((-2, -1))
    metric = metric_factor @ metric_factor.transpose(-1, -2)
    chosen = torch.randint(metric.shape[2], (2, pairs), generator=generator)
    apart = ((metric[:, :, chosen[0]] - metric[:, :, chosen[1]]) ** 2).sum((-2, -1))
    steps = ((metric[:, :, 1:] - metric[:, :, :-1]) ** 2).sum((-2, -1))
    return MetricLoss(
        flatness=torch.relu(floor - strength).mean(),
        diversity=-apart.mean(),
        smoothness=steps.mean(),
        cap=(torch.relu(strength - ceiling) ** 2).mean(),
    )
