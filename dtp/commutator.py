"""Commutator kernel: layer, scales, integer golden model, energies and passes [GR §10.1] (docs/commutator.md).

    Δ(h) = Attn(h + Res(h)) − ( Attn(h) + Res(Attn(h)) )

:func:`quantise` turns a float :class:`Layer` into a :class:`Kernel` of integer matrices, :func:`golden` runs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtp.attention import golden as attention_golden
from dtp.config import BIAS_BITS, Config
from dtp.difference import Energies, energies
from dtp.errors import DtpError, must
from dtp.fixed import Int, overflows, saturate, signed_range
from dtp.layernorm import NORMAL_FRACTION_BITS, layernorm
from dtp.matrix import (
    ALIGN_LEFT,
    FEED_GAIN_BITS,
    GELU_FRACTION_BITS,
    STATE_BITS,
    Activation,
    MatrixJob,
    MatrixParams,
    clamp,
    matrix,
    scaling,
)
from dtp.quantise import Head
from dtp.quantise import quantise as quantise_heads
from dtp.workload import NORM_EPSILON, Mode, Workload

Real = NDArray[np.float64]

_WIDE_SHIFT = 1
"""``out_shift`` of outputs of 16 bits: the pre-activation then fills 17 of 18 bits."""


class CommutatorMode(StrEnum):
    """Which attention weights the first term uses."""

    FROZEN = "frozen"
    FULL = "full"


@dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """A residual layer in float: y = x Wᵀ + b throughout, H heads of width d side by side.

    Parameters
    ----------
    hidden: h, (L, M)
    w_q, w_k, w_v: (H·d, M); w_o: (M, H·d)
    mlp_in: (F, M); mlp_out: (M, F)
    b_q, b_k, b_v, b_o, b_in, b_out: biases or None
    ln_attn, ln_mlp: (2, M) gain and offset, or None without LayerNorm
    heads: H
    activation: ReLU or GELU
    mode, causal, temperature, blend, frame, metric_factor, curvature, valid_length: as :class:`dtp.workload.Workload`
    norm_epsilon: ε of both LayerNorms in float; the hardware's have none

    Raises
    ------
    DtpError
        for shapes that do not fit
    """

    hidden: Real
    w_q: Real
    w_k: Real
    w_v: Real
    w_o: Real
    mlp_in: Real
    mlp_out: Real
    heads: int
    activation: Activation
    mode: Mode = Mode.DOT
    causal: bool = False
    b_q: Real | None = None
    b_k: Real | None = None
    b_v: Real | None = None
    b_o: Real | None = None
    b_in: Real | None = None
    b_out: Real | None = None
    ln_attn: Real | None = None
    ln_mlp: Real | None = None
    temperature: float | None = None
    blend: float | None = None
    frame: Real | None = None
    metric_factor: Real | None = None
    curvature: Real | None = None
    valid_length: int | None = None
    norm_epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden.ndim != 2:
            raise must("Layer", "hidden", "of shape (tokens, model)", self.hidden.shape)
        model, inner = self.model, self.w_q.shape[0]
        if self.heads < 1 or inner % self.heads:
            raise must("Layer", "heads", f"a divisor of {inner}, the rows of w_q", self.heads)
        hidden = self.mlp_in.shape[0]
        shapes: dict[str, tuple[int, ...]] = {
            "w_q": (inner, model), "w_k": (inner, model), "w_v": (inner, model), "w_o": (model, inner),
            "mlp_in": (hidden, model), "mlp_out": (model, hidden), "b_q": (inner,), "b_k": (inner,), "b_v": (inner,),
            "b_o": (model,), "b_in": (hidden,), "b_out": (model,), "ln_attn": (2, model), "ln_mlp": (2, model),
        }  # fmt: skip
        for name, shape in shapes.items():
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise must("Layer", name, f"of shape {shape}", value.shape)
        if self.activation not in (Activation.RELU, Activation.GELU):
            raise must("Layer", "activation", "Activation.RELU or Activation.GELU", self.activation)

    @property
    def tokens(self) -> int:
        """L."""
        return int(self.hidden.shape[0])

    @property
    def valid(self) -> int:
        """Tokens before the padding."""
        return self.valid_length or self.tokens

    @property
    def model(self) -> int:
        """M, d_model."""
        return int(self.hidden.shape[1])

    @property
    def inner(self) -> int:
        """H·d."""
        return int(self.w_q.shape[0])

    @property
    def mlp(self) -> int:
        """F."""
        return int(self.mlp_in.shape[0])

    @classmethod
    def of(cls, workload: Workload) -> Layer:
        """The layer beside the attention of a workload file; a key head that several heads share is repeated.

        Queries, keys and values are those of the hidden states: the file's q, k and v and their scales are not read.

        Raises
        ------
        DtpError
            for a workload without hidden states, or with a block mask, which the commutator's walks have not
        """
        if workload.hidden is None or workload.activation is None:
            raise must("Layer", "hidden", "there for a commutator", None)
        if workload.block_mask is not None:
            raise must("Workload", "block_mask", "absent for a commutator", workload.block_mask.shape)
        names = ("w_q", "w_k", "w_v", "w_o", "mlp_in", "mlp_out", "b_q", "b_k", "b_v", "b_o", "ln_attn", "ln_mlp")
        given: dict[str, Any] = {"hidden": workload.hidden} | {name: getattr(workload, name) for name in names}
        given |= {"b_in": workload.b_mlp_in, "b_out": workload.b_mlp_out}
        given = {name: value.astype(np.float64) for name, value in given.items() if value is not None}
        shared = workload.heads // len(workload.k)
        for name in ("w_k", "w_v", "b_k", "b_v"):
            if name in given:
                heads = given[name].reshape(len(workload.k), workload.width, *given[name].shape[1:])
                given[name] = heads.repeat(shared, axis=0).reshape(-1, *given[name].shape[1:])
        for name in ("mode", "causal", "temperature", "blend", "frame", "metric_factor", "curvature", "valid_length"):
            given[name] = getattr(workload, name)
        given["norm_epsilon"] = NORM_EPSILON if workload.norm_epsilon is None else workload.norm_epsilon
        return cls(**given, heads=workload.heads, activation=Activation[workload.activation.name])

    def workload(self, q: Real, k: Real, v: Real, scales: Mapping[str, float]) -> Workload:
        """Attention of the layer for given (L, H·d) queries, keys and values."""
        split = {
            name: _split(value, self.heads).astype(np.float32) for name, value in (("q", q), ("k", k), ("v", v))
        }
        given = {
            name: np.asarray(value, dtype=np.float32)
            for name in ("frame", "metric_factor", "curvature")
            if (value := getattr(self, name)) is not None
        }
        return Workload(
            **split,  # type: ignore[arg-type]
            **given,  # type: ignore[arg-type]
            mode=self.mode,
            causal=self.causal,
            temperature=self.temperature,
            blend=self.blend,
            valid_length=self.valid,
            q_scale=(scales["q"],),
            k_scale=(scales["k"],),
            v_scale=(scales["v"],),
        )


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix of the kernel: job, integers, and the real value of one unit of its output."""

    job: MatrixJob
    weights: Int
    bias: Int | None
    unit: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernel:
    """A layer in integers.

    Members
    -------
    config, layer: the processor; the layer with the frame folded into the projections
    hidden: h as states, (L, M)
    state_scale: real value of a unit of h, Res(h) and their sum
    attention_scale: the same of Attn(h + Res(h)), Attn(h) and Res(Attn(h))
    matrices: ``q k v o`` and ``in out`` (Res of h), ``in_a out_a`` (Res of Attn(h)); ``o_0``, ``o_1``, …: o restricted
        to the columns of a head, without its bias
    """

    config: Config
    layer: Layer
    hidden: Int
    state_scale: float
    attention_scale: float
    matrices: Mapping[str, Matrix]


