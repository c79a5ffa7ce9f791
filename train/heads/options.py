"""Options of head training, and their checks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from sharesd.cli.parse_types import DTYPES

if TYPE_CHECKING:
    from sharesd.speculation.cost_model import Costs


def add_options(parser: argparse.ArgumentParser, kind: str) -> None:
    group = parser.add_argument_group("input and output")
    group.add_argument("--data", required=True, metavar="DIR", help="answers of the target, as `generate` wrote them")
    group.add_argument("--out-dir", required=True, metavar="DIR", help="folder of heads (last, best), log and curves")
    group.add_argument(
        "--target", metavar="MODEL", help="checkpoint of the target (default: the one that wrote the answers)"
    )
    group.add_argument("--resume", action="store_true", help="resume the training in --out-dir, if there is one")
    group.add_argument("--dry-run", action="store_true", help="run a few steps, print the plan, and write nothing")
    group = parser.add_argument_group("data")
    group.add_argument("--max-length", type=int, default=1024, metavar="N", help="tokens per row; longer texts are cut")
    group.add_argument(
        "--held-out", type=float, default=0.05, metavar="SHARE", help="share of prompts held out for evaluation"
    )
    group.add_argument("--seed", type=int, default=0, help="seed of the order of texts")
    group.add_argument(
        "--states",
        metavar="DIR",
        help="cache the target's hidden states here, so that it reads each text only once (default: once per epoch)",
    )
    if kind == "draft":
        _add_decoder_options(parser.add_argument_group("decoder"))
    else:
        _add_head_options(parser.add_argument_group("head"), kind)
    group = parser.add_argument_group("training")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="N", help="optimizer steps")
    length.add_argument("--epochs", type=int, default=10, metavar="N", help="passes over the data")
    group.add_argument("--batch", type=int, default=4, metavar="N", help="rows per step, of all processes together")
    group.add_argument("--lr", type=float, default=3e-4, help="highest learning rate")
    group.add_argument(
        "--warmup", type=float, default=0.05, metavar="SHARE", help="share of steps in which the learning rate rises"
    )
    group.add_argument("--clip", type=float, default=0.5, metavar="NORM", help="maximum norm of gradients")
    group.add_argument("--weight-decay", type=float, default=0.0)
    group.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="muon: for matrices between embedding and LM head (Jordan et al. 2024), with AdamW for the rest",
    )
    if kind != "draft":
        _add_chain_options(group, kind)
    group.add_argument(
        "--kl-weight", type=float, default=1.0, help="weight of the divergence from the target's distribution"
    )
    group.add_argument(
        "--rejection-weight",
        type=float,
        default=0.0,
        help="weight of the probability that a sampled draft token is rejected",
    )
    group.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="precision of matrix products in training"
    )
    group = parser.add_argument_group("measuring")
    group.add_argument("--check-every", type=int, default=100, metavar="N", help="steps between checkpoints")
    group.add_argument("--chain", type=int, default=5, metavar="K", help="draft tokens per chain in evaluations")
    group.add_argument(
        "--costs",
        metavar="C,V",
        help="costs of a draft step and of verifying a chain of K, in plain steps (default: measured by the engine)",
    )
    group = parser.add_argument_group("machine")
    group.add_argument("--dtype", default="auto", help=f"dtype of target and head: auto (bf16), {', '.join(DTYPES)}")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:N, or auto: cuda if available")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per core)")


def _add_head_options(group: Any, kind: str) -> None:
    group.add_argument(
        "--init",
        metavar="DIR",
        help="start from this trained head, with its draft tokens and taps, e.g. to train on more answers (default: "
        + ("a linear map" if kind == "eagle" else "the target's last block")
        + (")" if kind != "parallel" else "); an eagle3 head also works"),
    )
    group.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="the head drafts only the N most frequent tokens of the answers, with its own LM head or, for eagle "
        "and glide, rows of the target's",
    )
    if kind == "parallel":
        group.add_argument("--layers", type=int, default=1, metavar="N", help="blocks of the head, 1 or 2")
    if kind == "glide":
        group.add_argument(
            "--target-layers",
            metavar="N,N",
            help="layers of the target whose keys and values the head reads, from 0 (default: the last)",
        )
    elif kind != "eagle":
        group.add_argument(
            "--taps",
            metavar="N,N,N",
            help="numbers of blocks after which the head reads hidden states (default: 2, half, all but 3)",
        )


def _add_decoder_options(group: Any) -> None:
    group.add_argument(
        "--layers", type=int, default=3, metavar="N", help="blocks, initialised from as many of the target's"
    )
    group.add_argument("--hidden-size", type=int, metavar="N", help="default: half of the target's, a multiple of 64")


def _add_chain_options(group: Any, kind: str) -> None:
    group.add_argument(
        "--unroll",
        default="3",
        metavar="N,N",
        help="tokens that one pass drafts; several numbers are used one after the other, for equal shares of training"
        if kind == "parallel"
        else "chain steps to train; several numbers are used one after the other, for equal shares of training",
    )
    if kind == "parallel":
        group.add_argument(
            "--anchors",
            type=float,
            default=0.25,
            metavar="SHARE",
            help="share of positions after which masks are trained",
        )
    group.add_argument(
        "--decay", type=float, default=0.8, help="weight of each step or token relative to the one before"
    )
    group.add_argument("--feature-weight", type=float, help="weight of the distance from the target's hidden states")


def check_options(args: argparse.Namespace, world: int) -> None:
    """Raise ValueError for numbers that are out of range for `world` processes."""
    for name in ("max_length", "batch", "chain", "check_every", "epochs", "steps", "threads", "draft_vocab"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if args.batch % world:
        raise ValueError(f"--batch is {args.batch} but {world} processes share its rows; give a multiple of {world}")
    for name in ("lr", "clip", "decay"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be above 0")
    if not 0 < getattr(args, "anchors", 1.0) <= 1:
        raise ValueError(f"--anchors is {args.anchors}; give a share above 0, at most 1")
    for name in ("draft_vocab", "taps", "target_layers", "layers"):
        value = getattr(args, name, None)
        if getattr(args, "init", None) is not None and value != args.parser.get_default(name):
            given = f"--{name.replace('_', '-')} {value}"
            raise ValueError(f"{given} has no effect with --init, whose head has its own; drop one or the other")
    for name in ("held_out", "warmup"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give a share from 0 up to 1")
    weights = {name: getattr(args, name) for name in ("kl_weight", "feature_weight", "rejection_weight")}
    if min(weights.values()) < 0 or not any(weights.values()):
        given = ", ".join(f"--{name.replace('_', '-')} {weight}" for name, weight in weights.items())
        raise ValueError(f"the loss weights are {given}; none may be below 0, and at least one must be above")
    if DTYPES.get(args.dtype, args.dtype) not in ("auto", *DTYPES.values()):
        raise ValueError(f"--dtype is {args.dtype!r}; give auto or one of {', '.join(DTYPES)}")


def costs_of(args: argparse.Namespace) -> Costs | None:
    """Return the costs that `--costs` gives; None without it."""
    if args.costs is None:
        return None
    from sharesd.speculation.cost_model import Costs, DraftCost
    from sharesd.speculation.draft_tree import DraftKind

    try:
        draft, verify = map(float, args.costs.split(","))
    except ValueError:
        raise ValueError(f"--costs is {args.costs!r}; give two numbers, for example 0.1,1.5") from None
    if not (draft > 0 and verify > 0):
        raise ValueError(f"--costs is {args.costs!r}; both must be above 0")
    drafts = {DraftKind("", False): DraftCost(draft, single_pass=args.kind == "parallel")}
    return Costs(step={1: 1.0, 1 + args.chain: verify}, drafts=drafts)


def numbers_of(args: argparse.Namespace, name: str, example: str) -> tuple[int, ...]:
    """Return the numbers of an option, written `1,2,3`; () without it."""
    given = getattr(args, name, None)
    try:
        return tuple(map(int, given.split(","))) if given else ()
    except ValueError:
        raise ValueError(f"--{name.replace('_', '-')} is {given!r}; give numbers, for example {example}") from None
