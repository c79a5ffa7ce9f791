"""Times on a device that may run ahead of the host."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


class Clock:
    """Marks points of a device's work without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Mark:
        """The point that the device has reached once it has done all that was asked of it so far."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Mark) -> None:
        """Until the device has reached it."""
        if not isinstance(mark, float):
            mark.synchronize()

    def seconds(self, start: Mark, end: Mark) -> float:
        """Time between two marks that the device has passed (the caller has synchronised since)."""
        if isinstance(start, float):
            assert isinstance(end, float)
            return end - start
        assert not isinstance(end, float)
        return start.elapsed_time(end) / 1e3
