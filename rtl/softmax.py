"""Base-2 online softmax of the attention tile in hardware."""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from dtp.config import MANTISSA_BITS, RESCALE_BITS, SCORE_BITS, SCORE_FRACTION_BITS, TABLE_BITS, Config
from dtp.softmax import MAXIMUM_BITS, SoftmaxParams, exponential_table
from rtl.lib.multiplier import MultiplexedAdder, Target

__all__ = ["ItemLayout", "Softmax"]

# A score without the two places that the table does not need; they are rounded into the difference.
_DROPPED_BITS = SCORE_FRACTION_BITS - TABLE_BITS
_WORD_BITS = SCORE_BITS - _DROPPED_BITS
# Integer part of a score and whether it has a fraction: what decides the ceiling of the largest.
_KEY_BITS = SCORE_BITS - SCORE_FRACTION_BITS + 1


class ItemLayout(data.StructLayout):
    """One block of keys for one group of rows.

    Members
    -------
    slot: buffer of its scores, probabilities and rescales
    first, last: of its group
    key_base: first key of the block, a multiple of ``block``
    query_base: first query of the group, a multiple of ``rows``
    valid_length: tokens of the head; what lies beyond is padding
    causal: only keys up to the query are kept
    """

    def __init__(self, config: Config) -> None:
        params = SoftmaxParams(config)
        super().__init__(
            {
                "slot": range(params.slots),
                "first": unsigned(1),
                "last": unsigned(1),
                "key_base": unsigned(params.token_bits),
                "query_base": unsigned(params.token_bits),
                "valid_length": unsigned(params.token_bits),
                "causal": unsigned(1),
            }
        )


class _ScoreLayout(data.StructLayout):
    """A score as it waits for the block's maximum.

    Members
    -------
    word: the score without its last two places
    carry: these two places are 3 and round up
    kept: the pair counts
    saturated: it does, and its score was clipped
    """

    def __init__(self) -> None:
        super().__init__(
            {"word": signed(_WORD_BITS), "carry": unsigned(1), "kept": unsigned(1), "saturated": unsigned(1)}
        )


