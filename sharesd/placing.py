"""Blocks get their place while a checkpoint is read, one after the other, so that memory stays below its limit.

read -> quantize -> pack -> into memory of its own, or only into the store -> forget
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor

from compile.linear import PackedLinear, pack_linears
from compile.native import give_back_freed_memory
from compile.pages import huge_pages, weights_on_huge_pages
from offload.disk import DiskLink
from offload.layout import Layout, fill, views
from offload.link import Link, Throttled, host_memory, host_slots
from offload.store import Store, Writer, open_store
from offload.stream import Stream
from quant.attach import LinearQuantizer, QuantReport
from quant.linear import SwitchLinear
from sharesd.models.decoder import Decoder
from sharesd.models.progress import Progress, silent
from sharesd.planning import Offloading
from sharesd.streamed import HeadInPieces, full_head, rows_of_piece


class QuantizedWhileRead:
    """Quantizes the linears of each block as soon as it has its weights, and the head at the end."""

    def __init__(self, make: Callable[[Decoder], LinearQuantizer]) -> None:
        self._make = make
        self._quantizer: LinearQuantizer | None = None

    def __call__(self, decoder: Decoder, number: int) -> None:
        """Called for each block, see `sharesd.models.weights.EachBlock`."""
        self._quantizer = self._quantizer or self._make(decoder)
        self._quantizer.quantize(number)

    def report(self) -> QuantReport:
        """What was done so far."""
        assert self._quantizer is not None, "no block was read"
        return self._quantizer.report()

    def finish(self) -> QuantReport:
        """Quantize the head, if it is to be, and tell what was done."""
        assert self._quantizer is not None, "no block was read"
        self._quantizer.quantize(None)
        return self._quantizer.report()


class PlacedBlocks:
    """Carries out a plan on a CPU: packed weights of resident blocks stay, those of the others come from the store.

    A context manager around reading the checkpoint, which calls it for each block, and `place_head` behind that.
    """

    def __init__(
        self, offloading: Offloading, quantize: QuantizedWhileRead | None = None, progress: Progress = silent
    ) -> None:
        """Raises StoreError where the store cannot be used, or its disk has no room for it."""
        self._offloading, self._quantize, self._progress = offloading, quantize, progress
        self._layout: Layout = offloading.content.layout
        self._resident = set(offloading.plan.resident)
        self._open = ExitStack()
        self._store: Store | None = open_store(offloading.folder, offloading.content)
        self._writer: Writer | None = None
        if self._store is None:
            self._writer = self._open.enter_context(Writer(offloading.folder, offloading.content))
        self._passing: Tensor | None = None  # the record of a block that does not stay

    def __enter__(self) -> PlacedBlocks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._open:
            if kind is None and self._writer is not None:
                self._store = self._writer.finish()

    def __call__(self, decoder: Decoder, number: int) -> None:
        """Quantize, pack and place a block that has its weights now."""
        if self._quantize is not None:
            self._quantize(decoder, number)
        block = decoder.blocks[number]
        pack_linears(block)
        owners = {place.name: _owner(block, place.name) for place in self._layout.places}
        self._place(number, self._layout, owners)
        weights_on_huge_pages(block, keep=set(owners.values()))
        give_back_freed_memory()

    def place_head(self, decoder: Decoder) -> None:
        """Pack the head, which is quantized by now if it is to be. What fills whole records is placed as blocks are."""
        num_blocks, head = len(decoder.blocks), decoder.get_submodule("head")
        num_pieces = self._offloading.content.num_blocks - num_blocks
        pieces: list[PackedLinear] = []

        def packed(i: int, weight: Tensor) -> PackedLinear:
            pieces.append(PackedLinear(weight, None))
            self._place(num_blocks + i, Layout.of({"weight": pieces[i].weight}), {"weight": pieces[i]})
            give_back_freed_memory()
            return pieces[i]

        if num_pieces:
            weight_VD = full_head(decoder).weight.detach()  # type: ignore[operator]
            rows = rows_of_piece(weight_VD.shape[1], weight_VD.dtype, self._layout.record_bytes)
            in_pieces = HeadInPieces(weight_VD, rows, num_pieces, packed)
            decoder.set_submodule("head.full" if isinstance(head, SwitchLinear) else "head", in_pieces)
        else:
            pack_linears(decoder)  # the head is all that is left
        weights_on_huge_pages(decoder.get_submodule("head"), keep=pieces)
        give_back_freed_memory()

    def _place(self, number: int, layout: Layout, owners: Mapping[str, PackedLinear]) -> None:
        """Let linears' weights lie in a record: one that stays, or nowhere but in the store."""
        whole = self._record(number)
        record = whole[: layout.record_bytes]
        fill(record, layout, {name: linear.weight for name, linear in owners.items()})
        whole[len(record) :].zero_()
        if self._writer is not None and number in self._writer.missing:
            self._writer.write(number, whole)
            num_records = self._offloading.content.num_blocks
            self._progress("writing blocks", num_records - len(self._writer.missing), num_records)
        for name, view in views(record, layout).items():
            owners[name].weight = view if number in self._resident else view.to("meta")

    def stream(self, decoder: Decoder) -> tuple[Stream, Layout]:
        """How the blocks that do not stay come back, once all of the checkpoint has been read."""
        plan, rate = self._offloading.plan, self._offloading.config.offload.rate
        assert self._store is not None, "the checkpoint has not been read"
        self._passing = None
        link: Link = DiskLink(self._store.path, {record.block: record.offset for record in self._store.records})
        if rate is not None:
            link = Throttled(link, rate)
        slots = host_slots(self._layout.record_bytes, plan.slots)
        return Stream(plan.travelling, slots, link, check=self._store.check), self._layout

    def _record(self, number: int) -> Tensor:
        """Memory for a block's record."""
        size = self._layout.record_bytes
        if number in self._resident:
            return huge_pages(size)
        if self._passing is None:
            self._passing = host_memory(size)
        return self._passing


def _owner(block: torch.nn.Module, name: str) -> PackedLinear:
    """The linear whose weights a tensor of the record are."""
    linear = block.get_submodule(name.removesuffix(".weight"))
    full = linear.full if isinstance(linear, SwitchLinear) else linear
    assert isinstance(full, PackedLinear)
    return full
