"""Choice of kernels on a GPU: Triton, or those of torch."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple, get_args

import torch

from compile.op_registry import HAS_TRITON, use_own_kernels
from sharesd.config import Kernels
from sharesd.devices.selection import first_line

log = logging.getLogger(__name__)

VARIABLE = "SHARESD_KERNELS"
"""Environment variable in place of `--kernels auto`."""
NO_TRITON = "Triton is not installed"


class KernelChoice(NamedTuple):
    kernels: Kernels
    triton: bool
    """True if Triton compiles, which Inductor needs too."""


def choose_kernels(asked: Kernels, device: torch.device, dtype: torch.dtype) -> KernelChoice:
    """Switch on kernels; ValueError if named Triton kernels do not run."""
    wanted = os.environ.get(VARIABLE) or "auto" if asked == "auto" else asked
    if wanted not in get_args(Kernels):
        raise ValueError(f"{VARIABLE} is {wanted!r}; choose one of {', '.join(get_args(Kernels))}")
    if device.type == "cpu":
        if asked != "auto":
            log.warning("--kernels %s: no effect on a CPU", asked)
        return KernelChoice("auto", True)
    why_not = None if wanted == "torch" else problem(device, dtype)
    if why_not is not None and wanted == "triton":
        raise ValueError(f"kernels are to be 'triton', which do not run on {device}: {why_not}; take --kernels torch")
    if why_not is not None:
        log.warning("our kernels do not run on %s (%s); torch's own do, which is slower", device, why_not)
    use_own_kernels(wanted != "torch" and why_not is None)
    if wanted == "torch" or why_not is not None:
        return KernelChoice("torch", HAS_TRITON and why_not is None)
    return KernelChoice("triton", True)


def problem(device: torch.device, dtype: torch.dtype) -> str | None:
    if not HAS_TRITON:
        return NO_TRITON
    from compile.cuda.trial import try_kernels  # imports Triton

    try:
        try_kernels(device, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton has errors of its own, and needs a C compiler
        return first_line(error)
    return None
