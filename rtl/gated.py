"""Gated attention: the tile, and the geometry that says which blocks it walks over."""

from __future__ import annotations

from amaranth.hdl import Module, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from dtp.config import Config
from dtp.gated import GatedParams, RowError
from dtp.registers import gated_registers
from rtl.attention import AttentionTile, InputLayout, OutputLayout
from rtl.geometry import Geometry, SettingsLayout
from rtl.lib.multiplier import CopyRegister, Target
from rtl.registers import AxiLiteRegisters

__all__ = ["GatedAttention", "GatedTop"]

_STATUS = (
    "busy", "error", "failed", "transport_error", "saturations", "field_error", "field_saturated", "pruner_error",
    "kept", "legal", "skipped", "heads",
)  # fmt: skip


class GatedAttention(wiring.Component):
    """Attention over the blocks that a gate keeps; the contract is ``docs/gated.md``.

    Jobs with the flag ``gated`` take the mask rows that runs on ``geometry`` make, in order: a row for each block row
    with queries that are not padding. The next rows are made while the array works on the current ones. Jobs without
    the flag do not look at the gate.

    Stalls: a gated job waits for its rows; else as :class:`rtl.attention.AttentionTile`.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells

    Members
    -------
    i, o, abort: as of the tile; ``abort`` drops the runs too
    geometry: In(stream of :class:`rtl.attention.InputLayout`), runs
    settings, clear and the others: as of :class:`rtl.geometry.Geometry`; while a run is refused and no row is left,
        gated jobs keep every legal block
    rows: Out(1), a row is offered; row_error: Out(:class:`dtp.gated.RowError`), the first since reset or ``clear``
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self._target = target
        self.params = GatedParams(config)
        self._geometry = Geometry(config, target=target)
        status = {name: self._geometry.signature.members[name] for name in _STATUS}
        super().__init__(
            {
                "i": In(stream.Signature(InputLayout(config))),
                "o": Out(stream.Signature(OutputLayout(config))),
                "geometry": In(stream.Signature(InputLayout(config))),
                "abort": In(1),
                "settings": In(SettingsLayout(self.params.pruner)),
                "clear": In(1),
                "rows": Out(1),
                "row_error": Out(RowError),
                **status,
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.tile = tile = AttentionTile(self.config, target=self._target, gated=True)
        geometry = self._geometry
        m.submodules.halt = halt = CopyRegister(1, target=self._target)
        m.submodules.runs = ResetInserter(halt.o)(geometry)
        connect(m, flipped(self.i), tile.i)
        connect(m, tile.o, flipped(self.o))
        m.d.comb += [
            tile.abort.eq(self.abort),
            halt.i.eq(self.abort),
            geometry.settings.eq(self.settings),
            geometry.clear.eq(self.clear),
            *(getattr(self, name).eq(getattr(geometry, name)) for name in _STATUS),
            tile.gate.valid.eq(geometry.rows.valid),
            geometry.rows.ready.eq(tile.gate.ready),
            *(tile.gate.payload[name].eq(geometry.rows.payload[name]) for name in ("mask", "skipped", "last")),
            tile.gate_bypass.eq(geometry.failed & geometry.drained),
            self.rows.eq(geometry.rows.valid),
        ]
        with m.If(self.clear):
            m.d.sync += self.row_error.eq(RowError.NONE)
        with m.Elif(self.row_error == RowError.NONE):
            m.d.sync += self.row_error.eq(tile.gate_error)

        # A run that an abort cut is taken and dropped up to its last beat.
        inside, dropping, stopped = Signal(), Signal(), Signal()
        taken = self.geometry.valid & self.geometry.ready
        m.d.comb += [
            stopped.eq(self.abort | halt.o),
            geometry.i.payload.eq(self.geometry.payload),
            geometry.i.valid.eq(self.geometry.valid & ~stopped & ~dropping),
            self.geometry.ready.eq(dropping | (geometry.i.ready & ~stopped)),
        ]
        with m.If(taken):
            m.d.sync += inside.eq(~self.geometry.payload.last)
        with m.If(self.abort):
            m.d.sync += dropping.eq(inside & ~(taken & self.geometry.payload.last))
        with m.Elif(taken & self.geometry.payload.last):
            m.d.sync += dropping.eq(0)
        return m


class GatedTop(wiring.Component):
    """:class:`GatedAttention` behind a control port; the registers are ``docs/registers.md``.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells

    Members
    -------
    i, o, geometry: as of :class:`GatedAttention`
    abort: In(1), as the register's
    aw, w, b, ar, r: channels of the AXI4-Lite slave, as of :class:`rtl.registers.AxiLiteRegisters`
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self._inner = inner = GatedAttention(config, target=target)
        self._registers = registers = AxiLiteRegisters(gated_registers(config))
        channels = {name: registers.signature.members[name] for name in ("aw", "w", "b", "ar", "r")}
        streams = {name: inner.signature.members[name] for name in ("i", "o", "geometry", "abort")}
        super().__init__({**streams, **channels})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.attention = inner = self._inner
        m.submodules.registers = registers = self._registers
        for name in ("i", "geometry"):
            connect(m, flipped(getattr(self, name)), getattr(inner, name))
        for name in ("aw", "w", "ar"):
            connect(m, flipped(getattr(self, name)), getattr(registers, name))
        connect(m, inner.o, flipped(self.o))
        for name in ("b", "r"):
            connect(m, getattr(registers, name), flipped(getattr(self, name)))

        values, pulses, shown = registers.values, registers.pulses, registers.inputs
        settings = inner.settings
        m.d.comb += [
            *(settings[name].eq(values.scores[name]) for name in ("fresh", "weight", "maximum", "step")),
            *(settings[name].eq(values.gate[name]) for name in ("gate", "band")),
            *(settings[f"{name}_{end}"].eq(values[name][end]) for name in ("theta", "band") for end in ("low", "high")),
            settings.budget.eq(values.budget.budget),
            inner.clear.eq(pulses.control.clear),
            inner.abort.eq(self.abort | pulses.control.abort),
            shown.status.busy.eq(inner.busy),
            shown.status.rows.eq(inner.rows),
            shown.error.geometry.eq(inner.error),
            shown.error.transport.eq(inner.transport_error),
            shown.error.field.eq(inner.field_error),
            shown.error.pruner.eq(inner.pruner_error),
            shown.error.rows.eq(inner.row_error),
            shown.error.saturated.eq(inner.field_saturated),
            shown.status.failed.eq(shown.error.as_value().any()),
            *(
                shown[name].count.eq(getattr(inner, name))
                for name in ("kept", "legal", "skipped", "heads", "saturations")
            ),
        ]
        return m
