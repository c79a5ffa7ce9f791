"""Norms, rotary embedding and writing of new KV in one launch.

Legend as in `compile.cuda.attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    if PDL == 2:  # see `attention_options`
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    if PDL == 1:
        gdc_launch_dependents()
    token, head = tl.program_id(0), tl.program_id(1)
    b, t = (token // T).to(tl.int64), token % T
    place, ahead = t, t
    if P > 0:
        depth = tl.load(depth_ptr + token)
        place = tl.load(path_ptr + token.to(tl.int64) * P + depth).to(tl.int32)
        ahead = depth.to(tl.int32)
    length = tl.load(length_ptr + b)
    slot = length + place
    writes = (slot >= 0) & (slot < S)  # padding may exceed the cache
    cache_ptr, kept = k_cache_ptr, b * K + head - H
    if head < H:
        source = q_ptr + b * q_b + t * q_t + head * d
        writes = slot >= 0
    elif head < H + K:
        source = k_ptr + b * k_b + t * k_t + (head - H) * d
    else:
        source = v_ptr + b * v_b + t * v_t + (head - H - K) * d
        cache_ptr, kept = v_cache_ptr, kept - K
    i = tl.arange(0, D)
    x = tl.load(source + i, mask=i < d, other=0.0)
    position = tl.maximum(tl.minimum(length + ahead, N - 1), 0)
    if head < H + K:
        root = 0.0
        if q_norm_ptr is not None:
            wide = x.to(tl.float32)
            root = tl.rsqrt(tl.sum(wide * wide, 0) / d + eps)
            x = _normalised(x, root, q_norm_ptr, k_norm_ptr, head < H, i, i < d, GEMMA)
        if R > 0:
            turned = i < 2 * R
            across = tl.where(i < R, i + R, i - R)
            other = tl.load(source + across, mask=turned, other=0.0)
            if q_norm_ptr is not None:
                other = _normalised(other, root, q_norm_ptr, k_norm_ptr, head < H, across, turned, GEMMA)
            angle = position * R + tl.where(i < R, i, i - R)
            cos = tl.load(cos_ptr + angle, mask=turned, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr + angle, mask=turned, other=0.0).to(tl.float32)
            straight = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
            crossed = (other.to(tl.float32) * sin).to(x.dtype).to(tl.float32)
            y = tl.where(i < R, straight - crossed, straight + crossed)
            x = tl.where(turned, y.to(x.dtype), x)
    if factor_ptr is not None and head < H:
        x = (x.to(tl.float32) * tl.load(factor_ptr + position).to(tl.float32)).to(x.dtype)
    out_ptr += (token.to(tl.int64) * H + head) * d
    if not Q8:
        target = tl.where(head < H, out_ptr, cache_ptr + (kept * S + slot) * d)
        tl.store(target + i, x, mask=(i < d) & writes)
    elif head < H:
        tl.store(out_ptr + i, x, mask=(i < d) & writes)
    else:
        store_q8(head_q8(cache_ptr, kept, S, d), slot, x, writes, d, D)


@triton.jit
def _normalised(x, root, q_norm_ptr, k_norm_ptr, is_query, at, is_valid, GEMMA: tl.constexpr):
    """Normalised entries `at` of a head, times their weights."""
    weight = tl.load(tl.where(is_query, q_norm_ptr, k_norm_ptr) + at, mask=is_valid, other=0.0).to(tl.float32)
    wide = x.to(tl.float32) * root
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
    cos, sin, N, R = turned, turned, 0, 0
    if cos_Nr is not None and sin_Nr is not None:
        cos, sin, (N, R) = cos_Nr.contiguous(), sin_Nr.contiguous(), cos_Nr.shape
    if factors_N is not None:
        assert N in (0, len(factors_N)), "factors and angles have other numbers of positions"
        N = len(factors_N)
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
