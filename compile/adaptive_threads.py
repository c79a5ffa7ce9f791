"""Number of threads per step, adapted to other programs' load.

The threads of a step synchronise about two hundred times per token. If another program runs on the core of one thread,
all threads wait, and a step takes two or three times as long as with one thread fewer. A row's bits do not depend on
the number of threads.
"""

from __future__ import annotations

import ctypes
import logging
import os
from threading import get_ident

import torch

log = logging.getLogger(__name__)

MAX_LOST_SHARE, RETRY_FACTOR = 0.15, 1.5
"""Thresholds that start a trial of fewer threads.

They are: the share of a round's time lost to descheduled threads; and the factor by which the share must exceed that of
the last failed trial, to start another trial immediately.
"""
NUM_AVERAGED = 8
"""Number of rounds in running means."""
MAX_TRIAL = 4
"""Maximum rounds of a trial."""
MIN_BACKOFF, MAX_BACKOFF_UP, MAX_BACKOFF_DOWN = 64, 128, 1024
"""Rounds from a failed trial to the next.

They are: the initial number, and the maximum for trials of more and of fewer threads. The number doubles with each
failure. Only a trial detects that another program has ended.
"""
MAX_TRIAL_TIME = 0.95
"""Maximum time of a successful trial, relative to the time before."""
ABORT_FACTOR = 1.5
"""Time of a round, relative to the mean, that aborts a trial."""


def within_cores(num_threads: int, origin: str) -> int:
    """Return the number of threads, or with a warning that of the cores if they are fewer.

    Threads that wait for each other and for a core make steps slower by orders of magnitude. `origin`: what asks for
    them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_threads <= cores:
        return num_threads
    log.warning(
        "%s asks for %d threads, and this process may use %d cores: %d threads are used",
        origin,
        num_threads,
        cores,
        cores,
    )
    return cores


class StepThreads:
    """Number of threads that share this process's steps, adapted after each round."""

    def __init__(self) -> None:
        self._lost_ns = ctypes.c_int64(0)
        self.lost_ns_address = ctypes.addressof(self._lost_ns)
        """Address of an int64: nanoseconds lost to descheduled threads, added by kernels."""
        given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        asked = int(given) if given.isdecimal() else 0  # torch may have lowered it, without a word
        self.available = min(
            within_cores(max(asked, torch.get_num_threads()), "OMP_NUM_THREADS"), torch.get_num_threads()
        )
        """Maximum threads of the process."""
        self._stepper: int | None = None  # the thread that stepped last
        self.reset()

    def enter(self) -> None:
        """Make the calling thread run the steps, with `size` threads."""
        last, self._stepper = self._stepper, get_ident()
        if last not in (None, self._stepper) and torch.get_num_threads() != self.size:
            torch.set_num_threads(self.size)

    def fix(self, size: int | None) -> None:
        """Fix the number of threads, at most at that of the cores; None: adapt the number again."""
        size = None if size is None else within_cores(size, "--threads")
        if size is not None or self.fixed:
            self.reset(size, fixed=size is not None)

    def reset(self, max_size: int | None = None, *, fixed: bool = False) -> None:
        """Restart with `max_size` threads (default: all), constant if `fixed`."""
        self.max_size, self.fixed = max_size or self.available, fixed
        self.size = self.max_size
        """Threads of the next step."""
        self._lost_share, self._pace = 0.0, 0.0  # running means: of time lost, of seconds for the work of one
        self._since, self._patience = 0, NUM_AVERAGED  # rounds since the last trial, and until the next
        self._stride, self._backoff = 1, MIN_BACKOFF  # how many fewer are tried; patience once all have failed
        self._share_before_trial, self._tolerated_share = (
            0.0,
            0.0,
        )  # share lost when a trial began, and when the last one failed
        self._before: int | None = None  # during a trial: the number that it is compared with
        self._trial: list[float] = []
        torch.set_num_threads(self.max_size)

    def record_round(self, seconds: float, work: float = 1.0) -> None:
        """Record the time of a round; `work`: expected time in any unit."""
        lost, self._lost_ns.value = self._lost_ns.value / 1e9, 0
        if torch.get_num_threads() != self.size:  # set elsewhere
            self.reset(torch.get_num_threads())
        if self.max_size == 1 or self.fixed:
            return
        pace = seconds / work
        if self._before is not None:
            self._evaluate_trial(pace)
            return
        self._since += 1
        self._lost_share += (min(1.0, lost / seconds) - self._lost_share) / NUM_AVERAGED
        self._pace += (pace - self._pace) / min(self._since, NUM_AVERAGED)
        loses_time = self.size > 1 and self._lost_share > MAX_LOST_SHARE
        worse = loses_time and self._lost_share > RETRY_FACTOR * self._tolerated_share
        if self._since < (NUM_AVERAGED if worse else self._patience):
            return
        if loses_time:
            self._start_trial(max(1, self.size - self._stride))
        elif self.size < self.max_size:
            self._start_trial(self.size + 1)

    def _start_trial(self, size: int) -> None:
        self._before, self._trial, self._share_before_trial = self.size, [], self._lost_share
        self._set(size)

    def _evaluate_trial(self, pace: float) -> None:
        assert self._before is not None
        self._trial.append(pace)
        if len(self._trial) < MAX_TRIAL and pace < ABORT_FACTOR * self._pace:
            return
        tried = self.size
        if sum(self._trial) / len(self._trial) < MAX_TRIAL_TIME * self._pace:
            self._patience, self._stride, self._backoff = NUM_AVERAGED, 1, MIN_BACKOFF
            self._lost_share, self._tolerated_share = 0.0, 0.0
        else:
            self._set(self._before)
            self._stride *= 2  # with two busy cores one thread fewer gains nothing
            self._patience = NUM_AVERAGED
            if tried == 1 or tried > self.size:
                self._patience, self._stride, self._tolerated_share = self._backoff, 1, self._share_before_trial
                self._backoff = min(MAX_BACKOFF_DOWN if tried < self.size else MAX_BACKOFF_UP, 2 * self._backoff)
        self._before, self._since = None, 0

    def _set(self, size: int) -> None:
        self.size = size
        torch.set_num_threads(size)


STEP_THREADS = StepThreads()
"""Threads of this process's steps."""
