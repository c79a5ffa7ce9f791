"""Options of `serve`, most of them named as in `vllm bench serve`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from benchmark.arguments import add_out_dir, number

BASE_URL = "http://127.0.0.1:8000"
RANDOM, QUESTIONS = "random", "questions"
LIMITED = ("ttft", "tpot", "e2el")  # latencies that --goodput can limit
Convert = Callable[[str], float]


class _Flag(NamedTuple):
    name: str
    convert: Any
    """Function of a text; None: the text itself."""
    default: Any
    metavar: str
    text: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    positive: Convert = lambda text: _float(text, "a number above 0", above=True)  # noqa: E731
    finite: Convert = lambda text: _float(text, "a number", minimum=-math.inf, above=True)  # noqa: E731
    not_negative: Convert = lambda text: _float(text, "a number from 0 on")  # noqa: E731
    share: Convert = lambda text: _float(text, "a number from 0 to below 1", below=1.0)  # noqa: E731
    from_zero: Convert = partial(number, minimum=0)
    spawn = "start our own server in mode naive and in each of these, with commas, and compare; its options follow "
    spawn += "--, such as -- --max-batch 8"
    turns = "ask N times, with other prompts each time; all servers of --spawn run at once and are asked in turns; "
    exact = "instead of measuring, N loads of --num-prompts requests of all kinds, each in its own order, with "
    exact += "clients that hang up: texts must be those of mode naive for each request alone (needs --spawn)"
    sweep, limits = "several rates in turn, such as 1,2,4,inf, and a plot", ", ".join(LIMITED)
    bursts = "shape of the gaps between requests: 1 is Poisson, less comes in bursts, inf is even"
    groups: dict[str, list[_Flag]] = {
        "server": [
            _Flag("--base-url", None, None, "URL", f"a running server (default: {BASE_URL})"),
            _Flag("--spawn", None, None, "MODES", spawn),
            _Flag("--turns", number, 1, "N", f"{turns}medians and ranges are shown"),
            _Flag("--exact", number, None, "N", exact),
            _Flag("--model", None, None, "ID", "model to ask (default: the first that the server lists)"),
            _Flag("--timeout", positive, 600.0, "S", "seconds for a whole answer"),
            _Flag("--num-warmups", from_zero, 1, "N", "requests before each load, one by one and not measured"),
        ],
        "load": [
            _Flag("--request-rate", _rate, None, "R", "requests per second; inf: all at once (default: inf)"),
            _Flag("--sweep", _rates, None, "RATES", sweep),
            _Flag("--burstiness", _rate, 1.0, "B", bursts),
            _Flag("--max-concurrency", number, None, "N", "at most N requests at a time"),
            _Flag(
                "--dataset",
                None,
                RANDOM,
                f"{RANDOM}|{QUESTIONS}|FILE",
                "random words; questions; or JSON Lines with `prompt`, or ShareGPT",
            ),
            _Flag("--questions", None, None, "FILE", "in MT-Bench's layout (default: ShareSD's own)"),
            _Flag("--num-prompts", number, 100, "N", "requests of a load"),
            _Flag("--random-input-len", number, 1024, "N", "words of a random prompt"),
            _Flag("--random-output-len", number, 128, "N", "tokens of its answer"),
            _Flag("--random-range-ratio", share, 0.0, "R", "lengths are uniform in [N (1 - R), N (1 + R)]"),
            _Flag("--output-len", number, 128, "N", "tokens of other answers at most"),
            _Flag("--seed", int, 0, "N", "seed of random prompts, departures and sampling"),
        ],
        "sampling": [
            _Flag("--temperature", not_negative, 0.0, "T", "0 is greedy"),
            _Flag("--top-p", finite, None, "X", "not sent by default"),
            _Flag("--top-k", int, None, "X", "not sent by default"),
            _Flag("--min-p", finite, None, "X", "not sent by default"),
            _Flag("--extra-body", _json_object, {}, "JSON", "more fields for every request"),
        ],
        "results": [
            _Flag("--metric-percentiles", _percentiles, "90,99", "LIST", "percentiles of latencies"),
        ],
    }
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        for flag in options:
            kind, default = flag.convert or str, flag.default
            group.add_argument(flag.name, type=kind, default=default, metavar=flag.metavar, help=flag.text)
    group.add_argument("--save-result", action="store_true", help="write files; implied by --out-dir and --sweep")
    group.add_argument("--save-detailed", action="store_true", help="write files with every answer")
    text = f"count answers within all of these limits, of {limits}; such as ttft:500 tpot:50"
    group.add_argument("--goodput", type=_limit, nargs="+", default=[], metavar="KEY:MS", help=text)
    add_out_dir(group, "serve")
    group = parser.add_argument_group("requests")
    group.add_argument("server_flags", nargs="*", metavar="-- FLAGS", help="options of the server that --spawn starts")
    group.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="kind of requests")
    text = "sent with each request (OPENAI_API_KEY of the environment is sent as a bearer token)"
    group.add_argument("--header", type=_header, action="append", default=[], metavar="K=V", help=text)
    text = "generate answers of full length (default: with --dataset random)"
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, help=text)


def _float(text: str, kind: str, *, minimum: float = 0.0, above: bool = False, below: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > minimum if above else value >= minimum) or not value < below:
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
    return value


def _rate(text: str) -> float:
    return math.inf if text.lower() in ("inf", "infinity") else _float(text, "a number above 0, or inf", above=True)


def _rates(text: str) -> tuple[float, ...]:
    return tuple(sorted(set(map(_rate, text.split(",")))))


def _percentiles(text: str) -> tuple[float, ...]:
    found = tuple(sorted({_float(part, "a list of percentiles, such as 90,99") for part in text.split(",")}))
    if found[-1] > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of percentiles, such as 90,99")
    return found


def _limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in LIMITED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a limit on {', '.join(LIMITED)}, e.g. ttft:500")
    return name, _float(limit, f"a time in milliseconds, in {text!r}", above=True)


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not K=V")
    return name.strip(), value.strip()


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # naN can be read, but not sent
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