@dataclass(frozen=True, eq=False)
class CommutatorResult:
    """What the kernel gives.

    Members
    -------
    delta: Δ, (L, M), in units of the kernel's attention scale
    attended: Attn(h + Res(h)), (L, M)
    energies: of tokens
    heads: of heads and tokens, or None when they were not asked for
    walks: jobs of the tile at h + Res(h) and at h, a head each
    outputs: of all heads of both walks side by side, as states, (2, L, H·d)
    saturations: elements saturated in matrices and LayerNorms
    """

    delta: Int
    attended: Int
    energies: Energies
    heads: Energies | None
    walks: tuple[tuple[Head, ...], tuple[Head, ...]]
    outputs: Int
    saturations: int


# Golden model


def golden(kernel: Kernel, mode: CommutatorMode, *, per_head: bool = False) -> CommutatorResult:
    """Δ and its energies, every bit that the hardware gives."""
    run = Operators(kernel)
    h = kernel.hidden
    r = run.residual(h, "in", "out")
    x = run.add(h, r)
    queries, keys, values = run.project(h, "qkv")
    plain_walk = run.walk(queries, keys, values)
    if mode is CommutatorMode.FULL:
        queries, keys, moved = run.project(x, "qkv")
    else:
        (moved,) = run.project(x, "v")
    moved_walk = run.walk(queries, keys, moved)
    moved_heads, plain_heads = run.walked(moved_walk), run.walked(plain_walk)
    attended, plain = run.output(moved_heads), run.output(plain_heads)
    residual = run.residual(plain, "in_a", "out_a")
    heads = run.per_head(moved_heads, plain_heads) if per_head else None
    return CommutatorResult(
        delta=attended - plain - residual,
        attended=attended,
        energies=energies(attended, plain, residual),
        heads=heads,
        walks=(moved_walk, plain_walk),
        outputs=np.stack([moved_heads, plain_heads]),
        saturations=run.saturations,
    )


