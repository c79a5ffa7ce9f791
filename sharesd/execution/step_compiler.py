"""Compilation of steps: C++ kernel, Inductor, or eager."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from compile.decoder_stack import KernelUnsupported, NativeStack
from compile.inductor import CompiledBlocks, CompiledForms, CompiledMethods, CompiledModel
from compile.op_registry import runs_cpp
from multigpu.process_group import Group
from multigpu.tensor_parallel import UNSHARDED, ColumnParallelLinear, RowParallelLinear, all_gather_columns, all_reduce
from quant.switch_linear import Switch
from sharesd import sampling
from sharesd.config import CompileMode
from sharesd.drafters.heads.head import Head, native_head
from sharesd.execution.batch_invariance import check_compiled
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.models.prefill import PIECES

log = logging.getLogger(__name__)


class StepCompiler:
    def __init__(self, how: CompileMode, *, given: CompileMode, switch: Switch, group: Group | None) -> None:
        """`how`: resolved `given`, which must do if named. `group`: the target's ranks."""
        self.how = how
        self._by_name = given == how
        self._group = group
        self._low = lambda: switch.quantized

    def compile(
        self, model: CausalModel, widths: set[int], new_cache: Callable[[], StaticKVCache], draft_widths: set[int]
    ) -> CausalModel:
        """Return a packed model with its steps of these widths compiled.

        `new_cache` and `draft_widths` are for transformers' models. KernelUnsupported if the named C++ kernel does not
        support the model, and ValueError if the kernel of ranks does not.
        """
        if isinstance(model, Decoder) and model.part != UNSHARDED:
            self.attach_tp(model)
            return model
        if self.how == "off":
            return model
        if not isinstance(model, Decoder):
            return self._compile_hf(model, widths, new_cache, draft_widths)
        # Kernels that read all slots they are given would need a form for each number of slots.
        pieces = set(PIECES) if model.supports_flash else set()
        if self.how == "full":
            model.step_widths = frozenset(widths)
            model.run_block = CompiledBlocks(pieces, self._low)
            return CompiledModel(model, widths, self._low)
        if self.how == "native":
            try:
                model.run_stack = self.stack(model)
                return model
            except KernelUnsupported as reason:
                if self._by_name:
                    raise
                log.warning("%s; blocks are compiled by Inductor instead", reason)
        model.step_widths = frozenset(widths)
        model.run_block = CompiledBlocks(widths | pieces, self._low)
        return model

    def stack(self, model: Decoder) -> NativeStack:
        """Return blocks and last norm in the C++ kernel, or raise KernelUnsupported."""
        config, join = model.config, None
        if model.part != UNSHARDED:
            assert self._group is not None
            join = partial(all_reduce if model.part.reduces else all_gather_columns, self._group)
        return NativeStack(
            model.blocks,
            tables=model.rope_tables,
            ropes=[kind.rope for kind in config.layer_types],
            hidden_act=config.hidden_act,
            norm=model.norm,
            use_quantized=self._low,
            ranges=lambda: model.ranges(),  # which may be replaced
            join=join,
        )

    def prepare(self, head: Head) -> None:
        """Compile the steps of a packed head, or raise KernelUnsupported."""
        if self.how in ("regional", "full") and head.place["device"].type == "cuda":
            head.compiled = CompiledMethods(head)
        if self.how != "native" or len(head.blocks) != 1:
            return
        try:
            head.native = native_head(head)
        except KernelUnsupported as reason:
            if self._by_name:
                raise
            log.warning("%s; the head runs without it, which is slower", reason)

    def noise(self, device: torch.device) -> Callable[..., Tensor]:
        if runs_cpp(device):
            return sampling.native_gumbel
        return sampling.gumbel if self.how == "off" else CompiledForms(sampling.gumbel)

    def attach_tp(self, model: Decoder) -> None:
        """Exchange outputs of linears among the ranks that share a model."""
        if isinstance(model.head, ColumnParallelLinear):
            return
        group = self._group
        assert group is not None
        model.set_submodule("head", ColumnParallelLinear(model.head, group, cut_inputs=False))
        if self.how == "native":
            try:
                model.run_stack = self.stack(model)
                return
            except KernelUnsupported as reason:
                raise ValueError(f"{reason}; take --compile off, or leave tensor_parallel out") from None
        for name in [name for i in range(len(model.blocks)) for name in (f"{i}.attn.o", f"{i}.mlp.down")]:
            linear = model.blocks.get_submodule(name)
            joined = (
                RowParallelLinear(linear, group)
                if model.part.reduces
                else ColumnParallelLinear(linear, group, cut_inputs=True)
            )
            model.blocks.set_submodule(name, joined)

    def _compile_hf(
        self, model: CausalModel, widths: set[int], new_cache: Callable[[], StaticKVCache], draft_widths: set[int]
    ) -> CausalModel:
        """Compile a transformers model for all modes, or warn of the failure."""
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
