"""The subcommand `serve`: flags, what is asked, measuring, files."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark import arguments
from benchmark.arguments import markdown_table, rich_table
from benchmark.questions.records import replace_file, write_json
from benchmark.serve import flags
from benchmark.serve.flags import BASE_URL, LATENCIES, QUESTIONS, RANDOM, SAMPLING
from sharesd.cli import options
from sharesd.cli.console import console, err_console, loading_bars
from sharesd.cli.pictures import can_draw
from sharesd.config import MODES
from sharesd.models.progress import Progress

if TYPE_CHECKING:
    from benchmark.serve.session import Run, Settings
    from benchmark.serve.workload import Request

NAIVE = "naive"
EXACT_RATE = 16.0
"""Requests per second of --exact, where no rate is given."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="load for a server that speaks OpenAI's protocol, and how fast it answers",
        description="Send requests to any server that speaks OpenAI's protocol and measure its answers, or start our "
        "own in several modes and compare them (docs/benchmark-serve.md). The exit status is 1 if a load got no "
        "answer, if texts differ from those of mode naive, or if --exact finds anything else.",
    )
    parser.set_defaults(run=run, parser=parser)
    flags.add_server(parser.add_argument_group("server"))
    flags.add_workload(parser.add_argument_group("requests"))
    flags.add_sampling(parser.add_argument_group("sampling"))
    flags.add_results(parser.add_argument_group("results"))


def run(args: argparse.Namespace) -> int:
    """Measure, print tables, write files where asked; returns the exit status."""
    modes = _modes(args)
    if args.exact:
        return _exact(args, modes)
    saves = args.save_result or args.save_detailed or args.out_dir is not None or args.sweep is not None
    settings = settings_of(args)
    out_dir = arguments.out_folder(args.out_dir, "serve") if saves else None

    runs: list[Run] = []
    for load in _loads(args, modes, settings):
        runs.append(load)
        if out_dir is not None:
            write_json(out_dir / load.file, _json(load, args))
    if out_dir is not None:
        _write_report(out_dir, runs, settings, args)
    _show(runs, args)
    if out_dir is not None:
        console.print(f"files: {out_dir}", markup=False, highlight=False, soft_wrap=True)
    differs = any(run.result.get("same_texts_as_naive") != run.result.get("texts_compared") for run in runs)
    return 1 if differs or any(run.result["completed"] == 0 for run in runs) else 0


def _loads(args: argparse.Namespace, modes: Sequence[str], settings: Settings) -> Iterator[Run]:
    """Ask a server at each rate, or one in each mode, which are compared with naive."""
    from benchmark.serve.session import compare, measure, median
    from benchmark.serve.spawn import spawned

    rates: Sequence[float] = args.sweep or (args.request_rate or math.inf,)
    naive: dict[tuple[float, int], Run] = {}

    def load(url: str, mode: str | None, step: int, turn: int = 0) -> Run:
        rate = rates[step]
        done = partial(_tell, progress, f"{mode or 'asking'} at {rate:g}/s", settings.num_prompts)
        found = asyncio.run(measure(settings, url, rate=rate, mode=mode, step=step, done=done, turn=turn))
        if mode == NAIVE:
            naive[rate, turn] = found
        elif mode is not None:
            compare(found, naive[rate, turn])
        return found

    def server(mode: str) -> AbstractContextManager[str]:
        err_console.print(f"starting the server in mode {mode}", highlight=False)
        return spawned(mode, args.server_flags)

    if args.turns == 1:
        for mode in modes or (None,):
            with server(mode) if mode else nullcontext(args.base_url or BASE_URL) as url, loading_bars() as progress:
                yield from (load(url, mode, step) for step in range(len(rates)))
        return
    with ExitStack() as servers:
        urls = {mode: servers.enter_context(server(mode)) for mode in modes}
        with loading_bars() as progress:
            for step in range(len(rates)):
                turns = [[load(urls[mode], mode, step, turn) for mode in modes] for turn in range(args.turns)]
                yield from map(median, zip(*turns, strict=True))


