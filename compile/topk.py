"""Largest logits and top-p of each row, by our kernels."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from compile.cpp_extension import kernel
from compile.op_registry import define_for_triton, runs_cpp, runs_triton


def top_k(logits_RV: Tensor, k: int) -> Tensor:
    """Return indices [R, k] of the largest, lower index among equals."""
    if not runs_cpp(logits_RV.device):
        return logits_RV.topk(k).indices
    logits_RV = logits_RV.contiguous()
    R, V = logits_RV.shape
    out_Rk = torch.empty(R, k, dtype=torch.int64)
    function = kernel("top_k", logits_RV.dtype, c_void_p, c_void_p, *[c_int64] * 4)
    function(logits_RV.data_ptr(), out_Rk.data_ptr(), R, V, k, torch.get_num_threads())
    return out_Rk


def top_logp(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return `top_k`, and log probabilities under each row's softmax.

    These are float32 (float64 stays).
    """
    if not runs_cpp(logits_RV.device):
        return top_logp_reference(logits_RV, k)
    logits_RV = logits_RV.contiguous()
    R, V = logits_RV.shape
    assert k <= V, f"{k} of {V}"
    out_Rk = torch.empty(R, k, dtype=torch.int64)
    logp_Rk = torch.empty(R, k, dtype=torch.float64 if logits_RV.dtype == torch.float64 else torch.float32)
    function = kernel("top_logp", logits_RV.dtype, *[c_void_p] * 3, *[c_int64] * 4)
    function(logits_RV.data_ptr(), out_Rk.data_ptr(), logp_Rk.data_ptr(), R, V, k, torch.get_num_threads())
    return out_Rk, logp_Rk


def top_logp_reference(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top_logp` in tensor operations."""
    best_Rk, wide_RV = logits_RV.topk(k).indices, logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    return best_Rk, wide_RV.gather(-1, best_Rk) - wide_RV.logsumexp(-1, keepdim=True)


def top_p(logits_RV: Tensor, p_R: Tensor) -> Tensor:
    """Return logits with -inf outside the top p, by the CPU kernel.

    `p` (float64) is the share of the mass, as in `sharesd.sampling.logits_processors`.
    """
    logits_RV, out_RV = logits_RV.contiguous(), torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
    R, V = logits_RV.shape
    assert p_R.dtype == torch.float64 and p_R.is_contiguous() and len(p_R) == R
    function = kernel("top_p", logits_RV.dtype, *[c_void_p] * 3, *[c_int64] * 3)
    function(logits_RV.data_ptr(), p_R.data_ptr(), out_RV.data_ptr(), R, V, torch.get_num_threads())
    return out_RV


def arg_max(x: Tensor) -> Tensor:
    """Return the last dimension's index of the largest, first among equals.

    NaN is never the largest in our kernels.
    """
    if runs_triton(x.device) and x.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return torch.ops.sharesd.arg_max(x)
    if not runs_cpp(x.device) or x.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        return x.argmax(-1)
    x = x.contiguous()
    out = torch.empty(x.shape[:-1], dtype=torch.int64)
    function = kernel("arg_max", x.dtype, c_void_p, c_void_p, *[c_int64] * 3)
    function(x.data_ptr(), out.data_ptr(), out.numel(), x.shape[-1], torch.get_num_threads())
    return out


def _arg_max(x: Tensor) -> Tensor:
    from compile.cuda.arg_max import arg_max_rows  # imports Triton, which not every machine has

    return arg_max_rows(x.reshape(-1, x.shape[-1])).view(x.shape[:-1])


define_for_triton("arg_max(Tensor x) -> Tensor", _arg_max, lambda x: x.new_empty(x.shape[:-1], dtype=torch.int64))
