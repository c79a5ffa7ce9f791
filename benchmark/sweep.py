"""Command `sweep`: speedup of modes over naive, along any axes.

Axes are context, batch, width, temperature, and options of the engine. Each combination of batch,
width and options has its own runtime.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from benchmark import arguments
from benchmark.points import Axis, Point, finish, line_of, point_of, remarks_of
from sharesd.cli import options
from sharesd.cli.console import err_console, loading_bars, print_line
from sharesd.cli.parse_types import parts_of
from sharesd.config import MIN_CONTEXT, EngineConfig, Mode
from sharesd.drafters import registry
from sharesd.field_types import DefaultLimit
from sharesd.models.hub import resolve_target
from sharesd.reports import environment
from sharesd.reports import questions as question_files
from sharesd.reports.environment import conditions, load_meter
from sharesd.reports.questions import Question, prompt_ids
from sharesd.reports.tables import write_json
from sharesd.sampling_params import SamplingParams

NUM_QUESTIONS, MAX_NEW_TOKENS, RUNS = 4, 64, 3
CELL_AXES = ("context", "temperature")  # axes whose values share a runtime
OPTION_OF = {"K": "num-speculative-tokens", "width": "num-speculative-tokens"}
"""Axis -> engine's option; a width is draft tokens + 1."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand `sweep` and its preset `grid`."""
    text = "how fast are modes over contexts, batches, widths, temperatures or any option?"
    group = _add(subparsers, "sweep", run, text)
    group.add_argument("--mode", default="share", metavar="LIST", help="modes, with commas, or all")
    text = (
        "an axis and its values, separated by commas, or by semicolons if values have commas: context (tokens of "
        "prompts), batch, width (tokens of a verify step), temperature, or an option, such as "
        "num-speculative-tokens=1,2,4 or tree=2:4:8,off. Repeatable"
    )
    group.add_argument("--over", type=_axis, action="append", required=True, metavar="NAME=LIST", help=text)
    _add_measuring(group, "sweep")
    group = _add(subparsers, "grid", run_grid, "where does a mode lose, over contexts, batches and temperatures?")
    group.add_argument("--modes", dest="mode", default="all", metavar="LIST", help="modes, with commas, or all")
    group.add_argument("--contexts", default="200,2000,6000", metavar="LIST", help="tokens of prompts")
    group.add_argument("--batches", default="1,4,8", metavar="LIST", help="sequences at once")
    group.add_argument("--temperatures", default="0,1", metavar="LIST", help="0 = greedy")
    _add_measuring(group, "grid")


