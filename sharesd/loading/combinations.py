"""Table of options that exclude each other, with messages.

Imports no torch. Rows are checked as soon as their facts are available: `OPTIONS` with the command line, `TARGET` after
the checkpoint's config is read, `RESOLVED` after device and compile mode are chosen. `NO_OFFLOAD` has reasons against
an offload plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sharesd.config import SMALL, EngineConfig
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import Need, Support


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """Options, and facts about device and model that were found so far."""

    config: EngineConfig
    modes: tuple[str, ...]
    drafters: frozenset[str]
    """Active drafters of `modes`.

    Those of mode auto are included once they are chosen.
    """
    replicas: int | None = None
    launched: int = 1
    """Processes that a launcher started to share prompts."""
    quant_skip: tuple[str, ...] = ()
    """`--quant-skip` next to `--draft-quant auto`."""
    unsupported: str | None = None  # reason why the target is no native decoder
    device: str = "cpu"
    compile: str = "auto"
    """Compile mode, `auto` resolved."""
    has_triton: bool = True
    draft_device: str | None = None
    num_stages: int = 1
    has_device_memory: bool = False
    """True if the device has memory of its own.

    Offloaded blocks are then in host memory.
    """
    in_memory: bool = False
    """True if tensors replace the checkpoint's files."""
    has_block_source: bool = False
    """True if the caller offloads blocks itself."""

    @classmethod
    def of(cls, config: EngineConfig, modes: Sequence[str] = (), **facts: object) -> Combination:
        """Return the combination of a config and its active drafters."""
        chosen = tuple(modes or (config.mode,))
        drafters = frozenset(selection.active_drafters(config, *chosen))
        return cls(config=config, modes=chosen, drafters=drafters, **facts)  # type: ignore[arg-type]

    @property
    def on_gpu(self) -> bool:
        """True on a CUDA device."""
        return self.device.startswith("cuda")

    @property
    def blocks_obstacle(self) -> str | None:
        """Option that stored weights do not go with."""
        config = self.config
        options = {
            "--lora": config.lora is not None,
            "--compile": config.compile not in ("auto", "native")
            and not (self.on_gpu or config.device.startswith("cuda")),
        }
        return next((name for name, is_given in options.items() if is_given), None)

    @property
    def runs_blocks(self) -> bool:
        """True if the options ask for stored or quantized weights."""
        return self.config.dequantize is False or self.config.target_quant is not None

    @property
    def blocks_flag(self) -> str:
        """The option that asks for such weights."""
        return "--no-dequantize" if self.config.target_quant is None else "--target-quant"

    @property
    def without_blocks(self) -> str:
        """The remedy that runs numbers instead."""
        return "use --dequantize" if self.config.target_quant is None else "drop --target-quant"

    @property
    def nested_obstacle(self) -> str | None:
        """Reason against drafts by upper halves, if they were asked for."""
        config = self.config
        if config.head_quant is not None and config.head_quant.format.is_nested:
            return "trained heads are not stored as Q8_0; leave out --head-quant"
        if not config.quant.format.is_nested:
            return None
        if self.needs(Need.SECOND_MODEL) and selection.second_model(config) is None:
            return "drafts would be a second model of as many bytes; use mode share"
        if not self.needs(Need.QUANTIZED_TARGET):
            return None
        if config.dequantize is not False:
            return "the weights do not run as they are stored; use hqq:4:64,head=4"
        if config.split.enabled or config.tensor_parallel > 1:
            return "the weights are split over devices; use hqq:4:64,head=4"
        return f"{self.device} has no kernel for it yet; use --device cpu" if self.on_gpu else None

    @property
    def q8_obstacle(self) -> str | None:
        """Reason against KV in 8 bits, if that was asked for."""
        if self.config.kv_dtype == "auto":
            return None
        if self.config.kernels == "torch" or (self.on_gpu and not self.has_triton):
            return "KV in 8 bits needs this project's kernels, and torch's run here"
        return self.unsupported and f"only native decoders keep KV in 8 bits: {self.unsupported}"

    @property
    def heads(self) -> list[str]:
        """Active drafters that are trained heads."""
        return [name for name in registry.names("head") if name in self.drafters]

    @property
    def not_sharded(self) -> tuple[str, ...]:
        """Active drafters that need the whole target on one device."""
        return registry.lacking(self.drafters - {registry.NAIVE}, Support.TENSOR_PARALLEL)

    def needs(self, need: Need) -> bool:
        """True if an active drafter has this need."""
        return bool(registry.those(self.drafters, need))

    @property
    def has_quantized_linears(self) -> bool:
        """True if linears are quantized for this project's kernels."""
        config = self.config
        second = self.needs(Need.SECOND_MODEL) and selection.second_model(config) is None
        copies = second or self.needs(Need.QUANTIZED_TARGET)
        head_quant = config.head_quant if self.heads else None
        quants = (config.quant if copies else None, head_quant)
        return any(quant is not None and quant.format.solver is not None for quant in quants)


