"""Admission of requests: the queue, batch rows, and the prompt in prefill.

A request waits, gets a row, is prefilled (`prefill_scheduler.py` reads its prompt in chunks, for target and drafter)
and is decoded from then on. Requests that have rows at the same time have one mode: a waiting request of another mode,
and all after it, wait until the rows are free. KV of released rows stays until another request gets the row: a prompt
that begins like the text of any row starts with a copy of that KV.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

from sharesd import sampling
from sharesd.drafters.base import Drafter
from sharesd.engine.loaded_mode import LoadedMode
from sharesd.engine.options import EngineOptions
from sharesd.engine.prefill_scheduler import PrefillScheduler
from sharesd.engine.request import Caller, Request
from sharesd.engine.row_allocator import RowAllocator
from sharesd.engine.stats import Stats
from sharesd.engine.stop_checker import StopChecker
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.sampling import RowSampling
from sharesd.sampling.constraints import Constraint, Grammars, MinTokens
from sharesd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sharesd.models.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class Scheduler:
    """Requests of one engine, waiting or with a batch row."""

    def __init__(
        self,
        target: CausalModel,
        tokenizer: Tokenizer,
        cache: StaticKVCache,
        mode: LoadedMode,
        row_sampling: RowSampling,
        *,
        options: EngineOptions,
        span: Callable[[Sequence[int]], tuple[int, int]],
    ) -> None:
        """Raise ValueError for a `prefill_chunk` that the target does not support."""
        self._target, self._tokenizer, self._options = target, tokenizer, options
        self._sampling = row_sampling
        self.active_mode = mode
        """The mode of the requests that have rows: drafter, rounds and policies."""
        self.waiting: deque[Request] = deque()
        self.rows = RowAllocator(
            cache,
            recompute_decoded_kv=options.recompute_decoded_kv,
            span=span,
            prompt_cache=options.prompt_cache,
        )
        self.prefill = PrefillScheduler(
            target,
            cache,
            recompute_decoded_kv=options.recompute_decoded_kv,
            prefill_chunk=options.prefill_chunk,
            offloaded=options.is_offloaded,
        )
        self.grammars = Grammars(tokenizer, vocab_size=target.vocab_size, eos_ids=self._eos_ids())
        self.num_changes = 0
        """Incremented when the batch changes: its rows, their parameters, or which requests are being decoded."""

    @property
    def drafter(self) -> Drafter | None:
        """Drafter of the active mode."""
        return self.active_mode.drafter

    @property
    def requests(self) -> list[Request]:
        return [*self.waiting, *(request for request in self.rows.requests if request is not None)]

    @property
    def live(self) -> list[Request]:
        """Requests that are being decoded, in row order."""
        reading = self.prefill.request
        return [request for request in self.rows.requests if request is not None and request is not reading]

    @property
    def only_call(self) -> Caller | None:
        """The call of all requests that have a row and of the next one; None if they are of several, or of none."""
        found = [request.call for request in (*filter(None, self.rows.requests), *islice(self.waiting, 1))]
        return found[0] if found and all(call is found[0] for call in found) else None

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.rows.used)

    @property
    def can_prefill(self) -> bool:
        """A prompt is in prefill, or the next one gets a row."""
        if self.prefill.request is not None:
            return True
        if not self.waiting:
            return False
        return not self.rows.used or (bool(self.rows.free) and self.waiting[0].mode == self.active_mode.name)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return token ids; raise ValueError if empty, too long or unknown."""
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ValueError("a prompt is empty; give at least one token")
        if len(ids) >= self._options.max_context:
            raise ValueError(
                f"a prompt has {len(ids)} tokens and the context holds {self._options.max_context}, which leaves no "
                "room for an answer; shorten it or raise max_context"
            )
        wrong = next((i for i in ids if not 0 <= i < self._target.vocab_size), None)
        if wrong is not None:
            size = self._target.vocab_size
            raise ValueError(f"token id {wrong} is outside the vocabulary of {size}; give 0 to {size - 1}")
        return ids

    def check_params(self, params: SamplingParams, drafter: Drafter | None) -> None:
        """Raise ValueError for parameters that this engine does not support with a drafter."""
        sampling.check_tokens(params, self._target.vocab_size)
        if params.grammar is not None:
            self.grammars.matcher(params.grammar)
        shapes = drafter.shapes if drafter and self._options.require_trees else ()
        if params.acceptance != "match" and any(shape.is_tree for shape in shapes):
            raise ValueError(f"acceptance {params.acceptance} supports chains only; use match, or no draft trees")

    def check_alike(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters with which requests here cannot be decoded together."""
        # Checking one is enough: all requests here suit it.
        other = next(chain(filter(None, self.rows.requests), self.waiting), None)
        sampling.check_alike([params, *([] if other is None else [other.params])])

    def add(
        self,
        ids: list[int],
        params: SamplingParams,
        index: int,
        stats: Stats,
        *,
        mode: str,
        reuse: bool = True,
        call: Caller | None = None,
    ) -> Request:
        """Append a new request to the queue.

        Takes arguments of `Request`.
        """
        room = self._options.max_context - len(ids)
        checker = StopChecker(self._tokenizer, params, eos_ids=self._eos_ids(), room=room)
        matcher: Constraint | None = None if params.grammar is None else self.grammars.matcher(params.grammar)
        if params.min_new_tokens:
            matcher = MinTokens(params.min_new_tokens, checker.end_ids, matcher)
        reuse = reuse and not params.prompt_logprobs
        request = Request(ids, params, index, checker, stats, mode=mode, matcher=matcher, reuse=reuse, call=call)
        stats.accept_lengths.append([])
        stats.prompt_tokens = len(ids)
        self.waiting.append(request)
        return request

    def _eos_ids(self) -> tuple[int, ...]:
        return *self._target.eos_ids, *self._tokenizer.eos_ids

    def admit(self) -> Request:
        """Give the next waiting request a row, and begin its prefill."""
        request = self.waiting.popleft()
        row = self.rows.allocate(request)
        self.prefill.request = request
        self._sampling.assign(row, request.params, request.index, request.prompt_ids)
        self.num_changes += 1
        if self.drafter is not None:
            self.drafter.begin(row, request.prompt_ids, request.reuse)
        return request

    def cancel(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        elif request.row is not None and self.rows.requests[request.row] is request:
            self.release(request)
        elif request.finish_reason is None:
            return
        request.cancelled = request.finish_reason is None

    def release(self, request: Request) -> None:
        """Free a request's row and park it."""
        assert request.row is not None
        row = request.row
        self._sampling.release(row)
        self.rows.release(request)
        for cache in self.active_mode.caches:
            cache.park(row, row + 1)
        if self.prefill.request is request:
            self.prefill.request = None
        self.num_changes += 1

    def discard_kv(self, row: int) -> None:
        """Drop a row's tokens and KV, which later prompts must not reuse."""
        for cache in self.active_mode.caches:
            cache.discard_row(row)

    def activate(self, mode: LoadedMode) -> None:
        """Switch to a mode; no request may have a row."""
        self.active_mode = mode
        self.num_changes += 1
        for cache in mode.caches:
            cache.release_rows()


def powers_of_two(batch: int) -> list[int]:
    """Return 1, 2, 4 ... below `batch`, and `batch`."""
    return [*(2**i for i in range(batch.bit_length()) if 2**i < batch), batch]
