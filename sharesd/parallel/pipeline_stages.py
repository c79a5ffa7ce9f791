"""Hidden states, lengths and tree paths between stages, unread by the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.block_ranges import BlockRange
from multigpu.pipeline_parallel import PipelinePlan
from sharesd.devices.transfer import copy_to_device
from sharesd.kvcache.static import StaticKVCache


class StagedBlocks:
    """Block ranges of a decoder in stages."""

    def __init__(self, split: PipelinePlan) -> None:
        self._split = split
        self._ranges = tuple(
            BlockRange(stage.first, stage.num_blocks, move_inputs=partial(self._move_inputs, number))
            for number, stage in enumerate(split.stages)
        )

    def ranges(self) -> Sequence[BlockRange]:
        return self._ranges

    def _move_inputs(
        self, number: int, x_BTD: Tensor, cache: StaticKVCache, tree_mask: TreeAttentionMask | None
    ) -> tuple[Tensor, StaticKVCache, TreeAttentionMask | None]:
        split, device = self._split, self._split.stages[number].device
        seconds = split.simulated_latency_s if number else 0.0
        sent = [x_BTD] if number else []  # to the first stage tokens came
        if split.is_output_stage(number):
            copies = copy_to_device(device, *sent, seconds=seconds)
        else:
            view = cache.on_stage(number)
            lengths = [(view.lengths, cache.lengths)] if cache.known_length is None else []
            copies = copy_to_device(device, *(tree_mask or ()), *sent, onto=lengths, seconds=seconds)
            if cache.known_length is not None:
                view.lengths.fill_(cache.known_length)
            cache, tree_mask = view, tree_mask and TreeAttentionMask(*copies[:2])
        return copies[-1] if sent else x_BTD, cache, tree_mask
