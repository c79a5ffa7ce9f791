"""A decoder whose blocks run in stages (`multigpu.pipeline`): what goes from one to the next.

Tokens go to the first stage, and what it makes of them on to the next. Before that each stage gets copies of what else
they need: lengths, and the paths of trees. Nothing of it is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from compile.attention import Branches
from compile.ranges import Range
from multigpu.pipeline import Split, copied
from sharesd.decoding.cache import StaticKVCache
from sharesd.device import use


class StagedBlocks:
    """How the blocks of a split decoder run."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._ranges = tuple(
            Range(stage.first, stage.num_blocks, partial(use, stage.device), hand_over=partial(self._hand_over, number))
            for number, stage in enumerate(split.stages)
        )

    def ranges(self) -> Sequence[Range]:
        """See `compile.ranges`."""
        return self._ranges

    def _hand_over(
        self, number: int, x_BTD: Tensor, cache: StaticKVCache, branches: Branches | None
    ) -> tuple[Tensor, StaticKVCache, Branches | None]:
        split = self._split
        device, is_home = split.stages[number].device, split.apart is None and number == len(split.stages) - 1
        if not is_home:
            cache = cache.mirrored(number)
            branches = branches and Branches(*(copied(part, device) for part in branches))
        return split.send(x_BTD, device) if number else x_BTD, cache, branches
