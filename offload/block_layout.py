"""Layout of a block's record, one contiguous buffer.

File, host memory and device have the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PAGE = 4096
"""Alignment of record sizes and offsets in bytes; required by direct reads."""
ALIGNMENT = 64
"""Alignment of a record's tensors, in bytes: a cache line."""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a dense tensor in a record."""

    name: str
    """Path of the tensor in its block, e.g. `attn.qkv.weight`."""
    offset: int
    """Offset of the tensor's first byte in the record."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Tensors of a record, by offset."""

    places: tuple[Place, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> RecordLayout:
        """Return the layout of tensors in this order, without reading values."""
        places: list[Place] = []
        end = 0
        for name, tensor in tensors.items():
            place = Place(name, _round_up(end, ALIGNMENT), tuple(tensor.shape), tensor.dtype)
            places.append(place)
            end = place.offset + place.nbytes
        return cls(tuple(places))

    @property
    def record_bytes(self) -> int:
        """Bytes of a record, a multiple of `PAGE`."""
        return _round_up(max((place.offset + place.nbytes for place in self.places), default=0), PAGE)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the layout for the header of a file."""
        return [
            {"name": p.name, "offset": p.offset, "shape": list(p.shape), "dtype": str(p.dtype).removeprefix("torch.")}
            for p in self.places
        ]


def views(slot: Tensor, layout: RecordLayout) -> dict[str, Tensor]:
    """Return views of a slot's tensors by name.

    The slot is uint8 [record_bytes], on any device.
    """
    assert slot.dtype == torch.uint8 and slot.shape == (layout.record_bytes,) and slot.is_contiguous()
    return {p.name: slot[p.offset : p.offset + p.nbytes].view(p.dtype).view(p.shape) for p in layout.places}


def fill(slot: Tensor, layout: RecordLayout, tensors: Mapping[str, Tensor]) -> None:
    """Copy a block's tensors into a slot, with zeros in the gaps."""
    end = 0
    for place, view in zip(layout.places, views(slot, layout).values(), strict=True):
        slot[end : place.offset].zero_()
        view.copy_(tensors[place.name])
        end = place.offset + place.nbytes
    slot[end:].zero_()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
