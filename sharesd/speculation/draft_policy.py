"""Draft policy: each round's draft, by measured costs and acceptance.

Decoding is fastest if every choice has the largest value

    value = expected tokens - rate * expected seconds,

where `rate` is the tokens per second that decoding reaches: time spent here could make tokens elsewhere. The same
number decides whether to draft, with what and how far, how much of it is verified, and whether a query of tables pays.
Trials of what seems worse are paid from a purse that half a percent of the tokens fills.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from math import inf, sqrt
from typing import NamedTuple

from sharesd.speculation.acceptance_stats import DECAY, AcceptanceEstimator, LookupCalibration
from sharesd.speculation.cost_model import Costs, LiveCosts
from sharesd.speculation.draft_scorer import DraftScorer
from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape, DraftTree, model_shape
from sharesd.speculation.query_gate import QueryGate

EXPLORED, PURSE = 0.005, (2.0, 4.0)
"""Part of the tokens that trials may cost; tokens that they may cost at first, and at most at once."""
TRIAL_GAP = 8
"""Fewest rounds between two trials."""
DOUBT = 0.15
"""Relative error of a draft's seconds, in comparison with plain steps, from which a plain step is timed."""
NEW_TEXT = 0.4
"""Factor by which counts fade at the start of a new text."""
RATE_DECAY, RATE_PRIOR = 0.97, 8
"""Fading of rounds in the mean rate (about the last 33 count), and rounds at the rate of plain steps before them."""
CATCH_UP_ROUNDS = 16
"""Rounds that share a model's time of reading missed tokens."""
WINDOW_CONTEXTS = 4
"""Contexts, in windows, from which drafts with a window are considered."""


class Decision(NamedTuple):
    """What a round was decided with; with async scheduling, the next one is decided before it is recorded."""

    has_queried: bool
    """Tables were queried."""
    tables_match: bool
    promised: list[float]
    """Tokens that tables promised, by the number of nodes, before calibration."""
    scorer: DraftScorer | None


