"""Loading of a checkpoint block by block, within the limits of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import Tensor

from compile.linear import PackedLinear
from offload.block_file import Store, Writer, open_store
from offload.block_layout import RecordLayout, fill, views
from offload.disk_reader import DiskLink
from offload.pinned_transfer import PinnedMemory
from offload.plan import Plan
from offload.prefetcher import Prefetcher
from offload.transfer import Link, Throttled, host_memory
from quant.quantize_model import LinearQuantizer, QuantReport
from quant.switch_linear import SwitchLinear
from sharesd.models.checkpoint import Progress, silent
from sharesd.models.decoder import Decoder
from sharesd.weights.backend import WeightBackend
from sharesd.weights.head_in_pieces import HeadInPieces, full_head, rows_of_piece
from sharesd.weights.offload_planner import Offloading
from sharesd.weights.offloaded_decoder import Owner, owners_of, use_tensor

if TYPE_CHECKING:
    from sharesd.weights.cuda_backend import CudaBackend


class DiskBlockStorage:
    """File with all blocks, written once; a context manager around reading a checkpoint, as `PinnedBlockStorage` is."""

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
        """Return host memory, uint8 [record bytes], which the next call may reuse."""
        if self._passing is None:
            self._passing = host_memory(max(layout.record_bytes for layout in self._content.layouts))
        return self._passing[: self._content.layouts[block].record_bytes]

    def commit(self, block: int, record: Tensor) -> None:
        """Store the complete record of a block, offloaded or resident."""
        if self._writer is not None and block in self._writer.missing:
            self._writer.write(block, record)
            num_blocks = self._content.num_blocks
            self._progress("writing blocks", num_blocks - len(self._writer.missing), num_blocks)

    def stream(self, plan: Plan, rate: float | None) -> Prefetcher:
        """Return the prefetcher of committed blocks; `rate`: simulated bytes per second."""
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


def _prefetcher(
    plan: Plan, backend: WeightBackend, link: Link, check: Callable[[int, Tensor], None] | None = None
) -> Prefetcher:
    slots, sizes = backend.slots(plan.slot, plan.slots), dict(enumerate(plan.blocks))
    return Prefetcher(plan.offloaded, slots, link, sizes=sizes, check=check)


def _slowed(link: Link, rate: float | None) -> Link:
    return link if rate is None else Throttled(link, rate)


class StreamingQuantizer:
    """Quantizer of blocks as they are read, and finally of the head."""

    def __init__(self, make: Callable[[Decoder], LinearQuantizer]) -> None:
        self._make = make
        self._quantizer: LinearQuantizer | None = None

    def __call__(self, decoder: Decoder, number: int) -> None:
        self._quantizer = self._quantizer or self._make(decoder)
        self._quantizer.quantize(number)

    def report(self) -> QuantReport:
        assert self._quantizer is not None, "no block was read"
        return self._quantizer.report()

    def finish(self) -> QuantReport:
        assert self._quantizer is not None, "no block was read"
        self._quantizer.quantize(None)
        return self._quantizer.report()


class OffloadLoader:
    """Context manager around reading a checkpoint: call for blocks, then `load_head`."""

    def __init__(
        self,
        offloading: Offloading,
        backend: WeightBackend,
        quantize: StreamingQuantizer | None = None,
        progress: Progress = silent,
    ) -> None:
        """Open the offload storage; StoreError if unusable or full."""
        self._offloading, self._backend, self._quantize = offloading, backend, quantize
        self._layouts = offloading.content.layouts
        self._resident = set(offloading.plan.resident)
        self._storage = (
            PinnedBlockStorage(offloading, backend)
            if backend.kind == "cuda"
            else DiskBlockStorage(offloading, backend, progress)
        )

    def __enter__(self) -> OffloadLoader:
        self._storage.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._storage.__exit__(kind, *error)

    def __call__(self, decoder: Decoder, number: int) -> None:
        """Quantize, pack and store a block whose weights are read."""
        if self._quantize is not None:
            self._quantize(decoder, number)
        block = decoder.blocks[number]
        self._backend.pack_model(block)
        owners = owners_of(block, self._layouts[number])
        self._place(number, owners)
        self._backend.finalize(block, keep={owner.module for owner in owners.values()})
        self._backend.release_freed()

    def load_head(self, decoder: Decoder) -> None:
        """Pack the head after its quantization, and store pieces that fill records."""
        num_blocks, head = len(decoder.blocks), decoder.get_submodule("head")
        num_pieces = self._offloading.content.num_blocks - num_blocks
        pieces: list[PackedLinear] = []

        def packed(i: int, weight: Tensor) -> PackedLinear:
            pieces.append(PackedLinear(weight, None))
            self._place(num_blocks + i, {"weight": Owner(True, pieces[i], "weight")})
            self._backend.release_freed()
            return pieces[i]

        if num_pieces:
            weight_VD = full_head(decoder).weight.detach()  # type: ignore[operator]
            rows = rows_of_piece(weight_VD.shape[1], weight_VD.dtype, self._layouts[0].record_bytes)
            in_pieces = HeadInPieces(weight_VD, rows, num_pieces, packed)
            decoder.set_submodule("head.full" if isinstance(head, SwitchLinear) else "head", in_pieces)
        else:
            self._backend.pack_model(decoder)  # the head is all that is left
        self._backend.finalize(decoder.get_submodule("head"), keep=pieces)
        self._backend.release_freed()

    def _place(self, number: int, owners: Mapping[str, Owner]) -> None:
        """Store a record; the owners of an offloaded one keep meta tensors."""
        stays, layout = number in self._resident, self._layouts[number]
        record = self._backend.allocate(layout.record_bytes) if stays else self._storage.staging_buffer(number)
        fill(record, layout, {name: getattr(owner.module, owner.part) for name, owner in owners.items()})
        self._storage.commit(number, record)
        for name, view in views(record, layout).items():
            use_tensor(owners[name].module, owners[name].part, view if stays else view.to("meta"))

    def stream(self, decoder: Decoder) -> tuple[Prefetcher, Mapping[int, RecordLayout]]:
        """Return prefetcher and layouts once the whole checkpoint is read."""
        stream = self._storage.stream(self._offloading.plan, self._offloading.config.offload.rate)
        return stream, dict(enumerate(self._layouts))
