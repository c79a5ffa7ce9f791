"""Seconds of whole processes, from nothing to the first tokens."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from benchmark.gpu.worker import Job

CACHES = ("SHARESD_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def measure(job: Job) -> None:
    """Eight tokens of share: with warm caches (twice), then with empty ones, which takes longest."""
    generate = [sys.executable, "-m", "sharesd", "generate", "Hello", "--max-new-tokens", "8", "--mode", "share"]
    command = [*generate, "--device", job.device, *(["--target", job.target] if job.target else [])]

    def seconds(**caches: str) -> float:
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **caches})
        return time.perf_counter() - started

    job.put(as_found_s=seconds())
    job.put(warm_s=seconds())
    with tempfile.TemporaryDirectory() as empty:
        job.put(cold_s=seconds(**{name: f"{empty}/{name}" for name in CACHES}))
