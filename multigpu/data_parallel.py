"""Data parallelism: replicas, processes that take tasks from one queue, and the devices of each.

All replicas run one function, named `module:function`, with the same settings. The function takes numbered tasks,
several at once if possible, and yields the result of each. Tasks of a failed replica are assigned to the others. Every
result is returned once.
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
"""(number of a task, the task or its result)."""
GRACE_SECONDS = 10.0
"""Time limit in seconds for the end of a replica."""


class TaskQueue(Protocol):
    """Source of tasks for a replica's function."""

    def take(self, wait: bool) -> Numbered | None:
        """Return the next task, or None if none is available.

        With `wait`, None means that no more tasks follow.
        """
        ...


class LocalTaskQueue:
    """Queue of all tasks, in a single process."""

    def __init__(self, tasks: Iterable[Numbered]) -> None:
        self._left = iter(tasks)

    def take(self, wait: bool) -> Numbered | None:
        return next(self._left, None)


@dataclass(eq=False)
class Replica:
    """Replica, as seen by the process that assigns tasks."""

    name: str
    connection: Connection
    process: BaseProcess | None = None
    """Process of the replica; None if started by another program."""
    assigned: dict[int, Any] = field(default_factory=dict)
    """Assigned tasks without result, by number."""
    ready: bool = False


class _Ready(NamedTuple):
    """Message of a replica that is ready for tasks; sent once."""


class _Exit(NamedTuple):
    """Last message of a replica."""

    reason: str
    is_bad_request: bool = False
    """True if the settings are invalid, for all replicas."""


def start(work: str, settings: Any, environments: Sequence[Mapping[str, str]]) -> list[Replica]:
    """Start a replica on this machine for each environment."""
    spawn, replicas = get_context("spawn"), []
    for number, environment in enumerate(environments, 1):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_run_replica, args=(theirs, work, pickle.dumps(settings)), daemon=True)
        with _environment(environment):  # libraries read it when they are loaded
            process.start()
        theirs.close()  # so that ours ends with the process
        replicas.append(Replica(f"replica {number} of {len(environments)}", ours, process))
    return replicas


def run_tasks(tasks: Iterable[Numbered], replicas: Sequence[Replica], *, max_assigned: int) -> Iterator[Numbered]:
    """Yield results in any order; replicas end with the iterator.

    A replica has at most `max_assigned` tasks, and at most an equal share of those left. Raises a ValueError of a
    replica's function, since all replicas have the same settings. Any other end of a replica is logged. Raises
    RuntimeError if no replica is left.
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
                    message = _Exit("")
                if isinstance(message, _Ready):
                    replica.ready = True
                elif isinstance(message, _Exit):
                    del living[connection]
                    _on_replica_exit(replica, message, living)
                    waiting.extendleft(reversed(replica.assigned.items()))
                else:
                    result = message
                    del replica.assigned[message[0]]
                    left -= 1
                for other in living.values():
                    _assign(waiting, other, min(max_assigned, -(-left // len(living))))
                if result is not None:
                    yield result
        done = True
    finally:
        _shut_down(living.values(), done)


def serve(connection: Connection, work: str, settings: Any) -> int:
    """Run the tasks of the connected process; return the exit status.

    If the connected process ends, this process ends.
    """
    try:
        for numbered in function_of(work)(settings, RemoteTaskQueue(connection)):
            connection.send(numbered)
    except Exception as error:  # of any kind: the other end reports it
        log.debug("where it happened", exc_info=True)
        text = " ".join(str(error).split())
        is_bad_request = isinstance(error, ValueError)
        connection.send(_Exit(text if is_bad_request else f"{type(error).__name__}: {text}", is_bad_request))
        return 1
    return 0


def function_of(work: str) -> Callable[..., Iterator[Numbered]]:
    """Import the function of a name `module:function`."""
    module, _, name = work.partition(":")
    found: Callable[..., Iterator[Numbered]] = getattr(importlib.import_module(module), name)
    return found


class RemoteTaskQueue:
    """Queue of tasks received from a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._ready, self._ended = connection, False, False
        self._received = queue.SimpleQueue[Numbered | None]()
        threading.Thread(target=self._receive, daemon=True).start()

    def take(self, wait: bool) -> Numbered | None:
        if not self._ready:
            with suppress(OSError):  # all was done before we were ready
                self._connection.send(_Ready())
            self._ready = True
        if self._ended:
            return None
        try:
            task = self._received.get(wait)
        except queue.Empty:
            return None
        self._ended = task is None
        return task

    def _receive(self) -> None:
        task: Numbered | None = (0, None)
        while task is not None:
            try:
                task = self._connection.recv()
            except (EOFError, OSError):
                print("error: the process that assigns the tasks has ended", file=sys.stderr, flush=True)
                os._exit(1)  # no result is needed any more
            self._received.put(task)