class Rule(NamedTuple):
    """A combination that is refused."""

    applies: Callable[[Combination], bool]
    message: Callable[[Combination], str]


def _has_duplicate_heads(c: Combination) -> bool:
    return len({selection.head_mode(head) for head in c.config.heads}) < len(c.config.heads)


def _mode_without_head(c: Combination) -> str | None:
    return next((mode for mode in c.heads if selection.head_of(c.config, mode) is None), None)


def _missing_head(c: Combination) -> str:
    mode, heads = _mode_without_head(c), c.config.heads
    if not heads:
        return f"mode {mode} needs a trained head; give one (--draft-head FOLDER)"
    other, fits = heads[0], selection.head_mode(heads[0])
    return f"{other} is a head of mode {fits}: use mode {fits}, not {mode}, or give another head"


def _has_unused_draft_model(c: Combination) -> bool:
    """True if no drafter uses the given second model.

    False if drafters are chosen when the model is loaded.
    """
    config = c.config
    if config.draft is None:
        return False
    active = [selection.active_drafters(config, mode) for mode in (config.mode, *c.modes)]
    drafters = {*config.hybrid_with, *(name for names in active for name in names)}
    return all(active) and not drafters.intersection(selection.needing(Need.SECOND_MODEL))


def _has_other_budget(c: Combination) -> bool:
    tree = c.config.explicit_tree
    return tree is not None and c.config.num_draft not in (None, tree[2])


def _tree(c: Combination) -> str:
    return ":".join(map(str, c.config.explicit_tree or ()))


def _stage_flag(c: Combination) -> str:
    split = c.config.split
    return "--devices" if split.devices else "--device-map" if split.device_map is not None else "--max-memory"


def _processes(c: Combination) -> str:
    return "the launcher" if c.replicas is None else "--replicas"


