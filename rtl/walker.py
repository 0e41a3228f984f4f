"""Block-mask walk: which pass the array works on, and where its operands lie."""

from __future__ import annotations

from typing import Any

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from dtp.array import ArrayParams
from dtp.config import Config
from dtp.gated import RowError
from rtl.layouts import (
    FeedLayout,
    ItemLayout,
    JobLayout,
    PassLayout,
    RecordKind,
    RecordLayout,
    RowLayout,
    ScoreLayout,
    StepControlLayout,
)
from rtl.softmax import ItemLayout as SoftmaxItemLayout

__all__ = ["Walker"]


class Walker(wiring.Component):
    """Issues feeds and steps of the array: score passes ``lookahead`` items ahead of P·V passes, blocks in order.

    Three stages, each one pass: *next* (the pass descriptor), *feed* (its stationary operand goes into the shadow
    registers, one feed a cycle) and *step* (its steps). The feeds of a pass start with the first step of the pass
    before, so passes of at least ``block / segments`` steps follow each other without an idle cycle. A masked block
    never becomes a pass.

    News of what is there counts a cycle later, of keys and values two. Stalls: a feed waits for its queries
    (``q_group``, ``q_pass``) or probabilities (``done``); every ``block / segments`` steps wait for their keys or
    values (``k_*``, ``v_*``); the last P·V pass of a group waits for ``record.ready``.

    Parameters
    ----------
    config: the processor
    array: parameters of the array that is driven
    gated: there is a gate. A gated job takes a row of its mask for each block row with queries that are not padding

    Members
    -------
    jobs: In(2 × :class:`JobLayout`), fields of the loaded jobs, a slot each
    job_valid, job_done: In(2), descriptor and mask there; everything there and ``error`` final
    lift_saturations: In(2 × 16)
    release: Out(1), the oldest slot is free
    mask_slot, mask_row_index: Out, read address of the block mask; mask_row: In, a cycle later
    k_block, k_entry, v_block, v_entry: In(2 each), operands that a step issued now may read
    q_group, q_pass: In, groups of queries loaded (modulo twice the ring), passes of the next one
    q_release: Out(1), the oldest group of the ring is free
    done: In(1), probabilities of the next item are there
    item_valid, item: Out, the item whose scores come next
    record: Out(stream of :class:`RecordLayout`), what the normaliser has to emit, in order
    feed: Out(:class:`FeedLayout`), read address of a stationary operand
    step: Out(:class:`StepControlLayout`), read addresses and control of a step
    gate: In(stream of :class:`RowLayout`), only if ``gated``
    gate_bypass: In(1), only if ``gated``: no rows will come, a row that is waited for keeps every legal block
    gate_error: Out(:class:`dtp.gated.RowError`), only if ``gated``, for one cycle
    """

    def __init__(self, config: Config, array: ArrayParams, *, gated: bool = False) -> None:
        self.config = config
        self.array = array
        self._gated = gated
        c = config
        entries = c.max_chunks * c.pass_steps
        super().__init__(
            {
                "jobs": In(data.ArrayLayout(JobLayout(c, gated=gated), 2)),
                "job_valid": In(2),
                "job_done": In(2),
                "lift_saturations": In(data.ArrayLayout(unsigned(16), 2)),
                "release": Out(1),
                "mask_slot": Out(1),
                "mask_row_index": Out(range(c.max_blocks)),
                "mask_row": In(c.max_blocks),
                "k_block": In(data.ArrayLayout(Value.cast(Signal(range(c.max_blocks + 1))).shape(), 2)),
                "k_entry": In(data.ArrayLayout(Value.cast(Signal(range(entries + 1))).shape(), 2)),
                "v_block": In(data.ArrayLayout(Value.cast(Signal(range(c.max_blocks + 1))).shape(), 2)),
                "v_entry": In(data.ArrayLayout(Value.cast(Signal(range(entries + 1))).shape(), 2)),
                "q_group": In(range(2 * c.query_groups)),
                "q_pass": In(range(c.max_chunks + 1)),
                "q_release": Out(1),
                "done": In(1),
                "item_valid": Out(1),
                "item": Out(SoftmaxItemLayout(c)),
                "record": Out(stream.Signature(RecordLayout(c))),
                "feed": Out(FeedLayout(c)),
                "step": Out(StepControlLayout(c, array)),
            }
            | (
                {
                    "gate": In(stream.Signature(RowLayout(c.max_blocks))),
                    "gate_bypass": In(1),
                    "gate_error": Out(RowError),
                }
                if gated
                else {}
            )
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        c = self.config
        ending = Signal()
        ending_slot = Signal()
        head, score, head_valid, head_taken, head_loaded = self._generate_items(m, ending, ending_slot)

        # Items whose scores are issued and whose P·V is not, the job's end marker included.
        depth = 1 << (c.lookahead + 1).bit_length()
        m.submodules.pending = pending = Memory(shape=ItemLayout(c), depth=depth, init=[])
        write, read = pending.write_port(), pending.read_port(domain="comb")
        pending_count = Signal(range(c.lookahead + 3))
        taken = Signal.like(write.addr)
        push = Signal()
        pop = Signal()
        oldest = Signal(ItemLayout(c))  # in a register; the memory is read at the one after it
        m.d.comb += [write.en.eq(push), write.data.eq(head), read.addr.eq(taken + 1)]
        m.d.sync += [
            write.addr.eq(write.addr + push),
            taken.eq(taken + pop),
            pending_count.eq(pending_count + push - pop),
        ]
        with m.If(pop | (pending_count == 0)):
            m.d.sync += oldest.eq(Mux(pending_count <= 1, head, read.data))

        # The operation that is being cut into passes.
        now = Signal(PassLayout(c))
        now_valid = Signal()
        fed = Signal(PassLayout(c))
        fed_valid = Signal()
        stepped = Signal(PassLayout(c))
        stepped_valid = Signal()
        feed_takes = Signal()
        closed = Signal()  # the end marker of a job is pending: only P·V until it is popped

        last_plain = Signal()
        last_pass = Signal()
        m.d.comb += last_plain.eq(now.number + 1 == now.chunks)
        m.d.comb += last_pass.eq(
            now.is_values | Mux(now.is_lifted, now.lifted_number == c.lifted_passes - 1, last_plain & ~now.score.lift)
        )
        now_free = Signal()
        # A pass lasts longer than the register takes to be filled again.
        m.d.comb += now_free.eq(~now_valid)

        score_turn = Signal()
        m.d.comb += score_turn.eq(~closed & (pending_count <= c.lookahead))
        scores_busy = Signal()
        m.d.comb += scores_busy.eq((now_valid & ~now.is_values) | (fed_valid & ~fed.is_values))
        score_slot = Signal(range(c.lookahead + 1))
        value_slot = Signal(range(c.lookahead + 1))
        output_slot = Signal(range(c.output_slots))

        record = self.record.payload
        oldest_job = self.jobs[oldest.slot]

        def start(item: data.View, is_values: int, buffer: Signal) -> list[Any]:
            """The first pass of an item's scores or values becomes the next one."""
            return [
                now_valid.eq(1),
                now.is_values.eq(is_values),
                now.is_first.eq(1),
                now.is_lifted.eq(0),
                now.number.eq(0),
                now.lifted_number.eq(0),
                now.buffer.eq(buffer),
                now.output_slot.eq(output_slot),
                now.first_of_group.eq(item.first),
                now.last_of_group.eq(item.last),
                now.slot.eq(item.slot),
                now.block.eq(item.block),
                now.chunks.eq(item.chunks),
                now.score.eq(score),
            ]

        m.d.comb += [
            record.slot.eq(output_slot),
            record.steps.eq(oldest.chunks << _log2(c.pass_steps)),
            record.tag.eq(oldest_job.tag),
            record.error.eq(oldest_job.error),
            record.lift_saturations.eq(self.lift_saturations[oldest.slot]),
        ]
        for row in range(c.rows):
            m.d.comb += record.live_rows[row].eq(oldest.live_count > row)

        with m.If(feed_takes):
            m.d.sync += now.is_first.eq(0)
            with m.If(now.is_lifted):
                m.d.sync += now.lifted_number.eq(now.lifted_number + 1)
            with m.Elif(last_plain):
                m.d.sync += now.is_lifted.eq(1)
            with m.Else():
                m.d.sync += now.number.eq(now.number + 1)
            with m.If(last_pass):
                m.d.sync += now_valid.eq(0)

        null_release = Signal()
        with m.If(score_turn):
            with m.If(head_valid):
                with m.If(head.is_end):
                    m.d.comb += [push.eq(1), head_taken.eq(1)]
                    m.d.sync += closed.eq(1)
                with m.Elif(head.is_null):
                    with m.If(head_loaded & ~scores_busy):
                        m.d.comb += [push.eq(1), head_taken.eq(1), null_release.eq(1)]
                with m.Elif(now_free):
                    m.d.comb += [push.eq(1), head_taken.eq(1)]
                    m.d.sync += start(head, 0, score_slot)
                    _count(m, score_slot, c.lookahead + 1)
        with m.Elif(pending_count != 0):
            with m.If(oldest.is_end):
                m.d.comb += [
                    record.kind.eq(RecordKind.STATUS),
                    self.record.valid.eq(self.job_done[0] & ~oldest.slot | self.job_done[1] & oldest.slot),
                ]
                # One slot is given back before the next job can end.
                with m.If(ending):
                    m.d.comb += self.record.valid.eq(0)
                with m.If(self.record.valid & self.record.ready):
                    m.d.comb += pop.eq(1)
                    m.d.sync += [closed.eq(0), ending.eq(1), ending_slot.eq(oldest.slot)]
            with m.Elif(oldest.is_null):
                m.d.comb += [record.kind.eq(RecordKind.NULL), self.record.valid.eq(1)]
                with m.If(self.record.ready):
                    m.d.comb += pop.eq(1)
            with m.Elif(now_free):
                m.d.comb += [record.kind.eq(RecordKind.DATA), self.record.valid.eq(oldest.last)]
                with m.If(self.record.ready | ~oldest.last):
                    m.d.comb += pop.eq(1)
                    m.d.sync += start(oldest, 1, value_slot)
                    _count(m, value_slot, c.lookahead + 1)
                    with m.If(oldest.last):
                        _count(m, output_slot, c.output_slots)

        self._feed(m, now, now_valid, last_pass, fed, fed_valid, stepped, stepped_valid, feed_takes, null_release)

        slot_busy = Signal()
        m.d.comb += slot_busy.eq(
            (now_valid & (now.slot == ending_slot))
            | (fed_valid & (fed.slot == ending_slot))
            | (stepped_valid & (stepped.slot == ending_slot))
        )
        with m.If(ending & ~slot_busy):
            m.d.comb += self.release.eq(1)
            m.d.sync += ending.eq(0)
        return m

    def _generate_items(
        self, m: Module, ending: Signal, ending_slot: Signal
    ) -> tuple[data.View, data.View, Signal, Signal, Signal]:
        """Kept blocks of every group of every job in order; the registers ``head`` and ``score`` hold the next item.

        Also whether there is one, the signal that takes it, and whether its queries were there a cycle ago.
        """
        c = self.config
        head = Signal(ItemLayout(c))
        score = Signal(ScoreLayout(c))
        head_valid = Signal()
        head_taken = Signal()
        slot = Signal()
        job = self.jobs[slot]
        row_number = Signal(range(c.max_groups))
        ring_number = Signal(range(2 * c.query_groups))
        left = Signal(range(c.max_tokens + 1))  # tokens from the group's first on that are not padding
        remaining = Signal(c.max_blocks)
        legal = Signal(c.max_blocks)
        first = Signal()
        turn = _log2(c.block // c.rows)

        m.d.comb += [self.mask_slot.eq(slot), self.mask_row_index.eq(row_number >> turn)]
        mask_row = Signal(c.max_blocks)
        m.d.sync += mask_row.eq(self.mask_row)
        last_block = Signal(range(c.max_blocks + 1))
        m.d.comb += last_block.eq((job.valid_length - 1) >> _log2(c.block))

        # The lowest kept block of the row, and what is left after it.
        lowest = Signal(c.max_blocks)
        m.d.comb += lowest.eq(remaining & ~(remaining - 1))
        index, found = Signal(range(c.max_blocks)), Signal(range(c.max_blocks))
        for bit in range(len(index)):
            m.d.comb += index[bit].eq(Cat(lowest[number] for number in range(c.max_blocks) if number >> bit & 1).any())
        after = Signal(c.max_blocks)
        none_found, none_after = Signal(), Signal()

        in_job, in_row = Signal(), Signal()
        kept, skipped, row_there, rows_left = self._gate_row(m, job, in_job, in_row, row_number[:turn], left)

        free = Signal()
        fills = Signal()
        head_loaded = Signal()
        m.d.comb += free.eq(~head_valid)
        m.d.sync += head_loaded.eq(self.q_group != Mux(fills, ring_number, score.group))
        with m.If(head_taken):
            m.d.sync += head_valid.eq(0)

        with m.FSM(name="items"):
            with m.State("job"):
                m.d.comb += in_job.eq(1)
                # The registers may still hold the end marker of the job before.
                with m.If(free):
                    m.d.sync += [
                        row_number.eq(0),
                        left.eq(job.valid_length),
                        legal.eq(0),
                        head.slot.eq(slot),
                        head.chunks.eq(job.chunks),
                        score.valid_length.eq(job.valid_length),
                        *(
                            score[name].eq(job[name])
                            for name in ("lift", "bias", "causal", "score_shift", "lift_shift")
                        ),
                    ]
                    # A slot that is about to be given back still says that its old job is there.
                    with m.If(self.job_valid.bit_select(slot, 1) & ~(ending & (ending_slot == slot))):
                        # A code with one of the low four bits refuses the job: ErrorCode.refuses.
                        with m.If(job.error[:4] != 0):
                            m.next = "end"
                            if self._gated:
                                with m.If(rows_left):
                                    m.next = "surplus"
                        with m.Else():
                            m.next = "grow"
            with m.State("grow"):
                # Legal blocks of the first row: one if causal, else all with a token that is not padding. Later rows of
                # a causal head have one more each; those past the padding have no query, so none needs a limit.
                m.d.sync += [legal.eq(Cat(1, legal)), row_number.eq(row_number + 1)]
                with m.If(job.causal | (row_number == last_block)):
                    m.d.sync += row_number.eq(0)
                    m.next = "row"
            with m.State("row"):
                m.d.comb += in_row.eq(1)
                with m.If(row_there):
                    m.next = "mask"
            with m.State("mask"):
                m.next = "legal"
            with m.State("legal"):
                m.d.sync += [remaining.eq(Mux(left == 0, 0, mask_row & legal & kept)), first.eq(1)]
                m.next = "find"
            with m.State("find"):
                m.d.sync += [
                    found.eq(index),
                    none_found.eq(remaining == 0),
                    after.eq(remaining & ~lowest),
                    none_after.eq((remaining & ~lowest) == 0),
                ]
                m.next = "item"
            with m.State("item"):
                with m.If(free):
                    m.d.comb += fills.eq(1)
                    m.d.sync += [
                        head_valid.eq(1),
                        head.block.eq(found),
                        head.live_count.eq(Mux(skipped, 0, Mux(left > c.rows, c.rows, left))),
                        head.first.eq(first),
                        head.last.eq(none_after),
                        head.is_null.eq(none_found),
                        head.is_end.eq(0),
                        score.group.eq(ring_number),
                        score.query_base.eq(row_number << _log2(c.rows)),
                        remaining.eq(after),
                        first.eq(0),
                    ]
                    with m.If(none_after):
                        m.d.sync += [
                            ring_number.eq(ring_number + 1),
                            row_number.eq(row_number + 1),
                            left.eq(Mux(left > c.rows, left - c.rows, 0)),
                        ]
                        with m.If(job.causal & (row_number[:turn] == c.block // c.rows - 1)):
                            m.d.sync += legal.eq(Cat(1, legal))
                        with m.If(row_number + 1 == job.groups):
                            m.next = "end"
                            if self._gated:
                                with m.If(rows_left):
                                    m.next = "surplus"
                        with m.Else():
                            m.next = "row"
                    with m.Else():
                        m.next = "find"
            with m.State("end"):
                with m.If(free):
                    m.d.sync += [head_valid.eq(1), head.is_end.eq(1), head.is_null.eq(0), slot.eq(~slot)]
                    m.next = "job"
            if self._gated:
                with m.State("surplus"):
                    m.d.comb += self.gate.ready.eq(1)
                    with m.If(self.gate.valid & (job.error[:4] == 0)):
                        m.d.comb += self.gate_error.eq(RowError.LONG)
                    with m.If((self.gate.valid & self.gate.payload.last) | (~self.gate.valid & self.gate_bypass)):
                        m.next = "end"
        return head, score, head_valid, head_taken, head_loaded

    def _gate_row(
        self, m: Module, job: data.View, in_job: Signal, in_row: Signal, turn: Value, left: Value
    ) -> tuple[Value, Value, Value, Value]:
        """What the gate keeps of the row, whether its head is skipped, whether the state ``row`` can be left, and
        whether rows of the head may still come."""
        c = self.config
        if not self._gated:
            return Const(-1, c.max_blocks), Const(0, 1), Const(1, 1), Const(0, 1)
        kept, skipped, all_taken, bypassed = Signal(c.max_blocks), Signal(), Signal(), Signal()
        there, waits = Signal(), Signal()
        row = self.gate.payload
        # Rows of padding have no row of the gate, the groups of a block row share one.
        m.d.comb += [
            waits.eq(in_row & job.gated & ~bypassed & (left != 0) & ((turn == 0) if len(turn) else 1)),
            there.eq(~waits | all_taken | self.gate.valid | self.gate_bypass),
            self.gate.ready.eq(waits & ~all_taken),
        ]
        with m.If(in_job):
            m.d.sync += [kept.eq(-1), skipped.eq(0), all_taken.eq(0), bypassed.eq(0)]
        with m.Elif(waits & (all_taken | self.gate.valid | self.gate_bypass)):
            m.d.sync += [kept.eq(-1), skipped.eq(0)]
            with m.If(all_taken):
                m.d.comb += self.gate_error.eq(RowError.SHORT)
            with m.Elif(self.gate.valid):
                m.d.sync += [kept.eq(row.mask), skipped.eq(row.skipped), all_taken.eq(row.last)]
            with m.Else():
                m.d.sync += bypassed.eq(1)
        return kept, skipped, there, job.gated & ~all_taken & ~bypassed

    def _feed(
        self,
        m: Module,
        now: data.View,
        now_valid: Signal,
        last_pass: Signal,
        fed: data.View,
        fed_valid: Signal,
        stepped: data.View,
        stepped_valid: Signal,
        feed_takes: Signal,
        null_release: Signal,
    ) -> None:
        """The feed and step stages."""
        c = self.config
        feed_number = Signal(range(c.pass_steps))
        feeds_done = Signal()
        step_number = Signal(range(c.max_chunks * c.pass_steps))
        sub_number = step_number[_log2(c.pass_steps) :]
        started = Signal()
        step_issue = Signal()
        step_last = Signal()
        moves = Signal()  # the fed pass becomes the stepped one

        # Feed stage. Whether the source of a pass is there is known from a cycle ago.
        probabilities = Signal(range(c.lookahead + 2))
        source_there = Signal()

        def has_source(item: data.View, probabilities_there: Value) -> Value:
            loaded = self.q_group != item.score.group
            return Mux(item.is_values, probabilities_there, loaded | (~item.is_lifted & (item.number < self.q_pass)))

        # A pass of values that is still being fed takes one of those that are there.
        more_probabilities = Mux(fed_valid & fed.is_values & ~feeds_done, probabilities > 1, probabilities != 0)
        m.d.sync += source_there.eq(
            Mux(feed_takes, has_source(now, more_probabilities), has_source(fed, probabilities != 0))
        )
        shadow_free = ~stepped_valid | started | step_issue
        feed_issue = Signal()
        feed_last = Signal()
        m.d.comb += [
            feed_issue.eq(fed_valid & ~feeds_done & source_there & shadow_free),
            feed_last.eq(feed_issue & (feed_number == c.pass_steps - 1)),
            moves.eq((feeds_done | feed_last) & (~stepped_valid | step_last)),
            feed_takes.eq(now_valid & (~fed_valid | moves)),
            self.q_release.eq((feed_last & ~fed.is_values & fed.is_last & fed.last_of_group) | null_release),
            self.feed.valid.eq(feed_issue),
            self.feed.is_values.eq(fed.is_values),
            self.feed.number.eq(feed_number),
            self.feed.buffer.eq(fed.buffer),
            self.feed.query_address.eq(
                Cat(
                    feed_number,
                    fed.score.group[: _log2(c.query_groups)],
                    Mux(fed.is_lifted, c.max_chunks + fed.lifted_number, fed.number),
                )
            ),
        ]
        m.d.sync += probabilities.eq(probabilities + self.done - (feed_last & fed.is_values))
        with m.If(feed_issue):
            m.d.sync += feed_number.eq(feed_number + 1)
        with m.If(feed_last):
            m.d.sync += feeds_done.eq(1)
        with m.If(moves):
            m.d.sync += [feeds_done.eq(0), fed_valid.eq(0)]
        with m.If(~fed_valid | moves):
            m.d.sync += [fed.eq(now), fed.is_last.eq(last_pass), fed_valid.eq(now_valid)]

        # Step stage. The next run of steps is this pass's next, or the first of the pass that is fed; whether its
        # operands are there is known from a cycle ago, and so is whether a step is the pass's last.
        runs = _log2(c.pass_steps)
        final_run = ~stepped.is_values | (sub_number + 1 == stepped.chunks)
        then_block, then_slot = Signal.like(stepped.block), Signal()
        then_values, then_lifted = Signal(), Signal()
        number_now, then_number = (Signal(len(self.k_entry[0]) - runs, name=f"number_{n}") for n in ("now", "then"))
        with m.If(stepped_valid & ~final_run):
            m.d.comb += [
                then_block.eq(stepped.block),
                then_slot.eq(stepped.slot),
                then_values.eq(1),
                then_number.eq(sub_number + 1),
            ]
        with m.Else():
            m.d.comb += [
                then_block.eq(fed.block),
                then_slot.eq(fed.slot),
                then_values.eq(fed.is_values),
                then_lifted.eq(fed.is_lifted),
                then_number.eq(Mux(fed.is_values, 0, fed.number)),
            ]

        # What is there of keys and of values, as one number.
        there = []
        for name, blocks, entries in (("k", self.k_block, self.k_entry), ("v", self.v_block, self.v_entry)):
            known = Signal(data.ArrayLayout(unsigned(len(entries[0]) - runs + len(blocks[0])), 2), name=f"{name}_there")
            m.d.sync += [known[slot].eq(Cat(entries[slot][runs:], blocks[slot])) for slot in range(2)]
            there.append(known)

        def has_operands(slot: Value, is_values: Value, is_lifted: Value, block: Value, number: Value) -> Value:
            known = Mux(is_values, there[1][slot], there[0][slot])
            return is_lifted | (Cat(number, block) < known)

        m.d.comb += number_now.eq(Mux(stepped.is_values, sub_number, stepped.number))
        there_now = has_operands(stepped.slot, stepped.is_values, stepped.is_lifted, stepped.block, number_now)
        there_then = has_operands(then_slot, then_values, then_lifted, then_block, then_number)
        operands_there, at_last = Signal(), Signal()
        run_ends = (step_number & (c.pass_steps - 1)) == c.pass_steps - 1

        def final_step(item: data.View) -> Value:
            return Mux(item.is_values, (item.chunks << runs) - 1, c.pass_steps - 1)

        m.d.comb += [step_issue.eq(stepped_valid & operands_there), step_last.eq(step_issue & at_last)]
        with m.If(moves | (step_issue & run_ends)):
            m.d.sync += operands_there.eq(there_then)
        with m.Else():
            m.d.sync += operands_there.eq(there_now)
        with m.If(step_issue):
            m.d.sync += [
                step_number.eq(step_number + 1),
                started.eq(1),
                at_last.eq(step_number + 1 == final_step(stepped)),
            ]
        with m.If(step_last):
            m.d.sync += [step_number.eq(0), started.eq(0), stepped_valid.eq(0)]
        with m.If(moves):
            m.d.sync += [stepped.eq(fed), stepped_valid.eq(1), at_last.eq(final_step(fed) == 0)]

        key_number = Cat(
            step_number[: _log2(c.pass_steps)], stepped.block[: _log2(c.max_blocks)]
        )  # key / segments, the place of a key in its pass
        step = self.step
        m.d.comb += [
            step.valid.eq(step_issue),
            step.swap.eq(~started),
            step.is_values.eq(stepped.is_values),
            step.is_lifted.eq(stepped.is_lifted),
            step.slot.eq(stepped.slot),
            step.key_number.eq(key_number),
            step.step_number.eq(step_number),
            step.pass_number.eq(stepped.number),
            step.lifted_number.eq(stepped.lifted_number),
            step.block.eq(stepped.block),
            step.address.eq(Mux(stepped.is_values, step_number + c.pass_steps, step_number)),
            step.first.eq(Mux(stepped.is_values, stepped.first_of_group, stepped.is_first)),
            step.has_bias.eq(~stepped.is_values & stepped.is_first & stepped.score.bias),
            step.shift.eq(
                Mux(stepped.is_values, 0, Mux(stepped.is_lifted, stepped.score.lift_shift, stepped.score.score_shift))
            ),
            step.emit.eq(Mux(stepped.is_values, stepped.last_of_group, stepped.is_last)),
            step.buffer.eq(stepped.buffer),
            step.output_slot.eq(stepped.output_slot),
            self.item_valid.eq(step_issue & ~started & ~stepped.is_values & stepped.is_first),
            self.item.slot.eq(stepped.buffer),
            self.item.first.eq(stepped.first_of_group),
            self.item.last.eq(stepped.last_of_group),
            self.item.key_base.eq(stepped.block << _log2(c.block)),
            self.item.query_base.eq(stepped.score.query_base),
            self.item.valid_length.eq(stepped.score.valid_length),
            self.item.causal.eq(stepped.score.causal),
        ]


def _log2(value: int) -> int:
    return value.bit_length() - 1


def _count(m: Module, counter: Signal, modulus: int) -> None:
    """Advance a counter modulo any number."""
    m.d.sync += counter.eq(Mux(counter == modulus - 1, 0, counter + 1))
