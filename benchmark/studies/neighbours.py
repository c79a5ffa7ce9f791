"""Other processes that keep cores busy while something is measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

BURN = """
import os
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""
"""Says that it runs, then computes until it is stopped, or until nobody is left to stop it."""


@contextmanager
def busy_neighbours(num: int) -> Iterator[None]:
    """So many processes that each keep a core busy; all of them run when this begins, and none when it ends."""
    with ExitStack() as stack:
        started = []
        for _ in range(num):
            process = subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.close()
        yield
