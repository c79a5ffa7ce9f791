"""Short convolutions on CUDA, and what undoes them: one launch for a step's sums and inputs, one to accept a tree.

A program has one token and some of its channels. It takes inputs of the step's own tokens from the step, and those
before from the ring. So it reads nothing that another program writes, unless the step is so long that its inputs would
overwrite those before: the ring is then written by a second launch.

Legend as in `compile.short_conv`; X is 3 * D, P the length of a tree's paths.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compile.attention import MAX_STEP
from compile.cuda.dependent_launch import wait_for_predecessor
from compile.cuda.pdl import launch_options

BLOCK = 256
"""Channels of a program."""
_UNALIGNED = ["length_ptr", "end_ptr", "depth_ptr", "path_ptr", "num_ptr"]
"""Views of some rows begin at any address: alignment must not make another binary."""


@triton.jit
def own_place(depth_ptr, path_ptr, b, t, T, P):
    """Slot of a token, counted from its row's length; t may be several, of which those outside the step get -1."""
    place = t.to(tl.int64)
    if depth_ptr is not None:
        depth = tl.load(depth_ptr + b * T + t, mask=t < T, other=0)
        place = tl.load(path_ptr + (b * T + t) * P + depth, mask=t < T, other=-1)
    return place


@triton.jit
def input_place(depth_ptr, path_ptr, b, t, T, P, back, ROWS: tl.constexpr):
    """Where the input of the token `back` places before a token is: row of the step, and slot from the row's length.

    The row is -1 if the step has none: the slot is then in the ring, or before the text. In a tree the tokens before
    are those of the path.
    """
    slot = (t - back).to(tl.int64)
    row = slot.to(tl.int32)
    if depth_ptr is not None:
        r = tl.arange(0, ROWS)
        depth = tl.load(depth_ptr + b * T + t)
        slot = tl.load(path_ptr + (b * T + t) * P + depth - back, mask=depth >= back, other=0)
        row = tl.max(tl.where(own_place(depth_ptr, path_ptr, b, r, T, P) == slot, r, -1), 0)
        row = tl.where(depth >= back, row, -1)
        slot = tl.where(depth >= back, slot, depth - back)
    return tl.maximum(row, -1), slot


@triton.jit
def _product(x_ptr, row, i, is_valid, D: tl.constexpr):
    """Inputs b * u of one of the step's tokens, rounded as they are kept."""
    x_ptr += row.to(tl.int64) * (3 * D) + i
    b, u = tl.load(x_ptr, mask=is_valid, other=0.0), tl.load(x_ptr + 2 * D, mask=is_valid, other=0.0)
    return (b.to(tl.float32) * u.to(tl.float32)).to(b.dtype)


