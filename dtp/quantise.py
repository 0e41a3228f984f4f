"""From the float tensors of a workload to the integers and the descriptor of each head's job.

Symmetric quantisation, one scale a head and tensor. The factors of the score (κ, ν, log2 e and the scales) are folded
into the numbers of the descriptor; where the tool chooses a scale itself, it is made a hair larger so that the 16-bit
factor that depends on it is exact, and no scale error is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtp.config import SCALE_BITS, SCORE_BITS, SCORE_FRACTION_BITS, SHIFT_FIELD_BITS, Config
from dtp.errors import DtpError, must
from dtp.fixed import Int, round_shift, signed_range
from dtp.job import BIAS_WORD_BITS, KEY_SHIFT_BITS, Bytes, Job, pack_job
from dtp.lift import LiftParams
from dtp.workload import Workload

Real = NDArray[np.float64]

LOG2_E = math.log2(math.e)
_MAX_SHIFT = (1 << SHIFT_FIELD_BITS) - 1
_MAX_KEY_SHIFT = (1 << KEY_SHIFT_BITS) - 1
_MAX_SIGNED = (1 << (SCALE_BITS - 1)) - 1
_MAX_UNSIGNED = (1 << SCALE_BITS) - 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Head:
    """Integers of one head and what they stand for.

    Members
    -------
    job: the descriptor
    queries, keys, values: (L, d), in the aligned frame when the job lifts
    factors: (L, R, r) metric factors C_t of a lifting job
    bias: (L,) bias words (curvature) of a job with a bias
    block_mask: (blocks, blocks) bool
    q_scale, k_scale, v_scale, factor_scale, curvature_scale: real value of one unit of each
    """

    job: Job
    queries: Int
    keys: Int
    values: Int
    factors: Int | None = None
    bias: Int | None = None
    block_mask: NDArray[np.bool_] | None = None
    q_scale: float
    k_scale: float
    v_scale: float
    factor_scale: float = 0.0
    curvature_scale: float = 0.0

    def output_scale(self, config: Config) -> float:
        """Real value of one unit of an output."""
        return self.v_scale / (1 << config.output_fraction_bits)

    def beats(self, config: Config) -> Bytes:
        """Input beats of the job, uint8 (n, input_bytes)."""
        return pack_job(
            config, self.job, self.queries, self.keys, self.values, self.factors, self.factors, self.bias,
            self.block_mask,
        )  # fmt: skip


def quantise(config: Config, workload: Workload) -> tuple[Head, ...]:
    """Jobs of all query heads of a workload, in order.

    Raises
    ------
    DtpError
        when the workload exceeds the configuration or its scores cannot be represented
    """
    _check_fit(config, workload)
    try:
        return tuple(_quantise_head(config, workload, head) for head in range(workload.heads))
    except OverflowError:
        raise DtpError(
            "Workload.temperature and the scales must be numbers whose squares double precision can hold: "
            "bring them closer to 1"
        ) from None


def dequantised(workload: Workload, heads: Sequence[Head]) -> Workload:
    """The workload that the integers stand for: float attention on it is the quantisation floor.

    q, k and the frame are those of the aligned coordinates; all query heads get keys and values of their own. What
    stands beside the attention (transports, commutator) is left out.
    """
    fields = {
        "q": np.stack([head.queries * head.q_scale for head in heads]),
        "k": np.stack([head.keys * head.k_scale for head in heads]),
        "v": np.stack([head.values * head.v_scale for head in heads]),
    }
    if workload.mode.is_metric:
        rank = workload.frame_rank
        frame = np.zeros((len(heads), workload.width, rank))
        frame[:, np.arange(rank), np.arange(rank)] = 1.0
        fields["frame"] = frame
        nothing = np.zeros((workload.tokens, rank, 1))
        fields["metric_factor"] = np.stack(
            [nothing if head.factors is None else head.factors * head.factor_scale for head in heads]
        )
    if workload.curvature is not None:
        flat = np.zeros(workload.tokens)
        fields["curvature"] = np.stack(
            [flat if head.bias is None else head.bias * head.curvature_scale for head in heads]
        )
    changes: dict[str, Any] = {name: value.astype(np.float32) for name, value in fields.items()}
    return replace(workload.attention_only(), **changes, q_scale=None, k_scale=None, v_scale=None, factor_scale=None)


def _check_fit(config: Config, workload: Workload) -> None:
    for field, limit_name in (
        ("tokens", "max_tokens"),
        ("width", "max_width"),
        ("frame_rank", "max_frame_rank"),
    ):
        limit = getattr(config, limit_name)
        value = getattr(workload, field)
        if value > limit:
            raise must("Workload", field, f"at most {limit_name} {limit} of configuration {config.name!r}", value)
    if workload.block_mask is not None and workload.block != config.block:
        raise must("Workload", "block", f"block {config.block} of configuration {config.name!r}", workload.block)
    if min(workload.metric_rank, workload.frame_rank) > config.metric_rank:
        rule = f"at most metric_rank {config.metric_rank} of configuration {config.name!r}"
        raise must("Workload", "metric_rank", rule, workload.metric_rank)


def _given(workload: Workload, name: str, head: int) -> float | None:
    scales = workload.scale_per_head(name)
    if scales is None:
        return None
    shared = head // workload.groups if name in ("k", "v") else head
    return float(scales[shared])


def _scale(given: float | None, tensor: Real, bits: int) -> float:
    """The scale that was given, or the one that lets the largest number just fit; zeros count as numbers around 1."""
    if given is not None:
        return given
    largest = float(np.abs(tensor).max(initial=0.0))
    return (largest or 1.0) / signed_range(bits)[1]


def _integers(tensor: Real, scale: float, bits: int) -> Int:
    """Round half away from a tie to even, then clamp to the symmetric range."""
    limit = signed_range(bits)[1]
    return np.asarray(np.clip(np.rint(tensor / scale), -limit, limit), dtype=np.int64)


def _quantise_head(config: Config, workload: Workload, head: int) -> Head:
    c, w = config, workload
    shared = head // w.groups
    q, k, v = (np.asarray(t, dtype=np.float64) for t in (w.q[head], w.k[shared], w.v[shared]))
    live = slice(0, w.valid_length)
    bits = c.operand_bits
    kappa, nu = w.kappa * LOG2_E, w.nu * LOG2_E
    with_bias = w.nu > 0
    lift = w.mode.is_metric and with_bias  # a blend of 0 is the dot product
    factor = np.zeros((w.tokens, 0, 0))
    if lift:
        assert w.frame is not None
        assert w.metric_factor is not None
        turn = _alignment(np.asarray(w.frame[head], dtype=np.float64))
        q, k = q @ turn, k @ turn
        factor = _smaller_rank(np.asarray(w.metric_factor[head], dtype=np.float64), c.metric_rank)

    k_scale = _scale(_given(w, "k", head), k[live], bits)
    v_scale = _scale(_given(w, "v", head), v[live], bits)
    keys, values = _integers(k, k_scale, bits), _integers(v, v_scale, bits)
    search = _Search(c, kappa, nu, q, factor, live, keys, k_scale, _given(w, "q", head), _given(w, "factor", head))
    numbers = search.query(head)
    bias: Int | None = None
    curvature_scale = 0.0
    if with_bias:
        curvature = np.zeros(w.tokens) if w.curvature is None else np.asarray(w.curvature[head], np.float64)
        numbers_bias, bias, curvature_scale = search.bias(curvature)
        numbers |= numbers_bias
    if lift:
        numbers |= search.lift(head)
    mask = None if w.block_mask is None else np.asarray(w.block_mask[head], dtype=np.bool_)
    job = Job(
        tokens=w.tokens,
        valid_length=w.valid_length,
        width=w.width,
        tag=head & 0xFFFF,
        bias=with_bias,
        lift=lift,
        causal=w.causal,
        masked=mask is not None,
        gated=False,
        **numbers,
    )
    return Head(
        job=job,
        queries=search.queries,
        keys=keys,
        values=values,
        factors=search.factors if lift else None,
        bias=bias,
        block_mask=mask,
        q_scale=search.q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        factor_scale=search.factor_scale if lift else 0.0,
        curvature_scale=curvature_scale,
    )


def _alignment(frame: Real) -> Real:
    """Orthogonal (d, d) whose first R columns are the frame: x @ it has the frame's coordinates first."""
    basis, triangle = np.linalg.qr(frame, mode="complete")
    rank = frame.shape[1]
    basis[:, :rank] *= np.where(np.diag(triangle) < 0, -1.0, 1.0)
    return np.asarray(basis, dtype=np.float64)


