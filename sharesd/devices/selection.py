"""Which device a name means, and how torch uses it."""

from __future__ import annotations

import logging
import os
import subprocess
import warnings
from collections.abc import Sequence

import torch

log = logging.getLogger(__name__)

STEADY_CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Too little room for the parts of a sum: eight buffers of 16 KiB, and 1 KiB."""

GPU_TRIED = False
"""True once docs/results holds a run on a GPU; until then its use is a warning."""
UNTRIED = 'the CUDA path has not run on a card yet; --device cpu (in Python: device="cpu") is the way out'
_warned = False


def warn_untried(device: torch.device) -> None:
    """Warn, once in a process, where a GPU is used and none has been tried."""
    global _warned
    if device.type == "cuda" and not GPU_TRIED and not _warned:
        _warned = True
        log.warning(UNTRIED)


def use(device: torch.device) -> None:
    """What this thread launches without naming a GPU goes to this one: graphs, events and kernels of Triton."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_of(name: str) -> torch.device:
    """The device of a name, with the number of the GPU: devices are compared. ValueError for one that is not there."""
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
"""The device of `auto`, once it is known."""


NONE_THERE = ("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs")
"""Beginnings of what torch says where there is no GPU that one might have wanted."""


def why_no_gpu() -> str | None:
    """Reason that torch gives for having no GPU; None where it has one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which says it once
        if torch.cuda.is_available():
            return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "it has gone"


def opened(device: torch.device, *, auto: bool) -> torch.device:
    """The device once it is known to work; of `auto` the freest that does, or the CPU with a warning.

    ValueError where one that was asked for does not. The device of `auto` stays the same in this process.
    """
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
    return take_cpu("; ".join(problems))


def take_cpu(reason: str) -> torch.device:
    """`auto` is the CPU from now on, which a warning says."""
    global _auto
    log.warning("the CPU is used, not a GPU: %s", reason)
    _auto = torch.device("cpu")
    return _auto


def _current_gpu() -> torch.device:
    """The GPU that is meant where none is named."""
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def _candidates(current: torch.device) -> list[torch.device]:
    """GPUs, that with the most free memory first; the current one alone where this process uses one already."""
    count = torch.cuda.device_count()
    if torch.cuda.is_initialized() or count == 1:
        return [current]
    free = _free_by_uuid()
    uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(count)]
    numbers = sorted(range(count), key=lambda number: -free.get(uuids[number], 0.0))
    return [torch.device("cuda", number) for number in numbers]


def _free_by_uuid() -> dict[str, float]:
    """MiB that are free on each GPU, as nvidia-smi says: asking the runtime would take memory on all. {}: no answer."""
    query = ("nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits")
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
        found = [line.split(",") for line in lines]
        return {uuid.strip().removeprefix("GPU-"): float(free) for uuid, free in found}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def _problem(device: torch.device) -> str | None:
    """Reason why a GPU cannot be used; None where it can."""
    try:
        capability = torch.cuda.get_device_capability(device)
        if not _built_for(capability, torch.cuda.get_arch_list()):
            return f"torch {torch.__version__} has no kernels for compute capability {capability[0]}.{capability[1]}"
        torch.cuda.mem_get_info(device)
    except RuntimeError as error:  # another process has it for itself, or all of its memory, or it is broken
        return first_line(error)
    return None


def _built_for(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Can kernels for one of these run there? Of the same major version, or compiled from PTX."""
    if not architectures:
        return True  # torch does not say
    for name in architectures:
        kind, _, number = name.partition("_")
        major, minor = divmod(int(number.rstrip("af")), 10)
        if (major, minor) <= capability and (kind == "compute" or major == capability[0]):
            return True
    return False


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a name on a device: `auto` is bfloat16, and float16 on GPUs without it, which a warning says.

    ValueError for bfloat16 where the GPU has none.
    """
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    if old and name == "bfloat16":
        raise ValueError(f"dtype is 'bfloat16', which {device} does not have; use --dtype float16")
    if name != "auto":
        return getattr(torch, name)
    if old and device not in _told:
        _told.add(device)
        log.warning("%s has no bfloat16: weights are float16", device)
    return torch.float16 if old else torch.bfloat16


_told: set[torch.device] = set()


def first_line(error: object) -> str:
    """Message of an error, in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def prepare_cuda(*, steady: bool) -> None:
    """Settings of torch's own CUDA kernels, before the first of them runs. `steady`: see `steady_cublas`."""
    if steady and not steady_cublas():
        log.warning("cuBLAS was in use before the model was loaded, and may split its sums all the same")
    # cuDNN's attention makes a plan for each length of a prompt, which takes longer than to read the prompt.
    torch.backends.cuda.enable_cudnn_sdp(False)


def steady_cublas() -> bool:
    """Keep cuBLAS from splitting sums, which makes the bits of a row depend on the number of rows. True if in force.

    What the environment says already is kept. False where cuBLAS may have read it before.
    """
    in_time = STEADY_CUBLAS.keys() <= os.environ.keys() or not torch.cuda.is_initialized()
    for name, value in STEADY_CUBLAS.items():
        os.environ.setdefault(name, value)
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    return in_time
