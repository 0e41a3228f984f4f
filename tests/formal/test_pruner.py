"""The three invariants of the pruner [SPEC §6] on its hardware, for heads without end and any stalls.

The rows are compared with what the contract says of them (docs/pruner.md, 2 and 4), not with the golden model. The
proof is an induction over the real unit, with three things left to chance, each more than the hardware can do: the
scores that a row's memory holds, the moment at which a row can be decided, and whether a head's score left its band. Of
scores only this is kept: with the highest thresholds every key is 0, which the second proof shows on the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from amaranth.hdl import Const, Module, Mux, Signal, Value

from dtp.pruner import Band, Gate, PrunerError, PrunerParams
from rtl import pruner
from rtl.pruner import Pruner
from tests.formal.prover import Mode, Proof, fails, holds, in_state

PARAMS = PrunerParams(max_blocks=4, heads=1, lanes=2, score_bits=2, weight_bits=2, step_bits=2)


class _Abstract(Pruner):
    """The pruner between its memories of rows and of masks; scores, times and verdicts are anything."""

    def __init__(self, params: PrunerParams) -> None:
        super().__init__(params)
        self.any_key = [Signal(params.score_bits, name=f"any_key_{lane}") for lane in range(params.lanes)]
        self.any_filled = Signal()
        self.any_band = Signal()

    @property
    def is_open(self) -> Value:
        """All gates open."""
        c = self.command.payload
        return (c.gate == Gate.THRESHOLD) & c.theta_low.all() & c.theta_high.all() & (c.band == Band.NONE)

    def _row_memory(
        self, m: Module, write: Value, place: Value, key: Value, word: Value, buffer: Value
    ) -> list[Value]:
        return [key & (~self.is_open).replicate(len(key)) for key in self.any_key]

    def _band(self, m: Module, begin: Value, valid: Sequence[Value], legal: Value, new: Value) -> Value:
        return self.any_band

    def _decide(
        self, m: Module, begin: Value, filled: pruner._Count, row_done: Signal, by_budget: Value, row: Value,
        word: Signal, keys: Sequence[Value],
    ) -> tuple[Signal, Signal, Signal, Signal]:  # fmt: skip
        filled.value = self.any_filled
        return super()._decide(m, begin, filled, row_done, by_budget, row, word, keys)


def _invariants(component: _Abstract) -> Proof:
    p = component.params
    proof = Proof()
    inside = component.elaborate(None)
    memory = inside.submodules.masks
    looks = [memory.read_port(domain="comb") for _half in range(2)]
    component.elaborate = lambda _platform: inside  # type: ignore[method-assign]
    r = proof.opened(component, "dut")
    c = component.command.payload
    proof.source(component.command, "command")
    proof.source(component.i_holonomy, "holonomy")
    proof.source(component.i_table, "table")
    proof.sink(component.report, "report")
    ready = proof.free(1, "o_ready")
    proof.m.d.comb += component.o.ready.eq(ready)

    waiting, bisecting, ending, writing = (in_state(r["decide_state"], n) for n in ("wait", "bisect", "end", "write"))
    in_command, in_scores, in_drain, in_report, in_done = (
        in_state(r["heads_state"], name) for name in ("command", "scores", "drain", "report", "done")
    )
    offering = in_state(r["rows_state"], "offer")
    written, read, word, tail = r["written"], r["read"], r["word"], r["tail"]
    found, found_before, mask = r["found"], r["found_before"], r["mask"]
    busy = in_scores | in_drain | in_report
    has_rows = busy & (r["code"] != PrunerError.BLOCKS)
    may_decide = has_rows & ~in_report & ~r["all_decided"]
    proof.m.d.comb += [
        *(key.eq(proof.free(p.score_bits, f"key_{n}")) for n, key in enumerate(component.any_key)),
        component.any_filled.eq(proof.free(1, "filled") & may_decide),
        component.any_band.eq(proof.free(1, "band")),
    ]
    # The verdict of a head is final when its last row is decided.
    band_before = proof.before(component.any_band, "band")
    proof.assume(~proof.before(r["all_decided"], "decided") | (component.any_band == band_before))

    def legal(row: Value) -> list[Value]:
        return [
            (row <= c.last_valid) & (block <= c.last_valid) & (~c.causal | (block <= row))
            for block in range(p.max_blocks)
        ]

    def good(row: Value, bits: Value, blocks: Value | None = None) -> Value:
        """Whether the bits of a row are as the invariants say, where ``blocks`` is set."""
        result: Value = Const(1, 1)
        for block, is_legal in enumerate(legal(row)):
            bit = bits[block]
            fine = (~bit | is_legal) & (bit | ~is_legal | ((row != block) & ~component.is_open))
            result = result & (fine if blocks is None else fine | ~blocks[block])
        return result

    # Control.
    proof.check(in_command | component.command.valid, "the command is held")
    proof.check(in_command | busy | in_done, "states")
    proof.check(waiting | may_decide, "rows are decided within a head")
    code = r["code"]
    by_command = (code != PrunerError.NONE) & (code != PrunerError.SHORT) & (code != PrunerError.LONG)
    proof.check(~busy | (r["refused"] == by_command), "refused by its command")
    proof.check(~busy | ((code == PrunerError.BLOCKS) == (c.last_valid > c.last_block)), "refused blocks")
    proof.check(~busy | ~r["all_read"] | r["all_decided"], "read after decided")
    proof.check(~in_report | r["all_read"] | ~has_rows, "report after the rows")
    proof.check(~has_rows | r["all_decided"] | (written <= c.last_block), "rows in order")
    proof.check(~has_rows | r["all_decided"] | (read <= written), "reads behind writes")
    proof.check(~has_rows | r["all_read"] | (read <= c.last_block), "reads within the head")
    proof.check(~busy | has_rows | ~(r["all_decided"] | r["all_read"] | (written != read)), "refused blocks write none")
    idle = in_report | in_done | in_command
    proof.check(~idle | r["all_read"] | (~r["all_decided"] & (written == read)), "nothing is left behind a head")
    proof.check(~waiting | (r["kept_count"] == 0), "all kept blocks are counted")
    proof.check(~may_decide | (r["live"] == (written <= c.last_valid)), "live rows")
    proof.check(busy | ~offering, "rows are offered within a head")
    banded = (c.band != Band.NONE) & ~r["refused"]
    available = has_rows & ~r["all_read"] & (r["all_decided"] | (~banded & (read < written)))
    proof.check(~offering | available, "only decided rows are offered")

    # Passes over a row.
    storing = ending & ~r["or_equal"]
    first = storing & ~tail & (word == 0)
    last_word = c.last_block[1:]
    issuing = (bisecting | ending) & ~tail
    legal_last = Signal(p.index_bits)
    proof.m.d.comb += legal_last.eq(Mux(c.causal, written, c.last_valid))
    proof.check(~r["or_equal"] | (ending & ~tail) | writing, "equal scores last")
    proof.check(~tail | bisecting | ending, "passes end")
    proof.check(~issuing | ((word <= last_word) & (r["within"] == (word <= legal_last[1:]))), "legal words")
    proof.check(~busy | ~waiting | ((word == 0) & r["within"]), "passes begin")
    proof.check(~component.is_open | ~bisecting, "thresholds need no bisection")
    proof.check(~component.is_open | ~ending | (r["trial"] == 1), "thresholds need no trial")

    # What is found, and what is stored of it.
    before = Signal.like(word)
    proof.m.d.comb += before.eq(r["word_before"])
    stage = Signal(p.lanes)  # the strict comparison of the word in hand
    proof.m.d.comb += stage.eq(Mux(r["or_equal"], found, found_before))
    at = Signal(p.max_blocks)
    known = Signal(p.max_blocks)
    proof.m.d.comb += [at.eq(((1 << p.lanes) - 1) << (before << 1)), known.eq(at)]
    placed = Signal(p.max_blocks)
    proof.m.d.comb += placed.eq(stage << (before << 1))
    proof.check(~ending | first | good(written, placed, known), "found blocks")
    also = Signal(p.max_blocks)
    proof.m.d.comb += also.eq(found << (before << 1))
    is_legal = Signal(p.max_blocks)
    for block, bit in enumerate(legal(written)):
        proof.m.d.comb += is_legal[block].eq(bit)
    proof.check(~ending | first | ((also & ~is_legal) == 0), "equal ones are legal")
    proof.check(~first | ((found == 0) & (found_before == 0)), "nothing is found at first")
    proof.check(~ending | first | (before == Mux(tail, last_word, word - ~r["or_equal"])), "word in hand")
    done = Signal(p.max_blocks)  # blocks whose words are stored
    proof.m.d.comb += done.eq((Const(1, p.max_blocks + 1) << (before << 1)) - 1)
    empty_yet = bisecting | first
    proof.check(~empty_yet | (mask == 0), "an empty row at first")
    proof.check(~ending | first | (good(written, mask, done) & ((mask & ~done) == 0)), "words stored")
    proof.check(~writing | good(written, mask), "a row before it is written")

    # Any row, in the memory and out.
    row = proof.constant(p.index_bits, "row")
    proof.m.d.comb += [look.addr.eq(row + half * p.max_blocks) for half, look in enumerate(looks)]
    has_it = has_rows & Mux(r["all_decided"], row <= c.last_block, row < written)
    proof.check(~has_it | good(row, looks[0].data), "a row in the memory")
    proof.check(looks[1].data == 0, "rows of a skipped head")
    out = component.o.payload
    offered = component.o.valid & (read == row)
    proof.check(~offered | (out.mask == Mux(out.skipped, 0, looks[0].data)), "the output shows the memory")
    proof.check(~offered | out.skipped | good(row, out.mask), "a row on the output")
    proof.check(~offered | ~out.skipped | (out.mask == 0), "a row of a skipped head on the output")
    outside = [out.mask[block] & (block > c.last_block) for block in range(p.max_blocks)]
    proof.check(~offered | ~sum(outside[1:], outside[0]).any(), "no block outside the sequence")
    proof.check(~offered | out.skipped | (row > c.last_valid) | out.mask.bit_select(row, 1), "a live block")
    open_mask = Signal(p.max_blocks)
    for block, bit in enumerate(legal(row)):
        proof.m.d.comb += open_mask[block].eq(bit)
    proof.check(~offered | ~component.is_open | (out.mask == open_mask), "all gates open")
    proof.check(proof.waits(component.o, "o") | (proof.before(read, "read") != row), "o keeps what it offers")
    return proof


def test_invariants_hold(tmp_path: Path) -> None:
    holds(_invariants(_Abstract(PARAMS)).prove(tmp_path, mode=Mode.INDUCTION, depth=1))


class _Overlooking(_Abstract):
    """A pruner that forgets the first block where nothing is padding."""

    def elaborate(self, platform: object) -> Module:
        m = super().elaborate(platform)
        with m.If(self.command.payload.last_valid == self.command.payload.last_block):
            m.d.comb += self.o.payload.mask[0].eq(0)
        return m


class _Overreaching(_Abstract):
    """A pruner that keeps a block behind the sequence when a row is full."""

    def elaborate(self, platform: object) -> Module:
        m = super().elaborate(platform)
        with m.If(self.o.payload.mask[0] & (self.command.payload.last_block == 0)):
            m.d.comb += self.o.payload.mask[1].eq(1)
        return m


@pytest.mark.parametrize(
    ("broken", "message"), [(_Overlooking, "a live block"), (_Overreaching, "no block outside the sequence")]
)
def test_a_broken_row_is_found(broken: type[_Abstract], message: str, tmp_path: Path) -> None:
    verdict = _invariants(broken(PARAMS)).prove(tmp_path, mode=Mode.BOUNDED, depth=9)
    fails(verdict, message)


def _arithmetic(*, broken: bool) -> Proof:
    """The real unit with the highest thresholds: what the gate says in front of the row memory."""
    proof = Proof()
    component = Pruner(PARAMS)
    r = proof.opened(component, "dut")
    c = component.command.payload
    proof.source(component.command, "command")
    proof.source(component.i_holonomy, "holonomy")
    proof.source(component.i_table, "table")
    proof.m.d.comb += [component.o.ready.eq(proof.free(1, "o_ready")), component.report.ready.eq(proof.free(1, "sink"))]
    proof.assume((c.gate == Gate.THRESHOLD) & c.theta_low.all() & (broken | c.theta_high.all()))
    proof.check(~proof.started | r["passed"], "everything passes")
    return proof


def test_the_highest_thresholds_pass(tmp_path: Path) -> None:
    holds(_arithmetic(broken=False).prove(tmp_path, mode=Mode.INDUCTION, depth=1))


def test_a_lower_threshold_is_found(tmp_path: Path) -> None:
    fails(_arithmetic(broken=True).prove(tmp_path, mode=Mode.INDUCTION, depth=1), "everything passes")
