"""The order in which a GPU's model draft is launched and tables are asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sharesd.drafters.hybrid.drafter import HybridDrafter
from sharesd.speculation.cost_model import Costs
from sharesd.speculation.draft_policy import Policy
from sharesd.speculation.draft_proposal import Proposal
from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape, DraftTree, chain

FOUR = chain(4)


class Recorded:
    """A table and a model that note when they are asked, and a policy that takes the shapes which it is given."""

    def __init__(self, shapes: list[DraftShape], *, draft_s: float, graphs: object = object()) -> None:
        self.shapes, self.events = shapes, []
        costs = Costs({1: 1.0, 5: 1.1}, draft_s, draft_s, {1: 0.0, 5: 0.0})
        self.policy = Policy([FOUR], costs=costs)
        self.policy.gate.seconds = 0.05
        self.policy.next_shape = lambda *_, **__: self.shapes.pop(0)  # type: ignore[method-assign]
        table: Any = SimpleNamespace(name="table", num_successors=0, propose=self.propose, extend=lambda *_: None)
        model: Any = SimpleNamespace(
            name="model",
            shapes=(FOUR,),
            first_alphas=(0.5, 0.5),
            runs_on_host=False,
            catch_up=lambda *_, **__: None,
            draft=self.draft,
        )
        self.drafter = HybridDrafter("hybrid", [table], model, num_nodes=4, trees=False)
        self.drafter._known[0] = 1
        self.context: Any = SimpleNamespace(
            first=0,
            end=1,
            graphs=graphs,
            policy=self.policy,
            root_B=torch.zeros(1, dtype=torch.int64),
            sampler=SimpleNamespace(needs_draft_probs=False, vocab_size=99),
        )

    def propose(self, row: int, num: int, ahead: Any = ()) -> Proposal:
        self.events.append("asked")
        return Proposal([], [], [])

    def draft(self, context: Any, shape: DraftShape) -> DraftTree:
        self.events.append("launched")
        return DraftTree(torch.zeros(1, shape.nodes, dtype=torch.int64), num_steps=shape.depth)

    def round(self) -> list[str]:
        """Events of a round."""
        self.events.clear()
        self.drafter.catch_up({0: [1]}, False)
        self.drafter.draft(self.context, FOUR)
        return list(self.events)


def test_a_draft_like_the_last_one_is_launched_before_tables_are_asked() -> None:
    recorded = Recorded([FOUR, FOUR, NO_DRAFT, NO_DRAFT, FOUR, FOUR], draft_s=0.1)
    assert recorded.round() == ["asked", "launched"]
    assert recorded.round() == ["launched", "asked"]
    assert recorded.round() == ["launched", "asked"], "which is dropped"
    assert not recorded.policy._has_queried
    assert recorded.round() == ["asked"], "the last round had none"
    assert recorded.round() == ["asked", "launched"]
    assert recorded.round() == ["launched", "asked"], "what is dropped takes less time than asking"


def test_a_pinned_shape_is_launched_early_if_the_last_one_was_the_same() -> None:
    recorded = Recorded([FOUR] * 3, draft_s=0.0)
    recorded.round()
    recorded.policy.pinned = chain(3)
    assert recorded.policy.early_shape() == NO_DRAFT
    recorded.policy.pinned = FOUR
    assert recorded.policy.early_shape() == FOUR


@pytest.mark.parametrize(("draft_s", "graphs"), [(1.0, object()), (0.1, None)])
def test_tables_come_first_where_drafts_are_dropped_or_not_replayed(draft_s: float, graphs: object) -> None:
    recorded = Recorded([FOUR, NO_DRAFT, FOUR, FOUR], draft_s=draft_s, graphs=graphs)
    for _ in range(3):
        recorded.round()
    assert recorded.round() == ["asked", "launched"]
