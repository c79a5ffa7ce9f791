"""Any blocks of a decoder that was loaded as a whole, moved to a file from which they come back: without a planner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compile.linear import PackedLinear
from offload.disk import DiskLink
from offload.layout import Layout, fill
from offload.link import Link, Throttled, host_slots
from offload.stream import Stream
from quant.linear import SwitchLinear
from sharesd.models.decoder import Decoder


def packed_weights(block: nn.Module) -> dict[str, Tensor]:
    """What may travel of a block on the CPU, with names in the block: weights of its packed linears at full precision,
    but for those which have no quantized weights while others have.
    """
    switched = {name: linear for name, linear in block.named_modules() if isinstance(linear, SwitchLinear)}
    linears: dict[str, Any] = {name: linear.full for name, linear in switched.items()}
    if not linears:
        linears = {name: linear for name, linear in block.named_modules() if isinstance(linear, PackedLinear)}
    return {f"{name}.weight": linear.weight for name, linear in linears.items()}


def spill(
    decoder: Decoder,
    blocks: Sequence[int],
    path: Path,
    *,
    num_slots: int = 2,
    bytes_per_second: float | None = None,
    direct: bool | None = None,
) -> tuple[Stream, Layout]:
    """Write `packed_weights` of some blocks into a file; returns how they come back, and what a record holds.

    ValueError where these blocks do not have the same.
    """
    layout = Layout.of(packed_weights(decoder.blocks[blocks[0]]))
    record = torch.empty(layout.record_bytes, dtype=torch.uint8)
    with path.open("wb") as file:
        for block in blocks:
            weights = packed_weights(decoder.blocks[block])
            if Layout.of(weights) != layout:
                raise ValueError(f"block {block} has other weights than block {blocks[0]}; let it stay")
            fill(record, layout, weights)
            file.write(record.numpy().data)
    link: Link = DiskLink(path, {block: i * layout.record_bytes for i, block in enumerate(blocks)}, direct=direct)
    if bytes_per_second is not None:
        link = Throttled(link, bytes_per_second)
    return Stream(blocks, host_slots(layout.record_bytes, num_slots), link), layout
