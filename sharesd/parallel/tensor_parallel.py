"""Tensor parallelism: cuts of stored weights, ranks, and steps that rank 0 broadcasts to the others.

Legend: B rows, T new tokens, R kept rows, P slots of a path.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum, auto
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compile.adaptive_threads import STEP_THREADS
from compile.attention import TreeAttentionMask
from compile.block_linear import block_sizes
from multigpu.launch import join, launched_rank, local_device, num_ranks_sharing_cores, spawn
from multigpu.process_group import Group, ProcessGroup
from multigpu.tensor_parallel import TILE, Shard
from quant.switch_linear import Switch
from sharesd.config import CompileMode, EngineConfig, Mode
from sharesd.devices.selection import use
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.models.checkpoint import is_quantized
from sharesd.models.loader import decoder_config
from sharesd.models.quantized.folder import reordered
from sharesd.models.weight_mapping import Cuts, check_tensor_parallel, module_of
from sharesd.weights.sizes import outline_of


def check_stored_cuts(config: EngineConfig, folder: Path) -> None:
    """Raise ValueError for a cut within a record, block or order.

    A record has 16 outputs.
    """
    cuts, size = Cuts.of(decoder_config(folder)), config.tensor_parallel
    expand = "use --dequantize" if config.target_quant is None else "drop --target-quant"
    if config.tensor_parallel_style == "reduce" and is_quantized(folder):
        for name in reordered(folder):
            if module_of(name) in cuts.second:
                raise ValueError(
                    f"tensor_parallel_style is reduce, and the inputs of {name} are stored in another order, which is "
                    f"not cut; use --tensor-parallel-style gather, or {expand}"
                )
    for name, tensor in outline_of(folder).items():
        if tensor.type is None:
            continue
        module, (outputs, inputs) = module_of(name), tensor.shape
        unit, where, sizes, remedy = TILE, "outputs", cuts.first.get(module, ()), "leave tensor_parallel out"
        if module in cuts.second and config.tensor_parallel_style == "reduce":
            unit, where, sizes = block_sizes(tensor.type)[0], "inputs", (inputs,)
            remedy = "use --tensor-parallel-style gather"
        elif module in cuts.second:
            sizes = (outputs,)
        for number in sizes:
            if number % (size * unit):
                raise ValueError(
                    f"tensor_parallel is {size}, and the {number} {where} of {name}, which is stored as {tensor.type}, "
                    f"cannot be shared out evenly in groups of {unit}; {remedy}, or {expand}"
                )


log = logging.getLogger(__name__)

EAGER_TILE = 64
"""Outputs of gate per indivisible group: torch rounds remainders of vectors otherwise."""


def init_tp(
    config: EngineConfig,
    modes: Sequence[Mode],
    folder: Path,
    *,
    device: torch.device,
    compile: CompileMode,
    group: Group | None,
) -> tuple[Group, Shard, torch.device]:
    """Start or join the ranks that share the target in a folder.

    Rank 0 broadcasts its config and modes. Returns the group, this rank's part of each linear, and its device.
    `group`: None = start processes, or join those of torchrun. ValueError for a number of ranks that differs or does
    not divide the target, RankLost if a rank does not join.
    """
    size = config.tensor_parallel
    eager_on_cpu = compile == "off" and device.type == "cpu"
    check_tensor_parallel(decoder_config(folder), size, EAGER_TILE if eager_on_cpu else TILE)
    check_stored_cuts(config, folder)
    if config.tensor_parallel_style == "reduce" and (group is None or group.rank == 0):
        log.warning(
            "tensor_parallel_style is reduce: sums are split, so texts may be others than with another number of ranks"
        )
    if config.threads is None:
        STEP_THREADS.reset(max(1, STEP_THREADS.available // num_ranks_sharing_cores(size)))
    if isinstance(group, ProcessGroup) or group is None:
        device = local_device(device, size)
        use(device)
    if group is None:
        group = _new_group(size, device)
    if group.rank == 0:
        group.broadcast_object((config, modes))
    return group, Shard(group.rank, group.size, config.tensor_parallel_style == "reduce"), device


def _new_group(size: int, device: torch.device) -> Group:
    if launched_rank() is None:
        group = spawn(size, (sys.executable, "-m", "sharesd.cli.tp_worker", device.type), device)
    else:
        group = join(device)
    atexit.register(group.close)
    if (group.rank, group.size) != (0, size):
        raise ValueError(
            f"tensor_parallel is {size}, and this is rank {group.rank} of {group.size}; start as many processes as "
            "tensor_parallel says, of which all but rank 0 follow"
        )
    return group


def shutdown_tp(group: Group) -> None:
    atexit.unregister(group.close)
    group.close()


WORDS = 12


class _Command(IntEnum):
    NEW_CACHE = auto()
    STEP = auto()
    KEEP = auto()
    COPY_ROW = auto()
    SWAP_KV = auto()


class _Step(NamedTuple):
    """Numbers of a step; its tensors follow."""

    number: int
    """Number of the cache."""
    first: int
    end: int
    slots: int
    recent: int
    quantized: int
    num_tokens: int
    num_kept: int
    num_path: int


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
            raise ValueError("ranks that share a model do not expose hidden states; remove tensor_parallel")
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
        number, first, end = cache.place
        step = _Step(
            number=number,
            first=first,
            end=end,
            slots=cache.slots,
            recent=cache.recent,
            quantized=int(self._switch.quantized),
            num_tokens=tokens_BT.shape[1],
            num_kept=0 if keep_BR is None else keep_BR.shape[1],
            num_path=0 if tree_mask is None else tree_mask.path_BTP.shape[2],
        )
        with self._together(
            _Command.STEP,
            *step,
            tensors=[t for t in (cache.lengths, tokens_BT, keep_BR, *(tree_mask or ())) if t is not None],
        ):
            return self._model.forward(tokens_BT, cache, keep_BR, tree_mask)

    @contextmanager
    def _together(self, *command: int, tensors: Sequence[Tensor] = ()) -> Iterator[None]:
        """Broadcast a command, with tensors of int64, before rank 0 runs it."""
        if self._midway:
            raise RuntimeError("rank 0 aborted a step and the other ranks are blocked in it; restart")
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
            _step(model, switch, group, caches, _Step(*numbers[: len(_Step._fields)]))
        elif command == _Command.KEEP:
            number, first, end, T = numbers[:4]
            cache = caches[number].rows(first, end)
            B = end - first
            lengths_B, path_BT, num_B = _received(group, cache, (B,), (B, T), (B,))
            cache.lengths.copy_(lengths_B)
            cache.compact(path_BT, num_B)
        elif command == _Command.COPY_ROW:
            number, source, row, num_tokens = numbers[:4]
            caches[number].copy_row(source, row, num_tokens)
        else:
            assert command == _Command.SWAP_KV
            number, a, b, num_tokens = numbers[:4]
            caches[number].swap_kv(a, b, num_tokens)


def _step(model: CausalModel, switch: Switch, group: Group, caches: Sequence[StaticKVCache], step: _Step) -> None:
    B, T, R, P = step.end - step.first, step.num_tokens, step.num_kept, step.num_path
    whole = caches[step.number]
    cache = whole.rows(step.first, step.end) if step.slots == whole.slots else whole.row(step.first, step.slots)
    shapes = [(B,), (B, T), *([(B, R)] if R else []), *([(B, T), (B, T, P)] if P else [])]
    lengths_B, tokens_BT, *rest = _received(group, cache, *shapes)
    cache.lengths.copy_(lengths_B)
    cache.recent, switch.quantized = step.recent, bool(step.quantized)
    keep_BR = rest.pop(0) if R else None
    model.forward(tokens_BT, cache, keep_BR, TreeAttentionMask(*rest) if P else None)


def _received(group: Group, cache: StaticKVCache, *shapes: tuple[int, ...]) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    together = torch.empty(sum(sizes), dtype=torch.int64, device=cache.lengths.device)
    group.broadcast(together)
    return [piece.view(shape) for piece, shape in zip(together.split(sizes), shapes, strict=True)]