def _run_replica(connection: Connection, work: str, settings: bytes) -> None:
    """Main function of a replica's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    sys.exit(serve(connection, work, pickle.loads(settings)))


def _assign(waiting: deque[Numbered], replica: Replica, max_assigned: int) -> None:
    while waiting and replica.ready and len(replica.assigned) < max_assigned:
        number, task = waiting.popleft()
        replica.assigned[number] = task
        with suppress(OSError):  # it has died: its connection closes
            replica.connection.send((number, task))


def _on_replica_exit(replica: Replica, last: _Exit, living: Mapping[Connection, Replica]) -> None:
    """Log the end of a replica.

    Raises ValueError for invalid settings, and RuntimeError if no replica is left.
    """
    replica.connection.close()
    if last.is_bad_request:
        raise ValueError(last.reason)
    how = last.reason or _status(replica.process)
    if replica.process is not None:
        replica.process.kill()
    assigned = ", ".join(map(str, sorted(replica.assigned))) or "none"
    if not living:
        raise RuntimeError(
            f"no replica is left: {replica.name} ended ({how}) while working on tasks {assigned} (counted from 0), "
            "after all others; results so far are kept, and the same command resumes"
        )
    log.warning("%s ended (%s); its tasks are reassigned to the others: %s", replica.name, how, assigned)


def _status(process: BaseProcess | None) -> str:
    if process is None:
        return "its connection was closed"
    process.join(GRACE_SECONDS)
    code = process.exitcode
    if code is None:
        return "its connection was closed"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def _shut_down(replicas: Iterable[Replica], done: bool) -> None:
    """End all replicas: if `done` by a message, else by a kill.

    Replicas started by another program end when their connection is closed.
    """
    replicas = list(replicas)
    for replica in replicas:
        with suppress(OSError):
            if done:
                replica.connection.send(None)
            if replica.process is not None and not (done and replica.ready):
                replica.process.kill()
    for replica in replicas:
        if replica.process is not None:
            replica.process.join(GRACE_SECONDS)
            replica.process.kill()
            replica.process.join()
        replica.connection.close()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, for started processes."""
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


def environments(count: int, device: str) -> list[dict[str, str]]:
    """Return the environments of `count` replicas: a GPU and cores each.

    `device` is cpu, cuda, or auto: cuda if available. Raises ValueError if there are fewer GPUs than replicas, or if
    `device` names one GPU for several replicas.
    """
    if count < 1:
        raise ValueError(f"--replicas is {count}; it must be at least 1")
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // count))
    found = [{"OMP_NUM_THREADS": threads} for _ in range(count)]
    if device not in ("auto", "cuda", "cpu"):
        if count > 1:
            raise ValueError(
                f"--device is {device} and --replicas {count}, which need a GPU each; give cuda, or select GPUs "
                "with CUDA_VISIBLE_DEVICES"
            )
        return found
    gpus = visible_gpus(device)
    if gpus and len(gpus) < count:
        raise ValueError(f"--replicas is {count} and there are {len(gpus)} GPUs; use one per GPU, or --device cpu")
    return [variables | gpu_environment(gpus, number) for number, variables in enumerate(found)]


def gpu_environment(gpus: Sequence[str], number: int) -> dict[str, str]:
    """Return the environment with this GPU only; empty without GPUs."""
    return {"CUDA_VISIBLE_DEVICES": gpus[number]} if gpus else {}


def visible_gpus(device: str) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES names of usable GPUs; empty for cpu."""
    if device == "cpu":
        return []
    import torch  # which takes seconds

    given, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    return [name.strip() for name in given.split(",")][:count] if given else list(map(str, range(count)))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
