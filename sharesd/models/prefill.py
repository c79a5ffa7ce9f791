"""Prefill of prompts into a KV cache, in pieces.

Legend: B rows, T tokens of a piece, R tokens whose logits are returned, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compile.attention import MAX_STEP
from sharesd.devices.transfer import to_device
from sharesd.kvcache.recurrent import BOUNDARY, NO_END, TAIL
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel

CHUNK = 512
"""Maximum tokens per forward pass: full matrix speed, and little memory."""
LONG_CHUNK = 2048
"""Chunk of offloaded models, whose weights are transferred once a pass."""
PIECES = (MAX_STEP, 128, 256, CHUNK)
"""Sizes of a forward pass on a GPU, in tokens.

Kernels are chosen, planned and compiled for each size. The smallest is the largest that the attention of steps takes,
which reads live slots alone.
"""


class Piece(NamedTuple):
    """Tokens of a prompt that one forward pass reads."""

    first: int
    """Position of the first token."""
    end: int
    """Position after the last token."""
    size: int
    """Rows of the pass: tokens, then padding."""


def next_piece(model: CausalModel, cache: StaticKVCache, num_read: int, length: int, max_chunk: int = CHUNK) -> Piece:
    """Return the next piece of a prompt, of at most `max_chunk` tokens.

    `num_read` of the prompt's `length` tokens have been read. The piece may start at any token; `next_padded_piece` has
    fixed boundaries. With recurrent layers it ends where their state is kept, unless chunks are to be long.
    """
    end = min(length, num_read + max_chunk)
    if cache.recurrent is not None and max_chunk <= CHUNK:
        end = min(end, num_read // BOUNDARY * BOUNDARY + BOUNDARY)
    size = end - num_read
    while size in model.step_widths:
        size += 1  # a form compiled for steps might be missing yet, and rounds otherwise than the rest of the prompt
    return Piece(min(num_read, cache.slots - size), end, size)


def next_padded_piece(model: CausalModel, cache: StaticKVCache, num_read: int, length: int) -> Piece:
    """Return the next piece of a prompt, padded to a fixed size.

    For devices on which a row's bits depend on the number of rows. The piece ends at a multiple of CHUNK or at the end
    of the prompt. Results then depend on the prompt alone, if the tokens before were read the same way, up to a
    multiple of CHUNK. Where its padding has no room, it begins with tokens that have been read; recurrent layers, whose
    state has moved on, get a smaller one.
    """
    end = min(length, whole_chunks(num_read) + CHUNK)
    sizes = [size for size in PIECES if size == CHUNK or size not in model.step_widths]
    size = min(cache.slots, next(size for size in sizes if size >= end - num_read))
    if cache.recurrent is not None and size > (room := cache.slots - num_read):
        size = max((size for size in sizes if size <= room), default=room)
        return Piece(num_read, min(end, num_read + size), size)
    return Piece(min(num_read, cache.slots - size), end, size)


def read_piece(
    model: CausalModel, cache: StaticKVCache, row: int, tokens: Sequence[int], piece: Piece, num_rows: int = 1
) -> Tensor:
    """Write KV of a piece of a prompt; return logits [R, V].

    The logits are those of the last `num_rows` tokens. The row's length is then the end of the piece; padding writes
    above it.
    """
    first, end, size = piece
    # Kernels for steps read live slots alone, of whole caches. Those for prompts read all that they are given.
    view = cache.row(row, cache.slots if size <= MAX_STEP else _up_to_chunk(first + size))
    view.lengths.fill_(first)
    piece_1T = to_device([[*tokens[first:end], *[0] * (size - (end - first))]], cache.entry)
    last_1R = torch.arange(end - first - num_rows, end - first, device=cache.lengths.device)[None]
    ahead = max(0, end - first - (TAIL if end == len(tokens) else 0))
    certain = view.certain
    view.known_length = first  # so that the first of several stages may begin while the last one is at a piece before
    if view.recurrent is not None:
        view.certain = view.lengths + ahead
        view.recurrent.ends_B.fill_(end)
    try:
        logits_RV = model.forward(piece_1T, view, last_1R)[0]
    finally:
        view.known_length, view.certain = None, certain  # the view may be remembered
        if view.recurrent is not None:
            view.recurrent.ends_B.fill_(NO_END)
    view.lengths.fill_(end)
    if cache.recurrent is not None and (end == len(tokens) or end % BOUNDARY == 0):
        cache.recurrent.keep(row, end, first + ahead)
    return logits_RV


def reads_in_pieces(cache: StaticKVCache) -> bool:
    """Return True if passes have a few fixed sizes: on a GPU.

    Kernels are compiled for these sizes.
    """
    return cache.lengths.device.type != "cpu"


def prefill(model: CausalModel, cache: StaticKVCache, prompts: list[list[int]], num_kept: list[int]) -> Tensor:
    """Write KV of prompts; return logits [B, V] of last tokens.

    A row with an empty prompt stays idle. The first `num_kept` tokens of a row are in the cache already (at least one
    token is always read again). On a CPU rows are read together, padded on the right: padding writes above the row's
    length.
    """
    if reads_in_pieces(cache):
        return prefill_in_pieces(model, cache, prompts, num_kept)
    if cache.recurrent is not None:  # whose state padding would overwrite
        return prefill_in_pieces(model, cache, prompts, num_kept, next_piece)
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
    model: CausalModel,
    cache: StaticKVCache,
    prompts: list[list[int]],
    num_kept: list[int],
    piece_of: Callable[[CausalModel, StaticKVCache, int, int], Piece] = next_padded_piece,
) -> Tensor:
    """Run `prefill` on each row by itself, in padded pieces, or those that `piece_of` returns."""
    logits = []
    for row, (prompt, kept) in enumerate(zip(prompts, num_kept, strict=True)):
        tokens = prompt or [0]
        num_read = min(kept, len(tokens) - 1)
        while num_read < len(tokens):
            piece = piece_of(model, cache, num_read, len(tokens))
            last_1V, num_read = read_piece(model, cache, row, tokens, piece), piece.end
        logits.append(last_1V.clone())
    cache.lengths.copy_(torch.tensor([len(prompt) for prompt in prompts], device=cache.lengths.device))
    return torch.cat(logits)


def whole_chunks(num_tokens: int) -> int:
    """Return how many tokens lie in chunks of full size."""
    return num_tokens // CHUNK * CHUNK


def slots_for(max_context: int) -> int:
    """Return the KV slots of prompts of up to `max_context` tokens, padded."""
    return _up_to_chunk(max_context)


def _up_to_chunk(num_slots: int) -> int:
    return -(-num_slots // CHUNK) * CHUNK
