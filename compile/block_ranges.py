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
    """Called before the blocks run; returns when the blocks may run."""
    after: Callable[[], None] = _no_op
    """Called after the blocks have run or are queued on the device."""
    moves_weights: bool = False
    """True if `before` may move the blocks' weights to other addresses."""
    move_inputs: MoveInputs | None = None
    """Moves inputs to the blocks' device; None: not needed."""


BlockRanges = Callable[[], Iterable[BlockRange]]
"""Returns, at each call, consecutive ranges that make up all blocks."""


def limit_ranges(ranges: Iterable[BlockRange], num_blocks: int) -> Iterator[BlockRange]:
    """Yield the ranges of the first `num_blocks` blocks."""
    for each in ranges:
        if each.first < num_blocks:
            yield each._replace(num_blocks=min(each.num_blocks, num_blocks - each.first))
