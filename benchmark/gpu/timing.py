"""Seconds on a device, and the products that are timed: of weights which no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from benchmark.studies.wide_shapes import SHAPES, Shape

EMBEDDED_SHAPE = Shape(hidden_size=576, mlp_size=1536, num_heads=9, num_kv_heads=3, num_layers=30)
HEAD_DIM, VOCAB = 64, 49_152
ROWS = (1, 2, 3, 4, 5, 8, 9, 16)
"""Rows of steps which are compared with each other; the last one is the most."""
UNCACHED_BYTES = 2**28
"""So many bytes of weights in turn: several times what caches of GPUs hold."""


def linears(size: str) -> dict[str, tuple[int, int]]:
    """(N, K) of the linears of a model of this size, `135m` or one of those that widening knows."""
    shape = EMBEDDED_SHAPE if size == "135m" else SHAPES[size]
    hidden = shape.hidden_size
    return {
        "qkv": ((shape.num_heads + 2 * shape.num_kv_heads) * HEAD_DIM, hidden),
        "o": (hidden, shape.num_heads * HEAD_DIM),
        "gate_up": (2 * shape.mlp_size, hidden),
        "down": (hidden, shape.mlp_size),
        "head": (VOCAB, hidden),
    }


def sizes(on_gpu: bool) -> dict[str, dict[str, tuple[int, int]]]:
    """Models and the linears which are measured; one tiny linear on a CPU."""
    return {size: linears(size) for size in ("135m", "1b", "7b")} if on_gpu else {"tiny": {"o": (256, 192)}}


def rows_that_differ(function: Callable[[Tensor], Tensor], x_MK: Tensor) -> list[int]:
    """Numbers of rows for which a row has not the bits that it has among all of x; 1 stands for every single row."""
    together = function(x_MK)
    rows = [m for m in ROWS if m <= len(x_MK)]
    wrong = [m for m in rows if not torch.equal(function(x_MK[:m]), together[:m])]
    alone = all(torch.equal(function(x_MK[i : i + 1]), together[i : i + 1]) for i in range(len(x_MK)))
    return wrong if alone or 1 in wrong else [1, *wrong]


def copies_of(tensor: Tensor, on_gpu: bool) -> list[Tensor]:
    """The tensor and copies of it, together more than caches hold."""
    count = -(-UNCACHED_BYTES // tensor.nbytes) if on_gpu else 1
    return [tensor, *(tensor.clone() for _ in range(count))]


def seconds_per_call(calls: Sequence[Callable[[], object]], *, repeats: int = 10) -> float:
    """The least seconds of a call among calls in a row; on a GPU they are one graph, so that launches cost little."""
    for call in calls:
        call()
    if not torch.cuda.is_initialized():
        return min(_host_seconds(calls) for _ in range(repeats)) / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return min(event_seconds(graph.replay) for _ in range(repeats)) / len(calls)


def event_seconds(function: Callable[[], object]) -> float:
    """Seconds between two events of the GPU around a call."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000


def _host_seconds(calls: Sequence[Callable[[], object]]) -> float:
    started = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - started


@cache
def copy_bandwidth(device: str) -> float:
    """Bytes that a large copy reads and writes per second; measured once by a process."""
    source = torch.ones(2**28 if device.startswith("cuda") else 2**22, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_per_call([lambda: target.copy_(source)])
