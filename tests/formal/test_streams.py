"""Streams: what is offered is never dropped, doubled, reordered or changed while it waits, at any time.

One payload is followed, chosen by the solver: it enters, so many are ahead of it, it leaves as it came. That everything
else stays in step is what the counts say. The proofs are inductions; the invariants tie the counts to the registers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from amaranth.hdl import Module, Mux, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from dtp.config import Config
from rtl.attention import AbortGate
from rtl.lib.streams import BlockQueue, ForwardRegister, PrefetchQueue, RegisterSlice, StreamQueue
from tests.formal.prover import Mode, Proof, fails, holds

_BITS = 2


class _Followed:
    """Counts what a stream component holds, and follows one payload through it."""

    def __init__(self, proof: Proof, component: Any, capacity: int, *, forwards: bool = False) -> None:
        proof.source(component.i, "i")
        proof.sink(component.o, "o")
        came, left = Signal(), Signal()
        self.count = Signal(range(capacity + 2), name="count")
        self.ahead = Signal(range(capacity + 2), name="ahead")
        self.inside = Signal(name="inside")
        self.value = Signal(_BITS, name="value")
        done = Signal()
        enters = Signal()
        proof.m.d.comb += [
            came.eq(component.i.valid & component.i.ready),
            left.eq(component.o.valid & component.o.ready),
            enters.eq(came & proof.free(1, "follow") & ~self.inside & ~done),
        ]
        proof.m.d.sync += self.count.eq(self.count + came - left)
        with proof.m.If(enters):
            proof.m.d.sync += [
                self.inside.eq(1), self.value.eq(component.i.payload), self.ahead.eq(self.count - left),
            ]  # fmt: skip
        with proof.m.Elif(self.inside & left):
            proof.m.d.sync += [self.inside.eq(self.ahead != 0), done.eq(self.ahead == 0), self.ahead.eq(self.ahead - 1)]
        proof.check(self.count <= capacity, "no more than it holds")
        proof.check(component.o.valid == (self.count != 0), "offers exactly what it holds")
        room = self.count != capacity
        room |= left if forwards else 0
        proof.check(component.i.ready == room, "takes exactly what fits")
        proof.check(~self.inside | (self.ahead < self.count), "what is followed is there")
        leaves = self.inside & (self.ahead == 0)
        proof.check(~leaves | (component.o.payload == self.value), "leaves as it came")
        proof.cover(done & (self.count == capacity))


def _slice(component: RegisterSlice) -> Proof:
    proof = Proof()
    registers = proof.opened(component, "dut")
    followed = _Followed(proof, component, capacity=2)
    behind = followed.inside & (followed.ahead == 1)
    proof.check(~behind | (registers["spare"] == followed.value), "the spare one is kept")
    return proof


def _queue(component: StreamQueue) -> Proof:
    proof = Proof()
    inside = component.elaborate(None)
    look = inside.submodules.memory.read_port(domain="comb")
    component.elaborate = lambda _platform: inside  # type: ignore[method-assign]
    registers = proof.opened(component, "dut")
    followed = _Followed(proof, component, component.depth)
    written, taken = registers["written"], registers["taken"]
    proof.check((written - taken)[: len(written)] == followed.count, "counts agree")
    proof.m.d.comb += look.addr.eq(taken + followed.ahead)
    proof.check(~followed.inside | (look.data == followed.value), "what waits is kept")
    return proof


def _register(component: ForwardRegister) -> Proof:
    proof = Proof()
    proof.opened(component, "dut")
    followed = _Followed(proof, component, capacity=1, forwards=True)
    proof.cover(followed.inside)
    return proof


@pytest.mark.parametrize("name", ["slice", "register", "queue of 2", "queue of 4"])
def test_streams_keep_everything(name: str, tmp_path: Path) -> None:
    build = {
        "slice": lambda: _slice(RegisterSlice(_BITS)),
        "register": lambda: _register(ForwardRegister(_BITS)),
        "queue of 2": lambda: _queue(StreamQueue(_BITS, 2)),
        "queue of 4": lambda: _queue(StreamQueue(_BITS, 4)),
    }[name]
    holds(build().prove(tmp_path, mode=Mode.INDUCTION, depth=2))


def _block_queue(component: BlockQueue | PrefetchQueue) -> Proof:
    """Kept in order and never lost, for as long as the bound looks."""
    proof = Proof()
    proof.source(component.i, "i")
    proof.sink(component.o, "o")
    proof.m.submodules.dut = component
    came, left = component.i.valid & component.i.ready, component.o.valid & component.o.ready
    # The n-th payload that enters is the n-th that leaves.
    number = proof.constant(4, "number")
    entered, gone, value = Signal(5), Signal(5), Signal(_BITS)
    proof.m.d.sync += [entered.eq(entered + came), gone.eq(gone + left)]
    with proof.m.If(came & (entered == number)):
        proof.m.d.sync += value.eq(component.i.payload)
    proof.check(gone <= entered, "nothing leaves twice")
    proof.check(~left | (gone != number) | (component.o.payload == value), "leaves as it came")
    # What is inside leaves, with a ready sink, within the latency.
    still = Signal(range(component.LATENCY + 2))
    with proof.m.If((entered == gone) | component.o.valid):
        proof.m.d.sync += still.eq(0)
    with proof.m.Else():
        proof.m.d.sync += still.eq(still + 1)
    proof.check(still <= component.LATENCY, "offers what it holds")
    if isinstance(component, BlockQueue):
        proof.check(component.empty == (entered == gone), "says when it is empty")
    proof.cover(~component.i.ready & (gone == 2))
    return proof


@pytest.mark.parametrize("queue", [BlockQueue, PrefetchQueue])
def test_a_queue_in_block_memory_keeps_everything(
    queue: type[BlockQueue] | type[PrefetchQueue], tmp_path: Path
) -> None:
    holds(_block_queue(queue(_BITS, 4)).prove(tmp_path / "kept", mode=Mode.BOUNDED, depth=18))
    holds(_block_queue(queue(_BITS, 4)).prove(tmp_path / "full", mode=Mode.COVER, depth=18))


def test_the_assumptions_leave_full_queues(tmp_path: Path) -> None:
    holds(_queue(StreamQueue(_BITS, 2)).prove(tmp_path, mode=Mode.COVER, depth=10))


class _Forgetful(wiring.Component):
    """A register slice without a place for the payload that comes while the sink stalls."""

    def __init__(self) -> None:
        super().__init__({"i": In(stream.Signature(_BITS)), "o": Out(stream.Signature(_BITS))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.comb += self.i.ready.eq(1)
        with m.If(~self.o.valid | self.o.ready | self.i.valid):
            m.d.sync += [self.o.valid.eq(self.i.valid), self.o.payload.eq(self.i.payload)]
        return m


def test_a_changed_payload_is_found(tmp_path: Path) -> None:
    proof = Proof()
    proof.m.submodules.dut = component = _Forgetful()
    proof.source(component.i, "i")
    proof.sink(component.o, "o")
    fails(proof.prove(tmp_path, mode=Mode.BOUNDED, depth=6), "o keeps what it offers")


class _Overtaking(StreamQueue):
    """A queue that lets a payload pass the waiting ones when the sink takes one in the same cycle."""

    def elaborate(self, platform: object) -> Module:
        m = super().elaborate(platform)
        with m.If(self.i.valid & self.i.ready & self.o.ready):
            m.d.comb += self.o.payload.eq(self.i.payload)
        return m


def test_a_payload_that_overtakes_is_found(tmp_path: Path) -> None:
    fails(_queue(_Overtaking(_BITS, 2)).prove(tmp_path, mode=Mode.BOUNDED, depth=6), "leaves as it came")


def _gate(*, broken: bool) -> Proof:
    """The abort gate between a normaliser that is reset with ``halt`` and a sink that stalls as it likes."""
    config = Config.load("tiny").changed(
        rows=2, block=4, lanes=4, max_width=8, input_bytes=1, output_bytes=2, normaliser_lanes=1, query_groups=4
    )
    proof = Proof()
    proof.m.submodules.dut = gate = AbortGate(config)
    halt = proof.before(gate.abort, "halt")  # what the tile's units are reset with
    halted = proof.before(halt, "halted")
    payload = Value.cast(gate.from_normaliser.payload)
    proof.m.d.comb += [
        gate.abort.eq(proof.free(1, "abort")),
        gate.i.valid.eq(proof.free(1, "i_valid")),
        Value.cast(gate.i.payload).eq(proof.free(len(Value.cast(gate.i.payload)), "i_payload")),
        gate.to_loader.ready.eq(proof.free(1, "loader_ready")),
        gate.from_normaliser.valid.eq(proof.free(1, "result_valid")),
        payload.eq(proof.free(len(payload), "result_payload")),
    ]
    proof.assume(proof.waits(gate.i, "i"))
    if not broken:
        proof.assume(Mux(halted, ~gate.from_normaliser.valid, proof.waits(gate.from_normaliser, "result")))
    proof.sink(gate.o, "o")
    proof.cover(proof.before(halt & gate.o.valid & ~gate.o.ready, "held"))
    return proof


def test_the_abort_gate_keeps_what_it_offers(tmp_path: Path) -> None:
    holds(_gate(broken=False).prove(tmp_path, mode=Mode.BOUNDED, depth=14))


def test_an_unlawful_unit_behind_the_gate_is_found(tmp_path: Path) -> None:
    fails(_gate(broken=True).prove(tmp_path, mode=Mode.BOUNDED, depth=6), "o keeps what it offers")
