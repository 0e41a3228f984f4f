"""Block memory without collision logic."""

from __future__ import annotations

from dataclasses import dataclass

from amaranth.hdl import Cat, Module, Shape, ShapeLike, Signal, Value, unsigned
from amaranth.lib.memory import Memory

from rtl.lib.multiplier import Target

__all__ = ["BlockMemory"]

_BLOCK_WIDTHS = ((512, 36), (1024, 18), (2048, 9), (4096, 4), (8192, 2), (16384, 1))
"""Words and bits of an ECP5 memory block (DP16KD) in each of its shapes."""


@dataclass(frozen=True)
class WritePort:
    """``en`` has a bit for every granule of the word."""

    en: Signal
    addr: Signal
    data: Signal


class BlockMemory:
    """Memory with one write port and a read a cycle: ``data`` is what ``address`` held a cycle ago.

    A word that is written and read in the same cycle is never used, so that no logic need compare the addresses; tools
    take that promise for a read without a clock, whose register they then draw into the memory. For an ECP5 the word
    is cut into memories that are as deep as a block is in some shape, so that no multiplexer between blocks is needed.

    Parameters
    ----------
    m: module that gets the memory
    name: of the submodule
    shape: of a word
    depth: words
    granularity: bits of the word for each write enable, None for a single one
    target: what the memory is for

    Members
    -------
    write: :class:`WritePort`
    address, data: what is read
    """

    def __init__(
        self,
        m: Module,
        name: str,
        shape: ShapeLike,
        depth: int,
        *,
        granularity: int | None = None,
        target: Target = Target.GENERIC,
    ) -> None:
        bits = Shape.cast(shape).width
        lane = bits if granularity is None else granularity
        self.write = WritePort(
            en=Signal(bits // lane, name=f"{name}_write_enable"),
            addr=Signal(range(depth), name=f"{name}_write_address"),
            data=Signal(shape, name=f"{name}_write_data"),
        )
        self.address = Signal(range(depth), name=f"{name}_address")
        self.data = Signal(shape, name=f"{name}_data", reset_less=True)
        read_data = []
        for low, high in _slices(bits, depth, granularity, target):
            memory = Memory(
                shape=unsigned(high - low), depth=depth, init=[], attrs={"ram_style": "block", "no_rw_check": 1}
            )
            m.submodules[name if high - low == bits else f"{name}_{low}"] = memory
            fine = granularity is not None and high - low > lane
            write = memory.write_port(granularity=lane if fine else None)
            read = memory.read_port(domain="comb")
            enables = self.write.en[low // lane : high // lane] if fine else self.write.en[low // lane]
            m.d.comb += [
                write.en.eq(enables),
                write.addr.eq(self.write.addr),
                write.data.eq(Value.cast(self.write.data)[low:high]),
                read.addr.eq(self.address),
            ]
            read_data.append(read.data)
        m.d.sync += self.data.eq(Cat(*read_data))


def _slices(bits: int, depth: int, granularity: int | None, target: Target) -> list[tuple[int, int]]:
    """Low and high bit of each memory that holds a part of the word."""
    width = bits
    if target is Target.ECP5:
        width = next((block for words, block in _BLOCK_WIDTHS if depth <= words), bits)
        if granularity is not None:
            width = max(granularity, width // granularity * granularity)
    return [(low, min(bits, low + width)) for low in range(0, bits, width)]
