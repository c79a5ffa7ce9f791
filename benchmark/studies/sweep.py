"""`sweep`: how fast is a mode over a grid of one or two of its settings?

Every point of the grid has a runtime of its own, in which the mode and `naive` answer each question right after each
other: a point's speedup is over the `naive` of the same minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark import arguments
from benchmark.arguments import rich_table
from benchmark.questions import questions as question_files
from benchmark.questions.job import model_name
from benchmark.questions.questions import Question
from benchmark.questions.records import write_json
from benchmark.reports.text import number, times
from benchmark.studies.calibrate import take_turns
from sharesd.cli import options
from sharesd.cli.console import console, err_console, loading_bars
from sharesd.cli.pictures import can_draw
from sharesd.config import EngineConfig, Mode, SamplingParams
from sharesd.models.progress import Progress, silent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_QUESTIONS, MAX_NEW_TOKENS = 8, 96
FIELDS = {"K": "num_draft", "max-draft": "max_draft", "ngram-min": "ngram_min", "ngram-max": "ngram_max"}
"""What can be swept -> its field of EngineConfig."""
TREE_PARTS = {"tree-top": 0, "tree-depth": 1, "tree-budget": 2}
"""What can be swept -> its place in EngineConfig.tree."""
MODES = ("ngram", "suffix", "share", "hybrid")
Axis = tuple[str, tuple[int, ...]]
"""Name of a setting and its values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A point of the grid."""

    values: dict[str, int]
    """Setting -> value."""
    tokens_per_second: float
    naive_tokens_per_second: float
    """Of `naive`, measured in turns with it."""
    speedup: float | None
    """None where nothing was decoded."""
    tau: float
    """Mean tokens per round."""
    alpha: float
    """Probability that a draft token is accepted, given that those before it were."""
    identical: float
    """Share of questions with the tokens of `naive`."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "sweep",
        help="how fast is a mode over a grid of its settings?",
        description="Measure a mode over a grid of one or two settings, in turns with naive.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("sweep")
    group.add_argument("--mode", choices=MODES, required=True, help="what is measured")
    group.add_argument(
        "--over",
        type=_axis,
        action="append",
        required=True,
        metavar="NAME=LIST",
        help="a setting and its values, such as K=1,2,4 (draft tokens per round); max-draft: at most so many, where "
        "their number is chosen; ngram-min, ngram-max; tree-top, tree-depth, tree-budget: parts of --tree. Give it "
        "once or twice",
    )
    group.add_argument("--questions", metavar="FILE", help="JSON Lines, perhaps gzipped (default: ShareSD's own)")
    group.add_argument(
        "--num-questions", type=arguments.number, default=NUM_QUESTIONS, metavar="N", help="first turns of N questions"
    )
    group.add_argument(
        "--max-new-tokens", type=arguments.number, default=MAX_NEW_TOKENS, metavar="M", help="tokens per answer at most"
    )
    arguments.add_out_dir(group, "sweep")


def run(args: argparse.Namespace) -> int:
    """Measure the grid, print the table, write sweep.json and sweep.png; returns the exit status."""
    mode: Mode = args.mode
    axes: list[Axis] = args.over
    config = options.engine_config(args, modes=(mode,))
    configs = configs_of(config, axes)
    found = question_files.load("mtbench", args.questions, args.num_questions)
    questions = [replace(question, turns=question.turns[:1]) for question in found.questions]
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    out_dir = arguments.out_folder(args.out_dir, "sweep")
    cells: list[Cell] = []
    with loading_bars() as progress:
        for values, here in configs:
            progress("measuring the grid", len(cells), len(configs))
            cells.append(measure(here, mode, values, questions, params, progress=progress))
    report = _report(args, config, found.label, axes, cells)
    write_json(out_dir / "sweep.json", report)
    title = f"{mode} on {found.label}, {report['settings']['model']}"
    drawn = can_draw("sweep.png")
    if drawn:
        draw(out_dir / "sweep.png", title, mode, axes, cells)
    console.print(_table(mode, axes, cells))
    for cell in cells:
        if cell.identical < 1:
            err_console.print(f"[bold red]{_label(cell.values)} did not give the tokens of naive everywhere[/]")
    written = f"picture: {out_dir / 'sweep.png'}" if drawn else f"figures: {out_dir / 'sweep.json'}"
    console.print(written, markup=False, highlight=False, soft_wrap=True)
    return 0


