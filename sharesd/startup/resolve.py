"""From options to a `ResolvedConfig`, before weights are read.

A checkpoint's config and the sizes of its tensors suffice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compile.attention import warn_unknown_flash
from compile.cpp_extension import obstacle as cpu_kernels_obstacle
from compile.cpp_extension import set_compiler_caches
from compile.op_registry import runs_cpp, runs_triton
from offload.plan import DoesNotFit, show_bytes
from quant.config import QuantConfig
from sharesd.config import CompileMode, EngineConfig, Mode
from sharesd.devices.host_memory import free_memory
from sharesd.devices.selection import (
    device_of,
    dtype_of,
    fall_back_to_cpu,
    open_device,
    prepare_cuda,
    use,
)
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import Need
from sharesd.execution.batch_invariance import fixed_width
from sharesd.execution.step_compiler import choose_kernels
from sharesd.field_types import DefaultLimit
from sharesd.kvcache.recurrent import MAX_SPAN
from sharesd.models.checkpoint import Progress, is_stored, silent, weight_files
from sharesd.models.conversion_cache import is_converted
from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd.models.hub import resolve_target
from sharesd.models.loader import native_config
from sharesd.startup.auto_mode import AutoDrafters, choose_drafters, chooses_experts, with_stored_drafts
from sharesd.startup.conflicts import (
    blocks_obstacle,
    check,
    check_options,
    offload_obstacles,
    stored_drafts_obstacle,
    target_conflicts,
)
from sharesd.startup.streams import SharedDrafts, choose_streams
from sharesd.weights.backend import backend_for
from sharesd.weights.draft_heads import find_inner_heads
from sharesd.weights.offload_planner import Offloading, plan_for
from sharesd.weights.sizes import experts_obstacle, kv_slots, state_bytes
from sharesd_files import clean_cache

if TYPE_CHECKING:
    from multigpu.pipeline_parallel import PipelinePlan
    from offload.plan import Plan

log = logging.getLogger(__name__)

_OF_EXPERTS = ("gate_up", "down")
"""Projections that experts have."""
HEADS_NEXT_TO_STORED = QuantConfig(bits=8, head_bits=8)
"""Default quantization of trained heads next to stored weights on a CPU.

In float32 a head would read four times the bytes, and a draft step cost a third of the target's.
"""


def folder_and_config(
    config: EngineConfig, device: torch.device, *, needs_numbers: bool, warns: bool, progress: Progress
) -> tuple[Path, EngineConfig]:
    """Return the target's folder, and the config with `dequantize` chosen.

    The embedded model is expanded, since its quantized copy drafts well then; so is what a `dtype` was given for.
    `needs_numbers`: tensors replace the file's, or blocks are offloaded by the caller.

    Raises:
        ValueError: weights that are to run as they are stored cannot; the message names a remedy.
    """
    obstacle = None
    if config.target_quant is not None:
        _check_target_quant(config, device, needs_numbers)
        config = replace(config, dequantize=False)
    if config.dequantize is None:
        wants_numbers = needs_numbers or config.target is None or config.dtype != "auto"
        obstacle = None if wants_numbers else _obstacle(config, device)
        config = replace(config, dequantize=True if wants_numbers or obstacle is not None else None)
    folder = resolve_target(config, progress=progress)
    if device.type != "cpu" and is_stored(folder) and (reason := _not_as_stored(folder, device)) is not None:
        if config.dequantize is False:
            flag = "--dequantize" if config.target_quant is None else "--device cpu"
            raise ValueError(f"{folder}: {reason}; use {flag}")
        if warns:
            log.warning("weights are expanded to 16 bits: %s: %s", folder, reason)
        config = replace(config, dequantize=True)
        folder = resolve_target(config, progress=progress)
    if config.dequantize is False and not is_stored(folder):
        raise ValueError(
            f"{folder} is not a .gguf file and has no quantized weights to run as stored; drop --no-dequantize"
        )
    if warns and obstacle is not None and is_converted(resolve_target(replace(config, lora=None))):
        size = f"{sum(file.stat().st_size for file in weight_files(folder)) / 1e9:.1f} GB"
        log.warning("weights are expanded to 16 bits, %s: stored ones are not supported with %s", size, obstacle)
    if warns and config.target_quant is not None:
        log.warning("weights are quantized to %s at load: texts are those of the quantized model", config.target_quant)
    return folder, replace(config, dequantize=not is_stored(folder))


def with_dequantize(config: EngineConfig) -> EngineConfig:
    """Return the config with `dequantize` chosen as a start chooses it; the target may be downloaded or converted."""
    device = device_of(config.device)
    kernels = choose_kernels(config.kernels, device, dtype_of(config.dtype, device), config.compile).kernels
    asked = replace(config, kernels=kernels)
    _, chosen = folder_and_config(asked, device, needs_numbers=False, warns=False, progress=silent)
    return replace(config, dequantize=chosen.dequantize)


def _not_as_stored(folder: Path, device: torch.device) -> str | None:
    """Return the reason why a folder's stored weights do not run on a GPU, if there is one."""
    try:
        config = native_config(folder, device)
    except UnsupportedArchitecture as reason:
        return f"{reason}, and stored weights run natively alone"
    obstacle = None if config.experts is None else experts_obstacle(folder, config)
    return None if obstacle is None else f"{obstacle}, and kernels of GPUs do not run such experts"


