"""Kernels of `compile.state_update`, a launch each, a program per batch row.

All tensors but logits are int64, and rows of two-dimensional ones contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile.state_update import LATE_MASK, LATE_OFFSET, LATE_SHIFT

BLOCK = 4096
"""Logits of a program."""
_INTS = ["N", "T", "V", "W", "X", "S", "draft_b", "tokens_b", "path_b", "feedback_b", "text_b", "logits_b", "logits_t"]
# Views of some rows begin at any address: alignment must not make another binary.
_UNALIGNED = ["root_ptr", "lengths_ptr", "draft_ptr", "token_ptr", "tokens_ptr", "path_ptr", "feedback_ptr", "text_ptr"]
_UNALIGNED += ["active_ptr", "num_ptr", "root_at_ptr", "last_ptr", "logits_ptr"]


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
def rate_logits_kernel(logits_ptr, num_ptr, path_ptr, rates_ptr, T, V, logits_b, logits_t, path_b, BLOCK: tl.constexpr):
    """Rate logits of new tokens. Grid (B, T, chunks).

    1: finite, 2: NaN or +inf. The rate of a chunk is its largest; 0: all are -inf.
    """
    b, t, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if t < tl.load(num_ptr + b):
        row = t.to(tl.int64)
        if path_ptr is not None:
            row = tl.load(path_ptr + b * path_b + t)
        at = chunk * BLOCK + tl.arange(0, BLOCK)
        logits_ptr += b.to(tl.int64) * logits_b + row * logits_t
        x = tl.load(logits_ptr + at, mask=at < V, other=float("-inf"))
        rate = tl.where(x < float("inf"), (x > float("-inf")).to(tl.int32), 2)
        tl.store(rates_ptr + (b * T + t) * tl.num_programs(2) + chunk, tl.max(rate, 0))


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def commit_round_kernel(
    root_ptr,
    lengths_ptr,
    active_ptr,
    num_ptr,
    tokens_ptr,
    path_ptr,  # or None
    feedback_ptr,  # or None
    rates_ptr,
    out_ptr,
    T,
    X,
    W,
    tokens_b,
    path_b,
    feedback_b,
    CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Commit a round's tokens. Grid (B)."""
    b, i = tl.program_id(0), tl.arange(0, SIZE)
    num = tl.load(num_ptr + b)
    chunk, num_finite, is_finite = tl.arange(0, CHUNKS), 0 * num, 0 * num + 1
    for t in range(0, num):
        rates = tl.load(rates_ptr + (b * T + t) * CHUNKS + chunk)
        is_finite *= (tl.max(rates, 0) == 1).to(tl.int64)
        num_finite += is_finite
    row = tl.load(tokens_ptr + b * tokens_b + i - 2, mask=(i > 1) & (i < 2 + T), other=0)
    row = tl.where(i == 0, num, tl.where(i == 1, num_finite, row))
    behind = 2 + T
    if path_ptr is not None:
        row += tl.load(path_ptr + b * path_b + i - behind, mask=(i >= behind) & (i < behind + T), other=0)
        behind += T
    if feedback_ptr is not None:
        row += tl.load(feedback_ptr + b * feedback_b + i - behind, mask=(i >= behind) & (i < behind + X), other=0)
    tl.store(out_ptr + b * W + i, row, mask=i < W)
    newest = tl.load(tokens_ptr + b * tokens_b + tl.maximum(num - 1, 0))
    tl.store(root_ptr + b, newest, mask=tl.load(active_ptr + b) > 0)
    tl.store(lengths_ptr + b, tl.load(lengths_ptr + b) + num)


