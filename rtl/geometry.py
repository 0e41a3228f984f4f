"""The geometry side of gated attention: runs of transports and tables in, rows of the block mask out."""

from __future__ import annotations

from dataclasses import dataclass

from amaranth.hdl import Cat, Const, Module, Mux, Shape, Signal, Value, unsigned
from amaranth.lib import data, enum, stream, wiring
from amaranth.lib.wiring import In, Out

from dtp.config import Config
from dtp.gated import FIELDS, FLAGS, MAGIC, MAX_HEADS, ROW_QUEUE, VERSION, GatedParams, GeometryError
from dtp.holonomy import CASES, SHIFT_LIMIT, FieldError
from dtp.pruner import PrunerError, PrunerParams
from dtp.solve import MiddleMode
from dtp.transport import STATE_BITS
from rtl.attention import InputLayout
from rtl.holonomy import HolonomyField
from rtl.layouts import RowLayout
from rtl.lib.delay import delayed
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import Target
from rtl.lib.streams import BlockQueue, ForwardRegister
from rtl.pruner import CommandLayout, Pruner, ScoreBeatLayout
from rtl.transport import TransportCore

__all__ = ["Geometry", "SettingsLayout", "descriptor_fault", "descriptor_fields"]

_SETTINGS = (
    "fresh", "weight", "maximum", "step", "gate", "theta_low", "theta_high", "budget", "band", "band_low", "band_high",
)  # fmt: skip
_COUNT_BITS = 16
CHIP_MULTIPLIERS = 156
"""18 × 18 multipliers of the largest ECP5."""


class SettingsLayout(data.StructLayout):
    """What a register says of every head, fields of :class:`dtp.pruner.HeadCommand`."""

    def __init__(self, params: PrunerParams) -> None:
        command = CommandLayout(params)
        super().__init__({name: command[name].shape for name in _SETTINGS})


class State(enum.Enum, shape=4):  # type: ignore[call-arg]
    """What comes next on the input."""

    DESCRIPTOR = 0
    CHECK = 1
    START = 2
    TABLE = 3
    PROBE = 4
    FACTORS = 5
    PASS = 6
    DROP = 7


@dataclass(frozen=True)
class _Passes:
    """Where a stream is in the passes of a run (:meth:`dtp.gated.Run.passes`).

    Members
    -------
    step: the head, the number of heads where the first one comes again
    first, last: whether the pass is
    plain, transposed: slots of the pass
    turns: the next pass is a job of its own
    """

    step: Signal
    first: Signal
    last: Signal
    plain: Signal
    transposed: Signal
    turns: Signal

    def begin(self, holonomy: Value, alone: Value) -> list[object]:
        """To the first pass; of tables alone it is that of head 0, the last if that is ``alone``."""
        return [
            self.step.eq(~holonomy), self.first.eq(holonomy), self.last.eq(alone & ~holonomy),
            self.plain.eq(1), self.transposed.eq(~holonomy),
        ]  # fmt: skip


@dataclass(frozen=True)
class _Counter:
    """Places of a stream of passes × tokens × words, and ``last`` of the inner two."""

    passes: _Passes
    token: Signal
    word: Signal
    word_last: Value
    token_last: Value


