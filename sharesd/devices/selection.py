"""Choice of device and dtype, and settings of torch on CUDA."""

from __future__ import annotations

import logging
import os
import subprocess
import warnings
from collections.abc import Sequence

import torch

log = logging.getLogger(__name__)

CUBLAS_WITHOUT_SPLITS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Workspaces too small for split sums: 16 KiB buffers, and 1 KiB."""


def use(device: torch.device) -> None:
    """Make a GPU current for this thread's graphs, events and Triton kernels."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_of(name: str) -> torch.device:
    """Return the device of a name, numbered; ValueError if not there."""
    if name == "auto":
        if _auto is None and torch.version.hip is None and why_no_gpu() is None:
            return _current_gpu()
        return _auto or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}; give cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; give cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    if torch.version.hip is not None:
        raise ValueError(f"device is {name!r} and {ROCM}; use --device cpu")
    reason = why_no_gpu()
    if reason is not None:
        raise ValueError(f"device is {name!r} but torch {torch.__version__} finds no GPU ({reason}); use --device cpu")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r} but there are {torch.cuda.device_count()} GPUs; count from 0")
    return _current_gpu() if device.index is None else device


ROCM = "this torch is built for ROCm, for which there are no kernels"
_auto: torch.device | None = None


NONE_THERE = ("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs")
"""Beginnings of torch's messages on machines without a GPU."""


def why_no_gpu() -> str | None:
    """Return torch's reason for having no GPU; None if it has one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which says it once
        if torch.cuda.is_available():
            return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "it is no longer there"


def open_device(device: torch.device, *, auto: bool) -> torch.device:
    """Return a working device; ValueError if a named one does not work."""
    global _auto
    if device.type == "cpu":
        if auto and _auto is None:
            reason = ROCM if torch.version.hip is not None else why_no_gpu()
            if reason is not None and not reason.startswith(NONE_THERE):
                log.warning("the CPU is used, not a GPU: %s", reason)
            _auto = device
        return device
    if not auto or _auto is not None:
        problem = _problem(device)
        if problem is not None:
            raise ValueError(f"{device} cannot be used: {problem}; use another one, or --device cpu")
        return device
    problems: list[str] = []
    for candidate in _candidates(device):
        problem = _problem(candidate)
        if problem is None:
            if problems:
                log.warning("%s is used: %s", candidate, "; ".join(problems))
            _auto = candidate
            return candidate
        problems.append(f"{candidate} cannot be, {problem}")
    return fall_back_to_cpu("; ".join(problems))


def fall_back_to_cpu(reason: str) -> torch.device:
    global _auto
    log.warning("the CPU is used, not a GPU: %s", reason)
    _auto = torch.device("cpu")
    return _auto


def _current_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def _candidates(current: torch.device) -> list[torch.device]:
    """Return GPUs by free memory; the current one if CUDA is initialized."""
    count = torch.cuda.device_count()
    if torch.cuda.is_initialized() or count == 1:
        return [current]
    free = _free_by_uuid()
    uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(count)]
    numbers = sorted(range(count), key=lambda number: -free.get(uuids[number], 0.0))
    return [torch.device("cuda", number) for number in numbers]


def _free_by_uuid() -> dict[str, float]:
    """Return free MiB by GPU from nvidia-smi; CUDA would take memory itself."""
    query = ("nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits")
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
        found = [line.split(",") for line in lines]
        return {uuid.strip().removeprefix("GPU-"): float(free) for uuid, free in found}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def _problem(device: torch.device) -> str | None:
    try:
        capability = torch.cuda.get_device_capability(device)
        if not _built_for(capability, torch.cuda.get_arch_list()):
            return f"torch {torch.__version__} has no kernels for compute capability {capability[0]}.{capability[1]}"
        torch.cuda.mem_get_info(device)
    except RuntimeError as error:  # another process has it for itself, or all of its memory, or it is broken
        return first_line(error)
    return None


def _built_for(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """True if kernels of these architectures run: same major version, or PTX."""
    if not architectures:
        return True  # unknown
    for name in architectures:
        kind, _, number = name.partition("_")
        major, minor = divmod(int(number.rstrip("af")), 10)
        if (major, minor) <= capability and (kind == "compute" or major == capability[0]):
            return True
    return False


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype; ValueError on a GPU without bfloat16, unless `auto`."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    if old and name == "bfloat16":
        raise ValueError(f"dtype is 'bfloat16', which {device} does not have; use --dtype float16")
    if name != "auto":
        return getattr(torch, name)
    if old and device not in _warned_dtypes:
        _warned_dtypes.add(device)
        log.warning("%s has no bfloat16: weights are float16", device)
    return torch.float16 if old else torch.bfloat16


_warned_dtypes: set[torch.device] = set()


def first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def prepare_cuda(*, steady: bool) -> None:
    """Set options of torch's CUDA kernels before CUDA begins. `steady`: see `steady_cublas`."""
    if steady and not steady_cublas():
        log.warning("cuBLAS was in use before the model was loaded, and may split its sums all the same")
    # cuDNN's attention makes a plan for each length of a prompt, which takes longer than to read the prompt.
    torch.backends.cuda.enable_cudnn_sdp(False)


def steady_cublas() -> bool:
    """Keep cuBLAS from splitting sums; False if possibly initialized before."""
    in_time = CUBLAS_WITHOUT_SPLITS.keys() <= os.environ.keys() or not torch.cuda.is_initialized()
    for name, value in CUBLAS_WITHOUT_SPLITS.items():
        os.environ.setdefault(name, value)
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    return in_time
