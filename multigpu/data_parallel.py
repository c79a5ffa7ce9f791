"""Replicas: processes that take tasks from one queue until all are done.

What a replica does is a function, named `module:function`, that each of them calls with the same settings. It takes
numbered tasks, several at once if it likes, and yields the result of each. Whatever a dead replica held goes to the
others, and every result is handed out once.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol

log = logging.getLogger(__name__)

Numbered = tuple[int, Any]
"""The number of a task, and the task or its result."""
GRACE_S = 10.0
"""How long a replica that has nothing left to do, or says that it ends, may take to end."""


class Tasks(Protocol):
    """Where work comes from: what a replica's function gets, besides its settings."""

    def take(self, wait: bool) -> Numbered | None:
        """The next task. None: there is none at the moment, or, with `wait`, there will be none any more."""
        ...


class OwnTasks:
    """Tasks of a process that does all of them itself."""

    def __init__(self, tasks: Iterable[Numbered]) -> None:
        self._left = iter(tasks)

    def take(self, wait: bool) -> Numbered | None:
        return next(self._left, None)


@dataclass(eq=False)
class Replica:
    """A replica, as the process that hands out the tasks sees it."""

    name: str
    connection: Connection
    process: BaseProcess | None = None
    """None where somebody else has started it."""
    held: dict[int, Any] = field(default_factory=dict)
    """Tasks that it has not answered yet, by number."""
    ready: bool = False


class _Ready(NamedTuple):
    """Said once: what comes before tasks (loading a model, say) is done."""


class _Ended(NamedTuple):
    """The last words of a replica."""

    reason: str
    mistake: bool = False
    """It refused its settings, as all others would."""


def start(work: str, settings: Any, environments: Sequence[Mapping[str, str]]) -> list[Replica]:
    """Processes on this machine, one with each of these variables in its environment, besides our own."""
    spawn, replicas = get_context("spawn"), []
    for number, environment in enumerate(environments, 1):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_begin, args=(theirs, work, pickle.dumps(settings)), daemon=True)
        with _environment(environment):  # libraries read it when they are loaded
            process.start()
        theirs.close()  # so that ours ends with the process
        replicas.append(Replica(f"replica {number} of {len(environments)}", ours, process))
    return replicas


def spread(tasks: Iterable[Numbered], replicas: Sequence[Replica], *, at_once: int) -> Iterator[Numbered]:
    """Results as they come, in any order. A replica holds `at_once` tasks at most, and no more than its fair part.

    ValueError, with its text, where a replica's function raises one: it would elsewhere, too. A replica that ends in
    any other way is told in the log; RuntimeError where none is left. The replicas end with the iterator.
    """
    waiting, living = deque(tasks), {replica.connection: replica for replica in replicas}
    left, done = len(waiting), False
    try:
        while left:
            for connection in wait(list(living)):
                assert isinstance(connection, Connection)
                replica, result = living[connection], None
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    message = _Ended("")
                if isinstance(message, _Ready):
                    replica.ready = True
                elif isinstance(message, _Ended):
                    del living[connection]
                    _bury(replica, message, living)
                    waiting.extendleft(reversed(replica.held.items()))
                else:
                    result = message
                    del replica.held[message[0]]
                    left -= 1
                for other in living.values():
                    _hand_out(waiting, other, min(at_once, -(-left // len(living))))
                if result is not None:
                    yield result
        done = True
    finally:
        _end(living.values(), done)


def serve(connection: Connection, work: str, settings: Any) -> int:
    """Do this work for whoever is at the other end; returns the exit status. Ends the process if that one dies."""
    try:
        for numbered in function_of(work)(settings, _SharedTasks(connection)):
            connection.send(numbered)
    except Exception as error:  # of any kind: the other end is told, and says it
        log.debug("where it happened", exc_info=True)
        text = " ".join(str(error).split())
        mistake = isinstance(error, ValueError)
        connection.send(_Ended(text if mistake else f"{type(error).__name__}: {text}", mistake))
        return 1
    return 0


def function_of(work: str) -> Callable[..., Iterator[Numbered]]:
    """The function of a name `module:function`."""
    module, _, name = work.partition(":")
    return getattr(importlib.import_module(module), name)


class _SharedTasks:
    """Tasks from the other end of a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._ready, self._ended = connection, False, False
        self._came = queue.SimpleQueue[Numbered | None]()
        threading.Thread(target=self._listen, daemon=True).start()

    def take(self, wait: bool) -> Numbered | None:
        if not self._ready:
            with suppress(OSError):  # all was done before we were ready
                self._connection.send(_Ready())
            self._ready = True
        if self._ended:
            return None
        try:
            task = self._came.get(wait)
        except queue.Empty:
            return None
        self._ended = task is None
        return task

    def _listen(self) -> None:
        task: Numbered | None = (0, None)
        while task is not None:
            try:
                task = self._connection.recv()
            except (EOFError, OSError):
                print("error: the process that hands out the tasks is gone", file=sys.stderr, flush=True)
                os._exit(1)  # whatever is being computed, nobody wants it
            self._came.put(task)


def _begin(connection: Connection, work: str, settings: bytes) -> None:
    """A replica's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us
    sys.exit(serve(connection, work, pickle.loads(settings)))


def _hand_out(waiting: deque[Numbered], replica: Replica, most: int) -> None:
    while waiting and replica.ready and len(replica.held) < most:
        number, task = waiting.popleft()
        replica.held[number] = task
        with suppress(OSError):  # it has died, and the connection will say so
            replica.connection.send((number, task))


def _bury(replica: Replica, last: _Ended, living: Mapping[Connection, Replica]) -> None:
    """Say how a replica ended; raises where nobody can go on."""
    replica.connection.close()
    if last.mistake:
        raise ValueError(last.reason)
    how = last.reason or _status(replica.process)
    if replica.process is not None:
        replica.process.kill()
    held = ", ".join(map(str, sorted(replica.held))) or "none"
    if not living:
        raise RuntimeError(
            f"no replica is left: {replica.name} ended ({how}) while it held tasks {held} (counted from 0), and all "
            "others before; results so far are kept, and the same command goes on"
        )
    log.warning("%s ended (%s); tasks that it held go to the others: %s", replica.name, how, held)


def _status(process: BaseProcess | None) -> str:
    if process is None:
        return "its connection is gone"
    process.join(GRACE_S)
    code = process.exitcode
    if code is None:
        return "its connection is gone"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def _end(replicas: Iterable[Replica], done: bool) -> None:
    """Let them end where all is `done`. Else, and where they are still loading, kill those that are ours; the others
    hear that nobody is there."""
    replicas = list(replicas)
    for replica in replicas:
        with suppress(OSError):
            if done:
                replica.connection.send(None)
            if replica.process is not None and not (done and replica.ready):
                replica.process.kill()
    for replica in replicas:
        if replica.process is not None:
            replica.process.join(GRACE_S)
            replica.process.kill()
            replica.process.join()
        replica.connection.close()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that processes started meanwhile have."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
