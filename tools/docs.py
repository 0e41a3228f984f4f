"""Tables of the docs that come from the code, and the files that are generated whole.

    python -m tools.docs            # refresh them
    python -m tools.docs --check    # name the stale ones, exit 1

A table stands between ``<!-- generated:NAME -->`` and ``<!-- /generated:NAME -->``.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import dtp.workload
from dtp import gated
from dtp.config import PRESETS, Config
from dtp.errors import DtpError, must
from dtp.job import (
    STATUS_BYTES,
    STATUS_MAGIC,
    VERSION,
    ErrorCode,
    Job,
    StatusRecord,
    descriptor_table,
    output_beats,
    status_beats,
    unpack_outputs,
)
from dtp.registers import gated_registers

ROOT = Path(__file__).resolve().parents[1]
_MARKER = re.compile(r"<!-- generated:([\w-]+) -->\n(.*?)<!-- /generated:\1 -->", re.DOTALL)

_STATUS_MEANINGS = {
    "error": "0 or one of the codes below",
    "tag": "of the descriptor",
    "empty_rows": "rows of the job without a kept key; their outputs are 0",
    "score_saturations": "scores of kept pairs beyond 22 bits; stops at 65,535",
    "lift_saturations": "lifted lanes and biases beyond their width; stops at 65,535",
    "output_saturations": "outputs beyond their width; stops at 65,535",
}
_ERROR_MEANINGS = {
    ErrorCode.NONE: "the outputs precede the record",
    ErrorCode.MAGIC: "wrong first two bytes",
    ErrorCode.VERSION: "a version that this hardware does not know",
    ErrorCode.FLAGS: "an unknown flag, or `lift` without `bias`",
    ErrorCode.TOKENS: "L is 0 or more than `max_tokens`",
    ErrorCode.VALID_LENGTH: "0 or more than L",
    ErrorCode.WIDTH: "d is 0 or more than `max_width`",
    ErrorCode.SHIFT: "a shift beyond its shifter",
    ErrorCode.CUT: "tlast came in the descriptor",
    ErrorCode.EARLY_LAST: "tlast came before the job's last beat; missing beats were taken as 0",
    ErrorCode.LATE_LAST: "tlast did not come with the job's last beat; beats up to tlast were dropped",
    ErrorCode.ABORTED: "`abort` was high",
}


_RUN_ERROR_MEANINGS = {
    gated.GeometryError.NONE: ("", ""),
    gated.GeometryError.MAGIC: ("wrong first two bytes", "refused"),
    gated.GeometryError.VERSION: ("a version that this hardware does not know", "refused"),
    gated.GeometryError.FLAGS: ("an unknown flag, neither source, or more columns than the engine has", "refused"),
    gated.GeometryError.HEADS: ("none, or more than the table has room for", "refused"),
    gated.GeometryError.TOKENS: ("none, or more than the longest gated head has", "refused"),
    gated.GeometryError.WORDS: ("fewer words than the field needs, or more than the widest head has", "refused"),
    gated.GeometryError.SHIFT: ("a shift beyond its shifter, or a negative unit", "refused"),
    gated.GeometryError.CUT: ("tlast came in the descriptor", "refused"),
    gated.GeometryError.EARLY_LAST: ("tlast came before the run's last beat", "its beat stood for the missing ones"),
    gated.GeometryError.LATE_LAST: ("tlast did not come with the run's last beat", "beats up to tlast were dropped"),
}


# ---- tables ------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def run_errors_table() -> str:
    """Codes of a run of the gate."""
    rows = [(int(code), f"`{code.name}`", *_RUN_ERROR_MEANINGS[code]) for code in gated.GeometryError]
    return _table(("code", "name", "meaning", "answer"), rows)


def configurations() -> list[Config]:
    """The presets."""
    return [Config.load(name) for name in PRESETS]


def parameter_comments() -> dict[str, str]:
    """What each parameter means, from the comment beside it in the source."""
    source = inspect.getsource(Config)
    found = dict(re.findall(r"^    (\w+): (?:Count|Annotated.*?)  # (.+)$", source, re.MULTILINE))
    return {name: found.get(name, "name of the configuration") for name in Config.model_fields}


def parameter_unit(name: str) -> str:
    """Unit of a parameter, from its name."""
    endings = {
        "_bits": "bits", "_bytes": "bytes", "_tokens": "tokens", "_width": "lanes", "_rank": "columns",
        "_groups": "groups", "_slots": "groups", "solve_lanes": "tokens", "transport_lanes": "products",
        "_lanes": "values", "_ports": "lanes", "rows": "queries",
        "lanes": "MACs a row", "block": "tokens, lanes", "lookahead": "items", "_memories": "true or false",
        "_model": "lanes", "_mlp": "lanes", "_vectors": "vectors", "_columns": "columns",
    }  # fmt: skip
    return next(unit for ending, unit in endings.items() if name.endswith(ending))


def _shown(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def parameters_table() -> str:
    """Parameters of a configuration with meaning, unit and the values of the presets."""
    configs = configurations()
    rows = [
        [f"`{name}`", meaning, parameter_unit(name), *(_shown(getattr(config, name)) for config in configs)]
        for name, meaning in parameter_comments().items()
        if name != "name"
    ]
    rows.append(["", "MACs = rows × lanes (follows)", "MACs", *(config.macs for config in configs)])
    rows.append(["", "hash of the above", "", *(config.hash for config in configs)])
    return _table(["parameter", "meaning", "unit", *(f"`{config.name}`" for config in configs)], rows)


def status_table() -> str:
    """Fields of the status record."""
    rows: list[list[object]] = [
        ["0–1", "`magic`", f"{STATUS_MAGIC:#06x}"],
        ["2", "`version`", str(VERSION)],
    ]
    names = list(StatusRecord.__dataclass_fields__)
    for name in names:
        first = StatusRecord.offset(name)
        place = f"{first}" if name == "error" else f"{first}–{first + 1}"
        rows.append([place, f"`{name}`", _STATUS_MEANINGS[name]])
    first = StatusRecord.offset(names[-1]) + 2
    rows.append([f"{first}–{STATUS_BYTES - 1}", "", "0"])
    return _table(["byte", "field", "meaning"], rows)


def errors_table() -> str:
    """Codes of the field ``error``."""
    rows = [
        [code.value, f"`{code.name}`", _ERROR_MEANINGS[code], "the record alone" if code.refuses else ""]
        for code in ErrorCode
    ]
    return _table(["code", "name", "meaning", "answer"], rows)


def output_order_table() -> str:
    """What each of the first output beats of a head holds, found by unpacking numbered values."""
    rows = []
    for config in configurations():
        job = Job(tokens=config.rows, valid_length=config.rows, width=config.max_width)
        beats, tail = output_beats(config, job), status_beats(config)
        per_beat = 8 * config.output_bytes // config.output_bits
        numbered = np.arange((beats - tail) * per_beat, dtype=f"<i{config.output_bits // 8}").view(np.uint8)
        record = np.zeros(tail * config.output_bytes, dtype=np.uint8)
        record[:STATUS_BYTES] = np.frombuffer(StatusRecord().to_bytes(), dtype=np.uint8)
        data = np.concatenate([numbered, record]).reshape(beats, config.output_bytes)
        places = unpack_outputs(config, job, data, np.zeros(beats, dtype=np.uint64))[0]
        shown = []
        for beat in range(3):
            row, column = np.nonzero(places // per_beat == beat)
            queries = f"{row.min()}–{row.max()}"
            columns = f"{column.min()}" if column.min() == column.max() else f"{column.min()}–{column.max()}"
            shown.append(f"queries {queries}, column{'s' if '–' in columns else ''} {columns}")
        whole = Job(tokens=128, valid_length=128, width=64)
        total = output_beats(config, whole) if config.max_tokens >= 128 and config.max_width >= 64 else "–"
        rows.append([f"`{config.name}`", per_beat, *shown, beats - tail, tail, total])
    head = ["preset", "values a beat", "beat 0", "beat 1", "beat 2", "beats of a group of the largest d"]
    return _table([*head, "beats of a status record", "beats of a head, L = 128, d = 64"], rows)


def latencies(config: Config) -> dict[str, object]:
    """Latencies in cycles, as in the manifest of a generated design."""
    from dtp.normaliser import NormaliserParams
    from dtp.softmax import SoftmaxParams
    from rtl.attention import array_params

    return {
        "operand_read_cycles": config.operand_read_cycles,
        "array_cycles": array_params(config).latency,
        "softmax": SoftmaxParams(config).latencies,
        "normaliser": NormaliserParams(config).latencies,
    }


def latencies_table() -> str:
    """Latencies of the units in cycles."""
    columns = [dict(_flat(latencies(config))) for config in configurations()]
    rows = [[f"`{name}`", *(column[name] for column in columns)] for name in columns[0]]
    return _table(["latency, cycles", *(f"`{name}`" for name in PRESETS)], rows)


def _flat(value: object, prefix: str = "") -> list[tuple[str, object]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [entry for key, item in value.items() for entry in _flat(item, f"{prefix}.{key}" if prefix else key)]


def ports(config: Config) -> list[tuple[str, str, int]]:
    """Name, direction and bits of each port of the emitted module ``top``."""
    return [
        ("clk", "input", 1),
        ("rst", "input", 1),
        ("abort", "input", 1),
        ("s_axis_tdata", "input", 8 * config.input_bytes),
        ("s_axis_tvalid", "input", 1),
        ("s_axis_tready", "output", 1),
        ("s_axis_tlast", "input", 1),
        ("m_axis_tdata", "output", 8 * config.output_bytes),
        ("m_axis_tvalid", "output", 1),
        ("m_axis_tready", "input", 1),
        ("m_axis_tlast", "output", 1),
        ("m_axis_tuser", "output", config.rows),
    ]


def ports_table() -> str:
    """Ports of the presets."""
    columns = [ports(config) for config in configurations()]
    rows = [
        [f"`{name}`", direction, *(column[number][2] for column in columns)]
        for number, (name, direction, _) in enumerate(columns[0])
    ]
    return _table(["port", "direction", *(f"bits, `{name}`" for name in PRESETS)], rows)


def registers_table() -> str:
    """Registers and fields of the gated top."""
    return gated_registers(Config.load("ecp5-85k")).to_markdown()


def verbs_table() -> str:
    """The command's verbs with arguments and options."""
    import typer

    from tools.cli import app

    rows = []

    def walk(command: object, path: str) -> None:
        children = getattr(command, "commands", None)
        if children:
            for name, child in children.items():
                walk(child, f"{path} {name}")
            return
        arguments, options = [], []
        for parameter in command.params:  # type: ignore[attr-defined]
            if parameter.param_type_name == "argument":
                arguments.append(parameter.metavar or parameter.name.upper())
                continue
            name = max(parameter.opts, key=len)
            if name == "--help":
                continue
            value = "" if parameter.is_flag else f" {parameter.metavar or 'TEXT'}"
            if parameter.required:
                arguments.append(f"{min(parameter.opts, key=len)}{value}")
            else:
                options.append(f"`{name}{value}`")
        text = " ".join((command.help or "").split())  # type: ignore[attr-defined]
        rows.append([f"`{' '.join([path, *arguments])}`", text, ", ".join(options)])

    walk(typer.main.get_command(app), "dtp")
    return _table(["command", "what it does", "options"], rows)


