"""Attention over a static KV cache: write the new rows, then attend to every live slot.

Legend: B rows of the batch, T new tokens, H query heads, K key/value heads, S slots, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_double, c_int64, c_void_p
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from compile.native import kernel
from compile.ops import LIBRARY

SLOT_MULTIPLE = 32
"""The CPU kernel reads slots in blocks of this size."""
MAX_HEAD = 512
"""Largest head size of the CPU kernel."""

_SHAPE, _STRIDES = c_int64 * 8, c_int64 * 6
_ARGTYPES = (*[c_void_p] * 9, _SHAPE, _STRIDES, c_double, c_int64, c_double)

_KEEP_ARGTYPES = (c_void_p, c_int64, *[c_void_p] * 2, *[c_int64] * 2, *[c_void_p] * 3, c_int64)


class Branches(NamedTuple):
    """How new tokens that form trees see each other: each sees its own path and whatever lies below the length."""

    depth_BT: Tensor  # int64: nodes above each row on its path
    path_BTP: Tensor  # int64: their slots, counted from the length, top first, the row's own last; no more is read

    def words(self) -> tuple[int, int, int]:
        """`struct Branches` of the CPU kernels."""
        assert self.depth_BT.is_contiguous() and self.path_BTP.is_contiguous()
        return self.depth_BT.data_ptr(), self.path_BTP.data_ptr(), self.path_BTP.shape[2]


def new_kv(
    batch: int, heads: int, slots: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Zeroed keys and values [B, K, S, d] in the memory layout that `attend` wants on this device."""
    slots = -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE
    v = torch.zeros(batch, heads, slots, size, dtype=dtype, device=device)
    if device.type == "cpu":  # slots innermost: a vector holds the scores of neighbouring slots
        return torch.zeros(batch, heads, size, slots, dtype=dtype).mT, v
    return torch.zeros_like(v), v


def attend(
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    k_cache_BKSd: Tensor,
    v_cache_BKSd: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    branches: Branches | None = None,
) -> Tensor:
    """Write k and v into slots lengths..lengths+T-1 (in place) and return the attention output [B, T, H, d].

    Query t of a row sees slots <= lengths + t, of those the last `window` only (0 = all). `softcap` > 0 squashes the
    scores to softcap * tanh(score / softcap) before masking (Gemma 2). With `branches` a row is written to the last
    slot of its path, and sees slots < lengths and its path. On a CPU the result of a query is the same bits whatever T,
    S, B, the number of threads, and its place in a tree.
    """
    tensors = (q_BTHd, k_BTKd, v_BTKd, k_cache_BKSd, v_cache_BKSd, lengths_B)
    if q_BTHd.device.type == "cpu":
        return torch.ops.sharesd.attend_(*tensors, *(branches or (None, None)), scale, window, softcap)
    return attend_reference(*tensors, scale=scale, window=window, softcap=softcap, branches=branches)


