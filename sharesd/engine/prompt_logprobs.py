"""Log-probabilities of a prompt's tokens, from the passes that read it.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sharesd import sampling
from sharesd.engine.request import Request

MOST_ROWS = 128
"""Tokens of a prompt that are read at once where its logits are wanted, if they may be cut anywhere."""
BLOCK = 32
"""Rows whose logits are widened at once."""


def score(request: Request, logits_RV: Tensor) -> None:
    """Take the logits behind the next R tokens of the request's prompt. The last token's say nothing of the prompt."""
    found, top = request.prompt_logprobs, request.prompt_top_logprobs
    assert found is not None
    for logits_1RV in logits_RV[None].split(BLOCK, 1):
        begin = 1 + len(found)
        tokens_1R = torch.tensor([request.prompt_ids[begin : begin + logits_1RV.shape[1]]], device=logits_RV.device)
        logits_1RV = logits_1RV[:, : tokens_1R.shape[1]]
        if not tokens_1R.numel():
            return
        found += sampling.logprobs_of(logits_1RV, tokens_1R)[0].tolist()
        if top is not None:
            parts = sampling.top_logprobs_of(logits_1RV, request.params.top_logprobs)
            top += [list(zip(*row, strict=True)) for row in zip(*(part[0].tolist() for part in parts), strict=True)]
