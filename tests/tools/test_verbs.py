"""The verbs as functions: what they return, what they write, and that their comparisons see every difference."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtp.attention import golden
from dtp.config import PRESETS, Config
from dtp.errors import DtpError, MissingToolError
from dtp.job import StatusRecord, status_beats
from dtp.quantise import quantise
from dtp.workload import Mode, Workload
from sim.bench import StreamResult
from sim.cycles.attention import predict
from tools import verbs
from tools.workloads import random_workload

TINY = Config.load("tiny")
FIRST_INPUT = 3


def small(mode: Mode = Mode.RIEMANNIAN, **changes: Any) -> Workload:
    options: dict[str, Any] = {
        "tokens": 21,
        "width": 13,
        "heads": 2,
        "mode": mode,
        "kept": 0.6,
        "causal": True,
        "seed": 5,
        "block": TINY.block,
    }
    return random_workload(**(options | changes))


def with_empty_row() -> Workload:
    """The rows 8 … 15 of head 0 keep no key."""
    base = small(kept=1.0, causal=False)
    mask = np.ones((2, 3, 3), dtype=np.bool_)
    mask[0, 1] = False
    return dataclasses.replace(base, block_mask=mask, allow_empty_rows=True)


def packed(config: Config, workload: Workload) -> StreamResult:
    """What a faultless RTL would give, made from the golden and the cycle model."""
    heads = quantise(config, workload)
    data, user, last = [], [], []
    for head in heads:
        result = golden(config, head)
        groups, job = config.groups(head.job.tokens), head.job
        columns = job.chunks(config) * config.block
        grid = np.zeros((groups * config.rows, columns), dtype="<i2")
        grid[: job.tokens, : job.width] = result.outputs
        steps = grid.reshape(groups, config.rows, -1, config.segments).transpose(0, 2, 3, 1)
        beats = np.ascontiguousarray(steps).view(np.uint8).reshape(-1, config.output_bytes)
        flags = np.zeros(groups * config.rows, dtype=np.uint64)
        flags[: job.tokens] = result.empty_rows
        word = (flags.reshape(groups, -1) << np.arange(config.rows, dtype=np.uint64)).sum(axis=1)
        record = StatusRecord(
            error=0,
            tag=job.tag,
            empty_rows=int(result.empty_rows.sum()),
            score_saturations=result.score_saturations,
            lift_saturations=result.lift_saturations,
            output_saturations=result.output_saturations,
        ).pack()
        tail = status_beats(config)
        record += bytes(tail * config.output_bytes - len(record))
        data += [beats, np.frombuffer(record, np.uint8).reshape(tail, -1)]
        user += [np.repeat(word, len(beats) // groups), np.zeros(tail, np.uint64)]
        last += [np.zeros(len(beats) + tail - 1, np.bool_), np.ones(1, np.bool_)]
    cycles = predict(config, heads).beat_cycles + FIRST_INPUT
    return StreamResult(
        job=verbs.stream_job(config, heads, int(cycles[-1]), 0.0, 0),
        data=np.concatenate(data),
        user=np.concatenate(user).astype(np.uint64),
        last=np.concatenate(last),
        cycles=cycles,
        first_input_cycle=FIRST_INPUT,
        inputs_taken=sum(len(head.beats(config)) for head in heads),
        inputs_unread=0,
        packets=len(heads),
        extra_beats=0,
        violation_cycle=None,
        timed_out=False,
        sim_cycles=int(cycles[-1]) + 64,
        wall_s=0.5,
    )


Change = Callable[[StreamResult], StreamResult]


@pytest.fixture
def rtl(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Puts an RTL made of both models, changed as told, in the place of the simulator."""

    def use(change: Change) -> None:
        def run(models: Any, *_: Any) -> StreamResult:
            return change(packed(models.config, models.workload))

        monkeypatch.setattr(verbs, "_run_rtl", run)

    return use


# ---- presets, generate, workload ---------------------------------------------------------------------------


