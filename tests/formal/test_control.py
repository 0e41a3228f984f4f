"""No deadlock of gated control: with a ready sink, the next output comes within a bound, whatever was before.

A skeleton of the path loader → field → pruner → walker → output with payloads of one bit and finite queues. Contracts:
the loader takes one stream, in which the factors of a head come before its rows of operands, and sends each to its
queue; the field makes all score rows of a head from its factors, one a cycle, each when there is room; the pruner holds
two rows and answers each with a mask row; the walker waits for the mask and the operands of a row and gives one output.
"""

from __future__ import annotations

from pathlib import Path

from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from rtl.lib.streams import StreamQueue
from tests.formal.prover import Mode, Proof, fails, holds

_ROWS = 3
_BOUND = 16


class _Skeleton(wiring.Component):
    """One payload of ``i`` is the factors of a head or the operands of a row, in the order that the loader expects."""

    def __init__(self, *, factors_first: bool) -> None:
        self._factors_first = factors_first
        super().__init__({"i": In(stream.Signature(1)), "o": Out(stream.Signature(1))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        factors, scores, masks, operands = (StreamQueue(1, 2) for _ in range(4))
        m.submodules += [factors, scores, masks, operands]

        # Loader.
        place = Signal(range(_ROWS + 1))
        is_factors = place == (0 if self._factors_first else _ROWS)
        with m.If(is_factors):
            m.d.comb += [factors.i.valid.eq(self.i.valid), self.i.ready.eq(factors.i.ready)]
        with m.Else():
            m.d.comb += [operands.i.valid.eq(self.i.valid), self.i.ready.eq(operands.i.ready)]
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += place.eq(0)
            with m.If(place != _ROWS):
                m.d.sync += place.eq(place + 1)

        # Field.
        row = Signal(range(_ROWS))
        m.d.comb += [
            scores.i.valid.eq(factors.o.valid),
            factors.o.ready.eq(scores.i.ready & (row == _ROWS - 1)),
        ]
        with m.If(scores.i.valid & scores.i.ready):
            m.d.sync += row.eq(0)
            with m.If(row != _ROWS - 1):
                m.d.sync += row.eq(row + 1)

        # Pruner: a row is decided a cycle after it was taken.
        holds_row = Signal()
        m.d.comb += [scores.o.ready.eq(~holds_row), masks.i.valid.eq(holds_row)]
        with m.If(scores.o.valid & scores.o.ready):
            m.d.sync += holds_row.eq(1)
        with m.Elif(masks.i.ready):
            m.d.sync += holds_row.eq(0)

        # Walker.
        both = masks.o.valid & operands.o.valid
        m.d.comb += [
            self.o.valid.eq(both),
            masks.o.ready.eq(both & self.o.ready),
            operands.o.ready.eq(both & self.o.ready),
        ]
        return m


def _progress(*, factors_first: bool) -> Proof:
    proof = Proof()
    proof.m.submodules.dut = skeleton = _Skeleton(factors_first=factors_first)
    proof.source(skeleton.i, "i")
    proof.m.d.comb += skeleton.o.ready.eq(proof.free(1, "o_ready"))
    # Cycles since an output, an idle source or a stalled sink.
    still = Signal(range(_BOUND + 1), name="still")
    moves = ~skeleton.i.valid & skeleton.i.ready | ~skeleton.o.ready | skeleton.o.valid
    with proof.m.If(moves):
        proof.m.d.sync += still.eq(0)
    with proof.m.Elif(still != _BOUND):
        proof.m.d.sync += still.eq(still + 1)
    proof.check(still != _BOUND, "an output comes")
    return proof


def test_no_deadlock(tmp_path: Path) -> None:
    holds(_progress(factors_first=True).prove(tmp_path, mode=Mode.BOUNDED, depth=36))


def test_operands_before_their_factors_are_found(tmp_path: Path) -> None:
    """More rows of operands than their queue holds, in front of the factors that their masks need."""
    fails(_progress(factors_first=False).prove(tmp_path, mode=Mode.BOUNDED, depth=24), "an output comes")
