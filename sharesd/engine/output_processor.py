"""Results of rounds: new tokens, stop rules, counts, times, and what the draft policy learns.

Legend: V vocabulary, W words of 32 bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from compile.adaptive_threads import STEP_THREADS
from compile.device_timer import Clock
from compile.state_update import count_finite
from sharesd import sampling
from sharesd.data.request_errors import GrammarTooComplex, NonFiniteLogits, NoTokenAllowed, RequestError
from sharesd.engine.options import EngineOptions
from sharesd.engine.outputs import Source, TokenChunk
from sharesd.engine.request import Request, mean_progress
from sharesd.engine.round_launcher import InFlightRound, compute_grammar_mask
from sharesd.engine.scheduler import Scheduler
from sharesd.engine.stats import Stats
from sharesd.kvcache.static import StaticKVCache
from sharesd.records.trace import NO_TOKENS, Drafts, RowTrace, node_probs, round_trace, without_missing
from sharesd.sampling.sampler import Sampler
from sharesd.speculation.draft_tree import DraftTree

if TYPE_CHECKING:
    from sharesd.records.trace_file import TraceFile

Cut = Literal["not_finite", "none_allowed"]
"""Reason why no token can be chosen: the logits are not finite, or every token is excluded."""


class Tokens(NamedTuple):
    """New tokens of one row, with the data of each."""

    ids: list[int]
    sources: list[Source]
    drafters: Sequence[str | None]
    """Drafter of each token; None: the target's own."""
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    cut: Cut | None = None
    """Reason why no token can follow; None: one can."""


