"""A trained head drafts in one pass: all tokens at once, whatever is guessed for those before.

It keeps and reads what `EagleDrafter` does. Its masks lie behind the root's place in its own cache, where the next
draft writes the text.

Legend: B rows, R places that are read, T = R + K - 1 with the masks, K guesses, N tokens that the head can guess, F
nodes, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compile.attention import Branches
from sharesd.decoding.cache import StaticKVCache
from sharesd.decoding.tree import DraftTree, Shape
from sharesd.drafters.base import Drafting
from sharesd.drafters.eagle import EagleDrafter, NewPlaces, each
from sharesd.models.heads.parallel import Parallel


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

    def _guesser(self, reader: NewPlaces, replayed: bool) -> _PassGuesser:
        return _PassGuesser(reader, self._deepest, lambda: self._deepest if replayed else self._depth)


class _PassGuesser:
    """The head as `sharesd.drafters.guesser.Guesser`, which has guessed everything when it starts."""

    def __init__(self, reader: NewPlaces, deepest: int, depth: Callable[[], int]) -> None:
        """`depth`: how many tokens are guessed, at most `deepest`."""
        self._head, self._reader, self._depth = reader.head, reader, depth
        self.root_at_B, self.next_at_B = reader.root_at_B, torch.zeros_like(reader.root_at_B)
        num_tokens = self._head.config.draft_vocab_size
        self._logits_BKN = torch.zeros(len(self.root_at_B), deepest, num_tokens, **self._head.place)

    def start(self) -> Tensor:
        tokens_BR, fused_BRD, root_B1 = self._reader.read()
        K, device = self._depth(), tokens_BR.device
        rows_T = torch.arange(tokens_BR.shape[1] + K - 1, device=device)
        ahead_BT = (rows_T - root_B1).clamp(0, K - 1)  # of shorter texts, what lies behind the masks nobody sees
        read_BT = rows_T.minimum(root_B1)
        assert isinstance(self._head, Parallel)
        states_BTD = self._head.look_ahead(
            tokens_BR.gather(1, read_BT), fused_BRD.gather(1, each(read_BT, fused_BRD)), ahead_BT, self._reader.ahead
        )
        guesses_BK = root_B1 + torch.arange(K, device=device)
        self._logits_BKN[:, :K] = self._head.draft_logits(states_BTD.gather(1, each(guesses_BK, states_BTD)))
        torch.add(self.root_at_B, 1, out=self.next_at_B)
        return self._head.widened(self._logits_BKN[:, :1])

    def go_on(self, tokens_BF: Tensor, branches: Branches | None = None) -> Tensor:
        """Logits [B, 1, V], which are the same behind all nodes of a level."""
        if branches is None:
            self.next_at_B += 1
            level_B = self.next_at_B - self.root_at_B - 1
        else:
            level_B = branches.depth_BT[:, 0] + 1
        return self._head.widened(self._logits_BKN.gather(1, each(level_B[:, None], self._logits_BKN)))
