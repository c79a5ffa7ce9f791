"""Draft proposals of tables as lists of tokens, parents and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
    chain: list[int] = []
    for index, parent in enumerate(proposal.parents):
        if parent == (chain[-1] if chain else -1):
            chain.append(index)
    return Proposal(
        [proposal.tokens[i] for i in chain], list(range(-1, len(chain) - 1)), [proposal.scores[i] for i in chain]
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
