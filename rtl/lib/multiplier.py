"""Signed multiplier with registered operands and product, and an adder that swallows a multiplexer.

Both exist twice: as plain Amaranth for simulation and any synthesizer, and as explicit cells of the Lattice
ECP5, whose synthesis never uses the registers inside a multiplier and never merges a multiplexer into a carry
chain.
"""

from __future__ import annotations

import enum

from amaranth.hdl import Array, Cat, ClockSignal, Const, Instance, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from dtp.array import MULTIPLIER_CYCLES
from dtp.errors import must

__all__ = [
    "LATENCY", "CopyRegister", "JoinedAdder", "LogicMultiplier", "MultiplexedAdder", "Multiplier", "Selector", "Target",
]  # fmt: skip

#: Cycles from operands to product.
LATENCY = MULTIPLIER_CYCLES

_DSP_BITS = 18

# Tables of one position of a CCU2C: the four-input table reads D C B A as its index and is half the sum; where
# it reads 0, the carry out is what its low four entries say of B A alone, and where it reads 1, the carry in.
#: A ⊕ (D if B else C), carry A: an addend on A, the multiplexer on B, C, D.
_SUM_TABLE = sum(((n & 1) ^ (n >> (3 if n & 2 else 2) & 1)) << n for n in range(16))
#: (A or B) ⊕ (C or D), carry A or B: addends in two parts each.
_JOINED_TABLE = sum(((n & 3 != 0) ^ (n >> 2 != 0)) << n for n in range(16))
#: 0 with C held high, carry A: turns a signal into the carry of the next position.
_CARRY_TABLE = 0x000A
#: (A and B) ⊕ (C and D), carry A and B: the sum of two places of partial products.
_PAIR_TABLE = sum(((n & n >> 1 & 1) ^ (n >> 2 & n >> 3 & 1)) << n for n in range(16))
#: The same with (A and B) inverted: a partial product that is subtracted, with a carry of one below it.
_NEGATIVE_PAIR_TABLE = 0xFFFF ^ _PAIR_TABLE
#: B if C else A.
_CHOICE_TABLE = sum((n >> (1 if n & 4 else 0) & 1) << n for n in range(16))


class Target(enum.Enum):
    """What the hardware description is written for."""

    GENERIC = "generic"
    ECP5 = "ecp5"