class OutputProcessor:
    """Reads the results of launched rounds and emits their tokens."""

    def __init__(self, cache: StaticKVCache, scheduler: Scheduler, clock: Clock, options: EngineOptions) -> None:
        """The arguments are the engine's own."""
        self._cache, self._scheduler, self._clock = cache, scheduler, clock
        self._on_gpu = cache.lengths.device.type == "cuda"
        self._on_finish, self._transfer_stats = options.on_finish, options.transfer_stats
        self._model_name = options.model_name
        self.stats = Stats()
        """Counts since `begin`."""
        self._traffic_before = self._transfer_stats() if self._transfer_stats else None
        self.trace: TraceFile | None = None
        """File of all rounds."""
        self.last_ended = 0.0
        """End time of the last collected round or prompt chunk."""

    def begin(self, stats: Stats) -> None:
        """Count into `stats` from now on."""
        self.stats = stats
        self._traffic_before = self._transfer_stats() if self._transfer_stats else None

    def collect(self, in_flight: InFlightRound, launch_next: Callable[[], bool]) -> list[TokenChunk]:
        """Return the tokens of a round; record its acceptance and times.

        `launch_next` is called as soon as the tokens are known, and returns True if it launched the next round
        (`Engine._launch_after_read`).
        """
        batch, tree, result, marks = in_flight.batch, in_flight.tree, in_flight.result, in_flight.marks
        num_nodes, policy = tree.tokens.shape[1], batch.variant.policy
        # A round that was launched before the last one was read has waited for it; that time is counted there.
        started = max(in_flight.started, self.last_ended)
        self._clock.wait(marks[-1])  # the one host synchronisation of a round without grammars
        packed = result.packed_result_BX.tolist()
        logprobs = None if result.logprobs_BT is None else result.logprobs_BT.tolist()
        top = None if result.top_BTk is None else [part.tolist() for part in result.top_BTk]
        allowed = None if result.num_allowed_B is None else result.num_allowed_B.tolist()
        drafts = None if in_flight.proposed is None else in_flight.proposed.to_lists()
        # Requests may have ended or been cancelled since the launch; their results are discarded.
        live = [request for request in batch.live if request.row is not None]
        if not live:
            self.last_ended = time.perf_counter()
            return []
        lines = [request.row - batch.first for request in live]  # type: ignore[operator]
        drafter = self._scheduler.drafter
        if drafter is not None and drafter.runs_on_host and (num_nodes or drafter.commits_plain_rounds):
            feedback = [result.drafter_feedback(packed[line]) for line in lines]
            drafter.on_host_result(feedback)
            late = in_flight.late_tree
            if late is not None and any(numbers[-1] > 0 for numbers in feedback):  # `joined_B`
                in_flight, tree, num_nodes = in_flight._replace(tree=late), late, late.tokens.shape[1]
        names = _drafters_by_node(tree)
        emitted_before, chunks, paths = [request.num_emitted for request in live], [], {}
        for request, line in zip(live, lines, strict=True):
            # num_new: accepted draft tokens and the target's own. num_valid: those before the first that could not be
            # chosen, since its logits were not finite or all tokens were excluded, which ends the request with an
            # error.
            (num_new, num_finite), num_drafted = packed[line][:2], num_nodes if request.params.speculate else 0
            num_valid = num_finite if allowed is None else min(num_finite, allowed[line])
            cut: Cut = "not_finite" if num_valid == num_finite else "none_allowed"
            path = paths[request] = result.path(packed[line])
            last: Source = "target" if not num_drafted else "bonus" if num_new > tree.depth else "recovered"
            accepted: list[Source] = ["accepted"] * (num_new - 1)
            chunk = self.emit(
                request,
                Tokens(
                    packed[line][2 : 2 + num_valid],
                    [*accepted, last][:num_valid],
                    [*(names[node - 1] for node in path), None][:num_valid],
                    logprobs[line][:num_valid] if logprobs and request.params.logprobs else None,
                    top_logprobs(request, *(part[line][:num_valid] for part in top)) if top else None,
                    cut=cut if num_valid < num_new else None,
                ),
            )
            for each in (self.stats, request.stats):
                each.record_round(num_drafted, tree.depth, min(num_new - 1, num_valid), len(chunk.token_ids))
            request.stats.accept_lengths[0].append(len(chunk.token_ids))
            chunks.append(chunk)
        ended = time.perf_counter()
        overlaps = launch_next()  # the rest of the host's work overlaps with the next round
        # Two marks without a draft, three with one.
        draft_s, verify_s = ([0.0] + [self._clock.seconds(a, b) for a, b in pairwise(marks)])[-2:]
        wait_s = self._table_wait_s(in_flight, draft_s)
        if tree.record.model_marks is not None:
            draft_s = self._clock.seconds(*tree.record.model_marks)
        # The next round may have been launched; the next launch sets the operating point again.
        policy.live.at(*in_flight.operating_point)
        accepted_paths = [paths[request] for request in in_flight.counted if request in paths]
        took = ended - started
        STEP_THREADS.record_round(took, policy.expected(tree))
        if batch.variant.records_rounds:
            # Draft time that is not part of the step's: of a hybrid on a GPU, tables' waits and the model's draft.
            apart_s = draft_s if wait_s is None else wait_s + draft_s * (tree.record.model_marks is not None)
            step_s = max(verify_s, took - apart_s)
            progress = mean_progress(live, emitted_before, in_flight.is_last_call)
            policy.record(in_flight.decision, tree, accepted_paths, draft_s, step_s, progress, wait_s)
        if not num_nodes:
            self._scheduler.prefill.record_round_time(max(took, draft_s + verify_s))
        traces = trace_rows(in_flight, chunks, [paths[each] for each in live], lines, drafts) if batch.traced else []
        self.last_ended = ended if overlaps else time.perf_counter()
        overhead_s = self.last_ended - started - draft_s - verify_s
        for each in (self.stats, *(request.stats for request in live)):
            each.record_step(tree.record.num_steps, draft_s, verify_s, overhead_s)
        self.record_transfers()
        return self._with_traces(in_flight, chunks, traces, (draft_s, verify_s, overhead_s)) if traces else chunks

    def _table_wait_s(self, in_flight: InFlightRound, draft_s: float) -> float | None:
        """Return how long a GPU waited for tables; None on a CPU, and if they were not queried.

        `draft_s`: seconds of all that came before the verification, a model's draft included.
        """
        record, seconds = in_flight.tree.record, self._clock.seconds
        if not (self._on_gpu and in_flight.decision.has_queried):
            return None
        idle_s = 0.0 if in_flight.previous_end is None else seconds(in_flight.previous_end, in_flight.marks[0])
        model_s = 0.0 if record.model_marks is None else seconds(*record.model_marks)
        return max(0.0, idle_s + draft_s - model_s)

    def _with_traces(
        self,
        in_flight: InFlightRound,
        chunks: list[TokenChunk],
        rows: list[RowTrace],
        times: tuple[float, float, float],
    ) -> list[TokenChunk]:
        """Write a round's trace; return chunks with the traces wanted."""
        found = round_trace(self._scheduler.active_mode.name, in_flight.tree, in_flight.reasons, times, rows)
        if self.trace is not None:
            self.trace.add(found)
        return [
            replace(chunk, round=found._replace(rows=[row])) if chunk.request.wants_rounds else chunk
            for chunk, row in zip(chunks, rows, strict=True)
        ]

    def emit(self, request: Request, tokens: Tokens) -> TokenChunk:
        """Return the chunk of a row's new tokens.

        Tokens after the end of the text are dropped and not counted. If no token can be chosen at a position and the
        text has not ended before it, the request fails.
        """
        count, text = request.take(tokens.ids)  # appends tokens up to the first stop rule that holds
        error: RequestError | None = None
        if tokens.cut == "not_finite" and request.finish_reason is None:
            request.bad_position = request.bad_position or len(request.tokens)
        if request.bad_position is not None:
            error = self._not_finite(request.bad_position)
        elif tokens.cut == "none_allowed" and request.finish_reason is None:
            error = _none_allowed(request)
        if error is not None:
            text += request.fail()
        chunk = TokenChunk(
            request,
            token_ids=tokens.ids[:count],
            sources=tokens.sources[:count],
            drafters=list(tokens.drafters[:count]),
            text=text,
            logprobs=tokens.logprobs and tokens.logprobs[:count],
            top_logprobs=tokens.top_logprobs and tokens.top_logprobs[:count],
            finish_reason=request.finish_reason,
            error=error,
        )
        for stats in (self.stats, request.stats):
            stats.record_tokens(chunk.sources)
        assert request.row is not None
        cached_ids = self._cache.cached_ids[request.row]
        cached_ids += request.tokens[len(cached_ids) : -1]  # all but the next root, which has no KV yet
        if chunk.finish_reason is not None:
            if error is not None:
                self._scheduler.discard_kv(request.row)
            self._scheduler.release(request)
            if error is None and request.mode in self._on_finish:
                self._on_finish[request.mode](request.stats)
        return chunk

    def _not_finite(self, position: int) -> NonFiniteLogits:
        """Return the error of logits that are not finite."""
        dtype = str(self._cache.dtype).removeprefix("torch.")
        remedy = "check its weights" if dtype in ("float32", "float64") else "try dtype float32, or check its weights"
        return NonFiniteLogits(
            f"the logits of {self._model_name} in {dtype} are not numbers (NaN or infinite) at position {position} of "
            f"the text; {remedy}"
        )

    def record_transfers(self) -> None:
        """Count the transfers of offloaded weights since `begin`."""
        if self._transfer_stats is not None and self._traffic_before is not None:
            self.stats.traffic = self._transfer_stats().since(self._traffic_before)


