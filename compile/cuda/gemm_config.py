"""Tiles of matrix products, measured per device and shape or by rule.

Tile and split determine the order of summation. They depend on device and weights only, not on the number of rows.
Another tile may result in another text. Imports no Triton.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import torch

from sharesd_files import atomic_write, cache_root

ROWS = 16
"""Rows of a tile: the fewest columns of a second operand."""
SHIPPED = Path(__file__).parent / "measured"


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes into which a product is divided."""

    outputs: int
    """Rows of the weights that a program multiplies."""
    inputs: int
    """Columns of the weights per step; four inputs each with 4 bits."""
    split: int
    """Parts of K, with a program each."""
    stages: int
    """Steps in flight, the current one included. No influence on bits."""
    warps: int


@dataclass(frozen=True, slots=True)
class Device:
    """Properties of a GPU used by the rule."""

    name: str
    processors: int
    shared: int
    """Maximum bytes of shared memory of a program."""


WGMMA_SHARED = 200 * 1024
"""Minimum bytes of shared memory for products of 64 rows."""
_TALL = 2048
"""Fewest outputs of shapes that were measured."""
INTERPRETER = Device("interpreter", 132, 227 * 1024)


@cache
def device(index: int | None) -> Device:
    """Properties of a CUDA device, or of Triton's interpreter if None."""
    if index is None:
        return INTERPRETER
    found = torch.cuda.get_device_properties(index)
    own = 1024  # of each processor's shared memory, what the system keeps
    return Device(found.name, found.multi_processor_count, found.shared_memory_per_multiprocessor - own)


@cache
def tile_of(index: int | None, outputs: int, inputs: int, bits: int, group: int = 0) -> Tile:
    """Return the tile for weights [outputs, inputs] of `bits` bits."""
    measured = _measured(index)
    found = measured.get(key_of(outputs, inputs, bits, group)) or _neighbour(measured, outputs, inputs, bits, group)
    return found or by_rule(outputs, inputs, bits, group, device(index))


def _neighbour(measured: dict[str, Tile], outputs: int, inputs: int, bits: int, group: int) -> Tile | None:
    """Return the measured tile of the nearest shape, within a fifth."""
    distances = []
    for key, tile in measured.items():
        n, k, b, g = map(int, re.findall(r"\d+", f"{key}g0")[:4])
        farthest = max(outputs / n, n / outputs, inputs / k, k / inputs)
        if (b, g) == (bits, group) and farthest <= 1.2:
            distances.append((farthest, key, tile))
    return min(distances, default=(0.0, "", None))[2]


def key_of(outputs: int, inputs: int, bits: int, group: int = 0) -> str:
    """Return the name of a shape in the files of tiles."""
    return f"{outputs}x{inputs}x{bits}" + (f"g{group}" if group else "")


