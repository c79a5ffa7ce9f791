"""How scripts/run_tests.py groups tests, and learns which one crashed: hooks of pytest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_logstart"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of TEST_GROUP: those marked `inductor`, those marked `kernels` (again), or all but the former."""
    group = os.environ.get("TEST_GROUP")
    if group is None:
        return
    belongs = [
        (item.get_closest_marker(group if group == "kernels" else "inductor") is None) == (group == "others")
        for item in items
    ]
    config.hook.pytest_deselected(items=[item for item, keep in zip(items, belongs, strict=True) if not keep])
    items[:] = [item for item, keep in zip(items, belongs, strict=True) if keep]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note which test runs, for whoever sees this process crash."""
    if "RUNNING_TEST" in os.environ:
        Path(os.environ["RUNNING_TEST"]).write_text(nodeid)
