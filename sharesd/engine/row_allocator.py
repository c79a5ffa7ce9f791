"""Batch rows of an engine: which request has which, and KV of ended requests that a new prompt reuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sharesd.engine.request import Request
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.prefill import CHUNK, whole_chunks

if TYPE_CHECKING:
    from sharesd.records.prompt_cache import PromptCache


class RowAllocator:
    """Batch rows, with KV of released rows kept for shared prefixes."""

    def __init__(
        self,
        cache: StaticKVCache,
        *,
        recompute_decoded_kv: bool,
        span: Callable[[Sequence[int]], tuple[int, int]],
        prompt_cache: PromptCache | None = None,
    ) -> None:
        """`span`: first and end row of a round, which allocation keeps short."""
        self._prompt_cache = prompt_cache
        self._cache, self._recompute_decoded_kv, self.span = cache, recompute_decoded_kv, span
        self.requests: list[Request | None] = [None] * cache.batch
        self._last_used = [0] * cache.batch  # allocation count at which each row was last given to a request
        self._num_allocated = 0

    @property
    def free(self) -> list[int]:
        return [row for row, request in enumerate(self.requests) if request is None]

    @property
    def used(self) -> list[int]:
        return [row for row, request in enumerate(self.requests) if request is not None]

    def allocate(self, request: Request) -> int:
        """Return a free row with KV of the longest shared prompt prefix."""
        # source: the row with the most KV of this prompt, perhaps in use. victim: the free row whose KV is given up,
        # which is `source` if that is free. row: the free row that keeps rounds short; if it is another than the
        # victim, both swap their contents, so that what `row` held is kept.
        cache, free = self._cache, self.free
        usable = self._usable(request)
        source = oldest = min(free, key=lambda row: self._last_used[row])
        if any(usable):
            source = max(
                range(cache.batch), key=lambda row: (usable[row], self.requests[row] is None, -self._last_used[row])
            )
        victim = oldest if source not in free else source
        ends = self.used[:: max(len(self.used) - 1, 1)]  # the first and last used row; a round spans all between
        row = min(free, key=lambda row: (self._size([*ends, row]), row != victim))
        if row != victim:
            cache.swap_rows(row, victim)
            self._last_used[row], self._last_used[victim] = self._last_used[victim], self._last_used[row]
            source = row if source == victim else source
            usable[row], usable[victim] = usable[victim], usable[row]
        kept = usable[source]
        cache.begin_row(row, request.prompt_ids[:kept], source, whole_chunks(kept) if self._recompute_decoded_kv else 0)
        if self._prompt_cache is not None and request.reuse:
            kept = self._prompt_cache.restore(row, request.prompt_ids, kept)
        self._num_allocated += 1
        self._last_used[row] = self._num_allocated
        self.requests[row] = request
        request.row, request.num_read, request.cached_tokens = row, kept, kept
        return row

    def release(self, request: Request) -> None:
        assert request.row is not None
        self.requests[request.row] = None
        request.row = None

    def save_text(self) -> bool:
        """Save the latest unsaved text of released rows; return False if there is none."""
        if self._prompt_cache is None:
            return False
        rows = sorted(self.free, key=lambda row: -self._last_used[row])
        return any(self._prompt_cache.save(row) for row in rows)

    def _size(self, rows: Sequence[int]) -> int:
        first, end = self.span(rows)
        return end - first

    def _usable(self, request: Request) -> list[int]:
        """Return the reusable prompt tokens of each row.

        The last token is always read again, for its logits. With `recompute_decoded_kv` only KV that whole prefill
        chunks wrote is reused: that of verify steps may differ in the last bits.
        """
        if not request.reuse:
            return [0] * self._cache.batch
        before_last = request.prompt_ids[:-1]
        if self._recompute_decoded_kv:
            usable = self._cache.shared_prefix_lengths(before_last, multiple_of=CHUNK)
            return [whole_chunks(min(pair)) for pair in zip(usable, self._cache.num_prefilled, strict=True)]
        return self._cache.shared_prefix_lengths(before_last)
