"""Settings that every test shares: one seed policy, one thread a process, no window, no warning unseen."""

from __future__ import annotations

import os

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")
os.environ.setdefault("MPLBACKEND", "Agg")

from hypothesis import settings  # noqa: E402

# The same examples on every run, and no failure because a shared machine was slow.
settings.register_profile("dtp", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("dtp")
