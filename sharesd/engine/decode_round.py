"""One round on the device: draft, verify, accept, commit. No host synchronisation, only tensors that keep their place.

Legend: B rows, N draft tokens, T = N + 1 verify rows, W verify width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.attention import Branches
from compile.cuda_graphs import Graphs, Replayed
from compile.state_update import note_round, step_tokens
from sharesd import sampling
from sharesd.devices.host_buffers import HostCopies
from sharesd.drafters.base import Drafter, Drafting
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.speculation.draft_tree import DraftTree

Meanwhile = Callable[[Callable[[], bool] | None], AbstractContextManager[None]]
"""Within it, what is given is done while weights are awaited (`offload.prefetcher.Stream.meanwhile`)."""


class RowState(NamedTuple):
    """What moves from round to round, besides the caches."""

    root_B: Tensor  # int64: last emitted token of each row
    active_B: Tensor  # int64: 1, or 0 for rows that are idle or finished
    drafts_B: Tensor  # bool: whether the row takes drafts

    def rows(self, first: int, end: int) -> RowState:
        """Of some rows: a view."""
        return RowState(*(part[first:end] for part in self))


class Reading(NamedTuple):
    """Outcome of the target's pass over a draft, before anything is decided."""

    tree: DraftTree
    """Without guesses for rows that take none."""
    branches: Branches | None
    """With padding."""
    logits_BTV: Tensor
    """After root and nodes."""


Masks = Callable[[], tuple[Tensor, list[tuple[int, int]]]]
"""Masks of grammars after root and nodes, bits [B, T, W] on the host; and nodes, by line and number, that must not be
accepted."""


