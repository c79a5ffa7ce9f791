"""Devices of processes: a visible GPU, or a share of cores."""

from __future__ import annotations

import os
from collections.abc import Sequence


def environments(count: int, device: str) -> list[dict[str, str]]:
    """Return the environments of `count` replicas: a GPU and cores each.

    `device` is cpu, cuda, or auto: cuda if available. Raises ValueError if there are fewer GPUs than replicas, or if
    `device` names one GPU for several replicas.
    """
    if count < 1:
        raise ValueError(f"--replicas is {count}; it must be at least 1")
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // count))
    found = [{"OMP_NUM_THREADS": threads} for _ in range(count)]
    if device not in ("auto", "cuda", "cpu"):
        if count > 1:
            raise ValueError(
                f"--device is {device} and --replicas {count}, which take a GPU each; give cuda, or choose among them "
                "with CUDA_VISIBLE_DEVICES"
            )
        return found
    gpus = visible_gpus(device)
    if gpus and len(gpus) < count:
        raise ValueError(f"--replicas is {count} and there are {len(gpus)} GPUs; give no more, or --device cpu")
    return [variables | gpu_environment(gpus, number) for number, variables in enumerate(found)]


def gpu_environment(gpus: Sequence[str], number: int) -> dict[str, str]:
    """Return the environment with this GPU only; empty without GPUs."""
    return {"CUDA_VISIBLE_DEVICES": gpus[number]} if gpus else {}


def visible_gpus(device: str) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES names of usable GPUs; empty for cpu."""
    if device == "cpu":
        return []
    import torch  # which takes seconds

    given, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    return [name.strip() for name in given.split(",")][:count] if given else list(map(str, range(count)))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
