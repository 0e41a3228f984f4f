"""The verbs of the command ``dtp`` as functions: each returns a frozen dataclass with ``to_json()``.

    result = cosim("ecp5-85k", "heads.safetensors")
    assert result.passed, result.differences

Wherever a configuration is asked for, a :class:`~dtp.config.Config`, a preset's name or the path of a TOML file
will do; wherever a workload is, a :class:`~dtp.workload.Workload` or the path of its file. The verb ``demo`` is
:func:`tools.demo.demo`.

Bad input raises :class:`~dtp.errors.DtpError`, a missing program :class:`~dtp.errors.MissingToolError`. A
comparison that fails raises nothing: the result says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtp.config import PRESETS, Config
from dtp.errors import DtpError, must
from dtp.units import Unit
from dtp.workload import Mode, Workload

__all__ = [
    "CosimResult",
    "GenerateResult",
    "HeadScales",
    "PresetsResult",
    "Progress",
    "Result",
    "SimulateResult",
    "WorkloadResult",
    "cosim",
    "fpga",
    "generate",
    "presets",
    "simulate",
    "workload_digits",
    "workload_minilm",
    "workload_random",
]

DEFAULT_PRESET = "ecp5-85k"
INSTALL_REFERENCE = "no PyTorch, so no accuracy figures: pip install torch==2.13.0"
COUNTER_LIMIT = 65535
"""Counters of a status record stop here."""
MAX_FREQ_MHZ = 1000
"""Highest clock that place and route may be asked for."""

Progress = Callable[[str, float | None], None]
"""Called with what is being done and the fraction of it that is done, None where that is unknown."""

ConfigLike = Config | str | Path
WorkloadLike = Workload | str | Path


def quiet(_what: str, _fraction: float | None) -> None:
    pass


# ---- results -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a verb found out. ``wall_s`` is the time it took, seconds."""

    wall_s: float

    def to_json(self) -> str:
        """JSON text with the fields as keys; paths are text, numbers without a finite value ``null``."""
        return json.dumps(plain(self), indent=1) + "\n"


def plain(value: Any) -> Any:
    """Dataclasses, paths, enums and NumPy numbers as what JSON knows; infinity and NaN as None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True)
class Preset:
    """A preset: what is set, what follows from it, and the hash of the former."""

    name: str
    default: bool
    config_hash: str
    parameters: dict[str, Any]
    derived: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class PresetsResult(Result):
    """All presets."""

    presets: tuple[Preset, ...]


@dataclass(frozen=True)
class GeneratedFile:
    """One file of a generated design."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class GenerateResult(Result):
    """A generated design and where it lies."""

    config: str
    config_hash: str
    unit: str
    folder: Path
    files: tuple[GeneratedFile, ...]


@dataclass(frozen=True)
class WorkloadSummary:
    """Shape and options of a workload; ``kept_fraction`` is kept ÷ legal blocks, ``macs`` the useful ones."""

    mode: str
    heads: int
    kv_heads: int
    tokens: int
    valid_length: int
    width: int
    frame_rank: int
    metric_rank: int
    transport_columns: int
    loops: int
    model_width: int
    causal: bool
    kept_fraction: float
    macs: int
    source: str

    @classmethod
    def of(cls, workload: Workload) -> WorkloadSummary:
        return cls(
            mode=workload.mode.value,
            heads=workload.heads,
            kv_heads=workload.kv_heads,
            tokens=workload.tokens,
            valid_length=workload.valid_length,
            width=workload.width,
            frame_rank=workload.frame_rank,
            metric_rank=workload.metric_rank,
            transport_columns=workload.transport_columns,
            loops=0 if workload.loops is None else int(workload.loops[-1, 0]) + 1,
            model_width=workload.model_width,
            causal=bool(workload.causal),
            kept_fraction=workload.kept_fraction,
            macs=workload.useful_macs(),
            source=workload.source,
        )


@dataclass(frozen=True, kw_only=True)
class WorkloadResult(Result):
    """A workload file that was written."""

    path: Path
    bytes: int
    workload: WorkloadSummary


@dataclass(frozen=True)
class HeadScales:
    """Real value of one step of each integer of a head; ``factor`` is None outside metric modes."""

    q: float
    k: float
    v: float
    factor: float | None
    output: float


