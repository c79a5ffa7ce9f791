"""ShareSD's server as a child process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx

COMMAND = (sys.executable, "-P", "-m", "serve")  # -P: a serve.py in the working directory is not it
READY_S, STOP_S = 900.0, 30.0
"""Max. seconds of start and end; a start may convert and compile."""
URL = re.compile(r"http://[\w.\-]+:\d+(?=\D)")  # a whole one, not what is written so far


@contextmanager
def spawned(mode: str, flags: Sequence[str]) -> Iterator[str]:
    """Yield a ready server's URL; RuntimeError if it ends or READY_S passes."""
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command, unbuffered = [*COMMAND, "--mode", mode, "--port", "0", *flags], {"PYTHONUNBUFFERED": "1"}
    with tempfile.NamedTemporaryFile() as output:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths, **unbuffered}, **pipes)
        try:
            yield _ready_url(mode, process, Path(output.name))
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready_url(mode: str, process: subprocess.Popen[bytes], output: Path) -> str:
    """Return the server's URL once /health answers 200; else RuntimeError."""
    limit = monotonic() + READY_S
    while monotonic() < limit:
        status, log = process.poll(), output.read_text(errors="replace")
        if status is not None:
            last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "it printed nothing")
            raise RuntimeError(f"the server in mode {mode} ended with status {status}: {last}")
        with suppress(httpx.HTTPError):
            url = URL.search(log)
            if url and httpx.get(f"{url[0]}/health", trust_env=False, timeout=5).status_code == 200:
                return url[0]
        sleep(0.1)
    raise RuntimeError(f"the server in mode {mode} was not ready within {READY_S:g} s")
