"""Provenance of a measurement or training: machine, load, software, files, settings."""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from quant.config import QuantConfig
from sharesd import __version__
from sharesd.cli.console import print_line
from sharesd.config import EngineConfig
from sharesd.devices.host_memory import cpu_name
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import Need
from sharesd.models.checkpoint import Progress, content_hash, silent
from sharesd.models.hub import model_name, resolve, resolve_target
from sharesd.reports.tables import write_json
from sharesd_files import file_hash

if TYPE_CHECKING:
    from sharesd.runtime import Runtime

PACKAGES = ("torch", "transformers", "hqq", "gemlite", "bitsandbytes", "tokenizers", "safetensors", "triton", "numpy")

IDENTITY = ("cpu", "cpu_capability", "num_threads", "gpu", "torch", "sharesd", "commit")
"""Entries of `environment` that all sessions of a measurement must share."""
FORMAT = 1
"""Version of the JSON files, whose fields docs/reference/figures.md lists."""
MAX_OTHERS = 0.1
"""Share of the cores from which use by other programs is reported."""


class LoadMeter:
    """Use of cores by other programs since its start."""

    def __init__(self) -> None:
        self._before = os.getloadavg()[0]
        self._started, self._busy, self._own = time.monotonic(), *_cpu_seconds()

    def read(self) -> dict[str, float]:
        """Return load averages (one minute) and others' mean number of cores."""
        seconds, (busy, own) = time.monotonic() - self._started, _cpu_seconds()
        others = max(0.0, (busy - self._busy) - (own - self._own)) / max(seconds, 1e-3)
        now = os.getloadavg()[0]
        return {"load_before": self._before, "load_during": now, "cores_of_others": round(others, 2)}


def _cpu_seconds() -> tuple[float, float]:
    """Return seconds of all cores' work, and of this process's."""
    times, own = psutil.cpu_times(), 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            own += sum(process.cpu_times()[:4])  # user, system, and those of ended children
        except psutil.NoSuchProcess:
            continue
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return sum(times) - idle, own


@cache
def load_meter() -> LoadMeter:
    """Return the meter of this process, started by the first call."""
    return LoadMeter()


def load_warning(environment: Mapping[str, Any]) -> str:
    """Return a sentence on busy cores; empty if there are few."""
    others, cores = environment.get("cores_of_others"), environment.get("num_logical_cores")
    if not others or not cores or others <= MAX_OTHERS * cores:
        return ""
    return f"Other programs used {others:.1f} of {cores} cores meanwhile: speeds and ratios may not repeat."


def environment(device: str) -> dict[str, Any]:
    """Return machine and software, for the comparison of measurements."""
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
        "compiler": compiler_version(),
        "sharesd": __version__,
        **source(),
        **load_meter().read(),
        **{name: version_of(name) for name in PACKAGES},
    }


@cache
def source() -> dict[str, Any]:
    """Return commit, and if files differ; None for an installed package."""
    root = Path(__file__).parents[2]
    found: dict[str, Any] = {"commit": None, "changed": None}
    if (root / ".git").exists():
        try:
            commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
            changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
            found = {"commit": commit, "changed": bool(changes)}
        except (OSError, subprocess.CalledProcessError):
            pass
    return found


@cache
def compiler_version() -> str | None:
    """Return the first line of the C++ compiler's --version, or None."""
    from compile.cpp_extension import compiler  # torch takes seconds

    try:
        return _output(compiler(), "--version").partition("\n")[0]
    except (OSError, RuntimeError, subprocess.CalledProcessError):
        return None


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def files_of(
    config: EngineConfig, modes: Sequence[str], *, progress: Progress = silent, **more: str | Path | None
) -> dict[str, str]:
    """Return hashes of models, heads, tables, modules and `more` by name.

    A file's is its own; a folder's see `sharesd_files.files_hash`.
    """
    drafters = selection.active_drafters(config, *modes)
    folders = {"target": resolve_target(config, progress=progress)}
    second = selection.second_model(config) if registry.those(drafters, Need.SECOND_MODEL) else None
    if second is not None:
        folders["draft"] = resolve(
            second, progress=progress, ignored=config.ignore_keys, trust_remote_code=config.trust_remote_code
        )
    heads = {name: selection.head_of(config, name) for name in registry.names("head") if name in drafters}
    folders |= {f"head_{name}": resolve(head, progress=progress) for name, head in heads.items() if head is not None}
    tables = {f"table_{name}": file for name, file in selection.table_files(config, drafters).items()}
    files = {**tables, **{f"module_{Path(name).stem}": name for name in config.drafter_modules}, **more}
    hashes = {name: content_hash(folder) for name, folder in folders.items()}
    return hashes | {name: file_hash(Path(file)) for name, file in files.items() if file and Path(file).is_file()}


