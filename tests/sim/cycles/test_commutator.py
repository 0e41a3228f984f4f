"""Array cycles of the kernel against the multiplications of SPEC §5."""

from __future__ import annotations

import pytest

from dtp.commutator import CommutatorMode
from dtp.config import Config
from dtp.errors import DtpError
from sim.cycles.commutator import LayerShape, array_cycles, extra_multiplications, extra_passes, plain_passes

SHAPES = {
    "ecp5-85k": [LayerShape(length, 64, 1, 64, 256) for length in (64, 128, 256)] + [LayerShape(128, 128, 4, 32, 512)],
    "wide": [LayerShape(128, 64, 1, 64, 256), LayerShape(128, 384, 12, 32, 1536), LayerShape(256, 512, 8, 64, 2048)],
    "tiny": [LayerShape(32, 16, 1, 16, 64), LayerShape(64, 16, 2, 8, 64)],
}
CASES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


@pytest.mark.parametrize("mode", CommutatorMode)
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_extra_cycles_are_the_named_multiplications(name: str, shape: LayerShape, mode: CommutatorMode) -> None:
    config = Config.load(name)
    passes = extra_passes(config, shape, mode)
    named = extra_multiplications(shape, mode)
    assert array_cycles(passes) * config.macs <= 1.05 * named
    # Sizes that are multiples of the array's waste nothing, and the passes are those that SPEC §5 names.
    assert array_cycles(passes) * config.macs == sum(item.multiplications for item in passes) == named
    assert len(passes) == {CommutatorMode.FROZEN: 7, CommutatorMode.FULL: 10}[mode]


@pytest.mark.parametrize("mode", CommutatorMode)
def test_ratio_to_the_plain_layer_is_a_constant(mode: CommutatorMode) -> None:
    """Claim 1 of SPEC §2: at most 1.4 (frozen) and 1.6 (full) plain layers more, less for long sequences."""
    config = Config.load("ecp5-85k")
    ratios = []
    for tokens in (64, 128, 256, 512):
        shape = LayerShape(tokens, 64, 1, 64, 256)
        ratios.append(
            array_cycles(extra_passes(config, shape, mode)) / array_cycles(plain_passes(config, shape))
        )
    low, high = (0.8, 1.4) if mode is CommutatorMode.FROZEN else (1.2, 1.6)
    assert low < min(ratios) and max(ratios) < high
    assert ratios == sorted(ratios, reverse=True)


def test_ragged_sizes_and_lifted_scores() -> None:
    config = Config.load("ecp5-85k")
    shape = LayerShape(100, 60, 1, 60, 250, lifted=True)
    passes = extra_passes(config, shape, CommutatorMode.FULL)
    by_name = {item.name: item for item in passes}
    assert by_name["scores of h + Res(h)"].steps == 13 * 7 * (4 + 1) * 16
    assert by_name["values of h + Res(h)"].steps == 13 * 4 * 4 * 16
    assert array_cycles(passes) * config.macs > extra_multiplications(shape, CommutatorMode.FULL, 3)


def test_refusals() -> None:
    config = Config.load("tiny")
    with pytest.raises(DtpError, match=r"^LayerShape\.mlp must be in 1…max_mlp 64, not 65$"):
        extra_passes(config, LayerShape(8, 16, 1, 16, 65), CommutatorMode.FULL)
    with pytest.raises(DtpError, match=r"^LayerShape\.tokens must be in 1…max_tokens 64, not 0$"):
        plain_passes(config, LayerShape(0, 16, 1, 16, 64))
