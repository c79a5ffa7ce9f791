"""Minimal calls of the needed kernels, to test a device."""

from __future__ import annotations

import torch

from compile.cuda.attention import attend_live
from compile.cuda.gemm import multiply
from compile.cuda.gemm_config import tile_of
from compile.cuda.linear import DTYPES

SIZE = 64
"""Inputs and outputs of the product, and size of the head."""


def try_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Run linear and attention on zeros; raises compiler and device errors."""
    if dtype not in DTYPES:
        return  # the kernels leave it to tensor operations
    with torch.cuda.device(device):
        weight = torch.zeros(SIZE, SIZE, dtype=dtype, device=device)
        tile = tile_of(device.index, SIZE, SIZE, 32 if dtype == torch.float32 else 16)
        counters = torch.zeros(SIZE, dtype=torch.int32, device=device)
        multiply(weight[:1], weight, tile, counters=counters)
        new, cache = (torch.zeros(1, num, 1, SIZE, dtype=dtype, device=device) for num in (1, SIZE))
        lengths = torch.zeros(1, dtype=torch.int64, device=device)
        old = cache.transpose(1, 2).contiguous()
        attend_live(new, new, new, None, None, old, old.clone(), lengths, None, None, 1.0, 0, 0, 0.0)
        torch.cuda.synchronize()
