"""KV slots of a row: the context, and rounds' writes after it."""

from __future__ import annotations

import torch

from compile.kv_layout import new_kv, round_slots
from sharesd.config import EngineConfig
from sharesd.models.decoder import Decoder
from sharesd.models.prefill import slots_for
from sharesd.speculation.draft_tree import async_tree_slots

WIDEST_STEP = 16


def kv_slots(
    context: int,
    step_width: int,
    *,
    tree: tuple[int, int] = (0, 0),
    ahead: bool = False,
    prefetches: bool = False,
    pads: bool = False,
) -> int:
    """Return the KV slots of a row that holds `context` tokens.

    A round may end after the context, and a finished row takes part in steps of other rows.

    Args:
        tree: children of a node, and depth, of draft trees of models.
        ahead: rounds are launched early, so that a finished row may run in one more.
        prefetches: trees grow while they are verified.
        pads: prompts may be read in padded pieces.
    """
    top, depth = tree
    slots = context + step_width * (1 + ahead) + max(step_width, 2 + top * depth)
    if prefetches:
        slots += async_tree_slots(top, depth)
    return max(slots, slots_for(context)) if pads else slots


def kv_bytes(decoder: Decoder, config: EngineConfig, slots: int) -> list[int]:
    """Return bytes of keys and values by layer, with `slots` per row."""
    c, dtype = decoder.config, decoder.embed.weight.dtype
    few = new_kv(1, c.num_key_value_heads, 1, c.head_dim, dtype, torch.device("cpu"), q8=config.kv_dtype == "q8")
    per_slot = sum(tensor.nbytes for tensor in few) // round_slots(1)
    return [config.max_batch * round_slots(slots) * per_slot] * c.num_hidden_layers


def expanded_bytes(decoder: Decoder, config: EngineConfig, slots: int, *, on_gpu: bool) -> int:
    """Return bytes of a layer's row that prompts expand on a GPU."""
    c, dtype = decoder.config, decoder.embed.weight.dtype
    is_expanded = on_gpu and config.kv_dtype == "q8"
    return 2 * c.num_key_value_heads * round_slots(slots) * c.head_dim * dtype.itemsize * is_expanded
