"""Steps of `bench gpu` run to their end on what takes itself for a GPU; texts and speeds mean nothing there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.stand_in.run_step import run_step
from tests.stand_in.worker import Outcome, run

QUICK = ("machine", "1b-costs", "135m")
LONG = ("1b", "135m-more", "offload", "7b-more", "classic", "stages")
"""The same code at 7B apart, and steps that start processes of their own: kernels of these would do nothing, too."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Outcomes of all steps that are tested, which one process runs."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    names = [item.callspec.params["name"] for item in items]  # type: ignore[attr-defined]
    return dict(zip(names, run([partial(run_step, name) for name in names]), strict=True))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_a_step_runs_to_its_end(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert not outcome.error, outcome.error
    assert not outcome.violations, outcome.log
    found: dict[str, Any] = outcome.value
    assert found["device"].startswith("Stand-in") and not found.get("parts that failed"), outcome.log
    assert all(row["captures later"] == 0 for row in found.get("modes", ()))
    if name == "1b-costs":
        assert [row["mode"] for row in found["drafts that hold"]] == ["share", "eagle"]
        assert found["plain step"][-1]["what"] == "whole steps, torch's kernels" and len(found["plain step"]) == 4
