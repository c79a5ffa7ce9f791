"""Options that exclude each other, with messages.

Each function yields the messages of what does not go together, in the order in which they are checked; it is called as
soon as its facts are known: `option_conflicts` with the command line, `target_conflicts` after the checkpoint's config
is read, `sharesd.startup.resolve.resolved_conflicts` after device and compile mode are chosen. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from sharesd.config import SMALL, EngineConfig, PipelineConfig
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import Need, Support


def check(conflicts: Iterator[str]) -> None:
    """Raise ValueError with the first message."""
    for message in conflicts:
        raise ValueError(message)


def check_options(
    config: EngineConfig,
    modes: Sequence[str] = (),
    *,
    replicas: int | None = None,
    quant_skip: Sequence[str] = (),
) -> None:
    """Raise ValueError for unknown drafters, and options that exclude each other."""
    selection.check_drafters(config, *modes)
    check(option_conflicts(config, modes, replicas=replicas, quant_skip=quant_skip))


def option_conflicts(
    config: EngineConfig,
    modes: Sequence[str] = (),
    *,
    replicas: int | None = None,
    launched: int = 1,
    quant_skip: Sequence[str] = (),
) -> Iterator[str]:
    """Yield what options alone exclude.

    Args:
        modes: modes to load; () = the config's.
        replicas: `--replicas`.
        launched: processes that a launcher started to share prompts.
        quant_skip: `--quant-skip` next to `--draft-quant auto`.
    """
    modes = tuple(modes) or (config.mode,)
    drafters = frozenset(selection.active_drafters(config, *modes))
    yield from _device_conflicts(config)
    yield from _draft_conflicts(config, modes, drafters)
    yield from _process_conflicts(config, drafters, replicas, launched)
    if quant_skip:
        yield f"--draft-quant auto chooses what to skip, and --quant-skip is {quant_skip[0]!r}; drop one of the two"
    yield from _weight_conflicts(config)
    if config.trace is not None and (replicas is not None or launched > 1):
        other = "the launcher" if replicas is None else "--replicas"
        yield f"trace is {config.trace}, which one process writes; drop it, or {other}"


def _device_conflicts(config: EngineConfig) -> Iterator[str]:
    ranks, split = config.tensor_parallel, config.split
    if config.tensor_parallel_style == "reduce" and ranks == 1:
        yield "tensor_parallel_style is 'reduce' and tensor_parallel is 1; give ranks, or leave it out"
    if config.offload.when == "off" and (config.offload.limited or config.offload.folder is not None):
        yield "offload is off, and a limit or a folder for it is given; leave it at auto"
    if split.devices and split.device_map is not None:
        names = ", ".join(split.devices)
        yield f"devices are {names} and device_map is {split.device_map!r}; give one of the two"
    if split.device_map not in (None, "auto") and split.max_memory:
        yield f"device_map {split.device_map!r} says where blocks go, and max_memory is given; drop it"
    if split.enabled and config.device != "auto":
        yield f"device is {config.device!r} and the stages have devices of their own; leave device out"
    if split.enabled and ranks > 1:
        yield (
            f"tensor_parallel is {ranks}, whose ranks have one device each, and there are stages; drop one of the two"
        )


def _draft_conflicts(config: EngineConfig, modes: Collection[str], drafters: Collection[str]) -> Iterator[str]:
    tree = config.explicit_tree
    if tree is not None and config.num_draft not in (None, tree[2]):
        yield (
            f"num_draft is {config.num_draft} and tree is {':'.join(map(str, tree))}; leave num_draft to be chosen, or "
            f"make it {config.max_draft_tokens} for the whole tree in every round"
        )
    if len({selection.head_mode(head) for head in config.heads}) < len(config.heads):
        yield f"heads are {', '.join(config.heads)}, some of which are for one mode; give one for each"
    trained = [mode for mode in registry.trained_heads() if mode in drafters]
    without_head = [mode for mode in trained if not selection.head_of(config, mode)]
    if without_head:
        yield selection.missing_head(config, without_head[0])
    if config.head_quant is not None and not any(selection.head_of(config, mode) for mode in registry.names("head")):
        yield f"head_quant is {config.head_quant} but no head is given; drop it, or give one (--draft-head FOLDER)"
    if config.draft is not None and not _uses_draft_model(config, modes):
        users = registry.choices(selection.needing(Need.SECOND_MODEL))
        yield f"draft is {config.draft!r} but mode is {config.mode!r}; a draft model belongs to mode {users}"
    if config.draft == SMALL and selection.second_model(config) is None:
        yield f"draft is {SMALL!r}, which is for the embedded model alone; give a folder, or leave it out"


def _process_conflicts(
    config: EngineConfig, drafters: Collection[str], replicas: int | None, launched: int
) -> Iterator[str]:
    ranks, split = config.tensor_parallel, config.split
    if ranks > 1 and config.compile in ("regional", "full"):
        yield (
            f"compile is {config.compile!r} and tensor_parallel is {ranks}, whose steps synchronise between linears; "
            "use native on a CPU, off on a GPU, or auto"
        )
    on_one_device = registry.lacking({*drafters} - {registry.NAIVE}, Support.TENSOR_PARALLEL)
    if ranks > 1 and on_one_device:
        name = on_one_device[0]
        yield f"tensor_parallel is {ranks}, and {name} drafts on one device; drop mode {name}"
    if ranks > 1 and ":" in config.device:
        yield f"device is {config.device!r} and tensor_parallel is {ranks}; use cuda for one each"
    if replicas is not None and ranks > 1:
        yield f"--replicas is {replicas} and --tensor-parallel {ranks}; drop one of the two"
    if replicas is not None and split.enabled:
        yield f"--replicas is {replicas}, which have one device each, and there are stages; drop one of them"
    if launched > 1 and replicas is not None:
        yield f"--replicas is {replicas} and a launcher has started {launched} processes; use one of the two"
    if launched > 1 and ranks > 1:
        yield f"--tensor-parallel is {ranks} and a launcher has started {launched} processes; use one of the two"
    if launched > 1 and split.enabled:
        yield f"a launcher has started {launched} processes, which have one device each; drop {_stage_flag(split)}"


def _stage_flag(split: PipelineConfig) -> str:
    return "--devices" if split.devices else "--device-map" if split.device_map is not None else "--max-memory"


def _weight_conflicts(config: EngineConfig) -> Iterator[str]:
    ranks, split = config.tensor_parallel, config.split
    asks_for_blocks = config.dequantize is False or config.target_quant is not None
    if asks_for_blocks and (obstacle := blocks_obstacle(config)) is not None:
        flag = "--no-dequantize" if config.target_quant is None else "--target-quant"
        yield f"stored weights are not supported with {obstacle}; drop it, or {flag}"
    if config.target_quant is not None and config.dequantize is True:
        yield f"target_quant is {config.target_quant!r}, and dequantize is given; drop one of the two"
    if config.prompt_cache is not None and (split.enabled or ranks > 1):
        other = _stage_flag(split) if split.enabled else "--tensor-parallel"
        yield f"prompt_cache is {config.prompt_cache}, which cannot hold KV of several devices; drop it, or {other}"


def _uses_draft_model(config: EngineConfig, modes: Collection[str]) -> bool:
    """True if a drafter uses the second model, or drafters are chosen when the model is loaded."""
    active = [selection.active_drafters(config, mode) for mode in (config.mode, *modes)]
    drafters = {*config.hybrid_with, *(name for names in active for name in names)}
    return not all(active) or bool(drafters.intersection(selection.needing(Need.SECOND_MODEL)))


def target_conflicts(
    config: EngineConfig,
    *,
    unsupported: str | None,
    undivided: str = "",
    on_gpu: bool,
    has_triton: bool,
    span: int = 0,
    max_span: int = 0,
    layers: str = "",
) -> Iterator[str]:
    """Yield what the device and the target's architecture exclude.

    Args:
        unsupported: reason why the target is not a native decoder, if it is not.
        undivided: what it is if the native decoder runs it whole on one device.
        span, max_span: slots above a text that a round may write, and how many a target with recurrent layers has.
        layers: what these layers have.
    """
    if undivided and config.split.enabled:
        yield f"{undivided} is not split among devices; leave {_stage_flag(config.split)} out"
    if undivided and config.tensor_parallel > 1:
        yield f"tensor_parallel is {config.tensor_parallel}, and {undivided} is not shared out; leave it out"
    if undivided and not on_gpu and config.compile in ("regional", "full"):
        yield f"compile is {config.compile!r}, and {undivided} runs in the CPU kernel; use native, or off"
    if span > max_span:
        yield (
            f"drafts of this size take {span} slots, and {layers} keep the inputs of {max_span}; give a "
            "smaller --tree, or fewer draft tokens"
        )
    if unsupported is not None and config.split.enabled:
        yield f"only native decoders are split among devices: {unsupported}; leave devices out"
    if unsupported is not None and config.tensor_parallel > 1:
        yield f"tensor_parallel is {config.tensor_parallel}, and only native decoders are shared out: {unsupported}"
    if config.kv_dtype == "q8" and (config.kernels == "torch" or (on_gpu and not has_triton)):
        yield "kv_dtype is 'q8', and KV in 8 bits needs this project's kernels, and torch's run here; leave it out"
    if config.kv_dtype == "q8" and unsupported is not None:
        yield f"kv_dtype is 'q8', and only native decoders keep KV in 8 bits: {unsupported}; leave it out"


def offload_obstacles(config: EngineConfig, *, has_device_memory: bool, in_memory: bool) -> Iterator[str]:
    """Yield reasons against an offload plan: errors if memory is limited, else the model is resident.

    Args:
        has_device_memory: the device has memory of its own, and offloaded blocks are in host memory.
        in_memory: tensors replace the checkpoint's files.
    """
    if config.split.enabled:
        yield "the model is split among devices, which keep all of it; drop the limit of memory, or the split"
    if has_device_memory and config.compile == "full":
        yield "compile is 'full', and offloaded blocks run one by one; use regional, or auto"
    if not has_device_memory and in_memory:
        yield (
            "the weights are made in memory, and on a CPU they are offloaded to files; write them, and give the folder"
        )
    if not has_device_memory and config.compile not in ("auto", "native"):
        yield f"compile is {config.compile!r}; offloaded blocks run in the CPU kernel (--compile native)"
    if not has_device_memory and config.kernels == "torch":
        yield "offloaded blocks run in the CPU kernels, and torch's operations run here; install a C++ compiler"
    if config.tensor_parallel > 1:
        yield f"tensor_parallel is {config.tensor_parallel}, and ranks keep all of their weights; drop one of the two"
    if config.prompt_cache is not None:
        yield f"prompt_cache is {config.prompt_cache}, and it needs all weights in memory; drop one of the two"
    if config.quant.format.keeps_weights:
        yield (
            f"draft_quant is {config.quant.spec}, and drafts would wait for the same weights; use hqq:4:64,head=4, or "
            "a mode without them (naive, eagle, suffix)"
        )


def blocks_obstacle(config: EngineConfig, *, on_gpu: bool = False) -> str | None:
    """Return the option that stored weights are not supported with."""
    if config.lora is not None:
        return "--lora"
    on_gpu = on_gpu or config.device.startswith("cuda")
    return "--compile" if config.compile not in ("auto", "native") and not on_gpu else None


def stored_drafts_obstacle(config: EngineConfig, drafters: Collection[str], device: str) -> str | None:
    """Return the reason against drafts by weights of the target itself, if they were asked for."""
    if not (config.quant.format.is_nested or config.quant.format.keeps_weights):
        return None
    if registry.those(drafters, Need.SECOND_MODEL) and selection.second_model(config) is None:
        return "drafts would be a second model of as many bytes; use mode share"
    if config.quant.format.keeps_weights or not registry.those(drafters, Need.QUANTIZED_TARGET):
        return None
    if config.dequantize is not False:
        return "the weights do not run as they are stored; use hqq:4:64,head=4"
    if config.split.enabled or config.tensor_parallel > 1:
        return "the weights are split over devices; use hqq:4:64,head=4"
    return f"{device} has no kernel for it yet; use --device cpu" if device.startswith("cuda") else None