class RoundResult(NamedTuple):
    """What the host reads."""

    counted_BX: Tensor
    """[B, X] int64: number of new tokens, the tokens [T], of trees the path [T], and what the drafter wants to know."""
    logprobs_BT: Tensor | None  # of the tokens, if asked for
    top_BTk: tuple[Tensor, Tensor] | None  # the likeliest tokens and their log-probabilities, if asked for
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
    which does for plain steps too where these have the same width. If only drafts are, rounds do the same eagerly.
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
        eager: bool = False,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        """Over the rows of `drafting`, which are all that `cache` and `state` have.

        `widths`: numbers of tokens that steps may have, to the next of which they are padded; None = any. `eager`:
        graphs are for drafts alone. `meanwhile` has drafts guess on while the target waits for weights.
        """
        self._meanwhile = meanwhile
        self._host = HostCopies()
        self._target, self._cache, self._drafter, self._state = target, cache, drafter, state
        self.drafting = drafting
        self._sampler, self._buffers, self._widths = drafting.sampler, drafting.buffers, widths
        graphs, match = None if eager else drafting.graphs, not drafting.sampler.wants_probs
        self._constrained = drafting.sampler.kind.constrained
        self.no_draft = DraftTree(state.root_B[:, None][:, :0])
        """Draft of a plain round."""
        self._plain = self._step(self.no_draft, graphs)
        self._full: Callable[..., RoundResult] | None = None
        self._plain_apart = True
        if drafting.graphs is not None and drafter is not None:
            tree = drafting.buffers.tree(branches=drafter.trees and match, probs=not match)
            self._full = self._step(tree, graphs)
            self._plain_apart = not match or self._width(1) < self._width(1 + drafting.buffers.most)

    def verify(self, tree: DraftTree, masks: Masks | None = None) -> RoundResult:
        """Verify a draft. Where there are grammars, `masks` are asked for while it reads that."""
        num_nodes = tree.tokens.shape[1]
        given = (masks,) if self._constrained else ()
        if self._full is None and num_nodes:
            return self._step(tree, None)(*given)
        if self._full is None or (self._plain_apart and not num_nodes):
            return self._plain(*given)
        if not num_nodes:
            self._buffers.clear()
        elif not tree.in_buffers:
            self._buffers.put(tree)
        return self._full(*given)

    def fetched(self, result: RoundResult) -> RoundResult:
        """Copies in the host's memory, for which nobody waits here: the next round overwrites what it made. They stay
        until the round after the next is fetched.
        """
        self._host.turn()
        counted_BX, logprobs_BT, top_BTk, num_rows, is_tree = result
        copied, times = self._host.copied, -(-(1 + self._buffers.most) // num_rows)  # of the largest draft
        top = None if top_BTk is None else (copied("ids", top_BTk[0], times), copied("top", top_BTk[1], times))
        logprobs_BT = None if logprobs_BT is None else copied("logprobs", logprobs_BT, times)
        counted_BX = copied("counted", counted_BX, times if is_tree else 2 * times)  # trees have a path, too
        return RoundResult(counted_BX, logprobs_BT, top, num_rows, is_tree)

    def _step(self, tree: DraftTree, graphs: Graphs | None) -> Callable[..., RoundResult]:
        """Verifies whatever lies in this draft; where there are grammars in two parts, with masks in between."""
        if not self._constrained:
            return Replayed(lambda: self._decide(self._read(tree)), graphs)
        tree = tree._replace(legal=self._buffers.legal_BTW[:, : 1 + tree.tokens.shape[1]])
        readings: list[Reading] = []
        read, decide = Replayed(partial(self._read, tree), graphs), Replayed(lambda: self._decide(*readings), graphs)

        def in_two(masks: Masks | None) -> RoundResult:
            readings[:] = [read()]
            if masks is not None:
                legal_BTW, lost = masks()
                self._buffers.allow(legal_BTW)
                for line, node in lost:
                    readings[0].tree.tokens[line, node] = -1
            return decide()

        return in_two

    def _width(self, rows: int) -> int:
        return next(width for width in self._widths if width >= rows) if self._widths else rows

    def _read(self, tree: DraftTree) -> Reading:
        cache, (root_B, _, drafts_B) = self._cache, self._state
        num_rows = 1 + tree.tokens.shape[1]
        if tree.tokens.device != root_B.device:
            tree = _moved(tree, root_B.device)
        if num_rows > 1:
            tree = tree._replace(tokens=tree.tokens.where(drafts_B[:, None], -1))
        if tree.branches is not None:  # part of the buffers, where rounds are not replayed
            tree = tree._replace(branches=Branches(*(part.contiguous() for part in tree.branches)))
        width = self._width(num_rows)
        tokens_BW = root_B[:, None] if width == 1 else step_tokens(root_B, tree.tokens, width)
        branches, padding = tree.branches, width - num_rows
        if branches is not None and padding:
            branches = _padded(branches, padding)
        if branches is not None and tree.above:
            branches = branches._replace(path_BTP=branches.path_BTP + tree.above)
        with nullcontext() if self._meanwhile is None else self._meanwhile(tree.onward):
            logits_BTV = self._target.forward(tokens_BW, cache, branches=branches)[:, :num_rows]
        return Reading(tree, branches, logits_BTV)

    def _decide(self, reading: Reading) -> RoundResult:
        cache, (root_B, active_B, _) = self._cache, self._state
        tree, branches, logits_BTV = reading
        num_rows = logits_BTV.shape[1]
        verdict = self._sampler.accept(tree, logits_BTV, cache.lengths)
        verdict = verdict._replace(num_new=verdict.num_new * active_B)
        self._sampler.commit(verdict.tokens, verdict.num_new)
        if branches is not None:
            cache.keep(verdict.path, verdict.num_new, tree.above)
        drafter, told_BX = self._drafter, None
        if drafter is not None and (num_rows > 1 or drafter.follows):
            told_BX = drafter.commit(self.drafting, tree, verdict, logits_BTV)
        path_BT = verdict.path if branches is not None else None
        counted_BX = note_round(root_B, cache.lengths, active_B, verdict.num_new, verdict.tokens, path_BT, told_BX)
        logprobs_BT = top_BTk = None
        if self._sampler.kind.logprobs:
            rows_B1 = torch.arange(len(verdict.path), device=verdict.path.device)[:, None]
            kept_BTV = logits_BTV[rows_B1, verdict.path]
            logprobs_BT = sampling.logprobs_of(kept_BTV, verdict.tokens)
            if self._sampler.kind.top_logprobs:
                top_BTk = sampling.top_logprobs_of(kept_BTV, self._sampler.kind.top_logprobs)
        return RoundResult(counted_BX, logprobs_BT, top_BTk, num_rows, branches is not None)


def _moved(tree: DraftTree, device: torch.device) -> DraftTree:
    """Guesses of tables, on their way to the device."""

    def moved(part: Tensor) -> Tensor:
        return (part.pin_memory() if device.type == "cuda" else part).to(device, non_blocking=True)

    return tree._replace(tokens=moved(tree.tokens), branches=tree.branches and Branches(*map(moved, tree.branches)))


def _padded(branches: Branches, padding: int) -> Branches:
    """With rows that are written behind the others and seen by nobody; paths may be as long as there are rows."""
    depth_BT, path_BTP = branches
    T = path_BTP.shape[1]
    path_BTP = F.pad(path_BTP, (0, padding, 0, padding))
    path_BTP[:, T:, 0] = torch.arange(T, T + padding, device=path_BTP.device)
    return Branches(F.pad(depth_BT, (0, padding)), path_BTP)
