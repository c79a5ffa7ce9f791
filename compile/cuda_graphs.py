"""CUDA graphs: functions of persistent tensors, captured once and replayed.

A graph runs on one device and calls no host function. A function may become several graphs, with host calls between
them (`call_between_graphs`).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch

from compile.start_times import START

log = logging.getLogger(__name__)
T = TypeVar("T")

WARM_CALLS = 1
"""Plain calls before capture, for library heuristics and compilation."""


class Graphs:
    """Captures of functions as CUDA graphs that share one pool of memory.

    A replay may overwrite all tensors of the pool, except results of the functions. Only tensors allocated outside of
    captures may be passed from graph to graph.
    """

    num_captures = 0
    """Number of captures in this process."""

    def __init__(self) -> None:
        self._pool: object | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}  # one of each device: a pool's memory is that of a stream
        self._has_warned = False
        self._failed: list[torch.cuda.CUDAGraph] = []  # of captures that failed: torch's allocator may still read them
        self.nbytes = 0
        """Bytes of the pool on all devices, without the driver's memory."""

    def capture(self, function: Callable[[], T]) -> tuple[Callable[[], object], T] | None:
        """Return a replay of the function, and its result; runs nothing.

        The result stays in place. Returns None if it cannot be captured, which is logged as a warning once. Raises
        CUDA's error if a device is lost.
        """
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        try:
            captured = self._record(function)
        except RuntimeError as error:  # of CUDA, out of memory included
            if stream is not None:  # a capture that was broken leaves its own current, perhaps on another device
                torch.cuda.set_stream(stream)
                torch.cuda.synchronize()
            log.log(
                logging.INFO if self._has_warned else logging.WARNING,
                "some steps run without CUDA graphs, which is slower: capturing failed (%s)",
                str(error).strip().partition("\n")[0],
            )
            self._has_warned = True
            return None
        Graphs.num_captures += 1
        return captured

    def _record(self, function: Callable[[], T]) -> tuple[Callable[[], object], T]:
        with START.phase("captures"), _Capture(self._graph) as capture:
            result = function()
        return capture.replay, result

    @contextmanager
    def _graph(self) -> Iterator[Callable[[], object]]:
        """Capture launches inside the context as a graph, and yield its replay."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        device, graph = torch.cuda.current_device(), torch.cuda.CUDAGraph()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # there may be no launch between two calls
            # Other threads may allocate memory at the same time.
            place = {"pool": self._pool, "stream": self._streams[device], "capture_error_mode": "thread_local"}
            try:
                with torch.cuda.graph(graph, **place):  # type: ignore[arg-type]
                    before = torch.cuda.memory_reserved(device)
                    yield graph.replay
            except BaseException:
                self._failed.append(graph)
                with suppress(RuntimeError):  # if it ended in order
                    torch._C._cuda_endAllocateToPool(device, self._pool)  # type: ignore[arg-type]
                raise
        self.nbytes += torch.cuda.memory_reserved(device) - before


class _Capture:
    """Capture in progress of a function, as a context manager."""

    def __init__(self, new_graph: Callable[[], AbstractContextManager[Callable[[], object]]]) -> None:
        self._new_graph, self._graph = new_graph, ExitStack()
        self._steps: list[Callable[[], object]] = []

    def __enter__(self) -> _Capture:
        self._begin()
        self._token = _capture.set(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _capture.reset(self._token)
        self._graph.__exit__(*error)

    def _begin(self) -> None:
        self._steps.append(self._graph.enter_context(self._new_graph()))

    def between(self, function: Callable[[], object]) -> None:
        self._graph.close()
        function()
        self._steps.append(function)
        self._begin()

    def replay(self) -> None:
        for step in self._steps:
            step()


_capture: ContextVar[_Capture | None] = ContextVar("_capture", default=None)


def call_between_graphs(function: Callable[[], object]) -> None:
    """Call a function that no graph can contain, between two graphs.

    An example is a copy to another device. Inside a capture, one graph ends before the call and another begins after
    the call, on the then current device. Each replay calls the function again, on tensors at constant addresses.
    """
    capture = _capture.get()
    if capture is None:
        function()
    else:
        capture.between(function)


class Replayed(Generic[T]):
    """Function that runs as one of `graphs` from its second call.

    It takes no arguments, must not synchronise, and works on tensors that stay in place. The next call overwrites its
    result.
    """

    def __init__(self, function: Callable[[], T], graphs: Graphs | None) -> None:
        self._function, self._graphs = function, graphs
        self._calls = 0
        self._captured: tuple[Callable[[], object], T] | None = None

    def __call__(self) -> T:
        if self._captured is None and self._graphs is not None and self._calls >= WARM_CALLS:
            self._captured = self._graphs.capture(self._function)
            if self._captured is None:
                self._graphs = None
        self._calls += 1
        if self._captured is None:
            return self._function()
        replay, result = self._captured
        replay()
        return result
