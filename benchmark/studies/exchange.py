"""How long ranks take for what they exchange in a pass, while they compute nothing: processes of their own, this file.

Legend: M rows, N outputs of one rank.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import median

import torch

from multigpu.group import Group
from multigpu.launch import join, local_device, spawn
from multigpu.lifeline import RankLost
from multigpu.tensor import gather_columns

PASSES = 20
"""Passes that are timed."""
TOLD = 16
"""Words of each of the two broadcasts in which rank 0 tells of a step."""


def seconds_of_passes(
    size: int, device: torch.device, dtype: torch.dtype, gathers: Sequence[int], rows: Sequence[int]
) -> list[float]:
    """Median seconds of a pass of so many `rows` each, in which every rank gives a part [M, N] to be gathered for each
    N of `gathers`. Raises as `multigpu.launch.spawn`.
    """
    device = local_device(device, size)
    group = spawn(size, (sys.executable, "-m", __name__, device.type), device)
    try:
        return _passes(group, device, *group.broadcast_object((dtype, gathers, rows)))
    finally:
        group.close()


@torch.inference_mode()
def _passes(
    group: Group, device: torch.device, dtype: torch.dtype, gathers: Sequence[int], rows: Sequence[int]
) -> list[float]:
    command, found = torch.zeros(TOLD, dtype=torch.int64), []
    for num_rows in rows:
        parts = [torch.ones(num_rows, columns, dtype=dtype, device=device) for columns in gathers]
        seconds = []
        for _ in range(PASSES):
            group.barrier()
            started = time.perf_counter()
            group.broadcast(command)
            group.broadcast(command)
            for part_MN in parts:
                whole = gather_columns(group, part_MN)
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
