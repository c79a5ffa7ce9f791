"""How processes that wait for each other hear that one of them has ended: a connection from each to rank 0.

A collective operation does not tell: gloo says that some connection was closed, and NCCL waits forever.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from signal import Signals
from threading import Event, Lock, Thread

PATIENCE = 120.0
"""Seconds in which all processes must have come."""
GRACE = 3.0
"""Seconds in which the main thread should notice that a rank has ended; else the process is ended."""
KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 2}
"""Seconds until a silent connection is tested, and between tests, and tests: a machine that is gone says nothing."""
LOST = 3
"""Exit status of a process that ends because another one did."""


class RankLost(RuntimeError):
    """Another rank has ended; the message says which and why."""


class Lifeline:
    """One for each process of a group."""

    def __init__(self, rank: int, lines: Mapping[int, socket.socket], children: Mapping[int, subprocess.Popen]) -> None:
        """`lines` lead to other ranks: those of rank 0 to all, of others to rank 0. `children`: ranks that this process
        has started.
        """
        self.rank, self._lines, self._children = rank, dict(lines), dict(children)
        self._lost: str | None = None
        self._known, self._told = Event(), Event()  # that a rank has ended: at all, to the main thread
        self._lock, self._closed = Lock(), False
        for other, line in self._lines.items():
            Thread(target=self._listen, args=(other, line), daemon=True).start()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around what waits for other ranks: RankLost where one has ended, before or meanwhile."""
        self._check()
        try:
            yield
        except RuntimeError as error:
            if not self._known.wait(GRACE):
                raise
            self._told.set()
            raise RankLost(self._lost) from error

    def _check(self) -> None:
        if self._lost is not None:
            self._told.set()
            raise RankLost(self._lost)

    def fail(self, reason: str) -> None:
        """This rank ends, for this reason: the others shall say so."""
        self._say(f"failed {reason}")

    def close(self) -> None:
        """All goes well, and the others may end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._say("bye")
        for line in self._lines.values():
            with suppress(OSError):
                line.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + GRACE
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline - time.monotonic()))

    def _say(self, line: str, but: int = -1) -> None:
        for other, connection in self._lines.items():
            if other != but:
                with suppress(OSError):
                    connection.sendall(f"{' '.join(line.split())}\n".encode())

    def _listen(self, other: int, line: socket.socket) -> None:
        said = ""
        with suppress(OSError), line.makefile(encoding="utf-8", errors="replace") as lines:
            said = next(iter(lines), "").strip()
        word, _, rest = said.partition(" ")
        if self._closed:
            return
        if word == "bye":
            if other == 0:
                os._exit(0)  # wherever it waits: for the next step, which will not come
            return
        if word == "lost":  # of a third one, which rank 0 speaks of
            os._exit(LOST)
        self._lose(other, f"rank {other} has ended: {rest if word == 'failed' else self._why(other)}")

    def _why(self, other: int) -> str:
        child = self._children.get(other)
        if child is None:
            return "it was killed, or its machine is gone"
        with suppress(subprocess.TimeoutExpired):
            return ended_how(child.wait(GRACE))
        return "it closed its connection"

    def _lose(self, other: int, message: str) -> None:
        with self._lock:
            if self._lost is not None or self._closed:
                return
            self._lost = message
        self._known.set()
        self._say("lost", but=other)
        if not self._told.wait(GRACE):  # the main thread waits within an operation, or for somebody to say something
            if self.rank <= 1:  # of others that are left nobody, or rank 1, has lost rank 0
                print(f"error: {message}", file=sys.stderr, flush=True)
            os._exit(LOST)


def ended_how(status: int) -> str:
    """An exit status in words."""
    return f"killed by signal {-status} ({Signals(-status).name})" if status < 0 else f"exit status {status}"


def keep_alive(line: socket.socket) -> None:
    """Have the system notice within seconds that the other side's machine is gone."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # of Linux
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
