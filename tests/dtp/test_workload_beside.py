"""What a workload holds beside its attention: transports, probes, loops, scores and the commutator's layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dtp.errors import DtpError
from dtp.workload import Activation, LoopField, Mode, TransportKind, Workload, seeded_probes

RNG = np.random.default_rng(12)
HEADS, KEY_HEADS, TOKENS, WIDTH, RANK, PROBES, BLOCK = 4, 2, 21, 8, 2, 3, 4
BLOCKS, MODEL, MLP = -(-TOKENS // BLOCK), 10, 14
EDGES = np.array(
    [[0, 0, 0, 0, 3, 0, 5, 0, 1, 2], [0, 0, 0, 0, 5, 0, 3, 0, 2, 2], [1, 2, 1, 1, 20, 0, 20, 7, 0, 0]], dtype=np.int32
)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def fields(**changes: Any) -> dict[str, Any]:
    """Every tensor that a dot-product workload may hold."""
    factor = (HEADS, TOKENS, WIDTH, RANK)
    given: dict[str, Any] = {
        "q": normal(HEADS, TOKENS, WIDTH),
        "k": normal(KEY_HEADS, TOKENS, WIDTH),
        "v": normal(KEY_HEADS, TOKENS, WIDTH),
        "mode": Mode.DOT,
        "causal": False,
        "block": BLOCK,
        "connection_a": normal(*factor),
        "connection_b": normal(*factor),
        "torsion_l": normal(*factor),
        "torsion_r": normal(*factor),
        "transport": TransportKind.CAYLEY,
        "torsion_gate": -1 / 3,
        "probe": normal(HEADS, PROBES, WIDTH),
        "loops": EDGES,
        "scores": RNG.integers(0, 2**16, (HEADS, BLOCKS, BLOCKS), dtype=np.uint16),
        "hidden": normal(TOKENS, MODEL),
        "w_q": normal(HEADS * WIDTH, MODEL),
        "w_k": normal(KEY_HEADS * WIDTH, MODEL),
        "w_v": normal(KEY_HEADS * WIDTH, MODEL),
        "w_o": normal(MODEL, HEADS * WIDTH),
        "mlp_in": normal(MLP, MODEL),
        "mlp_out": normal(MODEL, MLP),
        "b_q": normal(HEADS * WIDTH),
        "b_k": normal(KEY_HEADS * WIDTH),
        "b_v": normal(KEY_HEADS * WIDTH),
        "b_o": normal(MODEL),
        "b_mlp_in": normal(MLP),
        "b_mlp_out": normal(MODEL),
        "ln_attn": normal(2, MODEL),
        "ln_mlp": normal(2, MODEL),
        "activation": Activation.GELU,
        "norm_epsilon": 1e-12,
    }
    return given | changes


CONNECTION = ("connection_a", "connection_b", "transport")
TORSION = ("torsion_l", "torsion_r", "torsion_gate")
MATRICES = ("hidden", "w_q", "w_k", "w_v", "w_o", "mlp_in", "mlp_out", "activation")
REST = ("b_q", "b_k", "b_v", "b_o", "b_mlp_in", "b_mlp_out", "ln_attn", "ln_mlp", "norm_epsilon")


def without(*names: str, **changes: Any) -> dict[str, Any]:
    return dict.fromkeys(names) | changes


def edges(row: int, field: LoopField, value: int) -> np.ndarray:
    changed = EDGES.copy()
    changed[row, list(LoopField).index(field)] = value
    return changed


def spoiled(name: str, place: tuple[int, ...], value: float) -> np.ndarray:
    array = fields()[name].copy()
    array[place] = value
    return array


# ---- files


def test_a_file_gives_back_every_field(tmp_path: Path) -> None:
    path = tmp_path / "job.safetensors"
    workload = Workload(**fields())
    workload.save(path)
    again = Workload.load(path)
    for name in Workload.__dataclass_fields__:
        before, after = getattr(workload, name), getattr(again, name)
        if isinstance(before, np.ndarray):
            assert after.dtype == before.dtype, name
            assert np.array_equal(after, before), name
            assert not after.flags.writeable
        else:
            assert after == before, name
            assert type(after) is type(before), name
    assert set(load_file(path)) == {name for name, value in fields().items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize(
    ("absent", "present"),
    [
        (CONNECTION + TORSION + ("probe", "loops"), "scores"),
        (TORSION + ("probe", "scores", "loops"), "connection_a"),
        (MATRICES + REST, "torsion_l"),
        (REST, "hidden"),
        (("ln_attn", "norm_epsilon"), "ln_mlp"),
    ],
)
def test_parts_may_be_left_out(absent: tuple[str, ...], present: str) -> None:
    workload = Workload(**fields(**without(*absent)))
    assert getattr(workload, present) is not None
    assert not set(workload.tensors()) & set(absent)
    assert not set(workload.metadata()) & set(absent)


def test_ranks_of_transport_and_model() -> None:
    workload = Workload(**fields())
    assert (workload.transport_rank, workload.transport_columns, workload.model_width) == (RANK, 4 * RANK, MODEL)
    plain = Workload(**fields(**without(*TORSION)))
    assert (plain.transport_rank, plain.transport_columns) == (RANK, 2 * RANK)
    bare = workload.attention_only()
    assert (bare.transport_rank, bare.transport_columns, bare.model_width) == (0, 0, 0)
    assert set(bare.tensors()) == {"q", "k", "v"}
    assert bare.block == BLOCK


def test_words_and_lists_are_taken() -> None:
    given = fields(transport="cayley", activation="gelu", loops=EDGES.tolist(), torsion_gate=np.float32(0.5))
    given["scores"] = given["scores"].astype(np.int64)
    workload = Workload.from_tensors(**given)
    assert workload.transport is TransportKind.CAYLEY
    assert workload.activation is Activation.GELU
    assert workload.torsion_gate == 0.5
    assert np.array_equal(workload.loops, EDGES)  # type: ignore[arg-type]
    assert np.array_equal(workload.scores, given["scores"])  # type: ignore[arg-type]


# ---- probes


def test_probes_are_the_workloads_own_or_seeded() -> None:
    workload = Workload(**fields())
    assert workload.probes(PROBES) is workload.probe
    with pytest.raises(DtpError, match=r"Workload\.probes must be 3, as in the workload, not 2"):
        workload.probes(2)
    bare = Workload(**fields(probe=None))
    assert np.array_equal(bare.probes(2, seed=5), bare.probes(2, seed=5))
    assert not np.array_equal(bare.probes(2, seed=5), bare.probes(2, seed=6))
    with pytest.raises(DtpError, match=r"Workload\.probes must be at least 1, not 0"):
        bare.probes(0)


def test_seeded_probes_have_one_norm() -> None:
    drawn = seeded_probes(3, 5, 64, 1)
    assert drawn.shape == (3, 5, 64)
    assert np.linalg.norm(drawn, axis=2) == pytest.approx(8, rel=1e-6)
    assert len({tuple(row) for row in drawn.reshape(15, 64).tolist()}) == 15


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("connection_a"), "connection_a must be given with connection_b, not None"),
        (without("connection_b"), "connection_b must be given with connection_a, not None"),
        (without("torsion_r"), "torsion_r must be given with torsion_l, not None"),
        (without(*CONNECTION), "connection_a must be given with torsion_l, not None"),
        (without(*CONNECTION, *TORSION), "connection_a must be given with probe, not None"),
        (
            without(*CONNECTION, *TORSION, "probe"),
            "connection_a must be given with loops that have attention edges, not None",
        ),
        ({"transport": None}, r"transport must be given with connection_a \(linear, cayley\), not None"),
        ({"transport": "cayley"}, r"transport must be given with connection_a \(linear, cayley\), not 'cayley'"),
        (
            without("connection_a", "connection_b", *TORSION, "probe", "loops"),
            "transport must be absent without connection_a, not <TransportKind.CAYLEY: 'cayley'>",
        ),
        ({"torsion_gate": None}, "torsion_gate must be a finite number with torsion_l, not None"),
        ({"torsion_gate": float("nan")}, "torsion_gate must be a finite number with torsion_l, not nan"),
        ({"torsion_gate": "1"}, "torsion_gate must be a number, not '1'"),
        (without("torsion_l", "torsion_r"), "torsion_gate must be absent without torsion_l, not -0.33"),
        (
            {"connection_a": normal(HEADS, TOKENS, 9, RANK)},
            r"connection_a must be of shape \(4, 21, 8, transport rank\)",
        ),
        ({"connection_a": normal(KEY_HEADS, TOKENS, WIDTH, RANK)}, r"connection_a must be of shape \(4, 21, 8, "),
        ({"connection_a": normal(HEADS, TOKENS, WIDTH)}, r"connection_a must be of shape \(heads, tokens, width, "),
        (
            {"connection_b": normal(HEADS, TOKENS, WIDTH, 3)},
            r"connection_b must be of shape \(4, 21, 8, 2\), not \(4, ",
        ),
        ({"torsion_l": normal(HEADS, TOKENS, WIDTH, 1)}, r"torsion_l must be of shape \(4, 21, 8, 2\), not \(4, "),
        ({"torsion_r": normal(HEADS, 20, WIDTH, RANK)}, r"torsion_r must be of shape \(4, 21, 8, 2\), not \(4, 20"),
        (
            {"connection_a": normal(HEADS, TOKENS, WIDTH, RANK).astype(np.float64)},
            "connection_a must be of type float32",
        ),
        (
            {"torsion_r": spoiled("torsion_r", (0, 2, 1, 1), np.inf)},
            r"torsion_r must be finite everywhere, not 'inf at",
        ),
        ({"probe": normal(HEADS, PROBES, 9)}, r"probe must be of shape \(4, probes, 8\), not \(4, 3, 9\)"),
        ({"probe": normal(HEADS, 0, WIDTH)}, r"probe must be non-empty, of shape \(heads, probes, width\)"),
        ({"probe": spoiled("probe", (2, 1), 0)}, "probe must be nonzero vectors, not 'zeros for head 2, probe 1'"),
        ({"scores": np.zeros((HEADS, 5, 5), np.uint16)}, r"scores must be of shape \(4, 6, 6\), not \(4, 5, 5\)"),
        ({"scores": normal(HEADS, BLOCKS, BLOCKS)}, "scores must be of type uint16, not 'float32'"),
        ({"block": None}, "block must be given with scores, not None"),
        ({"loops": EDGES.astype(np.int64)}, "loops must be of type int32, not 'int64'"),
        ({"loops": EDGES[:, :9]}, r"loops must be of shape \(edges, 10\), not \(3, 9\)"),
        ({"loops": EDGES[:0]}, r"loops must be non-empty, of shape \(edges, 10\)"),
        ({"loops": edges(1, LoopField.TYPE, 3)}, r"loops must be of type in 0..2 \(0 A, 1 B, 2 C\), not '3 in edge 1'"),
        (
            {"loops": edges(1, LoopField.KIND, -1)},
            r"loops must be of kind in 0..1 \(0 attention, 1 residual\), not '-1 in",
        ),
        (
            {"loops": edges(2, LoopField.CONVENTION, 2)},
            r"loops must be of convention in 0..1 \(0 frame, 1 destination\)",
        ),
        (
            {"loops": edges(0, LoopField.SOURCE_TOKEN, 21)},
            r"loops must be of source_token in 0..20, not '21 in edge 0'",
        ),
        (
            {"loops": edges(0, LoopField.TARGET_TOKEN, -2)},
            r"loops must be of target_token in 0..20, not '-2 in edge 0'",
        ),
        (
            {"loops": edges(2, LoopField.TARGET_LAYER, -1)},
            r"loops must be of target_layer at least 0, not '-1 in edge 2'",
        ),
        ({"loops": edges(1, LoopField.HEAD, 4)}, r"loops must be of head in 0..3, not '4 in edge 1'"),
        ({"loops": edges(1, LoopField.PROBE, 12)}, r"loops must be of probe in 0..11, not '12 in edge 1'"),
        (without("w_o"), "w_o must be given with hidden, not None"),
        (without("hidden"), "hidden must be given with w_q, not None"),
        (without(*MATRICES), "hidden must be given with b_q, not None"),
        (without(*MATRICES, *REST[:6]), "hidden must be given with ln_attn, not None"),
        ({"activation": None}, r"activation must be given with hidden \(relu, gelu\), not None"),
        (without(*MATRICES[:-1], *REST), "activation must be absent without hidden, not <Activation.GELU"),
        (without("ln_attn", "ln_mlp"), "norm_epsilon must be absent without ln_attn and ln_mlp, not 1e-12"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be a finite number above 0, not 0.0"),
        ({"hidden": normal(20, MODEL)}, r"hidden must be of shape \(21, model width\), not \(20, 10\)"),
        ({"w_q": normal(KEY_HEADS * WIDTH, MODEL)}, r"w_q must be of shape \(32, 10\), not \(16, 10\)"),
        ({"w_k": normal(HEADS * WIDTH, MODEL)}, r"w_k must be of shape \(16, 10\), not \(32, 10\)"),
        ({"w_v": normal(KEY_HEADS * WIDTH, 9)}, r"w_v must be of shape \(16, 10\), not \(16, 9\)"),
        ({"w_o": normal(HEADS * WIDTH, MODEL)}, r"w_o must be of shape \(10, 32\), not \(32, 10\)"),
        ({"mlp_in": normal(MLP, 9)}, r"mlp_in must be of shape \(MLP width, 10\), not \(14, 9\)"),
        ({"mlp_out": normal(MODEL, 13)}, r"mlp_out must be of shape \(10, 14\), not \(10, 13\)"),
        ({"b_k": normal(HEADS * WIDTH)}, r"b_k must be of shape \(16\), not \(32,\)"),
        ({"b_mlp_in": normal(MODEL)}, r"b_mlp_in must be of shape \(14\), not \(10,\)"),
        ({"b_o": normal(1, MODEL)}, r"b_o must be of shape \(model width\), not \(1, 10\)"),
        ({"ln_mlp": normal(1, MODEL)}, r"ln_mlp must be of shape \(2, 10\), not \(1, 10\)"),
        ({"ln_attn": spoiled("ln_attn", (1, 4), np.nan)}, r"ln_attn must be finite everywhere, not 'nan at \[1, 4\]'"),
    ],
)
def test_refused_fields(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError, match=rf"^Workload\.{message}") as caught:
        Workload(**fields(**change))
    assert "\n" not in str(caught.value)


def test_residual_loops_need_no_connection() -> None:
    absent = without(*CONNECTION, *TORSION, "probe", loops=EDGES[2:])
    assert Workload(**fields(**absent)).loops is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transport": "Cayley"}, "Workload.transport must be one of linear, cayley, not 'Cayley'"),
        ({"activation": "silu"}, "Workload.activation must be one of relu, gelu, not 'silu'"),
        ({"torsion_gate": "half"}, "Workload.torsion_gate must be a number, not 'half'"),
        ({"norm_epsilon": "inf"}, "Workload.norm_epsilon must be a finite number above 0, not inf"),
        ({"torsion_gates": "1"}, "Workload.metadata key must be one of mode, causal, "),
    ],
)
def test_refused_metadata(change: dict[str, str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "job.safetensors"
    workload = Workload(**fields())
    save_file(workload.tensors(), path, workload.metadata() | change)
    with pytest.raises(DtpError) as caught:
        Workload.load(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_refused_types_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "job.safetensors"
    workload = Workload(**fields())
    save_file(workload.tensors() | {"loops": EDGES.astype(np.int64)}, path, workload.metadata())
    with pytest.raises(DtpError, match=r"Workload\.loops must be of type I32 in the file, not 'I64'"):
        Workload.load(path)
    save_file(workload.tensors() | {"w_x": normal(2)}, path, workload.metadata())
    with pytest.raises(DtpError, match=r"Workload\.tensor must be one of q, k, v, .*, ln_mlp, not 'w_x'"):
        Workload.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loops": EDGES.astype(np.float32)}, r"loops must be of integers in 0\.\.2147483647, not 'float32'"),
        ({"loops": EDGES - 1}, r"loops must be of integers in 0\.\.2147483647, not 'int32'"),
        ({"loops": EDGES.astype(np.int64) + 2**31}, r"loops must be of integers in 0\.\.2147483647, not 'int64'"),
        ({"scores": np.full((HEADS, BLOCKS, BLOCKS), 65536)}, r"scores must be of integers in 0\.\.65535, not 'int64'"),
        ({"scores": np.full((HEADS, BLOCKS, BLOCKS), 0.5)}, r"scores must be of integers in 0\.\.65535, not 'float64'"),
    ],
)
def test_integers_of_other_kinds_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError, match=rf"^Workload\.{message}"):
        Workload.from_tensors(**fields(**change))
