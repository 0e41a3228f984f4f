"""From float tensors to integers and descriptors: exact where it says so, refused where it must be, accurate."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from dtp.attention import golden
from dtp.config import SCORE_FRACTION_BITS, Config
from dtp.errors import DtpError
from dtp.fixed import signed_range
from dtp.job import Job
from dtp.lift import LiftParams
from dtp.quantise import LOG2_E, dequantised, quantise
from dtp.reference.attention import attention, scores, sqnr_db
from dtp.workload import Mode, Workload
from tools.verbs import single_head
from tools.workloads import minilm_extract, random_workload

ECP5 = Config.load("ecp5-85k")
WIDE16 = ECP5.changed(name="wide16", operand_bits=16, lifted_bits=16, probability_bits=16, input_bytes=32)


def workload(mode: Mode, seed: int, tokens: int = 48, width: int = 32, heads: int = 2, **more: object) -> Workload:
    options: dict[str, object] = {"kept": 1.0, "causal": False, "block": 16} | more
    return random_workload(tokens=tokens, width=width, heads=heads, mode=mode, seed=seed, **options)  # type: ignore[arg-type]


def accuracy(config: Config, job: Workload) -> tuple[np.ndarray, np.ndarray]:
    """SQNR of the golden model and of float attention on its operands, dB, a head each."""
    heads = quantise(config, job)
    outputs = np.stack([golden(config, head).outputs_real for head in heads])
    exact = attention(job).numpy()
    return sqnr_db(exact, outputs), sqnr_db(exact, attention(dequantised(job, heads)).numpy())


# ---- integers and scales -----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [ECP5, WIDE16], ids=lambda c: c.name)
@pytest.mark.parametrize("mode", Mode)
def test_integers_are_symmetric_and_use_their_range(config: Config, mode: Mode) -> None:
    limit = signed_range(config.operand_bits)[1]
    for number, head in enumerate(quantise(config, workload(mode, seed=1))):
        assert head.job.tag == number
        head.job.check(config)
        for name in ("keys", "values"):
            assert np.abs(getattr(head, name)).max() == limit
        # q and C may be scaled a hair further down so that their factor is exact.
        assert 0.9 * limit <= np.abs(head.queries).max() <= limit
        assert (head.factors is not None) == mode.is_metric == head.job.lift
        assert head.job.bias == (mode is not Mode.DOT)
        if head.factors is not None:
            assert 0.9 * limit <= np.abs(head.factors).max() <= limit


@pytest.mark.parametrize("mode", Mode)
def test_integers_stand_for_the_tensors(mode: Mode) -> None:
    """Half a step of each scale at most; the frame turns into the first coordinates."""
    job = workload(mode, seed=2)
    heads = quantise(ECP5, job)
    back = dequantised(job, heads)
    for number, head in enumerate(heads):
        turn = np.eye(job.width)
        if mode.is_metric:
            assert job.frame is not None
            # Any turn whose first columns are the frame will do; the keys tell which.
            inverse = np.linalg.pinv(job.k[number].astype(np.float64))
            turn = np.linalg.qr(inverse @ back.k[number])[0]
            turn *= np.sign(np.diag(turn.T @ (inverse @ back.k[number])))
            lanes = job.k[number] @ job.frame[number]
            assert np.abs(back.k[number][:, : job.frame_rank] - lanes).max() <= 0.501 * head.k_scale
        else:
            assert np.abs(back.q[number] - job.q[number]).max() <= 0.501 * head.q_scale
            assert np.abs(back.k[number] - job.k[number]).max() <= 0.501 * head.k_scale
        assert np.abs(back.v[number] - job.v[number]).max() <= 0.501 * head.v_scale
        if mode.is_metric:
            assert back.metric_factor is not None
            assert job.metric_factor is not None
            assert job.curvature is not None
            assert back.curvature is not None
            assert np.abs(back.metric_factor[number] - job.metric_factor[number]).max() <= 0.501 * head.factor_scale
            assert np.abs(back.curvature[number] - job.curvature[number]).max() <= 0.501 * head.curvature_scale
    # The workload that the integers stand for has nearly the scores of the original, up to a constant of each row.
    difference = (scores(back) - scores(job)).numpy()
    difference -= difference.mean(axis=2, keepdims=True)
    spread = float((scores(job) - scores(job).mean(dim=2, keepdim=True)).numpy().std())
    assert difference.std() < 0.03 * spread


@pytest.mark.parametrize("mode", Mode)
def test_chosen_scales_make_the_factors_exact(mode: Mode) -> None:
    """κ s_q s_k and ν s_C² s_q s_k in units of the hardware are whole numbers, not rounded ones."""
    job, params = workload(mode, seed=3), LiftParams(ECP5)
    kappa, nu = job.kappa * LOG2_E, job.nu * LOG2_E
    for head in quantise(ECP5, job):
        d = head.job
        unit = 2.0 ** (SCORE_FRACTION_BITS + ECP5.sum_shift + d.score_shift + params.query_shift)
        assert d.query_scale == pytest.approx(kappa * head.q_scale * head.k_scale * unit, rel=1e-12)
        if d.lift:
            registers = 2.0 ** (params.metric_register_shift + params.vector_register_shift)
            factor = nu * head.factor_scale**2 * head.q_scale * head.k_scale * unit * registers
            assert d.metric_scale == pytest.approx(factor, rel=1e-12)
        if job.curvature is not None:
            word = nu * head.curvature_scale * 2.0**SCORE_FRACTION_BITS * 2.0**d.bias_shift
            assert -d.bias_scale == pytest.approx(word, rel=1e-12)


def test_given_scales_are_kept() -> None:
    job = workload(Mode.RIEMANNIAN, seed=4, heads=4, kv_heads=2)
    largest = {name: float(np.abs(getattr(job, name)).max()) for name in ("q", "k", "v", "metric_factor")}
    given = {
        "q_scale": tuple(1.5 * largest["q"] / 127 * (1 + 0.1 * n) for n in range(4)),
        "k_scale": (1.5 * largest["k"] / 127, 1.7 * largest["k"] / 127),
        "v_scale": (largest["v"] / 127,),
        "factor_scale": (largest["metric_factor"] / 127,),
    }
    heads = quantise(ECP5, replace(job, **given))
    for number, head in enumerate(heads):
        assert head.q_scale == given["q_scale"][number]
        assert head.k_scale == given["k_scale"][number // 2]
        assert head.v_scale == given["v_scale"][0]
        assert head.factor_scale == given["factor_scale"][0]
        assert np.abs(head.keys).max() < 127
    assert (heads[0].keys != heads[2].keys).any()
    measured, floor = accuracy(ECP5, replace(job, **given))
    assert (measured > floor - 1.5).all()


def test_heads_that_share_keys_share_their_integers() -> None:
    heads = quantise(ECP5, workload(Mode.DOT, seed=5, heads=4, kv_heads=2))
    assert (heads[0].keys == heads[1].keys).all()
    assert (heads[2].values == heads[3].values).all()
    assert (heads[1].keys != heads[2].keys).any()


def test_numbers_of_padding_choose_no_scale() -> None:
    job = workload(Mode.RIEMANNIAN, seed=6, valid_length=30)
    fields = {}
    for name in ("q", "k", "v", "metric_factor", "curvature"):
        array = getattr(job, name).copy()
        array[:, 30:] *= 1000.0
        fields[name] = array
    for plain, loud in zip(quantise(ECP5, job), quantise(ECP5, replace(job, **fields)), strict=True):
        assert plain.job == loud.job
        assert (plain.keys[:30] == loud.keys[:30]).all()
        assert (golden(ECP5, plain).outputs == golden(ECP5, loud).outputs).all()


def test_a_factor_of_higher_rank_than_the_frame_is_reduced_exactly() -> None:
    """C of 7 columns and a square root of C Cᵀ with 3 stand for the same metric."""
    rng = np.random.default_rng(7)
    job = workload(Mode.RIEMANNIAN, seed=7, metric_rank=3)
    factor = (0.3 * rng.standard_normal((2, 48, 3, 7))).astype(np.float32)
    head = quantise(ECP5, replace(job, metric_factor=factor))[0]
    assert head.factors is not None
    assert head.factors.shape[2] == ECP5.metric_rank
    kept = head.factors * head.factor_scale
    metric = factor[0].astype(np.float64) @ factor[0].astype(np.float64).transpose(0, 2, 1)
    step = head.factor_scale * np.abs(kept).max()
    assert np.abs(kept @ kept.transpose(0, 2, 1) - metric).max() <= 3.5 * step
    measured, floor = accuracy(ECP5, replace(job, metric_factor=factor))
    assert (measured > floor - 1.0).all()


def test_blend_of_nothing_is_the_dot_product() -> None:
    blended = workload(Mode.BLENDED, seed=8, blend=0.0)
    plain = Workload.from_tensors(mode=Mode.DOT, causal=False, q=blended.q, k=blended.k, v=blended.v)
    for one, other in zip(quantise(ECP5, blended), quantise(ECP5, plain), strict=True):
        assert one.job == other.job
        assert (golden(ECP5, one).outputs == golden(ECP5, other).outputs).all()


@pytest.mark.parametrize("config", [ECP5, WIDE16], ids=lambda c: c.name)
@pytest.mark.parametrize("zeros", [("q",), ("k",), ("q", "k"), ("v",), ("metric_factor",), ("q", "k", "metric_factor")])
def test_tensors_of_zeros(config: Config, zeros: tuple[str, ...]) -> None:
    """A dead head or a flat metric is no reason to refuse a workload."""
    job = workload(Mode.RIEMANNIAN, seed=10)
    job = replace(job, **{name: np.zeros_like(getattr(job, name)) for name in zeros})
    heads = quantise(config, job)
    for name in set(zeros) & {"q", "k", "v"}:
        assert not getattr(heads[0], {"q": "queries", "k": "keys", "v": "values"}[name]).any()
    if "v" in zeros:
        assert not golden(config, heads[0]).outputs.any()
    else:
        assert (accuracy(config, job)[0] > 25).all()


# ---- what is refused ---------------------------------------------------------------------------------------


def test_what_exceeds_the_configuration_is_refused() -> None:
    tiny = Config.load("tiny")
    cases = {
        r"Workload.tokens must be at most max_tokens 64 of configuration 'tiny', not 65": workload(
            Mode.DOT, 1, tokens=65, width=4
        ),
        r"Workload.width must be at most max_width 16 of configuration 'tiny', not 17": workload(Mode.DOT, 1, width=17),
        r"Workload.frame_rank must be at most max_frame_rank 3 of configuration 'tiny', not 4": workload(
            Mode.RIEMANNIAN, 1, width=8, frame_rank=4
        ),
        r"Workload.block must be block 8 of configuration 'tiny', not 16": workload(Mode.DOT, 1, width=8, kept=0.5),
    }
    for message, job in cases.items():
        with pytest.raises(DtpError) as refusal:
            quantise(tiny, job)
        assert str(refusal.value) == message


def test_metric_rank_that_the_lift_unit_lacks_is_refused() -> None:
    flat = ECP5.changed(name="flat", metric_rank=1)
    with pytest.raises(DtpError, match=r"Workload.metric_rank must be at most metric_rank 1 of .*'flat', not 2"):
        quantise(flat, workload(Mode.RIEMANNIAN, 1, metric_rank=2, frame_rank=3))
    quantise(flat, workload(Mode.RIEMANNIAN, 1, metric_rank=2, frame_rank=1))  # rank 1 whatever C holds


def test_scores_out_of_range_are_refused() -> None:
    loud = workload(Mode.DOT, seed=9)
    with pytest.raises(DtpError, match=r"Workload\.q of head 0 gives scores beyond"):
        quantise(ECP5, replace(loud, q=loud.q * np.float32(1e4)))
    metric = workload(Mode.RIEMANNIAN, seed=9)
    assert metric.metric_factor is not None
    with pytest.raises(DtpError, match="of head 0 gives"):
        quantise(ECP5, replace(metric, metric_factor=metric.metric_factor * np.float32(300)))
    with pytest.raises(DtpError, match="biases that 24 bits cannot hold"):
        curvature = np.full((2, 48), 1e7, np.float32)
        quantise(ECP5, replace(metric, curvature=curvature))


# ---- accuracy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e200, 1e300])
def test_temperature_whose_square_is_out_of_reach_is_refused(temperature: float) -> None:
    workload = random_workload(
        tokens=8, width=8, heads=1, mode=Mode.RIEMANNIAN, kept=1.0, causal=False, seed=1, block=None
    )
    with pytest.raises(DtpError, match=r"Workload\.temperature and the scales must be numbers whose squares"):
        quantise(Config.load("tiny"), replace(workload, temperature=temperature))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", Mode)
def test_arithmetic_costs_little_beside_the_operands(mode: Mode, seed: int) -> None:
    """Within half a decibel of the quantisation floor for dot products, one for the metric modes."""
    job = workload(mode, seed=20 + seed, tokens=96, causal=seed == 1, kept=0.6 if seed == 2 else 1.0)
    measured, floor = accuracy(ECP5, job)
    assert (floor > 25).all()
    assert (measured > floor - (0.5 if mode is Mode.DOT else 1.0)).all()


def test_minilm() -> None:
    job = minilm_extract()
    measured, floor = accuracy(ECP5, job)
    assert len(measured) == 24
    assert (measured > floor - 0.5).all()


@pytest.mark.parametrize("mode", Mode)
def test_wider_operands_are_more_accurate(mode: Mode) -> None:
    job = workload(mode, seed=30)
    narrow, wide = accuracy(ECP5, job)[0], accuracy(WIDE16, job)[0]
    assert (wide > narrow + 15).all()


def test_softmax_error_on_the_committed_extract() -> None:
    """Largest error of a probability, read through values that are single ones."""
    job = minilm_extract()
    worst = 0.0
    for number in (0, 11, 23):
        one = single_head(job, number)
        probability = np.zeros((1, one.tokens, 0))
        exact = []
        for first in range(0, one.tokens, one.width):
            values = np.zeros(one.v.shape, np.float32)
            columns = np.arange(min(one.width, one.tokens - first))
            values[0, first + columns, columns] = 1.0
            picked = replace(one, v=values)
            heads = quantise(ECP5, picked)
            probability = np.concatenate([probability, golden(ECP5, heads[0]).outputs_real[None]], axis=2)
            exact.append(attention(dequantised(picked, heads)).numpy())
        wanted = np.concatenate(exact, axis=2)
        assert wanted.sum(axis=2)[0, : one.valid_length] == pytest.approx(1.0, abs=1e-6)
        worst = max(worst, float(np.abs(probability - wanted).max()))
    assert worst < 0.01


def test_job_of_a_workload_says_what_the_workload_says() -> None:
    job = workload(Mode.EUCLIDEAN, seed=40, kept=0.5, causal=True, valid_length=41)
    head = quantise(ECP5, job)[1]
    d: Job = head.job
    assert (d.tokens, d.valid_length, d.width, d.causal, d.masked) == (48, 41, 32, True, True)
    assert job.block_mask is not None
    assert head.block_mask is not None
    assert (head.block_mask == job.block_mask[1]).all()
    assert math.isclose(head.output_scale(ECP5), head.v_scale / 256)
