"""What replicas of tests do: nothing that needs torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multigpu.data_parallel import Numbered, TaskQueue, environments, run_tasks, start
from multigpu.journal import Journal, read_lines


def square(settings: dict[str, Any], tasks: TaskQueue) -> Iterator[Numbered]:
    """Squares, with the process that made each. Settings: seconds for each; numbers at which it fails, by how."""
    if settings.get("refuses"):
        raise ValueError(settings["refuses"])
    while (task := tasks.take(wait=True)) is not None:
        number, value = task
        if "meet" in settings:  # a folder, and how many processes must have a task before the first goes on
            folder, num = settings["meet"]
            (Path(folder) / str(os.getpid())).touch()
            while len(list(Path(folder).iterdir())) < num:
                time.sleep(0.002)
        time.sleep(settings.get("seconds", 0) * (1 + number % 3))
        if number in settings.get("dies_at", ()):
            os.kill(os.getpid(), 9)
        if number in settings.get("raises_at", ()):
            raise RuntimeError(f"no square of {value}")
        yield number, {"square": value**2, "process": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]}


def twos(settings: None, tasks: TaskQueue) -> Iterator[Numbered]:
    """Takes two at once where there are two, and says how many it holds."""
    while (task := tasks.take(wait=True)) is not None:
        held = [task]
        time.sleep(0.05)
        if (more := tasks.take(wait=False)) is not None:
            held.append(more)
        yield from ((number, len(held)) for number, _ in held)


def main(path: str) -> None:
    """Squares of 0 to 99 in a journal, going on with what is there."""
    with Journal(Path(path), "file") as journal:
        done = {json.loads(line)["number"] for _, line in read_lines(Path(path))}
        left = [(number, number) for number in range(100) if number not in done]
        replicas = start("tests.helpers.replica_work:square", {"seconds": 0.005}, environments(2, "cpu"))
        for number, result in run_tasks(left, replicas, max_assigned=2):
            journal.add({"number": number, "square": result["square"]})
