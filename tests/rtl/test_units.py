"""Units as modules with flat ports: names, layouts and the manifest that tells of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from amaranth.hdl import Fragment, unsigned
from amaranth.lib import data, enum, stream, wiring
from amaranth.lib.wiring import In, Out

from dtp.config import PRESETS, Config
from dtp.errors import DtpError
from dtp.kernel import StepKind
from rtl.emit import Emitted, Unit, emit
from rtl.lib.multiplier import Target
from rtl.units import UNITS, UnitTop, field_params, packed_fields, pruner_params
from tests.tile import TINY, design_of

ALONE = [unit for unit in Unit if unit is not Unit.ATTENTION]


def ports_of(component: wiring.Component) -> dict[str, tuple[int, str]]:
    """Bits and direction of every port but clock and reset."""
    Fragment.get(component, None)  # Amaranth warns of a component that nobody elaborates
    top = UnitTop(component)
    Fragment.get(top, None)
    assert list(top.ports)[:2] == ["clk", "rst"]
    return {name: (len(signal), direction.name) for name, (signal, direction) in list(top.ports.items())[2:]}


class Empty(wiring.Component):
    def elaborate(self, platform: object) -> Any:
        from amaranth.hdl import Module

        return Module()


def _stream(**fields: Any) -> stream.Signature:
    return stream.Signature(data.StructLayout(fields))


LITE = {
    "aw": In(_stream(addr=8, prot=3)), "w": In(_stream(data=32, strb=4)), "b": Out(_stream(resp=2)),
    "ar": In(_stream(addr=8, prot=3)), "r": Out(_stream(data=32, resp=2)),
}  # fmt: skip


def test_names_of_streams() -> None:
    assert ports_of(Empty({
        "i": In(_stream(data=16, last=1)), "o": Out(_stream(data=8, user=2, last=1)), "job": In(_stream(last=1, n=5)),
        "word": Out(stream.Signature(unsigned(7))), "clear": In(1), "count": Out(9),
    })) == {
        "s_axis_tdata": (16, "Input"), "s_axis_tlast": (1, "Input"), "s_axis_tvalid": (1, "Input"),
        "s_axis_tready": (1, "Output"), "m_axis_tdata": (8, "Output"), "m_axis_tuser": (2, "Output"),
        "m_axis_tlast": (1, "Output"), "m_axis_tvalid": (1, "Output"), "m_axis_tready": (1, "Input"),
        "s_axis_job_tdata": (6, "Input"), "s_axis_job_tvalid": (1, "Input"), "s_axis_job_tready": (1, "Output"),
        "m_axis_word_tdata": (7, "Output"), "m_axis_word_tvalid": (1, "Output"), "m_axis_word_tready": (1, "Input"),
        "clear": (1, "Input"), "count": (9, "Output"),
    }  # fmt: skip


def test_axi_lite_only_if_all_of_it_is_there() -> None:
    assert ports_of(Empty(LITE)) == {
        "s_axil_awaddr": (8, "Input"), "s_axil_awprot": (3, "Input"), "s_axil_awvalid": (1, "Input"),
        "s_axil_awready": (1, "Output"), "s_axil_wdata": (32, "Input"), "s_axil_wstrb": (4, "Input"),
        "s_axil_wvalid": (1, "Input"), "s_axil_wready": (1, "Output"), "s_axil_bresp": (2, "Output"),
        "s_axil_bvalid": (1, "Output"), "s_axil_bready": (1, "Input"), "s_axil_araddr": (8, "Input"),
        "s_axil_arprot": (3, "Input"), "s_axil_arvalid": (1, "Input"), "s_axil_arready": (1, "Output"),
        "s_axil_rdata": (32, "Output"), "s_axil_rresp": (2, "Output"), "s_axil_rvalid": (1, "Output"),
        "s_axil_rready": (1, "Input"),
    }  # fmt: skip
    # Other streams may have these names.
    for changed in ({"b": Out(_stream(resp=2, last=1))}, {"r": Out(1)}):
        names = ports_of(Empty(LITE | changed))
        assert "s_axis_aw_tdata" in names and not any(name.startswith("s_axil") for name in names)


def test_members_that_have_no_flat_form_are_refused() -> None:
    other = wiring.Signature({"a": Out(1)})
    component = Empty({"bus": Out(other)})
    Fragment.get(component, None)
    with pytest.raises(DtpError, match=r"^UnitTop\.Empty\.bus must be a stream or a plain port, not "):
        UnitTop(component)


class Colour(enum.Enum, shape=2):
    RED = 0
    BLUE = 2


def test_packed_fields() -> None:
    inner = data.StructLayout({"x": 3, "colour": Colour})
    layout = data.StructLayout(
        {"a": 5, "inner": inner, "m": data.ArrayLayout(data.ArrayLayout(data.ArrayLayout(unsigned(4), 2), 3), 1)}
    )
    assert packed_fields(layout) == [
        {"name": "a", "offset": 0, "bits": 5, "signed": False},
        {"name": "inner.x", "offset": 5, "bits": 3, "signed": False},
        {"name": "inner.colour", "offset": 8, "bits": 2, "signed": False, "values": {"RED": 0, "BLUE": 2}},
        {"name": "m", "offset": 10, "bits": 4, "signed": False, "dimensions": [1, 3, 2]},
    ]
    of_structures = packed_fields(data.StructLayout({"p": data.ArrayLayout(inner, 2)}))
    assert [(f["name"], f["offset"]) for f in of_structures] == [
        ("p[0].x", 0), ("p[0].colour", 3), ("p[1].x", 5), ("p[1].colour", 8),
    ]  # fmt: skip
    assert packed_fields(unsigned(8)) == packed_fields(3) == []


@pytest.mark.parametrize("unit", ALONE)
def test_ports_are_those_of_the_manifest(unit: Unit) -> None:
    made: Emitted = design_of(TINY, unit)
    header = re.search(r"^module top\((.*?)\);(.*?)^endmodule", made.verilog, re.MULTILINE | re.DOTALL)
    assert header is not None
    declared = {
        (name, direction, int(msb or 0) + 1)
        for direction, msb, name in re.findall(r"^  (input|output) (?:\[(\d+):0\] )?(\w+);", header[2], re.MULTILINE)
    }
    promised = {(port["name"], port["direction"], port["bits"]) for port in made.manifest["ports"]}
    assert declared == promised
    assert (made.manifest["unit"], made.manifest["module"], made.manifest["config_hash"]) == (
        unit.value, "top", TINY.hash,
    )  # fmt: skip
    assert made.manifest["parameters"] and made.manifest["latencies"]
    for port in made.manifest["ports"]:
        covered = 0
        for part in port.get("fields", []):
            assert part["offset"] == covered
            count = 1
            for dimension in part.get("dimensions", []):
                count *= dimension
            covered += part["bits"] * count
        assert covered in (0, port["bits"])
        assert port["fields"] if port["name"].endswith("tdata") and unit not in (Unit.TRANSPORT, Unit.GATED) else True
    assert "/site-packages/" not in made.verilog and 'src = "/' not in made.verilog


def test_the_kinds_of_a_step_are_told() -> None:
    ports = {port["name"]: port for port in design_of(TINY, Unit.COMMUTATOR).manifest["ports"]}
    kind = ports["s_axis_step_tdata"]["fields"][0]
    assert kind["values"] == {item.name: item.value for item in StepKind}
    assert ports["s_axis_bias_write_tready"] == {"name": "s_axis_bias_write_tready", "bits": 1, "direction": "output"}


def test_the_attention_tile_is_still_the_default() -> None:
    assert design_of(TINY).manifest["unit"] == "attention"
    assert set(UNITS) == set(Unit)


def test_explicit_cells_change_the_text_and_not_the_ports() -> None:
    plain, other = design_of(TINY, Unit.HOLONOMY), emit(TINY, Unit.HOLONOMY, target=Target.ECP5)
    assert "MULT18X18D" in other.verilog and "MULT18X18D" not in plain.verilog
    assert other.manifest == plain.manifest | {"target": "ecp5"}


@pytest.mark.parametrize(("name", "multipliers", "lanes"), [("tiny", 2, 4), ("ecp5-85k", 2, 4), ("wide", 16, 16)])
def test_sizes_of_units_alone(name: str, multipliers: int, lanes: int) -> None:
    config = Config.load(name)
    assert (field_params(config).multipliers, pruner_params(config).lanes) == (multipliers, lanes)
    assert name in PRESETS
