"""The loop: requests join, are read and decoded together, and leave. A round: draft, verify, accept, commit; one host
synchronisation.

KV invariant: slots below a row's length hold the target's KV of every emitted token but the last one, the root.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from compile.adaptive_threads import CREW
from compile.cuda_graphs import Graphs
from compile.device_timer import Clock, Mark
from offload.prefetcher import Traffic
from sharesd import sampling
from sharesd.config import SamplingParams
from sharesd.devices.host_buffers import write
from sharesd.devices.selection import use
from sharesd.drafters.base import Drafter
from sharesd.engine.decode_round import Masks, Meanwhile, Round, RoundResult, RowState
from sharesd.engine.decode_variant import Drafts, Way
from sharesd.engine.grammar_mask import allowed
from sharesd.engine.outputs import Completion, Source, TokenChunk
from sharesd.engine.prefill_scheduler import Reader
from sharesd.engine.request import QueueFull, Request, advance, awaited, bearable
from sharesd.engine.row_allocator import Slots, doubling
from sharesd.engine.stats import Stats
from sharesd.engine.stop_checker import StopChecker
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.models.tokenizer import Tokenizer
from sharesd.sampling import Kind, RowSampling
from sharesd.sampling.grammar import Grammars
from sharesd.sampling.sampler import Sampler
from sharesd.speculation.draft_policy import Asked
from sharesd.speculation.draft_tree import PLAIN, DraftTree, Shape, on_host

Prompt = str | Sequence[int]
MOST_WAYS = 24
"""Kinds of rounds whose graphs and policies are kept; the one that was used longest ago goes first."""


class _Batch(NamedTuple):
    """Requests that are decoded together, the same in all rounds until one joins or leaves."""

    live: list[Request]
    texts: dict[int, list[int]]
    """By row; they grow with the requests."""
    plain: list[int]
    """Rows that take no drafts."""
    constrained: bool
    """True where any has a grammar."""
    first: int
    """The row of the first line of results."""
    end: int
    way: Way
    round: Round


class _Flight(NamedTuple):
    """A round that was launched."""

    batch: _Batch
    awaited: list[Request]
    alone: bool
    """Whether all of them are prompts of one call, with nothing behind them."""
    place: tuple[float, int, int]
    """Arguments of `LiveCosts.at`."""
    tree: DraftTree
    asked: Asked
    result: RoundResult
    marks: list[Mark]
    started: float


class Engine:
    """Decodes prompts with one target and at most one drafter. Only one thread may use it at a time."""

    def __init__(
        self,
        *,
        target: CausalModel,
        tokenizer: Tokenizer,
        cache: StaticKVCache,
        drafter: Drafter | None,
        max_context: int,
        auto_length: bool = False,
        widths: Sequence[int] | None = None,
        reread: bool = False,
        graphs: Graphs | None = None,
        buckets: bool = False,
        gumbel: Callable[..., Tensor] = sampling.gumbel,
        max_queue: int | None = None,
        prefill_chunk: int | None = None,
        ahead: bool = False,
        traffic: Callable[[], Traffic] | None = None,
        meanwhile: Meanwhile | None = None,
        ended: Callable[[Stats], None] | None = None,
        trees_asked: bool = True,
    ) -> None:
        """`cache` has a row per request decoded together; its slots must hold `max_context` and two verify steps
        (rows that have ended rest there, and others' rounds compute them too), with `ahead` three.

        `auto_length` leaves the shape of each draft to a policy; else it is the drafter's largest.
        `widths` are the numbers of tokens that a step may have (it is padded to the next), or None = any. It is a
        single one, the same in all modes, where the target does not give a row the same bits at any width. `reread`:
        prompts have bits of their own, which depend on how they are cut; so they are cut in one way, and what steps
        wrote is read again rather than reused. `graphs` capture rounds, which are replayed then; with `buckets` for
        1, 2, 4 ... rows, and all: where the target gives a row the same bits whatever their number, and its kernels
        leave out rows of a length below 0. `gumbel` may be a compiled form.

        At most `max_queue` requests wait (None = any number). While others are decoded, at most `prefill_chunk` tokens
        of a prompt are read between two rounds (None = 512, and on a CPU as many as others hardly notice; any other
        number is for CPUs only).
        `ahead` launches each round before the last one is read; where its draft waits for the host, as soon as it is.
        `traffic` tells what weights that do not stay have moved so far: a pass of the target takes long then;
        `meanwhile` has drafts guess on in its waits. `ended`
        is told the counts of each request that has ended. `trees_asked`: requests that trees cannot serve are refused;
        they get chains otherwise.
        """
        self.target, self.tokenizer, self.cache, self.drafter = target, tokenizer, cache, drafter
        self.max_context, self.graphs, self.max_queue = max_context, graphs, max_queue
        self.auto_length, self.widths = auto_length and drafter is not None, sorted(widths) if widths else None
        self.offloaded = traffic is not None
        """Whether weights come through a slow link for each pass of the target."""
        self._ended, self._trees_asked = ended, trees_asked
        self._meanwhile = meanwhile
        self._traffic, self._traffic_before = traffic, traffic() if traffic else None
        self.stats = self._new_stats()
        """Counts of the last call of `generate` or `stream`, or of all steps since."""
        self.gumbel = gumbel
        self._device = cache.lengths.device
        self._on_gpu = self._device.type == "cuda"
        self._clock = Clock(self._device)
        none_B = torch.zeros_like(cache.lengths)
        self.state = RowState(none_B, none_B.clone(), none_B.bool())
        self.sampling = RowSampling(
            batch=cache.batch, vocab_size=target.vocab_size, device=self._device, replayed=graphs is not None
        )
        self._overlaps = ahead  # a round is launched as soon as the host knows what it must
        self.ahead = ahead and (drafter is None or drafter.ahead)
        """Whether rounds are launched before the last one is read."""
        self.partial = not self._on_gpu and graphs is None and widths is None and not target.step_widths
        """Whether a round runs over no more rows than it must: where nothing is made for one number of rows."""
        self.sizes = doubling(cache.batch) if buckets or (self.partial and not self.offloaded) else [cache.batch]
        """Numbers of rows, up to which rounds have costs of their own; and where they are captured, graphs."""
        model = getattr(drafter, "model_drafter", drafter)
        self.caches: list[StaticKVCache] = list(dict.fromkeys([cache, getattr(model, "cache", cache)]))
        """The target's, and that of a model drafter."""
        if buckets:
            for each in self.caches:
                each.parked = max_context - each.slots  # counted from the end, no text has such slots
        self._reader = Reader(
            target, cache, drafter, reread=reread, prefill_chunk=prefill_chunk, offloaded=self.offloaded
        )
        self._has_read = False  # in this step
        self._ways: dict[Kind, Way] = {}
        self._drafts: Drafts = {}
        self._slots = Slots(cache, reread=reread, span=self._span)
        self.grammars = Grammars(tokenizer, vocab_size=target.vocab_size, eos_ids=(*target.eos_ids, *tokenizer.eos_ids))
        self._waiting: deque[Request] = deque()
        self._turn: object | None = None
        self._flight: _Flight | None = None  # launched ahead
        self._batch: _Batch | None = None  # None: somebody has joined or left
        self._num_idle = 0  # rounds since the drafter took part
        self._shape: Shape | None = None  # of a draft that could not be launched ahead
        self._since = 0.0  # when the last round was collected, or the last piece of a prompt read

    @property
    def mode(self) -> str:
        """Name of the drafter, or `naive`."""
        return self.drafter.name if self.drafter else "naive"

    @property
    def num_draft(self) -> int:
        """Draft tokens per round at most."""
        return max(shape.nodes for shape in self.drafter.shapes) if self.drafter else 0

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._slots.taken)

    @property
    def num_waiting(self) -> int:
        """Requests that have none yet."""
        return len(self._waiting)

    def forget(self) -> None:
        """Drop what later prompts could reuse. Requests that run keep what they have."""
        self.cache.forget()
        if self.drafter is not None:
            self.drafter.forget()

    def add(self, prompt: Prompt, params: SamplingParams | None = None, index: int = 0) -> Request:
        """A new request (a text, or token ids), which `step` decodes. `index` is its number among the prompts of one
        call, or choices of one request, each of which has noise of its own (`sharesd.sampling.seeds_of_prompts`).

        Raises ValueError for an empty prompt, one longer than the context, ids outside the vocabulary, and parameters
        that cannot be honoured; QueueFull (a ValueError) if too many wait.
        """
        params = params or SamplingParams()
        num_ahead = len(self._waiting) - len(self._slots.free) + 1
        if self.max_queue is not None and num_ahead > self.max_queue:
            raise QueueFull(f"{len(self._waiting)} requests wait and the queue holds {self.max_queue}; try again later")
        ids = self.check(prompt, params)
        sampling.check_alike([params, *(request.params for request in self._requests)])
        if all(request.call is not None for request in self._requests):
            self._take_cache()
        self._check_turn()
        return self._enqueue(ids, params, index)

    def step(self) -> list[TokenChunk]:
        """A piece of one prompt, if one is to be read, and a round of the requests that are being decoded; pieces are
        large where there are none. [] where nothing has come out.

        Raises RuntimeError if another engine has used the cache meanwhile. Whatever else is raised on the way cancels
        all requests: the device may be ahead of what was told.
        """
        if not self._busy:
            return []
        self._check_turn()
        use(self._device)
        try:
            others = bool(self._live)
            chunks = self._read(whole=False)
            return [*chunks, *self._round()] if others or not chunks else chunks  # first tokens go out at once
        except BaseException:
            self.cancel_all()
            raise

    def cancel_all(self) -> None:
        """All requests end where they are; what was launched for them is forgotten."""
        for request in self._requests:
            self.cancel(request)
        self._reader.request, self._flight = None, None

    def cancel(self, request: Request) -> None:
        """The request ends where it is, without a reason, and no chunk of it follows. Its row is free at once."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request.slot is not None and self._slots.requests[request.slot] is request:
            self._release(request)
        elif request.finish_reason is None:
            return
        request.cancelled = request.finish_reason is None

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None = None, *, reuse: bool = False
    ) -> list[Completion]:
        """`stream`, collected: one Completion per prompt."""
        done = [Completion() for _ in prompts]
        for chunk in self.stream(prompts, sampling, reuse=reuse):
            done[chunk.row].add(chunk)
        return done

    def stream(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None = None, *, reuse: bool = False
    ) -> Generator[TokenChunk, None, None]:
        """Decode prompts (texts or token ids), as many together as the cache has rows; yields chunks as they come.

        `reuse`: the KV of the longest beginning that a prompt shares with what a row holds (chat turns) is not read
        anew, in whichever mode it was written. Each prompt has noise of its own, by its place in the call. Ends calls
        before it that are not used up. Raises ValueError as `add`; RuntimeError while requests of `add` run, and if it
        is asked to go on after another call has used the cache.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is one string; give a list of prompts")
        params = sampling or SamplingParams()
        rows = [self._encode(prompt) for prompt in prompts]
        self._check(params)
        if any(request.call is None for request in self._requests):
            raise RuntimeError("requests that were added are being decoded; end or cancel them before this call")
        self._take_cache()
        use(self._device)
        turn = self._turn
        self.stats, self._traffic_before = self._new_stats(), self._traffic() if self._traffic else None
        requests = [self._enqueue(ids, params, i, reuse=reuse, call=turn) for i, ids in enumerate(rows)]
        self.stats.accept_lengths = [request.stats.accept_lengths[0] for request in requests]
        try:
            while any(request.finish_reason is None and not request.cancelled for request in requests):
                self._check_turn(turn)
                chunks = self._read(whole=True)  # one caller waits for all: the more rows a round has, the better
                yield from chunks or self._round()
        finally:
            if self._turn is turn:
                for request in requests:
                    self.cancel(request)

    # ---- what comes in

    def check(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Token ids of a prompt that `add` would take with these parameters; ValueError as there."""
        ids = self._encode(prompt)
        self._check(params)
        return ids

    def _encode(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ValueError("a prompt is empty; give at least one token")
        if len(ids) >= self.max_context:
            raise ValueError(
                f"a prompt has {len(ids)} tokens and the context holds {self.max_context}, which leaves no room for an "
                "answer; shorten it or raise max_context"
            )
        wrong = next((i for i in ids if not 0 <= i < self.target.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.target.vocab_size}")
        return ids

    def _check(self, params: SamplingParams) -> None:
        """Raises ValueError for parameters that cannot be honoured."""
        sampling.check_bias(params, self.target.vocab_size)
        if params.grammar is not None:
            self.grammars.matcher(params.grammar)
        trees = self._trees_asked and self.drafter and any(shape.is_tree for shape in self.drafter.shapes)
        if params.acceptance != "match" and trees:
            raise ValueError(f"acceptance {params.acceptance} decides about chains only; take match, or no draft trees")

    def _enqueue(
        self, ids: list[int], params: SamplingParams, index: int, *, reuse: bool = True, call: object | None = None
    ) -> Request:
        eos_ids = (*self.target.eos_ids, *self.tokenizer.eos_ids)
        checker = StopChecker(self.tokenizer, params, eos_ids=eos_ids, room=self.max_context - len(ids))
        matcher = None if params.grammar is None else self.grammars.matcher(params.grammar)
        reuse = reuse and not params.prompt_logprobs
        request = Request(ids, params, index, checker, self._new_stats(), matcher=matcher, reuse=reuse, call=call)
        request.stats.accept_lengths.append([])
        request.stats.prompt_tokens = len(ids)
        self._waiting.append(request)
        self.stats.prompt_tokens += len(ids)
        return request

    def _new_stats(self) -> Stats:
        return Stats(num_draft=self.num_draft, accepted_at=[0] * self.num_draft)

    @property
    def _requests(self) -> list[Request]:
        """All that run or wait."""
        return [*self._waiting, *(request for request in self._slots.requests if request is not None)]

    @property
    def _busy(self) -> bool:
        return bool(self._waiting or self._slots.taken)

    def _take_cache(self) -> None:
        """The cache is ours from now on; what is left of earlier calls ends."""
        for row in self._slots.taken:
            self.sampling.release(row)
        self._slots.clear()
        self._waiting.clear()
        self._reader.request, self._flight, self._batch, self._shape = None, None, None, None
        self._turn = self.cache.turn = object()
        self.cache.lengths.clamp_(min=1)  # steps of drafters may look at the token before
        for cache in self.caches:
            cache.park(0, cache.batch)

    def _check_turn(self, turn: object | None = None) -> None:
        if self.cache.turn is not (turn or self._turn):
            raise RuntimeError("another call has used the cache meanwhile; end or close one before the next")

    # ---- prompts

    def _read(self, *, whole: bool) -> list[TokenChunk]:
        """Read a piece of a prompt; with `whole`, all prompts that get a row. Returns the first tokens of answers."""
        self._has_read = False
        if self._reader.request or (self._waiting and self._slots.free):
            return self._read_pieces(whole)
        return []

    @torch.inference_mode()
    def _read_pieces(self, whole: bool) -> list[TokenChunk]:
        chunks: list[TokenChunk] = []
        started = began = time.perf_counter()
        reader = self._reader
        while reader.request or (self._waiting and self._slots.free):
            request = reader.request or self._admit()
            logits_1V = reader.read(waited_for=not whole and bool(self._live))
            self._has_read = True
            if logits_1V is not None:
                self._batch = None
                chunks.append(self._first_token(request, logits_1V))
            began, before = time.perf_counter(), began
            request.stats.prefill_s += began - before
            if not whole:
                break
        self._since = time.perf_counter()
        self.stats.prefill_s += self._since - started
        self._note_traffic()
        return chunks

    def _admit(self) -> Request:
        """The next request gets a row."""
        request = self._waiting.popleft()
        row = self._slots.take(request)
        self._reader.request = request
        self.sampling.place(row, request.params, request.index, request.prompt_ids)
        self._batch = None
        if self.drafter is not None:
            self.drafter.begin(row, request.prompt_ids, request.reuse)
        if not self._live:
            self._way([row]).policy.begin()
        return request

    def _first_token(self, request: Request, logits_1V: Tensor) -> TokenChunk:
        row = request.slot
        assert row is not None
        if request.params.max_new_tokens == 0:
            return self._emit(request, [], [], [], [], [] if request.params.top_logprobs else None)
        one = self.sampling.only(row)
        sampler = Sampler(one.kind([0]), one, gumbel=self.gumbel)
        legal_11W = None
        if request.matcher is not None:
            no_draft = DraftTree(torch.zeros(1, 0, dtype=torch.int64))
            legal_11W = allowed(no_draft, [request], row, self.target.vocab_size)[0].to(self._device)
        root_1 = sampler.first(logits_1V, self.cache.lengths[row : row + 1], legal_11W)
        sampler.commit(root_1[:, None], torch.ones_like(root_1))
        self.state.root_B[row : row + 1].copy_(root_1)
        logprobs = top = None
        if request.params.logprobs:
            logprobs = sampling.logprobs_of(logits_1V[:, None], root_1[:, None])[0].tolist()
        if request.params.top_logprobs:
            parts = sampling.top_logprobs_of(logits_1V[:, None], request.params.top_logprobs)
            top = _likeliest(request, *(part[0].tolist() for part in parts))
        return self._emit(request, root_1.tolist(), ["target"], [None], logprobs, top)

    # ---- rounds

    @torch.inference_mode()
    def _round(self) -> list[TokenChunk]:
        """A round; with `ahead` the next one is launched before it is read, and rows that have ended run on in that.

        Where tables draft, or a grammar is kept to, the next one is launched by `_collect`, which knows the tokens.
        """
        flight, self._flight = self._flight or self._launch(), None
        if self.ahead:
            self._flight = self._launch(flight)
        return [] if flight is None else self._collect(flight)

    @property
    def _live(self) -> list[Request]:
        """Requests that are being decoded, by row."""
        return [
            request for request in self._slots.requests if request is not None and request is not self._reader.request
        ]

    def _gather(self) -> _Batch | None:
        """All that are being decoded; the device knows it then."""
        live = self._live
        if not live:
            return None
        rows: list[int] = [request.slot for request in live]  # type: ignore[misc]
        first, end = self._span(rows)
        way = self._way(rows)
        active, drafts = [0] * self.cache.batch, [False] * self.cache.batch
        for row, request in zip(rows, live, strict=True):
            active[row], drafts[row] = 1, request.params.speculate
        write(self.state.active_B, active)
        write(self.state.drafts_B, drafts)
        texts = {row: request.tokens for row, request in zip(rows, live, strict=True)}
        plain = [row for row in rows if not drafts[row]]
        constrained = any(request.matcher is not None for request in live)
        return _Batch(live, texts, plain, constrained, first, end, way, way.round(first, end))

    def _launch(self, before: _Flight | None = None) -> _Flight | None:
        """Ask the device for a round of all that are being decoded. None if there are none, or if the host must first
        read the round `before` it.
        """
        started = time.perf_counter()
        if self._batch is None:
            self._batch = self._gather()
        batch, drafter = self._batch, self.drafter
        if batch is None or (before is not None and batch.constrained):
            return None
        policy, live, first = batch.way.policy, batch.live, batch.first
        alone = not self._waiting and self._reader.request is None and live[0].call is not None
        counting = awaited(live, alone)
        policy.awaited = [request.slot for request in counting]  # type: ignore[misc]
        policy.longest = bearable(live, self._has_read)
        num = batch.end - first
        place = sum(map(len, self.cache.held[first : batch.end])) / num + 1, CREW.size, num
        policy.live.at(*place)
        tree, shape = batch.round.no_draft, PLAIN
        if drafter is not None and len(batch.plain) < len(live):
            policy.missed = drafter.missed(batch.texts)
            shape, self._shape = self._shape or batch.way.shape(self._num_idle), None
            if shape.nodes and before is not None and self._num_idle and drafter.reads:
                self._shape = shape
                return None
        marks = [self._clock.mark()]
        if shape.nodes:
            assert drafter is not None
            drafter.catch_up(batch.texts, self._num_idle > 0, batch.plain, _coming(before))
            tree = drafter.draft(batch.round.drafting, shape)
            if tree.num_steps:
                tree = tree._replace(missed=policy.missed)
            marks.append(self._clock.mark())
        result = batch.round.verify(tree, self._masks(batch, tree) if batch.constrained else None)
        if self.ahead or self._on_gpu:
            result = batch.round.fetched(result)
        marks.append(self._clock.mark())
        self._num_idle = 0 if shape.nodes else self._num_idle + 1
        return _Flight(batch, counting, alone, place, tree, policy.asked(), result, marks, started)

    def _masks(self, batch: _Batch, tree: DraftTree) -> Masks:
        """Masks of grammars: asked for once the draft is known, while the target reads it."""
        draft, mark = on_host(tree), self._clock.mark()

        def masks() -> tuple[Tensor, list[tuple[int, int]]]:
            if tree.tokens.shape[1]:
                self._clock.wait(mark)
            return allowed(draft, batch.live, batch.first, self.target.vocab_size, pinned=self._on_gpu)

        return masks

    def _collect(self, flight: _Flight) -> list[TokenChunk]:
        """What came out of a round: tokens for the callers, and what is to be learnt from it."""
        batch, counting, alone, place, tree, asked, result, marks, launched = flight
        stats, num_nodes, policy = self.stats, tree.tokens.shape[1], batch.way.policy
        started = max(launched, self._since)  # before, others' time went on
        self._clock.wait(marks[-1])
        counted = result.counted_BX.tolist()  # the one host synchronisation of a round
        logprobs = None if result.logprobs_BT is None else result.logprobs_BT.tolist()
        top = None if result.top_BTk is None else [part.tolist() for part in result.top_BTk]
        live = [request for request in batch.live if request.slot is not None]
        if not live:
            self._since = time.perf_counter()
            return []
        lines = [request.slot - batch.first for request in live]  # type: ignore[operator]
        if self.drafter is not None and self.drafter.on_host:
            self.drafter.told([result.told(counted[line]) for line in lines])
        names = [tree.drafter or None] * (num_nodes - tree.added) + [tree.adder] * tree.added
        before, chunks, paths = [request.num_emitted for request in live], [], {}
        for request, line in zip(live, lines, strict=True):
            num_new, num_drafted = counted[line][0], num_nodes if request.params.speculate else 0
            path = paths[request] = result.path(counted[line])
            last: Source = "target" if not num_drafted else "bonus" if num_new > tree.depth else "recovered"
            accepted: list[Source] = ["accepted"] * (num_new - 1)
            drafters = [names[node - 1] for node in path]
            ids = counted[line][1 : 1 + num_new]
            kept = logprobs[line][:num_new] if logprobs and request.params.logprobs else None
            others = _likeliest(request, *(part[line][:num_new] for part in top)) if top else None
            chunk = self._emit(request, ids, [*accepted, last], [*drafters, None], kept, others)
            for each in (stats, request.stats):
                each.count_round(num_drafted, num_new - 1, len(chunk.token_ids))
            request.stats.accept_lengths[0].append(len(chunk.token_ids))
            chunks.append(chunk)
        ended, early = time.perf_counter(), self._overlaps and self._flight is None
        if early:  # all that the host does from now on, it does meanwhile
            self._since, self._flight = ended, self._launch()
        draft_s, verify_s = ([0.0] + [self._clock.seconds(a, b) for a, b in pairwise(marks)])[-2:]
        policy.live.at(*place)
        policy.recall(asked)
        moved = advance(live, before, alone)
        accepted_of = [paths[request] for request in counting if request in paths]
        took = ended - started
        CREW.worked(took, policy.expected(tree))
        if batch.way.learns:
            policy.record(tree, accepted_of, draft_s, max(verify_s, took - draft_s), moved)
        if not num_nodes:
            self._reader.took(took)
        self._since = ended if early else time.perf_counter()
        overhead_s = self._since - started - draft_s - verify_s
        for each in (stats, *(request.stats for request in live)):
            each.count_step(tree.num_steps, draft_s, verify_s, overhead_s)
        self._note_traffic()
        return chunks

    def _note_traffic(self) -> None:
        if self._traffic is not None and self._traffic_before is not None:
            self.stats.traffic = self._traffic().since(self._traffic_before)

    def _emit(
        self,
        request: Request,
        ids: list[int],
        sources: list[Source],
        drafters: Sequence[str | None],
        logprobs: list[float] | None,
        top_logprobs: list[list[tuple[int, float]]] | None,
    ) -> TokenChunk:
        """A row's tokens. Those after the end of its text are dropped and counted nowhere."""
        count, text = request.take(ids)
        logprobs, top_logprobs = logprobs and logprobs[:count], top_logprobs and top_logprobs[:count]
        cut = ids[:count], sources[:count], list(drafters[:count])
        chunk = TokenChunk(request, *cut, text, logprobs, top_logprobs, request.finish_reason)
        for stats in (self.stats, request.stats):
            stats.count_tokens(chunk.sources)
        assert request.slot is not None
        held = self.cache.held[request.slot]
        held += request.tokens[len(held) : -1]  # KV beyond, of texts that were cut short, is never looked at
        if chunk.finish_reason is not None:
            self._release(request)
            if self._ended is not None:
                self._ended(request.stats)
        return chunk

    def _release(self, request: Request) -> None:
        """The request's row is free."""
        assert request.slot is not None
        row = request.slot
        self.sampling.release(row)
        self._slots.release(request)
        if self.cache.turn is self._turn:  # else another call has it, which may have given the row away
            for cache in self.caches:
                cache.park(row, row + 1)
        if self._reader.request is request:
            self._reader.request = None
        self._batch = None

    def _span(self, rows: Sequence[int]) -> tuple[int, int]:
        """The rows, from the first to before the last, that a round of these runs over."""
        if self.partial:
            return min(rows), max(rows) + 1
        return 0, next(size for size in self.sizes if size > max(rows))

    def rest(self) -> None:
        """Rows take part in no rounds but those of `step` and `stream`: others change nothing."""
        self.state.active_B.zero_()
        self.state.drafts_B.fill_(True)
        self._batch = None

    # ---- kinds of rounds

    def way(self, params: SamplingParams) -> Way:
        """What belongs to rounds of requests like this one."""
        self._check(params)
        kind = Kind.of(params)
        return self._way_of(kind.rounded() if self.sampling.replayed else kind)

    def _way(self, rows: Sequence[int]) -> Way:
        return self._way_of(self.sampling.kind(rows))

    def _way_of(self, kind: Kind) -> Way:
        way = self._ways.pop(kind, None)
        if way is None:
            way = Way(
                kind,
                target=self.target,
                cache=self.cache,
                drafter=self.drafter,
                sampling=self.sampling,
                state=self.state,
                auto_length=self.auto_length,
                offloaded=self.offloaded,
                meanwhile=self._meanwhile,
                widths=self.widths,
                graphs=self.graphs,
                ahead=self.ahead,
                gumbel=self.gumbel,
                drafts=self._drafts,
            )
            known = next((other.policy for other in reversed(self._ways.values()) if other.policy.live.known), None)
            if known is not None:  # sampling takes little of the time
                way.policy.use(*copy.deepcopy((known.costs, known.live.measured)))
        self._ways[kind] = way
        if len(self._ways) > MOST_WAYS:
            del self._ways[next(iter(self._ways))]
        return way


def _coming(before: _Flight | None) -> dict[int, int]:
    """Most tokens that a round which has not been read adds to each row."""
    if before is None:
        return {}
    most = 1 + before.tree.tokens.shape[1]
    return {request.slot: most for request in before.batch.live if request.slot is not None}


def _likeliest(
    request: Request, ids: list[list[int]], logprobs: list[list[float]]
) -> list[list[tuple[int, float]]] | None:
    """As many of the likeliest tokens at each place as were asked for."""
    num = request.params.top_logprobs
    return [list(zip(*pair, strict=True))[:num] for pair in zip(ids, logprobs, strict=True)] if num else None
