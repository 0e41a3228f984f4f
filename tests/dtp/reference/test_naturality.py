"""Energies of the commutator head by head, against the formula written out."""

from __future__ import annotations

import torch
from torch import Tensor

from dtp.reference.naturality import head_energies

BATCH, HEADS, TOKENS, WIDTH, MODEL = 2, 3, 5, 4, 7


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_energies_are_the_formulas_own() -> None:
    hidden, output = normal(1, BATCH, TOKENS, MODEL), normal(2, MODEL, HEADS * WIDTH)
    values, mixing = normal(3, HEADS, MODEL, WIDTH), torch.softmax(normal(4, BATCH, HEADS, TOKENS, TOKENS), -1)
    inner, outer = normal(5, MODEL, MODEL), normal(6, MODEL, MODEL)

    def attend(state: Tensor) -> Tensor:
        return mixing @ torch.einsum("blm,hmd->bhld", state, values)

    def residual(state: Tensor) -> Tensor:
        return torch.tanh(state @ inner) @ outer

    got = head_energies(hidden, attend, output, residual)
    assert got.shape == (BATCH, HEADS, TOKENS)
    for head in range(HEADS):
        part = output[:, head * WIDTH : (head + 1) * WIDTH]
        moved = attend(hidden + residual(hidden))[:, head] @ part.mT
        own = attend(hidden)[:, head] @ part.mT
        difference = moved - own - residual(own)
        expected = (difference**2).sum(-1) / (moved**2).sum(-1)
        assert torch.allclose(got[:, head], expected, rtol=1e-10)
    assert got.min() > 1e-3


def test_a_linear_residual_that_commutes_has_no_energy() -> None:
    """Res(x) = x/2 commutes with every linear operator: Attn(h + Res(h)) = Attn(h) + Res(Attn(h))."""
    hidden, output = normal(7, BATCH, TOKENS, HEADS * WIDTH), normal(8, MODEL, HEADS * WIDTH)

    def attend(state: Tensor) -> Tensor:
        return state.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2).flip(2)

    assert head_energies(hidden, attend, output, lambda state: 0.5 * state).max() < 1e-25
