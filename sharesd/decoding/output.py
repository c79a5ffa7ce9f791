"""What a caller gets, and where a row's text ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from sharesd.config import SamplingParams
from sharesd.models.tokenizer import TextStream, Tokenizer

if TYPE_CHECKING:
    from sharesd.decoding.request import Request

Source = Literal["target", "accepted", "recovered", "bonus"]
"""Where a token came from: `target` = a step without drafts; `accepted` = a draft token that the target confirmed;
`recovered` = the target's own token where a draft failed; `bonus` = the extra one after a draft that held."""
FinishReason = Literal["stop", "length"]


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
    finish_reason: FinishReason | None = None

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
        self.finish_reason = chunk.finish_reason


class StopChecker:
    """Decides, token by token, where one row ends; the decision depends on the tokens alone, not on their rounds."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, eos_ids: tuple[int, ...], room: int) -> None:
        """`room` is the number of tokens that the context still holds."""
        self._stream = TextStream(tokenizer)
        self._stops = params.stop
        self._end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._left = min(params.max_new_tokens, room)
        self._held = ""  # final text that may be the beginning of a stop string

    def push(self, ids: list[int]) -> tuple[int, str, FinishReason | None]:
        """Take a round's tokens: how many of them belong to the output, the text they complete, why it ends."""
        if not self._stops and len(ids) < self._left and self._end_ids.isdisjoint(ids):  # together: decoding takes time
            self._left -= len(ids)
            return len(ids), self._stream.push(ids), None
        text = ""
        for count, token in enumerate(ids, 1):
            self._left -= 1
            piece, found = self._release(self._stream.push([token]))
            text += piece
            if found or token in self._end_ids:
                return count, text if found else text + self._rest()[0], "stop"
            if self._left == 0:
                rest, found = self._rest()
                return count, text + rest, "stop" if found else "length"
        return len(ids), text, None

    def _release(self, piece: str) -> tuple[str, bool]:
        """Text that can be shown now, and whether a stop string came up (the text is cut before it)."""
        text = self._held + piece
        first = min((at for at in (text.find(stop) for stop in self._stops) if at >= 0), default=-1)
        if first >= 0:
            return text[:first], True
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False

    def _rest(self) -> tuple[str, bool]:
        """Everything held back, now that nothing follows."""
        text, found = self._release(self._stream.finish())
        return (text, True) if found else (text + self._held, False)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
