"""The options which `python -m sharesd` and `python -m benchmark` share, and the way from them to the dataclasses."""

from __future__ import annotations

import argparse
import importlib
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, get_args

from quant.config import QuantConfig
from sharesd.cli.console import main_guard
from sharesd.config import (
    HEADS,
    MODEL_DRAFTERS,
    MODES,
    TABLES,
    Acceptance,
    CompileMode,
    DType,
    EngineConfig,
    Mode,
    Offload,
    OffloadConfig,
    SamplingParams,
    SplitConfig,
    TensorParallelStyle,
    mode_of_head,
)

__all__ = [
    "Parser",
    "add_model_options",
    "add_mode_option",
    "add_replicas_option",
    "add_sampling_options",
    "check_launched",
    "engine_config",
    "main_guard",
    "mode_of",
    "modes_of_heads",
    "modes_of",
    "parse",
    "sampling_params",
]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Short names of dtypes."""
MODE_ALIASES = {"sd-classic": "classic", "sd-share": "share"}
"""Names that users of the original project type."""
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DEFAULTS = EngineConfig()


class Parser(argparse.ArgumentParser):
    """argparse, where flags are never abbreviated and a mistake costs one line on stderr and exit status 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        print(f"error: {' '.join(message.split())}; see `{self.prog} --help`", file=sys.stderr)
        sys.exit(2)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not those that say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        idle = action.default is None or action.default is False or action.default in ([], "")
        return action.help if idle else super()._get_help_string(action)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. A subcommand which sets the default `parser` to itself reports its own unknown flags."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        getattr(args, "parser", parser).error(f"unknown argument {unknown[0]!r}")
    return args


