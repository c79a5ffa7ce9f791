"""A trained head drafts step by step, from the hidden states that the target keeps beside its KV (EAGLE, EAGLE-2 and
EAGLE-3).

Place t of the head's own cache holds what it makes of the target's features of token t and of the token behind it. All
that is known of a text the head has read from the target's own features, whoever drafted meanwhile; what it wrote above
while it guessed, from states of its own, is overwritten by the first step of the next draft. So its cache needs no
rollback, and nothing moves with an accepted path.

Legend: B rows, R places of a draft's first step, S slots, F features, P states that guesses may go on from, D hidden
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compile.attention import Branches
from compile.state_update import note_text
from sharesd.devices.host_buffers import write
from sharesd.drafters.base import NOTHING, Drafting
from sharesd.drafters.draft_stepper import Guesser
from sharesd.drafters.heads.head import FeatureHead, Head
from sharesd.drafters.tree_draft import ModelDraft
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.prefill import CHUNK
from sharesd.speculation.draft_policy import HEAD_ALPHAS
from sharesd.speculation.draft_tree import DraftTree, Shape, Verdict


class EagleDrafter:
    """A head, with a KV cache of its own. Of the tokens that its cache `held` it has read all places but the last."""

    name = "eagle"
    on_host = False
    reads = False  # a pass of one block over the missed tokens
    ahead = True
    follows = True  # it reads the tokens of all rounds
    first_alphas = HEAD_ALPHAS
    at_once = False

    def __init__(
        self, head: Any, target: StaticKVCache, *, shapes: Sequence[Shape], weight_bytes: int, top: int = 1
    ) -> None:
        """`target` is the target's cache, with the features that the head reads. `top` is the number of nodes that a
        tree expands on each level, and of their children.
        """
        self.head, self.shapes, self._top, self._weight_bytes = head, shapes, top, weight_bytes
        self.trees = shapes[-1].is_tree
        self.cache, self._target = head.new_cache(target.batch, target.slots), target
        self._tokens_BS = torch.zeros(target.batch, target.slots, dtype=torch.int64, device=target.lengths.device)
        """Each row's text: prompts are written by the host, and what comes out where it comes out."""
        self._new: set[int] = set()  # rows of whose text the host has written the prompt alone
        self._in_flight: set[int] = set()  # rows that the last draft has read further than the host knew
        self._most_lead = 1 + max(shape.nodes for shape in shapes)
        self._lead = min(2, self._most_lead)

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        shared = self.cache.shared(tokens) if reuse else [0] * self.cache.batch
        source = max(range(len(shared)), key=lambda other: (shared[other], other == row))
        self.cache.begin_row(row, tokens[: shared[source]], source)
        self._note(row, 0, tokens)
        self._new.add(row)
        self._in_flight.discard(row)

    @torch.inference_mode()
    def read(self, row: int, tokens: list[int]) -> None:
        held = self.cache.held[row]
        own, target = self.cache.rows(row, row + 1), self._target.rows(row, row + 1)
        for first in range(max(0, len(held) - 1), len(tokens) - 1, CHUNK):
            end = min(first + CHUNK, len(tokens) - 1)
            own.lengths.fill_(first)
            self._read(self._tokens_BS[row : row + 1], target, end - first, own)
        held += tokens[len(held) :]

    def missed(self, texts: Mapping[int, list[int]]) -> int:
        missing = (len(text) - len(self.cache.held[row]) for row, text in texts.items())
        return sum(num - 1 for num in missing if num > self._most_lead)

    @torch.inference_mode()
    def rehearse(self, drafting: Drafting, num: int) -> bool:
        row, target = drafting.first, self._target.rows(drafting.first, drafting.first + 1)
        ahead = self.cache.rows(row, row + 1).ahead()
        ahead.lengths.copy_(target.lengths.clamp(max=target.slots - num - 1))
        self._read(self._tokens_BS[row : row + 1], target, num, ahead)
        return True

    def _read(self, tokens_BS: Tensor, target: StaticKVCache, num: int, own: StaticKVCache) -> None:
        """Have the head read so many places."""
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
            held, more = self.cache.held[row], coming.get(row, 0)
            if row in self._new:
                self._note(row, len(held), text)
                self._new.discard(row)
            if row in self._in_flight and not idle:
                held += text[len(held) :]  # the host knows by now what the last draft has read
            if len(text) + more - len(held) > self._most_lead:
                self.read(row, text if more else text[:-1])
            self._lead = max(self._lead, len(text) + more - len(held))
            held += text[len(held) :]  # the draft's first step reads these
        self._in_flight = set(coming)

    def _note(self, row: int, first: int, tokens: list[int]) -> None:
        """The tokens of a row's text, from the first new one on."""
        write(self._tokens_BS[row, first : len(tokens)], tokens[first:])

    def draft(self, drafting: Drafting, shape: Shape) -> DraftTree:
        if self not in drafting.kept:
            rows = drafting.first, drafting.end
            replayed = drafting.graphs is not None  # and of one size, then
            guesser = self._guesser(
                replayed,
                self.head,
                self.cache.rows(*rows),
                self._target.rows(*rows),
                self._tokens_BS[slice(*rows)],
                lambda: self._most_lead if replayed else self._lead,
            )
            drafting.kept[self] = ModelDraft(guesser, drafting, shapes=self.shapes, top=self._top)
        return drafting.kept[self].draft(shape)._replace(drafter=self.name)

    def _guesser(self, replayed: bool, *reading: Any) -> Guesser:
        """How the head guesses; `reading` is for `HeadGuesser`."""
        return _StepGuesser(*reading, num_states=1 + (self._top * self.shapes[-1].depth if self.trees else 0))

    def commit(self, drafting: Drafting, tree: DraftTree, verdict: Verdict, logits_BTV: Tensor) -> None:
        rows = slice(drafting.first, drafting.end)  # the target has kept the features
        at_B = self._target.lengths[rows]
        note_text(self._tokens_BS[rows], drafting.root_B, at_B, verdict.num_new, verdict.tokens)

    def told(self, rows: list[list[int]]) -> None:
        pass

    def forget(self) -> None:
        self.cache.forget()

    def extra_bytes(self) -> tuple[int, int]:
        features = self._target.features
        return self._weight_bytes, self.cache.nbytes + (0 if features is None else features.nbytes)


