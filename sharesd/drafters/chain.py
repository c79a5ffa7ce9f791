"""A chain of guesses from any causal language model: what `share` and `classic` have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compile.graphs import Replayed
from compile.notes import note_token
from sharesd.decoding.cache import StaticKVCache
from sharesd.decoding.tree import DraftTree
from sharesd.drafters.base import Drafting
from sharesd.models.base import CausalModel


class ChainDraft:
    """Guesses one by one. Every step but the first is the same work on the same tensors, so that it can be replayed."""

    def __init__(
        self, model: CausalModel, cache: StaticKVCache, drafting: Drafting, lead: Callable[[], Tensor], recent: int
    ) -> None:
        """`lead` gives the tokens [B, T] of the first step, the last of which is the root, at the cache's length.

        What is written lies above the cache's lengths, but for tokens before the root. `recent`: how far steps look
        back, 0 = all.
        """
        self._model, self._cache, self._drafting, self._lead = model, cache, drafting, lead
        self._ahead = cache.ahead(recent)
        self._last_B1 = torch.zeros_like(cache.lengths)[:, None]
        self._first = Replayed(self._start, drafting.graphs)
        self._next = Replayed(self._go_on, drafting.graphs)

    def draft(self, length: int) -> DraftTree:
        """A chain of so many tokens, which lies in the buffers."""
        self._first()
        for _ in range(length - 1):
            self._next()
        buffers, sampler = self._drafting.buffers, self._drafting.sampler
        return DraftTree(
            buffers.tokens_BN[:, :length],
            probs=buffers.probs_BNV[:, :length] if sampler.wants_probs else None,
            depth=length,
            num_steps=length,
            in_buffers=True,
        )

    def _start(self) -> None:
        tokens_BT = self._lead()
        if self._drafting.graphs is not None:
            self._drafting.buffers.lay_chain()
        else:
            self._drafting.buffers.clear()
        self._drafting.sampler.begin_draft()
        torch.sub(self._cache.lengths, tokens_BT.shape[1] - 1, out=self._ahead.lengths)
        self._step(tokens_BT)

    def _go_on(self) -> None:
        self._step(self._last_B1)

    def _step(self, tokens_BT: Tensor) -> None:
        ahead, buffers, (B, T) = self._ahead, self._drafting.buffers, tokens_BT.shape
        last_B1 = torch.full((B, 1), T - 1, device=tokens_BT.device) if T > 1 else None
        logits_BV = self._model.forward(tokens_BT, ahead, last_B1)[:, 0]
        ahead.lengths += T
        root_at_B = self._cache.lengths
        token_B, probs_BV = self._drafting.sampler.draft(logits_BV, buffers.tokens_BN, ahead.lengths, root_at_B)
        note_token(token_B, ahead.lengths, root_at_B, self._last_B1, buffers.tokens_BN)
        if probs_BV is not None:
            at_B1V = (ahead.lengths - root_at_B - 1)[:, None, None].expand(B, 1, probs_BV.shape[1])
            buffers.probs_BNV.scatter_(1, at_B1V, probs_BV[:, None].float())
