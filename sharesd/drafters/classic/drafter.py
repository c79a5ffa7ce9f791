"""Second-model drafting (Leviathan et al. 2022; Chen et al. 2023).

Legend: B rows, T tokens, R of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from compile.attention import MAX_STEP, TreeAttentionMask
from compile.cuda_graphs import Graphs, Replayed
from sharesd.devices.transfer import upload
from sharesd.drafters.base import NOTHING, BuildInputs, DraftContext, Drafter
from sharesd.drafters.chain_draft import ModelStepper
from sharesd.drafters.selection import second_model
from sharesd.drafters.tree_draft import DraftGenerator
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.models.prefill import next_padded_piece, next_piece, read_piece, reads_in_pieces
from sharesd.speculation.draft_tree import DraftShape, DraftTree, VerifyResult


class CommonVocabulary:
    """A model limited to the ids that it shares with the target.

    Its logits are for ids 0 to before `vocab_size`, the smaller one of both. Other ids of a text are read as the last
    one.
    """

    def __init__(self, model: CausalModel, target_vocab_size: int) -> None:
        self._model, self._max_id = model, model.vocab_size - 1
        self._reads_all = model.vocab_size >= target_vocab_size
        self._drafts_all = model.vocab_size <= target_vocab_size
        self.vocab_size = min(model.vocab_size, target_vocab_size)
        self.name, self.max_context, self.eos_ids = model.name, model.max_context, model.eos_ids
        self.takes_trees, self.step_widths = model.takes_trees, model.step_widths

    def new_cache(self, batch: int, slots: int, taps: Sequence[int] = ()) -> StaticKVCache:
        """See `sharesd.models.base.CausalModel.new_cache`."""
        return self._model.new_cache(batch, slots, taps)

    def forward(
        self,
        tokens_BT: Tensor,
        cache: StaticKVCache,
        keep_BR: Tensor | None = None,
        tree_mask: TreeAttentionMask | None = None,
    ) -> Tensor:
        """See `sharesd.models.base.CausalModel.forward`."""
        tokens_BT = tokens_BT if self._reads_all else tokens_BT.clamp(max=self._max_id)
        logits_BRV = self._model.forward(tokens_BT, cache, keep_BR, tree_mask)
        return logits_BRV if self._drafts_all else logits_BRV[..., : self.vocab_size]


class ClassicDrafter(Drafter):
    """A model with its own KV cache.

    It may never have read the last accepted token, a leaf of its draft, which `cached_ids` omits. So the first step of
    every draft reads two tokens, the one before the root and the root: of fixed shape, and exact.
    """

    name = "classic"
    needs_catch_up = True
    supports_async = True

    def __init__(
        self,
        model: CausalModel,
        *,
        batch: int,
        slots: int,
        shapes: Sequence[DraftShape],
        weight_bytes: int,
        branching: int = 1,
        logit_noise: float | None = None,
        prior: float = 0.0,
        graphs: Graphs | None = None,
        target_vocab_size: int | None = None,
    ) -> None:
        """`graphs`: capture the reading of missed tokens. `logit_noise`: see `Sampler.draft`.

        `target_vocab_size`: None if it is the model's.
        """
        if target_vocab_size not in (None, model.vocab_size):
            model = CommonVocabulary(model, target_vocab_size)
        self.model, self.shapes, self._branching, self._weight_bytes = model, shapes, branching, weight_bytes
        self._logit_noise, self.prior = logit_noise, prior
        self.trees = shapes[-1].is_tree
        self.cache = model.new_cache(batch, slots)
        self.cache.lengths.fill_(1)  # rows without a text have a token before the root, too
        self._before_B = torch.zeros_like(self.cache.lengths)  # the token before the root
        self._ids: Tensor | None = None
        if target_vocab_size is not None and model.vocab_size < target_vocab_size:
            self._ids = torch.arange(model.vocab_size, device=self._before_B.device)
        self._graphs = graphs if slots >= MAX_STEP else None
        self._chunk = self._before_B.new_zeros(MAX_STEP + 3)  # tokens, the first one's place, their end, the last one
        self._chunks: dict[int, Replayed[None]] = {}  # by row

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        self.cache.begin_text(row, tokens, reuse=reuse)
        self.cache.lengths[row : row + 1].clamp_(min=1)  # a draft for other rows may read the token before

    @torch.inference_mode()
    def read(self, row: int, tokens: list[int]) -> None:
        num_read, piece_of = (
            len(self.cache.cached_ids[row]),
            next_padded_piece if reads_in_pieces(self.cache) else next_piece,
        )
        while num_read < len(tokens):
            piece = piece_of(self.model, self.cache, num_read, len(tokens))
            read_piece(self.model, self.cache, row, tokens, piece)
            num_read = piece.end
        self.cache.cached_ids[row] = list(tokens)
        self._before_B[row : row + 1].fill_(tokens[-1])

    def _read_missed(self, row: int, tokens: list[int]) -> None:
        """`read` in chunks of one size, each a replay."""
        cached_ids, num_read = self.cache.cached_ids[row], len(self.cache.cached_ids[row])
        if row not in self._chunks:
            self._chunks[row] = Replayed(partial(self._read_chunk, row), self._graphs)
        while num_read < len(tokens):
            first, end = min(num_read, self.cache.slots - MAX_STEP), min(num_read + MAX_STEP, len(tokens))
            padding = [0] * (MAX_STEP - (end - first))
            upload(self._chunk, [*tokens[first:end], *padding, first, end, tokens[end - 1]])
            self._chunks[row]()
            num_read = end
        cached_ids += tokens[len(cached_ids) :]

    def _read_chunk(self, row: int) -> None:
        view, (tokens_T, first_1, end_1, last_1) = self.cache.rows(row, row + 1), self._chunk.split([MAX_STEP, 1, 1, 1])
        view.lengths.copy_(first_1)
        self.model.forward(tokens_T[None], view, torch.zeros_like(first_1)[None])
        view.lengths.copy_(end_1)
        self._before_B[row : row + 1].copy_(last_1)

    @torch.inference_mode()
    def catch_up(
        self,
        texts: Mapping[int, list[int]],
        idle: bool,
        plain: Collection[int] = (),
        coming: Mapping[int, int] = NOTHING,
    ) -> None:
        for row, text in texts.items():
            cached_ids = self.cache.cached_ids[row]
            if idle and self._graphs is not None and len(cached_ids) < len(text) - 1:
                self._read_missed(row, text[:-1])  # all but the root
            elif idle:
                self.read(row, text[:-1])
            else:
                cached_ids += text[len(cached_ids) : -2]

    def draft(self, context: DraftContext, shape: DraftShape) -> DraftTree:
        if self not in context.generators:
            before_B = self._before_B[context.first : context.end]
            context.generators[self] = DraftGenerator(
                ModelStepper(
                    self.model,
                    self.cache.rows(context.first, context.end),
                    lambda: torch.stack([before_B, context.root_B], 1),
                    ids=self._ids,
                    logit_noise=self._logit_noise,
                ),
                context,
                shapes=self.shapes,
                branching=self._branching,
            )
        tree: DraftTree = context.generators[self].draft(shape)
        return tree

    def commit(self, context: DraftContext, tree: DraftTree, verified: VerifyResult, logits_BTV: Tensor) -> None:
        cache = self.cache.rows(context.first, context.end)
        if tree.kv_slots is not None:
            cache.compact(tree.kv_slots.gather(1, verified.path), verified.num_new)
        cache.lengths += verified.num_new
        before_B = self._before_B[context.first : context.end]
        history_BT = torch.cat([before_B[:, None], context.root_B[:, None], verified.tokens], 1)
        before_B.copy_(history_BT.gather(1, verified.num_new[:, None])[:, 0])

    def forget(self) -> None:
        self.cache.forget()

    def step_model(self) -> CausalModel:
        return self.model

    def extra_bytes(self) -> tuple[int, int]:
        return self._weight_bytes, self.cache.nbytes

    def prompt_readers(self) -> Sequence[tuple[CausalModel, StaticKVCache]]:
        return ((self.model, self.cache),)


def build(inputs: BuildInputs) -> ClassicDrafter:
    model, weight_bytes, graphs = inputs.second_model()
    config, quant = inputs.config, inputs.config.quant
    is_quantized = second_model(config) is None  # a copy of the target
    return ClassicDrafter(
        model,
        batch=config.max_batch,
        slots=inputs.slots,
        shapes=inputs.shapes,
        weight_bytes=weight_bytes,
        branching=inputs.branching,
        logit_noise=quant.format.logit_noise(quant.bits) if is_quantized else None,
        prior=inputs.quantized_prior if is_quantized else 0.0,
        graphs=graphs,
        target_vocab_size=inputs.target.vocab_size,
    )
