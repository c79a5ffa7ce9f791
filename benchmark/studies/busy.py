"""`busy`: what is left of the speed beside processes that keep cores busy, by number of threads?

Every number of threads has a process of its own; `auto` leaves the number to the runtime. They answer each question one
after the other: alone on the machine, beside the busy neighbours, and alone again. So a process is compared with itself
and with the others within seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

from benchmark import arguments
from benchmark.arguments import rich_table
from benchmark.questions import questions as question_files
from benchmark.questions.job import model_name
from benchmark.questions.records import write_json
from benchmark.reports.text import number
from benchmark.studies.neighbours import busy_neighbours
from sharesd.cli import options
from sharesd.cli.console import console, err_console
from sharesd.config import MODES, EngineConfig, Mode, SamplingParams

AUTO = "auto"
NUM_QUESTIONS, MAX_NEW_TOKENS, RUNS = 2, 128, 5
LEAST_KEPT, LEAST_OF_BEST = 0.7, 0.9
"""Shares of its quiet speed, and of that of the best fixed number of threads, that `auto` shall have."""


class Answer(NamedTuple):
    """What a process says of a prompt."""

    token_ids: list[int]
    seconds: float
    """Per decoded token."""


@dataclass(kw_only=True, slots=True)
class Figures:
    """Seconds per decoded token with one number of threads, in the order of runs and questions."""

    threads: str
    """The number, or `auto`."""
    quiet: list[float] = field(default_factory=list)
    """The mean of the two answers around the busy one."""
    busy: list[float] = field(default_factory=list)

    @property
    def kept(self) -> float:
        """Share of the quiet speed that is left beside the neighbours: the median of the answers."""
        return median(quiet / busy for quiet, busy in zip(self.quiet, self.busy, strict=True))


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "busy",
        help="what is left of the speed beside a busy process, by number of threads?",
        description="Measure a mode alone and beside busy processes, with several numbers of threads. The exit status "
        "is 1 if their texts differ.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("busy neighbours")
    group.add_argument("--mode", choices=MODES, default="naive", help="what is measured")
    group.add_argument(
        "--busy", type=arguments.number, default=1, metavar="N", help="processes that each keep a core busy"
    )
    group.add_argument(
        "--compare", default=f"{AUTO},1,2", metavar="LIST", help=f"numbers of threads; {AUTO}: what the runtime takes"
    )
    group.add_argument("--questions", metavar="FILE", help="JSON Lines, perhaps gzipped (default: ShareSD's own)")
    group.add_argument(
        "--num-questions", type=arguments.number, default=NUM_QUESTIONS, metavar="N", help="first turns of N questions"
    )
    group.add_argument(
        "--max-new-tokens", type=arguments.number, default=MAX_NEW_TOKENS, metavar="M", help="tokens per answer"
    )
    group.add_argument("--runs", type=arguments.number, default=RUNS, metavar="R", help="of which medians are taken")
    arguments.add_out_dir(group, "busy")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write busy.json; returns 0, or 1 if texts differ."""
    mode: Mode = args.mode
    config = options.engine_config(args, modes=(mode,))
    config = replace(config, max_context=config.planned_context)  # in all processes alike
    if args.max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}; decoding can be timed from 2 on")
    params = SamplingParams(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    numbers = arguments.each("--compare", _threads, args.compare)
    found = question_files.load("mtbench", args.questions, args.num_questions)
    out_dir = arguments.out_folder(args.out_dir, "busy")

    from benchmark.questions.conversation import prompt_ids, require_room
    from sharesd.models.hub import resolve
    from sharesd.models.tokenizer import load_tokenizer  # takes a second, mistakes should not

    questions = [replace(question, turns=question.turns[:1]) for question in found.questions]
    tokenizer = load_tokenizer(resolve(config.target))
    require_room(tokenizer, questions, max_new_tokens=args.max_new_tokens, max_context=config.planned_context)
    prompts = [prompt_ids(tokenizer, question, []) for question in questions]
    with (
        err_console.status("loading a process for each number of threads"),
        _processes(config, numbers, params) as all_,
    ):
        figures, identical = measure(all_, prompts, runs=args.runs, num_busy=args.busy)
    verdict = verdict_of(figures, identical)
    write_json(out_dir / "busy.json", _report(args, config, found.label, figures, identical, verdict))
    console.print(_table(figures, args.busy))
    for line in verdict:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"details: {out_dir / 'busy.json'}", markup=False, highlight=False, soft_wrap=True)
    return 0 if identical else 1


