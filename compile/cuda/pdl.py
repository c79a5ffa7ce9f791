"""Launches of kernels: with as many stages as shared memory holds, one behind the other.

Programmatic dependent launch: kernels of compute capability 9.0 and above begin before the one in front has ended.

What makes it safe, whatever memory kernels hand to each other or reuse, split products and replays included:

- Each such kernel first waits (`gdc_wait`) for the one in front to end, and only then lets the next one begin
  (`gdc_launch_dependents`). So a kernel begins when the one two in front of it has ended: at most two are alive.
- Before it waits it reads and writes nothing; prefetches of weights, which nobody writes, are all it does.
- What is launched otherwise (by torch, Inductor, cuBLAS, or without these options) begins when all before it has ended,
  and so does the first kernel of a graph.

Imports no Triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

T = TypeVar("T")

VARIABLE = "SHARESD_PDL"
"""0: each kernel begins when the one before it has ended."""


def launch_options(device: torch.device) -> dict[str, bool]:
    """What kernels with a constant PDL are launched with: whether they wait, and the launch's own option."""
    if device.type != "cuda":
        return {"PDL": False}  # Triton's interpreter knows no such option
    able = torch.cuda.get_device_capability(device) >= (9, 0) and os.environ.get(VARIABLE) != "0"
    return {"PDL": able, "launch_pdl": able}


_fitting: dict[Hashable, int] = {}


def with_room(run: Callable[[int], T], stages: int, kernel: Hashable) -> T:
    """Run with so many stages, or with fewer where the GPU lacks shared memory for all: bits do not change.

    What fits is remembered by `kernel`, which names the device too. Raises what Triton says where one is too much.
    """
    tried = _fitting.get(kernel, stages)
    while True:
        try:
            return run(tried)
        except Exception as error:
            if type(error).__name__ != "OutOfResources" or tried == 1:
                raise
            tried = _fitting[kernel] = tried - 1
