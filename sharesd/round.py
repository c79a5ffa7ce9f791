"""One round on the device: draft, verify, accept, commit. No host synchronisation, only tensors that keep their place.

Legend: B rows, N draft tokens, T = N + 1 verify rows, W verify width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.graphs import Replayed
from sharesd import sampling
from sharesd.cache import StaticKVCache
from sharesd.drafters.base import Drafter
from sharesd.models.base import CausalModel
from sharesd.sampler import Sampler
from sharesd.tree import DraftTree


class RowState(NamedTuple):
    """What moves from round to round, besides the caches."""

    root_B: Tensor  # int64: last emitted token of each row
    active_B: Tensor  # int64: 1, or 0 for rows that are idle or finished


class RoundResult(NamedTuple):
    """What the host reads."""

    counted_BX: Tensor  # [B, 1 + T] int64: number of new tokens, then the tokens
    logprobs_BT: Tensor | None  # of the tokens, if asked for


class Round:
    """The two halves of a round, each replayed as a CUDA graph where `capture` is set."""

    def __init__(
        self,
        target: CausalModel,
        cache: StaticKVCache,
        drafter: Drafter | None,
        sampler: Sampler,
        state: RowState,
        *,
        num_draft: int,
        verify_width: int,
        capture: bool,
    ) -> None:
        """`drafter` is None for plain steps, where `num_draft` is 0."""
        assert verify_width > num_draft, "a step has a row for the root and every draft token"
        self.num_draft = num_draft
        self._target, self._cache, self._drafter, self._sampler = target, cache, drafter, sampler
        self._state, self._width = state, verify_width
        self._tree = DraftTree(state.root_B[:, None][:, :0])
        self.draft = Replayed(self._draft, capture=capture and drafter is not None)
        self.verify = Replayed(self._verify, capture=capture)

    def _draft(self) -> DraftTree:
        if self._drafter is not None:
            self._tree = self._drafter.draft(self._state.root_B, self.num_draft)
        return self._tree

    def _verify(self) -> RoundResult:
        tree, cache, (root_B, active_B) = self._tree, self._cache, self._state
        tokens_BT = torch.cat([root_B[:, None], tree.tokens], 1)
        num_rows = tokens_BT.shape[1]
        tokens_BW = F.pad(tokens_BT, (0, self._width - num_rows))
        logits_BTV = self._target.forward(tokens_BW, cache)[:, :num_rows]
        verdict = self._sampler.accept(tree, logits_BTV, cache.lengths)
        verdict = verdict._replace(num_new=verdict.num_new * active_B)
        self._sampler.commit(verdict.tokens, verdict.num_new)
        cache.lengths += verdict.num_new
        if self._drafter is not None:
            self._drafter.commit(root_B, verdict)
        last_B1 = (verdict.num_new - 1).clamp(min=0)[:, None]
        root_B.copy_(torch.where(active_B > 0, verdict.tokens.gather(1, last_B1)[:, 0], root_B))
        logprobs = sampling.logprobs_of(logits_BTV, verdict.tokens) if self._sampler.params.logprobs else None
        return RoundResult(torch.cat([verdict.num_new[:, None], verdict.tokens], 1), logprobs)
