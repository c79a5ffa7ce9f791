"""Options of the runtime, as frozen dataclasses. Single values are checked here, their combinations in `loading`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from quant.config import QuantConfig

Mode = str
"""Name of a drafter, or `naive`; see `sharesd.drafters.registry.modes`."""
CompileMode = Literal["auto", "native", "regional", "full", "off"]
Offload = Literal["auto", "off", "plan-only"]
TensorParallelStyle = Literal["gather", "reduce"]
Kernels = Literal["auto", "triton", "torch"]
DType = Literal["auto", "bfloat16", "float16", "float32", "float64"]

MIN_CONTEXT, PLANNED_CONTEXT = 16, 2048
"""Tokens of a context at least, and where it is `auto` and has to be known before the model is loaded."""
SMALL = "small"
"""`EngineConfig.draft` where the small decoder that comes with the embedded model is to draft."""


class PlanOnly(Exception):
    """What was asked for is a plan alone. Carries its lines: what, choice, why."""

    def __init__(self, lines: Sequence[tuple[str, str, str]]) -> None:
        super().__init__("the plan is made, and nothing is loaded")
        self.lines = lines


def check_one_of(name: str, value: object, allowed: tuple) -> None:
    """Raise ValueError if a value is none of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(str, allowed))}")


def check_min(name: str, value: float, low: float) -> None:
    """Raise ValueError if a number is below its minimum."""
    if not value >= low:
        raise ValueError(f"{name} is {value}; it must be at least {low:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """Whether weights may live elsewhere than where they are used, and how much memory there is."""

    when: Offload = "auto"
    """`auto`: if the model does not fit. `off`: never. `plan-only`: the plan is made, and nothing loaded."""
    device_memory: int | None = None
    """Bytes that may be taken of a GPU's memory; None = what is free."""
    host_memory: int | None = None
    """Bytes that this process may take of the host's memory; None = what is free."""
    folder: str | None = None
    """Where blocks are kept that come from a disk; None = in the cache folder."""
    rate: float | None = None
    """Bytes a second to which the link is slowed down, to see what slower machines do; None = as fast as it is."""
    choose_bits: bool = True
    """Whether the plan chooses the bits of a quantized drafter, 4 or 8; else those of `quant` are taken."""
    choose_depth: bool = True
    """Whether the plan chooses how long drafts may be; else `max_draft` holds, as it does with `num_draft`."""

    choose_trees: bool = True
    """Whether it may choose draft trees, too, which only acceptance `match` knows."""

    def __post_init__(self) -> None:
        check_one_of("offload", self.when, get_args(Offload))
        for name in ("device_memory", "host_memory", "rate"):
            value = getattr(self, name)
            if value is not None:
                check_min(name, value, 1)

    @property
    def limited(self) -> bool:
        """Whether a limit is given."""
        return self.device_memory is not None or self.host_memory is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """Which devices share the blocks of a model, in stages."""

    devices: tuple[str, ...] = ()
    """Names of the stages' devices, in order; () = those of `device_map` and `max_memory`."""
    device_map: str | None = None
    """`auto`: all GPUs. Else a JSON file with names of modules and their devices, as accelerate has them."""
    max_memory: tuple[tuple[int, int], ...] = ()
    """Numbers of GPUs (on a CPU, of stages) and the bytes that may be taken of each; others are not used."""
    simulated_latency_s: float = 0.0
    """What each hop from stage to stage is held back, to see what slower links do."""

    def __post_init__(self) -> None:
        for number, size in self.max_memory:
            check_min(f"max_memory of {number}", size, 1)
        check_min("simulated_latency_s", self.simulated_latency_s, 0)

    @property
    def enabled(self) -> bool:
        """Whether there is anything of it."""
        return bool(self.devices or self.device_map is not None or self.max_memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Options of a `Runtime`; also the keywords of `LLM`."""

    target: str | None = None
    """Checkpoint folder, .gguf file or hub id; None = the embedded SmolLM2-135M-Instruct."""
    mode: Mode = "auto"
    """Name of the drafter, `naive` for plain decoding, or `auto` for what fits the model and this machine."""
    hybrid_with: tuple[str, ...] = ()
    """Drafters of mode `hybrid`: at most one model or head, and tables. (): see `sharesd.drafters.hybrid`."""
    auto_drafters: tuple[str, ...] = ()
    """Drafters of `auto`, as `hybrid_with`. (): chosen when the model is loaded (`sharesd.loading.auto_mode`)."""
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    """Values of options of single drafters by name; see `options` of each `SPEC`."""
    drafter_modules: tuple[str, ...] = ()
    """Files or modules with drafters from outside of this package, each of which defines a `SPEC`."""
    draft: str | None = None
    """Second model of drafters that need one, or `small`: the one that comes with the embedded model; None = a separate
    quantized copy of the target with its own KV."""
    heads: tuple[str, ...] = ()
    """Trained heads, at most one for each mode. Modes without one take the head that ships with the embedded model."""
    head_quant: QuantConfig | None = None
    """How the head's linears are quantized; None = not at all. With `head_bits` an LM head that it shares with
    the target is copied for that."""
    num_draft: int | None = None
    """Draft tokens per round; None = chosen anew for each round, by measured costs and acceptance, 0 to `max_draft`."""
    max_draft: int = 8
    """Draft tokens per round at most, where their number is chosen."""
    tree: tuple[int, int, int] | Literal["auto", "off"] = "auto"
    """Models and heads: (K, depth, budget) of draft trees: the K likeliest nodes of each level have K
    children each, and of all the `budget` likeliest are verified. With these `max_draft` means nothing, and `num_draft`
    is None (chains and trees of that size or less, as it pays) or the budget (always the whole tree). `auto`: the same
    with up to `max_draft` tokens on a CPU, where their number is chosen and nothing is compiled; else chains. `off`:
    chains alone."""
    dtype: DType = "auto"
    """`auto`: bfloat16, and float16 on GPUs without it."""
    device: str = "auto"
    """`auto`: the freest GPU that works, else cpu."""
    quant: QuantConfig = field(default_factory=lambda: QuantConfig(head_bits=4))
    """How the drafter's linears are quantized."""
    compile: CompileMode = "auto"
    """`native`: all blocks in one call of a C++ kernel (CPU). `regional`: one block compiled by Inductor and reused.
    `full`: the whole step in one Inductor graph (models of transformers: `regional`, too). `off`: eager. `auto`: native
    on a CPU if the kernel knows the model, else regional. On CUDA rounds are captured in graphs unless it is off."""
    kernels: Kernels = "auto"
    """On a GPU. `triton`: ours. `torch`: cuBLAS, SDPA and gemlite; steps have one fixed width, so that texts stay those
    of plain decoding. `auto`: what SHARESD_KERNELS says, else ours, and torch's where ours do not run. Of a process."""
    exact: bool = True
    """Give a row the same bits in every mode: by kernels that do so in steps of any width, or by one fixed width."""
    steady_cublas: bool = False
    """On a GPU, keep cuBLAS from splitting sums: rows may then have the same bits in steps of any width, which is found
    out at start. Products of prompts may take longer."""
    threads: int | None = None
    """Threads that share a step on a CPU; None = as many as torch would use, and fewer while others keep cores busy.
    Texts do not depend on it."""
    tensor_parallel: int = 1
    """Ranks that share each linear and the heads of attention, each a process with a device of its own (on a CPU: with
    a part of the cores). Texts do not depend on it, if the style is `gather`."""
    tensor_parallel_style: TensorParallelStyle = "gather"
    """`gather`: no sum is split, with four exchanges a block. `reduce`: two, and bits depend on the number of ranks;
    texts of all modes are the same with the same number."""
    split: PipelineConfig = field(default_factory=PipelineConfig)
    """Devices that have some of the blocks each, in place of `device`. Texts do not depend on it."""
    draft_device: str | None = None
    """Device of a second model; None = where the target's head is."""
    max_batch: int = 1
    """Rows of the KV cache: how many prompts are decoded together."""
    max_queue: int | None = None
    """Requests that may wait for a row; None = any number."""
    prefill_chunk: int | None = None
    """Tokens of a prompt that are read between two rounds of other requests; None = 512, and on a CPU as many as the
    others hardly notice. Where a prompt's bits depend on how it is cut, as on a GPU, it is always 512."""
    max_context: int | Literal["auto"] = "auto"
    """Tokens of prompt and output together that the KV cache can hold per row; cut to the model's own limit. `auto`:
    that limit, or what half of the free memory holds, if that is less (see `sharesd.loading.max_context`)."""
    trust_remote_code: bool = False
    """Allow checkpoints that bring their own modelling code (fallback models only)."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """What happens when the model is larger than memory."""

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, get_args(DType))
        check_one_of("compile", self.compile, get_args(CompileMode))
        check_one_of("kernels", self.kernels, get_args(Kernels))
        if self.num_draft is not None:
            check_min("num_draft", self.num_draft, 1)
        check_min("max_draft", self.max_draft, 1)
        if isinstance(self.tree, str):
            check_one_of("tree", self.tree, ("auto", "off"))
        else:
            self._check_tree(*self.tree)
        check_min("tensor_parallel", self.tensor_parallel, 1)
        check_one_of("tensor_parallel_style", self.tensor_parallel_style, get_args(TensorParallelStyle))
        check_min("max_batch", self.max_batch, 1)
        if self.threads is not None:
            check_min("threads", self.threads, 1)
        if self.max_queue is not None:
            check_min("max_queue", self.max_queue, 0)
        if self.prefill_chunk is not None:
            check_min("prefill_chunk", self.prefill_chunk, 1)
        if isinstance(self.max_context, int):
            check_min("max_context", self.max_context, MIN_CONTEXT)
        else:
            check_one_of("max_context", self.max_context, ("auto", "a number"))

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
        """`max_context`, as far as it is known before the model is loaded."""
        return self.max_context if isinstance(self.max_context, int) else PLANNED_CONTEXT

    @property
    def explicit_tree(self) -> tuple[int, int, int] | None:
        """Draft trees that all models shall draft, if there are such."""
        return None if isinstance(self.tree, str) else self.tree

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens per round at most."""
        if self.explicit_tree is not None:
            return self.explicit_tree[2]
        return self.max_draft if self.num_draft is None else self.num_draft
