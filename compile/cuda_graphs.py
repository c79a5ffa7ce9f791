"""CUDA graphs: a function of persistent tensors is run a few times, captured, and replayed from then on.

A graph is of one device and calls nothing on the host. So a function may become several, with calls between them
(`between_graphs`).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch

log = logging.getLogger(__name__)
T = TypeVar("T")

WARM_CALLS = 1
"""Plain calls before the capture: forms are compiled and libraries choose algorithms there."""


class Graphs:
    """Captures functions as CUDA graphs, which share one pool of memory.

    A replay may overwrite whatever any graph of the pool has made, but for what the functions returned: nothing else
    passes from graph to graph, unless it lies in tensors made outside of captures.
    """

    num_captures = 0
    """By all of this process."""

    def __init__(self) -> None:
        self._pool: object | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}  # of each device one: a pool's memory is that of a stream
        self._said = False
        self._dead: list[torch.cuda.CUDAGraph] = []  # of captures that failed: torch's allocator may look at them
        self.nbytes = 0
        """Memory that the pool has taken, on all devices; what a graph needs for itself, the driver has besides."""

    def capture(self, function: Callable[[], T]) -> tuple[Callable[[], object], T] | None:
        """How to replay the function, and its result, which lies where it lies. Runs nothing.

        None where it cannot be captured, which is reported once for all. Raises what CUDA says where a device is lost.
        """
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        try:
            captured = self._record(function)
        except RuntimeError as error:  # of CUDA, out of memory included
            if stream is not None:  # a capture that was broken leaves its own current, perhaps on another device
                torch.cuda.set_stream(stream)
                torch.cuda.synchronize()
            log.log(
                logging.INFO if self._said else logging.WARNING,
                "some steps run without CUDA graphs, which is slower: capturing failed (%s)",
                str(error).strip().partition("\n")[0],
            )
            self._said = True
            return None
        Graphs.num_captures += 1
        return captured

    def _record(self, function: Callable[[], T]) -> tuple[Callable[[], object], T]:
        with _Capture(self._graph) as capture:
            result = function()
        return capture.replay, result

    @contextmanager
    def _graph(self) -> Iterator[Callable[[], object]]:
        """What is launched within, on the device that is current, becomes a graph: how to replay it."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        device, graph = torch.cuda.current_device(), torch.cuda.CUDAGraph()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # nothing may lie between two calls
            # Other threads may take memory meanwhile.
            place = {"pool": self._pool, "stream": self._streams[device], "capture_error_mode": "thread_local"}
            try:
                with torch.cuda.graph(graph, **place):  # type: ignore[arg-type]
                    before = torch.cuda.memory_reserved(device)
                    yield graph.replay
            except BaseException:
                self._dead.append(graph)
                with suppress(RuntimeError):  # where it ended in order
                    torch._C._cuda_endAllocateToPool(device, self._pool)  # type: ignore[arg-type]
                raise
        self.nbytes += torch.cuda.memory_reserved(device) - before


class _Capture:
    """A function on its way into graphs, while it is entered."""

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


def between_graphs(function: Callable[[], object]) -> None:
    """Call a function that no graph may have in it, like copies to another device, or going on to launch there.

    Within a capture one graph ends before it, and another begins behind it, on the device that is current then. Each
    replay calls it there again, so it works on tensors that stay in place.
    """
    capture = _capture.get()
    if capture is None:
        function()
    else:
        capture.between(function)


class Replayed(Generic[T]):
    """Calls `function`; where there are `graphs`, as one of them from the second call on.

    The function takes no arguments, must not synchronise, and works on tensors which stay in place. What it returns is
    overwritten by the next call.
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


@contextmanager
def no_captures() -> Iterator[None]:
    """RuntimeError if anything is captured within. Use it after warm-up, whatever the prompts and lengths."""
    before = Graphs.num_captures
    yield
    new = Graphs.num_captures - before
    if new:
        raise RuntimeError(f"{new} CUDA graphs were captured after warm-up")
