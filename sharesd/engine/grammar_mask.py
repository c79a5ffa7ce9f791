"""Grammar masks for the roots of a round and the draft nodes.

Legend: B rows, N draft tokens, T = N + 1 (the root and the nodes), W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sharesd.engine.request import Request
from sharesd.speculation.draft_buffers import num_words
from sharesd.speculation.draft_tree import DraftTree, parents_of


def compute_grammar_mask(
    tree: DraftTree, requests: Sequence[Request], first: int, vocab_size: int, *, pinned: bool = False
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return bits [B, T, W] int32 of allowed tokens, and unacceptable nodes.

    Unacceptable nodes are (line, number). `tree` is on the host; its first line belongs to row `first`.
    """
    B, N = tree.tokens.shape
    shape = B, 1 + N, num_words(vocab_size)
    grammar_mask_BTW = torch.full(shape, -1, dtype=torch.int32, device="cpu", pin_memory=pinned)
    tokens, parents, lost = tree.tokens.tolist(), parents_of(tree), []
    for request in requests:
        if request.matcher is None:
            continue
        assert request.row is not None
        line = request.row - first
        draft = (tokens[line], parents[line]) if request.params.speculate else ()
        lost += [(line, node) for node in request.matcher.fill_mask(grammar_mask_BTW[line], *draft)]
    return grammar_mask_BTW, lost
