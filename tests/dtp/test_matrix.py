"""Matrix mode contract: table, arithmetic word for word, refusals, orders of the streams, error against float."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dtp.array import ArrayParams, GoldenArray
from dtp.config import PRESETS, Config
from dtp.errors import DtpError
from dtp.fixed import Int
from dtp.matrix import (
    Activation,
    MatrixJob,
    MatrixParams,
    activate,
    bias_words,
    feeds,
    gelu_table,
    matrix,
    requantise,
    scaling,
    weight_entries,
    words,
)

TINY = Config.load("tiny")
CONFIGS = {
    "tiny": TINY,
    "two segments": TINY.changed(lanes=16, output_bytes=16, input_bytes=16, normaliser_lanes=2),
    "16 bits": TINY.changed(operand_bits=16),
    "ecp5-85k": Config.load("ecp5-85k"),
    "wide": Config.load("wide"),
}


def job_of(config: Config, **changes: Any) -> MatrixJob:
    values: dict[str, Any] = {
        "width": 19, "columns": 29, "feed_gain": 0, "shift": 2, "scale": 90001, "out_shift": 9,
        "activation": Activation.NONE, "wide": False, "bias": True,
    }  # fmt: skip
    return MatrixJob(**{**values, **changes})


def operands(config: Config, job: MatrixJob, tokens: int, seed: int) -> tuple[Int, Int, Int | None]:
    random = np.random.default_rng(seed)
    limit = 1 << (config.operand_bits - 1)
    x = random.integers(-(1 << 15), 1 << 15, (tokens, job.width))
    w = random.integers(-limit, limit, (job.columns, job.width))
    b = random.integers(-(1 << 14), 1 << 14, job.columns) if job.bias else None
    return x, w, b


def scalar(config: Config, job: MatrixJob, x: Int, w: Int, b: int) -> tuple[int, int]:
    """One element by the words of docs/commutator.md §3, with Python's integers; and whether it saturated."""

    def shifted(value: int, amount: int) -> int:
        return (value + (1 << amount >> 1)) >> amount

    def clamped(value: int, bits: int) -> int:
        limit = (1 << (bits - 1)) - 1
        return max(-limit, min(limit, value))

    acc = b
    fed = [clamped(shifted(int(n) << job.feed_gain, 16 - config.operand_bits), config.operand_bits) for n in x]
    for low in range(0, job.width, config.block):
        total = sum(p * int(q) for p, q in zip(fed[low : low + config.block], w[low : low + config.block], strict=True))
        acc += shifted(total, MatrixParams(config).sum_shift)
    exact = shifted(acc << 4, job.shift)
    a = max(-(1 << 17), min((1 << 17) - 1, exact))
    v = shifted(a * job.scale, 17)
    assert -(1 << 17) <= v < 1 << 17
    y = v if job.activation is Activation.NONE else max(v, 0)
    if job.activation is Activation.GELU and abs(v) < 4 << 12:
        u = ((v if v >= 0 else -v - 1) // 16 + 0.5) / 256
        y -= round(4096 * u * 0.5 * math.erfc(u / math.sqrt(2)))
    last = shifted(y, job.out_shift)
    out = clamped(last, 16 if job.wide else config.operand_bits)
    return out, int(a != exact or out != last)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_element_against_the_words_of_the_contract(name: str, activation: Activation) -> None:
    config = CONFIGS[name]
    more = 0 if config.operand_bits == 8 else 3
    for wide, bias, shift in ((False, True, 5), (True, False, 6)):
        job = job_of(
            config, activation=activation, wide=wide, bias=bias, shift=shift + more, feed_gain=int(wide),
            out_shift=2 if wide else 9 - more,
        )  # fmt: skip
        x, w, b = operands(config, job, config.rows, seed=3)
        y, count = matrix(config, job, x, w, b)
        wanted = [
            [scalar(config, job, row, column, 0 if b is None else int(b[n])) for n, column in enumerate(w)] for row in x
        ]
        assert y.tolist() == [[element[0] for element in row] for row in wanted]
        fed = int(feeds(config, job, x)[1].sum())
        assert fed > (x.size // 10 if wide else -1)
        assert count == fed + sum(element[1] for row in wanted for element in row)
        assert len(np.unique(y)) > 20


def test_gelu_table_against_float() -> None:
    """Every pre-activation of 18 bits: within the table's step and the tail that is cut."""
    v = np.arange(-(1 << 17), 1 << 17)
    exact = np.array([x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in v / 4096])
    error = np.abs(activate(v, Activation.GELU) / 4096 - exact)
    assert 0.0005 < error.max() < 0.0013
    assert error[np.abs(v) >= 4 << 12].max() < 1.4e-4
    assert gelu_table().max() == 696 and not gelu_table().flags.writeable
    assert np.array_equal(activate(v, Activation.RELU), np.maximum(v, 0))


@pytest.mark.parametrize("name", CONFIGS)
def test_no_legal_sum_overflows(name: str) -> None:
    """The widest job with operands at their limits, on the array as a program whose sums wrap."""
    config = CONFIGS[name]
    params, array = MatrixParams(config), ArrayParams.of(config)
    limit = 1 << (config.operand_bits - 1)
    chunk = -(-(config.block * limit * limit) >> params.sum_shift)
    worst = config.max_mlp // config.block * chunk + (1 << 23)
    assert worst < 1 << (config.accumulator_bits - 1)
    assert params.sum_shift <= array.shift_max


@pytest.mark.parametrize("name", ["tiny", "two segments", "16 bits"])
def test_the_array_gives_the_sums(name: str) -> None:
    """Feeds and steps in the order of the contract, through the array's golden model."""
    config = CONFIGS[name]
    shift = 10 if config.operand_bits == 16 else 5
    job = job_of(config, width=17, columns=62, scale=1 << 16, shift=shift, out_shift=0, wide=True)
    x, w, b = operands(config, job, config.rows, seed=5)
    assert b is not None
    params = MatrixParams(config)
    array = GoldenArray(ArrayParams.of(config))
    stationary = feeds(config, job, words(config, x))[0]
    entries, biases = iter(weight_entries(config, job, w)), bias_words(config, job, b)
    sums, base = [], 0
    for blocks in job.tiles(config):
        steps = blocks * config.pass_steps
        for chunk in range(job.chunks(config)):
            for feed in stationary[chunk * config.pass_steps : (chunk + 1) * config.pass_steps]:
                array.feed(feed)
            for step in range(steps):
                new = array.step(
                    next(entries), swap=step == 0, addr=step, first=chunk == 0, init=biases[base + step],
                    shift=params.sum_shift, rescale=np.zeros(config.rows, dtype=np.int64),
                )  # fmt: skip
                if chunk == job.chunks(config) - 1:
                    sums.append(new)
        base += steps
    assert next(entries, None) is None
    acc = np.concatenate(sums, axis=1)
    y, _ = matrix(config, job, x, w, b)
    assert np.array_equal(requantise(acc, job, config)[0][:, : job.columns], y)
    assert np.unique(y).size > 100


@pytest.mark.parametrize("name", PRESETS)
def test_steps_are_the_multiplications(name: str) -> None:
    config = Config.load(name)
    job = job_of(config, width=config.max_model, columns=config.max_mlp)
    assert job.steps(config) * config.macs == config.rows * job.width * job.columns
    assert sum(job.tiles(config)) == job.blocks(config)
    assert max(job.tiles(config)) * config.pass_steps <= config.accumulator_depth
    assert len(weight_entries(config, job, np.zeros((job.columns, job.width)))) == job.steps(config)


@pytest.mark.parametrize("factor", [2.0**-25, 1.0e-3, 0.37 / 512, 2.0**-9])
def test_scaling(factor: float) -> None:
    shift, scale = scaling(factor, 9)
    got = scale * 2.0 ** (4 - shift - 17 - 9)
    assert abs(got / factor - 1) <= 2.0**-17
    assert 0 <= shift < 32


def test_error_against_float() -> None:
    """int8 operands: 36 dB and more for a layer of 64 inputs, the last bit for wide outputs of exact operands."""
    config, random = CONFIGS["ecp5-85k"], np.random.default_rng(7)
    x, w = random.normal(size=(16, 64)), random.normal(size=(64, 64)) / 8
    x_scale, w_scale = np.abs(x).max() / 127, np.abs(w).max() / 127
    xi, wi = np.rint(x / x_scale).astype(np.int64), np.rint(w / w_scale).astype(np.int64)
    exact = (xi @ wi.T) * x_scale * w_scale
    y_scale = np.abs(exact).max() / 127
    shift, scale = scaling(x_scale * w_scale / y_scale, 9)
    job = MatrixJob(64, 64, 0, shift, scale, 9, Activation.NONE, False, False)
    y, count = matrix(config, job, xi << 8, wi)
    assert count == 0
    assert np.abs(y * y_scale - exact).max() <= 0.51 * y_scale
    noise = ((y * y_scale - x @ w.T) ** 2).sum()
    assert 10 * np.log10(((x @ w.T) ** 2).sum() / noise) > 36
    shift, scale = scaling(x_scale * w_scale / y_scale * 256, 1)
    y, count = matrix(config, MatrixJob(64, 64, 0, shift, scale, 1, Activation.NONE, True, False), xi << 8, wi)
    assert np.abs(y * y_scale / 256 - exact).max() <= 1.6 * y_scale / 256
    assert count == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "MatrixJob.width must be an integer in 1 … 65536, not 0"),
        ({"columns": True}, "MatrixJob.columns must be an integer in 1 … 65536, not True"),
        ({"feed_gain": 4}, "MatrixJob.feed_gain must be an integer in 0 … 3, not 4"),
        ({"shift": -1}, "MatrixJob.shift must be an integer in 0 … 31, not -1"),
        ({"scale": 1 << 17}, "MatrixJob.scale must be an integer in 0 … 131071, not 131072"),
        ({"out_shift": 16}, "MatrixJob.out_shift must be an integer in 0 … 15, not 16"),
        ({"activation": 1}, "MatrixJob.activation must be of dtp.matrix.Activation, not 1"),
        ({"wide": 1}, "MatrixJob.wide must be True or False, not 1"),
    ],
)
def test_refused_jobs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError) as caught:
        job_of(TINY, **change)
    assert str(caught.value) == message


