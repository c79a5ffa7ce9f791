"""Pauses queries of tables while they take longer than they gain.

On a CPU a query takes its own time. On a GPU what counts is how long the device waits: as long as it does nothing
between two rounds or between draft and verification, where it would do something if the model drafted alone.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

from sharesd.speculation.draft_tree import NO_DRAFT

MEMORY = 64
"""Queries that the mean gain reaches back."""
WAITS = 16
"""Last times whose median counts: a stall of the host does not last."""


class QueryGate:
    """What a query of tables gains and takes."""

    def __init__(self) -> None:
        self.gain, self.seconds = 0.0, 0.0
        """Mean tokens that a query adds to a round, and its usual seconds without the machine's drift."""
        self.last_model_draft = NO_DRAFT
        """A model's last draft in a round that queried tables."""
        # By whether the round was launched before the query.
        self._waits = {launched_before: deque[float](maxlen=WAITS) for launched_before in (False, True)}

    def pays(self, rate: float) -> bool:
        """Return True if a query gains more than it costs; `rate`: tokens per second that time is worth."""
        return self.gain > rate * self.seconds

    def pauses(self, rate: float, purse: float) -> bool:
        """Return True if the coming round queries no tables.

        A query that seems not to pay is a trial; `purse`: tokens that such queries may cost.
        """
        return not self.pays(rate) and rate * self.seconds > purse

    def record_gain(self, gain: float) -> None:
        self.gain += (max(0.0, gain) - self.gain) / MEMORY

    def record_seconds(self, seconds: float, launched_before: bool = False) -> None:
        """Record how long a query took, or a GPU waited for it; `launched_before`: the round was launched before it."""
        self._waits[launched_before].append(seconds)
        coming = self._waits[bool(self.last_model_draft.nodes)]  # a round after a model's draft is launched before it
        self.seconds = median_low(coming or self._waits[launched_before])

    @property
    def wait_if_first(self) -> float:
        """Usual seconds that a GPU waited where tables were queried before a draft; 0: it never did."""
        return median_low(self._waits[False]) if self._waits[False] else 0.0
