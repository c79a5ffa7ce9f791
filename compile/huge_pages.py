"""Huge pages for memory that every step reads.

Lookups of small pages take up to a fifth of the reading time.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor, nn

from compile.linear import PackedLinear, QuantizedPackedLinear

CHUNK = 2**26
"""Bytes that an arena takes from the system at once, at least."""
HUGE = 2**21
"""Bytes of a huge page."""
ALIGNMENT = 64


def weights_on_huge_pages(model: nn.Module, *, keep: Collection[nn.Module] = ()) -> int:
    """Move packed weights to huge pages; returns their bytes.

    The linears `keep` stay. Each is freed before the next is copied.
    """
    packed = (PackedLinear, QuantizedPackedLinear)
    linears = [
        module
        for module in model.modules()
        if isinstance(module, packed) and module not in keep and not module.is_settled
    ]
    sizes = [linear.weight.to("meta") for linear in linears]
    for linear, moved in zip(linears, zeros_like(sizes), strict=True):
        linear.weight = moved.copy_(linear.weight)
    return sum(size.nbytes for size in sizes)


class HugePageArena:
    """Source of zeroed memory for weights, side by side on huge pages."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | bytearray = bytearray()
        self._next = 0

    def zeros(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros in a storage of their own.

        Tensors of one chunk are freed together.
        """
        count = math.prod(size)
        num_bytes = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if self._next + num_bytes > len(self._memory):
            self._memory, self._next = _huge_pages(max(num_bytes, CHUNK))
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._next).view(*size)
        self._next += num_bytes
        return tensor


def zeros_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros like CPU tensors, side by side on huge pages.

    Pages are ordinary if the system has no others. Each is a storage of its own: compilers take tensors of one storage
    for views of one buffer, which they copy whole.
    """
    starts = [0, *accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)]
    memory, first = _huge_pages(starts[-1])
    return [
        torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=first + start).as_strided(
            tensor.shape, tensor.stride()
        )
        if tensor.numel()
        else torch.empty(tensor.shape, dtype=tensor.dtype)
        for tensor, start in zip(tensors, starts, strict=False)
    ]


def huge_pages(num_bytes: int) -> Tensor:
    """Return zeroed memory, uint8 [num_bytes], aligned to a huge page.

    Pages are small if the system has no huge ones.
    """
    memory, first = _huge_pages(num_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=first)


def _huge_pages(num_bytes: int) -> tuple[mmap.mmap | bytearray, int]:
    """Return zeroed memory, and the offset of its first huge page.

    At least `num_bytes` follow that. These are ordinary pages if the system has no huge ones.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return bytearray(num_bytes + HUGE), 0
    memory = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system with the constant but without the pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE
