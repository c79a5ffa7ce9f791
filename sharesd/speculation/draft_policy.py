"""Draft policy: each round's draft shape, by measured costs and acceptance.

A round that drafts a chain of K tokens emits 1 + s_1 + ... + s_K tokens on average, where s_k is the probability that
the first k are accepted, and takes `draft * K + step(1 + K)` seconds. The policy chooses the shape with the best rate.
Budgets, filled by plain rounds and by drafts that pay, limit what trials cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from math import inf
from typing import NamedTuple

from sharesd.speculation.acceptance_stats import DECAY, SpeculationBudget
from sharesd.speculation.cost_model import Costs, LiveCosts
from sharesd.speculation.draft_estimates import FIRST_ALPHAS, DraftEstimates, PolicyConfig
from sharesd.speculation.draft_scorer import DraftScorer
from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape, DraftTree, model_shape
from sharesd.speculation.exploration import ChainTreeChooser, Explorer, LookupGate


class Decision(NamedTuple):
    """State of one round's decision, restored when the round is recorded.

    With async scheduling, the policy decides about the next round before it learns from this one.
    """

    requested: DraftShape
    """Largest shape of a draft that may end early."""
    has_queried: bool
    """Tables were queried."""
    tables_match: bool
    table_gains: list[float]
    """Tokens that tables predicted, by the number of nodes."""
    scorer: DraftScorer | None


class Policy:
    """Choice of draft shapes for one engine and one sampling kind."""

    def __init__(
        self,
        shapes: Sequence[DraftShape],
        *,
        pinned: DraftShape | None = None,
        costs: Costs | None = None,
        measured: Mapping[int, Costs] | None = None,
        probes_plain: bool = True,
        first_alphas: tuple[float, float] = FIRST_ALPHAS,
        can_stop_early: bool = False,
        config: PolicyConfig = PolicyConfig(),  # noqa: B008
    ) -> None:
        """Choose among `shapes` and no draft, or always use `pinned`.

        `costs` of None: nothing is drafted yet. `measured`: costs by number of rows. `probes_plain`: time plain steps
        now and then. `first_alphas`: acceptance before any draft was verified. `can_stop_early`: drafts call
        `should_continue`; of trees only the largest is chosen.
        """
        self._config, self._first_alphas, self._probes_plain = config, first_alphas, probes_plain
        self._can_stop_early, self.pinned = can_stop_early, pinned
        tree = max((shape for shape in shapes if shape.is_tree), default=NO_DRAFT)
        smaller = [shape for shape in shapes if can_stop_early and shape.is_tree and shape[:2] != tree[:2]]
        self.shapes = tuple(shape for shape in shapes if shape not in smaller)
        self._largest = max((shape.nodes for shape in shapes), default=0)
        self._only_windows = all(shape.window for shape in shapes)
        self._has_windows = any(shape.window for shape in shapes)
        self.counted_rows: Sequence[int] = (0,)
        """Rows of the coming round whose tokens count, see `request.counted_requests`."""
        self.max_round_cost = inf
        """Plain steps that the coming round may take, see `request.max_round_cost`."""
        self.reset(costs or Costs(), measured)

    def reset(self, costs: Costs, measured: Mapping[int, Costs] | None = None) -> None:
        """Use these costs, and those `measured` by rows; forget everything learned from rounds."""
        self.is_adaptive = self.pinned is None
        """False if the shape was pinned when costs were set."""
        config, tree = self._config, max((shape for shape in self.shapes if shape.is_tree), default=NO_DRAFT)
        self.live = live = LiveCosts(costs, measured)
        self.budget, self.table_budget = SpeculationBudget(), SpeculationBudget()
        """Budgets of model drafts, and of tables alone."""
        self._estimates = DraftEstimates(live, self._largest, self._first_alphas, config, self._can_stop_early)
        self._explorer = Explorer(live, config, probes_plain=self._probes_plain)
        self._chain_or_tree = ChainTreeChooser(tree, config)
        self.gate = LookupGate(live, config)
        self.scorer: DraftScorer | None = None
        """Scorer of a model's coming draft, if it may end early."""
        self._scorers = {False: DraftScorer(), True: DraftScorer()}  # of chains, of trees
        self._requested, self._min_rate = NO_DRAFT, 0.0  # of a draft that may end early: shape, tokens per second
        self.reasons: dict[str, str] = {}
        """Reasons against a draft in the coming round, by drafter."""
        self._has_queried = False  # tables, in this round
        self._table_gains = [0.0]  # tokens that tables predicted last, by the number of nodes

    @property
    def costs(self) -> Costs:
        """Costs for the current numbers of threads and rows."""
        return self.live.table

    @property
    def num_unread_tokens(self) -> int:
        return self._estimates.num_unread_tokens

    @num_unread_tokens.setter
    def num_unread_tokens(self, num: int) -> None:
        self._estimates.num_unread_tokens = num

    @property
    def tables_match(self) -> bool:
        return self._estimates.tables_match

    @tables_match.setter
    def tables_match(self, match: bool) -> None:
        self._estimates.tables_match = match

    def begin(self) -> None:
        """Start a new text: rounds of earlier texts count less."""
        self._estimates.fade(self._config.new_text_decay)
        self.budget.begin()
        self.table_budget.begin()
        self._explorer.begin()
        self.gate.begin()

    def next_shape(self, may_explore: bool = True, rate_to_beat: float | None = None) -> DraftShape:
        """Return the shape of a model's coming draft; NO_DRAFT: none.

        `may_explore`: trials of drafts that seem not to pay are allowed. `rate_to_beat`: tokens per second of the draft
        that tables have made for this round, if there is one.
        """
        # In order: a given length; no draft without costs or budget; the best shape if it pays; now and then a plain
        # step between drafts that pay, since costs are ratios to it; now and then a trial of a draft that seems not to
        # pay, since without drafts nothing new is learned about their acceptance.
        config, explorer = self._config, self._explorer
        if self.pinned is not None:
            pinned = self._pinned_shape()
            return pinned if rate_to_beat is None or self.shape_rate(pinned) > rate_to_beat else NO_DRAFT
        if not self.live.is_measured or self.budget.is_empty:
            return self._no_draft("budget_is_empty" if self.live.is_measured else "costs_not_measured")
        if rate_to_beat is None and explorer.skips_check():
            return self._no_draft("plain_until_next_check")
        best, rate = self._best_shape()
        plain = self.shape_rate(NO_DRAFT)
        # The margin is above the noise of estimates: without it the best of several shapes would often only look
        # better.
        if rate > max(config.margin * plain, config.model_lead * (rate_to_beat or 0.0)):
            explorer.end_trials()
            if explorer.must_probe(rate / plain):
                explorer.since_plain = 0  # later rounds may be launched before this one is recorded
                return self._no_draft("plain_step_is_timed")
            return self._request_draft(self._chain_or_tree.choose(best, self._estimates, self._fits_round_cost), rate)
        if rate > config.margin * plain:  # it pays, but tables pay more
            return NO_DRAFT
        if not explorer.is_trial_due() or not best.nodes or not may_explore or not self.can_afford(best):
            explorer.postpone_check()
            return self._no_draft("plain_is_faster")
        explorer.count_trial()
        return self._request_draft(best, plain)

    def _no_draft(self, reason: str) -> DraftShape:
        self.reasons["model"] = reason
        return NO_DRAFT

    def _request_draft(self, shape: DraftShape, rate: float) -> DraftShape:
        """Prepare the scorer of a draft that ends below `rate` tokens/s."""
        if self._can_stop_early:
            self._requested, self._min_rate = shape, rate
            self.scorer = self._scorers[shape.is_tree]
            self.scorer.begin(len(self.counted_rows))
        return shape

    def should_continue(self, depth: int, accept_prob: float | None = None) -> bool:
        """Return True if a draft step after `depth` others pays.

        `accept_prob`: probability that a parent is accepted, mean of the counted rows; None: of a chain's last token.
        """
        # A longer draft is worth its time while it adds tokens at a higher rate than the whole round makes them: beyond
        # that point each token lowers the mean, though it may still be accepted.
        requested, scorer = self._requested, self.scorer
        assert scorer is not None
        accept_prob = scorer.mean_accept_probs()[-1] if accept_prob is None else accept_prob
        now, later = (DraftShape(at, at + requested.is_tree, requested.window) for at in (depth, depth + 1))
        rows = self.live.step(1 + later.nodes) - self.live.step(1 + now.nodes)
        seconds = self.live.draft(later) - self.live.draft(now) + rows
        pays = scorer.gain(depth, accept_prob) > self._min_rate * seconds
        if pays:
            scorer.parent_probs.append(accept_prob)
        return pays

    def num_tree_nodes_worth(self, depth: int, accept_probs: Sequence[float]) -> int:
        """Return the number of tree nodes worth verifying, by mean acceptance."""
        # Nodes are sorted by acceptance, so what n nodes gain over n - 1 falls; their cost does not.
        gains = list(accumulate(accept_probs))
        return max(
            range(depth + 1, len(accept_probs) + 1),
            key=lambda num: gains[num - 1] - self._min_rate * self.live.step(1 + num),
            default=len(accept_probs),
        )

    def _pinned_shape(self) -> DraftShape:
        """Return the pinned shape, with a drafter's window in long contexts."""
        assert self.pinned is not None
        windows = [shape.window for shape in self.shapes if shape[:2] == self.pinned[:2]]
        if len(windows) < 2 or self._is_short(max(windows)):
            return self.pinned
        return self.pinned._replace(window=max(windows))

    def _is_short(self, window: int) -> bool:
        return self.live.context < self._config.window_contexts * window

    def expected(self, tree: DraftTree) -> float:
        """Return the predicted time of a round, in a shared unit."""
        if not self.live.is_measured:
            return 1.0
        catch_up = tree.record.num_unread_tokens * self.costs.read
        return catch_up + self.live.draft(model_shape(tree)) + self.live.step(1 + tree.tokens.shape[1])

    def must_probe(self, speedup: float) -> bool:
        """Return True if a plain step must be timed, given the predicted speedup over it."""
        return self._explorer.must_probe(speedup)

    def can_afford(self, shape: DraftShape) -> bool:
        """Return True if the budget covers a trial that might pay."""
        # Two conditions: the expected loss is in the budget, and with optimistic acceptance the draft would pay. Costs
        # that no round has confirmed may be wrong by a factor, which counts in favour of the trial.
        config, estimates, plain = self._config, self._estimates, self.live.step(1)
        draft_s, nodes = estimates.size(shape, estimates.of(shape))
        took = (estimates.catch_up_s + draft_s + self.live.step(1 + nodes)) / plain
        loss = took * (1 - self.shape_rate(shape) / self.shape_rate(NO_DRAFT))
        expected_gain = estimates.optimistic_gain(shape, len(self.counted_rows))
        doubt = 1.0 if self.live.is_tried(shape) else config.unmeasured_cost_error
        return self.budget.can_afford(loss) and doubt * (1 + expected_gain) / took > config.margin

    def should_query_tables(self) -> bool:
        """Return True if a query of tables pays and one node fits."""
        queries = self.pinned is not None or not self.live.is_measured
        if not queries and self._fits_round_cost(NO_DRAFT, 1):
            queries = self.gate.opens(self.table_budget.is_empty)
        self._has_queried |= queries
        if not queries:
            self.reasons["tables"] = "tables_pause"
        return queries

    @property
    def tables_pause(self) -> bool:
        """True if the coming round queries no tables."""
        return self.pinned is None and self.live.is_measured and self.gate.pauses(self.table_budget.is_empty)

    @property
    def tables_should_learn(self) -> bool:
        """True if tables learn from the logits of the coming round."""
        return self.gate.tables_should_learn and self._fits_round_cost(NO_DRAFT, 1)

    def early_shape(self) -> DraftShape:
        """Return the draft to launch before tables are queried, for GPUs."""
        last = self.gate.early_draft
        fits = self._fits_round_cost(last) if self.pinned is None else self.pinned[:2] == last[:2]
        return last if fits else NO_DRAFT

    def record_model_draft(self, shape: DraftShape, launched_early: bool) -> None:
        """Record the coming round's model draft, which drops early launches if empty."""
        self.gate.record_draft(shape)
        if launched_early and not shape.nodes:
            self._has_queried = False  # the time of a dropped draft is not that of a query

    def best_shape(self) -> DraftShape:
        """Return the draft shape of the highest predicted rate."""
        return self._best_shape()[0]

    def _best_shape(self) -> tuple[DraftShape, float]:
        """Return the draft shape of the highest predicted rate, and the rate."""
        shapes = self.shapes
        if self._has_windows and not self._only_windows:
            shapes = tuple(shape for shape in shapes if not (shape.window and self._is_short(shape.window)))
        if self.max_round_cost != inf:
            shapes = tuple(shape for shape in shapes if self._fits_round_cost(shape))
        best, rate = self._estimates.best_of(shapes)
        return best, rate if best.nodes else self.shape_rate(NO_DRAFT)

    def _fits_round_cost(self, shape: DraftShape, num_table_nodes: int = 0) -> bool:
        """Return True if the draft and table nodes fit the round's limit."""
        if self.max_round_cost == inf or not self.live.is_measured:
            return True
        return self.live.plain_steps(shape, 1 + shape.nodes + num_table_nodes) <= self.max_round_cost

    def shape_rate(self, shape: DraftShape) -> float:
        return self._estimates.shape_rate(shape)

    def node_accept_probs(self, shape: DraftShape) -> list[float]:
        return self._estimates.node_accept_probs(shape, self.scorer)

    def num_table_nodes_worth(
        self, scores: Sequence[Sequence[float]], drafted: DraftShape = NO_DRAFT
    ) -> tuple[int, float]:
        """Return how many table nodes are worth verifying, and the predicted tokens per second.

        `scores`: of each counted row, in descending order. `drafted`: the model's draft that they are added to.
        """
        estimates = self._estimates
        longest = min(max(map(len, scores), default=0), self.max_nodes() - drafted.nodes)
        ratio = (estimates.added_tables if drafted.nodes else estimates.tables).calibration_ratio
        base, draft_s = 0.0, 0.0
        if drafted.nodes:
            base, draft_s = estimates.made_gain(drafted, self.scorer), self.live.draft(drafted)
        while self.pinned is None and longest and not self._fits_round_cost(drafted, longest):
            longest -= 1
        gains = [sum(column) / len(scores) for column in zip_longest(*scores, fillvalue=0.0)]
        self._table_gains = list(accumulate(gains[:longest], initial=0.0))
        rates = [
            estimates.rate(base + ratio * gain, drafted.nodes + num, draft_s)
            for num, gain in enumerate(self._table_gains)
        ]
        if self.pinned is not None:
            return longest, rates[longest]
        best = max(range(longest + 1), key=rates.__getitem__)
        if drafted.nodes:
            return (best, rates[best]) if rates[best] > rates[0] else (0, rates[0])
        speedup = rates[best] / rates[0]
        if speedup > self._config.margin and not self.table_budget.is_empty and not self._explorer.must_probe(speedup):
            return best, rates[best]
        return 0, rates[0]

    def max_nodes(self) -> int:
        return self._largest if self.pinned is None else self.pinned.nodes

    def decision(self) -> Decision:
        """Return the coming round's decision, to be recorded after later decisions."""
        return Decision(self._requested, self._has_queried, self.tables_match, self._table_gains, self.scorer)

    def restore(self, decision: Decision) -> None:
        """Make the next `record` belong to the round of this decision."""
        self._requested, self._has_queried = decision.requested, decision.has_queried
        self.tables_match, self._table_gains = decision.tables_match, decision.table_gains
        self.scorer = decision.scorer

    def record(
        self, tree: DraftTree, paths: Sequence[Sequence[int]], draft_s: float, step_s: float, progress: float
    ) -> None:
        """Learn from a finished round.

        `paths`: accepted verify rows, from 1, of each counted row. `step_s`: seconds of all but drafting.
        """
        estimates, live = self._estimates, self.live
        estimates.fade(DECAY)  # in plain rounds too, since old counts say little
        shape, num_nodes = model_shape(tree), tree.tokens.shape[1]
        estimates.record_draft(shape, paths, self._requested.depth, self.scorer)
        if paths and num_nodes:
            estimates.record_table_nodes(shape, num_nodes - shape.nodes, self._table_gains, paths, progress)
        if self._has_queried and not shape.nodes:
            self.gate.record_seconds(draft_s)
        if tree.record.drafted_ahead:  # made while the last draft was verified, so its time is not that of drafting
            draft_s = live.draft(shape) * live.drift
        drafting_s = draft_s - tree.record.num_unread_tokens * self.costs.read * live.drift
        # At least half of the measured time is left for the draft itself, however much the estimate of catching up is.
        live.record(shape, 1 + num_nodes, max(drafting_s, draft_s / 2), step_s)
        self._explorer.record(is_plain=not num_nodes)
        if paths and live.is_settled:
            plain, gain = live.step(1) * live.drift, 0.0
            if num_nodes:
                max_ratio = 2 * self.expected(tree) / live.step(1)  # a stall of the machine is not the draft's fault
                gain = progress - min(max_ratio, (draft_s + step_s) / plain)
            elif self._has_queried:
                gain = -draft_s / plain
            self.budget.record(gain if shape.nodes else 0.0)
            self.table_budget.record(0.0 if shape.nodes else gain)
        self._has_queried, self._requested, self.scorer = False, NO_DRAFT, None
