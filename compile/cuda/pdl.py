"""Programmatic dependent launch, and as many stages as shared memory holds.

Kernels of compute capability 9.0 and above begin before their predecessor has ended. This is safe for all memory that
kernels share or reuse, split products and replays included:

- Each such kernel waits (`dependent_launch.wait_for_predecessor`, in every thread of every program) for the end of its
  predecessor, and ends after that. The predecessor had waited for its own before it ended, and so on: past its wait, a
  kernel is alone with its successors, and sees all that was written before, however many have begun meanwhile.
- Before it waits it writes nothing, and reads only weights, which no kernel writes. `gemm.py` prefetches them into the
  second level of cache, `stream.cu` copies them into its shared memory.
- So a kernel may let its successor begin at any time. Those of Triton do after their wait,
  but for attention's if asked to (`attention_options`). `stream.cu` does when its last weights are asked for, often
  before its wait.
- What programs of one launch hand to each other (`gemm.py`, `attention_step.py`) goes by counters, past that wait. It
  ends with the launch, before any successor's wait does.
- A successor begins when all programs have let it go or ended, so all of them have begun: none that waits takes the
  place of one that it waits for.
- A kernel that does not wait must not be launched with these options. Other launches (by torch, Inductor, cuBLAS)
  begin when all before have ended, and so does the first kernel of a graph.

Imports no Triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

T = TypeVar("T")

VARIABLE = "SHARESD_PDL"
"""Environment variable; 0: each kernel starts after its predecessor's end; early: see `attention_options`."""


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return options of launches, and the constant PDL of their kernels."""
    if device.type != "cuda":
        return {"PDL": False}  # Triton's interpreter has no such option
    able = torch.cuda.get_device_capability(device) >= (9, 0) and os.environ.get(VARIABLE) != "0"
    return {"PDL": able, "launch_pdl": able}


def attention_options(device: torch.device) -> dict[str, int]:
    """Return `launch_options` of attention's kernels.

    With "early" PDL is 2: they let their successor begin before they wait, so that the product after them copies its
    weights meanwhile.
    """
    options: dict[str, int] = {**launch_options(device)}
    if options["PDL"] and os.environ.get(VARIABLE) == "early":
        options["PDL"] = 2
    return options


_fitting: dict[Hashable, int] = {}


def with_room(run: Callable[[int], T], stages: int, kernel: Hashable) -> T:
    """Run with `stages`, or fewer if shared memory is short.

    Bits do not change. The number that fits is kept by `kernel`, which names the device too. Raises Triton's error if
    one stage is too many.
    """
    tried = _fitting.get(kernel, stages)
    while True:
        try:
            return run(tried)
        except Exception as error:
            if type(error).__name__ != "OutOfResources" or tried == 1:
                raise
            tried = _fitting[kernel] = tried - 1
