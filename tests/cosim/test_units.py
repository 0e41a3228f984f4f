"""Units alone, as generated: their Verilog under cocotb on Verilator, beside golden model and cycle model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rtl.units
from dtp.config import PRESETS, Config
from dtp.kernel import MAX_WAIT, Step, StepKind
from dtp.solve import MiddleMode
from dtp.transport import TransportParams
from dtp.units import Unit
from rtl.units import field_params, loop_params, pruner_params
from sim.bench.channels import ChannelJob, ChannelResult, Sink, Source, run_channels
from sim.cycles.holonomy import field_timing
from sim.cycles.loops import unit_timing
from sim.cycles.pruner import head_timing
from sim.cycles.transport import stream_cycles
from tests.rtl import test_commutator as kernels
from tests.rtl import test_holonomy as fields
from tests.rtl import test_holonomy_engine as programs
from tests.rtl import test_pruner as pruning
from tests.rtl import test_transport as transports
from tests.tile import lint, verilog_of
from tools.commutator import Part, part_channels
from tools.loops import FLOOR, loop_channels
from tools.units import packer, with_last

Records = list[tuple[int, int]]  # payload, and the first cycle in which it may be offered


@dataclass(frozen=True)
class Case:
    """What goes into a unit and what must come out.

    Members
    -------
    inputs, outputs: by channel
    plain: plain outputs at the end
    cycles: from a run without stalls, the cycles that the cycle model gives for some of the channels
    given: plain inputs that are not 0
    """

    unit: Unit
    config: Config
    inputs: dict[str, Records]
    outputs: dict[str, list[int]]
    plain: dict[str, int]
    cycles: Callable[[ChannelResult], dict[str, Sequence[int]]]
    given: dict[str, int] = field(default_factory=dict)

    def run(self, *, stall: float = 0.0, seed: int = 0) -> ChannelResult:
        """The generated Verilog; that no stream's rule is broken is checked."""
        job = ChannelJob(
            inputs={name: Source(records, stall) for name, records in self.inputs.items()},
            outputs={name: Sink(len(payloads), stall) for name, payloads in self.outputs.items()},
            timeout_cycles=int(60_000 / (1 - stall) ** 2),
            drain_cycles=200,
            seed=seed,
            plain=self.given,
        )
        return run_channels(verilog_of(self.config, self.unit), job)

    def differences(self, result: ChannelResult) -> list[str]:
        """Every word and every plain output that is another one than expected."""
        found = []
        for name, wanted in self.outputs.items():
            got = result.outputs[name].payloads
            assert len(got) == len(wanted)
            found += [
                f"word {n} of {name} is {one:x}, not {other:x}"
                for n, (one, other) in enumerate(zip(got, wanted, strict=True))
                if one != other
            ]
        found += [
            f"{name} is {result.plain[name]}, not {value}"
            for name, value in self.plain.items()
            if result.plain[name] != value
        ]
        return found

    def late(self, result: ChannelResult) -> list[str]:
        """Every channel with a word in another cycle than the model's."""
        found = []
        for name, wanted in self.cycles(result).items():
            got = result.inputs[name] if name in result.inputs else result.outputs[name].cycles
            if list(got) != list(wanted):
                pairs = enumerate(zip(got, wanted, strict=True))
                n, (one, other) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
                found.append(f"word {n} of {name} comes in cycle {one}, not {other}")
        return found


def at_once(payloads: Iterable[int]) -> Records:
    return [(payload, 0) for payload in payloads]


def gaps(random: np.random.Generator, count: int) -> list[int]:
    """First cycles of an input that pauses now and then."""
    return np.cumsum(random.choice([0, 1, 7], count, p=[0.4, 0.5, 0.1])).tolist()


# ---- transport ---------------------------------------------------------------------------------------------


def transport(config: Config) -> Case:
    """Two jobs: one pair of slots at full mode, one with two groups, a factor of its own and a base."""
    pairs = TransportParams(config).vectors == 2
    cases = [
        transports.Case.of(config, 11, tokens=7, words=3, tag=77),
        transports.Case.of(
            config, 12, mode=MiddleMode.SCALE, groups=2, tokens=3, words=2, tag=65535, separate=True,
            transposed=not pairs, identity=False, base=True,
        ),
        transports.Case.of(config, 13, mode=MiddleMode.WOODBURY, tokens=4, words=2, tag=5),
    ]  # fmt: skip
    return transport_jobs(config, cases)


