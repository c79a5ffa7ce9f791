"""Tensor parallel: what each rank has of a linear, and how ranks put together what these give.

Queries, keys, values, gate and up read the residual stream, which every rank has, and each rank has some of their
outputs. For the other two linears of a block there are two styles. By gathering, each rank has some outputs of `o` and
`down`, too: what they read is gathered before them, and what they give behind them. No sum is ever split, and each
output is the same dot product as on one device, bit for bit. By reducing, each rank has some of their inputs, namely
those that it makes, and their outputs are added up: two exchanges for a block instead of four, and other bits for each
number of ranks.

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
"""Outputs that kernels compute together: a rank has a multiple of it."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of everything that is cut."""

    rank: int = 0
    size: int = 1
    reduces: bool = False
    """Whether `o` and `down` are cut by inputs, and their outputs added up."""

    def of(self, total: int) -> int:
        """How many of so many."""
        return total // self.size

    def rows(self, total: int) -> slice:
        """Which of so many rows."""
        return slice(self.rank * self.of(total), (self.rank + 1) * self.of(total))

    def of_second(self, inputs: int, outputs: int) -> tuple[int, int]:
        """Inputs and outputs of what this rank has of `o` or `down`, which have so many."""
        return (self.of(inputs), outputs) if self.reduces else (inputs, self.of(outputs))

    def cut_second(self, tensor: Tensor) -> Tensor:
        """This rank's part of their weight or bias; where sums are split, rank 0 adds the bias."""
        if not self.reduces:
            return self.cut(tensor, (len(tensor),))
        if tensor.ndim == 1:
            return tensor if self.rank == 0 else torch.zeros_like(tensor)
        return tensor[:, self.rows(tensor.shape[1])]

    def cut(self, tensor: Tensor, merged: tuple[int, ...]) -> Tensor:
        """This rank's rows of a weight or bias. `merged`: so many rows of each of the linears that it holds."""
        if self.size == 1 or tensor.shape[0] != sum(merged):
            return tensor
        pieces = [piece[self.rows(len(piece))] for piece in tensor.split(merged)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


WHOLE = Part()
"""All of it."""


def require_even(size: int, cuts: Mapping[str, tuple[int, int]]) -> None:
    """`cuts`: name -> a number of something, and how many of it must stay together. ValueError where one of them cannot
    be shared out evenly.
    """

    def misfit(ranks: int) -> str | None:
        return next((name for name, (number, unit) in cuts.items() if number % (ranks * unit)), None)

    name = misfit(size)
    if name is not None:
        number, unit = cuts[name]
        tiles = f" in whole tiles of {unit}" if unit > 1 else ""
        good = [str(n) for n in range(2, min(number for number, _ in cuts.values()) + 1) if misfit(n) is None]
        remedy = f"take {' or '.join(good)}, or leave it out" if good else "leave it out"
        raise ValueError(
            f"tensor_parallel is {size}, and the model's {number} {name} cannot be shared out evenly{tiles}; {remedy}"
        )


def gather_columns(group: Group, part_MN: Tensor, whole: Tensor | None = None) -> Tensor:
    """[..., size * N]: the columns of all ranks side by side. Written into `whole`, if that is given."""
    side_by_side = _all_parts(group, part_MN).movedim(0, -2)
    if whole is None:
        return side_by_side.flatten(-2)
    whole.view(side_by_side.shape).copy_(side_by_side)
    return whole


def sum_parts(group: Group, part_MN: Tensor, whole: Tensor | None = None) -> Tensor:
    """[..., N]: what all ranks give, added up in their order (collectives take other orders for other sizes), so that
    a row has the same bits in steps of any width, and on all ranks. Written into `whole`, if that is given.
    """
    first, *others = _all_parts(group, part_MN)
    total = first.to(torch.promote_types(part_MN.dtype, torch.float32))
    for other in others:
        total += other
    return total.to(part_MN.dtype) if whole is None else whole.copy_(total)


def _all_parts(group: Group, part_MN: Tensor) -> Tensor:
    parts = part_MN.new_empty(group.size, *part_MN.shape)
    group.all_gather(part_MN.contiguous(), parts)
    return parts


class SummedLinear(nn.Module):
    """A linear of which each rank has some inputs, which are what it gets: all ranks get the sum."""

    def __init__(self, linear: nn.Module, group: Group) -> None:
        super().__init__()
        self.linear, self._group = linear, group

    def forward(self, x: Tensor) -> Tensor:
        return sum_parts(self._group, self.linear(x))


class GatheredLinear(nn.Module):
    """A linear of which each rank has some outputs: all ranks get all of them."""

    def __init__(self, linear: nn.Module, group: Group, *, cut_inputs: bool) -> None:
        """`cut_inputs`: what comes in is one rank's part, too."""
        super().__init__()
        self.linear, self._group, self._cut_inputs = linear, group, cut_inputs

    def forward(self, x: Tensor) -> Tensor:
        if self._cut_inputs:
            x = gather_columns(self._group, x)
        return gather_columns(self._group, self.linear(x))
