"""Tests under the stand-in driver: each asks what a call gave, of those that one process made for all of them."""

from __future__ import annotations

import pytest

from tests.helpers.shared_runtimes import Shared
from tests.stand_in.points import Point, in_order
from tests.stand_in.worker import PYTHON, Outcome, run


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    """Skip all of them where there is no environment to run them in."""
    if not PYTHON.exists():
        pytest.skip("there is no .venv-cuda; bash scripts/cuda_env.sh makes it")


outcomes: dict[Point, Outcome] = {}


@pytest.fixture
def outcome(request: pytest.FixtureRequest, point: Point, shared: Shared) -> Outcome:
    """Outcome of decoding at this point: decoded together with all points of this class on as many GPUs."""
    if point not in outcomes:
        of_class = [item for item in request.session.items if getattr(item, "cls", None) is request.cls]
        wanted = {item.callspec.params["point"] for item in of_class if isinstance(item, pytest.Function)}
        together = in_order([each for each in wanted if each.devices == point.devices and each not in outcomes])
        calls = [each.call(shared) for each in together]
        outcomes.update(zip(together, run(calls, FAKE_DEVICES=str(point.devices), FAKE_PEER="0"), strict=True))
    return outcomes[point]
