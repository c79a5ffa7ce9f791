"""Composition: resolved options -> target -> steps -> drafters -> engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compile.cuda_graphs import Graphs
from compile.start_times import START
from multigpu.tensor_parallel import UNSHARDED
from offload.plan import Plan
from quant.quantize_model import QuantReport
from sharesd import __version__
from sharesd.config import EngineConfig, Mode, PlanOnly
from sharesd.drafters import registry
from sharesd.drafters.base import BuildInputs, Drafter
from sharesd.drafters.selection import active_drafters
from sharesd.engine.engine import Engine
from sharesd.engine.options import EngineOptions
from sharesd.engine.stats import Stats
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.checkpoint import Progress, silent
from sharesd.models.loader import Tensors
from sharesd.models.prefill import PIECES, prefill
from sharesd.models.tokenizer import load_tokenizer
from sharesd.sampling_params import SamplingParams
from sharesd.startup.cache_keys import costs_file, kv_identity
from sharesd.startup.loaded_model import LoadedModel
from sharesd.startup.resolve import ResolvedConfig, resolve_config
from sharesd.startup.target import BlockSource, ModelLoader, find_draft_model, prepare_cpu
from sharesd.startup.warmup import warm_up, warm_up_all_variants
from sharesd.weights.draft_heads import DraftHeads
from sharesd.weights.offload_rates import acceptance_recorder
from sharesd_files import cache_root

if TYPE_CHECKING:
    from multigpu.process_group import Group
    from sharesd.records.prompt_cache import PromptCache
    from sharesd.records.trace_file import TraceFile

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Time and memory that a start took."""

    load_seconds: float
    """Reading, converting, quantizing and packing weights."""
    compile_seconds: float
    """Compiling and warming up."""
    weight_bytes: int
    """Weights of the target at full precision."""
    quant: QuantReport | None
    """The target's quantized linears (share), or those of the classic copy."""
    resident_share: float = 1.0
    """Share of blocks whose full-precision weights are resident."""
    max_context: int = 0
    """Maximum tokens of prompt and answer per row of the KV cache."""
    predicted: float | None = None
    """Tokens per second predicted by the offload plan.

    None if all weights are resident.
    """


