"""One attention job: the tensors of H heads with the options and scales that belong to them, and its file.

A workload file is a `safetensors <https://github.com/huggingface/safetensors>`_ file. Any program that can
write one can feed the processor. Tensor names, shapes and types (H query heads, H_kv key/value heads with H a
multiple of H_kv, L tokens, head width d, frame rank R, metric rank r, block b, N = ceil(L / b) blocks, transport
rank r_T, n probes, model width m, MLP width f):

=================  ==============  =======  =========================================================================
tensor             shape           type     meaning
=================  ==============  =======  =========================================================================
``q``              (H, L, d)       float32  queries
``k``              (H_kv, L, d)    float32  keys; query head h reads key head h // (H / H_kv)
``v``              (H_kv, L, d)    float32  values
``frame``          (H, d, R)       float32  F, orthonormal columns; metric modes only
``metric_factor``  (H, L, R, r)    float32  C_t; token t has the metric I + U_t U_tᵀ, U_t = F C_t
``curvature``      (H, L)          float32  Ω_t, optional (absent = 0); metric modes only
``block_mask``     (H, N, N)       bool     true = computed, optional (absent = every block)
``connection_a``   (H, L, d, r_T)  float32  A_t of the transports, optional
``connection_b``   (H, L, d, r_T)  float32  B_t; with ``connection_a``
``torsion_l``      (H, L, d, r_T)  float32  L_t of the torsion, optional; only with ``connection_a``
``torsion_r``      (H, L, d, r_T)  float32  R_t; with ``torsion_l``
``probe``          (H, n, d)       float32  z of the pair (H, H + 1), optional (absent = seeded)
``loops``          (edges, 10)     int32    loop program, one row an edge, optional; columns below
``scores``         (H, N, N)       uint16   block scores for the gate, low = kept; holonomy is u2f14; optional
``hidden``         (L, m)          float32  h, the state that the layer starts from, optional; for the commutator
``w_q``            (H·d, m)        float32  W_Q: head h has rows h·d to h·d + d − 1 of W_Q n + b_Q; with ``hidden``
``w_k``            (H_kv·d, m)     float32  W_K; with ``hidden``
``w_v``            (H_kv·d, m)     float32  W_V; with ``hidden``
``w_o``            (m, H·d)        float32  W_O; with ``hidden``
``mlp_in``         (f, m)          float32  W_1 of Res(h) = W_2 act(W_1 n + b_1) + b_2; with ``hidden``
``mlp_out``        (m, f)          float32  W_2; with ``hidden``
``b_q``            (H·d,)          float32  bias of ``w_q``, optional (absent = 0), as the other five
``b_k``            (H_kv·d,)       float32  bias of ``w_k``
``b_v``            (H_kv·d,)       float32  bias of ``w_v``
``b_o``            (m,)            float32  bias of ``w_o``
``b_mlp_in``       (f,)            float32  b_1
``b_mlp_out``      (m,)            float32  b_2
``ln_attn``        (2, m)          float32  gain, offset of the LayerNorm n = LN(h) of Attn, optional (absent = none)
``ln_mlp``         (2, m)          float32  the same of Res
=================  ==============  =======  =========================================================================

File metadata are strings:

====================  ===============  ==========================================================================
key                   needed           value
====================  ===============  ==========================================================================
``mode``              always           ``dot``, ``euclidean``, ``riemannian`` or ``blended``
``causal``            always           ``true`` or ``false``: whether query i sees only keys j <= i
``temperature``       not in dot       τ > 0, a decimal number
``blend``             in blended       μ in [0, 1]: 0 is the dot product, 1 the Riemannian score
``valid_length``      optional         tokens before the padding, 1..L (absent = L)
``block``             with a table     b, tokens along one side of a block of ``block_mask`` and ``scores``
``allow_empty_rows``  optional         ``true`` permits a mask that leaves rows without any key (they give zeros)
``q_scale``           optional         real value of one step of the integer q: one number, or H with commas
``k_scale``           optional         the same for k: one number or H_kv
``v_scale``           optional         the same for v: one number or H_kv
``factor_scale``      optional         the same for metric_factor: one number or H; metric modes only
``transport``         with connection  ``linear`` (P = I + X) or ``cayley`` (P = (I − X/2)⁻¹(I + X/2))
``torsion_gate``      with torsion     γ, a decimal number
``activation``        with ``hidden``  act, ``relu`` or ``gelu`` (x·Φ(x))
``norm_epsilon``      optional         ε of ``ln_attn`` and ``ln_mlp``, above 0 (absent = 1e-5)
``source``            optional         where the tensors come from, in words
``version``           optional         ``1``
``format``            optional         ignored; general-purpose writers of safetensors add it
====================  ===============  ==========================================================================

Columns of ``loops``; ``docs/holonomy.md`` says which rows make a loop:

======  ==================================  ====================================================================
column  field                               value
======  ==================================  ====================================================================
0       ``loop``                            number of the loop, from 0; the edges of a loop are consecutive rows
1       ``type``                            0 A, 1 B, 2 C
2       ``kind``                            0 attention, 1 residual
3       ``convention``                      0 frame, 1 destination
4, 5    ``source_token``, ``source_layer``  node that the edge leaves
6, 7    ``target_token``, ``target_layer``  node that the edge reaches
8       ``head``                            head of an attention edge; 0 for a residual one
9       ``probe``                           start vector: h·n + p is probe p of head h
======  ==================================  ====================================================================

Scores of query i and key j, with Δ = q_i − k_j:

- ``dot``: q_i·k_j / √d
- ``euclidean``: −‖Δ‖² / τ
- ``riemannian``: −( ‖Δ‖² + ½‖U_iᵀΔ‖² + ½‖U_jᵀΔ‖² + Ω_i + Ω_j ) / τ  [RA (6), (15), (23)]
- ``blended``: (1 − μ) · dot + μ · riemannian  [RA (27)]

Tensors are given as the model has them, unrotated: the frame is aligned with the first R coordinates later.
The generator of token t is X_t = A_t B_tᵀ − B_t A_tᵀ + γ(L_t R_tᵀ − R_t L_tᵀ) [RA (22), §5.6]; transports act in the
coordinates of v. Seeded probes are N(0, 1), scaled to the norm √d (:func:`seeded_probes`).
Keys and queries at or past ``valid_length`` take no part; their numbers must be finite all the same. An
unknown tensor or metadata name is an error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dtp.errors import DtpError
from dtp.workload_checks import check
from dtp.workload_fields import (
    FILE_VERSION,
    NORM_EPSILON,
    ORTHONORMAL_TOLERANCE,
    SCALES,
    TENSOR_RULES,
    Activation,
    BoolArray,
    FloatArray,
    IntArray,
    LoopField,
    Mode,
    ScoreArray,
    TransportKind,
    group,
    parse_mode,
    parse_word,
)
from dtp.workload_fields import workload_must as _must
from dtp.workload_file import options_of, read_tensors, with_sorted_header, write_tensors

__all__ = [
    "FILE_VERSION",
    "NORM_EPSILON",
    "ORTHONORMAL_TOLERANCE",
    "Activation",
    "LoopField",
    "Mode",
    "TransportKind",
    "Workload",
    "parse_mode",
    "seeded_probes",
    "with_sorted_header",
]


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
    block_mask : bool (H, blocks, blocks) or None (= every block)
    temperature : float > 0 in every mode but dot, where it is None
    blend : float in [0, 1] in blended mode, else None
    valid_length : int in 1..L, or None, which becomes L
    block : int >= 1, needed with ``block_mask``
    source : str, where the tensors come from
    q_scale, k_scale, v_scale, factor_scale : tuples of positive floats, one entry or one per head, or None
        (chosen by the quantiser). k_scale and v_scale count key heads.
    allow_empty_rows : bool
        Permit a ``block_mask`` that leaves rows without a key.
    connection_a, connection_b : float32 (H, L, d, r_T), both or neither
    torsion_l, torsion_r : the same shape, both or neither, only with a connection
    transport : TransportKind, exactly with a connection
    torsion_gate : finite float γ, exactly with torsion
    probe : float32 (H, n, d), no vector zero, only with a connection; see :meth:`probes`
    loops : int32 (edges, 10), columns as ``LoopField``
    scores : uint16 (H, blocks, blocks), only with ``block``
    hidden, w_q, w_k, w_v, w_o, mlp_in, mlp_out : float32, all or none; biases b_* and ln_* only with them
    activation : Activation, exactly with ``hidden``
    norm_epsilon : float > 0 or None (= ``NORM_EPSILON``), only with ``ln_attn`` or ``ln_mlp``

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
    connection_a: FloatArray | None = None
    connection_b: FloatArray | None = None
    torsion_l: FloatArray | None = None
    torsion_r: FloatArray | None = None
    transport: TransportKind | None = None
    torsion_gate: float | None = None
    probe: FloatArray | None = None
    loops: IntArray | None = None
    scores: ScoreArray | None = None
    hidden: FloatArray | None = None
    w_q: FloatArray | None = None
    w_k: FloatArray | None = None
    w_v: FloatArray | None = None
    w_o: FloatArray | None = None
    mlp_in: FloatArray | None = None
    mlp_out: FloatArray | None = None
    b_q: FloatArray | None = None
    b_k: FloatArray | None = None
    b_v: FloatArray | None = None
    b_o: FloatArray | None = None
    b_mlp_in: FloatArray | None = None
    b_mlp_out: FloatArray | None = None
    ln_attn: FloatArray | None = None
    ln_mlp: FloatArray | None = None
    activation: Activation | None = None
    norm_epsilon: float | None = None

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
    def transport_rank(self) -> int:
        """r_T, columns of a connection factor; 0 without one."""
        return 0 if self.connection_a is None else int(self.connection_a.shape[3])

    @property
    def transport_columns(self) -> int:
        """k, columns of a transport: 2 r_T, or 4 r_T with torsion; 0 without a connection."""
        return self.transport_rank * (2 if self.torsion_l is None else 4)

    @property
    def model_width(self) -> int:
        """d_model; 0 without hidden states."""
        return 0 if self.hidden is None else int(self.hidden.shape[1])

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
        heads = self.scale_heads(f"{name}_scale")
        return np.broadcast_to(np.array(value, dtype=np.float64), (heads,)).copy()

    def scale_heads(self, field: str) -> int:
        """Heads that a field of scales counts."""
        return self.kv_heads if field in ("k_scale", "v_scale") else self.heads

    # ----------------------------------------------------------------- parts

    def probes(self, count: int, seed: int = 0) -> FloatArray:
        """The workload's own probes (H, n, d), or ``count`` seeded ones a head: N(0, 1), scaled to the norm √d.

        Raises
        ------
        DtpError
            When ``count`` is below 1, or not the number of probes that the workload has.
        """
        if count < 1 or (self.probe is not None and self.probe.shape[1] != count):
            there = "at least 1" if self.probe is None else f"{self.probe.shape[1]}, as in the workload"
            raise _must("probes", there, count)
        return seeded_probes(self.heads, count, self.width, seed) if self.probe is None else self.probe

    def attention_only(self) -> Workload:
        """The workload with nothing beside the attention: no connection, probe, loops, scores or commutator."""
        beside = ("connection", "torsion", "probe", "loops", "scores", "commutator", "bias", "norm")
        options = ("transport", "torsion_gate", "activation", "norm_epsilon")
        nothing: dict[str, Any] = dict.fromkeys((*group(*beside), *options))
        return replace(self, **nothing)

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
            tensors, metadata = read_tensors(place)
            return cls._from_file(tensors, metadata)
        except DtpError as error:
            raise DtpError(f"{place}: {error}") from None

    @classmethod
    def _from_file(cls, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> Workload:
        for name in ("q", "k", "v"):
            if name not in tensors:
                raise _must(name, "present in the file", f"only {', '.join(sorted(tensors)) or 'no tensor'}")
        return cls(**options_of(metadata), **cast(dict[str, Any], dict(tensors)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the workload file in one step: either the whole file is there afterwards or the old state is.

        Raises
        ------
        DtpError
            When the folder does not exist or cannot be written.
        """
        write_tensors(Path(path), self.tensors(), self.metadata())

    def tensors(self) -> dict[str, NDArray[Any]]:
        """The tensors that are there, by name."""
        return {name: getattr(self, name) for name in TENSOR_RULES if getattr(self, name) is not None}

    def metadata(self) -> dict[str, str]:
        """The file's metadata: every option as a string, absent ones left out."""
        text = {
            "version": FILE_VERSION,
            "mode": self.mode.value,
            "causal": "true" if self.causal else "false",
            "valid_length": str(self.valid_length),
        }
        for key in ("temperature", "blend", "block", "torsion_gate", "norm_epsilon"):
            value = getattr(self, key)
            if value is not None:
                text[key] = repr(value)
        for key in SCALES:
            scales = getattr(self, key)
            if scales is not None:
                text[key] = ",".join(repr(scale) for scale in scales)
        for key in ("transport", "activation"):
            if getattr(self, key) is not None:
                text[key] = getattr(self, key).value
        if self.allow_empty_rows:
            text["allow_empty_rows"] = "true"
        if self.source:
            text["source"] = self.source
        return text

    @classmethod
    def from_tensors(cls, *, mode: Mode | str, **fields: Any) -> Workload:
        """A workload from arrays of any library, by the names of the fields.

        Arrays, nested lists and tensors with ``detach().cpu().numpy()`` are taken; numbers become float32, a
        mask stays bool, loops become int32, scores uint16. ``mode``, ``transport`` and ``activation`` may be words;
        scales may be one float or a sequence.

        Raises
        ------
        DtpError
            As the constructor; also for an unknown field.
        """
        ready: dict[str, Any] = {"mode": parse_mode(mode)}
        words: dict[str, Any] = {"transport": TransportKind, "activation": Activation}
        for name, value in fields.items():
            if name not in cls.__dataclass_fields__:
                raise _must("field", f"one of {', '.join(cls.__dataclass_fields__)}", name)
            if name in TENSOR_RULES and value is not None:
                value = _as_array(name, value)
            elif name in words and isinstance(value, str):
                value = parse_word(words[name], name, value)
            elif name in SCALES and value is not None:
                value = tuple(float(part) for part in np.atleast_1d(_as_array(name, value, np.float64)))
            ready[name] = value
        for name in ("q", "k", "v", "causal"):
            if ready.get(name) is None:
                raise _must(name, "given", None)
        return cls(**ready)

    # ----------------------------------------------------------------- checks

    def __post_init__(self) -> None:
        check(self)


