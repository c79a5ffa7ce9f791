"""Flags of the model: which one, what drafts, where it runs, and what memory it may take."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from sharesd.cli import parse_types
from sharesd.config import (
    MODEL_DRAFTERS,
    TABLES,
    CompileMode,
    DType,
    EngineConfig,
    Kernels,
    Offload,
    TensorParallelStyle,
)

DEFAULTS = EngineConfig()
"""Where flags take their defaults from."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add all of them, in groups. `options.engine_config` reads them."""
    _add_model(parser.add_argument_group("model"))
    _add_drafting(parser.add_argument_group("drafting"))
    _add_tables(parser.add_argument_group("tables"))
    _add_devices(parser.add_argument_group("devices"))
    _add_offload(parser.add_argument_group("models larger than memory"))


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--target",
        metavar="MODEL",
        help="checkpoint folder, .gguf file or hub id of the model that decides (default: the embedded "
        "SmolLM2-135M-Instruct)",
        default=argparse.SUPPRESS,
    )
    group.add_argument(
        "--dtype",
        type=parse_types.dtype,
        default=DEFAULTS.dtype,
        help=f"{', '.join(get_args(DType))}, or {', '.join(parse_types.DTYPES)}",
    )
    group.add_argument(
        "--max-context",
        type=parse_types.whole_or_auto,
        default=DEFAULTS.max_context,
        metavar="N",
        help="tokens of prompt and answer that the KV cache holds for each sequence; auto: the model's own length, or "
        "what half of the free memory holds",
    )
    group.add_argument(
        "--compile", choices=get_args(CompileMode), default=DEFAULTS.compile, help="how steps are compiled"
    )
    group.add_argument(
        "--kernels",
        choices=get_args(Kernels),
        default=DEFAULTS.kernels,
        help="on a GPU: triton (ours) or torch (cuBLAS, SDPA, gemlite); auto: ours where they run",
    )
    group.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS.exact,
        help="give a row the same bits in all modes; --no-exact takes the fastest steps, and texts may differ",
    )
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run modelling code that a checkpoint brings along"
    )


def _add_drafting(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--draft-model",
        dest="draft",
        metavar="MODEL",
        help="second model of mode classic, with the same vocabulary, or `small`: the one that comes with the embedded "
        "model (default: a quantized copy of the target)",
        default=argparse.SUPPRESS,
    )
    group.add_argument(
        "--draft-head",
        dest="head",
        action="append",
        metavar="HEAD",
        help="trained head of mode eagle (a folder or hub id in a public layout of EAGLE, EAGLE-2 or EAGLE-3) or of "
        "parallel or glide (a folder that `sharesd train parallel` or `glide` wrote); once for each mode (default: the "
        "one that comes with the embedded model, if there is one)",
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
        "--draft-quant",
        dest="quant",
        default=argparse.SUPPRESS,
        metavar="SPEC",
        help="METHOD:BITS:GROUP[,PROJECTION=BITS...] of what drafts in share and, without --draft-model, in classic; "
        f"auto: what `sharesd tune` found best (default: {DEFAULTS.quant.spec}; as the plan says where weights travel)",
    )
    group.add_argument(
        "--quant-skip",
        action="append",
        default=[],
        metavar="SKIP",
        help="keep these at full precision: layers=0,29 or proj=down (repeatable)",
    )
    group.add_argument(
        "--num-speculative-tokens",
        dest="num_draft",
        type=parse_types.whole_or_auto,
        default="auto",
        metavar="K",
        help="draft tokens per round; auto: what pays best at the moment, 0 included",
    )
    group.add_argument(
        "--max-speculative-tokens",
        dest="max_draft",
        type=parse_types.whole,
        default=argparse.SUPPRESS,
        metavar="K",
        help="draft tokens per round at most, where their number is chosen "
        f"(default: {DEFAULTS.max_draft}; as the plan says where weights travel)",
    )
    group.add_argument(
        "--tree",
        type=parse_types.tree,
        default=argparse.SUPPRESS,
        metavar="K:DEPTH:BUDGET",
        help="models draft trees: the K likeliest nodes of each level have K children each, and of all the BUDGET "
        "likeliest are verified; where the number of draft tokens is chosen, chains and smaller trees are taken where "
        "they pay more. auto: the same on a CPU with up to --max-speculative-tokens; off: chains alone (default: auto)",
    )
    group.add_argument(
        "--draft-window",
        type=parse_types.window,
        default=DEFAULTS.draft_window,
        metavar="N",
        help="mode share: draft steps look at the last N tokens and the first few; auto: in long contexts; off: at all",
    )
    group.add_argument(
        "--hybrid-drafters",
        dest="hybrid_with",
        default="",
        metavar="NAMES",
        help=f"what mode hybrid chooses from: one of {', '.join(MODEL_DRAFTERS)}, and any of {', '.join(TABLES)} "
        "(default: eagle,suffix where there is a head of eagle, else share,suffix)",
    )


