"""A tree of guesses from a causal language model (EAGLE-2: Li et al. 2024, arXiv 2406.16858), or a chain.

Each step expands the likeliest nodes of the last level; of all nodes ever found the likeliest are verified. A node is
as likely as its whole path, so parents come before their children, and the best n nodes are a tree for every n.

Legend: B rows, F nodes of a level that are expanded, k children of each, C nodes that can be found, D levels, M nodes
kept, T rows of a verify step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.attention import Branches
from compile.graphs import Replayed
from sharesd.decoding.cache import StaticKVCache
from sharesd.decoding.tree import DraftTree, Shape
from sharesd.drafters.base import Drafting
from sharesd.drafters.chain import ChainDraft
from sharesd.models.base import CausalModel


class ModelDraft:
    """How a model drafts for one way of sampling, and looks back so far: chains, and trees where there are such."""

    def __init__(
        self,
        model: CausalModel,
        cache: StaticKVCache,
        drafting: Drafting,
        lead: Callable[[], Tensor],
        *,
        shapes: Sequence[Shape],
        top: int,
        recent: int = 0,
    ) -> None:
        """`shapes` that will be asked for, the largest last; a tree expands its `top` best nodes of each level by as
        many children. The rest as `ChainDraft` takes it.
        """
        self._parts = (model, cache, drafting, lead, recent)
        self._top, self._deepest = top, shapes[-1].depth

    def draft(self, shape: Shape) -> DraftTree:
        """A draft of this shape, which lies in the buffers."""
        return self._tree.draft(shape) if shape.is_tree else self._chain.draft(shape.depth)

    @cached_property
    def _chain(self) -> ChainDraft:
        return ChainDraft(*self._parts)

    @cached_property
    def _tree(self) -> TreeDraft:
        return TreeDraft(*self._parts, top=self._top, deepest=self._deepest)


class TreeDraft:
    """Grows trees level by level. Every level but the first is the same work on the same tensors, whatever the depth.

    What is written lies above the cache's lengths: the root, and then `top` nodes per level.
    """

    def __init__(
        self,
        model: CausalModel,
        cache: StaticKVCache,
        drafting: Drafting,
        lead: Callable[[], Tensor],
        recent: int,
        *,
        top: int,
        deepest: int,
    ) -> None:
        """As `ChainDraft`; `deepest` is the depth of the deepest tree."""
        self._model, self._cache, self._drafting, self._lead = model, cache, drafting, lead
        self._top, self._deepest = top, deepest
        self._ahead = cache.ahead(recent)
        B, device = cache.batch, cache.lengths.device
        C = top + (deepest - 1) * top**2

        def zeros(*size: int) -> Tensor:
            return torch.zeros(B, *size, dtype=torch.int64, device=device)

        self._level_1 = torch.zeros(1, dtype=torch.int64, device=device)  # nodes above those of the coming level
        self._num_1 = torch.zeros_like(self._level_1)  # nodes wanted
        self._depth_D = torch.arange(deepest, device=device)
        self._levels_C = (torch.arange(C, device=device) - top).div(top**2, rounding_mode="floor") + 2
        # Of all nodes found: tokens (-1 = none yet), scores, the nodes on their paths, and where these lie.
        self._tokens_BC, self._ancestors_BCD, self._places_BC = zeros(C), zeros(C, deepest), zeros(C)
        self._scores_BC = torch.zeros(B, C, device=device)
        # The same of the nodes that are expanded next.
        self._front_tokens_Bk, self._front_paths_BkD, self._front_slots_BkD = (
            zeros(top),
            zeros(top, deepest),
            zeros(top, deepest),
        )
        self._front_scores_Bk = torch.zeros(B, top, device=device)
        self._first = Replayed(self._start, drafting.graphs)
        self._next = Replayed(self._go_on, drafting.graphs)
        self._last = Replayed(self._choose, drafting.graphs)

    def draft(self, shape: Shape) -> DraftTree:
        """The best nodes of so many levels, which lie in the buffers."""
        self._num_1.fill_(shape.nodes)
        self._first()
        for _ in range(shape.depth - 1):
            self._next()
        self._last()
        buffers, T = self._drafting.buffers, 1 + shape.nodes
        branches = Branches(buffers.depth_BT[:, :T].contiguous(), buffers.path_BTT[:, :T, :T].contiguous())
        return DraftTree(
            buffers.tokens_BN[:, : shape.nodes],
            branches,
            depth=shape.depth,
            num_steps=shape.depth,
            places=buffers.places_BT[:, :T],
            in_buffers=True,
        )

    def _start(self) -> None:
        tokens_BT, ahead, top = self._lead(), self._ahead, self._top
        B, T = tokens_BT.shape
        self._drafting.sampler.begin_draft()
        self._level_1.zero_()
        self._tokens_BC.fill_(-1)
        self._scores_BC.fill_(-torch.inf)
        self._places_BC.fill_((self._deepest - 1) * top)  # of nodes that were not expanded: behind all that were
        torch.sub(self._cache.lengths, T - 1, out=ahead.lengths)
        logits_B1V = self._model.forward(tokens_BT, ahead, torch.full((B, 1), T - 1, device=tokens_BT.device))
        ahead.lengths += T
        none_B1D = tokens_BT.new_zeros(B, 1, self._deepest)
        self._add(logits_B1V, none_B1D, none_B1D, self._scores_BC.new_zeros(B, 1), torch.zeros_like(self._level_1))

    def _go_on(self) -> None:
        top, level_1 = self._top, self._level_1
        depth_Bk = (level_1 - 1).expand(len(self._front_tokens_Bk), top).contiguous()
        branches = Branches(depth_Bk, self._front_slots_BkD)
        logits_BkV = self._model.forward(self._front_tokens_Bk, self._ahead, branches=branches)
        first_1 = top + (level_1 - 1) * top**2
        self._add(logits_BkV, self._front_paths_BkD, self._front_slots_BkD, self._front_scores_Bk, first_1)

    def _add(
        self, logits_BFV: Tensor, paths_BFD: Tensor, slots_BFD: Tensor, scores_BF: Tensor, first_1: Tensor
    ) -> None:
        """Children of nodes with these paths and scores, as the nodes from number `first` on; and who of them is
        expanded next.
        """
        sampler, top, level_1 = self._drafting.sampler, self._top, self._level_1
        root_at_B = self._cache.lengths
        seen_BFC = _seen(paths_BFD, level_1, self._tokens_BC.shape[1]) if sampler.kind.penalized else None
        new_BFk, logp_BFk = sampler.spread(logits_BFV, top, root_at_B + 1 + level_1, self._tokens_BC, seen_BFC)
        new_BN, scores_BN = new_BFk.flatten(1), (scores_BF[..., None] + logp_BFk).flatten(1)
        node_N = first_1 + torch.arange(new_BN.shape[1], device=new_BN.device)
        is_level_D = self._depth_D == level_1
        ancestors_BND = paths_BFD.repeat_interleave(top, 1)
        ancestors_BND = torch.where(is_level_D, node_N[:, None], ancestors_BND)
        self._tokens_BC.index_copy_(1, node_N, new_BN)
        self._scores_BC.index_copy_(1, node_N, scores_BN.float())
        self._ancestors_BCD.index_copy_(1, node_N, ancestors_BND)
        best_Bk = scores_BN.topk(top).indices
        place_k = level_1 * top + torch.arange(top, device=new_BN.device)
        slots_BkD = torch.where(is_level_D, place_k[:, None], _pick(slots_BFD, best_Bk // top))
        self._front_slots_BkD.copy_(slots_BkD)
        self._front_tokens_Bk.copy_(new_BN.gather(1, best_Bk))
        self._front_scores_Bk.copy_(scores_BN.gather(1, best_Bk))
        self._front_paths_BkD.copy_(_pick(ancestors_BND, best_Bk))
        self._places_BC.scatter_(1, first_1 + best_Bk, place_k.expand_as(best_Bk))
        level_1 += 1

    def _choose(self) -> None:
        """The best of all nodes into the buffers."""
        buffers, device = self._drafting.buffers, self._tokens_BC.device
        M = min(buffers.most, self._tokens_BC.shape[1])
        # Stable: of equal scores the ancestor, which was found first, stays first.
        kept_BM = self._scores_BC.sort(dim=1, descending=True, stable=True).indices[:, :M]
        row_M = torch.arange(1, M + 1, device=device)
        is_node_M = row_M <= self._num_1
        row_BC = torch.zeros_like(self._tokens_BC).scatter(1, kept_BM, row_M.expand_as(kept_BM))
        ancestors_BMD = _pick(self._ancestors_BCD, kept_BM)
        paths_BMD = row_BC.gather(1, ancestors_BMD.flatten(1)).view_as(ancestors_BMD)
        buffers.tokens_BN.fill_(-1)
        buffers.depth_BT.copy_(buffers.row_T.clamp(max=1))
        buffers.path_BTT.copy_(buffers.star_TT)
        buffers.tokens_BN[:, :M] = self._tokens_BC.gather(1, kept_BM).where(is_node_M, -1)
        buffers.depth_BT[:, 1 : 1 + M] = self._levels_C[kept_BM].where(is_node_M, 1)
        own_M1 = F.pad(row_M[:, None], (0, self._deepest - 1))
        buffers.path_BTT[:, 1 : 1 + M, 1 : 1 + self._deepest] = paths_BMD.where(is_node_M[:, None], own_M1)
        buffers.places_BT[:, 1 : 1 + M] = self._places_BC.gather(1, kept_BM) + 1


def _pick(x_BXD: Tensor, index_BY: Tensor) -> Tensor:
    return x_BXD.gather(1, index_BY[..., None].expand(-1, -1, x_BXD.shape[2]))


def _seen(paths_BFD: Tensor, level_1: Tensor, num_nodes: int) -> Tensor:
    """Which nodes lie on each path of so many nodes [B, F, C]."""
    B, num, D = paths_BFD.shape
    nodes_BFD = paths_BFD.where(torch.arange(D, device=paths_BFD.device) < level_1, num_nodes)
    return paths_BFD.new_zeros(B, num, 1 + num_nodes).scatter(2, nodes_BFD, 1)[..., :num_nodes] > 0
