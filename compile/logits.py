"""Logits to choose from, by a CUDA kernel: as tensor operations, top-p alone takes some 200 launches."""

from __future__ import annotations

import torch
from torch import Tensor

from compile.ops import LIBRARY


def process_logits(
    logits_BTV: Tensor,
    *,
    bias_V: Tensor | None,
    prompt_mask_BV: Tensor | None,
    counts_BV: Tensor | None,
    draft_BN: Tensor | None,
    seen_BTN: Tensor | None,
    repetition: float,
    frequency: float,
    presence: float,
    temperature: float,
    cold: bool,
    top_k: int,
    top_p: float,
    min_p: float,
) -> Tensor:
    """Logits [B, T, V] of bfloat16, float16 or float32 with all of this applied, in this order, as float32 (on CUDA).

    Penalties look at tokens of `prompt_mask` (bool) and at `counts` (int32) of the output, to which row t adds the
    draft tokens that it sees: those of `seen`, or without that the first N - T + 1 + t. With temperature 0 that is all;
    with `cold` it is applied to logits less their row's largest. Tokens that fall out are at -inf.
    """
    return torch.ops.sharesd.process_logits(
        *(logits_BTV, bias_V, prompt_mask_BV, counts_BV, draft_BN, seen_BTN),
        *(repetition, frequency, presence, temperature, cold, top_k, top_p, min_p),
    )


def _process_cuda(*arguments) -> Tensor:
    from compile.cuda import sampling  # imports Triton, which not every machine has

    return sampling.process_logits(*arguments)


LIBRARY.define(
    "process_logits(Tensor logits, Tensor? bias, Tensor? prompt_mask, Tensor? counts, Tensor? draft, Tensor? seen, "
    "float repetition, float frequency, float presence, float temperature, bool cold, int top_k, float top_p, "
    "float min_p) -> Tensor"
)
LIBRARY.impl("process_logits", _process_cuda, "CUDA")
LIBRARY.impl("process_logits", lambda x, *rest: torch.empty_like(x, dtype=torch.float32).contiguous(), "Meta")
