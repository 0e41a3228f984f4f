"""Holonomy contract: exact numerators, scores against fractions and against float64 pairs, accounts of loops."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtp.config import PRESETS, Config
from dtp.errors import DtpError
from dtp.fixed import Int
from dtp.holonomy import (
    BINS,
    COUNT_BITS,
    FieldJob,
    FieldParams,
    LoopAccounts,
    LoopHeader,
    LoopParams,
    PairMode,
    block_scores,
    block_sums,
    combine_pairs,
    numerators,
    relative_transports,
)
from dtp.solve import MiddleMode
from dtp.transport import connection_columns, quantise_solve, quantise_state

ECP5 = FieldParams(lanes=4, multipliers=2, block=16, max_tokens=512, max_lanes=64)
TINY = FieldParams(lanes=2, multipliers=2, block=8, max_tokens=64, max_lanes=16)
FINE = FieldParams(lanes=16, multipliers=4, block=4, max_tokens=64, max_lanes=32)
COARSE = FieldParams(lanes=8, multipliers=2, block=64, max_tokens=256, max_lanes=8)
PARAMS = {"ecp5-85k": ECP5, "tiny": TINY, "blocks of 4": FINE, "blocks of 64": COARSE}


def pairs_by_hand(u: Int, params: FieldParams) -> Int:
    """Σ over the pairs of tokens of two blocks of the squared distance, with nothing saved."""
    kept = u >> params.field_shift
    distance = ((kept[:, None] - kept[None]) ** 2).sum(-1)
    starts = np.arange(0, len(u), params.block)
    return np.add.reduceat(np.add.reduceat(distance, starts, axis=0), starts, axis=1)


def cayley(random: np.random.Generator, tokens: int, width: int, rank: int, size: float) -> np.ndarray:
    """Dense Cayley transports of random connections, (tokens, d, d), by a linear solve."""
    a, b = (size * random.standard_normal((tokens, width, rank)) / np.sqrt(width) for _ in range(2))
    x = a @ b.transpose(0, 2, 1) - b @ a.transpose(0, 2, 1)
    unit = np.eye(width)
    return np.linalg.solve(unit - x / 2, unit + x / 2)


def scaled_probe(random: np.random.Generator, width: int) -> Int:
    z = random.standard_normal(width)
    return np.rint(z / np.linalg.norm(z) * 2**15 * 0.99).astype(np.int64)


@pytest.mark.parametrize("tokens", ["one", "ragged", "whole"])
@pytest.mark.parametrize("name", PARAMS)
def test_numerators_are_the_sum_over_all_pairs(name: str, tokens: str) -> None:
    p, random = PARAMS[name], np.random.default_rng(len(name))
    count = {"one": 1, "ragged": 2 * p.block + 3, "whole": 3 * p.block}[tokens]
    for low, high in ((-32768, 32767), (-5, 5), (32760, 32767)):
        u = random.integers(low, high + 1, (count, p.max_lanes))
        exact = numerators(block_sums(u, p))
        assert np.array_equal(exact, pairs_by_hand(u, p))
        assert (exact >= 0).all()


@given(data=st.data())
def test_numerators_never_go_below_zero(data: st.DataObject) -> None:
    """Few different lanes near the ends, where the terms of the difference are the largest and closest."""
    p = TINY
    tokens = data.draw(st.integers(1, 3 * p.block))
    ends = st.sampled_from([-32768, -32767, -1, 0, 1, 2, 32766, 32767])
    row = data.draw(st.lists(ends, min_size=p.lanes, max_size=p.lanes))
    u = np.array([row] * tokens)
    u[data.draw(st.integers(0, tokens - 1))] = data.draw(st.lists(ends, min_size=p.lanes, max_size=p.lanes))
    exact = numerators(block_sums(u, p))
    assert (exact >= 0).all() and np.array_equal(exact, pairs_by_hand(u, p))


@pytest.mark.parametrize("name", PARAMS)
def test_widths_hold_the_corners_and_no_bit_is_wasted(name: str) -> None:
    p = PARAMS[name]
    assert p.sum_bits <= 18
    low = np.full((2 * p.block, p.max_lanes), -32768)
    both = low.copy()
    both[: p.block] = 32767
    same, apart = block_sums(low, p), block_sums(both, p)
    assert same.sums.min() == -(1 << (p.sum_bits - 1))
    assert int(same.energies.max()).bit_length() == p.energy_bits
    gram = same.sums @ same.sums.T
    assert int(gram.max()).bit_length() == p.gram_bits - 1
    assert int(numerators(apart).max()).bit_length() in (p.numerator_bits - 1, p.numerator_bits)
    assert int(same.energies[0] * p.block * 2).bit_length() <= p.numerator_bits


@pytest.mark.parametrize("name", PARAMS)
def test_scores_against_exact_fractions(name: str) -> None:
    p, random = PARAMS[name], np.random.default_rng(7)
    for tokens in (1, p.block + 1, 2 * p.block - 1, 3 * p.block):
        for spread in (3, 60, 1500, 9000):
            base = random.choice([-1, 1], p.max_lanes) * random.integers(3000, 4096, p.max_lanes)
            base = base * int((1 << 30) ** 0.5 / np.sqrt((base**2).sum()) * 16) // 16
            u = np.clip(base + random.integers(-spread, spread + 1, (tokens, p.max_lanes)), -32768, 32767)
            energy = int((base**2).sum())
            job = FieldJob.of(p, tokens=tokens, words=p.max_words, probe_energy=energy, causal=False)
            sums = block_sums(u, p)
            scores, exact = block_scores(sums, job, p), numerators(sums)
            for i in range(len(sums.sizes)):
                for j in range(len(sums.sizes)):
                    pairs = int(sums.sizes[i] * sums.sizes[j])
                    real = Fraction(int(exact[i, j]) << (2 * p.field_shift + 14), pairs * energy)
                    bound = Fraction(1, 2) + min(real, Fraction(65536)) / 2**17 + Fraction(1, 2**16)
                    assert abs(scores[i, j] - min(real, 65535)) <= bound or (real > 65535 and scores[i, j] == 65535)


@pytest.mark.parametrize("energy", [1 << 30, (1 << 30) - 1, (1 << 29) + 1, 1 << 29, 1 << 20])
def test_constants_of_the_normalisation(energy: int) -> None:
    for tokens in (16, 17, 31, 23):
        try:
            job = FieldJob.of(ECP5, tokens=tokens, words=16, probe_energy=energy, causal=False)
        except DtpError:
            assert energy == 1 << 20 and tokens in (17, 23)
            continue
        for case, (shift, reciprocal) in enumerate(zip(job.shifts, job.reciprocals, strict=True)):
            weight = 16 ** (2 - case) * ((tokens % 16) or 16) ** case
            scaled = Fraction(weight * energy, 16) * 2**shift
            assert 2**33 < scaled <= 2**34 and 0 <= shift <= 15
            assert abs(reciprocal - 2**50 / scaled) <= 1 and 1 << 16 <= reciprocal < 1 << 17


def test_block_score_is_the_mean_over_all_pairs_of_transports() -> None:
    """Random Cayley transports: all L² energies in float64 against the integer scores."""
    random = np.random.default_rng(2)
    for size in (0.4, 0.7, 1.2):
        tokens, width = 64, 64
        first, second = (cayley(random, tokens, width, 2, size) for _ in range(2))
        z = scaled_probe(random, width)
        exact_u = np.einsum("tji,tjk,k->ti", second, first, z.astype(float))
        distance = ((exact_u[:, None] - exact_u[None]) ** 2).sum(-1) / float(z @ z)
        mean = distance.reshape(4, 16, 4, 16).mean((1, 3))
        u = np.rint(exact_u).astype(np.int64)
        job = FieldJob.of(ECP5, tokens=tokens, words=16, probe_energy=int(z @ z), causal=False)
        scores = block_scores(block_sums(u, ECP5), job, ECP5)
        unit = 2.0**-14
        assert np.abs(scores * unit - mean).max() <= 0.75 * unit + mean.max() * 2.0**-16
        assert mean.max() > 10 * unit
        if size > 0.5:
            assert np.corrcoef(scores.ravel(), mean.ravel())[0, 1] >= 0.999


def test_loop_energy_is_the_distance_of_two_relative_transports() -> None:
    """SPEC §4.2: i –H→ j –H′→ i from x = P_i z, literally, against ‖u_i − u_j‖²/‖z‖²."""
    random = np.random.default_rng(5)
    first, second = (cayley(random, 6, 16, 2, 0.5) for _ in range(2))
    z = random.standard_normal(16)
    u = np.einsum("tji,tjk,k->ti", second, first, z)
    for i in range(6):
        for j in range(6):
            x = first[i] @ z
            # frame: an edge from j to i is P_i P_j⁻¹; the loop goes i → j by the first head, j → i by the second.
            end = second[i] @ second[j].T @ first[j] @ first[i].T @ x
            literal = ((end - x) ** 2).sum() / (x**2).sum()
            assert literal == pytest.approx(((u[i] - u[j]) ** 2).sum() / (z**2).sum(), abs=1e-12)


def test_agreeing_heads_score_nothing() -> None:
    random = np.random.default_rng(3)
    first = cayley(random, 48, 64, 2, 0.5)
    z = scaled_probe(random, 64)
    state = np.rint(first @ z).astype(np.int64)
    u = np.rint(np.einsum("tji,tj->ti", first, state.astype(float))).astype(np.int64)
    job = FieldJob.of(ECP5, tokens=48, words=16, probe_energy=int(z @ z), causal=False)
    scores = block_scores(block_sums(u, ECP5), job, ECP5)
    assert scores.max() * 2.0**-14 <= 1e-4


@pytest.mark.parametrize(("bits", "units"), [(8, 5), (16, 1)])
def test_field_of_the_transport_engine(bits: int, units: int) -> None:
    """Quantised connections through the engine's golden model; float64 takes the real ones. Correlation >= 0.99."""
    config = Config.load("ecp5-85k").changed(factor_bits=bits)
    params = FieldParams.of(config, multipliers=2)
    random = np.random.default_rng(bits)
    tokens, width = 48, 64
    a, b = (0.9 * random.standard_normal((2, tokens, width, 2)) / 8 for _ in range(2))
    columns = [connection_columns(a[h], b[h], cayley=True)[0] for h in range(2)]
    quantised = [quantise_solve(config, MiddleMode.CAYLEY, v) for v in columns]
    z, unit = quantise_state(random.standard_normal(width))
    assert unit > 0
    u, saturated = relative_transports(config, *quantised, z)
    job = FieldJob.of(params, tokens=tokens, words=16, probe_energy=int(z @ z), causal=False)
    scores = block_scores(block_sums(u, params), job, params)
    x = a @ b.transpose(0, 1, 3, 2) - b @ a.transpose(0, 1, 3, 2)
    first, second = np.linalg.solve(np.eye(width) - x / 2, np.eye(width) + x / 2)
    real = np.einsum("tji,tjk,k->ti", second, first, z.astype(float))
    distance = ((real[:, None] - real[None]) ** 2).sum(-1) / float(z @ z)
    mean = distance.reshape(3, 16, 3, 16).mean((1, 3)) * 2**14
    assert saturated == 0 and mean.min() > 1000
    assert np.abs(scores - mean).max() <= units + mean.max() * 2.0**-10
    assert np.corrcoef(scores.ravel(), mean.ravel())[0, 1] >= 0.99
    same, _ = relative_transports(config, quantised[0], quantised[0], z)
    assert block_scores(block_sums(same, params), job, params).max() * 2.0**-14 <= (1e-3 if bits == 8 else 1e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_sizes_of_the_presets(name: str) -> None:
    config = Config.load(name)
    multipliers = {"tiny": 2, "ecp5-85k": 2, "wide": 16}[name]
    params = FieldParams.of(config, multipliers=multipliers, probes=2)
    assert params.max_lanes == 2 * config.max_width and params.lanes == config.transport_lanes // 4
    loops = LoopParams.of(config, multipliers=2, heads=8)
    assert loops.max_lanes >= config.transport_width and loops.blocks == config.max_blocks


def test_probes_are_averaged_by_standing_side_by_side() -> None:
    random = np.random.default_rng(4)
    wide = FieldParams(lanes=4, multipliers=2, block=16, max_tokens=64, max_lanes=128)
    first, second = (cayley(random, 40, 64, 2, 0.4) for _ in range(2))
    probes = [scaled_probe(random, 64) * 7 // 10 for _ in range(2)]
    vectors = [np.rint(np.einsum("tji,tjk,k->ti", second, first, z.astype(float))).astype(np.int64) for z in probes]
    tables = []
    for z, u in zip(probes, vectors, strict=True):
        job = FieldJob.of(wide, tokens=40, words=16, probe_energy=int(z @ z), causal=False)
        tables.append(block_scores(block_sums(u, wide), job, wide))
    total = sum(int(z @ z) for z in probes)
    job = FieldJob.of(wide, tokens=40, words=32, probe_energy=total, causal=False)
    together = block_scores(block_sums(np.hstack(vectors), wide), job, wide)
    assert np.abs(together - (tables[0] + tables[1]) / 2).max() <= 2
    assert np.abs(tables[0] - tables[1]).max() > 20


def test_causal_rows_end_at_the_diagonal() -> None:
    u = np.random.default_rng(1).integers(-9000, 9000, (50, 64))
    full, causal = (
        block_scores(
            block_sums(u, ECP5),
            FieldJob.of(ECP5, tokens=50, words=16, probe_energy=1 << 30, causal=causal),
            ECP5,
        )
        for causal in (False, True)
    )
    assert np.array_equal(causal, np.tril(full)) and full[0, -1] > 0
    assert np.array_equal(full, full.T)


def test_pairs_are_credited_to_both_heads() -> None:
    tables = np.array([[[1]], [[4]], [[65535]]])
    assert np.array_equal(combine_pairs(tables, PairMode.NEXT), tables)
    # Head 0: pairs (2, 0) and (0, 1); head 1: (0, 1) and (1, 2); rounded half up.
    assert combine_pairs(tables, PairMode.MEAN).ravel().tolist() == [32768, 3, 32770]
    with pytest.raises(DtpError, match=r"^combine_pairs\.tables must be of shape \(H, blocks, blocks\), not \(3,\)$"):
        combine_pairs([1, 2, 3], PairMode.MEAN)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": 12}, "FieldParams.block must be a power of two in 4…64, not 12"),
        ({"lanes": 1}, "FieldParams.lanes must be a power of two in 2…256, not 1"),
        ({"multipliers": 1}, "FieldParams.multipliers must be a power of two in 2…16, not 1"),
        ({"multipliers": 32}, "FieldParams.multipliers must be a power of two in 2…16, not 32"),
        (
            {"multipliers": 16, "max_lanes": 32},
            "FieldParams.max_lanes must be at least 4 · multipliers = 64, not 32",
        ),
        ({"max_tokens": 8}, "FieldParams.max_tokens must be a power of two in 16…4096, not 8"),
        ({"max_lanes": 8}, "FieldParams.max_lanes must be a power of two in 16…1024, not 8"),
    ],
)
def test_refused_parameters(fields: dict[str, int], message: str) -> None:
    with pytest.raises(DtpError) as error:
        FieldParams(**{"lanes": 16, "multipliers": 2, "block": 16, "max_tokens": 512, "max_lanes": 64, **fields})
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": 0}, "FieldJob.tokens must be in 1…512, not 0"),
        ({"tokens": 513}, "FieldJob.tokens must be in 1…512, not 513"),
        ({"words": 17}, "FieldJob.words must be in 2…16, not 17"),
        ({"words": 1}, "FieldJob.words must be in 2…16, not 1"),
        ({"probe_energy": 0}, "FieldJob.probe_energy must be in 1…2^30, not 0"),
        ({"probe_energy": (1 << 30) + 1}, "FieldJob.probe_energy must be in 1…2^30, not 1073741825"),
        ({"probe_energy": 4096}, "FieldJob.probe_energy must be at least about 32768: scale the probe up, not 4096"),
    ],
)
def test_refused_jobs(fields: dict[str, int], message: str) -> None:
    with pytest.raises(DtpError) as error:
        FieldJob.of(ECP5, causal=False, **{"tokens": 64, "words": 16, "probe_energy": 1 << 29, **fields})
    assert str(error.value) == message


