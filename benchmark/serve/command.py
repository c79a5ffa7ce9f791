"""`serve`: load for a running server, or for ShareSD's in several modes."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.arguments import rotated
from benchmark.report import Report
from benchmark.serve import workload
from benchmark.serve.flags import BASE_URL, QUESTIONS, RANDOM, add_flags
from sharesd.cli import options
from sharesd.cli.console import console, err_console, loading_bars, print_line
from sharesd.drafters import registry
from sharesd.reports import environment
from sharesd.reports.pictures import can_draw
from sharesd.reports.tables import ABSENT, Section, bullets, has_drifted, number, ranged, times, write_json
from sharesd_files import file_hash

if TYPE_CHECKING:
    from benchmark.serve.load import Load, LoadSettings

NAIVE = "naive"
EXACT_RATE = 16.0  # requests per second of --exact by default


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="load test for a server with OpenAI's protocol",
        description="Send requests to any server that speaks OpenAI's protocol and measure its answers, or start our "
        "own in several modes and compare them. The exit status is 1 if a load got no answer, if texts differ from "
        "those of mode naive, or if --exact finds anything else.",
    )
    parser.set_defaults(run=run, parser=parser)
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print tables and write the requested files; return the exit status."""
    modes = _modes(args)
    try:
        import httpx  # noqa: F401
        import prometheus_client  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; run: pip install {error.name}") from error
    if args.exact:
        return _exact(args, modes)
    saves = args.save_result or args.save_detailed or args.out_dir is not None or args.sweep is not None
    settings = settings_of(args)
    out_dir = environment.out_folder(args.out_dir, "serve") if saves else None
    loads, about = list["Load"](), _about(args, settings)
    for load in _loads(args, modes, settings):
        loads.append(load)
        if out_dir is not None:
            _write_load(out_dir, load, about, in_detail=args.save_detailed)
    _finish(out_dir, loads, args, about)
    differs = any(load.result.get("same_texts_as_naive") != load.result.get("texts_compared") for load in loads)
    return 1 if differs or any(load.result["completed"] == 0 for load in loads) else 0


def settings_of(args: argparse.Namespace) -> LoadSettings:
    """Return the settings of a command line; ValueError for bad options."""
    from benchmark.serve.load import LoadSettings

    if args.sweep and args.request_rate:
        raise ValueError(f"--request-rate is {args.request_rate:g}, and --sweep sets the rates; use one or the other")
    if args.questions and args.dataset != QUESTIONS:
        raise ValueError(f"--questions is {args.questions} and --dataset {args.dataset}; add --dataset {QUESTIONS}")
    if args.dataset == RANDOM:
        lengths = (args.random_input_len, args.random_output_len, args.random_range_ratio)
        draw: workload.Draw = lambda num, seed: workload.random_words(num, *lengths, seed)  # noqa: E731
    elif args.dataset == QUESTIONS:
        draw = workload.repeated(workload.questions(args.questions, args.output_len))
    else:
        draw = workload.repeated(workload.from_file(args.dataset, args.output_len))
    headers = dict(args.header)
    if (key := os.environ.get("OPENAI_API_KEY")) and "authorization" not in map(str.lower, headers):
        headers["Authorization"] = f"Bearer {key}"
    ignore_eos = args.dataset == RANDOM if args.ignore_eos is None else args.ignore_eos
    sampling = {name: value for name in ("top_p", "top_k", "min_p") if (value := getattr(args, name)) is not None}
    same = {name: getattr(args, name) for name in ("num_prompts", "num_warmups", "endpoint", "model", "burstiness")}
    return LoadSettings(
        **same,
        draw=draw,
        num_turns=args.turns,
        options={
            "temperature": args.temperature,
            **sampling,
            **({"ignore_eos": True} if ignore_eos else {}),
            **args.extra_body,
        },
        headers=headers,
        timeout_s=args.timeout,
        max_concurrency=args.max_concurrency,
        goodput=dict(args.goodput),
        percentiles=args.metric_percentiles,
        seed=args.seed,
    )


def _modes(args: argparse.Namespace) -> tuple[str, ...]:
    """Return modes of servers to start, naive first; ValueError for conflicts."""
    if args.spawn is None:
        if args.exact:
            raise ValueError(f"--exact is {args.exact} and compares modes with naive; list them with --spawn")
        if args.server_flags:
            raise ValueError(f"{args.server_flags[0]!r} is for a server that --spawn starts; add --spawn or remove it")
        return ()
    if args.base_url is not None:
        raise ValueError(f"--base-url is {args.base_url}, and --spawn starts a server; use one or the other")
    asked = options.modes_of(argparse.Namespace(mode=args.spawn), default=registry.modes())
    return tuple(dict.fromkeys((NAIVE, *asked)))


