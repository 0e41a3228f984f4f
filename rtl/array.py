"""MAC array of the attention tile: multipliers, adder trees and accumulators in hardware."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from amaranth.hdl import Cat, Module, Mux, Shape, Signal, Value, signed, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from dtp.array import RESCALE_BITS, RESCALE_FINE_BITS, ArrayParams
from rtl.lib.multiplier import CopyRegister, MultiplexedAdder, Multiplier, Target

__all__ = ["MacArray", "StepLayout"]

#: Rows that share the last register of what every row is told; their multipliers fill a corner of a large chip.
_ROWS_PER_COPY = 2
#: Rows that share the enable of a swap. Four multipliers share the enable wires of an ECP5 block; few copies leave
#: the placer free to mix rows in it.
_ROWS_PER_SWAP = 4


class StepLayout(data.StructLayout):
    """What one step says to every row.

    Members
    -------
    data: moving operands, segments × block, signed(moving_bits)
    swap: take the stationary operands that were fed in the cycles before this one
    addr: accumulator of every (row, segment)
    first: start from ``init`` instead of the old accumulator
    init: segments, signed(init_bits)
    shift: right shift of the sums, rounding half up
    emit: show the new accumulators at the output
    tag: carried along with the output
    """

    def __init__(self, params: ArrayParams) -> None:
        lanes = data.ArrayLayout(signed(params.moving_bits), params.block)
        super().__init__(
            {
                "data": data.ArrayLayout(lanes, params.segments),
                "swap": unsigned(1),
                "addr": unsigned(params.addr_bits),
                "first": unsigned(1),
                "init": data.ArrayLayout(signed(params.init_bits), params.segments),
                "shift": unsigned(params.shift_bits),
                "emit": unsigned(1),
                "tag": unsigned(params.tag_bits),
            }
        )


class MacArray(wiring.Component):
    """``rows`` × ``segments`` dot products of ``block`` lanes a cycle, accumulated in place.

    Arithmetic: :class:`dtp.array.GoldenArray`, bit for bit. A pipeline of fixed latency without back-pressure:
    it takes a feed and a step in every cycle, outputs come in the order of the steps that emit, exactly
    ``params.latency`` cycles after them.

    The caller keeps one promise: two steps of the same ``addr``, the second not ``first``, are at least
    ``params.revisit_cycles`` cycles apart (never more than ``block / segments`` or 5).

    Feeds fill a shadow operand, ``segments`` lanes of every row a feed: lane l comes with feed l // segments,
    at position l % segments. A step with ``swap`` takes the last ``block`` lanes fed in earlier cycles; a feed
    of the same cycle belongs to the next chunk.

    Parameters
    ----------
    params: shape, widths and schedule
    target: plain description or explicit ECP5 cells

    Members
    -------
    feed_valid: In(1)
    feed_data: In(rows × segments, signed(row_bits))
    step_valid: In(1)
    step: In(:class:`StepLayout`)
    rescale: In(rows, unsigned(5)), with the step; right shift of the old accumulators, rounding half up
    o_valid: Out(1)
    o_tag: Out(tag_bits)
    o_data: Out(rows × segments, signed(acc_bits))
    """

    def __init__(self, params: ArrayParams, *, target: Target = Target.GENERIC) -> None:
        self.params = params
        self._target = target
        operands = data.ArrayLayout(signed(params.row_bits), params.segments)
        results = data.ArrayLayout(signed(params.acc_bits), params.segments)
        super().__init__(
            {
                "feed_valid": In(1),
                "feed_data": In(data.ArrayLayout(operands, params.rows)),
                "step_valid": In(1),
                "step": In(StepLayout(params)),
                "rescale": In(data.ArrayLayout(unsigned(RESCALE_BITS), params.rows)),
                "o_valid": Out(1),
                "o_tag": Out(params.tag_bits),
                "o_data": Out(data.ArrayLayout(results, params.rows)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        p = self.params

        # Control, one register a cycle from the port to the cycle before the one in which it acts. The register
        # of that last cycle comes in copies, one for a few rows each.
        valid = _Line(m, "valid", self.step_valid, p.result_cycle, reset_less=False)
        addr = _Line(m, "addr", self.step.addr, p.result_cycle - 1)
        first = _Line(m, "first", self.step.first, p.term_cycle - 1)
        shift = _Line(m, "shift", self.step.shift, p.sum_cycle - 1)
        emit = _Line(m, "emit", self.step.emit, p.result_cycle)
        tag = _Line(m, "tag", self.step.tag, p.result_cycle)
        init = _Line(m, "init", self.step.init.as_value(), p.term_cycle - 1)
        init_or_zero = Mux(first[p.term_cycle - 1], init[p.term_cycle - 1], 0)

        for row in range(p.rows):
            if row % _ROWS_PER_COPY == 0:
                copy = functools.partial(self._copy, m, row // _ROWS_PER_COPY)
                told = _Told(
                    moving=copy("moving", self.step.data.as_value()),
                    fed=copy("fed", self.feed_valid),
                    shift=copy("shift", shift[p.sum_cycle - 1]),
                    read_addr=copy("read_addr", addr[p.read_cycle - 1]),
                    first=copy("first", first[p.keep_cycle]),
                    init_or_zero=copy("init_or_zero", init_or_zero),
                    write=copy("write", valid[p.result_cycle - 1]),
                    write_addr=copy("write_addr", addr[p.result_cycle - 1]),
                )
            if row % _ROWS_PER_SWAP == 0:
                swap = self._copy(m, row // _ROWS_PER_SWAP, "swap", self.step_valid & self.step.swap)
            active = self._stationary(m, row, told.fed)
            rescale = self._rescale(m, row, first[p.operand_cycle])
            for segment in range(p.segments):
                lanes = told.moving[segment * p.block * p.moving_bits :]
                products: list[Value] = []
                for lane in range(p.block):
                    multiplier = Multiplier(p.row_bits, p.moving_bits, target=self._target)
                    m.submodules[f"multiplier_{row}_{segment}_{lane}"] = multiplier
                    m.d.comb += [
                        multiplier.a.eq(active[lane]),
                        multiplier.a_enable.eq(swap),
                        multiplier.b.eq(lanes[lane * p.moving_bits :][: p.moving_bits].as_signed()),
                    ]
                    lane_name = f"product_{row}_{segment}_{lane}"
                    product = multiplier.o[: p.product_bits].as_signed()
                    products.append(_Line(m, lane_name, product, p.product_registers)[p.product_registers])
                name = f"{row}_{segment}"
                total = _tree(m, name, products)
                term = self._term(m, name, total, told.shift)
                start = told.init_or_zero[segment * p.init_bits :][: p.init_bits].as_signed()
                m.d.comb += self.o_data[row][segment].eq(self._accumulate(m, name, term, start, rescale, told))

        m.d.comb += [
            self.o_valid.eq(valid[p.result_cycle] & emit[p.result_cycle]),
            self.o_tag.eq(tag[p.result_cycle]),
        ]
        return m

    def _copy(self, m: Module, group: int, name: str, source: Value) -> Value:
        """The source one cycle later, in a register of this group's own."""
        register = CopyRegister(len(source), target=self._target)
        m.submodules[f"{name}_{group}"] = register
        m.d.comb += register.i.eq(source)
        return register.o

    def _stationary(self, m: Module, row: int, fed_valid: Value) -> list[Signal]:
        """Port register and shift chain of one row's stationary operand: what a swap of this cycle takes."""
        p = self.params
        fed = [Signal(signed(p.row_bits), name=f"fed_{row}_{n}", reset_less=True) for n in range(p.segments)]
        shadow = [Signal(signed(p.row_bits), name=f"shadow_{row}_{n}", reset_less=True) for n in range(p.block)]
        for position in range(p.segments):
            m.d.sync += fed[position].eq(self.feed_data[row][position])
        with m.If(fed_valid):
            for lane, source in enumerate([*shadow[p.segments :], *fed]):
                m.d.sync += shadow[lane].eq(source)
        return shadow

    def _rescale(self, m: Module, row: int, first: Value) -> _Line:
        """One row's rescale amount in every cycle, 0 in a first step."""
        p = self.params
        amount = _Line(m, f"rescale_{row}", self.rescale[row], p.operand_cycle)[p.operand_cycle]
        used = Signal(RESCALE_BITS, name=f"rescale_used_{row}")
        m.d.comb += used.eq(Mux(first, 0, amount))
        return _Line(m, f"rescale_used_{row}", used, p.term_cycle, start=p.operand_cycle)

    def _term(self, m: Module, name: str, total: Signal, shift: Value) -> Signal:
        """The sum of ``sum_cycle``, shifted and rounded: seen in ``term_cycle``."""
        p = self.params
        # A bit below the sum collects the rounding bit: the last bit that the shift drops.
        shifted: Value = Cat(0, total).as_signed()
        for level in reversed(range(1, p.shift_bits)):
            shifted = Mux(shift[level], shifted >> (1 << level), shifted)
        coarse = Signal(signed(p.sum_bits + 1), name=f"shifted_{name}")
        m.d.comb += coarse.eq(shifted)
        adder = MultiplexedAdder(p.sum_bits, target=self._target)
        m.submodules[f"rounder_{name}"] = adder
        term = Signal(signed(p.sum_bits), name=f"term_{name}", reset_less=True)
        m.d.comb += [
            adder.select.eq(shift[0]),
            adder.x0.eq(coarse >> 1),
            adder.x1.eq(coarse >> 2),
            adder.y.eq(0),
            adder.carry.eq(Mux(shift[0], coarse[1], coarse[0])),
        ]
        m.d.sync += term.eq(adder.o)
        return term

    def _accumulate(self, m: Module, name: str, term: Signal, start: Value, rescale: _Line, told: _Told) -> Signal:
        """Read, rescale, add, write back: the new accumulator, seen in ``result_cycle``."""
        p = self.params
        # A read of the address that is being written never matters: synthesis need not compare addresses.
        memory = Memory(shape=signed(p.acc_bits), depth=p.acc_depth, init=[], attrs={"no_rw_check": 1})
        m.submodules[f"memory_{name}"] = memory
        read = memory.read_port(domain="comb")
        m.d.comb += read.addr.eq(told.read_addr)
        old: Value = read.data
        if p.read_registered:
            word = Signal(signed(p.acc_bits), name=f"word_{name}", reset_less=True)
            m.d.sync += word.eq(old)
            old = word
        coarse_cycle, fine_cycle = p.keep_cycle + 1, p.keep_cycle + 2
        kept = Signal(signed(p.acc_bits), name=f"kept_{name}", reset_less=True)
        m.d.sync += kept.eq(old)
        # As for the sum, a bit below the accumulator collects the rounding bit.
        shifted: Value = Cat(0, kept).as_signed()
        for level in reversed(range(RESCALE_FINE_BITS, RESCALE_BITS)):
            shifted = Mux(rescale[coarse_cycle][level], shifted >> (1 << level), shifted)
        coarse = Signal(signed(p.acc_bits + 1), name=f"coarse_{name}", reset_less=True)
        m.d.sync += coarse.eq(Mux(told.first, 0, shifted))  # 0 in a first step
        shifted = coarse
        for level in reversed(range(1, RESCALE_FINE_BITS)):
            shifted = Mux(rescale[fine_cycle][level], shifted >> (1 << level), shifted)
        fine = Signal(signed(p.acc_bits + 1), name=f"fine_{name}")
        m.d.comb += fine.eq(shifted | Cat(0, start).as_signed())
        adder = MultiplexedAdder(p.acc_bits, target=self._target)
        m.submodules[f"adder_{name}"] = adder
        result = Signal(signed(p.acc_bits), name=f"result_{name}", reset_less=True)
        m.d.comb += [
            adder.select.eq(rescale[fine_cycle][0]),
            adder.x0.eq(fine >> 1),
            adder.x1.eq(fine >> 2),
            adder.y.eq(term),
            adder.carry.eq(Mux(rescale[fine_cycle][0], fine[1], fine[0])),
        ]
        m.d.sync += result.eq(adder.o)
        port = memory.write_port()
        m.d.comb += [port.addr.eq(told.write_addr), port.data.eq(result), port.en.eq(told.write)]
        return result


