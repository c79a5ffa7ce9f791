"""What can be seen while a measurement runs. Drawn between turns only: nothing moves while something is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmark import summary
from benchmark.questions import Question
from benchmark.records import Key, TurnRecord
from benchmark.text import number
from sharesd.console import err_console


class Display:
    """A bar per mode with its speed so far; off a terminal, a line per question instead."""

    def __init__(
        self, done: Mapping[str, Mapping[Key, TurnRecord]], *, num_questions: int, num_turns: int, runs: int
    ) -> None:
        """`done` is looked at after every turn; `num_turns` is that of one mode over all runs."""
        self._done, self._num_questions, self._runs = done, num_questions, runs
        self._bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
            console=err_console,
            auto_refresh=False,
            transient=True,
            disable=not err_console.is_terminal,
        )
        self._tasks = {mode: self._bars.add_task(mode, total=num_turns, now="") for mode in done}
        for mode in done:
            self._show(mode)

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def starts(self, mode: str, run: int, index: int, question: Question, turn: int) -> None:
        """Point at the turn that is about to be measured."""
        where = f"question {index + 1}/{self._num_questions} {question.category}, turn {turn}"
        self._show(mode, f"{where}, run {run}/{self._runs}" if self._runs > 1 else where)
        self._bars.refresh()

    def finished(self, mode: str) -> None:
        """Count a turn."""
        self._show(mode)

    def answered(self, run: int, index: int, question: Question) -> None:
        """Without a terminal: say how far it is."""
        if err_console.is_terminal:
            self._bars.refresh()
            return
        prefix = f"run {run}/{self._runs}, " if self._runs > 1 else ""
        speeds = "  ".join(f"{mode} {self._figures(mode)}" for mode in self._tasks)
        where = f"{prefix}question {index + 1}/{self._num_questions} {question.category}"
        err_console.print(f"{where}: {speeds}", highlight=False, soft_wrap=True)

    def _show(self, mode: str, where: str = "") -> None:
        now = f"{self._figures(mode)}  {where}" if self._done[mode] else where
        self._bars.update(self._tasks[mode], completed=len(self._done[mode]), now=now)

    def _figures(self, mode: str) -> str:
        turns: Sequence[TurnRecord] = list(self._done[mode].values())
        return f"{number(summary.tokens_per_second(turns))} tok/s, tau {number(summary.tau(turns), 2)}"
