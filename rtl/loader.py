"""Loader of the attention tile: the input stream becomes jobs, operands in memory, and the news that they are there."""

from __future__ import annotations

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import data, enum, stream, wiring
from amaranth.lib.wiring import In, Out

from dtp.config import BIAS_BITS, Config
from dtp.job import (
    DESCRIPTOR_VERSION,
    FIELDS,
    FLAGS,
    GATE_FLAGS,
    MAGIC,
    SHIFT_BITS,
    ErrorCode,
    bias_depth,
    descriptor_entries,
    lifted_depth,
    moving_depth,
    query_depth,
)
from dtp.job import (
    long_group as is_long_group,
)
from rtl.layouts import JobLayout
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import Target
from rtl.lift import COUNT_BITS, Lift, ScaleLayout, ShiftLayout
from rtl.operands import WriteLayout

__all__ = ["Loader"]


ERROR_BITS = 8
"""Bits of an error code."""


class State(enum.Enum, shape=4):  # type: ignore[call-arg]
    """What the loader takes from the input."""

    DESCRIPTOR = 0
    CHECK = 1
    MASK = 2
    QUERY = 3
    BATCH = 4
    KEY = 5
    VALUE = 6
    DISCARD = 7
    DRAIN = 8
    JUDGE = 9


class Section(enum.Enum, shape=2):  # type: ignore[call-arg]
    """Kind of the next section of operands."""

    QUERY = 0
    KEY = 1
    VALUE = 2
    END = 3


