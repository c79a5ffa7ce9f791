"""Every option of the runtime, as frozen dataclasses. Wrong values raise ValueError here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from quant.config import QuantConfig

Mode = Literal[
    "naive", "classic", "share", "eagle", "parallel", "glide", "ngram", "suffix", "recycle", "hybrid", "auto"
]
Acceptance = Literal["match", "rejection", "block"]
CompileMode = Literal["auto", "native", "regional", "full", "off"]
Offload = Literal["auto", "off", "plan-only"]
TensorParallelStyle = Literal["gather", "reduce"]
Kernels = Literal["auto", "triton", "torch"]
DType = Literal["auto", "bfloat16", "float16", "float32", "float64"]

MODES: tuple[str, ...] = get_args(Mode)
HEADS = ("eagle", "parallel", "glide")
"""Modes in which a trained head drafts."""
PARALLEL_HEAD, GLIDE_HEAD = "LlamaForCausalLMParallel", "LlamaForCausalLMGlide"
"""The architectures that config.json names where a head is one of mode `parallel` or `glide`."""
MODEL_DRAFTERS = ("share", "classic", *HEADS)
"""Modes in which a model drafts, or a part of one."""
TABLES = ("ngram", "suffix", "recycle")
"""Modes in which a table drafts."""
MOST_TOP_LOGPROBS = 20
"""Alternatives per token at most."""
EMBEDDED_TABLE = Path(__file__).parent / "drafters" / "tables" / "smollm2-135m-instruct.npz"
EMBEDDED_CORPUS = EMBEDDED_TABLE.with_suffix(".npy")
"""Made by `sharesd train table` from the embedded model's answers to training prompts."""
EMBEDDED_HEADS = Path(__file__).parent / "drafters" / "heads" / "smollm2-135m-instruct"
"""Folders of heads for the embedded model, by the mode that they draft in; that of `classic` is a small decoder."""
FEWEST_CONTEXT, PLANNED_CONTEXT = 16, 2048
"""Tokens of a context at least, and where it is `auto` and has to be known before the model is loaded."""
SMALL = "small"
"""`EngineConfig.draft` where the small decoder that comes with the embedded model is to draft."""


def mode_of_head(name: str) -> Mode:
    """The mode that a head drafts in, by its folder; hubs have those of eagle."""
    config = Path(name) / "config.json"
    text = config.read_text("utf-8") if config.is_file() else ""
    return "parallel" if PARALLEL_HEAD in text else "glide" if GLIDE_HEAD in text else "eagle"


class PlanOnly(Exception):
    """What was asked for is a plan alone. Carries its lines: what, choice, why."""

    def __init__(self, lines: Sequence[tuple[str, str, str]]) -> None:
        super().__init__("the plan is made, and nothing is loaded")
        self.lines = lines


def _one_of(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(str, allowed))}")


def _finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; give a finite number")