def _add_tables(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ngram-min",
        type=parse_types.whole,
        default=DEFAULTS.ngram_min,
        metavar="N",
        help="mode ngram: shortest match",
    )
    group.add_argument(
        "--ngram-max",
        type=parse_types.whole,
        default=DEFAULTS.ngram_max,
        metavar="N",
        help="mode ngram: longest match",
    )
    group.add_argument("--ngram-recent", action="store_true", help="mode ngram: the most recent match, not the first")
    group.add_argument(
        "--corpus",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="mode suffix: datastore of texts to look into as well, or `empty` (`sharesd train corpus` makes one; "
        "default: the one of the embedded model, for that model)",
    )
    group.add_argument(
        "--recycle-table",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="mode recycle: table to start from, or `empty` (default: the one of the embedded model, for that model)",
    )


def _add_devices(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", default=DEFAULTS.device, help="cpu, cuda, cuda:N, or auto: cuda where there is one")
    group.add_argument(
        "--threads",
        type=parse_types.whole_or_auto,
        default="auto",
        metavar="N",
        help="CPU threads that share a step; auto: one per core, fewer while other programs keep cores busy",
    )
    group.add_argument(
        "--devices",
        type=parse_types.names,
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
        type=parse_types.sizes_of_gpus,
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
        type=parse_types.whole,
        default=DEFAULTS.tensor_parallel,
        metavar="N",
        help="share every linear and the heads of attention among N processes, each with a device of its own (on a "
        "CPU with a part of the cores), started here or by torchrun; texts stay the same",
    )
    group.add_argument(
        "--tensor-parallel-style",
        choices=get_args(TensorParallelStyle),
        default=DEFAULTS.tensor_parallel_style,
        help="`gather` splits no sum; `reduce` takes half the exchanges, and texts depend on the number of processes",
    )
    group.add_argument(
        "--steady-cublas",
        action="store_true",
        help="on a GPU, keep cuBLAS from splitting sums, so that steps may have any width more often",
    )


def _add_offload(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--offload",
        choices=get_args(Offload),
        default=DEFAULTS.offload.when,
        help="auto: weights come from elsewhere if the model does not fit; plan-only: print the plan, and load nothing",
    )
    limit: dict[str, Any] = {"type": parse_types.size, "metavar": "SIZE", "default": argparse.SUPPRESS}
    group.add_argument(
        "--gpu-memory-limit",
        dest="device_memory",
        help=f"what may be taken of a GPU's memory, for example 8G; {parse_types.SIZES} (default: what is free)",
        **limit,
    )
    group.add_argument(
        "--cpu-memory-limit",
        dest="host_memory",
        help="what may be taken of the host's memory (default: what is free)",
        **limit,
    )
    group.add_argument(
        "--offload-dir",
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="where blocks are kept that come from a disk (default: in the cache folder)",
    )
