"""Predicted tokens and seconds of rounds, from running acceptance and measured costs; constants of the draft policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from sharesd.speculation.acceptance_stats import AcceptanceEstimator, DraftEstimate, LookupCalibration, running_sums
from sharesd.speculation.cost_model import LiveCosts
from sharesd.speculation.draft_scorer import DraftScorer
from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape

FIRST_ALPHAS = 0.8, 0.88
"""Acceptance of a quantized target's chain token and tree level, before any was verified."""
HEAD_ALPHAS = 0.5, 0.65
"""Lower acceptance of heads and second models, to keep the budget."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Margins, periods and priors of the draft policy.

    A new choice takes 1 % of the time of a plain step (SmolLM2-135M, CPU), hence `check_period`. Others are judgement.
    """

    margin: float = 1.04
    """Rate over that of plain steps from which a draft pays; above the noise of estimates."""
    model_lead: float = 1.02
    """Rate over that of tables from which a model's draft is preferred."""
    optimistic_alphas: tuple[float, float] = (0.95, 0.97)
    """Acceptance of chains and of trees that a trial may find."""
    unmeasured_cost_error: float = 3.0
    """Error factor of costs measured only at start."""
    window_contexts: int = 4
    """Contexts, in windows, from which drafts with a window are considered."""
    new_text_decay: float = 0.4
    """Factor by which acceptance counts fade at the start of a new text."""
    trial_periods: tuple[int, int] = (16, 256)
    """Plain rounds between trials of a draft, first and at most."""
    trial_rounds: int = 3
    catch_up_rounds: int = 16
    """Rounds that share a model's time of reading missed tokens."""
    check_period: int = 4
    """Plain rounds after which the best shape is computed again."""
    lookup_pauses: tuple[int, int] = (8, 32)
    """Rounds between queries that cost more than they gain: first, most."""
    max_lookup_samples: int = 16
    """Queries that running means of gain and time reach back."""
    learn_rounds: int = 4
    """Rounds before a query whose logits tables learn from."""
    lookup_prior: float = 0.02
    """Assumed gain of a query above its cost as texts begin."""
    thin_gain: float = 1.15
    """Predicted rate over a plain step that makes plain timings frequent."""
    probe_periods: tuple[int, int, int] = (4, 32, 128)
    """Rounds before a plain step if doubtful, of thin gain, otherwise."""


