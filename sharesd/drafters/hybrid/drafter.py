"""Several drafters, and in each round what promises most tokens per second.

Tables guess for next to nothing, so they are asked unless even that does not pay; their trees are merged into one. A
model drafter takes time, so it drafts only where its running acceptance promises more than the tables' scores do. Then
the tables fill up its draft: with branches beside it, and with what might come after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from compile.topk import top_k
from sharesd.drafters.base import NOTHING, Drafter, Drafting
from sharesd.drafters.tables.base import Table
from sharesd.speculation.draft_policy import FIRST_ALPHAS
from sharesd.speculation.draft_proposal import Guess, best_chain, merge, nothing, spine, weave
from sharesd.speculation.draft_tree import PLAIN, DraftTree, Shape, Verdict, chains, model_shape, pack, parents_of


class HybridDrafter:
    """Tables, perhaps just one, and a model drafter or none."""

    on_host = True
    reads = False
    ahead = False
    follows = True  # tables learn from the logits of plain rounds
    at_once = False

    def __init__(
        self, name: str, tables: Sequence[Table], model: Drafter | None = None, *, num_nodes: int, trees: bool
    ) -> None:
        """Without a model at most `num_nodes` are drafted. `trees`: the target can verify them; else the best chain is
        used.
        """
        self.name, self.trees = name, trees
        self.shapes = model.shapes if model else chains(num_nodes)
        self.first_alphas = model.first_alphas if model else FIRST_ALPHAS
        self.tables, self.model_drafter = tuple(tables), model
        self._idle = 0  # rounds since the model drafted
        self._woven = False  # whether the last draft has nodes of both
        self._num_successors = max((table.num_successors for table in tables), default=0)
        self._known: dict[int, int] = {}  # of each row: how much of its text the tables have seen
        self._texts: Mapping[int, list[int]] = {}
        self._plain: Collection[int] = ()
        self._seen: list[list[int]] = []  # of each row of a round: tokens read, the likeliest ones after each

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        for table in self.tables:
            table.begin(row, tokens)
        self._known[row] = len(tokens)
        if self.model_drafter is not None:
            self.model_drafter.begin(row, tokens, reuse)

    def read(self, row: int, tokens: list[int]) -> None:
        if self.model_drafter is not None:
            self.model_drafter.read(row, tokens)

    def missed(self, texts: Mapping[int, list[int]]) -> int:
        return 0 if self.model_drafter is None else self.model_drafter.missed(texts)

    def rehearse(self, drafting: Drafting, num: int) -> bool:
        return self.model_drafter is not None and self.model_drafter.rehearse(drafting, num)

    def catch_up(
        self,
        texts: Mapping[int, list[int]],
        idle: bool,
        plain: Collection[int] = (),
        coming: Mapping[int, int] = NOTHING,
    ) -> None:
        self._idle += idle
        self._texts, self._plain = texts, plain

    def draft(self, drafting: Drafting, shape: Shape) -> DraftTree:
        policy, rows, guesses = drafting.policy, range(drafting.first, drafting.end), dict[int, Guess]()
        other_rule = drafting.sampler.wants_probs
        looks = policy.looks()
        if not looks and self.model_drafter is None:
            return _no_nodes(drafting)
        early = None
        if looks and self.model_drafter is not None and drafting.graphs is not None:
            shape_ahead = policy.early_shape()
            early = self._model_draft(drafting, shape_ahead) if shape_ahead.nodes else None
        num_nodes, rate = 0, policy.rate_of_shape(PLAIN)
        if looks:
            self._read()
            chains_only = other_rule or not self.trees
            for row in self._texts.keys() - set(self._plain):
                guess = self._ask(row, shape.nodes)
                guesses[row] = best_chain(guess) if chains_only else guess
            num_nodes, rate = policy.worth([_of(guesses, row).scores for row in policy.awaited])
        if self.model_drafter is not None:
            policy.known_place = num_nodes > 0
            model = policy.next_shape(beside=rate if num_nodes else None)
            policy.chose(model, early is not None)
            if model.nodes:
                draft = early or self._model_draft(drafting, model)
                if looks and not other_rule:
                    return self._fill_up(drafting, draft, guesses)
                return draft
            self._idle += 1
        if looks:
            without = policy.rate_of_shape(PLAIN)
            if self.model_drafter is not None and num_nodes:
                without = max(without, policy.rate_of_shape(policy.best_shape()))
            policy.looked(rate / without - 1)
        if other_rule:  # which knows no rows with fewer nodes than others
            num_nodes = min([num_nodes, *(len(guess.tokens) for guess in guesses.values())])
        if not num_nodes:
            return _no_nodes(drafting)
        return pack([_of(guesses, row) for row in rows], num_nodes, self._names)

    def _model_draft(self, drafting: Drafting, shape: Shape) -> DraftTree:
        """A draft of the model alone."""
        assert self.model_drafter is not None
        self.model_drafter.catch_up(self._texts, self._idle > 0 or self._woven)
        self._idle, self._woven = 0, False
        return self.model_drafter.draft(drafting, shape)

    def _fill_up(self, drafting: Drafting, draft: DraftTree, guesses: Mapping[int, Guess]) -> DraftTree:
        """A model's draft with nodes of the tables, where that pays: after the root, and after its best chain."""
        policy, shape = drafting.policy, model_shape(draft)
        room = policy.most() - shape.nodes
        if room <= 0 or not self.tables or not self.trees:
            return draft
        chances, woven = policy.chances(shape), {}
        for row, tokens, parents in zip(
            range(drafting.first, drafting.end), draft.tokens.tolist(), parents_of(draft), strict=True
        ):
            woven[row] = model = Guess(tokens, parents, chances)
            if row in guesses:
                chain = spine(model.parents)
                after = self._ask(row, room, [tokens[node] for node in chain])
                woven[row] = weave(model, [(-1, guesses[row]), (chain[-1], after)])
        _, alone = policy.worth([()], beside=shape)
        num_added, rate = policy.worth([woven[row].scores[shape.nodes :] for row in policy.awaited], beside=shape)
        policy.looked(rate / alone - 1)
        if num_added == 0:
            return draft
        self._woven = True
        tree = pack(list(woven.values()), shape.nodes + num_added, draft.drafter)
        return tree._replace(
            num_steps=draft.num_steps, recent=draft.recent, kept=draft.kept, added=num_added, adder=self._names
        )

    def _read(self) -> None:
        """Let the tables know what they missed."""
        for seen in self._seen:
            numbers_RX = np.array(seen).reshape(-1, 1 + self._num_successors)
            numbers_RX = numbers_RX[numbers_RX[:, 0] >= 0]  # rows without a node
            for table in self.tables:
                if table.num_successors:
                    table.learn(numbers_RX[:, 0], numbers_RX[:, 1:])
        self._seen = []
        for row, text in self._texts.items():
            new = text[self._known[row] :]
            if new:
                for table in self.tables:
                    table.extend(row, new)
                self._known[row] = len(text)

    @property
    def _names(self) -> str:
        return "+".join(table.name for table in self.tables)

    def _ask(self, row: int, num_nodes: int, ahead: Sequence[int] = ()) -> Guess:
        return merge([table.guess(row, num_nodes, ahead) for table in self.tables])

    def commit(self, drafting: Drafting, tree: DraftTree, verdict: Verdict, logits_BTV: Tensor) -> Tensor | None:
        model = self.model_drafter
        if model is not None and (model.follows or (tree.num_steps and not tree.added)):
            model.commit(drafting, tree, verdict, logits_BTV)
        if not self._num_successors or not (drafting.graphs or drafting.policy.learns):
            return None
        read_BT = torch.cat([drafting.root_B[:, None], tree.tokens], 1)
        successors_Rk = top_k(logits_BTV.flatten(0, 1), self._num_successors)
        return torch.cat([read_BT[..., None], successors_Rk.view(*read_BT.shape, -1)], 2).flatten(1)

    def told(self, rows: list[list[int]]) -> None:
        if rows[0]:
            self._seen += rows

    def forget(self) -> None:
        if self.model_drafter is not None:
            self.model_drafter.forget()

    def extra_bytes(self) -> tuple[int, int]:
        weights, kv = self.model_drafter.extra_bytes() if self.model_drafter else (0, 0)
        return weights + sum(table.nbytes for table in self.tables), kv


def _no_nodes(drafting: Drafting) -> DraftTree:
    return DraftTree(drafting.root_B[:, None][:, :0])


def _of(guesses: Mapping[int, Guess], row: int) -> Guess:
    return guesses[row] if row in guesses else nothing()
