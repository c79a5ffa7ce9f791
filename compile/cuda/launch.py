"""Programmatic dependent launch: kernels of compute capability 9.0 and above begin before the one in front has ended.

What makes it safe, whatever memory kernels hand to each other or reuse, split products and replays included:

- Each such kernel first waits (`gdc_wait`) for the one in front to end, and only then lets the next one begin
  (`gdc_launch_dependents`). So a kernel begins when the one two in front of it has ended: at most two are alive.
- Before it waits it reads and writes nothing; prefetches of weights, which nobody writes, are all it does.
- What is launched otherwise (by torch, Inductor, cuBLAS, or without these options) begins when all before it has ended,
  and so does the first kernel of a graph.

Imports no Triton.
"""

from __future__ import annotations

import torch


def launch_options(device: torch.device) -> dict[str, bool]:
    """What kernels with a constant PDL are launched with: whether they wait, and the launch's own option."""
    if device.type != "cuda":
        return {"PDL": False}  # Triton's interpreter knows no such option
    able = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": able, "launch_pdl": able}
