"""A job of the attention tile as bytes: descriptor, operands in stream order, outputs, status, addresses.

One table, :data:`FIELDS`, describes the descriptor; packing, unpacking, the hardware's field extraction and
the table of the docs derive from it. Order and arithmetic are those of ``docs/tile.md``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtp.config import SHIFT_FIELD_BITS, Config
from dtp.errors import DtpError, must
from dtp.fixed import Int, signed_range

Bytes = NDArray[np.uint8]

DESCRIPTOR_BYTES = 64
"""Length of a descriptor on the input, before padding to whole entries."""
STATUS_BYTES = 16
"""Length of the status record on the output, before padding to whole beats."""
MAGIC = 0x4454
"""First two bytes of a descriptor: "TD"."""
STATUS_MAGIC = 0x5344
"""First two bytes of a status record: "DS"."""
VERSION = 1
"""Version of the status record."""
DESCRIPTOR_VERSION = 1
"""Version of the descriptor."""
KEY_SHIFT_BITS = 5
"""Width of the shifts in front of the key memories (key_*_shift, bias_shift): 0 … 31."""
BIAS_WORD_BITS = 16
"""Bits of a token's bias on the input."""


class Field(NamedTuple):
    """One number of the descriptor: ``bytes`` little-endian bytes from ``offset``."""

    name: str
    offset: int
    bytes: int
    signed: bool
    meaning: str


class Flag(NamedTuple):
    """One bit of the descriptor's ``flags``."""

    name: str
    bit: int
    meaning: str


_PASS, _KEY = (1 << SHIFT_FIELD_BITS) - 1, (1 << KEY_SHIFT_BITS) - 1

FIELDS = (
    Field("magic", 0, 2, False, f"{MAGIC:#06x}"),
    Field("version", 2, 1, False, f"{DESCRIPTOR_VERSION}"),
    Field("flags", 3, 1, False, "bits below; the others 0"),
    Field("tag", 4, 2, False, "returned in the status record"),
    Field("tokens", 6, 2, False, "L, 1 … max_tokens"),
    Field("valid_length", 8, 2, False, "tokens from here on are padding, 1 … L"),
    Field("width", 10, 2, False, "d, 1 … max_width"),
    Field("score_shift", 12, 1, False, f"right shift of the sum of a plain pass, 0 … {_PASS}"),
    Field("lift_shift", 13, 1, False, f"right shift of the sum of a lifted pass, 0 … {_PASS}"),
    Field("query_scale", 16, 2, False, "q to row operand"),
    Field("metric_scale", 18, 2, True, "Ma to row operand, added to the first R lanes"),
    Field("lift_vector_scale", 20, 2, True, "a to lifted row lane"),
    Field("lift_metric_scale", 22, 2, True, "M to lifted row lane"),
    Field("lift_outer_scale", 24, 2, True, "aaᵀ to lifted row lane"),
    Field("bias_scale", 26, 2, True, "bias word to β"),
    Field("norm_scale", 28, 2, True, "‖k‖² to β"),
    Field("metric_norm_scale", 30, 2, True, "bᵀMb to β"),
    Field("key_vector_shift", 32, 1, False, f"right shift of Mb to a lifted key lane, 0 … {_KEY}"),
    Field("key_outer_shift", 33, 1, False, f"right shift of bbᵀ to a lifted key lane, 0 … {_KEY}"),
    Field("key_metric_shift", 34, 1, False, f"right shift of M to a lifted key lane, 0 … {_KEY}"),
    Field("bias_shift", 35, 1, False, f"right shift of the sum that makes β, 0 … {_KEY}"),
)
"""The descriptor; bytes that no field names are 0 and not looked at."""

FLAGS = (
    Flag("bias", 0, "keys carry a bias word, and their squared norm enters β"),
    Flag("lift", 1, "metric factors and lifted passes; needs bias"),
    Flag("causal", 2, "a key is kept for the queries that do not come before it"),
    Flag("masked", 3, "a block mask follows the descriptor"),
    Flag("gated", 4, "mask rows of the gate are waited for; only where there is one"),
)
GATE_FLAGS = 1
"""So many of the last flags are unknown to a tile without a gate."""

