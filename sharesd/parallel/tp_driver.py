"""Ranks that run one model: rank 0 decodes, and tells the others each step before it begins it.

Whatever is decided (by clocks, by tables, by who asks for what) is decided on rank 0, once. The others know nothing but
their part of the weights and of the KV cache, and do what they are told, in its order; so no rank can drift away.

Legend: B rows, T new tokens, R kept rows, P slots of a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum, auto
from typing import Any

import torch
from torch import Tensor

from compile.attention import Branches
from multigpu.process_group import Group
from quant.switch_linear import Switch
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel

WORDS = 12
"""Of a command: what it is, and numbers that go with it."""


class _Command(IntEnum):
    NEW_CACHE = auto()
    STEP = auto()
    KEEP = auto()
    COPY_ROW = auto()
    SWAP_KV = auto()


class LeadingModel:
    """A causal model as rank 0 uses it: each step runs on all ranks."""

    def __init__(self, model: CausalModel, switch: Switch, group: Group) -> None:
        """`model` is rank 0's part, whose logits are whole; `switch` says whether it runs its quantized weights."""
        self._model, self._switch, self._group = model, switch, group
        self._num_caches, self._midway = 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def new_cache(self, batch: int, slots: int, taps: Sequence[int] = ()) -> StaticKVCache:
        """See `sharesd.models.base.CausalModel.new_cache`. Hidden states are not handed out."""
        if taps:
            raise ValueError("ranks that share a model hand out no hidden states; leave tensor_parallel out")
        with self._together(_Command.NEW_CACHE, batch, slots):
            self._num_caches += 1
            return _LedCache(self._model.new_cache(batch, slots), self._num_caches - 1, self._together)

    def forward(
        self,
        tokens_BT: Tensor,
        cache: StaticKVCache,
        keep_BR: Tensor | None = None,
        branches: Branches | None = None,
    ) -> Tensor:
        """See `sharesd.models.base.CausalModel.forward`."""
        assert isinstance(cache, _LedCache)
        num_kept = 0 if keep_BR is None else keep_BR.shape[1]
        num_path = 0 if branches is None else branches.path_BTP.shape[2]
        with self._together(
            *(_Command.STEP, *cache.place, cache.slots, cache.recent, int(self._switch.low)),
            *(tokens_BT.shape[1], num_kept, num_path),
            tensors=[t for t in (cache.lengths, tokens_BT, keep_BR, *(branches or ())) if t is not None],
        ):
            return self._model.forward(tokens_BT, cache, keep_BR, branches)

    @contextmanager
    def _together(self, *command: int, tensors: Sequence[Tensor] = ()) -> Iterator[None]:
        """Around what all ranks do: tell the others. `tensors`, of int64, go with it."""
        if self._midway:
            raise RuntimeError("a step was broken off on rank 0, and the other ranks are waiting in it; start anew")
        self._midway = True
        self._group.broadcast(torch.tensor([*command, *[0] * (WORDS - len(command))]))
        if tensors:
            self._group.broadcast(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        yield
        self._midway = False


class _LedCache(StaticKVCache):
    """Rank 0's part of a cache: what happens to its rows happens on all ranks."""

    def __init__(self, own: StaticKVCache, number: int, together: Callable[..., Any]) -> None:
        """Takes over a new cache."""
        vars(self).update(vars(own))
        self._number, self._first, self._together = number, 0, together

    @property
    def place(self) -> tuple[int, int, int]:
        """Number of the cache, and its rows from the first to before the last one."""
        return self._number, self._first, self._first + self.batch

    def rows(self, first: int, end: int) -> StaticKVCache:
        view = super().rows(first, end)
        assert isinstance(view, _LedCache)
        if view is not self:
            view._first = self._first + first
        return view

    def keep(self, path_BT: Tensor, num_B: Tensor, above: int = 0) -> None:
        assert not above, "ranks have all of their weights"
        with self._together(_Command.KEEP, *self.place, path_BT.shape[1], tensors=(self.lengths, path_BT, num_B)):
            super().keep(path_BT, num_B)

    def copy_row(self, source: int, row: int, num_tokens: int) -> None:
        with self._together(_Command.COPY_ROW, self._number, source, row, num_tokens):
            super().copy_row(source, row, num_tokens)

    def swap_kv(self, a: int, b: int, num_tokens: int) -> None:
        with self._together(_Command.SWAP_KV, self._number, a, b, num_tokens):
            super().swap_kv(a, b, num_tokens)


@torch.inference_mode()
def follow(model: CausalModel, switch: Switch, group: Group) -> None:
    """Do what rank 0 says, with this rank's part of the model, until RankLost is raised."""
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
            cache.keep(path_BT, num_B)
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
    cache.recent, switch.low = recent, bool(low)
    keep_BR = rest.pop(0) if R else None
    model.forward(tokens_BT, cache, keep_BR, Branches(*rest) if P else None)


def _received(group: Group, cache: StaticKVCache, *shapes: tuple[int, ...]) -> list[Tensor]:
    """The tensors that go with a command, in a storage of their own each."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    together = torch.empty(sum(sizes), dtype=torch.int64, device=cache.lengths.device)
    group.broadcast(together)
    return [piece.view(shape) for piece, shape in zip(together.split(sizes), shapes, strict=True)]
