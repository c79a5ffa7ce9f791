"""The engine: requests join, are prefilled and decoded together, and leave.

A round is draft, verify, accept, commit. The host waits for the device once, to read its result; a prompt's first token
and grammars wait, too. Each request has a row of the KV cache. A round serves all rows that are being decoded; between
two rounds a piece of one prompt may be read. The prompt's last logits give the first token, which is the root of the
row's first round. Each round emits one token or more per row, the last of which is the next root.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compile.device_timer import Clock
from sharesd.devices.selection import use
from sharesd.drafters.base import Drafter
from sharesd.engine.decode_round import BatchState
from sharesd.engine.loaded_mode import DecodeVariant, LoadedMode
from sharesd.engine.options import EngineOptions
from sharesd.engine.output_processor import OutputProcessor, sample_first
from sharesd.engine.outputs import TokenChunk
from sharesd.engine.request import Caller, Request
from sharesd.engine.round_launcher import InFlightRound, RoundLauncher
from sharesd.engine.scheduler import Prompt, Scheduler, powers_of_two
from sharesd.engine.stats import Stats
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.sampling import RowSampling, SamplingKind
from sharesd.sampling.constraints import Grammars
from sharesd.sampling.sampler import Sampler
from sharesd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sharesd.models.tokenizer import Tokenizer
    from sharesd.records.trace_file import TraceFile

__all__ = ["Engine", "Prompt"]


class Engine:
    """Decodes requests with one target, in modes that differ by their drafter. Not thread-safe.

    Requests of one mode are decoded together; those of another mode wait until they have finished. `mode` of methods: a
    name in `modes`; None = the attribute of that name.
    """

    def __init__(
        self,
        *,
        target: CausalModel,
        tokenizer: Tokenizer,
        cache: StaticKVCache,
        drafters: Mapping[str, Drafter | None],
        options: EngineOptions,
    ) -> None:
        """Build an engine on a `cache` with one row per concurrent request.

        `drafters`: by mode; None decodes plainly.
        """
        self.target, self.tokenizer, self.cache, self.options = target, tokenizer, cache, options
        self.max_context, self.graphs, self.offloaded = options.max_context, options.graphs, options.is_offloaded
        self._device = cache.lengths.device
        on_gpu = self._device.type == "cuda"
        self._clock = Clock(self._device)
        zeros_B = torch.zeros_like(cache.lengths)
        self.state = BatchState(zeros_B, zeros_B.clone(), zeros_B.bool())
        self.sampling = RowSampling(
            batch=cache.batch, vocab_size=target.vocab_size, device=self._device, replayed=options.graphs is not None
        )
        self.trims_idle_rows = (
            not on_gpu and options.graphs is None and options.widths is None and not target.step_widths
        )
        """True if a round covers the rows from the first to the last in use. Steps of fixed widths have all rows."""
        buckets = options.buckets or (self.trims_idle_rows and not self.offloaded)
        self.batch_sizes = powers_of_two(cache.batch) if buckets else [cache.batch]
        """Numbers of rows that have separate costs and captured graphs."""
        self.modes = {
            mode: LoadedMode(mode, target, cache, drafter, self.sampling, self.state, self._clock, options=options)
            for mode, drafter in drafters.items()
        }
        """Drafter of each mode, and for each kind of sampling its rounds and draft policy: a `DecodeVariant`.

        Kinds differ in what follows the logits, such as greedy, sampled or penalized; a CUDA graph is captured for one
        of them.
        """
        if options.buckets:
            for each in {cache for loaded in self.modes.values() for cache in loaded.caches}:
                # Negative, so that kernels skip the row, even after a round in flight has added to it.
                each.parked_length = options.max_context - each.slots
        self.mode, first_mode = next(iter(self.modes.items()))
        """Mode of calls without one; the first, until it is set."""
        self._scheduler = Scheduler(
            target, tokenizer, cache, first_mode, self.sampling, options=options, span=self._span
        )
        self._launcher = RoundLauncher(
            cache,
            self._scheduler,
            self.state,
            self._clock,
            vocab_size=target.vocab_size,
            async_scheduling=options.async_scheduling,
        )
        self._outputs = OutputProcessor(cache, self._scheduler, self._clock, options)
        self._outputs.begin(_new_stats(first_mode.num_draft))
        self._in_flight: InFlightRound | None = None  # launched by the step before
        self.label: Mapping[str, Any] = {}
        """Fields of JSON types that are added to the trace of each request from now on."""

    def of_mode(self, mode: str | None) -> LoadedMode:
        """Return drafter, rounds and policies of a mode; ValueError if it is not loaded."""
        mode = self.mode if mode is None else mode
        if mode not in self.modes:
            raise ValueError(f"mode {mode!r} was not loaded; loaded are {', '.join(self.modes)}")
        return self.modes[mode]

    @property
    def trace(self) -> TraceFile | None:
        """File of all rounds; setting it takes effect with the next request."""
        return self._outputs.trace

    @trace.setter
    def trace(self, trace: TraceFile | None) -> None:
        self._outputs.trace, self._launcher.traces_all = trace, trace is not None

    @property
    def stats(self) -> Stats:
        """Counts since a request was added to the idle engine."""
        return self._outputs.stats

    @property
    def grammars(self) -> Grammars:
        return self._scheduler.grammars

    @property
    def num_running(self) -> int:
        return len(self._scheduler.rows.used)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def forget(self) -> None:
        """Drop KV that later prompts could reuse. Running requests keep theirs."""
        self.cache.forget()
        for loaded in self.modes.values():
            if loaded.drafter is not None:
                loaded.drafter.forget()

    @torch.inference_mode()
    def save_text(self) -> bool:
        """Save a finished text to disk; return False if none is left."""
        return self._scheduler.rows.save_text()

    def check(self, prompt: Prompt, params: SamplingParams, mode: str | None = None) -> list[int]:
        """Return prompt token ids; raise ValueError if `add` would reject the prompt."""
        ids = self._scheduler.tokenize(prompt)
        self._scheduler.check_params(params, self.of_mode(mode).drafter)
        return ids

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        index: int = 0,
        *,
        mode: str | None = None,
        reuse: bool = True,
        call: Caller | None = None,
    ) -> Request:
        """Append a request to the queue; `step` decodes it.

        Args:
            index: number of this prompt in its call, or of this choice in its request; each number has its own noise.
            reuse: do not recompute KV of the longest prefix that the prompt shares with a row.
            call: who waits for all of its requests. While no others run, rounds start after all
                prompts have been read, and the drafts of the last requests suit those with the most tokens left.
                None: requests of several callers, none of whom should wait long.

        Raises ValueError for an unsupported prompt or parameters.
        """
        params, scheduler, loaded = params or SamplingParams(), self._scheduler, self.of_mode(mode)
        ids = self.check(prompt, params, mode)
        scheduler.check_alike(params)
        if not scheduler.is_busy:
            self._begin(loaded)
        stats = _new_stats(loaded.num_draft)
        request = scheduler.add(ids, params, index, stats, mode=loaded.name, reuse=reuse, call=call)
        request.label = self.label
        self.stats.prompt_tokens += len(ids)
        return request

    def step(self) -> list[TokenChunk]:
        """Read a piece of a prompt, if one waits; then run a round over the requests that are being decoded.

        Returns the new tokens. There is no round if this step read a piece of a prompt and nothing else is being
        decoded, or if the only caller waits for further prompts to be read. With async scheduling the next round has
        been launched, too, when this returns. Any error cancels all requests: the device may be ahead of the tokens
        that were returned.
        """
        scheduler = self._scheduler
        if not scheduler.is_busy:
            return []
        use(self._device)
        try:
            reads, others_wait = scheduler.can_prefill, bool(scheduler.live) and scheduler.only_call is None
            self._launcher.prefilled = reads
            chunks = self._read_prompt(others_wait) if reads else []
            return [*chunks, *self._round()] if others_wait or not reads else chunks
        except BaseException:
            self.cancel_all()
            raise

    def cancel_all(self) -> None:
        """Cancel all requests and drop launched rounds."""
        for request in self._scheduler.requests:
            self.cancel(request)
        self._in_flight = None

    def cancel(self, request: Request) -> None:
        """End the request without a finish reason; free its row at once."""
        self._scheduler.cancel(request)

    def _begin(self, loaded: LoadedMode) -> None:
        """Start new counts; no request has a row."""
        self._in_flight = None
        self._launcher.reset()
        self._scheduler.activate(self._scheduler.active_mode)
        self._outputs.begin(_new_stats(loaded.num_draft))

    @torch.inference_mode()
    def _read_prompt(self, others_wait: bool) -> list[TokenChunk]:
        """Read a piece of a prompt; return the first token if it was the prompt's last piece."""
        started, scheduler, prefill = time.perf_counter(), self._scheduler, self._scheduler.prefill
        request = prefill.request or self._admit()
        # The target reads a piece as it reads a draft: KV goes to the slots from the row's length on, which then moves.
        logits_1V = prefill.read(scheduler.drafter, others_wait=others_wait)
        chunks: list[TokenChunk] = []
        if logits_1V is not None:
            scheduler.num_changes += 1  # its request is decoded from now on
            chunks.append(self._first_token(request, logits_1V))
        self._outputs.last_ended = time.perf_counter()
        for stats in (self.stats, request.stats):
            stats.prefill_s += self._outputs.last_ended - started
        if chunks and self.trace is not None:
            self.trace.add(request.trace_line(chunks[0].token_ids))
        self._outputs.record_transfers()
        return chunks

    def _admit(self) -> Request:
        """Give the next request a row; tell the policy that a new text begins, if nothing is being decoded."""
        scheduler = self._scheduler
        loaded = self.modes[scheduler.waiting[0].mode]
        if loaded is not scheduler.active_mode:
            self._in_flight = None
            self._launcher.reset()
            scheduler.activate(loaded)
        request = scheduler.admit()
        assert request.row is not None
        if not scheduler.live:
            loaded.of_rows([request.row]).policy.begin()
        return request

    def _first_token(self, request: Request, logits_1V: Tensor) -> TokenChunk:
        """Sample the token after a prompt, which becomes the row's root."""
        row = request.row
        assert row is not None
        sampler = Sampler(self.sampling.kind([row]), self.sampling.span(row, row + 1), gumbel=self.options.gumbel)
        length_1, root_1 = (part[row : row + 1] for part in (self.cache.lengths, self.state.root_B))
        return self._outputs.emit(request, sample_first(request, sampler, logits_1V, length_1, root_1))

    @torch.inference_mode()
    def _round(self) -> list[TokenChunk]:
        """Run a round; with async scheduling, launch the next one early."""
        # On a GPU the device must not idle while the host works, so the next round is launched before this one is read.
        # Its root and lengths are on the device already; only drafters that need the tokens on the host must wait.
        in_flight, self._in_flight = self._in_flight or self._launcher.launch(), None
        if self.options.async_scheduling:  # None if this round must be read first; `_launch_after_read` then launches
            self._in_flight = self._launcher.launch(in_flight)
        return [] if in_flight is None else self._outputs.collect(in_flight, self._launch_after_read)

    def _launch_after_read(self) -> bool:
        """Launch the next round, if it is not launched yet and scheduling is asynchronous; return True if it did.

        A round that was launched before gets late nodes.
        """
        if self._in_flight is not None:
            self._in_flight = self._launcher.add_late_nodes(self._in_flight)
        elif self.options.async_scheduling:
            self._in_flight = self._launcher.launch()
            return True
        return False

    def _span(self, rows: Sequence[int]) -> tuple[int, int]:
        """Return the first row, and the row after the last, of a round over these rows."""
        if self.trims_idle_rows:
            return min(rows), max(rows) + 1
        return 0, next(size for size in self.batch_sizes if size > max(rows))

    def deactivate_rows(self) -> None:
        """Take all rows out of rounds until the next `step`."""
        self.state.active_B.zero_()
        self.state.drafts_B.fill_(True)
        self._launcher.invalidate()

    def variant(self, params: SamplingParams, mode: str | None = None) -> DecodeVariant:
        """Return rounds and policy for requests with these parameters."""
        loaded = self.of_mode(mode)
        self._scheduler.check_params(params, loaded.drafter)
        kind = SamplingKind.of(params)
        return loaded.of(kind.rounded() if self.sampling.replayed else kind)


def _new_stats(num_draft: int) -> Stats:
    return Stats(num_draft, accepted_at=[0] * num_draft, reached_at=[0] * num_draft)
