"""Table of options that exclude each other, with messages.

Imports no torch. Rows are checked as soon as their facts are available: `OPTIONS` with the command line, `TARGET` after
the checkpoint's config is read, `RESOLVED` after device and compile mode are chosen. `NO_OFFLOAD` has reasons against
an offload plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sharesd.config import SMALL, EngineConfig
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import Need
from sharesd.loading.combination import Combination


class Row(NamedTuple):
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
    return f"{other} is a head of mode {fits}: take mode {fits}, not {mode}, or give another head"


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


OPTIONS: tuple[Row, ...] = (
    Row(
        lambda c: c.config.tensor_parallel_style == "reduce" and c.config.tensor_parallel == 1,
        lambda c: "tensor_parallel_style is 'reduce' and tensor_parallel is 1; give ranks, or leave it out",
    ),
    Row(
        lambda c: c.config.offload.when == "off" and (c.config.offload.limited or c.config.offload.folder is not None),
        lambda c: "offload is off, and a limit or a folder for it is given; leave it at auto",
    ),
    Row(
        lambda c: bool(c.config.split.devices) and c.config.split.device_map is not None,
        lambda c: (
            f"devices are {', '.join(c.config.split.devices)} and device_map is {c.config.split.device_map!r}; "
            "give one of the two"
        ),
    ),
    Row(
        lambda c: c.config.split.device_map not in (None, "auto") and bool(c.config.split.max_memory),
        lambda c: f"device_map {c.config.split.device_map!r} says where blocks go, and max_memory is given; drop it",
    ),
    Row(
        lambda c: c.config.split.enabled and c.config.device != "auto",
        lambda c: f"device is {c.config.device!r} and the stages have devices of their own; leave device out",
    ),
    Row(
        lambda c: c.config.split.enabled and c.config.tensor_parallel > 1,
        lambda c: (
            f"tensor_parallel is {c.config.tensor_parallel}, whose ranks have one device each, and there are "
            "stages; drop one of the two"
        ),
    ),
    Row(
        _has_other_budget,
        lambda c: (
            f"num_draft is {c.config.num_draft} and tree is {_tree(c)}; leave num_draft to be chosen, or make it "
            f"{c.config.max_draft_tokens} for the whole tree in every round"
        ),
    ),
    Row(
        _has_duplicate_heads,
        lambda c: f"heads are {', '.join(c.config.heads)}, some of which are for one mode; give one for each",
    ),
    Row(lambda c: _mode_without_head(c) is not None, _missing_head),
    Row(
        lambda c: (
            c.config.head_quant is not None
            and not any(selection.head_of(c.config, mode) for mode in registry.names("head"))
        ),
        lambda c: (
            f"head_quant is {c.config.head_quant} and there is no head; drop it, or give one (--draft-head FOLDER)"
        ),
    ),
    Row(
        _has_unused_draft_model,
        lambda c: (
            f"draft is {c.config.draft!r} but mode is {c.config.mode!r}; a draft model belongs to mode "
            f"{registry.choices(selection.needing(Need.SECOND_MODEL))}"
        ),
    ),
    Row(
        lambda c: c.config.draft == SMALL and selection.second_model(c.config) is None,
        lambda c: f"draft is {SMALL!r}, which is for the embedded model alone; give a folder, or leave it out",
    ),
    Row(
        lambda c: c.config.tensor_parallel > 1 and c.config.compile in ("regional", "full"),
        lambda c: (
            f"compile is {c.config.compile!r} and tensor_parallel is {c.config.tensor_parallel}, whose steps "
            "wait for each other between linears; take native on a CPU, off on a GPU, or auto"
        ),
    ),
    Row(
        lambda c: c.config.tensor_parallel > 1 and bool(c.not_sharded),
        lambda c: (
            f"tensor_parallel is {c.config.tensor_parallel}, and {c.not_sharded[0]} drafts on one device; drop "
            f"mode {c.not_sharded[0]}"
        ),
    ),
    Row(
        lambda c: c.config.tensor_parallel > 1 and ":" in c.config.device,
        lambda c: (
            f"device is {c.config.device!r} and tensor_parallel is {c.config.tensor_parallel}; take cuda for one each"
        ),
    ),
    Row(
        lambda c: c.replicas is not None and c.config.tensor_parallel > 1,
        lambda c: f"--replicas is {c.replicas} and --tensor-parallel {c.config.tensor_parallel}; drop one of the two",
    ),
    Row(
        lambda c: c.replicas is not None and c.config.split.enabled,
        lambda c: f"--replicas is {c.replicas}, which have one device each, and there are stages; drop one of them",
    ),
    Row(
        lambda c: c.launched > 1 and c.replicas is not None,
        lambda c: f"--replicas is {c.replicas} and a launcher has started {c.launched} processes; take one of two",
    ),
    Row(
        lambda c: c.launched > 1 and c.config.tensor_parallel > 1,
        lambda c: (
            f"--tensor-parallel is {c.config.tensor_parallel} and a launcher has started {c.launched} "
            "processes; take one of two"
        ),
    ),
    Row(
        lambda c: c.launched > 1 and c.config.split.enabled,
        lambda c: f"a launcher has started {c.launched} processes, which have one device each; drop {_stage_flag(c)}",
    ),
    Row(
        lambda c: bool(c.quant_skip),
        lambda c: (
            f"--draft-quant auto chooses what to skip, and --quant-skip is {c.quant_skip[0]!r}; drop one of the two"
        ),
    ),
    Row(
        lambda c: c.runs_blocks and c.blocks_obstacle is not None,
        lambda c: f"stored weights do not go with {c.blocks_obstacle} yet; drop it, or {c.blocks_flag}",
    ),
    Row(
        lambda c: c.config.target_quant is not None and c.config.dequantize is True,
        lambda c: f"target_quant is {c.config.target_quant!r}, and dequantize is given; drop one of the two",
    ),
    Row(
        lambda c: c.config.prompt_cache is not None and (c.config.split.enabled or c.config.tensor_parallel > 1),
        lambda c: (
            f"prompt_cache is {c.config.prompt_cache}, and it has no KV of several devices; drop it, or "
            f"{_stage_flag(c) if c.config.split.enabled else '--tensor-parallel'}"
        ),
    ),
    Row(
        lambda c: c.config.trace is not None and (c.replicas is not None or c.launched > 1),
        lambda c: f"trace is {c.config.trace}, which one process writes; drop it, or {_processes(c)}",
    ),
)
"""Rows about options alone."""

TARGET: tuple[Row, ...] = (
    Row(
        lambda c: c.unsupported is not None and c.config.split.enabled,
        lambda c: f"only native decoders are split among devices: {c.unsupported}; leave devices out",
    ),
    Row(
        lambda c: c.unsupported is not None and c.config.tensor_parallel > 1,
        lambda c: (
            f"tensor_parallel is {c.config.tensor_parallel}, and only native decoders are shared out: {c.unsupported}"
        ),
    ),
    Row(lambda c: bool(c.q8_obstacle), lambda c: f"kv_dtype is 'q8', and {c.q8_obstacle}; leave it out"),
)
"""Rows about options, the device and the target's architecture."""

