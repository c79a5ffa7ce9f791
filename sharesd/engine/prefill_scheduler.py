"""Prefill of one prompt at a time, in chunks between rounds.

Legend: R rows of logits, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

import torch
from torch import Tensor

from compile.state_update import count_finite
from sharesd import sampling
from sharesd.drafters.base import Drafter
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

MAX_CHUNK = 128
"""Prompt tokens per chunk if logits are requested and cuts are free."""
ROWS_AT_ONCE = 32
"""Rows whose logits are widened at once."""
MAX_STALL, MIN_PIECE = 1.3, 8
"""Time limit of a chunk between two rounds, in plain rounds, and its fewest tokens."""
NUM_TIMES = 9
"""Window of running medians of round and prefill time.

Medians ignore stalls.
"""


class PrefillScheduler:
    """Prefill of one request's prompt into its row, for target and drafter."""

    def __init__(
        self,
        target: CausalModel,
        cache: StaticKVCache,
        *,
        recompute_decoded_kv: bool,
        prefill_chunk: int | None,
        offloaded: bool = False,
    ) -> None:
        """Build a scheduler; arguments as for `Engine`.

        If `offloaded`, a pass takes the same time for many tokens as for few, so chunks are large.

        Raises ValueError for a `prefill_chunk` that the target does not support.
        """
        self._target, self._cache = target, cache
        self._in_pieces = recompute_decoded_kv or reads_in_pieces(cache)
        if self._in_pieces and prefill_chunk not in (None, CHUNK):
            raise ValueError(
                f"prefill_chunk is {prefill_chunk}, and this target reads prompts in pieces of {CHUNK}; leave it out"
            )
        self._max_chunk = LONG_CHUNK if offloaded else CHUNK
        self._prefill_chunk = prefill_chunk or (LONG_CHUNK if offloaded else None)
        self.request: Request | None = None
        """Request whose prompt is being prefilled."""
        self._round_s: deque[float] = deque(maxlen=NUM_TIMES)
        self._token_s: deque[float] = deque(maxlen=NUM_TIMES)

    def read(self, drafter: Drafter | None, *, others_wait: bool) -> Tensor | None:
        """Prefill a chunk for target and drafter, a small one if other requests await a round.

        Returns the logits [1, V] after the last token once the prompt is complete; `request` is None then.
        """
        request, cache = self.request, self._cache
        assert request is not None and request.row is not None
        prompt, row = request.prompt_ids, request.row
        if self._in_pieces:
            piece = next_padded_piece(self._target, cache, request.num_read, len(prompt))
        else:
            max_chunk = (self._prefill_chunk or self._prefill_budget()) if others_wait else self._max_chunk
            max_chunk = min(max_chunk, MAX_CHUNK) if request.params.prompt_logprobs else max_chunk
            piece = next_piece(self._target, cache, request.num_read, len(prompt), max_chunk)
        started = time.perf_counter()
        if request.params.prompt_logprobs:
            logits_RV = read_piece(self._target, cache, row, prompt, piece, piece.end - request.num_read)
            record_prompt_logprobs(request, logits_RV)
            logits_1V = logits_RV[-1:]
        # In pieces, a row's bits depend on how many rows are read together, so the logits that the answer starts from
        # are computed as without prompt_logprobs.
        if self._in_pieces or not request.params.prompt_logprobs:
            logits_1V = read_piece(self._target, cache, row, prompt, piece)
        cache.cached_ids[row] += prompt[request.num_read : piece.end]
        cache.num_prefilled[row] = whole_chunks(piece.end)
        request.num_read = piece.end
        if drafter is not None:
            drafter.read(row, prompt[: piece.end])
        if piece.size >= MIN_PIECE:
            self._token_s.append((time.perf_counter() - started) / piece.size)
        if piece.end < len(prompt):
            cache.park(row, row + 1)  # rounds of other requests run before the next chunk
            return None
        self.request = None
        return logits_1V

    def record_round_time(self, round_s: float) -> None:
        """Count the seconds of a plain round."""
        self._round_s.append(round_s)

    def _prefill_budget(self) -> int:
        """Return the tokens of a chunk that delays other rounds by little."""
        if not self._token_s or not self._round_s:
            return MIN_PIECE
        return min(CHUNK, max(MIN_PIECE, int(MAX_STALL * median(self._round_s) / median(self._token_s))))


def record_prompt_logprobs(request: Request, logits_RV: Tensor) -> None:
    """Append log-probabilities of the prompt's next tokens, from the logits before them."""
    found, top = request.prompt_logprobs, request.prompt_top_logprobs
    assert found is not None
    for logits_1RV in logits_RV[None].split(ROWS_AT_ONCE, 1):
        begin = 1 + len(found)
        tokens_1R = torch.tensor([request.prompt_ids[begin : begin + logits_1RV.shape[1]]], device=logits_RV.device)
        logits_1RV = logits_1RV[:, : tokens_1R.shape[1]]
        num_tokens = tokens_1R.shape[1]
        if not num_tokens:
            return
        num_finite = int(count_finite(logits_1RV, None, torch.tensor([num_tokens], device=logits_RV.device)))
        if num_finite < num_tokens:
            request.bad_position = request.bad_position or begin + num_finite
        found += sampling.logprobs_of(logits_1RV, tokens_1R)[0].tolist()
        if top is not None:
            parts = sampling.top_logprobs_of(logits_1RV, request.params.top_logprobs)
            top += [list(zip(*row, strict=True)) for row in zip(*(part[0].tolist() for part in parts), strict=True)]
