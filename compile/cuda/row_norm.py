"""RMSNorm of few rows in Triton, a program for each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile.cuda.dependent_launch import wait_for_predecessor
from compile.cuda.pdl import launch_options


@triton.jit
def row_norm(x_ptr, weight_ptr, y_ptr, eps, K: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Normalise a row of [M, K]."""
    wait_for_predecessor(PDL)
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + tl.program_id(0) * K + at, mask=at < K, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * weight
    tl.store(y_ptr + tl.program_id(0) * K + at, y.to(y_ptr.dtype.element_ty), mask=at < K)


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight [..., K], contiguous."""
    y, K = torch.empty_like(x), x.shape[-1]
    size = triton.next_power_of_2(K)
    row_norm[(x.numel() // K,)](
        x, weight, y, eps, K=K, SIZE=size, num_warps=min(max(size // 512, 1), 16), **launch_options(x.device)
    )
    return y
