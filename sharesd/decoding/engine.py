"""The loop and nothing else: draft, verify, accept, commit; one host synchronisation per round.

KV invariant: slots below a row's length hold the target's KV of every emitted token but the last one, the root.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from compile.clock import Clock
from compile.graphs import Graphs
from compile.threads import CREW
from sharesd import sampling
from sharesd.config import SamplingParams
from sharesd.decoding.buffers import DraftBuffers
from sharesd.decoding.cache import StaticKVCache
from sharesd.decoding.output import Completion, TokenChunk
from sharesd.decoding.policy import Policy
from sharesd.decoding.prefill import prefill, whole_chunks
from sharesd.decoding.round import Round, RowState
from sharesd.decoding.rows import Rows
from sharesd.decoding.stats import Stats
from sharesd.decoding.tree import PLAIN, DraftTree, Shape, chain
from sharesd.device import use
from sharesd.drafters.base import Drafter, Drafting
from sharesd.models.base import CausalModel
from sharesd.models.tokenizer import Tokenizer
from sharesd.sampling import RowSampling
from sharesd.sampling.sampler import Sampler

Prompt = str | Sequence[int]
MOST_WAYS = 8
"""Ways of sampling whose samplers, graphs and policies are kept; the one that was used longest ago goes first."""


class Engine:
    """Decodes prompts with one target and at most one drafter."""

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
        gumbel: Callable[..., Tensor] = sampling.gumbel,
    ) -> None:
        """`cache` has a row per prompt decoded together; its slots must hold `max_context` and one verify step.

        `auto_length` leaves the shape of each draft to a policy; else it is the drafter's largest.
        `widths` are the numbers of rows that a step may have (it is padded to the next), or None = any. It is a single
        one, the same in all modes, where the target does not give a row the same bits at any width. `reread` reads
        again what steps wrote, rather than reuse it, where a prompt would write other bits. `graphs` capture rounds,
        which are replayed then. `gumbel` may be a compiled form.
        """
        self.target, self.tokenizer, self.cache, self.drafter = target, tokenizer, cache, drafter
        self.max_context, self.graphs, self._reread = max_context, graphs, reread
        self.auto_length, self.widths = auto_length and drafter is not None, sorted(widths) if widths else None
        self.stats = Stats()
        """Of the last call of `generate`."""
        self.gumbel = gumbel
        self._device = cache.lengths.device
        self._clock = Clock(self._device)
        self.state = RowState(torch.zeros_like(cache.lengths), torch.zeros_like(cache.lengths))
        self._ways: dict[tuple, Way] = {}

    @property
    def mode(self) -> str:
        """Name of the drafter, or `naive`."""
        return self.drafter.name if self.drafter else "naive"

    @property
    def num_draft(self) -> int:
        """Draft tokens per round at most."""
        return max(shape.nodes for shape in self.drafter.shapes) if self.drafter else 0

    def forget(self) -> None:
        """Drop what `reuse` would find in the cache."""
        self.cache.forget()

    def complete(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None = None, *, reuse: bool = False
    ) -> list[Completion]:
        """`generate`, collected: one Completion per prompt."""
        done = [Completion() for _ in prompts]
        for chunk in self.generate(prompts, sampling, reuse=reuse):
            done[chunk.row].add(chunk)
        return done

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None = None, *, reuse: bool = False
    ) -> Generator[TokenChunk, None, None]:
        """Decode prompts (texts or token ids), as many together as the cache has rows; yields chunks as they come.

        `reuse` keeps the KV of the longest beginning that a prompt shares with what its row decoded last (chat turns),
        in whichever mode. Each prompt has noise of its own, by its place in the call. Raises ValueError for an empty
        prompt, one longer than the context, and ids outside the vocabulary; RuntimeError if it is asked to go on after
        another call has used the cache.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is one string; give a list of prompts")
        params = sampling or SamplingParams()
        rows = [self._encode(prompt) for prompt in prompts]
        self.stats = Stats(num_draft=self.num_draft, accepted_at=[0] * self.num_draft)
        self.stats.accept_lengths = [[] for _ in rows]
        for first in range(0, len(rows), self.cache.batch):
            yield from self._decode(rows[first : first + self.cache.batch], first, params, reuse)

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

    def _decode(
        self, prompts: list[list[int]], first_index: int, params: SamplingParams, reuse: bool
    ) -> Generator[TokenChunk, None, None]:
        """One group of at most `cache.batch` prompts."""
        use(self._device)
        stats, started = self.stats, time.perf_counter()
        rows = Rows(
            prompts,
            first_index,
            params,
            tokenizer=self.tokenizer,
            eos_ids=(*self.target.eos_ids, *self.tokenizer.eos_ids),
            max_context=self.max_context,
            stats=stats,
        )
        turn = self.cache.turn = object()
        padding: list[list[int]] = [[0]] * (self.cache.batch - len(prompts))  # idle rows hold one token
        way = self.way(params)
        with torch.inference_mode():
            first, logprobs = self._prefill(prompts + padding, first_index, way, params, reuse)
        num_idle = 0  # rounds since the drafter took part
        try:
            chunks = rows.take_first(first, logprobs)
            stats.prefill_s += time.perf_counter() - started
            yield from chunks
            stale = True  # what the device knows of live rows
            while any(rows.live):
                if self.cache.turn is not turn:
                    raise RuntimeError("another call has used the cache meanwhile; end or close one before the next")
                started = time.perf_counter()
                if stale:
                    self.state.active_B.copy_(torch.tensor(rows.live + [False] * len(padding)))
                context = (sum(map(len, rows.tokens)) + len(padding)) / self.cache.batch
                way.policy.live.at(context, CREW.size)
                way.policy.awaited = awaited = rows.awaited
                shape = way.shape(num_idle)
                with torch.inference_mode():
                    marks = [self._clock.mark()]
                    if shape.nodes:
                        assert self.drafter is not None
                        self.drafter.catch_up(rows.tokens + padding, num_idle > 0)
                    tree = way.draft(shape)
                    marks.append(self._clock.mark())
                    result = way.round.verify(tree)
                    marks.append(self._clock.mark())
                    counted = result.counted_BX.tolist()  # the one host synchronisation of a round
                    logprobs = None if result.logprobs_BT is None else result.logprobs_BT.tolist()
                num_idle = 0 if shape.nodes else num_idle + 1
                if self.drafter is not None and self.drafter.on_host:
                    self.drafter.told([result.told(row) for row in counted])
                paths = [result.path(row) if live else () for row, live in zip(counted, rows.live, strict=False)]
                accepted = [paths[row] for row in awaited]
                chunks = rows.take_round(counted, paths, logprobs, tree)
                stale = any(chunk.finish_reason for chunk in chunks)
                draft_s, verify_s = (self._clock.seconds(a, b) for a, b in pairwise(marks))
                overhead_s = time.perf_counter() - started - draft_s - verify_s
                CREW.worked(draft_s + verify_s + overhead_s, way.policy.expected(tree))
                way.policy.record(tree, accepted, draft_s, verify_s + overhead_s, rows.advance)
                stats.draft_s += draft_s
                stats.verify_s += verify_s
                stats.overhead_s += time.perf_counter() - started - draft_s - verify_s
                yield from chunks
        finally:
            # A row's last token has no KV yet. KV beyond, of rows that were cut short, is never looked at.
            if self.cache.turn is turn:
                idle: list[list[int]] = [[] for _ in range(self.cache.batch - len(prompts))]
                self.cache.held = [row[:-1] for row in rows.tokens] + idle
                self.cache.held_by = None if num_idle else self.drafter

    def _prefill(
        self, prompts: list[list[int]], first_index: int, way: Way, params: SamplingParams, reuse: bool
    ) -> tuple[list[int], list[list[float]] | None]:
        """Read a prompt per row and choose each row's first token; also its log-probability, if asked for."""
        sampler = way.sampler
        for row, prompt in enumerate(prompts):
            sampler.rows.place(row, params, first_index + row, prompt)
        kept = [_common(row, held) if reuse else 0 for row, held in zip(prompts, self.cache.held, strict=True)]
        if self._reread:
            known = zip(kept, self.cache.settled, prompts, strict=True)
            kept = [whole_chunks(min(num, settled, len(row) - 1)) for num, settled, row in known]
        seen = self.drafter is not None and self.cache.held_by is self.drafter
        self.forget()
        logits_BV = prefill(self.target, self.cache, prompts, kept)
        self.cache.settled = [whole_chunks(len(row)) for row in prompts]
        root_B = sampler.first(logits_BV, self.cache.lengths)
        sampler.commit(root_B[:, None], torch.ones_like(root_B))
        self.state.root_B.copy_(root_B)
        if self.drafter is not None:
            way.policy.begin()
            self.drafter.begin(prompts, kept if seen else [0] * len(prompts), way.drafting, way.policy)
        first = root_B.tolist()
        if not params.logprobs:
            return first, None
        return first, sampling.logprobs_of(logits_BV[:, None], root_B[:, None]).tolist()

    def way(self, params: SamplingParams) -> Way:
        """What belongs to this way of sampling; kept, since its rounds may be captured in graphs."""
        bare = replace(params, seed=0, max_new_tokens=1, stop=(), stop_token_ids=(), ignore_eos=False, logit_bias={})
        if params.acceptance != "match" and self.drafter and any(shape.is_tree for shape in self.drafter.shapes):
            raise ValueError(f"acceptance {params.acceptance} decides about chains only; take match, or no draft trees")
        key = (repr(bare), tuple(sorted(params.logit_bias.items())))
        way = self._ways.pop(key, None) or Way(self, params)
        self._ways[key] = way
        if len(self._ways) > MOST_WAYS:
            del self._ways[next(iter(self._ways))]
        return way


