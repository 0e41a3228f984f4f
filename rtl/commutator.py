"""Commutator kernel in hardware: steps on states of a row group, matrices on the array, energies [GR §10.1]."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from dtp.array import ArrayParams
from dtp.config import BIAS_BITS, Config
from dtp.difference import DIFFERENCE_BITS
from dtp.kernel import MAX_WAIT, KernelParams, StepKind
from dtp.matrix import STATE_BITS, MatrixParams
from rtl.array import MacArray, StepLayout
from rtl.difference import DifferenceNorm, EnergyLayout
from rtl.layernorm import LayerNorm
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import Target
from rtl.lib.streams import StreamQueue
from rtl.matrix import (
    EntryLayout,
    MatrixJobLayout,
    MatrixMode,
    OutputWordLayout,
    SaturationCounter,
    WordLayout,
    matrix_array,
)
from rtl.operands import WriteLayout

__all__ = ["Commutator", "CommutatorUnit", "KernelStepLayout"]

_COUNT_BITS = 16


class KernelStepLayout(data.StructLayout):
    """One step, :class:`dtp.kernel.Step`; ``words`` is what it reads, ``width`` the elements of a row."""

    def __init__(self, config: Config) -> None:
        place = unsigned((KernelParams(config).state_words - 1).bit_length())
        super().__init__(
            {
                "kind": StepKind,
                "wait": unsigned(MAX_WAIT.bit_length()),
                "words": unsigned(MatrixParams(config).feed_words.bit_length()),
                "width": unsigned(config.max_mlp.bit_length()),
                "target": place,
                "source": place,
                "addend": place,
                "residual": place,
                "adds": unsigned(1),
                "store": unsigned(1),
                "job": MatrixJobLayout(config),
            }
        )


class _ResultLayout(data.StructLayout):
    """Where the outputs of a matrix go."""

    def __init__(self, config: Config) -> None:
        place = unsigned((KernelParams(config).state_words - 1).bit_length())
        super().__init__({"target": place, "addend": place, "adds": unsigned(1), "store": unsigned(1)})


class Commutator(wiring.Component):
    """Runs a program of steps in order; docs/commutator.md §7.

    A step begins when no more than its ``wait`` matrix steps before it are unfinished, and the next one when it has
    read what it reads; matrices are finished in their order, beside the steps that follow. The array is outside, as
    for :class:`rtl.matrix.MatrixMode`.

    Parameters
    ----------
    config: the processor
    array: parameters of the array that is driven
    target: plain description or explicit ECP5 cells

    Members
    -------
    step: In(stream of :class:`KernelStepLayout`)
    i: In(stream of :class:`rtl.matrix.WordLayout`), states that are loaded
    w, bias_write: of :class:`rtl.matrix.MatrixMode`
    o: Out(stream of :class:`rtl.matrix.OutputWordLayout`), outputs that are stored
    energy: Out(stream of :class:`rtl.difference.EnergyLayout`), a record a row
    clear: In(1); saturations, sum_saturations: Out(16), of matrices, and of sums and LayerNorms; stop at 65535
    idle: Out(1), no step is under way
    feed_valid, feed_data, step_valid, array_step, i_valid, i_tag, i_data: ports of the array
    """

    def __init__(self, config: Config, array: ArrayParams, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self.array = array
        self._target = target
        c = config
        operands = data.ArrayLayout(signed(array.row_bits), array.segments)
        results = data.ArrayLayout(signed(array.acc_bits), array.segments)
        super().__init__(
            {
                "step": In(stream.Signature(KernelStepLayout(c))),
                "i": In(stream.Signature(WordLayout(c))),
                "w": In(stream.Signature(EntryLayout(c))),
                "bias_write": In(WriteLayout(MatrixParams(c).bias_words, c.segments * BIAS_BITS)),
                "o": Out(stream.Signature(OutputWordLayout(c))),
                "energy": Out(stream.Signature(EnergyLayout(c))),
                "clear": In(1),
                "saturations": Out(_COUNT_BITS),
                "sum_saturations": Out(_COUNT_BITS),
                "idle": Out(1),
                "feed_valid": Out(1),
                "feed_data": Out(data.ArrayLayout(operands, array.rows)),
                "step_valid": Out(1),
                "array_step": Out(StepLayout(array)),
                "i_valid": In(1),
                "i_tag": In(array.tag_bits),
                "i_data": In(data.ArrayLayout(results, array.rows)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        c = self.config
        elements = MatrixParams(c).elements
        m.submodules.mode = mode = MatrixMode(c, self.array, target=self._target)
        m.submodules.norm = norm = DifferenceNorm(c, target=self._target)
        m.submodules.layernorm = layernorm = LayerNorm(c, target=self._target)
        results = StreamQueue(_ResultLayout(c), KernelParams(c).open_matrices)
        m.submodules.results = results
        states = BlockMemory(m, "states", elements * STATE_BITS, KernelParams(c).state_words, target=self._target)
        late = Signal(WordLayout(c), reset_less=True)  # two cycles after its address
        m.d.sync += late.eq(states.data)

        connect(m, flipped(self.w), mode.w)
        connect(m, norm.o, flipped(self.energy))
        m.d.comb += [
            mode.bias_write.eq(self.bias_write),
            mode.clear.eq(self.clear),
            self.saturations.eq(mode.saturations),
            self.feed_valid.eq(mode.feed_valid),
            self.feed_data.eq(mode.feed_data),
            self.step_valid.eq(mode.step_valid),
            self.array_step.eq(mode.step),
            mode.i_valid.eq(self.i_valid),
            mode.i_tag.eq(self.i_tag),
            mode.i_data.eq(self.i_data),
        ]

        # Outputs of matrices: added to a state, written, or sent. They read before the steps do.
        result, word = results.o.payload, mode.o
        result_place = Signal.like(result.target)
        result_taken, result_end = Signal(), Signal()
        writes = Signal()
        m.d.comb += [
            writes.eq(results.o.valid & ~result.store & word.valid),
            self.o.valid.eq(results.o.valid & result.store & word.valid),
            self.o.payload.eq(word.payload),
            word.ready.eq(results.o.valid & (~result.store | self.o.ready)),
            result_taken.eq(word.valid & word.ready),
            result_end.eq(result_taken & word.payload.last),
            results.o.ready.eq(result_end),
        ]
        with m.If(result_taken):
            m.d.sync += result_place.eq(Mux(word.payload.last, 0, result_place + 1))
        adds = _line(m, "adds", result.adds, 2)[2]
        written = _line(m, "written", writes, 3, reset_less=False)[3]
        outputs = _line(m, "outputs", word.payload.data.as_value(), 2)[2]
        total = Signal(elements * STATE_BITS, reset_less=True)
        over = Signal(elements)
        for n in range(elements):
            bits = slice(n * STATE_BITS, (n + 1) * STATE_BITS)
            addend = Mux(adds, late.as_value()[bits], 0).as_signed()
            exact = Signal(signed(STATE_BITS + 1), name=f"sum_{n}")
            beyond = exact[-1] ^ exact[-2]
            limit = Cat((~exact[-1]).replicate(STATE_BITS - 1), exact[-1])
            m.d.comb += exact.eq(outputs[bits].as_signed() + addend)
            m.d.sync += [total[bits].eq(Mux(beyond, limit, exact[:STATE_BITS])), over[n].eq(beyond)]
        target = _line(m, "result_target", result.target + result_place, 3)[3]
        done = _line(m, "done", result_end, 4, reset_less=False)[4]

        # Steps.
        step = self.step.payload
        open_matrices = Signal(range(MAX_WAIT + 2))
        begins, count, last_word = Signal(), Signal.like(step.words), Signal()
        normed = Signal.like(step.words)  # words that have left the LayerNorm
        reads, read_place = Signal(), Signal.like(step.source)
        opened = Signal()
        second_pass = Signal()
        loads = Signal()
        m.d.sync += open_matrices.eq(open_matrices + opened - done)
        m.d.comb += [
            begins.eq(self.step.valid & (open_matrices <= step.wait)),
            last_word.eq(count == step.words - 1),
            states.address.eq(Mux(writes, result.addend + result_place, read_place)),
            states.write.en.eq(written | (loads & self.i.valid) | layernorm.o.valid),
            states.write.addr.eq(Mux(written, target, step.target + Mux(loads, count, normed))),
            states.write.data.eq(
                Mux(written, total, Mux(loads, self.i.payload.as_value(), layernorm.o.payload.as_value()))
            ),
            self.i.ready.eq(loads & ~written),
            mode.job.payload.eq(step.job),
            results.i.payload.target.eq(step.target),
            results.i.payload.addend.eq(step.addend),
            results.i.payload.adds.eq(step.adds),
            results.i.payload.store.eq(step.store),
            layernorm.width.eq(step.width),
            layernorm.words.eq(step.words),
        ]
        # Words that a step reads: to the array, or one by one to a norm. The LayerNorm's become a state.
        read_there = _line(m, "read", reads & ~writes, 2, reset_less=False)[2]
        straight = Signal()
        m.d.comb += [
            mode.i.valid.eq(straight & read_there),
            mode.i.payload.eq(late),
            layernorm.o.ready.eq(~written),
        ]
        with m.If(layernorm.o.valid & layernorm.o.ready):
            m.d.sync += normed.eq(normed + 1)
        held = Signal(WordLayout(c), reset_less=True)
        difference = norm.i.payload
        m.d.comb += [
            layernorm.i.payload.eq(held),
            difference.reference.eq(held),
            difference.last.eq(last_word),
        ]
        partial = [
            [Signal(signed(DIFFERENCE_BITS), name=f"difference_{row}_{n}", reset_less=True) for n in range(c.segments)]
            for row in range(c.rows)
        ]
        for row in range(c.rows):
            for n in range(c.segments):
                m.d.comb += difference.difference[row][n].eq(partial[row][n])
        straight_left = Signal(2)
        m.d.comb += self.idle.eq(0)
        with m.FSM():
            with m.State("begin"):
                m.d.sync += [count.eq(0), normed.eq(0), second_pass.eq(0)]
                m.d.comb += self.idle.eq(~self.step.valid & (open_matrices == 0))
                with m.If(begins):
                    with m.Switch(step.kind):
                        with m.Case(StepKind.LOAD):
                            m.next = "load"
                        with m.Case(StepKind.MATRIX):
                            m.d.comb += [
                                mode.job.valid.eq(results.i.ready),
                                results.i.valid.eq(mode.job.ready),
                                opened.eq(mode.job.ready & results.i.ready),
                            ]
                            with m.If(opened):
                                m.next = "straight"
                        with m.Case(StepKind.NORMALISE):
                            m.next = "read"
                        with m.Default():
                            m.next = "attended"
            with m.State("load"):
                m.d.comb += loads.eq(1)
                with m.If(self.i.valid & self.i.ready):
                    m.d.sync += count.eq(count + 1)
                    with m.If(last_word):
                        m.d.comb += self.step.ready.eq(1)
                        m.next = "begin"
            with m.State("straight"):
                m.d.comb += [reads.eq(1), read_place.eq(step.source + count), straight.eq(1)]
                m.d.sync += straight_left.eq(2)
                with m.If(~writes):
                    m.d.sync += count.eq(count + 1)
                    with m.If(last_word):
                        m.next = "straight end"
            with m.State("straight end"):
                m.d.comb += straight.eq(1)
                m.d.sync += straight_left.eq(straight_left - 1)
                with m.If(straight_left == 1):
                    m.d.comb += self.step.ready.eq(1)
                    m.next = "begin"
            # One word after the other through the LayerNorm, all of them twice.
            with m.State("read"):
                m.d.comb += [reads.eq(1), read_place.eq(step.source + count)]
                with m.If(~writes):
                    m.next = "reading"
            with m.State("reading"):
                with m.If(read_there):
                    m.d.sync += held.eq(late)
                    m.next = "give"
            with m.State("give"):
                m.d.comb += layernorm.i.valid.eq(1)
                with m.If(layernorm.i.ready):
                    m.d.sync += count.eq(Mux(last_word, 0, count + 1))
                    m.next = "read"
                    with m.If(last_word):
                        m.d.sync += second_pass.eq(1)
                        with m.If(second_pass):
                            m.next = "normalised"
            with m.State("normalised"):
                with m.If(layernorm.idle):
                    m.d.comb += self.step.ready.eq(1)
                    m.next = "begin"
            # A word of Δ: Attn(h + Res(h)), less Attn(h), less Res(Attn(h)).
            for name, source, following in (
                ("attended", step.source, "plain"),
                ("plain", step.addend, "residual"),
                ("residual", step.residual, "subtract"),
            ):
                with m.State(name):
                    m.d.comb += [reads.eq(1), read_place.eq(source + count)]
                    with m.If(~writes):
                        m.next = f"{name} read"
                with m.State(f"{name} read"):
                    with m.If(read_there):
                        if name == "attended":
                            m.d.sync += held.eq(late)
                        for row in range(c.rows):
                            for n in range(c.segments):
                                before = 0 if name == "attended" else partial[row][n]
                                value = late[row][n] if name == "attended" else before - late[row][n]
                                m.d.sync += partial[row][n].eq(value)
                        m.next = following
            with m.State("subtract"):
                m.d.comb += norm.i.valid.eq(1)
                with m.If(norm.i.ready):
                    m.d.sync += count.eq(count + 1)
                    m.next = "attended"
                    with m.If(last_word):
                        m.d.comb += self.step.ready.eq(1)
                        m.next = "begin"

        m.submodules.counter = counter = SaturationCounter(elements + len(layernorm.saturated))
        m.d.comb += [
            counter.flags.eq(Cat(over & written.replicate(elements), layernorm.saturated)),
            counter.clear.eq(self.clear),
            self.sum_saturations.eq(counter.count),
        ]
        return m


class CommutatorUnit(wiring.Component):
    """The kernel with an array of its own.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells

    Members
    -------
    step, i, w, bias_write, o, energy, clear, saturations, sum_saturations, idle: of :class:`Commutator`
    """

    _NAMES = ("step", "i", "w", "bias_write", "o", "energy", "clear", "saturations", "sum_saturations", "idle")

    def __init__(self, config: Config, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self._target = target
        self._kernel = Commutator(config, matrix_array(config), target=target)
        members = self._kernel.signature.members
        super().__init__({name: members[name] for name in self._NAMES})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.kernel = kernel = self._kernel
        m.submodules.array = array = MacArray(kernel.array, target=self._target)
        for name in ("step", "i", "w"):
            connect(m, flipped(getattr(self, name)), getattr(kernel, name))
        for name in ("o", "energy"):
            connect(m, getattr(kernel, name), flipped(getattr(self, name)))
        for name in ("saturations", "sum_saturations", "idle"):
            m.d.comb += getattr(self, name).eq(getattr(kernel, name))
        m.d.comb += [
            kernel.bias_write.eq(self.bias_write),
            kernel.clear.eq(self.clear),
            array.feed_valid.eq(kernel.feed_valid),
            array.feed_data.eq(kernel.feed_data),
            array.step_valid.eq(kernel.step_valid),
            array.step.eq(kernel.array_step),
            kernel.i_valid.eq(array.o_valid),
            kernel.i_tag.eq(array.o_tag),
            kernel.i_data.eq(array.o_data),
        ]
        return m


def _line(m: Module, name: str, source: Value, cycles: int, *, reset_less: bool = True) -> list[Value]:
    """``source`` and its delays by 1 … ``cycles`` cycles."""
    taps: list[Value] = [source]
    for cycle in range(1, cycles + 1):
        tap = Signal(len(source), name=f"{name}_{cycle}", reset_less=reset_less)
        m.d.sync += tap.eq(taps[-1])
        taps.append(tap)
    return taps
