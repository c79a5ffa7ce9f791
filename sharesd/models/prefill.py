"""Reading prompts into a KV cache, row by row and piece by piece.

Legend: B rows, T tokens of a chunk, R of them whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compile.attention import MAX_STEP
from sharesd.devices.host_buffers import sent
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel

CHUNK = 512
"""Tokens per forward pass at most: long enough for full matrix speed, short enough for little memory."""
LONG_CHUNK = 2048
"""In place of CHUNK where weights come through a slow link for each pass, however many tokens it reads."""
PIECES = (MAX_STEP, 128, 256, CHUNK)
"""Numbers of rows of a forward pass on a GPU, where kernels are chosen, planned and compiled for each number. The
shortest is the longest that steps' attention takes, which reads no slots but live ones."""


class Piece(NamedTuple):
    """Tokens of a prompt which one forward pass reads."""

    first: int
    """The first of them."""
    end: int
    """After the last."""
    size: int
    """Rows of the pass: the tokens, and padding behind them."""


def next_piece(model: CausalModel, cache: StaticKVCache, num_read: int, length: int, most: int = CHUNK) -> Piece:
    """What to read next of a prompt of this length, of which so many tokens have been read: at most `most` tokens.

    In rows that are computed alone, tokens may lie anywhere. `in_pieces` of other models they lie at absolute places.
    """
    end = min(length, num_read + most)
    size = end - num_read
    while size in model.step_widths:
        size += 1  # a form compiled for steps might be missing yet, and rounds otherwise than the rest of the prompt
    return Piece(min(num_read, cache.slots - size), end, size)


def next_padded_piece(model: CausalModel, cache: StaticKVCache, num_read: int, length: int) -> Piece:
    """`next_piece` where a row's bits depend on the number of rows: it ends where a multiple of CHUNK or the prompt
    does, and is padded to the next of few sizes. So results depend on the prompt alone, if what was read before was
    read in this way, up to a multiple of CHUNK.
    """
    end = min(length, whole_chunks(num_read) + CHUNK)
    sizes = [size for size in PIECES if size == CHUNK or size not in model.step_widths]
    size = min(cache.slots, next(size for size in sizes if size >= end - num_read))
    return Piece(min(num_read, cache.slots - size), end, size)


def read_piece(
    model: CausalModel, cache: StaticKVCache, row: int, tokens: Sequence[int], piece: Piece, num_rows: int = 1
) -> Tensor:
    """Write the KV of a piece of a row's prompt, and nothing else; returns the logits [R, V] after its last `num_rows`
    tokens.

    The row's length is then the end of the piece; what padding writes lies above it.
    """
    first, end, size = piece
    # Kernels for steps read live slots alone, of whole caches. Those for prompts read all that they are given.
    view = cache.row(row, cache.slots if size <= MAX_STEP else _up_to_chunk(first + size))
    view.lengths.fill_(first)
    piece_1T = sent([[*tokens[first:end], *[0] * (size - (end - first))]], cache.entry)
    last_1R = torch.arange(end - first - num_rows, end - first, device=cache.lengths.device)[None]
    view.known_length = first  # so that the first of several stages may begin while the last one is at a piece before
    try:
        logits_RV = model.forward(piece_1T, view, last_1R)[0]
    finally:
        view.known_length = None  # the view may be remembered
    view.lengths.fill_(end)
    return logits_RV


def reads_in_pieces(cache: StaticKVCache) -> bool:
    """Whether prompts are read in few sizes of passes, for which kernels are chosen, planned and compiled: on a GPU."""
    return cache.lengths.device.type != "cpu"


def prefill(model: CausalModel, cache: StaticKVCache, prompts: list[list[int]], num_kept: list[int]) -> Tensor:
    """Write the KV of each row's prompt; returns the logits [B, V] after its last token. An empty row stays idle.

    The first `num_kept` tokens of a row are in the cache already (at least one token is always read anew). On a CPU
    rows are read together, padded on the right: what padding writes lies above the row's length.
    """
    if reads_in_pieces(cache):
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
    """`prefill` of each row by itself, in padded pieces."""
    logits = []
    for row, (prompt, kept) in enumerate(zip(prompts, num_kept, strict=True)):
        tokens = prompt or [0]
        num_read = min(kept, len(tokens) - 1)
        while num_read < len(tokens):
            piece = next_padded_piece(model, cache, num_read, len(tokens))
            last_1V, num_read = read_piece(model, cache, row, tokens, piece), piece.end
        logits.append(last_1V.clone())
    cache.lengths.copy_(torch.tensor([len(prompt) for prompt in prompts], device=cache.lengths.device))
    return torch.cat(logits)


def whole_chunks(num_tokens: int) -> int:
    """So many of the first tokens of a longer prompt as it would read in chunks of full size."""
    return num_tokens // CHUNK * CHUNK


def slots_for(max_context: int) -> int:
    """Slots that prompts of up to `max_context` tokens need, padding included."""
    return _up_to_chunk(max_context)


def _up_to_chunk(num_slots: int) -> int:
    return -(-num_slots // CHUNK) * CHUNK