def results_table() -> str:
    """What is reached and what is not, from ``docs/results.json``."""
    from tools.bench import report

    return report.status_table(report.load())


def rst_tables(text: str) -> list[list[list[str]]]:
    """Simple tables of a docstring: rows of cells, the header first."""
    lines = text.splitlines()
    rulers = [number for number, line in enumerate(lines) if re.fullmatch(r"=+(?: +=+)+", line)]
    tables = []
    for top, middle, bottom in zip(rulers[::3], rulers[1::3], rulers[2::3], strict=True):
        starts = [match.start() for match in re.finditer("=+", lines[top])]
        spans = list(zip(starts, [*starts[1:], None], strict=True))
        body = [*lines[top + 1 : middle], *lines[middle + 1 : bottom]]
        tables.append([[line[first:end].strip() for first, end in spans] for line in body])
    return tables


def _workload_table(number: int) -> str:
    head, *rows = rst_tables(dtp.workload.__doc__ or "")[number]
    return _table(head, [[cell.replace("``", "`") for cell in row] for row in rows])


def scores_list() -> str:
    """The score of each mode, from the text of :mod:`dtp.workload`."""
    text = dtp.workload.__doc__ or ""
    lines = [line.replace("``", "`") for line in text.splitlines() if line.startswith("- ``")]
    if len(lines) != 4:
        raise must("docs", "scores", "four lines in dtp.workload", len(lines))
    return "\n".join(lines) + "\n"