@dataclass(frozen=True, kw_only=True)
class SimulateResult(Result):
    """Golden model and cycle model of one workload.

    Parameters
    ----------
    macs: useful ones, see :meth:`~dtp.workload.Workload.useful_macs`
    cycles_model: from the first input beat to the last output beat, both included
    array_utilisation: macs ÷ (cycles × MACs of the array)
    array_start_cycle: of the array's first step, in the cycle model; behind a gate it waits for the first mask row
    array_busy_cycles, stalls: of the cycle model; stalls are those between the array's first and last step
    sqnr_db: worst head against PyTorch float64, None without PyTorch or without an error
    sqnr_floor_db: the same of a float computation on the quantised operands
    sqnr_db_heads, sqnr_floor_db_heads: of every head
    empty_rows, score_saturations, lift_saturations, output_saturations: sums over the heads
    note: why there is no accuracy, None when there is
    """

    config: str
    config_hash: str
    workload: WorkloadSummary
    scales: tuple[HeadScales, ...]
    macs: int
    cycles_model: int
    array_utilisation: float
    array_start_cycle: int
    array_busy_cycles: int
    stalls: dict[str, int]
    cycle_model_wall_s: float
    sqnr_db: float | None
    sqnr_floor_db: float | None
    sqnr_db_heads: tuple[float, ...] | None
    sqnr_floor_db_heads: tuple[float, ...] | None
    empty_rows: int
    score_saturations: int
    lift_saturations: int
    output_saturations: int
    note: str | None


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """What was found out by the generated Verilog beside both models.

    Parameters
    ----------
    bit_exact: everything that the RTL gave is the golden model's, and no rule of a stream was broken
    cycles_rtl: of the run, to the last output, that one included
    cycles_equal: all of it in the cycles of the model; None with stalls, which the model does not know
    differences: one line for each thing that is not equal
    sim_cycles, sim_cycles_per_s: of the simulator, build and start excluded
    waves: waveform file that was written
    """

    bit_exact: bool
    cycles_rtl: int | None
    cycles_equal: bool | None
    differences: tuple[str, ...]
    stall_probability: float
    seed: int
    sim_cycles: int
    sim_cycles_per_s: float
    waves: Path | None

    @property
    def passed(self) -> bool:
        """Nothing that was compared differs."""
        return not self.differences


@dataclass(frozen=True, kw_only=True)
class CosimResult(SimulateResult, Comparison):
    """The tile's Verilog beside both models: every output, empty row and status record; the cycle of every output beat.

    Parameters
    ----------
    array_utilisation: of ``cycles_rtl``, which are counted from the first input beat
    outputs_compared: output values that were compared
    """

    outputs_compared: int


# ---- files -------------------------------------------------------------------------------------------------


