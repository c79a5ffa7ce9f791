"""The parent's end of `worker.py`: a process that is asked, and whose death is an answer too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmark.peers.protocol import Batch, Sample, Settings

LIMIT_S = 900.0
"""Longest wait for an answer, loading and converting a model included."""


class PeerError(Exception):
    """Why a runtime has no number; `dead` where its process is gone."""

    def __init__(self, reason: str, *, dead: bool = False) -> None:
        super().__init__(reason)
        self.dead = dead


class Worker:
    """A runtime in its own process."""

    def __init__(self, module: str, settings: Settings, *, limit_s: float = LIMIT_S) -> None:
        """Start the process and hand it the settings; PeerError (dead) if the runtime does not open."""
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(settings.num_threads))
        self._limit_s = limit_s
        self._noise = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmark.peers.worker", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._noise,
            text=True,
            encoding="utf-8",
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)},
        )
        try:
            self._ask(settings.to_json())
        except PeerError as error:
            self.close()
            raise PeerError(str(error), dead=True) from error

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prepare(self, variant: str, batch: Batch) -> None:
        """Load and warm up; PeerError where that fails."""
        self._ask({"do": "prepare", "variant": variant, "batch": batch})

    def measure(self, variant: str, batch: Batch) -> Sample:
        """The answers to a batch; PeerError where there are none."""
        watch = _OthersWatch(self._process.pid)
        answer = self._ask({"do": "measure", "variant": variant, "batch": batch})
        return Sample(**{**answer["sample"], "others_busy": watch.share()})

    def close(self) -> None:
        """End the process."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        if process.poll() is None:
            process.kill()  # it holds nothing that needs care, and may be busy
        process.wait()
        with suppress(BrokenPipeError):  # a request that nobody read
            process.stdin.close()
        process.stdout.close()
        self._noise.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(self._limit_s, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            in_time = late.is_alive()
            late.cancel()
        if not line:
            raise PeerError(self._last_words() if in_time else f"no answer within {self._limit_s:g} s", dead=True)
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _last_words(self) -> str:
        status = self._process.wait()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        self._noise.seek(0)
        lines = self._noise.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"its process ended {how}{f': {last}' if last else ''}"[:300]


class _OthersWatch:
    """How busy the machine's CPUs are with anything but one process, from now on."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._before = self._now()

    def share(self) -> float:
        """Between 0 and 1."""
        all_s, idle_s, own_s = (b - a for a, b in zip(self._before, self._now(), strict=True))
        return max(0.0, all_s - idle_s - own_s) / all_s if all_s > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        machine, own = psutil.cpu_times(), self._process.cpu_times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        return sum(machine), idle, own.user + own.system
