"""The transformer with metrics: its core against the direct scores, its regularisers, its gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dtp.errors import DtpError
from dtp.reference.attention import direct_scores
from dtp.reference.fbt import FbtClassifier, FbtConfig, LayerTensors, geodesic_attention, metric_loss
from dtp.workload import Mode

SMALL = FbtConfig(tokens=9, heads=2, head_width=8, frame_rank=3, metric_rank=2, hidden_width=16)


def model_and_images(seed: int) -> tuple[FbtClassifier, torch.Tensor]:
    torch.manual_seed(seed)
    return FbtClassifier(SMALL).double(), torch.rand(3, SMALL.tokens, dtype=torch.float64)


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


def test_every_parameter_gets_a_gradient() -> None:
    model, images = model_and_images(4)
    model(images).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if not name.endswith("qkv.bias"):  # a third of it, the bias of k, may cancel
            assert parameter.grad.abs().max() > 0, name


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
        ({"temperature": 0.0}, "temperature must be above 0, not 0.0"),
        ({"frame_rank": 33}, "frame_rank must be at most head_width 32, not 33"),
    ],
)
def test_refused_sizes(change: dict[str, float], message: str) -> None:
    with pytest.raises(DtpError, match=rf"^FbtConfig\.{message}"):
        FbtConfig(**change)  # type: ignore[arg-type]
