"""Weights on huge pages: every step reads all of them, and looking up small pages takes up to a fifth of that time."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor, nn

from compile.linear import LowPackedLinear, PackedLinear

HUGE = 2**21
"""Bytes of a huge page."""
ALIGNMENT = 64


def on_huge_pages(model: nn.Module) -> int:
    """Move the packed weights of a model on the CPU into one region of huge pages; returns its bytes.

    Where the system has none to give (it is asked, not told), the region has ordinary pages, and nothing is lost.
    """
    linears = [module for module in model.modules() if isinstance(module, (PackedLinear, LowPackedLinear))]
    sizes = [-(-linear.weight.nbytes // ALIGNMENT) * ALIGNMENT for linear in linears]
    if not linears or not hasattr(mmap, "MADV_HUGEPAGE"):
        return 0
    for linear, place in zip(linears, huge_pages(sum(sizes)).split(sizes), strict=True):
        linear.weight = _moved(linear.weight, place[: linear.weight.nbytes])
    return sum(sizes)


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


def _moved(weight: Tensor, place: Tensor) -> Tensor:
    moved = place.view(weight.dtype).view(weight.shape)
    return moved.copy_(weight)
