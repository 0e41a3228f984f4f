"""The bench: every row has a case, cases are what they say, a wrong result is a missed row, and the report tells it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dtp.attention import golden
from dtp.config import PRESETS, Config
from dtp.errors import DtpError
from dtp.holonomy import LoopAccounts, LoopParams
from dtp.loops import LoopGraph, LoopType, run_program, sample_loops
from dtp.pruner import Source
from dtp.quantise import quantise
from dtp.softmax import probabilities_real
from dtp.solve import MiddleMode
from dtp.transport import quantise_solve, quantise_state
from dtp.units import Unit
from dtp.workload import Mode
from sim.bench import SimulationError
from sim.cycles.attention import Prediction
from tools import docs
from tools.bench import __main__ as command
from tools.bench import accuracy, cases, commutator, gated, hardware, holonomy, report
from tools.bench.cases import Case
from tools.bench.hardware import Run
from tools.bench.measured import Bench, Measured, Sheet
from tools.bench.rows import ROWS, Row
from tools.gated import GatePolicy, gated_models

MEASURED = Measured("fine", True, {})
BASE: dict[str, Any] = {
    "row": "rtl-golden",
    "preset": "tiny",
    "heads": 1,
    "tokens": [21, 8],
    "width": 13,
    "modes": ["dot", "riemannian"],
    "masks": ["none", "causal+blocks", "padding", "empty"],
    "widths": {"operand": 8, "probability": 12, "lifted": Config.load("tiny").lifted_bits, "output": 16},
    "seed": 5,
}


# ---- cases -------------------------------------------------------------------------------------------------


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert {case.row for case in cases.load()} == set(names)
    assert set(cases.reasons()) <= set(names)


def test_a_row_without_a_case_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tuple(case for case in cases.load() if case.row != "masked-wide")
    monkeypatch.setattr(cases, "load", lambda: kept)
    with pytest.raises(DtpError, match=r"row masked-wide must have a case in cases\.toml, not none"):
        command.chosen_rows(None, with_install=False, quick=False)
    assert command.main(["--row", "rtl-golden"]) == 2


def test_every_case_states_what_the_table_asks_for() -> None:
    for case in cases.load():
        assert case.preset in (*PRESETS, cases.RANDOM_PRESET)
        assert case.tokens and case.width and case.modes and case.masks
        assert f"seed {case.seed}" in case.describe()
        for config in [case.config] if case.preset in PRESETS else []:
            assert max(case.tokens) <= config.max_tokens
            assert max(case.width) <= config.max_width


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": None}, "Case.seed must be an integer of at least 0, not None"),
        ({"preset": "huge"}, "Case.preset must be one of tiny, ecp5-85k, wide, random, not 'huge'"),
        ({"modes": "cosine"}, "Case.modes must be one of dot, euclidean, riemannian, blended, not 'cosine'"),
        ({"masks": "causal+odd"}, "Case.masks must be made of none, causal, padding, blocks, empty, not 'causal+odd'"),
        ({"tokens": [0]}, "Case.tokens must be integers of at least 1, not 0"),
        (
            {"source": "dream"},
            f"Case.source must be one of {', '.join(cases.SOURCES)}, not 'dream'",
        ),
        ({"fractions": [0.5, 1.5]}, "Case.fractions must be more than 0 and at most 1, not 1.5"),
        ({"transport_rank": -1}, "Case.transport_rank must be an integer of at least 0, not -1"),
        ({"colour": 1}, "Case.key must be one of row, preset,"),
        ({"widths": {"operand": 16}}, "Case.widths must be those of tiny,"),
        ({"preset": "random"}, "Case.widths must be empty for drawn configurations,"),
    ],
)
def test_a_wrong_case_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError) as refused:
        Case.from_mapping(BASE | change)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("missing", list(BASE))
def test_a_case_that_leaves_something_out_is_refused(missing: str) -> None:
    with pytest.raises(DtpError, match=f"Case.{missing} must be given"):
        Case.from_mapping({key: value for key, value in BASE.items() if key != missing})


def test_masks_are_what_their_names_say_seed_5() -> None:
    case = Case.from_mapping(BASE)
    made = list(case.workloads())
    assert len(made) == 8
    assert [workload.mode for workload in made] == [Mode.DOT] * 4 + [Mode.RIEMANNIAN] * 4
    assert [workload.tokens for workload in made] == [21, 8] * 4
    plain, some, padded, empty = made[:4]
    assert (plain.causal, plain.block_mask, plain.valid_length) == (False, None, 21)
    assert some.causal and some.block_mask is not None and some.kept_fraction <= 1
    assert padded.valid_length == round(0.75 * 21)
    assert empty.allow_empty_rows and not empty.keep_mask(0).any(axis=1).all()
    again = list(case.workloads())
    assert all((one.q == two.q).all() for one, two in zip(made, again, strict=True))


def test_golden_cases_cover_modes_masks_presets_and_odd_shapes() -> None:
    found = cases.of_row("rtl-golden")
    parts = {frozenset(mask.split("+")) for mask in found[0].masks}
    assert len(parts) == len(found[0].masks) == 10
    for preset in PRESETS:
        (broad,) = [case for case in found if case.preset == preset and len(case.modes) > 1]
        assert set(broad.modes) == set(Mode)
        assert broad.masks == found[0].masks
        assert broad.stalls > 0
        assert any(tokens % broad.config.block for tokens in broad.tokens)
        assert broad.config.max_tokens in {t for case in found if case.preset == preset for t in case.tokens}


@pytest.mark.parametrize("row", ["masked-ecp5", "masked-wide"])
def test_exactly_half_of_the_blocks_of_each_head_are_masked(row: str) -> None:
    (case,) = cases.of_row(row)
    dense, masked = case.workloads()
    assert dense.block_mask is None and masked.block_mask is not None
    assert (case.heads, case.tokens, case.width, case.modes) == (8, (128,), (64,), ("dot",))
    kept = masked.blocks_kept()
    assert (kept.sum(axis=(1, 2)) * 2 == kept[0].size).all()
    assert kept.any(axis=2).all()
    assert len({mask.tobytes() for mask in kept}) == case.heads


def test_enough_cycle_cases_are_drawn() -> None:
    count = sum(
        len(case.modes) * len(case.masks) * case.heads * (case.count or 1) for case in cases.of_row("cycle-model")
    )
    assert count >= 1.1 * hardware.LEAST_CYCLE_CASES


def test_drawn_configurations_are_seeded_and_vary() -> None:
    def draw() -> list[Config]:
        rng = np.random.default_rng(3)
        return [hardware.random_configuration(rng, number) for number in range(12)]

    drawn = draw()
    assert drawn == draw()
    assert len({config.hash for config in drawn}) == 12
    varied = "segments rows operand_bits lookahead max_frame_rank entry_beats output_entry_beats"
    for name in varied.split():
        assert len({getattr(config, name) for config in drawn}) > 1, name


# ---- what a row makes of a wrong result --------------------------------------------------------------------


def run_of(**changes: Any) -> Run:
    return dataclasses.replace(Run(outputs=10, cycles=1000, differences=(), late=None, macs=1_000_000), **changes)


def test_a_single_difference_is_a_missed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.from_mapping(BASE)
    monkeypatch.setattr(hardware, "run_heads", lambda *_a, **_k: run_of())
    good = hardware.rtl_golden(Bench(), [case])
    assert (good.met, good.figures["jobs"], good.figures["outputs_compared"]) == (True, 8, {"tiny": 10})
    monkeypatch.setattr(hardware, "run_heads", lambda *_a, **_k: run_of(differences=("head 0: 1 of 8 outputs differ",)))
    bad = hardware.rtl_golden(Bench(), [case])
    assert bad.met is False
    assert "1 differences" in bad.text and bad.notes == ("tiny: head 0: 1 of 8 outputs differ",)


def test_a_late_beat_or_too_few_cases_miss_the_cycle_row(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.from_mapping(BASE)
    monkeypatch.setattr(hardware, "run_heads", lambda *_a, **_k: run_of())
    assert hardware.cycle_model(Bench(), [case]).met is False
    short = hardware.cycle_model(Bench(quick=True), [case])
    assert (short.met, short.figures["cases"]) == (True, 8)
    monkeypatch.setattr(hardware, "run_heads", lambda *_a, **_k: run_of(late="1 of 9 beats in another cycle"))
    late = hardware.cycle_model(Bench(quick=True), [case])
    assert (late.met, late.figures["cases"]) == (False, 0)


def test_utilisation_and_ratio_are_computed_from_the_cycles_of_the_rtl(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = cases.of_row("utilisation-idle")
    macs = 1000 * case.config.macs
    for cycles, met in ((1000, True), (1030, True), (1050, False), (0, False)):
        monkeypatch.setattr(hardware, "run_workload", lambda *_a, n=cycles: run_of(cycles=n, macs=macs))
        assert hardware.utilisation_idle(Bench(), [case]).met is met
    monkeypatch.setattr(hardware, "run_workload", lambda *_a: run_of(macs=macs, differences=("wrong",)))
    assert hardware.utilisation_idle(Bench(), [case]).met is False
    (case,) = cases.of_row("masked-wide")
    for second, met in ((540, True), (560, False)):
        answers = iter([run_of(cycles=1000), run_of(cycles=second)])
        monkeypatch.setattr(hardware, "run_workload", lambda *_a, a=answers: next(a))
        found = hardware.masked_wide(Bench(), [case])
        assert (found.met, found.figures["ratio"]) == (met, second / 1000)


def test_bits_and_cycles_of_the_real_verilog_seed_5(monkeypatch: pytest.MonkeyPatch) -> None:
    # One simulator for both rows: the other tests use it too.
    real = hardware.run_heads
    monkeypatch.setattr(hardware, "run_heads", lambda *given, **options: real(*given, **options | {"cocotb": True}))
    case = Case.from_mapping(BASE | {"stalls": 0.25})
    bench = Bench()
    try:
        found = hardware.rtl_golden(bench, [case])
        assert found.met, found
        assert found.figures["outputs_compared"] == {"tiny": 4 * 13 * (21 + 8)}
        equal = hardware.cycle_model(dataclasses.replace(bench, quick=True), [case])
        assert equal.met, equal
    finally:
        bench.close()


# ---- gated attention ---------------------------------------------------------------------------------------

GATED = BASE | {"heads": 2, "tokens": 32, "modes": "riemannian", "masks": "none", "transport_rank": 2}


def test_rows_made_once_serve_every_mask_seed_5() -> None:
    """A second run over rows that were already made takes the cycles of a model that makes them itself."""
    case = Case.from_mapping(GATED)
    (workload,) = case.workloads()
    layer = gated.GatedLayer(case.config, workload)
    for policy in (GatePolicy(budget=1), GatePolicy(budget=3), GatePolicy(kept=0.5), GatePolicy(theta=0)):
        found = gated_models(case.config, workload, policy, reference=False, progress=lambda _what, _part: None)
        run = layer.run(policy)
        assert run.cycles == found.models.prediction.total_cycles and run.kept == found.gate.kept_fraction
        assert (layer.dense(), run.first) == (found.cycles_dense, layer._made[found.settings.gate, 1][0])
    second = layer.run(GatePolicy(budget=1), layers=2).cycles - layer.run(GatePolicy(budget=1)).cycles
    assert 0 < second < layer.run(GatePolicy(budget=1)).cycles
    assert layer.token_cycles[0] > 0
    with pytest.raises(DtpError, match=r"^Case\.fractions must be whole blocks of 4, not 0\.3$"):
        layer.budget(0.3)


class FakeLayer:
    """Cycles of f · 1000, and of the first field."""

    field = 0

    def __init__(self, config: Config, _workload: Any) -> None:
        self.config = config
        self.token_cycles = (70.0, 64.0)

    def dense(self, layers: int = 1) -> int:
        return 1000 * layers

    def budget(self, fraction: float) -> GatePolicy:
        return GatePolicy(kept=fraction)

    def run(self, policy: GatePolicy, layers: int = 1) -> gated.GatedRun:
        kept = 1.0 if policy.kept is None else policy.kept
        cycles = max(400, round(1000 * kept)) * layers + self.field
        return gated.GatedRun(kept, cycles, 300 if kept < 0.4 else 0, self.field)


@pytest.mark.parametrize(("field", "met", "even_met"), [(40, True, True), (60, False, True), (250, False, False)])
def test_the_first_field_counts(monkeypatch: pytest.MonkeyPatch, field: int, met: bool, even_met: bool) -> None:
    monkeypatch.setattr(FakeLayer, "field", field)
    monkeypatch.setattr(gated, "GatedLayer", FakeLayer)
    case = Case.from_mapping(GATED | {"fractions": [0.25, 0.5, 1.0]})
    opened = gated.gate_open(Bench(), [case])
    assert (opened.met, opened.figures["tiny, L = 32"]["ratio"]) == (met, 1 + field / 1000)
    kept = gated.gate_cycles(Bench(), [case])
    assert kept.met is met and kept.text.startswith("3 of 3" if met else "0 of 3")
    (sheet,) = kept.sheets
    assert [row[0] for row in sheet.rows] == ["0.25", "0.5", "1", "0.5, threshold"]
    assert [row[-1] for row in sheet.rows] == ["gate", "array", "array", "array"]
    assert sheet.rows[0][3:5] == ("", "") and sheet.rows[1][3] == "≤ 0.550"
    dot = Prediction(np.zeros(0, dtype=np.int64), 0, 0, {})
    monkeypatch.setattr(gated, "predict", lambda _c, heads: dataclasses.replace(dot, total_cycles=500 * len(heads)))
    even = gated.break_even(Bench(), [case])
    found = even.figures["tiny, L = 32"]
    assert found["without_first_field"] == pytest.approx(1.0)
    assert found["with_first_field"] == pytest.approx(1 - field / 1000) and even.met is even_met


def test_break_even_lies_between_measured_fractions() -> None:
    assert gated.crossing([0.25, 0.5, 1.0], [400, 500, 1000], 750) == pytest.approx(0.75)
    assert gated.crossing([0.25, 0.5, 1.0], [400, 390, 1000], 395) == pytest.approx(0.5 + 0.5 * 5 / 610)
    assert gated.crossing([0.5, 1.0], [500, 1000], 1200) == 1.0
    assert gated.crossing([0.5, 1.0], [500, 1000], 400) == 0.0


def test_open_gates_are_compared_bit_for_bit_seed_5(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.from_mapping(BASE | {"heads": 2, "masks": ["none", "causal+padding"], "transport_rank": 1})
    good = gated.gate_equal(Bench(), [case])
    assert good.met and good.figures["heads"] == 8
    assert good.figures["outputs_compared"] == {"tiny": 2 * 2 * 13 * (21 + 8)}
    real = gated.gated_golden

    def one_bit(*given: Any, **options: Any) -> Any:
        result = real(*given, **options)
        return dataclasses.replace(result, outputs=result.outputs ^ (np.arange(result.outputs.size) == 3).reshape(
            result.outputs.shape
        ))

    monkeypatch.setattr(gated, "gated_golden", one_bit)
    bad = gated.gate_equal(Bench(), [case])
    assert bad.met is False and bad.figures["differences"][0].endswith("1 of 273 outputs differ")


def test_drawn_gates_vary_and_are_seeded() -> None:
    (case,) = cases.of_row("gated-rtl")
    drawn, again = list(gated.drawn_gates(case)), list(gated.drawn_gates(case))
    assert len(drawn) == case.count >= 24
    assert sum(stalls > 0 for _, _, stalls in drawn) == case.count // 2
    assert {policy.source for _, policy, _ in drawn} == {Source.HOLONOMY, Source.TABLE, Source.BOTH}
    assert {workload.mode for workload, _, _ in drawn} == set(Mode)
    ways = [[name for name in ("kept", "theta", "budget", "band") if getattr(p, name) is not None] for _, p, _ in drawn]
    assert {way[0] if way else "open" for way in ways} == {"open", "kept", "theta", "budget", "band"}
    assert any(workload.torsion_l is not None for workload, _, _ in drawn)
    assert len({workload.tokens for workload, _, _ in drawn}) > 8
    assert all((one.q == two.q).all() and p == q for (one, p, _), (two, q, _) in zip(drawn, again, strict=True))


def test_a_difference_of_the_gated_top_is_a_missed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = cases.of_row("gated-rtl")
    short = dataclasses.replace(case, count=4)
    faults: dict[str, Any] = {}

    def fake(_config: Config, workload: Any, _policy: GatePolicy, **_options: Any) -> Any:
        fields = {"differences": (), "outputs_compared": workload.q.size, "cycles_equal": True, "skipped_heads": 0}
        return SimpleNamespace(**(fields | {"kept_fraction": 0.5} | faults))

    monkeypatch.setattr(gated, "cosim_gated", fake)
    good = gated.gated_rtl(Bench(), [short])
    assert (good.met, good.figures["cases"], good.figures["cases_without_stalls"]) == (True, 4, 2)
    for name, value in {"differences": ("register kept: 1",), "outputs_compared": 1, "cycles_equal": False}.items():
        faults = {name: value}
        assert gated.gated_rtl(Bench(), [short]).met is False, faults


def test_the_area_of_the_gated_top_is_set_against_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import fpga

    (case,) = cases.of_row("gated-area")
    monkeypatch.setattr(fpga, "load_committed", lambda _name: None)
    assert gated.gated_area(Bench(), [case]).text == "not measured"
    tile = {"name": "x", "lut4": 10_000, "ff": 12_000, "dsp": 138, "bram": 136, "fmax_mhz": 120.0, "routed": True}
    tile |= {"config_hash": case.config.hash, "device": "LFE5U-85F"}
    whole = tile | {"lut4": 16_000, "ff": 20_000, "dsp": 156, "bram": 208, "fmax_mhz": 100.0}
    # What is packed now counts; a report of a netlist that is another one, or of no clock, does not.
    changes: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
        ({}, {}, True), ({}, {"lut4": 15_900}, True), ({"lut4": 16_001}, {}, False),
        ({"dsp": 157}, {"dsp": 157}, False), ({"bram": 209}, {"bram": 209}, False), ({}, {"fmax_mhz": 99.9}, False),
        ({}, {"fmax_mhz": None, "routed": False}, False), ({}, {"config_hash": "other"}, False),
        ({}, {"lut4": 15_839}, False), ({}, {"ff": 20_201}, False), ({}, {"bram": 207}, False),
        ({}, {"dsp": 155}, False),
    ]  # fmt: skip
    for now, then, met in changes:
        packed = {Unit.ATTENTION: SimpleNamespace(**tile), Unit.GATED: SimpleNamespace(**(whole | now))}
        report = SimpleNamespace(**(whole | then))
        monkeypatch.setattr(fpga, "load_committed", {"gated-ecp5-85k": report}.__getitem__)
        monkeypatch.setattr(Bench, "packed", lambda _bench, _config, unit, packed=packed: packed[unit])
        found = gated.gated_area(Bench(), [case])
        assert found.met is met, (now, then)
        other = {"config_hash", "ff"} & set(then) or then in ({"lut4": 15_839}, {"bram": 207}, {"dsp": 155})
        assert ("(another netlist)" in found.text) == bool(other), (now, then)


def test_the_study_of_pruning_is_quoted() -> None:
    (case,) = cases.of_row("pruning")
    found = gated.pruning(Bench(), [case])
    assert found.met is None and "docs/pruning.md" in found.text and found.text.startswith("50 % kept, ")
    assert found.figures["digits, transport model, block 8, oracle"]["accuracy"] is not None
    with pytest.raises(DtpError, match=r"must have points with 0\.1 of the blocks kept"):
        gated.pruning(Bench(), [dataclasses.replace(case, kept=0.1)])


# ---- holonomy, commutator ----------------------------------------------------------------------------------


def torsion_workload(seed: int, size: float = 1.0) -> Any:
    """Two heads of 24 tokens with torsion; all transports scaled."""
    made = cases.masked_workload(
        Config.load("tiny"), mode="riemannian", mask="none", tokens=24, width=16, heads=2, seed=seed, kept=1.0,
        valid=1.0, transport_rank=2, torsion=True,
    )  # fmt: skip
    names = ("connection_a", "connection_b", "torsion_l", "torsion_r")
    return dataclasses.replace(made, **{name: size * getattr(made, name) for name in names})


def test_means_over_pairs_are_taken_one_by_one_seed_3() -> None:
    random = np.random.default_rng(3)
    transports = np.linalg.qr(random.standard_normal((2, 5, 4, 4)))[0]
    probes = random.standard_normal((2, 4))
    means = holonomy.pair_means(transports, probes, 2)
    u = [transports[1, t].T @ transports[0, t] @ probes[0] for t in range(5)]
    pairs = [((u[i] - u[j]) ** 2).sum() / (probes[0] @ probes[0]) for i in (2, 3) for j in (4,)]
    assert means.shape == (2, 3, 3) and means[0, 1, 2] == pytest.approx(np.mean(pairs))


def test_columns_and_formulas_give_the_same_transports_seed_4() -> None:
    pytest.importorskip("torch")
    made = torsion_workload(4)
    exact = holonomy.exact_transports(made)
    assert np.allclose(holonomy.cayley(holonomy.columns_of(made)), exact)
    w, v = holonomy.cayley_form(holonomy.columns_of(made))
    unit = np.eye(16)
    assert np.allclose(unit + w @ v.swapaxes(-1, -2), exact)
    both_w, both_v = holonomy.composed((w[:, :3], v[:, :3]), (w[:, 3:6], v[:, 3:6]))
    assert np.allclose(unit + both_w @ both_v.swapaxes(-1, -2), exact[:, 3:6] @ exact[:, :3])
    config = Config.load("tiny").changed(factor_bits=16)
    assert np.allclose(holonomy.rounded_transports(config, made), exact, atol=1e-3)


def test_loops_step_by_step_are_those_of_the_golden_walk_seed_2() -> None:
    pytest.importorskip("torch")
    made, config = torsion_workload(2), Config.load("tiny")
    columns = holonomy.columns_of(made)
    factors = quantise_solve(config, MiddleMode.CAYLEY, columns.reshape(-1, 16, 8))
    engine = holonomy.engine_of(config, factors, made.tokens, MiddleMode.CAYLEY)
    probes, _ = quantise_state(made.probes(1)[:, 0].astype(np.float64))
    program = sample_loops(LoopGraph(holonomy._extent(config, made)), LoopType.C, 5, seed=2).program

    def one(step: Any, state: Any) -> Any:
        taken = engine([step], state[None])
        return taken.states[0], bool(taken.saturated)

    accounts = LoopAccounts(LoopParams.of(config, multipliers=1, heads=2), floor=1)
    run_program(program, probes, one, accounts)
    together = holonomy.run_loops(config, program, probes, engine).energies
    assert together.tolist() == [record.ratio * 2.0**-24 for record in accounts.records]
    exact = holonomy.walk_loops(program, holonomy.exact_transports(made), probes.astype(np.float64))
    assert np.allclose(together, exact, rtol=0.2)


def holonomy_rows(monkeypatch: pytest.MonkeyPatch, size: float = 1.0) -> dict[str, Measured]:
    """The three rows on small seeded workloads in place of the digits."""
    pytest.importorskip("torch")
    made = [("one", torsion_workload(seed, size)) for seed in (6, 7)]
    monkeypatch.setattr(holonomy, "digit_layers", lambda *_: iter(made))
    monkeypatch.setattr(holonomy, "LOOPS", 6)
    case = Case.from_mapping(GATED | {"source": "transport"})
    rows = (holonomy.holonomy_score, holonomy.holonomy_loops, holonomy.gauge)
    return {row.__name__: row(Bench(), [case]) for row in rows}


def test_holonomy_on_small_transports_seed_6(monkeypatch: pytest.MonkeyPatch) -> None:
    found = holonomy_rows(monkeypatch)
    score, loops, turned = found.values()
    assert score.met and score.figures["transport, int16"]["blocks"] == 2 * 2 * 9
    assert loops.met and loops.figures["least"] >= 0
    assert {row[0] for row in loops.sheets[0].rows} == {
        f"{name}, int{bits}" for name in holonomy.PROGRAMS for bits in (8, 16)
    }
    assert turned.met and turned.figures["frame_worst"] < turned.figures["destination_median"]


def test_a_wrong_engine_misses_the_rows_of_holonomy_seed_6(monkeypatch: pytest.MonkeyPatch) -> None:
    real, scores = holonomy.transport, holonomy.holonomy_scores

    def coarse(*given: Any, **options: Any) -> Any:
        result = real(*given, **options)
        return dataclasses.replace(result, outputs=result.outputs >> 12 << 12)

    monkeypatch.setattr(holonomy, "transport", coarse)
    monkeypatch.setattr(holonomy, "holonomy_scores", lambda *g: (scores(*g)[0] + 40, *scores(*g)[1:]))
    assert [row.met for row in holonomy_rows(monkeypatch).values()] == [False, False, False]


def test_the_commutator_takes_what_its_multiplications_take(monkeypatch: pytest.MonkeyPatch) -> None:
    found = commutator.commutator(Bench(), cases.of_row("commutator"))
    assert found.met and len(found.sheets[0].rows) == len(found.figures) == 20
    monkeypatch.setattr(commutator, "EXTRA_RATIO", 0.999)
    assert commutator.commutator(Bench(), cases.of_row("commutator")).met is False


# ---- softmax -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "causal+padding", "causal+blocks"])
def test_the_scores_are_those_behind_the_golden_outputs_seed_9(mask: str) -> None:
    """p from the scores, times v, is the golden output but for the rounding of sums and outputs."""
    config = Config.load("tiny")
    workload = cases.masked_workload(
        config, mode="riemannian", mask=mask, tokens=61, width=16, heads=1, seed=9, kept=0.5, valid=0.8
    )
    (head,) = quantise(config, workload)
    scores, kept = accuracy.head_scores(config, head)
    attention = probabilities_real(scores, kept, block=config.block, probability_bits=config.probability_bits)
    wanted = golden(config, head).outputs_real
    step = head.v_scale
    assert np.abs(attention @ head.values * step - wanted).max() < 0.25 * step
    assert (kept == workload.keep_mask(0)).all()


def test_the_error_of_a_softmax_is_seen_seed_0() -> None:
    config = Config.load("tiny")
    scores = accuracy.laplace_scores(0, 4, 64)
    kept = np.ones(scores.shape, dtype=np.bool_)
    assert np.allclose(accuracy.exact_softmax(scores, kept).sum(axis=1), 1)
    coarse, fine = (accuracy.softmax_error(config, scores, kept, bits) for bits in (8, 16))
    assert fine < 0.001 < coarse


# ---- report ------------------------------------------------------------------------------------------------


def test_the_budget_is_read_and_agrees_with_the_configurations() -> None:
    text = report.BUDGET.read_text(encoding="utf-8")
    for preset, (dot, riemannian) in report.budget_cycles(text).items():
        config = Config.load(preset)
        items = config.groups(128) * config.blocks(128)
        plain = config.chunks(64) * config.pass_steps
        assert (dot, riemannian) == (items * 2 * plain, items * (2 * plain + config.lifted_passes * config.pass_steps))
    units = report.budget_units(text)
    assert sum(dsp for unit, (dsp, _) in units.items() if unit != "all") == units["all"][0]
    assert report.budget_memory_blocks(text) == 171
    with pytest.raises(DtpError, match="must hold a table with the header"):
        report.budget_rows(text, "| nothing |")


def test_results_are_kept_and_shown(tmp_path: Path) -> None:
    row = ROWS[-1]
    result = report.result_of(row, Measured("0.40 ×", False, {"ratio": np.float64(0.4)}, ("the reason",)), 1.23)
    paths = (tmp_path / "r.json", tmp_path / "r.md")
    report.save({row.name: result}, *paths)
    assert report.load(paths[0]) == {row.name: result}
    text = paths[1].read_text(encoding="utf-8")
    assert f"| {row.what} | {row.reach} | – | 0.40 × | **no** |" in text
    assert "- why not: the reason" in text
    assert "Why rows are missed" in report.status_table({row.name: result})
    assert "not measured yet" in report.status_table({})
    with_sheet = dataclasses.replace(MEASURED, sheets=(Sheet("by kept fraction", ("f", "cycles"), (("0.5", "9"),)),))
    report.save({row.name: report.result_of(row, with_sheet, 0)}, *paths)
    assert "by kept fraction:\n\n| f | cycles |\n|---|---|\n| 0.5 | 9 |\n" in paths[1].read_text(encoding="utf-8")
    assert report.load(paths[0])[row.name].sheets[0]["rows"] == [["0.5", "9"]]
    paths[0].write_text('{"rows": [{"name": 1}]}', encoding="utf-8")
    with pytest.raises(DtpError, match="are not of this version"):
        report.load(paths[0])


def test_units_of_a_report_are_set_against_the_budget() -> None:
    (row,) = [row for row in ROWS if row.name == "fpga-lut4"]
    units = {"array": (128, 5000), "softmax": (0, 2000), "lift": (8, 900), "loader": (0, 100), "walker": (0, 50)}
    units["(top)"] = (0, 7)
    figures = {
        "dsp": 136, "lut4": 8057, "bram": 100,
        "per_unit": {name: {"dsp": dsp, "lut4": lut4} for name, (dsp, lut4) in units.items()},
    }  # fmt: skip
    text = report.budget_beside_result({row.name: report.result_of(row, Measured("", True, figures), 0)})
    assert "| `ecp5-85k`, LUT4, loader, lift | 2,000 | 1,000 |" in text
    assert "| `ecp5-85k`, LUT4, walker, streams and everything else | 700 | 57 |" in text
    assert "| `ecp5-85k`, DSP, all | 138 | 136 |" in text


# ---- command -----------------------------------------------------------------------------------------------


@pytest.fixture
def kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results go to a temporary folder, and the docs are left alone."""
    folder = tmp_path
    monkeypatch.setattr(report, "RESULTS_JSON", folder / "results.json")
    monkeypatch.setattr(report, "RESULTS_MD", folder / "results.md")
    save, load = report.save, report.load
    monkeypatch.setattr(report, "save", lambda results: save(results, folder / "results.json", folder / "results.md"))
    monkeypatch.setattr(report, "load", lambda: load(folder / "results.json"))
    monkeypatch.setattr(docs, "refresh", list)
    return folder


