"""A tree of guesses from a causal language model (EAGLE-2: Li et al. 2024, arXiv 2406.16858), or a chain.

Each step expands the likeliest nodes of the last level; of all nodes ever found the likeliest are verified. A node is
as likely as its whole path, so parents come before their children, and the best n nodes are a tree for every n.

Legend: B rows, F nodes of a level that are expanded, k children of each, C nodes found so far, D levels, N nodes kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.attention import Branches
from sharesd.cache import StaticKVCache
from sharesd.drafters.chain import draft_chain
from sharesd.models.base import CausalModel
from sharesd.sampler import Sampler
from sharesd.tree import DraftTree, Shape


def grow_draft(
    model: CausalModel, cache: StaticKVCache, first_BT: Tensor, shape: Shape, top: int, deepest: int, sampler: Sampler
) -> DraftTree:
    """A draft of this shape; a tree expands its `top` best nodes of each level by as many children.

    `deepest` is the depth of the deepest tree: steps of all trees have tensors of the same shapes.
    `first_BT` holds the tokens of the first step, from the cache's length on; the last one is the root. Leaves the
    cache's lengths as they were: all that is written lies above them, the root and then `top` nodes per level.
    """
    if not shape.is_tree:
        return draft_chain(model, cache, first_BT, shape.depth, sampler)
    before_B = cache.lengths.clone()
    (B, T), device = first_BT.shape, first_BT.device
    logits_BFV = model.forward(first_BT, cache, torch.full((B, 1), T - 1, device=device))
    cache.lengths += T
    root_at_B = cache.lengths - 1
    tokens_BC, ancestors_BCD = first_BT[:, :0], first_BT.new_zeros(B, 0, shape.depth)
    scores_BC, levels_C, places_BC = logits_BFV.new_zeros(B, 0).float(), first_BT[0, :0], first_BT[:, :0]
    unread = (shape.depth - 1) * top  # the place of nodes that were not expanded: behind all that were
    # Of the nodes that are expanded, the root to begin with: scores, the nodes on their paths, and where those lie.
    frontier_scores_BF = scores_BC.new_zeros(B, 1)
    paths_BFD, slots_BFD = first_BT.new_zeros(B, 1, shape.depth), first_BT.new_zeros(B, 1, deepest)
    for level in range(shape.depth):
        seen_BFC = None
        if sampler.counts is not None:
            seen_BFC = _seen(paths_BFD[..., :level], tokens_BC.shape[1])
        new_BFk, scores_BFk = sampler.spread(logits_BFV, top, level, root_at_B, tokens_BC, seen_BFC)
        num_before, num_new = tokens_BC.shape[1], new_BFk.shape[1] * top
        scores_BN = (frontier_scores_BF[..., None] + scores_BFk).flatten(1)
        ancestors_BND = paths_BFD.repeat_interleave(top, 1)
        ancestors_BND[..., level] = torch.arange(num_before, num_before + num_new, device=device)
        tokens_BC = torch.cat([tokens_BC, new_BFk.flatten(1)], 1)
        scores_BC = torch.cat([scores_BC, scores_BN], 1)
        ancestors_BCD = torch.cat([ancestors_BCD, ancestors_BND], 1)
        levels_C = torch.cat([levels_C, levels_C.new_full((num_new,), level + 1)])
        places_BC = torch.cat([places_BC, places_BC.new_full((B, num_new), unread)], 1)
        if level + 1 == shape.depth:
            break
        best_BF = scores_BN.topk(top).indices
        frontier_BF, frontier_scores_BF = best_BF + num_before, scores_BN.gather(1, best_BF)
        paths_BFD = _pick(ancestors_BND, best_BF)
        slots_BFD = _pick(slots_BFD, best_BF // top)
        slots_BFD[..., level] = level * top + torch.arange(top, device=device)
        places_BC = places_BC.scatter(1, frontier_BF, slots_BFD[..., level])
        depth_BF = torch.full((B, top), level, device=device)
        logits_BFV = model.forward(
            tokens_BC.gather(1, frontier_BF), cache, branches=Branches(depth_BF, slots_BFD.contiguous())
        )
    cache.lengths.copy_(before_B)
    # Stable: of equal scores the ancestor, which was found first, stays first.
    kept_BN = scores_BC.sort(dim=1, descending=True, stable=True).indices[:, : shape.nodes]
    row_BC = torch.zeros_like(tokens_BC).scatter(
        1, kept_BN, torch.arange(1, shape.nodes + 1, device=device).expand(B, -1)
    )
    ancestors_BND = _pick(ancestors_BCD, kept_BN)
    paths_BND = row_BC.gather(1, ancestors_BND.flatten(1)).view_as(ancestors_BND)
    path_BTT = F.pad(paths_BND, (1, shape.nodes - shape.depth, 1, 0))
    return DraftTree(
        tokens_BC.gather(1, kept_BN),
        Branches(F.pad(levels_C[kept_BN], (1, 0)), path_BTT),
        depth=shape.depth,
        num_steps=shape.depth,
        places=F.pad(places_BC.gather(1, kept_BN) + 1, (1, 0)),
    )


def _pick(x_BXD: Tensor, index_BY: Tensor) -> Tensor:
    return x_BXD.gather(1, index_BY[..., None].expand(-1, -1, x_BXD.shape[2]))


def _seen(paths_BFl: Tensor, num_nodes: int) -> Tensor:
    """Which nodes lie on each path [B, F, C]."""
    B, num, _ = paths_BFl.shape
    return paths_BFl.new_zeros(B, num, num_nodes).scatter(2, paths_BFl, 1) > 0
