"""Modes and engine config from parsed flags that several programs share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from multigpu.ray_cluster import require_ray
from quant.config import QuantConfig
from sharesd.cli.console import main_guard, warn
from sharesd.cli.flags import (
    DEFAULTS,
    ENGINE,
    OFFLOAD,
    STAGES,
    add_model_options,
    add_sampling_options,
    add_trace_option,
    sampling_params,
    shown_flags,
    values_of,
)
from sharesd.cli.parse_types import whole
from sharesd.cli.parser import Parser, parse
from sharesd.config import EngineConfig, Mode, OffloadConfig, PipelineConfig
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import Need, Support
from sharesd.startup import option_values
from sharesd.startup.conflicts import check, option_conflicts

__all__ = [
    "Parser",
    "add_mode_option",
    "add_model_options",
    "add_replicas_option",
    "add_request_options",
    "add_sampling_options",
    "add_trace_option",
    "check_launched",
    "engine_config",
    "main_guard",
    "mode_of",
    "modes_of",
    "modes_of_heads",
    "parse",
    "request_settings",
    "sampling_params",
]


def add_mode_option(parser: argparse._ActionsContainer, *, several: bool) -> None:
    """Add `--mode`, as a list (by default all modes) if `several`."""
    names = ", ".join(registry.modes())
    if several:
        parser.add_argument(
            "--mode",
            action="append",
            default=argparse.SUPPRESS,
            help=f"{names} or all (those of heads only with a head); repeatable, or comma-separated (default: all)",
        )
    else:
        parser.add_argument("--mode", default=argparse.SUPPRESS, help=f"{names} (default: {DEFAULTS.mode})")


def add_replicas_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--replicas",
        type=whole,
        metavar="N",
        help="processes that share the prompts, each on its own GPU or its part of the CPU cores",
    )


REQUEST_FLAGS = {
    "model_name": "--served-model-name",
    "aliases": "--model-alias",
    "tool_format": "--tool-format",
    "reasoning_format": "--reasoning-format",
}
"""Field of the server's settings -> flag."""


def add_request_options(group: argparse._ActionsContainer) -> None:
    """Add options of API requests, which come over HTTP or from a file."""
    group.add_argument(
        "--served-model-name",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="name of the model in requests (default: the name of its folder, file or repository)",
    )
    group.add_argument(
        "--model-alias",
        action="append",
        default=[],
        metavar="NAME",
        help="further name of the model in requests (repeatable)",
    )
    group.add_argument(
        "--tool-format",
        choices=("hermes", "llama", "mistral"),
        help="format of the model's function calls (default: from its chat template)",
    )
    group.add_argument(
        "--reasoning-format",
        choices=("auto", "none"),
        default="auto",
        help="reasoning of models that think: separate, as reasoning_content (auto), or left in the content (none)",
    )


def request_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of requests that are given, as fields of the server's settings."""
    found = {
        "model_name": getattr(args, "served_model_name", None),
        "aliases": tuple(dict.fromkeys(args.model_alias)),
        "tool_format": args.tool_format,
        "reasoning_format": None if args.reasoning_format == "auto" else args.reasoning_format,
    }
    return {name: value for name, value in found.items() if value}


def check_launched(args: argparse.Namespace, world: int) -> None:
    """Raise ValueError for options of processes or devices that a launcher excludes."""
    shared = {"tensor_parallel": args.tensor_parallel, "split": _pipeline_config(args)}
    config = EngineConfig(mode=registry.NAIVE, trace=getattr(args, "trace", None), **shared)
    check(option_conflicts(config, replicas=args.replicas, launched=world))


def _pipeline_config(args: argparse.Namespace) -> PipelineConfig:
    return PipelineConfig(**values_of(args, PipelineConfig, STAGES))


def modes_of(args: argparse.Namespace, *, default: Sequence[str]) -> tuple[Mode, ...]:
    """Return the modes given by `--mode`, each once, in given order.

    `all`, the default, has modes with a trained head only if one is given or shipped. ValueError for an unknown mode.
    """
    given, fitting = getattr(args, "mode", None), _modes_with_heads(args)
    offered = [mode for mode in default if mode not in registry.names("head") or mode in fitting]
    if given is None:
        return tuple(offered)
    modes: list[Mode] = []
    for name in [part.strip() for text in ([given] if isinstance(given, str) else given) for part in text.split(",")]:
        plain = registry.mode_named(name)
        if plain != "all" and plain not in registry.modes():
            raise ValueError(f"mode is {name!r}; choose one of {', '.join(registry.modes())}")
        modes += offered if plain == "all" else [plain]
    return tuple(dict.fromkeys(modes))


def modes_of_heads(args: argparse.Namespace) -> set[Mode]:
    return {selection.head_mode(head) for head in getattr(args, "heads", ())}


def _modes_with_heads(args: argparse.Namespace) -> set[str]:
    """Return modes with a given head, or shipped one without tensor parallelism."""
    config = EngineConfig(target=getattr(args, "target", None))
    alone = getattr(args, "tensor_parallel", 1) > 1
    shipped = set() if alone else {mode for mode in registry.names("head") if selection.head_of(config, mode)}
    return {*modes_of_heads(args), *shipped}


def mode_of(args: argparse.Namespace) -> Mode:
    """Return the given mode or the default; ValueError for several."""
    modes = modes_of(args, default=registry.modes()) if hasattr(args, "mode") else (DEFAULTS.mode,)
    if len(modes) != 1:
        raise ValueError(f"--mode is {args.mode!r}; give one mode")
    return modes[0]


