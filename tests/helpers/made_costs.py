"""Costs of rounds that tests make up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharesd.speculation.cost_model import Costs, DraftCost
from sharesd.speculation.draft_tree import DraftKind


def made_costs(
    step: dict[int, float],
    draft: float = 0.0,
    level: float = 0.0,
    *,
    slot: float = 0.0,
    drafters: Sequence[str] = ("",),
    single_pass: bool = False,
    **others: Any,
) -> Costs:
    """Return costs of steps by width, and of each drafter's draft steps and levels, if they are above 0.

    `slot`: seconds that each live slot adds to these. `others`: fields of `Costs`.
    """
    drafts = {
        DraftKind(drafter, is_tree): DraftCost(seconds, slot=slot, single_pass=single_pass)
        for drafter in drafters
        for is_tree, seconds in ((False, draft), (True, level))
        if seconds
    }
    return Costs(step, drafts=drafts, **others)
