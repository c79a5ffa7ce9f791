"""Stop criteria: end tokens, stop strings, lengths. Imports no torch, since the server uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sharesd.models.text_stream import TextStream
from sharesd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sharesd.models.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "error"]


class StopChecker:
    """Search for the end of one row's text, independent of round borders."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, eos_ids: tuple[int, ...], room: int) -> None:
        """`room`: free slots of the context, in tokens."""
        self._stream = TextStream(tokenizer)
        self._stops = params.stop
        self.end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        """Tokens that end the text."""
        self._num_before_end = params.min_new_tokens
        self._num_left = min(params.max_new_tokens, room)
        self._unsent = ""  # final text that may be the beginning of a stop string

    def push(self, ids: list[int]) -> tuple[int, str, FinishReason | None]:
        """Process new tokens; return their number within the text, text, and reason."""
        continues = len(ids) < self._num_left and self.end_ids.isdisjoint(ids)
        if continues and not self._stops:  # all at once, since decoding ids to text takes time
            self._num_left -= len(ids)
            self._num_before_end -= len(ids)
            return len(ids), self._stream.push(ids), None
        text = ""
        for count, token in enumerate(ids, 1):
            self._num_left -= 1
            self._num_before_end -= 1
            may_end, piece = self._num_before_end < 0, self._stream.push([token])
            piece, found = self._release(piece) if may_end else (piece, False)
            text += piece
            if found or (may_end and token in self.end_ids):
                return count, text if found else text + self._flush()[0], "stop"
            if self._num_left == 0:
                rest, found = self._flush()
                return count, text + rest, "stop" if found else "length"
        return len(ids), text, None if self._num_left else "length"

    def cut(self) -> str:
        """Return the text that was held back, when an error ends the answer."""
        return self._flush()[0]

    def _release(self, piece: str) -> tuple[str, bool]:
        """Return final text, cut before a stop string, and True if found."""
        text = self._unsent + piece
        first = min((at for at in (text.find(stop) for stop in self._stops) if at >= 0), default=-1)
        if first >= 0:
            return text[:first], True
        hold = max((overlap(text, stop) for stop in self._stops), default=0)
        self._unsent = text[len(text) - hold :]
        return text[: len(text) - hold], False

    def _flush(self) -> tuple[str, bool]:
        """Return all text held back, and whether a stop string was found."""
        text, found = self._release(self._stream.finish())
        return (text, True) if found else (text + self._unsent, False)


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
