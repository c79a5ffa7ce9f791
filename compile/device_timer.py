"""Times on a device that runs asynchronously to the host."""

from __future__ import annotations

import time
from itertools import cycle

import torch

Mark = float | torch.cuda.Event

MARKS = 32
"""Number of valid marks of a GPU; older marks are invalid."""


class Clock:
    """Clock of a device's work, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._events = cycle([torch.cuda.Event(enable_timing=True) for _ in range(MARKS if self._cuda else 0)])
        self._stream: torch.cuda.Stream | None = None

    def mark(self) -> Mark:
        """Return a mark at the end of all work queued so far."""
        if not self._cuda:
            return time.perf_counter()
        event, stream = next(self._events), self._stream
        number = torch.cuda.current_device() if self._device.index is None else self._device.index
        if stream is None or stream.cuda_stream != torch._C._cuda_getCurrentRawStream(number):
            stream = self._stream = torch.cuda.current_stream(number)  # which takes ten times as long
        event.record(stream)
        return event

    def wait(self, mark: Mark) -> None:
        """Wait until the device has reached a mark."""
        if not isinstance(mark, float):
            mark.synchronize()

    def has_passed(self, mark: Mark) -> bool:
        """Return True if the device is known to have reached a mark; a host alone has no such marks."""
        return not isinstance(mark, float) and mark.query()

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the time between two marks that the device has passed."""
        if isinstance(start, float):
            assert isinstance(end, float)
            return end - start
        assert not isinstance(end, float)
        return start.elapsed_time(end) / 1e3
