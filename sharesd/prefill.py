"""Reading prompts into a KV cache.

Legend: B rows, T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sharesd.cache import StaticKVCache
from sharesd.models.base import CausalModel

CHUNK = 512
"""Tokens per forward pass at most: long enough for full matrix speed, short enough for little memory."""


def prefill(model: CausalModel, cache: StaticKVCache, prompts: list[list[int]], num_kept: list[int]) -> Tensor:
    """Write the KV of each row's prompt; returns the logits [B, V] after its last token. An empty row stays idle.

    The first `num_kept` tokens of a row are in the cache already (at least one token is always read anew). Rows are
    padded on the right: what padding writes lies above the row's length. Every query is computed alone, so neither
    the chunks nor the other rows change a row's result where the model is row-invariant.
    """
    device = cache.lengths.device
    starts = [min(kept, max(0, len(row) - 1)) for row, kept in zip(prompts, num_kept, strict=True)]
    longest = max(len(row) - start for row, start in zip(prompts, starts, strict=True))
    while (longest - 1) % CHUNK + 1 in model.step_widths:
        longest += 1  # a form compiled for steps might be missing yet, and rounds otherwise than the rest of the prompt
    starts = [min(start, cache.slots - longest) for start in starts]  # the padding of a row needs slots, too
    todo = [row[start:] for row, start in zip(prompts, starts, strict=True)]
    tokens_BL = torch.tensor([row + [0] * (longest - len(row)) for row in todo], dtype=torch.int64, device=device)
    starts_B = torch.tensor(starts, device=device)
    lasts_B = torch.tensor([max(0, len(row) - 1) for row in todo], device=device)
    logits_BV: Tensor | None = None
    for offset in range(0, longest, CHUNK):
        chunk_BT = tokens_BL[:, offset : offset + CHUNK].contiguous()
        cache.lengths.copy_(starts_B + offset)
        keep_B1 = (lasts_B - offset).clamp(0, chunk_BT.shape[1] - 1)[:, None]
        new_BV = model.forward(chunk_BT, cache, keep_B1)[:, 0]
        here_B1 = ((lasts_B >= offset) & (lasts_B < offset + CHUNK))[:, None]
        logits_BV = new_BV if logits_BV is None else torch.where(here_B1, new_BV, logits_BV)
    assert logits_BV is not None
    cache.lengths.copy_(torch.tensor([len(row) for row in prompts], device=device))
    return logits_BV
