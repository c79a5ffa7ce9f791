"""Pauses queries of tables while they take longer than they gain.

On a CPU a query takes its own time. On a GPU what counts is how long the device waits: as long as it does nothing
between two rounds or between draft and verification, where it would do something if the model drafted alone.
"""

from __future__ import annotations

from math import inf

from sharesd.speculation.draft_tree import NO_DRAFT

MEMORY = 64
"""Queries that the mean gain reaches back."""


class QueryGate:
    """Running means of what a query of tables gains and takes."""

    def __init__(self) -> None:
        self.gain, self.seconds = 0.0, 0.0
        """Mean tokens that a query adds to a round, and its mean seconds without the machine's drift."""
        self.last_model_draft = NO_DRAFT
        """A model's last draft in a round that queried tables."""
        self._waits = {True: _Wait(), False: _Wait()}  # by whether the round was launched before the query

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
        self._waits[launched_before].record(seconds)
        coming = self._waits[bool(self.last_model_draft.nodes)]  # a round after a model's draft is launched before it
        self.seconds = (coming if coming.num else self._waits[launched_before]).mean

    @property
    def wait_if_first(self) -> float:
        """Mean seconds that a GPU waited where tables were queried before a draft; 0: it never did."""
        return self._waits[False].mean


class _Wait:
    """Running mean of times, each as far as the next one repeats it: a stall of the host does not last."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._last, self.num = inf, 0

    def record(self, seconds: float) -> None:
        repeated, self._last = min(seconds, self._last), seconds
        self.num = min(16, self.num + 1)
        self.mean = repeated if self.num <= 2 else self.mean + (repeated - self.mean) / self.num
