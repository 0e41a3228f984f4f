"""Normaliser of the attention tile in hardware: sums over probabilities, beats of the output, status record."""

from __future__ import annotations

from amaranth.hdl import Cat, Const, Module, Mux, Shape, Signal, Value, signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from dtp.array import MULTIPLIER_CYCLES
from dtp.config import MANTISSA_BITS, REGISTER_BITS, TABLE_BITS, Config
from dtp.job import STATUS_BYTES, STATUS_MAGIC, VERSION, StatusRecord
from dtp.normaliser import COUNT_BITS, RECIPROCAL, NormaliserParams
from rtl.layouts import RecordKind, RecordLayout
from rtl.lib.delay import delayed
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import MultiplexedAdder, Multiplier, Target
from rtl.lib.reduce import count_ones, index_bits, joined
from rtl.lib.streams import StreamQueue

__all__ = ["Normaliser", "OutputLayout"]


class OutputLayout(data.StructLayout):
    """One output beat: its bytes, empty rows of the group, and whether it is the job's last."""

    def __init__(self, config: Config) -> None:
        super().__init__(
            {"data": unsigned(8 * config.output_bytes), "user": unsigned(config.rows), "last": unsigned(1)}
        )


class Normaliser(wiring.Component):
    """Sends what the records ask for, in their order: groups of outputs, groups of zeros, status records.

    Arithmetic: docs/tile.md, 4.4, as :mod:`dtp.normaliser` has it, bit for bit. A *word* is
    ``normaliser_lanes`` values; one is issued a cycle, read from the slot of its group, shifted, multiplied,
    rounded and saturated in a pipeline of fixed length, and words make beats. Issue of a word waits for its
    record, for the words before it, for its values, for the reciprocals of its group and for room in the queue
    in front of the output; :class:`sim.cycles.normaliser.NormaliserTiming` states the cycles. With a sink that
    never stalls there is no bubble between words, steps and groups.

    The caller keeps these promises. A DATA record is pushed before the first value of its group arrives, its
    steps are whole passes, and values arrive in the order of groups and steps. ``group_valid`` pulses, one a
    DATA group and in the same order, are ``params.group_spacing`` or more apart and at most ``lookahead + 1``
    groups ahead of the records. The rows of ``denominators`` rotate into place: in the cycle n before a
    pulse, the last ``params.reciprocal_rows`` places show the rows that lie n times as many places further
    down in the cycle of the pulse.

    Stalls: ``record.ready`` is low for a DATA record while ``output_slots`` groups are pushed and not drained,
    for a STATUS record while another one is not out, and for all while ``params.record_depth`` records wait.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells

    Members
    -------
    record: In(stream of :class:`rtl.layouts.RecordLayout`)
    i_valid, i_slot, i_step: In, values of step ``i_step`` of the group in slot ``i_slot`` (groups with data, counted
        modulo ``output_slots``)
    i_data: In(rows × segments, signed(accumulator_bits))
    group_valid: In(1), ``denominators`` and ``saturations`` of the next group are there
    denominators: In(rows, unsigned(denominator_bits)); 0 for a row without a kept pair; only the last
        ``params.reciprocal_rows`` places are looked at
    saturations: In(count_bits), saturated scores of the group
    o: Out(stream of :class:`OutputLayout`)
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self.params = NormaliserParams(config)
        self._target = target
        c = config
        sums = data.ArrayLayout(signed(c.accumulator_bits), c.segments)
        super().__init__(
            {
                "record": In(stream.Signature(RecordLayout(c))),
                "i_valid": In(1),
                "i_slot": In(range(c.output_slots)),
                "i_step": In(range(self.params.max_steps)),
                "i_data": In(data.ArrayLayout(sums, c.rows)),
                "group_valid": In(1),
                "denominators": In(data.ArrayLayout(unsigned(c.denominator_bits), c.rows)),
                "saturations": In(self.params.count_bits),
                "o": Out(stream.Signature(OutputLayout(c))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        c, p = self.config, self.params
        group_bits = index_bits(p.reciprocal_groups)

        # Records. Tag, error and lift saturations of the one STATUS record that can wait lie beside the queue.
        waiting = data.StructLayout(
            {"kind": RecordKind, "last_chunk": range(c.max_chunks), "live_rows": unsigned(c.rows)}
        )
        m.submodules.records = records = StreamQueue(waiting, p.record_depth)
        head = records.o.payload
        outstanding = Signal(range(c.output_slots + 1))
        slots_full = Signal()
        status_waits = Signal()
        tag, error, lift_saturations = Signal(16), Signal(8), Signal(COUNT_BITS)
        record = self.record.payload
        is_data_record, is_status_record = record.kind == RecordKind.DATA, record.kind == RecordKind.STATUS
        may_push = ~(is_data_record & slots_full) & ~(is_status_record & status_waits)
        push = Signal()
        m.d.comb += [
            self.record.ready.eq(records.i.ready & may_push),
            records.i.valid.eq(self.record.valid & may_push),
            records.i.payload.kind.eq(record.kind),
            records.i.payload.last_chunk.eq((record.steps >> index_bits(c.pass_steps)) - 1),
            records.i.payload.live_rows.eq(record.live_rows),
            push.eq(self.record.valid & self.record.ready),
        ]
        with m.If(push & is_status_record):
            m.d.sync += [
                tag.eq(record.tag),
                error.eq(record.error),
                lift_saturations.eq(record.lift_saturations),
                status_waits.eq(1),
            ]

        # Issue of a word: entry and word of the record at the head of the queue.
        is_data, is_status = Signal(), Signal()
        m.d.comb += [is_data.eq(head.kind == RecordKind.DATA), is_status.eq(head.kind == RecordKind.STATUS)]
        entry = Signal(range(max(p.max_steps, p.status_words)))
        word = Signal(range(max(2, p.step_words)))
        pass_bits = index_bits(c.pass_steps)
        pass_end, chunk_end, status_end = Signal(), Signal(), Signal()
        fresh = Signal(init=1)  # the next word is the record's first
        slot, group = Signal(range(c.output_slots)), Signal(group_bits)
        values_ready, group_ready, room, quiet = Signal(), Signal(), Signal(), Signal()
        issue, word_last, record_last = Signal(), Signal(), Signal()
        m.d.comb += [
            pass_end.eq(entry[:pass_bits].all()),
            chunk_end.eq(entry[pass_bits : index_bits(p.max_steps)] == head.last_chunk),
            status_end.eq(entry == p.status_words - 1),
            issue.eq(
                records.o.valid
                & room
                & Mux(is_data, values_ready & group_ready, ~is_status | quiet | ~fresh)
            ),
            word_last.eq((word == p.step_words - 1) | is_status),
            record_last.eq(Mux(is_status, status_end, pass_end & chunk_end & word_last)),
            records.o.ready.eq(issue & record_last),
        ]
        with m.If(issue):
            m.d.sync += [word.eq(Mux(word_last, 0, word + 1)), fresh.eq(record_last)]
            with m.If(record_last):
                m.d.sync += entry.eq(0)
            with m.Elif(word_last):
                m.d.sync += entry.eq(entry + 1)
            with m.If(record_last & is_data):
                m.d.sync += [slot.eq(slot + 1), group.eq(group + 1)]
        drained = Signal()
        m.d.comb += drained.eq(issue & record_last & is_data)

        # What issue waits for, as counters.
        converted = Signal()
        entries = _Count(m, "entries", c.output_slots * p.max_steps, self.i_valid, issue & word_last & is_data)
        groups = _Count(m, "groups", p.reciprocal_groups, converted, drained)
        given_back = Signal()
        m.d.sync += given_back.eq(drained)
        used_slots = _Count(m, "used_slots", c.output_slots, push & is_data_record, given_back)
        pop = Signal()
        words = _Count(m, "words", p.word_depth, issue, pop)
        m.d.comb += [
            outstanding.eq(used_slots.value),
            slots_full.eq(outstanding == c.output_slots),
            values_ready.eq(entries.value.any()),
            group_ready.eq(groups.value.any()),
            room.eq(words.value != p.word_depth),
        ]

        # Reciprocals.
        convert = _Converter(c)
        m.submodules.convert = convert
        first = delayed(m, "first", issue & fresh & is_data, 1 + c.registered_memories, reset_less=False)
        banks, group_scores = self._reciprocal_banks(m, convert, word, group, is_data, first[-1])
        m.d.comb += [
            convert.start.eq(self.group_valid),
            convert.denominators.eq(self.denominators),
            converted.eq(convert.done),
        ]
        empty = self._group_memory(m, "empty", c.rows, convert.done, convert.group, convert.empty, group)

        # The pipeline: control, stage n is what was issued n cycles ago.
        last = Signal()
        m.d.comb += last.eq(is_status & record_last)
        user = Signal(c.rows)
        m.d.comb += user.eq(head.live_rows & (empty | ~is_data.replicate(c.rows)) & ~is_status.replicate(c.rows))
        stages = p.issue_cycles - 1
        valid = delayed(m, "valid", issue, stages, reset_less=False)
        users = delayed(m, "user", user, stages)
        lasts = delayed(m, "last", last, stages)
        statuses = delayed(m, "status", issue & is_status, p.product_cycles - 1, reset_less=False)
        m.d.comb += quiet.eq(~Cat(valid[1 : p.status_gap]).any())

        # Values: banks that are not asked for read a word that is always 0, so that OR selects.
        values = self._values(m, entry, slot, word)
        results: list[Value] = []
        over = Signal(p.lanes)
        product_valid = valid[p.product_cycles]
        status_word = Signal(p.word_bits)
        for lane in range(p.lanes):
            value, amount, factor = values[lane], *banks[lane % len(banks)]
            product = self._product(m, lane, value, amount, factor)
            exact = Signal(signed(c.output_bits + 1), name=f"exact_{lane}")
            m.d.comb += exact.eq((product[p.product_shift - 1 :][: c.output_bits + 2].as_signed() + 1) >> 1)
            result = Signal(c.output_bits, name=f"result_{lane}", reset_less=True)
            sign, beyond = exact[-1], exact[-1] ^ exact[-2]
            limited = Mux(beyond, Cat((~sign).replicate(c.output_bits - 1), sign), exact[: c.output_bits])
            m.d.sync += [
                result.eq(limited | status_word[lane * c.output_bits :][: c.output_bits]),
                over[lane].eq(beyond & product_valid),
            ]
            results.append(result)

        # Counters of the job, and its status record in the place of a product that is 0.
        status_turn = Signal(p.status_words, init=1)
        status_now = statuses[p.product_cycles - 1]
        status_last = Signal()
        m.d.comb += status_last.eq(status_now & status_turn[-1])
        ending = delayed(m, "ending", issue & record_last & ~is_status, 2, reset_less=False)
        empty_now = Signal(range(c.rows + 1), reset_less=True)
        m.d.sync += empty_now.eq(count_ones(users[1]))
        empty_rows = Signal(COUNT_BITS)
        with m.If(status_last):
            m.d.sync += empty_rows.eq(0)
        with m.Elif(ending[2]):
            m.d.sync += empty_rows.eq(empty_rows + empty_now)
        score_saturations, score_full = self._counter(m, "score_saturations", group_scores, status_last)
        # The last outputs are being counted when the first word of a status record is made.
        at_once = StatusRecord.offset("output_saturations") < p.word_bits // 8
        output_saturations, output_full = self._counter(
            m, "output_saturations", count_ones(over), status_last, at_once=at_once
        )
        fields = Cat(
            Const(STATUS_MAGIC, 16), Const(VERSION, 8), error, tag, empty_rows, score_saturations,
            lift_saturations, output_saturations, Const(0, 8 * STATUS_BYTES),
        )  # fmt: skip
        # A full counter's 16 bits read 1: by byte of the record.
        full = {8: score_full, 9: score_full, 12: output_full, 13: output_full}
        chosen: list[Value] = []
        for byte in range(p.word_bits // 8):
            turns = [(status_turn[n], n * p.word_bits // 8 + byte) for n in range(p.status_words)]
            ones = Signal(name=f"ones_{byte}")
            m.d.comb += ones.eq(joined([turn & full[place] for turn, place in turns if place in full] or [Const(0, 1)]))
            for bit in range(8):
                parts = [turn & fields[8 * place + bit] for turn, place in turns if place < STATUS_BYTES]
                chosen.append(joined([ones, *parts]))
        with m.If(status_now):
            m.d.sync += [status_word.eq(Cat(chosen)), status_turn.eq(status_turn.rotate_left(1))]
        with m.Else():
            m.d.sync += status_word.eq(0)
        with m.If(status_last):
            m.d.sync += status_waits.eq(0)

        # Words to beats.
        queued = data.StructLayout({"data": unsigned(p.word_bits), "user": unsigned(c.rows), "last": unsigned(1)})
        m.submodules.words = queue = StreamQueue(queued, p.word_depth)
        m.d.comb += [
            queue.i.valid.eq(valid[stages]),
            queue.i.payload.data.eq(Cat(results)),
            queue.i.payload.user.eq(users[stages]),
            queue.i.payload.last.eq(lasts[stages]),
            pop.eq(queue.o.valid & queue.o.ready),
        ]
        place = Signal(range(max(2, p.beat_words)))
        complete = Signal()
        earlier = [Signal(p.word_bits, name=f"word_{n}", reset_less=True) for n in range(p.beat_words - 1)]
        for n, register in enumerate(earlier):
            with m.If(place == n):
                m.d.sync += register.eq(queue.o.payload.data)
        with m.If(pop):
            m.d.sync += place.eq(Mux(complete, 0, place + 1))
        m.d.comb += [
            complete.eq(place == p.beat_words - 1),
            queue.o.ready.eq(~complete | self.o.ready),
            self.o.valid.eq(queue.o.valid & complete),
            self.o.payload.data.eq(Cat(*earlier, queue.o.payload.data)),
            self.o.payload.user.eq(queue.o.payload.user),
            self.o.payload.last.eq(queue.o.payload.last),
        ]
        return m

    def _read(self, m: Module, name: str, memory: BlockMemory) -> Value:
        """What was read, in the register of the memory or one behind it."""
        if not self.config.registered_memories:
            return memory.data
        return delayed(m, f"{name}_read", Value.cast(memory.data), 1)[1]

    def _values(self, m: Module, entry: Signal, slot: Signal, word: Signal) -> list[Value]:
        """Memory of the sums; the values of the word, ``product_cycles − 3`` after its issue."""
        c, p = self.config, self.params
        entry_bits = index_bits(p.max_steps)
        depth = c.output_slots * p.max_steps
        steps = [self.i_data[n % c.rows][n // c.rows] for n in range(c.rows * c.segments)]
        bits = p.lanes * c.accumulator_bits
        read: list[Value] = []
        for bank in range(p.step_words):
            memory = BlockMemory(m, f"sums_{bank}", bits, depth if p.step_words == 1 else 2 * depth)
            address = Cat(entry[:entry_bits], slot)
            m.d.comb += [
                memory.write.en.eq(self.i_valid),
                memory.write.addr.eq(Cat(self.i_step, self.i_slot)),
                memory.write.data.eq(Cat(steps[bank * p.lanes : (bank + 1) * p.lanes])),
                memory.address.eq(address if p.step_words == 1 else Cat(address, word != bank)),
            ]
            read.append(self._read(m, f"sums_{bank}", memory))
        values = Signal(data.ArrayLayout(signed(c.accumulator_bits), p.lanes), reset_less=True)
        selected = read[0]
        for other in read[1:]:
            selected = selected | other
        m.d.sync += values.eq(selected)
        return [values[lane] for lane in range(p.lanes)]

    def _reciprocal_banks(
        self, m: Module, convert: _Converter, word: Signal, group: Signal, is_data: Value, first: Value
    ) -> tuple[list[tuple[Value, Value]], Value]:
        """Memories of the reciprocals, row r in bank r modulo ``row_banks``.

        Returns amount and factor of each row of the word beside its values, and in one cycle the saturated
        scores of a group that began, 0 in all others: they lie beside the reciprocals of row 0. The upper half
        of every bank is always 0: what is not of a group with data is multiplied by it.
        """
        c, p = self.config, self.params
        depth = 2 * (c.rows // p.row_banks) * p.reciprocal_groups
        word_rows = min(p.lanes, c.rows)
        parts = p.row_banks // word_rows
        part, line = word[: index_bits(parts)], word[index_bits(parts) : index_bits(c.rows // word_rows)]
        counted, scores = Signal(p.count_bits, reset_less=True), Signal(p.count_bits)
        with m.If(self.group_valid):
            m.d.sync += counted.eq(self.saturations)
        read: list[Value] = []
        for bank in range(p.row_banks):
            content = [convert.factors[bank % p.reciprocal_rows], convert.amounts[bank % p.reciprocal_rows]]
            if bank == 0:
                content.append(counted)
            memory = BlockMemory(m, f"reciprocals_{bank}", len(Cat(content)), depth)
            # Low and high bits of the number of the first row converted now: bank and word.
            base = Cat(Const(0, index_bits(p.reciprocal_rows)), convert.index)[: index_bits(c.rows)]
            unused = ~is_data | (part != bank // word_rows)
            m.d.comb += [
                memory.write.en.eq(
                    convert.valid & (base[: index_bits(p.row_banks)] == bank - bank % p.reciprocal_rows)
                ),
                memory.write.addr.eq(Cat(base[index_bits(p.row_banks) :], convert.group)),
                memory.write.data.eq(Cat(content)),
                memory.address.eq(Cat(line, group, unused)),
            ]
            read.append(self._read(m, f"reciprocals_{bank}", memory))
        bits = MANTISSA_BITS + p.amount_bits
        with m.If(first):
            m.d.sync += scores.eq(read[0][bits:])
        with m.Else():
            m.d.sync += scores.eq(0)
        pairs: list[tuple[Value, Value]] = []
        for row in range(word_rows):
            pair = Signal(bits, name=f"reciprocal_{row}", reset_less=True)
            m.d.sync += pair.eq(joined([data[:bits] for data in read[row::word_rows]]))
            pairs.append((pair[MANTISSA_BITS:], pair[:MANTISSA_BITS]))
        # Late enough for a status record just before the group to have cleared its counter.
        return pairs, delayed(m, "scores", scores, MULTIPLIER_CYCLES, reset_less=False)[-1]

    def _product(self, m: Module, lane: int, value: Value, amount: Value, factor: Value) -> Value:
        """Aligned sum times reciprocal: the register behind the multiplier."""
        p = self.params
        # One bit below the smallest shift's result collects the rounding bit.
        if p.base_shift:
            shifted: Value = value[p.base_shift - 1 :].as_signed()
        else:
            shifted = Cat(Const(0, 1 + p.lift_bits), value).as_signed()
        for level in reversed(range(1, p.amount_bits)):
            # Bits that the smaller shifts can still ask for.
            kept = REGISTER_BITS + (1 << level)
            shifted = Mux(amount[level], shifted >> (1 << level), shifted)
            if len(shifted) > kept:
                shifted = shifted[:kept].as_signed()
            if level == p.amount_bits // 2:
                register = Signal(Shape.cast(shifted.shape()), name=f"shifted_{lane}", reset_less=True)
                m.d.sync += register.eq(shifted)
                shifted = register
                amount = delayed(m, f"amount_{lane}", amount, 1)[1]
                factor = delayed(m, f"factor_{lane}", factor, 1)[1]
        adder = MultiplexedAdder(REGISTER_BITS, target=self._target)
        m.submodules[f"rounder_{lane}"] = adder
        multiplier = Multiplier(REGISTER_BITS, MANTISSA_BITS + 1, target=self._target)
        m.submodules[f"multiplier_{lane}"] = multiplier
        coarse = Signal(signed(max(len(shifted), REGISTER_BITS + 2)), name=f"coarse_{lane}")
        m.d.comb += [
            coarse.eq(shifted),
            adder.select.eq(amount[0]),
            adder.x0.eq(coarse >> 1),
            adder.x1.eq(coarse >> 2),
            adder.y.eq(0),
            adder.carry.eq(Mux(amount[0], coarse[1], coarse[0])),
            multiplier.a.eq(adder.o),
            multiplier.a_enable.eq(1),
            multiplier.b.eq(factor),
        ]
        return multiplier.o

    def _group_memory(
        self, m: Module, name: str, bits: int, write: Value, at: Value, value: Value, group: Value
    ) -> Value:
        """One number a group, read without a register."""
        memory = Memory(shape=bits, depth=self.params.reciprocal_groups, init=[])
        m.submodules[name] = memory
        write_port, read_port = memory.write_port(), memory.read_port(domain="comb")
        m.d.comb += [
            write_port.en.eq(write),
            write_port.addr.eq(at),
            write_port.data.eq(value),
            read_port.addr.eq(group),
        ]
        return read_port.data

    def _counter(
        self, m: Module, name: str, amount: Value, clear: Value, *, at_once: bool = False
    ) -> tuple[Value, Value]:
        """A counter, and whether it ran over since ``clear``; ``at_once``: with the amount of this cycle."""
        count, full = Signal(COUNT_BITS, name=name), Signal(name=f"{name}_full")
        total = count + amount
        with m.If(clear):
            m.d.sync += [count.eq(0), full.eq(0)]
        with m.Else():
            m.d.sync += [count.eq(total), full.eq(full | total[COUNT_BITS:].any())]
        if at_once:
            return total[:COUNT_BITS], full | total[COUNT_BITS:].any()
        return count, full


class _Converter(wiring.Component):
    """Denominators to reciprocals, ``reciprocal_rows`` rows a cycle, row 0 first.

    The leading one of l is found by halving: a level keeps the upper part where that has a one. Legal l other
    than 0 have their leading one in the upper ``2^amount_bits`` places of what is looked at, and there alone it
    is looked for.

    Members
    -------
    start: In(1), ends a group
    denominators: In(rows, unsigned(denominator_bits)), as :class:`Normaliser` has it
    valid: Out(1); index: Out, rows index · reciprocal_rows …; group: Out, counts starts
    factors, amounts: Out(reciprocal_rows × …), table value and right shift; 0 and any for l = 0
    done: Out(1), with the last rows of a group; empty: Out(rows), which rows had l = 0
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.params = p = NormaliserParams(config)
        super().__init__(
            {
                "start": In(1),
                "denominators": In(data.ArrayLayout(unsigned(config.denominator_bits), config.rows)),
                "valid": Out(1),
                "index": Out(index_bits(p.conversion_cycles)),
                "group": Out(index_bits(p.reciprocal_groups)),
                "factors": Out(data.ArrayLayout(unsigned(MANTISSA_BITS), p.reciprocal_rows)),
                "amounts": Out(data.ArrayLayout(unsigned(p.amount_bits), p.reciprocal_rows)),
                "done": Out(1),
                "empty": Out(config.rows),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        c, p = self.config, self.params
        # Rows pass the last places of the port; at ``start`` the first of them is as many cycles old.
        places = [self.denominators[n] for n in range(c.rows - p.reciprocal_rows, c.rows)]
        rows = delayed(m, "rows", Cat(places), p.conversion_cycles - 1)[-1]
        turns = delayed(m, "turn", self.start, p.conversion_cycles - 1, reset_less=False)

        m.submodules.table = table = Memory(
            shape=unsigned(MANTISSA_BITS), depth=1 << TABLE_BITS, init=RECIPROCAL, attrs={"ram_style": "block"}
        )
        # Levels in two stages, the table, its result.
        valid = delayed(m, "valid", Cat(turns).any(), 3, reset_less=False)
        zeros: list[Value] = []
        for place in range(p.reciprocal_rows):
            chosen = rows[place * c.denominator_bits :][: c.denominator_bits]
            # Bits from the lowest that can be read after the leading one to the highest place of the search.
            lowest = c.probability_bits - 1 - TABLE_BITS
            searched: Value = chosen[lowest:] if lowest >= 0 else Cat(Const(0, -lowest), chosen)
            width = TABLE_BITS + (1 << p.amount_bits)
            searched = Cat(searched, Const(0, max(0, width - len(searched))))[:width]
            amount: list[Value] = []
            for level in reversed(range(p.amount_bits)):
                half = 1 << level
                high = Signal(name=f"high_{place}_{level}")
                m.d.comb += high.eq(searched[-half:].any())
                searched = Mux(high, searched[half:], searched[: len(searched) - half])
                amount.insert(0, high)
                if level == p.amount_bits // 2:
                    register = Signal(len(searched), name=f"searched_{place}", reset_less=True)
                    m.d.sync += register.eq(searched)
                    searched = register
                    amount = [delayed(m, f"amount_{place}_{level + n}", bit, 1)[1] for n, bit in enumerate(amount)]
            zero = Signal(name=f"zero_{place}", reset_less=True)
            m.d.sync += zero.eq(~searched[TABLE_BITS])
            read = table.read_port()
            m.d.comb += read.addr.eq(searched[:TABLE_BITS])
            with m.If(zero):
                m.d.sync += self.factors[place].eq(0)
            with m.Else():
                m.d.sync += self.factors[place].eq(read.data)
            m.d.comb += self.amounts[place].eq(delayed(m, f"amount_{place}", Cat(amount), 2)[2])
            zeros.append(delayed(m, f"empty_{place}", zero, 1)[1])
        empty = Signal(c.rows, reset_less=True)
        m.d.comb += [
            self.valid.eq(valid[3]),
            self.done.eq(self.valid & (self.index == p.conversion_cycles - 1)),
            self.empty.eq(Cat(empty[p.reciprocal_rows :], zeros)),
        ]
        with m.If(self.valid):
            m.d.sync += [self.index.eq(self.index + 1), empty.eq(self.empty)]
        m.d.sync += self.group.eq(self.group + self.done)
        return m


class _Count:
    """A counter from 0 to ``most`` of what came and has not gone."""

    def __init__(self, m: Module, name: str, most: int, up: Value, down: Value) -> None:
        self.value = Signal(range(most + 1), name=name)
        bits = len(self.value)
        with m.If(up ^ down):
            m.d.sync += self.value.eq(self.value + Cat(Const(1, 1), down.replicate(bits - 1)))
