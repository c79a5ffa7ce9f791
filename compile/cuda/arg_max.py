"""Index of each row's largest number in Triton, by many programs.

Legend: R rows, V numbers of a row, C chunks of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile.cuda.dependent_launch import wait_for_predecessor
from compile.cuda.pdl import launch_options

CHUNK = 4096
"""Numbers of a program."""


@triton.jit(do_not_specialize=["V"])
def largest_of_chunks(x_ptr, keys_ptr, V, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Write the key of each chunk's largest. Grid (chunks, rows)."""
    wait_for_predecessor(PDL)
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + tl.program_id(1).to(tl.int64) * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf")) + 0.0  # no NaN is the largest, and both zeros are alike
    bits = x.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # compares as the numbers do
    key = tl.max((order.to(tl.int64) << 32) | (0x7FFFFFFF - at), 0)  # the first among equals
    tl.store(keys_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), key)


@triton.jit(do_not_specialize=["C"])
def largest_of_keys(keys_ptr, out_ptr, C, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Write the index in each row's largest key."""
    wait_for_predecessor(PDL)
    at = tl.arange(0, SIZE)
    lowest: tl.constexpr = -(2**63)
    key = tl.max(tl.load(keys_ptr + tl.program_id(0) * C + at, mask=at < C, other=lowest), 0)
    tl.store(out_ptr + tl.program_id(0), 0x7FFFFFFF - (key & 0x7FFFFFFF))


def arg_max_rows(x_RV: Tensor) -> Tensor:
    """Return int64 [R]; rows are contiguous."""
    R, V = x_RV.shape
    chunks, options = triton.cdiv(V, CHUNK), launch_options(x_RV.device)
    keys = torch.empty(R, chunks, dtype=torch.int64, device=x_RV.device)
    out_R = torch.empty(R, dtype=torch.int64, device=x_RV.device)
    largest_of_chunks[chunks, R](x_RV, keys, V, CHUNK=CHUNK, num_warps=8, **options)
    size = triton.next_power_of_2(chunks)
    largest_of_keys[(R,)](keys, out_R, chunks, SIZE=size, num_warps=1, **options)
    return out_R
