"""`grid`: where does a mode lose? Speed against naive over contexts, batches and temperatures.

Every batch size has a runtime of its own. A cell (context, batch, temperature) asks its questions in groups of as many
rows as the batch has, each behind a document that fills the context; `benchmark.studies.interleave` says how a group is
measured. Before that each mode answers one group of other questions, without documents.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

from benchmark import arguments
from benchmark.arguments import rich_table
from benchmark.questions import questions as question_files
from benchmark.questions.job import model_name
from benchmark.questions.questions import Question
from benchmark.questions.records import write_json
from benchmark.reports.table import tables_from
from benchmark.reports.text import number, percent, times
from benchmark.studies.neighbours import busy_neighbours
from sharesd.cli import options
from sharesd.cli.console import console, err_console, loading_bars
from sharesd.cli.options import MIXING
from sharesd.config import FEWEST_CONTEXT, EngineConfig, Mode, SamplingParams
from sharesd.config import MODES as ALL_MODES

if TYPE_CHECKING:
    from benchmark.studies.interleave import Comparison

MODES = tuple(mode for mode in ALL_MODES if mode != "naive")
NUM_QUESTIONS, MAX_NEW_TOKENS, RUNS = 4, 64, 5
LEAST_SPEEDUP = 0.98
"""Below this a cell counts as lost."""
LEAST_OF_BEST = 0.99
"""The share of the best single drafter's speed that hybrid shall have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A mode at a point of the grid. A turn is a group of rows that were decoded together."""

    context: int
    """Tokens of a prompt, about."""
    batch: int
    """Rows."""
    temperature: float
    mode: str
    speedup: float | None
    """Geometric mean of the turns' speedups; None where nothing was decoded."""
    slowest: float | None
    """The least of the turns' speedups."""
    first: float | None
    """Geometric mean of the first runs alone: in later ones the policy comes from the same text."""
    tau: float
    """Mean tokens per round of a row."""
    draft_share: float
    """Share of the decoding time that drafting took."""
    identical: bool
    """All tokens are those of naive."""
    naive_ms: float | None
    """Milliseconds of naive per decoded token, all rows together."""
    spread: float | None
    """Median over the turns of how far their runs lie apart: largest less smallest ratio, over their median."""
    turns: list[dict[str, Any]]
    """Of each: question_ids, prompt_tokens, decoded_tokens, ratios of the runs in their order, speedup (their
    median)."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "grid",
        help="where does a mode lose, over contexts, batches and temperatures?",
        description="Measure modes against naive at every context, batch and temperature. The exit status is 1 if a "
        "text differs from that of naive.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("grid")
    group.add_argument(
        "--modes",
        dest="mode",
        default="all",
        metavar="LIST",
        help=f"what is measured against naive, with commas; all: {', '.join(MODES)} (of heads those that there are)",
    )
    group.add_argument(
        "--contexts", type=arguments.numbers, default="200,2000,6000", metavar="LIST", help="tokens of prompts"
    )
    group.add_argument("--batches", type=arguments.numbers, default="1,4,8", metavar="LIST", help="sequences at once")
    group.add_argument("--temperatures", default="0,1", metavar="LIST", help="0 = greedy")
    group.add_argument("--seed", type=int, default=1, help="seed of the noise, above temperature 0")
    group.add_argument("--runs", type=arguments.number, default=RUNS, metavar="R", help="of which medians are taken")
    group.add_argument("--questions", metavar="FILE", help="JSON Lines, perhaps gzipped (default: ShareSD's own)")
    group.add_argument(
        "--num-questions",
        type=arguments.number,
        default=NUM_QUESTIONS,
        metavar="N",
        help="first turns of N questions at least; a batch of more rows asks a question in each",
    )
    group.add_argument(
        "--filler",
        metavar="FILE",
        help="text, or JSON Lines of texts, for documents, behind the texts of the other questions (default: Python's "
        "manual)",
    )
    group.add_argument(
        "--max-new-tokens", type=arguments.number, default=MAX_NEW_TOKENS, metavar="M", help="tokens per answer at most"
    )
    group.add_argument(
        "--busy", type=arguments.number, default=argparse.SUPPRESS, metavar="N", help="processes that keep a core busy"
    )
    arguments.add_out_dir(group, "grid")


def run(args: argparse.Namespace) -> int:
    """Measure the grid; grid.json grows with every cell. Returns 0, or 1 if a text differs from that of naive."""
    modes = tuple(mode for mode in options.modes_of(args, default=MODES) if mode != "naive")
    if not modes:
        raise ValueError("--modes is naive alone, which is what the others are measured against; add another mode")
    given = None if args.max_context == "auto" else args.max_context
    plain = argparse.Namespace(**{**vars(args), "max_context": given or FEWEST_CONTEXT})
    config = options.engine_config(plain, modes=modes)
    samplings = [
        SamplingParams(temperature=temperature, seed=args.seed, max_new_tokens=args.max_new_tokens)
        for temperature in arguments.each("--temperatures", _temperature, args.temperatures)
    ]
    found = question_files.load("mtbench", args.questions)
    asked = {batch: -(-args.num_questions // batch) * batch for batch in args.batches}
    most = max(asked.values())
    if most >= len(found.questions):
        raise ValueError(
            f"{most} questions are asked of the {len(found.questions)} of {found.label}, and warming up takes another; "
            "lower --num-questions or --batches"
        )
    questions = [replace(question, turns=question.turns[:1]) for question in found.questions]
    out_dir = arguments.out_folder(args.out_dir, "grid")
    prompts, others = _prompts(config, questions, most, args.contexts, args.filler)
    needed = args.max_new_tokens + max(len(prompt) for group in prompts.values() for prompt in group)
    if given is not None and given < needed:
        raise ValueError(f"--max-context is {given} and {needed} are needed; drop it or raise it")
    config = replace(config, max_context=given or needed)
    cells: list[Cell] = []
    report: dict[str, Any] = {}
    for batch, num_asked in asked.items():
        here = replace(config, max_batch=batch)
        ids = [question.id for question in questions[:num_asked]]
        asking = {context: group[:num_asked] for context, group in prompts.items()}
        for new in measure(here, modes, samplings, ids, asking, others, runs=args.runs, busy=_busy(args)):
            cells += new
            err_console.print(_line(new), highlight=False, soft_wrap=True)
            report = report or _report(args, config, modes, found.label)
            complete = len(cells) == len(asked) * len(samplings) * len(args.contexts) * len(modes)
            verdict = {"complete": complete, "verdict": verdict_of(cells)}
            write_json(out_dir / "grid.json", {**report, **verdict, "cells": [asdict(cell) for cell in cells]})
    for part in _tables(cells):
        console.print(part)
    for line in filter(None, (tables_from(report["settings"]), *verdict_of(cells))):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"details: {out_dir / 'grid.json'}", markup=False, highlight=False, soft_wrap=True)
    return 0 if all(cell.identical for cell in cells) else 1


def measure(
    config: EngineConfig,
    modes: Sequence[Mode],
    samplings: Sequence[SamplingParams],
    question_ids: Sequence[str | int],
    prompts: Mapping[int, Sequence[list[int]]],
    others: Sequence[list[int]],
    *,
    runs: int,
    busy: int = 0,
) -> Iterator[list[Cell]]:
    """The cells of one batch size, a list (by mode) for each context and temperature.

    `prompts` are token ids by context, in the order of `question_ids`; `others` are prompts to warm up with.
    """
    from benchmark.studies.interleave import compare_modes
    from sharesd.engine.warmup import warm_up
    from sharesd.runtime import Runtime  # torch takes seconds, mistakes should not

    with loading_bars() as progress:
        runtime = Runtime(config, modes, progress=progress)
    if runtime.max_context < config.planned_context:
        raise ValueError(
            f"prompts and answers take up to {config.max_context} tokens and the model's context is "
            f"{runtime.max_context}; lower --contexts"
        )
    rows = [others[row % len(others)] for row in range(config.max_batch)]
    naive, engines = runtime.plain_beside(), {}
    for params in samplings:
        warm_up(naive, params)
        for mode in modes:
            with err_console.status(f"warming up {mode}, {config.max_batch} rows"):
                engines[mode] = runtime.engine(mode, warm=params)  # one for all ways of sampling
                engines[mode].generate(rows, params)
    for context, asked in prompts.items():
        found: list[list[tuple[dict[str, Any], dict[Mode, Comparison]]]] = [[] for _ in samplings]
        with busy_neighbours(busy):
            for first in range(0, len(asked), config.max_batch):
                group = slice(first, first + config.max_batch)
                about = {"question_ids": list(question_ids[group]), "prompt_tokens": list(map(len, asked[group]))}
                for params, turns in zip(samplings, found, strict=True):
                    turns.append((about, compare_modes(naive, engines, asked[group], params, runs=runs)))
        for params, turns in zip(samplings, found, strict=True):
            yield [
                cell_of(context, config.max_batch, params.temperature, mode, [(a, by[mode]) for a, by in turns])
                for mode in modes
            ]


def cell_of(
    context: int, batch: int, temperature: float, mode: str, turns: Sequence[tuple[dict[str, Any], Comparison]]
) -> Cell:
    """A mode's figures over the turns of a cell, each with what is known about it."""
    comparisons = [comparison for _, comparison in turns]
    known = [comparison.speedup for comparison in comparisons if comparison.speedup is not None]
    first = [each.ratios[0] for each in comparisons if each.ratios]
    decode_s, rounds = (sum(getattr(each.stats, name) for each in comparisons) for name in ("decode_s", "rounds"))
    naive_s = [seconds for each in comparisons for seconds in each.naive_s]
    spreads = [(max(each.ratios) - min(each.ratios)) / median(each.ratios) for each in comparisons if each.ratios]
    return Cell(
        context=context,
        batch=batch,
        temperature=temperature,
        mode=mode,
        speedup=geometric_mean(known) if known else None,
        slowest=min(known, default=None),
        first=geometric_mean(first) if first else None,
        tau=sum(each.stats.decoded_tokens for each in comparisons) / rounds if rounds else 0.0,
        draft_share=sum(each.stats.draft_s for each in comparisons) / decode_s if decode_s else 0.0,
        identical=all(each.identical for each in comparisons),
        naive_ms=1e3 * median(naive_s) if naive_s else None,
        spread=median(spreads) if spreads else None,
        turns=[
            {**about, "decoded_tokens": each.stats.decoded_tokens, "ratios": each.ratios, "speedup": each.speedup}
            for about, each in turns
        ],
    )


