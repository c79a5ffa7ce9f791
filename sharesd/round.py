"""One round on the device: draft, verify, accept, commit. No host synchronisation, only tensors that keep their place.

Legend: B rows, N draft tokens, T = N + 1 verify rows, W verify width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.attention import Branches
from compile.graphs import Replayed
from sharesd import sampling
from sharesd.cache import StaticKVCache
from sharesd.drafters.base import Drafter
from sharesd.models.base import CausalModel
from sharesd.sampler import Sampler
from sharesd.tree import DraftTree, Verdict


class RowState(NamedTuple):
    """What moves from round to round, besides the caches."""

    root_B: Tensor  # int64: last emitted token of each row
    active_B: Tensor  # int64: 1, or 0 for rows that are idle or finished


class RoundResult(NamedTuple):
    """What the host reads."""

    counted_BX: Tensor  # [B, 1 + T] int64: number of new tokens, then the tokens; of trees also their path, [B, 1 + 2T]
    logprobs_BT: Tensor | None  # of the tokens, if asked for


class Round:
    """Verify, accept, commit, for drafts of one shape; replayed as a CUDA graph where `capture` is set."""

    def __init__(
        self,
        target: CausalModel,
        cache: StaticKVCache,
        drafter: Drafter | None,
        sampler: Sampler,
        state: RowState,
        tree: DraftTree,
        *,
        verify_width: int,
        capture: bool,
    ) -> None:
        """`drafter` is None for plain steps. With `capture`, all later trees lie where this one does."""
        assert verify_width > tree.tokens.shape[1], "a step has a row for the root and every draft token"
        self._target, self._cache, self._drafter, self._sampler = target, cache, drafter, sampler
        self._state, self._width, self._tree = state, verify_width, tree
        self._replayed = Replayed(self._verify, capture=capture)

    def verify(self, tree: DraftTree) -> RoundResult:
        """What the target makes of a draft."""
        self._tree = tree
        return self._replayed()

    def _verify(self) -> RoundResult:
        tree, cache, (root_B, active_B) = self._tree, self._cache, self._state
        num_rows = 1 + tree.tokens.shape[1]
        tokens_BW, branches = root_B[:, None], tree.branches
        if num_rows > 1:
            tokens_BW = torch.cat([tokens_BW, tree.tokens.clamp(min=0)], 1)
        padding = self._width - num_rows
        if padding:
            tokens_BW = F.pad(tokens_BW, (0, padding))
        if branches is not None and padding:
            branches = _padded(branches, padding)
        logits_BTV = self._target.forward(tokens_BW, cache, branches=branches)[:, :num_rows]
        verdict = self._sampler.accept(tree, logits_BTV, cache.lengths)
        verdict = verdict._replace(num_new=verdict.num_new * active_B)
        self._sampler.commit(verdict.tokens, verdict.num_new)
        if branches is not None:
            cache.keep(verdict.path, verdict.num_new)
        cache.lengths += verdict.num_new
        if self._drafter is not None:
            self._drafter.commit(root_B, tree, verdict, logits_BTV)
        last_B1 = (verdict.num_new - 1).clamp(min=0)[:, None]
        root_B.copy_(torch.where(active_B > 0, verdict.tokens.gather(1, last_B1)[:, 0], root_B))
        counted = [verdict.num_new[:, None], verdict.tokens, *([verdict.path] if branches is not None else [])]
        return RoundResult(torch.cat(counted, 1), self._logprobs(logits_BTV, verdict))

    def _logprobs(self, logits_BTV: Tensor, verdict: Verdict) -> Tensor | None:
        if not self._sampler.params.logprobs:
            return None
        rows_B1 = torch.arange(len(verdict.path), device=verdict.path.device)[:, None]
        return sampling.logprobs_of(logits_BTV[rows_B1, verdict.path], verdict.tokens)


def _padded(branches: Branches, padding: int) -> Branches:
    """With rows that are written behind the others and seen by nobody; paths may be as long as there are rows."""
    depth_BT, path_BTP = branches
    T = path_BTP.shape[1]
    path_BTP = F.pad(path_BTP, (0, padding, 0, padding))
    path_BTP[:, T:, 0] = torch.arange(T, T + padding, device=path_BTP.device)
    return Branches(F.pad(depth_BT, (0, padding)), path_BTP)
