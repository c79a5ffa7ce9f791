"""Draft proposals of tables as lists of tokens, parents and scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def best_path(parents: Sequence[int]) -> list[int]:
    """Return the nodes on the path through each node's best child."""
    chain: list[int] = []
    for index, parent in enumerate(parents):
        if parent == (chain[-1] if chain else -1):
            chain.append(index)
    return chain


def best_chain(proposal: Proposal) -> Proposal:
    """Return the path through each node's best child as a draft."""
    chain = best_path(proposal.parents)
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


def fill_up(model: Proposal, added: Iterable[tuple[int, Proposal]]) -> Proposal:
    """Return a model's draft with table nodes after its nodes (-1: root).

    Added scores apply if the text reaches the node, and continues with none of the node's children.
    """
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(model.tokens, model.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    known, scores = set(paths), dict[tuple[int, ...], float]()
    for at, proposal in added:
        reached = model.scores[at] if at >= 0 else 1.0
        children = zip(model.parents, model.scores, strict=True)
        left = max(0.0, reached - sum(score for parent, score in children if parent == at))
        below: list[tuple[int, ...] | None] = []  # paths; None: the model has drafted this path already
        for token, parent, score in zip(*proposal, strict=True):
            above = below[parent] if parent >= 0 else paths[at] if at >= 0 else ()
            path = None if above is None or (*above, token) in known else (*above, token)
            below.append(path)
            if path is not None:
                scores[path] = max(left * score, scores.get(path, 0.0))
    paths += sorted(scores, key=lambda path: (-scores[path], len(path)))
    index = {path: i for i, path in enumerate(paths)}
    more = paths[len(model.tokens) :]
    return Proposal(
        [path[-1] for path in paths],
        [*model.parents, *(index.get(path[:-1], -1) for path in more)],
        [*model.scores, *map(scores.__getitem__, more)],
    )
