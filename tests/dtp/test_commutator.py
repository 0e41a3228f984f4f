"""Commutator kernel: golden against the float64 reference, identities, energies, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dtp.commutator import CommutatorMode, Kernel, Layer, golden, quantise
from dtp.config import Config
from dtp.difference import energies, ratio
from dtp.errors import DtpError
from dtp.matrix import Activation
from dtp.workload import Mode

pytest.importorskip("torch")
from dtp.reference.commutator import commutator

ECP5 = Config.load("ecp5-85k")
TINY = Config.load("tiny")


def layer_of(
    seed: int = 1, *, tokens: int = 40, model: int = 32, heads: int = 2, width: int = 16, mlp: int = 64,
    norm: bool = True, biased: bool = True, residual: float = 1.0, **changes: Any,
) -> Layer:  # fmt: skip
    random = np.random.default_rng(seed)
    inner = heads * width

    def weight(rows: int, columns: int) -> np.ndarray:
        return random.normal(size=(rows, columns)) / columns**0.5

    def bias(size: int) -> np.ndarray | None:
        return random.normal(size=size) * 0.2 if biased else None

    def gains() -> np.ndarray | None:
        return np.stack([1 + 0.2 * random.normal(size=model), 0.1 * random.normal(size=model)]) if norm else None

    given: dict[str, Any] = {
        "hidden": random.normal(size=(tokens, model)), "w_q": weight(inner, model), "w_k": weight(inner, model),
        "w_v": weight(inner, model), "w_o": weight(model, inner), "mlp_in": weight(mlp, model),
        "mlp_out": residual * weight(model, mlp), "b_q": bias(inner), "b_k": bias(inner), "b_v": bias(inner),
        "b_o": bias(model), "b_in": bias(mlp), "b_out": bias(model), "ln_attn": gains(), "ln_mlp": gains(),
        "heads": heads, "activation": Activation.GELU,
    }  # fmt: skip
    if changes.get("mode") is Mode.RIEMANNIAN:
        frame = np.stack([np.linalg.qr(random.normal(size=(width, 3)))[0] for _ in range(heads)])
        given |= {
            "frame": frame, "metric_factor": random.normal(size=(heads, tokens, 3, 2)) * 0.5,
            "curvature": np.abs(random.normal(size=(heads, tokens))), "temperature": 24.0,
        }  # fmt: skip
    return Layer(**{**given, **changes})


def sqnr(exact: Any, got: Any) -> float:
    wanted, made = np.asarray(exact), np.asarray(got)
    return float(10 * np.log10((wanted**2).sum() / ((made - wanted) ** 2).sum()))


LAYERS: dict[str, dict[str, Any]] = {
    "dot, GELU, LayerNorm": {},
    "causal, ReLU, LayerNorm": {"activation": Activation.RELU, "causal": True},
    "no LayerNorm, no biases": {"norm": False, "biased": False},
    "Riemannian": {"mode": Mode.RIEMANNIAN, "residual": 0.5},
    "padding": {"valid_length": 31},
}


@pytest.mark.parametrize("mode", CommutatorMode)
@pytest.mark.parametrize("name", LAYERS)
def test_golden_against_reference(name: str, mode: CommutatorMode) -> None:
    layer = layer_of(**LAYERS[name])
    kernel = quantise(ECP5, layer)
    result = golden(kernel, mode)
    exact = commutator(layer, mode)
    live = slice(0, layer.valid_length or layer.tokens)
    assert sqnr(exact.attended[live], result.attended[live] * kernel.attention_scale) > 27
    assert sqnr(exact.delta[live], result.delta[live] * kernel.attention_scale) > 24
    measured = result.energies.ratio[live] / 2**14
    wanted = np.asarray(exact.ratio[live])
    inside = wanted < 3.9
    assert inside.sum() > 20
    assert np.abs(measured[inside] / wanted[inside] - 1).max() < 0.1
    assert np.median(np.abs(measured[inside] / wanted[inside] - 1)) < 0.03
    assert result.saturations <= 4


@pytest.mark.parametrize("mode", CommutatorMode)
def test_wider_operands_are_closer(mode: CommutatorMode) -> None:
    """16-bit weights and activations: what is left is the tile's and the state's resolution."""
    layer = layer_of(5)
    config = ECP5.changed(operand_bits=16, input_bytes=32)
    narrow, wide = (golden(kernel, mode) for kernel in (quantise(ECP5, layer), quantise(config, layer)))
    exact = commutator(layer, mode)
    scales = [quantise(c, layer).attention_scale for c in (ECP5, config)]
    errors = [sqnr(exact.delta, run.delta * scale) for run, scale in zip((narrow, wide), scales, strict=True)]
    assert errors[1] > errors[0] + 15


@pytest.mark.parametrize("mode", CommutatorMode)
def test_no_residual_no_commutator(mode: CommutatorMode) -> None:
    """Res = 0: Δ vanishes, every bit of it."""
    layer = layer_of(residual=0.0, b_out=None)
    result = golden(quantise(ECP5, layer), mode)
    assert not result.delta.any() and not result.energies.difference.any() and not result.energies.ratio.any()
    assert result.attended.any()


def test_modes_agree_where_attention_does_not_look() -> None:
    """W_K = 0: all keys are alike, so the weights of h and of h + Res(h) are the same."""
    layer = layer_of(w_k=np.zeros((32, 32)), b_k=None, ln_attn=None)
    kernel = quantise(ECP5, layer)
    frozen, full = (golden(kernel, mode) for mode in CommutatorMode)
    assert np.array_equal(frozen.delta, full.delta)
    assert frozen.energies.difference.all()


def linear_layer(**changes: Any) -> Layer:
    """A residual that is linear where it acts: the ReLU of ±x, mlp_out = G·[1, −1]; no biases, no LayerNorm."""
    layer = layer_of(7, mlp=64, norm=False, biased=False, activation=Activation.RELU, **changes)
    both = np.concatenate([np.eye(32), -np.eye(32)])
    half = np.random.default_rng(8).normal(size=(32, 32)) / 32**0.5
    return replace(layer, mlp_in=both, mlp_out=np.concatenate([half, -half], axis=1))


def test_linear_residual_that_commutes() -> None:
    """frozen, Res = γ·x: Attn_h(h + γh) − Attn_h(h) = γ·Attn_h(h). Δ is rounding alone."""
    layer = linear_layer()
    layer = replace(layer, mlp_out=0.5 * np.concatenate([np.eye(32), -np.eye(32)], axis=1))
    exact = commutator(layer, CommutatorMode.FROZEN)
    assert float(exact.ratio.max()) < 1e-20
    result = golden(quantise(ECP5, layer), CommutatorMode.FROZEN)
    assert (result.energies.ratio / 2**14).max() < 1e-2


def test_heads_of_a_linear_residual_add_up() -> None:
    """Δ of a linear residual is the sum of the heads' Δ: in the reference exactly, in the golden model to rounding."""
    layer = linear_layer()
    whole = commutator(layer, CommutatorMode.FROZEN)
    parts = [commutator(layer, CommutatorMode.FROZEN, head) for head in range(2)]
    assert float((whole.delta - parts[0].delta - parts[1].delta).abs().max()) < 1e-12
    kernel = quantise(ECP5, layer)
    result = golden(kernel, CommutatorMode.FROZEN, per_head=True)
    assert result.heads is not None
    unit = kernel.attention_scale**2
    for head, part in enumerate(parts):
        difference, reference = result.heads.difference[head] * unit, result.heads.reference[head] * unit
        assert np.abs(difference / np.asarray((part.delta**2).sum(-1)) - 1).max() < 0.15
        assert np.abs(reference / np.asarray((part.attended**2).sum(-1)) - 1).max() < 0.15
        made = ratio(result.heads.difference[head], result.heads.reference[head])
        assert np.array_equal(result.heads.ratio[head], made)