@triton.jit(do_not_specialize=_INTS)
def join_late_nodes_kernel(
    words_ptr,
    number_ptr,
    joined_ptr,
    tokens_ptr,
    depth_ptr,
    path_ptr,
    T,
    X,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Add late nodes to a row's draft. Grid (B)."""
    b, r, w = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, WORDS)
    number = tl.load(number_ptr + b) + 1
    tl.store(number_ptr + b, number)
    words_ptr += b * X
    word = tl.load(words_ptr + w, mask=w < X, other=0)
    joins = tl.min(tl.where(w < X, ((word >> SHIFT) == number).to(tl.int32), 1), 0)
    tl.store(joined_ptr + b, joins.to(tl.int64))
    if joins > 0:
        token_ptrs = tokens_ptr + b * (T - 1) - 1 + r  # a node's row is its number plus 1
        depth_ptrs = depth_ptr + b * T + r
        path_ptrs = path_ptr + (b * T + r) * T
        is_node = (r > 0) & (r < T)
        late = (tl.load(words_ptr + r - 1, mask=is_node, other=0) & MASK) - OFFSET
        is_drafted = is_node & (late == -2)
        is_late = is_node & (late != -2)
        token = tl.load(token_ptrs, mask=is_drafted, other=-1)
        depth = tl.load(depth_ptrs, mask=is_drafted, other=1)
        parent = tl.load(path_ptrs + depth - 1, mask=is_drafted, other=-1)
        late_depth = tl.load(words_ptr + T - 1 + r, mask=is_late, other=0) & MASK
        row, follows = 0 * late, is_late
        tl.store(path_ptrs, 0 * late, mask=is_late)
        for d in range(1, T):
            at = tl.load(words_ptr + 2 * T - 1 + r * T + d, mask=is_late, other=0) & MASK
            wanted = (tl.load(words_ptr + at - 1, mask=is_late & (at > 0), other=0) & MASK) - OFFSET
            is_child = is_drafted[None, :] & (parent[None, :] == row[:, None]) & (token[None, :] == wanted[:, None])
            child = tl.min(tl.where(is_child, r[None, :], ROWS), 1)
            follows = follows & (d <= late_depth) & (child < ROWS)
            row = tl.where(follows, child, row)
            tl.store(path_ptrs + d, tl.where(follows & (d < late_depth), row, at), mask=is_late)  # it ends in its node
            late = tl.where(follows & (d == late_depth), -1, late)
        tl.store(token_ptrs, late, mask=is_late)
        tl.store(depth_ptrs, late_depth, mask=is_late)


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


def join_late_nodes(
    words_BX: Tensor, number_B: Tensor, joined_B: Tensor, tokens_BN: Tensor, depth_BT: Tensor, path_BTT: Tensor
) -> None:
    """See `compile.state_update.join_late_nodes`."""
    (B, X), T = words_BX.shape, depth_BT.shape[1]
    assert all(part.is_contiguous() for part in (words_BX, tokens_BN, depth_BT, path_BTT))
    sizes = {"ROWS": triton.next_power_of_2(T), "WORDS": triton.next_power_of_2(X)}
    join_late_nodes_kernel[(B,)](
        *(words_BX, number_B, joined_B, tokens_BN, depth_BT, path_BTT, T, X, LATE_SHIFT, LATE_MASK, LATE_OFFSET),
        **sizes,
        num_warps=1 if sizes["ROWS"] <= 16 else 4,
    )


def commit_round(
    root_B: Tensor,
    lengths_B: Tensor,
    active_B: Tensor,
    num_new_B: Tensor,
    tokens_BT: Tensor,
    path_BT: Tensor | None,
    drafter_feedback_BX: Tensor | None,
    logits_BTV: Tensor,
) -> Tensor:
    """See `compile.state_update.commit_round`."""
    (B, T), X = tokens_BT.shape, 0 if drafter_feedback_BX is None else drafter_feedback_BX.shape[1]
    width, num_new_B = 2 + T + (0 if path_BT is None else T) + X, num_new_B.contiguous()
    out_BW = tokens_BT.new_empty(B, width)
    parts = [None if part is None else _with_dense_rows(part) for part in (tokens_BT, path_BT, drafter_feedback_BX)]
    strides = [0 if part is None else part.stride(0) for part in parts]
    logits_BTV = logits_BTV if logits_BTV.stride(2) == 1 else logits_BTV.contiguous()
    V, size = logits_BTV.shape[2], triton.next_power_of_2(width)
    chunks = triton.next_power_of_2(triton.cdiv(V, BLOCK))  # the last ones may be empty
    rates_BTC = torch.empty(B, T, chunks, dtype=torch.int32, device=tokens_BT.device)
    rate_logits_kernel[(B, T, chunks)](
        *(logits_BTV, num_new_B, parts[1], rates_BTC, T, V, *logits_BTV.stride()[:2], strides[1]), BLOCK=BLOCK
    )
    commit_round_kernel[(B,)](
        *(root_B, lengths_B, active_B, num_new_B, *parts, rates_BTC, out_BW, T, X, width, *strides),
        CHUNKS=chunks,
        SIZE=size,
        num_warps=1 if size <= 256 else 4,
    )
    return out_BW


def _with_dense_rows(x_BX: Tensor) -> Tensor:
    return x_BX if x_BX.stride(1) == 1 else x_BX.contiguous()
