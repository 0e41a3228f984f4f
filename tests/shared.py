"""One elaborated and compiled design for many runs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable
from typing import Any

from amaranth.sim import Simulator

Bench = Callable[[Any], Coroutine[Any, Any, None]]


class SharedSimulation:
    """Runs benches on one design, each time from reset."""

    def __init__(self, dut: Any) -> None:
        self.dut = dut
        self._simulator = Simulator(dut)
        self._simulator.add_clock(1e-8)
        self._simulator.add_testbench(self._run)
        self._simulator.add_testbench(self._run_beside)
        self._benches: tuple[Bench, ...] = ()
        self._fresh = True
        self.usable = True

    async def _run(self, ctx: Any) -> None:
        await self._benches[0](ctx)

    async def _run_beside(self, ctx: Any) -> None:
        for bench in self._benches[1:]:
            await bench(ctx)

    def run(self, bench: Bench, *beside: Bench) -> None:
        """Runs a bench, and in the same cycles others, one after the other."""
        self._benches = (bench, *beside)
        if not self._fresh:
            self._simulator.reset()
        self._fresh = False
        # A bench that fails leaves its triggers in the simulator.
        self.usable = False
        self._simulator.run()
        self.usable = True


_made: dict[Hashable, SharedSimulation] = {}


def shared(key: Hashable, make: Callable[[], Any]) -> SharedSimulation:
    """The simulation of the design that ``make`` gives, kept for the next call with an equal key."""
    if key not in _made or not _made[key].usable:
        _made[key] = SharedSimulation(make())
    return _made[key]
