"""The measuring loop: prompt by prompt, all ways of all runtimes right after each other, each time in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from benchmark.peers.process import PeerError
from benchmark.peers.protocol import Sample


@dataclass(slots=True)
class Row:
    """One way of one runtime, and what was measured of it."""

    runtime: str
    variant: str
    failure: str | None = None
    """Why there are no numbers."""
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    """(repeat, prompt) -> answer."""

    @property
    def name(self) -> str:
        """How progress messages call it."""
        return f"{self.runtime} {self.variant}"


class Asked(Protocol):
    """What the loop needs of a `Worker`."""

    def prepare(self, variant: str, prompt: list[int]) -> None: ...
    def measure(self, variant: str, prompt: list[int]) -> Sample: ...
    def close(self) -> None: ...


Say = Callable[[str, int, int], None]
"""Called between measurements with what comes next, how many are done, and how many there are."""


def measure(
    rows: Sequence[Row], prompts: Sequence[list[int]], *, repeats: int, open_worker: Callable[[str], Asked], say: Say
) -> None:
    """Fill the rows. A row that fails gets its reason and is left out from then on; the others go on.

    Each runtime has one process, opened when first needed and again if it died. Only one of them works at any time.
    """
    total = len(rows) * (1 + repeats * len(prompts))
    done = 0
    with ExitStack() as stack:
        workers = _Workers(open_worker)
        stack.callback(workers.close)

        def step(row: Row, what: str, ask: Callable[[Asked], None]) -> None:
            nonlocal done
            if row.failure is None:
                say(f"{row.name}: {what}", done, total)
                workers.ask(row, ask)
            done += 1

        for row in rows:
            step(row, "loading and warming up", lambda worker, row=row: worker.prepare(row.variant, prompts[0]))
        for repeat in range(repeats):
            for index, prompt in enumerate(prompts):
                for row in _rotated(rows, repeat * len(prompts) + index):

                    def take(worker: Asked, row: Row = row, key: tuple[int, int] = (repeat, index)) -> None:
                        row.samples[key] = worker.measure(row.variant, prompts[key[1]])

                    step(row, f"prompt {index + 1} of {len(prompts)}, repeat {repeat + 1} of {repeats}", take)


class _Workers:
    """The open processes by runtime."""

    def __init__(self, open_worker: Callable[[str], Asked]) -> None:
        self._open_worker = open_worker
        self._open: dict[str, Asked] = {}

    def ask(self, row: Row, ask: Callable[[Asked], None]) -> None:
        """Ask a row's process; what goes wrong is noted in the row."""
        try:
            if row.runtime not in self._open:
                self._open[row.runtime] = self._open_worker(row.runtime)
            ask(self._open[row.runtime])
        except PeerError as error:
            row.failure = str(error)
            if error.dead and row.runtime in self._open:
                self._open.pop(row.runtime).close()

    def close(self) -> None:
        """End all processes."""
        for worker in self._open.values():
            worker.close()


def _rotated(rows: Sequence[Row], by: int) -> list[Row]:
    by %= len(rows)
    return [*rows[by:], *rows[:by]]
