"""What grammars allow after the roots of a round and each node of its draft.

Legend: B rows, N draft tokens, T = N + 1 (the root and the nodes), W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sharesd.engine.request import Request
from sharesd.speculation.draft_buffers import num_words
from sharesd.speculation.draft_tree import DraftTree, parents_of


def allowed(
    tree: DraftTree, requests: Sequence[Request], first: int, vocab_size: int, *, pinned: bool = False
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Bits [B, T, W] int32 of the tokens that may follow; all of them in rows without a grammar. And nodes, by line and
    number, that could not be looked at, and must not be accepted.

    `first` is the row that the first line of the draft belongs to, which lies on the host. `pinned`: the bits are on
    their way to a GPU.
    """
    B, N = tree.tokens.shape
    legal_BTW = torch.full((B, 1 + N, num_words(vocab_size)), -1, dtype=torch.int32, pin_memory=pinned)
    tokens, parents, lost = tree.tokens.tolist(), parents_of(tree), []
    for request in requests:
        if request.matcher is None:
            continue
        assert request.slot is not None
        line = request.slot - first
        draft = (tokens[line], parents[line]) if request.params.speculate else ()
        lost += [(line, node) for node in request.matcher.allow(legal_BTW[line], *draft)]
    return legal_BTW, lost
