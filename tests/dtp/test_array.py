"""Parameters, schedule and golden model of the MAC array."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from math import floor

import numpy as np
import pytest

from dtp.array import ArrayParams, GoldenArray, golden_accumulate, golden_step, wrap
from dtp.errors import DtpError

TINY = ArrayParams(rows=4, segments=1, block=8, acc_depth=24)
ECP5 = ArrayParams(rows=8, segments=1, block=16, acc_depth=80)
WIDE = ArrayParams(rows=16, segments=4, block=16, acc_depth=20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "ArrayParams.rows must be from 1 to 64, not 0"),
        ({"rows": 4.0}, "ArrayParams.rows must be an integer, not 4.0"),
        ({"rows": True}, "ArrayParams.rows must be an integer, not True"),
        ({"block": 12}, "ArrayParams.block must be a power of two from 4 to 64, not 12"),
        ({"block": 2}, "ArrayParams.block must be a power of two from 4 to 64, not 2"),
        ({"segments": 3}, "ArrayParams.segments must be a divisor of block 8, not 3"),
        ({"segments": 0}, "ArrayParams.segments must be a divisor of block 8, not 0"),
        (
            {"segments": 4},
            "ArrayParams.segments must be at most block / 4 = 2"
            " (an accumulator is revisited after block / segments cycles), not 4",
        ),
        ({"row_bits": 19}, "ArrayParams.row_bits must be from 2 to 18, not 19"),
        ({"moving_bits": 1}, "ArrayParams.moving_bits must be from 2 to 18, not 1"),
        ({"acc_bits": 24, "init_bits": 20}, "ArrayParams.acc_bits must be from 25 (one sum) to 48, not 24"),
        ({"acc_bits": 49}, "ArrayParams.acc_bits must be from 25 (one sum) to 48, not 49"),
        ({"init_bits": 31}, "ArrayParams.init_bits must be from 2 to acc_bits 30, not 31"),
        ({"acc_depth": 1}, "ArrayParams.acc_depth must be from 2 to 4096, not 1"),
        ({"shift_max": 0}, "ArrayParams.shift_max must be from 1 to 15, not 0"),
        ({"tag_bits": 65}, "ArrayParams.tag_bits must be from 1 to 64, not 65"),
        ({"product_registers": 3}, "ArrayParams.product_registers must be from 0 to 2, not 3"),
    ],
)
def test_illegal_parameters_name_field_rule_and_value(change: dict[str, object], message: str) -> None:
    with pytest.raises(DtpError) as caught:
        dataclasses.replace(TINY, **change)
    assert str(caught.value) == message


def test_derived_figures_of_the_presets() -> None:
    figures = [
        (p.multipliers, p.product_bits, p.sum_bits, p.feed_cycles, p.shift_bits, p.addr_bits, p.latency)
        for p in (TINY, ECP5, WIDE)
    ]
    assert figures == [(32, 22, 25, 8, 3, 5, 8), (128, 22, 26, 16, 3, 7, 9), (1024, 22, 26, 4, 3, 5, 9)]


@pytest.mark.parametrize("params", [TINY, ECP5, WIDE], ids=["tiny", "ecp5", "wide"])
def test_schedule_runs_forward_and_fits_the_revisit_distance(params: ArrayParams) -> None:
    cycles = [
        params.operand_cycle,
        params.product_cycle,
        params.sum_cycle,
        params.term_cycle,
        params.result_cycle,
    ]
    assert cycles == sorted(set(cycles))
    assert params.latency == params.result_cycle <= 10
    assert 1 <= params.read_cycle < params.result_cycle
    assert params.revisit_cycles <= params.feed_cycles


@pytest.mark.parametrize("params", [TINY, ECP5, WIDE], ids=["tiny", "ecp5", "wide"])
def test_sum_bits_hold_the_largest_sum_and_no_fewer_would(params: ArrayParams) -> None:
    low_x, low_y = -(1 << (params.row_bits - 1)), -(1 << (params.moving_bits - 1))
    x = np.full((params.rows, params.block), low_x)
    y = np.full((params.segments, params.block), low_y)
    largest = int(golden_step(params, x, y, 0).max())
    assert largest == params.block * low_x * low_y
    assert 1 << (params.sum_bits - 2) <= largest < 1 << (params.sum_bits - 1)


def test_golden_step_equals_whole_numbers_seed_1() -> None:
    random = np.random.default_rng(1)
    for shift in range(WIDE.shift_max + 1):
        x = random.integers(-4096, 4096, (WIDE.rows, WIDE.block))
        y = random.integers(-256, 256, (WIDE.segments, WIDE.block))
        got = golden_step(WIDE, x, y, shift)
        for row in range(WIDE.rows):
            for segment in range(WIDE.segments):
                total = sum(int(a) * int(b) for a, b in zip(x[row], y[segment], strict=True))
                assert got[row, segment] == floor(Fraction(total, 1 << shift) + (Fraction(1, 2) if shift else 0))


def test_golden_accumulate_rounds_every_row_by_its_own_amount_seed_2() -> None:
    random = np.random.default_rng(2)
    params = ArrayParams(rows=32, segments=2, block=16)
    low, high = -(1 << 29), (1 << 29) - 1
    old = np.concatenate([random.integers(low, high + 1, (32, 1)), np.full((32, 1), low)], axis=1)
    term = random.integers(-(1 << 25), 1 << 25, (32, 2))
    rescale = np.arange(32)
    got = golden_accumulate(params, old, term, first=False, init=[7, 9], rescale=rescale)
    for row in range(32):
        for segment in range(2):
            half = Fraction(1, 2) if row else 0
            base = floor(Fraction(int(old[row, segment]), 1 << row) + half)
            expected = (base + int(term[row, segment]) - low) % (1 << 30) + low
            assert got[row, segment] == expected
    assert (golden_accumulate(params, old * 0 + low, old * 0, first=False, init=[7, 9], rescale=[31] * 32) == 0).all()
    first = golden_accumulate(params, old, term, first=True, init=[7, -9], rescale=rescale)
    assert (first == term + np.array([7, -9])).all()


def test_golden_step_refuses_a_wrong_shape() -> None:
    with pytest.raises(DtpError, match=r"^golden_step.moving must be of shape \(1, 8\), not \(8, 1\)$"):
        golden_step(TINY, np.zeros((4, 8)), np.zeros((8, 1)), 0)


def test_wrap_keeps_low_bits() -> None:
    assert wrap([7, 8, -8, -9, 23], 4).tolist() == [7, -8, -8, 7, 7]


def test_feeds_fill_lanes_in_order_and_count_from_the_next_swap() -> None:
    params = ArrayParams(rows=2, segments=2, block=8)
    golden = GoldenArray(params)
    lanes = np.arange(16).reshape(2, 8)
    for feed in range(params.feed_cycles):
        golden.feed(lanes[:, feed * 2 : feed * 2 + 2])
    one_lane = np.zeros((2, 8), dtype=np.int64)
    one_lane[0, 3], one_lane[1, 6] = 1, 1
    same = {"addr": 1, "first": True, "init": [0, 0], "shift": 0, "rescale": [0, 0]}
    assert golden.step(one_lane, swap=False, **same).tolist() == [[0, 0], [0, 0]]
    assert golden.step(one_lane, swap=True, **same).tolist() == [[3, 6], [11, 14]]
    golden.feed([[100, 100], [100, 100]])
    assert golden.step(one_lane, swap=False, **same).tolist() == [[3, 6], [11, 14]]
    assert golden.memory[:, :, 1].tolist() == [[3, 6], [11, 14]]
