"""CUDA graphs: a function of persistent tensors is run a few times, captured, and replayed from then on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

log = logging.getLogger(__name__)
T = TypeVar("T")

WARM_CALLS = 2
"""Plain calls before the capture: libraries choose algorithms and allocate workspaces in them."""


class Graphs:
    """Captures functions as CUDA graphs, which share one pool of memory.

    A replay may overwrite whatever any graph of the pool has made, but for what the functions returned: nothing else
    passes from graph to graph, unless it lies in tensors made outside of captures.
    """

    num_captures = 0
    """By all of this process."""

    def __init__(self) -> None:
        self._pool: object | None = None
        self._failed = False

    def capture(self, function: Callable[[], T]) -> tuple[Callable[[], object], T] | None:
        """How to replay the function, and its result, which lies where it lies. Runs nothing.

        None where it cannot be captured, which is reported once: nothing is captured from then on.
        """
        if self._failed:
            return None
        try:
            captured = self._record(function)
        except RuntimeError as error:  # of CUDA, out of memory included
            self._failed = True
            log.warning("steps run without CUDA graphs, which is slower: capturing failed (%s)", error)
            return None
        Graphs.num_captures += 1
        return captured

    def _record(self, function: Callable[[], T]) -> tuple[Callable[[], object], T]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):  # type: ignore[arg-type]
            result = function()
        return graph.replay, result


class Replayed(Generic[T]):
    """Calls `function`; where there are `graphs`, as one of them from the third call on.

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
