"""Connection to a Ray cluster, and what each replica takes of it."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence

EXTRA = "pip install 'sharesd[ray]'"


def require_ray(library: str) -> None:
    """Raise ValueError if Ray, or its library `data` or `serve`, is missing."""
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # read by the import: threads shall not start a second cluster
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

    `device` is cpu, cuda, or auto: a GPU if the cluster has one. Raises ValueError if `low` replicas find no place.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus, cores = ([int(node.get(name, 0)) for node in nodes] for name in ("GPU", "CPU"))
    if device == "cuda" or (device == "auto" and any(gpus)):
        if sum(gpus) < low:
            raise ValueError(f"--replicas is {low} and the cluster has {sum(gpus)} GPUs; give no more, or --device cpu")
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