def _smaller_rank(factor: Real, rank: int) -> Real:
    """C_t of at most ``rank`` columns with the same C_t C_tᵀ; exact because rank(C_t) <= R <= ``rank`` then."""
    if factor.shape[2] <= rank:
        return factor
    values, vectors = np.linalg.eigh(factor @ factor.transpose(0, 2, 1))
    root = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
    return np.ascontiguousarray(root[:, :, ::-1])


class _Search:
    """Scales and shifts of one head: the largest that its numbers allow."""

    def __init__(
        self,
        config: Config,
        kappa: float,
        nu: float,
        q: Real,
        factor: Real,
        live: slice,
        keys: Int,
        k_scale: float,
        q_given: float | None,
        factor_given: float | None,
    ) -> None:
        self.config, self.params = config, LiftParams(config)
        self.kappa, self.nu = kappa, nu
        self.q, self.factor, self.live = q, factor, live
        self.keys, self.k_scale = keys, k_scale
        self.q_given, self.factor_given = q_given, factor_given
        self.rank = factor.shape[1]
        self.row_limit = signed_range(config.row_bits)[1]
        self.q_scale = _scale(q_given, q[live], config.operand_bits)
        self.factor_scale = _scale(factor_given, factor[live], config.operand_bits)
        self.queries: Int = np.zeros(q.shape, dtype=np.int64)
        self.factors: Int = np.zeros(factor.shape, dtype=np.int64)

    def query(self, head: int) -> dict[str, int]:
        """``score_shift``, ``query_scale`` and ``metric_scale``; fixes the scales of q and C."""
        p = self.params
        largest_q = _scale(self.q_given, self.q[self.live], self.config.operand_bits)
        largest_factor = _scale(self.factor_given, self.factor[self.live], self.config.operand_bits)
        for shift in range(_MAX_SHIFT, -1, -1):
            unit = 2.0 ** (SCORE_FRACTION_BITS + self.config.sum_shift + shift + p.query_shift)
            # query_scale = κ s_q s_k unit
            self.q_scale, query_scale = _exact_factor(
                largest_q, self.q_given is None, self.kappa * self.k_scale * unit, _MAX_UNSIGNED
            )
            if query_scale > _MAX_UNSIGNED:
                continue
            self.queries = _integers(self.q, self.q_scale, self.config.operand_bits)
            if not self.rank:
                return {"score_shift": shift, "query_scale": query_scale}
            # metric_scale = ν s_C² s_q s_k unit 2^(register shifts)
            registers = 2.0 ** (p.metric_register_shift + p.vector_register_shift)
            square, metric_scale = _exact_factor(
                largest_factor**2,
                self.factor_given is None,
                self.nu * self.q_scale * self.k_scale * unit * registers,
                _MAX_SIGNED,
            )
            if metric_scale > _MAX_SIGNED:
                continue
            self.factor_scale = math.sqrt(square)
            self.factors = _integers(self.factor, self.factor_scale, self.config.operand_bits)
            lanes = self.queries[:, : self.rank]
            turned = round_shift(self._times_metric(lanes), p.vector_register_shift)
            rows = round_shift(lanes * query_scale + turned * metric_scale, p.query_shift)
            if np.abs(rows[self.live]).max(initial=0) <= self.row_limit or shift == 0:
                return {"score_shift": shift, "query_scale": query_scale, "metric_scale": metric_scale}
        raise DtpError(
            f"Workload.q of head {head} gives scores beyond ±{1 << (SCORE_BITS - SCORE_FRACTION_BITS - 1)}"
            " in the log2 domain: lower them, or raise the temperature"
        )

    def bias(self, curvature: Real) -> tuple[dict[str, int], Int, float]:
        """``bias_*`` and the bias words: −ν(Ω + ‖k‖² + ½ bᵀMb) with 12 fraction bits."""
        p = self.params
        one = 2.0**SCORE_FRACTION_BITS
        largest = float(np.abs(curvature[self.live]).max(initial=0.0))
        word_limit = signed_range(BIAS_WORD_BITS)[1]
        scale = largest / word_limit if largest > 0 else 1.0
        norm = self.nu * self.k_scale**2 * one * 2.0**p.norm_register_shift
        metric = 0.0
        if self.rank:
            registers = p.metric_register_shift + p.vector_register_shift + p.metric_norm_register_shift
            metric = 0.5 * self.nu * (self.k_scale * self.factor_scale) ** 2 * one * 2.0**registers
        for shift in range(min(_MAX_KEY_SHIFT, 24), -1, -1):
            unit = 2.0**shift
            exact_scale, bias_scale = _exact_factor(scale, True, self.nu * one * unit, _MAX_SIGNED)
            if largest == 0:
                bias_scale = 0
            numbers = {
                "bias_scale": -bias_scale,
                "norm_scale": -round(norm * unit),
                "metric_norm_scale": -round(metric * unit),
            }
            if all(abs(number) <= _MAX_SIGNED for number in numbers.values()):
                words = np.clip(np.rint(curvature / exact_scale), -word_limit, word_limit).astype(np.int64)
                return numbers | {"bias_shift": shift}, words, exact_scale
        raise DtpError("Workload.curvature gives biases that 24 bits cannot hold: raise the temperature")

    def lift(self, head: int) -> dict[str, int]:
        """Scales and shifts of the lifted lanes."""
        p = self.params
        lifted_limit = signed_range(self.config.lifted_bits)[1]
        metric = self._metric()
        vector = round_shift(self._times_metric(self.keys[:, : self.rank]), p.vector_register_shift)
        outer = _outer(self.keys[:, : self.rank])
        shifts = [_shift_to_fit(lanes[self.live], lifted_limit) for lanes in (vector, outer, metric)]
        vector_shift, outer_shift, metric_shift = shifts
        q2, k2, c2 = self.q_scale**2, self.k_scale**2, self.factor_scale**2
        query_lanes = self.queries[:, : self.rank]
        outer_lanes = round_shift(_outer(query_lanes), p.outer_register_shift)
        doubled = np.where(np.eye(self.rank, dtype=np.bool_), 1, 2)
        registers = 2.0**p.metric_register_shift
        real = {
            "lift_vector_scale": self.nu
            * self.q_scale
            * self.k_scale
            * c2
            * 2.0 ** (vector_shift + p.vector_register_shift - p.vector_gain)
            * registers,
            "lift_metric_scale": -0.5 * self.nu * c2 * registers * k2 * 2.0**outer_shift,
            "lift_outer_scale": -0.5 * self.nu * q2 * 2.0**p.outer_register_shift * c2 * registers * 2.0**metric_shift,
        }
        lanes = {
            "lift_vector_scale": query_lanes << p.vector_gain,
            "lift_metric_scale": metric * doubled,
            "lift_outer_scale": outer_lanes * doubled,
        }
        for shift in range(_MAX_SHIFT, -1, -1):
            unit = 2.0 ** (SCORE_FRACTION_BITS + self.config.lifted_sum_shift + shift)
            numbers = {name: round(value * unit * 2.0**p.lifted_shift) for name, value in real.items()}
            fits = all(abs(number) <= _MAX_SIGNED for number in numbers.values()) and all(
                np.abs(round_shift(lanes[name][self.live] * numbers[name], p.lifted_shift)).max(initial=0)
                <= signed_range(self.config.lifted_row_bits)[1]
                for name in numbers
            )
            if fits:
                return numbers | {
                    "lift_shift": shift,
                    "key_vector_shift": vector_shift,
                    "key_outer_shift": outer_shift,
                    "key_metric_shift": metric_shift,
                }
        raise DtpError(
            f"Workload.metric_factor of head {head} gives metric terms beyond the score's range:"
            " lower it, or raise the temperature"
        )

    def _metric(self) -> Int:
        """M_t = C_t C_tᵀ as the lift's registers hold it, (L, R, R)."""
        square = self.factors @ self.factors.transpose(0, 2, 1)
        return round_shift(square, self.params.metric_register_shift)

    def _times_metric(self, lanes: Int) -> Int:
        """M_t x_t before its register, (L, R)."""
        return np.asarray(np.einsum("lij,lj->li", self._metric(), lanes), dtype=np.int64)


def _outer(lanes: Int) -> Int:
    return np.asarray(lanes[:, :, None] * lanes[:, None, :], dtype=np.int64)


def _shift_to_fit(lanes: Int, limit: int) -> int:
    """The least right shift after which every lane is within ±limit."""
    shift = 0
    while np.abs(round_shift(lanes, shift)).max(initial=0) > limit:
        shift += 1
    return shift


def _exact_factor(scale: float, free: bool, slope: float, limit: int) -> tuple[float, int]:
    """An integer close to scale · slope, and the scale: made larger so that the product is exact when it is free."""
    if not free:
        return scale, round(scale * slope)
    factor = max(1, math.ceil(scale * slope))
    return (factor / slope if slope > 0 else scale), factor
