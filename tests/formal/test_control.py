"""No deadlock of gated control: with a ready sink, the next output comes within a bound, whatever was before.

A skeleton of rtl.geometry and the walk with payloads of one bit, heads of one token and two block rows, and short
queues. Contracts: the loader takes, for each pass, a probe when the pass is plain and the place is free, then the
factors, which wait for the job of their pass where it is another one than that of the pass before; the engine takes
the factors of a pass when its job runs, its probe is there if it is plain, and what head before left is in the memory
if it is transposed, and a job ends with its last pass; the field makes all score rows of a head from one result of the
engine; the pruner answers each with a mask row; a run begins when fewer rows wait than half the queue holds; the walk
waits for the mask and the operands of a row and gives one output.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from amaranth.hdl import Array, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from dtp.config import Config
from dtp.gated import Run
from rtl.lib.streams import StreamQueue
from tests.formal.prover import Mode, Proof, fails, holds

_HEADS = 4
_ROWS = 2
_BOUND = 32
_DEPTH = 60
_PASSES = Run(heads=_HEADS, tokens=1, words=1).passes(Config.load("tiny"))
_COUNT = len(_PASSES)
# Whether the pass behind one is another job: passes of the same slots are one.
_TURNS = [
    n + 1 == _COUNT or one.slots != _PASSES[n + 1].slots for n, one in enumerate(_PASSES)
]


class _Skeleton(wiring.Component):
    """A payload of ``geometry`` is a probe or the factors of a head, one of ``i`` the operands of a row."""

    def __init__(self, *, last_is_plain: bool = False, forgets: bool = False) -> None:
        """Faults: the last pass waits for a probe; factors that wait for a job are forgotten when it starts."""
        self._last_is_plain, self._forgets = last_is_plain, forgets
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
        m.submodules.masks = masks = StreamQueue(1, 1 << (2 * _HEADS * _ROWS - 1).bit_length())
        m.submodules.operands = operands = StreamQueue(1, 2)
        wiring.connect(m, wiring.flipped(self.i), operands.i)

        # Loader: a probe in plain passes, then factors.
        plain = Array([int(one.plain) for one in _PASSES] + [0])
        transposed = Array([int(one.transposed) for one in _PASSES] + [0])
        head = Array([one.step for one in _PASSES] + [_HEADS])
        turns = Array([int(turn) for turn in _TURNS] + [0])
        loading, probed, waits = Signal(range(_COUNT + 1)), Signal(), Signal()
        engine, probes = Signal(range(_COUNT + 1)), Signal(range(_HEADS + 1))  # pass of the engine; probes loaded
        open_job = Signal()
        waiting = Signal(range(2 * _HEADS * _ROWS + 1))
        running, ended = Signal(), Signal()
        takes_factors = running & (probed | ~plain[loading]) & ~ended & ~waits
        near = (head[loading] == head[engine]) | (head[loading] == head[engine] + 1)
        takes_probe = running & plain[loading] & ~probed & ~ended & near
        m.d.comb += [
            factors.i.valid.eq(self.geometry.valid & takes_factors),
            self.geometry.ready.eq((takes_factors & factors.i.ready) | takes_probe),
        ]
        with m.If(self.geometry.valid & takes_probe):
            m.d.sync += [probes.eq(probes + 1), probed.eq(1)]
        with m.If(factors.i.valid & factors.i.ready):
            m.d.sync += [probed.eq(0), loading.eq(loading + 1), ended.eq(loading == _COUNT - 1)]
            m.d.sync += waits.eq(turns[loading])
        with m.Elif(~open_job & (not self._forgets)):
            m.d.sync += waits.eq(0)

        # A run begins when the one before has been answered and there is room for its rows.
        answered = Signal(range(_HEADS * _ROWS + 1))
        with m.If(~running):
            with m.If(waiting < _HEADS * _ROWS):
                m.d.sync += [
                    running.eq(1), ended.eq(0), loading.eq(0), engine.eq(0), probes.eq(0), answered.eq(0), waits.eq(0),
                ]  # fmt: skip
        with m.Elif(answered == _HEADS * _ROWS):
            m.d.sync += running.eq(0)

        # Engine: what a plain pass makes stays for the next transposed one, whose results go to the field.
        there = Signal()
        needs_probe = plain[engine] | ((engine == _COUNT - 1) & self._last_is_plain)
        can = open_job & (~needs_probe | (probes > head[engine]))
        can &= ~transposed[engine] | (there & results.i.ready)
        m.d.comb += [
            factors.o.ready.eq(can),
            results.i.valid.eq(factors.o.valid & can & transposed[engine]),
        ]
        with m.If(factors.o.valid & can):
            m.d.sync += [engine.eq(engine + 1), there.eq(plain[engine]), open_job.eq(~turns[engine])]
        with m.Elif(running & (engine != _COUNT)):
            m.d.sync += open_job.eq(1)

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


def _progress(**faults: bool) -> Proof:
    proof = Proof()
    proof.m.submodules.dut = skeleton = _Skeleton(**faults)
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
    holds(_progress().prove(tmp_path, mode=Mode.BOUNDED, depth=_DEPTH))


@pytest.mark.parametrize("fault", ["last_is_plain", "forgets"])
def test_what_is_waited_for_without_end_is_found(tmp_path: Path, fault: str) -> None:
    """A probe that no pass brings, and a job that has started."""
    fails(_progress(**{fault: True}).prove(tmp_path, mode=Mode.BOUNDED, depth=_DEPTH), "an output comes")
