"""Trees that grow during verification, while offloaded weights are transferred.

If the accepted path ends at a node with children by then, the nodes below that node are the next draft. The target
writes its KV above the KV of these nodes, which is moved down with the new root.

Legend: C nodes that can be found, D levels, k nodes of a level that are expanded, and children of each; one row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.tree_expand import Frontier, Nodes
from sharesd.drafters.base import DraftContext
from sharesd.drafters.chain_draft import ModelStepper
from sharesd.drafters.tree_draft import TreeDraft
from sharesd.speculation.draft_tree import DraftShape, DraftTree, VerifyResult, async_tree_slots

SHARE = 2
"""Continuations must have at least one in SHARE of the requested levels."""


class _Continuation(NamedTuple):
    """Nodes below the last accepted token, as the next draft."""

    root_pos: int
    """The position of that token, the root of the next draft."""
    levels: int
    root_place: int
    """Slot of that token in the model's cache, after the last root's."""
    first_place: int
    """Slot of the first node below the root, counted likewise."""


class AsyncTreeDraft(TreeDraft):
    """Trees expanded during verification, if there is one row."""

    def __init__(self, stepper: ModelStepper, context: DraftContext, *, branching: int, max_depth: int) -> None:
        """The cache needs `async_tree_slots` and a verify step above its lengths."""
        super().__init__(stepper, context, branching=branching, max_depth=2 * max_depth + 1)
        self._model, self._asked = stepper, max_depth
        self._kept: _Continuation | None = None
        self._was_kept = False
        self._num_levels = self._limit = 0
        self._order_C = torch.zeros(0, dtype=torch.int64)  # nodes, best first, when the draft was made

    def draft(self, shape: DraftShape) -> DraftTree:
        tree = super().draft(shape)
        if len(self._model.root_pos_B) > 1:
            return tree
        self._order_C = self._nodes.scores_BC[0].sort(descending=True, stable=True).indices
        self._num_levels = tree.depth
        self._limit = min(self._max_depth, tree.depth + 1 + self._asked)
        depth = min(tree.depth, tree.tokens.shape[1])  # a kept draft may have more levels than are verified
        kv_offset = async_tree_slots(self._branching, self._asked)
        tree = tree._replace(depth=depth, continue_fn=self._go_further, kv_offset=kv_offset)
        return tree.with_record(num_steps=depth, drafted_ahead=self._was_kept)

    def _grow(self, max_levels: int) -> tuple[int, int]:
        kept, self._kept = self._kept, None
        self._was_kept = (
            kept is not None and kept.root_pos == int(self._model.root_pos_B[0]) and SHARE * kept.levels >= max_levels
        )
        if kept is None or not self._was_kept:
            return super()._grow(max_levels)
        self._model.move(kept.root_place, kept.first_place, (kept.levels - 1) * self._branching)
        return kept.levels, int((self._nodes.scores_BC[0] > -torch.inf).sum())

    def _go_further(self) -> bool:
        """Expand one more level; returns True if another may follow."""
        if self._num_levels < self._limit:
            self._next()
            self._num_levels += 1
        return self._num_levels < self._limit

    def committed(self, verified: VerifyResult) -> None:
        """Keep the nodes below the last accepted token."""
        level = int(verified.num_new[0]) - 1  # of that token
        self._kept, left = None, self._num_levels - level - 1
        if level < 1 or left < 1:
            return
        parent = self._order_C[verified.path[0, level] - 1]
        first, end = (self._branching + (each - 1) * self._branching**2 for each in (level, level + 1))
        nodes = self._nodes
        is_root = nodes.ancestors_BCD[0, first:end, level - 1] == parent
        is_root &= nodes.tokens_BC[0, first:end] == verified.tokens[0, level]
        found = is_root.nonzero()
        if not len(found):
            return
        root = first + int(found[0])
        if not (self._frontier.paths_BkD[0, :, level] == root).any():  # every extension is below another branch
            return
        self._kept = _Continuation(
            root_pos=int(self._model.root_pos_B[0]) + level + 1,
            levels=left,
            root_place=int(nodes.places_BC[0, root]),
            first_place=(level + 1) * self._branching,
        )
        self._level_B.fill_(left)
        replant(self._nodes, self._frontier, self._draft_probs_BC, self._branching, level, root)


def replant(nodes: Nodes, frontier: Frontier, draft_probs_BC: Tensor, branching: int, level: int, root: int) -> None:
    """Make node `root` of this level (from 0) the root, in place."""
    C, D = nodes.ancestors_BCD.shape[1:]
    tokens_C, scores_C, said_C = nodes.tokens_BC[0], nodes.scores_BC[0], draft_probs_BC[0]
    paths_CD, places_C = nodes.ancestors_BCD[0], nodes.places_BC[0]
    node_C, up, nowhere = torch.arange(C), level + 1, (D - 1) * branching
    old_X = node_C[(paths_CD[:, level] == root) & (scores_C > -torch.inf) & (node_C > root)]
    # The first level of a tree has fewer nodes than the others, so the indices of its children move by less than those
    # of later levels.
    fewer_L = torch.full((D - up,), up * branching**2)
    fewer_L[0] = old_X[0]
    new_X = old_X - fewer_L[(old_X >= branching + up * branching**2).long()]
    parts = (
        (tokens_C, tokens_C[old_X], -1),
        (scores_C, scores_C[old_X] - scores_C[root], -torch.inf),
        (paths_CD, F.pad((paths_CD[old_X, up:] - fewer_L).clamp(min=0), (0, up)), 0),
        (places_C, torch.where(places_C[old_X] < nowhere, places_C[old_X] - up * branching, nowhere), nowhere),
        (said_C, said_C[old_X], 0.0),
    )
    is_below_k = frontier.paths_BkD[0, :, level] == root
    frontier.scores_Bk[0] = torch.where(is_below_k, frontier.scores_Bk[0] - scores_C[root], -torch.inf)
    for part_kD, less in ((frontier.paths_BkD[0], fewer_L), (frontier.slots_BkD[0], up * branching)):
        part_kD.copy_(F.pad((part_kD[:, up:] - less).clamp(min=0), (0, up)))
    frontier.depth_Bk.sub_(up)
    for to, values, nothing in parts:
        to.fill_(nothing)
        to[new_X] = values
