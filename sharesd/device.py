"""Which device a name means, and how torch uses it."""

from __future__ import annotations

import logging
import os

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
        return _current_gpu() if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}; give cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; give cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r} but torch {torch.__version__} finds no GPU; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r} but there are {torch.cuda.device_count()} GPUs; count from 0")
    return _current_gpu() if device.type == "cuda" and device.index is None else device


def _current_gpu() -> torch.device:
    """The GPU that is meant where none is named."""
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


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
