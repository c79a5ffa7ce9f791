"""The flags of `serve`, each checked as it is read."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from benchmark.arguments import add_out_dir, number

BASE_URL = "http://127.0.0.1:8000"
RANDOM, QUESTIONS = "random", "questions"
NAIVE = "naive"
LATENCIES = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
LIMITED = ("ttft", "tpot", "e2el")
"""What --goodput can limit."""


def add_server(group: Any) -> None:
    group.add_argument("--base-url", metavar="URL", help=f"of a running server (default: {BASE_URL})")
    group.add_argument(
        "--spawn",
        metavar="MODES",
        help="start our own server in mode naive and in each of these, with commas, and compare; its own flags go "
        "behind --, such as -- --max-batch 8",
    )
    group.add_argument(
        "--turns",
        type=number,
        default=1,
        metavar="N",
        help="have all servers of --spawn there at once and ask them in turns, N times each, with other prompts each "
        "time: what a busy machine does to one of them it does to all; shown are medians",
    )
    group.add_argument(
        "--exact",
        type=number,
        metavar="N",
        help="instead of measuring, N loads of --num-prompts requests of all kinds, each in an order of its own, with "
        "clients that hang up: their texts must be those that mode naive gives to each request alone (needs --spawn)",
    )
    group.add_argument("server_flags", nargs="*", metavar="-- FLAGS", help="of the server that --spawn starts")
    group.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="what is asked")
    group.add_argument("--model", metavar="ID", help="model to ask (default: the first that the server names)")
    group.add_argument(
        "--header",
        type=_header,
        action="append",
        default=[],
        metavar="K=V",
        help="sent with each request (OPENAI_API_KEY of the environment is sent as a bearer token)",
    )
    group.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="seconds for a whole answer")
    group.add_argument(
        "--num-warmups", type=_count, default=1, metavar="N", help="requests before each load, one by one, not measured"
    )
    group.add_argument(
        "--request-rate", type=_rate, metavar="R", help="requests per second; inf: all at once (default: inf)"
    )
    group.add_argument(
        "--sweep", type=_rates, metavar="RATES", help="several rates in turn, such as 1,2,4,inf, and a plot"
    )
    group.add_argument(
        "--burstiness",
        type=_rate,
        default=1.0,
        metavar="B",
        help="shape of the gaps between requests: 1 is Poisson, less comes in bursts, inf is even",
    )
    group.add_argument(
        "--max-concurrency", type=number, metavar="N", help="at most N requests under way; others wait here"
    )


def add_workload(group: Any) -> None:
    group.add_argument(
        "--dataset",
        default=RANDOM,
        metavar=f"{RANDOM}|{QUESTIONS}|FILE",
        help="random words (chat) or token ids (completions); questions; or a JSON Lines file with `prompt`",
    )
    group.add_argument(
        "--questions", metavar="FILE", help="--dataset questions: in MT-Bench's layout (default: ShareSD's own)"
    )
    group.add_argument("--num-prompts", type=number, default=100, metavar="N", help="requests of a load")
    group.add_argument("--random-input-len", type=number, default=1024, metavar="N", help="tokens of a random prompt")
    group.add_argument("--random-output-len", type=number, default=128, metavar="N", help="tokens of its answer")
    group.add_argument(
        "--random-range-ratio",
        type=_share,
        default=0.0,
        metavar="R",
        help="lengths are uniform in [N * (1 - R), N * (1 + R)]",
    )
    group.add_argument("--output-len", type=number, default=128, metavar="N", help="tokens of other answers at most")
    group.add_argument("--vocab-size", type=number, metavar="N", help="random token ids are below N")
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="folder or hub id: for random token ids, and to count tokens where the server sends no usage",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of random prompts, departures and sampling")


def add_sampling(group: Any) -> None:
    group.add_argument("--temperature", type=_at_least_0, default=0.0, metavar="T", help="0 is greedy")
    for name, convert in SAMPLING.items():
        group.add_argument(f"--{name}", type=convert, metavar="X", help="not sent by default")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers have their full length (default: with --dataset random)",
    )
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields for every request"
    )


def add_results(group: Any) -> None:
    group.add_argument(
        "--goodput",
        type=_limit,
        nargs="+",
        default=[],
        metavar="KEY:MS",
        help=f"count answers within all of these limits, of {', '.join(LIMITED)}; such as ttft:500 tpot:50",
    )
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default="ttft,tpot,itl,e2el",
        metavar="LIST",
        help=f"of {', '.join(LATENCIES)}",
    )
    group.add_argument(
        "--metric-percentiles", type=_percentiles, default="90,99", metavar="LIST", help="which percentiles"
    )
    group.add_argument("--save-result", action="store_true", help="write files; --out-dir and --sweep do so, too")
    group.add_argument("--save-detailed", action="store_true", help="the same, with every answer in them")
    add_out_dir(group, "serve")


def _float(text: str, kind: str, *, least: float = 0.0, above: bool = False, infinite: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > least if above else value >= least) or (value == math.inf and not infinite):
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
    return value


def _finite(text: str) -> float:
    return _float(text, "a number", least=-math.inf, above=True)


def _rate(text: str) -> float:
    return _float(text, "a number above 0, or inf", above=True, infinite=True)


def _rates(text: str) -> tuple[float, ...]:
    return tuple(sorted(set(map(_rate, text.split(",")))))


def _positive(text: str) -> float:
    return _float(text, "a number above 0", above=True)


def _at_least_0(text: str) -> float:
    return _float(text, "a number from 0 on")


def _share(text: str) -> float:
    value = _float(text, "a number from 0 to below 1")
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _percentiles(text: str) -> tuple[float, ...]:
    found = tuple(sorted({_float(part, "a list of percentiles, such as 90,99") for part in text.split(",")}))
    if found[-1] > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of percentiles, such as 90,99")
    return found


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := next((name for name in names if name not in LATENCIES), None):
        raise argparse.ArgumentTypeError(f"{unknown!r} is none of {', '.join(LATENCIES)}")
    return names


def _limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in LIMITED:
        raise argparse.ArgumentTypeError(f"{text!r} limits none of {', '.join(LIMITED)}; write for example ttft:500")
    return name, _float(limit, f"a time in milliseconds, in {text!r}", above=True)


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not K=V")
    return name.strip(), value.strip()


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # NaN can be read, but not sent
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


SAMPLING: dict[str, Callable[[str], float]] = {
    "top-p": _finite,
    "top-k": int,
    "min-p": _finite,
    "frequency-penalty": _finite,
    "presence-penalty": _finite,
    "repetition-penalty": _finite,
}
"""Sent only where given: not every server knows all of them."""