class HeadGuesser:
    """What reads the last places of some rows, from the target's features, before it guesses."""

    def __init__(
        self, head: Head, own: StaticKVCache, target: StaticKVCache, tokens_BS: Tensor, lead: Callable[[], int]
    ) -> None:
        """`lead`: how many of the last places the first step reads."""
        self._target, self._tokens_BS, self._lead = target, tokens_BS, lead
        self.ids: Tensor | None = None if head.ids is None else head.get_buffer("ids")
        self.spread: float | None = None
        self._ahead = own.ahead()
        self.root_at_B, self.next_at_B = target.lengths, torch.zeros_like(target.lengths)

    def _news(self) -> tuple[Tensor, Tensor, int, StaticKVCache, Tensor]:
        """Tokens and features by slot, how many places are read, the cache from whose lengths on, and where they end:
        what `FeatureHead.read` is given.
        """
        num = self._begin()
        assert self._target.features is not None
        return self._tokens_BS, self._target.features, num, self._ahead, self.root_at_B

    def _begin(self) -> int:
        """How many places are read, from the lengths of `_ahead` on."""
        places_B, num = self._ahead.lengths, self._lead()
        torch.sub(self.root_at_B, num, out=places_B)
        places_B.clamp_(min=0)  # of shorter texts, what is read behind them nobody sees
        torch.add(self.root_at_B, 1, out=self.next_at_B)
        return num


class _StepGuesser(HeadGuesser):
    """A head as `draft_stepper.Guesser`: above the target's last features it continues from its own states."""

    def __init__(self, head: FeatureHead, *reading: Any, num_states: int) -> None:
        super().__init__(head, *reading)
        self._head, D = head.steps, head.config.block.hidden_size
        self._states_BPD = torch.zeros(len(self.root_at_B), num_states, D, **head.place)
        """Of the root, or of the last guess of a chain; and of the nodes of a tree, by where they are written."""

    def start(self) -> Tensor:
        logits_B1K = self._head.read(*self._news(), self._states_BPD)
        assert logits_B1K is not None
        self._ahead.lengths.copy_(self.root_at_B)
        return logits_B1K

    def go_on(self, tokens_BF: Tensor, branches: Branches | None = None) -> Tensor:
        logits_BFK = self._head.go_on(tokens_BF, self._states_BPD, self._ahead, branches)
        if branches is None:
            self._ahead.lengths += 1
            self.next_at_B += 1
        return logits_BFK
