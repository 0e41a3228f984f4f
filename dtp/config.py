"""The configuration of one processor: TOML in, checked, with every width and size derived in one place.

``Config.load("ecp5-85k")`` reads a preset, ``Config.load("mine.toml")`` a file. All fields are stated, none has a
default; a missing, unknown or clashing one is refused with one line that names it.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dtp.errors import DtpError, must
from dtp.fixed import bits_for_magnitude

SCORE_FRACTION_BITS = 12
"""Fraction of a score in the log2 domain, in the accumulator and in the softmax."""
SCORE_BITS = 22
"""A score is s22f12: ±512 in the log2 domain, saturated and counted."""
BIAS_BITS = 24
"""A key's bias β_j is s24f12."""
TABLE_BITS = 10
"""Fraction bits that address the 2^-x table, and mantissa bits that address the reciprocal table."""
MANTISSA_BITS = 17
"""Entries of both tables are fractions of 2^17."""
SHIFT_FIELD_BITS = 2
"""Width of the per-job shifts of the sum of a pass (score_shift, lift_shift): 0 … 3.

A wider choice costs a multiplexer for every bit of every sum and gains little: with 15 fraction bits, a query of 8 bits
already keeps three bits of its scale's product.
"""
RESCALE_BITS = 5
"""A rescale of the online softmax: 0 … 31 places, saturated."""
SCALE_BITS = 16
"""Per-job multipliers are 16 bits."""
REGISTER_BITS = 18
"""Registers of the lift unit and operands of every multiplier: one 18×18 DSP."""

PRESETS = ("tiny", "ecp5-85k", "wide")

Count = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]


def _is_power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