def attend_reference(
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    k_cache_BKSd: Tensor,
    v_cache_BKSd: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    branches: Branches | None = None,
) -> Tensor:
    """`attend` in plain tensor operations: what runs on CUDA (Inductor fuses it), and the oracle of the CPU kernel."""
    B, T, H, d = q_BTHd.shape
    K, S = k_cache_BKSd.shape[1:3]
    place_BT = torch.arange(T, device=q_BTHd.device).expand(B, T)
    if branches is not None:
        place_BT = branches.path_BTP.gather(2, branches.depth_BT[..., None])[..., 0]
    slots_BT = lengths_B[:, None] + place_BT
    rows_B1 = torch.arange(B, device=q_BTHd.device)[:, None]
    k_cache_BKSd[rows_B1, :, slots_BT] = k_BTKd
    v_cache_BKSd[rows_B1, :, slots_BT] = v_BTKd
    slot_S = torch.arange(S, device=q_BTHd.device)
    if branches is None:
        seen_BTS = slot_S <= slots_BT[:, :, None]
        if window:
            seen_BTS = seen_BTS & (slot_S > slots_BT[:, :, None] - window)
    else:
        depth_BT, path_BTP = branches
        depth_P = torch.arange(path_BTP.shape[2], device=q_BTHd.device)
        on_path_BTP = depth_P <= depth_BT[:, :, None]
        places_BTP = (lengths_B[:, None, None] + path_BTP).where(on_path_BTP, slots_BT[:, :, None])
        depth_BTP = depth_P.where(on_path_BTP, depth_BT[:, :, None])
        position_BTS = slot_S.where(slot_S < lengths_B[:, None], -1)[:, None].repeat(1, T, 1)
        position_BTS = position_BTS.scatter(2, places_BTP, lengths_B[:, None, None] + depth_BTP)
        seen_BTS = position_BTS >= 0
        if window:
            seen_BTS &= position_BTS > (lengths_B[:, None] + depth_BT)[:, :, None] - window
    if not softcap:
        out_BHTd = torch.nn.functional.scaled_dot_product_attention(
            q_BTHd.transpose(1, 2), k_cache_BKSd, v_cache_BKSd, seen_BTS[:, None], scale=scale, enable_gqa=H != K
        )
        return out_BHTd.transpose(1, 2)
    q_BKGTd = q_BTHd.reshape(B, T, K, H // K, d).permute(0, 2, 3, 1, 4)
    wide = torch.promote_types(q_BTHd.dtype, torch.float32)
    scores_BKGTS = torch.einsum("bkgtd,bksd->bkgts", q_BKGTd.to(wide), k_cache_BKSd.to(wide)) * scale
    scores_BKGTS = softcap * torch.tanh(scores_BKGTS / softcap)
    weights_BKGTS = scores_BKGTS.masked_fill(~seen_BTS[:, None, None], float("-inf")).softmax(-1)
    out_BTKGd = torch.einsum("bkgts,bksd->btkgd", weights_BKGTS, v_cache_BKSd.to(wide))
    return out_BTKGd.reshape(B, T, H, d).to(q_BTHd.dtype)


def _attend_cpu(q, k, v, k_cache, v_cache, lengths, depth, path, scale, window, softcap):
    q, k, v = (x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous() for x in (q, k, v))
    B, T, H, d = q.shape
    K, S = k_cache.shape[1:3]
    assert d <= MAX_HEAD, f"head size is {d}"
    assert k_cache.mT.is_contiguous() and v_cache.is_contiguous() and S % SLOT_MULTIPLE == 0, "make caches with new_kv"
    depth_at, path_at, P = (None, None, 0) if path is None else Branches(depth, path).words()
    out = q.new_empty((B, T, H, d))
    (q0, q1, _, _), (k0, k1, _, _), (v0, v1, _, _) = q.stride(), k.stride(), v.stride()
    kernel("attend", q.dtype, *_ARGTYPES)(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        lengths.data_ptr(),
        out.data_ptr(),
        depth_at,
        path_at,
        _SHAPE(B, T, H, K, S, d, torch.get_num_threads(), P),
        _STRIDES(q0, q1, k0, k1, v0, v1),
        scale,
        window,
        softcap,
    )
    return out


LIBRARY.define(
    "attend_(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, "
    "Tensor? depth, Tensor? path, float scale, int window, float softcap) -> Tensor"
)
LIBRARY.impl("attend_", _attend_cpu, "CPU")
LIBRARY.impl("attend_", lambda q, *rest: q.new_empty(q.shape), "Meta")


def row_keeper(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Callable[[Tensor, Tensor, Tensor], None]:
    """A function (lengths [B], path [B, T], num [B]): of the rows last written behind the lengths, those of an
    ascending path become the first `num` ones, in place. Keys and values of all layers stay where they are.
    """
    if keys[0].device.type != "cpu":
        return partial(_keep_rows, (*keys, *values))
    layers = len(keys)
    words = c_int64 * layers
    addresses = (c_int64 * (2 * layers))(*(t.data_ptr() for t in (*keys, *values)))
    heads, sizes = words(*(k.shape[1] for k in keys)), words(*(k.shape[3] for k in keys))
    batch, slots = keys[0].shape[0], keys[0].shape[2]
    function = kernel("keep_rows", keys[0].dtype, *_KEEP_ARGTYPES)

    def keep(lengths_B: Tensor, path_BT: Tensor, num_B: Tensor) -> None:
        path_BT, num_B = path_BT.contiguous(), num_B.contiguous()
        places = (lengths_B.data_ptr(), path_BT.data_ptr(), num_B.data_ptr())
        function(addresses, layers, heads, sizes, batch, slots, *places, path_BT.shape[1])

    return keep


def _keep_rows(caches: Sequence[Tensor], lengths_B: Tensor, path_BT: Tensor, num_B: Tensor) -> None:
    rows_B1 = torch.arange(len(lengths_B), device=lengths_B.device)[:, None]
    row_T = torch.arange(path_BT.shape[1], device=lengths_B.device)
    from_BT = lengths_B[:, None] + path_BT.where(row_T < num_B[:, None], row_T)
    for cache in caches:
        cache[rows_B1, :, lengths_B[:, None] + row_T] = cache[rows_B1, :, from_BT]