def test_refused_operands() -> None:
    job = job_of(TINY, width=8, columns=8)
    x, w, b = operands(TINY, job, 4, 1)
    for arguments, message in (
        ((x[:, :7], w, b), "matrix.state must be of shape (L, 8), not (4, 7)"),
        ((x, w.T[:7], b), "matrix.weights must be of shape (8, 8), not (7, 8)"),
        ((x, w, None), "matrix.bias must be given exactly when job.bias, not None"),
        ((x, w + 200, b), f"matrix.weights must be signed numbers of 8 bits, not {int(np.abs(w + 200).max())}"),
    ):
        with pytest.raises(DtpError) as caught:
            matrix(TINY, job, *arguments)
        assert str(caught.value) == message
    with pytest.raises(DtpError, match=r"at most max_mlp 64 of configuration 'tiny', not 65"):
        matrix(TINY, job_of(TINY, columns=65), x, w, b)
    with pytest.raises(DtpError, match=r"words\.values must be of at most 4 rows"):
        words(TINY, np.zeros((5, 8)))
    with pytest.raises(DtpError, match=r"scaling\.factor"):
        scaling(1.0, 9)
    with pytest.raises(DtpError, match=r"Config\.max_mlp must be at least max_model 32, not 16"):
        TINY.changed(max_mlp=16)
