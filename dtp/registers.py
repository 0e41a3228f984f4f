"""Registers of the control port: one description, from which hardware, C header, JSON and docs are made.

Registers have 32 bits and byte addresses that are multiples of 4. A name is ``register`` or ``register.field``. The map
of the gated top is :func:`gated_registers`, its rules are ``docs/registers.md``; :class:`GoldenRegisters` answers as
the hardware does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Final

from dtp.config import Config
from dtp.errors import must
from dtp.gated import GatedParams
from dtp.pruner import COUNT_BITS, SCORE_BITS, STEP_BITS, WEIGHT_BITS, Band, Gate

WORD_BITS: Final = 32
"""Bits of a register and of the port's data."""
WORD_BYTES: Final = WORD_BITS // 8
MAX_ADDRESS_BITS: Final = 12
"""A map is smaller than a page of 4096 bytes."""
IDENTITY: Final = int.from_bytes(b"DTP1", "little")
INTERFACE_VERSION: Final = 1
"""Grows with every change that a program of the older version would misread."""

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


class Access(StrEnum):
    """What software may do with a register."""

    READ_ONLY = "read_only"
    """Writes are refused."""
    READ_WRITE = "read_write"
    """Reads answer what was written."""
    WRITE_PULSE = "write_pulse"
    """Ones that are written are there for one cycle; reads answer 0."""


class Response(IntEnum):
    """Answers of AXI4-Lite; with the two errors nothing happens, and read data is 0."""

    OKAY = 0
    SLAVE_ERROR = 2
    """A write to a register that cannot be written."""
    DECODE_ERROR = 3
    """No register has this address."""


@dataclass(frozen=True)
class Field:
    """Some bits of a register.

    Parameters
    ----------
    name: words of lower-case letters and digits, joined by ``_``
    bits: 1 to 32
    offset: of its lowest bit in the register
    reset: value after reset, unsigned
    doc: one line
    constant: always ``reset``; only in registers that are read only

    Raises
    ------
    DtpError: a value outside these rules
    """

    name: str
    bits: int
    offset: int
    reset: int
    doc: str
    constant: bool = False

    def __post_init__(self) -> None:
        owner = f"Field {_checked_name('Field', self.name)}"
        _check_integer(owner, "bits", self.bits, 1, WORD_BITS)
        _check_integer(owner, "offset", self.offset, 0, WORD_BITS - 1)
        if self.offset + self.bits > WORD_BITS:
            raise must(owner, "offset", f"at most {WORD_BITS - self.bits} with {self.bits} bits", self.offset)
        _check_integer(owner, "reset", self.reset, 0, self.largest)
        if type(self.constant) is not bool:
            raise must(owner, "constant", "True or False", self.constant)
        _check_line(owner, self.doc)

    @property
    def largest(self) -> int:
        """Its largest value."""
        return (1 << self.bits) - 1

    @property
    def mask(self) -> int:
        """Ones at its bits of the register."""
        return self.largest << self.offset


