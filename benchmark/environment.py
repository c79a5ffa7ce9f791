"""The machine and the software that a measurement ran on."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sharesd import __version__
from sharesd.weights.quant_tuning_cache import cpu_name

PACKAGES = ("torch", "transformers", "hqq", "gemlite", "bitsandbytes", "tokenizers", "safetensors", "triton")

IDENTITY = ("cpu", "cpu_capability", "num_threads", "gpu", "torch")
"""What must not change between the sessions of one measurement."""


def environment(device: str) -> dict[str, Any]:
    """What a reader must know to judge the numbers, or to repeat them. Imports torch."""
    import psutil
    import torch

    from compile.adaptive_threads import CREW

    gpu = torch.cuda.get_device_properties(torch.device(device)) if device.startswith("cuda") else None
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_cores": psutil.cpu_count(logical=False),
        "num_logical_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "num_threads": CREW.most,  # a busy machine may have some of them rest for a while
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": gpu.name if gpu else None,
        "gpu_memory_bytes": gpu.total_memory if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "os": platform.platform(),
        "python": platform.python_version(),
        "sharesd": __version__,
        **{name: _version(name) for name in PACKAGES},
    }


def peak_memory(device: str) -> int:
    """Most bytes that this process has held: GPU memory on CUDA, else resident memory."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(torch.device(device))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes


def seconds_since_start() -> float:
    """Time since this process was started."""
    import time

    import psutil

    return time.time() - psutil.Process().create_time()


def num_compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
