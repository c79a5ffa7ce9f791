"""Text of tokens that come one after another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharesd.models.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextStream:
    """Incremental decoding: text that later tokens can no longer change.

    All pieces and the rest, joined, equal `decode` of all ids. Held back are incomplete UTF-8 sequences and
    runs of byte tokens, which decode together. Each step decodes only the last pieces, for the spaces between them.
    """

    MAX_IDS = 12
    """Tokens that may be decoded again; beyond, the last piece alone."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []  # of the last released pieces, and what came after them
        self._num_shown = 0  # how many of them are released
        self._shown = ""  # their text

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; return the text that they complete, perhaps none."""
        self._ids += ids
        text = self._decode(self._ids)
        if text.endswith("\ufffd") or (self._tokenizer.has_bytes and self._ends_in_byte()):
            return ""
        piece = text[len(self._shown) :]
        if piece:
            if len(self._ids) > self.MAX_IDS:
                self._ids = self._ids[self._num_shown :]
                text = self._decode(self._ids)
            self._num_shown, self._shown = len(self._ids), text
        return piece

    def finish(self) -> str:
        """Return the text still held back; nothing may be added after it."""
        return self._decode(self._ids)[len(self._shown) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)

    def _ends_in_byte(self) -> bool:
        """Return True if the last token that decoding keeps is a byte."""
        for i in reversed(self._ids):
            token = self._tokenizer.token(i)
            if token is not None and not (self._skip and i in self._tokenizer.special_ids):
                return _BYTE_TOKEN.fullmatch(token) is not None
        return False