class Runtime:
    """A loaded target with the drafters of several modes, and the engine that decodes with them.

    `warm_up` comes before the first call of a mode.
    """

    def __init__(
        self,
        config: EngineConfig,
        modes: Sequence[Mode] | None = None,
        *,
        progress: Progress = silent,
        tensors: Tensors | None = None,
        offload: BlockSource | None = None,
        planned: Callable[[Plan], None] | None = None,
        group: Group | None = None,
    ) -> None:
        """Load the models that modes need.

        Args:
            modes: modes to load; None = the config's.
            progress: called with a stage's name, its finished part and its total.
            tensors: replace the weight files of the target's folder.
            offload: offloads blocks of the target, in place of a plan.
            planned: called with the offload plan, if there is one, before anything is loaded.
            group: tensor-parallel ranks, the others of which run `run_tp_worker`; None = start them.

        Raises:
            ValueError: options that cannot be honoured, with the remedy.
            PlanOnly: option offload is plan-only.
            RankLost: a rank does not join.
        """
        started, in_memory = time.perf_counter(), tensors is not None
        with START.phase("options and model folder"):
            resolved = resolve_config(
                config, modes, progress=progress, in_memory=in_memory, has_block_source=offload is not None
            )
        self.plan, self.auto = resolved.plan, resolved.auto
        if resolved.config.offload.when == "plan-only":
            raise PlanOnly(() if self.plan is None else self.plan.reasons)
        if config.prompt_cache is not None:
            from sharesd.records.prompt_cache import make_folder

            make_folder(config.prompt_cache)
        self.trace = None if config.trace is None else _open_trace(config.trace, resolved)
        if self.plan is not None and planned is not None:
            planned(self.plan)
        prepare_cpu(resolved)
        with START.phase("tokenizer"):
            self.tokenizer = load_tokenizer(resolved.folder, config.target)
        draft_folder = find_draft_model(resolved, self.tokenizer, progress)
        heads = DraftHeads(resolved.config, resolved.drafters, progress)
        heads.check(resolved.folder)
        self._cost_folders = [*filter(None, [draft_folder]), *heads.folders.values()]
        self._group, part = None, UNSHARDED
        if resolved.is_sharded:
            options, chosen, folder = resolved.config, resolved.modes, resolved.folder
            from sharesd.parallel.tensor_parallel import init_tp

            self._group, part, device = init_tp(
                options, chosen, folder, device=resolved.device, compile=resolved.compile, group=group
            )
            resolved = replace(resolved, device=device)
        self._resolved = resolved
        loader = ModelLoader(resolved, part=part, tensors=tensors, progress=progress)
        with START.phase("weights"):
            loader.load_target(heads, offload)
        with START.phase("steps and KV cache"):
            self.model = model = LoadedModel(resolved, loader, group=self._group, draft_folder=draft_folder)
        self._prompt_cache = self._open_prompt_cache()
        with START.phase("drafters"):
            self._drafters: dict[str, Drafter | None] = {mode: _build_drafter(mode, model) for mode in resolved.modes}
        # The mode of calls without one is the config's, if it is loaded.
        modes_in_order = sorted(resolved.modes, key=lambda mode: mode != resolved.config.mode)
        self.engine = self._new_engine({mode: self._drafters[mode] for mode in modes_in_order}, model.cache)
        self.load_seconds = time.perf_counter() - started
        self.compile_seconds: dict[Mode, float] = {}
        self.config, self.modes, self.compile = resolved.config, resolved.modes, resolved.compile
        self.device, self.dtype, self.tree = resolved.device, resolved.dtype, resolved.tree
        self.target, self.streamed = model.target, model.streamed
        self.weight_bytes = loader.weight_bytes
        self.max_context, self.context_reason = loader.context
        self.rows_reason = resolved.rows_reason
        self.cache, self.step = model.cache, model.step

    def warm_up(
        self, mode: Mode | None = None, params: SamplingParams | None = None, *, each_kind: bool = False
    ) -> Engine:
        """Compile a mode's rounds and time them; return the engine.

        Args:
            mode: one of the loaded modes; None = the config's.
            params: sampling parameters to warm up for.
            each_kind: warm up for all rounds that requests together may need.
        """
        mode, engine = mode or self.config.mode, self.engine
        engine.of_mode(mode)  # raises ValueError
        engine.trace = None  # warm-up is left out
        started, graphs = time.perf_counter(), self.model.graphs
        num_before, bytes_before = Graphs.num_captures, 0 if graphs is None else graphs.nbytes
        params = params or SamplingParams()
        costs = costs_file(
            self._resolved,
            mode,
            params,
            widths=self.model.widths.widths,
            streamed=self.streamed,
            folders=self._cost_folders,
        )
        with START.phase("warm-up"):
            warm_up(engine, mode, params, costs)
            if each_kind:
                warm_up_all_variants(engine, mode)
            if self.device.type == "cuda":
                self._warm_prompts()
                from quant.formats.hqq.gemlite_configs import save_configs

                save_configs(cache_root() / "settings")
        if graphs is not None:
            num, megabytes = Graphs.num_captures - num_before, (graphs.nbytes - bytes_before) / 1e6
            sizes = ", ".join(map(str, engine.batch_sizes))
            log.info("mode %s: %d CUDA graphs, %.0f MB, for rounds of up to %s rows", mode, num, megabytes, sizes)
        self.compile_seconds[mode] = self.compile_seconds.get(mode, 0.0) + time.perf_counter() - started
        engine.trace = self.trace
        return engine

    def new_plain_engine(self) -> Engine:
        """Return an engine of mode naive with its own KV cache, which can alternate with another engine."""
        return self._new_engine({registry.NAIVE: None}, self.model.new_cache())

    def report(self, mode: Mode | None = None) -> LoadReport:
        """Return the times and bytes of loading and warming up a mode."""
        mode = mode or self.config.mode
        return LoadReport(
            load_seconds=self.load_seconds,
            compile_seconds=self.compile_seconds.get(mode, 0.0),
            weight_bytes=self.weight_bytes,
            max_context=self.max_context,
            quant=self.model.loader.reports.get(mode),
            resident_share=1.0 if self.streamed is None else self.streamed.resident_share,
            predicted=self.plan.tokens_per_second if self.plan is not None and self.plan.offloads else None,
        )

    def close(self) -> None:
        """Save texts to the prompt cache; end prefetching, ranks and the trace."""
        while self.engine.save_text():
            pass
        if self.streamed is not None:
            self.streamed.stream.close()
        if self._group is not None:
            from sharesd.parallel.tensor_parallel import shutdown_tp

            shutdown_tp(self._group)
        self.close_trace()

    def close_trace(self) -> None:
        """Write and close the trace, if there is one."""
        if self.trace is not None:
            self.trace.close()

    @torch.inference_mode()
    def _warm_prompts(self) -> None:
        """Read prompts of all piece sizes, to plan and compile kernels.

        Captures free unused memory, so prompts are read after them.
        """
        models = {id(self.cache): (self.step, self.cache)}
        for drafter in self._drafters.values():
            for model, cache in drafter.prompt_readers() if drafter is not None else ():
                models[id(cache)] = model, cache
        for model, cache in models.values():
            for size in PIECES:
                tokens = [0] * min(size, self.max_context)
                prefill(model, cache, [tokens] + [[] for _ in range(cache.batch - 1)], [0] * cache.batch)
            cache.lengths.fill_(1)

    def _keeper(self, mode: Mode) -> Callable[[Stats], None] | None:
        """Return a function that keeps acceptance counts for later offload plans."""
        resolved = self._resolved
        is_kept = resolved.offload is not None and not resolved.in_memory and bool(self.model.loader.reports)
        if not is_kept or mode not in registry.names("self", "model", "mix"):
            return None

        return acceptance_recorder(
            resolved.folder, mode, resolved.config.quant, (resolved.config.explicit_tree or (0,))[0]
        )

    @property
    def _recompute_decoded_kv(self) -> bool:
        resolved = self._resolved
        return resolved.config.exact and (resolved.device.type == "cuda" or self.model.widths.depends_on_width)

    def _open_prompt_cache(self) -> PromptCache | None:
        """Return the prompt cache, if the options name a folder."""
        config, cache, recompute = self._resolved.config, self.model.cache, self._recompute_decoded_kv
        if config.prompt_cache is None:
            return None
        from sharesd.records.prompt_cache import PromptCache

        return PromptCache(
            Path(config.prompt_cache),
            cache,
            identity=kv_identity(self._resolved, cache, recompute_decoded_kv=recompute),
            max_bytes=config.prompt_cache_size,
            recompute_decoded_kv=recompute,
        )

    def _new_engine(self, drafters: Mapping[str, Drafter | None], cache: StaticKVCache) -> Engine:
        model = self.model
        config, streamed = model.config, model.streamed
        return Engine(
            target=model.step,
            tokenizer=self.tokenizer,
            cache=cache,
            drafters=drafters,
            options=EngineOptions(
                max_context=model.max_context,
                model_name=config.target or "the embedded model",
                auto_length=config.num_draft is None,
                widths=model.widths.widths,
                recompute_decoded_kv=self._recompute_decoded_kv,
                graphs=model.graphs if model.can_capture else None,
                buckets=model.may_have_buckets and model.widths.buckets,
                gumbel=model.gumbel,
                prefill_chunk=config.prefill_chunk,
                async_scheduling=model.graphs is not None and streamed is None,  # a pass too many takes long
                transfer_stats=None if streamed is None else partial(getattr, streamed.stream, "traffic"),
                overlap_hook=None if streamed is None else streamed.stream.overlap,
                on_finish={mode: keeper for mode in drafters if (keeper := self._keeper(mode)) is not None},
                prompt_cache=self._prompt_cache if cache is model.cache else None,
                require_trees=config.explicit_tree is not None,
            ),
        )


def _build_drafter(mode: str, inputs: BuildInputs) -> Drafter | None:
    """Build the drafter of a mode; None for plain decoding."""
    if mode == registry.NAIVE:
        return None
    spec = registry.spec_of(mode)
    if spec.is_model:
        return registry.build_model_drafter(spec, inputs)
    from sharesd.drafters.hybrid.drafter import build

    return build(inputs, mode, active_drafters(inputs.config, mode))


def _open_trace(path: str, resolved: ResolvedConfig) -> TraceFile:
    """Open the trace; ValueError if it cannot be written."""
    from sharesd.records.trace_file import TraceFile

    versions = {"sharesd": __version__, "torch": torch.__version__}
    return TraceFile(Path(path), modes=resolved.modes, target=resolved.config.target or "embedded", **versions)
