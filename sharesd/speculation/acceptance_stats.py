"""What is accepted of drafts of one kind, by counts that fade.

Counts fade with `age`: the number of rounds, and more at a new text. They fade when they are read or added to, so a
round costs nothing where they are not used.
"""

from __future__ import annotations

from itertools import accumulate, islice
from operator import mul

import numpy as np

from sharesd.speculation.draft_tree import DraftShape

DECAY = 0.985
"""Factor by which counts fade in a round: about the last 67 rounds count."""
SLOW_DECAY = 0.9985
"""Factor, for each new count, by which the long-run counts fade, which stand in for missing recent ones."""
PRIOR = 4.0
"""Weight, in drafts, of the long-run counts in an estimate."""

Expected = tuple[float, float, float]
"""Accepted tokens, steps and nodes to expect of a draft."""


class FixedDrafts:
    """Drafts of a given length: acceptance by position."""

    def __init__(self, num_positions: int, alpha: float) -> None:
        """`alpha`: acceptance of a token after accepted ones, before any draft was verified."""
        self._tried, self._accepted = [0.0] * num_positions, [0.0] * num_positions  # by position
        self.last_age = 0
        """Age at the last draft."""
        self._usual = PRIOR, PRIOR * alpha  # tokens tried and accepted in the long run, at any position

    def record(self, age: int, accepted: int, steps: int, nodes: int) -> None:
        """Count a draft: accepted tokens, steps made, nodes verified."""
        num, fade = min(accepted + 1, steps), DECAY ** (age - self.last_age)
        self._tried = [fade * tried + (at < num) for at, tried in enumerate(self._tried)]
        self._accepted = [fade * before + (at < accepted) for at, before in enumerate(self._accepted)]
        kept, (tried, before) = SLOW_DECAY**num, self._usual
        self._usual, self.last_age = (kept * tried + num, kept * before + accepted), age

    def expected(self, age: int, shape: DraftShape) -> Expected:
        """Return what to expect of a draft of this shape."""
        fade, weight = DECAY ** (age - self.last_age), 2 * PRIOR
        prior, counts = weight * self._usual[1] / self._usual[0], zip(self._accepted, self._tried, strict=True)
        chances = ((fade * accepted + prior) / (fade * tried + weight) for accepted, tried in counts)
        return sum(islice(accumulate(chances, mul), shape.depth)), shape.depth, shape.nodes


class EndedDrafts:
    """Drafts that end early: means of all."""

    def __init__(self, *first: float) -> None:
        """`first`: accepted tokens, steps and nodes to expect before any draft was verified."""
        self._recent, self._usual = np.zeros(4), PRIOR * np.array([1.0, *first])
        self.last_age = 0
        """Age at the last draft."""

    def record(self, age: int, accepted: int, steps: int, nodes: int) -> None:
        """Count a draft: accepted tokens, steps made, nodes verified."""
        now = 1.0, accepted, steps, nodes
        self._recent = DECAY ** (age - self.last_age) * self._recent + now
        self._usual = SLOW_DECAY * self._usual + now
        self.last_age = age

    def expected(self, age: int, shape: DraftShape) -> Expected:
        """Return what to expect of a draft of this shape, the largest one of its kind."""
        sums = DECAY ** (age - self.last_age) * self._recent + PRIOR / self._usual[0] * self._usual
        _, accepted, steps, nodes = (sums / sums[0]).tolist()
        return accepted, steps, nodes
