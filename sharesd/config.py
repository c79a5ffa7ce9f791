"""Options of the runtime, as frozen dataclasses.

The annotations say which types are accepted, see `sharesd.field_types`. Single values are checked here, and
combinations in `sharesd.startup.conflicts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quant.config import QuantConfig
from sharesd.field_types import DefaultLimit, NoneIsDefault, PathText, check_min, convert_fields

Mode = str
"""Name of a drafter, or `naive`; see `sharesd.drafters.registry.modes`."""
CompileMode = Literal["auto", "native", "regional", "full", "off"]
Offload = Literal["auto", "off", "plan-only"]
TensorParallelStyle = Literal["gather", "reduce"]
Activations = Literal["exact", "fast"]
Kernels = Literal["auto", "streams", "triton", "torch"]
TargetQuant = Literal["q8_0", "q6_k", "q5_k", "q4_k", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4"]
DType = Literal["auto", "bfloat16", "float16", "float32", "float64"]
KVDType = Literal["auto", "q8"]

_AT_LEAST_ONE = (
    "num_draft", "max_draft", "tensor_parallel", "max_batch", "threads", "prefill_chunk", "prompt_cache_size",
)  # fmt: skip
MIN_CONTEXT, PLANNED_CONTEXT = 16, DefaultLimit(2048)
"""Minimum of `max_context`, and its value in plans.

