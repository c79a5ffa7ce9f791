"""Memory on huge pages, for what every step reads: looking up small pages takes up to a fifth of that time."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from compile.linear import LowPackedLinear, PackedLinear

HUGE = 2**21
"""Bytes of a huge page."""
ALIGNMENT = 64


def weights_on_huge_pages(model: nn.Module) -> int:
    """Move the packed weights of a model on the CPU to huge pages; returns their bytes."""
    linears = [module for module in model.modules() if isinstance(module, (PackedLinear, LowPackedLinear))]
    weights = [linear.weight for linear in linears]
    for linear, moved in zip(linears, zeros_like(weights), strict=True):
        linear.weight = moved.copy_(linear.weight)
    return sum(weight.nbytes for weight in weights)


def zeros_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Zeros in the layout of dense tensors of the CPU, in one region of huge pages.

    Where the system has none to give (it is asked, not told), the region has ordinary pages, and nothing is lost.
    """
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    places = huge_pages(sum(sizes)).split(sizes) if tensors else ()
    made = []
    for tensor, place in zip(tensors, places, strict=True):
        memory = place[: tensor.nbytes].view(tensor.dtype)
        made.append(memory.as_strided(tensor.shape, tensor.stride(), memory.storage_offset()))
    return made


def huge_pages(num_bytes: int) -> Tensor:
    """Zeroed memory [num_bytes] uint8 that begins with a huge page, where the system knows such."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system that knows the word but not the pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    region = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory alive
    first = -region.data_ptr() % HUGE
    return region[first : first + num_bytes]
