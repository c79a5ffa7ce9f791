"""Decaying statistics of drafts: tokens accepted, by position and in all.

Counts fade with `age`: the number of rounds, and more at a new text. They fade when they are read or added to, so a
round costs nothing where they are not used.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

DECAY = 0.985
"""Factor by which counts fade in a round: about the last 67 rounds count."""
SLOW_DECAY = 0.9985
"""Factor, for each new count, by which the long-run counts fade, which stand in for missing recent ones."""
PRIOR = 4.0
"""Weight, in drafts, of the long-run counts in an estimate."""


class RunningMeans:
    """Weighted means of some numbers over recent rounds."""

    def __init__(self, *first: float) -> None:
        """`first`: means before anything was added."""
        self._recent, self._long, self._age = [0.0] * (1 + len(first)), [PRIOR * each for each in (1.0, *first)], 0

    def add(self, age: int, *numbers: float) -> None:
        kept, self._age, now = DECAY ** (age - self._age), age, (1.0, *numbers)
        self._recent = [kept * old + new for old, new in zip(self._recent, now, strict=True)]
        self._long = [SLOW_DECAY * old + new for old, new in zip(self._long, now, strict=True)]

    def at(self, age: int) -> list[float]:
        """Return the means."""
        kept, usual = DECAY ** (age - self._age), PRIOR / self._long[0]
        weight, *sums = (kept * recent + usual * long for recent, long in zip(self._recent, self._long, strict=True))
        return [each / weight for each in sums]


class AcceptanceEstimator:
    """Acceptance of drafts of one kind: by position, and the mean of drafts that end early."""

    def __init__(self, num_positions: int, alpha: float) -> None:
        """`alpha`: acceptance of a token after accepted ones, before any draft was verified."""
        self._tried, self._kept = [0.0] * num_positions, [0.0] * num_positions  # decayed, by position
        self._pool = (PRIOR, PRIOR * alpha)  # tries and hits at any position
        self.last_age = 0
        """Age at the last draft."""
        self.means: RunningMeans | None = None
        """Means of accepted tokens, steps and nodes of drafts that end early; None: none was made."""

    def record(self, age: int, accepted: int, steps: int, nodes: int) -> None:
        """Count a draft: accepted tokens, steps made, nodes verified."""
        if age > self.last_age:
            fade = DECAY ** (age - self.last_age)
            self._tried, self._kept = [fade * each for each in self._tried], [fade * each for each in self._kept]
            self.last_age = age
        tries, hits = self._pool
        for at in range(min(accepted + 1, steps)):
            self._tried[at] += 1
            self._kept[at] += accepted > at
            tries, hits = SLOW_DECAY * tries + 1, SLOW_DECAY * hits + (accepted > at)
        self._pool = tries, hits
        if self.means is not None:
            self.means.add(age, accepted, steps, nodes)

    def cumulative_acceptance(self, age: int) -> list[float]:
        """Return the probability, at each position, of acceptance up to it."""
        fade, weight = DECAY ** (age - self.last_age), 2 * PRIOR
        prior = weight * self._pool[1] / self._pool[0]
        counts = zip(self._kept, self._tried, strict=True)
        return list(accumulate(((fade * hits + prior) / (fade * tries + weight) for hits, tries in counts), mul))
