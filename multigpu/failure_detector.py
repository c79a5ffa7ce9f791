"""Detection of ended ranks: a connection from each rank to rank 0.

Collectives do not detect an ended rank: gloo reports a closed connection without the rank, and NCCL waits forever.
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

JOIN_SECONDS = 120.0
"""Time limit in seconds for all processes to join."""
GRACE_SECONDS = 3.0
"""Seconds for the main thread to detect an ended rank."""
KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 2}
"""Probes of idle connections: seconds before, seconds between, number."""
EXIT_RANK_LOST = 3
"""Exit status of a process that ends because another rank has ended."""


class RankLost(RuntimeError):
    """Another rank has ended; the message has rank and reason."""


class FailureDetector:
    """Failure detector of one process of a group."""

    def __init__(
        self, rank: int, lines: Mapping[int, socket.socket], children: Mapping[int, subprocess.Popen[bytes]]
    ) -> None:
        """Start to monitor the connections.

        `lines`: on rank 0 connections to all ranks, on others to rank 0. `children`: ranks started by this process.
        """
        self.rank, self._connections, self._children = rank, dict(lines), dict(children)
        self._lost: str | None = None
        self._has_lost_rank, self._has_raised = Event(), Event()  # a rank has ended; the main thread has raised that
        self._lock, self._closed = Lock(), False
        for other, line in self._connections.items():
            Thread(target=self._receive, args=(other, line), daemon=True).start()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise RankLost if another rank ends before or during the block."""
        self._check()
        try:
            yield
        except RuntimeError as error:
            if not self._has_lost_rank.wait(GRACE_SECONDS):
                raise
            self._has_raised.set()
            raise RankLost(self._lost) from error

    def _check(self) -> None:
        if self._lost is not None:
            self._has_raised.set()
            raise RankLost(self._lost)

    def fail(self, reason: str) -> None:
        """Report the end of this rank, with the reason, to other ranks."""
        self._send(f"failed {reason}")

    def close(self) -> None:
        """End monitoring; from now on, ended ranks are not errors."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._send("bye")
        for line in self._connections.values():
            with suppress(OSError):
                line.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + GRACE_SECONDS
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline - time.monotonic()))

    def _send(self, line: str, but: int = -1) -> None:
        for other, connection in self._connections.items():
            if other != but:
                with suppress(OSError):
                    connection.sendall(f"{' '.join(line.split())}\n".encode())

    def _receive(self, other: int, line: socket.socket) -> None:
        received = ""
        with suppress(OSError), line.makefile(encoding="utf-8", errors="replace") as lines:
            received = next(iter(lines), "").strip()
        word, _, rest = received.partition(" ")
        if self._closed:
            return
        if word == "bye":
            if other == 0:
                os._exit(0)  # it waits for a step that will not come
            return
        if word == "lost":  # of a third rank, reported by rank 0
            os._exit(EXIT_RANK_LOST)
        self._on_rank_lost(other, f"rank {other} has ended: {rest if word == 'failed' else self._describe_end(other)}")

    def _describe_end(self, other: int) -> str:
        child = self._children.get(other)
        if child is None:
            return "it was killed, or its machine is gone"
        with suppress(subprocess.TimeoutExpired):
            return describe_exit(child.wait(GRACE_SECONDS))
        return "it closed its connection"

    def _on_rank_lost(self, other: int, message: str) -> None:
        with self._lock:
            if self._lost is not None or self._closed:
                return
            self._lost = message
        self._has_lost_rank.set()
        self._send("lost", but=other)
        if not self._has_raised.wait(GRACE_SECONDS):  # the main thread waits within an operation
            if self.rank <= 1:  # one message: rank 0's, or rank 1's if rank 0 is lost
                print(f"error: {message}", file=sys.stderr, flush=True)
            os._exit(EXIT_RANK_LOST)


def describe_exit(status: int) -> str:
    """Return a description of an exit status."""
    return f"killed by signal {-status} ({Signals(-status).name})" if status < 0 else f"exit status {status}"


def keep_alive(line: socket.socket) -> None:
    """Enable keepalive probes, which detect a lost machine within seconds."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # of Linux
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
