"""Requests that come and go while rounds are replayed from graphs, recorded on a CPU: each text is its own, rounds may
be launched ahead, and nothing is captured but in warm-up.
"""

from __future__ import annotations

from typing import Any

import pytest

from compile.cuda_graphs import no_captures
from sharesd.engine import cost_profiler
from sharesd.engine.outputs import Completion
from sharesd.engine.warmup import warm_up, warm_up_all_variants
from sharesd.speculation.cost_model import Costs
from tests.engine.test_rows import GREEDY, REQUESTS, alone, check_load, new
from tests.helpers.recorded_graphs import RecordedGraphs, take_the_way_of_cuda

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT, WIDTH = 24, 5


@pytest.fixture(scope="module")
def wanted() -> list[Completion]:
    return alone(REQUESTS[:COUNT])


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("mode", ["naive", "share", "classic", "hybrid"])
def test_a_load_of_requests_captures_nothing_after_warm_up(
    mode: str, async_scheduling: bool, wanted: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    if async_scheduling and mode == "hybrid":
        pytest.skip("tables draft on the host")
    take_the_way_of_cuda(monkeypatch)
    monkeypatch.setattr(
        cost_profiler, "measure_costs", lambda *_: (Costs({1: 1.0, WIDTH: 1.1}, 0.2, 0.2, {1: 0.0, WIDTH: 0.0}), True)
    )
    graphs = RecordedGraphs()
    options: dict[str, Any] = {"widths": [WIDTH], "prefill_chunk": 16, "auto_length": False}
    options["async_scheduling"] = async_scheduling
    engine = new(mode, batch=3, graphs=graphs, **options)
    warm_up(engine, GREEDY)
    one = len(graphs.recorded)
    warm_up_all_variants(engine)
    assert engine.async_scheduling == async_scheduling and not engine.compact_batch
    assert len(engine._variants) == 6, "greedy, sampled, adjusted; each with log-probabilities, or without"
    assert len(graphs.recorded) == 3 * (one + 1), "drafts are shared where these are all that differs"
    before = graphs.num_replays
    with no_captures():
        check_load(mode, engine, wanted)
    assert graphs.num_replays - before > 30
