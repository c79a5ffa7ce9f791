"""Accepted path through drafts in one launch, instead of 18 or so.

Legend: B rows of the batch, T rows of a tree (the root and N = T - 1 nodes), P rows that a path may name.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["T", "P"])
def accept_path_kernel(token_ptr, depth_ptr, path_ptr, target_ptr, out_ptr, T, P, ROWS: tl.constexpr):
    """Accept a path: of a chain if without paths. Grid (B)."""
    b = tl.program_id(0)
    t = tl.arange(0, ROWS)
    parent = tl.where(t < T, t - 1, -1)
    if path_ptr is not None:
        depth = tl.load(depth_ptr + b * T + t, mask=t < T, other=0)
        parent = tl.load(path_ptr + (b * T + t) * P + depth - 1, mask=(t < T) & (depth > 0), other=-1).to(tl.int32)
    token = tl.load(token_ptr + b * (T - 1) + t - 1, mask=(t < T) & (t > 0), other=-1)
    choice = tl.load(target_ptr + b * T + t, mask=t < T, other=-2)
    rows = tl.where(t == 0, 0, T - 1)
    row, kept = 0 * b, 0 * b + 1
    for _ in range(1, T):
        wanted = tl.sum(tl.where(t == row, choice, 0), 0)
        child = tl.min(tl.where((parent == row) & (token == wanted), t, ROWS), 0)
        found = child < ROWS
        rows = tl.where((t == kept) & found, child, rows)
        row = tl.where(found, child, row)
        kept += found.to(tl.int32)
    out_ptr += b * (1 + 2 * T)
    tl.store(out_ptr, kept.to(tl.int64))
    tl.store(out_ptr + 1 + t, tl.load(target_ptr + b * T + rows, mask=t < T, other=0), mask=t < T)
    tl.store(out_ptr + 1 + T + t, rows.to(tl.int64), mask=t < T)


def accept_path(tokens_BN: Tensor, depth_BT: Tensor | None, path_BTP: Tensor | None, target_BT: Tensor) -> Tensor:
    """Return [B, 1 + 2T] int64: count, target tokens, accepted rows."""
    B, T = target_BT.shape
    out = torch.empty(B, 1 + 2 * T, dtype=torch.int64, device=target_BT.device)
    P = 0 if path_BTP is None else path_BTP.shape[2]
    inputs = (None if x is None else x.contiguous() for x in (tokens_BN, depth_BT, path_BTP, target_BT))
    accept_path_kernel[(B,)](*inputs, out, T, P, ROWS=triton.next_power_of_2(T), num_warps=1)
    return out
