"""The target drafts for itself: its linears switched to quantized weights, over the target's own KV cache.

The draft reads the target's verified KV for all older tokens and writes its own into the slots above, which the verify
step overwrites. Needs no KV of its own and no catching up.
"""

from __future__ import annotations

from torch import Tensor

from quant.linear import Switch
from sharesd.cache import StaticKVCache
from sharesd.drafters.chain import draft_chain
from sharesd.models.base import CausalModel
from sharesd.policy import Policy
from sharesd.sampler import Sampler
from sharesd.tree import DraftTree, Verdict


class ShareDrafter:
    """Self-drafting through the precision switch."""

    name = "share"
    on_host = False
    reads = False

    def __init__(
        self, model: CausalModel, cache: StaticKVCache, switch: Switch, *, num_draft: int, low_bytes: int
    ) -> None:
        self.model, self.cache, self.switch = model, cache, switch
        self.num_draft, self._low_bytes = num_draft, low_bytes

    def begin(self, prompts: list[list[int]], num_kept: list[int], sampler: Sampler, policy: Policy) -> None:
        self._sampler = sampler

    def catch_up(self, texts: list[list[int]], idle: bool) -> None:
        pass  # the target's own steps have written what it reads

    def draft(self, root_B: Tensor, num_draft: int) -> DraftTree:
        with self.switch.use_low():
            tree = draft_chain(self.model, self.cache, root_B[:, None], num_draft, self._sampler)
        return tree._replace(drafter=self.name)

    def commit(self, root_B: Tensor, tree: DraftTree, verdict: Verdict, logits_BTV: Tensor) -> None:
        pass

    def extra_bytes(self) -> tuple[int, int]:
        return self._low_bytes, 0
