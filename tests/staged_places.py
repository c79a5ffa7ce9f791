"""Stages whose devices are made up: tensors of a CPU, each of which is known to be at one place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multigpu.pipeline import Split, copied
from sharesd.models.decoder import Decoder
from sharesd.staged import StagedBlocks

CROSSES = ("copy_",)
"""Operations that read another device's tensor than the one they write."""


def in_stages(decoder: Decoder, num_blocks: tuple[int, ...]) -> Decoder:
    """The decoder with so many blocks in each stage, on devices cpu:0, cpu:1 and so on."""
    split = Split.of([torch.device("cpu", number) for number in range(len(num_blocks))], num_blocks)
    decoder.split, decoder.ranges = split, StagedBlocks(split).ranges
    return decoder


class Places(TorchDispatchMode):
    """Notes operations on tensors of several places. What they make is where their inputs are; what is made from none
    may be anywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.num_copies = 0
        self._place: dict[int, tuple[int, Tensor]] = {}  # storages, which are kept alive: addresses are used again

    def put(self, tensors: Iterable[Tensor], place: int) -> None:
        """These are there."""
        for tensor in tensors:
            self._place[tensor.untyped_storage()._cdata] = place, tensor

    def copied(self, tensor: Tensor, device: torch.device) -> Tensor:
        """`multigpu.pipeline.copied`, to another place."""
        self.num_copies += 1
        copy = tensor.clone()
        self.put([copy], device.index)
        return copy

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        places = {self._place[key][0] for t in given if (key := t.untyped_storage()._cdata) in self._place}
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if len(places) > 1 and name not in CROSSES:
            self.found.append(f"{name} of places {sorted(places)}: {[tuple(t.shape) for t in given]}")
        before = {t.untyped_storage()._cdata for t in given}
        fresh = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.untyped_storage()._cdata not in before]
        asked = (kwargs or {}).get("device")
        if asked is not None and asked.index is not None:
            self.put(fresh, asked.index)
        elif places:
            self.put(fresh, min(places))
        return out


@contextmanager
def watched(decoder: Decoder, *caches: Any) -> Iterator[Places]:
    """Within the block, every operation has its tensors at one place: each stage's at its own, all else at the last."""
    places, stages = Places(), decoder.split.stages
    with pytest.MonkeyPatch.context() as patch:
        for module in ("multigpu.pipeline", "sharesd.staged", "sharesd.decoding.cache"):
            patch.setattr(f"{module}.{copied.__name__}", places.copied)
        for stage in stages:
            number = stage.device.index
            for block in stage.blocks:
                places.put(decoder.blocks[block].parameters(), number)
                places.put((t for cache in caches for t in (cache.k[block], cache.v[block])), number)
            for cache in caches:
                places.put([cache.lengths], stages[-1].device.index)
                if stage is not stages[-1]:
                    places.put([cache.mirrored(number).lengths], number)
        places.put(decoder.embed.parameters(), 0)
        places.put([*decoder.norm.parameters(), *decoder.head.parameters()], stages[-1].device.index)
        with places:
            yield places
