"""Gated attention as integers: the run on the stream, its masks, and the attention over them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from dtp.attention import golden
from dtp.config import Config
from dtp.errors import DtpError
from dtp.gated import (
    DESCRIPTOR_BYTES,
    FIELDS,
    FLAGS,
    MAX_HEADS,
    GatedParams,
    GeometryError,
    GoldenGate,
    Run,
    descriptor_error,
    gated_golden,
    holonomy_scores,
    quantise_geometry,
    threshold_for,
)
from dtp.holonomy import FieldJob, block_scores, block_sums, relative_transports
from dtp.pruner import Band, Gate, PrunerSettings, Source, legal_blocks
from dtp.quantise import quantise
from dtp.transport import QuantisedFactors, word_beats
from dtp.workload import Workload
from tests.gated import Gated, workload

TINY = Config.load("tiny")
ECP5 = Config.load("ecp5-85k")
WIDE = Config.load("wide")
OPEN = PrunerSettings.open(Source.HOLONOMY)


def settings(source: Source, theta: int) -> PrunerSettings:
    return PrunerSettings.open(source).changed(theta_low=theta, theta_high=theta)


@pytest.mark.parametrize("config", [TINY, ECP5, WIDE], ids=lambda c: c.name)
@pytest.mark.parametrize("source", Source)
def test_beats_hold_what_the_contract_says(config: Config, source: Source) -> None:
    made = workload(config, 1, tokens=config.block + 3, heads=2)
    geometry = quantise_geometry(config, made, source)
    p, run = GatedParams(config), geometry.run
    beats = geometry.beats(config)
    table = run.blocks(config) ** 2 if run.table else 0
    factors = run.tokens * run.words * run.groups * p.factor_beats if run.holonomy else 0
    probe = run.words * p.probe_beats if run.holonomy else 0
    # Behind the first pass the second head has two, unless vectors work in pairs.
    passes = 4 if p.transport.vectors == 1 else 3
    assert len(beats) == p.descriptor_beats + 2 * table + 2 * probe + passes * factors
    assert descriptor_error(config, beats.tobytes()[:DESCRIPTOR_BYTES]) is GeometryError.NONE
    place = p.descriptor_beats + probe + factors
    if run.table:
        assert geometry.scores is not None
        scores = np.frombuffer(beats[place : place + table, :2].tobytes(), dtype="<u2")
        assert not beats[place : place + table, 2:].any()
        assert scores.tolist() == geometry.scores[0].ravel().tolist()
    if run.holonomy:
        assert geometry.factors is not None and geometry.probes is not None
        word = beats[p.descriptor_beats : p.descriptor_beats + p.probe_beats].tobytes()
        rows = p.transport.tile_rows
        assert np.frombuffer(word, dtype="<i2")[:rows].tolist() == geometry.probes[0, :rows].tolist()
        tile = beats[place - factors : place - factors + p.factor_beats].tobytes()
        got = np.frombuffer(tile, dtype=np.int8)[: 4 * rows].reshape(rows, 4)
        assert (got == geometry.factors[0, 0, :rows, :4]).all()
        # The last pass has the factors of the first head again.
        assert (beats[-factors:] == beats[p.descriptor_beats + probe :][:factors]).all()


def test_passes() -> None:
    """Every head has one transport of its own and one transpose; only the second head has them in two passes."""
    for config in (TINY, WIDE):
        paired = GatedParams(config).transport.vectors == 2
        for heads in range(1, 6):
            run = Run(heads=heads, tokens=3, words=2)
            passes = run.passes(config)
            assert [one.step for one in passes if one.plain] == list(range(heads))
            assert [one.step for one in passes if one.transposed] == list(range(1, heads + 1))
            assert [one.step for one in passes] == sorted(one.step for one in passes)
            assert len(passes) == heads + 1 + (heads > 1 and not paired)
            jobs = run.transport_jobs(config)
            assert sum(job.tokens for job in jobs) == 3 * len(passes)
            if not paired:
                alone = [(one.step, one.plain) for one in passes[1:-1] if one.plain != one.transposed]
                assert alone == ([(1, False), (1, True)] if heads > 1 else [])
                slots = [job.slots for job in jobs]
                assert slots[:2] == [(0,), (1,)] and all(a != b for a, b in pairwise(slots))
            tables = Run(heads=heads, tokens=3, words=0, holonomy=False, table=True).passes(config)
            assert [one.step for one in tables if one.transposed] == list(range(1, heads + 1)) and len(tables) == heads


def test_fields_do_not_overlap() -> None:
    taken = [byte for field in FIELDS for byte in range(field.offset, field.offset + field.bytes)]
    assert len(taken) == len(set(taken)) and max(taken) < DESCRIPTOR_BYTES
    assert [flag.bit for flag in FLAGS] == list(range(len(FLAGS)))


def test_scores_are_those_of_the_units() -> None:
    made = workload(TINY, 2, tokens=20, heads=3)
    geometry = quantise_geometry(TINY, made, Source.HOLONOMY)
    assert geometry.factors is not None and geometry.probes is not None
    scores, error, saturations = holonomy_scores(TINY, geometry)
    p, run = GatedParams(TINY), geometry.run
    numbers = {"v_scale": 1.0, "w_scale": 1.0, "project_shift": run.project_shift, "gram_shift": run.gram_shift}
    factors = [QuantisedFactors(v=v, unit=run.unit, **numbers) for v in geometry.factors]
    for head in range(3):
        u, _ = relative_transports(TINY, factors[head], factors[(head + 1) % 3], geometry.probes[head])
        energy = int((geometry.probes[head] ** 2).sum())
        job = FieldJob.of(p.field, tokens=20, words=run.words, probe_energy=energy, causal=False)
        alone = block_scores(block_sums(u, p.field), job, p.field)
        # The run has one energy for all heads.
        assert np.abs(alone - scores[head]).max() <= 2 + scores[head].max() >> 10
    assert (error, saturations) == (0, 0)


def test_open_gates_change_no_bit() -> None:
    made = workload(TINY, 3, tokens=29, heads=2, mode="riemannian", valid_length=25)
    gated = Gated.of(TINY, made, OPEN)
    dense = [golden(TINY, head) for head in quantise(TINY, made)]
    assert gated.gate.kept == gated.gate.legal == 2 * 16
    for got, wanted in zip(gated.golden, dense, strict=True):
        assert (got.outputs == wanted.outputs).all()
        assert (got.empty_rows == wanted.empty_rows).all()


def test_masks_are_a_further_condition() -> None:
    """A job with a block mask of its own, over fewer blocks than its padding has."""
    made = workload(TINY, 4, tokens=40, heads=2, valid_length=20, kept=0.6, causal=True)
    gated = Gated.of(TINY, made, settings(Source.TABLE, 30000))
    assert made.block_mask is not None
    for head, plain, mask, own in zip(gated.heads, gated.plain, gated.gate.masks, made.block_mask, strict=True):
        assert mask.shape == (3, 3)
        assert head.block_mask is not None
        assert (head.block_mask[:3, :3] == (mask & own[:3, :3])).all()
        assert not head.block_mask[3:].any() and not head.block_mask[:, 3:].any()
        assert plain.block_mask is not None and (plain.block_mask == own).all()


def test_a_skipped_head_gives_zeros_and_no_flag() -> None:
    made = workload(TINY, 5, tokens=12, heads=2)
    bound = settings(Source.TABLE, 65535).changed(band=Band.MEAN, band_low=0, band_high=0)
    gated = Gated.of(TINY, made, bound)
    assert gated.gate.skipped.tolist() == [True, True] and gated.gate.kept == 0
    for result in gated.golden:
        assert not result.outputs.any() and not result.empty_rows.any()
    assert gated_golden(TINY, gated.heads[0], skipped=False).empty_rows.all()


def test_aggregation_goes_on_from_run_to_run() -> None:
    first, second = (
        quantise_geometry(TINY, workload(TINY, seed, tokens=24, heads=1), Source.TABLE) for seed in (6, 7)
    )
    assert first.scores is not None and second.scores is not None
    gate = GoldenGate(TINY)
    policy = settings(Source.TABLE, 20000)
    alone = gate.run(second, policy)
    gate.run(first, policy)
    from dtp.pruner import Aggregation

    both = gate.run(second, policy.changed(aggregation=Aggregation.MAXIMUM), number=1)
    wanted = np.maximum(first.scores, second.scores)[0] <= 20000
    assert (both.masks[0] == wanted | np.eye(3, dtype=bool)).all()
    assert (both.masks != alone.masks).any()


@pytest.mark.parametrize(("kept", "expected"), [(0.3, 0.3), (0.5, 0.5), (0.8, 0.8), (1.0, 1.0), (0.01, 4 / 16)])
def test_threshold_keeps_the_fraction(kept: float, expected: float) -> None:
    scores = np.random.default_rng(8).permutation(2 * 16).reshape(2, 4, 4) * 1000
    legal = legal_blocks(4, 4, causal=False)
    theta = threshold_for(scores, legal, kept)
    mask = (scores <= theta) | np.eye(4, dtype=bool)
    assert abs(mask.mean() - max(expected, 0.25)) <= 1 / 32 + (0.06 if kept == 0.01 else 0)


def test_budget() -> None:
    made = workload(TINY, 9, tokens=32, heads=2)
    policy = PrunerSettings.open(Source.HOLONOMY).changed(gate=Gate.BUDGET, theta_low=0, theta_high=0, budget=2)
    gated = Gated.of(TINY, made, policy)
    assert (gated.gate.masks.sum(axis=2) == 2).all()
    assert gated.gate.kept_fraction == 0.5


# ---- refusals ------------------------------------------------------------------------------------------------------


def _without(made: Workload, **fields: object) -> Workload:
    return replace(made, **fields)


@pytest.mark.parametrize(
    ("changes", "source", "message"),
    [
        ({"connection_a": None, "connection_b": None, "transport": None}, Source.HOLONOMY,
         r"Workload\.connection_a must be there for scores of holonomy \(not for the source table\), not None"),
        ({"transport": "linear"}, Source.HOLONOMY,
         r"Workload\.transport must be cayley for scores of holonomy, not .*linear.*"),
        ({"scores": None}, Source.BOTH, r"Workload\.scores must be there for scores of a table, not None"),
    ],
)  # fmt: skip
def test_workloads_that_a_run_cannot_hold(changes: dict[str, object], source: Source, message: str) -> None:
    from dtp.workload import TransportKind

    if changes.get("transport") == "linear":
        changes = {"transport": TransportKind.LINEAR}
    made = _without(workload(TINY, 10, tokens=16, heads=1), **changes)
    with pytest.raises(DtpError, match=f"^{message}$"):
        quantise_geometry(TINY, made, source)


def test_sizes_that_a_run_cannot_hold() -> None:
    too_many = workload(TINY, 11, tokens=8, heads=MAX_HEADS + 1, transport_rank=0)
    with pytest.raises(DtpError, match=r"^Workload\.heads must be at most 16 with the unit gated, not 17$"):
        quantise_geometry(TINY, too_many, Source.TABLE)
    long = workload(ECP5, 11, tokens=257, heads=1, transport_rank=0, width=16)
    with pytest.raises(DtpError, match=r"^Workload\.valid_length must be at most 256 with the unit gated, not 257$"):
        quantise_geometry(ECP5, long, Source.TABLE)
    two = replace(workload(TINY, 11, tokens=8, heads=2), probe=np.ones((2, 2, 16), dtype=np.float32))
    with pytest.raises(DtpError, match=r"^Workload\.probe must be one a head with the unit gated, not 2$"):
        quantise_geometry(TINY, two, Source.HOLONOMY)
    one_byte = TINY.changed(name="bytes", input_bytes=1)
    with pytest.raises(DtpError, match=r"^Config\.input_bytes must be at least 2 with the unit gated, not 1$"):
        GatedParams(one_byte).check()
    with pytest.raises(DtpError, match=r"^PrunerSettings\.source must be TABLE as in the run, not 'HOLONOMY'$"):
        GoldenGate(TINY).run(quantise_geometry(TINY, workload(TINY, 11, tokens=8, heads=1), Source.TABLE), OPEN)
    with pytest.raises(DtpError, match=r"^threshold_for\.kept must be more than 0 and at most 1, not 0$"):
        threshold_for(np.zeros((1, 2, 2)), legal_blocks(2, 2, causal=False), 0)


GOOD = Run(heads=2, tokens=9, words=4, unit=1000, reciprocals=(1, 2, 3), shifts=(4, 5, 6))


@pytest.mark.parametrize(
    ("byte", "value", "code"),
    [
        (0, 0, GeometryError.MAGIC), (2, 9, GeometryError.VERSION), (3, 0, GeometryError.FLAGS),
        (3, 0x12, GeometryError.FLAGS), (6, 0, GeometryError.HEADS), (6, 17, GeometryError.HEADS),
        (8, 0, GeometryError.TOKENS), (8, 65, GeometryError.TOKENS), (10, 0, GeometryError.WORDS),
        (10, 1, GeometryError.WORDS), (10, 5, GeometryError.WORDS), (12, 32, GeometryError.SHIFT),
        (13, 32, GeometryError.SHIFT), (19, 0x80, GeometryError.SHIFT), (33, 16, GeometryError.SHIFT),
        (4, 255, GeometryError.NONE), (3, 6, GeometryError.NONE), (3, 10, GeometryError.NONE),
    ],
)  # fmt: skip
def test_descriptor_errors(byte: int, value: int, code: GeometryError) -> None:
    data = bytearray(GOOD.descriptor())
    data[byte] = value
    assert descriptor_error(TINY, bytes(data)) is code


def test_word_sizes() -> None:
    p = GatedParams(Config.load("wide"))
    assert p.factor_beats == word_beats(p.transport.factor_word_bits, 64) == 2
    assert p.max_tokens == 256 and p.max_blocks == 16
    assert GatedParams(TINY).max_tokens == TINY.max_tokens