def test_presets_are_all_there_and_one_is_the_default() -> None:
    result = verbs.presets()
    assert [preset.name for preset in result.presets] == list(PRESETS)
    assert [preset.name for preset in result.presets if preset.default] == ["ecp5-85k"]
    table = json.loads(result.to_json())
    for preset in table["presets"]:
        config = Config.load(preset["name"])
        assert preset["config_hash"] == config.hash
        assert preset["derived"]["macs"] == config.rows * config.lanes


def test_generate_twice_gives_equal_bytes_and_leaves_other_files_alone(tmp_path: Path) -> None:
    new, old = tmp_path / "a" / "new", tmp_path / "old"
    old.mkdir()
    (old / "notes.txt").write_text("mine")
    (old / "top.v").write_text("stale")
    first, second = verbs.generate("tiny", new), verbs.generate(TINY, old)
    assert [file.name for file in first.files] == ["top.v", "manifest.json", "config.toml"]
    assert [dataclasses.asdict(file) for file in first.files] == [dataclasses.asdict(file) for file in second.files]
    for file in first.files:
        assert (new / file.name).read_bytes() == (old / file.name).read_bytes()
    assert (old / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in old.iterdir()) == sorted(["notes.txt", *(file.name for file in first.files)])
    assert Config.load(new / "config.toml") == TINY
    manifest = json.loads((new / "manifest.json").read_text())
    assert manifest["config_hash"] == TINY.hash == first.config_hash
    assert {port["name"] for port in manifest["ports"]} >= {"clk", "rst", "abort", "m_axis_tdata"}
    assert "module top" in (new / "top.v").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "old"]


def test_generate_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import rtl.emit

    def write(_self: Any, folder: Path) -> list[Path]:
        (folder / "top.v").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(rtl.emit.Emitted, "write", write)
    (tmp_path / "kept").mkdir()
    for name in ("new", "kept"):
        with pytest.raises(KeyboardInterrupt):
            verbs.generate("tiny", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert not list((tmp_path / "kept").iterdir())


def test_generate_refuses_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    for name in ("file", "file/below"):
        with pytest.raises(DtpError, match=r"cannot be written: .*file is not a folder"):
            verbs.generate("tiny", tmp_path / name)
    assert (tmp_path / "file").read_text() == "here"


def test_random_workload_is_written_and_described(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    options: dict[str, Any] = {
        "tokens": 24,
        "width": 8,
        "heads": 4,
        "kv_heads": 2,
        "mode": "blended",
        "kept": 0.5,
        "causal": False,
        "seed": 3,
        "block": 8,
    }
    result = verbs.workload_random(path, **options)
    first, loaded = path.read_bytes(), Workload.load(path)
    summary = result.workload
    assert (summary.heads, summary.kv_heads, summary.tokens, summary.width) == (4, 2, 24, 8)
    assert summary.mode == loaded.mode == "blended"
    assert summary.macs == loaded.useful_macs()
    assert summary.kept_fraction == pytest.approx(loaded.blocks_kept().mean())
    verbs.workload_random(path, **options)
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


# ---- simulate ----------------------------------------------------------------------------------------------


def test_simulate_counts_cycles_and_macs() -> None:
    workload = small()
    result = verbs.simulate(TINY, workload)
    heads = quantise(TINY, workload)
    prediction = predict(TINY, heads)
    assert result.cycles_model == prediction.total_cycles == prediction.beat_cycles[-1] + 1
    assert result.macs == workload.useful_macs()
    assert result.array_utilisation == result.macs / (result.cycles_model * TINY.rows * TINY.lanes)
    assert [scale.output for scale in result.scales] == [head.output_scale(TINY) for head in heads]
    assert 0 < result.array_utilisation < 1


def test_simulate_reports_the_worst_head() -> None:
    pytest.importorskip("torch")
    workload = small(Mode.DOT)
    spoiled = workload.v.copy()
    spoiled[1] *= 0.01
    spoiled[1, 0, 0] = 4.0  # one large value costs the others of this head their resolution
    result = verbs.simulate(TINY, dataclasses.replace(workload, v=spoiled))
    assert result.sqnr_db_heads is not None and result.sqnr_floor_db_heads is not None
    assert result.sqnr_db == min(result.sqnr_db_heads)
    assert result.sqnr_floor_db == min(result.sqnr_floor_db_heads)
    assert len(set(result.sqnr_db_heads)) == 2
    assert result.note is None


def test_accuracy_of_one_head_is_that_of_the_whole() -> None:
    pytest.importorskip("torch")
    from dtp.reference.attention import attention

    workload = small(heads=4, kv_heads=2)
    whole = attention(workload).numpy()
    for head in range(4):
        alone = attention(verbs.single_head(workload, head)).numpy()
        np.testing.assert_allclose(alone[0], whole[head], atol=1e-12)


def test_simulate_without_torch_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "find_spec", lambda name: None)
    result = verbs.simulate("tiny", small())
    assert result.sqnr_db is None and result.sqnr_floor_db is None
    assert result.note is not None and "pip install torch==" in result.note


def test_workload_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DtpError, match=r"65"):
        verbs.simulate("tiny", small(tokens=65, block=None, kept=1.0))
    with pytest.raises(DtpError, match=r"17"):
        verbs.simulate("tiny", small(width=17))
    with pytest.raises(DtpError, match=r"block must be .*8.*16"):
        verbs.simulate("tiny", small(tokens=40, block=16))


