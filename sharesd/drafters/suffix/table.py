"""Trees of what followed the longest repeated suffix of the text: an online suffix automaton, and a corpus beside it.

The automaton is that of Blumer et al. 1985 (The smallest automaton recognizing the subwords of a text). Probabilities
are blended over ever shorter suffixes as in PPM (Cleary and Witten 1984; Witten and Bell 1991). The corpus follows REST
(He et al. 2023, arXiv 2311.08252), with one suffix array over the contexts of all its positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import le
from pathlib import Path

import numpy as np

from compile.suffix_search import finder
from sharesd.drafters.tables.base import HitRates, grow, outcomes, written
from sharesd.speculation.draft_proposal import Guess, nothing

ORDERS = 3
"""Suffixes of different lengths (states) that are blended for one node."""
SIBLINGS = 8
"""Children looked at per state: those that were used last."""
ESCAPE = 1.5
"""Occurrences that each distinct continuation is worth as evidence for one never seen (Witten and Bell: 1)."""
COUNTED = 32
"""States whose counts are brought up to date per token."""
BUCKETS = 12
"""Match lengths with a calibration of their own: 1 to 8, then by powers of two."""
CONTEXT = 16
"""Tokens of context by which the corpus is sorted and searched."""
SETTLED = 0.21
"""Shorter suffixes are not asked about less probability than this: two states with one continuation each leave 0.18."""
SAMPLES = 16
"""Occurrences in the corpus that are looked at."""
TOKEN = np.dtype(">i4")
LARGEST = 2**31 - 1
FORMAT = 1


class SuffixAutomaton:
    """All substrings of a text, one state per set of places where they end; grows by a token in amortised O(1).

    State 0 is the empty string. The longest suffix of the text that occurred before is `link[last]`: a suffix is
    outside the state of the whole text exactly when it also ends elsewhere. Nothing else needs to be tracked.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        """Token -> state, least recently used first."""
        self.link = [-1]
        """The state of the longest suffix that ends at more places."""
        self.length = [0]
        """Of the longest string of the state."""
        self.count = [0]
        """Places where the state's strings end; see `append` for what it leaves out."""
        self.last = 0

    def append(self, token: int) -> None:
        """One more token of the text.

        A new end belongs to the new state and to all states along its links. To keep counts exact, all would have to be
        raised, and in periodic text there are as many as periods. We stop after COUNTED of them: the longest suffixes,
        which guesses ask first, stay exact, and only short ones that end a long chain of longer ones fall behind. A
        clone starts with the count of the state it is taken from, as their ends were the same until now.
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

    def match(self, ahead: Sequence[int] = ()) -> tuple[int, int]:
        """State and length of the longest suffix of the text and the tokens `ahead` that occurred before."""
        state = max(0, self.link[self.last])
        length = self.length[state]
        for token in ahead:
            while state and token not in self.next[state]:
                state = self.link[state]
                length = self.length[state]
            state = self.next[state].get(token, 0)
            length = length + 1 if state else 0
        return state, length


_Node = tuple[int, int, float, list[int], int]
"""A place in the guessed tree: its state in the automaton (0 = none), the length that matches there, its probability
before calibration, where the path ends in the corpus, the length that matches there. Plain, as there are hundreds."""
UNKNOWN = (0, 0)


class _Row:
    def __init__(self) -> None:
        self.text: list[int] = []
        self.automaton = SuffixAutomaton()
        self.last = nothing()
        self.nodes: list[_Node] = []


class SuffixTable:
    """Frequency-weighted trees of continuations, as deep as the evidence is good.

    A child's probability: its share of the continuations of the longest repeated suffix, the rest given to the next
    shorter suffixes, times a factor per match length. The factor, hits over expected hits, is learnt from the outcomes.
    """

    name = "suffix"

    def __init__(self, corpus: Datastore | None = None) -> None:
        """`corpus`: texts to look into besides the row's own (`open_datastore`)."""
        self.corpus = corpus
        self.rates = HitRates([1.0] * BUCKETS, weight=2.0)
        """Hits per expected hit, by match length."""
        self._rows: dict[int, _Row] = {}

    num_successors = 0

    def learn(self, row_tokens: np.ndarray, successors: np.ndarray) -> None:
        """Texts are all it learns from."""

    @property
    def nbytes(self) -> int:
        """Bytes of the corpus, which is mapped into memory."""
        return self.corpus.nbytes if self.corpus else 0

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        known = self._rows.get(row)
        if known is None or list(tokens[: len(known.text)]) != known.text:
            known = self._rows[row] = _Row()
        known.last = nothing()
        self._append(known, tokens[len(known.text) :])

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        state = self._rows[row]
        for node, hit in outcomes(state.last, tokens):
            _, matched, raw, _, corpus_matched = state.nodes[node]
            self.rates.learn(_bucket(max(matched, corpus_matched) - 1), hit, raw)
        state.last = nothing()
        self._append(state, tokens)

    def guess(self, row: int, budget: int, ahead: Sequence[int] = ()) -> Guess:
        state = self._rows[row]
        automaton = state.automaton
        places: list[int] = []
        corpus_matched = 0
        if self.corpus is not None:
            places, corpus_matched = self.corpus.places([*state.text[-CONTEXT:], *ahead])
        factors = self.rates.of(slice(None))
        most = max(factors)
        root = (*automaton.match(ahead), 1.0, places, corpus_matched)
        found = grow(budget, root, lambda node, least: self._children(automaton, node, least / most, factors))
        if not ahead:
            state.last, state.nodes = found
        return found[0]

    def _append(self, state: _Row, tokens: Sequence[int]) -> None:
        state.text += tokens
        for token in tokens:
            state.automaton.append(token)

    def _children(
        self, automaton: SuffixAutomaton, node: _Node, least: float, factors: Sequence[float]
    ) -> list[tuple[float, int, _Node]]:
        """Longer suffixes have the first say and leave to shorter ones the chance of what they have not seen.

        Without the children whose probability before calibration, with these factors, is `least` or lower.
        """
        if least >= 1:
            return []
        next_, link, length, count = automaton.next, automaton.link, automaton.length, automaton.count
        at, matched, _, places, corpus_matched = node
        corpus = self.corpus.after(places) if self.corpus is not None and places else {}
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
            if raw <= least:
                continue
            to, matched = below.get(token, UNKNOWN)
            places = corpus.get(token, [])
            known = corpus_matched + 1 if places else 0
            children.append((raw * factors[_bucket(max(matched, known) - 1)], token, (to, matched, raw, places, known)))
        return children


