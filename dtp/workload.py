"""One attention job: the tensors of H heads with the options and scales that belong to them, and its file.

A workload file is a `safetensors <https://github.com/huggingface/safetensors>`_ file. Any program that can
write one can feed the processor. Tensor names, shapes and types (H query heads, H_kv key/value heads with H a
multiple of H_kv, L tokens, head width d, frame rank R, metric rank r, block b):

================  ===========================  =======  ======================================================
tensor            shape                        type     meaning
================  ===========================  =======  ======================================================
``q``             (H, L, d)                    float32  queries
``k``             (H_kv, L, d)                 float32  keys; query head h reads key head h // (H / H_kv)
``v``             (H_kv, L, d)                 float32  values
``frame``         (H, d, R)                    float32  F, orthonormal columns; metric modes only
``metric_factor`` (H, L, R, r)                 float32  C_t; token t has the metric I + U_t U_tᵀ, U_t = F C_t
``curvature``     (H, L)                       float32  Ω_t, optional (absent = 0); metric modes only
``block_mask``    (H, ceil(L/b), ceil(L/b))    bool     true = computed, optional (absent = every block)
================  ===========================  =======  ======================================================

File metadata are strings:

====================  ==========  ==========================================================================
key                   needed      value
====================  ==========  ==========================================================================
``mode``              always      ``dot``, ``euclidean``, ``riemannian`` or ``blended``
``causal``            always      ``true`` or ``false``: whether query i sees only keys j <= i
``temperature``       not in dot  τ > 0, a decimal number
``blend``             in blended  μ in [0, 1]: 0 is the dot product, 1 the Riemannian score
``valid_length``      optional    tokens before the padding, 1..L (absent = L)
``block``             with mask   b, tokens along one side of a block
``allow_empty_rows``  optional    ``true`` permits a mask that leaves rows without any key (they give zeros)
``q_scale``           optional    real value of one step of the integer q: one number, or H with commas
``k_scale``           optional    the same for k: one number or H_kv
``v_scale``           optional    the same for v: one number or H_kv
``factor_scale``      optional    the same for metric_factor: one number or H; metric modes only
``source``            optional    where the tensors come from, in words
``version``           optional    ``1``
``format``            optional    ignored; general-purpose writers of safetensors add it
====================  ==========  ==========================================================================

Scores of query i and key j, with Δ = q_i − k_j:

- ``dot``: q_i·k_j / √d
- ``euclidean``: −‖Δ‖² / τ
- ``riemannian``: −( ‖Δ‖² + ½‖U_iᵀΔ‖² + ½‖U_jᵀΔ‖² + Ω_i + Ω_j ) / τ  [RA (6), (15), (23)]
- ``blended``: (1 − μ) · dot + μ · riemannian  [RA (27)]

Tensors are given as the model has them, unrotated: the frame is aligned with the first R coordinates later.
Keys and queries at or past ``valid_length`` take no part; their numbers must be finite all the same. An
unknown tensor or metadata name is an error.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as safetensors_bytes

from dtp.errors import DtpError, must

FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

ORTHONORMAL_TOLERANCE = 1e-4
"""Largest |FᵀF − I| entry of a frame that still counts as orthonormal."""

FILE_VERSION = "1"


class Mode(StrEnum):
    """How a score is made from a query and a key; formulas in the module's text."""

    DOT = "dot"
    EUCLIDEAN = "euclidean"
    RIEMANNIAN = "riemannian"
    BLENDED = "blended"

    @property
    def is_metric(self) -> bool:
        """Whether the mode reads a frame and metric factors."""
        return self in (Mode.RIEMANNIAN, Mode.BLENDED)


class TransportKind(StrEnum):
    """How a token's connection becomes its transport: I + X, or the Cayley transform of X, which is orthogonal."""

    LINEAR = "linear"
    CAYLEY = "cayley"


class Activation(StrEnum):
    """Between the two matrices of a residual update; ``gelu`` is the exact one, x·Φ(x)."""

    RELU = "relu"
    GELU = "gelu"


