"""The command ``dtp``.

Exit status: 0, 1 when a comparison failed or the simulator broke, 2 for bad input, 3 for a missing tool, 130 after
Ctrl-C. Results go to standard output; progress and the line that says what is wrong go to standard error.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from dtp.commutator import CommutatorMode
from dtp.config import PRESETS
from dtp.errors import DtpError, MissingToolError, must
from dtp.pruner import Source
from dtp.units import Unit
from dtp.workload import Mode
from sim.bench.stream import SimulationError
from tools import commutator, gated, loops, verbs
from tools.units import UnitComparison
from tools.verbs import Progress

OK, FAILED, BAD_INPUT, MISSING_TOOL, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 3, 130, 141

app = typer.Typer(
    help="Generate, simulate and measure the Davis Topological Processor.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
workload_app = typer.Typer(help="Write a workload file.", rich_markup_mode=None, no_args_is_help=False)
app.add_typer(workload_app, name="workload")


def _integer(text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"must be an integer, not {text!r}") from None


def _number(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"must be a number, not {text!r}") from None


ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help=f"A preset ({', '.join(PRESETS)}) or a TOML file.")
]
WorkloadArgument = Annotated[Path, typer.Argument(metavar="WORKLOAD", help="A workload file.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")]
SeedOption = Annotated[int, typer.Option(parser=_integer, metavar="N", help="Equal seeds give equal results.")]
CommutatorOption = Annotated[
    bool, typer.Option("--commutator", help="Also hidden state and matrices of the layer; one layer, one input.")
]
AnyUnitOption = Annotated[
    str, typer.Option("--unit", metavar="NAME", help=f"{', '.join(unit.value for unit in Unit)}.")
]
UnitOption = Annotated[
    str,
    typer.Option(
        "--unit", metavar="NAME", help="attention, gated (blocks kept by a gate), loops or commutator (of the file)."
    ),
]
ModeOption = Annotated[
    str | None,
    typer.Option("--commutator-mode", metavar="NAME", help="frozen or full weights of attention; default full.")
]
SourceOption = Annotated[
    str | None, typer.Option("--source", help="Scores of the gate: holonomy, table (the file's scores) or both.")
]
KeptOption = Annotated[
    float | None, typer.Option("--kept", parser=_number, metavar="X", help="One threshold that keeps this fraction.")
]
ThetaOption = Annotated[
    int | None, typer.Option("--theta", parser=_integer, metavar="N", help="Threshold, in 1/16384; default open.")
]
BudgetOption = Annotated[
    int | None, typer.Option("--budget", parser=_integer, metavar="N", help="Blocks kept in each row instead.")
]
WeightOption = Annotated[
    int | None,
    typer.Option(
        "--weight", parser=_integer, metavar="N", help="Of holonomy with --source both, in 1/16: 1 to 15; default 8."
    ),
]
OutputFile = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Workload file to write.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; ``arguments`` stand in for those of the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
    try:
        return _run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except MissingToolError as error:
        return _complain(str(error), MISSING_TOOL)
    except DtpError as error:
        return _complain(str(error), BAD_INPUT)
    except SimulationError as error:
        lines = str(error).splitlines()
        return _complain(" … ".join(dict.fromkeys((lines[0], lines[-1]))), FAILED)
    except MemoryError as error:
        return _complain(f"not enough memory: {error}", BAD_INPUT)
    except BrokenPipeError:
        # The reader has gone; nothing may be written when the interpreter flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return CLOSED_PIPE


def _terminated(number: int, _frame: object) -> None:
    """Ends as an interrupt does, so that nothing half-written stays."""
    raise SystemExit(128 + number)


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("dtp", arguments) as context:
            status = command.invoke(context)
        sys.stdout.flush()
        return status if isinstance(status, int) else OK
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        return _complain("interrupted", INTERRUPTED)
    except _USAGE as error:
        hint = f" (see {error.ctx.command_path} --help)" if getattr(error, "ctx", None) else ""
        return _complain(f"{error.format_message()}{hint}", BAD_INPUT)


# The base of all usage errors, whichever copy of click typer brings.
_USAGE: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _complain(text: str, status: int) -> int:
    # A design that was given up half made is no news to a person.
    warnings.simplefilter("ignore")
    print(f"dtp: {' '.join(text.split())}", file=sys.stderr)
    return status


# ---- what people see ---------------------------------------------------------------------------------------


def _console() -> Console:
    return Console(highlight=False)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on standard error while a verb works, gone afterwards; nothing where that is no terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=None)

        def show(what: str, fraction: float | None) -> None:
            total = None if fraction is None else 1.0
            bars.update(task, description=escape(what), total=total, completed=fraction or 0.0)

        yield show


def _check_json(path: Path | None) -> None:
    if path is not None:
        verbs.check_writable(path, "JSON file")


def _write_json(path: Path | None, result: Any) -> None:
    if path is not None:
        verbs.write_text(path, result.to_json(), "JSON file")


def _pairs(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _decibels(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} dB"


def _verdict(good: bool) -> str:
    return "[bold green]PASS[/]" if good else "[bold red]FAIL[/]"


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise must("workload", option, "integers with commas between them", text) from None


# ---- verbs -------------------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"dtp {importlib.metadata.version('dtp')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@app.command("presets")
def presets_command(json: JsonOption = None) -> None:
    """List the presets."""
    _check_json(json)
    result = verbs.presets()
    table = Table(title="Presets", title_justify="left")
    table.add_column("parameter")
    for preset in result.presets:
        table.add_column(preset.name + (" (default)" if preset.default else ""), justify="right")
    for name in result.presets[0].parameters:
        if name != "name":
            table.add_row(name, *(str(preset.parameters[name]) for preset in result.presets))
    table.add_section()
    table.add_row("MACs (rows × lanes)", *(str(preset.derived["macs"]) for preset in result.presets))
    table.add_row("hash", *(preset.config_hash for preset in result.presets))
    _console().print(table)
    _write_json(json, result)


@app.command("generate")
def generate_command(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")],
    unit: AnyUnitOption = Unit.ATTENTION.value,
    json: JsonOption = None,
) -> None:
    """Write Verilog and its manifest into a folder: of the attention tile, or of another unit alone."""
    _check_json(json)
    with _progress() as progress:
        result = verbs.generate(config, output, unit=unit, progress=progress)
    for file in result.files:
        typer.echo(f"{output / file.name}  {file.bytes} bytes  sha256 {file.sha256[:16]}")
    _write_json(json, result)


@workload_app.command("random")
def workload_random_command(
    output: OutputFile,
    tokens: Annotated[int, typer.Option(parser=_integer, metavar="N", help="L.")] = 128,
    width: Annotated[int, typer.Option(parser=_integer, metavar="N", help="Head width d.")] = 64,
    heads: Annotated[int, typer.Option(parser=_integer, metavar="N", help="Query heads.")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(parser=_integer, metavar="N", help="Key heads, which divide the heads; default all.")
    ] = None,
    mode: Annotated[str, typer.Option(help=f"{', '.join(Mode)}.")] = Mode.DOT.value,
    kept: Annotated[
        float, typer.Option(parser=_number, metavar="X", help="Fraction of the legal blocks that a head keeps.")
    ] = 1.0,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Keys up to the query alone.")] = False,
    valid: Annotated[
        int | None, typer.Option(parser=_integer, metavar="N", help="Tokens before the padding; default all.")
    ] = None,
    seed: SeedOption = 0,
    config: Annotated[
        str | None, typer.Option(metavar="CONFIG", help="Configuration whose block the mask gets.")
    ] = None,
    block: Annotated[
        int | None, typer.Option(parser=_integer, metavar="N", help="Tokens along one side of a block of the mask.")
    ] = None,
    transport_rank: Annotated[
        int, typer.Option(parser=_integer, metavar="N", help="r_T of Cayley transports; 0 for none.")
    ] = 0,
    torsion: Annotated[bool, typer.Option("--torsion", help="Transports with torsion.")] = False,
    loop_count: Annotated[
        int, typer.Option("--loops", parser=_integer, metavar="N", help="Sampled loops of type A; 0 for none.")
    ] = 0,
    mlp_width: Annotated[
        int, typer.Option(parser=_integer, metavar="N", help="MLP width of a layer for the commutator; 0 for none.")
    ] = 0,
    json: JsonOption = None,
) -> None:
    """Seeded random tensors; below --kept 1 the mask takes its block from --config or --block."""
    _check_json(json)
    if config is not None:
        given, block = block, verbs.as_config(config).block
        if given not in (None, block):
            raise must("workload", "block", f"the block {block} of --config {config}, or absent", given)
    _workload_written(
        verbs.workload_random(
            output,
            tokens=tokens,
            width=width,
            heads=heads,
            mode=mode,
            kept=kept,
            causal=causal,
            seed=seed,
            block=block,
            valid_length=valid,
            kv_heads=kv_heads,
            transport_rank=transport_rank,
            torsion=torsion,
            loops=loop_count,
            mlp_width=mlp_width,
        ),
        json,
    )


@workload_app.command("digits")
def workload_digits_command(
    output: OutputFile,
    images: Annotated[str, typer.Option(help="Image numbers in 0..1796, with commas.")] = "0",
    layer: Annotated[int, typer.Option(parser=_integer, metavar="N", help="Attention layer, from 0.")] = 0,
    model: Annotated[
        str, typer.Option(help="plain, transport, or holonomy (transports trained with the holonomy loss).")
    ] = "plain",
    commutator: CommutatorOption = False,
    json: JsonOption = None,
) -> None:
    """What the trained digit classifier's attention reads (needs PyTorch)."""
    _check_json(json)
    with _progress() as progress:
        progress("running the classifier", None)
        chosen = _numbers("images", images)
        result = verbs.workload_digits(output, images=chosen, layer=layer, model=model, commutator=commutator)
    _workload_written(result, json)


