"""Checks of a workload; every refusal is one line that names the field, the rule and the value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import numpy as np

from dtp.workload_fields import (
    METRIC_TENSORS,
    ORTHONORMAL_TOLERANCE,
    SCALES,
    TENSOR_RULES,
    Activation,
    BoolArray,
    LoopField,
    Mode,
    TransportKind,
    group,
)
from dtp.workload_fields import workload_must as _must

if TYPE_CHECKING:
    from dtp.workload import Workload

_LOOP_WORDS = {LoopField.TYPE: ("A", "B", "C"), LoopField.KIND: ("attention", "residual")}
_LOOP_WORDS[LoopField.CONVENTION] = ("frame", "destination")
_ATTENTION = 0


def check(w: Workload) -> None:
    if not isinstance(w.mode, Mode):
        raise _must("mode", f"a Mode ({', '.join(Mode)})", w.mode)
    if not isinstance(w.causal, bool | np.bool_):
        raise _must("causal", "true or false", w.causal)
    if not isinstance(w.allow_empty_rows, bool | np.bool_):
        raise _must("allow_empty_rows", "true or false", w.allow_empty_rows)
    if not isinstance(w.source, str):
        raise _must("source", "text", w.source)
    for name in TENSOR_RULES:
        _check_presence(w, name)
        if getattr(w, name) is not None:
            _check_array(w, name)
    _check_options(w)
    _check_groups(w)
    _check_shapes(w)
    _check_named_shapes(w)
    for name in TENSOR_RULES:
        if getattr(w, name) is not None:
            _check_values(w, name)
    _check_frame(w)
    _check_loops(w)
    for name in SCALES:
        _check_scale(w, name)
    _check_rows(w)


def _set(w: Workload, name: str, value: object) -> None:
    object.__setattr__(w, name, value)


def _check_presence(w: Workload, name: str) -> None:
    given = getattr(w, name) is not None
    if name in METRIC_TENSORS and given and not w.mode.is_metric:
        raise _must(name, f"absent in {w.mode} mode", "a tensor")
    needed = name in ("q", "k", "v") or (name in ("frame", "metric_factor") and w.mode.is_metric)
    if needed and not given:
        raise _must(name, f"given in {w.mode} mode", None)


def _check_groups(w: Workload) -> None:
    """Tensors that go together, and those that need others."""
    for name in ("connection", "torsion", "commutator"):
        members = group(name)
        given = [member for member in members if getattr(w, member) is not None]
        for member in members:
            if given and member not in given:
                raise _must(member, f"given with {given[0]}", None)
    for first, needed in (
        ("torsion_l", "connection_a"),
        ("probe", "connection_a"),
        ("scores", "block"),
        *((name, "hidden") for name in group("bias", "norm")),
    ):
        if getattr(w, first) is not None and getattr(w, needed) is None:
            raise _must(needed, f"given with {first}", None)
    _check_companion(w, "transport", w.connection_a is not None, "connection_a", TransportKind)
    _check_companion(w, "torsion_gate", w.torsion_l is not None, "torsion_l", None)
    _check_companion(w, "activation", w.hidden is not None, "hidden", Activation)
    if w.norm_epsilon is not None and w.ln_attn is None and w.ln_mlp is None:
        raise _must("norm_epsilon", "absent without ln_attn and ln_mlp", w.norm_epsilon)


def _check_companion(
    w: Workload, field: str, present: bool, tensor: str, words: type[TransportKind] | type[Activation] | None
) -> None:
    """An option that is there exactly when a tensor is."""
    value = getattr(w, field)
    if not present:
        if value is not None:
            raise _must(field, f"absent without {tensor}", value)
    elif words is not None:
        if not isinstance(value, words):
            raise _must(field, f"given with {tensor} ({', '.join(words)})", value)
    elif value is None or not math.isfinite(value):
        raise _must(field, f"a finite number with {tensor}", value)


def _check_array(w: Workload, name: str) -> None:
    array, rule = getattr(w, name), TENSOR_RULES[name]
    if not isinstance(array, np.ndarray):
        raise _must(name, "a NumPy array (Workload.from_tensors converts others)", type(array).__name__)
    if array.dtype != rule.kind:
        raise _must(name, f"of type {np.dtype(rule.kind)}", str(array.dtype))
    if array.ndim != len(rule.dimensions):
        raise _must(name, f"of shape {rule.text}", array.shape)
    if 0 in array.shape:
        raise _must(name, f"non-empty, of shape {rule.text}", array.shape)
    if array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")
        array.setflags(write=False)
        _set(w, name, array)


def _check_options(w: Workload) -> None:
    for name in ("temperature", "blend", "torsion_gate", "norm_epsilon"):
        value = getattr(w, name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
                raise _must(name, "a number", value)
            _set(w, name, float(value))
    if w.mode is Mode.DOT:
        if w.temperature is not None:
            raise _must("temperature", "absent in dot mode, whose score is q.k/sqrt(d)", w.temperature)
    elif w.temperature is None or not (0 < w.temperature < math.inf):
        raise _must("temperature", f"a finite number above 0 in {w.mode} mode", w.temperature)
    if w.mode is Mode.BLENDED:
        if w.blend is None or not (0 <= w.blend <= 1):
            raise _must("blend", "a number in [0, 1] in blended mode", w.blend)
    elif w.blend is not None:
        raise _must("blend", f"absent in {w.mode} mode", w.blend)
    if w.norm_epsilon is not None and not 0 < w.norm_epsilon < math.inf:
        raise _must("norm_epsilon", "a finite number above 0", w.norm_epsilon)
    length = w.tokens if cast(object, w.valid_length) is None else w.valid_length
    if not _is_integer(length) or not 1 <= length <= w.tokens:
        raise _must("valid_length", f"an integer in 1..{w.tokens}, the tokens", length)
    _set(w, "valid_length", int(length))
    if w.block is None:
        if w.block_mask is not None:
            raise _must("block", "given with a block_mask", None)
    elif not _is_integer(w.block) or w.block < 1:
        raise _must("block", "an integer of at least 1", w.block)
    else:
        _set(w, "block", int(w.block))


def _check_shapes(w: Workload) -> None:
    heads, tokens, width = w.q.shape
    if w.k.shape[1:] != (tokens, width):
        raise _must("k", f"of shape (key heads, {tokens}, {width}) like q", w.k.shape)
    if w.v.shape != w.k.shape:
        raise _must("v", f"of shape {w.k.shape} like k", w.v.shape)
    if heads % w.kv_heads:
        raise _must("q", f"of heads a multiple of the {w.kv_heads} key heads", heads)
    if w.frame is not None and w.metric_factor is not None:
        if w.frame.shape[:2] != (heads, width):
            raise _must("frame", f"of shape ({heads}, {width}, frame rank)", w.frame.shape)
        if w.frame_rank > width:
            raise _must("frame", f"of frame rank at most the width {width}", w.frame_rank)
        if w.metric_factor.shape[:3] != (heads, tokens, w.frame_rank):
            rule = f"of shape ({heads}, {tokens}, {w.frame_rank}, metric rank)"
            raise _must("metric_factor", rule, w.metric_factor.shape)
    if w.curvature is not None and w.curvature.shape != (heads, tokens):
        raise _must("curvature", f"of shape {(heads, tokens)}", w.curvature.shape)
    if w.block_mask is not None:
        count = w.block_count()
        if w.block_mask.shape != (heads, count, count):
            raise _must("block_mask", f"of shape {(heads, count, count)}", w.block_mask.shape)


def _check_named_shapes(w: Workload) -> None:
    """Shapes of what comes beside the attention: dimensions of one name have one size."""
    sizes = {
        "heads": w.heads,
        "key heads": w.kv_heads,
        "tokens": w.tokens,
        "width": w.width,
        "heads × width": w.heads * w.width,
        "key heads × width": w.kv_heads * w.width,
    }
    if w.block is not None:
        sizes |= dict.fromkeys(("block rows", "block columns"), w.block_count())
    for name, rule in TENSOR_RULES.items():
        array = getattr(w, name)
        if array is None or rule.group in ("attention", "metric"):
            continue
        wanted = [int(word) if word.isdecimal() else sizes.get(word) for word in rule.dimensions]
        if any(size not in (None, got) for size, got in zip(wanted, array.shape, strict=True)):
            shown = [word if size is None else str(size) for word, size in zip(rule.dimensions, wanted, strict=True)]
            raise _must(name, f"of shape ({', '.join(shown)})", array.shape)
        sizes |= dict(zip(rule.dimensions, array.shape, strict=True))


def _check_values(w: Workload, name: str) -> None:
    array = getattr(w, name)
    if array.dtype != np.float32:
        return
    finite = np.isfinite(array)
    if not finite.all():
        first = tuple(int(i) for i in np.unravel_index(int(np.argmin(finite)), array.shape))
        raise _must(name, "finite everywhere", f"{array[first]} at {list(first)}")
    if name == "probe":
        empty = ~array.any(axis=2)
        if np.any(empty):
            head, number = divmod(int(np.argmax(empty)), empty.shape[1])
            raise _must(name, "nonzero vectors", f"zeros for head {head}, probe {number}")


def _check_loops(w: Workload) -> None:
    """Ranges of single fields; whether loops close and can be walked is the loop program's own check."""
    if w.loops is None:
        return
    limits = {LoopField.SOURCE_TOKEN: w.tokens, LoopField.TARGET_TOKEN: w.tokens, LoopField.HEAD: w.heads}
    if w.probe is not None:
        limits[LoopField.PROBE] = w.heads * w.probe.shape[1]
    for column, field in enumerate(LoopField):
        values, words = w.loops[:, column], _LOOP_WORDS.get(field, ())
        limit = len(words) or limits.get(field)
        wrong = (values < 0) | (values >= limit if limit is not None else False)
        if np.any(wrong):
            edge = int(np.argmax(wrong))
            meaning = ", ".join(f"{number} {word}" for number, word in enumerate(words))
            span = "at least 0" if limit is None else f"in 0..{limit - 1}" + (f" ({meaning})" if words else "")
            raise _must("loops", f"of {field} {span}", f"{values[edge]} in edge {edge}")
    walks = w.loops[:, list(LoopField).index(LoopField.KIND)] == _ATTENTION
    if np.any(walks) and w.connection_a is None:
        raise _must("connection_a", "given with loops that have attention edges", None)


