"""The measuring loop: batch by batch, all ways of all runtimes right after each other, each time in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Protocol

from benchmark.peers.process import PeerError
from benchmark.peers.protocol import Batch, Sample

Key = tuple[int, int]
"""(repeat, batch)"""


@dataclass(slots=True)
class Row:
    """One way of one runtime, and what was measured of it."""

    runtime: str
    variant: str
    failure: str | None = None
    """Why there are no numbers."""
    samples: dict[Key, Sample] = field(default_factory=dict)
    """Its answers."""

    @property
    def name(self) -> str:
        """How progress messages call it."""
        return f"{self.runtime} {self.variant}"


class Asked(Protocol):
    """What the loop needs of a `Worker`."""

    def prepare(self, variant: str, batch: Batch) -> None: ...
    def measure(self, variant: str, batch: Batch) -> Sample: ...
    def close(self) -> None: ...


Say = Callable[[str, int, int], None]
"""Called between measurements with what comes next, how many are done, and how many there are."""


def measure(
    rows: Sequence[Row], batches: Sequence[Batch], *, repeats: int, open_worker: Callable[[str], Asked], say: Say
) -> None:
    """Fill the rows. A row that fails gets its reason and is left out from then on; the others go on.

    Each runtime has one process, opened when first needed and again if it died. Only one of them works at any time.
    """
    steps = list(_steps(rows, len(batches), repeats))
    workers: dict[str, Asked] = {}
    try:
        for done, (row, key) in enumerate(steps):
            if row.failure is not None:
                continue
            say(f"{row.name}: {_what(key, len(batches), repeats)}", done, len(steps))
            try:
                if row.runtime not in workers:
                    workers[row.runtime] = open_worker(row.runtime)
                if key is None:
                    workers[row.runtime].prepare(row.variant, batches[0])
                else:
                    row.samples[key] = workers[row.runtime].measure(row.variant, batches[key[1]])
            except PeerError as error:
                row.failure = str(error)
                if error.dead and row.runtime in workers:
                    workers.pop(row.runtime).close()
    finally:
        for worker in workers.values():
            worker.close()


def _steps(rows: Sequence[Row], num_batches: int, repeats: int) -> Iterator[tuple[Row, Key | None]]:
    """First all are warmed up (None), then measured."""
    for row in rows:
        yield row, None
    for i, key in enumerate(product(range(repeats), range(num_batches))):
        for row in (*rows[i % len(rows) :], *rows[: i % len(rows)]):
            yield row, key


def _what(key: Key | None, num_batches: int, repeats: int) -> str:
    if key is None:
        return "loading and warming up"
    return f"batch {key[1] + 1} of {num_batches}, repeat {key[0] + 1} of {repeats}"
