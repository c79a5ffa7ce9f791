"""Which request has which row of the cache, and what a new one finds there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sharesd.engine.request import Request
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.prefill import whole_chunks


def doubling(batch: int) -> list[int]:
    """1, 2, 4 ... rows, and all."""
    return [*(2**i for i in range(batch.bit_length()) if 2**i < batch), batch]


class Slots:
    """Rows are slots that requests come and go in. What a row held stays, for prompts that begin alike."""

    def __init__(
        self,
        cache: StaticKVCache,
        *,
        reread: bool,
        span: Callable[[Sequence[int]], tuple[int, int]],
    ) -> None:
        """`reread`: only what chunks of prompts wrote has the bits that a prompt would write. `span`: the rows that a
        round over these runs over, which shall be few.
        """
        self._cache, self._reread, self._span = cache, reread, span
        self.requests: list[Request | None] = [None] * cache.batch
        self._used = [0] * cache.batch  # when a row was taken last
        self._num_taken = 0

    @property
    def free(self) -> list[int]:
        """Rows that nobody has."""
        return [row for row, request in enumerate(self.requests) if request is None]

    @property
    def taken(self) -> list[int]:
        """The others."""
        return [row for row, request in enumerate(self.requests) if request is not None]

    def take(self, request: Request) -> int:
        """A free row for a request, with the KV of the longest beginning that its prompt shares with any row.

        A resting row's KV comes along, a live row's is copied, and what was used longest ago gives way.
        """
        cache, free = self._cache, self.free
        usable = self._usable(request)
        source = oldest = min(free, key=lambda row: self._used[row])
        if any(usable):
            source = max(
                range(cache.batch), key=lambda row: (usable[row], self.requests[row] is None, -self._used[row])
            )
        content = oldest if source not in free else source
        taken = self.taken
        row = min(free, key=lambda row: (self._size([*taken, row]), row != content))
        if row != content:
            cache.swap_rows(row, content)
            self._used[row], self._used[content] = self._used[content], self._used[row]
            source = row if source == content else source
            usable[row], usable[content] = usable[content], usable[row]
        kept = usable[source]
        cache.begin_row(row, request.prompt_ids[:kept], source, whole_chunks(kept) if self._reread else 0)
        self._num_taken += 1
        self._used[row] = self._num_taken
        self.requests[row] = request
        request.slot, request.num_read, request.cached_tokens = row, kept, kept
        return row

    def release(self, request: Request) -> None:
        """The row is free again, and rests."""
        assert request.slot is not None
        self.requests[request.slot] = None
        request.slot = None

    def clear(self) -> None:
        """Nobody has any row."""
        for row in self.taken:
            self.release(self.requests[row])  # type: ignore[arg-type]

    def _size(self, rows: Sequence[int]) -> int:
        first, end = self._span(rows)
        return end - first

    def _usable(self, request: Request) -> list[int]:
        """Of each row, how many tokens need not be read anew; the last one of a prompt always is."""
        if not request.reuse:
            return [0] * self._cache.batch
        most = len(request.prompt_ids) - 1
        usable = [min(shared, most) for shared in self._cache.shared(request.prompt_ids)]
        if self._reread:
            return [whole_chunks(min(pair)) for pair in zip(usable, self._cache.settled, strict=True)]
        return usable
