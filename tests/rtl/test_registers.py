"""The control port: every answer, value and pulse as the contract says, in the cycle that the docstring says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from amaranth.hdl import ClockDomain, Module
from amaranth.lib import data
from amaranth.sim import Simulator

from dtp.config import Config
from dtp.registers import Access, Field, GoldenRegisters, Register, RegisterMap, Response, gated_registers
from rtl.registers import AxiLiteRegisters

#: Addresses with holes, fields across bytes, constants beside inputs; a map of one register, a byte wide.
MAPS = {
    "gated": gated_registers(Config.load("tiny")),
    "holes": RegisterMap(
        "holes",
        (
            Register("first", 8, Access.READ_WRITE, (
                Field("across", 13, 5, 0x1234, "three bytes"), Field("top", 1, 31, 1, "the last bit"),
            ), "numbers"),
            Register("second", 20, Access.READ_ONLY, (
                Field("shown", 10, 3, 0, "input"), Field("fixed", 4, 28, 9, "constant", True),
            ), "both kinds"),
            Register("third", 24, Access.WRITE_PULSE, (
                Field("low", 1, 0, 0, "pulse"), Field("wide", 9, 12, 0, "pulses in two bytes"),
            ), "pulses"),
        ),
    ),
    "one": RegisterMap("one", (Register("only", 0, Access.READ_WRITE, (Field("all", 32, 0, 7, "word"),), "a word"),)),
    "input": RegisterMap("input", (Register("only", 4, Access.READ_ONLY, (Field("all", 32, 0, 0, "all"),), "a word"),)),
    "pulse": RegisterMap("pulse", (Register("only", 0, Access.WRITE_PULSE, (Field("go", 1, 9, 0, "bit"),), "a bit"),)),
}  # fmt: skip
_IDLE_CYCLES = 20


@dataclass
class Write:
    """Cycles that each half waits behind the one before it on its channel."""

    address: int
    word: int
    strobes: int = 15
    address_wait: int = 0
    word_wait: int = 0


@dataclass
class Read:
    address: int
    wait: int = 0


@dataclass
class Seen:
    """Writes as (cycle of the answer, response), reads as (cycle, response, word); pulses as (cycle, fields)."""

    writes: list[tuple[int, int]] = field(default_factory=list)
    reads: list[tuple[int, int, int]] = field(default_factory=list)
    pulses: list[tuple[int, dict[str, int]]] = field(default_factory=list)


def _words(described: RegisterMap, access: Access, port: int) -> dict[str, dict[str, int]]:
    """Fields by name, out of the bits of a struct of structs."""
    found: dict[str, dict[str, int]] = {}
    for register in described.registers:
        for part in register.fields if register.access is access else ():
            if not part.constant:
                found.setdefault(register.name, {})[part.name] = port & part.largest
                port >>= part.bits
    assert port == 0
    return found


def _bits(port: Any) -> Any:
    return port.as_value()


class Bench:
    """Offers accesses, answers when it likes, and compares every cycle with the golden model.

    Parameters
    ----------
    sink: chances that an answer to a write and to a read is taken in a cycle
    """

    def __init__(
        self, described: RegisterMap, writes: Sequence[Write], reads: Sequence[Read], *, seed: int,
        sink: tuple[float, float] = (1.0, 1.0),
    ) -> None:  # fmt: skip
        self.described, self.writes, self.reads, self.sink = described, list(writes), list(reads), sink
        self.random = np.random.default_rng(seed)
        self.dut = AxiLiteRegisters(described)
        self.golden = GoldenRegisters(described)
        self.seen = Seen()
        self.domain = ClockDomain("sync")

    def run(self) -> Seen:
        module = Module()
        module.domains += self.domain
        module.submodules.dut = self.dut
        simulator = Simulator(module)
        simulator.add_clock(1e-8)
        simulator.add_testbench(self._bench)
        simulator.run()
        assert len(self.seen.writes) == len(self.writes) and len(self.seen.reads) == len(self.reads)
        return self.seen

    def _noise(self, port: Any) -> int:
        return int.from_bytes(self.random.bytes(-(-len(port) // 8)), "little") & ((1 << len(port)) - 1)

    def _drive(self, ctx: Any, offers: dict[str, int | None], ready: dict[str, bool]) -> None:
        for name, word in offers.items():
            port = getattr(self.dut, name)
            ctx.set(port.valid, word is not None)
            ctx.set(_bits(port.payload), self._noise(_bits(port.payload)) if word is None else word)
        for name, value in ready.items():
            ctx.set(getattr(self.dut, name).ready, value)

    def _outputs(self, ctx: Any) -> dict[str, int]:
        dut = self.dut
        found = {f"{name}.ready": ctx.get(getattr(dut, name).ready) for name in ("aw", "w", "ar")}
        for name in ("b", "r"):
            found[f"{name}.valid"] = ctx.get(getattr(dut, name).valid)
            found[f"{name}.payload"] = ctx.get(_bits(getattr(dut, name).payload))
        return found | {"values": ctx.get(_bits(dut.values)), "pulses": ctx.get(_bits(dut.pulses))}

    async def _bench(self, ctx: Any) -> None:
        dut, seen, random = self.dut, self.seen, self.random
        address_bits = self.described.address_bits
        waits = {
            "aw": [w.address_wait for w in self.writes], "w": [w.word_wait for w in self.writes],
            "ar": [r.wait for r in self.reads],
        }  # fmt: skip
        words = {
            "aw": [w.address for w in self.writes], "w": [w.strobes << 32 | w.word for w in self.writes],
            "ar": [r.address for r in self.reads],
        }  # fmt: skip
        taken: dict[str, list[int]] = {"aw": [], "w": [], "ar": []}
        offers: dict[str, int | None] = dict.fromkeys(taken)
        since = dict.fromkeys(taken, 0)
        answered = {"b": -1, "r": -1}  # the cycle in which the last answer left
        held: dict[str, int | None] = {"b": None, "r": None}
        read: tuple[Response, int] | None = None
        cycle = idle = 0
        total = len(self.writes) + len(self.reads)
        limit = 200 + sum(map(sum, waits.values())) + int(total * 20 / min(self.sink))
        while idle < _IDLE_CYCLES:
            assert cycle < limit, f"{len(seen.writes)} writes, {len(seen.reads)} reads in {cycle} cycles"
            for name in taken:
                number = len(taken[name])
                if offers[name] is None and number < len(words[name]) and cycle - since[name] >= waits[name][number]:
                    noise = int(random.integers(8)) << address_bits if name != "w" else 0  # the protection bits
                    offers[name] = words[name][number] | noise
            ready = {"b": bool(random.random() < self.sink[0]), "r": bool(random.random() < self.sink[1])}
            # The same outputs whatever the inputs are: first none of them, then others, then those that count.
            self._drive(ctx, dict.fromkeys(offers), {"b": False, "r": False})
            ctx.set(_bits(dut.inputs), self._noise(_bits(dut.inputs)))
            outputs = self._outputs(ctx)
            self._drive(ctx, {n: self._noise(_bits(getattr(dut, n).payload)) for n in offers}, {"b": True, "r": True})
            assert self._outputs(ctx) == outputs, "an output depends on an input within a cycle"
            self._drive(ctx, offers, ready)
            inputs = self._noise(_bits(dut.inputs))
            ctx.set(_bits(dut.inputs), inputs)
            assert self._outputs(ctx) == outputs, "an output depends on an input within a cycle"

            # Writes: the answer, the values and the pulses come together, and as soon as they can.
            pulses: dict[str, int] = {}
            number = len(seen.writes) - (held["b"] is not None)
            both = min(len(taken["aw"]), len(taken["w"]))
            due = number < both and cycle >= 2 + max(taken["aw"][number], taken["w"][number], answered["b"])
            assert outputs["b.valid"] == (due or held["b"] is not None), f"answers to writes in cycle {cycle}"
            if outputs["b.valid"] and held["b"] is None:
                write = self.writes[number]
                response, pulses = self.golden.write(write.address, write.word, write.strobes)
                assert outputs["b.payload"] == response, f"write {number} at {write.address:#x}"
                seen.writes.append((cycle, response))
            values = _words(self.described, Access.READ_WRITE, outputs["values"])
            wanted = {n: self.described.decode(n, word) for n, word in self.golden.values.items()}
            assert values == wanted, f"values in cycle {cycle}"
            got = {n: v for fields in _words(self.described, Access.WRITE_PULSE, outputs["pulses"]).values()
                   for n, v in fields.items()}  # fmt: skip
            assert got == {name: pulses.get(name, 0) for name in got}, f"pulses in cycle {cycle}"
            if any(got.values()):
                seen.pulses.append((cycle, got))

            # Reads: what was there in the cycle behind the one that took the address.
            number = len(seen.reads) - (held["r"] is not None)
            due = number < len(taken["ar"]) and cycle == taken["ar"][number] + 2
            assert outputs["r.valid"] == (due or held["r"] is not None), f"answers to reads in cycle {cycle}"
            if due:
                assert read is not None
                word, response = outputs["r.payload"] & 0xFFFFFFFF, outputs["r.payload"] >> 32
                assert (response, word) == read, f"read {number} at {self.reads[number].address:#x}"
                seen.reads.append((cycle, response, word))
            if number < len(taken["ar"]) and cycle == taken["ar"][number] + 1:
                shown = _words(self.described, Access.READ_ONLY, inputs)
                read = self.golden.read(self.reads[number].address, shown)

            # What waits does not change; what is taken makes room.
            for name in held:
                if held[name] is not None:
                    assert outputs[f"{name}.payload"] == held[name], f"{name} changed while it waited in cycle {cycle}"
                held[name] = outputs[f"{name}.payload"] if outputs[f"{name}.valid"] and not ready[name] else None
                if outputs[f"{name}.valid"] and ready[name]:
                    answered[name] = cycle
            for name in taken:
                if offers[name] is not None and outputs[f"{name}.ready"]:
                    taken[name].append(cycle)
                    offers[name], since[name] = None, cycle + 1
            over = len(seen.writes) + len(seen.reads) == total and held == {"b": None, "r": None}
            idle = idle + 1 if over else 0
            await ctx.tick()
            cycle += 1
        self.cycles = cycle


def _accesses(described: RegisterMap, seed: int, count: int, wait: int) -> tuple[list[Write], list[Read]]:
    """Mostly registers, now and then a hole, an address that is not aligned, or few or no strobes."""
    random = np.random.default_rng(seed)

    def address() -> int:
        if random.random() < 0.75:
            return int(random.choice([r.address for r in described.registers]))
        return int(random.integers(1 << described.address_bits))

    def waits() -> int:
        return int(random.integers(wait + 1)) if wait else 0

    def word() -> int:
        return int(random.choice([0, 0xFFFFFFFF, random.integers(1 << 32)]))

    writes = [
        Write(address(), word(), 15 if random.random() < 0.4 else int(random.integers(16)), waits(), waits())
        for _ in range(count)
    ]
    return writes, [Read(address(), waits()) for _ in range(count)]


@pytest.mark.parametrize("sink", [1.0, 0.25])
@pytest.mark.parametrize("wait", [0, 5])
@pytest.mark.parametrize("name", ["gated", "holes"])
def test_random_accesses_seed_1(name: str, wait: int, sink: float) -> None:
    writes, reads = _accesses(MAPS[name], 1, 120, wait)
    seen = Bench(MAPS[name], writes, reads, seed=1, sink=(sink, sink)).run()
    assert {response for _, response in seen.writes} == set(Response)
    assert {response for _, response, _ in seen.reads} == {Response.OKAY, Response.DECODE_ERROR}
    assert len(seen.pulses) > 2


@pytest.mark.parametrize("name", ["one", "input", "pulse"])
def test_maps_without_some_kinds_seed_2(name: str) -> None:
    writes, reads = _accesses(MAPS[name], 2, 60, 3)
    Bench(MAPS[name], writes, reads, seed=2, sink=(0.5, 0.5)).run()


def test_every_address_is_answered() -> None:
    """Registers, holes and addresses between words, the highest of the port included."""
    described = MAPS["gated"]
    every = range(1 << described.address_bits)
    writes = [Write(address, 0xFFFFFFFF if address % 8 else 0x12345678) for address in every]
    seen = Bench(described, writes, [Read(address) for address in every], seed=3).run()
    for address, (_, response), (_, answer, word) in zip(every, seen.writes, seen.reads, strict=True):
        register = described.at(address)
        if register is None:
            assert (response, answer, word) == (Response.DECODE_ERROR, Response.DECODE_ERROR, 0)
        else:
            refused = register.access is Access.READ_ONLY
            assert (response, answer) == (Response.SLAVE_ERROR if refused else Response.OKAY, Response.OKAY)
    assert [seen.reads[described.register(n).address][2] for n in ("id", "version")] == [0x31505444, 1]


def test_each_byte_is_written_alone() -> None:
    """All strobes over a register whose fields cross bytes, read back each time."""
    described = MAPS["holes"]
    writes = [Write(8, word, strobes) for strobes in range(16) for word in (0xFFFFFFFF, 0, 0xA5A5A5A5)]
    Bench(described, writes, [Read(8)] * 32, seed=4).run()


@pytest.mark.parametrize(("address_wait", "word_wait"), [(0, 0), (0, 1), (0, 9), (1, 0), (9, 0)])
@pytest.mark.parametrize("sink", [1.0, 0.1])
def test_halves_of_a_write_in_either_order(address_wait: int, word_wait: int, sink: float) -> None:
    described = MAPS["gated"]
    budgets = [Write(0x28, 0x100 + n, 15, address_wait, word_wait) for n in range(12)]
    seen = Bench(described, budgets, [], seed=5, sink=(sink, 1.0)).run()
    assert [response for _, response in seen.writes] == [Response.OKAY] * 12


def test_halves_may_be_one_write_apart() -> None:
    """All addresses come at once, the words late, and the other way round: one of each is held."""
    for waits in ((0, 25), (25, 0)):
        writes = [Write(0x24 + 4 * (n % 3), n * 0x01010101, 15, *waits) for n in range(6)]
        Bench(MAPS["gated"], writes, [Read(0x24 + 4 * (n % 3), 20) for n in range(6)], seed=6).run()


def test_the_rate_is_that_of_the_docstring() -> None:
    seen = Bench(MAPS["gated"], [Write(0x28, n) for n in range(20)], [Read(0x28)] * 20, seed=7).run()
    assert {after[0] - before[0] for before, after in zip(seen.writes, seen.writes[1:], strict=False)} == {2}
    assert {after[0] - before[0] for before, after in zip(seen.reads, seen.reads[1:], strict=False)} == {3}


def test_reads_go_on_while_writes_wait_and_the_other_way_round() -> None:
    accesses = [Write(0x28, n) for n in range(20)], [Read(0x28)] * 20
    late_writes = Bench(MAPS["gated"], *accesses, seed=8, sink=(0.02, 1.0)).run()
    assert late_writes.reads[-1][0] < 70 < late_writes.writes[-1][0]
    late_reads = Bench(MAPS["gated"], *accesses, seed=8, sink=(1.0, 0.02)).run()
    assert late_reads.writes[-1][0] < 70 < late_reads.reads[-1][0]


def test_pulses_of_writes_behind_each_other_are_apart() -> None:
    seen = Bench(MAPS["gated"], [Write(0x10, 1 + n % 3) for n in range(9)], [], seed=9).run()
    assert [pulse for _, pulse in seen.pulses] == [{"clear": (1 + n % 3) & 1, "abort": (1 + n % 3) >> 1}
                                                   for n in range(9)]  # fmt: skip
    assert {after[0] - before[0] for before, after in zip(seen.pulses, seen.pulses[1:], strict=False)} == {2}


@pytest.mark.parametrize("when", range(6))
def test_reset_forgets_accesses_and_values(when: int) -> None:
    """A reset ``when`` cycles behind the offer of a write and a read, after other values were set."""
    described = MAPS["gated"]
    dut, domain = AxiLiteRegisters(described), ClockDomain("sync")
    module = Module()
    module.domains += domain
    module.submodules.dut = dut
    resets = {r.name: described.decode(r.name, r.reset) for r in described.registers if r.access is Access.READ_WRITE}

    async def bench(ctx: Any) -> None:
        def values() -> dict[str, dict[str, int]]:
            return _words(described, Access.READ_WRITE, ctx.get(_bits(dut.values)))

        async def offer(address: int, word: int, cycles: int) -> None:
            for name in ("aw", "w", "ar"):
                ctx.set(getattr(dut, name).valid, 1)
            ctx.set(dut.aw.payload.addr, address)
            ctx.set(dut.ar.payload.addr, address)
            ctx.set(_bits(dut.w.payload), 15 << 32 | word)
            for cycle in range(cycles):
                await ctx.tick()
                if cycle == 0:
                    for name in ("aw", "w", "ar"):
                        ctx.set(getattr(dut, name).valid, 0)

        assert values() == resets
        ctx.set(dut.b.ready, 1)
        ctx.set(dut.r.ready, 1)
        for register in ("scores", "gate", "theta", "budget", "band"):
            await offer(described.register(register).address, 0x12121212, 5)
        changed = values()
        assert all(changed[name] != resets[name] for name in changed)
        ctx.set(dut.b.ready, 0)
        ctx.set(dut.r.ready, 0)
        await offer(0x10, 3, when)
        ctx.set(domain.rst, 1)
        await ctx.tick()
        for name in ("aw", "w", "ar"):
            ctx.set(getattr(dut, name).valid, 0)
        ctx.set(domain.rst, 0)
        assert values() == resets
        for _ in range(8):
            assert not ctx.get(dut.b.valid) and not ctx.get(dut.r.valid) and not ctx.get(_bits(dut.pulses))
            await ctx.tick()
        ctx.set(dut.b.ready, 1)
        ctx.set(dut.r.ready, 1)
        await offer(0x28, 0x5, 2)
        assert ctx.get(dut.b.valid) and ctx.get(dut.r.valid) and values()["budget"]["budget"] == 0x5
        assert ctx.get(dut.r.payload.data) == 1  # the value after reset: the write came in the same cycle

    simulator = Simulator(module)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()


def test_ports_are_structs_of_registers_and_fields() -> None:
    dut = AxiLiteRegisters(MAPS["gated"])
    assert isinstance(dut.values.shape(), data.StructLayout)
    assert (len(dut.values.theta.low), len(dut.values.scores.step), len(dut.pulses.control.clear)) == (16, 7, 1)
    assert (len(dut.inputs.error.geometry), len(dut.inputs.kept.count), len(dut.aw.payload.addr)) == (8, 32, 7)
    assert "id" not in dut.inputs.shape().members and "control" not in dut.values.shape().members
