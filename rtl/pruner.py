"""Sparse-transport pruner in hardware: scores of blocks in, rows of the block mask out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amaranth.hdl import Cat, Const, Module, Mux, Shape, Signal, Value, signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from dtp.pruner import ADDERS_A_STAGE, COUNT_BITS, Band, Gate, PrunerError, PrunerParams, Source
from rtl.lib.delay import delayed
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import MultiplexedAdder, Target
from rtl.lib.reduce import count_ones, index_bits

__all__ = ["CommandLayout", "MaskLayout", "Pruner", "ReportLayout", "ScoreBeatLayout"]

#: Rows of scores that can be inside: one is decided while the next one arrives.
_BUFFERS = 2


class CommandLayout(data.StructLayout):
    """Settings of one head, the fields of :class:`dtp.pruner.HeadCommand`."""

    def __init__(self, params: PrunerParams) -> None:
        p = params
        weight, step = unsigned(p.weight_bits + 1), unsigned(p.step_bits + 1)
        score, count = unsigned(p.score_bits), unsigned(p.count_bits)
        super().__init__(
            {
                "head": unsigned(p.head_bits), "last_block": unsigned(p.index_bits),
                "last_valid": unsigned(p.index_bits), "causal": unsigned(1),
                "fresh": unsigned(1), "source": unsigned(2), "weight": weight, "maximum": unsigned(1), "step": step,
                "gate": unsigned(1), "theta_low": score, "theta_high": score, "budget": count, "band": unsigned(2),
                "band_low": score, "band_high": score,
            }
        )  # fmt: skip


class ScoreBeatLayout(data.StructLayout):
    """One block's score, and whether it is the head's last."""

    def __init__(self, params: PrunerParams) -> None:
        super().__init__({"score": unsigned(params.score_bits), "last": unsigned(1)})


class MaskLayout(data.StructLayout):
    """Kept blocks of one row; whether the head is skipped; whether the row is the head's last."""

    def __init__(self, params: PrunerParams) -> None:
        super().__init__({"mask": unsigned(params.max_blocks), "skipped": unsigned(1), "last": unsigned(1)})


class ReportLayout(data.StructLayout):
    """Kept and legal blocks of a head, whether it was skipped, and its error."""

    def __init__(self, params: PrunerParams) -> None:
        area = unsigned(params.area_bits)
        super().__init__({"kept": area, "legal": area, "skipped": unsigned(1), "error": PrunerError})


