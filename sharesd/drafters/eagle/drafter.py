"""Drafter of EAGLE, EAGLE-2 and EAGLE-3, with a trained head.

Slot t of the head's cache holds the KV of the target's features of token t and of the token after it. KV of committed
tokens always comes from target features; KV written while drafting is overwritten by the first step of the next draft.
So the cache needs no rollback, and nothing moves with an accepted path.

Legend: B rows, R places of a draft's first step, S slots, F features, P states from which drafts may continue, D hidden
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.state_update import append_tokens
from sharesd.devices.transfer import upload
from sharesd.drafters.base import NOTHING, BuildInputs, DraftContext, Drafter, num_bytes
from sharesd.drafters.chain_draft import DraftStepper
from sharesd.drafters.heads.head import FeatureHead, Head
from sharesd.drafters.tree_draft import DraftGenerator
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.prefill import CHUNK
from sharesd.speculation.draft_tree import DraftShape, DraftTree, VerifyResult


class EagleDrafter(Drafter):
    """Drafter of a head, whose cache has read all `cached_ids` but one."""

    name = "eagle"
    supports_async = True

    def __init__(
        self, head: Any, target: StaticKVCache, *, shapes: Sequence[DraftShape], weight_bytes: int, branching: int = 1
    ) -> None:
        """`target`: the target's cache, with the features that the head reads."""
        self.head, self.shapes, self._branching, self._weight_bytes = head, shapes, branching, weight_bytes
        self.trees = shapes[-1].is_tree
        self.commits_plain_rounds = target.lengths.device.type == "cuda"  # a host has their tokens when it drafts
        self.cache, self._target = head.new_cache(target.batch, target.slots), target
        self._tokens_BS = torch.zeros(target.batch, target.slots, dtype=torch.int64, device=target.lengths.device)
        """Text by slot: prompts from the host, and on a CPU what plain rounds emit; other tokens from the device."""
        self._new: set[int] = set()  # rows of whose text the host has written only the prompt
        self._in_flight: set[int] = set()  # rows that the last draft has read further than the host knew
        self._max_lead = 1 + max(shape.nodes for shape in shapes)
        self._lead = min(2, self._max_lead)

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        self.cache.begin_text(row, tokens, reuse=reuse)
        self._note(row, 0, tokens)
        self._new.add(row)
        self._in_flight.discard(row)

    @torch.inference_mode()
    def read(self, row: int, tokens: list[int]) -> None:
        cached_ids = self.cache.cached_ids[row]
        own, target = self.cache.rows(row, row + 1), self._target.rows(row, row + 1)
        for first in range(max(0, len(cached_ids) - 1), len(tokens) - 1, CHUNK):
            end = min(first + CHUNK, len(tokens) - 1)
            own.lengths.fill_(first)
            self._read(self._tokens_BS[row : row + 1], target, end - first, own)
        cached_ids += tokens[len(cached_ids) :]

    def _read(self, tokens_BS: Tensor, target: StaticKVCache, num: int, own: StaticKVCache) -> None:
        """Read `num` places with the head."""
        assert target.features is not None
        self.head.read(tokens_BS, target.features, num, own)

    def catch_up(
        self,
        texts: Mapping[int, list[int]],
        idle: bool,
        plain: Collection[int] = (),
        coming: Mapping[int, int] = NOTHING,
    ) -> None:
        self._lead = 1
        for row, text in texts.items():
            cached_ids, more = self.cache.cached_ids[row], coming.get(row, 0)
            if row in self._new or (idle and not self.commits_plain_rounds):
                self._note(row, len(cached_ids), text)
                self._new.discard(row)
            if row in self._in_flight and not idle:
                cached_ids += text[len(cached_ids) :]  # the host knows by now what the last draft has read
            if len(text) + more - len(cached_ids) > self._max_lead:
                self.read(row, text if more else text[:-1])
            self._lead = max(self._lead, len(text) + more - len(cached_ids))
            cached_ids += text[len(cached_ids) :]  # the draft's first step reads these
        self._in_flight = set(coming)

    def _note(self, row: int, first: int, tokens: list[int]) -> None:
        upload(self._tokens_BS[row, first : len(tokens)], tokens[first:])

    def draft(self, context: DraftContext, shape: DraftShape) -> DraftTree:
        if self not in context.generators:
            rows = context.first, context.end
            replayed = context.graphs is not None  # and of one size, then
            stepper = self._stepper(
                replayed,
                self.head,
                self.cache.rows(*rows),
                self._target.rows(*rows),
                self._tokens_BS[slice(*rows)],
                lambda: self._max_lead if replayed else self._lead,
            )
            context.generators[self] = DraftGenerator(stepper, context, shapes=self.shapes, branching=self._branching)
        tree: DraftTree = context.generators[self].draft(shape)
        return tree

    def _stepper(self, replayed: bool, *reading: Any) -> DraftStepper:
        """Create the stepper of the head; `reading` are arguments of `HeadStepper`."""
        return _FeatureStepper(*reading, num_states=1 + (self._branching * self.shapes[-1].depth if self.trees else 0))

    def commit(self, context: DraftContext, tree: DraftTree, verified: VerifyResult, logits_BTV: Tensor) -> None:
        rows = slice(context.first, context.end)  # the target has kept the features
        at_B = self._target.lengths[rows]
        append_tokens(self._tokens_BS[rows], context.root_B, at_B, verified.num_new, verified.tokens)

    def forget(self) -> None:
        self.cache.forget()

    def extra_bytes(self) -> tuple[int, int]:
        features = self._target.features
        return self._weight_bytes, self.cache.nbytes + (0 if features is None else features.nbytes)


