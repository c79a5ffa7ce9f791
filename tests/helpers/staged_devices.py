"""Stages whose devices are made up: tensors of a CPU, each of which is known to be at one place."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multigpu.pipeline_parallel import PipelinePlan
from sharesd.devices import transfer
from sharesd.models.decoder import Decoder
from sharesd.parallel.pipeline import StagedBlocks
from tests.helpers.recorded_graphs import Recording, _storage

copy_between = transfer.copy_between


class Hop(NamedTuple):
    """A copy from one place to another."""

    shape: tuple[int, ...]
    source: int
    target: int


def in_stages(decoder: Decoder, num_blocks: tuple[int, ...], caller_device: int | None = None) -> Decoder:
    """The decoder with so many blocks in each stage, on devices cpu:0, cpu:1 and so on."""
    split = PipelinePlan.of([torch.device("cpu", number) for number in range(len(num_blocks))], num_blocks)
    if caller_device is not None:
        split = replace(split, caller_device=torch.device("cpu", caller_device))
    decoder.split, decoder.ranges = split, StagedBlocks(split).ranges
    return decoder


class Places(TorchDispatchMode):
    """Notes operations on tensors of several places. What they make is where their inputs are; what is made from none
    may be anywhere.
    """

    def __init__(self, home: int) -> None:
        """`home`: where tensors are that nobody has put anywhere."""
        super().__init__()
        self.found: list[str] = []
        self.hops: list[Hop] = []
        """Copies from place to place, in their order."""
        self.current = self._home = home
        """The device that is current: operations elsewhere are noted, too."""
        self._place: dict[int, tuple[int, Tensor]] = {}  # storages, which are kept alive: addresses are used again

    def put(self, tensors: Iterable[Tensor], place: int) -> None:
        for tensor in tensors:
            self._place[_storage(tensor)] = place, tensor

    def copy_between(self, copy: Tensor, tensor: Tensor) -> None:
        """`sharesd.devices.transfer.copy_between`; what nobody has put anywhere is put where it is taken to be."""
        self.put([tensor], self._place_of(tensor))
        copy_between(copy, tensor)

    def use(self, device: torch.device) -> None:
        """`sharesd.devices.selection.use`, of GPUs."""
        if Recording.in_progress:
            self.found.append(f"a capture goes on on {device.index}, in a graph of {self.current}")
        self.current = device.index

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        places = {self._place[key][0] for t in given if (key := _storage(t)) in self._place}
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if len(places) > 1 and name == "copy_":  # reads another device's tensor than the one it writes
            self._cross(*args, **(kwargs or {}))
        elif len(places) > 1:
            self.found.append(f"{name} of places {sorted(places)}: {[tuple(t.shape) for t in given]}")
        elif places - {self.current} and not func.is_view and not name.startswith("empty"):
            self.found.append(f"{name} on {min(places)} while {self.current} is the current device")
        before = {_storage(t) for t in given}
        fresh = [t for t in tree_leaves(out) if isinstance(t, Tensor) and _storage(t) not in before]
        asked = (kwargs or {}).get("device")
        if asked is not None and asked.index is not None:
            self.put(fresh, asked.index)
        elif places:
            self.put(fresh, min(places))
        return out

    def _place_of(self, tensor: Tensor) -> int:
        return self._place.get(_storage(tensor), (self._home, tensor))[0]

    def _cross(self, written: Tensor, read: Tensor, non_blocking: bool = False) -> None:
        source, target = self._place_of(read), self._place_of(written)
        self.hops.append(Hop(tuple(written.shape), source, target))
        if Recording.in_progress:
            self.found.append(f"a graph has a copy from {source} to {target}")
        if not non_blocking:
            self.found.append(f"copy_ from {source} to {target}, for which the host waits")


class TimedPlaces(Places):
    """With a clock for each place: what is launched there runs one after the other, each matrix product for a unit of
    time. Copies between places wait for both, as those between GPUs do; what comes from the host waits for the one.
    """

    def __init__(self, home: int) -> None:
        super().__init__(home)
        self.clocks: Counter[int] = Counter()
        self.busy: dict[int, list[int]] = defaultdict(list)
        """Place -> when its products began."""

    def copy_between(self, copy: Tensor, tensor: Tensor) -> None:
        if _storage(tensor) in self._place:
            super().copy_between(copy, tensor)
        else:  # from the host
            copy.copy_(tensor)

    def _cross(self, written: Tensor, read: Tensor, non_blocking: bool = False) -> None:
        super()._cross(written, read, non_blocking)
        places = self._place_of(read), self._place_of(written)
        self.clocks |= dict.fromkeys(places, max(self.clocks[place] for place in places))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name in ("aten::mm", "aten::linear"):
            place = self._place_of(args[1])
            self.busy[place].append(self.clocks[place])
            self.clocks[place] += 1
        return out


@contextmanager
def watched(decoder: Decoder, *caches: Any, kind: type[Places] = Places) -> Iterator[Places]:
    """Within the block, every operation has its tensors at one place, whose device is the current one: each stage's at
    its own, all else at the last.
    """
    stages = decoder.split.stages
    last = stages[-1].device.index
    places = kind(last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "copy_between", places.copy_between)
        patch.setattr(transfer, "use", places.use)
        patch.setattr(decoder, "ranges", StagedBlocks(decoder.split).ranges)
        for stage in stages:
            number = stage.device.index
            for block in stage.blocks:
                places.put(decoder.blocks[block].parameters(), number)
                places.put((t for cache in caches for t in (cache.k[block], cache.v[block])), number)
            if stage is not stages[-1]:
                places.put((cache.on_stage(number).lengths for cache in caches), number)
        places.put(decoder.embed.parameters(), 0)
        places.put([*decoder.norm.parameters(), *decoder.head.parameters(), *(cache.lengths for cache in caches)], last)
        with places:
            yield places
