"""Links that transfer records into slots, and host memory for slots."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor


class LinkError(RuntimeError):
    """Failed transfer of a record; the message names record and reason."""


class Copy(Protocol):
    """Transfer of a record into a slot."""

    def wait(self) -> None:
        """Make later computation wait for the transfer.

        With a GPU the host does not block. Raises LinkError at each call if the transfer failed.
        """
        ...

    @property
    def arrived(self) -> float | None:
        """End of the transfer (host's `time.perf_counter`); None before.

        0.0 if the host does not wait for transfers.
        """
        ...


class Link(Protocol):
    """Link that transfers records from one memory to another, in order."""

    @property
    def busy_s(self) -> float:
        """Seconds of transfers so far."""
        ...

    def mark(self) -> Any:
        """Return a mark of the computation queued so far, for `start`."""
        ...

    def start(self, block: int, slot: Tensor, after: Any) -> Copy:
        """Start to transfer a block's record into a slot, and return immediately.

        The slot is uint8 [record bytes]. `after`: mark of the computation that must end before; None: no condition.
        """
        ...

    def close(self) -> None:
        """End all transfers and free the link's memory.

        Slots may be freed afterwards.
        """
        ...


class Throttled:
    """Link limited to a rate, for tests and simulations."""

    def __init__(
        self,
        link: Link,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._link, self._rate, self._clock, self._sleep = link, bytes_per_second, clock, sleep
        self._free = 0.0  # when all that was started will have been moved
        self.busy_s = 0.0

    def mark(self) -> Any:
        return self._link.mark()

    def start(self, block: int, slot: Tensor, after: Any) -> Copy:
        took = slot.nbytes / self._rate
        self._free = max(self._clock(), self._free) + took
        self.busy_s += took
        return _Due(self._link.start(block, slot, after), self._free, self._clock, self._sleep)

    def close(self) -> None:
        self._link.close()


class _Due:
    def __init__(self, copy: Copy, due: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._copy, self._due, self._clock, self._sleep = copy, due, clock, sleep

    @property
    def arrived(self) -> float | None:
        arrived = self._copy.arrived
        return None if arrived is None or self._clock() < self._due else max(arrived, self._due)

    def wait(self) -> None:
        self._copy.wait()
        while (left := self._due - self._clock()) > 0:
            self._sleep(left)


def host_slots(record_bytes: int, count: int) -> list[Tensor]:
    """Return `count` page-aligned slots in host memory, uint8 [record_bytes]."""
    return [host_memory(record_bytes) for _ in range(count)]


def host_memory(num_bytes: int) -> Tensor:
    """Return zeroed, page-aligned host memory, uint8 [num_bytes].

    The size is not rounded up. The memory is freed with its last view.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # systems without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