SECTIONS: dict[str, Callable[[], str]] = {
    "descriptor": descriptor_table,
    "status-record": status_table,
    "errors": errors_table,
    "run-descriptor": lambda: descriptor_table(gated.FIELDS, gated.FLAGS),
    "run-errors": run_errors_table,
    "output-order": output_order_table,
    "latencies": latencies_table,
    "ports": ports_table,
    "registers": registers_table,
    "parameters": parameters_table,
    "verbs": verbs_table,
    "results": results_table,
    "workload-tensors": lambda: _workload_table(0),
    "workload-metadata": lambda: _workload_table(1),
    "workload-loops": lambda: _workload_table(2),
    "workload-scores": scores_list,
}
"""Generated parts of the docs by name."""

PAGES = (
    "README.md",
    "docs/interface.md",
    "docs/workload.md",
    "docs/tile.md",
    "docs/gated.md",
    "docs/registers.md",
)
"""Pages that may hold generated parts."""


# ---- pages -------------------------------------------------------------------------------------------------


def filled(text: str, sections: dict[str, Callable[[], str]] = SECTIONS) -> str:
    """The page with every generated part made again.

    Raises:
        DtpError: a part that no function makes, or a marker without its end.
    """

    def part(match: re.Match[str]) -> str:
        name = match[1]
        if name not in sections:
            raise must("docs", "generated part", f"one of {', '.join(sections)}", name)
        return f"<!-- generated:{name} -->\n{sections[name]()}<!-- /generated:{name} -->"

    for name in re.findall(r"<!-- generated:([\w-]+) -->", text):
        if f"<!-- /generated:{name} -->" not in text:
            raise must("docs", "generated part", f"closed by <!-- /generated:{name} -->", name)
    return _MARKER.sub(part, text)


def generated() -> dict[Path, str]:
    """Every file with something generated in it, and what it should hold."""
    from tools.bench import report
    from tools.picture import tile_svg

    files = {ROOT / page: filled((ROOT / page).read_text(encoding="utf-8")) for page in PAGES}
    files[report.RESULTS_MD] = report.markdown(report.load())
    files[ROOT / "docs" / "images" / "tile.svg"] = tile_svg()
    return files


def stale() -> list[str]:
    """Files that do not hold what the code says, relative to the project."""
    return [
        str(path.relative_to(ROOT))
        for path, text in generated().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def refresh() -> list[str]:
    """Write every stale file; their names."""
    names = stale()
    for path, text in generated().items():
        if str(path.relative_to(ROOT)) in names:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Refresh, or name what is stale."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description="Refresh what is generated in the docs.")
    parser.add_argument("--check", action="store_true", help="only name the stale files; exit 1 when there are any")
    given = parser.parse_args(arguments)
    try:
        names = stale() if given.check else refresh()
    except DtpError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 2
    for name in names:
        print(f"{'stale' if given.check else 'refreshed'}: {name}")
    return 1 if given.check and names else 0


if __name__ == "__main__":
    sys.exit(main())