@pytest.mark.parametrize("mode", CommutatorMode)
def test_heads_against_reference(mode: CommutatorMode) -> None:
    layer = layer_of(9, heads=4, width=8)
    kernel = quantise(ECP5, layer)
    result = golden(kernel, mode, per_head=True)
    assert result.heads is not None and result.heads.ratio.shape == (4, 40)
    for head in range(4):
        exact = commutator(layer, mode, head)
        got = result.heads.difference[head].sum() * kernel.attention_scale**2
        assert abs(got / float((exact.delta**2).sum()) - 1) < 0.05
    alone = golden(kernel, mode)
    assert alone.heads is None and np.array_equal(alone.delta, result.delta)


def test_energies_are_exact() -> None:
    random = np.random.default_rng(11)
    a, p, r = random.integers(-32768, 32768, (3, 6, 50))
    a[3], p[3], r[3] = -32768, 32767, 32767
    a[4], p[4], r[4] = 0, 0, 0
    a[5], p[5], r[5] = 0, 5, 0
    made = energies(a, p, r)
    for row in range(6):
        delta = [int(x) - int(y) - int(z) for x, y, z in zip(a[row], p[row], r[row], strict=True)]
        top, bottom = sum(d * d for d in delta), sum(int(x) ** 2 for x in a[row])
        assert (made.difference[row], made.reference[row]) == (top, bottom)
        wanted = (65535 if top else 0) if bottom == 0 else min(65535, (2 * top * 2**14 + bottom) // (2 * bottom))
        assert made.ratio[row] == wanted
    assert made.ratio[3] == 65535 and made.ratio[4] == 0 and made.ratio[5] == 65535


def test_refusals() -> None:
    for changes, message in (
        ({"w_q": np.zeros((31, 32))}, "Layer.heads must be a divisor of 31, the rows of w_q, not 2"),
        ({"mlp_out": np.zeros((32, 63))}, "Layer.mlp_out must be of shape (32, 64), not (32, 63)"),
        ({"ln_mlp": np.zeros(32)}, "Layer.ln_mlp must be of shape (2, 32), not (32,)"),
        ({"hidden": np.zeros(32)}, "Layer.hidden must be of shape (tokens, model), not (32,)"),
        ({"activation": Activation.NONE}, "Layer.activation must be Activation.RELU or Activation.GELU"),
    ):
        with pytest.raises(DtpError) as caught:
            layer_of(**changes)
        assert str(caught.value).startswith(message)
    with pytest.raises(DtpError, match=r"Layer\.mlp must be at most max_mlp 64 of configuration 'tiny', not 128"):
        quantise(TINY, layer_of(mlp=128, width=8))
    with pytest.raises(DtpError, match=r"energies\.plain must be signed numbers of 16 bits, not 32768"):
        energies(np.zeros(3), np.full(3, 32768), np.zeros(3))
    with pytest.raises(DtpError, match=r"Layer\.model must be a multiple of block 16 with LayerNorm, not 36"):
        quantise(ECP5, layer_of(model=36))
    assert isinstance(quantise(TINY, layer_of(width=8)), Kernel)
