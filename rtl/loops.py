"""Loop programs in hardware: steps on the transport engine; energies, ratio, tables and histogram of loops."""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Const, Module, Mux, Shape, ShapeLike, Signal, Value, signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from dtp.config import REGISTER_BITS, Config
from dtp.holonomy import (
    BINS,
    COUNT_BITS,
    ENTRY_CYCLES,
    RATIO_BITS,
    RATIO_FRACTION_BITS,
    SUM_BITS,
    LoopError,
    LoopParams,
    ReportKind,
)
from dtp.transport import STATE_BITS
from rtl.lib.delay import delayed
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import Multiplier, Target
from rtl.solve import JobLayout
from rtl.transport import TransportCore

__all__ = [
    "HolonomyLoops",
    "LoopHeaderLayout",
    "LoopReportLayout",
    "LoopSequencer",
    "LoopStartLayout",
    "LoopStepLayout",
    "LoopUnit",
    "LoopWordLayout",
]


class LoopHeaderLayout(data.StructLayout):
    """Of one loop: ``used`` heads of ``heads``, ``block`` row-major, ``last`` of the program."""

    def __init__(self, params: LoopParams) -> None:
        super().__init__(
            {
                "tag": unsigned(16),
                "used": unsigned(2),
                "heads": data.ArrayLayout(unsigned(params.heads.bit_length()), 2),
                "block": unsigned((params.blocks**2).bit_length()),
                "last": unsigned(1),
            }
        )


class LoopWordLayout(data.StructLayout):
    """A word of start and end vector; ``saturated`` on any word flags the loop, ``last`` ends it."""

    def __init__(self, params: LoopParams) -> None:
        lanes = data.ArrayLayout(signed(STATE_BITS), params.lanes)
        super().__init__({"start": lanes, "end": lanes, "saturated": unsigned(1), "last": unsigned(1)})


class LoopReportLayout(data.StructLayout):
    """A loop's record or an entry of a table (docs/holonomy.md, 7)."""

    def __init__(self) -> None:
        super().__init__(
            {
                "kind": ReportKind,
                "index": unsigned(17),
                "numbers": data.ArrayLayout(unsigned(SUM_BITS), 3),
                "ratio": unsigned(RATIO_BITS),
                "saturated": unsigned(1),
                "last": unsigned(1),
            }
        )


