"""A GPU that is made up, whose tensors are a CPU's: copies on a stream of their own happen as late as they may.

They are done when computation waits for an event behind them, and never if it does not: what is missing shows in the
text. Clocks tell when each would run, as those of `timed_device` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sharesd.weights.cuda_backend import CudaBackend
from tests.helpers.timed_device import TimedDevice, TimedEvent, TimedStream


class LateStream(TimedStream):
    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0
        self._copies: list[Callable[[], object]] = []

    def later(self, copy: Callable[[], object]) -> None:
        self._copies.append(copy)
        self.num_asked += 1

    def catch_up(self, num_asked: int) -> None:
        """Do the first so many copies that were ever asked for."""
        while self._copies and self.num_asked - len(self._copies) < num_asked:
            self._copies.pop(0)()

    def wait_event(self, event: LateEvent) -> None:  # type: ignore[override]
        super().wait_event(event)
        if event.stream is not None:
            event.stream.catch_up(event.num_asked)

    def synchronize(self) -> None:
        self.catch_up(self.num_asked)


class LateEvent(TimedEvent):
    stream: LateStream | None = None
    num_asked = 0

    def record(self, stream: LateStream) -> None:  # type: ignore[override]
        super().record(stream)
        self.stream, self.num_asked = stream, stream.num_asked


class LateDevice(TimedDevice):
    """Stands in for `torch.cuda`; `free` bytes of its memory are. Slots and blocks are known by their addresses."""

    Event, Stream = LateEvent, LateStream
    free = 10**12

    @contextmanager
    def stream(self, stream: TimedStream) -> Iterator[None]:
        assert isinstance(stream, LateStream)
        with super().stream(stream), _Copies(self, stream):
            yield

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 2 * self.free

    def empty_cache(self) -> None:
        pass

    def home(self, device: torch.device, dtype: torch.dtype, max_rows: int, batch: int) -> CudaBackend:
        """In place of `backend_for`."""
        return CudaBackend(torch.device("cpu"), dtype, max_rows, batch, cuda=self)


class _Copies(TorchDispatchMode):
    def __init__(self, device: LateDevice, stream: LateStream) -> None:
        super().__init__()
        self._device, self._stream = device, stream

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        assert func is torch.ops.aten.copy_.default, f"{func} on the stream of copies"
        slot, record, non_blocking = args
        assert non_blocking and isinstance(slot, Tensor) and slot.is_contiguous() and slot.nbytes == record.nbytes
        assert self._device.pinned.get(record.data_ptr()) == record.nbytes, "a copy from memory that is not pinned"
        self._stream.later(partial(func, slot, record))
        self._device.write(slot.data_ptr(), record.data_ptr())
        return slot
