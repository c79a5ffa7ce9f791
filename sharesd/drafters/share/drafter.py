"""The target drafts for itself: its linears switched to quantized weights, over the target's own KV cache.

The draft reads the target's verified KV of older tokens and writes its own into the slots above, which the verify
step overwrites. Needs no KV of its own and no catching up.

In long contexts a draft step would take longer for the KV than for its weights. So it may look at recent tokens and the
first few only, like StreamingLLM (Xiao et al. 2023, arXiv 2309.17453); the verify step, which reads everything, makes
up for wrong guesses (TriForce, Sun et al. 2024, arXiv 2404.11912; MagicDec, Chen et al. 2024, arXiv 2408.11049).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from torch import Tensor

from quant.switch_linear import Switch
from sharesd.drafters.async_tree_draft import OnwardDraft
from sharesd.drafters.base import NOTHING, Drafting
from sharesd.drafters.draft_stepper import ModelGuesser
from sharesd.drafters.tree_draft import ModelDraft
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.speculation.draft_policy import FIRST_ALPHAS
from sharesd.speculation.draft_tree import DraftTree, Shape, Verdict


class ShareDrafter:
    """Self-drafting through the precision switch."""

    name = "share"
    on_host = False
    reads = False
    ahead = True
    follows = False
    first_alphas = FIRST_ALPHAS
    at_once = False

    def __init__(
        self,
        model: CausalModel,
        cache: StaticKVCache,
        switch: Switch,
        *,
        shapes: Sequence[Shape],
        low_bytes: int,
        top: int = 1,
        spread: float | None = None,
        goes_on: bool = False,
    ) -> None:
        """`top` is the number of nodes that a tree expands on each level, and of their children. `spread`: see
        Guesser. `goes_on`: trees grow on while the target waits for its weights.
        """
        self.model, self.cache, self.switch = model, cache, switch
        self.shapes, self._top, self._low_bytes = shapes, top, low_bytes
        self._spread, self._goes_on = spread, goes_on
        self.trees = shapes[-1].is_tree

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        pass

    def read(self, row: int, tokens: list[int]) -> None:
        pass  # the target's own steps write what it reads

    def missed(self, texts: Mapping[int, list[int]]) -> int:
        return 0

    def rehearse(self, drafting: Drafting, num: int) -> bool:
        return False

    def catch_up(
        self,
        texts: Mapping[int, list[int]],
        idle: bool,
        plain: Collection[int] = (),
        coming: Mapping[int, int] = NOTHING,
    ) -> None:
        pass

    def draft(self, drafting: Drafting, shape: Shape) -> DraftTree:
        key = (self, shape.recent)
        if key not in drafting.kept:
            drafting.kept[key] = ModelDraft(
                ModelGuesser(
                    self.model,
                    self.cache.rows(drafting.first, drafting.end),
                    lambda: drafting.root_B[:, None],
                    recent=shape.recent,
                    spread=self._spread,
                ),
                drafting,
                shapes=self.shapes,
                top=self._top,
                grower=OnwardDraft if self._goes_on else None,
            )
        with self.switch.use_low():
            tree = drafting.kept[key].draft(shape)
        onward = tree.onward and partial(self._go_on, tree.onward)
        return tree._replace(drafter=self.name, recent=shape.recent, onward=onward)

    def _go_on(self, onward: Callable[[], bool]) -> bool:
        with self.switch.use_low():
            return onward()

    def commit(self, drafting: Drafting, tree: DraftTree, verdict: Verdict, logits_BTV: Tensor) -> None:
        if tree.onward is not None:
            trees = drafting.kept[self, tree.recent].tree
            assert isinstance(trees, OnwardDraft)
            trees.committed(verdict)

    def told(self, rows: list[list[int]]) -> None:
        pass

    def forget(self) -> None:
        pass

    def extra_bytes(self) -> tuple[int, int]:
        return self._low_bytes, 0
