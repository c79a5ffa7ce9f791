"""How long ranks take for what they exchange in a pass, while they compute nothing: processes of their own, this file.

Legend: M rows, N columns of one rank.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import NamedTuple

import torch

from multigpu.failure_detector import RankLost
from multigpu.launch import join, local_device, spawn
from multigpu.process_group import Group
from multigpu.tensor_parallel import Part, gather_columns, sum_parts
from sharesd.models.decoder_config import DecoderConfig

PASSES = 10
"""Passes that are timed."""
TOLD = 16
"""Words of each of the two broadcasts in which rank 0 tells of a step."""


class Exchange(NamedTuple):
    """Every rank gives a part [M, N]."""

    columns: int
    """N."""
    summed: bool = False
    """Parts are added up, instead of laid side by side."""


Pass = tuple[int, Sequence[Exchange]]
"""Rows M, and what is exchanged one after the other."""


def exchanges_of(config: DecoderConfig, part: Part) -> list[Exchange]:
    """What ranks exchange in a pass through a decoder of which each has such a part."""
    head = Exchange(part.of(config.vocab_size))
    if part.reduces:
        return [*[Exchange(config.hidden_size, summed=True)] * (2 * len(config.layers)), head]
    block = (config.num_heads * config.head_dim, config.hidden_size, config.mlp_size, config.hidden_size)
    return [*[Exchange(part.of(columns)) for columns in block] * len(config.layers), head]


def seconds_of_passes(size: int, device: torch.device, dtype: torch.dtype, passes: Sequence[Pass]) -> list[float]:
    """Median seconds of each of these passes. Raises as `multigpu.launch.spawn`."""
    device = local_device(device, size)
    group = spawn(size, (sys.executable, "-m", __name__, device.type), device)
    try:
        return _passes(group, device, *group.broadcast_object((dtype, passes)))
    finally:
        group.close()


@torch.inference_mode()
def _passes(group: Group, device: torch.device, dtype: torch.dtype, passes: Sequence[Pass]) -> list[float]:
    command, found = torch.zeros(TOLD, dtype=torch.int64), []
    for num_rows, exchanges in passes:
        parts = [(each, torch.ones(num_rows, each.columns, dtype=dtype, device=device)) for each in exchanges]
        seconds = []
        for _ in range(PASSES):
            group.barrier()
            started = time.perf_counter()
            group.broadcast(command)
            group.broadcast(command)
            for each, part_MN in parts:
                whole = (sum_parts if each.summed else gather_columns)(group, part_MN)
            whole[0, 0].item()
            seconds.append(time.perf_counter() - started)
        found.append(median(seconds))
    return found


if __name__ == "__main__":
    with suppress(RankLost):
        kind = torch.device(sys.argv[1])
        this = join(kind)
        _passes(this, local_device(kind, this.size), *this.broadcast_object())
        this.barrier()  # where rank 0 does not come: it ends the others