def run_command(prog: str, description: str, kind: str, modules: Sequence[str], argv: Sequence[str] | None) -> int:
    """A program of subcommands, one in each module; returns the exit status.

    Modules have `add_parser(subparsers)`, which sets the defaults `run` (args -> exit status) and `parser`.
    """
    parser = Parser(prog=prog, description=description)
    subparsers = parser.add_subparsers(metavar=kind, required=True)
    for name in modules:
        importlib.import_module(name).add_parser(subparsers)
    args = parse(parser, argv)
    return main_guard(lambda: args.run(args))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model, where and how it runs."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--target",
        "-llm",
        metavar="MODEL",
        help="checkpoint folder, .gguf file or hub id of the model that decides (default: the embedded "
        "SmolLM2-135M-Instruct)",
        default=argparse.SUPPRESS,
    )
    group.add_argument(
        "--draft",
        "-ssm",
        metavar="MODEL",
        help="second model of mode classic, with the same vocabulary, or `small`: the one that comes with the embedded "
        "model (default: a quantized copy of the target)",
        default=argparse.SUPPRESS,
    )
    group.add_argument(
        "--head",
        action="append",
        metavar="HEAD",
        help="trained head of mode eagle (a folder or hub id in a public layout of EAGLE, EAGLE-2 or EAGLE-3) or "
        "of parallel or glide (a folder that `python -m train parallel` or `glide` wrote; default: the one that comes "
        "with the embedded model, if there is one); once for each mode",
        default=argparse.SUPPRESS,
    )
    group.add_argument(
        "--head-quant",
        metavar="SPEC",
        help="METHOD:BITS:GROUP[,PROJECTION=BITS...] of the head's linears, e.g. hqq:8:64 or hqq:4:64,head=4 (default: "
        "full precision)",
        default=argparse.SUPPRESS,
    )
    group.add_argument(
        "--num-draft",
        type=_length,
        default="auto",
        metavar="K",
        help="draft tokens per round; auto: what pays best at the moment, 0 included",
    )
    group.add_argument(
        "--max-draft",
        type=_whole,
        default=argparse.SUPPRESS,
        metavar="K",
        help="draft tokens per round at most, with --num-draft auto "
        f"(default: {_DEFAULTS.max_draft}; as the plan says where weights travel)",
    )
    group.add_argument(
        "--tree",
        type=_tree,
        default=argparse.SUPPRESS,
        metavar="K:DEPTH:BUDGET",
        help="models draft trees: the K likeliest nodes of each level have K children each, and of all the BUDGET "
        "likeliest are verified; --num-draft auto takes chains and smaller trees where they pay more. auto: so do "
        "all on a CPU, with up to --max-draft tokens; off: chains alone (default: auto)",
    )
    group.add_argument(
        "--draft-window",
        type=_window,
        default=_DEFAULTS.draft_window,
        metavar="N",
        help="mode share: draft steps look at the last N tokens and the first few; auto: in long contexts; off: at all",
    )
    group.add_argument(
        "--with",
        dest="hybrid_with",
        default="",
        metavar="NAMES",
        help=f"what mode hybrid chooses from: one of {', '.join(MODEL_DRAFTERS)}, and any of {', '.join(TABLES)} "
        "(default: eagle,suffix where there is a head, else share,suffix)",
    )
    group.add_argument(
        "--ngram-min", type=_whole, default=_DEFAULTS.ngram_min, metavar="N", help="mode ngram: shortest match"
    )
    group.add_argument(
        "--ngram-max", type=_whole, default=_DEFAULTS.ngram_max, metavar="N", help="mode ngram: longest match"
    )
    group.add_argument("--ngram-recent", action="store_true", help="mode ngram: the most recent match, not the first")
    group.add_argument(
        "--corpus",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="mode suffix: datastore of texts to look into as well, or `empty` (`python -m train corpus` makes one; "
        "default: the one of the embedded model, for that model)",
    )
    group.add_argument(
        "--recycle-table",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="mode recycle: table to start from, or `empty` (default: the one of the embedded model, for that model)",
    )
    group.add_argument(
        "--quant",
        default=argparse.SUPPRESS,
        metavar="SPEC",
        help="METHOD:BITS:GROUP[,PROJECTION=BITS...] of drafts; auto: what `python -m benchmark calibrate` found best "
        f"(default: {_DEFAULTS.quant.spec}; as the plan says where weights travel)",
    )
    group.add_argument(
        "--quant-skip",
        action="append",
        default=[],
        metavar="SKIP",
        help="keep these at full precision: layers=0,29 or proj=down (repeatable)",
    )
    group.add_argument(
        "--dtype", type=_dtype, default=_DEFAULTS.dtype, help=f"{', '.join(get_args(DType))}, or {', '.join(DTYPES)}"
    )
    group.add_argument("--device", default=_DEFAULTS.device, help="cpu, cuda, cuda:N, or auto: cuda where there is one")
    group.add_argument(
        "--devices",
        type=_names,
        default=argparse.SUPPRESS,
        metavar="NAMES",
        help="devices with some of the blocks each, in order, e.g. cuda:0,cuda:1: for models that one does not hold",
    )
    group.add_argument(
        "--device-map",
        metavar="MAP",
        default=argparse.SUPPRESS,
        help="in place of --devices: auto (all GPUs), or a JSON file of modules and devices, as accelerate has them",
    )
    group.add_argument(
        "--max-memory",
        type=_memory,
        default=argparse.SUPPRESS,
        metavar="SIZES",
        help="what may be taken of each GPU, e.g. 0=10GB,1=20GB; others are not used (default: what is free)",
    )
    group.add_argument(
        "--draft-device",
        metavar="DEVICE",
        default=argparse.SUPPRESS,
        help="where the second model of mode classic is (default: where the target's head is)",
    )
    group.add_argument(
        "--tensor-parallel",
        type=_whole,
        default=_DEFAULTS.tensor_parallel,
        metavar="N",
        help="share every linear and the heads of attention among N processes, each with a device of its own (on a "
        "CPU with a part of the cores), started here or by torchrun; texts stay the same",
    )
    group.add_argument(
        "--tensor-parallel-style",
        choices=get_args(TensorParallelStyle),
        default=_DEFAULTS.tensor_parallel_style,
        help="`gather` splits no sum; `reduce` takes half the exchanges, and texts depend on the number of processes",
    )
    group.add_argument(
        "--compile", choices=get_args(CompileMode), default=_DEFAULTS.compile, help="how steps are compiled"
    )
    group.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS.exact,
        help="give a row the same bits in all modes; --no-exact takes the fastest steps, and texts may differ",
    )
    group.add_argument(
        "--steady-cublas",
        action="store_true",
        help="on a GPU, keep cuBLAS from splitting sums, so that steps may have any width more often",
    )
    group.add_argument(
        "--threads",
        type=_length,
        default="auto",
        metavar="N",
        help="CPU threads that share a step; auto: one per core, fewer while other programs keep cores busy",
    )
    group.add_argument(
        "--max-context",
        type=_length,
        default=_DEFAULTS.max_context,
        metavar="N",
        help="tokens of prompt and answer that the KV cache holds; auto: the model's own limit, or what half of the "
        "free memory holds",
    )
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run modelling code that a checkpoint brings along"
    )
    _add_offload_options(parser.add_argument_group("models larger than memory"))


