"""Protocol of models, native or fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from compile.attention import TreeAttentionMask
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
        """Return an empty cache in the model's dtype and on its device.

        `taps`: depths whose hidden states it keeps (see `StaticKVCache`); ValueError if the model has none to give.
        """
        ...

    def forward(
        self,
        tokens_BT: Tensor,
        cache: StaticKVCache,
        keep_BR: Tensor | None = None,
        tree_mask: TreeAttentionMask | None = None,
    ) -> Tensor:
        """Return logits [B, T, V] of tokens at positions lengths..lengths+T-1.

        With `keep_BR`, return [B, R, V] of these tokens alone. Writes KV into slots lengths..lengths+T-1 and does not
        change `cache.lengths`. With `tree_mask` the tokens form a tree, and positions go by depth; only models with
        `takes_trees` support that.
        """
        ...