@dataclass(frozen=True)
class Register:
    """A word of 32 bits; bits without a field are 0 and ignored when written.

    Parameters
    ----------
    name: as that of a field
    address: in bytes from the start of the map, a multiple of 4
    access: what software may do
    fields: at least one, in any order
    doc: one line

    Raises
    ------
    DtpError: a value outside these rules, fields that overlap or have one name, a constant field in a register that can
        be written, a pulse that is 1 after reset
    """

    name: str
    address: int
    access: Access
    fields: tuple[Field, ...]
    doc: str

    def __post_init__(self) -> None:
        owner = f"Register {_checked_name('Register', self.name)}"
        _check_integer(owner, "address", self.address, 0, (1 << MAX_ADDRESS_BITS) - WORD_BYTES)
        if self.address % WORD_BYTES:
            raise must(owner, "address", f"a multiple of {WORD_BYTES}", self.address)
        if type(self.access) is not Access:
            raise must(owner, "access", " or ".join(str(access) for access in Access), self.access)
        if not isinstance(self.fields, tuple) or not self.fields:
            raise must(owner, "fields", "a tuple with at least one field", self.fields)
        for number, field in enumerate(self.fields):
            for other in self.fields[:number]:
                if field.name == other.name:
                    raise must(owner, "fields", "of different names", field.name)
                if field.mask & other.mask:
                    raise must(owner, field.name, f"beside {other.name}, bits {_bits(other)}", _bits(field))
            if field.constant and self.access is not Access.READ_ONLY:
                raise must(owner, field.name, "variable in a register that can be written", "constant")
            if field.reset and self.access is Access.WRITE_PULSE:
                raise must(owner, field.name, "0 after reset: it is a pulse", field.reset)
        _check_line(owner, self.doc)

    @property
    def reset(self) -> int:
        """The whole word after reset."""
        return sum(field.reset << field.offset for field in self.fields)

    def encode(self, /, **values: int) -> int:
        """The word with these values of its fields; the others have their value after reset.

        Raises
        ------
        DtpError: a field that it does not have, or a value beyond the field
        """
        word = self.reset
        for name, value in values.items():
            field = self.field(name)
            _check_integer(self.name, name, value, 0, field.largest)
            word = word & ~field.mask | value << field.offset
        return word

    def decode(self, word: int) -> dict[str, int]:
        """The values of its fields in a word; bits without a field are not looked at.

        Raises
        ------
        DtpError: more than 32 bits
        """
        _check_integer(self.name, "value", word, 0, (1 << WORD_BITS) - 1)
        return {field.name: (word & field.mask) >> field.offset for field in self.fields}

    def field(self, name: str) -> Field:
        """The field of this name; raises DtpError with the valid ones."""
        for field in self.fields:
            if field.name == name:
                return field
        raise must(self.name, "field", f"one of {', '.join(field.name for field in self.fields)}", name)


