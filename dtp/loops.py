"""Loop programs: closed walks over tokens and layers as edge lists, their checker and a seeded sampler [GR §5.3].

Contract in ``docs/holonomy.md``, 5, 6 and 8. A program says where to walk; what a step multiplies by is asked of the
caller, so that programs need neither transports nor the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import pairwise
from typing import Any, Final, NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtp.errors import DtpError, must
from dtp.fixed import Int
from dtp.holonomy import LoopAccounts, LoopHeader
from dtp.workload_fields import LoopField

FIELDS: Final = tuple(field.value for field in LoopField)
"""Columns of a program in a file."""


class LoopType(IntEnum):
    """Shape of a loop."""

    A = 0
    """Within a layer: i –H→ j –H′→ i."""
    B = 1
    """Up at one token, across, down at the other, across."""
    C = 2
    """Any closed walk."""


class EdgeKind(IntEnum):
    """What an edge moves along."""

    ATTENTION = 0
    RESIDUAL = 1


class Convention(IntEnum):
    """Transport of an attention edge from j to i: P_i P_j⁻¹ or P_i alone."""

    FRAME = 0
    DESTINATION = 1


class Inverse(StrEnum):
    """How transports of a program are inverted."""

    TRANSPOSE = "transpose"
    """Orthogonal (Cayley) transports."""
    WOODBURY = "woodbury"
    """Linear transports that come with the rank-k form of their inverse."""
    NONE = "none"
    """Linear transports alone."""


class Node(NamedTuple):
    """A place of the graph."""

    token: int
    layer: int


@dataclass(frozen=True)
class Edge:
    """One edge; fields as in a file."""

    loop: int
    type: LoopType
    kind: EdgeKind
    convention: Convention
    source: Node
    target: Node
    head: int
    probe: int

    @property
    def row(self) -> tuple[int, ...]:
        """The edge in the order of :data:`FIELDS`."""
        return (self.loop, self.type, self.kind, self.convention, *self.source, *self.target, self.head, self.probe)


@dataclass(frozen=True)
class Step:
    """One step of the transport engine.

    Parameters
    ----------
    kind: whose transport
    node: of a residual edge its token and its lower layer
    head: 0 for residual
    inverse: apply the inverse
    reach: of a residual edge its upper layer, else the node's own
    """

    kind: EdgeKind
    node: Node
    head: int
    inverse: bool
    reach: int


@dataclass(frozen=True)
class Extent:
    """What there is to walk on.

    Parameters
    ----------
    tokens, layers, heads, probes: counts
    block: tokens of a block, for the credit
    """

    tokens: int
    layers: int
    heads: int
    probes: int
    block: int

    def __post_init__(self) -> None:
        for name in ("tokens", "layers", "heads", "probes", "block"):
            if getattr(self, name) < 1:
                raise must("Extent", name, "at least 1", getattr(self, name))

    @property
    def blocks(self) -> int:
        """Blocks along one side of the score table."""
        return -(-self.tokens // self.block)


Loop = tuple[Edge, ...]


@dataclass(frozen=True)
class Program:
    """Checked loops in order."""

    loops: tuple[Loop, ...]
    extent: Extent

    def to_array(self) -> NDArray[np.int32]:
        """(edges, fields) int32 as a file holds it."""
        return np.array([edge.row for loop in self.loops for edge in loop], dtype=np.int32).reshape(-1, len(FIELDS))

    def header(self, number: int) -> LoopHeader:
        """Heads and block that a loop is credited to."""
        loop = self.loops[number]
        heads = tuple(dict.fromkeys(edge.head for edge in loop if edge.kind is EdgeKind.ATTENTION))[:2]
        first = loop[0].source.token
        other = next((edge.target.token for edge in loop if edge.target.token != first), first)
        return LoopHeader(number, heads, (first // self.extent.block, other // self.extent.block))

    @property
    def headers(self) -> Iterator[LoopHeader]:
        """Of all loops."""
        return (self.header(number) for number in range(len(self.loops)))


def steps(edge: Edge) -> tuple[Step, ...]:
    """Steps of the engine for an edge, in order of time."""
    if edge.kind is EdgeKind.RESIDUAL:
        low, high = sorted((edge.source.layer, edge.target.layer))
        down = edge.target.layer < edge.source.layer
        return (Step(EdgeKind.RESIDUAL, Node(edge.source.token, low), 0, down, high),)
    reach = Step(EdgeKind.ATTENTION, edge.target, edge.head, False, edge.target.layer)
    if edge.convention is Convention.DESTINATION:
        return (reach,)
    return Step(EdgeKind.ATTENTION, edge.source, edge.head, True, edge.source.layer), reach


def check_program(table: ArrayLike, extent: Extent, inverse: Inverse) -> Program:
    """The program that a file's table holds.

    Raises
    ------
    DtpError
        naming edge or loop, for everything that docs/holonomy.md, 6 lists.
    """
    rows = np.asarray(table)
    if rows.ndim != 2 or rows.shape[1] != len(FIELDS) or not len(rows):
        raise must("Program", "loops", f"of shape (edges, {len(FIELDS)}) with an edge at least", rows.shape)
    if rows.dtype != np.int32:
        raise must("Program", "loops", "int32", rows.dtype.name)
    loops: list[list[Edge]] = []
    for number, row in enumerate(rows.tolist()):
        edge = _edge(number, row, extent)
        if edge.loop == len(loops) and (loops or number == 0):
            loops.append([edge])
        elif loops and edge.loop == len(loops) - 1:
            loops[-1].append(edge)
        else:
            wanted = f"{len(loops) - 1} or {len(loops)}" if loops else "0"
            raise must("Program", f"edge {number} loop", f"{wanted}, loops being numbered in order", edge.loop)
    number = 0
    for loop in loops:
        _check_loop(loop, number, inverse)
        number += len(loop)
    return Program(tuple(tuple(loop) for loop in loops), extent)


def _edge(number: int, row: Sequence[int], extent: Extent) -> Edge:
    value = dict(zip(FIELDS, row, strict=True))

    def member(name: str, enum: type[IntEnum]) -> Any:
        try:
            return enum(value[name])
        except ValueError:
            choices = ", ".join(f"{m.value} ({m.name.lower()})" for m in enum)
            raise must("Program", f"edge {number} {name}", f"one of {choices}", value[name]) from None

    limits = {
        "source_token": extent.tokens, "target_token": extent.tokens,
        "source_layer": extent.layers, "target_layer": extent.layers,
        "head": extent.heads, "probe": extent.probes,
    }  # fmt: skip
    for name, limit in limits.items():
        if not 0 <= value[name] < limit:
            raise must("Program", f"edge {number} {name}", f"in 0…{limit - 1}", value[name])
    source = Node(value["source_token"], value["source_layer"])
    target = Node(value["target_token"], value["target_layer"])
    kind = member("kind", EdgeKind)
    if kind is EdgeKind.ATTENTION and source.layer != target.layer:
        rule = f"source_layer {source.layer}, as an attention edge stays in its layer"
        raise must("Program", f"edge {number} target_layer", rule, target.layer)
    if kind is EdgeKind.RESIDUAL and source.token != target.token:
        rule = f"source_token {source.token}, as a residual edge stays at its token"
        raise must("Program", f"edge {number} target_token", rule, target.token)
    if source == target:
        raise must("Program", f"edge {number} target", f"another node than its source {tuple(source)}", tuple(target))
    if kind is EdgeKind.RESIDUAL and value["head"]:
        raise must("Program", f"edge {number} head", "0 in a residual edge", value["head"])
    return Edge(
        value["loop"], member("type", LoopType), kind, member("convention", Convention), source, target,
        value["head"], value["probe"],
    )  # fmt: skip


def _check_loop(loop: list[Edge], number: int, inverse: Inverse) -> None:
    """``number`` is that of the loop's first edge in the program."""
    first = loop[0]
    for place, (before, edge) in enumerate(pairwise(loop), number + 1):
        if edge.source != before.target:
            rule = f"{tuple(before.target)}, where the edge before it ended"
            raise must("Program", f"edge {place} source", rule, tuple(edge.source))
        for name in ("type", "convention", "probe"):
            if getattr(edge, name) != getattr(first, name):
                rule = f"{int(getattr(first, name))} as in the loop's first edge"
                raise must("Program", f"edge {place} {name}", rule, int(getattr(edge, name)))
    if loop[-1].target != first.source:
        rule = f"closed: back at {tuple(first.source)}"
        raise must("Program", f"loop {first.loop}", rule, f"ending at {tuple(loop[-1].target)}")
    kinds = [edge.kind for edge in loop]
    if first.type is LoopType.A and kinds != [EdgeKind.ATTENTION] * 2:
        raise must("Program", f"loop {first.loop}", "of two attention edges in type A", _words(loop))
    if first.type is LoopType.B and not _is_type_b(kinds):
        rule = "of residual, attention, residual, attention edges in any rotation in type B"
        raise must("Program", f"loop {first.loop}", rule, _words(loop))
    if inverse is not Inverse.NONE:
        return
    for place, edge in enumerate(loop, number):
        if any(step.inverse for step in steps(edge)):
            rule = "without an inverse, as the transports have none: destination convention, or Cayley or Woodbury"
            named = "frame" if edge.kind is EdgeKind.ATTENTION else "a residual edge down"
            raise must("Program", f"edge {place}", rule, named)


