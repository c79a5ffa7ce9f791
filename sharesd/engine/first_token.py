"""First token after a prompt, which becomes the row's root.

Legend: V vocabulary, W words of 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile.state_update import count_finite
from sharesd import sampling
from sharesd.engine.grammar_mask import compute_grammar_mask
from sharesd.engine.output_processor import Tokens, top_logprobs
from sharesd.engine.request import Request
from sharesd.sampling.sampler import Sampler
from sharesd.speculation.draft_tree import DraftTree


def sample_first(request: Request, sampler: Sampler, logits_1V: Tensor, length_1: Tensor, root_1: Tensor) -> Tokens:
    """Sample a prompt's first token into `root`.

    The sampler is for its row alone.
    """
    params = request.params
    if params.max_new_tokens == 0:
        return Tokens([], [], [], [], [] if params.top_logprobs else None)
    mask_11W = None
    if request.matcher is not None:
        assert request.row is not None
        no_draft = DraftTree(torch.zeros(1, 0, dtype=torch.int64))
        mask_11W = compute_grammar_mask(no_draft, [request], request.row, sampler.vocab_size)[0].to(logits_1V.device)
    chosen = sampler.first(logits_1V, length_1, mask_11W)
    token_1 = chosen.tokens[:, 0]
    sampler.commit(chosen.tokens, chosen.num_new)
    root_1.copy_(token_1)
    token, num_finite, num_allowed = pack_first(token_1, logits_1V, chosen.num_allowed).tolist()
    if not num_finite or not num_allowed:
        return Tokens([], [], [], cut="none_allowed" if num_finite else "not_numbers")
    logprobs = top = None
    if params.logprobs:
        logprobs = sampling.logprobs_of(logits_1V[:, None], token_1[:, None])[0].tolist()
    if params.top_logprobs:
        parts = sampling.top_logprobs_of(logits_1V[:, None], params.top_logprobs)
        top = top_logprobs(request, *(part[0].tolist() for part in parts))
    return Tokens([token], ["target"], [None], logprobs, top)


def pack_first(token_1: Tensor, logits_1V: Tensor, num_allowed_1: Tensor | None) -> Tensor:
    """Return the token, 1 if its logits are numbers, and 1 if it is allowed.

    The host thus reads all at once.
    """
    one_1 = torch.ones_like(token_1)
    num_finite_1 = count_finite(logits_1V[:, None], None, one_1)
    return torch.cat([token_1, num_finite_1, one_1 if num_allowed_1 is None else num_allowed_1])
