"""Fiber transport, loops and their holonomy in PyTorch float64, in the papers' own dense terms where that is possible.

A token t of a head has the generator X_t = A_t B_tᵀ − B_t A_tᵀ + γ(L_t R_tᵀ − R_t L_tᵀ) [RA §5.5-5.6], antisymmetric.
Its transport is I + X_t (``linear``) or the Cayley transform (I − X_t/2)⁻¹(I + X_t/2) (``cayley``, orthogonal). With
V = [B, |γ|^½ R, A, sgn(γ)|γ|^½ L] and J the symplectic form, X = V J Vᵀ, so that Cayley is the rank-k form

    P x = x − V m,  G m = Vᵀx,  G = ½VᵀV + J;  Pᵀ has Gᵀ in the place of G                  (SPEC §2).

Shapes: H heads, L tokens, head width d, r columns of a connection or torsion factor, k = 2r or 4r columns of V, n
probes. More leading dimensions, a batch of images say, are allowed everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dtp.errors import must
from dtp.workload import TransportKind

ENERGY_FLOOR = 1e-12
"""Least ‖x‖² that the energy of a loop is divided by."""


class Convention(StrEnum):
    """What an attention edge j → i does: P_i P_j⁻¹ (``frame``), or P_i alone (``destination``, [RA (24)])."""

    FRAME = "frame"
    DESTINATION = "destination"


# ---- transports --------------------------------------------------------------------------------------------


def symplectic(columns: int) -> Tensor:
    """J (k, k) with [B, A] J = [A, −B]; float64.

    Raises
    ------
    DtpError
        When ``columns`` is odd.
    """
    if columns < 2 or columns % 2:
        raise must("symplectic", "columns", "an even number of at least 2", columns)
    half = torch.eye(columns // 2, dtype=torch.float64)
    zero = torch.zeros_like(half)
    return torch.cat([torch.cat([zero, -half], 1), torch.cat([half, zero], 1)], 0)


@dataclass(frozen=True)
class Transport:
    """The transports of tokens, usually of (..., H, L).

    Parameters
    ----------
    kind : TransportKind
    connection_a, connection_b : A, B, (..., d, r)
    torsion_l, torsion_r : L, R, (..., d, r), or both None
    torsion_gate : γ, a number or a tensor of one element

    Raises
    ------
    DtpError
        For factors whose shapes do not agree.
    """

    kind: TransportKind
    connection_a: Tensor
    connection_b: Tensor
    torsion_l: Tensor | None = None
    torsion_r: Tensor | None = None
    torsion_gate: float | Tensor = 0.0

    def __post_init__(self) -> None:
        wanted = self.connection_a.shape
        for name in ("connection_b", "torsion_l", "torsion_r"):
            factor = getattr(self, name)
            if factor is not None and factor.shape != wanted:
                raise must("Transport", name, f"of shape {tuple(wanted)} like connection_a", tuple(factor.shape))
        if (self.torsion_l is None) != (self.torsion_r is None):
            raise must("Transport", "torsion_r", "given exactly when torsion_l is", type(self.torsion_r).__name__)

    @property
    def gate(self) -> float:
        """γ as a number."""
        return float(torch.as_tensor(self.torsion_gate).detach())

    def map(self, change: Callable[[Tensor], Tensor]) -> Transport:
        """The transports with a function applied to every factor."""
        left = None if self.torsion_l is None else change(self.torsion_l)
        right = None if self.torsion_r is None else change(self.torsion_r)
        return replace(
            self,
            connection_a=change(self.connection_a),
            connection_b=change(self.connection_b),
            torsion_l=left,
            torsion_r=right,
        )

    def __getitem__(self, place: Any) -> Transport:
        """The transports at an index of the leading dimensions."""
        return self.map(lambda factor: factor[place])

    def generator(self) -> Tensor:
        """X, (..., d, d) [RA (22), §5.6]."""
        a, b = self.connection_a, self.connection_b
        x = a @ b.mT - b @ a.mT
        if self.torsion_l is not None and self.torsion_r is not None:
            left, right = self.torsion_l, self.torsion_r
            x = x + self.torsion_gate * (left @ right.mT - right @ left.mT)
        return x

    def columns(self) -> Tensor:
        """V = [B, |γ|^½ R, A, sgn(γ)|γ|^½ L], (..., d, k): X = V J Vᵀ."""
        if self.torsion_l is None or self.torsion_r is None:
            return torch.cat([self.connection_b, self.connection_a], -1)
        gate = torch.as_tensor(self.torsion_gate, dtype=self.connection_a.dtype)
        root = gate.abs().sqrt()
        left = gate.sign() * root * self.torsion_l
        return torch.cat([self.connection_b, root * self.torsion_r, self.connection_a, left], -1)

    def apply(self, x: Tensor, *, transpose: bool = False) -> Tensor:
        """P x or Pᵀ x of vectors (..., d), without a (d, d) matrix."""
        columns = self.columns()
        form = symplectic(columns.shape[-1]).to(columns.dtype)
        seen = columns.mT @ x.unsqueeze(-1)
        if self.kind is TransportKind.LINEAR:
            mixed = (form if transpose else -form) @ seen
        else:
            gram = 0.5 * columns.mT @ columns + form
            mixed = torch.linalg.solve(gram.mT if transpose else gram, seen)
        return x - (columns @ mixed).squeeze(-1)

    def matrices(self) -> Tensor:
        """P as dense matrices (..., d, d) by the papers' formulas, the Cayley transform by a d × d solve."""
        x = self.generator()
        unit = torch.eye(x.shape[-1], dtype=x.dtype)
        if self.kind is TransportKind.LINEAR:
            return unit + x
        return cast(Tensor, torch.linalg.solve(unit - 0.5 * x, unit + 0.5 * x))


