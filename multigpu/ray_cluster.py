"""Ray clusters: the connection, resources of replicas, and replicas that take tasks from Ray Data.

The replicas run the same functions as other replicas. If one dies, Ray starts its batch again; every result is returned
once.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from multigpu.data_parallel import Numbered, function_of

EXTRA = "pip install 'sharesd[ray]'"


def require_ray(library: str) -> None:
    """Raise ValueError if Ray, or its library `data` or `serve`, is missing."""
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # read by the import, so that threads do not start a second cluster
    try:
        importlib.import_module(f"ray.{library}")
    except ImportError as error:
        raise ValueError(f"--ray needs more packages ({error}); run: {EXTRA}") from error


def connect() -> bool:
    """Connect to the cluster of RAY_ADDRESS or this machine, or start one.

    Returns False if this process is connected already.
    """
    import ray

    if ray.is_initialized():
        return False
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    return True


def resources_of_replica(low: int, high: int, device: str) -> dict[str, float]:
    """Return cores and GPUs of each of `low` to `high` replicas.

    `device` is cpu, cuda, or auto: a GPU if the cluster has one. Raises ValueError if the cluster has no room
    for `low` replicas.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus, cores = ([int(node.get(name, 0)) for node in nodes] for name in ("GPU", "CPU"))
    if device == "cuda" or (device == "auto" and any(gpus)):
        if sum(gpus) < low:
            raise ValueError(f"--replicas is {low} and the cluster has {sum(gpus)} GPUs; use fewer, or --device cpu")
        return {"num_cpus": 1, "num_gpus": 1}
    return {"num_cpus": cores_of_replica(high, cores)}


def cores_of_replica(count: int, nodes: Sequence[int]) -> float:
    """Return the maximum cores for each of `count` replicas.

    It is a part of one core if there are too few.

    `nodes`: cores of each node. A replica is on one node.
    """
    given = os.environ.get("OMP_NUM_THREADS")
    limit = int(given) if given else max(nodes)
    fitting = [cores for cores in range(1, limit + 1) if sum(node // cores for node in nodes) >= count]
    return fitting[-1] if fitting else sum(nodes) / count


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