def with_head_quant(config: EngineConfig) -> EngineConfig:
    """Return the config with the default quantization of trained heads."""
    has_head = any(selection.head_of(config, mode) for mode in registry.names("head"))
    return replace(config, head_quant=config.head_quant or HEADS_NEXT_TO_STORED) if has_head else config


def _check_target_quant(config: EngineConfig, device: torch.device, needs_numbers: bool) -> None:
    obstacle = "weights that the caller makes or offloads" if needs_numbers else _obstacle(config, device)
    if obstacle is not None:
        raise ValueError(
            f"target_quant is {config.target_quant!r}, which is not supported with {obstacle}; leave it out"
        )
    reason = cpu_kernels_obstacle("quantize_ops") if device.type == "cuda" else None
    if reason is not None:
        raise ValueError(f"target_quant is {config.target_quant!r}, and its CPU kernel does not run here: {reason}")


def _obstacle(config: EngineConfig, device: torch.device) -> str | None:
    """Return what has no kernel for stored weights."""
    if config.kernels == "torch" or not (runs_cpp(device) or runs_triton(device)):
        return "torch's kernels"
    option = blocks_obstacle(config, on_gpu=device.type == "cuda")
    return None if option is None else f"{option} yet"


STATE_SHARE = 0.25
"""Maximum share of the memory next to the weights that states of recurrent layers take by default."""
TREE_TOP, TREE_DEPTH = 3, 6
"""Default branching and maximum levels of draft trees.

The branching is the number of nodes of a level that have children, and of children of each.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """Every decision that is made before weights are read."""

    config: EngineConfig
    """Options after resolution.

    Kernels, drafters of mode auto, and the plan's bits and draft lengths are filled in.
    """
    modes: tuple[Mode, ...]
    folder: Path
    """Checkpoint of the target."""
    device: torch.device
    dtype: torch.dtype
    compile: CompileMode
    has_triton: bool
    auto: AutoDrafters | None = None
    """Drafters of mode auto, if they were chosen here."""
    plan: Plan | None = None
    """Plan of resident and offloaded weights.

    None if all weights fit and there is no limit.
    """
    offload: Offloading | None = None
    """Plan with its config and layout; None if all weights are resident."""
    pipeline: PipelinePlan | None = None
    has_block_source: bool = False
    """True if the caller offloads blocks itself."""
    in_memory: bool = False
    """True if tensors replace the checkpoint's files."""
    rows_reason: str = ""
    """Why fewer rows are decoded together than by default; "" if they are not."""
    experts: int = 0
    """Experts that each token goes through; 0: the target is not a mixture that runs natively."""
    undivided: str = ""
    """What the target is, if the native decoder runs it whole on one device."""

    @property
    def drafters(self) -> frozenset[str]:
        """Active drafters of all modes."""
        return frozenset(selection.active_drafters(self.config, *self.modes))

    def drafters_with(self, need: Need) -> tuple[str, ...]:
        """Return the active drafters with a need."""
        return registry.those(self.drafters, need)

    @property
    def draft_device_type(self) -> str | None:
        """Type of the given device of a second model."""
        draft_device = self.config.draft_device
        return None if draft_device is None else device_of(draft_device).type

    @property
    def offloads(self) -> bool:
        """True if some weights of the target are fetched for each pass."""
        return self.offload is not None or self.has_block_source

    @property
    def is_sharded(self) -> bool:
        """True if ranks share the target."""
        return self.config.tensor_parallel > 1

    @property
    def captures(self) -> bool:
        """True if rounds are captured in CUDA graphs."""
        return self.device.type == "cuda" and self.config.compile != "off" and not self.is_sharded

    @property
    def step_width(self) -> int:
        """Rows of every step, if the target needs a single number."""
        return fixed_width(self.device.type, self.config.max_draft_tokens)

    @property
    def tree(self) -> tuple[int, int, int] | None:
        """Children per node, depth and budget of draft trees; None = chains."""
        config = self.config
        is_chosen = config.tree == "auto" and config.num_draft is None and config.max_draft > 1
        is_native = self.compile == "native" and not self.offloads
        if not is_chosen or not is_native or not self.drafters.intersection(registry.names("self", "model", "head")):
            return config.explicit_tree
        depth = min(TREE_DEPTH, config.max_draft - 1)
        return TREE_TOP, depth, min(config.max_draft, TREE_TOP + (depth - 1) * TREE_TOP**2)

    @property
    def has_async_trees(self) -> bool:
        """True if draft trees grow while offloaded weights are fetched."""
        return self.offloads and self.device.type == "cpu" and self.tree is not None

    @property
    def drafts_trees(self) -> bool:
        """True if any drafter may draft trees."""
        return self.tree is not None or bool({*registry.names("table", "mix")} & {*self.drafters, *self.modes})

    @property
    def shared_drafts(self) -> SharedDrafts:
        """What decides the order of the shared drafter's weights on a GPU."""
        return SharedDrafts(
            config=self.config,
            device=self.device,
            dtype=self.dtype,
            shares=bool(self.drafters_with(Need.QUANTIZED_TARGET)),
            tree=self.tree,
            is_split=self.pipeline is not None or self.is_sharded,
        )

    def num_slots(self, max_context: int) -> int:
        """Return the KV slots of a row for a context."""
        top, depth, _ = self.tree or (0, 0, 0)
        return kv_slots(
            max_context,
            self.step_width,
            tree=(top, depth),
            ahead=self.captures,
            prefetches=self.has_async_trees,
            pads=self.compile != "native",
        )


