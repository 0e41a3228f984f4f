"""The docs hold what the code says, and every command and example of the README works as printed."""

from __future__ import annotations

import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from dtp.config import PRESETS, Config
from dtp.errors import DtpError
from dtp.job import ErrorCode, StatusRecord
from tools import cli, docs
from tools.picture import tile_svg
from tools.verbs import emitted

README = (docs.ROOT / "README.md").read_text(encoding="utf-8")
# Verbs that take minutes, or need packages that the tests do not have: their lines are only parsed.
LONG = ("dtp fpga", "dtp demo", "dtp workload minilm", "dtp simulate ecp5-85k build/minilm.safetensors")


def test_generated_docs_are_current() -> None:
    assert docs.stale() == [], "python -m tools.docs refreshes them"


def test_a_changed_table_is_stale_and_made_again() -> None:
    page = "a\n<!-- generated:status-record -->\nold\n<!-- /generated:status-record -->\nb\n"
    made = docs.filled(page)
    assert made == page.replace("old\n", docs.status_table())
    assert docs.filled(made) == made


def test_unknown_and_open_parts_are_refused() -> None:
    with pytest.raises(DtpError, match=r"generated part must be one of descriptor, .*, not 'colours'"):
        docs.filled("<!-- generated:colours -->\n<!-- /generated:colours -->\n")
    with pytest.raises(DtpError, match="must be closed by <!-- /generated:errors -->"):
        docs.filled("<!-- generated:errors -->\n")


def test_every_generated_part_is_on_some_page() -> None:
    text = "".join((docs.ROOT / page).read_text(encoding="utf-8") for page in docs.PAGES)
    assert [name for name in docs.SECTIONS if f"<!-- generated:{name} -->" not in text] == []


def test_parameters_have_meaning_unit_and_all_presets() -> None:
    assert [name for name, text in docs.parameter_comments().items() if text == "name of the configuration"] == ["name"]
    table = docs.parameters_table().splitlines()
    assert len(table) == 2 + len(Config.model_fields) - 1 + 2
    for name in PRESETS:
        assert Config.load(name).hash in table[-1]
    with pytest.raises(StopIteration):
        docs.parameter_unit("flavour")


def test_status_and_error_tables_name_everything() -> None:
    table = docs.status_table()
    assert all(f"`{name}`" in table for name in StatusRecord.__dataclass_fields__)
    assert len(docs.errors_table().splitlines()) == 2 + len(ErrorCode)


def test_output_order_is_that_of_the_contract() -> None:
    """Step t, segment s, row r: value s·rows + r of a step is column t·segments + s of query r (docs/tile.md 5)."""
    for name, line in zip(PRESETS, docs.output_order_table().splitlines()[2:], strict=True):
        config = Config.load(name)
        per_beat = 8 * config.output_bytes // config.output_bits
        columns = np.arange(3 * per_beat) // config.rows
        for beat in range(3):
            first, last = (int(edge) for edge in columns[beat * per_beat : (beat + 1) * per_beat][[0, -1]])
            wanted = f"column {first}" if first == last else f"columns {first}–{last}"
            assert f"| queries 0–{config.rows - 1}, {wanted} |" in line


def test_ports_and_latencies_are_those_of_the_generated_design() -> None:
    config = Config.load("tiny")
    manifest = emitted(config).manifest
    assert docs.ports(config) == [(port["name"], port["direction"], port["bits"]) for port in manifest["ports"]]
    assert docs.latencies(config) == manifest["latencies"]


def test_a_table_of_a_docstring_is_read() -> None:
    text = "x\n\n===  ====\na    b\n===  ====\n1    2 3\nlo   4\n===  ====\ny\n"
    assert docs.rst_tables(text) == [[["a", "b"], ["1", "2 3"], ["lo", "4"]]]


def test_the_picture_is_xml_and_shows_every_unit() -> None:
    picture = ElementTree.fromstring(tile_svg())
    shown = {element.text for element in picture.iter() if element.text}
    units = {path.stem for path in (docs.ROOT / "rtl").glob("*.py")}
    assert {"loader", "lift", "array", "softmax", "normaliser", "walker"} <= shown & units


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in (*docs.PAGES, "docs/results.md"):
        place = docs.ROOT / page
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", place.read_text(encoding="utf-8")):
            assert (place.parent / target).exists(), f"{page}: {target}"


def commands() -> list[str]:
    """Lines of the README's shell blocks that call ``dtp``."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("dtp ")]


def test_commands_of_the_readme_work_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {line.split()[1] for line in commands()} == {
        "presets", "generate", "workload", "simulate", "cosim", "fpga", "demo",
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for line in commands():
        arguments = shlex.split(line)[1:]
        if line.startswith(LONG):
            assert cli.main([*arguments, "--help"]) == 0, line
            continue
        assert cli.main(arguments) == 0, f"{line}: {capsys.readouterr().err}"
    assert (tmp_path / "build" / "ecp5-85k" / "top.v").is_file()
    assert (tmp_path / "build" / "tiny.vcd").is_file()


def test_the_examples_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").mkdir()
    names: dict[str, object] = {}
    # The second goes on with the first's names.
    first, second, gated = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert all(len(example.splitlines()) <= 12 for example in (first, second, gated))
    exec(compile(first, "README.md", "exec"), names)
    assert capsys.readouterr().out == "(64, 16) True\n"
    exec(compile(second, "README.md", "exec"), names)
    assert cli.main(["simulate", "tiny", "build/own.safetensors"]) == 0
    (made,) = [line for line in commands() if "-o build/gated.safetensors" in line]
    assert cli.main(shlex.split(made)[1:]) == 0
    capsys.readouterr()
    exec(compile(gated, "README.md", "exec"), names)
    equal, kept, error = capsys.readouterr().out.split()
    assert equal == "True" and 0.4 < float(kept) < 0.6 and float(error) > 0


def test_the_command_refreshes_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("old", encoding="utf-8")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "generated", lambda: {page: "new"})
    assert docs.main(["--check"]) == 1
    assert docs.main([]) == 0
    assert page.read_text(encoding="utf-8") == "new"
    assert docs.main(["--check"]) == 0


def test_the_commutators_energies_reach_the_gate(capsys: pytest.CaptureFixture[str]) -> None:
    text = (docs.ROOT / "docs" / "commutator.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "commutator.md", "exec"), {})
    assert capsys.readouterr().out == "1\n"
