"""The products that are timed, whether their rows agree, and the bandwidth that they are held against."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from benchmark.studies.wide_shapes import SHAPES, Shape
from compile.cuda.bench import seconds_per_call, turns

EMBEDDED_SHAPE = Shape(hidden_size=576, mlp_size=1536, num_heads=9, num_kv_heads=3, num_layers=30)
HEAD_DIM, VOCAB = 64, 49_152
ROWS = (1, 2, 3, 4, 5, 8, 9, 16)
"""Rows of steps which are compared with each other; the last one is the most."""


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


def listed(rows: list[int]) -> str:
    """As tables of the report have it."""
    return " ".join(map(str, rows)) or "none"


def copies_of(tensor: Tensor) -> list[Tensor]:
    """The tensor and copies of it, together more than caches hold."""
    return [tensor, *(tensor.clone() for _ in range(turns(tensor.nbytes, tensor.device) - 1))]


@cache
def copy_bandwidth(device: str) -> float:
    """Bytes that a large copy reads and writes per second; measured once by a process."""
    source = torch.ones(2**28 if device.startswith("cuda") else 2**22, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_per_call([lambda: target.copy_(source)])
