"""Pauses queries of tables while they take longer than they gain.

On a CPU a query takes its own time. On a GPU the model's draft may run meanwhile, so what counts is how long the device
waits: as long as it does nothing between two rounds or between draft and verification, where it would do something if
the model drafted alone, and as long as it makes a draft that is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape

MEMORY = 64
"""Queries that the mean gain reaches back."""
PAUSE = 16
"""Fewest rounds between queries that seem not to pay."""
NEW_TEXT_HOPE = 0.007
"""Part of what a query would gain if all its tokens were accepted, that it is assumed to gain as a text begins."""


class TableWaits(NamedTuple):
    """Seconds that a GPU waits for tables in a round."""

    query: float
    """All together."""
    fill: float | None
    """Of these, while tables add nodes to a model's draft; None: they were not asked to."""


class QueryGate:
    """Running means of what a query of tables gains and takes."""

    def __init__(self) -> None:
        self.gain, self.seconds, self._hope = 0.0, 0.0, NEW_TEXT_HOPE
        """Mean tokens that a query adds to a round, and its mean seconds without the machine's drift."""
        self._since_query, self._num_timed = 0, 3
        self.last_model_draft = NO_DRAFT
        """A model's last draft in a round that queried tables."""
        self._waits = {True: _Wait(0.0), False: _Wait(inf)}  # by whether a draft is launched before the query

    def begin(self) -> None:
        """Start a new text: queries are worth trying again."""
        self._hope = NEW_TEXT_HOPE

    def pays(self, rate: float) -> bool:
        """Return True if a query gains more than it costs; `rate`: tokens per second that time is worth."""
        return self.gain > rate * self.seconds

    def pauses(self, rate: float, most: Callable[[], float], purse: float) -> bool:
        """Return True if the coming round queries no tables.

        A query that seems not to pay is a trial, more often as a text begins. `most` gives the tokens that a query
        gains if all nodes are accepted; `purse`: tokens that trials may cost.
        """
        if self.pays(rate):
            return False
        return rate * self.seconds > purse or (self._since_query < PAUSE and not self._hopes(rate, most))

    def should_learn(self, rate: float, most: Callable[[], float]) -> bool:
        """Return True if a query is near: tables learn from the logits of the coming round."""
        return self.pays(rate) or self._since_query >= PAUSE // 2 or self._hopes(rate, most)

    def _hopes(self, rate: float, most: Callable[[], float]) -> bool:
        return self._hope * most() > rate * self.seconds

    def count(self, queries: bool) -> None:
        """Count a round, with a query or without."""
        self._since_query = 0 if queries else self._since_query + 1

    def record_gain(self, gain: float) -> None:
        self.gain += (max(0.0, gain) - self.gain) / MEMORY
        self._hope -= self._hope / MEMORY

    def record_seconds(self, seconds: float) -> None:
        self._num_timed = min(16, self._num_timed + 1)
        self.seconds += (seconds - self.seconds) / self._num_timed

    def record_wait(self, seconds: float, launched_early: bool = False) -> None:
        """Record how long a GPU waited; `launched_early`: a draft was launched before the query, and perhaps lost."""
        self._waits[launched_early].record(seconds)
        self.seconds = self._waits[launched_early].mean
        if not launched_early and self.last_model_draft.nodes:
            self._waits[True].mean *= 1 - 1 / MEMORY  # what was learned of early drafts is forgotten

    def early_draft(self) -> DraftShape:
        """Return the model's draft to launch before the query; NO_DRAFT if such drafts lose too often."""
        return self.last_model_draft if self._waits[True].mean <= self._waits[False].mean else NO_DRAFT


class _Wait:
    """Running mean of times, each as far as the next one repeats it: a stall of the host does not last."""

    def __init__(self, mean: float) -> None:
        self.mean = mean
        self._last, self._num = inf, 0

    def record(self, seconds: float) -> None:
        repeated, self._last = min(seconds, self._last), seconds
        self._num = min(16, self._num + 1)
        self.mean = repeated if self._num <= 2 else self.mean + (repeated - self.mean) / self._num
