"""Acceptance probabilities of the draft that is being made, and how far it pays.

Draft models are more confident than the target agrees with them, so their probabilities are calibrated by outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from sharesd.speculation.acceptance_stats import DECAY

GROWTH = 12.0
"""Weight, in draft steps, of the prior in the acceptance of a step's token after an accepted one."""
RANGES = 10
"""Number of ranges, all of the same width."""
PRIOR = 4.0
"""Weight, in draft tokens, of the model's own probability in each range."""
KEPT = 0.995
"""Decay of a range's counts per token: about the last 200 tokens count."""


class ProbabilityCalibration:
    """Acceptance of draft tokens, after accepted ones, by the model's probability."""

    def __init__(self) -> None:
        self._tries, self._hits = np.full(RANGES, PRIOR), PRIOR * (np.arange(RANGES) + 0.5) / RANGES

    @property
    def calibrated_probs(self) -> NDArray[np.float32]:
        """Calibrated values of probability 0 and of each range's middle."""
        return np.append(0.0, self._hits / self._tries).astype(np.float32)

    def calibrated(self, draft_prob: float) -> float:
        """Return the acceptance probability of a token with this draft probability."""
        number = _range(draft_prob)
        return float(self._hits[number] / self._tries[number])

    def record(self, draft_probs: Sequence[float], parents: Sequence[int], accepted: Collection[int]) -> None:
        """Count a draft: probabilities, parents as in a `Proposal`, and verify rows, from 1, of accepted nodes."""
        for node, (each, parent) in enumerate(zip(draft_probs, parents, strict=True)):
            if parent < 0 or parent + 1 in accepted:
                number = _range(each)
                self._tries[number] = KEPT * self._tries[number] + 1
                self._hits[number] = KEPT * self._hits[number] + (node + 1 in accepted)


def _range(draft_prob: float) -> int:
    return int(min(RANGES - 1, max(0.0, RANGES * draft_prob)))  # 0 for NaN, which heads may draft with


def num_worth(gains: Sequence[float], price: Callable[[int], float], least: int) -> tuple[int, float]:
    """Return how many nodes to verify, at least some, and their gain less the step's price.

    `gains`: tokens to expect of so many nodes. `price`: tokens that the time of a step of so many tokens is worth.
    """
    values = [gain - price(1 + num) for num, gain in enumerate(gains)]
    best = max(range(least, len(values)), key=values.__getitem__)
    return best, values[best]


class DraftScorer:
    """Scores the nodes of drafts of one kind in some rows together, and tells drafters when to end.

    The policy begins it for each draft, with what time is worth.
    """

    def __init__(self, prior: float) -> None:
        """`prior`: acceptance of a token after an accepted one, before any draft was verified."""
        self.calibration = ProbabilityCalibration()
        # Sums of the acceptance probabilities of steps' parents, and of the tokens accepted from these steps. They fade
        # with each draft, so that drafts which end early are made longer again.
        self._growth, self._prior = (0.0, 0.0), prior
        self.begin(())

    def begin(self, rows: Sequence[int], step_price: float = 0.0, price: Callable[[int], float] = float) -> None:
        """Start a draft of these rows; `step_price`: tokens that a draft step is worth; `price`: see `num_worth`."""
        self.rows, self._step_price, self._price = rows, step_price, price
        self.draft_probs: list[list[float]] = [[] for _ in rows]
        """The model's probabilities of tokens after their parents, by row."""
        self._parents: list[list[int]] = [[] for _ in rows]
        self._reached = [1.0] * len(rows)  # acceptance probability of each row's last token of a chain
        self._parent_probs: list[float] = []  # of each step after the first: that one of its parents is accepted

    @property
    def num_nodes(self) -> int:
        """Nodes of each row that were scored."""
        return len(self.draft_probs[0]) if self.draft_probs else 0

    def should_continue(self, depth: int, accept_prob: float | None = None) -> bool:
        """Return True if a draft step after `depth` others pays.

        `accept_prob`: probability that a parent is accepted, mean of the rows; None: of a chain's last token.
        """
        nodes = depth
        if accept_prob is None:
            accept_prob = sum(self._reached) / len(self._reached)
        else:
            nodes += 1  # a tree has more nodes than levels
        expected, accepted = self._growth
        ratio = (accepted + GROWTH * self._prior) / (expected + GROWTH)
        pays = accept_prob * ratio > self._step_price + self._price(nodes + 2) - self._price(nodes + 1)
        if pays:
            self._parent_probs.append(accept_prob)
        return pays

    def num_tree_nodes_worth(self, accept_probs: Sequence[float]) -> int:
        """Return the number of tree nodes worth verifying, by mean acceptance, best first."""
        return num_worth(list(accumulate(accept_probs, initial=0.0)), self._price, 1)[0]

    def add_token(self, draft_probs: Sequence[float]) -> None:
        """Append a token to each row's chain, with the model's probabilities."""
        for line, prob in enumerate(draft_probs):
            self._reached[line] *= self.calibration.calibrated(prob)
            self._parents[line].append(len(self.draft_probs[line]) - 1)
            self.draft_probs[line].append(prob)

    def set_tree(self, draft_probs: list[list[float]], parents: list[list[int]]) -> None:
        """Set each row's nodes that are verified, best first."""
        self.draft_probs, self._parents = draft_probs, parents

    def record(self, accepted: Sequence[Sequence[int]]) -> None:
        """Count a verified draft: verify rows, from 1, of each row's accepted nodes."""
        if len(accepted) != len(self.draft_probs):
            return
        for draft_probs, parents, kept in zip(self.draft_probs, self._parents, accepted, strict=True):
            self.calibration.record(draft_probs, parents, kept)
        further = sum(max(0, len(kept) - 1) for kept in accepted) / len(accepted)  # tokens of steps after the first
        expected_before, accepted_before = self._growth
        self._growth = DECAY * expected_before + sum(self._parent_probs), DECAY * accepted_before + further
