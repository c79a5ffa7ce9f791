"""How far to draft next: as far as it pays, by measured costs and running acceptance; 0 is a plain step.

A round that drafts a chain of K tokens emits 1 + s_1 + ... + s_K tokens on average, where s_k is the probability that
the first k are accepted, and takes `draft * K + step(1 + K)` seconds (`costs.py`). A tree of K levels and N nodes has
survival rates of its own, its levels take longer, and its step has 1 + N rows. The policy takes the shape of the best
ratio. Where that is no draft at all it tries one now and then.

Where it takes no time to ask (on a CPU), each guess of a chain decides whether another one pays, by how sure the model
is of them: `goes_on`. Then s_k is the probability that a chain gets so far and is accepted, and a round has as many
guesses as chains of this length usually come to.

What all this rests on are estimates, and so what drafting has really won or lost against plain steps is kept in an
account: tries are paid from it, and when it is empty nothing is drafted until plain rounds have filled it again. So
drafts cost a hundredth of the time at most, and a few steps, however wrong the estimates are. Model drafts and tables
have accounts of their own: what one of them loses is no reason to do without the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from math import inf

import numpy as np

from sharesd.decoding.confidence import Confidence
from sharesd.decoding.costs import Costs, LiveCosts
from sharesd.decoding.tree import PLAIN, DraftTree, Shape, model_shape

MARGIN = 1.04
"""A draft must promise this much more than a plain step: estimates are noisy, and plain steps are a sure thing."""
LEAD = 1.02
"""A model's draft must promise this many times what tables do."""
FIRST_ALPHAS = 0.8, 0.88
"""Acceptance of a chain's tokens, and of a tree's levels, assumed before there is evidence, of a model's drafts."""
HEAD_ALPHAS = 0.5, 0.65
"""The same of a trained head's. Who hopes for more drafts long at first, loses, and then dares not for a while."""
HOPED_ALPHA, HOPED_TREE_ALPHA = 0.95, 0.97
"""Acceptance that a draft may turn out to have: one that would lose even then is not tried."""
DOUBT = 3.0
"""Costs that were measured at start only may be wrong by this factor."""
WORTHWHILE = 4
"""Drafts that look back so far are thought of in contexts this many times as long."""
FORGET = 0.985
"""What remains of the evidence about acceptance after a round; about 67 rounds count."""
NEW_TEXT = 0.4
"""What remains of it when a new text begins: texts differ more than their parts do."""
POOLED = 8
"""Tries that the acceptance at all positions together is worth, in the estimate for each."""
PROMISES = 8
"""Tokens promised and accepted that are assumed before there is evidence about a table, or for what it usually is."""
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
ALLOWANCE, CREDIT, NEW_CREDIT, MOST_CREDIT, ENOUGH = 0.008, 2.0, (0.5, 6.0), 12.0, 0.5
"""Of the account, in plain steps: what a round adds; what it holds at first, at least and at most when a text begins,
and at most; what it must hold before there are drafts again."""


class Account:
    """What drafting has won against plain steps, in plain steps. It may lose its credit and what it won, no more."""

    def __init__(self) -> None:
        self.balance = CREDIT
        self.empty = False

    def begin(self) -> None:
        """A new text: what an old one won or lost says little about it."""
        self.balance = min(max(self.balance, NEW_CREDIT[0]), NEW_CREDIT[1])
        self.empty = False

    def book(self, gain: float) -> None:
        """A round: tokens emitted, less the plain steps that it took as long as."""
        self.balance = min(MOST_CREDIT, self.balance + ALLOWANCE + gain)
        self.empty = self.balance < (ENOUGH if self.empty else 0)

    def affords(self, loss: float) -> bool:
        """Whether a try may lose so many plain steps."""
        return not self.empty and self.balance >= min(loss, MOST_CREDIT)


