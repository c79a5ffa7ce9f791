"""One request: its parameters, tokens, finish reason and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from math import inf
from typing import Any

from sharesd.engine.stats import Stats
from sharesd.engine.stop_checker import FinishReason, StopChecker
from sharesd.sampling.constraints import Constraint
from sharesd.sampling_params import SamplingParams

MAX_LEAD = 2
"""Largest lead, in tokens, of a counted request over the one of its call with the fewest."""

_numbers = count()

MAX_SHARED_ROUND = 1.5
"""Longest round with drafts, in plain rounds, if several callers share it."""


class Caller:
    """Who waits for all requests of a call."""

    has_more = False
    """True if more will follow, so that rounds need not suit the last ones."""


class Request:
    """Prompt and its answer, with a row while it is decoded."""

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        index: int,
        checker: StopChecker,
        stats: Stats,
        *,
        mode: str,
        matcher: Constraint | None = None,
        reuse: bool = True,
        call: Caller | None = None,
    ) -> None:
        """Request number `index` of its `call`, whose caller waits for all; None: of none. `mode` names its drafter."""
        self.prompt_ids, self.params, self.index, self.matcher = prompt_ids, params, index, matcher
        self.reuse, self.call, self.mode = reuse, call, mode
        self.number = next(_numbers)
        """Number in this process, by which traces name the request."""
        self.label: Mapping[str, Any] = {}
        """Fields of the caller that traces have, JSON types."""
        self.wants_rounds = False
        """True if chunks have the traces of their rounds.

        It is set before the first round.
        """
        self.tokens = list(prompt_ids)
        """Prompt and emitted tokens."""
        self.row: int | None = None
        """Row of the cache; None before admission and after the end."""
        self.num_read = 0
        """Prompt tokens whose KV the row has: all of them once the first token is emitted."""
        self.cached_tokens = 0
        """Prompt tokens that were not recomputed; known from the first chunk on."""
        self.prompt_logprobs: list[float] | None = [] if params.prompt_logprobs else None
        """Log-probability of each prefilled prompt token but the first, if requested."""
        self.prompt_top_logprobs: list[list[tuple[int, float]]] | None = None
        """Likeliest tokens at those positions, if requested."""
        if params.prompt_logprobs and params.top_logprobs:
            self.prompt_top_logprobs = []
        self.finish_reason: FinishReason | None = None
        self.bad_position: int | None = None
        """Position of the first token whose logits are not numbers."""
        self.cancelled = False
        self.stats = stats
        """Counts of this request only; times as `Stats` defines them."""
        self._checker = checker

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - len(self.prompt_ids)

    def trace_line(self, emitted: Sequence[int]) -> dict[str, Any]:
        """Return the line of a trace after the prompt was read."""
        return {
            "event": "request",
            "request": self.number,
            "mode": self.mode,
            "label": {"index": self.index, **self.label},
            "prompt_tokens": len(self.prompt_ids),
            "cached_tokens": self.cached_tokens,
            "prefill_s": round(self.stats.prefill_s, 7),
            "emitted": list(emitted),
        }

    def take(self, ids: list[int]) -> tuple[int, str]:
        """Append new tokens; return the number within the answer, and completed text."""
        count, text, self.finish_reason = self._checker.push(ids)
        self.tokens += ids[:count]
        if self.matcher is not None and self.finish_reason is None:
            self.matcher.advance(ids)
        return count, text

    def fail(self) -> str:
        """End the answer by an error; return the text that was held back."""
        held = "" if self.finish_reason is not None else self._checker.cut()
        self.finish_reason = "error"
        return held


def counted_requests(live: Sequence[Request], is_last_call: bool) -> list[Request]:
    """Return the requests for which the policy chooses the next draft.

    All, or, if `is_last_call`, those that have emitted the fewest tokens or few more: they determine the call's
    duration.
    """
    if not is_last_call:
        return list(live)
    max_emitted = min(request.num_emitted for request in live) + MAX_LEAD
    return [request for request in live if request.num_emitted <= max_emitted]


def max_round_cost(live: Sequence[Request], prefilled: bool, one_caller: bool) -> float:
    """Return a round's cost limit in plain rounds; `prefilled`: requests have just waited for a prompt chunk."""
    if one_caller or (len(live) == 1 and not prefilled):
        return inf
    return 1.0 if prefilled else MAX_SHARED_ROUND


def mean_progress(live: Sequence[Request], before: Sequence[int], is_last_call: bool) -> float:
    """Return the mean progress in tokens; if `is_last_call`, that of the request with the fewest."""
    after = [request.num_emitted for request in live]
    if not is_last_call:
        return (sum(after) - sum(before)) / len(live)
    still = [index for index, request in enumerate(live) if request.finish_reason is None] or range(len(live))
    return min(after[index] for index in still) - min(before[index] for index in still)
