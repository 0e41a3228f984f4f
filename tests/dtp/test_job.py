"""Descriptor, stream order, packing, status record and addresses of a job."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtp.config import PRESETS, Config
from dtp.errors import DtpError
from dtp.job import (
    DESCRIPTOR_BYTES,
    FIELDS,
    FLAGS,
    SHIFT_BITS,
    ErrorCode,
    Job,
    StatusRecord,
    address_bias,
    address_keys,
    address_lifted,
    address_query,
    address_values,
    batch_entries,
    bias_columns,
    bias_depth,
    descriptor_error,
    descriptor_offset,
    descriptor_table,
    job_entries,
    key_batches,
    key_factor_elements,
    last_flags,
    lifted_depth,
    moving_depth,
    operand_order,
    output_beats,
    pack_descriptor,
    pack_job,
    query_depth,
    query_factor_elements,
    section_entries,
    status_beats,
    unpack_descriptor,
    unpack_outputs,
)

CONFIGS = {name: Config.load(name) for name in PRESETS}
CONFIGS["16 bits"] = CONFIGS["tiny"].changed(operand_bits=16, input_bytes=4)
CONFIGS["few rows"] = CONFIGS["tiny"].changed(rows=2, lanes=64, block=16, output_bytes=8)


def make(config: Config, kind: str, tokens: int, width: int, seed: int = 0, **more: Any) -> tuple[Job, dict[str, Any]]:
    """A job and random operands for it."""
    rng = np.random.default_rng(seed)
    half = 1 << (config.operand_bits - 1)
    job = Job(tokens=tokens, valid_length=tokens, width=width, bias=kind != "dot", lift=kind == "lift", **more)
    operands: dict[str, Any] = {n: rng.integers(-half, half, (tokens, width)) for n in ("queries", "keys", "values")}
    if kind == "lift":
        shape = (tokens, config.max_frame_rank, config.metric_rank)
        operands |= {n: rng.integers(-half, half, shape) for n in ("query_factors", "key_factors")}
    if kind != "dot":
        operands["bias"] = rng.integers(-(1 << 15), 1 << 15, tokens)
    if job.masked:
        operands["block_mask"] = rng.random((config.blocks(tokens),) * 2) < 0.5
    return job, operands


# ---- descriptor ----------------------------------------------------------------------------------------------------


def test_fields_do_not_overlap() -> None:
    used = [n for field in FIELDS for n in range(field.offset, field.offset + field.bytes)]
    assert len(used) == len(set(used)) and max(used) < DESCRIPTOR_BYTES
    assert all(field.offset % field.bytes == 0 for field in FIELDS)
    assert {flag.bit for flag in FLAGS} == set(range(len(FLAGS)))
    assert descriptor_offset("tag") == 4


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    values: dict[str, Any] = {"tokens": draw(st.integers(1, 65535)), "width": draw(st.integers(1, 65535))}
    values["valid_length"] = draw(st.integers(1, values["tokens"]))
    values["bias"] = draw(st.booleans())
    values["lift"] = values["bias"] and draw(st.booleans())
    values |= {name: draw(st.booleans()) for name in ("causal", "masked")}
    for field in FIELDS:
        if field.name in SHIFT_BITS:
            values[field.name] = draw(st.integers(0, (1 << SHIFT_BITS[field.name]) - 1))
        elif field.name.endswith("_scale") or field.name == "tag":
            low = -(1 << 15) if field.signed else 0
            values[field.name] = draw(st.integers(low, low + 65535))
    return Job(**values)


@given(jobs())
def test_descriptor_round_trip(job: Job) -> None:
    data = job.descriptor()
    assert len(data) == DESCRIPTOR_BYTES
    assert Job.from_descriptor(data) == job
    assert pack_descriptor(unpack_descriptor(data)) == data
    for field in FIELDS:
        if hasattr(job, field.name):
            raw = int.from_bytes(data[field.offset : field.offset + field.bytes], "little", signed=field.signed)
            assert raw == getattr(job, field.name)


GOOD = {"tokens": 20, "valid_length": 20, "width": 10}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": 0, "valid_length": 0}, "Job.tokens must be at least 1, not 0"),
        ({"tokens": 65536}, "Job.tokens must be an integer in 0 … 65535, not 65536"),
        ({"width": 0}, "Job.width must be at least 1, not 0"),
        ({"valid_length": 21}, "Job.valid_length must be at most tokens 20, not 21"),
        ({"valid_length": 0}, "Job.valid_length must be at least 1, not 0"),
        ({"lift": True}, "Job.bias must be True when lift is, not False"),
        ({"bias": 1}, "Job.bias must be True or False, not 1"),
        ({"query_scale": -1}, "Job.query_scale must be an integer in 0 … 65535, not -1"),
        ({"bias_scale": 32768}, "Job.bias_scale must be an integer in -32768 … 32767, not 32768"),
        *(
            ({name: 1 << bits}, f"Job.{name} must be an integer in 0 … {(1 << bits) - 1}, not {1 << bits}")
            for name, bits in SHIFT_BITS.items()
        ),
        ({"tag": 1.5}, "Job.tag must be an integer in 0 … 65535, not 1.5"),
    ],
)
def test_refused_jobs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError, match=f"^{re.escape(message)}$"):
        Job(**{**GOOD, **changes})


@pytest.mark.parametrize("field, limit", [("tokens", 64), ("width", 16)])
def test_limits_of_a_configuration(field: str, limit: int) -> None:
    config = CONFIGS["tiny"]
    Job(**{**GOOD, field: limit}).check(config)
    message = f"Job.{field} must be at most max_{field} {limit} of configuration 'tiny', not {limit + 1}"
    with pytest.raises(DtpError, match=f"^{re.escape(message)}$"):
        Job(**{**GOOD, field: limit + 1}).check(config)


@pytest.mark.parametrize(
    "changes, code",
    [
        ({}, ErrorCode.NONE),
        ({"magic": 0x4453}, ErrorCode.MAGIC),
        ({"version": 0}, ErrorCode.VERSION),
        ({"flags": 0x10}, ErrorCode.FLAGS),
        ({"flags": 0x02}, ErrorCode.FLAGS),
        ({"tokens": 65}, ErrorCode.TOKENS),
        ({"tokens": 0}, ErrorCode.TOKENS),
        ({"valid_length": 0}, ErrorCode.VALID_LENGTH),
        ({"valid_length": 21}, ErrorCode.VALID_LENGTH),
        ({"width": 17}, ErrorCode.WIDTH),
        ({"width": 0}, ErrorCode.WIDTH),
        ({"lift_shift": 1 << SHIFT_BITS["lift_shift"]}, ErrorCode.SHIFT),
        ({"key_outer_shift": 32}, ErrorCode.SHIFT),
        ({"width": 0, "magic": 1}, ErrorCode.MAGIC),
    ],
)
def test_descriptor_error(changes: dict[str, int], code: ErrorCode) -> None:
    data = pack_descriptor({**unpack_descriptor(Job(**GOOD).descriptor()), **changes})
    assert descriptor_error(CONFIGS["tiny"], data) == code
    assert code.refuses == (code != ErrorCode.NONE)


def test_a_gated_job_needs_a_gate() -> None:
    data = Job(**GOOD | {"gated": True}).descriptor()
    assert Job.from_descriptor(data).gated
    assert descriptor_error(CONFIGS["tiny"], data, gated=True) is ErrorCode.NONE
    assert descriptor_error(CONFIGS["tiny"], data) is ErrorCode.FLAGS
    unknown = data[:3] + bytes([data[3] | 0x20]) + data[4:]
    assert descriptor_error(CONFIGS["tiny"], unknown, gated=True) is ErrorCode.FLAGS


def test_errors_of_the_stream_do_not_refuse() -> None:
    assert not ErrorCode.EARLY_LAST.refuses and not ErrorCode.LATE_LAST.refuses
    assert ErrorCode.CUT.refuses


def test_from_descriptor_refuses() -> None:
    data = Job(**GOOD).descriptor()
    with pytest.raises(DtpError, match=r"^Job\.magic must be 0x4454, not '0x4400'$"):
        Job.from_descriptor(b"\0" + data[1:])
    with pytest.raises(DtpError, match=r"^Job\.flags must be below 32, not 32$"):
        Job.from_descriptor(data[:3] + b"\x20" + data[4:])
    with pytest.raises(DtpError, match=r"^descriptor\.length must be 64 bytes, not 63$"):
        Job.from_descriptor(data[:63])


def test_table_of_the_docs() -> None:
    """The table in the contract is the one that the code uses."""
    text = (Path(__file__).parents[2] / "docs" / "interface.md").read_text(encoding="utf-8")
    assert descriptor_table() in text


# ---- order and packing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_order_is_that_of_a_dense_walk(name: str) -> None:
    """Every section once; what a dense walk of group 0 needs comes in its order; later groups before their turn."""
    config = CONFIGS[name]
    for tokens in range(1, config.max_tokens + 1, 7):
        order = operand_order(config, tokens)
        blocks, groups = config.blocks(tokens), config.groups(tokens)
        assert sorted(order) == sorted(
            [("q", g) for g in range(groups)] + [(kind, b) for kind in "kv" for b in range(blocks)]
        )
        assert order[:2] == [("q", 0), ("k", 0)]
        place = {section: n for n, section in enumerate(order)}
        for block in range(blocks - 1):
            assert place["k", block] < place["k", block + 1] and place["v", block] < place["v", block + 1]
        for block in range(blocks - config.lookahead):
            assert place["v", block] == place["k", block + config.lookahead] + 1
        for group in range(groups - 1):
            assert place["q", group] < place["q", group + 1]


def slow_pack(config: Config, job: Job, operands: dict[str, Any]) -> bytes:
    """The contract, number by number."""
    c, size = config, config.operand_bytes
    out = bytearray(job.descriptor())

    def pad() -> None:
        out.extend(bytes(-len(out) % c.entry_bytes))

    def put(value: int) -> None:
        out.extend(int(value).to_bytes(size, "little", signed=True))

    def at(name: str, token: int, lane: int) -> int:
        array = operands[name]
        return int(array[token, lane]) if token < job.tokens and lane < job.width else 0

    def factor(name: str, token: int, index: int) -> int:
        return int(operands[name].reshape(job.tokens, -1)[token, index]) if token < job.tokens else 0

    pad()
    blocks, width = c.blocks(job.tokens), c.chunks(job.width) * c.block
    if job.masked:
        for row in range(blocks):
            word = sum(int(operands["block_mask"][row, j]) << j for j in range(blocks))
            out.extend(word.to_bytes(c.mask_row_bytes, "little"))
        pad()
    inner = c.max_frame_rank * c.metric_rank
    for kind, index in operand_order(c, job.tokens):
        if kind == "q":
            if job.lift:
                for element in range(c.max_frame_rank + inner):
                    for position in range(c.lift_tokens):
                        token = index * c.rows + position % c.rows
                        if element < c.max_frame_rank:
                            put(at("queries", token, element))
                        else:
                            put(factor("query_factors", token, element - c.max_frame_rank))
                pad()
            for word in range(width // c.segments):
                for position in range(c.lift_tokens):
                    put(at("queries", index * c.rows + position % c.rows, word * c.segments + position // c.rows))
            pad()
        elif kind == "k":
            if job.bias:
                for batch in range(-(-c.max_tokens // c.lift_tokens)):
                    if not index * c.block <= batch * c.lift_tokens < (index + 1) * c.block:
                        continue
                    tokens = range(batch * c.lift_tokens, (batch + 1) * c.lift_tokens)
                    for lane in range(width):
                        for token in tokens:
                            put(at("keys", token, lane))
                    for element in range(inner if job.lift else 0):
                        for token in tokens:
                            put(factor("key_factors", token, element))
                    words = [int(operands["bias"][t]) if t < job.tokens else 0 for t in tokens]
                    if size == 2:
                        for word in words:
                            put(word)
                    else:
                        for word in words:
                            put((word & 255) - 128)
                        for word in words:
                            put(word >> 8)
                    pad()
            for chunk in range(width // c.block):
                for step in range(c.pass_steps):
                    for segment in range(c.segments):
                        for lane in range(c.block):
                            token = index * c.block + step * c.segments + segment
                            put(at("keys", token, chunk * c.block + lane))
        else:
            for step in range(width // c.segments):
                for segment in range(c.segments):
                    for lane in range(c.block):
                        put(at("values", index * c.block + lane, step * c.segments + segment))
    return bytes(out)


@pytest.mark.parametrize("kind", ["dot", "bias", "lift"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packing_against_the_contract(name: str, kind: str) -> None:
    config = CONFIGS[name]
    for tokens, width, masked in ((1, 1, False), (2 * config.block + 3, config.max_width - 1, True)):
        job, operands = make(config, kind, tokens, width, tokens, masked=masked)
        beats = pack_job(config, job, **operands)
        assert beats.dtype == np.uint8 and beats.shape[1] == config.input_bytes
        assert beats.tobytes() == slow_pack(config, job, operands)
        assert len(beats) == job_entries(config, job) * config.entry_beats
        assert last_flags(beats).tolist() == [False] * (len(beats) - 1) + [True]


@pytest.mark.parametrize("name", CONFIGS)
def test_section_lengths(name: str) -> None:
    config = CONFIGS[name]
    job, _ = make(config, "lift", min(40, config.max_tokens), config.max_width)
    chunks = config.max_chunks
    batch = batch_entries(config, key_factor_elements(config, chunks, True))
    for block in range(config.blocks(job.tokens)):
        plain = section_entries(config, job, "v", block)
        assert plain == chunks * config.pass_steps
        assert section_entries(config, job, "k", block) == plain + len(key_batches(config, block)) * batch
    assert query_factor_elements(config) == config.max_frame_rank * (1 + config.metric_rank)


def test_smaller_ranks_are_padded() -> None:
    config = CONFIGS["tiny"]
    job, operands = make(config, "lift", 9, 5)
    small = {n: operands[n][:, :2, :1] for n in ("query_factors", "key_factors")}
    padded = {n: np.pad(a, ((0, 0), (0, 1), (0, 2))) for n, a in small.items()}
    assert np.array_equal(
        pack_job(config, job, **{**operands, **small}), pack_job(config, job, **{**operands, **padded})
    )


@pytest.mark.parametrize("bits", [8, 16])
def test_bias_words(bits: int) -> None:
    """Every bias word is rebuilt from its elements."""
    config = CONFIGS["tiny"] if bits == 8 else CONFIGS["16 bits"]
    words = np.arange(-(1 << 15), 1 << 15)
    columns = bias_columns(config, words)
    assert all(np.abs(2 * column + 1).max() < 1 << bits for column in columns)
    rebuilt = columns[0] if bits == 16 else columns[0] + 128 + 256 * columns[1]
    assert np.array_equal(rebuilt[:, 0], words)


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("dot", {"queries": np.zeros((5, 4), int)}, "pack_job.queries must be of shape (9, 5), not (5, 4)"),
        ("dot", {"keys": np.full((9, 5), 128)}, "pack_job.keys must be in -128 … 127, not [128, 128]"),
        ("dot", {"values": np.zeros((9, 5))}, "pack_job.values must be of an integer type, not 'float64'"),
        ("dot", {"bias": np.zeros(9, int)}, "pack_job.bias must be absent unless the job has one, not 'given'"),
        ("lift", {"key_factors": None}, "pack_job.key_factors must be given in a lifting job, not None"),
        ("bias", {"key_factors": np.zeros((9, 3, 3), int)},
         "pack_job.key_factors must be absent unless the job lifts, not 'given'"),
        ("lift", {"query_factors": np.zeros((9, 4, 3), int)},
         "factors.shape must be (tokens 9, at most 3, at most 3), not (9, 4, 3)"),
        ("bias", {"bias": np.full(9, 1 << 15)}, "pack_job.bias must be in -32768 … 32767, not [32768, 32768]"),
        ("dot", {"block_mask": np.ones((2, 2), bool)},
         "pack_job.block_mask must be absent unless the job is masked, not 'given'"),
    ],
)  # fmt: skip
def test_refused_operands(kind: str, changes: dict[str, Any], message: str) -> None:
    config = CONFIGS["tiny"]
    job, operands = make(config, kind, 9, 5)
    with pytest.raises(DtpError, match=f"^{re.escape(message)}$"):
        pack_job(config, job, **{**operands, **changes})


def test_packing_is_fast() -> None:
    """Eight heads of the longest lifting job take well under a second of one processor."""
    config = CONFIGS["ecp5-85k"]
    job, operands = make(config, "lift", config.max_tokens, config.max_width)
    start = time.process_time()
    for _ in range(8):
        pack_job(config, job, **operands)
    assert time.process_time() - start < 1


# ---- outputs -------------------------------------------------------------------------------------------------------


def output_stream(config: Config, job: Job, outputs: np.ndarray, empty: np.ndarray, status: StatusRecord) -> Any:
    """Beats and tuser as ``docs/tile.md`` §5 has them, number by number."""
    c, data, user = config, bytearray(), []
    width = c.chunks(job.width) * c.block
    for group in range(c.groups(job.tokens)):
        rows = range(group * c.rows, (group + 1) * c.rows)
        flags = sum(int(r < job.tokens and empty[r]) << (r - group * c.rows) for r in rows)
        for step in range(width // c.segments):
            for segment in range(c.segments):
                for row in rows:
                    lane = step * c.segments + segment
                    value = int(outputs[row, lane]) if row < job.tokens and lane < job.width else 0
                    data += value.to_bytes(c.output_bits // 8, "little", signed=True)
        user += [flags] * (len(data) // c.output_bytes - len(user))
    data += status.to_bytes() + bytes(status_beats(c) * c.output_bytes - 16)
    user += [0] * status_beats(c)
    return np.frombuffer(bytes(data), np.uint8).reshape(-1, c.output_bytes), np.array(user)


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_round_trip(name: str) -> None:
    config = CONFIGS[name]
    rng = np.random.default_rng(5)
    tokens, width = config.block + 1, config.max_width - 3
    job = Job(tokens=tokens, valid_length=tokens, width=width)
    half = 1 << (config.output_bits - 1)
    outputs, empty = rng.integers(-half, half, (tokens, width)), rng.random(tokens) < 0.3
    status = StatusRecord(0, 77, int(empty.sum()), 3, 4, 65535)
    beats, user = output_stream(config, job, outputs, empty, status)
    assert len(beats) == output_beats(config, job)
    got, got_empty, got_status = unpack_outputs(config, job, beats, user)
    assert np.array_equal(got, outputs) and np.array_equal(got_empty, empty) and got_status == status

    alone = unpack_outputs(config, job, beats[-status_beats(config) :], user[-status_beats(config) :])
    assert alone[0].shape == (0, width) and alone[1].shape == (0,) and alone[2] == status


def test_refused_outputs() -> None:
    config = CONFIGS["tiny"]
    job = Job(tokens=6, valid_length=6, width=7)
    beats, user = output_stream(config, job, np.ones((6, 7), int), np.zeros(6, bool), StatusRecord())
    with pytest.raises(DtpError, match=r"^unpack_outputs\.beats must be 18 beats, or 2 of a status, not 17$"):
        unpack_outputs(config, job, beats[1:], user[1:])
    with pytest.raises(DtpError, match=r"^unpack_outputs\.user must be the same in all beats of a group"):
        unpack_outputs(config, job, beats, np.eye(1, len(user), 3, dtype=int)[0])
    with pytest.raises(DtpError, match=r"^unpack_outputs\.user must be 0 in the status record"):
        unpack_outputs(config, job, beats, np.eye(1, len(user), len(user) - 1, dtype=int)[0])
    with pytest.raises(DtpError, match=r"^unpack_outputs\.beats must be 0 past tokens and width"):
        unpack_outputs(config, job, np.concatenate([np.ones_like(beats[:-2]), beats[-2:]]), user)
    with pytest.raises(DtpError, match=r"^StatusRecord\.magic must be 0x5344, not 0x0001$|^StatusRecord\.magic"):
        unpack_outputs(config, job, np.ones_like(beats), user)


def test_status_record() -> None:
    record = StatusRecord(255, 0xABCD, 1, 2, 3, 4)
    data = record.to_bytes()
    assert len(data) == 16 and StatusRecord.parse(data) == record
    assert data[StatusRecord.offset("error")] == 255 and StatusRecord.offset("tag") == 4
    assert int.from_bytes(data[StatusRecord.offset("output_saturations") :][:2], "little") == 4
    with pytest.raises(DtpError, match=r"^StatusRecord\.length must be at least 16 bytes, not 15$"):
        StatusRecord.parse(data[:15])
    with pytest.raises(DtpError, match=r"^StatusRecord\.version must be 1, not 2$"):
        StatusRecord.parse(data[:2] + b"\2" + data[3:])
    with pytest.raises(DtpError, match=r"^StatusRecord\.padding must be 0"):
        StatusRecord.parse(data + b"\1")


# ---- memories ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_addresses(name: str) -> None:
    """Every word has one address, and the memories are as deep as needed."""
    c = CONFIGS[name]
    keys = range(0, c.max_tokens, c.segments)
    moving = [address_keys(c, s, n, k) for s in range(2) for n in range(c.max_chunks) for k in keys]
    steps = range(c.max_chunks * c.pass_steps)
    moving += [address_values(c, s, b, t) for s in range(2) for b in range(c.max_blocks) for t in steps]
    assert sorted(moving) == list(range(moving_depth(c)))
    lifted = [address_lifted(c, s, n, k) for s in range(2) for n in range(c.lifted_passes) for k in keys]
    assert sorted(lifted) == list(range(lifted_depth(c)))
    assert sorted(address_bias(c, s, k) for s in range(2) for k in keys) == list(range(bias_depth(c)))
    queries = [
        address_query(c, n, g, f)
        for n in range(c.max_chunks + c.lifted_passes)
        for g in range(c.query_groups)
        for f in range(c.pass_steps)
    ]
    assert sorted(queries) == list(range(query_depth(c)))
    assert address_query(c, 0, c.query_groups + 1, 0) == address_query(c, 0, 1, 0)
