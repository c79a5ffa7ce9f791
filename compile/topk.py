"""The largest logits of each row, by CPU kernels that are quicker than those of torch by far."""

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


def arg_max(x: Tensor) -> Tensor:
    """Index of the largest along the last dimension, the first among equals (on a CPU). NaN never wins."""
    if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        return x.argmax(-1)
    x = x.contiguous()
    out = torch.empty(x.shape[:-1], dtype=torch.int64)
    function = kernel("arg_max", x.dtype, c_void_p, c_void_p, *[c_int64] * 3)
    function(x.data_ptr(), out.data_ptr(), out.numel(), x.shape[-1], torch.get_num_threads())
    return out
