"""The description of the registers: what it refuses, words and fields, the files made from it, the golden model."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dtp.config import PRESETS, Config
from dtp.errors import DtpError
from dtp.gated import GatedParams
from dtp.pruner import HeadCommand, PrunerError
from dtp.registers import Access, Field, GoldenRegisters, Register, RegisterMap, Response, gated_registers

GATED = gated_registers(Config.load("tiny"))
LOW, HIGH = Field("low", 8, 0, 3, "a"), Field("high", 8, 8, 0, "b")


def _register(**changes: Any) -> Register:
    values: dict[str, Any] = {
        "name": "pair", "address": 4, "access": Access.READ_WRITE, "fields": (LOW, HIGH), "doc": "two numbers",
    }  # fmt: skip
    return Register(**values | changes)


# ---- rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("Low", 8, 0, 0, "a"), "Field.name must be words of lower-case letters and digits joined by _, not 'Low'"),
        (("low_", 8, 0, 0, "a"), "Field.name must be words of lower-case letters and digits joined by _, not 'low_'"),
        ((7, 8, 0, 0, "a"), "Field.name must be words of lower-case letters and digits joined by _, not 7"),
        (("low", 0, 0, 0, "a"), "Field low.bits must be an integer from 1 to 32, not 0"),
        (("low", 33, 0, 0, "a"), "Field low.bits must be an integer from 1 to 32, not 33"),
        (("low", 8.0, 0, 0, "a"), "Field low.bits must be an integer from 1 to 32, not 8.0"),
        (("low", True, 0, 0, "a"), "Field low.bits must be an integer from 1 to 32, not True"),
        (("low", 8, -1, 0, "a"), "Field low.offset must be an integer from 0 to 31, not -1"),
        (("low", 8, 25, 0, "a"), "Field low.offset must be at most 24 with 8 bits, not 25"),
        (("low", 8, 0, 256, "a"), "Field low.reset must be an integer from 0 to 255, not 256"),
        (("low", 8, 0, -1, "a"), "Field low.reset must be an integer from 0 to 255, not -1"),
        (("low", 8, 0, 0, "a", 1), "Field low.constant must be True or False, not 1"),
        (("low", 8, 0, 0, ""), "Field low.doc must be one line of text without | and */, not ''"),
        (("low", 8, 0, 0, "a\nb"), r"Field low.doc must be one line of text without | and */, not 'a\nb'"),
        (("low", 8, 0, 0, "a */"), "Field low.doc must be one line of text without | and */, not 'a */'"),
        (("low", 8, 0, 0, "a|b"), "Field low.doc must be one line of text without | and */, not 'a|b'"),
    ],
)
def test_illegal_fields_are_refused(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DtpError, match=f"^{re.escape(message)}$"):
        Field(*values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a__b"}, "Register.name must be words of lower-case letters and digits joined by _, not 'a__b'"),
        ({"address": 6}, "Register pair.address must be a multiple of 4, not 6"),
        ({"address": -4}, "Register pair.address must be an integer from 0 to 4092, not -4"),
        ({"address": 4096}, "Register pair.address must be an integer from 0 to 4092, not 4096"),
        (
            {"access": "read_write"},
            "Register pair.access must be read_only or read_write or write_pulse, not 'read_write'",
        ),
        ({"fields": ()}, "Register pair.fields must be a tuple with at least one field, not ()"),
        ({"fields": (LOW, LOW)}, "Register pair.fields must be of different names, not 'low'"),
        (
            {"fields": (LOW, Field("next", 2, 7, 0, "a"))},
            "Register pair.next must be beside low, bits 7:0, not '8:7'",
        ),
        (
            {"fields": (Field("fixed", 2, 7, 0, "a", constant=True),)},
            "Register pair.fixed must be variable in a register that can be written, not 'constant'",
        ),
        ({"access": Access.WRITE_PULSE}, "Register pair.low must be 0 after reset: it is a pulse, not 3"),
        ({"doc": " "}, "Register pair.doc must be one line of text without | and */, not ' '"),
    ],
)  # fmt: skip
def test_illegal_registers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DtpError, match=f"^{re.escape(message)}$"):
        _register(**changes)


@pytest.mark.parametrize(
    ("name", "registers", "message"),
    [
        ("A", (_register(),), "RegisterMap.name must be words of lower-case letters and digits joined by _, not 'A'"),
        ("map", (), "RegisterMap map.registers must be a tuple with at least one register, not ()"),
        (
            "map", (_register(), _register(address=8)),
            "RegisterMap map.registers must be of different names, not 'pair'",
        ),
        (
            "map", (_register(), _register(name="other")),
            "RegisterMap map.other must be 0x08 or more, behind pair, not '0x04'",
        ),
        (
            "map", (_register(), _register(name="other", address=0)),
            "RegisterMap map.other must be 0x08 or more, behind pair, not '0x00'",
        ),
        (
            "map", (
                _register(name="a", fields=(Field("b_c", 1, 0, 0, "x"),)),
                _register(name="a_b", address=8, fields=(Field("c", 1, 0, 0, "x"),)),
            ),
            "RegisterMap map.names must be different in C as well, not 'DTP_MAP_A_B_C_SHIFT'",
        ),
    ],
)  # fmt: skip
def test_illegal_maps_are_refused(name: str, registers: tuple[Register, ...], message: str) -> None:
    with pytest.raises(DtpError, match=f"^{re.escape(message)}$"):
        RegisterMap(name, registers)


def test_the_size_follows_from_the_last_address() -> None:
    for address, size, bits in ((0, 4, 2), (4, 8, 3), (8, 12, 4), (60, 64, 6), (64, 68, 7), (4092, 4096, 12)):
        described = RegisterMap("map", (_register(address=address),))
        assert (described.size_bytes, described.address_bits) == (size, bits)


# ---- the map of the gated top ------------------------------------------------------------------------------


def test_the_gated_map_is_as_agreed() -> None:
    """Addresses and places are an agreement with programs: typed again here."""
    agreed = {
        "id": (0x00, "magic 31:0"), "version": (0x04, "interface 31:0"), "hash_low": (0x08, "hash 31:0"),
        "hash_high": (0x0C, "hash 15:0"), "control": (0x10, "clear 0:0, abort 1:1"),
        "status": (0x14, "busy 0:0, rows 1:1, failed 2:2"),
        "error": (0x18, "geometry 7:0, transport 10:8, field 13:12, pruner 18:16, rows 21:20, saturated 24:24"),
        "scores": (0x1C, "weight 8:4, fresh 12:12, maximum 13:13, step 22:16"),
        "gate": (0x20, "gate 0:0, band 5:4"), "theta": (0x24, "low 15:0, high 31:16"), "budget": (0x28, "budget 3:0"),
        "band": (0x2C, "low 15:0, high 31:16"), "kept": (0x30, "count 31:0"), "legal": (0x34, "count 31:0"),
        "skipped": (0x38, "count 15:0"), "heads": (0x3C, "count 15:0"), "saturations": (0x40, "count 15:0"),
    }  # fmt: skip
    found = {
        r.name: (r.address, ", ".join(f"{f.name} {f.offset + f.bits - 1}:{f.offset}" for f in r.fields))
        for r in GATED.registers
    }
    assert found == agreed
    assert {r.name for r in GATED.registers if r.access is Access.READ_WRITE} == {
        "scores", "gate", "theta", "budget", "band",
    }  # fmt: skip
    assert [r.name for r in GATED.registers if r.access is Access.WRITE_PULSE] == ["control"]
    resets = {r.name: r.reset for r in GATED.registers if r.reset and r.name != "hash_low" and r.name != "hash_high"}
    assert resets == {
        "id": 0x31505444, "version": 1, "scores": 64 << 16 | 1 << 12, "theta": 0xFFFFFFFF, "budget": 1,
        "band": 0xFFFF0000,
    }  # fmt: skip
    assert (GATED.size_bytes, GATED.address_bits) == (68, 7)


@pytest.mark.parametrize("name", PRESETS)
def test_the_hash_is_that_of_the_configuration(name: str) -> None:
    config = Config.load(name)
    described = gated_registers(config)
    words = [described.register(part).reset for part in ("hash_high", "hash_low")]
    assert f"{words[0]:04x}{words[1]:08x}" == config.hash
    constant = {r.name for r in described.registers if any(f.constant for f in r.fields)}
    assert constant == {"id", "version", "hash_low", "hash_high"}


def test_settings_after_reset_are_a_legal_command_that_keeps_every_block() -> None:
    """The command of a head from the registers is one of the contract."""
    v = {name: GATED.decode(name, GATED.register(name).reset) for name in ("scores", "gate", "theta", "budget", "band")}
    command = HeadCommand(
        head=0, last_block=1, last_valid=1, causal=False, fresh=bool(v["scores"]["fresh"]),
        source=1, weight=v["scores"]["weight"], maximum=bool(v["scores"]["maximum"]),
        step=v["scores"]["step"], gate=v["gate"]["gate"], theta_low=v["theta"]["low"], theta_high=v["theta"]["high"],
        budget=v["budget"]["budget"], band=v["gate"]["band"], band_low=v["band"]["low"], band_high=v["band"]["high"],
    )  # fmt: skip
    assert command.error is PrunerError.NONE
    params = GatedParams(Config.load("tiny")).pruner
    assert command.theta_low == command.theta_high == params.max_score
    assert GATED.field("budget.budget")[1].bits == params.count_bits


# ---- words -------------------------------------------------------------------------------------------------


def test_words_and_fields_agree() -> None:
    for register in GATED.registers:
        for field in register.fields:
            for value in {0, 1, field.largest >> 1, field.largest}:
                word = GATED.encode(register.name, **{field.name: value})
                rest = {f.name: f.reset for f in register.fields} | {field.name: value}
                assert GATED.decode(register.name, word) == rest
        assert GATED.encode(register.name) == register.reset
    assert GATED.encode("theta", low=0x1234, high=0xABCD) == 0xABCD1234
    assert GATED.decode("gate", 0xFFFFFFCE) == {"gate": 0, "band": 0}


def test_names_lead_to_fields() -> None:
    register, field = GATED.field("scores.weight")
    assert (register.name, field.name, field.mask) == ("scores", "weight", 0x1F0)
    assert GATED.fields["scores.weight"] == (register, field)
    assert len(GATED.fields) == sum(len(r.fields) for r in GATED.registers)
    assert GATED.at(0x1C) is register and GATED.at(0x1D) is None and GATED.at(0x44) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GATED.encode("theta", low=65536), "theta.low must be an integer from 0 to 65535, not 65536"),
        (lambda: GATED.encode("theta", low=-1), "theta.low must be an integer from 0 to 65535, not -1"),
        (lambda: GATED.encode("theta", low=1.0), "theta.low must be an integer from 0 to 65535, not 1.0"),  # type: ignore[arg-type]
        (lambda: GATED.encode("theta", lower=1), "theta.field must be one of low, high, not 'lower'"),
        (lambda: GATED.field("theta"), "theta.field must be one of low, high, not ''"),
        (lambda: GATED.decode("theta", 1 << 32), "theta.value must be an integer from 0 to 4294967295, not 4294967296"),
        (lambda: GATED.decode("theta", -1), "theta.value must be an integer from 0 to 4294967295, not -1"),
    ],
)
def test_illegal_words_are_refused(call: Any, message: str) -> None:
    with pytest.raises(DtpError, match=f"^{re.escape(message)}$"):
        call()


def test_an_unknown_register_is_answered_with_the_valid_ones() -> None:
    with pytest.raises(DtpError, match=r"^gated\.register must be one of id, version, .*saturations, not 'colour'$"):
        GATED.register("colour")


# ---- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_header_compiles_and_its_numbers_are_right(language: str, tmp_path: Path) -> None:
    (tmp_path / "map.h").write_text(GATED.to_c_header(), encoding="ascii")
    wanted: dict[str, int] = {"DTP_GATED_SIZE_BYTES": GATED.size_bytes}
    for register in GATED.registers:
        name = f"DTP_GATED_{register.name.upper()}"
        wanted |= {f"{name}_OFFSET": register.address, f"{name}_RESET": register.reset}
        for field in register.fields:
            part = f"{name}_{field.name.upper()}"
            wanted |= {f"{part}_SHIFT": field.offset, f"{part}_MASK": field.mask, f"{part}_RESET": field.reset}
            word = register.encode(**{field.name: field.largest - 1}) & field.mask
            short = f"{register.name}_{field.name}".upper()
            wanted |= {
                f"DTP_GATED_PUT({short}, {field.largest - 1}u)": word,
                f"DTP_GATED_PUT({short}, {field.largest}u + 1u)": 0,
                f"DTP_GATED_GET({short}, 0x5a5a5a5au)": register.decode(0x5A5A5A5A)[field.name],
            }
    lines = [f'    printf("%lu\\n", (unsigned long)({name}));' for name in wanted]
    program = ['#include "map.h"', '#include "map.h"', "#include <stdio.h>", "int main(void) {", *lines]
    program += ["#if DTP_GATED_THETA_OFFSET != 0x24", "#error an offset is no number", "#endif", "return 0;", "}", ""]
    (tmp_path / "main.c").write_text("\n".join(program), encoding="ascii")
    command = ["g++", "-Wall", "-Wextra", "-Werror", "-pedantic", "-x", language, "main.c", "-o", "main"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    run = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, timeout=10, check=True)
    assert dict(zip(wanted, map(int, run.stdout.split()), strict=True)) == wanted


def test_json_holds_the_whole_description() -> None:
    table = json.loads(GATED.to_json())
    assert (table["name"], table["word_bits"], table["address_bits"], table["size_bytes"]) == ("gated", 32, 7, 68)
    again = RegisterMap(
        table["name"],
        tuple(
            Register(r["name"], r["address"], Access(r["access"]), tuple(Field(**f) for f in r["fields"]), r["doc"])
            for r in table["registers"]
        ),
    )
    assert again == GATED
    assert [r["reset"] for r in table["registers"]] == [r.reset for r in GATED.registers]


def test_the_table_names_every_register_and_field() -> None:
    head, ruler, *lines = GATED.to_markdown().splitlines()
    assert all(line.count("|") == head.count("|") for line in (ruler, *lines))
    assert len(lines) == len(GATED.registers) + len(GATED.fields)
    assert "| 0x24 | `theta` | read write | | | | thresholds; a block is kept up to and with its threshold |" in lines
    assert "| | | | 8:4 | `weight` | 0 | of holonomy beside the table: 0 to 16 |" in lines
    assert "| | | | 1 | `abort` |  | drop every job and run that was accepted and not fully answered |" in lines


# ---- golden model ------------------------------------------------------------------------------------------


def test_bytes_are_written_one_by_one() -> None:
    golden = GoldenRegisters(GATED)
    assert golden.write(0x24, 0x11223344, 0b0101) == (Response.OKAY, {})
    assert golden.values["theta"] == 0xFF22FF44
    assert golden.read(0x24, {}) == (Response.OKAY, 0xFF22FF44)
    assert golden.write(0x20, 0xFFFFFFFF, 0b1111) == (Response.OKAY, {})
    assert golden.read(0x20, {}) == (Response.OKAY, 0x31)
    assert golden.write(0x28, 7, 0) == (Response.OKAY, {})
    assert golden.values["budget"] == 1


def test_what_cannot_be_written_or_found_has_no_effect() -> None:
    golden = GoldenRegisters(GATED)
    before = dict(golden.values)
    assert golden.write(0x30, 5, 15) == (Response.SLAVE_ERROR, {})
    for address in (0x44, 0x7C, 0x25, 0x22, 0x13):
        assert golden.write(address, 5, 15) == (Response.DECODE_ERROR, {})
        assert golden.read(address, {}) == (Response.DECODE_ERROR, 0)
    assert golden.values == before


def test_pulses_and_status() -> None:
    golden = GoldenRegisters(GATED)
    assert golden.write(0x10, 0xFFFFFFFE, 1) == (Response.OKAY, {"clear": 0, "abort": 1})
    assert golden.write(0x10, 3, 0b1110) == (Response.OKAY, {"clear": 0, "abort": 0})
    assert golden.read(0x10, {}) == (Response.OKAY, 0)
    assert golden.read(0x14, {"status": {"busy": 1, "rows": 0, "failed": 1}}) == (Response.OKAY, 5)
    assert golden.read(0x00, {}) == (Response.OKAY, int.from_bytes(b"DTP1", "little"))
