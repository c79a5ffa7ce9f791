"""Drafting step by step with a model: `ModelStepper`, which trees use too, and `ChainDraft`.

Legend: B rows, T tokens read before the first draft token, F tokens read in one step, V tokens of the drafter's
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.cuda_graphs import Replayed
from compile.state_update import write_draft_token
from sharesd.drafters.base import DraftContext
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.speculation.draft_scorer import DraftScorer
from sharesd.speculation.draft_tree import DraftRecord, DraftTree


class DraftStepper(Protocol):
    """Runs a draft model step by step from the roots.

    Its tensors keep their addresses, so that steps can be replayed.
    """

    root_pos_B: Tensor
    """int64: position of each root."""
    next_pos_B: Tensor
    """int64: position of a chain's next token; of trees, of the first level."""
    ids: Tensor | None
    """int64 [V]: the target's ids of a reduced vocabulary; None = all."""
    logit_noise: float | None
    """Scale of the errors in the quantized target's logits: with a gap between the two likeliest tokens, the target
    agrees with probability 1 / (1 + exp(-gap / noise)). None if the drafter is another model.
    """

    def start(self) -> Tensor:
        """Read unread tokens and the root; return first logits [B, 1, V]."""
        ...

    def step(self, tokens_BF: Tensor, tree_mask: TreeAttentionMask | None = None) -> Tensor:
        """Read a chain's next draft token (F = 1), or tree nodes.

        Returns the logits [B, F, V] after them, or [B, 1, V] if they are the same after all F tokens.
        """
        ...


class ModelStepper:
    """Stepper of a language model.

    Draft steps write their KV into the cache's slots above its lengths, through a view with lengths of its own, so the
    verify step overwrites it, and nothing has to be undone.
    """

    def __init__(
        self,
        model: CausalModel,
        cache: StaticKVCache,
        lead: Callable[[], Tensor],
        *,
        recent: int = 0,
        ids: Tensor | None = None,
        logit_noise: float | None = None,
    ) -> None:
        """`lead` returns the tokens [B, T] to read first: the root, after any that the model has missed.

        `recent`: tokens attended to; 0: all.
        `ids`: see `DraftStepper`.
        """
        self._model, self._lead, self._draft_cache = model, lead, cache.draft_view(recent)
        self.ids = ids
        self.logit_noise = logit_noise
        # The lengths of both caches. A token's position is its slot, so `next_pos_B += 1` moves where the next step
        # writes.
        self.root_pos_B, self.next_pos_B = cache.lengths, self._draft_cache.lengths

    def start(self) -> Tensor:
        tokens_BT = self._lead()
        B, T = tokens_BT.shape
        torch.sub(self.root_pos_B, T - 1, out=self.next_pos_B)
        last_B1 = torch.full((B, 1), T - 1, device=tokens_BT.device) if T > 1 else None
        logits_B1V = self._model.forward(tokens_BT, self._draft_cache, last_B1)
        self.next_pos_B += T
        return logits_B1V

    def step(self, tokens_BF: Tensor, tree_mask: TreeAttentionMask | None = None) -> Tensor:
        logits_BFV = self._model.forward(tokens_BF, self._draft_cache, tree_mask=tree_mask)
        if tree_mask is None:
            self.next_pos_B += 1
        return logits_BFV

    def move(self, root: int, first: int, num: int) -> None:
        """Move one row's accepted draft KV, for `AsyncTreeDraft`; slots count from the last root's."""
        places_T = torch.tensor([root, *range(first, first + num)], device=self.root_pos_B.device)
        path_BT = places_T + (self.next_pos_B - self.root_pos_B)[:, None]
        self.next_pos_B.copy_(self.root_pos_B)
        self._draft_cache.compact(path_BT, torch.full_like(self.root_pos_B, 1 + num))
        self.next_pos_B += 1


class ChainDraft:
    """Chains drafted token by token, in steps that can be replayed.

    The tokens are written to `context.buffers`, tensors that keep their addresses, which the verify step reads.
    """

    def __init__(self, stepper: DraftStepper, context: DraftContext) -> None:
        self._stepper, self._context = stepper, context
        self._last_B1 = torch.zeros_like(stepper.root_pos_B)[:, None]
        self._scorer: DraftScorer | None = None  # is given the probability of each draft token
        self._drafts: dict[int, DraftTree] = {}  # by length: all share the buffers
        self._first = Replayed(self._start, context.graphs)
        self._next = Replayed(self._step, context.graphs)

    def draft(self, length: int) -> DraftTree:
        """Return a chain of at most `length` tokens, in the buffers."""
        buffers, sampler = self._context.buffers, self._context.sampler
        self._scorer = None if sampler.needs_draft_probs else self._context.scorer
        self._first()
        for num in range(1, length):
            # There is a scorer only on a CPU, where reading a probability on the host does not wait.
            if self._scorer and not self._scorer.should_continue(num):
                length = num
                break
            self._next()
        if length not in self._drafts:
            self._drafts[length] = DraftTree(
                buffers.tokens_BN[:, :length],
                probs=buffers.probs_BNV[:, :length] if sampler.needs_draft_probs else None,
                depth=length,
                in_buffers=True,
                record=DraftRecord(num_steps=length),
            )
        return self._drafts[length]

    def _start(self) -> None:
        if self._context.graphs is not None:  # a captured verify step also reads the paths, perhaps of an earlier tree
            self._context.buffers.set_chain()
        else:
            self._context.buffers.clear()
        self._draft_tokens(self._stepper.start())

    def _step(self) -> None:
        self._draft_tokens(self._stepper.step(self._last_B1))

    def _draft_tokens(self, logits_B1V: Tensor) -> None:
        buffers, next_pos_B, root_pos_B = self._context.buffers, self._stepper.next_pos_B, self._stepper.root_pos_B
        # With the noise that the target will have at this position, so that both choose alike. `chance_B`: how likely
        # the target agrees, by which the chain may end.
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
            self._scorer.add_token([chances[row - self._context.first] for row in self._scorer.rows])
        # Writes the token to `_last_B1`, and to column next_pos - root_pos - 1 of `tokens_BN`.
        write_draft_token(token_B, next_pos_B, root_pos_B, self._last_B1, buffers.tokens_BN)
        if probs_BV is not None:
            at_B1V = (next_pos_B - root_pos_B - 1)[:, None, None].expand(-1, 1, probs_BV.shape[1])
            buffers.probs_BNV.scatter_(1, at_B1V, probs_BV[:, None].float())
