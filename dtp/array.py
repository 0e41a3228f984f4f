"""MAC array of the attention tile: parameters, schedule and integer golden model.

``rows`` × ``segments`` dot products of ``block`` lanes a cycle. The *stationary* operand X (a query, later
the probabilities) belongs to a row and is shared by the segments; the *moving* operand Y (keys, later values)
belongs to a segment and is broadcast to the rows:

    sum[row, segment]  = Σ_lane X[row, lane] · Y[segment, lane]
    term[row, segment] = round_shift(sum, shift)
    base[row, segment] = init[segment] if first else round_shift(memory[row, segment, addr], rescale[row])
    memory[row, segment, addr] = base + term

One array serves scores and probabilities × values [GR §10.2]; ``init`` carries the per-key bias of a score,
``shift`` the power-of-two scale of a group of lanes, ``rescale`` the falling of old sums when a row's running
maximum rises.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from dtp.config import BIAS_BITS, SHIFT_FIELD_BITS, Config
from dtp.errors import must
from dtp.fixed import Int, round_shift, signed_range

#: Cycles from the operands of a multiplier to its product: one input and one output register.
MULTIPLIER_CYCLES = 2
#: Bits of a row's rescale amount, 0 … 31.
RESCALE_BITS = 5
#: Low bits of the rescale amount that are applied in the cycle of the accumulating adder, the others before.
RESCALE_FINE_BITS = 2


@dataclass(frozen=True)
class ArrayParams:
    """Shape, widths and schedule of the array.

    Parameters
    ----------
    rows: query rows, each with a stationary operand of its own
    segments: moving operands a step (keys side by side), a divisor of ``block``
    block: lanes of one dot product, a power of two
    row_bits: bits of a stationary operand, signed (13 holds a 12-bit unsigned probability)
    moving_bits: bits of a moving operand, signed
    acc_bits: bits of an accumulator, signed; a sum beyond them wraps, so the user of the array derives them
    acc_depth: accumulators of one (row, segment)
    init_bits: bits of an initial value, signed
    shift_max: largest right shift of a sum; the port takes every amount that its bits can say
    tag_bits: bits carried unchanged from a step to its output
    product_registers: registers between a multiplier and the adder tree, for the way between them on a large chip
    product_bound_bits: bits that hold every product that the operands can give, 0 for those of the multiplier

    Raises
    ------
    DtpError
        for a value outside the rules below
    """

    rows: int
    segments: int
    block: int
    row_bits: int = 13
    moving_bits: int = 9
    acc_bits: int = 30
    acc_depth: int = 80
    init_bits: int = 24
    shift_max: int = 7
    tag_bits: int = 8
    product_registers: int = 0
    product_bound_bits: int = 0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int:
                raise must(owner, field.name, "an integer", value)
        for name, low, high in (
            ("rows", 1, 64),
            ("row_bits", 2, 18),
            ("moving_bits", 2, 18),
            ("acc_depth", 2, 4096),
            ("shift_max", 1, 15),
            ("product_bound_bits", 0, 36),
            ("tag_bits", 1, 64),
            ("product_registers", 0, 2),
        ):
            if not low <= getattr(self, name) <= high:
                raise must(owner, name, f"from {low} to {high}", getattr(self, name))
        if not 4 <= self.block <= 64 or self.block & (self.block - 1):
            raise must(owner, "block", "a power of two from 4 to 64", self.block)
        if self.segments < 1 or self.block % self.segments:
            raise must(owner, "segments", f"a divisor of block {self.block}", self.segments)
        if self.feed_cycles < 4:
            most = self.block // 4
            rule = f"at most block / 4 = {most} (an accumulator is revisited after block / segments cycles)"
            raise must(owner, "segments", rule, self.segments)
        if not self.sum_bits <= self.acc_bits <= 48:
            raise must(owner, "acc_bits", f"from {self.sum_bits} (one sum) to 48", self.acc_bits)
        if not 2 <= self.init_bits <= self.acc_bits:
            raise must(owner, "init_bits", f"from 2 to acc_bits {self.acc_bits}", self.init_bits)

    @classmethod
    def of(cls, config: Config, *, tag_bits: int = 8) -> ArrayParams:
        """The array of a tile."""
        c = config
        return cls(
            rows=c.rows,
            segments=c.segments,
            block=c.block,
            row_bits=c.row_bits,
            moving_bits=c.moving_bits,
            acc_bits=c.accumulator_bits,
            acc_depth=c.accumulator_depth,
            init_bits=BIAS_BITS,
            product_bound_bits=c.product_bits,
            shift_max=(1 << SHIFT_FIELD_BITS) - 1 + max(c.sum_shift, c.lifted_sum_shift),
            tag_bits=tag_bits,
        )

    # Widths

    @property
    def product_bits(self) -> int:
        """Bits of one product, the product of both most negative operands included unless the bound is less."""
        widest = self.row_bits + self.moving_bits
        return min(widest, self.product_bound_bits or widest)

    @property
    def tree_levels(self) -> int:
        """Levels of the adder tree: log2 of ``block``."""
        return (self.block - 1).bit_length()

    @property
    def sum_bits(self) -> int:
        """Bits of one dot product of ``block`` lanes."""
        return self.product_bits + self.tree_levels

    @property
    def shift_bits(self) -> int:
        """Bits of the ``shift`` field."""
        return self.shift_max.bit_length()

    @property
    def addr_bits(self) -> int:
        """Bits of the ``addr`` field."""
        return (self.acc_depth - 1).bit_length()

    # Amounts

    @property
    def multipliers(self) -> int:
        """Multipliers of the array; also its MACs a cycle."""
        return self.rows * self.segments * self.block

    @property
    def feed_cycles(self) -> int:
        """Feeds that fill the stationary operand of every row."""
        return self.block // self.segments

    # Schedule: the cycle, counted from the one in which a step is presented, where a value can be seen

    @property
    def operand_cycle(self) -> int:
        """Port registers: the operands in front of the multipliers."""
        return 1

    @property
    def product_cycle(self) -> int:
        """Products, at the adder tree."""
        return self.operand_cycle + MULTIPLIER_CYCLES + self.product_registers

    @property
    def sum_cycle(self) -> int:
        """Sums: one cycle a level of the adder tree."""
        return self.product_cycle + self.tree_levels

    @property
    def term_cycle(self) -> int:
        """Sums, shifted and rounded."""
        return self.sum_cycle + 1

    @property
    def result_cycle(self) -> int:
        """New accumulators, which are the output and the data written back in the same cycle."""
        return self.term_cycle + 1

    @property
    def latency(self) -> int:
        """Cycles from ``step_valid`` to ``o_valid``."""
        return self.result_cycle

    @property
    def read_registered(self) -> bool:
        """Whether a register follows the accumulator memory; the revisit distance must leave room for it."""
        return self.feed_cycles > 4

    @property
    def keep_cycle(self) -> int:
        """Old accumulators at the last register before their rescale."""
        return self.result_cycle - 3

    @property
    def read_cycle(self) -> int:
        """Read address at the accumulator memory."""
        return self.keep_cycle - (1 if self.read_registered else 0)

    @property
    def revisit_cycles(self) -> int:
        """Least distance in cycles of two steps with one address, the second not ``first``; never more than 5."""
        return self.result_cycle - self.read_cycle + 1


def wrap(x: ArrayLike, bits: int) -> Int:
    """The low ``bits`` bits of a number, read as two's complement: what an adder of that width keeps."""
    low, _ = signed_range(bits)
    return np.asarray(((np.asarray(x, dtype=np.int64) - low) & ((1 << bits) - 1)) + low, dtype=np.int64)