def _at_least(name: str, value: float, low: float) -> None:
    if not value >= low:
        raise ValueError(f"{name} is {value}; it must be at least {low:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it stops. The defaults are greedy decoding."""

    max_new_tokens: int = 128
    """Tokens to generate at most (exact, whatever the draft length); 0 with `prompt_logprobs` only."""
    temperature: float = 0.0
    """0 = greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p; 1 = all."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest; 0 = none."""
    repetition_penalty: float = 1.0
    """Divide positive, multiply negative logits of tokens in the prompt or the output (Keskar et al. 2019); 1 = no."""
    presence_penalty: float = 0.0
    """Subtract from logits of tokens that the output already has."""
    frequency_penalty: float = 0.0
    """Subtract, times their count, from logits of tokens that the output already has."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> amount added to its logit; -inf bans the token."""
    seed: int = 0
    """Seed of the noise; with acceptance `match` the text depends on nothing else. Of several prompts in one call the
    first has this seed, and the others have seeds derived from it and their place in the call, however many are decoded
    together (`sharesd.sampling.seeds_of_prompts`)."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; the text is cut before the first one."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text, besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence ids."""
    logprobs: bool = False
    """Return the target's log-probability of every emitted token (before any processing of logits)."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to return with their log-probabilities, at each place; needs `logprobs`."""
    prompt_logprobs: bool = False
    """Return log-probabilities of the prompt's tokens, too; needs `logprobs`. The prompt is read anew as a whole."""
    speculate: bool = True
    """Whether drafts may be made for this request; the text is the same."""
    grammar: str | None = None
    """Grammar of the answer: a JSON schema, a regular expression or Lark, converted by `sharesd.data.grammar_spec`.
    Text that the grammar cannot complete ends as one that is cut short."""
    acceptance: Acceptance = "match"
    """`match`: the text of plain decoding, token for token. `rejection` (Leviathan et al. 2022; Chen et al. 2023) and
    `block` (Sun et al. 2024): only the same *distribution* as plain decoding, not the same text."""

    def __post_init__(self) -> None:
        _at_least("max_new_tokens", self.max_new_tokens, 0 if self.prompt_logprobs else 1)
        for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _finite(name, getattr(self, name))
        _at_least("temperature", self.temperature, 0)
        _at_least("top_k", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be between 0 and 1")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0")
        for token, amount in self.logit_bias.items():
            if not amount < math.inf:
                raise ValueError(f"logit_bias of token {token} is {amount}; give a finite number, or -inf to ban it")
        if not 0 <= self.top_logprobs <= MOST_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; it must be between 0 and {MOST_TOP_LOGPROBS}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs} but logprobs is off; switch logprobs on")
        if self.prompt_logprobs and not self.logprobs:
            raise ValueError("prompt_logprobs is on but logprobs is off; switch logprobs on")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be between 0 and 2^63 - 1")
        if any(not s for s in self.stop):
            raise ValueError("stop holds an empty string; give the text to stop at")
        _one_of("acceptance", self.acceptance, get_args(Acceptance))
        if self.grammar is not None:
            self._check_grammar(self.grammar)

    def _check_grammar(self, grammar: str) -> None:
        if not grammar.strip():
            raise ValueError("grammar is empty; leave it out")
        if self.acceptance != "match":
            raise ValueError(f"acceptance {self.acceptance} knows no grammars; take match, or leave grammar out")
        if self.ignore_eos:
            raise ValueError("ignore_eos is set and so is grammar, behind whose end nothing may follow; leave one out")

    @property
    def greedy(self) -> bool:
        """True when no noise is needed: the argmax decides."""
        return self.temperature == 0

    @property
    def uses_penalties(self) -> bool:
        """True when a logit depends on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


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
        _one_of("offload", self.when, get_args(Offload))
        for name in ("device_memory", "host_memory", "rate"):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 1)
        if self.when == "off" and (self.limited or self.folder is not None):
            raise ValueError("offload is off, and a limit or a folder for it is given; leave it at auto")

    @property
    def limited(self) -> bool:
        """Whether a limit is given."""
        return self.device_memory is not None or self.host_memory is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitConfig:
    """Which devices share the blocks of a model, in stages."""

    devices: tuple[str, ...] = ()
    """Names of the stages' devices, in order; () = those of `device_map` and `max_memory`."""
    device_map: str | None = None
    """`auto`: all GPUs. Else a JSON file with names of modules and their devices, as accelerate has them."""
    max_memory: tuple[tuple[int, int], ...] = ()
    """Numbers of GPUs (on a CPU, of stages) and the bytes that may be taken of each; others are not used."""
    hop_seconds: float = 0.0
    """What each hop from stage to stage is held back, to see what slower links do."""

    def __post_init__(self) -> None:
        if self.devices and self.device_map is not None:
            raise ValueError(
                f"devices are {', '.join(self.devices)} and device_map is {self.device_map!r}; give one of the two"
            )
        if self.device_map not in (None, "auto") and self.max_memory:
            raise ValueError(f"device_map {self.device_map!r} says where blocks go, and max_memory is given; drop it")
        for number, size in self.max_memory:
            _at_least(f"max_memory of {number}", size, 1)
        _at_least("hop_seconds", self.hop_seconds, 0)

    @property
    def wanted(self) -> bool:
        """Whether there is anything of it."""
        return bool(self.devices or self.device_map is not None or self.max_memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Options of a `Runtime`; also the keywords of `LLM`."""

    target: str | None = None
    """Checkpoint folder, .gguf file or hub id; None = the embedded SmolLM2-135M-Instruct."""
    mode: Mode = "auto"
    """`auto`: `hybrid` of what fits the model and this machine, see `auto_drafters`.
    `naive`: plain decoding. `share`: the target drafts for itself with quantized linears. `classic`: a second model
    drafts. `eagle`: a trained head drafts, token by token. `parallel`: a head that drafts all tokens in one pass.
    `glide`: a head that looks into the target's KV.
    `ngram`, `suffix`, `recycle`: tables of the text so far draft. `hybrid`: the best of `hybrid_with` in each round."""
    hybrid_with: tuple[str, ...] = ()
    """Drafters of `hybrid`: at most one of share, classic, eagle, parallel and glide, and tables. (): eagle and suffix
    if there is a head, else share and suffix; see `drafters_of`."""
    auto_drafters: tuple[str, ...] = ()
    """Drafters of `auto`, as `hybrid_with`. (): chosen when the model is loaded (`sharesd.loading.auto_mode`)."""
    ngram_min: int = 1
    """`ngram`: shortest run of tokens that is looked up."""
    ngram_max: int = 4
    """`ngram`: longest run of tokens that is looked up."""
    ngram_recent: bool = False
    """`ngram`: continue the most recent match rather than the first."""
    corpus: str | None = None
    """`suffix`: datastore of texts to look into as well, a file of `sharesd train corpus`, or `empty`; None = the one
    that comes with the embedded model, if that is the target, else none."""
    recycle_table: str | None = None
    """`recycle`: file of a table to start from, or `empty`; None = the one that comes with the embedded model, if that
    is the target, else an empty one."""
    draft: str | None = None
    """Classic only: the second model, or `small`: the one that comes with the embedded model; None = a separate
    quantized copy of the target with its own KV."""
    heads: tuple[str, ...] = ()
    """Trained heads, at most one for each mode. `eagle`: a folder or hub id in a public layout of EAGLE, EAGLE-2 or
    EAGLE-3. `parallel`, `glide`: what `sharesd train parallel` and `glide` write. Modes without one take that which
    comes with the embedded model, if there is one."""
    head_quant: QuantConfig | None = None
    """How the head's linears are quantized; None = not at all. With `head_bits` an LM head that it shares with
    the target is copied for that."""
    num_draft: int | None = None
    """Draft tokens per round; None = chosen anew for each round, by measured costs and acceptance, 0 to `max_draft`."""
    max_draft: int = 8
    """Draft tokens per round at most, where their number is chosen."""
    draft_window: int | Literal["auto", "off"] = "auto"
    """`share`: how many of the last tokens a draft step looks at, besides the first few; the target looks at all.
    `auto`: as the context asks for; `off`: at all."""
    tree: tuple[int, int, int] | Literal["auto", "off"] = "auto"
    """`share`, `classic` and heads: (K, depth, budget) of draft trees: the K likeliest nodes of each level have K
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
    split: SplitConfig = field(default_factory=SplitConfig)
    """Devices that have some of the blocks each, in place of `device`. Texts do not depend on it."""
    draft_device: str | None = None
    """`classic`: where the second model is; None = where the target's head is."""
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
        _one_of("mode", self.mode, MODES)
        _one_of("dtype", self.dtype, get_args(DType))
        _one_of("compile", self.compile, get_args(CompileMode))
        _one_of("kernels", self.kernels, get_args(Kernels))
        if self.num_draft is not None:
            _at_least("num_draft", self.num_draft, 1)
        _at_least("max_draft", self.max_draft, 1)
        if isinstance(self.draft_window, int):
            _at_least("draft_window", self.draft_window, 1)
        else:
            _one_of("draft_window", self.draft_window, ("auto", "off"))
        if isinstance(self.tree, str):
            _one_of("tree", self.tree, ("auto", "off"))
        else:
            self._check_tree(*self.tree)
        _at_least("ngram_min", self.ngram_min, 1)
        _at_least("ngram_max", self.ngram_max, self.ngram_min)
        self._check_drafters("hybrid_with")
        self._check_drafters("auto_drafters")
        _at_least("tensor_parallel", self.tensor_parallel, 1)
        _one_of("tensor_parallel_style", self.tensor_parallel_style, get_args(TensorParallelStyle))
        if self.tensor_parallel_style == "reduce" and self.tensor_parallel == 1:
            raise ValueError("tensor_parallel_style is 'reduce' and tensor_parallel is 1; give ranks, or leave it out")
        _at_least("max_batch", self.max_batch, 1)
        if self.threads is not None:
            _at_least("threads", self.threads, 1)
        if self.max_queue is not None:
            _at_least("max_queue", self.max_queue, 0)
        if self.prefill_chunk is not None:
            _at_least("prefill_chunk", self.prefill_chunk, 1)
        if isinstance(self.max_context, int):
            _at_least("max_context", self.max_context, FEWEST_CONTEXT)
        else:
            _one_of("max_context", self.max_context, ("auto", "a number"))
        by_mode = {mode_of_head(head): head for head in self.heads}
        if len(by_mode) < len(self.heads):
            raise ValueError(f"heads are {', '.join(self.heads)}, some of which are for one mode; give one for each")
        for mode in self.drafters_of(self.mode):
            if mode in HEADS:
                self.require_head(mode)
        if self.head_quant is not None and not any(map(self.head_of, HEADS)):
            raise ValueError(
                f"head_quant is {self.head_quant} and there is no head; drop it, or give one (--draft-head FOLDER)"
            )
        if self.split.wanted and self.device != "auto":
            raise ValueError(f"device is {self.device!r} and the stages have devices of their own; leave device out")
        if self.split.wanted and self.tensor_parallel > 1:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}, whose ranks have one device each, and there are stages; "
                "drop one of the two"
            )
        if self.draft is not None and self.mode not in ("classic", "auto") and "classic" not in self.hybrid_with:
            raise ValueError(
                f"draft is {self.draft!r} but mode is {self.mode!r}; a draft model belongs to mode classic"
            )
        if self.draft == SMALL and self.draft_model is None:
            raise ValueError(
                f"draft is {SMALL!r}, which is for the embedded model alone; give a folder, or leave it out"
            )

    def _check_drafters(self, field: str) -> None:
        given = getattr(self, field)
        for name in given:
            _one_of(field, name, (*MODEL_DRAFTERS, *TABLES))
        if sum(name in MODEL_DRAFTERS for name in given) > 1:
            raise ValueError(f"{field} is {', '.join(given)}; give one of {' and '.join(MODEL_DRAFTERS)}")

    def _check_tree(self, top: int, depth: int, budget: int) -> None:
        shown = ":".join(map(str, self.tree))
        full = top + (depth - 1) * top**2
        if top < 2 or depth < 1 or not depth < budget <= full:
            raise ValueError(
                f"tree is {shown}; K must be at least 2, the depth at least 1, and the budget above the depth and at "
                "most K + (depth - 1) * K * K"
            )
        if self.num_draft not in (None, budget):
            raise ValueError(
                f"num_draft is {self.num_draft} and tree is {shown}; leave num_draft to be chosen, or make it {budget} "
                "for the whole tree in every round"
            )

    @property
    def planned_context(self) -> int:
        """`max_context`, as far as it is known before the model is loaded."""
        return self.max_context if isinstance(self.max_context, int) else PLANNED_CONTEXT

    @property
    def given_tree(self) -> tuple[int, int, int] | None:
        """Draft trees that all models shall draft, if there are such."""
        return None if isinstance(self.tree, str) else self.tree

    def drafters_of(self, *modes: str) -> tuple[str, ...]:
        """Drafters of some modes: those of `hybrid` and `auto` in place of these two."""
        found: list[str] = []
        for mode in modes:
            found += self._mixed if mode == "hybrid" else self.auto_drafters if mode == "auto" else (mode,)
        return tuple(dict.fromkeys(found))

    @property
    def _mixed(self) -> tuple[str, ...]:
        if self.hybrid_with:
            return self.hybrid_with
        has_head = self.head_of("eagle") is not None and self.tensor_parallel == 1
        return "eagle" if has_head else "share", "suffix"

    @property
    def draft_model(self) -> str | None:
        """`classic`: the second model; None = a quantized copy of the target."""
        return self._shipped("classic") if self.draft == SMALL else self.draft

    def head_of(self, mode: str) -> str | None:
        """What a mode of `HEADS` drafts with: one of `heads`, or what comes with the embedded model; None = nothing."""
        return next((head for head in self.heads if mode_of_head(head) == mode), None) or self._shipped(mode)

    def _shipped(self, mode: str) -> str | None:
        """What the embedded model brings for a mode, if that is the target."""
        folder = EMBEDDED_HEADS / mode
        return str(folder) if self.target is None and folder.is_dir() else None

    def require_head(self, mode: str) -> str:
        """The same; ValueError where there is none."""
        head = self.head_of(mode)
        if head is not None:
            return head
        if not self.heads:
            raise ValueError(f"mode {mode} needs a trained head; give one (--draft-head FOLDER)")
        other, fits = self.heads[0], mode_of_head(self.heads[0])
        raise ValueError(f"{other} is a head of mode {fits}: take mode {fits}, not {mode}, or give another head")

    @property
    def table_file(self) -> Path | None:
        """`recycle`: the table to start from; None = an empty one."""
        return self._given(self.recycle_table, EMBEDDED_TABLE)

    @property
    def corpus_file(self) -> Path | None:
        """`suffix`: the datastore to look into as well; None = none."""
        return self._given(self.corpus, EMBEDDED_CORPUS)

    def _given(self, name: str | None, embedded: Path) -> Path | None:
        if name is None:
            return embedded if self.target is None else None
        return None if name == "empty" else Path(name)

    @property
    def most_draft(self) -> int:
        """Draft tokens per round at most."""
        if self.given_tree is not None:
            return self.given_tree[2]
        return self.max_draft if self.num_draft is None else self.num_draft
