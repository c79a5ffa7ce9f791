"""Start and end of the ranks that share a model."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from compile.adaptive_threads import STEP_THREADS
from multigpu.launch import join, launched_rank, local_device, num_ranks_sharing_cores, spawn
from multigpu.process_group import Group, ProcessGroup
from multigpu.tensor_parallel import TILE, Shard
from sharesd.config import CompileMode, EngineConfig, Mode
from sharesd.devices.selection import use
from sharesd.models.loader import decoder_config
from sharesd.models.weight_mapping import check_tensor_parallel
from sharesd.parallel.stored_cuts import check_stored_cuts

log = logging.getLogger(__name__)

EAGER_TILE = 64
"""Outputs of gate per indivisible group: torch rounds remainders of vectors otherwise."""


def init_tp(
    config: EngineConfig,
    modes: Sequence[Mode],
    folder: Path,
    *,
    device: torch.device,
    compile: CompileMode,
    group: Group | None,
) -> tuple[Group, Shard, torch.device]:
    """Start or join the ranks that share the target in a folder.

    Rank 0 broadcasts its config and modes. Returns the group, this rank's part of each linear, and its device.
    `group`: None = start processes, or join those of torchrun. ValueError for a number of ranks that differs or does
    not divide the target, RankLost if a rank does not join.
    """
    size = config.tensor_parallel
    eager_on_cpu = compile == "off" and device.type == "cpu"
    check_tensor_parallel(decoder_config(folder), size, EAGER_TILE if eager_on_cpu else TILE)
    check_stored_cuts(config, folder)
    if config.tensor_parallel_style == "reduce" and (group is None or group.rank == 0):
        log.warning(
            "tensor_parallel_style is reduce: sums are split, so texts may be others than with another number of ranks"
        )
    if config.threads is None:
        STEP_THREADS.reset(max(1, STEP_THREADS.available // num_ranks_sharing_cores(size)))
    if isinstance(group, ProcessGroup) or group is None:
        device = local_device(device, size)
        use(device)
    if group is None:
        group = _new_group(size, device)
    if group.rank == 0:
        group.broadcast_object((config, modes))
    return group, Shard(group.rank, group.size, config.tensor_parallel_style == "reduce"), device


def _new_group(size: int, device: torch.device) -> Group:
    if launched_rank() is None:
        group = spawn(size, (sys.executable, "-m", "sharesd.cli.tp_worker", device.type), device)
    else:
        group = join(device)
    atexit.register(group.close)
    if (group.rank, group.size) != (0, size):
        raise ValueError(
            f"tensor_parallel is {size}, and this is rank {group.rank} of {group.size}; start as many processes as "
            "tensor_parallel says, of which all but rank 0 follow"
        )
    return group


def shutdown_tp(group: Group) -> None:
    atexit.unregister(group.close)
    group.close()