@workload_app.command("minilm")
def workload_minilm_command(
    output: OutputFile,
    layers: Annotated[str | None, typer.Option(help="Layers in 0..5, with commas; default all.")] = None,
    tokens: Annotated[int, typer.Option(parser=_integer, metavar="N", help="Tokens of the text, 2..512.")] = 128,
    commutator: CommutatorOption = False,
    json: JsonOption = None,
) -> None:
    """What the attention of all-MiniLM-L6-v2 reads for a paragraph (needs PyTorch and the model)."""
    _check_json(json)
    chosen = None if layers is None else _numbers("layers", layers)
    with _progress() as progress:
        progress("running the model", None)
        result = verbs.workload_minilm(output, layers=chosen, tokens=tokens, commutator=commutator)
    _workload_written(result, json)


def _workload_written(result: verbs.WorkloadResult, json: Path | None) -> None:
    typer.echo(f"{result.path}: {_shape(result.workload)}, {result.bytes} bytes")
    _write_json(json, result)


def _shape(workload: verbs.WorkloadSummary) -> str:
    parts = [f"{workload.heads} heads × {workload.tokens} tokens × width {workload.width}", workload.mode]
    if workload.kv_heads != workload.heads:
        parts.append(f"{workload.kv_heads} key heads")
    if workload.frame_rank:
        parts.append(f"R = {workload.frame_rank}, r = {workload.metric_rank}")
    if workload.transport_columns:
        parts.append(f"transports of {workload.transport_columns} columns")
    if workload.loops:
        parts.append(f"{workload.loops} loops")
    if workload.model_width:
        parts.append(f"layer of width {workload.model_width}")
    if workload.valid_length != workload.tokens:
        parts.append(f"{workload.valid_length} valid")
    if workload.causal:
        parts.append("causal")
    if workload.kept_fraction < 1:
        parts.append(f"{100 * workload.kept_fraction:.0f} % of blocks kept")
    return ", ".join(parts)