def _check_frame(w: Workload) -> None:
    if w.frame is None:
        return
    frame = w.frame.astype(np.float64)
    deviation = np.abs(np.einsum("hdr,hds->hrs", frame, frame) - np.eye(w.frame_rank)).max(axis=(1, 2))
    worst = int(np.argmax(deviation))
    if deviation[worst] > ORTHONORMAL_TOLERANCE:
        rule = f"orthonormal by columns within {ORTHONORMAL_TOLERANCE:g}"
        raise _must("frame", rule, f"off by {deviation[worst]:.3g} in head {worst}")


def _check_scale(w: Workload, field: str) -> None:
    value = getattr(w, field)
    if value is None:
        return
    if field == "factor_scale" and not w.mode.is_metric:
        raise _must(field, f"absent in {w.mode} mode", value)
    heads = w.scale_heads(field)
    if not isinstance(value, tuple) or len(value) not in (1, heads):
        raise _must(field, f"a tuple of 1 or {heads} numbers", value)
    for scale in value:
        if not isinstance(scale, float) or not (0 < scale < math.inf):
            raise _must(field, "finite floats above 0", scale)


def _check_rows(w: Workload) -> None:
    if w.block_mask is None or w.allow_empty_rows:
        return
    legal_rows = np.asarray(w.blocks_legal().any(axis=1))
    empty: BoolArray = legal_rows[None, :] & ~np.asarray(w.blocks_kept().any(axis=2))
    if np.any(empty):
        head, row = divmod(int(np.argmax(empty)), empty.shape[1])
        rule = "keeping at least one block of every query row after causality and padding"
        raise _must("block_mask", rule, f"none in head {head}, block row {row}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
