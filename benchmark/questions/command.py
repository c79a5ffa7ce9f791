"""Commands `mtbench`, `gsm8k` and `humaneval`."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from benchmark import arguments
from benchmark.questions import records
from benchmark.questions.records import Key, TurnRecord
from benchmark.questions.results import write_results
from benchmark.questions.run_config import add_question_options, previous_state, run_config
from sharesd.cli import options
from sharesd.cli.console import err_console, print_line

HELP = {
    "mtbench": "two-turn questions: ShareSD's own, or MT-Bench's with --questions question.jsonl",
    "gsm8k": "grade-school mathematics",
    "humaneval": "Python functions",
}


def add_parser(subparsers: Any) -> None:
    for name, text in HELP.items():
        parser = subparsers.add_parser(name, help=text, description=f"Measure decoding speed on {text}.")
        parser.set_defaults(run=run, parser=parser, benchmark=name)
        group = parser.add_argument_group("measurement")
        options.add_mode_option(group, several=True)
        add_question_options(group, "ShareSD's own" if name == "mtbench" else "the Hugging Face hub")
        text = "measure R times; report median and range"
        group.add_argument("--runs", type=arguments.number, default=1, metavar="R", help=text)
        arguments.add_out_dir(group, name)
        group.add_argument("--log-dir", metavar="DIR", help="also write a log file into this folder")
        options.add_replicas_option(group)
        options.add_trace_option(group)
        group.add_argument("--resume", action="store_true", help="continue the measurement in --out-dir")
        options.add_model_options(parser)
        options.add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure missing turns, write the report; return 130 if interrupted, else 0."""
    config = run_config(args)
    state = previous_state(config) if config.resume else None
    done: dict[str, dict[Key, TurnRecord]] = {
        mode: records.read(config.out_dir, mode) if config.resume else {} for mode in config.modes
    }
    with _stoppable():
        from benchmark.questions.session import measure_here, measure_on_replicas

        interrupted = False
        if state is None or any(key not in found for found in done.values() for key in config.keys):
            measure = measure_on_replicas if config.replicas else measure_here
            state, interrupted = measure(config, state, done)
        else:
            err_console.print("nothing is left to measure; only the report is written again", highlight=False)
        if state is not None and any(done.values()):
            write_results(config, state, done)
    if interrupted:
        hint = f"interrupted; to continue, add --resume --out-dir {config.out_dir}"
        print_line(hint, err_console)
    return 130 if interrupted else 0


@contextmanager
def _stoppable() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, inside the context."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
