"""Flags of sampling, and the way from them to `SamplingParams`."""

from __future__ import annotations

import argparse
from typing import get_args

from sharesd.cli.console import warn
from sharesd.cli.parse_types import number, whole
from sharesd.config import Acceptance, SamplingParams


def add_sampling_options(parser: argparse.ArgumentParser, *, max_new_tokens: int = 128) -> None:
    """Add the flags that say how tokens are chosen and where texts end."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature",
        type=number,
        default=argparse.SUPPRESS,
        metavar="T",
        help="0: greedy; above 0: sample, logits are divided by it (default: 0)",
    )
    group.add_argument("--do-sample", action="store_true", help=argparse.SUPPRESS)  # temperature 1, if none is given
    group.add_argument(
        "--top-p",
        type=number,
        default=1.0,
        metavar="P",
        help="likeliest tokens whose probability reaches P",
    )
    group.add_argument("--top-k", type=whole, default=0, metavar="K", help="K likeliest tokens; 0 = all")
    group.add_argument(
        "--min-p",
        type=number,
        default=0.0,
        metavar="P",
        help="tokens at least P times as likely as the first",
    )
    group.add_argument(
        "--seed",
        type=whole,
        default=0,
        help="seed of the noise: equal seeds give equal texts, in all modes; each of several prompts has its own noise",
    )
    group.add_argument("--repetition-penalty", type=number, default=1.0, metavar="X", help="1 = none")
    group.add_argument("--presence-penalty", type=number, default=0.0, metavar="X", help="0 = none")
    group.add_argument("--frequency-penalty", type=number, default=0.0, metavar="X", help="0 = none")
    group.add_argument(
        "--acceptance",
        choices=get_args(Acceptance),
        default="match",
        help="match: the text of naive decoding; rejection, block: only its distribution",
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument(
        "--max-new-tokens",
        type=whole,
        default=max_new_tokens,
        metavar="N",
        help="tokens per answer at most",
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling options as parameters; a warning for those that greedy decoding has no use for.

    ValueError where `--do-sample` and `--temperature 0` contradict each other.
    """
    given = getattr(args, "temperature", None)
    if args.do_sample and given == 0:
        raise ValueError("--do-sample and --temperature 0 contradict each other; drop one of the two")
    temperature = (1.0 if args.do_sample else 0.0) if given is None else given
    noise = {"--top-p": args.top_p != 1, "--top-k": args.top_k, "--min-p": args.min_p, "--seed": args.seed}
    idle = [flag for flag, value in noise.items() if value] if temperature == 0 else []
    if idle:
        warn(f"no effect on greedy decoding: {', '.join(idle)}; --temperature 1 samples")
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=temperature,
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
