"""What came of drafts: how far they were accepted, what tables promised, what all of it has won or lost.

Evidence is decayed: what is long ago says little.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

FORGET = 0.985
"""What remains of the evidence about acceptance after a round; about 67 rounds count."""
POOLED = 8
"""Tries that the acceptance at all positions together is worth, in the estimate for each."""
PROMISES = 8
"""Tokens promised and accepted that are assumed before there is evidence about a table, or for what it usually is."""
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
        self._drafts, self._nodes = 0.0, 0.0  # decayed

    def fade(self, share: float) -> None:
        """Let the evidence count less."""
        self._tried = [share * count for count in self._tried]
        self._kept = [share * count for count in self._kept]
        self._asked = [share * count for count in self._asked]
        self._going = [share * count for count in self._going]
        self._drafts, self._nodes = share * self._drafts, share * self._nodes

    def learn(self, accepted: int, depth: int, asked: int = 0, nodes: int = 0) -> None:
        """So many tokens of a draft of this depth, and of so many nodes, were accepted. It might have been as deep as
        `asked`.
        """
        self._drafts, self._nodes = self._drafts + 1, self._nodes + nodes
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

    def nodes(self, first: float) -> float:
        """Nodes of a draft, on average; `first`: what is assumed before there is evidence."""
        return (self._nodes + first) / (self._drafts + 1)


def _chained(tried: Sequence[float], kept: Sequence[float], pool: tuple[float, float]) -> list[float]:
    """Products of the shares that were kept at each position, and at those before."""
    usual = pool[1] / pool[0]
    each = [(hits + POOLED * usual) / (tries + POOLED) for hits, tries in zip(kept, tried, strict=True)]
    return list(accumulate(each, lambda a, b: a * b))


class Outlook(NamedTuple):
    """What is known of drafts of one kind."""

    survival: list[float]
    """For each position: the probability that it is accepted."""
    reach: list[float]
    """The same of being guessed; empty where all are."""
    nodes: float
    """Of a draft that ends early, on average."""


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
