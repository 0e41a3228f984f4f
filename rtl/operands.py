"""Operand memories of the tile: loader writes, walker reads, the array gets feeds and steps in step."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from dtp.array import RESCALE_BITS, ArrayParams
from dtp.config import BIAS_BITS, Config
from rtl.array import StepLayout
from rtl.layouts import FeedLayout, StepControlLayout, StepTag
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import Target

__all__ = ["OperandMemories", "WriteLayout"]

class WriteLayout(data.StructLayout):
    """One write of ``data_bits`` bits to a memory of ``depth`` words, ``enables`` write enables wide."""

    def __init__(self, depth: int, data_bits: int, enables: int = 1) -> None:
        super().__init__(
            {
                "en": unsigned(enables),
                "addr": unsigned(max(1, (depth - 1).bit_length())),
                "data": unsigned(data_bits),
            }
        )


class OperandMemories(wiring.Component):
    """Keys, values, lifted keys, biases and scaled queries; addresses as in ``docs/tile.md`` §7.

    A read takes ``operand_read_cycles``: memory and register; with ``registered_memories``, addresses (of writes too)
    and read words have a register of their own beside the memories, which lie all over a chip. Every memory takes a
    write and a read each cycle. A word that is read while it is written is undefined: the loader tells the walker of a
    word only after its write.

    Parameters
    ----------
    config: the processor
    array: parameters of the array that is fed
    target: what the memories are for

    Members
    -------
    moving_write, lifted_write, bias_write, query_write: In(:class:`WriteLayout`); a lifted write has an enable for each
        lane of a segment
    feed, step: In, addresses and control from the walker
    probabilities: In(rows × segments, unsigned), what the softmax read for the feed of ``operand_read_cycles`` ago
    p_slot, p_feed: Out, what the softmax has to read for that, two cycles before
    rescale: In(rows × 5), of the probability buffer ``rescale_slot``
    rescale_slot: Out, in the cycle before it is used
    feed_valid, feed_data, step_valid, array_step, array_rescale: Out, ports of the array
    """

    def __init__(self, config: Config, array: ArrayParams, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self._target = target
        self.array = array
        c = config
        self.moving_depth = 4 * c.max_chunks * c.max_tokens // c.segments
        self.lifted_depth = 2 * c.lifted_passes * c.max_tokens // c.segments
        self.bias_depth = 2 * c.max_tokens // c.segments
        self.query_depth = (c.max_chunks + c.lifted_passes) * c.query_groups * c.pass_steps
        operands = data.ArrayLayout(signed(array.row_bits), array.segments)
        probabilities = data.ArrayLayout(unsigned(c.probability_bits), c.segments)
        super().__init__(
            {
                "moving_write": In(WriteLayout(self.moving_depth, c.lanes * c.operand_bits)),
                "lifted_write": In(WriteLayout(self.lifted_depth, c.lanes * c.lifted_bits, c.block)),
                "bias_write": In(WriteLayout(self.bias_depth, c.segments * BIAS_BITS)),
                "query_write": In(WriteLayout(self.query_depth, c.rows * c.segments * c.row_bits)),
                "feed": In(FeedLayout(c)),
                "step": In(StepControlLayout(c, array)),
                "probabilities": In(data.ArrayLayout(probabilities, c.rows)),
                "p_slot": Out(range(c.lookahead + 1)),
                "p_feed": Out(range(c.pass_steps)),
                "rescale": In(data.ArrayLayout(unsigned(RESCALE_BITS), c.rows)),
                "rescale_slot": Out(range(c.lookahead + 1)),
                "feed_valid": Out(1),
                "feed_data": Out(data.ArrayLayout(operands, array.rows)),
                "step_valid": Out(1),
                "array_step": Out(StepLayout(array)),
                "array_rescale": Out(data.ArrayLayout(unsigned(RESCALE_BITS), c.rows)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        c = self.config
        a = self.array

        # Addresses; then the memories; words and what belongs to them; then a choice, registered.
        extra = c.operand_read_cycles - 2
        plain = data.ArrayLayout(data.ArrayLayout(signed(c.operand_bits), c.block), c.segments)
        lifted = data.ArrayLayout(data.ArrayLayout(signed(c.lifted_bits), c.block), c.segments)
        bias = data.ArrayLayout(signed(BIAS_BITS), c.segments)
        query = data.ArrayLayout(data.ArrayLayout(signed(c.row_bits), c.segments), c.rows)
        step = self.step
        feed = self.feed

        key_address = Cat(step.key_number, step.pass_number[: _address_bits(c.max_chunks)])
        value_address = Cat(
            step.step_number[: _address_bits(c.max_chunks * c.pass_steps)],
            step.block[: _address_bits(c.max_blocks)],
        )
        half = _address_bits(self.moving_depth // 4)
        assert len(key_address) == len(value_address) == half  # both regions are a quarter of the memory
        address = Cat(Mux(step.is_values, value_address, key_address), step.is_values, step.slot)
        lifted_address = step.slot * c.lifted_passes + step.lifted_number
        plain_word = self._memory(m, "moving", self.moving_depth, plain, self.moving_write, address)
        lifted_word = self._memory(
            m,
            "lifted",
            self.lifted_depth,
            lifted,
            self.lifted_write,
            Cat(step.key_number, lifted_address)[: _address_bits(self.lifted_depth)],
        )
        bias_word = self._memory(m, "bias", self.bias_depth, bias, self.bias_write, Cat(step.key_number, step.slot))
        query_word = self._memory(m, "query", self.query_depth, query, self.query_write, feed.query_address)
        sooner, control = step, Signal.like(step)
        for stage in range(extra):
            late = Signal.like(step, name=f"step_{stage}")
            m.d.sync += late.eq(sooner)
            sooner = late
        m.d.sync += control.eq(sooner)
        m.d.comb += self.rescale_slot.eq(control.buffer)
        asked = Cat(feed.buffer, feed.number)
        taken = Cat(feed.valid, feed.is_values)
        for stage in range(extra):
            asked_late = Signal(len(asked), name=f"asked_{stage}")
            taken_late = Signal(len(taken), name=f"taken_{stage}")
            m.d.sync += [asked_late.eq(asked), taken_late.eq(taken)]
            asked, taken = asked_late, taken_late
        m.d.comb += Cat(self.p_slot, self.p_feed).eq(asked)
        feed_valid = Signal()
        feeds_values = Signal()
        m.d.sync += Cat(feed_valid, feeds_values).eq(taken)

        array_step = self.array_step
        m.d.sync += [self.step_valid.eq(control.valid), self.feed_valid.eq(feed_valid)]
        for segment in range(c.segments):
            for lane in range(c.block):
                m.d.sync += array_step.data[segment][lane].eq(
                    Mux(control.is_lifted, lifted_word[segment][lane], plain_word[segment][lane])
                )
            m.d.sync += array_step.init[segment].eq(Mux(control.has_bias, bias_word[segment], 0))
        tag = Signal(StepTag(c))
        m.d.comb += [
            tag.is_values.eq(control.is_values),
            tag.slot.eq(Mux(control.is_values, control.output_slot, control.buffer)),
            tag.number.eq(control.step_number),
        ]
        shift: Value = control.shift
        if c.sum_shift or c.lifted_sum_shift:
            more = Mux(control.is_lifted, c.lifted_sum_shift, c.sum_shift)
            shift = Mux(control.is_values, 0, control.shift + more)
        m.d.sync += [
            array_step.swap.eq(control.swap),
            array_step.addr.eq(control.address),
            array_step.first.eq(control.first),
            array_step.shift.eq(shift),
            array_step.emit.eq(control.emit),
            array_step.tag.eq(tag),
        ]
        for row in range(c.rows):
            m.d.sync += self.array_rescale[row].eq(Mux(control.is_values, self.rescale[row], 0))

        query_late = Signal(query)
        values_late = Signal()
        m.d.sync += [query_late.eq(query_word), values_late.eq(feeds_values)]
        for row in range(c.rows):
            for segment in range(c.segments):
                m.d.comb += self.feed_data[row][segment].eq(
                    Mux(values_late, self.probabilities[row][segment], query_late[row][segment])
                )
        assert a.rows == c.rows
        return m

    def _memory(
        self, m: Module, name: str, depth: int, layout: data.Layout, write: data.View, address: Value
    ) -> data.View:
        """One memory with a write port of the loader and a read port of the walker; the word that was read."""
        enables = len(write.en)
        width = layout.size
        registered = self.config.registered_memories
        # One enable a lane, repeated for every segment.
        lane = None if enables == 1 else width // (enables * self.config.segments)
        memory = BlockMemory(m, name, width, depth, granularity=lane, registered=registered, target=self._target)
        m.d.comb += [
            memory.write.en.eq(write.en if lane is None else write.en.replicate(self.config.segments)),
            memory.write.addr.eq(write.addr),
            memory.write.data.eq(write.data),
            memory.address.eq(address),
        ]
        word = data.View(layout, memory.data)
        if registered:
            late = Signal(layout, name=f"{name}_word", reset_less=True)
            m.d.sync += late.eq(word)
            word = late
        return word


def _address_bits(depth: int) -> int:
    return (depth - 1).bit_length()
