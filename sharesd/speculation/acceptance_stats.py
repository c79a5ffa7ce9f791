"""Running, decaying statistics of drafts: tokens accepted, by position and in all, and what tables promised."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

DECAY = 0.985
"""Factor by which counts fade in a round: about the last 67 rounds count."""
SLOW_DECAY = 0.9985
"""Factor by which the long-run counts fade, which stand in for missing recent ones."""
PRIOR = 4.0
"""Weight, in drafts, of the long-run counts in an estimate."""


class AcceptanceEstimator:
    """Acceptance of drafts of one kind: by position, and the mean of drafts that end early."""

    def __init__(self, num_positions: int, alpha: float) -> None:
        """`alpha`: acceptance of a token after accepted ones, before any draft was verified."""
        self._tried, self._kept = [0.0] * num_positions, [0.0] * num_positions  # decayed, by position
        self._pool = (PRIOR, PRIOR * alpha)  # tries and hits at any position
        self._recent, self._long = [0.0] * 4, [0.0] * 4  # decayed sums over drafts: 1, accepted, steps, nodes
        self.first: tuple[float, float, float] | None = None
        """Accepted tokens, steps and nodes to expect before any draft was verified."""

    def fade(self, share: float) -> None:
        self._tried = [share * count for count in self._tried]
        self._kept = [share * count for count in self._kept]
        self._recent = [share * count for count in self._recent]

    def record(self, accepted: int, steps: int, nodes: int) -> None:
        """Count a draft: accepted tokens, steps made, nodes verified."""
        for at in range(min(accepted + 1, steps)):
            self._tried[at] += 1
            self._kept[at] += accepted > at
            self._pool = (SLOW_DECAY * self._pool[0] + 1, SLOW_DECAY * self._pool[1] + (accepted > at))
        now = (1.0, accepted, steps, nodes)
        self._recent = [old + new for old, new in zip(self._recent, now, strict=True)]
        self._long = [SLOW_DECAY * old + new for old, new in zip(self._long, now, strict=True)]

    @property
    def num_drafts(self) -> float:
        """Recent drafts, decayed."""
        return self._recent[0]

    def cumulative_acceptance(self) -> list[float]:
        """Return the probability, at each position, of acceptance up to it."""
        alpha, weight = self._pool[1] / self._pool[0], 2 * PRIOR
        counts = zip(self._kept, self._tried, strict=True)
        return list(accumulate(((hits + weight * alpha) / (tries + weight) for hits, tries in counts), mul))

    def gain(self, depth: int) -> float:
        """Return the accepted tokens of drafts that always have this depth."""
        return sum(self.cumulative_acceptance()[:depth])

    def mean(self) -> tuple[float, float, float]:
        """Return the mean accepted tokens, steps and nodes of drafts that end early."""
        assert self.first is not None
        usual = [PRIOR * each + seen for each, seen in zip((1.0, *self.first), self._long, strict=True)]
        pairs = zip(self._recent, usual, strict=True)
        weight, accepted, steps, nodes = (recent + PRIOR * each / usual[0] for recent, each in pairs)
        return accepted / weight, steps / weight, nodes / weight


class LookupCalibration:
    """Accepted over predicted tokens of tables: the best of many estimates is too high on average."""

    def __init__(self) -> None:
        self._recent, self._long = (0.0, 0.0), (2 * PRIOR, 2 * PRIOR)  # decayed: predicted, accepted tokens

    def fade(self, share: float) -> None:
        self._recent = (share * self._recent[0], share * self._recent[1])

    def record(self, predicted: float, accepted: float) -> None:
        self._recent = (self._recent[0] + predicted, self._recent[1] + accepted)
        self._long = (SLOW_DECAY * self._long[0] + predicted, SLOW_DECAY * self._long[1] + accepted)

    @property
    def ratio(self) -> float:
        usual = self._long[1] / self._long[0]
        return (self._recent[1] + 2 * PRIOR * usual) / (self._recent[0] + 2 * PRIOR)
