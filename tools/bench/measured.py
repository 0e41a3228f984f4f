"""What a row's measurement gives, and what it is given."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dtp.config import Config
from dtp.units import Unit

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Sheet:
    """A table below a row's figures: what it is of, names of its columns, cells as they are shown."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Measured:
    """The outcome of a row.

    Parameters
    ----------
    text: what was measured, in one line
    met: whether the row's figure is reached; None for a row that only informs
    figures: the numbers behind the text, for ``docs/results.json``
    notes: what else should be known, a line each
    sheets: what needs more than a line
    """

    text: str
    met: bool | None
    figures: dict[str, Any]
    notes: tuple[str, ...] = ()
    sheets: tuple[Sheet, ...] = ()


@dataclass
class Bench:
    """Options of a run, and the Verilog that its rows share.

    Parameters
    ----------
    quick: only the cases of the short run
    run_fpga: place and route again instead of reading the committed report
    progress: called with what is being done, and the part of it that is done
    cache_dir: of built simulators, None for ``~/.cache/dtp``
    """

    quick: bool = False
    run_fpga: bool = False
    progress: Progress = lambda _what, _fraction: None
    cache_dir: Path | None = None
    _verilog: dict[str, Path] = field(default_factory=dict)
    _packed: dict[tuple[str, Unit], Any] = field(default_factory=dict)

    @cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="dtp-bench-")

    def verilog(self, config: Config) -> Path:
        """The generated Verilog of a configuration, as a file that lives as long as this object."""
        if config.hash not in self._verilog:
            from rtl.emit import emit

            self.progress(f"generating Verilog of {config.name}", None)
            path = Path(self._folder.name) / f"{config.hash}.v"
            path.write_text(emit(config).verilog, encoding="utf-8")
            self._verilog[config.hash] = path
        return self._verilog[config.hash]

    def packed(self, config: Config, unit: Unit) -> Any:
        """Cells of the netlist of today: a :class:`tools.fpga.FpgaReport` without a clock."""
        if (config.hash, unit) not in self._packed:
            from tools.verbs import fpga

            self._packed[config.hash, unit] = fpga(config, unit=unit, pack_only=True, progress=self.progress)
        return self._packed[config.hash, unit]

    def close(self) -> None:
        """Remove the Verilog."""
        self._folder.cleanup()
        self._verilog.clear()
