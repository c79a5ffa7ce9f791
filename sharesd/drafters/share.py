"""The target drafts for itself: its linears switched to quantized weights, over the target's own KV cache.

The draft reads the target's verified KV of older tokens and writes its own into the slots above, which the verify
step overwrites. Needs no KV of its own and no catching up.

In long contexts a draft step would take longer for the KV than for its weights. So it may look at recent tokens and the
first few only, like StreamingLLM (Xiao et al. 2023, arXiv 2309.17453); the verify step, which reads everything, makes
up for wrong guesses (TriForce, Sun et al. 2024, arXiv 2404.11912; MagicDec, Chen et al. 2024, arXiv 2408.11049).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quant.linear import Switch
from sharesd.cache import StaticKVCache
from sharesd.drafters.grown import grow_draft
from sharesd.models.base import CausalModel
from sharesd.policy import Policy
from sharesd.sampler import Sampler
from sharesd.tree import DraftTree, Shape, Verdict

AUTO_WINDOW = 256
"""Tokens that a draft step looks back where nobody says otherwise, in contexts of more than four times as many."""


def auto_window(context: int) -> int:
    """Tokens that a draft step looks back in a context of so many; 0 = all."""
    return AUTO_WINDOW if context > 4 * AUTO_WINDOW else 0


class ShareDrafter:
    """Self-drafting through the precision switch."""

    name = "share"
    on_host = False
    reads = False

    def __init__(
        self,
        model: CausalModel,
        cache: StaticKVCache,
        switch: Switch,
        *,
        shapes: Sequence[Shape],
        low_bytes: int,
        top: int = 1,
        window: int | None = 0,
    ) -> None:
        """`top` is the number of nodes that a tree expands on each level, and of their children. `window` is how many
        tokens a draft step looks back; 0 = all, None = as the context asks for.
        """
        self.model, self.cache, self.switch = model, cache, switch
        self.shapes, self._top, self._deepest, self._low_bytes = shapes, top, shapes[-1].depth, low_bytes
        self.window = window
        self._context = 0  # tokens of the longest row

    def begin(self, prompts: list[list[int]], num_kept: list[int], sampler: Sampler, policy: Policy) -> None:
        self._sampler, self._context = sampler, max(map(len, prompts))

    def catch_up(self, texts: list[list[int]], idle: bool) -> None:
        self._context = max(map(len, texts))  # nothing to read: the target's own steps have written it

    def draft(self, root_B: Tensor, shape: Shape) -> DraftTree:
        window = auto_window(self._context) if self.window is None else self.window
        with self.switch.use_low(), self.cache.looking_back(window):
            tree = grow_draft(self.model, self.cache, root_B[:, None], shape, self._top, self._deepest, self._sampler)
        return tree._replace(drafter=self.name)

    def commit(self, root_B: Tensor, tree: DraftTree, verdict: Verdict, logits_BTV: Tensor) -> None:
        pass

    def extra_bytes(self) -> tuple[int, int]:
        return self._low_bytes, 0
