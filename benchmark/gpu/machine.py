"""Device properties, memory bandwidth, and process start times."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time

import torch

from benchmark.gpu.shapes import copy_bandwidth
from benchmark.gpu.worker import Job
from compile.cuda.bench import seconds_per_call
from sharesd.reports.environment import environment

QUERY = "name,driver_version,clocks.max.sm,clocks.max.mem,clocks.sm,clocks.mem,power.limit,temperature.gpu,memory.used"

CACHES = ("SHARESD_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
LAST_S = 5.0  # seconds left for the step itself


def measure(job: Job) -> None:
    """Record versions and clocks, then copy and read bandwidth."""
    job.put(**{name: value for name, value in environment(job.device).items() if value is not None})
    if job.on_gpu:
        device = torch.cuda.get_device_properties(torch.device(job.device))
        job.put(
            capability=f"{device.major}.{device.minor}", multiprocessors=device.multi_processor_count, clocks=_clocks()
        )
    job.put(copy_bytes_per_second=copy_bandwidth(job.device))
    source = torch.ones(2**22 if job.tiny else 2**30, dtype=torch.float32, device=job.device)
    job.put(read_bytes_per_second=source.nbytes / seconds_per_call([source.amax]))


def _clocks() -> str:
    command = [shutil.which("nvidia-smi") or "nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip() or done.stderr.strip()


def starts(job: Job) -> None:
    """Time `sharesd generate` with caches as they are, warm, then empty."""
    job.source()
    generate = [sys.executable, "-m", "sharesd", "generate", "Hello", "--max-new-tokens", "8", "--mode", "share"]
    command = [*generate, "--device", job.device, *(["--target", job.target] if job.target else [])]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:  # a process may write on for a moment
        for name, caches in {"as_found_s": {}, "warm_s": {}, "cold_s": {c: f"{empty}/{c}" for c in CACHES}}.items():
            limit_s, started = job.seconds_left - LAST_S, time.perf_counter()
            if limit_s <= 0:
                job.put(**{name: "no time left"})
                continue
            try:
                env = {**os.environ, **caches}
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env, timeout=limit_s)
                job.put(**{name: time.perf_counter() - started})
            except subprocess.TimeoutExpired:
                job.put(**{name: f"more than {limit_s:.0f} s"})
