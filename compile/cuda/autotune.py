"""Measurement of the fastest tile for a shape of weights.

It runs in `sharesd bench gpu --step tiles` only, not at start: another tile may have another order of summation.
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
from compile.cuda.bench import Calls, num_weight_copies, seconds_per_call
from compile.cuda.gemm import multiply
from compile.cuda.gemm_config import Tile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightShape:
    """Weights [outputs, inputs] of 32, 16, 8 or 4 bits.

    Those of 4 bits are in groups.
    """

    outputs: int
    inputs: int
    bits: int = 16
    group: int = 0

    @property
    def key(self) -> str:
        """Name of the shape in files of tiles."""
        return gemm_config.key_of(self.outputs, self.inputs, self.bits, self.group)


def tune(
    shapes: Sequence[WeightShape],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: int = 1,
    measure: Callable[[Calls], float] = seconds_per_call,
) -> dict[WeightShape, dict[Tile, float]]:
    """Return seconds per product of every tile, and save the fastest.

    `measure` returns seconds per call. Tiles are saved for this device.
    """
    on = gemm_config.device(_index(device))
    found: dict[WeightShape, dict[Tile, float]] = {}
    for shape in shapes:
        products = _products(shape, device, dtype, rows)
        found[shape] = {}
        for tile in candidates(shape, on):
            calls = [partial(product, tile=tile) for product in products]
            if runs(calls[0], shape, tile):
                found[shape][tile] = measure(calls)
    gemm_config.write_tiles(gemm_config.own_file(on.name), fastest(found))
    return found


def fastest(found: Mapping[WeightShape, Mapping[Tile, float]]) -> dict[str, Tile]:
    """Return the fastest tiles, for `write_tiles`."""
    return {shape.key: min(times, key=times.__getitem__) for shape, times in found.items() if times}


def runs(product: Callable[[], object], shape: WeightShape, tile: Tile) -> bool:
    """Return True if this device supports a tile; else log the reason."""
    try:
        product()
    except (TritonError, RuntimeError) as error:  # too little shared memory, or the compiler gives up
        log.info("%s in %s cannot run: %s", shape.key, tile, str(error).strip().partition("\n")[0])
        return False
    return True


def candidates(shape: WeightShape, on: gemm_config.Device) -> list[Tile]:
    """Return the rule's tile and neighbouring tiles."""
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


def _products(shape: WeightShape, device: torch.device, dtype: torch.dtype, rows: int) -> list[Callable[..., Tensor]]:
    """Return functions of a tile: products with different random weights."""
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
    copies = num_weight_copies(shape.outputs * columns * values.itemsize, device)
    return [partial(multiply, x_MK, weight(), scale=scale, group=group, counters=counters) for _ in range(copies)]
