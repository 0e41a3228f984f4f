"""Several streams at once: known words in known cycles, every fault seen, every misuse named."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtp.errors import DtpError
from sim.bench.channels import ChannelJob, ChannelResult, Channels, Sink, Source, run_channels
from sim.bench.stream import StreamFault

from .duts import Crossing, Fault, emit_unit

BITS = 1024
RNG = np.random.default_rng(30)
WIDE = [int.from_bytes(RNG.bytes(BITS // 8), "little") for _ in range(60)]
SMALL = [int(x) for x in RNG.integers(0, 1 << 16, len(WIDE))]
LAST = [number == len(WIDE) - 1 for number in range(len(WIDE))]


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emit_unit(Crossing(BITS), tmp_path_factory.mktemp("verilog"))


def job(top: Path, *, stall: float = 0.0, gap: int = 0, **more: object) -> ChannelJob:
    """All words; ``gap`` cycles at least between two of ``wide``, counted from cycle 3."""
    channel = Channels.of(top).channels["s_axis"]
    small = [channel.pack(tdata=data, tlast=last) for data, last in zip(SMALL, LAST, strict=True)]
    wide = [(word, 3 + gap * number) for number, word in enumerate(WIDE)]
    return ChannelJob(
        inputs={"s_axis": Source.of(small, stall=stall), "s_axis_wide": Source(wide, stall)},
        outputs={"m_axis": Sink(len(WIDE), stall)},
        timeout_cycles=2000,
        **more,  # type: ignore[arg-type]
    )


def expected() -> list[int]:
    words = [(wide + small) % (1 << BITS) for wide, small in zip(WIDE, SMALL, strict=True)]
    return [word | last << BITS for word, last in zip(words, LAST, strict=True)]


def test_ports_are_found(top: Path) -> None:
    design = Channels.of(top)
    fields = {name: (channel.is_input, dict(channel.fields)) for name, channel in design.channels.items()}
    assert fields == {
        "s_axis": (True, {"tdata": 16, "tlast": 1}),
        "s_axis_wide": (True, {"tdata": BITS}),
        "s_axis_poke": (True, {"tdata": 34}),
        "m_axis": (False, {"tdata": BITS, "tlast": 1}),
        "s_axil_aw": (True, {"addr": 4, "prot": 3}),
        "s_axil_w": (True, {"data": 32, "strb": 4}),
        "s_axil_b": (False, {"resp": 2}),
        "s_axil_ar": (True, {"addr": 4, "prot": 3}),
        "s_axil_r": (False, {"data": 32, "resp": 2}),
    }
    assert (design.inputs, design.outputs) == ({"offset": 8, "fault": 3}, {"sum": 8})


@pytest.mark.parametrize("gap", [1, 4])
def test_cycles_without_stalls(gap: int, top: Path) -> None:
    """A word each leaves the cycle after it came; none comes before its time; then the drain runs."""
    result = run_channels(top, job(top, gap=gap, plain={"offset": 7}, drain_cycles=20))
    out = result.outputs["m_axis"]
    taken = 3 + gap * np.arange(len(WIDE))
    assert out.payloads == expected()
    np.testing.assert_array_equal(result.inputs["s_axis_wide"], taken)
    np.testing.assert_array_equal(result.inputs["s_axis"], taken)
    np.testing.assert_array_equal(out.cycles, taken + 1)
    assert result.plain == {"sum": (sum(word & 255 for word in expected()) + 7) % 256}
    assert result.sim_cycles == out.cycles[-1] + 1 + 20
    assert result.wall_s > 0


def test_stalls_change_cycles_and_nothing_else(top: Path) -> None:
    cases = ((0.0, 1), (0.5, 1), (0.5, 1), (0.5, 2))
    runs = [run_channels(top, job(top, stall=stall, seed=seed)) for stall, seed in cases]
    assert all(run.outputs["m_axis"].payloads == expected() for run in runs)
    cycles = [run.outputs["m_axis"].cycles.tolist() for run in runs]
    assert cycles[1] == cycles[2] and len({*map(tuple, cycles)}) == 3
    assert cycles[1][-1] > 1.5 * cycles[0][-1]
    # Both ends of a stream wait, and each for itself.
    assert runs[1].inputs["s_axis"].tolist() == runs[1].inputs["s_axis_wide"].tolist()
    taken = runs[1].inputs["s_axis"]
    assert len({*np.diff(taken).tolist()}) > 2 and len({*(runs[1].outputs["m_axis"].cycles - taken).tolist()}) > 1


@pytest.mark.parametrize("stall", [0.0, 0.6])
def test_registers_over_axi_lite(stall: float, top: Path) -> None:
    design = Channels.of(top).channels
    values = [0x01234567, 0x89ABCDEF, 0xFFFF0000, 0x00FF00FF]
    aw = [design["s_axil_aw"].pack(addr=4 * n, prot=n % 2) for n in range(4)]
    w = [design["s_axil_w"].pack(data=value, strb=15 if n != 2 else 3) for n, value in enumerate(values)]
    ar = [design["s_axil_ar"].pack(addr=4 * n, prot=n) for n in range(4)]
    run = run_channels(top, ChannelJob(
        inputs={
            "s_axis_poke": Source([(2 | 0xAAAABBBB << 2, 0)]),
            "s_axil_aw": Source.of(aw, from_cycle=2, stall=stall),
            "s_axil_w": Source.of(w, from_cycle=2, stall=stall),
            "s_axil_ar": Source.of(ar, from_cycle=200, stall=stall),
        },
        outputs={"s_axil_b": Sink(4, stall), "s_axil_r": Sink(4, stall)},
        timeout_cycles=1000,
        seed=5,
    ))  # fmt: skip
    assert run.outputs["s_axil_b"].payloads == [0, 1, 0, 1]
    read = [design["s_axil_r"].unpack(word) for word in run.outputs["s_axil_r"].payloads]
    wanted = [*values[:2], values[2] & 0xFFFF | 0xAAAA0000, values[3]]
    assert read == [{"data": value, "resp": n} for n, value in enumerate(wanted)]
    assert run.inputs["s_axis_poke"].tolist() == [0]
    assert run.inputs["s_axil_ar"][0] >= 200


FAULTS = {
    Fault.DEAD: "timed out after 2000 cycles: s_axis took 60 of 60, s_axis_wide took 60 of 60, m_axis gave 0 of 60",
    Fault.DROPS: "m_axis gave 59 of 60",
    Fault.EXTRA: "1 words of m_axis after the last one expected",
    Fault.CHANGES: "a word of m_axis changed before it was taken, in cycle",
    Fault.WITHDRAWS: "a word of m_axis changed before it was taken, in cycle",
    Fault.TAKES_INVALID: "timed out",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.value)
def test_faulty_device_turns_red(fault: Fault, top: Path) -> None:
    with pytest.raises(StreamFault, match=FAULTS[fault]) as raised:
        run_channels(top, job(top, stall=0.3, seed=6, plain={"fault": fault.number}))
    assert isinstance(raised.value.result, ChannelResult)


def test_a_word_nobody_waits_for_is_extra(top: Path) -> None:
    short = job(top)
    short = replace(short, outputs={"m_axis": Sink(len(WIDE) - 2)})
    result = run_channels(top, short, check=False)
    assert result.faults == ["2 words of m_axis after the last one expected"]
    assert result.outputs["m_axis"].payloads == expected()


def test_waves_come_when_asked_for(top: Path, tmp_path: Path) -> None:
    waves = tmp_path / "job.vcd"
    result = run_channels(top, job(top, gap=1), waves=waves)
    np.testing.assert_array_equal(result.outputs["m_axis"].cycles, 4 + np.arange(len(WIDE)))
    assert "$enddefinitions" in waves.read_text()


def test_misuse_is_named(top: Path, tmp_path: Path) -> None:
    good = job(top)
    for changes, message in (
        ({"inputs": {"s_axis_x": Source()}}, "ChannelJob.inputs must be of s_axil_ar, s_axil_aw, "),
        ({"outputs": {"s_axis": Sink()}}, "ChannelJob.outputs must be of m_axis, s_axil_b, s_axil_r, not 's_axis'"),
        ({"plain": {"sum": 1}}, "ChannelJob.plain must be of fault, offset, not 'sum'"),
        ({"plain": {"offset": 256}}, "ChannelJob.plain['offset'] must be unsigned of 8 bits, not 256"),
        ({"inputs": {"s_axis": Source([(1 << 17, 0)])}}, "records[0] must be unsigned of 17 bits, not 131072"),
        ({"inputs": {"s_axis": Source([(1, -1)])}}, "records[0] must be offered from cycle 0 or later, not -1"),
    ):
        with pytest.raises(DtpError, match=re.escape(message)):
            run_channels(top, replace(good, **changes))
    for changes, message in (
        ({"timeout_cycles": 0}, "ChannelJob.timeout_cycles must be 1 or more, not 0"),
        ({"inputs": {"s_axis": Source(stall=1.0)}}, "ChannelJob.inputs['s_axis'].stall must be at least 0 and less"),
        ({"outputs": {"m_axis": Sink(-1)}}, "ChannelJob.outputs['m_axis'].words must be 0 or more, not -1"),
    ):
        with pytest.raises(DtpError, match=re.escape(message)):
            replace(good, **changes)
    channel = Channels.of(top).channels["m_axis"]
    with pytest.raises(DtpError, match=r"^Channel\.m_axis must be given tdata, tlast, not 'tdata'$"):
        channel.pack(tdata=1)
    with pytest.raises(DtpError, match=r"^Channel\.m_axis\.tlast must be unsigned of 1 bits, not 2$"):
        channel.pack(tdata=1, tlast=2)
    other = tmp_path / "other.v"
    other.write_text(re.sub(r"^\s*input m_axis_tready;", "", top.read_text(), flags=re.MULTILINE))
    with pytest.raises(DtpError, match=r"stream m_axis of .* lacks its ready or its payload"):
        Channels.of(other)
    other.write_text(re.sub(r"^\s*input rst;", "", top.read_text(), flags=re.MULTILINE))
    with pytest.raises(DtpError, match="has no input rst"):
        Channels.of(other)
