"""Transport contract: all six rows of the table against the direct formulas, energies, passes, refusals, packing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dtp.config import PRESETS, Config
from dtp.errors import DtpError
from dtp.fixed import overflows, round_shift
from dtp.solve import LEAST_UNIT, MiddleMode, TransportError
from dtp.transport import (
    QuantisedFactors,
    TransportJob,
    TransportParams,
    balanced_pairs,
    connection_columns,
    factor_words,
    output_words,
    pack_job,
    pack_outputs,
    pair_columns,
    quantise_linear,
    quantise_solve,
    quantise_state,
    state_words,
    transport,
    transport_passes,
)

torch = pytest.importorskip("torch")
from dtp.reference import transport as reference  # noqa: E402

Real = NDArray[np.float64]
TOKENS, WIDTH, GATE = 12, 64, -0.6
CONFIGS = {bits: Config.load("ecp5-85k").changed(factor_bits=bits) for bits in (8, 16)}
#: Largest relative error of an output vector against float64 on the float factors: quantised factors and states.
BOUND = {8: 1.5e-2, 16: 2.5e-4}
#: Linear maps lengthen a state, whose norm therefore starts some bits below 2^15: its rounding counts more.
LINEAR_BOUND = {8: 2e-2, 16: 1.5e-3}
#: The same on the quantised factors and states: what the arithmetic itself loses.
FLOOR = 2e-4


def _normal(seed: int, *shape: int, spread: float = 0.12) -> Real:
    return np.random.default_rng(seed).normal(size=shape) * spread


def _apply(matrix: Any, x: Real, *, transposed: bool = False) -> Real:
    p = np.asarray(matrix)
    return np.einsum("nji,nj->ni" if transposed else "nij,nj->ni", p, x)


def _worst(got: Real, wanted: Real) -> float:
    return float((np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).max())


def _generator(v: Real, weights: tuple[float, ...] | None = None) -> Any:
    """Ω of the columns pair by pair."""
    pairs = np.ones(v.shape[-1] // 2) if weights is None else np.asarray(weights)
    return reference.generator(torch.tensor(v[..., 1::2] * pairs), torch.tensor(v[..., 0::2]))


def _check_solve(config: Config, mode: MiddleMode, v: Real, dense: Any, x: Real) -> None:
    """Both slots at once and each alone."""
    q = quantise_solve(config, mode, v)
    states, unit = quantise_state(x)
    assert not overflows(q.v, config.factor_bits).any() and q.v.max() >= (1 << (config.factor_bits - 1)) * 0.4
    both = transport(config, q.job(config, mode, both=True), q.v, np.stack([states, states], axis=1))
    assert both.error is TransportError.NONE and both.saturations == 0
    for slot in (0, 1):
        one = transport(config, q.job(config, mode, transposed=slot == 1), q.v, states[:, None])
        assert np.array_equal(one.outputs[:, 0], both.outputs[:, slot])
        got = one.outputs[:, 0].astype(np.float64)
        wanted = _apply(dense(v), x, transposed=slot == 1)
        assert _worst(got * unit, wanted) <= BOUND[config.factor_bits]
        floor = _apply(dense(q.v * q.v_scale), states.astype(np.float64), transposed=slot == 1)
        assert _worst(got, floor) <= FLOOR


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("k", range(2, 9, 2))
@pytest.mark.parametrize("bits", CONFIGS)
def test_cayley(bits: int, k: int, seed: int) -> None:
    a, b = _normal(seed, 2, TOKENS, WIDTH, k // 2)
    v, weights = connection_columns(a, b, cayley=True)
    assert set(weights) == {1.0}
    _check_solve(
        CONFIGS[bits], MiddleMode.CAYLEY, v, lambda c: reference.cayley(_generator(c)), _normal(9, TOKENS, WIDTH)
    )
    direct = reference.cayley(reference.generator(torch.tensor(a), torch.tensor(b)))
    assert torch.allclose(direct, reference.cayley(_generator(v)))


@pytest.mark.parametrize("bits", CONFIGS)
@pytest.mark.parametrize("lengths", [(0.1, 8.0), (2.2, 2.2), (2.6, 2.6), (2.8, 2.8), (3.2, 3.2), (3.6, 3.6)])
def test_long_columns_stay_in_range(bits: int, lengths: tuple[float, float]) -> None:
    """Some tokens have pairs that are long, whose unlike lengths are balanced, the others hardly any."""
    a, b = _normal(5, 2, TOKENS, WIDTH, 2)
    a, b = (length * x / np.linalg.norm(x, axis=1, keepdims=True) for length, x in zip(lengths, (a, b), strict=True))
    a[::2] *= 0.01
    v, _ = connection_columns(a, b, cayley=True)
    config = CONFIGS[bits]
    q = quantise_solve(config, MiddleMode.CAYLEY, v)
    assert q.unit >= LEAST_UNIT
    x = _normal(9, TOKENS, WIDTH)
    states, unit = quantise_state(x, headroom_bits=q.headroom_bits)
    result = transport(config, q.job(config, MiddleMode.CAYLEY), q.v, states[:, None])
    assert result.error is TransportError.NONE and result.saturations == 0
    wanted = _apply(reference.cayley(_generator(v)), x)
    assert _worst(result.outputs[:, 0] * unit, wanted) <= LINEAR_BOUND[bits]


def test_balanced_pairs() -> None:
    a, b = _normal(5, 2, TOKENS, WIDTH, 2)
    b[3] = 2 * a[3]
    a[4] = 0
    v, _ = connection_columns(7 * a, b, cayley=True)
    balanced = balanced_pairs(v)
    assert torch.allclose(_generator(balanced), _generator(v), atol=1e-9)
    first, second = balanced[..., 0::2], balanced[..., 1::2]
    lengths = [np.linalg.norm(x, axis=1) for x in (first, second)]
    assert np.allclose(lengths[0], lengths[1]) and np.abs((first * second).sum(axis=1)).max() < 1e-12
    assert not balanced[3:5].any() and (lengths[0][5:] > 0).all()
    # No pair is longer than it was, and one that is balanced stays.
    assert (lengths[0] ** 2 + lengths[1] ** 2 <= ((7 * a) ** 2 + b**2).sum(axis=1) + 1e-12).all()
    assert np.allclose(balanced_pairs(balanced), balanced)


@pytest.mark.parametrize("gate", [0.7, GATE])
@pytest.mark.parametrize("bits", CONFIGS)
def test_cayley_with_torsion(bits: int, gate: float) -> None:
    a, b, left, right = _normal(3, 4, TOKENS, WIDTH, 2)
    v, _ = connection_columns(a, b, left, right, gate, cayley=True)
    omega = reference.generator(*(torch.tensor(x) for x in (a, b, left, right)), gate)
    assert torch.allclose(omega, _generator(v))
    _check_solve(
        CONFIGS[bits], MiddleMode.CAYLEY, v, lambda c: reference.cayley(_generator(c)), _normal(9, TOKENS, WIDTH)
    )


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("bits", CONFIGS)
def test_inverse_metric(bits: int, k: int, seed: int) -> None:
    u = _normal(seed, TOKENS, WIDTH, k)
    _check_solve(
        CONFIGS[bits], MiddleMode.WOODBURY, u, lambda c: reference.inverse_metric(torch.tensor(c)),
        _normal(9, TOKENS, WIDTH),
    )  # fmt: skip


def _check_linear(
    config: Config, mode: MiddleMode, q: QuantisedFactors, dense: Any, x: Real, *, bound: float, headroom: int,
    identity: bool = True,
) -> None:  # fmt: skip
    states, unit = quantise_state(x, headroom_bits=headroom)
    for slot in (0, 1):
        job = q.job(config, mode, transposed=slot == 1, identity=identity)
        result = transport_passes(config, job, q.v, states[:, None], q.weights, w=q.w)
        assert result.error is TransportError.NONE and result.saturations == 0
        wanted = _apply(dense, x, transposed=slot == 1)
        assert _worst(result.outputs[:, 0] * unit, wanted) <= bound
        assert np.abs(result.outputs).max() > 1000


@pytest.mark.parametrize("k", [2, 4, 6, 8, 10, 16, 24])
@pytest.mark.parametrize("bits", CONFIGS)
def test_linear_transport(bits: int, k: int) -> None:
    a, b = _normal(k, 2, TOKENS, WIDTH, k // 2)
    v, weights = connection_columns(a, b, cayley=False)
    q = quantise_linear(CONFIGS[bits], MiddleMode.SYMPLECTIC, v, weights, state_norm=2.0**13)
    dense = reference.linear(reference.generator(torch.tensor(a), torch.tensor(b)))
    _check_linear(
        CONFIGS[bits], MiddleMode.SYMPLECTIC, q, dense, _normal(9, TOKENS, WIDTH), bound=LINEAR_BOUND[bits], headroom=2
    )


@pytest.mark.parametrize("r_t", [1, 2, 3, 6])
@pytest.mark.parametrize("bits", CONFIGS)
def test_linear_transport_with_torsion(bits: int, r_t: int) -> None:
    a, b, left, right = _normal(r_t, 4, TOKENS, WIDTH, r_t)
    v, weights = connection_columns(a, b, left, right, GATE, cayley=False)
    assert v.shape[-1] == 4 * r_t
    q = quantise_linear(CONFIGS[bits], MiddleMode.SYMPLECTIC, v, weights, state_norm=2.0**13)
    dense = reference.linear(reference.generator(*(torch.tensor(x) for x in (a, b, left, right)), GATE))
    _check_linear(
        CONFIGS[bits], MiddleMode.SYMPLECTIC, q, dense, _normal(9, TOKENS, WIDTH), bound=LINEAR_BOUND[bits], headroom=2
    )


@pytest.mark.parametrize("k", [1, 3, 8, 11])
@pytest.mark.parametrize("bits", CONFIGS)
def test_metric_projection(bits: int, k: int) -> None:
    u, gamma = _normal(k, TOKENS, WIDTH, k, spread=1.0), 3.0
    weights = [gamma / WIDTH] * (-(-k // 2))
    q = quantise_linear(CONFIGS[bits], MiddleMode.SCALE, u, weights, state_norm=2.0**12)
    dense = reference.metric_projection(torch.tensor(u), gamma)
    _check_linear(
        CONFIGS[bits], MiddleMode.SCALE, q, dense, _normal(9, TOKENS, WIDTH), bound=LINEAR_BOUND[bits], headroom=3
    )


@pytest.mark.parametrize("k", [4, 8, 24])
@pytest.mark.parametrize("bits", CONFIGS)
def test_edge_of_a_standard_head(bits: int, k: int) -> None:
    """W_O W_V in d_model: V is not W, the state is not added, many words, k in passes."""
    width = 160
    w_o, w_v = _normal(5, 3, width, k, spread=0.2), _normal(6, 3, width, k, spread=0.2)
    weights = [1.0] * (-(-k // 2))
    q = quantise_linear(CONFIGS[bits], MiddleMode.SCALE, w_v, weights, w=w_o, state_norm=2.0**14)
    dense = reference.edge(torch.tensor(w_o), torch.tensor(w_v).mT)
    x = _normal(9, 3, width)
    _check_linear(
        CONFIGS[bits], MiddleMode.SCALE, q, dense, x, bound=LINEAR_BOUND[bits], headroom=1, identity=False
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("bits", "bound"), [(8, 1e-3), (16, 1e-4)])
def test_agreeing_heads_are_flat(bits: int, bound: float, seed: int) -> None:
    """u = Pᵀ(P z) of equal heads: the energy between tokens is what the arithmetic leaves."""
    config = CONFIGS[bits]
    a, b = _normal(seed, 2, 64, WIDTH, 2, spread=0.15)
    v, _ = connection_columns(a, b, cayley=True)
    q = quantise_solve(config, MiddleMode.CAYLEY, v)
    z, _ = quantise_state(np.broadcast_to(_normal(seed + 7, WIDTH), (64, WIDTH)))
    up = transport(config, q.job(config, MiddleMode.CAYLEY), q.v, z[:, None])
    down = transport(config, q.job(config, MiddleMode.CAYLEY, transposed=True), q.v, up.outputs)
    u = down.outputs[:, 0].astype(np.float64)
    energy = ((u[:, None] - u[None]) ** 2).sum(-1) / (z[0].astype(np.float64) ** 2).sum()
    assert energy.max() <= bound
    # The arithmetic alone is far below the bound, whatever the factors' width.
    assert energy.max() <= 1e-6


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("bits", "median", "worst"), [(8, 0.03, 0.1), (16, 0.01, 0.01)])
def test_loop_energies(bits: int, median: float, worst: float, seed: int) -> None:
    """Two heads that differ: energies of 1e-3 and more against float64 on the float factors."""
    config, tokens = CONFIGS[bits], 48
    a, b = _normal(seed, 2, tokens, WIDTH, 2, spread=0.08)
    other = [x + _normal(seed + n, tokens, WIDTH, 2, spread=0.03) for n, x in ((20, a), (40, b))]
    columns = [connection_columns(a, b, cayley=True)[0], connection_columns(*other, cayley=True)[0]]
    z_real = np.broadcast_to(_normal(seed + 7, WIDTH), (tokens, WIDTH))
    z, _ = quantise_state(z_real)
    first, second = (quantise_solve(config, MiddleMode.CAYLEY, v) for v in columns)
    x = transport(config, first.job(config, MiddleMode.CAYLEY), first.v, z[:, None]).outputs
    u = transport(config, second.job(config, MiddleMode.CAYLEY, transposed=True), second.v, x).outputs[:, 0]
    exact = _apply(reference.cayley(_generator(columns[0])), z_real)
    exact = _apply(reference.cayley(_generator(columns[1])), exact, transposed=True)
    pairs = np.triu_indices(tokens, 1)

    def energies(values: Real, probe: Real) -> Real:
        return np.asarray((((values[pairs[0]] - values[pairs[1]]) ** 2).sum(-1)) / (probe**2).sum())

    wanted = energies(exact, z_real[0])
    got = energies(u.astype(np.float64), z[0].astype(np.float64))
    large = wanted >= 1e-3
    assert large.sum() > 300
    relative = np.abs(got[large] / wanted[large] - 1)
    assert np.median(relative) <= median and relative.max() <= worst


def test_one_token_by_hand() -> None:
    """The words of the contract with Python's integers: projection, weights, one rounding at the end."""
    config = Config.load("tiny")
    p = TransportParams(config)
    random = np.random.default_rng(4)
    v, w = random.integers(-127, 128, (2, 1, 5, 3))
    x, base = random.integers(-3000, 3001, (2, 1, 1, 5))
    weights = (20000, -31111, 0, 0)
    job = TransportJob(
        mode=MiddleMode.SCALE, tokens=1, words=-(-5 // p.tile_rows), groups=1, separate=True, identity=False, base=True,
        project_shift=3, weights=weights,
    )  # fmt: skip
    result = transport(config, job, v, x, w=w, base=base)
    m = []
    for c in range(3):
        h = (sum(int(v[0, i, c]) * int(x[0, 0, i]) for i in range(5)) + 4) >> 3
        m.append((h * weights[c // 2] + (1 << 14)) >> 15)
    shift = config.factor_bits + 1
    y = [
        ((int(base[0, 0, i]) << shift) - sum(int(w[0, i, c]) * m[c] for c in range(3)) + (1 << (shift - 1))) >> shift
        for i in range(5)
    ]
    assert result.middle[0, 0].tolist() == [*m, 0]
    assert result.outputs[0, 0].tolist() == [max(-32768, min(32767, value)) for value in y]
    assert result.saturations == sum(not -32768 <= value <= 32767 for value in y)


def test_errors_and_saturations_are_reported() -> None:
    config = Config.load("tiny")
    v = np.full((2, 4, 4), 127)
    x = np.full((2, 1, 4), 32767)
    job = TransportJob(mode=MiddleMode.CAYLEY, tokens=2, words=1, groups=1, project_shift=31, gram_shift=20, unit=0)
    assert transport(config, job, v, x).error is TransportError.PIVOT
    assert transport(config, replace(job, unit=9000, project_shift=4), v, x).error is TransportError.RANGE
    job = replace(job, mode=MiddleMode.SCALE, project_shift=8, weights=(-30000,) * 4)
    result = transport(config, job, v, x)
    assert result.error is TransportError.NONE and result.saturations == 8
    assert result.outputs.tolist() == [[[32767] * 4]] * 2


def test_widths_hold_the_worst_case() -> None:
    """Largest factors and states: exact sums fit the derived widths, one bit less does not."""
    for name in PRESETS:
        for bits in (8, 16):
            config = Config.load(name).changed(factor_bits=bits)
            p = TransportParams(config)
            rows = p.max_words * p.tile_rows
            largest = rows << (bits - 1 + 15)
            assert not overflows(largest, p.sum_bits) and overflows(largest, p.sum_bits - 1)
            largest = rows << (2 * bits - 2)
            assert not overflows(largest, p.gram_bits) and overflows(largest, p.gram_bits - 1)
            most = (1 << (15 + p.expand_shift)) + (8 << (bits - 1 + 17)) + (1 << p.expand_shift)
            assert not overflows(most, p.expand_bits)
            assert p.gram_cycles >= 2 and p.output_depth > p.output_cycles
            assert p.gram_rows * p.gram_cycles == p.tile_rows


@pytest.mark.parametrize("name", PRESETS)
def test_order_of_the_words(name: str) -> None:
    config = Config.load(name)
    p = TransportParams(config)
    separate = p.vectors == 1
    job = TransportJob(
        mode=MiddleMode.SCALE, tokens=2, words=3, groups=2, plain=True, transposed=True, separate=separate,
        identity=False, base=True, tag=7,
    )  # fmt: skip
    random = np.random.default_rng(1)
    width = 3 * p.tile_rows - 1
    v, w = random.integers(-127, 128, (2, 2, width, 7))
    if not separate:
        with pytest.raises(DtpError, match=r"^TransportJob\.transposed must be unset where plain and separate"):
            replace(job, separate=True).check(config)
        w = None
    x, base = random.integers(-999, 1000, (2, 2, 2, width))
    factors = factor_words(config, job, v, w)
    assert factors.shape == (2, job.factor_words, config.transport_lanes)
    for token, word, group, row, column in ((0, 0, 0, 0, 3), (1, 2, 1, 0, 2), (1, 1, 0, 1, 0)):
        lane = 4 * row + column
        assert factors[token, 2 * word + group, lane] == v[token, word * p.tile_rows + row, 4 * group + column]
        if w is not None:
            assert factors[token, 6 + 2 * word + group, lane] == w[token, word * p.tile_rows + row, 4 * group + column]
    assert not factors[:, 1::2, 3::4].any() and not factors[:, 4:6, 4 * (p.tile_rows - 1) :].any()
    words = state_words(config, job, x, base)
    assert words.shape == (2, job.state_words(p), p.vectors * p.tile_rows)
    flat = words.reshape(2, 2, 3, 2, p.tile_rows)  # x and base, word, slot, lane in every arrangement
    assert flat[1, 0, 2, 1, 0] == x[1, 1, 2 * p.tile_rows] and flat[0, 1, 1, 0, 1] == base[0, 0, p.tile_rows + 1]
    result = transport(config, job, v, x, w=w, base=base)
    beats = pack_job(config, job, v, x, w=w, base=base)
    assert beats.shape[1] == config.input_bytes
    out = pack_outputs(config, job, result)
    words = output_words(config, job, result.outputs)
    assert out.shape[1] == config.output_bytes and len(out) >= words.shape[0] * words.shape[1] + 1


JOB = TransportJob(mode=MiddleMode.CAYLEY, tokens=1, words=1, groups=1)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (replace(JOB, tokens=0), r"TransportJob\.tokens must be in 1…65536, not 0"),
        (replace(JOB, words=17), r"TransportJob\.words must be in 1…16, not 17"),
        (replace(JOB, groups=3), r"TransportJob\.groups must be in 1…2, not 3"),
        (replace(JOB, plain=False), r"TransportJob\.plain must be set where transposed is not, not False"),
        (replace(JOB, base=True), r"TransportJob\.base must be unset where identity is set, not True"),
        (replace(JOB, unit=1 << 17), r"TransportJob\.unit must be in 0…131071, not 131072"),
        (replace(JOB, weights=(1,)), r"TransportJob\.weights must be of 4 integers, not \(1,\)"),
        (replace(JOB, gram_shift=32), r"TransportJob\.gram_shift must be in 0…31, not 32"),
    ],
)
def test_refused_jobs(job: TransportJob, message: str) -> None:
    with pytest.raises(DtpError, match=f"^{message}$"):
        job.check(Config.load("tiny"))


def test_refused_tensors() -> None:
    config = Config.load("tiny")
    v, x = np.zeros((1, 4, 4)), np.zeros((1, 1, 4))
    for arguments, message in (
        ((np.zeros((1, 4, 10)), x), r"transport\.v must be of at most 8 columns, for a solve has one pass, not 10"),
        ((np.zeros((1, 6, 4)), x), r"transport\.v must be of shape \(1, width, k\) in 1 words and 1 groups, .*"),
        ((v + 200, x), r"transport\.v must be of 8 bits, not 200"),
        ((v, x + 40000), r"transport\.states must be of 16 bits, not 40000"),
        ((v, x[:, :, :3]), r"transport\.states must be of width 4, as the factors, .*"),
        ((v, x[0]), r"transport\.states must be of shape \(1, 1, width\), not \(1, 4\)"),
    ):
        with pytest.raises(DtpError, match=f"^{message}$"):
            transport(config, JOB, *arguments)
    with pytest.raises(DtpError, match=r"^transport\.w must be given with separate and only then"):
        transport(config, JOB, v, x, w=v)
    with pytest.raises(DtpError, match=r"^transport\.base must be given with the flag base and only then"):
        transport(config, JOB, v, x, base=x)
    with pytest.raises(DtpError, match=r"^transport_passes\.job\.mode must be scale or symplectic"):
        transport_passes(config, JOB, v, x, [1, 1])
    with pytest.raises(DtpError, match=r"^quantise_solve\.v must be of shape \(n, width, k <= 8\), not \(1, 4, 10\)"):
        quantise_solve(config, MiddleMode.CAYLEY, np.zeros((1, 4, 10)))
    with pytest.raises(DtpError, match=r"^quantise_solve\.v must be of pairs of columns in mode cayley, not \(1, 4, "):
        quantise_solve(config, MiddleMode.CAYLEY, np.zeros((1, 4, 3)))
    with pytest.raises(DtpError, match=r"^quantise_solve\.mode must be woodbury or cayley, not 'SCALE'"):
        quantise_solve(config, MiddleMode.SCALE, v)
    with pytest.raises(DtpError, match=r"^quantise_linear\.weights must be small enough for a weight in"):
        quantise_linear(config, MiddleMode.SCALE, np.ones((1, 64, 2)), [100.0])


def test_rounding_is_half_up_once() -> None:
    """One rounding of the whole sum, not one of the expansion: they differ at ties."""
    config = Config.load("tiny")
    v = np.array([[[1, 0, 0, 0]]])
    job = TransportJob(mode=MiddleMode.SCALE, tokens=1, words=1, groups=1, weights=(1 << 15, 0, 0, 0))
    for value in range(-3000, 3000, 256):
        y = int(transport(config, job, v, [[[value]]]).outputs[0, 0, 0])
        assert y == int(round_shift((value << 9) - value, 9))
    assert pair_columns([[1, 2]], [[3, 4]]).tolist() == [[1, 3, 2, 4]]