OPTIONS: tuple[Rule, ...] = (
    Rule(
        lambda c: c.config.tensor_parallel_style == "reduce" and c.config.tensor_parallel == 1,
        lambda c: "tensor_parallel_style is 'reduce' and tensor_parallel is 1; give ranks, or leave it out",
    ),
    Rule(
        lambda c: c.config.offload.when == "off" and (c.config.offload.limited or c.config.offload.folder is not None),
        lambda c: "offload is off, and a limit or a folder for it is given; leave it at auto",
    ),
    Rule(
        lambda c: bool(c.config.split.devices) and c.config.split.device_map is not None,
        lambda c: (
            f"devices are {', '.join(c.config.split.devices)} and device_map is {c.config.split.device_map!r}; "
            "give one of the two"
        ),
    ),
    Rule(
        lambda c: c.config.split.device_map not in (None, "auto") and bool(c.config.split.max_memory),
        lambda c: f"device_map {c.config.split.device_map!r} says where blocks go, and max_memory is given; drop it",
    ),
    Rule(
        lambda c: c.config.split.enabled and c.config.device != "auto",
        lambda c: f"device is {c.config.device!r} and the stages have devices of their own; leave device out",
    ),
    Rule(
        lambda c: c.config.split.enabled and c.config.tensor_parallel > 1,
        lambda c: (
            f"tensor_parallel is {c.config.tensor_parallel}, whose ranks have one device each, and there are "
            "stages; drop one of the two"
        ),
    ),
    Rule(
        _has_other_budget,
        lambda c: (
            f"num_draft is {c.config.num_draft} and tree is {_tree(c)}; leave num_draft to be chosen, or make it "
            f"{c.config.max_draft_tokens} for the whole tree in every round"
        ),
    ),
    Rule(
        _has_duplicate_heads,
        lambda c: f"heads are {', '.join(c.config.heads)}, some of which are for one mode; give one for each",
    ),
    Rule(lambda c: _mode_without_head(c) is not None, _missing_head),
    Rule(
        lambda c: (
            c.config.head_quant is not None
            and not any(selection.head_of(c.config, mode) for mode in registry.names("head"))
        ),
        lambda c: (
            f"head_quant is {c.config.head_quant} but no head is given; drop it, or give one (--draft-head FOLDER)"
        ),
    ),
    Rule(
        _has_unused_draft_model,
        lambda c: (
            f"draft is {c.config.draft!r} but mode is {c.config.mode!r}; a draft model belongs to mode "
            f"{registry.choices(selection.needing(Need.SECOND_MODEL))}"
        ),
    ),
    Rule(
        lambda c: c.config.draft == SMALL and selection.second_model(c.config) is None,
        lambda c: f"draft is {SMALL!r}, which is for the embedded model alone; give a folder, or leave it out",
    ),
    Rule(
        lambda c: c.config.tensor_parallel > 1 and c.config.compile in ("regional", "full"),
        lambda c: (
            f"compile is {c.config.compile!r} and tensor_parallel is {c.config.tensor_parallel}, whose steps "
            "synchronise between linears; use native on a CPU, off on a GPU, or auto"
        ),
    ),
    Rule(
        lambda c: c.config.tensor_parallel > 1 and bool(c.not_sharded),
        lambda c: (
            f"tensor_parallel is {c.config.tensor_parallel}, and {c.not_sharded[0]} drafts on one device; drop "
            f"mode {c.not_sharded[0]}"
        ),
    ),
    Rule(
        lambda c: c.config.tensor_parallel > 1 and ":" in c.config.device,
        lambda c: (
            f"device is {c.config.device!r} and tensor_parallel is {c.config.tensor_parallel}; use cuda for one each"
        ),
    ),
    Rule(
        lambda c: c.replicas is not None and c.config.tensor_parallel > 1,
        lambda c: f"--replicas is {c.replicas} and --tensor-parallel {c.config.tensor_parallel}; drop one of the two",
    ),
    Rule(
        lambda c: c.replicas is not None and c.config.split.enabled,
        lambda c: f"--replicas is {c.replicas}, which have one device each, and there are stages; drop one of them",
    ),
    Rule(
        lambda c: c.launched > 1 and c.replicas is not None,
        lambda c: f"--replicas is {c.replicas} and a launcher has started {c.launched} processes; use one of the two",
    ),
    Rule(
        lambda c: c.launched > 1 and c.config.tensor_parallel > 1,
        lambda c: (
            f"--tensor-parallel is {c.config.tensor_parallel} and a launcher has started {c.launched} "
            "processes; use one of the two"
        ),
    ),
    Rule(
        lambda c: c.launched > 1 and c.config.split.enabled,
        lambda c: f"a launcher has started {c.launched} processes, which have one device each; drop {_stage_flag(c)}",
    ),
    Rule(
        lambda c: bool(c.quant_skip),
        lambda c: (
            f"--draft-quant auto chooses what to skip, and --quant-skip is {c.quant_skip[0]!r}; drop one of the two"
        ),
    ),
    Rule(
        lambda c: c.runs_blocks and c.blocks_obstacle is not None,
        lambda c: f"stored weights are not supported with {c.blocks_obstacle}; drop it, or {c.blocks_flag}",
    ),
    Rule(
        lambda c: c.config.target_quant is not None and c.config.dequantize is True,
        lambda c: f"target_quant is {c.config.target_quant!r}, and dequantize is given; drop one of the two",
    ),
    Rule(
        lambda c: c.config.prompt_cache is not None and (c.config.split.enabled or c.config.tensor_parallel > 1),
        lambda c: (
            f"prompt_cache is {c.config.prompt_cache}, which cannot hold KV of several devices; drop it, or "
            f"{_stage_flag(c) if c.config.split.enabled else '--tensor-parallel'}"
        ),
    ),
    Rule(
        lambda c: c.config.trace is not None and (c.replicas is not None or c.launched > 1),
        lambda c: f"trace is {c.config.trace}, which one process writes; drop it, or {_processes(c)}",
    ),
)
"""Rows about options alone."""

TARGET: tuple[Rule, ...] = (
    Rule(
        lambda c: c.unsupported is not None and c.config.split.enabled,
        lambda c: f"only native decoders are split among devices: {c.unsupported}; leave devices out",
    ),
    Rule(
        lambda c: c.unsupported is not None and c.config.tensor_parallel > 1,
        lambda c: (
            f"tensor_parallel is {c.config.tensor_parallel}, and only native decoders are shared out: {c.unsupported}"
        ),
    ),
    Rule(lambda c: bool(c.q8_obstacle), lambda c: f"kv_dtype is 'q8', and {c.q8_obstacle}; leave it out"),
)
"""Rows about options, the device and the target's architecture."""

