"""Broadcast of steps from rank 0, which decides, to a model's ranks.

Legend: B rows, T new tokens, R kept rows, P slots of a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum, auto
from typing import Any

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from multigpu.process_group import Group
from quant.switch_linear import Switch
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel

WORDS = 12


class _Command(IntEnum):
    NEW_CACHE = auto()
    STEP = auto()
    KEEP = auto()
    COPY_ROW = auto()
    SWAP_KV = auto()


class RankZeroModel:
    """Causal model of rank 0; each step runs on all ranks."""

    def __init__(self, model: CausalModel, switch: Switch, group: Group) -> None:
        self._model, self._switch, self._group = model, switch, group
        self._num_caches, self._midway = 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def new_cache(self, batch: int, slots: int, taps: Sequence[int] = ()) -> StaticKVCache:
        """See `sharesd.models.base.CausalModel.new_cache`. Hidden states are not supported."""
        if taps:
            raise ValueError("ranks that share a model hand out no hidden states; leave tensor_parallel out")
        with self._together(_Command.NEW_CACHE, batch, slots):
            self._num_caches += 1
            return BroadcastingKVCache(self._model.new_cache(batch, slots), self._num_caches - 1, self._together)

    def forward(
        self,
        tokens_BT: Tensor,
        cache: StaticKVCache,
        keep_BR: Tensor | None = None,
        tree_mask: TreeAttentionMask | None = None,
    ) -> Tensor:
        """See `sharesd.models.base.CausalModel.forward`."""
        assert isinstance(cache, BroadcastingKVCache)
        num_kept = 0 if keep_BR is None else keep_BR.shape[1]
        num_path = 0 if tree_mask is None else tree_mask.path_BTP.shape[2]
        with self._together(
            *(_Command.STEP, *cache.place, cache.slots, cache.recent, int(self._switch.quantized)),
            *(tokens_BT.shape[1], num_kept, num_path),
            tensors=[t for t in (cache.lengths, tokens_BT, keep_BR, *(tree_mask or ())) if t is not None],
        ):
            return self._model.forward(tokens_BT, cache, keep_BR, tree_mask)

    @contextmanager
    def _together(self, *command: int, tensors: Sequence[Tensor] = ()) -> Iterator[None]:
        """Broadcast a command, with tensors of int64, before rank 0 runs it."""
        if self._midway:
            raise RuntimeError("a step was broken off on rank 0, and the other ranks are waiting in it; start anew")
        self._midway = True
        self._group.broadcast(torch.tensor([*command, *[0] * (WORDS - len(command))]))
        if tensors:
            self._group.broadcast(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        yield
        self._midway = False


class BroadcastingKVCache(StaticKVCache):
    """Rank 0's part of a KV cache, with moves of rows broadcast."""

    def __init__(self, own: StaticKVCache, number: int, together: Callable[..., Any]) -> None:
        vars(self).update(vars(own))
        self._number, self._first, self._together = number, 0, together

    @property
    def place(self) -> tuple[int, int, int]:
        return self._number, self._first, self._first + self.batch

    def rows(self, first: int, end: int) -> StaticKVCache:
        view = super().rows(first, end)
        assert isinstance(view, BroadcastingKVCache)
        if view is not self:
            view._first = self._first + first
        return view

    def compact(self, path_BT: Tensor, num_B: Tensor, kv_offset: int = 0) -> None:
        assert not kv_offset, "ranks have all of their weights"
        with self._together(_Command.KEEP, *self.place, path_BT.shape[1], tensors=(self.lengths, path_BT, num_B)):
            super().compact(path_BT, num_B)

    def copy_row(self, source: int, row: int, num_tokens: int) -> None:
        with self._together(_Command.COPY_ROW, self._number, source, row, num_tokens):
            super().copy_row(source, row, num_tokens)

    def swap_kv(self, a: int, b: int, num_tokens: int) -> None:
        with self._together(_Command.SWAP_KV, self._number, a, b, num_tokens):
            super().swap_kv(a, b, num_tokens)


@torch.inference_mode()
def worker_loop(model: CausalModel, switch: Switch, group: Group) -> None:
    """Run rank 0's commands on this rank's part, until RankLost."""
    caches: list[StaticKVCache] = []
    while True:
        words = torch.empty(WORDS, dtype=torch.int64)
        group.broadcast(words)
        command, *numbers = words.tolist()
        if command == _Command.NEW_CACHE:
            batch, slots, *_ = numbers
            caches.append(model.new_cache(batch, slots))
        elif command == _Command.STEP:
            _step(model, switch, group, caches, numbers)
        elif command == _Command.KEEP:
            number, first, end, T, *_ = numbers
            cache = caches[number].rows(first, end)
            B = end - first
            lengths_B, path_BT, num_B = _received(group, cache, (B,), (B, T), (B,))
            cache.lengths.copy_(lengths_B)
            cache.compact(path_BT, num_B)
        elif command == _Command.COPY_ROW:
            number, source, row, num_tokens, *_ = numbers
            caches[number].copy_row(source, row, num_tokens)
        else:
            assert command == _Command.SWAP_KV
            number, a, b, num_tokens, *_ = numbers
            caches[number].swap_kv(a, b, num_tokens)


def _step(
    model: CausalModel, switch: Switch, group: Group, caches: Sequence[StaticKVCache], numbers: Sequence[int]
) -> None:
    number, first, end, slots, recent, low, T, R, P, *_ = numbers
    B = end - first
    whole = caches[number]
    cache = whole.rows(first, end) if slots == whole.slots else whole.row(first, slots)
    shapes = [(B,), (B, T), *([(B, R)] if R else []), *([(B, T), (B, T, P)] if P else [])]
    lengths_B, tokens_BT, *rest = _received(group, cache, *shapes)
    cache.lengths.copy_(lengths_B)
    cache.recent, switch.quantized = recent, bool(low)
    keep_BR = rest.pop(0) if R else None
    model.forward(tokens_BT, cache, keep_BR, TreeAttentionMask(*rest) if P else None)


def _received(group: Group, cache: StaticKVCache, *shapes: tuple[int, ...]) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    together = torch.empty(sum(sizes), dtype=torch.int64, device=cache.lengths.device)
    group.broadcast(together)
    return [piece.view(shape) for piece, shape in zip(together.split(sizes), shapes, strict=True)]