def configs_of(config: EngineConfig, axes: Sequence[Axis]) -> list[tuple[dict[str, int], EngineConfig]]:
    """The points of the grid and their configs. ValueError for axes that do not belong together, or to the mode.

    Points whose shortest match would be longer than the longest are left out, which a line on stderr says.
    """
    names = [name for name, _ in axes]
    if len(names) > 2 or len(set(names)) < len(names):
        raise ValueError(f"--over names {', '.join(names)}; give one setting, or two different ones")
    if {"K", "max-draft"} <= set(names):
        raise ValueError("--over names K, which fixes the number of draft tokens, and max-draft; drop one of the two")
    length = next((name for name in names if name in ("K", "max-draft")), None)
    if length and config.num_draft is not None:
        raise ValueError(
            f"--num-speculative-tokens is {config.num_draft} and --over names {length}; drop --num-speculative-tokens"
        )
    if config.given_tree is None and any(name in TREE_PARTS for name in names):
        raise ValueError(f"--over names {names[0]}, but there is no tree; give the other parts, such as --tree 2:4:8")
    tables = config.drafters_of(config.mode)
    ngram = next((name for name in names if name.startswith("ngram")), None)
    if ngram and "ngram" not in tables:
        raise ValueError(
            f"--over names {ngram}, but no ngram table drafts; use --mode ngram, or hybrid --hybrid-drafters ngram"
        )
    found: list[tuple[dict[str, int], EngineConfig]] = []
    left_out: list[str] = []
    for point in product(*(values for _, values in axes)):
        values = dict(zip(names, point, strict=True))
        shortest, longest = values.get("ngram-min", config.ngram_min), values.get("ngram-max", config.ngram_max)
        if shortest > longest:
            left_out.append(_label(values))
        else:
            fields: dict[str, Any] = {FIELDS[name]: value for name, value in values.items() if name in FIELDS}
            if config.given_tree is not None:
                top, depth, budget = (values.get(name, config.given_tree[place]) for name, place in TREE_PARTS.items())
                fields["tree"] = (top, depth, budget)
            found.append((values, replace(config, **fields)))
    if not found:
        raise ValueError("every point has ngram-min above ngram-max; lower --ngram-min or raise --ngram-max")
    if left_out:
        err_console.print(f"left out, with ngram-min above ngram-max: {'; '.join(left_out)}", highlight=False)
    return found


def measure(
    config: EngineConfig,
    mode: Mode,
    values: dict[str, int],
    questions: Sequence[Question],
    params: SamplingParams,
    *,
    progress: Progress = silent,
) -> Cell:
    """Load and measure a point; its model is gone when this returns."""
    from benchmark.questions.conversation import prompt_ids, require_room
    from sharesd.runtime import Runtime  # torch takes seconds, mistakes should not

    runtime = Runtime(config, ("naive", mode), progress=progress)
    require_room(runtime.tokenizer, questions, max_new_tokens=params.max_new_tokens, max_context=runtime.max_context)
    prompts = [prompt_ids(runtime.tokenizer, question, []) for question in questions]
    modes: tuple[Mode, ...] = ("naive", mode)
    engines: dict[str, Any] = {name: runtime.engine(name, warm=params) for name in modes}
    stats, num_identical = take_turns(engines, prompts, params)
    naive_speed = stats["naive"].tokens_per_second
    return Cell(
        values=values,
        tokens_per_second=stats[mode].tokens_per_second,
        naive_tokens_per_second=naive_speed,
        speedup=stats[mode].tokens_per_second / naive_speed if naive_speed else None,
        tau=stats[mode].tau,
        alpha=stats[mode].alpha,
        identical=num_identical / len(prompts),
    )


