"""A trained head drafts in one pass: all tokens at once, whatever is guessed for those before.

It keeps and reads what `EagleDrafter` does. Its masks lie behind the root's place in its own cache, where the next
draft writes the text.

Legend: B rows, K guesses, N tokens that the head can guess, F nodes of a level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compile.attention import Branches
from sharesd.drafters.base import Drafting
from sharesd.drafters.eagle.drafter import EagleDrafter, HeadGuesser
from sharesd.drafters.heads.head import each
from sharesd.drafters.parallel.head import Parallel
from sharesd.kvcache.static import StaticKVCache
from sharesd.speculation.draft_tree import DraftTree, Shape


class ParallelDrafter(EagleDrafter):
    """A head whose guesses, as chains or trees, take one pass."""

    name = "parallel"
    at_once = True

    def __init__(self, head: Parallel, target: StaticKVCache, *, shapes: Sequence[Shape], **options: Any) -> None:
        """As `EagleDrafter`; of the `shapes` those that are no deeper than the head guesses."""
        shapes = [shape for shape in shapes if shape.depth <= head.config.draft_length]
        super().__init__(head, target, shapes=shapes, **options)
        self._depth = self._deepest = max(shape.depth for shape in shapes)

    def draft(self, drafting: Drafting, shape: Shape) -> DraftTree:
        self._depth = shape.depth
        return super().draft(drafting, shape)

    def _guesser(self, replayed: bool, *reading: Any) -> _PassGuesser:
        return _PassGuesser(*reading, most=self._deepest, depth=lambda: self._deepest if replayed else self._depth)


class _PassGuesser(HeadGuesser):
    """The head as `sharesd.drafters.draft_stepper.Guesser`, which has guessed everything when it starts."""

    def __init__(self, head: Parallel, *reading: Any, most: int, depth: Callable[[], int]) -> None:
        """`depth`: how many tokens are guessed, at most `most`."""
        super().__init__(head, *reading)
        self._head, self._depth, num_tokens = head.steps, depth, head.config.draft_vocab_size
        self._logits_BKN = torch.zeros(len(self.root_at_B), most, num_tokens, **head.place)

    def start(self) -> Tensor:
        depth = self._depth()
        self._logits_BKN[:, :depth] = self._head.guess(*self._news(), depth)
        return self._logits_BKN[:, :1]

    def go_on(self, tokens_BF: Tensor, branches: Branches | None = None) -> Tensor:
        """Logits [B, 1, N], which are the same behind all nodes of a level."""
        if branches is None:
            self.next_at_B += 1
            level_B = self.next_at_B - self.root_at_B - 1
        else:
            level_B = branches.depth_BT[:, 0] + 1
        return self._logits_BKN.gather(1, each(level_B[:, None], self._logits_BKN))
