"""Array cycles of the commutator kernel, pass by pass, against the multiplications that SPEC §5 names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtp.commutator import CommutatorMode
from dtp.config import Config
from dtp.errors import must
from dtp.kernel import MAX_WAIT
from dtp.matrix import Activation, MatrixJob
from sim.cycles.matrix import MatrixTiming, matrix_timing

__all__ = [
    "LayerShape",
    "Pass",
    "array_cycles",
    "extra_multiplications",
    "extra_passes",
    "plain_passes",
    "stored_timing",
]


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a residual layer.

    Parameters
    ----------
    tokens, model, heads, width, mlp: L, M, H, d, F
    lifted: scores with a metric bias
    """

    tokens: int
    model: int
    heads: int
    width: int
    mlp: int
    lifted: bool = False

    def check(self, config: Config) -> None:
        """Whether ``config`` can hold the layer; raises DtpError with the limit that it breaks."""
        for name, value, limit_name in (
            ("tokens", self.tokens, "max_tokens"), ("model", self.model, "max_model"),
            ("heads * width", self.heads * self.width, "max_mlp"), ("width", self.width, "max_width"),
            ("mlp", self.mlp, "max_mlp"),
        ):  # fmt: skip
            limit = getattr(config, limit_name)
            if not 1 <= value <= limit:
                raise must("LayerShape", name, f"in 1…{limit_name} {limit}", value)


@dataclass(frozen=True)
class Pass:
    """One pass of the kernel over all tokens: its name, its array steps, its multiplications."""

    name: str
    steps: int
    multiplications: int


def plain_passes(config: Config, shape: LayerShape) -> tuple[Pass, ...]:
    """The layer's own work: projections, attention and its output, Res once."""
    shape.check(config)
    inner = shape.heads * shape.width
    return (
        *(_matrix(config, shape, f"{name} of h", shape.model, inner) for name in ("queries", "keys", "values")),
        _scores(config, shape, "scores of h"),
        _values(config, shape, "P·V of h"),
        _matrix(config, shape, "output of h", inner, shape.model),
        *_residual(config, shape, "Res(h)"),
    )


def extra_passes(config: Config, shape: LayerShape, mode: CommutatorMode) -> tuple[Pass, ...]:
    """What Δ adds: one application of Attn (of its value path when the weights are kept) and two of Res."""
    shape.check(config)
    inner = shape.heads * shape.width
    passes = [*_residual(config, shape, "Res(h)")]
    if mode is CommutatorMode.FULL:
        passes += [_matrix(config, shape, f"{name} of h + Res(h)", shape.model, inner) for name in ("queries", "keys")]
        passes.append(_scores(config, shape, "scores of h + Res(h)"))
    return (
        *passes,
        _matrix(config, shape, "values of h + Res(h)", shape.model, inner),
        _values(config, shape, "P·V of h + Res(h)"),
        _matrix(config, shape, "output of h + Res(h)", inner, shape.model),
        *_residual(config, shape, "Res(Attn(h))"),
    )


def array_cycles(passes: tuple[Pass, ...]) -> int:
    """Array steps of passes."""
    return sum(item.steps for item in passes)


def stored_timing(config: Config, jobs: Sequence[MatrixJob]) -> MatrixTiming:
    """Cycles of matrices on one loaded state whose outputs all leave; :class:`sim.cycles.matrix.MatrixTiming`.

    Cycle 0 is the one behind the last word of the LOAD. Steps, weights and sinks never wait; each step lets all the
    matrices before it be unfinished. A matrix is taken as a job as soon as the mode takes it, its state is read one
    word a cycle from the next cycle on and is there two cycles later; the next step begins three cycles behind the
    read of its last word.

    Parameters
    ----------
    jobs: at most ``MAX_WAIT`` + 1, as no more are under way

    Raises
    ------
    DtpError
        for too many jobs
    """
    if not 1 <= len(jobs) <= MAX_WAIT + 1:
        raise must("stored_timing", "jobs", f"1 to {MAX_WAIT + 1}", len(jobs))
    offers: list[int] = []
    words: list[range] = []
    following = 0
    for count, job in enumerate(jobs, start=1):
        offers.append(following)
        reads = job.chunks(config) * config.pass_steps
        words.append(range(reads))  # when they come does not matter for when the job is taken
        taken = int(matrix_timing(config, jobs[:count], offered_jobs=offers, offered_activations=words).jobs[-1])
        words[-1] = range(taken + 3, taken + 3 + reads)
        following = taken + reads + 3
    return matrix_timing(config, jobs, offered_jobs=offers, offered_activations=words)


def extra_multiplications(shape: LayerShape, mode: CommutatorMode, frame_rank: int = 0) -> int:
    """The multiplications that SPEC §5 names, of the sizes as they are."""
    tokens, model, inner = shape.tokens, shape.model, shape.heads * shape.width
    total = 2 * 2 * tokens * model * shape.mlp + 2 * tokens * model * inner + tokens * tokens * inner
    if mode is CommutatorMode.FULL:
        lanes = frame_rank + frame_rank * (frame_rank + 1) if shape.lifted else 0
        total += 2 * tokens * model * inner + tokens * tokens * (inner + shape.heads * lanes)
    return total


def _matrix(config: Config, shape: LayerShape, name: str, width: int, columns: int) -> Pass:
    job = MatrixJob(
        width=width, columns=columns, feed_gain=0, shift=0, scale=1, out_shift=0, activation=Activation.NONE,
        wide=True, bias=False,
    )  # fmt: skip
    return Pass(name, config.groups(shape.tokens) * job.steps(config), shape.tokens * width * columns)


def _residual(config: Config, shape: LayerShape, name: str) -> tuple[Pass, Pass]:
    return (
        _matrix(config, shape, f"{name}, in", shape.model, shape.mlp),
        _matrix(config, shape, f"{name}, out", shape.mlp, shape.model),
    )


def _items(config: Config, shape: LayerShape) -> int:
    return shape.heads * config.groups(shape.tokens) * config.blocks(shape.tokens)


def _scores(config: Config, shape: LayerShape, name: str) -> Pass:
    chunks = config.chunks(shape.width) + (config.lifted_passes if shape.lifted else 0)
    pairs = shape.heads * shape.tokens * shape.tokens
    lanes = shape.width + (config.lifted_lanes if shape.lifted else 0)
    return Pass(name, _items(config, shape) * chunks * config.pass_steps, pairs * lanes)


def _values(config: Config, shape: LayerShape, name: str) -> Pass:
    steps = config.chunks(shape.width) * config.pass_steps
    return Pass(name, _items(config, shape) * steps, shape.heads * shape.tokens * shape.tokens * shape.width)
