"""Small solves G m = h and Gᵀ m = h with k <= 8 columns, in fixed point by 2 × 2 blocks [SPEC §2, GR §10].

G is VᵀV + unit·I (Woodbury: symmetric positive definite) or VᵀV + unit·J (Cayley: a skew form on pairs of columns).
Columns are stored pair by pair, so that J is block diagonal; block elimination in that order needs no pivot search, for
a leading block and every Schur complement have a symmetric part that is positive semidefinite, and a determinant of
at least unit². docs/transport.md, section 3, is the arithmetic; the golden model here follows its formulas,
:func:`program` is the same as a list of operations, which the hardware runs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtp.config import MANTISSA_BITS, REGISTER_BITS, TABLE_BITS
from dtp.errors import must
from dtp.fixed import Int, overflows, round_shift, saturate

TILE_COLUMNS: Final = 4
"""Factor columns of a tile; a pass has one or two tiles side by side."""
MAX_COLUMNS: Final = 8
"""Largest k of a solve and of a pass."""
PRODUCT_SHIFT: Final = 15
"""Words of a solve are fractions of 2^15 wherever two of them are multiplied."""
UNIT_PAIRS: Final = MAX_COLUMNS // 2
"""Pairs of columns, one weight each."""
PIVOT_FLOOR_BITS: Final = 14
"""A block's determinant (a fraction of 2^30) below ``2^PIVOT_FLOOR_BITS`` is a pivot error."""
LEAST_UNIT: Final = 1 << (2 * PRODUCT_SHIFT - REGISTER_BITS + 1)
"""A smaller ``unit`` can make an inverse of a pivot that leaves its words."""
FRACTION_BITS: Final = 15
"""Bits behind a determinant's leading one that the reciprocal looks at."""
_HALF_BITS: Final = FRACTION_BITS - TABLE_BITS


class MiddleMode(IntEnum):
    """What M is (docs/transport.md, 3)."""

    SCALE = 0
    SYMPLECTIC = 1
    WOODBURY = 2
    CAYLEY = 3

    @property
    def solves(self) -> bool:
        """Whether M is an inverse."""
        return self in (MiddleMode.WOODBURY, MiddleMode.CAYLEY)


class TransportError(IntFlag):
    """Sticky flags of a job."""

    NONE = 0
    PIVOT = 1
    RANGE = 2
    JOB = 4


def _reciprocal(fraction: float) -> float:
    return float(1 << MANTISSA_BITS) / (1 + fraction)


def _coarse() -> tuple[int, ...]:
    step = 2.0**-TABLE_BITS
    top = (1 << MANTISSA_BITS) - 1
    return tuple(min(top, round(_reciprocal((n + 0.5) * step))) for n in range(1 << TABLE_BITS))


def _fine() -> tuple[int, ...]:
    values = []
    for high in range(1 << _HALF_BITS):
        for low in range(1 << _HALF_BITS):
            middle = (high + 0.5) * 2.0**-_HALF_BITS
            slope = -_reciprocal(middle) / (1 + middle)
            values.append(round(slope * (low + 0.5 - (1 << _HALF_BITS) / 2) * 2.0**-FRACTION_BITS))
    return tuple(values)


RECIPROCAL_COARSE: Final = _coarse()
"""By the top 10 of the 15 bits: ``2^17 / (1 + f)`` in the middle of what they leave open, below 2^17."""
RECIPROCAL_FINE: Final = _fine()
"""By the top 5 and the low 5 bits: what the low bits add along the slope there."""
FINE_BITS: Final = 1 + max(max(RECIPROCAL_FINE), -1 - min(RECIPROCAL_FINE)).bit_length()
"""Signed width of the fine table."""
BLOCK_RECIPROCAL_ERROR: Final = 1.05 * 2.0**-15
"""Relative error of the reciprocal never exceeds it."""


