"""Decides in which rounds lookup tables are queried."""

from __future__ import annotations

from sharesd.speculation.cost_model import LiveCosts
from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape
from sharesd.speculation.policy_config import PolicyConfig


class LookupGate:
    """Pauses queries of tables while they take longer than they gain."""

    def __init__(self, live: LiveCosts, config: PolicyConfig) -> None:
        self._live, self._config = live, config
        self._gain, self._num_queries = 1.0, 0  # running mean of the share gained
        self.seconds = 0.0
        """Time of a query, a running mean."""
        self._last, self._dropped = NO_DRAFT, 0.0  # a model's last draft beside tables; running share dropped
        self._pause, self._until_query = config.lookup_pauses[0], 0

    def begin(self) -> None:
        """Start a new text: queries are worth trying again."""
        self._gain = max(self._gain, self._cost() + self._config.lookup_prior)
        self._pause = self._config.lookup_pauses[0]

    def pauses(self, budget_is_empty: bool) -> bool:
        """Return True if no tables are queried in the coming round."""
        return self._until_query > 0 and self._is_idle(budget_is_empty)

    def opens(self, budget_is_empty: bool) -> bool:
        """Return True if tables are queried in the coming round."""
        first, longest = self._config.lookup_pauses
        if self.pauses(budget_is_empty):
            self._until_query -= 1
            return False
        if self._is_idle(budget_is_empty):
            self._until_query = self._pause - 1
            self._pause = min(longest, 2 * self._pause)
        else:
            self._pause, self._until_query = first, 0
        return True

    def _is_idle(self, budget_is_empty: bool) -> bool:
        return budget_is_empty or self._gain < self._cost()

    @property
    def tables_should_learn(self) -> bool:
        """Near query: tables learn from the logits of the coming round."""
        return self._until_query < self._config.learn_rounds

    def record_gain(self, gain: float) -> None:
        """Count the share by which a query raised the predicted rate."""
        self._gain += (max(0.0, gain) - self._gain) / self._config.max_lookup_samples

    def record_seconds(self, seconds: float) -> None:
        self._num_queries = min(self._config.max_lookup_samples, self._num_queries + 1)
        self.seconds += (seconds - self.seconds) / self._num_queries

    @property
    def early_draft(self) -> DraftShape:
        """Model draft to launch early; NO_DRAFT if tables win too often."""
        last, live = self._last, self._live
        if not (last.nodes and live.is_measured):
            return NO_DRAFT
        return last if self._dropped * live.draft(last) * live.drift <= self.seconds else NO_DRAFT

    def record_draft(self, shape: DraftShape) -> None:
        """Count a model's draft in a round that queried tables."""
        if self._last.nodes:
            self._dropped += ((not shape.nodes) - self._dropped) / self._config.max_lookup_samples
        self._last = shape

    def _cost(self) -> float:
        """Return the time of a query in plain steps."""
        live = self._live
        return self.seconds / (live.step(1) * live.drift) if live.is_measured else 0.0
