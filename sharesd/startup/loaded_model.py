"""`LoadedModel`: the target in memory, its KV cache, its compiled steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compile.adaptive_threads import STEP_THREADS
from compile.attention import reads_live_slots
from compile.cpp_extension import kernels_version
from compile.cuda_graphs import Graphs
from compile.decoder_stack import NativeStack
from compile.start_times import START
from offload.plan import DEPTHS
from sharesd.devices.host_memory import cpu_name
from sharesd.drafters.base import BuildInputs, num_bytes
from sharesd.drafters.registry import Need
from sharesd.engine.scheduler import powers_of_two
from sharesd.execution.batch_invariance import (
    RowBits,
    check_rows,
    choose_step_widths,
    first_block_view,
    with_first_blocks,
)
from sharesd.execution.step_compiler import StepCompiler
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.models.loader import Tensors
from sharesd.startup.resolve import ResolvedConfig, resolve_config
from sharesd.startup.target import ModelLoader, prepare_cpu
from sharesd_files import JsonCache

if TYPE_CHECKING:
    from multigpu.process_group import Group

log = logging.getLogger(__name__)


class LoadedModel(BuildInputs):
    """A loaded target with KV cache and compiled steps, and the draft models that drafters ask for."""

    def __init__(
        self, resolved: ResolvedConfig, loader: ModelLoader, *, group: Group | None, draft_folder: Path | None
    ) -> None:
        """Compile the steps of the target that `loader` has loaded.

        `group`: ranks that share the target, this one being rank 0; `draft_folder`: that of a second model.
        """
        config, model = resolved.config, loader.target
        self._resolved, self._group, self._draft_folder = resolved, group, draft_folder
        self.loader, self.target, self.switch = loader, model, loader.switch
        self.config, self.device, self.dtype = config, resolved.device, resolved.dtype
        self.max_context, self.streamed = loader.context.tokens, loader.streamed
        self.tree, self.continues_trees = resolved.tree, resolved.has_async_trees
        self.chain_lengths = None if self.streamed is None else DEPTHS
        self.heads = heads = {} if loader.heads is None else loader.heads.by_mode
        self._compiler = StepCompiler(resolved.compile, given=config.compile, switch=self.switch, group=group)
        for head in heads.values():
            self._compiler.prepare(head)
        self.gumbel = self._compiler.noise(resolved.device)
        if resolved.captures and self.streamed is not None:
            log.warning("weights are offloaded: passes of the target are not captured in CUDA graphs, drafts are")
        self.graphs = Graphs() if resolved.captures else None
        self._draft_widths = {1, *([config.explicit_tree[0]] if config.explicit_tree else [])}
        self._rank_zero = None
        if group is not None:
            from sharesd.parallel.tensor_parallel import RankZeroModel

            self._rank_zero = RankZeroModel(model, self.switch, group)
        self.slots = resolved.num_slots(self.max_context)
        taps = () if loader.heads is None else loader.heads.taps
        self.cache = (self._rank_zero or model).new_cache(config.max_batch, self.slots, taps)
        self.widths = choose_step_widths(
            model,
            fixed=resolved.step_width,
            max_width=1 + config.max_draft_tokens,
            exact=config.exact,
            wants_trees=resolved.drafts_trees,
            compiles=resolved.compile in ("regional", "full"),
            step_of=partial(self.compile, model),
            bits_of=self._check_rows,
        )
        self.step, self.takes_trees = self.widths.step, self.widths.trees
        """The target, as it runs."""

    @property
    def may_have_buckets(self) -> bool:
        """True if rounds are captured, and attention reads nothing of idle rows."""
        resolved, model = self._resolved, self.target
        return (
            self.graphs is not None
            and self.streamed is None
            and isinstance(model, Decoder)
            and reads_live_slots(resolved.device, resolved.dtype, model.config.head_dim)
        )

    @property
    def can_capture(self) -> bool:
        """True if rounds can be captured: not with transformers' code."""
        return isinstance(self.target, Decoder) or self.step is not self.target

    @cached_property
    def quantized_step(self) -> CausalModel:
        if isinstance(self.target, Decoder) or self.step is self.target:
            return self.step
        with self.switch.quantized_weights():
            return self.compile(self.target, self._draft_widths)

    @property
    def quantized_bytes(self) -> int:
        sharing = self._resolved.drafters_with(Need.QUANTIZED_TARGET)
        return self.loader.reports[sharing[0]].quantized_bytes if sharing else 0

    def second_model(self) -> tuple[CausalModel, int, Graphs | None]:
        with START.phase("second model"):
            model = self.loader.load_draft_model(self._draft_folder)
        native = isinstance(model, Decoder) and isinstance(self.target, Decoder)
        step = self.compile(model, {*self._draft_widths, 2})  # the first step of a draft reads two tokens
        return step, num_bytes(model), self.graphs if native else None

    def compile(self, model: CausalModel, widths: set[int]) -> CausalModel:
        """Compile the steps of a model for these widths, on all ranks."""
        if isinstance(model, Decoder):
            widths = {*self._draft_widths, *widths}
        if model is self.target:
            step = self._compiler.compile(model, widths, lambda: self.cache, self._draft_widths)
            return self._rank_zero or step
        new_cache = partial(model.new_cache, self._resolved.config.max_batch, self.slots)
        return self._compiler.compile(model, widths, new_cache, self._draft_widths)

    def new_cache(self) -> StaticKVCache:
        """Return another KV cache of the target, of the same size."""
        return self.step.new_cache(self._resolved.config.max_batch, self.slots)

    def _check_rows(self, step: CausalModel, widths: Sequence[int]) -> RowBits:
        """Compare bits of rows for widths, and batches of captured rounds.

        The result is kept for the C++ kernel, the bits of which depend on shapes alone.
        """
        if not (isinstance(step, Decoder) and isinstance(step.run_stack, NativeStack)):
            return self._compare_rows(step, widths)
        what = (
            *(kernels_version(), cpu_name(), torch.__version__, STEP_THREADS.max_size, self._resolved.dtype),
            with_first_blocks(step.config),
            *(self.cache.batch, self.slots, widths, self._resolved.drafts_trees, self.streamed is None),
            self.cache.q8,
        )
        kept = JsonCache("settings", "rows", what)
        bits = kept.load(lambda found: RowBits(*map(bool, found)))
        if bits is None:
            bits = self._compare_rows(step, widths)
            kept.keep(list(bits))
        return bits

    def _compare_rows(self, step: CausalModel, widths: Sequence[int]) -> RowBits:
        max_batch = self._resolved.config.max_batch
        batches = powers_of_two(max_batch)[:-1] if self.may_have_buckets else []
        check = partial(check_rows, trees=self._resolved.drafts_trees, batches=batches)
        if self._resolved.compile == "full" or self._group is not None:
            return check(step, self.cache, widths)
        assert isinstance(self.target, Decoder)
        first = first_block_view(self.target)
        if isinstance(self.target.run_stack, NativeStack):
            first.run_stack = self._compiler.stack(first)
        return check(first, first.new_cache(max_batch, self.slots), widths)


def run_tp_worker(group: Group, tensors: Tensors | None = None) -> None:
    """Load this rank's part of the target, and run its steps.

    `tensors` replace weight files, as on rank 0.

    Raises:
        RankLost: rank 0 has ended.
    """
    from sharesd.parallel.tensor_parallel import init_tp, worker_loop

    config, modes = group.broadcast_object()
    resolved = resolve_config(config, modes, in_memory=tensors is not None, is_rank_zero=False)
    prepare_cpu(resolved)
    group, part, device = init_tp(
        config, modes, resolved.folder, device=resolved.device, compile=resolved.compile, group=group
    )
    loader = ModelLoader(replace(resolved, device=device), part=part, tensors=tensors)
    loader.load_target()
    model = loader.target
    compiler = StepCompiler(resolved.compile, given=config.compile, switch=loader.switch, group=group)
    assert isinstance(model, Decoder)
    compiler.attach_tp(model)
    worker_loop(model, loader.switch, group)
