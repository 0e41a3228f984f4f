"""Loop programs: layout, every refusal by name, steps, credits, the sampler, and energies and gauge in integers."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from dtp.config import Config
from dtp.errors import DtpError
from dtp.fixed import Int, round_shift, saturate
from dtp.holonomy import LoopAccounts, LoopParams
from dtp.loops import (
    FIELDS,
    Convention,
    EdgeKind,
    Extent,
    Inverse,
    LoopGraph,
    LoopType,
    Node,
    Program,
    Step,
    check_program,
    run_program,
    sample_loops,
    steps,
)
from dtp.solve import MiddleMode
from dtp.transport import connection_columns, quantise_solve, quantise_state, transport

EXTENT = Extent(tokens=20, layers=3, heads=4, probes=2, block=8)
A, B, C = LoopType
ATTENTION, RESIDUAL = EdgeKind
FRAME, DESTINATION = Convention


def table(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


# loop, type, kind, convention, source token, layer, target token, layer, head, probe
TYPE_A = ((0, A, ATTENTION, FRAME, 3, 1, 17, 1, 2, 1), (0, A, ATTENTION, FRAME, 17, 1, 3, 1, 3, 1))
TYPE_B = (
    (0, B, RESIDUAL, FRAME, 3, 0, 3, 2, 0, 0),
    (0, B, ATTENTION, FRAME, 3, 2, 9, 2, 1, 0),
    (0, B, RESIDUAL, FRAME, 9, 2, 9, 0, 0, 0),
    (0, B, ATTENTION, FRAME, 9, 0, 3, 0, 1, 0),
)


def changed(rows: tuple[tuple[int, ...], ...], **values: int) -> np.ndarray:
    """``edge_field`` keywords: the value of a field in one row."""
    out = table(*rows)
    for name, value in values.items():
        edge, _, fieldname = name[1:].partition("_")
        out[int(edge), FIELDS.index(fieldname)] = value
    return out


def test_file_layout_and_back() -> None:
    rows = table(*TYPE_A, *((1, *row[1:]) for row in TYPE_B))
    program = check_program(rows, EXTENT, Inverse.TRANSPOSE)
    assert len(program.loops) == 2 and program.to_array().dtype == np.int32
    assert np.array_equal(program.to_array(), rows)
    first = program.loops[0][0]
    assert first.source == Node(3, 1) and first.target == Node(17, 1) and (first.head, first.probe) == (2, 1)


def test_credits() -> None:
    program = check_program(table(*TYPE_A, *((1, *row[1:]) for row in TYPE_B)), EXTENT, Inverse.TRANSPOSE)
    a, b = program.headers
    assert (a.tag, a.heads, a.block) == (0, (2, 3), (0, 2))
    assert (b.tag, b.heads, b.block) == (1, (1,), (0, 1))
    up_down = table((0, C, RESIDUAL, FRAME, 9, 0, 9, 1, 0, 0), (0, C, RESIDUAL, FRAME, 9, 1, 9, 0, 0, 0))
    header = check_program(up_down, EXTENT, Inverse.TRANSPOSE).header(0)
    assert header.heads == () and header.block == (1, 1)


def test_steps() -> None:
    program = check_program(table(*TYPE_B), EXTENT, Inverse.TRANSPOSE)
    up, across, down, _ = program.loops[0]
    assert steps(up) == (Step(RESIDUAL, Node(3, 0), 0, False, 2),)
    assert steps(down) == (Step(RESIDUAL, Node(9, 0), 0, True, 2),)
    assert steps(across) == (
        Step(ATTENTION, Node(3, 2), 1, True, 2),
        Step(ATTENTION, Node(9, 2), 1, False, 2),
    )
    literal = check_program(changed(TYPE_A, e0_convention=1, e1_convention=1), EXTENT, Inverse.NONE)
    assert steps(literal.loops[0][0]) == (Step(ATTENTION, Node(17, 1), 2, False, 1),)


@pytest.mark.parametrize(
    ("rows", "inverse", "message"),
    [
        (table(*TYPE_A)[:, :9], "transpose",
         "Program.loops must be of shape (edges, 10) with an edge at least, not (2, 9)"),
        (table(*TYPE_A)[:0], "transpose",
         "Program.loops must be of shape (edges, 10) with an edge at least, not (0, 10)"),
        (table(*TYPE_A).astype(np.int64), "transpose", "Program.loops must be int32, not 'int64'"),
        (changed(TYPE_A, e0_loop=1), "transpose",
         "Program.edge 0 loop must be 0, loops being numbered in order, not 1"),
        (
            changed(TYPE_A, e1_loop=2), "transpose",
            "Program.edge 1 loop must be 0 or 1, loops being numbered in order, not 2",
        ),
        (changed(TYPE_A, e0_type=3), "transpose", "Program.edge 0 type must be one of 0 (a), 1 (b), 2 (c), not 3"),
        (
            changed(TYPE_A, e1_kind=2), "transpose",
            "Program.edge 1 kind must be one of 0 (attention), 1 (residual), not 2",
        ),
        (
            changed(TYPE_A, e0_convention=-1), "transpose",
            "Program.edge 0 convention must be one of 0 (frame), 1 (destination), not -1",
        ),
        (changed(TYPE_A, e0_target_token=20), "transpose", "Program.edge 0 target_token must be in 0…19, not 20"),
        (changed(TYPE_A, e0_source_token=-1), "transpose", "Program.edge 0 source_token must be in 0…19, not -1"),
        (changed(TYPE_A, e0_source_layer=3), "transpose", "Program.edge 0 source_layer must be in 0…2, not 3"),
        (changed(TYPE_B, e0_target_layer=3), "transpose", "Program.edge 0 target_layer must be in 0…2, not 3"),
        (changed(TYPE_A, e1_head=4), "transpose", "Program.edge 1 head must be in 0…3, not 4"),
        (changed(TYPE_A, e1_probe=2), "transpose", "Program.edge 1 probe must be in 0…1, not 2"),
        (
            changed(TYPE_A, e0_target_layer=2), "transpose",
            "Program.edge 0 target_layer must be source_layer 1, as an attention edge stays in its layer, not 2",
        ),
        (
            changed(TYPE_B, e0_target_token=4), "transpose",
            "Program.edge 0 target_token must be source_token 3, as a residual edge stays at its token, not 4",
        ),
        (
            changed(TYPE_A, e0_target_token=3), "transpose",
            "Program.edge 0 target must be another node than its source (3, 1), not (3, 1)",
        ),
        (changed(TYPE_B, e0_head=1), "transpose", "Program.edge 0 head must be 0 in a residual edge, not 1"),
        (
            changed(TYPE_A, e1_source_token=16), "transpose",
            "Program.edge 1 source must be (17, 1), where the edge before it ended, not (16, 1)",
        ),
        (changed(TYPE_A, e1_type=2), "transpose", "Program.edge 1 type must be 0 as in the loop's first edge, not 2"),
        (
            changed(TYPE_A, e1_convention=1), "transpose",
            "Program.edge 1 convention must be 0 as in the loop's first edge, not 1",
        ),
        (changed(TYPE_A, e1_probe=0), "transpose", "Program.edge 1 probe must be 1 as in the loop's first edge, not 0"),
        (
            changed(TYPE_A, e1_target_token=4), "transpose",
            "Program.loop 0 must be closed: back at (3, 1), not 'ending at (4, 1)'",
        ),
        (table(*TYPE_A)[:1], "transpose", "Program.loop 0 must be closed: back at (3, 1), not 'ending at (17, 1)'"),
        (
            changed(TYPE_B, e0_type=0, e1_type=0, e2_type=0, e3_type=0), "transpose",
            "Program.loop 0 must be of two attention edges in type A, not 'residual, attention, residual, attention'",
        ),
        (
            changed(TYPE_A, e0_type=1, e1_type=1), "transpose",
            "Program.loop 0 must be of residual, attention, residual, attention edges in any rotation in type B, "
            "not 'attention, attention'",
        ),
        (
            table(*TYPE_A), "none",
            "Program.edge 0 must be without an inverse, as the transports have none: destination convention, "
            "or Cayley or Woodbury, not 'frame'",
        ),
        (
            changed(TYPE_B, **{f"e{n}_convention": 1 for n in range(4)}), "none",
            "Program.edge 2 must be without an inverse, as the transports have none: destination convention, "
            "or Cayley or Woodbury, not 'a residual edge down'",
        ),
    ],
)  # fmt: skip
def test_refused_programs(rows: np.ndarray, inverse: str, message: str) -> None:
    with pytest.raises(DtpError) as error:
        check_program(rows, EXTENT, Inverse(inverse))
    assert str(error.value) == message


def test_woodbury_serves_frame() -> None:
    assert len(check_program(table(*TYPE_A), EXTENT, Inverse.WOODBURY).loops) == 1


@pytest.mark.parametrize("loop_type", list(LoopType))
def test_sampled_programs_are_legal_and_repeat(loop_type: LoopType) -> None:
    graph = LoopGraph(EXTENT, residual=[(0, 1), (1, 2), (0, 2)])
    drawn = sample_loops(graph, loop_type, 40, seed=3)
    again = check_program(drawn.program.to_array(), EXTENT, Inverse.TRANSPOSE)
    assert again == drawn.program
    assert sample_loops(graph, loop_type, 40, seed=3).program == drawn.program
    assert sample_loops(graph, loop_type, 40, seed=4).program != drawn.program
    for loop in drawn.program.loops:
        for edge in loop:
            assert graph.graph.edges[edge.source, edge.target]["kind"] is edge.kind
    lengths = {len(loop) for loop in drawn.program.loops}
    assert lengths == {A: {2}, B: {4}}.get(loop_type, lengths) and (loop_type is not C or min(lengths) >= 6)
    if loop_type is C:
        assert any({edge.kind for edge in loop} == set(EdgeKind) for loop in drawn.program.loops)


def test_coverage_is_even() -> None:
    graph = LoopGraph(EXTENT)
    few, all_blocks = (sample_loops(graph, A, count, seed=1).coverage for count in (5, 9))
    assert few.block_fraction == 5 / 9 and few.head_fraction == 1.0
    assert all_blocks.block_fraction == 1.0 and all_blocks.blocks.max() == 1
    assert sample_loops(graph, A, 1, seed=1).coverage.head_fraction == 0.5


def test_coverage_counts_legal_blocks_only() -> None:
    attends = np.zeros((20, 20), dtype=bool)
    attends[:4, 8:16] = True
    drawn = sample_loops(LoopGraph(EXTENT, attends=attends), A, 2, seed=1)
    assert drawn.coverage.legal.sum() == 2 and drawn.coverage.block_fraction == 1.0
    for loop in drawn.program.loops:
        assert sorted(edge.source.token // 8 for edge in loop) == [0, 1]


def test_partners_of_a_given_list() -> None:
    graph = LoopGraph(EXTENT, partners=[(2,), (3,), (0,), (1,)])
    for header in sample_loops(graph, A, 12, seed=2).program.headers:
        assert abs(header.heads[0] - header.heads[1]) == 2


def test_the_graph_is_networkx() -> None:
    graph = LoopGraph(Extent(tokens=3, layers=2, heads=1, probes=1, block=4))
    assert isinstance(graph.graph, nx.Graph)
    assert graph.graph.number_of_nodes() == 6 and graph.graph.number_of_edges() == 2 * 3 + 3
    assert graph.neighbours(Node(1, 0), RESIDUAL) == [Node(1, 1)]


def test_sampler_refusals() -> None:
    graph = LoopGraph(EXTENT)
    flat = LoopGraph(Extent(tokens=4, layers=1, heads=1, probes=1, block=4))
    lonely = LoopGraph(EXTENT, attends=np.eye(20, dtype=bool))
    for call, message in (
        (lambda: sample_loops(graph, A, 0, 1), "sample_loops.count must be at least 1, not 0"),
        (lambda: sample_loops(graph, C, 1, 1, edges=1), "sample_loops.edges must be at least 2, not 1"),
        (lambda: sample_loops(flat, B, 1, 1),
         "sample_loops: the graph has no residual step, which a loop of type B needs"),
        (lambda: sample_loops(lonely, A, 1, 1), "sample_loops: the graph has no two tokens that attend to each other"),
        (lambda: LoopGraph(EXTENT, attends=np.ones((3, 3))), "LoopGraph.attends must be of shape (20, 20), not (3, 3)"),
        (
            lambda: LoopGraph(EXTENT, residual=[(1, 3)]),
            "LoopGraph.residual must be pairs low < high of 0…2, not (1, 3)",
        ),
        (lambda: LoopGraph(EXTENT, partners=[(1,)]), "LoopGraph.partners must be a list for each of 4 heads, not 1"),
        (
            lambda: LoopGraph(EXTENT, partners=[(1,), (2,), (4,), (0,)]),
            "LoopGraph.partners must be of heads 0…3, not 4",
        ),
        (lambda: Extent(1, 1, 0, 1, 1), "Extent.heads must be at least 1, not 0"),
    ):  # fmt: skip
        with pytest.raises(DtpError) as error:
            call()
        assert str(error.value) == message


# ---- energies ------------------------------------------------------------------------------------------------------


class RankK:
    """y = x + W Vᵀ x with factors of ``bits`` bits, sums exact, the projection kept to 20 bits, the state to 16."""

    def __init__(self, w: np.ndarray, v: np.ndarray, bits: int) -> None:
        self.real = np.eye(len(w)) + w @ v.T
        limit = (1 << (bits - 1)) - 1
        self._steps = [np.abs(f).max() / limit if np.abs(f).max() else 1.0 for f in (w, v)]
        self.w, self.v = (np.rint(f / s).astype(np.int64) for f, s in zip((w, v), self._steps, strict=True))

    def __call__(self, x: Int, transpose: bool) -> tuple[Int, bool]:
        into, out = (self.w, self.v) if transpose else (self.v, self.w)
        seen = into.T @ x
        shift = max(0, int(np.abs(seen).max()).bit_length() - 24)
        scale = self._steps[0] * self._steps[1] * 2.0**shift
        y = x + round_shift(out @ round_shift(seen, shift) * round(scale * 2**36), 36)
        return saturate(y, 16), bool(np.abs(y).max() > 32767)


def cayley(random: np.random.Generator, width: int, rank: int, size: float) -> tuple[np.ndarray, np.ndarray]:
    """W and V of a Cayley transport (SPEC §2)."""
    a, b = (size * random.standard_normal((width, rank)) / np.sqrt(width) for _ in range(2))
    v = np.hstack([b, a])
    zero, unit = np.zeros((rank, rank)), np.eye(rank)
    return -v @ np.linalg.inv(v.T @ v / 2 + np.block([[zero, -unit], [unit, zero]])), v


def composed(
    first: tuple[np.ndarray, np.ndarray], then: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """(I + W′V′ᵀ)(I + W Vᵀ) as one rank-k form."""
    (w, v), (w2, v2) = first, then
    return np.hstack([w2, w]), np.hstack([v2 + v @ (w.T @ v2), v])


def energies(program: Program, transports: dict[tuple[Node, int], RankK], probes: Int) -> tuple[np.ndarray, np.ndarray]:
    """Ratios of the integer program, and the literal walk in float64."""

    def engine(step: Step, x: Int) -> tuple[Int, bool]:
        return transports[step.node, step.head](x, step.inverse)

    params = LoopParams(lanes=8, multipliers=1, max_lanes=32, heads=4, blocks=4)
    accounts = run_program(program, probes, engine, LoopAccounts(params, floor=1))
    assert not any(record.saturated for record in accounts.records)
    real = []
    for loop in program.loops:
        x = y = probes[loop[0].probe].astype(float)
        for edge in loop:
            for step in steps(edge):
                matrix = transports[step.node, step.head].real
                y = (np.linalg.inv(matrix) if step.inverse else matrix) @ y
        real.append(((y - x) ** 2).sum() / (x**2).sum())
    return np.array([record.ratio * 2.0**-24 for record in accounts.records]), np.array(real)


def probes_of(random: np.random.Generator, count: int, width: int) -> Int:
    z = random.standard_normal((count, width))
    return np.rint(z / np.linalg.norm(z, axis=1, keepdims=True) * 2**14.9).astype(np.int64)


@pytest.mark.parametrize(("bits", "median", "worst"), [(16, 0.005, 0.01), (8, 0.03, 0.10)])
def test_energies_of_random_transports(bits: int, median: float, worst: float) -> None:
    random = np.random.default_rng(bits)
    extent = Extent(tokens=12, layers=1, heads=2, probes=3, block=8)
    transports = {
        (Node(t, 0), h): RankK(*cayley(random, 32, 2, 0.9), bits) for t in range(extent.tokens) for h in range(2)
    }
    program = sample_loops(LoopGraph(extent), A, 60, seed=bits).program
    measured, real = energies(program, transports, probes_of(random, 3, 32))
    large = real >= 1e-3
    assert large.sum() >= 50 and (measured >= 0).all()
    error = np.abs(measured[large] / real[large] - 1)
    assert np.median(error) <= median and error.max() <= worst


@pytest.mark.parametrize(("bits", "limit"), [(16, 1e-4), (8, 1e-3)])
def test_agreeing_heads_close_their_loops(bits: int, limit: float) -> None:
    random = np.random.default_rng(bits)
    extent = Extent(tokens=12, layers=1, heads=2, probes=1, block=8)
    transports: dict[tuple[Node, int], RankK] = {}
    for t in range(extent.tokens):
        transports[Node(t, 0), 0] = transports[Node(t, 0), 1] = RankK(*cayley(random, 32, 2, 0.5), bits)
    program = sample_loops(LoopGraph(extent), A, 30, seed=1).program
    measured, _ = energies(program, transports, probes_of(random, 1, 32))
    assert measured.max() <= limit


def test_gauge() -> None:
    """P_t → Q_t P_t in both heads and x → Q_i x: ``frame`` does not see it, ``destination`` does."""
    random = np.random.default_rng(9)
    width = 32
    extent = Extent(tokens=8, layers=1, heads=2, probes=1, block=8)
    plain, turned = {}, {}
    gauge = [cayley(random, width, 1, 1.2) for _ in range(extent.tokens)]
    for t in range(extent.tokens):
        for h in range(2):
            form = cayley(random, width, 2, 0.9)
            plain[Node(t, 0), h] = RankK(*form, 16)
            both = composed(form, gauge[t])
            assert both[0].shape == (width, 6)
            turned[Node(t, 0), h] = RankK(*both, 16)
    z = probes_of(random, 1, width)
    for convention, same in ((FRAME, True), (DESTINATION, False)):
        worst = 0.0
        for i in range(extent.tokens):
            j = (i + 3) % extent.tokens
            rows = table(
                (0, A, ATTENTION, convention, i, 0, j, 0, 0, 0), (0, A, ATTENTION, convention, j, 0, i, 0, 1, 0)
            )
            program = check_program(rows, extent, Inverse.TRANSPOSE)
            w, v = gauge[i]
            moved = np.rint(z + (z @ v) @ w.T).astype(np.int64)
            before, after = (energies(program, transports, x)[0][0] for transports, x in ((plain, z), (turned, moved)))
            worst = max(worst, abs(after / before - 1))
        assert worst <= 0.01 if same else worst > 0.1


@pytest.mark.parametrize(("bits", "median", "worst"), [(16, 0.005, 0.01), (8, 0.03, 0.10)])
def test_programs_on_the_transport_engine(bits: int, median: float, worst: float) -> None:
    """Loops of all types through the engine's golden model; the residual edges are Cayley forms too."""
    config = Config.load("tiny").changed(factor_bits=bits)
    random = np.random.default_rng(bits)
    extent = Extent(tokens=10, layers=2, heads=2, probes=3, block=8)
    width = 16
    where: dict[tuple[Node, int | None], int] = {}
    for token in range(extent.tokens):
        for layer in range(extent.layers):
            for head in range(extent.heads):
                where[Node(token, layer), head] = len(where)
        where[Node(token, 0), None] = len(where)
    a, b = (random.standard_normal((len(where), width, 2)) / 4 for _ in range(2))
    factors = quantise_solve(config, MiddleMode.CAYLEY, connection_columns(a, b, cayley=True)[0])
    x = a @ b.transpose(0, 2, 1) - b @ a.transpose(0, 2, 1)
    dense = np.linalg.solve(np.eye(width) - x / 2, np.eye(width) + x / 2)
    probes, _ = quantise_state(random.standard_normal((extent.probes, width)))

    def place(step: Step) -> int:
        return where[step.node, step.head if step.kind is ATTENTION else None]

    def engine(step: Step, state: Int) -> tuple[Int, bool]:
        job = replace(factors.job(config, MiddleMode.CAYLEY, transposed=step.inverse), tokens=1)
        result = transport(config, job, factors.v[place(step)][None], state[None, None])
        return result.outputs[0, 0], bool(result.saturations)

    params = LoopParams.of(config, multipliers=1, heads=extent.heads)
    for loop_type in LoopType:
        program = sample_loops(LoopGraph(extent), loop_type, 15, seed=bits).program
        accounts = run_program(program, probes, engine, LoopAccounts(params, floor=1))
        assert not any(record.saturated for record in accounts.records)
        errors = []
        for record, loop in zip(accounts.records, program.loops, strict=True):
            start = end = probes[loop[0].probe].astype(float)
            for edge in loop:
                for step in steps(edge):
                    matrix = dense[place(step)]
                    end = (matrix.T if step.inverse else matrix) @ end
            real = ((end - start) ** 2).sum() / (start**2).sum()
            assert real >= 1e-3
            errors.append(abs(record.ratio * 2.0**-24 / real - 1))
        assert np.median(errors) <= median and max(errors) <= worst


def test_run_program_refuses_other_probes() -> None:
    program = check_program(table(*TYPE_A), EXTENT, Inverse.TRANSPOSE)
    params = LoopParams(lanes=8, multipliers=1, max_lanes=8, heads=4, blocks=4)
    with pytest.raises(DtpError, match=r"^run_program\.probes must be of shape \(2, lanes\), not \(3, 8\)$"):
        run_program(program, np.zeros((3, 8)), lambda step, x: (x, False), LoopAccounts(params, floor=1))


def test_saturation_anywhere_flags_the_loop() -> None:
    program = check_program(table(*TYPE_B), EXTENT, Inverse.TRANSPOSE)
    params = LoopParams(lanes=8, multipliers=1, max_lanes=8, heads=4, blocks=4)
    calls = iter([False, True, False, False, False, False])
    accounts = run_program(program, np.ones((2, 8)), lambda step, x: (x, next(calls)), LoopAccounts(params, floor=1))
    assert accounts.records[0].saturated and next(calls, None) is None
