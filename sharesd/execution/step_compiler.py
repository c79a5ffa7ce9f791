"""Compilation of steps: C++ kernel, Inductor, or eager."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch
from torch import Tensor

from compile.cpp_extension import obstacle
from compile.decoder_stack import KernelUnsupported, NativeStack
from compile.inductor import CompiledBlocks, CompiledForms, CompiledMethods, CompiledModel
from compile.op_registry import HAS_TRITON, runs_cpp, use_cpp_kernels, use_own_kernels
from multigpu.tensor_parallel import UNSHARDED, ColumnParallelLinear, RowParallelLinear, all_gather_columns, all_reduce
from quant.switch_linear import Switch
from sharesd import sampling
from sharesd.config import CompileMode, Kernels
from sharesd.devices.selection import first_line
from sharesd.execution.batch_invariance import check_compiled
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.models.prefill import PIECES

if TYPE_CHECKING:
    from multigpu.process_group import Group
    from sharesd.drafters.heads.head import Head

log = logging.getLogger(__name__)

VARIABLE = "SHARESD_KERNELS"
"""Environment variable in place of `--kernels auto`."""
NO_TRITON = "Triton is not installed"
PROCESSORS = ("x86_64", "amd64", "x64")
"""Names of the processor of the CPU kernels, in lower case."""


class KernelChoice(NamedTuple):
    kernels: Kernels
    triton: bool
    """True if Triton compiles, which Inductor needs too."""
    streams: bool | None = False
    """True if `streams` were asked for; None: they are to run where they can."""


def choose_kernels(
    asked: Kernels, device: torch.device, dtype: torch.dtype, compile: CompileMode = "auto"
) -> KernelChoice:
    """Switch on kernels; ValueError if those asked for do not run."""
    wanted = os.environ.get(VARIABLE) or "auto" if asked == "auto" else asked
    if wanted not in get_args(Kernels):
        raise ValueError(f"{VARIABLE} is {wanted!r}; choose one of {', '.join(get_args(Kernels))}")
    if device.type == "cpu":
        return _for_cpu(asked, dtype, compile)
    why_not = None if wanted == "torch" else problem(device, dtype)
    if why_not is not None and wanted in ("streams", "triton"):
        raise ValueError(f"kernels is {wanted!r}, which does not run on {device}: {why_not}; use --kernels torch")
    if why_not is not None:
        log.warning("our kernels do not run on %s (%s); torch's own do, which is slower", device, why_not)
    use_own_kernels(wanted != "torch" and why_not is None)
    if wanted == "torch" or why_not is not None:
        return KernelChoice("torch", HAS_TRITON and why_not is None)
    return KernelChoice("triton", True, {"streams": True, "auto": None}.get(wanted, False))


def _for_cpu(asked: Kernels, dtype: torch.dtype, compile: CompileMode) -> KernelChoice:
    if asked in ("streams", "triton"):
        log.warning("--kernels %s: no effect on a CPU", asked)
    why_not = None if asked == "torch" else cpu_problem(dtype, any_processor=compile == "native")
    runs = asked != "torch" and why_not is None
    if not runs and compile not in ("auto", "off"):
        reason = "kernels are to be 'torch'" if why_not is None else f"CPU kernels do not run here: {why_not}"
        raise ValueError(f"compile is {compile!r}, which needs CPU kernels, and {reason}; use --compile off, or auto")
    if why_not is not None:
        log.warning("CPU kernels do not run here (%s); torch's operations do, which is slower", why_not)
    use_cpp_kernels(runs)
    return KernelChoice("auto" if runs else "torch", True)


def cpu_problem(dtype: torch.dtype, *, any_processor: bool = False) -> str | None:
    """Return the reason why CPU kernels do not run on this machine."""
    machine = platform.machine()
    if machine.lower() not in PROCESSORS and not any_processor:
        return f"they are for x86-64, and this is {machine or 'an unknown processor'}; --compile native tries them"
    return obstacle(str(dtype).removeprefix("torch."), "sampling_ops")


def problem(device: torch.device, dtype: torch.dtype) -> str | None:
    if not HAS_TRITON:
        return NO_TRITON
    from compile.cuda.trial import try_kernels  # imports Triton

    try:
        try_kernels(device, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton has errors of its own, and needs a C compiler
        return first_line(error)
    return None


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
        pieces = PIECES if model.supports_flash else ()
        if self.how == "full":
            model.step_widths = frozenset(widths)
            model.run_block = CompiledBlocks(set(), self._low, pieces=pieces)
            return CompiledModel(model, widths, self._low)
        if self.how == "native":
            try:
                model.run_stack = self.stack(model)
                return model
            except KernelUnsupported as reason:
                if self._by_name:
                    raise
                if model.config.undivided:
                    log.warning("%s; steps of %s run uncompiled instead", reason, model.config.undivided)
                    return model
                log.warning("%s; blocks are compiled by Inductor instead", reason)
        model.step_widths = frozenset(widths)
        model.run_block = CompiledBlocks(widths, self._low, pieces=pieces)
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
        if head.layer is not None:
            self.compile(head.layer, {1, 2}, partial(head.layer.new_cache, 1, 1), {1})
            return
        if self.how in ("regional", "full") and head.place["device"].type == "cuda":
            head.compiled = CompiledMethods(head)
        if self.how != "native" or len(head.blocks) != 1:
            return
        from sharesd.drafters.heads.head import native_head

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
                raise ValueError(f"{reason}; use --compile off, or remove tensor_parallel") from None
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
