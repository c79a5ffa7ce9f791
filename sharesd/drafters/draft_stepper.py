"""Step-by-step drafting with a model, as chains and trees use it.

Legend: B rows, F tokens that are read in one step, V tokens of the drafter's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel


class DraftStepper(Protocol):
    """Stepper that drafts after roots; tensors keep addresses, for replay."""

    root_pos_B: Tensor
    """int64: position of each root."""
    next_pos_B: Tensor
    """int64: position of a chain's next token; of trees, of the first level."""
    ids: Tensor | None
    """int64 [V]: the target's ids of a reduced vocabulary; None = all."""
    logit_noise: float | None
    """Noise of the target's quantized copy, see `calibration.quantization_logit_noise`; None: another model."""

    def start(self) -> Tensor:
        """Read unread tokens and the root; return first logits [B, 1, V]."""
        ...

    def step(self, tokens_BF: Tensor, tree_mask: TreeAttentionMask | None = None) -> Tensor:
        """Read a chain's next draft token (F = 1), or tree nodes.

        Returns the logits [B, F, V] after them, or [B, 1, V] if they are the same after all.
        """
        ...


class ModelStepper:
    """Stepper of a language model; drafts lie above the cache's lengths."""

    def __init__(
        self,
        model: CausalModel,
        cache: StaticKVCache,
        lead: Callable[[], Tensor],
        *,
        recent: int = 0,
        ids: Tensor | None = None,
        logit_noise: float | None = None,
    ) -> None:
        """`lead` returns first tokens [B, T]; `recent`: tokens attended to, 0: all.

        `ids`: see `DraftStepper`.
        """
        self._model, self._lead, self._ahead = model, lead, cache.draft_view(recent)
        self.ids = ids
        self.logit_noise = logit_noise
        self.root_pos_B, self.next_pos_B = cache.lengths, self._ahead.lengths

    def start(self) -> Tensor:
        tokens_BT = self._lead()
        B, T = tokens_BT.shape
        torch.sub(self.root_pos_B, T - 1, out=self.next_pos_B)
        last_B1 = torch.full((B, 1), T - 1, device=tokens_BT.device) if T > 1 else None
        logits_B1V = self._model.forward(tokens_BT, self._ahead, last_B1)
        self.next_pos_B += T
        return logits_B1V

    def step(self, tokens_BF: Tensor, tree_mask: TreeAttentionMask | None = None) -> Tensor:
        logits_BFV = self._model.forward(tokens_BF, self._ahead, tree_mask=tree_mask)
        if tree_mask is None:
            self.next_pos_B += 1
        return logits_BFV

    def move(self, root: int, first: int, num: int) -> None:
        """Move one row's accepted draft KV; slots count from the last root's."""
        places_T = torch.tensor([root, *range(first, first + num)], device=self.root_pos_B.device)
        path_BT = places_T + (self.next_pos_B - self.root_pos_B)[:, None]
        self.next_pos_B.copy_(self.root_pos_B)
        self._ahead.compact(path_BT, torch.full_like(self.root_pos_B, 1 + num))
        self.next_pos_B += 1
