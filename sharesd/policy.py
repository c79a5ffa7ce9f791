"""How far to draft next: as far as it pays, by measured costs and running acceptance; 0 is a plain step.

A round that drafts a chain of K tokens emits 1 + s_1 + ... + s_K tokens on average, where s_k is the probability that
the first k are accepted, and takes `draft * K + step(1 + K)` seconds. A tree of K levels and N nodes has survival rates
of its own, its levels take longer, and its step has 1 + N rows. The policy takes the shape of the best ratio. Where
that is no draft at all it tries one now and then, at intervals that double while drafting keeps losing, so that a loss
costs next to nothing.

Times are compared with each other, never over time: what slows the machine down slows all entries of the table alike,
so a common factor follows it quickly and single entries slowly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest

from sharesd.tree import PLAIN, DraftTree, Shape, model_shape

MARGIN = 1.04
"""A draft must promise this much more than a plain step: estimates are noisy, and plain steps are a sure thing."""
FIRST_ALPHA, FIRST_TREE_ALPHA = 0.8, 0.88
"""Acceptance of a chain's tokens, and of a tree's levels, assumed before there is evidence."""
FORGET = 0.985
"""What remains of the evidence about acceptance after a round; about 67 rounds count."""
NEW_TEXT = 0.4
"""What remains of it when a new text begins: texts differ more than their parts do."""
POOLED = 8
"""Tries that the acceptance at all positions together is worth, in the estimate for each."""
PROMISES = 8
"""Tokens promised and accepted that are assumed before there is evidence about a table."""
SETTLING, KNOWN = 5, 8
"""Rounds before single costs are corrected; corrections of a cost before the machine's pace is told from it."""
FIRST_TRY, LAST_TRY = 16, 256
"""Plain rounds between tries of a draft."""
TRY_ROUNDS = 3
"""Rounds of a try."""
RECHECK = 4
"""Plain rounds after which it is looked whether a draft pays."""
PAUSE, LOOKS = 8, 16
"""Rounds from one look into the tables to the next, where looking takes longer than it gains; looks that tell."""


@dataclass(slots=True)
class Costs:
    """Seconds that rounds take, for one machine, model and way of sampling."""

    step: dict[int, float] = field(default_factory=dict)
    """A step of the target over this many rows per sequence, choosing tokens included; linear between entries."""
    draft: float = 0.0
    """One draft step; 0 where drafts come from tables."""
    level: float = 0.0
    """One level of a draft tree."""

    def of_step(self, width: float) -> float:
        """Seconds of a step of this many rows. Asserts that at least one width has been measured."""
        entries = self.shares(width)
        if len(entries) == 2:
            (low, left), (high, right) = entries
            return left * self.step[low] + right * self.step[high]
        [(entry, _)] = entries
        if width <= entry or len(self.step) == 1:
            return self.step[entry]
        before = sorted(self.step)[-2]
        slope = max(0.0, self.step[entry] - self.step[before]) / (entry - before)
        return self.step[entry] + slope * (width - entry)

    def shares(self, width: float) -> list[tuple[int, float]]:
        """The entries, one or two, between which a step of this many rows lies, and the share of each in its cost."""
        known = sorted(self.step)
        assert known, "no step has been measured"
        at = bisect_left(known, width)
        if at == 0 or at == len(known) or known[at] == width:
            return [(known[min(at, len(known) - 1)], 1.0)]
        low, high = known[at - 1], known[at]
        share = (width - low) / (high - low)
        return [(low, 1 - share), (high, share)]


class Survival:
    """Running estimates of how far drafts of one kind are accepted."""

    def __init__(self, most: int, alpha: float) -> None:
        self._tried, self._kept = [0.0] * most, [0.0] * most  # decayed counts: token k was looked at, was accepted
        self._pool = (4.0, 4.0 * alpha)  # tries and hits at any position, forgotten ten times as slowly

    def fade(self, share: float) -> None:
        """Let the evidence count less."""
        self._tried = [share * count for count in self._tried]
        self._kept = [share * count for count in self._kept]

    def learn(self, accepted: int, depth: int) -> None:
        """So many tokens of a draft of this depth were accepted."""
        keep = 1 - (1 - FORGET) / 10
        for k in range(min(accepted + 1, depth)):
            self._tried[k] += 1
            self._kept[k] += accepted > k
            self._pool = (self._pool[0] * keep + 1, self._pool[1] * keep + (accepted > k))

    def rates(self) -> list[float]:
        """For each position, the estimated probability that the draft is accepted up to and including it."""
        tries, hits = self._pool
        alpha = hits / tries
        each = [(kept + POOLED * alpha) / (tried + POOLED) for kept, tried in zip(self._kept, self._tried, strict=True)]
        return list(accumulate(each, lambda a, b: a * b))