RESOLVED: tuple[Row, ...] = (
    Row(
        lambda c: c.config.draft_device is not None and not c.needs(Need.SECOND_MODEL),
        lambda c: (
            f"draft_device is {c.config.draft_device!r} and no mode is "
            f"{registry.choices(selection.needing(Need.SECOND_MODEL))}; leave it out"
        ),
    ),
    Row(
        lambda c: c.compile == "native" and c.on_gpu,
        lambda c: f"compile is 'native' but device is {c.device}; use regional or full on a GPU",
    ),
    Row(
        lambda c: c.compile == "full" and c.has_block_source,
        lambda c: "compile is 'full', and offloaded blocks run one by one; take native, or regional on a GPU",
    ),
    Row(
        lambda c: c.draft_device is not None and c.draft_device != c.device.partition(":")[0],
        lambda c: (
            f"draft_device is {c.config.draft_device!r} and the target is on {c.device}, which would wait for "
            "it; give a device of its kind"
        ),
    ),
    Row(
        lambda c: c.draft_device is not None and c.compile == "full",
        lambda c: (
            f"compile is 'full' and draft_device is {c.config.draft_device!r}, where steps go over and come back "
            "from; take regional, or auto"
        ),
    ),
    Row(
        lambda c: c.config.split.enabled and c.has_block_source,
        lambda c: "blocks in stages stay where they are; drop offload, or devices",
    ),
    Row(
        lambda c: c.num_stages > 1 and c.compile == "full",
        lambda c: "compile is 'full' and a step runs on several devices; take regional, or auto",
    ),
    Row(
        lambda c: c.on_gpu and not c.has_triton and c.has_quantized_linears,
        lambda c: (
            f"linears are to be quantized, which on {c.device} takes Triton; take a mode without them (naive, "
            "eagle, suffix), --draft-quant bnb:4:64, or --device cpu"
        ),
    ),
    Row(
        lambda c: c.config.activations != "exact" and bool(c.config.dequantize),
        lambda c: (
            f"activations is {c.config.activations!r}, which is for weights that run as they are stored; leave it out, "
            "or take --no-dequantize"
        ),
    ),
    Row(
        lambda c: c.config.dequantize is False and c.compile != "native" and not c.on_gpu,
        lambda c: f"stored weights run in the CPU kernel, and steps are compiled by {c.compile!r}; {c.without_blocks}",
    ),
    Row(
        lambda c: c.config.dequantize is False and c.on_gpu and c.config.kernels == "torch",
        lambda c: f"stored weights run in the Triton kernels, and torch's run here; {c.without_blocks}",
    ),
    Row(lambda c: c.nested_obstacle is not None, lambda c: f"draft_quant is nested, and {c.nested_obstacle}"),
    Row(
        lambda c: c.config.activations != "exact" and c.on_gpu,
        lambda c: f"activations is {c.config.activations!r}, which rounds them on a CPU alone; leave it out",
    ),
)
"""Rows about options and how they were resolved."""

