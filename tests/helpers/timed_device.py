"""A CUDA device that is made up: streams and events with clocks of their own, which tell what would run when.

Whatever is asked of a stream begins when all before it on that stream has ended, and whatever it waits for. So an event
that is missing shows as two things at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple


class Use(NamedTuple):
    """A slot was written or read."""

    slot: int
    block: int
    start: float
    end: float


class TimedStream:
    def __init__(self) -> None:
        self.time = 0.0

    def wait_event(self, event: TimedEvent) -> None:
        self.time = max(self.time, event.time)

    def synchronize(self) -> None:
        pass


class TimedEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self, stream: TimedStream) -> None:
        self.time = stream.time

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: TimedEvent) -> float:
        return 1000 * (end.time - self.time)


class TimedDevice:
    """Stands in for `torch.cuda`. `took` tells how long each copy and each block takes."""

    Event, Stream = TimedEvent, TimedStream

    def __init__(self, took: Callable[[], float], refuses: int = 0) -> None:
        self.took, self._refuses = took, refuses
        self.compute = self._current = self.Stream()
        self.writes: list[Use] = []
        self.reads: list[Use] = []
        self.pinned: dict[int, int] = {}

    def current_stream(self) -> TimedStream:
        return self._current

    @contextmanager
    def stream(self, stream: TimedStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def run(self, slot: int, block: int) -> None:
        self.reads.append(self._use(slot, block))

    def write(self, slot: int, block: int) -> None:
        self.writes.append(self._use(slot, block))

    def _use(self, slot: int, block: int) -> Use:
        stream, start = self._current, self._current.time
        stream.time += self.took()
        return Use(slot, block, start, stream.time)

    def cudart(self) -> SimpleNamespace:
        def register(pointer: int, num_bytes: int, flags: int) -> int:
            if not self._refuses:
                self.pinned[pointer] = num_bytes
            return self._refuses

        return SimpleNamespace(
            cudaHostRegister=register, cudaHostUnregister=lambda pointer: int(self.pinned.pop(pointer, None) is None)
        )


class TimedSlot:
    """Stands in for a slot on that device; records are the numbers of their blocks."""

    nbytes = 1

    def __init__(self, number: int, device: TimedDevice) -> None:
        self._number, self._device = number, device

    def copy_(self, record: int, non_blocking: bool) -> None:
        assert non_blocking
        self._device.write(self._number, record)


def wrong_uses(writes: list[Use], reads: list[Use]) -> list[str]:
    """Reads of slots which did not hold that block all the time."""
    wrong = []
    for read in reads:
        before = [w for w in writes if w.slot == read.slot and w.end <= read.start]
        if not before or before[-1].block != read.block:
            wrong.append(f"block {read.block} was read before it lay in slot {read.slot}")
        elif any(w.slot == read.slot and w.end > read.start and w.start < read.end for w in writes):
            wrong.append(f"block {read.block} was overwritten in slot {read.slot}")
    return wrong
