"""Prompts are read one at a time, in pieces between the rounds of others.

Legend: V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from torch import Tensor

from sharesd.drafters.base import Drafter
from sharesd.engine.prompt_logprobs import MOST_ROWS, score
from sharesd.engine.request import Request
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.models.prefill import (
    CHUNK,
    LONG_CHUNK,
    next_padded_piece,
    next_piece,
    read_piece,
    reads_in_pieces,
    whole_chunks,
)

BEARABLE, LEAST_PIECE = 1.3, 8
"""What is read of a prompt between two rounds of others: as much as takes so many plain rounds, but at
least so many tokens."""
RECENT = 9
"""Plain rounds, and pieces of prompts, whose median tells how long such take: a stall of the machine tells nothing."""


class Reader:
    """Reads the prompt of one request into its row of the cache, and lets the drafter read it, too."""

    def __init__(
        self,
        target: CausalModel,
        cache: StaticKVCache,
        drafter: Drafter | None,
        *,
        reread: bool,
        prefill_chunk: int | None,
        offloaded: bool = False,
    ) -> None:
        """As `Engine` has them. Where weights are `offloaded` a pass takes as long for many tokens as for few: so many
        are read at a time. Raises ValueError for a `prefill_chunk` that cannot be honoured.
        """
        self._target, self._cache, self._drafter = target, cache, drafter
        self._in_pieces = reread or reads_in_pieces(cache)
        if self._in_pieces and prefill_chunk not in (None, CHUNK):
            raise ValueError(
                f"prefill_chunk is {prefill_chunk}, and this target reads prompts in pieces of {CHUNK}; leave it out"
            )
        self._most = LONG_CHUNK if offloaded else CHUNK
        self._prefill_chunk = prefill_chunk or (LONG_CHUNK if offloaded else None)
        self.request: Request | None = None
        """Whose prompt is being read."""
        self._round_s: deque[float] = deque(maxlen=RECENT)
        self._token_s: deque[float] = deque(maxlen=RECENT)

    def read(self, *, waited_for: bool) -> Tensor | None:
        """Read a piece of the prompt, a small one if others wait for their next round meanwhile. Returns the logits
        [1, V] behind the last token once all is read, and has no `request` then.
        """
        request, cache = self.request, self._cache
        assert request is not None and request.slot is not None
        prompt, row = request.prompt_ids, request.slot
        if self._in_pieces:
            piece = next_padded_piece(self._target, cache, request.num_read, len(prompt))
        else:
            most = (self._prefill_chunk or self._bearable()) if waited_for else self._most
            most = min(most, MOST_ROWS) if request.params.prompt_logprobs else most
            piece = next_piece(self._target, cache, request.num_read, len(prompt), most)
        started = time.perf_counter()
        if request.params.prompt_logprobs:
            logits_RV = read_piece(self._target, cache, row, prompt, piece, piece.end - request.num_read)
            score(request, logits_RV)
            logits_1V = logits_RV[-1:]
        if self._in_pieces or not request.params.prompt_logprobs:  # there the bits of a row depend on the others
            logits_1V = read_piece(self._target, cache, row, prompt, piece)
        cache.held[row] += prompt[request.num_read : piece.end]
        cache.settled[row] = whole_chunks(piece.end)
        request.num_read = piece.end
        if self._drafter is not None:
            self._drafter.read(row, prompt[: piece.end])
        if piece.size >= LEAST_PIECE:
            self._token_s.append((time.perf_counter() - started) / piece.size)
        if piece.end < len(prompt):
            cache.park(row, row + 1)  # rounds of others meanwhile
            return None
        self.request = None
        return logits_1V

    def took(self, round_s: float) -> None:
        """A plain round took so long."""
        self._round_s.append(round_s)

    def _bearable(self) -> int:
        """Tokens to read between two rounds, so that those who wait for their next one hardly notice."""
        if not self._token_s or not self._round_s:
            return LEAST_PIECE
        return min(CHUNK, max(LEAST_PIECE, int(BEARABLE * median(self._round_s) / median(self._token_s))))