class Softmax(wiring.Component):
    """Probabilities and rescales of one item after the other, denominators of one group after the other.

    Arithmetic: :func:`dtp.softmax.clip_scores` and :func:`dtp.softmax.advance`, bit for bit. A pair is kept when
    key and query are below ``valid_length`` and, in a causal head, the key does not come after the query.

    No back-pressure. Scores are taken at a step a cycle, exponentials at a key of all rows a cycle: items at
    least ``block`` cycles apart are done exactly ``params.latency`` cycles after their last score; closer ones
    wait in their slots and follow at ``block`` cycles, without a bubble. The caller keeps an item's slot until it
    has read its probabilities, and describes an item at least ``params.item_lead`` cycles before its first score.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells

    Members
    -------
    item_valid: In(1), one cycle for each item, in the order of their scores
    item: In(:class:`ItemLayout`)
    i_valid: In(1)
    i_slot: In(range(slots))
    i_step: In(range(pass_steps)), 0, 1, … within an item; gaps are free
    i_data: In(rows × segments, signed(accumulator_bits)), the segments hold the keys step·segments + s
    p_slot, p_feed: In, what to read: keys feed·segments + s
    p_data: Out(rows × segments, unsigned(probability_bits)), ``params.p_read_latency`` cycles later
    rescale_slot: In(range(slots))
    rescale: Out(rows, unsigned(5)), in the same cycle
    done: Out(1), one cycle for each item, in order: from the next cycle on its probabilities can be read, and
        from this one on its rescales
    group_valid: Out(1), one cycle for each group, ``params.group_latency`` cycles after the last score of its
        last item, unless that one had to wait
    denominators: Out(rows, unsigned(denominator_bits)), right in the cycle of ``group_valid``; 0: no kept pair
    saturations: Out, clipped scores among the kept pairs of the group, right in the cycle of ``group_valid``
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self.params = SoftmaxParams(config)
        self._target = target
        slot, step = range(self.params.slots), range(config.pass_steps)
        scores = data.ArrayLayout(signed(config.accumulator_bits), config.segments)
        probabilities = data.ArrayLayout(unsigned(config.probability_bits), config.segments)
        super().__init__(
            {
                "item_valid": In(1),
                "item": In(ItemLayout(config)),
                "i_valid": In(1),
                "i_slot": In(slot),
                "i_step": In(step),
                "i_data": In(data.ArrayLayout(scores, config.rows)),
                "p_slot": In(slot),
                "p_feed": In(step),
                "p_data": Out(data.ArrayLayout(probabilities, config.rows)),
                "rescale_slot": In(slot),
                "rescale": Out(data.ArrayLayout(unsigned(RESCALE_BITS), config.rows)),
                "done": Out(1),
                "group_valid": Out(1),
                "denominators": Out(data.ArrayLayout(unsigned(config.denominator_bits), config.rows)),
                "saturations": Out(self.params.saturation_bits),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        self._items(m)
        self._clip(m)
        self._maxima(m)
        self._schedule(m)
        self._rise(m)
        self._exponentials(m)
        self._sums(m)
        self._denominators(m)
        return m

    # Items and scores: counted from the cycle of the input

    def _items(self, m: Module) -> None:
        """What an item's description says about its pairs, and whether it begins or ends a group, by slot."""
        c, p = self.config, self.params
        item = Signal(ItemLayout(c), reset_less=True)
        valid = Signal(name="item_taken")
        m.d.sync += [item.eq(self.item), valid.eq(self.item_valid)]

        row_bits = _log2(c.rows)
        stretches = c.block // c.rows
        keys, _ = _distance(m, "keys", item.valid_length, item.key_base, c.block)
        live, _ = _distance(m, "live", item.valid_length, item.query_base, c.rows)
        reach, later = _distance(m, "reach", item.query_base[row_bits:], item.key_base[row_bits:], stretches)
        bounds = data.StructLayout(
            {
                "first": 1,
                "keys": len(keys),  # keys that are not padding
                "live": len(live),  # queries that are not padding; none if all keys come after all queries
                "reach": len(reach),  # row r keeps the keys up to reach·rows + r
            }
        )
        entry = Signal(bounds)
        m.d.comb += [
            entry.first.eq(item.first),
            entry.keys.eq(keys),
            entry.live.eq(Mux(item.causal & later, 0, live)),
            entry.reach.eq(Mux(item.causal, reach, stretches)),
        ]
        self._bounds = Signal(bounds)
        self._small_memory(m, "bounds", entry, item.slot, valid, self.i_slot, self._bounds)
        ends = Signal(data.StructLayout({"first": 1, "last": 1}))
        m.d.comb += [ends.first.eq(item.first), ends.last.eq(item.last)]
        self._ends = Signal(ends.shape())
        self._ends_slot = Signal(range(p.slots))
        self._small_memory(m, "ends", ends, item.slot, valid, self._ends_slot, self._ends)

    def _small_memory(
        self, m: Module, name: str, entry: Value, slot: Value, enable: Value, read_slot: Value, target: Value
    ) -> None:
        """One word a slot, read without latency."""
        source = Value.cast(entry)
        memory = Memory(
            shape=unsigned(len(source)),
            depth=self.params.slots,
            init=[],
            attrs={"ram_style": "distributed", "no_rw_check": 1},
        )
        m.submodules[f"{name}_memory"] = memory
        write = memory.write_port()
        read = memory.read_port(domain="comb")
        m.d.comb += [write.addr.eq(slot), write.data.eq(source), write.en.eq(enable)]
        m.d.comb += [read.addr.eq(read_slot), Value.cast(target).eq(read.data)]

    def _large_memory(
        self, m: Module, name: str, word: Value, address: Value, enable: Value, read_address: Value
    ) -> Signal:
        """A word a step and slot, read with a cycle of latency.

        No word is read while it is written. Synthesis believes that only of a memory that is read without latency
        and a register that it merges into it.
        """
        memory = Memory(
            shape=unsigned(len(word)),
            depth=self.params.slots * self.config.pass_steps,
            init=[],
            attrs={"ram_style": "block", "no_rw_check": 1},
        )
        m.submodules[f"{name}_memory"] = memory
        write = memory.write_port()
        read = memory.read_port(domain="comb")
        data_out = Signal(len(word), name=f"{name}_read", reset_less=True)
        m.d.comb += [write.addr.eq(address), write.data.eq(word), write.en.eq(enable)]
        m.d.comb += read.addr.eq(read_address)
        m.d.sync += data_out.eq(read.data)
        return data_out

    def _clip(self, m: Module) -> None:
        """Cycle 1: scores of 22 bits with their flags, written to the score buffer."""
        c, p = self.config, self.params
        row_bits = _log2(c.rows)
        words: list[Value] = []
        self._keys: list[list[tuple[Value, Value]]] = [[] for _ in range(c.rows)]
        kept_pairs: list[list[Value]] = [[] for _ in range(c.rows)]
        for s in range(c.segments):
            offset = Signal(range(c.block), name=f"offset_{s}")
            inside, before, at = (Signal(name=f"{name}_{s}") for name in ("inside", "before", "at"))
            m.d.comb += [
                offset.eq(Cat(Const(s, _log2(c.segments)), self.i_step)),
                inside.eq(offset < self._bounds.keys),
                before.eq(inside & (offset[row_bits:] < self._bounds.reach)),
                at.eq(inside & (offset[row_bits:] == self._bounds.reach)),
            ]
            for r in range(c.rows):
                kept = (self._bounds.live > r) & (before | (at & (offset[:row_bits] <= r)))
                kept_pairs[r].append(kept)
        for r in range(c.rows):
            for s in range(c.segments):
                x = self.i_data[r][s]
                sign, over = x[-1], x[SCORE_BITS - 1 :]
                clipped = Signal(name=f"clipped_{r}_{s}")
                limit = Cat((~sign).replicate(_WORD_BITS - 1), sign)
                score = Signal(_ScoreLayout(), name=f"score_{r}_{s}", reset_less=True)
                broken = Signal(name=f"broken_{r}_{s}", reset_less=True)  # has a fraction
                kept = kept_pairs[r][s]
                m.d.comb += clipped.eq(over.any() & ~over.all())
                m.d.sync += [
                    score.word.eq(Mux(clipped, limit, x[_DROPPED_BITS:SCORE_BITS])),
                    score.carry.eq(Mux(clipped, ~sign, x[:_DROPPED_BITS].all())),
                    score.kept.eq(kept),
                    score.saturated.eq(kept & clipped),
                    broken.eq(Mux(clipped, ~sign, x[:SCORE_FRACTION_BITS].any())),
                ]
                words.append(score.as_value())
                # The ceiling rises with this number: the integer part, then whether there is a fraction.
                self._keys[r].append((Cat(broken, score.word[TABLE_BITS:]).as_signed(), score.kept))

        s1_valid = Signal()
        s1_slot = Signal.like(self.i_slot, reset_less=True)
        s1_step = Signal.like(self.i_step, reset_less=True)
        s1_first = Signal(reset_less=True)
        m.d.sync += [
            s1_valid.eq(self.i_valid),
            s1_slot.eq(self.i_slot),
            s1_step.eq(self.i_step),
            s1_first.eq(self._bounds.first),
        ]
        address = Cat(s1_step, s1_slot)
        self._buffer_address = Signal(len(address))
        self._buffered = self._large_memory(
            m, "score", Cat(*words), address, s1_valid, self._buffer_address
        )
        levels = p.tree_levels
        self._step_valid = _Line(m, "step_valid", s1_valid, levels, reset_less=False)
        self._step_restart = _Line(m, "step_restart", s1_first & (s1_step == 0), levels)
        self._step_end = _Line(m, "step_end", s1_valid & (s1_step == c.pass_steps - 1), levels, reset_less=False)
        self._step_slot = _Line(m, "step_slot", s1_slot, levels)

    def _maxima(self, m: Module) -> None:
        """Cycle 2 + tree levels: each row's largest key since the group began, and whether there was one."""
        c, levels = self.config, self.params.tree_levels
        self._largest: list[Signal] = []
        self._seen: list[Signal] = []
        for r in range(c.rows):
            nodes = self._keys[r]
            for level in range(levels):
                winners: list[tuple[Value, Value]] = []
                for n in range(0, len(nodes), 2):
                    (key_a, kept_a), (key_b, kept_b) = nodes[n : n + 2]
                    key = Signal(signed(_KEY_BITS), name=f"winner_{r}_{level}_{n // 2}", reset_less=True)
                    kept = Signal(name=f"winner_kept_{r}_{level}_{n // 2}", reset_less=True)
                    m.d.sync += [
                        key.eq(Mux(kept_b & (~kept_a | _less(key_a, key_b)), key_b, key_a)),
                        kept.eq(kept_a | kept_b),
                    ]
                    winners.append((key, kept))
                nodes = winners
            ((key, kept),) = nodes
            largest = Signal(signed(_KEY_BITS), name=f"largest_{r}", reset_less=True)
            seen = Signal(name=f"seen_{r}", reset_less=True)
            known = seen & ~self._step_restart[levels]
            with m.If(self._step_valid[levels]):
                m.d.sync += seen.eq(known | kept)
            with m.If(self._step_valid[levels] & kept & (~known | _less(largest, key))):
                m.d.sync += largest.eq(key)
            self._largest.append(largest)
            self._seen.append(seen)

    # Keys of an item: counted from the cycle in which the score buffer is addressed

    def _schedule(self, m: Module) -> None:
        """Cycle 0: which key of which item is read from the score buffer."""
        c, p = self.config, self.params
        key = Signal(range(c.block))
        busy = Signal()
        begin, slot = Signal(), Signal.like(self.i_slot)
        m.d.sync += [key.eq(key + (busy | begin)), busy.eq((busy | begin) & (key != c.block - 1))]
        current = [Cat(row, flag) for row, flag in zip(self._largest, self._seen, strict=True)]
        if p.queued:
            self._queue(m, begin, busy, slot, current)
        else:
            # Items are at least a block apart: nothing ever waits.
            last = self.i_valid & (self.i_step == c.pass_steps - 1)
            m.d.sync += begin.eq(last)
            with m.If(last):
                m.d.sync += slot.eq(self.i_slot)
            self._tops = current

        stages = p.probability_stage + 1
        self._valid = _Line(m, "valid", busy | begin, stages, reset_less=False)
        self._key = _Line(m, "key", key, p.probability_stage)
        self._slot = _Line(m, "slot", slot, p.probability_stage)
        self._begin = _Line(m, "begin", begin, p.probability_stage, reset_less=False)
        self._end = _Line(m, "end", busy & (key == c.block - 1), stages, reset_less=False)
        m.d.comb += self._ends_slot.eq(self._slot[1])

    def _queue(self, m: Module, begin: Signal, busy: Signal, slot: Signal, tops: list[Value]) -> None:
        """Items whose scores are complete wait in their order, with their maxima."""
        p = self.params
        arrive, arrive_slot = self._step_end[p.tree_levels], self._step_slot[p.tree_levels]
        waiting = Signal(range(p.slots + 1))
        head, tail = Signal(range(p.slots)), Signal(range(p.slots))
        direct = ~waiting.any()  # an item that arrives need not wait
        head_slot = Signal.like(slot)
        push, pop = Signal(), Signal()
        self._small_memory(m, "waiting", arrive_slot, tail, push, head, head_slot)
        running_slot = Signal.like(slot, reset_less=True)
        m.d.comb += [
            begin.eq(~busy & (arrive | ~direct)),
            push.eq(arrive & ~(begin & direct)),
            pop.eq(begin & ~direct),
            slot.eq(Mux(busy, running_slot, Mux(direct, arrive_slot, head_slot))),
        ]
        m.d.sync += [waiting.eq(waiting + push - pop), running_slot.eq(slot)]
        for enable, pointer in ((push, tail), (pop, head)):
            with m.If(enable):
                m.d.sync += pointer.eq(Mux(pointer == p.slots - 1, 0, pointer + 1))

        # In the cycle after its arrival an item's maxima are at the end of the tree, later in this memory.
        complete, complete_slot = Signal(), Signal.like(slot, reset_less=True)
        direct_1, slot_1 = Signal(reset_less=True), Signal.like(slot, reset_less=True)
        m.d.sync += [complete.eq(arrive), complete_slot.eq(arrive_slot), direct_1.eq(direct), slot_1.eq(slot)]
        stored = Signal(len(Cat(*tops)))
        self._small_memory(m, "maxima", Cat(*tops), complete_slot, complete, slot_1, stored)
        width = len(tops[0])
        self._tops = [Mux(direct_1, top, stored[n * width :][:width]) for n, top in enumerate(tops)]

    def _rise(self, m: Module) -> None:
        """Cycle 2: the item's maxima; cycle 4: how much they rose."""
        rise = Signal(self._rise_layout, reset_less=True)
        ends_2, ends_3 = (Signal(self._ends.shape(), name=f"ends_{n}", reset_less=True) for n in (2, 3))
        self._maximum: list[Signal] = []
        with m.If(self._begin[1]):
            m.d.sync += ends_2.eq(self._ends)
        with m.If(self._begin[2]):
            m.d.sync += ends_3.eq(ends_2)
        with m.If(self._begin[3]):
            m.d.sync += rise.ends.eq(ends_3)
        for r, top in enumerate(self._tops):
            largest, seen = top[:_KEY_BITS].as_signed(), top[_KEY_BITS]
            maximum = Signal(signed(MAXIMUM_BITS), name=f"maximum_{r}", reset_less=True)
            before = Signal(signed(MAXIMUM_BITS), name=f"before_{r}", reset_less=True)
            known = Signal(name=f"known_{r}", reset_less=True)
            known_before = Signal(name=f"known_before_{r}", reset_less=True)
            rose = Signal(MAXIMUM_BITS, name=f"rose_{r}", reset_less=True)
            counts = Signal(name=f"counts_{r}", reset_less=True)
            with m.If(self._begin[1]):
                m.d.sync += [
                    maximum.eq((largest + 1) >> 1),
                    before.eq(maximum),
                    known.eq(seen),
                    known_before.eq(known & ~self._ends.first),
                ]
            with m.If(self._begin[2]):
                m.d.sync += [rose.eq(maximum - before), counts.eq(known_before)]
            with m.If(self._begin[3]):
                many = rose[RESCALE_BITS:].any()
                m.d.sync += rise.rows[r].eq(
                    Mux(counts, rose[:RESCALE_BITS] | many.replicate(RESCALE_BITS), 0)
                )
            self._maximum.append(maximum)
        self._risen = rise
        write_slot, write = self._slot[4], self._begin[4]
        self._small_memory(m, "rescale", rise.rows, write_slot, write, self.rescale_slot, self.rescale)

    @property
    def _rise_layout(self) -> data.StructLayout:
        """By how much the maxima of an item's rows rose, and whether it begins or ends a group."""
        rows = data.ArrayLayout(unsigned(RESCALE_BITS), self.config.rows)
        return data.StructLayout({"rows": rows, "ends": self._ends.shape()})

    def _exponentials(self, m: Module) -> None:
        """Cycles 1 to 7: probabilities of one key, written to their buffer."""
        c, p = self.config, self.params
        segment_bits = _log2(c.segments)
        m.d.comb += self._buffer_address.eq(Cat(self._key[0][segment_bits:], self._slot[0]))
        layout = data.ArrayLayout(data.ArrayLayout(_ScoreLayout(), c.segments), c.rows)
        words = data.View(layout, self._buffered)

        w, table = c.probability_bits, _table(c.probability_bits)
        self._p: list[Signal] = []
        self._saturated: list[Value] = []
        rom: Memory | None = None
        for r in range(c.rows):
            s2_score = Signal(_ScoreLayout(), name=f"s2_score_{r}", reset_less=True)
            segment = self._key[1][:segment_bits]
            m.d.sync += s2_score.eq(Array(words[r][s].as_value() for s in range(c.segments))[segment])
            self._saturated.append(s2_score.saturated)

            # δ without its last two places, rounded half up: the bit below borrows if they are 3.
            s3_delta = Signal(MAXIMUM_BITS + TABLE_BITS, name=f"s3_delta_{r}", reset_less=True)
            s3_kept = Signal(name=f"s3_kept_{r}", reset_less=True)
            top = Cat(Const(0, 1 + TABLE_BITS), self._maximum[r])
            word = Cat(s2_score.carry, s2_score.word, s2_score.word[-1])
            m.d.sync += [s3_delta.eq((top - word)[1:]), s3_kept.eq(s2_score.kept)]

            exponent = s3_delta[TABLE_BITS:]
            s4_shift = Signal(p.shift_bits, name=f"s4_shift_{r}", reset_less=True)
            s4_zero = Signal(name=f"s4_zero_{r}", reset_less=True)
            s5_shift = Signal.like(s4_shift, name=f"s5_shift_{r}")
            s5_entry = Signal(w + 2, name=f"s5_entry_{r}", reset_less=True)
            s5_zero = Signal(name=f"s5_zero_{r}", reset_less=True)
            s5_half = Signal(name=f"s5_half_{r}", reset_less=True)
            if rom is None:
                rom = Memory(
                    shape=unsigned(w + 2), depth=len(table), init=table, attrs={"rom_style": "block"}
                )
                m.submodules[f"table_{r // 2}"] = rom
                port = rom.read_port()
            else:
                port, rom = rom.read_port(), None
            m.d.comb += port.addr.eq(s3_delta[:TABLE_BITS])
            m.d.sync += [
                s4_shift.eq(exponent),
                s4_zero.eq(~s3_kept | exponent[p.shift_bits :].any()),
                s5_shift.eq(s4_shift),
                s5_entry.eq(port.data),
                s5_zero.eq(s4_zero),
                s5_half.eq(s4_shift == w + 1),
            ]

            # The last place decides the rounding. Only a fraction of 0 has half of the last place of p left.
            s6_shifted = Signal(w + 1, name=f"s6_shifted_{r}", reset_less=True)
            s7_p = Signal(w, name=f"s7_p_{r}", reset_less=True)
            half = s5_half & s5_entry[w + 1]
            m.d.sync += [
                s6_shifted.eq(Mux(s5_zero, 0, _shift_right(s5_entry[: w + 1], s5_shift) | half)),
                s7_p.eq((s6_shifted + 1) >> 1),
            ]
            self._p.append(s7_p)

        stage = p.probability_stage
        for s in range(c.segments):
            address = Cat(self._key[stage][segment_bits:], self._slot[stage])
            enable = self._valid[stage] & (self._key[stage][:segment_bits] == s)
            read_address = Cat(self.p_feed, self.p_slot)
            read = self._large_memory(m, f"p_{s}", Cat(*self._p), address, enable, read_address)
            fetched = Signal.like(read, name=f"p_fetched_{s}")
            m.d.sync += fetched.eq(read)
            for r in range(c.rows):
                m.d.comb += self.p_data[r][s].eq(fetched.word_select(r, w))
        m.d.comb += self.done.eq(self._end[stage])

    def _sums(self, m: Module) -> None:
        """Cycle 8: Σp of each row; with its last key it is copied, in cycle 9, and what belongs to it."""
        c, p = self.config, self.params
        stage = p.probability_stage
        begin, valid, end = self._begin[stage], self._valid[stage], self._end[stage + 1]
        self._copied_sums: list[Value] = []
        for r in range(c.rows):
            total = Signal(p.sum_bits, name=f"s8_sum_{r}", reset_less=True)
            copied = Signal(p.sum_bits, name=f"copied_sum_{r}", reset_less=True)
            adder = MultiplexedAdder(p.sum_bits, target=self._target)
            m.submodules[f"sum_{r}"] = adder
            m.d.comb += [adder.select.eq(begin), adder.x0.eq(total), adder.x1.eq(0), adder.y.eq(self._p[r])]
            with m.If(valid):
                m.d.sync += total.eq(adder.o)
            with m.If(end):
                m.d.sync += copied.eq(total)
            self._copied_sums.append(copied)

        # An item's rise waits twice for its sum.
        held = Signal(self._rise_layout, reset_less=True)
        self._copied_rise = Signal(self._rise_layout, reset_less=True)
        with m.If(self._end[4]):
            m.d.sync += held.eq(self._risen)
        with m.If(end):
            m.d.sync += self._copied_rise.eq(held)

        number = Signal(range(c.rows + 1), reset_less=True)
        m.d.sync += number.eq(sum(self._saturated[1:], self._saturated[0]))
        s7_number = _Line(m, "saturated", number, stage, start=3)[stage]
        count = Signal(p.saturation_bits, reset_less=True)
        self._copied_count = Signal(p.saturation_bits, reset_less=True)
        with m.If(valid):
            m.d.sync += count.eq(Mux(begin & self._risen.ends.first, 0, count) + s7_number)
        with m.If(end):
            m.d.sync += self._copied_count.eq(count)

    def _denominators(self, m: Module) -> None:
        """From cycle 9: a few rows are chosen, then rescaled and added to; the denominators rotate meanwhile."""
        c, p = self.config, self.params
        lanes, cycles = p.denominator_lanes, p.denominator_cycles
        copied = Signal()
        turn = Signal(range(cycles))
        choose, last_turn = Signal(), Signal()
        rotate, finish = Signal(), Signal()
        m.d.comb += [choose.eq(copied | turn.any()), last_turn.eq(choose & (turn == cycles - 1))]
        m.d.sync += [
            copied.eq(self._end[p.probability_stage + 1]),
            turn.eq(turn + choose),
            rotate.eq(choose),
            finish.eq(last_turn & self._copied_rise.ends.last),
            self.group_valid.eq(finish),
        ]
        with m.If(last_turn):
            m.d.sync += self.saturations.eq(self._copied_count)

        for row in range(c.rows - lanes):
            with m.If(rotate):
                m.d.sync += self.denominators[row].eq(self.denominators[row + lanes])
        for lane in range(lanes):
            addend = Signal(p.sum_bits, name=f"addend_{lane}", reset_less=True)
            amount = Signal(RESCALE_BITS, name=f"amount_{lane}", reset_less=True)
            rows = range(lane, c.rows, lanes)
            shifts = Array(self._copied_rise.rows[row] for row in rows)
            m.d.sync += [
                addend.eq(Array(self._copied_sums[row] for row in rows)[turn]),
                # The largest shift leaves nothing of the group before.
                amount.eq(shifts[turn] | self._copied_rise.ends.first.replicate(RESCALE_BITS)),
            ]
            # A bit below the denominator collects the rounding bit: the last bit that the shift drops.
            shifted = Signal(c.denominator_bits + 1, name=f"shifted_{lane}")
            m.d.comb += shifted.eq(_shift_right(Cat(Const(0, 1), self.denominators[lane]), amount))
            with m.If(rotate):
                m.d.sync += self.denominators[c.rows - lanes + lane].eq(
                    (shifted + Cat(shifted[0], addend)) >> 1
                )


