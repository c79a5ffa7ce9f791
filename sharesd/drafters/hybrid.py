"""Several drafters, and in each round what promises most tokens per second.

Tables guess for next to nothing, so they are asked unless even that does not pay; their trees are merged into one. A
model drafter takes time, so it drafts only where its running acceptance promises more than the tables' scores do. Then
the tables fill up its draft: with branches beside it, and with what might come after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compile.topk import top_k
from sharesd.decoding.policy import Policy
from sharesd.decoding.tree import PLAIN, DraftTree, Shape, Verdict, chains, model_shape, pack, parents_of
from sharesd.drafters.base import Drafter, Drafting
from sharesd.drafters.tables.base import Guess, Table, best_chain, merge, nothing, spine, weave


class HybridDrafter:
    """Tables, perhaps just one, and a model drafter or none."""

    on_host = True
    reads = False

    def __init__(
        self, name: str, tables: Sequence[Table], model: Drafter | None = None, *, num_nodes: int, trees: bool
    ) -> None:
        """Without a model at most `num_nodes` are drafted. `trees`: the target can verify them; else the best chain is
        used.
        """
        self.name, self.trees = name, trees
        self.shapes = model.shapes if model else chains(num_nodes)
        self.tables, self.model_drafter = tuple(tables), model
        self._idle = 0  # rounds since the model drafted
        self._woven = False  # whether the last draft has nodes of both
        self._num_successors = max((table.num_successors for table in tables), default=0)
        self._seen: list[list[int]] = []  # of each row of a round: tokens read, the likeliest ones after each

    def begin(self, prompts: list[list[int]], num_kept: list[int], drafting: Drafting, policy: Policy) -> None:
        self._policy, self._other_rule = policy, drafting.sampler.wants_probs
        self._known = [len(row) for row in prompts]
        for table in self.tables:
            for row, tokens in enumerate(prompts):
                table.begin(row, tokens)
        if self.model_drafter is not None:
            known = [0] * len(prompts) if self._idle or self._woven else num_kept
            self.model_drafter.begin(prompts, known, drafting, policy)
        self._seen, self._idle, self._woven = [], 0, False

    def catch_up(self, texts: list[list[int]], idle: bool) -> None:
        self._idle += idle
        self._texts = texts

    def draft(self, shape: Shape) -> DraftTree:
        policy, looks = self._policy, self._policy.looks()
        guesses, num_nodes, rate = [nothing() for _ in self._known], 0, policy.rate_of_shape(PLAIN)
        if looks:
            self._read()
            guesses = [self._guess(row, shape.nodes) for row in range(len(self._known))]
            num_nodes, rate = policy.worth([guesses[row].scores for row in policy.awaited])
        if self.model_drafter is not None:
            policy.known_place = num_nodes > 0
            model = policy.next_shape(beside=rate if num_nodes else None)
            if model.nodes:
                self.model_drafter.catch_up(self._texts, self._idle > 0 or self._woven)
                self._idle, self._woven = 0, False
                draft = self.model_drafter.draft(model)
                return self._fill_up(draft, guesses) if looks else draft
            self._idle += 1
        if looks:
            policy.looked(rate, policy.rate_of_shape(PLAIN))
        if self._other_rule:  # which knows no rows with fewer nodes than others
            num_nodes = min(num_nodes, *(len(guess.tokens) for guess in guesses))
        return pack(guesses, num_nodes, self._names)

    def _fill_up(self, draft: DraftTree, guesses: list[Guess]) -> DraftTree:
        """A model's draft with nodes of the tables, where that pays: after the root, and after its best chain."""
        shape = model_shape(draft)
        room = self._policy.most() - shape.nodes
        if room <= 0 or not self.tables or not self.trees or self._other_rule:
            return draft
        chances, rows = self._policy.chances(shape), []
        for row, (tokens, parents) in enumerate(zip(draft.tokens.tolist(), parents_of(draft), strict=True)):
            model = Guess(tokens, parents, chances)
            chain = spine(model)
            after = self._ask(row, room, [tokens[node] for node in chain])
            rows.append(weave(model, [(-1, guesses[row]), (chain[-1], after)]))
        num_added, rate = self._policy.worth(
            [rows[row].scores[shape.nodes :] for row in self._policy.awaited], beside=shape
        )
        self._policy.looked(rate, self._policy.rate_of_shape(shape))
        if num_added == 0:
            return draft
        self._woven = True
        tree = pack(rows, shape.nodes + num_added, draft.drafter)
        return tree._replace(num_steps=draft.num_steps, recent=draft.recent, added=num_added, adder=self._names)

    def _read(self) -> None:
        """Let the tables know what they missed."""
        for seen in self._seen:
            numbers_RX = np.array(seen).reshape(-1, 1 + self._num_successors)
            numbers_RX = numbers_RX[numbers_RX[:, 0] >= 0]  # rows without a node
            for table in self.tables:
                if table.num_successors:
                    table.learn(numbers_RX[:, 0], numbers_RX[:, 1:])
        self._seen = []
        for row, text in enumerate(self._texts):
            new = text[self._known[row] :]
            if new:
                for table in self.tables:
                    table.extend(row, new)
                self._known[row] = len(text)

    @property
    def _names(self) -> str:
        return "+".join(table.name for table in self.tables)

    def _guess(self, row: int, num_nodes: int) -> Guess:
        guess = self._ask(row, num_nodes)
        return guess if self.trees and not self._other_rule else best_chain(guess)

    def _ask(self, row: int, num_nodes: int, ahead: Sequence[int] = ()) -> Guess:
        return merge([table.guess(row, num_nodes, ahead) for table in self.tables])

    def commit(self, root_B: Tensor, tree: DraftTree, verdict: Verdict, logits_BTV: Tensor) -> Tensor | None:
        if self.model_drafter is not None and tree.num_steps and not tree.added:
            self.model_drafter.commit(root_B, tree, verdict, logits_BTV)
        if not self._num_successors:
            return None
        read_BT = torch.cat([root_B[:, None], tree.tokens], 1)
        successors_Rk = top_k(logits_BTV.flatten(0, 1), self._num_successors)
        return torch.cat([read_BT[..., None], successors_Rk.view(*read_BT.shape, -1)], 2).flatten(1)

    def told(self, rows: list[list[int]]) -> None:
        if self._num_successors:
            self._seen += rows

    def extra_bytes(self) -> tuple[int, int]:
        weights, kv = self.model_drafter.extra_bytes() if self.model_drafter else (0, 0)
        return weights + sum(table.nbytes for table in self.tables), kv
