"""Blocks of a decoder that come from a file, without a planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from offload.disk import DiskLink
from offload.layout import Layout, fill
from offload.link import Link, Throttled, host_slots
from offload.stream import Stream
from quant.linear import SwitchLinear
from sharesd.models.decoder import Decoder

LINEARS = ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")


def from_file(
    path: Path, blocks: Sequence[int], *, num_slots: int = 2, rate: float | None = None, stay: Sequence[str] = ()
) -> Callable[[Decoder], tuple[Stream, Layout]]:
    """Write packed weights of these blocks, but for the linears that `stay`, into a file, from which they come back at
    so many bytes per second.
    """

    def offload(decoder: Decoder) -> tuple[Stream, Layout]:
        def tensors(block: int) -> dict[str, torch.Tensor]:
            found = {}
            for name in LINEARS:
                linear = decoder.blocks[block].get_submodule(name)
                if name not in stay:
                    found[f"{name}.weight"] = (linear.full if isinstance(linear, SwitchLinear) else linear).weight
            return found

        layout = Layout.of(tensors(blocks[0]))
        record = torch.empty(layout.record_bytes, dtype=torch.uint8)
        with path.open("wb") as file:
            for block in blocks:
                fill(record, layout, tensors(block))
                file.write(record.numpy().data)
        offsets = {block: i * layout.record_bytes for i, block in enumerate(blocks)}
        link: Link = DiskLink(path, offsets, direct=False)
        if rate is not None:
            link = Throttled(link, rate)
        return Stream(blocks, host_slots(layout.record_bytes, num_slots), link), layout

    return offload
