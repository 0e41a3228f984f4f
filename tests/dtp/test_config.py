"""Configuration: presets, every refusal, derived sizes."""

from __future__ import annotations

import numpy as np
import pytest

from dtp.config import PRESETS, Config
from dtp.errors import DtpError


@pytest.mark.parametrize("name", PRESETS)
def test_preset_round_trips_through_toml(name: str) -> None:
    config = Config.load(name)
    assert config.name == name
    again = Config.from_text(config.to_toml())
    assert again == config
    assert again.hash == config.hash


def test_presets_have_the_published_sizes() -> None:
    sizes = {
        name: (c.rows, c.lanes, c.macs, c.max_tokens, c.max_width, c.max_frame_rank, c.block, c.input_bytes)
        for name in PRESETS
        for c in [Config.load(name)]
    }
    assert sizes["tiny"] == (4, 8, 32, 64, 16, 3, 8, 8)
    assert sizes["ecp5-85k"] == (8, 16, 128, 512, 64, 3, 16, 16)
    assert sizes["wide"] == (16, 64, 1024, 512, 64, 3, 16, 64)


def test_name_does_not_change_the_hash_and_everything_else_does() -> None:
    config = Config.load("tiny")
    assert config.changed(name="other").hash == config.hash
    assert config.changed(probability_bits=10).hash != config.hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 3}, "Config.rows must be a power of two, not 3"),
        ({"rows": 128}, "Config.rows must be in 2…64, not 128"),
        ({"rows": 16}, "Config.rows must be a divisor of block 8, not 16"),
        ({"rows": "4"}, "Config.rows must be valid (Input should be a valid integer), not '4'"),
        ({"rows": True}, "Config.rows must be valid (Input should be a valid integer), not True"),
        ({"operand_bits": 12}, "Config.operand_bits must be 8 or 16, not 12"),
        ({"output_bits": 12}, "Config.output_bits must be 8 or 16, not 12"),
        (
            {"operand_bits": 16, "output_bits": 8},
            "Config.output_bits must be at least operand_bits 16, not 8",
        ),
        ({"lanes": 4}, "Config.lanes must be a multiple of block 8, not 4"),
        ({"lanes": 32}, "Config.lanes must be at most block²/4 = 16, not 32"),
        ({"max_tokens": 4}, "Config.max_tokens must be in 8…4096, not 4"),
        ({"max_width": 4, "max_frame_rank": 3}, "Config.max_width must be a multiple of block 8, not 4"),
        (
            {"metric_rank": 4, "max_frame_rank": 3},
            "Config.metric_rank must be at most max_frame_rank 3, not 4",
        ),
        ({"input_bytes": 16}, "Config.input_bytes must be at most one array step, 8 bytes, not 16"),
        ({"output_bytes": 16}, "Config.output_bytes must be at most one output step, 8 bytes, not 16"),
        (
            {"output_bytes": 1, "normaliser_lanes": 1},
            "Config.output_bytes must be at least one output of 16 bits, not 1",
        ),
        ({"normaliser_lanes": 8}, "Config.normaliser_lanes must be at most one output beat, 4 values, not 8"),
        ({"probability_bits": 17}, "Config.probability_bits must be in 8…16, not 17"),
        ({"query_groups": 4, "lookahead": 5}, "Config.query_groups must be more than lookahead 5, not 4"),
        ({"lift_ports": 16}, "Config.lift_ports must be at most block 8, not 16"),
        (
            {"max_tokens": 1024},
            "Config.max_tokens must be at most 8·block·(bytes of one array step) = 512, not 1024",
        ),
        ({"factor_bits": 12}, "Config.factor_bits must be 8 or 16, not 12"),
        ({"transport_lanes": 8}, "Config.transport_lanes must be in 16…256, not 8"),
        ({"transport_lanes": 24}, "Config.transport_lanes must be a power of two, not 24"),
        ({"transport_vectors": 3}, "Config.transport_vectors must be in 1…2, not 3"),
        ({"transport_columns": 6}, "Config.transport_columns must be 4 or 8, not 6"),
        ({"transport_width": 8}, "Config.transport_width must be at least max_width 16, not 8"),
        ({"solve_lanes": 32}, "Config.solve_lanes must be in 1…16, not 32"),
        ({"colour": 1}, "Config.colour is not a key; the keys are name, rows, "),
    ],
)
def test_refused_values(change: dict[str, object], message: str) -> None:
    with pytest.raises(DtpError) as caught:
        Config.load("tiny").changed(**change)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_missing_key_is_named() -> None:
    table = Config.load("tiny").model_dump()
    del table["lanes"]
    with pytest.raises(DtpError, match=r"^Config\.lanes is missing$"):
        Config.from_mapping(table)


def test_a_misspelt_key_is_named_and_not_the_one_that_is_missing() -> None:
    table = Config.load("tiny").model_dump()
    table["lanez"] = table.pop("lanes")
    with pytest.raises(DtpError, match=r"^Config\.lanez is not a key; the keys are name, rows, lanes, "):
        Config.from_mapping(table)


def test_unknown_preset_lists_the_valid_ones() -> None:
    with pytest.raises(DtpError, match="tiny, ecp5-85k, wide"):
        Config.load("huge")


def test_unreadable_and_malformed_files(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    with pytest.raises(DtpError, match="cannot be read: No such file"):
        Config.load(folder / "none.toml")
    bad = folder / "bad.toml"
    bad.write_text("rows = \n")
    with pytest.raises(DtpError, match="is not TOML"):
        Config.load(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(DtpError, match="not UTF-8"):
        Config.load(bad)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("operand_bits", [8, 16])
@pytest.mark.parametrize("probability_bits", [8, 12, 16])
def test_no_legal_input_overflows_the_accumulator(name: str, operand_bits: int, probability_bits: int) -> None:
    config = Config.load(name).changed(
        operand_bits=operand_bits, probability_bits=probability_bits, input_bytes=8, output_bytes=8,
        normaliser_lanes=1, output_bits=16,
    )  # fmt: skip
    limit = 1 << (config.accumulator_bits - 1)
    operand = -(1 << (operand_bits - 1))
    row = -(1 << (config.row_bits - 1))
    lifted = 1 << (config.lifted_row_bits + config.lifted_bits - 2)
    # The worst sums, lane by lane: every operand at the end of its range, both signs of the result.
    values = np.full(config.max_tokens, (1 << probability_bits) - 1, dtype=object) * operand
    assert -limit <= values.sum() < limit
    score = np.full(config.max_width, row * operand, dtype=object).sum()
    score += np.full(config.lifted_passes * config.block, lifted, dtype=object).sum()
    for bias in (-(1 << 23), (1 << 23) - 1):
        assert -limit <= score + bias < limit
        assert -limit <= -score + bias < limit
    # One bit less would not do: the width is derived, not generous.
    assert max(abs(values.sum()), score) >= limit // 4