class HeadStepper:
    """Stepper that reads last places from the target's features, then drafts."""

    def __init__(
        self, head: Head, own: StaticKVCache, target: StaticKVCache, tokens_BS: Tensor, lead: Callable[[], int]
    ) -> None:
        """`lead`: number of last places that the first step reads."""
        self._target, self._tokens_BS, self._lead = target, tokens_BS, lead
        self.ids: Tensor | None = None if head.ids is None else head.get_buffer("ids")
        self.logit_noise: float | None = None
        self._draft_cache = own.draft_view()
        self.root_pos_B, self.next_pos_B = target.lengths, torch.zeros_like(target.lengths)

    def _read_inputs(self) -> tuple[Tensor, Tensor, int, StaticKVCache, Tensor]:
        num = self._begin()
        assert self._target.features is not None
        return self._tokens_BS, self._target.features, num, self._draft_cache, self.root_pos_B

    def _begin(self) -> int:
        """Return the number of places to read from `_draft_cache.lengths` on."""
        places_B, num = self._draft_cache.lengths, self._lead()
        torch.sub(self.root_pos_B, num, out=places_B)
        places_B.clamp_(min=0)  # reads past the end of shorter rows are ignored
        torch.add(self.root_pos_B, 1, out=self.next_pos_B)
        return num


class _FeatureStepper(HeadStepper):
    """Stepper of heads that continue from their own states."""

    def __init__(self, head: FeatureHead, *reading: Any, num_states: int) -> None:
        super().__init__(head, *reading)
        self._head, D = head.steps, head.config.block.hidden_size
        self._states_BPD = torch.zeros(len(self.root_pos_B), num_states, D, **head.place)
        """State of the root or chain's last token, then of tree nodes."""

    def start(self) -> Tensor:
        logits_B1K: Tensor | None = self._head.read(*self._read_inputs(), self._states_BPD)
        assert logits_B1K is not None
        self._draft_cache.lengths.copy_(self.root_pos_B)
        return logits_B1K

    def step(self, tokens_BF: Tensor, tree_mask: TreeAttentionMask | None = None) -> Tensor:
        logits_BFK: Tensor = self._head.step(tokens_BF, self._states_BPD, self._draft_cache, tree_mask)
        if tree_mask is None:
            self._draft_cache.lengths += 1
            self.next_pos_B += 1
        return logits_BFK


def build(inputs: BuildInputs) -> EagleDrafter:
    return build_head_drafter(EagleDrafter, inputs)


def build_head_drafter(drafter: type[EagleDrafter], inputs: BuildInputs) -> EagleDrafter:
    """Build a drafter around the head of its mode."""
    head = inputs.heads[drafter.name]
    return drafter(head, inputs.cache, shapes=inputs.shapes, weight_bytes=num_bytes(head), branching=inputs.branching)
