"""The transformer with metrics: its core against the direct scores, its regularisers, its gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dtp.errors import DtpError
from dtp.reference.attention import direct_scores
from dtp.reference.fbt import FbtClassifier, FbtConfig, LayerTensors, geodesic_attention, metric_loss
from dtp.workload import Mode, TransportKind

SMALL = FbtConfig(tokens=9, heads=2, head_width=8, frame_rank=3, metric_rank=2, hidden_width=16)
CARRIED = replace(SMALL, transport_rank=2)


def model_and_images(seed: int, sizes: FbtConfig = SMALL) -> tuple[FbtClassifier, torch.Tensor]:
    torch.manual_seed(seed)
    return FbtClassifier(sizes).double(), torch.rand(3, SMALL.tokens, dtype=torch.float64)


def test_the_core_is_the_softmax_of_the_papers_scores() -> None:
    model, images = model_and_images(1)
    with torch.no_grad():
        layers = model.with_tensors(images)[1]
    assert len(layers) == SMALL.layers
    for layer in layers:
        got = geodesic_attention(*layer, 3.0)
        for image in range(3):
            score = direct_scores(
                layer.q[image],
                layer.k[image],
                Mode.RIEMANNIAN,
                frame=layer.frame,
                metric_factor=layer.metric_factor[image],
                curvature=layer.curvature[image],
                temperature=3.0,
            )
            expected = torch.softmax(score, -1) @ layer.v[image]
            assert torch.allclose(got[image], expected, atol=1e-12)


def test_layer_tensors_have_the_shapes_and_the_curvature_of_the_paper() -> None:
    model, images = model_and_images(2)
    with torch.no_grad():
        model.blocks[0].attention.curvature_beta.copy_(torch.tensor([0.5, -2.0]))
        layer = model.with_tensors(images)[1][0]
    assert layer.q.shape == layer.k.shape == layer.v.shape == (3, 2, 9, 8)
    assert layer.frame.shape == (2, 8, 3)
    assert layer.metric_factor.shape == (3, 2, 9, 3, 2)
    assert torch.allclose(layer.frame.mT @ layer.frame, torch.eye(3, dtype=torch.float64).expand(2, 3, 3))
    factor = layer.frame.view(1, 2, 1, 8, 3) @ layer.metric_factor
    strength = torch.log1p(torch.exp(torch.tensor([0.5, -2.0], dtype=torch.float64)))
    expected = strength.view(1, 2, 1) * torch.linalg.matrix_norm(factor) ** 2
    assert torch.allclose(layer.curvature, expected)


def test_a_given_core_replaces_every_layers_attention() -> None:
    model, images = model_and_images(3)
    calls: list[LayerTensors] = []

    def core(q, k, v, frame, metric_factor, curvature, tau):  # type: ignore[no-untyped-def]
        assert tau == SMALL.temperature
        calls.append(LayerTensors(q, k, v, frame, metric_factor, curvature))
        return geodesic_attention(q, k, v, frame, metric_factor, curvature, tau)

    with torch.no_grad():
        assert torch.equal(model(images, core), model(images))
        assert len(calls) == SMALL.layers
        silent = model(images, lambda q, *_: torch.zeros_like(q))
        assert (silent - model(images)).abs().max() > 1e-3


@pytest.mark.parametrize("sizes", [SMALL, CARRIED])
def test_every_parameter_gets_a_gradient(sizes: FbtConfig) -> None:
    model, images = model_and_images(4, sizes)
    model(images).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if not name.endswith("qkv.bias"):  # a third of it, the bias of k, may cancel
            assert parameter.grad.abs().max() > 0, name


def test_transports_carry_what_a_token_attends_to() -> None:
    """A layer by hand: attention, P_i o_i by dense matrices, heads joined, projection, feed-forward."""
    model, images = model_and_images(6, CARRIED)
    with torch.no_grad():
        _, runs = model.run(images)
        run, block = runs[0], model.blocks[0]
        transport = run.transport
        assert transport is not None
        assert transport.kind is TransportKind.CAYLEY
        for factor in (transport.connection_a, transport.connection_b, transport.torsion_l, transport.torsion_r):
            assert factor is not None
            assert factor.shape == (3, 2, 9, 8, 2)
        assert float(transport.torsion_gate) == 0.25
        mixed = (transport.matrices() @ geodesic_attention(*run.tensors, SMALL.temperature).unsqueeze(-1)).squeeze(-1)
        x = run.hidden + block.attention.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[union-attr, operator]
        x = x + block.feed(block.feed_norm(x))  # type: ignore[operator]
        assert torch.allclose(runs[1].hidden, x, atol=1e-12)
        one, other = transport[0, 1].generator(), transport[0, 0].generator()
    assert (one - other).abs().max() > 0.01
    assert (one[0] - one[1]).abs().max() > 0.01


def test_a_core_is_chosen_by_layer_and_run() -> None:
    model, images = model_and_images(7, CARRIED)
    seen = []

    def core_of(layer, run):  # type: ignore[no-untyped-def]
        seen.append((layer, run.hidden))
        return geodesic_attention if layer == 0 else (lambda q, *_: torch.zeros_like(q))

    with torch.no_grad():
        scores, runs = model.run(images, core_of)
        assert [layer for layer, _ in seen] == [0, 1]
        assert all(hidden is run.hidden for (_, hidden), run in zip(seen, runs, strict=True))
        assert not torch.allclose(scores, model(images))
        assert torch.equal(model.run(images)[0], model(images))


def test_without_a_transport_rank_there_is_no_transport() -> None:
    model, images = model_and_images(8)
    with torch.no_grad():
        assert all(run.transport is None for run in model.run(images)[1])
    assert not [name for name, _ in model.named_parameters() if "connection" in name or "torsion" in name]


def test_regularisers_equal_matrices_written_out() -> None:
    """The pairs are the only sample, so with every token alike but one their mean is known in advance."""
    rng = np.random.default_rng(5)
    factor = torch.from_numpy(rng.standard_normal((2, 2, 6, 3, 2)))
    frame = torch.linalg.qr(torch.from_numpy(rng.standard_normal((8, 3)))).Q
    wide = frame @ factor
    metric = wide @ wide.mT
    strength = torch.linalg.matrix_norm(wide) ** 2
    generator = torch.Generator().manual_seed(9)
    pairs = torch.randint(6, (2, 40), generator=torch.Generator().manual_seed(9))
    got = metric_loss(factor, floor=5.0, ceiling=6.0, generator=generator, pairs=40)
    assert 0 < (strength < 5).float().mean() < 1
    assert 0 < (strength > 6).float().mean() < 1
    assert got.flatness == pytest.approx(np.maximum(5 - strength.numpy(), 0).mean())
    assert got.cap == pytest.approx((np.maximum(strength.numpy() - 6, 0) ** 2).mean())
    apart = [torch.linalg.matrix_norm(metric[:, :, i] - metric[:, :, j]) ** 2 for i, j in pairs.T]
    assert got.diversity == pytest.approx(-torch.stack(apart).mean())
    steps = [torch.linalg.matrix_norm(metric[:, :, t] - metric[:, :, t + 1]) ** 2 for t in range(5)]
    assert got.smoothness == pytest.approx(torch.stack(steps).mean())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be an integer of at least 1, not 0"),
        ({"transport_rank": -1}, "transport_rank must be an integer of at least 0, not -1"),
        ({"temperature": 0.0}, "temperature must be above 0, not 0.0"),
        ({"frame_rank": 33}, "frame_rank must be at most head_width 32, not 33"),
    ],
)
def test_refused_sizes(change: dict[str, float], message: str) -> None:
    with pytest.raises(DtpError, match=rf"^FbtConfig\.{message}"):
        FbtConfig(**change)  # type: ignore[arg-type]
