"""Expansion of draft trees by level, and selection of nodes.

On a CPU each is one call of a kernel and on a GPU one launch, instead of some 25 tensor operations.

Legend: B rows, F nodes of a level that were expanded, k children of each and nodes expanded on every level but the
first (whose F is 1), C nodes that can be found, D levels, N nodes of a draft at most, T = N + 1, R ranges of the
model's probabilities.
"""

from __future__ import annotations

from ctypes import Array, c_double, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.cpp_extension import call, kernel
from compile.op_registry import define, runs_cpp, runs_triton


class Nodes(NamedTuple):
    """All nodes found so far: k on level 1, k^2 on others."""

    tokens_BC: Tensor  # int64; -1 = not found yet
    scores_BC: Tensor  # float32: log probability of the path; -inf = not found yet
    ancestors_BCD: Tensor  # int64: nodes on the path, itself included
    places_BC: Tensor  # int64: slots to which they were written, from the one after the root


class Frontier(NamedTuple):
    """Nodes to expand next."""

    tokens_Bk: Tensor
    scores_Bk: Tensor
    paths_BkD: Tensor  # as ancestors
    slots_BkD: Tensor  # slots of the nodes on the path, as places
    depth_Bk: Tensor  # nodes above each


class ExpandedDraft(NamedTuple):
    """Draft tree to verify, masked as `TreeAttentionMask` says.

    A missing node is -1, a child of the root.
    """

    tokens_BN: Tensor
    depth_BT: Tensor
    path_BTT: Tensor
    kv_slots_BT: Tensor  # slots of root and nodes, from the root's on


def expand_tree(level_B: Tensor, nodes: Nodes, frontier: Frontier, new_BFk: Tensor, logp_BFk: Tensor) -> None:
    """Add the frontier's children, and make the best the frontier.

    F = 1: children of the root. They are on level `level`, which grows by one; the best k become the frontier. All is
    changed in place.
    """
    if runs_triton(level_B.device):
        torch.ops.sharesd.expand_tree_(level_B, *nodes, *frontier, new_BFk, logp_BFk)
    elif runs_cpp(level_B.device):
        new_BFk, logp_BFk = new_BFk.contiguous(), logp_BFk.float().contiguous()
        sizes = (*new_BFk.shape, *nodes.ancestors_BCD.shape[1:])
        call("expand_tree", torch.int64, level_B, addresses(nodes), addresses(frontier), new_BFk, logp_BFk, *sizes)
    else:
        expand_tree_reference(level_B, nodes, frontier, new_BFk, logp_BFk)


