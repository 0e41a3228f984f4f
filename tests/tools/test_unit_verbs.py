"""Loops and commutator of a workload as verbs: models against each other and PyTorch, comparisons, refusals."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tools.commutator
import tools.loops
from dtp.commutator import CommutatorMode, Layer
from dtp.config import Config
from dtp.errors import DtpError
from dtp.workload import Workload
from tools import verbs
from tools.bench.holonomy import engine_of, run_loops
from tools.cli import main
from tools.commutator import commutator_models, cosim_commutator, simulate_commutator
from tools.loops import cosim_loops, loop_models, simulate_loops
from tools.units import late, unequal
from tools.verbs import workload_random
from tools.workloads import random_workload

TINY = Config.load("tiny")
WIDE_FACTORS = TINY.changed(name="wide-factors", factor_bits=16)


def made(**changes: Any) -> Workload:
    """Two heads with transports, loops and a layer."""
    given: dict[str, Any] = {
        "tokens": 21, "width": 13, "heads": 3, "mode": "dot", "kept": 1.0, "causal": False, "seed": 5, "block": None,
        "transport_rank": 2, "loops": 14,
    }  # fmt: skip
    return random_workload(**(given | changes))


def layer_of(**changes: Any) -> Workload:
    given: dict[str, Any] = {"transport_rank": 0, "loops": 0, "width": 8, "heads": 2, "mlp_width": 40}
    return made(**(given | changes))


# ---- loops -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "median", "worst"), [(TINY, 0.03, 0.10), (WIDE_FACTORS, 0.001, 0.01)])
def test_energies_of_loops_are_those_of_float(config: Config, median: float, worst: float) -> None:
    result = simulate_loops(config, made())
    assert result.loops == 14 and result.steps == 56 and len(result.energies) == 14 and result.note is None
    assert result.error_median is not None and 0 < result.error_median <= median
    assert result.error_worst is not None and result.error_worst <= worst
    assert result.saturated_loops == 0 and result.transport_errors == ()
    # Each loop is credited to its two heads and to one block.
    assert sum(head.loops for head in result.heads) == 28 and sum(result.histogram) == 14
    assert sum(block.loops for row in result.blocks for block in row) == 14
    assert len(result.blocks) == len(result.blocks[0]) == TINY.blocks(21)
    total = sum(block.loops * block.mean for row in result.blocks for block in row)
    assert total == pytest.approx(sum(result.energies))
    assert max(head.maximum for head in result.heads) == max(result.energies)


def test_loops_step_by_step_are_those_of_all_together() -> None:
    """The model of the verb walks loop by loop, that of the bench a step of all loops at once."""
    workload = made()
    models = loop_models(TINY, workload)
    connections = tools.loops.quantise_connections(TINY, workload, workload.tokens)
    engine = engine_of(TINY, connections.factors, workload.tokens, connections.mode)
    starts = models.sent.starts
    words = len(starts) // len(models.program.loops)
    rows = [np.concatenate([starts[words * n + k]["data"] for k in range(words)]) for n in range(14)]
    probes = np.zeros((models.program.extent.probes, 13), dtype=np.int64)
    for loop, row in zip(models.program.loops, rows, strict=True):
        probes[loop[0].probe] = row[:13]
    assert run_loops(TINY, models.program, probes, engine).energies.tolist() == models.energies.tolist()


def test_linear_transports_walk_to_the_destination() -> None:
    result = simulate_loops(WIDE_FACTORS, made(transport="linear"))
    assert result.steps == 28 and result.error_worst is not None and 0 < result.error_worst < 0.01
    frame = made()
    assert frame.loops is not None
    linear = replace(made(transport="linear"), loops=frame.loops)
    with pytest.raises(DtpError, match=r"^Program\.edge 0 must be without an inverse.* not 'frame'$"):
        simulate_loops(TINY, linear)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loops": 0}, r"^Workload\.loops must be there for the unit loops, not None$"),
        ({"heads": 17}, r"^Workload\.heads must be at most 16 with the unit loops, not 17$"),
        ({"tokens": 65}, r"^Workload\.valid_length must be at most 64 with the unit loops, not 65$"),
        ({"width": 65}, r"^Workload\.width must be at most 64 with the unit loops, not 65$"),
        ({"transport_rank": 5}, r"^Workload\.connection_a must be of at most 8 columns .* not 10$"),
    ],
)
def test_loops_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError, match=message):
        simulate_loops(TINY, made(**change))


@pytest.mark.parametrize(("kind", "factor"), [("linear", 100), ("cayley", 1e-6)])
def test_transports_out_of_reach(kind: str, factor: float) -> None:
    workload = made(transport=kind)
    strong = {name: getattr(workload, name) * np.float32(factor) for name in ("connection_a", "connection_b")}
    with pytest.raises(DtpError, match=r"^Workload\.connection_a must be with .* neither too strong nor too weak"):
        simulate_loops(TINY, replace(workload, **strong))


def test_loops_stay_before_the_padding() -> None:
    workload = made(valid_length=9)
    assert workload.loops is not None and workload.loops[:, [4, 6]].max() == 8
    assert len(simulate_loops(TINY, workload, reference=False).blocks) == 2
    beyond = made().loops
    assert beyond is not None
    with pytest.raises(DtpError, match=r"^Program\.edge \d+ \w+_token must be in 0…8, not \d+$"):
        simulate_loops(TINY, replace(workload, loops=beyond))


def test_a_workload_is_one_layer() -> None:
    workload = made()
    assert workload.loops is not None
    loops = workload.loops.copy()
    loops[0, 7] = 1
    with pytest.raises(DtpError, match=r"^Program\.edge 0 target_layer must be in 0…0, not 1$"):
        simulate_loops(TINY, replace(workload, loops=loops))


@pytest.mark.parametrize("stalls", [0.0, 0.3])
def test_loops_in_verilog(stalls: float) -> None:
    result = cosim_loops(TINY, made(), stalls=stalls, seed=4, reference=False)
    assert result.passed and result.bit_exact and result.cycles_equal is (True if not stalls else None)
    assert result.words_compared == 14 + 16 + 8**2 + 32 and result.error_worst is None
    assert (result.cycles_rtl == result.cycles_model) is not bool(stalls)


def changed_run(monkeypatch: pytest.MonkeyPatch, module: Any, change: Callable[[Any], None]) -> None:
    """What the simulator gives, changed."""
    run = module.run_unit

    def changed(*given: Any, **more: Any) -> Any:
        result = run(*given, **more)
        change(result)
        return result

    monkeypatch.setattr(module, "run_unit", changed)


def one_bit(result: Any) -> None:
    channel = next(name for name in ("m_axis", "m_axis_energy") if result.outputs[name].payloads)
    result.outputs[channel].payloads[1] ^= 2


def one_cycle(result: Any) -> None:
    channel = next(name for name in ("m_axis", "m_axis_energy") if result.outputs[name].payloads)
    result.outputs[channel].cycles[2:] += 1


def one_flag(result: Any) -> None:
    name = "transport_error" if "transport_error" in result.plain else "saturations"
    result.plain[name] ^= 2


@pytest.mark.parametrize(
    ("change", "equal", "words"),
    [(one_bit, True, "1 of"), (one_cycle, False, "in another cycle, first word 2"), (one_flag, True, "in golden")],
)
def test_a_difference_is_found(
    change: Callable[[Any], None], equal: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_run(monkeypatch, tools.loops, change)
    changed_run(monkeypatch, tools.commutator, change)
    for result in (
        cosim_loops(TINY, made(), reference=False), cosim_commutator(TINY, layer_of(), "frozen", reference=False),
    ):  # fmt: skip
        assert not result.passed and words in result.differences[0]
        assert result.bit_exact is (not equal) and result.cycles_equal is equal


def test_differences_of_the_walks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = verbs.run_tile
    for change, words in (
        (lambda r: {"data": r.data ^ (np.arange(r.data.size) == 9).astype(np.uint8).reshape(r.data.shape)}, "outputs"),
        (lambda r: {"cycles": r.cycles + (np.arange(len(r.cycles)) > 4)}, "in another cycle, first beat 5"),
    ):
        monkeypatch.setattr(
            verbs, "run_tile", lambda *given, change=change: replace(r := run(*given), **change(r))
        )
        result = cosim_commutator(TINY, layer_of(), "frozen", reference=False)
        assert not result.passed and result.differences[0].startswith("walks: ") and words in result.differences[0]


def test_lines_of_a_comparison() -> None:
    assert unequal("o", [1, 2, 3], [1, 2, 3]) == [] == late("o", [4, 5], [4, 5])
    assert unequal("o", [1, 2], [1, 2, 3]) == ["o gave 2 words in RTL, 3 in golden"]
    assert unequal("o", [1, 7, 9], [1, 2, 3]) == ["2 of 3 words of o differ, first word 1: RTL 0x7, golden 0x2"]
    assert late("o", [], [4]) == ["0 words of o in RTL, 1 in the cycle model"]
    assert late("o", [4, 6], [4, 5]) == ["1 of 2 words of o come in another cycle, first word 1: RTL 6, cycle model 5"]


# ---- commutator --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", CommutatorMode)
def test_programs_give_what_the_whole_model_gives(mode: CommutatorMode) -> None:
    workload = layer_of(kv_heads=1, mode="riemannian", causal=True)
    models = commutator_models(TINY, Layer.of(workload), mode)
    energies, heads = models.result.energies, models.result.heads
    assert heads is not None
    for part, wanted in ((models.after, [energies.difference]), (models.heads, heads.difference)):
        records = np.concatenate([one.difference for one in part.wanted.energies])
        rows = TINY.groups(21) * TINY.rows
        assert [of_head[:21].tolist() for of_head in records.reshape(-1, rows)] == [list(one) for one in wanted]
    # What is stored before attention are the operands of the tile's jobs.
    steps = [step for step in models.before.program if step.store]
    names = {"v": "values"} | ({"q": "queries", "k": "keys"} if mode is CommutatorMode.FULL else {})
    assert {step.matrix for step in steps} == set(names)
    for name, operand in names.items():
        pairs = zip(steps, models.before.wanted.stored, strict=True)
        groups = {step.group: rows for step, rows in pairs if step.matrix == name}
        stored = np.concatenate([groups[n] for n in range(len(groups))])
        sent = np.concatenate([getattr(head, operand) for head in models.result.walks[0]], axis=1)
        assert stored[:21].tolist() == sent.tolist()


def own_ratios(workload: Workload, mode: CommutatorMode) -> list[float]:
    """Σ‖Δ‖² ÷ Σ‖Attn(h + Res(h))‖² of the layer and of each head, in float64 NumPy, written out; dot-product scores."""
    w = {name: np.asarray(value, dtype=np.float64) for name, value in workload.tensors().items()}
    heads, valid = workload.heads, workload.valid_length

    def norm(x: Any, name: str) -> Any:
        if name not in w:
            return x
        spread = np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
        return (x - x.mean(axis=1, keepdims=True)) / spread * w[name][0] + w[name][1]

    def residual(x: Any) -> Any:
        inner = norm(x, "ln_mlp") @ w["mlp_in"].T + w.get("b_mlp_in", 0)
        return inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) @ w["mlp_out"].T + w.get("b_mlp_out", 0)

    def split(x: Any, name: str) -> Any:
        return (x @ w[f"w_{name}"].T + w.get(f"b_{name}", 0)).reshape(len(x), heads, -1).transpose(1, 0, 2)

    def weights(x: Any) -> Any:
        normal = norm(x, "ln_attn")
        q, k = split(normal, "q"), split(normal, "k")
        scores = np.exp(q @ k.transpose(0, 2, 1)[..., :valid] / math.sqrt(q.shape[2]))
        return np.pad(scores / scores.sum(-1, keepdims=True), ((0, 0), (0, 0), (0, len(x) - valid)))

    h, found = w["hidden"], []
    x = h + residual(h)
    for head in (None, *range(heads)):

        def attend(p: Any, at: Any, head: int | None = head) -> Any:
            mixed = p @ split(norm(at, "ln_attn"), "v")
            if head is None:
                return mixed.transpose(1, 0, 2).reshape(len(at), -1) @ w["w_o"].T + w.get("b_o", 0)
            lanes = slice(head * mixed.shape[2], (head + 1) * mixed.shape[2])
            return mixed[head] @ w["w_o"][:, lanes].T

        attended, own = attend(weights(h if mode is CommutatorMode.FROZEN else x), x), attend(weights(h), h)
        delta = attended - own - residual(own)
        found.append(float((delta[:valid] ** 2).sum() / (attended[:valid] ** 2).sum()))
    return found


@pytest.mark.parametrize("mode", CommutatorMode)
@pytest.mark.parametrize("case", ["whole", "padded", "constant row", "zero matrix", "small matrix"])
def test_ratios_are_close_to_float(mode: CommutatorMode, case: str) -> None:
    workload = layer_of(**({"valid_length": 9} if case == "padded" else {}))
    assert workload.hidden is not None and workload.mlp_out is not None
    if case == "constant row":
        hidden = workload.hidden.copy()
        hidden[3] = 0.25
        workload = replace(workload, hidden=hidden)
    if case.endswith("matrix"):
        workload = replace(workload, mlp_out=workload.mlp_out * np.float32(0 if case == "zero matrix" else 1e-6))
    result = simulate_commutator(TINY, workload, mode)
    assert result.note is None and result.head_ratios_reference is not None and result.delta_error is not None
    exact = own_ratios(workload, mode)
    assert [result.ratio_reference, *result.head_ratios_reference] == pytest.approx(exact, rel=1e-4)
    # Where Res is next to nothing, Δ is what is left of the biases of Res, and the rounding of everything is in it.
    close = 0.25 if case.endswith("matrix") else 0.06
    assert [result.ratio, *result.head_ratios] == pytest.approx(exact, rel=close)
    assert 0 < result.delta_error < 2 * close
    assert len(result.token_ratios) == workload.valid_length and result.mode == mode and result.saturations < 9
    mean = sum(result.token_ratios) / len(result.token_ratios)
    assert min(result.token_ratios) < result.ratio < max(result.token_ratios)
    assert result.ratio / 3 < mean < 3 * result.ratio
    ratio = result.array_cycles_extra / result.array_cycles_layer
    assert 0.8 < ratio < 1.2 if mode is CommutatorMode.FROZEN else 1.2 < ratio < 1.6


@pytest.mark.parametrize("zeros", [("hidden",), ("w_o", "b_o"), ("w_v", "b_v"), ("mlp_in", "b_mlp_in", "mlp_out")])
def test_layers_of_zeros(zeros: tuple[str, ...]) -> None:
    workload = layer_of()
    workload = replace(workload, **{name: np.zeros_like(getattr(workload, name)) for name in zeros})
    result = simulate_commutator(TINY, workload)
    assert result.delta_error is not None and result.delta_error < 0.25
    assert result.ratio == pytest.approx(result.ratio_reference, rel=0.25)


def test_a_layer_without_output() -> None:
    """Without an output projection heads give 0; Δ of the layer is what its biases make."""
    workload = layer_of()
    assert workload.w_o is not None
    result = simulate_commutator(TINY, replace(workload, w_o=np.zeros_like(workload.w_o)), reference=False)
    assert result.head_ratios == (math.inf, math.inf) and 0 < result.ratio < 100
    assert json.loads(result.to_json())["head_ratios"] == [None, None]


@pytest.mark.parametrize("stalls", [0.0, 0.25])
@pytest.mark.parametrize("mode", CommutatorMode)
def test_commutator_in_verilog(mode: CommutatorMode, stalls: float) -> None:
    workload = layer_of(kv_heads=1, mode="riemannian", causal=True)
    result = cosim_commutator(TINY, workload, mode, stalls=stalls, seed=6, reference=False)
    assert result.passed and result.cycles_equal is (True if not stalls else None)
    groups = TINY.groups(21)
    projections = {CommutatorMode.FROZEN: 1, CommutatorMode.FULL: 3}[mode]
    assert (result.cycles_rtl == result.cycles_runs) is not bool(stalls)
    assert result.words_compared == groups * 16 * projections + groups * TINY.rows * 3 + 2 * 2 * 21 * 8


@pytest.mark.parametrize(
    ("workload", "mode", "message"),
    [
        (made(), "full", r"^Layer\.hidden must be there for a commutator, not None$"),
        (layer_of(), "half", r"^commutator\.mode must be one of frozen, full, not 'half'$"),
        (
            layer_of(kept=0.6, block=8), "full",
            r"^Workload\.block_mask must be absent for a commutator, not \(2, 3, 3\)$",
        ),
        (layer_of(heads=5), "full", r"^Layer\.model must be at most max_model 32 of configuration 'tiny', not 40$"),
    ],
)
def test_layers_that_are_refused(workload: Workload, mode: str, message: str) -> None:
    with pytest.raises(DtpError, match=message):
        simulate_commutator(TINY, workload, mode)


def test_the_example_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(tools.loops.__file__).parents[1] / "docs" / "workload.md").read_text(encoding="utf-8")
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "sample_loops" in code]
    exec(compile(example, "workload.md", "exec"), {})
    assert capsys.readouterr().out == "20 2\n"


# ---- the command -------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "w.safetensors", tmp_path / "r.json"
    workload_random(path, tokens=24, width=16, heads=2, transport_rank=2, loops=6, mlp_width=48)
    for unit, shown, key in (
        ("loops", "24 of 6 loops", "energies"), ("commutator", "beside the layer's own", "head_ratios"),
    ):  # fmt: skip
        for verb in ("simulate", "cosim"):
            assert main([verb, "tiny", str(path), "--unit", unit, "--json", str(out)]) == 0
            text = " ".join(capsys.readouterr().out.split())
            assert shown in text and ("PASS" in text) is (verb == "cosim")
            table = json.loads(out.read_text())
            assert len(table[key]) == {"loops": 6, "commutator": 2}[unit] and table["workload"]["loops"] == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--commutator-mode", "full"], "dtp.--commutator-mode must be absent without --unit commutator, not 'full'"),
        (["--unit", "loops", "--kept", "0.5"], "dtp.--kept must be absent without --unit gated, not 0.5"),
        (["--unit", "commutator", "--commutator-mode", "x"], "commutator.mode must be one of frozen, full, not 'x'"),
        (["--unit", "loops"], "Workload.loops must be there for the unit loops, not None"),
    ],
)
@pytest.mark.parametrize("verb", ["simulate", "cosim"])
def test_options_that_are_refused(
    verb: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.safetensors"
    workload_random(path, tokens=16, width=16, heads=2, transport_rank=2)
    assert main([verb, "tiny", str(path), *options]) == 2
    assert capsys.readouterr().err == f"dtp: {message}\n"


def test_waves_of_several_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.safetensors"
    workload_random(path, tokens=16, width=16, heads=2, mlp_width=16)
    assert main(["cosim", "tiny", str(path), "--unit", "commutator", "--waves", str(tmp_path / "x.vcd")]) == 2
    assert "--waves must be absent with --unit commutator" in capsys.readouterr().err
