"""Tests marked cuda, run by pytest.

Kernels that Triton's interpreter runs on a CPU are among the tested ones.
"""

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
    """Run the tests marked cuda; RuntimeError if one fails.

    NotHere on a CPU or without the folder `tests`.
    """
    job.require_gpu("tests marked cuda")
    if not (ROOT / "tests").is_dir():
        raise NotHere("the tests are not installed: run this in a checkout")
    run(job, ["-m", "cuda"])


def run(job: Job, flags: Sequence[str]) -> None:
    """Run pytest and record each outcome as it is printed.

    The output of pytest is written to tests.txt. RuntimeError if its exit status is not 0.
    """
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
