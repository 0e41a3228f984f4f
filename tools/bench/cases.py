"""The cases behind each row of the bench: ``tools/cases.toml``, read and checked."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dtp.config import PRESETS, Config
from dtp.errors import DtpError, must
from dtp.workload import Mode, Workload

CASES = Path(__file__).resolve().parents[1] / "cases.toml"

MASK_PARTS = ("none", "causal", "padding", "blocks", "empty")
"""Parts of a mask's name, joined by ``+``: every pair; keys up to the query; ``valid`` of the tokens; ``kept`` of the
blocks; blocks with one query block that keeps none."""
SOURCES = ("random", "digits", "transport", "holonomy", "minilm", "extract", "laplace", "all")
"""``transport`` and ``holonomy`` are the digit models with transports."""
RANDOM_PRESET = "random"
"""Preset of cases whose configurations are drawn as well."""
_WIDTH_NAMES = ("operand", "probability", "lifted", "output")


@dataclass(frozen=True)
class Case:
    """What a row of the bench is measured on.

    Parameters
    ----------
    row: name of the row
    preset: a preset, or ``random`` for configurations drawn from the seed
    heads: query heads of each workload, back to back
    tokens, width: L and d; several are gone through in turn
    modes, masks: every pair of them is taken; masks are named by :data:`MASK_PARTS`
    widths: bits of operand, probability, lifted lane and output, which must be the preset's; empty when drawn
    seed: of the tensors; of the stalls too
    source: of the tensors, see :data:`SOURCES`
    stalls: probability of a stall on either stream, each cycle
    kept, valid: fraction of the blocks that a ``blocks`` mask keeps, of the tokens before the padding
    fractions: of the blocks that a gate keeps, one run each
    transport_rank: r_T, 0 without transports
    model, mlp: d_model and MLP width of the layer, 0 without
    count: what is repeated, by row: configurations, images, rows of scores or runs; 0 where nothing is
    quick: part of ``--quick``
    """

    row: str
    preset: str
    heads: int
    tokens: tuple[int, ...]
    width: tuple[int, ...]
    modes: tuple[str, ...]
    masks: tuple[str, ...]
    widths: dict[str, int]
    seed: int
    source: str = "random"
    stalls: float = 0.0
    kept: float = 0.5
    valid: float = 0.75
    fractions: tuple[float, ...] = ()
    transport_rank: int = 0
    model: int = 0
    mlp: int = 0
    count: int = 0
    quick: bool = False

    @classmethod
    def from_mapping(cls, table: dict[str, Any]) -> Case:
        """A checked case.

        Raises:
            DtpError: a key that is missing, unknown or out of range.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for key in table:
            if key not in known:
                raise must("Case", "key", f"one of {', '.join(known)}", key)
        for name, field in known.items():
            if field.default is dataclasses.MISSING and name not in table:
                raise must("Case", name, f"given in the case of {table.get('row')}", None)
        ready = dict(table)
        for name in ("tokens", "width", "modes", "masks"):
            ready[name] = tuple(table[name]) if isinstance(table[name], list) else (table[name],)
        ready["fractions"] = tuple(table.get("fractions", ()))
        case = cls(**ready)
        case._check()
        return case

    def _check(self) -> None:
        if self.preset not in (*PRESETS, RANDOM_PRESET):
            raise must("Case", "preset", f"one of {', '.join((*PRESETS, RANDOM_PRESET))}", self.preset)
        for mode in self.modes:
            if mode not in list(Mode):
                raise must("Case", "modes", f"one of {', '.join(Mode)}", mode)
        for mask in self.masks:
            if not set(mask.split("+")) <= set(MASK_PARTS):
                raise must("Case", "masks", f"made of {', '.join(MASK_PARTS)}", mask)
        if self.source not in SOURCES:
            raise must("Case", "source", f"one of {', '.join(SOURCES)}", self.source)
        for fraction in self.fractions:
            if not 0 < fraction <= 1:
                raise must("Case", "fractions", "more than 0 and at most 1", fraction)
        for name in ("heads", "seed", "count", "transport_rank", "model", "mlp"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise must("Case", name, "an integer of at least 0", getattr(self, name))
        for name in ("tokens", "width"):
            for value in getattr(self, name):
                if type(value) is not int or value < 1:
                    raise must("Case", name, "integers of at least 1", value)
        if self.preset == RANDOM_PRESET:
            if self.widths:
                raise must("Case", "widths", "empty for drawn configurations", self.widths)
            return
        config = self.config
        wanted = {name: getattr(config, f"{name}_bits") for name in _WIDTH_NAMES}
        if self.widths != wanted:
            raise must("Case", "widths", f"those of {self.preset}, {wanted}", self.widths)

    @property
    def config(self) -> Config:
        """The preset."""
        return Config.load(self.preset)

    def workloads(self, config: Config | None = None) -> Iterator[Workload]:
        """A random workload for every mode and mask, shapes and seeds in turn."""
        config = self.config if config is None else config
        for number, (mode, mask) in enumerate((mode, mask) for mode in self.modes for mask in self.masks):
            yield masked_workload(
                config,
                mode=mode,
                mask=mask,
                tokens=self.tokens[number % len(self.tokens)],
                width=self.width[number % len(self.width)],
                heads=self.heads,
                seed=self.seed + number,
                kept=self.kept,
                valid=self.valid,
                transport_rank=self.transport_rank,
            )

    def describe(self) -> str:
        """The case in one line."""
        drawn = self.preset == RANDOM_PRESET
        parts = [f"{self.count} drawn configurations" if drawn else f"`{self.preset}` {self.config.hash}"]
        parts += [f"L = {_several(self.tokens)}", f"d = {_several(self.width)}"]
        parts += [f"{self.heads} head{'s' if self.heads != 1 else ''}"] if self.heads else []
        parts += [f"r_T = {self.transport_rank}"] if self.transport_rank else []
        parts += [f"d_model = {self.model}, MLP {self.mlp}"] if self.model else []
        parts += ["/".join(self.modes), f"mask {', '.join(self.masks)}"]
        if any("blocks" in mask.split("+") for mask in self.masks):
            parts.append(f"{100 * self.kept:g} % of the blocks kept")
        parts += [f"gates keep {_several(self.fractions)}"] if self.fractions else []
        if any("padding" in mask.split("+") for mask in self.masks):
            parts.append(f"{100 * self.valid:g} % of the tokens valid")
        if self.widths:
            parts.append("/".join(str(self.widths[name]) for name in _WIDTH_NAMES) + " bits")
        parts.append(f"seed {self.seed}")
        if self.source != "random":
            parts.append(f"from {self.source}")
        if self.stalls:
            parts.append(f"stalls {self.stalls:g}")
        if self.count and not drawn:
            parts.append(f"count {self.count}")
        return ", ".join(parts)


def _several(values: Sequence[float]) -> str:
    return "/".join(f"{value:g}" for value in values)


def masked_workload(
    config: Config,
    *,
    mode: str,
    mask: str,
    tokens: int,
    width: int,
    heads: int,
    seed: int,
    kept: float,
    valid: float,
    transport_rank: int = 0,
    torsion: bool = False,
) -> Workload:
    """Seeded tensors with a mask named by :data:`MASK_PARTS`, the metric as large in rank as the configuration takes.

    ``kept`` is raised where so few blocks would leave a row without one.
    """
    from tools.workloads import random_workload

    parts = set(mask.split("+"))
    rank = min(config.max_frame_rank, width)
    fields: dict[str, Any] = {
        "tokens": tokens,
        "width": width,
        "heads": heads,
        "mode": mode,
        "causal": "causal" in parts,
        "seed": seed,
        "block": config.block,
        "valid_length": max(1, round(valid * tokens)) if "padding" in parts else None,
        "frame_rank": rank,
        "metric_rank": min(config.metric_rank, rank),
        "transport_rank": transport_rank,
        "torsion": torsion,
    }
    if "blocks" in parts:
        count = config.blocks(fields["valid_length"] or tokens)
        legal = count * (count + 1) // 2 if fields["causal"] else count * count
        least = count / legal
        made = random_workload(kept=min(1.0, max(kept, least + 1e-9)), **fields)
    else:
        made = random_workload(kept=1.0, **fields)
    if not parts & {"blocks", "empty"}:
        return made
    blocks = config.blocks(tokens)
    # A mask that keeps every block is given all the same.
    mask_array = np.ones((heads, blocks, blocks), dtype=np.bool_) if made.block_mask is None else made.block_mask.copy()
    if "empty" in parts:
        mask_array[:, seed % blocks] = False
    return dataclasses.replace(
        made, block_mask=mask_array, block=config.block, allow_empty_rows="empty" in parts
    )


@cache
def load(path: Path = CASES) -> tuple[Case, ...]:
    """All cases of the committed file.

    Raises:
        DtpError: no such file, no TOML, or a refused case.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DtpError(f"cases {path} cannot be read: {error.strerror or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise DtpError(f"cases {path} are not TOML: {error}") from None
    if set(table) - {"case", "reason"}:
        raise must("cases", "tables", "case and reason", sorted(table))
    return tuple(Case.from_mapping(entry) for entry in table.get("case", []))


@cache
def reasons(path: Path = CASES) -> dict[str, str]:
    """Why a row is missed, in words, by row: shown beside it as long as it is."""
    return dict(tomllib.loads(path.read_text(encoding="utf-8")).get("reason", {}))


def of_row(row: str, quick: bool = False) -> tuple[Case, ...]:
    """The cases of a row; with ``quick`` those of the short run alone."""
    return tuple(case for case in load() if case.row == row and (case.quick or not quick))