def by_rule(outputs: int, inputs: int, bits: int, group: int, on: Device) -> Tile:
    """Choose bytes in flight for the bandwidth, and few instructions per byte.

    Products of the matrix units are 16 rows high, and a program has four warps: with 4 bits, 64 rows give each its own.
    Arithmetic of low bits needs three programs on two processors; 16 bits need fewer.
    """
    if on.shared >= WGMMA_SHARED and outputs >= _TALL and bits in (4, 16):
        found = _for_wgmma(outputs, inputs, bits, group, on.processors)
        if found is not None:
            return found
    is_quantized = bits in (4, 8)
    tall = outputs >= 64 * 2 * on.processors
    rows = 64 if is_quantized or (tall and bits == 16) else 32
    if bits == 4:
        columns, width = -(-inputs // (4 * group)) * group, min(group, 64)
        step_inputs, step_bytes = 4 * width, 2 * width
        if on.shared >= WGMMA_SHARED and 2 * outputs >= 3 * 128 * on.processors:
            rows = 128  # an eighth fewer instructions a byte if one product takes 64 rows
    else:
        # In 128 threads norms of 128 inputs are 2 bytes for each, which cannot be copied ahead.
        columns, widest = inputs, 64 if bits == 32 or (bits == 16 and tall) else 256
        width = next((w for w in (widest, 128, 64) if columns % w == 0), 128)
        step_inputs, step_bytes = width, width * bits // 8
    steps, tiles = -(-columns // width), -(-outputs // rows)
    splits = _splits(steps)
    wanted = 6 if is_quantized else 3  # programs on four processors
    split = next((s for s in splits if 4 * tiles * s >= wanted * on.processors), splits[-1])
    value_bytes = 4 if bits == 32 else 2
    together = (4 if is_quantized else 2) * (rows * step_bytes + ROWS * step_inputs * value_bytes)
    stages = 4 if together * 3 <= on.shared else 3  # the step that is multiplied has no buffer of its own
    return Tile(rows, width, split, stages, 4)


def _for_wgmma(outputs: int, inputs: int, bits: int, group: int, processors: int) -> Tile | None:
    """Return a tile fast on an H100; None for other shapes.

    16 bits: long pieces of rows, and a program for two processors of three at least. 4 bits: one, two or three programs
    for each processor, whichever leaves the fewest idle, with as many stages as fit next to each other.
    """
    if bits == 16:
        tiles, steps = -(-outputs // 64), -(-inputs // 256)
        splits = [split for split in (1, 2, 4, 8) if split == 1 or steps >= 2 * split]
        split = next((split for split in splits if 3 * tiles * split >= 2 * processors), splits[-1])
        return Tile(64, 256, split, 4, 4) if 20 * 256 * steps <= 21 * inputs else None
    width = min(group, 64)
    tiles, steps = -(-outputs // 128), -(-inputs // (4 * width))

    def idle(split: int) -> float:
        each = -(-tiles * split // processors)
        return 1 - tiles * split / (each * processors) if each <= 3 else 1.0

    splits = _splits(steps)
    split = min(splits, key=idle)
    stages = {1: 6, 3: 3}.get(-(-tiles * split // processors), 5)
    return Tile(128, width, split, stages, 4)


def block_tile(index: int | None, outputs: int, units: int, step_inputs: int, step_bytes: int) -> Tile:
    """Return the tile for weights in blocks.

    Units have `step_inputs`, and `step_bytes` of 16 outputs. Two warps of 32 outputs each: the matrix units of both
    take the same inputs, and four such programs or more keep a processor busy.
    """
    on, rows = device(index), 64
    tiles = -(-outputs // rows)
    splits = _splits(units)
    split = next((s for s in splits if 2 * tiles * s >= 5 * on.processors), splits[-1])
    together = 4 * (rows // 16 * step_bytes + ROWS * step_inputs * 2)
    return Tile(rows, step_inputs, split, 4 if together * 3 <= on.shared else 3, 2)


def _splits(steps: int) -> list[int]:
    """Return parts of K with few steps after its end."""
    return [s for s in range(1, 9) if s == 1 or (steps >= 2 * s and 10 * -(-steps // s) * s <= 11 * steps)]


def device_file(name: str) -> str:
    """Return the name of a device's file of tiles."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json"


def kernels_version() -> str:
    """Return the hash of kernels, tiles and rules, the key of measurements."""
    folder = Path(__file__).parent
    files = (*folder.glob("*.py"), *folder.glob("*.cu"), *SHIPPED.glob("*.json"), *own_file("").parent.glob("*.json"))
    parts = (part for file in sorted(files) for part in (file.name.encode(), file.read_bytes()))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def own_file(name: str) -> Path:
    """Return the path of the tiles measured on this machine."""
    return cache_root() / "tiles" / device_file(name)


@cache
def _measured(index: int | None) -> dict[str, Tile]:
    if index is None:
        return {}
    name = device(index).name
    return read_tiles(SHIPPED / device_file(name)) | read_tiles(own_file(name))


def read_tiles(path: Path) -> dict[str, Tile]:
    """Return the tiles of a file; empty if missing, ValueError if malformed."""
    if not path.exists():
        return {}
    try:
        return {key: Tile(*map(int, values)) for key, values in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not hold tiles ({error}); delete it, or measure again") from error


def write_tiles(path: Path, tiles: dict[str, Tile]) -> None:
    """Add tiles to a file; running programs do not change."""
    kept = {key: astuple(tile) for key, tile in (read_tiles(path) | tiles).items()}
    atomic_write(path, json.dumps(dict(sorted(kept.items())), indent=1))
