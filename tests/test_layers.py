"""Imports run one way: ``dtp <- rtl <- sim <- tools``. A breach is named with file and line.

Two refinements: ``sim/cycles`` and ``sim/cost`` import only ``dtp`` (a prediction never reads the hardware
that it predicts), and ``rtl`` takes parameters and tables from ``dtp``, never a golden model.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("dtp", "rtl", "sim", "tools")

# Longest prefix wins: packages that a module below the prefix must not import.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "dtp": ("rtl", "sim", "tools", "tests", "amaranth", "cocotb", "torch"),
    "dtp.reference": ("rtl", "sim", "tools", "tests", "amaranth", "cocotb"),
    "rtl": ("sim", "tools", "tests", "cocotb", "torch", "dtp.reference"),
    "sim": ("tools", "tests", "torch"),
    "sim.cycles": ("rtl", "sim", "tools", "tests", "amaranth", "cocotb", "torch", "dtp.reference"),
    "sim.cost": ("rtl", "sim", "tools", "tests", "amaranth", "cocotb", "torch", "dtp.reference"),
    "tools": ("tests",),
}
# What a refined package may import although its parent is forbidden.
ALLOWED: dict[str, tuple[str, ...]] = {
    "sim.cycles": ("sim.cycles", "sim.cost"),
    "sim.cost": ("sim.cycles", "sim.cost"),
}


def _under(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported: ``from a import b`` yields ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def breaches(source: str, module: str, path: str, *, is_package: bool = False) -> list[str]:
    """One line ``path:line: rule`` for each import in ``source`` that the layers forbid."""
    tree = ast.parse(source)
    rule = max((key for key in FORBIDDEN if _under(module, key)), key=len)
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for line, name in _imports(tree, package):
        if any(_under(name, allowed) for allowed in ALLOWED.get(rule, ())):
            continue
        if any(_under(name, forbidden) for forbidden in FORBIDDEN[rule]):
            found.append(f"{path}:{line}: {rule} must not import {name}")
        if rule == "rtl" and name.startswith("dtp.") and "golden" in name.lower():
            found.append(f"{path}:{line}: rtl must not import the golden model {name}")
    if rule == "rtl":
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and "golden" in node.attr.lower():
                found.append(f"{path}:{node.lineno}: rtl must not use the golden model {node.attr}")
    return found


def _modules() -> list[tuple[Path, str]]:
    found = []
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)))
    return found


def test_imports_run_one_way() -> None:
    modules = _modules()
    assert {module.partition(".")[0] for _, module in modules} == set(LAYERS)
    found = []
    for path, module in modules:
        name, is_package = str(path.relative_to(ROOT)), path.name == "__init__.py"
        found += breaches(path.read_text(encoding="utf-8"), module, name, is_package=is_package)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("dtp.softmax", "import rtl.softmax"),
        ("dtp.softmax", "from sim import cycles"),
        ("dtp.softmax", "import torch"),
        ("dtp.softmax", "from amaranth.hdl import Module"),
        ("dtp.softmax", "from .reference import torch; from ..rtl import softmax"),
        ("dtp.reference.softmax", "import amaranth"),
        ("rtl.softmax", "from sim.bench import run_stream"),
        ("rtl.softmax", "from dtp.softmax import golden"),
        ("rtl.softmax", "from dtp.softmax import softmax_golden as compute"),
        ("rtl.softmax", "from dtp import softmax; table = softmax.golden"),
        ("rtl.softmax", "import importlib; importlib.import_module('tools.cli')"),
        ("sim.cycles.softmax", "from rtl.softmax import Softmax"),
        ("sim.cost.softmax", "from sim.bench import run_stream"),
        ("sim.cost.softmax", "from .. import bench"),
        ("sim.bench.stream", "def late():\n    from tools import cli"),
    ],
)
def test_breach_is_named_with_file_and_line(module: str, line: str) -> None:
    found = breaches("import numpy\n\n" + line, module, "some/file.py")
    assert len(found) == 1
    assert found[0].startswith("some/file.py:3: ") or found[0].startswith("some/file.py:4: ")


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("dtp.reference.softmax", "import torch; from dtp.softmax import golden"),
        ("rtl.softmax", "from dtp.softmax import SoftmaxParams; from .lib import fifo"),
        ("sim.cycles.softmax", "from dtp.softmax import golden; from .array import cycles"),
        ("sim.cost.softmax", "from sim.cycles.softmax import cycles"),
        ("sim.bench.stream", "from rtl.softmax import Softmax; from dtp.softmax import golden"),
        ("tools.cli", "from sim.bench import run_stream; import dtp.reference"),
    ],
)
def test_legal_import_passes(module: str, line: str) -> None:
    assert breaches(line, module, "some/file.py") == []


def test_contract_loads_without_torch_and_amaranth() -> None:
    """Every module of ``dtp`` outside ``dtp.reference`` loads without torch, amaranth and cocotb."""
    modules = [m for _, m in _modules() if _under(m, "dtp") and not _under(m, "dtp.reference")]
    assert "dtp.errors" in modules
    program = (
        "import sys\n"
        "for name in ('torch', 'amaranth', 'cocotb'): sys.modules[name] = None\n"
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