class Survival:
    """Running estimates of how far drafts of one kind are accepted."""

    def __init__(self, most: int, alpha: float) -> None:
        self._tried, self._kept = [0.0] * most, [0.0] * most  # decayed counts: token k was looked at, was accepted
        self._pool = (4.0, 4.0 * alpha)  # tries and hits at any position, forgotten ten times as slowly
        self._asked, self._going = [0.0] * most, [0.0] * most  # token k might be guessed behind the others, and was
        self._go_pool = (4.0, 4.0 * alpha)

    def fade(self, share: float) -> None:
        """Let the evidence count less."""
        self._tried = [share * count for count in self._tried]
        self._kept = [share * count for count in self._kept]
        self._asked = [share * count for count in self._asked]
        self._going = [share * count for count in self._going]

    def learn(self, accepted: int, depth: int, asked: int = 0) -> None:
        """So many tokens of a draft of this depth were accepted. It might have been as deep as `asked`."""
        keep, asked = 1 - (1 - FORGET) / 10, max(asked, depth)
        for k in range(min(accepted + 1, asked)):
            self._tried[k] += 1
            self._kept[k] += accepted > k
            self._pool = (self._pool[0] * keep + 1, self._pool[1] * keep + (accepted > k))
        for k in range(1, min(depth + 1, asked)):
            self._asked[k] += 1
            self._going[k] += depth > k
            self._go_pool = (self._go_pool[0] * keep + 1, self._go_pool[1] * keep + (depth > k))

    def rates(self) -> list[float]:
        """For each position, the estimated probability that the draft is accepted up to and including it."""
        return _chained(self._tried, self._kept, self._pool)

    def reach(self) -> list[float]:
        """For each position, the estimated probability that it is guessed."""
        return [1.0, *_chained(self._asked[1:], self._going[1:], self._go_pool)]


def _chained(tried: Sequence[float], kept: Sequence[float], pool: tuple[float, float]) -> list[float]:
    """Products of the shares that were kept at each position, and at those before."""
    usual = pool[1] / pool[0]
    each = [(hits + POOLED * usual) / (tries + POOLED) for hits, tries in zip(kept, tried, strict=True)]
    return list(accumulate(each, lambda a, b: a * b))


