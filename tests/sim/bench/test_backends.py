"""Every backend tells the truth: known data in known cycles, the same everywhere, and no fault unseen."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest
from amaranth.hdl import Fragment

from dtp.errors import DtpError
from sim.bench import Backend, SimulationError, StreamFault, StreamJob, StreamResult, run_stream
from sim.bench.verilated import BARE, COCOTB, build, ports_of

from .duts import Fault, Pipeline, emit, expected

IN_BYTES, OUT_BYTES, USER_BITS, STAGES = 5, 7, 33, 3
RNG = np.random.default_rng(20)
BEATS = RNG.integers(0, 256, (40, IN_BYTES), dtype=np.uint8)
BEATS[:, -1] = Fault.NONE.number
EVERY_FIELD = [
    "first_input_cycle",
    "inputs_taken",
    "inputs_unread",
    "packets",
    "extra_beats",
    "violation_cycle",
    "timed_out",
    "sim_cycles",
]


def component() -> Pipeline:
    return Pipeline(IN_BYTES, OUT_BYTES, USER_BITS, STAGES)


def faulty_beats(fault: Fault) -> np.ndarray:
    beats = BEATS.copy()
    beats[:, -1] = fault.number
    return beats


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emit(component(), tmp_path_factory.mktemp("verilog"))


def run(backend: Backend, top: Path, job: StreamJob) -> StreamResult:
    return run_stream(component() if backend is Backend.AMARANTH else top, job, backend, check=False)


def assert_same(a: StreamResult, b: StreamResult) -> None:
    for name in ("data", "user", "last", "cycles"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    for name in EVERY_FIELD:
        assert getattr(a, name) == getattr(b, name), name


@pytest.mark.parametrize("backend", Backend)
def test_latency_is_the_number_of_stages(backend: Backend, top: Path) -> None:
    """Without stalls beat n enters in cycle n and leaves ``STAGES`` cycles later; then the drain runs."""
    drain = 20
    job = StreamJob(BEATS, timeout_cycles=1000, drain_cycles=drain, output_beats=len(BEATS))
    result = run(backend, top, job).check()
    assert result.first_input_cycle == 0
    np.testing.assert_array_equal(result.cycles, np.arange(len(BEATS)) + STAGES)
    np.testing.assert_array_equal(result.data, expected(BEATS, OUT_BYTES))
    np.testing.assert_array_equal(result.user, np.arange(len(BEATS)) + 1)
    np.testing.assert_array_equal(result.last, np.arange(len(BEATS)) == len(BEATS) - 1)
    assert result.sim_cycles == len(BEATS) + STAGES + drain
    assert result.inputs_taken == len(BEATS)
    assert result.wall_s > 0


STALLED = [
    StreamJob(BEATS, timeout_cycles=2000, source_stall=0.5, sink_stall=0.0, seed=1),
    StreamJob(BEATS, timeout_cycles=2000, source_stall=0.0, sink_stall=0.7, seed=2),
    StreamJob(BEATS, timeout_cycles=2000, source_stall=0.9, sink_stall=0.3, seed=3, last=BEATS[:, 0] < 64),
]


@pytest.mark.parametrize("job", STALLED, ids=lambda job: f"seed={job.seed}")
def test_stalls_fall_in_the_same_cycles_everywhere(job: StreamJob, top: Path) -> None:
    job = StreamJob(**{**vars(job), "packets": int(job.last_flags.sum())})
    slow = run(Backend.AMARANTH, top, job)
    np.testing.assert_array_equal(slow.data[: len(BEATS)], expected(BEATS, OUT_BYTES)[: len(slow.data)])
    assert np.any(np.diff(slow.cycles) > 1), "the pattern never stalled"
    assert_same(run(Backend.BARE, top, job), slow)
    assert_same(run(Backend.COCOTB, top, job), slow)


def test_reset_restarts_input_and_count(top: Path) -> None:
    restart, reset_at = 8, 15
    job = StreamJob(
        BEATS,
        timeout_cycles=1000,
        output_beats=len(BEATS) - restart,
        sink_stall=0.2,
        seed=4,
        reset_at=reset_at,
        restart_beat=restart,
    )
    slow = run(Backend.AMARANTH, top, job).check()
    after = slow.cycles > reset_at
    assert not np.any(slow.cycles == reset_at)
    assert 0 < np.count_nonzero(~after) < reset_at
    np.testing.assert_array_equal(slow.data[after], expected(BEATS[restart:], OUT_BYTES))
    np.testing.assert_array_equal(slow.user[after], np.arange(len(BEATS) - restart) + 1)
    assert_same(run(Backend.COCOTB, top, job), slow)


def test_abort_lasts_one_cycle(top: Path) -> None:
    """What is in the pipeline is lost: ``STAGES`` - 1 beats on their way and the one that enters."""
    abort_at = 10
    job = StreamJob(BEATS, timeout_cycles=1000, abort_at=abort_at, output_beats=len(BEATS) - STAGES)
    slow = run(Backend.AMARANTH, top, job).check()
    lost = (np.arange(len(BEATS)) > abort_at - STAGES) & (np.arange(len(BEATS)) <= abort_at)
    np.testing.assert_array_equal(slow.data, expected(BEATS[~lost], OUT_BYTES))
    assert_same(run(Backend.COCOTB, top, job), slow)


def test_nothing_expected_and_nothing_sent_is_a_good_run(top: Path) -> None:
    job = StreamJob(BEATS[:0], timeout_cycles=1000, packets=0, drain_cycles=30, output_beats=0)
    for backend in Backend:
        result = run(backend, top, job).check()
        assert result.data.shape == (0, OUT_BYTES)
        assert result.first_input_cycle is None
        assert result.sim_cycles == 31


FAULTS = {
    Fault.DEAD: "timed out after 300 cycles with 0 of 1 packets out and 0 input beats not taken",
    Fault.DROPS: "39 output beats, not 40",
    Fault.EXTRA: "1 output beats after the last packet; 41 output beats",
    Fault.CHANGES: "output beat changed before it was taken, in cycle",
    Fault.WITHDRAWS: "output beat changed before it was taken, in cycle",
    Fault.TAKES_INVALID: "output beats after the last packet",
    Fault.DEAF: "timed out after 300 cycles with 1 of 1 packets out and 39 input beats not taken",
}


def test_every_fault_is_tried() -> None:
    assert {*FAULTS, Fault.NONE} == set(Fault)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.value)
def test_faulty_device_turns_red(fault: Fault, top: Path) -> None:
    """On Amaranth's simulator and in Verilator, with one and the same verdict."""
    job = StreamJob(
        faulty_beats(fault), timeout_cycles=300, source_stall=0.3, sink_stall=0.3, seed=6, output_beats=len(BEATS)
    )
    slow = run(Backend.AMARANTH, top, job)
    with pytest.raises(StreamFault, match=re.escape(FAULTS[fault])):
        slow.check()
    assert_same(run(Backend.BARE, top, job), slow)


