"""Trees of continuations of the longest repeated suffix of the text.

An online suffix automaton (Blumer et al. 1985) indexes the text, in addition to a corpus as in REST (He et al.
2023, arXiv 2311.08252). Probabilities are blended over ever shorter suffixes as in PPM (Cleary and Witten 1984; Witten
and Bell 1991).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from sharesd.drafters.base import BuildInputs
from sharesd.drafters.selection import file_of
from sharesd.drafters.suffix.datastore import CONTEXT, Datastore, open_datastore
from sharesd.drafters.tables.base import HitRates, Table, grow, outcomes
from sharesd.drafters.tables.proposal import Proposal, empty_proposal

ORDERS = 3
"""Suffixes of different lengths (states) that are blended for one node."""
SIBLINGS = 8
"""Maximum children per state: those that were used last."""
ESCAPE = 1.5
"""Occurrences that each distinct continuation adds for unseen ones (Witten-Bell: 1)."""
COUNTED = 32
"""States whose counts are brought up to date per token."""
BUCKETS = 12
"""Match-length ranges with own calibration: 1 to 8, then powers of two."""
SETTLED = 0.21
"""Remaining probability below which shorter suffixes are skipped."""


class SuffixAutomaton:
    """Substrings of a text, one state per set of end places.

    Grows by a token in amortised O(1). State 0 is the empty string. The longest suffix of the text that occurred before
    is `link[last]`: a suffix is outside the state of the whole text exactly when it also ends elsewhere.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        """Token -> state, least recently used first."""
        self.link = [-1]
        """State of the longest suffix that ends at more places."""
        self.length = [0]
        """Length of the longest string of each state."""
        self.count = [0]
        """Number of places where a state's strings end, see `append`."""
        self.last = 0

    def append(self, token: int) -> None:
        """Append a token of the text.

        A new end belongs to the new state and to all states along its links, in periodic text one for each period. Only
        COUNTED are raised: counts of the longest suffixes stay exact, and only short ones that end a long chain of
        longer ones are too low. A clone starts with the count of its original, as their ends were the
        same until now.
        """
        next_, link, length, count = self.next, self.link, self.length, self.count
        state = len(next_)
        next_.append({})
        link.append(0)
        length.append(length[self.last] + 1)
        count.append(0)
        at = self.last
        while at >= 0 and token not in next_[at]:
            next_[at][token] = state
            at = link[at]
        if at >= 0:
            found = next_[at][token]
            if length[found] != length[at] + 1:
                clone = len(next_)
                next_.append(next_[found].copy())
                link.append(link[found])
                length.append(length[at] + 1)
                count.append(count[found])
                link[found] = clone
                above = at
                while above >= 0 and next_[above].get(token) == found:
                    next_[above][token] = clone
                    above = link[above]
                found = clone
            link[state] = found
        for _ in range(COUNTED):  # the token becomes the last used one of the states that have just been left
            if at < 0:
                break
            used = next_[at]
            if len(used) > 1:
                used[token] = used.pop(token)
            at = link[at]
        at = self.last = state
        for _ in range(COUNTED):
            if at <= 0:
                break
            count[at] += 1
            at = link[at]

    def match(self) -> tuple[int, int]:
        """Return the longest earlier suffix's state and length."""
        state = max(0, self.link[self.last])
        return state, self.length[state]


class _Node(NamedTuple):
    state: int
    """State of the row's automaton; 0: none."""
    matched: int
    """Length of the match in the row's text."""
    raw: float
    """Probability before calibration."""
    places: list[int]
    """Where the corpus has the path."""
    corpus_matched: int
    """Length of the match there."""


UNKNOWN = (0, 0)


class _SuffixText:
    def __init__(self) -> None:
        self.text: list[int] = []
        self.automaton = SuffixAutomaton()
        self.last = empty_proposal()
        self.nodes: list[_Node] = []


