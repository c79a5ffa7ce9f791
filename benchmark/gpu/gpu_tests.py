"""The tests that need a GPU."""

from __future__ import annotations

import subprocess
import sys

from benchmark.gpu.agenda import ROOT
from benchmark.gpu.worker import Job, NotHere


def measure(job: Job) -> None:
    """What pytest says; an error of this step where a test fails."""
    job.require_gpu("tests marked cuda")
    if not (ROOT / "tests").is_dir():
        raise NotHere("the tests are not installed: run this in a checkout")
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "--tb=short", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.strip().splitlines()
    job.put(summary=lines[-1] if lines else "pytest said nothing", exit_status=done.returncode)
    if done.returncode:
        print(done.stdout)
        raise RuntimeError(f"pytest ended with status {done.returncode}")
