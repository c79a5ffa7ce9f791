"""A second model drafts (Leviathan et al. 2022; Chen et al. 2023): a smaller one, or a quantized copy of the target."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from compile.attention import MAX_STEP
from compile.cuda_graphs import Graphs, Replayed
from sharesd.devices.host_buffers import write
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
        graphs: Graphs | None = None,
    ) -> None:
        """`top` is the number of nodes that a tree expands on each level, and of their children. `spread`: see
        Guesser. `graphs` capture how missed tokens are read.
        """
        self.model, self.shapes, self._top, self._weight_bytes = model, shapes, top, weight_bytes
        self._spread = spread
        self.first_alphas = HEAD_ALPHAS if spread is None else FIRST_ALPHAS
        self.trees = shapes[-1].is_tree
        self.cache = model.new_cache(batch, slots)
        self.cache.lengths.fill_(1)  # rows without a text have a token before the root, too
        self._before_B = torch.zeros_like(self.cache.lengths)  # the token before the root
        self._graphs = graphs if slots >= MAX_STEP else None
        self._chunk = self._before_B.new_zeros(MAX_STEP + 3)  # tokens, the first one's place, their end, the last one
        self._chunks: dict[int, Replayed[None]] = {}  # by row

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

    def _read_missed(self, row: int, tokens: list[int]) -> None:
        """`read` in chunks of one size, each a replay."""
        held, num_read = self.cache.held[row], len(self.cache.held[row])
        if row not in self._chunks:
            self._chunks[row] = Replayed(partial(self._read_chunk, row), self._graphs)
        while num_read < len(tokens):
            first, end = min(num_read, self.cache.slots - MAX_STEP), min(num_read + MAX_STEP, len(tokens))
            padding = [0] * (MAX_STEP - (end - first))
            write(self._chunk, [*tokens[first:end], *padding, first, end, tokens[end - 1]])
            self._chunks[row]()
            num_read = end
        held += tokens[len(held) :]

    def _read_chunk(self, row: int) -> None:
        view, (tokens_T, first_1, end_1, last_1) = self.cache.rows(row, row + 1), self._chunk.split([MAX_STEP, 1, 1, 1])
        view.lengths.copy_(first_1)
        self.model.forward(tokens_T[None], view, torch.zeros_like(first_1)[None])
        view.lengths.copy_(end_1)
        self._before_B[row : row + 1].copy_(last_1)

    def missed(self, texts: Mapping[int, list[int]]) -> int:
        return 0  # it waits for rounds in which nothing is missing (`reads`)

    def rehearse(self, drafting: Drafting, num: int) -> bool:
        return False

    @torch.inference_mode()
    def catch_up(
        self,
        texts: Mapping[int, list[int]],
        idle: bool,
        plain: Collection[int] = (),
        coming: Mapping[int, int] = NOTHING,
    ) -> None:
        for row, text in texts.items():
            held = self.cache.held[row]
            if idle and self._graphs is not None and len(held) < len(text) - 1:
                self._read_missed(row, text[:-1])  # all but the root
            elif idle:
                self.read(row, text[:-1])
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
