"""CUDA graphs: a function of persistent tensors is run a few times, captured, and replayed from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

WARM_CALLS = 2
"""Plain calls before the capture: libraries choose algorithms and allocate workspaces in them."""


class Replayed(Generic[T]):
    """Calls `function`; where `capture` is set, as a CUDA graph from the third call on.

    The function takes no arguments, must not synchronise, and works on tensors which stay in place. What it returns is
    overwritten by the next call.
    """

    def __init__(self, function: Callable[[], T], *, capture: bool) -> None:
        self._function, self._capture = function, capture
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: T | None = None

    def __call__(self) -> T:
        if not self._capture or self._calls < WARM_CALLS:
            self._calls += 1
            return self._function()
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._result = self._function()
            self._graph = graph
        self._graph.replay()
        assert self._result is not None
        return self._result
