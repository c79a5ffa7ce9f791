"""Blocks get their place while a checkpoint is read, one after the other, so that memory stays below its limit.

read -> quantize -> lay out -> into memory of its own, or only among the records that travel -> forget
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from compile.linear import PackedLinear
from offload.block_layout import Layout, fill, views
from offload.prefetcher import Stream
from quant.quantize_model import LinearQuantizer, QuantReport
from quant.switch_linear import SwitchLinear
from sharesd.models.decoder import Decoder
from sharesd.models.progress import Progress, silent
from sharesd.weights.backend import Home
from sharesd.weights.block_storage import Records, records_of
from sharesd.weights.offload_planner import Offloading
from sharesd.weights.offloaded_decoder import HeadInPieces, full_head, rows_of_piece, use_tensor


class QuantizedWhileRead:
    """Quantizes the linears of each block as soon as it has its weights, and the head at the end."""

    def __init__(self, make: Callable[[Decoder], LinearQuantizer]) -> None:
        self._make = make
        self._quantizer: LinearQuantizer | None = None

    def __call__(self, decoder: Decoder, number: int) -> None:
        """Called for each block, see `sharesd.models.loader.EachBlock`."""
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
    """Carries out a plan: weights of resident blocks stay where they are computed, those of the others travel.

    A context manager around reading the checkpoint, which calls it for each block, and `place_head` behind that.
    """

    def __init__(
        self,
        offloading: Offloading,
        home: Home,
        quantize: QuantizedWhileRead | None = None,
        progress: Progress = silent,
    ) -> None:
        """Raises StoreError where the store of a CPU cannot be used, or its disk has no room for it."""
        self._offloading, self._home, self._quantize = offloading, home, quantize
        self._layout: Layout = offloading.content.layout
        self._resident = set(offloading.plan.resident)
        self._records: Records = records_of(offloading, home, progress)

    def __enter__(self) -> PlacedBlocks:
        self._records.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._records.__exit__(kind, *error)

    def __call__(self, decoder: Decoder, number: int) -> None:
        """Quantize, lay out and place a block that has its weights now."""
        if self._quantize is not None:
            self._quantize(decoder, number)
        block = decoder.blocks[number]
        self._home.lay(block)
        owners = {place.name: _owner(block, place.name) for place in self._layout.places}
        self._place(number, self._layout, owners)
        self._home.settle(block, keep=set(owners.values()))
        self._home.give_back()

    def place_head(self, decoder: Decoder) -> None:
        """Lay out the head, quantized by now if it is to be. What fills whole records is placed as blocks are."""
        num_blocks, head = len(decoder.blocks), decoder.get_submodule("head")
        num_pieces = self._offloading.content.num_blocks - num_blocks
        pieces: list[PackedLinear] = []

        def packed(i: int, weight: Tensor) -> PackedLinear:
            pieces.append(PackedLinear(weight, None))
            self._place(num_blocks + i, Layout.of({"weight": pieces[i].weight}), {"weight": pieces[i]})
            self._home.give_back()
            return pieces[i]

        if num_pieces:
            weight_VD = full_head(decoder).weight.detach()  # type: ignore[operator]
            rows = rows_of_piece(weight_VD.shape[1], weight_VD.dtype, self._layout.record_bytes)
            in_pieces = HeadInPieces(weight_VD, rows, num_pieces, packed)
            decoder.set_submodule("head.full" if isinstance(head, SwitchLinear) else "head", in_pieces)
        else:
            self._home.lay(decoder)  # the head is all that is left
        self._home.settle(decoder.get_submodule("head"), keep=pieces)
        self._home.give_back()

    def _place(self, number: int, layout: Layout, owners: Mapping[str, Any]) -> None:
        """Let linears' weights lie in a record: one that stays, or nowhere but among those that travel."""
        stays, size = number in self._resident, self._layout.record_bytes
        whole = self._home.memory(size) if stays else self._records.room(number)
        record = whole[: layout.record_bytes]
        fill(record, layout, {name: linear.weight for name, linear in owners.items()})
        whole[len(record) :].zero_()
        self._records.keep(number, whole)
        for name, view in views(record, layout).items():
            use_tensor(owners[name], "weight", view if stays else view.to("meta"))

    def stream(self, decoder: Decoder) -> tuple[Stream, Layout]:
        """How the blocks that do not stay come back, once all of the checkpoint has been read."""
        return self._records.stream(self._offloading.plan, self._offloading.config.offload.rate), self._layout


def _owner(block: nn.Module, name: str) -> nn.Module:
    """The linear whose weights a tensor of the record are."""
    linear = block.get_submodule(name.removesuffix(".weight"))
    return linear.full if isinstance(linear, SwitchLinear) else linear
