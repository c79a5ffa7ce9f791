"""Bits of rows: a self-check, and the widths of steps with which all modes give the same text.

Legend: B rows, T tokens of steps, V vocabulary."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.attention import TreeAttentionMask
from compile.block_ranges import BlockRange
from compile.kv_layout import pack_kv, pack_q8
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import DecoderConfig
from sharesd.weights.head_in_pieces import HeadInPieces, full_head

WIDTHS = (1, 2, 5, 8)
"""Step widths that are compared if any width is allowed."""
LENGTH = 126
"""Live slots before compared rows, some of them in the next chunk."""
NOISE_SLOTS = 96
"""Period of the noise that fills the cache, in slots."""


class RowBits(NamedTuple):
    chains: bool
    """Rows of a chain, at any of the widths."""
    trees: bool
    """Rows of a tree with any paths; False if chains differ."""
    batches: bool = False
    """Rows in any of the batch sizes; False if chains differ."""


@torch.inference_mode()
def check_rows(
    model: CausalModel, cache: StaticKVCache, widths: Sequence[int], *, trees: bool, batches: Sequence[int] = ()
) -> RowBits:
    """Compare random rows' logits; the cache is overwritten and left empty.

    The narrowest of `widths` is that of plain steps. `batches`: numbers of the cache's first rows.
    """
    _fill(cache)
    check = _Check(model, cache, min(widths))
    last = cache.slots - 2 * max(widths)
    lengths = sorted({min(LENGTH, last), last})
    chains_agree = all(check.chains_agree(length, sorted(widths)) for length in lengths)
    trees_agree = trees and chains_agree and all(check.trees_agree(length, max(widths)) for length in lengths)
    batches_agree = chains_agree and all(
        check.batches_agree(length, width, batches, is_tree)
        for length in lengths
        for width, is_tree in [*((width, False) for width in widths), *([(max(widths), True)] if trees_agree else [])]
    )
    cache.restart(0)
    return RowBits(chains_agree, trees_agree, batches_agree and bool(batches))


@torch.inference_mode()
def check_compiled(compiled: CausalModel, model: CausalModel, cache: StaticKVCache, width: int) -> None:
    """Compare consecutive compiled and plain steps; ValueError if bits differ.

    The cache is overwritten and left empty.
    """
    _fill(cache)
    dice = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(model.vocab_size, (cache.batch, 3 * width), generator=dice).to(cache.lengths.device)
    parts = tokens_BT.split(width, 1)

    def logits_of(steps: CausalModel) -> Tensor:
        cache.restart(0)
        logits = []
        for tokens_BW in parts:
            logits.append(steps.forward(tokens_BW.contiguous(), cache).clone())
            cache.lengths += width
        return torch.cat(logits, 1)

    ours_BTV, wanted_BTV = logits_of(compiled), logits_of(model)
    error = (ours_BTV - wanted_BTV).float().norm() / wanted_BTV.float().norm()
    limit = 1e-4 if wanted_BTV.dtype in (torch.float32, torch.float64) else 1e-1
    if not error < limit:
        raise ValueError(f"compiled steps compute something else (relative error {error:.1e})")
    if not check_rows(compiled, cache, (width,), trees=False).chains:
        raise ValueError("rows of compiled steps depend on their place")


class _Check:
    def __init__(self, model: CausalModel, cache: StaticKVCache, plain_width: int) -> None:
        self._model, self._cache, self._plain_width = model, cache, plain_width
        self._dice = torch.Generator().manual_seed(0)

    def chains_agree(self, length: int, widths: Sequence[int]) -> bool:
        tokens_BT = self._tokens(widths[-1])
        plain_BTV = self._plainly(tokens_BT, length)
        for width in widths:
            self._cache.restart(length)
            if not torch.equal(
                self._model.forward(tokens_BT[:, :width].contiguous(), self._cache), plain_BTV[:, :width]
            ):
                return False
        return True

    def trees_agree(self, length: int, width: int) -> bool:
        tokens_BT, row_T = self._tokens(width), torch.arange(width)
        self._cache.restart(length)
        rows_BTV = self._model.forward(tokens_BT, self._cache, tree_mask=self._branches(*tokens_BT.shape))
        for side in (row_T[row_T % 2 == 1], row_T[(row_T % 2 == 0) & (row_T > 0)]):
            rows = [0, *side.tolist()]
            if not torch.equal(self._plainly(tokens_BT[:, rows], length), rows_BTV[:, rows]):
                return False
        return True

    def batches_agree(self, length: int, width: int, batches: Sequence[int], is_tree: bool) -> bool:
        """Compare steps of the first rows alone with those of all rows."""
        tokens_BT = self._tokens(width)

        def logits(num: int) -> Tensor:
            view = self._cache.rows(0, num)
            view.restart(length)
            tree_mask = self._branches(num, width) if is_tree else None
            return self._model.forward(tokens_BT[:num], view, tree_mask=tree_mask)

        whole_BTV = logits(len(tokens_BT)).clone()
        return all(torch.equal(logits(num), whole_BTV[:num]) for num in sorted(batches, reverse=True))

    def _branches(self, batch: int, width: int) -> TreeAttentionMask:
        row_T, device = torch.arange(width), self._cache.lengths.device
        depth_T = (row_T + 1) // 2
        path_TT = (row_T[None, :] * 2 - row_T[:, None] % 2).clamp(min=0).where(row_T <= depth_T[:, None], 0)
        return TreeAttentionMask(depth_T.repeat(batch, 1).to(device), path_TT.repeat(batch, 1, 1).to(device))

    def _tokens(self, num: int) -> Tensor:
        size = (self._cache.batch, num)
        return torch.randint(self._model.vocab_size, size, generator=self._dice).to(self._cache.lengths.device)

    def _plainly(self, tokens_BT: Tensor, length: int) -> Tensor:
        self._cache.restart(length)
        rows = []
        for token_B1 in tokens_BT.split(1, 1):
            step_BW = F.pad(token_B1, (0, self._plain_width - 1)).contiguous()
            rows.append(self._model.forward(step_BW, self._cache)[:, :1])
            self._cache.lengths += 1
        return torch.cat(rows, 1)


def _fill(cache: StaticKVCache) -> None:
    dice = torch.Generator().manual_seed(1)
    for k, v, size in zip(cache.k, cache.v, cache.sizes, strict=True):
        noise = torch.randn(2, 1, k.shape[1], NOISE_SLOTS, size, generator=dice).to(k.device, cache.dtype)
        plain = noise.repeat(1, cache.batch, 1, -(-cache.slots // NOISE_SLOTS), 1)[:, :, :, : cache.slots]
        packed = pack_kv(*plain) if cache.packed else plain
        packed = pack_q8(*plain, plain=not cache.packed) if cache.q8 else packed
        for tensor, noise_of in zip((k, v), packed, strict=True):
            tensor.copy_(noise_of)
    if cache.recurrent is not None:
        inputs_NBRD = cache.recurrent.inputs_NBRD
        inputs_NBRD.copy_(torch.randn(inputs_NBRD[:, :1].shape, generator=dice).expand_as(inputs_NBRD))


log = logging.getLogger(__name__)

EXACT_WIDTHS = {"cpu": (9, 16), "cuda": (16,)}
"""Single widths by device, if bits depend on width: the first sufficient."""


def fixed_width(device: str, max_draft_tokens: int) -> int:
    """Return rows of every step; only unusually long drafts change it."""
    rows = 1 + max_draft_tokens
    return next((width for width in EXACT_WIDTHS[device] if width >= rows), rows)


@dataclass(frozen=True, slots=True)
class StepWidths:
    step: CausalModel
    widths: tuple[int, ...] | None
    """Allowed rows of steps: None = any; one if bits require it."""
    depends_on_width: bool
    trees: bool
    buckets: bool


def choose_step_widths(
    target: CausalModel,
    *,
    fixed: int,
    max_width: int,
    exact: bool,
    wants_trees: bool,
    compiles: bool,
    step_of: Callable[[set[int]], CausalModel],
    bits_of: Callable[[CausalModel, Sequence[int]], RowBits],
) -> StepWidths:
    """Choose the widths of a target's steps by bits of its rows.

    Args:
        fixed: width if there must be a single one.
        exact: bits of a row must be the same in all modes.
        compiles: each width is compiled, at a price.
    """
    widths: tuple[int, ...] | None = (1, max_width) if compiles else None
    bits, depends = RowBits(False, False), False
    if isinstance(target, Decoder):
        step = step_of({*(widths or ())})
        bits = bits_of(step, widths or sorted({*WIDTHS, max_width}))
    else:
        step = step_of({fixed} if exact else {*(widths or ())})
        if step is target:
            widths = None
    buckets = bits.batches
    if bits.chains:
        log.info("exact: rows have the same bits in steps of any width%s", " and batch" if buckets else "")
    elif exact:
        log.info("exact: rows depend on the width of their step, so every step of every mode has %d rows", fixed)
        widths, depends, buckets = (fixed,), True, False
        if isinstance(target, Decoder):
            step = step_of({fixed})
            bits = bits_of(step, (fixed,))
            if not bits.chains:
                log.warning("rows depend on their place in the step, too: texts of modes may differ")
    else:
        log.warning("exact is off, and rows differ between steps of 1 and of more rows: so may texts of modes")
    trees = target.takes_trees
    if wants_trees and trees and bits.chains and not bits.trees:
        if exact:
            trees = False
            log.info("exact: rows of trees depend on where their paths lie, so drafts are chains")
        else:
            log.warning("exact is off, and rows of trees differ from those of chains: so may texts of modes")
    return StepWidths(step, widths, depends, trees, buckets)


def with_first_blocks(config: DecoderConfig) -> DecoderConfig:
    """Return a config with the blocks up to the first with attention."""
    num = next((i for i, width in enumerate(config.conv_widths) if not width), 0) + 1
    return replace(config, layer_types=config.layer_types[:num])


def first_block_view(model: Decoder) -> Decoder:
    """Return the first block with attention, after those before it; their offloaded weights stay in place."""
    twin = copy.copy(model)
    twin.config = with_first_blocks(model.config)
    twin._modules = {**model._modules, "blocks": model.blocks[: twin.config.num_hidden_layers]}
    head = full_head(model)
    if isinstance(head, HeadInPieces):
        twin._modules["head"] = head.tail
    twin.run_stack = None
    twin.ranges = lambda: [
        BlockRange(
            each.first, each.num_blocks, each.before, moves_weights=each.moves_weights, move_inputs=each.move_inputs
        )
        for each in model.ranges()
    ]
    return twin