def _none_allowed(request: Request) -> RequestError:
    """Return the error of a request in which every token is excluded at the next position."""
    position, params, matcher = len(request.tokens), request.params, request.matcher
    if matcher is not None and matcher.limit is not None:
        return GrammarTooComplex(
            f"the grammar became too complex at position {position} of the text ({matcher.limit}); give a simpler "
            "one, such as shorter repetitions or fewer alternatives"
        )
    too_short = request.num_emitted < params.min_new_tokens
    given = {"the grammar": params.grammar, "logit_bias": params.logit_bias, "the minimum length": too_short}
    together = " and ".join(name for name, is_given in given.items() if is_given)
    message = f"no token is allowed at position {position} of the text by {together}"
    return NoTokenAllowed(f"{message}; relax one of them, or end the text earlier")


def _drafters_by_node(tree: DraftTree) -> list[str | None]:
    """Return the name of each node's drafter."""
    made = tree.record
    return [made.drafter or None] * (tree.tokens.shape[1] - made.num_filled) + [made.filler] * made.num_filled


def top_logprobs(
    request: Request, ids: list[list[int]], logprobs: list[list[float]]
) -> list[list[tuple[int, float]]] | None:
    """Return the likeliest tokens of each position with log-probabilities.

    Their number is that of the request.
    """
    num = request.params.top_logprobs
    return [list(zip(*pair, strict=True))[:num] for pair in zip(ids, logprobs, strict=True)] if num else None