def golden_step(params: ArrayParams, stationary: ArrayLike, moving: ArrayLike, shift: int) -> Int:
    """Terms of one step, (rows, segments): dot products of (rows, block) with (segments, block), shifted."""
    x = np.asarray(stationary, dtype=np.int64)
    y = np.asarray(moving, dtype=np.int64)
    for name, value, shape in (
        ("stationary", x, (params.rows, params.block)),
        ("moving", y, (params.segments, params.block)),
    ):
        if value.shape != shape:
            raise must("golden_step", name, f"of shape {shape}", value.shape)
    return round_shift(x @ y.T, shift)


def golden_accumulate(
    params: ArrayParams, old: ArrayLike, term: ArrayLike, *, first: bool, init: ArrayLike, rescale: ArrayLike
) -> Int:
    """New accumulators, (rows, segments), from the old ones and the terms of a step.

    ``init`` is (segments,), ``rescale`` (rows,). The result wraps at ``acc_bits`` as the hardware does.
    """
    if first:
        base = np.broadcast_to(np.asarray(init, dtype=np.int64), (params.rows, params.segments))
    else:
        base = round_shift(old, np.asarray(rescale, dtype=np.int64)[:, np.newaxis])
    return wrap(base + np.asarray(term, dtype=np.int64), params.acc_bits)


class GoldenArray:
    """The array as a program: feeds and steps in the order in which they are presented.

    A feed and a step of the same cycle are given as step, then feed: the feed belongs to the next chunk.
    """

    def __init__(self, params: ArrayParams) -> None:
        self.params = params
        self.shadow: Int = np.zeros((params.rows, params.block), dtype=np.int64)
        self.active: Int = self.shadow.copy()
        self.memory: Int = np.zeros((params.rows, params.segments, params.acc_depth), dtype=np.int64)

    def feed(self, values: ArrayLike) -> None:
        """``segments`` further lanes of every row, (rows, segments), behind those given before."""
        lanes = np.asarray(values, dtype=np.int64)
        self.shadow = np.concatenate([self.shadow[:, self.params.segments :], lanes], axis=1)

    def step(
        self,
        moving: ArrayLike,
        *,
        swap: bool,
        addr: int,
        first: bool,
        init: ArrayLike,
        shift: int,
        rescale: ArrayLike,
    ) -> Int:
        """One step; the new accumulators at ``addr``, (rows, segments)."""
        if swap:
            self.active = self.shadow.copy()
        term = golden_step(self.params, self.active, moving, shift)
        old = self.memory[:, :, addr]
        new = golden_accumulate(self.params, old, term, first=first, init=init, rescale=rescale)
        self.memory[:, :, addr] = new
        return new
