"""Lookup tables: base class, growing trees, running hit rates, files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from typing import TypeVar

import numpy as np

from sharesd.drafters.tables.proposal import Proposal

State = TypeVar("State")


class Table:
    """Base of lookup tables.

    Calls for each row: begin; then propose and extend, once per round. Hit rates are shared by all rows and outlive
    their texts: they change scores, never the stored content of a row.
    """

    name: str

    @property
    def num_successors(self) -> int:
        """Likeliest tokens per token that `learn` needs; 0: it learns only from texts."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of content that is kept between texts."""
        return 0

    def learn(self, row_tokens: np.ndarray, successors: np.ndarray) -> None:
        """Learn likeliest `successors` [R, num_successors], best first, of read tokens [R]."""

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """Start a row's text, ending in the root; cheap if it continues."""
        raise NotImplementedError

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Append newly emitted tokens, and learn from the last draft."""
        raise NotImplementedError

    def propose(self, row: int, budget: int) -> Proposal:
        """Return at most `budget` nodes."""
        raise NotImplementedError


SMALLEST = 1e-3
"""Minimum hit rate, since a cell at 0 could not recover."""
KEEP = 1 - 1 / 256
"""What a further try leaves of the tries before it."""


class HitRates:
    """Running ratios of hits to tries, or expected hits, per cell."""

    def __init__(self, priors: Iterable[float], *, weight: float = 2.0) -> None:
        """Start from priors of `weight` tries."""
        self.hits = [weight * prior for prior in priors]
        self.tries = [weight] * len(self.hits)

    def __getitem__(self, cell: int) -> float:
        return max(SMALLEST, self.hits[cell] / self.tries[cell])

    def of(self, cells: slice) -> list[float]:
        hits_and_tries = zip(self.hits[cells], self.tries[cells], strict=True)
        return [max(SMALLEST, hits / tries) for hits, tries in hits_and_tries]

    def learn(self, cell: int, hit: bool, expected: float = 1.0) -> None:
        keep = 1 - (1 - KEEP) * expected
        self.tries[cell] = self.tries[cell] * keep + expected
        self.hits[cell] = self.hits[cell] * keep + hit


def grow(
    budget: int, root: State, children: Callable[[State, float], Iterable[tuple[float, int, State]]]
) -> tuple[Proposal, list[State]]:
    """Return the `budget` most probable nodes of a tree, and their states.

    `children(state, least)` gives (probability given the parent, token, state) of each child, with distinct tokens; it
    may leave out children of at most `least`. Ties go to the node found first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    states: list[State] = []
    heap: list[tuple[float, int, tuple[int, int, State]]] = []  # -score, number as found, node
    best = [0.0] * budget  # scores of the best nodes found so far, in the tree or not: a heap, smallest first
    found, at, score, state = 0, -1, 1.0, root
    while len(tokens) < budget:
        for p, token, below in children(state, best[0] / score):
            below_score = score * min(p, 1.0)
            if below_score > best[0]:
                heapreplace(best, below_score)
                heappush(heap, (-below_score, found, (token, at, below)))
                found += 1
        if not heap:
            break
        at = len(tokens)
        negative, _, (token, parent, state) = heappop(heap)
        score = -negative
        tokens.append(token)
        parents.append(parent)
        scores.append(score)
        states.append(state)
    return Proposal(tokens, parents, scores), states


def outcomes(proposal: Proposal, emitted: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield (node, hit) of every node that the target has decided."""
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(proposal.parents):
        below.setdefault(parent, []).append(node)
    at: int | None = -1
    for token in emitted:
        nodes, at = below.get(at, []), None  # type: ignore[arg-type]
        for node in nodes:
            hit = proposal.tokens[node] == token
            yield node, hit
            if hit:
                at = node
        if at is None:
            return
