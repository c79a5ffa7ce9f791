"""Ranks that share a model out: whether it can be, how they meet, and how they part."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from compile.adaptive_threads import CREW
from multigpu.launch import join, launched_rank, local_device, num_sharing, spawn
from multigpu.process_group import Group, ProcessGroup
from multigpu.tensor_parallel import TILE
from sharesd.config import HEADS, CompileMode, EngineConfig, Mode
from sharesd.devices.selection import use
from sharesd.models.decoder_config import Unsupported
from sharesd.models.loader import check_cuts, decoder_config

log = logging.getLogger(__name__)

EAGER_TILE = 64
"""Outputs of gate that stay together where torch's own activations run on a CPU: vectors of them, and what is left over
behind the last whole vector, are rounded differently."""


def meet(
    config: EngineConfig,
    modes: Sequence[Mode],
    needs: set[str],
    folder: Path,
    *,
    device: torch.device,
    compile: CompileMode,
    group: Group | None,
) -> tuple[Group, torch.device]:
    """The group of ranks that share the target in a folder, and this one's device; rank 0 tells the others what it has
    been asked for.

    `needs` are the drafters of `modes`. Without a `group`, processes are started, or those of torchrun joined.
    Raises ValueError where the target cannot be shared out so, RankLost where a rank does not come.
    """
    size = config.tensor_parallel
    if compile in ("regional", "full"):
        raise ValueError(
            f"compile is {compile!r} and tensor_parallel is {size}, whose steps wait for each other between linears; "
            "take native on a CPU, off on a GPU, or auto"
        )
    heads = sorted(needs & {*HEADS})
    if heads:
        raise ValueError(f"tensor_parallel is {size}, and trained heads run on one device; drop mode {heads[0]}")
    try:
        eager = compile == "off" and device.type == "cpu"
        check_cuts(decoder_config(folder), size, EAGER_TILE if eager else TILE)
    except Unsupported as reason:
        raise ValueError(f"tensor_parallel is {size}, and only native decoders are shared out: {reason}") from None
    if config.tensor_parallel_style == "reduce" and (group is None or group.rank == 0):
        log.warning(
            "tensor_parallel_style is reduce: sums are split, so texts may be others than with another number of ranks"
        )
    if config.threads is None:
        CREW.reset(max(1, CREW.available // num_sharing(size)))
    if isinstance(group, ProcessGroup) or group is None:
        if ":" in config.device:
            raise ValueError(f"device is {config.device!r} and tensor_parallel is {size}; take cuda for one each")
        device = local_device(device, size)
        use(device)
    if group is None:
        group = _new_group(size, device)
    if group.rank == 0:
        group.broadcast_object((config, modes))
    return group, device


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


def leave(group: Group) -> None:
    """End the other ranks."""
    atexit.unregister(group.close)
    group.close()
