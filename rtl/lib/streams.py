"""Streams: a register slice that cuts every path, and a queue, both for payloads of any shape."""

from __future__ import annotations

from typing import Any

from amaranth.hdl import Module, Mux, Shape, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from dtp.errors import must
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import Target

__all__ = ["BlockQueue", "ForwardRegister", "PrefetchQueue", "RegisterSlice", "StreamQueue"]


class RegisterSlice(wiring.Component):
    """Cuts valid, payload and ready of a stream: each crosses a register.

    Latency 1, a payload a cycle. Two payloads are held when the sink stalls: the one offered, and the one that
    arrived in the cycle in which ``i.ready`` could not fall yet.

    Parameters
    ----------
    shape: of the payload

    Members
    -------
    i: In(stream)
    o: Out(stream)
    """

    def __init__(self, shape: Any) -> None:
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        bits = Shape.cast(self.i.payload.shape()).width
        offered = Signal(bits, reset_less=True)
        spare = Signal(bits, reset_less=True)
        offered_valid = Signal()
        spare_valid = Signal()
        m.d.comb += [
            self.i.ready.eq(~spare_valid),
            self.o.valid.eq(offered_valid),
            self.o.payload.eq(offered),
        ]
        with m.If(~spare_valid):
            m.d.sync += spare.eq(self.i.payload)
        with m.If(~offered_valid | self.o.ready):
            m.d.sync += [
                offered_valid.eq(self.i.valid | spare_valid),
                spare_valid.eq(0),
            ]
            with m.If(spare_valid):
                m.d.sync += offered.eq(spare)
            with m.Else():
                m.d.sync += offered.eq(self.i.payload)
        with m.Elif(self.i.valid):
            m.d.sync += spare_valid.eq(1)
        return m


class ForwardRegister(wiring.Component):
    """Cuts valid and payload of a stream, not ready: half the registers of a :class:`RegisterSlice`, no multiplexer.

    Latency 1, a payload a cycle.

    Parameters
    ----------
    shape: of the payload

    Members
    -------
    i: In(stream); ``ready`` depends on ``o.ready`` in the same cycle
    o: Out(stream)
    """

    def __init__(self, shape: Any) -> None:
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        offered = Signal(Shape.cast(self.i.payload.shape()).width, reset_less=True)
        valid = Signal()
        m.d.comb += [self.i.ready.eq(~valid | self.o.ready), self.o.valid.eq(valid), self.o.payload.eq(offered)]
        with m.If(self.i.ready):
            m.d.sync += [valid.eq(self.i.valid), offered.eq(self.i.payload)]
        return m


class StreamQueue(wiring.Component):
    """First in, first out, in distributed memory: latency 1, a payload a cycle.

    ``i.ready`` is low while ``depth`` payloads wait; it does not depend on ``o.ready``. The output is read without a
    register: put a :class:`RegisterSlice` behind it where it leaves the chip.

    Parameters
    ----------
    shape: of the payload
    depth: payloads that can wait, a power of two from 2 to 4096

    Members
    -------
    i: In(stream)
    o: Out(stream)
    """

    def __init__(self, shape: Any, depth: int) -> None:
        if not 2 <= depth <= 4096 or depth & (depth - 1):
            raise must("StreamQueue", "depth", "a power of two from 2 to 4096", depth)
        self.depth = depth
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        bits = Shape.cast(self.i.payload.shape()).width
        m.submodules.memory = memory = Memory(shape=bits, depth=self.depth, init=[])
        write, read = memory.write_port(), memory.read_port(domain="comb")
        # One bit more than an address tells full from empty.
        written = Signal(range(2 * self.depth))
        taken = Signal(range(2 * self.depth))
        m.d.comb += [
            self.i.ready.eq((written ^ taken) != self.depth),
            self.o.valid.eq(written != taken),
            write.addr.eq(written[:-1]),
            write.data.eq(self.i.payload),
            write.en.eq(self.i.valid & self.i.ready),
            read.addr.eq(taken[:-1]),
            self.o.payload.eq(read.data),
        ]
        m.d.sync += [
            written.eq(written + write.en),
            taken.eq(taken + (self.o.valid & self.o.ready)),
        ]
        return m


