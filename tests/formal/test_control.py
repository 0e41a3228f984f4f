"""No deadlock of gated control: with a ready sink, the next output comes within a bound, whatever was before.

A skeleton of rtl.geometry and the walk with payloads of one bit, heads of one token and two block rows, and short
queues. Contracts: the loader takes, for each pass but the last, a probe when its place is free, then the factors; the
engine takes the factors of a pass when its probe is there (not in the last pass) and what the pass before left in the
memory (not in the first); the field makes all score rows of a head from one result of the engine; the pruner answers
each with a mask row; a run begins when fewer rows wait than half the queue holds; the walk waits for the mask and the
operands of a row and gives one output.
"""

from __future__ import annotations

from pathlib import Path

from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from rtl.lib.streams import StreamQueue
from tests.formal.prover import Mode, Proof, fails, holds

_HEADS = 2
_ROWS = 2
_BOUND = 24


class _Skeleton(wiring.Component):
    """A payload of ``geometry`` is a probe or the factors of a head, one of ``i`` the operands of a row."""

    def __init__(self, *, probes: int) -> None:
        """``probes``: passes whose factors wait for a probe."""
        self._probes = probes
        super().__init__(
            {
                "geometry": In(stream.Signature(1)),
                "i": In(stream.Signature(1)),
                "o": Out(stream.Signature(1)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.factors = factors = StreamQueue(1, 2)
        m.submodules.results = results = StreamQueue(1, 2)
        m.submodules.masks = masks = StreamQueue(1, 2 * _HEADS * _ROWS)
        m.submodules.operands = operands = StreamQueue(1, 2)
        wiring.connect(m, wiring.flipped(self.i), operands.i)

        # Loader: a probe, then factors; the last pass has factors alone.
        loading, factors_next = Signal(range(_HEADS + 1)), Signal()
        engine, probes = Signal(range(_HEADS + 1)), Signal(range(_HEADS + 1))  # pass of the engine; probes loaded
        waiting = Signal(range(2 * _HEADS * _ROWS + 1))
        running, ended = Signal(), Signal()
        takes_factors = running & (factors_next | (loading == _HEADS)) & ~ended
        takes_probe = running & ~takes_factors & ~ended & ((loading == engine) | (loading == engine + 1))
        m.d.comb += [
            factors.i.valid.eq(self.geometry.valid & takes_factors),
            self.geometry.ready.eq((takes_factors & factors.i.ready) | takes_probe),
        ]
        with m.If(self.geometry.valid & takes_probe):
            m.d.sync += [probes.eq(probes + 1), factors_next.eq(1)]
        with m.If(factors.i.valid & factors.i.ready):
            m.d.sync += [factors_next.eq(0), loading.eq(loading + 1), ended.eq(loading == _HEADS)]

        # A run begins when the one before has been answered and there is room for its rows.
        answered = Signal(range(_HEADS * _ROWS + 1))
        with m.If(~running):
            with m.If(waiting < _HEADS * _ROWS):
                m.d.sync += [
                    running.eq(1), ended.eq(0), loading.eq(0), engine.eq(0), probes.eq(0), answered.eq(0),
                ]  # fmt: skip
        with m.Elif(answered == _HEADS * _ROWS):
            m.d.sync += running.eq(0)

        # Engine: what it makes stays for the next pass, and from the second pass on goes to the field.
        there = Signal()
        can = (engine >= self._probes) | (probes > engine)
        can &= (engine == 0) | there
        can &= (engine == 0) | results.i.ready
        m.d.comb += [
            factors.o.ready.eq(can),
            results.i.valid.eq(factors.o.valid & can & (engine != 0)),
        ]
        with m.If(factors.o.valid & can):
            m.d.sync += [engine.eq(engine + 1), there.eq(engine != _HEADS)]

        # Field and pruner: a row is decided a cycle after it was taken.
        row, holds_row = Signal(range(_ROWS)), Signal()
        m.d.comb += [results.o.ready.eq(~holds_row & (row == _ROWS - 1)), masks.i.valid.eq(holds_row)]
        with m.If(results.o.valid & ~holds_row):
            m.d.sync += [holds_row.eq(1), row.eq(0)]
            with m.If(row != _ROWS - 1):
                m.d.sync += row.eq(row + 1)
        with m.Elif(masks.i.ready & holds_row):
            m.d.sync += [holds_row.eq(0), answered.eq(answered + 1)]
        gone = masks.o.valid & masks.o.ready
        m.d.sync += waiting.eq(waiting + (masks.i.valid & masks.i.ready) - gone)

        # Walk.
        both = masks.o.valid & operands.o.valid
        m.d.comb += [
            self.o.valid.eq(both),
            masks.o.ready.eq(both & self.o.ready),
            operands.o.ready.eq(both & self.o.ready),
        ]
        return m


def _progress(*, probes: int) -> Proof:
    proof = Proof()
    proof.m.submodules.dut = skeleton = _Skeleton(probes=probes)
    proof.source(skeleton.geometry, "geometry")
    proof.source(skeleton.i, "i")
    proof.m.d.comb += skeleton.o.ready.eq(proof.free(1, "o_ready"))
    # Cycles since an output, an idle source or a stalled sink.
    still = Signal(range(_BOUND + 1), name="still")
    idle = (~skeleton.i.valid & skeleton.i.ready) | (~skeleton.geometry.valid & skeleton.geometry.ready)
    with proof.m.If(idle | ~skeleton.o.ready | skeleton.o.valid):
        proof.m.d.sync += still.eq(0)
    with proof.m.Elif(still != _BOUND):
        proof.m.d.sync += still.eq(still + 1)
    proof.check(still != _BOUND, "an output comes")
    return proof


def test_no_deadlock(tmp_path: Path) -> None:
    holds(_progress(probes=_HEADS).prove(tmp_path, mode=Mode.BOUNDED, depth=48))


def test_a_last_pass_that_waits_for_a_probe_is_found(tmp_path: Path) -> None:
    """No probe comes for it."""
    fails(_progress(probes=_HEADS + 1).prove(tmp_path, mode=Mode.BOUNDED, depth=48), "an output comes")
