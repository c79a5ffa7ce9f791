"""Choice of the order of 4-bit weights on a GPU: streams for drafts of one row, or tiles for any number."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from sharesd.config import EngineConfig, Kernels
from sharesd.devices.selection import first_line

log = logging.getLogger(__name__)

CAPABILITY = (8, 0)
"""Lowest compute capability of the kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedDrafts:
    """What the choice depends on."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    shares: bool
    """True if a drafter shares the target's weights."""
    tree: tuple[int, int, int] | None
    is_split: bool
    """True if weights are on several devices."""


def choose_streams(drafts: SharedDrafts, *, by_name: bool) -> Kernels:
    """Return `streams` if the shared drafter's weights are to be packed for drafts of one row, else `triton`.

    There is one copy of the weights, so the widest draft decides. Raises ValueError if `streams` were asked for
    `by_name`, and do not run.
    """
    reason = obstacle(drafts)
    if reason is None and (failed := problem(drafts.device, drafts.config.quant.group_size)) is not None:
        reason = f"their kernel does not run on {drafts.device}: {failed}"
        if not by_name:
            log.warning("drafts do not run as streams, which is slower: %s", reason)
    elif reason is not None and not by_name:
        log.info("drafts: 4 bits in tiles (no streams: %s)", reason)
    if reason is None:
        log.info("drafts: 4 bits as streams")
        return "streams"
    if by_name:
        raise ValueError(f"kernels is 'streams', and {reason}; use --kernels triton")
    return "triton"


def obstacle(drafts: SharedDrafts) -> str | None:
    """Return why options, model or card rule out drafts read as streams."""
    from compile.cuda.stream import GROUPS  # on GPUs only

    config, quant = drafts.config, drafts.config.quant
    if not drafts.shares:
        return "no drafter of these modes shares the target's weights"
    bits = {quant.bits, quant.head_bits, *dict(quant.proj_bits).values()}
    if quant.format.solver is None or not bits & {2, 3, 4}:
        return f"draft_quant is {quant}, which has no weights of 4 bits or fewer for them"
    if quant.group_size not in GROUPS:
        return f"draft_quant has groups of {quant.group_size}, and they take {', '.join(map(str, GROUPS))}"
    rows = config.max_batch * (drafts.tree or (1,))[0]
    if rows > 1:
        trees = "" if drafts.tree is None else f", tree {':'.join(map(str, drafts.tree))}"
        return f"drafts have up to {rows} rows (max_batch {config.max_batch}{trees}), and they are for one"
    if drafts.is_split:
        return "weights are on several devices"
    if drafts.dtype != torch.bfloat16:
        return f"dtype is {str(drafts.dtype).removeprefix('torch.')}, and they take bfloat16"
    if torch.cuda.get_device_capability(drafts.device) < CAPABILITY:
        return "the GPU is older than compute capability 8.0"
    return None


def problem(device: torch.device, group: int) -> str | None:
    """Return why the kernel does not compile or run on a device."""
    from compile.cuda.stream import try_product

    try:
        try_product(device, group)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # NVRTC, the driver, or a library that is missing
        return first_line(error)
    return None