class Geometry(wiring.Component):
    """Mask rows of the heads of a run (docs/gated.md, 2 to 5).

    Passes as :meth:`dtp.gated.Run.passes` lists them: in the plain slot the engine applies the transport of the pass's
    head to its probe, in the transposed slot its transpose to what the head before left there, whose result is the
    field of both. Rows of a head leave while the next pass goes on.

    Throughput: that of the engine, ``docs/transport.md``, 5. Stalls: a descriptor is taken when the run before has been
    answered, and its run begins when fewer than half of the places of the row queue are taken; then nothing waits for
    the rows to be taken.
    :mod:`sim.cycles.gated` states every cycle.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells

    Members
    -------
    i: In(stream of :class:`rtl.attention.InputLayout`)
    rows: Out(stream of :class:`rtl.layouts.RowLayout`)
    settings: In(:class:`SettingsLayout`), still while ``busy``
    clear: In(1), forgets errors and counts
    busy: Out(1), a run is inside; drained: Out(1), none is, and no row is left
    error: Out(:class:`dtp.gated.GeometryError`), the first since reset or ``clear``
    failed: Out(1), a run was refused since then
    saturations: Out(16), of the newest run with holonomy
    transport_error: Out(3), flags; field_error, field_saturated, pruner_error: Out; since reset or ``clear``
    kept, legal: Out(32), blocks; skipped, heads: Out(16), heads; since then
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self.params = p = GatedParams(config)
        p.check()
        self._target = target
        super().__init__(
            {
                "i": In(stream.Signature(InputLayout(config))),
                "rows": Out(stream.Signature(RowLayout(p.max_blocks))),
                "settings": In(SettingsLayout(p.pruner)),
                "clear": In(1),
                "busy": Out(1),
                "drained": Out(1),
                "error": Out(GeometryError),
                "failed": Out(1),
                "transport_error": Out(3),
                "saturations": Out(_COUNT_BITS),
                "field_error": Out(FieldError),
                "field_saturated": Out(1),
                "pruner_error": Out(PrunerError),
                "kept": Out(32),
                "legal": Out(32),
                "skipped": Out(_COUNT_BITS),
                "heads": Out(_COUNT_BITS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        p = self.params
        m.submodules.core = core = TransportCore(
            p.engine, target=self._target, logic_products=self._logic_products(), open_ended=True
        )
        m.submodules.field = field = HolonomyField(p.field, target=self._target)
        m.submodules.pruner = pruner = Pruner(p.pruner, target=self._target)
        table = BlockQueue(ScoreBeatLayout(p.pruner), 2 * p.max_blocks**2, target=self._target)
        queue = BlockQueue(self.rows.payload.shape(), ROW_QUEUE, target=self._target)
        m.submodules.table, m.submodules.queue = table, queue
        wiring.connect(m, pruner.o, queue.i)
        wiring.connect(m, queue.o, wiring.flipped(self.rows))
        wiring.connect(m, table.o, pruner.i_table)
        m.d.comb += [
            pruner.i_holonomy.valid.eq(field.o.valid),
            pruner.i_holonomy.payload.score.eq(field.o.payload.score),
            pruner.i_holonomy.payload.last.eq(field.o.payload.end),
            field.o.ready.eq(pruner.i_holonomy.ready),
            self.drained.eq(~self.busy & queue.empty),
            self.saturations.eq(core.saturations),
            self.field_error.eq(field.error),
            self.field_saturated.eq(field.saturated),
            self.pruner_error.eq(pruner.error),
            field.error_clear.eq(self.clear),
            pruner.clear.eq(self.clear),
        ]

        # The engine's own flags are those of its job; here they stay.
        with m.If(self.clear):
            m.d.sync += self.transport_error.eq(0)
        with m.Elif(~core.idle):
            m.d.sync += self.transport_error.eq(self.transport_error | core.error)
        fields, start, probes, probe_memory = self._load(m, core, table, queue)
        self._heads(m, fields, start, pruner)
        self._transports(m, fields, start, core, field, probes, probe_memory)
        return m

    def _logic_products(self) -> int:
        """Products of the engine without a multiplier of the chip, where the field takes the last ones."""
        c, p = self.config, self.params
        tile = c.macs + c.lift_tokens + c.normaliser_lanes
        engine = c.transport_lanes * c.transport_vectors + 2 * c.solve_lanes
        return max(0, min(p.field.multipliers, tile + engine + p.field.multipliers - CHIP_MULTIPLIERS))

    # ---- input -----------------------------------------------------------------------------------------------

    def _load(
        self, m: Module, core: TransportCore, table: BlockQueue, queue: BlockQueue
    ) -> tuple[dict[str, Value], Signal, Signal, BlockMemory]:
        """Beats to descriptor, tables, probes and factors.

        Fields of the descriptor and its flags; the cycle in which a run starts; probes loaded; their memory.
        """
        c, p = self.config, self.params
        bits = 8 * c.input_bytes
        m.submodules.input = source = ForwardRegister(self.i.payload.shape())
        wiring.connect(m, wiring.flipped(self.i), source.i)
        beat, beat_last = source.o.payload.data, source.o.payload.last

        # Descriptor.
        head = Signal(p.descriptor_beats * bits, reset_less=True)
        fields = descriptor_fields(head)
        fault = Signal(GeometryError)
        m.d.sync += fault.eq(descriptor_fault(p, fields))
        fields["heads"] = fields["heads"][: MAX_HEADS.bit_length()]
        blocks_less_1 = ((fields["tokens"] - 1) >> (c.block.bit_length() - 1))[: p.pruner.index_bits]
        fields["last_block"] = last_block = Signal(p.pruner.index_bits)
        fields["last_word"] = Signal(range(max(2, p.max_words)))
        fields["last_token"] = Signal(range(p.max_tokens))
        m.d.sync += [
            last_block.eq(blocks_less_1),
            fields["last_word"].eq(fields["words"] - 1),
            fields["last_token"].eq(fields["tokens"] - 1),
        ]

        state, following = Signal(State), Signal(State)
        ended, start = Signal(), Signal()
        section_end = Signal()
        passes = self._passes(m, "load", fields, section_end)
        # Words of several beats, the lowest first.
        longest = max(p.probe_beats, p.factor_beats)
        before = Signal((longest - 1) * bits, reset_less=True)
        count = Signal(range(max(longest, p.descriptor_beats)))
        word = Signal(range(max(p.max_words, p.transport.max_words) * p.transport.max_groups))
        token = Signal(range(p.max_tokens))
        groups = fields["two_groups"]
        factor_last, token_last, probe_last = Signal(), Signal(), Signal()
        m.d.comb += [
            factor_last.eq(word == Mux(groups, Cat(Const(1, 1), fields["last_word"]), fields["last_word"])),
            token_last.eq(token == fields["last_token"]),
            probe_last.eq(word == fields["last_word"]),
        ]
        whole = {"probe": Signal(name="probe_whole"), "factor": Signal(name="factor_whole")}
        contents = {}
        for name, parts in (("probe", p.probe_beats), ("factor", p.factor_beats)):
            m.d.comb += whole[name].eq(count == parts - 1)
            contents[name] = Cat(before[len(before) - (parts - 1) * bits :], beat)

        # Tables: a score a beat.
        score_row, score_column = Signal(p.pruner.index_bits), Signal(p.pruner.index_bits)
        column_last, score_last = Signal(), Signal()
        m.d.comb += [
            column_last.eq(score_column == last_block),
            score_last.eq(column_last & (score_row == last_block)),
            table.i.payload.score.eq(beat),
            table.i.payload.last.eq(score_last),
        ]

        # Probes: of this pass and the one before.
        probes, probes_used = Signal(range(MAX_HEADS + 1)), Signal(range(MAX_HEADS + 1))
        self._probes_used = probes_used
        memory = BlockMemory(m, "probes", unsigned(p.probe_word_bits), 2 * _power(p.max_words), target=self._target)
        probe_free, taken_probe = Signal(), Signal()
        m.d.comb += taken_probe.eq(source.o.valid & probe_free & whole["probe"])
        with m.If(start):
            m.d.sync += probe_free.eq(1)
        with m.Else():
            m.d.sync += probe_free.eq((passes.step == probes_used) | (passes.step == probes_used + 1))
        m.d.comb += [
            memory.write.addr.eq(Cat(word[: (_power(p.max_words) - 1).bit_length()], passes.step[0])),
            memory.write.data.eq(contents["probe"][: p.probe_word_bits]),
            core.factors.payload.eq(contents["factor"][: p.transport.factor_word_bits]),
        ]

        # Factors of a pass that is another job wait for it.
        fed, waits = Signal(), Signal()
        with m.If(section_end):
            m.d.sync += waits.eq(passes.turns)
        with m.Elif(core.idle):
            m.d.sync += waits.eq(0)
        m.d.comb += fed.eq(source.o.valid & whole["factor"] & ~waits)
        taken, finished = Signal(), Signal()  # a beat of the run is used; it is the run's last
        behind_table = Mux(passes.plain, State.PROBE, State.FACTORS)
        m.d.comb += following.eq(Mux(fields["table"] & passes.transposed, State.TABLE, behind_table))
        with m.Switch(state):
            with m.Case(State.DESCRIPTOR):
                # The fields of the run before are in use until it has been answered.
                m.d.comb += source.o.ready.eq(~self.busy)
                m.d.sync += [ended.eq(0), word.eq(0), token.eq(0)]
                with m.If(source.o.valid & ~self.busy):
                    m.d.sync += [head.eq(Cat(head, beat)[-len(head) :]), count.eq(count + 1)]
                    with m.If(beat_last | (count == p.descriptor_beats - 1)):
                        m.d.sync += [count.eq(0), ended.eq(beat_last), state.eq(State.CHECK)]
            with m.Case(State.CHECK):
                m.d.sync += [state.eq(State.START), *passes.begin(fields["holonomy"], fields["heads"] == 1)]
            with m.Case(State.START):
                with m.If(ended | (fault != GeometryError.NONE)):
                    m.d.comb += self._refuse(m, Mux(ended, GeometryError.CUT, fault))
                    m.d.sync += state.eq(Mux(ended, State.DESCRIPTOR, State.DROP))
                with m.Elif(~queue.level[-1] & ~queue.level[-2]):
                    m.d.comb += start.eq(1)
                    m.d.sync += [
                        probes.eq(0),
                        state.eq(Mux(fields["holonomy"], State.PROBE, State.TABLE)),
                    ]
            with m.Case(State.TABLE):
                m.d.comb += [
                    table.i.valid.eq(source.o.valid),
                    taken.eq(source.o.valid & table.i.ready),
                    finished.eq(score_last & ~fields["holonomy"] & passes.last),
                ]
                with m.If(taken):
                    m.d.sync += score_column.eq(Mux(column_last, 0, score_column + 1))
                    with m.If(column_last):
                        m.d.sync += score_row.eq(Mux(score_last, 0, score_row + 1))
                    with m.If(score_last):
                        m.d.sync += state.eq(behind_table)
                        with m.If(~fields["holonomy"]):
                            m.d.comb += section_end.eq(1)
            with m.Case(State.PROBE):
                m.d.comb += [taken.eq(source.o.valid & probe_free), memory.write.en.eq(taken_probe)]
                with m.If(taken & whole["probe"]):
                    m.d.sync += word.eq(Mux(probe_last, 0, word + 1))
                    with m.If(probe_last):
                        m.d.sync += [state.eq(State.FACTORS), probes.eq(probes + 1)]
            with m.Case(State.FACTORS):
                m.d.comb += [
                    core.factors.valid.eq(fed),
                    taken.eq(Mux(whole["factor"], fed & core.factors.ready, source.o.valid)),
                    finished.eq(whole["factor"] & factor_last & token_last & passes.last),
                ]
                with m.If(taken & whole["factor"]):
                    m.d.sync += word.eq(Mux(factor_last, 0, word + 1))
                    with m.If(factor_last):
                        m.d.sync += token.eq(Mux(token_last, 0, token + 1))
                        m.d.comb += section_end.eq(token_last)
            with m.Case(State.PASS):
                m.d.sync += state.eq(following)
            with m.Case(State.DROP):
                m.d.comb += source.o.ready.eq(1)
                with m.If(source.o.valid & beat_last):
                    m.d.sync += state.eq(State.DESCRIPTOR)
        with m.If(taken):
            # A last beat that comes early stays where it is and stands for those that are missing.
            m.d.comb += source.o.ready.eq(~beat_last | finished)
            m.d.sync += ended.eq(ended | beat_last)
            if longest > 1:
                m.d.sync += before.eq(Cat(before, beat)[-len(before) :])
            with m.If(state != State.TABLE):
                m.d.sync += count.eq(Mux(Mux(state == State.PROBE, whole["probe"], whole["factor"]), 0, count + 1))
        with m.If(section_end):
            m.d.sync += state.eq(State.PASS)
            with m.If(finished):
                m.d.sync += state.eq(Mux(beat_last, State.DESCRIPTOR, State.DROP))
        with m.If(self.clear):
            m.d.sync += [self.error.eq(GeometryError.NONE), self.failed.eq(0)]
        with m.Elif(taken & ~ended & (beat_last != finished) & (self.error == GeometryError.NONE)):
            m.d.sync += self.error.eq(Mux(beat_last, GeometryError.EARLY_LAST, GeometryError.LATE_LAST))
        with m.Elif(self._refused):
            m.d.sync += self.failed.eq(1)
            with m.If(self.error == GeometryError.NONE):
                m.d.sync += self.error.eq(self._refusal)
        return fields, start, probes, memory

    def _passes(self, m: Module, name: str, fields: dict[str, Value], ends: Value) -> _Passes:
        """Passes that go on with ``ends``: where a word has one vector the second head has a pass for each slot."""
        paired = self.params.transport.vectors == 2
        step = Signal(range(MAX_HEADS + 1), name=f"{name}_step")
        first, last, nears, plain, transposed = (
            Signal(name=f"{name}_{part}") for part in ("first", "last", "nears", "plain", "transposed")
        )
        stays, turns = Signal(name=f"{name}_stays"), Signal(name=f"{name}_turns")
        m.d.sync += nears.eq(step + 1 == fields["heads"])  # of the step a cycle ago; passes are longer
        m.d.comb += [
            stays.eq(0 if paired else ~plain & ~last),
            turns.eq(0 if paired else ~(plain & transposed) | nears),
        ]
        with m.If(ends):
            m.d.sync += [
                step.eq(step + ~stays),
                first.eq(0),
                last.eq(~stays & nears),
                plain.eq(stays | (~nears & (paired | ~first))),
                transposed.eq(~stays),
            ]
        return _Passes(step, first, last, plain, transposed, turns)

    def _refuse(self, m: Module, code: Value) -> list[object]:
        self._refused, self._refusal = Signal(), Signal(GeometryError)
        return [self._refused.eq(1), self._refusal.eq(code)]

    # ---- heads -----------------------------------------------------------------------------------------------

    def _heads(self, m: Module, fields: dict[str, Value], start: Signal, pruner: Pruner) -> None:
        """The pruner's command of one head after the other, and what its reports add up to."""
        head = Signal(range(MAX_HEADS))
        command, report = pruner.command, pruner.report
        with m.If(start):
            m.d.sync += [head.eq(0), self.busy.eq(1)]
        with m.Elif(command.valid & command.ready):
            m.d.sync += head.eq(head + 1)
            with m.If(head + 1 == fields["heads"]):
                m.d.sync += self.busy.eq(0)
        m.d.comb += [
            command.valid.eq(self.busy),
            command.payload.head.eq(head),
            command.payload.last_block.eq(fields["last_block"]),
            command.payload.last_valid.eq(fields["last_block"]),
            command.payload.causal.eq(fields["causal"]),
            command.payload.source.eq(Cat(fields["holonomy"], fields["table"])),
            *(command.payload[name].eq(self.settings[name]) for name in _SETTINGS),
            report.ready.eq(1),
        ]
        with m.If(self.clear):
            m.d.sync += [self.kept.eq(0), self.legal.eq(0), self.skipped.eq(0), self.heads.eq(0)]
        with m.Elif(report.valid):
            m.d.sync += [
                self.kept.eq(self.kept + report.payload.kept),
                self.legal.eq(self.legal + report.payload.legal),
                self.skipped.eq(self.skipped + (report.payload.skipped & ~self.skipped.all())),
                self.heads.eq(self.heads + ~self.heads.all()),
            ]

    # ---- transports ------------------------------------------------------------------------------------------

    def _transports(
        self,
        m: Module,
        fields: dict[str, Value],
        start: Signal,
        core: TransportCore,
        field: HolonomyField,
        probes: Signal,
        probe_memory: BlockMemory,
    ) -> None:
        """States into the engine, transported probes into their memory, relative transports into the field."""
        p = self.params
        job, pair_job = core.job.payload, field.job.payload
        holonomy = Signal()
        paired = p.transport.vectors == 2
        # One job where a word has both slots, else one for every change of slots.
        more = Signal()
        into_ends, into_last, takes = Signal(), Signal(), Signal()
        into = self._counter(m, "into", fields, takes & into_last)
        with m.If(holonomy):
            m.d.sync += more.eq(not paired)
        with m.Elif(core.idle & into.passes.last):
            m.d.sync += more.eq(0)
        m.d.comb += [
            holonomy.eq(start & fields["holonomy"]),
            core.job.valid.eq(holonomy | more),
            core.again.eq(more),
            job.mode.eq(MiddleMode.CAYLEY),
            job.last_group.eq(fields["two_groups"]),
            job.last_word.eq(fields["last_word"]),
            job.plain.eq(1 if paired else holonomy | into.passes.plain),
            job.transposed.eq(1 if paired else ~holonomy & into.passes.transposed),
            job.identity.eq(1),
            job.project_shift.eq(fields["project_shift"]),
            job.gram_shift.eq(fields["gram_shift"]),
            job.unit.eq(fields["unit"]),
            pair_job.tokens.eq(fields["tokens"]),
            pair_job.words.eq(fields["words"]),
            *(pair_job.shifts[n].eq(fields[f"shift_{n}"]) for n in range(CASES)),
            *(pair_job.reciprocals[n].eq(fields[f"reciprocal_{n}"]) for n in range(CASES)),
        ]
        lanes = p.transport.tile_rows
        word_bits = (_power(p.max_words) - 1).bit_length()
        memory = BlockMemory(
            m, "transported", unsigned(p.probe_word_bits), p.max_tokens << word_bits, target=self._target
        )
        there = Signal(range(p.max_tokens + 1))  # tokens in it that are still to be read
        written, read = Signal(), Signal()
        m.d.sync += there.eq(there + delayed(m, "written", written, 1, reset_less=False)[1] - read)

        # States: of the probe, then of what the pass before made of the token.
        feeding, second, offered, waits = Signal(), Signal(), Signal(), Signal()
        to_probe, from_before = into.passes.plain, into.passes.transposed
        m.d.comb += [
            into_last.eq(1 if paired else second | ~(to_probe & from_before)),
            into_ends.eq(takes & into_last & into.word_last & into.token_last),
            probe_memory.address.eq(Cat(into.word[:word_bits], into.passes.step[0])),
            memory.address.eq(Cat(into.word[:word_bits], into.token)),
            core.state.valid.eq(offered),
            takes.eq(offered & core.state.ready),
            read.eq(takes & into_last & into.word_last & from_before),
            self._probes_used.eq(into.passes.step),
        ]
        available = feeding & ~waits & (~to_probe | (probes != into.passes.step)) & (~from_before | (there != 0))
        m.d.sync += offered.eq(available & ~takes)
        with m.If(takes):
            m.d.sync += second.eq(~into_last)
        with m.If(into_ends):
            m.d.sync += waits.eq(into.passes.turns)
            with m.If(into.passes.last):
                m.d.sync += feeding.eq(0)
        with m.Elif(core.idle):
            m.d.sync += waits.eq(0)
        takes_probe, takes_before = Signal(), Signal()
        m.d.comb += [
            takes_probe.eq(to_probe & ~second),
            takes_before.eq(from_before & (1 if paired else second | ~to_probe)),
        ]
        plain = probe_memory.data & takes_probe.replicate(p.probe_word_bits)
        before = memory.data & takes_before.replicate(p.probe_word_bits)
        states = core.state.payload.as_value()
        m.d.comb += states.eq(Cat(plain, before) if paired else plain | before)

        # What comes out: into the memory, and into the field.
        routing, second_out, gone = Signal(), Signal(), Signal()
        out_last = Signal()
        out = self._counter(m, "out", fields, gone & out_last)
        results = core.o.payload.data.as_value()
        kept = results[: lanes * STATE_BITS]
        to_field, given, writes, out_ends = Signal(), Signal(), Signal(), Signal()
        made, sent = out.passes.plain, out.passes.transposed
        m.d.comb += [
            out_last.eq(1 if paired else second_out | ~(made & sent)),
            out_ends.eq(gone & out_last & out.word_last & out.token_last),
            to_field.eq(sent & (1 if paired else second_out | ~made)),
            core.end.eq(out_ends & (out.passes.last | out.passes.turns)),
            core.o.ready.eq(routing & (~to_field | field.i.ready)),
            gone.eq(core.o.valid & core.o.ready),
            field.i.valid.eq(core.o.valid & to_field & routing),
            field.i.payload.data.eq(results[-lanes * STATE_BITS :]),
            field.i.payload.last.eq(out.word_last & out.token_last),
            field.job.valid.eq(routing & sent & ~given),
            writes.eq(gone & made & ~second_out),
            written.eq(writes & out.word_last),
        ]
        # Written a cycle later, in which it is counted too.
        m.d.sync += [
            memory.write.en.eq(writes),
            memory.write.addr.eq(Cat(out.word[:word_bits], out.token)),
            memory.write.data.eq(kept),
        ]
        with m.If(field.job.valid & field.job.ready):
            m.d.sync += given.eq(1)
        with m.If(gone):
            m.d.sync += second_out.eq(~out_last)
        with m.If(out_ends):
            m.d.sync += given.eq(0)
            with m.If(out.passes.last):
                m.d.sync += routing.eq(0)
        yes, no = Const(1), Const(0)
        with m.If(holonomy):
            m.d.sync += [feeding.eq(1), routing.eq(1), *into.passes.begin(yes, no), *out.passes.begin(yes, no)]

    def _counter(self, m: Module, name: str, fields: dict[str, Value], moves: Value) -> _Counter:
        """Counts words, tokens and passes of a stream that goes on by a word with ``moves``."""
        p = self.params
        token = Signal(range(p.max_tokens), name=f"{name}_token")
        word = Signal(range(max(2, p.max_words)), name=f"{name}_word")
        word_last, token_last = Signal(name=f"{name}_word_last"), Signal(name=f"{name}_token_last")
        passes = self._passes(m, name, fields, moves & word_last & token_last)
        m.d.comb += [
            word_last.eq(word == fields["last_word"]),
            token_last.eq(token == fields["last_token"]),
        ]
        with m.If(moves):
            m.d.sync += word.eq(Mux(word_last, 0, word + 1))
            with m.If(word_last):
                m.d.sync += token.eq(Mux(token_last, 0, token + 1))
        return _Counter(passes, token, word, word_last, token_last)


