"""A trained head drafts step by step, which looks into the target's KV (GLIDE).

It needs nothing of the target's that is not in its cache anyway. What it keeps of its own are keys and values of
tokens, by the places that `EagleDrafter` has.

Its paper adds candidates where the head is unsure (CaPE): here trees do, whose nodes are the likeliest of all.

Legend: B rows, S slots, F tokens that are read in one step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compile.attention import Branches
from sharesd.drafters.eagle.drafter import EagleDrafter, HeadGuesser
from sharesd.drafters.glide.head import Glide
from sharesd.kvcache.static import StaticKVCache


class GlideDrafter(EagleDrafter):
    """A head that reads tokens and looks into the target's KV."""

    name = "glide"

    def _read(self, tokens_BS: Tensor, target: StaticKVCache, num: int, own: StaticKVCache) -> None:
        self.head.read(tokens_BS, num, own)

    def _guesser(self, replayed: bool, *reading: Any) -> _LookGuesser:
        return _LookGuesser(*reading)


class _LookGuesser(HeadGuesser):
    """The head as `draft_stepper.Guesser`: all steps attend to the target's KV below the root."""

    def __init__(self, head: Glide, *reading: Any) -> None:
        super().__init__(head, *reading)
        self._head = head.steps

    def start(self) -> Tensor:
        logits_B1K = self._head.read(self._tokens_BS, self._begin(), self._ahead, self._target)
        assert logits_B1K is not None
        self._ahead.lengths.copy_(self.root_at_B)
        return logits_B1K

    def go_on(self, tokens_BF: Tensor, branches: Branches | None = None) -> Tensor:
        logits_BFK = self._head.go_on(tokens_BF, self._ahead, self._target, branches)
        if branches is None:
            self._ahead.lengths += 1
            self.next_at_B += 1
        return logits_BFK
