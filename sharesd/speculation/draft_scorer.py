"""A draft that is weighed while it is made: what a model says of each guess, what that is worth, what came of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from sharesd.speculation.acceptance_stats import FORGET
from sharesd.speculation.calibration import Confidence
from sharesd.speculation.draft_proposal import spine

GROWTH = 4.0, 2.0
"""Odds of what a draft step goes on from, and tokens accepted in it, which are assumed before there is evidence."""


class Weighing:
    """Of drafts of one kind, of some rows together."""

    def __init__(self) -> None:
        self._confidence = Confidence()
        # By the steps before one: such odds, and the tokens that were accepted in it; decayed.
        self._growth: dict[int, tuple[float, float]] = defaultdict(lambda: GROWTH)
        self.begin(0)

    def begin(self, num_rows: int) -> None:
        """A draft of so many rows, that has no guess yet."""
        self._said: list[list[float]] = [[] for _ in range(num_rows)]
        self._parents: list[list[int]] = [[] for _ in range(num_rows)]
        self.odds: list[Sequence[float]] = []
        """Of each guess, best first: the odds that each row is accepted so far."""
        self.fronts: list[float] = []
        """The odds of what each step behind the first went on from."""

    @property
    def chances(self) -> NDArray[np.float32]:
        """What a model's probabilities are worth, see `Confidence.chances`."""
        return self._confidence.chances

    def mean_odds(self) -> list[float]:
        """Of each guess: the odds that a row is accepted so far."""
        return [sum(odds) / len(odds) for odds in self.odds]

    def gain(self, depth: int, odds: float) -> float:
        """Tokens that a step promises behind so many, where these are the odds of what it goes on from."""
        promised, held = self._growth[depth]
        return odds * held / promised

    def guessed(self, said: Sequence[float]) -> None:
        """The probabilities that a model gave to the next guess of its chain, of each row."""
        before = self.odds[-1] if self.odds else [1.0] * len(said)
        self.odds.append([odds * self._confidence.chance(each) for odds, each in zip(before, said, strict=True)])
        for row, each in enumerate(said):
            self._said[row].append(each)
            self._parents[row].append(len(self.odds) - 2)

    def drew(self, said: list[list[float]], parents: list[list[int]], odds: Sequence[Sequence[float]]) -> None:
        """The nodes of a tree that are verified, best first: of each row what the model says of them, and their parents
        as a Guess has them; of each node the odds that each row is accepted so far.
        """
        self._said, self._parents, self.odds = said, parents, list(odds)

    def learn(self, accepted: Sequence[AbstractSet[int]]) -> list[tuple[int, int]]:
        """These guesses of each row were accepted. Of each row: how long its best chain is, and how much of it was."""
        if len(accepted) != len(self._said):
            return []
        found = []
        for said, parents, kept in zip(self._said, self._parents, accepted, strict=True):
            self._confidence.learn(said, parents, kept)
            chain = spine(parents)
            found.append((len(chain), next((num for num, node in enumerate(chain) if node not in kept), len(chain))))
        for depth, odds in enumerate(self.fronts, 1):
            promised, held = self._growth[depth]
            went_on = sum(len(kept) > depth for kept in accepted) / len(accepted)
            self._growth[depth] = FORGET * promised + odds, FORGET * held + went_on
        return found
