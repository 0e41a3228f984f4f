"""Rank-k transport engine in hardware: project, solve, expand, and the byte stream around it."""

from __future__ import annotations

from typing import Any

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from dtp.config import REGISTER_BITS, Config
from dtp.solve import GRAM_PAIRS, TILE_COLUMNS, UNIT_PAIRS, MiddleMode, TransportError
from dtp.transport import (
    BUFFER_WORDS,
    DESCRIPTOR_BYTES,
    JOB_MAGIC,
    STATE_BITS,
    STATUS_BYTES,
    STATUS_MAGIC,
    TransportParams,
    word_beats,
)
from rtl.lib.delay import delayed
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import JoinedAdder, LogicMultiplier, MultiplexedAdder, Multiplier, Target
from rtl.lib.reduce import cleared_registers, count_ones, index_bits, joined, registered_choice, sum_tree
from rtl.lib.streams import PrefetchQueue, RegisterSlice
from rtl.solve import JobLayout, SolveLane

__all__ = ["Transport", "TransportCore", "TransportOutputLayout"]

_POINTER = BUFFER_WORDS.bit_length()
_ADDRESS = _POINTER - 1
_PAIRS = len(GRAM_PAIRS)
_SQUARE_BITS = 9


_DESCRIPTOR = data.StructLayout(
    {
        "magic": unsigned(16),
        "mode": unsigned(8),
        "flags": unsigned(8),
        "last_token": unsigned(16),
        "last_word": unsigned(16),
        "project_shift": unsigned(8),
        "gram_shift": unsigned(8),
        "tag": unsigned(16),
        "unit": signed(32),
        "weights": data.ArrayLayout(signed(32), UNIT_PAIRS),
    }
)


def _state_layout(params: TransportParams) -> data.ArrayLayout:
    return data.ArrayLayout(data.ArrayLayout(signed(STATE_BITS), params.tile_rows), params.vectors)


def _factor_layout(params: TransportParams) -> data.ArrayLayout:
    row = data.ArrayLayout(signed(params.config.factor_bits), TILE_COLUMNS)
    return data.ArrayLayout(row, params.tile_rows)


class TransportOutputLayout(data.StructLayout):
    """An output word: lanes as those of a state word, and whether it is the token's last."""

    def __init__(self, params: TransportParams) -> None:
        super().__init__({"data": _state_layout(params), "last": unsigned(1)})


