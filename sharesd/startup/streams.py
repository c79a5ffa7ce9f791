"""Choice of the order of 4-bit weights on a GPU: streams for drafts of one row, or tiles for any number."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from sharesd.config import Kernels
from sharesd.devices.selection import first_line
from sharesd.drafters.registry import Need

if TYPE_CHECKING:
    from sharesd.startup.resolve import ResolvedConfig

log = logging.getLogger(__name__)

CAPABILITY = (8, 0)
"""Lowest compute capability of the kernel."""


def choose_streams(resolved: ResolvedConfig, *, by_name: bool) -> Kernels:
    """Return `streams` if the shared drafter's weights are to be packed for drafts of one row, else `triton`.

    There is one copy of the weights, so the widest draft decides. Raises ValueError if `streams` were asked for
    `by_name`, and do not run.
    """
    reason = obstacle(resolved)
    if reason is None and (failed := problem(resolved.device, resolved.config.quant.group_size)) is not None:
        reason = f"their kernel does not run on {resolved.device}: {failed}"
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


def obstacle(resolved: ResolvedConfig) -> str | None:
    """Return why drafts are no streams by options, model and card."""
    from compile.cuda.stream import GROUPS  # on GPUs only

    config, quant = resolved.config, resolved.config.quant
    if not resolved.drafters_with(Need.QUANTIZED_TARGET):
        return "no drafter of these modes shares the target's weights"
    bits = {quant.bits, quant.head_bits, *dict(quant.proj_bits).values()}
    if quant.format.solver is None or not bits & {2, 3, 4}:
        return f"draft_quant is {quant}, which has no weights of 4 bits or fewer for them"
    if quant.group_size not in GROUPS:
        return f"draft_quant has groups of {quant.group_size}, and they take {', '.join(map(str, GROUPS))}"
    rows = config.max_batch * (resolved.tree or (1,))[0]
    if rows > 1:
        trees = "" if resolved.tree is None else f", tree {':'.join(map(str, resolved.tree))}"
        return f"drafts have up to {rows} rows (max_batch {config.max_batch}{trees}), and they are for one"
    if resolved.pipeline is not None or resolved.is_sharded:
        return "weights are on several devices"
    if resolved.dtype != torch.bfloat16:
        return f"dtype is {str(resolved.dtype).removeprefix('torch.')}, and they take bfloat16"
    if torch.cuda.get_device_capability(resolved.device) < CAPABILITY:
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
