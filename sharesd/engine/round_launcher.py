"""Launch of rounds: forms the batch, makes the draft, starts the verification.

Legend: B rows, N draft tokens, T = N + 1 (the root and the nodes), W words of 32 bits, one for each token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compile.adaptive_threads import STEP_THREADS
from compile.device_timer import Clock, Mark
from sharesd.devices.transfer import upload
from sharesd.drafters.draft_checks import checked_draft
from sharesd.engine.decode_round import BatchState, GrammarMaskFn, Round, RoundResult
from sharesd.engine.loaded_mode import DecodeVariant
from sharesd.engine.request import Request, counted_requests, max_round_cost
from sharesd.engine.scheduler import Scheduler
from sharesd.kvcache.static import StaticKVCache
from sharesd.records.trace import Proposed
from sharesd.speculation.draft_buffers import num_words
from sharesd.speculation.draft_policy import RESTING, Decision
from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape, DraftTree, parents_of, tree_on_host

log = logging.getLogger(__name__)


class Batch(NamedTuple):
    """Requests decoded together, unchanged until one joins or leaves.

    A round's tensors cover the cache's rows from `first` (inclusive) to `end` (exclusive), idle ones too. A line is the
    index of a row in them: row - `first`.
    """

    live: list[Request]
    texts: dict[int, list[int]]
    """Token ids by row; the lists grow with the requests."""
    opted_out_rows: list[int]
    """Rows whose requests do not want drafts.

    Draft steps run over them all the same; verification ignores their tokens.
    """
    constrained: bool
    """True if any request has a grammar or a minimum length, which need masks from the host."""
    first: int
    """Row of the first line of results."""
    end: int
    """Row after the last line."""
    variant: DecodeVariant
    """Rounds and draft policy for this kind of sampling; the policy chooses the shape of each draft."""
    round: Round
    """Verify, accept and commit over these rows."""
    traced: bool
    """True if its rounds are traced."""


class InFlightRound(NamedTuple):
    """A launched round whose result has not been read."""

    batch: Batch
    counted: list[Request]
    """Requests for which the policy chooses the draft; see `counted_requests`."""
    is_last_call: bool
    """True if all requests are prompts of one call, and none follows."""
    operating_point: tuple[float, int, int]
    """What costs of steps depend on: mean live slots, threads, rows (arguments of `LiveCosts.at`)."""
    tree: DraftTree
    decision: Decision
    """State of the policy, which the round's result is recorded with."""
    result: RoundResult
    previous_end: Mark | None
    """Point in time on the device at which the last round ended; None: other work came between them."""
    marks: list[Mark]
    """Points in time on the device: start, end of the draft if there is one, end of the round."""
    started: float
    """Host time of the launch."""
    reasons: dict[str, str]
    """Reasons why nothing was drafted, by who decided it: the engine, the policy or a drafter."""
    proposed: Proposed | None
    """Draft for the trace; None without one."""
    late_number: int = 0
    """Number of its verification, if that takes late nodes; else 0."""
    late_tree: DraftTree | None = None
    """The draft with late nodes, if it gets some that come in time."""