class Way:
    """One way of sampling: its sampler, its rounds, and the policy that chooses among drafts."""

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self._engine = engine
        batch, vocab_size, device = engine.cache.batch, engine.target.vocab_size, engine.cache.lengths.device
        rows = RowSampling(batch=batch, vocab_size=vocab_size, device=device, replayed=engine.graphs is not None)
        for row in range(batch):
            rows.place(row, params, row, ())
        self.sampler = Sampler(rows.kind(range(batch)), rows, gumbel=engine.gumbel)
        shapes = engine.drafter.shapes if engine.drafter else (PLAIN,)
        self.policy = Policy(shapes, pinned=None if engine.auto_length else shapes[-1])
        most = engine.num_draft
        if engine.graphs is not None and engine.widths:
            most = max(most, engine.widths[-1] - 1)  # rows of padding are rows without a node: no shape of their own
        buffers = DraftBuffers(batch, most, vocab_size, device)
        self.drafting = Drafting(self.sampler, engine.state.root_B, buffers, engine.graphs)
        self.round = Round(
            engine.target, engine.cache, engine.drafter, self.drafting, engine.state, widths=engine.widths
        )

    def shape(self, num_idle: int) -> Shape:
        """What to draft in the coming round; where the drafter decides, a chain of as many nodes as it may have."""
        drafter = self._engine.drafter
        if drafter is None:
            return PLAIN
        if drafter.on_host:
            return chain(self.policy.most())
        return self.policy.next_shape(may_try=num_idle == 0 or not drafter.reads)

    def draft(self, shape: Shape) -> DraftTree:
        """The draft of a round."""
        engine = self._engine
        if not shape.nodes:
            return DraftTree(engine.state.root_B[:, None][:, :0])
        assert engine.drafter is not None
        return engine.drafter.draft(shape)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the beginning that both share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