class SuffixTable(Table):
    """Frequency-weighted trees of continuations, deep where counts are reliable."""

    name = "suffix"

    def __init__(self, corpus: Datastore | None = None) -> None:
        """`corpus`: texts searched in addition to the row's own (`open_datastore`)."""
        self.corpus = corpus
        self.rates = HitRates([1.0] * BUCKETS, weight=2.0)
        """Hits per expected hit, by match length."""
        self._rows: dict[int, _SuffixText] = {}

    @property
    def nbytes(self) -> int:
        return self.corpus.nbytes if self.corpus else 0

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        known = self._rows.get(row)
        if known is None or list(tokens[: len(known.text)]) != known.text:
            known = self._rows[row] = _SuffixText()
        known.last = empty_proposal()
        self._append(known, tokens[len(known.text) :])

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        state = self._rows[row]
        for node, hit in outcomes(state.last, tokens):
            tried = state.nodes[node]
            self.rates.learn(_bucket(max(tried.matched, tried.corpus_matched) - 1), hit, tried.raw)
        state.last = empty_proposal()
        self._append(state, tokens)

    def propose(self, row: int, budget: int) -> Proposal:
        state = self._rows[row]
        automaton = state.automaton
        places: list[int] = []
        corpus_matched = 0
        if self.corpus is not None:
            places, corpus_matched = self.corpus.places(state.text[-CONTEXT:])
        factors = self.rates.of(slice(None))
        max_factor = max(factors)
        root = _Node(*automaton.match(), 1.0, places, corpus_matched)
        state.last, state.nodes = grow(
            budget,
            root,
            lambda node, min_prob: self._children(automaton, node, min_prob / max_factor, factors),
        )
        return state.last

    def _append(self, state: _SuffixText, tokens: Sequence[int]) -> None:
        state.text += tokens
        for token in tokens:
            state.automaton.append(token)

    def _children(
        self, automaton: SuffixAutomaton, node: _Node, min_prob: float, factors: Sequence[float]
    ) -> list[tuple[float, int, _Node]]:
        """Return children (probability, token, node) above `min_prob` before calibration."""
        if min_prob >= 1:
            return []
        next_, link, length, count = automaton.next, automaton.link, automaton.length, automaton.count
        at, matched, corpus_matched = node.state, node.matched, node.corpus_matched
        corpus = self.corpus.after(node.places) if self.corpus is not None and node.places else {}
        probs: dict[int, float] = {}
        below: dict[int, tuple[int, int]] = {}  # token -> child's state and match length
        left, waiting = 1.0, bool(corpus)
        for _ in range(ORDERS):
            if waiting and corpus_matched > matched:
                left, waiting = _blend_corpus(probs, corpus, left), False
            if at <= 0 or left < SETTLED:
                break
            if used := list(islice(reversed(next_[at].items()), SIBLINGS)):
                escape = ESCAPE * len(used)
                share = left / (sum([count[to] for _, to in used]) + 1 + escape)
                more = share  # the one used last counts once more: texts drift
                for token, to in used:
                    if token in probs:
                        probs[token] += share * count[to] + more
                    else:
                        probs[token] = share * count[to] + more
                        below[token] = to, matched + 1
                    more = 0.0
                left = share * escape
            at = link[at]
            matched = length[at]
        if waiting:
            _blend_corpus(probs, corpus, left)
        children = []
        for token, raw in probs.items():
            if raw <= min_prob:
                continue
            to, matched = below.get(token, UNKNOWN)
            places = corpus.get(token, [])
            known = corpus_matched + 1 if places else 0
            prob = raw * factors[_bucket(max(matched, known) - 1)]
            children.append((prob, token, _Node(to, matched, raw, places, known)))
        return children


def _blend_corpus(probs: dict[int, float], corpus: dict[int, list[int]], left: float) -> float:
    """Add the corpus's share; return the probability that remains."""
    escape = ESCAPE * len(corpus)
    share = left / (sum(map(len, corpus.values())) + escape)
    for token, places in corpus.items():
        probs[token] = probs.get(token, 0.0) + share * len(places)
    return share * escape


def _bucket(matched: int) -> int:
    """Return the calibration range: 1 to 8, 9-16, 17-32, 33-64 and more."""
    return matched - 1 if matched <= 8 else min(BUCKETS - 1, (matched - 1).bit_length() + 4)


def build(inputs: BuildInputs) -> SuffixTable:
    """Build the table; raise ValueError if its file has another vocabulary."""
    vocab_size = inputs.target.vocab_size
    path = file_of(inputs.config, "suffix")
    if path is None:
        return SuffixTable(None)
    corpus = open_datastore(path)
    if corpus.largest >= vocab_size:
        raise ValueError(
            f"{path} holds token id {corpus.largest} and the target has {vocab_size}; build it with the target's "
            "tokenizer"
        )
    return SuffixTable(corpus)
