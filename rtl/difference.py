"""Difference norm in hardware: sums of squares of differences and references, a row each, and their ratio."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from dtp.config import Config
from dtp.difference import DIFFERENCE_BITS, RATIO_BITS, DifferenceParams
from dtp.matrix import STATE_BITS
from rtl.lib.multiplier import Multiplier, Target
from rtl.lib.reduce import choose, index_bits, sum_tree

__all__ = ["DifferenceNorm", "DifferenceWordLayout", "EnergyLayout"]


class DifferenceWordLayout(data.StructLayout):
    """Elements of all rows, ``segments`` columns side by side; ``last`` ends a group of rows."""

    def __init__(self, config: Config) -> None:
        def words(bits: int) -> data.ArrayLayout:
            return data.ArrayLayout(data.ArrayLayout(signed(bits), config.segments), config.rows)

        super().__init__(
            {"difference": words(DIFFERENCE_BITS), "reference": words(STATE_BITS), "last": unsigned(1)}
        )


class EnergyLayout(data.StructLayout):
    """Energies of one row; ``last`` with the group's last row."""

    def __init__(self, config: Config) -> None:
        bits = DifferenceParams(config).energy_bits
        super().__init__(
            {
                "difference": unsigned(bits),
                "reference": unsigned(bits),
                "ratio": unsigned(RATIO_BITS),
                "last": unsigned(1),
            }
        )