class TransportCore(wiring.Component):
    """y = c·x − W(M(Vᵀx)) of a stream of tokens: docs/transport.md, 1 to 5, bit for bit.

    Three units work on different tokens: the *engine* projects and expands, one tile a cycle; the *Gram* unit reads
    the factors a second time where M is an inverse; ``solve_lanes`` lanes make m. The engine takes the oldest token
    whose m is there before it projects another. :mod:`sim.cycles.transport` states every cycle.

    Stalls: ``factors`` and ``state`` are ready while their buffer has room and words of the job are missing; ``o``
    holds ``params.output_depth`` words, then expansion waits. ``job`` is ready while the unit is idle.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells
    logic_products: so many of the engine's products are made without multipliers of the chip
    open_ended: who feeds the engine counts its tokens, ``job.last_token`` does not

    Members
    -------
    job: In(stream of :class:`rtl.solve.JobLayout`)
    end: In(1), only if ``open_ended``: the output word that leaves in this cycle is the job's last
    again: In(1), only if ``open_ended``: a job that is taken goes on with the counts of the one before
    factors: In(stream of tile_rows × 4 × signed(factor_bits))
    state: In(stream of vectors × tile_rows × signed(16))
    o: Out(stream of :class:`TransportOutputLayout`)
    error: Out(3), :class:`dtp.solve.TransportError` flags since the job was taken
    saturations: Out(16), saturated lanes since then, stops at 65535
    idle: Out(1)
    """

    def __init__(
        self,
        config: Config,
        *,
        target: Target = Target.GENERIC,
        logic_products: int = 0,
        open_ended: bool = False,
    ) -> None:
        self.config = config
        self.params = p = TransportParams(config)
        self._target = target
        self._logic_products = logic_products
        self._open_ended = open_ended
        super().__init__(
            {
                "job": In(stream.Signature(JobLayout(p))),
                "factors": In(stream.Signature(_factor_layout(p))),
                "state": In(stream.Signature(_state_layout(p))),
                "o": Out(stream.Signature(TransportOutputLayout(p))),
                "error": Out(3),
                "saturations": Out(16),
                "idle": Out(1, init=1),
            }
            | ({"end": In(1), "again": In(1)} if open_ended else {})
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        p = self.params
        job = Signal(JobLayout(p))
        start = Signal()
        m.d.comb += [self.job.ready.eq(self.idle), start.eq(self.job.valid & self.idle)]
        with m.If(start):
            m.d.sync += [job.eq(self.job.payload), self.idle.eq(0)]
        first_cycle = delayed(m, "started", start, 1, reset_less=False)[1]

        # Shapes of the job, made in the cycle after it is taken.
        both = Signal()
        m.d.comb += both.eq(job.plain & job.transposed if p.vectors == 1 else 0)
        tiles, factor_words = Signal(_POINTER), Signal(_POINTER)
        outputs, state_words = Signal(_POINTER), Signal(_POINTER)
        words = job.last_word + 1
        m.d.comb += [
            tiles.eq(Mux(job.last_group, words << 1, words)),
            outputs.eq(Mux(both, words << 1, words)),
            factor_words.eq(Mux(job.separate, tiles << 1, tiles)),
            state_words.eq(Mux(job.base, outputs << 1, outputs)),
        ]
        sizes = {
            name: delayed(m, f"job_{name}", value, 1)[1]
            for name, value in (
                ("tiles", tiles), ("outputs", outputs), ("factors", factor_words), ("states", state_words),
            )
        }  # fmt: skip

        # Lanes; context n belongs to lane n modulo their number.
        lanes = [SolveLane(self.config, target=self._target) for _ in range(self.config.solve_lanes)]
        for n, lane in enumerate(lanes):
            m.submodules[f"lane_{n}"] = lane
            m.d.comb += [lane.start.eq(start), lane.job.eq(job)]

        # What was freed and what is free: contexts and words.
        expanded = Signal()  # the last read of a token's expansion
        factors, states = (
            _Buffer(
                m, name, port, sizes[f"{name}s"], None if self._open_ended else job.last_token, start, first_cycle,
                expanded, copies=copies, target=self._target,
            )
            for name, port, copies in (("factor", self.factors, 2), ("state", self.state, 1))
        )  # fmt: skip

        self._engine(m, job, start, sizes, factors, states, lanes, both, expanded)
        self._gram(m, job, start, sizes, factors, lanes, expanded)
        return m

    def _engine(
        self,
        m: Module,
        job: data.View,
        start: Value,
        sizes: dict[str, Value],
        factors: _Buffer,
        states: _Buffer,
        lanes: list[SolveLane],
        both: Value,
        expanded: Value,
    ) -> None:
        p = self.params
        context = range(p.contexts)

        # Which phase comes next, told a cycle ahead.
        available = Signal(), Signal()
        in_flight = Signal(range(p.contexts + 1))
        project_context, expand_context = Signal(context), Signal(context)
        can_project, can_expand = Signal(), Signal()
        begin_project, begin_expand = Signal(), Signal()
        for n, buffer in enumerate((factors, states)):
            count = Signal(_POINTER, name=f"available_{buffer.name}")
            m.d.sync += count.eq(count + buffer.token - begin_project)
            m.d.comb += available[n].eq(count.any())
        done = Signal()
        lane_bits = index_bits(len(lanes))
        lane_done = Array([lane.done for lane in lanes])[expand_context[:lane_bits]] if lane_bits else lanes[0].done
        m.d.comb += done.eq(lane_done.bit_select(expand_context[lane_bits:], 1))
        m.d.sync += [
            can_project.eq(available[0] & available[1] & (in_flight != p.contexts) & ~begin_project),
            can_expand.eq(done & ~begin_expand),
            in_flight.eq(in_flight + begin_project - expanded),
        ]

        # As long as the job: its tokens come later than these.
        only, two_slots = Signal(), Signal()
        m.d.sync += [only.eq(~job.plain), two_slots.eq(both)]
        running, expanding, room = Signal(), Signal(), Signal()
        word, slot, group = Signal(len(job.last_word)), Signal(), Signal()
        word_last = Signal()  # ``word`` is the last one
        issue, last_group, last_slot, last = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            last_group.eq(group == job.last_group),
            last_slot.eq(slot | ~two_slots),
            last.eq(last_group & last_slot & word_last),
            issue.eq(running & (~expanding | room | ~last_group)),
        ]
        free = Signal()
        m.d.comb += [
            free.eq(~running | (issue & last)),
            begin_expand.eq(free & can_expand),
            begin_project.eq(free & can_project & ~can_expand),
            expanded.eq(issue & last & expanding),
        ]
        with m.If(free):
            m.d.sync += [running.eq(begin_expand | begin_project), expanding.eq(begin_expand)]
        # Pointers: the token that is projected or expanded, rows of tiles in it, words of its states.
        factor_base = [Signal(_ADDRESS, name=f"{name}_factor_base") for name in ("project", "expand")]
        state_base = [Signal(_ADDRESS, name=f"{name}_state_base") for name in ("project", "expand")]
        row, state_pointer = Signal(_ADDRESS), Signal(_ADDRESS)
        with m.If(issue):
            m.d.sync += group.eq(Mux(last_group, 0, 1))
            with m.If(last_group):
                m.d.sync += [slot.eq(~last_slot), state_pointer.eq(state_pointer + 1)]
                with m.If(last_slot):
                    following = word + 1
                    m.d.sync += [
                        word.eq(following),
                        word_last.eq(following == job.last_word),
                        row.eq(row + job.last_group + 1),
                    ]
        with m.If(free):
            m.d.sync += [word.eq(0), word_last.eq(job.last_word == 0), slot.eq(0), group.eq(0)]
            with m.If(can_expand):
                m.d.sync += [
                    row.eq(factor_base[1]),
                    state_pointer.eq(state_base[1] + Mux(job.base, sizes["outputs"], 0)),
                ]
            with m.Else():
                m.d.sync += [row.eq(factor_base[0]), state_pointer.eq(state_base[0])]
        active = [Signal(context, name=f"{name}_active") for name in ("project", "expand")]
        for n, begin in enumerate((begin_project, begin_expand)):
            pointer = (project_context, expand_context)[n]
            with m.If(begin):
                m.d.sync += [
                    factor_base[n].eq(factor_base[n] + sizes["factors"]),
                    state_base[n].eq(state_base[n] + sizes["states"]),
                    pointer.eq(pointer + 1),
                    active[n].eq(pointer),
                ]
        with m.If(start):
            m.d.sync += [
                *(base.eq(0) for base in (*factor_base, *state_base)),
                project_context.eq(0), expand_context.eq(0),
            ]  # fmt: skip
        for n, lane in enumerate(lanes):
            mine = begin_expand & (expand_context[:lane_bits] == n) if lane_bits else begin_expand
            m.d.comb += [lane.release.eq(mine), lane.release_context.eq(expand_context[lane_bits:])]

        # Stage 1: addresses. Stage 2: memories. Stage 3: their registers, the operands.
        shown_slot = Signal()
        m.d.comb += shown_slot.eq(Mux(only, 1, slot))
        other = Signal()
        m.d.comb += other.eq(job.separate & (expanding ^ shown_slot))
        factor_address = Signal(_ADDRESS, reset_less=True)
        m.d.sync += factor_address.eq(row + group + Mux(other, sizes["tiles"], 0))
        m.d.comb += [
            factors.address.eq(factor_address),
            states.address.eq(delayed(m, "state_pointer", state_pointer, 1)[1]),
        ]
        now = Signal(data.StructLayout({
            "expanding": 1, "slot": 1, "group": 1, "first": 1, "group_end": 1, "last": 1, "context": context,
        }))  # fmt: skip
        m.d.comb += [
            now.expanding.eq(expanding),
            now.slot.eq(shown_slot),
            now.group.eq(group),
            now.first.eq(word == 0),
            now.group_end.eq(last_group),
            now.last.eq(last),
            now.context.eq(Mux(expanding, active[1], active[0])),
        ]
        stages = p.output_cycles
        valids = delayed(m, "valid", issue, stages, reset_less=False)
        tags = [now] + [Signal(now.shape(), name=f"tag_{n}", reset_less=True) for n in range(1, stages + 1)]
        for n in range(1, stages + 1):
            m.d.sync += tags[n].eq(tags[n - 1])

        tag = tags[1]
        for lane in lanes:
            m.d.comb += [
                lane.m_context.eq(tag.context[lane_bits:]), lane.m_slot.eq(tag.slot), lane.m_group.eq(tag.group),
            ]  # fmt: skip
        middles = [lane.m.as_value() for lane in lanes]
        chosen = Array(middles)[tags[2].context[:lane_bits]] if lane_bits else middles[0]
        middle = Signal(data.ArrayLayout(data.ArrayLayout(signed(REGISTER_BITS), TILE_COLUMNS), p.vectors))
        tile, vectors = Signal(_factor_layout(p)), Signal(_state_layout(p))
        m.d.sync += [middle.eq(chosen), tile.eq(factors.data), vectors.eq(states.data)]

        # Lane (i, j) of four rows multiplies V[i][j]·x[i] or W[j][i]·m[i], so that the same adders sum over i.
        expands = tags[p.operand_cycle].expanding
        sums: list[list[list[Value]]] = []
        for v in range(p.vectors):
            sums.append([])
            for block in range(p.tile_rows // TILE_COLUMNS):
                rows = range(block * TILE_COLUMNS, (block + 1) * TILE_COLUMNS)
                terms: list[list[Value]] = [[] for _ in rows]
                for i, r in enumerate(rows):
                    operand = Signal(signed(REGISTER_BITS), name=f"operand_{v}_{r}")
                    m.d.comb += operand.eq(Mux(expands, middle[v][i], vectors[v][r]))
                    for j in range(TILE_COLUMNS):
                        unit = self._multiplier((v * p.tile_rows + r) * TILE_COLUMNS + j)
                        m.submodules[f"multiplier_{v}_{r}_{j}"] = unit
                        m.d.comb += [
                            unit.a.eq(tile[r][j] if i == j else Mux(expands, tile[rows[j]][i], tile[r][j])),
                            unit.b.eq(operand),
                        ]
                        if isinstance(unit, Multiplier):
                            m.d.comb += unit.a_enable.eq(1)
                        terms[j].append(unit.o)
                sums[v].append([sum_tree(m, f"sum_{v}_{block}_{j}", terms[j]) for j in range(TILE_COLUMNS)])
        self._project(m, tags, valids, sums, lanes, lane_bits)
        self._expand(m, job, tags, valids, sums, vectors, start, room, issue & expanding & last_group)

        # Errors.
        range_error = Cat(lane.range for lane in lanes).any()
        pivot = Cat(lane.pivot for lane in lanes).any()
        with m.If(start):
            m.d.sync += self.error.eq(0)
        with m.Else():
            flags = Mux(range_error, int(TransportError.RANGE), 0) | Mux(pivot, int(TransportError.PIVOT), 0)
            m.d.sync += self.error.eq(self.error | flags)

    def _multiplier(self, number: int) -> Multiplier | LogicMultiplier:
        bits = (self.config.factor_bits, REGISTER_BITS)
        if number < self._logic_products:
            return LogicMultiplier(*bits, target=self._target)
        return Multiplier(*bits, target=self._target)

    def _project(
        self,
        m: Module,
        tags: list[data.View],
        valids: list[Value],
        sums: list[list[list[Value]]],
        lanes: list[SolveLane],
        lane_bits: int,
    ) -> None:
        """Sums over the rows of a tile, added to those of the tiles before; the last go to the solve lane."""
        p = self.params
        bits = self.config.factor_bits + STATE_BITS + p.column_levels
        cycle = p.product_cycle + p.row_levels
        tag = tags[cycle]
        place = Cat(tag.group, tag.slot) if p.vectors == 1 else tag.group
        projected = Signal(
            data.ArrayLayout(data.ArrayLayout(signed(p.sum_bits), TILE_COLUMNS), p.vectors), reset_less=True
        )
        valid = valids[cycle] & ~tag.expanding
        for v in range(p.vectors):
            for c in range(TILE_COLUMNS):
                total = sum_tree(m, f"project_{v}_{c}", [block[c][:bits].as_signed() for block in sums[v]])
                m.submodules[f"sums_{v}_{c}"] = memory = Memory(
                    shape=signed(p.sum_bits), depth=1 << len(place), init=[]
                )
                write, read = memory.write_port(), memory.read_port(domain="comb")
                added = self._add(m, f"add_{v}_{c}", p.sum_bits, tag.first, read.data, total)
                m.d.comb += [
                    read.addr.eq(place),
                    write.addr.eq(place),
                    write.data.eq(added),
                    write.en.eq(valid),
                ]
                m.d.sync += projected[v][c].eq(added)
        ending = Signal()
        m.d.sync += ending.eq(valid)
        tag = tags[cycle + 1]
        for n, lane in enumerate(lanes):
            m.d.comb += [
                lane.project.eq(projected),
                lane.project_valid.eq(ending & (tag.context[:lane_bits] == n) if lane_bits else ending),
                lane.project_context.eq(tag.context[lane_bits:]),
                lane.project_slot.eq(tag.slot),
                lane.project_group.eq(tag.group),
                lane.project_last.eq(tag.last),
            ]

    def _expand(
        self,
        m: Module,
        job: data.View,
        tags: list[data.View],
        valids: list[Value],
        sums: list[list[list[Value]]],
        vectors: Value,
        start: Value,
        room: Value,
        issued: Value,
    ) -> None:
        """Sums over the columns, one word of outputs for each row of tiles, and their queue."""
        p = self.params
        cycle = p.product_cycle + p.column_levels
        # Those that are not added are cleared by the reset of their last register.
        before = delayed(m, "state", vectors.as_value(), cycle - p.operand_cycle)[-1]
        states = registered_choice(m, "added", len(before), [(job.identity | job.base, before)])
        results: list[Value] = []
        over: list[Value] = []
        for v in range(p.vectors):
            for r in range(p.tile_rows):
                name = f"{v}_{r}"
                total = sums[v][r // TILE_COLUMNS][r % TILE_COLUMNS]
                held = Signal(signed(p.expand_bits), name=f"held_{name}", reset_less=True)
                following = self._add(m, f"hold_{name}", p.expand_bits, ~tags[cycle].group, held, total)
                with m.If(valids[cycle]):
                    m.d.sync += held.eq(following)
                state = states[(v * p.tile_rows + r) * STATE_BITS :][:STATE_BITS].as_signed()
                exact = Signal(signed(p.expand_bits), name=f"exact_{name}", reset_less=True)
                half = 1 << (p.expand_shift - 1)
                front = Cat(Const(half, p.expand_shift), state).as_signed()
                m.d.sync += exact.eq(front - held)
                shifted = exact >> p.expand_shift
                high = shifted[STATE_BITS - 1 :]
                beyond, sign = high.any() & ~high.all(), shifted[-1]
                # Saturated downwards, then upwards: set and reset of two registers, and no logic.
                lowest, highest = 1 << (STATE_BITS - 1), (1 << (STATE_BITS - 1)) - 1
                low = Signal(STATE_BITS, name=f"low_{name}", reset_less=True)
                above = Signal(name=f"above_{name}", reset_less=True)
                result = Signal(STATE_BITS, name=f"result_{name}", reset_less=True)
                m.d.sync += [
                    low.eq(Mux(beyond & sign, lowest, shifted[:STATE_BITS])),
                    above.eq(beyond & ~sign),
                    result.eq(Mux(above, highest, low)),
                ]
                results.append(result)
                over.append(beyond)
        valid = valids[cycle + 2] & tags[cycle + 2].expanding & tags[cycle + 2].group_end
        # A slot that is not in use gives m = 0 and has the state 0.
        count = Signal(range(len(over) + 1), reset_less=True)
        _, counted, made = delayed(m, "counted", valid, 2, reset_less=False)
        m.d.sync += count.eq(count_ones(Cat(over)))
        total = self.saturations + count
        with m.If(start & ~self.again if self._open_ended else start):
            m.d.sync += self.saturations.eq(0)
        with m.Elif(counted):
            m.d.sync += self.saturations.eq(Mux(total[16:].any(), 0xFFFF, total[:16]))

        layout = TransportOutputLayout(p)
        m.submodules.outputs = queue = PrefetchQueue(layout, p.output_depth, target=self._target)
        words = Signal(range(p.output_depth + 1))
        taken = Signal()
        m.d.comb += [
            queue.i.valid.eq(made),
            queue.i.payload.data.eq(Cat(results)),
            queue.i.payload.last.eq(tags[cycle + 4].last),
            self.o.valid.eq(queue.o.valid),
            self.o.payload.eq(queue.o.payload),
            queue.o.ready.eq(self.o.ready),
            taken.eq(self.o.valid & self.o.ready),
            room.eq(words != p.output_depth),
        ]
        m.d.sync += words.eq(words + issued - taken)
        if self._open_ended:
            with m.If(self.end):
                m.d.sync += self.idle.eq(1)
        else:
            left = Signal(16)
            with m.If(start):
                m.d.sync += left.eq(self.job.payload.last_token)
            with m.Elif(taken & self.o.payload.last):
                m.d.sync += [left.eq(left - 1), self.idle.eq(left == 0)]

    def _gram(
        self,
        m: Module,
        job: data.View,
        start: Value,
        sizes: dict[str, Value],
        factors: _Buffer,
        lanes: list[SolveLane],
        expanded: Value,
    ) -> None:
        """Products of all pairs of columns of two tiles, summed over the words of a token."""
        p = self.params
        lane_bits = index_bits(len(lanes))
        squares = self.config.factor_bits == 8

        # Steps: gram_cycles cycles for a word, which read the tiles p and q in the first two.
        can, begin, running = Signal(), Signal(), Signal()
        available, in_flight = Signal(_POINTER), Signal(range(p.contexts + 1))
        context, current = Signal(range(p.contexts)), Signal(range(p.contexts))
        minimum = Mux(job.last_group, p.min_gram_phase(2), p.min_gram_phase(1))
        row_bits = index_bits(p.gram_cycles)
        cycle, word, phase = Signal(row_bits), Signal(len(job.last_word)), Signal(2)
        count, waited = Signal(range(p.min_gram_phase(2) + 1)), Signal()
        base, row = Signal(_ADDRESS), Signal(_ADDRESS)
        step_end, words_end, phase_end, last_phase, token_end = (Signal() for _ in range(5))
        resting = Signal()  # all words are read, the phase is too short
        m.d.comb += [
            step_end.eq(cycle == p.gram_cycles - 1),
            words_end.eq(running & ~resting & step_end & (word == job.last_word)),
            waited.eq(count == minimum - 1),
            phase_end.eq((words_end | resting) & waited),
            last_phase.eq(phase.all() | ~job.last_group),
            token_end.eq(phase_end & last_phase),
            begin.eq(can & (~running | token_end)),
        ]
        m.d.sync += [
            available.eq(available + (factors.token & job.mode[1]) - begin),
            in_flight.eq(in_flight + begin - (expanded & job.mode[1])),
            can.eq(available.any() & (in_flight != p.contexts) & ~begin),
        ]
        with m.If(running):
            m.d.sync += [
                cycle.eq(Mux(step_end, 0, cycle + 1)),
                count.eq(Mux(phase_end, 0, Mux(waited, count, count + 1))),
                resting.eq((resting | words_end) & ~phase_end),
            ]
            with m.If(step_end & ~resting):
                m.d.sync += [word.eq(word + 1), row.eq(row + job.last_group + 1)]
            with m.If(phase_end):
                m.d.sync += [word.eq(0), cycle.eq(0), row.eq(base), phase.eq(phase + 1)]
            with m.If(token_end):
                m.d.sync += running.eq(0)
        with m.If(begin):
            m.d.sync += [
                running.eq(1),
                phase.eq(0),
                context.eq(context + 1),
                current.eq(context),
            ]
            # The next token's words follow this one's.
            m.d.sync += [row.eq(base), word.eq(0), cycle.eq(0), count.eq(0)]
        with m.If(token_end):
            m.d.sync += base.eq(base + sizes["factors"])
            with m.If(begin):
                m.d.sync += row.eq(base + sizes["factors"])
        with m.If(start):
            m.d.sync += [context.eq(0), base.eq(0)]

        # Stage 1 address, 2 memory, 3 register; q comes a cycle after p.
        read_q = Signal()
        m.d.comb += read_q.eq(cycle != 0)
        second = Mux(read_q, phase[0] ^ phase[1], phase[0])
        m.d.comb += factors.second_address.eq(delayed(m, "gram_address", (row + second)[:_ADDRESS], 1)[1])
        tile = Signal(_factor_layout(p), reset_less=True)
        m.d.sync += tile.eq(factors.second_data)
        active = running & ~resting
        stages = 6 + p.gram_product_cycles + p.gram_levels
        first = (word == 0) & (cycle == 0)
        valids = delayed(m, "gram_valid", active, stages, reset_less=False)
        firsts = delayed(m, "gram_first", first, stages)
        cycles = delayed(m, "gram_cycle", cycle, 5)
        ends = delayed(m, "gram_end", words_end, stages + 1, reset_less=False)
        infos = delayed(m, "gram_info", Cat(last_phase, phase, current), stages + 1)

        # p of a step is there at 3, q a cycle later; both are held at 5 for as many cycles as a step has.
        waiting, left, right = (Signal(_factor_layout(p), name=f"gram_{n}", reset_less=True) for n in "wpq")
        with m.If(cycles[3] == 0):
            m.d.sync += waiting.eq(tile)
        with m.If(cycles[3] == 1):
            m.d.sync += [left.eq(waiting), right.eq(tile)]
        # Each half of the rows in registers that are cleared out of turn: an operand is the OR of its parts.
        operands: list[list[list[list[Value]]]] = []
        bits = self.config.factor_bits
        for name, held in (("p", left), ("q", right)):
            choices = [
                Cat(held[n * p.gram_rows + r].as_value() for r in range(p.gram_rows)) for n in range(p.gram_cycles)
            ]
            in_turn = [(cycles[5] == n, rows) for n, rows in enumerate(choices)]
            parts = cleared_registers(m, f"gram_rows_{name}", len(choices[0]), in_turn)
            halves = [joined(parts[n::2]) for n in range(2)]
            lanes_of_rows = [
                [[half[(r * TILE_COLUMNS + c) * bits :][:bits] for half in halves] for c in range(TILE_COLUMNS)]
                for r in range(p.gram_rows)
            ]
            operands.append(lanes_of_rows)
        pairs = [
            (operands[0][r][i], operands[1][r][j]) for i, j in GRAM_PAIRS for r in range(p.gram_rows)
        ]
        terms = self._squares(m, pairs) if squares else self._products(m, pairs)
        sums = Signal(data.ArrayLayout(signed(p.gram_sum_bits), _PAIRS), reset_less=True)
        for n in range(_PAIRS):
            total = sum_tree(m, f"gram_{n}", terms[n * p.gram_rows : (n + 1) * p.gram_rows])
            following = self._add(m, f"gram_sum_{n}", p.gram_sum_bits, firsts[stages], sums[n], total)
            with m.If(valids[stages]):
                m.d.sync += sums[n].eq(following)
        last, phase_bits, of = infos[-1][0], infos[-1][1:3], infos[-1][3:]
        for n, lane in enumerate(lanes):
            m.d.comb += [
                lane.gram.eq(sums),
                lane.gram_valid.eq(ends[-1] & (of[:lane_bits] == n) if lane_bits else ends[-1]),
                lane.gram_context.eq(of[lane_bits:]),
                lane.gram_phase.eq(phase_bits),
                lane.gram_last.eq(last),
            ]

    def _add(self, m: Module, name: str, bits: int, first: Value, old: Value, term: Value) -> Value:
        """``term``, or ``old + term`` unless it is the first."""
        m.submodules[name] = adder = MultiplexedAdder(bits, target=self._target)
        wide = Signal(signed(bits), name=f"{name}_term")
        m.d.comb += [wide.eq(term), adder.select.eq(first), adder.x0.eq(old), adder.x1.eq(0), adder.y.eq(wide)]
        return adder.o.as_signed()

    def _squares(self, m: Module, pairs: list[tuple[list[Value], list[Value]]]) -> list[Value]:
        """(x + y)² by tables with two read ports; sum, table, its register."""
        init = [((n ^ 1 << (_SQUARE_BITS - 1)) - (1 << (_SQUARE_BITS - 1))) ** 2 for n in range(1 << _SQUARE_BITS)]
        terms: list[Value] = []
        for n, (x, y) in enumerate(pairs):
            if n % 2 == 0:
                table = Memory(
                    shape=unsigned(2 * _SQUARE_BITS - 1), depth=len(init), init=init, attrs={"ram_style": "block"}
                )
                m.submodules[f"squares_{n // 2}"] = table
            total = Signal(signed(_SQUARE_BITS), name=f"pair_{n}", reset_less=True)
            m.submodules[f"pair_{n}"] = adder = JoinedAdder(_SQUARE_BITS, target=self._target)
            for part in range(2):
                m.d.comb += [
                    getattr(adder, f"{side}{part}").eq(parts[part].as_signed()) for side, parts in (("x", x), ("y", y))
                ]
            m.d.sync += total.eq(adder.o)
            read = table.read_port()
            m.d.comb += read.addr.eq(total)
            terms.append(Cat(delayed(m, f"square_{n}", read.data, 1)[1], Const(0, 1)).as_signed())
        return terms

    def _products(self, m: Module, pairs: list[tuple[list[Value], list[Value]]]) -> list[Value]:
        terms: list[Value] = []
        for n, sides in enumerate(pairs):
            x, y = (joined(parts).as_signed() for parts in sides)
            m.submodules[f"gram_{n}"] = unit = Multiplier(len(x), len(y), target=self._target)
            m.d.comb += [unit.a.eq(x), unit.a_enable.eq(1), unit.b.eq(y)]
            terms.append(unit.o)
        return terms


class Transport(wiring.Component):
    """The engine behind a byte stream: docs/transport.md, 6. One job at a time.

    A beat is taken in every cycle in which the core takes its word; ``i`` and ``o`` are register slices. Jobs do not
    overlap: the next descriptor is taken after the status record of the job before.

    Parameters
    ----------
    config: the processor
    target: plain description or explicit ECP5 cells

    Members
    -------
    i: In(stream of {data: input_bytes, last})
    o: Out(stream of {data: output_bytes, user: 0, last})
    """

    def __init__(self, config: Config, *, target: Target = Target.GENERIC) -> None:
        self.config = config
        self.params = TransportParams(config)
        self._target = target
        self._input = data.StructLayout({"data": unsigned(8 * config.input_bytes), "last": unsigned(1)})
        self._output = data.StructLayout(
            {"data": unsigned(8 * config.output_bytes), "user": unsigned(1), "last": unsigned(1)}
        )
        super().__init__({"i": In(stream.Signature(self._input)), "o": Out(stream.Signature(self._output))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        c, p = self.config, self.params
        m.submodules.core = core = TransportCore(c, target=self._target)
        m.submodules.input = source = RegisterSlice(self._input)
        m.submodules.output = sink = RegisterSlice(self._output)
        wiring.connect(m, wiring.flipped(self.i), source.i)
        wiring.connect(m, sink.o, wiring.flipped(self.o))
        beat, beat_last = source.o.payload.data, source.o.payload.last
        bits = 8 * c.input_bytes

        # Descriptor.
        head_beats = -(-DESCRIPTOR_BYTES // c.input_bytes)
        head = Signal(max(8 * DESCRIPTOR_BYTES, bits), reset_less=True)
        fields = Signal(_DESCRIPTOR, reset_less=True)
        m.d.comb += fields.eq(head[: 8 * DESCRIPTOR_BYTES])
        flags = fields.flags
        plain, transposed, separate, identity, base, two = (flags[n] for n in range(6))
        tiles = (fields.last_word + 1) << two
        pairs = (fields.last_word + 1) << (plain & transposed if p.vectors == 1 else 0)
        refused = Signal()
        m.d.sync += refused.eq(
            (fields.magic != JOB_MAGIC)
            | (fields.mode > max(MiddleMode))
            | flags[6:].any()
            | (fields.last_word >= p.max_words)
            | (two if p.max_groups == 1 else 0)
            | ~(plain | transposed)
            | (identity & base)
            | fields.project_shift[5:].any()
            | fields.gram_shift[5:].any()
            | (fields.unit < 0)
            | ((tiles << separate) > BUFFER_WORDS)
            | ((pairs << base) > BUFFER_WORDS)
            | (plain & transposed & separate if p.vectors == 2 else 0)
        )
        job = core.job.payload
        m.d.comb += [
            job.mode.eq(fields.mode),
            job.last_group.eq(two),
            job.last_word.eq(fields.last_word),
            job.last_token.eq(fields.last_token),
            job.plain.eq(plain),
            job.transposed.eq(transposed),
            job.separate.eq(separate),
            job.identity.eq(identity),
            job.base.eq(base),
            job.project_shift.eq(fields.project_shift),
            job.gram_shift.eq(fields.gram_shift),
            job.unit.eq(fields.unit),
            *(job.weights[n].eq(fields.weights[n]) for n in range(UNIT_PAIRS)),
        ]
        factor_count, state_count = Signal(_POINTER), Signal(_POINTER)
        m.d.sync += [factor_count.eq(tiles << separate), state_count.eq(pairs << base)]

        # Words of several beats, the lowest first.
        parts = (word_beats(p.factor_word_bits, c.input_bytes), word_beats(p.state_word_bits, c.input_bytes))
        before = Signal(max(0, max(parts) - 1) * bits, reset_less=True)
        count = Signal(range(max(*parts, head_beats)))
        word, token = Signal(_POINTER), Signal(16)
        of_state, ended, error = Signal(), Signal(), Signal()
        word_end, give, feeding, last_word = Signal(), Signal(), Signal(), Signal()
        for n, port in enumerate((core.factors, core.state)):
            value = Cat(before[len(before) - (parts[n] - 1) * bits :], Mux(ended, 0, beat))
            m.d.comb += [
                port.payload.eq(value[: len(port.payload.as_value())]),
                port.valid.eq(feeding & (of_state == n) & word_end & (ended | source.o.valid)),
            ]
        taken = Signal()
        m.d.comb += [
            word_end.eq(count == Mux(of_state, parts[1] - 1, parts[0] - 1)),
            last_word.eq(word == Mux(of_state, state_count, factor_count) - 1),
            give.eq(~word_end | Mux(of_state, core.state.ready, core.factors.ready)),
            taken.eq(feeding & give & (ended | source.o.valid)),
        ]
        with m.If(taken):
            if len(before):
                m.d.sync += before.eq(Cat(before, Mux(ended, 0, beat))[bits:])
            m.d.sync += count.eq(Mux(word_end, 0, count + 1))
            with m.If(word_end):
                m.d.sync += word.eq(Mux(last_word, 0, word + 1))
                with m.If(last_word):
                    m.d.sync += [of_state.eq(~of_state), token.eq(token + of_state)]

        # Output words in beats.
        out_beats = word_beats(p.state_word_bits, c.output_bytes)
        out_bits = 8 * c.output_bytes
        status_bits = 8 * STATUS_BYTES
        status_beats = word_beats(status_bits, c.output_bytes)
        held = Signal(out_bits * max(out_beats, status_beats), reset_less=True)
        holds = Signal(range(max(out_beats, status_beats) + 1))
        is_status, send = Signal(), Signal()
        sent, refill = Signal(), Signal()
        tag = Signal(16)
        status = Cat(
            Const(STATUS_MAGIC, 16),
            (core_error := Signal(8)),
            Const(0, 8),
            (saturations := Signal(16)),
            tag,
        )
        ran = Signal()
        m.d.comb += [
            core_error.eq(Mux(ran, core.error, 0) | Mux(error, int(TransportError.JOB), 0)),
            saturations.eq(Mux(ran, core.saturations, 0)),
            sink.i.valid.eq(holds.any()),
            sink.i.payload.data.eq(held[:out_bits]),
            sink.i.payload.last.eq(is_status & (holds == 1)),
            sent.eq(sink.i.valid & sink.i.ready),
            refill.eq(~holds.any() | (sent & (holds == 1))),
            core.o.ready.eq(refill),
        ]
        with m.If(sent):
            m.d.sync += [held.eq(held >> out_bits), holds.eq(holds - 1)]
        with m.If(refill & core.o.valid):
            m.d.sync += [held.eq(core.o.payload.data.as_value()), holds.eq(out_beats), is_status.eq(0)]
        with m.If(send):
            m.d.sync += [held.eq(status), holds.eq(status_beats), is_status.eq(1)]

        with m.FSM():
            with m.State("HEAD"):
                m.d.comb += source.o.ready.eq(1)
                m.d.sync += [ended.eq(0), error.eq(0), ran.eq(0), of_state.eq(0), word.eq(0), token.eq(0)]
                with m.If(source.o.valid):
                    m.d.sync += [head.eq(Cat(head, beat)[-len(head) :]), count.eq(count + 1), ended.eq(beat_last)]
                    with m.If(count == head_beats - 1):
                        m.d.sync += count.eq(0)
                        m.next = "CHECK"
                    with m.Elif(beat_last):
                        m.d.sync += [count.eq(0), error.eq(1), tag.eq(0)]
                        m.next = "STATUS"
            with m.State("CHECK"):
                m.next = "START"
            with m.State("START"):
                m.d.sync += tag.eq(fields.tag)
                m.d.comb += core.job.valid.eq(~refused & ~ended)
                m.d.sync += [error.eq(refused | ended), ran.eq(~refused & ~ended)]
                with m.If(refused | ended):
                    m.next = "DROP"
                with m.Else():
                    m.next = "FEED"
            with m.State("FEED"):
                m.d.comb += [feeding.eq(1), source.o.ready.eq(give & ~ended)]
                final = of_state & last_word & word_end & (token == fields.last_token)
                with m.If(taken):
                    with m.If(~ended & (beat_last != final)):
                        m.d.sync += error.eq(1)
                    m.d.sync += ended.eq(ended | beat_last)
                    with m.If(final):
                        m.next = "DROP"
            with m.State("DROP"):
                m.d.comb += source.o.ready.eq(~ended)
                with m.If(source.o.valid):
                    m.d.sync += ended.eq(ended | beat_last)
                with m.If(ended & core.idle & refill):
                    m.next = "STATUS"
            with m.State("STATUS"):
                with m.If(~holds.any()):
                    m.d.comb += send.eq(1)
                    m.next = "WAIT"
            with m.State("WAIT"):
                with m.If(~holds.any()):
                    m.next = "HEAD"
        return m


class _Buffer:
    """Words of one input, in a ring, kept until their token is expanded; of so many tokens, of any number if ``None``.

    Members
    -------
    token: the last word of a token is taken
    address, data: what is read, a cycle later; second_address, second_data: of a copy, where there is one
    """

    def __init__(
        self, m: Module, name: str, port: Any, words: Value, tokens: Value | None, start: Value, open_now: Value,
        expanded: Value, *, copies: int, target: Target,
    ) -> None:  # fmt: skip
        self.name = name
        self.token = Signal(name=f"{name}_token")
        written = Signal(_ADDRESS, name=f"{name}_written")
        count = Signal(_POINTER, name=f"{name}_count", init=1)  # the word's number in its token, from 1
        is_open = Signal(name=f"{name}_open")
        level = Signal(_POINTER, name=f"{name}_level")
        taken = Signal(name=f"{name}_taken")
        last = Signal(name=f"{name}_last")
        m.d.comb += [
            port.ready.eq(is_open & ~level[-1]),
            taken.eq(port.valid & port.ready),
            last.eq(count == words),
            self.token.eq(taken & last),
        ]
        m.d.sync += [
            written.eq(written + taken),
            level.eq(level + taken - Mux(expanded, words, 0)),
        ]
        with m.If(taken):
            m.d.sync += count.eq(Mux(last, 1, count + 1))
        if tokens is not None:
            left = Signal(17, name=f"{name}_left")
            with m.If(self.token):
                m.d.sync += left.eq(left - 1)
                with m.If(left == 0):
                    m.d.sync += is_open.eq(0)
            with m.If(open_now):
                m.d.sync += left.eq(tokens)
        with m.If(open_now):
            m.d.sync += is_open.eq(1)
        with m.If(start):
            m.d.sync += [written.eq(0), level.eq(0), is_open.eq(0)]
        # Written a cycle later, which is still before the first read of the token.
        words_in = Cat(taken, written, Value.cast(port.payload))
        late = Signal(len(words_in), name=f"{name}_late")
        m.d.sync += late.eq(words_in)
        memories = []
        for n in range(copies):
            memory = BlockMemory(m, f"{name}_{n}", port.payload.shape(), BUFFER_WORDS, target=target)
            m.d.comb += Cat(memory.write.en, memory.write.addr, Value.cast(memory.write.data)).eq(late)
            memories.append(memory)
        self.address, self.data = memories[0].address, memories[0].data
        self.second_address, self.second_data = memories[-1].address, memories[-1].data