@dataclass(frozen=True)
class RegisterMap:
    """The registers behind one port.

    Parameters
    ----------
    name: as that of a register; part of the names in the C header
    registers: at least one, in the order of their addresses

    Raises
    ------
    DtpError: no register, two at one address or of one name, another order, or two names that are one in C
    """

    name: str
    registers: tuple[Register, ...]

    def __post_init__(self) -> None:
        owner = f"RegisterMap {_checked_name('RegisterMap', self.name)}"
        if not isinstance(self.registers, tuple) or not self.registers:
            raise must(owner, "registers", "a tuple with at least one register", self.registers)
        names: set[str] = set()
        end, last = 0, ""
        for register in self.registers:
            if register.name in names:
                raise must(owner, "registers", "of different names", register.name)
            if register.address < end:
                rule = f"{end:#04x} or more, behind {last}"
                raise must(owner, register.name, rule, f"{register.address:#04x}")
            names.add(register.name)
            end, last = register.address + WORD_BYTES, register.name
        macros = [name for name, *_ in self._macros()]
        twice = [name for name in macros if macros.count(name) > 1]
        if twice:
            raise must(owner, "names", "different in C as well", twice[0])

    # Sizes and names

    @property
    def size_bytes(self) -> int:
        """From the first address to behind the last register."""
        return self.registers[-1].address + WORD_BYTES

    @property
    def address_bits(self) -> int:
        """Bits of a byte address of the port."""
        return (self.size_bytes - 1).bit_length()

    @cached_property
    def fields(self) -> dict[str, tuple[Register, Field]]:
        """Register and field of every name ``register.field``."""
        return {f"{register.name}.{field.name}": (register, field) for register in self.registers
                for field in register.fields}  # fmt: skip

    def register(self, name: str) -> Register:
        """The register of this name; raises DtpError with the valid ones."""
        for register in self.registers:
            if register.name == name:
                return register
        raise must(self.name, "register", f"one of {', '.join(r.name for r in self.registers)}", name)

    def field(self, name: str) -> tuple[Register, Field]:
        """Register and field of a name ``register.field``; raises DtpError with the valid ones."""
        register, _, field = name.partition(".")
        return self.register(register), self.register(register).field(field)

    def at(self, address: int) -> Register | None:
        """The register at a byte address, if there is one."""
        return next((register for register in self.registers if register.address == address), None)

    def encode(self, register: str, /, **values: int) -> int:
        """A word for a register, see :meth:`Register.encode`."""
        return self.register(register).encode(**values)

    def decode(self, register: str, word: int) -> dict[str, int]:
        """The fields of a register's word, see :meth:`Register.decode`."""
        return self.register(register).decode(word)

    # Files

    def to_c_header(self) -> str:
        """A header for C and C++ of macros alone: ``DTP_<map>_<register>[_<field>]_<what>``.

        ``OFFSET`` is the address from the base of the map, ``MASK`` and ``SHIFT`` place a field in its word, ``RESET``
        is a value after reset. ``GET(name, word)`` takes a field out of a word, ``PUT(name, value)`` puts it there.
        """
        prefix = f"DTP_{self.name.upper()}"
        guard = f"{prefix}_REGISTERS_H"
        lines = [
            f"/* Registers of the {self.name} top: 32 bits, byte addresses from the base. Generated. */",
            f"#ifndef {guard}",
            f"#define {guard}",
        ]
        for name, value, comment in self._macros():
            lines += [f"\n/* {comment} */"] if comment else []
            lines.append(f"#define {name} {value}")
        for name, argument, body in (
            ("GET", "word", "(((word) & {0}##_MASK) >> {0}##_SHIFT)"),
            ("PUT", "value", "(((0u + (value)) << {0}##_SHIFT) & {0}##_MASK)"),
        ):
            lines += ["", f"#define {prefix}_{name}(name, {argument}) \\", f"    {body.format(f'{prefix}_##name')}"]
        return "\n".join([*lines, "", f"#endif /* {guard} */", ""])

    def _macros(self) -> Iterator[tuple[str, str, str]]:
        """Name, value and comment of every macro that is a number."""
        top = f"DTP_{self.name.upper()}"
        yield f"{top}_SIZE_BYTES", f"{self.size_bytes}u", "bytes from the base to behind the last register"
        for register in self.registers:
            prefix = f"{top}_{register.name.upper()}"
            yield f"{prefix}_OFFSET", f"{register.address:#04x}u", f"{register.access}: {register.doc}"
            yield f"{prefix}_RESET", f"{register.reset:#010x}u", ""
            for field in register.fields:
                part = f"{prefix}_{field.name.upper()}"
                yield f"{part}_SHIFT", str(field.offset), field.doc
                yield f"{part}_MASK", f"{field.mask:#010x}u", ""
                yield f"{part}_RESET", f"{field.reset:#x}u", ""

    def to_json(self) -> str:
        """The whole description as JSON text; numbers are decimal."""
        registers = [
            {
                "name": register.name, "address": register.address, "access": str(register.access),
                "reset": register.reset, "doc": register.doc,
                "fields": [
                    {
                        "name": field.name, "offset": field.offset, "bits": field.bits, "reset": field.reset,
                        "constant": field.constant, "doc": field.doc,
                    }
                    for field in register.fields
                ],
            }
            for register in self.registers
        ]  # fmt: skip
        table = {
            "name": self.name, "word_bits": WORD_BITS, "address_bits": self.address_bits, "size_bytes": self.size_bytes,
            "registers": registers,
        }  # fmt: skip
        return json.dumps(table, indent=2) + "\n"

    def to_markdown(self) -> str:
        """A table with a line for every register and every field."""
        lines = ["| address | register | access | bits | field | reset | meaning |", "|" + "---|" * 7]
        for register in self.registers:
            access = str(register.access).replace("_", " ")
            lines.append(f"| {register.address:#04x} | `{register.name}` | {access} | | | | {register.doc} |")
            for field in register.fields:
                reset = "" if register.access is Access.WRITE_PULSE else _shown(field)
                lines.append(f"| | | | {_bits(field)} | `{field.name}` | {reset} | {field.doc} |")
        return "\n".join(lines) + "\n"


