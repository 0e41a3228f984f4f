"""``docs/results.json`` and ``docs/results.md``: what the bench found, beside the budget."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtp.errors import DtpError
from tools.bench import cases as case_file
from tools.bench.measured import Measured
from tools.bench.rows import ROWS, Row

ROOT = Path(__file__).resolve().parents[2]
RESULTS_JSON = ROOT / "docs" / "results.json"
RESULTS_MD = ROOT / "docs" / "results.md"
BUDGET = ROOT / "docs" / "budget.md"


@dataclass(frozen=True)
class Result:
    """One row of ``docs/results.json``; ``commit`` is the state that was measured, ``+`` for changes on top of it."""

    name: str
    measured: str
    met: bool | None
    figures: dict[str, Any]
    notes: list[str]
    cases: list[str]
    command: str
    commit: str
    machine: str
    wall_s: float = field(default=0.0)
    sheets: list[dict[str, Any]] = field(default_factory=list)


def result_of(row: Row, measured: Measured, wall_s: float) -> Result:
    """A row as it is kept."""
    from tools.verbs import plain

    return Result(
        name=row.name,
        measured=measured.text,
        met=measured.met,
        figures=plain(measured.figures),
        notes=list(measured.notes),
        cases=[case.describe() for case in case_file.of_row(row.name)],
        command=command_of(row),
        commit=commit(),
        machine=machine(),
        wall_s=round(wall_s, 1),
        sheets=json.loads(json.dumps([asdict(sheet) for sheet in measured.sheets])),
    )


def command_of(row: Row) -> str:
    """What measures a row again."""
    return f".venv/bin/python -m tools.bench --row {row.name}"


def commit() -> str:
    """Short hash of the checked-out state, ``+`` when files of the project differ from it, ``unknown`` without git."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "dtp", "rtl", "sim", "tools")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def machine() -> str:
    """What the times depend on."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def load(path: Path = RESULTS_JSON) -> dict[str, Result]:
    """Results by row, empty when there is no file.

    Raises:
        DtpError: not a file of results.
    """
    if not path.exists():
        return {}
    try:
        return {entry["name"]: Result(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    except (ValueError, TypeError, KeyError) as error:
        raise DtpError(f"results {path} are not of this version: {error}") from None


def save(results: Mapping[str, Result], json_path: Path = RESULTS_JSON, md_path: Path = RESULTS_MD) -> None:
    """Write both files, rows in the order of the table."""
    from tools.verbs import write_text

    rows = [asdict(results[row.name]) for row in ROWS if row.name in results]
    write_text(json_path, json.dumps({"rows": rows}, indent=1, ensure_ascii=False) + "\n", "results")
    write_text(md_path, markdown(results), "results")


# ---- Markdown ----------------------------------------------------------------------------------------------


def verdict(met: bool | None) -> str:
    """One word for a row."""
    return {True: "yes", False: "**no**", None: "–"}[met]


def status_table(results: Mapping[str, Result]) -> str:
    """What, reach, measured, met: the table of the README."""
    lines = ["| what | reach | measured | met |", "|---|---|---|---|"]
    for row in ROWS:
        found = results.get(row.name)
        measured, met = ("not measured yet", "–") if found is None else (found.measured, verdict(found.met))
        lines.append(f"| {row.what} | {row.reach} | {measured} | {met} |")
    missed = [row for row in ROWS if row.name in results and results[row.name].met is False]
    if missed:
        lines += ["", "Why rows are missed:", ""]
        lines += [f"- *{row.what}*: {reason(row, results[row.name])}" for row in missed]
    return "\n".join(lines) + "\n"


def reason(row: Row, result: Result) -> str:
    """Why a row is missed: in words where they are written, else what the measurement said."""
    return case_file.reasons().get(row.name) or "; ".join(result.notes) or "the measured figure is not within reach"


def markdown(results: Mapping[str, Result]) -> str:
    """The whole of ``docs/results.md``."""
    lines = [
        "# Results",
        "",
        "Written by `make bench` (`.venv/bin/python -m tools.bench`); not edited by hand. `tools/cases.toml` holds",
        "the cases, `budget.md` the budget, `results.json` the same figures for programs.",
        "",
        "| what | reach | budget | measured | met |",
        "|---|---|---|---|---|",
    ]
    for row in ROWS:
        found = results.get(row.name)
        measured, met = ("not measured yet", "–") if found is None else (found.measured, verdict(found.met))
        lines.append(f"| {row.what} | {row.reach} | {row.budget or '–'} | {measured} | {met} |")
    lines += ["", "## Budget beside result", "", budget_beside_result(results), "## Row by row", ""]
    for row in ROWS:
        lines += _section(row, results.get(row.name))
    return "\n".join(lines).rstrip() + "\n"


def _section(row: Row, found: Result | None) -> list[str]:
    why = f" Why this number: {row.why}." if row.why else ""
    lines = [f"### {row.name}", "", f"{row.what}: {row.reach}.{why}", ""]
    if found is None:
        return [*lines, f"Not measured yet: `{command_of(row)}`", ""]
    lines += [f"- measured: {found.measured}", f"- met: {verdict(found.met)}"]
    if found.met is False:
        lines.append(f"- why not: {reason(row, found)}")
    lines += [f"- note: {note}" for note in found.notes]
    lines += [f"- case: {case}" for case in found.cases]
    lines += [f"- command: `{found.command}` ({found.wall_s:g} s; commit {found.commit}; {found.machine})", ""]
    for sheet in found.sheets:
        head, rows = sheet["head"], sheet["rows"]
        lines += [f"{sheet['title']}:", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        lines += [*(f"| {' | '.join(cells)} |" for cells in rows), ""]
    return lines


# ---- the budget --------------------------------------------------------------------------------------------


def budget_rows(text: str, header: str) -> list[list[str]]:
    """Cells of the body of the first Markdown table of ``text`` whose header line starts with ``header``.

    Raises:
        DtpError: no such table.
    """
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(header):
            body: Iterable[str] = lines[number + 2 :]
            found = []
            for entry in body:
                if not entry.startswith("|"):
                    break
                found.append([cell.strip() for cell in entry.strip("|").split("|")])
            return found
    raise DtpError(f"budget must hold a table with the header {header!r}")


def budget_units(text: str) -> dict[str, tuple[int, int]]:
    """DSP and LUT4 of each unit, from the budget."""
    found = {}
    for cells in budget_rows(text, "| unit | DSP | LUT4"):
        found[cells[0]] = (_number(cells[1]), _number(cells[2]))
    return found


def budget_memory_blocks(text: str) -> int:
    """EBR of all memories, from the budget."""
    rows = budget_rows(text, "| memory | word |")
    return _number(next(cells[3] for cells in rows if cells[0] == "all"))


def budget_cycles(text: str) -> dict[str, tuple[int, int]]:
    """Cycles of a dense head of 128 tokens and width 64, dot product and Riemannian, by preset."""
    (cells,) = [row for row in budget_rows(text, "| | `ecp5-85k` | `wide` |") if row[0].startswith("head, L = 128")]
    found = {}
    for preset, cell in zip(("ecp5-85k", "wide"), cells[1:], strict=True):
        dot, riemannian = cell.split("=")[1].split("/")
        found[preset] = (_number(dot), _number(riemannian))
    return found


def _number(text: str) -> int:
    match = re.search(r"[\d,]+", text)
    if match is None:
        raise DtpError(f"budget must have a number in the cell {text!r}")
    return int(match[0].replace(",", ""))


# Units of the report, by the unit of the budget that pays for them.
_BUDGET_UNITS = {
    "array": ("array",),
    "loader, lift": ("loader", "lift"),
    "softmax": ("softmax",),
    "normaliser": ("normaliser",),
}
_REST = "walker, streams"


def budget_beside_result(results: Mapping[str, Result]) -> str:
    """Cycles, DSP, LUT4 and EBR: what `docs/budget.md` allows and what there is."""
    text = BUDGET.read_text(encoding="utf-8")
    lines = ["| figure | budget | result |", "|---|---|---|"]
    for preset, (dot, riemannian) in budget_cycles(text).items():
        for name, budget in (("dot product", dot), ("Riemannian", riemannian)):
            found = _cycles_per_head(results, preset, name)
            shown = "–" if found is None else f"{found:,.0f}"
            label = f"`{preset}`, cycles of a head, L = 128, d = 64, {name}, one of 8 back to back"
            lines.append(f"| {label} | {budget:,} | {shown} |")
    report = results.get("fpga-lut4")
    figures = {} if report is None else report.figures
    units: dict[str, dict[str, int]] = figures.get("per_unit", {})
    paid = {unit for names in _BUDGET_UNITS.values() for unit in units if _in_units(unit, names)}
    for unit, (dsp, lut4) in budget_units(text).items():
        if unit == "all":
            used = (figures.get("dsp"), figures.get("lut4"))
        elif not units:
            used = (None, None)
        else:
            names = _BUDGET_UNITS.get(unit)
            chosen = [
                counts
                for name, counts in units.items()
                if (_in_units(name, names) if names is not None else name not in paid)
            ]
            used = (sum(one["dsp"] for one in chosen), sum(one["lut4"] for one in chosen))
        label = f"{unit} and everything else" if unit == _REST else unit
        lines.append(f"| `ecp5-85k`, DSP, {label} | {dsp} | {_shown(used[0])} |")
        lines.append(f"| `ecp5-85k`, LUT4, {label} | {lut4:,} | {_shown(used[1])} |")
    lines.append(f"| `ecp5-85k`, EBR, all | {budget_memory_blocks(text)} | {_shown(figures.get('bram'))} |")
    return "\n".join(lines) + "\n"


def _in_units(unit: str, names: Iterable[str]) -> bool:
    """Whether a unit of the report, such as ``tile.array``, is one of the names."""
    return any(name in unit.split(".") for name in names)


def _shown(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _cycles_per_head(results: Mapping[str, Result], preset: str, name: str) -> float | None:
    source = {
        ("wide", "dot product"): ("riemannian-wide", 0),
        ("wide", "Riemannian"): ("riemannian-wide", 1),
        ("ecp5-85k", "dot product"): ("masked-ecp5", 0),
        ("ecp5-85k", "Riemannian"): ("riemannian-ecp5", None),
    }[preset, name]
    found = results.get(source[0])
    if found is None or "cycles_rtl" not in found.figures:
        return None
    cycles = found.figures["cycles_rtl"]
    (case,) = case_file.of_row(source[0])
    return float((cycles if source[1] is None else cycles[source[1]]) / case.heads)