@app.command("simulate")
def simulate_command(
    config: ConfigArgument,
    workload: WorkloadArgument,
    unit: UnitOption = "attention",
    source: SourceOption = None,
    kept: KeptOption = None,
    theta: ThetaOption = None,
    budget: BudgetOption = None,
    weight: WeightOption = None,
    commutator_mode: ModeOption = None,
    json: JsonOption = None,
) -> None:
    """Golden model and cycle model of a workload."""
    _check_json(json)
    policy = _policy(unit, source=source, kept=kept, theta=theta, budget=budget, weight=weight)
    mode = _mode(unit, commutator_mode)
    result: Any
    with _progress() as progress:
        if unit == "loops":
            result = loops.simulate_loops(config, workload, progress=progress)
        elif mode is not None:
            result = commutator.simulate_commutator(config, workload, mode, progress=progress)
        elif policy is not None:
            result = gated.simulate_gated(config, workload, policy, progress=progress)
        else:
            result = verbs.simulate(config, workload, progress=progress)
    _console().print(_pairs(f"{workload.name} on {result.config}", _rows(result)))
    _note(result.note)
    _write_json(json, result)


def _mode(unit: str, given: str | None) -> str | None:
    """Mode of the commutator; None for another unit."""
    if unit == "commutator":
        return given or CommutatorMode.FULL.value
    if given is not None:
        raise must("dtp", "--commutator-mode", "absent without --unit commutator", given)
    return None