class Loader(wiring.Component):
    """Takes jobs in stream order (``docs/tile.md`` §3), two at a time, and writes the operand memories.

    Keys (without factor batch) and values: an entry a cycle, readable 2 cycles after its last beat. Queries: a word a
    cycle, readable 7 cycles after its beat. The input stalls while both job slots are taken (at a descriptor), while
    the ring of queries is full (at a group), and while the lift unit works on a factor batch.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells
    gated: there is a gate whose mask rows a job can ask for

    Members
    -------
    i: In(stream of {data: input_bytes bytes, last})
    jobs: Out(2 × :class:`~rtl.layouts.JobLayout`); ``error`` is final with ``job_done``
    job_valid: Out(2), a job may start (or, when it is refused, be answered); job_done: Out(2), all of it was taken
    lift_saturations: Out(2 × 16), final with ``job_done``
    release: In(1), the oldest slot is free again
    k_block, k_entry, v_block, v_entry: Out(2 each), blocks and entries of the next block in memory; of a slot that is
        not being loaded, ``max_blocks`` or more and 0
    q_group: Out, groups in memory, modulo 2 × query_groups, over all jobs; q_pass: Out, plain passes of the next
    q_release: In(1), the oldest group of the ring is free again
    mask_slot, mask_row_index: In; mask_row: Out(max_blocks), a cycle later; all ones for a job without mask
    moving_write, lifted_write, bias_write, query_write: Out(:class:`~rtl.operands.WriteLayout`)
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC, gated: bool = False) -> None:
        self.config = c = config
        self._target = target
        self._gated = gated
        entries = c.max_chunks * c.pass_steps
        blocks = data.ArrayLayout(unsigned(c.max_blocks.bit_length()), 2)
        steps = data.ArrayLayout(unsigned(entries.bit_length()), 2)
        beat = data.StructLayout({"data": unsigned(8 * c.input_bytes), "last": unsigned(1)})
        super().__init__(
            {
                "i": In(stream.Signature(beat)),
                "jobs": Out(data.ArrayLayout(JobLayout(c, gated=gated), 2)),
                "job_valid": Out(2),
                "job_done": Out(2),
                "lift_saturations": Out(data.ArrayLayout(unsigned(COUNT_BITS), 2)),
                "release": In(1),
                "k_block": Out(blocks),
                "k_entry": Out(steps),
                "v_block": Out(blocks),
                "v_entry": Out(steps),
                "q_group": Out(range(2 * c.query_groups)),
                "q_pass": Out(range(c.max_chunks + 1)),
                "q_release": In(1),
                "mask_slot": In(1),
                "mask_row_index": In(range(c.max_blocks)),
                "mask_row": Out(c.max_blocks),
                "moving_write": Out(WriteLayout(moving_depth(c), c.lanes * c.operand_bits)),
                "lifted_write": Out(WriteLayout(lifted_depth(c), c.lanes * c.lifted_bits, c.block)),
                "bias_write": Out(WriteLayout(bias_depth(c), c.segments * BIAS_BITS)),
                "query_write": Out(WriteLayout(query_depth(c), c.rows * c.segments * c.row_bits)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        c = self.config
        lift = Lift(c, target=self._target)
        m.submodules.lift = lift

        state = Signal(State)
        slot = Signal()
        consume = Signal()
        filling = Signal()  # after an early last, entries are zeros
        entry, entry_valid, entry_last, entry_short = self._entries(m, consume, filling)

        # Descriptor and what follows from it.
        place = Signal(range(descriptor_entries(c)))
        place_last = place == descriptor_entries(c) - 1
        cut = Signal()
        fields = self._fields(m, state, place, entry)
        flag = {one.name: fields["flags"][one.bit] for one in FLAGS}
        sizes = data.StructLayout(
            {
                "chunks_less_1": unsigned(_bits(c.max_chunks)),
                "blocks": unsigned(c.max_blocks.bit_length()),
                "groups": unsigned(c.max_groups.bit_length()),
            }
        )
        tokens = fields["tokens"][: c.max_tokens.bit_length()]  # bits that an accepted job uses
        width = fields["width"][: c.max_width.bit_length()]
        new, size = Signal(sizes), Signal(sizes)
        m.d.comb += [
            new.chunks_less_1.eq((width - 1) >> _bits(c.block)),
            new.blocks.eq((tokens + (c.block - 1)) >> _bits(c.block)),
            new.groups.eq((tokens + (c.rows - 1)) >> _bits(c.rows)),
        ]
        m.d.sync += size.eq(new)
        chunks_less_1, blocks, groups = size.chunks_less_1, size.blocks, size.groups
        error = Signal(ERROR_BITS)
        m.d.sync += error.eq(self._error(fields, cut, filling))

        # Slots.
        used, oldest = Signal(range(3)), Signal()
        begins = state == State.CHECK
        m.d.sync += used.eq(used + begins - self.release)
        with m.If(self.release):
            m.d.sync += [
                oldest.eq(~oldest),
                self.job_valid.bit_select(oldest, 1).eq(0),
                self.job_done.bit_select(oldest, 1).eq(0),
            ]

        # Place in the job.
        following, following_valid, follow = self._sections(m, begins, blocks, groups)
        number = Signal(range(c.max_chunks * c.pass_steps))  # entry of the section, factor batches apart
        block, value_block = Signal(range(c.max_blocks + 1)), Signal(range(c.max_blocks + 1))
        mask_number, mask_left = Signal(range(c.max_blocks)), Signal(range(c.max_blocks + 1))
        batch = Signal.like(lift.batch)
        factors = Signal()  # a factor batch of queries comes
        claimed = Signal()  # the section has its place in the ring and its program: words may be taken
        steps = _bits(c.pass_steps)
        last_key = _ones_below(steps, chunks_less_1)
        last_query = _ones_below(_bits(c.rows), chunks_less_1) >> _bits(c.segments)
        keys_or_values = (state == State.KEY) | (state == State.VALUE)
        counted = consume & (keys_or_values | ((state == State.QUERY) & ~factors))
        number_last = Signal()
        reached: list[Signal] = []
        for name, last in (("key", last_key), ("query", last_query)):
            # Whether the next number is the last is known before it comes.
            flag_last = Signal(name=f"last_{name}")
            following_last = Mux(number_last, last == 0, number + 1 == last)
            m.d.sync += flag_last.eq(Mux(counted, following_last, number == last))
            reached.append(flag_last)
        m.d.comb += number_last.eq(Mux(state == State.QUERY, reached[1], reached[0]))
        with m.If(counted):
            m.d.sync += number.eq(Mux(number_last, 0, number + 1))
        # Whether an entry is the job's last has to be known when it is taken.
        ready = entry_valid & (~number_last | following_valid)

        # Words of an entry.
        word = Signal(range(c.entry_words))
        words = c.block // c.segments
        word_last = Signal()
        m.d.comb += word_last.eq(word == c.entry_words - 1)
        if c.rows < c.segments:
            ragged = _ones_below(_bits(words), chunks_less_1)[: _bits(c.entry_words)]
            with m.If(number_last & ~factors & (state == State.QUERY)):
                m.d.comb += word_last.eq(word == ragged)
        word_end = lift.word_taken & (word_last | lift.flush)
        with m.If(lift.word_taken):
            m.d.sync += word.eq(Mux(word_end, 0, word + 1))
        direct = Signal()  # an entry that is not taken word by word
        m.d.comb += [
            lift.word.eq(entry.word_select(word, c.lift_tokens * c.operand_bits)),
            lift.word_valid.eq(claimed & entry_valid),
            consume.eq(direct | word_end),
        ]

        # Programs.
        program = {name: p.start for name, p in lift.params.programs.items()}
        lift_busy = Signal()
        plain = Signal()  # the running program is that of plain queries
        starts_batch = Signal()
        lifts_keys = Signal()  # the running program is that of a factor batch of keys
        lifted_batch, lifted_block = Signal.like(batch), Signal.like(block)  # it, and the block it comes before
        with m.If(lift.done):
            m.d.sync += [lift_busy.eq(0), lifts_keys.eq(0)]
        m.d.comb += [lift.slot.eq(slot), lift.batch.eq(lifted_batch)]
        key_words = _ones_below(_bits(c.block), chunks_less_1) + 1
        query_words = _ones_below(_bits(words), chunks_less_1) + 1
        batches = max(1, c.block // c.lift_tokens)  # before a block
        batch_blocks = max(1, c.lift_tokens // c.block)  # of a batch
        has_batch: Value = flag["bias"]
        if batch_blocks > 1:
            coming = block + (state == State.KEY)
            has_batch = has_batch & (coming[: _bits(batch_blocks)] == 0)

        # Rows of the block mask: out of a word, where a word holds one.
        row_bits = 8 * c.mask_row_bytes
        entry_rows, word_rows = 8 * c.entry_bytes // row_bits, c.lift_tokens * c.operand_bits // row_bits
        mask_row = entry.word_select(mask_number[: _bits(entry_rows)], row_bits)
        if word_rows:
            mask_row = lift.word.word_select(mask_number[: _bits(word_rows)], row_bits)

        # Ring of queries.
        section_end = Signal()
        free = Signal(range(c.query_groups + 1), init=c.query_groups)
        claim = Signal()
        # A group of so many words lasts until the section behind it is known.
        long_group = Signal()
        enough = next((n for n in range(c.max_chunks) if is_long_group(c, n + 1)), c.max_chunks)
        m.d.comb += long_group.eq(chunks_less_1 >= enough)
        can_begin = entry_valid & (following_valid | long_group) & ~lift_busy
        quick = Signal()  # the next section, if it is a group of plain queries, has its place and its program already
        m.d.sync += quick.eq(~flag["bias"] & (free != 0) & long_group)
        quickly = counted & number_last & (following == Section.QUERY) & quick
        begin_group = Signal()
        m.d.comb += [
            begin_group.eq((state == State.QUERY) & ~claimed & (free != 0) & can_begin),
            claim.eq(begin_group | quickly),
        ]
        m.d.sync += free.eq(free - claim + self.q_release)

        fault = Signal(ERROR_BITS)
        late = Signal()
        drain_cycles = lift.params.drain_cycles
        drain = Signal(range(drain_cycles))
        first_section = [state.eq(State.QUERY), factors.eq(flag["lift"])]
        with m.Switch(state):
            with m.Case(State.DESCRIPTOR):
                arrives = entry_valid & ~used[1]
                m.d.comb += [direct.eq(arrives), lift.descriptor.eq(arrives & place_last)]
                with m.If(consume):
                    m.d.sync += place.eq(Mux(place_last, 0, place + 1))
                    with m.If(entry_last & (~place_last | entry_short)):
                        m.d.sync += cut.eq(1)
                    with m.If(place_last):
                        m.d.sync += state.eq(State.JUDGE)
            with m.Case(State.JUDGE):
                m.d.sync += state.eq(State.CHECK)
            with m.Case(State.CHECK):
                m.d.comb += [
                    lift.clear.eq(1),
                    lift.start.eq(flag["bias"] & (error == 0)),
                    lift.entry.eq(Mux(flag["lift"], program["lift_constants"], program["bias_constants"])),
                ]
                m.d.sync += [
                    fault.eq(error),
                    cut.eq(0),
                    block.eq(0),
                    value_block.eq(0),
                    mask_number.eq(0),
                    mask_left.eq(new.blocks),
                    batch.eq(0),
                    lift_busy.eq(flag["bias"] & (error == 0)),
                    plain.eq(~flag["bias"]),
                ]
                with m.If(error != 0):
                    m.d.sync += state.eq(Mux(filling, State.DRAIN, State.DISCARD))
                with m.Elif(flag["masked"]):
                    m.d.sync += state.eq(State.MASK)
                with m.Else():
                    m.d.sync += first_section
                with m.If((error != 0) | ~flag["masked"]):
                    m.d.sync += self.job_valid.bit_select(slot, 1).eq(1)
            with m.Case(State.MASK):
                mask_last = mask_left == 1
                entry_end = (mask_number & (entry_rows - 1)) == entry_rows - 1
                m.d.comb += direct.eq(entry_valid & (mask_last | entry_end))
                with m.If(entry_valid):
                    m.d.sync += [mask_number.eq(mask_number + 1), mask_left.eq(mask_left - 1)]
                    if word_rows:
                        m.d.sync += word.eq(Mux(consume, 0, (mask_number + 1) >> _bits(word_rows)))
                    with m.If(mask_last):
                        m.d.sync += [*first_section, self.job_valid.bit_select(slot, 1).eq(1)]
            with m.Case(State.QUERY):
                m.d.comb += [
                    lift.start.eq(begin_group & ~plain),
                    lift.entry.eq(Mux(flag["lift"], program["lift_queries"], program["queries"])),
                    lift.count.eq(query_words - lift.params.query_words),
                    section_end.eq(Mux(flag["lift"], claimed & lift.done, word_end & number_last)),
                ]
                with m.If(begin_group):
                    m.d.sync += [claimed.eq(1), lift_busy.eq(flag["lift"]), plain.eq(~flag["lift"])]
                with m.If(factors & word_end):
                    m.d.sync += factors.eq(~lift.flush)
                with m.If(section_end):
                    m.d.sync += claimed.eq(0)
            with m.Case(State.BATCH):
                m.d.comb += [
                    lift.start.eq(starts_batch),
                    lift.entry.eq(Mux(flag["lift"], program["lift_keys"], program["keys"])),
                    lift.count.eq(key_words - Mux(flag["lift"], lift.params.rank, 0)),
                ]
                m.d.comb += starts_batch.eq(~claimed & ~lift_busy)
                with m.If(starts_batch):
                    m.d.sync += [
                        claimed.eq(1),
                        plain.eq(0),
                        lift_busy.eq(1),
                        lifts_keys.eq(1),
                        lifted_batch.eq(batch),
                        lifted_block.eq(block),
                    ]
                # What follows is taken while the program goes on, and shown when it has ended.
                with m.If(lift.word_taken & lift.flush):
                    m.d.sync += [claimed.eq(0), batch.eq(batch + 1)]
                    with m.If((batch & (batches - 1)) == batches - 1):
                        m.d.sync += state.eq(State.KEY)
            with m.Case(State.KEY):
                m.d.comb += [direct.eq(ready), section_end.eq(ready & number_last)]
                with m.If(section_end):
                    m.d.sync += block.eq(block + 1)
            with m.Case(State.VALUE):
                m.d.comb += [direct.eq(ready), section_end.eq(ready & number_last)]
                with m.If(section_end):
                    m.d.sync += value_block.eq(value_block + 1)
            with m.Case(State.DISCARD):
                m.d.comb += direct.eq(1)
                with m.If(entry_valid & entry_last):
                    m.d.sync += state.eq(State.DRAIN)
            with m.Case(State.DRAIN):
                m.d.comb += [lift.start.eq((drain == 0) & ~lift_busy), lift.entry.eq(program["plain"])]
                with m.If(late):
                    m.d.sync += [late.eq(0), state.eq(State.DISCARD)]
                with m.Elif(~lift_busy):
                    m.d.sync += drain.eq(drain + 1)
                with m.If(drain == drain_cycles - 1):
                    m.d.sync += [
                        drain.eq(0),
                        filling.eq(0),
                        slot.eq(~slot),
                        state.eq(State.DESCRIPTOR),
                        self.job_done.bit_select(slot, 1).eq(1),
                    ]

        # Next section.
        m.d.comb += follow.eq(section_end)
        with m.If(section_end):
            with m.Switch(following):
                with m.Case(Section.QUERY):
                    m.d.sync += [*first_section, claimed.eq(quick)]
                with m.Case(Section.KEY):
                    m.d.sync += state.eq(Mux(has_batch, State.BATCH, State.KEY))
                with m.Case(Section.VALUE):
                    m.d.sync += state.eq(State.VALUE)
                with m.Case(Section.END):
                    m.d.sync += state.eq(State.DRAIN)

        # The job's last entry comes with last, no other does.
        ends = (keys_or_values | ((state == State.QUERY) & ~factors)) & number_last & (following == Section.END)
        with m.If(consume & ~filling & (state != State.DISCARD)):
            with m.If(entry_last & (~ends | entry_short)):
                m.d.sync += [filling.eq(1), fault.eq(ErrorCode.EARLY_LAST)]
            with m.If(~entry_last & ends):
                m.d.sync += [late.eq(1), fault.eq(ErrorCode.LATE_LAST)]

        # What the walker sees.
        for n in range(2):
            job = self.jobs[n]
            with m.If(slot == n):
                with m.If(begins):
                    names = ("lift", "bias", "causal", "gated") if self._gated else ("lift", "bias", "causal")
                    m.d.sync += [job[name].eq(flag[name]) for name in names]
                    m.d.sync += [
                        job[name].eq(fields[name])
                        for name in ("tokens", "valid_length", "score_shift", "lift_shift", "tag")
                    ]
                    m.d.sync += [
                        job.chunks.eq(new.chunks_less_1 + 1),
                        job.blocks.eq(new.blocks),
                        job.groups.eq(new.groups),
                        job.error.eq(error),
                    ]
                with m.If(drain == drain_cycles - 1):
                    m.d.sync += [job.error.eq(fault), self.lift_saturations[n].eq(lift.saturations)]
            # Of a slot that is not being loaded all is there: above every block.
            complete = Mux((slot == n) & (state != State.DESCRIPTOR), 0, c.max_blocks)
            m.d.comb += [
                self.k_block[n].eq(Mux(lifts_keys, lifted_block, block) | complete),
                self.v_block[n].eq(value_block | complete),
                self.k_entry[n].eq(Mux((state == State.KEY) & ~lifts_keys, number, 0)),
                self.v_entry[n].eq(Mux(state == State.VALUE, number, 0)),
            ]
        self._query_writes(m, lift, chunks_less_1, flag["lift"])
        writes_mask = (state == State.MASK) & entry_valid
        self._masks(m, writes_mask, Cat(mask_number, slot), mask_row, begins & flag["masked"], begins, slot)

        # Keys and values.
        in_values = state == State.VALUE
        key_address = Cat(number[:steps], block[: _bits(c.max_blocks)], number[steps:])
        m.d.comb += [
            self.moving_write.en.eq(ready & keys_or_values),
            self.moving_write.addr.eq(
                Cat(Mux(in_values, Cat(number, value_block[: _bits(c.max_blocks)]), key_address), in_values, slot)
            ),
            self.moving_write.data.eq(entry),
            self.lifted_write.eq(lift.lifted_write),
            self.bias_write.eq(lift.bias_write),
        ]
        for name in ScaleLayout().members:
            m.d.comb += lift.scales[name].eq(fields[name])
        for name in ShiftLayout().members:
            m.d.comb += lift.shifts[name].eq(fields["bias_shift" if name == "bias" else f"key_{name}_shift"])
        return m

    # ---- input -----------------------------------------------------------------------------------------------

    def _entries(self, m: Module, consume: Signal, filling: Signal) -> tuple[Signal, Signal, Signal, Signal]:
        """Beats to entries: the entry, whether it is there, whether last came with it, and before its last beat."""
        c = self.config
        beats, bits = c.entry_beats, 8 * c.input_bytes
        entry = Signal(8 * c.entry_bytes)
        full, valid, last, short = Signal(), Signal(), Signal(), Signal()
        cleared = Signal()
        place = Signal(range(beats))
        beat = self.i.payload
        m.d.comb += [
            # Behind a last comes another job: not while it is open whether this one must be filled up.
            self.i.ready.eq((~full | (consume & ~last)) & ~filling),
            valid.eq(full | (filling & cleared)),
        ]
        m.d.sync += cleared.eq(filling)
        with m.If(consume):
            m.d.sync += [full.eq(0), last.eq(0), short.eq(0)]
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [
                full.eq(beat.last | (place == beats - 1)),
                place.eq(Mux(beat.last, 0, place + 1)),
                last.eq(beat.last),
                short.eq(beat.last & (place != beats - 1)),
            ]
            for n in range(beats):
                part = entry[n * bits : (n + 1) * bits]
                with m.If(place == n):
                    m.d.sync += part.eq(beat.data)
                # A last may come before the other beats.
                with m.Elif(place == 0):
                    m.d.sync += part.eq(0)
        with m.If(filling):
            m.d.sync += entry.eq(0)
        return entry, valid, last, short

    def _fields(self, m: Module, state: Signal, place: Signal, entry: Signal) -> dict[str, Value]:
        """Fields of the newest descriptor, in registers."""
        c = self.config
        fields: dict[str, Value] = {}
        for field in FIELDS:
            bits = 8 * field.bytes
            register = Signal(signed(bits) if field.signed else unsigned(bits), name=field.name)
            low = 8 * (field.offset % c.entry_bytes)
            with m.If((state == State.DESCRIPTOR) & (place == field.offset // c.entry_bytes)):
                m.d.sync += register.eq(entry[low : low + bits])
            fields[field.name] = register
        return fields

    def _error(self, fields: dict[str, Value], cut: Value, filling: Value) -> Value:
        """Code of the first fault of a descriptor."""
        c = self.config
        flags = fields["flags"]
        flag = {one.name: flags[one.bit] for one in FLAGS}
        known = len(FLAGS) if self._gated else len(FLAGS) - GATE_FLAGS
        tokens, valid, width = fields["tokens"], fields["valid_length"], fields["width"]
        faults: list[tuple[ErrorCode, Value]] = [
            (ErrorCode.CUT, cut),
            (ErrorCode.MAGIC, fields["magic"] != MAGIC),
            (ErrorCode.VERSION, fields["version"] != DESCRIPTOR_VERSION),
            (ErrorCode.FLAGS, flags[known:].any() | (flag["lift"] & ~flag["bias"])),
            (ErrorCode.TOKENS, (tokens == 0) | (tokens > c.max_tokens)),
            (ErrorCode.VALID_LENGTH, (valid == 0) | (valid > tokens)),
            (ErrorCode.WIDTH, (width == 0) | (width > c.max_width)),
            (ErrorCode.SHIFT, Cat(fields[name][bits:] for name, bits in SHIFT_BITS.items()).any()),
            (ErrorCode.CUT, filling),
        ]
        code: Value = Const(ErrorCode.NONE, ERROR_BITS)
        for value, wrong in reversed(faults):
            code = Mux(wrong, Const(value, ERROR_BITS), code)
        return code

    def _sections(
        self, m: Module, begins: Value, blocks: Value, groups: Value
    ) -> tuple[Signal, Signal, Signal]:
        """Looks ahead in the order of sections, one candidate a cycle, from the one after Q(0) on.

        Kind of the next section, whether it is known, and the step on to it. No section ends before the next is
        known: its last entry waits.
        """
        c = self.config
        kind, valid, take = Signal(Section), Signal(), Signal()
        candidate = Signal(Section)
        index = Signal(range(c.max_blocks + c.lookahead + 1))  # i of the order
        turn = Signal(range(c.max_blocks))  # i mod blocks
        group = Signal(range(c.max_groups + 1))
        tail = Signal()  # only queries are left
        exists = Signal()
        turn_last = turn + 1 == blocks
        index_last = index + 1 == blocks + c.lookahead
        group_last = group == groups
        with m.If(take):
            m.d.sync += valid.eq(0)
        with m.If(~valid):
            m.d.sync += [valid.eq(exists), kind.eq(candidate)]
            with m.Switch(candidate):
                with m.Case(Section.QUERY):
                    m.d.comb += exists.eq((tail | (turn == 0)) & ~group_last)
                    m.d.sync += [
                        group.eq(group + exists),
                        candidate.eq(Mux(tail, Mux(group_last, Section.END, Section.QUERY), Section.KEY)),
                    ]
                with m.Case(Section.KEY):
                    m.d.comb += exists.eq(index < blocks)
                    m.d.sync += candidate.eq(Section.VALUE)
                with m.Case(Section.VALUE):
                    m.d.comb += exists.eq(index >= c.lookahead)
                    m.d.sync += [
                        candidate.eq(Section.QUERY),
                        index.eq(index + 1),
                        turn.eq(Mux(turn_last, 0, turn + 1)),
                        tail.eq(index_last),
                    ]
                with m.Case(Section.END):
                    m.d.comb += exists.eq(1)
        with m.If(begins):
            m.d.sync += [
                valid.eq(0),
                candidate.eq(Section.KEY),
                index.eq(0),
                turn.eq(0),
                group.eq(1),
                tail.eq(0),
            ]
        return kind, valid, take

    # ---- memories --------------------------------------------------------------------------------------------

    def _query_writes(self, m: Module, lift: Lift, chunks_less_1: Value, is_lift: Value) -> None:
        """Addresses of the row operands that leave the lift unit, and the count of groups."""
        c = self.config
        feed = Signal(range(c.pass_steps))
        number = Signal(range(c.max_chunks + c.lifted_passes))
        plain_last = number == chunks_less_1
        final = Mux(is_lift, number == c.max_chunks + c.lifted_passes - 1, plain_last)
        ring = _bits(c.query_groups)
        m.d.comb += [
            self.query_write.en.eq(lift.emit_valid),
            self.query_write.addr.eq(Cat(feed, self.q_group[:ring], number)),
            self.query_write.data.eq(lift.emit_data),
        ]
        with m.If(lift.emit_valid):
            m.d.sync += feed.eq(feed + 1)
            with m.If(feed == c.pass_steps - 1):
                with m.If(number < c.max_chunks):
                    m.d.sync += self.q_pass.eq(self.q_pass + 1)
                with m.If(final):
                    m.d.sync += [number.eq(0), self.q_pass.eq(0), self.q_group.eq(self.q_group + 1)]
                with m.Elif(is_lift & plain_last):
                    m.d.sync += number.eq(c.max_chunks)
                with m.Else():
                    m.d.sync += number.eq(number + 1)

    def _masks(
        self, m: Module, write: Value, address: Value, row: Value, masked: Value, begins: Value, slot: Signal
    ) -> None:
        """Block masks of both slots."""
        c = self.config
        memory = BlockMemory(m, "masks", unsigned(c.max_blocks), 2 * c.max_blocks)
        is_masked = Signal(2)
        whole = Signal()
        with m.If(begins):
            m.d.sync += is_masked.bit_select(slot, 1).eq(masked)
        m.d.sync += whole.eq(~is_masked.bit_select(self.mask_slot, 1))
        m.d.comb += [
            memory.write.en.eq(write),
            memory.write.addr.eq(address),
            memory.write.data.eq(row),
            memory.address.eq(Cat(self.mask_row_index, self.mask_slot)),
            self.mask_row.eq(memory.data | whole.replicate(c.max_blocks)),
        ]


def _bits(depth: int) -> int:
    """Bits that count a power of two."""
    return (depth - 1).bit_length()


def _ones_below(bits: int, high: Value) -> Value:
    """The largest number with ``high`` above its ``bits`` low bits."""
    return Cat(Const((1 << bits) - 1, bits), high)