SHIFT_BITS = {
    "score_shift": SHIFT_FIELD_BITS,
    "lift_shift": SHIFT_FIELD_BITS,
    "key_vector_shift": KEY_SHIFT_BITS,
    "key_outer_shift": KEY_SHIFT_BITS,
    "key_metric_shift": KEY_SHIFT_BITS,
    "bias_shift": KEY_SHIFT_BITS,
}
"""Bits that the hardware uses of each shift; a larger one is refused."""


class ErrorCode(enum.IntEnum):
    """``error`` of a status record.

    A code with one of its low four bits set refuses the descriptor: the job is answered by a status record alone. A
    descriptor with several faults gets the first of them in this order, but ``CUT`` goes before all when the
    descriptor was not whole, and after all when it was.
    """

    NONE = 0
    MAGIC = 1
    VERSION = 2
    FLAGS = 3
    TOKENS = 4
    VALID_LENGTH = 5
    WIDTH = 6
    SHIFT = 7
    CUT = 8
    """tlast came in the descriptor."""
    EARLY_LAST = 16
    """tlast came before the job's last beat; the beats that were missing were taken as 0."""
    LATE_LAST = 32
    """tlast did not come with the job's last beat; the beats up to tlast were dropped."""
    ABORTED = 255

    @property
    def refuses(self) -> bool:
        """Whether the job is answered by a status record alone."""
        return bool(self & 15)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a descriptor says. Ranges of the fields are checked here, limits of a processor by :meth:`check`.

    Parameters
    ----------
    tokens, valid_length, width: L, tokens that are not padding, d
    bias, lift, causal, masked, gated: flags
    tag: 16 bits that come back in the status record
    query_scale … bias_shift: numbers of the arithmetic, see :data:`FIELDS`

    Raises
    ------
    DtpError
        for a number that its bytes cannot hold, a shift beyond the shifter, or ``lift`` without ``bias``
    """

    tokens: int
    valid_length: int
    width: int
    tag: int = 0
    bias: bool = False
    lift: bool = False
    causal: bool = False
    masked: bool = False
    gated: bool = False
    query_scale: int = 0
    metric_scale: int = 0
    lift_vector_scale: int = 0
    lift_metric_scale: int = 0
    lift_outer_scale: int = 0
    bias_scale: int = 0
    norm_scale: int = 0
    metric_norm_scale: int = 0
    score_shift: int = 0
    lift_shift: int = 0
    key_vector_shift: int = 0
    key_outer_shift: int = 0
    key_metric_shift: int = 0
    bias_shift: int = 0

    def __post_init__(self) -> None:
        for flag in FLAGS:
            value = getattr(self, flag.name)
            if type(value) is not bool:
                raise must("Job", flag.name, "True or False", value)
        for field in _NUMBERS:
            value = getattr(self, field.name)
            low, high = _range(field)
            if type(value) is not int or not low <= value <= high:
                raise must("Job", field.name, f"an integer in {low} … {high}", value)
        for name in ("tokens", "valid_length", "width"):
            if getattr(self, name) < 1:
                raise must("Job", name, "at least 1", getattr(self, name))
        if self.valid_length > self.tokens:
            raise must("Job", "valid_length", f"at most tokens {self.tokens}", self.valid_length)
        if self.lift and not self.bias:
            raise must("Job", "bias", "True when lift is", self.bias)

    def check(self, config: Config) -> None:
        """Whether ``config`` can hold the job; raises DtpError with the limit that it breaks."""
        for name, limit in (("tokens", config.max_tokens), ("width", config.max_width)):
            if getattr(self, name) > limit:
                rule = f"at most max_{name} {limit} of configuration {config.name!r}"
                raise must("Job", name, rule, getattr(self, name))

    def chunks(self, config: Config) -> int:
        """Plain passes C."""
        return config.chunks(self.width)

    def passes(self, config: Config) -> int:
        """Score passes: plain, then lifted."""
        return config.chunks(self.width) + (config.lifted_passes if self.lift else 0)

    def descriptor(self) -> bytes:
        """The descriptor, 64 bytes."""
        numbers: dict[str, int] = {field.name: int(getattr(self, field.name)) for field in _NUMBERS}
        numbers |= {"magic": MAGIC, "version": DESCRIPTOR_VERSION}
        numbers["flags"] = sum(int(getattr(self, flag.name)) << flag.bit for flag in FLAGS)
        return pack_descriptor(numbers)

    @classmethod
    def from_descriptor(cls, data: bytes) -> Job:
        """The job of a well-formed descriptor.

        Raises:
            DtpError: wrong length, magic, version or flags, or a field that :class:`Job` refuses.
        """
        numbers = unpack_descriptor(data)
        for name, wanted in (("magic", MAGIC), ("version", DESCRIPTOR_VERSION)):
            if numbers[name] != wanted:
                raise must("Job", name, f"{wanted:#x}", f"{numbers[name]:#x}")
        if numbers["flags"] >> len(FLAGS):
            raise must("Job", "flags", f"below {1 << len(FLAGS)}", numbers["flags"])
        values: dict[str, Any] = {field.name: numbers[field.name] for field in _NUMBERS}
        values |= {flag.name: bool(numbers["flags"] >> flag.bit & 1) for flag in FLAGS}
        return cls(**values)


_NUMBERS = tuple(field for field in FIELDS if field.name not in ("magic", "version", "flags"))


def _range(field: Field) -> tuple[int, int]:
    if field.name in SHIFT_BITS:
        return 0, (1 << SHIFT_BITS[field.name]) - 1
    return signed_range(8 * field.bytes) if field.signed else (0, (1 << 8 * field.bytes) - 1)


def pack_descriptor(
    numbers: dict[str, int], fields: Sequence[Field] = FIELDS, size: int = DESCRIPTOR_BYTES
) -> bytes:
    """``size`` bytes from a number for each of ``fields``; takes wrong ones too, if their bytes hold them."""
    data = bytearray(size)
    for field in fields:
        value = numbers[field.name].to_bytes(field.bytes, "little", signed=field.signed)
        data[field.offset : field.offset + field.bytes] = value
    return bytes(data)


def unpack_descriptor(
    data: bytes, fields: Sequence[Field] = FIELDS, size: int = DESCRIPTOR_BYTES
) -> dict[str, int]:
    """The numbers of ``fields``, unchecked; raises DtpError for a wrong length."""
    if len(data) != size:
        raise must("descriptor", "length", f"{size} bytes", len(data))
    return {
        f.name: int.from_bytes(data[f.offset : f.offset + f.bytes], "little", signed=f.signed) for f in fields
    }


def descriptor_offset(name: str) -> int:
    """First byte of a field of the descriptor."""
    return next(field.offset for field in FIELDS if field.name == name)


def descriptor_error(config: Config, data: bytes, *, gated: bool = False) -> ErrorCode:
    """What the processor, ``gated`` or not, says to 64 bytes taken as a descriptor."""
    n = unpack_descriptor(data)
    flags = n["flags"]
    known = len(FLAGS) if gated else len(FLAGS) - GATE_FLAGS
    lift_alone = bool(flags >> _bit("lift") & 1) and not flags >> _bit("bias") & 1
    for code, wrong in (
        (ErrorCode.MAGIC, n["magic"] != MAGIC),
        (ErrorCode.VERSION, n["version"] != DESCRIPTOR_VERSION),
        (ErrorCode.FLAGS, bool(flags >> known) or lift_alone),
        (ErrorCode.TOKENS, not 1 <= n["tokens"] <= config.max_tokens),
        (ErrorCode.VALID_LENGTH, not 1 <= n["valid_length"] <= n["tokens"]),
        (ErrorCode.WIDTH, not 1 <= n["width"] <= config.max_width),
        (ErrorCode.SHIFT, any(n[name] >> bits for name, bits in SHIFT_BITS.items())),
    ):
        if wrong:
            return code
    return ErrorCode.NONE


def _bit(name: str) -> int:
    return next(flag.bit for flag in FLAGS if flag.name == name)


def descriptor_table(fields: Sequence[Field] = FIELDS, flags: Sequence[Flag] = FLAGS) -> str:
    """A descriptor as a Markdown table."""
    lines = ["| byte | field | meaning |", "|---|---|---|"]
    for field in fields:
        last = field.offset + field.bytes - 1
        place = f"{field.offset}" if field.bytes == 1 else f"{field.offset}–{last}"
        kind = f"{'s' if field.signed else 'u'}{8 * field.bytes}"
        lines.append(f"| {place} | `{field.name}` {kind} | {field.meaning} |")
        if field.name == "flags":
            place = f"{field.offset}, bit"
            lines += [f"| {place} {flag.bit} | `{flag.name}` | {flag.meaning} |" for flag in flags]
    return "\n".join(lines) + "\n"


# ---- order and length of the input -------------------------------------------------------------------------


def operand_order(config: Config, tokens: int) -> list[tuple[str, int]]:
    """Sections of operands in stream order: ``("q", group)``, ``("k", block)`` or ``("v", block)``."""
    blocks, groups = config.blocks(tokens), config.groups(tokens)
    delay = config.lookahead
    order: list[tuple[str, int]] = []
    for i in range(max(blocks + delay, (groups - 1) * blocks + 1)):
        if i % blocks == 0 and i // blocks < groups:
            order.append(("q", i // blocks))
        if i < blocks:
            order.append(("k", i))
        if delay <= i < blocks + delay:
            order.append(("v", i - delay))
    return order


def long_group(config: Config, chunks: int) -> bool:
    """Whether a group's plain words last longer than the loader's search for the section behind the next.

    It looks at one candidate a cycle, three an i of the order, of which ``lookahead`` may have none.
    """
    return chunks * config.pass_steps >= 3 * config.lookahead + 6


def descriptor_entries(config: Config) -> int:
    """Entries of the descriptor."""
    return -(-DESCRIPTOR_BYTES // config.entry_bytes)


def mask_entries(config: Config, tokens: int) -> int:
    """Entries of a block mask."""
    return -(-config.blocks(tokens) * config.mask_row_bytes // config.entry_bytes)


def bias_elements(config: Config) -> int:
    """Elements that carry a token's bias word."""
    return BIAS_WORD_BITS // config.operand_bits