def _policy(unit: str, **options: Any) -> gated.GatePolicy | None:
    """What the options of the gate say; None for a unit without one."""
    given = {name: value for name, value in options.items() if value is not None}
    if unit not in _RUNS:
        raise must("dtp", "--unit", f"one of {', '.join(_RUNS)}", unit)
    if unit != "gated":
        for name, value in given.items():
            raise must("dtp", f"--{name}", "absent without --unit gated", value)
        return None
    if "source" in given:
        names = {source.name.lower(): source for source in Source}
        if given["source"] not in names:
            raise must("dtp", "--source", f"one of {', '.join(names)}", given["source"])
        given["source"] = names[given["source"]]
    return gated.GatePolicy(**given)


_RUNS = ("attention", "gated", "loops", "commutator")
"""Units that a workload file can be run on."""


def _rows(result: Any) -> list[tuple[str, str]]:
    if isinstance(result, loops.LoopSimulateResult):
        return _loop_rows(result)
    return _commutator_rows(result) if isinstance(result, commutator.CommutatorSimulateResult) else _model_rows(result)


def _loop_rows(result: loops.LoopSimulateResult) -> list[tuple[str, str]]:
    energies = result.energies
    covered = sum(block.loops > 0 for row in result.blocks for block in row)
    rows = [
        ("workload", _shape(result.workload)),
        ("steps of the transport engine", f"{result.steps} of {result.loops} loops"),
        ("energies Hol²", f"{min(energies):.4g} to {max(energies):.4g}, mean {sum(energies) / len(energies):.4g}"),
        *((f"head {n}", f"{head.loops} loops, mean {head.mean:.4g}") for n, head in enumerate(result.heads)),
        ("blocks with a loop", f"{covered} of {len(result.blocks) ** 2}"),
        ("cycles, model", str(result.cycles_model)),
        ("saturated loops", str(result.saturated_loops)),
    ]
    if result.transport_errors:
        rows.append(("errors of the engine", ", ".join(result.transport_errors)))
    if result.error_worst is not None and result.error_median is not None:
        errors = f"median {_percent(result.error_median)}, worst {_percent(result.error_worst)}"
        rows.append((f"error against PyTorch, energies ≥ {loops.LEAST_ENERGY:g}", errors))
    return rows


def _commutator_rows(result: commutator.CommutatorSimulateResult) -> list[tuple[str, str]]:
    exact = "" if result.ratio_reference is None else f", {result.ratio_reference:.4f} in PyTorch"
    extra, layer = result.array_cycles_extra, result.array_cycles_layer
    rows = [
        ("workload", _shape(result.workload)),
        (f"‖Δ‖² ÷ ‖Attn(h + Res(h))‖², {result.mode}", f"{result.ratio:.4f}{exact}"),
        ("the same of each head", _numbers_of(result.head_ratios)),
        ("array cycles", f"{extra} beside the layer's own {layer}, {extra / layer:.4f} of them"),
        ("cycles, model: before, walk, after", f"{result.cycles_before}, {result.cycles_walk}, {result.cycles_after}"),
        ("saturations", str(result.saturations)),
    ]
    if result.delta_error is not None and result.head_ratios_reference is not None:
        rows.insert(3, ("heads in PyTorch", _numbers_of(result.head_ratios_reference)))
        rows.append(("‖Δ − Δ_PyTorch‖ ÷ ‖Δ_PyTorch‖", _percent(result.delta_error)))
    return rows


