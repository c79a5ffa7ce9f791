"""From device to device: work goes on there, with copies of what it needs. The host waits for nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from compile.cuda_graphs import between_graphs
from sharesd.devices.selection import use


def hop(
    device: torch.device, *tensors: Tensor, onto: Sequence[tuple[Tensor, Tensor]] = (), seconds: float = 0.0
) -> list[Tensor]:
    """What is launched from now on runs on this device: copies of tensors there (on the same device, too: stages share
    no memory), for which the pairs (copy, tensor) `onto` have a place already. Captures go on there in another graph.

    It is held back for so many seconds, to see what slower links do.
    """
    copies: list[Tensor] = []

    def go() -> None:
        use(device)
        if seconds:
            hold_back(seconds)
        if not copies:
            copies.extend(torch.empty_like(tensor, device=device) for tensor in tensors)
        for copy, tensor in (*onto, *zip(copies, tensors, strict=True)):
            copy_over(copy, tensor)

    between_graphs(go)
    return copies


def hold_back(seconds: float) -> None:
    """Wait, awake: a processor that slept is slow for a while, and who waits for a link does not sleep."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def copy_over(copy: Tensor, tensor: Tensor) -> None:
    """Between GPUs, streams of both wait for it; the host does not."""
    copy.copy_(tensor, non_blocking=True)
