"""Small stream processors with known behaviour, which show one fault each while they are told to."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import numpy as np
from amaranth.back import verilog
from amaranth.hdl import Array, Module, Mux, Signal, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray

from rtl.lib.streams import RegisterSlice
from rtl.operands import WriteLayout
from rtl.units import UnitTop


class Fault(Enum):
    """What is wrong with the device."""

    NONE = "none"
    DEAD = "dead"  # never answers
    DROPS = "drops"  # swallows the third beat
    EXTRA = "extra"  # a beat follows the last one
    CHANGES = "changes"  # data changes while it waits for ready
    WITHDRAWS = "withdraws"  # valid falls while it waits for ready
    TAKES_INVALID = "takes-invalid"  # takes a beat whether or not it is valid
    DEAF = "deaf"  # answers the first beat with tlast and takes no more

    @property
    def number(self) -> int:
        return list(Fault).index(self)


class Pipeline(wiring.Component):
    """``stages`` registers; out = in XOR 0x5a in each byte, zero-extended or cut; tuser counts beats from 1.

    An abort cycle forgets everything in the pipeline and restarts the count. The last byte that was offered on input
    in a beat's highest place is the number of a fault.
    """

    def __init__(self, in_bytes: int, out_bytes: int, user_bits: int, stages: int):
        self.stages = stages
        super().__init__(
            {
                "i": In(stream.Signature(data.StructLayout({"data": 8 * in_bytes, "last": 1}))),
                "o": Out(
                    stream.Signature(
                        data.StructLayout({"data": 8 * out_bytes, "user": user_bits, "last": 1})
                    )
                ),
                "abort": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        key = int.from_bytes(b"\x5a" * (len(self.i.payload.data) // 8), "little")
        source = stream.Signature(self.o.payload.shape()).create()
        count = Signal(len(self.o.payload.user))
        told, fault = Signal(8), Signal(8)
        m.d.comb += fault.eq(Mux(self.i.valid, self.i.payload.data[-8:], told))
        m.d.sync += told.eq(fault)
        there = self.i.valid | (fault == Fault.TAKES_INVALID.number)
        m.d.comb += [
            source.payload.data.eq(self.i.payload.data ^ key),
            source.payload.user.eq(count + 1),
            source.payload.last.eq(self.i.payload.last | (fault == Fault.DEAF.number)),
            source.valid.eq(there & ~((fault == Fault.DROPS.number) & (count == 2))),
            self.i.ready.eq(source.ready),
        ]
        with m.If(there & self.i.ready):
            m.d.sync += count.eq(count + 1)
        with m.If((fault == Fault.DEAF.number) & (count != 0)):
            m.d.comb += [self.i.ready.eq(0), source.valid.eq(0)]
        for _ in range(self.stages):
            stage = stream.Signature(self.o.payload.shape()).create()
            m.d.comb += source.ready.eq(~stage.valid | stage.ready)
            with m.If(source.ready):
                m.d.sync += [stage.valid.eq(source.valid), stage.payload.eq(source.payload)]
            with m.If(self.abort):
                m.d.sync += [stage.valid.eq(0), count.eq(0)]
            source = stage
        m.d.comb += [
            self.o.payload.eq(source.payload),
            self.o.valid.eq(source.valid),
            source.ready.eq(self.o.ready),
        ]
        waited, again = Signal(), Signal()
        m.d.sync += waited.eq(self.o.valid & ~self.o.ready)
        with m.If(fault == Fault.DEAD.number):
            m.d.comb += [self.o.valid.eq(0), source.ready.eq(1)]
        with m.If((fault == Fault.CHANGES.number) & waited):
            m.d.comb += self.o.payload.data.eq(~source.payload.data)
        with m.If((fault == Fault.WITHDRAWS.number) & waited):
            m.d.comb += [self.o.valid.eq(0), source.ready.eq(0)]
        with m.If(fault == Fault.EXTRA.number):
            with m.If(self.o.valid & self.o.ready & self.o.payload.last):
                m.d.sync += again.eq(1)
            with m.If(again):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.d.sync += again.eq(0)
        return m


class Ports(wiring.Component):
    """AXI-Stream names around a component."""

    def __init__(self, inner: Pipeline):
        self.inner = inner
        super().__init__({})
        self.signals = {
            "abort": Signal(name="abort"),
            "s_axis_tdata": Signal(len(inner.i.payload.data), name="s_axis_tdata"),
            "s_axis_tvalid": Signal(name="s_axis_tvalid"),
            "s_axis_tready": Signal(name="s_axis_tready"),
            "s_axis_tlast": Signal(name="s_axis_tlast"),
            "m_axis_tdata": Signal(len(inner.o.payload.data), name="m_axis_tdata"),
            "m_axis_tvalid": Signal(name="m_axis_tvalid"),
            "m_axis_tready": Signal(name="m_axis_tready"),
            "m_axis_tlast": Signal(name="m_axis_tlast"),
            "m_axis_tuser": Signal(len(inner.o.payload.user), name="m_axis_tuser"),
        }

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.inner = inner = self.inner
        port = self.signals
        m.d.comb += [
            inner.abort.eq(port["abort"]),
            inner.i.payload.data.eq(port["s_axis_tdata"]),
            inner.i.payload.last.eq(port["s_axis_tlast"]),
            inner.i.valid.eq(port["s_axis_tvalid"]),
            port["s_axis_tready"].eq(inner.i.ready),
            port["m_axis_tdata"].eq(inner.o.payload.data),
            port["m_axis_tuser"].eq(inner.o.payload.user),
            port["m_axis_tlast"].eq(inner.o.payload.last),
            port["m_axis_tvalid"].eq(inner.o.valid),
            inner.o.ready.eq(port["m_axis_tready"]),
        ]
        return m


def emit(component: Pipeline, folder: Path) -> Path:
    """Verilog file of a component, module ``top``."""
    shell = Ports(component)
    path = folder / "top.v"
    path.write_text(verilog.convert(shell, name="top", ports=list(shell.signals.values()), emit_src=False))
    return path


def expected(beats: NDArray[np.uint8], out_bytes: int) -> NDArray[np.uint8]:
    """Output data of a :class:`Pipeline` without fault, uint8 (n, out_bytes)."""
    out = np.zeros((len(beats), out_bytes), dtype=np.uint8)
    width = min(out_bytes, beats.shape[1])
    out[:, :width] = beats[:, :width] ^ 0x5A
    return out


class Crossing(wiring.Component):
    """Several streams: ``o`` is ``wide`` with the data of ``i`` added to its low bits, one word of each at a time.

    ``sum`` counts the low bytes that came out, plus ``offset``. The five channels of AXI4-Lite reach four registers.
    ``fault`` is the number of a fault.
    """

    def __init__(self, wide_bits: int):
        word = data.StructLayout({"data": unsigned(wide_bits), "last": unsigned(1)})
        super().__init__(
            {
                "i": In(stream.Signature(data.StructLayout({"data": data.ArrayLayout(8, 2), "last": unsigned(1)}))),
                "wide": In(stream.Signature(unsigned(wide_bits))),
                "o": Out(stream.Signature(word)),
                "offset": In(8),
                "fault": In(range(len(Fault))),
                "sum": Out(8),
                "poke": In(WriteLayout(4, 32)),
                "aw": In(stream.Signature(data.StructLayout({"addr": 4, "prot": 3}))),
                "w": In(stream.Signature(data.StructLayout({"data": 32, "strb": 4}))),
                "b": Out(stream.Signature(data.StructLayout({"resp": 2}))),
                "ar": In(stream.Signature(data.StructLayout({"addr": 4, "prot": 3}))),
                "r": Out(stream.Signature(data.StructLayout({"data": 32, "resp": 2}))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        fault = self.fault
        m.submodules.slice = out = RegisterSlice(self.o.payload.shape())
        waited, again = Signal(), Signal()
        m.d.sync += waited.eq(self.o.valid & ~self.o.ready)
        there = self.wide.valid & (self.i.valid | (fault == Fault.TAKES_INVALID.number))
        total = Signal(8)
        m.d.comb += [
            out.i.valid.eq(there),
            out.i.payload.data.eq(self.wide.payload + self.i.payload.data.as_value()),
            out.i.payload.last.eq(self.i.payload.last),
            self.i.ready.eq(out.i.ready & self.wide.valid),
            self.wide.ready.eq(out.i.ready & there),
            self.o.payload.eq(out.o.payload),
            self.o.valid.eq(out.o.valid),
            out.o.ready.eq(self.o.ready),
            self.sum.eq(total + self.offset),
        ]
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += total.eq(total + self.o.payload.data[:8])
        with m.If(fault == Fault.DEAD.number):
            m.d.comb += [self.o.valid.eq(0), out.o.ready.eq(1)]
        with m.If((fault == Fault.CHANGES.number) & waited):
            m.d.comb += self.o.payload.data.eq(~out.o.payload.data)
        with m.If((fault == Fault.WITHDRAWS.number) & waited):
            m.d.comb += [self.o.valid.eq(0), out.o.ready.eq(0)]
        with m.If((fault == Fault.DROPS.number) & self.i.payload.last):
            m.d.comb += out.i.valid.eq(0)
        with m.If(fault == Fault.EXTRA.number):
            with m.If(self.o.valid & self.o.ready & self.o.payload.last):
                m.d.sync += again.eq(1)
            with m.If(again):
                m.d.comb += [self.o.valid.eq(1), out.o.ready.eq(0)]
                with m.If(self.o.ready):
                    m.d.sync += again.eq(0)

        registers = Array(Signal(32, name=f"register_{n}") for n in range(4))
        write = self.aw.valid & self.w.valid & (~self.b.valid | self.b.ready)
        m.d.comb += [self.aw.ready.eq(write), self.w.ready.eq(write), self.ar.ready.eq(~self.r.valid | self.r.ready)]
        with m.If(self.b.ready):
            m.d.sync += self.b.valid.eq(0)
        with m.If(write):
            m.d.sync += [self.b.valid.eq(1), self.b.payload.resp.eq(self.aw.payload.prot[0])]
            for n in range(4):
                with m.If(self.w.payload.strb[n]):
                    value = self.w.payload.data.word_select(n, 8)
                    m.d.sync += registers[self.aw.payload.addr[2:]].word_select(n, 8).eq(value)
        with m.If(self.poke.en):
            m.d.sync += registers[self.poke.addr].eq(self.poke.data)
        with m.If(self.r.ready):
            m.d.sync += self.r.valid.eq(0)
        with m.If(self.ar.valid & self.ar.ready):
            m.d.sync += [
                self.r.valid.eq(1),
                self.r.payload.data.eq(registers[self.ar.payload.addr[2:]]),
                self.r.payload.resp.eq(self.ar.payload.prot),
            ]
        return m


def emit_unit(component: wiring.Component, folder: Path) -> Path:
    """Verilog file of any component, module ``top`` of :class:`rtl.units.UnitTop`."""
    top = UnitTop(component)
    path = folder / "top.v"
    path.write_text(verilog.convert(top, name="top", ports=top.ports, emit_src=False))
    return path
