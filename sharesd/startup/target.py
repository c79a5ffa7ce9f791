"""From a `ResolvedConfig` to models in memory: read, quantized, packed and offloaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from compile.adaptive_threads import STEP_THREADS
from compile.attention import reads_live_slots
from compile.cpp_extension import kernels_version, prepare
from compile.op_registry import runs_cpp
from compile.start_times import START
from multigpu.pipeline_parallel import PipelinePlan
from multigpu.tensor_parallel import UNSHARDED, Shard
from offload.plan import show_bytes
from quant.quantize_model import QuantReport
from quant.solved_linears import PackFn
from quant.switch_linear import Switch
from sharesd.config import MIN_CONTEXT, PLANNED_CONTEXT, SMALL, EngineConfig
from sharesd.devices.host_memory import free_memory, own_memory
from sharesd.devices.selection import device_of
from sharesd.drafters import selection
from sharesd.drafters.base import num_bytes
from sharesd.drafters.registry import Need
from sharesd.field_types import DefaultLimit
from sharesd.models.base import CausalModel
from sharesd.models.checkpoint import Progress, identity, is_stored, silent
from sharesd.models.decoder import Decoder
from sharesd.models.hub import resolve
from sharesd.models.loader import BlockCallback, MakeLinear, Tensors, decoder_config, load_model, stored_tensors
from sharesd.models.tokenizer import Tokenizer, load_tokenizer, require_same_vocabulary
from sharesd.startup.resolve import ResolvedConfig
from sharesd.weights.backend import backend_for
from sharesd.weights.draft_heads import DraftHeads
from sharesd.weights.packing import CpuPacker, KeptRecords, make_cpu_linear
from sharesd.weights.quantize import ModelQuantizer

if TYPE_CHECKING:
    from offload.block_layout import RecordLayout
    from offload.prefetcher import Prefetcher
    from sharesd.weights.offload_loader import OffloadLoader
    from sharesd.weights.offloaded_decoder import OffloadedBlocks

log = logging.getLogger(__name__)

PROBE_SLOTS = 32
"""Slots of a small cache, to count its bytes."""
SHARE_OF_FREE = 0.5
"""Share of the free memory for KV caches of a chosen length."""


class Context(NamedTuple):
    """A length and the reason for it."""

    tokens: int
    reason: str


def choose_context(
    config: EngineConfig,
    target: CausalModel,
    device: torch.device,
    *,
    taps: Sequence[int] = (),
    copies: int = 1,
    planned: bool = False,
    mapped_bytes: int = 0,
) -> Context:
    """Choose the tokens of a row of the KV cache.

    Args:
        target: the model, with its weights in memory.
        taps: depths of hidden states in the cache.
        copies: caches of this size, that of a draft model included.
        planned: weights are placed by a plan or shared, so that the choice does not depend on free memory.
        mapped_bytes: weights in a mapped file, whose memory the system counts as free.

    Raises:
        ValueError: the memory holds less than the minimum.
    """
    own = target.max_context
    rows, per_token = config.max_batch, partial(_bytes_per_token, target, taps, copies)
    if isinstance(config.max_context, int):
        cut = config.max_context > own
        tokens = min(config.max_context, own)
        if cut and not isinstance(config.max_context, DefaultLimit):
            log.warning(
                "max_context is %d and the model's own limit is %d tokens, which is used; give at most that",
                config.max_context,
                own,
            )
        if not planned:
            per_row, fixed, state = per_token()
            if device.type == "cuda":
                _require_room(tokens, rows, per_row, device, fixed)
            _require_room_for_states(rows, state, max(0, _free(device) - mapped_bytes))
        return Context(tokens, "the model's own limit" if cut else "as given")
    max_context, reason = own, "the model's own limit"
    reads_all = not isinstance(target, Decoder) or not reads_live_slots(
        device, target.get_buffer("cos_0").dtype, target.config.head_dim
    )
    if (planned or reads_all) and own > PLANNED_CONTEXT:
        max_context = PLANNED_CONTEXT
        reason = "the weights are placed by a plan" if planned else "steps read the whole cache"
        reason = f"chosen since {reason}; --max-context N sets another"
    if planned:
        return Context(max_context, reason)
    free, (per_row, fixed, state) = max(0, _free(device) - mapped_bytes), per_token()
    _require_room_for_states(rows, state, free)
    holds = max(0, int((SHARE_OF_FREE * free - rows * state) / (rows * per_row + fixed)))
    for_rows = f"for {rows} rows" if rows > 1 else "for a row"
    if holds < MIN_CONTEXT:
        raise ValueError(
            f"half of the free memory ({show_bytes(free)}) holds {holds} tokens of context {for_rows}, and at least "
            f"{MIN_CONTEXT} are needed; lower --max-batch, or end what else uses memory"
        )
    if holds < max_context:
        max_context = holds // MIN_CONTEXT * MIN_CONTEXT
        reason = f"what half of the free memory ({show_bytes(free)}) holds {for_rows}"
    return Context(max_context, reason)


def _require_room(tokens: int, rows: int, per_row: float, device: torch.device, fixed: float = 0.0) -> None:
    """Raise ValueError if a GPU has too little memory for KV caches."""
    free, per_token = _free(device), rows * per_row + fixed
    if tokens * per_token <= free:
        return
    batch, context = max(0, int((free / tokens - fixed) / per_row)), int(free / per_token)
    fits = [f"--max-batch {batch}"] if batch else []
    fits += [f"--max-context {context}"] if context >= MIN_CONTEXT else []
    raise ValueError(
        f"KV caches of {rows} rows of {tokens} tokens need {show_bytes(tokens * per_token)} and {device} has "
        f"{show_bytes(free)} free; use {' or '.join(fits) or 'a smaller model'}, or end what else runs there"
    )


def _require_room_for_states(rows: int, state: int, free: int) -> None:
    """Raise ValueError if states of recurrent layers, of `state` bytes a row, need more than the free memory."""
    if rows * state <= free:
        return
    fits = f"use --max-batch {free // state}" if free >= state else "use a smaller model"
    raise ValueError(
        f"recurrent layers keep {show_bytes(state)} of each of {rows} rows and {show_bytes(free)} is free; {fits}, or "
        "end what else uses memory"
    )


def _free(device: torch.device) -> int:
    """Return the free bytes of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return max(0, free_memory() - own_memory())