def resolved_settings(runtime: Runtime) -> dict[str, Any]:
    """Return all options with the values that were chosen, as JSON types."""
    from compile.adaptive_threads import STEP_THREADS

    config, tree = runtime.config, runtime.tree
    drafters = selection.active_drafters(config, *runtime.modes)
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    for name in ("target", "mode", "hybrid_with", "drafter_options"):
        del values[name]
    values |= {
        "dtype": (dtype := str(runtime.dtype).removeprefix("torch.")),
        "kv_dtype": dtype if config.kv_dtype == "auto" else config.kv_dtype,
        "device": str(runtime.device),
        "compile": runtime.compile,
        "threads": STEP_THREADS.max_size,
        "max_context": runtime.max_context,
        "num_draft": config.num_draft or f"0 to {config.max_draft_tokens}",
        "tree": "off" if tree is None else ":".join(map(str, tree)),
        "kernels": config.kernels if runtime.device.type == "cuda" else None,
        "offload": None if runtime.streamed is None else {**asdict(config.offload), "when": "on"},
        "drafters": {name: selection.options_of(config, name) for name in drafters if name != registry.NAIVE},
    }
    return json.loads(json.dumps(values, default=_plain))


def _plain(value: Any) -> Any:
    is_nested = is_dataclass(value) and not isinstance(value, QuantConfig | type)
    return asdict(value) if is_nested else str(value)


def peak_memory(device: str) -> int:
    """Return peak bytes: of GPU memory on CUDA, else resident memory."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(torch.device(device))

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes


def seconds_since_start() -> float:
    return time.time() - psutil.Process().create_time()


def num_compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """Return command, model and engine options for a report."""
    return {
        "command": command(),
        "model": model_name(config.target) + ("" if config.lora is None else f" + {Path(config.lora).name} (LoRA)"),
        "draft": config.draft,
        "dtype": config.dtype,
        **({} if config.kv_dtype == "auto" else {"kv_dtype": config.kv_dtype}),
        "device": config.device,
        "quant": str(config.quant),
        "compile": config.compile,
        "num_draft": config.num_draft or "auto",
        "max_draft": config.max_draft_tokens,
        "hybrid_with": list(selection.active_drafters(config, *registry.names("mix"))),
        **selection.files_shown(config),
    }


def conditions(config: EngineConfig, modes: Sequence[str], /, **more: Any) -> dict[str, Any]:
    """Return `format`, `settings` (with `more`) and `environment` of a report."""
    from sharesd.devices.selection import device_of, dtype_of

    device = device_of(config.device)
    chosen = {"device": str(device), "dtype": str(dtype_of(config.dtype, device)).removeprefix("torch.")}
    settings = {**settings_of(config), **chosen, **more, "files": files_of(config, modes)}
    return {"format": FORMAT, "settings": settings, "environment": environment(str(device))}


def command(package: str = "benchmark") -> str:
    console = Path(sys.argv[0]).stem in ("sharesd", "sharesd_command")
    return shlex.join([*(["sharesd"] if console else ["python", "-m", package]), *sys.argv[1:]])


def out_folder(text: str | None, name: str) -> Path:
    """Make and return the folder for results; ValueError if impossible.

    The load of the machine is measured from here on.
    """
    load_meter()
    folder = Path(text) if text is not None else Path("results") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out-dir {folder} cannot be made ({error.strerror}); use another folder") from error
    return folder


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    write_json(path, results)
    print_line(f"details: {path}")
