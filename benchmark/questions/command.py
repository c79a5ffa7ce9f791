"""`mtbench`, `gsm8k`, `humaneval`: questions answered in several modes, with a report."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from benchmark.questions import records
from benchmark.questions.job import ALL, NUM_QUESTIONS, job_of, previous_state
from benchmark.questions.records import Key, TurnRecord
from sharesd.cli import options
from sharesd.cli.console import err_console

HELP = {
    "mtbench": "two-turn questions: ShareSD's own, or MT-Bench's with --questions question.jsonl",
    "gsm8k": "grade-school mathematics",
    "humaneval": "Python functions",
}


def add_parser(subparsers: Any) -> None:
    """Add a subcommand for each set of questions."""
    for name, text in HELP.items():
        parser = subparsers.add_parser(name, help=text, description=f"Measure decoding speed on {text}.")
        parser.set_defaults(run=run, parser=parser, benchmark=name)
        group = parser.add_argument_group("measurement")
        options.add_mode_option(group, several=True)
        source = "ShareSD's own" if name == "mtbench" else "the Hugging Face hub"
        group.add_argument("--questions", metavar="FILE", help=f"JSON Lines, perhaps gzipped (default: {source})")
        group.add_argument(
            "--num-questions",
            type=_num_questions,
            default=argparse.SUPPRESS,
            metavar="N",
            help=f"the first N questions, or {ALL} (default: {NUM_QUESTIONS})",
        )
        group.add_argument("--runs", type=_count, default=1, metavar="R", help="measure R times; report the median")
        group.add_argument("--out-dir", metavar="DIR", help=f"where results go (default: results/{name}-DATE-TIME)")
        group.add_argument("--log-dir", metavar="DIR", help="also write a log file into this folder")
        options.add_replicas_option(group)
        group.add_argument("--resume", action="store_true", help="continue the measurement in --out-dir")
        options.add_model_options(parser)
        options.add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure what is missing, then write the report; returns the exit status, 130 after Ctrl-C or SIGTERM."""
    job = job_of(args)
    state = previous_state(job) if job.resume else None
    done: dict[str, dict[Key, TurnRecord]] = {
        mode: records.read(job.out_dir, mode) if job.resume else {} for mode in job.modes
    }
    with _stoppable():
        from benchmark.questions.replicas import measure_on_replicas
        from benchmark.questions.session import measure_session
        from benchmark.reports.results import write_results  # torch takes seconds, mistakes should not

        missing = sum(key not in found for found in done.values() for key in job.keys)
        interrupted = False
        if state is None or missing:
            state, interrupted = (measure_on_replicas if job.places else measure_session)(job, state, done)
        else:
            err_console.print("nothing is missing: only the report is written again", highlight=False)
        if state is not None and any(done.values()):
            write_results(job, state, done)
    if interrupted:
        err_console.print(
            f"interrupted; to continue, add --resume --out-dir {job.out_dir}", highlight=False, soft_wrap=True
        )
    return 130 if interrupted else 0


@contextmanager
def _stoppable() -> Iterator[None]:
    """A polite kill is a Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _num_questions(text: str) -> int | None:
    return None if text == ALL else _count(text)
