"""Random rounds over the rows of a cache: texts are read, drafted, verified, cancelled and shared."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from sharesd.models import prefill
from sharesd.models.decoder import Decoder
from tests.helpers.oracle import VOCAB, logits_of


class Rows:
    """Rows of a cache, in which texts known from the start are read, drafted, verified, cancelled and shared."""

    def __init__(self, model: Decoder, batch: int, seed: int) -> None:
        self.model, self.dice = model, random.Random(seed)
        self.cache = model.new_cache(batch, 448)
        self.texts: list[list[int]] = [[] for _ in range(batch)]  # of rows that are being decoded; [] otherwise
        self.seen: list[dict[int, Tensor]] = [{} for _ in range(batch)]  # logits after so many tokens
        self.num_shared = self.num_checked = 0

    def tokens(self, num: int) -> list[int]:
        return self.dice.choices(range(VOCAB), k=num)

    def join(self, row: int) -> None:
        """A text that begins as the text of any row, or a new one, is read in pieces."""
        source = self.dice.randrange(len(self.texts))
        cached = self.cache.cached_ids[source]
        shared = cached[: self.dice.randint(0, len(cached))] if self.dice.random() < 0.7 else []
        text = shared + self.tokens(self.dice.randint(2, self.dice.choice([8, 400])) if len(shared) < 370 else 20)
        text = text[:400]
        lengths = self.cache.shared_prefix_lengths(text[:-1])
        best = max(range(len(lengths)), key=lambda each: lengths[each])
        if best != row and not self.texts[best] and self.dice.random() < 0.3:
            self.cache.swap_rows(row, best)
            lengths[row], lengths[best], best = lengths[best], lengths[row], row
        self.cache.begin_row(row, text[: lengths[best]], best)
        self.num_shared += lengths[best] > 0
        num_read, end = lengths[best], self.dice.randint(lengths[best] + 1, len(text))
        self.seen[row] = {}
        while num_read < end:
            most = self.dice.choice([1, 8, 60, 512])
            piece = prefill.next_piece(self.model, self.cache, num_read, end, most)
            logits_RV = prefill.read_piece(self.model, self.cache, row, text[:end], piece)
            num_read = piece.end
            self.seen[row][num_read] = logits_RV[-1]
        self.cache.cached_ids[row], self.texts[row] = text[:end], text

    def end(self, row: int) -> None:
        """Compare a row's logits with those of its text read at once."""
        if self.texts[row]:
            wanted = logits_of(self.model, self.texts[row])
            for num, logits_V in self.seen[row].items():
                assert torch.equal(logits_V, wanted[num - 1]), (row, num)
            self.num_checked += len(self.seen[row])
        self.texts[row] = []

    def round(self) -> None:
        """Draft steps of wrong weights and tokens, a verify step of a chain or tree, and its commit."""
        B, N = len(self.texts), self.dice.choice([0, 0, 1, 4, 7])
        view = self.cache.draft_view()
        for step in range(self.dice.randint(0, 3)):
            view.lengths.copy_(self.cache.lengths + step)
            self.model.forward(torch.tensor([self.tokens(1) for _ in range(B)]), view)
        is_tree = N > 1 and self.dice.random() < 0.5
        parents = [-1, *(self.dice.randint(-1, i - 1) if is_tree else i - 1 for i in range(1, N))]
        paths = [[0]]  # rows from the root to each
        for node, parent in enumerate(parents[:N]):
            paths.append([*paths[parent + 1], node + 1])
        tokens, kept = [], []
        for row, text in enumerate(self.texts):
            done = len(self.cache.cached_ids[row])
            chosen = self.dice.choice(paths)[: len(text) - done] if text else []
            step = self.tokens(1 + N)
            for depth, at in enumerate(chosen):
                step[at] = text[done + depth]
            tokens.append(step)
            kept.append(chosen)
        mask = offset = None
        if is_tree:
            offset = self.dice.choice([0, 0, 9])
            path_TP = torch.tensor([path + [0] * (1 + N - len(path)) for path in paths]).repeat(B, 1, 1)
            mask = TreeAttentionMask(torch.tensor([len(path) - 1 for path in paths]).repeat(B, 1), path_TP + offset)
        logits_BTV = self.model.forward(torch.tensor(tokens), self.cache, tree_mask=mask)
        num_B = torch.tensor([len(chosen) for chosen in kept])
        if is_tree:
            path_BT = torch.tensor([chosen + [0] * (1 + N - len(chosen)) for chosen in kept])
            self.cache.compact(path_BT, num_B, offset or 0)
        self.cache.lengths += num_B
        for row, chosen in enumerate(kept):
            for at in chosen:
                self.cache.cached_ids[row].append(self.texts[row][len(self.cache.cached_ids[row])])
                self.seen[row][len(self.cache.cached_ids[row])] = logits_BTV[row, at]
            if self.texts[row] and len(self.cache.cached_ids[row]) >= len(self.texts[row]):
                self.end(row)


@torch.inference_mode()
def run_rounds(model: Decoder, num_rounds: int, seed: int) -> Rows:
    """Run rounds of three rows, whose logits are compared with those of one pass over each text."""
    rows = Rows(model, 3, seed)
    for _ in range(num_rounds):
        for row, text in enumerate(rows.texts):
            chance = rows.dice.random()
            if not text and chance < 0.5:
                rows.join(row)
            elif chance < 0.01:
                rows.end(row)  # cancelled
            elif chance < 0.015:
                rows.cache.discard_row(row)
                rows.cache.lengths[row], rows.texts[row] = 1, []
        rows.round()
    for row in range(3):
        rows.end(row)
    return rows
