"""Storage of offloaded blocks' records: a file, or pinned host memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from torch import Tensor

from offload.block_file import Store, Writer, open_store
from offload.disk_reader import DiskLink
from offload.pinned_transfer import PinnedMemory
from offload.plan import Plan
from offload.prefetcher import Prefetcher
from offload.transfer import Link, Throttled, host_memory
from sharesd.models.checkpoint import Progress
from sharesd.weights.backend import CudaBackend, WeightBackend
from sharesd.weights.offload_planner import Offloading


class BlockStorage(Protocol):
    """Storage of records, and context manager around reading a checkpoint."""

    def __enter__(self) -> BlockStorage: ...

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None: ...

    def staging_buffer(self, block: int) -> Tensor:
        """Return host memory, uint8 [record bytes], which the next call may reuse."""
        ...

    def commit(self, block: int, record: Tensor) -> None:
        """Store the complete record of a block, offloaded or resident."""
        ...

    def stream(self, plan: Plan, rate: float | None) -> Prefetcher:
        """Return the prefetcher of committed blocks; `rate`: simulated bytes per second."""
        ...


class DiskBlockStorage:
    """File with all blocks, written once."""

    def __init__(self, offloading: Offloading, backend: WeightBackend, progress: Progress) -> None:
        self._content, self._backend, self._progress = offloading.content, backend, progress
        self._open = ExitStack()
        self._store: Store | None = open_store(offloading.folder, offloading.content)
        self._writer: Writer | None = None
        if self._store is None:
            self._writer = self._open.enter_context(Writer(offloading.folder, offloading.content))
        self._passing: Tensor | None = None

    def __enter__(self) -> DiskBlockStorage:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._passing = None
        with self._open:
            if kind is None and self._writer is not None:
                self._store = self._writer.finish()

    def staging_buffer(self, block: int) -> Tensor:
        if self._passing is None:
            self._passing = host_memory(max(layout.record_bytes for layout in self._content.layouts))
        return self._passing[: self._content.layouts[block].record_bytes]

    def commit(self, block: int, record: Tensor) -> None:
        if self._writer is not None and block in self._writer.missing:
            self._writer.write(block, record)
            num_blocks = self._content.num_blocks
            self._progress("writing blocks", num_blocks - len(self._writer.missing), num_blocks)

    def stream(self, plan: Plan, rate: float | None) -> Prefetcher:
        assert self._store is not None, "the checkpoint has not been read"
        link = DiskLink(self._store.path, {record.block: record.offset for record in self._store.records})
        return _prefetcher(plan, self._backend, _slowed(link, rate), self._store.check)


class PinnedBlockStorage:
    """Pinned host memory for each offloaded block."""

    def __init__(self, offloading: Offloading, backend: CudaBackend) -> None:
        self._layouts, self._backend = offloading.content.layouts, backend
        self._records: dict[int, PinnedMemory] = {}

    def __enter__(self) -> PinnedBlockStorage:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            for record in self._records.values():
                record.close()

    def staging_buffer(self, block: int) -> Tensor:
        self._records[block] = self._backend.pinned(self._layouts[block].record_bytes)
        return self._records[block].tensor

    def commit(self, block: int, record: Tensor) -> None:
        """Keep the record, which is in its final memory."""

    def stream(self, plan: Plan, rate: float | None) -> Prefetcher:
        return _prefetcher(plan, self._backend, _slowed(self._backend.link(self._records), rate))


def block_storage_for(offloading: Offloading, backend: WeightBackend, progress: Progress) -> BlockStorage:
    if isinstance(backend, CudaBackend):
        return PinnedBlockStorage(offloading, backend)
    return DiskBlockStorage(offloading, backend, progress)


def _prefetcher(
    plan: Plan, backend: WeightBackend, link: Link, check: Callable[[int, Tensor], None] | None = None
) -> Prefetcher:
    slots, sizes = backend.slots(plan.slot, plan.slots), dict(enumerate(plan.blocks))
    return Prefetcher(plan.offloaded, slots, link, sizes=sizes, check=check)


def _slowed(link: Link, rate: float | None) -> Link:
    return link if rate is None else Throttled(link, rate)