def _numbers_of(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def _model_rows(result: verbs.SimulateResult) -> list[tuple[str, str]]:
    first = result.scales[0]
    scales = f"q {first.q:.4g}, k {first.k:.4g}, v {first.v:.4g}"
    if first.factor is not None:
        scales += f", C {first.factor:.4g}"
    rows = [
        ("workload", _shape(result.workload)),
        ("scales of head 0", f"{scales}, output {first.output:.4g}"),
        ("useful MACs", f"{result.macs}"),
        ("cycles, model", f"{result.cycles_model}"),
        ("array utilisation", _percent(result.array_utilisation)),
        ("array begins, is busy", f"in cycle {result.array_start_cycle}, for {result.array_busy_cycles} cycles"),
    ]
    if isinstance(result, gated.GateFigures):
        share = f"{result.kept_blocks} of {result.legal_blocks} blocks, {_percent(result.kept_fraction)}"
        if result.skipped_heads:
            share += f", {result.skipped_heads} heads skipped"
        rows += [
            (f"kept, by {result.source}", share),
            ("cycles without a gate", f"{result.cycles_dense}, ratio {result.cycles_ratio:.4f}"),
            ("output error against dense", f"{result.output_error:.4g}"),
            *(("of the gate", remark) for remark in result.remarks),
        ]
    rows += [(f"stalled: {name.replace('_', ' ')}", f"{count} cycles") for name, count in result.stalls.items()]
    saturated = (result.score_saturations, result.lift_saturations, result.output_saturations)
    rows.append(("saturated scores, lifts, outputs", ", ".join(map(str, saturated))))
    if result.empty_rows:
        rows.append(("empty rows", str(result.empty_rows)))
    if result.note is None:
        worst = f"{_decibels(result.sqnr_db)}, quantisation floor {_decibels(result.sqnr_floor_db)}"
        rows.append(("SQNR against PyTorch, worst head", worst))
    return rows


def _note(text: str | None) -> None:
    if text:
        print(f"dtp: {text}", file=sys.stderr)


@app.command("cosim")
def cosim_command(
    config: ConfigArgument,
    workload: WorkloadArgument,
    waves: Annotated[Path | None, typer.Option(metavar="FILE", help="Waveforms (VCD) to write.")] = None,
    stalls: Annotated[
        float, typer.Option(parser=_number, metavar="P", help="Probability of a stall on both streams, each cycle.")
    ] = 0.0,
    seed: SeedOption = 0,
    unit: UnitOption = "attention",
    source: SourceOption = None,
    kept: KeptOption = None,
    theta: ThetaOption = None,
    budget: BudgetOption = None,
    weight: WeightOption = None,
    commutator_mode: ModeOption = None,
    json: JsonOption = None,
) -> int:
    """The generated Verilog beside both models.

    Every output bit, empty row and status record is compared with the golden model, the cycle of every output beat
    with the cycle model.
    """
    _check_json(json)
    policy = _policy(unit, source=source, kept=kept, theta=theta, budget=budget, weight=weight)
    mode = _mode(unit, commutator_mode)
    conditions: dict[str, Any] = {"waves": waves, "stalls": stalls, "seed": seed}
    result: Any
    if mode is not None and conditions.pop("waves") is not None:
        raise must("dtp", "--waves", "absent with --unit commutator, which runs several simulations", str(waves))
    with _progress() as progress:
        if unit == "loops":
            result = loops.cosim_loops(config, workload, **conditions, progress=progress)
        elif mode is not None:
            result = commutator.cosim_commutator(config, workload, mode, **conditions, progress=progress)
        elif policy is not None:
            result = gated.cosim_gated(config, workload, policy, **conditions, progress=progress)
        else:
            result = verbs.cosim(config, workload, **conditions, progress=progress)
    rows = _rows(result)
    place = next(n for n, (title, _) in enumerate(rows) if title.startswith("cycles, model"))
    measured = "–" if result.cycles_rtl is None else str(result.cycles_rtl)
    if isinstance(result, commutator.CommutatorCosimResult):
        rows.insert(place + 1, ("cycles of all runs: RTL, model", f"{measured}, {result.cycles_runs}"))
    else:
        rows.insert(place, ("cycles, RTL", measured))
    alone = isinstance(result, UnitComparison)
    rows += [
        ("words compared", str(result.words_compared)) if alone else ("outputs compared", str(result.outputs_compared)),
        ("bit exact", "yes" if result.bit_exact else "no"),
        (
            "cycles as in the model" if alone else "every beat in the model's cycle",
            {True: "yes", False: "no", None: "–"}[result.cycles_equal],
        ),
        ("simulated", f"{result.sim_cycles} cycles, {result.sim_cycles_per_s:.0f} a second"),
    ]
    console = _console()
    console.print(_pairs(f"{workload.name} on {result.config}", rows))
    for line in result.differences:
        console.print(escape(line), soft_wrap=True)
    console.print(_verdict(result.passed))
    _note(result.note)
    _write_json(json, result)
    return OK if result.passed else FAILED


@app.command("fpga")
def fpga_command(
    config: ConfigArgument,
    seeds: Annotated[
        int, typer.Option(parser=_integer, metavar="N", help="Place-and-route runs; the fastest is reported.")
    ] = 1,
    freq: Annotated[float, typer.Option(parser=_number, metavar="MHZ", help="What placer and router aim at.")] = 110.0,
    speed: Annotated[int, typer.Option(parser=_integer, metavar="GRADE", help="Speed grade, 6, 7 or 8.")] = 8,
    unit: AnyUnitOption = Unit.ATTENTION.value,
    pack_only: Annotated[bool, typer.Option("--pack-only", help="Count cells alone, in minutes; no clock.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Also keep the report in docs/fpga.")] = False,
    json: JsonOption = None,
) -> None:
    """Place and route on an FPGA.

    On a Lattice ECP5 LFE5U-85F, with tools from PyPI: area in all and per unit, routed frequency, critical path.
    """
    _check_json(json)
    with _progress() as progress:
        report = verbs.fpga(
            config, seeds=seeds, freq_mhz=freq, speed=speed, unit=unit, pack_only=pack_only, save=save,
            progress=progress,
        )  # fmt: skip
    console = _console()
    table = Table(title=f"{report.name} on {report.device}", title_justify="left")
    for name in ("unit", "LUT4", "FF", "DSP", "BRAM"):
        table.add_column(name, justify="left" if name == "unit" else "right")
    for unit, used in report.per_unit.items():
        table.add_row(escape(unit), *(str(count) for count in (used.lut4, used.ff, used.dsp, used.bram)))
    table.add_section()
    table.add_row("total", *(str(count) for count in (report.lut4, report.ff, report.dsp, report.bram)))
    console.print(table)
    if pack_only:
        console.print("packed, not routed")
    else:
        console.print(f"routed: {_megahertz(report.fmax_mhz)}, seed {report.seed}; critical path:")
    for step in report.critical_path:
        where = " ".join(part for part in (step.unit, step.signal, step.source) if part)
        console.print(f"  {step.delay_ns:6.2f} ns  {step.kind:9} {escape(where)}", soft_wrap=True)
    _write_json(json, report)


def _megahertz(value: float | None) -> str:
    return "no clock" if value is None else f"{value:.1f} MHz"


@app.command("demo")
def demo_command(
    fpga: Annotated[bool, typer.Option("--fpga", help="Run place and route again (many minutes).")] = False,
    json: JsonOption = None,
) -> int:
    """Real attention data through the hardware.

    Bits, cycles, accuracy and FPGA cost of the generated Verilog on a digit classifier and a sentence encoder; then
    attention gated by holonomy on the classifier with transports, and a picture of the gate in build/gated.svg.
    """
    from tools.demo import demo

    _check_json(json)
    with _progress() as progress:
        result = demo(run_fpga=fpga, progress=progress)
    console = _console()
    _show_demo(console, result)
    _write_json(json, result)
    return OK if result.passed else FAILED


def _show_demo(console: Console, result: Any) -> None:
    found = [case.result for case in result.cases]
    table = Table(title=f"Generated Verilog of {result.config} ({result.config_hash})", title_justify="left")
    table.add_column("")
    for case in result.cases:
        table.add_column(escape(case.name), justify="right")
    rows = (
        ("heads × tokens × width", lambda r: f"{r.workload.heads} × {r.workload.tokens} × {r.workload.width}"),
        ("score", lambda r: r.workload.mode),
        ("outputs compared", lambda r: str(r.outputs_compared)),
        ("RTL = golden, every bit", lambda r: _verdict(r.bit_exact)),
        ("cycles of the RTL", lambda r: "–" if r.cycles_rtl is None else str(r.cycles_rtl)),
        ("= model, every beat", lambda r: _verdict(bool(r.cycles_equal))),
        ("array utilisation ¹", lambda r: _percent(r.array_utilisation)),
        ("SQNR, worst head ²", lambda r: _decibels(r.sqnr_db)),
        ("quantisation floor ³", lambda r: _decibels(r.sqnr_floor_db)),
    )
    for title, shown in rows:
        table.add_row(title, *(shown(one) for one in found))
    console.print(table)
    console.print("¹ useful MACs ÷ (cycles × MACs of the array)   ² against PyTorch in float64")
    console.print("³ what quantising the operands alone leaves")
    for case in result.cases:
        for line in case.result.differences:
            console.print(escape(f"{case.name}: {line}"), soft_wrap=True)
    rest = Table(title="Accuracy and cost", title_justify="left", show_header=False)
    for _ in range(3):
        rest.add_column()
    accuracy = result.accuracy
    if accuracy is not None:
        shown_accuracy = (
            f"{_percent(accuracy.hardware_accuracy)} with the hardware's arithmetic, "
            f"{_percent(accuracy.float_accuracy)} in float, on {accuracy.images} of {accuracy.held_out} "
            f"held-out images; answers that differ: {accuracy.changed}"
        )
        rest.add_row("digit classifier", shown_accuracy, _verdict(accuracy.passed))
    if result.lut4 is not None:
        origin = "placed and routed now" if result.fpga_fresh else "committed report"
        cost = (
            f"{result.lut4} LUT4, {result.ff} FF, {result.dsp} DSP, {result.bram} BRAM, "
            f"{_megahertz(result.fmax_mhz)} ({origin}, configuration {result.fpga_config_hash})"
        )
        rest.add_row("FPGA, LFE5U-85F", cost, "[yellow]STALE[/]" if result.fpga_stale else "")
    if rest.row_count:
        console.print(rest)
    if result.gated is not None:
        _show_gated_demo(console, result.gated)
    for line in (result.fpga_stale, *result.notes):
        if line:
            console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)
    console.print(f"{_verdict(result.passed)} in {result.wall_s:.0f} s")


