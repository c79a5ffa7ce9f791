"""Acceptance probabilities of the draft that is being made, and how far it pays.

Draft models are more confident than the target agrees with them, so their probabilities are calibrated by outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from math import inf

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
        self._tries = [PRIOR] * RANGES
        self._hits = [PRIOR * (number + 0.5) / RANGES for number in range(RANGES)]
        self._values: NDArray[np.float32] | None = None

    @property
    def calibrated_probs(self) -> NDArray[np.float32]:
        """Calibrated values of probability 0 and of each range's middle."""
        if self._values is None:
            ratios = [hits / tries for hits, tries in zip(self._hits, self._tries, strict=True)]
            self._values = np.array([0.0, *ratios], dtype=np.float32)
        return self._values

    def calibrated(self, draft_prob: float) -> float:
        """Return the acceptance probability of a token with this draft probability."""
        number = _range(draft_prob)
        return self._hits[number] / self._tries[number]

    def record(self, draft_probs: Sequence[float], parents: Sequence[int], accepted: Collection[int]) -> None:
        """Count a draft: probabilities, parents as in a `Proposal`, and verify rows, from 1, of accepted nodes."""
        self._values = None
        for node, (each, parent) in enumerate(zip(draft_probs, parents, strict=True)):
            if parent < 0 or parent + 1 in accepted:
                number = _range(each)
                self._tries[number] = KEPT * self._tries[number] + 1
                self._hits[number] = KEPT * self._hits[number] + (node + 1 in accepted)


def _range(draft_prob: float) -> int:
    return int(min(RANGES - 1, max(0.0, RANGES * draft_prob)))  # 0 for NaN, which heads may draft with


def num_worth(
    gains: Sequence[float], worth: float, step_seconds: Callable[[int], float], least: int
) -> tuple[int, float]:
    """Return how many nodes to verify, at least some, and their gain less what their time is worth.

    `gains`: tokens to expect of so many nodes. `worth`: tokens per second. `step_seconds`: of a step of so many tokens.
    """
    best, most = len(gains) - 1, -inf
    for num in range(least, len(gains)):
        value = gains[num] - worth * step_seconds(1 + num)
        if value > most:
            best, most = num, value
    return best, most


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

    def begin(
        self,
        rows: Sequence[int],
        worth: float = 0.0,
        draft_step_s: float = 0.0,
        step_seconds: Callable[[int], float] = float,
    ) -> None:
        """Start a draft of these rows: `worth`, `step_seconds` as in `num_worth`; seconds of a draft step."""
        self.rows, self._worth, self._draft_step_s, self._step_seconds = rows, worth, draft_step_s, step_seconds
        self.draft_probs: list[list[float]] = [[] for _ in rows]
        """The model's probabilities of tokens after their parents, by row."""
        self._parents: list[list[int]] = [[] for _ in rows]
        self.accept_probs: list[Sequence[float]] = []
        """Acceptance probabilities of each node, best first, by row."""
        self.parent_probs: list[float] = []
        """Acceptance probabilities of the parents of each step after the first."""

    def should_continue(self, depth: int, accept_prob: float | None = None) -> bool:
        """Return True if a draft step after `depth` others pays.

        `accept_prob`: probability that a parent is accepted, mean of the rows; None: of a chain's last token.
        """
        nodes = depth
        if accept_prob is None:
            last = self.accept_probs[-1]
            accept_prob = sum(last) / len(last)
        else:
            nodes += 1  # a tree has more nodes than levels
        seconds = self._draft_step_s + self._step_seconds(nodes + 2) - self._step_seconds(nodes + 1)
        expected, accepted = self._growth
        ratio = (accepted + GROWTH * self._prior) / (expected + GROWTH)
        pays = accept_prob * ratio > self._worth * seconds
        if pays:
            self.parent_probs.append(accept_prob)
        return pays

    def num_tree_nodes_worth(self, accept_probs: Sequence[float]) -> int:
        """Return the number of tree nodes worth verifying, by mean acceptance, best first."""
        return num_worth(list(accumulate(accept_probs, initial=0.0)), self._worth, self._step_seconds, 1)[0]

    def add_token(self, draft_probs: Sequence[float]) -> None:
        """Append a token to each row's chain, with the model's probabilities."""
        before = self.accept_probs[-1] if self.accept_probs else [1.0] * len(draft_probs)
        self.accept_probs.append(
            [
                parent_prob * self.calibration.calibrated(prob)
                for parent_prob, prob in zip(before, draft_probs, strict=True)
            ]
        )
        for row, each in enumerate(draft_probs):
            self.draft_probs[row].append(each)
            self._parents[row].append(len(self.accept_probs) - 2)

    def set_tree(
        self, draft_probs: list[list[float]], parents: list[list[int]], accept_probs: Sequence[Sequence[float]]
    ) -> None:
        """Set verified nodes, best first: by row, `accept_probs` by node and row."""
        self.draft_probs, self._parents, self.accept_probs = draft_probs, parents, list(accept_probs)

    def record(self, accepted: Sequence[Sequence[int]]) -> None:
        """Count a verified draft: verify rows, from 1, of each row's accepted nodes."""
        if len(accepted) != len(self.draft_probs):
            return
        for draft_probs, parents, kept in zip(self.draft_probs, self._parents, accepted, strict=True):
            self.calibration.record(draft_probs, parents, kept)
        further = [sum(len(kept) > depth for kept in accepted) for depth in range(1, 1 + len(self.parent_probs))]
        now, before = (sum(self.parent_probs), sum(further) / len(accepted)), self._growth
        self._growth = now[0] + DECAY * before[0], now[1] + DECAY * before[1]
