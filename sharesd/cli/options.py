"""From flags to the dataclasses: modes, and the engine's config. The flags that programs share are named here too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from quant.config import QuantConfig
from sharesd.cli.console import main_guard, warn
from sharesd.cli.model_options import DEFAULTS, add_model_options
from sharesd.cli.parse_types import whole
from sharesd.cli.parser import Parser, parse
from sharesd.cli.sampling_options import add_sampling_options, sampling_params
from sharesd.config import (
    HEADS,
    MODEL_DRAFTERS,
    MODES,
    TABLES,
    EngineConfig,
    Mode,
    OffloadConfig,
    SplitConfig,
    mode_of_head,
)

__all__ = [
    "Parser",
    "add_mode_option",
    "add_model_options",
    "add_replicas_option",
    "add_sampling_options",
    "check_launched",
    "engine_config",
    "main_guard",
    "mode_of",
    "modes_of",
    "modes_of_heads",
    "parse",
    "sampling_params",
]

MODE_ALIASES = {"sd-classic": "classic", "sd-share": "share"}
"""Second names of modes, which no help shows."""
MIXING = ("hybrid", "auto")
"""Modes that choose among drafters (`EngineConfig.drafters_of`)."""


def add_mode_option(parser: argparse._ActionsContainer, *, several: bool) -> None:
    """`--mode`: one mode, or (`several`) a list, all by default. Read it with `modes_of`."""
    names = ", ".join(MODES)
    if several:
        parser.add_argument(
            "--mode",
            action="append",
            default=argparse.SUPPRESS,
            help=f"{names} or all (those of heads where there is one); repeatable, or with commas (default: all)",
        )
    else:
        parser.add_argument("--mode", default=argparse.SUPPRESS, help=f"{names} (default: {DEFAULTS.mode})")


def add_replicas_option(parser: argparse._ActionsContainer) -> None:
    """`--replicas`: None where this process does all of the work."""
    parser.add_argument(
        "--replicas",
        type=whole,
        metavar="N",
        help="processes that share the prompts, each with a GPU of its own, or with its part of the CPU's cores",
    )


def check_launched(args: argparse.Namespace, world: int) -> None:
    """ValueError where `world` processes of a launcher, which share prompts, shall start others besides."""
    ranks = args.tensor_parallel if args.tensor_parallel > 1 else None
    for flag, size in (("--replicas", args.replicas), ("--tensor-parallel", ranks)):
        if world > 1 and size is not None:
            raise ValueError(f"{flag} is {size} and a launcher has started {world} processes; take one of two")
    for name in ("devices", "device_map", "max_memory"):
        if world > 1 and hasattr(args, name):
            raise ValueError(
                f"a launcher has started {world} processes, which have one device each; drop --{name.replace('_', '-')}"
            )


def modes_of(args: argparse.Namespace, *, default: Sequence[str]) -> tuple[Mode, ...]:
    """The modes asked for, each once, in the order of first mention; ValueError for an unknown one.

    `all` are those of `default`, of trained heads those that are given or come with the embedded model.
    """
    given, fitting = getattr(args, "mode", None), _modes_with_heads(args)
    offered: list[Mode] = [mode for mode in default if mode not in HEADS or mode in fitting]  # type: ignore[misc]
    if given is None:
        return tuple(offered)
    modes: list[Mode] = []
    for name in [part.strip() for text in ([given] if isinstance(given, str) else given) for part in text.split(",")]:
        plain = MODE_ALIASES.get(name, name)
        if plain != "all" and plain not in MODES:
            raise ValueError(f"mode is {name!r}; choose one of {', '.join(MODES)}")
        modes += offered if plain == "all" else [plain]  # type: ignore[list-item]
    return tuple(dict.fromkeys(modes))


def modes_of_heads(args: argparse.Namespace) -> set[Mode]:
    """The modes that given heads draft in."""
    return {mode_of_head(head) for head in getattr(args, "head", ())}


def _modes_with_heads(args: argparse.Namespace) -> set[str]:
    """The same, and those whose head comes with the embedded model; ranks that share linears take given ones alone."""
    config = EngineConfig(target=getattr(args, "target", None))
    shipped = set() if getattr(args, "tensor_parallel", 1) > 1 else {mode for mode in HEADS if config.head_of(mode)}
    return {*modes_of_heads(args), *shipped}


def mode_of(args: argparse.Namespace) -> Mode:
    """The one mode asked for."""
    modes = modes_of(args, default=MODES) if hasattr(args, "mode") else (DEFAULTS.mode,)
    if len(modes) != 1:
        raise ValueError(f"--mode is {args.mode!r}; give one mode")
    return modes[0]  # type: ignore[return-value]


def engine_config(args: argparse.Namespace, *, modes: Sequence[Mode]) -> EngineConfig:
    """The model options as a config; its mode is the last of `modes`.

    A flag that none of the modes has a use for is a warning. ValueError where what was asked for would not be done: a
    drafter that no mode has, or things that do not fit together.
    """
    draft, heads = getattr(args, "draft", None), tuple(getattr(args, "head", ()))
    known = EngineConfig(
        target=getattr(args, "target", None),
        heads=heads,
        tensor_parallel=args.tensor_parallel,
        hybrid_with=tuple(dict.fromkeys(name.strip() for name in args.hybrid_with.split(",") if name)),
    )
    known = replace(known, auto_drafters=known.hybrid_with)
    drafting = {*modes, *known.drafters_of(*modes)}
    if "auto" in modes and not known.hybrid_with:  # any of them, as long as nothing is chosen
        drafting |= {*MODEL_DRAFTERS, *TABLES} - ({"classic"} if draft is None else set())
    if draft is not None and "classic" not in drafting:
        raise ValueError(f"--draft-model is {draft!r} but no mode is classic; add --mode classic or drop --draft-model")
    if heads and not {*HEADS} & drafting:
        raise ValueError(
            f"--draft-head is {heads[0]!r} but no mode is {' or '.join(HEADS)}; add --mode eagle or drop --draft-head"
        )
    idle = next((head for head in heads if known.target is None and mode_of_head(head) not in drafting), None)
    if idle is not None:  # other heads come with the embedded model, and would draft in its place
        fits = mode_of_head(idle)
        raise ValueError(
            f"--draft-head is {idle!r}, of mode {fits}, and no mode is {fits}; add --mode {fits} or drop --draft-head"
        )
    _warn_of_idle(args, drafting, {*modes})
    models = bool({*MODEL_DRAFTERS} & drafting)
    tree = getattr(args, "tree", DEFAULTS.tree) if models else DEFAULTS.tree
    head_quant = QuantConfig.parse(args.head_quant) if hasattr(args, "head_quant") else None
    draft_device = getattr(args, "draft_device", None) if "classic" in drafting else None
    replicas = getattr(args, "replicas", None)
    if replicas is not None and args.tensor_parallel > 1:
        raise ValueError(f"--replicas is {replicas} and --tensor-parallel {args.tensor_parallel}; drop one of the two")
    split = SplitConfig(
        devices=getattr(args, "devices", ()),
        device_map=getattr(args, "device_map", None),
        max_memory=getattr(args, "max_memory", ()),
    )
    if replicas is not None and split.wanted:
        raise ValueError(
            f"--replicas is {replicas}, which have one device each, and there are stages; drop one of them"
        )
    quant = getattr(args, "quant", None)
    auto = quant == "auto"
    max_draft = getattr(args, "max_draft", None)
    if auto and args.quant_skip:
        raise ValueError(
            f"--draft-quant auto chooses what to skip, and --quant-skip is {args.quant_skip[0]!r}; drop one of the two"
        )
    config = EngineConfig(
        target=getattr(args, "target", None),
        mode="classic" if draft is not None and modes[-1] != "auto" else modes[-1],
        draft=draft,
        heads=heads,
        head_quant=head_quant if {*HEADS} & drafting else None,
        num_draft=None if args.num_draft == "auto" else args.num_draft,
        max_draft=DEFAULTS.max_draft if max_draft is None else max_draft,
        draft_window=args.draft_window,
        tree=tree,
        hybrid_with=known.hybrid_with,
        auto_drafters=known.auto_drafters,
        ngram_min=args.ngram_min,
        ngram_max=args.ngram_max,
        ngram_recent=args.ngram_recent,
        corpus=getattr(args, "corpus", None),
        recycle_table=getattr(args, "recycle_table", None),
        dtype=args.dtype,
        device=args.device,
        split=split,
        draft_device=draft_device,
        tensor_parallel=args.tensor_parallel,
        tensor_parallel_style=args.tensor_parallel_style,
        quant=DEFAULTS.quant if auto else QuantConfig.parse(quant or DEFAULTS.quant.spec, args.quant_skip),
        compile=args.compile,
        exact=args.exact,
        kernels=args.kernels,
        steady_cublas=args.steady_cublas,
        threads=None if args.threads == "auto" else args.threads,
        max_context=args.max_context,
        trust_remote_code=args.trust_remote_code,
        offload=OffloadConfig(
            when=args.offload,
            device_memory=getattr(args, "device_memory", None),
            host_memory=getattr(args, "host_memory", None),
            folder=getattr(args, "offload_dir", None),
            choose_bits=quant is None,
            choose_depth=max_draft is None,
            choose_trees=getattr(args, "acceptance", "match") == "match",
        ),
    )
    if auto:
        from sharesd.weights.quant_tuning_cache import best_quant  # torch takes seconds, mistakes should not

        config = replace(config, quant=best_quant(config))
    return config


def _warn_of_idle(args: argparse.Namespace, drafting: set[str], modes: set[str]) -> None:
    """A line for the flags that were given and that nothing which drafts has a use for."""
    tables = {name: getattr(args, name, "empty") not in ("empty", None) for name in ("corpus", "recycle_table")}
    ngram = (DEFAULTS.ngram_min, DEFAULTS.ngram_max, DEFAULTS.ngram_recent)
    quantized = ("share",) if hasattr(args, "draft") else ("share", "classic")
    drafters = tuple(mode for mode in MODES if mode not in ("naive", *MIXING))
    flags: dict[str, tuple[bool, Sequence[str]]] = {
        "--num-speculative-tokens": (args.num_draft != "auto", drafters),
        "--max-speculative-tokens": (hasattr(args, "max_draft"), () if args.num_draft != "auto" else drafters),
        "--tree": (getattr(args, "tree", DEFAULTS.tree) != DEFAULTS.tree, MODEL_DRAFTERS),
        "--draft-window": (args.draft_window != DEFAULTS.draft_window, ("share",)),
        "--draft-quant": (hasattr(args, "quant"), quantized),
        "--quant-skip": (bool(args.quant_skip), quantized),
        "--head-quant": (hasattr(args, "head_quant"), HEADS),
        "--draft-device": (hasattr(args, "draft_device"), ("classic",)),
        "--ngram-min, --ngram-max, --ngram-recent": (
            (args.ngram_min, args.ngram_max, args.ngram_recent) != ngram,
            ("ngram",),
        ),
        "--corpus": (tables["corpus"], ("suffix",)),
        "--recycle-table": (tables["recycle_table"], ("recycle",)),
        "--hybrid-drafters": (bool(args.hybrid_with), MIXING),
    }
    for flag, (given, users) in flags.items():
        if given and not {*users} & (modes if users is MIXING else drafting):
            shown = [mode for mode in users if mode in MODES]
            reason = f"no mode is {' or '.join(shown)}" if shown else "--num-speculative-tokens says how many"
            warn(f"{flag}: no effect, {'only naive decodes' if users is drafters else reason}")