def _add_offload_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--offload",
        choices=get_args(Offload),
        default=_DEFAULTS.offload.when,
        help="auto: weights come from elsewhere if the model does not fit; plan-only: print the plan, and load nothing",
    )
    group.add_argument(
        "--device-memory",
        type=_bytes,
        metavar="SIZE",
        default=argparse.SUPPRESS,
        help="what may be taken of a GPU's memory, for example 8GB or 8GiB (default: what is free)",
    )
    group.add_argument(
        "--host-memory",
        type=_bytes,
        metavar="SIZE",
        default=argparse.SUPPRESS,
        help="what may be taken of the host's memory (default: what is free)",
    )
    group.add_argument(
        "--offload-dir",
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="where blocks are kept that come from a disk (default: in the cache folder)",
    )


def add_mode_option(parser: argparse._ActionsContainer, *, several: bool) -> None:
    """`--mode`: one mode, or (`several`) a list, all by default. Read it with `modes_of`."""
    names = ", ".join((*MODES, *MODE_ALIASES))
    if several:
        parser.add_argument(
            "--mode",
            action="append",
            default=argparse.SUPPRESS,
            help=f"{names} or all (default); repeatable, or with commas",
        )
    else:
        parser.add_argument("--mode", default=argparse.SUPPRESS, help=f"{names} (default: auto)")