Plans are made before the model is loaded, and use the second number if `max_context` is `auto`.
"""
OFFLINE_CHUNK = 512
"""Prompt tokens per prefill chunk without a server; small chunks took a sixth longer."""
SMALL = "small"
"""`EngineConfig.draft` for the small decoder that comes with the embedded model."""


class PlanOnly(Exception):
    """Raised if only a plan was requested.

    `lines` describe the plan: subject, choice and reason of each decision.
    """

    def __init__(self, lines: Sequence[tuple[str, str, str]]) -> None:
        super().__init__("only a plan was requested; nothing is loaded")
        self.lines = lines


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """Offloading of weights, and limits of memory."""

    when: Offload = "auto"
    """Condition of offloading.

    `auto`: the model does not fit. `off`: never. `plan-only`: a plan is made, and nothing is loaded.
    """
    device_memory: int | None = None
    """Limit of GPU memory in bytes; None = free memory."""
    host_memory: int | None = None
    """Limit of this process's host memory in bytes; None = free memory."""
    folder: PathText | None = None
    """Folder of blocks offloaded to a disk; None = a cache folder."""
    rate: float | None = None
    """Limit of the link in bytes per second; None = no limit.

    It simulates slower machines.
    """
    choose_bits: bool = True
    """Let the plan choose 4 or 8 bits for quantized drafters.

    Otherwise the bits of `quant` are used.
    """
    choose_depth: bool = True
    """Let the plan choose the maximum length of drafts.

    Otherwise, and with `num_draft`, the maximum is that of the options.
    """

    choose_trees: bool = True
    """Let the plan choose draft trees, too.

    Only acceptance `match` supports trees.
    """

    def __post_init__(self) -> None:
        convert_fields(self)
        for name in ("device_memory", "host_memory", "rate"):
            value = getattr(self, name)
            if value is not None:
                check_min(name, value, 1)

    @property
    def limited(self) -> bool:
        """True if a limit of memory is given."""
        return self.device_memory is not None or self.host_memory is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """Pipeline stages: devices that share the blocks of a model."""

    devices: tuple[str, ...] = ()
    """Names of the stages' devices, in order.

    () = the devices of `device_map` and `max_memory`.
    """
    device_map: PathText | None = None
    """`auto` for all GPUs, or a JSON file.

    The file has names of modules and their devices, in accelerate's layout.
    """
    max_memory: tuple[tuple[int, int], ...] = ()
    """Numbers of GPUs, or of stages on a CPU, with byte limits.

    Other GPUs are not used.
    """
    simulated_latency_s: float = 0.0
    """Delay of each transfer between stages, to simulate slower links."""

    def __post_init__(self) -> None:
        convert_fields(self)
        for number, size in self.max_memory:
            check_min(f"max_memory of {number}", size, 1)
        check_min("simulated_latency_s", self.simulated_latency_s, 0)

    @property
    def enabled(self) -> bool:
        """True if any option of stages is given."""
        return bool(self.devices or self.device_map is not None or self.max_memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Options of a `Runtime`; also the keywords of `LLM`."""

    target: PathText | None = None
    """Checkpoint folder, .gguf file or hub id; None = the embedded SmolLM2-135M-Instruct."""
    lora: PathText | None = None
    """Folder of a LoRA adapter that is merged into the target."""
    mode: Mode = "auto"
    """Name of the drafter, `naive` or `auto`.

    `naive`: plain decoding. `auto`: drafters chosen for the model and this machine.
    """
    hybrid_with: tuple[str, ...] = ()
    """Drafters of mode `hybrid`: at most one model or head, and tables.

    (): see `sharesd.drafters.hybrid`.
    """
    auto_drafters: tuple[str, ...] = ()
    """Drafters of mode `auto`, as `hybrid_with`.

    (): chosen when the model is loaded (`sharesd.startup.auto_mode`).
    """
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of single drafters by name; see `options` of each `SPEC`."""
    drafter_modules: tuple[PathText, ...] = ()
    """Files or modules with external drafters, each of which defines a `SPEC`."""
    draft: PathText | None = None
    """Second model of drafters that need one.

    `small`: the decoder that comes with the embedded model. None = a separate quantized copy of the target with its own
    KV.
    """
    heads: tuple[PathText, ...] = ()
    """Trained heads, at most one for each mode.

    NAME=FOLDER has a mode of that name. Modes without one use the head that comes with the embedded model.
    """
    inner_heads: tuple[str, ...] = ()
    """Modes whose head is in the target's checkpoint, found before weights are read."""
    head_quant: QuantConfig | None = None
    """Quantization of linears of trained heads.

    None = no quantization; with stored weights on a CPU, 8 bits. With `head_bits`, an LM head shared with the target
    is copied before its quantization, unless it is stored in few bits.
    """
    num_draft: int | None = None
    """Draft tokens per round; None = chosen for each round.

    The choice, from 0 to `max_draft`, depends on measured costs and acceptance.
    """
    max_draft: int = DefaultLimit(8)
    """Maximum draft tokens per round, if their number is chosen."""
    tree: tuple[int, int, int] | Literal["auto", "off"] = "auto"
    """Draft trees of models and heads: (K, depth, budget), `auto` or `off`.

    The K likeliest nodes of each level have K children each, and the `budget` likeliest of all nodes are verified. With
    a given size, `max_draft` has no effect, and `num_draft` is None or the budget. None: chains, and trees of at most
    this size, are chosen for each round. The budget: every draft is a whole tree.

    `auto`: trees of up to `max_draft` tokens if `num_draft` is None and `compile` is native, else chains. An offload
    plan may choose trees, too. `off`: only chains.
    """
    dtype: DType = "auto"
    """`auto`: bfloat16, and float16 on GPUs without it."""
    kv_dtype: KVDType = "auto"
    """KV caches of models, in `dtype` (`auto`) or in 8 bits (`q8`)."""
    device: str = "auto"
    """`auto`: the working GPU with the most free memory, else the CPU."""
    quant: QuantConfig = field(default_factory=lambda: QuantConfig(head_bits=4))
    """Quantization of the drafter's linears."""
    compile: CompileMode = "auto"
    """Compilation of steps.

    `native`: all blocks in one call of a C++ kernel, on a CPU. `regional`: one block, compiled by Inductor and reused.
    `full`: the whole step in one Inductor graph; `regional` does this, too, for models of transformers. `off`: eager.
    `auto`: native on a CPU if the kernel supports the model, else regional. On CUDA, rounds are captured in graphs
    unless compilation is off.
    """
    kernels: Kernels = "auto"
    """Kernels of this process.

    `triton`: this project's kernels on a GPU. `streams`: the same, with weights of 4 bits in the order of a kernel for
    drafts of one row. `torch`: cuBLAS, SDPA and gemlite, and torch's operations on a CPU; steps have one fixed width,
    so that texts equal those of plain decoding. `auto`: the value of SHARESD_KERNELS on a GPU, else `streams` where
    drafts have one row, `triton`, or `torch` if they do not run.
    """
    exact: bool = True
    """Give a row the same bits in every mode.

    Either kernels ensure this in steps of any width, or all steps have one width.
    """
    steady_cublas: bool = False
    """Keep cuBLAS from splitting sums on a GPU.

    Rows may then have the same bits in steps of any width, which is checked at start. Products of prompts may take
    longer.
    """
    threads: int | None = None
    """Threads of a step on a CPU; None = torch's default.

    With None, steps have fewer threads while other programs use cores. Texts do not depend on this number.
    """
    tensor_parallel: int = 1
    """Ranks that share each linear and the attention heads.

    Each rank is a process with its own device, or with a part of the cores on a CPU. Texts do not depend on this number
    if the style is `gather`.
    """
    tensor_parallel_style: TensorParallelStyle = "gather"
    """Exchange between ranks.

    `gather`: no sum is split; there are four exchanges per block. `reduce`: sums are split; there are two exchanges per
    block, and bits depend on the number of ranks. With the same number, texts of all modes are the same.
    """
    split: PipelineConfig = field(default_factory=PipelineConfig)
    """Pipeline stages, in place of `device`.

    Each device has some of the blocks. Texts do not depend on the stages.
    """
    draft_device: str | None = None
    """Device of a second model; None = that of the target's head."""
    max_batch: NoneIsDefault[int] = 1
    """Rows of the KV cache: maximum number of prompts decoded together."""
    prefill_chunk: int | None = None
    """Maximum prompt tokens read between two rounds of other requests.

    None = 512; on a CPU, few enough not to delay the other requests. If a prompt's bits depend on its chunks, as on a
    GPU, only 512 is supported.
    """
    max_context: NoneIsDefault[int | Literal["auto"]] = "auto"
    """Maximum tokens of prompt and output per row of the KV cache.

    It is reduced to the model's own limit, with a warning. `auto`: the model's limit, or fewer tokens if half of the
    free memory holds fewer (see `sharesd.startup.target`).
    """
    trust_remote_code: bool = False
    """Allow checkpoints that bring their own modelling code (fallback models only)."""
    revision: str | None = None
    """Branch, tag or commit of the target's hub id; None = main."""
    dequantize: bool | None = None
    """Expand weights of .gguf files and quantized folders to 16 bits.

    False: they run as they are stored. None = that, where it is possible (see `sharesd.startup.resolve`).
    """
    target_quant: TargetQuant | None = None
    """Type of .gguf blocks that plain weights are quantized to."""
    activations: Activations = "exact"
    """Rounding of the inputs of stored weights.

    `exact`: 16 bits for 32 numbers, `fast`: 8 bits.
    """
    ignore_keys: tuple[str, ...] = ()
    """Keys of config.json and of .gguf files, and tensors, left out."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """Offloading of models larger than memory."""
    prompt_cache: PathText | None = None
    """Folder with KV of finished texts, which later starts read back."""
    prompt_cache_size: int = 4 * 2**30
    """Maximum bytes of files in `prompt_cache`."""
    trace: PathText | None = None
    """File to which a line per round is appended, see `sharesd.records.trace`."""

    def __post_init__(self) -> None:
        convert_fields(self)
        for name in _AT_LEAST_ONE:
            if getattr(self, name) is not None:
                check_min(name, getattr(self, name), 1)
        if not isinstance(self.tree, str):
            self._check_tree(*self.tree)
        if isinstance(self.max_context, int):
            check_min("max_context", self.max_context, MIN_CONTEXT)

    def _check_tree(self, top: int, depth: int, budget: int) -> None:
        shown = ":".join(map(str, self.tree))
        full = top + (depth - 1) * top**2
        if top < 2 or depth < 1 or not depth < budget <= full:
            raise ValueError(
                f"tree is {shown}; K must be at least 2, the depth at least 1, and the budget above the depth and at "
                "most K + (depth - 1) * K * K"
            )

    @property
    def planned_context(self) -> int:
        """`max_context`, or its value in plans if `auto`."""
        return self.max_context if isinstance(self.max_context, int) else PLANNED_CONTEXT

    @property
    def explicit_tree(self) -> tuple[int, int, int] | None:
        """Given size of draft trees; None for `auto` and `off`."""
        return None if isinstance(self.tree, str) else self.tree

    @property
    def max_draft_tokens(self) -> int:
        """Maximum draft tokens per round."""
        if self.explicit_tree is not None:
            return self.explicit_tree[2]
        return self.max_draft if self.num_draft is None else self.num_draft