def block_reciprocal(determinants: ArrayLike) -> tuple[Int, Int]:
    """r and e of positive determinants: ``1 / det ≈ r / 2^(17 + e)``."""
    det = np.asarray(determinants, dtype=np.int64)
    exponent = np.zeros_like(det)
    rest = det.copy()
    for step in (32, 16, 8, 4, 2, 1):
        high = rest >= np.int64(1) << step
        exponent += np.where(high, step, 0)
        rest = np.where(high, rest >> step, rest)
    fraction = np.where(
        exponent >= FRACTION_BITS,
        det >> np.maximum(exponent - FRACTION_BITS, 0),
        det << np.maximum(FRACTION_BITS - exponent, 0),
    ) & ((1 << FRACTION_BITS) - 1)
    top, low = fraction >> _HALF_BITS, fraction & ((1 << _HALF_BITS) - 1)
    coarse, fine = np.asarray(RECIPROCAL_COARSE), np.asarray(RECIPROCAL_FINE)
    return coarse[top] + fine[(top >> _HALF_BITS << _HALF_BITS) | low], exponent


# ---- golden ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SolveResult:
    """m of both slots, (n, k), and which solves had a pivot below the floor or a saturated word, (n,)."""

    plain: Int
    transposed: Int
    pivot: NDArray[np.bool_]
    range: NDArray[np.bool_]


class _Words:
    """Operations on 18-bit words that remember what was saturated."""

    def __init__(self, count: int) -> None:
        self.saturated = np.zeros(count, dtype=np.bool_)

    def keep(self, value: Int) -> Int:
        self.saturated |= overflows(value, REGISTER_BITS)
        return saturate(value, REGISTER_BITS)

    def minus(self, c: Int | int, a0: Int, b0: Int, a1: Int, b1: Int) -> Int:
        return self.keep(c - round_shift(a0 * b0 + a1 * b1, PRODUCT_SHIFT))

    def plus(self, a0: Int, b0: Int, a1: Int, b1: Int) -> Int:
        return self.keep(round_shift(a0 * b0 + a1 * b1, PRODUCT_SHIFT))