class Promises:
    """What came of the guesses of tables, in rounds of one kind.

    Choosing the best of many estimates favours those that err upwards: what guesses promise is corrected by this.
    """

    def __init__(self) -> None:
        self._rounds, self._nodes, self._promised, self._held = 0.0, 0.0, 0.0, 0.0  # decayed

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

    @property
    def honesty(self) -> float:
        """Tokens accepted for each token promised."""
        return (self._held + PROMISES) / (self._promised + PROMISES)

    @property
    def per_round(self) -> tuple[float, float]:
        """Tokens accepted and guesses verified in a round; none before there is evidence."""
        rounds = self._rounds + 1
        return self._held / rounds, self._nodes / rounds


class Policy:
    """Chooses the shape of drafts for one engine and one way of sampling."""

    def __init__(self, shapes: Sequence[Shape], *, pinned: Shape | None = None, costs: Costs | None = None) -> None:
        """Choose among `shapes` and no draft; or always take `pinned` (PLAIN = plain decoding)."""
        self.shapes, self.pinned, self.chooses = tuple(shapes), pinned, pinned is None
        self.costs = costs or Costs()
        self._drift = 1.0  # how much slower the machine is than the table says
        self._timed: Counter[object] = Counter()  # rounds, and how often entries of the table have been corrected
        self._most = max((shape.nodes for shape in shapes), default=0)
        self._chains = Survival(self._most, FIRST_ALPHA)
        self._trees = Survival(self._most, FIRST_TREE_ALPHA)
        self._verified, self._hits = [0.0] * self._most, [0.0] * self._most  # of trees: decayed, by a node's rank
        self._worth = [0.0]  # tokens that tables promised last, by the number of nodes
        self._tables, self._beside = Promises(), Promises()  # tables alone, beside a model's draft
        self._plain_rounds, self._patience = 0, FIRST_TRY
        self._look_gain, self._look_s = 1.0, 0.0  # running means: share of a plain step gained, seconds taken
        self._paused = 0  # rounds since tables were asked
        self._drafted = False  # by a model: else there is no evidence that could fade

    def use(self, costs: Costs) -> None:
        """Take these costs, and forget what was learnt while they were measured."""
        self.__init__(self.shapes, pinned=self.pinned, costs=costs)  # type: ignore[misc]

    def begin(self) -> None:
        """A new text: what was learnt from the last one counts less."""
        self._fade(NEW_TEXT)
        self._look_gain = max(self._look_gain, 2 * self._look_cost())

    def next_shape(self, may_try: bool = True) -> Shape:
        """What to draft in the coming round. Without `may_try` only what is known to pay is drafted."""
        if self.pinned is not None:
            return self.pinned
        if not self.costs.step:
            return PLAIN
        if self._plain_rounds < self._patience and self._plain_rounds % RECHECK:  # to look anew takes 1 % of a step
            self._plain_rounds += 1
            return PLAIN
        best = self.best_shape()
        if self.rate_of_shape(best) > MARGIN * self.rate_of_shape(PLAIN):
            self._plain_rounds, self._patience = 0, FIRST_TRY
            return best
        self._plain_rounds += 1
        if self._plain_rounds <= self._patience or not may_try:
            return PLAIN
        if self._plain_rounds >= self._patience + TRY_ROUNDS:
            self._plain_rounds, self._patience = 0, min(LAST_TRY, 2 * self._patience)
        return best

    def looks(self) -> bool:
        """Whether to ask tables in the coming round: always, unless that takes longer than it gains."""
        self._paused = 0 if self._look_gain >= self._look_cost() or self._paused >= PAUSE - 1 else self._paused + 1
        return self.pinned is not None or self._paused == 0

    def looked(self, rate: float) -> None:
        """Tables were asked, and the draft that was chosen promises so many tokens per second."""
        self._look_gain += (max(0.0, rate / self.rate_of_shape(PLAIN) - 1) - self._look_gain) / LOOKS

    def _look_cost(self) -> float:
        """Share of a plain step that a look takes."""
        return self._look_s / (self.costs.of_step(1) * self._drift) if self.costs.step else 0.0

    def best_shape(self) -> Shape:
        """The draft that promises most tokens per second, be it more than a plain step or not."""
        chain_rates, tree_rates = self._chains.rates(), self._trees.rates()
        return max(self.shapes, key=lambda shape: self._rate_of(shape, tree_rates if shape.is_tree else chain_rates))

    def rate_of_shape(self, shape: Shape) -> float:
        """Tokens per second that model drafts of this shape promise."""
        return self._rate_of(shape, (self._trees if shape.is_tree else self._chains).rates())

    def _rate_of(self, shape: Shape, survival: list[float]) -> float:
        extra, nodes = self._beside.per_round if shape.nodes else (0.0, 0.0)
        return self._rate(self._gain(shape, survival) + extra, shape.nodes + nodes, self._draft_s(shape))

    def _gain(self, shape: Shape, survival: list[float]) -> float:
        gain = sum(survival[: shape.depth])
        return gain * self._reach(shape.nodes) if shape.is_tree else gain

    def _draft_s(self, shape: Shape) -> float:
        return (self.costs.level if shape.is_tree else self.costs.draft) * shape.depth

    def chances(self, shape: Shape) -> list[float]:
        """Of each node of a model's draft, best first: the estimated probability that it is accepted."""
        if shape.is_tree:
            return self._by_rank()[: shape.nodes]
        return self._chains.rates()[: shape.depth]

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

        `scores` are each row's probabilities, in descending order. The guesses may come on top of a model's draft.
        """
        longest = min(max(map(len, scores), default=0), self.most() - beside.nodes)
        honesty = (self._beside if beside.nodes else self._tables).honesty
        gains = [sum(column) / len(scores) for column in zip_longest(*scores, fillvalue=0.0)]
        self._worth = list(accumulate(gains[:longest], initial=0.0))
        base, draft_s = 0.0, 0.0
        if beside.nodes:
            survival = (self._trees if beside.is_tree else self._chains).rates()
            base, draft_s = self._gain(beside, survival), self._draft_s(beside)
        rates = [self._rate(base + honesty * gain, beside.nodes + num, draft_s) for num, gain in enumerate(self._worth)]
        if self.pinned is not None:
            return longest, rates[longest]
        best = max(range(longest + 1), key=rates.__getitem__)
        margin = 1.0 if beside.nodes else MARGIN
        return (best, rates[best]) if rates[best] > margin * rates[0] else (0, rates[0])

    def _rate(self, gain: float, num_nodes: float, draft_s: float = 0.0) -> float:
        """Tokens per second of a round that emits 1 + `gain` tokens out of `num_nodes` guesses."""
        if not self.costs.step:  # nothing is known yet: a round is a round
            return 1 + gain
        return (1 + gain) / (draft_s + self.costs.of_step(1 + num_nodes))

    def most(self) -> int:
        """Nodes of a draft at most, where the drafter decides with `worth`."""
        return self._most if self.pinned is None else self.pinned.nodes

    def record(self, tree: DraftTree, paths: Sequence[Sequence[int]], draft_s: float, step_s: float) -> None:
        """A round is over: its draft, the verify rows (from 1) accepted in each row, the times of draft and step."""
        self._fade(FORGET)  # in plain rounds too: what is long ago says little
        shape = model_shape(tree)
        self._drafted |= shape.nodes > 0
        for path in paths if shape.nodes else ():
            survival = self._trees if shape.is_tree else self._chains
            survival.learn(sum(node <= shape.nodes for node in path), shape.depth)
            for rank in range(shape.nodes if shape.is_tree else 0):
                self._verified[rank] += 1
                self._hits[rank] += rank + 1 in path
        guessed = tree.tokens.shape[1] - shape.nodes
        if paths and (shape.nodes or guessed):
            held = sum(node > shape.nodes for path in paths for node in path) / len(paths)
            promises = self._beside if shape.nodes else self._tables
            promises.learn(guessed, self._worth[min(guessed, len(self._worth) - 1)] if guessed else 0.0, held)
        if self._paused == 0 and not tree.num_steps:
            self._look_s += (draft_s - self._look_s) / LOOKS
        self._record_times(tree, draft_s, step_s)

    def _fade(self, share: float) -> None:
        self._tables.fade(share)
        if self._drafted:
            self._beside.fade(share)
            self._chains.fade(share)
            self._trees.fade(share)
            self._verified = [share * count for count in self._verified]
            self._hits = [share * count for count in self._hits]

    def _record_times(self, tree: DraftTree, draft_s: float, step_s: float) -> None:
        costs, steps, width = self.costs, tree.num_steps, 1 + tree.tokens.shape[1]
        kind = "level" if model_shape(tree).is_tree else "draft"
        if width > max(costs.step, default=0):
            costs.step[width] = step_s / self._drift
        if steps and not getattr(costs, kind):
            setattr(costs, kind, draft_s / steps / self._drift)
        each = getattr(costs, kind)
        entries, step = costs.shares(width), costs.of_step(width)
        measured = step_s + (draft_s if steps else 0.0)
        settling = self._timed["rounds"] < SETTLING  # entries would learn what the common factor has not yet
        known = all(self._timed[entry] >= KNOWN for entry, _ in entries)
        if settling or width == 1 or known:
            self._drift *= 1 + self._trust("rounds", 0.2) * (
                _clip(measured / ((each * steps + step) * self._drift)) - 1
            )
        if settling:
            return
        error = _clip(step_s / (step * self._drift)) - 1
        for entry, share in entries:
            costs.step[entry] *= 1 + share * self._trust(entry, 0.05) * error
        if steps:
            ratio = _clip(draft_s / (each * steps * self._drift))
            setattr(costs, kind, each * (1 + self._trust(kind, 0.05) * (ratio - 1)))

    def _trust(self, entry: object, least: float) -> float:
        """How far a round corrects an entry: by a running mean at first, which the table opens with one vote."""
        self._timed[entry] += 1
        return max(least, 1 / (1 + self._timed[entry]))


def _clip(ratio: float) -> float:
    """One slow round says little; a quick one shows what is possible."""
    return min(2.0, max(0.1, ratio))
