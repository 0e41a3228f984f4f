"""The row about the commutator kernel: array cycles against the multiplications that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtp.commutator import CommutatorMode
from dtp.workload import Mode
from sim.cycles.commutator import LayerShape, array_cycles, extra_multiplications, extra_passes, plain_passes
from tools.bench.cases import Case
from tools.bench.measured import Bench, Measured, Sheet

EXTRA_RATIO = 1.05
"""Most extra array cycles ÷ (named multiplications ÷ MACs of the array)."""


def commutator(bench: Bench, cases: Sequence[Case]) -> Measured:
    """Extra array cycles of both modes ÷ what the multiplications of SPEC §5 take, and ÷ the plain layer's."""
    figures: dict[str, Any] = {}
    rows = []
    for case in cases:
        config = case.config
        for tokens in case.tokens:
            for attention in case.modes:
                metric = Mode(attention).is_metric
                shape = LayerShape(tokens, case.model, case.heads, case.width[0], case.mlp, lifted=metric)
                plain = array_cycles(plain_passes(config, shape))
                rank = config.max_frame_rank if metric else 0
                for mode in CommutatorMode:
                    extra = array_cycles(extra_passes(config, shape, mode))
                    named = extra_multiplications(shape, mode, rank) / config.macs
                    layer = f"L = {tokens}, d_model = {case.model}, {case.heads} × {case.width[0]}, MLP {case.mlp}"
                    figures[f"{case.preset}, {layer}, {attention}, {mode}"] = {
                        "extra_cycles": extra, "named_cycles": named, "ratio": extra / named, "to_plain": extra / plain,
                    }  # fmt: skip
                    rows.append((
                        f"`{case.preset}`", layer, attention, str(mode), f"{extra:,}", f"{extra / named:.4f}",
                        f"{extra / plain:.3f}",
                    ))  # fmt: skip
    worst = {mode: max(f["ratio"] for name, f in figures.items() if name.endswith(mode)) for mode in CommutatorMode}
    plain_ratio = {
        mode: [f["to_plain"] for name, f in figures.items() if name.endswith(mode)] for mode in CommutatorMode
    }
    each = (
        f"{mode}: {worst[mode]:.4f} at most, {min(plain_ratio[mode]):.2f} to {max(plain_ratio[mode]):.2f} plain layers"
        for mode in CommutatorMode
    )
    head = ("preset", "layer", "attention", "mode", "extra array cycles", "÷ named", "÷ plain layer")
    return Measured(
        "; ".join(each),
        all(ratio <= EXTRA_RATIO for ratio in worst.values()),
        figures,
        ("array steps, held against those of the RTL by tests; `sim.cycles.commutator.program_timing` has all cycles",),
        (Sheet("Extra array cycles of the commutator", head, tuple(rows)),),
    )