def verdict_of(cells: Sequence[Cell]) -> list[str]:
    """What the grid was measured for, in a line each."""
    known = [(cell, cell.speedup) for cell in cells if cell.speedup is not None]
    lost = [_place(cell) for cell, speedup in known if speedup < LEAST_SPEEDUP]
    lines = [f"{len(lost)} of {len(known)} cells below {LEAST_SPEEDUP}x{': ' if lost else ''}{'; '.join(lost)}"]
    points: dict[tuple, dict[str, float]] = {}
    for cell, speedup in known:
        points.setdefault((cell.context, cell.batch, cell.temperature), {})[cell.mode] = speedup
    for chooser in MIXING:
        shares = {
            point: by_mode[chooser] / max(single)
            for point, by_mode in points.items()
            if chooser in by_mode and (single := [by_mode[mode] for mode in by_mode if mode not in MIXING])
        }
        if not shares:
            continue
        behind = [
            f"{context} tokens B={batch} T={temperature:g}: {share:.2f}"
            for (context, batch, temperature), share in shares.items()
            if share < LEAST_OF_BEST
        ]
        lines.append(
            f"{chooser} below {LEAST_OF_BEST} of the best single drafter at {len(behind)} of {len(shares)} points"
            f"{': ' if behind else ''}{'; '.join(behind)}"
        )
    differing = [_place(cell) for cell in cells if not cell.identical]
    lines.append(f"text differs from naive: {'; '.join(differing)}" if differing else "all texts identical")
    return lines