def add_replicas_option(parser: argparse._ActionsContainer) -> None:
    """`--replicas`: None where this process does all of the work."""
    parser.add_argument(
        "--replicas",
        type=_whole,
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


def add_sampling_options(parser: argparse.ArgumentParser, *, max_new_tokens: int = 128) -> None:
    """How tokens are chosen and where texts end."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--do-sample", action="store_true", help="sample; without it decoding is greedy")
    group.add_argument(
        "--temp",
        type=_number,
        default=argparse.SUPPRESS,
        metavar="T",
        help="temperature, with --do-sample (default: 1.0)",
    )
    group.add_argument(
        "--top-p", type=_number, default=1.0, metavar="P", help="likeliest tokens whose probability reaches P"
    )
    group.add_argument("--top-k", type=_whole, default=0, metavar="K", help="K likeliest tokens; 0 = all")
    group.add_argument(
        "--min-p", type=_number, default=0.0, metavar="P", help="tokens at least P times as likely as the first"
    )
    group.add_argument(
        "--seed",
        type=_whole,
        default=0,
        help="seed of the noise: equal seeds give equal texts, in all modes; each of several prompts has its own noise",
    )
    group.add_argument("--repetition-penalty", type=_number, default=1.0, metavar="X", help="1 = none")
    group.add_argument("--presence-penalty", type=_number, default=0.0, metavar="X", help="0 = none")
    group.add_argument("--frequency-penalty", type=_number, default=0.0, metavar="X", help="0 = none")
    group.add_argument(
        "--acceptance",
        choices=get_args(Acceptance),
        default="match",
        help="match: the text of naive decoding; rejection, block: only its distribution",
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument(
        "--max-new-tokens", type=_whole, default=max_new_tokens, metavar="N", help="tokens per answer at most"
    )


def modes_of(args: argparse.Namespace, *, default: Sequence[str]) -> tuple[Mode, ...]:
    """The modes asked for, each once, in the order of first mention; ValueError for an unknown one.

    `all` are those of `default`, of trained heads those that are given.
    """
    given, fitting = getattr(args, "mode", None), modes_of_heads(args)
    offered: list[Mode] = [mode for mode in default if mode not in HEADS or mode in fitting]  # type: ignore[misc]
    if given is None:
        return tuple(offered)
    modes: list[Mode] = []
    for name in [part.strip() for text in ([given] if isinstance(given, str) else given) for part in text.split(",")]:
        plain = MODE_ALIASES.get(name, name)
        if plain != "all" and plain not in MODES:
            raise ValueError(f"mode is {name!r}; choose one of {', '.join((*MODES, *MODE_ALIASES))}")
        modes += offered if plain == "all" else [plain]  # type: ignore[list-item]
    return tuple(dict.fromkeys(modes))


def modes_of_heads(args: argparse.Namespace) -> set[Mode]:
    """The modes that given heads draft in."""
    return {mode_of_head(head) for head in getattr(args, "head", ())}


def mode_of(args: argparse.Namespace) -> Mode:
    """The one mode asked for."""
    modes = modes_of(args, default=MODES) if hasattr(args, "mode") else ("auto",)
    if len(modes) != 1:
        raise ValueError(f"--mode is {args.mode!r}; give one mode")
    return modes[0]  # type: ignore[return-value]


def engine_config(args: argparse.Namespace, *, modes: Sequence[Mode], progress: bool = False) -> EngineConfig:
    """The model options as a config; its mode is the last of `modes`. ValueError for what does not fit together."""
    draft = getattr(args, "draft", None)
    heads, given = tuple(getattr(args, "head", ())), [name.strip() for name in args.hybrid_with.split(",") if name]
    known = EngineConfig(
        target=getattr(args, "target", None),
        heads=heads,
        tensor_parallel=args.tensor_parallel,
        hybrid_with=tuple(dict.fromkeys(given)),
    )
    drafting = {*modes, *known.drafters_of(*modes)}
    if "auto" in modes:  # takes what is given, or chooses
        drafting |= {*MODEL_DRAFTERS} - ({"classic"} if draft is None else set())
    if draft is not None and "classic" not in drafting:
        raise ValueError(f"--draft is {draft!r} but no mode is classic; add --mode classic or drop --draft")
    with_heads = bool({*HEADS} & drafting)
    if heads and not with_heads:
        raise ValueError(f"--head is {heads[0]!r} but no mode is {' or '.join(HEADS)}; add --mode eagle or drop --head")
    idle = next((head for head in heads if known.target is None and mode_of_head(head) not in drafting), None)
    if idle is not None:  # other heads come with the embedded model, and would draft in its place
        fits = mode_of_head(idle)
        raise ValueError(f"--head is {idle!r}, of mode {fits}, and no mode is {fits}; add --mode {fits} or drop --head")
    head_quant = getattr(args, "head_quant", None)
    if head_quant is not None and not with_heads:
        raise ValueError(f"--head-quant is {head_quant!r} and no head is given; add --head or drop --head-quant")
    tree = getattr(args, "tree", _DEFAULTS.tree)
    if tree != _DEFAULTS.tree and not {*MODEL_DRAFTERS, "hybrid", "auto"} & set(modes):
        raise ValueError("--tree is for drafts of a model, and no mode has one; add --mode share or drop --tree")
    if args.draft_window != "auto" and "share" not in drafting:
        raise ValueError(
            f"--draft-window is {args.draft_window} and belongs to mode share; add --mode share (or hybrid --with "
            "share,suffix), or drop --draft-window"
        )
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
    draft_device = getattr(args, "draft_device", None)
    if draft_device is not None and "classic" not in drafting:
        raise ValueError(f"--draft-device is {draft_device!r} but no mode is classic; add --mode classic or drop it")
    quant = getattr(args, "quant", None)
    auto = quant == "auto"
    max_draft = getattr(args, "max_draft", None)
    if auto and args.quant_skip:
        raise ValueError(
            f"--quant auto chooses what to skip, and --quant-skip is {args.quant_skip[0]!r}; drop one of the two"
        )
    config = EngineConfig(
        target=getattr(args, "target", None),
        mode="classic" if draft is not None and modes[-1] != "auto" else modes[-1],
        draft=draft,
        heads=heads,
        head_quant=None if head_quant is None else QuantConfig.parse(head_quant),
        num_draft=None if args.num_draft == "auto" else args.num_draft,
        max_draft=_DEFAULTS.max_draft if max_draft is None else max_draft,
        draft_window=args.draft_window,
        tree=tree,
        hybrid_with=known.hybrid_with,
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
        quant=_DEFAULTS.quant if auto else QuantConfig.parse(quant or _DEFAULTS.quant.spec, args.quant_skip),
        compile=args.compile,
        exact=args.exact,
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
        progress=progress,
    )
    if auto:
        from sharesd.settings import best_quant  # torch takes seconds, mistakes should not

        config = replace(config, quant=best_quant(config))
    return config


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling options as parameters; ValueError where an option would have no effect."""
    temperature = getattr(args, "temp", None)
    if not args.do_sample:
        idle = {
            "--temp": temperature is not None,
            "--top-p": args.top_p != 1,
            "--top-k": args.top_k != 0,
            "--min-p": args.min_p != 0,
        }
        flag = next((flag for flag, given in idle.items() if given), None)
        if flag:
            raise ValueError(f"{flag} has no effect on greedy decoding; add --do-sample or drop {flag}")
    elif temperature == 0:
        raise ValueError("--do-sample with --temp 0 contradict each other; drop --do-sample or raise --temp")
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=(1.0 if temperature is None else temperature) if args.do_sample else 0.0,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        acceptance=args.acceptance,
    )


