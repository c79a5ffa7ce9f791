"""Seconds of whole processes, from nothing to the first tokens."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from benchmark.gpu.worker import Job

CACHES = ("SHARESD_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
LAST_S = 5.0
"""Left over for the step itself."""


def measure(job: Job) -> None:
    """Eight tokens of share: with caches as they are, warm, and empty, which takes longest."""
    job.source()
    generate = [sys.executable, "-m", "sharesd", "generate", "Hello", "--max-new-tokens", "8", "--mode", "share"]
    command = [*generate, "--device", job.device, *(["--target", job.target] if job.target else [])]

    def note(name: str, **caches: str) -> None:
        limit_s = job.seconds_left - LAST_S
        if limit_s <= 0:
            job.put(**{name: "no time was left"})
            return
        started = time.perf_counter()
        try:
            subprocess.run(
                command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **caches}, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            job.put(**{name: f"more than {limit_s:.0f} s"})
        else:
            job.put(**{name: time.perf_counter() - started})

    note("as_found_s")
    note("warm_s")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:  # a process may write on for a moment
        note("cold_s", **{name: f"{empty}/{name}" for name in CACHES})
