"""How many threads share a step: as many as the process may have, or fewer while somebody else keeps cores busy.

A step's threads meet some two hundred times a token. Where one of them shares its core with another program, all of
them wait for it, and a step takes two or three times as long as with one thread less. Results do not depend on the
number: every row has the same bits with any.
"""

from __future__ import annotations

import ctypes
from threading import get_ident

import torch

SUSPICIOUS, WORSE = 0.15, 1.5
"""Share of a round's time lost to waiting for a thread without a core, from which on fewer threads are tried; and at
once again where it is so many times what it was when that failed."""
RECENT = 8
"""Rounds over which means run."""
TRIAL = 4
"""Rounds that a trial of another number takes at most."""
SOON, LATE_UP, LATE_DOWN = 64, 128, 1024
"""Rounds from a trial that failed to the next, and at most, of more and of fewer threads: they double from one failure
to the next. That a neighbour has gone shows in a trial only."""
BETTER = 0.95
"""A trial must take this share of the time at most."""
HOPELESS = 1.5
"""A trial ends at the first round that takes so many times as long."""


class Crew:
    """The threads of this process that share steps. `worked` is told of every round and may change their number."""

    def __init__(self) -> None:
        self._lost_ns = ctypes.c_int64(0)
        self.lost_address = ctypes.addressof(self._lost_ns)
        """Of an int64: where the kernel adds the nanoseconds that threads waited for one without a core."""
        self.available = torch.get_num_threads()
        """Threads that the process may have."""
        self._stepper: int | None = None  # the thread that stepped last
        self.reset()

    def enter(self) -> None:
        """The calling thread steps from now on. Numbers of threads are of each thread: it takes over the last one's."""
        last, self._stepper = self._stepper, get_ident()
        if last not in (None, self._stepper) and torch.get_num_threads() != self.size:
            torch.set_num_threads(self.size)

    def fix(self, size: int | None) -> None:
        """So many threads from now on, whatever happens; None = as many as are worth it."""
        if size is not None or self.fixed:
            self.reset(size, fixed=size is not None)

    def reset(self, most: int | None = None, *, fixed: bool = False) -> None:
        """Begin anew with `most` threads (default: all available), which stay where the number is `fixed`."""
        self.most, self.fixed = most or self.available, fixed
        self.size = self.most
        """Threads of the coming step."""
        self._lost_share, self._pace = 0.0, 0.0  # running means: of time lost, of seconds for the work of one
        self._since, self._patience = 0, RECENT  # rounds since the last trial, and until the next
        self._stride, self._backoff = 1, SOON  # how many fewer are tried; patience once all have failed
        self._suspected, self._lived_with = 0.0, 0.0  # share lost when a trial began, and when the last one failed
        self._before: int | None = None  # during a trial: the number that it is compared with
        self._trial: list[float] = []
        torch.set_num_threads(self.most)

    def worked(self, seconds: float, work: float = 1.0) -> None:
        """A round took so long; `work` is what it was expected to take, in any unit that is the same for all rounds."""
        lost, self._lost_ns.value = self._lost_ns.value / 1e9, 0
        if torch.get_num_threads() != self.size:  # somebody has set it
            self.reset(torch.get_num_threads())
        if self.most == 1 or self.fixed:
            return
        pace = seconds / work
        if self._before is not None:
            self._judge(pace)
            return
        self._since += 1
        self._lost_share += (min(1.0, lost / seconds) - self._lost_share) / RECENT
        self._pace += (pace - self._pace) / min(self._since, RECENT)
        suspicious = self.size > 1 and self._lost_share > SUSPICIOUS
        worse = suspicious and self._lost_share > WORSE * self._lived_with
        if self._since < (RECENT if worse else self._patience):
            return
        if suspicious:
            self._try(max(1, self.size - self._stride))
        elif self.size < self.most:
            self._try(self.size + 1)

    def _try(self, size: int) -> None:
        self._before, self._trial, self._suspected = self.size, [], self._lost_share
        self._set(size)

    def _judge(self, pace: float) -> None:
        assert self._before is not None
        self._trial.append(pace)
        if len(self._trial) < TRIAL and pace < HOPELESS * self._pace:
            return
        tried = self.size
        if sum(self._trial) / len(self._trial) < BETTER * self._pace:
            self._patience, self._stride, self._backoff = RECENT, 1, SOON
            self._lost_share, self._lived_with = 0.0, 0.0
        else:
            self._set(self._before)
            self._stride *= 2  # where two cores are busy, one thread less gains nothing
            self._patience = RECENT
            if tried == 1 or tried > self.size:
                self._patience, self._stride, self._lived_with = self._backoff, 1, self._suspected
                self._backoff = min(LATE_DOWN if tried < self.size else LATE_UP, 2 * self._backoff)
        self._before, self._since = None, 0

    def _set(self, size: int) -> None:
        self.size = size
        torch.set_num_threads(size)


CREW = Crew()
"""Of this process."""
