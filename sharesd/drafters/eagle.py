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

import torch
from torch import Tensor

from compile.attention import Branches
from sharesd.decoding.cache import StaticKVCache
from sharesd.decoding.prefill import CHUNK
from sharesd.decoding.tree import DraftTree, Shape, Verdict
from sharesd.drafters.base import Drafting
from sharesd.drafters.grown import ModelDraft
from sharesd.drafters.guesser import Guesser
from sharesd.models.heads.head import Head


class EagleDrafter:
    """A head, with a KV cache of its own. Of the tokens that its cache `held` it has read all places but the last."""

    name = "eagle"
    on_host = False
    reads = False  # a pass of one block over the missed tokens
    ahead = False  # the host tells it the tokens of other drafters' rounds
    at_once = False

    def __init__(
        self, head: Head, target: StaticKVCache, *, shapes: Sequence[Shape], weight_bytes: int, top: int = 1
    ) -> None:
        """`target` is the target's cache, with the features that the head reads. `top` is the number of nodes that a
        tree expands on each level, and of their children.
        """
        self.head, self.shapes, self._top, self._weight_bytes = head, shapes, top, weight_bytes
        self.trees = shapes[-1].is_tree
        self.cache, self._target = head.new_cache(target.batch, target.slots), target
        self._tokens_BS = torch.zeros(target.batch, target.slots, dtype=torch.int64, device=target.lengths.device)
        self._most_lead = 1 + max(shape.nodes for shape in shapes)
        self._lead = min(2, self._most_lead)

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        shared = self.cache.shared(tokens) if reuse else [0] * self.cache.batch
        source = max(range(len(shared)), key=lambda other: (shared[other], other == row))
        self.cache.begin_row(row, tokens[: shared[source]], source)
        self._note(row, 0, tokens)

    @torch.inference_mode()
    def read(self, row: int, tokens: list[int]) -> None:
        held = self.cache.held[row]
        own, target = self.cache.rows(row, row + 1), self._target.rows(row, row + 1)
        assert target.features is not None
        for first in range(max(0, len(held) - 1), len(tokens) - 1, CHUNK):
            end = min(first + CHUNK, len(tokens) - 1)
            own.lengths.fill_(first)
            tokens_1T = self._tokens_BS[row : row + 1, first + 1 : end + 1]
            self.head(tokens_1T, self.head.fuse(target.features[:, first:end]), own)
        held += tokens[len(held) :]

    def catch_up(self, texts: Mapping[int, list[int]], idle: bool, plain: Collection[int] = ()) -> None:
        self._lead = 1
        for row, text in texts.items():
            held = self.cache.held[row]
            self._note(row, len(held), text)
            if len(text) - len(held) > self._most_lead:
                self.read(row, text[:-1])
            self._lead = max(self._lead, len(text) - len(held))
            held += text[len(held) :]  # the draft's first step reads these

    def _note(self, row: int, first: int, tokens: list[int]) -> None:
        """The tokens of a row's text, from the first new one on."""
        self._tokens_BS[row, first : len(tokens)] = torch.tensor(tokens[first:], device=self._tokens_BS.device)

    def draft(self, drafting: Drafting, shape: Shape) -> DraftTree:
        if self not in drafting.kept:
            rows = drafting.first, drafting.end
            replayed = drafting.graphs is not None  # and of one size, then
            reader = NewPlaces(
                self.head,
                self.cache.rows(*rows),
                self._target.rows(*rows),
                self._tokens_BS[slice(*rows)],
                lambda: self._most_lead if replayed else self._lead,
            )
            guesser = self._guesser(reader, replayed)
            drafting.kept[self] = ModelDraft(guesser, drafting, shapes=self.shapes, top=self._top)
        return drafting.kept[self].draft(shape)._replace(drafter=self.name)

    def _guesser(self, reader: NewPlaces, replayed: bool) -> Guesser:
        """How the head guesses, behind what it reads of some rows; `replayed`: in steps of one size."""
        return _StepGuesser(reader, num_states=1 + (self._top * self.shapes[-1].depth if self.trees else 0))

    def commit(self, drafting: Drafting, tree: DraftTree, verdict: Verdict, logits_BTV: Tensor) -> None:
        pass  # the target has kept the features, and the host knows the tokens

    def told(self, rows: list[list[int]]) -> None:
        pass

    def forget(self) -> None:
        self.cache.forget()

    def extra_bytes(self) -> tuple[int, int]:
        features = self._target.features
        return self._weight_bytes, self.cache.nbytes + (0 if features is None else features.nbytes)


