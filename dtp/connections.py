"""Transports of a workload's tokens in integers: what the transport engine reads for every head and token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dtp.config import Config
from dtp.errors import DtpError, must
from dtp.solve import MiddleMode
from dtp.transport import QuantisedFactors, connection_columns, quantise_linear, quantise_solve
from dtp.workload import TransportKind, Workload

LINEAR_HEADROOM_BITS: Final = 2
"""Start vectors of linear transports, which are not orthogonal, leave so many bits for what the steps add."""


@dataclass(frozen=True, eq=False)
class Connections:
    """Quantised transports.

    Parameters
    ----------
    heads, tokens: counts
    mode: of the engine, ``CAYLEY`` or, for linear transports, ``SYMPLECTIC``
    factors: v of (heads · tokens, width, k), head after head; all share their scale
    """

    heads: int
    tokens: int
    mode: MiddleMode
    factors: QuantisedFactors

    def place(self, head: int, token: int) -> int:
        """Where the factors of a head's token are."""
        return head * self.tokens + token


def quantise_connections(config: Config, workload: Workload, tokens: int) -> Connections:
    """Transports of the first ``tokens`` tokens of a workload that has them.

    Raises
    ------
    DtpError: no connection, more columns than the engine takes at once, or columns too long or too short for it.
    """
    if workload.connection_a is None or workload.connection_b is None:
        raise must("Workload", "connection_a", "there for transports", None)
    torsion = () if workload.torsion_l is None else (workload.torsion_l, workload.torsion_r, workload.torsion_gate)
    cayley = workload.transport is TransportKind.CAYLEY
    columns, weights = connection_columns(workload.connection_a, workload.connection_b, *torsion, cayley=cayley)
    columns = columns[:, :tokens]
    heads, _, width, k = columns.shape
    if k > config.transport_columns:
        rule = f"of at most {config.transport_columns} columns with connection_b and torsion"
        raise must("Workload", "connection_a", rule, k)
    flat = columns.reshape(-1, width, k)
    longest = f"columns of length {float(np.sqrt((columns**2).sum(axis=2)).max()):.3g}"
    try:
        if not cayley:
            made = quantise_linear(config, MiddleMode.SYMPLECTIC, flat, weights)
            return Connections(heads, tokens, MiddleMode.SYMPLECTIC, replace(made, headroom_bits=LINEAR_HEADROOM_BITS))
        factors = quantise_solve(config, MiddleMode.CAYLEY, flat)
    except DtpError:
        rule = "with connection_b (and torsion) neither too strong nor too weak for the engine's shifts and weights"
        raise must("Workload", "connection_a", rule, longest) from None
    if int(np.abs(factors.v).max()) >= 1 << (config.factor_bits - 1):
        rule = f"with connection_b (and torsion) weak enough for factor_bits {config.factor_bits}"
        raise must("Workload", "connection_a", rule, longest)
    return Connections(heads, tokens, MiddleMode.CAYLEY, factors)