def expand_tree_reference(level_B: Tensor, nodes: Nodes, frontier: Frontier, new_BFk: Tensor, logp_BFk: Tensor) -> None:
    """`expand_tree` in tensor operations."""
    (_, num, top), D = new_BFk.shape, frontier.paths_BkD.shape[2]
    deep_B11 = (level_B > 0)[:, None, None]
    paths_BFD, slots_BFD = (part[:, :num].where(deep_B11, 0) for part in (frontier.paths_BkD, frontier.slots_BkD))
    scores_BF = frontier.scores_Bk[:, :num].where(deep_B11[..., 0], 0.0)
    first_B1 = (top + (level_B[:, None] - 1) * top**2).clamp(min=0)
    new_BN, scores_BN = new_BFk.flatten(1), (scores_BF[..., None] + logp_BFk).flatten(1)
    node_BN = first_B1 + torch.arange(num * top, device=level_B.device)
    is_level_B1D = torch.arange(D, device=level_B.device) == level_B[:, None, None]
    ancestors_BND = torch.where(is_level_B1D, node_BN[..., None], paths_BFD.repeat_interleave(top, 1))
    nodes.tokens_BC.scatter_(1, node_BN, new_BN)
    nodes.scores_BC.scatter_(1, node_BN, scores_BN.float())
    nodes.ancestors_BCD.scatter_(1, node_BN[..., None].expand(-1, -1, D), ancestors_BND)
    best_Bk = scores_BN.topk(top).indices
    place_Bk = level_B[:, None] * top + torch.arange(top, device=level_B.device)
    slots_BkD = torch.where(is_level_B1D, place_Bk[..., None], _pick(slots_BFD, best_Bk // top))
    frontier.slots_BkD.copy_(slots_BkD)
    frontier.tokens_Bk.copy_(new_BN.gather(1, best_Bk))
    frontier.scores_Bk.copy_(scores_BN.gather(1, best_Bk))
    frontier.paths_BkD.copy_(_pick(ancestors_BND, best_Bk))
    frontier.depth_Bk.copy_(level_B[:, None])
    nodes.places_BC.scatter_(1, first_B1 + best_Bk, place_Bk)
    level_B += 1


def select_nodes(max_nodes_1: Tensor, top: int, nodes: Nodes, draft: ExpandedDraft) -> None:
    """Write the best `max_nodes` nodes into the draft; `top` is k.

    Of equal ones the first: parents are always selected.
    """
    if runs_triton(max_nodes_1.device):
        torch.ops.sharesd.select_nodes_(max_nodes_1, top, *nodes, *draft)
    elif runs_cpp(max_nodes_1.device):
        sizes = (*nodes.ancestors_BCD.shape, draft.tokens_BN.shape[1])
        call("select_nodes", torch.int64, max_nodes_1, top, addresses(nodes), addresses(draft), *sizes)
    else:
        select_nodes_reference(max_nodes_1, top, nodes, draft)


def select_nodes_reference(max_nodes_1: Tensor, top: int, nodes: Nodes, draft: ExpandedDraft) -> None:
    """`select_nodes` in tensor operations."""
    (_, C, D), N = nodes.ancestors_BCD.shape, draft.tokens_BN.shape[1]
    M, device = min(N, C), max_nodes_1.device
    kept_BM = nodes.scores_BC.sort(dim=1, descending=True, stable=True).indices[:, :M]
    row_M = torch.arange(1, M + 1, device=device)
    is_node_M = row_M <= max_nodes_1
    row_BC = torch.zeros_like(nodes.tokens_BC).scatter(1, kept_BM, row_M.expand_as(kept_BM))
    ancestors_BMD = _pick(nodes.ancestors_BCD, kept_BM)
    paths_BMD = row_BC.gather(1, ancestors_BMD.flatten(1)).view_as(ancestors_BMD)
    row_T = torch.arange(N + 1, device=device)
    draft.tokens_BN.fill_(-1)
    draft.depth_BT.copy_(row_T.clamp(max=1))
    draft.path_BTT.copy_(F.pad(row_T[:, None], (1, N - 1)))
    draft.tokens_BN[:, :M] = nodes.tokens_BC.gather(1, kept_BM).where(is_node_M, -1)
    level_BM = (kept_BM - top).div(top**2, rounding_mode="floor") + 2
    draft.depth_BT[:, 1 : 1 + M] = level_BM.where(is_node_M, 1)
    own_M1 = F.pad(row_M[:, None], (0, D - 1))
    draft.path_BTT[:, 1 : 1 + M, 1 : 1 + D] = paths_BMD.where(is_node_M[:, None], own_M1)
    draft.kv_slots_BT[:, 1 : 1 + M] = nodes.places_BC.gather(1, kept_BM) + 1


def addresses(tensors: Nodes | Frontier | ExpandedDraft) -> Array[c_int64]:
    """Return the words of the struct of this name in cpu/tree_expand.h."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return (c_int64 * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _pick(x_BXD: Tensor, index_BY: Tensor) -> Tensor:
    return x_BXD.gather(1, index_BY[..., None].expand(-1, -1, x_BXD.shape[2]))


define(
    "expand_tree_(Tensor(a!) level, Tensor(b!) tokens, Tensor(c!) scores, Tensor(d!) ancestors, Tensor(e!) places, "
    "Tensor(f!) frontier_tokens, Tensor(g!) frontier_scores, Tensor(h!) frontier_paths, Tensor(i!) frontier_slots, "
    "Tensor(j!) frontier_depth, Tensor new, Tensor logp) -> ()",
    cuda="tree_expand:expand_tree",
    meta=lambda *_: None,
)
define(
    "select_nodes_(Tensor max_nodes, int top, Tensor tokens, Tensor scores, Tensor ancestors, Tensor places, "
    "Tensor(a!) draft, Tensor(b!) depth, Tensor(c!) path, Tensor(d!) draft_places) -> ()",
    cuda="tree_expand:select_nodes",
    meta=lambda *_: None,
)


class BestNodes(NamedTuple):
    """N best nodes, best first, from which a policy decides after each level."""

    draft_probs_BN: Tensor  # float32: the model's probability after the parent
    accept_probs_BN: Tensor  # float32: the estimated probability that the path is accepted
    parents_BN: Tensor  # int64: -1 = the root


def rescore_children(
    level_B: Tensor,
    calibrated_probs: Tensor,
    draft_probs_BC: Tensor,
    logp_BFk: Tensor,
    logit_noise: float | None = None,
) -> None:
    """Replace log probabilities of the next level's children by calibrated ones.

    The model's probabilities are kept in `draft_probs`; or, with `logit_noise`, the probability that errors of this
    spread leave a child before the best other one, or put it there. `calibrated_probs` [R + 1] float32 are those of 0
    and of the middles of R equal ranges; all between is interpolated. `logp` (best first) is contiguous float32 and
    changed in place.
    """
    (B, F, k), C = logp_BFk.shape, draft_probs_BC.shape[1]
    tensors = (level_B.data_ptr(), calibrated_probs.data_ptr(), draft_probs_BC.data_ptr(), logp_BFk.data_ptr())
    kernel("rescore_children", torch.float32, *[c_void_p] * 4, *[c_int64] * 5, c_double)(
        *tensors, len(calibrated_probs) - 1, B, F, k, C, logit_noise or 0.0
    )


def record_best_nodes(nodes: Nodes, draft_probs_BC: Tensor, top: int, best: BestNodes) -> None:
    """Record the best nodes, in the order of `select_nodes`; `top` is k."""
    sizes = (*nodes.ancestors_BCD.shape, best.parents_BN.shape[1])
    call("best_nodes", torch.float32, addresses(nodes), draft_probs_BC, *best, top, *sizes)