def measure(
    processes: Mapping[str, Connection], prompts: Sequence[list[int]], *, runs: int, num_busy: int
) -> tuple[list[Figures], bool]:
    """Figures by number of threads, and whether all texts were the same."""
    figures = {name: Figures(threads=name) for name in processes}
    identical = True
    for turn in range(runs * len(prompts)):
        prompt = prompts[turn % len(prompts)]
        names = list(processes)
        names = names[turn % len(names) :] + names[: turn % len(names)]

        def answers(names: Sequence[str] = names, prompt: list[int] = prompt) -> dict[str, Answer]:
            return {name: _ask(name, processes[name], prompt) for name in names}

        before = answers()
        with busy_neighbours(num_busy):
            beside = answers()
        after = answers()
        texts = [answer.token_ids for phase in (before, beside, after) for answer in phase.values()]
        identical &= all(text == texts[0] for text in texts)
        for name in names:
            figures[name].quiet.append((before[name].seconds + after[name].seconds) / 2)
            figures[name].busy.append(beside[name].seconds)
    return list(figures.values()), identical


def verdict_of(figures: Sequence[Figures], identical: bool) -> list[str]:
    """What was measured, in a line each."""
    lines = [f"{_named(each)}: {each.kept:.2f} of its quiet speed is left" for each in figures]
    auto = next((each for each in figures if each.threads == AUTO), None)
    fixed = [each for each in figures if each is not auto]
    if auto is not None:
        lines = [f"{_named(auto)}: {auto.kept:.2f} of its quiet speed is left (wanted: {LEAST_KEPT})"]
        for when in ("quiet", "busy"):
            if fixed:
                best = min(fixed, key=lambda each: median(getattr(each, when)))
                pairs = zip(getattr(best, when), getattr(auto, when), strict=True)
                share = median(theirs / ours for theirs, ours in pairs)
                wanted = f"{share:.2f} of the best fixed number, {_named(best)} (wanted: {LEAST_OF_BEST})"
                lines.append(f"{_named(auto)}, {when}: {wanted}")
    return [*lines, "all texts identical" if identical else "texts differ between numbers of threads"]


@contextmanager
def _processes(config: EngineConfig, numbers: Sequence[str], params: SamplingParams) -> Iterator[dict[str, Connection]]:
    """A warm engine in a process for each number of threads; all of them are gone when this ends."""
    context = multiprocessing.get_context("spawn")
    started, pipes = [], {}
    try:
        for name in numbers:
            pipes[name], theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, config, name, params), daemon=True)
            process.start()
            started.append(process)
            theirs.close()
            _receive(name, pipes[name])
        yield pipes
    finally:
        for process in started:
            process.kill()
            process.join()


def _serve(pipe: Connection, config: EngineConfig, threads: str, params: SamplingParams) -> None:
    """Answer prompts with this number of threads until the pipe is closed."""

    from sharesd.runtime import Runtime

    config = replace(config, threads=None if threads == AUTO else int(threads))
    try:
        engine = Runtime(config).engine(warm=params)
        engine.generate([[1]], params)
        pipe.send(None)
        while True:
            [completion] = engine.generate([pipe.recv()], params)
            pipe.send(Answer(completion.token_ids, engine.stats.decode_s / engine.stats.decoded_tokens))
    except EOFError:
        return
    except ValueError as error:
        pipe.send(error)


def _ask(name: str, pipe: Connection, prompt: list[int]) -> Answer:
    pipe.send(prompt)
    return _receive(name, pipe)


def _receive(name: str, pipe: Connection) -> Any:
    """What the process says; ValueError if it complains or has ended."""
    try:
        said = pipe.recv()
    except EOFError:
        raise ValueError(f"the process with --threads {name} ended; what it says on stderr tells why") from None
    if isinstance(said, ValueError):
        raise said
    return said


def _threads(text: str) -> str:
    if text != AUTO and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"--compare holds {text!r}; give whole numbers from 1 on, or {AUTO}")
    return text


def _named(figures: Figures) -> str:
    return figures.threads if figures.threads == AUTO else f"{figures.threads} thread{'s' * (figures.threads != '1')}"


def _table(figures: Sequence[Figures], num_busy: int) -> Any:
    rows = [
        [each.threads, number(1 / median(each.quiet)), number(1 / median(each.busy)), f"{each.kept:.2f}"]
        for each in figures
    ]
    return rich_table(
        f"speed beside {num_busy} busy process{'es' * (num_busy > 1)}",
        ("threads", "quiet tok/s", "busy tok/s", "kept"),
        rows,
    )


def _report(
    args: argparse.Namespace,
    config: EngineConfig,
    questions: str,
    figures: Sequence[Figures],
    identical: bool,
    verdict: list[str],
) -> dict[str, Any]:
    from benchmark.environment import environment
    from sharesd.devices.selection import device_of

    device = str(device_of(config.device))
    return {
        "settings": {
            "command": arguments.command(),
            "model": model_name(config.target),
            "mode": args.mode,
            "busy_neighbours": args.busy,
            "threads": args.compare,
            "questions": questions,
            "num_questions": args.num_questions,
            "max_new_tokens": args.max_new_tokens,
            "runs": args.runs,
            "dtype": config.dtype,
            "device": device,
            "compile": config.compile,
        },
        "left_out": "loading, warming up, reading prompts, and the first token of each answer",
        "environment": environment(device),
        "verdict": verdict,
        "identical": identical,
        "figures": [{**asdict(each), "kept": each.kept} for each in figures],
    }
