"""Block memory without collision logic."""

from __future__ import annotations

from amaranth.hdl import Module, ShapeLike, Signal
from amaranth.lib.memory import Memory

__all__ = ["BlockMemory"]


class BlockMemory:
    """Memory with one write port and a read a cycle: ``data`` is what ``address`` held a cycle ago.

    A word that is written and read in the same cycle is never used, so that no logic need compare the addresses; tools
    take that promise for a read without a clock, whose register they then draw into the memory.

    Parameters
    ----------
    m: module that gets the memory
    name: of the submodule
    shape: of a word
    depth: words
    granularity: bits of the word for each write enable, None for a single one
    """

    def __init__(
        self, m: Module, name: str, shape: ShapeLike, depth: int, *, granularity: int | None = None
    ) -> None:
        memory = Memory(shape=shape, depth=depth, init=[], attrs={"ram_style": "block", "no_rw_check": 1})
        m.submodules[name] = memory
        self.write = memory.write_port(granularity=granularity)
        read = memory.read_port(domain="comb")
        self.address = read.addr
        self.data = Signal(shape, name=f"{name}_data", reset_less=True)
        m.d.sync += self.data.eq(read.data)
