"""Plain matrix mode of the array: sequencer, operand memories and requantiser around one :class:`MacArray`."""

from __future__ import annotations

from amaranth.hdl import Cat, Const, Module, Mux, Shape, Signal, Value, signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out, connect, flipped

from dtp.array import ArrayParams
from dtp.config import BIAS_BITS, MANTISSA_BITS, REGISTER_BITS, TABLE_BITS, Config
from dtp.matrix import (
    ALIGN_LEFT,
    ALIGN_SHIFT_BITS,
    FEED_GAIN_BITS,
    OPEN_JOBS,
    OUT_SHIFT_BITS,
    READ_CYCLES,
    STATE_BITS,
    Activation,
    MatrixParams,
    gelu_table,
)
from rtl.array import MacArray, StepLayout
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import Multiplier, Target
from rtl.lib.reduce import choose, count_ones, index_bits
from rtl.lib.streams import StreamQueue
from rtl.operands import WriteLayout

__all__ = [
    "EntryLayout",
    "MatrixJobLayout",
    "MatrixMode",
    "MatrixUnit",
    "OutputWordLayout",
    "SaturationCounter",
    "WordLayout",
    "matrix_array",
]

_JOB_BITS = (OPEN_JOBS - 1).bit_length()
_COUNT_BITS = 16


def matrix_array(config: Config) -> ArrayParams:
    """The array of a tile with the tag that the matrix mode needs."""
    return ArrayParams.of(config, tag_bits=_JOB_BITS + 1)


class MatrixJobLayout(data.StructLayout):
    """Numbers of one matrix job, :class:`dtp.matrix.MatrixJob`; sizes in blocks.

    ``bias_base`` is the resident bias word of the first column.
    """

    def __init__(self, config: Config) -> None:
        p = MatrixParams(config)
        size = unsigned(p.max_blocks.bit_length())
        super().__init__(
            {
                "chunks": size,
                "blocks": size,
                "feed_gain": unsigned(FEED_GAIN_BITS),
                "has_bias": unsigned(1),
                "bias_base": unsigned(index_bits(p.bias_words)),
                "shift": unsigned(ALIGN_SHIFT_BITS),
                "scale": unsigned(MANTISSA_BITS),
                "out_shift": unsigned(OUT_SHIFT_BITS),
                "activation": Activation,
                "wide": unsigned(1),
            }
        )


class _NumbersLayout(data.StructLayout):
    """What the requantiser needs of a job."""

    def __init__(self) -> None:
        super().__init__(
            {
                "shift": unsigned(ALIGN_SHIFT_BITS),
                "scale": unsigned(MANTISSA_BITS),
                "out_shift": unsigned(OUT_SHIFT_BITS),
                "activation": Activation,
                "wide": unsigned(1),
            }
        )


class WordLayout(data.ArrayLayout):
    """``rows`` × ``segments`` elements of 16 bits: one feed, or the outputs of one column step."""

    def __init__(self, config: Config) -> None:
        super().__init__(data.ArrayLayout(signed(STATE_BITS), config.segments), config.rows)


class OutputWordLayout(data.StructLayout):
    """A word of outputs, and whether it is its job's last."""

    def __init__(self, config: Config) -> None:
        super().__init__({"data": WordLayout(config), "last": unsigned(1)})


class EntryLayout(data.ArrayLayout):
    """The moving operand of one step."""

    def __init__(self, config: Config) -> None:
        super().__init__(data.ArrayLayout(signed(config.operand_bits), config.block), config.segments)


class _PassLayout(data.StructLayout):
    """One pass: a stationary chunk and the steps of a column tile."""

    def __init__(self, config: Config) -> None:
        p = MatrixParams(config)
        super().__init__(
            {
                "slot": unsigned(1),
                "chunk": unsigned(index_bits(p.max_blocks)),
                "blocks": unsigned(p.tile_blocks.bit_length()),
                "is_first": unsigned(1),
                "is_last": unsigned(1),
                "ends_job": unsigned(1),
                "has_bias": unsigned(1),
                "bias_address": unsigned(index_bits(p.bias_words)),
                "job": unsigned(_JOB_BITS),
            }
        )


