"""Measures on a GPU which tile is fastest for a shape of weights, and keeps it. Nothing here runs at a start.

Another tile may be another order of summation, so what was measured once stays until somebody measures anew.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from compile.cuda import settings
from compile.cuda.gemm import fits, multiply
from compile.cuda.settings import Tile

Calls = Sequence[Callable[[], object]]
_COLD_BYTES = 2**28
"""Weights that take turns, so that the second level of cache holds none of them when its turn comes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Weights [outputs, inputs] of 16 or 32 bits, or codes of 8, or of 4 in groups."""

    outputs: int
    inputs: int
    bits: int = 16
    group: int = 0


def tune(
    shapes: Sequence[Shape],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: int = 1,
    measure: Callable[[Calls], float] | None = None,
) -> dict[Shape, dict[Tile, float]]:
    """Seconds per product of every tile tried. The fastest of each shape is kept for this device, for later programs.

    `measure` returns seconds per call (default: `seconds_per_call`).
    """
    index = None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    on = settings.device(index)
    found: dict[Shape, dict[Tile, float]] = {}
    for shape in shapes:
        products = _products(shape, device, dtype, rows)
        found[shape] = {}
        for tile in candidates(shape, on):
            calls = [partial(product, tile=tile) for product in products]
            if fits(calls[0]):
                found[shape][tile] = (measure or seconds_per_call)(calls)
    best = {_key(shape): min(times, key=times.__getitem__) for shape, times in found.items() if times}
    settings.write_tiles(settings.own_file(on.name), best)
    return found


def candidates(shape: Shape, on: settings.Device) -> list[Tile]:
    """The rule's tile, and neighbours of it."""
    rule = settings.by_rule(shape.outputs, shape.inputs, shape.bits, shape.group, on)
    other = 64 if rule.outputs == 32 else 32
    tiles = [rule, replace(rule, outputs=other), replace(rule, stages=rule.stages - 1), replace(rule, stages=5)]
    tiles += [replace(rule, warps=8), replace(rule, split=2 * rule.split), replace(rule, outputs=other, split=2)]
    if shape.bits != 4:
        tiles += [replace(rule, inputs=width) for width in (64, 128, 256, 512)]
    elif rule.inputs > 32:
        tiles.append(replace(rule, inputs=rule.inputs // 2))
    return list(dict.fromkeys(tiles))


def _key(shape: Shape) -> str:
    return settings.key_of(shape.outputs, shape.inputs, shape.bits, shape.group)


def _products(shape: Shape, device: torch.device, dtype: torch.dtype, rows: int) -> list[Callable[..., Tensor]]:
    """Products, but for their tile, with different weights of a shape, of random bits."""
    columns, values = shape.inputs, {8: torch.int8, 4: torch.int16}.get(shape.bits, dtype)
    scale = None
    if shape.bits == 8:
        scale = torch.ones(shape.outputs, device=device)
    elif shape.bits == 4:
        columns = -(-shape.inputs // (4 * shape.group)) * shape.group
        scale = torch.zeros(shape.inputs // shape.group, shape.outputs, dtype=torch.int32, device=device)
    copies = max(1, _COLD_BYTES // (shape.outputs * columns * values.itemsize)) if device.type == "cuda" else 1
    counters = torch.zeros(-(-shape.outputs // settings.ROWS), dtype=torch.int32, device=device)
    x_MK = torch.randn(rows, shape.inputs, dtype=dtype, device=device)

    def weight() -> Tensor:
        if values.is_floating_point:
            return torch.randn(shape.outputs, columns, dtype=dtype, device=device)
        return torch.randint(-128, 128, (shape.outputs, columns), dtype=values, device=device)

    group = shape.group if shape.bits == 4 else 0
    return [partial(multiply, x_MK, weight(), scale=scale, group=group, counters=counters) for _ in range(copies)]


def seconds_per_call(calls: Calls, repeats: int = 7) -> float:
    """Median over replays of one graph that makes all calls in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / len(calls))
    return statistics.median(times)