@pytest.mark.parametrize("fault", [Fault.DEAD, Fault.EXTRA, Fault.CHANGES], ids=lambda fault: fault.value)
def test_cocotb_turns_red(fault: Fault, top: Path) -> None:
    """The test inside the simulator judges for itself; any other verdict than the feeder's is an error."""
    job = StreamJob(faulty_beats(fault), timeout_cycles=300, sink_stall=0.3, seed=6)
    with pytest.raises(StreamFault):
        run_stream(top, job)


@pytest.mark.parametrize("backend", [Backend.COCOTB, Backend.AMARANTH], ids=lambda backend: backend.value)
def test_waves_come_when_asked_for(backend: Backend, top: Path, tmp_path: Path) -> None:
    waves = tmp_path / "job.vcd"
    dut = component() if backend is Backend.AMARANTH else top
    result = run_stream(dut, StreamJob(BEATS, timeout_cycles=1000), backend, waves=waves)
    np.testing.assert_array_equal(result.cycles, np.arange(len(BEATS)) + STAGES)
    text = waves.read_text()
    assert "$enddefinitions" in text
    assert text.count("\n#") > len(BEATS)


def test_bench_refuses_what_does_not_fit(top: Path) -> None:
    job = StreamJob(BEATS[:, :4].copy(), timeout_cycles=10)
    refused = component()
    Fragment.get(refused, None)  # Amaranth warns of a component that nobody elaborates
    for dut in (top, refused):
        with pytest.raises(DtpError, match=r"^StreamJob\.beats has 4 bytes a beat, the processor takes 5: "):
            run_stream(dut, job)
    with pytest.raises(DtpError, match="must be an Amaranth component for amaranth"):
        run_stream(top, job, Backend.AMARANTH)
    with pytest.raises(DtpError, match="must be the path of a Verilog file for cocotb, not Pipeline"):
        run_stream(refused, job, Backend.COCOTB)
    with pytest.raises(DtpError, match="must be None for backend bare"):
        run_stream(top, job, Backend.BARE, waves=Path("x.vcd"))
    with pytest.raises(DtpError, match=r"^object has no stream i with a field data$"):
        run_stream(object(), job)


