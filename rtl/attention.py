"""The metric-bias attention tile: one stream in, one stream out."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, ResetInserter, Signal, Value, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from dtp.array import ArrayParams
from dtp.config import Config
from dtp.gated import RowError
from dtp.job import STATUS_BYTES, ErrorCode, StatusRecord, descriptor_offset
from rtl.array import MacArray
from rtl.layouts import RowLayout, StepTag
from rtl.lib.multiplier import CopyRegister, Target
from rtl.loader import Loader
from rtl.normaliser import Normaliser, OutputLayout
from rtl.operands import OperandMemories
from rtl.softmax import Softmax
from rtl.walker import Walker

__all__ = ["AttentionTile", "InputLayout", "OutputLayout", "array_params"]


def array_params(config: Config) -> ArrayParams:
    """Parameters of the array inside a tile."""
    return ArrayParams.of(config, tag_bits=StepTag(config).size)


class InputLayout(data.StructLayout):
    """One input beat: ``input_bytes`` bytes, and whether it is the job's last."""

    def __init__(self, config: Config) -> None:
        super().__init__({"data": unsigned(8 * config.input_bytes), "last": unsigned(1)})


class AttentionTile(wiring.Component):
    """Attention with metric-bias scores, one head a job; the contract is ``docs/tile.md``.

    Order of the output: that of the jobs. Throughput: an array step a cycle while operands are there; loading and
    lifting the next head overlap with computing. Stalls: the input waits while both job slots or the query ring are
    taken, the array waits when ``output_slots`` groups wait for the output.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 multipliers
    gated: with a gate, whose mask rows a job can ask for (docs/gated.md)

    Members
    -------
    i: In(stream of :class:`InputLayout`)
    o: Out(stream of :class:`OutputLayout`)
    abort: In(1), drops all jobs; answered by one status record with error 255
    gate, gate_bypass, gate_error: as of :class:`rtl.walker.Walker`, only if ``gated``
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC, gated: bool = False) -> None:
        self.config = config
        self.target = target
        self._gated = gated
        gate = {
            "gate": In(stream.Signature(RowLayout(config.max_blocks))),
            "gate_bypass": In(1),
            "gate_error": Out(RowError),
        }
        super().__init__(
            {
                "i": In(stream.Signature(InputLayout(config))),
                "o": Out(stream.Signature(OutputLayout(config))),
                "abort": In(1),
            }
            | (gate if gated else {})
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        c = self.config
        params = array_params(c)
        units = {
            "loader": (loader := Loader(c, target=self.target, gated=self._gated)),
            "walker": (walker := Walker(c, params, gated=self._gated)),
            "operands": (operands := OperandMemories(c, params, target=self.target)),
            "array": (array := MacArray(params, target=self.target)),
            "softmax": (softmax := Softmax(c, target=self.target)),
            "normaliser": (normaliser := Normaliser(c, target=self.target)),
        }
        # Everything between the two sides of the gate is reset in the cycle after an abort, by a register of its own.
        for name, unit in units.items():
            m.submodules[f"halt_{name}"] = halt = CopyRegister(1, target=self.target)
            m.d.comb += halt.i.eq(self.abort)
            m.submodules[name] = ResetInserter(halt.o)(unit)
        m.submodules.gate = gate = AbortGate(c)
        m.d.comb += gate.abort.eq(self.abort)
        connect(m, flipped(self.i), gate.i)
        connect(m, gate.to_loader, loader.i)
        connect(m, normaliser.o, gate.from_normaliser)
        connect(m, gate.o, flipped(self.o))
        if self._gated:
            connect(m, flipped(self.gate), walker.gate)
            m.d.comb += [walker.gate_bypass.eq(self.gate_bypass), self.gate_error.eq(walker.gate_error)]

        # Loader, walker, memories.
        m.d.comb += [
            walker.jobs.eq(loader.jobs),
            walker.job_valid.eq(loader.job_valid),
            walker.job_done.eq(loader.job_done),
            walker.lift_saturations.eq(loader.lift_saturations),
            loader.release.eq(walker.release),
            loader.mask_slot.eq(walker.mask_slot),
            loader.mask_row_index.eq(walker.mask_row_index),
            walker.mask_row.eq(loader.mask_row),
            walker.k_block.eq(loader.k_block),
            walker.k_entry.eq(loader.k_entry),
            walker.v_block.eq(loader.v_block),
            walker.v_entry.eq(loader.v_entry),
            walker.q_group.eq(loader.q_group),
            walker.q_pass.eq(loader.q_pass),
            loader.q_release.eq(walker.q_release),
            operands.moving_write.eq(loader.moving_write),
            operands.lifted_write.eq(loader.lifted_write),
            operands.bias_write.eq(loader.bias_write),
            operands.query_write.eq(loader.query_write),
            operands.feed.eq(walker.feed),
            operands.step.eq(walker.step),
        ]

        # Memories, softmax, array.
        m.d.comb += [
            softmax.p_slot.eq(operands.p_slot),
            softmax.p_feed.eq(operands.p_feed),
            operands.probabilities.eq(softmax.p_data),
            softmax.rescale_slot.eq(operands.rescale_slot),
            operands.rescale.eq(softmax.rescale),
            array.feed_valid.eq(operands.feed_valid),
            array.feed_data.eq(operands.feed_data),
            array.step_valid.eq(operands.step_valid),
            array.step.eq(operands.array_step),
            array.rescale.eq(operands.array_rescale),
        ]

        # Array, softmax, normaliser.
        tag = data.View(StepTag(c), array.o_tag)
        m.d.comb += [
            softmax.item_valid.eq(walker.item_valid),
            softmax.item.eq(walker.item),
            softmax.i_valid.eq(array.o_valid & ~tag.is_values),
            softmax.i_slot.eq(tag.slot),
            softmax.i_step.eq(tag.number),
            softmax.i_data.eq(array.o_data),
            walker.done.eq(softmax.done),
            normaliser.i_valid.eq(array.o_valid & tag.is_values),
            normaliser.i_slot.eq(tag.slot),
            normaliser.i_step.eq(tag.number),
            normaliser.i_data.eq(array.o_data),
            normaliser.group_valid.eq(softmax.group_valid),
            normaliser.denominators.eq(softmax.denominators),
            normaliser.saturations.eq(softmax.saturations),
        ]
        connect(m, walker.record, normaliser.record)
        return m


class AbortGate(wiring.Component):
    """Keeps both streams lawful across an abort, and answers it.

    The input is in step with ``last``: a job that an abort cut is taken and dropped up to its ``last``. A beat that was
    offered stays; then follows one status record with error 255 and the tag of the newest descriptor, and only then new
    results. An abort that comes before that record has left is answered by it.

    Members
    -------
    i, to_loader: the input before and behind the gate
    from_normaliser, o: the output before and behind the gate, in the same cycle
    abort: In(1); the units between are reset in the cycle after it
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        beats = stream.Signature(InputLayout(config))
        results = stream.Signature(OutputLayout(config))
        super().__init__(
            {
                "i": In(beats),
                "to_loader": Out(beats),
                "from_normaliser": In(results),
                "o": Out(results),
                "abort": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        c = self.config
        aborted = Signal()  # the units between are being reset
        stopped = Signal()
        m.d.sync += aborted.eq(self.abort)
        m.d.comb += stopped.eq(self.abort | aborted)

        # Input. What is noted of a beat is noted in the cycle after it was taken.
        inside = Signal()  # a job has begun and its last beat has not come, up to the beat noted now
        dropping = Signal()
        taken = self.i.valid & self.i.ready
        noted, noted_last, noted_dropped = Signal(), Signal(), Signal()
        m.d.comb += [
            self.to_loader.payload.eq(self.i.payload),
            self.to_loader.valid.eq(self.i.valid & ~stopped & ~dropping),
            self.i.ready.eq(Mux(dropping, 1, self.to_loader.ready & ~stopped)),
        ]
        m.d.sync += [noted.eq(taken), noted_last.eq(self.i.payload.last), noted_dropped.eq(dropping)]
        with m.If(noted):
            m.d.sync += inside.eq(~noted_last)
        ends = self.i.payload.last & self.i.valid  # no beat is taken with an abort unless it is dropped
        with m.If(self.abort & Mux(noted, ~noted_last, inside) & ~(dropping & ends)):
            m.d.sync += dropping.eq(1)
        with m.Elif(dropping & ends):
            m.d.sync += dropping.eq(0)

        # Tag of the newest descriptor.
        tag = Signal(16)
        # Beats of the job so far; stands still behind the tag.
        behind = (descriptor_offset("tag") + 1) // c.input_bytes + 1
        beat = Signal(range(behind + 1))
        # A tag that comes in two beats counts when it is whole.
        places = [descriptor_offset("tag"), descriptor_offset("tag") + 1]
        low, high = (Signal(8, name=f"tag_{name}", reset_less=True) for name in ("low", "high"))
        for byte, place in zip((low, high), places, strict=True):
            m.d.sync += byte.eq(self.i.payload.data.word_select(place % c.input_bytes, 8))
        newest_low: Value = low
        if places[0] // c.input_bytes != places[1] // c.input_bytes:
            first = Signal(8)
            with m.If(noted & ~noted_dropped & (beat == places[0] // c.input_bytes)):
                m.d.sync += first.eq(low)
            newest_low = first
        with m.If(noted & ~noted_dropped & (beat == places[1] // c.input_bytes)):
            m.d.sync += tag.eq(Cat(newest_low, high))
        with m.If(noted):
            m.d.sync += beat.eq(Mux(noted_last, 0, Mux(beat == behind, beat, beat + 1)))

        # Output: straight through, but for the beat that an abort finds offered and not taken.
        held = Signal(OutputLayout(c), reset_less=True)
        holding = Signal()
        answer_beats = -(-STATUS_BYTES // c.output_bytes)
        answers = Signal(range(answer_beats + 1))
        answer_tag = Signal.like(tag)
        was_aborted = Signal()
        m.d.sync += was_aborted.eq(aborted)
        with m.If(aborted & ~was_aborted & (answers == 0)):
            m.d.sync += [answers.eq(answer_beats), answer_tag.eq(tag)]
        with m.Elif((answers != 0) & self.o.ready & ~holding):
            m.d.sync += answers.eq(answers - 1)
        with m.If(aborted & self.from_normaliser.valid & ~self.o.ready & ~holding & (answers == 0)):
            m.d.sync += holding.eq(1)
        with m.Elif(self.o.ready):
            m.d.sync += holding.eq(0)
        with m.If(~holding):
            m.d.sync += held.eq(self.from_normaliser.payload)
        record = StatusRecord(ErrorCode.ABORTED, 0, 0, 0, 0, 0).pack()
        words = Signal(8 * answer_beats * c.output_bytes)
        tag_place = StatusRecord.offset("tag")
        plain = int.from_bytes(record, "little")
        m.d.comb += words.eq(plain)
        m.d.comb += words[8 * tag_place : 8 * tag_place + 16].eq(answer_tag)
        word = Signal(range(answer_beats + 1))
        m.d.comb += word.eq(answer_beats - answers)
        with m.If(holding):
            m.d.comb += [self.o.valid.eq(1), self.o.payload.eq(held)]
        with m.Elif(answers != 0):
            m.d.comb += [
                self.o.valid.eq(1),
                self.o.payload.data.eq(words.word_select(word, 8 * c.output_bytes)),
                self.o.payload.last.eq(answers == 1),
            ]
        with m.Else():
            m.d.comb += [
                self.o.valid.eq(self.from_normaliser.valid),
                self.o.payload.eq(self.from_normaliser.payload),
                self.from_normaliser.ready.eq(self.o.ready),
            ]
        return m