def transport_jobs(config: Config, cases: Sequence[transports.Case]) -> Case:
    """Jobs of the transport engine behind each other."""
    inputs, outputs = [], []
    for case in cases:
        for beats, payloads, spare in zip(transports._packed(config, case), (inputs, outputs), (0, 1), strict=True):
            size = 8 * beats.shape[1] + spare  # tuser of one bit
            payloads += [
                int.from_bytes(beat.tobytes(), "little") | int(n == len(beats) - 1) << size
                for n, beat in enumerate(beats)
            ]

    def cycles(result: ChannelResult) -> dict[str, Sequence[int]]:
        first = int(result.inputs["s_axis"][0])
        assert first == 0
        return {"m_axis": stream_cycles(config, [case.job for case in cases])}

    return Case(Unit.TRANSPORT, config, {"s_axis": at_once(inputs)}, {"m_axis": outputs}, {}, cycles)


# ---- holonomy ----------------------------------------------------------------------------------------------


def holonomy(config: Config) -> Case:
    """Four heads of several blocks and a bit, words with pauses."""
    params, random = field_params(config), np.random.default_rng(21)
    lengths = (3 * config.block + 5, config.block, 2, 2 * config.block + 1)
    heads = [fields._head(params, random, tokens=n, causal=n % 2 == 1) for n in lengths]
    job = packer(config, Unit.HOLONOMY, "s_axis_job_tdata")
    word = packer(config, Unit.HOLONOMY, "s_axis_tdata")
    score = packer(config, Unit.HOLONOMY, "m_axis_tdata")
    jobs = [
        job({
            "tokens": h.job.tokens, "words": h.job.words, "causal": int(h.job.causal), "shifts": h.job.shifts,
            "reciprocals": h.job.reciprocals,
        })
        for h in heads
    ]  # fmt: skip
    lanes, last = zip(*fields._words(params, heads), strict=True)
    vectors = with_last(config, Unit.HOLONOMY, "s_axis", [word({"": values}) for values in lanes], last)
    expected = fields._expected(params, heads)
    job_from, word_from = [0, 9, 400, 401], gaps(random, len(vectors))

    def cycles(result: ChannelResult) -> dict[str, Sequence[int]]:
        timing = field_timing(params, [h.job for h in heads], job_cycles=job_from, word_cycles=word_from)
        return {"s_axis_job": timing.jobs.tolist(), "s_axis": timing.words.tolist(), "m_axis": timing.scores.tolist()}

    return Case(
        Unit.HOLONOMY,
        config,
        {"s_axis_job": list(zip(jobs, job_from, strict=True)), "s_axis": list(zip(vectors, word_from, strict=True))},
        {"m_axis": [score({"score": s, "last": row, "end": end}) for s, row, end in expected]},
        {"error": 0, "saturated": int(any(s == 65535 for s, _, _ in expected))},
        cycles,
    )


# ---- loops -------------------------------------------------------------------------------------------------


def loops(config: Config) -> Case:
    """Loops of type B and of type C, two programs behind each other, on random Cayley transports."""
    drawn = programs.drawn_programs(config, heads=loop_params(config).heads)
    table = [programs.run(config, loop_params(config), program, drawn) for program in drawn.programs]
    sent = [loop_channels(config, one) for one in table]

    def cycles(result: ChannelResult) -> dict[str, Sequence[int]]:
        walks = [walk for one in table for walk in one.walks]
        ends = [bool(header["last"]) for one in table for header in one.headers]
        timing = unit_timing(config, loop_params(config), walks, ends)
        return {
            "s_axis_step": timing.steps.tolist(), "s_axis_header": timing.headers.tolist(),
            "m_axis": timing.reports.tolist(),
        }  # fmt: skip

    return Case(
        Unit.LOOPS,
        config,
        {name: at_once(payload for inputs, _ in sent for payload in inputs[name]) for name in sent[0][0]},
        {"m_axis": [payload for _, reports in sent for payload in reports]},
        {"error": 0, "transport_error": 0},
        cycles,
        {"floor": FLOOR},
    )


