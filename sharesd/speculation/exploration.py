"""Trials of seemingly unprofitable drafts, and of plain steps between profitable drafts."""

from __future__ import annotations

from collections.abc import Callable

from sharesd.speculation.cost_model import LiveCosts
from sharesd.speculation.draft_estimates import DraftEstimates
from sharesd.speculation.draft_tree import DraftShape
from sharesd.speculation.policy_config import PolicyConfig


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

    def must_probe(self, promise: float) -> bool:
        """Return True if plain timing is due; `promise`: rate over plain."""
        if not self._probes_plain:
            return False
        if_doubtful, if_thin, otherwise = self._config.probe_periods
        due = if_doubtful if self._live.is_doubtful else if_thin if promise < self._config.thin_gain else otherwise
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
