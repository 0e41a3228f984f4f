"""Time tables of the loader: rates, order, releases. That the hardware keeps them is tested with the hardware."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dtp.config import PRESETS, Config
from dtp.job import Job, descriptor_entries, job_entries
from sim.cycles.loader import LoadPlan, plan, run, times

NEVER = [-1_000_000] * 1000


def make(tokens: int, width: int, kind: str, masked: bool = False) -> Job:
    return Job(
        tokens=tokens, valid_length=tokens, width=width, bias=kind != "dot", lift=kind == "lift", masked=masked
    )


def free(table: LoadPlan) -> list[int]:
    """Starts of a job that waits for nothing."""
    return [0, *np.cumsum(table.lengths[:-1]).tolist()]


@pytest.mark.parametrize("name", PRESETS)
def test_a_plain_job_takes_a_beat_a_cycle(name: str) -> None:
    """No cycle is lost but those of the words of an entry, one at some groups, and a few where short jobs have gaps."""
    config = Config.load(name)
    for tokens in (config.block, 3 * config.block + 1, config.max_tokens):
        job = make(tokens, config.max_width, "dot")
        table = plan(config, job)
        at = times(table, free(table))
        entries = job_entries(config, job) - descriptor_entries(config)
        query_entries = config.groups(tokens) * config.max_chunks * config.rows // config.segments
        words = query_entries * (config.entry_words - 1)
        first = int(at.starts[1])
        last = max(int(at.keys.max()), int(at.values.max()), int(at.groups.max()) - 5) - 1
        assert entries + words <= last - first + 1 <= entries + words + config.groups(tokens) + 2 * config.lookahead


@pytest.mark.parametrize("kind", ["dot", "bias", "lift"])
@pytest.mark.parametrize("name", PRESETS)
def test_tables_are_whole(name: str, kind: str) -> None:
    """News come in order, and none after ``done``."""
    config = Config.load(name)
    for tokens, width in ((1, 1), (config.max_tokens - 1, config.max_width - 1)):
        table = plan(config, make(tokens, width, kind, masked=True))
        at = times(table, free(table))
        blocks, entries = config.blocks(tokens), config.chunks(width) * config.pass_steps
        assert at.keys.shape == at.values.shape == (blocks, entries)
        assert at.groups.shape == (config.groups(tokens),) and at.passes.shape[1] == config.chunks(width)
        for events in (at.values, np.column_stack([at.passes[:, :-1], at.groups])):
            assert (np.diff(events.reshape(-1)) > 0).all()
        # Keys that were taken while their batch was lifted are shown together.
        assert (np.diff(at.keys.reshape(-1)) >= (kind == "dot")).all()
        assert (np.diff(at.passes, axis=1) >= config.pass_steps).all()
        assert (at.groups >= at.passes[:, -1]).all() and ((at.groups > at.passes[:, -1]) == (kind == "lift")).all()
        assert max(at.keys.max(), at.values.max(), at.groups.max()) <= at.done <= at.end
        assert at.valid < at.passes[0, 0]
        assert (table.lengths > 0).all()


def test_releases_hold_what_waits_for_them() -> None:
    """A late release moves its segment and all after it, by the same number of cycles."""
    config = Config.load("tiny").changed(query_groups=4)
    job = make(40, 9, "lift")
    table = plan(config, job)
    groups = config.groups(40)
    assert groups > config.query_groups
    early = run([table], config, [], NEVER)[0]
    ring = list(NEVER)
    ring[1] = int(early.starts[1 + config.query_groups + 1]) + 99
    late = run([table], config, [], ring)[0]
    moved = config.query_groups + 2
    assert np.array_equal(late.starts[:moved], early.starts[:moved])
    assert (late.starts[moved:] - early.starts[moved:] == 100).all()
    assert late.done - early.done == 100

    alone = run([table] * 3, config, NEVER, NEVER)
    held = run([table] * 3, config, [alone[2].starts[0] + 6], NEVER)
    assert held[1].done == alone[1].done and held[2].starts[0] == alone[2].starts[0] + 7
    assert np.array_equal(held[2].keys - held[2].starts[0], alone[2].keys - alone[2].starts[0])


def test_kinds_differ_where_they_should() -> None:
    """Factor batches delay keys and queries, a mask delays ``valid``."""
    config = Config.load("ecp5-85k")
    dot, bias, lift = (plan(config, make(64, 64, kind)) for kind in ("dot", "bias", "lift"))
    assert dot.lengths.sum() < bias.lengths.sum() < lift.lengths.sum()
    assert plan(config, make(64, 64, "dot", masked=True)).valid > dot.valid


def test_a_table_is_fast() -> None:
    """The longest job takes milliseconds, one of a known shape microseconds."""
    config = Config.load("ecp5-85k")
    plan(config, make(16, 64, "lift"))
    start = time.process_time()
    for tokens in range(config.max_tokens - 15, config.max_tokens + 1):
        plan(config, make(tokens, 64, "lift"))
    assert time.process_time() - start < 16 * 0.01
    start = time.process_time()
    for _ in range(100):
        plan(config, make(config.max_tokens, 64, "lift"))
    assert time.process_time() - start < 100 * 0.001