# ---- pruner ------------------------------------------------------------------------------------------------


def pruner(config: Config) -> Case:
    """Heads of every kind, some of the largest size; every third one has too few scores or too many.

    In the last one a score is the threshold itself.
    """
    params, random = pruner_params(config), np.random.default_rng(31)
    told = [pruning.command(params, random) for _ in range(8)]
    told[1] = replace(told[1], last_block=params.max_blocks - 1, last_valid=params.max_blocks - 1, gate=1, budget=3)
    heads = [pruning.head(params, random, command, wrong=n % 3 == 2) for n, command in enumerate(told)]
    told.append(replace(told[1], gate=0, fresh=True, source=2, band=0))
    exact = pruning.head(params, random, told[-1])
    theta = sorted(exact.table or ())[params.max_blocks**2 // 2]
    heads.append(replace(exact, command=replace(told[-1], theta_low=theta, theta_high=theta)))
    golden = pruning.golden(params, heads)
    command, table, mask, report = (
        packer(config, Unit.PRUNER, f"{name}_tdata")
        for name in ("s_axis_command", "s_axis_i_table", "m_axis", "m_axis_report")
    )
    sources = {
        name: at_once(
            table({"score": score, "last": int(n == len(sent) - 1)})
            for sent in sources
            for n, score in enumerate(sent or ())
        )
        for name, sources in (
            ("s_axis_i_holonomy", [h.holonomy for h in heads]),
            ("s_axis_i_table", [h.table for h in heads]),
        )
    }
    rows = [
        mask({
            "mask": sum(1 << int(j) for j in np.flatnonzero(row)), "skipped": int(answer.skipped),
            "last": int(n == len(answer.mask) - 1),
        })
        for answer in golden
        for n, row in enumerate(answer.mask)
    ]  # fmt: skip
    reports = [
        report({"kept": r.kept, "legal": r.legal, "skipped": int(r.skipped), "error": int(r.error)}) for r in golden
    ]

    def cycles(result: ChannelResult) -> dict[str, Sequence[int]]:
        start, of_rows, of_reports = 0, [], []
        for head in heads:
            timing = head_timing(params, head.command, start, sent=head.sent)
            of_rows += timing.rows.tolist()
            of_reports.append(timing.report)
            start = timing.next_command
        return {"m_axis": of_rows, "m_axis_report": of_reports}

    commands = at_once(command({name: int(value) for name, value in vars(h.command).items()}) for h in heads)
    return Case(
        Unit.PRUNER,
        config,
        {"s_axis_command": commands, **sources},
        {"m_axis": rows, "m_axis_report": reports},
        {"error": next((int(r.error) for r in golden if r.error), 0), "skipped_heads": sum(r.skipped for r in golden)},
        cycles,
    )


# ---- commutator --------------------------------------------------------------------------------------------


def stores(kernel: Any) -> list[Step]:
    """A state, and the queries, keys and values of it: one stored matrix behind the other."""
    bases = {name: n * kernel.matrices["q"].job.blocks(kernel.config) * kernel.config.pass_steps
             for n, name in enumerate("qkv")}  # fmt: skip
    load = Step(kind=StepKind.LOAD, group=0, width=kernel.layer.model, target=4)
    return [load] + [
        Step(
            kind=StepKind.MATRIX, group=0, source=4, matrix=name, job=kernel.matrices[name].job, bias_base=bases[name],
            store=True, wait=MAX_WAIT,
        )
        for name in "qkv"
    ]  # fmt: skip


def commutator(config: Config, part: str) -> Case:
    """A layer of two row groups: the program ``before`` attention or ``after`` it, or only three ``stores``."""
    layer = kernels.small_layer(
        tokens=2 * config.rows - 1, model=2 * config.block, width=config.block, mlp=2 * config.block
    )
    kernel = kernels.quantise(config, layer)
    halves = kernels.halves(kernel, kernels.CommutatorMode.FULL, np.random.default_rng(41))
    state = kernels.group_rows(kernel, kernel.hidden)[:1]
    program, loads = {"before": halves[0], "after": halves[1], "stores": (stores(kernel), state)}[part]
    made = Part.of(kernel, program, loads)
    sent = part_channels(made)

    def cycles(result: ChannelResult) -> dict[str, Sequence[int]]:
        timing = made.timing(sent.start)
        of_channels = {
            "s_axis_step": timing.steps, "s_axis": timing.words, "s_axis_w": timing.weights, "m_axis": timing.outputs,
            "m_axis_energy": timing.energies,
        }  # fmt: skip
        return {name: cycles.tolist() for name, cycles in of_channels.items() if len(cycles)}

    inputs = {name: list(source.records) for name, source in sent.sources(0.0).items()}
    return Case(Unit.COMMUTATOR, config, inputs, sent.outputs, sent.plain, cycles)


# ---- tests -------------------------------------------------------------------------------------------------


CASES: dict[str, Callable[[Config], Case]] = {
    "transport": transport,
    "holonomy": holonomy,
    "loops": loops,
    "pruner": pruner,
    "commutator, before": lambda config: commutator(config, "before"),
    "commutator, after": lambda config: commutator(config, "after"),
    "commutator, stores": lambda config: commutator(config, "stores"),
}


def processor(name: str, preset: str) -> Config:
    """The preset. A commutator of sixteen wide rows takes minutes to build: four are as wide in everything else.

    Loops solve token by token, so that one of sixteen lanes does.
    """
    config = Config.load(preset)
    if preset == "wide" and name == "loops":
        return config.changed(name="one-lane", solve_lanes=1)
    if preset == "wide" and name.startswith("commutator"):
        return config.changed(name="four-wide-rows", rows=4, normaliser_lanes=8, output_bytes=32)
    return config


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", CASES)
def test_bits_and_cycles(name: str, preset: str) -> None:
    """Without stalls every word in its cycle; with stalls on every channel every word.

    Stalls need not cost cycles: scores of the field are made in those in which no word comes.
    """
    case = CASES[name](processor(name, preset))
    still = case.run()
    assert case.differences(still) == []
    assert case.late(still) == []
    stalled = case.run(stall=0.4, seed=len(name))
    assert case.differences(stalled) == []
    assert stalled.sim_cycles != still.sim_cycles


def test_saturations_stop_at_their_limit() -> None:
    """More saturated lanes in a job than its status has room for; the next job counts from 0."""
    config = Config.load("tiny")
    many = transports.saturating_case(config, tokens=520, words=16, alone=False)
    few = transports.saturating_case(config, tokens=2, words=3, alone=True)
    assert many.result.saturations == 65535 and few.result.saturations == 4
    case = transport_jobs(config, [many, few])
    assert case.differences(case.run()) == []


@pytest.mark.parametrize("name", CASES)
def test_a_difference_is_found(name: str) -> None:
    """One wrong bit of any channel, one wrong plain output and one word in another cycle."""
    case = CASES[name](Config.load("tiny"))
    result = case.run()
    assert case.differences(result) == []
    for channel, payloads in case.outputs.items():
        for n in range(0, len(payloads), max(1, len(payloads) // 5)):
            changed = [*payloads[:n], payloads[n] ^ 1 << n % 9, *payloads[n + 1 :]]
            assert len(replace(case, outputs=case.outputs | {channel: changed}).differences(result)) == 1
    for port, value in case.plain.items():
        assert len(replace(case, plain=case.plain | {port: value ^ 1}).differences(result)) == 1
    for channel, wanted in case.cycles(result).items():
        later = {channel: [*wanted[:-1], wanted[-1] + 1]}
        assert len(replace(case, cycles=lambda _, later=later: later).late(result)) == 1


@pytest.mark.parametrize("preset", ["tiny", "ecp5-85k"])
@pytest.mark.parametrize("unit", [unit for unit in Unit if unit is not Unit.ATTENTION])
def test_lint(unit: Unit, preset: str) -> None:
    assert lint(verilog_of(Config.load(preset), unit)) == ""


def test_the_example_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(rtl.units.__file__).parents[1] / "docs" / "interface.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "interface.md", "exec"), {})
    assert capsys.readouterr().out == "[1, 3]\n"