class Pruner(wiring.Component):
    """Answers each command with the mask rows of a head and a report; the contract is ``docs/pruner.md``.

    Arithmetic: :class:`dtp.pruner.GoldenPruner`, bit for bit. Throughput: a score a cycle, in threshold mode a row
    as fast as its scores come (from a few a lane on). Heads do not overlap.

    Stalls: scores wait while two rows are inside and not decided, and for each other where a head has two sources; rows
    are not bound by ``o``: a head's masks lie in a memory. The report waits for the last row, the next head for
    the report.

    A row is decided by bisection: the largest trial below which lie fewer than k scores is found bit by bit, each in
    one pass over the row, ``lanes`` scores a cycle. Legality and the diagonal do not depend on what the memories hold:
    they are applied to every comparison.

    Parameters
    ----------
    params: sizes and schedule
    target: plain description or explicit ECP5 cells

    Members
    -------
    command: In(stream of :class:`CommandLayout`), held until the head is answered
    i_holonomy, i_table: In(stream of :class:`ScoreBeatLayout`)
    o: Out(stream of :class:`MaskLayout`)
    report: Out(stream of :class:`ReportLayout`)
    clear: In(1), forgets ``error``
    error: Out(:class:`dtp.pruner.PrunerError`), the first since reset or ``clear``
    skipped_heads: Out(16), stops at 65535
    """

    def __init__(self, params: PrunerParams, *, target: Target = Target.GENERIC) -> None:
        self.params = params
        self._target = target
        scores = stream.Signature(ScoreBeatLayout(params))
        super().__init__(
            {
                "command": In(stream.Signature(CommandLayout(params))),
                "i_holonomy": In(scores),
                "i_table": In(scores),
                "o": Out(stream.Signature(MaskLayout(params))),
                "report": Out(stream.Signature(ReportLayout(params))),
                "clear": In(1),
                "error": Out(PrunerError),
                "skipped_heads": Out(COUNT_BITS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        p, c = self.params, self.command.payload
        code = Signal(PrunerError)  # of the head
        refused = Signal()  # by its command
        by_budget, banded = Signal(), Signal()
        m.d.comb += [
            by_budget.eq((c.gate == Gate.BUDGET) & ~refused),
            banded.eq((c.band != Band.NONE) & ~refused),
        ]

        # Scores in.
        row = Signal(p.index_bits)
        column = Signal(p.index_bits)
        running = Signal()
        draining = Signal()
        begin = Signal()
        row_done = Signal()
        all_over = Signal()
        row_last = Signal()
        head_last = Signal()
        inside = _Count(m, "inside", _BUFFERS)
        room = Signal()
        admit, missing, spare, scores = self._admission(m, begin, running, draining, refused, room, head_last, all_over)
        m.d.comb += [
            row_last.eq(column == c.last_block),
            head_last.eq(row_last & (row == c.last_block)),
            room.eq((inside.value != _BUFFERS) | (column != 0)),
            inside.up.eq(admit & (column == 0)),
            inside.down.eq(row_done),
        ]
        with m.If(begin):
            m.d.sync += [row.eq(0), column.eq(0)]
        with m.Elif(admit):
            m.d.sync += column.eq(Mux(row_last, 0, column + 1))
            with m.If(row_last):
                m.d.sync += row.eq(row + 1)

        # The new score of a block, and what the gate says of it.
        valid = delayed(m, "valid", admit, p.aggregate_cycles + 1, reset_less=False)
        place = delayed(m, "place", Cat(column, row), p.aggregate_cycles + 1)
        ends = delayed(m, "row_last", row_last, p.aggregate_cycles + 1)
        new, passed = self._score(m, scores, place, valid, refused)
        now = p.aggregate_cycles + 1
        legal = self._legal(m, begin, admit, row, column, row_last)
        out_of_band = self._band(m, begin, valid, legal, new)

        # Rows of scores.
        filled = _Count(m, "filled", _BUFFERS)
        m.d.comb += [filled.up.eq(valid[now] & ends[now]), filled.down.eq(row_done)]
        key = Signal(p.score_bits)
        m.d.comb += key.eq(Mux(by_budget, new, (~passed).replicate(p.score_bits)))
        written = Signal(p.index_bits)
        read = Signal(p.index_bits)
        word = Signal(range(p.words))
        keys = self._row_memory(m, valid[now], place[now], key, word, written[0])
        mask, kept, legal_count, kept_clear = self._decide(m, begin, filled, row_done, by_budget, written, word, keys)

        # Mask rows out. The upper half of the memory stays 0: the rows of a skipped head.
        memory = BlockMemory(m, "masks", p.max_blocks, 2 * p.max_blocks, target=self._target)
        all_decided = Signal()
        all_read = Signal()
        skipped = Signal()
        m.d.comb += [
            memory.write.en.eq(row_done),
            memory.write.addr.eq(written),
            memory.write.data.eq(mask),
            memory.address.eq(Cat(read, skipped)),
            skipped.eq(banded & out_of_band),
            self.o.payload.mask.eq(memory.data),
            self.o.payload.skipped.eq(skipped),
            self.o.payload.last.eq(read == c.last_block),
        ]
        with m.If(begin):
            m.d.sync += [written.eq(0), all_decided.eq(0)]
        with m.Elif(row_done):
            m.d.sync += [written.eq(written + 1), all_decided.eq(written == c.last_block)]
        taken = Signal()
        m.d.comb += taken.eq(self.o.valid & self.o.ready)
        with m.If(begin):
            m.d.sync += [read.eq(0), all_read.eq(0)]
        with m.Elif(taken):
            m.d.sync += [read.eq(read + 1), all_read.eq(self.o.payload.last)]
        with m.FSM(name="rows"):
            with m.State("address"):
                with m.If(~all_read & (all_decided | (~banded & (read != written)))):
                    m.next = "offer"
            with m.State("offer"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.next = "address"

        # Heads.
        check = self._check(m)
        with m.If(missing & (code == PrunerError.NONE)):
            m.d.sync += code.eq(PrunerError.SHORT)
        with m.Elif(spare & (code == PrunerError.NONE)):
            m.d.sync += code.eq(PrunerError.LONG)
        m.d.comb += [
            self.report.payload.kept.eq(kept),
            self.report.payload.legal.eq(legal_count),
            self.report.payload.skipped.eq(skipped),
            self.report.payload.error.eq(code),
        ]
        with m.If(self.clear):
            m.d.sync += self.error.eq(PrunerError.NONE)
        with m.FSM(name="heads"):
            with m.State("command"):
                with m.If(self.command.valid):
                    m.d.comb += begin.eq(1)
                    m.d.sync += [code.eq(check), refused.eq(check != PrunerError.NONE)]
                    m.next = "scores"
                    with m.If(check == PrunerError.BLOCKS):
                        m.next = "drain"
            with m.State("scores"):
                m.d.comb += running.eq(1)
                with m.If(admit & head_last):
                    m.next = "drain"
            with m.State("drain"):
                m.d.comb += draining.eq(1)
                with m.If(all_over & (all_read | (code == PrunerError.BLOCKS))):
                    m.d.comb += kept_clear.eq(skipped)
                    m.next = "report"
            with m.State("report"):
                m.d.comb += self.report.valid.eq(1)
                with m.If(self.report.ready):
                    with m.If((self.error == PrunerError.NONE) | self.clear):
                        m.d.sync += self.error.eq(code)
                    with m.If(skipped & ~self.skipped_heads.all()):
                        m.d.sync += self.skipped_heads.eq(self.skipped_heads + 1)
                    m.next = "done"
            with m.State("done"):
                m.d.comb += self.command.ready.eq(1)
                m.next = "command"
        return m

    def _check(self, m: Module) -> Signal:
        """What is wrong with the offered command."""
        c = self.command.payload
        wrong: dict[PrunerError, Value] = {
            PrunerError.BLOCKS: c.last_valid > c.last_block,
            PrunerError.SOURCE: c.source == 0,
            PrunerError.BUDGET: (c.gate == Gate.BUDGET) & (c.budget == 0),
            PrunerError.THRESHOLDS: (c.gate == Gate.THRESHOLD) & (c.theta_low > c.theta_high),
            PrunerError.BAND: (c.band > Band.MAXIMUM) | ((c.band != Band.NONE) & (c.band_low > c.band_high)),
        }  # fmt: skip
        check = Signal(PrunerError)
        for number, (error, is_wrong) in enumerate(wrong.items()):
            with m.If(is_wrong) if number == 0 else m.Elif(is_wrong):
                m.d.comb += check.eq(error)
        return check

    def _admission(
        self, m: Module, begin: Value, running: Value, draining: Value, refused: Value, room: Value, head_last: Value,
        all_over: Signal,
    ) -> tuple[Signal, Value, Value, list[Value]]:  # fmt: skip
        """Both score streams as one.

        Returns whether the next score is taken, whether a source ended too early or goes on too long, and the scores.
        A source that has ended or is not named gives 0. ``all_over``: every named source has ended.
        """
        p, c = self.params, self.command.payload
        admit = Signal()
        ports = (self.i_holonomy, self.i_table)
        named = [(c.source & source).any() for source in (Source.HOLONOMY, Source.TABLE)]
        over = [Signal(name=f"over_{n}") for n in range(len(ports))]
        needed = [Signal(name=f"needed_{n}") for n in range(len(ports))]
        there = [~needed[n] | ports[n].valid for n in range(len(ports))]
        m.d.comb += admit.eq(running & room & there[0] & there[1])
        early: list[Value] = []
        late: list[Value] = []
        scores: list[Value] = []
        for n, port in enumerate(ports):
            taken, dropped = Signal(name=f"taken_{n}"), Signal(name=f"dropped_{n}")
            m.d.comb += [
                needed[n].eq(named[n] & ~over[n] & ~refused),
                dropped.eq(draining & named[n] & ~over[n]),
                port.ready.eq((running & room & needed[n] & there[1 - n]) | dropped),
                taken.eq(port.valid & port.ready),
            ]
            with m.If(begin):
                m.d.sync += over[n].eq(0)
            with m.Elif(taken & port.payload.last):
                m.d.sync += over[n].eq(1)
            early.append(taken & port.payload.last & running & ~head_last)
            late.append(taken & draining)
            score = Signal(p.score_bits, name=f"score_{n}", reset_less=True)
            m.d.sync += score.eq(Mux(needed[n], port.payload.score, 0))
            scores.append(score)
        m.d.comb += all_over.eq((over[0] | ~named[0]) & (over[1] | ~named[1]))
        return admit, early[0] | early[1], late[0] | late[1], scores

    def _score(
        self, m: Module, scores: Sequence[Value], place: Sequence[Value], valid: Sequence[Value], refused: Value
    ) -> tuple[Value, Value]:
        """Combines, aggregates and gates: the new score, and whether its threshold lets it pass.

        ``scores`` are those accepted a cycle ago; ``place`` and ``valid`` the block and whether there is one, by age.
        """
        p, c = self.params, self.command.payload
        holonomy, table = scores
        both = c.source == Source.BOTH
        weights = [both & c.weight[n] for n in range(p.weight_bits)]
        weights.append((c.source == Source.HOLONOMY) | (both & c.weight[-1]))
        combined = self._blend(m, "combined", table, holonomy, p.weight_bits, lambda _difference: weights)

        # The table: score and gate bit of the run before.
        depth = p.heads << (2 * p.index_bits)
        memory = BlockMemory(m, "table", p.score_bits + 1, depth, target=self._target)
        head = c.head
        at_read, at_write = p.combine_cycles - 2, p.aggregate_cycles + 1
        old, gate = Signal(p.score_bits, reset_less=True), Signal(reset_less=True)
        m.d.comb += memory.address.eq(Cat(place[at_read], head))
        m.d.sync += [old.eq(memory.data[: p.score_bits]), gate.eq(memory.data[-1] & ~c.fresh)]

        stepped = ~(c.fresh | c.maximum)

        def steps(difference: Value) -> list[Value]:
            whole = c.fresh | (c.maximum & ~difference[-1])
            return [stepped & c.step[n] for n in range(p.step_bits)] + [whole | (stepped & c.step[-1])]

        aggregated = self._blend(m, "aggregated", old, combined, p.step_bits, steps)
        gates = delayed(m, "gate", gate, p.blend_cycles(p.step_bits))

        new, passed = Signal(p.score_bits, reset_less=True), Signal(reset_less=True)
        theta = Mux(gates[-1], c.theta_high, c.theta_low)
        m.d.sync += [new.eq(aggregated), passed.eq((aggregated <= theta) | refused)]
        m.d.comb += [
            memory.write.en.eq(valid[at_write] & ~refused),
            memory.write.addr.eq(Cat(place[at_write], head)),
            memory.write.data.eq(Cat(new, passed & (c.gate == Gate.THRESHOLD))),
        ]
        return new, passed

    def _blend(
        self, m: Module, name: str, old: Value, new: Value, weight_bits: int, weights: Callable[[Value], list[Value]]
    ) -> Value:
        """``old + round_shift((new − old)·weight, weight_bits)``, ``params.blend_cycles(weight_bits)`` later.

        Bits of the weight from the lowest on: each adds the difference or not and drops a bit of the sum, so that no
        sum is wider than two differences. A weight of 1 takes the difference in the place of a sum that is 0.
        ``weights`` gives the bits for the difference in one stage.
        """
        p = self.params
        width = p.score_bits + 2
        difference = Signal(signed(p.score_bits + 1), name=f"{name}_difference", reset_less=True)
        m.d.sync += difference.eq(new - old)
        base = delayed(m, f"{name}_base", old, 1)[1]
        total: Value = Const(0, 1)
        for n in range(weight_bits):
            bits = weights(difference)
            wide = Signal(signed(width), name=f"{name}_wide_{n}")
            m.d.comb += wide.eq(difference)
            if n == 0:
                first = Signal(signed(width), name=f"{name}_first")
                m.d.comb += first.eq(Mux(bits[0], wide, 0))
                total = first >> 1
            adder = MultiplexedAdder(width, target=self._target)
            m.submodules[f"{name}_{n}"] = adder
            extended = Signal(signed(width), name=f"{name}_total_{n}")
            m.d.comb += extended.eq(total)
            if n < weight_bits - 1:
                # The last dropped bit rounds: its half is the carry.
                m.d.comb += [
                    adder.select.eq(bits[n + 1]), adder.x0.eq(0), adder.x1.eq(wide), adder.y.eq(extended),
                    adder.carry.eq(n + 1 == weight_bits - 1),
                ]  # fmt: skip
                total = adder.o.as_signed() >> 1
            else:
                m.d.comb += [
                    adder.select.eq(bits[-1]), adder.x0.eq(extended), adder.x1.eq(wide), adder.y.eq(base),
                    adder.carry.eq(0),
                ]  # fmt: skip
                result = Signal(p.score_bits, name=f"{name}_result", reset_less=True)
                m.d.sync += result.eq(adder.o)
            if (n + 1) % ADDERS_A_STAGE == 0 and n < weight_bits - 1:
                stage = Signal(Shape.cast(total.shape()), name=f"{name}_stage_{n}", reset_less=True)
                m.d.sync += stage.eq(total)
                total = stage
                difference = delayed(m, f"{name}_difference_{n}", difference, 1)[1].as_signed()
                base = delayed(m, f"{name}_base_{n}", base, 1)[1]
        return result

    def _legal(
        self, m: Module, begin: Value, admit: Value, row: Value, column: Value, row_last: Value
    ) -> Signal:
        """Whether the block whose score is next is legal: blocks of a row are, up to a last one."""
        c = self.command.payload
        dead_row = Signal()
        beyond = Signal()
        with m.If(begin):
            m.d.sync += [dead_row.eq(0), beyond.eq(0)]
        with m.Elif(admit):
            with m.If(row_last):
                m.d.sync += [beyond.eq(0), dead_row.eq(dead_row | (row == c.last_valid))]
            with m.Elif(column == Mux(c.causal, row, c.last_valid)):
                m.d.sync += beyond.eq(1)
        legal = Signal()
        m.d.comb += legal.eq(~dead_row & ~beyond)
        return legal

    def _band(self, m: Module, begin: Value, valid: Sequence[Value], legal: Value, new: Value) -> Value:
        """Whether the head score, over the legal blocks so far, lies outside of the band."""
        p, c = self.params, self.command.payload
        now = p.aggregate_cycles + 1
        counted = delayed(m, "counted", legal, now)[now] & valid[now]
        above = Signal(signed(p.score_bits + 1), reset_less=True)
        below = Signal.like(above)
        some = delayed(m, "counted_valid", counted, 1, reset_less=False)[1]
        m.d.sync += [above.eq(new - c.band_low), below.eq(c.band_high - new)]
        above_sum = Signal(signed(p.sum_bits))
        below_sum = Signal(signed(p.sum_bits))
        reached = Signal()
        exceeded = Signal()
        with m.If(begin):
            m.d.sync += [above_sum.eq(0), below_sum.eq(0), reached.eq(0), exceeded.eq(0)]
        with m.Elif(some):
            m.d.sync += [
                above_sum.eq(above_sum + above),
                below_sum.eq(below_sum + below),
                reached.eq(reached | ~above[-1]),
                exceeded.eq(exceeded | below[-1]),
            ]
        return Mux(c.band == Band.MAXIMUM, ~reached | exceeded, above_sum[-1] | below_sum[-1])

    def _row_memory(
        self, m: Module, write: Value, place: Value, key: Value, word: Value, buffer: Value
    ) -> list[Value]:
        """Scores of the rows that are inside: ``lanes`` of them at ``word`` of the row in ``buffer``."""
        p = self.params
        lane_bits = index_bits(p.lanes)
        column, row = place[: p.index_bits], place[p.index_bits :]
        keys: list[Value] = []
        for lane in range(p.lanes):
            memory = Memory(shape=p.score_bits, depth=_BUFFERS * p.words, init=[], attrs={"no_rw_check": 1})
            m.submodules[f"row_{lane}"] = memory
            port, read = memory.write_port(), memory.read_port(domain="comb")
            m.d.comb += [
                port.en.eq(write & (column[:lane_bits] == lane)),
                port.addr.eq(Cat(column[lane_bits:], row[0])),
                port.data.eq(key),
                read.addr.eq(Cat(word, buffer)),
            ]
            keys.append(read.data)
        return keys

    def _decide(
        self, m: Module, begin: Value, filled: _Count, row_done: Signal, by_budget: Value, row: Value, word: Signal,
        keys: Sequence[Value],
    ) -> tuple[Signal, Signal, Signal, Signal]:  # fmt: skip
        """Kept blocks of row after row.

        Returns the row's mask, there with ``row_done``, kept and legal blocks of the head, and what clears the former.
        """
        p, c = self.params, self.command.payload
        lane_bits = index_bits(p.lanes)
        waiting = Signal()
        bisecting = Signal()
        ending = Signal()  # the passes that end a row

        # The row: whether it has legal blocks, and the last of them.
        live = Signal()
        legal_last = Signal(p.index_bits)
        m.d.comb += legal_last.eq(Mux(c.causal, row, c.last_valid))
        with m.If(begin):
            m.d.sync += live.eq(1)
        with m.Elif(row_done & (row == c.last_valid)):
            m.d.sync += live.eq(0)

        # A pass: its words, and a cycle behind them. The last passes take each word twice.
        issuing = Signal()
        tail = Signal()
        or_equal = Signal()
        advance = Signal()
        word_before = Signal.like(word)
        m.d.comb += [issuing.eq((bisecting | ending) & ~tail), advance.eq(bisecting | or_equal)]
        m.d.sync += [word_before.eq(word), tail.eq(issuing & advance & (word == c.last_block[lane_bits:]))]
        m.d.sync += or_equal.eq(ending & ~or_equal)
        within = Signal()  # no word before held the row's last legal block
        legal_end = Signal()
        m.d.comb += legal_end.eq(word == legal_last[lane_bits:])
        with m.If(~issuing):
            m.d.sync += [word.eq(0), within.eq(1)]
        with m.Elif(advance):
            m.d.sync += [word.eq(word + 1), within.eq(within & ~legal_end)]

        # One comparison a lane: below the trial, or with ``or_equal`` not above it.
        trial = Signal(p.score_bits)
        found = Signal(p.lanes)
        found_before = Signal(p.lanes)
        diagonal_word = Signal()
        m.d.comb += diagonal_word.eq(word == row[lane_bits:])
        for lane, key in enumerate(keys):
            total = Cat(or_equal, trial) + Cat(or_equal, ~key)
            diagonal = diagonal_word & (row[:lane_bits] == lane)
            legal = live & within & (~legal_end | (lane <= legal_last[:lane_bits]))
            with m.If(~issuing):
                m.d.sync += found[lane].eq(0)
            with m.Else():
                m.d.sync += found[lane].eq((total[-1] | diagonal) & legal)
        with m.If(or_equal):
            m.d.sync += found_before.eq(found)
        with m.Else():
            m.d.sync += found_before.eq(0)

        # Bisection. What the scores below the trial leave of the budget; places: the same of the trial that is kept.
        bit = Signal(p.score_bits, init=1 << (p.score_bits - 1))
        rest = Signal(signed(p.count_bits + 1))
        rest_now = Signal.like(rest)
        some_left = Signal()
        decided = Signal()
        m.d.comb += [
            rest_now.eq(rest - count_ones(found)),
            some_left.eq(~rest_now[-1] & rest_now.any()),
            decided.eq(bisecting & tail),
        ]
        with m.If(waiting | decided):
            m.d.sync += rest.eq(c.budget)
        with m.Else():
            m.d.sync += rest.eq(rest_now)
        with m.If(decided):
            m.d.sync += bit.eq(bit.rotate_right(1))
        with m.If(waiting):
            # Keys in threshold mode are 0 or the largest.
            m.d.sync += trial.eq(Cat(~by_budget, Const(0, p.score_bits - 2), by_budget))
        with m.Elif(decided):
            m.d.sync += trial.eq((trial & ~(bit & (~some_left).replicate(p.score_bits))) | (bit >> 1))

        # Equal ones take places in their order.
        places = Signal(p.count_bits)
        equal = found & ~found_before
        granted = [equal[lane] & (count_ones(equal[:lane]) < places) for lane in range(p.lanes)]
        kept_now = Signal(p.lanes)
        m.d.comb += kept_now.eq(Cat(*granted) | found_before)
        with m.If(waiting):
            m.d.sync += places.eq(c.budget - 1)  # the diagonal lies below all others
        with m.Elif(bisecting):
            with m.If(decided & some_left):
                m.d.sync += places.eq(rest_now)
        with m.Elif(~or_equal):
            m.d.sync += places.eq(places - count_ones(Cat(*granted)))

        # The row; in the first of the last passes' cycles nothing is found yet.
        mask = Signal(p.max_blocks)
        kept_count = Signal(range(p.lanes + 1))
        for n in range(p.words):
            with m.If(waiting):
                m.d.sync += mask[n * p.lanes : (n + 1) * p.lanes].eq(0)
            with m.Elif(ending & ~or_equal & (word_before == n)):
                m.d.sync += mask[n * p.lanes : (n + 1) * p.lanes].eq(kept_now)
        with m.If(ending & ~or_equal):
            m.d.sync += kept_count.eq(count_ones(kept_now))
        with m.Else():
            m.d.sync += kept_count.eq(0)
        kept = Signal(p.area_bits)
        legal_count = Signal(p.area_bits)
        kept_clear = Signal()
        with m.If(begin | kept_clear):
            m.d.sync += kept.eq(0)
        with m.Else():
            m.d.sync += kept.eq(kept + kept_count)
        with m.If(begin):
            m.d.sync += legal_count.eq(0)
        with m.Elif(row_done & live):
            m.d.sync += legal_count.eq((Cat(1, legal_count) + Cat(1, legal_last))[1:])

        with m.FSM(name="decide"):
            with m.State("wait"):
                m.d.comb += waiting.eq(1)
                with m.If(filled.value.any()):
                    m.next = "end"
                    with m.If(by_budget):
                        m.next = "bisect"
            with m.State("bisect"):
                m.d.comb += bisecting.eq(1)
                with m.If(tail & bit[0]):
                    m.next = "end"
            with m.State("end"):
                m.d.comb += ending.eq(1)
                with m.If(tail):
                    m.next = "write"
            with m.State("write"):
                m.d.comb += row_done.eq(1)
                m.next = "wait"
        return mask, kept, legal_count, kept_clear


class _Count:
    """A counter from 0 to ``most`` of what came (``up``) and has not gone (``down``)."""

    def __init__(self, m: Module, name: str, most: int) -> None:
        self.value = Signal(range(most + 1), name=name)
        self.up, self.down = Signal(name=f"{name}_up"), Signal(name=f"{name}_down")
        with m.If(self.up & ~self.down):
            m.d.sync += self.value.eq(self.value + 1)
        with m.Elif(self.down & ~self.up):
            m.d.sync += self.value.eq(self.value - 1)
