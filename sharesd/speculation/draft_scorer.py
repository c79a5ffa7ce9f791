"""Acceptance probabilities of the draft that is being made.

Draft models are more confident than the target agrees with them, so their probabilities are calibrated by outcomes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sharesd.speculation.acceptance_stats import SLOW_DECAY

if TYPE_CHECKING:
    from quant.config import QuantConfig

GROWTH = 4.0
"""Weight, in draft steps, of the prior in the acceptance of a step's token after an accepted one."""
RANGES = 10
"""Number of ranges, all of the same width."""
PRIOR = 4.0
"""Weight, in draft tokens, of the model's own probability in each range."""
KEPT = 0.995
"""Decay of a range's counts per token: about the last 200 tokens count."""


def quantization_logit_noise(quant: QuantConfig) -> float:
    """Return the scale of the logit error that quantized weights cause.

    With a gap between the two likeliest tokens, the target agrees with probability 1 / (1 + exp(-gap / noise)).
    Measured for SmolLM2-135M: 0.7 to 1 with 4 bits, 0.1 with 8, the floor of bfloat16 logits.
    """
    return quant.format.logit_noise(quant.bits)


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


class DraftScorer:
    """Scores the nodes of drafts of one kind in some rows together."""

    def __init__(self, prior: float) -> None:
        """`prior`: acceptance of a token after an accepted one, before any draft was verified."""
        self._calibration = ProbabilityCalibration()
        # Decayed sums of the acceptance probabilities of steps' parents, and of the tokens accepted from these steps.
        self._growth = (GROWTH, GROWTH * prior)
        self.begin(0)

    def begin(self, num_rows: int) -> None:
        self._draft_probs: list[list[float]] = [[] for _ in range(num_rows)]
        self._parents: list[list[int]] = [[] for _ in range(num_rows)]
        self.accept_probs: list[Sequence[float]] = []
        """Acceptance probabilities of each node, best first, by row."""
        self.parent_probs: list[float] = []
        """Acceptance probabilities of the parents of each step after the first."""

    @property
    def draft_probs(self) -> Sequence[Sequence[float]]:
        """The model's probabilities of tokens after their parents, by row."""
        return self._draft_probs

    @property
    def calibrated_probs(self) -> NDArray[np.float32]:
        """Values of the model's probabilities, see `ProbabilityCalibration.calibrated_probs`."""
        return self._calibration.calibrated_probs

    def mean_accept_probs(self) -> list[float]:
        """Return the acceptance probability of each node, mean of the rows."""
        return [sum(accept_probs) / len(accept_probs) for accept_probs in self.accept_probs]

    def gain(self, accept_prob: float) -> float:
        """Return the expected accepted tokens of one more step.

        `accept_prob`: probability that a parent of the step is accepted.
        """
        expected, accepted = self._growth
        return accept_prob * accepted / expected

    def add_token(self, draft_probs: Sequence[float]) -> None:
        """Append a token to each row's chain, with the model's probabilities."""
        before = self.accept_probs[-1] if self.accept_probs else [1.0] * len(draft_probs)
        self.accept_probs.append(
            [
                parent_prob * self._calibration.calibrated(prob)
                for parent_prob, prob in zip(before, draft_probs, strict=True)
            ]
        )
        for row, each in enumerate(draft_probs):
            self._draft_probs[row].append(each)
            self._parents[row].append(len(self.accept_probs) - 2)

    def set_tree(
        self, draft_probs: list[list[float]], parents: list[list[int]], accept_probs: Sequence[Sequence[float]]
    ) -> None:
        """Set verified nodes, best first: by row, `accept_probs` by node and row."""
        self._draft_probs, self._parents, self.accept_probs = draft_probs, parents, list(accept_probs)

    def record(self, accepted: Sequence[Sequence[int]]) -> None:
        """Count a verified draft: verify rows, from 1, of each row's accepted nodes."""
        if len(accepted) != len(self._draft_probs):
            return
        for draft_probs, parents, kept in zip(self._draft_probs, self._parents, accepted, strict=True):
            self._calibration.record(draft_probs, parents, kept)
        for depth, parent_prob in enumerate(self.parent_probs, 1):
            share = sum(len(kept) > depth for kept in accepted) / len(accepted)
            expected_before, accepted_before = self._growth
            self._growth = SLOW_DECAY * expected_before + parent_prob, SLOW_DECAY * accepted_before + share
