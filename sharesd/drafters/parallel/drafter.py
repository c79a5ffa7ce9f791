"""Drafter of parallel heads: all tokens in one pass.

KV of masks is written after the root's slot, where the next draft overwrites it. Legend: B rows, K tokens of a draft, N
tokens of the draft vocabulary, F nodes of a level.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from sharesd.drafters.base import BuildInputs, DraftContext
from sharesd.drafters.eagle.drafter import EagleDrafter, HeadStepper, build_head_drafter
from sharesd.drafters.heads.head import each
from sharesd.drafters.parallel.head import Parallel
from sharesd.field_types import DefaultLimit
from sharesd.kvcache.static import StaticKVCache
from sharesd.speculation.draft_tree import DraftShape, DraftTree

log = logging.getLogger(__name__)


class ParallelDrafter(EagleDrafter):
    """Drafter around a parallel head: a chain or tree is drafted in one pass."""

    name = "parallel"
    single_pass = True

    def __init__(self, head: Parallel, target: StaticKVCache, *, shapes: Sequence[DraftShape], **options: Any) -> None:
        """Set up as `EagleDrafter`, without shapes deeper than the head."""
        shapes = [shape for shape in shapes if shape.depth <= head.config.draft_length]
        super().__init__(head, target, shapes=shapes, **options)
        self._depth = self._max_depth = max(shape.depth for shape in shapes)

    def draft(self, context: DraftContext, shape: DraftShape) -> DraftTree:
        self._depth = shape.depth
        return super().draft(context, shape)

    def _stepper(self, replayed: bool, *reading: Any) -> _ParallelStepper:
        return _ParallelStepper(
            *reading, max_depth=self._max_depth, depth=lambda: self._max_depth if replayed else self._depth
        )


class _ParallelStepper(HeadStepper):
    """Stepper whose first step drafts all tokens."""

    def __init__(self, head: Parallel, *reading: Any, max_depth: int, depth: Callable[[], int]) -> None:
        """`depth`: number of tokens of a draft, at most `max_depth`."""
        super().__init__(head, *reading)
        self._head, self._depth, num_tokens = head.steps, depth, head.config.draft_vocab_size
        self._logits_BKN = torch.zeros(len(self.root_pos_B), max_depth, num_tokens, **head.place)

    def start(self) -> Tensor:
        depth = self._depth()
        self._logits_BKN[:, :depth] = self._head.propose(*self._read_inputs(), depth)
        return self._logits_BKN[:, :1]

    def step(self, tokens_BF: Tensor, tree_mask: TreeAttentionMask | None = None) -> Tensor:
        """Return logits [B, 1, N], equal after all nodes of a level."""
        if tree_mask is None:
            self.next_pos_B += 1
            level_B = self.next_pos_B - self.root_pos_B - 1
        else:
            level_B = tree_mask.depth_BT[:, 0] + 1
        return self._logits_BKN.gather(1, each(level_B[:, None], self._logits_BKN))


def build(inputs: BuildInputs) -> EagleDrafter:
    """Build the drafter; raise ValueError for drafts longer than the head's."""
    head, config = inputs.heads[ParallelDrafter.name], inputs.config
    assert isinstance(head, Parallel)
    max_depth = head.config.draft_length
    depth = config.explicit_tree[1] if config.explicit_tree else config.num_draft or 1
    if depth > max_depth:
        raise ValueError(f"draft depth {depth} exceeds the head's maximum of {max_depth}; lower it")
    chosen = config.num_draft is None and config.explicit_tree is None
    if chosen and config.max_draft > max_depth and not isinstance(config.max_draft, DefaultLimit):
        log.warning(
            "max_draft is %d and the head of mode %s drafts at most %d tokens; using %d",
            config.max_draft,
            ParallelDrafter.name,
            max_depth,
            max_depth,
        )
    return build_head_drafter(ParallelDrafter, inputs)
