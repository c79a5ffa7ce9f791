"""Seconds of calls on a GPU, and how many weights take turns so that no cache holds one when its turn comes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Calls = Sequence[Callable[[], object]]
UNCACHED_BYTES = 2**28
"""So many bytes of weights in turn: several times what caches of GPUs hold."""


def turns(nbytes: int, device: torch.device) -> int:
    """How many weights of this size to measure with; one on a CPU, where measuring is tried out."""
    return 1 + UNCACHED_BYTES // nbytes if device.type == "cuda" else 1


def seconds_per_call(calls: Calls, *, repeats: int = 9) -> float:
    """Median over repeats of all calls in turn; on a GPU they are one graph, so that launches cost little."""
    for call in calls:
        call()
    if not torch.cuda.is_initialized():
        return statistics.median(_host_seconds(calls) for _ in range(repeats)) / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()  # the first one brings the graph to the device
    return statistics.median(_device_seconds(graph.replay) for _ in range(repeats)) / len(calls)


def _device_seconds(function: Callable[[], object]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000


def _host_seconds(calls: Calls) -> float:
    started = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - started
