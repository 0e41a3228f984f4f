"""Random, digit and language-model workloads: what they hold, that a seed repeats them, what they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtp.commutator import Layer
from dtp.errors import DtpError, MissingToolError
from dtp.reference.attention import attention, keep_masks, masked_probabilities, scores, sqnr_db
from dtp.reference.digits import (
    CHECKPOINT,
    DigitModel,
    accuracy,
    checkpoint_metadata,
    digits,
    layer_run,
    layer_tensors,
    load_classifier,
    split,
)
from dtp.reference.fbt import FbtConfig, geodesic_attention
from dtp.reference.holonomy import Transport, block_scores
from dtp.workload import NORM_EPSILON, Activation, Mode, TransportKind, Workload
from tools import train_digits, workloads
from tools.workloads import PROSE, digits_workload, minilm_extract, minilm_workload, random_workload


def random(**changes: Any) -> Workload:
    given: dict[str, Any] = {"tokens": 70, "width": 16, "heads": 3, "mode": "riemannian", "kept": 0.5}
    given |= {"causal": True, "seed": 4, "block": 8}
    return random_workload(**(given | changes))


def transport_of(workload: Workload) -> Transport:
    names = ("connection_a", "connection_b", "torsion_l", "torsion_r")
    factors = (torch.from_numpy(np.array(getattr(workload, name), dtype=np.float64)) for name in names)
    assert workload.transport is not None
    assert workload.torsion_gate is not None
    return Transport(workload.transport, *factors, workload.torsion_gate)


def check_projections(workload: Workload) -> None:
    """q, k and v are the projections of the hidden state that stands beside them."""
    given = {name: torch.from_numpy(array.astype(np.float64)) for name, array in workload.tensors().items()}
    hidden, (gain, offset) = given["hidden"], given["ln_attn"]
    epsilon = NORM_EPSILON if workload.norm_epsilon is None else workload.norm_epsilon
    normed = torch.nn.functional.layer_norm(hidden, hidden.shape[-1:], gain, offset, epsilon)
    for part in "qkv":
        joined = normed @ given[f"w_{part}"].mT + given[f"b_{part}"]
        assert torch.allclose(joined, given[part].transpose(0, 1).flatten(1), atol=1e-4), part


def same(one: Workload, other: Workload) -> bool:
    if one.metadata() != other.metadata():
        return False
    names = [name for name in Workload.__dataclass_fields__ if isinstance(getattr(one, name), np.ndarray)]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


# --------------------------------------------------------------------- random


@pytest.mark.parametrize("mode", Mode)
def test_a_seed_repeats_a_workload(mode: Mode) -> None:
    assert same(random(mode=mode), random(mode=mode))
    assert not np.array_equal(random(mode=mode).q, random(mode=mode, seed=5).q)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kept", [0.25, 0.3, 0.5, 0.9])
def test_each_head_keeps_the_fraction_of_its_legal_blocks(kept: float, causal: bool) -> None:
    workload = random(kept=kept, causal=causal, valid_length=60)
    legal = workload.blocks_legal()
    assert workload.block_mask is not None
    assert not (workload.block_mask & ~legal).any()
    assert workload.blocks_kept().sum(axis=(1, 2)).tolist() == [round(kept * legal.sum())] * 3
    assert not workload.allow_empty_rows  # the constructor then checks that no row is empty
    first, second = workload.block_mask[:2]
    assert (first != second).any()


def test_the_diagonal_is_not_forced() -> None:
    workload = random(kept=0.4, causal=False, heads=8)
    assert workload.block_mask is not None
    diagonal = workload.block_mask[:, range(9), range(9)]
    assert 0.2 < diagonal.mean() < 0.6


def test_full_workloads_have_no_mask() -> None:
    workload = random(kept=1.0)
    assert workload.block_mask is None
    assert workload.block == 8
    assert random(kept=1.0, block=None).block is None


@pytest.mark.parametrize("mode", Mode)
def test_magnitudes_are_realistic(mode: Mode) -> None:
    """Unit operands, metrics that differ by token, a softmax neither uniform nor one-hot."""
    workload = random(tokens=128, width=32, mode=mode, kept=1.0, causal=False)
    for name in ("q", "k", "v"):
        assert getattr(workload, name).std() == pytest.approx(1.0, abs=0.05)
    if workload.metric_factor is not None and workload.curvature is not None:
        strength = (workload.metric_factor.astype(float) ** 2).sum(axis=(2, 3))
        assert strength.mean() == pytest.approx(0.25 * 9, rel=0.15)
        assert np.quantile(strength, 0.9) > 3 * np.quantile(strength, 0.1)
        assert workload.curvature == pytest.approx(np.log(2) * strength, rel=1e-5)
    probability = masked_probabilities(scores(workload), keep_masks(workload))
    assert 3 / 128 < probability.amax(-1).mean() < 0.5


def test_ranks_groups_and_blend_are_taken() -> None:
    workload = random(mode=Mode.BLENDED, frame_rank=2, metric_rank=4, heads=6, kv_heads=2, blend=0.2)
    assert (workload.frame_rank, workload.metric_rank, workload.groups, workload.blend) == (2, 4, 3, 0.2)


def test_what_stands_beside_leaves_the_attention_alone() -> None:
    plain, carried = random(), random(transport_rank=2, torsion=True)
    assert same(plain, carried.attention_only())
    assert same(carried, random(transport_rank=2, torsion=True))
    assert (carried.transport_columns, random(transport_rank=3).transport_columns) == (8, 6)
    assert carried.torsion_gate == 0.25
    assert random(transport_rank=1, transport="linear").transport is TransportKind.LINEAR
    assert carried.connection_a is not None
    assert np.linalg.norm(carried.connection_a, axis=2).mean() == pytest.approx(1, abs=0.05)


def test_random_transports_come_in_runs() -> None:
    """Loops between near tokens curve less than loops between far ones, so that a gate has something to find."""
    workload = random(tokens=128, transport_rank=2, torsion=True, causal=False)
    energies = block_scores(transport_of(workload), torch.from_numpy(workload.probes(2)).double(), 8)
    place = torch.arange(16)
    near = (place[:, None] - place).abs() <= 1
    assert energies[:, near].mean() < 0.5 * energies[:, (place[:, None] - place).abs() > 5].mean()


def test_a_random_layer_gives_the_attention_its_operands() -> None:
    workload = random(mlp_width=24, heads=4, kv_heads=2)
    assert (workload.model_width, workload.activation) == (64, Activation.GELU)
    check_projections(workload)
    assert workload.q.std() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transport_rank": -1}, r"transport_rank must be an integer from 0 to 1048576, not -1"),
        ({"transport_rank": 17}, r"transport_rank must be at most the width 16, not 17"),
        ({"loops": 1 << 21}, r"loops must be an integer from 0 to 1048576, not 2097152"),
        ({"loops": 3}, r"loops must be 0 without a transport_rank, two heads and two tokens, not 3"),
        ({"mlp_width": -1}, r"mlp_width must be an integer from 0 to 1048576, not -1"),
        ({"torsion": True}, r"torsion must be off without a transport_rank, not True"),
        ({"tokens": 0}, r"tokens must be an integer from 1 to 1048576, not 0"),
        ({"tokens": 10**14}, r"tokens must be an integer from 1 to 1048576, not 10{14}"),
        ({"block": 10**20, "kept": 0.5}, r"block must be an integer from 1 to 1048576, not 10{20}"),
        ({"frame_rank": 0}, r"frame_rank must be an integer from 1 to 1048576, not 0"),
        ({"frame_rank": 17}, r"frame_rank must be at most the width 16, not 17"),
        ({"heads": 3, "kv_heads": 2}, r"heads must be a multiple of kv_heads 2, not 3"),
        ({"kept": 0.0}, r"kept must be a fraction in \(0, 1\], not 0.0"),
        ({"kept": 1.1}, r"kept must be a fraction in \(0, 1\], not 1.1"),
        ({"kept": 0.1}, r"kept must be at least 0.2 to leave a block in every row, not 0.1"),
        ({"block": None}, r"block must be given when kept is below 1, not None"),
    ],
)
def test_refused_random_workloads(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError, match=rf"^random_workload\.{message}"):
        random(**change)


def test_an_unknown_mode_lists_the_valid_ones() -> None:
    with pytest.raises(DtpError, match="one of dot, euclidean, riemannian, blended, not 'cosine'"):
        random(mode="cosine")


# --------------------------------------------------------------------- digits


def test_the_checkpoint_has_the_accuracy_that_it_claims() -> None:
    claimed = float(checkpoint_metadata()["held_out_accuracy"])
    train, held_out = split()
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == len(digits().labels)
    assert accuracy(load_classifier(), held_out) == claimed
    assert claimed >= 0.95
    assert CHECKPOINT.stat().st_size < 2_000_000


def test_the_checkpoints_metrics_have_not_collapsed() -> None:
    summary = train_digits.metric_summary(load_classifier())
    metadata = checkpoint_metadata()
    for layer in range(2):
        mean, spread = (float(summary[f"layer{layer}_metric_{name}"]) for name in ("mean", "spread"))
        assert mean > 1
        assert spread > 0.25
        assert mean == pytest.approx(float(metadata[f"layer{layer}_metric_mean"]), abs=0.01)


def test_the_checkpoint_needs_its_attention_and_its_metrics() -> None:
    """Uniform attention ruins the answers, and a flat metric the attention: neither is carried along unused."""

    def uniform(q, k, v, frame, metric_factor, curvature, tau):  # type: ignore[no-untyped-def]
        return v.mean(-2, keepdim=True).expand_as(v)

    held_out, model = split()[1][:200], load_classifier()
    assert accuracy(model, held_out, uniform) < 0.6
    for layer in range(2):
        seen = layer_tensors(model, held_out[:20], layer)
        own = geodesic_attention(*seen, model.config.temperature)
        nothing = {"metric_factor": 0 * seen.metric_factor, "curvature": 0 * seen.curvature}
        flat = geodesic_attention(*seen._replace(**nothing), model.config.temperature)
        assert (sqnr_db(own.transpose(0, 1), flat.transpose(0, 1)) < 20).all()


def test_a_digits_workload_gives_the_models_own_attention() -> None:
    model = load_classifier()
    workload = digits_workload([5, 1700], layer=1)
    assert (workload.heads, workload.tokens, workload.width, workload.mode) == (4, 64, 32, Mode.RIEMANNIAN)
    with torch.no_grad():
        layer = model.with_tensors(digits().pixels[[5, 1700]])[1][1]
        expected = geodesic_attention(*layer, model.config.temperature).flatten(0, 1)
    assert torch.allclose(attention(workload), expected, atol=1e-5)
    assert not torch.allclose(expected[0], expected[2], atol=1e-2)


@pytest.mark.parametrize(
    ("images", "layer", "message"),
    [
        ([0], 2, r"layer must be an integer in 0\.\.1, not 2"),
        ([0, 1797], 0, r"images must be integers in 0\.\.1796, not 1797"),
        ([-1], 0, r"images must be integers in 0\.\.1796, not -1"),
        ([], 0, r"images must be at least one image number, not \[\]"),
    ],
)
def test_refused_digits(images: list[int], layer: int, message: str) -> None:
    with pytest.raises(DtpError, match=rf"^digits\.{message}"):
        digits_workload(images, layer)


def test_a_broken_checkpoint_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "digits.safetensors"
    with pytest.raises(DtpError, match=r"no such checkpoint; python -m tools\.train_digits makes it"):
        load_classifier(path)
    path.write_bytes(CHECKPOINT.read_bytes()[:-5])
    with pytest.raises(DtpError, match="not a whole safetensors file"):
        load_classifier(path)
    random(kept=1.0).save(path)
    with pytest.raises(DtpError, match="not a digit classifier"):
        load_classifier(path)


def test_training_repeats() -> None:
    sizes, options = FbtConfig(layers=1, hidden_width=16), train_digits.TrainConfig(seed=3, epochs=1, batch=128)
    one, two, other = (
        train_digits.train(sizes, given).state_dict() for given in (options, options, replace(options, seed=4))
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["position"], other["position"])


def test_training_with_transports_repeats_and_has_its_losses() -> None:
    sizes = FbtConfig(layers=1, hidden_width=16, transport_rank=1)
    options = train_digits.TrainConfig(seed=3, epochs=1, batch=128)
    curved = replace(options, holonomy_weight=1.0)
    one, two, other = (train_digits.train(sizes, given).state_dict() for given in (options, options, curved))
    assert all(torch.equal(one[name], two[name]) for name in one)
    name = "blocks.0.attention.connection_net.2.weight"
    assert not torch.equal(one[name], other[name])


def test_the_transport_loss_is_cap_and_energy() -> None:
    generator = torch.Generator().manual_seed(1)
    factors = [torch.randn(4, 2, 9, 6, 1, generator=generator) for _ in range(4)]
    transport = Transport(TransportKind.CAYLEY, *factors, 0.5)
    strength = (transport.columns() ** 2).sum((-2, -1))
    cap = (torch.relu(strength - 12) ** 2).mean()
    assert cap > 0.1
    options = train_digits.TrainConfig(factor_cap_weight=0.5)
    assert torch.allclose(train_digits.transport_loss(transport, options, generator), 0.5 * cap)
    options = replace(options, holonomy_weight=3.0, holonomy_images=2, factor_cap_weight=0.0)
    got = train_digits.transport_loss(transport, options, torch.Generator().manual_seed(7))
    probes = torch.randn(2, 1, 6, generator=torch.Generator().manual_seed(7))
    assert torch.allclose(got, 3 * block_scores(transport[:2], probes, 9).mean())


def test_training_measures_the_file_that_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "digits.safetensors"
    train_digits.main(["--out", str(path), "--epochs", "1", "--seed", "3"])
    metadata = checkpoint_metadata(path)
    assert metadata["command"] == "python -m tools.train_digits --epochs 1 --seed 3"
    measured = accuracy(load_classifier(path), split()[1])
    assert float(metadata["held_out_accuracy"]) == measured
    assert f"held-out accuracy {measured:.4f}" in capsys.readouterr().out
    before = path.read_bytes()
    train_digits.write_checkpoint(load_classifier(path), path, metadata)
    assert path.read_bytes() == before
    with pytest.raises(DtpError, match="the checkpoint cannot be written"):
        train_digits.write_checkpoint(load_classifier(), tmp_path / "absent" / "x", {})


def test_moved_images_stay_images() -> None:
    pixels = digits().pixels[:50].float()
    got = train_digits.moved(pixels, torch.Generator().manual_seed(1))
    assert got.shape == pixels.shape
    assert got.min() >= 0
    assert got.max() <= 1
    assert 0.02 < (got - pixels).abs().mean() < 0.2


@pytest.mark.parametrize("model", ["transport", "holonomy"])
def test_the_models_with_transport_have_the_accuracy_that_they_claim(model: str) -> None:
    path = DigitModel(model).path
    metadata = checkpoint_metadata(path)
    claimed = float(metadata["held_out_accuracy"])
    assert accuracy(load_classifier(path), split()[1]) == claimed
    assert claimed >= float(checkpoint_metadata(DigitModel.TRANSPORT.path)["held_out_accuracy"]) - 0.01
    assert path.stat().st_size < 2_000_000
    assert f"--model {model} " in metadata["command"]


def test_the_holonomy_loss_lowers_the_energies_and_leaves_them_informative() -> None:
    found = {}
    for model in (DigitModel.TRANSPORT, DigitModel.HOLONOMY):
        metadata = checkpoint_metadata(model.path)
        summary = train_digits.holonomy_summary(load_classifier(model.path))
        for layer in range(2):
            name = f"layer{layer}_loop_energies"
            quantiles = [float(part) for part in summary[name].split()]
            assert quantiles == pytest.approx([float(part) for part in metadata[name].split()], rel=0.02)
            least, low, median, high, _ = quantiles
            assert 1e-4 < least < low < median < high < 4
            assert high > 3 * low
            found[model, layer] = median
    for layer in range(2):
        assert found[DigitModel.HOLONOMY, layer] < 0.4 * found[DigitModel.TRANSPORT, layer]


def test_a_digits_workload_brings_transports_and_layer() -> None:
    classifier = load_classifier(DigitModel.HOLONOMY.path)
    workload = digits_workload([1700], 1, model="holonomy", commutator=True)
    run = layer_run(classifier, np.array([1700]), 1)
    assert run.transport is not None
    assert workload.transport_columns == 8
    probes = torch.from_numpy(workload.probes(2)).double()
    with torch.no_grad():
        expected = block_scores(run.transport, probes, 16)[0]
    assert torch.allclose(block_scores(transport_of(workload), probes, 16), expected, atol=1e-5)
    check_projections(workload)
    assert torch.allclose(torch.from_numpy(workload.hidden.copy()).double(), run.hidden[0], atol=1e-5)  # type: ignore[union-attr]
    assert workload.source == "digits: layer 1, images 1700, model holonomy"
    assert digits_workload([1700], 1).transport is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "torsion"}, "model must be one of plain, transport, holonomy, not 'torsion'"),
        ({"model": "transport"}, "images must be one image number with transports, which pair neighbouring heads, not"),
        ({"commutator": True}, "images must be one image number with the commutator's hidden state, not"),
    ],
)
def test_refused_digit_models(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError, match=rf"^digits\.{message}"):
        digits_workload([0, 1], 0, **change)


# --------------------------------------------------------------------- MiniLM


def test_the_extract_is_the_models_own_tensors() -> None:
    extract = minilm_extract()
    assert (extract.heads, extract.tokens, extract.width, extract.mode) == (24, 64, 32, Mode.DOT)
    fresh = minilm_workload(PROSE[0], layers=workloads.EXTRACT_LAYERS, tokens=workloads.EXTRACT_TOKENS)
    assert fresh.metadata() == extract.metadata()
    for name in "qkv":
        assert np.allclose(getattr(fresh, name), getattr(extract, name), atol=1e-5), name
    assert workloads.MINILM_EXTRACT.stat().st_size < 700_000


def test_every_layer_and_text_becomes_heads() -> None:
    both = minilm_workload(PROSE, tokens=48)
    assert (both.heads, both.tokens, both.valid_length) == (144, 48, 48)
    second = minilm_workload(PROSE[1], layers=[3], tokens=48)
    assert np.allclose(both.q[72 + 36 : 72 + 48], second.q, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 4])
def test_a_minilm_workload_brings_its_layer(layer: int) -> None:
    workload = minilm_workload(layers=[layer], tokens=24, commutator=True)
    assert (workload.heads, workload.model_width, workload.norm_epsilon) == (12, 384, 1e-12)
    check_projections(workload)
    assert workload.mlp_in is not None
    assert workload.mlp_in.shape == (1536, 384)
    with pytest.raises(DtpError, match=r"minilm\.layers must be one layer and one text with the commutator's hidden"):
        minilm_workload(layers=[0, 1], tokens=24, commutator=True)


def test_a_short_text_is_padded() -> None:
    workload = minilm_workload("The tide turns at noon.", layers=[0], tokens=32)
    assert (workload.tokens, workload.valid_length) == (32, 8)


def test_refused_texts() -> None:
    with pytest.raises(DtpError, match=r"^minilm\.layers must be integers in 0\.\.5, not 6"):
        minilm_workload(layers=[6])
    with pytest.raises(DtpError, match=r"^minilm\.layers must be at least one layer"):
        minilm_workload(layers=[])
    with pytest.raises(DtpError, match=r"^minilm\.texts must be equally long in tokens after cutting, not \["):
        minilm_workload(["One.", "Two words."], layers=[0], tokens=16)


def test_missing_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "find_spec", lambda name: None)
    for make in (lambda: digits_workload([0], 0), minilm_workload):
        with pytest.raises(MissingToolError, match=r"PyTorch is not installed: pip install torch==2\.13\.0"):
            make()
    assert minilm_extract().heads == 24


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, None), (4, 2), (2, 1)])
def test_a_workload_with_a_layer_is_the_commutators_layer(heads: int, kv_heads: int | None) -> None:
    """Its projections are the workload's q, k and v, heads that share a key head with the same rows."""
    made = random_workload(
        tokens=12, width=16, heads=heads, kv_heads=kv_heads, mode="riemannian", kept=1.0, causal=True, seed=4,
        block=None, mlp_width=48, valid_length=9,
    )  # fmt: skip
    layer = Layer.of(made)
    assert (layer.heads, layer.mode, layer.causal, layer.valid_length) == (heads, Mode.RIEMANNIAN, True, 9)
    assert layer.activation.name == "GELU" and layer.mlp == 48 and layer.ln_attn is not None
    centred = layer.hidden - layer.hidden.mean(axis=1, keepdims=True)
    gain, offset = layer.ln_attn
    normed = gain * centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + NORM_EPSILON) + offset
    for name in "qkv":
        weight, bias, wanted = getattr(layer, f"w_{name}"), getattr(layer, f"b_{name}"), getattr(made, name)
        got = (normed @ weight.T + bias).reshape(12, heads, 16).swapaxes(0, 1)
        assert np.abs(got - np.repeat(wanted, heads // len(wanted), axis=0)).max() < 1e-5
    for name in ("frame", "metric_factor", "curvature"):
        assert np.array_equal(getattr(layer, name), getattr(made, name))
    plain = random_workload(
        tokens=12, width=16, heads=2, mode="dot", kept=1.0, causal=True, seed=4, block=None,
    )  # fmt: skip
    with pytest.raises(DtpError, match=r"^Layer\.hidden must be there for a commutator, not None$"):
        Layer.of(plain)
