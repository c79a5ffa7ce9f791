"""Between the host and a GPU, by pinned memory: the host waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sent(numbers: Sequence, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers, as a tensor there."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def write(tensor: Tensor, numbers: Sequence) -> None:
    """Numbers into a tensor that stays where it is."""
    source = torch.tensor(numbers, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    tensor.copy_(source, non_blocking=True)


class HostCopies:
    """Places in the host's memory onto which tensors are copied again and again; pinned, where these are on a GPU.

    Each has room for two copies: one of the round before may not have been read yet.
    """

    def __init__(self) -> None:
        self._places: dict[str, Tensor] = {}
        self._views: dict[tuple[str, torch.Size], list[Tensor]] = {}
        self._turn = 0

    def turn(self) -> None:
        """Leave the copies of this round alone in the next."""
        self._turn = 1 - self._turn

    def copied(self, name: str, tensor: Tensor, times: int = 1) -> Tensor:
        """Copy of what has this name, which is whole once the device has come so far.

        There is one place for each name, with room for `times` as many numbers as the first tensor of it has.
        """
        key = name, tensor.shape
        if key not in self._views:
            num, place = tensor.numel(), self._places.get(name)
            if place is None or place.shape[1] < num:
                pinned = tensor.device.type == "cuda"
                place = self._places[name] = torch.empty(2, num * times, dtype=tensor.dtype, pin_memory=pinned)
            self._views[key] = [half[:num].view(tensor.shape) for half in place]
        return self._views[key][self._turn].copy_(tensor, non_blocking=True)


def copied(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, which is whole once the device has come so far."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
