"""Where each tensor of a block lies in its record: one contiguous buffer that is stored, moved and used as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PAGE = 4096
"""Records are a multiple of this long, and begin at one: direct reads from a disk ask for it."""
ALIGNMENT = 64
"""Tensors of a record begin at a multiple of this: a line of a processor's cache."""


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of a record, dense."""

    name: str
    """Path of the tensor in its block, e.g. `attn.qkv.weight`."""
    offset: int
    """First byte of it in the record."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a record, in order of their offsets. All blocks of a model that travel have the same."""

    places: tuple[Place, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """For tensors of these names, shapes and dtypes (whose values are not read), in this order."""
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
        """For files that say what they hold."""
        return [
            {"name": p.name, "offset": p.offset, "shape": list(p.shape), "dtype": str(p.dtype).removeprefix("torch.")}
            for p in self.places
        ]


def views(slot: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The tensors of the record that a slot (uint8 [record_bytes], any device) holds: name -> view of its memory."""
    assert slot.dtype == torch.uint8 and slot.shape == (layout.record_bytes,) and slot.is_contiguous()
    return {p.name: slot[p.offset : p.offset + p.nbytes].view(p.dtype).view(p.shape) for p in layout.places}


def fill(slot: Tensor, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a block into a slot, with zeros between them and behind the last."""
    end = 0
    for place, view in zip(layout.places, views(slot, layout).values(), strict=True):
        slot[end : place.offset].zero_()
        view.copy_(tensors[place.name])
        end = place.offset + place.nbytes
    slot[end:].zero_()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
