"""A tree of guesses from a model or a head (EAGLE-2: Li et al. 2024, arXiv 2406.16858), or a chain.

Each step expands the likeliest nodes of the last level; of all nodes ever found the likeliest are verified. A node is
as likely as its whole path, so parents come before their children, and the best n nodes are a tree for every n.

Legend: B rows, F nodes of a level that are expanded, k children of each, C nodes that can be found, D levels, T rows of
a verify step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import exp

import torch
from torch import Tensor

from compile.attention import Branches
from compile.cuda_graphs import Replayed
from compile.tree_expand import Draft, Front, Nodes, choose, grow
from compile.tree_rescore import Weighed, weigh, weighed
from sharesd.drafters.base import Drafting
from sharesd.drafters.chain_draft import ChainDraft
from sharesd.drafters.draft_stepper import Guesser
from sharesd.speculation.draft_scorer import Weighing
from sharesd.speculation.draft_tree import DraftTree, Shape


class ModelDraft:
    """How a model drafts for one way of sampling: chains, and trees where there are such."""

    def __init__(
        self,
        guesser: Guesser,
        drafting: Drafting,
        *,
        shapes: Sequence[Shape],
        top: int,
        grower: Callable[..., TreeDraft] | None = None,
    ) -> None:
        """`shapes` that will be asked for, the largest last; a tree expands its `top` best nodes of each level by as
        many children. `grower`: what makes trees, if not a TreeDraft.
        """
        self._guesser, self._drafting, self._grower = guesser, drafting, grower or TreeDraft
        self._top, self._deepest = top, shapes[-1].depth

    def draft(self, shape: Shape) -> DraftTree:
        """A draft of this shape, which lies in the buffers."""
        return self.tree.draft(shape) if shape.is_tree else self._chain.draft(shape.depth)

    @cached_property
    def _chain(self) -> ChainDraft:
        return ChainDraft(self._guesser, self._drafting)

    @cached_property
    def tree(self) -> TreeDraft:
        """What grows trees."""
        return self._grower(self._guesser, self._drafting, top=self._top, deepest=self._deepest)


class TreeDraft:
    """Grows trees level by level. Every level but the first is the same work on the same tensors, whatever the depth.

    What is written lies above the cache's lengths: the root, and then `top` nodes per level.
    """

    def __init__(self, guesser: Guesser, drafting: Drafting, *, top: int, deepest: int) -> None:
        """`top` as `ModelDraft` has it; `deepest` is the depth of the deepest tree."""
        self._guesser, self._drafting = guesser, drafting
        self._top, self._deepest = top, deepest
        B, device = len(guesser.root_at_B), guesser.root_at_B.device
        C = top + (deepest - 1) * top**2

        def zeros(*size: int) -> Tensor:
            return torch.zeros(B, *size, dtype=torch.int64, device=device)

        self._level_B = zeros()  # nodes above those of the coming level
        self._num_1 = torch.zeros(1, dtype=torch.int64, device=device)  # nodes wanted
        self._nodes = Nodes(zeros(C), torch.zeros(B, C, device=device), zeros(C, deepest), zeros(C))
        scores_Bk = torch.zeros(B, top, device=device)
        self._front = Front(zeros(top), scores_Bk, zeros(top, deepest), zeros(top, deepest), zeros(top))
        self._weighing: Weighing | None = None  # if the policy decides how far it grows, and how much is verified
        self._said_BC = torch.zeros(B, C, device=device)  # what the model says of each node behind its parent
        N = drafting.buffers.tokens_BN.shape[1]
        self._best = Weighed(torch.zeros(B, N), torch.zeros(B, N), torch.zeros(B, N, dtype=torch.int64))
        self._first = Replayed(self._start, drafting.graphs)
        self._next = Replayed(self._go_on, drafting.graphs)
        self._last = Replayed(self._choose, drafting.graphs)

    def draft(self, shape: Shape) -> DraftTree:
        """The best nodes of so many levels, which lie in the buffers; fewer of both where the policy has it so."""
        self._weighing = self._drafting.policy.weighing
        depth, found = self._grow(shape.depth)
        num = min(shape.nodes, found)
        self._num_1.fill_(num)
        self._last()
        if self._weighing:
            num = self._num_worth(self._weighing, depth, num)
        buffers, T = self._drafting.buffers, 1 + num
        branches = Branches(buffers.depth_BT[:, :T], buffers.path_BTT[:, :T, :T])
        return DraftTree(
            buffers.tokens_BN[:, :num],
            branches,
            depth=depth,
            num_steps=depth,
            places=buffers.places_BT[:, :T],
            in_buffers=True,
        )

    def _grow(self, most: int) -> tuple[int, int]:
        """At most so many levels; how many, and the nodes of all of them."""
        policy, levels = self._drafting.policy, 1
        self._first()
        while levels < most and not (self._weighing and not policy.grows(levels, self._odds())):
            self._next()
            levels += 1
        return levels, self._top + (levels - 1) * self._top**2

    def _odds(self) -> float:
        """That one of the front's nodes is accepted, as the mean of the awaited rows."""
        scores = self._front.scores_Bk.tolist()
        odds = [sum(map(exp, scores[row])) for row in self._awaited]
        return sum(odds) / len(odds)

    def _num_worth(self, weighing: Weighing, depth: int, most: int) -> int:
        """How many of the best nodes the policy wants verified."""
        weighed(self._nodes, self._said_BC, self._top, self._best)
        said, odds, parents = (part[:, :most].tolist() for part in self._best)
        rows = self._awaited
        odds_by_node = list(zip(*(odds[row] for row in rows), strict=True))
        num = self._drafting.policy.num_worth(depth, [sum(node) / len(rows) for node in odds_by_node])
        weighing.drew([said[row][:num] for row in rows], [parents[row][:num] for row in rows], odds_by_node[:num])
        return num

    @property
    def _awaited(self) -> list[int]:
        return [row - self._drafting.first for row in self._drafting.policy.awaited]

    def _start(self) -> None:
        nodes, level_B = self._nodes, self._level_B
        level_B.zero_()
        nodes.tokens_BC.fill_(-1)
        nodes.scores_BC.fill_(-torch.inf)
        nodes.places_BC.fill_((self._deepest - 1) * self._top)  # of nodes that were not expanded: behind all that were
        self._add(self._guesser.start(), None)

    def _go_on(self) -> None:
        front = self._front
        branches = Branches(front.depth_Bk, front.slots_BkD)
        self._add(self._guesser.go_on(front.tokens_Bk, branches), front.paths_BkD)

    def _add(self, logits_BFV: Tensor, paths_BFD: Tensor | None) -> None:
        """Children of nodes with these paths (None: of the root)."""
        sampler, nodes, seen_BFC = self._drafting.sampler, self._nodes, None
        num = 1 if paths_BFD is None else self._top
        if sampler.kind.penalized:
            seen_BFC = _seen(paths_BFD, self._level_B, nodes.tokens_BC)
            logits_BFV = logits_BFV.expand(-1, num, -1)
        positions_B = self._guesser.next_at_B + self._level_B
        children = sampler.spread(logits_BFV, self._top, positions_B, nodes.tokens_BC, seen_BFC, self._guesser.ids)
        tokens_BFk, logp_BFk = (part_BFk.expand(-1, num, -1) for part_BFk in children)
        if self._weighing:
            logp_BFk = logp_BFk.float().contiguous()
            chances = torch.from_numpy(self._weighing.chances)
            weigh(self._level_B, chances, self._said_BC, logp_BFk, self._guesser.spread)
        grow(self._level_B, nodes, self._front, tokens_BFk, logp_BFk)

    def _choose(self) -> None:
        """The best of all nodes into the buffers."""
        buffers = self._drafting.buffers
        draft = Draft(buffers.tokens_BN, buffers.depth_BT, buffers.path_BTT, buffers.places_BT)
        choose(self._num_1, self._top, self._nodes, draft)


def _seen(paths_BFD: Tensor | None, level_B: Tensor, tokens_BC: Tensor) -> Tensor:
    """Which of all nodes lie on each path [B, F, C]; None: on that of the root."""
    B, C = tokens_BC.shape
    if paths_BFD is None:
        return torch.zeros(B, 1, C, dtype=torch.bool, device=tokens_BC.device)
    D = paths_BFD.shape[2]
    nodes_BFD = paths_BFD.where(torch.arange(D, device=paths_BFD.device) < level_B[:, None, None], C)
    return paths_BFD.new_zeros(B, paths_BFD.shape[1], 1 + C).scatter(2, nodes_BFD, 1)[..., :C] > 0
