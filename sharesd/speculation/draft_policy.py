"""How far to draft next: as far as it pays, by measured costs and running acceptance; 0 is a plain step.

A round that drafts a chain of K tokens emits 1 + s_1 + ... + s_K tokens on average, where s_k is the probability that
the first k are accepted, and takes `draft * K + step(1 + K)` seconds (`costs.py`). A tree of K levels and N nodes has
survival rates of its own, its levels take longer, and its step has 1 + N rows. The policy takes the shape of the best
ratio. Where that is no draft at all it tries one now and then.

Where it takes no time to ask (on a CPU), each step of a draft decides whether another one pays, by how sure the model
is of its guesses: `grows`. Then s_k is the probability that a draft gets so far and is accepted, and a round has as
many steps and guesses as such drafts usually come to.

What all this rests on are estimates, and so what drafting has really won or lost against plain steps is kept in an
account: tries are paid from it, and when it is empty nothing is drafted until plain rounds have filled it again. So
drafts cost a hundredth of the time at most, and a few steps, however wrong the estimates are. Model drafts and tables
have accounts of their own: what one of them loses is no reason to do without the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from math import inf
from typing import NamedTuple

import numpy as np

from sharesd.speculation.acceptance_stats import FORGET, Account, Outlook, Promises, Survival
from sharesd.speculation.cost_model import Costs, LiveCosts
from sharesd.speculation.draft_scorer import Weighing
from sharesd.speculation.draft_tree import PLAIN, DraftTree, Shape, model_shape

MARGIN = 1.04
"""A draft must promise this much more than a plain step: estimates are noisy, and plain steps are a sure thing."""
LEAD = 1.02
"""A model's draft must promise this many times what tables do."""
FIRST_ALPHAS = 0.8, 0.88
"""Acceptance of a chain's tokens, and of a tree's levels, assumed before there is evidence, of a model's drafts."""
HEAD_ALPHAS = 0.5, 0.65
"""The same of a trained head's, or a second model's. Who hopes for more drafts long at first, loses, and then dares not
for a while."""
HOPED_ALPHA, HOPED_TREE_ALPHA = 0.95, 0.97
"""Acceptance that a draft may turn out to have: one that would lose even then is not tried."""
DOUBT = 3.0
"""Costs that were measured at start only may be wrong by this factor."""
WORTHWHILE = 4
"""Drafts that look back so far are thought of in contexts this many times as long."""
NEW_TEXT = 0.4
"""What remains of it when a new text begins: texts differ more than their parts do."""
FIRST_TRY, LAST_TRY = 16, 256
"""Plain rounds between tries of a draft."""
TRY_ROUNDS = 3
"""Rounds of a try."""
REPAID = 16
"""Rounds with drafts that share what it takes to read what a model missed: else what pays in the long run would never
begin."""
RECHECK = 4
"""Plain rounds after which it is looked whether a draft pays."""
PAUSE, LOOKS = (8, 32), 16
"""Rounds from one look into the tables to the next, at first and at most, where looking takes longer than it gains;
looks that tell."""
SOON = 4
"""Rounds before a look whose logits tables learn from."""
FRESH = 0.02
"""What looking is thought to gain on top of its cost when a text begins: some third of a plain step is spent on finding
out, in few looks where one takes long and in many where it does not."""
THIN, EARLY_PROBE, PROBE, LATE_PROBE = 1.15, 4, 32, 128
"""Where drafts promise less than this many times a plain step, so many rounds are followed by a plain one: nothing else
tells what those take at present. Early where that is in doubt; late where drafts promise more, since a promise that is
wrong has to be noticed, too."""


class Asked(NamedTuple):
    """Decision for a round, which may be recorded when others have been asked for."""

    shape: Shape
    looked: bool
    known_place: bool
    worth: list[float]
    weighing: Weighing | None