class Policy:
    """Choice of drafts for one engine and one sampling kind."""

    def __init__(
        self,
        shapes: Sequence[DraftShape],
        *,
        pinned: DraftShape | None = None,
        costs: Costs | None = None,
        measured: Mapping[int, Costs] | None = None,
        prior: float = 0.5,
        can_stop_early: bool = False,
    ) -> None:
        """Choose among `shapes` and no draft, or always use `pinned`.

        `costs` of None: nothing is drafted yet. `measured`: costs by number of rows. `prior`: acceptance of a token
        before any draft was verified. `can_stop_early`: drafts call `should_continue`, so only the largest are chosen.
        """
        self._prior, self._can_stop_early, self.pinned = prior, can_stop_early, pinned
        self._largest = max((shape.nodes for shape in shapes), default=0)
        most = {(each.is_tree, each.window): each for each in sorted(shapes, key=lambda each: each[:2])}
        self.shapes = tuple(each for each in shapes if not can_stop_early or each == most[each.is_tree, each.window])
        self.counted_rows: Sequence[int] = (0,)
        """Rows of the coming round whose tokens count, see `request.counted_requests`."""
        self.max_round_cost = inf
        """Plain steps that the coming round may take, see `request.max_round_cost`."""
        self.num_unread_tokens = 0
        """Tokens that a model must read before the coming draft."""
        self.reset(costs or Costs(), measured)

    def reset(self, costs: Costs, measured: Mapping[int, Costs] | None = None) -> None:
        """Use these costs, and those `measured` by rows; forget everything learned from rounds."""
        self.is_adaptive = self.pinned is None
        """False if the shape was pinned when costs were set."""
        self.live, self.gate = LiveCosts(costs, measured), QueryGate()
        self._kinds: dict[object, AcceptanceEstimator] = {}  # by `tables_match`, and kind of draft
        self._scorers = {False: DraftScorer(self._prior), True: DraftScorer(self._prior)}  # of chains, of trees
        self._tables, self._added_tables = LookupCalibration(), LookupCalibration()  # alone, after a model's draft
        self._done = (0.0, 0.0)  # decayed tokens and predicted seconds of rounds
        self._gained = (0.0, 0.0)  # decayed draft tokens accepted in rows, and by which rounds advanced
        self._purse, self._since_trial = PURSE[0], 0
        self.scorer: DraftScorer | None = None
        """Scorer of a model's coming draft, if it may end early."""
        self.reasons: dict[str, str] = {}
        """Reasons against a draft in the coming round, by drafter."""
        self.tables_match = False
        """True if tables predict the coming tokens: models are right more often."""
        self.model_value = 0.0
        """Value of the best of a model's drafts and no draft in the coming round."""
        self._has_queried, self._promised, self._window = False, [0.0], 0

    def begin(self) -> None:
        """Start a new text: rounds of earlier texts count less."""
        self._fade(NEW_TEXT)
        self.gate.begin()

    @property
    def costs(self) -> Costs:
        """Costs for the current numbers of threads and rows."""
        return self.live.table

    @property
    def rate(self) -> float:
        """Tokens per second that time is worth: those of the last rounds, and at least those of plain steps."""
        plain, (tokens, seconds) = self.live.step(1), self._done
        return max(1.0, (tokens + RATE_PRIOR) / (seconds / plain + RATE_PRIOR)) / plain

    @property
    def _share(self) -> float:
        """Part of the rows' mean gain by which the row that is waited for advances; 1 for one row."""
        accepted, advanced = self._gained
        return (advanced + RATE_PRIOR) / (accepted + RATE_PRIOR)

    @property
    def plain_value(self) -> float:
        return 1 - self.rate * self.live.step(1) if self.live.is_measured else 0.0

    def _seconds(self, shape: DraftShape, steps: float, nodes: float = 0.0) -> float:
        """Return the seconds of a round that drafts some steps of a shape's kind, and verifies some nodes."""
        made = DraftShape(steps, steps + shape.is_tree, shape.window)  # type: ignore[arg-type]
        return self.live.draft(made) + self.live.step(1 + (nodes or made.nodes))

    def _mean(self, shape: DraftShape) -> tuple[float, float, float]:
        """Return the accepted tokens, steps and nodes to expect of a draft of at most this shape."""
        kind = self._kind(shape)
        if not self._can_stop_early:
            return kind.gain(shape.depth), shape.depth, shape.nodes
        if kind.first is None:  # before any draft: as far as the prior lets steps pay
            depths = range(1, shape.depth + 1)
            depth = max(depths, key=lambda depth: kind.gain(depth) - self.rate * self._seconds(shape, depth))
            kind.first = kind.gain(depth), depth, depth + shape.is_tree
        return kind.mean()

    def _value(self, shape: DraftShape) -> float:
        if not self.live.is_measured:  # all rounds count alike
            return 1 + self._kind(shape).gain(shape.depth)
        gain, steps, nodes = self._mean(shape)
        catch_up_s = self.num_unread_tokens * self.live.table.read / CATCH_UP_ROUNDS
        return 1 + self._share * gain - self.rate * (self._seconds(shape, steps, nodes) + catch_up_s)

    def _spread(self, shape: DraftShape) -> float:
        """Return the standard error of a draft's value: of its mean accepted tokens, and of its seconds."""
        (gain, steps, nodes), num = self._mean(shape), self._kind(shape).num_drafts
        doubt_s = self.live.doubt(shape._replace(depth=steps), 1 + nodes)  # type: ignore[arg-type]
        return self._share * sqrt(gain * (1 + gain) / (1 + num)) + self.rate * doubt_s

    def _kind(self, shape: DraftShape) -> AcceptanceEstimator:
        key = self.tables_match, shape.is_tree, shape.window
        if key not in self._kinds:
            # Of several branches one is accepted more often than a chain's token.
            alpha = self._prior + 0.4 * (1 - self._prior) * shape.is_tree
            self._kinds[key] = AcceptanceEstimator(self._largest, alpha)
        return self._kinds[key]

    def next_shape(self, may_explore: bool = True, to_beat: float = -inf) -> DraftShape:
        """Return the shape of a model's coming draft; NO_DRAFT: none.

        `may_explore`: trials of drafts that seem not to pay are allowed. `to_beat`: value of the draft that tables have
        made for this round, if there is one.
        """
        if self.pinned is not None:
            pinned = self._with_window(self.pinned)
            return pinned if to_beat == -inf or self._value(pinned) > to_beat else NO_DRAFT
        if not self.live.is_measured:
            return self._no_draft("costs_not_measured")
        plain, values = self.plain_value, {shape: self._value(shape) for shape in self._allowed_shapes()}
        best = max(values, key=values.__getitem__, default=NO_DRAFT)
        self.model_value = max(plain, values.get(best, plain))
        chosen = best if values.get(best, -inf) > max(plain, to_beat) else NO_DRAFT
        self._since_trial += 1
        if may_explore and self._since_trial >= TRIAL_GAP:
            chosen_value = max(plain, to_beat, self.model_value)
            losses = {each: chosen_value - value for each, value in values.items() if each != chosen}
            hopeful = [each for each, loss in losses.items() if loss <= self._purse and loss < self._spread(each)]
            cheapest = min(hopeful, key=losses.__getitem__, default=NO_DRAFT)
            if cheapest.nodes and self._pay(losses[cheapest]):
                return self._request(cheapest)
            if chosen.nodes and to_beat == -inf and self._is_doubtful(chosen) and self._pay(chosen_value - plain):
                return self._no_draft("plain_step_is_timed")
        return self._request(chosen) if chosen.nodes else self._no_draft("plain_is_faster")

    def _is_doubtful(self, shape: DraftShape) -> bool:
        """Return True if too little is known about a draft's seconds in comparison with plain steps."""
        _, steps, nodes = self._mean(shape)
        doubt_s = self.live.doubt(shape._replace(depth=steps), 1 + nodes)  # type: ignore[arg-type]
        return doubt_s > DOUBT * self._seconds(shape, steps, nodes)

    def _pay(self, loss: float) -> bool:
        """Pay for a trial of this expected loss, in tokens; return False if the purse does not have them."""
        if loss > self._purse:
            return False
        self._purse -= max(0.0, loss)
        self._since_trial = 0
        return True

    def _allowed_shapes(self) -> list[DraftShape]:
        """Return the drafts that suit the context and fit the round's limit."""
        shapes = [shape for shape in self.shapes if shape.nodes]
        if any(not shape.window for shape in shapes):
            shapes = [shape for shape in shapes if not (shape.window and self._is_short(shape.window))]
        if self._can_stop_early and self.max_round_cost != inf:
            shapes = [self._shortened(shape) for shape in shapes]
        return [shape for shape in shapes if shape.depth and self._fits(shape)]

    def _shortened(self, shape: DraftShape) -> DraftShape:
        while shape.depth and not self._fits(shape):
            shape = DraftShape(shape.depth - 1, shape.nodes - 1, shape.window)
        return shape

    def _fits(self, shape: DraftShape, num_table_nodes: int = 0) -> bool:
        if self.max_round_cost == inf or not self.live.is_measured:
            return True
        return self.live.plain_steps(shape, 1 + shape.nodes + num_table_nodes) <= self.max_round_cost

    def _no_draft(self, reason: str) -> DraftShape:
        self.reasons["model"] = reason
        return NO_DRAFT

    def _request(self, shape: DraftShape) -> DraftShape:
        """Prepare the scorer of a draft that may end early."""
        if self._can_stop_early:
            self.scorer, self._window = self._scorers[shape.is_tree], shape.window
            self.scorer.begin(len(self.counted_rows))
        return shape

    def _with_window(self, pinned: DraftShape) -> DraftShape:
        """Return the pinned shape, with a drafter's window in long contexts."""
        windows = {shape.window for shape in self.shapes}
        return pinned if len(windows) < 2 or self._is_short(max(windows)) else pinned._replace(window=max(windows))

    def _is_short(self, window: int) -> bool:
        return self.live.context < WINDOW_CONTEXTS * window

    def should_continue(self, depth: int, accept_prob: float | None = None) -> bool:
        """Return True if a draft step after `depth` others pays.

        `accept_prob`: probability that a parent is accepted, mean of the counted rows; None: of a chain's last token.
        """
        scorer, is_tree = self.scorer, accept_prob is not None
        assert scorer is not None
        accept_prob = scorer.mean_accept_probs()[-1] if accept_prob is None else accept_prob
        kind = DraftShape(depth, depth + is_tree, self._window)
        seconds = self._seconds(kind, depth + 1) - self._seconds(kind, depth)
        pays = self._share * scorer.gain(accept_prob) > self.rate * seconds
        if pays:
            scorer.parent_probs.append(accept_prob)
        return pays

    def num_tree_nodes_worth(self, depth: int, accept_probs: Sequence[float]) -> int:
        """Return the number of tree nodes worth verifying, by mean acceptance, best first."""
        gains, rate = list(accumulate(accept_probs)), self.rate / self._share
        nums = range(depth + 1, len(accept_probs) + 1)
        return max(nums, key=lambda num: gains[num - 1] - rate * self.live.step(1 + num), default=len(accept_probs))

    @property
    def tables_pause(self) -> bool:
        """True if the coming round queries no tables."""
        return self.pinned is None and self.live.is_measured and self.gate.pauses(self.rate, self._purse)

    @property
    def tables_should_learn(self) -> bool:
        """True if tables learn from the logits of the coming round."""
        return self._fits(NO_DRAFT, 1) and (not self.live.is_measured or self.gate.should_learn(self.rate))

    def should_query_tables(self) -> bool:
        """Return True if a query of tables pays and one node fits."""
        queries = not self.tables_pause and (self.pinned is not None or self._fits(NO_DRAFT, 1))
        self.gate.count(queries)
        if queries and self.live.is_measured and not self.gate.pays(self.rate):
            self._purse -= self.rate * self.gate.seconds
        self._has_queried |= queries
        if not queries:
            self.reasons["tables"] = "tables_pause"
        return queries

    def num_table_nodes_worth(
        self, scores: Sequence[Sequence[float]], drafted: DraftShape = NO_DRAFT
    ) -> tuple[int, float]:
        """Return how many table nodes are worth verifying, and the value of doing so.

        `scores`: of each counted row, in descending order. `drafted`: the model's draft that they are added to.
        """
        longest = min(max(map(len, scores), default=0), self.max_nodes() - drafted.nodes)
        while self.pinned is None and longest and not self._fits(drafted, longest):
            longest -= 1
        means = [sum(column) / len(scores) for column in zip_longest(*scores, fillvalue=0.0)]
        self._promised = list(accumulate(means[:longest], initial=0.0))
        if not self.live.is_measured:
            return longest, 1 + self._promised[-1]
        ratio, rate = self._share * (self._added_tables if drafted.nodes else self._tables).ratio, self.rate
        widths = range(1 + drafted.nodes, 2 + drafted.nodes + longest)
        values = [
            1 + ratio * gain - rate * self.live.step(width) for gain, width in zip(self._promised, widths, strict=True)
        ]
        best = longest if self.pinned is not None else max(range(longest + 1), key=values.__getitem__)
        return best, values[best]

    def early_shape(self) -> DraftShape:
        """Return the draft to launch before tables are queried, for GPUs."""
        last = self.gate.last_model_draft
        if not self.live.is_measured or not last.nodes:
            return NO_DRAFT
        fits = self._fits(last) if self.pinned is None else self.pinned[:2] == last[:2]
        return self.gate.early_draft(self.live.draft(last)) if fits else NO_DRAFT

    def record_model_draft(self, shape: DraftShape, launched_early: bool) -> None:
        """Record the coming round's model draft, which drops early launches if empty."""
        self.gate.record_model_draft(shape)
        self._has_queried &= bool(shape.nodes) or not launched_early  # the time of a dropped draft is not a query's

    def node_accept_probs(self, shape: DraftShape) -> list[float]:
        """Return the acceptance probability of each node of a model's draft, best first."""
        if self.scorer is not None and len(self.scorer.accept_probs) == shape.nodes:
            return self.scorer.mean_accept_probs()
        reach = self._kind(shape).cumulative_acceptance()[: shape.depth]
        return reach + [0.0] * (shape.nodes - len(reach))

    def max_nodes(self) -> int:
        return self._largest if self.pinned is None else self.pinned.nodes

    def expected(self, tree: DraftTree) -> float:
        """Return the predicted time of a round, in a shared unit."""
        if not self.live.is_measured:
            return 1.0
        catch_up = tree.record.num_unread_tokens * self.live.table.read
        return catch_up + self.live.draft(model_shape(tree)) + self.live.step(1 + tree.tokens.shape[1])

    def decision(self) -> Decision:
        """Return what the coming round was decided with, for its record; the next decision begins."""
        made = Decision(self._has_queried, self.tables_match, self._promised, self.scorer)
        self._has_queried, self.scorer = False, None
        return made

    def record(
        self,
        decision: Decision,
        tree: DraftTree,
        paths: Sequence[Sequence[int]],
        draft_s: float,
        step_s: float,
        progress: float,
    ) -> None:
        """Learn from a finished round.

        `paths`: accepted verify rows, from 1, of each counted row. `step_s`: seconds of all but drafting. `progress`:
        tokens, see `request.mean_progress`.
        """
        if not self._largest:
            return  # nothing is ever drafted, and corrections of costs take as long as other work of the host
        live, shape, num_nodes = self.live, model_shape(tree), tree.tokens.shape[1]
        self._fade(DECAY)
        if shape.nodes and paths:
            self.tables_match, scorer = decision.tables_match, decision.scorer
            for path in paths:
                self._kind(shape).record(sum(node <= shape.nodes for node in path), shape.depth, shape.nodes)
            if scorer is not None and len(scorer.accept_probs) == shape.nodes:
                scorer.record([{node - 1 for node in path if node <= shape.nodes} for path in paths])
        if num_nodes > shape.nodes and paths:
            calibration, promised = self._added_tables if shape.nodes else self._tables, decision.promised
            found = sum(node > shape.nodes for path in paths for node in path) / len(paths)
            calibration.record(promised[min(num_nodes - shape.nodes, len(promised) - 1)], found)
        if decision.has_queried and not shape.nodes:
            self.gate.record_seconds(draft_s / live.drift)
        if tree.record.drafted_ahead:  # made while the last draft was verified, so its time is not that of drafting
            draft_s = live.draft(shape) * live.drift
        # Where reading missed tokens took most of the time, it says little about the draft.
        drafting_s = draft_s - tree.record.num_unread_tokens * live.table.read * live.drift
        live.record(shape, 1 + num_nodes, drafting_s if drafting_s > draft_s / 2 else 0.0, step_s)
        if paths:
            accepted, advanced = self._gained
            gain = sum(map(len, paths)) / len(paths)
            self._gained = RATE_DECAY * accepted + gain, RATE_DECAY * advanced + min(gain, progress - 1)
            seconds = self.expected(tree) + self.gate.seconds * decision.has_queried
            self._done = RATE_DECAY * self._done[0] + progress, RATE_DECAY * self._done[1] + seconds
            self._purse = min(PURSE[1], self._purse + EXPLORED * progress)

    def _fade(self, share: float) -> None:
        for kind in self._kinds.values():
            kind.fade(share)
        self._tables.fade(share)
        self._added_tables.fade(share)
