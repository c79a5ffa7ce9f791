"""A round whose model drafts is launched as without tables, however slow these are; their nodes come later or not."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from sharesd.config import EngineConfig
from sharesd.sampling_params import SamplingParams
from tests.helpers.in_mode import in_mode
from tests.helpers.shared_runtimes import Shared
from tests.stand_in.decoding import PROMPT, load
from tests.stand_in.plausible import install
from tests.stand_in.worker import Outcome, run

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
SLOW = 0.02
"""Seconds that the table takes, some ten rounds of the device."""


def happenings(config: EngineConfig, *, has_begun: bool) -> list[str]:
    """What a mixture and the host do in rounds, in order, with a slow table.

    `has_begun`: the device verifies by the time that the last round was read, as the stand-in always does.
    """
    from compile.device_timer import Clock
    from sharesd.drafters.eagle.drafter import EagleDrafter
    from sharesd.drafters.hybrid.drafter import HybridDrafter
    from sharesd.drafters.suffix.table import SuffixTable
    from sharesd.drafters.tables.proposal import Proposal
    from sharesd.engine.decode_round import Round
    from sharesd.speculation.draft_buffers import LateNodes
    from sharesd.speculation.draft_policy import Policy

    install()
    events: list[str] = []
    engine = in_mode(load(config, ("hybrid",)), "hybrid", warm=PARAMS)
    assert isinstance(engine.drafter, HybridDrafter)

    def noted(owner: Any, name: str, event: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def call(*given: Any, **options: Any) -> Any:
            events.append(event)
            return function(*given, **options)

        setattr(owner, name, call)

    def slow(self: Any, row: int, num: int, *_: Any) -> Proposal:
        time.sleep(SLOW)
        return Proposal([7] * num, list(range(-1, num - 1)), [0.5] * num)

    SuffixTable.propose = slow  # type: ignore[assignment, method-assign]
    Policy.tables_pause = False  # type: ignore[assignment]
    Policy.model_leads = True  # type: ignore[assignment]
    Policy.next_shape = lambda self, **_: self.shapes[1]  # type: ignore[assignment, method-assign, misc]
    if not has_begun:
        Clock.has_passed = lambda self, mark: False  # type: ignore[method-assign, assignment]
    for owner, name, event in (
        (EagleDrafter, "draft", "draft"),
        (Round, "run", "verify"),
        (Clock, "wait", "read"),
        (SuffixTable, "propose", "ask"),
        (LateNodes, "put", "put"),
        (torch.cuda.Event, "synchronize", "wait"),
    ):
        noted(owner, name, event)
    engine.generate([PROMPT], PARAMS)
    return events


@pytest.fixture(scope="module")
def found(shared: Shared) -> list[Outcome]:
    target = shared.checkpoint(hidden=128, layers=2)
    heads = (str(shared.head(target, "eagle3", dtype=torch.bfloat16)),)
    options = {"target": str(target), "heads": heads, "hybrid_with": ("eagle", "suffix"), "max_context": 512}
    config = EngineConfig(mode="hybrid", device="cuda", **options)
    return [*run([partial(happenings, config, has_begun=True)]), *run([partial(happenings, config, has_begun=False)])]


def rounds_of(outcome: Outcome) -> list[list[str]]:
    """Events of each round, from the launch of its draft on; the first and the last are not like others."""
    assert not outcome.trouble, outcome.trouble
    events = outcome.value
    starts = [at for at, event in enumerate(events) if event == "draft"]
    assert len(starts) > 8
    return [events[a:b] for a, b in pairwise(starts)][1:-1]


def test_a_slow_table_is_not_asked_where_its_nodes_would_come_too_late(found: list[Outcome]) -> None:
    """The next round is launched, the one in front of it is read: all that the model alone does, and nothing more."""
    assert {*map(tuple, rounds_of(found[0]))} == {("draft", "verify", "read", "wait")}


def test_a_slow_table_is_asked_after_the_launch(found: list[Outcome]) -> None:
    """And a round waits for the device once."""
    rounds = Counter(map(tuple, rounds_of(found[1])))
    assert {*rounds} == {("draft", "verify", "read", "wait", "ask", "put")}, rounds