class Policy:
    """Chooses the shape of drafts for one engine and one way of sampling."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        *,
        pinned: Shape | None = None,
        costs: Costs | None = None,
        measured: Mapping[int, Costs] | None = None,
        probes: bool = True,
        first_alphas: tuple[float, float] = FIRST_ALPHAS,
        stops: bool = False,
    ) -> None:
        """Choose among `shapes` and no draft; or always take `pinned` (PLAIN = plain decoding). `probes`: plain steps
        are timed now and then. Where weights come through a slow link all steps tell what one takes. `first_alphas`:
        see FIRST_ALPHAS. `stops`: drafts ask `grows`, and trees are as large as the largest at most.
        """
        self._first_alphas, self._stops = first_alphas, stops
        self._probes = probes
        self._tree = max((shape for shape in shapes if shape.is_tree), default=PLAIN)  # the largest
        smaller = [shape for shape in shapes if stops and shape.is_tree and shape[:2] != self._tree[:2]]
        self.shapes = tuple(shape for shape in shapes if shape not in smaller)
        self.pinned, self.chooses = pinned, pinned is None
        self.live = LiveCosts(costs or Costs(), measured)
        self.account, self.table_account = Account(), Account()  # of model drafts, of tables alone
        self._most = max((shape.nodes for shape in shapes), default=0)
        self._windows_only = all(shape.recent for shape in shapes)
        self.awaited: Sequence[int] = (0,)
        """Rows of the coming round whose tokens count, see `request.awaited`."""
        self.longest = inf
        """Plain steps that the coming round may take, see `request.bearable`."""
        self.missed = 0
        """Tokens that a model would have to read before the coming draft."""
        self.known_place = False
        """Whether tables know what comes next: a model is right more often there."""
        self._survivals: dict[object, Survival] = {}  # by place, and by kind of draft
        self._verified, self._hits = [0.0] * self._most, [0.0] * self._most  # of trees: decayed, by a node's rank
        self._worth = [0.0]  # tokens that tables promised last, by the number of nodes
        self._tables, self._beside = Promises(), Promises()  # tables alone, beside a model's draft
        self._plain_rounds, self._patience = 0, FIRST_TRY
        self._trying, self._until_check = 0, 0  # rounds that are left of a try, and until it is looked what pays
        self._since_plain = 0  # rounds since the last plain one
        self._look_gain, self._num_looks = 1.0, 0  # running mean of the share gained
        self.look_s = 0.0
        """Seconds that a look takes, a running mean."""
        self._last, self._dropped = PLAIN, 0.0  # draft of a model beside tables; running share of those dropped
        self._rest, self._until_look = PAUSE[0], 0  # rounds from look to look; until the next
        self._looked = False  # in this round
        self._drafted = False  # by a model: else there is no evidence that could fade
        self._num_chains, self._patience_for_trees = 0, FIRST_TRY  # rounds with chains since one with a tree
        self.weighing: Weighing | None = None
        """Of the coming draft of a model, if it may end early."""
        self._weighings = {False: Weighing(), True: Weighing()}  # of chains, of trees
        self._asked = PLAIN  # of such a draft
        self._aim = 0.0  # tokens per second that it shall not fall behind

    def use(self, costs: Costs, measured: Mapping[int, Costs] | None = None) -> None:
        """Take these costs, and those `measured` for numbers of rows, and forget what was learnt meanwhile."""
        awaited, longest = self.awaited, self.longest
        same = {"pinned": self.pinned, "probes": self._probes, "first_alphas": self._first_alphas, "stops": self._stops}
        self.__init__(self.shapes, costs=costs, measured=measured, **same)  # type: ignore[misc]
        self.awaited, self.longest = awaited, longest

    @property
    def costs(self) -> Costs:
        """The table in use."""
        return self.live.table

    def begin(self) -> None:
        """A new text: what was learnt from the last one counts less."""
        self._fade(NEW_TEXT)
        self.account.begin()
        self.table_account.begin()
        self._until_check = 0
        self._look_gain, self._rest = max(self._look_gain, self._look_cost() + FRESH), PAUSE[0]

    def next_shape(self, may_try: bool = True, beside: float | None = None) -> Shape:
        """What a model shall draft in the coming round. Without `may_try` only what is known to pay is drafted.

        `beside`: tokens per second which tables promise at this very place; a model must promise more.
        """
        if self.pinned is not None:
            pinned = self._pinned_here()
            return pinned if beside is None or self.rate_of_shape(pinned) > beside else PLAIN
        if not self.live.known or self.account.empty:
            return PLAIN
        if beside is None and self._until_check > 0:
            self._until_check -= 1  # to look anew takes 1 % of a step
            self._plain_rounds += 1
            return PLAIN
        best = self.best_shape()
        rate, plain = self.rate_of_shape(best), self.rate_of_shape(PLAIN)
        if rate > max(MARGIN * plain, LEAD * (beside or 0.0)):
            self._plain_rounds, self._patience, self._trying = 0, FIRST_TRY, 0
            if self.must_probe(rate / plain):
                self._since_plain = 0  # the round may be launched, and others behind it, before it is recorded
                return PLAIN
            return self._ask(self._anew(best), rate)
        if rate > MARGIN * plain:  # it would pay, and tables promise more
            return PLAIN
        self._plain_rounds += 1
        if self._plain_rounds <= self._patience or not best.nodes or not may_try or not self.affords(best):
            self._until_check = RECHECK - 1
            return PLAIN
        self._trying = (self._trying or TRY_ROUNDS) - 1
        if not self._trying:
            self._plain_rounds, self._patience = 0, min(LAST_TRY, 2 * self._patience)
        return self._ask(best, plain)

    def _anew(self, best: Shape) -> Shape:
        """Trees, now and then, where chains seem to pay more: those tell how trees would fare, but not how well."""
        tree = self._tree._replace(recent=best.recent)
        if best.is_tree or not tree.is_tree or not self._bearable(tree):
            self._num_chains = 0
            return best
        if self._hoped_of(tree, best) <= MARGIN * self.rate_of_shape(best):
            return best
        self._num_chains += 1
        if self._num_chains < self._patience_for_trees:
            return best
        if self._num_chains >= self._patience_for_trees + TRY_ROUNDS:
            self._num_chains, self._patience_for_trees = 0, min(LAST_TRY, 2 * self._patience_for_trees)
        return tree

    def _hoped_of(self, tree: Shape, chain: Shape) -> float:
        """Tokens per second of trees, if they miss but half as often as such chains do: as far as that pays best."""
        missed = [1 - survived for survived in self._survival(chain).rates()]
        gains = accumulate((1 - miss / 2 for miss in missed[: tree.depth]), initial=0.0)
        rounds = ((gain, Shape(depth, depth + 1, tree.recent)) for depth, gain in enumerate(gains) if depth)
        return max(self._rate(gain, shape.nodes, self.live.draft(shape)) for gain, shape in rounds)

    def _ask(self, shape: Shape, rate: float) -> Shape:
        """A model is asked for this draft, which may end early, where it falls behind so many tokens per second."""
        if self._stops:
            self._asked, self._aim = shape, rate
            self.weighing = self._weighings[shape.is_tree]
            self.weighing.begin(len(self.awaited))
        return shape

    def grows(self, depth: int, odds: float | None = None) -> bool:
        """Whether a draft step more pays behind so many: whether it promises more tokens in its time, and in that of
        one more row of the target's, than rounds do on the whole.

        `odds`: that one of the guesses is accepted that it goes on from, as the mean of the awaited rows; None: the
        last guess of a chain.
        """
        asked, weighing = self._asked, self.weighing
        assert weighing is not None
        odds = weighing.mean_odds()[-1] if odds is None else odds
        now, later = (Shape(at, at + asked.is_tree, asked.recent) for at in (depth, depth + 1))
        rows = self.live.step(1 + later.nodes) - self.live.step(1 + now.nodes)
        pays = weighing.gain(depth, odds) > self._aim * (self.live.draft(later) - self.live.draft(now) + rows)
        if pays:
            weighing.fronts.append(odds)
        return pays

    def num_worth(self, depth: int, odds: Sequence[float]) -> int:
        """How many nodes of a tree are worth verifying; `odds` are those that each is accepted, best first, as the mean
        of the awaited rows. (One more than levels at least, since it is a tree.)
        """
        gains = list(accumulate(odds))
        return max(
            range(depth + 1, len(odds) + 1),
            key=lambda num: gains[num - 1] - self._aim * self.live.step(1 + num),
            default=len(odds),
        )

    def _pinned_here(self) -> Shape:
        """The pinned shape, looking back no further than it must, where that may be chosen."""
        assert self.pinned is not None
        windows = [shape.recent for shape in self.shapes if shape[:2] == self.pinned[:2]]
        if len(windows) < 2 or self.live.context < WORTHWHILE * max(windows):
            return self.pinned
        return self.pinned._replace(recent=max(windows))

    def expected(self, tree: DraftTree) -> float:
        """What a round with this draft takes, in units that are the same for all rounds."""
        if not self.live.known:
            return 1.0
        shape = model_shape(tree)
        catching_up = tree.missed * self.costs.read
        return catching_up + self.live.draft(shape) + self.live.step(1 + tree.tokens.shape[1])

    def must_probe(self, promise: float) -> bool:
        """Whether a plain step is due, to learn what it takes; `promise`: of the draft, over a plain step."""
        if not self._probes:
            return False
        due = EARLY_PROBE if self.live.doubtful else PROBE if promise < THIN else LATE_PROBE
        return self._since_plain >= due

    def affords(self, shape: Shape) -> bool:
        """Whether a try of this shape, which does not seem to pay, can be afforded, and might turn out to pay."""
        plain, (draft_s, nodes) = self.live.step(1), self._size(shape, self._outlook(shape))
        took = (self._catching_up + draft_s + self.live.step(1 + nodes)) / plain
        loss = took * (1 - self.rate_of_shape(shape) / self.rate_of_shape(PLAIN))
        usual, best = self._first_alphas[shape.is_tree], HOPED_TREE_ALPHA if shape.is_tree else HOPED_ALPHA
        hoped = usual + (best - usual) / len(self.awaited) ** 0.5  # a mean over many rows is seldom far from the usual
        hope = hoped ** np.arange(1, shape.depth + 1)
        doubt = 1.0 if self.live.tried(shape) else DOUBT
        return self.account.affords(loss) and doubt * (1 + hope.sum()) / took > MARGIN

    def looks(self) -> bool:
        """Whether to ask tables in the coming round: always, unless that takes longer than it gains, or not even one
        guess could be verified in time.
        """
        if self.pinned is None and self.live.known:
            if not self._bearable(PLAIN, 1):
                return False
            resting = self.table_account.empty or self._look_gain < self._look_cost()
            if resting and self._until_look > 0:
                self._until_look -= 1
                return False
            if resting:
                self._until_look = self._rest - 1
                self._rest = min(PAUSE[1], 2 * self._rest)
            else:
                self._rest, self._until_look = PAUSE[0], 0
        self._looked = True
        return True

    @property
    def learns(self) -> bool:
        """Whether tables shall learn from the logits of the coming round: not where it is long until they are asked."""
        return self._until_look < SOON and self._bearable(PLAIN, 1)

    def looked(self, gain: float) -> None:
        """Tables were asked: thanks to them the draft promises so much more, as a share, than what it would be."""
        self._look_gain += (max(0.0, gain) - self._look_gain) / LOOKS

    def early_shape(self) -> Shape:
        """Draft to launch before tables are asked, so that a GPU need not wait for them: one like the last.

        PLAIN if such drafts are dropped, since tables promise more, so often that this takes longer than asking.
        """
        last = self._last
        fits = self._bearable(last) if self.pinned is None else self.pinned[:2] == last[:2]
        if not (last.nodes and fits and self.live.known):
            return PLAIN
        return last if self._dropped * self.live.draft(last) * self.live.drift <= self.look_s else PLAIN

    def chose(self, shape: Shape, early: bool) -> None:
        """A model drafts this in the coming round. `early`: a draft was launched before tables were asked."""
        if self._last.nodes:
            self._dropped += ((not shape.nodes) - self._dropped) / LOOKS
        if early and not shape.nodes:
            self._looked = False  # the time of what is dropped is not that of a look
        self._last = shape

    def _look_cost(self) -> float:
        """Share of a plain step that a look takes."""
        return self.look_s / (self.live.step(1) * self.live.drift) if self.live.known else 0.0

    def best_shape(self) -> Shape:
        """The draft that promises most tokens per second, be it more than a plain step or not."""
        outlooks: dict[tuple[bool, int], Outlook] = {}
        best, best_rate = PLAIN, 0.0
        for shape in self.shapes:
            if shape.recent and not self._windows_only and self.live.context < WORTHWHILE * shape.recent:
                continue
            if not self._bearable(shape):
                continue
            kind = shape.is_tree, shape.recent
            if kind not in outlooks:
                outlooks[kind] = self._outlook(shape)
            rate = self._rate_of(shape, outlooks[kind])
            if rate > best_rate:
                best, best_rate = shape, rate
        return best

    def _bearable(self, shape: Shape, num_guesses: int = 0) -> bool:
        """Whether a round with a model's draft and so many guesses of tables takes no longer than it may."""
        if self.longest == inf or not self.live.known:
            return True
        return self.live.plain_steps(shape, 1 + shape.nodes + num_guesses) <= self.longest

    def rate_of_shape(self, shape: Shape) -> float:
        """Tokens per second that model drafts of this shape promise."""
        return self._rate_of(shape, self._outlook(shape))

    def _outlook(self, shape: Shape) -> Outlook:
        """Of drafts of this kind."""
        if not shape.nodes:
            return Outlook([], [], 0.0)
        survival = self._survival(shape)
        return Outlook(
            survival.rates(),
            survival.reach() if self._stops and not self.costs.at_once else [],
            survival.nodes(shape.nodes) if self._stops else shape.nodes,
        )

    def _survival(self, shape: Shape) -> Survival:
        """Trees, drafts that look back only so far, and places that tables know have survival rates of their own."""
        key = (self.known_place, shape.is_tree, shape.recent)
        if key not in self._survivals:
            self._survivals[key] = Survival(self._most, self._first_alphas[shape.is_tree])
        return self._survivals[key]

    def _rate_of(self, shape: Shape, outlook: Outlook) -> float:
        extra, more = self._beside.per_round if shape.nodes else (0.0, 0.0)
        draft_s, nodes = self._size(shape, outlook)
        draft_s += self._catching_up / REPAID if shape.nodes else 0.0
        return self._rate(self._gain(shape, outlook.survival) + extra, nodes + more, draft_s)

    def _size(self, shape: Shape, outlook: Outlook) -> tuple[float, float]:
        """Seconds and guesses of a model's draft of which that much is asked."""
        steps = sum(outlook.reach[: shape.depth]) if outlook.reach else shape.depth
        draft_s = self.live.draft(shape) * (steps / shape.depth if shape.depth else 1.0)
        return draft_s, outlook.nodes if shape.is_tree and self._stops else steps

    @property
    def _catching_up(self) -> float:
        """Seconds of reading what a model missed, but for the drift."""
        return self.missed * self.costs.read

    def _gain(self, shape: Shape, survival: list[float]) -> float:
        gain = sum(survival[: shape.depth])
        return gain * self._reach(shape.nodes) if shape.is_tree and not self._stops else gain

    def chances(self, shape: Shape) -> list[float]:
        """Of each node of a model's draft, best first: the estimated probability that it is accepted."""
        if self.weighing is not None and len(self.weighing.odds) == shape.nodes:
            return self.weighing.mean_odds()
        if shape.is_tree:
            return self._by_rank()[: shape.nodes]
        return self._survival(shape).rates()[: shape.depth]

    def _reach(self, num_nodes: int) -> float:
        """Share of the nodes accepted in a whole tree that are among the best `num_nodes`."""
        rates = self._by_rank()
        return sum(rates[:num_nodes]) / sum(rates)

    def _by_rank(self) -> list[float]:
        # Before there is evidence a tree's ranks are hit in proportion to 1, 1/2, 1/3 ...
        by_rank = zip(self._hits, self._verified, strict=True)
        return [(hits + 1 / rank) / (tries + 1) for rank, (hits, tries) in enumerate(by_rank, 1)]

    def worth(self, scores: Sequence[Sequence[float]], beside: Shape = PLAIN) -> tuple[int, float]:
        """How many of the best guesses of tables are worth verifying, and the tokens per second which that promises.

        `scores` are the probabilities of each awaited row, in descending order. The guesses may come on top of a
        model's draft.
        """
        longest = min(max(map(len, scores), default=0), self.most() - beside.nodes)
        honesty = (self._beside if beside.nodes else self._tables).honesty
        base, draft_s = 0.0, 0.0
        if beside.nodes:
            base, draft_s = self._promise(beside), self.live.draft(beside)
        while self.pinned is None and longest and not self._bearable(beside, longest):
            longest -= 1
        gains = [sum(column) / len(scores) for column in zip_longest(*scores, fillvalue=0.0)]
        self._worth = list(accumulate(gains[:longest], initial=0.0))
        rates = [self._rate(base + honesty * gain, beside.nodes + num, draft_s) for num, gain in enumerate(self._worth)]
        if self.pinned is not None:
            return longest, rates[longest]
        if beside.nodes:
            best = max(range(longest + 1), key=rates.__getitem__)
            return (best, rates[best]) if rates[best] > rates[0] else (0, rates[0])
        best = max(range(longest + 1), key=rates.__getitem__)
        promise = rates[best] / rates[0]
        if promise > MARGIN and not self.table_account.empty and not self.must_probe(promise):
            return best, rates[best]
        return 0, rates[0]

    def _promise(self, shape: Shape) -> float:
        """Tokens of a model's draft that has been made which are accepted, on average."""
        if shape.is_tree and self.weighing is None:
            return self._gain(shape, self._survival(shape).rates())
        return sum(self.chances(shape))

    def _rate(self, gain: float, num_nodes: float, draft_s: float = 0.0) -> float:
        """Tokens per second of a round that emits 1 + `gain` tokens out of `num_nodes` guesses."""
        if not self.live.known:  # nothing is known yet: a round is a round
            return 1 + gain
        return (1 + gain) / (draft_s + self.live.step(1 + num_nodes))

    def most(self) -> int:
        """Nodes of a draft at most, where the drafter decides with `worth`."""
        return self._most if self.pinned is None else self.pinned.nodes

    def asked(self) -> Asked:
        """Argument of `recall` before the round is recorded, where another one is chosen before that."""
        return Asked(self._asked, self._looked, self.known_place, self._worth, self.weighing)

    def recall(self, asked: Asked) -> None:
        """The coming record is of the round for which this was asked."""
        self._asked, self._looked, self.known_place, self._worth, self.weighing = asked

    def record(
        self, tree: DraftTree, paths: Sequence[Sequence[int]], draft_s: float, step_s: float, advance: float
    ) -> None:
        """A round is over: its draft, the verify rows (from 1) accepted in each awaited row, the times of draft and
        step, and by how many tokens the rows have moved on together (`request.advance`).
        """
        self._fade(FORGET)  # in plain rounds too: what is long ago says little
        shape, num_nodes = model_shape(tree), tree.tokens.shape[1]
        self._drafted |= shape.nodes > 0
        for path in paths if shape.nodes else ():
            accepted = sum(node <= shape.nodes for node in path)
            self._survival(shape).learn(accepted, shape.depth, self._asked.depth, shape.nodes)
            for rank in range(shape.nodes if shape.is_tree and self.weighing is None else 0):
                self._verified[rank] += 1
                self._hits[rank] += rank + 1 in path
        if self.weighing is not None and paths and len(self.weighing.odds) == shape.nodes:
            best_chains = self.weighing.learn([{node - 1 for node in path if node <= shape.nodes} for path in paths])
            for length, kept in best_chains if shape.is_tree else ():
                longest = Shape(self._most, self._most, shape.recent)
                self._survival(longest).learn(kept, length, self._asked.depth, length)
        guessed = num_nodes - shape.nodes
        if paths and num_nodes:
            held = (
                sum(node > shape.nodes for path in paths for node in path) / len(paths) if shape.nodes else advance - 1
            )
            promises = self._beside if shape.nodes else self._tables
            promises.learn(guessed, self._worth[min(guessed, len(self._worth) - 1)] if guessed else 0.0, held)
        if self._looked and not shape.nodes:
            self._num_looks = min(LOOKS, self._num_looks + 1)
            self.look_s += (draft_s - self.look_s) / self._num_looks
        if tree.kept:  # which says nothing of what guessing takes
            draft_s = self.live.draft(shape) * self.live.drift
        drafting_s = draft_s - tree.missed * self.costs.read * self.live.drift
        self.live.learn(shape, 1 + num_nodes, max(drafting_s, draft_s / 2), step_s)
        self._since_plain = self._since_plain + 1 if num_nodes else 0
        if paths and self.live.settled:
            plain, gain = self.live.step(1) * self.live.drift, 0.0
            if num_nodes:
                most = 2 * self.expected(tree) / self.live.step(1)  # a stall of the machine is no fault of the draft's
                gain = advance - min(most, (draft_s + step_s) / plain)
            elif self._looked:
                gain = -draft_s / plain
            self.account.book(gain if shape.nodes else 0.0)
            self.table_account.book(0.0 if shape.nodes else gain)
        self._looked, self._asked, self.weighing = False, PLAIN, None

    def _fade(self, share: float) -> None:
        self._tables.fade(share)
        if self._drafted:
            self._beside.fade(share)
            for survival in self._survivals.values():
                survival.fade(share)
            self._verified = [share * count for count in self._verified]
            self._hits = [share * count for count in self._hits]
