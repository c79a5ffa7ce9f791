"""Steps in order of priority, and their processes with time limits."""

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
from typing import Any

from sharesd.reports.tables import read_json

ROOT = Path(__file__).parents[2]
LAST_WORDS_S = 5.0  # seconds that a process without time left may take to print its traceback
TAIL_LINES = 40  # last lines of output of a failed process that are kept


@dataclass(frozen=True, slots=True)
class AgendaStep:
    """Measurement that runs in its own process."""

    name: str
    limit_s: float  # the process is ended after this time
    measure: str  # `module:function` below benchmark.gpu; the function takes a `worker.Job`
    about: str
    settings: Mapping[str, str] = field(default_factory=dict)  # keyword arguments of the function


SEVEN, ONE, MODES = {"size": "7b"}, {"size": "1b"}, {"modes": "naive,share,eagle,hybrid"}
STEPS = (
    AgendaStep("machine", 30, "machine:measure", "versions, clocks, bandwidth of copying and reading"),
    AgendaStep("7b", 130, "widened:measure", "widened to 7B: plain, c, modes prompt by prompt", SEVEN | MODES),
    AgendaStep("starts", 80, "machine:starts", "seconds of whole processes to the first tokens, caches warm and cold"),
    AgendaStep("peer", 60, "others:measure_transformers", "transformers, compiled, on the model of step 7b", SEVEN),
    AgendaStep("server", 90, "others:measure_server", "our server, 1B, under one user and under eight", ONE),
    AgendaStep("offload", 145, "offloaded:measure", "7B in 8 and 12 GiB: the link, naive, share", SEVEN),
    AgendaStep("7b-costs", 145, "made:measure", "at sizes of 7B: steps, and gains at known acceptance", SEVEN),
    AgendaStep("tests", 110, "machine:measure_tests", "the tests that need a GPU, including those of our kernels"),
    AgendaStep("135m", 130, "embedded:measure", "the embedded model: texts, speed, captures, memory; graphs and eager"),
    AgendaStep("1b", 90, "widened:measure", "widened to 1B: modes prompt by prompt", ONE | MODES),
    AgendaStep("1b-costs", 90, "made:measure", "as 7b-costs, at sizes of 1B", ONE),
    AgendaStep("kernels", 90, "own_kernels:measure", "our Triton kernels: speed, and dependent launch"),
    AgendaStep("stored", 60, "own_kernels:measure_stored", "products of the blocks of .gguf files, next to bfloat16"),
    AgendaStep("tiles", 110, "tiles:measure", "the fastest tiles of our products, for later steps and for the package"),
    AgendaStep("135m-more", 150, "embedded:measure_more", "other sampling, trees, requests that join and leave"),
    AgendaStep(
        "gemlite",
        90,
        "own_kernels:measure_gemlite",
        "low-bit products by gemlite and our kernels; the faster ones are used",
    ),
    AgendaStep("7b-more", 130, "widened:measure_more", "7B: prompts, steps of any width, a long cache", SEVEN),
    AgendaStep("classic", 50, "widened:measure", "classic against naive, at 1B", ONE | {"modes": "naive,classic"}),
    AgendaStep("stages", 70, "widened:in_stages", "1B in two stages on one GPU, next to the whole model", ONE),
)
"""Steps by priority: the first six within 540 s, the seventh within 150 more, all within 31 minutes.

So a card that is lent for 15 minutes is used by two calls, `--budget 540` and `--budget 150`.
"""


def named(names: Sequence[str]) -> tuple[AgendaStep, ...]:
    """Return the named steps by priority; ValueError for an unknown name."""
    for name in names:
        if name not in {step.name for step in STEPS}:
            raise ValueError(f"unknown step {name!r}; choose from {', '.join(step.name for step in STEPS)}")
    return tuple(step for step in STEPS if step.name in names)


def run_step(
    step: AgendaStep, command: Sequence[str], findings: Path, *, limit_s: float | None = None
) -> dict[str, Any]:
    """Return a step's outcome, with findings even after a crash or limit."""
    limit_s = step.limit_s if limit_s is None else limit_s
    started = time.perf_counter()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
            ended = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            problem = ended if status else ""
        except subprocess.TimeoutExpired:
            problem = f"not finished after {limit_s:g} s"
        finally:
            _end(process)
        output.seek(0)
        tail = "\n".join(output.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
    found = read_json(findings) if findings.exists() else {}
    reason = found.pop("not here", None)
    outcome = {"state": "done", "seconds": time.perf_counter() - started, "limit_s": limit_s, "found": found}
    if reason is not None:
        outcome |= {"state": "not here", "reason": reason}
    elif problem:
        outcome |= {"state": "failed", "reason": problem, "tail": tail}
    return outcome


def worker(step: AgendaStep, findings: Path, *options: str) -> list[str]:
    program = [sys.executable, "-X", "faulthandler", "-m", "benchmark.gpu.worker", step.name]
    return [*program, "--findings", str(findings.absolute()), *options]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a driver that hangs may hold it for ever
        process.wait(LAST_WORDS_S)