def _add(subparsers: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
    """Return the group of options of a new subcommand."""
    what = "Measure modes in turns with naive at every combination of the values of axes."
    what = what if name == "sweep" else "The sweep over contexts, batches and temperatures."
    about = f"{what} The exit status is 1 if a text differs from that of naive."
    parser = subparsers.add_parser(name, help=text, description=about)
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    return parser.add_argument_group(name)


def _add_measuring(group: Any, name: str) -> None:
    group.add_argument("--seed", type=int, default=1, help="seed of the noise, above temperature 0")
    group.add_argument("--runs", type=arguments.number, default=RUNS, metavar="R", help="runs, reported as medians")
    arguments.add_questions(group, NUM_QUESTIONS, MAX_NEW_TOKENS)
    text = "text for documents that fill contexts (default: Python's manual)"
    group.add_argument("--filler", metavar="FILE", help=text)
    arguments.add_out_dir(group, name)


def run(args: argparse.Namespace) -> int:
    """Run the sweep; return 1 if a text differs, else 0."""
    return measure_axes(args, args.over, "sweep")


def run_grid(args: argparse.Namespace) -> int:
    """Run the grid; return 1 if a text differs, else 0."""
    lists = {"batch": args.batches, "context": args.contexts, "temperature": args.temperatures}
    axes = [(name, parts_of(f"axis {name}", text)) for name, text in lists.items()]
    return measure_axes(args, axes, "grid")


def measure_axes(args: argparse.Namespace, axes: Sequence[Axis], name: str) -> int:
    """Measure all points and write files; return 1 if a text differs."""
    modes = tuple(mode for mode in options.modes_of(args, default=registry.modes()) if mode != "naive")
    if not modes:
        raise ValueError("the only mode is naive, the baseline of the others; add another mode")
    if len(dict(axes)) < len(axes):
        raise ValueError(f"--over names {', '.join(axis for axis, _ in axes)}; use each axis once")
    given = None if args.max_context == "auto" else args.max_context
    plain = argparse.Namespace(**{**vars(args), "max_context": given or MIN_CONTEXT})
    configs = configs_of(plain, axes, modes)
    cells = [
        (values, SamplingParams(temperature=_temperature(values), seed=args.seed, max_new_tokens=args.max_new_tokens))
        for values in _combinations([axis for axis in axes if axis[0] in CELL_AXES])
    ]
    found = question_files.first_turns(args.questions)
    questions = found.questions
    num_needed = max(-(-args.num_questions // config.max_batch) * config.max_batch for _, config in configs)
    if num_needed >= len(questions):
        raise ValueError(
            f"{num_needed} questions and one for warm-up are needed, and {found.label} has {len(questions)}; "
            "lower --num-questions or the batch"
        )
    out_dir = environment.out_folder(args.out_dir, name)
    points: list[Point] = []
    about: dict[str, Any] = {}
    for values, config in configs:
        num_asked = -(-args.num_questions // config.max_batch) * config.max_batch
        prompts = _prompts(config, questions, num_asked, [_context(cell) for cell, _ in cells], args.filler)
        needed = args.max_new_tokens + max(len(prompt) for group in prompts.values() for prompt in group)
        if given is not None and given < needed:
            raise ValueError(f"--max-context is {given} and {needed} are needed; raise or remove it")
        config = replace(config, max_context=given or DefaultLimit(needed))
        ids = [question.id for question in questions[:num_asked]]
        for new in measure(config, modes, values, cells, ids, prompts, runs=args.runs):
            points += new
            print_line(line_of(new), err_console)
            about = about or conditions(
                config,
                modes,
                modes=list(modes),
                axes={axis: list(each) for axis, each in axes},
                **{key: getattr(args, key) for key in ("seed", "runs", "num_questions", "max_new_tokens")},
                questions=found.label,
                filler=args.filler or "Python's manual",
            )
            about["environment"] |= load_meter().read()
            complete = len(points) == len(configs) * len(cells) * len(modes)
            state = {"complete": complete, "remarks": remarks_of(points), "points": [asdict(each) for each in points]}
            write_json(out_dir / f"{name}.json", {**about, **state})
    finish(out_dir, name, about, axes, points)
    return 0 if all(point.identical for point in points) else 1


def configs_of(
    args: argparse.Namespace, axes: Sequence[Axis], modes: Sequence[Mode]
) -> list[tuple[dict[str, str], EngineConfig]]:
    """Return (axis values, config) of each runtime; ValueError for invalid values."""
    parser = options.Parser(prog=args.parser.prog)
    options.add_model_options(parser)
    found = []
    for values in _combinations([axis for axis in axes if axis[0] not in CELL_AXES]):
        given = argparse.Namespace(**vars(args))
        for name, value in values.items():
            if name != "batch":
                value = str(_whole(name, value, 2) - 1) if name == "width" else value
                _, unknown = parser.parse_known_args([f"--{OPTION_OF.get(name, name)}={value}"], given)
                if unknown:
                    raise ValueError(f"--over names {name}, which is neither an axis nor an option; see --help")
        config = options.engine_config(given, modes=modes)
        batch = _whole("batch", values["batch"], 1) if "batch" in values else 1
        found.append((values, replace(config, max_batch=batch)))
    return found


def measure(
    config: EngineConfig,
    modes: Sequence[Mode],
    values: dict[str, str],
    cells: Sequence[tuple[dict[str, str], SamplingParams]],
    question_ids: Sequence[str | int],
    prompts: Mapping[int | None, Sequence[list[int]]],
    *,
    runs: int,
) -> Iterator[list[Point]]:
    """Load one model, and yield each cell's points, one per mode."""
    from benchmark.timed import compare_modes
    from sharesd.llm import LLM  # torch takes seconds, mistakes should not
    from sharesd.startup.warmup import warm_up

    with loading_bars() as progress:
        llm = LLM.from_config(config, modes, progress=progress)
    runtime = llm.runtime
    if runtime.max_context < config.planned_context:
        raise ValueError(
            f"prompts and answers need up to {config.max_context} tokens and the model's context is "
            f"{runtime.max_context}; lower the contexts"
        )
    batch, naive = config.max_batch, runtime.new_plain_engine()
    for cell, params in cells:
        asked, others = prompts[_context(cell)][: len(question_ids)], prompts[None][len(question_ids) :]
        warm_up(naive, naive.mode, params)
        for mode in modes:
            with err_console.status(f"warming up {mode}, {batch} rows"):
                runtime.warm_up(mode, params)
                llm.generate([others[row % len(others)] for row in range(batch)], params, mode=mode)
        turns = []
        for first in range(0, len(asked), batch):
            group = slice(first, first + batch)
            about = {"question_ids": list(question_ids[group]), "prompt_tokens": list(map(len, asked[group]))}
            turns.append((about, compare_modes(naive, llm, modes, asked[group], params, runs=runs)))
        yield [point_of(values | cell, mode, [(about, by_mode[mode]) for about, by_mode in turns]) for mode in modes]


def _prompts(
    config: EngineConfig, questions: Sequence[Question], num: int, contexts: Sequence[int | None], filler: str | None
) -> dict[int | None, list[list[int]]]:
    """Return context -> prompts; None has all questions, without documents, for warmup."""
    from benchmark.documents import Documents, filler_texts
    from sharesd.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_target(config))
    found: dict[int | None, list[list[int]]] = {None: [prompt_ids(tokenizer, each, []) for each in questions]}
    documents = Documents(tokenizer, [*(each.turns[0] for each in questions[num:]), *filler_texts(filler)])
    for context in dict.fromkeys(context for context in contexts if context is not None):
        found[context] = [documents.prompt(question, context) for question in questions[:num]]
    return found


def _combinations(axes: Sequence[Axis]) -> list[dict[str, str]]:
    return [dict(zip([name for name, _ in axes], each, strict=True)) for each in product(*(v for _, v in axes))]


def _axis(text: str) -> Axis:
    name, equals, values = text.partition("=")
    parts = tuple(part.strip() for part in values.split(";" if ";" in values else ","))
    if not equals or not name.strip("-") or not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=LIST, such as context=200,2000")
    return name.strip("-"), tuple(dict.fromkeys(parts))


def _whole(name: str, text: str, minimum: int) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise ValueError(f"axis {name} holds {text!r}; use whole numbers from {minimum} on")
    return int(text)


def _context(values: Mapping[str, str]) -> int | None:
    return _whole("context", values["context"], 1) if "context" in values else None


def _temperature(values: Mapping[str, str]) -> float:
    text = values.get("temperature", "0")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"axis temperature holds {text!r}; use numbers such as 0,1") from None
