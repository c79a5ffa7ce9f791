"""Start of a group of processes, by torchrun or by rank 0.

Rank 0 starts ranks on its own machine. The environment variables are those of torchrun: RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from multigpu.failure_detector import JOIN_SECONDS, FailureDetector, RankLost, describe_exit, keep_alive
from multigpu.process_group import ProcessGroup


def launched_rank() -> int | None:
    """Return the rank from the launcher, or None without a launcher."""
    return (
        int(os.environ["RANK"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() else None
    )


def num_ranks_sharing_cores(size: int) -> int:
    """Return the number of ranks that share this machine's cores.

    It is 1 if a launcher has divided the cores.
    """
    return 1 if "OMP_NUM_THREADS" in os.environ else int(os.environ.get("LOCAL_WORLD_SIZE", size))


def local_device(device: torch.device, size: int) -> torch.device:
    """Return this process's device: its own GPU, or the CPU.

    Raises ValueError if there are fewer GPUs than ranks on this machine.
    """
    if device.type == "cpu":
        return device
    num_ranks, num_devices = int(os.environ.get("LOCAL_WORLD_SIZE", size)), torch.cuda.device_count()
    if num_devices < num_ranks:
        raise ValueError(f"{num_ranks} ranks need a GPU each, and this machine has {num_devices}; use --device cpu")
    return torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))


def join(kind: torch.device) -> ProcessGroup:
    """Join the launcher's group, on devices of this kind.

    Raises RuntimeError if other ranks are late, and the errors of `local_device`.
    """
    _check_alone()
    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS)))
    return _connected(rank, size, store, local_device(kind, size), os.environ["MASTER_ADDR"], {})


def spawn(size: int, command: Sequence[str], device: torch.device) -> ProcessGroup:
    """Start other ranks on this machine by `command`, which must `join`.

    Returns the group of this process, as rank 0. Raises RankLost if a rank ends before it has joined.
    """
    _check_alone()
    host = "127.0.0.1"
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_SECONDS))
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": host, "MASTER_PORT": store.port}
    children = {}
    for rank in range(1, size):
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        children[rank] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        return _connected(0, size, store, device, host, children)
    except BaseException:
        for child in children.values():
            child.kill()
            child.wait()
        raise


def _check_alone() -> None:
    if dist.is_initialized():
        raise ValueError("this process is already in a group of ranks; close that one first")


def _connected(
    rank: int,
    size: int,
    store: dist.Store,
    device: torch.device,
    host: str,
    children: Mapping[int, subprocess.Popen[bytes]],
) -> ProcessGroup:
    if rank:
        port = int(store.get("sharesd/failure_detector"))
        line = socket.create_connection((host, port), timeout=JOIN_SECONDS)
        line.settimeout(None)
        line.sendall(rank.to_bytes(4, "big"))
        lines = {0: line}
    else:
        lines = _accepted(size, store, host, children)
    for line in lines.values():
        keep_alive(line)
    return ProcessGroup(rank, size, store, FailureDetector(rank, lines, children), device)


def _accepted(
    size: int, store: dist.Store, host: str, children: Mapping[int, subprocess.Popen[bytes]]
) -> dict[int, socket.socket]:
    """Return rank 0's connections to all other ranks."""
    lines: dict[int, socket.socket] = {}
    deadline = time.monotonic() + JOIN_SECONDS
    with socket.create_server((host, 0)) as server:
        server.settimeout(0.2)
        store.set("sharesd/failure_detector", str(server.getsockname()[1]))
        while len(lines) < size - 1:
            for rank, child in children.items():
                status = child.poll()
                if status is not None and rank not in lines:
                    raise RankLost(f"rank {rank} ended before it joined: {describe_exit(status)}")
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(1, size) if rank not in lines)
                raise RankLost(f"ranks {missing} of {size} did not join within {JOIN_SECONDS:.0f} s")
            with suppress(TimeoutError):
                line, _ = server.accept()
                line.settimeout(JOIN_SECONDS)
                lines[int.from_bytes(_received(line.recv, 4), "big")] = line
                line.settimeout(None)
    return lines


def _received(receive: Callable[[int], bytes], num: int) -> bytes:
    got = b""
    while len(got) < num:
        more = receive(num - len(got))
        if not more:
            raise RankLost("a rank ended before it joined; its own message is above")
        got += more
    return got