def _bytes_per_token(target: CausalModel, taps: Sequence[int], copies: int) -> tuple[float, float, int]:
    """Return bytes of a row's token in all caches, what they need besides, and what a row takes whatever its length."""
    cache = target.new_cache(1, PROBE_SLOTS, taps)
    features = 0 if cache.features is None else cache.features.nbytes
    grows, state = cache.nbytes + features, 0
    if cache.recurrent is not None:
        grows, state = grows - cache.recurrent.nbytes, cache.recurrent.row_bytes
    return copies * grows / cache.slots, cache.expanded_bytes / cache.slots, copies * state


BlockSource: TypeAlias = "Callable[[Decoder], tuple[Prefetcher, Mapping[int, RecordLayout]]]"
"""Function that offloads packed weights of some blocks.

It returns their prefetcher, and the layout of each record.
"""


def prepare_cpu(resolved: ResolvedConfig) -> None:
    """Fix the number of threads, and build C++ kernels of native steps."""
    STEP_THREADS.fix(resolved.config.threads)
    if resolved.compile == "native":
        blocks = ["block_ops"] if resolved.config.dequantize is False else []
        blocks += ["quantize_ops"] if resolved.config.target_quant is not None else []
        prepare(str(resolved.dtype).removeprefix("torch."), "sampling_ops", *blocks)


def find_draft_model(resolved: ResolvedConfig, tokenizer: Tokenizer, progress: Progress) -> Path | None:
    """Return the folder of the second model, if one is given.

    Raises:
        ValueError: its vocabulary is not the target's.
    """
    config = resolved.config
    name = selection.second_model(config)
    if name is None or not resolved.drafters_with(Need.SECOND_MODEL):
        return None
    folder = resolve(name, progress=progress, ignored=config.ignore_keys, trust_remote_code=config.trust_remote_code)
    if config.draft != SMALL:  # which has no tokenizer of its own
        require_same_vocabulary(tokenizer, load_tokenizer(folder))
    return folder