def _exact(args: argparse.Namespace, modes: Sequence[str]) -> int:
    """`--exact`: print a line for each load, and all that is wrong; returns the exit status."""
    if not modes:
        raise ValueError(f"--exact is {args.exact} and compares modes with naive; name them with --spawn")
    from benchmark.serve.exact import Outcome, alone, together
    from benchmark.serve.mixed import mixed
    from benchmark.serve.spawn import spawned

    requests = mixed(args.num_prompts, args.seed)
    server_flags = ["--max-queue", str(4 * len(requests)), *args.server_flags]  # nobody is to be refused
    with loading_bars() as progress:
        progress("asking naive, one by one", 0, 1)
        with spawned(NAIVE, server_flags) as url:
            expected = asyncio.run(alone(url, requests, args.timeout))
        outcomes: list[Outcome] = []
        for mode in modes[1:] or modes:
            with spawned(mode, server_flags) as url:
                for order in range(args.exact):
                    progress(f"{mode}, all together", len(outcomes), args.exact * len(modes[1:] or modes))
                    rate = args.request_rate or EXACT_RATE
                    load = together(url, requests, expected, mode=mode, order=order, rate=rate, timeout_s=args.timeout)
                    outcomes.append(asyncio.run(load))
    head = ["mode", "order", "identical choices", "hung up"]
    rows = [[o.mode, str(o.order), f"{o.num_identical}/{o.num_choices}", str(o.num_given_up)] for o in outcomes]
    console.print(rich_table(f"{len(requests)} requests, as answered by mode naive alone", head, rows))
    for outcome in outcomes:
        for line in (*outcome.differing, *outcome.failures, *(f"{name} is {x:g}" for name, x in outcome.left.items())):
            console.print(f"{outcome.mode} {outcome.order}: {line}", markup=False, highlight=False, soft_wrap=True)
    return 0 if all(outcome.good for outcome in outcomes) else 1


def _tell(progress: Progress, what: str, total: int, done: int) -> None:
    progress(what, done, total)


def settings_of(args: argparse.Namespace) -> Settings:
    """What the flags ask for; ValueError for those that do not fit together and for files that cannot be read."""
    if args.sweep and args.request_rate:
        raise ValueError(f"--request-rate is {args.request_rate:g}, and --sweep names the rates; drop one of the two")
    if args.questions and args.dataset != QUESTIONS:
        raise ValueError(f"--questions is {args.questions} and --dataset {args.dataset}; add --dataset {QUESTIONS}")
    if args.vocab_size is not None and (args.dataset != RANDOM or args.endpoint == "chat"):
        raise ValueError(f"--vocab-size is {args.vocab_size} and is for random token ids; add --endpoint completions")
    try:
        from benchmark.serve.session import Settings
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; run: pip install {error.name}") from error

    tokenizer = _tokenizer(args.tokenizer)
    headers = dict(args.header)
    if (key := os.environ.get("OPENAI_API_KEY")) and "authorization" not in map(str.lower, headers):
        headers["Authorization"] = f"Bearer {key}"
    ignore_eos = args.dataset == RANDOM if args.ignore_eos is None else args.ignore_eos
    sampling = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in SAMPLING}
    return Settings(
        draw=_dataset(args, tokenizer),
        num_prompts=args.num_prompts,
        num_turns=args.turns,
        num_warmups=args.num_warmups,
        endpoint=args.endpoint,
        model=args.model,
        tokenizer=args.tokenizer,
        encode=tokenizer and partial(tokenizer.encode, add_special_tokens=False),
        options={
            "temperature": args.temperature,
            **{name: value for name, value in sampling.items() if value is not None},
            **({"ignore_eos": True} if ignore_eos else {}),
            **args.extra_body,
        },
        headers=headers,
        timeout_s=args.timeout,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        goodput=dict(args.goodput),
        percentiles=args.metric_percentiles,
        seed=args.seed,
    )


