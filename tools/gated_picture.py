"""A gate as a picture: for each head its block scores as a heat map, and beside it the blocks that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dtp.errors import DtpError
from dtp.gated import GateResult
from dtp.pruner import SCORE_FRACTION_BITS
from tools.verbs import partial_beside

KEPT, DROPPED, EDGE = "#2b5c8a", "#eef2f6", "#ffffff"


def gated_picture(gate: GateResult, block: int, path: Path) -> None:
    """Write an SVG, folders included; equal gates give equal files.

    Parameters
    ----------
    gate : with scores of holonomy
    block : tokens along one side of a block

    Raises
    ------
    DtpError
        A gate without scores of its own, or a file that cannot be written.
    """
    if gate.holonomy is None:
        raise DtpError("gated_picture.gate must be with scores of holonomy, not of a table alone")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    scores = gate.holonomy / (1 << SCORE_FRACTION_BITS)
    heads, blocks = scores.shape[:2]
    low, high = float(scores.min()), float(scores.max())
    edges = np.arange(blocks + 1) * block
    kept = ListedColormap([DROPPED, KEPT])
    grid: dict[str, Any] = {"edgecolors": EDGE, "linewidth": 1.5}
    settings: Any = {"svg.hashsalt": "gated", "svg.fonttype": "none", "font.size": 8}
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(
            heads, 2, figsize=(5.2, 2.5 * heads), squeeze=False, sharex=True, sharey=True, layout="constrained"
        )
        for head, (left, right) in enumerate(axes):
            left.pcolormesh(edges, edges, scores[head], cmap="viridis", vmin=low, vmax=high, **grid)
            right.pcolormesh(edges, edges, gate.masks[head], cmap=kept, vmin=0, vmax=1, **grid)
            for (row, column), score in np.ndenumerate(scores[head]):
                middle = ((column + 0.5) * block, (row + 0.5) * block)
                colour = "black" if score > low + 0.6 * (high - low) else "white"
                left.text(*middle, f"{score:.2f}", color=colour, ha="center", va="center", fontsize=6)
            left.set_title(f"head {head}: holonomy of the blocks")
            right.set_title(f"head {head}: {int(gate.masks[head].sum())} of {gate.legal // heads} blocks kept")
            left.set_ylabel("query token")
            for axis in (left, right):
                axis.set_aspect("equal")
                axis.set_xticks(edges)
                axis.set_yticks(edges)
                axis.set_ylim(edges[-1], 0)
        for axis in axes[-1]:
            axis.set_xlabel("key token")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial_beside(path) as partial:
                figure.savefig(partial, format="svg", metadata={"Date": None})
                partial.replace(path)
        except OSError as error:
            raise DtpError(f"picture {path} cannot be written: {error.strerror or error}") from None
        finally:
            pyplot.close(figure)
