"""Writing of keys and values into caches that are read whole.

Legend as in `compile.attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile.kv_layout import SLOT_MULTIPLE, unpack_q8, write_slots
from compile.op_registry import define_for_triton, runs_triton


def append_kv(
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths_B: Tensor,
    slots_BT: Tensor,
    tree: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Write to slots; return the cache's numbers [B, K, S, d].

    `slots` are those after lengths, or with `tree` the last of paths. Caches are not packed. Numbers of 8 bits are a
    copy: 0, or masked after the new ones.
    """
    is_q8 = k_cache.dtype == torch.int8
    if is_q8 and runs_triton(k_cache.device):
        return torch.ops.sharesd.append_q8_(k_BTKd, v_BTKd, k_cache, v_cache, lengths_B, *(tree or (None, None)))
    write_slots(k_cache, k_BTKd, slots_BT)
    write_slots(v_cache, v_BTKd, slots_BT)
    return unpack_q8(k_cache, v_cache, k_BTKd.shape[3], k_BTKd.dtype, plain=True) if is_q8 else (k_cache, v_cache)


def _append_triton(
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths_B: Tensor,
    depth_BT: Tensor | None,
    path_BTP: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from compile.cuda.kv_q8 import expand_kv  # imports Triton, which not every machine has
    from compile.cuda.kv_write import write_new_kv

    (_, T, _, d), dtype = k_BTKd.shape, k_BTKd.dtype
    k, v = (x if x.stride()[2:] == (d, 1) else x.contiguous() for x in (k_BTKd, v_BTKd))
    depth, path, P = lengths_B, lengths_B, 0
    if depth_BT is not None and path_BTP is not None:
        depth, path, P = depth_BT.contiguous(), path_BTP.contiguous(), path_BTP.shape[2]
    write_new_kv(k[:, :, :0], k, v, None, None, k_cache, v_cache, lengths_B, depth, path, P, (None, None, 0.0, False))
    return expand_kv(k_cache, v_cache, lengths_B, T, d, dtype)


def _append_meta(k_BTKd: Tensor, v_BTKd: Tensor, k_cache: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
    B, K, blocks, _ = k_cache.shape
    k_BKSd, v_BKSd = (k_BTKd.new_empty(B, K, blocks * SLOT_MULTIPLE, k_BTKd.shape[3]) for _ in range(2))
    return k_BKSd, v_BKSd


define_for_triton(
    "append_q8_(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, Tensor? depth, "
    "Tensor? path) -> (Tensor, Tensor)",
    _append_triton,
    _append_meta,
)
