"""The one place that composes: load -> quantize -> pack -> cache -> compile -> engines."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from compile.adaptive_threads import CREW
from compile.attention import reads_live_slots, warn_unknown_flash
from compile.cpp_extension import cache_root, keep_compiled, kernels_version, prepare
from compile.cuda import gemm_config
from compile.cuda_graphs import Graphs
from compile.decoder_stack import NativeStack
from compile.op_registry import runs_triton
from multigpu.pipeline_parallel import Split
from multigpu.process_group import Group
from multigpu.tensor_parallel import WHOLE, Part
from offload.block_layout import Layout
from offload.planner import DoesNotFit, Plan
from offload.prefetcher import Stream
from quant.gemlite_configs import save_configs
from quant.quantize_model import Build, QuantReport
from quant.switch_linear import Switch
from sharesd import __version__
from sharesd.config import (
    MODEL_DRAFTERS,
    SMALL,
    TABLES,
    CompileMode,
    EngineConfig,
    Mode,
    PlanOnly,
    SamplingParams,
)
from sharesd.devices.selection import device_of, dtype_of, opened, prepare_cuda, take_cpu, use, warn_untried
from sharesd.drafters.base import Drafter
from sharesd.drafters.classic.drafter import ClassicDrafter
from sharesd.drafters.eagle.drafter import EagleDrafter
from sharesd.drafters.glide.drafter import GlideDrafter
from sharesd.drafters.hybrid.drafter import HybridDrafter
from sharesd.drafters.parallel.drafter import ParallelDrafter
from sharesd.drafters.parallel.head import Parallel
from sharesd.drafters.registry import table_of
from sharesd.drafters.share.drafter import ShareDrafter
from sharesd.engine.engine import Engine
from sharesd.engine.row_allocator import doubling
from sharesd.engine.stats import Stats
from sharesd.engine.warmup import warm_up, warm_up_each_kind
from sharesd.execution.batch_invariance import RowBits, check_rows
from sharesd.execution.kernel_choice import choose_kernels
from sharesd.execution.step_compiler import Steps
from sharesd.execution.step_widths import choose_rows, fixed_width, shallow
from sharesd.kvcache.static import StaticKVCache
from sharesd.loading.auto_mode import Choice, choose
from sharesd.loading.max_context import choose_context
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.models.loader import EachBlock, Tensors, decoder_config, load_model, resolve
from sharesd.models.prefill import PIECES, prefill, slots_for
from sharesd.models.progress import Progress, silent
from sharesd.models.tokenizer import Tokenizer, load_tokenizer, require_same_vocabulary
from sharesd.parallel.pipeline_planner import split_for
from sharesd.parallel.pipeline_stages import StagedBlocks
from sharesd.parallel.tp_driver import LeadingModel, follow
from sharesd.parallel.tp_setup import leave, meet
from sharesd.speculation.calibration import spread_of
from sharesd.speculation.draft_policy import WORTHWHILE
from sharesd.speculation.draft_tree import Shape, chains, ladder, looking_back, shapes_of, slots_to_go_on
from sharesd.weights.backend import home_of
from sharesd.weights.draft_heads import TrainedHeads, num_bytes
from sharesd.weights.measured_acceptance import keeper
from sharesd.weights.offload_loader import PlacedBlocks, QuantizedWhileRead
from sharesd.weights.offload_planner import Offloading, plan_for
from sharesd.weights.offloaded_decoder import StreamedBlocks
from sharesd.weights.packing import builder_for_cuda, packed_for_cpu
from sharesd.weights.quant_tuning_cache import cpu_name
from sharesd.weights.quantize import Quantizing

log = logging.getLogger(__name__)

Offload = Callable[[Decoder], tuple[Stream, Layout]]
"""Puts packed weights of some blocks of a decoder elsewhere; returns how they come back, and what a record holds."""
DRAFT_WINDOW = 256
"""Tokens that draft steps of `share` may look back instead of all, where the policy finds that this pays."""
TREE_TOP, TREE_DEPTH = 3, 6
"""Draft trees, if nobody says how large they shall be: nodes of a level that have children, and how many each has;
levels at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What building took."""

    load_seconds: float
    """Reading, converting, quantizing and packing weights."""
    compile_seconds: float
    """Compiling and warming up."""
    weight_bytes: int
    """Weights of the target at full precision."""
    quant: QuantReport | None
    """The target's quantized linears (share), or those of the classic copy."""
    resident_share: float = 1.0
    """Share of the target's blocks whose weights at full precision stay in memory."""
    max_context: int = 0
    """Tokens of prompt and answer that a row of the KV cache holds."""
    predicted: float | None = None
    """Tokens per second that the plan promised, where one was made because the model does not fit."""


