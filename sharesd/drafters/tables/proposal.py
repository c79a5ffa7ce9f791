"""What tables propose for a row, and drafts of all rows packed from it.

Legend: B rows, N draft nodes, T = N + 1 (the root and the nodes).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from compile.attention import TreeAttentionMask
from sharesd.speculation.draft_tree import DraftRecord, DraftTree


class Proposal(NamedTuple):
    """Draft tree, best node first: its first n nodes are a tree."""

    tokens: list[int]
    parents: list[int]
    """Index of each node's parent, smaller than its own; -1: the root."""
    scores: list[float]
    """Probability that the target emits the node's whole path; non-increasing."""


def empty_proposal() -> Proposal:
    return Proposal([], [], [])


def best_chain(proposal: Proposal) -> Proposal:
    """Return the path through each node's best child as a draft."""
    nodes: list[int] = []
    for index, parent in enumerate(proposal.parents):
        if parent == (nodes[-1] if nodes else -1):
            nodes.append(index)
    return Proposal(
        [proposal.tokens[i] for i in nodes], list(range(-1, len(nodes) - 1)), [proposal.scores[i] for i in nodes]
    )


def merge(proposals: Sequence[Proposal]) -> Proposal:
    """Return one tree of all nodes, best first, with best scores."""
    if len(proposals) == 1:
        return proposals[0]
    scores: dict[tuple[int, ...], float] = {}
    for proposal in proposals:
        paths: list[tuple[int, ...]] = []
        for token, parent, score in zip(*proposal, strict=True):
            path = (*(paths[parent] if parent >= 0 else ()), token)
            paths.append(path)
            scores[path] = max(score, scores.get(path, 0.0))
    ranked = sorted(scores, key=lambda path: (-scores[path], len(path)))
    index = {path: i for i, path in enumerate(ranked)}
    return Proposal(
        [path[-1] for path in ranked], [index.get(path[:-1], -1) for path in ranked], [scores[p] for p in ranked]
    )


def pack(proposals: Sequence[Proposal], num_nodes: int, drafter: str) -> DraftTree:
    """Return each row's first `num_nodes` nodes; missing ones are never accepted."""
    B, T = len(proposals), num_nodes + 1
    parents = [proposal.parents[:num_nodes] for proposal in proposals]
    tokens = [(proposal.tokens + [-1] * num_nodes)[:num_nodes] for proposal in proposals]
    record = DraftRecord(drafter, path_probs=[proposal.scores for proposal in proposals])
    if all(each == list(range(-1, len(each) - 1)) for each in parents):
        tokens_BN, depth = torch.tensor(tokens, dtype=torch.int64), max(map(len, parents))
        return DraftTree(tokens_BN, depth=depth, record=record)
    # Paths (lists of verify rows) of all trees, concatenated; missing nodes are children of the root.
    paths: list[list[int]] = []
    for each in parents:
        first = len(paths)
        paths.append([0])
        for index, parent in enumerate(each, 1):
            paths.append([*paths[first + parent + 1], index])
        paths += ([0, index] for index in range(len(each) + 1, T))
    depths = [len(path) - 1 for path in paths]
    numbers = [*chain.from_iterable(tokens), *depths, *chain.from_iterable((path + [0] * T)[:T] for path in paths)]
    # One array, made by numpy in half the time of torch.
    parts = torch.from_numpy(np.array(numbers)).split([B * num_nodes, B * T, B * T * T])
    tokens_BN, tree_mask = parts[0].view(B, num_nodes), TreeAttentionMask(parts[1].view(B, T), parts[2].view(B, T, T))
    return DraftTree(tokens_BN, tree_mask, depth=max(depths), record=record)