def _place(cell: Cell) -> str:
    return f"{cell.mode} {cell.context} tokens B={cell.batch} T={cell.temperature:g}: {times(cell.speedup)}"


def _prompts(
    config: EngineConfig,
    questions: Sequence[Question],
    num_asked: int,
    contexts: Sequence[int],
    filler: str | None,
) -> tuple[dict[int, list[list[int]]], list[list[int]]]:
    """Prompts of the questions that are asked, by context; and those of the others, as they are."""
    from benchmark.questions.conversation import prompt_ids
    from benchmark.studies.contexts import Documents, filler_texts
    from sharesd.models.hub import resolve
    from sharesd.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve(config.target))
    asked, others = questions[:num_asked], questions[num_asked:]
    documents = Documents(tokenizer, [*(question.turns[0] for question in others), *filler_texts(filler)])
    found = {context: [documents.prompt(question, context) for question in asked] for context in contexts}
    return found, [prompt_ids(tokenizer, question, []) for question in others]


def _tables(cells: Sequence[Cell]) -> Iterator[Any]:
    """The speedups of all modes; then what else is known about each cell."""
    modes = list(dict.fromkeys(cell.mode for cell in cells))
    points: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell in cells:
        point = (str(cell.context), str(cell.batch), f"{cell.temperature:g}")
        points.setdefault(point, {})[cell.mode] = cell
    head = ("context", "B", "T")

    def filled(show: Callable[[Cell], str]) -> list[list[str]]:
        return [[*point, *(show(by_mode[mode]) for mode in modes)] for point, by_mode in points.items()]

    yield rich_table(f"speedup over naive (* below {LEAST_SPEEDUP}x)", (*head, *modes), filled(_speedup), left=0)
    yield rich_table("slowest turn", (*head, *modes), filled(lambda cell: times(cell.slowest)), left=0)
    yield rich_table("first runs", (*head, *modes), filled(lambda cell: times(cell.first)), left=0)
    yield rich_table("tokens per round", (*head, *modes), filled(lambda cell: number(cell.tau, 2)), left=0)
    yield rich_table("share of drafting", (*head, *modes), filled(lambda cell: percent(cell.draft_share)), left=0)


