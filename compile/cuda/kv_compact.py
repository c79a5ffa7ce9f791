"""Compaction of a tree's accepted KV rows, in one launch.

Legend: B rows of the batch, T rows of a tree, L caches of equal shapes, K key/value heads, S slots, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["T", "S"])
def compact_kv_kernel(
    address_ptr, like_ptr, length_ptr, path_ptr, num_ptr, T, S, K: tl.constexpr, d: tl.constexpr, D: tl.constexpr
):
    """Move one head of one cache. Grid (L, B * K).

    Rows move to lower slots only: each row is read before another overwrites it.
    """
    cache_ptr = tl.load(address_ptr + tl.program_id(0)).to(tl.pointer_type(like_ptr.dtype.element_ty))
    b = tl.program_id(1) // K
    cache_ptr += (tl.program_id(1).to(tl.int64) * S + tl.load(length_ptr + b)) * d
    i = tl.arange(0, D)
    for row in range(0, tl.load(num_ptr + b)):
        at = tl.load(path_ptr + b * T + row)
        moved = tl.load(cache_ptr + at * d + i, mask=i < d, other=0.0)
        tl.store(cache_ptr + row * d + i, moved, mask=i < d)


def compact_kv(
    caches: Sequence[Tensor], addresses_L: Tensor, lengths_B: Tensor, path_BT: Tensor, num_B: Tensor
) -> None:
    """See `compile.kv_compact.kv_compactor`; `addresses` are those of caches [B, K, S, d]."""
    B, K, S, d = caches[0].shape
    D = triton.next_power_of_2(d)
    places = (lengths_B, path_BT.contiguous(), num_B.contiguous())
    compact_kv_kernel[(len(caches), B * K)](
        addresses_L, caches[0], *places, path_BT.shape[1], S, K=K, d=d, D=D, num_warps=1
    )
