"""Threads of conversions: each runs torch's operations alone.

An operation's own threads wait for each other, which is slow where other processes run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

Ranges = Iterable[tuple[int, int]]


class Workers:
    """Threads for ranges of outputs."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(torch.get_num_threads())

    def run(self, function: Callable[[int, int], None], ranges: Ranges) -> None:
        """Call a function for each range; its error is raised here."""
        mode, before = torch.is_inference_mode_enabled(), torch.get_num_threads()

        def call(each: tuple[int, int]) -> None:
            with torch.inference_mode(mode):
                function(*each)

        torch.set_num_threads(1)  # of threads that begin now
        try:
            for _ in self._pool.map(call, ranges):
                pass
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        self._pool.shutdown()


def run_here(function: Callable[[int, int], None], ranges: Ranges) -> None:
    """Call a function for each range, in this thread."""
    for begin, end in ranges:
        function(begin, end)