class Promises:
    """What came of the guesses of tables, in rounds of one kind.

    Choosing the best of many estimates favours those that err upwards: what guesses promise is corrected by this.
    """

    def __init__(self) -> None:
        self._rounds, self._nodes, self._promised, self._held = 0.0, 0.0, 0.0, 0.0  # decayed
        self._pool = (0.0, 0.0)  # promised and held, forgotten ten times as slowly

    def fade(self, share: float) -> None:
        """Let the evidence count less."""
        self._rounds, self._nodes = share * self._rounds, share * self._nodes
        self._promised, self._held = share * self._promised, share * self._held

    def learn(self, nodes: int, promised: float, held: float) -> None:
        """A round: guesses verified, tokens that they promised, tokens accepted."""
        self._rounds += 1
        self._nodes += nodes
        self._promised += promised
        self._held += held
        keep = 1 - (1 - FORGET) / 10
        self._pool = (keep * self._pool[0] + promised, keep * self._pool[1] + held)

    @property
    def honesty(self) -> float:
        """Tokens accepted for each token promised."""
        usual = (self._pool[1] + PROMISES) / (self._pool[0] + PROMISES)
        return (self._held + PROMISES * usual) / (self._promised + PROMISES)

    @property
    def per_round(self) -> tuple[float, float]:
        """Tokens accepted and guesses verified in a round; none before there is evidence."""
        rounds = self._rounds + 1
        return self._held / rounds, self._nodes / rounds


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
        see FIRST_ALPHAS. `stops`: chains ask `goes_on`.
        """
        self._first_alphas, self._stops = first_alphas, stops
        self._probes = probes
        self.shapes, self.pinned, self.chooses = tuple(shapes), pinned, pinned is None
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
        self._look_gain, self._look_s, self._num_looks = 1.0, 0.0, 0  # running means: share gained, seconds taken
        self._rest, self._until_look = PAUSE[0], 0  # rounds from look to look; until the next
        self._looked = False  # in this round
        self._drafted = False  # by a model: else there is no evidence that could fade
        self._confidence = Confidence()
        self._asked = PLAIN  # of a chain that may end early
        self._aim = 0.0  # tokens per second that such a chain shall not fall behind
        self._said: list[list[float]] = []  # of each awaited row: what the model says of its guesses
        self._odds: list[list[float]] = []  # for each guess, those that rows are accepted so far

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
            return PLAIN if self.must_probe(rate / plain) else self._ask(best, rate)
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

    def _ask(self, shape: Shape, rate: float) -> Shape:
        """A model is asked for this draft; a chain may end where it falls behind so many tokens per second."""
        if self._stops and not shape.is_tree:
            self._asked, self._aim = shape, rate
            self._said, self._odds = [[] for _ in self.awaited], []
        return shape

    @property
    def weighs(self) -> bool:
        """Whether the draft that was asked for tells `guessed` about each guess, and asks `goes_on`."""
        return self._asked.nodes > 0

    def guessed(self, said: Sequence[float]) -> None:
        """The probabilities that a model gave to the next guess of its chain, of each awaited row."""
        before = self._odds[-1] if self._odds else [1.0] * len(said)
        self._odds.append([odds * self._confidence.chance(each) for odds, each in zip(before, said, strict=True)])
        for row, each in zip(self._said, said, strict=True):
            row.append(each)

    def goes_on(self) -> bool:
        """Whether another guess promises more tokens in the time that it takes than rounds do on the whole."""
        num, asked = len(self._odds), self._asked
        longer, now = (Shape(depth, depth, asked.recent) for depth in (num + 1, num))
        took = self.live.draft(longer) - self.live.draft(now) + self.live.step(2 + num) - self.live.step(1 + num)
        return sum(self._odds[-1]) / len(self._odds[-1]) * self._confidence.usual > self._aim * took

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
        catching_up = self._catching_up if shape.nodes else 0.0
        return catching_up + self.live.draft(shape) + self.live.step(1 + tree.tokens.shape[1])

    def must_probe(self, promise: float) -> bool:
        """Whether a plain step is due, to learn what it takes; `promise`: of the draft, over a plain step."""
        if not self._probes:
            return False
        due = EARLY_PROBE if self.live.doubtful else PROBE if promise < THIN else LATE_PROBE
        return self._since_plain >= due

    def affords(self, shape: Shape) -> bool:
        """Whether a try of this shape, which does not seem to pay, can be afforded, and might turn out to pay."""
        plain, (draft_s, nodes) = self.live.step(1), self._size(shape, self._rates(shape)[1])
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

    def _look_cost(self) -> float:
        """Share of a plain step that a look takes."""
        return self._look_s / (self.live.step(1) * self.live.drift) if self.live.known else 0.0

    def best_shape(self) -> Shape:
        """The draft that promises most tokens per second, be it more than a plain step or not."""
        rates: dict[tuple[bool, int], tuple[list[float], list[float]]] = {}
        best, best_rate = PLAIN, 0.0
        for shape in self.shapes:
            if shape.recent and not self._windows_only and self.live.context < WORTHWHILE * shape.recent:
                continue
            if not self._bearable(shape):
                continue
            kind = shape.is_tree, shape.recent
            if kind not in rates:
                rates[kind] = self._rates(shape)
            rate = self._rate_of(shape, *rates[kind])
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
        return self._rate_of(shape, *self._rates(shape))

    def _rates(self, shape: Shape) -> tuple[list[float], list[float]]:
        """For each position of drafts of this kind: the probability that it is accepted, and that it is guessed. The
        latter is empty where all are.
        """
        if not shape.nodes:
            return [], []
        survival = self._survival(shape)
        ends_early = self._stops and not shape.is_tree and not self.costs.at_once
        return survival.rates(), survival.reach() if ends_early else []

    def _survival(self, shape: Shape) -> Survival:
        """Trees, drafts that look back only so far, and places that tables know have survival rates of their own."""
        key = (self.known_place, shape.is_tree, shape.recent)
        if key not in self._survivals:
            self._survivals[key] = Survival(self._most, self._first_alphas[shape.is_tree])
        return self._survivals[key]

    def _rate_of(self, shape: Shape, survival: list[float], reach: list[float]) -> float:
        extra, more = self._beside.per_round if shape.nodes else (0.0, 0.0)
        draft_s, nodes = self._size(shape, reach)
        draft_s += self._catching_up / REPAID if shape.nodes else 0.0
        return self._rate(self._gain(shape, survival) + extra, nodes + more, draft_s)

    def _size(self, shape: Shape, reach: list[float]) -> tuple[float, float]:
        """Seconds and guesses of a model's draft of which that much is asked; `reach` as `_rates` has it."""
        guesses = sum(reach[: shape.depth]) if reach else shape.nodes
        return self.live.draft(shape) * (guesses / shape.depth if reach else 1.0), guesses

    @property
    def _catching_up(self) -> float:
        """Seconds of reading what a model missed, but for the drift."""
        return self.missed * self.costs.read

    def _gain(self, shape: Shape, survival: list[float]) -> float:
        gain = sum(survival[: shape.depth])
        return gain * self._reach(shape.nodes) if shape.is_tree else gain

    def chances(self, shape: Shape) -> list[float]:
        """Of each node of a model's draft, best first: the estimated probability that it is accepted."""
        if shape.is_tree:
            return self._by_rank()[: shape.nodes]
        if len(self._odds) == shape.depth:
            return [sum(odds) / len(odds) for odds in self._odds]
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
            survival = self._survival(beside).rates() if beside.is_tree else self.chances(beside)
            base, draft_s = self._gain(beside, survival), self.live.draft(beside)
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

    def _rate(self, gain: float, num_nodes: float, draft_s: float = 0.0) -> float:
        """Tokens per second of a round that emits 1 + `gain` tokens out of `num_nodes` guesses."""
        if not self.live.known:  # nothing is known yet: a round is a round
            return 1 + gain
        return (1 + gain) / (draft_s + self.live.step(1 + num_nodes))

    def most(self) -> int:
        """Nodes of a draft at most, where the drafter decides with `worth`."""
        return self._most if self.pinned is None else self.pinned.nodes

    def record(
        self, tree: DraftTree, paths: Sequence[Sequence[int]], draft_s: float, step_s: float, advance: float
    ) -> None:
        """A round is over: its draft, the verify rows (from 1) accepted in each awaited row, the times of draft and
        step, and by how many tokens the rows have moved on together (`request.advance`).
        """
        self._fade(FORGET)  # in plain rounds too: what is long ago says little
        shape, num_nodes = model_shape(tree), tree.tokens.shape[1]
        self._drafted |= shape.nodes > 0
        for row, path in enumerate(paths if shape.nodes else ()):
            accepted = sum(node <= shape.nodes for node in path)
            self._survival(shape).learn(accepted, shape.depth, self._asked.depth)
            if len(self._odds) == shape.depth and len(paths) == len(self._said):
                self._confidence.learn(self._said[row], accepted)
            for rank in range(shape.nodes if shape.is_tree else 0):
                self._verified[rank] += 1
                self._hits[rank] += rank + 1 in path
        guessed = num_nodes - shape.nodes
        if paths and num_nodes:
            held = (
                sum(node > shape.nodes for path in paths for node in path) / len(paths) if shape.nodes else advance - 1
            )
            promises = self._beside if shape.nodes else self._tables
            promises.learn(guessed, self._worth[min(guessed, len(self._worth) - 1)] if guessed else 0.0, held)
        if self._looked and not shape.nodes:
            self._num_looks = min(LOOKS, self._num_looks + 1)
            self._look_s += (draft_s - self._look_s) / self._num_looks
        drafting_s = draft_s - self._catching_up * self.live.drift if shape.nodes else draft_s
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
        self._looked, self._asked, self._odds, self._said = False, PLAIN, [], []

    def _fade(self, share: float) -> None:
        self._tables.fade(share)
        if self._drafted:
            self._beside.fade(share)
            for survival in self._survivals.values():
                survival.fade(share)
            self._verified = [share * count for count in self._verified]
            self._hits = [share * count for count in self._hits]
