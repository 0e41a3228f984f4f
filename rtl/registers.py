"""Registers behind AXI4-Lite, made from a description of :mod:`dtp.registers`."""

from __future__ import annotations

from typing import Any

from amaranth.hdl import Cat, Const, Module, Signal, Value, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from dtp.registers import WORD_BITS, WORD_BYTES, Access, Field, Register, RegisterMap, Response

__all__ = ["AddressLayout", "AxiLiteRegisters", "ReadLayout", "ResponseLayout", "WriteLayout", "fields_layout"]

_BYTE_BITS = (WORD_BYTES - 1).bit_length()


class AddressLayout(data.StructLayout):
    """Byte address in the map, and protection bits that are not looked at."""

    def __init__(self, described: RegisterMap) -> None:
        super().__init__({"addr": unsigned(described.address_bits), "prot": unsigned(3)})


class WriteLayout(data.StructLayout):
    """A word, and which of its bytes are written."""

    def __init__(self) -> None:
        super().__init__({"data": unsigned(WORD_BITS), "strb": unsigned(WORD_BYTES)})


class ResponseLayout(data.StructLayout):
    """Answer to a write: a value of :class:`dtp.registers.Response`."""

    def __init__(self) -> None:
        super().__init__({"resp": unsigned(2)})


class ReadLayout(data.StructLayout):
    """Answer to a read: a word, and a value of :class:`dtp.registers.Response`."""

    def __init__(self) -> None:
        super().__init__({"data": unsigned(WORD_BITS), "resp": unsigned(2)})


def fields_layout(described: RegisterMap, access: Access) -> data.StructLayout:
    """All fields of one access that are not constant: a struct of registers, each a struct of its fields."""
    registers = {
        register.name: {field.name: unsigned(field.bits) for field in register.fields if not field.constant}
        for register in described.registers
        if register.access is access
    }
    return data.StructLayout({name: data.StructLayout(fields) for name, fields in registers.items() if fields})