class DifferenceNorm(wiring.Component):
    """Σ difference², Σ reference² and their ratio for every row of a group; arithmetic as :mod:`dtp.difference`.

    A word is taken every ``params.word_cycles``; after a group's last one the rows' records follow in order, the first
    ``params.first_record_cycles`` after it was taken, then one every ``params.record_cycles``, or when the one before
    is taken; the next group begins after the last record was.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells

    Members
    -------
    i: In(stream of :class:`DifferenceWordLayout`), at most ``max_model`` columns a group
    o: Out(stream of :class:`EnergyLayout`)
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self.params = DifferenceParams(config)
        self._target = target
        super().__init__(
            {
                "i": In(stream.Signature(DifferenceWordLayout(config))),
                "o": Out(stream.Signature(EnergyLayout(config))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        c, p = self.config, self.params
        depth = c.rows // p.beat_rows

        # A word, beat by beat; segment after segment, so that a row comes again as late as it can.
        held = Signal(DifferenceWordLayout(c), reset_less=True)
        busy, summing = Signal(), Signal()  # a word is worked on; rows are not yet read out
        beat, second = Signal(range(max(2, p.beats))), Signal()
        word_end, taken, drained = Signal(), Signal(), Signal()
        m.d.comb += [
            word_end.eq(busy & second & (beat == p.beats - 1)),
            self.i.ready.eq(~summing & (~busy | (word_end & ~held.last))),
            taken.eq(self.i.valid & self.i.ready),
        ]
        with m.If(busy):
            m.d.sync += second.eq(~second)
            with m.If(second):
                m.d.sync += beat.eq(Mux(beat == p.beats - 1, 0, beat + 1))
        with m.If(word_end):
            m.d.sync += busy.eq(0)
        with m.If(taken):
            m.d.sync += [held.eq(self.i.payload), busy.eq(1)]
        first = Signal(init=1)
        with m.If(word_end):
            m.d.sync += first.eq(held.last)
        with m.If(word_end & held.last):
            m.d.sync += summing.eq(1)
        with m.Elif(drained):
            m.d.sync += summing.eq(0)

        # Squares: issue, chosen operand, multiplier, tree.
        order = [(row, segment) for segment in range(c.segments) for row in range(c.rows)]
        differences = [held.difference[row][segment] for row, segment in order]
        references = [held.reference[row][segment] for row, segment in order]
        squares: list[Value] = []
        for lane in range(p.lanes):
            places = range(lane, len(order), p.lanes)
            operand = Signal(signed(DIFFERENCE_BITS), name=f"operand_{lane}", reset_less=True)
            m.d.sync += operand.eq(
                Mux(
                    second,
                    choose([references[n] for n in places], beat),
                    choose([differences[n] for n in places], beat),
                )
            )
            multiplier = Multiplier(DIFFERENCE_BITS, DIFFERENCE_BITS, target=self._target)
            m.submodules[f"multiplier_{lane}"] = multiplier
            m.d.comb += [multiplier.a.eq(operand), multiplier.a_enable.eq(1), multiplier.b.eq(operand)]
            square = Signal(2 * DIFFERENCE_BITS, name=f"square_{lane}", reset_less=True)
            m.d.sync += square.eq(multiplier.o)
            squares.append(square)
        delay = p.square_cycles
        valid = _line(m, "valid", busy, delay, reset_less=False)
        is_reference = _line(m, "is_reference", second, delay)
        starts = _line(m, "starts", first & (beat < depth), delay)
        place = _line(m, "place", beat & (depth - 1), delay)
        ended = _line(m, "ended", word_end & held.last, delay, reset_less=False)

        # Sums: of the differences in the lower half, of the references in the upper one.
        read_place = Signal(range(max(2, c.rows)))
        reading, read_reference = Signal(), Signal()
        sums: list[Value] = []
        for row in range(p.beat_rows):
            total = sum_tree(m, f"tree_{row}", squares[row :: p.beat_rows])
            memory = Memory(shape=unsigned(p.energy_bits), depth=2 * depth, init=[])
            m.submodules[f"sums_{row}"] = memory
            write, read = memory.write_port(), memory.read_port(domain="comb")
            address = Cat(place[delay][: index_bits(depth)], is_reference[delay])
            read_address = Cat(read_place[index_bits(p.beat_rows) :][: index_bits(depth)], read_reference)
            m.d.comb += [
                read.addr.eq(Mux(reading, read_address, address)),
                write.addr.eq(address),
                write.en.eq(valid[delay]),
                write.data.eq(Mux(starts[delay], 0, read.data) + total),
            ]
            sums.append(read.data)
        chosen = Signal(p.energy_bits)
        m.d.comb += chosen.eq(choose(sums, read_place[: index_bits(p.beat_rows)]))

        # Rows out: both sums, then a bit of the quotient a cycle.
        record = self.o.payload
        remainder = Signal(p.energy_bits + 3, reset_less=True)
        quotient = Signal(p.quotient_bits, reset_less=True)
        huge = Signal()
        count = Signal(range(p.quotient_bits))
        step = Signal(p.energy_bits + 4)
        m.d.comb += step.eq((remainder << 1) - (record.reference << 2))
        with m.FSM():
            with m.State("sum"):
                m.d.sync += read_place.eq(0)
                with m.If(ended[delay]):
                    m.next = "difference"
            with m.State("difference"):
                m.d.comb += reading.eq(1)
                m.d.sync += [record.difference.eq(chosen), remainder.eq(chosen)]
                m.next = "reference"
            with m.State("reference"):
                m.d.comb += [reading.eq(1), read_reference.eq(1)]
                m.d.sync += [record.reference.eq(chosen), count.eq(0), record.last.eq(read_place == c.rows - 1)]
                m.next = "divide"
            with m.State("divide"):
                m.d.sync += [
                    quotient.eq(Cat(~step[-1], quotient)),
                    remainder.eq(Mux(step[-1], remainder << 1, step)),
                    count.eq(count + 1),
                ]
                with m.If(count == 0):
                    m.d.sync += huge.eq(record.difference >= (record.reference << 2))
                with m.If(count == p.quotient_bits - 1):
                    m.next = "round"
            with m.State("round"):
                rounded = Signal(RATIO_BITS + 1)
                m.d.comb += rounded.eq((quotient + 1) >> 1)
                m.d.sync += [
                    record.ratio.eq(Mux(huge | rounded[-1], (1 << RATIO_BITS) - 1, rounded)),
                    self.o.valid.eq(1),
                ]
                with m.If(record.difference == 0):
                    m.d.sync += record.ratio.eq(0)
                m.next = "out"
            with m.State("out"):
                with m.If(self.o.ready):
                    m.d.sync += [self.o.valid.eq(0), read_place.eq(read_place + 1)]
                    with m.If(record.last):
                        m.d.comb += drained.eq(1)
                        m.next = "sum"
                    with m.Else():
                        m.next = "difference"
        return m





def _line(m: Module, name: str, source: Value, cycles: int, *, reset_less: bool = True) -> list[Value]:
    """``source`` and its delays by 1 … ``cycles`` cycles."""
    taps: list[Value] = [source]
    for cycle in range(1, cycles + 1):
        tap = Signal(len(source), name=f"{name}_{cycle}", reset_less=reset_less)
        m.d.sync += tap.eq(taps[-1])
        taps.append(tap)
    return taps
