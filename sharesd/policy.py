"""How far to draft next: as far as it pays, by measured costs and running acceptance; 0 is a plain step.

A round that drafts K tokens emits 1 + s_1 + ... + s_K tokens on average, where s_k is the probability that the first k
are accepted, and takes `draft * K + step(1 + K)` seconds. The policy takes the K of the best ratio. Where that is 0 it
tries a draft now and then, at intervals that double while drafting keeps losing, so that a loss costs next to nothing.

Times are compared with each other, never over time: what slows the machine down slows all entries of the table alike,
so a common factor follows it quickly and single entries slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from sharesd.tree import DraftTree

MARGIN = 1.04
"""A draft must promise this much more than a plain step: estimates are noisy, and plain steps are a sure thing."""
FIRST_ALPHA = 0.8
"""Acceptance assumed before there is evidence."""
FORGET = 0.985
"""What remains of the evidence about acceptance after a round; about 67 rounds count."""
NEW_TEXT = 0.4
"""What remains of it when a new text begins: texts differ more than their parts do."""
POOLED = 8
"""Tries that the acceptance at all positions together is worth, in the estimate for each."""
FIRST_TRY, LAST_TRY = 16, 256
"""Plain rounds between tries of a draft."""
TRY_ROUNDS = 3
"""Rounds of a try."""


@dataclass(slots=True)
class Costs:
    """Seconds that rounds take, for one machine, model and way of sampling."""

    step: dict[int, float] = field(default_factory=dict)
    """A step of the target over this many rows per sequence, choosing tokens included; linear between entries."""
    draft: float = 0.0
    """One draft step; 0 where drafts come from tables."""

    def of_step(self, width: int) -> float:
        """Seconds of a step of this many rows. Asserts that at least one width has been measured."""
        known = sorted(self.step)
        assert known, "no step has been measured"
        if width in self.step:
            return self.step[width]
        low = max((w for w in known if w < width), default=None)
        high = min((w for w in known if w > width), default=None)
        if low is not None and high is not None:
            share = (width - low) / (high - low)
            return self.step[low] + share * (self.step[high] - self.step[low])
        if low is None:
            return self.step[known[0]]
        if len(known) == 1:
            return self.step[low]
        before = known[-2]
        slope = max(0.0, self.step[low] - self.step[before]) / (low - before)
        return self.step[low] + slope * (width - low)


class Policy:
    """Chooses the length of drafts for one engine and one way of sampling."""

    def __init__(self, *, max_draft: int, fixed: int | None, costs: Costs | None = None) -> None:
        """`max_draft` tokens per round at most; `fixed` = always that many (0 = plain decoding)."""
        self.max_draft, self.pinned, self.chooses = max_draft, fixed, fixed is None
        self.costs = costs or Costs()
        self._drift = 1.0  # how much slower the machine is than the table says
        self._tried = [0.0] * max_draft  # decayed counts: draft token k was looked at, was accepted
        self._kept = [0.0] * max_draft
        self._pool = (4.0, 4.0 * FIRST_ALPHA)  # tries and hits at any position, forgotten ten times as slowly
        self._plain_rounds, self._patience = 0, FIRST_TRY

    def use(self, costs: Costs) -> None:
        """Take these costs, and forget what was learnt while they were measured."""
        self.__init__(max_draft=self.max_draft, fixed=self.pinned, costs=costs)  # type: ignore[misc]

    def begin(self) -> None:
        """A new text: what was learnt from the last one counts less."""
        self._fade(NEW_TEXT)

    def next_length(self, may_try: bool = True) -> int:
        """Tokens to draft in the coming round. Without `may_try` only what is known to pay is drafted."""
        if self.pinned is not None:
            return self.pinned
        if not self.costs.step:
            return 0
        best = self.best_length()
        if best:
            self._plain_rounds, self._patience = 0, FIRST_TRY
            return best
        self._plain_rounds += 1
        if self._plain_rounds <= self._patience or not may_try:
            return 0
        if self._plain_rounds >= self._patience + TRY_ROUNDS:
            self._plain_rounds, self._patience = 0, min(LAST_TRY, 2 * self._patience)
        return self.best_length(at_least=1)

    def best_length(self, at_least: int = 0) -> int:
        """The length, from `at_least` on, that promises most tokens per second."""
        rates = {num: self.rate_of_length(num) for num in range(self.max_draft + 1)}
        best = max(range(max(1, at_least), self.max_draft + 1), key=rates.__getitem__)
        return best if at_least or rates[best] > MARGIN * rates[0] else 0

    def survival(self) -> list[float]:
        """For each position, the estimated probability that the draft is accepted up to and including it."""
        tries, hits = self._pool
        alpha = hits / tries
        each = [(kept + POOLED * alpha) / (tried + POOLED) for kept, tried in zip(self._kept, self._tried, strict=True)]
        return list(accumulate(each, lambda a, b: a * b))

    def rate_of_length(self, num: int) -> float:
        """Tokens per second that drafts of this length promise, of a model drafter."""
        return self._rate(sum(self.survival()[:num]), num, num)

    def worth(self, scores: Sequence[Sequence[float]]) -> tuple[int, float]:
        """How many of the best guesses of a table are worth verifying, and the tokens per second which they promise.

        `scores` are each row's probabilities, in descending order.
        """
        longest = min(max(map(len, scores), default=0), self.most())
        gains = [sum(row[num] for row in scores if len(row) > num) / len(scores) for num in range(longest)]
        if self.pinned is not None:
            return longest, self._rate(sum(gains), longest)
        plain = self._rate(0.0, 0)
        best, best_rate = 0, plain
        for num, gain in enumerate(accumulate(gains), 1):
            rate = self._rate(gain, num)
            if rate > max(best_rate, MARGIN * plain):
                best, best_rate = num, rate
        return best, best_rate

    def _rate(self, gain: float, num_nodes: int, num_draft_steps: int = 0) -> float:
        """Tokens per second of a round that emits 1 + `gain` tokens out of `num_nodes` guesses."""
        if not self.costs.step:  # nothing is known yet: a round is a round
            return 1 + gain
        return (1 + gain) / (self.costs.draft * num_draft_steps + self.costs.of_step(1 + num_nodes))

    def most(self) -> int:
        """Nodes of a draft at most, where the drafter decides with `worth`."""
        return self.max_draft if self.pinned is None else self.pinned

    def record(self, tree: DraftTree, accepted: Sequence[int], draft_s: float, step_s: float) -> None:
        """A round is over: its draft, the number of tokens accepted in each row, and the times of draft and step."""
        num_draft_steps = tree.num_steps
        self._fade(FORGET)  # in plain rounds too: what is long ago says little
        for row in accepted if num_draft_steps else ():
            for k in range(min(row + 1, num_draft_steps)):
                self._tried[k] += 1
                self._kept[k] += row > k
                keep = 1 - (1 - FORGET) / 10
                self._pool = (self._pool[0] * keep + 1, self._pool[1] * keep + (row > k))
        self._record_times(1 + tree.tokens.shape[1], num_draft_steps, draft_s, step_s)

    def _fade(self, share: float) -> None:
        self._tried = [share * count for count in self._tried]
        self._kept = [share * count for count in self._kept]

    def _record_times(self, width: int, num_draft_steps: int, draft_s: float, step_s: float) -> None:
        costs = self.costs
        if width not in costs.step:
            costs.step[width] = step_s / self._drift
        if num_draft_steps and not costs.draft:
            costs.draft = draft_s / num_draft_steps / self._drift
        expected = costs.draft * num_draft_steps + costs.step[width]
        measured = step_s + (draft_s if num_draft_steps else 0.0)
        self._drift *= 1 + 0.2 * (_clip(measured / (expected * self._drift)) - 1)
        costs.step[width] *= 1 + 0.05 * (_clip(step_s / (costs.step[width] * self._drift)) - 1)
        if num_draft_steps:
            costs.draft *= 1 + 0.05 * (_clip(draft_s / (costs.draft * num_draft_steps * self._drift)) - 1)


def _clip(ratio: float) -> float:
    """One slow round says little."""
    return min(2.0, max(0.5, ratio))
