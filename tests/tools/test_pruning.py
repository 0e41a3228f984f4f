"""The pruning study: masks and their budgets, sources, measures, and the committed page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import pytest
import torch

from dtp.errors import DtpError
from dtp.reference.digits import DigitModel, digits, load_classifier, split
from dtp.reference.fbt import FbtBlock
from dtp.reference.holonomy import block_scores
from dtp.workload import seeded_probes
from tools import pruning
from tools.pruning import Point, Source, Study, budget_mask, digit_case, digit_layer, masked_outputs, row_budget

HEADS, BLOCKS = 3, 5


def drawn(seed: int, *lead: int) -> torch.Tensor:
    return torch.rand(*lead, HEADS, BLOCKS, BLOCKS, generator=torch.Generator().manual_seed(seed))


# ---- masks


@pytest.mark.parametrize("kept", [1.0, 0.9, 0.7, 0.5, 0.3, 0.1])
def test_a_row_keeps_its_diagonal_and_its_lowest_scores(kept: float) -> None:
    scores = drawn(1, 2)
    scores[..., range(BLOCKS), range(BLOCKS)] = 9.0
    mask = budget_mask(scores, kept)
    budget = row_budget(kept, BLOCKS)
    assert budget == max(1, math.floor(kept * BLOCKS + 0.5))
    assert mask.sum(-1).eq(budget).all()
    assert mask[..., range(BLOCKS), range(BLOCKS)].all()
    for place in torch.cartesian_prod(*(torch.arange(size) for size in scores.shape[:-1])):
        row, at = scores[tuple(place)], int(place[-1])
        others = sorted(float(value) for column, value in enumerate(row) if column != at)
        chosen = sorted(float(row[column]) for column in range(BLOCKS) if mask[tuple(place)][column] and column != at)
        assert chosen == others[: budget - 1]


def test_equal_scores_go_by_distance_from_the_diagonal() -> None:
    mask = budget_mask(torch.zeros(1, 5, 5), 0.6)[0]
    assert mask[2].tolist() == [False, True, True, True, False]
    assert mask[0].tolist() == [True, True, True, False, False]


def test_heads_that_share_a_budget_lose_their_worst_head() -> None:
    scores = torch.tensor([0.2, 0.9, 0.1]).view(3, 1, 1).expand(3, BLOCKS, BLOCKS)
    mask = budget_mask(scores, 0.8, share_heads=True)  # 12 blocks of a row of 15
    assert mask.sum((0, 2)).eq(12).all()
    assert mask[0].all()
    assert mask[2].all()
    assert mask[1].sum(-1).eq(2).all()
    assert mask[:, range(BLOCKS), range(BLOCKS)].all()
    least = budget_mask(scores, 0.1, share_heads=True)
    assert torch.equal(least, torch.eye(BLOCKS, dtype=torch.bool).expand(3, BLOCKS, BLOCKS))


def test_masked_outputs_are_attention_over_the_kept_keys() -> None:
    logits, values = drawn(2).repeat_interleave(2, -1).repeat_interleave(2, -2), torch.rand(HEADS, 10, 4)
    mask = budget_mask(drawn(3), 0.5)
    got = masked_outputs(logits, values, mask, 2)
    for head, query in ((0, 0), (1, 5), (2, 9)):
        keys = [key for key in range(10) if mask[head, query // 2, key // 2]]
        expected = torch.softmax(logits[head, query, keys], -1) @ values[head, keys]
        assert torch.allclose(got[head, query], expected, atol=1e-6)
    assert torch.equal(masked_outputs(logits, values, torch.ones_like(mask), 2), torch.softmax(logits, -1) @ values)


# ---- sources


def test_each_source_is_what_it_says() -> None:
    model = load_classifier(DigitModel.HOLONOMY.path)
    with torch.no_grad():
        run = model.run(digits().pixels[split()[1][:2]])[1][1]
        layer = digit_layer(cast(FbtBlock, model.blocks[1]), run)
        scores = {source: layer.scores(source, 16) for source in Source}
        assert all(score.shape == (2, 2, 4, 4) for score in scores.values())
        assert run.transport is not None
        probes = torch.from_numpy(seeded_probes(2, 1, 32, pruning.SEED)).double()
        assert torch.equal(scores[Source.HOLONOMY], block_scores(run.transport, probes, 16))
        probability = torch.softmax(layer.logits, -1)
    assert torch.allclose(-scores[Source.ORACLE][1, 0, 2, 3], probability[1, 0, 32:48, 48:].mean())
    centred = layer.logits[0, 1, 16:32] - layer.logits[0, 1, 16:32].mean(-1, keepdim=True)
    assert torch.allclose(-scores[Source.MAGNITUDE][0, 1, 1, 0], centred[:, :16].amax(-1).mean())
    assert torch.allclose(scores[Source.CURVATURE][1, 1, :, 2], run.tensors.curvature[1, 1, 32:48].mean().expand(4))
    energy = scores[Source.NATURALITY]
    assert torch.equal(energy, energy[..., :1, :1].expand_as(energy))
    assert energy.min() > 0
    assert (energy[:, 0] != energy[:, 1]).any()


def test_a_model_without_transports_has_no_holonomy() -> None:
    model = load_classifier()
    with torch.no_grad():
        run = model.run(digits().pixels[:1])[1][0]
        layer = digit_layer(cast(FbtBlock, model.blocks[0]), run)
        with pytest.raises(DtpError, match=r"pruning\.source must be other than holonomy without transports"):
            layer.scores(Source.HOLONOMY, 16)


# ---- measures


def test_a_case_is_dense_at_one_and_the_oracle_beats_chance() -> None:
    points, agreement = digit_case("transport", 16, 24, (1.0, 0.9, 0.75, 0.5), (Source.ORACLE, Source.RANDOM))
    by = {(point.source, point.kept): point for point in points}
    assert sorted(by) == sorted((source, kept) for source in ("oracle", "random") for kept in (1.0, 0.75, 0.5))
    for source in ("oracle", "random"):
        assert by[source, 1.0].output_error < 1e-6
    for kept in (0.75, 0.5):
        assert 0.02 < by["oracle", kept].output_error < 0.8 * by["random", kept].output_error
    assert agreement["oracle"] == pytest.approx(1, abs=1e-9)
    assert abs(agreement["random"]) < 0.3
    assert {point.case for point in points} == {"digits, transport model, block 16"}
    assert by["oracle", 1.0].accuracy == by["random", 1.0].accuracy


def test_ranks_of_equal_values_are_shared() -> None:
    assert pruning._ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]


def test_minilm_layers_compute_the_models_own_attention() -> None:
    layers = pruning.minilm_layers(pruning.PROSE[:1], 32)
    from dtp.reference import minilm

    result = minilm.run(pruning.PROSE[:1], 32)
    assert len(layers) == 6
    energy = layers[2].scores(Source.NATURALITY, 16)
    assert energy.shape == (1, 12, 2, 2)
    assert 1e-3 < energy.min() < energy.max() < 1e4
    assert torch.equal(layers[3].values, result.layers[3][2])
    with pytest.raises(DtpError, match=r"pruning\.texts must be of 200 tokens or more, not \["):
        pruning.minilm_layers(["Short."], 200)


@pytest.mark.parametrize(
    ("images", "fractions", "message"),
    [
        (0, (1.0,), r"images must be an integer in 1\.\.899, not 0"),
        (900, (1.0,), r"images must be an integer in 1\.\.899, not 900"),
        (10, (1.0, 0.0), r"fractions must be numbers in \(0, 1\], not 0.0"),
    ],
)
def test_refused_studies(images: int, fractions: tuple[float, ...], message: str) -> None:
    with pytest.raises(DtpError, match=rf"^pruning\.{message}"):
        pruning.study(images, fractions)


# ---- files


def test_the_page_is_that_of_the_committed_figures() -> None:
    assert pruning.PAGE.read_text(encoding="utf-8") == pruning.markdown(pruning.load())


def test_the_committed_study_is_whole() -> None:
    result = pruning.load()
    cases = {point.case for point in result.points}
    assert len(cases) == 5
    for case in cases:
        sources = {point.source for point in result.points if point.case == case}
        wanted = Source if case.startswith("digits") else pruning.MINILM_SOURCES
        assert sources == {source.value for source in wanted}
        for source in sources:
            errors = [point.output_error for point in result.points if (point.case, point.source) == (case, source)]
            assert errors[0] == 0
            assert errors == sorted(errors)


def test_a_study_survives_its_file_and_is_drawn(tmp_path: Path) -> None:
    points = (
        Point("digits, transport model, block 8", "holonomy", 1.0, 0.0, 0.97),
        Point("digits, transport model, block 8", "holonomy", 0.5, 0.25, 0.5),
        Point("all-MiniLM-L6-v2, block 16", "random", 1.0, 0.0, None),
    )
    agreement = {"digits, transport model, block 8": {"holonomy": -0.25}, "all-MiniLM-L6-v2, block 16": {"random": 0.0}}
    study = Study(points, agreement, 7)
    pruning.save(study, tmp_path / "study.json")
    assert pruning.load(tmp_path / "study.json") == study
    page = pruning.markdown(study)
    assert "| kept | 1 | 0.5 | agreement with the oracle |" in page
    assert "| holonomy | 0.000 | 0.250 | -0.25 |" in page
    assert "| holonomy | 97.0 | 50.0 |" in page
    assert "7 held-out images" in page
    for name in ("one.svg", "two.svg"):
        pruning.picture(study, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "kept fraction" in (tmp_path / "one.svg").read_text()
