"""State of one choice: its parameters and its tokens so far; and the figures of a request's choices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

from sharesd.engine.stats import Stats, ratio
from sharesd.sampling_params import SamplingParams

if TYPE_CHECKING:  # the engine's modules need torch, which the server's start does not wait for
    from serve.schemas import Generation
    from sharesd.engine.outputs import TokenChunk

Tokens: TypeAlias = "Choice | TokenChunk"
"""Tokens of a round or of a whole answer, with their text."""


@dataclass(eq=False, slots=True)
class Choice:
    """State of one choice; times are seconds of time.monotonic()."""

    prompt: list[int]
    params: SamplingParams
    prompt_index: int
    """Index of the choice's prompt in the request."""
    index: int
    """Index in the request: prompt_index * n + number of the sample."""
    request_id: str = ""
    """Id of the HTTP request, as in the log; traces have it."""
    wants_rounds: bool = False
    """True if chunks have the traces of their rounds."""

    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    """Time of the first tokens."""
    last: float | None = None
    ended: bool = False
    """True after finish or cancellation, with the place released."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    drafters: list[str | None] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    finish_reason: str | None = None
    cached_tokens: int = 0
    stats: Stats | None = None
    """Counts and times of the engine, from the first tokens."""
    prompt_logprobs: list[float] | None = None
    """Log-probabilities of all prompt tokens except the first.

    They are set with the first chunk.
    """
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None

    reasoning_tokens: int = 0
    """Number of tokens of the reasoning, without its marks."""
    traces: list[Any] = field(default_factory=list)
    """Traces of rounds, if wanted."""

    def add(self, chunk: TokenChunk) -> float | None:
        """Append a round's tokens; return the seconds since the previous round, None for the first tokens."""
        before, self.last = self.last, time.monotonic()
        if self.first is None:
            self.first, request = self.last, chunk.request
            self.cached_tokens, self.stats = request.cached_tokens, request.stats
            self.prompt_logprobs, self.prompt_top_logprobs = request.prompt_logprobs, request.prompt_top_logprobs
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.sources += chunk.sources
        self.drafters += chunk.drafters
        if chunk.round is not None:
            self.traces.append(chunk.round)
        if chunk.logprobs is not None:
            self.logprobs = (self.logprobs or []) + chunk.logprobs
        if chunk.top_logprobs is not None:
            self.top_logprobs = (self.top_logprobs or []) + chunk.top_logprobs
        self.finish_reason = chunk.finish_reason
        self.ended = chunk.finish_reason is not None
        return None if before is None else self.last - before


def usage(choices: Sequence[Choice], completion_tokens: int | None = None) -> dict[str, Any]:
    """Return OpenAI's `usage`; a prompt with several choices counts once.

    `completion_tokens`: those of a stream so far; None: all.
    """
    cached: dict[int, int] = {}
    for choice in choices:  # the first one to be read fills the cache for the others
        cached[choice.prompt_index] = min(choice.cached_tokens, cached.get(choice.prompt_index, choice.cached_tokens))
    thought = sum(choice.reasoning_tokens for choice in choices)
    prompt_tokens = sum({choice.prompt_index: len(choice.prompt) for choice in choices}.values())
    if completion_tokens is None:
        completion_tokens = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        **({"completion_tokens_details": {"reasoning_tokens": thought}} if thought else {}),
    }


def speculative(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return speculation figures over all rounds, without prefills' first tokens."""
    begun = [choice for choice in choices if choice.first is not None]
    num_decoded = sum(max(0, len(choice.token_ids) - 1) for choice in begun)
    stats = Stats()
    for choice in begun:
        stats.merge(choice.stats or Stats())
    rounds, accepted_at = stats.rounds, list(takewhile(bool, stats.accepted_at))
    seconds = max((c.last or 0.0 for c in begun), default=0.0) - min((c.first or 0.0 for c in begun), default=0.0)
    return {
        "tau": num_decoded / rounds if rounds else 0.0,
        "tau_drafted": ratio(stats.drafted_round_tokens, stats.drafted_rounds),
        "acceptance_by_position": [count / rounds for count in accepted_at],
        "draft_share": sum(accepted_at) / num_decoded if num_decoded else None,
        "rounds": rounds,
        "drafted": stats.drafted_tokens,
        "accepted": sum(accepted_at),
        "accepted_at": accepted_at,
        "tokens_per_second": num_decoded / seconds if seconds > 0 else 0.0,
    }


def facts(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return a request's figures for the log line."""
    firsts = [choice.first - choice.began for choice in choices if choice.first is not None]
    counts, rounds = usage(choices), speculative(choices)
    return {
        "prompt_tokens": counts["prompt_tokens"],
        "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": counts["completion_tokens"],
        "first_token_s": min(firsts, default=None),
        "finish": ",".join(choice.finish_reason or "cancelled" for choice in choices),
        "seed": choices[0].params.seed,
        "tau": rounds["tau"] or None,
        "drafted": rounds["drafted"],
        "accepted": rounds["accepted"],
    }


def ending(choices: Sequence[Choice], body: Generation) -> dict[str, Any]:
    """Return the fields after the choices of an answer or last chunk."""
    return {"usage": usage(choices)} | ({"speculative": speculative(choices)} if body.token_details else {})
