"""Running, decaying statistics of drafts: acceptance, calibration of tables, and budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

DECAY = 0.985
"""Factor by which counts fade in a round: about the last 67 rounds count."""
POOLED = 8
"""Weight, in tries, of the pooled acceptance in each position's estimate."""
PRIOR_TOKENS = 8
"""Weight, in predicted tokens, of the prior that a table's predictions are right."""
ALLOWANCE, CREDIT, NEW_CREDIT, MAX_CREDIT, ENOUGH = 0.008, 2.0, (0.5, 6.0), 12.0, 0.5
"""Budget in plain steps: income, first, new-text, largest and resuming balance."""


class SpeculationBudget:
    """Balance of drafts' gains and losses against plain steps, in plain steps."""

    def __init__(self) -> None:
        self.balance = CREDIT
        self.is_empty = False

    def begin(self) -> None:
        """Start a new text; limit the effect of earlier gains and losses."""
        self.balance = min(max(self.balance, NEW_CREDIT[0]), NEW_CREDIT[1])
        self.is_empty = False

    def record(self, gain: float) -> None:
        """Count a round: emitted tokens less the plain steps of equal time."""
        self.balance = min(MAX_CREDIT, self.balance + ALLOWANCE + gain)
        self.is_empty = self.balance < (ENOUGH if self.is_empty else 0)

    def can_afford(self, loss: float) -> bool:
        """Return True if a trial may lose this many plain steps."""
        return not self.is_empty and self.balance >= min(loss, MAX_CREDIT)


class AcceptanceEstimator:
    """Running estimates of the acceptance and depth of drafts of one kind."""

    def __init__(self, num_positions: int, alpha: float) -> None:
        # Decayed counts by position: draft token k was verified after accepted ones, and was accepted.
        self._tried, self._kept = [0.0] * num_positions, [0.0] * num_positions
        self._pool = (4.0, 4.0 * alpha)  # tries and hits at any position, which fade ten times as slowly
        # Decayed attempts and successes of drafting token k after the first k - 1.
        self._asked, self._going = [0.0] * num_positions, [0.0] * num_positions
        self._go_pool = (4.0, 4.0 * alpha)
        self._drafts, self._nodes = 0.0, 0.0  # decayed

    def fade(self, share: float) -> None:
        self._tried = [share * count for count in self._tried]
        self._kept = [share * count for count in self._kept]
        self._asked = [share * count for count in self._asked]
        self._going = [share * count for count in self._going]
        self._drafts, self._nodes = share * self._drafts, share * self._nodes

    def record(self, accepted: int, depth: int, asked: int = 0, nodes: int = 0) -> None:
        """Count a draft: accepted tokens, levels, most possible levels, and nodes."""
        self._drafts, self._nodes = self._drafts + 1, self._nodes + nodes
        keep, asked = 1 - (1 - DECAY) / 10, max(asked, depth)
        for k in range(min(accepted + 1, asked)):
            self._tried[k] += 1
            self._kept[k] += accepted > k
            self._pool = (self._pool[0] * keep + 1, self._pool[1] * keep + (accepted > k))
        for k in range(1, min(depth + 1, asked)):
            self._asked[k] += 1
            self._going[k] += depth > k
            self._go_pool = (self._go_pool[0] * keep + 1, self._go_pool[1] * keep + (depth > k))

    def cumulative_acceptance(self) -> list[float]:
        """Return the probability, at each position, of acceptance up to it."""
        return _chained(self._tried, self._kept, self._pool)

    def continue_probs(self) -> list[float]:
        """Return, for each position, the probability that the draft reaches it."""
        return [1.0, *_chained(self._asked[1:], self._going[1:], self._go_pool)]

    def nodes(self, first: float) -> float:
        """Return the mean nodes of a draft, `first` before any draft was recorded."""
        return (self._nodes + first) / (self._drafts + 1)


def running_sums(values: Sequence[float]) -> list[float]:
    """Return sums of the first 0, 1, 2 ... values."""
    return list(accumulate(values, initial=0.0))


def _chained(tried: Sequence[float], kept: Sequence[float], pool: tuple[float, float]) -> list[float]:
    usual = pool[1] / pool[0]
    each = [(hits + POOLED * usual) / (tries + POOLED) for hits, tries in zip(kept, tried, strict=True)]
    return list(accumulate(each, lambda a, b: a * b))


class DraftEstimate(NamedTuple):
    """Estimates for drafts of one kind."""

    gains: list[float]
    """Accepted tokens of drafts of each depth, from 0."""
    steps: list[float]
    """Mean steps by depth, from 0; empty if drafts never end early."""
    nodes: float
    """Mean nodes of drafts that end early."""


class LookupCalibration:
    """Accepted over predicted tokens of tables: the best of many estimates is too high on average."""

    def __init__(self) -> None:
        self._rounds, self._nodes, self._predicted, self._accepted = 0.0, 0.0, 0.0, 0.0  # decayed
        self._pool = (0.0, 0.0)  # predicted and accepted tokens, which fade ten times as slowly

    def fade(self, share: float) -> None:
        self._rounds, self._nodes = share * self._rounds, share * self._nodes
        self._predicted, self._accepted = share * self._predicted, share * self._accepted

    def record(self, nodes: int, predicted: float, accepted: float) -> None:
        """Count a round: nodes verified, tokens predicted, tokens accepted."""
        self._rounds += 1
        self._nodes += nodes
        self._predicted += predicted
        self._accepted += accepted
        keep = 1 - (1 - DECAY) / 10
        self._pool = (keep * self._pool[0] + predicted, keep * self._pool[1] + accepted)

    @property
    def calibration_ratio(self) -> float:
        usual = (self._pool[1] + PRIOR_TOKENS) / (self._pool[0] + PRIOR_TOKENS)
        return (self._accepted + PRIOR_TOKENS * usual) / (self._predicted + PRIOR_TOKENS)

    @property
    def per_round(self) -> tuple[float, float]:
        """Accepted tokens and verified nodes per round; 0 before the first round."""
        rounds = self._rounds + 1
        return self._accepted / rounds, self._nodes / rounds