@triton.jit(do_not_specialize=["T", "R", "P"], do_not_specialize_on_alignment=_UNALIGNED)
def short_conv_kernel(
    x_ptr,
    ring_ptr,
    length_ptr,
    end_ptr,
    weight_ptr,
    bias_ptr,  # or None
    depth_ptr,  # or None
    path_ptr,
    out_ptr,
    T,
    R,
    P,
    D: tl.constexpr,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SUMS: tl.constexpr,
    KEEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some channels of one token. Grid (B * T, parts)."""
    wait_for_predecessor(PDL)
    b, t = (tl.program_id(0) // T).to(tl.int64), tl.program_id(0) % T
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = i < D
    length = tl.load(length_ptr + b)
    x_ptr += b * T * (3 * D)
    ring_ptr += b * R * D
    if SUMS:
        sums = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(L):
            row, slot = input_place(depth_ptr, path_ptr, b, t, T, P, L - 1 - tap, ROWS)
            slot += length
            new = _product(x_ptr, row, i, is_channel & (row >= 0), D)
            is_kept = is_channel & (row < 0) & (slot >= 0)
            kept = tl.load(ring_ptr + tl.maximum(slot, 0) % R * D + i, mask=is_kept, other=0.0)
            weight = tl.load(weight_ptr + i * L + tap, mask=is_channel, other=0.0).to(tl.float32)
            sums += tl.where(row >= 0, new, kept).to(tl.float32) * weight
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + i, mask=is_channel, other=0.0).to(tl.float32)
        c = tl.load(x_ptr + t.to(tl.int64) * (3 * D) + D + i, mask=is_channel, other=0.0)
        y = c.to(tl.float32) * sums.to(c.dtype).to(tl.float32)
        tl.store(out_ptr + (b * T + t) * D + i, y.to(c.dtype), mask=is_channel)
    if KEEPS:
        slot, end = length + own_place(depth_ptr, path_ptr, b, t, T, P), tl.load(end_ptr + b)
        keeps = (length >= 0) & (slot < end) & (slot >= tl.minimum(end, length + T) - R)
        kept = _product(x_ptr, t, i, is_channel, D)
        tl.store(ring_ptr + tl.maximum(slot, 0) % R * D + i, kept, mask=is_channel & keeps)


@triton.jit(do_not_specialize=["T", "R", "layer_stride"], do_not_specialize_on_alignment=_UNALIGNED)
def compact_ring_kernel(
    ring_ptr, length_ptr, path_ptr, num_ptr, T, R, layer_stride, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Move some channels of a row of one layer. Grid (N, B, parts).

    Inputs move to lower slots only: each is read before another overwrites it.
    """
    b, i = tl.program_id(1).to(tl.int64), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    ring_ptr += tl.program_id(0).to(tl.int64) * layer_stride + b * R * D + i
    first = tl.load(length_ptr + b)
    for row in range(0, tl.load(num_ptr + b)):
        at = tl.load(path_ptr + b * T + row)
        moved = tl.load(ring_ptr + (first + at) % R * D, mask=i < D, other=0.0)
        tl.store(ring_ptr + (first + row) % R * D, moved, mask=i < D)


def convolve(
    x_BTX: Tensor,
    ring_BRD: Tensor,
    lengths_B: Tensor,
    ends_B: Tensor,
    weight_DL: Tensor,
    bias_D: Tensor | None,
    depth_BT: Tensor | None,
    path_BTP: Tensor | None,
) -> Tensor:
    """Run `compile.short_conv.gated_short_conv`, with a tree's mask in its parts."""
    (B, T, X), (D, L), R = x_BTX.shape, weight_DL.shape, ring_BRD.shape[1]
    assert x_BTX.is_contiguous() and ring_BRD.is_contiguous() and weight_DL.is_contiguous() and X == 3 * D
    out_BTD, P = x_BTX.new_empty((B, T, D)), 0
    if depth_BT is not None and path_BTP is not None:
        depth_BT, path_BTP, P = depth_BT.contiguous(), path_BTP.contiguous(), path_BTP.shape[2]
    fits = T + L - 1 <= R
    assert fits or path_BTP is None, f"a tree of {T} tokens for {R} slots"
    for sums, keeps in ((True, True),) if fits else ((True, False), (False, True)):
        short_conv_kernel[(B * T, triton.cdiv(D, BLOCK))](
            *(x_BTX, ring_BRD, lengths_B, ends_B, weight_DL, bias_D, depth_BT, path_BTP, out_BTD, T, R, P),
            **{"D": D, "L": L, "BLOCK": BLOCK, "ROWS": max(MAX_STEP, triton.next_power_of_2(T)) if P else 1},
            **{"SUMS": sums, "KEEPS": keeps},
            **launch_options(x_BTX.device),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out_BTD


def compact(ring_NBRD: Tensor, lengths_B: Tensor, path_BT: Tensor, num_B: Tensor) -> None:
    """Run `compile.short_conv.compact_ring`."""
    N, B, R, D = ring_NBRD.shape
    assert ring_NBRD.stride()[1:] == (R * D, D, 1)
    compact_ring_kernel[(N, B, triton.cdiv(D, BLOCK))](
        *(ring_NBRD, lengths_B, path_BT.contiguous(), num_B.contiguous(), path_BT.shape[1], R, ring_NBRD.stride(0)),
        **{"D": D, "BLOCK": BLOCK},
        num_warps=1,
    )