class MatrixMode(wiring.Component):
    """Drives the array through matrix jobs, in their order; docs/commutator.md §3 has order and arithmetic.

    The array is outside: its feed and step ports are driven with the latency of an operand memory, its outputs come
    back. A job's activations are loaded into one of two slots while the job before steps. Passes follow without an
    idle cycle while weights are offered; :func:`sim.cycles.matrix.matrix_timing` states every cycle.

    Stalls: a step waits for its weights, and one that emits for room among ``params.result_words`` sums; a job is
    taken when a slot is free and fewer than ``OPEN_JOBS`` are open.

    Parameters
    ----------
    config: the processor
    array: parameters of the array that is driven; tags of at least 3 bits
    target: plain description or explicit ECP5 cells

    Members
    -------
    job: In(stream of :class:`MatrixJobLayout`)
    i: In(stream of :class:`WordLayout`), activations, chunk after chunk
    w: In(stream of :class:`EntryLayout`), weights in the order of use
    bias_write: In(:class:`rtl.operands.WriteLayout`), resident biases; not those of jobs that are open
    o: Out(stream of :class:`OutputWordLayout`)
    clear: In(1), sets the count to 0; saturations: Out(16), stops at 65535, settled when a job's last word is offered
    feed_valid, feed_data, step_valid, step: Out, ports of the array
    i_valid, i_tag, i_data: In, outputs of the array
    """

    def __init__(self, config: Config, array: ArrayParams, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self.params = MatrixParams(config)
        self.array = array
        self._target = target
        c = config
        operands = data.ArrayLayout(signed(array.row_bits), array.segments)
        results = data.ArrayLayout(signed(array.acc_bits), array.segments)
        super().__init__(
            {
                "job": In(stream.Signature(MatrixJobLayout(c))),
                "i": In(stream.Signature(WordLayout(c))),
                "w": In(stream.Signature(EntryLayout(c))),
                "bias_write": In(WriteLayout(self.params.bias_words, c.segments * BIAS_BITS)),
                "o": Out(stream.Signature(OutputWordLayout(c))),
                "clear": In(1),
                "saturations": Out(_COUNT_BITS),
                "feed_valid": Out(1),
                "feed_data": Out(data.ArrayLayout(operands, array.rows)),
                "step_valid": Out(1),
                "step": Out(StepLayout(array)),
                "i_valid": In(1),
                "i_tag": In(array.tag_bits),
                "i_data": In(data.ArrayLayout(results, array.rows)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        c, p = self.config, self.params

        jobs = [Signal(MatrixJobLayout(c), name=f"job_{n}") for n in range(2)]
        loaded = Signal(2)  # activations of the slot's job are there
        release = Signal()  # the oldest slot's last feed is read
        job_done = Signal()  # the oldest open job is requantised
        accept, job_number = self._accept(m, jobs, loaded, release, job_done)

        # Passes of the oldest loaded job.
        now = Signal(_PassLayout(c))
        now_valid, now_taken = Signal(), Signal()
        left = Signal(range(p.max_blocks + 1))
        slot = Signal()
        oldest = Signal(MatrixJobLayout(c))
        number = Signal(_JOB_BITS)
        m.d.comb += [oldest.eq(Mux(slot, jobs[1], jobs[0]))]
        tile_end = Signal()
        chunks_less_one = Signal(index_bits(p.max_blocks))
        blocks = Mux(left > p.tile_blocks, p.tile_blocks, left)
        m.d.comb += [
            now.slot.eq(slot),
            now.blocks.eq(blocks),
            now.is_first.eq(now.chunk == 0),
            tile_end.eq(now.chunk == chunks_less_one),
            now.is_last.eq(tile_end),
            now.ends_job.eq(tile_end & (left <= p.tile_blocks)),
            now.has_bias.eq(oldest.has_bias),
            now.job.eq(number),
        ]
        chunk, bias_address = Signal.like(now.chunk), Signal.like(now.bias_address)
        m.d.comb += [now.chunk.eq(chunk), now.bias_address.eq(bias_address)]
        with m.If(now_taken):
            m.d.sync += chunk.eq(Mux(tile_end, 0, chunk + 1))
            with m.If(tile_end):
                m.d.sync += [
                    left.eq(left - p.tile_blocks),
                    bias_address.eq(bias_address + p.tile_blocks * c.pass_steps),
                ]
            with m.If(now.ends_job):
                m.d.sync += [now_valid.eq(0), slot.eq(~slot), number.eq(number + 1)]
        with m.Elif(~now_valid):
            m.d.sync += [
                now_valid.eq(loaded.bit_select(slot, 1)),
                left.eq(oldest.blocks),
                bias_address.eq(oldest.bias_base),
                chunks_less_one.eq(oldest.chunks - 1),
            ]

        # Feed stage: one chunk into the shadow registers, from the first step of the pass before on.
        fed, fed_valid = Signal(_PassLayout(c)), Signal()
        current, current_valid = Signal(_PassLayout(c)), Signal()
        started = Signal()
        step_issue, step_last, move, feed_issue, feeds_done = Signal(), Signal(), Signal(), Signal(), Signal()
        feed_number = Signal(index_bits(c.pass_steps) + 1)
        feed_last = Signal()
        m.d.comb += [
            feed_issue.eq(fed_valid & ~feeds_done & (~current_valid | started | step_issue)),
            feed_last.eq(feed_issue & (feed_number == c.pass_steps - 1)),
            feeds_done.eq(feed_number[-1]),
            move.eq(fed_valid & (feeds_done | feed_last) & (~current_valid | step_last)),
            now_taken.eq(now_valid & (~fed_valid | move)),
            release.eq(feed_last & fed.ends_job),
        ]
        with m.If(move):
            m.d.sync += [fed_valid.eq(0), feed_number.eq(0)]
        with m.Elif(feed_issue):
            m.d.sync += feed_number.eq(feed_number + 1)
        with m.If(now_taken):
            m.d.sync += [fed.eq(now), fed_valid.eq(1)]

        # Step stage.
        step_number = Signal(range(p.tile_blocks * c.pass_steps))
        last_step = Signal.like(step_number)
        bias_read = Signal.like(now.bias_address)
        room = Signal()
        m.d.comb += [
            self.w.ready.eq(current_valid & (room | ~current.is_last)),
            step_issue.eq(self.w.valid & self.w.ready),
            step_last.eq(step_issue & (step_number == last_step)),
        ]
        with m.If(step_issue):
            m.d.sync += [step_number.eq(step_number + 1), bias_read.eq(bias_read + 1), started.eq(1)]
        with m.If(step_last):
            m.d.sync += current_valid.eq(0)
        with m.If(move):
            m.d.sync += [
                current.eq(fed),
                current_valid.eq(1),
                started.eq(0),
                step_number.eq(0),
                last_step.eq((fed.blocks << index_bits(c.pass_steps)) - 1),
                bias_read.eq(fed.bias_address),
            ]

        self._feed_memory(m, accept, fed, feed_issue, feed_number)
        self._steps(m, current, started, step_issue, step_last, step_number, bias_read)
        emit = Signal()
        m.d.comb += emit.eq(step_issue & current.is_last)
        self._requantise(m, accept, job_number, emit, room, job_done)
        return m

    def _accept(
        self, m: Module, jobs: list[data.View], loaded: Signal, release: Signal, job_done: Signal
    ) -> tuple[Signal, Signal]:
        """Takes jobs and counts their activations; whether one is taken now, and its number."""
        c, p = self.config, self.params
        load_slot, loading, busy = Signal(), Signal(), Signal(2)
        release_slot = Signal()
        open_jobs = Signal(range(OPEN_JOBS + 1))
        number = Signal(_JOB_BITS)
        accept = Signal()
        m.d.comb += [
            self.job.ready.eq(~loading & ~busy.bit_select(load_slot, 1) & (open_jobs != OPEN_JOBS)),
            accept.eq(self.job.valid & self.job.ready),
        ]
        m.d.sync += open_jobs.eq(open_jobs + accept - job_done)
        self._load_address = Signal(range(p.feed_words))
        self._load_slot = load_slot
        self._load_gain = Signal(FEED_GAIN_BITS)
        last_word = Signal.like(self._load_address)
        taken, taken_last = Signal(), Signal()
        m.d.comb += [
            self.i.ready.eq(loading),
            taken.eq(self.i.valid & loading),
            taken_last.eq(taken & (self._load_address == last_word)),
        ]
        self._load_taken = taken
        with m.If(accept):
            m.d.sync += [
                loading.eq(1),
                number.eq(number + 1),
                self._load_address.eq(0),
                last_word.eq((self.job.payload.chunks << index_bits(c.pass_steps)) - 1),
                self._load_gain.eq(self.job.payload.feed_gain),
            ]
            for n in range(2):
                with m.If(load_slot == n):
                    m.d.sync += [jobs[n].eq(self.job.payload), busy[n].eq(1)]
        with m.If(taken):
            m.d.sync += self._load_address.eq(self._load_address + 1)
        with m.If(taken_last):
            m.d.sync += [loading.eq(0), load_slot.eq(~load_slot)]
        # Two registers on the way to the memory, one cycle more until the word can be read.
        written = _line(m, "written", Cat(taken_last & ~load_slot, taken_last & load_slot), 2, reset_less=False)[2]
        for n in range(2):
            with m.If(release & (release_slot == n)):
                m.d.sync += [busy[n].eq(0), loaded[n].eq(0)]
            with m.If(written[n]):
                m.d.sync += loaded[n].eq(1)
        with m.If(release):
            m.d.sync += release_slot.eq(~release_slot)
        return accept, number

    def _feed_memory(
        self, m: Module, accept: Signal, fed: data.View, feed_issue: Signal, feed_number: Signal
    ) -> None:
        """Gain, clamp and memory of activations; feeds of the array."""
        c, p = self.config, self.params
        bits = c.operand_bits
        width = STATE_BITS + (1 << FEED_GAIN_BITS) - 1
        dropped = STATE_BITS - bits
        memory = BlockMemory(m, "feeds", p.elements * bits, 2 * p.feed_words, target=self._target)
        over = Signal(p.elements)
        place = Signal(range(2 * p.feed_words), reset_less=True)
        m.d.sync += place.eq(Cat(self._load_address, self._load_slot))
        valid = _line(m, "load", self._load_taken, 2, reset_less=False)
        for element in range(p.elements):
            row, segment = element // c.segments, element % c.segments
            word = self.i.payload[row][segment]
            gained = Signal(signed(width), name=f"gained_{element}", reset_less=True)
            m.d.sync += gained.eq(word << self._load_gain)
            # Without the dropped bits, rounded: (x + half) >> n is (x >> n) and the bit below.
            rounded: Value = gained
            if dropped:
                rounded = (gained >> dropped) + gained[dropped - 1]
            limited, beyond = _clamp(m, f"fed_{element}", rounded, bits)
            kept = Signal(signed(bits), name=f"fed_{element}", reset_less=True)
            m.d.sync += [kept.eq(limited), over[element].eq(beyond & valid[1])]
            m.d.comb += memory.write.data[element * bits : (element + 1) * bits].eq(kept)
        m.d.comb += memory.write.en.eq(valid[2])
        m.d.sync += memory.write.addr.eq(place)
        self._feed_over = over

        m.d.comb += memory.address.eq(Cat(feed_number[:-1], fed.chunk, fed.slot))
        late = Signal(p.elements * bits, reset_less=True)
        m.d.sync += late.eq(memory.data)
        for element in range(p.elements):
            value = late[element * bits : (element + 1) * bits].as_signed()
            m.d.comb += self.feed_data[element // c.segments][element % c.segments].eq(value)
        m.d.comb += self.feed_valid.eq(_line(m, "feed", feed_issue, READ_CYCLES, reset_less=False)[READ_CYCLES])

    def _steps(
        self,
        m: Module,
        current: data.View,
        started: Signal,
        step_issue: Signal,
        step_last: Signal,
        step_number: Signal,
        bias_read: Signal,
    ) -> None:
        """Steps of the array, :data:`READ_CYCLES` after their issue."""
        c, p = self.config, self.params
        biases = BlockMemory(m, "biases", c.segments * BIAS_BITS, p.bias_words, target=self._target)
        m.d.comb += [
            biases.write.en.eq(self.bias_write.en),
            biases.write.addr.eq(self.bias_write.addr),
            biases.write.data.eq(self.bias_write.data),
            biases.address.eq(bias_read),
        ]
        entry = _line(m, "entry", self.w.payload.as_value(), READ_CYCLES)[READ_CYCLES]
        starts = _line(m, "starts", current.is_first & current.has_bias, 1)[1]
        init = Signal(c.segments * BIAS_BITS, reset_less=True)
        m.d.sync += init.eq(Mux(starts, biases.data, 0))

        def late(name: str, value: Value) -> Value:
            return _line(m, f"step_{name}", value, READ_CYCLES)[READ_CYCLES]

        step = self.step
        tag = Cat(current.job, current.ends_job & step_last)
        m.d.comb += [
            self.step_valid.eq(_line(m, "step", step_issue, READ_CYCLES, reset_less=False)[READ_CYCLES]),
            step.swap.eq(late("swap", ~started)),
            step.addr.eq(late("addr", step_number)),
            step.first.eq(late("first", current.is_first)),
            step.shift.eq(p.sum_shift),
            step.emit.eq(late("emit", current.is_last)),
            step.tag.eq(late("tag", tag)),
        ]
        for segment in range(c.segments):
            m.d.comb += step.init[segment].eq(init[segment * BIAS_BITS :][:BIAS_BITS].as_signed())
            for lane in range(c.block):
                place = (segment * c.block + lane) * c.operand_bits
                m.d.comb += step.data[segment][lane].eq(entry[place : place + c.operand_bits].as_signed())

    def _requantise(
        self, m: Module, accept: Signal, job_number: Signal, emit: Signal, room: Signal, job_done: Signal
    ) -> None:
        """Sums wait in a memory; ``lanes`` of them a cycle become outputs, words go to a queue."""
        c, p = self.config, self.params
        acc_bits = self.array.acc_bits
        tag_bits = _JOB_BITS + 1

        # Numbers of the open jobs.
        numbers = Memory(shape=_NumbersLayout(), depth=OPEN_JOBS, init=[])
        m.submodules.numbers = numbers
        numbers_write, numbers_read = numbers.write_port(), numbers.read_port(domain="comb")
        m.d.comb += [numbers_write.en.eq(accept), numbers_write.addr.eq(job_number)]
        for name in ("shift", "scale", "out_shift", "activation", "wide"):
            m.d.comb += numbers_write.data[name].eq(self.job.payload[name])

        # Sums.
        results = BlockMemory(m, "results", p.elements * acc_bits + tag_bits, p.result_words, target=self._target)
        write_place, read_place = Signal(range(p.result_words)), Signal(range(p.result_words))
        free, there = Signal(range(p.result_words + 1), init=p.result_words), Signal(range(p.result_words + 1))
        m.d.comb += [
            room.eq(free.any()),
            results.write.en.eq(self.i_valid),
            results.write.addr.eq(write_place),
            results.write.data.eq(Cat(self.i_data.as_value(), self.i_tag[:tag_bits])),
            results.address.eq(read_place),
        ]
        beat = Signal(range(max(2, p.word_beats)))
        waiting = Signal(range(p.output_words + 1))  # words in the pipeline and at the output
        issue, issue_last, pop = Signal(), Signal(), Signal()
        m.d.comb += [
            issue.eq((beat != 0) | (there.any() & (waiting != p.output_words))),
            issue_last.eq(issue & (beat == p.word_beats - 1)),
        ]
        with m.If(issue):
            m.d.sync += beat.eq(Mux(issue_last, 0, beat + 1))
        m.d.sync += [
            write_place.eq(write_place + self.i_valid),
            read_place.eq(read_place + issue_last),
            free.eq(free + issue_last - emit),
            there.eq(there + self.i_valid - issue_last),
            waiting.eq(waiting + (issue & (beat == 0)) - pop),
        ]

        # Control: stage n is what was issued n cycles ago.
        valid = _line(m, "valid", issue, p.beat_cycles, reset_less=False)
        word_end = _line(m, "word_end", issue_last, p.beat_cycles, reset_less=False)
        beats = _line(m, "beat", beat, 1)
        tag = results.data[p.elements * acc_bits :]
        ends = _line(m, "ends", tag[_JOB_BITS], p.beat_cycles, start=1)
        m.d.comb += [
            numbers_read.addr.eq(tag[:_JOB_BITS]),
            job_done.eq(word_end[1] & ends[1]),
        ]
        self._numbers = {
            name: _line(m, f"number_{name}", numbers_read.data[name], last, start=1)
            for name, last in (
                ("shift", 3), ("scale", 5), ("activation", p.product_cycles + 3),
                ("out_shift", p.product_cycles + 4), ("wide", p.product_cycles + 5),
            )
        }  # fmt: skip
        outputs: list[Value] = []
        over = Signal(p.lanes)
        for lane in range(p.lanes):
            sums = [
                results.data[(n * p.lanes + lane) * acc_bits :][:acc_bits].as_signed() for n in range(p.word_beats)
            ]
            chosen = Signal(signed(acc_bits), name=f"chosen_{lane}", reset_less=True)
            m.d.sync += chosen.eq(choose(sums, beats[1]))
            output, beyond = self._element(m, lane, chosen)
            m.d.comb += over[lane].eq(beyond & valid[p.beat_cycles])
            outputs.append(output)

        # Beats make words.
        queue = StreamQueue(OutputWordLayout(c), p.output_words)
        m.submodules.queue = queue
        whole: Value = Cat(outputs)
        if p.word_beats > 1:
            before = Signal((p.word_beats - 1) * p.lanes * STATE_BITS, reset_less=True)
            whole = Cat(before, whole)
            with m.If(valid[p.beat_cycles]):
                m.d.sync += before.eq(whole[p.lanes * STATE_BITS :])
        m.d.comb += [
            queue.i.valid.eq(word_end[p.beat_cycles]),
            queue.i.payload.data.as_value().eq(whole),
            queue.i.payload.last.eq(ends[p.beat_cycles]),
            pop.eq(self.o.valid & self.o.ready),
        ]
        connect(m, queue.o, flipped(self.o))

        # Saturations. A job's feeds are counted long before its last word.
        m.submodules.counter = counter = SaturationCounter(p.elements + p.lanes)
        m.d.comb += [
            counter.flags.eq(Cat(self._feed_over, over)),
            counter.clear.eq(self.clear),
            self.saturations.eq(counter.count),
        ]

    def _element(self, m: Module, lane: int, chosen: Signal) -> tuple[Value, Value]:
        """Steps 3 to 6 of the arithmetic: an output and whether it was saturated, both of stage ``beat_cycles``."""
        c, p = self.config, self.params
        numbers = self._numbers

        def register(name: str, value: Value) -> Signal:
            out = Signal(Shape.cast(value.shape()), name=f"{name}_{lane}", reset_less=True)
            m.d.sync += out.eq(value)
            return out

        # A bit below the sum collects the rounding bit.
        shift = numbers["shift"]
        shifted: Value = Cat(Const(0, 1), Const(0, ALIGN_LEFT), chosen).as_signed()
        for level in (4, 3):
            shifted = Mux(shift[2][level], shifted >> (1 << level), shifted)
        coarse = register("coarse", shifted)
        shifted = coarse
        for level in (2, 1, 0):
            shifted = Mux(shift[3][level], shifted >> (1 << level), shifted)
        fine = register("fine", shifted)
        rounded = Signal(signed(len(fine)), name=f"rounded_{lane}")
        m.d.comb += rounded.eq((fine >> 1) + fine[0])
        beyond = Signal(name=f"beyond_{lane}")
        high = rounded[REGISTER_BITS - 1 :]
        m.d.comb += beyond.eq(high.any() & ~high.all())
        sign = rounded[-1]
        aligned = register(
            "aligned",
            Mux(beyond, Cat((~sign).replicate(REGISTER_BITS - 1), sign), rounded[:REGISTER_BITS]).as_signed(),
        )
        early = _line(m, f"early_{lane}", beyond, p.beat_cycles, start=4)

        multiplier = Multiplier(REGISTER_BITS, MANTISSA_BITS + 1, target=self._target)
        m.submodules[f"multiplier_{lane}"] = multiplier
        m.d.comb += [
            multiplier.a.eq(aligned),
            multiplier.a_enable.eq(1),
            multiplier.b.eq(numbers["scale"][5]),
        ]
        product = multiplier.o
        stage = p.product_cycles
        v = register("v", ((product >> MANTISSA_BITS) + product[MANTISSA_BITS - 1])[:REGISTER_BITS].as_signed())

        # GELU is ReLU less a table of |v|; the table is read for all.
        table = Memory(
            shape=unsigned(TABLE_BITS), depth=1 << TABLE_BITS, init=[int(n) for n in gelu_table()],
            attrs={"ram_style": "block"},
        )  # fmt: skip
        m.submodules[f"gelu_{lane}"] = table
        read = table.read_port()
        magnitude = (v ^ v[-1].replicate(REGISTER_BITS))[:REGISTER_BITS - 1]
        skipped = REGISTER_BITS - 1 - TABLE_BITS - 3
        m.d.comb += read.addr.eq(magnitude[skipped : skipped + TABLE_BITS])
        inside = ~magnitude[skipped + TABLE_BITS :].any() & (numbers["activation"][stage + 1] == Activation.GELU)
        inside_late = _line(m, f"inside_{lane}", inside, 2)[2]
        lack = register("lack", read.data)
        positive = v[-1] & (numbers["activation"][stage + 1] != Activation.NONE)
        kept = register("kept", Mux(positive, 0, v).as_signed())
        kept_late = register("kept_late", kept)
        y = register("y", (kept_late - Mux(inside_late, lack, 0))[: REGISTER_BITS + 1].as_signed())

        shifted = Cat(Const(0, 1), y).as_signed()
        for level in reversed(range(OUT_SHIFT_BITS)):
            shifted = Mux(numbers["out_shift"][stage + 4][level], shifted >> (1 << level), shifted)
        last = register("shifted", shifted)
        exact = Signal(signed(REGISTER_BITS + 2), name=f"exact_{lane}")
        m.d.comb += exact.eq((last >> 1) + last[0])
        narrow, narrow_beyond = _clamp(m, f"narrow_{lane}", exact, c.operand_bits)
        wide, wide_beyond = _clamp(m, f"wide_{lane}", exact, STATE_BITS)
        is_wide = numbers["wide"][stage + 5]
        output = register("output", Mux(is_wide, wide, narrow).as_signed())
        late = register("late", Mux(is_wide, wide_beyond, narrow_beyond))
        return output, late | early[p.beat_cycles]


class SaturationCounter(wiring.Component):
    """Counts flags, a cycle late; stops at 65535.

    Members
    -------
    flags: In(``flags``), each counts
    clear: In(1), sets the count to 0
    count: Out(16)
    """

    def __init__(self, flags: int) -> None:
        super().__init__({"flags": In(flags), "clear": In(1), "count": Out(_COUNT_BITS)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        total = self.count + count_ones(self.flags)
        with m.If(self.clear):
            m.d.sync += self.count.eq(0)
        with m.Elif(total[_COUNT_BITS:].any()):
            m.d.sync += self.count.eq((1 << _COUNT_BITS) - 1)
        with m.Else():
            m.d.sync += self.count.eq(total)
        return m


class MatrixUnit(wiring.Component):
    """The matrix mode with an array of its own: jobs, activations and weights in, words out.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells

    Members
    -------
    job, i, w, bias_write, o, clear, saturations: of :class:`MatrixMode`
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self._target = target
        self._mode = MatrixMode(config, matrix_array(config), target=target)
        members = self._mode.signature.members
        super().__init__({name: members[name] for name in ("job", "i", "w", "bias_write", "o", "clear", "saturations")})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.mode = mode = self._mode
        m.submodules.array = array = MacArray(mode.array, target=self._target)
        for name in ("job", "i", "w"):
            connect(m, flipped(getattr(self, name)), getattr(mode, name))
        connect(m, mode.o, flipped(self.o))
        m.d.comb += [
            mode.bias_write.eq(self.bias_write),
            mode.clear.eq(self.clear),
            self.saturations.eq(mode.saturations),
            array.feed_valid.eq(mode.feed_valid),
            array.feed_data.eq(mode.feed_data),
            array.step_valid.eq(mode.step_valid),
            array.step.eq(mode.step),
            mode.i_valid.eq(array.o_valid),
            mode.i_tag.eq(array.o_tag),
            mode.i_data.eq(array.o_data),
        ]
        return m


def _clamp(m: Module, name: str, value: Value, bits: int) -> tuple[Value, Value]:
    """Symmetric saturation to ``bits``, and whether it acts."""
    exact = Signal(Shape.cast(value.shape()), name=f"{name}_exact")
    m.d.comb += exact.eq(value)
    sign, high, low = exact[-1], exact[bits - 1 :], exact[: bits - 1]
    beyond = (high.any() & ~high.all()) | (sign & ~low.any() & high.all())
    limit = Cat(Const(1, 1), (~sign).replicate(bits - 2), sign)
    return Mux(beyond, limit, exact[:bits]).as_signed(), beyond




class _Line:
    """A value delayed by registers: ``line[n]`` is its state in stage n; the source itself is in stage ``start``."""

    def __init__(self, start: int, taps: list[Value]) -> None:
        self._start = start
        self._taps = taps

    def __getitem__(self, stage: int) -> Value:
        return self._taps[stage - self._start]


def _line(
    m: Module, name: str, source: Value, last: int, *, start: int = 0, reset_less: bool = True
) -> _Line:
    """``source`` of stage ``start`` up to stage ``last``."""
    taps: list[Value] = [source]
    for stage in range(start + 1, last + 1):
        tap = Signal(Shape.cast(source.shape()), name=f"{name}_{stage}", reset_less=reset_less)
        m.d.sync += tap.eq(taps[-1])
        taps.append(tap)
    return _Line(start, taps)
