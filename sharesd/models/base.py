"""What the engine asks of a model, native or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from compile.attention import Branches
from sharesd.kvcache.static import StaticKVCache


class CausalModel(Protocol):
    """A causal language model over a static KV cache."""

    name: str  # for logs and reports, e.g. "llama (native)"
    vocab_size: int
    max_context: int  # tokens which the checkpoint's positions allow
    eos_ids: tuple[int, ...]
    takes_trees: bool
    step_widths: frozenset[int]  # numbers of tokens for which steps are compiled; prompts run plainly and avoid them

    def new_cache(self, batch: int, slots: int, taps: Sequence[int] = ()) -> StaticKVCache:
        """An empty cache in the model's dtype and on its device, which keeps the hidden states of these depths (see
        `StaticKVCache`). ValueError for taps where a model hands out none.
        """
        ...

    def forward(
        self,
        tokens_BT: Tensor,
        cache: StaticKVCache,
        keep_BR: Tensor | None = None,
        branches: Branches | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of the tokens at positions lengths..lengths+T-1, or [B, R, V] of the rows named by keep_BR.

        Writes KV into slots lengths..lengths+T-1 and leaves `cache.lengths` alone. With `branches` the tokens form a
        tree, and positions go by depth; only models with `takes_trees` do that.
        """
        ...