def test_ports_are_read_from_the_file(top: Path, tmp_path: Path) -> None:
    ports = ports_of(top)
    assert (ports.in_bytes, ports.out_bytes, ports.user_bits) == (IN_BYTES, OUT_BYTES, USER_BITS)
    with pytest.raises(DtpError, match=r"absent\.v cannot be read: No such file or directory$"):
        ports_of(tmp_path / "absent.v")
    other = tmp_path / "other.v"
    other.write_text("module bottom(clk);\n  input clk;\nendmodule\n")
    with pytest.raises(DtpError, match=r"other\.v has no module top$"):
        ports_of(other)
    other.write_text(re.sub(r"^\s*input abort;", "", top.read_text(), flags=re.MULTILINE))
    with pytest.raises(DtpError, match=r"^module top of .* has no input abort$"):
        ports_of(other)


def test_unusable_cache_is_named(top: Path, tmp_path: Path) -> None:
    with pytest.raises(DtpError, match=r"^make takes no path with a space in it, move '.*/my cache'$"):
        build(top, BARE, cache_dir=tmp_path / "my cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(DtpError, match=r"^cache_dir '.*/file/cache' cannot be made: Not a directory$"):
        build(top, BARE, cache_dir=tmp_path / "file" / "cache")


def test_failed_build_leaves_nothing_that_looks_good(top: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.v"
    broken.write_text(top.read_text().replace("endmodule", "  assign nonsense = ;\nendmodule", 1))
    for driver in (BARE, COCOTB):
        with pytest.raises(SimulationError, match="syntax error"):
            build(broken, driver, cache_dir=tmp_path / "cache")
    builds = tmp_path / "cache" / "cosim"
    assert sorted(path.suffix for path in builds.iterdir()) == [".lock", ".lock"]
    # Nor does one that was killed, once somebody asks for the same again.
    for lock in list(builds.iterdir()):
        (builds / f".building-{lock.stem}-killed" / "build").mkdir(parents=True)
    for driver in (BARE, COCOTB):
        with pytest.raises(SimulationError, match="syntax error"):
            build(broken, driver, cache_dir=tmp_path / "cache")
    assert sorted(path.suffix for path in builds.iterdir()) == [".lock", ".lock"]


def test_build_is_made_once_for_all_callers(top: Path) -> None:
    """Callers at the same time wait for one build and get the same folder; a changed file makes a new one."""
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build(top, BARE))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert [path.name for path in found[0].iterdir()] == ["dtp_feeder"]
    other = top.with_name("other.v")
    other.write_text(top.read_text() + "// another\n")
    assert build(other, BARE) != found[0]
