"""Small stream processors with known behaviour, and with one fault each where asked for."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import numpy as np
from amaranth.back import verilog
from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray


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


class Pipeline(wiring.Component):
    """``stages`` registers; out = in XOR 0x5a in each byte, zero-extended or cut; tuser counts beats from 1.

    An abort cycle forgets everything in the pipeline and restarts the count.
    """

    def __init__(self, in_bytes: int, out_bytes: int, user_bits: int, stages: int, fault: Fault = Fault.NONE):
        self.stages, self.fault = stages, fault
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
        fault = self.fault
        key = int.from_bytes(b"\x5a" * (len(self.i.payload.data) // 8), "little")
        source = stream.Signature(self.o.payload.shape()).create()
        count = Signal(len(self.o.payload.user))
        take = self.i.ready if fault is Fault.TAKES_INVALID else self.i.valid & self.i.ready
        drop = (count == 2) if fault is Fault.DROPS else 0
        m.d.comb += [
            source.payload.data.eq(self.i.payload.data ^ key),
            source.payload.user.eq(count + 1),
            source.payload.last.eq(1 if fault is Fault.DEAF else self.i.payload.last),
            source.valid.eq((1 if fault is Fault.TAKES_INVALID else self.i.valid) & ~drop),
            self.i.ready.eq(source.ready),
        ]
        with m.If(take):
            m.d.sync += count.eq(count + 1)
        if fault is Fault.DEAF:
            with m.If(count != 0):
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
        waited = Signal()
        m.d.sync += waited.eq(self.o.valid & ~self.o.ready)
        if fault is Fault.DEAD:
            m.d.comb += [self.o.valid.eq(0), source.ready.eq(1)]
        elif fault is Fault.CHANGES:
            with m.If(waited):
                m.d.comb += self.o.payload.data.eq(~source.payload.data)
        elif fault is Fault.WITHDRAWS:
            with m.If(waited):
                m.d.comb += [self.o.valid.eq(0), source.ready.eq(0)]
        elif fault is Fault.EXTRA:
            again = Signal()
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
    """Output data of a faultless :class:`Pipeline`, uint8 (n, out_bytes)."""
    out = np.zeros((len(beats), out_bytes), dtype=np.uint8)
    width = min(out_bytes, beats.shape[1])
    out[:, :width] = beats[:, :width] ^ 0x5A
    return out