class GoldenRegisters:
    """What the hardware behind a map answers, one access after another.

    Parameters
    ----------
    described: the map

    Members
    -------
    values: words of the registers that can be read and written, by name
    """

    def __init__(self, described: RegisterMap) -> None:
        self.described = described
        self.values = {r.name: r.reset for r in described.registers if r.access is Access.READ_WRITE}

    def write(self, address: int, word: int, strobes: int) -> tuple[Response, dict[str, int]]:
        """The answer, and the pulses of the register that was written, by field; none in other registers.

        Parameters
        ----------
        address: in bytes
        word: 32 bits
        strobes: bit n is 1 when byte n of the word is to be written
        """
        register = self.described.at(address)
        if register is None:
            return Response.DECODE_ERROR, {}
        if register.access is Access.READ_ONLY:
            return Response.SLAVE_ERROR, {}
        mask = sum(0xFF << 8 * byte for byte in range(WORD_BYTES) if strobes >> byte & 1)
        if register.access is Access.WRITE_PULSE:
            return Response.OKAY, register.decode(word & mask)
        kept = self.values[register.name] & ~mask
        self.values[register.name] = (kept | word & mask) & sum(field.mask for field in register.fields)
        return Response.OKAY, {}

    def read(self, address: int, inputs: Mapping[str, Mapping[str, int]]) -> tuple[Response, int]:
        """The answer and the word.

        Parameters
        ----------
        address: in bytes
        inputs: of every register that is read only the values of its fields that are not constant
        """
        register = self.described.at(address)
        if register is None:
            return Response.DECODE_ERROR, 0
        if register.access is Access.WRITE_PULSE:
            return Response.OKAY, 0
        if register.access is Access.READ_WRITE:
            return Response.OKAY, self.values[register.name]
        shown = {f.name: inputs[register.name][f.name] for f in register.fields if not f.constant}
        return Response.OKAY, register.encode(**shown)


