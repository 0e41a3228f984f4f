"""Transports, loops and the field of all pairs: rank-k forms against dense formulas, gauge tests both ways."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtp.errors import DtpError
from dtp.reference.holonomy import (
    Convention,
    RankK,
    Transport,
    attention_edge,
    block_energies,
    block_scores,
    energy,
    field_loss,
    loop_energy,
    next_head,
    rank_k,
    relative_field,
    residual_edge,
    symplectic,
    type_a_loop,
    type_b_loop,
)
from dtp.workload import TransportKind

HEADS, TOKENS, WIDTH, RANK = 3, 11, 12, 2
UNIT = torch.eye(WIDTH, dtype=torch.float64)


def normal(generator: torch.Generator, *shape: int, size: float = 0.4) -> Tensor:
    return size * torch.randn(*shape, dtype=torch.float64, generator=generator)


def transports(
    seed: int,
    kind: TransportKind = TransportKind.CAYLEY,
    gate: float | None = -0.7,
    lead: tuple[int, ...] = (HEADS, TOKENS),
) -> Transport:
    """Seeded transports; without torsion when ``gate`` is None."""
    generator = torch.Generator().manual_seed(seed)
    a, b, left, right = (normal(generator, *lead, WIDTH, RANK) for _ in range(4))
    return Transport(kind, a, b) if gate is None else Transport(kind, a, b, left, right, gate)


def vectors(seed: int, *lead: int) -> Tensor:
    return normal(torch.Generator().manual_seed(seed), *lead, WIDTH, size=1.0)


def probes(count: int = 2) -> Tensor:
    return vectors(77, HEADS, count)


# ---- transports


def test_the_symplectic_form_turns_the_columns() -> None:
    a, b = vectors(1, RANK).mT, vectors(2, RANK).mT
    assert torch.equal(torch.cat([b, a], 1) @ symplectic(2 * RANK), torch.cat([a, -b], 1))
    for columns in (0, 3):
        with pytest.raises(DtpError, match=r"symplectic\.columns must be an even number of at least 2"):
            symplectic(columns)


@pytest.mark.parametrize("gate", [None, 0.0, 0.3, -0.7])
def test_the_columns_give_the_generator(gate: float | None) -> None:
    transport = transports(3, gate=gate)
    columns, x = transport.columns(), transport.generator()
    assert columns.shape[-1] == (2 if gate is None else 4) * RANK
    assert torch.allclose(columns @ symplectic(columns.shape[-1]) @ columns.mT, x, atol=1e-12)
    assert torch.equal(x, -x.mT)


@pytest.mark.parametrize("kind", TransportKind)
@pytest.mark.parametrize("gate", [None, 0.3, -0.7])
def test_the_rank_k_form_is_the_papers_transport(kind: TransportKind, gate: float | None) -> None:
    transport = transports(4, kind, gate)
    x, p, edge = vectors(5, HEADS, TOKENS), transport.matrices(), rank_k(transport)
    expected, turned = (p @ x.unsqueeze(-1)).squeeze(-1), (p.mT @ x.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(transport.apply(x), expected, atol=1e-12)
    assert torch.allclose(edge.apply(x), expected, atol=1e-12)
    assert torch.allclose(transport.apply(x, transpose=True), turned, atol=1e-12)
    assert torch.allclose(edge.inverse().apply(expected), x, atol=1e-10)
    assert not torch.allclose(expected, turned, atol=0.1)


def test_cayley_is_orthogonal_and_linear_is_its_first_order() -> None:
    p = transports(6).matrices()
    assert torch.allclose(p.mT @ p, UNIT.expand_as(p), atol=1e-12)
    assert torch.linalg.det(p).min() > 0
    linear = transports(6, TransportKind.LINEAR).matrices()
    assert (linear.mT @ linear - UNIT).abs().max() > 0.1
    small = transports(6).map(lambda factor: 0.01 * factor)
    first = Transport(
        TransportKind.LINEAR, small.connection_a, small.connection_b, small.torsion_l, small.torsion_r, -0.7
    )
    assert (small.matrices() - first.matrices()).abs().max() < 1e-6


def test_refused_factors() -> None:
    a = torch.zeros(4, WIDTH, RANK)
    with pytest.raises(
        DtpError, match=r"Transport\.connection_b must be of shape \(4, 12, 2\) like connection_a, not \(4,"
    ):
        Transport(TransportKind.CAYLEY, a, a[..., :1])
    with pytest.raises(DtpError, match=r"Transport\.torsion_r must be given exactly when torsion_l is, not 'NoneType'"):
        Transport(TransportKind.CAYLEY, a, a, a)


# ---- the field of all pairs


def test_the_field_gives_the_energy_of_every_loop() -> None:
    """‖u_i − u_j‖²/‖z‖² is the energy of the type A loop from x = P_i z, walked edge by edge."""
    transport, probe = transports(8), probes(1)[:, 0]
    field = relative_field(transport, next_head(transport), probe)
    for head, i, j in ((0, 0, 1), (1, 7, 3), (2, 4, 10)):
        partner = transport[(head + 1) % HEADS]
        start = transport[head][i].apply(probe[head])
        walked = loop_energy(type_a_loop(transport[head], partner, i, j), start)
        apart = ((field[head, i] - field[head, j]) ** 2).sum() / (probe[head] ** 2).sum()
        assert torch.allclose(walked, apart, atol=1e-12)
        assert walked > 0.05


@pytest.mark.parametrize(("block", "valid"), [(4, 11), (4, 6), (11, 11), (1, 9), (16, 5)])
def test_block_means_are_the_means_over_all_pairs(block: int, valid: int) -> None:
    transport, probe = transports(9), probes(1)[:, 0]
    field = relative_field(transport, next_head(transport), probe)
    got = block_energies(field, probe, block, valid)
    assert got.shape == (HEADS, -(-TOKENS // block), -(-TOKENS // block))
    apart = ((field.unsqueeze(-2) - field.unsqueeze(-3)) ** 2).sum(-1) / (probe**2).sum(-1)[:, None, None]
    for row in range(got.shape[1]):
        for column in range(got.shape[1]):
            part = apart[
                :, row * block : min(valid, (row + 1) * block), column * block : min(valid, (column + 1) * block)
            ]
            expected = part.mean((1, 2)) if part.numel() else torch.zeros(HEADS, dtype=torch.float64)
            assert torch.allclose(got[:, row, column], expected, atol=1e-12)


def test_a_heads_score_is_the_mean_of_its_two_pairs_and_of_the_probes() -> None:
    transport, given = transports(10), probes(2)
    partner = next_head(transport)
    single = [block_energies(relative_field(transport, partner, z), z, 4) for z in given.unbind(1)]
    mean = 0.5 * (single[0] + single[1])
    got = block_scores(transport, given, 4)
    for head in range(HEADS):
        assert torch.allclose(got[head], 0.5 * (mean[head] + mean[head - 1]), atol=1e-14)
    images = transport.map(lambda factor: torch.stack([factor, 0.5 * factor]))
    assert torch.allclose(block_scores(images, given, 4)[0], got, atol=1e-12)
    assert torch.allclose(field_loss(transport, given), block_scores(transport, given, TOKENS).mean())


def test_agreeing_heads_are_flat() -> None:
    one = transports(11, lead=(1, TOKENS))
    same = one.map(lambda factor: factor.expand(HEADS, *factor.shape[1:]))
    assert block_scores(same, probes(), 4).max() < 1e-13
    assert block_scores(transports(11), probes(), 4).min() > 0.05
    shared = vectors(12, TOKENS)
    other = Transport(TransportKind.CAYLEY, *(f[0] for f in (same.connection_a, same.connection_b)))
    assert max(loop_energy(type_a_loop(other, other, 2, j), shared[2]) for j in range(TOKENS)) < 1e-20


def test_linear_transports_have_no_field_and_no_frame() -> None:
    linear = transports(13, TransportKind.LINEAR)
    message = "must be cayley, whose transpose is its inverse, not 'linear'"
    with pytest.raises(DtpError, match=rf"relative_field\.transport {message}"):
        relative_field(linear, linear, probes()[:, 0])
    with pytest.raises(DtpError, match=rf"attention_edge\.transport {message}"):
        attention_edge(linear[0], 0, 1)
    assert len(attention_edge(linear[0], 0, 1, Convention.DESTINATION)) == 1


# ---- gauge tests


def gauged(transport: Transport, turn: Tensor) -> list[RankK]:
    """Q_t P_t of one head as dense operations: W = Q P − I, V = I."""
    return [RankK(1, change @ p - UNIT, UNIT) for change, p in zip(turn, transport.matrices(), strict=True)]


def dense_loop(head: list[RankK], partner: list[RankK], i: int, j: int, convention: Convention) -> list[RankK]:
    if convention is Convention.DESTINATION:
        return [head[j], partner[i]]
    return [head[i].inverse(), head[j], partner[j].inverse(), partner[i]]


@pytest.mark.parametrize("convention", Convention)
def test_only_the_frame_convention_is_gauge_invariant(convention: Convention) -> None:
    """P_t → Q_t P_t in both heads, x → Q_i x, Q_t a Cayley transport of one pair of columns."""
    transport = transports(14)
    turn = transports(15, gate=None, lead=(TOKENS,)).matrices()
    changed = [gauged(transport[head], turn) for head in (0, 1)]
    moved = []
    for i in range(TOKENS):
        for j in range(TOKENS):
            x = vectors(16 + i)
            before = loop_energy(type_a_loop(transport[0], transport[1], i, j, convention), x)
            after = loop_energy(dense_loop(*changed, i, j, convention), turn[i] @ x)
            moved.append(abs(before - after) / before.clamp(min=1e-3))
    if convention is Convention.FRAME:
        assert max(moved) < 1e-9
    else:
        assert torch.stack(moved).median() > 0.05


# ---- loops by edges


def test_a_type_b_loop_comes_back_where_nothing_curves() -> None:
    """Equal up-edges that commute with the transports leave no holonomy; others do."""
    upper, lower = transports(20)[0], transports(20)[0]
    x = vectors(21)
    flat = RankK(1, torch.zeros(WIDTH, 1, dtype=torch.float64), torch.zeros(WIDTH, 1, dtype=torch.float64))
    assert loop_energy(type_b_loop(upper, lower, flat, flat, 3, 5), x) < 1e-20
    w, v = vectors(22, 3).mT, vectors(23, 3).mT
    curved = RankK(1, 0.3 * w, v)
    edges = type_b_loop(upper, lower, curved, curved, 3, 5)
    up, p = UNIT + 0.3 * w @ v.mT, upper.matrices()
    dense = p[3] @ p[5].mT @ torch.linalg.inv(up) @ p[5] @ p[3].mT @ up
    assert torch.allclose(loop_energy(edges, x), energy(dense @ x, x), rtol=1e-9)
    assert loop_energy(edges, x) > 1e-3


def test_a_vertical_edge_reports_what_it_leaves_out() -> None:
    part = RankK(1, vectors(30, 2).mT, vectors(31, 2).mT)
    jacobian = UNIT + part.w @ part.v.mT
    edge, error = residual_edge(jacobian, 2)
    x = vectors(32, 5)
    assert error < 1e-12
    assert torch.allclose(edge.apply(x), part.apply(x), atol=1e-10)
    edge, error = residual_edge(jacobian, 1)
    left_out = torch.linalg.matrix_norm(jacobian - UNIT - edge.w @ edge.v.mT)
    assert error == pytest.approx(float(left_out / torch.linalg.matrix_norm(jacobian - UNIT)))
    assert 0.1 < error < 1
    assert residual_edge(UNIT, 1)[1] == 0.0
    with pytest.raises(DtpError, match=r"residual_edge\.rank must be an integer in 1\.\.12, not 13"):
        residual_edge(UNIT, 13)


def test_a_head_is_placed_in_the_model_width() -> None:
    edge = rank_k(transports(33)[0][0])
    wide = torch.cat([vectors(34), vectors(35), vectors(36)])
    got = edge.placed(WIDTH, 3 * WIDTH).apply(wide)
    assert torch.equal(got[:WIDTH], wide[:WIDTH])
    assert torch.equal(got[2 * WIDTH :], wide[2 * WIDTH :])
    assert torch.allclose(got[WIDTH : 2 * WIDTH], edge.apply(wide[WIDTH : 2 * WIDTH]))


def test_refused_loops() -> None:
    transport = transports(37)[0]
    with pytest.raises(DtpError, match=r"attention_edge\.end must be a token in 0\.\.10, not 11"):
        attention_edge(transport, 0, TOKENS)
    with pytest.raises(DtpError, match=r"attention_edge\.start must be a token in 0\.\.10, not -1"):
        attention_edge(transport, -1, 0)
    with pytest.raises(DtpError, match=r"RankK\.c must be 1 to have an inverse, not 0"):
        RankK(0, UNIT, UNIT).inverse()
    with pytest.raises(DtpError, match=r"loop_energy\.edges must be at least one, not \[\]"):
        loop_energy([], vectors(38))


def test_the_zero_probe_has_no_energy() -> None:
    nothing = torch.zeros(WIDTH, dtype=torch.float64)
    assert energy(nothing, nothing) == 0