_INTEGERS: dict[str, Any] = {"loops": np.int32, "scores": np.uint16}


def seeded_probes(heads: int, count: int, width: int, seed: int) -> FloatArray:
    """Probes of a seed, float32 (heads, count, width): N(0, 1), each scaled to the norm √width."""
    drawn = np.random.default_rng(seed).standard_normal((heads, count, width))
    scaled = drawn * (math.sqrt(width) / np.linalg.norm(drawn, axis=2, keepdims=True))
    return np.asarray(scaled, dtype=np.float32)


def _as_array(name: str, value: Any, kind: Any = np.float32) -> NDArray[Any]:
    for step in ("detach", "cpu"):
        if hasattr(value, step):
            value = getattr(value, step)()
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":  # NumPy has no such type
        value = value.float()
    try:
        array = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
    except (TypeError, ValueError) as error:  # a type that NumPy lacks, or a ragged list
        raise _must(name, "an array that NumPy can hold", str(error).splitlines()[0]) from None
    if name == "block_mask":
        return cast(NDArray[Any], array)
    if name in _INTEGERS:
        wanted = np.iinfo(_INTEGERS[name])
        outside = array.dtype.kind not in "iu" or (array.size and np.any((array < 0) | (array > wanted.max)))
        if outside:
            raise _must(name, f"of integers in 0..{wanted.max}", str(array.dtype))
        return cast(NDArray[Any], array.astype(wanted.dtype))
    if array.dtype.kind not in "fiu":
        raise _must(name, "of real numbers", str(array.dtype))
    with np.errstate(over="ignore"):  # too large a number becomes infinity, which the checks name
        return cast(NDArray[Any], array.astype(kind))
