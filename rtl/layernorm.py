"""LayerNorm in hardware: statistics of a row group in one pass over its words, normalised words in a second one."""

from __future__ import annotations

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from dtp.config import MANTISSA_BITS, REGISTER_BITS, TABLE_BITS, Config
from dtp.layernorm import ALIGN_BITS, NORMAL_FRACTION_BITS, RSQRT, LayerNormParams
from dtp.matrix import STATE_BITS
from rtl.lib.delay import delayed
from rtl.lib.multiplier import Multiplier, Target
from rtl.lib.reduce import choose, index_bits, sum_tree
from rtl.lib.streams import StreamQueue
from rtl.matrix import WordLayout

__all__ = ["LayerNorm"]

_FACTOR_BITS = MANTISSA_BITS + 1


class LayerNorm(wiring.Component):
    """Every row to mean 0 and deviation 1; arithmetic as :func:`dtp.layernorm.layernorm`, bit for bit.

    A group's words come twice: the first pass is for the statistics, the second is normalised. A word is taken every
    ``params.word_cycles``, in an odd cycle; after the first pass the rows' roots take at most ``params.root_cycles``
    each.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells

    Members
    -------
    width: In, elements of a row D, stable from the first word to the last
    words: In, words of a pass, stable as well; a multiple of the block
    i: In(stream of :class:`rtl.matrix.WordLayout`)
    o: Out(stream of :class:`rtl.matrix.WordLayout`), normalised states
    saturated: Out(lanes), elements that are saturated in this cycle
    idle: Out(1), everything that was taken has left
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self.params = LayerNormParams(config)
        self._target = target
        super().__init__(
            {
                "width": In(config.max_mlp.bit_length()),
                "words": In((config.max_mlp // config.segments).bit_length()),
                "i": In(stream.Signature(WordLayout(config))),
                "o": Out(stream.Signature(WordLayout(config))),
                "saturated": Out(self.params.lanes),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        c, p = self.config, self.params
        depth = c.rows // p.beat_rows
        bits = STATE_BITS

        # A word, beat by beat; two cycles each: x·x or x·D, then the factor.
        held = Signal(WordLayout(c), reset_less=True)
        busy, second, beat = Signal(), Signal(), Signal(range(max(2, p.beats)))
        normalising, rooting = Signal(), Signal()
        count = Signal.like(self.words)
        waiting = Signal(range(p.queue_words + 1))  # words in the pipeline and at the output
        word_end, taken, pop, rooted, pass_end = Signal(), Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            word_end.eq(busy & second & (beat == p.beats - 1)),
            pass_end.eq(word_end & (count == 0)),
            self.i.ready.eq(
                second & ~rooting & (~busy | (word_end & ~pass_end)) & (~normalising | (waiting != p.queue_words))
            ),
            taken.eq(self.i.valid & self.i.ready),
            self.idle.eq(~busy & ~rooting & (waiting == 0) & ~normalising),
        ]
        m.d.sync += second.eq(~second)
        with m.If(busy & second):
            m.d.sync += beat.eq(Mux(beat == p.beats - 1, 0, beat + 1))
        with m.If(word_end):
            m.d.sync += busy.eq(0)
        with m.If(taken):
            m.d.sync += [
                held.eq(self.i.payload),
                busy.eq(1),
                count.eq(Mux(count == self.words - 1, 0, count + 1)),
            ]
        first = Signal(init=1)
        with m.If(word_end):
            m.d.sync += first.eq(0)
        with m.If(pass_end):
            m.d.sync += [first.eq(1), normalising.eq(~normalising), rooting.eq(~normalising)]
        with m.Elif(rooted):
            m.d.sync += rooting.eq(0)
        m.d.sync += waiting.eq(waiting + (taken & normalising) - pop)

        # Operands and products. A line's stage n is n cycles after a beat's first cycle.
        issue = busy & ~second
        stages = p.element_cycles
        valid = delayed(m, "valid", issue, stages, reset_less=False)
        normal = delayed(m, "normal", normalising, stages)
        starts = delayed(m, "starts", first & (beat < depth), stages)
        place = delayed(m, "place", beat & (depth - 1), stages)
        word_ends = delayed(m, "word_end", issue & (beat == p.beats - 1), stages, reset_less=False)
        ends = issue & (beat == p.beats - 1) & (count == 0) & ~normalising
        ended = delayed(m, "ended", ends, stages, reset_less=False)

        order = [(row, segment) for segment in range(c.segments) for row in range(c.rows)]
        aligned = [Signal(signed(REGISTER_BITS), name=f"aligned_{n}", reset_less=True) for n in range(p.lanes)]
        factors = [Signal(signed(_FACTOR_BITS), name=f"factor_{n}") for n in range(p.lanes)]
        products: list[Value] = []
        squares: list[Value] = []
        elements: list[Value] = []
        for lane in range(p.lanes):
            chosen = choose([held[row][segment] for row, segment in order[lane :: p.lanes]], beat)
            a = Signal(signed(REGISTER_BITS), name=f"a_{lane}", reset_less=True)
            b = Signal(signed(REGISTER_BITS), name=f"b_{lane}", reset_less=True)
            with m.If(second):
                m.d.sync += [a.eq(aligned[lane]), b.eq(factors[lane])]
            with m.Else():
                m.d.sync += [a.eq(chosen), b.eq(Mux(normalising, self.width, chosen))]
            multiplier = Multiplier(REGISTER_BITS, REGISTER_BITS, target=self._target)
            m.submodules[f"multiplier_{lane}"] = multiplier
            m.d.comb += [multiplier.a.eq(a), multiplier.a_enable.eq(1), multiplier.b.eq(b)]
            products.append(multiplier.o)
            elements.append(delayed(m, f"element_{lane}", a, 3)[3])
            square = Signal(2 * STATE_BITS, name=f"square_{lane}", reset_less=True)
            m.d.sync += square.eq(multiplier.o)
            squares.append(square)

        # First pass: sums of elements and of squares, of the squares' stage and its tree.
        added = p.square_cycles
        totals: list[Value] = []
        norms: list[Value] = []
        reading, row_place = Signal(), Signal(range(max(2, c.rows)))
        read_address = row_place[index_bits(p.beat_rows) :][: index_bits(depth)]
        for row in range(p.beat_rows):
            for name, values, width, sums in (
                ("total", elements, p.total_bits, totals),
                ("norm", squares, p.norm_bits, norms),
            ):
                total = sum_tree(m, f"{name}_tree_{row}", values[row :: p.beat_rows])
                memory = Memory(shape=unsigned(width), depth=max(2, depth), init=[])
                m.submodules[f"{name}s_{row}"] = memory
                write, read = memory.write_port(), memory.read_port(domain="comb")
                m.d.comb += [
                    read.addr.eq(Mux(reading, read_address, place[added][: index_bits(depth)])),
                    write.addr.eq(place[added][: index_bits(depth)]),
                    write.en.eq(valid[added] & ~normal[added]),
                    write.data.eq((Mux(starts[added], 0, read.data.as_signed()) + total)[:width]),
                ]
                sums.append(read.data)

        # Roots, a row after the other: V by shift and add, its leading bits by shifts of two, the table.
        total = Signal(signed(p.total_bits), reset_less=True)
        magnitude = Signal(p.total_bits, reset_less=True)
        norm = Signal(p.norm_bits, reset_less=True)
        factor_bits = Signal(p.total_bits, reset_less=True)
        width_bits = Signal(p.total_bits, reset_less=True)
        v = Signal(p.variance_bits, reset_less=True)
        exponent = Signal(p.exponent_bits, reset_less=True)
        step = Signal(range(p.total_bits + 1))
        table = Memory(shape=unsigned(MANTISSA_BITS), depth=1 << TABLE_BITS, init=RSQRT, attrs={"ram_style": "block"})
        m.submodules.table = table
        table_read = table.read_port()
        m.d.comb += table_read.addr.eq(v[-TABLE_BITS:])
        root = Signal(MANTISSA_BITS, reset_less=True)
        kept = Signal()
        rows = data.StructLayout(
            {"total": signed(p.total_bits), "factor": unsigned(MANTISSA_BITS), "exponent": unsigned(p.exponent_bits)}
        )
        lane_rows: list[data.View] = []
        for row in range(p.beat_rows):
            memory = Memory(shape=rows, depth=max(2, depth), init=[])
            m.submodules[f"rows_{row}"] = memory
            write, read = memory.write_port(), memory.read_port(domain="comb")
            m.d.comb += [
                write.addr.eq(read_address),
                write.data.total.eq(total),
                write.data.factor.eq(root),
                write.data.exponent.eq(exponent),
                write.en.eq(kept & (row_place[: index_bits(p.beat_rows)] == row)),
                read.addr.eq(place[p.row_cycle][: index_bits(depth)]),
            ]
            lane_rows.append(read.data)
        with m.FSM():
            with m.State("pass"):
                m.d.sync += row_place.eq(0)
                with m.If(ended[added]):
                    m.next = "sums"
            with m.State("sums"):
                m.d.comb += reading.eq(1)
                m.d.sync += [
                    total.eq(choose(totals, row_place[: index_bits(p.beat_rows)])),
                    norm.eq(choose(norms, row_place[: index_bits(p.beat_rows)])),
                    v.eq(0),
                    step.eq(0),
                    exponent.eq(p.variance_bits // 2 - 1),
                ]
                m.next = "sign"
            with m.State("sign"):
                size = Mux(total[-1], -total, total)[: p.total_bits]
                m.d.sync += [magnitude.eq(size), factor_bits.eq(size), width_bits.eq(self.width)]
                m.next = "variance"
            with m.State("variance"):
                # V = D·Σx² − Σ², both factors bit by bit from the top.
                more = Mux(width_bits[-1], norm, 0) - Mux(factor_bits[-1], magnitude, 0)
                m.d.sync += [
                    v.eq(((v << 1).as_signed() + more)[: p.variance_bits]),
                    width_bits.eq(width_bits << 1),
                    factor_bits.eq(factor_bits << 1),
                    step.eq(step + 1),
                ]
                with m.If(step == p.total_bits - 1):
                    m.d.sync += step.eq(0)
                    m.next = "lead"
            with m.State("lead"):
                m.d.sync += step.eq(step + 1)
                with m.If(v[-2:] != 0):
                    m.next = "table"
                with m.Elif(step == p.variance_bits // 2 - 1):
                    # A constant row: t is 0, whatever the factor.
                    m.next = "keep"
                with m.Else():
                    m.d.sync += [v.eq(v << 2), exponent.eq(exponent - 1)]
            with m.State("table"):
                m.next = "root"
            with m.State("root"):
                m.d.sync += root.eq(table_read.data)
                m.next = "keep"
            with m.State("keep"):
                m.d.comb += kept.eq(1)
                m.d.sync += row_place.eq(row_place + 1)
                m.next = "sums"
                with m.If(row_place == c.rows - 1):
                    m.d.comb += rooted.eq(1)
                    m.next = "pass"

        # Second pass: t = D·x − Σ, aligned, times the factor.
        outputs: list[Value] = []
        shift = ALIGN_BITS + MANTISSA_BITS - NORMAL_FRACTION_BITS
        for lane in range(p.lanes):
            row = lane_rows[lane % p.beat_rows]
            here = p.row_cycle
            exponents = delayed(m, f"exponent_{lane}", row.exponent, 2)
            factor = delayed(m, f"row_factor_{lane}", row.factor, p.factor_cycle - here)[-1]
            m.d.comb += factors[lane].eq(factor)
            t = Signal(signed(p.centred_bits), name=f"t_{lane}", reset_less=True)
            m.d.sync += t.eq(products[lane] - row.total)
            shifted: Value = Cat(Const(0, ALIGN_BITS + 1), t).as_signed()
            levels = list(reversed(range(p.exponent_bits)))
            half = levels[: len(levels) // 2]
            for level in half:
                shifted = Mux(exponents[1][level], shifted >> (1 << level), shifted)
            coarse = Signal(shifted.shape(), name=f"coarse_{lane}", reset_less=True)
            m.d.sync += coarse.eq(shifted)
            shifted = coarse
            for level in levels[len(half) :]:
                shifted = Mux(exponents[2][level], shifted >> (1 << level), shifted)
            fine = Signal(shifted.shape(), name=f"fine_{lane}", reset_less=True)
            m.d.sync += fine.eq(shifted)
            exact = Signal(shifted.shape(), name=f"exact_{lane}")
            m.d.comb += exact.eq((fine >> 1) + fine[0])
            high = exact[REGISTER_BITS - 1 :]
            early = Signal(name=f"early_{lane}")
            m.d.comb += early.eq(high.any() & ~high.all())
            limit = Cat((~exact[-1]).replicate(REGISTER_BITS - 1), exact[-1])
            m.d.sync += aligned[lane].eq(Mux(early, limit, exact[:REGISTER_BITS]).as_signed())
            early_late = delayed(m, f"early_late_{lane}", early, stages - p.factor_cycle + 1)[-1]

            rounded = Signal(signed(2 * REGISTER_BITS - shift), name=f"rounded_{lane}", reset_less=True)
            m.d.sync += rounded.eq((products[lane] >> shift) + products[lane][shift - 1])
            sign, low, over = rounded[-1], rounded[: bits - 1], rounded[bits - 1 :]
            beyond = (over.any() & ~over.all()) | (sign & ~low.any())
            limit = Cat(Const(1, 1), (~sign).replicate(bits - 2), sign)
            output = Signal(bits, name=f"output_{lane}", reset_less=True)
            late = Signal(name=f"late_{lane}", reset_less=True)
            m.d.sync += [output.eq(Mux(beyond, limit, rounded[:bits])), late.eq(beyond)]
            m.d.comb += self.saturated[lane].eq(valid[stages] & normal[stages] & (late | early_late))
            outputs.append(output)

        queue = StreamQueue(unsigned(bits * len(order)), p.queue_words)
        m.submodules.queue = queue
        whole: Value = Cat(outputs)
        if p.beats > 1:
            before = Signal((p.beats - 1) * p.lanes * bits, reset_less=True)
            whole = Cat(before, whole)
            with m.If(valid[stages]):
                m.d.sync += before.eq(whole[p.lanes * bits :])
        m.d.comb += [
            queue.i.payload.eq(whole),
            queue.i.valid.eq(word_ends[stages] & normal[stages]),
            self.o.valid.eq(queue.o.valid),
            queue.o.ready.eq(self.o.ready),
            pop.eq(self.o.valid & self.o.ready),
        ]
        for n, (row_number, segment) in enumerate(order):
            value = queue.o.payload[n * bits : (n + 1) * bits]
            m.d.comb += self.o.payload[row_number][segment].eq(value.as_signed())
        return m
