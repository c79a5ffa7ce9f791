"""Logits processors in four CUDA kernels; tensor operations need some 200 launches."""

from __future__ import annotations

import torch
from torch import Tensor

from compile.op_registry import define

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
