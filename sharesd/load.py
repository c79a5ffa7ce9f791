"""The one place that composes: load -> quantize -> pack -> cache -> compile -> engines."""

from __future__ import annotations

import atexit
import hashlib
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compile.attention import reads_live_slots
from compile.cuda import settings
from compile.graphs import Graphs
from compile.head import NativeHead
from compile.linear import pack_linears
from compile.native import cache_root, kernels_version, prepare
from compile.ops import runs_triton
from compile.pages import weights_on_huge_pages
from compile.regions import CompiledBlocks, CompiledForms, CompiledModel
from compile.solve import solve_groups
from compile.stack import NativeStack, Unsuited
from compile.threads import CREW
from multigpu.group import Group, ProcessGroup
from multigpu.launch import join, launched_rank, local_device, num_sharing, spawn
from multigpu.pipeline import Split
from multigpu.tensor import TILE, WHOLE, GatheredLinear, Part, gather_columns
from offload.layout import Layout
from offload.plan import Plan
from offload.stream import Stream
from quant.attach import Build, LinearQuantizer, QuantReport, Solving, make_low, quantize_linears
from quant.config import QuantConfig
from quant.gemlite_configs import load_configs, save_configs
from quant.linear import Switch
from quant.solver import QuantizedWeight
from sharesd import __version__, sampling
from sharesd.acceptance import keeper
from sharesd.config import HEADS, MODEL_DRAFTERS, TABLES, CompileMode, EngineConfig, Mode, PlanOnly, SamplingParams
from sharesd.decoding.cache import StaticKVCache
from sharesd.decoding.calibrate import warm_up, warm_up_each_kind
from sharesd.decoding.engine import Engine
from sharesd.decoding.prefill import PIECES, prefill, slots_for
from sharesd.decoding.ranks import LeadingModel, follow
from sharesd.decoding.selfcheck import WIDTHS, RowBits, check_compiled, check_rows, shallow
from sharesd.decoding.stats import Stats
from sharesd.decoding.tree import Shape, chains, ladder, looking_back, shapes_of
from sharesd.device import device_of, prepare_cuda, use
from sharesd.drafters.base import Drafter
from sharesd.drafters.classic import ClassicDrafter
from sharesd.drafters.eagle import EagleDrafter
from sharesd.drafters.glide import GlideDrafter
from sharesd.drafters.hybrid import HybridDrafter
from sharesd.drafters.parallel import ParallelDrafter
from sharesd.drafters.share import ShareDrafter
from sharesd.drafters.tables.base import Table
from sharesd.drafters.tables.ngram import NgramTable
from sharesd.drafters.tables.recycling import RecycleTable
from sharesd.drafters.tables.suffix import Datastore, SuffixTable, open_datastore
from sharesd.low_builders import builder_for_cuda, packed_for_cpu
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import Unsupported
from sharesd.models.folder import identity
from sharesd.models.heads.config import mode_of
from sharesd.models.heads.files import load_head
from sharesd.models.heads.head import FeatureHead, Head
from sharesd.models.heads.native import native_head
from sharesd.models.heads.parallel import Parallel
from sharesd.models.progress import Progress, silent
from sharesd.models.tokenizer import Tokenizer, load_tokenizer, require_same_vocabulary
from sharesd.models.weights import EachBlock, Tensors, check_cuts, decoder_config, load_model, resolve
from sharesd.placing import PlacedBlocks, QuantizedWhileRead
from sharesd.planning import Offloading, plan_for
from sharesd.settings import cpu_name
from sharesd.splitting import one_device, split_for
from sharesd.staged import StagedBlocks
from sharesd.streamed import StreamedBlocks

log = logging.getLogger(__name__)

Offload = Callable[[Decoder], tuple[Stream, Layout]]
"""Puts packed weights of some blocks of a decoder elsewhere; returns how they come back, and what a record holds."""
DRAFT_WINDOW = 256
"""Tokens that draft steps of `share` may look back instead of all, where the policy finds that this pays."""
EAGER_TILE = 64
"""Outputs of gate that stay together where torch's own activations run on a CPU: vectors of them, and what is left over
behind the last whole vector, are rounded differently."""
EXACT_WIDTHS = {"cpu": (9, 16), "cuda": (16,)}
"""Rows of every step, the first number that will do, where kernels do not give a row the same bits at any width."""


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
    predicted: float | None = None
    """Tokens per second that the plan promised, where one was made because the model does not fit."""


