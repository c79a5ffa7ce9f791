"""Half-quadratic quantization in one launch, which reads each weight once.

The algorithm of `compile/cpu/hqq_solver.h`, except that each group stops for itself. Its zero moves in registers, where
tensor operations would pass over memory some hundred times.

Legend: N output features, K input features, G groups of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PASSES = 20
WEIGHTS = 2048
"""Weights of a program, 16 of each thread."""
POWER = tl.constexpr(0.7)
BETA = tl.constexpr(10.0)
TAKEN = tl.constexpr((1 / 10.0) ** (1 / (2 - 0.7)))
"""Errors up to this are shrunk to 0."""
ROUNDING = tl.constexpr(1.5 * 2.0**23)
"""Adding and subtracting it rounds small numbers to integers, halves to even."""


@triton.jit
def _codes(w, inverse, zero, top):
    code = tl.minimum(tl.maximum(w * inverse[:, None] + zero[:, None], 0.0), top)
    return (code + ROUNDING) - ROUNDING


@triton.jit(do_not_specialize=["num_groups"])
def solve_kernel(
    weight_ptr,  # [num_groups, SIZE]
    codes_ptr,
    scale_ptr,
    zero_ptr,
    num_groups,
    top,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    PASSES: tl.constexpr,
):
    """Find scale and zero of GROUPS groups, and their codes. Grid (programs)."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    is_valid = group < num_groups
    place = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    w = tl.load(weight_ptr + place, mask=is_valid[:, None], other=0.0).to(tl.float32)
    low = tl.min(w, 1)
    spread = tl.max(w, 1) - low
    inverse = tl.where(spread <= 1e-4, 1.0, tl.minimum(tl.div_rn(top + spread * 0, tl.maximum(spread, 1e-4)), 2e4))
    scale = tl.div_rn(spread * 0 + 1.0, inverse)
    zero = -low * inverse
    best = tl.full((GROUPS,), float("inf"), tl.float32)
    is_moving = is_valid
    for _ in range(PASSES):
        code = _codes(w, inverse, zero, top)
        error = w - (code - zero[:, None]) * scale[:, None]
        size = tl.abs(error)
        total = tl.sum(size, 1)
        left = tl.where(size > TAKEN, size - tl.exp2(tl.log2(tl.maximum(size, TAKEN)) * (POWER - 1)) / BETA, 0.0)
        kept = w - tl.where(error < 0, -left, left)
        zero = tl.where(is_moving, tl.sum(code - kept * inverse[:, None], 1) / SIZE, zero)
        is_moving = is_moving & (total < best)
        best = tl.minimum(best, total)
    tl.store(codes_ptr + place, _codes(w, inverse, zero, top).to(tl.uint8), mask=is_valid[:, None])
    tl.store(scale_ptr + group, scale, mask=is_valid)
    tl.store(zero_ptr + group, zero, mask=is_valid)


def solve_hqq(weight_NK: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix in groups of a row, a power of two each.

    Returns codes (uint8 [N, K], below 2^bits), scales and zeros (float32 [N, G]): W = (code - zero) * scale.
    """
    N, K = weight_NK.shape
    assert bits < 8 and K % group_size == 0 and group_size & (group_size - 1) == 0, (weight_NK.shape, bits, group_size)
    weight_NK = weight_NK.detach().contiguous()
    codes_NK = torch.empty_like(weight_NK, dtype=torch.uint8)
    scales_NG, zeros_NG = (weight_NK.new_empty(N, K // group_size, dtype=torch.float32) for _ in range(2))
    num_groups, GROUPS = scales_NG.numel(), WEIGHTS // group_size
    solve_kernel[(triton.cdiv(num_groups, GROUPS),)](
        *(weight_NK, codes_NK, scales_NG, zeros_NG, num_groups, float(2**bits - 1)),
        **{"SIZE": group_size, "GROUPS": GROUPS, "PASSES": PASSES},
        num_warps=4,
    )
    return codes_NK, scales_NG, zeros_NG
