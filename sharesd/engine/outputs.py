"""Results of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sharesd.data.request_errors import RequestError
from sharesd.engine.request import Request
from sharesd.engine.stats import Stats
from sharesd.engine.stop_checker import FinishReason
from sharesd.records.trace import RoundTrace

Source = Literal["target", "accepted", "recovered", "bonus"]
"""Source of a token.

`target`: a step without drafts; `accepted`: a confirmed draft token; `recovered`: the target's token at a rejected
draft token; `bonus`: the extra token after a draft accepted in full.
"""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens of one request from one round."""

    request: Request
    token_ids: list[int]
    """Tokens in order; an end-of-sequence token is included."""
    sources: list[Source]
    drafters: list[str | None]
    """Drafter of each token; None: the target's own."""
    text: str
    """Final text; incomplete characters and possible stop strings are held back."""
    logprobs: list[float] | None = None
    """Log-probability of each token under the target, if requested."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """Likeliest tokens at each position and their log-probabilities, if requested."""
    finish_reason: FinishReason | None = None
    """Finish reason; None: unfinished.

    `stop`: an end token or a stop string; `length`: max_new_tokens or the context is full; `error`: see `error`.
    """
    error: RequestError | None = None
    """Error that ended the request after these tokens."""
    round: RoundTrace | None = None
    """Trace of the round, with this row only, if `Request.wants_rounds`."""

    @property
    def row(self) -> int:
        """Index of the prompt in its call."""
        return self.request.index


@dataclass(slots=True)
class Completion:
    """All chunks of one prompt."""

    token_ids: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    drafters: list[str | None] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: list[float] | None = None
    """Log-probabilities of the prompt's tokens but the first, if requested."""
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None
    finish_reason: FinishReason | None = None
    """As in `TokenChunk`."""
    error: str | None = None
    """Message of the error that ended the answer, if `finish_reason` is `error`."""
    stats: Stats | None = field(default=None, compare=False)
    """Counts and times of the request; None before the first chunk."""

    def add(self, chunk: TokenChunk) -> None:
        self.token_ids += chunk.token_ids
        self.sources += chunk.sources
        self.drafters += chunk.drafters
        self.text += chunk.text
        if chunk.logprobs is not None:
            self.logprobs = (self.logprobs or []) + chunk.logprobs
        if chunk.top_logprobs is not None:
            self.top_logprobs = (self.top_logprobs or []) + chunk.top_logprobs
        self.prompt_logprobs = chunk.request.prompt_logprobs
        self.prompt_top_logprobs = chunk.request.prompt_top_logprobs
        self.finish_reason, self.stats = chunk.finish_reason, chunk.request.stats
        self.error = None if chunk.error is None else str(chunk.error)
