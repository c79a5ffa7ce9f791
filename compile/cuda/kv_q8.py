"""KV in 8 bits on GPUs: quantizing, reading and moving slots.

Slots of a head are blocks of 32: codes [32, d], then scales [G, 32] of float32 (see `compile.kv_layout`). Codes and
scales have the bits of the CPU kernel's.

Legend as in `compile.cuda.attention`; G groups of a head, D at least GROUP, W bytes of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile.kv_layout import GROUP as GROUP_SIZE
from compile.kv_layout import MIN_SIZE as LEAST_SIZE
from compile.kv_layout import SLOT_MULTIPLE

BLOCK = tl.constexpr(SLOT_MULTIPLE)
GROUP = tl.constexpr(GROUP_SIZE)
MIN_SIZE = tl.constexpr(LEAST_SIZE)
MAX_FINITE = tl.constexpr(torch.finfo(torch.float32).max)
ROUNDING = tl.constexpr(1.5 * 2.0**23)
"""Adding and subtracting it rounds small numbers to integers, halves to even."""


@triton.jit
def head_q8(cache_ptr, head, S, d: tl.constexpr):
    """Return the first slot of a head, int64 of all rows."""
    W: tl.constexpr = d + 4 * ((d + GROUP - 1) // GROUP)
    return cache_ptr + head * (S // BLOCK) * (BLOCK * W)


@triton.jit
def _places(head_ptr, slot, d: tl.constexpr):
    """Return pointers to codes and scales of slots."""
    W: tl.constexpr = d + 4 * ((d + GROUP - 1) // GROUP)
    scale_ptr = head_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    codes_ptr = head_ptr + slot // BLOCK * (BLOCK * W) + slot % BLOCK * d
    return codes_ptr, scale_ptr + slot // BLOCK * (BLOCK * W // 4) + BLOCK * d // 4 + slot % BLOCK


@triton.jit
def load_q8(head_ptr, slot, is_valid, d: tl.constexpr, D: tl.constexpr):
    """Return numbers [slots, D] in float32; 0 where not valid."""
    codes_ptr, scale_ptr = _places(head_ptr, slot, d)
    i, g = tl.arange(0, D), tl.arange(0, D // GROUP)
    codes = tl.load(codes_ptr[:, None] + i[None, :], mask=is_valid[:, None] & (i < d)[None, :], other=0)
    is_group = is_valid[:, None] & (g * GROUP < d)[None, :]
    scales = tl.load(scale_ptr[:, None] + g[None, :] * BLOCK, mask=is_group, other=0.0)
    groups = tl.reshape(codes.to(tl.float32), (slot.shape[0], D // GROUP, GROUP))
    return tl.reshape(groups * scales[:, :, None], (slot.shape[0], D))


@triton.jit
def store_q8(head_ptr, slot, x, writes, d: tl.constexpr, D: tl.constexpr):
    """Quantize a token's head [D] into a slot, as `compile.kv_layout.quantize_kv`."""
    codes_ptr, scale_ptr = _places(head_ptr, slot, d)
    i, g = tl.arange(0, D), tl.arange(0, D // GROUP)
    groups = tl.reshape(tl.where(i < d, x.to(tl.float32), 0.0), (D // GROUP, GROUP))
    size = tl.abs(groups)
    is_finite = tl.min((size <= MAX_FINITE).to(tl.int32), 1) > 0
    largest = tl.max(tl.where(size <= MAX_FINITE, size, 0.0), 1)
    is_zero = (largest < MIN_SIZE) | (is_finite == 0)
    divisor = tl.where(is_zero, 1.0, largest)
    inverse = tl.div_rn(tl.full((D // GROUP,), 127.0, tl.float32), divisor)
    codes = tl.where(is_zero[:, None], 0.0, groups * inverse[:, None])
    codes = ((codes + ROUNDING) - ROUNDING).to(tl.int8)
    scale = tl.where(is_zero, 0.0, tl.div_rn(largest, tl.full((D // GROUP,), 127.0, tl.float32)))
    scale = tl.where(is_finite, scale, float("nan"))
    tl.store(codes_ptr + i, tl.reshape(codes, (D,)), mask=(i < d) & writes)
    tl.store(scale_ptr + g * BLOCK, scale, mask=(g * GROUP < d) & writes)


@triton.jit
def move_q8(head_ptr, source, slot, d: tl.constexpr, D: tl.constexpr):
    """Copy a token's codes and scales to another slot."""
    i, g = tl.arange(0, D), tl.arange(0, D // GROUP)
    from_codes_ptr, from_scale_ptr = _places(head_ptr, source, d)
    codes_ptr, scale_ptr = _places(head_ptr, slot, d)
    codes = tl.load(from_codes_ptr + i, mask=i < d, other=0)
    scales = tl.load(from_scale_ptr + g * BLOCK, mask=g * GROUP < d, other=0.0)
    tl.store(codes_ptr + i, codes, mask=i < d)
    tl.store(scale_ptr + g * BLOCK, scales, mask=g * GROUP < d)


@triton.jit(do_not_specialize=["T", "S", "num_slots"], do_not_specialize_on_alignment=["length_ptr"])
def expand_kernel(
    k_cache_ptr,
    v_cache_ptr,
    length_ptr,
    k_ptr,
    v_ptr,
    T,
    S,
    num_slots,
    K: tl.constexpr,
    d: tl.constexpr,
    D: tl.constexpr,
):
    """Write numbers of a block's slots; 0 after the last token.

    Grid (num_slots / BLOCK, B * K). Heads of the cache have S slots, those of the output `num_slots`.
    """
    head = tl.program_id(1).to(tl.int64)
    slot, i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    is_valid = slot < tl.load(length_ptr + tl.program_id(1) // K) + T
    to = (head * num_slots + slot)[:, None] * d + i[None, :]
    keys = load_q8(head_q8(k_cache_ptr, head, S, d), slot, is_valid, d, D)
    tl.store(k_ptr + to, keys.to(k_ptr.dtype.element_ty), mask=(i < d)[None, :])
    values = load_q8(head_q8(v_cache_ptr, head, S, d), slot, is_valid, d, D)
    tl.store(v_ptr + to, values.to(v_ptr.dtype.element_ty), mask=(i < d)[None, :])


def expand_kv(
    k_cache: Tensor, v_cache: Tensor, lengths_B: Tensor, T: int, d: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return all numbers [B, K, S, d]; 0 after T new ones."""
    (B, K, blocks, _), num_slots = k_cache.shape, k_cache.shape[2] * SLOT_MULTIPLE
    k_BKSd, v_BKSd = (k_cache.new_empty((B, K, num_slots, d), dtype=dtype) for _ in range(2))
    expand_kernel[(blocks, B * K)](
        *(k_cache, v_cache, lengths_B, k_BKSd, v_BKSd, T, num_cache_slots(k_cache), num_slots),
        **{"K": K, "d": d, "D": power_above(d, q8=True)},
        num_warps=4,
    )
    return k_BKSd, v_BKSd


def num_cache_slots(cache: Tensor) -> int:
    """Return the slots of a cache.

    A cache in 8 bits may be a view of the first slots of another one, whose number counts.
    """
    if cache.dtype != torch.int8:
        return cache.shape[2]
    return cache.stride(1) // (cache.shape[3] // SLOT_MULTIPLE)


def power_above(d: int, *, q8: bool) -> int:
    """Return D, the lanes that hold a head."""
    return max(GROUP_SIZE if q8 else 16, triton.next_power_of_2(d))
