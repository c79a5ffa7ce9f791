"""Prefetching of offloaded blocks into a few slots, in order of use.

Each pass uses the same blocks in the same order. As soon as a slot is free, the next block without a slot is fetched.
At the end of a pass this is a block of the next pass: the first blocks arrive while a drafter computes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from offload.transfer import Copy, Link, LinkError


class _Coming(NamedTuple):
    """Block in a slot, or in transfer to it."""

    block: int
    slot: int
    copy: Copy


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferStats:
    """Statistics of a prefetcher's transfers since its creation."""

    num_bytes: int
    """Bytes of all records whose transfers were started."""
    waited_s: float
    """Seconds that the host waited for blocks; about 0 with a GPU."""
    busy_s: float
    """Seconds in which the link was busy."""
    elapsed_s: float
    """Seconds since creation."""

    def since(self, before: TransferStats) -> TransferStats:
        """Return the difference from earlier statistics."""
        return TransferStats(**{name: getattr(self, name) - getattr(before, name) for name in self.__slots__})

    def __add__(self, other: TransferStats) -> TransferStats:
        return TransferStats(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    @property
    def utilisation(self) -> float:
        """Share of the time in which the link was busy."""
        return min(1.0, self.busy_s / self.elapsed_s) if self.elapsed_s > 0 else 0.0


class Prefetcher:
    """Prefetcher of blocks into slots; not thread-safe."""

    def __init__(
        self,
        blocks: Sequence[int],
        slots: Sequence[Tensor],
        link: Link,
        *,
        sizes: Mapping[int, int] | None = None,
        check: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        """Take ownership of the link, and start to fetch.

        `blocks`: in order of use. `slots`: uint8 [bytes]; with two or more, transfers overlap computation. `sizes`:
        block -> bytes of its record at the beginning of a slot; None: records fill slots.
        `check`: called with each block and its slot at the block's first use; raises LinkError if the record differs
        from the stored one.
        """
        if not blocks or not slots or len(set(blocks)) < len(blocks):
            raise ValueError(
                f"a stream of {len(blocks)} blocks through {len(slots)} slots; give different blocks and a slot"
            )
        self.blocks, self.slots = tuple(blocks), tuple(slots[: len(blocks)])
        self._after = dict(zip(self.blocks, (*self.blocks[1:], self.blocks[0]), strict=True))
        self._link, self._sizes, self._check = link, sizes, check
        self._unchecked = set(blocks if check is not None else ())
        self._in_use: deque[_Coming] = deque()  # in use
        self._coming: deque[_Coming] = deque()  # in the order of their use
        self._overlap_work: Callable[[], bool] | None = None
        self._piece_s = 0.0  # what a piece of that takes
        self._wait_of: dict[int, float] = {}  # seconds that each block was late, the last time
        self._num_bytes, self._waited_s, self._started = 0, 0.0, time.perf_counter()
        self._fill(self.blocks[0], dict.fromkeys(range(len(self.slots))))

    def need(self, block: int) -> int:
        """Wait for a block, and return its slot, valid until `done`.

        A block that is not the next in order starts another pass, which releases all blocks in use. Raises LinkError
        if the transfer fails; the next pass fetches the block again.
        """
        for fetched in self._in_use:
            if fetched.block == block:
                return fetched.slot
        if not self._coming or self._coming[0].block != block:
            self._turn_to(block)
        coming = self._coming[0]
        asked = time.perf_counter()
        self._use_the_wait(coming, asked)
        started = time.perf_counter()
        try:
            coming.copy.wait()
            if block in self._unchecked:
                assert self._check is not None
                self._check(block, self._record(block, coming.slot))
                self._unchecked.remove(block)
        except LinkError:
            self._drop()  # all of it will be fetched again
            raise
        finally:
            self._waited_s += time.perf_counter() - started
        self._wait_of[block] = max(0.0, (coming.copy.arrived or 0.0) - asked)
        self._in_use.append(self._coming.popleft())
        return coming.slot

    @contextmanager
    def overlap(self, work: Callable[[], bool] | None) -> Iterator[None]:
        """Run `work` in pieces while the host waits for a block.

        `work` returns False after the last piece. A piece starts only if it is expected to end within the time of the
        block's last wait.
        """
        self._overlap_work, self._piece_s = work, 0.0
        try:
            yield
        finally:
            self._overlap_work = None

    def _use_the_wait(self, coming: _Coming, asked: float) -> None:
        now, end = asked, asked + self._wait_of.get(coming.block, 0.0)
        while self._overlap_work is not None and coming.copy.arrived is None and now + self._piece_s < end:
            if not self._overlap_work():
                self._overlap_work = None
            self._piece_s, now = time.perf_counter() - now, time.perf_counter()

    def done(self, block: int) -> None:
        """Release the first block in use; fetch another into its slot."""
        assert self._in_use and self._in_use[0].block == block, f"block {block} is not the first in use"
        fetched = self._in_use.popleft()
        last = self._coming[-1] if self._coming else (self._in_use or [fetched])[-1]
        self._coming.append(self._fetch(self._after[last.block], fetched.slot, fetched))

    @property
    def traffic(self) -> TransferStats:
        """Statistics of the transfers so far."""
        return TransferStats(
            num_bytes=self._num_bytes,
            waited_s=self._waited_s,
            busy_s=self._link.busy_s,
            elapsed_s=time.perf_counter() - self._started,
        )

    def close(self) -> None:
        """End all transfers; afterwards the caller owns the slots."""
        self._coming.clear()
        self._in_use.clear()
        self._link.close()

    def _drop(self) -> None:
        """Wait for all pending transfers, and discard their blocks."""
        while self._coming:
            with suppress(LinkError):
                self._coming.popleft().copy.wait()

    def _turn_to(self, block: int) -> None:
        """Restart the order at a block.

        The slots of blocks that follow are kept.
        """
        if block not in self._after:
            raise ValueError(f"block {block} is not in this stream")
        fetched = {coming.slot: coming for coming in (*self._in_use, *self._coming)}
        self._in_use.clear()
        self._coming.clear()
        self._fill(block, {slot: fetched.get(slot) for slot in range(len(self.slots))})

    def _fill(self, block: int, fetched: dict[int, _Coming | None]) -> None:
        """Fetch a block and its successors into all slots."""
        wanted = [block]
        while len(wanted) < len(self.slots):
            wanted.append(self._after[wanted[-1]])
        kept = {coming.block: coming for coming in fetched.values() if coming is not None and coming.block in wanted}
        for coming in kept.values():
            del fetched[coming.slot]
        for each in wanted:
            self._coming.append(kept[each] if each in kept else self._fetch(each, *fetched.popitem()))

    def _fetch(self, block: int, slot: int, before: _Coming | None) -> _Coming:
        """Start to fetch a block into a slot.

        The transfer starts after the last transfer into the slot and after the slot's last use.
        """
        if before is not None and before.block == block:
            return before
        if before is not None:
            with suppress(LinkError):
                before.copy.wait()
        record = self._record(block, slot)
        self._num_bytes += record.nbytes
        return _Coming(block, slot, self._link.start(block, record, self._link.mark()))

    def _record(self, block: int, slot: int) -> Tensor:
        """Return the memory of a block's record in a slot."""
        return self.slots[slot] if self._sizes is None else self.slots[slot][: self._sizes[block]]
