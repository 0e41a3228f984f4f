"""Rows about a fresh clone: nothing of this checkout's environment, packages or built simulators is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.bench.cases import Case
from tools.bench.measured import Bench, Measured

ROOT = Path(__file__).resolve().parents[2]
COLD_LIMIT_S, WARM_LIMIT_S, TEST_LIMIT_S = 600.0, 120.0, 1200.0


class FreshClone:
    """A clone of the committed state in a temporary folder, with caches of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dtp-clone-"))
        self.checkout = self.folder / "clone"
        subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(self.checkout)], check=True)

    def make(self, target: str) -> tuple[float, bool, str]:
        """Seconds, success and the last lines of ``make TARGET``."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTHON"))}
        env |= {"XDG_CACHE_HOME": str(self.folder / "cache"), "PIP_NO_CACHE_DIR": "1"}
        env.pop("MAKEFLAGS", None)
        begin = time.monotonic()
        done = subprocess.run(["make", target], cwd=self.checkout, env=env, capture_output=True, text=True, check=False)
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
        return time.monotonic() - begin, done.returncode == 0, tail

    def remove(self) -> None:
        """Delete everything."""
        shutil.rmtree(self.folder, ignore_errors=True)


_clone: FreshClone | None = None


def _fresh() -> FreshClone:
    global _clone
    if _clone is None:
        _clone = FreshClone()
    return _clone


def remove_clone() -> None:
    """Delete the clone that the rows share, if there is one."""
    global _clone
    if _clone is not None:
        _clone.remove()
        _clone = None


def _timed(bench: Bench, target: str, limit_s: float, what: str) -> Measured:
    bench.progress(what, None)
    seconds, good, tail = _fresh().make(target)
    text = f"{'green' if good else 'failed'}, {seconds / 60:.1f} min on {os.cpu_count()} cores"
    return Measured(
        text, good and seconds <= limit_s, {"seconds": seconds, "green": good}, () if good else tuple(tail.splitlines())
    )


def demo_cold(bench: Bench, cases: Sequence[Case]) -> Measured:
    """``make demo`` in a fresh clone, with installs and without any cache."""
    remove_clone()
    return _timed(bench, "demo", COLD_LIMIT_S, "fresh clone: make demo")


def demo_warm(bench: Bench, cases: Sequence[Case]) -> Measured:
    """``make demo`` once more."""
    if _clone is None:
        _fresh().make("demo")
    return _timed(bench, "demo", WARM_LIMIT_S, "warm clone: make demo")


def test(bench: Bench, cases: Sequence[Case]) -> Measured:
    """``make test`` in another fresh clone, with installs and without any cache."""
    remove_clone()
    return _timed(bench, "test", TEST_LIMIT_S, "fresh clone: make test")
