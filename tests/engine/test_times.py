"""Times of rounds are times that passed, whoever asks: reports, the policy, control of threads and of
prompts. By a clock that is made up.
"""

from __future__ import annotations

from typing import Any

import pytest

from compile.adaptive_threads import STEP_THREADS
from sharesd.sampling_params import SamplingParams
from tests.engine.test_rows import MODES, new
from tests.helpers.fake_time import fake_time

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = SamplingParams(max_new_tokens=250)


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["a CPU", "a device that runs ahead"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("mode", MODES)
def test_rounds_take_the_time_that_passes(
    mode: str, async_scheduling: bool, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new(mode, batch=2, async_scheduling=async_scheduling, max_context=300)
    told: dict[str, float] = {"policy": 0.0, "threads": 0.0, "prompts": 0.0}
    plain_s = 0.0
    record, took = type(engine.variant(LONG).policy).record, engine._scheduler.prefill.record_round_time

    def recorded(self: Any, tree: Any, paths: Any, draft_s: float, step_s: float, moved: float) -> None:
        nonlocal plain_s
        told["policy"] += draft_s + step_s
        plain_s += 0.0 if tree.tokens.shape[1] else draft_s + step_s
        record(self, tree, paths, draft_s, step_s, moved)

    def taken(round_s: float) -> None:
        told["prompts"] += round_s
        took(round_s)

    def record_round(seconds: float, work: float) -> None:
        told["threads"] += seconds

    monkeypatch.setattr(type(engine.variant(LONG).policy), "record", recorded)
    monkeypatch.setattr(STEP_THREADS, "record_round", record_round)
    monkeypatch.setattr(engine._scheduler.prefill, "record_round_time", taken)
    with fake_time(engine, runs_ahead=runs_ahead) as clock:
        began = clock.now
        engine.generate([[1, 2, 3], [4, 5]], LONG)
        passed = clock.now - began
    stats = engine.stats
    assert stats.steps > 50
    assert stats.seconds == pytest.approx(passed, rel=0.01)
    one_by_one = not (async_scheduling and not runs_ahead)  # a CPU has done the next round before this one is read
    assert told["threads"] == pytest.approx(stats.decode_s, rel=0.01)
    if one_by_one:
        assert told["policy"] == pytest.approx(stats.decode_s, rel=0.05)
        assert told["prompts"] == pytest.approx(plain_s, rel=0.05)
    assert mode != "naive" or told["prompts"] == pytest.approx(stats.decode_s, rel=0.01)
