"""The control port for every sequence of accesses: answers wait unchanged, come in time, and alone change anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from amaranth.hdl import Module, Value

from dtp.registers import Access, Field, Register, RegisterMap, Response
from rtl.registers import AxiLiteRegisters
from tests.formal.prover import Mode, Proof, fails, holds

MAP = RegisterMap(
    "proved",
    (
        Register("shown", 0, Access.READ_ONLY, (Field("input", 3, 0, 0, "x"), Field("one", 1, 7, 1, "x", True)), "x"),
        Register("held", 8, Access.READ_WRITE, (Field("low", 2, 7, 2, "in two bytes"),), "x"),
        Register("pulse", 12, Access.WRITE_PULSE, (Field("go", 1, 0, 0, "x"),), "x"),
    ),
)


def _proof(dut: AxiLiteRegisters) -> Proof:
    proof = Proof()
    registers = proof.opened(dut, "dut")
    for name in ("aw", "w", "ar"):
        proof.source(getattr(dut, name), name)
    for name in ("b", "r"):
        proof.sink(getattr(dut, name), name)
    inputs = Value.cast(dut.inputs)
    proof.m.d.comb += inputs.eq(proof.free(len(inputs), "inputs"))

    # Invariants: an address that is held comes before its answer.
    proof.check(~(registers["read_held"] & dut.r.valid), "a read is answered before the next one is taken")

    # Answers come in time.
    took = dut.ar.valid & dut.ar.ready
    proof.check(~proof.before(proof.before(took, "took"), "took_2") | dut.r.valid, "a read is answered in two cycles")
    both = registers["write_held"] & registers["half_held"]
    acts = both & ~dut.b.valid
    proof.check(~proof.before(acts, "acts") | dut.b.valid, "a write is answered when both halves are there")
    proof.check(proof.before(both | dut.b.valid, "cause") | ~dut.b.valid, "an answer has a cause")

    # Nothing else changes anything.
    answers = dut.b.valid & ~proof.before(dut.b.valid, "b_valid")
    done = answers & (dut.b.payload.resp == Response.OKAY)
    values, pulses = Value.cast(dut.values), Value.cast(dut.pulses)
    changed = proof.started & (values != proof.before(values, "values"))
    proof.check(~changed | done, "a value changes with the answer to a write")
    proof.check(~pulses.any() | done, "a pulse comes with the answer to a write")
    proof.check(~proof.before(pulses, "pulses").any() | ~pulses.any(), "a pulse is a cycle long")
    wrong = dut.r.valid & (dut.r.payload.resp != Response.OKAY)
    proof.check(~wrong | (dut.r.payload.data == 0), "an error has no data")
    proof.cover(pulses.any() & dut.r.valid & (dut.r.payload.data != 0))
    return proof


def test_answers_keep_the_law(tmp_path: Path) -> None:
    holds(_proof(AxiLiteRegisters(MAP)).prove(tmp_path, mode=Mode.INDUCTION, depth=4))


def test_the_assumptions_leave_accesses(tmp_path: Path) -> None:
    holds(_proof(AxiLiteRegisters(MAP)).prove(tmp_path, mode=Mode.COVER, depth=10))


class _Live(AxiLiteRegisters):
    """Shows an input as it is now."""

    def _read(self, m: Module) -> None:
        super()._read(m)
        with m.If(self.r.valid & (self.r.payload.resp == Response.OKAY)):
            m.d.comb += self.r.payload.data[0].eq(self.inputs.shown.input[0])


class _Long(AxiLiteRegisters):
    """Keeps a pulse while its answer waits."""

    def _write(self, m: Module) -> None:
        super()._write(m)
        with m.If(self.b.valid & ~self.b.ready):
            m.d.sync += self.pulses.eq(self.pulses)


@pytest.mark.parametrize(
    ("broken", "message"), [(_Live, "r keeps what it offers"), (_Long, "a pulse is a cycle long")]
)
def test_planted_faults_are_found(broken: type[AxiLiteRegisters], message: str, tmp_path: Path) -> None:
    fails(_proof(broken(MAP)).prove(tmp_path, mode=Mode.BOUNDED, depth=8), message)
