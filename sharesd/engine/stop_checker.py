"""Where a text ends."""

from __future__ import annotations

from typing import Literal

from sharesd.config import SamplingParams
from sharesd.models.tokenizer import TextStream, Tokenizer

FinishReason = Literal["stop", "length"]


class StopChecker:
    """Decides, token by token, where one row ends; the decision depends on the tokens alone, not on their rounds."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, eos_ids: tuple[int, ...], room: int) -> None:
        """`room` is the number of tokens that the context still holds."""
        self._stream = TextStream(tokenizer)
        self._stops = params.stop
        self._end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._left = min(params.max_new_tokens, room)
        self._held = ""  # final text that may be the beginning of a stop string

    def push(self, ids: list[int], num_legal: int | None = None) -> tuple[int, str, FinishReason | None]:
        """Take a round's tokens: how many of them belong to the output, the text they complete, why it ends.

        `num_legal`: how many of them a grammar takes, where there is one. The next one says that nothing could follow,
        and ends a text that is cut short.
        """
        legal = len(ids) if num_legal is None else num_legal
        goes_on = legal == len(ids) < self._left and self._end_ids.isdisjoint(ids)
        if goes_on and not self._stops:  # together: decoding takes time
            self._left -= len(ids)
            return len(ids), self._stream.push(ids), None
        text = ""
        for count, token in enumerate(ids, 1):
            self._left -= 1
            piece, found = self._release(self._stream.push([token]))
            text += piece
            if found or (token in self._end_ids and count <= legal):
                return count, text if found else text + self._rest()[0], "stop"
            if self._left == 0 or count > legal:
                rest, found = self._rest()
                return count, text + rest, "stop" if found else "length"
        return len(ids), text, None if self._left else "length"

    def _release(self, piece: str) -> tuple[str, bool]:
        """Text that can be shown now, and whether a stop string came up (the text is cut before it)."""
        text = self._held + piece
        first = min((at for at in (text.find(stop) for stop in self._stops) if at >= 0), default=-1)
        if first >= 0:
            return text[:first], True
        hold = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False

    def _rest(self) -> tuple[str, bool]:
        """Everything held back, now that nothing follows."""
        text, found = self._release(self._stream.finish())
        return (text, True) if found else (text + self._held, False)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
