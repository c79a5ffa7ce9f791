"""Where the time of a start goes: named phases, from the start of the process to the first token.

Imports no torch: phases begin before it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident

FIRST, OTHER = "Python and command line", "other"


class StartTimes:
    """Seconds of each phase of a start; together they are all of its time.

    A phase inside another one interrupts it. Once a thread has called `follow`, phases are those of that thread: what
    others do at the same time, such as building kernels, takes no time of the start.
    """

    def __init__(self, age: float = 0.0) -> None:
        """Begin `age` seconds ago."""
        self.seconds: dict[str, float] = {}
        self._name, self._since = FIRST, time.monotonic() - age
        self._thread: int | None = None
        self._ended = False

    def follow(self) -> None:
        """Count the phases of this thread alone, which loads the model."""
        self._thread = self._thread or get_ident()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the context as this phase."""
        if self._ended or self._thread not in (None, get_ident()):
            yield
            return
        outer = self._begin(name)
        try:
            yield
        finally:
            self._begin(OTHER if outer == FIRST else outer)

    def end(self, last: str = OTHER) -> None:
        """End the start; what follows its phases so far was `last`."""
        if not self._ended and self._name in (FIRST, OTHER):
            self._name = last
        self._begin(OTHER)
        self._ended = True

    @property
    def total(self) -> float:
        """Seconds from the start of the process to the end."""
        return sum(self.seconds.values())

    def _begin(self, name: str) -> str:
        """Begin a phase, unless the start has ended; return the one before."""
        before, now = self._name, time.monotonic()
        if not self._ended:
            self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
            self._name, self._since = name, now
        return before


def _process_age() -> float:
    """Return the seconds since this process began, on Linux; elsewhere 0."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


START = StartTimes(_process_age())
"""The start of this process."""
