"""Does a row of a step get the same bits whatever the step's width and the row's place? Found out at start-up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sharesd.cache import StaticKVCache
from sharesd.models.decoder import Decoder

WIDTHS = (1, 2, 3, 5, 8, 9, 16)
"""Numbers of rows that are compared."""
LENGTHS = (5, 30)
"""Live slots before the rows."""

RunFirst = Callable[[Tensor, StaticKVCache], Tensor]
"""The first block: (rows [1, T, D], a cache of one layer) -> rows."""


def first_block(model: Decoder) -> RunFirst:
    """The first block by itself, as it runs where steps are not compiled."""

    def run(x_1TD: Tensor, cache: StaticKVCache) -> Tensor:
        at_1T = cache.lengths[:, None] + torch.arange(x_1TD.shape[1], device=x_1TD.device)
        cos, sin = model.rope_tables[max(model.config.layers[0].rope, 0)]
        return model.blocks[0](x_1TD, cos[at_1T], sin[at_1T], cache.k[0], cache.v[0], cache.lengths)

    return run


@torch.inference_mode()
def rows_agree(model: Decoder, run: RunFirst) -> bool:
    """True if random rows leave the first block and the LM head with the same bits in steps of every width.

    Takes as long as a few dozen blocks do: milliseconds.
    """
    c, table = model.config, model.get_buffer("cos_0")
    dice, most = torch.Generator().manual_seed(0), max(WIDTHS)
    x_1TD = torch.randn(1, most, c.hidden_size, generator=dice).to(table.device, table.dtype)

    def rows(length: int, width: int) -> Tensor:
        cache = StaticKVCache(
            shapes=[(c.num_kv_heads, c.head_dim)], batch=1, slots=64, dtype=table.dtype, device=table.device
        )
        cache.lengths.fill_(length)
        parts = []
        for begin in range(0, most - width + 1, width):
            parts.append(model.head(model.norm(run(x_1TD[:, begin : begin + width], cache))))
            cache.lengths += width
        return torch.cat(parts, 1)

    for length in LENGTHS:
        together_1TV = rows(length, most)
        for width in WIDTHS:
            some_1TV = rows(length, width)
            if not torch.equal(some_1TV, together_1TV[:, : some_1TV.shape[1]]):
                return False
    return True
