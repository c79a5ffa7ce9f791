"""A chain of guesses."""

from __future__ import annotations

import torch
from torch import Tensor

from compile.cuda_graphs import Replayed
from compile.state_update import note_token
from sharesd.drafters.base import Drafting
from sharesd.drafters.draft_stepper import Guesser
from sharesd.speculation.draft_scorer import Weighing
from sharesd.speculation.draft_tree import DraftTree


class ChainDraft:
    """Guesses one by one. Every step but the first is the same work on the same tensors, so that it can be replayed."""

    def __init__(self, guesser: Guesser, drafting: Drafting) -> None:
        self._guesser, self._drafting = guesser, drafting
        self._last_B1 = torch.zeros_like(guesser.root_at_B)[:, None]
        self._weighing: Weighing | None = None  # hears how sure the model is of each guess
        self._drafts: dict[int, DraftTree] = {}  # by length: all lie in the same place
        self._first = Replayed(self._start, drafting.graphs)
        self._next = Replayed(self._go_on, drafting.graphs)

    def draft(self, length: int) -> DraftTree:
        """A chain of at most so many tokens, which lies in the buffers; shorter where the policy has it end early."""
        buffers, sampler, policy = self._drafting.buffers, self._drafting.sampler, self._drafting.policy
        self._weighing = None if sampler.wants_probs else policy.weighing
        self._first()
        for num in range(1, length):
            if self._weighing and not policy.grows(num):
                length = num
                break
            self._next()
        if length not in self._drafts:
            self._drafts[length] = DraftTree(
                buffers.tokens_BN[:, :length],
                probs=buffers.probs_BNV[:, :length] if sampler.wants_probs else None,
                depth=length,
                num_steps=length,
                in_buffers=True,
            )
        return self._drafts[length]

    def _start(self) -> None:
        if self._drafting.graphs is not None:
            self._drafting.buffers.lay_chain()
        else:
            self._drafting.buffers.clear()
        self._guess(self._guesser.start())

    def _go_on(self) -> None:
        self._guess(self._guesser.go_on(self._last_B1))

    def _guess(self, logits_B1V: Tensor) -> None:
        buffers, next_at_B, root_at_B = self._drafting.buffers, self._guesser.next_at_B, self._guesser.root_at_B
        token_B, probs_BV, chance_B = self._drafting.sampler.draft(
            logits_B1V[:, 0],
            buffers.tokens_BN,
            next_at_B,
            root_at_B,
            self._guesser.ids,
            chances=self._weighing is not None,
            spread=self._guesser.spread,
        )
        if self._weighing is not None and chance_B is not None:
            chances = chance_B.tolist()
            self._weighing.guessed([chances[row - self._drafting.first] for row in self._drafting.policy.awaited])
        note_token(token_B, next_at_B, root_at_B, self._last_B1, buffers.tokens_BN)
        if probs_BV is not None:
            at_B1V = (next_at_B - root_at_B - 1)[:, None, None].expand(-1, 1, probs_BV.shape[1])
            buffers.probs_BNV.scatter_(1, at_B1V, probs_BV[:, None].float())
