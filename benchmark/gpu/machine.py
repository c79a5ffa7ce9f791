"""Device properties, memory bandwidth, process start times, and the tests marked cuda."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence

import torch

from benchmark.gpu.agenda import ROOT
from benchmark.gpu.shapes import copy_bandwidth
from benchmark.gpu.worker import Job, NotHere
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


def measure_tests(job: Job) -> None:
    """Run tests marked cuda; RuntimeError for failures, NotHere without GPU or `tests`."""
    job.require_gpu("tests marked cuda")
    if not (ROOT / "tests").is_dir():
        raise NotHere("the tests are not installed: run this in a checkout")
    run_tests(job, ["-m", "cuda"])


def run_tests(job: Job, flags: Sequence[str]) -> None:
    """Run pytest and record outcomes as printed; RuntimeError if it fails."""
    # Not our settings, which are for CPUs. Missing packages must not keep other modules from being tested.
    options = ["-o", "addopts=--strict-markers", "-v", "--tb=short", "-rs", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "--continue-on-collection-errors", *flags]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONUNBUFFERED": "1", "TEST_GPU": "1"}
    counts, last = Counter[str](), ""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (
        (job.folder / "tests.txt").open("w") as log,
        subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as process,  # type: ignore[call-overload]
    ):
        for line in process.stdout:
            print(line, end="", file=log, flush=True)
            if found := re.match(r"(\S*::.*) (PASSED|FAILED|ERROR|SKIPPED)\b", line):
                counts[found[2].lower()] += 1
                if found[2] in ("FAILED", "ERROR"):
                    job.add("tests that failed", {"test": found[1]})
                job.put(**counts)
            last = line
    job.put(summary=last.strip(" =\n"), exit_status=process.returncode)
    if process.returncode:
        print((job.folder / "tests.txt").read_text()[-4000:])
        raise RuntimeError(f"pytest ended with status {process.returncode}")
