"""Machine, software, model and command of a measurement, and its results' folder."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sharesd import __version__
from sharesd.config import EngineConfig
from sharesd.drafters import registry, selection
from sharesd.models.names import model_name
from sharesd.weights.quant_tuning_cache import cpu_name
from sharesd_files import atomic_write

PACKAGES = ("torch", "transformers", "hqq", "gemlite", "bitsandbytes", "tokenizers", "safetensors", "triton")

IDENTITY = ("cpu", "cpu_capability", "num_threads", "gpu", "torch")
"""Entries of `environment` that all sessions of a measurement must share."""


def environment(device: str) -> dict[str, Any]:
    """Return machine and software, for the comparison of measurements."""
    import psutil
    import torch

    from compile.adaptive_threads import STEP_THREADS

    gpu = torch.cuda.get_device_properties(torch.device(device)) if device.startswith("cuda") else None
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_cores": psutil.cpu_count(logical=False),
        "num_logical_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "num_threads": STEP_THREADS.max_size,  # a busy machine may have some of them rest for a while
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": gpu.name if gpu else None,
        "gpu_memory_bytes": gpu.total_memory if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "os": platform.platform(),
        "python": platform.python_version(),
        "sharesd": __version__,
        **{name: version_of(name) for name in PACKAGES},
    }


def peak_memory(device: str) -> int:
    """Return peak bytes: of GPU memory on CUDA, else resident memory."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(torch.device(device))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes


def seconds_since_start() -> float:
    import time

    import psutil

    return time.time() - psutil.Process().create_time()


def num_compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def settings_of(config: EngineConfig, **more: Any) -> dict[str, Any]:
    """Return command, model and engine options, and `more`, for a report."""
    return {
        "command": command(),
        "model": model_name(config.target) + ("" if config.lora is None else f" + {Path(config.lora).name} (LoRA)"),
        "draft": config.draft,
        **more,
        "dtype": config.dtype,
        "device": config.device,
        "quant": str(config.quant),
        "compile": config.compile,
        "num_draft": config.num_draft or "auto",
        "max_draft": config.max_draft_tokens,
        "hybrid_with": list(selection.active_drafters(config, *registry.names("mix"))),
        **selection.files_shown(config),
    }


def conditions(config: EngineConfig, **more: Any) -> dict[str, Any]:
    """Return `settings` (with `more`) and `environment` of a JSON report."""
    from sharesd.devices.selection import device_of

    device = str(device_of(config.device))
    return {"settings": {**settings_of(config, **more), "device": device}, "environment": environment(device)}


def command() -> str:
    console = Path(sys.argv[0]).stem in ("sharesd", "sharesd_command")
    return shlex.join([*(["sharesd"] if console else ["python", "-m", "benchmark"]), *sys.argv[1:]])


def out_folder(text: str | None, name: str) -> Path:
    """Make and return the folder for results; ValueError if impossible."""
    folder = Path(text) if text is not None else Path("results") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out-dir {folder} cannot be made ({error.strerror}); name another folder") from error
    return folder


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    from sharesd.cli.console import console

    atomic_write(path, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    console.print(f"details: {path}", markup=False, highlight=False, soft_wrap=True)