def descriptor_fields(head: Value) -> dict[str, Value]:
    """Fields and flags of the descriptor of a run, by name."""
    fields: dict[str, Value] = {}
    for one in FIELDS:
        value = head[8 * one.offset : 8 * (one.offset + one.bytes)]
        fields[one.name] = value.as_signed() if one.signed else value
    return fields | {one.name: fields["flags"][one.bit] for one in FLAGS}


def descriptor_fault(p: GatedParams, fields: dict[str, Value]) -> Value:
    """Code of the first fault of a descriptor, :func:`dtp.gated.descriptor_error`."""
    heads, tokens, words = fields["heads"], fields["tokens"], fields["words"]
    shifts = [fields["project_shift"][5:], fields["gram_shift"][5:]]
    shifts += [fields[f"shift_{n}"][SHIFT_LIMIT.bit_length() :] for n in range(CASES)]
    few = ~_above(words, p.field.min_words - 1)
    faults: list[tuple[GeometryError, Value]] = [
        (GeometryError.MAGIC, fields["magic"] != MAGIC),
        (GeometryError.VERSION, fields["version"] != VERSION),
        (GeometryError.FLAGS, fields["flags"][len(FLAGS) :].any() | ~(fields["holonomy"] | fields["table"])),
        (GeometryError.HEADS, (heads == 0) | _above(heads, MAX_HEADS)),
        (GeometryError.TOKENS, (tokens == 0) | _above(tokens, p.max_tokens)),
        (GeometryError.WORDS, fields["holonomy"] & (few | _above(words, p.max_words))),
        (GeometryError.SHIFT, Cat(*shifts).any() | (fields["unit"] < 0)),
    ]
    if p.transport.max_groups == 1:
        faults.insert(3, (GeometryError.FLAGS, fields["two_groups"]))
    code: Value = Const(GeometryError.NONE, Shape.cast(GeometryError).width)
    for value, wrong in reversed(faults):
        code = Mux(wrong, Const(value, Shape.cast(GeometryError).width), code)
    return code


def _above(value: Value, limit: int) -> Value:
    """``value > limit``: the bits that ``limit`` has none of apart, so that few are left to compare."""
    bits = limit.bit_length()
    return value[bits:].any() | (value[:bits] > limit)


def _power(count: int) -> int:
    """The power of two that is not below ``count``, at least 2."""
    return max(2, 1 << (count - 1).bit_length())