def resolve_config(
    config: EngineConfig,
    modes: Sequence[Mode] | None = None,
    *,
    progress: Progress = silent,
    in_memory: bool = False,
    has_block_source: bool = False,
    is_rank_zero: bool = True,
) -> ResolvedConfig:
    """Resolve options on this machine.

    Prepares CUDA before its initialization, and downloads the target if necessary.

    Args:
        modes: modes to load; None = the config's.
        in_memory: tensors replace the checkpoint's files.
        has_block_source: the caller offloads blocks itself, so that no plan is made.
        is_rank_zero: False for tensor-parallel workers, which repeat no warnings.

    Raises:
        ValueError: options that cannot be honoured, with the remedy.
        DoesNotFit: no plan stays within the limits.
    """
    chosen = tuple(modes or (config.mode,))
    check_options(config, chosen)
    if is_rank_zero:
        clean_cache()
    resolver = _Resolver(config, chosen, progress, in_memory, has_block_source, is_rank_zero)
    try:
        return resolver.resolve()
    except DoesNotFit as error:
        if not resolver.takes_any_device or resolver.device.type == "cpu":
            raise
        fall_back_to_cpu(f"{resolver.device} is too small, {error}")
        return resolver.resolve()


class _Resolver:
    def __init__(
        self,
        config: EngineConfig,
        modes: tuple[Mode, ...],
        progress: Progress,
        in_memory: bool,
        has_block_source: bool,
        is_rank_zero: bool,
    ) -> None:
        self._config, self._modes, self._progress = config, modes, progress
        self._in_memory, self._has_block_source, self._is_rank_zero = in_memory, has_block_source, is_rank_zero
        self.takes_any_device = config.device == "auto" and not config.split.enabled and config.tensor_parallel == 1
        self.device = torch.device("cpu")

    def resolve(self) -> ResolvedConfig:
        self.device = self._open_device()
        dtype = dtype_of(self._config.dtype, self.device)
        kernels = choose_kernels(self._config.kernels, self.device, dtype, self._config.compile)
        folder, config = folder_and_config(
            replace(self._config, kernels=kernels.kernels),
            self.device,
            needs_numbers=self._in_memory or self._has_block_source,
            warns=self._is_rank_zero,
            progress=self._progress,
        )
        if not config.dequantize and config.dtype == "auto" and self.device.type == "cpu":
            dtype = torch.float32
            kernels = choose_kernels(config.kernels, self.device, dtype, config.compile)
            config = with_head_quant(config)
        auto = None
        config, rows_reason = self._with_rows(config, folder, dtype)
        self._check_target(folder, config, has_triton=kernels.triton)
        inside = find_inner_heads(folder, config, self._modes, self.device, in_memory=self._in_memory)
        config = replace(config, inner_heads=inside)

        def choose(**how: bool) -> AutoDrafters:
            mode = compile_mode(config, self.device, kernels.triton)
            return choose_drafters(config, folder, self.device, dtype, mode, **how)

        mixes = [mode for mode in self._modes if mode in registry.names("mix")]
        mixes_head = bool({*registry.names("head")}.intersection(selection.active_drafters(config, *mixes)))
        if ("auto" in mixes or (mixes_head and not config.hybrid_with)) and not config.auto_drafters:
            auto = choose(offloads=self._has_block_source)
            config = replace(config, auto_drafters=auto.drafters)
        offload, warnings = None, list[str]()
        if not self._has_block_source:
            auto, offload, warnings = self._plan_with(auto, choose, config, dtype)
        for warning in warnings:
            log.warning("%s", warning)
        plan = None if offload is None else offload.plan
        if offload is not None and not offload.plan.offloads:
            offload = None
        if offload is not None:
            config = offload.config
        elif auto is not None:
            config = replace(config, auto_drafters=auto.drafters)
        if offload is None:
            config = with_stored_drafts(config, self._modes, folder, self.device)
        elif config.quant.format.is_nested:
            raise ValueError("draft_quant is nested, and the weights are offloaded; use hqq:4:64,head=4")
        pipeline = None
        if config.split.enabled:
            from sharesd.parallel.pipeline import plan_pipeline

            pipeline = plan_pipeline(config, self._modes, folder, dtype)
        device = self.device if pipeline is None else pipeline.output_device
        use(device)
        resolved = ResolvedConfig(
            config=config,
            modes=self._modes,
            folder=folder,
            device=device,
            dtype=dtype,
            compile=compile_mode(config, device, kernels.triton),
            has_triton=kernels.triton,
            auto=auto if "auto" in self._modes else None,
            plan=plan,
            offload=offload,
            pipeline=pipeline,
            has_block_source=self._has_block_source,
            in_memory=self._in_memory,
            rows_reason=rows_reason,
            experts=chooses_experts(folder, device),
            undivided=_undivided(folder, device),
        )
        check(resolved_conflicts(resolved))
        _warn_of_small_trees(resolved)
        if kernels.streams is not False:
            chosen = choose_streams(resolved.shared_drafts, by_name=kernels.streams is True)
            resolved = replace(resolved, config=replace(config, kernels=chosen))
        return resolved

    def _open_device(self) -> torch.device:
        """Open the device; prepare CUDA before its initialization."""
        config = self._config
        device = device_of(config.split.devices[-1] if config.split.devices else config.device)
        if device.type == "cuda" or config.compile in ("regional", "full"):
            set_compiler_caches()
        if device.type == "cuda":
            prepare_cuda(steady=config.steady_cublas)
        device = open_device(device, auto=self.takes_any_device)
        if device.type == "cuda":
            if self._is_rank_zero:
                warn_unknown_flash()
            use(device)
        return device

    def _with_rows(self, config: EngineConfig, folder: Path, dtype: torch.dtype) -> tuple[EngineConfig, str]:
        """Lower a default `max_batch`, where states of recurrent layers are large; also return the reason, or "".

        Weights that do not fit are offloaded, and caches then get a quarter of the memory.
        """
        if not isinstance(config.max_batch, DefaultLimit):
            return config, ""
        try:
            state = state_bytes(native_config(folder, self.device), dtype)
        except UnsupportedArchitecture:
            return config, ""
        if not state:
            return config, ""
        if self.device.type == "cuda":
            free, limit = int(torch.cuda.mem_get_info(self.device)[0]), config.offload.device_memory
        else:
            free, limit = free_memory(), config.offload.host_memory
        free = min(free, limit or free)
        weights = 0 if self._in_memory else sum(file.stat().st_size for file in weight_files(folder))
        weights = weights * dtype.itemsize // 2 if config.dequantize else weights
        rows = int(STATE_SHARE * max(free - weights, free // 4) / state)
        if rows >= config.max_batch:
            return config, ""
        reason = f"recurrent layers keep {show_bytes(state)} of each; --max-batch N sets another number"
        return replace(config, max_batch=DefaultLimit(max(rows, 1))), reason

    def _check_target(self, folder: Path, config: EngineConfig, *, has_triton: bool) -> None:
        top, depth, _ = config.explicit_tree or (TREE_TOP, TREE_DEPTH, 0)
        width = fixed_width(self.device.type, config.max_draft_tokens)
        span = kv_slots(0, width, tree=(top, depth), prefetches=True)
        is_plain = not config.split.enabled and config.tensor_parallel == 1 and config.kv_dtype == "auto"
        if is_plain and config.compile not in ("regional", "full") and span <= MAX_SPAN:
            return
        unsupported, undivided, layers = None, "", ""
        try:
            target = native_config(folder, self.device)
            undivided, layers = target.undivided, target.recurrent_layers
            span = span if any(target.conv_widths) else 0
        except UnsupportedArchitecture as reason:
            unsupported = str(reason)
        on_gpu = self.device.type == "cuda"
        check(
            target_conflicts(
                config,
                unsupported=unsupported,
                undivided=undivided,
                on_gpu=on_gpu,
                has_triton=has_triton,
                span=0 if unsupported is not None else span,
                max_span=MAX_SPAN,
                layers=layers,
            )
        )

    def _plan_with(
        self,
        auto: AutoDrafters | None,
        choose: Callable[..., AutoDrafters],
        config: EngineConfig,
        dtype: torch.dtype,
    ) -> tuple[AutoDrafters | None, Offloading | None, list[str]]:
        """Return the drafters with which nothing is offloaded, else the last that fit, their plan, and its warnings.

        Raises DoesNotFit if none fit.
        """
        ways: list[dict[str, bool]] = [{}] if auto is None else [{}, {"one_model": True}, {"offloads": True}]
        found, failure = None, None
        for how in ways:
            other, warnings = choose(**how) if how else auto, list[str]()
            drafts = config if other is None else replace(config, auto_drafters=other.drafters)
            try:
                offload = self._plan(drafts, dtype, warnings.append)
            except DoesNotFit as error:  # others may need less memory
                failure = error
                continue
            found = other, offload, warnings
            if offload is None or not offload.plan.offloads:
                break
        if found is None:
            assert failure is not None
            raise failure
        return found

    def _plan(self, config: EngineConfig, dtype: torch.dtype, warn: Callable[[str], object]) -> Offloading | None:
        width = fixed_width(self.device.type, config.max_draft_tokens)
        has_device_memory = backend_for(self.device, dtype, width, config.max_batch).kind == "cuda"
        obstacles = offload_obstacles(config, has_device_memory=has_device_memory, in_memory=self._in_memory)
        return plan_for(
            config,
            self._modes,
            dtype=dtype,
            progress=self._progress,
            in_memory=self._in_memory,
            obstacle=next(obstacles, None),
            warn=warn,
        )


def _undivided(folder: Path, device: torch.device) -> str:
    """Return what the target is if the native decoder runs it whole on one device."""
    try:
        return native_config(folder, device).undivided
    except UnsupportedArchitecture:
        return ""


def resolved_conflicts(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield what the chosen device, compile mode and drafters exclude."""
    config, device, compile = resolved.config, str(resolved.device), resolved.compile
    on_gpu, second = resolved.device.type == "cuda", resolved.drafters_with(Need.SECOND_MODEL)
    draft_device = resolved.draft_device_type
    if config.draft_device is not None and not second:
        users = registry.choices(selection.needing(Need.SECOND_MODEL))
        yield f"draft_device is {config.draft_device!r} and no mode is {users}; leave it out"
    if compile == "native" and on_gpu:
        yield f"compile is 'native' but device is {device}; use regional or full on a GPU"
    if compile == "full" and resolved.has_block_source:
        yield "compile is 'full', and offloaded blocks run one by one; use native, or regional on a GPU"
    if draft_device is not None and draft_device != resolved.device.type:
        yield (
            f"draft_device is {config.draft_device!r} and the target is on {device}, which would wait for it; give a "
            "device of its kind"
        )
    if draft_device is not None and compile == "full":
        yield (
            f"compile is 'full' and draft_device is {config.draft_device!r}, to which steps move and back; use "
            "regional, or auto"
        )
    if config.split.enabled and resolved.has_block_source:
        yield "blocks in stages stay where they are; drop offload, or devices"
    if resolved.pipeline is not None and len(resolved.pipeline.stages) > 1 and compile == "full":
        yield "compile is 'full' and a step runs on several devices; use regional, or auto"
    if on_gpu and not resolved.has_triton and _solves_linears(config, resolved.drafters):
        yield (
            f"quantized linears on {device} need Triton; use a mode without them (naive, eagle, suffix), --draft-quant "
            "bnb:4:64, or --device cpu"
        )
    if config.activations != "exact" and config.dequantize:
        yield (
            f"activations is {config.activations!r}, which is for weights that run as they are stored; leave it out, "
            "or use --no-dequantize"
        )
    numbers = "use --dequantize" if config.target_quant is None else "drop --target-quant"
    if config.dequantize is False and compile != "native" and not on_gpu:
        yield f"stored weights run in the CPU kernel, and steps are compiled by {compile!r}; {numbers}"
    if config.dequantize is False and on_gpu and config.kernels == "torch":
        yield f"stored weights run in the Triton kernels, and torch's run here; {numbers}"
    yield from _draft_conflicts(resolved)
    if on_gpu and resolved.dtype == torch.float64 and resolved.undivided:
        what = resolved.undivided
        yield f"dtype is float64, for which {what} has no kernel on {device}; use float32, or --device cpu"
    if config.activations != "exact" and on_gpu:
        yield f"activations is {config.activations!r}, which rounds them on a CPU alone; leave it out"


def _draft_conflicts(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield what excludes drafts by weights of the target itself."""
    config = resolved.config
    of_head = config.head_quant
    if of_head is not None and (of_head.format.is_nested or of_head.experts is not None):
        yield f"head_quant is {of_head.spec}, and trained heads have no upper halves and no experts; leave it out"
    if (obstacle := stored_drafts_obstacle(config, resolved.drafters, str(resolved.device))) is not None:
        yield f"draft_quant is {config.quant.method}, and {obstacle}"
    elif _quantizes_target(config, resolved.drafters):
        chosen = resolved.experts
        copies_experts = not (config.quant.format.keeps_weights or {*_OF_EXPERTS} <= {*config.quant.skip_projs})
        if chosen and resolved.device.type == "cuda" and copies_experts:
            fewer = "" if resolved.offload is not None else "stored,experts=N, "
            yield (
                f"draft_quant is {config.quant.spec}, and quantized copies of experts run on CPUs alone; use "
                f"{fewer}--quant-skip proj={','.join(_OF_EXPERTS)}, or a mode without them (naive, eagle, suffix)"
            )
        elif config.quant.experts is None:
            return
        elif chosen == 0:
            yield (
                f"draft_quant is {config.quant.spec}, and the target is not a mixture of experts that runs natively on "
                f"{resolved.device}; use hqq:4:64,head=4"
            )
        elif config.quant.experts >= chosen:
            yield f"draft_quant is {config.quant.spec}, and the target chooses {chosen} experts for a token; give fewer"


def _solves_linears(config: EngineConfig, drafters: Collection[str]) -> bool:
    """True if linears are quantized for this project's kernels."""
    copies = _quantizes_target(config, drafters)
    head_quant = config.head_quant if {*registry.names("head")} & {*drafters} else None
    quants = (config.quant if copies else None, head_quant)
    return any(quant is not None and quant.format.solver is not None for quant in quants)


def _quantizes_target(config: EngineConfig, drafters: Collection[str]) -> bool:
    """True if the target, or a copy of it, drafts as `quant` says."""
    second = registry.those(drafters, Need.SECOND_MODEL) and selection.second_model(config) is None
    return bool(second or registry.those(drafters, Need.QUANTIZED_TARGET))


def _warn_of_small_trees(resolved: ResolvedConfig) -> None:
    """Warn of a given `max_draft` above the size of chosen trees."""
    config, tree = resolved.config, resolved.tree
    if config.tree != "auto" or tree is None or isinstance(config.max_draft, DefaultLimit):
        return
    if config.max_draft > tree[2]:
        log.warning(
            "max_draft is %d and chosen draft trees have %d tokens at most, which is used; tree off allows more",
            config.max_draft,
            tree[2],
        )


def compile_mode(config: EngineConfig, device: torch.device, has_triton: bool) -> CompileMode:
    """Return the compile mode: as given, else native or regional."""
    if config.compile != "auto":
        return config.compile
    if device.type == "cpu":
        return "off" if config.kernels == "torch" else "native"
    return "regional" if config.tensor_parallel == 1 and has_triton else "off"
