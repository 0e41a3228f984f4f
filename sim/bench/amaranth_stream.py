"""The same job on Amaranth's own Python simulator: slow to run, quick to start, no compiler needed.

The component has ``i``: In(stream of {data, last}), ``o``: Out(stream of {data, user, last}) and, optionally,
``abort``: In(1).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from amaranth.hdl import ClockDomain, Module
from amaranth.sim import Simulator

from dtp.errors import DtpError

from .stream import StreamJob, StreamPorts, StreamResult, checked_width, xorshift32


def ports_of_component(component: Any) -> StreamPorts:
    """Widths of a component's streams; raises :class:`~dtp.errors.DtpError` if it has no such streams."""
    widths = []
    for port, name in (("i", "data"), ("o", "data"), ("o", "user")):
        try:
            widths.append(len(getattr(getattr(component, port).payload, name)))
        except AttributeError:
            raise DtpError(f"{type(component).__name__} has no stream {port} with a field {name}") from None
    if widths[0] % 8 or widths[1] % 8:
        raise DtpError(f"{type(component).__name__}: data must be whole bytes, not {widths[:2]} bits")
    return StreamPorts(in_bytes=widths[0] // 8, out_bytes=widths[1] // 8, user_bits=widths[2])


class _Feeder:
    """Cycle by cycle what ``feeder.sv`` does; attributes are the results."""

    def __init__(self, component: Any, reset: Any, job: StreamJob, ports: StreamPorts):
        self.component, self.reset, self.job, self.ports = component, reset, job, ports
        self.out: list[tuple[int, int, int, int]] = []
        self.first_input: int | None = None
        self.violation: int | None = None
        self.taken = self.packets = self.extra = self.cycles = self.unread = 0
        self.timed_out = False
        self.wall_s = 0.0

    async def run(self, ctx: Any) -> None:
        begin = time.perf_counter()
        await self._run(ctx)
        self.wall_s = time.perf_counter() - begin

    async def _run(self, ctx: Any) -> None:
        job, source, sink = self.job, self.component.i, self.component.o
        beats = [int.from_bytes(row.tobytes(), "little") for row in job.beats]
        flags = [int(flag) for flag in job.last_flags]
        source_stall, sink_stall = job.stall_thresholds
        source_state, sink_state = job.stall_states
        fill_words = (self.ports.in_bytes + 3) // 4
        fill_mask = (1 << (8 * self.ports.in_bytes)) - 1
        held: tuple[int, int] | None = None
        offer: tuple[int, int, int] | None = None
        offered = waiting = False
        next_beat = idle = cycle = 0
        while True:
            # What this cycle sees.
            resetting = cycle == job.reset_at
            ctx.set(self.reset, resetting)
            if job.abort_at is not None:
                ctx.set(self.component.abort, cycle == job.abort_at)
            if not resetting and held is None and next_beat < len(beats):
                held, offered, next_beat = (beats[next_beat], flags[next_beat]), False, next_beat + 1
            released = offered or (source_state & 0xFFFF) >= source_stall
            valid = not resetting and held is not None and released
            if valid and held is not None:
                offered = True
                data, last = held
            else:
                data = sum(source_state << (32 * word) for word in range(fill_words)) & fill_mask
                last = source_state & 1
            ready = not resetting and (sink_state & 0xFFFF) >= sink_stall
            ctx.set(source.payload.data, data)
            ctx.set(source.payload.last, last)
            ctx.set(source.valid, valid)
            ctx.set(sink.ready, ready)

            # What happened in it.
            if resetting:
                held, waiting, idle, next_beat, self.packets = None, False, 0, job.restart_beat, 0
            else:
                m_valid = ctx.get(sink.valid)
                now = (ctx.get(sink.payload.data), ctx.get(sink.payload.user), ctx.get(sink.payload.last))
                if waiting and (not m_valid or now != offer) and self.violation is None:
                    self.violation = cycle
                waiting, offer = bool(m_valid) and not ready, now
                if valid and ctx.get(source.ready):
                    if self.first_input is None:
                        self.first_input = cycle
                    self.taken += 1
                    held = None
                if m_valid and ready:
                    if self.packets >= job.packets:
                        self.extra += 1
                    elif now[2]:
                        self.packets += 1
                    self.out.append((cycle, *now))
                if self.packets >= job.packets and next_beat == len(beats) and held is None:
                    idle += 1
            if idle > job.drain_cycles:
                self.extra += waiting
                break
            if cycle + 1 >= job.timeout_cycles:
                self.timed_out = True
                break
            await ctx.tick()
            cycle += 1
            source_state, sink_state = xorshift32(source_state), xorshift32(sink_state)
        self.cycles = cycle + 1
        self.unread = len(beats) - next_beat + (held is not None)


def run_amaranth(
    component: Any,
    job: StreamJob,
    *,
    waves: Path | None = None,
    beside: Sequence[Callable[[Any], Awaitable[None]]] = (),
) -> StreamResult:
    """Run a job on a component in Amaranth's simulator.

    ``waves`` names a VCD file to write; ``beside`` are test benches that drive the component's other ports.

    The result is not checked: ask :meth:`~sim.bench.stream.StreamResult.check`. Raises
    :class:`~dtp.errors.DtpError` when the component does not fit the job.
    """
    ports = ports_of_component(component)
    checked_width(job, ports)
    if job.abort_at is not None and not hasattr(component, "abort"):
        raise DtpError(f"{type(component).__name__} has no abort, StreamJob.abort_at must be None")
    module = Module()
    module.domains.sync = domain = ClockDomain()
    module.submodules.dut = component
    feeder = _Feeder(component, domain.rst, job, ports)
    simulator = Simulator(module)
    simulator.add_clock(1e-8)
    simulator.add_testbench(feeder.run)
    for bench in beside:
        simulator.add_testbench(bench, background=True)
    with simulator.write_vcd(str(waves)) if waves is not None else nullcontext():
        simulator.run()
    count = len(feeder.out)
    data = b"".join(word.to_bytes(ports.out_bytes, "little") for _, word, _, _ in feeder.out)
    return StreamResult(
        job=job,
        data=np.frombuffer(data, dtype=np.uint8).reshape(count, ports.out_bytes),
        user=np.array([user for _, _, user, _ in feeder.out], dtype=np.uint64),
        last=np.array([last for _, _, _, last in feeder.out], dtype=np.bool_),
        cycles=np.array([cycle for cycle, _, _, _ in feeder.out], dtype=np.int64),
        first_input_cycle=feeder.first_input,
        inputs_taken=feeder.taken,
        inputs_unread=feeder.unread,
        packets=feeder.packets,
        extra_beats=feeder.extra,
        violation_cycle=feeder.violation,
        timed_out=feeder.timed_out,
        sim_cycles=feeder.cycles,
        wall_s=feeder.wall_s,
    )
