"""`python -m benchmark.peers.worker MODULE`: one runtime in a process of its own.

Lines of JSON in both directions: first the settings, then requests; an answer for each. It ends with its input.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any, TextIO

from benchmark.peers.protocol import Batch, Peer, Settings


def serve(open_peer: Callable[[Settings], Peer], requests: Iterable[str], replies: TextIO) -> None:
    """Answer every line of `requests`: `{"ok": true}`, a sample, or `{"error": why}`."""

    def reply(make: Callable[[], dict[str, Any]]) -> None:
        try:
            message = make()
        except Exception as error:  # whatever a foreign runtime raises becomes its row of the table
            message = {"error": _describe(error)}
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    session: _Session | None = None

    def begin(line: str) -> dict[str, Any]:
        nonlocal session
        session = _Session(open_peer(Settings.from_json(json.loads(line))))
        return {"ok": True}

    def answer(line: str) -> dict[str, Any]:
        assert session is not None, "a request came before the settings were taken"
        return session.answer(**json.loads(line))

    lines = iter(requests)
    reply(partial(begin, next(lines)))
    for line in lines:
        reply(partial(answer, line))


class _Session:
    """A runtime, and which of its variants have been prepared and warmed up."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._warm: set[str] = set()

    def answer(self, do: str, variant: str, batch: Batch) -> dict[str, Any]:
        """`prepare` warms a variant up with the batch; `measure` does so where it was not done, and measures."""
        if variant not in self._warm:
            self._peer.prepare(variant)
            self._peer.generate(variant, batch)
            self._warm.add(variant)
        return {"ok": True} if do == "prepare" else {"sample": asdict(self._peer.generate(variant, batch))}


def _describe(error: Exception) -> str:
    """One line of at most 300 characters; for ValueError, which is written for readers, without its name."""
    text = " ".join(str(error).split())
    name = "" if isinstance(error, ValueError) and text else f"{type(error).__name__}: "
    return f"{name}{text}"[:300]


def main() -> None:
    """Serve on stdin and stdout; whatever libraries print goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes our input
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(importlib.import_module(sys.argv[1]).open_peer, sys.stdin, replies)


if __name__ == "__main__":
    main()
