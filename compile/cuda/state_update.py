"""Kernels of `compile.state_update`, a launch each, a program per batch row.

All tensors are int64, and rows of two-dimensional ones contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_INTS = ["N", "T", "W", "X", "S", "draft_b", "tokens_b", "path_b", "feedback_b", "text_b"]
# Views of some rows begin at any address: alignment must not make another binary.
_UNALIGNED = ["root_ptr", "lengths_ptr", "draft_ptr", "token_ptr", "tokens_ptr", "path_ptr", "feedback_ptr", "text_ptr"]
_UNALIGNED += ["active_ptr", "num_ptr", "root_at_ptr", "last_ptr"]


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def verify_tokens_kernel(root_ptr, draft_ptr, out_ptr, N, W, draft_b, SIZE: tl.constexpr):
    """Root and draft. Grid (B)."""
    b, i = tl.program_id(0), tl.arange(0, SIZE)
    root, drafted = tl.load(root_ptr + b), (i > 0) & (i <= N)
    token = tl.load(draft_ptr + b * draft_b + i - 1, mask=drafted, other=0)
    tl.store(out_ptr + b * W + i, tl.where(i == 0, root, tl.maximum(token, 0)), mask=i < W)


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def write_draft_token_kernel(token_ptr, lengths_ptr, root_at_ptr, last_ptr, draft_ptr, draft_b):
    """A chain's next token. Grid (B)."""
    b = tl.program_id(0)
    token = tl.load(token_ptr + b)
    place = tl.load(lengths_ptr + b) - tl.load(root_at_ptr + b) - 1
    tl.store(last_ptr + b, token)
    tl.store(draft_ptr + b * draft_b + place, token)


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def append_tokens_kernel(
    text_ptr, root_ptr, lengths_ptr, num_ptr, tokens_ptr, T, S, text_b, tokens_b, SIZE: tl.constexpr
):
    """Append a row's new tokens after its root. Grid (B)."""
    b, i = tl.program_id(0), tl.arange(0, SIZE)
    num, place = tl.load(num_ptr + b), tl.load(lengths_ptr + b) + i
    token = tl.load(tokens_ptr + b * tokens_b + i - 1, mask=(i > 0) & (i <= T), other=0)
    token = tl.where(i == 0, tl.load(root_ptr + b), token)
    tl.store(text_ptr + b * text_b + place, token, mask=(num > 0) & (i <= num) & (place < S))


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def commit_round_kernel(
    root_ptr,
    lengths_ptr,
    active_ptr,
    num_ptr,
    tokens_ptr,
    path_ptr,  # or None
    feedback_ptr,  # or None
    out_ptr,
    T,
    X,
    W,
    tokens_b,
    path_b,
    feedback_b,
    SIZE: tl.constexpr,
):
    """Commit a round's tokens. Grid (B)."""
    b, i = tl.program_id(0), tl.arange(0, SIZE)
    num = tl.load(num_ptr + b)
    row = tl.where(i == 0, num, tl.load(tokens_ptr + b * tokens_b + i - 1, mask=(i > 0) & (i <= T), other=0))
    behind = 1 + T
    if path_ptr is not None:
        row += tl.load(path_ptr + b * path_b + i - behind, mask=(i >= behind) & (i < behind + T), other=0)
        behind += T
    if feedback_ptr is not None:
        row += tl.load(feedback_ptr + b * feedback_b + i - behind, mask=(i >= behind) & (i < behind + X), other=0)
    tl.store(out_ptr + b * W + i, row, mask=i < W)
    newest = tl.load(tokens_ptr + b * tokens_b + tl.maximum(num - 1, 0))
    tl.store(root_ptr + b, newest, mask=tl.load(active_ptr + b) > 0)
    tl.store(lengths_ptr + b, tl.load(lengths_ptr + b) + num)


def verify_tokens(root_B: Tensor, draft_BN: Tensor, width: int) -> Tensor:
    """See `compile.state_update.verify_tokens`."""
    (B, N), root_B, draft_BN = draft_BN.shape, root_B.contiguous(), _with_dense_rows(draft_BN)
    out_BW = root_B.new_empty(B, width)
    size = triton.next_power_of_2(width)
    verify_tokens_kernel[(B,)](root_B, draft_BN, out_BW, N, width, draft_BN.stride(0), SIZE=size, num_warps=1)
    return out_BW


def write_draft_token(token_B: Tensor, lengths_B: Tensor, root_at_B: Tensor, last_B1: Tensor, draft_BN: Tensor) -> None:
    """See `compile.state_update.write_draft_token`."""
    assert draft_BN.stride(1) == 1 and last_B1.is_contiguous()
    token_B = token_B.contiguous()
    write_draft_token_kernel[(len(token_B),)](
        token_B, lengths_B, root_at_B, last_B1, draft_BN, draft_BN.stride(0), num_warps=1
    )


def append_tokens(text_BS: Tensor, root_B: Tensor, at_B: Tensor, num_new_B: Tensor, tokens_BT: Tensor) -> None:
    """See `compile.state_update.append_tokens`."""
    assert text_BS.stride(1) == 1
    (B, S), T, tokens_BT = text_BS.shape, tokens_BT.shape[1], _with_dense_rows(tokens_BT)
    strides, size = (text_BS.stride(0), tokens_BT.stride(0)), triton.next_power_of_2(1 + T)
    append_tokens_kernel[(B,)](
        *(text_BS, root_B, at_B, num_new_B.contiguous(), tokens_BT, T, S, *strides), SIZE=size, num_warps=1
    )


def commit_round(
    root_B: Tensor,
    lengths_B: Tensor,
    active_B: Tensor,
    num_new_B: Tensor,
    tokens_BT: Tensor,
    path_BT: Tensor | None,
    drafter_feedback_BX: Tensor | None,
) -> Tensor:
    """See `compile.state_update.commit_round`."""
    (B, T), X = tokens_BT.shape, 0 if drafter_feedback_BX is None else drafter_feedback_BX.shape[1]
    width = 1 + T + (0 if path_BT is None else T) + X
    out_BW = tokens_BT.new_empty(B, width)
    parts = [None if part is None else _with_dense_rows(part) for part in (tokens_BT, path_BT, drafter_feedback_BX)]
    strides = [0 if part is None else part.stride(0) for part in parts]
    size = triton.next_power_of_2(width)
    commit_round_kernel[(B,)](
        *(root_B, lengths_B, active_B, num_new_B.contiguous(), *parts, out_BW, T, X, width, *strides),
        SIZE=size,
        num_warps=1 if size <= 256 else 4,
    )
    return out_BW


def _with_dense_rows(x_BX: Tensor) -> Tensor:
    return x_BX if x_BX.stride(1) == 1 else x_BX.contiguous()
