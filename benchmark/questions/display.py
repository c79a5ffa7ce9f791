"""What can be seen while a measurement runs. Drawn between turns only: nothing moves while something is timed."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from benchmark.questions.questions import Question
from benchmark.questions.records import Key, TurnRecord
from benchmark.reports import summary
from benchmark.reports.text import duration, number
from sharesd.cli.console import err_console


class Display:
    """A bar per mode with its speed so far, and where the measurement is; off a terminal, a line per question."""

    def __init__(
        self, done: Mapping[str, Mapping[Key, TurnRecord]], *, num_questions: int, num_turns: int, runs: int
    ) -> None:
        """`done` is looked at after every turn; `num_turns` is that of one mode over all runs."""
        self._done, self._num_questions, self._num_turns, self._runs = done, num_questions, num_turns, runs
        self._bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
        )
        self._tasks = {mode: self._bars.add_task(mode, total=num_turns, speed="") for mode in done}
        self._where = Text(style="dim")
        self._live = Live(Group(self._bars, self._where), console=err_console, auto_refresh=False, transient=True)
        self._started, self._num_before = time.monotonic(), self._num_done()

    def __enter__(self) -> Display:
        if err_console.is_terminal:
            for mode in self._tasks:
                self.finished(mode)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def starts(self, mode: str, run: int, index: int, question: Question, turn: int) -> None:
        """Point at the turn that is about to be measured."""
        if err_console.is_terminal:
            where = f"{self._place(run, index, question)}, turn {turn}, {mode}"
            self._where.plain = f"{where}   {self._times()}"
            self._live.refresh()

    def finished(self, mode: str) -> None:
        """Count a turn."""
        self._bars.update(self._tasks[mode], completed=len(self._done[mode]), speed=self._speed(mode))

    def answered(self, run: int, index: int, question: Question) -> None:
        """Without a terminal: say how far it is."""
        if not err_console.is_terminal:
            speeds = "  ".join(f"{mode} {self._speed(mode)}" for mode in self._tasks)
            line = f"{self._place(run, index, question)}: {speeds}"
            err_console.print(line, highlight=False, soft_wrap=True)

    def _place(self, run: int, index: int, question: Question) -> str:
        where = f"question {index + 1}/{self._num_questions} {question.category}"
        return f"run {run}/{self._runs}, {where}" if self._runs > 1 else where

    def _speed(self, mode: str) -> str:
        turns = self._done[mode].values()
        return f"{number(summary.tokens_per_second(turns))} tok/s, tau {number(summary.tau(turns), 2)}" if turns else ""

    def _times(self) -> str:
        """Time passed, and the time left if all turns take what those of this session took."""
        passed, measured = time.monotonic() - self._started, self._num_done() - self._num_before
        left = self._num_turns * len(self._done) - self._num_done()
        return duration(passed) + (f", about {duration(passed / measured * left)} left" if measured else "")

    def _num_done(self) -> int:
        return sum(map(len, self._done.values()))
