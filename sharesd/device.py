"""Which device a name means."""

from __future__ import annotations

import torch


def use(device: torch.device) -> None:
    """What this thread launches without naming a GPU goes to this one: graphs, events and kernels of Triton."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def device_of(name: str) -> torch.device:
    """The device of a name; ValueError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}; give cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; give cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r} but torch {torch.__version__} finds no GPU; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r} but there are {torch.cuda.device_count()} GPUs; count from 0")
    return device
