"""Measures on a GPU which tile is fastest for a shape of weights, and keeps it. Nothing here runs at a start:
`sharesd bench gpu --step tiles` does.

Another tile may be another order of summation, so what was measured once stays until somebody measures anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from triton.errors import TritonError

from compile.cuda import gemm_config
from compile.cuda.bench import Calls, seconds_per_call, turns
from compile.cuda.gemm import multiply
from compile.cuda.gemm_config import Tile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """Weights [outputs, inputs] of 16 or 32 bits, or codes of 8, or of 4 in groups."""

    outputs: int
    inputs: int
    bits: int = 16
    group: int = 0

    @property
    def key(self) -> str:
        """What it is called in files of tiles."""
        return gemm_config.key_of(self.outputs, self.inputs, self.bits, self.group)


def tune(
    shapes: Sequence[Shape],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: int = 1,
    measure: Callable[[Calls], float] = seconds_per_call,
) -> dict[Shape, dict[Tile, float]]:
    """Seconds per product of every tile that runs. The fastest of each shape is kept for this device, for later
    programs. `measure` returns seconds per call.
    """
    on = gemm_config.device(_index(device))
    found: dict[Shape, dict[Tile, float]] = {}
    for shape in shapes:
        products = _products(shape, device, dtype, rows)
        found[shape] = {}
        for tile in candidates(shape, on):
            calls = [partial(product, tile=tile) for product in products]
            if runs(calls[0], shape, tile):
                found[shape][tile] = measure(calls)
    gemm_config.write_tiles(gemm_config.own_file(on.name), fastest(found))
    return found


def fastest(found: Mapping[Shape, Mapping[Tile, float]]) -> dict[str, Tile]:
    """The tiles to keep, as `settings.write_tiles` takes them."""
    return {shape.key: min(times, key=times.__getitem__) for shape, times in found.items() if times}


def runs(product: Callable[[], object], shape: Shape, tile: Tile) -> bool:
    """Whether this device has what a product's tile needs; why not, is logged."""
    try:
        product()
    except (TritonError, RuntimeError) as error:  # too little shared memory, or the compiler gives up
        log.info("%s in %s cannot run: %s", shape.key, tile, str(error).strip().partition("\n")[0])
        return False
    return True


def candidates(shape: Shape, on: gemm_config.Device) -> list[Tile]:
    """The rule's tile, and neighbours of it."""
    rule = gemm_config.by_rule(shape.outputs, shape.inputs, shape.bits, shape.group, on)
    other = 64 if rule.outputs == 32 else 32
    tiles = [rule, replace(rule, outputs=other), replace(rule, stages=rule.stages - 1), replace(rule, stages=5)]
    tiles += [replace(rule, warps=8), replace(rule, outputs=128)]
    tiles += [replace(rule, split=split) for split in (1, 2, 4, 8)]
    tiles += [replace(rule, outputs=64, split=split) for split in (2, 4, 8)]
    if shape.bits != 4:
        tiles += [replace(rule, inputs=width) for width in (64, 128, 256, 512)]
    elif rule.inputs > 32:
        tiles.append(replace(rule, inputs=rule.inputs // 2))
    return list(dict.fromkeys(tiles))


def _index(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _products(shape: Shape, device: torch.device, dtype: torch.dtype, rows: int) -> list[Callable[..., Tensor]]:
    """Products, but for their tile, with different weights of a shape, of random bits."""
    columns, values = shape.inputs, {8: torch.int8, 4: torch.int16}.get(shape.bits, dtype)
    scale = None
    if shape.bits == 8:
        scale = torch.ones(shape.outputs, device=device)
    elif shape.bits == 4:
        columns = -(-shape.inputs // (4 * shape.group)) * shape.group
        scale = torch.zeros(shape.inputs // shape.group, shape.outputs, dtype=torch.int32, device=device)
    counters = torch.zeros(-(-shape.outputs // gemm_config.ROWS), dtype=torch.int32, device=device)
    x_MK = torch.randn(rows, shape.inputs, dtype=dtype, device=device)

    def weight() -> Tensor:
        if values.is_floating_point:
            return torch.randn(shape.outputs, columns, dtype=dtype, device=device)
        return torch.randint(-128, 128, (shape.outputs, columns), dtype=values, device=device)

    group = shape.group if shape.bits == 4 else 0
    copies = turns(shape.outputs * columns * values.itemsize, device)
    return [partial(multiply, x_MK, weight(), scale=scale, group=group, counters=counters) for _ in range(copies)]
