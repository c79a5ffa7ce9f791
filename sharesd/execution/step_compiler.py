"""How steps of a runtime's models run: in the CPU kernel, compiled by Inductor, or as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from torch import Tensor

from compile.decoder_stack import NativeStack, Unsuited
from compile.inductor import CompiledBlocks, CompiledForms, CompiledMethods, CompiledModel
from multigpu.process_group import Group
from multigpu.tensor_parallel import WHOLE, GatheredLinear, SummedLinear, gather_columns, sum_parts
from quant.switch_linear import Switch
from sharesd import sampling
from sharesd.config import CompileMode
from sharesd.drafters.heads.head import Head
from sharesd.drafters.heads.native_step import native_head
from sharesd.execution.batch_invariance import check_compiled
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.models.prefill import PIECES

log = logging.getLogger(__name__)


class Steps:
    """What makes steps of models fast, in one way for all models of a runtime."""

    def __init__(self, how: CompileMode, *, asked: CompileMode, switch: Switch, group: Group | None) -> None:
        """`how` stands for what was `asked` for (auto); what has been asked for by name must do. `group`: the ranks
        among which some of the models are shared out.
        """
        self.how = how
        self._by_name = asked == how
        self._group = group
        self._low = partial(getattr, switch, "low")

    def of(
        self, model: CausalModel, widths: set[int], new_cache: Callable[[], StaticKVCache], draft_widths: set[int]
    ) -> CausalModel:
        """The model with its steps of these widths compiled, once its weights are as they run.

        `new_cache` and `draft_widths` matter to models of transformers alone: steps of all widths are tried out in such
        a cache. Raises Unsuited where the CPU kernel was asked for and cannot do it, ValueError where ranks can't.
        """
        if isinstance(model, Decoder) and model.part != WHOLE:
            self._join(model)
            return model
        if self.how == "off":
            return model
        if not isinstance(model, Decoder):
            return self._whole(model, widths, new_cache, draft_widths)
        # Kernels that read all slots they are given would need a form for each number of slots.
        pieces = set(PIECES) if model.flash_reads else set()
        if self.how == "full":
            model.step_widths = frozenset(widths)
            model.run_block = CompiledBlocks(pieces, self._low)
            return CompiledModel(model, widths, self._low)
        if self.how == "native":
            try:
                model.run_stack = self.stack(model)
                return model
            except Unsuited as reason:
                if self._by_name:
                    raise
                log.warning("%s; blocks are compiled by Inductor instead", reason)
        model.step_widths = frozenset(widths)
        model.run_block = CompiledBlocks(widths | pieces, self._low)
        return model

    def stack(self, model: Decoder) -> NativeStack:
        """All blocks and the last norm, in the CPU kernel. Raises Unsuited."""
        config, join = model.config, None
        if model.part != WHOLE:
            assert self._group is not None
            join = partial(sum_parts if model.part.reduces else gather_columns, self._group)
        return NativeStack(
            model.blocks,
            tables=model.rope_tables,
            ropes=[kind.rope for kind in config.layers],
            activation=config.activation,
            norm=model.norm,
            low=self._low,
            ranges=lambda: model.ranges(),  # which may be replaced
            join=join,
        )

    def prepare(self, head: Head) -> None:
        """Make steps of a trained head fast, once it and the target are packed.

        Raises Unsuited where the CPU kernel was asked for and cannot do it.
        """
        if self.how in ("regional", "full") and head.place["device"].type == "cuda":
            head.compiled = CompiledMethods(head)
        if self.how != "native" or len(head.blocks) != 1:
            return
        try:
            head.native = native_head(head)
        except Unsuited as reason:
            if self._by_name:
                raise
            log.warning("%s; the head runs without it, which is slower", reason)

    def noise(self, on_cpu: bool) -> Callable[..., Tensor]:
        """What gives the noise of sampling."""
        if on_cpu:
            return sampling.native_gumbel
        return sampling.gumbel if self.how == "off" else CompiledForms(sampling.gumbel)

    def _join(self, model: Decoder) -> None:
        """Have a model, of which each rank has a part, bring together what its linears give."""
        if isinstance(model.head, GatheredLinear):
            return
        group = self._group
        assert group is not None
        model.set_submodule("head", GatheredLinear(model.head, group, cut_inputs=False))
        if self.how == "native":
            try:
                model.run_stack = self.stack(model)
                return
            except Unsuited as reason:
                raise ValueError(f"{reason}; take --compile off, or leave tensor_parallel out") from None
        for name in [name for i in range(len(model.blocks)) for name in (f"{i}.attn.o", f"{i}.mlp.down")]:
            linear = model.blocks.get_submodule(name)
            joined = (
                SummedLinear(linear, group) if model.part.reduces else GatheredLinear(linear, group, cut_inputs=True)
            )
            model.blocks.set_submodule(name, joined)

    def _whole(
        self, model: CausalModel, widths: set[int], new_cache: Callable[[], StaticKVCache], draft_widths: set[int]
    ) -> CausalModel:
        """A model of transformers with whole steps compiled; itself where that cannot be, with a warning. Decided now,
        by steps of each width with the weights now in use, in the same way for all modes.
        """
        if self.how == "native":
            return model
        from torch._dynamo.exc import TorchDynamoException  # a second to import

        compiled, cache = CompiledModel(model, widths, self._low), new_cache()
        try:
            for width in sorted(widths):
                check_compiled(compiled, model, cache, width)
        except (TorchDynamoException, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            log.warning("%s runs eagerly, which is slower: %s", model.name, reason)
            return model
        model.step_widths |= {*draft_widths, *widths}  # in all modes alike, since prompts are padded by it
        return compiled
