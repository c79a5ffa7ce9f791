"""State of one choice: its parameters and its tokens so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from sharesd.data.request_errors import RequestError
from sharesd.sampling_params import SamplingParams


class Tokens(Protocol):
    """Tokens of a round or of a whole answer, with their text."""

    token_ids: list[int]
    sources: list[Any]
    drafters: list[str | None]
    text: str
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[int, float]]] | None
    finish_reason: Any


class Chunk(Tokens, Protocol):
    """Tokens of one round for one request, as the engine returns them."""

    request: Any
    error: RequestError | None
    round: Any
    """Trace of the round, if wanted; None after a prefill."""


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
    stats: Any = None
    """Counts and times of the engine, from the first tokens."""
    prompt_logprobs: list[float] | None = None
    """Log-probabilities of all prompt tokens except the first.

    They are set with the first chunk.
    """
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None

    reasoning_tokens: int = 0
    """Number of tokens of the reasoning, without its marks."""
    rounds: int = 0
    """Number of rounds, without the prefill."""
    drafted: int = 0
    """Number of verified draft tokens."""
    drafted_rounds: int = 0
    """Number of rounds with a draft."""
    drafted_round_tokens: int = 0
    """Number of tokens of those rounds."""
    traces: list[Any] = field(default_factory=list)
    """Traces of rounds, if wanted."""
    accepted_at: list[int] = field(default_factory=list)
    """Number of rounds with an accepted draft token, by position."""

    def add(self, chunk: Chunk, num_drafted: int) -> float | None:
        """Append a round's tokens, of which `num_drafted` draft tokens were verified.

        Returns the seconds since the previous round; None for the first tokens.
        """
        before, self.last = self.last, time.monotonic()
        if self.first is None:
            self.first, request = self.last, chunk.request
            self.cached_tokens, self.stats = request.cached_tokens, request.stats
            self.prompt_logprobs, self.prompt_top_logprobs = request.prompt_logprobs, request.prompt_top_logprobs
        else:
            self._count_round(chunk, num_drafted)
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

    def _count_round(self, chunk: Chunk, num_drafted: int) -> None:
        self.rounds += 1
        self.drafted += num_drafted
        if num_drafted:
            self.drafted_rounds += 1
            self.drafted_round_tokens += len(chunk.token_ids)
        num_accepted = chunk.sources.count("accepted")
        self.accepted_at += [0] * (num_accepted - len(self.accepted_at))
        for position in range(num_accepted):
            self.accepted_at[position] += 1