class Runtime:
    """A loaded target with the drafters of several modes; engines of all modes share target, tokenizer and KV cache."""

    device: torch.device
    dtype: torch.dtype
    _triton: bool  # it can compile there, as far as is known
    _takes_any: bool  # the device is not one that was asked for

    def __init__(
        self,
        config: EngineConfig,
        modes: Sequence[Mode] | None = None,
        *,
        progress: Progress = silent,
        tensors: Tensors | None = None,
        offload: Offload | None = None,
        planned: Callable[[Plan], None] | None = None,
        group: Group | None = None,
    ) -> None:
        """Load what `modes` (default: the config's) need. ValueError for whatever cannot be honoured.

        `tensors` stand in for the weight files of the target's folder: what is made in memory need not be written.
        `planned` is told the plan of what stays in memory, before anything is loaded, if one was made. `offload`
        takes the place of such a plan: it puts packed weights of some of the target's blocks elsewhere, from where they
        come back for each pass.
        With `tensor_parallel`, `group` leads to the other ranks, which `follow_rank_0`; without a group processes are
        started, or those of torchrun joined. Raises RankLost where one of them does not come.
        """
        started = time.perf_counter()
        modes = tuple(modes or (config.mode,))
        self.auto: Choice | None = None
        """Drafters that mode `auto` was given, where they were chosen here."""
        leads = group is None or not group.rank
        begin = partial(self._begin, config, modes, leads, progress, in_memory=tensors is not None, offload=offload)
        try:
            config, offloading = begin()
        except DoesNotFit as error:
            if not self._takes_any or self.device.type == "cpu":
                raise
            take_cpu(f"{self.device} is too small, {error}")
            config, offloading = begin()
        self.plan = None if offloading is None else offloading.plan
        """What stays in memory and what travels; None where nobody set a limit and all of it stays."""
        if config.offload.when == "plan-only":
            raise PlanOnly(() if self.plan is None else self.plan.reasons)
        if self.plan is not None and planned is not None:
            planned(self.plan)
        if offloading is not None and offloading.plan.offloads:
            config = offloading.config
        else:
            offloading = None
        self.config, self.modes = config, modes
        self._needs = {*config.drafters_of(*self.modes)}
        CREW.fix(config.threads)
        folder = self._folder = resolve(config.target, progress=progress)
        self._split = split_for(config, self.modes, folder, self.dtype)
        self.device = self.device if self._split is None else self._split.home
        use(self.device)
        self.compile = _compile_mode(config, self.device, self._triton)
        if self.compile == "native" and self.device.type != "cpu":
            raise ValueError(f"compile is 'native' but device is {self.device}; use regional or full on a GPU")
        if self.compile == "native":
            prepare(str(self.dtype).removeprefix("torch."), "choice")
        if offload is not None and self.compile == "full":
            raise ValueError(
                "compile is 'full', and offloaded blocks run one by one; take native, or regional on a GPU"
            )
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self._check_draft_vocabulary(progress)
        self._heads = TrainedHeads(config, self._needs, progress)
        self._switch = Switch()
        self._reports: dict[str, QuantReport] = {}
        self._offload = offload
        self._check_stages()
        self.streamed: StreamedBlocks | None = None
        """The target's blocks whose weights do not stay, if there are any."""
        self._progress, self._tensors = progress, tensors
        self._group: Group | None = None
        self._part = WHOLE
        self._leading: LeadingModel | None = None
        if config.tensor_parallel > 1:
            self._group, self.device = meet(
                config, self.modes, self._needs, folder, device=self.device, compile=self.compile, group=group
            )
            self._part = Part(self._group.rank, self._group.size, config.tensor_parallel_style == "reduce")
        self._draft_widths = {1, *([config.given_tree[0]] if config.given_tree else [])}
        self._steps = Steps(self.compile, asked=config.compile, switch=self._switch, group=self._group)
        self._quantizing = Quantizing(
            config.quant,
            device=self.device,
            folder=None if tensors else folder,
            build=self._build_low,
            progress=progress,
        )
        quantized = (
            QuantizedWhileRead(partial(self._quantizing.while_read, switch=self._switch))
            if "share" in self._needs
            else None
        )
        self._home = home_of(self.device, self.dtype, self._fixed_width, config.max_batch)
        self._placed: PlacedBlocks | None = None
        placed = None if offloading is None else PlacedBlocks(offloading, self._home, quantized, progress)
        with nullcontext() if placed is None else placed as self._placed:
            self.target = self._load(folder, tensors, self._placed, self._placed is not None, self._part, self._split)
            self.weight_bytes = num_bytes(self.target)
            if self._placed is not None and quantized is not None:
                self.weight_bytes -= quantized.report().low_bytes
            for mode, report in self._heads.load(self.target, self._quantizing, self.device).items():
                self._report(mode, report)
            if quantized is not None:
                self._report(
                    "share", quantized.finish() if placed else self._quantizing.whole(self.target, self._switch)
                )
            if self._placed is not None:
                assert isinstance(self.target, Decoder)
                self._placed.place_head(self.target)
                self._offload = self._placed.stream
        self.max_context, self.context_reason = choose_context(
            config,
            self.target,
            self.device,
            taps=self._heads.taps,
            copies=2 if "classic" in self._needs else 1,
            planned=config.offload.limited or any(x is not None for x in (self._placed, self._group, self._split)),
        )
        log.info("context: %d tokens (%s)", self.max_context, self.context_reason)
        self._pack(self.target)
        if self._part.rank:
            return  # who follows rank 0 needs no more
        for head in self._heads.of.values():
            self._steps.prepare(head)
        self._gumbel = self._steps.noise(self.device.type == "cpu")
        eager = config.compile == "off" or self._group is not None
        captures = self.device.type == "cuda" and not eager
        if captures and self.streamed is not None:
            log.warning("weights travel: passes of the target are not captured in CUDA graphs, drafts are")
        self._graphs = Graphs() if captures else None
        top, depth, _ = self._tree or (0, 0, 0)
        # A row that ended in a round of several tokens rests behind the context; launched ahead, it runs on by a round.
        overhang = self._fixed_width * (1 if self._graphs is None else 2)
        self._slots = self.max_context + overhang + max(self._fixed_width, 2 + top * depth)
        if self._goes_on:
            self._slots += slots_to_go_on(top, depth)
        if self.compile != "native":  # prompts may have to be read in padded pieces
            self._slots = max(self._slots, slots_for(self.max_context))
        if self._group is not None:
            self._leading = LeadingModel(self.target, self._switch, self._group)
        self.cache = (self._leading or self.target).new_cache(config.max_batch, self._slots, self._heads.taps)
        self._rows = choose_rows(
            self.target,
            fixed=self._fixed_width,
            most=1 + config.most_draft,
            exact=config.exact,
            wants_trees=self._wants_trees,
            compiles=self.compile in ("regional", "full"),
            step_of=partial(self._compile, self.target),
            bits_of=self._check_rows,
        )
        self.step = self._rows.step
        """The target, as it runs."""
        self._drafters: dict[str, Drafter | None] = {mode: self._drafter(mode) for mode in self.modes}
        self._engines = {mode: self._engine(mode) for mode in self.modes}
        self.load_seconds = time.perf_counter() - started
        self.compile_seconds: dict[Mode, float] = {}

    def _begin(
        self,
        config: EngineConfig,
        modes: Sequence[Mode],
        leads: bool,
        progress: Progress,
        *,
        in_memory: bool,
        offload: Offload | None,
    ) -> tuple[EngineConfig, Offloading | None]:
        """Choose device, dtype, kernels, the drafters of mode `auto`, and plan. DoesNotFit where no plan does."""
        self.device = device_of(config.split.devices[-1] if config.split.devices else config.device)
        self._takes_any = config.device == "auto" and not config.split.wanted and config.tensor_parallel == 1
        if self.device.type == "cuda" or config.compile in ("regional", "full"):
            keep_compiled()
        if self.device.type == "cuda":
            prepare_cuda(steady=config.steady_cublas)  # before CUDA begins
        self.device = opened(self.device, auto=self._takes_any)
        if self.device.type == "cuda":
            if leads:
                warn_untried(self.device)
                warn_unknown_flash()
            use(self.device)
        self.dtype = dtype_of(config.dtype, self.device)
        chosen = choose_kernels(config.kernels, self.device, self.dtype)
        config, self._triton = replace(config, kernels=chosen.kernels), chosen.triton
        if "auto" in modes and not config.auto_drafters:
            config = self._choose(config, offloads=offload is not None, progress=progress)
        if offload is not None:
            return config, None
        offloading = plan_for(config, modes, progress=progress, in_memory=in_memory)
        if self.auto is not None and offloading is not None and offloading.plan.offloads:
            before = config, offloading, self.auto
            try:
                config = self._choose(config, offloads=True, progress=progress)
                offloading = plan_for(config, modes, progress=progress, in_memory=in_memory)
            except DoesNotFit:  # tables need less
                config, offloading, self.auto = before
        return config, offloading

    def _choose(self, config: EngineConfig, *, offloads: bool, progress: Progress) -> EngineConfig:
        """The config with drafters of mode `auto`."""
        self.auto = choose(
            config,
            resolve(config.target, progress=progress),
            self.device,
            self.dtype,
            _compile_mode(config, self.device, self._triton),
            offloads=offloads,
        )
        return replace(config, auto_drafters=self.auto.drafters)

    def _check_stages(self) -> None:
        """ValueError for what does not go with stages, or a draft model on another device."""
        config, split = self.config, self._split
        if config.draft_device is not None:
            if "classic" not in self._needs:
                raise ValueError(f"draft_device is {config.draft_device!r} and no mode is classic; leave it out")
            if device_of(config.draft_device).type != self.device.type:
                raise ValueError(
                    f"draft_device is {config.draft_device!r} and the target is on {self.device}, which would wait for "
                    "it; give a device of its kind"
                )
            if self.compile == "full":
                raise ValueError(
                    f"compile is 'full' and draft_device is {config.draft_device!r}, where steps go over and come back "
                    "from; take regional, or auto"
                )
        if split is None:
            return
        if self._offload is not None:
            raise ValueError("blocks in stages stay where they are; drop offload, or devices")
        if self.compile == "full" and split.hands_over:
            raise ValueError("compile is 'full' and a step runs on several devices; take regional, or auto")

    def engine(
        self, mode: Mode | None = None, *, warm: SamplingParams | None = None, each_kind: bool = False
    ) -> Engine:
        """The engine of a mode, compiled and warmed up for this way of sampling; with `each_kind` for all rounds that
        requests together may need.
        """
        mode = mode or self.config.mode
        if mode not in self._engines:
            raise ValueError(f"mode {mode!r} was not loaded; loaded are {', '.join(self._engines)}")
        engine = self._engines[mode]
        started, graphs = time.perf_counter(), self._graphs
        num_before, bytes_before = Graphs.num_captures, 0 if graphs is None else graphs.nbytes
        params = warm or SamplingParams()
        warm_up(engine, params, self._costs_file(mode, params))
        if each_kind:
            warm_up_each_kind(engine)
        if self.device.type == "cuda":
            self._warm_prompts()
            save_configs(cache_root() / "settings")
        if graphs is not None:
            num, megabytes = Graphs.num_captures - num_before, (graphs.nbytes - bytes_before) / 1e6
            sizes = ", ".join(map(str, engine.sizes))
            log.info("mode %s: %d CUDA graphs, %.0f MB, for rounds of up to %s rows", mode, num, megabytes, sizes)
        self.compile_seconds[mode] = self.compile_seconds.get(mode, 0.0) + time.perf_counter() - started
        return engine

    def plain_beside(self) -> Engine:
        """An engine of mode naive with a KV cache of its own, so that it can decode in turns with one of the others."""
        return self._engine("naive", self.step.new_cache(self.config.max_batch, self._slots))

    @torch.inference_mode()
    def _warm_prompts(self) -> None:
        """Read prompts of all sizes of pieces: what kernels must plan or compile for each is not left to users'.

        Captures give back memory that nothing uses, so it comes behind them: prompts find what they need.
        """
        models = {id(self.cache): (self.step, self.cache)}
        for drafter in self._drafters.values():
            model_drafter = drafter.model_drafter if isinstance(drafter, HybridDrafter) else drafter
            if isinstance(model_drafter, ClassicDrafter):
                models[id(model_drafter.cache)] = model_drafter.model, model_drafter.cache
        for model, cache in models.values():
            for size in PIECES:
                tokens = [0] * min(size, self.max_context)
                prefill(model, cache, [tokens] + [[] for _ in range(cache.batch - 1)], [0] * cache.batch)
            cache.lengths.fill_(1)

    def _costs_file(self, mode: str, params: SamplingParams) -> Path:
        """Where the costs of rounds are kept: a name for everything that they depend on."""
        what = (
            *(__version__, torch.__version__, self._folder.resolve(), self.dtype, self.compile),
            *(self._rows.widths, mode),
            *(
                replace(self.config, target=None, mode="naive", draft=None, max_queue=None, prefill_chunk=None),
                self.config.draft_model,
            ),
            *(cpu_name(), CREW.most, self.device, kernels_version()),
            self.streamed and (self.streamed.stream.blocks, len(self.streamed.stream.slots)),
            # Drafts take as long on any disk, and steps do not: costs of one that is half as fast again are others.
            self.plan and self.plan.offloads and round(2 * math.log2(self.plan.transfer_s)),
            (torch.cuda.get_device_name(self.device), gemm_config.kernels_version())
            if self.device.type == "cuda"
            else None,
            replace(params, seed=0, max_new_tokens=1, stop=(), stop_token_ids=(), ignore_eos=False, logit_bias={}),
        )
        key = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
        return cache_root() / "settings" / f"costs-{key}.json"

    def report(self, mode: Mode | None = None) -> LoadReport:
        """What building and warming up took, for a mode."""
        mode = mode or self.config.mode
        return LoadReport(
            load_seconds=self.load_seconds,
            compile_seconds=self.compile_seconds.get(mode, 0.0),
            weight_bytes=self.weight_bytes,
            max_context=self.max_context,
            quant=self._reports.get(mode),
            resident_share=1.0 if self.streamed is None else self.streamed.resident_share,
            predicted=self.plan.tokens_per_second if self.plan is not None and self.plan.offloads else None,
        )

    @property
    def _goes_on(self) -> bool:
        """Whether trees of the target's own quantized weights grow on while it waits for the others."""
        return self.streamed is not None and self.device.type == "cpu" and self._tree is not None

    @property
    def _may_have_buckets(self) -> bool:
        """True where rounds are captured, and our own kernels attend, which read nothing of idle rows."""
        target, captured = self.target, self._graphs is not None and self.streamed is None
        return (
            captured
            and isinstance(target, Decoder)
            and reads_live_slots(self.device, self.dtype, target.config.head_dim)
        )

    @property
    def _fixed_width(self) -> int:
        """Rows of every step, where it must be a single number: whatever is drafted, texts shall be the same."""
        return fixed_width(self.device.type, self.config.most_draft)

    @property
    def _wants_trees(self) -> bool:
        return self._tree is not None or bool(self._needs & {*TABLES} or {"hybrid", "auto"} & {*self.modes})

    @cached_property
    def _tree(self) -> tuple[int, int, int] | None:
        """Draft trees of models, as `EngineConfig.tree` has them. (Chosen where nothing is compiled for them.)"""
        config = self.config
        chooses = config.tree == "auto" and config.num_draft is None and config.max_draft > 1
        native = self.compile == "native" and self.streamed is None
        if not chooses or not native or not self._needs & {*MODEL_DRAFTERS}:
            return config.given_tree
        depth = min(TREE_DEPTH, config.max_draft - 1)
        return TREE_TOP, depth, min(config.max_draft, TREE_TOP + (depth - 1) * TREE_TOP**2)

    def _check_rows(self, step: CausalModel, widths: Sequence[int]) -> RowBits:
        """Compare bits of steps of these widths as they will run, at the real number of slots, and of several batches
        where rounds may have such.
        """
        batches = doubling(self.config.max_batch)[:-1] if self._may_have_buckets else []
        check = partial(check_rows, trees=self._wants_trees, batches=batches)
        if self.compile == "full" or self._group is not None:
            return check(step, self.cache, widths)
        assert isinstance(self.target, Decoder)
        first = shallow(self.target)
        if isinstance(self.target.run_stack, NativeStack):
            first.run_stack = self._steps.stack(first)
        cache = first.new_cache(self.config.max_batch, self._slots)
        return check(first, cache, widths)

    def close(self) -> None:
        """End what goes on beside decoding: weights that do not stay are not fetched any more, and other ranks end."""
        if self.streamed is not None:
            self.streamed.stream.close()
        if self._group is not None:
            leave(self._group)

    def _load(
        self,
        folder: Path,
        tensors: Tensors | None = None,
        each_block: EachBlock | None = None,
        map_tables: bool = False,
        part: Part = WHOLE,
        split: Split | None = None,
    ) -> CausalModel:
        model = load_model(
            folder,
            dtype=self.dtype,
            device=self.device,
            trust_remote_code=self.config.trust_remote_code,
            progress=self._progress,
            tensors=tensors,
            each_block=each_block,
            map_tables=map_tables,
            part=part,
            split=split,
        )
        if split is not None and split.hands_over:
            assert isinstance(model, Decoder)
            model.ranges = StagedBlocks(split).ranges
        return model

    def _check_draft_vocabulary(self, progress: Progress) -> None:
        """Before any weights are read."""
        name = self.config.draft_model
        if name is not None and "classic" in self._needs:
            self._draft_folder = resolve(name, progress=progress)
            if self.config.draft != SMALL:  # which has no tokenizer of its own
                require_same_vocabulary(self.tokenizer, load_tokenizer(self._draft_folder))

    def _report(self, mode: str, report: QuantReport) -> None:
        self._reports[mode] = report
        log.info("quantized %d linears to %s in %.1f s", report.num_linears, report.spec, report.seconds)

    def _build_low(self) -> Build | None:
        """What makes quantized linears, where it is not the choice of `quant`."""
        if self.compile == "native":
            return packed_for_cpu
        if self.device.type == "cuda" and not self._triton:
            raise ValueError(
                f"linears are to be quantized, which on {self.device} takes Triton; take a mode without them (naive, "
                "eagle, suffix), --draft-quant bnb:4:64, or --device cpu"
            )
        if not runs_triton(self.device):
            return None
        return builder_for_cuda(self.device, self.dtype, self._fixed_width, self.config.max_batch)

    def _pack(self, model: CausalModel) -> None:
        if not isinstance(model, Decoder):
            return
        self._home.lay(model)
        if model is self.target and self._offload is not None:
            low = partial(getattr, self._switch, "low") if "share" in self._needs else None
            self.streamed = StreamedBlocks(model, *self._offload(model), low)
            model.ranges = self.streamed.ranges
        if model is not self.target or self._placed is None:  # which lies where it shall already
            self._home.settle(model, keep=self.streamed.linears if self.streamed else ())

    def _compile(self, model: CausalModel, widths: set[int]) -> CausalModel:
        """The model with its steps of these widths compiled, as all ranks run them."""
        if isinstance(model, Decoder):
            widths = {*self._draft_widths, *widths}
        if model is self.target:
            step = self._steps.of(model, widths, lambda: self.cache, self._draft_widths)
            return self._leading or step
        new_cache = partial(model.new_cache, self.config.max_batch, self._slots)
        return self._steps.of(model, widths, new_cache, self._draft_widths)

    @cached_property
    def _low_step(self) -> CausalModel:
        """The target, as its quantized weights draft."""
        if isinstance(self.target, Decoder) or self.step is self.target:
            return self.step
        with self._switch.use_low():
            return self._compile(self.target, self._draft_widths)

    def _drafter(self, mode: str) -> Drafter | None:
        num_nodes, trees = self.config.most_draft, self._rows.trees
        table = partial(table_of, config=self.config, vocab_size=self.target.vocab_size)
        if mode == "naive":
            return None
        if mode in TABLES:
            return HybridDrafter(mode, [table(mode)], num_nodes=num_nodes, trees=trees)
        if mode in ("hybrid", "auto"):
            drafters = self.config.drafters_of(mode)
            tables = [table(name) for name in drafters if name in TABLES]
            models = [name for name in drafters if name in MODEL_DRAFTERS]
            model = self._drafter(models[0]) if models else None
            return HybridDrafter(mode, tables, model, num_nodes=num_nodes, trees=trees)
        if self.config.given_tree is not None and not trees:
            if self.target.takes_trees:
                raise ValueError("rows of trees do not have the bits of chains here; drop --tree, or add --no-exact")
            raise ValueError(f"{self.target.name} takes chains only; drop --tree")
        tree = self._tree if trees else None
        top = tree[0] if tree else 1
        lengths = chains(num_nodes) if self.streamed is None else ladder(num_nodes)
        shapes = shapes_of(*tree) if tree else lengths
        if mode == "share":
            low_bytes = self._reports["share"].low_bytes
            return ShareDrafter(
                self._low_step,
                self.cache,
                self._switch,
                shapes=looking_back(shapes, self._draft_windows()),
                low_bytes=low_bytes,
                top=top,
                spread=spread_of(self.config.quant.bits),
                goes_on=self._goes_on,
            )
        if mode in ("eagle", "glide"):
            kind = GlideDrafter if mode == "glide" else EagleDrafter
            head = self._heads.of[mode]
            return kind(head, self.cache, shapes=shapes, weight_bytes=num_bytes(head), top=top)
        if mode == "parallel":
            head = self._heads.of[mode]
            assert isinstance(head, Parallel)
            most = head.config.draft_length
            depth = self.config.given_tree[1] if self.config.given_tree else self.config.num_draft or 1
            if depth > most:
                raise ValueError(f"drafts shall be {depth} tokens deep and the head guesses {most}; ask for no more")
            return ParallelDrafter(head, self.cache, shapes=shapes, weight_bytes=num_bytes(head), top=top)
        return self._classic(shapes, top)

    def _draft_windows(self) -> tuple[int, ...]:
        """How many tokens draft steps may look back; 0 = all."""
        given, target = self.config.draft_window, self.target
        native = isinstance(target, Decoder)
        if isinstance(given, int):
            if not native:
                raise ValueError(f"draft_window is {given} and {target.name} looks at all tokens; take off or auto")
            return (given,)
        # Where attention masks what it does not need, and reads it all the same, a window gains nothing.
        gains = isinstance(target, Decoder) and reads_live_slots(self.device, self.dtype, target.config.head_dim)
        long_enough = self.max_context >= WORTHWHILE * DRAFT_WINDOW
        return (0, DRAFT_WINDOW) if given == "auto" and gains and long_enough else (0,)

    def _draft_split(self, folder: Path) -> Split | None:
        """Where a second model is, if that has been asked for."""
        if self.config.draft_device is None:
            return None
        place = Split.of([device_of(self.config.draft_device)], [len(decoder_config(folder).layers)])
        return replace(place, apart=self.device, hop_seconds=self.config.split.hop_seconds)

    def _classic(self, shapes: Sequence[Shape], top: int) -> Drafter:
        if self.config.draft_model is not None:
            model = self._load(self._draft_folder, split=self._draft_split(self._draft_folder))
            if model.vocab_size != self.target.vocab_size:
                raise ValueError(
                    f"the draft model has {model.vocab_size} logits and the target {self.target.vocab_size}; "
                    "give a draft model of the target's family"
                )
        else:
            quantized = QuantizedWhileRead(self._quantizing.while_read)
            if isinstance(self.target, Decoder):  # no more than a block of the second model is there in full
                model = self._load(
                    self._folder,
                    self._tensors,
                    quantized,
                    map_tables=self._placed is not None,
                    split=self._draft_split(self._folder),
                )
                self._report("classic", quantized.finish())
            else:
                model = self._load(self._folder)
                self._report("classic", self._quantizing.whole(model))
        self._pack(model)
        if model.max_context < self.max_context:
            raise ValueError(
                f"the draft model's context is {model.max_context} tokens; set max_context to that, or less"
            )
        return ClassicDrafter(
            self._compile(model, {*self._draft_widths, 2}),
            batch=self.config.max_batch,
            slots=self._slots,
            shapes=shapes,
            weight_bytes=num_bytes(model),
            top=top,
            spread=None if self.config.draft_model is not None else spread_of(self.config.quant.bits),
            graphs=self._graphs if isinstance(model, Decoder) and isinstance(self.target, Decoder) else None,
        )

    def _keeper(self, mode: Mode) -> Callable[[Stats], None] | None:
        """Keeps for later plans how often drafts hold."""
        if (
            self._placed is None
            or self._tensors is not None
            or mode not in ("share", "classic", "hybrid", "auto")
            or not self._reports
        ):
            return None
        return keeper(self._folder, mode, self.config.quant, (self.config.given_tree or (0,))[0])

    def _engine(self, mode: Mode, cache: StaticKVCache | None = None) -> Engine:
        return Engine(
            target=self.step,
            tokenizer=self.tokenizer,
            cache=cache or self.cache,
            drafter=self._drafters.get(mode),
            max_context=self.max_context,
            auto_length=self.config.num_draft is None,
            widths=self._rows.widths,
            reread=self.config.exact and (self.device.type == "cuda" or self._rows.depends_on_width),
            graphs=self._graphs if isinstance(self.target, Decoder) or self.step is not self.target else None,
            buckets=self._may_have_buckets and self._rows.buckets,
            gumbel=self._gumbel,
            max_queue=self.config.max_queue,
            prefill_chunk=self.config.prefill_chunk,
            ahead=self._graphs is not None and self.streamed is None,  # a pass too many takes long
            traffic=None if self.streamed is None else partial(getattr, self.streamed.stream, "traffic"),
            meanwhile=None if self.streamed is None else self.streamed.stream.meanwhile,
            ended=self._keeper(mode),
            trees_asked=self.config.given_tree is not None,
        )


def follow_rank_0(group: Group, tensors: Tensors | None = None) -> None:
    """Load this rank's part of what rank 0 has configured, and take part in its steps until it ends: RankLost then.

    Raises what loading raises. `tensors` as for rank 0.
    """
    config, modes = group.broadcast_object()
    runtime = Runtime(config, modes, tensors=tensors, group=group)
    follow(runtime._compile(runtime.target, set()), runtime._switch, group)


def _compile_mode(config: EngineConfig, device: torch.device, triton: bool) -> CompileMode:
    if config.compile != "auto":
        return config.compile
    on_gpu: CompileMode = "regional" if config.tensor_parallel == 1 and triton else "off"
    return "native" if device.type == "cpu" else on_gpu