class Multiplier(wiring.Component):
    """``o`` is the product of the registered operands, :data:`LATENCY` cycles after them.

    Operand ``a`` is taken only in a cycle with ``a_enable``; ``b`` is taken in every cycle. No reset: the
    product is undefined until the first ``a_enable``. On ECP5 the whole component is one MULT18X18D with its
    own registers.

    Parameters
    ----------
    a_bits, b_bits: widths of the signed operands, at most 18 bits
    target: plain description or ECP5 cell

    Members
    -------
    a: In(signed(a_bits))
    a_enable: In(1)
    b: In(signed(b_bits))
    o: Out(signed(a_bits + b_bits))
    """

    def __init__(self, a_bits: int, b_bits: int, *, target: Target = Target.GENERIC) -> None:
        for name, bits in (("a_bits", a_bits), ("b_bits", b_bits)):
            if not 1 <= bits <= _DSP_BITS:
                raise must("Multiplier", name, f"from 1 to {_DSP_BITS}", bits)
        self._target = target
        super().__init__(
            {
                "a": In(signed(a_bits)),
                "a_enable": In(1),
                "b": In(signed(b_bits)),
                "o": Out(signed(a_bits + b_bits)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        if self._target is Target.ECP5:
            product = Signal(2 * _DSP_BITS)
            m.submodules.dsp = self._mult18x18d(product)
            m.d.comb += self.o.eq(product[2 * _DSP_BITS - len(self.o) :])
        else:
            a = Signal.like(self.a, reset_less=True)
            b = Signal.like(self.b, reset_less=True)
            product = Signal.like(self.o, reset_less=True)
            with m.If(self.a_enable):
                m.d.sync += a.eq(self.a)
            m.d.sync += [b.eq(self.b), product.eq(a * b)]
            m.d.comb += self.o.eq(product)
        return m

    def _mult18x18d(self, product: Signal) -> Instance:
        # Operands at the upper end, zeros below: a sign extension would be one net to half of the inputs.
        a = Cat(Const(0, _DSP_BITS - len(self.a)), self.a)
        b = Cat(Const(0, _DSP_BITS - len(self.b)), self.b)
        ports: dict[str, Value] = {f"i_A{n}": a[n] for n in range(_DSP_BITS)}
        ports |= {f"i_B{n}": b[n] for n in range(_DSP_BITS)}
        ports |= {f"i_C{n}": Const(0, 1) for n in range(_DSP_BITS)}
        ports |= {f"o_P{n}": product[n] for n in range(2 * _DSP_BITS)}
        return Instance(
            "MULT18X18D",
            p_REG_INPUTA_CLK="CLK0",
            p_REG_INPUTA_CE="CE0",
            p_REG_INPUTA_RST="RST0",
            p_REG_INPUTB_CLK="CLK0",
            p_REG_INPUTB_CE="CE1",
            p_REG_INPUTB_RST="RST0",
            p_REG_INPUTC_CLK="NONE",
            p_REG_PIPELINE_CLK="NONE",
            p_REG_OUTPUT_CLK="CLK0",
            p_REG_OUTPUT_CE="CE1",
            p_REG_OUTPUT_RST="RST0",
            p_GSR="DISABLED",
            p_SOURCEB_MODE="B_INPUT",
            p_MULT_BYPASS="DISABLED",
            p_RESETMODE="SYNC",
            i_CLK0=ClockSignal(),
            i_CE0=self.a_enable,
            i_CE1=Const(1, 1),
            i_RST0=Const(0, 1),
            i_SIGNEDA=Const(1, 1),
            i_SIGNEDB=Const(1, 1),
            i_SOURCEA=Const(0, 1),
            i_SOURCEB=Const(0, 1),
            **ports,
        )


class LogicMultiplier(wiring.Component):
    """``o`` is the product of the operands of :data:`LATENCY` cycles ago, without a multiplier of the chip.

    On ECP5 the partial products of two bits of ``a`` share the carry cells that add them (CCU2C): half of what
    synthesis finds. For the few products that a chip has no multipliers left for.

    Parameters
    ----------
    a_bits: width of a signed operand, even, at least 4
    b_bits: width of the other
    target: plain description or ECP5 cells

    Members
    -------
    a: In(signed(a_bits))
    b: In(signed(b_bits))
    o: Out(signed(a_bits + b_bits))
    """

    def __init__(self, a_bits: int, b_bits: int, *, target: Target = Target.GENERIC) -> None:
        if a_bits < 4 or a_bits % 2:
            raise must("LogicMultiplier", "a_bits", "even and at least 4", a_bits)
        self._target = target
        super().__init__({"a": In(signed(a_bits)), "b": In(signed(b_bits)), "o": Out(signed(a_bits + b_bits))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        product = Signal.like(self.o, reset_less=True)
        m.d.comb += self.o.eq(product)
        if self._target is not Target.ECP5:
            a, b = Signal.like(self.a, reset_less=True), Signal.like(self.b, reset_less=True)
            m.d.sync += [a.eq(self.a), b.eq(self.b), product.eq(a * b)]
            return m
        sums: list[Value] = []
        for n in range(0, len(self.a), 2):
            pair = Signal(signed(len(self.b) + 2), name=f"pair_{n}", reset_less=True)
            m.d.sync += pair.eq(self._pair(m, n))
            sums.append(pair)
        shift = 2  # between neighbours
        while len(sums) > 1:
            level: list[Value] = sums[len(sums) & ~1 :]
            for n in range(0, len(sums) & ~1, 2):
                low, high = sums[n], sums[n + 1]
                width = min(len(self.o), max(len(low), len(high) + shift) + 1) - shift
                m.submodules[f"sum_{shift}_{n}"] = adder = MultiplexedAdder(width, target=self._target)
                upper, term = Signal(signed(width)), Signal(signed(width))
                m.d.comb += [upper.eq(low >> shift), term.eq(high), adder.x0.eq(upper), adder.y.eq(term)]
                level.insert(n // 2, Cat(low[:shift], adder.o).as_signed())
            sums, shift = level, 2 * shift
        m.d.sync += product.eq(sums[0])
        return m

    def _pair(self, m: Module, n: int) -> Value:
        """a[n]·b + 2·a[n + 1]·b, the last bit of a being negative."""
        low, high, last = self.a[n], self.a[n + 1], n + 2 == len(self.a)
        wide, out = Signal(signed(len(self.b) + 2), name=f"wide_{n}"), Signal(len(self.b) + 2, name=f"out_{n}")
        m.d.comb += wide.eq(self.b)
        one, zero = Const(1, 1), Const(0, 1)
        # The carry that a subtraction starts with, then a place a bit.
        places = [(_CARRY_TABLE, one if last else zero, zero, one, zero, Signal(name=f"carry_{n}"))]
        doubled = Cat(zero, wide)
        for bit in range(len(wide)):
            if last:
                places.append((_NEGATIVE_PAIR_TABLE, high, doubled[bit], low, wide[bit], out[bit]))
            else:
                places.append((_PAIR_TABLE, low, wide[bit], high, doubled[bit], out[bit]))
        _carry_chain(m, f"pair_{n}_", places)
        return out.as_signed()


class MultiplexedAdder(wiring.Component):
    """``o = (x1 if select else x0) + y + carry``, modulo 2^width, in one cycle without registers.

    On ECP5 multiplexer and adder share the same carry cells (CCU2C): one four-input table a bit, half of what
    synthesis finds, and one level of logic less.

    Parameters
    ----------
    width: bits of operands and result
    target: plain description or ECP5 cells

    Members
    -------
    select: In(1)
    x0, x1, y: In(width)
    carry: In(1)
    o: Out(width)
    """

    def __init__(self, width: int, *, target: Target = Target.GENERIC) -> None:
        self._target = target
        super().__init__(
            {
                "select": In(1),
                "x0": In(width),
                "x1": In(width),
                "y": In(width),
                "carry": In(1),
                "o": Out(width),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        if self._target is Target.ECP5:
            self._carry_cells(m)
        else:
            # The bit below both addends turns the carry into part of one addition.
            x = Cat(self.carry, Mux(self.select, self.x1, self.x0))
            y = Cat(self.carry, self.y)
            m.d.comb += self.o.eq((x + y)[1:])
        return m

    def _carry_cells(self, m: Module) -> None:
        low, high = Const(0, 1), Const(1, 1)
        # One position a bit, the carry's own below them, an idle one above where their number would be odd.
        positions = [(_CARRY_TABLE, self.carry, low, high, low, Signal(name="carry_o"))]
        for n in range(len(self.o)):
            positions.append((_SUM_TABLE, self.y[n], self.select, self.x0[n], self.x1[n], self.o[n]))
        _carry_chain(m, "", positions)


class JoinedAdder(wiring.Component):
    """``o = (x0 | x1) + (y0 | y1)``, modulo 2^width, in one cycle without registers.

    On ECP5 the ORs take no cells beside those of the carry (CCU2C).

    Parameters
    ----------
    width: bits of operands and result
    target: plain description or ECP5 cells

    Members
    -------
    x0, x1, y0, y1: In(width)
    o: Out(width)
    """

    def __init__(self, width: int, *, target: Target = Target.GENERIC) -> None:
        self._target = target
        operands = {name: In(width) for name in ("x0", "x1", "y0", "y1")}
        super().__init__(operands | {"o": Out(width)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        if self._target is Target.ECP5:
            places = zip(self.x0, self.x1, self.y0, self.y1, self.o, strict=True)
            _carry_chain(m, "", [(_JOINED_TABLE, *place) for place in places])
        else:
            m.d.comb += self.o.eq((self.x0 | self.x1) + (self.y0 | self.y1))
        return m


def _carry_chain(m: Module, prefix: str, places: list[tuple[int, Value, Value, Value, Value, Signal]]) -> None:
    """Cells for a row of places (table, A, B, C, D, sum), from the lowest; an idle one above an odd number."""
    low, high = Const(0, 1), Const(1, 1)
    if len(places) % 2:
        places = [*places, (_CARRY_TABLE, low, low, high, low, Signal(name=f"{prefix}idle_o"))]
    chain: Value = low
    for n in range(0, len(places), 2):
        (t0, a0, b0, c0, d0, s0), (t1, a1, b1, c1, d1, s1) = places[n : n + 2]
        chain_in, chain = chain, Signal(name=f"{prefix}chain_{n // 2}")
        m.submodules[f"{prefix}cell_{n // 2}"] = Instance(
            "CCU2C",
            p_INIT0=Const(t0, 16),
            p_INIT1=Const(t1, 16),
            p_INJECT1_0="NO",
            p_INJECT1_1="NO",
            i_CIN=chain_in,
            i_A0=a0,
            i_B0=b0,
            i_C0=c0,
            i_D0=d0,
            i_A1=a1,
            i_B1=b1,
            i_C1=c1,
            i_D1=d1,
            o_S0=s0,
            o_S1=s1,
            o_COUT=chain,
        )


class Selector(wiring.Component):
    """``o`` is ``i[select]``.

    On ECP5, up to eight words take half a cell a word and bit, and the two multiplexers that join such cells (PFUMX,
    L6MUX21). Synthesis that may choose those everywhere makes the rest of a design larger.

    Parameters
    ----------
    width: bits of a word
    count: words, a power of two, at least 2
    target: plain description or ECP5 cells

    Members
    -------
    i: In(count × width)
    select: In(range(count))
    o: Out(width)
    """

    def __init__(self, width: int, count: int, *, target: Target = Target.GENERIC) -> None:
        if count < 2 or count & (count - 1):
            raise must("Selector", "count", "a power of two from 2 on", count)
        self._target = target
        super().__init__({"i": In(data.ArrayLayout(width, count)), "select": In(range(count)), "o": Out(width)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        count = len(self.i)
        if self._target is not Target.ECP5 or count > 8:
            m.d.comb += self.o.eq(Array(self.i[n] for n in range(count))[self.select])
            return m
        for bit in range(len(self.o)):
            level = [self.i[n][bit] for n in range(count)]
            for depth in range(count.bit_length() - 1):
                select, chosen = self.select[depth], []
                for n in range(0, len(level), 2):
                    out = Signal(name=f"chosen_{bit}_{depth}_{n // 2}")
                    low, high = level[n], level[n + 1]
                    if depth == 0:
                        ports = {"i_A": low, "i_B": high, "i_C": select, "i_D": Const(0, 1)}
                        cell = Instance("LUT4", p_INIT=Const(_CHOICE_TABLE, 16), **ports, o_Z=out)
                    elif depth == 1:
                        cell = Instance("PFUMX", i_BLUT=low, i_ALUT=high, i_C0=select, o_Z=out)
                    else:
                        cell = Instance("L6MUX21", i_D0=low, i_D1=high, i_SD=select, o_Z=out)
                    m.submodules[f"cell_{bit}_{depth}_{n // 2}"] = cell
                    chosen.append(out)
                level = chosen
            m.d.comb += self.o[bit].eq(level[0])
        return m


class CopyRegister(wiring.Component):
    """``o`` is ``i`` of the cycle before: one of several equal registers that share a large fan-out.

    Synthesis would merge equal registers into one that reaches across the chip; on ECP5 these are explicit cells
    (TRELLIS_FF), which it leaves alone. Without reset; 0 after configuration.

    Parameters
    ----------
    width: bits
    target: plain description or ECP5 cells

    Members
    -------
    i: In(width)
    o: Out(width)
    """

    def __init__(self, width: int, *, target: Target = Target.GENERIC) -> None:
        self._target = target
        super().__init__({"i": In(width), "o": Out(width)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        if self._target is Target.ECP5:
            for n in range(len(self.i)):
                m.submodules[f"bit_{n}"] = Instance(
                    "TRELLIS_FF",
                    p_GSR="DISABLED",
                    p_CEMUX="1",
                    p_CLKMUX="CLK",
                    p_LSRMUX="LSR",
                    p_SRMODE="LSR_OVER_CE",
                    p_REGSET="RESET",
                    i_CLK=ClockSignal(),
                    i_LSR=Const(0, 1),
                    i_DI=self.i[n],
                    o_Q=self.o[n],
                )
        else:
            register = Signal(len(self.i), reset_less=True)
            m.d.sync += register.eq(self.i)
            m.d.comb += self.o.eq(register)
        return m
