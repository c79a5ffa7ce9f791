"""Times that engines report are held against the clock, wherever a report is made of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmark import interleave, timed
from benchmark.questions.session import measure_turn
from benchmark.timed import TimesDiffer, check_times, generate
from sharesd.engine.outputs import Completion, TokenChunk
from sharesd.engine.stats import Stats
from sharesd.reports.questions import Question
from sharesd.sampling_params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=101)
ROUND_S = 0.005


class Launching:
    """An engine on a GPU of its own clock, whose rounds take 5 ms each."""

    mode = "naive"

    def __init__(
        self, *, async_scheduling: bool, device: str = "cuda", twice: bool = False, lost_s: float = 0.0
    ) -> None:
        """`twice`: a round that is launched ahead is timed from its launch, when the last one had not ended yet.
        `lost_s`: seconds a round that are not reported.
        """
        self.async_scheduling, self._twice, self._lost_s = async_scheduling, twice, lost_s
        self.cache = SimpleNamespace(lengths=SimpleNamespace(device=torch.device(device)))
        self.stats = Stats()
        self.now = 0.0

    def stream(self, prompts: list[list[int]], params: SamplingParams, reuse: bool = False) -> Any:
        self.stats = Stats(num_draft=0, new_tokens=1)
        launched = collected = self.now
        for _ in range(params.max_new_tokens - 1):
            next_launched = self.now  # before the last round has been read
            self.now += ROUND_S
            began = launched if self._twice else max(launched, collected)
            self.stats.record_step(0, 0.0, ROUND_S - self._lost_s, self.now - began - ROUND_S)
            collected, launched = self.now, next_launched if self.async_scheduling else self.now
            self.stats.decoded_tokens += 1
            request: Any = SimpleNamespace(index=0, call=None)
            yield TokenChunk(request, [7], ["target"], [None], "", None, None, None)

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
        for _ in self.stream(prompts, params):
            pass
        self.stats.accept_lengths, self.stats.new_tokens = [[]], 0
        return [Completion(finish_reason="length")]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(engine: Launching) -> Launching:
        for module in (timed, interleave):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: engine.now))
        return engine

    return use


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_true_times_pass(run: Any, async_scheduling: bool) -> None:
    generate(run(Launching(async_scheduling=async_scheduling)), [[1]], PARAMS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rounds_that_are_counted_twice_are_refused(run: Any, device: str) -> None:
    """Timed from their launch, they hold the round before: naive is reported at half its speed."""
    engine = run(Launching(async_scheduling=True, twice=True, device=device))
    with pytest.raises(TimesDiffer) as refused:
        generate(engine, [[1]], PARAMS)
    assert str(refused.value) == (
        "naive: prompts and rounds add up to 0.995 s, but 0.500 s passed; "
        "the figures are wrong, so no report is written"
    )


def test_turns_of_mtbench_are_refused(run: Any) -> None:
    question = Question(id=1, category="writing", turns=("why",))
    engine: Any = run(Launching(async_scheduling=True, twice=True))
    with pytest.raises(TimesDiffer):
        measure_turn(engine, [1], PARAMS, run=1, question=question, turn=1)
    engine = run(Launching(async_scheduling=True))
    assert measure_turn(engine, [1], PARAMS, run=1, question=question, turn=1).decode_s == pytest.approx(0.5)


def test_modes_in_turns_are_refused(run: Any) -> None:
    engine: Any = run(Launching(async_scheduling=True, twice=True))
    with pytest.raises(TimesDiffer, match="naive and naive: "):
        interleave._answers([engine, engine], [[1]], PARAMS)


def test_time_that_nobody_counts_is_refused_on_a_gpu_alone(run: Any) -> None:
    """On a CPU, other programs may have had it."""
    generate(run(Launching(async_scheduling=False, device="cpu", lost_s=0.003)), [[1]], PARAMS)
    with pytest.raises(TimesDiffer, match="add up to 0.200 s, but 0.500 s passed"):
        generate(run(Launching(async_scheduling=False, lost_s=0.003)), [[1]], PARAMS)


def test_a_little_between_the_rounds_passes() -> None:
    stats = Stats(steps=100, verify_s=1.0)
    check_times("naive", [stats], 1.08, on_gpu=True)
    with pytest.raises(TimesDiffer):
        check_times("naive", [stats], 1.10, on_gpu=True)