def check_writable(path: Path, what: str) -> None:
    """Refuse, before a long run, a file that could not be written after it.

    Raises
    ------
    DtpError
        When the folder is missing, is no folder or not writable, or the path is a folder itself.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        reason = "not a folder" if folder.exists() else "no such folder"
        raise DtpError(f"{what} {path} cannot be written: {folder}: {reason}")
    if path.is_dir():
        raise DtpError(f"{what} {path} cannot be written: it is a folder")
    if not os.access(folder, os.W_OK):
        raise DtpError(f"{what} {path} cannot be written: {folder} is not writable")


def write_text(path: Path, text: str, what: str) -> None:
    """Write a file in one step: either all of it is there afterwards or the old state is."""
    check_writable(path, what)
    with partial_beside(path) as partial:
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            raise DtpError(f"{what} {path} cannot be written: {error.strerror or error}") from None


@contextmanager
def partial_beside(path: Path) -> Iterator[Path]:
    """A name for the unfinished file or folder ``path``, on the same disk; nothing of that name stays."""
    place = path.absolute()
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        yield partial
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def as_config(config: ConfigLike) -> Config:
    """The configuration itself, a preset, or the content of a TOML file."""
    return config if isinstance(config, Config) else Config.load(config)


def as_unit(unit: Unit | str, verb: str) -> Unit:
    """The unit itself, or the one of that name; ``verb`` is named in the refusal."""
    try:
        return Unit(unit)
    except ValueError:
        raise must(verb, "unit", f"one of {', '.join(known.value for known in Unit)}", unit) from None


def as_workload(workload: WorkloadLike) -> Workload:
    """The workload itself, or the content of its file."""
    return workload if isinstance(workload, Workload) else Workload.load(workload)


# ---- presets, generate, workload ---------------------------------------------------------------------------


def presets() -> PresetsResult:
    """Names, parameters and derived figures of all presets."""
    start = time.monotonic()
    found = []
    for name in PRESETS:
        config = Config.load(name)
        found.append(Preset(name, name == DEFAULT_PRESET, config.hash, config.model_dump(), dict(config.derived)))
    return PresetsResult(presets=tuple(found), wall_s=time.monotonic() - start)


def generate(
    config: ConfigLike,
    folder: str | Path,
    *,
    unit: Unit | str = Unit.ATTENTION,
    progress: Progress = quiet,
) -> GenerateResult:
    """Write ``top.v``, ``manifest.json``, ``config.toml``, and the gated top's ``registers.h`` and ``registers.json``.

    Equal configurations give equal bytes.

    A folder that does not exist appears when all is written. In one that does, each file is replaced in one step
    and everything else is left alone.

    Parameters
    ----------
    unit : the attention tile, or another unit alone

    Raises
    ------
    DtpError
        A refused configuration or unit, or a folder that cannot be written.
    """
    start = time.monotonic()
    unit = as_unit(unit, "generate")
    config = as_config(config)
    place = Path(os.path.abspath(folder))
    _check_folder(place, folder)
    progress(f"generating Verilog of {config.name}", None)
    design = emitted(config, unit)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with partial_beside(place) as partial:
            partial.mkdir()
            names = [path.name for path in design.write(partial)]
            files = tuple(_described(partial / name) for name in names)
            if place.is_dir():
                for name in names:
                    os.replace(partial / name, place / name)
            else:
                os.rename(partial, place)
    except OSError as error:
        raise DtpError(f"output folder {folder} cannot be written: {error.strerror or error}") from None
    return GenerateResult(
        config=config.name,
        config_hash=config.hash,
        unit=unit.value,
        folder=Path(folder),
        files=files,
        wall_s=time.monotonic() - start,
    )


@lru_cache(maxsize=4)
def emitted(config: Config, unit: Unit = Unit.ATTENTION) -> Any:
    """The generated design of a unit of a configuration, :class:`rtl.emit.Emitted`; made once a process."""
    from rtl.emit import emit

    return emit(config, unit)


def _check_folder(place: Path, shown: str | Path) -> None:
    existing = next(path for path in (place, *place.parents) if path.exists())
    if not existing.is_dir():
        raise DtpError(f"output folder {shown} cannot be written: {existing} is not a folder")
    if not os.access(existing, os.W_OK):
        raise DtpError(f"output folder {shown} cannot be written: {existing} is not writable")


def _described(path: Path) -> GeneratedFile:
    data = path.read_bytes()
    return GeneratedFile(path.name, len(data), hashlib.sha256(data).hexdigest())


def workload_random(
    path: str | Path,
    *,
    tokens: int = 128,
    width: int = 64,
    heads: int = 8,
    mode: Mode | str = Mode.DOT,
    kept: float = 1.0,
    causal: bool = False,
    seed: int = 0,
    block: int | None = None,
    valid_length: int | None = None,
    kv_heads: int | None = None,
    transport_rank: int = 0,
    torsion: bool = False,
    loops: int = 0,
    mlp_width: int = 0,
) -> WorkloadResult:
    """Write seeded random tensors, see :func:`tools.workloads.random_workload`; ``block`` goes with ``kept``."""
    from tools.workloads import random_workload

    start = time.monotonic()
    place = Path(path)
    check_writable(place, "workload file")
    if seed < 0:
        raise must("workload_random", "seed", "an integer of at least 0", seed)
    made = random_workload(
        tokens=tokens,
        width=width,
        heads=heads,
        mode=mode,
        kept=kept,
        causal=causal,
        seed=seed,
        block=block,
        valid_length=valid_length,
        kv_heads=kv_heads,
        transport_rank=transport_rank,
        torsion=torsion,
        loops=loops,
        mlp_width=mlp_width,
    )
    return _saved(made, place, start)


def workload_digits(
    path: str | Path,
    *,
    images: Sequence[int] = (0,),
    layer: int = 0,
    model: str = "plain",
    commutator: bool = False,
) -> WorkloadResult:
    """Write what a layer of a digit classifier reads, see :func:`tools.workloads.digits_workload`."""
    from tools.workloads import digits_workload

    start = time.monotonic()
    place = Path(path)
    check_writable(place, "workload file")
    return _saved(digits_workload(images, layer, model=model, commutator=commutator), place, start)


def workload_minilm(
    path: str | Path, *, layers: Sequence[int] | None = None, tokens: int = 128, commutator: bool = False
) -> WorkloadResult:
    """Write what layers of all-MiniLM-L6-v2 read, see :func:`tools.workloads.minilm_workload`."""
    from tools.workloads import minilm_workload

    start = time.monotonic()
    place = Path(path)
    check_writable(place, "workload file")
    return _saved(minilm_workload(layers=layers, tokens=tokens, commutator=commutator), place, start)


def _saved(workload: Workload, path: Path, start: float) -> WorkloadResult:
    workload.save(path)
    return WorkloadResult(
        path=path,
        bytes=path.stat().st_size,
        workload=WorkloadSummary.of(workload),
        wall_s=time.monotonic() - start,
    )


# ---- simulate ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Models:
    """Everything that both models say about a workload on a configuration."""

    config: Config
    workload: Workload
    heads: tuple[Any, ...]
    golden: tuple[Any, ...]
    prediction: Any
    fields: dict[str, Any]


def simulate(
    config: ConfigLike, workload: WorkloadLike, *, reference: bool = True, progress: Progress = quiet
) -> SimulateResult:
    """Golden model and cycle model; accuracy against PyTorch where that is installed.

    Parameters
    ----------
    reference : False leaves the accuracy out

    Raises
    ------
    DtpError
        A refused configuration or workload, or one that does not fit the other.
    """
    start = time.monotonic()
    models = _run_models(as_config(config), as_workload(workload), reference, progress)
    return SimulateResult(**models.fields, wall_s=time.monotonic() - start)


def _run_models(config: Config, workload: Workload, reference: bool, progress: Progress) -> Models:
    from dtp.attention import golden
    from dtp.quantise import quantise
    from sim.cycles.attention import predict

    progress("quantising", None)
    heads = quantise(config, workload)
    results = []
    for number, head in enumerate(heads):
        progress("golden model", number / len(heads))
        results.append(golden(config, head))
    progress("cycle model", None)
    begin = time.monotonic()
    prediction = predict(config, heads)
    wall_s = time.monotonic() - begin
    return models_of(config, workload, heads, results, prediction, wall_s, reference, progress)


def models_of(
    config: Config,
    workload: Workload,
    heads: Sequence[Any],
    results: Sequence[Any],
    prediction: Any,
    model_wall_s: float,
    reference: bool,
    progress: Progress,
) -> Models:
    """What golden results and a prediction that took ``model_wall_s`` say, accuracy included."""
    cycles = int(prediction.total_cycles)
    macs = workload.useful_macs()
    outputs = np.stack([result.outputs_real for result in results])
    measured, floor, note = _accuracy(workload, heads, outputs, reference, progress)
    fields: dict[str, Any] = {
        "config": config.name,
        "config_hash": config.hash,
        "workload": WorkloadSummary.of(workload),
        "scales": tuple(_scales(config, workload, head) for head in heads),
        "macs": macs,
        "cycles_model": cycles,
        "array_utilisation": macs / (cycles * config.macs),
        "array_start_cycle": int(prediction.start_cycle),
        "array_busy_cycles": int(prediction.array_busy_cycles),
        "stalls": {name: int(count) for name, count in prediction.stalls.items()},
        "cycle_model_wall_s": model_wall_s,
        "sqnr_db": None if measured is None else min(measured),
        "sqnr_floor_db": None if floor is None else min(floor),
        "sqnr_db_heads": measured,
        "sqnr_floor_db_heads": floor,
        "empty_rows": sum(int(result.empty_rows.sum()) for result in results),
        "score_saturations": sum(int(result.score_saturations) for result in results),
        "lift_saturations": sum(int(result.lift_saturations) for result in results),
        "output_saturations": sum(int(result.output_saturations) for result in results),
        "note": note,
    }
    return Models(config, workload, tuple(heads), tuple(results), prediction, fields)


def _scales(config: Config, workload: Workload, head: Any) -> HeadScales:
    return HeadScales(
        q=float(head.q_scale),
        k=float(head.k_scale),
        v=float(head.v_scale),
        factor=float(head.factor_scale) if workload.mode.is_metric else None,
        output=float(head.output_scale(config)),
    )


Decibels = tuple[float, ...] | None


def _accuracy(
    workload: Workload, heads: Any, outputs: NDArray[np.float64], wanted: bool, progress: Progress
) -> tuple[Decibels, Decibels, str | None]:
    """Signal to error of every head and its quantisation floor, or the reason why there is none."""
    if not wanted:
        return None, None, None
    if find_spec("torch") is None:
        return None, None, INSTALL_REFERENCE
    from dtp.quantise import dequantised
    from dtp.reference.attention import attention, sqnr_db

    quantised = dequantised(workload, heads)
    measured: list[float] = []
    floor: list[float] = []
    # One head at a time: the reference forms tokens × tokens × width numbers.
    for number in range(workload.heads):
        progress("PyTorch reference", number / workload.heads)
        exact = attention(single_head(workload, number)).numpy()
        rounded = attention(single_head(quantised, number)).numpy()
        measured += sqnr_db(exact, outputs[number : number + 1]).tolist()
        floor += sqnr_db(exact, rounded).tolist()
    return tuple(measured), tuple(floor), None


def single_head(workload: Workload, head: int) -> Workload:
    """The attention of one query head alone, without given scales."""
    key = head // workload.groups
    changes: dict[str, Any] = {
        name: getattr(workload, name)[head : head + 1]
        for name in ("q", "frame", "metric_factor", "curvature", "block_mask")
        if getattr(workload, name) is not None
    }
    changes |= {name: getattr(workload, name)[key : key + 1] for name in ("k", "v")}
    changes |= dict.fromkeys(("q_scale", "k_scale", "v_scale", "factor_scale"))
    return dataclasses.replace(workload.attention_only(), **changes)


# ---- cosim -------------------------------------------------------------------------------------------------


def cosim(
    config: ConfigLike,
    workload: WorkloadLike,
    *,
    waves: str | Path | None = None,
    stalls: float = 0.0,
    seed: int = 0,
    reference: bool = True,
    cache_dir: Path | None = None,
    progress: Progress = quiet,
) -> CosimResult:
    """Both models and the generated Verilog, run by cocotb on Verilator, all heads back to back.

    Parameters
    ----------
    waves : VCD file to write
    stalls : probability, each cycle, that the source does not offer and that the sink does not take; with any the
        cycles are not compared
    seed : of the stalls
    cache_dir : of built simulators, default ``~/.cache/dtp``

    Raises
    ------
    DtpError
        As :func:`simulate`; stalls out of range; a waveform file that cannot be written.
    MissingToolError
        A program of the co-simulation is not installed.
    SimulationError
        The simulator could not be built, or left no result.
    """
    start = time.monotonic()
    config, workload = as_config(config), as_workload(workload)
    check_conditions(waves, stalls, seed)
    models = _run_models(config, workload, reference, progress)
    result = _run_rtl(models, waves, stalls, seed, cache_dir, progress)
    fields = cosim_fields(models, result, result, (), waves=waves, stalls=stalls, seed=seed)
    return CosimResult(**fields, wall_s=time.monotonic() - start)


def cosim_fields(
    models: Models, result: Any, beats: Any, more: Sequence[str], *, waves: str | Path | None, stalls: float, seed: int
) -> dict[str, Any]:
    """Fields of :class:`CosimResult` but ``wall_s``: what a run shows beside both models.

    Parameters
    ----------
    result : of the simulator: its rate, and the rules that were broken
    beats : of the output stream: data, user, last, cycles and first_input_cycle
    more : one line for each difference beside those of the beats
    """
    config = models.config
    differences, compared = compare_outputs(config, models.heads, models.golden, beats)
    differences = [*result.faults, *differences, *more]
    bit_exact = not differences
    cycles_equal: bool | None = None
    if stalls == 0:
        late = compare_cycles(models.prediction, beats)
        cycles_equal = late is None
        differences += [] if late is None else [late]
    cycles_rtl = None
    if beats.first_input_cycle is not None and len(beats.cycles):
        cycles_rtl = int(beats.cycles[-1]) - int(beats.first_input_cycle) + 1
    utilisation = models.fields["macs"] / (cycles_rtl * config.macs) if cycles_rtl else 0.0
    return {
        **models.fields,
        "array_utilisation": utilisation,
        "bit_exact": bit_exact,
        "outputs_compared": compared,
        "cycles_rtl": cycles_rtl,
        "cycles_equal": cycles_equal,
        "differences": tuple(differences),
        "stall_probability": float(stalls),
        "seed": seed,
        "sim_cycles": result.sim_cycles,
        "sim_cycles_per_s": result.cycles_per_second,
        "waves": None if waves is None else Path(waves),
    }


def check_conditions(waves: str | Path | None, stalls: float, seed: int) -> None:
    """Refuse, before a long run, what a co-simulation cannot be run with.

    Raises
    ------
    DtpError
        Stalls or a seed out of range; a waveform file that cannot be written.
    MissingToolError
        A program of the co-simulation is not installed.
    """
    if not 0 <= stalls < 1:
        raise must("cosim", "stalls", "at least 0 and less than 1", stalls)
    if seed < 0:
        raise must("cosim", "seed", "an integer of at least 0", seed)
    if waves is not None:
        check_writable(Path(waves), "waveform file")
    from sim.bench.toolchain import find_toolchain

    find_toolchain()


def stream_job(config: Config, heads: Sequence[Any], total_cycles: int, stalls: float, seed: int) -> Any:
    """All heads back to back as one :class:`~sim.bench.StreamJob`, given up after a multiple of the cycles."""
    from dtp.job import output_beats
    from sim.bench import StreamJob

    parts = [head.beats(config) for head in heads]
    last = np.zeros(sum(len(part) for part in parts), dtype=np.bool_)
    last[np.cumsum([len(part) for part in parts]) - 1] = True
    return StreamJob(
        beats=np.concatenate(parts),
        last=last,
        packets=len(heads),
        output_beats=sum(output_beats(config, head.job) for head in heads),
        timeout_cycles=int((3 * total_cycles + 10_000) / (1.0 - stalls) ** 2),
        source_stall=stalls,
        sink_stall=stalls,
        seed=seed,
    )


def _run_rtl(models: Models, *conditions: Any) -> Any:
    return run_tile(models.config, models.heads, int(models.prediction.total_cycles), *conditions)


def run_tile(
    config: Config,
    heads: Sequence[Any],
    total: int,
    waves: str | Path | None,
    stalls: float,
    seed: int,
    cache_dir: Path | None,
    progress: Progress,
) -> Any:
    """Jobs of about ``total`` cycles on the tile's Verilog; rules may be broken in it."""
    from sim.bench import Backend, run_stream
    from sim.bench.verilated import build

    job = stream_job(config, heads, total, stalls, seed)
    with tempfile.TemporaryDirectory(prefix="dtp-") as temporary:
        verilog = Path(temporary) / "top.v"
        progress(f"generating Verilog of {config.name}", None)
        verilog.write_text(emitted(config).verilog, encoding="utf-8")
        progress("building the simulator (kept for the next run)", None)
        build(verilog, waves=waves is not None, cache_dir=cache_dir)
        progress(f"simulating the Verilog, about {total} cycles", None)
        if waves is None:
            return run_stream(verilog, job, Backend.COCOTB, cache_dir=cache_dir, check=False)
        with partial_beside(Path(waves)) as partial:
            result = run_stream(verilog, job, Backend.COCOTB, waves=partial, cache_dir=cache_dir, check=False)
            os.replace(partial, waves)
        return result


