"""Self-drafting: the target with quantized linears, over its own KV cache.

The draft reads the target's verified KV of older tokens and writes its own into the slots above, which the verify step
overwrites. In long contexts it may read recent tokens and the first few only, like StreamingLLM (Xiao et al. 2023,
arXiv 2309.17453); the verify step corrects wrong draft tokens (TriForce, Sun et al. 2024, arXiv 2404.11912; MagicDec,
Chen et al. 2024, arXiv 2408.11049).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from compile.attention import reads_live_slots
from quant.switch_linear import Switch
from sharesd.drafters.base import BuildInputs, DraftContext, Drafter
from sharesd.drafters.chain_draft import ModelStepper
from sharesd.drafters.selection import options_of
from sharesd.drafters.tree_draft import DraftGenerator
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.speculation.draft_policy import WINDOW_CONTEXTS
from sharesd.speculation.draft_tree import DraftShape, DraftTree, VerifyResult, with_windows

if TYPE_CHECKING:
    from sharesd.drafters.async_tree_draft import AsyncTreeDraft

DRAFT_WINDOW = 256
"""Recent tokens that draft steps may read instead of all."""


class ShareDrafter(Drafter):
    """Self-drafting through the precision switch.

    The switch is a flag on the host, which each switched linear reads when it is called; a captured graph keeps the
    value that it had at the capture. Inside `switch.quantized_weights()` each linear of the target multiplies by its
    quantized copy. So the same model, over the same cache, is the drafter there and the target elsewhere.
    """

    name = "share"
    supports_async = True

    def __init__(
        self,
        model: CausalModel,
        cache: StaticKVCache,
        switch: Switch,
        *,
        shapes: Sequence[DraftShape],
        quantized_bytes: int,
        branching: int = 1,
        logit_noise: float | None = None,
        continues_trees: bool = False,
        prior: float = 0.0,
    ) -> None:
        """`model`: the target's module, with the steps compiled for its quantized linears.

        `continues_trees`: keep growing a tree during verification, while offloaded weights of the target are loading.
        """
        self.model, self.cache, self.switch = model, cache, switch
        self.shapes, self._branching, self._quantized_bytes = shapes, branching, quantized_bytes
        self._logit_noise, self.prior = logit_noise, prior
        self._tree_cls: type[AsyncTreeDraft] | None = None
        if continues_trees:
            from sharesd.drafters.async_tree_draft import AsyncTreeDraft

            self._tree_cls = AsyncTreeDraft
        self.trees = shapes[-1].is_tree

    def draft(self, context: DraftContext, shape: DraftShape) -> DraftTree:
        # There is one generator per window. It drafts chains by `ChainDraft`, and trees by `TreeDraft`.
        key = (self, shape.window)
        if key not in context.generators:
            context.generators[key] = DraftGenerator(
                ModelStepper(
                    self.model,
                    self.cache.rows(context.first, context.end),
                    lambda: context.root_B[:, None],
                    recent=shape.window,
                    logit_noise=self._logit_noise,
                ),
                context,
                shapes=self.shapes,
                branching=self._branching,
                tree_cls=self._tree_cls,
            )
        with self.switch.quantized_weights():
            tree: DraftTree = context.generators[key].draft(shape)
        continue_fn = tree.continue_fn and partial(self._step, tree.continue_fn)
        return tree._replace(continue_fn=continue_fn).with_record(window=shape.window)

    def _step(self, continue_fn: Callable[[], bool]) -> bool:
        with self.switch.quantized_weights():
            return continue_fn()

    def commit(self, context: DraftContext, tree: DraftTree, verified: VerifyResult, logits_BTV: Tensor) -> None:
        # The verify step has written the target's own KV of all accepted tokens, which the next draft reads. Only trees
        # that keep growing during verification need an update here.
        if tree.continue_fn is not None:
            assert self._tree_cls is not None
            trees = context.generators[self, tree.record.window].tree
            assert isinstance(trees, self._tree_cls)
            trees.committed(verified)

    def step_model(self) -> CausalModel:
        return self.model

    def extra_bytes(self) -> tuple[int, int]:
        """Return bytes of the quantized weights, and of KV (none)."""
        return self._quantized_bytes, 0


def build(inputs: BuildInputs) -> ShareDrafter:
    quant = inputs.config.quant
    return ShareDrafter(
        inputs.quantized_step,
        inputs.cache,
        inputs.switch,
        shapes=with_windows(inputs.shapes, _windows(inputs)),
        quantized_bytes=inputs.quantized_bytes,
        branching=inputs.branching,
        logit_noise=quant.format.logit_noise(quant.bits),
        continues_trees=inputs.continues_trees,
        prior=inputs.quantized_prior,
    )


def _windows(inputs: BuildInputs) -> tuple[int, ...]:
    """Return numbers of recent tokens for draft steps; 0 = all."""
    given, target = options_of(inputs.config, "share").draft_window, inputs.target
    if isinstance(given, int):
        if not isinstance(target, Decoder):
            raise ValueError(f"draft_window is {given} and {target.name} attends to all tokens; use off or auto")
        return (given,)
    # If attention masks what it does not need, and reads it all the same, a window gains nothing.
    gains = isinstance(target, Decoder) and reads_live_slots(inputs.device, inputs.dtype, target.config.head_dim)
    long_enough = inputs.max_context >= WINDOW_CONTEXTS * DRAFT_WINDOW
    return (0, DRAFT_WINDOW) if given == "auto" and gains and long_enough else (0,)
