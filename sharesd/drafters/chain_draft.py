"""Chain of draft tokens, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from compile.cuda_graphs import Replayed
from compile.state_update import write_draft_token
from sharesd.drafters.base import DraftContext
from sharesd.drafters.draft_stepper import DraftStepper
from sharesd.speculation.draft_scorer import DraftScorer
from sharesd.speculation.draft_tree import DraftTree


class ChainDraft:
    """Chains drafted token by token, in steps that can be replayed."""

    def __init__(self, stepper: DraftStepper, context: DraftContext) -> None:
        self._stepper, self._context = stepper, context
        self._last_B1 = torch.zeros_like(stepper.root_pos_B)[:, None]
        self._scorer: DraftScorer | None = None  # is given the probability of each draft token
        self._drafts: dict[int, DraftTree] = {}  # by length: all share the buffers
        self._first = Replayed(self._start, context.graphs)
        self._next = Replayed(self._step, context.graphs)

    def draft(self, length: int) -> DraftTree:
        """Return a chain of at most `length` tokens, in the buffers."""
        buffers, sampler, policy = self._context.buffers, self._context.sampler, self._context.policy
        self._scorer = None if sampler.needs_draft_probs else policy.scorer
        self._first()
        for num in range(1, length):
            if self._scorer and not policy.should_continue(num):
                length = num
                break
            self._next()
        if length not in self._drafts:
            self._drafts[length] = DraftTree(
                buffers.tokens_BN[:, :length],
                probs=buffers.probs_BNV[:, :length] if sampler.needs_draft_probs else None,
                depth=length,
                num_steps=length,
                in_buffers=True,
            )
        return self._drafts[length]

    def _start(self) -> None:
        if self._context.graphs is not None:
            self._context.buffers.set_chain()
        else:
            self._context.buffers.clear()
        self._draft_tokens(self._stepper.start())

    def _step(self) -> None:
        self._draft_tokens(self._stepper.step(self._last_B1))

    def _draft_tokens(self, logits_B1V: Tensor) -> None:
        buffers, next_pos_B, root_pos_B = self._context.buffers, self._stepper.next_pos_B, self._stepper.root_pos_B
        token_B, probs_BV, chance_B = self._context.sampler.draft(
            logits_B1V[:, 0],
            buffers.tokens_BN,
            next_pos_B,
            root_pos_B,
            self._stepper.ids,
            with_confidence=self._scorer is not None,
            logit_noise=self._stepper.logit_noise,
        )
        if self._scorer is not None and chance_B is not None:
            chances = chance_B.tolist()
            self._scorer.add_token([chances[row - self._context.first] for row in self._context.policy.counted_rows])
        write_draft_token(token_B, next_pos_B, root_pos_B, self._last_B1, buffers.tokens_BN)
        if probs_BV is not None:
            at_B1V = (next_pos_B - root_pos_B - 1)[:, None, None].expand(-1, 1, probs_BV.shape[1])
            buffers.probs_BNV.scatter_(1, at_B1V, probs_BV[:, None].float())