def query_factor_elements(config: Config) -> int:
    """Words of a query group's factor batch: R lanes of q, then C."""
    return config.max_frame_rank * (1 + config.metric_rank)


def key_factor_elements(config: Config, chunks: int, lift: bool) -> int:
    """Words of a factor batch of keys: all lanes of k, C in lifting jobs, the bias word."""
    factors = config.max_frame_rank * config.metric_rank if lift else 0
    return chunks * config.block + factors + bias_elements(config)


def batch_entries(config: Config, elements: int) -> int:
    """Entries of a factor batch of so many words."""
    return -(-elements // config.entry_words)


def key_batches(config: Config, block: int) -> range:
    """Factor batches of keys in front of a block: those that begin in it."""
    first = -(-block * config.block // config.lift_tokens)
    return range(first, -(-(block + 1) * config.block // config.lift_tokens))


def section_entries(config: Config, job: Job, kind: str, index: int) -> int:
    """Entries of one section of :func:`operand_order`, factor batches included."""
    chunks = job.chunks(config)
    plain = chunks * config.pass_steps
    if kind == "q":
        factors = batch_entries(config, query_factor_elements(config)) if job.lift else 0
        return factors + batch_entries(config, plain)
    if kind == "k" and job.bias:
        batch = batch_entries(config, key_factor_elements(config, chunks, job.lift))
        return len(key_batches(config, index)) * batch + plain
    return plain


def job_entries(config: Config, job: Job) -> int:
    """Entries of the whole job."""
    total = descriptor_entries(config) + (mask_entries(config, job.tokens) if job.masked else 0)
    order = operand_order(config, job.tokens)
    return total + sum(section_entries(config, job, *section) for section in order)


def output_beats(config: Config, job: Job) -> int:
    """Beats of a job's output, the status record included."""
    steps = config.groups(job.tokens) * job.chunks(config) * config.pass_steps
    return steps * config.output_entry_beats + status_beats(config)


def status_beats(config: Config) -> int:
    """Beats of a status record."""
    return -(-STATUS_BYTES // config.output_bytes)


# ---- packing -----------------------------------------------------------------------------------------------


def pack_job(
    config: Config,
    job: Job,
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    query_factors: ArrayLike | None = None,
    key_factors: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    block_mask: ArrayLike | None = None,
) -> Bytes:
    """All input beats of a job.

    Parameters
    ----------
    queries, keys, values: (L, d) integers of ``operand_bits``
    query_factors, key_factors: (L, R, r) integers of ``operand_bits``, lifting jobs only; smaller R, r are
        padded
    bias: (L,) 16-bit integers, bias jobs only; None is 0
    block_mask: (blocks, blocks) booleans, query blocks by key blocks, masked jobs only

    Returns
    -------
    uint8 (beats, input_bytes); tlast belongs to the last beat.

    Raises
    ------
    DtpError
        for a shape or a number that does not fit, or an operand that the flags do not ask for.
    """
    job.check(config)
    shape = (job.tokens, job.width)
    sections = {
        "q": _query_sections(config, job, _operand(config, "queries", queries, shape), query_factors),
        "k": _key_sections(config, job, _operand(config, "keys", keys, shape), key_factors, bias),
        "v": _value_sections(config, job, _operand(config, "values", values, shape)),
    }
    parts = [_padded(np.frombuffer(job.descriptor(), dtype=np.uint8), config.entry_bytes)]
    if job.masked:
        parts.append(_mask_section(config, job, block_mask))
    elif block_mask is not None:
        raise must("pack_job", "block_mask", "absent unless the job is masked", "given")
    parts += [sections[kind][index] for kind, index in operand_order(config, job.tokens)]
    return np.concatenate(parts).reshape(-1, config.input_bytes)


def last_flags(beats: Bytes) -> NDArray[np.bool_]:
    """tlast of one job's beats."""
    flags = np.zeros(len(beats), dtype=np.bool_)
    flags[-1:] = True
    return flags


def _operand(config: Config, name: str, array: ArrayLike, shape: tuple[int, ...]) -> Int:
    given = np.asarray(array)
    if given.shape != shape:
        raise must("pack_job", name, f"of shape {shape}", given.shape)
    return _integers(name, given, config.operand_bits)


def _integers(name: str, given: NDArray[Any], bits: int) -> Int:
    if given.dtype.kind not in "iu":
        raise must("pack_job", name, "of an integer type", str(given.dtype))
    low, high = signed_range(bits)
    if given.size and (int(given.min()) < low or int(given.max()) > high):
        raise must("pack_job", name, f"in {low} … {high}", [int(given.min()), int(given.max())])
    return given.astype(np.int64)


def _padded(data: Bytes, multiple: int) -> Bytes:
    return np.pad(data, (0, -len(data) % multiple))


def _bytes(config: Config, array: Int) -> Bytes:
    """(n, …) operands as (n, bytes)."""
    kind = "<i1" if config.operand_bits == 8 else "<i2"
    count = len(array)
    return np.ascontiguousarray(array.astype(kind)).reshape(count, -1).view(np.uint8).reshape(count, -1)


def _grid(array: Int, tokens: int, width: int) -> Int:
    """(L, d) padded with zeros to (tokens, width)."""
    return np.pad(array, ((0, tokens - array.shape[0]), (0, width - array.shape[1])))


def _factors(config: Config, job: Job, name: str, factors: ArrayLike | None) -> Int | None:
    """(L, R·r) of the configuration's ranks, ρ-major, or None for a job without lift."""
    if not job.lift:
        if factors is not None:
            raise must("pack_job", name, "absent unless the job lifts", "given")
        return None
    if factors is None:
        raise must("pack_job", name, "given in a lifting job", None)
    return pad_factors(config, _integers(name, np.asarray(factors), config.operand_bits), job.tokens).reshape(
        job.tokens, -1
    )


def pad_factors(config: Config, factors: ArrayLike, tokens: int) -> Int:
    """Metric factors (L, R', r') with zero coordinates up to (L, max_frame_rank, metric_rank).

    Raises:
        DtpError: another number of tokens, or ranks beyond the configuration's.
    """
    given = np.asarray(factors, dtype=np.int64)
    most = (config.max_frame_rank, config.metric_rank)
    if given.ndim != 3 or given.shape[0] != tokens or given.shape[1] > most[0] or given.shape[2] > most[1]:
        rule = f"(tokens {tokens}, at most {most[0]}, at most {most[1]})"
        raise must("factors", "shape", rule, given.shape)
    return np.pad(given, ((0, 0), (0, most[0] - given.shape[1]), (0, most[1] - given.shape[2])))


def _batches(config: Config, elements: Int) -> Bytes:
    """(batches, tokens of a batch, elements) as (batches, bytes), each padded to whole entries."""
    data = _bytes(config, elements.transpose(0, 2, 1))
    return np.pad(data, ((0, 0), (0, -data.shape[1] % config.entry_bytes)))


def _query_sections(config: Config, job: Job, queries: Int, factors: ArrayLike | None) -> list[Bytes]:
    groups, rows, segments = config.groups(job.tokens), config.rows, config.segments
    padded = _grid(queries, groups * rows, job.chunks(config) * config.block)
    words = padded.reshape(groups, rows, -1, segments).transpose(0, 2, 3, 1)
    data = _bytes(config, words)
    data = np.pad(data, ((0, 0), (0, -data.shape[1] % config.entry_bytes)))
    packed = _factors(config, job, "query_factors", factors)
    if packed is not None:
        vector = padded[: job.tokens, : config.max_frame_rank]
        elements = np.concatenate([vector, packed], axis=1)
        elements = _grid(elements, groups * rows, query_factor_elements(config)).reshape(groups, rows, -1)
        # Every segment gets the whole factor: each makes its own lanes of the group.
        data = np.concatenate([_batches(config, np.tile(elements, (1, segments, 1))), data], axis=1)
    return list(data)


def _key_sections(
    config: Config, job: Job, keys: Int, factors: ArrayLike | None, bias: ArrayLike | None
) -> list[Bytes]:
    blocks, segments = config.blocks(job.tokens), config.segments
    padded = _grid(keys, blocks * config.block, job.chunks(config) * config.block)
    entries = padded.reshape(blocks, config.pass_steps, segments, -1, config.block).transpose(0, 3, 1, 2, 4)
    data = list(_bytes(config, entries))
    packed = _factors(config, job, "key_factors", factors)
    if not job.bias:
        if bias is not None:
            raise must("pack_job", "bias", "absent unless the job has one", "given")
        return data
    word = np.asarray(np.zeros(job.tokens, dtype=np.int64) if bias is None else bias)
    if word.shape != (job.tokens,):
        raise must("pack_job", "bias", f"of shape {(job.tokens,)}", word.shape)
    columns = [padded[: job.tokens]]
    columns += [] if packed is None else [packed]
    columns += bias_columns(config, _integers("bias", word, BIAS_WORD_BITS))
    elements = np.concatenate(columns, axis=1)
    count = key_batches(config, blocks - 1).stop
    # A token of padding is all zeros, its bias word too.
    whole = _grid(elements, count * config.lift_tokens, elements.shape[1])
    silent = np.concatenate(bias_columns(config, np.zeros(1, np.int64)), axis=1)
    whole[job.tokens :, -bias_elements(config) :] = silent
    batches = _batches(config, whole.reshape(count, config.lift_tokens, -1))
    return [np.concatenate([*batches[key_batches(config, n)], data[n]]) for n in range(blocks)]


def bias_columns(config: Config, bias: Int) -> list[Int]:
    """Elements of bias words, (L, 1) each: the word itself, or low byte − 128 and high byte."""
    if config.operand_bits == BIAS_WORD_BITS:
        return [bias[:, np.newaxis]]
    low = bias & 255
    return [(low - 128)[:, np.newaxis], ((bias - low) >> 8)[:, np.newaxis]]


def _value_sections(config: Config, job: Job, values: Int) -> list[Bytes]:
    blocks, segments = config.blocks(job.tokens), config.segments
    padded = _grid(values, blocks * config.block, job.chunks(config) * config.block)
    return list(_bytes(config, padded.reshape(blocks, config.block, -1, segments).transpose(0, 2, 3, 1)))


def _mask_section(config: Config, job: Job, block_mask: ArrayLike | None) -> Bytes:
    blocks = config.blocks(job.tokens)
    if block_mask is None:
        raise must("pack_job", "block_mask", "given in a masked job", None)
    mask = np.asarray(block_mask)
    if mask.shape != (blocks, blocks) or mask.dtype != np.bool_:
        rule = f"boolean of shape {(blocks, blocks)}"
        raise must("pack_job", "block_mask", rule, f"{mask.dtype} {mask.shape}")
    rows = np.packbits(mask, axis=1, bitorder="little")
    whole = np.pad(rows, ((0, 0), (0, config.mask_row_bytes - rows.shape[1])))
    return _padded(whole.reshape(-1), config.entry_bytes)


# ---- outputs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StatusRecord:
    """The last 16 bytes of a job's output."""

    error: int = 0
    tag: int = 0
    empty_rows: int = 0
    score_saturations: int = 0
    lift_saturations: int = 0
    output_saturations: int = 0

    @staticmethod
    def offset(name: str) -> int:
        """First byte of a field."""
        places = {field.name: 2 + 2 * n for n, field in enumerate(fields(StatusRecord))}
        return places[name] + (name == "error")

    def to_bytes(self) -> bytes:
        """The record, 16 bytes."""
        return self.pack()

    def pack(self) -> bytes:
        """The record, 16 bytes."""
        rest = [int(getattr(self, field.name)) for field in fields(self)[1:]]
        words = [STATUS_MAGIC, VERSION | self.error << 8, *rest]
        return b"".join(word.to_bytes(2, "little") for word in words) + bytes(STATUS_BYTES - 2 * len(words))

    @classmethod
    def parse(cls, data: bytes) -> StatusRecord:
        """A record from 16 bytes or more (the rest is padding of the beat).

        Raises:
            DtpError: too short, wrong magic, version or padding.
        """
        if len(data) < STATUS_BYTES:
            raise must("StatusRecord", "length", f"at least {STATUS_BYTES} bytes", len(data))
        word = [int.from_bytes(data[n : n + 2], "little") for n in range(0, STATUS_BYTES, 2)]
        if word[0] != STATUS_MAGIC:
            raise must("StatusRecord", "magic", f"{STATUS_MAGIC:#06x}", f"{word[0]:#06x}")
        if word[1] & 255 != VERSION:
            raise must("StatusRecord", "version", str(VERSION), word[1] & 255)
        if any(data[14:]):
            raise must("StatusRecord", "padding", "0", bytes(data[14:]).hex())
        return cls(word[1] >> 8, *word[2:7])


def unpack_outputs(
    config: Config, job: Job, beats: ArrayLike, user: ArrayLike
) -> tuple[Int, NDArray[np.bool_], StatusRecord]:
    """Outputs of a job from its output beats.

    Parameters
    ----------
    beats: uint8 (beats, output_bytes), one packet, the status record included
    user: (beats,) tuser

    Returns
    -------
    outputs (L, d), empty_rows (L,) and the status record. A job that was answered by its status alone gives
    outputs (0, d) and empty_rows (0,).

    Raises
    ------
    DtpError
        for another number of beats, tuser that changes inside a group, or a wrong status record.
    """
    data = np.asarray(beats, dtype=np.uint8)
    flags = np.asarray(user, dtype=np.uint64)
    tail = status_beats(config)
    if data.ndim != 2 or data.shape[1] != config.output_bytes or flags.shape != data.shape[:1]:
        rule = f"(beats, {config.output_bytes}) with one user word a beat"
        raise must("unpack_outputs", "beats", rule, (data.shape, flags.shape))
    if len(data) not in (tail, output_beats(config, job)):
        rule = f"{output_beats(config, job)} beats, or {tail} of a status"
        raise must("unpack_outputs", "beats", rule, len(data))
    status = StatusRecord.parse(data[-tail:].tobytes())
    if flags[-tail:].any():
        raise must("unpack_outputs", "user", "0 in the status record", flags[-tail:].tolist())
    if len(data) == tail:
        return np.zeros((0, job.width), np.int64), np.zeros(0, np.bool_), status
    groups, rows, segments = config.groups(job.tokens), config.rows, config.segments
    kind = "<i1" if config.output_bits == 8 else "<i2"
    whole = np.ascontiguousarray(data[:-tail]).reshape(-1).view(kind).astype(np.int64)
    outputs = whole.reshape(groups, -1, segments, rows).transpose(0, 3, 1, 2).reshape(groups * rows, -1)
    group_user = flags[:-tail].reshape(groups, -1)
    if (group_user != group_user[:, :1]).any():
        group = int(np.argmax((group_user != group_user[:, :1]).any(axis=1)))
        raise must("unpack_outputs", "user", "the same in all beats of a group", f"changing in group {group}")
    bits = group_user[:, :1] >> np.arange(rows, dtype=np.uint64) & np.uint64(1)
    empty = bits.astype(np.bool_).reshape(-1)
    if outputs[:, job.width :].any() or outputs[job.tokens :].any():
        raise must("unpack_outputs", "beats", "0 past tokens and width", "something else")
    if empty[job.tokens :].any():
        raise DtpError("unpack_outputs.user must not flag rows past tokens")
    return outputs[: job.tokens, : job.width], empty[: job.tokens], status


# ---- memories ----------------------------------------------------------------------------------------------


def address_keys(config: Config, slot: int, chunk: int, key: int) -> int:
    """Word of the moving memory: lanes chunk·block … of keys ``key`` … key + S − 1, key a multiple of S."""
    return _moving_base(config, slot, 0) + (chunk * config.max_tokens + key) // config.segments


def address_values(config: Config, slot: int, block: int, step: int) -> int:
    """Word of the moving memory with columns step·S … of the values of a block."""
    return _moving_base(config, slot, 1) + block * (config.max_width // config.segments) + step


def address_lifted(config: Config, slot: int, lifted_pass: int, key: int) -> int:
    """Word of the lifted memory of keys ``key`` … key + S − 1."""
    return ((slot * config.lifted_passes + lifted_pass) * config.max_tokens + key) // config.segments


def address_bias(config: Config, slot: int, key: int) -> int:
    """Word of the bias memory of keys ``key`` … key + S − 1."""
    return (slot * config.max_tokens + key) // config.segments


def address_query(config: Config, chunk: int, group: int, feed: int) -> int:
    """Word of the query memory of a group counted over all jobs; lifted passes stand from ``max_chunks`` on."""
    return (chunk * config.query_groups + group % config.query_groups) * config.pass_steps + feed


def _moving_region(config: Config) -> int:
    return config.max_chunks * config.max_tokens // config.segments


def _moving_base(config: Config, slot: int, values: int) -> int:
    # Keys and values of a slot take the same number of words.
    return (2 * slot + values) * _moving_region(config)


def moving_depth(config: Config) -> int:
    """Words of the moving memory, each S·block operands: two slots of keys and values."""
    return 4 * _moving_region(config)


def lifted_depth(config: Config) -> int:
    """Words of the lifted memory, each S·block × lifted_bits: two slots."""
    return 2 * config.lifted_passes * config.max_tokens // config.segments


def bias_depth(config: Config) -> int:
    """Words of the bias memory, each S × 24 bits: two slots."""
    return 2 * config.max_tokens // config.segments


def query_depth(config: Config) -> int:
    """Words of the query memory, each rows·S × row_bits: the ring."""
    return (config.max_chunks + config.lifted_passes) * config.query_groups * config.pass_steps


