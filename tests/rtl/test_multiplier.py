"""Multiplier and multiplexed adder: the plain description and the ECP5 cells give the same bits.

The plain description runs in Amaranth's simulator against whole numbers. Both run side by side in Verilator, the
cells as behavioural models of exactly the configuration in use, and so does an array built of each.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from amaranth.back import verilog
from amaranth.hdl import Cat, Const, Module, Signal, unsigned
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator, TickTrigger

from dtp.array import MULTIPLIER_CYCLES, ArrayParams
from dtp.errors import DtpError
from rtl.array import MacArray
from rtl.lib.memory import BlockMemory
from rtl.lib.multiplier import (
    LATENCY,
    JoinedAdder,
    LogicMultiplier,
    MultiplexedAdder,
    Multiplier,
    Selector,
    Target,
)
from sim.bench.toolchain import find_toolchain

CELLS = sorted((Path(__file__).parent / "cells").glob("*.v"))

HARNESS = """
#include "Vtop.h"
#include "verilated.h"
#include <cstdint>
#include <cstdio>
int main() {
    VerilatedContext context;
    Vtop top{&context};
    uint64_t word;
    top.rst = 0;
    while (std::scanf("%lx", &word) == 1) {
        top.i = word;
        top.clk = 0;
        top.eval();
        const uint64_t outputs[] = {OUTPUTS};
        for (uint64_t output : outputs) std::printf("%lx ", output);
        std::printf("\\n");
        top.clk = 1;
        top.eval();
    }
    top.final();
    return 0;
}
"""


def corners(bits: int) -> list[int]:
    """Extremes of a signed width, their neighbours, and every power of two with both signs."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    near = {low, low + 1, -1, 0, 1, high - 1, high}
    powers = {sign << n for sign in (1, -1) for n in range(bits - 1)}
    return sorted(value for value in near | powers if low <= value <= high)


def operand_sequence(a_bits: int, b_bits: int, seed: int) -> list[tuple[int, int, bool]]:
    """(a, b, a_enable): every pair of corners with the enable held, then random ones with it toggling."""
    random = np.random.default_rng(seed)
    sequence = [(a, b, True) for a, b in itertools.product(corners(a_bits), corners(b_bits))]
    for _ in range(1500):
        a = int(random.integers(-(1 << (a_bits - 1)), 1 << (a_bits - 1)))
        b = int(random.integers(-(1 << (b_bits - 1)), 1 << (b_bits - 1)))
        sequence.append((a, b, bool(random.integers(2))))
    return sequence


def expected_products(sequence: Sequence[tuple[int, int, bool]]) -> list[int]:
    """Product registered after each cycle's operands, the enable obeyed; index n belongs to sequence n."""
    held = 0
    products = []
    for a, b, enable in sequence:
        held = a if enable else held
        products.append(held * b)
    return products


