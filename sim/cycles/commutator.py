"""Array cycles of the commutator kernel, pass by pass, against the multiplications that SPEC §5 names."""

from __future__ import annotations

from dataclasses import dataclass

from dtp.commutator import CommutatorMode
from dtp.config import Config
from dtp.errors import must
from dtp.matrix import Activation, MatrixJob

__all__ = ["LayerShape", "Pass", "array_cycles", "extra_multiplications", "extra_passes", "plain_passes"]


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
