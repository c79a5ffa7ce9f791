"""A stack of blocks runs as ranges: blocks next to each other, with what they wait for before and release after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

HandOver = Callable[[Tensor, Any, Any], tuple[Tensor, Any, Any]]
"""(residual stream, cache, branches) -> the same, where the next blocks are."""


def _nothing() -> None:
    pass


class Range(NamedTuple):
    """Blocks `first` to before `first + num_blocks`, which run together."""

    first: int
    num_blocks: int
    before: Callable[[], None] = _nothing
    """Called when they are about to run: returns when they may."""
    after: Callable[[], None] = _nothing
    """Called when they have run, or on a device have been told to."""
    moves: bool = False
    """Whether `before` may put their weights somewhere else."""
    hand_over: HandOver | None = None
    """Brings what they run with to where they are, if that is elsewhere."""


Ranges = Callable[[], Iterable[Range]]
"""How all blocks of a stack run at this call: ranges one behind the other, which make up all of it."""


def first_blocks(ranges: Iterable[Range], num_blocks: int) -> Iterator[Range]:
    """What makes up the first so many blocks."""
    for each in ranges:
        if each.first < num_blocks:
            yield each._replace(num_blocks=min(each.num_blocks, num_blocks - each.first))
