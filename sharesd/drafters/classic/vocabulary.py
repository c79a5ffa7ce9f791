"""Second model whose vocabulary is padded to another size than the target's.

Legend: B rows, T tokens, R of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compile.attention import TreeAttentionMask
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel


class CommonVocabulary:
    """A model limited to the ids that it shares with the target.

    Its logits are for ids 0 to before `vocab_size`, the smaller one of both. Other ids of a text are read as the last
    one.
    """

    def __init__(self, model: CausalModel, target_vocab_size: int) -> None:
        self._model, self._max_id = model, model.vocab_size - 1
        self._reads_all = model.vocab_size >= target_vocab_size
        self._drafts_all = model.vocab_size <= target_vocab_size
        self.vocab_size = min(model.vocab_size, target_vocab_size)
        self.name, self.max_context, self.eos_ids = model.name, model.max_context, model.eos_ids
        self.takes_trees, self.step_widths = model.takes_trees, model.step_widths

    def new_cache(self, batch: int, slots: int, taps: Sequence[int] = ()) -> StaticKVCache:
        """See `sharesd.models.base.CausalModel.new_cache`."""
        return self._model.new_cache(batch, slots, taps)

    def forward(
        self,
        tokens_BT: Tensor,
        cache: StaticKVCache,
        keep_BR: Tensor | None = None,
        tree_mask: TreeAttentionMask | None = None,
    ) -> Tensor:
        """See `sharesd.models.base.CausalModel.forward`."""
        tokens_BT = tokens_BT if self._reads_all else tokens_BT.clamp(max=self._max_id)
        logits_BRV = self._model.forward(tokens_BT, cache, keep_BR, tree_mask)
        return logits_BRV if self._drafts_all else logits_BRV[..., : self.vocab_size]
