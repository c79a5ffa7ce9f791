"""Logits of each row, by our kernels: the largest, top-p, and on CUDA all processors in four launches, not 200."""

from __future__ import annotations

import torch
from torch import Tensor

from compile.cpp_extension import call
from compile.op_registry import define, define_for_triton, runs_cpp, runs_triton


def top_k(logits_RV: Tensor, k: int) -> Tensor:
    """Return indices [R, k] of the largest, lower index among equals."""
    if not runs_cpp(logits_RV.device):
        return logits_RV.topk(k).indices
    logits_RV = logits_RV.contiguous()
    R, V = logits_RV.shape
    out_Rk = torch.empty(R, k, dtype=torch.int64)
    call("top_k", logits_RV.dtype, logits_RV, out_Rk, R, V, k, torch.get_num_threads())
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
    call("top_logp", logits_RV.dtype, logits_RV, out_Rk, logp_Rk, R, V, k, torch.get_num_threads())
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
    call("top_p", logits_RV.dtype, logits_RV, p_R, out_RV, R, V, torch.get_num_threads())
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
    call("arg_max", x.dtype, x, out, out.numel(), x.shape[-1], torch.get_num_threads())
    return out


def _arg_max(x: Tensor) -> Tensor:
    from compile.cuda.arg_max import arg_max_rows  # imports Triton, which not every machine has

    return arg_max_rows(x.reshape(-1, x.shape[-1])).view(x.shape[:-1])


define_for_triton("arg_max(Tensor x) -> Tensor", _arg_max, lambda x: x.new_empty(x.shape[:-1], dtype=torch.int64))


NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "log_min_p",
    "repetition",
    "frequency",
    "presence",
    "noise",
    "seed",
)
"""Numbers of each row, in this order.

No temperature is 1; no truncation is V, 1 and -inf. Kernels ignore `noise`, 0 or 1, and `seed`, whose 64 bits are those
of an integer.
"""


def process_logits(
    logits_BTV: Tensor,
    numbers_BF: Tensor,
    *,
    bias_BV: Tensor | None,
    prompt_mask_BV: Tensor | None,
    counts_BV: Tensor | None,
    draft_BN: Tensor | None,
    seen_BTN: Tensor | None,
    sampled: bool,
    truncated: bool,
    cold: float,
) -> Tensor:
    """Apply each row's parameters to logits, in float32, on CUDA.

    Logits are [B, T, V]. In this order: bias (float32), penalties, temperature if `sampled`, top-k, top-p and min-p if
    `truncated`.

    `numbers_BF` float64, as in NUMBERS. Penalties count tokens of `prompt_mask` (bool) and `counts` (int32) of the
    output, and row t adds the draft tokens on its path: those of `seen`, or without it the first N - T + 1 + t.
    Temperatures below `cold` divide logits less their row's largest. Truncated tokens are at -inf.
    """
    return torch.ops.sharesd.process_logits(
        *(logits_BTV, numbers_BF, bias_BV, prompt_mask_BV, counts_BV, draft_BN, seen_BTN),
        *(sampled, truncated, cold),
    )


define(
    "process_logits(Tensor logits, Tensor numbers, Tensor? bias, Tensor? prompt_mask, Tensor? counts, Tensor? draft, "
    "Tensor? seen, bool sampled, bool truncated, float cold) -> Tensor",
    cuda="sampling:process_logits",
    meta=lambda x, *rest: torch.empty_like(x, dtype=torch.float32).contiguous(),
)