def next_head(transport: Transport) -> Transport:
    """At the place of head H the transports of head H + 1, cyclic; leading dimensions (..., H, L)."""
    return transport.map(lambda factor: factor.roll(-1, dims=-4))


# ---- the field of all pairs --------------------------------------------------------------------------------


def energy(end: Tensor, start: Tensor) -> Tensor:
    """‖x_end − x‖² / max(‖x‖², floor) over the last dimension [GR §9.1, SPEC §4.1]."""
    return ((end - start) ** 2).sum(-1) / (start**2).sum(-1).clamp(min=ENERGY_FLOOR)


def relative_field(transport: Transport, partner: Transport, probe: Tensor) -> Tensor:
    """u_t = P′_tᵀ P_t z for every head and token (SPEC §4.2).

    Parameters
    ----------
    transport, partner : heads H and their H′, cayley, (..., H, L); :func:`next_head` gives the usual H′
    probe : z, (H, d), or (..., H, d)

    Returns
    -------
    (..., H, L, d). The energy of the loop through i and j from x = P_i z is ‖u_i − u_j‖² / ‖z‖².

    Raises
    ------
    DtpError
        For linear transports, whose transpose is not their inverse.
    """
    for name, given in (("transport", transport), ("partner", partner)):
        _need_inverse("relative_field", name, given)
    tokens = transport.connection_a.shape[-3]
    z = probe.unsqueeze(-2).expand(*probe.shape[:-1], tokens, probe.shape[-1])
    return partner.apply(transport.apply(z), transpose=True)


