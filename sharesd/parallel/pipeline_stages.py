"""A decoder whose blocks run in stages (`multigpu.pipeline_parallel`): what goes from one to the next.

Tokens go to the first stage, and what it makes of them on to the next. Before that each stage gets copies of what else
they need: lengths, and the paths of trees. Nothing of it is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from compile.attention import Branches
from compile.block_ranges import Range
from multigpu.pipeline_parallel import Split
from sharesd.devices.transfer import hop
from sharesd.kvcache.static import StaticKVCache


class StagedBlocks:
    """How the blocks of a split decoder run."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._ranges = tuple(
            Range(stage.first, stage.num_blocks, hand_over=partial(self._hand_over, number))
            for number, stage in enumerate(split.stages)
        )

    def ranges(self) -> Sequence[Range]:
        """See `compile.block_ranges`."""
        return self._ranges

    def _hand_over(
        self, number: int, x_BTD: Tensor, cache: StaticKVCache, branches: Branches | None
    ) -> tuple[Tensor, StaticKVCache, Branches | None]:
        split, device = self._split, self._split.stages[number].device
        seconds = split.hop_seconds if number else 0.0
        sent = [x_BTD] if number else []  # to the first stage tokens came
        if split.is_home(number):
            copies = hop(device, *sent, seconds=seconds)
        else:
            view = cache.mirrored(number)
            lengths = [(view.lengths, cache.lengths)] if cache.known_length is None else []
            copies = hop(device, *(branches or ()), *sent, onto=lengths, seconds=seconds)
            if cache.known_length is not None:
                view.lengths.fill_(cache.known_length)
            cache, branches = view, branches and Branches(*copies[:2])
        return copies[-1] if sent else x_BTD, cache, branches
