"""Logits to choose from, by four CUDA kernels: as tensor operations, top-p alone takes some 200 launches."""

from __future__ import annotations

import torch
from torch import Tensor

from compile.op_registry import LIBRARY, on_cuda

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
"""What each row has a number for, in this order. No temperature: 1; no truncation: V, 1 and -inf. `noise` is 0 or 1; it
and `seed`, whose 64 bits are those of an integer, mean nothing to the kernels."""


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
    """Logits [B, T, V] of bfloat16, float16 or float32 with what each row asks for, as float32 (on CUDA).

    In this order: bias (float32), penalties, temperature if `sampled`, top-k, top-p and min-p if `truncated`.

    `numbers_BF` float64, as in NUMBERS. Penalties look at tokens of `prompt_mask` (bool) and at `counts` (int32) of the
    output, to which row t adds the draft tokens that it sees: those of `seen`, or without that the first N - T + 1 + t.
    Temperatures below `cold` are applied to logits less their row's largest. Tokens that fall out are at -inf.
    """
    return torch.ops.sharesd.process_logits(
        *(logits_BTV, numbers_BF, bias_BV, prompt_mask_BV, counts_BV, draft_BN, seen_BTN),
        *(sampled, truncated, cold),
    )


def _process_cuda(*arguments) -> Tensor:
    from compile.cuda import sampling  # imports Triton, which not every machine has

    return sampling.process_logits(*arguments)


LIBRARY.define(
    "process_logits(Tensor logits, Tensor numbers, Tensor? bias, Tensor? prompt_mask, Tensor? counts, Tensor? draft, "
    "Tensor? seen, bool sampled, bool truncated, float cold) -> Tensor"
)
on_cuda("process_logits", _process_cuda)
LIBRARY.impl("process_logits", lambda x, *rest: torch.empty_like(x, dtype=torch.float32).contiguous(), "Meta")