@dataclass
class Operators:
    """The operators of a kernel on states, with the saturation count."""

    kernel: Kernel
    saturations: int = 0

    def apply(self, name: str, state: Int) -> Int:
        found = self.kernel.matrices[name]
        out, count = matrix(self.kernel.config, found.job, state, found.weights, found.bias)
        self.saturations += count
        return out

    def normalise(self, state: Int, with_norm: bool) -> Int:
        if not with_norm:
            return state
        out, count = layernorm(state)
        self.saturations += count
        return out

    def add(self, left: Int, right: Int) -> Int:
        total = left + right
        self.saturations += int(np.count_nonzero(overflows(total, STATE_BITS)))
        return saturate(total, STATE_BITS)

    def residual(self, state: Int, first: str, second: str) -> Int:
        normal = self.normalise(state, self.kernel.layer.ln_mlp is not None)
        return self.apply(second, self.apply(first, normal))

    def project(self, state: Int, names: str) -> tuple[Int, ...]:
        """Projections of a state, ``names`` a letter each."""
        normal = self.normalise(state, self.kernel.layer.ln_attn is not None)
        return tuple(self.apply(name, normal) for name in names)

    def attend(self, q: Int, k: Int, v: Int) -> Int:
        """Outputs of all heads side by side, as states."""
        return self.walked(self.walk(q, k, v))

    def walk(self, q: Int, k: Int, v: Int) -> tuple[Head, ...]:
        """Jobs of the tile for the projections of all heads."""
        kernel, found = self.kernel, self.kernel.matrices
        scales = {name: found[name].unit for name in ("q", "k", "v")}
        work = kernel.layer.workload(
            _real(q, scales["q"]), _real(k, scales["k"]), _real(v, scales["v"]), scales,
        )  # fmt: skip
        return tuple(quantise_heads(kernel.config, work))

    def walked(self, jobs: Sequence[Head]) -> Int:
        """What the tile makes of its jobs, side by side, as states."""
        outputs = [attention_golden(self.kernel.config, job).outputs for job in jobs]
        return np.concatenate(outputs, axis=1) << (STATE_BITS - self.kernel.config.output_bits)

    def output(self, heads: Int) -> Int:
        return self.apply("o", heads)

    def per_head(self, moved: Int, plain: Int) -> Energies:
        """Attn restricted to each head, without the output bias."""
        layer, parts = self.kernel.layer, []
        width = layer.inner // layer.heads
        for head in range(layer.heads):
            lanes = slice(head * width, (head + 1) * width)
            attended, output = (self.apply(f"o_{head}", source[:, lanes]) for source in (moved, plain))
            parts.append(energies(attended, output, self.residual(output, "in_a", "out_a")))
        return Energies(*(np.stack([getattr(part, name) for part in parts]) for name in (
            "difference", "reference", "ratio",
        )))  # fmt: skip


# Quantisation


def quantise(config: Config, layer: Layer) -> Kernel:
    """Scales from a run on the layer's own data, operator after operator; both modes fit them.

    Raises
    ------
    DtpError
        when the layer exceeds the configuration, or a scale cannot be represented
    """
    for name, limit_name in (
        ("model", "max_model"), ("inner", "max_mlp"), ("mlp", "max_mlp"), ("tokens", "max_tokens"),
    ):  # fmt: skip
        limit = getattr(config, limit_name)
        if getattr(layer, name) > limit:
            rule = f"at most {limit_name} {limit} of configuration {config.name!r}"
            raise must("Layer", name, rule, getattr(layer, name))
    if layer.model % config.block and (layer.ln_attn is not None or layer.ln_mlp is not None):
        raise must("Layer", "model", f"a multiple of block {config.block} with LayerNorm", layer.model)
    return _Calibration(config, _fold_frame(layer)).kernel()


