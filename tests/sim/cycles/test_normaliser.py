"""Cycle model of the normaliser by hand; that the hardware obeys it is tested with the hardware."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dtp.config import Config
from dtp.errors import DtpError
from dtp.normaliser import NormaliserParams, RecordKind
from sim.cycles.normaliser import normaliser_timing

CONFIG = Config.load("tiny").changed(normaliser_lanes=2)
P = NormaliserParams(CONFIG)
STEPS = CONFIG.pass_steps


def test_two_groups_and_a_status_by_hand() -> None:
    assert (P.step_words, P.beat_words) == (2, 2)
    first = 100 + 3 * np.arange(STEPS)  # a step every three cycles: two to send, one to wait
    second = first[-1] + 1 + np.arange(STEPS)  # faster than they leave
    timing = normaliser_timing(
        CONFIG,
        kinds=[RecordKind.DATA, RecordKind.DATA, RecordKind.STATUS],
        pushes=[90, 95, 96],
        steps=[STEPS, STEPS, 0],
        values=[first, second],
        group_valids=[0, 0],
    )
    slow = first + P.value_cycles + 1 + P.issue_cycles
    fast = slow[-1] + 2 * (1 + np.arange(STEPS))
    status = fast[-1] + P.status_gap + 1 + 2 * np.arange(P.status_beats)
    assert timing.beats.tolist() == [*slow, *fast, *status]
    assert timing.beat_records.tolist() == [0] * STEPS + [1] * STEPS + [2] * P.status_beats
    assert timing.freed[0] == slow[-1] - P.issue_cycles + 2
    assert timing.freed[2] == status[-1] - P.issue_cycles + P.status_release_cycles


def test_late_reciprocals_and_late_records() -> None:
    values = [10 + np.arange(STEPS)]
    arguments: dict[str, Any] = {"kinds": [RecordKind.DATA], "steps": [STEPS], "values": values}
    late = normaliser_timing(CONFIG, pushes=[5], group_valids=[500], **arguments)
    assert late.first_issue[0] == 500 + P.reciprocal_cycles
    late = normaliser_timing(CONFIG, pushes=[700], group_valids=[500], **arguments)
    assert late.first_issue[0] == 700 + P.record_cycles
    late = normaliser_timing(CONFIG, pushes=[700], group_valids=[500], busy_until=900, **arguments)
    assert late.first_issue[0] == 901


def test_nothing() -> None:
    timing = normaliser_timing(CONFIG, kinds=[], pushes=[], steps=[], values=[], group_valids=[])
    assert len(timing.beats) == len(timing.freed) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pushes": []}, r"normaliser_timing\.pushes must be of length 1, not 0"),
        ({"values": []}, r"normaliser_timing\.values must be of length 1, not 0"),
        ({"group_valids": [1, 2]}, r"normaliser_timing\.group_valids must be of length 1, not 2"),
        ({"values": [[1]]}, rf"normaliser_timing\.values\[0\] must be of shape \({STEPS},\), not \(1,\)"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "kinds": [RecordKind.DATA],
        "pushes": [0],
        "steps": [STEPS],
        "values": [list(range(STEPS))],
        "group_valids": [0],
    }
    with pytest.raises(DtpError, match=f"^{message}$"):
        normaliser_timing(CONFIG, **{**arguments, **change})
