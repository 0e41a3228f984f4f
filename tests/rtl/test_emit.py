"""The generated Verilog: the same each time, free of its maker's paths, with the ports it promises, and clean."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rtl.emit
from dtp.config import Config
from dtp.job import DESCRIPTOR_VERSION
from dtp.normaliser import NormaliserParams
from dtp.softmax import SoftmaxParams
from rtl.attention import array_params
from rtl.emit import Emitted, emit
from rtl.lib.multiplier import Target
from tests.tile import TINY, design_of, lint, verilog_of

ROOT = Path(rtl.emit.__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tiny() -> Emitted:
    return design_of(TINY)


def test_another_process_in_another_folder_gives_the_same_bytes(tiny: Emitted, tmp_path: Path) -> None:
    code = "import pathlib; from dtp.config import Config; from rtl.emit import emit;"
    code += "emit(Config.load('tiny')).write(pathlib.Path('.'))"
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "17"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, timeout=300)
    here = tmp_path / "here"
    here.mkdir()
    names = [path.name for path in tiny.write(here)]
    assert names == ["top.v", "manifest.json", "config.toml"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (here / name).read_bytes()
    assert sorted(path.name for path in here.iterdir()) == sorted(names)
    assert Config.load(here / "config.toml") == TINY


def test_no_path_of_this_machine(tiny: Emitted) -> None:
    """Sources are named from the project's folder on, those of libraries from theirs on."""
    sources = set(re.findall(r'src = "([^"]*)"', tiny.verilog))
    places = {place.rsplit(":", 1)[0] for source in sources for place in source.split("|")}
    assert "rtl/walker.py" in places
    assert [place for place in places if place.startswith("/") or ".." in place] == []
    for text in (str(ROOT), str(Path.home()), sys.prefix):
        assert text not in tiny.verilog


@pytest.mark.parametrize("name", ["tiny", "ecp5-85k"])
def test_manifest(name: str) -> None:
    config = Config.load(name)
    made = design_of(config).manifest
    assert made["module"] == "top"
    assert made["descriptor_version"] == DESCRIPTOR_VERSION
    assert made["config_hash"] == config.hash
    assert made["derived"] == config.derived
    assert Config.from_mapping(made["config"]) == config
    assert made["latencies"]["array_cycles"] == array_params(config).latency
    assert made["latencies"]["softmax"] == SoftmaxParams(config).latencies
    assert made["latencies"]["normaliser"] == NormaliserParams(config).latencies
    bits = {port["name"]: port["bits"] for port in made["ports"]}
    assert bits == {
        "clk": 1, "rst": 1, "abort": 1,
        "s_axis_tdata": 8 * config.input_bytes, "s_axis_tvalid": 1, "s_axis_tready": 1, "s_axis_tlast": 1,
        "m_axis_tdata": 8 * config.output_bytes, "m_axis_tvalid": 1, "m_axis_tready": 1, "m_axis_tlast": 1,
        "m_axis_tuser": config.rows,
    }  # fmt: skip


def test_ports_are_those_of_the_manifest(tiny: Emitted) -> None:
    header = re.search(r"^module top\((.*?)\);(.*?)^endmodule", tiny.verilog, re.MULTILINE | re.DOTALL)
    assert header is not None
    declared = {
        (name, direction, int(msb or 0) + 1)
        for direction, msb, name in re.findall(r"^  (input|output) (?:\[(\d+):0\] )?(\w+);", header[2], re.MULTILINE)
    }
    promised = {(port["name"], port["direction"], port["bits"]) for port in tiny.manifest["ports"]}
    assert declared == promised
    assert sorted(header[1].split(", ")) == sorted(name for name, _, _ in promised)


def test_explicit_multipliers_change_the_text_and_not_the_ports(tiny: Emitted) -> None:
    other = emit(TINY, target=Target.ECP5)
    assert "MULT18X18D" in other.verilog
    assert "MULT18X18D" not in tiny.verilog
    assert other.manifest == tiny.manifest | {"target": "ecp5"}


@pytest.mark.parametrize("name", ["tiny", "ecp5-85k"])
def test_lint(name: str) -> None:
    assert lint(verilog_of(Config.load(name))) == ""


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("wire [3:0] nobody; assign top_extra = nobody[0];", "UNDRIVEN"),
        ("reg kept; always @* if (rst) kept = 1'h1; assign top_extra = kept;", "LATCH"),
        ("assign top_extra = 4'h9;", "WIDTHTRUNC"),
    ],
)
def test_lint_finds_faults(tiny: Emitted, line: str, rule: str, tmp_path: Path) -> None:
    """The waivers hide nothing that is a fault of the description."""
    start = tiny.verilog.index("module top(")
    place = tiny.verilog.index(";", start) + 1
    broken = tmp_path / "top.v"
    broken.write_text(f"{tiny.verilog[:place]}\n  wire top_extra;\n  {line}\n{tiny.verilog[place:]}")
    assert f"-{rule}:" in lint(broken)
