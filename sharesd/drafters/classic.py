"""A second model drafts (Leviathan et al. 2022; Chen et al. 2023): a smaller one, or a quantized copy of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sharesd.decoding.policy import Policy
from sharesd.decoding.prefill import prefill
from sharesd.decoding.tree import DraftTree, Shape, Verdict
from sharesd.drafters.base import Drafting
from sharesd.drafters.grown import ModelDraft
from sharesd.models.base import CausalModel


class ClassicDrafter:
    """A model with its own KV cache.

    It may never have read the last token that was accepted, a leaf of its draft. Instead of tracking that, the first
    step of every draft reads two tokens, the one before the root and the root: of fixed shape, and exact either way.
    """

    name = "classic"
    on_host = False
    reads = True

    def __init__(
        self, model: CausalModel, *, batch: int, slots: int, shapes: Sequence[Shape], weight_bytes: int, top: int = 1
    ) -> None:
        """`top` is the number of nodes that a tree expands on each level, and of their children."""
        self.model, self.shapes, self._top, self._weight_bytes = model, shapes, top, weight_bytes
        self.trees = shapes[-1].is_tree
        self.cache = model.new_cache(batch, slots)
        self._before_B = torch.zeros_like(self.cache.lengths)  # the token before the root

    def begin(self, prompts: list[list[int]], num_kept: list[int], drafting: Drafting, policy: Policy) -> None:
        self._drafting = drafting
        # Slots below the kept prefix are right but for its last token, which may never have been read.
        prefill(self.model, self.cache, prompts, [max(0, kept - 1) for kept in num_kept])
        self._before_B.copy_(torch.tensor([row[-1] if row else 0 for row in prompts]))
        self._read = [max(0, len(row) - 1) for row in prompts]

    def catch_up(self, texts: list[list[int]], idle: bool) -> None:
        known = [row[:-1] for row in texts]  # all but the root
        if idle:
            with torch.inference_mode():
                prefill(self.model, self.cache, known, self._read)
                self._before_B.copy_(torch.tensor([row[-1] for row in known]))
        self._read = [len(row) - 1 for row in known]

    def draft(self, shape: Shape) -> DraftTree:
        drafting = self._drafting
        if self not in drafting.kept:
            drafting.kept[self] = ModelDraft(
                self.model,
                self.cache,
                drafting,
                lambda: torch.stack([self._before_B, drafting.root_B], 1),
                shapes=self.shapes,
                top=self._top,
            )
        return drafting.kept[self].draft(shape)._replace(drafter=self.name)

    def commit(self, root_B: Tensor, tree: DraftTree, verdict: Verdict, logits_BTV: Tensor) -> None:
        if tree.places is not None:
            self.cache.keep(tree.places.gather(1, verdict.path), verdict.num_new)
        self.cache.lengths += verdict.num_new
        history_BT = torch.cat([self._before_B[:, None], root_B[:, None], verdict.tokens], 1)
        self._before_B.copy_(history_BT.gather(1, verdict.num_new[:, None])[:, 0])

    def told(self, rows: list[list[int]]) -> None:
        pass

    def extra_bytes(self) -> tuple[int, int]:
        return self._weight_bytes, self.cache.nbytes
