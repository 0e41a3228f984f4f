"""The presets' Verilog on Verilator, driven by cocotb: golden model, cycle model and PyTorch beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dtp.attention import golden
from dtp.config import Config
from dtp.workload import Mode, Workload
from sim.bench import Backend
from tests.tile import check_jobs, heads_of, lint, random_shapes, run_jobs, verilog_of
from tools.verbs import compare_outputs, cosim
from tools.workloads import random_workload


def workload(config: Config, mode: Mode, seed: int, **more: object) -> Workload:
    """Two heads over three blocks and a bit, one block masked in four, padding behind."""
    tokens = 3 * config.block + 5
    options: dict[str, object] = {"tokens": tokens, "width": config.max_width, "heads": 2, "kept": 0.75} | more
    return random_workload(
        mode=mode, causal=seed % 2 == 1, seed=seed, block=config.block, valid_length=tokens - 2, **options
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", ["tiny", "ecp5-85k"])
def test_every_bit_and_cycle_and_the_accuracy(name: str, mode: Mode) -> None:
    config = Config.load(name)
    job = workload(config, mode, seed=400 + list(Mode).index(mode))
    still = cosim(config, job)
    stalled = cosim(config, job, stalls=0.3, seed=7)
    for result in (still, stalled):
        assert result.differences == ()
        assert result.passed
        assert result.outputs_compared == job.q.size
        assert result.sqnr_db_heads is not None
        assert result.sqnr_floor_db_heads is not None
        loss = np.array(result.sqnr_floor_db_heads) - np.array(result.sqnr_db_heads)
        assert (loss < 1.0).all()
        assert min(result.sqnr_db_heads) > 25
    assert still.cycles_equal
    assert stalled.cycles_equal is None
    assert still.cycles_rtl == still.cycles_model
    assert stalled.cycles_rtl is not None
    assert stalled.cycles_rtl > still.cycles_rtl


def test_a_difference_is_found() -> None:
    """The comparison is of the bits: one wrong bit is found, and so are answers in another order."""
    config = Config.load("tiny")
    heads = heads_of(config, random_shapes(config, 2, 410, tokens=30), 410)
    result = run_jobs(config, heads, Backend.COCOTB)
    check_jobs(config, heads, result)
    wanted = [golden(config, head) for head in heads]
    for beat in range(0, len(result.data), 7):
        changed = result.data.copy()
        changed[beat, beat % config.output_bytes] ^= 1
        differences, _ = compare_outputs(config, heads, wanted, replace(result, data=changed))
        assert len(differences) == 1
    assert compare_outputs(config, heads[::-1], wanted[::-1], result)[0] != []


def test_wide() -> None:
    """One short job on the largest preset, whose build takes minutes; and its lint."""
    config = Config.load("wide")
    assert lint(verilog_of(config)) == ""
    job = workload(config, Mode.RIEMANNIAN, seed=420)
    result = cosim(config, job)
    assert result.differences == ()
    assert result.cycles_equal
    assert result.outputs_compared == job.q.size
