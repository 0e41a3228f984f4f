"""Verilog out: one file, one module ``top`` with AXI4-Stream names, and a manifest that describes it.

The attention tile or another :class:`~rtl.units.Unit`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amaranth._toolchain.yosys import YosysError
from amaranth.back import rtlil, verilog
from amaranth.hdl import ClockDomain, ClockSignal, Elaboratable, Module, ResetSignal, Signal
from amaranth.hdl._ir import PortDirection

from dtp.config import Config
from dtp.errors import DtpError
from rtl.attention import AttentionTile
from rtl.lib.multiplier import Target
from rtl.units import UNITS, Unit, UnitTop

__all__ = ["Emitted", "Top", "Unit", "emit", "netlist", "top_of"]


class Top(Elaboratable):
    """The tile with one clock, a synchronous reset and AXI4-Stream port names.

    Ports: ``clk``, ``rst`` (active high), ``abort``, ``s_axis_`` with ``tdata``, ``tvalid``, ``tready`` and ``tlast``,
    ``m_axis_`` with these and ``tuser``.
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self.tile = AttentionTile(config, target=target)
        self.clk = Signal()
        self.rst = Signal()
        self.abort = Signal()
        self.s_axis_tdata = Signal(8 * config.input_bytes)
        self.s_axis_tvalid = Signal()
        self.s_axis_tready = Signal()
        self.s_axis_tlast = Signal()
        self.m_axis_tdata = Signal(8 * config.output_bytes)
        self.m_axis_tvalid = Signal()
        self.m_axis_tready = Signal()
        self.m_axis_tlast = Signal()
        self.m_axis_tuser = Signal(config.rows)

    @property
    def ports(self) -> dict[str, tuple[Signal, PortDirection]]:
        """Port name to signal and direction, in the order of the module header."""
        outputs = {"s_axis_tready", "m_axis_tdata", "m_axis_tvalid", "m_axis_tlast", "m_axis_tuser"}
        names = (
            "clk", "rst", "abort", "s_axis_tdata", "s_axis_tvalid", "s_axis_tready", "s_axis_tlast",
            "m_axis_tdata", "m_axis_tvalid", "m_axis_tready", "m_axis_tlast", "m_axis_tuser",
        )  # fmt: skip
        return {
            name: (getattr(self, name), PortDirection.Output if name in outputs else PortDirection.Input)
            for name in names
        }

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.domains.sync = ClockDomain("sync")
        m.submodules.tile = tile = self.tile
        m.d.comb += [
            ClockSignal("sync").eq(self.clk),
            ResetSignal("sync").eq(self.rst),
            tile.abort.eq(self.abort),
            tile.i.payload.data.eq(self.s_axis_tdata),
            tile.i.payload.last.eq(self.s_axis_tlast),
            tile.i.valid.eq(self.s_axis_tvalid),
            self.s_axis_tready.eq(tile.i.ready),
            self.m_axis_tdata.eq(tile.o.payload.data),
            self.m_axis_tuser.eq(tile.o.payload.user),
            self.m_axis_tlast.eq(tile.o.payload.last),
            self.m_axis_tvalid.eq(tile.o.valid),
            tile.o.ready.eq(self.m_axis_tready),
        ]
        return m


@dataclass(frozen=True)
class Emitted:
    """A generated design: Verilog text, its manifest, and the texts of more files by name."""

    verilog: str
    manifest: dict[str, Any]
    more: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> list[Path]:
        """Write ``top.v``, ``manifest.json``, ``config.toml`` and ``more`` into an existing folder; the paths."""
        texts = {
            "top.v": self.verilog,
            "manifest.json": json.dumps(self.manifest, indent=2) + "\n",
            "config.toml": Config.from_mapping(self.manifest["config"]).to_toml(),
            **self.more,
        }
        paths = []
        for name, text in texts.items():
            path = folder / name
            path.write_text(text, encoding="utf-8")
            paths.append(path)
        return paths


def top_of(config: Config, unit: Unit = Unit.ATTENTION, *, target: Target = Target.GENERIC) -> Top | UnitTop:
    """The module ``top`` of a unit, with its ports."""
    return Top(config, target=target) if unit is Unit.ATTENTION else UnitTop(UNITS[unit].make(config, target))


def emit(config: Config, unit: Unit = Unit.ATTENTION, *, target: Target = Target.GENERIC) -> Emitted:
    """Verilog of a unit of a configuration; the same configuration gives the same bytes.

    The text names source files relative to the project, so that it does not depend on where that lies.
    """
    top = top_of(config, unit, target=target)
    try:
        text = verilog.convert(top, name="top", ports=top.ports)
    except YosysError as error:  # such as a cache folder that cannot be written
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise DtpError(f"Verilog cannot be written, Yosys failed: {lines[-1] if lines else 'without a word'}") from None
    root = str(Path(__file__).resolve().parents[1])
    text = re.sub(re.escape(root) + r"/", "", text)
    text = re.sub(r'\(\* src = "[^"]*site-packages/', '(* src = "', text)
    # The state of a machine is said to come from Python's own library.
    text = re.sub(r'^ *\(\* src = "/[^"]*" \*\)\n', "", text, flags=re.MULTILINE)
    return Emitted(text, manifest(config, unit, top, target), UNITS[unit].files(config))


def netlist(config: Config, unit: Unit = Unit.ATTENTION, *, target: Target = Target.ECP5) -> str:
    """RTLIL of a unit of a configuration for synthesis."""
    top = top_of(config, unit, target=target)
    return rtlil.convert(top, name="top", ports=top.ports)


def manifest(config: Config, unit: Unit, top: Top | UnitTop, target: Target) -> dict[str, Any]:
    """Ports, parameters, widths and latencies of a generated design.

    A port that carries several values has ``fields``, as :func:`rtl.units.packed_fields` gives them.
    """
    fields = top.fields if isinstance(top, UnitTop) else {}
    ports = []
    for name, (signal, direction) in top.ports.items():
        port: dict[str, Any] = {
            "name": name,
            "bits": len(signal),
            "direction": "output" if direction is PortDirection.Output else "input",
        }
        ports.append(port | ({"fields": fields[name]} if name in fields else {}))
    return {
        "module": "top",
        "unit": unit.value,
        "target": target.name.lower(),
        "config_hash": config.hash,
        "config": config.model_dump(),
        "derived": config.derived,
        "ports": ports,
        **UNITS[unit].about(config),
    }