def gated_registers(config: Config) -> RegisterMap:
    """The map of the top whose attention is gated by geometry.

    Settings go into the command of every head (``docs/pruner.md`` 5), the others come from the units.
    """
    identity = int(config.hash, 16)
    weight, step = 1 << WEIGHT_BITS, 1 << STEP_BITS
    largest = (1 << SCORE_BITS) - 1

    def read_only(name: str, address: int, doc: str, *fields: Field) -> Register:
        return Register(name, address, Access.READ_ONLY, fields, doc)

    def settings(name: str, address: int, doc: str, *fields: Field) -> Register:
        return Register(name, address, Access.READ_WRITE, fields, doc)

    def count(name: str, address: int, bits: int, doc: str) -> Register:
        end = f"stops at {(1 << bits) - 1}" if bits < WORD_BITS else f"modulo 2^{bits}"
        return read_only(name, address, doc, Field("count", bits, 0, 0, end))

    return RegisterMap(
        "gated",
        (
            read_only("id", 0x00, "what answers", Field("magic", 32, 0, IDENTITY, '"DTP1", lowest byte first', True)),
            read_only(
                "version", 0x04, "of this map",
                Field("interface", 32, 0, INTERFACE_VERSION, "grows with every change that breaks a program", True),
            ),
            read_only(
                "hash_low", 0x08, "hash of the configuration",
                Field("hash", 32, 0, identity & 0xFFFFFFFF, "its lower 32 bits", True),
            ),
            read_only(
                "hash_high", 0x0C, "hash of the configuration",
                Field("hash", 16, 0, identity >> 32, "its upper 16 bits", True),
            ),
            Register(
                "control", 0x10, Access.WRITE_PULSE,
                (
                    Field("clear", 1, 0, 0, "forget sticky errors and counts"),
                    Field("abort", 1, 1, 0, "drop every job and run that was accepted and not fully answered"),
                ),
                "one cycle for each 1 that is written",
            ),
            read_only(
                "status", 0x14, "now",
                Field("busy", 1, 0, 0, "a geometry run is inside"),
                Field("rows", 1, 1, 0, "mask rows wait"),
                Field("failed", 1, 2, 0, "any error is set"),
            ),
            read_only(
                "error", 0x18, "the first code of each unit since reset or clear; 0 is none",
                Field("geometry", 8, 0, 0, "of the geometry run"),
                Field("transport", 3, 8, 0, "of the transport engine: 1 pivot, 2 range, 4 job, a bit each"),
                Field("field", 2, 12, 0, "of the holonomy field"),
                Field("pruner", 3, 16, 0, "of the pruner"),
                Field("rows", 2, 20, 0, "of the mask rows between pruner and attention"),
                Field("saturated", 1, 24, 0, "a score of the field reached its limit"),
            ),
            settings(
                "scores", 0x1C, "scores of blocks: how those of two sources and of several runs become one",
                Field("weight", WEIGHT_BITS + 1, 4, 0, f"of holonomy beside the table: 0 to {weight}"),
                Field("fresh", 1, 12, 1, "the first run: what the table holds is forgotten"),
                Field("maximum", 1, 13, 0, "the largest score of all runs"),
                Field("step", STEP_BITS + 1, 16, step, f"of the average over runs: 0 to {step}; {step} is none"),
            ),
            settings(
                "gate", 0x20, "how blocks are chosen",
                Field("gate", 1, 0, Gate.THRESHOLD, "0 threshold, 1 budget"),
                Field("band", 2, 4, Band.NONE, "0 none, 1 mean, 2 maximum: which score of a head must lie in the band"),
            ),
            settings(
                "theta", 0x24, "thresholds; a block is kept up to and with its threshold",
                Field("low", SCORE_BITS, 0, largest, "of blocks that were not kept"),
                Field("high", SCORE_BITS, 16, largest, "of blocks that were kept"),
            ),
            settings(
                "budget", 0x28, "blocks of a row that are kept in budget mode",
                Field("budget", GatedParams(config).pruner.count_bits, 0, 1, "1 or more"),
            ),
            settings(
                "band", 0x2C, "a head whose score lies outside is skipped",
                Field("low", SCORE_BITS, 0, 0, "smallest score that is kept"),
                Field("high", SCORE_BITS, 16, largest, "largest score that is kept"),
            ),
            count("kept", 0x30, 32, "blocks kept since reset or clear"),
            count("legal", 0x34, 32, "legal blocks since reset or clear"),
            count("skipped", 0x38, COUNT_BITS, "heads skipped since reset or clear"),
            count("heads", 0x3C, COUNT_BITS, "heads gated since reset or clear"),
            count("saturations", 0x40, COUNT_BITS, "transported lanes beyond 16 bits, of the newest run"),
        ),
    )  # fmt: skip


def _bits(field: Field) -> str:
    return str(field.offset) if field.bits == 1 else f"{field.offset + field.bits - 1}:{field.offset}"


def _shown(field: Field) -> str:
    return f"{field.reset:#x}" if field.constant and field.reset > 9 else str(field.reset)


def _checked_name(owner: str, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise must(owner, "name", "words of lower-case letters and digits joined by _", name)
    return name


def _check_integer(owner: str, name: str, value: object, low: int, high: int) -> None:
    # Members of an IntEnum are meant as well.
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise must(owner, name, f"an integer from {low} to {high}", value)


def _check_line(owner: str, doc: object) -> None:
    # It goes into a comment of C and into a cell of a Markdown table.
    if not isinstance(doc, str) or not doc.strip() or not doc.isprintable() or "*/" in doc or "|" in doc:
        raise must(owner, "doc", "one line of text without | and */", doc)
