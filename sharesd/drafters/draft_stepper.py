"""What guesses, as chains and trees of guesses use it.

Legend: B rows, F tokens that are read in one step, V tokens that can be guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from compile.attention import Branches
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel


class Guesser(Protocol):
    """Reads each row's root and then guesses, one step after the other. Its tensors keep their place, so that steps can
    be replayed.
    """

    root_at_B: Tensor  # int64: the position of each root
    next_at_B: Tensor  # int64: that of a chain's next guess; of trees that of the first level
    ids: Tensor | None  # int64 [V]: the target's ids of the tokens that logits are about; None = all
    spread: float | None  # of a target with rounded weights, see `confidence.spread_of`; None: another model

    def start(self) -> Tensor:
        """Read the root, and what leads up to it and has not been read yet. Logits [B, 1, V] of the first guess."""
        ...

    def go_on(self, tokens_BF: Tensor, branches: Branches | None = None) -> Tensor:
        """Read guesses: the next one of a chain (F = 1), or nodes of a tree. Logits [B, F, V] behind them, or [B, 1, V]
        where they are the same behind all.
        """
        ...


class ModelGuesser:
    """Any causal language model over a KV cache, which is written above its lengths, but for tokens before the root."""

    def __init__(
        self,
        model: CausalModel,
        cache: StaticKVCache,
        lead: Callable[[], Tensor],
        *,
        recent: int = 0,
        spread: float | None = None,
    ) -> None:
        """`lead` gives the tokens [B, T] of the first step, the last of which is the root, at the cache's length.
        `recent`: how far steps look back, 0 = all. `spread`: see Guesser.
        """
        self._model, self._lead, self._ahead = model, lead, cache.ahead(recent)
        self.ids: Tensor | None = None
        self.spread = spread
        self.root_at_B, self.next_at_B = cache.lengths, self._ahead.lengths

    def start(self) -> Tensor:
        tokens_BT = self._lead()
        B, T = tokens_BT.shape
        torch.sub(self.root_at_B, T - 1, out=self.next_at_B)
        last_B1 = torch.full((B, 1), T - 1, device=tokens_BT.device) if T > 1 else None
        logits_B1V = self._model.forward(tokens_BT, self._ahead, last_B1)
        self.next_at_B += T
        return logits_B1V

    def go_on(self, tokens_BF: Tensor, branches: Branches | None = None) -> Tensor:
        logits_BFV = self._model.forward(tokens_BF, self._ahead, branches=branches)
        if branches is None:
            self.next_at_B += 1
        return logits_BFV

    def move(self, root: int, first: int, num: int) -> None:
        """After guesses were accepted, `root_at` being further on: what was read at place `root` is the root now, and
        the `num` places from `first` on are those behind it. Places are slots behind the last root's. Of one row.
        """
        places_T = torch.tensor([root, *range(first, first + num)], device=self.root_at_B.device)
        path_BT = places_T + (self.next_at_B - self.root_at_B)[:, None]
        self.next_at_B.copy_(self.root_at_B)
        self._ahead.keep(path_BT, torch.full_like(self.root_at_B, 1 + num))
        self.next_at_B += 1