def _dataset(args: argparse.Namespace, tokenizer: Any) -> Callable[[int, int], list[Request]]:
    """(how many, seed) -> requests. Files are read once, so that mistakes in them show before anything is started."""
    from benchmark.serve import workload

    if args.dataset == RANDOM:
        lengths = workload.RandomLengths(
            input_len=args.random_input_len, output_len=args.random_output_len, range_ratio=args.random_range_ratio
        )
        if args.endpoint == "chat":
            return lambda num, seed: workload.random_words(num, lengths, seed)
        vocab: Sequence[int]
        if args.vocab_size is not None:
            vocab = range(args.vocab_size)
        elif tokenizer is not None:
            vocab = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
        else:
            raise ValueError(
                "--dataset random asks completions in token ids; name --tokenizer or --vocab-size, or a chat"
            )
        return lambda num, seed: workload.random_ids(num, lengths, vocab, seed)
    num_all = args.num_prompts * args.turns + args.num_warmups
    if args.dataset == QUESTIONS:
        fixed = workload.from_questions(num_all, args.questions, args.output_len)
    else:
        fixed = workload.from_file(num_all, args.dataset, args.output_len, ids=args.endpoint == "completions")
    return lambda num, seed: fixed[:num]


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from sharesd.models.hub import resolve
    from sharesd.models.tokenizer import load_tokenizer

    return load_tokenizer(resolve(name))


def _modes(args: argparse.Namespace) -> tuple[str, ...]:
    """The modes to start, naive first; none where a running server is asked."""
    if args.spawn is None:
        if args.turns > 1:
            raise ValueError(f"--turns is {args.turns} and is for servers that --spawn starts; add --spawn or drop it")
        if args.server_flags:
            raise ValueError(f"{args.server_flags[0]!r} is for the server that --spawn starts; add --spawn or drop it")
        return ()
    if args.base_url is not None:
        raise ValueError(f"--base-url is {args.base_url}, and --spawn starts a server; drop one of the two")
    asked = options.modes_of(argparse.Namespace(mode=args.spawn), default=MODES)
    return tuple(dict.fromkeys((NAIVE, *asked)))


def _json(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """The contents of a load's file: vLLM's keys, and what a reader must know beside them."""
    from benchmark.environment import environment
    from benchmark.serve.report import details

    hidden = tuple(f"_{name}_ms" for name in LATENCIES if name not in args.percentile_metrics)
    shown = {key: value for key, value in run.result.items() if not key.endswith(hidden)} if hidden else run.result
    return {
        **shown,
        **(details(run) if args.save_detailed else {}),
        "command": arguments.command(),
        "client_environment": environment("cpu"),
    }


def _write_report(out_dir: Path, runs: Sequence[Run], settings: Settings, args: argparse.Namespace) -> None:
    from benchmark.serve.report import comparison, overview, remarks

    parts = [f"# Load on {runs[0].result['model_id']}", f"`{arguments.command()}`"]
    parts.append(markdown_table(*overview(runs, settings.percentiles)))
    head, rows = comparison(runs, settings.percentiles)
    if rows:
        parts.append(markdown_table(head, rows))
    parts.append("\n".join(f"- {line}" for run in runs for line in remarks(run)))
    replace_file(out_dir / "serve.md", "\n\n".join(parts) + "\n")
    if args.sweep and can_draw("latency.png"):
        from benchmark.serve.plot import draw

        draw(out_dir / "latency.png", f"{runs[0].result['model_id']}, {_asked(args)}", runs, settings.percentiles)


def _asked(args: argparse.Namespace) -> str:
    """The requests in words."""
    what = f"{args.num_prompts} {'requests' if args.num_prompts > 1 else 'request'}"
    if args.dataset == RANDOM:
        return f"{what} of {args.random_input_len} tokens, answers of {args.random_output_len}"
    return f"{what} of {args.dataset}, answers of at most {args.output_len} tokens"


def _show(runs: Sequence[Run], args: argparse.Namespace) -> None:
    from benchmark.serve.report import comparison, latencies, overview, remarks

    title = f"{runs[0].result['model_id']}: {_asked(args)} (medians, milliseconds)"
    console.print(rich_table(title, *overview(runs, args.metric_percentiles)))
    if len(runs) == 1:
        console.print(rich_table("", *latencies(runs[0], args.percentile_metrics, args.metric_percentiles)))
    head, rows = comparison(runs, args.metric_percentiles)
    if rows:
        console.print(rich_table("", head, rows))
    for run in runs:
        for line in remarks(run):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
