"""Compaction of a tree's accepted KV rows, in one launch.

Legend: B rows of the batch, T rows of a tree, L caches of equal shapes, K key/value heads, S slots, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile.cuda.kv_q8 import head_q8, move_q8, num_cache_slots, power_above


@triton.jit(do_not_specialize=["T", "S"])
def compact_kv_kernel(
    address_ptr,
    like_ptr,
    length_ptr,
    path_ptr,
    num_ptr,
    T,
    S,
    K: tl.constexpr,
    d: tl.constexpr,
    D: tl.constexpr,
    Q8: tl.constexpr,
):
    """Move one head of one cache. Grid (L, B * K).

    Rows move to lower slots only: each row is read before another overwrites it.
    """
    cache_ptr = tl.load(address_ptr + tl.program_id(0)).to(tl.pointer_type(like_ptr.dtype.element_ty))
    head, b = tl.program_id(1).to(tl.int64), tl.program_id(1) // K
    first, i = tl.load(length_ptr + b), tl.arange(0, D)
    for row in range(0, tl.load(num_ptr + b)):
        at = tl.load(path_ptr + b * T + row)
        if Q8:
            move_q8(head_q8(cache_ptr, head, S, d), first + at, first + row, d, D)
        else:
            slots_ptr = cache_ptr + (head * S + first) * d
            moved = tl.load(slots_ptr + at * d + i, mask=i < d, other=0.0)
            tl.store(slots_ptr + row * d + i, moved, mask=i < d)


def compact_kv(
    caches: Sequence[Tensor], addresses_L: Tensor, size: int, lengths_B: Tensor, path_BT: Tensor, num_B: Tensor
) -> None:
    """Run `compile.kv_compact.kv_compactor` on caches with heads of `size`."""
    (B, K), q8 = caches[0].shape[:2], caches[0].dtype == torch.int8
    places = (lengths_B, path_BT.contiguous(), num_B.contiguous())
    compact_kv_kernel[(len(caches), B * K)](
        *(addresses_L, caches[0], *places, path_BT.shape[1], num_cache_slots(caches[0])),
        **{"K": K, "d": size, "D": power_above(size, q8=q8), "Q8": q8},
        num_warps=1,
    )
