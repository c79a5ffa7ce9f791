"""Trials: of drafts that seem not to pay, of plain steps between drafts that pay, and of queries of lookup tables."""

from __future__ import annotations

from collections.abc import Callable

from sharesd.speculation.cost_model import LiveCosts
from sharesd.speculation.draft_estimates import DraftEstimates, PolicyConfig
from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape


class Explorer:
    """Schedule of draft trials in plain rounds, and plain steps between drafts."""

    def __init__(self, live: LiveCosts, config: PolicyConfig, *, probes_plain: bool) -> None:
        """`probes_plain`: time plain steps now and then."""
        self._live, self._config, self._probes_plain = live, config, probes_plain
        self.patience = config.trial_periods[0]
        """Plain rounds before the next trial."""
        self._plain_rounds = 0
        self._trial_rounds_left = self._until_check = 0
        self.since_plain = 0

    def begin(self) -> None:
        """Start a new text: the coming round computes the best shape."""
        self._until_check = 0

    def skips_check(self) -> bool:
        """Return True if the next round is plain without a new check."""
        if self._until_check <= 0:
            return False
        self._until_check -= 1
        self._plain_rounds += 1
        return True

    def end_trials(self) -> None:
        """End trials, since drafts save time."""
        self._plain_rounds, self.patience, self._trial_rounds_left = 0, self._config.trial_periods[0], 0

    def is_trial_due(self) -> bool:
        """Count a plain round; return True if a trial may begin."""
        self._plain_rounds += 1
        return self._plain_rounds > self.patience

    def postpone_check(self) -> None:
        """Compute the best shape again after some plain rounds."""
        self._until_check = self._config.check_period - 1

    def count_trial(self) -> None:
        """Count a trial's round; after the last, the next trial comes later."""
        self._trial_rounds_left = (self._trial_rounds_left or self._config.trial_rounds) - 1
        if not self._trial_rounds_left:
            self._plain_rounds, self.patience = 0, min(self._config.trial_periods[1], 2 * self.patience)

    def must_probe(self, speedup: float) -> bool:
        """Return True if a plain step must be timed again; `speedup`: predicted rate over that of plain steps."""
        if not self._probes_plain:
            return False
        if_doubtful, if_thin, otherwise = self._config.probe_periods
        due = if_doubtful if self._live.is_doubtful else if_thin if speedup < self._config.thin_gain else otherwise
        return self.since_plain >= due

    def record(self, is_plain: bool) -> None:
        self.since_plain = 0 if is_plain else self.since_plain + 1


class ChainTreeChooser:
    """Replacement of chains, which predict trees only roughly, now and then."""

    def __init__(self, tree: DraftShape, config: PolicyConfig) -> None:
        """`tree`: the largest draft tree; NO_DRAFT if there is none."""
        self._tree, self._config = tree, config
        self._num_chains, self._patience = 0, config.trial_periods[0]

    def choose(
        self, best: DraftShape, estimates: DraftEstimates, fits_round_cost: Callable[[DraftShape], bool]
    ) -> DraftShape:
        """Return `best`, or the tree if a trial of it is due."""
        tree = self._tree._replace(window=best.window)
        if best.is_tree or not tree.is_tree or not fits_round_cost(tree):
            self._num_chains = 0
            return best
        if estimates.optimistic_tree_rate(tree, best) <= self._config.margin * estimates.shape_rate(best):
            return best
        self._num_chains += 1
        if self._num_chains < self._patience:
            return best
        if self._num_chains >= self._patience + self._config.trial_rounds:
            self._num_chains, self._patience = 0, min(self._config.trial_periods[1], 2 * self._patience)
        return tree


class LookupGate:
    """Pauses queries of tables while they take longer than they gain."""

    def __init__(self, live: LiveCosts, config: PolicyConfig) -> None:
        self._live, self._config = live, config
        self._gain, self._num_queries = 1.0, 0  # running mean of the share gained
        self.seconds = 0.0
        """Time of a query, a running mean."""
        # A model's last draft in a round that queried tables, and the running share of such drafts that were dropped.
        self._last, self._dropped = NO_DRAFT, 0.0
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
