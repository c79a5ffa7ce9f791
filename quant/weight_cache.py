"""Cache of quantized weights: one safetensors file with a checksum per layer."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quant.quantized_weight import QuantizedWeight
from sharesd_files import atomic_path, warn_unwritable

logger = logging.getLogger(__name__)

_FORMAT = "3"  # raise it when a solver or the layout of the file changes


def content_key(weights: Iterable[tuple[str, Tensor, int, int]], identity: str | None = None, layout: str = "") -> str:
    """Return the hash of all inputs of the solver.

    The checkpoint's `identity` replaces the weights' values, whose hash takes a second per one or two gigabytes.
    `layout`: version of packed weights.
    """
    digest = hashlib.sha256()
    digest.update(repr((_FORMAT, torch.__version__, identity, layout)).encode())
    for name, weight, bits, group_size in weights:
        device = "cpu" if weight.is_meta else weight.device.type  # only a CPU's solutions are kept
        header = (name, tuple(weight.shape), str(weight.dtype), device, bits, group_size)
        digest.update(repr(header).encode())
        if identity is None:
            digest.update(_raw(weight))
    return digest.hexdigest()


def store_path(cache_dir: Path, key: str) -> Path:
    """Return the file of a key."""
    return cache_dir / f"hqq-{key[:16]}.safetensors"


def read_store(path: Path, key: str) -> dict[str, Tensor] | None:
    """Return the packed tensors of a key, on the CPU.

    Returns None if the file is missing, or damaged, which logs a warning.
    """
    if not path.exists():
        return None
    try:
        return checked_store(path, key)
    except ValueError as error:
        logger.warning("%s: quantizing again", error)
        return None


def checked_store(path: Path, key: str) -> dict[str, Tensor]:
    """Return the packed tensors of a key, on the CPU; ValueError if they are not those that were written."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if metadata.get("key") != key or metadata.get("payload") != _payload(tensors):
        raise ValueError(f"{path} does not hold what was written")
    return tensors


def save_store(path: Path, key: str, tensors: dict[str, Tensor]) -> None:
    """Write a file atomically; SafetensorError or OSError if the disk does not take it."""
    with atomic_path(path) as fresh:
        save_file(tensors, fresh, metadata={"key": key, "payload": _payload(tensors)})


def write_store(path: Path, key: str, tensors: dict[str, Tensor]) -> None:
    """Write a file atomically.

    If writing fails, a warning is logged once, and the next start quantizes again.
    """
    try:
        save_store(path, key, tensors)
    except (SafetensorError, OSError) as error:
        warn_unwritable(path, error, "weights are quantized again at each start")


def pack_weight(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the CPU tensors to write, with two codes per byte."""
    codes = weight.q.cpu()
    return {
        f"{name}.q": codes[:, ::2] | codes[:, 1::2] << 4,
        f"{name}.scale": weight.scale.cpu(),
        f"{name}.zero": weight.zero.cpu(),
    }


def unpack_weight(
    name: str, tensors: dict[str, Tensor], *, bits: int, group_size: int, device: torch.device
) -> QuantizedWeight:
    """Return the weight that `pack_weight` packed."""
    q, scale, zero = (tensors[f"{name}.{part}"].to(device) for part in ("q", "scale", "zero"))
    return QuantizedWeight(
        q=torch.stack([q & 15, q >> 4], -1).flatten(-2), scale=scale, zero=zero, bits=bits, group_size=group_size
    )


def _payload(tensors: dict[str, Tensor]) -> str:
    """Return a checksum of names, types, sizes and words.

    It takes as long as reading memory.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        content = tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8)
        words = content[: len(content) // 8 * 8].view(torch.int64)
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} {words.sum()}".encode())
        digest.update(_raw(content[len(words) * 8 :]))
    return digest.hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