@dataclass
class _Calibration:
    """Matrices made one after the other; each sees the integers that the ones before it give."""

    config: Config
    layer: Layer
    matrices: dict[str, Matrix] = field(default_factory=dict)

    def kernel(self) -> Kernel:
        layer, limit = self.layer, signed_range(STATE_BITS)[1]
        h = np.asarray(layer.hidden, dtype=np.float64)
        normal = layer.ln_attn is not None
        # A first guess of the state's range from float; h, Res(h) and the sum share it.
        r_real = self._residual_real(h)
        largest = max(np.abs(value).max() for value in (h, r_real, h + r_real))
        scale = 1.02 * (largest or 1.0) / limit
        kernel = Kernel(
            config=self.config, layer=layer, hidden=np.rint(h / scale).astype(np.int64), state_scale=scale,
            attention_scale=0.0, matrices=self.matrices,
        )  # fmt: skip
        run = Operators(kernel)
        self._residual("in", "out", [kernel.hidden], scale, scale)
        x = run.add(kernel.hidden, run.residual(kernel.hidden, "in", "out"))
        both = [run.normalise(state, normal) for state in (kernel.hidden, x)]
        for name in "qkv":
            self._make(name, f"w_{name}", f"b_{name}", "ln_attn", both, self._input_unit(scale, normal), None)
        q, k, v = ([run.apply(name, state) for state in both] for name in "qkv")
        heads = [
            run.attend(q[0], k[0], v[0]), run.attend(q[0], k[0], v[1]), run.attend(q[1], k[1], v[1]),
        ]  # fmt: skip
        unit = self.matrices["v"].unit / (1 << (STATE_BITS - self.config.operand_bits))
        # One scale for all outputs of attention and for Res(Attn(h)).
        attended = np.concatenate(heads) * unit @ layer.w_o.T + (0.0 if layer.b_o is None else layer.b_o)
        residual = self._residual_real(attended[: layer.tokens])
        attention_scale = 1.02 * (max(np.abs(attended).max(), np.abs(residual).max()) or 1.0) / limit
        self._make("o", "w_o", "b_o", None, heads, unit, attention_scale)
        self._residual("in_a", "out_a", [run.output(heads[0])], attention_scale, attention_scale)
        return replace(kernel, attention_scale=attention_scale, matrices=self.matrices | self._heads())

    def _heads(self) -> dict[str, Matrix]:
        """The output projection of each head."""
        whole, width = self.matrices["o"], self.layer.inner // self.layer.heads
        job = replace(whole.job, width=width, bias=False)
        return {
            f"o_{head}": replace(whole, job=job, weights=whole.weights[:, head * width :][:, :width], bias=None)
            for head in range(self.layer.heads)
        }

    def _residual_real(self, x: Real) -> Real:
        layer = self.layer
        if layer.ln_mlp is not None:
            deviation = np.sqrt(x.var(axis=1, keepdims=True))
            x = (x - x.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1.0)
            x = x * layer.ln_mlp[0] + layer.ln_mlp[1]
        inner = x @ layer.mlp_in.T + (0.0 if layer.b_in is None else layer.b_in)
        if layer.activation is Activation.GELU:
            inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        inner = np.maximum(inner, 0.0) if layer.activation is Activation.RELU else inner
        return np.asarray(inner @ layer.mlp_out.T + (0.0 if layer.b_out is None else layer.b_out), dtype=np.float64)

    @staticmethod
    def _input_unit(state_unit: float, normal: bool) -> float:
        """Real value of a unit of what a matrix reads."""
        return 2.0**-NORMAL_FRACTION_BITS if normal else state_unit

    def _residual(self, first: str, second: str, states: list[Int], state_unit: float, out_unit: float) -> None:
        layer, normal = self.layer, self.layer.ln_mlp is not None
        kernel = Kernel(
            config=self.config, layer=layer, hidden=states[0], state_scale=0.0, attention_scale=0.0,
            matrices=self.matrices,
        )  # fmt: skip
        run = Operators(kernel)
        fed = [run.normalise(state, normal) for state in states]
        self._make(first, "mlp_in", "b_in", "ln_mlp", fed, self._input_unit(state_unit, normal), None, inner=True)
        inner = [run.apply(first, state) for state in fed]
        self._make(second, "mlp_out", "b_out", None, inner, self.matrices[first].unit, out_unit)

    def _make(
        self,
        name: str,
        weight_name: str,
        bias_name: str,
        norm_name: str | None,
        states: list[Int],
        unit: float,
        out_unit: float | None,
        *,
        inner: bool = False,
    ) -> None:
        """One matrix; ``unit`` is that of ``states``, ``out_unit`` None lets the outputs choose theirs."""
        c, layer = self.config, self.layer
        weight, bias = np.asarray(getattr(layer, weight_name)), getattr(layer, bias_name)
        norm = None if norm_name is None else getattr(layer, norm_name)
        if norm is not None:
            bias = weight @ norm[1] + (0.0 if bias is None else bias)
            weight = weight * norm[0]
        limit, state_limit = signed_range(c.operand_bits)[1], signed_range(STATE_BITS)[1]
        largest = max(int(np.abs(state).max()) for state in states)
        gain = next((g for g in reversed(range(1 << FEED_GAIN_BITS)) if largest << g <= state_limit), 0)
        feed_unit = unit * 2.0 ** (STATE_BITS - c.operand_bits - gain)
        activation = layer.activation if inner else Activation.NONE
        real = np.concatenate(states) * unit @ weight.T + (0.0 if bias is None else bias)
        if inner:
            real = np.maximum(real, 0.0)
        most = float(np.abs(real).max() or 1.0)
        wide, chooses = inner or out_unit is not None, False
        if activation is Activation.GELU:
            out_shift = max(0, math.ceil(math.log2(max(most * 2.0**GELU_FRACTION_BITS, 1.0) / state_limit)))
            out_unit = 2.0 ** (out_shift - GELU_FRACTION_BITS)
        else:
            out_shift = _WIDE_SHIFT if wide else _WIDE_SHIFT + STATE_BITS - c.operand_bits
            if out_unit is None:
                chooses = True
                out_unit = most / (state_limit if wide else limit) * 1.02
        # Weights are as large as they can be, but biases keep their width.
        per_weight = feed_unit * 2.0 ** MatrixParams(c).sum_shift
        sum_unit = per_weight * float(np.abs(weight).max()) / limit
        if bias is not None:
            sum_unit = max(sum_unit, float(np.abs(bias).max()) / signed_range(BIAS_BITS)[1])
        sum_unit = sum_unit or out_unit * 2.0**-12
        weights = np.rint(weight * (per_weight / sum_unit)).astype(np.int64)
        biases = None if bias is None else saturate(np.rint(bias / sum_unit), BIAS_BITS)
        if chooses:
            # Of an activation that lets little through the sums are much larger than the outputs.
            out_unit = max(out_unit, sum_unit * 2.0 ** -(ALIGN_LEFT - 1))
        if activation is Activation.GELU:
            factor, before = sum_unit * 2.0**GELU_FRACTION_BITS, 0
        else:
            factor = sum_unit / out_unit
            # Sums of few or small products have less bits than an output could hold.
            while out_shift and factor >= 2.0 ** (ALIGN_LEFT - out_shift - 1):
                out_shift -= 1
            before = out_shift
        try:
            shift, scale = scaling(factor, before)
        except DtpError:
            rule = "without outliers that make a unit of its sums coarser than its outputs; 16-bit operands are finer"
            raise must("Layer", weight_name, rule, f"one of {factor:.3g} units of the output") from None
        job = MatrixJob(
            width=weight.shape[1], columns=weight.shape[0], feed_gain=gain, shift=shift, scale=scale,
            out_shift=out_shift, activation=activation, wide=wide, bias=biases is not None,
        )  # fmt: skip
        self.matrices[name] = Matrix(job, clamp(weights, c.operand_bits)[0], biases, out_unit)


