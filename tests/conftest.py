"""What all tests share, and how scripts/run_tests.py groups them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import guard
import pytest

from compile import native

if "GUARD_PAGES" in os.environ:
    guard.install(os.environ["GUARD_PAGES"])


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Load the CPU kernels before any test takes a cache folder of its own, where they would be built anew."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(native.library, ("bfloat16", "float16", "float32", "float64", "choice")))


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
