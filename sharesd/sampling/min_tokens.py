"""Constraint of a text's length: no early end token.

Legend: T = N + 1 positions of a round (the root and N nodes), W words of 32 tokens each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Constraint(Protocol):
    """Tokens allowed after a text; `sharesd.sampling.grammar.Matcher` describes the members."""

    @property
    def limit(self) -> str | None: ...

    def fill_mask(
        self, grammar_mask_TW: Tensor, tokens: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> list[int]: ...

    def advance(self, tokens: Sequence[int]) -> int: ...


class MinTokens:
    """Constraint without end tokens before `num_tokens` tokens, within that of `inner`."""

    def __init__(self, num_tokens: int, end_ids: Collection[int], inner: Constraint | None = None) -> None:
        """If `inner` allows end tokens alone, none is left."""
        self._num_left, self._end_ids, self._inner = num_tokens, end_ids, inner

    @property
    def limit(self) -> str | None:
        return None if self._inner is None else self._inner.limit

    def fill_mask(self, grammar_mask_TW: Tensor, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> list[int]:
        lost = [] if self._inner is None else self._inner.fill_mask(grammar_mask_TW, tokens, parents)
        if self._num_left <= 0:
            return lost
        allowed_W = _bits_without(self._end_ids, grammar_mask_TW.shape[1])
        depths = [0]
        for parent in parents:
            depths.append(depths[1 + parent] + 1)
        for row, depth in enumerate(depths):
            if depth < self._num_left:
                grammar_mask_TW[row] &= allowed_W
        return lost

    def advance(self, tokens: Sequence[int]) -> int:
        self._num_left -= len(tokens)
        return len(tokens) if self._inner is None else self._inner.advance(tokens)


def _bits_without(ids: Collection[int], num_words: int) -> Tensor:
    """Return bits [W] int32 of all tokens but these."""
    words = [0xFFFFFFFF] * num_words
    for i in ids:
        if i < 32 * num_words:
            words[i // 32] &= ~(1 << (i % 32))
    return torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32)
