"""Norms, rotary embedding and writing of new KV in one launch.

Legend as in `compile.cuda.attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile.cuda.dependent_launch import wait_for_predecessor
from compile.cuda.kv_q8 import head_q8, num_cache_slots, power_above, store_q8
from compile.cuda.pdl import attention_options

# One binary serves all steps: values that differ between them must not make another.
_UNALIGNED = ["length_ptr", "depth_ptr", "path_ptr"]
_INTS = ["T", "S", "P", "N", "q_b", "q_t", "k_b", "k_t", "v_b", "v_t"]


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def norm_rotate_write(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,  # [N, R]
    sin_ptr,
    factor_ptr,  # [N] or None
    q_norm_ptr,  # [d] or None
    k_norm_ptr,
    k_cache_ptr,
    v_cache_ptr,
    length_ptr,
    depth_ptr,
    path_ptr,
    out_ptr,
    T,
    S,
    P,
    N,
    q_b,
    q_t,
    k_b,
    k_t,
    v_b,
    v_t,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    d: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    GEMMA: tl.constexpr,
    Q8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write one head of one new token.

    Grid (B * T, H + 2K). No rotation if R = 0. Rounds as the composition of tensor operations.
    """
    wait_for_predecessor(PDL)
    token, head = tl.program_id(0), tl.program_id(1)
    b, t = (token // T).to(tl.int64), token % T
    place, ahead = t, t
    if P > 0:
        depth = tl.load(depth_ptr + token)
        place = tl.load(path_ptr + token.to(tl.int64) * P + depth).to(tl.int32)
        ahead = depth.to(tl.int32)
    length = tl.load(length_ptr + b)
    slot = length + place
    writes = (length >= 0) & (slot < S)  # padding may exceed the cache
    cache_ptr, kept = k_cache_ptr, b * K + head - H
    if head < H:
        source = q_ptr + b * q_b + t * q_t + head * d
        writes = length >= 0
    elif head < H + K:
        source = k_ptr + b * k_b + t * k_t + (head - H) * d
    else:
        source = v_ptr + b * v_b + t * v_t + (head - H - K) * d
        cache_ptr, kept = v_cache_ptr, kept - K
    position = length + ahead
    if head < H + K:
        norm_ptr = None
        if q_norm_ptr is not None:
            norm_ptr = tl.where(head < H, q_norm_ptr, k_norm_ptr)
        one = tl.arange(0, 1)
        x_1D = turned_heads(
            source + one, one == 0, position + one, norm_ptr, cos_ptr, sin_ptr, N, eps, 1, d, D, R, GEMMA
        )
        x = tl.reshape(x_1D, (D,))
    else:
        x = tl.load(source + tl.arange(0, D), mask=tl.arange(0, D) < d, other=0.0)
    if factor_ptr is not None and head < H:
        factor = tl.load(factor_ptr + known_position(position, N)).to(tl.float32)
        x = (x.to(tl.float32) * factor).to(x.dtype)
    i = tl.arange(0, D)
    out_ptr += (token.to(tl.int64) * H + head) * d
    if not Q8:
        target = tl.where(head < H, out_ptr, cache_ptr + (kept * S + slot) * d)
        tl.store(target + i, x, mask=(i < d) & writes)
    elif head < H:
        tl.store(out_ptr + i, x, mask=(i < d) & writes)
    else:
        store_q8(head_q8(cache_ptr, kept, S, d), slot, x, writes, d, D)


@triton.jit
def turned_heads(
    source_ptr, is_valid, position, norm_ptr, cos_ptr, sin_ptr, N, eps,
    NUM: tl.constexpr, d: tl.constexpr, D: tl.constexpr, R: tl.constexpr, GEMMA: tl.constexpr,
):  # fmt: skip
    """Heads [NUM, D] from their first numbers on, normalised if there is a norm, and rotated to their positions.

    Bits do not depend on NUM, or on how numbers lie in registers: the sum of squares is a tree of its own.
    """
    i = tl.arange(0, D)
    x = tl.load(source_ptr[:, None] + i[None, :], mask=is_valid[:, None] & (i < d)[None, :], other=0.0)
    root = tl.zeros((NUM,), tl.float32)
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        root = tl.rsqrt(_sum_of_heads(wide * wide, NUM, D) / d + eps)
        x = _normalised(x, root, norm_ptr, i, i < d, GEMMA)
    if R > 0:
        turned = i < 2 * R
        across = tl.where(i < R, i + R, i - R)
        is_turned = is_valid[:, None] & turned[None, :]
        other = tl.load(source_ptr[:, None] + across[None, :], mask=is_turned, other=0.0)
        if norm_ptr is not None:
            other = _normalised(other, root, norm_ptr, across, turned, GEMMA)
        angle = known_position(position, N)[:, None] * R + tl.where(i < R, i, i - R)[None, :]
        cos = tl.load(cos_ptr + angle, mask=is_turned, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=is_turned, other=0.0).to(tl.float32)
        straight = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
        crossed = (other.to(tl.float32) * sin).to(x.dtype).to(tl.float32)
        y = tl.where((i < R)[None, :], straight - crossed, straight + crossed)
        x = tl.where(turned[None, :], y.to(x.dtype), x)
    return x


@triton.jit
def known_position(position, N):
    """The nearest position that has an angle or a factor; padding may be outside."""
    return tl.maximum(tl.minimum(position, N - 1), 0)


@triton.jit
def _sum_of_heads(x, NUM: tl.constexpr, D: tl.constexpr):
    """Sums [NUM] over D numbers, halves added to each other: one order for every layout."""
    for level in tl.static_range(D.bit_length() - 1):
        x = tl.sum(tl.reshape(x, (NUM, 2, D >> (level + 1))), 1)
    return tl.reshape(x, (NUM,))


@triton.jit
def _normalised(x, root, norm_ptr, at, is_valid, GEMMA: tl.constexpr):
    """Normalised entries `at` of heads, times their weights."""
    weight = tl.load(norm_ptr + at, mask=is_valid, other=0.0).to(tl.float32)[None, :]
    wide = x.to(tl.float32) * root[:, None]
    if GEMMA:
        return (wide * weight).to(x.dtype)
    return (wide.to(x.dtype).to(tl.float32) * weight).to(x.dtype)


def write_new_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_Nr: Tensor | None,
    sin_Nr: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths_B: Tensor,
    depth: Tensor,
    path: Tensor,
    P: int,
    norms: tuple[Tensor | None, Tensor | None, float, bool],
    factors_N: Tensor | None = None,
) -> Tensor:
    """Return normalised and rotated queries, times their positions' factors; write new keys and values.

    `norms` are the weights of queries and keys, epsilon, and True if they are Gemma's.
    """
    (B, T, H, d), K, q8 = q.shape, k_cache.shape[1], k_cache.dtype == torch.int8
    q_norm_d, k_norm_d, eps, gemma = norms
    turned = q.new_empty((B, T, H, d))
    cos, sin, N, R = angles(q, cos_Nr, sin_Nr, factors_N)
    S = num_cache_slots(k_cache)
    norm_rotate_write[(B * T, H + 2 * K)](
        *(q, k, v, cos, sin, factors_N, q_norm_d, k_norm_d, k_cache, v_cache, lengths_B, depth, path, turned),
        *(T, S, P, N, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], eps),
        **{"H": H, "K": K, "d": d, "D": power_above(d, q8=q8), "R": R, "GEMMA": gemma, "Q8": q8},
        **attention_options(q.device),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return turned


def angles(
    q: Tensor, cos_Nr: Tensor | None, sin_Nr: Tensor | None, factors_N: Tensor | None
) -> tuple[Tensor, Tensor, int, int]:
    """Return cosines, sines (any tensor without them), the number of positions that have some or a factor, and R."""
    cos, sin, N, R = q, q, 0, 0
    if cos_Nr is not None and sin_Nr is not None:
        cos, sin, (N, R) = cos_Nr.contiguous(), sin_Nr.contiguous(), cos_Nr.shape
    if factors_N is not None:
        assert N in (0, len(factors_N)), "factors and angles have other numbers of positions"
        N = len(factors_N)
    return cos, sin, N, R