def _loads(args: argparse.Namespace, modes: Sequence[str], settings: LoadSettings) -> Iterator[Load]:
    """Yield loads by rate and mode, as medians of turns, against naive."""
    from benchmark.serve.load import compare, measure, median
    from benchmark.serve.spawn import spawned

    rates: Sequence[float] = args.sweep or (args.request_rate or math.inf,)
    first: dict[tuple[int, int], Load] = {}  # of naive, or of a running server

    def load(url: str, mode: str | None, step: int, turn: int = 0) -> Load:
        def done(num: int) -> None:
            progress(f"{mode or 'asking'} at {rates[step]:g}/s", num, settings.num_prompts)

        return asyncio.run(measure(settings, url, rate=rates[step], mode=mode, step=step, turn=turn, done=done))

    def beside_naive(found: Load, step: int, turn: int = 0) -> Load:
        if found is not first.setdefault((step, turn), found):
            compare(found, first[step, turn])
        return found

    def server(mode: str | None) -> AbstractContextManager[str]:
        if mode is None:
            return nullcontext(args.base_url or BASE_URL)
        err_console.print(f"starting the server in mode {mode}", highlight=False)
        return spawned(mode, args.server_flags)

    if args.turns == 1:
        for mode in modes or (None,):
            with server(mode) as url, loading_bars() as progress:
                yield from (beside_naive(load(url, mode, step), step) for step in range(len(rates)))
        return
    with ExitStack() as servers, loading_bars() as progress:
        urls = {mode: servers.enter_context(server(mode)) for mode in modes or (None,)}
        for step in range(len(rates)):
            turns = []
            for turn in range(args.turns):
                found = {mode: load(urls[mode], mode, step, turn) for mode in rotated([*urls], turn)}
                turns.append([beside_naive(found[mode], step, turn) for mode in urls])
            yield from map(median, zip(*turns, strict=True))


def _exact(args: argparse.Namespace, modes: Sequence[str]) -> int:
    from benchmark.serve.exact import Outcome, alone, mixed, together
    from benchmark.serve.spawn import spawned

    requests = mixed(args.num_prompts, args.seed)
    server_flags = ["--max-queue", str(4 * len(requests)), *args.server_flags]  # none is to be refused
    rate, outcomes = args.request_rate or EXACT_RATE, list[Outcome]()
    with loading_bars() as progress:
        progress("asking naive, one by one", 0, 1)
        with spawned(NAIVE, server_flags) as url:
            expected = asyncio.run(alone(url, requests, args.timeout))
        for mode in modes[1:] or modes:
            with spawned(mode, server_flags) as url:
                for order in range(args.exact):
                    progress(f"{mode}, all together", len(outcomes), args.exact * len(modes[1:] or modes))
                    load = together(url, requests, expected, mode=mode, order=order, rate=rate, timeout_s=args.timeout)
                    outcomes.append(asyncio.run(load))
    rows = [[o.mode, str(o.order), f"{o.num_identical}/{o.num_choices}", str(o.num_given_up)] for o in outcomes]
    head = ("mode", "order", "identical choices", "hung up")
    console.print(Section(f"{len(requests)} requests, as answered by mode naive alone", head, rows).table())
    for outcome in outcomes:
        for line in (*outcome.differing, *outcome.failures, *(f"{name} is {x:g}" for name, x in outcome.left.items())):
            print_line(f"{outcome.mode} {outcome.order}: {line}")
    return 0 if all(outcome.good for outcome in outcomes) else 1


def _write_load(out_dir: Path, load: Load, about: Mapping[str, Any], *, in_detail: bool) -> None:
    from benchmark.serve.load import details

    more = details(load) if in_detail else {}
    found = {"format": environment.FORMAT, **about, "client_environment": environment.environment("cpu")}
    write_json(out_dir / load.file, {**load.result, **more, **found})


def _about(args: argparse.Namespace, settings: LoadSettings) -> dict[str, Any]:
    """Return the command, and hashes of its requests and file."""
    asked = [[each.prompt, each.output_len] for each in settings.draw(args.num_prompts * args.turns, args.seed)]
    file = Path(args.questions or args.dataset)
    return {
        "command": environment.command(),
        "dataset": args.dataset,
        "requests.sha256": hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16],
        **({"files.questions": file_hash(file)} if file.is_file() else {}),
    }