_TENSORS = ("q", "k", "v", "frame", "metric_factor", "curvature", "block_mask")
_METRIC_TENSORS = ("frame", "metric_factor", "curvature")
_SCALES = ("q_scale", "k_scale", "v_scale", "factor_scale")
_KEYS = (
    "mode", "causal", "temperature", "blend", "valid_length", "block", "allow_empty_rows", *_SCALES,
    "source", "version", "format",
)  # fmt: skip
_FILE_TYPES = {"block_mask": "BOOL"}  # every other tensor is F32
_RANK_NAMES = {
    "q": "(heads, tokens, width)",
    "k": "(key heads, tokens, width)",
    "v": "(key heads, tokens, width)",
    "frame": "(heads, width, frame rank)",
    "metric_factor": "(heads, tokens, frame rank, metric rank)",
    "curvature": "(heads, tokens)",
    "block_mask": "(heads, block rows, block columns)",
}


def _must(field: str, rule: str, value: object) -> DtpError:
    return must("Workload", field, rule, value)


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """Tensors, options and scales of one attention job, checked; arrays are read-only.

    Parameters
    ----------
    q : float32 (H, L, d)
    k, v : float32 (H_kv, L, d)
        H is a multiple of H_kv (grouped queries).
    mode : Mode
    causal : bool
    frame : float32 (H, d, R), columns orthonormal within ``ORTHONORMAL_TOLERANCE``; exactly in metric modes
    metric_factor : float32 (H, L, R, r); exactly in metric modes
    curvature : float32 (H, L) or None (= 0); metric modes only
    block_mask : bool (H, ceil(L/block), ceil(L/block)) or None (= every block)
    temperature : float > 0 in every mode but dot, where it is None
    blend : float in [0, 1] in blended mode, else None
    valid_length : int in 1..L, or None, which becomes L
    block : int >= 1, needed with ``block_mask``
    source : str, where the tensors come from
    q_scale, k_scale, v_scale, factor_scale : tuples of positive floats, one entry or one per head, or None
        (chosen by the quantiser). k_scale and v_scale count key heads.
    allow_empty_rows : bool
        Permit a ``block_mask`` that leaves rows without a key.

    Raises
    ------
    DtpError
        One line naming the field, the rule and the value.
    """

    q: FloatArray
    k: FloatArray
    v: FloatArray
    mode: Mode
    causal: bool
    frame: FloatArray | None = None
    metric_factor: FloatArray | None = None
    curvature: FloatArray | None = None
    block_mask: BoolArray | None = None
    temperature: float | None = None
    blend: float | None = None
    valid_length: int = cast(int, None)
    block: int | None = None
    source: str = ""
    q_scale: tuple[float, ...] | None = None
    k_scale: tuple[float, ...] | None = None
    v_scale: tuple[float, ...] | None = None
    factor_scale: tuple[float, ...] | None = None
    allow_empty_rows: bool = False

    # ------------------------------------------------------------------ sizes

    @property
    def heads(self) -> int:
        """H, query heads."""
        return int(self.q.shape[0])

    @property
    def kv_heads(self) -> int:
        """H_kv, key and value heads."""
        return int(self.k.shape[0])

    @property
    def groups(self) -> int:
        """Query heads that share one key head, H / H_kv."""
        return self.heads // self.kv_heads

    @property
    def tokens(self) -> int:
        """L, tokens with the padding."""
        return int(self.q.shape[1])

    @property
    def width(self) -> int:
        """d, head width."""
        return int(self.q.shape[2])

    @property
    def frame_rank(self) -> int:
        """R, columns of the frame; 0 without one."""
        return 0 if self.frame is None else int(self.frame.shape[2])

    @property
    def metric_rank(self) -> int:
        """r, columns of a metric factor; 0 without one."""
        return 0 if self.metric_factor is None else int(self.metric_factor.shape[3])

    @property
    def score_lanes(self) -> int:
        """Products of one score: d, or d + R + R(R+1) with the metric lifted into the inner product."""
        rank = self.frame_rank
        return self.width + rank + rank * (rank + 1) if self.mode.is_metric else self.width

    @property
    def nu(self) -> float:
        """ν = μ/τ, the weight of the squared distance in a score (0 in dot mode)."""
        return self._geodesic_share / self.temperature if self.temperature is not None else 0.0

    @property
    def kappa(self) -> float:
        """κ = (1−μ)/√d + 2μ/τ, the weight of q·k in a score once the squares are expanded."""
        return (1.0 - self._geodesic_share) / math.sqrt(self.width) + 2.0 * self.nu

    @property
    def _geodesic_share(self) -> float:
        if self.mode is Mode.BLENDED:
            return cast(float, self.blend)
        return 0.0 if self.mode is Mode.DOT else 1.0

    def scale_per_head(self, name: str) -> NDArray[np.float64] | None:
        """The scale ``q``, ``k``, ``v`` or ``factor`` as one number a head (key heads for k, v), or None."""
        value: tuple[float, ...] | None = getattr(self, f"{name}_scale")
        if value is None:
            return None
        heads = self._scale_heads(f"{name}_scale")
        return np.broadcast_to(np.array(value, dtype=np.float64), (heads,)).copy()

    def _scale_heads(self, field: str) -> int:
        return self.kv_heads if field in ("k_scale", "v_scale") else self.heads

    # ------------------------------------------------------- what is computed

    def block_count(self, block: int | None = None) -> int:
        """ceil(L / block), blocks along one side; ``block`` defaults to the workload's own."""
        return -(-self.tokens // self._block(block))

    def blocks_legal(self, block: int | None = None) -> BoolArray:
        """Blocks with at least one (query, key) pair inside causality and padding, (nb, nb) rows by keys."""
        return self.block_pairs(block) > 0

    def block_pairs(self, block: int | None = None) -> NDArray[np.int64]:
        """(Query, key) pairs inside causality and padding in each block, (nb, nb)."""
        size = self._block(block)
        first = np.arange(self.block_count(size), dtype=np.int64) * size
        inside = np.clip(self.valid_length - first, 0, size)
        pairs = np.outer(inside, inside)
        if self.causal:
            pairs = np.tril(pairs, -1) + np.diag(inside * (inside + 1) // 2)
        return pairs

    def blocks_kept(self) -> BoolArray:
        """Legal blocks that the mask keeps, (H, nb, nb); needs ``block``."""
        legal = self.blocks_legal()
        if self.block_mask is None:
            return np.broadcast_to(legal, (self.heads, *legal.shape)).copy()
        return self.block_mask & legal

    @property
    def kept_fraction(self) -> float:
        """Kept ÷ legal blocks over all heads; 1 without a mask."""
        if self.block_mask is None:
            return 1.0
        return float(self.blocks_kept().sum() / (self.heads * self.blocks_legal().sum()))

    def pairs_kept(self) -> NDArray[np.int64]:
        """(Query, key) pairs that each head computes, (H,): inside causality, padding and mask."""
        if self.block_mask is None:
            n = self.valid_length
            return np.full(self.heads, n * (n + 1) // 2 if self.causal else n * n, dtype=np.int64)
        return np.asarray((self.block_pairs() * self.block_mask).sum(axis=(1, 2)), dtype=np.int64)

    def keep_mask(self, head: int) -> BoolArray:
        """Pairs that a head computes, (L, L) queries by keys."""
        position = np.arange(self.tokens)
        valid = position < self.valid_length
        keep: BoolArray = valid[:, None] & valid[None, :]
        if self.causal:
            keep &= position[None, :] <= position[:, None]
        if self.block_mask is not None:
            index = position // self._block(None)
            keep &= self.block_mask[head][index[:, None], index[None, :]]
        return keep

    def useful_macs(self) -> int:
        """Multiplications that the result needs: kept pairs × (score lanes + d); padding is not counted."""
        return int(self.pairs_kept().sum()) * (self.score_lanes + self.width)

    def _block(self, block: int | None) -> int:
        size = self.block if block is None else block
        if size is None or size < 1:
            raise _must("block", "an integer of at least 1 to count blocks", size)
        return size

    # ------------------------------------------------------------------ files

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Workload:
        """Read a workload file; every fault is one ``DtpError`` line that begins with the path."""
        place = Path(path)
        try:
            tensors, metadata = _read(place)
            return cls._from_file(tensors, metadata)
        except DtpError as error:
            raise DtpError(f"{place}: {error}") from None

    @classmethod
    def _from_file(cls, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> Workload:
        for name in ("q", "k", "v"):
            if name not in tensors:
                raise _must(name, "present in the file", f"only {', '.join(sorted(tensors)) or 'no tensor'}")
        for key in metadata:
            if key not in _KEYS:
                raise _must("metadata key", f"one of {', '.join(_KEYS)}", key)
        for key in ("mode", "causal"):
            if key not in metadata:
                raise _must(f"metadata {key}", "present in the file", None)
        version = metadata.get("version", FILE_VERSION)
        if version != FILE_VERSION:
            raise _must("version", f"{FILE_VERSION}", version)
        options: dict[str, Any] = {
            "mode": parse_mode(metadata["mode"]),
            "causal": _flag("causal", metadata["causal"]),
            "allow_empty_rows": _flag("allow_empty_rows", metadata.get("allow_empty_rows", "false")),
            "source": metadata.get("source", ""),
        }
        for key in ("temperature", "blend"):
            if key in metadata:
                options[key] = _number(key, metadata[key])
        for key in ("valid_length", "block"):
            if key in metadata:
                options[key] = _integer(key, metadata[key])
        for key in _SCALES:
            if key in metadata:
                options[key] = tuple(_number(key, part) for part in metadata[key].split(","))
        return cls(**options, **cast(dict[str, Any], dict(tensors)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the workload file in one step: either the whole file is there afterwards or the old state is.

        Raises
        ------
        DtpError
            When the folder does not exist or cannot be written.
        """
        tensors = {name: getattr(self, name) for name in _TENSORS if getattr(self, name) is not None}
        data = with_sorted_header(safetensors_bytes(tensors, self.metadata()))
        place = Path(path)
        partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
        try:
            with open(partial, "wb") as stream:
                stream.write(data)
            os.replace(partial, place)
        except OSError as error:
            raise DtpError(f"{place}: the workload cannot be written ({error.strerror})") from None
        finally:
            partial.unlink(missing_ok=True)

    def metadata(self) -> dict[str, str]:
        """The file's metadata: every option as a string, absent ones left out."""
        text = {
            "version": FILE_VERSION,
            "mode": self.mode.value,
            "causal": "true" if self.causal else "false",
            "valid_length": str(self.valid_length),
        }
        for key in ("temperature", "blend", "block"):
            value = getattr(self, key)
            if value is not None:
                text[key] = repr(value)
        for key in _SCALES:
            scales = getattr(self, key)
            if scales is not None:
                text[key] = ",".join(repr(scale) for scale in scales)
        if self.allow_empty_rows:
            text["allow_empty_rows"] = "true"
        if self.source:
            text["source"] = self.source
        return text

    @classmethod
    def from_tensors(cls, *, mode: Mode | str, **fields: Any) -> Workload:
        """A workload from arrays of any library, by the names of the fields.

        Arrays, nested lists and tensors with ``detach().cpu().numpy()`` are taken; numbers become float32, a
        mask stays bool. ``mode`` may be a word; scales may be one float or a sequence.

        Raises
        ------
        DtpError
            As the constructor; also for an unknown field.
        """
        ready: dict[str, Any] = {"mode": parse_mode(mode)}
        for name, value in fields.items():
            if name not in cls.__dataclass_fields__:
                raise _must("field", f"one of {', '.join(cls.__dataclass_fields__)}", name)
            if name in _TENSORS and value is not None:
                value = _as_array(name, value)
            elif name in _SCALES and value is not None:
                value = tuple(float(part) for part in np.atleast_1d(_as_array(name, value, np.float64)))
            ready[name] = value
        for name in ("q", "k", "v", "causal"):
            if ready.get(name) is None:
                raise _must(name, "given", None)
        return cls(**ready)

    # ----------------------------------------------------------------- checks

    def __post_init__(self) -> None:
        if not isinstance(self.mode, Mode):
            raise _must("mode", f"a Mode ({', '.join(Mode)})", self.mode)
        if not isinstance(self.causal, bool | np.bool_):
            raise _must("causal", "true or false", self.causal)
        if not isinstance(self.allow_empty_rows, bool | np.bool_):
            raise _must("allow_empty_rows", "true or false", self.allow_empty_rows)
        if not isinstance(self.source, str):
            raise _must("source", "text", self.source)
        for name in _TENSORS:
            self._check_presence(name)
            if getattr(self, name) is not None:
                self._check_array(name)
        self._check_options()
        self._check_shapes()
        for name in _TENSORS:
            if getattr(self, name) is not None:
                self._check_values(name)
        self._check_frame()
        for name in _SCALES:
            self._check_scale(name)
        self._check_rows()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_presence(self, name: str) -> None:
        given = getattr(self, name) is not None
        if name in _METRIC_TENSORS and given and not self.mode.is_metric:
            raise _must(name, f"absent in {self.mode} mode", "a tensor")
        needed = name in ("q", "k", "v") or (name in ("frame", "metric_factor") and self.mode.is_metric)
        if needed and not given:
            raise _must(name, f"given in {self.mode} mode", None)

    def _check_array(self, name: str) -> None:
        array = getattr(self, name)
        if not isinstance(array, np.ndarray):
            raise _must(name, "a NumPy array (Workload.from_tensors converts others)", type(array).__name__)
        wanted = np.bool_ if name == "block_mask" else np.float32
        if array.dtype != wanted:
            raise _must(name, f"of type {np.dtype(wanted)}", str(array.dtype))
        dimensions = _RANK_NAMES[name].count(",") + 1
        if array.ndim != dimensions:
            raise _must(name, f"of shape {_RANK_NAMES[name]}", array.shape)
        if 0 in array.shape:
            raise _must(name, f"non-empty, of shape {_RANK_NAMES[name]}", array.shape)
        if array.flags.writeable or not array.flags.c_contiguous:
            array = np.array(array, order="C")
            array.setflags(write=False)
            self._set(name, array)

    def _check_options(self) -> None:
        for name in ("temperature", "blend"):
            value = getattr(self, name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
                    raise _must(name, "a number", value)
                self._set(name, float(value))
        if self.mode is Mode.DOT:
            if self.temperature is not None:
                raise _must("temperature", "absent in dot mode, whose score is q.k/sqrt(d)", self.temperature)
        elif self.temperature is None or not (0 < self.temperature < math.inf):
            raise _must("temperature", f"a finite number above 0 in {self.mode} mode", self.temperature)
        if self.mode is Mode.BLENDED:
            if self.blend is None or not (0 <= self.blend <= 1):
                raise _must("blend", "a number in [0, 1] in blended mode", self.blend)
        elif self.blend is not None:
            raise _must("blend", f"absent in {self.mode} mode", self.blend)
        length = self.tokens if cast(object, self.valid_length) is None else self.valid_length
        if not _is_integer(length) or not 1 <= length <= self.tokens:
            raise _must("valid_length", f"an integer in 1..{self.tokens}, the tokens", length)
        self._set("valid_length", int(length))
        if self.block is None:
            if self.block_mask is not None:
                raise _must("block", "given with a block_mask", None)
        elif not _is_integer(self.block) or self.block < 1:
            raise _must("block", "an integer of at least 1", self.block)
        else:
            self._set("block", int(self.block))

    def _check_shapes(self) -> None:
        heads, tokens, width = self.q.shape
        if self.k.shape[1:] != (tokens, width):
            raise _must("k", f"of shape (key heads, {tokens}, {width}) like q", self.k.shape)
        if self.v.shape != self.k.shape:
            raise _must("v", f"of shape {self.k.shape} like k", self.v.shape)
        if heads % self.kv_heads:
            raise _must("q", f"of heads a multiple of the {self.kv_heads} key heads", heads)
        if self.frame is not None and self.metric_factor is not None:
            if self.frame.shape[:2] != (heads, width):
                raise _must("frame", f"of shape ({heads}, {width}, frame rank)", self.frame.shape)
            if self.frame_rank > width:
                raise _must("frame", f"of frame rank at most the width {width}", self.frame_rank)
            if self.metric_factor.shape[:3] != (heads, tokens, self.frame_rank):
                rule = f"of shape ({heads}, {tokens}, {self.frame_rank}, metric rank)"
                raise _must("metric_factor", rule, self.metric_factor.shape)
        if self.curvature is not None and self.curvature.shape != (heads, tokens):
            raise _must("curvature", f"of shape {(heads, tokens)}", self.curvature.shape)
        if self.block_mask is not None:
            count = self.block_count()
            if self.block_mask.shape != (heads, count, count):
                raise _must("block_mask", f"of shape {(heads, count, count)}", self.block_mask.shape)

    def _check_values(self, name: str) -> None:
        array = getattr(self, name)
        if array.dtype == np.bool_ or np.isfinite(array).all():
            return
        first = tuple(int(i) for i in np.unravel_index(int(np.argmin(np.isfinite(array))), array.shape))
        raise _must(name, "finite everywhere", f"{array[first]} at {list(first)}")

    def _check_frame(self) -> None:
        if self.frame is None:
            return
        frame = self.frame.astype(np.float64)
        deviation = np.abs(np.einsum("hdr,hds->hrs", frame, frame) - np.eye(self.frame_rank)).max(axis=(1, 2))
        worst = int(np.argmax(deviation))
        if deviation[worst] > ORTHONORMAL_TOLERANCE:
            rule = f"orthonormal by columns within {ORTHONORMAL_TOLERANCE:g}"
            raise _must("frame", rule, f"off by {deviation[worst]:.3g} in head {worst}")

    def _check_scale(self, field: str) -> None:
        value = getattr(self, field)
        if value is None:
            return
        if field == "factor_scale" and not self.mode.is_metric:
            raise _must(field, f"absent in {self.mode} mode", value)
        heads = self._scale_heads(field)
        if not isinstance(value, tuple) or len(value) not in (1, heads):
            raise _must(field, f"a tuple of 1 or {heads} numbers", value)
        for scale in value:
            if not isinstance(scale, float) or not (0 < scale < math.inf):
                raise _must(field, "finite floats above 0", scale)

    def _check_rows(self) -> None:
        if self.block_mask is None or self.allow_empty_rows:
            return
        legal_rows = np.asarray(self.blocks_legal().any(axis=1))
        empty: BoolArray = legal_rows[None, :] & ~np.asarray(self.blocks_kept().any(axis=2))
        if np.any(empty):
            head, row = divmod(int(np.argmax(empty)), empty.shape[1])
            rule = "keeping at least one block of every query row after causality and padding"
            raise _must("block_mask", rule, f"none in head {head}, block row {row}")


def with_sorted_header(data: bytes) -> bytes:
    """A safetensors file's bytes with the names of its header in order: equal contents then give equal files."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def parse_mode(text: str) -> Mode:
    """The mode of a word; an unknown one is refused with the list of valid ones."""
    try:
        return Mode(text)
    except ValueError:
        raise _must("mode", f"one of {', '.join(Mode)}", text) from None


def _read(place: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    if not place.exists():
        raise DtpError("no such file")
    if not place.is_file():
        raise DtpError("a folder, not a workload file")
    tensors: dict[str, NDArray[Any]] = {}
    try:
        with safe_open(place, framework="numpy") as file:
            for name in file.keys():
                if name not in _TENSORS:
                    raise _must("tensor", f"one of {', '.join(_TENSORS)}", name)
                stored, wanted = file.get_slice(name).get_dtype(), _FILE_TYPES.get(name, "F32")
                if stored != wanted:
                    raise _must(name, f"of type {wanted} in the file", stored)
                array = file.get_tensor(name)
                array.setflags(write=False)
                tensors[name] = array
            metadata = dict(file.metadata() or {})
    except SafetensorError as error:
        raise DtpError(f"not a whole safetensors file ({' '.join(str(error).split())})") from None
    except OSError as error:
        raise DtpError(f"cannot be read ({error.strerror or error})") from None
    return tensors, metadata


def _as_array(name: str, value: Any, kind: Any = np.float32) -> NDArray[Any]:
    for step in ("detach", "cpu"):
        if hasattr(value, step):
            value = getattr(value, step)()
    try:
        array = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
    except (TypeError, ValueError) as error:  # a type that NumPy lacks (bfloat16), or a ragged list
        raise _must(name, "an array that NumPy can hold", str(error).splitlines()[0]) from None
    if name == "block_mask":
        return cast(NDArray[Any], array)
    if array.dtype.kind not in "fiu":
        raise _must(name, "of real numbers", str(array.dtype))
    with np.errstate(over="ignore"):  # too large a number becomes infinity, which the checks name
        return cast(NDArray[Any], array.astype(kind))


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _flag(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise _must(key, "true or false", text)
    return text == "true"


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _must(key, "a number", text) from None


def _integer(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _must(key, "an integer", text) from None
