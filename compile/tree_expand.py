"""How draft trees grow: new children are noted down, the best of them go on, and the best of all are verified.

On a CPU each is one call of a kernel and on a GPU one launch, where tensor operations take some 25.

Legend: B rows, F nodes of a level that were expanded, k children of each and nodes expanded on every level but the
first (where F is 1), C nodes that can be found, D levels, N nodes of a draft at most, T = N + 1.
"""

from __future__ import annotations

from ctypes import Array, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.cpp_extension import kernel
from compile.op_registry import LIBRARY, on_cuda, runs_triton


class Nodes(NamedTuple):
    """All nodes found so far, level by level: k on the first, k^2 on each other one."""

    tokens_BC: Tensor  # int64; -1 = not found yet
    scores_BC: Tensor  # float32: log probability of the path; -inf = not found yet
    ancestors_BCD: Tensor  # int64: the nodes on the path, their own number included
    places_BC: Tensor  # int64: where they were written, from the slot behind the root on


class Front(NamedTuple):
    """The nodes that are expanded next."""

    tokens_Bk: Tensor
    scores_Bk: Tensor
    paths_BkD: Tensor  # as ancestors
    slots_BkD: Tensor  # where the nodes on the path are written, as places
    depth_Bk: Tensor  # nodes above each


class Draft(NamedTuple):
    """What is verified: see `compile.attention.Branches`. Where there is no node: -1, and a child of the root."""

    tokens_BN: Tensor
    depth_BT: Tensor
    path_BTT: Tensor
    places_BT: Tensor  # where root and nodes were written, from the root's slot on


def grow(level_B: Tensor, nodes: Nodes, front: Front, new_BFk: Tensor, logp_BFk: Tensor) -> None:
    """Children of the front (F = 1: of the root), on level `level`, which grows by one; the best of them are the front
    from now on. All else is changed in place, too.
    """
    if runs_triton(level_B.device):
        torch.ops.sharesd.grow_(level_B, *nodes, *front, new_BFk, logp_BFk)
    elif level_B.device.type == "cpu":
        new_BFk, logp_BFk = new_BFk.contiguous(), logp_BFk.float().contiguous()
        sizes = (*new_BFk.shape, *nodes.ancestors_BCD.shape[1:])
        tensors = (level_B.data_ptr(), addresses(nodes), addresses(front), new_BFk.data_ptr(), logp_BFk.data_ptr())
        kernel("grow", torch.int64, *[c_void_p] * 5, *[c_int64] * 5)(*tensors, *sizes)
    else:
        grow_reference(level_B, nodes, front, new_BFk, logp_BFk)


def grow_reference(level_B: Tensor, nodes: Nodes, front: Front, new_BFk: Tensor, logp_BFk: Tensor) -> None:
    """`grow` in tensor operations."""
    (_, num, top), D = new_BFk.shape, front.paths_BkD.shape[2]
    deep_B11 = (level_B > 0)[:, None, None]
    paths_BFD, slots_BFD = (part[:, :num].where(deep_B11, 0) for part in (front.paths_BkD, front.slots_BkD))
    scores_BF = front.scores_Bk[:, :num].where(deep_B11[..., 0], 0.0)
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
    front.slots_BkD.copy_(slots_BkD)
    front.tokens_Bk.copy_(new_BN.gather(1, best_Bk))
    front.scores_Bk.copy_(scores_BN.gather(1, best_Bk))
    front.paths_BkD.copy_(_pick(ancestors_BND, best_Bk))
    front.depth_Bk.copy_(level_B[:, None])
    nodes.places_BC.scatter_(1, first_B1 + best_Bk, place_Bk)
    level_B += 1


def choose(wanted_1: Tensor, top: int, nodes: Nodes, draft: Draft) -> None:
    """The best `wanted` of all nodes into the draft; `top` is k. Of equal ones the first, so that parents are there."""
    if runs_triton(wanted_1.device):
        torch.ops.sharesd.choose_nodes_(wanted_1, top, *nodes, *draft)
    elif wanted_1.device.type == "cpu":
        sizes = (*nodes.ancestors_BCD.shape, draft.tokens_BN.shape[1])
        tensors = (wanted_1.data_ptr(), top, addresses(nodes), addresses(draft))
        kernel("choose", torch.int64, c_void_p, c_int64, *[c_void_p] * 2, *[c_int64] * 4)(*tensors, *sizes)
    else:
        choose_reference(wanted_1, top, nodes, draft)


def choose_reference(wanted_1: Tensor, top: int, nodes: Nodes, draft: Draft) -> None:
    """`choose` in tensor operations."""
    (_, C, D), N = nodes.ancestors_BCD.shape, draft.tokens_BN.shape[1]
    M, device = min(N, C), wanted_1.device
    kept_BM = nodes.scores_BC.sort(dim=1, descending=True, stable=True).indices[:, :M]
    row_M = torch.arange(1, M + 1, device=device)
    is_node_M = row_M <= wanted_1
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
    draft.places_BT[:, 1 : 1 + M] = nodes.places_BC.gather(1, kept_BM) + 1


def addresses(tensors: Nodes | Front | Draft) -> Array[c_int64]:
    """The words of the struct of this name in cpu/tree_expand.h."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return (c_int64 * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _pick(x_BXD: Tensor, index_BY: Tensor) -> Tensor:
    return x_BXD.gather(1, index_BY[..., None].expand(-1, -1, x_BXD.shape[2]))


def _grow_cuda(*arguments) -> None:
    from compile.cuda import tree_expand as grow  # imports Triton, which not every machine has

    grow.grow(*arguments)


def _choose_cuda(*arguments) -> None:
    from compile.cuda import tree_expand as grow

    grow.choose(*arguments)


LIBRARY.define(
    "grow_(Tensor(a!) level, Tensor(b!) tokens, Tensor(c!) scores, Tensor(d!) ancestors, Tensor(e!) places, "
    "Tensor(f!) front_tokens, Tensor(g!) front_scores, Tensor(h!) front_paths, Tensor(i!) front_slots, "
    "Tensor(j!) front_depth, Tensor new, Tensor logp) -> ()"
)
on_cuda("grow_", _grow_cuda)
LIBRARY.impl("grow_", lambda *_: None, "Meta")
LIBRARY.define(
    "choose_nodes_(Tensor wanted, int top, Tensor tokens, Tensor scores, Tensor ancestors, Tensor places, "
    "Tensor(a!) draft, Tensor(b!) depth, Tensor(c!) path, Tensor(d!) draft_places) -> ()"
)
on_cuda("choose_nodes_", _choose_cuda)
LIBRARY.impl("choose_nodes_", lambda *_: None, "Meta")
