"""A generated unit in the simulator: its payloads, one run of its Verilog, and what a comparison found."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtp.config import Config
from dtp.fixed import Int
from dtp.units import Unit
from tools import verbs
from tools.verbs import Comparison, Progress


@dataclass(frozen=True, kw_only=True)
class UnitComparison(Comparison):
    """A unit's Verilog beside both models.

    Parameters
    ----------
    words_compared: of all outputs
    cycles_rtl: from reset, or of the tile from the first input beat
    """

    words_compared: int


def packer(config: Config, unit: Unit, port: str) -> Callable[[Mapping[str, Any]], int]:
    """What makes a payload of the fields that the manifest names for a port."""
    from sim.bench.channels import pack_fields

    fields = _port(config, unit, port)["fields"]
    return lambda values: pack_fields(fields, values)


def with_last(config: Config, unit: Unit, channel: str, data: Sequence[int], last: Iterable[int]) -> list[int]:
    """Payloads of a channel with tdata and tlast."""
    bits = _port(config, unit, f"{channel}_tdata")["bits"]
    return [value | int(end) << bits for value, end in zip(data, last, strict=True)]


def _port(config: Config, unit: Unit, name: str) -> dict[str, Any]:
    ports: dict[str, dict[str, Any]] = {port["name"]: port for port in verbs.emitted(config, unit).manifest["ports"]}
    return ports[name]


def run_unit(
    config: Config,
    unit: Unit,
    job: Any,
    cycles: int,
    *,
    waves: str | Path | None = None,
    cache_dir: Path | None = None,
    progress: Progress = verbs.quiet,
) -> Any:
    """A :class:`~sim.bench.channels.ChannelJob` of about ``cycles`` on a unit's Verilog; it may break rules."""
    from sim.bench.channels import build_channels, run_channels

    with tempfile.TemporaryDirectory(prefix="dtp-") as temporary:
        verilog = Path(temporary) / "top.v"
        progress(f"generating Verilog of {config.name}", None)
        verilog.write_text(verbs.emitted(config, unit).verilog, encoding="utf-8")
        progress("building the simulator (kept for the next run)", None)
        build_channels(verilog, waves=waves is not None, cache_dir=cache_dir)
        progress(f"simulating the Verilog, about {cycles} cycles", None)
        if waves is None:
            return run_channels(verilog, job, cache_dir=cache_dir, check=False)
        with verbs.partial_beside(Path(waves)) as partial:
            result = run_channels(verilog, job, waves=partial, cache_dir=cache_dir, check=False)
            os.replace(partial, waves)
        return result


def compared(
    result: Any,
    differences: Sequence[str],
    later: Sequence[str],
    *,
    words: int,
    last_cycle: int | None,
    waves: str | Path | None,
    stalls: float,
    seed: int,
) -> dict[str, Any]:
    """Fields of :class:`UnitComparison` but ``wall_s``.

    Parameters
    ----------
    differences, later: one line for each wrong value, and for each channel whose cycles are not the model's
    """
    wrong = [*result.faults, *differences]
    return {
        "bit_exact": not wrong,
        "words_compared": words,
        "cycles_rtl": None if last_cycle is None else last_cycle + 1,
        "cycles_equal": None if stalls else not later,
        "differences": (*wrong, *(() if stalls else later)),
        "stall_probability": float(stalls),
        "seed": seed,
        "sim_cycles": result.sim_cycles,
        "sim_cycles_per_s": result.cycles_per_second,
        "waves": None if waves is None else Path(waves),
    }


def unequal(name: str, got: Sequence[int], wanted: Sequence[int]) -> list[str]:
    """One line when words of a channel are not those that are wanted."""
    if len(got) != len(wanted):
        return [f"{name} gave {len(got)} words in RTL, {len(wanted)} in golden"]
    wrong = [n for n, (one, other) in enumerate(zip(got, wanted, strict=True)) if one != other]
    if not wrong:
        return []
    first = wrong[0]
    return [
        f"{len(wrong)} of {len(wanted)} words of {name} differ, first word {first}: RTL {got[first]:#x}, "
        f"golden {wanted[first]:#x}"
    ]


def late(name: str, got: Sequence[int] | Int, wanted: Sequence[int] | Int) -> list[str]:
    """One line when words of a channel come in other cycles than those of the model."""
    pairs = [(int(one), int(other)) for one, other in zip(got, wanted, strict=False)]
    if len(got) != len(wanted):
        return [f"{len(got)} words of {name} in RTL, {len(wanted)} in the cycle model"]
    wrong = [n for n, (one, other) in enumerate(pairs) if one != other]
    if not wrong:
        return []
    one, other = pairs[wrong[0]]
    return [
        f"{len(wrong)} of {len(pairs)} words of {name} come in another cycle, first word {wrong[0]}: RTL {one}, "
        f"cycle model {other}"
    ]