def test_refused_vectors() -> None:
    for u, message in (
        (np.zeros(16), "block_sums.u must be of shape (1…64, lanes), not (16,)"),
        (np.zeros((65, 8)), "block_sums.u must be of shape (1…64, lanes), not (65, 8)"),
        (np.zeros((4, 18)), "block_sums.u must be of a multiple of 2 and at most 16 lanes, not 18"),
        (np.full((1, 8), 32768), "block_sums.u must be in -32768…32767, not 32768"),
    ):
        with pytest.raises(DtpError) as error:
            block_sums(u, TINY)
        assert str(error.value) == message
    job = FieldJob.of(TINY, tokens=9, words=4, probe_energy=1 << 29, causal=False)
    with pytest.raises(DtpError, match=r"^block_scores\.job\.tokens must be 8, as many as the sums have, not 9$"):
        block_scores(block_sums(np.zeros((8, 8)), TINY), job, TINY)


LOOPS = LoopParams(lanes=16, multipliers=2, max_lanes=64, heads=4, blocks=8)


def test_energies_ratio_and_tables() -> None:
    accounts = LoopAccounts(LOOPS, floor=4)
    x = np.array([3, 4, 0, 0])
    first = accounts.add(LoopHeader(0, (0, 1), (2, 3)), x, [3, 4, 0, 1], saturated=False)
    assert (first.start, first.end, first.difference, first.ratio) == (25, 26, 1, (1 << 24) // 25)
    second = accounts.add(LoopHeader(1, (1, 2), (2, 3)), x, -x, saturated=True)
    assert (second.ratio, second.saturated, second.bin) == (4 << 24, True, 27)
    floor = accounts.add(LoopHeader(2, (), (0, 0)), [0, 1], [2, 1], saturated=False)
    assert floor.ratio == 1 << 24  # 4 over the floor of 4
    top = accounts.add(LoopHeader(3, (3,), (7, 7)), [0] * 64, [32767] * 64, saturated=False)
    assert top.ratio == (1 << 32) - 1 and top.bin == BINS - 1
    assert accounts.add(LoopHeader(4, (3,), (7, 7)), x, x, saturated=False).bin == 0
    assert accounts.heads.counts.tolist() == [1, 2, 1, 2]
    assert accounts.heads.maxima.tolist() == [first.ratio, 4 << 24, 4 << 24, top.ratio]
    assert accounts.heads.sums.tolist() == [first.ratio, first.ratio + (4 << 24), 4 << 24, top.ratio]
    assert accounts.blocks.counts[2 * 8 + 3] == 2 and accounts.blocks.counts.sum() == 5
    assert accounts.bins.sum() == 5 and accounts.bins[27] == 1 and accounts.bins[0] == 1


def test_a_full_entry_takes_no_more() -> None:
    accounts = LoopAccounts(LOOPS, floor=1)
    full = (1 << COUNT_BITS) - 1
    accounts.heads.counts[1] = accounts.bins[0] = full
    accounts.add(LoopHeader(0, (1,), (0, 0)), [1, 0], [1, 0], saturated=False)
    assert accounts.heads.counts[1] == full and accounts.heads.sums[1] == 0 and accounts.bins[0] == full
    assert accounts.blocks.counts[0] == 1


def test_energy_bits_hold_the_largest_difference() -> None:
    accounts = LoopAccounts(LOOPS, floor=1)
    record = accounts.add(LoopHeader(0, (), (0, 0)), [-32768] * 64, [32767] * 64, saturated=False)
    assert record.difference.bit_length() == LOOPS.energy_bits - 1  # 65535 is not 2^16


@pytest.mark.parametrize(
    ("header", "start", "end", "message"),
    [
        (LoopHeader(0, (4,), (0, 0)), [1], [1], "LoopHeader.heads must be in 0…3, not 4"),
        (LoopHeader(0, (1, 1), (0, 0)), [1], [1], "LoopHeader.heads must be at most two different ones, not (1, 1)"),
        (LoopHeader(0, (), (0, 8)), [1], [1], "LoopHeader.block must be in 0…7, not 8"),
        (LoopHeader(0, (), (0, 0)), [1], [1, 2], "LoopAccounts.end must be of shape (lanes,), at most 64, not (2,)"),
        (LoopHeader(0, (), (0, 0)), [40000], [1], "LoopAccounts.start must be in -32768…32767, not 40000"),
    ],
)
def test_refused_loops(header: LoopHeader, start: list[int], end: list[int], message: str) -> None:
    with pytest.raises(DtpError) as error:
        LoopAccounts(LOOPS, floor=1).add(header, start, end, saturated=False)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lanes": 12}, "LoopParams.lanes must be a power of two in 1…256, not 12"),
        ({"multipliers": 32}, "LoopParams.multipliers must be a power of two in 1…16, not 32"),
        ({"heads": 0}, "LoopParams.heads must be in 1…256, not 0"),
        ({"blocks": 3}, "LoopParams.blocks must be a power of two in 1…256, not 3"),
    ],
)
def test_refused_loop_parameters(fields: dict[str, int], message: str) -> None:
    with pytest.raises(DtpError) as error:
        LoopParams(**{"lanes": 16, "multipliers": 2, "max_lanes": 64, "heads": 4, "blocks": 8, **fields})
    assert str(error.value) == message


def test_refused_floor() -> None:
    with pytest.raises(DtpError, match=r"^LoopAccounts\.floor must be in 1…2\^32 − 1, not 0$"):
        LoopAccounts(LOOPS, floor=0)