def trace_rows(
    in_flight: InFlightRound,
    chunks: Sequence[TokenChunk],
    paths: Sequence[Sequence[int]],
    lines: Sequence[int],
    drafts: Drafts | None,
) -> list[RowTrace]:
    """Return the traces of a round's chunks.

    Args:
        paths: accepted verify rows, from 1, of each chunk.
        lines: line of each chunk in the round's tensors.
        drafts: the draft as `Proposed.to_lists` returns it; None: there is none.
    """
    tree, scorer, found = in_flight.tree, in_flight.decision.scorer, []
    scored = dict(zip(in_flight.counted, scorer.draft_probs if scorer and tree.record.num_steps else (), strict=False))
    for chunk, path, line in zip(chunks, paths, lines, strict=True):
        request, num = chunk.request, len(chunk.token_ids)
        tokens, parents, probs = drafts[line] if drafts and request.params.speculate else NO_TOKENS
        shown = probs or node_probs(tree, line, len(tokens), parents, scored.get(request, ()))
        accepted = [node - 1 for node in path[:num]]
        if -1 in tokens:  # late nodes that the draft had already
            tokens, parents, shown, accepted = without_missing(tokens, parents, shown, accepted)
        position = len(request.tokens) - num
        found.append(RowTrace(request.number, position, tokens, parents, shown, accepted, chunk.token_ids))
    return found


def sample_first(request: Request, sampler: Sampler, logits_1V: Tensor, length_1: Tensor, root_1: Tensor) -> Tokens:
    """Sample the first token after a prompt, and write it to `root_1`.

    `sampler` covers only that row.
    """
    params = request.params
    if params.max_new_tokens == 0:
        return Tokens([], [], [], [] if params.logprobs else None, [] if params.top_logprobs else None)
    mask_11W = None
    if request.matcher is not None:
        assert request.row is not None
        no_draft = DraftTree(torch.zeros(1, 0, dtype=torch.int64))
        mask_11W = compute_grammar_mask(no_draft, [request], request.row, sampler.vocab_size)[0].to(logits_1V.device)
    chosen = sampler.first(logits_1V, length_1, mask_11W)
    token_1 = chosen.tokens[:, 0]
    sampler.commit(chosen.tokens, chosen.num_new)
    root_1.copy_(token_1)
    token, num_finite, num_allowed = pack_first(token_1, logits_1V, chosen.num_allowed).tolist()
    if not num_finite or not num_allowed:
        return Tokens([], [], [], cut="none_allowed" if num_finite else "not_finite")
    logprobs = top = None
    if params.logprobs:
        logprobs = sampling.logprobs_of(logits_1V[:, None], token_1[:, None])[0].tolist()
    if params.top_logprobs:
        parts = sampling.top_logprobs_of(logits_1V[:, None], params.top_logprobs)
        top = top_logprobs(request, *(part[0].tolist() for part in parts))
    return Tokens([token], ["target"], [None], logprobs, top)


def pack_first(token_1: Tensor, logits_1V: Tensor, num_allowed_1: Tensor | None) -> Tensor:
    """Return the token, 1 if its logits are numbers, and 1 if it is allowed.

    The host thus reads all at once.
    """
    one_1 = torch.ones_like(token_1)
    num_finite_1 = count_finite(logits_1V[:, None], None, one_1)
    return torch.cat([token_1, num_finite_1, one_1 if num_allowed_1 is None else num_allowed_1])