class _Line:
    """A value delayed by registers: ``line[k]`` is ``source`` of k cycles ago (counted from ``start``)."""

    def __init__(
        self, m: Module, name: str, source: Value, cycles: int, *, start: int = 0, reset_less: bool = True
    ) -> None:
        self._start = start
        self._taps: list[Value] = [source]
        for cycle in range(start + 1, cycles + 1):
            tap = Signal(source.shape(), name=f"{name}_{cycle}", reset_less=reset_less)
            m.d.sync += tap.eq(self._taps[-1])
            self._taps.append(tap)

    def __getitem__(self, cycle: int) -> Value:
        return self._taps[cycle - self._start]


def _log2(power: int) -> int:
    """Exponent of a power of two."""
    return power.bit_length() - 1


def _distance(m: Module, name: str, a: Value, b: Value, limit: int) -> tuple[Signal, Signal]:
    """a − b, clamped to 0 … limit (a power of two), and whether it is negative."""
    difference = Signal(signed(max(len(a), len(b), limit.bit_length()) + 1), name=f"{name}_difference")
    clamped, negative = Signal(range(limit + 1), name=name), Signal(name=f"{name}_negative")
    bits = _log2(limit)
    m.d.comb += [
        difference.eq(a - b),
        negative.eq(difference[-1]),
        clamped.eq(Mux(negative, 0, Mux(difference[bits:-1].any(), limit, difference[:bits]))),
    ]
    return clamped, negative


def _less(a: Value, b: Value) -> Value:
    """a < b of signed values: the sign of the difference, which takes no carry out of its chain."""
    return (a - b)[-1]


def _shift_right(value: Value, amount: Value) -> Value:
    """``value >> amount`` of an unsigned value, without rounding, one multiplexer a bit of the amount."""
    for level in reversed(range(len(amount))):
        value = Mux(amount[level], value[1 << level :], value)
    return value


def _table(probability_bits: int) -> list[int]:
    """2^−x in w places and one more to round, less than what would be rounded to 2^w; above, whether x is 0.

    The clipping shows where nothing is shifted out, as it must. After a shift the rounding gives what it gives
    without clipping, but for x = 0 with a shift of w + 1, which leaves exactly half a place.
    """
    limit = (1 << (probability_bits + 1)) - 2
    entries = [int(entry) >> (MANTISSA_BITS - 1 - probability_bits) for entry in exponential_table()]
    return [min(entry, limit) | ((n == 0) << (probability_bits + 1)) for n, entry in enumerate(entries)]
