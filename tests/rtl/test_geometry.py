"""The geometry side of gated attention: what it says of a descriptor (runs: tests/cosim/test_gated*.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from amaranth.hdl import Module, Signal
from amaranth.sim import Simulator

from dtp.config import Config
from dtp.gated import DESCRIPTOR_BYTES, FIELDS, MAX_HEADS, GatedParams, GeometryError, Run, descriptor_error
from rtl.geometry import descriptor_fault, descriptor_fields

TINY = Config.load("tiny")
CONFIGS = {
    "tiny": TINY,
    "wide": Config.load("wide"),
    "four columns": TINY.changed(transport_columns=4),
    "longest": TINY.changed(max_tokens=512),
}


def _near_the_limits(config: Config) -> list[bytes]:
    """Every field at, below and above each of its limits, alone and two at a time."""
    p = GatedParams(config)
    legal = Run(heads=3, tokens=5, words=p.max_words, unit=9).descriptor()
    limits = {
        "magic": (0, 0x4755, 0xFFFF), "version": (0, 2, 0x81), "flags": (0, 1, 2, 4, 6, 8, 10, 16, 18, 0x82),
        "heads": (0, 1, MAX_HEADS, MAX_HEADS + 1, 32, 0x100, 0x8001),
        "tokens": (0, 1, p.max_tokens, p.max_tokens + 1, 2 * p.max_tokens, 0x8000),
        "words": (0, p.field.min_words - 1, p.field.min_words, p.max_words, p.max_words + 1, 0x100, 0x8000),
        "project_shift": (0, 31, 32, 0x80), "gram_shift": (0, 31, 32, 0x80),
        "unit": (0, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF),
        "shift_0": (15, 16), "shift_1": (15, 16, 0x80), "shift_2": (15, 16),
    }  # fmt: skip
    places = {field.name: field for field in FIELDS}
    changes = [(name, value) for name, values in limits.items() for value in values]
    made = [legal]
    for one in changes:
        for two in changes:
            data = bytearray(legal)
            for name, value in (one, two):
                field = places[name]
                data[field.offset : field.offset + field.bytes] = value.to_bytes(field.bytes, "little")
            made.append(bytes(data))
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_fault_of_a_descriptor(name: str) -> None:
    config = CONFIGS[name]
    head, code = Signal(8 * DESCRIPTOR_BYTES), Signal(GeometryError)
    m = Module()
    m.d.comb += code.eq(descriptor_fault(GatedParams(config), descriptor_fields(head)))
    descriptors = _near_the_limits(config)
    wanted = [descriptor_error(config, data) for data in descriptors]
    assert {*wanted} >= set(GeometryError) - {GeometryError.CUT, GeometryError.EARLY_LAST, GeometryError.LATE_LAST}
    got: list[int] = []

    async def bench(ctx: Any) -> None:
        for data in descriptors:
            ctx.set(head, int.from_bytes(data, "little"))
            await ctx.delay(1e-9)
            got.append(ctx.get(code))

    simulator = Simulator(m)
    simulator.add_testbench(bench)
    simulator.run()
    assert np.array_equal(got, wanted)
