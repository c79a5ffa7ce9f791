"""Flags of sampling, and their values as `SamplingParams`."""

from __future__ import annotations

import argparse

from sharesd.cli.console import warn
from sharesd.cli.options_from_dataclass import add_flags, values_of
from sharesd.cli.utf8 import require_utf8
from sharesd.drafters.registry import Flag
from sharesd.field_types import DefaultLimit
from sharesd.sampling_params import SamplingParams

SAMPLING = {
    "temperature": Flag(
        "0: greedy; above 0: sample, logits are divided by it (default: 0)", metavar="T", is_absent=True
    ),
    "top_p": Flag("likeliest tokens whose probability reaches P", metavar="P"),
    "top_k": Flag("K likeliest tokens; 0 = all", metavar="K"),
    "min_p": Flag("tokens at least P times as likely as the first", metavar="P"),
    "seed": Flag(
        "seed of the noise: equal seeds give equal texts, in all modes; each of several prompts has its own noise"
    ),
    "repetition_penalty": Flag("1 = none", metavar="X"),
    "presence_penalty": Flag("0 = none", metavar="X"),
    "frequency_penalty": Flag("0 = none", metavar="X"),
    "acceptance": Flag("match: the text of naive decoding; rejection, block: only its distribution"),
    "stop": Flag("end before this text (repeatable)", metavar="TEXT", is_list=True, is_absent=True),
    "max_new_tokens": Flag("tokens per answer at most", metavar="N"),
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
        raise ValueError("--do-sample and --temperature 0 contradict each other; drop one of the two")
    for text in given.get("stop", ()):
        require_utf8(text, "--stop")
    given["max_new_tokens"] = args.max_new_tokens  # of the type that tells whether it was given
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
