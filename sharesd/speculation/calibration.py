"""What a model's own confidence in its guesses is worth.

A model gives each guess a probability. How often the target agrees is another matter: models are surer than they are
right, and with noise both choose alike less often than either is likely to. So it is counted, by ranges of confidence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

RANGES = 10
"""Ranges of confidence of equal size."""
PRIOR = 4.0
"""Guesses that what a model says about itself is worth, in each range, before there is evidence."""
KEPT = 0.995
"""What remains of a range's evidence after a guess in it: some 200 guesses count."""


def spread_of(bits: int) -> float:
    """How far it moves two logits apart that the target's weights are rounded to so many bits.

    Such a copy errs where the next best token is close, whatever the others are: with a gap between both, the target
    agrees with probability 1 / (1 + exp(-gap / spread)). (Measured for SmolLM2-135M: 0.7 to 1 with 4 bits, and 0.1
    with 8, where logits of bfloat16 leave no less. Other models may have others, which experience makes up for.)
    """
    return max(0.1, 0.8 * 2.0 ** (4 - bits))


class Confidence:
    """How often guesses are accepted of which a model is so sure, behind guesses that were."""

    def __init__(self) -> None:
        self._tries = [PRIOR] * RANGES
        self._hits = [PRIOR * (number + 0.5) / RANGES for number in range(RANGES)]
        self.chances = np.array([0.0, *self._hits], dtype=np.float32)
        """What chances of 0, and of the middle of each range, are worth; as `compile.tree_rescore` has it."""
        self.chances /= PRIOR

    def chance(self, said: float) -> float:
        """Estimated probability that a guess is accepted of which the model says this."""
        number = _range(said)
        return self._hits[number] / self._tries[number]

    def learn(self, said: Sequence[float], parents: Sequence[int], accepted: Collection[int]) -> None:
        """Nodes with these numbers were accepted, of a draft of which the model said this; parents as in a Guess."""
        for node, (each, parent) in enumerate(zip(said, parents, strict=True)):
            if parent < 0 or parent in accepted:
                number = _range(each)
                self._tries[number] = KEPT * self._tries[number] + 1
                self._hits[number] = KEPT * self._hits[number] + (node in accepted)
                self.chances[1 + number] = self.chance(each)


def _range(said: float) -> int:
    return min(RANGES - 1, max(0, int(RANGES * said)))