# ---- cosim -------------------------------------------------------------------------------------------------


def test_cosim_of_a_faultless_rtl_passes(rtl: Callable[[Change], None]) -> None:
    rtl(lambda result: result)
    workload = with_empty_row()
    result = verbs.cosim(TINY, workload, reference=False)
    assert result.passed and result.bit_exact and result.cycles_equal is True
    assert result.differences == ()
    assert result.outputs_compared == 2 * 21 * 13
    assert result.cycles_rtl == result.cycles_model
    assert result.empty_rows == 8
    assert result.macs == workload.useful_macs()
    table = json.loads(result.to_json())
    for key in ("bit_exact", "outputs_compared", "cycles_rtl", "cycles_model", "array_utilisation", "macs",
                "sqnr_db", "sqnr_floor_db", "wall_s", "sim_cycles_per_s"):  # fmt: skip
        assert key in table


def _one_bit(result: StreamResult) -> StreamResult:
    data = result.data.copy()
    data[0, 0] ^= 1
    return dataclasses.replace(result, data=data)


def _last_value(result: StreamResult) -> StreamResult:
    """The last output value of the last head in its own columns."""
    data = result.data.copy()
    group = TINY.groups(21) - 1
    beat = -status_beats(TINY) - 1
    while not data[beat].any():
        beat -= 1
    value = int(np.flatnonzero(data[beat])[-1])
    data[beat, value] ^= 0x80
    assert group >= 0
    return dataclasses.replace(result, data=data)


def _padding(result: StreamResult) -> StreamResult:
    """A column past the width 13 of the first group."""
    data = result.data.copy()
    per_group = 16 // TINY.segments * TINY.output_entry_beats
    data[per_group - 1, -1] = 1
    return dataclasses.replace(result, data=data)


def _empty_flag(result: StreamResult) -> StreamResult:
    user = result.user.copy()
    per_group = 16 // TINY.segments * TINY.output_entry_beats
    user[:per_group] ^= np.uint64(2)
    return dataclasses.replace(result, user=user)


def _status(offset: int) -> Change:
    def change(result: StreamResult) -> StreamResult:
        data = result.data.copy()
        record = int(np.flatnonzero(result.last)[0]) - status_beats(TINY) + 1
        beat, byte = divmod(offset, TINY.output_bytes)
        data[record + beat, byte] ^= 4
        return dataclasses.replace(result, data=data)

    return change