def _fold_frame(layer: Layer) -> Layer:
    """Queries and keys in the coordinates of the frame; the frame becomes the first R of them."""
    if layer.frame is None:
        return layer
    turned: dict[str, Any] = {}
    width, rank = layer.inner // layer.heads, layer.frame.shape[2]
    for name in ("w_q", "w_k", "b_q", "b_k"):
        value = getattr(layer, name)
        if value is not None:
            turned[name] = np.array(value, dtype=np.float64)
    for head in range(layer.heads):
        basis, triangle = np.linalg.qr(np.asarray(layer.frame[head], dtype=np.float64), mode="complete")
        basis[:, :rank] *= np.where(np.diag(triangle) < 0, -1.0, 1.0)
        rows = slice(head * width, (head + 1) * width)
        for value in turned.values():
            value[rows] = basis.T @ value[rows]
    frame = np.zeros((layer.heads, width, rank))
    frame[:, np.arange(rank), np.arange(rank)] = 1.0
    return replace(layer, **turned, frame=frame)


def _split(value: Real, heads: int) -> Real:
    """(L, H·d) to (H, L, d)."""
    return np.asarray(value.reshape(len(value), heads, -1).transpose(1, 0, 2), dtype=np.float64)


def _real(x: Int, unit: float) -> Real:
    return np.asarray(x * unit, dtype=np.float64)
