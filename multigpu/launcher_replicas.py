"""Processes of a launcher (torchrun, accelerate) as replicas of rank 0.

If one process fails, the launcher ends all of them. The same command resumes the run.
"""

from __future__ import annotations

import json
import os
from multiprocessing.connection import Client, Listener
from typing import TYPE_CHECKING, Any

from multigpu.data_parallel import Replica, gpu_environment, serve, start, visible_gpus

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "multigpu.launcher_replicas"


def rank_and_world() -> tuple[int, int]:
    """Return rank and number of processes; raises ValueError if they are invalid."""
    try:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        rank, world = -1, 0
    if not 0 <= rank < world:
        raise ValueError(
            f"RANK is {os.environ.get('RANK')} and WORLD_SIZE {os.environ.get('WORLD_SIZE')}; launchers set both, "
            "ranks from 0"
        )
    return rank, world


def replicas(work: str, settings: Any, device: str, *, needed: bool) -> list[Replica]:
    """Return rank 0's own replica and one per other rank.

    Waits for the other ranks, which must call `serve_rank_0`. If not `needed`, there are no tasks, and the other ranks
    end.
    """
    _, world = rank_and_world()
    own = start(work, settings, [_environment(device)]) if needed else []
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(world)
    store, secret = _store(), os.urandom(32)
    others: list[Replica] = []
    with Listener(("localhost" if one_machine else "0.0.0.0", 0), authkey=secret, backlog=world) as listener:
        host, port = "localhost" if one_machine else os.environ["MASTER_ADDR"], listener.address[1]
        store.set(_KEY, json.dumps([host, port, secret.hex()]))
        while len(others) < world - 1:
            connection = listener.accept()
            connection.send(work if needed else "")
            others.append(Replica(f"rank {connection.recv()}", connection))
    return [*own, *others] if needed else []


def serve_rank_0(settings: Any, device: str) -> int:
    """Run tasks of rank 0, which names the function, on another rank; return the exit status."""
    os.environ.update(_environment(device))
    host, port, secret = json.loads(_store().get(_KEY))
    with Client((host, port), authkey=bytes.fromhex(secret)) as connection:
        connection.send(rank_and_world()[0])
        work = connection.recv()
        return serve(connection, work, settings) if work else 0


def _environment(device: str) -> dict[str, str]:
    """Return the environment of this rank's GPU, without cores."""
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), visible_gpus(device)
    if gpus and local >= len(gpus):
        raise ValueError(f"LOCAL_RANK is {local} and there are {len(gpus)} GPUs; launch one process per GPU")
    return gpu_environment(gpus, local)


def _store() -> Store:
    from torch.distributed.rendezvous import rendezvous

    store: Store = next(iter(rendezvous("env://")))[0]
    return store
