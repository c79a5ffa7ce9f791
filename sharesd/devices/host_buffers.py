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
    """Places in the host's memory onto which tensors are copied again and again; pinned, where these are on a GPU."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, torch.Size], Tensor] = {}

    def copied(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of what is known by this name, which is whole once the device has come so far."""
        key = name, tensor.shape
        if key not in self._places:
            pinned = tensor.device.type == "cuda"
            self._places[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return self._places[key].copy_(tensor, non_blocking=True)


def copied(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, which is whole once the device has come so far."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
