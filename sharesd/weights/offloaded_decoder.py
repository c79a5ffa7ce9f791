"""Decoder with full-precision blocks and head pieces in a prefetcher's slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn

from compile.block_ranges import BlockRange
from compile.linear import PackedLinear
from offload.block_layout import RecordLayout, views
from offload.prefetcher import Prefetcher
from quant.switch_linear import SwitchLinear
from sharesd.models.decoder import Decoder
from sharesd.weights.head_in_pieces import HeadInPieces, full_head


class Owner(NamedTuple):
    """Module that has a tensor of a record."""

    switched: bool
    """Its weights are also there quantized."""
    module: Any
    part: str
    """Attribute of the tensor."""


class OffloadedBlocks:
    """Offloaded linears and head pieces, with weights in a prefetcher's slots."""

    def __init__(
        self,
        decoder: Decoder,
        stream: Prefetcher,
        layouts: Mapping[int, RecordLayout],
        low: Callable[[], bool] | None = None,
    ) -> None:
        """Point linears to slots of `stream`; ValueError if quantized steps need them.

        Numbers after those of blocks are pieces of a head. `low` returns True if quantized weights are in use.
        """
        self.stream = stream
        self._low = low or (lambda: False)
        num_blocks, head = len(decoder.blocks), full_head(decoder)
        pieces: list[PackedLinear] = head.pieces if isinstance(head, HeadInPieces) else []
        self._layouts = layouts
        owners = {
            block: owners_of(decoder.blocks[block], layouts[block])
            if block < num_blocks
            else {"weight": Owner(True, pieces[block - num_blocks], "weight")}
            for block in stream.blocks
        }
        for block, each in owners.items():
            for name, owner in each.items():
                if low is not None and not owner.switched:
                    stream.close()
                    raise ValueError(
                        f"{name} of block {block} has no quantized weights, and drafts need it: keep the block resident"
                    )
        self._owners = {
            block: [(name, owner.module, owner.part) for name, owner in each.items()] for block, each in owners.items()
        }
        self._views: dict[tuple[RecordLayout, int], dict[str, Tensor]] = {}
        self._slot_of: dict[int, int] = {}
        for block in stream.blocks:
            self._point(block, 0)  # memory of the right shapes, until they are needed
        self._num_records = num_blocks + len(pieces)
        self._together = (BlockRange(0, num_blocks),)
        self._apart = self._cut(range(num_blocks))
        if isinstance(head, HeadInPieces):
            head.ranges = [
                self._alone(b) if b in self._slot_of else BlockRange(b, 1) for b in range(num_blocks, self._num_records)
            ]

    @property
    def linears(self) -> set[Any]:
        return {linear for owners in self._owners.values() for _, linear, _ in owners}

    @property
    def resident_share(self) -> float:
        return 1 - len(self.stream.blocks) / self._num_records

    def ranges(self) -> Sequence[BlockRange]:
        return self._together if self._low() else self._apart

    def _cut(self, blocks: range) -> tuple[BlockRange, ...]:
        """Return ranges of single offloaded blocks, and of consecutive resident ones."""
        ranges: list[BlockRange] = []
        for offloaded, group in groupby(blocks, self._slot_of.__contains__):
            members = list(group)
            if offloaded:
                ranges += map(self._alone, members)
            else:
                ranges.append(BlockRange(members[0], len(members)))
        return tuple(ranges)

    def _alone(self, block: int) -> BlockRange:
        return BlockRange(block, 1, partial(self._bring, block), partial(self.stream.done, block), moves_weights=True)

    def _bring(self, block: int) -> None:
        self._point(block, self.stream.need(block))

    def _point(self, block: int, slot: int) -> None:
        if self._slot_of.get(block) != slot:
            found = self._views_of(block, slot)
            for name, linear, part in self._owners[block]:
                setattr(linear, part, found[name])
            self._slot_of[block] = slot

    def _views_of(self, block: int, slot: int) -> dict[str, Tensor]:
        """Return a block's tensors in a slot, parameters as such."""
        layout = self._layouts[block]
        if (layout, slot) not in self._views:
            found = views(self.stream.slots[slot][: layout.record_bytes], layout)
            for name, linear, part in self._owners[block]:
                if isinstance(getattr(linear, part), nn.Parameter):
                    found[name] = nn.Parameter(found[name], requires_grad=False)
            self._views[layout, slot] = found
        return self._views[layout, slot]


def use_tensor(linear: nn.Module, part: str, tensor: Tensor) -> None:
    """Replace a tensor of a linear; a parameter stays a parameter."""
    is_parameter = isinstance(getattr(linear, part), nn.Parameter)
    setattr(linear, part, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def owners_of(block: Any, layout: RecordLayout) -> dict[str, Owner]:
    """Return the owners of a block's tensors by name."""
    found = {}
    for place in layout.places:
        path, _, part = place.name.rpartition(".")
        linear = block.get_submodule(path)
        switched = isinstance(linear, SwitchLinear)
        found[place.name] = Owner(switched, linear.full if switched else linear, part)
    return found
