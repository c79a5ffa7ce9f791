"""Tests marked cuda, those of Triton's kernels included, run by pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

from benchmark.gpu.agenda import ROOT
from benchmark.gpu.worker import Job, NotHere


def measure(job: Job) -> None:
    """Run tests marked cuda; RuntimeError for failures, NotHere without GPU or `tests`."""
    job.require_gpu("tests marked cuda")
    if not (ROOT / "tests").is_dir():
        raise NotHere("the tests are not installed: run this in a checkout")
    run(job, ["-m", "cuda"])


def run(job: Job, flags: Sequence[str]) -> None:
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