class DraftEstimates:
    """Predicted tokens per second of draft shapes, and the counts that predictions are made from."""

    def __init__(
        self,
        live: LiveCosts,
        max_nodes: int,
        first_alphas: tuple[float, float],
        config: PolicyConfig,
        can_stop_early: bool,
    ) -> None:
        """`first_alphas`: acceptance of chains and trees before any was verified."""
        self._live, self._max_nodes, self._first_alphas = live, max_nodes, first_alphas
        self._config, self._can_stop_early = config, can_stop_early
        self.num_unread_tokens = 0
        """Tokens that a model must read before the coming draft."""
        self.tables_match = False
        """True if tables predict the coming tokens: models are right more often."""
        self.tables, self.added_tables = LookupCalibration(), LookupCalibration()
        """Calibration of tables alone, and of table nodes that are added to a model's draft."""
        self._estimators: dict[object, AcceptanceEstimator] = {}  # by `tables_match` and kind of draft
        self._verified, self._hits = [0.0] * max_nodes, [0.0] * max_nodes  # of trees by a node's rank; decayed
        self._rank_sums: list[float] = []  # of acceptance by rank, until it changes
        self._has_drafted = False

    def rate(self, gain: float, num_nodes: float, draft_s: float = 0.0) -> float:
        """Return tokens per second of rounds that emit 1 + `gain` tokens."""
        if not self._live.is_measured:  # without costs all rounds count alike
            return 1 + gain
        return (1 + gain) / (draft_s + self._live.step(1 + num_nodes))

    def shape_rate(self, shape: DraftShape) -> float:
        return self.best_of([shape])[1]

    def best_of(self, shapes: Sequence[DraftShape]) -> tuple[DraftShape, float]:
        """Return the shape of the highest rate, and the rate.

        Without shapes: NO_DRAFT and 0.
        """
        catch_up_s, (extra, more) = self.catch_up_s / self._config.catch_up_rounds, self.added_tables.per_round
        estimates: dict[tuple[bool, int], DraftEstimate] = {}
        best, best_rate = NO_DRAFT, 0.0
        for shape in shapes:
            if not shape.nodes:
                rate = self.rate(0.0, 0.0)
            else:
                kind = shape.is_tree, shape.window
                estimate = estimates.get(kind)
                if estimate is None:
                    estimate = estimates[kind] = self.of(shape)
                draft_s, nodes = self.size(shape, estimate)
                rate = self.rate(self._gain(shape, estimate) + extra, nodes + more, draft_s + catch_up_s)
            if rate > best_rate:
                best, best_rate = shape, rate
        return best, best_rate

    def optimistic_tree_rate(self, tree: DraftShape, chain: DraftShape) -> float:
        """Return tokens per second of trees, optimistically predicted from chains."""
        miss_probs = [1 - reached for reached in self._estimator(chain).cumulative_acceptance()]
        gains = accumulate((1 - miss / 2 for miss in miss_probs[: tree.depth]), initial=0.0)
        rounds = ((gain, DraftShape(depth, depth + 1, tree.window)) for depth, gain in enumerate(gains) if depth)
        return max(self.rate(gain, shape.nodes, self._live.draft(shape)) for gain, shape in rounds)

    def optimistic_gain(self, shape: DraftShape, num_rows: int) -> float:
        """Return the optimistic gain of a trial, in draft tokens."""
        usual, best = self._first_alphas[shape.is_tree], self._config.optimistic_alphas[shape.is_tree]
        alpha: float = usual + (best - usual) / num_rows**0.5  # means of many rows are near the usual
        return sum(alpha**depth for depth in range(1, shape.depth + 1))

    def of(self, shape: DraftShape) -> DraftEstimate:
        if not shape.nodes:
            return DraftEstimate([0.0], [], 0.0)
        estimator, stops = self._estimator(shape), self._can_stop_early
        return DraftEstimate(
            running_sums(estimator.cumulative_acceptance()),
            running_sums(estimator.continue_probs()) if stops and not self._live.table.single_pass else [],
            estimator.nodes(shape.nodes) if stops else shape.nodes,
        )

    def size(self, shape: DraftShape, estimate: DraftEstimate) -> tuple[float, float]:
        """Return mean seconds and tokens of drafts of at most this shape."""
        steps = _at(estimate.steps, shape.depth) if estimate.steps else shape.depth
        draft_s = self._live.draft(shape) * (steps / shape.depth if shape.depth else 1.0)
        return draft_s, estimate.nodes if shape.is_tree and self._can_stop_early else steps

    @property
    def catch_up_s(self) -> float:
        """Seconds, without the drift, of reading tokens that a model missed."""
        return self.num_unread_tokens * self._live.table.read

    def made_gain(self, shape: DraftShape, scorer: DraftScorer | None) -> float:
        """Return the mean accepted tokens of a model's finished draft."""
        if shape.is_tree and scorer is None:
            return self._gain(shape, self.of(shape))
        return sum(self.node_accept_probs(shape, scorer))

    def node_accept_probs(self, shape: DraftShape, scorer: DraftScorer | None) -> list[float]:
        """Return the acceptance probability of each model draft node, best first."""
        if scorer is not None and len(scorer.accept_probs) == shape.nodes:
            return scorer.mean_accept_probs()
        if shape.is_tree:
            return self._by_rank()[: shape.nodes]
        return self._estimator(shape).cumulative_acceptance()[: shape.depth]

    def record_draft(
        self, shape: DraftShape, paths: Sequence[Sequence[int]], max_depth: int, scorer: DraftScorer | None
    ) -> None:
        """Count accepted nodes; `paths`: verify rows, from 1, per counted row."""
        self._has_drafted |= shape.nodes > 0
        self._rank_sums = []
        for path in paths if shape.nodes else ():
            accepted = sum(node <= shape.nodes for node in path)
            self._estimator(shape).record(accepted, shape.depth, max_depth, shape.nodes)
            for rank in range(shape.nodes if shape.is_tree and scorer is None else 0):
                self._verified[rank] += 1
                self._hits[rank] += rank + 1 in path
        if scorer is not None and paths and len(scorer.accept_probs) == shape.nodes:
            best_chains = scorer.record([{node - 1 for node in path if node <= shape.nodes} for path in paths])
            for length, accepted in best_chains if shape.is_tree else ():
                chain = DraftShape(self._max_nodes, self._max_nodes, shape.window)
                self._estimator(chain).record(accepted, length, max_depth, length)

    def record_table_nodes(
        self,
        shape: DraftShape,
        num_nodes: int,
        gains: Sequence[float],
        paths: Sequence[Sequence[int]],
        progress: float,
    ) -> None:
        """Count the accepted table nodes, added to a model's draft or alone."""
        calibration, accepted = self.tables, progress - 1
        if shape.nodes:
            calibration = self.added_tables
            accepted = sum(node > shape.nodes for path in paths for node in path) / len(paths)
        predicted = gains[min(num_nodes, len(gains) - 1)] if num_nodes else 0.0
        calibration.record(num_nodes, predicted, accepted)

    def fade(self, share: float) -> None:
        self._rank_sums = []
        self.tables.fade(share)
        if self._has_drafted:
            self.added_tables.fade(share)
            for estimator in self._estimators.values():
                estimator.fade(share)
            self._verified = [share * count for count in self._verified]
            self._hits = [share * count for count in self._hits]

    def _estimator(self, shape: DraftShape) -> AcceptanceEstimator:
        """Return the estimator for this shape kind, window and match of tables."""
        key = (self.tables_match, shape.is_tree, shape.window)
        if key not in self._estimators:
            self._estimators[key] = AcceptanceEstimator(self._max_nodes, self._first_alphas[shape.is_tree])
        return self._estimators[key]

    def _gain(self, shape: DraftShape, estimate: DraftEstimate) -> float:
        gain = _at(estimate.gains, shape.depth)
        return gain * self._reach(shape.nodes) if shape.is_tree and not self._can_stop_early else gain

    def _reach(self, num_nodes: int) -> float:
        """Return the share of a tree's accepted nodes in the best `num_nodes`."""
        self._rank_sums = self._rank_sums or running_sums(self._by_rank())
        return _at(self._rank_sums, num_nodes) / self._rank_sums[-1]

    def _by_rank(self) -> list[float]:
        """Return acceptance by rank; proportional to 1/rank before any was verified."""
        by_rank = zip(self._hits, self._verified, strict=True)
        return [(hits + 1 / rank) / (tries + 1) for rank, (hits, tries) in enumerate(by_rank, 1)]


def _at(sums: list[float], num: int) -> float:
    """Return the sum of the first `num` values, or of all."""
    return sums[num] if num < len(sums) else sums[-1]
