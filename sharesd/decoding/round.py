"""One round on the device: draft, verify, accept, commit. No host synchronisation, only tensors that keep their place.

Legend: B rows, N draft tokens, T = N + 1 verify rows, W verify width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.attention import Branches
from compile.graphs import Replayed
from sharesd import sampling
from sharesd.decoding.cache import StaticKVCache
from sharesd.decoding.tree import DraftTree, Verdict
from sharesd.drafters.base import Drafter, Drafting
from sharesd.models.base import CausalModel


class RowState(NamedTuple):
    """What moves from round to round, besides the caches."""

    root_B: Tensor  # int64: last emitted token of each row
    active_B: Tensor  # int64: 1, or 0 for rows that are idle or finished


class RoundResult(NamedTuple):
    """What the host reads."""

    counted_BX: Tensor
    """[B, X] int64: number of new tokens, the tokens [T], of trees the path [T], and what the drafter wants to know."""
    logprobs_BT: Tensor | None  # of the tokens, if asked for
    num_rows: int
    """T of `counted`."""
    is_tree: bool

    def path(self, counted: Sequence[int]) -> Sequence[int]:
        """Verify rows of the nodes that were accepted, from what the host read of a row."""
        if not self.is_tree:
            return range(1, counted[0])
        return counted[self.num_rows + 2 : self.num_rows + 1 + counted[0]]

    def told(self, counted: list[int]) -> list[int]:
        """What the drafter wants to know of it."""
        return counted[1 + (2 if self.is_tree else 1) * self.num_rows :]


class Round:
    """Verify, accept, commit.

    Where there are `graphs`, two of them are replayed: one for plain steps, and one for whatever lies in the buffers,
    which does for plain steps too where these have the same width.
    """

    def __init__(
        self,
        target: CausalModel,
        cache: StaticKVCache,
        drafter: Drafter | None,
        drafting: Drafting,
        state: RowState,
        *,
        widths: Sequence[int] | None,
    ) -> None:
        """`widths`: numbers of rows that steps may have, to the next of which they are padded; None = any."""
        self._target, self._cache, self._drafter, self._state = target, cache, drafter, state
        self._sampler, self._buffers, self._widths = drafting.sampler, drafting.buffers, widths
        graphs, match = drafting.graphs, not drafting.sampler.wants_probs
        self._plain = Replayed(partial(self._verify, DraftTree(state.root_B[:, None][:, :0])), graphs)
        self._full: Replayed[RoundResult] | None = None
        self._plain_apart = True
        if graphs is not None and drafter is not None:
            tree = drafting.buffers.tree(branches=drafter.trees and match, probs=not match)
            self._full = Replayed(partial(self._verify, tree), graphs)
            self._plain_apart = not match or self._width(1) < self._width(1 + drafting.buffers.most)

    def verify(self, tree: DraftTree) -> RoundResult:
        """What the target makes of a draft."""
        num_nodes = tree.tokens.shape[1]
        if self._full is None and num_nodes:
            return self._verify(tree)
        if self._full is None or (self._plain_apart and not num_nodes):
            return self._plain()
        if not num_nodes:
            self._buffers.clear()
        elif not tree.in_buffers:
            self._buffers.put(tree)
        return self._full()

    def _width(self, rows: int) -> int:
        return next(width for width in self._widths if width >= rows) if self._widths else rows

    def _verify(self, tree: DraftTree) -> RoundResult:
        cache, (root_B, active_B) = self._cache, self._state
        num_rows = 1 + tree.tokens.shape[1]
        if tree.tokens.device != root_B.device:
            tree = _moved(tree, root_B.device)
        tokens_BW, branches = root_B[:, None], tree.branches
        if num_rows > 1:
            tokens_BW = torch.cat([tokens_BW, tree.tokens.clamp(min=0)], 1)
        padding = self._width(num_rows) - num_rows
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
        drafter, told_BX = self._drafter, None
        if drafter is not None and (num_rows > 1 or drafter.on_host):
            told_BX = drafter.commit(root_B, tree, verdict, logits_BTV)
        newest_B = verdict.tokens[:, 0]
        if num_rows > 1:
            newest_B = verdict.tokens.gather(1, (verdict.num_new - 1).clamp(min=0)[:, None])[:, 0]
        root_B.copy_(torch.where(active_B > 0, newest_B, root_B))
        counted = [verdict.num_new[:, None], verdict.tokens, verdict.path if branches is not None else None, told_BX]
        counted_BX = torch.cat([part for part in counted if part is not None], 1)
        return RoundResult(counted_BX, self._logprobs(logits_BTV, verdict), num_rows, branches is not None)

    def _logprobs(self, logits_BTV: Tensor, verdict: Verdict) -> Tensor | None:
        if not self._sampler.kind.logprobs:
            return None
        rows_B1 = torch.arange(len(verdict.path), device=verdict.path.device)[:, None]
        return sampling.logprobs_of(logits_BTV[rows_B1, verdict.path], verdict.tokens)


def _moved(tree: DraftTree, device: torch.device) -> DraftTree:
    """Guesses of tables, on the device."""
    branches = tree.branches and Branches(*(part.to(device) for part in tree.branches))
    return tree._replace(tokens=tree.tokens.to(device), branches=branches)


def _padded(branches: Branches, padding: int) -> Branches:
    """With rows that are written behind the others and seen by nobody; paths may be as long as there are rows."""
    depth_BT, path_BTP = branches
    T = path_BTP.shape[1]
    path_BTP = F.pad(path_BTP, (0, padding, 0, padding))
    path_BTP[:, T:, 0] = torch.arange(T, T + padding, device=path_BTP.device)
    return Branches(F.pad(depth_BT, (0, padding)), path_BTP)
