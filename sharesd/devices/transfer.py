"""Copies between devices, without a wait of the host."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from compile.cuda_graphs import call_between_graphs
from sharesd.devices.selection import use


def copy_to_device(
    device: torch.device, *tensors: Tensor, onto: Sequence[tuple[Tensor, Tensor]] = (), seconds: float = 0.0
) -> list[Tensor]:
    """Copy tensors to a device, where captures continue in another graph.

    `tensors` are copied even on the same device: stages share no memory. `onto`: pairs (copy, tensor) of existing
    copies. `seconds`: delay, to simulate slower links.
    """
    copies: list[Tensor] = []

    def go() -> None:
        use(device)
        if seconds:
            delay(seconds)
        if not copies:
            copies.extend(torch.empty_like(tensor, device=device) for tensor in tensors)
        for copy, tensor in (*onto, *zip(copies, tensors, strict=True)):
            copy_between(copy, tensor)

    call_between_graphs(go)
    return copies


def delay(seconds: float) -> None:
    """Busy-wait, since a core that slept is slow for a while."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def copy_between(copy: Tensor, tensor: Tensor) -> None:
    """Copy a tensor to another device; streams of both wait for it."""
    copy.copy_(tensor, non_blocking=True)
