"""Prompt lookup (Saxena 2023; rules of vLLM): continuations of earlier occurrences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sharesd.drafters.base import BuildInputs
from sharesd.drafters.selection import options_of
from sharesd.drafters.tables.base import HitRates, Table, outcomes
from sharesd.drafters.tables.proposal import Proposal, empty_proposal


@dataclass(slots=True)
class _NgramText:
    text: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram -> index of the token after it."""
    last: Proposal = field(default_factory=empty_proposal)
    matched: int = 0
    """Length of the match of the last draft."""


class NgramTable(Table):
    """Chains copied from an earlier occurrence of the longest suffix."""

    name = "ngram"

    def __init__(self, num_draft: int, ngram_min: int, ngram_max: int, most_recent: bool = False) -> None:
        """Draft after the earliest longest match (as vLLM), or the most recent."""
        if num_draft < 1:
            raise ValueError(f"num_draft is {num_draft}; it must be at least 1")
        if not 1 <= ngram_min <= ngram_max:
            raise ValueError(f"ngram_min is {ngram_min} and ngram_max is {ngram_max}; give 1 <= ngram_min <= ngram_max")
        self.num_draft, self.ngram_min, self.ngram_max = num_draft, ngram_min, ngram_max
        self.most_recent = most_recent
        self.rates = HitRates([0.5] * (ngram_max + 1))
        """Probability that a copied token is right, by match length."""
        self._rows: dict[int, _NgramText] = {}

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        known = self._rows.get(row)
        if known is None or list(tokens[: len(known.text)]) != known.text:
            known = self._rows[row] = _NgramText()
        known.last = empty_proposal()
        self._append(known, tokens[len(known.text) :])

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        state = self._rows[row]
        for node, hit in outcomes(state.last, tokens):
            self.rates.learn(min(state.matched + node, self.ngram_max), hit)
        state.last = empty_proposal()
        self._append(state, tokens)

    def propose(self, row: int, budget: int) -> Proposal:
        state = self._rows[row]
        text, after = state.text, state.after
        end = text[-self.ngram_max :]
        for n in range(min(self.ngram_max, len(end)), self.ngram_min - 1, -1):
            start = after.get(tuple(end[-n:]))
            if start is not None:
                tokens = text[start : start + min(self.num_draft, budget)]
                scores, score = [], 1.0
                for depth in range(len(tokens)):
                    score *= self.rates[min(n + depth, self.ngram_max)]
                    scores.append(score)
                state.last, state.matched = Proposal(tokens, list(range(-1, len(tokens) - 1)), scores), n
                return state.last
        return empty_proposal()

    def _append(self, state: _NgramText, tokens: Sequence[int]) -> None:
        text, after = state.text, state.after
        for token in tokens:
            end = len(text)
            for n in range(self.ngram_min, min(self.ngram_max, end) + 1):
                key = tuple(text[end - n : end])
                if self.most_recent or key not in after:
                    after[key] = end
            text.append(token)


def build(inputs: BuildInputs) -> NgramTable:
    options = options_of(inputs.config, "ngram")
    return NgramTable(
        inputs.config.max_draft_tokens, options.ngram_min, options.ngram_max, most_recent=options.ngram_recent
    )
