"""The three invariants of the pruner [SPEC §6], on the hardware of a small configuration.

One head from reset, with any command, any scores, any stalls of sources and sinks, and a table that holds anything: what
runs before left nothing else. Its rows are compared with what the contract says of them (docs/pruner.md, 2 and 4), not
with the golden model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value

from dtp.pruner import Band, Gate, PrunerError, PrunerParams
from rtl.pruner import CommandLayout, Pruner
from tests.formal.prover import Mode, Proof, fails, holds

PARAMS = PrunerParams(max_blocks=2, heads=1, lanes=1, score_bits=2, weight_bits=2, step_bits=2)
DEPTH = 44
"""A head without stalls ends sooner; the cover statement says so."""
_TABLE = "m:*table*"


def _proof(component: Pruner, *, stalls: bool = True) -> tuple[Proof, Value]:
    """The pruner with assertions of all invariants, and whether a head was answered."""
    p = component.params
    proof = Proof()
    proof.m.submodules.dut = component
    c = proof.constant(CommandLayout(p), "command")
    proof.m.d.comb += [component.command.valid.eq(1), component.command.payload.eq(c)]
    for port, name in ((component.i_holonomy, "holonomy"), (component.i_table, "table")):
        proof.source(port, name)
    if stalls:
        proof.sink(component.o, "o")
        proof.sink(component.report, "report")
    else:
        proof.assume(component.i_holonomy.valid & component.i_table.valid)
        proof.m.d.comb += [component.o.ready.eq(1), component.report.ready.eq(1)]

    row = Signal(range(p.max_blocks + 1), name="row")
    answered = Signal(name="answered")
    taken = component.o.valid & component.o.ready
    with proof.m.If(taken):
        proof.m.d.sync += row.eq(row + 1)
    with proof.m.If(component.report.valid & component.report.ready):
        proof.m.d.sync += answered.eq(1)

    offered = component.o.valid & ~answered
    out = component.o.payload
    live = row <= c.last_valid
    legal = Signal(p.max_blocks, name="legal")
    inside = Signal(p.max_blocks, name="inside")
    for block in range(p.max_blocks):
        proof.m.d.comb += [
            legal[block].eq(live & (block <= c.last_valid) & (~c.causal | (block <= row))),
            inside[block].eq((row <= c.last_block) & (block <= c.last_block)),
        ]
    is_open = (c.gate == Gate.THRESHOLD) & c.theta_low.all() & c.theta_high.all() & (c.band == Band.NONE)
    diagonal = (out.mask & (Const(1, 1) << row)).any()
    proof.check(~offered | ((out.mask & ~inside) == 0), "no block outside the sequence")
    proof.check(~offered | ((out.mask & ~legal) == 0), "no illegal block")
    proof.check(~offered | out.skipped | ~live | diagonal, "a live block in every row of a kept head")
    proof.check(~offered | ~out.skipped | ((out.mask == 0) & (c.band != Band.NONE)), "a skipped head is empty")
    proof.check(~offered | ~is_open | (out.mask == legal), "all gates open keep all legal blocks")
    proof.check(~offered | (out.last == (row == c.last_block)), "last on the final row")
    report = component.report
    refused = c.last_valid > c.last_block
    proof.check(~report.valid | answered | refused | (row == c.last_block + 1), "the report follows the last row")
    proof.check(~report.valid | answered | ((report.payload.error == PrunerError.BLOCKS) == refused), "wrong blocks")
    return proof, answered & (row == p.max_blocks)


def test_invariants_hold(tmp_path: Path) -> None:
    proof, _ = _proof(Pruner(PARAMS))
    holds(proof.prove(tmp_path, mode=Mode.BOUNDED, depth=DEPTH, forget=[_TABLE]))


def test_heads_end_within_the_proof(tmp_path: Path) -> None:
    proof, answered = _proof(Pruner(PARAMS), stalls=False)
    proof.cover(answered)
    holds(proof.prove(tmp_path, mode=Mode.COVER, depth=DEPTH))