def _speedup(cell: Cell) -> str:
    lost = cell.speedup is not None and cell.speedup < LEAST_SPEEDUP
    return times(cell.speedup) + ("*" if lost else " ")


def _line(cells: Sequence[Cell]) -> str:
    """A point of the grid, as soon as it is measured."""
    first = cells[0]
    speedups = "  ".join(f"{cell.mode} {times(cell.speedup)}" for cell in cells)
    spread = percent(median([cell.spread for cell in cells if cell.spread is not None] or [0.0]))
    where = f"{first.context} tokens, B={first.batch}, T={first.temperature:g}"
    return f"{where}: naive {number(first.naive_ms, 2)} ms/token (runs apart {spread})  {speedups}"


def _report(args: argparse.Namespace, config: EngineConfig, modes: Sequence[Mode], label: str) -> dict[str, Any]:
    from benchmark.environment import environment
    from sharesd.devices.selection import device_of

    device = str(device_of(config.device))
    return {
        "settings": {
            "command": arguments.command(),
            "model": model_name(config.target),
            "draft": config.draft,
            "modes": list(modes),
            "hybrid_with": list(config.drafters_of("hybrid")),
            "corpus": config.corpus_file.name if config.corpus_file else "empty",
            "recycle_table": config.table_file.name if config.table_file else "empty",
            "contexts": list(args.contexts),
            "batches": list(args.batches),
            "temperatures": args.temperatures,
            "seed": args.seed,
            "runs": args.runs,
            "questions": label,
            "num_questions": args.num_questions,
            "filler": args.filler or "Python's manual",
            "max_new_tokens": args.max_new_tokens,
            "max_context": config.max_context,
            "num_draft": config.num_draft or "auto",
            "max_draft": config.most_draft,
            "dtype": config.dtype,
            "device": device,
            "quant": str(config.quant),
            "compile": config.compile,
            "busy_neighbours": _busy(args),
        },
        "left_out": "loading, warming up, reading prompts (KV of a group's prompts is read once), and the first token "
        "of each answer, which reading the prompt gives",
        "environment": environment(device),
    }


def _busy(args: argparse.Namespace) -> int:
    return getattr(args, "busy", 0)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"--temperatures holds {text!r}; give numbers such as 0,1") from None
    SamplingParams(temperature=value)
    return value
