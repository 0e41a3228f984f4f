"""Pruner contract: settings, gates, bands, budgets and runs against the words of docs/pruner.md."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtp.config import PRESETS, Config
from dtp.errors import DtpError
from dtp.pruner import (
    Aggregation,
    Band,
    Gate,
    GoldenPruner,
    HeadCommand,
    PrunerError,
    PrunerParams,
    PrunerSettings,
    Source,
    blend,
    legal_blocks,
    within_budget,
)
from dtp.scores import magnitude, oracle, quantise_scores, random

PARAMS = PrunerParams(max_blocks=8, heads=2, lanes=2, score_bits=16, weight_bits=4, step_bits=6)
OPEN = PrunerSettings.open()
TOP = 65535


def run(settings: PrunerSettings, tables: Any, *, valid: int | None = None, causal: bool = False) -> list[Any]:
    """Results of one head over runs, one score table a run."""
    unit = GoldenPruner(PARAMS)
    results = []
    for number, table in enumerate(tables):
        blocks = len(table)
        told = settings.command(
            PARAMS, head=1, blocks=blocks, valid_blocks=blocks if valid is None else valid, causal=causal, run=number
        )
        results.append(unit.head(told, table=table))
    return results


def test_legal_blocks() -> None:
    assert legal_blocks(3, 3, causal=False).all()
    assert legal_blocks(4, 2, causal=False).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert legal_blocks(3, 2, causal=True).tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]


@given(old=st.integers(0, TOP), new=st.integers(0, TOP), weight=st.integers(0, 16))
def test_blend_stays_between(old: int, new: int, weight: int) -> None:
    got = int(blend(old, new, weight, 4))
    assert min(old, new) <= got <= max(old, new)
    assert abs(got - (old + Fraction((new - old) * weight, 16))) <= Fraction(1, 2)


@given(data=st.data(), blocks=st.integers(1, 8), causal=st.booleans(), budget=st.integers(1, 9))
def test_budget_against_a_sort_of_each_row(data: st.DataObject, blocks: int, causal: bool, budget: int) -> None:
    table = np.array(data.draw(st.lists(st.integers(0, 3), min_size=blocks**2, max_size=blocks**2))).reshape(blocks, -1)
    legal = legal_blocks(blocks, data.draw(st.integers(1, blocks)), causal=causal)
    kept = within_budget(table, legal, budget)
    for i in range(blocks):
        others = sorted((int(table[i, j]), j) for j in np.flatnonzero(legal[i]) if j != i)
        wanted = {j for _score, j in others[: budget - 1]} | ({i} if legal[i, i] else set())
        assert set(np.flatnonzero(kept[i]).tolist()) == wanted


def test_thresholds_with_hysteresis() -> None:
    settings = OPEN.changed(theta_low=100, theta_high=200)
    table = np.full((2, 2), 0)
    scores = [100, 101, 200, 99, 200, 201, 200, 100]
    kept = []
    for number, score in enumerate(scores):
        table = np.array([[0, score], [score, 0]])
        kept.append((number, table))
    results = run(settings, [t for _n, t in kept])
    assert [bool(r.mask[0, 1]) for r in results] == [True, True, True, True, True, False, False, True]
    assert run(settings, [np.full((2, 2), 101)])[0].mask.tolist() == [[True, False], [False, True]]


def test_aggregation_over_runs() -> None:
    rows = [[0, 3200], [3200, 0]]
    tables = [np.array(rows), np.zeros((2, 2), int), np.zeros((2, 2), int), np.array(rows) // 2]
    for aggregation, shift, wanted in (
        (Aggregation.NONE, 0, [3200, 0, 0, 1600]),
        (Aggregation.MAXIMUM, 0, [3200] * 4),
        (Aggregation.MOVING_AVERAGE, 2, [3200, 2400, 1800, 1750]),
        (Aggregation.MEAN, 0, [3200, 1600, 1075, 1206]),
    ):
        settings = OPEN.changed(aggregation=aggregation, average_shift=shift)
        unit, seen = GoldenPruner(PARAMS), []
        for number, table in enumerate(tables):
            told = settings.command(PARAMS, head=0, blocks=2, valid_blocks=2, causal=False, run=number)
            unit.head(told, table=table)
            seen.append(int(unit.scores[0, 0, 1]))
        assert seen == wanted
        assert not unit.scores[1].any()


def test_steps_of_a_mean() -> None:
    settings = OPEN.changed(aggregation=Aggregation.MEAN)
    assert [settings.step(n) for n in range(6)] == [64, 32, 21, 16, 13, 11]
    assert settings.step(1000) == 1


@pytest.mark.parametrize("band", [Band.MEAN, Band.MAXIMUM])
def test_band(band: Band) -> None:
    """Legal blocks only, the mean exactly."""
    table = np.array([[1, TOP], [2, 4]])
    exact = Fraction(7, 3) if band is Band.MEAN else 4
    for low in range(6):
        for high in range(low, 6):
            settings = OPEN.changed(band=band, band_low=low, band_high=high)
            (result,) = run(settings, [table], causal=True)
            assert result.skipped == (not low <= exact <= high)
            assert (result.kept, result.legal) == ((0, 3) if result.skipped else (3, 3))
            assert result.mask.any() != result.skipped


def test_the_diagonal_stays_and_padding_does_not() -> None:
    table = np.full((5, 5), TOP)
    closed = OPEN.changed(theta_low=0, theta_high=0)
    for settings in (closed, closed.changed(gate=Gate.BUDGET, budget=1)):
        (result,) = run(settings, [table], valid=3)
        assert result.mask.tolist() == np.diag([True] * 3 + [False] * 2).tolist()
        assert result.kept_fraction == pytest.approx(3 / 9)


def test_sources() -> None:
    unit = GoldenPruner(PARAMS)
    holonomy, table = np.array([[0, 160], [16, 0]]), np.array([[0, 0], [48, 0]])
    for source, weight, wanted in (
        (Source.HOLONOMY, 0, [160, 16]), (Source.TABLE, 0, [0, 48]), (Source.BOTH, 4, [40, 40]),
    ):  # fmt: skip
        settings = OPEN.changed(source=source, weight=weight)
        told = settings.command(PARAMS, head=0, blocks=2, valid_blocks=2, causal=False, run=0)
        named = told.sources()
        unit.head(told, holonomy=holonomy if named[0] else None, table=table if named[1] else None)
        assert unit.scores[0, :2, :2].ravel()[1:3].tolist() == wanted


def test_wrong_number_of_scores() -> None:
    told = OPEN.changed(theta_low=5, theta_high=5).command(
        PARAMS, head=0, blocks=2, valid_blocks=2, causal=False, run=0
    )
    short = GoldenPruner(PARAMS).head(told, table=[9, 9])
    assert (short.error, short.mask.tolist()) == (PrunerError.SHORT, [[True, False], [True, True]])
    long = GoldenPruner(PARAMS).head(told, table=[9, 9, 9, 9, 0])
    assert (long.error, long.mask.tolist()) == (PrunerError.LONG, [[True, False], [False, True]])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"last_valid": 2}, PrunerError.BLOCKS),
        ({"source": 0}, PrunerError.SOURCE),
        ({"gate": 1, "budget": 0}, PrunerError.BUDGET),
        ({"theta_low": 7, "theta_high": 6}, PrunerError.THRESHOLDS),
        ({"band": 3}, PrunerError.BAND),
        ({"band": 1, "band_low": 2, "band_high": 1}, PrunerError.BAND),
        ({"last_valid": 2, "source": 0, "band": 3}, PrunerError.BLOCKS),
    ],
)
def test_refused_commands_keep_all(changes: dict[str, int], error: PrunerError) -> None:
    unit = GoldenPruner(PARAMS)
    told = OPEN.command(PARAMS, head=0, blocks=2, valid_blocks=2, causal=False, run=0)
    told = HeadCommand(**{**vars(told), **changes})
    result = unit.head(told, table=np.ones((2, 2), int) if told.source else None)
    assert result.error is told.error is error
    assert result.mask.shape == ((0, 0) if error is PrunerError.BLOCKS else (2, 2))
    assert result.mask.all() and not unit.scores.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": 1}, r"source must be one of Source\.HOLONOMY, Source\.TABLE, Source\.BOTH, not 1"),
        ({"weight": 3}, r"weight must be 0 without source BOTH, not 3"),
        ({"source": Source.BOTH}, r"weight must be from 1 to 15 with source BOTH, not 0"),
        ({"average_shift": 1}, r"average_shift must be 0 without aggregation MOVING_AVERAGE, not 1"),
        ({"theta_low": 9, "theta_high": 8}, r"theta_low must be at most theta_high 8, not 9"),
        ({"theta_low": -1}, r"theta_low must be from 0 to 65535 with gate THRESHOLD, not -1"),
        (
            {"gate": Gate.BUDGET, "theta_low": 0, "theta_high": 0},
            r"budget must be from 1 to 256 with gate BUDGET, not 0",
        ),
        ({"budget": 4}, r"budget must be 0 without gate BUDGET, not 4"),
        ({"band": Band.MEAN, "band_low": 4, "band_high": 3}, r"band_low must be at most band_high 3, not 4"),
        ({"theta_low": 1.5}, r"theta_low must be an integer, not 1\.5"),
    ],
)
def test_settings_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError, match=f"^PrunerSettings.{message}$"):
        OPEN.changed(**changes)


def test_commands_are_refused_by_name() -> None:
    fine = {"head": 0, "blocks": 4, "valid_blocks": 4, "causal": False, "run": 0}
    for changes, message in (
        ({"head": 2}, "head must be from 0 to 1, not 2"), ({"blocks": 9}, "blocks must be from 1 to 8, not 9"),
        ({"valid_blocks": 5}, "valid_blocks must be from 1 to 4, not 5"), ({"run": -1}, "run must be from 0 to .*"),
    ):  # fmt: skip
        with pytest.raises(DtpError, match=f"^PrunerSettings.command.{message}$"):
            OPEN.command(PARAMS, **{**fine, **changes})  # type: ignore[arg-type]
    settings = OPEN.changed(gate=Gate.BUDGET, theta_low=0, theta_high=0, budget=9)
    with pytest.raises(DtpError, match=r"^PrunerSettings.budget must be at most max_blocks 8, not 9$"):
        settings.command(PARAMS, **fine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_blocks": 1}, "max_blocks must be from 2 to 256, not 1"),
        ({"max_blocks": 12}, "max_blocks must be a power of two, not 12"),
        ({"lanes": 16}, "lanes must be at most max_blocks 8, not 16"),
        ({"heads": "8"}, "heads must be an integer, not '8'"),
        ({"score_bits": 17}, "score_bits must be from 2 to 16, not 17"),
    ],
)
def test_params_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError, match=f"^PrunerParams.{message}$"):
        PrunerParams(**{**vars(PARAMS), **changes})


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    params = PrunerParams.of(Config.load(name), heads=8, lanes=2)
    assert params.max_blocks * Config.load(name).block == Config.load(name).max_tokens
    assert params.sum_bits >= (params.max_score * params.max_blocks**2).bit_length() + 1
    assert params.decide_cycles(params.max_blocks, budget=False) <= params.max_blocks + 3


def test_control_tables() -> None:
    scores = np.array([[0.0, -2.0, -np.inf, -np.inf], [0.0, 1.0, -np.inf, -np.inf],
                       [3.0, 0.0, 5.0, -np.inf], [0.0, 0.0, 0.0, 0.0]])  # fmt: skip
    far = magnitude(scores, 2)
    assert far.tolist() == [[0, TOP], [round(2 / np.log(2) * 64), 0]]
    mass = oracle(scores, 2)
    weights = np.exp(scores)
    shares = (weights / weights.sum(axis=1, keepdims=True))[2:].reshape(2, 2, 2).sum(axis=(0, 2)) / 2
    assert mass[0].tolist() == [0, TOP]
    assert mass[1].tolist() == [round(-np.log2(s) * 1024) for s in shares]
    assert magnitude(scores[:3, :3], 2).shape == (2, 2)
    assert np.array_equal(random(4, 7), random(4, 7)) and not np.array_equal(random(4, 7), random(4, 8))
    assert random(8, 1).max() > 1 << 15 and random(8, 1).min() >= 0
    assert quantise_scores([0, 0.5, np.inf], 1).tolist() == [0, 1, TOP]


def test_control_tables_are_refused_by_name() -> None:
    with pytest.raises(DtpError, match=r"^quantise_scores.values must be 0 or more, not -1\.0$"):
        quantise_scores([-1], 3)
    with pytest.raises(DtpError, match=r"^magnitude.scores must be of shape \(L, L\), not \(2, 3\)$"):
        magnitude(np.zeros((2, 3)), 2)
    with pytest.raises(DtpError, match=r"^oracle.block must be 1 or more, not 0$"):
        oracle(np.zeros((2, 2)), 0)
    with pytest.raises(DtpError, match=r"^random.blocks must be 1 or more, not 0$"):
        random(0, 1)
