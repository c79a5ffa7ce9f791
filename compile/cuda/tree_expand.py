"""Triton kernels of `compile.tree_expand`, one launch each, one program per batch row.

A node's rank is the number of nodes that come before it: no sorting, and no atomics. All tensors are contiguous.

Legend: N children of a level; else as in `compile.tree_expand`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COMPARED = 16
"""Nodes that ranks are compared with at once."""
COLUMNS = tl.constexpr(16)
"""Columns of a path that are written at once."""


@triton.jit
def expand_tree_kernel(
    level_ptr,
    tokens_ptr,
    scores_ptr,
    ancestors_ptr,
    places_ptr,
    front_tokens_ptr,
    front_scores_ptr,
    front_paths_ptr,
    front_slots_ptr,
    front_depth_ptr,
    new_ptr,
    logp_ptr,
    C: tl.constexpr,
    D: tl.constexpr,
    TOP: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    """Expand a level. Grid (B). Level 0 has the root as parent."""
    b = tl.program_id(0)
    n, e = tl.arange(0, LANES), tl.arange(0, DEPTHS)
    is_valid, both = n < N, (n < N)[:, None] & (e < D)[None, :]
    level = tl.load(level_ptr + b)
    token = tl.load(new_ptr + b * N + n, mask=is_valid, other=0)
    score = tl.load(logp_ptr + b * N + n, mask=is_valid, other=float("-inf")).to(tl.float32)
    deep, parent = level > 0, b * TOP + n // TOP
    first = tl.where(deep, TOP + (level - 1) * TOP * TOP, 0)
    score += tl.load(front_scores_ptr + parent, mask=is_valid & deep, other=0.0)
    paths = tl.load(front_paths_ptr + parent[:, None] * D + e[None, :], mask=both & deep, other=0)
    slots = tl.load(front_slots_ptr + parent[:, None] * D + e[None, :], mask=both & deep, other=0)
    node = first + n
    paths = tl.where((e == level)[None, :], node[:, None], paths)
    # Nodes that are better, or equal and earlier; what is no node comes before none.
    others = tl.trans(tl.broadcast_to(score[:, None], (LANES, LANES)))
    better = (others > score[:, None]) | ((others == score[:, None]) & (n[None, :] < n[:, None]))
    rank = tl.sum((better & is_valid[None, :]).to(tl.int32), 1)
    is_expanded = is_valid & (rank < TOP)
    place = level * TOP + rank
    slots = tl.where((e == level)[None, :], place[:, None], slots)
    tl.debug_barrier()  # the frontier has been read
    at = b * C + node
    tl.store(tokens_ptr + at, token, mask=is_valid)
    tl.store(scores_ptr + at, score, mask=is_valid)
    tl.store(ancestors_ptr + at[:, None] * D + e[None, :], paths, mask=both)
    tl.store(places_ptr + at, place, mask=is_expanded)
    at = b * TOP + rank
    tl.store(front_tokens_ptr + at, token, mask=is_expanded)
    tl.store(front_scores_ptr + at, score, mask=is_expanded)
    tl.store(front_depth_ptr + at, level + n * 0, mask=is_expanded)
    tl.store(front_paths_ptr + at[:, None] * D + e[None, :], paths, mask=both & is_expanded[:, None])
    tl.store(front_slots_ptr + at[:, None] * D + e[None, :], slots, mask=both & is_expanded[:, None])
    tl.store(level_ptr + b, level + 1)


@triton.jit
def select_nodes_kernel(
    max_nodes_ptr,
    tokens_ptr,
    scores_ptr,
    ancestors_ptr,
    places_ptr,
    draft_ptr,
    depth_ptr,
    path_ptr,
    draft_places_ptr,
    row_ptr,  # int64 [B, C]: scratch
    C: tl.constexpr,
    D: tl.constexpr,
    TOP: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
    DEPTHS: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """Select nodes. Grid (B). Each node writes its own row.

    Other rows are written by their numbers.
    """
    b = tl.program_id(0)
    c, e, t = tl.arange(0, LANES), tl.arange(0, DEPTHS), tl.arange(0, WIDTH)
    max_nodes = tl.load(max_nodes_ptr)
    score = tl.load(scores_ptr + b * C + c, mask=c < C, other=float("-inf"))
    rank = tl.zeros((LANES,), tl.int32)
    for start in range(0, C, COMPARED):
        other = start + tl.arange(0, COMPARED)
        others = tl.load(scores_ptr + b * C + other, mask=other < C, other=float("-inf"))[None, :]
        better = (others > score[:, None]) | ((others == score[:, None]) & (other[None, :] < c[:, None]))
        rank += tl.sum((better & (other < C)[None, :]).to(tl.int32), 1)
    row = rank.to(tl.int64) + 1
    tl.store(row_ptr + b * C + c, row, mask=c < C)
    T: tl.constexpr = N + 1
    missing = (t > 0) & (t < T) & ((t > max_nodes) | (t > C))
    tl.store(draft_ptr + b * N + t - 1, (t * 0 - 1).to(tl.int64), mask=missing)
    tl.store(depth_ptr + b * T + t, (t > 0).to(tl.int64), mask=(t == 0) | missing)
    star = tl.where((t == 1)[None, :], t[:, None], 0).to(tl.int64)
    inside = ((t == 0) | missing)[:, None] & (t < T)[None, :]
    tl.store(path_ptr + (b * T + t[:, None]) * T + t[None, :], star, mask=inside)
    tl.debug_barrier()  # all rows are written
    kept, placed = (c < C) & (row <= max_nodes) & (row < T), (c < C) & (row < T)
    both = (c < C)[:, None] & (e < D)[None, :]
    ancestors = tl.load(ancestors_ptr + (b * C + c[:, None]) * D + e[None, :], mask=both, other=0)
    rows = tl.load(row_ptr + b * C + ancestors, mask=both & kept[:, None], other=0)
    level = tl.where(c < TOP, 1, (c - TOP) // (TOP * TOP) + 2)
    rows = tl.where(e[None, :] < level[:, None], rows, 0)
    tl.store(draft_ptr + b * N + row - 1, tl.load(tokens_ptr + b * C + c, mask=kept, other=0), mask=kept)
    tl.store(depth_ptr + b * T + row, level.to(tl.int64), mask=kept)
    own = path_ptr + (b * T + row[:, None]) * T
    for start in range(0, T, COLUMNS):  # all at once are more than registers hold
        u = start + tl.arange(0, COLUMNS)
        unnamed = kept[:, None] & ((u == 0) | (u > D))[None, :] & (u < T)[None, :]
        tl.store(own + u[None, :], tl.zeros((LANES, COLUMNS), tl.int64), mask=unnamed)
    tl.store(own + 1 + e[None, :], rows, mask=both & kept[:, None])
    place = tl.load(places_ptr + b * C + c, mask=placed, other=0) + 1
    tl.store(draft_places_ptr + b * T + row, place, mask=placed)


def expand_tree(
    level_B: Tensor,
    tokens_BC: Tensor,
    scores_BC: Tensor,
    ancestors_BCD: Tensor,
    places_BC: Tensor,
    front_tokens_Bk: Tensor,
    front_scores_Bk: Tensor,
    front_paths_BkD: Tensor,
    front_slots_BkD: Tensor,
    front_depth_Bk: Tensor,
    new_BFk: Tensor,
    logp_BFk: Tensor,
) -> None:
    """See `compile.tree_expand.expand_tree`."""
    (B, C, D), (_, num, top) = ancestors_BCD.shape, new_BFk.shape
    expand_tree_kernel[(B,)](
        *(level_B, tokens_BC, scores_BC, ancestors_BCD, places_BC),
        *(front_tokens_Bk, front_scores_Bk, front_paths_BkD, front_slots_BkD, front_depth_Bk),
        *(new_BFk.contiguous(), logp_BFk.contiguous()),
        **{"C": C, "D": D, "TOP": top, "N": num * top},
        **{"LANES": triton.next_power_of_2(num * top), "DEPTHS": triton.next_power_of_2(D)},
    )


def select_nodes(
    max_nodes_1: Tensor,
    top: int,
    tokens_BC: Tensor,
    scores_BC: Tensor,
    ancestors_BCD: Tensor,
    places_BC: Tensor,
    draft_BN: Tensor,
    depth_BT: Tensor,
    path_BTT: Tensor,
    draft_places_BT: Tensor,
) -> None:
    """See `compile.tree_expand.select_nodes`."""
    (B, C, D), N = ancestors_BCD.shape, draft_BN.shape[1]
    select_nodes_kernel[(B,)](
        *(max_nodes_1, tokens_BC, scores_BC, ancestors_BCD, places_BC, draft_BN, depth_BT, path_BTT, draft_places_BT),
        tokens_BC.new_empty(B, C),
        **{"C": C, "D": D, "TOP": top, "N": N, "COMPARED": COMPARED},
        **{"LANES": triton.next_power_of_2(C), "DEPTHS": triton.next_power_of_2(D)},
        WIDTH=triton.next_power_of_2(N + 1),
        num_warps=8,
    )
