"""The namespace in which this package registers its operators with torch, so that Inductor can call them."""

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

LIBRARY = Library("sharesd", "DEF")

HAS_TRITON = find_spec("triton") is not None
"""Whether kernels for GPUs can be compiled: torch brings Triton along on Linux."""


_own = HAS_TRITON


def use_own_kernels(use: bool) -> None:
    """Run our kernels on GPUs from now on, or torch's own: of this process. Models that are loaded stay as they are."""
    global _own
    _own = use


def runs_triton(device: torch.device) -> bool:
    """True where our kernels in Triton run: everyone asks this."""
    return device.type == "cuda" and _own


def on_cuda(name: str, kernel: Callable[..., Any]) -> None:
    """Registers what runs for an operator on CUDA. It is called with the device of its first argument, a tensor or a
    list of them, as the current one: that is where Triton launches.
    """

    @wraps(kernel)
    def launch(first: Tensor | list[Tensor], *rest: Any) -> Any:
        with torch.cuda.device_of(first if isinstance(first, Tensor) else first[0]):
            return kernel(first, *rest)

    LIBRARY.impl(name, launch, "CUDA")
