"""What grammars allow after the roots of a round and each node of its draft.

Legend: B rows, N draft tokens, T = N + 1 (the root and the nodes), W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sharesd.decoding.request import Request
from sharesd.decoding.tree import DraftTree, parents_of
from sharesd.sampling.grammar import num_words


def allowed(tree: DraftTree, requests: Sequence[Request], first: int, vocab_size: int) -> Tensor:
    """Bits [B, T, W] int32 of the tokens that may follow; all of them in rows without a grammar.

    `first` is the row that the first line of the draft belongs to. Reads the draft, for which a GPU is waited for: a
    second synchronisation of the rounds that have grammars. A node that could not be looked at is cut off in place.
    """
    B, N = tree.tokens.shape
    legal_BTW = torch.full((B, 1 + N, num_words(vocab_size)), -1, dtype=torch.int32)
    tokens, parents = tree.tokens.tolist(), parents_of(tree)
    for request in requests:
        if request.matcher is None:
            continue
        assert request.slot is not None
        line = request.slot - first
        draft = (tokens[line], parents[line]) if request.params.speculate else ()
        for node in request.matcher.allow(legal_BTW[line], *draft):
            tree.tokens[line, node] = -1
    return legal_BTW.to(tree.tokens.device)