def _show_gated_demo(console: Console, gated: Any) -> None:
    title = f"Gated attention: digits with transports, image {gated.image}, layer {gated.layer}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for case in gated.cases:
        table.add_column(escape(case.name), justify="right")
    rows = (
        ("blocks kept", lambda r: f"{r.kept_blocks} of {r.legal_blocks}, {_percent(r.kept_fraction)}"),
        ("outputs compared", lambda r: str(r.outputs_compared)),
        ("RTL = golden, every bit", lambda r: _verdict(r.bit_exact)),
        ("cycles of the RTL", lambda r: "–" if r.cycles_rtl is None else str(r.cycles_rtl)),
        ("= model, every beat", lambda r: _verdict(bool(r.cycles_equal))),
        ("cycles of dense attention", lambda r: str(r.cycles_dense)),
        ("cycles ÷ dense ⁴", lambda r: f"{r.cycles_ratio:.4f}"),
        ("output error ⁵", lambda r: f"{r.output_error:.4f}"),
    )
    for name, shown in rows:
        table.add_row(name, *(shown(case.result) for case in gated.cases))
    console.print(table)
    console.print(
        "⁴ scores made in the run cost passes of the transport engine, here four of 64 tokens, 220 cycles a token with "
        "torsion's 8 columns: two heads of 64 tokens are too little attention to hide them (docs/gated.md, 5)"
    )
    console.print("⁵ ‖o − o_dense‖ ÷ ‖o_dense‖")
    for case in gated.cases:
        for line in case.result.differences:
            console.print(escape(f"gated, {case.name}: {line}"), soft_wrap=True)
    found = gated.accuracy
    thresholds = ", ".join(str(theta) for theta in found.thresholds)
    accuracy = (
        ("gated", f"{_percent(found.gated_accuracy)} at {_percent(found.kept_fraction)} of the blocks, both layers"),
        ("dense", f"{_percent(found.dense_accuracy)}, the same arithmetic; {_percent(found.float_accuracy)} in float"),
        ("images", f"{found.images} of {found.held_out} held out; answers that differ: {found.changed}"),
        (
            "thresholds",
            f"{thresholds} ÷ 16384, a layer each: {_percent(found.wanted)} of {found.training_images} training images",
        ),
    )
    console.print(_pairs("Accuracy with gated attention", accuracy))
    console.print(escape(f"picture of block scores and kept blocks: {gated.picture}"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
