"""Modes load, are captured and replayed under the stand-in driver, and ask for nothing that they should not."""

from __future__ import annotations

import pytest

from tests.stand_in.points import MODES, Point, in_order, points
from tests.stand_in.worker import Outcome

EVERY_PAIR, EVERY_VALUE = points()


def chosen(*places: str) -> pytest.MarkDecorator:
    """Points in these places; those that are not needed to see every value once are `long`."""
    return pytest.mark.parametrize(
        "point",
        [
            pytest.param(point, id=str(point), marks=() if point in EVERY_VALUE else pytest.mark.long)
            for point in in_order(EVERY_PAIR)
            if point.place in places
        ],
    )


def check(point: Point, outcome: Outcome) -> None:
    if outcome.trouble:
        pytest.fail(outcome.trouble, pytrace=False)
    assert "without CUDA graphs" not in outcome.log, outcome.log
    found = outcome.value
    pinned = () if point.grammar else ("host_mallocs",)  # masks are pinned for each round, in sizes that drafts decide
    new = {name: found[name] for name in ("after", "first mallocs", "mallocs", "modules", *pinned)}
    assert not any(new.values()), f"after warming up: {new}"
    assert found["drafted"] or "num_draft" not in MODES[point.mode][2], found
    if point.place != "offload" and "ranks" not in point.place:  # rounds are replayed from graphs
        assert found["captures"] and found["replayed"] >= 1, found
        assert found["launched"] <= 2, found  # what a draft brings into its buffers
    if point.place == "offload":
        assert found["taken"] <= found["planned"], found
        assert found["registered"] == found["to pin"] > 0, found
    if "ranks" in point.place:
        assert found["collectives"] >= 4, found
    waits = 2 if point.grammar else 1  # for what came out of it; with grammars, for its draft, too
    assert round(found["syncs"] * found["rounds"]) <= waits * found["rounds"] + 2, found


class TestOneGpu:
    @chosen("one", "rows differ", "offload")
    def test_decodes(self, point: Point, outcome: Outcome) -> None:
        check(point, outcome)


class TestSeveralGpus:
    @chosen("second", "2 stages", "4 stages", "draft elsewhere", "draft behind stages", "2 ranks")
    def test_decodes(self, point: Point, outcome: Outcome) -> None:
        check(point, outcome)