def _short(result: StreamResult) -> StreamResult:
    parts = {name: getattr(result, name)[1:] for name in ("data", "user", "last", "cycles")}
    return dataclasses.replace(result, **parts)


def _one_head(result: StreamResult) -> StreamResult:
    end = int(np.flatnonzero(result.last)[0]) + 1
    parts = {name: getattr(result, name)[:end] for name in ("data", "user", "last", "cycles")}
    return dataclasses.replace(result, **parts, packets=1, timed_out=True)


def _dead(result: StreamResult) -> StreamResult:
    parts = {name: getattr(result, name)[:0] for name in ("data", "user", "last", "cycles")}
    return dataclasses.replace(result, **parts, packets=0, timed_out=True, first_input_cycle=None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_one_bit, "1 of 273 outputs differ, first at row 0, column 0"),
        (_last_value, "head 1: 1 of 273 outputs differ"),
        (_padding, "0 past tokens and width"),
        (_empty_flag, "row 1 is empty in RTL alone"),
        (_status(3), "error is 4 in RTL, 0 in golden"),
        (_status(4), "tag is"),
        (_status(6), "empty_rows is"),
        (_status(8), "score_saturations is"),
        (_status(10), "lift_saturations is"),
        (_status(12), "output_saturations is"),
        (_status(0), "magic"),
        (_short, "beats"),
        (_one_head, "answered 1 of 2 heads"),
        (_dead, "answered 0 of 2 heads"),
        (lambda result: dataclasses.replace(result, extra_beats=1), "after the last packet"),
        (lambda result: dataclasses.replace(result, violation_cycle=9), "changed before it was taken"),
    ],
)
def test_cosim_sees_the_difference(rtl: Callable[[Change], None], change: Change, words: str) -> None:
    rtl(change)
    result = verbs.cosim(TINY, small(), reference=False)
    assert not result.passed and not result.bit_exact
    assert words in "\n".join(result.differences)
    assert json.loads(result.to_json())["bit_exact"] is False


def test_cosim_sees_a_beat_in_another_cycle(rtl: Callable[[Change], None]) -> None:
    def late(result: StreamResult) -> StreamResult:
        cycles = result.cycles.copy()
        cycles[7] += 1
        return dataclasses.replace(result, cycles=cycles)

    rtl(late)
    result = verbs.cosim(TINY, small(), reference=False)
    assert result.bit_exact and result.cycles_equal is False and not result.passed
    assert "first beat 7" in result.differences[0]
    stalled = verbs.cosim(TINY, small(), stalls=0.2, reference=False)
    assert stalled.passed and stalled.cycles_equal is None


@pytest.mark.parametrize("stalls", [-0.1, 1.0, math.nan])
def test_cosim_refuses_stalls_out_of_range(stalls: float) -> None:
    with pytest.raises(DtpError, match=r"cosim\.stalls must be"):
        verbs.cosim(TINY, small(), stalls=stalls)


def test_cosim_without_a_compiler_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingToolError, match=r"g\+\+"):
        verbs.cosim(TINY, small())


def test_cosim_of_the_generated_verilog(tmp_path: Path) -> None:
    """The real thing on the smallest preset, without stalls and with, and with waveforms."""
    clean = verbs.cosim(TINY, with_empty_row(), reference=False)
    assert clean.passed, clean.differences
    assert clean.bit_exact and clean.cycles_equal and clean.outputs_compared == 2 * 21 * 13
    assert clean.sim_cycles_per_s > 0
    stalled = verbs.cosim(TINY, small(), stalls=0.3, seed=9, reference=False)
    assert stalled.passed, stalled.differences
    assert stalled.cycles_rtl is not None and stalled.cycles_rtl > stalled.cycles_model


def test_infinity_is_null_in_json() -> None:
    assert verbs.plain({"a": math.inf, "b": (math.nan, 1.5), "c": np.int64(3)}) == {
        "a": None,
        "b": [None, 1.5],
        "c": 3,
    }