class RoundLauncher:
    """Starts rounds of all requests that are being decoded."""

    def __init__(
        self,
        cache: StaticKVCache,
        scheduler: Scheduler,
        state: BatchState,
        clock: Clock,
        *,
        vocab_size: int,
        async_scheduling: bool,
    ) -> None:
        """The arguments are the engine's own."""
        self._cache, self._scheduler, self._state, self._vocab_size = cache, scheduler, state, vocab_size
        self._clock, self._on_gpu = clock, cache.lengths.device.type == "cuda"
        self._copies_result = async_scheduling or self._on_gpu
        self._batch: Batch | None = None
        self._num_changes = -1  # of the scheduler, when the batch was formed
        self._plain_rounds = 0  # since the last round with a draft
        self._deferred_shape: DraftShape | None = None  # of a draft that could not be launched before a result was read
        self._operating_point = 0.0, 0, 0
        self._last_end: Mark | None = None  # of the last round, if nothing has come after it
        self.prefilled = False
        """The step reads a piece of a prompt before its round."""
        self.traces_all = False
        """True if rounds are traced even if no request asks for it."""

    def reset(self) -> None:
        """Drop the batch and a deferred draft."""
        self._batch = self._deferred_shape = self._last_end = None
        self._plain_rounds = 0

    def invalidate(self) -> None:
        """Form a new batch before the next round."""
        self._batch = None

    def launch(self, previous: InFlightRound | None = None) -> InFlightRound | None:
        """Launch a round of all live requests.

        Returns None if there are none, or if the host must first read the `previous` round.
        """
        started, scheduler = time.perf_counter(), self._scheduler
        if self._batch is None or self._num_changes != scheduler.num_changes:
            self._batch, self._num_changes = self._form_batch(), scheduler.num_changes
            self._last_end = self._deferred_shape = None  # a shape is the choice of the old batch's policy
            if self._batch is not None:
                self._batch.variant.policy.end_rest()
        batch, drafter = self._batch, scheduler.drafter
        if batch is None or (previous is not None and batch.constrained):
            return None
        # Tell the policy about the coming round. In `variant.shape` it chooses a shape from the costs of steps
        # (`policy.live`) and past acceptance; in `drafter.draft` it may end a chain early (on a CPU); it learns from
        # the result in `OutputProcessor.collect`, perhaps after it has decided about the next round.
        policy, live, first = batch.variant.policy, batch.live, batch.first
        call = scheduler.only_call
        one_caller = call is not None
        is_last_call = call is not None and not (call.has_more or scheduler.waiting or scheduler.prefill.request)
        counted = counted_requests(live, is_last_call)
        rests = policy.rests()  # then the last decision holds, with its reasons and operating point
        if not rests:
            policy.counted_rows = [request.row for request in counted]  # type: ignore[misc]
            policy.max_round_cost = max_round_cost(live, self.prefilled, one_caller)
            policy.reasons, num = {}, batch.end - first
            mean_slots = sum(map(len, self._cache.cached_ids[first : batch.end])) / num + 1  # and the root
            self._operating_point = mean_slots, STEP_THREADS.size, num
            policy.live.at(*self._operating_point)
        reasons = policy.reasons
        # With async scheduling, `previous` is still running. A drafter goes ahead if it needs neither its tokens on the
        # host nor what the policy learns from them. Grammars need the tokens (see above).
        if previous is not None and not (rests or drafter is None or drafter.goes_ahead(batch.round.context)):
            return None
        tree, shape = batch.round.no_draft, NO_DRAFT
        if drafter is None or len(batch.opted_out_rows) == len(live):
            reasons["engine"] = "no_drafter" if drafter is None else "not_requested"
        elif not rests:
            shape, self._deferred_shape = self._deferred_shape or batch.variant.shape(self._plain_rounds), None
            # After plain rounds, a drafter with KV of its own must read tokens that the host does not have yet. The
            # shape is kept for the launch after the result of `previous` was read, so that the policy does not decide
            # twice.
            if shape.nodes and previous is not None and self._plain_rounds and drafter.needs_catch_up:
                self._deferred_shape = shape
                return None
        marks = [self._clock.mark()]
        if shape.nodes:
            assert drafter is not None
            drafter.catch_up(batch.texts, self._plain_rounds > 0, batch.opted_out_rows, _max_pending_tokens(previous))
            tree = checked_draft(drafter, batch.round.context, shape)  # `drafter.draft`, checked against the shape
            marks.append(self._clock.mark())
        if log.isEnabledFor(logging.DEBUG):
            _log_decision(batch, shape, tree)
        result = batch.round.run(tree, self._grammar_masks(batch, tree) if batch.constrained else None)
        takes_late, buffers = tree.record.takes_late_nodes, batch.round.context.buffers
        verified = buffers.tree(tree_mask=True, probs=False) if takes_late else tree
        proposed = Proposed.of(verified) if batch.traced and tree.tokens.shape[1] else None
        # The device overwrites its result in the next round, which may be launched before the host reads this one.
        if self._copies_result:
            result = batch.round.copy_to_host(result)
            proposed = proposed and batch.round.copy_proposed(proposed)
        marks.append(self._clock.mark())
        previous_end, self._last_end = None if self.prefilled else self._last_end, marks[-1]
        self._plain_rounds = 0 if shape.nodes else self._plain_rounds + 1
        launched = InFlightRound(
            batch=batch,
            counted=counted,
            is_last_call=is_last_call,
            operating_point=self._operating_point,
            tree=tree,
            decision=RESTING if rests else policy.decision(is_plain=not tree.tokens.shape[1]),
            result=result,
            previous_end=previous_end,
            marks=marks,
            started=started,
            reasons=reasons,
            proposed=proposed,
            late_number=buffers.late.number if takes_late else 0,
        )
        return self.add_late_nodes(launched) if previous is None else launched

    def add_late_nodes(self, launched: InFlightRound) -> InFlightRound:
        """Add nodes that the drafter has only now, when the round in front of this one was read."""
        number, batch, drafter = launched.late_number, launched.batch, self._scheduler.drafter
        if not number or drafter is None:
            return launched
        texts = {request.row: request.tokens for request in batch.live if request.row is not None}
        texts = {row: text for row, text in texts.items() if row not in batch.opted_out_rows}
        context, begins = batch.round.context, launched.marks[1]
        late = drafter.late_nodes(context, texts, launched.tree, lambda: self._clock.has_passed(begins))
        if late is None:
            return launched
        context.buffers.late.put(number, late)
        return launched._replace(late_tree=late)

    def _form_batch(self) -> Batch | None:
        """Collect all live requests and upload their rows; None without any."""
        live = self._scheduler.live
        if not live:
            return None
        rows: list[int] = [request.row for request in live]  # type: ignore[misc]
        first, end = self._scheduler.rows.span(rows)
        variant = self._scheduler.active_mode.of_rows(rows)
        active, drafts = [0] * self._cache.batch, [False] * self._cache.batch
        for row, request in zip(rows, live, strict=True):
            active[row], drafts[row] = 1, request.params.speculate
        upload(self._state.active_B, active)
        upload(self._state.drafts_B, drafts)
        texts = {row: request.tokens for row, request in zip(rows, live, strict=True)}
        opted_out_rows = [row for row in rows if not drafts[row]]
        return Batch(
            live=live,
            texts=texts,
            opted_out_rows=opted_out_rows,
            constrained=any(request.matcher is not None for request in live),
            first=first,
            end=end,
            variant=variant,
            round=variant.round(first, end),
            traced=self.traces_all or any(request.wants_rounds for request in live),
        )

    def _grammar_masks(self, batch: Batch, tree: DraftTree) -> GrammarMaskFn:
        """Return a function that computes grammar masks during the target's pass."""
        draft, mark = tree_on_host(tree), self._clock.mark()

        def masks() -> tuple[Tensor, list[tuple[int, int]]]:
            if tree.tokens.shape[1]:
                self._clock.wait(mark)
            return compute_grammar_mask(draft, batch.live, batch.first, self._vocab_size, pinned=self._on_gpu)

        return masks


