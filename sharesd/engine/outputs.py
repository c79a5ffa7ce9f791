"""What a caller gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sharesd.engine.request import Request
from sharesd.engine.stats import Stats
from sharesd.engine.stop_checker import FinishReason

Source = Literal["target", "accepted", "recovered", "bonus"]
"""Where a token came from: `target` = a step without drafts; `accepted` = a draft token that the target confirmed;
`recovered` = the target's own token where a draft failed; `bonus` = the extra one after a draft that held."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens of one request that came out of one round."""

    request: Request
    token_ids: list[int]
    """The tokens, in order; an end-of-sequence token is included."""
    sources: list[Source]
    """Where each token came from."""
    drafters: list[str | None]
    """Who drafted each token; None for tokens of the target itself."""
    text: str
    """Text that is final now; may lag behind the tokens (incomplete characters, possible stop strings)."""
    logprobs: list[float] | None = None
    """The target's log-probability of each token, if asked for."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """The likeliest tokens at each place and their log-probabilities, if asked for."""
    finish_reason: FinishReason | None = None
    """`stop`: an end token or a stop string; `length`: max_new_tokens or the context is full. None = goes on."""

    @property
    def row(self) -> int:
        """Number of the prompt among those of its call."""
        return self.request.index


@dataclass(slots=True)
class Completion:
    """All chunks of one prompt."""

    token_ids: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    drafters: list[str | None] = field(default_factory=list)
    """Who drafted each token; None for tokens of the target itself."""
    text: str = ""
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: list[float] | None = None
    """Of the prompt's tokens but the first, if asked for."""
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None
    finish_reason: FinishReason | None = None
    stats: Stats | None = field(default=None, compare=False)
    """Counts and times of its request; None before the first chunk."""

    def add(self, chunk: TokenChunk) -> None:
        """Append a chunk of this prompt."""
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
