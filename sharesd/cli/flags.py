"""Flags of model, drafting, devices, memory and sampling, made of dataclass fields.

tyro would slow down starts and show second names.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from functools import cache, partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sharesd.cli import parse_types
from sharesd.cli.console import warn
from sharesd.cli.parse_types import number, shown, whole
from sharesd.cli.parser import OnOffAction, Parser
from sharesd.cli.user_text import require_utf8
from sharesd.config import DType, EngineConfig, OffloadConfig, PipelineConfig, TargetQuant
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import DrafterSpec, Flag, Need
from sharesd.field_types import DefaultLimit
from sharesd.sampling_params import SamplingParams


def add_flags(group: argparse._ActionsContainer, options: type, flags: Mapping[str, Flag] | None = None) -> None:
    """Add flags of a dataclass, with its defaults, types and choices.

    A flag whose field is None by default is absent from the parsed arguments unless it is given.
    """
    types, known = _types(options), {field.name: field for field in fields(options)}
    for name, flag in (flags_of(options) if flags is None else flags).items():
        default = known[name].default if flag.none is None else flag.none
        given: dict[str, Any] = {"dest": flag.dest or name, "help": flag.help}
        given["default"] = argparse.SUPPRESS if default is None or flag.is_absent else default
        if bool in (types[name], *get_args(types[name])):
            group.add_argument(_name(name, flag), action="store_true" if default is False else OnOffAction, **given)
            continue
        if get_origin(types[name]) is Literal and flag.parse is None:
            given["choices"] = get_args(types[name])
        else:
            given["type"] = _reader(types[name], flag)
        action = "append" if flag.is_list else "store"
        group.add_argument(_name(name, flag), action=action, metavar=flag.metavar, **given)


def flags_of(options: type) -> dict[str, Flag]:
    return {field.name: field.metadata["flag"] for field in fields(options) if "flag" in field.metadata}


def values_of(args: argparse.Namespace, options: type, flags: Mapping[str, Flag] | None = None) -> dict[str, Any]:
    """Return fields that differ from their defaults; repeatable flags are tuples."""
    found: dict[str, Any] = {}
    known: dict[str, Field[Any]] = {field.name: field for field in fields(options)}
    for name, flag in (flags_of(options) if flags is None else flags).items():
        value = getattr(args, flag.dest or name, None)
        if value is not None and value not in (flag.none, known[name].default):
            found[name] = tuple(value) if flag.is_list else value
    return found


def shown_flags(args: argparse.Namespace, options: type) -> list[str]:
    """Return the names of given flags, except those set to `empty`."""
    flags, given = flags_of(options), values_of(args, options)
    return [_name(name, flags[name]) for name, value in given.items() if value != "empty"]


@cache
def _types(options: type) -> dict[str, Any]:
    return get_type_hints(options)


def _name(field: str, flag: Flag) -> str:
    return flag.name or f"--{field.replace('_', '-')}"


def _reader(kind: Any, flag: Flag) -> Callable[[str], Any]:
    """Return the flag's own parser, else one by the field's type."""
    kinds = (kind, *get_args(kind))
    return shown(flag.parse) if flag.parse is not None else whole if int in kinds else number if float in kinds else str


DEFAULTS = EngineConfig()


def _modes_needing(need: Need) -> str:
    return registry.choices(selection.needing(need))


MODEL = {
    "target": Flag(
        "checkpoint folder, .gguf file or hub id of the target model (default: the embedded SmolLM2-135M-Instruct)",
        metavar="MODEL",
    ),
    "lora": Flag("folder of a LoRA adapter as PEFT saves it, merged into the target when it is loaded", metavar="DIR"),
    "dtype": Flag(f"{', '.join(get_args(DType))}, or {', '.join(parse_types.DTYPES)}", parse=parse_types.dtype),
    "kv_dtype": Flag(
        "type of the KV cache: the model's dtype (auto), or 8 bits (q8), which takes about half of 16 bits; texts may "
        "then differ"
    ),
    "max_context": Flag(
        "tokens of prompt and answer that the KV cache holds for each sequence; auto: the model's own length, or what "
        "fits in half of the free memory",
        metavar="N",
        parse=parse_types.whole_or_auto,
    ),
    "compile": Flag("how steps are compiled"),
    "kernels": Flag(
        "torch: torch's kernels (slower); triton: our GPU kernels; streams: also ours for drafts of one row in 4 bits; "
        "auto: ours where they run"
    ),
    "exact": Flag(
        "same bits for a row in all modes; --no-batch-invariant: faster steps, but texts may differ",
        name="--batch-invariant",
    ),
    "trust_remote_code": Flag("run modelling code from the checkpoint"),
    "revision": Flag("branch, tag or commit of the target's hub id (default: its main branch)", metavar="NAME"),
    "dequantize": Flag(
        "expand the weights of a .gguf file or quantized folder to 16 bits; --no-dequantize: run them as they are "
        "stored (default: as stored, where supported)"
    ),
    "target_quant": Flag(
        "quantize the target's plain weights to this type of .gguf blocks while they are loaded, which changes them: "
        + ", ".join(get_args(TargetQuant)),
        metavar="TYPE",
    ),
    "activations": Flag(
        "inputs of linears whose weights run as they are stored: rounded to 16 bits (exact) or 8 bits (fast), per 32 "
        "numbers"
    ),
    "ignore_keys": Flag(
        "key of config.json, or key or tensor of a .gguf file, to load without, though it may change the answers "
        "(repeatable)",
        metavar="NAME",
        name="--ignore-key",
        is_list=True,
        is_absent=True,
    ),
}
DRAFTING = {
    "draft": Flag(
        f"second model of mode {_modes_needing(Need.SECOND_MODEL)}, with the same tokenizer, or `small`: the one "
        "shipped with the embedded model (default: a quantized copy of the target)",
        metavar="MODEL",
        name="--draft-model",
    ),
    "heads": Flag(
        "trained head, once for each mode, or as NAME=HEAD to add a mode NAME, so that several can be compared: "
        + ", ".join(f"{spec.name} ({spec.source})" for spec in registry.specs("head") if spec.source)
        + " (default: the one shipped with the embedded model, if there is one)",
        metavar="HEAD",
        name="--draft-head",
        is_list=True,
        is_absent=True,
    ),
    "head_quant": Flag(
        "METHOD:BITS:GROUP[,PROJECTION=BITS...] of the head's linears, e.g. hqq:8:64 or hqq:4:64,head=4 (default: full "
        "precision; with stored weights on a CPU hqq:8:64,head=8)",
        metavar="SPEC",
        parse=str,
    ),
    "quant": Flag(
        "METHOD:BITS:GROUP[,PROJECTION=BITS...][,experts=N][,calibrated] of what drafts in "
        f"{_modes_needing(Need.QUANTIZED_TARGET)} and, without --draft-model, in {_modes_needing(Need.SECOND_MODEL)}; "
        f"auto: what `sharesd tune` found best, or calibrated (default: {DEFAULTS.quant.spec}; nested on "
        "Q8_0 as stored, stored,experts=N on mixtures as stored; as the plan says if offloaded)",
        metavar="SPEC",
        name="--draft-quant",
        parse=str,
        is_absent=True,
    ),
    "num_draft": Flag(
        "draft tokens per round; auto: chosen for each round, 0 included",
        metavar="K",
        name="--num-speculative-tokens",
        parse=parse_types.whole_or_auto,
        none="auto",
    ),
    "max_draft": Flag(
        "maximum draft tokens per round, where their number is chosen "
        f"(default: {DEFAULTS.max_draft}; as the plan says if offloaded)",
        metavar="K",
        name="--max-speculative-tokens",
        is_absent=True,
    ),
    "tree": Flag(
        "models draft trees: the K likeliest nodes of each level have K children each, and of all the BUDGET likeliest "
        "are verified; where the number of draft tokens is chosen, chains and smaller trees are used where they are "
        "faster. auto: the same on a CPU with up to --max-speculative-tokens; off: only chains (default: auto)",
        metavar="K:DEPTH:BUDGET",
        parse=parse_types.tree,
        is_absent=True,
    ),
    "hybrid_with": Flag(
        f"drafters of mode hybrid: any of {', '.join(registry.names('model', 'self', 'head', 'table'))} (default: "
        "eagle,suffix where there is a head of eagle, on a CPU with share where it pays, else mtp,suffix where the "
        "checkpoint has such a layer, else share,suffix; with weights that run as stored suffix,recycle)",
        metavar="NAMES",
        name="--hybrid-drafters",
        parse=parse_types.distinct_names,
        is_absent=True,
    ),
}
DRAFTER_MODULES = {
    "drafter_modules": Flag(
        "file or importable module with your own drafter, whose name becomes a mode (repeatable)",
        metavar="FILE",
        name="--drafter-module",
        is_list=True,
        is_absent=True,
    )
}
DEVICE = {
    "device": Flag("cpu, cuda, cuda:N, or auto: cuda where there is one"),
    "threads": Flag(
        "CPU threads per step; auto: one per core, fewer while other programs use cores",
        metavar="N",
        parse=parse_types.whole_or_auto,
        none="auto",
    ),
}
STAGES = {
    "devices": Flag(
        "devices that hold the blocks, in order, e.g. cuda:0,cuda:1, for models too large for one",
        metavar="NAMES",
        parse=parse_types.names,
        is_absent=True,
    ),
    "device_map": Flag(
        "instead of --devices: auto (all GPUs), or a JSON file of modules and devices in accelerate's format",
        metavar="MAP",
    ),
    "max_memory": Flag(
        "memory to use on each GPU, e.g. 0=10GB,1=20GB; others are not used (default: free memory)",
        metavar="SIZES",
        parse=parse_types.sizes_of_gpus,
        is_absent=True,
    ),
}
SHARING = {
    "draft_device": Flag(
        f"device of the second model of mode {_modes_needing(Need.SECOND_MODEL)} (default: that of the target's head)",
        metavar="DEVICE",
    ),
    "tensor_parallel": Flag(
        "split every linear and the attention heads over N processes, each on its own device (on a CPU with a part of "
        "the cores), started here or by torchrun; texts stay the same",
        metavar="N",
    ),
    "tensor_parallel_style": Flag(
        "`gather` splits no sums; `reduce` needs half the exchanges, but texts depend on the number of processes"
    ),
    "steady_cublas": Flag(
        "on a GPU, keep cuBLAS from splitting sums, which allows more step widths",
        name="--cublas-no-split-k",
    ),
}
OFFLOAD = {
    "when": Flag(
        "auto: offload weights if the model does not fit; plan-only: print the plan and exit",
        name="--offload",
        dest="offload",
    ),
    "device_memory": Flag(
        f"GPU memory to use, e.g. 8G; {parse_types.SIZES} (default: free memory)",
        metavar="SIZE",
        name="--gpu-memory-limit",
        parse=parse_types.size,
    ),
    "host_memory": Flag(
        "host memory to use (default: free memory)",
        metavar="SIZE",
        name="--cpu-memory-limit",
        parse=parse_types.size,
    ),
    "folder": Flag(
        "folder of blocks offloaded to disk (default: in the cache folder)",
        metavar="DIR",
        name="--offload-dir",
        dest="offload_dir",
    ),
}
TRACE = {
    "trace": Flag(
        "append a line per round to this file: drafter, draft tokens, accepted and emitted tokens, times",
        metavar="FILE",
    )
}
ENGINE = MODEL | DRAFTING | DRAFTER_MODULES | DEVICE | SHARING | TRACE


def add_trace_option(parser: argparse._ActionsContainer) -> None:
    add_flags(parser, EngineConfig, TRACE)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser.add_argument_group("model"), EngineConfig, MODEL)
    group = parser.add_argument_group("drafting")
    add_flags(group, EngineConfig, DRAFTING)
    group.add_argument(
        "--quant-skip",
        action="append",
        default=[],
        metavar="SKIP",
        help="keep these at full precision: layers=0,29 or proj=down (repeatable)",
    )
    _add_drafters(parser)
    group = parser.add_argument_group("devices")
    add_flags(group, EngineConfig, DEVICE)
    add_flags(group, PipelineConfig, STAGES)
    add_flags(group, EngineConfig, SHARING)
    add_flags(parser.add_argument_group("models larger than memory"), OffloadConfig, OFFLOAD)


def _add_drafters(parser: argparse.ArgumentParser) -> None:
    """Add `--drafter-module` and the options of all drafters, named modules included."""
    group = parser.add_argument_group("options of drafters")
    add_flags(group, EngineConfig, DRAFTER_MODULES)
    shown: set[str] = set()
    add = partial(_add_options_of, group, shown)
    add(registry.specs())
    if isinstance(parser, Parser):
        parser.before_parsing.append(partial(_load_named, add))


def _load_named(add: Callable[[Iterable[DrafterSpec]], None], args: Sequence[str]) -> None:
    flag = "--drafter-module"
    modules = [value for name, value in itertools.pairwise(args) if name == flag]
    modules += [arg.partition("=")[2] for arg in args if arg.startswith(f"{flag}=")]
    registry.load_modules(modules)
    add(registry.specs())


def _add_options_of(group: argparse._ArgumentGroup, shown: set[str], specs: Iterable[DrafterSpec]) -> None:
    for spec in specs:
        if spec.name not in shown:
            add_flags(group, spec.options)
            shown.add(spec.name)


SAMPLING = {
    "temperature": Flag(
        "0: greedy; above 0: sample, logits are divided by it (default: 0)", metavar="T", is_absent=True
    ),
    "top_p": Flag("keep the likeliest tokens whose total probability reaches P", metavar="P"),
    "top_k": Flag("keep the K likeliest tokens; 0 = all", metavar="K"),
    "min_p": Flag("keep tokens at least P times as likely as the likeliest", metavar="P"),
    "seed": Flag("random seed: equal seeds give equal texts in all modes; each of several prompts has its own noise"),
    "repetition_penalty": Flag("1 = none", metavar="X"),
    "presence_penalty": Flag("0 = none", metavar="X"),
    "frequency_penalty": Flag("0 = none", metavar="X"),
    "acceptance": Flag("match: the same text as naive decoding; rejection, block: only the same distribution"),
    "stop": Flag("end before this text (repeatable)", metavar="TEXT", is_list=True, is_absent=True),
    "max_new_tokens": Flag("maximum tokens per answer", metavar="N"),
}


def add_sampling_options(parser: argparse.ArgumentParser, *, max_new_tokens: int = 128) -> None:
    group = parser.add_argument_group("sampling")
    add_flags(group, SamplingParams, SAMPLING)
    group.add_argument("--do-sample", action="store_true", help=argparse.SUPPRESS)  # temperature 1, if none is given
    parser.set_defaults(max_new_tokens=DefaultLimit(max_new_tokens))


def sampling_params(args: argparse.Namespace, *, warns: bool = True) -> SamplingParams:
    """Return sampling flags as parameters; ValueError if they contradict each other.

    `warns`: call `warn_of_idle_noise`, which may have to wait until the format of a file is known.
    """
    given = values_of(args, SamplingParams, SAMPLING)
    if args.do_sample and getattr(args, "temperature", None) == 0:
        raise ValueError("--do-sample and --temperature 0 contradict each other; drop one")
    for text in given.get("stop", ()):
        require_utf8(text, "--stop")
    given["max_new_tokens"] = args.max_new_tokens  # its type tells whether it was given
    given["temperature"] = getattr(args, "temperature", 1.0 if args.do_sample else 0.0)
    if warns:
        warn_of_idle_noise(args)
    return SamplingParams(**given)


def warn_of_idle_noise(args: argparse.Namespace) -> None:
    """Warn of options of sampling without effect on greedy decoding."""
    given = values_of(args, SamplingParams, SAMPLING)
    noise = [name for name in ("top_p", "top_k", "min_p", "seed") if name in given]
    if noise and getattr(args, "temperature", 1.0 if args.do_sample else 0.0) == 0:
        idle = ", ".join(f"--{name.replace('_', '-')}" for name in noise)
        warn(f"no effect on greedy decoding: {idle}; --temperature 1 samples")
