"""Lift unit of the attention tile: a small vector machine that scales queries and lifts queries and keys."""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Const, Module, Mux, Shape, Signal, Value, signed, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from dtp.array import MULTIPLIER_CYCLES
from dtp.config import BIAS_BITS, REGISTER_BITS, SCALE_BITS, Config
from dtp.job import KEY_SHIFT_BITS
from dtp.lift import (
    DUMP_CYCLES,
    READ_CYCLE,
    SATURATION_CYCLES,
    Dump,
    Emit,
    Init,
    LiftParams,
    Loop,
    Shift,
)
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import MultiplexedAdder, Multiplier, Selector, Target
from rtl.operands import WriteLayout

__all__ = ["Lift", "ScaleLayout", "ShiftLayout"]

COUNT_BITS = 16
"""Bits of the counter of saturations; it stops at its largest value."""


class ScaleLayout(data.StructLayout):
    """The job's multipliers: ``query_scale`` unsigned, the others signed."""

    def __init__(self) -> None:
        names = dict.fromkeys(name for init in Init if (name := init.job_field) is not None)
        shapes = {name: signed(SCALE_BITS) for name in names}
        super().__init__({**shapes, "query_scale": unsigned(SCALE_BITS)})


class ShiftLayout(data.StructLayout):
    """The job's shifts in front of the key memories, by :class:`~dtp.lift.Dump`."""

    def __init__(self) -> None:
        super().__init__({kind.name.lower(): unsigned(KEY_SHIFT_BITS) for kind in Dump})