def _finish(out_dir: Path | None, loads: Sequence[Load], args: argparse.Namespace, about: Mapping[str, Any]) -> None:
    tail = f"p{max(args.metric_percentiles):g}"
    columns: dict[str, Callable[[Any], str]] = {
        "done": lambda r: f"{r['completed']}/{r['num_prompts']}",
        "req/s": lambda r: number(r["request_throughput"], 2),
        "good/s": lambda r: number(r["request_goodput"], 2),
        "tok/s": lambda r: number(r["output_throughput"]),
        "ttft": lambda r: number(r["median_ttft_ms"], 0),
        f"ttft {tail}": lambda r: number(r[f"{tail}_ttft_ms"], 0),
        "tpot": lambda r: number(r["median_tpot_ms"]),
        f"itl {tail}": lambda r: number(r[f"{tail}_itl_ms"]),
        "e2el": lambda r: number(r["median_e2el_ms"], 0),
        "tau": lambda r: number(r.get("spec_decode_acceptance_length"), 2),
    }
    rows = [[load.name, *(show(load.result) for show in columns.values())] for load in loads]
    sections = [Section("", ("load", *columns), rows, text="Latencies: medians and percentiles in milliseconds.")]
    keys = ("output_throughput", "median_ttft_ms", "median_tpot_ms", f"{tail}_itl_ms", "median_e2el_ms")
    rows = []
    for load in loads:
        if (ratios := load.result.get("ratio_to_naive")) is not None:
            texts = f"{load.result['same_texts_as_naive']}/{load.result['texts_compared']}"
            rows.append([load.name, *(times(ratios[key]) for key in keys), texts])
    if rows:
        head = ("over naive", "tok/s", "ttft", "tpot", f"itl {tail}", "e2el", "same text")
        sections.append(Section("Over naive", head, rows))
    if args.turns > 1:
        named = {"tok/s": keys[0], "ttft": keys[1], "tpot": keys[2], "e2el": keys[4]}
        rows = [
            [load.name, name, ranged(load.result, key, 1), ranged(load.result.get("ratio_to_naive", {}), key)]
            for load, (name, key) in product(loads, named.items())
        ]
        title, each = f"Medians and ranges of {args.turns} turns", ("load", "figure", "median and range", "over naive")
        sections.append(Section(title, each, rows, left=2))
    remarks = [*noise_remarks(loads, args.turns), *(line for load in loads for line in remarks_of(load))]
    model, plots = loads[0].result["model_id"], []
    if out_dir is not None and args.sweep and can_draw("latency.png"):
        draw(out_dir / "latency.png", model, loads, tail)
        plots = ["latency.png"]
    num_tables = len(sections)
    sections.append(Section("Remarks", text=bullets(remarks)))
    report = Report(
        title=f"Load on {model}",
        sections=sections,
        settings=about,
        environment={} if out_dir is None else environment.environment("cpu"),
        plots=plots,
    )
    report.publish(out_dir, "serve", shown=num_tables, remarks=remarks)


def noise_remarks(loads: Sequence[Load], num_turns: int) -> list[str]:
    """Return remarks on single turns, and on servers whose speed changed."""
    if num_turns == 1:
        return ["Measured once, so the noise is unknown; use --turns 3 for ranges."]
    drifts = {load.name: load.result["last_turn_over_first"] for load in loads if load.mode in (NAIVE, None)}
    return [
        f"{name}: {drift:.2f} times as fast in the last turn as in the first; prompts differ, or the machine changed."
        for name, drift in drifts.items()
        if has_drifted(drift)
    ]


def remarks_of(load: Load) -> list[str]:
    """Return lines about a load's token totals, drafts and failures."""
    found = load.result
    tokens = f"{found['total_input_tokens']} tokens in, {found['total_output_tokens']} out"
    lines = [f"{load.name}: {tokens} in {found['duration']:.1f} s"]
    if "spec_decode_num_drafts" in found:
        shares = ", ".join(f"{100 * share:.0f}" for share in found["spec_decode_per_position_acceptance_rates"])
        accepted = f"{found['spec_decode_accepted_tokens']} of {found['spec_decode_draft_tokens']} draft tokens"
        rate = f"{found['spec_decode_acceptance_rate']:.1f} %"
        lines.append(f"{load.name}: {accepted} accepted ({rate}), by position {shares or ABSENT} %")
    for kind, num in found["failures"].items():
        first = next(answer.detail for answer in load.answers if answer.failure == kind)
        lines.append(f"{load.name}: {num} {kind}, the first: {first}")
    return lines


def draw(path: Path, model: str, loads: Sequence[Load], tail: str) -> None:
    """Draw latencies and throughput by rate: medians, and percentile `tail`."""
    from benchmark.plots import Line, draw_lines

    panels: dict[str, dict[str, Line]] = {}
    columns = {f"{name} (ms)": (f"median_{name}_ms", f"{tail}_{name}_ms") for name in ("ttft", "tpot", "e2el")}
    for what, keys in {**columns, "tok/s": ("output_throughput",)}.items():
        for key, mode in product(keys, dict.fromkeys(load.mode for load in loads)):
            ordered = sorted((load for load in loads if load.mode == mode), key=lambda load: load.rate)
            around = "" if key.startswith(tail) else f"{key}_range"  # those of medians alone, which would be hidden
            line = [(f"{load.rate:g}", load.result[key], load.result.get(around)) for load in ordered]
            panels.setdefault(what, {})[f"{mode or 'server'} {key.split('_')[0]}"] = line
    draw_lines(path, f"Latency against the rate of requests\n{model}", panels, "requests per second")