def _is_type_b(kinds: Sequence[EdgeKind]) -> bool:
    return len(kinds) == 4 and kinds[0] != kinds[1] and kinds[:2] == kinds[2:]


def _words(loop: Sequence[Edge]) -> str:
    return ", ".join(edge.kind.name.lower() for edge in loop)


Engine = Callable[[Step, Int], tuple[Int, bool]]
"""State after a step, and whether a lane saturated in it."""


def run_program(program: Program, probes: ArrayLike, engine: Engine, accounts: LoopAccounts) -> LoopAccounts:
    """Golden model of a program: every loop from its probe through the engine into ``accounts``.

    Parameters
    ----------
    probes: (probes, lanes), start vectors of 16 bits
    engine: one step of the transport engine, golden or float rounded to integers

    Raises
    ------
    DtpError: probes that the program's extent does not have.
    """
    starts = np.asarray(probes, dtype=np.int64)
    if starts.ndim != 2 or len(starts) != program.extent.probes:
        raise must("run_program", "probes", f"of shape ({program.extent.probes}, lanes)", starts.shape)
    for header, loop in zip(program.headers, program.loops, strict=True):
        state, saturated = starts[loop[0].probe], False
        for edge in loop:
            for step in steps(edge):
                state, over = engine(step, state)
                saturated |= over
        accounts.add(header, starts[loop[0].probe], state, saturated=saturated)
    return accounts