class Lift(wiring.Component):
    """Executes the programs of :class:`dtp.lift.LiftParams`, an instruction a cycle.

    An instruction that takes a word waits for ``word_valid``; nothing else stalls. The first instruction of a program
    issues ``START_CYCLES`` after ``start``. Arithmetic: :func:`dtp.lift.lift_queries` and :func:`dtp.lift.lift_keys`.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells

    Members
    -------
    start, entry: In, begin the program at ``entry`` of the program memory; ends the one that runs
        (no word is offered in the cycle of ``start``)
    descriptor: In(1), a descriptor has been taken, its scales are valid ``params.result_cycles − 3`` cycles later
    scales, shifts: In, of the job
    count: In, words of a program's loop, when it starts
    word_valid, word: In, next word, lift_tokens × operand_bits; word_taken: Out
    flush: Out(1), the word taken is the last of its batch
    done: Out(1), the program's last instruction is over
    emit_valid, emit_data: Out, row operands, rows × segments of signed(row_bits)
    slot, batch: In, where dumped keys belong
    lifted_write, bias_write: Out(:class:`~rtl.operands.WriteLayout`)
    saturations: Out(16); clear: In(1)
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC) -> None:
        self.config = c = config
        self.params = p = LiftParams(config)
        self._target = target
        self._depth = len(p.code)
        self._batches = max(1, c.max_tokens // c.lift_tokens)
        lanes = data.ArrayLayout(signed(c.row_bits), c.segments)
        words = c.max_tokens // c.segments
        super().__init__(
            {
                "start": In(1),
                "entry": In(range(self._depth)),
                "descriptor": In(1),
                "scales": In(ScaleLayout()),
                "shifts": In(ShiftLayout()),
                "count": In(range(c.max_width + 1)),
                "word_valid": In(1),
                "word": In(c.lift_tokens * c.operand_bits),
                "word_taken": Out(1),
                "flush": Out(1),
                "done": Out(1),
                "emit_valid": Out(1),
                "emit_data": Out(data.ArrayLayout(lanes, c.rows)),
                "slot": In(1),
                "batch": In(range(self._batches)),
                "lifted_write": Out(WriteLayout(2 * c.lifted_passes * words, c.lanes * c.lifted_bits, c.block)),
                "bias_write": Out(WriteLayout(2 * words, c.segments * BIAS_BITS)),
                "saturations": Out(COUNT_BITS),
                "clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        now = self._sequencer(m)
        accumulators = self._lanes(m, now)
        saturated = [self._emission(m, now, accumulators), self._dump(m, now, accumulators)]
        self._count(m, saturated)
        return m

    # ---- control ---------------------------------------------------------------------------------------------

    def _sequencer(self, m: Module) -> list[_Control]:
        """Fetches and issues; ``now[k]`` is the instruction issued k cycles ago."""
        p = self.params
        layout = p.layout
        width = sum(layout.values())
        words = [p.encode(instruction) for instruction in p.code]
        memory = Memory(shape=unsigned(width), depth=self._depth, init=words)
        m.submodules.program = memory
        fetch = memory.read_port()
        # The first instruction is there when the reset ends.
        counter = Signal(range(self._depth + 1), init=1)
        counter_valid = Signal(init=1)
        fetched_valid = Signal()
        word = Signal(width, init=words[0])
        valid = Signal(init=1)
        self._present = valid
        finish = Signal()
        stop = Signal()
        advance = ~valid | finish
        fetches = ~fetched_valid | advance
        m.d.comb += [fetch.addr.eq(counter), fetch.en.eq(fetches)]
        with m.If(fetches):
            m.d.sync += [fetched_valid.eq(counter_valid), counter.eq(counter + 1)]
        with m.If(advance):
            m.d.sync += [word.eq(fetch.data), valid.eq(fetched_valid)]
        with m.If(self.start):
            m.d.sync += [counter.eq(self.entry), counter_valid.eq(1)]
        with m.If(self.start | stop):
            m.d.sync += [fetched_valid.eq(0), valid.eq(0)]
        with m.If(stop & ~self.start):
            m.d.sync += counter_valid.eq(0)

        place = 0
        part: dict[str, Value] = {}
        for name, bits in layout.items():
            part[name] = word[place : place + bits]
            place += bits

        left = Signal.like(self.count)
        none_left, one_left = Signal(init=1), Signal()
        waited = Signal(p.register_bits)
        odd = Signal()
        go = Signal()
        issue = Signal()
        has_word = ~part["take"] | self.word_valid
        in_loop = Signal()
        m.d.comb += in_loop.eq((part["loop"] == Loop.WORDS) | (part["loop"] == Loop.FOREVER))
        waited_last = waited == part["a"]
        # The last instruction of a program takes no word and is no loop.
        assert not any(one.end and (one.take or one.loop is not Loop.ONCE) for one in p.code)
        # What ends it when its word is there, or at once.
        loop = part["loop"]
        with_word = ~part["wait"] & ((loop == Loop.ONCE) | ((loop == Loop.WORDS) & one_left))
        at_once = (
            (part["wait"] & waited_last)
            | (~part["wait"] & (loop == Loop.WORDS) & none_left)
            | (~part["wait"] & (loop == Loop.DESCRIPTOR) & self.descriptor)
        )
        m.d.comb += finish.eq(at_once | (with_word & has_word))
        with m.If(~part["wait"]):
            with m.Switch(loop):
                with m.Case(Loop.ONCE, Loop.FOREVER):
                    m.d.comb += go.eq(has_word)
                with m.Case(Loop.WORDS):
                    m.d.comb += go.eq(has_word & ~none_left)
                with m.Case(Loop.DESCRIPTOR):
                    m.d.comb += go.eq(self.descriptor)
        m.d.comb += issue.eq(valid & go)
        with m.If(valid & part["wait"] & ~finish):
            m.d.sync += waited.eq(waited + 1)
        with m.Else():
            m.d.sync += waited.eq(0)
        with m.If(issue & in_loop):
            m.d.sync += odd.eq(~odd)
        with m.If(self.start):
            m.d.sync += [left.eq(self.count), none_left.eq(self.count == 0), one_left.eq(self.count == 1)]
        with m.Elif(issue & in_loop & ~none_left):
            m.d.sync += [left.eq(left - 1), none_left.eq(one_left), one_left.eq(left == 2)]
        m.d.comb += [
            stop.eq(valid & part["end"] & (waited_last | ~part["wait"])),
            self.done.eq(stop),
            self.word_taken.eq(issue & part["take"]),
            self.flush.eq(issue & part["take"] & part["flush"]),
        ]

        # Words of a loop use two registers in turn: a register is not written while it is read.
        alternate = in_loop & odd
        first = part["first"]
        factors = {
            "a": part["a"] ^ alternate,
            "b": part["b"] ^ (alternate & ~first),
            "dst": part["dst"] ^ alternate,
        }
        head = _Control({**part, **factors, "segments": part["segments"]}, issue)
        stages = [head]
        life = _life(p.result_cycles)
        for stage in range(1, p.result_cycles + 1):
            stages.append(stages[-1].registered(m, stage, life))
        return stages

    # ---- lanes -----------------------------------------------------------------------------------------------

    def _lanes(self, m: Module, now: list[_Control]) -> list[Signal]:
        """Register files, multipliers, accumulators; the accumulators, lane by lane."""
        c, p = self.config, self.params
        bits = p.accumulator_bits
        init = self._init(m, now)
        adding = now[p.result_cycles - 1]
        result = now[p.result_cycles]
        taking = now[0]
        # Known before the word is there: where an instruction waits for a word, no result comes any more.
        take = Signal()
        m.d.comb += take.eq(taking["take"] & self._present)
        source = Signal(2)  # of what is written: a word, or a result by its shift
        m.d.comb += source.eq(Mux(take, 0, result["write"]))
        accumulators: list[Signal] = []
        registers = p.result_cycles - 1 - (READ_CYCLE + 1 + MULTIPLIER_CYCLES)  # between memory and multiplier
        for segment in range(c.segments):
            shape = unsigned(c.rows * REGISTER_BITS)
            copies = [BlockMemory(m, f"registers_{segment}_{n}", shape, 1 << p.register_bits) for n in "ab"]
            enable = result.valid & result["write"].any()
            if c.segments > 1:
                enable &= result["segments"][segment]
            data = Signal(shape, name=f"result_{segment}")
            for memory, factor in zip(copies, "ab", strict=True):
                m.d.comb += [
                    memory.write.addr.eq(Mux(take, taking["dst"], result["dst"])),
                    memory.write.data.eq(data),
                    memory.write.en.eq((taking["take"] & taking.valid) | enable),
                    memory.address.eq(now[READ_CYCLE][factor]),
                ]
            words: list[Value] = [memory.data for memory in copies]
            for n in range(registers):
                late = [Signal(shape, name=f"registers_late_{segment}_{copy}_{n}", reset_less=True) for copy in "ab"]
                m.d.sync += [register.eq(word) for register, word in zip(late, words, strict=True)]
                words = [*late]
            for row in range(c.rows):
                lane = segment * c.rows + row
                low = row * REGISTER_BITS
                factors = [word[low : low + REGISTER_BITS].as_signed() for word in words]
                multiplier = Multiplier(REGISTER_BITS, REGISTER_BITS, target=self._target)
                adder = MultiplexedAdder(bits, target=self._target)
                m.submodules[f"multiplier_{lane}"] = multiplier
                m.submodules[f"adder_{lane}"] = adder
                accumulator = Signal(signed(bits), name=f"accumulator_{lane}", reset_less=True)
                m.d.comb += [
                    multiplier.a.eq(factors[0]),
                    multiplier.a_enable.eq(1),
                    multiplier.b.eq(factors[1]),
                    adder.x0.eq(accumulator),
                    adder.x1.eq(init),
                    adder.select.eq(adding["first"]),
                    adder.y.eq(multiplier.o),
                ]
                with m.If(adding.valid):
                    m.d.sync += accumulator.eq(adder.o)
                word = self.word.word_select(lane, c.operand_bits).as_signed()
                value = Signal(signed(REGISTER_BITS), name=f"value_{lane}")
                metric, vector, norm = (accumulator >> p.register_shift(shift) for shift in Shift)
                m.d.comb += value.eq(Mux(source[1], Mux(source[0], norm, vector), Mux(source[0], metric, word)))
                m.d.comb += data[low : low + REGISTER_BITS].eq(value)
                accumulators.append(accumulator)
        return accumulators

    def _init(self, m: Module, now: list[_Control]) -> Signal:
        """What accumulators start from: a scale chosen two cycles before the sum, the rest the cycle before."""
        p = self.params
        early, late = now[p.result_cycles - 3]["init"], now[p.result_cycles - 2]["init"]
        scales = Array(self.scales[c.job_field] for c in sorted(Init) if c.job_field is not None and not c.twice)
        scale = Signal(signed(SCALE_BITS + 1), reset_less=True)
        m.d.sync += scale.eq(scales[early[:3]])
        constant = Signal(signed(p.accumulator_bits))
        with m.Switch(late):
            for choice in Init:
                if choice.job_field is None:
                    with m.Case(choice):
                        m.d.comb += constant.eq(p.init_value(choice))
        is_scale, twice = late[4], late[3]
        factor = Mux(twice, scale << 1, scale)
        init = Signal(signed(p.accumulator_bits), reset_less=True)
        m.d.sync += init.eq((Mux(is_scale, factor, 0) << p.metric_register_shift) | constant)
        return init

    # ---- results ---------------------------------------------------------------------------------------------

    def _emission(self, m: Module, now: list[_Control], accumulators: list[Signal]) -> Value:
        """Row operands of the result's cycle; one bit a lane where it saturates."""
        c, p = self.config, self.params
        result = now[p.result_cycles]
        m.d.comb += self.emit_valid.eq(result.valid & (result["emit"] != Emit.NONE))
        is_lifted = result["emit"][1]
        flags: list[Value] = []
        for lane, accumulator in enumerate(accumulators):
            segment, row = divmod(lane, c.rows)
            # One table a bit: the two values, and a code that also forces 0 or 1.
            plain, lifted = (accumulator.shift_right(n) for n in (p.query_shift, p.lifted_shift))
            over, sign = Signal(name=f"over_{lane}"), accumulator[-1]
            only_plain = plain[: len(plain) - len(lifted) + c.row_bits]  # what is beyond only a plain lane
            only_lifted = lifted[: c.row_bits]
            m.d.comb += over.eq(
                _overflows(lifted, c.row_bits)
                | Mux(is_lifted, _overflows(only_lifted, c.lifted_row_bits), _overflows(only_plain, c.row_bits))
            )
            # A lifted lane is saturated to fewer bits: its sign goes on above them.
            codes = []
            for part, forced in (("low", ~sign), ("high", is_lifted ^ ~sign)):
                code = Signal(2, name=f"code_{part}_{lane}")
                m.d.comb += code.eq(Cat(Mux(over, forced, is_lifted), over))
                codes += [code] * (c.lifted_row_bits - 1 if part == "low" else c.row_bits - c.lifted_row_bits)
            bits = [Mux(code[1], code[0], Mux(code[0], lifted[n], plain[n])) for n, code in enumerate(codes)]
            m.d.comb += self.emit_data[row][segment].eq(Cat(*bits, sign).as_signed())
            flags.append(over)
        return Cat(*flags) & self.emit_valid.replicate(len(flags))

    def _dump(self, m: Module, now: list[_Control], accumulators: list[Signal]) -> Value:
        """Held lanes leave, S tokens a cycle; one bit a value written where it saturated."""
        c, p = self.config, self.params
        bits, ports, segments = p.accumulator_bits, c.lift_ports, c.segments
        result = now[p.result_cycles]
        hold = result.valid & result["hold"]
        lane = result["dst"][2:]
        port_bits = (ports - 1).bit_length()

        # Holds.
        kinds = [Signal(2, name=f"kind_{port}", reset_less=True) for port in range(ports)]
        held = Signal(ports)
        base = Signal(len(lane) - port_bits, reset_less=True)
        number = Signal(range(p.dump_steps))
        active = Signal()
        ending = Signal()
        m.d.comb += ending.eq(active & (number == p.dump_steps - 1))
        holding = Signal(ports)
        m.d.comb += holding.eq(Mux(hold, 1 << lane[:port_bits] if port_bits else 1, 0))
        m.d.sync += held.eq(Mux(ending, 0, held) | holding)
        with m.If(hold):
            m.d.sync += base.eq(lane[port_bits:])
        with m.If(ending):
            m.d.sync += active.eq(0)
        with m.If(active):
            m.d.sync += number.eq(number + 1)
        with m.If(hold & result["dump"]):
            m.d.sync += [active.eq(1), number.eq(0)]

        # The tokens of a cycle; then the coarse shift; then the fine one and rounding.
        shift_of = Array(self.shifts[kind.name.lower()] for kind in Dump)
        control = _Delay(
            m,
            "dump",
            {
                "active": active,
                "base": base,
                "held": held,
                "bias": kinds[0] == Dump.BIAS,
                "number": number,
            },
            DUMP_CYCLES,
        )
        values: list[list[tuple[Signal, Signal, Signal]]] = []
        fine_bits = 2
        for port in range(ports):
            with m.If(holding[port]):
                m.d.sync += kinds[port].eq(result["dst"][:2])
            amount = Signal(KEY_SHIFT_BITS, name=f"shift_{port}_1", reset_less=True)
            fine = Signal(fine_bits, name=f"shift_{port}_2", reset_less=True)
            m.d.sync += [amount.eq(shift_of[kinds[port]]), fine.eq(amount)]
            shifted: list[tuple[Signal, Signal, Signal]] = []
            for segment in range(segments):
                name = f"{port}_{segment}"
                tokens: list[Value] = []
                for step in range(p.dump_steps):
                    token = Signal(signed(bits), name=f"hold_{name}_{step}", reset_less=True)
                    with m.If(holding[port]):
                        m.d.sync += token.eq(accumulators[step * segments + segment])
                    tokens.append(token)
                token = Signal(signed(bits), name=f"token_{name}", reset_less=True)
                coarse = Signal(signed(bits + 1), name=f"coarse_{name}", reset_less=True)
                rounded = Signal(signed(BIAS_BITS + 2), name=f"rounded_{name}", reset_less=True)
                beyond, negative = (Signal(name=f"{key}_{name}", reset_less=True) for key in ("beyond", "negative"))
                if len(tokens) == 1:
                    m.d.sync += token.eq(tokens[0])
                else:
                    chosen = Selector(bits, len(tokens), target=self._target)
                    m.submodules[f"chosen_{name}"] = chosen
                    m.d.comb += [chosen.i.eq(Cat(*tokens)), chosen.select.eq(number)]
                    m.d.sync += token.eq(chosen.o)
                # A bit below the value collects the rounding bit: the last one that the shift drops.
                value: Value = Cat(0, token).as_signed()
                for level in reversed(range(fine_bits, KEY_SHIFT_BITS)):
                    value = Mux(amount[level], value >> (1 << level), value)
                m.d.sync += coarse.eq(value)
                value = coarse
                for level in reversed(range(fine_bits)):
                    value = Mux(fine[level], value >> (1 << level), value)
                last = Signal(signed(bits + 1), name=f"fine_{name}")
                m.d.comb += last.eq(value)
                # What does not fit one bit more than a bias does not fit a bias after rounding either.
                m.d.sync += [
                    rounded.eq(last[1 : BIAS_BITS + 2].as_signed() + last[0]),
                    beyond.eq(_overflows(last.shift_right(1), BIAS_BITS + 1)),
                ]
                m.d.sync += negative.eq(last[-1])
                shifted.append((rounded, beyond, negative))
            values.append(shifted)

        # Saturate and write.
        out = control[DUMP_CYCLES]
        word = Cat(out["number"], self.batch)[: _bits(c.max_tokens // segments)]
        passes, lanes = c.lifted_passes, Signal(c.block)
        first_lane = Cat(Const(0, port_bits), out["base"])
        lifted_pass = Signal(range(passes)) if passes > 1 else Const(0, 1)
        if passes > 1:
            m.d.comb += lifted_pass.eq(first_lane >> _bits(c.block))
        m.d.comb += lanes.eq(Cat(out["held"]) << first_lane[: _bits(c.block)])
        region = Signal(range(2 * passes))
        m.d.comb += region.eq(Mux(self.slot, passes, 0) + lifted_pass)
        write, beta = self.lifted_write, self.bias_write
        writes = out["active"] & ~out["bias"]
        m.d.comb += [
            write.en.eq(Mux(writes, lanes, 0)),
            write.addr.eq(Cat(word, region)),
            beta.en.eq(out["active"] & out["bias"]),
            beta.addr.eq(Cat(word, self.slot)),
        ]
        flags: list[Value] = []
        for port, shifted in enumerate(values):
            for segment, (value, beyond, negative) in enumerate(shifted):
                sign = Mux(beyond, negative, value[-1])
                over = beyond | _overflows(value, c.lifted_bits)
                lifted = _saturated(value, c.lifted_bits, over, sign)
                for position in range(port, c.block, ports):
                    place = (segment * c.block + position) * c.lifted_bits
                    m.d.comb += write.data[place : place + c.lifted_bits].eq(lifted)
                counted = over & writes & out["held"][port]
                if port == 0:
                    over = beyond | _overflows(value, BIAS_BITS)
                    place = segment * BIAS_BITS
                    word_out = _saturated(value, BIAS_BITS, over, sign)
                    m.d.comb += beta.data[place : place + BIAS_BITS].eq(word_out)
                    counted |= over & beta.en
                flags.append(counted)
        return Cat(*flags)

    def _count(self, m: Module, flags: list[Value]) -> None:
        """Adds the set bits, at most one of the vectors being other than 0, :data:`SATURATION_CYCLES` later."""
        width = max(len(flag) for flag in flags)
        caught = Signal(width)
        number = Signal(range(width + 1))
        both: Value = Const(0, width)
        for flag in flags:
            both = both | flag
        m.d.sync += [caught.eq(both), number.eq(_ones(caught))]
        total = Signal(COUNT_BITS + 1)
        assert SATURATION_CYCLES == 3  # caught, number, total
        m.d.comb += total.eq(self.saturations + number)
        with m.If(self.clear):
            m.d.sync += self.saturations.eq(0)
        with m.Else():
            m.d.sync += self.saturations.eq(Mux(total[-1], (1 << COUNT_BITS) - 1, total))


def _life(result_cycles: int) -> dict[str, int]:
    """Last stage in which a field of an instruction is used."""
    life = dict.fromkeys(("dst", "write", "segments", "emit", "hold", "dump"), result_cycles)
    return {"a": READ_CYCLE, "b": READ_CYCLE, "take": 0, "init": result_cycles - 2, "first": result_cycles - 1, **life}


class _Control:
    """Fields of an instruction in one stage of the pipeline, and whether there is one."""

    def __init__(self, fields: dict[str, Value], valid: Signal) -> None:
        self._fields = fields
        self.valid = valid

    def __getitem__(self, name: str) -> Value:
        return self._fields[name]

    def registered(self, m: Module, stage: int, life: dict[str, int]) -> _Control:
        """The next stage, ``stage``; ``life``: the last stage in which a field is used."""
        fields: dict[str, Value] = {}
        for name, value in self._fields.items():
            if life.get(name, -1) >= stage:
                register = Signal(len(value), name=f"{name}_{stage}", reset_less=True)
                m.d.sync += register.eq(value)
                fields[name] = register
        valid = Signal(name=f"valid_{stage}")
        m.d.sync += valid.eq(self.valid)
        return _Control(fields, valid)


class _Delay:
    """Named values, registered once a cycle: ``delay[k]`` is what they were k cycles ago."""

    def __init__(self, m: Module, name: str, values: dict[str, Value], cycles: int) -> None:
        self._stages = [values]
        for cycle in range(1, cycles + 1):
            stage: dict[str, Value] = {}
            for key, value in self._stages[-1].items():
                register = Signal(Shape.cast(Value.cast(value).shape()), name=f"{name}_{key}_{cycle}")
                m.d.sync += register.eq(value)
                stage[key] = register
            self._stages.append(stage)

    def __getitem__(self, cycle: int) -> dict[str, Value]:
        return self._stages[cycle]


def _bits(depth: int) -> int:
    """Address bits of a power of two."""
    return (depth - 1).bit_length()


def _overflows(value: Value, bits: int) -> Value:
    """Whether a signed value is beyond ``bits`` bits: whether the upper ones differ, by threes and their neighbour."""
    upper = value[bits - 1 :]
    if len(value) <= bits:
        return Const(0, 1)
    return Cat(~(upper[n : n + 4].all() | ~upper[n : n + 4].any()) for n in range(0, max(1, len(upper) - 1), 3)).any()


def _saturated(value: Value, bits: int, over: Value, negative: Value) -> Value:
    """The low bits of a value, or the bound on the side of its sign."""
    return Cat(*(Mux(over, ~negative, value[n]) for n in range(bits - 1)), negative)


def _ones(vector: Value) -> Value:
    """Number of set bits, by a tree."""
    counts: list[Value] = [vector[n] for n in range(len(vector))]
    while len(counts) > 1:
        counts = [counts[n] + counts[n + 1] if n + 1 < len(counts) else counts[n] for n in range(0, len(counts), 2)]
    return counts[0]
