"""ShareSD's server as a child process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import httpx

COMMAND = (sys.executable, "-P", "-m", "serve")  # -P: a serve.py in the working directory is not it
READY_S, STOP_S = 900.0, 30.0
"""Max. seconds of start and end; a start may convert and compile."""
URL = re.compile(r"http://[\w.\-]+:\d+")


@contextmanager
def spawned(mode: str, flags: Sequence[str]) -> Iterator[str]:
    """Yield a ready server's URL; RuntimeError if it ends or READY_S passes."""
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [*COMMAND, "--mode", mode, "--port", "0", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",  # its URL may go to stdout
        },
    )
    output = _Output(process)
    try:
        yield _ready_url(mode, process, output)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.join(STOP_S)


class _Output(threading.Thread):
    """Reader thread of a server's output, with its URL and last lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self.url: str | None = None
        self._process = process
        self._lines: deque[str] = deque(maxlen=20)
        self.start()

    def run(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.strip():
                    self._lines.append(line.strip())
                if self.url is None and (found := URL.search(line)):
                    self.url = found[0]

    def last_words(self) -> str:
        """Return the last line of output, after the end of the process."""
        self.join(STOP_S)
        return self._lines[-1] if self._lines else "it said nothing"


def _ready_url(mode: str, process: subprocess.Popen[str], output: _Output) -> str:
    """Return the server's URL once /health answers 200; else RuntimeError."""
    limit = monotonic() + READY_S
    while monotonic() < limit:
        if process.poll() is not None:
            ended = f"ended with status {process.returncode}: {output.last_words()}"
            raise RuntimeError(f"the server in mode {mode} {ended}")
        with suppress(httpx.HTTPError):
            if output.url and httpx.get(f"{output.url}/health", trust_env=False, timeout=5).status_code == 200:
                return output.url
        sleep(0.1)
    raise RuntimeError(f"the server in mode {mode} was not ready within {READY_S:g} s")