def _blend_corpus(probs: dict[int, float], corpus: dict[int, list[int]], left: float) -> float:
    """Add the corpus's share of the probability that is left; returns what it leaves."""
    escape = ESCAPE * len(corpus)
    share = left / (sum(map(len, corpus.values())) + escape)
    for token, places in corpus.items():
        probs[token] = probs.get(token, 0.0) + share * len(places)
    return share * escape


def _bucket(matched: int) -> int:
    """Of the longest match before a child: 1 to 8, then 9-16, 17-32, 33-64 and more."""
    return matched - 1 if matched <= 8 else min(BUCKETS - 1, (matched - 1).bit_length() + 4)


class Datastore:
    """A corpus with its positions sorted by what stands before them.

    Sorted by contexts read backwards, all places that share the last n tokens with a text are neighbours, and next to
    where the text itself would stand is the longest match: one binary search finds it. Tokens are kept big-endian, so
    that contexts compare as bytes; the arrays may be memory-mapped and are only read. `largest` is the largest
    token id: compare it with the target's vocabulary.
    """

    def __init__(self, backward: np.ndarray, order: np.ndarray, largest: int) -> None:
        """Both >i4. backward [N]: the corpus from its end to its beginning. order [N]: its suffixes' starts, sorted."""
        self.num_tokens, self.largest = len(backward), largest
        self.nbytes = backward.nbytes + order.nbytes
        self._backward = memoryview(backward.view(np.uint8))  # type: ignore[arg-type]
        self._order = order
        self._find = finder(backward, order, SAMPLES)

    def places(self, text: Sequence[int]) -> tuple[list[int], int]:
        """Up to SAMPLES places after the longest match of the text's end, spread evenly; and the match's length.

        A place is the index in `backward` of the token that comes next, -1 at the end of the corpus.
        ValueError if the order points nowhere.
        """
        matched, starts = self._find(text[: -CONTEXT - 1 : -1])
        if matched < 0:
            raise ValueError(f"the datastore points beyond its {self.num_tokens} tokens; build it again")
        return [start - 1 for start in starts], matched

    def after(self, places: list[int]) -> dict[int, list[int]]:
        """The tokens at these places, each with the places that follow there."""
        found: dict[int, list[int]] = {}
        for place in places:
            if place < 0:
                continue  # the corpus ended
            token = int.from_bytes(self._backward[4 * place : 4 * place + 4], "big")
            if token > self.largest:
                raise ValueError(f"the datastore holds token id {token}, above its largest; build it again")
            found.setdefault(token, []).append(place - 1)
        return found

    def seems_sorted(self) -> bool:
        """Looks at a few neighbours; False if one is out of order or points nowhere."""
        ranks = np.arange(0, self.num_tokens - 1, max(1, self.num_tokens // 64))
        starts = [int(start) for start in self._order[[*ranks, *(ranks + 1), self.num_tokens - 1]]]
        if max(starts) >= self.num_tokens or min(starts) < 0:
            return False
        contexts = [bytes(self._backward[4 * start : 4 * (start + CONTEXT)]) for start in starts]
        return all(map(le, contexts[: len(ranks)], contexts[len(ranks) :]))


def build_datastore(tokens: Sequence[int] | np.ndarray, path: str | Path) -> None:
    """Sort a corpus and write it to a .npy file (`>i4` [2, N + 1]), whole or not at all.

    First the backward tokens and the format, then their order and the largest token id.

    Takes some 40 bytes of memory per token. ValueError without tokens or for one that is not between 0 and 2^31 - 1.
    """
    given = np.asarray(tokens)
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
        raise ValueError(f"the corpus is an array {list(given.shape)} of {given.dtype}; give at least one token id")
    if given.size > LARGEST:
        raise ValueError(f"the corpus has {given.size} tokens; give at most {LARGEST}")
    if given.min() < 0 or given.max() > LARGEST:
        wrong = given.min() if given.min() < 0 else given.max()
        raise ValueError(f"token id {wrong} is in the corpus; ids are between 0 and {LARGEST}")
    backward = given[::-1].astype(np.int64)
    with written(Path(path)) as stream:
        ends = np.array([[FORMAT], [backward.max()]])
        np.save(stream, np.hstack([np.stack([backward, _suffix_order(backward)]), ends]).astype(TOKEN))


def open_datastore(path: str | Path) -> Datastore:
    """Map a file of `build_datastore` into memory: nothing is read but what look-ups touch, and a few samples now.

    ValueError if the file is missing or damaged.
    """
    damaged = f"{path} is not a datastore, or it is damaged; build it again"
    try:
        stored = np.load(path, mmap_mode="r")
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; give a file of `sharesd train corpus`") from error
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(damaged) from error
    if not isinstance(stored, np.ndarray) or stored.dtype != TOKEN or stored.ndim != 2 or len(stored) != 2:
        raise ValueError(damaged)
    if stored.shape[1] < 2 or not stored.flags.c_contiguous or stored[0, -1] != FORMAT:
        raise ValueError(damaged)
    datastore = Datastore(stored[0, :-1], stored[1, :-1], int(stored[1, -1]))
    if datastore.largest < 0 or not datastore.seems_sorted():
        raise ValueError(damaged)
    return datastore


def _suffix_order(tokens: np.ndarray) -> np.ndarray:
    """Starts [N] of the suffixes of tokens [N] int64, sorted by their first CONTEXT tokens; ties by start.

    Prefix doubling (Manber and Myers 1993): ranks by 2n tokens are pairs of ranks by n.
    """
    N = len(tokens)
    _, ranks = np.unique(tokens, return_inverse=True)
    span = 1
    order = np.argsort(ranks, kind="stable")
    while span < CONTEXT:
        then = np.zeros(N, dtype=np.int64)  # what ends sooner comes first
        then[:-span] = ranks[span:] + 1
        pairs = ranks * (N + 1) + then
        order = np.argsort(pairs, kind="stable")
        ranks = np.empty(N, dtype=np.int64)
        ranks[order] = np.concatenate([[0], np.cumsum(np.diff(pairs[order]) != 0)])
        span *= 2
    return order
