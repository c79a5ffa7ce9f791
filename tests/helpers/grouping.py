"""How scripts/run_tests.py groups tests, and learns which one crashed; and where those of Triton's kernels run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

__all__ = ["on_the_gpu", "pytest_collection_modifyitems", "pytest_runtest_logstart"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's kernels run on a CPU."""


@pytest.hookimpl(tryfirst=True)  # markers that are put here count for `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of TEST_GROUP: those marked `inductor`, `interpreted` or `kernels` (again), or all others.

    What Triton's interpreter would run is run on the GPU, and marked `cuda`, where there is one and no interpreter.
    """
    group = os.environ.get("TEST_GROUP")
    if group is not None:
        belongs = [
            item.get_closest_marker(group) is not None if group == "kernels" else _group_of(item) == group
            for item in items
        ]
        config.hook.pytest_deselected(items=[item for item, keep in zip(items, belongs, strict=True) if not keep])
        items[:] = [item for item, keep in zip(items, belongs, strict=True) if keep]
    has_gpu = torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("interpreted") is not None and not INTERPRETED:
            if has_gpu:
                item.add_marker(pytest.mark.cuda)
            else:
                why = "needs a CUDA GPU, or TRITON_INTERPRET=1, which Triton reads when it is imported"
                item.add_marker(pytest.mark.skip(reason=why))
        if item.get_closest_marker("cuda") is not None and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def on_the_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests of Triton's kernels make their tensors, and dice, where the kernels run; tensor operations, with which they
    are compared, do not become kernels there."""
    if request.node.get_closest_marker("interpreted") is None or INTERPRETED:
        yield
        return
    dice = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cuda": dice(device))
    monkeypatch.setattr("sharesd.sampling.logits.runs_triton", lambda device: False)
    with torch.device("cuda", torch.cuda.current_device()):
        yield


def _group_of(item: pytest.Item) -> str:
    return next((name for name in ("inductor", "interpreted") if item.get_closest_marker(name) is not None), "others")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note which test runs, for whoever sees this process crash."""
    if "RUNNING_TEST" in os.environ:
        Path(os.environ["RUNNING_TEST"]).write_text(nodeid)
