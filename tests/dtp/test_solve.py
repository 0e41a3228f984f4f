"""Small solves: reciprocal, golden model against float64, the program against the golden model, refusals."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from dtp.config import REGISTER_BITS
from dtp.errors import DtpError
from dtp.fixed import Int, overflows, round_shift, saturate
from dtp.solve import (
    BLOCK_RECIPROCAL_ERROR,
    CONSTANTS,
    FINE_BITS,
    MINUS_UNIT_PAIR,
    OUTPUTS,
    PIVOT_FLOOR_BITS,
    RECIPROCAL_COARSE,
    RECIPROCAL_FINE,
    REGISTERS,
    RESULT_SLOTS,
    UNIT_DIAGONAL,
    UNIT_PAIR,
    WEIGHTS,
    ZERO,
    MiddleMode,
    Operation,
    OperationKind,
    block_reciprocal,
    gram_index,
    gram_words,
    program,
    scale,
    solve,
)

GUARD = 6
LOADS = (OperationKind.LOAD_GRAM, OperationKind.LOAD_PROJECTION)
SLOTS = ((0, 1), (0,), (1,))


def run_program(
    mode: MiddleMode, groups: int, gram: Int, h: Int, *, slots: tuple[int, ...] = (0, 1), unit: int, gram_shift: int,
    weights: tuple[int, ...], tokens: int = 1,
) -> tuple[Int, bool, bool]:  # fmt: skip
    """Tokens through the list of operations, turn by turn: m (2, columns) of the last, pivot and range error of any.

    Of several ``tokens``, ``gram`` and ``h`` have an axis for them, the first of ``gram``, the second of ``h``.
    """
    registers = np.full(REGISTERS, 1 << 40, dtype=np.int64)
    registers[:CONSTANTS] = 0
    registers[UNIT_DIAGONAL] = unit if mode is MiddleMode.WOODBURY else 0
    registers[UNIT_PAIR] = unit if mode is MiddleMode.CAYLEY else 0
    registers[MINUS_UNIT_PAIR] = -registers[UNIT_PAIR]
    registers[WEIGHTS : WEIGHTS + 4] = weights
    columns = 4 * groups
    entries = {gram_index(i, j): (i, j) for i in range(columns) for j in range(i, columns)}
    grams, hs = (gram, h) if tokens > 1 else (gram[None], h[:, None])
    operations = program(mode, groups, slots)
    r = e = 0
    pivot = saturated = False
    written: list[tuple[int, int, int]] = []
    latched = 0
    for slot, (token, op) in enumerate(product(range(tokens), operations)):
        for due, register, value in list(written):
            if due <= slot:
                registers[register] = value
                written.remove((due, register, value))
        a0, b0, a1, b1, c = (int(registers[n]) for n in (op.a0, op.b0, op.a1, op.b1, op.c))
        q = a0 * b0 - a1 * b1 if op.subtract else a0 * b0 + a1 * b1
        match op.kind:
            case OperationKind.NONE:
                continue
            case OperationKind.DETERMINANT:
                low = q < 1 << PIVOT_FLOOR_BITS
                pivot |= low
                value, exponent = block_reciprocal([max(q, 1 << PIVOT_FLOOR_BITS)])
                r, e = 0 if low else int(value[0]), int(exponent[0])
                latched = slot + RESULT_SLOTS
                continue
            case OperationKind.LOAD_GRAM:
                q = int(round_shift(int(grams[token][entries[op.a0]]) << GUARD, gram_shift))
            case OperationKind.LOAD_PROJECTION:
                q = int(hs[op.a0 // 8, token, op.a0 % 8])
            case OperationKind.MULTIPLY:
                q = int(round_shift(q, 15))
            case OperationKind.INVERSE:
                assert slot >= latched and op.b0 == op.a1 == op.b1 == ZERO
                q = int(round_shift(a0 * r, e - 13))
        exact = c + (-q if op.negative else q)
        saturated |= bool(overflows(exact, REGISTER_BITS))
        written.append((slot + RESULT_SLOTS, op.d, int(saturate(exact, REGISTER_BITS))))
    for _, register, value in written:
        registers[register] = value
    return registers[OUTPUTS : OUTPUTS + 16].reshape(2, 8)[:, :columns], pivot, saturated


def _case(seed: int, mode: MiddleMode, size: int, count: int, spread: float) -> tuple[Int, Int, int, int]:
    """Gram entries of random factors, h of both slots, unit and gram shift."""
    random = np.random.default_rng(seed)
    v = np.rint(random.normal(size=(count, 16, size)) * 25).astype(np.int64)
    gram = np.einsum("nij,nik->njk", v, v)
    h = random.integers(-20000, 20001, (2, count, size))
    return gram, h, round(spread * 30000), 6


@pytest.mark.parametrize("size", [2, 4, 6, 8])
@pytest.mark.parametrize("mode", [MiddleMode.WOODBURY, MiddleMode.CAYLEY])
def test_against_float64(mode: MiddleMode, size: int) -> None:
    for seed in range(4):
        gram, h, unit, shift = _case(seed, mode, size, 200, 1.0)
        matrix, clipped = gram_words(gram, mode, unit, shift, GUARD)
        assert not clipped.any()
        result = solve(matrix, h[0], h[1])
        assert not result.pivot.any() and not result.range.any()
        for m, slot, g in ((result.plain, 0, matrix), (result.transposed, 1, matrix.transpose(0, 2, 1))):
            exact = np.linalg.solve(g / 2.0**15, h[slot][..., None])[..., 0]
            error = np.abs(m - exact)
            assert error.max() <= 2 * size and np.sqrt((error**2).mean()) <= 0.3 * size
            assert np.abs(exact).max() > 5000


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mode", list(MiddleMode))
def test_program_is_the_formulas(mode: MiddleMode, groups: int, slots: tuple[int, ...]) -> None:
    """Also where a pivot is below the floor and where words saturate."""
    size = 4 * groups
    flags = set()
    for seed, spread in enumerate((1.0, 0.3, 0.02, 0.0)):
        gram, h, unit, shift = _case(seed, mode, size, 8, spread)
        if spread == 0.0:
            gram[:4] = 0
        weights = (30000, -7000, 131071, 9)
        h[[slot for slot in (0, 1) if slot not in slots]] = 0
        if mode.solves:
            matrix, clipped = gram_words(gram, mode, unit, shift, GUARD)
            result = solve(matrix, h[0], h[1])
        else:
            result = scale(mode, weights, h[0], h[1])
            clipped = np.zeros(8, dtype=np.bool_)
        for token in range(8):
            m, pivot, saturated = run_program(
                mode, groups, gram[token], h[:, token], slots=slots, unit=unit, gram_shift=shift, weights=weights
            )  # fmt: skip
            for slot in slots:
                assert m[slot].tolist() == (result.plain, result.transposed)[slot][token].tolist()
            assert pivot == result.pivot[token]
            assert saturated == (result.range[token] | clipped[token])
            flags.add((pivot, saturated))
    assert len(flags) >= (3 if mode.solves else 1)


def test_reciprocal_of_every_fraction() -> None:
    det = np.arange(1 << 15, 1 << 16)
    r, e = block_reciprocal(det)
    assert np.all(e == 15) and r.max() < 1 << 17
    error = np.abs(r * det / 2.0 ** (17 + 15) - 1)
    assert BLOCK_RECIPROCAL_ERROR / 2 < error.max() <= BLOCK_RECIPROCAL_ERROR
    for exponent in (14, 20, 35):
        shifted = (1 << exponent) + (np.arange(64) << exponent >> 6)
        value, found = block_reciprocal(shifted)
        assert np.all(found == exponent)
        assert np.abs(value * shifted / 2.0 ** (17 + exponent) - 1).max() <= BLOCK_RECIPROCAL_ERROR
    assert len(RECIPROCAL_COARSE) == len(RECIPROCAL_FINE) == 1024
    assert -(1 << (FINE_BITS - 1)) <= min(RECIPROCAL_FINE) and max(RECIPROCAL_FINE) < 1 << (FINE_BITS - 1)


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mode", list(MiddleMode))
def test_schedule(mode: MiddleMode, groups: int, slots: tuple[int, ...]) -> None:
    """Every register is written once, before it is read; no turn is wasted where chains are short."""
    operations = program(mode, groups, slots)
    written: dict[int, int] = dict.fromkeys(range(CONSTANTS), -RESULT_SLOTS)
    for slot, op in enumerate(operations):
        if op.kind is OperationKind.NONE:
            continue
        sources = (op.c,) if op.kind in LOADS else (op.a0, op.b0, op.a1, op.b1, op.c)
        assert all(written[n] + RESULT_SLOTS <= slot for n in sources)
        if op.kind is not OperationKind.DETERMINANT:
            assert op.d not in written and OUTPUTS <= op.d < REGISTERS
            written[op.d] = slot
    assert all(OUTPUTS + 8 * slot + c in written for slot in slots for c in range(4 * groups))
    assert operations[-1] != Operation()
    own = mode.solves and groups == 1
    assert any(OUTPUTS + 8 * slot in written for slot in (0, 1) if slot not in slots) == (not own and len(slots) == 1)
    if own and len(slots) == 1:
        assert len(operations) == (47, 45)[slots[0]] and sum(op != Operation() for op in operations) == 42
    else:
        assert len(operations) == {(True, 1): 54, (True, 2): 220, (False, 1): 16, (False, 2): 32}[mode.solves, groups]


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mode", list(MiddleMode))
def test_a_program_behind_another(mode: MiddleMode, groups: int, slots: tuple[int, ...]) -> None:
    """The next token's program follows without a gap, on the registers and the determinant of the one before."""
    gram, h, unit, shift = _case(7, mode, 4 * groups, 3, 1.0)
    weights = (30000, -7000, 131071, 9)
    h[[slot for slot in (0, 1) if slot not in slots]] = 0
    alone = [
        run_program(mode, groups, gram[n], h[:, n], slots=slots, unit=unit, gram_shift=shift, weights=weights)[0]
        for n in range(3)
    ]
    behind = run_program(
        mode, groups, gram, h, slots=slots, unit=unit, gram_shift=shift, weights=weights, tokens=3
    )[0]  # fmt: skip
    for slot in slots:
        assert behind[slot].tolist() == alone[2][slot].tolist()


@pytest.mark.parametrize(
    ("matrix", "plain", "message"),
    [
        ((1, 10, 10), (1, 10), r"solve\.matrix must be of shape \(n, k, k\), k even and at most 8, not \(1, 10, 10\)"),
        ((1, 3, 3), (1, 3), r"solve\.matrix must be of shape \(n, k, k\), k even and at most 8, not \(1, 3, 3\)"),
        ((2, 4, 4), (1, 4), r"solve\.plain must be of shape \(2, 4\), not \(1, 4\)"),
    ],
)
def test_refusals(matrix: tuple[int, ...], plain: tuple[int, ...], message: str) -> None:
    with pytest.raises(DtpError, match=f"^{message}$"):
        solve(np.zeros(matrix), np.zeros(plain), np.zeros(matrix[:2]))
