"""Tensor parallel by gathering: each rank has some outputs of each linear, and no sum is ever split.

Queries, keys, values, gate and up read the residual stream, which every rank has. What `o` and `down` read is gathered
before them, and what they give behind them, so that each output is the same dot product as on one device, bit for bit.
(The usual way, which splits the inputs of `o` and `down`, needs two exchanges instead of four for a block, and adds up
in another order for each number of ranks.)

Legend: M rows, N outputs of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from multigpu.group import Group

TILE = 16
"""Outputs that kernels compute together: a rank has a multiple of it."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of everything that is cut."""

    rank: int = 0
    size: int = 1

    def of(self, total: int) -> int:
        """How many of so many."""
        return total // self.size

    def rows(self, total: int) -> slice:
        """Which of so many rows."""
        return slice(self.rank * self.of(total), (self.rank + 1) * self.of(total))

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
    parts = part_MN.new_empty(group.size, *part_MN.shape)
    group.all_gather(part_MN.contiguous(), parts)
    side_by_side = parts.movedim(0, -2)
    if whole is None:
        return side_by_side.flatten(-2)
    whole.view(side_by_side.shape).copy_(side_by_side)
    return whole


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
