"""What every table is to its caller, and what all share: growing trees, learning how often they are right."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush, heapreplace
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import numpy as np

from sharesd.speculation.draft_proposal import Guess

State = TypeVar("State")


class Table(Protocol):
    """Guesses from tables. Lifecycle: begin, then guess and extend once per round.

    Rows of a batch have their own texts. What is learnt about hit rates is shared by all rows and outlives their texts:
    it moves scores, never what a table knows of a row. Asking about a row before its `begin` is an error of the caller.
    """

    name: str

    @property
    def num_successors(self) -> int:
        """How many of the target's likeliest tokens after each token `learn` wants; 0 = it learns from texts alone."""
        ...

    def learn(self, row_tokens: np.ndarray, successors: np.ndarray) -> None:
        """Tokens [R] that the target read, and the likeliest tokens after each [R, num_successors], likeliest first."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of what lasts beyond a text."""
        ...

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """A new text for this row; its last token is the root. Costs little if it continues the row's old text."""
        ...

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """The tokens that the target has emitted since. What they say about the last guess is learnt."""
        ...

    def guess(self, row: int, budget: int, ahead: Sequence[int] = ()) -> Guess:
        """At most `budget` nodes after the row's last token; none where the table knows nothing.

        Or after the tokens `ahead` that might come next; of what becomes of such guesses nothing is learnt.
        """
        ...


SMALLEST = 1e-3
"""Rate of what never hits: were it 0, it would not be tried again, and could not recover."""


class HitRates:
    """Running ratios of hits to tries, one per cell, with a prior; evidence fades with the number of tries.

    A try may weigh less than 1: learning with the *expected* hits as tries gives the factor by which expectations err.
    """

    def __init__(self, priors: Iterable[float], *, weight: float = 2.0, memory: float = 256.0) -> None:
        """The priors count as `weight` tries; a try weighs 1/e after `memory` further ones. 1/2 and 2: Laplace."""
        self.hits = [weight * prior for prior in priors]
        self.tries = [weight] * len(self.hits)
        self._keep = 1 - 1 / memory

    def __getitem__(self, cell: int) -> float:
        return max(SMALLEST, self.hits[cell] / self.tries[cell])

    def of(self, cells: slice) -> list[float]:
        """Of several cells."""
        hits_and_tries = zip(self.hits[cells], self.tries[cells], strict=True)
        return [max(SMALLEST, hits / tries) for hits, tries in hits_and_tries]

    def learn(self, cell: int, hit: bool, expected: float = 1.0) -> None:
        """One try."""
        keep = 1 - (1 - self._keep) * expected
        self.tries[cell] = self.tries[cell] * keep + expected
        self.hits[cell] = self.hits[cell] * keep + hit


def grow(
    budget: int, root: State, children: Callable[[State, float], Iterable[tuple[float, int, State]]]
) -> tuple[Guess, list[State]]:
    """The `budget` most probable nodes of a tree, and their states.

    `children(state, least)` gives (probability given the parent, token, state) of each child, with distinct tokens; it
    may leave out children of at most `least`, which have no chance. Best first: a node is taken when it has the highest
    score of all nodes whose parents were taken, so no node that is left out beats one that is in the tree. Ties go to
    the node found first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    states: list[State] = []
    heap: list[tuple[float, int, int, int, State]] = []
    best = [0.0] * budget  # scores of the best nodes found so far, taken or not: a heap, smallest first
    found, at, score, state = 0, -1, 1.0, root
    while len(tokens) < budget:
        for p, token, below in children(state, best[0] / score):
            below_score = score * min(p, 1.0)
            if below_score > best[0]:
                heapreplace(best, below_score)
                heappush(heap, (-below_score, found, token, at, below))
                found += 1
        if not heap:
            break
        at = len(tokens)
        negative, _, token, parent, state = heappop(heap)
        score = -negative
        tokens.append(token)
        parents.append(parent)
        scores.append(score)
        states.append(state)
    return Guess(tokens, parents, scores), states


def outcomes(guess: Guess, emitted: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """(node, hit) of every node that the target has decided about: those whose parents it has emitted.

    The caller may have verified only the first nodes: then the emitted tokens end before the others are decided.
    """
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(guess.parents):
        below.setdefault(parent, []).append(node)
    at: int | None = -1
    for token in emitted:
        nodes, at = below.get(at, []), None  # type: ignore[arg-type]
        for node in nodes:
            hit = guess.tokens[node] == token
            yield node, hit
            if hit:
                at = node
        if at is None:
            return


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A new file under `path`, which appears whole or not at all. OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="partial-") as scratch:
        fresh = Path(scratch) / path.name
        with fresh.open("wb") as stream:
            yield stream
        os.replace(fresh, path)
