"""Trees and chains of draft tokens from a model or head.

Trees follow EAGLE-2 (Li et al. 2024, arXiv 2406.16858). Each step expands the likeliest nodes of the last level. A node
is as likely as its whole path, so the best n nodes are a tree for every n.

Legend: B rows, F nodes of a level that are expanded, k children of each, C nodes that can be found, D levels, T rows of
a verify step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import exp

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.cuda_graphs import Replayed
from compile.tree_expand import (
    BestNodes,
    ExpandedDraft,
    Frontier,
    Nodes,
    expand_tree,
    record_best_nodes,
    rescore_children,
    select_nodes,
)
from sharesd.drafters.base import DraftContext
from sharesd.drafters.chain_draft import ChainDraft, DraftStepper
from sharesd.speculation.draft_scorer import DraftScorer
from sharesd.speculation.draft_tree import DraftRecord, DraftShape, DraftTree


class DraftGenerator:
    """Chains, and trees if there are any, for one kind of sampling."""

    def __init__(
        self,
        stepper: DraftStepper,
        context: DraftContext,
        *,
        shapes: Sequence[DraftShape],
        branching: int,
        tree_cls: Callable[..., TreeDraft] | None = None,
    ) -> None:
        """`branching`: expanded nodes of a tree level, and children of each."""
        self._stepper, self._context, self._tree_cls = stepper, context, tree_cls or TreeDraft
        self._branching, self._max_depth = branching, shapes[-1].depth

    def draft(self, shape: DraftShape) -> DraftTree:
        return self.tree.draft(shape) if shape.is_tree else self._chain.draft(shape.depth)

    @cached_property
    def _chain(self) -> ChainDraft:
        return ChainDraft(self._stepper, self._context)

    @cached_property
    def tree(self) -> TreeDraft:
        return self._tree_cls(self._stepper, self._context, branching=self._branching, max_depth=self._max_depth)


class TreeDraft:
    """Trees expanded level by level, with KV above the cache's lengths."""

    def __init__(self, stepper: DraftStepper, context: DraftContext, *, branching: int, max_depth: int) -> None:
        """`branching`: see `DraftGenerator`."""
        self._stepper, self._context = stepper, context
        self._branching, self._max_depth = branching, max_depth
        B, device = len(stepper.root_pos_B), stepper.root_pos_B.device
        C = branching + (max_depth - 1) * branching**2

        def zeros(*size: int) -> Tensor:
            return torch.zeros(B, *size, dtype=torch.int64, device=device)

        self._level_B = zeros()  # nodes above those of the coming level
        self._num_1 = torch.zeros(1, dtype=torch.int64, device=device)  # nodes wanted
        self._nodes = Nodes(zeros(C), torch.zeros(B, C, device=device), zeros(C, max_depth), zeros(C))
        scores_Bk = torch.zeros(B, branching, device=device)
        self._frontier = Frontier(
            zeros(branching), scores_Bk, zeros(branching, max_depth), zeros(branching, max_depth), zeros(branching)
        )
        self._scorer: DraftScorer | None = None  # tells how deep the tree grows and how much of it is verified
        self._draft_probs_BC = torch.zeros(B, C, device=device)  # the model's probability of each node after its parent
        N = context.buffers.tokens_BN.shape[1]
        self._best = BestNodes(torch.zeros(B, N), torch.zeros(B, N), torch.zeros(B, N, dtype=torch.int64))
        self._first = Replayed(self._start, context.graphs)
        self._next = Replayed(self._step, context.graphs)
        self._last = Replayed(self._choose, context.graphs)

    def draft(self, shape: DraftShape) -> DraftTree:
        """Return the best nodes of this many levels, in the buffers."""
        self._scorer = self._context.scorer
        depth, found = self._grow(shape.depth)
        num = min(shape.nodes, found)
        self._num_1.fill_(num)
        self._last()
        if self._scorer:
            num = self._num_worth(self._scorer, num)
        buffers, T = self._context.buffers, 1 + num
        tree_mask = TreeAttentionMask(buffers.depth_BT[:, :T], buffers.path_BTT[:, :T, :T])
        return DraftTree(
            buffers.tokens_BN[:, :num],
            tree_mask,
            depth=depth,
            kv_slots=buffers.kv_slots_BT[:, :T],
            in_buffers=True,
            record=DraftRecord(num_steps=depth),
        )

    def _grow(self, max_levels: int) -> tuple[int, int]:
        """Expand at most `max_levels` levels; return levels and nodes found."""
        levels, scorer = 1, self._scorer
        self._first()
        while levels < max_levels and (scorer is None or self._grows(scorer, levels)):
            self._next()
            levels += 1
        return levels, self._branching + (levels - 1) * self._branching**2

    def _grows(self, scorer: DraftScorer, levels: int) -> bool:
        """Return True if another level pays, by a frontier node's acceptance probability, mean of the scorer's rows."""
        scores, rows = self._frontier.scores_Bk.tolist(), self._lines(scorer)
        return scorer.should_continue(levels, sum(sum(map(exp, scores[row])) for row in rows) / len(rows))

    def _num_worth(self, scorer: DraftScorer, max_nodes: int) -> int:
        """Return the number of the best nodes that are worth verifying."""
        record_best_nodes(self._nodes, self._draft_probs_BC, self._branching, self._best)
        draft_probs, accept_probs, parents = (part[:, :max_nodes].tolist() for part in self._best)
        rows = self._lines(scorer)
        by_node = zip(*(accept_probs[row] for row in rows), strict=True)
        num = scorer.num_tree_nodes_worth([sum(node) / len(rows) for node in by_node])
        scorer.set_tree([draft_probs[row][:num] for row in rows], [parents[row][:num] for row in rows])
        return num

    def _lines(self, scorer: DraftScorer) -> list[int]:
        return [row - self._context.first for row in scorer.rows]

    def _start(self) -> None:
        nodes, level_B = self._nodes, self._level_B
        level_B.zero_()
        nodes.tokens_BC.fill_(-1)
        nodes.scores_BC.fill_(-torch.inf)
        # Nodes that are not expanded have a slot after those of all nodes that can be.
        nodes.places_BC.fill_((self._max_depth - 1) * self._branching)
        self._add(self._stepper.start(), None)

    def _step(self) -> None:
        frontier = self._frontier
        tree_mask = TreeAttentionMask(frontier.depth_Bk, frontier.slots_BkD)
        self._add(self._stepper.step(frontier.tokens_Bk, tree_mask), frontier.paths_BkD)

    def _add(self, logits_BFV: Tensor, paths_BFD: Tensor | None) -> None:
        """Add children of nodes with these paths (None: of the root)."""
        sampler, nodes, seen_BFC = self._context.sampler, self._nodes, None
        num = 1 if paths_BFD is None else self._branching
        if sampler.kind.penalized:
            seen_BFC = _seen(paths_BFD, self._level_B, nodes.tokens_BC)
            logits_BFV = logits_BFV.expand(-1, num, -1)
        positions_B = self._stepper.next_pos_B + self._level_B
        children = sampler.top_tokens(
            logits_BFV, self._branching, positions_B, nodes.tokens_BC, seen_BFC, self._stepper.ids
        )
        tokens_BFk, logp_BFk = (part_BFk.expand(-1, num, -1) for part_BFk in children)
        if self._scorer:
            logp_BFk = logp_BFk.float().contiguous()
            chances = torch.from_numpy(self._scorer.calibration.calibrated_probs)
            rescore_children(self._level_B, chances, self._draft_probs_BC, logp_BFk, self._stepper.logit_noise)
        expand_tree(self._level_B, nodes, self._frontier, tokens_BFk, logp_BFk)

    def _choose(self) -> None:
        """Write the best of all nodes to the buffers."""
        buffers = self._context.buffers
        draft = ExpandedDraft(buffers.tokens_BN, buffers.depth_BT, buffers.path_BTT, buffers.kv_slots_BT)
        select_nodes(self._num_1, self._branching, self._nodes, draft)


def _seen(paths_BFD: Tensor | None, level_B: Tensor, tokens_BC: Tensor) -> Tensor:
    """Return a mask [B, F, C] of the nodes on each path."""
    B, C = tokens_BC.shape
    if paths_BFD is None:
        return torch.zeros(B, 1, C, dtype=torch.bool, device=tokens_BC.device)
    D = paths_BFD.shape[2]
    nodes_BFD = paths_BFD.where(torch.arange(D, device=paths_BFD.device) < level_B[:, None, None], C)
    return paths_BFD.new_zeros(B, paths_BFD.shape[1], 1 + C).scatter(2, nodes_BFD, 1)[..., :C] > 0