class Config(BaseModel):
    """Free parameters of the attention tile; see the README for a table with units.

    Members that start with a verb or an adjective are derived; none of them can be set.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    rows: Count  # query rows that the array works on at once
    lanes: Count  # products summed or laid side by side in each row
    operand_bits: Count  # q, k, v, C: 8 or 16, symmetric
    probability_bits: Count  # unsigned p
    lifted_bits: Count  # lifted key lanes
    output_bits: Count  # outputs
    max_tokens: Count  # L
    max_width: Count  # d
    max_frame_rank: Count  # R
    metric_rank: Count  # r of the lift unit
    block: Count  # tokens of a block of the mask, lanes of a segment
    input_bytes: Count  # bytes a beat
    output_bytes: Count  # bytes a beat
    lookahead: Count  # score passes ahead of P·V; score and probability buffers are one more
    normaliser_lanes: Count  # outputs normalised in a cycle
    lift_ports: Count  # lifted lanes written to the key memory in a cycle, a key
    output_slots: Count  # row groups that may wait for the output
    query_groups: Count  # row groups of scaled queries that the ring holds
    registered_memories: Annotated[bool, Field(strict=True)]  # registers around block memories: cycles for clock
    factor_bits: Count  # transport factors: 8 or 16
    transport_lanes: Count  # products a cycle of the transport engine, for each of its vectors
    transport_vectors: Count  # state vectors that the engine works on at once
    transport_columns: Count  # factor columns of a pass, K
    transport_width: Count  # longest transported vector
    solve_lanes: Count  # small solves side by side
    max_model: Count  # d_model of the matrix mode
    max_mlp: Count  # width of a hidden MLP layer

    # ---- reading -----------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, name_or_path: str | Path) -> Config:
        """A preset by name, or a TOML file by path.

        Raises:
            DtpError: unknown name, unreadable file, TOML error, or any refused field.
        """
        text_name = str(name_or_path)
        if text_name in PRESETS:
            resource = Path(__file__).parent / "presets" / f"{text_name}.toml"
            return cls.from_text(resource.read_text(encoding="utf-8"), text_name)
        path = Path(name_or_path)
        if path.suffix != ".toml" and not path.is_file():
            raise must("Config", "name", f"a preset ({', '.join(PRESETS)}) or a .toml file", text_name)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise DtpError(f"configuration file {text_name!r} cannot be read: {reason}") from None
        return cls.from_text(text, text_name)

    @classmethod
    def from_text(cls, text: str, source: str = "text") -> Config:
        """A configuration from TOML text; ``source`` names it in messages."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise DtpError(f"configuration {source!r} is not TOML: {error}".replace("\n", " ")) from None
        return cls.from_mapping(table)

    @classmethod
    def from_mapping(cls, table: dict[str, Any]) -> Config:
        """A configuration from a mapping of all fields.

        Raises:
            DtpError: one line for the first refused field.
        """
        try:
            return cls(**table)
        except ValidationError as error:
            raise _one_line(error) from None

    def changed(self, **fields: Any) -> Config:
        """A copy with other values, checked again."""
        return self.from_mapping({**self.model_dump(), **fields})

    @property
    def hash(self) -> str:
        """Twelve hex digits that change with any parameter but the name."""
        table = {key: value for key, value in self.model_dump().items() if key != "name"}
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:12]

    def to_toml(self) -> str:
        """The configuration as TOML text that :meth:`from_text` reads back."""
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.model_dump().items())

    # ---- rules -------------------------------------------------------------------------------------------------

    def model_post_init(self, _context: Any) -> None:
        """Ranges and clashes; raises DtpError with one line."""
        for field, low, high in (
            ("rows", 2, 64), ("lanes", 4, 256), ("block", 4, 64), ("probability_bits", 8, 16),
            ("lifted_bits", 6, 16), ("output_bits", 8, 16), ("max_tokens", 8, 4096), ("max_width", 4, 256),
            ("max_frame_rank", 1, 4), ("metric_rank", 1, 4), ("input_bytes", 1, 128), ("output_bytes", 1, 128),
            ("lookahead", 1, 7), ("normaliser_lanes", 1, 128), ("lift_ports", 1, 16), ("output_slots", 2, 8),
            ("query_groups", 4, 256), ("max_model", 4, 4096), ("max_mlp", 4, 8192),
        ):  # fmt: skip
            value = getattr(self, field)
            if not low <= value <= high:
                raise must("Config", field, f"in {low}…{high}", value)
        if self.operand_bits not in (8, 16):
            raise must("Config", "operand_bits", "8 or 16", self.operand_bits)
        if self.output_bits not in (8, 16):
            raise must("Config", "output_bits", "8 or 16", self.output_bits)
        if self.output_bits < self.operand_bits:
            raise must("Config", "output_bits", f"at least operand_bits {self.operand_bits}", self.output_bits)
        if self.lifted_bits > REGISTER_BITS:
            raise must("Config", "lifted_bits", f"at most {REGISTER_BITS}", self.lifted_bits)
        for field in (
            "rows", "lanes", "block", "max_tokens", "max_width", "input_bytes", "output_bytes",
            "normaliser_lanes", "lift_ports", "query_groups", "output_slots", "max_model", "max_mlp",
        ):  # fmt: skip
            if not _is_power_of_two(getattr(self, field)):
                raise must("Config", field, "a power of two", getattr(self, field))
        if self.lanes % self.block:
            raise must("Config", "lanes", f"a multiple of block {self.block}", self.lanes)
        if self.block % self.rows:
            raise must("Config", "rows", f"a divisor of block {self.block}", self.rows)
        if self.block < 4 * self.segments:
            raise must("Config", "lanes", f"at most block²/4 = {self.block * self.block // 4}", self.lanes)
        for field in ("max_tokens", "max_width", "max_model", "max_mlp"):
            if getattr(self, field) % self.block:
                raise must("Config", field, f"a multiple of block {self.block}", getattr(self, field))
        if self.metric_rank > self.max_frame_rank:
            raise must("Config", "metric_rank", f"at most max_frame_rank {self.max_frame_rank}", self.metric_rank)
        if self.max_frame_rank > self.max_width:
            raise must("Config", "max_frame_rank", f"at most max_width {self.max_width}", self.max_frame_rank)
        if self.input_bytes > self.entry_bytes:
            raise must("Config", "input_bytes", f"at most one array step, {self.entry_bytes} bytes", self.input_bytes)
        if self.output_bytes > self.output_entry_bytes:
            raise must(
                "Config", "output_bytes", f"at most one output step, {self.output_entry_bytes} bytes",
                self.output_bytes,
            )  # fmt: skip
        if self.output_bytes * 8 < self.output_bits:
            raise must("Config", "output_bytes", f"at least one output of {self.output_bits} bits", self.output_bytes)
        if self.normaliser_lanes > self.output_bytes * 8 // self.output_bits:
            raise must(
                "Config", "normaliser_lanes",
                f"at most one output beat, {self.output_bytes * 8 // self.output_bits} values",
                self.normaliser_lanes,
            )  # fmt: skip
        if self.mask_row_bytes > self.entry_bytes:
            raise must(
                "Config", "max_tokens",
                f"at most 8·block·(bytes of one array step) = {8 * self.block * self.entry_bytes}",
                self.max_tokens,
            )  # fmt: skip
        if self.lifted_row_bits < 6:
            rule = f"at most {self.lifted_bits - 6 + self.lifted_row_bits}, so that a query's lifted lane keeps 6 bits"
            raise must("Config", "lifted_bits", rule, self.lifted_bits)
        if self.lift_ports > self.block:
            raise must("Config", "lift_ports", f"at most block {self.block}", self.lift_ports)
        if self.query_groups <= self.lookahead:
            raise must("Config", "query_groups", f"more than lookahead {self.lookahead}", self.query_groups)
        self._check_transport()
        if self.max_mlp < self.max_model:
            raise must("Config", "max_mlp", f"at least max_model {self.max_model}", self.max_mlp)
        if self.row_bits > REGISTER_BITS:
            raise must("Config", "probability_bits", f"at most {REGISTER_BITS - 1}", self.probability_bits)

    def _check_transport(self) -> None:
        for field, low, high in (
            ("transport_lanes", 16, 256), ("transport_vectors", 1, 2), ("transport_width", 4, 4096),
            ("solve_lanes", 1, 16),
        ):  # fmt: skip
            value = getattr(self, field)
            if not low <= value <= high:
                raise must("Config", field, f"in {low}…{high}", value)
            if not _is_power_of_two(value):
                raise must("Config", field, "a power of two", value)
        if self.factor_bits not in (8, 16):
            raise must("Config", "factor_bits", "8 or 16", self.factor_bits)
        if self.transport_columns not in (4, 8):
            raise must("Config", "transport_columns", "4 or 8", self.transport_columns)
        if self.transport_width < self.max_width:
            raise must("Config", "transport_width", f"at least max_width {self.max_width}", self.transport_width)

    # ---- the array ---------------------------------------------------------------------------------------------

    @property
    def segments(self) -> int:
        """Groups of ``block`` lanes; each sums by itself."""
        return self.lanes // self.block

    @property
    def macs(self) -> int:
        """Multiply-accumulate units of the array."""
        return self.rows * self.lanes

    @property
    def row_bits(self) -> int:
        """Signed width of the stationary operand: a probability, or a query with the log2 scale folded in."""
        return max(self.probability_bits + 1, min(REGISTER_BITS, self.operand_bits + 5))

    @property
    def moving_bits(self) -> int:
        """Signed width of the moving operand: a key, a value, or a lifted key lane."""
        return max(self.operand_bits, self.lifted_bits)

    @property
    def lifted_row_bits(self) -> int:
        """Signed width of a lifted lane of a query, less than a row operand's where the key's is more than a key's.

        So a product is no wider than one of a plain lane: precision is where the lanes need it, not in the adders.
        """
        return self.row_bits - max(0, self.lifted_bits - self.operand_bits)

    @property
    def product_bits(self) -> int:
        """Signed width of every product that a row operand and a moving operand can give."""
        return self.row_bits + self.operand_bits

    @property
    def sum_shift(self) -> int:
        """Right shift of a plain pass's sum beside the job's: wide operands have bits below the score's fraction."""
        return max(0, self.row_bits + self.operand_bits - SCORE_BITS)

    @property
    def lifted_sum_shift(self) -> int:
        """The same of a lifted pass; the scale of a query's lifted lane leaves it no more than 13 bits."""
        lane_bits = min(self.lifted_row_bits, 2 * SCALE_BITS - 1 - REGISTER_BITS)
        return max(0, lane_bits + self.lifted_bits - SCORE_BITS)

    @property
    def pass_steps(self) -> int:
        """Array steps of one score pass: the keys of a block, ``segments`` at a time."""
        return self.block // self.segments

    @property
    def denominator_bits(self) -> int:
        """Unsigned width of Σp over the longest row."""
        return (((1 << self.probability_bits) - 1) * self.max_tokens).bit_length()

    @property
    def accumulator_bits(self) -> int:
        """No legal input overflows it: the larger of the worst score and the worst P·V sum."""
        operand = 1 << (self.operand_bits - 1)
        row = 1 << (self.row_bits - 1)
        values = ((1 << self.probability_bits) - 1) * self.max_tokens * operand
        plain = self.max_width * row * operand
        lifted = self.lifted_passes * self.block << (self.lifted_row_bits + self.lifted_bits - 2)
        passes = self.max_width // self.block + self.lifted_passes
        score = plain + lifted + (1 << (BIAS_BITS - 1)) + passes
        return bits_for_magnitude(max(values + self.max_tokens // self.block, score))

    @property
    def accumulator_depth(self) -> int:
        """Words of each accumulator: one score pass, then the output columns of a segment."""
        return self.pass_steps + self.max_width // self.segments

    @property
    def operand_read_cycles(self) -> int:
        """Cycles from a read address of the walk to the operand at the array: memory, choice, registers around it."""
        return 4 if self.registered_memories else 2

    # ---- the lift ----------------------------------------------------------------------------------------------

    @property
    def symmetric_lanes(self) -> int:
        """Entries of svec of an R×R matrix."""
        return self.max_frame_rank * (self.max_frame_rank + 1) // 2

    @property
    def lifted_lanes(self) -> int:
        """Lanes of the lifted passes: R + R(R+1) [the Gram lifting]."""
        return self.max_frame_rank + 2 * self.symmetric_lanes

    @property
    def lifted_passes(self) -> int:
        """Score passes that the lifted lanes take."""
        return -(-self.lifted_lanes // self.block)

    @property
    def lift_tokens(self) -> int:
        """Tokens that the lift unit works on at once, one a multiplier; also the lanes of an input word."""
        return self.rows * self.segments

    # ---- sizes -------------------------------------------------------------------------------------------------

    @property
    def operand_bytes(self) -> int:
        """Bytes of one operand on the input."""
        return self.operand_bits // 8

    @property
    def entry_bytes(self) -> int:
        """Bytes of one array step's moving operand on the input: the unit of the input order."""
        return self.lanes * self.operand_bytes

    @property
    def entry_beats(self) -> int:
        """Input beats of an entry."""
        return self.entry_bytes // self.input_bytes

    @property
    def entry_words(self) -> int:
        """Words of ``lift_tokens`` lanes in an entry."""
        return self.block // self.rows

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest row."""
        return self.max_tokens // self.block

    @property
    def max_groups(self) -> int:
        """Row groups of the longest head."""
        return self.max_tokens // self.rows

    @property
    def max_chunks(self) -> int:
        """Plain passes of the widest head."""
        return self.max_width // self.block

    @property
    def mask_row_bytes(self) -> int:
        """Bytes of one block row of the mask on the input: a power of two."""
        needed = -(-self.max_blocks // 8)
        return 1 << (needed - 1).bit_length()

    @property
    def output_entry_bytes(self) -> int:
        """Bytes of one output step: ``segments`` columns of ``rows`` values."""
        return self.rows * self.segments * (self.output_bits // 8)

    @property
    def output_entry_beats(self) -> int:
        """Output beats of an output step."""
        return self.output_entry_bytes // self.output_bytes

    @property
    def output_fraction_bits(self) -> int:
        """Fraction of an output in units of v's last place."""
        return self.output_bits - self.operand_bits

    def chunks(self, width: int) -> int:
        """Plain passes of a head of ``width``."""
        return -(-width // self.block)

    def blocks(self, tokens: int) -> int:
        """Blocks that ``tokens`` touch."""
        return -(-tokens // self.block)

    def groups(self, tokens: int) -> int:
        """Row groups that ``tokens`` touch."""
        return -(-tokens // self.rows)

    @cached_property
    def derived(self) -> dict[str, int]:
        """Every derived figure by name, for the manifest and the docs."""
        names = (
            "segments", "macs", "row_bits", "moving_bits", "lifted_row_bits", "product_bits", "sum_shift",
            "lifted_sum_shift", "pass_steps", "operand_read_cycles", "denominator_bits", "accumulator_bits",
            "accumulator_depth", "symmetric_lanes", "lifted_lanes",
            "lifted_passes", "lift_tokens", "entry_bytes", "entry_beats", "entry_words", "max_blocks",
            "max_groups", "max_chunks", "mask_row_bytes", "output_entry_bytes", "output_entry_beats",
            "output_fraction_bits",
        )  # fmt: skip
        return {name: int(getattr(self, name)) for name in names}


def _one_line(error: ValidationError) -> DtpError:
    # A key that is not one is often the missing one, misspelt.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":
        return DtpError(str(first["ctx"]["error"]))
    if first["type"] == "extra_forbidden":
        valid = ", ".join(Config.model_fields)
        return DtpError(f"Config.{field} is not a key; the keys are {valid}")
    if first["type"] == "missing":
        return DtpError(f"Config.{field} is missing")
    return must("Config", field, f"valid ({first['msg']})", first["input"])
