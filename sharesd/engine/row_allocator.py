"""Allocation of batch rows to requests, with reuse of cached prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sharesd.engine.prompt_cache import PromptCache
from sharesd.engine.request import Request
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.prefill import whole_chunks


def powers_of_two(batch: int) -> list[int]:
    """Return 1, 2, 4 ... below `batch`, and `batch`."""
    return [*(2**i for i in range(batch.bit_length()) if 2**i < batch), batch]


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
        self._last_used = [0] * cache.batch  # when a row was taken last
        self._num_allocated = 0

    @property
    def free(self) -> list[int]:
        return [row for row, request in enumerate(self.requests) if request is None]

    @property
    def used(self) -> list[int]:
        return [row for row, request in enumerate(self.requests) if request is not None]

    def allocate(self, request: Request) -> int:
        """Return a free row with KV of the longest shared prompt prefix."""
        cache, free = self._cache, self.free
        usable = self._usable(request)
        source = oldest = min(free, key=lambda row: self._last_used[row])
        if any(usable):
            source = max(
                range(cache.batch), key=lambda row: (usable[row], self.requests[row] is None, -self._last_used[row])
            )
        content = oldest if source not in free else source
        used = self.used
        row = min(free, key=lambda row: (self._size([*used, row]), row != content))
        if row != content:
            cache.swap_rows(row, content)
            self._last_used[row], self._last_used[content] = self._last_used[content], self._last_used[row]
            source = row if source == content else source
            usable[row], usable[content] = usable[content], usable[row]
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
        """Save the latest unsaved text of released rows; False: there is none."""
        if self._prompt_cache is None:
            return False
        rows = sorted(self.free, key=lambda row: -self._last_used[row])
        return any(self._prompt_cache.save(row) for row in rows)

    def clear(self) -> None:
        for row in self.used:
            self.release(self.requests[row])  # type: ignore[arg-type]

    def _size(self, rows: Sequence[int]) -> int:
        first, end = self.span(rows)
        return end - first

    def _usable(self, request: Request) -> list[int]:
        """Return the reusable prompt tokens of each row, never the last one."""
        if not request.reuse:
            return [0] * self._cache.batch
        max_shared = len(request.prompt_ids) - 1
        usable = [min(shared, max_shared) for shared in self._cache.shared_prefix_lengths(request.prompt_ids)]
        if self._recompute_decoded_kv:
            return [whole_chunks(min(pair)) for pair in zip(usable, self._cache.num_prefilled, strict=True)]
        return usable
