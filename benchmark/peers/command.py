"""The subcommand `peers`: flags, prompts, measuring, files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, cycle, islice
from typing import Any, get_args

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmark import arguments
from benchmark.environment import environment
from benchmark.peers.catalogue import RUNTIMES
from benchmark.peers.figures import Figures, figures
from benchmark.peers.measure import Row, Say, measure
from benchmark.peers.process import Worker
from benchmark.peers.protocol import Settings
from benchmark.peers.report import markdown, remarks, rich_table
from benchmark.questions import questions as question_files
from benchmark.questions.job import model_name
from benchmark.questions.records import replace_file, write_json
from sharesd.cli import options
from sharesd.cli.console import console, err_console, loading_bars
from sharesd.config import Mode

EMBEDDED = "SmolLM2-135M-Instruct"


def add_parser(subparsers: Any) -> None:
    """Add the subcommand `peers`."""
    text = "other runtimes beside ours: transformers, OpenVINO GenAI, llama.cpp"
    parser = subparsers.add_parser("peers", help=text, description=f"Measure greedy decoding and reading by {text}.")
    parser.set_defaults(run=run, parser=parser)
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--peers",
        default=",".join(RUNTIMES),
        metavar="LIST",
        help="runtimes to measure, with commas, or single ways of them as RUNTIME:WAY (sharesd:naive); those that are "
        "not installed are named in the table",
    )
    group.add_argument("--questions", metavar="FILE", help="JSON Lines, perhaps gzipped (default: ShareSD's own)")
    group.add_argument(
        "--num-questions",
        type=arguments.number,
        metavar="N",
        help="first turns of N questions (default: 4, or as many as are answered together)",
    )
    group.add_argument(
        "--concurrency",
        type=arguments.number,
        default=1,
        metavar="N",
        help="N prompts are asked at once and answered together; speeds then are of all tokens over all the time",
    )
    group.add_argument(
        "--prompt-tokens",
        type=arguments.number,
        metavar="N",
        help="prompts of N tokens, made of the questions one after another (how fast are they read?)",
    )
    group.add_argument(
        "--max-new-tokens", type=arguments.number, default=64, metavar="N", help="exactly so many per prompt"
    )
    group.add_argument(
        "--repeats", type=arguments.number, default=3, metavar="R", help="measure R times; report the median"
    )
    arguments.add_out_dir(group, "peers")
    options.add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write peers.json and peers.md; returns 1 where nothing could be measured."""
    rows = [Row(name, variant, RUNTIMES[name].missing) for name, variant in ways_of(args.peers)]
    if args.max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}; decoding can be timed from 2 on")
    num_questions = args.num_questions or (4 if args.concurrency == 1 else args.concurrency)
    if num_questions % args.concurrency:
        raise ValueError(
            f"--num-questions is {num_questions} and --concurrency {args.concurrency}; ask a multiple of it, so that "
            "as many are always answered together"
        )
    config = options.engine_config(args, modes=get_args(Mode))
    config = replace(config, max_batch=args.concurrency, max_context=config.planned_context)  # the same for all
    asked = question_files.load("mtbench", args.questions, None if args.prompt_tokens else num_questions)
    out_dir = arguments.out_folder(args.out_dir, "peers")

    from benchmark.questions.conversation import prompt_format, prompt_ids
    from sharesd.devices.selection import device_of
    from sharesd.models.hub import resolve
    from sharesd.models.tokenizer import load_tokenizer

    config = replace(config, device=str(device_of(config.device)))  # the same for all
    with loading_bars() as progress:
        tokenizer = load_tokenizer(resolve(config.target, progress=progress))
    prompts = [prompt_ids(tokenizer, question, []) for question in asked.questions]
    if args.prompt_tokens:
        prompts = joined(prompts, args.prompt_tokens, num_questions)
    longest = max(map(len, prompts))
    if longest + args.max_new_tokens > config.planned_context:
        raise ValueError(
            f"a prompt has {longest} tokens, {args.max_new_tokens} are to follow and the context holds "
            f"{config.planned_context}; raise --max-context or lower --max-new-tokens"
        )
    settings = Settings(config=config, num_tokens=args.max_new_tokens, num_threads=config.threads or num_cores())
    with _bar() as say:
        measure(
            rows,
            [prompts[i : i + args.concurrency] for i in range(0, len(prompts), args.concurrency)],
            repeats=args.repeats,
            open_worker=lambda name: Worker(RUNTIMES[name].module, settings),
            say=say,
        )
    report = {
        "settings": _settings(args, settings, asked.label, prompts, prompt_format(tokenizer)),
        "environment": _environment({row.runtime for row in rows}, settings),
        "rows": [_row(row, found) for row, found in zip(rows, figures(rows), strict=True)],
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    write_json(out_dir / "peers.json", report)
    replace_file(out_dir / "peers.md", markdown(report))
    console.print(rich_table(report))
    for line in remarks(report):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(f"report: {out_dir / 'peers.md'}", markup=False, highlight=False, soft_wrap=True)
    return 0 if any(row.failure is None for row in rows) else 1


def ways_of(text: str) -> list[tuple[str, str]]:
    """Runtime and variant, each once, of a list with commas; ValueError for an unknown one."""
    ways: list[tuple[str, str]] = []
    for part in text.split(","):
        name, _, variant = part.strip().partition(":")
        if name not in RUNTIMES:
            raise ValueError(f"--peers names {name!r}; choose from {', '.join(RUNTIMES)}")
        if variant and variant not in RUNTIMES[name].variants:
            raise ValueError(f"--peers names {part.strip()!r}; {name} has {', '.join(RUNTIMES[name].variants)}")
        ways += [(name, way) for way in ([variant] if variant else RUNTIMES[name].variants)]
    return list(dict.fromkeys(ways))


def joined(prompts: Sequence[list[int]], num_tokens: int, num: int) -> list[list[int]]:
    """`num` prompts of `num_tokens` tokens: each begins with another of `prompts`, and goes on with those behind it."""
    return [list(islice(chain.from_iterable(islice(cycle(prompts), i, None)), num_tokens)) for i in range(num)]


def num_cores() -> int:
    """Physical cores that this process may use."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


def _settings(
    args: argparse.Namespace, settings: Settings, label: str, prompts: Sequence[list[int]], prompt_format: str
) -> dict[str, Any]:
    config = settings.config
    return {
        "command": arguments.command(),
        "model": EMBEDDED if config.target is None else model_name(config.target),
        "questions": label,
        "num_prompts": len(prompts),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "prompt_format": prompt_format,
        "concurrency": config.max_batch,
        "num_tokens": settings.num_tokens,
        "dtype": settings.dtype,
        "device": config.device,
        "num_threads": settings.num_threads,
        "repeats": args.repeats,
        "num_draft": config.num_draft,
        "quant": str(config.quant),
        "compile": config.compile,
    }


def _environment(names: Iterable[str], settings: Settings) -> dict[str, Any]:
    """The machine, and the versions of the runtimes."""
    versions = {RUNTIMES[name].distribution: _version(RUNTIMES[name].distribution) for name in sorted(names)}
    return {**environment(settings.config.device), "num_threads": settings.num_threads, **versions}


def _row(row: Row, found: Figures | None) -> dict[str, Any]:
    """A row of peers.json."""
    samples = [{"repeat": r, "batch": b, **asdict(sample)} for (r, b), sample in row.samples.items()]
    return {
        "runtime": row.runtime,
        "variant": row.variant,
        "how": RUNTIMES[row.runtime].variants[row.variant],
        "failure": row.failure,
        "figures": asdict(found) if found else None,
        "samples": [{name: value for name, value in s.items() if name != "answers"} for s in samples],
    }


@contextmanager
def _bar() -> Iterator[Say]:
    """Progress on stderr, drawn between measurements only; a line per runtime's way where there is no terminal."""
    columns: Sequence[Any] = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    on_terminal = err_console.is_terminal
    with Progress(
        *columns, console=err_console, transient=True, auto_refresh=False, disable=not on_terminal
    ) as progress:
        task = progress.add_task("", total=None)

        def say(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total, refresh=True)
            if not on_terminal:
                err_console.print(f"{done}/{total} {what}", highlight=False, soft_wrap=True)

        yield say


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
