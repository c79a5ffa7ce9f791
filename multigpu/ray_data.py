"""Replicas on a Ray cluster that take tasks from Ray Data.

They run the same functions as other replicas. Ray starts the batch of a replica that died again, and every result is
returned once.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from multigpu.data_parallel import Numbered, function_of
from multigpu.ray_cluster import connect, resources_of_replica


@dataclass(frozen=True)
class RayReplicas:
    """Replicas of a cluster."""

    count: int
    device: str

    def __len__(self) -> int:
        return self.count

    def run_tasks(
        self, work: str, settings: Any, tasks: Sequence[Numbered], *, max_assigned: int
    ) -> Iterator[Numbered]:
        """Yield results of `work` in any order.

        A replica gets up to `max_assigned` tasks at once. Raises a ValueError of a replica's function.
        """
        connect()
        import ray.data

        size = min(max_assigned, -(-len(tasks) // self.count))
        num_batches = -(-len(tasks) // size)
        items = [{"number": number, "task": pickle.dumps(task)} for number, task in tasks]
        resources: Any = resources_of_replica(self.count, self.count, self.device)
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        found = ray.data.from_items(items, override_num_blocks=num_batches).map_batches(
            _Replica,
            fn_constructor_args=(work, settings, os.getcwd()),
            batch_size=size,
            compute=ray.data.ActorPoolStrategy(size=min(self.count, num_batches)),
            **resources,
        )
        for row in found.iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, ValueError):
                raise result
            yield row["number"], result


class _Replica:
    """Function of a replica, kept running between batches."""

    def __init__(self, work: str, settings: Any, folder: str) -> None:
        with suppress(FileNotFoundError):
            os.chdir(folder)
        self._work, self._settings = work, settings
        self._tasks: deque[Numbered] = deque()
        self._results: Iterator[Numbered] | None = None

    def take(self, wait: bool) -> Numbered | None:
        """Return the next task; there is one whenever results are missing."""
        return self._tasks.popleft() if self._tasks else None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        self._tasks.extend((int(n), pickle.loads(task)) for n, task in zip(batch["number"], batch["task"], strict=True))
        try:
            self._results = self._results or function_of(self._work)(self._settings, self)
            results = [next(self._results) for _ in range(len(self._tasks))]
        except ValueError as error:  # Ray would wrap it
            results = [(-1, ValueError(str(error)))]
        return {"number": [n for n, _ in results], "result": [pickle.dumps(result) for _, result in results]}
