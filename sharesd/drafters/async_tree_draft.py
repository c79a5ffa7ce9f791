"""Trees that grow on while they are verified, where the target waits for its weights.

If what is accepted ends at a node that has grown on by then, all that has grown behind it is the next draft, for which
nobody waits. The target writes its own keys and values above what the model has read meanwhile, and what lies behind
the new root moves down with it.

Legend: C nodes that can be found, D levels, k nodes of a level that are expanded, and children of each; one row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.tree_expand import Front, Nodes
from sharesd.drafters.base import Drafting
from sharesd.drafters.draft_stepper import ModelGuesser
from sharesd.drafters.tree_draft import TreeDraft
from sharesd.speculation.draft_tree import DraftTree, Shape, Verdict, slots_to_go_on

SHARE = 2
"""What has grown on is the next draft if it has at least one in so many of the levels that are asked for."""


class _Kept(NamedTuple):
    """What has grown behind the last accepted token."""

    root_at: int
    """The position of that token, the root of the next draft."""
    levels: int
    root_place: int
    """Where the model read it, in slots behind the last root's."""
    first_place: int
    """Where it read the first of those behind it."""


class OnwardDraft(TreeDraft):
    """Grows trees, of one row, that go on. Of several rows they don't."""

    def __init__(self, guesser: ModelGuesser, drafting: Drafting, *, top: int, deepest: int) -> None:
        """As `TreeDraft` has it; the cache must have `slots_to_go_on` and those of a verify step above its lengths."""
        super().__init__(guesser, drafting, top=top, deepest=2 * deepest + 1)
        self._model, self._asked = guesser, deepest
        self._kept: _Kept | None = None
        self._was_kept = False
        self._num_levels = self._limit = 0
        self._order_C = torch.zeros(0, dtype=torch.int64)  # nodes, best first, when the draft was made

    def draft(self, shape: Shape) -> DraftTree:
        tree = super().draft(shape)
        if len(self._model.root_at_B) > 1:
            return tree
        self._order_C = self._nodes.scores_BC[0].sort(descending=True, stable=True).indices
        self._num_levels = tree.depth
        self._limit = min(self._deepest, tree.depth + 1 + self._asked)
        depth = min(tree.depth, tree.tokens.shape[1])  # what has grown on has more levels than is verified, perhaps
        above = slots_to_go_on(self._top, self._asked)
        return tree._replace(depth=depth, num_steps=depth, onward=self._go_further, above=above, kept=self._was_kept)

    def _grow(self, most: int) -> tuple[int, int]:
        kept, self._kept = self._kept, None
        self._was_kept = (
            kept is not None and kept.root_at == int(self._model.root_at_B[0]) and SHARE * kept.levels >= most
        )
        if kept is None or not self._was_kept:
            return super()._grow(most)
        self._model.move(kept.root_place, kept.first_place, (kept.levels - 1) * self._top)
        return kept.levels, int((self._nodes.scores_BC[0] > -torch.inf).sum())

    def _go_further(self) -> bool:
        """One level more; whether there may be another."""
        if self._num_levels < self._limit:
            self._next()
            self._num_levels += 1
        return self._num_levels < self._limit

    def committed(self, verdict: Verdict) -> None:
        """The target has decided about the draft: what has grown behind its last token is kept."""
        level = int(verdict.num_new[0]) - 1  # of that token
        self._kept, left = None, self._num_levels - level - 1
        if level < 1 or left < 1:
            return
        parent = self._order_C[verdict.path[0, level] - 1]
        first, end = (self._top + (each - 1) * self._top**2 for each in (level, level + 1))
        nodes = self._nodes
        is_root = nodes.ancestors_BCD[0, first:end, level - 1] == parent
        is_root &= nodes.tokens_BC[0, first:end] == verdict.tokens[0, level]
        found = is_root.nonzero()
        if not len(found):
            return
        root = first + int(found[0])
        if not (self._front.paths_BkD[0, :, level] == root).any():  # all that has grown on has grown elsewhere
            return
        self._kept = _Kept(
            root_at=int(self._model.root_at_B[0]) + level + 1,
            levels=left,
            root_place=int(nodes.places_BC[0, root]),
            first_place=(level + 1) * self._top,
        )
        self._level_B.fill_(left)
        replant(self._nodes, self._front, self._said_BC, self._top, level, root)


def replant(nodes: Nodes, front: Front, said_BC: Tensor, top: int, level: int, root: int) -> None:
    """The node `root` of this level (from 0) becomes the root, in place: nodes that are not behind it are gone, and the
    others are so many levels higher. `top` is k, `said` [1, C] goes where the nodes go. Of one row.
    """
    C, D = nodes.ancestors_BCD.shape[1:]
    tokens_C, scores_C, paths_CD, places_C, said_C = (part[0] for part in (*nodes, said_BC))
    node_C, up, nowhere = torch.arange(C), level + 1, (D - 1) * top
    old_X = node_C[(paths_CD[:, level] == root) & (scores_C > -torch.inf) & (node_C > root)]
    # The first level of a tree has fewer nodes than others, so numbers of children move by less than those behind.
    fewer_L = torch.full((D - up,), up * top**2)
    fewer_L[0] = old_X[0]
    new_X = old_X - fewer_L[(old_X >= top + up * top**2).long()]
    parts = (
        (tokens_C, tokens_C[old_X], -1),
        (scores_C, scores_C[old_X] - scores_C[root], -torch.inf),
        (paths_CD, F.pad((paths_CD[old_X, up:] - fewer_L).clamp(min=0), (0, up)), 0),
        (places_C, torch.where(places_C[old_X] < nowhere, places_C[old_X] - up * top, nowhere), nowhere),
        (said_C, said_C[old_X], 0.0),
    )
    is_behind_k = front.paths_BkD[0, :, level] == root
    front.scores_Bk[0] = torch.where(is_behind_k, front.scores_Bk[0] - scores_C[root], -torch.inf)
    for part_kD, less in ((front.paths_BkD[0], fewer_L), (front.slots_BkD[0], up * top)):
        part_kD.copy_(F.pad((part_kD[:, up:] - less).clamp(min=0), (0, up)))
    front.depth_Bk.sub_(up)
    for to, values, nothing in parts:
        to.fill_(nothing)
        to[new_X] = values