class AxiLiteRegisters(wiring.Component):
    """An AXI4-Lite slave in front of the registers of a map; the rules are ``docs/registers.md``.

    What is answered is the contract's. A write acts in the cycle behind the one that took the later of its two halves,
    or when the answer before it has left; in the cycle in which ``b.valid`` rises, ``values`` and ``pulses`` are new. A
    read shows what is there in the cycle behind the one that took its address; ``r.valid`` rises in the next one.
    Writes follow each other in two cycles, reads in three; neither waits for the other.

    Stalls: address and data of a write are taken in any order, one of each; a read, when the one before has been
    answered. No output depends on an input in the same cycle.

    Area: every word is copied into flip-flops that are 0 unless it was asked for, so that reading is an OR of them.

    Parameters
    ----------
    described: the map

    Members
    -------
    aw, ar: In(stream of :class:`AddressLayout`)
    w: In(stream of :class:`WriteLayout`)
    b: Out(stream of :class:`ResponseLayout`)
    r: Out(stream of :class:`ReadLayout`)
    values: Out(:func:`fields_layout` of the registers that can be read and written)
    pulses: Out(:func:`fields_layout` of the pulses), 1 for one cycle
    inputs: In(:func:`fields_layout` of the registers that are read only)
    """

    def __init__(self, described: RegisterMap) -> None:
        self.described = described
        address = stream.Signature(AddressLayout(described))
        resets = {
            register.name: {field.name: field.reset for field in register.fields}
            for register in described.registers
            if register.access is Access.READ_WRITE
        }
        super().__init__(
            {
                "aw": In(address),
                "w": In(stream.Signature(WriteLayout())),
                "b": Out(stream.Signature(ResponseLayout())),
                "ar": In(address),
                "r": Out(stream.Signature(ReadLayout())),
                "values": Out(fields_layout(described, Access.READ_WRITE), init=resets),
                "pulses": Out(fields_layout(described, Access.WRITE_PULSE)),
                "inputs": In(fields_layout(described, Access.READ_ONLY)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        self._write(m)
        self._read(m)
        return m

    def _write(self, m: Module) -> None:
        """Both halves are held until the answer before has left; then they act, and their answer is offered."""
        here = _Address(m, "write", self.aw)
        half = Signal(self.w.payload.shape(), name="write_word", reset_less=True)
        half_held = Signal()
        act = Signal()
        m.d.comb += [self.w.ready.eq(~half_held), act.eq(here.held & half_held & ~self.b.valid), here.leave.eq(act)]
        with m.If(self.w.ready):
            m.d.sync += [half.eq(self.w.payload), half_held.eq(self.w.valid)]
        with m.If(act):
            m.d.sync += half_held.eq(0)

        with m.If(act):
            m.d.sync += [self.b.valid.eq(1), self.b.payload.resp.eq(self._response(here, writing=True))]
        with m.Elif(self.b.ready):
            m.d.sync += self.b.valid.eq(0)

        m.d.sync += self.pulses.eq(0)
        for register in self.described.registers:
            target = {Access.READ_WRITE: self.values, Access.WRITE_PULSE: self.pulses}.get(register.access)
            if target is None:
                continue
            chosen = act & here.at(register)
            for byte in range(WORD_BYTES):
                with m.If(chosen & half.strb[byte]):
                    for field in register.fields:
                        first = max(field.offset, 8 * byte)
                        end = min(field.offset + field.bits, 8 * byte + 8)
                        if first < end:
                            part = target[register.name][field.name][first - field.offset : end - field.offset]
                            m.d.sync += part.eq(half.data[first:end])

    def _read(self, m: Module) -> None:
        """A cycle to take the address, one to load the word that it names, then the answer until it is taken."""
        here = _Address(m, "read", self.ar, also=self.r.valid)
        m.d.comb += here.leave.eq(1)
        with m.If(here.held):
            m.d.sync += [self.r.valid.eq(1), self.r.payload.resp.eq(self._response(here, writing=False))]
        with m.Elif(self.r.ready):
            m.d.sync += self.r.valid.eq(0)
        answer: Value = Const(0, WORD_BITS)
        for register in self.described.registers:
            if register.access is Access.WRITE_PULSE:
                continue
            word = Signal(WORD_BITS, name=f"{register.name}_word", reset_less=True)
            with m.If(self.ar.ready):
                m.d.sync += word.eq(0)
            with m.Elif(here.held & here.at(register)):
                m.d.sync += word.eq(self._shown(register))
            answer |= word
        m.d.comb += self.r.payload.data.eq(answer)

    def _shown(self, register: Register) -> Value:
        """The word that a read of this register answers."""
        source: Any = self.values if register.access is Access.READ_WRITE else self.inputs

        def part(field: Field) -> Value:
            return Const(field.reset, field.bits) if field.constant else source[register.name][field.name]

        parts: list[Value] = []
        bits = 0
        for field in sorted(register.fields, key=lambda field: field.offset):
            parts += [Const(0, field.offset - bits), part(field)]
            bits = field.offset + field.bits
        return Cat(*parts)

    def _response(self, here: _Address, *, writing: bool) -> Value:
        """The answer to an access at this address."""
        known, refused = Const(0), Const(0)
        for register in self.described.registers:
            known |= here.at(register)
            if writing and register.access is Access.READ_ONLY:
                refused |= here.at(register)
        # Both errors have the upper bit, one of them the lower one.
        assert (Response.OKAY, Response.SLAVE_ERROR, Response.DECODE_ERROR) == (0, 2, 3)
        return Cat(~known, ~known | refused)


class _Address:
    """Holds the address of an access until ``leave``; none is taken before, nor while ``also``."""

    def __init__(self, m: Module, name: str, port: Any, *, also: Value | None = None) -> None:
        self.held = Signal(name=f"{name}_held")
        self.leave = Signal(name=f"{name}_leave")
        address = port.payload.addr
        self._word = Signal(len(address) - _BYTE_BITS, name=f"{name}_address", reset_less=True)
        self._aligned = Signal(name=f"{name}_aligned", reset_less=True)
        m.d.comb += port.ready.eq(~self.held if also is None else ~self.held & ~also)
        with m.If(port.ready):
            m.d.sync += [
                self._word.eq(address[_BYTE_BITS:]),
                self._aligned.eq(~address[:_BYTE_BITS].any()),
                self.held.eq(port.valid),
            ]
        with m.Elif(self.leave):
            m.d.sync += self.held.eq(0)

    def at(self, register: Register) -> Value:
        """Whether the address is that of this register."""
        return self._aligned & (self._word == register.address // WORD_BYTES)
