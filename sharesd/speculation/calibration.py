"""Calibration of draft models' probabilities, which are higher than the target's agreement."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from quant.config import QuantConfig

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
        self.calibrated_probs = np.array([0.0, *self._hits], dtype=np.float32)
        """Calibrated values of probability 0 and of each range's middle."""
        self.calibrated_probs /= PRIOR

    def calibrated(self, draft_prob: float) -> float:
        """Return the acceptance probability of a token with this draft probability."""
        number = _range(draft_prob)
        return self._hits[number] / self._tries[number]

    def record(self, draft_probs: Sequence[float], parents: Sequence[int], accepted: Collection[int]) -> None:
        """Count a draft: probabilities, parents as in a `Proposal`, and accepted nodes."""
        for node, (each, parent) in enumerate(zip(draft_probs, parents, strict=True)):
            if parent < 0 or parent in accepted:
                number = _range(each)
                self._tries[number] = KEPT * self._tries[number] + 1
                self._hits[number] = KEPT * self._hits[number] + (node in accepted)
                self.calibrated_probs[1 + number] = self.calibrated(each)


def _range(draft_prob: float) -> int:
    return int(min(RANGES - 1, max(0.0, RANGES * draft_prob)))  # 0 for NaN, which heads may draft with
