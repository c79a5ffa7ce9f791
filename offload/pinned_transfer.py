"""Link from pinned host memory to a CUDA device.

Copies run on their own stream. Computation waits for the event that ends a copy. A copy waits for the event that ends
the use of its slot. The host does not wait.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offload.transfer import Copy, host_memory

PROBES, PROBE_BYTES = 4, 2**27
"""Copies to measure a link, and bytes of each copy."""


class PinnedMemory:
    """Page-locked host memory, uint8 [num_bytes].

    torch's allocator rounds pinned sizes up to powers of two. Memory is unlocked by `close`, or with the object. Copies
    from the memory must have ended before.
    """

    def __init__(self, num_bytes: int, *, cuda: Any = torch.cuda) -> None:
        """Allocate and lock; raises ValueError above the limit of locked memory."""
        self.tensor = host_memory(num_bytes)
        cudart = cuda.cudart()
        code = int(cudart.cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0))
        if code:
            raise ValueError(
                f"{num_bytes / 1e9:.1f} GB of host memory cannot be pinned (CUDA error {code}); raise the limit of "
                "locked memory (ulimit -l), or set a lower --cpu-memory-limit"
            )
        self.close = weakref.finalize(self, _unlock, cudart, self.tensor)
        """Unlock the memory; raises RuntimeError if CUDA cannot.

        No copy may read the memory any more.
        """


def _unlock(cudart: Any, memory: Tensor) -> None:
    code = int(cudart.cudaHostUnregister(memory.data_ptr()))
    if code:
        raise RuntimeError(f"pinned memory cannot be given back (CUDA error {code})")


class CudaLink:
    """Link that copies each record into a slot on the current device."""

    def __init__(self, records: Mapping[int, PinnedMemory], *, cuda: Any = torch.cuda) -> None:
        """Take ownership of the blocks' records, which `close` unlocks."""
        self._records, self._cuda = records, cuda
        self._stream = cuda.Stream()
        self._in_flight: deque[tuple[Any, Any]] = deque()  # beginning and end of copies not yet counted
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        while self._in_flight and self._in_flight[0][1].query():
            begin, end = self._in_flight.popleft()
            self._busy_s += begin.elapsed_time(end) / 1000
        return self._busy_s

    def mark(self) -> Any:
        """Return an event recorded on the current stream, which computes."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream())
        return event

    def start(self, block: int, slot: Tensor, after: Any) -> Copy:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        with self._cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            begin.record(self._stream)
            slot.copy_(self._records[block].tensor, non_blocking=True)
            end.record(self._stream)
        self._in_flight.append((begin, end))
        return _EventCopy(end, self._cuda)

    def synchronize(self) -> None:
        """Wait until the last copy has ended."""
        self._stream.synchronize()

    def close(self) -> None:
        self.synchronize()
        for record in self._records.values():
            record.close()


class _EventCopy:
    def __init__(self, end: Any, cuda: Any) -> None:
        self._end, self._cuda = end, cuda
        self.arrived: float | None = 0.0  # the host never waits

    def wait(self) -> None:
        self._cuda.current_stream().wait_event(self._end)


def link_rate(device: torch.device, *, num_bytes: int = PROBE_BYTES, cuda: Any = torch.cuda) -> float:
    """Return the bytes per second from pinned memory to the current device."""
    slot = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    link = CudaLink({0: PinnedMemory(num_bytes, cuda=cuda)}, cuda=cuda)
    try:
        for _ in range(PROBES):
            link.start(0, slot, link.mark())
        link.synchronize()
        return PROBES * num_bytes / link.busy_s
    finally:
        link.close()
