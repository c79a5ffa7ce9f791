"""LM head of an offloaded decoder, in pieces of the size of a block's record."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from compile.block_ranges import BlockRange
from compile.linear import LAYOUT, PackedLinear
from quant.switch_linear import SwitchLinear
from sharesd.models.decoder import Decoder


def rows_of_piece(inputs: int, dtype: torch.dtype, record_bytes: int) -> int:
    lanes, pair = LAYOUT[dtype]
    return record_bytes // (lanes * -(-inputs // pair) * pair * dtype.itemsize) * lanes


class HeadInPieces(nn.Module):
    """LM head in pieces of a record's rows, and a tail."""

    def __init__(
        self, weight_VD: Tensor, rows: int, num_pieces: int, pack: Callable[[int, Tensor], PackedLinear]
    ) -> None:
        """Split into packed pieces of `rows` rows, and a tail."""
        super().__init__()
        first, tail = weight_VD.split([num_pieces * rows, len(weight_VD) - num_pieces * rows])
        self.pieces = [pack(i, part) for i, part in enumerate(first.split(rows))]
        for i, piece in enumerate(self.pieces):
            self.add_module(f"piece_{i}", piece)
        self.tail = PackedLinear(tail, None)
        self.ranges = [BlockRange(i, 1) for i in range(num_pieces)]
        """Ranges with the calls before and after each piece."""

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for each, piece in zip(self.ranges, self.pieces, strict=True):
            each.before()
            parts.append(piece(x))
            each.after()
        return torch.cat([*parts, self.tail(x)], -1)


def full_head(decoder: Decoder) -> nn.Module:
    head = decoder.get_submodule("head")
    return head.full if isinstance(head, SwitchLinear) else head
