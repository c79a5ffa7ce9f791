"""Move accepted keys, values and features after the length.

Legend: B rows of the batch, S slots, T rows of a tree (the root and its nodes), X numbers of a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from functools import partial

import torch
from torch import Tensor

from compile.cpp_extension import call, kernel
from compile.kv_layout import SLOT_MULTIPLE, q8_views
from compile.op_registry import define, runs_cpp, runs_triton

_COMPACT_ARGTYPES = (c_void_p, c_int64, *[c_void_p] * 2, *[c_int64] * 3, *[c_void_p] * 3, c_int64)


def compact_slots(x_BSX: Tensor, lengths_B: Tensor, path_BT: Tensor, num_B: Tensor) -> None:
    """Move rows of ascending paths to the first slots after lengths.

    `num` [B] rows of `path` [B, T] move, in place.
    """
    if runs_cpp(x_BSX.device) and x_BSX.is_contiguous():
        (B, S, X), T = x_BSX.shape, path_BT.shape[1]
        tensors, row_bytes = (x_BSX, lengths_B, path_BT.contiguous(), num_B.contiguous()), X * x_BSX.element_size()
        call("compact_slots", torch.int64, *tensors, B, S, T, row_bytes)
    else:
        compact_slots_reference(x_BSX, lengths_B, path_BT, num_B)


def compact_slots_reference(x_BSX: Tensor, lengths_B: Tensor, path_BT: Tensor, num_B: Tensor) -> None:
    """`compact_slots` in tensor operations."""
    row_T = torch.arange(path_BT.shape[1], device=lengths_B.device)
    rows_B1 = torch.arange(len(lengths_B), device=lengths_B.device)[:, None]
    from_BT = lengths_B[:, None] + path_BT.where(row_T < num_B[:, None], row_T)
    x_BSX[rows_B1, lengths_B[:, None] + row_T] = x_BSX[rows_B1, from_BT]


def kv_compactor(
    keys: Sequence[Tensor], values: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype | None = None
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return a function of lengths, path and num that compacts KV.

    Lengths are [B], paths [B, T], numbers [B]. Rows of an ascending path, written after the lengths, become the first
    `num` of them. Keys and values of all layers, with heads of these sizes, stay at their addresses.
    `dtype` is that of the model, if they are in 8 bits.
    """
    if runs_triton(keys[0].device):
        return partial(_compact_groups, _group_by_shape((*keys, *values), (*sizes, *sizes)))
    if not runs_cpp(keys[0].device):
        return compactor_reference(keys, values, sizes)
    layers = len(keys)
    words = c_int64 * layers
    addresses = (c_int64 * (2 * layers))(*(t.data_ptr() for t in (*keys, *values)))
    heads, head_sizes = words(*(k.shape[1] for k in keys)), words(*sizes)
    q8 = keys[0].dtype == torch.int8
    batch, slots = keys[0].shape[0], keys[0].shape[2] * (SLOT_MULTIPLE if q8 else keys[0].shape[4])
    function = kernel("compact_kv", dtype if q8 else keys[0].dtype, *_COMPACT_ARGTYPES)

    def compact(lengths_B: Tensor, path_BT: Tensor, num_B: Tensor) -> None:
        path_BT, num_B = path_BT.contiguous(), num_B.contiguous()
        places = (lengths_B.data_ptr(), path_BT.data_ptr(), num_B.data_ptr())
        function(addresses, layers, heads, head_sizes, batch, slots, q8, *places, path_BT.shape[1])

    return compact


def compactor_reference(
    keys: Sequence[Tensor], values: Sequence[Tensor], sizes: Sequence[int]
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """`kv_compactor` in tensor operations, of caches that are not packed."""
    views: list[Tensor] = []
    for cache, size in zip((*keys, *values), (*sizes, *sizes), strict=True):
        views += q8_views(cache, size) if cache.dtype == torch.int8 else [cache]

    def compact(lengths_B: Tensor, path_BT: Tensor, num_B: Tensor) -> None:
        rows_B1 = torch.arange(len(lengths_B), device=lengths_B.device)[:, None]
        row_T = torch.arange(path_BT.shape[1], device=lengths_B.device)
        from_BT = lengths_B[:, None] + path_BT.where(row_T < num_B[:, None], row_T)
        for view in views:
            source, target = (
                (slots,) if view.ndim == 4 else (slots // SLOT_MULTIPLE, slots % SLOT_MULTIPLE)
                for slots in (from_BT, lengths_B[:, None] + row_T)
            )
            view[rows_B1, :, *target] = view[rows_B1, :, *source]

    return compact


def _group_by_shape(caches: Sequence[Tensor], sizes: Sequence[int]) -> list[tuple[list[Tensor], Tensor, int]]:
    """Return groups of caches of equal shapes, their addresses and head sizes."""
    groups: dict[tuple[torch.Size, int], list[Tensor]] = {}
    for cache, size in zip(caches, sizes, strict=True):
        if cache.numel():  # recurrent layers have none
            groups.setdefault((cache.shape, size), []).append(cache)
    return [(group, torch.ops.sharesd.addresses(group), size) for (_, size), group in groups.items()]


def _compact_groups(
    groups: Sequence[tuple[list[Tensor], Tensor, int]], lengths_B: Tensor, path_BT: Tensor, num_B: Tensor
) -> None:
    for group, addresses, size in groups:
        torch.ops.sharesd.compact_kv_(group, addresses, size, lengths_B, path_BT, num_B)


def _addresses(caches: Sequence[Tensor]) -> Tensor:
    """Return the addresses of tensors, int64 on their device."""
    return torch.tensor([cache.data_ptr() for cache in caches], device=caches[0].device)


define(
    "compact_kv_(Tensor(a!)[] caches, Tensor addresses, int size, Tensor lengths, Tensor path, Tensor num) -> ()",
    cuda="kv_compact:compact_kv",
    meta=lambda *_: None,
)
define(
    "addresses(Tensor[] caches) -> Tensor",
    cuda=_addresses,
    meta=lambda caches: caches[0].new_empty(len(caches), dtype=torch.int64),
)