@dataclass(frozen=True)
class _Told:
    """What a few rows are told, each in the cycle in which it acts."""

    moving: Value
    fed: Value
    shift: Value
    read_addr: Value
    first: Value
    init_or_zero: Value
    write: Value
    write_addr: Value


class _Line:
    """A value delayed by registers: ``line[k]`` was presented k cycles ago; the source itself is ``start``."""

    def __init__(
        self, m: Module, name: str, source: Value, cycles: int, *, start: int = 0, reset_less: bool = True
    ) -> None:
        self._start = start
        self._taps: list[Value] = [source]
        for cycle in range(start + 1, cycles + 1):
            tap = Signal(Shape.cast(source.shape()), name=f"{name}_{cycle}", reset_less=reset_less)
            m.d.sync += tap.eq(self._taps[-1])
            self._taps.append(tap)

    def __getitem__(self, cycle: int) -> Value:
        return self._taps[cycle - self._start]


def _tree(m: Module, name: str, values: list[Value]) -> Signal:
    """Sum of a power of two of signed values, one register a level."""
    level = 0
    while len(values) > 1:
        sums: list[Value] = []
        for n in range(0, len(values), 2):
            total = values[n] + values[n + 1]
            register = Signal(total.shape(), name=f"tree_{name}_{level}_{n // 2}", reset_less=True)
            m.d.sync += register.eq(total)
            sums.append(register)
        values, level = sums, level + 1
    assert isinstance(values[0], Signal)
    return values[0]