def block_energies(field: Tensor, probe: Tensor, block: int, valid_length: int | None = None) -> Tensor:
    """Exact mean energy over all pairs (i, j) of each block (I, J), i = j included, from block sums (SPEC §4.2).

    mean Hol² = ( n_J Σ_I‖u‖² + n_I Σ_J‖u‖² − 2 S_I·S_J ) / ( n_I n_J ‖z‖² ), never negative up to rounding.

    Parameters
    ----------
    field : u, (..., L, d); probe : z, (..., d)
    block : tokens along one side; the last block may be shorter
    valid_length : tokens before the padding, default L; a block beyond it has energy 0

    Returns
    -------
    (..., ceil(L / block), ceil(L / block)), symmetric.
    """
    tokens = field.shape[-2]
    live = (torch.arange(tokens) < (tokens if valid_length is None else valid_length)).to(field.dtype)
    owner = torch.nn.functional.one_hot(torch.arange(tokens) // block).to(field.dtype) * live.unsqueeze(-1)
    count = owner.sum(0)
    total = owner.mT @ field  # S, (..., blocks, d)
    square = (owner.mT @ (field**2).sum(-1, keepdim=True)).squeeze(-1)
    spread = square.unsqueeze(-1) * count + count.unsqueeze(-1) * square.unsqueeze(-2) - 2 * total @ total.mT
    scale = (probe**2).sum(-1).clamp(min=ENERGY_FLOOR)[..., None, None]
    return spread.clamp(min=0) / (torch.outer(count, count).clamp(min=1) * scale)


def block_scores(transport: Transport, probes: Tensor, block: int, valid_length: int | None = None) -> Tensor:
    """Holonomy of each head and block: the mean over probes, and over the two pairs that a head takes part in.

    The pair (H, H + 1) is credited to both heads (SPEC §4.1), so that head H has the mean of (H − 1, H) and (H, H + 1).

    Parameters
    ----------
    transport : cayley, (..., H, L)
    probes : (H, n, d); row H serves the pair (H, H + 1)

    Returns
    -------
    (..., H, blocks, blocks)
    """
    partner = next_head(transport)
    energies = []
    for probe in probes.unbind(-2):
        field = relative_field(transport, partner, probe)
        energies.append(block_energies(field, probe, block, valid_length))
    mean = torch.stack(energies).mean(0)
    return 0.5 * (mean + mean.roll(1, dims=-3))


def field_loss(transport: Transport, probes: Tensor) -> Tensor:
    """Mean Hol² of all type A loops between heads H and H + 1, a scalar: what training with holonomy lowers."""
    tokens = transport.connection_a.shape[-3]
    return block_scores(transport, probes, tokens).mean()


# ---- loops by edges ----------------------------------------------------------------------------------------


class RankK(NamedTuple):
    """The operation y = c·x + W(Vᵀx), with W, V (..., d, k) and c 0 or 1 (SPEC §2)."""

    c: int
    w: Tensor
    v: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """y of vectors x (..., d)."""
        return self.c * x + (self.w @ (self.v.mT @ x.unsqueeze(-1))).squeeze(-1)

    def inverse(self) -> RankK:
        """I − W(I + VᵀW)⁻¹Vᵀ, the exact inverse by Woodbury.

        Raises
        ------
        DtpError
            For c = 0: a rank-k matrix alone has no inverse.
        """
        if self.c != 1:
            raise must("RankK", "c", "1 to have an inverse", self.c)
        small = self.v.mT @ self.w
        small = small + torch.eye(small.shape[-1], dtype=small.dtype)
        return RankK(1, -self.w @ torch.linalg.inv(small), self.v)

    def placed(self, first: int, width: int) -> RankK:
        """The operation on rows first.. of a wider vector, the identity (or zero) elsewhere: a head in d_model."""
        w, v = (f.new_zeros(*f.shape[:-2], width, f.shape[-1]) for f in (self.w, self.v))
        last = first + self.w.shape[-2]
        w[..., first:last, :], v[..., first:last, :] = self.w, self.v
        return RankK(self.c, w, v)


def rank_k(transport: Transport) -> RankK:
    """The transports as rank-k operations: W = V J for linear ones, −V(½VᵀV + J)⁻¹ for Cayley."""
    columns = transport.columns()
    form = symplectic(columns.shape[-1]).to(columns.dtype)
    if transport.kind is TransportKind.LINEAR:
        return RankK(1, columns @ form, columns)
    return RankK(1, -columns @ torch.linalg.inv(0.5 * columns.mT @ columns + form), columns)


def residual_edge(jacobian: Tensor, rank: int) -> tuple[RankK, float]:
    """A vertical edge up: I + the best rank-k part of (Jacobian − I), and what that leaves out.

    Parameters
    ----------
    jacobian : (d, d), of the residual update h → h + Res(h) at one token
    rank : k in 1..d

    Returns
    -------
    the edge, and ‖left out‖_F / ‖Jacobian − I‖_F (0 for the identity)
    """
    width = jacobian.shape[-1]
    if not 1 <= rank <= width:
        raise must("residual_edge", "rank", f"an integer in 1..{width}", rank)
    left, size, right = torch.linalg.svd(jacobian - torch.eye(width, dtype=jacobian.dtype))
    whole = float((size**2).sum())
    lost = float((size[rank:] ** 2).sum())
    return RankK(1, left[:, :rank] * size[:rank], right[:rank].mT), (lost / whole) ** 0.5 if whole else 0.0


def attention_edge(
    transport: Transport, start: int, end: int, convention: Convention = Convention.FRAME
) -> list[RankK]:
    """The operations of the edge from token ``start`` to token ``end`` in one head, in the order of use.

    Parameters
    ----------
    transport : one head's, (L,)

    Raises
    ------
    DtpError
        For a token that the head lacks; for ``frame`` with linear transports.
    """
    tokens = transport.connection_a.shape[-3]
    for name, token in (("start", start), ("end", end)):
        if not 0 <= token < tokens:
            raise must("attention_edge", name, f"a token in 0..{tokens - 1}", token)
    arrive = rank_k(transport[end])
    if convention is Convention.DESTINATION:
        return [arrive]
    _need_inverse("attention_edge", "transport", transport)
    return [rank_k(transport[start]).inverse(), arrive]


def type_a_loop(
    head: Transport, partner: Transport, i: int, j: int, convention: Convention = Convention.FRAME
) -> list[RankK]:
    """(i) –H→ (j) –H′→ (i) of two heads' transports (L,)."""
    return [*attention_edge(head, i, j, convention), *attention_edge(partner, j, i, convention)]


def type_b_loop(
    upper: Transport, lower: Transport, up_i: RankK, up_j: RankK, i: int, j: int,
    convention: Convention = Convention.FRAME,
) -> list[RankK]:  # fmt: skip
    """(i, ℓ) up to (i, ℓ′), across to (j, ℓ′), down to (j, ℓ), across to (i, ℓ), all in the width of one head.

    Going down is the exact inverse of going up (SPEC §4.1).

    Parameters
    ----------
    upper, lower : transports (L,) of the heads that lead across at ℓ′ and at ℓ
    up_i, up_j : vertical edges of tokens i and j from ℓ to ℓ′
    """
    across, back = attention_edge(upper, i, j, convention), attention_edge(lower, j, i, convention)
    return [up_i, *across, up_j.inverse(), *back]


def loop_energy(edges: Sequence[RankK], x: Tensor) -> Tensor:
    """Hol² of a closed walk, any alternation of edges (type C), for a probe x (..., d) at its start node."""
    if not edges:
        raise must("loop_energy", "edges", "at least one", list(edges))
    end = x
    for edge in edges:
        end = edge.apply(end)
    return energy(end, x)


def _need_inverse(owner: str, name: str, transport: Transport) -> None:
    if transport.kind is not TransportKind.CAYLEY:
        raise must(owner, name, "cayley, whose transpose is its inverse", transport.kind.value)