def _checked(convert: Callable[[str], float], text: str, kind: str) -> float:
    try:
        value = convert(text)
        finite = math.isfinite(value)
    except (ValueError, OverflowError):
        finite = False
    if not finite:
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
    return value


def _whole(text: str) -> int:
    return int(_checked(int, text, "a whole number"))


def _length(text: str) -> int | str:
    return text if text == "auto" else _whole(text)


def _window(text: str) -> int | str:
    return text if text in ("auto", "off") else _whole(text)


def _tree(text: str) -> str | tuple[int, ...]:
    if text in ("auto", "off"):
        return text
    parts = text.split(":")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not K:DEPTH:BUDGET, auto or off; for example 2:4:8")
    return tuple(map(_whole, parts))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _memory(text: str) -> tuple[tuple[int, int], ...]:
    sizes: dict[int, int] = {}
    for part in text.split(","):
        number, _, size = part.strip().partition("=")
        if not number.isdecimal() or int(number) in sizes:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of GPUs and sizes; write for example 0=10GB,1=20GB")
        sizes[int(number)] = _bytes(size)
    return tuple(sizes.items())


def _bytes(text: str) -> int:
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT]i?B)", text)
    if not parts:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 8GB or 8GiB")
    return int(float(parts[1]) * _UNITS[parts[2]])


def _number(text: str) -> float:
    return _checked(float, text, "a number")


def _dtype(text: str) -> str:
    name = DTYPES.get(text, text)
    if name not in get_args(DType):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join((*get_args(DType), *DTYPES))}")
    return name
