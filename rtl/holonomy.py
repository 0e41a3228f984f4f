"""Holonomy in hardware: the field of relative transports as block scores."""

from __future__ import annotations

from amaranth.hdl import Cat, Const, Module, Mux, Shape, Signal, Value, signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from dtp.config import REGISTER_BITS
from dtp.holonomy import (
    CASES,
    NUMERATOR_SHIFT,
    RECIPROCAL_BITS,
    SCALE_LIMIT_BITS,
    SCORE_BITS,
    SHIFT_LIMIT,
    FieldError,
    FieldParams,
)
from dtp.transport import STATE_BITS
from rtl.lib.delay import delayed
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import LATENCY, MultiplexedAdder, Multiplier, Target
from rtl.lib.reduce import cleared_registers, index_bits, joined

__all__ = ["BlockScoreLayout", "FieldJobLayout", "FieldWordLayout", "HolonomyField"]

_HALF_BITS = SCALE_LIMIT_BITS // 2
_WRITE_STAGE = 3
"""A block sum is written back so many cycles after the issue of the step that read it."""


class FieldJobLayout(data.StructLayout):
    """One head pair, members of :class:`dtp.holonomy.FieldJob`."""

    def __init__(self, params: FieldParams) -> None:
        super().__init__(
            {
                "tokens": unsigned(params.max_tokens.bit_length()),
                "words": unsigned(params.max_words.bit_length()),
                "causal": unsigned(1),
                "shifts": data.ArrayLayout(SHIFT_LIMIT.bit_length(), CASES),
                "reciprocals": data.ArrayLayout(RECIPROCAL_BITS, CASES),
            }
        )


class FieldWordLayout(data.StructLayout):
    """A word of u_t, and whether it is the job's last."""

    def __init__(self, params: FieldParams) -> None:
        super().__init__({"data": data.ArrayLayout(signed(STATE_BITS), params.lanes), "last": unsigned(1)})


class BlockScoreLayout(data.StructLayout):
    """A block's score u2f14; ``last`` of its row, ``end`` of its head."""

    def __init__(self) -> None:
        super().__init__({"score": unsigned(SCORE_BITS), "last": unsigned(1), "end": unsigned(1)})


