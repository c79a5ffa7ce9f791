"""The walk through draft trees, by a CPU kernel: as small tensor operations it takes 3 % of a round."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from compile.attention import Branches
from compile.native import kernel


def walk(tokens_BN: Tensor, branches: Branches, target_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the root to the child that equals the target's choice, as long as there is one (on a CPU).

    Returns (num [B], tokens [B, T], rows [B, T]): how many rows were kept, the target's choice after each, the rows.
    Behind those the last row is repeated.
    """
    B, T = target_BT.shape
    out = torch.empty(B, 1 + 2 * T, dtype=torch.int64)
    tokens_BN, target_BT = tokens_BN.contiguous(), target_BT.contiguous()
    function = kernel("walk", torch.int64, *[c_void_p] * 5, *[c_int64] * 3)
    depth_at, path_at, P = branches.words()
    function(tokens_BN.data_ptr(), depth_at, path_at, target_BT.data_ptr(), out.data_ptr(), B, T, P)
    return out[:, 0], out[:, 1 : 1 + T], out[:, 1 + T :]
