"""Accumulators of the MAC array: no legal input overflows the width that the configuration derives.

The two uses of docs/tile.md, 2, as arithmetic with adversarial sums: a score (bias, plain and lifted passes) and P·V
(any rescales, each rounding against us). Inductions; the bound that they carry is the configuration's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from amaranth.hdl import Mux, Signal, Value, signed

from dtp.array import ArrayParams
from dtp.config import BIAS_BITS, PRESETS, RESCALE_BITS, Config
from tests.formal.prover import Mode, Proof, fails, holds

_WIDE = 44


def _value(proof: Proof, most: int, name: str) -> Signal:
    """Any number from −most to most."""
    value = proof.free(signed(most.bit_length() + 1), name)
    proof.assume((value <= most) & (value >= -most))
    return value


def _fits(proof: Proof, value: Signal, bits: int) -> None:
    proof.check((value >= -(1 << (bits - 1))) & (value < 1 << (bits - 1)), "fits the accumulator")


def _rescaled(acc: Signal, rescale: Signal) -> Value:
    """The old sum shifted down: half of the last dropped place is added; a shift of 0 changes nothing."""
    return (((acc << 1) >> rescale) + 1) >> 1


def _rescales(config: Config, bits: int) -> Proof:
    """A rescaled sum is never further from 0 than the sum was, whatever the shift: what :func:`_values` builds on."""
    proof = Proof()
    acc = proof.free(signed(bits + 1), "acc")
    rounded = _rescaled(acc, proof.free(RESCALE_BITS, "rescale"))
    proof.check(_no_further(rounded, acc), "no further from 0")
    return proof


def _no_further(value: Value, acc: Value) -> Value:
    return Mux(acc < 0, (value <= 0) & (value >= acc), (value >= 0) & (value <= acc))


def _values(config: Config, bits: int) -> Proof:
    """P·V of one row and column: a block's sum is added to the rescaled old one, any value no further from 0."""
    c, proof = config, Proof()
    most = ((1 << c.probability_bits) - 1) * c.block << (c.operand_bits - 1)
    acc = Signal(signed(_WIDE), name="acc")
    blocks = Signal(range(c.max_blocks + 1), name="blocks")
    first = proof.free(1, "first")
    rounded = proof.free(signed(_WIDE), "rounded")
    proof.assume(_no_further(rounded, acc))
    proof.assume(first | ((blocks != 0) & (blocks != c.max_blocks)))
    proof.m.d.sync += [
        acc.eq(Mux(first, 0, rounded) + _value(proof, most, "sum")), blocks.eq(Mux(first, 1, blocks + 1)),
    ]  # fmt: skip
    bound = blocks * (most + 1)
    proof.check((acc <= bound) & (acc >= -bound), "a bound for so many blocks")
    proof.check(blocks <= c.max_blocks, "blocks")
    _fits(proof, acc, bits)
    return proof


def _scores(config: Config, bits: int) -> Proof:
    """The score of one pair: a bias, then plain passes, then lifted ones."""
    c, proof = config, Proof()
    plain_most = c.block << (c.row_bits + c.operand_bits - 2)
    lifted_most = c.block << (c.lifted_row_bits + c.lifted_bits - 2)
    bias_most = 1 << (BIAS_BITS - 1)
    acc = Signal(signed(_WIDE), name="acc")
    plain = Signal(range(c.max_chunks + 1), name="plain")
    lifted = Signal(range(c.lifted_passes + 1), name="lifted")
    first, is_lifted = proof.free(1, "first"), proof.free(1, "is_lifted")
    base = Mux(first, _value(proof, bias_most, "bias"), acc)
    term = Mux(is_lifted, _value(proof, lifted_most, "lifted_sum"), _value(proof, plain_most, "plain_sum"))
    proof.assume(~(first & is_lifted))
    proof.assume(first | Mux(is_lifted, lifted != c.lifted_passes, plain != c.max_chunks))
    proof.m.d.sync += [
        acc.eq(base + term),
        plain.eq(Mux(first, 1, plain + ~is_lifted)),
        lifted.eq(Mux(first, 0, lifted + is_lifted)),
    ]
    bound = bias_most + plain * plain_most + lifted * lifted_most
    proof.check((acc <= bound) & (acc >= -bound), "a bound for so many passes")
    proof.check((plain <= c.max_chunks) & (lifted <= c.lifted_passes), "passes")
    _fits(proof, acc, bits)
    return proof


@pytest.mark.parametrize("build", [_rescales, _values, _scores])
@pytest.mark.parametrize("name", ["ecp5-85k"])
def test_no_accumulator_overflows(name: str, build: object, tmp_path: Path) -> None:
    config = Config.load(name)
    proof = build(config, ArrayParams.of(config).acc_bits)  # type: ignore[operator]
    holds(proof.prove(tmp_path, mode=Mode.INDUCTION, depth=1))


def test_one_bit_less_overflows(tmp_path: Path) -> None:
    config = Config.load("tiny")
    fails(
        _values(config, config.accumulator_bits - 1).prove(tmp_path, mode=Mode.BOUNDED, depth=config.max_blocks + 2),
        "fits the accumulator",
    )


@pytest.mark.parametrize("name", PRESETS)
def test_corners_of_products_and_sums(name: str) -> None:
    """The largest products that legal operands give fit, and so does a sum of them in all lanes."""
    c = Config.load(name)
    params = ArrayParams.of(c)
    row, lifted_row = 1 << (c.row_bits - 1), 1 << (c.lifted_row_bits - 1)
    for x, y in (
        (row, 1 << (c.operand_bits - 1)), (lifted_row, 1 << (c.lifted_bits - 1)),
        ((1 << c.probability_bits) - 1, 1 << (c.operand_bits - 1)),
    ):  # fmt: skip
        # Operands are symmetric but for the most negative one, which never meets another one: q and k are.
        assert -x * (y - 1) >= -(1 << (params.product_bits - 1))
        assert x * (y - 1) < 1 << (params.product_bits - 1)
        assert x * (y - 1) * c.block < 1 << (params.sum_bits - 1)
    assert params.acc_bits == c.accumulator_bits >= params.sum_bits