def engine_config(args: argparse.Namespace, *, modes: Sequence[Mode]) -> EngineConfig:
    """Return the config of the last mode, or the first with `--draft-model`.

    Flags without effect log a warning. ValueError for an unused drafter or values that do not fit together.
    """
    draft, heads = getattr(args, "draft", None), tuple(getattr(args, "heads", ()))
    known = EngineConfig(
        target=getattr(args, "target", None),
        heads=heads,
        tensor_parallel=args.tensor_parallel,
        hybrid_with=getattr(args, "hybrid_with", ()),
        drafter_modules=tuple(getattr(args, "drafter_modules", ())),
    )
    known = replace(known, auto_drafters=known.hybrid_with)
    drafting = {*modes, *selection.active_drafters(known, *modes)}
    mixes, with_second, head_modes = (
        registry.names("mix"),
        selection.needing(Need.SECOND_MODEL),
        registry.trained_heads(),
    )
    if any(mode in mixes and not selection.active_drafters(known, mode) for mode in modes):  # chosen while loading
        drafting |= {*registry.names()} - {*mixes, *(with_second if draft is None else ())}
    if draft is not None and not drafting.intersection(with_second):
        users = registry.choices(with_second)
        raise ValueError(
            f"--draft-model is {draft!r} but no mode is {users}; add --mode {with_second[0]} or drop --draft-model"
        )
    if heads and not drafting.intersection(head_modes):
        raise ValueError(
            f"--draft-head is {heads[0]!r} but no mode is {' or '.join(head_modes)}; add --mode {head_modes[0]} or "
            "drop --draft-head"
        )
    unused = (head for head in heads if known.target is None and selection.head_mode(head) not in drafting)
    idle = next(unused, None)
    if idle is not None:  # a head shipped with the embedded model would draft instead
        fits = selection.head_mode(idle)
        raise ValueError(
            f"--draft-head is {idle!r}, of mode {fits}, but no mode is {fits}; add --mode {fits} or drop --draft-head"
        )
    _warn_of_idle(args, drafting, {*modes})
    quant, given = getattr(args, "quant", None), values_of(args, EngineConfig, ENGINE)
    for spec in registry.specs():
        given |= values_of(args, spec.options)
    if not drafting.intersection(registry.names("self", "model", "head")):
        given.pop("tree", None)
    if not drafting.intersection(with_second):
        given.pop("draft_device", None)
    if "head_quant" in given:
        head_quant = QuantConfig.parse(given.pop("head_quant"))
        given |= {"head_quant": head_quant} if drafting.intersection(head_modes) else {}
    if quant != "auto":
        given["quant"] = QuantConfig.parse(quant or DEFAULTS.quant.spec, args.quant_skip)
    given["auto_drafters"], given["split"] = known.auto_drafters, _pipeline_config(args)
    given["offload"] = OffloadConfig(
        **values_of(args, OffloadConfig, OFFLOAD),
        choose_bits=quant in (None, "auto"),
        choose_depth=not hasattr(args, "max_draft"),
        choose_trees=getattr(args, "acceptance", "match") == "match",
    )
    return option_values.engine_config(
        given,
        modes=modes[::-1],
        replicas=getattr(args, "replicas", None),
        quant_skip=tuple(args.quant_skip) if quant == "auto" else (),
    )


def _warn_of_idle(args: argparse.Namespace, drafting: set[str], modes: set[str]) -> None:
    second = selection.needing(Need.SECOND_MODEL)
    quantized = (*selection.needing(Need.QUANTIZED_TARGET), *(() if hasattr(args, "draft") else second))
    mixes, heads = registry.names("mix"), registry.trained_heads()
    drafters = tuple(spec.name for spec in registry.specs() if spec.kind != "mix")
    trees = tuple(spec.name for spec in registry.specs() if spec.is_model and Support.TREES in spec.supports)
    flags: dict[str, tuple[bool, Sequence[str]]] = {
        "--num-speculative-tokens": (args.num_draft != "auto", drafters),
        "--max-speculative-tokens": (hasattr(args, "max_draft"), () if args.num_draft != "auto" else drafters),
        "--tree": (getattr(args, "tree", DEFAULTS.tree) != DEFAULTS.tree, trees),
        "--draft-quant": (hasattr(args, "quant"), quantized),
        "--quant-skip": (bool(args.quant_skip), quantized),
        "--head-quant": (hasattr(args, "head_quant"), heads),
        "--draft-device": (hasattr(args, "draft_device"), second),
        "--hybrid-drafters": (hasattr(args, "hybrid_with"), mixes),
    }
    for spec in registry.specs():
        named = shown_flags(args, spec.options)
        if named:
            flags[", ".join(named)] = (True, (spec.name,))
    for flag, (is_given, users) in flags.items():
        if is_given and not {*users} & (modes if users == mixes else drafting):
            reason = f"no mode is {' or '.join(users)}" if users else "--num-speculative-tokens sets the number"
            warn(f"{flag}: no effect, {'the only mode is naive' if users == drafters else reason}")


def check_ray(config: EngineConfig, library: str) -> None:
    """Raise ValueError for options that replicas exclude, and if Ray is missing."""
    excluded = {
        "--prompt-cache": config.prompt_cache is not None,
        "--tensor-parallel": config.tensor_parallel > 1,
        "--devices": config.split.enabled,
    }
    given = [flag for flag, is_given in excluded.items() if is_given]
    if given:
        raise ValueError(f"{given[0]} is not supported with --ray; drop one or the other")
    if config.device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"--device is {config.device}, but Ray assigns GPUs to replicas; use cuda, or drop --ray")
    require_ray(library)