def row_that(name: str, outcome: Measured | Exception) -> Row:
    def measure(_bench: Bench, _cases: Sequence[Case]) -> Measured:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    (row,) = [row for row in ROWS if row.name == name]
    return dataclasses.replace(row, measure=measure)


def test_a_missed_row_ends_with_1_and_is_written_all_the_same(kept_apart: Path) -> None:
    good, bad = Measured("fine", True, {}), Measured("not fine", False, {})
    assert command.run([row_that("rtl-golden", good), row_that("softmax-worst", Measured("", None, {}))]) == 0
    broken = row_that("masked-wide", SimulationError("the build failed\nlast line"))
    assert command.run([row_that("masked-ecp5", bad), broken]) == 1
    rows = json.loads((kept_apart / "results.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["name"], row["met"]) for row in rows] == [
        ("rtl-golden", True), ("masked-ecp5", False), ("masked-wide", False), ("softmax-worst", None),
    ]  # fmt: skip
    assert rows[2]["measured"] == "failed: the build failed"


def test_a_short_run_writes_nothing(kept_apart: Path) -> None:
    assert command.run([row_that("rtl-golden", Measured("fine", True, {}))], quick=True) == 0
    assert list(kept_apart.iterdir()) == []
    names = [row.name for row in command.chosen_rows(None, with_install=False, quick=True)]
    assert "rtl-golden" in names and "masked-wide" not in names


def test_rows_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert [row.name for row in command.chosen_rows(["masked-wide"], False, False)] == ["masked-wide"]
    assert not any(row.install for row in command.chosen_rows(None, False, False))
    assert [row.name for row in command.chosen_rows(None, True, False)] == [row.name for row in ROWS]
    with pytest.raises(SystemExit) as refused:
        command.main(["--row", "nothing"])
    assert refused.value.code == 2
    assert "nothing" in capsys.readouterr().err