class PrefetchQueue(wiring.Component):
    """First in, first out, in block memory: latency :data:`LATENCY`, a payload a cycle.

    The next payload is read while the one before is offered. It comes from the memory without a register.
    ``i.ready`` is low while ``depth`` payloads wait; it does not depend on ``o.ready``.

    Parameters
    ----------
    shape: of the payload
    depth: payloads that can wait, a power of two from 2 to 4096
    target: what the memory is for

    Members
    -------
    i: In(stream)
    o: Out(stream)
    """

    LATENCY = 2
    """From the cycle in which a payload is taken to the first in which it is offered."""

    def __init__(self, shape: Any, depth: int, *, target: Target = Target.GENERIC) -> None:
        if not 2 <= depth <= 4096 or depth & (depth - 1):
            raise must("PrefetchQueue", "depth", "a power of two from 2 to 4096", depth)
        self.depth = depth
        self._target = target
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        memory = BlockMemory(m, "payloads", Shape.cast(self.i.payload.shape()), self.depth, target=self._target)
        # One bit more than an address tells full from empty. ``o.ready`` comes late and only chooses.
        written, taken, following = (Signal(range(2 * self.depth)) for _ in range(3))
        ahead, gone = Signal(range(2 * self.depth), init=1), Signal()
        m.d.comb += [
            gone.eq(self.o.valid & self.o.ready),
            self.i.ready.eq((written ^ taken) != self.depth),
            memory.write.en.eq(self.i.valid & self.i.ready),
            memory.write.addr.eq(written[:-1]),
            memory.write.data.eq(self.i.payload),
            following.eq(Mux(gone, ahead, taken)),
            memory.address.eq(following[:-1]),
            self.o.payload.eq(memory.data),
        ]
        m.d.sync += [
            written.eq(written + memory.write.en),
            taken.eq(following),
            ahead.eq(Mux(gone, taken + 2, ahead)),
            self.o.valid.eq(Mux(gone, written != ahead, written != taken)),
        ]
        return m


class BlockQueue(wiring.Component):
    """First in, first out, in block memory: latency :data:`LATENCY`, a payload every :data:`PERIOD` cycles.

    ``i.ready`` is low while ``depth`` payloads wait behind the one that is offered; it does not depend on ``o.ready``.

    Parameters
    ----------
    shape: of the payload
    depth: payloads that can wait, a power of two from 2 to 4096
    target: what the memory is for

    Members
    -------
    i: In(stream)
    o: Out(stream)
    level: Out(range(depth + 1)), payloads behind the one that is offered
    empty: Out(1), nothing is inside
    """

    LATENCY = 3
    """From the cycle in which a payload is taken to the first in which it is offered."""
    PERIOD = 2
    """From the cycle in which a payload leaves to the one in which the next is offered."""

    def __init__(self, shape: Any, depth: int, *, target: Target = Target.GENERIC) -> None:
        if not 2 <= depth <= 4096 or depth & (depth - 1):
            raise must("BlockQueue", "depth", "a power of two from 2 to 4096", depth)
        self.depth = depth
        self._target = target
        super().__init__(
            {
                "i": In(stream.Signature(shape)),
                "o": Out(stream.Signature(shape)),
                "level": Out(range(depth + 1)),
                "empty": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        memory = BlockMemory(m, "payloads", Shape.cast(self.i.payload.shape()), self.depth, target=self._target)
        written, taken = Signal(range(self.depth)), Signal(range(self.depth))
        waiting, reads, read = Signal(), Signal(), Signal()
        m.d.comb += [
            waiting.eq(self.level.any()),
            self.i.ready.eq(~self.level[-1]),
            memory.write.en.eq(self.i.valid & self.i.ready),
            memory.write.addr.eq(written),
            memory.write.data.eq(self.i.payload),
            memory.address.eq(taken),
            self.empty.eq(~waiting & ~read & ~self.o.valid),
            reads.eq(waiting & ~read & (~self.o.valid | self.o.ready)),
        ]
        m.d.sync += [
            self.level.eq(self.level + memory.write.en - reads),
            written.eq(written + memory.write.en),
            taken.eq(taken + reads),
            read.eq(reads),
        ]
        with m.If(read):
            m.d.sync += [self.o.valid.eq(1), self.o.payload.eq(memory.data)]
        with m.Elif(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        return m