def compare_outputs(config: Config, heads: Sequence[Any], golden: Sequence[Any], result: Any) -> tuple[list[str], int]:
    """Every output, empty row and status record of a run against the golden model.

    Returns
    -------
    One line for each thing that differs, and the number of output values compared.
    """
    from dtp.job import unpack_outputs

    ends = np.flatnonzero(result.last) + 1
    found: list[str] = []
    if len(ends) != len(heads):
        found.append(f"RTL answered {len(ends)} of {len(heads)} heads")
    compared, first = 0, 0
    for number, (head, wanted, end) in enumerate(zip(heads, golden, ends, strict=False)):
        packet = slice(first, int(end))
        first = int(end)
        try:
            outputs, empty, status = unpack_outputs(config, head.job, result.data[packet], result.user[packet])
        except DtpError as error:
            found.append(f"head {number}: {error}")
            continue
        if outputs.shape == wanted.outputs.shape:
            compared += int(outputs.size)
        found += [f"head {number}: {line}" for line in _unequal(head, wanted, outputs, empty, status)]
    return found, compared


def _unequal(head: Any, wanted: Any, outputs: Any, empty: Any, status: Any) -> Iterator[str]:
    if outputs.shape != wanted.outputs.shape:
        yield f"RTL gave outputs {outputs.shape}, golden {wanted.outputs.shape}"
    elif (outputs != wanted.outputs).any():
        wrong = outputs != wanted.outputs
        row, column = divmod(int(np.argmax(wrong)), wrong.shape[1])
        yield (
            f"{int(wrong.sum())} of {wrong.size} outputs differ, first at row {row}, column {column}: "
            f"RTL {int(outputs[row, column])}, golden {int(wanted.outputs[row, column])}"
        )
    if empty.shape == wanted.empty_rows.shape and (empty != wanted.empty_rows).any():
        row = int(np.argmax(empty != wanted.empty_rows))
        yield f"row {row} is empty in {'RTL' if empty[row] else 'golden'} alone"
    counts = {
        "error": 0,
        "tag": head.job.tag,
        "empty_rows": int(wanted.empty_rows.sum()),
        "score_saturations": int(wanted.score_saturations),
        "lift_saturations": int(wanted.lift_saturations),
        "output_saturations": int(wanted.output_saturations),
    }
    for name, count in counts.items():
        expected = min(count, COUNTER_LIMIT) if name.endswith("saturations") else count
        if getattr(status, name) != expected:
            yield f"status record: {name} is {getattr(status, name)} in RTL, {expected} in golden"


