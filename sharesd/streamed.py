"""A decoder some of whose blocks have their weights at full precision elsewhere: in slots of a stream, while they run.

Quantized weights stay, so draft steps wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from compile.ranges import Range
from offload.layout import Layout, views
from offload.stream import Stream
from quant.linear import SwitchLinear
from sharesd.models.decoder import Decoder


class StreamedBlocks:
    """Points the linears of blocks into the slots in which their weights arrive."""

    def __init__(self, decoder: Decoder, stream: Stream, layout: Layout, low: Callable[[], bool] | None = None) -> None:
        """Takes over the blocks of `stream`: what their linears hold of the tensors in `layout` is dropped. `low` tells
        whether quantized weights are in use, where there are such.

        Raises ValueError where a tensor that is to travel serves quantized steps, too.
        """
        self.stream = stream
        self._low = low or (lambda: False)
        self._views = [views(slot, layout) for slot in stream.slots]
        owners = {block: _owners(decoder.blocks[block], layout) for block in stream.blocks}
        for block, each in owners.items():
            for name, (switched, _, _) in each.items():
                if low is not None and not switched:
                    stream.close()
                    raise ValueError(
                        f"{name} of block {block} has no quantized weights, and draft steps need it: it must stay"
                    )
        self._owners = {block: [(name, *owner[1:]) for name, owner in each.items()] for block, each in owners.items()}
        self._slot_of: dict[int, int] = {}
        for block in stream.blocks:
            self._point(block, 0)  # memory of the right shapes, until they are needed
        self._together = (Range(0, len(decoder.blocks)),)
        self._apart = self._cut(range(len(decoder.blocks)))

    @property
    def linears(self) -> set[Any]:
        """Those whose weights travel."""
        return {linear for owners in self._owners.values() for _, linear, _ in owners}

    @property
    def resident_share(self) -> float:
        """Share of the blocks whose weights stay."""
        return 1 - len(self.stream.blocks) / self._together[0].num_blocks

    def ranges(self) -> Sequence[Range]:
        """How the blocks run now, see `compile.ranges`."""
        return self._together if self._low() else self._apart

    def _cut(self, blocks: range) -> tuple[Range, ...]:
        """Each block that travels by itself, and those between them together."""
        ranges: list[Range] = []
        for travels, group in groupby(blocks, self._slot_of.__contains__):
            members = list(group)
            if travels:
                done = self.stream.done
                ranges += [Range(b, 1, partial(self._bring, b), partial(done, b), moves=True) for b in members]
            else:
                ranges.append(Range(members[0], len(members)))
        return tuple(ranges)

    def _bring(self, block: int) -> None:
        self._point(block, self.stream.need(block))

    def _point(self, block: int, slot: int) -> None:
        if self._slot_of.get(block) != slot:
            for name, linear, part in self._owners[block]:
                setattr(linear, part, self._views[slot][name])
            self._slot_of[block] = slot


def _owners(block: Any, layout: Layout) -> dict[str, tuple[bool, Any, str]]:
    """Of each tensor that travels: whether its linear has quantized weights besides, the linear, and its name there."""
    found = {}
    for place in layout.places:
        path, _, part = place.name.rpartition(".")
        linear = block.get_submodule(path)
        switched = isinstance(linear, SwitchLinear)
        found[place.name] = (switched, linear.full if switched else linear, part)
    return found
