"""Ranges of neighbouring blocks of a decoder, with hooks before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

MoveInputs = Callable[[Tensor, Any, Any], tuple[Tensor, Any, Any]]
"""(residual stream, cache, tree mask) -> the same on the next device."""


def _no_op() -> None:
    pass


class BlockRange(NamedTuple):
    """Blocks `first` to before `first + num_blocks`, which run together."""

    first: int
    num_blocks: int
    before: Callable[[], None] = _no_op
    """Called when they are about to run: returns when they may."""
    after: Callable[[], None] = _no_op
    """Called once they have run, or are queued on their device."""
    moves_weights: bool = False
    """True if `before` may move their weights to other addresses."""
    move_inputs: MoveInputs | None = None
    """Moves their inputs to their device, if that is another one."""


BlockRanges = Callable[[], Iterable[BlockRange]]
"""Returns, at each call, consecutive ranges that make up all blocks."""


def limit_ranges(ranges: Iterable[BlockRange], num_blocks: int) -> Iterator[BlockRange]:
    """Yield the ranges of the first `num_blocks` blocks."""
    for each in ranges:
        if each.first < num_blocks:
            yield each._replace(num_blocks=min(each.num_blocks, num_blocks - each.first))
