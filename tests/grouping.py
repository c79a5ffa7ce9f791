"""How scripts/run_tests.py groups tests, and learns which one crashed: hooks of pytest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_logstart"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of TEST_GROUP: those marked `inductor`, `interpreted` or `kernels` (again), or all others."""
    group = os.environ.get("TEST_GROUP")
    if group is not None:
        belongs = [
            item.get_closest_marker(group) is not None if group == "kernels" else _group_of(item) == group
            for item in items
        ]
        config.hook.pytest_deselected(items=[item for item, keep in zip(items, belongs, strict=True) if not keep])
        items[:] = [item for item, keep in zip(items, belongs, strict=True) if keep]
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if item.get_closest_marker("interpreted") is not None:
                item.add_marker(pytest.mark.skip(reason="set TRITON_INTERPRET=1; Triton reads it when it is imported"))


def _group_of(item: pytest.Item) -> str:
    return next((name for name in ("inductor", "interpreted") if item.get_closest_marker(name) is not None), "others")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note which test runs, for whoever sees this process crash."""
    if "RUNNING_TEST" in os.environ:
        Path(os.environ["RUNNING_TEST"]).write_text(nodeid)
