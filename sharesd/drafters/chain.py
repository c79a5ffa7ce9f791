"""A chain of guesses from any causal language model: what `share` and `classic` have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from sharesd.cache import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.sampler import Sampler
from sharesd.tree import DraftTree


def draft_chain(
    model: CausalModel, cache: StaticKVCache, first_BT: Tensor, num_draft: int, sampler: Sampler
) -> DraftTree:
    """Guess `num_draft` tokens one by one.

    `first_BT` holds the tokens of the first step, from the cache's length on; the last one is the root. Leaves the
    cache's lengths as they were: all that is written lies above them.
    """
    before_B = cache.lengths.clone()
    root_at_B = before_B + (first_BT.shape[1] - 1)
    tokens_BT, drafted, probs = first_BT, first_BT[:, :0], []
    for _ in range(num_draft):
        T = tokens_BT.shape[1]
        last_B1 = torch.full((tokens_BT.shape[0], 1), T - 1, device=tokens_BT.device)
        logits_B1V = model.forward(tokens_BT, cache, last_B1)
        token_B, probs_BV = sampler.draft(logits_B1V[:, 0], drafted, root_at_B)
        cache.lengths += T
        tokens_BT = token_B[:, None]
        drafted = torch.cat([drafted, tokens_BT], 1)
        if probs_BV is not None:
            probs.append(probs_BV)
    cache.lengths.copy_(before_B)
    return DraftTree(drafted, probs=torch.stack(probs, 1) if probs else None, depth=num_draft, num_steps=num_draft)
