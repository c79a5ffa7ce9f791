"""The stand-in driver tells of broken rules, and of nothing else; what calls give comes back, whatever happens."""

from __future__ import annotations

from functools import partial

import pytest

from tests.stand_in.rules import ALLOWED, RULES, captured, end, nothing_at_all, replay_with_freed_memory
from tests.stand_in.worker import Outcome, run


@pytest.fixture(scope="module", params=["0", "1"], ids=["told", "refused"])
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """By name, of all rules; FAKE_STRICT says what a broken one gives."""
    names = [*ALLOWED, *RULES]
    found = run([partial(captured, name) for name in names], FAKE_DEVICES="2", FAKE_PEER="0", FAKE_STRICT=request.param)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("name", ALLOWED)
def test_nothing_is_told_where_no_rule_is_broken(name: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[name].value and not outcomes[name].trouble


@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_is_told_or_refused(name: str, outcomes: dict[str, Outcome]) -> None:
    assert not outcomes[name].error
    assert outcomes[name].violations or not outcomes[name].value


def test_calls_bring_back_what_they_give() -> None:
    lost, counted, failed, ended, behind = run(
        [replay_with_freed_memory, nothing_at_all, partial(captured, "no such rule"), end, nothing_at_all],
        FAKE_DEVICES="3",
    )
    assert list(lost.violations) == ["a graph is replayed, and memory of its cudaMemcpyAsync has been freed"]
    assert counted.value == 3 and not counted.trouble
    assert "KeyError" in failed.error
    assert "status 3 in this call" in ended.error and "status 3 before this call" in behind.error
