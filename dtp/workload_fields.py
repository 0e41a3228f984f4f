"""Names, shapes and options of a workload; :mod:`dtp.workload` says what each means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dtp.errors import DtpError, must

FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int32]
ScoreArray = NDArray[np.uint16]

Word = TypeVar("Word", bound=StrEnum)

ORTHONORMAL_TOLERANCE = 1e-4
"""Largest |FᵀF − I| entry of a frame that still counts as orthonormal."""

FILE_VERSION = "1"

NORM_EPSILON = 1e-5
"""ε of a LayerNorm whose workload does not say."""


class Mode(StrEnum):
    """How a score is made from a query and a key; formulas in the text of :mod:`dtp.workload`."""

    DOT = "dot"
    EUCLIDEAN = "euclidean"
    RIEMANNIAN = "riemannian"
    BLENDED = "blended"

    @property
    def is_metric(self) -> bool:
        """Whether the mode reads a frame and metric factors."""
        return self in (Mode.RIEMANNIAN, Mode.BLENDED)


class TransportKind(StrEnum):
    """How a token's generator X becomes its transport: I + X, or the Cayley transform of X, which is orthogonal."""

    LINEAR = "linear"
    CAYLEY = "cayley"


class Activation(StrEnum):
    """What lies between the two matrices of a residual update; ``gelu`` is x·Φ(x)."""

    RELU = "relu"
    GELU = "gelu"


class LoopField(StrEnum):
    """Columns of ``loops``, one row an edge, in this order."""

    LOOP = "loop"
    TYPE = "type"
    KIND = "kind"
    CONVENTION = "convention"
    SOURCE_TOKEN = "source_token"
    SOURCE_LAYER = "source_layer"
    TARGET_TOKEN = "target_token"
    TARGET_LAYER = "target_layer"
    HEAD = "head"
    PROBE = "probe"


@dataclass(frozen=True)
class TensorRule:
    """Dimensions of a tensor by their names, its type, and the group that it belongs to."""

    dimensions: tuple[str, ...]
    group: str
    kind: Any = np.float32

    @property
    def text(self) -> str:
        """The shape in words."""
        return f"({', '.join(self.dimensions)})"


_SQUARE = ("heads", "block rows", "block columns")
_FACTOR = ("heads", "tokens", "width", "transport rank")
_NORM = ("2", "model width")

TENSOR_RULES: dict[str, TensorRule] = {
    "q": TensorRule(("heads", "tokens", "width"), "attention"),
    "k": TensorRule(("key heads", "tokens", "width"), "attention"),
    "v": TensorRule(("key heads", "tokens", "width"), "attention"),
    "frame": TensorRule(("heads", "width", "frame rank"), "metric"),
    "metric_factor": TensorRule(("heads", "tokens", "frame rank", "metric rank"), "metric"),
    "curvature": TensorRule(("heads", "tokens"), "metric"),
    "block_mask": TensorRule(_SQUARE, "attention", np.bool_),
    "connection_a": TensorRule(_FACTOR, "connection"),
    "connection_b": TensorRule(_FACTOR, "connection"),
    "torsion_l": TensorRule(_FACTOR, "torsion"),
    "torsion_r": TensorRule(_FACTOR, "torsion"),
    "probe": TensorRule(("heads", "probes", "width"), "probe"),
    "loops": TensorRule(("edges", str(len(LoopField))), "loops", np.int32),
    "scores": TensorRule(_SQUARE, "scores", np.uint16),
    "hidden": TensorRule(("tokens", "model width"), "commutator"),
    "w_q": TensorRule(("heads × width", "model width"), "commutator"),
    "w_k": TensorRule(("key heads × width", "model width"), "commutator"),
    "w_v": TensorRule(("key heads × width", "model width"), "commutator"),
    "w_o": TensorRule(("model width", "heads × width"), "commutator"),
    "mlp_in": TensorRule(("MLP width", "model width"), "commutator"),
    "mlp_out": TensorRule(("model width", "MLP width"), "commutator"),
    "b_q": TensorRule(("heads × width",), "bias"),
    "b_k": TensorRule(("key heads × width",), "bias"),
    "b_v": TensorRule(("key heads × width",), "bias"),
    "b_o": TensorRule(("model width",), "bias"),
    "b_mlp_in": TensorRule(("MLP width",), "bias"),
    "b_mlp_out": TensorRule(("model width",), "bias"),
    "ln_attn": TensorRule(_NORM, "norm"),
    "ln_mlp": TensorRule(_NORM, "norm"),
}
"""Every tensor, in the order of the file's table."""

METRIC_TENSORS = ("frame", "metric_factor", "curvature")
SCALES = ("q_scale", "k_scale", "v_scale", "factor_scale")
KEYS = (
    "mode", "causal", "temperature", "blend", "valid_length", "block", "allow_empty_rows", *SCALES,
    "transport", "torsion_gate", "activation", "norm_epsilon", "source", "version", "format",
)  # fmt: skip
FILE_TYPES = {np.bool_: "BOOL", np.int32: "I32", np.uint16: "U16", np.float32: "F32"}
"""Types of safetensors by those of NumPy."""


def group(*names: str) -> tuple[str, ...]:
    """Tensors of some groups, in the order of the table."""
    return tuple(name for name, rule in TENSOR_RULES.items() if rule.group in names)


def workload_must(field: str, rule: str, value: object) -> DtpError:
    """A refused field of a workload."""
    return must("Workload", field, rule, value)


def parse_mode(text: str) -> Mode:
    """The mode of a word; an unknown one is refused with the list of valid ones."""
    return parse_word(Mode, "mode", text)


def parse_word(words: type[Word], field: str, text: str) -> Word:
    """The member of an enumeration that a word names; an unknown one is refused with the list of valid ones."""
    try:
        return words(text)
    except ValueError:
        raise workload_must(field, f"one of {', '.join(words)}", text) from None
