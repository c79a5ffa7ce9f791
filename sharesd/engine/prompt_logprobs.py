"""Log-probabilities of a prompt's tokens, from its prefill passes.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile.state_update import count_finite
from sharesd import sampling
from sharesd.engine.request import Request

MAX_CHUNK = 128
"""Prompt tokens per chunk if logits are requested and cuts are free."""
ROWS_AT_ONCE = 32
"""Rows whose logits are widened at once."""


def record_prompt_logprobs(request: Request, logits_RV: Tensor) -> None:
    """Append log-probabilities of the prompt's next tokens, from the logits before them."""
    found, top = request.prompt_logprobs, request.prompt_top_logprobs
    assert found is not None
    for logits_1RV in logits_RV[None].split(ROWS_AT_ONCE, 1):
        begin = 1 + len(found)
        tokens_1R = torch.tensor([request.prompt_ids[begin : begin + logits_1RV.shape[1]]], device=logits_RV.device)
        logits_1RV = logits_1RV[:, : tokens_1R.shape[1]]
        num_tokens = tokens_1R.shape[1]
        if not num_tokens:
            return
        num_finite = int(count_finite(logits_1RV, None, torch.tensor([num_tokens], device=logits_RV.device)))
        if num_finite < num_tokens:
            request.bad_position = request.bad_position or begin + num_finite
        found += sampling.logprobs_of(logits_1RV, tokens_1R)[0].tolist()
        if top is not None:
            parts = sampling.top_logprobs_of(logits_1RV, request.params.top_logprobs)
            top += [list(zip(*row, strict=True)) for row in zip(*(part[0].tolist() for part in parts), strict=True)]
