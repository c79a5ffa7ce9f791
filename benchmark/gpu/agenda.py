"""The steps, and how one of them is run: as a process with a time limit, whose death is a finding too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmark.questions.records import read_json

ROOT = Path(__file__).parents[2]
LAST_WORDS_S = 5.0
"""A process that has used up its time is asked where it stands, and may take so long to say it."""
TAIL_LINES = 40
"""Of what a failed process wrote at last."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something to be measured by a process of its own."""

    name: str
    limit_s: float
    """The process is ended after this time."""
    measure: str
    """`module:function` below benchmark.gpu; the function takes a `worker.Job`."""
    about: str
    settings: Mapping[str, str] = field(default_factory=dict)
    """Keyword arguments of the function."""


SEVEN, ONE, MODES = {"size": "7b"}, {"size": "1b"}, {"modes": "naive,share,eagle,hybrid"}
STEPS = (
    Step("machine", 30, "machine:measure", "versions, clocks, bandwidth of copying and reading"),
    Step("tests", 110, "gpu_tests:measure", "the tests that need a GPU, those of our kernels among them"),
    Step("7b-costs", 150, "made:measure", "at sizes of 7B: steps, and gains at known acceptance", SEVEN),
    Step("1b-costs", 90, "made:measure", "the same at sizes of 1B", ONE),
    Step("135m", 130, "embedded:measure", "the embedded model: texts, speed, captures, memory; graphs and eager"),
    Step("1b", 90, "widened:measure", "widened to 1B: modes prompt by prompt", ONE | MODES),
    Step("kernels", 110, "own_kernels:measure", "our Triton kernels: errors, bits of rows, speed, dependent launch"),
    Step("tiles", 110, "tiles:measure", "the fastest tiles of our products, kept for what follows and to be shipped"),
    Step("7b", 130, "widened:measure", "widened to 7B: modes prompt by prompt", SEVEN | MODES),
    Step("135m-more", 150, "embedded:measure_more", "other ways of sampling, trees, rows that come and go"),
    Step("gemlite", 90, "low_bits:measure", "low-bit products by gemlite, beside ours; the faster ones are used"),
    Step("offload", 180, "offloaded:measure", "7B in 8 and 12 GiB: the link, naive, share", SEVEN),
    Step("7b-more", 130, "widened:measure_more", "7B: profile, prompts, steps of any width, a long cache", SEVEN),
    Step("starts", 80, "starts:measure", "seconds of whole processes to the first tokens, caches warm and cold"),
    Step("classic", 50, "widened:measure", "classic against naive, at 1B", ONE | {"modes": "naive,classic"}),
    Step("stages", 70, "widened:in_stages", "1B in two stages on the one GPU, beside it whole", ONE),
)
"""Most valuable first: the first six in ten minutes, all in 29 minutes at most."""


def named(names: Sequence[str]) -> tuple[Step, ...]:
    """The steps of these names, in the agenda's order; ValueError for a name that there is not."""
    known = {step.name for step in STEPS}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no step {name!r}; choose from {', '.join(step.name for step in STEPS)}")
    return tuple(step for step in STEPS if step.name in names)


def run_step(step: Step, command: Sequence[str], findings: Path, *, limit_s: float | None = None) -> dict[str, Any]:
    """Run a step's process, which writes `findings`; returns what became of it and what it found, even if it died."""
    limit_s = step.limit_s if limit_s is None else limit_s
    started = time.perf_counter()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
            problem = _problem(status)
        except subprocess.TimeoutExpired:
            problem = f"not finished after {limit_s:g} s"
        finally:
            _end(process)
        found = read_json(findings) if findings.exists() else {}
        reason = found.pop("not here", None)
        outcome = {"state": "done", "seconds": time.perf_counter() - started, "limit_s": limit_s, "found": found}
        if reason is not None:
            outcome |= {"state": "not here", "reason": reason}
        elif problem:
            outcome |= {"state": "failed", "reason": problem, "tail": _tail(said)}
    return outcome


def worker(step: Step, findings: Path, *options: str) -> list[str]:
    """The command of a step's process."""
    return [
        *(sys.executable, "-X", "faulthandler", "-m", "benchmark.gpu.worker", step.name),
        *("--findings", str(findings.absolute()), *options),
    ]


def _problem(status: int) -> str | None:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"exit status {status}" if status else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it still runs, and all that it has started. Python tells first where it stands."""
    if process.poll() is None:
        process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a driver that hangs may hold it for ever
        process.wait(LAST_WORDS_S)


def _tail(said: IO[bytes]) -> str:
    said.seek(0)
    return "\n".join(said.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
