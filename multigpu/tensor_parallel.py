"""Tensor parallelism: shards of linears, and collectives that join outputs.

Every rank has the residual stream. The linears of queries, keys, values, gate and up are split by outputs. The other
two linears of a block, `o` and `down`, have two styles:

- Gathering: they are split by outputs, too. Inputs are gathered before and outputs after each of the two. No sum is
  split: each output is bit for bit that of one device.
- Reducing: they are split by inputs, and the ranks' outputs are summed. A block has two collectives instead of four,
  and the bits depend on the number of ranks.

Legend: M rows, N outputs of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from multigpu.process_group import Group

TILE = 16
"""Outputs per tile of the kernels; divides each rank's outputs."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Share of one rank in a model's sharded tensors."""

    rank: int = 0
    size: int = 1
    reduces: bool = False
    """True if `o` and `down` are split by inputs and summed."""

    def of(self, total: int) -> int:
        """Return this rank's share of a number."""
        return total // self.size

    def rows(self, total: int) -> slice:
        """Return this rank's slice of rows."""
        return slice(self.rank * self.of(total), (self.rank + 1) * self.of(total))

    def of_second(self, inputs: int, outputs: int) -> tuple[int, int]:
        """Return this rank's inputs and outputs of `o` or `down`."""
        return (self.of(inputs), outputs) if self.reduces else (inputs, self.of(outputs))

    def cut_second(self, tensor: Tensor) -> Tensor:
        """Cut the weight or bias of `o` or `down` for this rank.

        If sums are split, rank 0 adds the bias.
        """
        if not self.reduces:
            return self.cut(tensor, (len(tensor),))
        if tensor.ndim == 1:
            return tensor if self.rank == 0 else torch.zeros_like(tensor)
        return tensor[:, self.rows(tensor.shape[1])]

    def cut(self, tensor: Tensor, merged: tuple[int, ...]) -> Tensor:
        """Cut a weight's or bias's rows for this rank.

        `merged`: rows of each linear that it holds.
        """
        if self.size == 1 or tensor.shape[0] != sum(merged):
            return tensor
        pieces = [piece[self.rows(len(piece))] for piece in tensor.split(merged)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


UNSHARDED = Shard()
"""Shard of a single rank: the whole model."""


def require_divisible(size: int, cuts: Mapping[str, tuple[int, int]]) -> None:
    """Raise ValueError if a cut is not divisible among the ranks.

    `cuts`: name -> (number of items, items that must stay on one rank).
    """

    def indivisible(ranks: int) -> str | None:
        return next((name for name, (number, unit) in cuts.items() if number % (ranks * unit)), None)

    name = indivisible(size)
    if name is not None:
        number, unit = cuts[name]
        tiles = f" in whole tiles of {unit}" if unit > 1 else ""
        good = [str(n) for n in range(2, min(number for number, _ in cuts.values()) + 1) if indivisible(n) is None]
        remedy = f"use {' or '.join(good)}, or leave it out" if good else "leave it out"
        raise ValueError(
            f"tensor_parallel is {size}, and the model's {number} {name} cannot be divided evenly{tiles}; {remedy}"
        )


def all_gather_columns(group: Group, part_MN: Tensor, whole: Tensor | None = None) -> Tensor:
    """Join the columns of all ranks, [..., size * N].

    The result is written into `whole` if given.
    """
    side_by_side = _all_gather(group, part_MN).movedim(0, -2)
    if whole is None:
        return side_by_side.flatten(-2)
    whole.view(side_by_side.shape).copy_(side_by_side)
    return whole


def all_reduce(group: Group, part_MN: Tensor, whole: Tensor | None = None) -> Tensor:
    """Sum all ranks' outputs [..., N] in the order of ranks.

    A row has the same bits in steps of any width, and on all ranks; orders of library collectives depend on sizes. The
    result is written into `whole` if given.
    """
    first, *others = _all_gather(group, part_MN)
    total = first.to(torch.promote_types(part_MN.dtype, torch.float32))
    for other in others:
        total += other
    return total.to(part_MN.dtype) if whole is None else whole.copy_(total)


def _all_gather(group: Group, part_MN: Tensor) -> Tensor:
    parts = part_MN.new_empty(group.size, *part_MN.shape)
    group.all_gather(part_MN.contiguous(), parts)
    return parts


class RowParallelLinear(nn.Module):
    """Linear split by inputs; all ranks get the summed outputs."""

    def __init__(self, linear: nn.Module, group: Group) -> None:
        super().__init__()
        self.linear, self._group = linear, group

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(self._group, self.linear(x))


class ColumnParallelLinear(nn.Module):
    """Linear split by outputs; all ranks get all outputs."""

    def __init__(self, linear: nn.Module, group: Group, *, cut_inputs: bool) -> None:
        """Wrap a linear; `cut_inputs`: inputs are one rank's part, too."""
        super().__init__()
        self.linear, self._group, self._cut_inputs = linear, group, cut_inputs

    def forward(self, x: Tensor) -> Tensor:
        if self._cut_inputs:
            x = all_gather_columns(self._group, x)
        return all_gather_columns(self._group, self.linear(x))
