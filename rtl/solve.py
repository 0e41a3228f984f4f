"""Small solves in hardware: four tokens in turn, an operation of two products a cycle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from amaranth.hdl import Cat, Const, Module, Mux, Shape, Signal, Value, signed, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from dtp.config import MANTISSA_BITS, REGISTER_BITS, TABLE_BITS, Config
from dtp.solve import (
    BOTH_SLOTS,
    CONSTANTS,
    FINE_BITS,
    FRACTION_BITS,
    GRAM_PAIRS,
    MAX_COLUMNS,
    MINUS_UNIT_PAIR,
    OUTPUTS,
    PIVOT_FLOOR_BITS,
    PRODUCT_SHIFT,
    RECIPROCAL_COARSE,
    RECIPROCAL_FINE,
    REGISTERS,
    THREADS,
    TILE_COLUMNS,
    UNIT_DIAGONAL,
    UNIT_PAIR,
    UNIT_PAIRS,
    WEIGHTS,
    ZERO,
    MiddleMode,
    Operation,
    OperationKind,
    program,
)
from dtp.transport import TransportParams
from rtl.lib.delay import delayed
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import Multiplier, Target
from rtl.lib.reduce import index_bits, registered_choice

__all__ = ["JobLayout", "SolveLane"]

_PAIRS = len(GRAM_PAIRS)
_REGISTER = (REGISTERS - 1).bit_length()
_THREAD = (THREADS - 1).bit_length()
_CONTEXTS = 2 * THREADS
_EXPONENT_BITS = 5
#: Bits of a determinant that is not below the floor.
_DETERMINANT_BITS = 2 * REGISTER_BITS
#: Right shift of an inverse is the exponent of its determinant less this.
_INVERSE_BITS = 2 * PRODUCT_SHIFT - MANTISSA_BITS
#: A normalised determinant: its leading one and what the reciprocal looks at.
_NORMAL_BITS = FRACTION_BITS + 1


class JobLayout(data.StructLayout):
    """What is the same for every token of a job; fields are those of :class:`dtp.transport.TransportJob`.

    ``last_group``, ``last_word`` and ``last_token`` are the counts less one.
    """

    def __init__(self, params: TransportParams) -> None:
        super().__init__(
            {
                "mode": unsigned(2),
                "last_group": unsigned(1),
                "last_word": unsigned(max(1, (params.max_words - 1).bit_length())),
                "last_token": unsigned(16),
                "plain": unsigned(1),
                "transposed": unsigned(1),
                "separate": unsigned(1),
                "identity": unsigned(1),
                "base": unsigned(1),
                "project_shift": unsigned(5),
                "gram_shift": unsigned(5),
                "unit": signed(REGISTER_BITS),
                "weights": data.ArrayLayout(signed(REGISTER_BITS), UNIT_PAIRS),
            }
        )


class _OperationLayout(data.StructLayout):
    def __init__(self) -> None:
        registers = {name: unsigned(_REGISTER) for name in ("a0", "b0", "a1", "b1", "c", "d")}
        super().__init__({"kind": OperationKind, "subtract": unsigned(1), "negative": unsigned(1), **registers})


class SolveLane(wiring.Component):
    """m of the tokens that the transport engine gives it: docs/transport.md, 3, bit for bit.

    Eight contexts, context n in turn n mod 4: a token is solved in its context while the next one of the same
    turn is projected into the other. A token starts in its first turn in which its projections are there and,
    where the mode solves, its Gram entries, and the one before issues its last operation; it takes ``len(program)``
    turns of four cycles.
    Sums of a Gram phase come at least ``params.min_gram_phase`` cycles apart, the phases of a token in their
    order, tokens in the order of their projections.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells

    Members
    -------
    start: In(1), writes the constants of ``job``; tokens start :attr:`TransportParams.start_cycles` later
    job: In(:class:`JobLayout`), stable
    project_valid, project_context, project_slot, project_group, project_last: In; project_slot only counts where the
        engine works on one vector
    project: In(vectors × 4 × signed(sum_bits)), exact projections of a tile's columns
    gram_valid, gram_context, gram_phase, gram_last: In
    gram: In(10 × gram sums): products of column pairs, or squares of their sums where factors have 8 bits
    done: Out(8), contexts whose m can be read; release, release_context: In, clears one
    m_context, m_slot, m_group: In, read address
    m: Out(vectors × 4 × signed(18)), a cycle later
    pivot, range: Out(1), errors of this cycle
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self.params = p = TransportParams(config)
        self._target = target
        words = data.ArrayLayout(data.ArrayLayout(signed(p.sum_bits), TILE_COLUMNS), p.vectors)
        m_words = data.ArrayLayout(data.ArrayLayout(signed(REGISTER_BITS), TILE_COLUMNS), p.vectors)
        context = range(_CONTEXTS)
        super().__init__(
            {
                "start": In(1),
                "job": In(JobLayout(p)),
                "project_valid": In(1),
                "project_context": In(context),
                "project_slot": In(1),
                "project_group": In(1),
                "project_last": In(1),
                "project": In(words),
                "gram_valid": In(1),
                "gram_context": In(context),
                "gram_phase": In(2),
                "gram_last": In(1),
                "gram": In(data.ArrayLayout(signed(p.gram_sum_bits), _PAIRS)),
                "done": Out(_CONTEXTS),
                "release": In(1),
                "release_context": In(context),
                "m_context": In(context),
                "m_slot": In(1),
                "m_group": In(1),
                "m": Out(m_words),
                "pivot": Out(1),
                "range": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        p, job = self.params, self.job
        turn = Signal(range(THREADS))
        m.d.sync += turn.eq(turn + 1)

        def thread(cycle: int) -> Value:
            """Whose operation is in the stage of this cycle."""
            return (turn - cycle % THREADS)[:_THREAD] if cycle % THREADS else turn

        projected, formed = Signal(_CONTEXTS), Signal(_CONTEXTS)
        with m.If(self.project_valid & self.project_last):
            m.d.sync += projected.bit_select(self.project_context, 1).eq(1)

        # The program counters rotate: the first one is the turn's.
        constants = Signal(range(THREADS * CONSTANTS + 1), init=THREADS * CONSTANTS)
        writing = Signal()
        m.d.comb += writing.eq(~constants[-1])
        with m.If(writing):
            m.d.sync += constants.eq(constants + 1)
        running = [Signal(name=f"running_{n}") for n in range(THREADS)]
        buffers = [Signal(name=f"buffer_{n}", init=1) for n in range(THREADS)]
        counter_bits = index_bits(sum(len(operations) for operations in set(self._job_programs().values())))
        counters = [Signal(counter_bits, name=f"counter_{n}", reset_less=True) for n in range(THREADS)]
        read, first, last = self._programs(m, counters[0])
        for n in range(1, THREADS):
            m.d.sync += [
                running[n - 1].eq(running[n]),
                buffers[n - 1].eq(buffers[n]),
                counters[n - 1].eq(counters[n]),
            ]
        at_last, ending, begins = Signal(), Signal(), Signal()
        context = Cat(turn, ~buffers[0])
        m.d.sync += at_last.eq(counters[1] == last)
        m.d.comb += [
            ending.eq(running[0] & at_last),
            begins.eq(
                (~running[0] | at_last)
                & ~writing
                & projected.bit_select(context, 1)
                & (formed.bit_select(context, 1) | ~job.mode[1])
            ),
        ]
        m.d.sync += [
            running[-1].eq(begins | (running[0] & ~ending)),
            buffers[-1].eq(buffers[0] ^ begins),
            counters[-1].eq(Mux(running[0] & ~at_last, counters[0] + 1, first)),
        ]
        with m.If(begins):
            m.d.sync += [projected.bit_select(context, 1).eq(0), formed.bit_select(context, 1).eq(0)]
        with m.If(self.start):
            m.d.sync += [constants.eq(0), turn.eq(0), *(buffer.eq(1) for buffer in buffers)]

        # Stage n is what was issued n cycles ago; an operation is read at 2.
        valids = delayed(m, "valid", running[0], 11, reset_less=False)
        buffer = delayed(m, "buffer_stage", buffers[0], 11)
        endings = delayed(m, "ending", ending, 11, reset_less=False)
        op = Signal(_OperationLayout())
        m.d.sync += op.eq(read)
        stage = {
            name: [None, None, *delayed(m, name, source, 11 - 2)]
            for name, source in {
                "inverse": op.kind == OperationKind.INVERSE,
                "determinant": op.kind == OperationKind.DETERMINANT,
                "load_gram": op.kind == OperationKind.LOAD_GRAM,
                "load_projection": op.kind == OperationKind.LOAD_PROJECTION,
                "stores": (op.kind != OperationKind.NONE) & (op.kind != OperationKind.DETERMINANT),
                "subtract": op.subtract,
                "negative": op.negative,
                "d": op.d,
            }.items()
        }

        # Registers: a copy for each operand. c is read later, when its sum is due.
        store, store_address = Signal(), Signal(_REGISTER + _THREAD, reset_less=True)
        store_data = Signal(signed(REGISTER_BITS), reset_less=True)
        c_address = delayed(m, "c_address", Cat(op.c, thread(2)), 5)[5]
        operands = {}
        for name in ("a0", "b0", "a1", "b1", "c"):
            memory = BlockMemory(
                m, f"registers_{name}", signed(REGISTER_BITS), REGISTERS * THREADS, target=self._target
            )
            m.d.comb += [
                memory.write.en.eq(store),
                memory.write.addr.eq(store_address),
                memory.write.data.eq(store_data),
                memory.address.eq(c_address if name == "c" else Cat(op[name], thread(2))),
            ]
            operands[name] = delayed(m, f"operand_{name}", memory.data, 1)[1]

        # Products at 6, their sum or what is loaded at 7: the products of a load are 0. Operand b0 of an inverse is 0
        # as well, in its place stands r.
        reciprocal, exponent = Signal(MANTISSA_BITS), Signal(_EXPONENT_BITS)
        r = registered_choice(m, "reciprocal", MANTISSA_BITS, [(stage["inverse"][3], reciprocal)])
        operands["b0"] = (operands["b0"].as_unsigned() | r).as_signed()
        products = []
        for n in range(2):
            m.submodules[f"multiplier_{n}"] = unit = Multiplier(REGISTER_BITS, REGISTER_BITS, target=self._target)
            m.d.comb += [unit.a.eq(operands[f"a{n}"]), unit.a_enable.eq(1), unit.b.eq(operands[f"b{n}"])]
            products.append(unit.o)
        load = self._load(m, op, stage, buffer, thread)
        subtract = stage["subtract"][6]
        second = products[1].as_unsigned() ^ subtract.replicate(len(products[1]))
        both = Signal(signed(2 * REGISTER_BITS + 1))
        total = Signal(signed(p.shifted_bits), reset_less=True)
        m.d.comb += both.eq((Cat(Const(1, 1), products[0]).as_signed() + Cat(subtract, second).as_signed()) >> 1)
        m.d.sync += total.eq(both | load)
        self._reciprocal(m, total, stage["determinant"][7] & valids[7], thread, reciprocal, exponent)

        amount = Signal(5, reset_less=True)
        inverse_amount = delayed(m, "exponent", exponent, 3)[3]
        with m.If(stage["inverse"][6]):
            m.d.sync += amount.eq(inverse_amount)
        with m.Elif(stage["load_gram"][6]):
            m.d.sync += amount.eq(job.gram_shift)
        with m.Elif(stage["load_projection"][6]):
            m.d.sync += amount.eq(job.project_shift)
        with m.Else():
            m.d.sync += amount.eq(PRODUCT_SHIFT)

        # Shift, one bit more for the rounding: by eights at 8, by twos and one at 9. Sum with c at 10, saturated at 11.
        shape = signed(p.shifted_bits + 1)
        doubled = Cat(Const(0, 1), total).as_signed()
        by_eights = [(amount[3:] == n, doubled >> (8 * n)) for n in range(4)]
        coarse = registered_choice(m, "coarse", shape, by_eights)
        amount_8 = delayed(m, "fine_amount", amount[:3], 1)[1]
        by_twos = registered_choice(m, "fine", shape, [(amount_8[1:] == n, coarse >> (2 * n)) for n in range(4)])
        by_one = delayed(m, "fine_one", amount_8[0], 1)[1]
        fine = Signal(shape)
        m.d.comb += fine.eq(Mux(by_one, by_twos >> 1, by_twos))
        # A shifted value of more than 19 bits leaves the range whatever c is.
        negative = stage["negative"][9]
        value = fine[1 : REGISTER_BITS + 2]
        flipped = Cat(Const(1, 1), value ^ negative.replicate(len(value))).as_signed()
        high = fine[REGISTER_BITS + 1 :]
        exact = Signal(signed(REGISTER_BITS + 2), reset_less=True)
        beyond, below = Signal(reset_less=True), Signal(reset_less=True)
        m.d.sync += [
            exact.eq((flipped + Cat(fine[0] ^ negative, operands["c"]).as_signed()) >> 1),
            beyond.eq(high.any() & ~high.all()),
            below.eq(fine[-1] ^ negative),
        ]
        top = exact[REGISTER_BITS - 1 :]
        over, sign, stores = Signal(), Signal(), Signal()
        m.d.comb += [
            over.eq(beyond | (top.any() & ~top.all())),
            sign.eq(Mux(beyond, below, exact[-1])),
            stores.eq(valids[10] & stage["stores"][10]),
        ]
        m.d.sync += [
            self.range.eq(over & stores),
            store.eq(stores | writing),
            store_address.eq(Cat(stage["d"][10], thread(10))),
            store_data.eq(
                Mux(over, Cat((~sign).replicate(REGISTER_BITS - 1), sign), exact[:REGISTER_BITS]).as_signed()
            ),
        ]
        with m.If(writing):
            index, of_thread = constants[: index_bits(CONSTANTS)], constants[index_bits(CONSTANTS) : -1]
            m.d.sync += [store_address.eq(Cat(index, Const(0, _REGISTER - len(index)), of_thread))]
            pair = job.mode == MiddleMode.CAYLEY
            values = {
                ZERO: Const(0, 1),
                UNIT_DIAGONAL: Mux(job.mode == MiddleMode.WOODBURY, job.unit, 0),
                UNIT_PAIR: Mux(pair, job.unit, 0),
                MINUS_UNIT_PAIR: Mux(pair, -job.unit, 0),
            } | {WEIGHTS + n: job.weights[n] for n in range(UNIT_PAIRS)}
            with m.Switch(index):
                for register, constant in values.items():
                    with m.Case(register):
                        m.d.sync += store_data.eq(constant)

        # Outputs: words of four columns, beside the registers.
        d = stage["d"][11]
        is_output = Signal()
        m.d.comb += is_output.eq(delayed(m, "is_output", stores & (stage["d"][10][4:] == OUTPUTS >> 4), 1)[1])
        slot, group, column = d[3], d[2], d[:2]
        for vector in range(p.vectors):
            memory = BlockMemory(
                m, f"outputs_{vector}", data.ArrayLayout(signed(REGISTER_BITS), TILE_COLUMNS), 4 * _CONTEXTS,
                granularity=REGISTER_BITS, target=self._target,
            )  # fmt: skip
            mine = is_output if p.vectors == 1 else is_output & (slot == vector)
            m.d.comb += [
                memory.write.en.eq(Mux(mine, 1 << column, 0)),
                memory.write.addr.eq(Cat(group, slot, thread(11), buffer[11])),
                memory.write.data.eq(Cat([store_data] * TILE_COLUMNS)),
                memory.address.eq(
                    Cat(self.m_group, self.m_slot if p.vectors == 1 else Const(vector, 1), self.m_context)
                ),
                self.m[vector].eq(memory.data),
            ]
        with m.If(self.release):
            m.d.sync += self.done.bit_select(self.release_context, 1).eq(0)
        with m.If(endings[11]):
            m.d.sync += self.done.bit_select(Cat(thread(11), buffer[11]), 1).eq(1)

        self._form(m, formed)
        return m

    def _job_programs(self) -> dict[tuple[MiddleMode, int, tuple[int, ...]], tuple[Operation, ...]]:
        """The program of every mode, number of tiles and slots in use."""
        p = self.params
        return {
            (mode, groups, slots): program(mode, groups, p.solve_slots(slots))
            for mode in MiddleMode
            for groups in range(1, p.max_groups + 1)
            for slots in ((0,), (1,), BOTH_SLOTS)
        }

    def _programs(self, m: Module, address: Value) -> tuple[Value, Value, Value]:
        """The operation at ``address`` a cycle ago; addresses of the first and the last one of the job's program."""
        job = self.job
        layout = _OperationLayout()
        words: list[int] = []
        starts: dict[tuple[Operation, ...], int] = {}
        for operations in self._job_programs().values():
            if operations not in starts:
                starts[operations] = len(words)
                words += [layout.const(asdict(operation)).as_value().value for operation in operations]
        depth = 1 << (len(words) - 1).bit_length()
        m.submodules.program = memory = Memory(
            shape=Shape.cast(layout).width, depth=depth, init=words, attrs={"ram_style": "block"}
        )
        read = memory.read_port()
        m.d.comb += read.addr.eq(address)
        bits = index_bits(depth)
        first, last = Signal(bits, reset_less=True), Signal(bits, reset_less=True)
        with m.Switch(Cat(job.last_group, job.mode, job.plain, job.transposed)):
            for (mode, groups, slots), operations in self._job_programs().items():
                with m.Case((groups - 1) | mode << 1 | sum(8 << slot for slot in slots)):
                    start = starts[operations]
                    m.d.sync += [first.eq(start), last.eq(start + len(operations) - 1)]
        return read.data, first, last

    def _load(
        self,
        m: Module,
        op: Any,
        stage: dict[str, list[Any]],
        buffer: list[Value],
        thread: Callable[[int], Value],
    ) -> Value:
        """What a load adds to its products, which are 0, at 6; 0 for other operations."""
        p, job = self.params, self.job
        context = Cat(thread(2), buffer[2])

        # Gram entries, 64 a context.
        self._entries = entries = BlockMemory(
            m, "entries", signed(p.gram_bits), 64 * _CONTEXTS, target=self._target
        )
        m.d.comb += entries.address.eq(Cat(op.a0[:6], context))
        entry = delayed(m, "entry", entries.data, 1)[1]

        # Projections: words of four columns.
        slot, group, column = op.a0[3], op.a0[2], op.a0[:2]
        words: list[tuple[Value, Value]] = []
        column_3, slot_3 = (delayed(m, f"word_{part}", of, 1)[1] for part, of in (("column", column), ("slot", slot)))
        shown = delayed(m, "shown", Mux(slot, job.transposed, job.plain), 1)[1] & stage["load_projection"][3]
        for vector in range(p.vectors):
            memory = BlockMemory(
                m, f"projections_{vector}", self.project[vector].shape(), 4 * _CONTEXTS, target=self._target
            )
            place = Cat(self.project_group, self.project_slot if p.vectors == 1 else Const(vector, 1))
            m.d.comb += [
                memory.write.en.eq(self.project_valid),
                memory.write.addr.eq(Cat(place, self.project_context)),
                memory.write.data.eq(self.project[vector]),
                memory.address.eq(Cat(group, slot, context)),
            ]
            mine = shown & (slot_3 == vector) if p.vectors == 2 else shown
            words += [(mine & (column_3 == n), memory.data[n]) for n in range(TILE_COLUMNS)]
        projection = Signal(signed(p.sum_bits), reset_less=True)
        m.d.sync += projection.eq(registered_choice(m, "word", signed(p.sum_bits), words))
        gram = Signal(signed(p.gram_bits), reset_less=True)
        m.d.sync += gram.eq(Mux(stage["load_gram"][4], entry, 0))

        load = Signal(signed(p.shifted_bits), reset_less=True)
        guarded = Cat(Const(0, p.gram_guard), gram).as_signed()
        m.d.sync += load.eq(guarded | projection)
        return load

    def _reciprocal(
        self, m: Module, total: Value, valid: Value, thread: Callable[[int], Value], r: Value, e: Value
    ) -> None:
        """Keeps r and e of the last determinant of each thread: ``r`` and ``e`` are those of stage 3."""
        # Leading one to the top, 16 places at 8, 8 at 9, 4 and 2 at 10, the last at 11.
        low = Signal()
        m.d.comb += low.eq(total[-1] | ~total[PIVOT_FLOOR_BITS:_DETERMINANT_BITS].any())
        rest: Value = total[:_DETERMINANT_BITS]
        places: list[Value] = []
        for steps in ((16,), (8,), (4, 2), (1,)):
            for step in steps:
                zero = ~rest[-step:].any()
                keep = _NORMAL_BITS + step - 1
                rest = Mux(zero, Cat(Const(0, step), rest[:-step])[-keep:], rest[-keep:])
                places.insert(0, zero)
            register = Signal(len(rest), name=f"rest_{steps[0]}", reset_less=True)
            m.d.sync += register.eq(rest)
            rest = register
            places = list(delayed(m, f"places_{steps[0]}", Cat(places), 1)[1])
        valids = delayed(m, "determinant_valid", valid, 7, reset_less=False)
        lows = delayed(m, "determinant_low", low, 6)
        m.d.sync += self.pivot.eq(valid & low)

        # Tables at 12, their register at 13, sum at 14.
        fraction = rest[:FRACTION_BITS]
        half = FRACTION_BITS - TABLE_BITS
        read = []
        for name, table, bits, address in (
            ("coarse", RECIPROCAL_COARSE, MANTISSA_BITS, fraction[half:]),
            ("fine", RECIPROCAL_FINE, FINE_BITS, Cat(fraction[:half], fraction[2 * half :])),
        ):
            memory = Memory(
                shape=unsigned(bits), depth=1 << TABLE_BITS, init=[value % (1 << bits) for value in table],
                attrs={"ram_style": "block"},
            )  # fmt: skip
            m.submodules[f"reciprocal_{name}"] = memory
            port = memory.read_port()
            m.d.comb += port.addr.eq(address)
            read.append(delayed(m, f"reciprocal_{name}", port.data, 1)[1])
        value = Signal(MANTISSA_BITS, reset_less=True)
        m.d.sync += value.eq(Mux(lows[6], 0, read[0] + read[1].as_signed()))
        exponent = delayed(m, "places", Cat(places), 3)[3]

        m.submodules.reciprocals = kept = Memory(
            shape=unsigned(MANTISSA_BITS + _EXPONENT_BITS), depth=THREADS, init=[]
        )
        write, port = kept.write_port(), kept.read_port(domain="comb")
        # Below the floor r is 0, and what it is shifted by makes no difference.
        top = Const(_DETERMINANT_BITS - 1 - _INVERSE_BITS, _EXPONENT_BITS)
        m.d.comb += [
            write.en.eq(valids[7]),
            write.addr.eq(thread(14)),
            write.data.eq(Cat(value, (top - exponent)[:_EXPONENT_BITS])),
            port.addr.eq(thread(3)),
            r.eq(port.data[:MANTISSA_BITS]),
            e.eq(port.data[MANTISSA_BITS:]),
        ]

    def _form(self, m: Module, formed: Value) -> None:
        """Gram entries of a phase from its sums, one a cycle; diagonal ones first where they come from squares."""
        p = self.params
        squares = p.config.factor_bits == 8
        sums = Signal.like(self.gram, reset_less=True)
        context, phase, last = Signal(range(_CONTEXTS)), Signal(2), Signal()
        count = Signal(range(_PAIRS + 1), init=_PAIRS)
        forming = Signal()
        m.d.comb += forming.eq(count != _PAIRS)
        with m.If(self.gram_valid):
            m.d.sync += [
                sums.eq(self.gram),
                context.eq(self.gram_context),
                phase.eq(self.gram_phase),
                last.eq(self.gram_last),
                count.eq(0),
            ]
        with m.Elif(forming):
            m.d.sync += count.eq(count + 1)
        order = sorted(range(_PAIRS), key=lambda n: (GRAM_PAIRS[n][0] != GRAM_PAIRS[n][1], n))
        given = [(count == n, sums[pair]) for n, pair in enumerate(order)]
        value = registered_choice(m, "value", signed(p.gram_sum_bits), given)
        i, j = Signal(2, reset_less=True), Signal(2, reset_less=True)
        place = Signal(4, reset_less=True)
        with m.Switch(count):
            for n, pair in enumerate(order):
                with m.Case(n):
                    m.d.sync += [place.eq(pair), i.eq(GRAM_PAIRS[pair][0]), j.eq(GRAM_PAIRS[pair][1])]
        valids = delayed(m, "form_valid", forming, 3, reset_less=False)
        ends = delayed(m, "form_end", forming & last & (count == _PAIRS - 1), 3, reset_less=False)
        places = delayed(m, "form_place", Cat(place, phase, context), 2)
        entry = Signal(signed(p.gram_bits))
        if squares:
            # Σ(x + y)² − Σx² − Σy² is twice the product; of x and x the square is four times Σx².
            own = Signal()
            m.d.comb += own.eq((i == j) & ~phase[1])
            parts: list[Value] = []
            for name, row, tile in (("p", i, phase[0]), ("q", j, phase[0] ^ phase[1])):
                m.submodules[f"squares_{name}"] = memory = Memory(
                    shape=signed(p.gram_bits), depth=MAX_COLUMNS, init=[]
                )
                write, read = memory.write_port(), memory.read_port(domain="comb")
                cycle = 1 if name == "p" else 2
                m.d.comb += [
                    write.en.eq(valids[1] & own),
                    write.addr.eq(Cat(i, phase[0])),
                    write.data.eq(value >> 2),
                    read.addr.eq(delayed(m, f"squares_{name}_address", Cat(row, tile), cycle)[cycle]),
                ]
                parts.append(read.data)
            held = delayed(m, "form_value", value, 1)[1]
            difference = Signal(signed(p.gram_sum_bits), reset_less=True)
            m.d.sync += difference.eq(held - parts[0])
            m.d.comb += entry.eq((difference - parts[1]) >> 1)
        else:
            m.d.comb += entry.eq(delayed(m, "form_value", value, 2)[2])
        write_port = self._entries.write
        m.d.comb += [
            write_port.en.eq(valids[3]),
            write_port.addr.eq(places[2]),
            write_port.data.eq(entry),
        ]
        with m.If(ends[3]):
            m.d.sync += formed.bit_select(places[2][6:], 1).eq(1)