class NewPlaces:
    """What a head reads of some rows before it guesses: their last places, from the target's features."""

    def __init__(
        self, head: Head, own: StaticKVCache, target: StaticKVCache, tokens_BS: Tensor, lead: Callable[[], int]
    ) -> None:
        """`lead`: how many of the last places are read."""
        self.head, self.ahead, self.root_at_B = head, own.ahead(), target.lengths
        self._target, self._tokens_BS, self._lead = target, tokens_BS, lead

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens behind the places [B, R], the fused features [B, R, D], and which of them, [B, 1], is the root's.

        The lengths of `ahead` are where the places begin.
        """
        at_B, places_B, R = self.root_at_B, self.ahead.lengths, self._lead()
        assert self._target.features is not None
        torch.sub(at_B, R, out=places_B)
        places_B.clamp_(min=0)  # of shorter texts, what is read behind them nobody sees
        places_BR = places_B[:, None] + torch.arange(R, device=at_B.device)
        features_BRF = self._target.features.gather(1, each(places_BR, self._target.features))
        last_B1 = (at_B - 1 - places_B).clamp(min=0)[:, None]
        return self._tokens_BS.gather(1, places_BR + 1), self.head.fuse(features_BRF), last_B1


class _StepGuesser:
    """A head as `sharesd.drafters.guesser.Guesser`: where the target has no features yet, its own states go on."""

    def __init__(self, reader: NewPlaces, num_states: int) -> None:
        self._head, self._reader, self._ahead = reader.head, reader, reader.ahead
        self.root_at_B, self.next_at_B = reader.root_at_B, torch.zeros_like(reader.root_at_B)
        D = self._head.config.block.hidden_size
        self._states_BPD = torch.zeros(len(self.root_at_B), num_states, D, **self._head.place)
        """Of the root, or of the last guess of a chain; and of the nodes of a tree, by where they are written."""

    def start(self) -> Tensor:
        tokens_BR, fused_BRD, last_B1 = self._reader.read()
        states_BRD = self._head(tokens_BR, fused_BRD, self._ahead)
        self._states_BPD[:, :1] = states_BRD.gather(1, each(last_B1, states_BRD))
        self._ahead.lengths.copy_(self.root_at_B)
        torch.add(self.root_at_B, 1, out=self.next_at_B)
        return self._head.logits(self._states_BPD[:, :1])

    def go_on(self, tokens_BF: Tensor, branches: Branches | None = None) -> Tensor:
        states_BPD = self._states_BPD
        if branches is None:
            states_BPD[:, :1] = self._head(tokens_BF, states_BPD[:, :1], self._ahead)
            self._ahead.lengths += 1
            self.next_at_B += 1
            return self._head.logits(states_BPD[:, :1])
        depth_BF, path_BFP = branches
        own_BF = path_BFP.gather(2, depth_BF[..., None])[..., 0] + 1
        above_BF = path_BFP.gather(2, (depth_BF - 1).clamp(min=0)[..., None])[..., 0] + 1
        above_BF = above_BF.where(depth_BF > 0, 0)
        states_BFD = self._head(tokens_BF, states_BPD.gather(1, each(above_BF, states_BPD)), self._ahead, branches)
        states_BPD.scatter_(1, each(own_BF, states_BPD), states_BFD)
        return self._head.logits(states_BFD)


def each(index_BX: Tensor, values_BYZ: Tensor) -> Tensor:
    """Indices [B, X, Z] of whole entries."""
    return index_BX[..., None].expand(-1, -1, values_BYZ.shape[2])