def gram_words(
    gram: ArrayLike, mode: MiddleMode, unit: int, gram_shift: int, guard: int
) -> tuple[Int, NDArray[np.bool_]]:
    """G of each token, (n, k, k) of 18 bits, from the exact VᵀV; and where a word was saturated, (n,)."""
    exact = np.asarray(gram, dtype=np.int64)
    size = exact.shape[-1]
    form = np.eye(size, dtype=np.int64)
    if mode is MiddleMode.CAYLEY:
        form = np.kron(np.eye(size // 2, dtype=np.int64), np.array([[0, -1], [1, 0]]))
    value = round_shift(exact << guard, gram_shift) + unit * form
    return saturate(value, REGISTER_BITS), np.asarray(overflows(value, REGISTER_BITS).any(axis=(1, 2)))


def solve(matrix: ArrayLike, plain: ArrayLike, transposed: ArrayLike) -> SolveResult:
    """G m = h and Gᵀ m = h of many tokens in the words of docs/transport.md, 3.

    Parameters
    ----------
    matrix: (n, k, k), G, 18-bit words, k even and at most 8
    plain, transposed: (n, k), h of the slots, 18-bit words

    Raises
    ------
    DtpError: k is odd or above 8, or shapes that do not fit.
    """
    g = np.asarray(matrix, dtype=np.int64)
    h0, h1 = (np.asarray(h, dtype=np.int64) for h in (plain, transposed))
    if g.ndim != 3 or g.shape[1] != g.shape[2] or g.shape[1] % 2 or not 2 <= g.shape[1] <= MAX_COLUMNS:
        raise must("solve", "matrix", f"of shape (n, k, k), k even and at most {MAX_COLUMNS}", g.shape)
    for name, h in (("plain", h0), ("transposed", h1)):
        if h.shape != g.shape[:2]:
            raise must("solve", name, f"of shape {g.shape[:2]}", h.shape)
    count, size = h0.shape
    blocks = size // 2
    words = _Words(count)
    pivot = np.zeros(count, dtype=np.bool_)
    G = [[g[:, i, j] for j in range(size)] for i in range(size)]
    N: list[list[list[Int]]] = []
    L: dict[tuple[int, int], Int] = {}
    for p in range(blocks):
        a, b = 2 * p, 2 * p + 1
        det = G[a][a] * G[b][b] - G[a][b] * G[b][a]
        low = det < 1 << PIVOT_FLOOR_BITS
        pivot |= low
        r, e = block_reciprocal(np.where(low, 1 << PIVOT_FLOOR_BITS, det))
        r = np.where(low, 0, r)
        shift = e - (2 * PRODUCT_SHIFT - MANTISSA_BITS)
        N.append(
            [
                [words.keep(round_shift(G[b][b] * r, shift)), words.keep(-round_shift(G[a][b] * r, shift))],
                [words.keep(-round_shift(G[b][a] * r, shift)), words.keep(round_shift(G[a][a] * r, shift))],
            ]
        )
        for i in range(b + 1, size):
            for j in range(2):
                L[i, a + j] = words.plus(G[i][a], N[p][0][j], G[i][b], N[p][1][j])
        for i in range(b + 1, size):
            for j in range(b + 1, size):
                G[i][j] = words.minus(G[i][j], L[i, a], G[a][j], L[i, b], G[b][j])
    y0 = [h0[:, c] for c in range(size)]
    for p in range(blocks):
        for i in range(2 * p + 2, size):
            y0[i] = words.minus(y0[i], L[i, 2 * p], y0[2 * p], L[i, 2 * p + 1], y0[2 * p + 1])
    m0: list[Int] = [np.zeros(count, dtype=np.int64)] * size
    for p in reversed(range(blocks)):
        a, b = 2 * p, 2 * p + 1
        for j in range(2 * p + 2, size, 2):
            for c in (a, b):
                y0[c] = words.minus(y0[c], G[c][j], m0[j], G[c][j + 1], m0[j + 1])
        for c in range(2):
            m0[a + c] = words.plus(N[p][c][0], y0[a], N[p][c][1], y0[b])
    y1 = [h1[:, c] for c in range(size)]
    for p in range(blocks):
        a, b = 2 * p, 2 * p + 1
        for i in range(0, 2 * p, 2):
            for c in (a, b):
                y1[c] = words.minus(y1[c], G[i][c], y1[i], G[i + 1][c], y1[i + 1])
        y1[a], y1[b] = (words.plus(N[p][0][c], y1[a], N[p][1][c], y1[b]) for c in range(2))
    m1 = y1
    for p in reversed(range(blocks)):
        for j in range(2 * p + 2, size, 2):
            for c in (2 * p, 2 * p + 1):
                m1[c] = words.minus(m1[c], L[j, c], m1[j], L[j + 1, c], m1[j + 1])
    return SolveResult(np.stack(m0, axis=1), np.stack(m1, axis=1), pivot, words.saturated)


def scale(mode: MiddleMode, weights: ArrayLike, plain: ArrayLike, transposed: ArrayLike) -> SolveResult:
    """m of a mode without a solve; ``weights`` has one 18-bit word a pair of columns."""
    w = np.repeat(np.asarray(weights, dtype=np.int64), 2)
    result: list[Int] = []
    words = _Words(len(np.asarray(plain)))
    for slot, h in enumerate((np.asarray(plain, dtype=np.int64), np.asarray(transposed, dtype=np.int64))):
        size = h.shape[1]
        if mode is MiddleMode.SYMPLECTIC:
            sign = np.tile([1, -1], size // 2) * (1 if slot == 0 else -1)
            h = h.reshape(-1, size // 2, 2)[:, :, ::-1].reshape(-1, size)
        else:
            sign = np.ones(size, dtype=np.int64)
        exact = sign * round_shift(h * w[:size], PRODUCT_SHIFT)
        words.saturated |= overflows(exact, REGISTER_BITS).any(axis=1)
        result.append(saturate(exact, REGISTER_BITS))
    return SolveResult(result[0], result[1], np.zeros(len(words.saturated), dtype=np.bool_), words.saturated)


# ---- the program -------------------------------------------------------------------------------------------------


class OperationKind(IntEnum):
    """What an operation makes of its two products q, and where the result goes."""

    NONE = 0
    MULTIPLY = 1
    """c ± round_shift(q, 15)."""
    INVERSE = 2
    """c ± round_shift(a0·r, e − 13), r and e of the last determinant."""
    DETERMINANT = 3
    """q to the reciprocal; no result."""
    LOAD_GRAM = 4
    """c + round_shift(entry ``a0`` of the Gram words << guard, gram_shift)."""
    LOAD_PROJECTION = 5
    """round_shift(projection ``a0``, project_shift)."""


@dataclass(frozen=True)
class Operation:
    """d = saturate(c ± shift(a0·b0 ± a1·b1)); registers by number.

    Members
    -------
    a0, b0, a1, b1, c, d: registers; a0 is the index of a load
    subtract: q = a0·b0 − a1·b1
    negative: the shifted q counts negative
    """

    kind: OperationKind = OperationKind.NONE
    a0: int = 0
    b0: int = 0
    a1: int = 0
    b1: int = 0
    c: int = 0
    d: int = 0
    subtract: bool = False
    negative: bool = False


ZERO, UNIT_DIAGONAL, UNIT_PAIR, MINUS_UNIT_PAIR = range(4)
"""Registers that hold 0, ``unit`` of a Woodbury job, ``unit`` and −``unit`` of a Cayley job (0 in the other modes)."""
WEIGHTS: Final = 4
"""First of the registers that hold the weights."""
CONSTANTS: Final = 8
"""Registers written when a job starts; what is loaded and made lies behind the outputs."""
OUTPUTS: Final = 16
"""First of 16 registers that are m: slot · 8 + column."""
REGISTERS: Final = 256
"""Registers of a thread."""
THREADS: Final = 4
"""Tokens that a solve lane runs in turn, an operation a cycle."""
BOTH_SLOTS: Final = (0, 1)
"""Plain and transposed."""
RESULT_SLOTS: Final = 3
"""From an operation to the first of the same token that can read its result, in turns of :data:`THREADS` cycles."""
GRAM_PAIRS: Final = tuple((i, j) for i in range(TILE_COLUMNS) for j in range(i, TILE_COLUMNS))
"""Pairs (p, q) of columns of two tiles whose products are summed at once."""


def gram_index(a: int, b: int) -> int:
    """Where the Gram entry of the columns a <= b is kept: 16 · phase + pair.

    The phases pair the tiles (0, 0), (1, 1), (0, 1), (1, 0); those of two tiles overlap on their diagonal.
    """
    (tile_a, i), (tile_b, j) = divmod(a, TILE_COLUMNS), divmod(b, TILE_COLUMNS)
    if tile_a == tile_b:
        return 16 * tile_a + GRAM_PAIRS.index((i, j))
    return 32 + GRAM_PAIRS.index((i, j)) if i <= j else 48 + GRAM_PAIRS.index((j, i))


_Matrix = dict[tuple[int, int], int]


class _Builder:
    """Operations in the order of the formulas, every result in a register of its own."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._next = OUTPUTS + 2 * MAX_COLUMNS

    def add(self, kind: OperationKind, *, d: int | None = None, output: int | None = None, **fields: int) -> int:
        if output is not None:
            d = OUTPUTS + output
        elif d is None:
            d, self._next = self._next, self._next + 1
        values: dict[str, int | bool] = {
            name: bool(value) if name in ("subtract", "negative") else value for name, value in fields.items()
        }
        self.operations.append(Operation(kind, d=d, **values))  # type: ignore[arg-type]
        return d

    def multiply(
        self, a0: int, b0: int, a1: int = ZERO, b1: int = ZERO, *, c: int = ZERO, negative: bool = False,
        output: int | None = None,
    ) -> int:  # fmt: skip
        return self.add(OperationKind.MULTIPLY, a0=a0, b0=b0, a1=a1, b1=b1, c=c, negative=negative, output=output)


def _solve_operations(size: int, slots: Collection[int]) -> list[Operation]:
    make = _Builder()
    kind = OperationKind
    G: _Matrix = {}
    for i in range(size):
        for j in range(i, size):
            index = gram_index(i, j)
            if i // 2 != j // 2:
                G[i, j] = G[j, i] = make.add(kind.LOAD_GRAM, a0=index)
            elif i == j:
                G[i, j] = make.add(kind.LOAD_GRAM, a0=index, c=UNIT_DIAGONAL)
            else:
                G[i, j] = make.add(kind.LOAD_GRAM, a0=index, c=MINUS_UNIT_PAIR)
                G[j, i] = make.add(kind.LOAD_GRAM, a0=index, c=UNIT_PAIR)
    y = {
        slot: [make.add(kind.LOAD_PROJECTION, a0=slot * MAX_COLUMNS + c) for c in range(size)] for slot in sorted(slots)
    }
    N: _Matrix = {}
    L: _Matrix = {}
    for a in range(0, size, 2):
        b = a + 1
        make.add(kind.DETERMINANT, d=ZERO, a0=G[a, a], b0=G[b, b], a1=G[a, b], b1=G[b, a], subtract=True)
        N[a, a] = make.add(kind.INVERSE, a0=G[b, b])
        N[b, a] = make.add(kind.INVERSE, a0=G[b, a], negative=True)
        N[a, b] = make.add(kind.INVERSE, a0=G[a, b], negative=True)
        N[b, b] = make.add(kind.INVERSE, a0=G[a, a])
        for i in range(b + 1, size):
            for j in (a, b):
                L[i, j] = make.multiply(G[i, a], N[a, j], G[i, b], N[b, j])
        updated = {
            (i, j): make.multiply(L[i, a], G[a, j], L[i, b], G[b, j], c=G[i, j], negative=True)
            for i in range(b + 1, size)
            for j in range(b + 1, size)
        }
        G |= updated
    if 0 in slots:
        _solve_plain(make, size, G, N, L, y[0])
    if 1 in slots:
        _solve_transposed(make, size, G, N, L, y[1])
    return make.operations


def _solve_plain(make: _Builder, size: int, G: _Matrix, N: _Matrix, L: _Matrix, y0: list[int]) -> None:
    for a in range(0, size, 2):
        for i in range(a + 2, size):
            y0[i] = make.multiply(L[i, a], y0[a], L[i, a + 1], y0[a + 1], c=y0[i], negative=True)
    m0: dict[int, int] = {}
    for a in reversed(range(0, size, 2)):
        for j in range(a + 2, size, 2):
            for c in (a, a + 1):
                y0[c] = make.multiply(G[c, j], m0[j], G[c, j + 1], m0[j + 1], c=y0[c], negative=True)
        for c in (a, a + 1):
            m0[c] = make.multiply(N[c, a], y0[a], N[c, a + 1], y0[a + 1], output=c)


def _solve_transposed(make: _Builder, size: int, G: _Matrix, N: _Matrix, L: _Matrix, y1: list[int]) -> None:
    for a in range(0, size, 2):
        for i in range(0, a, 2):
            for c in (a, a + 1):
                y1[c] = make.multiply(G[i, c], y1[i], G[i + 1, c], y1[i + 1], c=y1[c], negative=True)
        last = a + 2 == size
        y1[a], y1[a + 1] = (
            make.multiply(N[a, c], y1[a], N[a + 1, c], y1[a + 1], output=MAX_COLUMNS + c if last else None)
            for c in (a, a + 1)
        )
    for a in reversed(range(0, size - 2, 2)):
        for j in range(a + 2, size, 2):
            for c in (a, a + 1):
                output = MAX_COLUMNS + c if j + 2 == size else None
                y1[c] = make.multiply(L[j, c], y1[j], L[j + 1, c], y1[j + 1], c=y1[c], negative=True, output=output)


def _scale_operations(size: int, *, symplectic: bool) -> list[Operation]:
    make = _Builder()
    for slot in range(2):
        h = [make.add(OperationKind.LOAD_PROJECTION, a0=slot * MAX_COLUMNS + c) for c in range(size)]
        for c in range(size):
            make.multiply(
                h[c ^ symplectic],
                WEIGHTS + c // 2,
                negative=symplectic and (c + slot) % 2 == 1,
                output=slot * MAX_COLUMNS + c,
            )
    return make.operations


def _schedule(operations: list[Operation]) -> tuple[Operation, ...]:
    """One operation a turn; a result is read :data:`RESULT_SLOTS` later. Planned from the front and from the back."""
    needs = _needs(operations)
    behind: dict[int, set[int]] = {n: set() for n in range(len(operations))}
    for n, before in needs.items():
        for one in before:
            behind[one].add(n)
    front = _turns(needs)
    # From the back, those that read an operation's result come before it.
    last = len(operations) - 1
    back = _turns({last - n: {last - one for one in after} for n, after in behind.items()})[::-1]
    turns = min(front, [None if n is None else last - n for n in back], key=len)
    return tuple(Operation() if n is None else operations[n] for n in turns)


def _needs(operations: list[Operation]) -> dict[int, set[int]]:
    """By operation, those that must come before it."""
    makers: dict[int, int] = {}
    needs: dict[int, set[int]] = {n: set() for n in range(len(operations))}
    determinant = -1
    inverses: list[int] = []
    for n, op in enumerate(operations):
        loads = op.kind in (OperationKind.LOAD_GRAM, OperationKind.LOAD_PROJECTION)
        for register in (op.c,) if loads else (op.a0, op.b0, op.a1, op.b1, op.c):
            if register in makers:
                needs[n].add(makers[register])
        if op.kind is OperationKind.DETERMINANT:
            # The exponent of the block before is in use until its inverse is made.
            needs[n] |= set(inverses)
            determinant = n
        elif op.kind is OperationKind.INVERSE:
            needs[n].add(determinant)
            inverses.append(n)
        if op.d:
            makers[op.d] = n
    return needs


def _turns(needs: dict[int, set[int]]) -> list[int | None]:
    """What is done in each turn: of what can be, that with the longest chain behind it, the lowest number of these."""
    chain = dict.fromkeys(needs, 1)
    for n in sorted(needs, reverse=True):
        for before in needs[n]:
            chain[before] = max(chain[before], chain[n] + RESULT_SLOTS)
    turns: list[int | None] = []
    issued: dict[int, int] = {}
    while len(issued) < len(needs):
        ready = [
            n
            for n in needs
            if n not in issued and all(b in issued and issued[b] + RESULT_SLOTS <= len(turns) for b in needs[n])
        ]
        best = max(ready, key=lambda n: (chain[n], -n), default=None)
        if best is not None:
            issued[best] = len(turns)
        turns.append(best)
    return turns


@cache
def program(mode: MiddleMode, groups: int, slots: tuple[int, ...] = BOTH_SLOTS) -> tuple[Operation, ...]:
    """Operations of a token, turn by turn; the two modes that solve have the same. The last turn is never empty.

    ``slots``: those whose m is made; a solve of one tile leaves out what the other one alone needs, others make both.
    """
    size = groups * TILE_COLUMNS
    if mode.solves:
        return _schedule(_solve_operations(size, slots if groups == 1 else BOTH_SLOTS))
    return _schedule(_scale_operations(size, symplectic=mode is MiddleMode.SYMPLECTIC))