# ---- sampler -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coverage:
    """What a program's loops reach.

    Parameters
    ----------
    blocks: (blocks, blocks), loops credited to each; heads: (heads,), the same
    legal: (blocks, blocks), whether the graph has a loop to credit there
    """

    blocks: Int
    heads: Int
    legal: NDArray[np.bool_]

    @property
    def block_fraction(self) -> float:
        """Legal blocks with a loop."""
        return int(np.count_nonzero(self.blocks[self.legal])) / max(1, int(np.count_nonzero(self.legal)))

    @property
    def head_fraction(self) -> float:
        """Heads with a loop."""
        return int(np.count_nonzero(self.heads)) / len(self.heads)


def coverage(program: Program, legal: NDArray[np.bool_]) -> Coverage:
    """Credits of a program by block and head."""
    blocks = np.zeros((program.extent.blocks,) * 2, dtype=np.int64)
    heads = np.zeros(program.extent.heads, dtype=np.int64)
    for header in program.headers:
        blocks[header.block] += 1
        for head in header.heads:
            heads[head] += 1
    return Coverage(blocks, heads, legal)


class LoopGraph:
    """Tokens × layers as an undirected networkx graph of :class:`Node`; edges carry ``kind``.

    Parameters
    ----------
    extent: counts
    attends: (tokens, tokens) of bool, which pairs attend to each other in either direction; None for all
    residual: pairs of layers (low, high) joined by a residual step at every token; None for neighbours
    partners: for each head the heads that a type A loop may return by; None for the next one, cyclic

    Raises
    ------
    DtpError: shapes, layers or heads that the extent does not have.
    """

    def __init__(
        self,
        extent: Extent,
        *,
        attends: ArrayLike | None = None,
        residual: Sequence[tuple[int, int]] | None = None,
        partners: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.extent = extent
        size = extent.tokens
        pairs = np.ones((size, size), dtype=np.bool_) if attends is None else np.asarray(attends, dtype=np.bool_)
        if pairs.shape != (size, size):
            raise must("LoopGraph", "attends", f"of shape ({size}, {size})", pairs.shape)
        chosen = [(n, n + 1) for n in range(extent.layers - 1)] if residual is None else list(residual)
        for pair in chosen:
            if not 0 <= pair[0] < pair[1] < extent.layers:
                raise must("LoopGraph", "residual", f"pairs low < high of 0…{extent.layers - 1}", pair)
        self.partners = (
            tuple(((n + 1) % extent.heads,) for n in range(extent.heads))
            if partners is None
            else tuple(tuple(heads) for heads in partners)
        )
        if len(self.partners) != extent.heads:
            raise must("LoopGraph", "partners", f"a list for each of {extent.heads} heads", len(self.partners))
        for heads in self.partners:
            if not heads:
                raise must("LoopGraph", "partners", "at least one for every head", self.partners)
            for head in heads:
                if not 0 <= head < extent.heads:
                    raise must("LoopGraph", "partners", f"of heads 0…{extent.heads - 1}", head)
        self.graph: Any = nx.Graph()
        self.graph.add_nodes_from(Node(t, n) for n in range(extent.layers) for t in range(size))
        joined = np.argwhere(np.triu(pairs | pairs.T, 1))
        for layer in range(extent.layers):
            self.graph.add_edges_from(
                ((Node(int(i), layer), Node(int(j), layer)) for i, j in joined), kind=EdgeKind.ATTENTION
            )
        for low, high in chosen:
            self.graph.add_edges_from(((Node(t, low), Node(t, high)) for t in range(size)), kind=EdgeKind.RESIDUAL)
        self._pairs = [(int(i), int(j)) for i, j in joined]
        self._residual = chosen

    def legal(self) -> NDArray[np.bool_]:
        """Blocks that a loop through two tokens can be credited to."""
        legal = np.zeros((self.extent.blocks,) * 2, dtype=np.bool_)
        for i, j in self._pairs:
            for first, second in ((i, j), (j, i)):
                legal[first // self.extent.block, second // self.extent.block] = True
        return legal

    def neighbours(self, node: Node, kind: EdgeKind) -> list[Node]:
        """Nodes one edge of ``kind`` away, in order."""
        return sorted(other for other, data in self.graph.adj[node].items() if data["kind"] is kind)


class Sample(NamedTuple):
    """A drawn program and what it covers."""

    program: Program
    coverage: Coverage


def sample_loops(
    graph: LoopGraph,
    loop_type: LoopType,
    count: int,
    seed: int,
    *,
    convention: Convention = Convention.FRAME,
    edges: int = 6,
) -> Sample:
    """``count`` loops of one type, drawn with ``seed``.

    Type A and B loops take the ordered pairs of blocks in turn, in an order drawn at random, and within one a pair of
    tokens at random, so that coverage is as even as ``count`` allows. Type C walks at random, alternating attention
    and residual where the graph permits, until a shortest path back makes it at least ``edges`` edges long.

    Raises
    ------
    DtpError: a count below 1, a graph without loops of this type, or fewer than 2 edges.
    """
    extent = graph.extent
    if not isinstance(loop_type, LoopType):
        raise must("sample_loops", "loop_type", "a member of LoopType", loop_type)
    if count < 1:
        raise must("sample_loops", "count", "at least 1", count)
    if edges < 2:
        raise must("sample_loops", "edges", "at least 2", edges)
    if not graph._pairs:
        raise DtpError("sample_loops: the graph has no two tokens that attend to each other")
    if loop_type is LoopType.B and not graph._residual:
        raise DtpError("sample_loops: the graph has no residual step, which a loop of type B needs")
    random = np.random.default_rng(seed)
    by_block: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i, j in graph._pairs:
        for first, second in ((i, j), (j, i)):
            by_block.setdefault((first // extent.block, second // extent.block), []).append((first, second))
    order = list(by_block)
    random.shuffle(order)
    loops = []
    for number in range(count):
        pairs = by_block[order[number % len(order)]]
        i, j = pairs[int(random.integers(len(pairs)))]
        layer = int(random.integers(extent.layers))
        # Every head opens as many type A loops as any other; partners at random.
        head = number % extent.heads
        partner = int(random.choice(graph.partners[head]))
        if loop_type is LoopType.A:
            nodes = [Node(i, layer), Node(j, layer), Node(i, layer)]
        elif loop_type is LoopType.B:
            low, high = graph._residual[int(random.integers(len(graph._residual)))]
            nodes = [Node(i, low), Node(i, high), Node(j, high), Node(j, low), Node(i, low)]
        else:
            nodes = _walk(graph, Node(i, layer), edges, random)
        probe = int(random.integers(extent.probes))
        heads = iter([head, partner])
        loop = []
        for source, target in pairwise(nodes):
            kind = EdgeKind.ATTENTION if source.layer == target.layer else EdgeKind.RESIDUAL
            used = next(heads, int(random.integers(extent.heads))) if kind is EdgeKind.ATTENTION else 0
            loop.append(Edge(number, loop_type, kind, convention, source, target, used, probe))
        loops.append(tuple(loop))
    program = Program(tuple(loops), extent)
    return Sample(program, coverage(program, graph.legal()))


def _walk(graph: LoopGraph, start: Node, edges: int, random: np.random.Generator) -> list[Node]:
    """A closed walk from ``start``: out at random, alternating kinds, and back by a shortest path."""
    nodes = [start]
    kind = EdgeKind.ATTENTION
    while True:
        back = nx.shortest_path(graph.graph, nodes[-1], start)
        if len(nodes) > 1 and len(nodes) - 1 + len(back) - 1 >= edges and len(back) > 1:
            return nodes + [Node(*node) for node in back[1:]]
        choices = graph.neighbours(nodes[-1], kind) or graph.neighbours(nodes[-1], EdgeKind(1 - kind))
        nodes.append(choices[int(random.integers(len(choices)))])
        kind = EdgeKind(1 - kind)