class ModelLoader:
    """Loads the models of one start, in one dtype. The attributes of the target are there after `load_target`."""

    target: CausalModel
    weight_bytes: int
    """Weights of the target at full precision."""
    context: Context
    heads: DraftHeads | None
    streamed: OffloadedBlocks | None
    """Offloaded blocks, if there are any."""
    offload_loader: OffloadLoader | None
    """Loader of the offload plan, if there is one."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        *,
        part: Shard = UNSHARDED,
        tensors: Tensors | None = None,
        progress: Progress = silent,
    ) -> None:
        """Set up loading.

        `part`: share of the target that this rank loads. `tensors` replace the checkpoint's weight files.
        """
        self._resolved, self._part, self._tensors, self._progress = resolved, part, tensors, progress
        self._is_stored = resolved.config.dequantize is False
        self.switch = Switch()
        self.reports: dict[str, QuantReport] = {}
        """Drafter -> its quantized linears."""
        self._mapped_bytes = 0
        self._backend = backend_for(resolved.device, resolved.dtype, resolved.step_width, resolved.config.max_batch)
        self._quantizing = ModelQuantizer(
            resolved.config.quant,
            device=resolved.device,
            folder=None if tensors else resolved.folder,
            build=self._pack_fn,
            progress=progress,
        )

    def load_target(self, heads: DraftHeads | None = None, block_source: BlockSource | None = None) -> None:
        """Load the target and its trained heads.

        Heads come before the target's linears are quantized, since they may share the LM head.
        """
        resolved, quantized, offload_loader = self._resolved, None, None
        sharing = resolved.drafters_with(Need.QUANTIZED_TARGET)
        if resolved.offload is not None:
            from sharesd.weights.offload_loader import OffloadLoader, StreamingQuantizer

            if sharing:
                quantized = StreamingQuantizer(partial(self._quantizing.layer_quantizer, switch=self.switch))
            offload_loader = OffloadLoader(resolved.offload, self._backend, quantized, self._progress)
        with nullcontext() if offload_loader is None else offload_loader:
            model = self._read(
                resolved.folder,
                tensors=self._tensors,
                on_block_loaded=offload_loader,
                mmap_embeddings=offload_loader is not None and not self._is_stored,
                packs=self._is_stored or (offload_loader is None and block_source is None),
                stays=offload_loader is None,
                part=self._part,
                split=resolved.pipeline,
            )
            weight_bytes = num_bytes(model)
            if quantized is not None:
                weight_bytes -= quantized.report().quantized_bytes
            if heads is not None:
                with START.phase("trained heads"):
                    make_linear = self._make_linear(None, stays=True)
                    found = heads.load(model, self._quantizing, resolved.device, resolved.folder, make_linear)
                for mode, report in found.items():
                    self._record(mode, report=report)
            if sharing:
                with START.phase("quantize drafts"):
                    report = quantized.finish() if quantized else self._quantizing.whole(model, self.switch)
                self._record(*sharing, report=report)
            if offload_loader is not None:
                assert isinstance(model, Decoder)
                offload_loader.load_head(model)
                block_source = offload_loader.stream
        self.target, self.weight_bytes, self.heads, self.offload_loader = model, weight_bytes, heads, offload_loader
        self.context = self._choose_context(model, () if heads is None else heads.taps)
        self.streamed = self._pack_target(model, block_source, is_placed=offload_loader is not None)

    def load_draft_model(self, folder: Path | None) -> CausalModel:
        """Load the second model, or without a folder a quantized target.

        Raises:
            ValueError: its vocabulary is not the target's, or its context is shorter.
        """
        if folder is not None:
            model = self._read(folder, split=self._draft_stage(folder))
            if model.vocab_size != self.target.vocab_size and self._resolved.config.draft == SMALL:
                raise ValueError(
                    f"the draft model has {model.vocab_size} logits and the target {self.target.vocab_size}; "
                    "give a draft model of the target's family"
                )
        else:
            model = self._load_copy()
        if isinstance(model, Decoder):
            self._backend.pack_model(model)
            self._backend.finalize(model)
        if model.max_context < self.context.tokens:
            raise ValueError(
                f"the draft model's context is {model.max_context} tokens and {self.context.tokens} are requested; "
                f"use --max-context {model.max_context}, or another draft model"
            )
        return model

    def _load_copy(self) -> CausalModel:
        """Load a quantized copy of the target, block by block."""
        folder, drafters = self._resolved.folder, self._resolved.drafters_with(Need.SECOND_MODEL)
        if not isinstance(self.target, Decoder):
            model = self._read(folder)
            self._record(*drafters, report=self._quantizing.whole(model))
            return model
        from sharesd.weights.offload_loader import StreamingQuantizer

        quantized = StreamingQuantizer(self._quantizing.layer_quantizer)
        model = self._read(
            folder,
            tensors=self._tensors,
            on_block_loaded=quantized,
            mmap_embeddings=self.offload_loader is not None and not self._is_stored,
            packs=self._is_stored or self.offload_loader is None,
            stays=self.offload_loader is None,
            split=self._draft_stage(folder),
        )
        self._record(*drafters, report=quantized.finish())
        return model

    def _read(
        self,
        folder: Path,
        *,
        tensors: Tensors | None = None,
        on_block_loaded: BlockCallback | None = None,
        mmap_embeddings: bool = False,
        packs: bool = True,
        stays: bool = True,
        part: Shard = UNSHARDED,
        split: PipelinePlan | None = None,
    ) -> CausalModel:
        resolved, kept = self._resolved, None
        if packs and tensors is None and on_block_loaded is None and self._runs_stored(folder):
            kept = KeptRecords(f"{folder} {part}", f"{identity(folder)} {kernels_version()}")
            if kept.is_mapped:
                tensors = partial(stored_tensors, folder, outlines=True)
        model = load_model(
            folder,
            dtype=resolved.dtype,
            device=resolved.device,
            trust_remote_code=resolved.config.trust_remote_code,
            progress=self._progress,
            tensors=tensors,
            on_block_loaded=on_block_loaded,
            make_linear=self._make_linear(kept, stays=stays) if packs else None,
            mmap_embeddings=mmap_embeddings,
            part=part,
            split=split,
        )
        if kept is not None:
            kept.keep(self._progress)
            self._mapped_bytes += kept.mapped_bytes
        if isinstance(model, Decoder):
            model.q8_kv = resolved.config.kv_dtype == "q8"
        if split is not None and split.crosses_devices:
            from sharesd.parallel.pipeline import StagedBlocks

            assert isinstance(model, Decoder)
            model.ranges = StagedBlocks(split).ranges
        return model

    def _draft_stage(self, folder: Path) -> PipelinePlan | None:
        """Return the stage of a second model on its own device."""
        config, device = self._resolved.config, self._resolved.device
        if config.draft_device is None:
            return None
        plan = PipelinePlan.of([device_of(config.draft_device)], [decoder_config(folder).num_hidden_layers])
        return replace(plan, caller_device=device, simulated_latency_s=config.split.simulated_latency_s)

    def _choose_context(self, model: CausalModel, taps: tuple[int, ...]) -> Context:
        resolved = self._resolved
        config = resolved.config
        is_planned = resolved.offload is not None or resolved.pipeline is not None or resolved.is_sharded
        context = choose_context(
            config,
            model,
            resolved.device,
            taps=taps,
            copies=2 if resolved.drafters_with(Need.SECOND_MODEL) else 1,
            planned=config.offload.limited or is_planned,
            mapped_bytes=self._mapped_bytes,
        )
        log.info("context: %d tokens (%s)", context.tokens, context.reason)
        return context

    def _pack_target(
        self, model: CausalModel, block_source: BlockSource | None, *, is_placed: bool
    ) -> OffloadedBlocks | None:
        """Pack linears for the device's kernels; offloaded ones are placed already."""
        if not isinstance(model, Decoder):
            return None
        self._backend.pack_model(model)
        streamed = None
        if block_source is not None:
            shares = self._resolved.drafters_with(Need.QUANTIZED_TARGET)
            is_quantized = (lambda: self.switch.quantized) if shares else None
            from sharesd.weights.offloaded_decoder import OffloadedBlocks

            streamed = OffloadedBlocks(model, *block_source(model), is_quantized)
            model.ranges = streamed.ranges
        if not is_placed:
            self._backend.finalize(model, keep=streamed.linears if streamed else ())
        return streamed

    def _pack_fn(self, shares: bool) -> PackFn | None:
        """Return the packer of quantized linears; None = the choice of `quant`.

        `shares`: they are the target's own, for the shared drafter.
        """
        resolved = self._resolved
        if self._backend.kind == "cuda":
            return self._backend.packer(streams=shares and resolved.config.kernels == "streams")
        if resolved.compile != "native":
            return None
        return CpuPacker(None if resolved.offload else self._backend.arena.zeros)

    def _runs_stored(self, folder: Path) -> bool:
        """Return True if a CPU runs a folder as stored."""
        return self._backend.kind == "cpu" and runs_cpp(self._backend.device) and is_stored(folder)

    def _make_linear(self, kept: KeptRecords | None, *, stays: bool) -> MakeLinear | None:
        """Return the maker of packed linears; None: torch's.

        `stays`: they are made in their final memory, and not freed one by one.
        """
        resolved = self._resolved
        if self._backend.kind == "cuda":
            return self._backend.make_linear if resolved.config.dequantize is False else None
        if not runs_cpp(self._backend.device):
            return None
        zeros = self._backend.arena.zeros if stays else self._backend.zeros
        activations = resolved.config.activations
        return partial(make_cpu_linear, dtype=resolved.dtype, zeros=zeros, activations=activations, kept=kept)

    def _record(self, *drafters: str, report: QuantReport) -> None:
        self.reports |= dict.fromkeys(drafters, report)
        log.info("quantized %d linears to %s in %.1f s", report.num_linears, report.spec, report.seconds)
