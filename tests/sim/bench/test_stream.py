"""Jobs are checked, stall patterns are what they claim to be, faults are put into words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtp.errors import DtpError
from sim.bench import StreamFault, StreamJob, StreamResult
from sim.bench.stream import Files, xorshift32

BEATS = np.arange(12, dtype=np.uint8).reshape(4, 3)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("beats", BEATS.astype(np.int8), "must be a uint8 array of shape (beats, bytes), not 'int8 (4, 3)'"),
        ("beats", BEATS[0], "must be a uint8 array of shape (beats, bytes), not 'uint8 (3,)'"),
        ("last", np.zeros(3, dtype=np.bool_), "must be a bool array of shape (4,), not 'bool (3,)'"),
        ("source_stall", 1.0, "must be at least 0 and less than 1, not 1.0"),
        ("sink_stall", -0.1, "must be at least 0 and less than 1, not -0.1"),
        ("timeout_cycles", 0, "must be 1 or more, not 0"),
        ("packets", -1, "must be 0 or more, not -1"),
        ("seed", -1, "must be 0 or more, not -1"),
        ("drain_cycles", -1, "must be 0 or more, not -1"),
        ("output_beats", -1, "must be 0 or more, or None, not -1"),
        ("abort_at", -1, "must be 0 or more, or None, not -1"),
        ("reset_at", -5, "must be 0 or more, or None, not -5"),
        ("restart_beat", 5, "must be 0 to 4, not 5"),
    ],
)
def test_illegal_job_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(DtpError) as refused:
        replace(StreamJob(BEATS, timeout_cycles=10), **{field: value})
    assert str(refused.value) == f"StreamJob.{field} {message}"


def test_last_marks_the_last_beat_alone_unless_told() -> None:
    assert StreamJob(BEATS, timeout_cycles=10).last_flags.tolist() == [False, False, False, True]
    assert StreamJob(BEATS[:0], timeout_cycles=10).last_flags.tolist() == []
    told = np.array([True, False, True, False])
    assert StreamJob(BEATS, timeout_cycles=10, last=told).last_flags is told


@pytest.mark.parametrize("stall", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_stalls_are_as_frequent_as_asked(stall: float, seed: int) -> None:
    """Over 20000 cycles within four standard deviations, for source and sink, each on its own."""
    cycles = 20_000
    job = StreamJob(BEATS, timeout_cycles=10, source_stall=stall, sink_stall=stall, seed=seed)
    patterns = []
    for state, threshold in zip(job.stall_states, job.stall_thresholds, strict=True):
        pattern = np.empty(cycles, dtype=np.bool_)
        for cycle in range(cycles):
            pattern[cycle] = (state & 0xFFFF) < threshold
            state = xorshift32(state)
        patterns.append(pattern)
        assert abs(pattern.mean() - stall) <= 4 * np.sqrt(stall * (1 - stall) / cycles)
    both = (patterns[0] & patterns[1]).mean()
    assert abs(both - stall**2) <= 4 * np.sqrt(stall**2 * (1 - stall**2) / cycles)


def test_seeds_give_different_patterns() -> None:
    states = {s for seed in range(1000) for s in StreamJob(BEATS, timeout_cycles=1, seed=seed).stall_states}
    assert len(states) == 2000
    assert 0 not in states


def test_input_record_is_tlast_then_the_most_significant_byte(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.write_input(StreamJob(BEATS[:2], timeout_cycles=10))
    assert files.input.read_bytes() == bytes([0, 2, 1, 0, 1, 5, 4, 3])


def result(_job: StreamJob, **changes: object) -> StreamResult:
    good = StreamResult(
        job=_job,
        data=np.zeros((2, 1), dtype=np.uint8),
        user=np.zeros(2, dtype=np.uint64),
        last=np.array([False, True]),
        cycles=np.array([3, 9], dtype=np.int64),
        first_input_cycle=0,
        inputs_taken=4,
        inputs_unread=0,
        packets=1,
        extra_beats=0,
        violation_cycle=None,
        timed_out=False,
        sim_cycles=100,
        wall_s=0.5,
    )
    return replace(good, **changes)


def test_good_result_passes_and_gives_its_rate() -> None:
    good = result(StreamJob(BEATS, timeout_cycles=100, output_beats=2))
    assert good.check() is good
    assert good.cycles_per_second == 200
    assert result(StreamJob(BEATS, timeout_cycles=100, output_beats=1, reset_at=3)).faults == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"timed_out": True, "packets": 0, "inputs_unread": 3},
            "timed out after 100 cycles with 0 of 1 packets out and 3 input beats not taken",
        ),
        ({"violation_cycle": 7}, "output beat changed before it was taken, in cycle 7"),
        ({"extra_beats": 2}, "2 output beats after the last packet"),
        ({"job": StreamJob(BEATS, timeout_cycles=100, output_beats=3)}, "2 output beats, not 3"),
        (
            {"violation_cycle": 0, "extra_beats": 1},
            "output beat changed before it was taken, in cycle 0; 1 output beats after the last packet",
        ),
    ],
)
def test_fault_is_put_into_words(changes: dict[str, object], message: str) -> None:
    faulty = result(StreamJob(BEATS, timeout_cycles=100), **changes)
    with pytest.raises(StreamFault) as raised:
        faulty.check()
    assert str(raised.value) == message
    assert raised.value.result is faulty
