"""Loading of a checkpoint block by block, within the limits of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from compile.linear import PackedLinear
from offload.block_layout import Layout, fill, views
from offload.prefetcher import Prefetcher
from quant.quantize_model import LinearQuantizer, QuantReport
from quant.switch_linear import SwitchLinear
from sharesd.models.checkpoint import Progress, silent
from sharesd.models.decoder import Decoder
from sharesd.weights.backend import WeightBackend
from sharesd.weights.block_storage import BlockStorage, block_storage_for
from sharesd.weights.offload_planner import Offloading
from sharesd.weights.offloaded_decoder import HeadInPieces, full_head, rows_of_piece, use_tensor


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
        self._storage: BlockStorage = block_storage_for(offloading, backend, progress)

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
        owners = {place.name: _owner(block, place.name) for place in self._layouts[number].places}
        self._place(number, owners)
        self._backend.finalize(block, keep=set(owners.values()))
        self._backend.release_freed()

    def load_head(self, decoder: Decoder) -> None:
        """Pack the head after its quantization, and store pieces that fill records."""
        num_blocks, head = len(decoder.blocks), decoder.get_submodule("head")
        num_pieces = self._offloading.content.num_blocks - num_blocks
        pieces: list[PackedLinear] = []

        def packed(i: int, weight: Tensor) -> PackedLinear:
            pieces.append(PackedLinear(weight, None))
            self._place(num_blocks + i, {"weight": pieces[i]})
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

    def _place(self, number: int, owners: Mapping[str, Any]) -> None:
        """Store a record; linears of an offloaded one keep meta tensors."""
        stays, layout = number in self._resident, self._layouts[number]
        record = self._backend.allocate(layout.record_bytes) if stays else self._storage.staging_buffer(number)
        fill(record, layout, {name: linear.weight for name, linear in owners.items()})
        self._storage.commit(number, record)
        for name, view in views(record, layout).items():
            use_tensor(owners[name], "weight", view if stays else view.to("meta"))

    def stream(self, decoder: Decoder) -> tuple[Prefetcher, Mapping[int, Layout]]:
        """Return prefetcher and layouts once the whole checkpoint is read."""
        stream = self._storage.stream(self._offloading.plan, self._offloading.config.offload.rate)
        return stream, dict(enumerate(self._layouts))


def _owner(block: nn.Module, name: str) -> nn.Module:
    linear = block.get_submodule(name.removesuffix(".weight"))
    return linear.full if isinstance(linear, SwitchLinear) else linear
