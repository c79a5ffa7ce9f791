"""Choice of kernels: in Triton or C++, or those of torch."""

from __future__ import annotations

import logging
import os
import platform
from typing import NamedTuple, get_args

import torch

from compile.cpp_extension import obstacle
from compile.op_registry import HAS_TRITON, use_cpp_kernels, use_own_kernels
from sharesd.config import CompileMode, Kernels
from sharesd.devices.selection import first_line

log = logging.getLogger(__name__)

VARIABLE = "SHARESD_KERNELS"
"""Environment variable in place of `--kernels auto`."""
NO_TRITON = "Triton is not installed"
PROCESSORS = ("x86_64", "amd64", "x64")
"""Names of the processor of the CPU kernels, in lower case."""


class KernelChoice(NamedTuple):
    kernels: Kernels
    triton: bool
    """True if Triton compiles, which Inductor needs too."""


def choose_kernels(
    asked: Kernels, device: torch.device, dtype: torch.dtype, compile: CompileMode = "auto"
) -> KernelChoice:
    """Switch on kernels; ValueError if those asked for do not run."""
    wanted = os.environ.get(VARIABLE) or "auto" if asked == "auto" else asked
    if wanted not in get_args(Kernels):
        raise ValueError(f"{VARIABLE} is {wanted!r}; choose one of {', '.join(get_args(Kernels))}")
    if device.type == "cpu":
        return _for_cpu(asked, dtype, compile)
    why_not = None if wanted == "torch" else problem(device, dtype)
    if why_not is not None and wanted == "triton":
        raise ValueError(f"kernels are to be 'triton', which do not run on {device}: {why_not}; take --kernels torch")
    if why_not is not None:
        log.warning("our kernels do not run on %s (%s); torch's own do, which is slower", device, why_not)
    use_own_kernels(wanted != "torch" and why_not is None)
    if wanted == "torch" or why_not is not None:
        return KernelChoice("torch", HAS_TRITON and why_not is None)
    return KernelChoice("triton", True)


def _for_cpu(asked: Kernels, dtype: torch.dtype, compile: CompileMode) -> KernelChoice:
    if asked == "triton":
        log.warning("--kernels triton: no effect on a CPU")
    why_not = None if asked == "torch" else cpu_problem(dtype, any_processor=compile == "native")
    runs = asked != "torch" and why_not is None
    if not runs and compile not in ("auto", "off"):
        reason = "kernels are to be 'torch'" if why_not is None else f"CPU kernels do not run here: {why_not}"
        raise ValueError(f"compile is {compile!r}, which takes CPU kernels, and {reason}; take --compile off, or auto")
    if why_not is not None:
        log.warning("CPU kernels do not run here (%s); torch's operations do, which is slower", why_not)
    use_cpp_kernels(runs)
    return KernelChoice("auto" if runs else "torch", True)


def cpu_problem(dtype: torch.dtype, *, any_processor: bool = False) -> str | None:
    """Return the reason why CPU kernels do not run on this machine."""
    machine = platform.machine()
    if machine.lower() not in PROCESSORS and not any_processor:
        return f"they are for x86-64, and this is {machine or 'an unknown processor'}; --compile native tries them"
    return obstacle(str(dtype).removeprefix("torch."), "sampling_ops")


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
