"""The largest logits of each row, by a CPU kernel that is quicker than sorting by far."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from compile.native import kernel


def top_k(logits_RV: Tensor, k: int) -> Tensor:
    """Indices [R, k] int64 of the k largest, largest first; among equals the lower index first (on a CPU)."""
    if logits_RV.device.type != "cpu":
        return logits_RV.topk(k).indices
    logits_RV = logits_RV.contiguous()
    R, V = logits_RV.shape
    out_Rk = torch.empty(R, k, dtype=torch.int64)
    function = kernel("top_k", logits_RV.dtype, c_void_p, c_void_p, *[c_int64] * 4)
    function(logits_RV.data_ptr(), out_Rk.data_ptr(), R, V, k, torch.get_num_threads())
    return out_Rk
