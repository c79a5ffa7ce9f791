"""Where records of blocks that travel are kept, from loading on: in a file, or in pinned memory of the host."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

from torch import Tensor

from offload.block_file import Store, Writer, open_store
from offload.disk_reader import DiskLink
from offload.pinned_transfer import PinnedMemory
from offload.planner import Plan
from offload.prefetcher import Stream
from offload.transfer import Link, Throttled, host_memory
from sharesd.models.progress import Progress
from sharesd.weights.backend import Home, OnGpu
from sharesd.weights.offload_planner import Offloading


class Records(Protocol):
    """A context manager around reading a checkpoint."""

    def __enter__(self) -> Records: ...

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None: ...

    def room(self, block: int) -> Tensor:
        """Memory of the host, uint8 [record bytes], for the record of a block that travels. It may be that of the one
        before.
        """
        ...

    def keep(self, block: int, record: Tensor) -> None:
        """The record of a block, be it one that travels or one that stays, is whole now."""
        ...

    def stream(self, plan: Plan, rate: float | None) -> Stream:
        """How those that travel come back, once all have been kept; slowed down to `rate` bytes a second."""
        ...


class StoredRecords:
    """All blocks are in a file, which is written once."""

    def __init__(self, offloading: Offloading, home: Home, progress: Progress) -> None:
        """Raises StoreError where the store cannot be used, or its disk has no room for it."""
        self._content, self._home, self._progress = offloading.content, home, progress
        self._open = ExitStack()
        self._store: Store | None = open_store(offloading.folder, offloading.content)
        self._writer: Writer | None = None
        if self._store is None:
            self._writer = self._open.enter_context(Writer(offloading.folder, offloading.content))
        self._passing: Tensor | None = None

    def __enter__(self) -> StoredRecords:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._passing = None
        with self._open:
            if kind is None and self._writer is not None:
                self._store = self._writer.finish()

    def room(self, block: int) -> Tensor:
        if self._passing is None:
            self._passing = host_memory(self._content.layout.record_bytes)
        return self._passing

    def keep(self, block: int, record: Tensor) -> None:
        if self._writer is not None and block in self._writer.missing:
            self._writer.write(block, record)
            num_blocks = self._content.num_blocks
            self._progress("writing blocks", num_blocks - len(self._writer.missing), num_blocks)

    def stream(self, plan: Plan, rate: float | None) -> Stream:
        assert self._store is not None, "the checkpoint has not been read"
        link = DiskLink(self._store.path, {record.block: record.offset for record in self._store.records})
        slots = self._home.slots(self._content.layout.record_bytes, plan.slots)
        return Stream(plan.travelling, slots, _slowed(link, rate), check=self._store.check)


class PinnedRecords:
    """Each block that travels has pinned memory of its own."""

    def __init__(self, offloading: Offloading, home: OnGpu) -> None:
        self._record_bytes, self._home = offloading.content.layout.record_bytes, home
        self._records: dict[int, PinnedMemory] = {}

    def __enter__(self) -> PinnedRecords:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            for record in self._records.values():
                record.close()

    def room(self, block: int) -> Tensor:
        """ValueError where no more memory can be pinned."""
        self._records[block] = self._home.pinned(self._record_bytes)
        return self._records[block].tensor

    def keep(self, block: int, record: Tensor) -> None:
        """Nothing: it lies where it shall."""

    def stream(self, plan: Plan, rate: float | None) -> Stream:
        link = self._home.link(self._records)
        return Stream(plan.travelling, self._home.slots(self._record_bytes, plan.slots), _slowed(link, rate))


def records_of(offloading: Offloading, home: Home, progress: Progress) -> Records:
    """Of a model that is computed there."""
    if isinstance(home, OnGpu):
        return PinnedRecords(offloading, home)
    return StoredRecords(offloading, home, progress)


def _slowed(link: Link, rate: float | None) -> Link:
    return link if rate is None else Throttled(link, rate)
