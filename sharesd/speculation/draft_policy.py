"""Draft policy: each round's draft, by measured costs and acceptance.

Decoding is fastest if every choice has the largest value

    value = expected tokens - rate * expected seconds,

where `rate` is the tokens per second that decoding reaches: time spent here could make tokens elsewhere. The same
number decides whether to draft, with what and how far, how much of it is verified, and whether a query of tables pays.
Trials of what seems worse are paid from a purse that half a percent of the tokens fills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import accumulate, zip_longest
from math import inf
from typing import NamedTuple

from sharesd.speculation.acceptance_stats import EndedDrafts, FixedDrafts
from sharesd.speculation.cost_model import Costs, LiveCosts, guessed_costs
from sharesd.speculation.draft_scorer import DraftScorer, num_worth
from sharesd.speculation.draft_tree import NO_DRAFT, DraftKind, DraftShape, DraftTree, model_shape
from sharesd.speculation.query_gate import QueryGate

EXPLORED, PURSE, DEBT = 0.005, (1.0, 4.0), 2.0
"""Part of the tokens that trials may cost; tokens that they may cost at first and at most at once; largest debt."""
TRIAL_GAP = 8
"""Fewest rounds between two trials."""
REST = 64
"""Most plain steps in a row that are neither decided nor recorded."""
FRESH = 4
"""Rounds after which expectations are computed again."""
NEW_TEXT = 60
"""Rounds that a new text counts as: those of earlier texts count less."""
GAINS_PRIOR, GAINS_KEPT = 4.0, 0.94
"""Tokens that rows and their call are taken to have gained together; part of what they gained that a new text keeps."""
RATE_DECAY = 0.97
"""Fading of rounds in the mean rate: about the last 33 count."""
SAMPLED = 4 / 3
"""Power of the prior where tokens are sampled: 0.8 of quantized copies is 0.74 then, 0.5 of heads 0.4."""
PRIOR = 0.5
"""Acceptance of a draft token before any was verified, of drafters that give none."""
WINDOW_CONTEXTS = 4
"""Contexts, in windows, from which drafts with a window are considered."""


class Decision(NamedTuple):
    """What a round was decided with; with async scheduling, the next one is decided before it is recorded."""

    has_queried: bool
    """Tables were queried."""
    scorer: DraftScorer | None
    given_up: float | None
    """Value of what a trial was made instead of; None: no trial."""


RESTING = Decision(False, None, None)
"""Of a plain step that nobody decides or records."""


class _Option(NamedTuple):
    """A draft that may be made, and what to expect of it."""

    shape: DraftShape
    gain: float
    """Tokens by which a call advances."""
    seconds: float
    """Time of the round."""

    def value(self, rate: float) -> float:
        return 1 + self.gain - rate * self.seconds


class Policy:
    """Choice of drafts for one engine and one sampling kind."""

    def __init__(
        self,
        shapes: Sequence[DraftShape],
        *,
        pinned: DraftShape | None = None,
        costs: Costs | None = None,
        measured: Mapping[int, Costs] | None = None,
        priors: Mapping[str, float] | None = None,
        can_stop_early: bool = False,
    ) -> None:
        """Choose among `shapes` and no draft, or always use `pinned`.

        `costs` of None: a guess, which rounds correct. `measured`: costs by number of rows. `priors`: by drafter,
        acceptance of a token before any draft was verified. `can_stop_early`: `scorer` tells drafts when to end, so
        only a drafter's largest tree is a choice, or its longest chain where it has no trees.
        """
        self._priors, self._can_stop_early, self.pinned = priors or {}, can_stop_early, pinned
        self._largest = max((shape.nodes for shape in shapes), default=0)
        most = {each[2:]: each for each in sorted(shapes, key=lambda each: (each.is_tree, *each[:2]))}
        self.shapes = tuple(each for each in shapes if not can_stop_early or each == most[each[2:]])
        self._tree_growers = {shape.drafter for shape in shapes if can_stop_early and shape.is_tree}
        self.counted_rows: Sequence[int] = (0,)
        """Rows of the coming round whose tokens count, see `request.counted_requests`."""
        self.max_round_cost = inf
        """Plain steps that the coming round may take, see `request.max_round_cost`."""
        self.reset(costs or guessed_costs(), measured)

    def reset(self, costs: Costs, measured: Mapping[int, Costs] | None = None) -> None:
        """Use these costs, and those `measured` by rows; forget everything learned from rounds."""
        self.live, self.gate = LiveCosts(costs, measured), QueryGate()
        self._age = 0  # rounds, and NEW_TEXT for each text: counts of acceptance fade with it
        self._kinds: dict[tuple[DraftKind, int], FixedDrafts | EndedDrafts] = {}  # by kind and window
        self._scorers = {shape.kind: DraftScorer(self._prior(shape)) for shape in self.shapes}
        self._done = (0.0, 0.0)  # decayed tokens and predicted seconds of rounds
        self._rows_gain, self._call_gain = 0.0, 0.0  # decayed tokens gained by drafts for several rows: mean, in all
        self._purse, self._query_purse, self._last_trial = PURSE[0], PURSE[0], 0  # for drafts; for queries
        self._given_up: float | None = None  # value of what the coming round is tried instead of
        self._options: tuple[object, list[_Option]] = None, []  # by what they depend on
        self.scorer: DraftScorer | None = None
        """Scorer of a model's coming draft, if it may end early."""
        self.reasons: dict[str, str] = {}
        """Reasons against a draft in the coming round, by drafter."""
        self.model_value = 0.0
        """Value of the best of a model's drafts and no draft in the coming round."""
        self._has_queried = False
        self._rest, self._rested = 0, 0  # coming rounds that need no decision; those that needed none
        self._until_trial: list[float] = []  # rounds before each kind of draft may be tried, if the coming one is plain

    def begin(self) -> None:
        """Start a new text."""
        self._age += NEW_TEXT
        self._rows_gain, self._call_gain = GAINS_KEPT * self._rows_gain, GAINS_KEPT * self._call_gain

    @property
    def rate(self) -> float:
        """Tokens per second that time is worth: those of the last rounds, and at least those of plain steps."""
        if self.pinned is not None:
            return 0.0  # so what is drafted depends on no times
        tokens, seconds = self._done
        return max(1 / self.live.step(1), tokens / seconds if seconds else 0.0)

    @property
    def call_ratio(self) -> float:
        """Part of the mean gain of several rows by which their call advances: it ends with its slowest row."""
        if self.live.point is None or self.live.point[2] == 1:
            return 1.0
        return (GAINS_PRIOR + self._call_gain) / (GAINS_PRIOR + self._rows_gain)

    def _price(self, rate: float) -> Callable[[int], float]:
        """Return a function of the number of tokens in a step: tokens that its time is worth."""
        step = self.live.step
        return lambda width: rate * step(width)

    @property
    def plain_value(self) -> float:
        return 1 - self.rate * self.live.step(1)

    def _prior(self, shape: DraftShape) -> float:
        return self._priors.get(shape.drafter, PRIOR)

    def _kind(self, shape: DraftShape) -> FixedDrafts | EndedDrafts:
        key = shape.kind, shape.window
        if key not in self._kinds:
            # Of several branches one is accepted more often than a chain's token. It begins too high rather than too
            # low: a few drafts show that. With a window, it begins as it is without.
            alpha = self._prior(shape) + 0.7 * (1 - self._prior(shape)) * shape.is_tree
            known = [each for (kind, _), each in self._kinds.items() if kind == shape.kind]
            self._kinds[key] = deepcopy(known[0]) if known else FixedDrafts(self._largest, alpha)
            if self._can_stop_early and not known:  # before any draft: as far as the prior lets steps pay
                shorter = (shape._replace(depth=num, nodes=num + shape.is_tree) for num in range(1, shape.depth + 1))
                best = max(map(self._option, shorter), key=lambda option: option.value(self.rate))
                self._kinds[key] = EndedDrafts(best.gain / self.call_ratio, *best.shape[:2])
        return self._kinds[key]

    def _option(self, shape: DraftShape) -> _Option:
        gain, steps, nodes = self._kind(shape).expected(self._age, shape)
        return _Option(shape, self.call_ratio * gain, self.live.draft(shape, steps) + self.live.step(1 + nodes))

    def options(self) -> list[_Option]:
        """Return the drafts that suit the context and fit the round's limit."""
        key = self.live.point, self.max_round_cost, self.pinned, self._age // FRESH, self._rows_gain
        if self._options[0] != key:
            self._options = key, list(map(self._option, self._allowed_shapes()))
        return self._options[1]

    def next_shape(self, may_explore: bool = True, to_beat: float = -inf) -> DraftShape:
        """Return the shape of a model's coming draft; NO_DRAFT: none.

        `may_explore`: trials of drafts that seem not to pay are allowed. `to_beat`: value of the draft that tables have
        made for this round, if there is one.
        """
        options, rate, plain = self.options(), self.rate, self.plain_value
        values = [each.value(rate) for each in options]
        best = max(values, default=-inf)
        self.model_value, least = max(plain, best), to_beat if self.pinned is not None else max(plain, to_beat)
        chosen = options[values.index(best)].shape if best > least else NO_DRAFT
        if self.pinned is not None:
            return chosen
        if chosen.nodes and to_beat == -inf and self.live.plain_is_due:
            return self._no_draft("plain_step_is_timed", 0)
        since_trial = self._age - self._last_trial
        if may_explore and since_trial >= TRIAL_GAP:
            most = max(self.model_value, to_beat)
            trials = [
                (self._kind(option.shape).last_age, most - value, option.shape)
                for option, value in zip(options, values, strict=True)
                if option.shape != chosen and most - value <= self._purse
            ]
            if trials:
                self._last_trial, self._given_up = self._age, most
                return self._request(min(trials)[2])
        if chosen.nodes:
            return self._request(chosen)
        wait = max(TRIAL_GAP - since_trial, (plain - best - self._purse) / EXPLORED)
        return self._no_draft("plain_is_faster", wait if may_explore else inf)

    def _allowed_shapes(self) -> list[DraftShape]:
        context, pinned = self.live.context, self.pinned
        shapes = [each for each in self.shapes if not each.window or context >= WINDOW_CONTEXTS * each.window]
        if pinned is not None:
            windows = [each.window for each in shapes if each.drafter == pinned.drafter]
            return [pinned._replace(window=max(windows, default=pinned.window))] if pinned.nodes else []
        shapes = shapes or list(self.shapes)  # all have a window
        if self._can_stop_early and self.max_round_cost != inf:
            shapes = [self._shortened(shape) for shape in shapes]
        return [shape for shape in shapes if shape.depth and self._fits(shape)]

    def _shortened(self, shape: DraftShape) -> DraftShape:
        while shape.depth and not self._fits(shape):
            shape = shape._replace(depth=shape.depth - 1, nodes=shape.nodes - 1)
        return shape

    def _fits(self, shape: DraftShape, num_table_nodes: int = 0) -> bool:
        if self.pinned is not None or self.max_round_cost == inf:
            return True
        return self.live.plain_steps(shape, 1 + shape.nodes + num_table_nodes) <= self.max_round_cost

    def _no_draft(self, reason: str, wait: float) -> DraftShape:
        """Return no draft; `wait`: rounds for which it stays so."""
        self.reasons["model"] = reason
        self._until_trial.append(wait)
        return NO_DRAFT

    def _request(self, shape: DraftShape) -> DraftShape:
        """Prepare the scorer of a draft that may end early."""
        if self._can_stop_early:
            self.scorer, rate = self._scorers[shape.kind], self.rate / self.call_ratio
            self.scorer.begin(self.counted_rows, rate * self.live.draft_step(shape), self._price(rate))
        return shape

    def _may_query(self, purse: float) -> bool:
        """Return True if one node of tables fits, and a query pays or is a trial that this purse can pay for."""
        return self._fits(NO_DRAFT, 1) and not self.gate.pauses(self.rate, purse)

    @property
    def tables_pause(self) -> bool:
        """True if the coming round queries no tables."""
        return not self._may_query(self._query_purse)

    @property
    def tables_should_learn(self) -> bool:
        """True if tables learn from the logits of the coming round: a query is near."""
        return self._may_query(2 * self._query_purse)

    def should_query_tables(self) -> bool:
        """Return True if the coming round queries tables."""
        queries = not self.tables_pause
        self._has_queried |= queries
        if not queries:
            self.reasons["tables"] = "tables_pause"
        elif not self.gate.pays(self.rate):
            self._query_purse -= self.rate * self.gate.seconds
        missing = 0.0 if self.gate.pays(self.rate) else self.rate * self.gate.seconds - self._query_purse
        self._until_trial.append(missing / EXPLORED)
        return queries

    def num_table_nodes_worth(self, scores: Sequence[Sequence[float]]) -> tuple[int, float]:
        """Return how many table nodes are worth verifying, and the value of doing so.

        `scores`: of each counted row, in descending order.
        """
        longest = min(max(map(len, scores), default=0), self.max_nodes())
        while longest and not self._fits(NO_DRAFT, longest):
            longest -= 1
        gains = self._gains_of_tables(scores, longest)
        if not longest or (self.pinned is None and self.live.plain_is_due):
            return 0, self.plain_value
        best, value = num_worth(gains, self._price(self.rate), 0)
        return best, 1 + value

    def _gains_of_tables(self, scores: Sequence[Sequence[float]], num: int) -> list[float]:
        """Return the tokens to expect of 0 to `num` nodes."""
        means = [sum(column) / len(scores) for column in zip_longest(*scores, fillvalue=0.0)]
        return [self.call_ratio * gain for gain in accumulate(means[:num], initial=0.0)]

    @property
    def model_leads(self) -> bool:
        """True if a round is launched, on a GPU, before tables are queried: the last one's draft was a model's."""
        last = self.gate.last_model_draft
        return last.nodes > 0 and self._fits(last)

    def tables_lead(self, scores: Sequence[Sequence[float]], drafted: DraftShape) -> bool:
        """Return True if tables alone are worth more than a model's draft with their nodes next to it.

        A GPU makes no draft then, but waits for the tables. `scores`: as for `num_table_nodes_worth`; `drafted`: the
        shape of the model's draft.
        """
        num, value = self.num_table_nodes_worth(scores)
        if not num:
            return False
        option, room = self._option(drafted), self.max_nodes() - drafted.nodes
        both = option._replace(gain=max(option.gain, self._gains_of_tables(scores, min(num, room))[-1]))
        return value - self.rate * self.gate.wait_if_first > both.value(self.rate)

    def max_nodes(self) -> int:
        return self._largest if self.pinned is None else self.pinned.nodes

    def expected(self, tree: DraftTree) -> float:
        """Return the predicted time of a round, in a shared unit."""
        return self.live.draft(self.shape_of(tree)) + self.live.step(1 + tree.tokens.shape[1])

    def shape_of(self, tree: DraftTree) -> DraftShape:
        """Return the shape of a model's draft; few nodes of a tree have cost its levels all the same."""
        shape = model_shape(tree)
        if shape.drafter not in self._tree_growers:
            return shape
        return shape._replace(nodes=max(shape.nodes, shape.depth + (shape.depth > 0)))

    def rests(self) -> bool:
        """Return True if the coming round is a plain step that nobody has to decide or record."""
        if self._rest:
            self._rest, self._rested = self._rest - 1, self._rested + 1
            return True
        if self._rested:
            self._age += self._rested
            self._fill_purses(self._rested)
            fade = RATE_DECAY**self._rested
            self._done = fade * self._done[0], fade * self._done[1]
            self._rested = 0
        return False

    def end_rest(self) -> None:
        """Decide the coming round, since something else than the text has changed."""
        self._rest = 0

    def decision(self, is_plain: bool = False) -> Decision:
        """Return what the coming round was decided with, for its record; the next decision begins.

        `is_plain`: after it come as many plain steps as nothing can be tried.
        """
        made = Decision(self._has_queried, self.scorer, self._given_up)
        self._has_queried, self.scorer, self._given_up = False, None, None
        rests = is_plain and self.pinned is None and self._until_trial
        self._rest = max(0, int(min(REST, *self._until_trial))) if rests else 0
        self._until_trial = []
        return made

    def _fill_purses(self, tokens: float) -> None:
        self._purse, self._query_purse = (
            min(PURSE[1], each + EXPLORED * tokens) for each in (self._purse, self._query_purse)
        )

    def record(
        self,
        decision: Decision,
        tree: DraftTree,
        paths: Sequence[Sequence[int]],
        draft_s: float,
        step_s: float,
        progress: float,
        wait_s: float | None = None,
    ) -> None:
        """Learn from a finished round.

        `paths`: accepted verify rows, from 1, of each counted row. `step_s`: seconds of all but drafting. `progress`:
        tokens, see `request.mean_progress`. `wait_s`: for tables, on a GPU, which neither seconds have; None: what is
        not of a model's draft is the query.
        """
        if not self._largest or decision is RESTING:
            return  # nothing is ever drafted, and corrections of costs take as long as other work of the host
        live, shape = self.live, self.shape_of(tree)
        self._age += 1
        if decision.has_queried and wait_s is not None:
            self.gate.record_seconds(wait_s / live.drift, tree.record.takes_late_nodes)
        elif decision.has_queried and not tree.record.num_steps:
            self.gate.record_seconds(draft_s / live.drift)
        if tree.record.drafted_ahead:  # made while the last draft was verified: its time is not that of drafting
            draft_s = live.draft(shape) * live.drift
        query_s = self.gate.seconds * live.drift * (decision.has_queried and wait_s is None)
        live.record(shape, 1 + tree.tokens.shape[1], max(0.0, draft_s - query_s), step_s)
        if paths:
            self._learn(decision, tree, shape, paths)
            if tree.tokens.numel() and len(tree.tokens) > 1:
                self._rows_gain += sum(map(len, paths)) / len(paths)
                self._call_gain += min(max(0.0, progress - 1), max(map(len, paths)))  # a row's end is no draft's gain
            tokens, seconds = self._done
            took = self.expected(tree)
            self._done = RATE_DECAY * tokens + progress, RATE_DECAY * seconds + took
            self._purse = max(-DEBT, self._purse)  # one stall must not end trials
            self._fill_purses(progress)
            if decision.given_up is not None:  # paid for with what it cost, since first steps may take twice as long
                self._purse -= decision.given_up - progress + self.rate * (draft_s + step_s) / live.drift

    def _learn(self, decision: Decision, tree: DraftTree, shape: DraftShape, paths: Sequence[Sequence[int]]) -> None:
        """Count what was accepted of a model's draft, which has this shape, and of nodes of tables."""
        num_nodes, drafted = tree.tokens.shape[1], [[node for node in path if node <= shape.nodes] for path in paths]
        if tree.record.takes_late_nodes:
            self.gate.record_gain(self.call_ratio * (sum(map(len, paths)) - sum(map(len, drafted))) / len(paths))
        if shape.nodes:
            kind, scorer = self._kind(shape), decision.scorer
            for path in drafted:
                kind.record(self._age, len(path), shape.depth, min(num_nodes, shape.nodes))
            if scorer is not None and scorer.num_nodes == num_nodes:
                scorer.record(drafted)