def compare_cycles(prediction: Any, result: Any) -> str | None:
    """None when the cycle of every output beat is the model's, counted from the first input beat."""
    if result.first_input_cycle is None:
        return "RTL took no input beat"
    measured = result.cycles - result.first_input_cycle
    wanted = np.asarray(prediction.beat_cycles)
    if measured.shape != wanted.shape:
        return f"RTL gave {len(measured)} output beats, the cycle model {len(wanted)}"
    if (measured == wanted).all():
        return None
    wrong = measured != wanted
    beat = int(np.argmax(wrong))
    return (
        f"{int(wrong.sum())} of {wrong.size} output beats come in another cycle, first beat {beat}: "
        f"RTL {int(measured[beat])}, cycle model {int(wanted[beat])}"
    )


# ---- fpga --------------------------------------------------------------------------------------------------


def fpga(
    config: ConfigLike,
    *,
    seeds: int = 1,
    freq_mhz: float = 110.0,
    speed: int = 8,
    unit: Unit | str = Unit.ATTENTION,
    pack_only: bool = False,
    save: bool = False,
    progress: Progress = quiet,
) -> Any:
    """Place and route on an LFE5U-85F; the :class:`~tools.fpga.FpgaReport`.

    Parameters
    ----------
    unit : what :func:`generate` can write
    seeds : place-and-route runs, the fastest is reported
    freq_mhz : what placer and router aim at
    speed : grade of the device, 6 (slow) to 8
    pack_only : count cells alone, in a minute or two; no clock
    save : also write the report to ``docs/fpga``

    Raises
    ------
    DtpError
        A refused configuration or option, or a design that does not fit.
    MissingToolError
        Yosys or nextpnr is not installed.
    """
    config = as_config(config)
    if seeds < 1:
        raise must("fpga", "seeds", "an integer of at least 1", seeds)
    if not 0 < freq_mhz <= MAX_FREQ_MHZ:
        raise must("fpga", "freq", f"a number of MHz above 0, at most {MAX_FREQ_MHZ}", freq_mhz)
    if pack_only and save:
        raise must("fpga", "save", "absent with pack_only: a kept report has a clock", save)
    from rtl.emit import top_of
    from rtl.lib.multiplier import Target
    from tools.fpga import LFE5U_85F, SPEED_GRADES, place_and_route, report_name, save_committed, synthesise

    if speed not in SPEED_GRADES:
        raise must("fpga", "speed", "6, 7 or 8", speed)

    chosen = as_unit(unit, "fpga")
    top = top_of(config, chosen, target=Target.ECP5)
    common: dict[str, Any] = {
        "name": report_name(config.name, speed, chosen.value),
        "split": ("attention", "attention.tile", "attention.runs") if chosen is Unit.GATED else (),
        "device": dataclasses.replace(LFE5U_85F, speed=speed),
        "ports": top.ports,
        "config_hash": config.hash,
        "progress": lambda stage, lines: progress(f"{config.name}: {stage}, {lines} log lines", None),
    }
    if pack_only:
        return synthesise(top, **common)
    report = place_and_route(top, freq_mhz=freq_mhz, seeds=seeds, **common)
    if save:
        save_committed(report)
    return report