def _log_decision(batch: Batch, shape: DraftShape, tree: DraftTree) -> None:
    """Log the policy's decision about a round in one line."""
    policy, drafted = batch.variant.policy, tree.tokens.shape[1]
    what = f"{drafted} of at most {shape.nodes} tokens by {tree.record.drafter}" if drafted else "a plain step"
    if tree.record.num_filled:
        what += f", {tree.record.num_filled} of them by {tree.record.filler}"
    if policy.pinned is not None:
        why = "the draft's length is given"
    else:
        why = f"value {policy.model_value:.2f} expected of a model's best choice, {policy.plain_value:.2f} of no draft"
    log.debug("%d rows from slot %d: %s; %s", len(batch.live), len(batch.live[0].tokens), what, why)


def _max_pending_tokens(previous: InFlightRound | None) -> dict[int, int]:
    """Return upper bounds on the tokens that an unread round adds to each row."""
    if previous is None:
        return {}
    most = previous.batch.round.context.buffers.max_nodes
    max_tokens = 1 + (most if previous.late_number else previous.tree.tokens.shape[1])
    return {request.row: max_tokens for request in previous.batch.live if request.row is not None}


def compute_grammar_mask(
    tree: DraftTree, requests: Sequence[Request], first: int, vocab_size: int, *, pinned: bool = False
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return bits [B, T, W] int32 of allowed tokens, and nodes (line, number) that must not be accepted.

    `tree` is on the host; its first line belongs to row `first`.
    """
    B, N = tree.tokens.shape
    shape = B, 1 + N, num_words(vocab_size)
    grammar_mask_BTW = torch.full(shape, -1, dtype=torch.int32, device="cpu", pin_memory=pinned)
    tokens, parents, lost = tree.tokens.tolist(), parents_of(tree).tolist(), []
    for request in requests:
        if request.matcher is None:
            continue
        assert request.row is not None
        line = request.row - first
        draft = (tokens[line], parents[line]) if request.params.speculate else ()
        lost += [(line, node) for node in request.matcher.fill_mask(grammar_mask_BTW[line], *draft)]
    return grammar_mask_BTW, lost
