"""What is kept beside keys and values for each place of a text moves with these."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from compile.cpp_extension import kernel


def keep_places(places_BSX: Tensor, lengths_B: Tensor, path_BT: Tensor, num_B: Tensor) -> None:
    """Of the rows last written behind the lengths, those of an ascending path become the first `num` ones, in place."""
    if places_BSX.device.type == "cpu" and places_BSX.is_contiguous():
        path_BT, num_B = path_BT.contiguous(), num_B.contiguous()
        (B, S, X), T = places_BSX.shape, path_BT.shape[1]
        tensors = (part.data_ptr() for part in (places_BSX, lengths_B, path_BT, num_B))
        function = kernel("keep_places", torch.int64, *[c_void_p] * 4, *[c_int64] * 4)
        function(*tensors, B, S, T, X * places_BSX.element_size())
    else:
        keep_places_reference(places_BSX, lengths_B, path_BT, num_B)


def keep_places_reference(places_BSX: Tensor, lengths_B: Tensor, path_BT: Tensor, num_B: Tensor) -> None:
    """`keep_places` in tensor operations."""
    row_T = torch.arange(path_BT.shape[1], device=lengths_B.device)
    rows_B1 = torch.arange(len(lengths_B), device=lengths_B.device)[:, None]
    from_BT = lengths_B[:, None] + path_BT.where(row_T < num_B[:, None], row_T)
    places_BSX[rows_B1, lengths_B[:, None] + row_T] = places_BSX[rows_B1, from_BT]
