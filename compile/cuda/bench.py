"""Time of calls on a GPU with uncached weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Calls = Sequence[Callable[[], object]]
UNCACHED_BYTES = 2**28
"""Bytes of weights used in rotation: several times a GPU's caches."""


def num_weight_copies(nbytes: int, device: torch.device) -> int:
    """Return the number of weight copies in rotation; 1 on a CPU."""
    return 1 + UNCACHED_BYTES // nbytes if device.type == "cuda" else 1


def seconds_per_call(calls: Calls, *, repeats: int = 9) -> float:
    """Return the median of all calls, which are one graph on GPUs."""
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
