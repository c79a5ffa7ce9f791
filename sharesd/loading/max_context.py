"""Length of the context: as given, or by model and free memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from compile.attention import reads_live_slots
from offload.planner import show_bytes
from sharesd.config import MIN_CONTEXT, PLANNED_CONTEXT, EngineConfig
from sharesd.devices.host_memory import free_memory, own_memory
from sharesd.field_types import DefaultLimit
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder

log = logging.getLogger(__name__)

PROBE_SLOTS = 32
"""Slots of a small cache, to count its bytes."""
SHARE_OF_FREE = 0.5
"""Share of the free memory for KV caches of a chosen length."""


class Context(NamedTuple):
    """A length and the reason for it."""

    tokens: int
    reason: str


def choose_context(
    config: EngineConfig,
    target: CausalModel,
    device: torch.device,
    *,
    taps: Sequence[int] = (),
    copies: int = 1,
    planned: bool = False,
    mapped_bytes: int = 0,
) -> Context:
    """Choose the tokens of a row of the KV cache.

    Args:
        target: the model, with its weights in memory.
        taps: depths of hidden states in the cache.
        copies: caches of this size, that of a draft model included.
        planned: weights are placed by a plan or shared, so that the choice does not depend on free memory.
        mapped_bytes: weights in a mapped file, whose memory the system counts as free.

    Raises:
        ValueError: the memory holds less than the minimum.
    """
    own = target.max_context
    rows, per_token = config.max_batch, partial(_bytes_per_token, target, taps, copies)
    if isinstance(config.max_context, int):
        cut = config.max_context > own
        tokens = min(config.max_context, own)
        if cut and not isinstance(config.max_context, DefaultLimit):
            log.warning(
                "max_context is %d and the model's own limit is %d tokens, which is used; give at most that",
                config.max_context,
                own,
            )
        if device.type == "cuda" and not planned:
            per_row, beside = per_token()
            _require_room(tokens, rows, per_row, device, beside)
        return Context(tokens, "the model's own limit" if cut else "as given")
    max_context, reason = own, "the model's own limit"
    reads_all = not isinstance(target, Decoder) or not reads_live_slots(
        device, target.get_buffer("cos_0").dtype, target.config.head_dim
    )
    if (planned or reads_all) and own > PLANNED_CONTEXT:
        max_context = PLANNED_CONTEXT
        reason = "the weights are placed by a plan" if planned else "steps read the whole cache"
        reason = f"chosen since {reason}; --max-context N takes another"
    if planned:
        return Context(max_context, reason)
    free, (per_row, beside) = max(0, _free(device) - mapped_bytes), per_token()
    holds = int(SHARE_OF_FREE * free / (rows * per_row + beside))
    for_rows = f"for {rows} rows" if rows > 1 else "for a row"
    if holds < MIN_CONTEXT:
        raise ValueError(
            f"half of the free memory ({show_bytes(free)}) holds {holds} tokens of context {for_rows}, and at least "
            f"{MIN_CONTEXT} are needed; lower --max-batch, or end what else takes memory"
        )
    if holds < max_context:
        max_context = holds // MIN_CONTEXT * MIN_CONTEXT
        reason = f"what half of the free memory ({show_bytes(free)}) holds {for_rows}"
    return Context(max_context, reason)


def _require_room(tokens: int, rows: int, per_row: float, device: torch.device, beside: float = 0.0) -> None:
    """Raise ValueError if a GPU has too little memory for KV caches."""
    free, per_token = _free(device), rows * per_row + beside
    if tokens * per_token <= free:
        return
    batch, context = max(0, int((free / tokens - beside) / per_row)), int(free / per_token)
    fits = [f"--max-batch {batch}"] if batch else []
    fits += [f"--max-context {context}"] if context >= MIN_CONTEXT else []
    raise ValueError(
        f"KV caches of {rows} rows of {tokens} tokens take {show_bytes(tokens * per_token)} and {device} has "
        f"{show_bytes(free)} free; take {' or '.join(fits) or 'a smaller model'}, or end what else runs there"
    )


def _free(device: torch.device) -> int:
    """Return the free bytes of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return max(0, free_memory() - own_memory())


def _bytes_per_token(target: CausalModel, taps: Sequence[int], copies: int) -> tuple[float, float]:
    """Return bytes of a row's token in all caches, and beside them."""
    cache = target.new_cache(1, PROBE_SLOTS, taps)
    features = 0 if cache.features is None else cache.features.nbytes
    return copies * (cache.nbytes + features) / cache.slots, cache.expanded_bytes / cache.slots
