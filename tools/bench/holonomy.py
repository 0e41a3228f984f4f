"""Rows about holonomy: what the hardware's arithmetic makes of trained transports, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtp.config import Config
from dtp.fixed import Int
from dtp.gated import holonomy_scores, quantise_geometry
from dtp.holonomy import RATIO_FRACTION_BITS as RATIO_BITS
from dtp.holonomy import SCORE_FRACTION_BITS, LoopAccounts, LoopParams
from dtp.loops import Convention, Extent, LoopGraph, LoopType, Program, Step, sample_loops, steps
from dtp.pruner import Source
from dtp.solve import MiddleMode, TransportError
from dtp.transport import (
    QuantisedFactors,
    connection_columns,
    quantise_linear,
    quantise_solve,
    quantise_state,
    transport,
)
from dtp.workload import Workload
from tools.bench.cases import Case
from tools.bench.measured import Bench, Measured, Sheet
from tools.loops import LEAST_ENERGY, exact_transports, walk_loops

Real = NDArray[np.float64]

LEAST_CORRELATION = 0.99
ROUNDING = 2.0
"""Largest difference of a score to the mean of the rounded factors, in its last place: one of the engine, one of it."""
LOOP_ERRORS = {16: (0.01, 0.01), 8: (0.03, 0.10)}
"""Largest median and largest worst relative error, by bits of the factors."""
AGREEING = {16: 1e-4, 8: 1e-3}
"""Largest energy of a loop between two heads that agree, by bits of the factors."""
GAUGE_ERROR, GAUGE_CHANGE = 0.01, 0.10
"""With ``frame`` no energy changes by more than the first; with ``destination`` half of them by the second."""
FACTOR_BITS = (8, 16)
LOOPS = 40
"""Loops of a program: one program a layer, image and kind."""
_NO_TORCH = Measured("not measured: PyTorch is not installed", None, {}, ("pip install torch==2.13.0",))


def digit_layers(bench: Bench, case: Case) -> Iterator[tuple[str, Workload]]:
    """Every attention layer of a digit model with transports, on its first ``count`` held-out images."""
    from dtp.reference.digits import DigitModel, load_classifier, split
    from tools.workloads import digits_workload

    images = [int(image) for image in split()[1][: case.count]]
    for layer in range(load_classifier(DigitModel(case.source).path).config.layers):
        for image in images:
            bench.progress(f"{case.source} model, layer {layer}, image {image}", None)
            yield (
                f"{case.source} model, layer {layer}, image {image}",
                digits_workload([image], layer, model=case.source),
            )


def _factors(workload: Workload) -> tuple[Real, ...]:
    """A, B, L, R in float64."""
    names = ("connection_a", "connection_b", "torsion_l", "torsion_r")
    return tuple(np.asarray(getattr(workload, name), dtype=np.float64) for name in names)


def columns_of(workload: Workload, *, torsion: bool = True) -> Real:
    """V (H, L, d, k), the columns of the rank-k form."""
    a, b, left, right = _factors(workload)
    if not torsion:
        return connection_columns(a, b, cayley=True)[0]
    return connection_columns(a, b, left, right, workload.torsion_gate or 0.0, cayley=True)[0]


def cayley(columns: Real) -> Real:
    """Dense Cayley transports of columns by pairs (B, A)."""
    b, a = columns[..., 0::2], columns[..., 1::2]
    x = a @ b.swapaxes(-1, -2) - b @ a.swapaxes(-1, -2)
    unit = np.eye(x.shape[-1])
    return np.asarray(np.linalg.solve(unit - x / 2, unit + x / 2))


# ---- the field ---------------------------------------------------------------------------------------------


def pair_means(transports: Real, probes: Real, block: int) -> Real:
    """Mean energy over all pairs of tokens of each block, (H, blocks, blocks), with nothing saved.

    Parameters
    ----------
    transports: (H, L, d, d); the pair of a head is the next one, cyclic
    probes: (H, d)
    """
    found = []
    for head, probe in enumerate(probes):
        there = transports[head] @ probe
        u = np.einsum("tji,tj->ti", transports[(head + 1) % len(transports)], there)
        distance = ((u[:, None] - u[None]) ** 2).sum(-1) / float(probe @ probe)
        starts = np.arange(0, len(u), block)
        sizes = np.diff(np.append(starts, len(u)))
        total = np.add.reduceat(np.add.reduceat(distance, starts, axis=0), starts, axis=1)
        found.append(total / np.outer(sizes, sizes))
    return np.stack(found)


@dataclass
class Scores:
    """Scores of one width of the factors, and the means that they stand for."""

    made: list[Real]
    exact: list[Real]
    rounded: list[Real]
    saturated: int = 0
    errors: list[TransportError] = field(default_factory=list)

    def add(self, config: Config, workload: Workload, seed: int) -> None:
        """Both heads of a layer."""
        geometry = quantise_geometry(config, workload, Source.HOLONOMY, seed=seed)
        table, error, saturations = holonomy_scores(config, geometry)
        self.saturated += saturations
        self.errors.append(error)
        self.made.append(table / (1 << SCORE_FRACTION_BITS))
        probes = workload.probes(1, seed)[:, 0].astype(np.float64)
        self.exact.append(pair_means(exact_transports(workload), probes, config.block))
        assert geometry.probes is not None
        sent = geometry.probes.astype(np.float64)
        self.rounded.append(pair_means(rounded_transports(config, workload), sent, config.block))

    @property
    def correlation(self) -> float:
        """Over all blocks of all heads."""
        return float(np.corrcoef(np.ravel(self.made), np.ravel(self.exact))[0, 1])

    @property
    def least_correlation(self) -> float:
        """Over the blocks of one head, of the worst."""
        pairs = zip(np.concatenate(self.made), np.concatenate(self.exact), strict=True)
        return min(float(np.corrcoef(one.ravel(), other.ravel())[0, 1]) for one, other in pairs)

    def worst(self, against: list[Real]) -> float:
        """Largest difference of a score."""
        return float(np.abs(np.array(self.made) - np.array(against)).max())


def rounded_transports(config: Config, workload: Workload) -> Real:
    """P (H, L, d, d) in float64 of the factors as they are rounded."""
    columns = columns_of(workload)
    factors = quantise_solve(config, MiddleMode.CAYLEY, columns.reshape(-1, *columns.shape[-2:]))
    return cayley((factors.v * factors.v_scale).reshape(columns.shape).astype(np.float64))


def holonomy_score(bench: Bench, cases: Sequence[Case]) -> Measured:
    """Block scores of the field against the mean over all pairs in float64, on trained transports."""
    if find_spec("torch") is None:
        return _NO_TORCH
    found: dict[tuple[str, int], Scores] = {}
    for case in cases:
        for _, workload in digit_layers(bench, case):
            for bits in FACTOR_BITS:
                scores = found.setdefault((case.source, bits), Scores([], [], []))
                scores.add(case.config.changed(factor_bits=bits), workload, case.seed)
    figures: dict[str, Any] = {}
    rows = []
    unit = 1 << SCORE_FRACTION_BITS
    for (source, bits), scores in found.items():
        numbers = {
            "correlation": scores.correlation, "least_correlation_of_a_head": scores.least_correlation,
            "worst": scores.worst(scores.exact), "worst_quantised": scores.worst(scores.rounded),
            "largest": float(np.max(scores.exact)), "blocks": int(np.size(scores.made)),
            "saturated_lanes": scores.saturated, "layers": len(scores.errors),
            "layers_out_of_range": sum(bool(error) for error in scores.errors),
        }  # fmt: skip
        figures[f"{source}, int{bits}"] = numbers
        rows.append((
            f"{source} model, int{bits}", f"{numbers['blocks']:,}", f"{numbers['correlation']:.6f}",
            f"{numbers['least_correlation_of_a_head']:.6f}", f"{numbers['worst']:.6f}",
            f"{numbers['worst_quantised'] * unit:.2f}", f"{numbers['largest']:.3f}",
            f"{numbers['layers_out_of_range']} of {numbers['layers']}",
        ))  # fmt: skip
    each = (
        f"{name}: {n['correlation']:.5f} (worst head {n['least_correlation_of_a_head']:.5f}), worst difference "
        f"{n['worst']:.5f} of {n['largest']:.2f}"
        for name, n in figures.items()
    )
    head = (
        "transports", "blocks", "correlation", "of the worst head", "worst difference",
        "the same to the mean of the rounded factors, in 2^−14", "largest score", "layers with an error of the engine",
    )  # fmt: skip
    return Measured(
        "; ".join(each),
        all(
            n["least_correlation_of_a_head"] >= LEAST_CORRELATION and n["worst_quantised"] * unit <= ROUNDING
            for n in figures.values()
        ),
        figures,
        tuple(
            f"{name}: the engine says out of range in {n['layers_out_of_range']} of {n['layers']} layers of an image; "
            f"scores differ from the mean of the rounded factors by up to {n['worst_quantised'] * unit:.1f} · 2^−14"
            for name, n in figures.items()
            if n["layers_out_of_range"]
        ),
        (Sheet("Block scores against the mean over all pairs; a layer of an image a table", head, tuple(rows)),),
    )


# ---- loop programs -----------------------------------------------------------------------------------------

PROGRAMS = {
    "type A, frame": (LoopType.A, Convention.FRAME),
    "type A, destination": (LoopType.A, Convention.DESTINATION),
    "type C, frame": (LoopType.C, Convention.FRAME),
}


class Taken(NamedTuple):
    """States after a step, lanes that saturated in it, and whether the engine said that something was out of range."""

    states: Int
    saturated: int
    error: bool


Engine = Callable[[Sequence[Step], Int], Taken]
"""One step of each of several loops, all plain or all inverse."""


class Walked(NamedTuple):
    """Energy of every loop; lanes that saturated and whether the engine had an error, in any."""

    energies: Real
    saturated: int
    error: bool


def engine_of(config: Config, factors: QuantisedFactors, head_tokens: int, mode: MiddleMode) -> Engine:
    """The golden model of the transport engine; factors of the heads behind each other, ``head_tokens`` apart."""

    def step(taken: Sequence[Step], states: Int) -> Taken:
        places = [one.head * head_tokens + one.node.token for one in taken]
        job = replace(factors.job(config, mode, transposed=taken[0].inverse), tokens=len(places))
        w = None if factors.w is None else factors.w[places]
        result = transport(config, job, factors.v[places], states[:, None], w=w)
        return Taken(result.outputs[:, 0], result.saturations, bool(result.error))

    return step


def run_loops(config: Config, program: Program, probes: Int, engine: Engine) -> Walked:
    """Every loop by the integer model, all step by step together."""
    walks = [[step for edge in loop for step in steps(edge)] for loop in program.loops]
    starts = np.stack([probes[loop[0].probe] for loop in program.loops])
    states, saturated, error = starts.copy(), 0, False
    for depth in range(max(len(walk) for walk in walks)):
        for inverse in (False, True):
            active = [n for n, walk in enumerate(walks) if depth < len(walk) and walk[depth].inverse is inverse]
            if active:
                states[active], lanes, wrong = engine([walks[n][depth] for n in active], states[active])
                saturated, error = saturated + lanes, error or wrong
    accounts = LoopAccounts(LoopParams.of(config, multipliers=1, heads=program.extent.heads), floor=1)
    for header, start, end in zip(program.headers, starts, states, strict=True):
        accounts.add(header, start, end, saturated=bool(saturated))
    return Walked(np.array([record.ratio for record in accounts.records]) * 2.0**-RATIO_BITS, saturated, error)


def _extent(config: Config, workload: Workload) -> Extent:
    return Extent(tokens=workload.tokens, layers=1, heads=workload.heads, probes=workload.heads, block=config.block)


class ProgramErrors(NamedTuple):
    """Of a program: float64 energies, relative errors of those that count, whether the engine had an error."""

    energies: Real
    errors: Real
    out_of_range: bool


def holonomy_loops(bench: Bench, cases: Sequence[Case]) -> Measured:
    """Energies of sampled loops on trained transports against float64, and of loops between two heads that agree."""
    if find_spec("torch") is None:
        return _NO_TORCH
    found: dict[tuple[str, int], list[ProgramErrors]] = {}
    agreeing: dict[int, list[float]] = {bits: [] for bits in FACTOR_BITS}
    least, saturated = np.inf, 0
    for case in cases:
        for number, (_, workload) in enumerate(digit_layers(bench, case)):
            exact, columns = exact_transports(workload), columns_of(workload)
            _, tokens, width, k = columns.shape
            real = workload.probes(1, case.seed)[:, 0].astype(np.float64)
            real /= np.sqrt((real**2).sum(axis=1, keepdims=True))
            for bits in FACTOR_BITS:
                config = case.config.changed(factor_bits=bits)
                factors = quantise_solve(config, MiddleMode.CAYLEY, columns.reshape(-1, width, k))
                probes, _ = quantise_state(real, headroom_bits=factors.headroom_bits)
                engine = engine_of(config, factors, tokens, MiddleMode.CAYLEY)
                extent = _extent(config, workload)
                for name, (kind, convention) in PROGRAMS.items():
                    program = sample_loops(
                        LoopGraph(extent), kind, LOOPS, case.seed + number, convention=convention
                    ).program
                    made = run_loops(config, program, probes, engine)
                    wanted = walk_loops(program, exact, real)
                    large = wanted >= LEAST_ENERGY
                    found.setdefault((name, bits), []).append(
                        ProgramErrors(wanted, np.abs(made.energies[large] / wanted[large] - 1), made.error)
                    )
                    least, saturated = min(least, float(made.energies.min())), saturated + made.saturated
                # Both heads have the transports of the first.
                program = sample_loops(LoopGraph(extent), LoopType.A, LOOPS, case.seed + number).program
                same = engine_of(config, factors, 0, MiddleMode.CAYLEY)
                agreeing[bits].append(float(run_loops(config, program, probes, same).energies.max()))
                agreeing[bits].append(_agreeing_field(config, workload, case.seed))
    return _loop_errors(found, agreeing, least, saturated)


def _agreeing_field(config: Config, workload: Workload, seed: int) -> float:
    """Largest score of the field between the first head and itself."""
    geometry = quantise_geometry(config, workload, Source.HOLONOMY, seed=seed)
    assert geometry.factors is not None
    same = replace(geometry, factors=np.stack([geometry.factors[0]] * len(geometry.factors)))
    return int(holonomy_scores(config, same)[0].max()) / (1 << SCORE_FRACTION_BITS)


def _loop_errors(
    found: dict[tuple[str, int], list[ProgramErrors]], agreeing: dict[int, list[float]], least: float, saturated: int
) -> Measured:
    figures: dict[str, Any] = {"least": least, "saturated": saturated}
    good = least >= 0 and saturated == 0
    rows, shown, notes = [], [], [f"{saturated} lanes saturated"] if saturated else []
    for bits, (median_limit, worst_limit) in sorted(LOOP_ERRORS.items(), reverse=True):
        programs: list[ProgramErrors] = []
        for (name, width), parts in found.items():
            if width != bits:
                continue
            programs += parts
            error, energies = (np.concatenate(values) for values in list(zip(*parts, strict=True))[1::-1])
            rows.append((
                f"{name}, int{bits}", f"{error.size:,} of {energies.size:,}",
                f"{energies.min():.2g} … {energies.max():.2g}", f"{100 * np.median(error):.3f} %",
                f"{100 * np.quantile(error, 0.99):.3f} %", f"{100 * error.max():.3f} %",
            ))  # fmt: skip
        error, same = np.concatenate([program.errors for program in programs]), max(agreeing[bits])
        median, worst = float(np.median(error)), float(error.max())
        good = good and median <= median_limit and worst <= worst_limit and same <= AGREEING[bits]
        figures[f"int{bits}"] = {"loops": error.size, "median": median, "worst": worst, "agreeing_heads": same}
        shown.append(
            f"int{bits} median {100 * median:.3f} %, worst {100 * worst:.3f} % of {error.size:,} loops, agreeing heads "
            f"{same:.1e}"
        )
        inside = [program.errors for program in programs if not program.out_of_range]
        if inside and len(inside) < len(programs):
            rest = float(np.concatenate(inside).max())
            figures[f"int{bits}"] |= {"worst_in_range": rest, "programs_out_of_range": len(programs) - len(inside)}
            outside = f"{len(programs) - len(inside)} of {len(programs)} programs"
            notes.append(
                f"int{bits}: the engine says out of range in {outside}; worst error of the others {100 * rest:.3f} %"
            )
    head = ("loops", f"energies ≥ {LEAST_ENERGY:g}", "energies", "median error", "99 of 100 below", "worst error")
    return Measured(
        f"{'; '.join(shown)}; smallest energy {least:.1e}",
        good,
        figures,
        tuple(notes),
        (Sheet("Relative errors of loop energies against float64", head, tuple(rows)),),
    )


# ---- gauge -------------------------------------------------------------------------------------------------


def composed(first: tuple[Real, Real], then: tuple[Real, Real]) -> tuple[Real, Real]:
    """W and V of (I + W′V′ᵀ)(I + W Vᵀ) for W, V (…, d, k)."""
    (w, v), (w_then, v_then) = first, then
    joined = v_then + v @ (w.swapaxes(-1, -2) @ v_then)
    return np.concatenate([w_then, w], -1), np.concatenate([joined, v], -1)


def cayley_form(columns: Real) -> tuple[Real, Real]:
    """W and V of the Cayley transport of columns by pairs (B, A)."""
    form = np.kron(np.eye(columns.shape[-1] // 2), [[0.0, -1.0], [1.0, 0.0]])
    gram = columns.swapaxes(-1, -2) @ columns / 2 + form
    return -columns @ np.linalg.inv(gram), columns


def gauge(bench: Bench, cases: Sequence[Case]) -> Measured:
    """Energies before and after P_t → Q_t P_t in both heads and x → Q_i x, loop programs with 16-bit factors."""
    if find_spec("torch") is None:
        return _NO_TORCH
    changes: dict[Convention, list[Real]] = {convention: [] for convention in Convention}
    exact: dict[Convention, list[Real]] = {convention: [] for convention in Convention}
    for case in cases:
        config = case.config.changed(factor_bits=16)
        for number, (_, workload) in enumerate(digit_layers(bench, case)):
            columns = columns_of(workload, torsion=False)
            heads, tokens, width, _ = columns.shape
            random = np.random.default_rng(case.seed + number)
            turns = random.standard_normal((tokens, width, 2)) * 1.2 / np.sqrt(width)
            plain = cayley_form(columns)
            turned = composed(plain, tuple(np.stack([part] * heads) for part in cayley_form(turns)))  # type: ignore[arg-type]
            engines = [_linear_engine(config, form) for form in (plain, turned)]
            transports = cayley(columns), cayley(turns) @ cayley(columns)
            real = workload.probes(1, case.seed)[:, 0].astype(np.float64)
            real /= np.sqrt((real**2).sum(axis=1, keepdims=True))
            extent = _extent(config, workload)
            for convention in Convention:
                program = sample_loops(
                    LoopGraph(extent), LoopType.A, LOOPS, case.seed + number, convention=convention
                ).program
                # A probe of its own for each loop: it is turned at the loop's first token.
                own = replace_probes(program)
                starts = np.stack([real[loop[0].probe] for loop in program.loops])
                moved = np.stack([
                    cayley(turns[loop[0].source.token]) @ start
                    for loop, start in zip(program.loops, starts, strict=True)
                ])  # fmt: skip
                pair = [
                    run_loops(config, own, quantise_state(x)[0], engine).energies
                    for x, engine in zip((starts, moved), engines, strict=True)
                ]
                float_pair = [walk_loops(own, p, x) for p, x in zip(transports, (starts, moved), strict=True)]
                large = float_pair[0] >= LEAST_ENERGY
                changes[convention].append(np.abs(pair[1][large] / pair[0][large] - 1))
                exact[convention].append(np.abs(float_pair[1][large] / float_pair[0][large] - 1))
    frame, destination = (np.concatenate(changes[c]) for c in (Convention.FRAME, Convention.DESTINATION))
    float_frame, float_destination = (np.concatenate(exact[c]) for c in (Convention.FRAME, Convention.DESTINATION))
    return Measured(
        f"frame: energies change by {100 * float(frame.max()):.3f} % at most (median "
        f"{100 * float(np.median(frame)):.4f} %) over {frame.size:,} loops; destination: by "
        f"{100 * float(np.median(destination)):.0f} % in the median, {100 * float(destination.max()):.0f} % at most",
        bool(frame.max() <= GAUGE_ERROR and np.median(destination) >= GAUGE_CHANGE),
        {
            "frame_worst": float(frame.max()), "frame_median": float(np.median(frame)), "loops": frame.size,
            "destination_median": float(np.median(destination)), "destination_worst": float(destination.max()),
            "float64_frame_worst": float(float_frame.max()),
            "float64_destination_median": float(np.median(float_destination)),
        },
        (
            f"float64: frame {float(float_frame.max()):.1e} at most, destination "
            f"{100 * float(np.median(float_destination)):.0f} % in the median",
        ),
    )  # fmt: skip


def replace_probes(program: Program) -> Program:
    """The same loops, each with a start vector of its own."""
    loops = tuple(tuple(replace(edge, probe=number) for edge in loop) for number, loop in enumerate(program.loops))
    return Program(loops, replace(program.extent, probes=len(loops)))


def _linear_engine(config: Config, form: tuple[Real, Real]) -> Engine:
    """The engine on W and V (H, L, d, k), y = x + W Vᵀ x, all with the same scales."""
    w, v = (part.reshape(-1, *part.shape[-2:]) for part in form)
    factors = quantise_linear(config, MiddleMode.SCALE, v, [1.0] * (v.shape[-1] // 2), w=w)
    return engine_of(config, factors, form[0].shape[1], MiddleMode.SCALE)