class MultiplierPair(wiring.Component):
    """``i`` = a, b, a_enable from the low end; ``o`` = the plain product and whether the cell's differs (bit 63)."""

    def __init__(self, a_bits: int, b_bits: int) -> None:
        self._bits = (a_bits, b_bits)
        super().__init__({"i": In(64), "o": Out(64)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        a_bits, b_bits = self._bits
        products = []
        for target in Target:
            m.submodules[target.value] = multiplier = Multiplier(a_bits, b_bits, target=target)
            m.d.comb += Cat(multiplier.a, multiplier.b, multiplier.a_enable).eq(self.i)
            products.append(multiplier.o)
        m.d.comb += self.o.eq(
            Cat(products[0].as_unsigned(), Const(0, 63 - a_bits - b_bits), products[0] != products[1])
        )
        return m


class LogicPair(wiring.Component):
    """``i`` = a, b; ``o`` = the plain product and whether the cells' differs (bit 63)."""

    def __init__(self, a_bits: int, b_bits: int) -> None:
        self._bits = (a_bits, b_bits)
        super().__init__({"i": In(64), "o": Out(64)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        a_bits, b_bits = self._bits
        products = []
        for target in Target:
            m.submodules[target.value] = multiplier = LogicMultiplier(a_bits, b_bits, target=target)
            m.d.comb += Cat(multiplier.a, multiplier.b).eq(self.i)
            products.append(multiplier.o)
        m.d.comb += self.o.eq(
            Cat(products[0].as_unsigned(), Const(0, 63 - a_bits - b_bits), products[0] != products[1])
        )
        return m


class AdderPair(wiring.Component):
    """``i`` = select, carry, x0, x1, y; ``o`` = the registered plain sum and whether the cells' differs (bit 63)."""

    def __init__(self, width: int) -> None:
        self._width = width
        super().__init__({"i": In(64), "o": Out(64)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        sums = []
        for target in Target:
            m.submodules[target.value] = adder = MultiplexedAdder(self._width, target=target)
            m.d.comb += Cat(adder.select, adder.carry, adder.x0, adder.x1, adder.y).eq(self.i)
            registered = Signal(self._width, name=f"sum_{target.value}")
            m.d.sync += registered.eq(adder.o)
            sums.append(registered)
        m.d.comb += self.o.eq(Cat(sums[0], Const(0, 63 - self._width), sums[0] != sums[1]))
        return m


class JoinedPair(wiring.Component):
    """``i`` = x0, x1, y0, y1; ``o`` = the registered plain sum and whether the cells' differs (bit 63)."""

    def __init__(self, width: int) -> None:
        self._width = width
        super().__init__({"i": In(64), "o": Out(64)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        sums = []
        for target in Target:
            m.submodules[target.value] = adder = JoinedAdder(self._width, target=target)
            m.d.comb += Cat(adder.x0, adder.x1, adder.y0, adder.y1).eq(self.i)
            registered = Signal(self._width, name=f"sum_{target.value}")
            m.d.sync += registered.eq(adder.o)
            sums.append(registered)
        m.d.comb += self.o.eq(Cat(sums[0], Const(0, 63 - self._width), sums[0] != sums[1]))
        return m


class SelectorPair(wiring.Component):
    """``i`` = select, words; ``o`` = the registered plain choice and whether the cells' differs (bit 63)."""

    def __init__(self, width: int, count: int) -> None:
        self._width, self._count = width, count
        super().__init__({"i": In(64), "o": Out(64)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        chosen = []
        for target in Target:
            m.submodules[target.value] = selector = Selector(self._width, self._count, target=target)
            m.d.comb += Cat(selector.select, selector.i.as_value()).eq(self.i)
            registered = Signal(self._width, name=f"chosen_{target.value}")
            m.d.sync += registered.eq(selector.o)
            chosen.append(registered)
        m.d.comb += self.o.eq(Cat(chosen[0], Const(0, 63 - self._width), chosen[0] != chosen[1]))
        return m


class MemoryPair(wiring.Component):
    """Registered block memories, one of them in slices; ``i`` = enable, two addresses, low half of the word, which is
    written twice; ``o`` = a word that was read, folded to its low half, and whether the slices' word differs (bit 63).
    """

    HALF, DEPTH = 26, 1024  # 52 bits: three blocks of 18

    def __init__(self) -> None:
        super().__init__({"i": In(64), "o": Out(64)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        words = []
        for target in Target:
            memory = BlockMemory(
                m, target.value, unsigned(2 * self.HALF), self.DEPTH, registered=True, target=target
            )
            half = Signal(self.HALF, name=f"half_{target.value}")
            m.d.comb += [
                Cat(memory.write.en, memory.write.addr, memory.address, half).eq(self.i),
                memory.write.data.eq(Cat(half, ~half)),
            ]
            words.append(memory.data)
        low, high = words[0][: self.HALF], words[0][self.HALF :]
        m.d.comb += self.o.eq(Cat(low & ~high, Const(0, 63 - self.HALF), words[0] != words[1]))
        return m


class ArrayPair(wiring.Component):
    """Two arrays under one hashed stimulus; ``o`` = 48 bits of the plain one's data, valid, and differs (bit 63)."""

    def __init__(self, params: ArrayParams) -> None:
        self._params = params
        super().__init__({"i": In(64), "o": Out(64)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        arrays = []
        for target in Target:
            m.submodules[target.value] = array = MacArray(self._params, target=target)
            arrays.append(array)
            inputs = Cat(
                array.feed_valid,
                array.step_valid,
                array.step.as_value(),
                array.rescale.as_value(),
                array.feed_data.as_value(),
            )
            # Odd multiples of the word: 32 new bits from the upper half of each product.
            chunks = [
                (self.i * (0x9E3779B97F4A7C15 + 2 * n * 0x2545F4914F6CDD1D))[32:64]
                for n in range(-(-len(inputs) // 32))
            ]
            m.d.comb += inputs.eq(Cat(*chunks))
        plain, cells = arrays
        data = plain.o_data.as_value()
        fold = Signal(48)
        for start in range(0, len(data), 48):
            previous, fold = fold, Signal(48, name=f"fold_{start}")
            m.d.comb += fold.eq((previous << 1) ^ data[start : start + 48])
        differs = plain.o_valid & ((data != cells.o_data.as_value()) | (plain.o_tag != cells.o_tag))
        differs |= plain.o_valid != cells.o_valid
        m.d.comb += self.o.eq(Cat(fold, plain.o_valid, Const(0, 14), differs))
        return m


PAIRS: dict[str, wiring.Component] = {
    "multiplier_13_9": MultiplierPair(13, 9),
    "multiplier_18_18": MultiplierPair(18, 18),
    "logic_8_18": LogicPair(8, 18),
    "logic_4_5": LogicPair(4, 5),
    "logic_10_7": LogicPair(10, 7),
    "adder_5": AdderPair(5),
    "adder_20": AdderPair(20),
    "joined_5": JoinedPair(5),
    "joined_12": JoinedPair(12),
    "selector_2": SelectorPair(5, 2),
    "memory": MemoryPair(),
    "selector_4": SelectorPair(5, 4),
    "selector_8": SelectorPair(5, 8),
    "array": ArrayPair(ArrayParams(rows=3, segments=2, block=8, acc_depth=12)),
}


class AllPairs(wiring.Component):
    """Every pair under the same ``i``, so that one simulator is built."""

    def __init__(self) -> None:
        super().__init__({"i": In(64)} | {name: Out(64) for name in PAIRS})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        for name, pair in PAIRS.items():
            m.submodules[name] = pair
            m.d.comb += [pair.i.eq(self.i), getattr(self, name).eq(pair.o)]
        return m


RunPair = Callable[[str, Sequence[int]], list[int]]


@pytest.fixture(scope="module")
def run_pair(tmp_path_factory: pytest.TempPathFactory) -> RunPair:
    """Give a pair one word a cycle; its output of every cycle, before the clock edge."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "top.v").write_text(verilog.convert(AllPairs(), name="top", emit_src=False))
    outputs = ", ".join(f"top.{name}" for name in PAIRS)
    (folder / "harness.cpp").write_text(HARNESS.replace("OUTPUTS", outputs))
    flags = ["--cc", "--exe", "--build", "--top-module", "top", "--Mdir", "build"]
    done = subprocess.run(
        ["verilator", *flags, "top.v", *map(str, CELLS), "harness.cpp"],
        cwd=folder,
        env=find_toolchain().environment(folder),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]

    def run(name: str, words: Sequence[int]) -> list[int]:
        done = subprocess.run(
            [folder / "build" / "Vtop"],
            input="".join(f"{word:x}\n" for word in words),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
        column = list(PAIRS).index(name)
        out = [int(line.split()[column], 16) for line in done.stdout.splitlines()]
        assert len(out) == len(words)
        return out

    return run


def _word(fields: Sequence[tuple[int, int]]) -> int:
    """Pack (value, bits) from the low end."""
    word, shift = 0, 0
    for value, bits in fields:
        word |= (value & ((1 << bits) - 1)) << shift
        shift += bits
    return word


@pytest.mark.parametrize("bits", [(0, 9), (9, 19)])
def test_illegal_widths_name_field_rule_and_value(bits: tuple[int, int]) -> None:
    name, value = ("a_bits", 0) if bits[0] == 0 else ("b_bits", 19)
    with pytest.raises(DtpError, match=f"^Multiplier.{name} must be from 1 to 18, not {value}$"):
        Multiplier(*bits)


def test_latency_is_the_contract() -> None:
    assert LATENCY == MULTIPLIER_CYCLES


@pytest.mark.parametrize(("a_bits", "b_bits", "seed"), [(13, 9, 1), (3, 2, 2)])
def test_plain_multiplier_equals_whole_numbers(a_bits: int, b_bits: int, seed: int) -> None:
    dut = Multiplier(a_bits, b_bits)
    sequence = operand_sequence(a_bits, b_bits, seed)
    products = expected_products(sequence)
    seen = 0

    async def bench(ctx: TickTrigger) -> None:
        nonlocal seen
        for cycle in range(len(sequence) + LATENCY):
            if cycle < len(sequence):
                a, b, enable = sequence[cycle]
                ctx.set(dut.a, a)
                ctx.set(dut.b, b)
                ctx.set(dut.a_enable, enable)
            if cycle >= LATENCY:
                assert ctx.get(dut.o) == products[cycle - LATENCY], f"cycle {cycle}"
                seen += 1
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    assert seen == len(sequence)


@pytest.mark.parametrize(("a_bits", "b_bits", "seed"), [(13, 9, 1), (18, 18, 2)])
def test_dsp_cell_equals_plain_multiplier(run_pair: RunPair, a_bits: int, b_bits: int, seed: int) -> None:
    sequence = operand_sequence(a_bits, b_bits, seed)
    assert {enable for _, _, enable in sequence} == {False, True}
    words = [_word([(a, a_bits), (b, b_bits), (enable, 1)]) for a, b, enable in sequence]
    out = run_pair(f"multiplier_{a_bits}_{b_bits}", [*words, *([0] * LATENCY)])
    assert not any(word >> 63 for word in out)
    mask = (1 << (a_bits + b_bits)) - 1
    assert out[LATENCY:] == [product & mask for product in expected_products(sequence)]


@pytest.mark.parametrize(("a_bits", "b_bits"), [(8, 18), (4, 5), (10, 7)])
def test_logic_multiplier_equals_whole_numbers_and_its_cells(run_pair: RunPair, a_bits: int, b_bits: int) -> None:
    sequence = [(a, b) for a, b, _ in operand_sequence(a_bits, b_bits, 40)]
    masks = (1 << a_bits) - 1, (1 << b_bits) - 1
    words = [(a & masks[0]) | (b & masks[1]) << a_bits for a, b in sequence]
    got = run_pair(f"logic_{a_bits}_{b_bits}", [*words, *[0] * LATENCY])
    wanted = [(a * b) & ((1 << (a_bits + b_bits)) - 1) for a, b in sequence]
    assert got[LATENCY:] == wanted


@pytest.mark.parametrize("a_bits", [2, 5])
def test_logic_multiplier_of_other_widths_is_refused(a_bits: int) -> None:
    with pytest.raises(DtpError, match=rf"^LogicMultiplier\.a_bits must be even and at least 4, not {a_bits}$"):
        LogicMultiplier(a_bits, 8)


@pytest.mark.parametrize(("width", "seed"), [(5, 1), (20, 2)])
def test_carry_cells_equal_plain_adder(run_pair: RunPair, width: int, seed: int) -> None:
    """Odd and even numbers of positions; every pair of corners through both inputs of the multiplexer."""
    random = np.random.default_rng(seed)
    cases = [
        (select, carry, x, x ^ int(random.integers(1, 1 << width)), y)
        for select, carry in itertools.product((0, 1), repeat=2)
        for x, y in itertools.product(corners(width), repeat=2)
    ]
    cases += [
        (
            int(random.integers(2)),
            int(random.integers(2)),
            *(int(v) for v in random.integers(0, 1 << width, 3)),
        )
        for _ in range(3000)
    ]
    mask = (1 << width) - 1
    words = [_word([(s, 1), (c, 1), (x0, width), (x1, width), (y, width)]) for s, c, x0, x1, y in cases]
    out = run_pair(f"adder_{width}", [*words, 0])
    assert not any(word >> 63 for word in out)
    assert out[1:] == [((x1 if s else x0) + y + c) & mask for s, c, x0, x1, y in cases]


@pytest.mark.parametrize(("width", "seed"), [(5, 3), (12, 4)])
def test_joined_cells_equal_plain_adder(run_pair: RunPair, width: int, seed: int) -> None:
    """Every pair of corners, each operand whole, in the other part and in both; any four parts."""
    random = np.random.default_rng(seed)
    cases = [
        (*((x, 0), (0, x), (x, x & y))[n], *((y, 0), (0, y), (x & y, y))[m])
        for x, y in itertools.product(corners(width), repeat=2)
        for n, m in itertools.product(range(3), repeat=2)
    ]
    cases += [tuple(int(v) for v in random.integers(0, 1 << width, 4)) for _ in range(3000)]
    out = run_pair(f"joined_{width}", [*(_word([(part, width) for part in parts]) for parts in cases), 0])
    assert not any(word >> 63 for word in out)
    assert out[1:] == [((x0 | x1) + (y0 | y1)) & ((1 << width) - 1) for x0, x1, y0, y1 in cases]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_selector_cells_equal_plain_choice(run_pair: RunPair, count: int) -> None:
    random = np.random.default_rng(count)
    width, select_bits = 5, (count - 1).bit_length()
    cases = [(n % count, [int(word) for word in random.integers(0, 1 << width, count)]) for n in range(400)]
    words = [_word([(select, select_bits), *((word, width) for word in given)]) for select, given in cases]
    out = run_pair(f"selector_{count}", [*words, 0])
    assert not any(word >> 63 for word in out)
    assert out[1:] == [given[select] for select, given in cases]


@pytest.mark.parametrize("count", [0, 1, 3, 6])
def test_selector_of_an_odd_number_of_words_is_refused(count: int) -> None:
    with pytest.raises(DtpError, match=f"Selector.count must be a power of two from 2 on, not {count}"):
        Selector(4, count)


def test_registered_memory_in_slices_equals_the_whole(run_pair: RunPair) -> None:
    """A word in every slice is what the last write to its address left, two cycles after it is asked for."""
    random = np.random.default_rng(5)
    half, depth = MemoryPair.HALF, 8
    written: dict[int, int] = {}
    words, wanted = [], []
    for n in range(600):
        enable, at, value = n < depth or int(random.integers(2)), n % depth, int(random.integers(1 << half))
        known = [place for place in written if place != at]
        asked = int(random.choice(known)) if known else 0
        wanted.append(written.get(asked, 0) if known else None)
        words.append(_word([(int(enable), 1), (at, 10), (asked, 10), (value, half)]))
        if enable:
            written[at] = value
    out = run_pair("memory", [*words, 0, 0])
    seen = [(got, want) for got, want in zip(out[2:], wanted, strict=True) if want is not None]
    assert len(seen) > 500
    assert [got & ((1 << half) - 1) for got, _ in seen] == [want for _, want in seen]
    assert not any(got >> 63 for got, _ in seen)


def test_array_of_cells_equals_plain_array_seed_3(run_pair: RunPair) -> None:
    random = np.random.default_rng(3)
    words = [int(word) for word in random.integers(0, 1 << 64, 4000, dtype=np.uint64)]
    out = run_pair("array", words)
    assert not any(word >> 63 for word in out)
    valid = [word for word in out if word >> 48 & 1]
    assert 500 < len(valid) < 3500
    assert len({word & ((1 << 48) - 1) for word in valid}) > 0.9 * len(valid)
