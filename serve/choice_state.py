"""One choice of a request: what it asks of the engine, and what came of it so far, which are `Tokens` again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from sharesd.config import SamplingParams


class Tokens(Protocol):
    """Some tokens of an answer, of one round or all, and the text that they complete."""

    token_ids: list[int]
    sources: list[Any]
    drafters: list[str | None]
    text: str
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[int, float]]] | None
    finish_reason: Any


class Chunk(Tokens, Protocol):
    """What one round gave to one request, as the engine tells it."""

    request: Any


@dataclass(eq=False, slots=True)
class Choice:
    """Times are seconds of time.monotonic()."""

    prompt: list[int]
    params: SamplingParams
    prompt_index: int
    """Of its prompt, among those of its request."""
    index: int
    """Among the choices of its request: its prompt's number times n, plus its own."""

    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    """When its first tokens came."""
    last: float | None = None
    ended: bool = False
    """Finished or given up: its place is free."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    drafters: list[str | None] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    finish_reason: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[float] | None = None
    """Of the prompt's tokens but the first; as all of the prompt, known from the first chunk on."""
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None

    rounds: int = 0
    """Without the step that read the prompt."""
    drafted: int = 0
    """Draft tokens that were verified."""
    accepted_at: list[int] = field(default_factory=list)
    """Rounds in which the draft token at this position was accepted."""

    def add(self, chunk: Chunk, num_drafted: int) -> float | None:
        """Take a round's tokens, for which `num_drafted` draft tokens were verified.

        Returns the seconds since the round before; None for the first tokens.
        """
        before, self.last = self.last, time.monotonic()
        if self.first is None:
            self.first, request = self.last, chunk.request
            self.cached_tokens = request.cached_tokens
            self.prompt_logprobs, self.prompt_top_logprobs = request.prompt_logprobs, request.prompt_top_logprobs
        else:
            self._count_round(chunk, num_drafted)
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.sources += chunk.sources
        self.drafters += chunk.drafters
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
        num_accepted = chunk.sources.count("accepted")
        self.accepted_at += [0] * (num_accepted - len(self.accepted_at))
        for position in range(num_accepted):
            self.accepted_at[position] += 1