def draw(path: Path, title: str, mode: str, axes: Sequence[Axis], cells: Sequence[Cell]) -> None:
    """Write the picture as a whole: a line over one setting, a heat map over two."""
    from matplotlib.figure import Figure

    from benchmark.reports.plots import save_figure

    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    place = figure.add_subplot()
    place.set_title(f"Speedup over naive decoding\n{title}", fontsize=10)
    if len(axes) == 1:
        _line(place, mode, axes[0], cells)
    else:
        figure.colorbar(_heat_map(place, axes, cells), label="speedup")
    save_figure(path, figure)


def _line(place: Axes, mode: str, axis: Axis, cells: Sequence[Cell]) -> None:
    from benchmark.reports.plots import COLOURS

    name = axis[0]
    points = [(cell.values[name], cell.speedup) for cell in cells if cell.speedup is not None]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    place.plot(xs, ys, marker="o", color=COLOURS.get(mode, COLOURS["share"]))
    for x, y in points:
        place.annotate(f"{y:.2f}x", (x, y), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8)
    place.axhline(1, color=COLOURS["naive"], linewidth=0.8, linestyle="--")
    place.set_xticks(xs)
    place.set_xlabel(name)
    place.set_ylabel("speedup")
    place.margins(y=0.15)
    place.spines[["top", "right"]].set_visible(False)
    place.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    place.set_axisbelow(True)


def _heat_map(place: Axes, axes: Sequence[Axis], cells: Sequence[Cell]) -> Any:
    """The first setting goes down, the second across; points that were left out stay empty."""
    (down, rows), (across, columns) = axes
    speedups = {(cell.values[down], cell.values[across]): cell.speedup for cell in cells}
    grid = [[speedups.get((row, column)) for column in columns] for row in rows]
    known = [value for line in grid for value in line if value is not None]
    image = place.imshow([[float("nan") if value is None else value for value in line] for line in grid], aspect="auto")
    middle = (min(known) + max(known)) / 2 if known else 0.0
    for i, j in product(range(len(rows)), range(len(columns))):
        value = grid[i][j]
        if value is not None:
            colour = "white" if value < middle else "black"  # low values are dark
            place.text(j, i, f"{value:.2f}x", ha="center", va="center", color=colour, fontsize=8)
    place.set_xticks(range(len(columns)), [str(value) for value in columns])
    place.set_yticks(range(len(rows)), [str(value) for value in rows])
    place.set_xlabel(across)
    place.set_ylabel(down)
    return image


def _table(mode: str, axes: Sequence[Axis], cells: Sequence[Cell]) -> Any:
    head = (*(name for name, _ in axes), "tok/s", "naive tok/s", "speedup", "tau")
    best = max(cells, key=lambda cell: cell.speedup or 0.0)
    rows = [
        [
            *(str(value) for value in cell.values.values()),
            number(cell.tokens_per_second),
            number(cell.naive_tokens_per_second),
            times(cell.speedup) + (" *" if cell is best else "  "),
            number(cell.tau, 2),
        ]
        for cell in cells
    ]
    return rich_table(f"mode {mode} (* best)", head, rows, left=0)


def _report(
    args: argparse.Namespace, config: EngineConfig, questions: str, axes: Sequence[Axis], cells: Sequence[Cell]
) -> dict[str, Any]:
    from benchmark.environment import environment
    from sharesd.devices.selection import device_of

    device = str(device_of(config.device))
    return {
        "settings": {
            "command": arguments.command(),
            "model": model_name(config.target),
            "mode": args.mode,
            "over": {name: list(values) for name, values in axes},
            "questions": questions,
            "num_questions": args.num_questions,
            "max_new_tokens": args.max_new_tokens,
            "dtype": config.dtype,
            "device": device,
            "quant": str(config.quant),
            "compile": config.compile,
        },
        "environment": environment(device),
        "cells": [asdict(cell) for cell in cells],
    }


def _label(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _axis(text: str) -> Axis:
    """A type of argparse: NAME=LIST."""
    name, _, values = text.partition("=")
    known = (*FIELDS, *TREE_PARTS)
    if name not in known:
        raise argparse.ArgumentTypeError(f"{text!r} names none of {', '.join(known)}; write for example K=1,2,4")
    return name, arguments.numbers(values)
