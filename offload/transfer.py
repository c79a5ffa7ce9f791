"""What moves records into slots: the protocol of links, one slowed down to a given rate, and memory for slots."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor


class LinkError(RuntimeError):
    """A record did not arrive; the message says which one, and why."""


class Copy(Protocol):
    """A record on its way into a slot."""

    def wait(self) -> None:
        """What is computed from now on finds the record in its slot. On a device the host goes on at once.

        Raises LinkError where it did not arrive, each time it is asked.
        """
        ...

    @property
    def arrived(self) -> float | None:
        """When there was nothing left to wait for on the host (`time.perf_counter`); None: not yet."""
        ...


class Link(Protocol):
    """Moves records from one memory to another, in the order in which it was told to."""

    @property
    def busy_s(self) -> float:
        """Seconds in which something was moved, or will have been once all that was started has arrived."""
        ...

    def mark(self) -> Any:
        """The point that computation has been told to reach so far: what `start` may have to wait for."""
        ...

    def start(self, block: int, slot: Tensor, after: Any) -> Copy:
        """Begin to move the record of a block into a slot (uint8, as long as the record), once computation has reached
        the mark `after` (None: at once). Returns immediately.
        """
        ...

    def close(self) -> None:
        """End all that is under way and give back what is held. Slots may be freed afterwards."""
        ...


class Throttled:
    """A link that takes as long as one of so many bytes per second would: for tests and simulations."""

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
    """A copy that ends no earlier than it is due."""

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
    """So many slots in the host's memory, uint8 [record_bytes] each, which begin with a page."""
    return [host_memory(record_bytes) for _ in range(count)]


def host_memory(num_bytes: int) -> Tensor:
    """Zeroed memory uint8 [num_bytes] of exactly this size, which begins with a page; it goes with its last view."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # systems without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