class HolonomyField(wiring.Component):
    """Block scores of a head pair from the stream of its relative transports u_t (docs/holonomy.md, 1 to 4).

    Arithmetic: :func:`dtp.holonomy.block_sums` and :func:`dtp.holonomy.block_scores`, bit for bit. Throughput: a word
    of u_t takes ``params.word_steps`` cycles; a score ``words · word_steps`` cycles of the multipliers, in turn with
    words, and about ``params.product_cycles + 4`` more in which words go on. The table is symmetric: a score
    below the diagonal is a copy of the one above it and takes two cycles and no product.
    :class:`sim.cycles.holonomy.FieldCycles` states every cycle.

    Stalls: the next score is made when the last one has been taken. Scores of a head begin when its first block is
    complete and those of the head before have left, and wait for the blocks that they need. Sums have two slots: a head
    streams in while the rows of the one before leave; ``job.ready`` is low while both are taken.

    Parameters
    ----------
    params: sizes
    borrowed: the multipliers belong to another unit, which lends them cycle by cycle; else they are the unit's own
    target: plain description or explicit ECP5 cells

    Members
    -------
    job: In(stream of :class:`FieldJobLayout`), before the words of its head
    i: In(stream of :class:`FieldWordLayout`)
    o: Out(stream of :class:`BlockScoreLayout`)
    error: Out(:class:`dtp.holonomy.FieldError`), sticky, the first counts
    saturated: Out(1), sticky: a score reached its limit
    error_clear: In(1), clears both
    lent: In(1), only if ``borrowed``: the multipliers are free two cycles from now. A cycle without it issues nothing
    operands: Out(multipliers × (a, b) of 18 bits signed), 0 in cycles that were not lent
    products: In(multipliers × 36 bits signed), of the operands of :data:`rtl.lib.multiplier.LATENCY` cycles ago
    """

    def __init__(self, params: FieldParams, *, borrowed: bool = False, target: Target = Target.GENERIC) -> None:
        self.params = params
        self._borrowed = borrowed
        self._target = target
        pair = data.StructLayout({"a": signed(REGISTER_BITS), "b": signed(REGISTER_BITS)})
        lending = {
            "lent": In(1),
            "operands": Out(data.ArrayLayout(pair, params.multipliers)),
            "products": In(data.ArrayLayout(signed(2 * REGISTER_BITS), params.multipliers)),
        }
        super().__init__(
            {
                "job": In(stream.Signature(FieldJobLayout(params))),
                "i": In(stream.Signature(FieldWordLayout(params))),
                "o": Out(stream.Signature(BlockScoreLayout())),
                "error": Out(FieldError),
                "saturated": Out(1),
                "error_clear": In(1),
            }
            | (lending if borrowed else {})
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        p = self.params
        final = Signal()  # the last product of a score is issued
        free = self.lent if self._borrowed else Const(1, 1)
        next_stored = Signal(range(2 * p.max_blocks))  # the block whose energy is stored next, and its slot
        load = _Load(m, self, final, free, next_stored)
        score = _Score(m, p, load)

        # Memories: the sums of blocks twice, as a score needs two of them a cycle; their energies.
        depth = 2 * p.max_blocks * p.max_steps
        word_bits = p.multipliers * p.sum_bits
        sums = [BlockMemory(m, f"sums_{name}", word_bits, depth, target=self._target) for name in ("row", "column")]
        energies = BlockMemory(m, "energies", p.energy_bits, 2 * p.max_blocks, target=self._target)
        mirror = BlockMemory(m, "mirror", unsigned(SCORE_BITS), p.max_blocks**2, target=self._target)
        load_address = Cat(load.step, load.block, load.slot)
        m.d.comb += [
            sums[0].address.eq(Mux(load.issue, load_address, Cat(score.step, score.row, score.slot))),
            sums[1].address.eq(Cat(score.step, score.column, score.slot)),
            energies.address.eq(Cat(Mux(score.weight[0], score.column, score.row), score.slot)),
            mirror.address.eq(Cat(score.row, score.column)),
        ]

        # What is issued, and when: a last product, else words and Gram products in turn.
        gram, wanted = Signal(), Signal()
        m.d.comb += [
            wanted.eq(score.gram_active & score.there),
            gram.eq(wanted & ~load.issue & ~final & free),
        ]
        m.d.sync += load.yields.eq(wanted & ~gram)
        word_line = delayed(m, "word", load.issue, p.product_cycles + 1, reset_less=False)
        gram_line = delayed(m, "gram", gram, p.product_cycles, reset_less=False)
        final_line = delayed(m, "final", final, p.result_cycles - 1, reset_less=False)
        first_line = delayed(m, "first", load.token == 0, 1)
        start_line = delayed(m, "energy_first", (load.token == 0) & (load.step == 0), p.product_cycles)
        end_line = delayed(m, "energy_last", load.block_end, p.product_cycles + 1)
        head_line = delayed(m, "head_last", load.head_end, p.product_cycles + 1)
        gram_first_line = delayed(m, "gram_first", score.step == 0, p.product_cycles)
        gram_last_line = delayed(m, "gram_last", score.gram_last, p.product_cycles)

        # Stage 1 to 2: operands. What is not asked for is 0, so that OR selects.
        u = [Signal(signed(p.u_bits), name=f"u_{n}", reset_less=True) for n in range(p.multipliers)]
        chunk = load.step[: index_bits(p.word_steps)]
        words = data.View(data.ArrayLayout(p.multipliers * STATE_BITS, p.word_steps), self.i.payload.data.as_value())
        lanes = words[chunk] if p.word_steps > 1 else words.as_value()
        with m.If(load.filling):
            m.d.sync += [value.eq(0) for value in u]
        with m.Else():
            m.d.sync += [
                value.eq(lanes[n * STATE_BITS + p.field_shift : (n + 1) * STATE_BITS]) for n, value in enumerate(u)
            ]
        product_sum = self._products(m, score, u, sums, word_line, gram_line, final_line)

        # Block sums: read, added to, written back.
        added = Signal(word_bits, reset_less=True)
        for n in range(p.multipliers):
            before = Signal(p.sum_bits, name=f"before_{n}", reset_less=True)
            later = Signal(signed(p.u_bits), name=f"later_{n}", reset_less=True)
            with m.If(first_line[1]):
                m.d.sync += before.eq(0)
            with m.Else():
                m.d.sync += before.eq(sums[0].data.word_select(n, p.sum_bits))
            m.d.sync += [later.eq(u[n]), added.word_select(n, p.sum_bits).eq(before + later)]
        written = delayed(m, "load_address", load_address, _WRITE_STAGE)[_WRITE_STAGE]
        for memory in sums:
            m.d.comb += [
                memory.write.en.eq(word_line[_WRITE_STAGE]),
                memory.write.addr.eq(written),
                memory.write.data.eq(added),
            ]

        # Energies of blocks and Gram products: accumulators behind the tree.
        n = p.product_cycles
        energy = self._accumulator(m, "energy", p.energy_bits, product_sum, word_line[n], start_line[n])
        total = self._accumulator(m, "gram_total", p.gram_bits, product_sum, gram_line[n], gram_first_line[n])
        block_bits = index_bits(p.max_blocks)
        m.d.comb += [
            load.stored.eq(word_line[n + 1] & end_line[n + 1]),
            energies.write.en.eq(load.stored),
            energies.write.addr.eq(next_stored),
            energies.write.data.eq(energy),
        ]
        with m.If(load.stored & head_line[n + 1]):
            m.d.sync += next_stored.eq(Cat(Const(0, block_bits), ~next_stored[block_bits]))
        with m.Elif(load.stored):
            m.d.sync += next_stored.eq(next_stored + 1)

        gram_stored = gram_line[n] & gram_last_line[n]
        score.connect(m, self, gram, gram_stored, total, energies.data, final, free, next_stored)
        self._result(m, score, final_line, mirror)
        return m

    def _products(
        self,
        m: Module,
        score: _Score,
        u: list[Signal],
        sums: list[BlockMemory],
        word_line: list[Value],
        gram_line: list[Value],
        final_line: list[Value],
    ) -> Signal:
        """Multipliers, and the sum of their products ``product_cycles`` after the issue."""
        p = self.params
        halves = score.halves
        products: list[Value] = []
        for n in range(p.multipliers):
            parts: list[list[Value]] = [[], []]
            sources: list[tuple[str, Value, Value, Value]] = [
                ("u", word_line[1], u[n], u[n]),
                ("s", gram_line[1], *(s.data.word_select(n, p.sum_bits).as_signed() for s in sums)),
            ]
            if n < 2:
                sources.append(("half", final_line[1], Cat(halves[n], Const(0, 1)), Cat(score.factor, Const(0, 1))))
            for name, gate, *values in sources:
                for side, value in enumerate(values):
                    word = f"{name}_{n}_{side}"
                    parts[side] += cleared_registers(m, word, signed(REGISTER_BITS), [(gate, value)])
            a, b = (joined(side) for side in parts)
            if self._borrowed:
                m.d.comb += [self.operands[n].a.eq(a), self.operands[n].b.eq(b)]
                products.append(self.products[n])
            else:
                multiplier = Multiplier(REGISTER_BITS, REGISTER_BITS, target=self._target)
                m.submodules[f"multiplier_{n}"] = multiplier
                m.d.comb += [multiplier.a.eq(a), multiplier.a_enable.eq(1), multiplier.b.eq(b)]
                products.append(multiplier.o)
        score.products = products[:2]
        return _tree(m, products)

    def _accumulator(self, m: Module, name: str, bits: int, term: Signal, add: Value, first: Value) -> Signal:
        """Adds ``term`` to itself, or to 0 for the first."""
        total = Signal(bits, name=name, reset_less=True)
        adder = MultiplexedAdder(bits, target=self._target)
        m.submodules[f"{name}_adder"] = adder
        m.d.comb += [
            adder.select.eq(first),
            adder.x0.eq(total),
            adder.x1.eq(0),
            adder.y.eq(term),
            adder.carry.eq(0),
        ]
        with m.If(add):
            m.d.sync += total.eq(adder.o)
        return total

    def _result(self, m: Module, score: _Score, final_line: list[Value], mirror: BlockMemory) -> None:
        """The last products' sum, rounded and capped, or a copy, on the output."""
        multiplied = 2 + LATENCY
        high, low = score.products
        total = Signal(SCALE_LIMIT_BITS + 1, reset_less=True)
        m.d.sync += total.eq(high[: 2 * _HALF_BITS] + low[_HALF_BITS : 2 * _HALF_BITS])
        rounded = Signal(SCALE_LIMIT_BITS + 2 - _HALF_BITS)
        limit = Signal()
        m.d.comb += [
            rounded.eq(total[_HALF_BITS:] + total[_HALF_BITS - 1]),
            limit.eq(score.capped | rounded[SCORE_BITS:].any()),
        ]
        made = Signal(SCORE_BITS)
        place = Signal(2 * len(score.row), reset_less=True)
        m.d.comb += [
            made.eq(Mux(limit, (1 << SCORE_BITS) - 1, rounded[:SCORE_BITS])),
            mirror.write.en.eq(final_line[multiplied + 1]),
            mirror.write.addr.eq(place),
            mirror.write.data.eq(made),
        ]
        with m.If(final_line[0]):
            m.d.sync += place.eq(Cat(score.column, score.row))
        with m.If(final_line[multiplied + 1] | score.copy):
            m.d.sync += [self.o.valid.eq(1), self.o.payload.score.eq(Mux(score.copy, mirror.data, made))]
        with m.Elif(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(self.error_clear):
            m.d.sync += self.saturated.eq(0)
        with m.Elif(final_line[multiplied + 1] & limit):
            m.d.sync += self.saturated.eq(1)


class _Load:
    """Jobs and words: what step of which token is issued.

    Members: ``issue``; ``step`` of the vector, ``token`` of the block, ``block``, ``slot``; ``block_end``,
    ``head_end``; ``filling`` a head whose words ended early; ``stored`` the energy of a block; ``full`` a head with a
    complete block waits with its constants for the scores, ``taken`` by them; ``yields`` its turn to a Gram step.
    """

    def __init__(self, m: Module, unit: HolonomyField, final: Signal, free: Value, next_stored: Signal) -> None:
        p = unit.params
        self.issue, self.block_end, self.head_end = Signal(), Signal(), Signal()
        self.yields = Signal()
        self.step = Signal(index_bits(p.max_steps))
        self.token = Signal(p.block_bits)
        self.block = Signal(index_bits(p.max_blocks))
        self.slot = Signal(init=1)
        self.filling = Signal()
        self.full, self.taken, self.stored = Signal(), Signal(), Signal()
        self.constants = constants = Signal.like(unit.job.payload, reset_less=True)
        self.last_block = Signal(index_bits(p.max_blocks), reset_less=True)
        self.tail = Signal(p.block_bits + 1, reset_less=True)
        handed = Signal()  # the newest head was taken
        loading, waiting, dropping = Signal(), Signal(), Signal()
        tokens_left = Signal(index_bits(p.max_tokens) + 1, reset_less=True)
        self.last_step = last_step = Signal(index_bits(p.max_steps), reset_less=True)

        job = unit.job.payload
        refused = Signal()
        m.d.comb += [
            unit.job.ready.eq(~(loading | waiting | dropping)),
            refused.eq(
                (job.tokens == 0) | (job.tokens > p.max_tokens)
                | (job.words < p.min_words) | (job.words > p.max_words)
            ),
        ]  # fmt: skip
        error = Signal(FieldError)
        with m.If(unit.job.valid & unit.job.ready):
            m.d.sync += [
                loading.eq(~refused),
                dropping.eq(refused),
                constants.eq(job),
                tokens_left.eq(job.tokens),
                last_step.eq(Cat(Const(0, index_bits(p.word_steps)), job.words) - 1),
                self.block.eq(0),
                self.last_block.eq(((job.tokens - 1) >> p.block_bits)[: len(self.last_block)]),
                self.tail.eq((job.tokens - 1)[: p.block_bits] + 1),
                self.slot.eq(self.slot ^ ~refused),
                handed.eq(0),
            ]
            with m.If(refused):
                m.d.comb += error.eq(FieldError.JOB)

        word = unit.i
        word_end, token_end, turn = Signal(), Signal(), Signal()
        m.d.comb += [
            turn.eq(loading & ~final & ~self.yields & free),
            self.issue.eq(turn & (word.valid | self.filling)),
            word_end.eq(self.step[: index_bits(p.word_steps)].all() if p.word_steps > 1 else 1),
            word.ready.eq(dropping | (turn & ~self.filling & word_end)),
            token_end.eq(self.step == last_step),
            self.head_end.eq(token_end & (tokens_left == 1)),
            self.block_end.eq(token_end & (self.token.all() | (tokens_left == 1))),
        ]
        with m.If(self.issue):
            m.d.sync += self.step.eq(self.step + 1)
            with m.If(token_end):
                m.d.sync += [
                    self.step.eq(0),
                    self.token.eq(Mux(self.head_end, 0, self.token + 1)),
                    tokens_left.eq(tokens_left - 1),
                ]
            with m.If(self.block_end):
                m.d.sync += self.block.eq(self.block + 1)
            with m.If(self.head_end):
                m.d.sync += [loading.eq(0), waiting.eq(~handed), self.filling.eq(0)]
                with m.If(~self.filling & ~word.payload.last):
                    m.d.sync += dropping.eq(1)
                    m.d.comb += error.eq(FieldError.LATE)
            with m.Elif(word_end & ~self.filling & word.payload.last):
                m.d.sync += self.filling.eq(1)
                m.d.comb += error.eq(FieldError.EARLY)
        with m.If(dropping & word.valid & word.payload.last):
            m.d.sync += dropping.eq(0)
        # Energies of the head before can still be on their way.
        with m.If(self.stored & (next_stored[-1] == self.slot) & ~handed):
            m.d.sync += self.full.eq(1)
        with m.If(self.taken):
            m.d.sync += [self.full.eq(0), waiting.eq(0), handed.eq(1)]
        with m.If(unit.error_clear):
            m.d.sync += unit.error.eq(FieldError.NONE)
        with m.Elif(unit.error == FieldError.NONE):
            m.d.sync += unit.error.eq(error)


class _Score:
    """Rows and columns, one score after the other: weighted energies, Gram product, scale, last product.

    Cycles from the start of a score, or from when its blocks are complete, if nothing else is waited for: two for each
    bit of a block's size until ``n_J E_I + n_I E_J`` stands (the first addition in the third cycle); then one subtracts
    2 S_I · S_J; one for each place of the scale; then the last product is issued, and the next score starts a cycle
    after. Of a score below the diagonal the second cycle is the one of the copy, if the score before has been taken.
    """

    def __init__(self, m: Module, params: FieldParams, load: _Load) -> None:
        p = self.params = params
        self._load = load
        self.row = Signal(index_bits(p.max_blocks), reset_less=True)
        self.column = Signal(index_bits(p.max_blocks), reset_less=True)
        self.slot = Signal(reset_less=True)
        self.step = Signal(index_bits(p.max_steps))
        self.weight = Signal(range(p.weight_steps))
        self.gram_active, self.gram_last = Signal(), Signal()
        self.copy, self.there = Signal(), Signal()
        self.capped = Signal()
        self.factor = Signal(RECIPROCAL_BITS, reset_less=True)
        self.numerator = Signal(p.numerator_bits, reset_less=True)
        self.halves = [self.numerator[NUMERATOR_SHIFT + n * _HALF_BITS :][:_HALF_BITS] for n in (1, 0)]
        self.products: list[Value] = []

    def connect(
        self,
        m: Module,
        unit: HolonomyField,
        gram: Signal,
        gram_stored: Value,
        total: Signal,
        energy: Signal,
        final: Signal,
        free: Value,
        next_stored: Signal,
    ) -> None:
        """The rest, once pipeline and memories are there."""
        p, load = self.params, self._load
        constants = Signal.like(load.constants, reset_less=True)
        last_block = Signal.like(load.last_block, reset_less=True)
        last_step = Signal.like(load.last_step, reset_less=True)
        tail = Signal.like(load.tail, reset_less=True)
        scoring, start, weights_active = Signal(), Signal(), Signal()
        weights_done, gram_done, subtracted, pending = Signal(), Signal(), Signal(), Signal()
        row_end, head_end = Signal(), Signal()
        done, following = Signal(), Signal()  # this score is on its way; a computed one is next
        copied, copying = Signal(), Signal()  # the next score is copied; this one is
        shift = Signal(SHIFT_LIMIT.bit_length(), reset_less=True)
        shifted = Signal(reset_less=True)  # no place of the scale is left
        m.d.comb += [
            load.taken.eq(load.full & ~scoring),
            row_end.eq(self.column == Mux(constants.causal, self.row, last_block)),
            head_end.eq(row_end & (self.row == last_block)),
            final.eq(subtracted & shifted & ~pending & free),
            self.copy.eq(copying & ~pending),  # pending at first, so that the memory has been read
            done.eq(final | self.copy),
            # The next score is copied if it is below the diagonal: the first of a row, and so on.
            copied.eq(~constants.causal & (row_end | (self.column + 1 < self.row))),
            following.eq(load.taken | (done & ~head_end & ~copied)),
        ]
        m.d.sync += start.eq(following)
        with m.If(load.taken):
            m.d.sync += [
                scoring.eq(1),
                constants.eq(load.constants),
                last_block.eq(load.last_block),
                last_step.eq(load.last_step),
                tail.eq(load.tail),
                self.slot.eq(load.slot),
                self.row.eq(0),
                self.column.eq(0),
            ]
        with m.If(done):
            m.d.sync += [
                copying.eq(copied & ~head_end),
                unit.o.payload.last.eq(row_end),
                unit.o.payload.end.eq(head_end),
                pending.eq(1),
                subtracted.eq(0),
                gram_done.eq(0),
                weights_done.eq(0),
                self.column.eq(Mux(row_end, 0, self.column + 1)),
                self.row.eq(self.row + row_end),
                scoring.eq(~head_end),
            ]
        with m.If(unit.o.valid & unit.o.ready):
            m.d.sync += pending.eq(0)

        # The blocks are complete: those of the whole head, or up to the later of the two.
        later = Mux(constants.causal, self.row, self.column)
        whole, ended = Signal(), Signal()
        m.d.comb += [
            ended.eq(next_stored[-1] != self.slot),
            self.there.eq(whole | ended | (later < next_stored[:-1])),
        ]
        m.d.sync += whole.eq((whole | ended) & ~load.taken)

        # Gram product.
        m.d.comb += self.gram_last.eq(self.step == last_step)
        with m.If(gram):
            m.d.sync += self.step.eq(Mux(self.gram_last, 0, self.step + 1))
        with m.If(following):
            m.d.sync += [self.gram_active.eq(1), weights_active.eq(1)]
        with m.Elif(gram & self.gram_last):
            m.d.sync += self.gram_active.eq(0)
        with m.If(gram_stored):
            m.d.sync += gram_done.eq(1)

        # Weights: sizes of the blocks, highest bit first; energies of row and column in turn.
        weight_last = Signal()
        m.d.comb += weight_last.eq(self.weight == p.weight_steps - 1)
        weights = Signal()
        m.d.comb += weights.eq(weights_active & self.there)
        with m.If(weights):
            m.d.sync += self.weight.eq(Mux(weight_last, 0, self.weight + 1))
            with m.If(weight_last):
                m.d.sync += weights_active.eq(0)
        active = delayed(m, "weights", weights, 2, reset_less=False)[2]
        odd = delayed(m, "weight_odd", self.weight[0], 2)[2]
        final_pair = delayed(m, "weight_final", self.weight >= p.weight_steps - 2, 2)[2]
        weights_last = delayed(m, "weight_last", weights & weight_last, 2, reset_less=False)[2]
        with m.If(weights_last):
            m.d.sync += weights_done.eq(1)
        row_tail, column_tail = Signal(), Signal()
        m.d.comb += [
            row_tail.eq(self.row == last_block),
            column_tail.eq(self.column == last_block),
        ]
        sizes = [Signal(p.block_bits + 1, name=f"size_{name}", reset_less=True) for name in ("column", "row")]
        twice, once = Signal(reset_less=True), Signal(reset_less=True)
        begin = delayed(m, "start", start, 1, reset_less=False)
        with m.If(begin[1]):
            for size, is_tail in zip(sizes, (column_tail, row_tail), strict=True):
                m.d.sync += size.eq(Mux(is_tail, tail, p.block))
            m.d.sync += [
                twice.eq(row_tail & column_tail),
                once.eq(row_tail ^ column_tail),
            ]
        with m.Elif(active & odd):
            m.d.sync += [size.eq(size << 1) for size in sizes]
        chosen = delayed(m, "chosen", begin[1], 1, reset_less=False)[1]
        scale = Signal.like(shift)
        with m.If(twice):
            m.d.comb += scale.eq(constants.shifts[2])
        with m.Elif(once):
            m.d.comb += scale.eq(constants.shifts[1])
        with m.Else():
            m.d.comb += scale.eq(constants.shifts[0])
        with m.If(chosen):
            with m.If(twice):
                m.d.sync += self.factor.eq(constants.reciprocals[2])
            with m.Elif(once):
                m.d.sync += self.factor.eq(constants.reciprocals[1])
            with m.Else():
                m.d.sync += self.factor.eq(constants.reciprocals[0])

        # Numerator: one adder for weights, difference and scale. Its carry rounds: 2 in all, before the scale.
        energy_read = Signal(p.energy_bits, reset_less=True)
        m.d.sync += energy_read.eq(energy)
        subtract, double = Signal(), Signal()
        m.d.comb += [
            subtract.eq(weights_done & gram_done & ~subtracted),
            double.eq(subtracted & ~shifted),
        ]
        gate = Signal()
        m.d.comb += gate.eq(active & Mux(odd, sizes[1][-1], sizes[0][-1]))
        adder = MultiplexedAdder(p.numerator_bits, target=unit._target)
        m.submodules.numerator_adder = adder
        negative = Signal(signed(p.numerator_bits))
        m.d.comb += [
            negative.eq(Cat(Const(1, 1), ~total).as_signed()),
            adder.select.eq((active & ~odd) | double),
            adder.x0.eq(self.numerator),
            adder.x1.eq(self.numerator << 1),
            adder.y.eq(Mux(subtract, negative, energy_read & gate.replicate(p.energy_bits))),
            adder.carry.eq(subtract | (active & final_pair & ((scale == 0) | ((scale == 1) & odd)))),
        ]
        with m.If(begin[1]):
            m.d.sync += self.numerator.eq(0)
        with m.Elif(active | subtract | double):
            m.d.sync += self.numerator.eq(adder.o)
        over = Signal()
        with m.If(chosen):
            m.d.sync += [over.eq(0), shift.eq(scale), shifted.eq(scale == 0)]
        with m.If(subtract):
            m.d.sync += subtracted.eq(1)
        with m.If(double):
            m.d.sync += [shift.eq(shift - 1), shifted.eq(shift == 1), over.eq(over | self.numerator[-1])]
        with m.If(final):
            m.d.sync += self.capped.eq(over | self.numerator[NUMERATOR_SHIFT + SCALE_LIMIT_BITS :].any())


def _tree(m: Module, values: list[Value]) -> Signal:
    """Sum with a register behind every second level and the last."""
    level = 0
    while len(values) > 1:
        values = [values[n] + values[n + 1] for n in range(0, len(values), 2)]
        level += 1
        if level % 2 == 0 or len(values) == 1:
            registers = []
            for n, value in enumerate(values):
                register = Signal(Shape.cast(value.shape()), name=f"tree_{level}_{n}", reset_less=True)
                m.d.sync += register.eq(value)
                registers.append(register)
            values = list(registers)
    total = values[0]
    assert isinstance(total, Signal)
    return total