NO_OFFLOAD: tuple[Row, ...] = (
    Row(
        lambda c: c.config.split.enabled,
        lambda c: "the model is split among devices, which keep all of it; drop the limit of memory, or the split",
    ),
    Row(
        lambda c: c.has_device_memory and c.config.compile == "full",
        lambda c: "compile is 'full', and offloaded blocks run one by one; take regional, or auto",
    ),
    Row(
        lambda c: not c.has_device_memory and c.in_memory,
        lambda c: (
            "the weights are made in memory, and on a CPU they are offloaded to files; write them, and give the folder"
        ),
    ),
    Row(
        lambda c: not c.has_device_memory and c.config.compile not in ("auto", "native"),
        lambda c: f"compile is {c.config.compile!r}; offloaded blocks run in the CPU kernel (--compile native)",
    ),
    Row(
        lambda c: not c.has_device_memory and c.config.kernels == "torch",
        lambda c: "offloaded blocks run in the CPU kernels, and torch's operations run here; install a C++ compiler",
    ),
    Row(
        lambda c: c.config.tensor_parallel > 1,
        lambda c: (
            f"tensor_parallel is {c.config.tensor_parallel}, and ranks keep all of their weights; drop one of the two"
        ),
    ),
    Row(
        lambda c: c.config.prompt_cache is not None,
        lambda c: f"prompt_cache is {c.config.prompt_cache}, and it needs all weights in memory; drop one of the two",
    ),
)
"""Reasons against an offload plan.

With a memory limit a reason is an error; without one the model is resident.
"""


def check(rows: Sequence[Row], combination: Combination) -> None:
    """Raise ValueError with the message of the first row that applies."""
    message = first_message(rows, combination)
    if message is not None:
        raise ValueError(message)


def first_message(rows: Sequence[Row], combination: Combination) -> str | None:
    """Return the message of the first row that applies."""
    return next((row.message(combination) for row in rows if row.applies(combination)), None)


def check_options(config: EngineConfig, modes: Sequence[str] = (), **facts: object) -> None:
    """Raise ValueError for unknown drafters, and options that exclude each other."""
    selection.check_drafters(config, *modes)
    check(OPTIONS, Combination.of(config, modes, **facts))
