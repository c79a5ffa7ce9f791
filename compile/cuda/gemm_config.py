"""Which tile a matrix of weights is multiplied in: measured once per device and shape, else by rule.

Tile and split decide the order of summation, so they depend on the device and the weights alone, never on the number of
rows; another tile is another text. Imports no Triton.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import torch

from compile.cpp_extension import cache_root

ROWS = 16
"""Rows of a tile: the least that matrix units take as columns of their second operand."""
SHIPPED = Path(__file__).parent / "measured"


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut up."""

    outputs: int
    """Rows of the weights that a program multiplies."""
    inputs: int
    """Columns of the weights that it takes in one step; with 4 bits a column is four inputs."""
    split: int
    """Parts of K, each a program of its own."""
    stages: int
    """Steps in flight, the current one included. No influence on bits."""
    warps: int


@dataclass(frozen=True, slots=True)
class Device:
    """What the rule asks of a GPU."""

    name: str
    processors: int
    shared: int
    """Bytes of shared memory that a program may use."""


WGMMA_SHARED = 200 * 1024
"""GPUs with so much shared memory multiply 64 rows at once, from shared memory."""
INTERPRETER = Device("interpreter", 132, 227 * 1024)


@cache
def device(index: int | None) -> Device:
    """A CUDA device; None where Triton's interpreter stands in for one."""
    if index is None:
        return INTERPRETER
    found = torch.cuda.get_device_properties(index)
    own = 1024  # of each processor's shared memory, what the system keeps
    return Device(found.name, found.multi_processor_count, found.shared_memory_per_multiprocessor - own)


@cache
def tile_of(index: int | None, outputs: int, inputs: int, bits: int, group: int = 0) -> Tile:
    """The tile for weights [outputs, inputs] with codes of 4 or 8 bits, or values of 16 or 32, on a device."""
    measured = _measured(index)
    found = measured.get(key_of(outputs, inputs, bits, group)) or _neighbour(measured, outputs, inputs, bits, group)
    return found or by_rule(outputs, inputs, bits, group, device(index))


def _neighbour(measured: dict[str, Tile], outputs: int, inputs: int, bits: int, group: int) -> Tile | None:
    """The tile of the nearest shape that was measured, if neither size is farther off than a fifth."""
    distances = []
    for key, tile in measured.items():
        n, k, b, g = map(int, re.findall(r"\d+", f"{key}g0")[:4])
        farthest = max(outputs / n, n / outputs, inputs / k, k / inputs)
        if (b, g) == (bits, group) and farthest <= 1.2:
            distances.append((farthest, key, tile))
    return min(distances, default=(0.0, "", None))[2]


def key_of(outputs: int, inputs: int, bits: int, group: int = 0) -> str:
    """What a shape is called in the files of tiles."""
    return f"{outputs}x{inputs}x{bits}" + (f"g{group}" if group else "")


def by_rule(outputs: int, inputs: int, bits: int, group: int, on: Device) -> Tile:
    """Enough bytes in flight for the bandwidth, and few instructions for each of them.

    Products of the matrix units are 16 rows high, and a program has four warps: with 4 bits, 64 rows give each its own.
    Arithmetic of low bits needs three programs on two processors; values of 16 bits are kept coming by fewer.
    """
    low = bits in (4, 8)
    tall = outputs >= 64 * 2 * on.processors
    rows = 64 if low or (tall and bits == 16) else 32
    if bits == 4:
        columns, width = -(-inputs // (4 * group)) * group, min(group, 64)
        step_inputs, step_bytes = 4 * width, 2 * width
        if on.shared >= WGMMA_SHARED and 2 * outputs >= 3 * 128 * on.processors:
            rows = 128  # an eighth fewer instructions a byte, where one product takes 64 rows
    else:
        # In 128 threads norms of 128 inputs are 2 bytes for each, which cannot be copied ahead.
        columns, widest = inputs, 64 if bits == 32 or (bits == 16 and tall) else 256
        width = next((w for w in (widest, 128, 64) if columns % w == 0), 128)
        step_inputs, step_bytes = width, width * bits // 8
    steps, tiles = -(-columns // width), -(-outputs // rows)
    splits = [s for s in range(1, 9) if s == 1 or (steps >= 2 * s and 10 * -(-steps // s) * s <= 11 * steps)]
    wanted = 6 if low else 3  # programs on four processors
    split = next((s for s in splits if 4 * tiles * s >= wanted * on.processors), splits[-1])
    value_bytes = 4 if bits == 32 else 2
    together = (4 if low else 2) * (rows * step_bytes + ROWS * step_inputs * value_bytes)
    stages = 4 if together * 3 <= on.shared else 3  # the step that is multiplied has no buffer of its own
    return Tile(rows, width, split, stages, 4)


def device_file(name: str) -> str:
    """Name of a device's file of tiles."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json"


def kernels_version() -> str:
    """Another one for other kernels, tiles, or choices among kernels: what was measured with the old ones is void."""
    folder = Path(__file__).parent
    files = (*folder.glob("*.py"), *SHIPPED.glob("*.json"), *own_file("").parent.glob("*"))
    parts = (part for file in sorted(files) for part in (file.name.encode(), file.read_bytes()))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def own_file(name: str) -> Path:
    """Where the tiles measured on this machine are kept."""
    return cache_root() / "tiles" / device_file(name)


@cache
def _measured(index: int | None) -> dict[str, Tile]:
    if index is None:
        return {}
    name = device(index).name
    return read_tiles(SHIPPED / device_file(name)) | read_tiles(own_file(name))


def read_tiles(path: Path) -> dict[str, Tile]:
    """The tiles of a file; none where there is no file. ValueError where it holds something else."""
    if not path.exists():
        return {}
    try:
        return {key: Tile(*map(int, values)) for key, values in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not hold tiles ({error}); delete it, or measure anew") from error


def write_tiles(path: Path, tiles: dict[str, Tile]) -> None:
    """Put tiles beside those that the file holds. What is running keeps those it began with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {key: astuple(tile) for key, tile in (read_tiles(path) | tiles).items()}
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(dict(sorted(kept.items())), indent=1))
    scratch.replace(path)
