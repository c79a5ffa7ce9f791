"""Steps of `bench gpu` run to their end on what takes itself for a GPU; texts and speeds mean nothing there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.stand_in.run_step import run_step
from tests.stand_in.worker import Outcome, run

QUICK = ("machine", "1b-costs", "135m")
LONG = ("1b", "135m-more", "offload", "7b-more", "classic", "stages", "kernels", "stored", "tiles", "gemlite", "starts")
"""All but the same code at 7B, and the tests, whose kernels would do nothing."""
TABLES = {
    "kernels": {"linears": 1, "attention": 6, "low-bit linears": 2, "dependent launch": 1},
    "gemlite": {"products": 12},
}
"""Rows of tables in tiny sizes."""


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
    for table, rows in TABLES.get(name, {}).items():
        assert len(found[table]) == rows, found
    if name == "gemlite":
        assert found["chosen"] in ("own", "gemlite")
    if name == "tiles":
        assert found["measured"] == 1 and sum(row["by rule"] for row in found["tiles"]) == 1, found
    if name == "starts":
        assert all(isinstance(found[f"{caches}_s"], float) for caches in ("as_found", "warm", "cold")), found
    if name == "1b-costs":
        assert [row["mode"] for row in found["drafts that hold"]] == ["share", "eagle"]
        assert found["plain step"][-1]["what"] == "whole steps, torch's kernels" and len(found["plain step"]) == 4