RESOLVED: tuple[Rule, ...] = (
    Rule(
        lambda c: c.config.draft_device is not None and not c.needs(Need.SECOND_MODEL),
        lambda c: (
            f"draft_device is {c.config.draft_device!r} and no mode is "
            f"{registry.choices(selection.needing(Need.SECOND_MODEL))}; leave it out"
        ),
    ),
    Rule(
        lambda c: c.compile == "native" and c.on_gpu,
        lambda c: f"compile is 'native' but device is {c.device}; use regional or full on a GPU",
    ),
    Rule(
        lambda c: c.compile == "full" and c.has_block_source,
        lambda c: "compile is 'full', and offloaded blocks run one by one; use native, or regional on a GPU",
    ),
    Rule(
        lambda c: c.draft_device is not None and c.draft_device != c.device.partition(":")[0],
        lambda c: (
            f"draft_device is {c.config.draft_device!r} and the target is on {c.device}, which would wait for "
            "it; give a device of its kind"
        ),
    ),
    Rule(
        lambda c: c.draft_device is not None and c.compile == "full",
        lambda c: (
            f"compile is 'full' and draft_device is {c.config.draft_device!r}, to which steps move and back; "
            "use regional, or auto"
        ),
    ),
    Rule(
        lambda c: c.config.split.enabled and c.has_block_source,
        lambda c: "blocks in stages stay where they are; drop offload, or devices",
    ),
    Rule(
        lambda c: c.num_stages > 1 and c.compile == "full",
        lambda c: "compile is 'full' and a step runs on several devices; use regional, or auto",
    ),
    Rule(
        lambda c: c.on_gpu and not c.has_triton and c.has_quantized_linears,
        lambda c: (
            f"quantized linears on {c.device} need Triton; use a mode without them (naive, "
            "eagle, suffix), --draft-quant bnb:4:64, or --device cpu"
        ),
    ),
    Rule(
        lambda c: c.config.activations != "exact" and bool(c.config.dequantize),
        lambda c: (
            f"activations is {c.config.activations!r}, which is for weights that run as they are stored; leave it out, "
            "or use --no-dequantize"
        ),
    ),
    Rule(
        lambda c: c.config.dequantize is False and c.compile != "native" and not c.on_gpu,
        lambda c: f"stored weights run in the CPU kernel, and steps are compiled by {c.compile!r}; {c.without_blocks}",
    ),
    Rule(
        lambda c: c.config.dequantize is False and c.on_gpu and c.config.kernels == "torch",
        lambda c: f"stored weights run in the Triton kernels, and torch's run here; {c.without_blocks}",
    ),
    Rule(lambda c: c.nested_obstacle is not None, lambda c: f"draft_quant is nested, and {c.nested_obstacle}"),
    Rule(
        lambda c: c.config.activations != "exact" and c.on_gpu,
        lambda c: f"activations is {c.config.activations!r}, which rounds them on a CPU alone; leave it out",
    ),
)
"""Rows about options and how they were resolved."""

NO_OFFLOAD: tuple[Rule, ...] = (
    Rule(
        lambda c: c.config.split.enabled,
        lambda c: "the model is split among devices, which keep all of it; drop the limit of memory, or the split",
    ),
    Rule(
        lambda c: c.has_device_memory and c.config.compile == "full",
        lambda c: "compile is 'full', and offloaded blocks run one by one; use regional, or auto",
    ),
    Rule(
        lambda c: not c.has_device_memory and c.in_memory,
        lambda c: (
            "the weights are made in memory, and on a CPU they are offloaded to files; write them, and give the folder"
        ),
    ),
    Rule(
        lambda c: not c.has_device_memory and c.config.compile not in ("auto", "native"),
        lambda c: f"compile is {c.config.compile!r}; offloaded blocks run in the CPU kernel (--compile native)",
    ),
    Rule(
        lambda c: not c.has_device_memory and c.config.kernels == "torch",
        lambda c: "offloaded blocks run in the CPU kernels, and torch's operations run here; install a C++ compiler",
    ),
    Rule(
        lambda c: c.config.tensor_parallel > 1,
        lambda c: (
            f"tensor_parallel is {c.config.tensor_parallel}, and ranks keep all of their weights; drop one of the two"
        ),
    ),
    Rule(
        lambda c: c.config.prompt_cache is not None,
        lambda c: f"prompt_cache is {c.config.prompt_cache}, and it needs all weights in memory; drop one of the two",
    ),
)
"""Reasons against an offload plan.

With a memory limit a reason is an error; without one the model is resident.
"""


def check(rows: Sequence[Rule], combination: Combination) -> None:
    """Raise ValueError with the message of the first row that applies."""
    message = first_message(rows, combination)
    if message is not None:
        raise ValueError(message)


def first_message(rows: Sequence[Rule], combination: Combination) -> str | None:
    """Return the message of the first row that applies."""
    return next((row.message(combination) for row in rows if row.applies(combination)), None)


def check_options(config: EngineConfig, modes: Sequence[str] = (), **facts: object) -> None:
    """Raise ValueError for unknown drafters, and options that exclude each other."""
    selection.check_drafters(config, *modes)
    check(OPTIONS, Combination.of(config, modes, **facts))
