"""What a gated top answers to runs, jobs and accesses that are wrong, and that it goes on afterwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dtp.attention import golden
from dtp.gated import (
    GatedParams,
    GeometryError,
    GoldenGate,
    RowError,
    holonomy_scores,
    quantise_geometry,
)
from dtp.job import StatusRecord, output_beats, status_beats
from dtp.pruner import Aggregation, Band, PrunerError, PrunerSettings, Source
from dtp.registers import Response, gated_registers
from dtp.solve import TransportError
from sim.cycles.gated import predict_gated
from tests.gated import (
    CONFIGS,
    START,
    TINY,
    Access,
    Gated,
    drive,
    outputs_differ,
    register,
    registers_read,
    settings_of,
    workload,
)
from tools.gated import stream_view
from tools.verbs import compare_outputs

OPEN = PrunerSettings.open(Source.TABLE)
POLICY = OPEN.changed(theta_low=30000, theta_high=30000)
LATE = 20_000
"""A cycle in which everything that was offered before has been answered."""


def read(*names: str, cycle: int) -> list[Access]:
    return [Access(register(TINY, name), cycle) for name in names]


def table_run(seed: int = 1, tokens: int = 20, heads: int = 1, policy: PrunerSettings = POLICY) -> Gated:
    return Gated.of(TINY, workload(TINY, seed, tokens=tokens, heads=heads, transport_rank=0), policy)


def spoiled(gated: Gated, byte: int, value: int) -> np.ndarray:
    beats = gated.geometry.beats(TINY).copy()
    beats.reshape(-1)[byte] = value
    return beats


@pytest.mark.parametrize(
    ("byte", "value", "code"),
    [
        (0, 0, GeometryError.MAGIC), (3, 0x14, GeometryError.FLAGS), (3, 6, GeometryError.WORDS),
        (6, 17, GeometryError.HEADS), (8, 65, GeometryError.TOKENS), (19, 0x80, GeometryError.SHIFT),
    ],
)  # fmt: skip
def test_after_a_refused_run_jobs_keep_every_block_until_it_is_cleared(
    byte: int, value: int, code: GeometryError
) -> None:
    gated, after = table_run(2), table_run(3)
    dense = golden(TINY, replace(gated.plain[0], block_mask=None))
    accesses = [
        *settings_of(TINY, POLICY),
        *read("error", "status", cycle=LATE),
        Access(register(TINY, "control"), LATE + 20, 1),
        *read("error", "kept", cycle=2 * LATE),
    ]
    result = drive(
        TINY,
        runs=[(spoiled(gated, byte, value), START), (after.geometry.beats(TINY), LATE + 100)],
        jobs=[(gated.plain[0], START), (after.plain[0], LATE + 100)],
        accesses=accesses,
    )
    assert outputs_differ(TINY, [gated.plain[0], after.heads[0]], [dense, after.golden[0]], result) == []
    error, status, cleared, kept = registers_read(TINY, accesses, result)
    assert error["geometry"] == code and status == {"busy": 0, "rows": 0, "failed": 1}
    assert not any(cleared.values())
    assert kept["count"] == after.gate.kept


def test_jobs_wait_for_a_run_that_is_inside_although_one_before_it_was_refused() -> None:
    """The only row of the second head is waited for in the cycles in which it goes through the queue."""
    made = workload(TINY, 17, tokens=8, heads=2)
    settings = PrunerSettings.open(Source.HOLONOMY).changed(band=Band.MEAN, band_low=65535, band_high=65535)
    gated = Gated.of(TINY, made, settings)
    assert gated.gate.skipped.all()
    result = drive(
        TINY,
        runs=[(spoiled(gated, 0, 0), START), (gated.geometry.beats(TINY), START + 400)],
        jobs=[(head, START + 450) for head in gated.plain],
        accesses=settings_of(TINY, settings),
    )
    assert outputs_differ(TINY, gated.heads, gated.golden, result) == []


@pytest.mark.parametrize(("cut", "code"), [(0, GeometryError.CUT), (12, GeometryError.EARLY_LAST)])
def test_a_run_that_ends_early(cut: int, code: GeometryError) -> None:
    """In the descriptor it is refused; later, the last score stands for those that are missing."""
    gated, after = table_run(4, tokens=32), table_run(5)
    beats = gated.geometry.beats(TINY)[: max(cut, 3)]
    accesses = [*settings_of(TINY, POLICY), *read("error", cycle=LATE)]
    wanted = gated.plain[0], golden(TINY, gated.plain[0])
    if cut:
        assert gated.geometry.scores is not None
        scores = gated.geometry.scores.copy().reshape(-1)
        scores[cut - 5 :] = scores[cut - 6]  # five beats of a descriptor
        made = replace(workload(TINY, 4, tokens=32, heads=1, transport_rank=0))
        table = scores.reshape(1, 4, 4).astype(np.uint16)
        padded = Gated.of(TINY, replace(made, scores=table), POLICY)
        wanted = padded.heads[0], padded.golden[0]
    second = [] if not cut else [(after.geometry.beats(TINY), LATE)]
    jobs = [(gated.plain[0], START)] + [(after.plain[0], LATE)] * bool(cut)
    result = drive(TINY, runs=[(beats, START), *second], jobs=jobs, accesses=accesses)
    heads, results = [wanted[0]], [wanted[1]]
    if cut:
        heads, results = [*heads, after.heads[0]], [*results, after.golden[0]]
    assert outputs_differ(TINY, heads, results, result) == []
    assert registers_read(TINY, accesses, result)[0]["geometry"] == code


def test_a_run_that_ends_in_the_factors() -> None:
    """The last beat stands for the missing factors of the last pass, those of the first head."""
    made = workload(TINY, 18, tokens=20, heads=2)
    settings = PrunerSettings.open(Source.HOLONOMY)
    whole = quantise_geometry(TINY, made, Source.HOLONOMY)
    assert whole.factors is not None
    missing, words = 12, whole.run.words * GatedParams(TINY).factor_beats
    factors = whole.factors.copy()
    beat = factors[0, -missing - 1].reshape(-1)[-TINY.input_bytes :]
    factors[0, -missing:] = np.resize(beat, factors[0, -missing:].shape)
    scores = np.stack([holonomy_scores(TINY, g)[0] for g in (whole, replace(whole, factors=factors))])
    low = int(np.median(scores))
    settings = settings.changed(theta_low=low, theta_high=low)
    gated = Gated.of(TINY, made, settings)
    cut = GoldenGate(TINY).run(replace(whole, factors=factors), settings)
    masks = np.stack([gated.gate.masks[0], cut.masks[1]])
    assert (masks != gated.gate.masks).any()
    seen = Gated.over(TINY, whole, settings, replace(gated.gate, masks=masks), gated.plain)
    accesses = [*settings_of(TINY, settings), *read("error", "status", cycle=LATE)]
    result = drive(
        TINY,
        runs=[(whole.beats(TINY)[: -missing * words], START)],
        jobs=[(head, START) for head in gated.plain],
        accesses=accesses,
    )
    assert outputs_differ(TINY, seen.heads, seen.golden, result) == []
    error, status = registers_read(TINY, accesses, result)
    assert error["geometry"] == GeometryError.EARLY_LAST and not status["busy"]


def test_a_run_that_ends_late() -> None:
    gated, after = table_run(6), table_run(7)
    beats = np.concatenate([gated.geometry.beats(TINY), gated.geometry.beats(TINY)[:9]])
    accesses = [*settings_of(TINY, POLICY), *read("error", cycle=LATE)]
    result = drive(
        TINY,
        runs=[(beats, START), (after.geometry.beats(TINY), START)],
        jobs=[(gated.plain[0], START), (after.plain[0], START)],
        accesses=accesses,
    )
    assert outputs_differ(TINY, [gated.heads[0], after.heads[0]], [gated.golden[0], after.golden[0]], result) == []
    assert registers_read(TINY, accesses, result)[0]["geometry"] == GeometryError.LATE_LAST


@pytest.mark.parametrize(("run_tokens", "code"), [(20, RowError.SHORT), (40, RowError.LONG)])
def test_rows_of_another_size_than_the_job(run_tokens: int, code: RowError) -> None:
    """Rows that are missing keep every legal block, surplus ones are dropped, and the next head is in step."""
    run, sized, after = table_run(8, tokens=run_tokens), table_run(8, tokens=32), table_run(9)
    blocks = 4
    masks = np.ones((1, blocks, blocks), dtype=np.bool_)
    given = run.gate.masks[0][:blocks]
    masks[0, : len(given)] = 0
    masks[0, : len(given), : given.shape[1]] = given[:, :blocks]
    seen = Gated.over(TINY, run.geometry, POLICY, replace(run.gate, masks=masks), sized.plain)
    accesses = [*settings_of(TINY, POLICY), *read("error", cycle=LATE)]
    result = drive(
        TINY,
        runs=[(run.geometry.beats(TINY), START), (after.geometry.beats(TINY), START)],
        jobs=[(sized.plain[0], START), (after.plain[0], START)],
        accesses=accesses,
    )
    assert outputs_differ(TINY, [seen.heads[0], after.heads[0]], [seen.golden[0], after.golden[0]], result) == []
    error = registers_read(TINY, accesses, result)[0]
    assert error["rows"] == code and error["geometry"] == error["pruner"] == 0


def test_the_first_errors_stay_and_clear_forgets_errors_and_counts() -> None:
    short, long, after = table_run(19, tokens=20), table_run(20, tokens=40), table_run(21)
    sized = table_run(19, tokens=32)
    early, late = short.geometry.beats(TINY)[:-1], long.geometry.beats(TINY)
    late = np.concatenate([late, late[:1]])
    accesses = [
        *settings_of(TINY, POLICY),
        *read("error", cycle=LATE),
        Access(register(TINY, "control"), LATE + 20, 1),
        *read("error", "kept", "legal", "heads", cycle=2 * LATE),
    ]
    jobs = [*((sized.plain[0], START) for _ in range(2)), (after.plain[0], LATE + 100)]
    runs = [(early, START), (late, START), (after.geometry.beats(TINY), LATE + 100)]
    result = drive(TINY, runs=runs, jobs=jobs, accesses=accesses)
    error, cleared, kept, legal, heads = registers_read(TINY, accesses, result)
    assert (error["geometry"], error["rows"]) == (GeometryError.EARLY_LAST, RowError.SHORT)
    assert not any(cleared.values())
    assert (kept["count"], legal["count"], heads["count"]) == (after.gate.kept, after.gate.legal, 1)


@pytest.mark.parametrize(
    ("name", "word", "code"),
    [
        ("theta", 5 | 4 << 16, PrunerError.THRESHOLDS),
        ("budget", 0, PrunerError.BUDGET),
        ("band", 9 | 8 << 16, PrunerError.BAND),
    ],
)
def test_settings_that_the_pruner_refuses_keep_every_block(name: str, word: int, code: PrunerError) -> None:
    gated = table_run(10, policy=OPEN)
    gate = {"theta": 0, "budget": 1, "band": 1 << 4}[name]
    accesses = [
        *settings_of(TINY, OPEN),
        Access(register(TINY, "gate"), 20, gate),
        Access(register(TINY, name), 20, word),
        *read("error", "kept", cycle=LATE),
    ]
    result = drive(TINY, runs=[(gated.geometry.beats(TINY), START)], jobs=[(gated.plain[0], START)], accesses=accesses)
    assert outputs_differ(TINY, gated.heads, gated.golden, result) == []
    error, kept = registers_read(TINY, accesses, result)
    assert error["pruner"] == code
    assert kept["count"] == gated.gate.legal


def test_an_access_to_no_register_is_answered() -> None:
    accesses = [Access(0x7C, 0), Access(0x02, 0), Access(0x7C, 0, 1), Access(0x00, 0, 1), Access(0x10, 30)]
    result = drive(TINY, accesses=accesses, timeout=500)
    wrong = Response.DECODE_ERROR << 32
    assert result.outputs["s_axil_r"].payloads == [wrong, wrong, 0]
    assert result.outputs["s_axil_b"].payloads == [Response.DECODE_ERROR, Response.SLAVE_ERROR]


def test_an_abort_drops_run_and_job_and_the_next_ones_work() -> None:
    """Abort in the middle of a run with transports, while its job waits for rows."""
    made = workload(TINY, 11, tokens=20, heads=2)
    settings = PrunerSettings.open(Source.HOLONOMY).changed(theta_low=3000, theta_high=3000)
    gated = Gated.of(TINY, made, settings)
    cut = gated.geometry.beats(TINY)
    accesses = [
        *settings_of(TINY, settings),
        Access(register(TINY, "control"), START + 150, 2),
        *read("error", "status", "kept", cycle=50_000),
    ]
    result = drive(
        TINY,
        runs=[(cut, START), (cut, START + 1200)],
        aborted_jobs=[(gated.plain[0].beats(TINY), START)],
        jobs=[(head, START + 1200) for head in gated.plain],
        accesses=accesses,
        beats=status_beats(TINY) + sum(output_beats(TINY, head.job) for head in gated.plain),
    )
    view = stream_view(TINY, result)
    first = status_beats(TINY)
    assert StatusRecord.parse(view.data[:first].tobytes()).error == 255
    rest = type(view)(data=view.data[first:], user=view.user[first:], last=view.last[first:])
    assert compare_outputs(TINY, gated.heads, gated.golden, rest)[0] == []
    error, status, kept = registers_read(TINY, accesses, result)
    assert not any(error.values()) and not any(status.values())
    assert kept["count"] == gated.gate.kept


def test_runs_and_plain_jobs_in_turn_and_every_cycle() -> None:
    """Two runs back to back, one with tables, one with transports, and a job between that does not look at the gate."""
    first = table_run(12, tokens=24, heads=2)
    made = workload(TINY, 13, tokens=17, heads=2)
    second = Gated.of(TINY, made, PrunerSettings.open(Source.HOLONOMY).changed(theta_low=30000, theta_high=30000))
    between = replace(first.plain[0], job=replace(first.plain[0].job, gated=False))
    jobs = [*first.plain, between, *second.plain]
    result = drive(
        TINY,
        runs=[(gated.geometry.beats(TINY), START) for gated in (first, second)],
        jobs=[(head, START) for head in jobs],
        accesses=settings_of(TINY, POLICY),
    )
    heads = [*first.heads, between, *second.heads]
    assert outputs_differ(TINY, heads, [*first.golden, golden(TINY, between), *second.golden], result) == []
    runs = [(gated.geometry.run, gated.settings) for gated in (first, second)]
    view = stream_view(TINY, result)
    cycles = view.cycles - view.first_input_cycle
    assert cycles.tolist() == predict_gated(TINY, heads, runs).beat_cycles.tolist()


def test_runs_of_short_heads_follow_each_other() -> None:
    """Nothing of a run is left in the memories of the next one."""
    settings = PrunerSettings.open(Source.HOLONOMY).changed(band=Band.MEAN, band_low=0, band_high=1000)
    runs = [Gated.of(TINY, workload(TINY, seed, tokens=2, heads=4), settings) for seed in (22, 28)]
    assert all(0 < gated.gate.skipped.sum() < 4 for gated in runs)
    heads = [head for gated in runs for head in gated.heads]
    result = drive(
        TINY,
        runs=[(gated.geometry.beats(TINY), START) for gated in runs],
        jobs=[(head, START) for gated in runs for head in gated.plain],
        accesses=settings_of(TINY, settings),
    )
    assert outputs_differ(TINY, heads, [golden for gated in runs for golden in gated.golden], result) == []
    view = stream_view(TINY, result)
    cycles = view.cycles - view.first_input_cycle
    wanted = predict_gated(TINY, heads, [(gated.geometry.run, settings) for gated in runs]).beat_cycles
    assert cycles.tolist() == wanted.tolist()


@pytest.mark.parametrize(("name", "seed"), [("tiny", 40), ("tiny", 50), ("pairs", 60)])
def test_small_runs_of_every_kind_follow_each_other(name: str, seed: int) -> None:
    """Runs of one block and of one token, of one head and of several, behind each other: places start anew.

    Of many short heads the input is several passes ahead of the engine.
    """
    table, field, both = Source.TABLE, Source.HOLONOMY, Source.BOTH
    kinds = [
        (table, 2, 8), (table, 2, 8), (table, 1, 3), (table, 3, 8), (field, 2, 1), (table, 1, 8), (field, 1, 1),
        (both, 3, 1), (field, 3, 9), (field, 2, 8), (table, 2, 1), (both, 2, 5), (field, 1, 10), (field, 8, 9),
        (both, 7, 10), (field, 16, 5),
    ]  # fmt: skip
    config = CONFIGS[name]
    order = np.random.default_rng(seed).permutation(len(kinds))
    runs = []
    for place in order:
        source, heads, tokens = kinds[place]
        settings = PrunerSettings.open(source).changed(theta_low=6000, theta_high=6000)
        rank = 2 if source & Source.HOLONOMY else 0
        made = workload(config, seed + int(place), tokens=tokens, heads=heads, transport_rank=rank)
        runs.append(Gated.of(config, made, settings))
    heads = [head for gated in runs for head in gated.heads]
    result = drive(
        config,
        runs=[(gated.geometry.beats(config), START) for gated in runs],
        jobs=[(head, START) for gated in runs for head in gated.plain],
        accesses=settings_of(config, PrunerSettings.open(both).changed(theta_low=6000, theta_high=6000)),
    )
    assert outputs_differ(config, heads, [golden for gated in runs for golden in gated.golden], result) == []
    view = stream_view(config, result)
    wanted = predict_gated(config, heads, [(gated.geometry.run, gated.settings) for gated in runs]).beat_cycles
    assert (view.cycles - view.first_input_cycle).tolist() == wanted.tolist()


def test_each_head_has_its_own_scores_of_the_run_before() -> None:
    policy = POLICY.changed(aggregation=Aggregation.MAXIMUM)
    runs = [table_run(seed, heads=2, policy=policy) for seed in (24, 25)]
    gate = GoldenGate(TINY)
    gates = [gate.run(gated.geometry, policy, number=number) for number, gated in enumerate(runs)]
    seen = [Gated.over(TINY, r.geometry, policy, g, r.plain) for r, g in zip(runs, gates, strict=True)]
    scores = gated_registers(TINY)
    accesses = [
        *settings_of(TINY, policy),
        Access(register(TINY, "scores"), LATE, scores.encode("scores", weight=0, fresh=0, maximum=1, step=64)),
    ]
    result = drive(
        TINY,
        runs=[(gated.geometry.beats(TINY), cycle) for gated, cycle in zip(runs, (START, LATE + 50), strict=True)],
        jobs=[(head, START) for gated in runs for head in gated.plain],
        accesses=accesses,
    )
    heads = [head for gated in seen for head in gated.heads]
    assert outputs_differ(TINY, heads, [golden for gated in seen for golden in gated.golden], result) == []


def test_saturations_are_those_of_states_that_count() -> None:
    """Probes with every lane at a limit: they add up over all passes; slots that a pass has not have none."""
    geometry = quantise_geometry(TINY, workload(TINY, 26, tokens=9, heads=3), Source.HOLONOMY)
    assert geometry.probes is not None
    geometry = replace(geometry, probes=np.where(geometry.probes < 0, -(1 << 15), (1 << 15) - 1))
    settings = PrunerSettings.open(Source.HOLONOMY)
    gate = GoldenGate(TINY).run(geometry, settings)
    assert gate.saturations > 0
    accesses = [*settings_of(TINY, settings), *read("saturations", "error", cycle=LATE)]
    plain = Gated.of(TINY, workload(TINY, 26, tokens=9, heads=3), settings).plain
    result = drive(
        TINY, runs=[(geometry.beats(TINY), START)], jobs=[(head, START) for head in plain], accesses=accesses
    )
    saturations, error = registers_read(TINY, accesses, result)
    assert saturations["count"] == gate.saturations
    assert error["transport"] == gate.transport_error and error["saturated"] == gate.field_saturated


def test_errors_of_the_engine_stay_over_runs_until_clear() -> None:
    """Factors and probes at their limits in the first run, a second without an error."""
    settings = PrunerSettings.open(Source.HOLONOMY)
    good = Gated.of(TINY, workload(TINY, 26, tokens=9, heads=2), settings)
    assert good.geometry.probes is not None and good.geometry.factors is not None
    bad = replace(
        good.geometry,
        probes=np.where(good.geometry.probes < 0, -(1 << 15), (1 << 15) - 1),
        factors=np.where(good.geometry.factors < 0, -127, 127),
    )
    wanted = GoldenGate(TINY).run(bad, settings).transport_error
    assert wanted is TransportError.RANGE and good.gate.transport_error is TransportError.NONE
    accesses = [
        *settings_of(TINY, settings),
        *read("error", "status", cycle=2 * LATE),
        Access(register(TINY, "control"), 2 * LATE + 20, 1),
        *read("error", "status", cycle=2 * LATE + 100),
    ]
    result = drive(
        TINY,
        runs=[(geometry.beats(TINY), START) for geometry in (bad, good.geometry)],
        jobs=[(head, START) for head in (*good.plain, *good.plain)],
        accesses=accesses,
    )
    error, status, cleared, after = registers_read(TINY, accesses, result)
    assert error["transport"] == wanted and status["failed"]
    assert not any(cleared.values()) and not after["failed"]


def test_a_run_waits_while_256_rows_are_untaken() -> None:
    """Three runs of 128 rows without a job start, the fourth when jobs have taken rows."""
    big = table_run(27, tokens=64, heads=16)
    refused = table_run(27, tokens=8).plain[0].beats(TINY).copy()
    refused.reshape(-1)[0] = 0
    accesses = [
        *settings_of(TINY, POLICY),
        *read("heads", "status", cycle=LATE),
        *read("heads", "status", cycle=2 * LATE),
    ]
    result = drive(
        TINY,
        runs=[(big.geometry.beats(TINY), START)] * 4,
        aborted_jobs=[(refused, LATE + 100)] * 64,
        accesses=accesses,
        beats=64 * status_beats(TINY),
    )
    heads, status, after, idle = registers_read(TINY, accesses, result)
    assert heads["count"] == 48 and status == {"busy": 0, "rows": 1, "failed": 0}
    assert after["count"] == 64 and idle == {"busy": 0, "rows": 0, "failed": 0}


def test_a_refused_job_takes_its_rows_with_it() -> None:
    gated = table_run(14, heads=2)
    beats = gated.plain[0].beats(TINY).copy()
    beats.reshape(-1)[0] = 0
    accesses = [*settings_of(TINY, POLICY), *read("error", cycle=LATE)]
    result = drive(
        TINY,
        runs=[(gated.geometry.beats(TINY), START)],
        aborted_jobs=[(beats, START)],
        jobs=[(gated.plain[1], START)],
        accesses=accesses,
        beats=status_beats(TINY) + output_beats(TINY, gated.plain[1].job),
    )
    view = stream_view(TINY, result)
    first = status_beats(TINY)
    rest = type(view)(data=view.data[first:], user=view.user[first:], last=view.last[first:])
    assert compare_outputs(TINY, gated.heads[1:], gated.golden[1:], rest)[0] == []
    assert not any(registers_read(TINY, accesses, result)[0].values())


def test_geometry_of_one_head_is_flat() -> None:
    """A single head is paired with itself: two agreeing heads."""
    made = workload(TINY, 15, tokens=16, heads=1)
    scores, _, _ = holonomy_scores(TINY, quantise_geometry(TINY, made, Source.HOLONOMY))
    assert scores.max() <= 16
