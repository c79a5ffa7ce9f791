"""A second model drafts (Leviathan et al. 2022; Chen et al. 2023): a smaller one, or a quantized copy of the target."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from sharesd.drafters.base import NOTHING, Drafting
from sharesd.drafters.draft_stepper import ModelGuesser
from sharesd.drafters.tree_draft import ModelDraft
from sharesd.models.base import CausalModel
from sharesd.models.prefill import next_padded_piece, next_piece, read_piece, reads_in_pieces
from sharesd.speculation.draft_policy import FIRST_ALPHAS, HEAD_ALPHAS
from sharesd.speculation.draft_tree import DraftTree, Shape, Verdict


class ClassicDrafter:
    """A model with its own KV cache.

    It may never have read the last token that was accepted, a leaf of its draft. Instead of tracking that, the first
    step of every draft reads two tokens, the one before the root and the root: of fixed shape, and exact either way.
    What its cache `held` leaves that token out.
    """

    name = "classic"
    on_host = False
    reads = True
    ahead = True
    follows = False
    at_once = False

    def __init__(
        self,
        model: CausalModel,
        *,
        batch: int,
        slots: int,
        shapes: Sequence[Shape],
        weight_bytes: int,
        top: int = 1,
        spread: float | None = None,
    ) -> None:
        """`top` is the number of nodes that a tree expands on each level, and of their children. `spread`: see
        Guesser.
        """
        self.model, self.shapes, self._top, self._weight_bytes = model, shapes, top, weight_bytes
        self._spread = spread
        self.first_alphas = HEAD_ALPHAS if spread is None else FIRST_ALPHAS
        self.trees = shapes[-1].is_tree
        self.cache = model.new_cache(batch, slots)
        self.cache.lengths.fill_(1)  # rows without a text have a token before the root, too
        self._before_B = torch.zeros_like(self.cache.lengths)  # the token before the root

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        shared = self.cache.shared(tokens) if reuse else [0] * self.cache.batch
        source = max(range(len(shared)), key=lambda other: (shared[other], other == row))
        self.cache.begin_row(row, tokens[: shared[source]], source)
        self.cache.lengths[row : row + 1].clamp_(min=1)  # drafts of others' rounds may look at the token before

    @torch.inference_mode()
    def read(self, row: int, tokens: list[int]) -> None:
        num_read, piece_of = len(self.cache.held[row]), next_padded_piece if reads_in_pieces(self.cache) else next_piece
        while num_read < len(tokens):
            piece = piece_of(self.model, self.cache, num_read, len(tokens))
            read_piece(self.model, self.cache, row, tokens, piece)
            num_read = piece.end
        self.cache.held[row] = list(tokens)
        self._before_B[row : row + 1].fill_(tokens[-1])

    def missed(self, texts: Mapping[int, list[int]]) -> int:
        return 0  # it waits for rounds in which nothing is missing (`reads`)

    def rehearse(self, drafting: Drafting, num: int) -> bool:
        return False

    def catch_up(
        self,
        texts: Mapping[int, list[int]],
        idle: bool,
        plain: Collection[int] = (),
        coming: Mapping[int, int] = NOTHING,
    ) -> None:
        for row, text in texts.items():
            held = self.cache.held[row]
            if idle:
                self.read(row, text[:-1])  # all but the root
            else:
                held += text[len(held) : -2]

    def draft(self, drafting: Drafting, shape: Shape) -> DraftTree:
        if self not in drafting.kept:
            before_B = self._before_B[drafting.first : drafting.end]
            drafting.kept[self] = ModelDraft(
                ModelGuesser(
                    self.model,
                    self.cache.rows(drafting.first, drafting.end),
                    lambda: torch.stack([before_B, drafting.root_B], 1),
                    spread=self._spread,
                ),
                drafting,
                shapes=self.shapes,
                top=self._top,
            )
        return drafting.kept[self].draft(shape)._replace(drafter=self.name)

    def commit(self, drafting: Drafting, tree: DraftTree, verdict: Verdict, logits_BTV: Tensor) -> None:
        cache = self.cache.rows(drafting.first, drafting.end)
        if tree.places is not None:
            cache.keep(tree.places.gather(1, verdict.path), verdict.num_new)
        cache.lengths += verdict.num_new
        before_B = self._before_B[drafting.first : drafting.end]
        history_BT = torch.cat([before_B[:, None], drafting.root_B[:, None], verdict.tokens], 1)
        before_B.copy_(history_BT.gather(1, verdict.num_new[:, None])[:, 0])

    def told(self, rows: list[list[int]]) -> None:
        pass

    def forget(self) -> None:
        self.cache.forget()

    def extra_bytes(self) -> tuple[int, int]:
        return self._weight_bytes, self.cache.nbytes