def fixed_width(device: str, most_draft: int) -> int:
    """Rows of every step on this kind of device, where all must have the same number: it changes with the length of
    drafts only where that is beyond all bounds.
    """
    rows = 1 + most_draft
    return next((width for width in EXACT_WIDTHS[device] if width >= rows), rows)


class Runtime:
    """A loaded target with the drafters of several modes; engines of all modes share target, tokenizer and KV cache."""

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
        offloading: Offloading | None = None
        if offload is None and tensors is None:
            offloading = plan_for(config, tuple(modes or (config.mode,)), progress=progress)
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
        self.config, self.modes = config, tuple(modes or (config.mode,))
        self._needs = {*self.modes, *(config.hybrid_with if "hybrid" in self.modes else ())}
        self.device = device_of(config.split.devices[-1] if config.split.devices else config.device)
        self.dtype = _dtype(config)
        CREW.fix(config.threads)
        if self.device.type == "cuda":
            prepare_cuda(steady=config.steady_cublas)  # before CUDA begins
        folder = self._folder = resolve(config.target, progress=progress)
        self._split = split_for(config, self.modes, folder, self.dtype)
        self.device = self.device if self._split is None else self._split.home
        use(self.device)
        self.compile = config.compile
        if config.compile == "auto":
            on_gpu: CompileMode = "regional" if config.tensor_parallel == 1 else "off"
            self.compile = "native" if self.device.type == "cpu" else on_gpu
        elif config.compile == "native" and self.device.type != "cpu":
            raise ValueError(f"compile is 'native' but device is {self.device}; use regional or full on a GPU")
        if self.compile == "native":
            prepare(str(self.dtype).removeprefix("torch."), "choice")
        if offload is not None and (self.compile == "full" or self.device.type != "cpu"):
            raise ValueError("offloaded blocks run one by one, on a CPU so far; take device cpu and compile native")
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self._check_draft_vocabulary(progress)
        self._check_head(progress)
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
            self._group = self._meet(group)
            self._part = Part(self._group.rank, self._group.size)
        quantized = (
            QuantizedWhileRead(partial(self._quantizer, switch=self._switch)) if "share" in self._needs else None
        )
        self._placed: PlacedBlocks | None = None
        with nullcontext() if offloading is None else PlacedBlocks(offloading, quantized, progress) as self._placed:
            self.target = self._load(folder, tensors, self._placed, self._placed is not None, self._part, self._split)
            self.weight_bytes = _num_bytes(self.target)
            if self._placed is not None and quantized is not None:
                self.weight_bytes -= quantized.report().low_bytes
            self._head = self._load_head() if self._needs & {*HEADS} else None
            if quantized is not None:
                placed = self._placed is not None
                self._report("share", quantized.finish() if placed else self._quantize_whole(self.target, self._switch))
            if self._placed is not None:
                assert isinstance(self.target, Decoder)
                self._placed.place_head(self.target)
                self._offload = self._placed.stream
        self.max_context = min(config.max_context, self.target.max_context)
        self._pack(self.target)
        if self._part.rank:
            return  # who follows rank 0 needs no more
        if isinstance(self._head, FeatureHead) and self.compile == "native" and len(self._head.blocks) == 1:
            self._head.native = self._native_head(self._head)
        self._gumbel = self._noise()
        in_stages = self._split is not None and self._split.hands_over
        captures = self.device.type == "cuda" and self.compile != "off"
        if captures and (in_stages or config.draft_device):
            log.warning("rounds on several devices are not captured in CUDA graphs yet: each step is launched anew")
            captures = False
        self._graphs = Graphs() if captures else None
        top, depth, _ = config.tree or (0, 0, 0)
        # A row that ended in a round of several tokens rests behind the context; launched ahead, it runs on by a round.
        overhang = self._fixed_width * (1 if self._graphs is None else 2)
        self._slots = self.max_context + overhang + max(self._fixed_width, 2 + top * depth)
        if self.compile != "native":  # prompts may have to be read in padded pieces
            self._slots = max(self._slots, slots_for(self.max_context))
        taps = () if self._head is None else self._head.config.taps
        if self._group is not None:
            self._leading = LeadingModel(self.target, self._switch, self._group)
        self.cache = (self._leading or self.target).new_cache(config.max_batch, self._slots, taps)
        self._draft_widths = {1, *([top] if config.tree else [])}
        self._widths = self._choose_widths()
        self._drafters: dict[str, Drafter | None] = {mode: self._drafter(mode) for mode in self.modes}
        self._engines = {mode: self._engine(mode) for mode in self.modes}
        if self.device.type == "cuda":
            self._warm_prompts()
        self.load_seconds = time.perf_counter() - started
        self.compile_seconds: dict[Mode, float] = {}

    def _check_stages(self) -> None:
        """ValueError for what does not go with stages, or a draft model on another device."""
        config, split = self.config, self._split
        if config.draft_device is not None:
            if "classic" not in self._needs:
                raise ValueError(f"draft_device is {config.draft_device!r} and no mode is classic; leave it out")
            if one_device(config.draft_device).type != self.device.type:
                raise ValueError(
                    f"draft_device is {config.draft_device!r} and the target is on {self.device}, which would wait for "
                    "it; give a device of its kind"
                )
        if split is None:
            return
        if self._offload is not None:
            raise ValueError("blocks in stages stay where they are; drop offload, or devices")
        if self.compile == "full" and split.hands_over:
            raise ValueError("compile is 'full' and a step runs on several devices; take regional, or auto")

    def _meet(self, group: Group | None) -> Group:
        """The group of ranks that share the model, once it is clear that it can be shared out."""
        config, size = self.config, self.config.tensor_parallel
        if self.compile in ("regional", "full"):
            raise ValueError(
                f"compile is {self.compile!r} and tensor_parallel is {size}, whose steps wait for each other between "
                "linears; take native on a CPU, off on a GPU, or auto"
            )
        heads = sorted(self._needs & {*HEADS})
        if heads:
            raise ValueError(f"tensor_parallel is {size}, and trained heads run on one device; drop mode {heads[0]}")
        if self._offload is not None:
            raise ValueError(f"tensor_parallel is {size}, and ranks keep all of their weights; drop offload")
        try:
            eager = self.compile == "off" and self.device.type == "cpu"
            check_cuts(decoder_config(self._folder), size, EAGER_TILE if eager else TILE)
        except Unsupported as reason:
            raise ValueError(f"tensor_parallel is {size}, and only native decoders are shared out: {reason}") from None
        if config.threads is None:
            CREW.reset(max(1, CREW.available // num_sharing(size)))
        if isinstance(group, ProcessGroup) or group is None:
            if self.device.index is not None:
                raise ValueError(f"device is {config.device!r} and tensor_parallel is {size}; take cuda for one each")
            self.device = local_device(self.device, size)
            use(self.device)
        if group is None:
            group = self._new_group(size)
        if group.rank == 0:
            group.broadcast_object((config, self.modes))
        return group

    def _new_group(self, size: int) -> Group:
        if launched_rank() is None:
            command = (sys.executable, "-m", "sharesd.follow", self.device.type)
            group = spawn(size, command, self.device)
        else:
            group = join(self.device)
        atexit.register(group.close)
        if (group.rank, group.size) != (0, size):
            raise ValueError(
                f"tensor_parallel is {size}, and this is rank {group.rank} of {group.size}; start as many processes as "
                "tensor_parallel says, of which all but rank 0 follow"
            )
        return group

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
        started = time.perf_counter()
        params = warm or SamplingParams()
        warm_up(engine, params, self._costs_file(mode, params))
        if each_kind:
            warm_up_each_kind(engine)
        if self.device.type == "cuda":
            save_configs(cache_root() / "settings")
        self.compile_seconds[mode] = self.compile_seconds.get(mode, 0.0) + time.perf_counter() - started
        return engine

    def plain_beside(self) -> Engine:
        """An engine of mode naive with a KV cache of its own, so that it can decode in turns with one of the others."""
        return self._engine("naive", self._step.new_cache(self.config.max_batch, self._slots))

    @torch.inference_mode()
    def _warm_prompts(self) -> None:
        """Read prompts of all sizes of pieces: what kernels must plan or compile for each is not left to users'."""
        models = {id(self.cache): (self._step, self.cache)}
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
            *(__version__, torch.__version__, self._folder.resolve(), self.dtype, self.compile, self._widths, mode),
            *(
                replace(self.config, target=None, mode="naive", draft=None, max_queue=None, prefill_chunk=None),
                self.config.draft,
            ),
            *(cpu_name(), CREW.most, self.device, kernels_version()),
            self.streamed and (self.streamed.stream.blocks, len(self.streamed.stream.slots)),
            # Drafts take as long on any disk, and steps do not: costs of one that is half as fast again are others.
            self.plan and self.plan.offloads and round(2 * math.log2(self.plan.transfer_s)),
            (torch.cuda.get_device_name(self.device), settings.kernels_version())
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
            quant=self._reports.get(mode),
            resident_share=1.0 if self.streamed is None else self.streamed.resident_share,
            predicted=self.plan.tokens_per_second if self.plan is not None and self.plan.offloads else None,
        )

    def _choose_widths(self) -> tuple[int, ...] | None:
        """Numbers of rows that steps may have; a single one where a row's bits depend on the width. None = any."""
        target, most = self.target, 1 + self.config.most_draft
        widths: tuple[int, ...] | None = (1, most) if self.compile in ("regional", "full") else None
        bits, self._depends_on_width = RowBits(False, False), False
        if isinstance(target, Decoder):
            self._step = self._compile(target, {*self._draft_widths, *(widths or ())})
            bits = self._check_rows(target, widths or sorted({*WIDTHS, most}))
        else:
            self._step = self._compile(target, {self._fixed_width} if self.config.exact else {*(widths or ())})
            if self._step is target:
                widths = None
        self._trees = target.takes_trees
        if bits.chains:
            log.info("exact: rows have the same bits in steps of any width")
        elif self.config.exact:
            fixed, self._depends_on_width = self._fixed_width, True
            log.info("exact: rows depend on the width of their step, so every step of every mode has %d rows", fixed)
            widths = (fixed,)
            if isinstance(target, Decoder):
                self._step = self._compile(target, {*self._draft_widths, fixed})
                bits = self._check_rows(target, (fixed,))
                if not bits.chains:
                    log.warning("rows depend on their place in the step, too: texts of modes may differ")
        else:
            log.warning("exact is off, and rows differ between steps of 1 and of more rows: so may texts of modes")
        if self._wants_trees and self._trees and bits.chains and not bits.trees:
            if self.config.exact:
                self._trees = False
                log.info("exact: rows of trees depend on where their paths lie, so drafts are chains")
            else:
                log.warning("exact is off, and rows of trees differ from those of chains: so may texts of modes")
        return widths

    @property
    def _fixed_width(self) -> int:
        """Rows of every step, where it must be a single number: whatever is drafted, texts shall be the same."""
        return fixed_width(self.device.type, self.config.most_draft)

    @property
    def _wants_trees(self) -> bool:
        return self.config.tree is not None or bool(self._needs & {*TABLES, "hybrid"})

    def _check_rows(self, target: Decoder, widths: Sequence[int]) -> RowBits:
        """Of steps of these widths as they will run, at the real number of slots."""
        if self.compile == "full" or self._group is not None:
            return check_rows(self._step, self.cache, widths, trees=self._wants_trees)
        first = shallow(target)
        if isinstance(target.run_stack, NativeStack):
            first.run_stack = self._native_stack(first)
        cache = first.new_cache(self.config.max_batch, self._slots)
        return check_rows(first, cache, widths, trees=self._wants_trees)

    def close(self) -> None:
        """End what goes on beside decoding: weights that do not stay are not fetched any more, and other ranks end."""
        if self.streamed is not None:
            self.streamed.stream.close()
        if self._group is not None:
            atexit.unregister(self._group.close)
            self._group.close()

    def _native_stack(self, model: Decoder) -> NativeStack:
        """All blocks and the last norm. Raises Unsuited."""
        config = model.config
        return NativeStack(
            model.blocks,
            tables=model.rope_tables,
            ropes=[kind.rope for kind in config.layers],
            activation=config.activation,
            norm=model.norm,
            low=partial(getattr, self._switch, "low"),
            ranges=model.ranges,
            gather=None if self._group is None or model is not self.target else partial(gather_columns, self._group),
        )

    def _noise(self) -> Callable[..., Tensor]:
        if self.device.type == "cpu":
            return sampling.native_gumbel
        return sampling.gumbel if self.compile == "off" else CompiledForms(sampling.gumbel)

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
        if self.config.draft is not None and "classic" in self._needs:
            self._draft_folder = resolve(self.config.draft, progress=progress)
            require_same_vocabulary(self.tokenizer, load_tokenizer(self._draft_folder))

    def _check_head(self, progress: Progress) -> None:
        """Before any weights are read."""
        for mode in sorted(self._needs & {*HEADS}):
            if self.config.head is None:
                raise ValueError(f"mode {mode} needs a trained head; give one (--head FOLDER)")
            self._head_folder = resolve(self.config.head, progress=progress)

    def _load_head(self) -> Head:
        """The trained head, with its linears as they run. Call it while the target has its plain ones."""
        if not isinstance(self.target, Decoder):
            raise ValueError(f"{self.target.name} hands out no hidden states; trained heads need a native decoder")
        head = load_head(self._head_folder, self.target)
        split = self.target.split
        if head.embed is None and split.stages[0].device != split.home:
            head.embed = nn.Embedding.from_pretrained(self.target.embed.weight.to(split.home))
        if any(split.device_of(layer) != split.home for layer in head.config.target_layers):
            raise ValueError(
                f"a glide head looks into layers {', '.join(map(str, head.config.target_layers))}, and runs on "
                f"{split.home}, which does not have all of them; take another mode, or leave devices out"
            )
        fits = mode_of(head.config.kind)
        for mode in sorted(self._needs & {*HEADS} - {fits}):
            raise ValueError(f"{self._head_folder} is a head of kind {head.config.kind}: take mode {fits}, not {mode}")
        quant = self.config.head_quant
        if quant is not None:
            if quant.head_bits is not None and head.lm_head is None:
                head.lm_head = self.target.head  # which stays as it is
            names: dict[str, Any] = {"head_name": "lm_head", "layer_of": lambda _: 0}
            self._report(fits, make_low(head, quant, **self._quantizing(quant, folder=self._head_folder, **names)))
        log.info("%s head: %.1f MB", head.config.kind, _num_bytes(head) / 1e6)
        self._head_bytes = _num_bytes(head)
        if self.device.type == "cpu":
            pack_linears(head)
            weights_on_huge_pages(head)
        return head

    def _quantizer(self, model: Decoder, switch: Switch | None = None) -> LinearQuantizer:
        options = self._quantizing(self.config.quant, **self._names(model))
        return LinearQuantizer(model, self.config.quant, switch, **options, device=self.device)

    def _quantize_whole(self, model: CausalModel, switch: Switch | None = None) -> QuantReport:
        """Each linear in place: a switched one, or without a switch the quantized one alone."""
        assert isinstance(model, nn.Module)
        options = self._quantizing(self.config.quant, **self._names(model))
        if switch is None:
            return make_low(model, self.config.quant, **options)
        return quantize_linears(model, self.config.quant, switch, **options)

    def _report(self, mode: str, report: QuantReport) -> None:
        self._reports[mode] = report
        log.info("quantized %d linears to %s in %.1f s", report.num_linears, report.spec, report.seconds)

    def _native_head(self, head: FeatureHead) -> NativeHead | None:
        """The head's steps in the CPU kernel, once it and the target are packed."""
        try:
            return native_head(head)
        except Unsuited as reason:
            if self.config.compile == "native":
                raise
            log.warning("%s; the head runs without it, which is slower", reason)
            return None

    def _names(self, model: CausalModel) -> dict[str, Any]:
        """Where the target's weights, or those of its copy, come from, which part it is, and what they are called."""
        assert isinstance(model, nn.Module)
        folder, part = None if self._tensors else self._folder, getattr(model, "part", WHOLE)
        return {"folder": folder, "part": part, "head_name": _head_name(model), "layer_of": _layer_of}

    def _quantizing(
        self, config: QuantConfig, *, folder: Path | None, part: Part = WHOLE, **names: Any
    ) -> dict[str, Any]:
        """How linears are quantized here, in terms of `LinearQuantizer`."""
        if self.device.type == "cuda" and config.method == "hqq":
            load_configs(cache_root() / "settings")
        return {
            "progress": lambda done, total, _: self._progress("quantizing", done, total),
            "solving": _solving(self.device, folder, part),
            "build": self._build_low(),
            **names,
        }

    def _build_low(self) -> Build | None:
        """What makes quantized linears, where it is not the choice of `quant`."""
        if self.compile == "native":
            return packed_for_cpu
        if not runs_triton(self.device):
            return None
        return builder_for_cuda(self.device, self.dtype, self._fixed_width, self.config.max_batch)

    def _pack(self, model: CausalModel) -> None:
        if not isinstance(model, Decoder):
            return
        if self.device.type == "cpu":
            pack_linears(model)
            if model is self.target and self._offload is not None:
                low = partial(getattr, self._switch, "low") if "share" in self._needs else None
                self.streamed = StreamedBlocks(model, *self._offload(model), low)
                model.ranges = self.streamed.ranges
            if model is not self.target or self._placed is None:  # which lies where it shall already
                weights_on_huge_pages(model, keep=self.streamed.linears if self.streamed else ())
        elif runs_triton(self.device):
            from compile.cuda.linear import use_row_linears  # on GPUs only

            use_row_linears(model, self._fixed_width, self.config.max_batch)

    def _compile(self, model: CausalModel, widths: set[int]) -> CausalModel:
        """The model with its steps compiled as the config says."""
        if self._group is not None and model is self.target:
            self._gather(self._group)
            return self._leading or model
        if self.compile == "off":
            return model
        if not isinstance(model, Decoder):
            return self._compile_whole(model, widths)
        low = partial(getattr, self._switch, "low")
        if self.compile == "full":
            model.step_widths = frozenset(widths)
            return CompiledModel(model, widths, low)
        if self.compile == "native":
            try:
                model.run_stack = self._native_stack(model)
                return model
            except Unsuited as reason:
                if self.config.compile == "native":
                    raise
                log.warning("%s; blocks are compiled by Inductor instead", reason)
        model.step_widths = frozenset(widths)
        model.run_block = CompiledBlocks(widths, low)
        return model

    def _gather(self, group: Group) -> None:
        """Have the target, of which each rank has a part, bring together what its linears give."""
        model = self.target
        assert isinstance(model, Decoder)
        if isinstance(model.head, GatheredLinear):
            return
        model.set_submodule("head", GatheredLinear(model.head, group, cut_inputs=False))
        if self.compile == "native":
            try:
                model.run_stack = self._native_stack(model)
                return
            except Unsuited as reason:
                raise ValueError(f"{reason}; take --compile off, or leave tensor_parallel out") from None
        for name in [name for i in range(len(model.blocks)) for name in (f"{i}.attn.o", f"{i}.mlp.down")]:
            linear = model.blocks.get_submodule(name)
            model.blocks.set_submodule(name, GatheredLinear(linear, group, cut_inputs=True))

    def _compile_whole(self, model: CausalModel, widths: set[int]) -> CausalModel:
        """A model of transformers with whole steps of these widths compiled; itself where that cannot be, with a
        warning. Decided now, by steps of each width with the weights now in use, in the same way for all modes.
        """
        if self.compile == "native":
            return model
        from torch._dynamo.exc import TorchDynamoException  # a second to import

        compiled = CompiledModel(model, widths, partial(getattr, self._switch, "low"))
        cache = self.cache if model is self.target else model.new_cache(self.config.max_batch, self._slots)
        try:
            for width in sorted(widths):
                check_compiled(compiled, model, cache, width)
        except (TorchDynamoException, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            log.warning("%s runs eagerly, which is slower: %s", model.name, reason)
            return model
        model.step_widths |= {*self._draft_widths, *widths}  # in all modes alike, since prompts are padded by it
        return compiled

    @cached_property
    def _low_step(self) -> CausalModel:
        """The target, as its quantized weights draft."""
        if isinstance(self.target, Decoder) or self._step is self.target:
            return self._step
        with self._switch.use_low():
            return self._compile(self.target, self._draft_widths)

    def _drafter(self, mode: str) -> Drafter | None:
        num_nodes, trees = self.config.most_draft, self._trees
        if mode == "naive":
            return None
        if mode in TABLES:
            return HybridDrafter(mode, [self._table(mode)], num_nodes=num_nodes, trees=trees)
        if mode == "hybrid":
            tables = [self._table(name) for name in self.config.hybrid_with if name in TABLES]
            models = [name for name in self.config.hybrid_with if name in MODEL_DRAFTERS]
            model = self._drafter(models[0]) if models else None
            return HybridDrafter(mode, tables, model, num_nodes=num_nodes, trees=trees)
        if self.config.tree is not None and not trees:
            if self.target.takes_trees:
                raise ValueError("rows of trees do not have the bits of chains here; drop --tree, or add --no-exact")
            raise ValueError(f"{self.target.name} takes chains only; drop --tree")
        top = self.config.tree[0] if self.config.tree else 1
        lengths = chains(num_nodes) if self.streamed is None else ladder(num_nodes)
        shapes = shapes_of(*self.config.tree) if self.config.tree else lengths
        if mode == "share":
            low_bytes = self._reports["share"].low_bytes
            return ShareDrafter(
                self._low_step,
                self.cache,
                self._switch,
                shapes=looking_back(shapes, self._draft_windows()),
                low_bytes=low_bytes,
                top=top,
            )
        if mode in ("eagle", "glide"):
            kind = GlideDrafter if mode == "glide" else EagleDrafter
            return kind(self._head, self.cache, shapes=shapes, weight_bytes=self._head_bytes, top=top)
        if mode == "parallel":
            assert isinstance(self._head, Parallel)
            most = self._head.config.draft_length
            depth = self.config.tree[1] if self.config.tree else self.config.num_draft or 1
            if depth > most:
                raise ValueError(f"drafts shall be {depth} tokens deep and the head guesses {most}; ask for no more")
            return ParallelDrafter(self._head, self.cache, shapes=shapes, weight_bytes=self._head_bytes, top=top)
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
        return (0, DRAFT_WINDOW) if given == "auto" and gains else (0,)

    def _table(self, name: str) -> Table:
        config = self.config
        if name == "suffix":
            return SuffixTable(self._corpus(config.corpus_file) if config.corpus_file is not None else None)
        if name == "recycle":
            table = RecycleTable(self.target.vocab_size)
            if config.table_file is not None:
                table.load(config.table_file)
            return table
        return NgramTable(config.most_draft, config.ngram_min, config.ngram_max, most_recent=config.ngram_recent)

    def _corpus(self, path: Path) -> Datastore:
        corpus = open_datastore(path)
        if corpus.largest >= self.target.vocab_size:
            raise ValueError(
                f"{path} holds token id {corpus.largest} and the target knows {self.target.vocab_size}; build it with "
                "the target's tokenizer"
            )
        return corpus

    def _draft_split(self, folder: Path) -> Split | None:
        """Where a second model is, if that has been asked for."""
        if self.config.draft_device is None:
            return None
        place = Split.of([one_device(self.config.draft_device)], [len(decoder_config(folder).layers)])
        return replace(place, apart=self.device, hop_seconds=self.config.split.hop_seconds)

    def _classic(self, shapes: Sequence[Shape], top: int) -> Drafter:
        if self.config.draft is not None:
            model = self._load(self._draft_folder, split=self._draft_split(self._draft_folder))
            if model.vocab_size != self.target.vocab_size:
                raise ValueError(
                    f"the draft model has {model.vocab_size} logits and the target {self.target.vocab_size}; "
                    "give a draft model of the target's family"
                )
        else:
            quantized = QuantizedWhileRead(self._quantizer)
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
                self._report("classic", self._quantize_whole(model))
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
            weight_bytes=_num_bytes(model),
            top=top,
        )

    def _keeper(self, mode: Mode) -> Callable[[Stats], None] | None:
        """Keeps for later plans how often drafts hold."""
        if self._placed is None or mode not in ("share", "classic", "hybrid") or not self._reports:
            return None
        return keeper(self._folder, mode, self.config.quant, trees=self.config.tree is not None)

    def _engine(self, mode: Mode, cache: StaticKVCache | None = None) -> Engine:
        return Engine(
            target=self._step,
            tokenizer=self.tokenizer,
            cache=cache or self.cache,
            drafter=self._drafters.get(mode),
            max_context=self.max_context,
            auto_length=self.config.num_draft is None,
            widths=self._widths,
            reread=self.config.exact and (self.device.type == "cuda" or self._depends_on_width),
            graphs=self._graphs if isinstance(self.target, Decoder) or self._step is not self.target else None,
            gumbel=self._gumbel,
            max_queue=self.config.max_queue,
            prefill_chunk=self.config.prefill_chunk,
            ahead=self._graphs is not None,
            traffic=None if self.streamed is None else partial(getattr, self.streamed.stream, "traffic"),
            ended=self._keeper(mode),
        )


def build(config: EngineConfig | None = None, *, progress: Progress = silent) -> Engine:
    """An engine, loaded, compiled and warmed up."""
    config = config or EngineConfig()
    return Runtime(config, progress=progress).engine()


def follow_rank_0(group: Group, tensors: Tensors | None = None) -> None:
    """Load this rank's part of what rank 0 has configured, and take part in its steps until it ends: RankLost then.

    Raises what loading raises. `tensors` as for rank 0.
    """
    config, modes = group.broadcast_object()
    runtime = Runtime(config, modes, tensors=tensors, group=group)
    follow(runtime._compile(runtime.target, set()), runtime._switch, group)


def _num_bytes(model: CausalModel | Head) -> int:
    """Bytes of a model's or a head's weights and tables, shared ones once."""
    assert isinstance(model, nn.Module)
    sizes: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        place = tensor.data_ptr() or id(tensor)
        sizes[place] = max(sizes.get(place, 0), tensor.nbytes)  # a tied head may be the embedding's first rows
    return sum(sizes.values())


def _solving(device: torch.device, folder: Path | None, part: Part = WHOLE) -> Solving:
    """How the linears of a part of the checkpoint in a folder (None: of tensors in memory) are solved.

    On a GPU anew at each start: that takes seconds, and less than to read codes, compare their checksum and copy them.
    """
    if device.type != "cpu":
        return Solving()
    if folder is None:
        return Solving(solve=_solve)
    name = identity(folder) if part == WHOLE else f"{identity(folder)} {part}"
    return Solving(solve=_solve, cache_dir=cache_root() / "quant", identity=name)


def _solve(weight_NK: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """HQQ by the CPU kernel."""
    q, scale, zero = solve_groups(weight_NK, bits, group_size)
    return QuantizedWeight(q=q, scale=scale, zero=zero, bits=bits, group_size=group_size)


def _dtype(config: EngineConfig) -> torch.dtype:
    return torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)


_LAYER = re.compile(r"\.(\d+)\.")


def _layer_of(path: str) -> int | None:
    """The layer that a linear belongs to: the first number in its path."""
    found = _LAYER.search(path)
    return int(found[1]) if found else None


def _head_name(model: nn.Module) -> str:
    """Path of the LM head."""
    if isinstance(model, Decoder):
        return "head"
    head = model.model.get_output_embeddings()  # type: ignore[union-attr, operator]
    return next(name for name, module in model.named_modules() if module is head)
