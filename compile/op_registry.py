"""Namespace of this package's operators in torch, for calls from Inductor's code."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

NAMESPACE = "sharesd"
LIBRARY = Library(NAMESPACE, "DEF")

HAS_TRITON = find_spec("triton") is not None
"""True if kernels for GPUs can be compiled."""


_use_triton = HAS_TRITON
_use_cpp = True


def use_own_kernels(use: bool) -> None:
    """Select the project's or torch's kernels for models loaded later."""
    global _use_triton
    _use_triton = use


def runs_triton(device: torch.device) -> bool:
    """Return True if the project's Triton kernels run on a device."""
    return device.type == "cuda" and _use_triton


def use_cpp_kernels(use: bool) -> None:
    """Select the project's or torch's kernels on a CPU."""
    global _use_cpp
    _use_cpp = use


def runs_cpp(device: torch.device) -> bool:
    """Return True if the project's C++ kernels run on a device."""
    return device.type == "cpu" and _use_cpp


def register_cuda(name: str, kernel: Callable[..., Any]) -> None:
    """Register a CUDA kernel that runs on its first argument's device.

    Triton launches on the current device. The first argument is a tensor or a list of tensors.
    """

    @wraps(kernel)
    def launch(first: Tensor | list[Tensor], *rest: Any, **more: Any) -> Any:
        with torch.cuda.device_of(first if isinstance(first, Tensor) else first[0]):
            return kernel(first, *rest, **more)

    LIBRARY.impl(name, launch, "CUDA")


def define(
    schema: str,
    *,
    meta: Callable[..., Any],
    cuda: Callable[..., Any] | str | None = None,
    cpu: Callable[..., Any] | None = None,
) -> None:
    """Define an operator with its kernels.

    `meta` returns outputs of the right shapes. `cuda` may be `module:function` below `compile.cuda`, which is imported
    at the first call: it imports Triton, which not every machine has.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, meta, "Meta")
    if cuda is not None:
        register_cuda(name, _late(cuda) if isinstance(cuda, str) else cuda)
    if cpu is not None:
        LIBRARY.impl(name, cpu, "CPU")


def _late(place: str) -> Callable[..., Any]:
    module, _, function = place.partition(":")

    def call(*arguments: Any, **more: Any) -> Any:
        return getattr(import_module(f"compile.cuda.{module}"), function)(*arguments, **more)

    return call


def define_for_triton(schema: str, kernel: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """Define an operator that launches Triton kernels, with its shapes.

    On a CPU, Triton's interpreter runs it, for tests.
    """
    define(schema, meta=meta, cuda=kernel, cpu=kernel)
