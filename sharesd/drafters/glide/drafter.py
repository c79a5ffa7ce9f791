"""Drafter of GLIDE: a trained head that attends to the target's KV.

Instead of the paper's candidates for unsure tokens (CaPE) it drafts trees. Legend: B rows, S slots, F tokens that are
read in one step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compile.attention import TreeAttentionMask
from sharesd.drafters.base import BuildInputs
from sharesd.drafters.eagle.drafter import EagleDrafter, HeadStepper, build_head_drafter
from sharesd.drafters.glide.head import Glide
from sharesd.kvcache.static import StaticKVCache


class GlideDrafter(EagleDrafter):
    """Drafter around a GLIDE head."""

    name = "glide"

    def _read(self, tokens_BS: Tensor, target: StaticKVCache, num: int, own: StaticKVCache) -> None:
        self.head.read(tokens_BS, num, own)

    def _stepper(self, replayed: bool, *reading: Any) -> _CrossAttentionStepper:
        return _CrossAttentionStepper(*reading)


class _CrossAttentionStepper(HeadStepper):
    """Stepper whose steps attend to the target's KV below the root."""

    def __init__(self, head: Glide, *reading: Any) -> None:
        super().__init__(head, *reading)
        self._head = head.steps

    def start(self) -> Tensor:
        logits_B1K: Tensor | None = self._head.read(self._tokens_BS, self._begin(), self._draft_cache, self._target)
        assert logits_B1K is not None
        self._draft_cache.lengths.copy_(self.root_pos_B)
        return logits_B1K

    def step(self, tokens_BF: Tensor, tree_mask: TreeAttentionMask | None = None) -> Tensor:
        logits_BFK: Tensor = self._head.step(tokens_BF, self._draft_cache, self._target, tree_mask)
        if tree_mask is None:
            self._draft_cache.lengths += 1
            self.next_pos_B += 1
        return logits_BFK


def build(inputs: BuildInputs) -> EagleDrafter:
    return build_head_drafter(GlideDrafter, inputs)
