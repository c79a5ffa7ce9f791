"""A request on its way: what was asked, what has been emitted, where it ends, what to count."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from sharesd.config import SamplingParams
from sharesd.engine.stats import Stats
from sharesd.engine.stop_checker import FinishReason, StopChecker
from sharesd.sampling.grammar import Matcher

AHEAD = 2
"""Tokens by which a request may lead the last one of its call and still be waited for."""

BEARABLE = 1.5
"""Plain rounds that a round with drafts may take where several callers share it."""


class QueueFull(ValueError):
    """So many requests wait already that no further one is taken."""


class Request:
    """One prompt and its answer. It waits, then has a row of the cache, its slot, until it ends or is cancelled."""

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        index: int,
        checker: StopChecker,
        stats: Stats,
        *,
        matcher: Matcher | None = None,
        reuse: bool = True,
        call: object | None = None,
    ) -> None:
        """`index` is the prompt's number among those of its `call`, None where that is `add`. `stats` count this
        request alone. `matcher`: where its answer stands in its grammar. `reuse`: KV that is there need not be read
        anew.
        """
        self.prompt_ids, self.params, self.index, self.matcher = prompt_ids, params, index, matcher
        self.reuse, self.call = reuse, call
        self.tokens = list(prompt_ids)
        """Prompt and emitted tokens."""
        self.slot: int | None = None
        """Row of the cache; None before it has one, and after the end."""
        self.num_read = 0
        """Tokens of the prompt whose KV the row has; all of them from the first token on."""
        self.cached_tokens = 0
        """Tokens of the prompt that were not read anew; known from the first chunk on."""
        self.prompt_logprobs: list[float] | None = [] if params.prompt_logprobs else None
        """The target's log-probability of each prompt token but the first, as far as it was read, if asked for."""
        self.prompt_top_logprobs: list[list[tuple[int, float]]] | None = None
        """The likeliest tokens there, if asked for."""
        if params.prompt_logprobs and params.top_logprobs:
            self.prompt_top_logprobs = []
        self.finish_reason: FinishReason | None = None
        self.cancelled = False
        self.stats = stats
        """Counts of this request alone; see there what its times are."""
        self._checker = checker

    @property
    def num_emitted(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.prompt_ids)

    def take(self, ids: list[int]) -> tuple[int, str]:
        """Tokens that came out: how many of them belong to the answer, and the text that they complete."""
        num_legal = self.matcher.advance(ids) if self.matcher is not None else None
        count, text, self.finish_reason = self._checker.push(ids, num_legal)
        self.tokens += ids[:count]
        return count, text


def awaited(live: Sequence[Request], alone: bool) -> list[Request]:
    """Requests whose tokens count in the coming round.

    All of them; but where they are `alone`, prompts of one call with nothing behind them, those that have emitted
    fewest tokens, or little more: the call ends when they do, and what others gain makes nothing quicker.
    """
    if not alone:
        return list(live)
    most = min(request.num_emitted for request in live) + AHEAD
    return [request for request in live if request.num_emitted <= most]


def bearable(live: Sequence[Request], has_read: bool) -> float:
    """Plain rounds that the coming one may take. A caller waits for a draft of their own as long as it pays; but those
    who share the round wait too, and if they `has_read`, have waited for another's prompt already.
    """
    if live[0].call is not None or (len(live) == 1 and not has_read):
        return inf
    return 1.0 if has_read else BEARABLE


def advance(live: Sequence[Request], before: Sequence[int], alone: bool) -> float:
    """Tokens by which requests that had emitted `before` tokens each have moved on: their mean; of those that are
    `alone` the last one, as long as it has not ended.
    """
    after = [request.num_emitted for request in live]
    if not alone:
        return (sum(after) - sum(before)) / len(live)
    still = [place for place, request in enumerate(live) if request.finish_reason is None] or range(len(live))
    return min(after[place] for place in still) - min(before[place] for place in still)
