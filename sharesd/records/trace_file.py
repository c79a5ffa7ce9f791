"""File of traces, JSON Lines (`--trace FILE`), and its readers.

It is written about once a second by a separate thread; until then, rounds are kept in memory.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

from multigpu.journal import lock, read_records, with_fields
from sharesd.records.trace import RoundTrace

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the format, which changes with names and meanings."""
FLAG = "--trace"
PERIOD_S = 1.0
"""Seconds between two writes."""


class TraceFile:
    """Writer of one file, to which each start appends."""

    def __init__(self, path: Path, *, modes: Sequence[str], **start: Any) -> None:
        """Open the file and write a line of the start.

        Raises ValueError if the file cannot be written, is not a trace, or is in use by another process.
        """
        self.path, self._waiting, self._numbers = path, deque[RoundTrace | dict[str, Any]](), count()
        self._mutex, self._is_closing, self._failed = Lock(), Event(), False
        try:
            self._file = path.open("ab", buffering=0)
            lock(self._file, path, fcntl.LOCK_EX, FLAG)
            check_trace(path)
            begun = datetime.now().astimezone().isoformat(timespec="seconds")
            self._write([{"event": "start", "format": FORMAT, "time": begun, "modes": list(modes), **start}])
        except OSError as error:
            remedy = "free some space there, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise ValueError(f"trace {path} cannot be written ({error.strerror}); {remedy}name another file") from error
        self._thread = Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, found: RoundTrace | dict[str, Any]) -> None:
        """Queue a round, or another line, to be written."""
        self._waiting.append(found)

    def flush(self) -> None:
        """Write queued lines; an error is logged and ends the trace."""
        with self._mutex:
            lines = []
            while self._waiting:
                lines.append(_line(self._waiting.popleft(), self._numbers))
                time.sleep(0)  # rounds need the interpreter's lock, too
            if not lines or self._failed:
                return
            try:
                self._write(lines)
            except OSError as error:
                self._failed = True
                log.warning("the trace %s ends here (%s); decoding continues", self.path, error.strerror)

    def close(self) -> None:
        """Write what is queued and close the file. May be called twice."""
        atexit.unregister(self.close)
        if not self._is_closing.is_set():
            self._is_closing.set()
            self._thread.join()
            self._file.close()

    def _run(self) -> None:
        while not self._is_closing.wait(PERIOD_S):
            self.flush()
        self.flush()

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        while data:
            data = data[self._file.write(data) :]


def _line(found: RoundTrace | dict[str, Any], numbers: Iterator[int]) -> dict[str, Any]:
    return {"event": "round", "round": next(numbers), **found.to_dict()} if isinstance(found, RoundTrace) else found


def check_trace(path: Path) -> None:
    """Raise ValueError for other files; remove an incomplete last line."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        first = file.readline()
        try:
            found = json.loads(first)
            version = found["format"] if found["event"] == "start" else None
        except (ValueError, LookupError, TypeError, RecursionError):
            version = None
        if version != FORMAT:
            why = "is not a trace" if version is None else f"has format {version!r}, and this version writes {FORMAT}"
            raise ValueError(f"trace {path} {why}; name another file")
        file.seek(0)
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def read_trace(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all lines; raise ValueError for a wrong one."""
    for _, record in read_records(path, FLAG, with_fields("event")):
        yield record


class TracedRequest(NamedTuple):
    """A request of a trace and its rounds."""

    mode: str
    label: dict[str, Any]
    emitted: list[int]
    """All tokens of the answer."""
    rounds: list[dict[str, Any]]
    """Fields of each round, and of its row for this request."""


def requests_of(path: Path) -> Iterator[TracedRequest]:
    """Yield the requests of a file in order of their prefill."""
    found: dict[tuple[int, int], TracedRequest] = {}
    starts = 0
    for line in read_trace(path):
        starts += line["event"] == "start"
        if line["event"] == "request":
            request = TracedRequest(line["mode"], line["label"], list(line["emitted"]), [])
            found[starts, line["request"]] = request
        for row in line.get("rows", ()):
            if (request := found.get((starts, row["request"]))) is not None:  # type: ignore[assignment]
                request.emitted.extend(row["emitted"])
                request.rounds.append({**line, **row})
    yield from found.values()
