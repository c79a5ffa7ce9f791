"""Reading prompts into a KV cache.

Legend: B rows, T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compile.attention import MAX_STEP
from sharesd.decoding.cache import StaticKVCache
from sharesd.models.base import CausalModel

CHUNK = 512
"""Tokens per forward pass at most: long enough for full matrix speed, short enough for little memory."""
PIECES = (MAX_STEP, 128, 256, CHUNK)
"""Numbers of rows of a forward pass on a GPU, where kernels are chosen, planned and compiled for each number. The
shortest is the longest that steps' attention takes, which reads no slots but live ones."""


def prefill(model: CausalModel, cache: StaticKVCache, prompts: list[list[int]], num_kept: list[int]) -> Tensor:
    """Write the KV of each row's prompt; returns the logits [B, V] after its last token. An empty row stays idle.

    The first `num_kept` tokens of a row are in the cache already (at least one token is always read anew). Rows are
    padded on the right: what padding writes lies above the row's length. Every query is computed alone, so neither
    the chunks nor the other rows change a row's result where the model is row-invariant; for a GPU, where it is not,
    see `prefill_in_pieces`.
    """
    if cache.lengths.device.type != "cpu":
        return prefill_in_pieces(model, cache, prompts, num_kept)
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


def prefill_in_pieces(
    model: CausalModel, cache: StaticKVCache, prompts: list[list[int]], num_kept: list[int]
) -> Tensor:
    """`prefill` where a row's bits depend on the number of rows: each prompt by itself, in pieces of few sizes.

    A piece ends where a multiple of CHUNK or the prompt does, and is padded to the next size. So the result depends on
    the prompt alone, if `num_kept` are `whole_chunks` which were read in this way.
    """
    device = cache.lengths.device
    logits = []
    for b, (prompt, kept) in enumerate(zip(prompts, num_kept, strict=True)):
        tokens = prompt or [0]
        for first, end, size in _pieces(min(kept, len(tokens) - 1), len(tokens), model, cache.slots):
            # Kernels for steps read live slots alone, of whole caches. Those for prompts read all that they are given.
            row = cache.row(b, cache.slots if size <= MAX_STEP else _up_to_chunk(first + size))
            row.lengths.fill_(first)
            piece_1T = torch.tensor([tokens[first:end] + [0] * (size - (end - first))], device=device)
            last_11 = torch.tensor([[end - first - 1]], device=device)
            last_1V = model.forward(piece_1T, row, last_11)[:, 0]
        logits.append(last_1V.clone())
    cache.lengths.copy_(torch.tensor([len(prompt) for prompt in prompts], device=device))
    return torch.cat(logits)


def whole_chunks(num_tokens: int) -> int:
    """So many of the first tokens of a longer prompt as it would read in chunks of full size."""
    return num_tokens // CHUNK * CHUNK


def slots_for(max_context: int) -> int:
    """Slots that prompts of up to `max_context` tokens need, padding included."""
    return _up_to_chunk(max_context)


def _up_to_chunk(num_slots: int) -> int:
    return -(-num_slots // CHUNK) * CHUNK


def _pieces(begin: int, end: int, model: CausalModel, slots: int) -> Iterator[tuple[int, int, int]]:
    """First token, end and number of rows of each piece of the tokens from `begin` to `end`."""
    sizes = [size for size in PIECES if size == CHUNK or size not in model.step_widths]
    while begin < end:
        stop = min(end, whole_chunks(begin) + CHUNK)
        size = min(slots, next(size for size in sizes if size >= stop - begin))
        yield min(begin, slots - size), stop, size
        begin = stop