class HolonomyLoops(wiring.Component):
    """Accounts of loops, bit for bit :class:`dtp.holonomy.LoopAccounts` (docs/holonomy.md, 7).

    One loop at a time: header, words, record, tables; after the last loop of a program all tables, which are cleared
    on the way. :func:`sim.cycles.loops.loops_timing` states every cycle. After reset the tables are cleared first.

    Parameters
    ----------
    params: sizes
    target: plain description or explicit ECP5 cells

    Members
    -------
    floor: In(32), least divisor, at least 1; constant while a program runs
    header: In(stream of :class:`LoopHeaderLayout`)
    i: In(stream of :class:`LoopWordLayout`)
    o: Out(stream of :class:`LoopReportLayout`)
    error: Out(:class:`dtp.holonomy.LoopError`), sticky, the first counts
    error_clear: In(1)
    """

    def __init__(self, params: LoopParams, *, target: Target = Target.GENERIC) -> None:
        self.params = params
        self._target = target
        super().__init__(
            {
                "floor": In(32),
                "header": In(stream.Signature(LoopHeaderLayout(params))),
                "i": In(stream.Signature(LoopWordLayout(params))),
                "o": Out(stream.Signature(LoopReportLayout())),
                "error": Out(LoopError),
                "error_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        p = self.params
        header = Signal(LoopHeaderLayout(p), reset_less=True)
        saturated = Signal()
        error = Signal(LoopError)
        issue, first = Signal(), Signal()
        energies = self._energies(m, issue, first)
        start, end, difference = energies

        # Restoring division; the first bit is the ratio's overflow.
        divisor = Signal(p.energy_bits, reset_less=True)
        below = Signal(reset_less=True)
        remainder = Signal(p.energy_bits + 1, reset_less=True)
        overflow_bits = RATIO_BITS - RATIO_FRACTION_BITS + 1
        dividend = Signal(overflow_bits, reset_less=True)
        quotient = Signal(RATIO_BITS + 1, reset_less=True)
        shifted = Cat(dividend[-1], remainder)
        trial = Signal(p.energy_bits + 2)
        fits = Signal()
        ratio = Signal(RATIO_BITS)
        m.d.comb += [
            trial.eq(shifted[: p.energy_bits + 1] - divisor),
            fits.eq(~trial[-1]),
            ratio.eq(quotient[:RATIO_BITS] | quotient[RATIO_BITS].replicate(RATIO_BITS)),
        ]

        # Tables.
        entry = data.StructLayout(
            {"sum": unsigned(SUM_BITS), "maximum": unsigned(RATIO_BITS), "count": unsigned(COUNT_BITS)}
        )
        table = BlockMemory(m, "tables", Shape.cast(entry).width, p.entries, target=self._target)
        read = data.View(entry, table.data)
        held = Signal(entry, reset_less=True)
        changed = Signal(entry)
        bins_at = p.heads + p.blocks**2
        bit_length = Signal(range(BINS))
        length = _bit_length(ratio)
        m.d.comb += [
            bit_length.eq(Mux(length[-1], BINS - 1, length)),
            changed.sum.eq(held.sum + ratio),
            changed.maximum.eq(Mux(held.maximum < ratio, ratio, held.maximum)),
            changed.count.eq(held.count + 1),
        ]
        m.d.sync += held.eq(read)
        place, turn = Signal(range(p.entries)), Signal(range(4))
        phase = Signal(range(max(ENTRY_CYCLES, p.energy_cycles, RATIO_BITS + 1)))
        credited = Array([header.used != 0, header.used[1], header.block < p.blocks**2, Const(1, 1)])
        there = Array([header.heads[0] < p.heads, header.heads[1] < p.heads, Const(1, 1), Const(1, 1)])
        places = Array([header.heads[0], header.heads[1], p.heads + header.block, bins_at + bit_length])
        m.d.comb += table.address.eq(place)

        words = Signal(range(p.max_words + 1))
        with m.FSM(name="state"):
            with m.State("clear"):
                m.d.comb += [table.write.en.eq(1), table.write.addr.eq(place), table.write.data.eq(0)]
                m.d.sync += place.eq(place + 1)
                with m.If(place == p.entries - 1):
                    m.d.sync += place.eq(0)
                    m.next = "idle"
            with m.State("idle"):
                m.d.comb += [self.header.ready.eq(1), first.eq(1)]
                with m.If(self.header.valid):
                    m.d.sync += [header.eq(self.header.payload), saturated.eq(0), words.eq(0)]
                    m.next = "words"
            with m.State("words"):
                m.d.comb += issue.eq(self.i.valid & (words != p.max_words))
                beyond = self.i.valid & (words == p.max_words)
                with m.If(beyond):
                    m.d.comb += [self.i.ready.eq(1), error.eq(LoopError.LENGTH)]
                with m.If(self.i.valid & self.i.ready):
                    m.d.sync += [saturated.eq(saturated | self.i.payload.saturated), phase.eq(0)]
                    with m.If(~beyond):
                        m.d.sync += words.eq(words + 1)
                    with m.If(self.i.payload.last):
                        m.next = "energies"
            with m.State("energies"):
                m.d.sync += phase.eq(phase + 1)
                with m.If(phase == p.energy_cycles - 2):
                    m.next = "compare"
            with m.State("compare"):
                m.d.sync += [below.eq(start < self.floor), phase.eq(0)]
                m.next = "divisor"
            with m.State("divisor"):
                m.d.sync += [
                    divisor.eq(Mux(below, self.floor, start)),
                    remainder.eq(difference[overflow_bits:]),
                    dividend.eq(difference[:overflow_bits]),
                ]
                m.next = "divide"
            with m.State("divide"):
                m.d.sync += [
                    remainder.eq(Mux(fits, trial, shifted)),
                    dividend.eq(dividend << 1),
                    quotient.eq(Cat(fits, quotient)),
                    phase.eq(phase + 1),
                    turn.eq(0),
                ]
                with m.If(phase == RATIO_BITS):
                    m.next = "record"
            with m.State("record"):
                m.d.comb += [
                    self.o.valid.eq(1),
                    self.o.payload.kind.eq(ReportKind.LOOP),
                    self.o.payload.index.eq(header.tag),
                    self.o.payload.ratio.eq(ratio),
                    self.o.payload.saturated.eq(saturated),
                ]
                m.d.comb += [
                    number.eq(value)
                    for number, value in zip(self.o.payload.numbers, (start, end, difference), strict=True)
                ]
                m.d.sync += [place.eq(places[turn]), phase.eq(0)]
                with m.If(self.o.ready):
                    m.next = "update"
            with m.State("update"):
                m.d.sync += phase.eq(phase + 1)
                with m.If(phase == ENTRY_CYCLES - 1):
                    wanted = credited[turn]
                    m.d.comb += [
                        table.write.en.eq(wanted & there[turn] & ~held.count.all()),
                        table.write.addr.eq(place),
                        table.write.data.eq(changed),
                    ]
                    with m.If(((turn < 2) & wanted & ~there[turn]) | ((turn == 2) & ~wanted)):
                        m.d.comb += error.eq(LoopError.CREDIT)
                    m.d.sync += [turn.eq(turn + 1), phase.eq(0), place.eq(places[(turn + 1)[:2]])]
                    with m.If(turn == 3):
                        m.d.sync += place.eq(0)
                        with m.If(header.last):
                            m.next = "read"
                        with m.Else():
                            m.next = "idle"
            with m.State("read"):
                m.next = "table"
            with m.State("table"):
                kind = Signal(ReportKind)
                base = Signal(range(p.entries))
                with m.If(place >= bins_at):
                    m.d.comb += [kind.eq(ReportKind.BIN), base.eq(bins_at)]
                with m.Elif(place >= p.heads):
                    m.d.comb += [kind.eq(ReportKind.BLOCK), base.eq(p.heads)]
                with m.Else():
                    m.d.comb += kind.eq(ReportKind.HEAD)
                is_bin = kind == ReportKind.BIN
                end_of_tables = Signal()
                m.d.comb += [
                    end_of_tables.eq(place == p.entries - 1),
                    self.o.valid.eq(1),
                    self.o.payload.kind.eq(kind),
                    self.o.payload.index.eq(place - base),
                    self.o.payload.numbers[0].eq(Mux(is_bin, 0, read.sum)),
                    self.o.payload.numbers[1].eq(Mux(is_bin, 0, read.maximum)),
                    self.o.payload.numbers[2].eq(read.count),
                    self.o.payload.last.eq(end_of_tables),
                    table.write.addr.eq(place),
                    table.write.data.eq(0),
                ]
                with m.If(self.o.ready):
                    m.d.comb += table.write.en.eq(1)
                    m.d.sync += place.eq(Mux(end_of_tables, 0, place + 1))
                    with m.If(end_of_tables):
                        m.next = "idle"
                    with m.Else():
                        m.next = "read"

        with m.If(self.error_clear):
            m.d.sync += self.error.eq(LoopError.NONE)
        with m.Elif(self.error == LoopError.NONE):
            m.d.sync += self.error.eq(error)
        return m

    def _energies(self, m: Module, issue: Signal, first: Signal) -> list[Signal]:
        """Sums of squares of start, end and difference; a step issues one of the three of ``multipliers`` lanes."""
        p = self.params
        steps = p.lanes // p.multipliers
        chunk, kind = Signal(range(max(2, steps))), Signal(range(3))
        last_chunk = chunk == steps - 1
        with m.If(issue):
            m.d.sync += kind.eq(Mux(kind == 2, 0, kind + 1))
            with m.If(kind == 2):
                m.d.sync += chunk.eq(Mux(last_chunk, 0, chunk + 1))
        with m.If(issue & (kind == 2) & last_chunk):
            m.d.comb += self.i.ready.eq(1)
        chunks = data.ArrayLayout(data.ArrayLayout(signed(STATE_BITS), p.multipliers), steps)
        vectors = [data.View(chunks, vector.as_value()) for vector in (self.i.payload.start, self.i.payload.end)]
        valid = delayed(m, "valid", issue, p.energy_cycles - 1, reset_less=False)
        products: list[Value] = []
        for n in range(p.multipliers):
            before, after = (vector[chunk if steps > 1 else 0][n] for vector in vectors)
            operand = Signal(signed(REGISTER_BITS), name=f"operand_{n}", reset_less=True)
            # −start, end, end − start.
            m.d.sync += operand.eq(Mux(kind != 0, after, 0) - Mux(kind != 1, before, 0))
            m.submodules[f"multiplier_{n}"] = multiplier = Multiplier(REGISTER_BITS, REGISTER_BITS, target=self._target)
            m.d.comb += [multiplier.a.eq(operand), multiplier.a_enable.eq(1), multiplier.b.eq(operand)]
            products.append(multiplier.o)
        level = 0
        while len(products) > 1:
            products = [products[n] + products[n + 1] for n in range(0, len(products), 2)]
            level += 1
            if level % 2 == 0 or len(products) == 1:
                products = [delayed(m, f"tree_{level}_{n}", value, 1)[1] for n, value in enumerate(products)]
        # The three sums go round: what comes is added to the oldest.
        sums = [Signal(p.energy_bits, name=f"energy_{n}", reset_less=True) for n in range(3)]
        with m.If(first):
            m.d.sync += [total.eq(0) for total in sums]
        with m.Elif(valid[p.energy_cycles - 1]):
            m.d.sync += [sums[2].eq(sums[0] + products[0]), sums[1].eq(sums[2]), sums[0].eq(sums[1])]
        return sums


class LoopStepLayout(data.StructLayout):
    """One step of the engine: its job, the slot whose output counts, ``first`` and ``last`` of its loop."""

    def __init__(self, job: ShapeLike) -> None:
        super().__init__({"job": job, "transposed": unsigned(1), "first": unsigned(1), "last": unsigned(1)})


class LoopStartLayout(data.StructLayout):
    """A word of a start vector; ``last`` ends it."""

    def __init__(self, params: LoopParams) -> None:
        lanes = data.ArrayLayout(signed(STATE_BITS), params.lanes)
        super().__init__({"data": lanes, "last": unsigned(1)})


class LoopSequencer(wiring.Component):
    """Walks loops on the transport engine: the state of a step is the output of the one before.

    A step's job is handed to the engine, then the state: the start vector in the first step of a loop, later what came
    back. After a loop's last step start and end vector leave side by side for :class:`HolonomyLoops`, flagged if any
    lane saturated in any of its steps. Factors go to the engine by themselves. One step at a time; a word is sent every
    two cycles and taken every cycle.

    Parameters
    ----------
    params: sizes; ``lanes`` are those of one vector of the engine
    job: shape of the engine's jobs, passed through
    vectors: of the engine's words; the state is sent in both slots, and the output taken of the one that the step says
    target: what the memories are for

    Members
    -------
    step: In(stream of :class:`LoopStepLayout`), steps of all loops in order of time
    start: In(stream of :class:`LoopStartLayout`), one vector a loop
    o: Out(stream of :class:`LoopWordLayout`)
    engine_job: Out(stream of ``job``)
    engine_state: Out(stream of vectors × lanes)
    engine_o: In(stream of ``data``, vectors × lanes, and ``last`` of the vector)
    engine_saturations: In(16), of the job in force; engine_idle: In(1), it is complete
    error: Out(:class:`dtp.holonomy.LoopError`), LENGTH or SEQUENCE, sticky, the first counts
    error_clear: In(1)
    """

    def __init__(
        self, params: LoopParams, job: ShapeLike, *, vectors: int = 1, target: Target = Target.GENERIC
    ) -> None:
        self.params = params
        self._vectors = vectors
        self._target = target
        lanes = data.ArrayLayout(signed(STATE_BITS), params.lanes)
        words = data.ArrayLayout(lanes, vectors)
        super().__init__(
            {
                "step": In(stream.Signature(LoopStepLayout(job))),
                "start": In(stream.Signature(LoopStartLayout(params))),
                "o": Out(stream.Signature(LoopWordLayout(params))),
                "engine_job": Out(stream.Signature(job)),
                "engine_state": Out(stream.Signature(words)),
                "engine_o": In(stream.Signature(data.StructLayout({"data": words, "last": unsigned(1)}))),
                "engine_saturations": In(16),
                "engine_idle": In(1),
                "error": Out(LoopError),
                "error_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        p = self.params
        bits = p.lanes * STATE_BITS
        starts, states = (BlockMemory(m, name, bits, p.max_words, target=self._target) for name in ("starts", "states"))
        place = Signal(range(p.max_words))
        last_place = Signal.like(place)
        transposed, last, open_loop, saturated = Signal(), Signal(), Signal(), Signal()
        error = Signal(LoopError)
        full, at_last = Signal(), Signal()
        m.d.comb += [
            starts.address.eq(place),
            states.address.eq(place),
            full.eq(place == p.max_words - 1),
            at_last.eq(place == last_place),
            self.engine_job.payload.eq(self.step.payload.job),
        ]
        m.d.comb += [
            self.o.payload.start.eq(starts.data),
            self.o.payload.end.eq(states.data),
            self.o.payload.saturated.eq(saturated),
            self.o.payload.last.eq(at_last),
        ]
        for memory in (starts, states):
            m.d.comb += memory.write.addr.eq(place)
        with m.FSM(name="state"):
            with m.State("job"):
                m.d.comb += [
                    self.engine_job.valid.eq(self.step.valid),
                    self.step.ready.eq(self.engine_job.ready),
                ]
                with m.If(self.step.valid & self.step.ready):
                    step = self.step.payload
                    with m.If(step.first == open_loop):
                        m.d.comb += error.eq(LoopError.SEQUENCE)
                    m.d.sync += [transposed.eq(step.transposed), last.eq(step.last), open_loop.eq(1), place.eq(0)]
                    with m.If(open_loop):
                        m.next = "read state"
                    with m.Else():
                        m.d.sync += saturated.eq(0)
                        m.next = "start"
            with m.State("start"):
                m.d.comb += [
                    self.engine_state.valid.eq(self.start.valid),
                    self.start.ready.eq(self.engine_state.ready),
                    starts.write.en.eq(1),
                    starts.write.data.eq(self.start.payload.data),
                ]
                m.d.comb += [word.eq(self.start.payload.data) for word in self.engine_state.payload]
                with m.If(self.start.valid & self.start.ready):
                    m.d.sync += [place.eq(place + 1), last_place.eq(place)]
                    with m.If(self.start.payload.last | full):
                        m.d.sync += place.eq(0)
                        m.next = "result"
                    with m.If(full & ~self.start.payload.last):
                        m.d.comb += error.eq(LoopError.LENGTH)
                        m.next = "drop"
            with m.State("drop"):
                m.d.comb += self.start.ready.eq(1)
                with m.If(self.start.valid & self.start.payload.last):
                    m.next = "result"
            with m.State("read state"):
                m.next = "state"
            with m.State("state"):
                m.d.comb += self.engine_state.valid.eq(1)
                m.d.comb += [word.eq(states.data) for word in self.engine_state.payload]
                with m.If(self.engine_state.ready):
                    m.d.sync += place.eq(Mux(at_last, 0, place + 1))
                    with m.If(at_last):
                        m.next = "result"
                    with m.Else():
                        m.next = "read state"
            with m.State("result"):
                slot = transposed if self._vectors == 2 else 0
                m.d.comb += [
                    self.engine_o.ready.eq(1),
                    states.write.en.eq(self.engine_o.valid),
                    states.write.data.eq(self.engine_o.payload.data[slot]),
                ]
                with m.If(self.engine_o.valid):
                    m.d.sync += place.eq(place + 1)
                    with m.If(self.engine_o.payload.last):
                        m.d.sync += place.eq(0)
                        m.next = "complete"
            with m.State("complete"):
                with m.If(self.engine_idle):
                    m.d.sync += saturated.eq(saturated | self.engine_saturations.any())
                    with m.If(last):
                        m.d.sync += open_loop.eq(0)
                        m.next = "read pair"
                    with m.Else():
                        m.next = "job"
            with m.State("read pair"):
                m.next = "pair"
            with m.State("pair"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.d.sync += place.eq(Mux(at_last, 0, place + 1))
                    with m.If(at_last):
                        m.next = "job"
                    with m.Else():
                        m.next = "read pair"
        with m.If(self.error_clear):
            m.d.sync += self.error.eq(LoopError.NONE)
        with m.Elif(self.error == LoopError.NONE):
            m.d.sync += self.error.eq(error)
        return m


class LoopUnit(wiring.Component):
    """Loop programs from steps to tables: the sequencer, a transport engine of its own, the accounts.

    A program comes on four streams, each in the order of its loops: a header a loop, its start vector, its steps, and
    the factors of each step. Out come a record a loop and, after the last one, the tables. Loops go one by one, so
    that a step takes the latency of the engine for one token; :func:`sim.cycles.loops.unit_timing` states every cycle.

    Parameters
    ----------
    config: the processor
    params: of the accounts, with the lanes of the engine
    target: plain description or explicit ECP5 cells

    Members
    -------
    floor: In(32), least divisor, at least 1; constant while a program runs
    header: In(stream of :class:`LoopHeaderLayout`)
    step: In(stream of :class:`LoopStepLayout`); a job has one token and one slot
    start: In(stream of :class:`LoopStartLayout`)
    factors: In(stream of tile_rows × 4 × signed(factor_bits)), words of a step's token
    o: Out(stream of :class:`LoopReportLayout`)
    error: Out(:class:`dtp.holonomy.LoopError`), sticky, the first of the accounts or, while they have none, the first
        of the sequencer
    transport_error: Out(3), :class:`dtp.solve.TransportError` flags of all steps, sticky
    error_clear: In(1)
    """

    def __init__(self, config: Config, params: LoopParams, *, target: Target = Target.GENERIC) -> None:
        self._accounts = HolonomyLoops(params, target=target)
        self._engine = engine = TransportCore(config, target=target)
        vectors = engine.params.vectors
        self._sequencer = LoopSequencer(params, JobLayout(engine.params), vectors=vectors, target=target)
        super().__init__(
            {
                "floor": In(32),
                "header": self._accounts.signature.members["header"],
                "step": self._sequencer.signature.members["step"],
                "start": self._sequencer.signature.members["start"],
                "factors": engine.signature.members["factors"],
                "o": Out(stream.Signature(LoopReportLayout())),
                "error": Out(LoopError),
                "transport_error": Out(3),
                "error_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.accounts, m.submodules.engine = accounts, engine = self._accounts, self._engine
        m.submodules.sequencer = sequencer = self._sequencer
        for port, inner in (
            (self.header, accounts.header), (self.step, sequencer.step), (self.start, sequencer.start),
            (self.factors, engine.factors),
        ):  # fmt: skip
            wiring.connect(m, wiring.flipped(port), inner)
        wiring.connect(m, sequencer.engine_job, engine.job)
        wiring.connect(m, sequencer.engine_state, engine.state)
        wiring.connect(m, sequencer.o, accounts.i)
        wiring.connect(m, accounts.o, wiring.flipped(self.o))
        m.d.comb += [
            sequencer.engine_o.valid.eq(engine.o.valid),
            sequencer.engine_o.payload.data.eq(engine.o.payload.data),
            sequencer.engine_o.payload.last.eq(engine.o.payload.last),
            engine.o.ready.eq(sequencer.engine_o.ready),
            sequencer.engine_saturations.eq(engine.saturations),
            sequencer.engine_idle.eq(engine.idle),
            accounts.floor.eq(self.floor),
            accounts.error_clear.eq(self.error_clear),
            sequencer.error_clear.eq(self.error_clear),
            self.error.eq(Mux(accounts.error == LoopError.NONE, sequencer.error, accounts.error)),
        ]
        with m.If(self.error_clear):
            m.d.sync += self.transport_error.eq(0)
        with m.Elif(~engine.idle):
            m.d.sync += self.transport_error.eq(self.transport_error | engine.error)
        return m


def _bit_length(value: Signal) -> Value:
    """Number of bits without leading zeros: for 32 bits the top bit of the result alone says 32."""
    found: Value = Const(0, len(value).bit_length())
    for n in range(len(value)):
        found = Mux(value[n], n + 1, found)
    return found
