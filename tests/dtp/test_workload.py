"""The workload's file, its checks and what it counts."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dtp.errors import DtpError
from dtp.workload import FILE_VERSION, Mode, Workload

RNG = np.random.default_rng(11)
HEADS, KEY_HEADS, TOKENS, WIDTH, FRAME_RANK, METRIC_RANK, BLOCK = 4, 2, 21, 8, 3, 2, 4
BLOCKS = -(-TOKENS // BLOCK)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def fields(kind: Mode = Mode.RIEMANNIAN, **changes: Any) -> dict[str, Any]:
    """Everything that a workload of a mode may hold, as the constructor takes it."""
    given: dict[str, Any] = {
        "q": normal(HEADS, TOKENS, WIDTH),
        "k": normal(KEY_HEADS, TOKENS, WIDTH),
        "v": normal(KEY_HEADS, TOKENS, WIDTH),
        "mode": kind,
        "causal": True,
        "block_mask": np.ones((HEADS, BLOCKS, BLOCKS), dtype=bool),
        "block": BLOCK,
        "valid_length": 18,
        "source": "a test",
        "q_scale": (0.1, 0.2, 0.3, 1 / 3),
        "k_scale": (0.1, 0.7),
        "v_scale": (0.25,),
    }
    if kind.is_metric:
        given["frame"] = np.linalg.qr(normal(HEADS, WIDTH, FRAME_RANK))[0].astype(np.float32)
        given["metric_factor"] = normal(HEADS, TOKENS, FRAME_RANK, METRIC_RANK)
        given["curvature"] = np.abs(normal(HEADS, TOKENS))
        given["factor_scale"] = (0.01,)
    if kind is not Mode.DOT:
        given["temperature"] = 1 / 7
    if kind is Mode.BLENDED:
        given["blend"] = 0.3
    return given | changes


def keeping(*rows: int, head: int = 0) -> np.ndarray:
    """A mask that keeps every block but those of some block rows of one head."""
    mask = np.ones((HEADS, BLOCKS, BLOCKS), dtype=bool)
    mask[head, list(rows)] = False
    return mask


def spoiled(name: str, place: tuple[int, ...], value: float) -> np.ndarray:
    array = fields()[name].copy()
    array[place] = value
    return array


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("mode", Mode)
def test_a_file_gives_back_every_field(mode: Mode, tmp_path: Path) -> None:
    workload = Workload(**fields(mode))
    workload.save(tmp_path / "job.safetensors")
    again = Workload.load(tmp_path / "job.safetensors")
    for name in Workload.__dataclass_fields__:
        before, after = getattr(workload, name), getattr(again, name)
        if isinstance(before, np.ndarray):
            assert after.dtype == before.dtype, name
            assert np.array_equal(after, before), name
            assert not after.flags.writeable
        else:
            assert after == before, name
    assert [path.name for path in tmp_path.iterdir()] == ["job.safetensors"]


def test_equal_workloads_give_equal_files(tmp_path: Path) -> None:
    given = fields()
    for name in ("one", "two", "three"):
        Workload(**given).save(tmp_path / name)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_a_minimal_file_gets_the_documented_defaults(tmp_path: Path) -> None:
    path = tmp_path / "job.safetensors"
    tensors = {"q": normal(2, 5, 4), "k": normal(1, 5, 4), "v": normal(1, 5, 4)}
    save_file(tensors, path, {"mode": "dot", "causal": "false", "format": "pt"})
    workload = Workload.load(path)
    assert (workload.valid_length, workload.block, workload.q_scale, workload.source) == (5, None, None, "")
    assert workload.groups == 2


def test_an_empty_row_permission_travels(tmp_path: Path) -> None:
    workload = Workload(**fields(block_mask=keeping(2), allow_empty_rows=True))
    workload.save(tmp_path / "job.safetensors")
    assert Workload.load(tmp_path / "job.safetensors").allow_empty_rows


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.safetensors"
    Workload(**fields()).save(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(DtpError, match=r"job.safetensors: the workload cannot be written \(No space left"):
        Workload(**fields()).save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.safetensors"]
    assert path.read_bytes() == before


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DtpError, match="cannot be written"):
        Workload(**fields()).save(tmp_path / "absent" / "job.safetensors")


def file_error(path: Path) -> str:
    with pytest.raises(DtpError) as caught:
        Workload.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def test_what_is_not_a_workload_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "job.safetensors"
    assert "no such file" in file_error(path)
    assert "a folder" in file_error(tmp_path)
    for data in (b"", b"hello", b"\x89PNG" * 100):
        path.write_bytes(data)
        assert "not a whole safetensors file" in file_error(path)
    Workload(**fields()).save(path)
    whole = path.read_bytes()
    for size in (4, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "not a whole safetensors file" in file_error(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": None}, "Workload.metadata mode must be present in the file, not None"),
        ({"causal": None}, "Workload.metadata causal must be present in the file, not None"),
        (
            {"mode": "cosine"},
            "mode must be one of dot, euclidean, riemannian, blended, not 'cosine'",
        ),
        ({"causal": "yes"}, "Workload.causal must be true or false, not 'yes'"),
        ({"temperature": "warm"}, "Workload.temperature must be a number, not 'warm'"),
        ({"temperature": "nan"}, "Workload.temperature must be a finite number above 0"),
        ({"temperature": "1_0"}, "Workload.temperature must be a number, not '1_0'"),
        ({"valid_length": "5.5"}, "Workload.valid_length must be an integer, not '5.5'"),
        ({"valid_length": "1_0"}, "Workload.valid_length must be an integer, not '1_0'"),
        ({"q_scale": "0.1,,0.2"}, "Workload.q_scale must be a number, not ''"),
        ({"version": "2"}, f"Workload.version must be {FILE_VERSION}, not '2'"),
        ({"temprature": "2"}, "Workload.metadata key must be one of mode, causal, temperature, blend, "),
    ],
)
def test_refused_metadata(change: dict[str, str | None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "job.safetensors"
    metadata: dict[str, str | None] = {"mode": "euclidean", "causal": "true", "temperature": "2.0"}
    text = {key: value for key, value in (metadata | change).items() if value is not None}
    save_file({name: normal(1, 6, 4) for name in "qkv"}, path, text)
    assert message in file_error(path)


def test_refused_tensors_of_a_file(tmp_path: Path) -> None:
    path, text = tmp_path / "job.safetensors", {"mode": "dot", "causal": "true"}
    good = {name: normal(1, 6, 4) for name in "qkv"}
    save_file({"q": good["q"]}, path, text)
    assert "Workload.k must be present in the file, not 'only q'" in file_error(path)
    save_file(good | {"w": normal(2)}, path, text)
    assert "Workload.tensor must be one of q, k, v, frame, metric_factor" in file_error(path)
    save_file(good | {"q": good["q"].astype(np.float16)}, path, text)
    assert "Workload.q must be of type F32 in the file, not 'F16'" in file_error(path)
    mask = {"block_mask": np.ones((1, 2, 2), dtype=np.uint8)}
    save_file(good | mask, path, text | {"block": "3"})
    assert "Workload.block_mask must be of type BOOL in the file, not 'U8'" in file_error(path)


# --------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": normal(TOKENS, WIDTH)},
            r"q must be of shape \(heads, tokens, width\), not \(21, 8\)",
        ),
        ({"q": normal(HEADS, 0, WIDTH)}, r"q must be non-empty"),
        ({"q": normal(3, TOKENS, WIDTH)}, "q must be of heads a multiple of the 2 key heads, not 3"),
        ({"k": normal(KEY_HEADS, 20, WIDTH)}, r"k must be of shape \(key heads, 21, 8\) like q"),
        ({"v": normal(KEY_HEADS, TOKENS, 9)}, r"v must be of shape \(2, 21, 8\) like k"),
        ({"q": normal(HEADS, TOKENS, WIDTH).astype(np.float64)}, "q must be of type float32, not"),
        ({"q": [[[1.0]]]}, r"q must be a NumPy array \(Workload.from_tensors converts others\)"),
        ({"k": None}, "k must be given in riemannian mode, not None"),
        ({"frame": None}, "frame must be given in riemannian mode, not None"),
        ({"metric_factor": None}, "metric_factor must be given in riemannian mode, not None"),
        ({"frame": normal(HEADS, 9, 3)}, r"frame must be of shape \(4, 8, frame rank\)"),
        (
            {"frame": normal(HEADS, WIDTH, 9)},
            "frame must be of frame rank at most the width 8, not 9",
        ),
        (
            {"metric_factor": normal(HEADS, TOKENS, 2, 2)},
            r"metric_factor must be of shape \(4, 21, 3, metric rank\), not \(4, 21, 2, 2\)",
        ),
        ({"curvature": normal(HEADS, 20)}, r"curvature must be of shape \(4, 21\), not \(4, 20\)"),
        (
            {"block_mask": np.ones((HEADS, 5, 5), dtype=bool)},
            r"block_mask must be of shape \(4, 6, 6\), not \(4, 5, 5\)",
        ),
        ({"block_mask": np.ones((HEADS, 6, 6), dtype=np.uint8)}, "block_mask must be of type bool"),
        ({"block": None}, "block must be given with a block_mask, not None"),
        ({"block": 0}, "block must be an integer of at least 1, not 0"),
        ({"valid_length": 0}, r"valid_length must be an integer in 1..21, the tokens, not 0"),
        ({"valid_length": 22}, r"valid_length must be an integer in 1..21, the tokens, not 22"),
        ({"valid_length": True}, r"valid_length must be an integer in 1..21, the tokens, not True"),
        ({"temperature": None}, "temperature must be a finite number above 0 in riemannian mode"),
        (
            {"temperature": 0.0},
            "temperature must be a finite number above 0 in riemannian mode, not 0",
        ),
        (
            {"temperature": -2},
            "temperature must be a finite number above 0 in riemannian mode, not -2",
        ),
        ({"temperature": "2"}, "temperature must be a number, not '2'"),
        ({"blend": 0.5}, "blend must be absent in riemannian mode, not 0.5"),
        (
            {"mode": "dot_product"},
            r"mode must be a Mode \(dot, euclidean, riemannian, blended\), not 'dot_product'",
        ),
        ({"causal": 1}, "causal must be true or false, not 1"),
        ({"allow_empty_rows": 1}, "allow_empty_rows must be true or false, not 1"),
        ({"source": 3}, "source must be text, not 3"),
        ({"q_scale": (0.1, 0.2)}, r"q_scale must be a tuple of 1 or 4 numbers, not \(0.1, 0.2\)"),
        ({"k_scale": (0.1,) * 4}, "k_scale must be a tuple of 1 or 2 numbers"),
        ({"v_scale": (0.0,)}, "v_scale must be finite floats above 0, not 0.0"),
        ({"factor_scale": (float("inf"),)}, "factor_scale must be finite floats above 0, not inf"),
        (
            {"q": spoiled("q", (1, 3, 2), np.nan)},
            r"q must be finite everywhere, not 'nan at \[1, 3, 2\]'",
        ),
        (
            {"curvature": spoiled("curvature", (3, 20), -np.inf)},
            r"curvature must be finite everywhere, not '-inf at \[3, 20\]'",
        ),
        (
            {"block_mask": keeping(4, head=2)},
            "block_mask must be keeping at least one block of every query row after causality and "
            "padding, not 'none in head 2, block row 4'",
        ),
    ],
)
def test_refused_fields(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError, match=rf"^Workload\.{message}") as caught:
        Workload(**fields(**change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "change", "message"),
    [
        (Mode.DOT, {"temperature": 2.0}, "temperature must be absent in dot mode, whose score is"),
        (Mode.DOT, {"frame": normal(HEADS, WIDTH, 3)}, "frame must be absent in dot mode"),
        (Mode.EUCLIDEAN, {"curvature": normal(HEADS, TOKENS)}, "curvature must be absent in euclidean mode"),
        (Mode.EUCLIDEAN, {"factor_scale": (0.1,)}, "factor_scale must be absent in euclidean mode"),
        (Mode.BLENDED, {"blend": None}, r"blend must be a number in \[0, 1\] in blended mode, not None"),
        (Mode.BLENDED, {"blend": 1.01}, r"blend must be a number in \[0, 1\] in blended mode, not 1.01"),
        (Mode.BLENDED, {"blend": -0.01}, r"blend must be a number in \[0, 1\] in blended mode, not -0.01"),
    ],
)
def test_refused_in_some_modes(mode: Mode, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError, match=f"^Workload.{message}"):
        Workload(**fields(mode, **change))


def test_a_skewed_frame_is_refused_with_its_deviation() -> None:
    frame = fields()["frame"]
    frame[2, :, 0] *= 1.01  # the square grows by 2.01 %
    message = r"Workload.frame must be orthonormal by columns within 0.0001, not 'off by 0.0201 in head 2'"
    with pytest.raises(DtpError, match=message):
        Workload(**fields(frame=frame))
    frame[2, :, 0] *= (1 + 4e-5) / 1.01
    Workload(**fields(frame=frame))


def test_empty_rows_need_permission_only_where_a_query_lives() -> None:
    Workload(**fields(block_mask=keeping(5)))  # tokens 20.. lie past the valid length 18
    with pytest.raises(DtpError, match="head 0, block row 1'"):
        Workload(**fields(block_mask=keeping(1)))
    only_future = np.ones((HEADS, BLOCKS, BLOCKS), dtype=bool)
    only_future[3, 2, :3] = False
    with pytest.raises(DtpError, match="head 3, block row 2'"):
        Workload(**fields(block_mask=only_future))
    Workload(**fields(block_mask=only_future, causal=False))
    assert Workload(**fields(block_mask=keeping(1), allow_empty_rows=True)).pairs_kept()[0] == 18 * 19 / 2 - 26


def test_arrays_are_frozen_copies() -> None:
    given = fields()
    workload = Workload(**given)
    value = float(given["q"][0, 0, 0])
    given["q"][0, 0, 0] = value + 1
    assert workload.q[0, 0, 0] == value
    with pytest.raises(ValueError, match="read-only"):
        workload.q[0, 0, 0] = 0


# ----------------------------------------------------------- from other arrays


class LikeTorch:
    """A tensor that only shows its numbers after detach().cpu().numpy()."""

    def __init__(self, array: np.ndarray, steps: tuple[str, ...] = ()) -> None:
        self.array, self.steps = array, steps

    def detach(self) -> LikeTorch:
        return LikeTorch(self.array, (*self.steps, "detach"))

    def cpu(self) -> LikeTorch:
        return LikeTorch(self.array, (*self.steps, "cpu"))

    def numpy(self) -> np.ndarray:
        assert self.steps == ("detach", "cpu")
        return self.array


def test_from_tensors_takes_tensors_lists_and_words() -> None:
    given = fields(Mode.BLENDED)
    expected = Workload(**given)
    given |= {"mode": "blended", "k": LikeTorch(given["k"].astype(np.float64)), "v": given["v"].tolist()}
    given |= {"v_scale": 0.25, "k_scale": [0.1, 0.7]}
    got = Workload.from_tensors(**given)
    assert got.metadata() == expected.metadata()
    for name in ("q", "k", "v", "frame", "metric_factor", "curvature", "block_mask"):
        assert np.array_equal(getattr(got, name), getattr(expected, name)), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": [1.0]}, "Workload.field must be one of q, k, v, mode, causal,"),
        ({"q": None}, "Workload.q must be given, not None"),
        ({"q": normal(HEADS, TOKENS, WIDTH) * 1j}, "Workload.q must be of real numbers, not 'complex64'"),
        ({"q": [[1.0], [1.0, 2.0]]}, "Workload.q must be an array that NumPy can hold, not"),
        ({"q": np.full((HEADS, TOKENS, WIDTH), 1e300)}, r"Workload.q must be finite everywhere, not 'inf at"),
        ({"block_mask": np.ones((HEADS, 6, 6))}, "Workload.block_mask must be of type bool, not 'float64'"),
    ],
)
def test_from_tensors_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError, match=message):
        Workload.from_tensors(**fields(**change))


def test_the_contract_needs_no_torch() -> None:
    code = "import sys, dtp, dtp.workload, dtp.reference; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


# --------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("causal", "valid_length", "block", "seed"),
    list(product((False, True), (1, 16, 17, 21), (1, 4, 16, 32), (3,))),
)
def test_counts_equal_the_mask_pair_by_pair(causal: bool, valid_length: int, block: int, seed: int) -> None:
    count = -(-TOKENS // block)
    mask = np.random.default_rng(seed).random((HEADS, count, count)) < 0.5
    change: dict[str, Any] = {"block": block, "block_mask": mask, "allow_empty_rows": True}
    workload = Workload(**fields(causal=causal, valid_length=valid_length, **change))
    legal_pair = np.zeros((TOKENS, TOKENS), dtype=bool)
    for query, key in product(range(valid_length), repeat=2):
        legal_pair[query, key] = key <= query or not causal
    kept_pairs = np.zeros(HEADS, dtype=int)
    legal_block, kept_block = (
        np.zeros((count, count), dtype=bool),
        np.zeros((HEADS, count, count), dtype=bool),
    )
    for query, key in np.argwhere(legal_pair):
        legal_block[query // block, key // block] = True
        for head in range(HEADS):
            if mask[head, query // block, key // block]:
                kept_pairs[head] += 1
                kept_block[head, query // block, key // block] = True
                assert workload.keep_mask(head)[query, key]
    assert np.array_equal(workload.blocks_legal(), legal_block)
    assert np.array_equal(workload.blocks_kept(), kept_block)
    assert np.array_equal(workload.pairs_kept(), kept_pairs)
    assert [int(workload.keep_mask(head).sum()) for head in range(HEADS)] == kept_pairs.tolist()
    assert workload.kept_fraction == pytest.approx(kept_block.sum() / (HEADS * legal_block.sum()))
    lanes = WIDTH + FRAME_RANK + FRAME_RANK * (FRAME_RANK + 1)
    assert workload.useful_macs() == kept_pairs.sum() * (lanes + WIDTH)


@pytest.mark.parametrize(("causal", "pairs"), [(False, 18 * 18), (True, 18 * 19 // 2)])
def test_dense_counts(causal: bool, pairs: int) -> None:
    dense = Workload(**fields(Mode.DOT, causal=causal, block_mask=None))
    assert dense.kept_fraction == 1.0
    assert dense.score_lanes == WIDTH
    assert dense.useful_macs() == HEADS * pairs * 2 * WIDTH
    assert dense.blocks_kept().sum() == HEADS * dense.blocks_legal().sum()


def test_counting_blocks_needs_a_size() -> None:
    workload = Workload(**fields(block_mask=None, block=None))
    with pytest.raises(DtpError, match=r"^Workload\.block must be an integer of at least 1 to count blocks"):
        workload.blocks_legal()
    assert workload.blocks_legal(7).shape == (3, 3)


def test_weights_of_the_four_modes() -> None:
    root = WIDTH**-0.5
    weights = {mode: Workload(**fields(mode)) for mode in Mode}
    assert weights[Mode.DOT].kappa == pytest.approx(root)
    assert weights[Mode.DOT].nu == 0.0
    assert (weights[Mode.EUCLIDEAN].kappa, weights[Mode.EUCLIDEAN].nu) == (14.0, 7.0)
    assert (weights[Mode.RIEMANNIAN].kappa, weights[Mode.RIEMANNIAN].nu) == (14.0, 7.0)
    assert weights[Mode.BLENDED].kappa == pytest.approx(0.7 * root + 0.3 * 14)
    assert weights[Mode.BLENDED].nu == pytest.approx(0.3 * 7)


def test_scales_by_head() -> None:
    workload = Workload(**fields(factor_scale=None))
    assert workload.scale_per_head("q") == pytest.approx([0.1, 0.2, 0.3, 1 / 3])
    assert workload.scale_per_head("v") == pytest.approx([0.25, 0.25])
    assert workload.scale_per_head("factor") is None
