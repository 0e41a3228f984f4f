"""Units that can be generated alone: a component as one module with flat ports, and the list of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from amaranth.hdl import ClockDomain, ClockSignal, Elaboratable, Module, ResetSignal, Shape, Signal, ValueCastable
from amaranth.hdl._ir import PortDirection
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import Flow

from dtp.config import Config
from dtp.errors import must
from dtp.gated import MAX_HEADS, ROW_QUEUE, GatedParams
from dtp.gated import VERSION as RUN_VERSION
from dtp.holonomy import TURNAROUND_CYCLES, FieldParams, LoopParams
from dtp.job import DESCRIPTOR_VERSION
from dtp.kernel import KernelParams
from dtp.matrix import MatrixParams
from dtp.normaliser import NormaliserParams
from dtp.pruner import PrunerParams
from dtp.registers import gated_registers
from dtp.softmax import SoftmaxParams
from dtp.transport import TransportParams
from dtp.units import Unit
from rtl.attention import AttentionTile, array_params
from rtl.commutator import CommutatorUnit
from rtl.gated import GatedTop
from rtl.holonomy import HolonomyField
from rtl.lib.multiplier import Target
from rtl.lib.streams import BlockQueue
from rtl.loops import LoopUnit
from rtl.operands import WriteLayout
from rtl.pruner import Pruner
from rtl.transport import Transport

__all__ = ["UNITS", "Unit", "UnitEntry", "UnitTop", "field_params", "loop_params", "packed_fields", "pruner_params"]

TABLE_HEADS = 16
"""Heads in the table of a pruner, or of loop accounts, that are generated alone."""

_AXI_LITE = {
    "aw": ("addr", "prot"), "w": ("data", "strb"), "b": ("resp",), "ar": ("addr", "prot"), "r": ("data", "resp"),
}  # fmt: skip


class UnitTop(Elaboratable):
    """A component with one clock, a synchronous reset and flat ports.

    An input stream ``name`` becomes ``s_axis_name_tdata``, ``_tvalid`` and ``_tready``, an output stream
    ``m_axis_name_``…; of the streams ``i`` and ``o`` the name is left out. Fields ``data``, ``user`` and ``last`` of a
    payload that has no others become tdata, tuser and tlast; any other payload is tdata, its first field lowest.
    Streams ``aw``, ``w``, ``b``, ``ar`` and ``r`` with the fields of AXI4-Lite become ``s_axil_awaddr``,
    ``s_axil_awvalid`` and so on. A write port, :class:`rtl.operands.WriteLayout`, is an input stream of address and
    data that is always ready. Other members keep their names.

    Parameters
    ----------
    component: any component whose members are streams and plain ports

    Members
    -------
    clk, rst: clock, and reset that is active high
    ports: name of every port to its signal and direction, in the order of the module header
    fields: for every port with several values in it, these as :func:`packed_fields` tells them
    """

    def __init__(self, component: wiring.Component) -> None:
        self.component = component
        self.clk = Signal()
        self.rst = Signal()
        self.ports: dict[str, tuple[Signal, PortDirection]] = {
            "clk": (self.clk, PortDirection.Input),
            "rst": (self.rst, PortDirection.Input),
        }
        self.fields: dict[str, list[dict[str, Any]]] = {}
        self._links: list[tuple[Any, Any]] = []  # (what is driven, by what)
        lite = _is_axi_lite(component)
        for name, member in component.signature.members.items():
            port = getattr(component, name)
            is_input = member.flow is Flow.In
            if member.is_signature and isinstance(member.signature, stream.Signature):
                parts = _payload_parts(port.payload)
                if lite and name in _AXI_LITE:
                    prefix, control = f"s_axil_{name}", ""
                else:
                    prefix, control = f"{'s' if is_input else 'm'}_axis_", "t"
                    prefix += "" if name == ("i" if is_input else "o") else f"{name}_"
                    if not {"data"} <= set(parts) <= {"data", "user", "last"}:
                        parts = {"data": port.payload}
                for part, value in parts.items():
                    self._port(f"{prefix}{control}{part}", value, is_input)
                self._port(f"{prefix}{control}valid", port.valid, is_input)
                self._port(f"{prefix}{control}ready", port.ready, not is_input)
            elif member.is_port and not member.dimensions and isinstance(member.shape, WriteLayout):
                prefix = f"s_axis_{name}_t"
                shape = data.StructLayout({part: f.shape for part, f in member.shape if part != "en"})
                word = data.View(shape, self._signal(f"{prefix}data", shape, True))
                self._links += [(port[part], word[part]) for part, _ in shape]
                self._port(f"{prefix}valid", port.en, True)
                self._links.append((self._signal(f"{prefix}ready", 1, False), 1))
            elif member.is_port and not member.dimensions:
                self._port(name, port, is_input)
            else:
                raise must("UnitTop", f"{type(component).__name__}.{name}", "a stream or a plain port", member)

    def _signal(self, name: str, shape: Any, is_input: bool) -> Signal:
        signal = Signal(Shape.cast(shape).width, name=name)
        self.ports[name] = (signal, PortDirection.Input if is_input else PortDirection.Output)
        fields = packed_fields(shape)
        if fields:
            self.fields[name] = fields
        return signal

    def _port(self, name: str, value: Any, is_input: bool) -> None:
        signal = self._signal(name, value.shape(), is_input)
        if isinstance(value, ValueCastable):
            value = value.as_value()
        self._links.append((value, signal) if is_input else (signal, value))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.domains.sync = ClockDomain("sync")
        m.submodules.unit = self.component
        m.d.comb += [ClockSignal("sync").eq(self.clk), ResetSignal("sync").eq(self.rst)]
        m.d.comb += [driven.eq(by) for driven, by in self._links]
        return m


def _is_axi_lite(component: wiring.Component) -> bool:
    """Whether all five channels are there, with their fields."""
    payloads = {name: getattr(getattr(component, name, None), "payload", None) for name in _AXI_LITE}
    return all(
        payloads[name] is not None and tuple(_payload_parts(payloads[name])) == fields
        for name, fields in _AXI_LITE.items()
    )


def _payload_parts(payload: Any) -> dict[str, Any]:
    """Fields of a payload that is a structure."""
    shape = payload.shape()
    return {name: payload[name] for name, _ in shape} if isinstance(shape, data.StructLayout) else {}


def packed_fields(shape: Any) -> list[dict[str, Any]]:
    """Where the values of a packed payload lie, from bit 0 on; nothing for a plain number.

    Each has ``name`` (with a dot for a part of a part, empty for a payload that is one array), ``offset``, ``bits`` and
    ``signed``; an array also ``dimensions``, the last index the fastest, all elements of ``bits`` bits; an
    enumeration also ``values``.
    """
    shape = shape if isinstance(shape, data.Layout) or _is_enum(shape) else Shape.cast(shape)
    return [] if isinstance(shape, Shape) else list(_fields("", 0, shape))


def _is_enum(shape: Any) -> bool:
    return isinstance(shape, type) and issubclass(shape, Enum)


def _fields(name: str, offset: int, shape: Any) -> Iterator[dict[str, Any]]:
    if isinstance(shape, data.StructLayout):
        for key, part in shape:
            yield from _fields(f"{name}.{key}" if name else str(key), offset + part.offset, part.shape)
        return
    dimensions: list[int] = []
    element = shape
    while isinstance(element, data.ArrayLayout):
        dimensions.append(element.length)
        element = element.elem_shape
    if isinstance(element, data.Layout):
        for key, part in shape:
            yield from _fields(f"{name}[{key}]", offset + part.offset, part.shape)
        return
    number = Shape.cast(element)
    entry: dict[str, Any] = {"name": name, "offset": offset, "bits": number.width, "signed": number.signed}
    if dimensions:
        entry["dimensions"] = dimensions
    if _is_enum(element):
        entry["values"] = {item.name: item.value for item in element}
    yield entry


@dataclass(frozen=True)
class UnitEntry:
    """How a unit is made for a configuration, what its manifest says beside ports and configuration, and more files."""

    make: Callable[[Config, Target], wiring.Component]
    about: Callable[[Config], dict[str, Any]]
    files: Callable[[Config], dict[str, str]] = lambda _config: {}


def field_params(config: Config) -> FieldParams:
    """The holonomy field that is generated alone: as many multipliers as it can use behind a wide engine, else two."""
    two = FieldParams.of(config, multipliers=2)
    most = min(two.lanes, two.max_lanes // TURNAROUND_CYCLES)
    return FieldParams.of(config, multipliers=most) if most >= config.block else two


def loop_params(config: Config) -> LoopParams:
    """The loop accounts that are generated: one multiplier, or half a word's lanes behind a wide engine."""
    engine = TransportParams(config)
    multipliers = 1 if engine.vectors == 1 else max(1, engine.tile_rows // 2)
    return LoopParams.of(config, multipliers=multipliers, heads=TABLE_HEADS)


def pruner_params(config: Config) -> PrunerParams:
    """The pruner that is generated alone: a score a cycle for each lane of a vector's word, at most a block's rows."""
    lanes = min(TransportParams(config).tile_rows, config.block, config.max_blocks)
    return PrunerParams.of(config, heads=TABLE_HEADS, lanes=lanes)


def _attention(config: Config) -> dict[str, Any]:
    latencies = {
        "operand_read_cycles": config.operand_read_cycles,
        "array_cycles": array_params(config).latency,
        "softmax": SoftmaxParams(config).latencies,
        "normaliser": NormaliserParams(config).latencies,
    }
    return {"descriptor_version": DESCRIPTOR_VERSION, "latencies": latencies}


def _transport(config: Config) -> dict[str, Any]:
    p = TransportParams(config)
    return _about(
        _named(p, "tile_rows vectors max_words max_groups contexts"),
        _named(p, "start_cycles project_cycles gram_latency operation_cycles output_cycles"),
    )


def _holonomy(config: Config) -> dict[str, Any]:
    p = field_params(config)
    return _about(asdict(p), _named(p, "word_steps weight_steps product_cycles result_cycles"))


def _loops(config: Config) -> dict[str, Any]:
    p, engine = loop_params(config), _transport(config)
    return _about(
        engine["parameters"] | asdict(p) | {"entries": p.entries},
        engine["latencies"] | _named(p, "word_cycles energy_cycles ratio_cycles update_cycles"),
    )


def _commutator(config: Config) -> dict[str, Any]:
    p = MatrixParams(config)
    return _about(
        _named(p, "elements max_blocks bias_words") | _named(KernelParams(config), "state_words open_matrices"),
        _named(p, "load_cycles sum_cycles word_beats issue_cycles"),
    )


def _pruner(config: Config) -> dict[str, Any]:
    p = pruner_params(config)
    return _about(asdict(p), _named(p, "combine_cycles aggregate_cycles score_cycles row_out_cycles"))


def _gated(config: Config) -> dict[str, Any]:
    p = GatedParams(config)
    sizes = _named(p, "max_tokens max_blocks max_words descriptor_beats factor_beats probe_beats")
    tile = _attention(config)
    rows = {"row_queue_cycles": BlockQueue.LATENCY}
    return {
        "descriptor_version": tile["descriptor_version"],
        "run_version": RUN_VERSION,
        **_about(sizes | {"max_heads": MAX_HEADS, "row_queue": ROW_QUEUE}, tile["latencies"] | rows),
    }


def _register_files(config: Config) -> dict[str, str]:
    described = gated_registers(config)
    return {"registers.h": described.to_c_header(), "registers.json": described.to_json()}


def _about(parameters: dict[str, Any], latencies: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": parameters, "latencies": latencies}


def _named(params: Any, names: str) -> dict[str, Any]:
    return {name: getattr(params, name) for name in names.split()}


UNITS: Mapping[Unit, UnitEntry] = {
    Unit.ATTENTION: UnitEntry(lambda c, target: AttentionTile(c, target=target), _attention),
    Unit.TRANSPORT: UnitEntry(lambda c, target: Transport(c, target=target), _transport),
    Unit.HOLONOMY: UnitEntry(lambda c, target: HolonomyField(field_params(c), target=target), _holonomy),
    Unit.LOOPS: UnitEntry(lambda c, target: LoopUnit(c, loop_params(c), target=target), _loops),
    Unit.COMMUTATOR: UnitEntry(lambda c, target: CommutatorUnit(c, target=target), _commutator),
    Unit.PRUNER: UnitEntry(lambda c, target: Pruner(pruner_params(c), target=target), _pruner),
    Unit.GATED: UnitEntry(lambda c, target: GatedTop(c, target=target), _gated, _register_files),
}
