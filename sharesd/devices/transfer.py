"""Copies between host and devices, and between devices, without a wait of the host.

Host memory is named as such: programs may have set another default device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compile.cuda_graphs import call_between_graphs
from sharesd.devices.selection import use


def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)


def upload(tensor: Tensor, numbers: Sequence[Any]) -> None:
    source = torch.tensor(numbers, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
    tensor.copy_(source, non_blocking=True)


def reserve_pinned(num: int, device: torch.device) -> None:
    """Pin powers of two up to `num` numbers: later copies allocate nothing."""
    if device.type == "cuda":
        sizes = [2**power for power in range(num.bit_length() + 1)]
        blocks = [torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True) for size in (*sizes, *sizes)]
        del blocks


class PinnedBuffers:
    """Host buffers by name, in two copies since one may be unread."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[str, torch.Size], list[Tensor]] = {}
        self._turn = 0

    def turn(self) -> None:
        """Keep the copies of this round during the next one."""
        self._turn = 1 - self._turn

    def copy(self, name: str, tensor: Tensor, times: int = 1) -> Tensor:
        """Copy to a named buffer of `times` the first size, without waiting."""
        key = name, tensor.shape
        if key not in self._views:
            num, buffer = tensor.numel(), self._buffers.get(name)
            if buffer is None or buffer.shape[1] < num:
                pinned = tensor.device.type == "cuda"
                place: dict[str, Any] = {"dtype": tensor.dtype, "device": "cpu", "pin_memory": pinned}
                buffer = self._buffers[name] = torch.empty(2, num * times, **place)
            self._views[key] = [half[:num].view(tensor.shape) for half in buffer]
        return self._views[key][self._turn].copy_(tensor, non_blocking=True)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, complete after the device's pending work."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


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
